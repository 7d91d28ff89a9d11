"""What stands under the key of a value that is stored in parts: its size, how it is divided, and which put stored it.

::

    manifest, 64 bytes, little-endian; its entry has the flag ENTRY_LARGE
    off size field
      0    8 magic
      8    4 format     1
     12    4 parts      how many there are
     16    8 total      bytes of the value
     24    4 part       bytes of each part but the last, which has the rest
     28    4 reserved   0
     32   16 version    random, of this put
     48   16 checksum   BLAKE2b of the key's digest and all of the above

Part *i* is an ordinary entry under BLAKE2b(digest, version, i), so the parts of two puts can never be mixed up, and
spread over all shards. A digest ends as its key's does: there the epoch of a namespace stands (``arena/hashing.py``),
and what ``advance`` makes unreadable are the parts as well.

Whoever may write the arena may forge a manifest, as any value. So all numbers must agree before anything follows from
them. The checksum is no secret: it tells a damaged manifest, and one that was made for another key.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from hashlib import blake2b
from typing import Final, NamedTuple

from ...arena.hashing import TAG_AT
from ...constants import LARGE_BYTES_MAX, VALUE_BYTES_MAX

#: Bytes of a part. 4 MiB would do for speed; fewer and larger parts leave the tables to ordinary values.
PART_BYTES: Final = 16 << 20
#: So many parts at most, whatever a manifest says.
PARTS_MAX: Final = LARGE_BYTES_MAX // PART_BYTES

_MAGIC: Final = b"SiMMmany"
_FORMAT: Final = 1
_HEAD: Final = struct.Struct("<8sIIQII16s")
_CHECKSUM_BYTES: Final = 16
MANIFEST_BYTES: Final = _HEAD.size + _CHECKSUM_BYTES
_PERSON: Final = b"simm manifest"
_PART_PERSON: Final = b"simm part"

assert MANIFEST_BYTES == 64


class Manifest(NamedTuple):
    """How a value is stored in parts."""

    total: int
    part: int
    version: bytes

    @classmethod
    def new(cls, total: int, part: int = PART_BYTES) -> Manifest:
        """Return the manifest of a put of ``total`` bytes, with a version of its own."""
        return cls(total, part, os.urandom(16))

    @property
    def parts(self) -> int:
        """Return the number of parts."""
        return -(-self.total // self.part)

    def encode(self, digest: bytes) -> bytes:
        """Return the entry's bytes, for the key of this digest."""
        head = _HEAD.pack(_MAGIC, _FORMAT, self.parts, self.total, self.part, 0, self.version)
        return head + _checksum(digest, head)

    @classmethod
    def decode(cls, digest: bytes, raw: bytes) -> Manifest | None:
        """Return the manifest in an entry of this key, None if it is none. O(1), whatever it says."""
        if len(raw) != MANIFEST_BYTES:
            return None
        magic, form, parts, total, part, reserved, version = _HEAD.unpack_from(raw)
        if magic != _MAGIC or form != _FORMAT or reserved or raw[_HEAD.size :] != _checksum(digest, raw[: _HEAD.size]):
            return None
        if not 0 < part <= VALUE_BYTES_MAX or not 0 < total <= LARGE_BYTES_MAX or not 0 < parts <= PARTS_MAX:
            return None
        made = cls(total, part, version)
        return made if made.parts == parts else None

    def digest(self, key: bytes, index: int) -> bytes:
        """Return the digest of a part."""
        named = blake2b(key + self.version + index.to_bytes(4, "little"), digest_size=len(key), person=_PART_PERSON)
        return named.digest()[:TAG_AT] + key[TAG_AT:]

    def digests(self, key: bytes) -> list[bytes]:
        """Return the digests of all parts, in order."""
        return [self.digest(key, index) for index in range(self.parts)]

    def bounds(self) -> Iterator[tuple[int, int]]:
        """Yield where each part begins in the value, and its bytes."""
        for start in range(0, self.total, self.part):
            yield start, min(self.part, self.total - start)


def _checksum(digest: bytes, head: bytes) -> bytes:
    return blake2b(digest + head, digest_size=_CHECKSUM_BYTES, person=_PERSON).digest()

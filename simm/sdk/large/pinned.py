"""Pin values in parts: a value is held by pins of all of its parts, as each part is an ordinary entry.

The manifest is read first, then the parts are pinned under their digests, which name the put that stored them. So all
of them are of one version, whatever happens to the key meanwhile. If one of them is not there, the value is a miss, and
nothing of it stays pinned; if it was replaced meanwhile, the search begins again, once.

Parts that find no room among the pins are held by their version alone, as other values are. Once one of those has
changed, a read that touches it is a miss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...host.buffers import Ranges
from .sections import sinks_of
from .values import READS

if TYPE_CHECKING:
    from ..ops.pinner import Pinner
    from ..ops.pins import Pins, Want
    from .manifest import Manifest
    from .values import Large


class PinnedParts:
    """One value, held by its parts."""

    def __init__(self, manifest: Manifest, pins: Pins) -> None:
        self._manifest = manifest
        self._pins = pins

    @property
    def pins(self) -> Pins:
        """Return what holds the parts, in their order."""
        return self._pins

    @property
    def total(self) -> int:
        """Return the bytes of the value."""
        return self._manifest.total

    def divide(self, ranges: Ranges) -> list[Want]:
        """Return what is read of each part. O(ranges + parts that they touch).

        Raises UsageError for ranges that overlap in the value so much that one part would be sent several times over.
        """
        return [(index, sink) for index, _, sink in sinks_of(self._manifest, ranges)]

    def read(self, wants: Sequence[Want]) -> bool:
        """Read what :meth:`divide` returned; return whether all of it was there."""
        return None not in self._pins.read_wants(wants)


def pin_parts(large: Large, pinner: Pinner, pins: Pins, digests: Sequence[bytes]) -> None:
    """Hold those of the keys of ``pins`` whose entries are manifests. An exchange with each worker for each of them."""
    for number in sorted(pins.parted):
        held = _held(large, pinner, pins.keys[number], digests[number])
        if held is not None:
            pins.take_parts(number, held)


def _held(large: Large, pinner: Pinner, key: str, digest: bytes) -> PinnedParts | None:
    """Return a value with all of its parts, or None for a miss."""
    before = b""
    for _ in range(READS):
        manifest = large.manifest(digest)
        if manifest is None or manifest.version == before:
            break
        before = manifest.version
        inner = pinner.pin([key] * manifest.parts, manifest.digests(digest))
        if inner.lengths == [size for _, size in manifest.bounds()]:
            return PinnedParts(manifest, inner)
        inner.release()
    return None

"""Which values of other hosts are copied into this one's arena, and under which digest: the decisions, without I/O.

A key has one owner. A page that all engines read is served by one host, whose network and cores are the limit then.
A *near copy* is an ordinary entry of the same namespace in an arena on the reader's own host. A read whose owner is on
another host looks there first. Copies are made by ``prefetch``, and by the second hit of a value elsewhere.

Where a copy lies
-----------------
Its digest is a hash of the key's digest, with two parts replaced. The *shard* is one that the map gives to the reader's
own node, so the worker accepts the entry as any other, and its readers check the same shard word. The *last four bytes*
are those of the key's digest. There an epoch is, if the namespace has one. So ``advance`` makes a copy unreadable with
its original, by the same comparison and the same lease: no rule of ``cluster/epochs.py`` knows of copies. In a
namespace without epochs these bytes are hash, so nothing is lost: 114 bits stay.

The shard is the first of the node's own at or after a hashed position, on a ring. When some shards move, few copies are
looked for elsewhere. Anybody who has the map can compute the digest for any node, which is how a delete finds them.

What can go wrong
-----------------
* *The original is overwritten.* Readers of a copy do not ask the owner, so they would get the old value. Hence near
  copies are for clients that promise that the value under a key never changes (``near_copies``), as hashes of contents
  promise. A broken promise shows for ``NEAR_S`` at most: a copy is dropped then, used or not.
* *The original is deleted.* A delete of a client with near copies goes to the owner first, and then to all nodes under
  the digests of their copies. A copy that is being made meanwhile was read before the delete, and may be stored after
  it. So whoever stores a copy then asks the owner once more, and drops the copy if the original has gone. What is left
  is a node that cannot be reached, or whose copies lie where an older map put them, and a client that dies between its
  copy and that question: these copies end after ``NEAR_S``. ``tests/models/near.py`` searches all orders of this. A
  delete by a client without near copies leaves copies alone.
* *The original is evicted.* A copy may outlive it, and a get then hits although ``exists`` says that the key is not
  stored. ``exists``, pins and prefixes ask the owner alone.
* *The epoch advances in between.* The copy has the epoch in its digest with which the original was read, so the worker
  refuses it, or its readers do.
* *Copies push out values.* They take a share of an arena at most (``--near-share``, a tenth), and go before all other
  values of their size class.
* *Scans.* One read of each of a million keys must copy nothing. The second hit within the window decides, and the
  window is a table of ``WINDOW`` places, in sets of ``WAYS`` as in a processor's cache. A digest falls into one set,
  and pushes out the oldest there. It cannot grow. With one place in each set, two keys that are read in turns and share
  a place would push each other out for ever, and neither would be copied.
* *A storm of promotions.* At most ``QUEUE_MAX`` keys wait, a full queue drops, and one thread works them off.
* *A shard that moves* takes its entries along. Copies are left behind (``ipc/arena_lister.py``): on another host they
  are no copies of use.

Costs: a read elsewhere computes a hash and looks into one arena, some microseconds beside a round trip of a hundred. A
promotion reads the value once more, as the caller's buffer is the caller's again when the call has returned.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Final

from ...arena.hashing import SHARD_MASK, TAG_AT
from ...constants import SHARD_COUNT

#: Places of the window, and those of one set. Powers of two.
WINDOW: Final = 4096
WAYS: Final = 4
#: Keys that may wait to be copied.
QUEUE_MAX: Final = 4096

_PERSON: Final = b"simm near"
#: Bits of a digest's first two bytes that are no part of the shard.
_REST: Final = 0xFFFF & ~SHARD_MASK

assert WINDOW & (WINDOW - 1) == 0 == WAYS & (WAYS - 1) and SHARD_MASK == SHARD_COUNT - 1


def near_digest(digest: bytes, shards: Sequence[int]) -> bytes:
    """Return the digest of a key's copy in the arenas that own ``shards``, ascending and not empty. O(log shards)."""
    hashed = blake2b(digest, digest_size=TAG_AT, person=_PERSON).digest()
    word = hashed[0] | hashed[1] << 8
    at = bisect_left(shards, word & SHARD_MASK)
    shard = shards[at if at < len(shards) else 0]
    return (word & _REST | shard).to_bytes(2, "little") + hashed[2:] + digest[TAG_AT:]


class Promotion:
    """Which keys to copy, in their order. One thread at a time may call it."""

    def __init__(self, window: int = WINDOW, most: int = QUEUE_MAX) -> None:
        self._seen = array("Q", [0]) * window
        self._mask: Final = window - WAYS
        self._most: Final = most
        #: The keys that wait. A dict, as it keeps their order and finds a key that waits already.
        self._waiting: dict[bytes, None] = {}
        #: Keys that a full queue has dropped.
        self.dropped = 0

    def __len__(self) -> int:
        """Return how many keys wait."""
        return len(self._waiting)

    def hit(self, digest: bytes) -> bool:
        """Note a hit elsewhere; return whether it was the second of this key, so that it waits now. O(1)."""
        # Bytes that are hash in every digest: the first two name the shard, and the last four the epoch.
        tag = int.from_bytes(digest[4:TAG_AT], "little")
        at = tag & self._mask
        ways = self._seen[at : at + WAYS]
        if tag not in ways:
            ways.insert(0, tag)
            self._seen[at : at + WAYS] = ways[:WAYS]
            return False
        self._seen[at + ways.index(tag)] = 0  # if the copy is not made, two more hits ask for it again
        return self.add(digest)

    def add(self, digest: bytes) -> bool:
        """Let a key wait; return False if the queue is full. One that waits already is no second one. O(1)."""
        if digest in self._waiting:
            return True
        if len(self._waiting) >= self._most:
            self.dropped += 1
            return False
        self._waiting[digest] = None
        return True

    def take(self, most: int) -> list[bytes]:
        """Return up to ``most`` keys, those first that have waited longest. They wait no more. O(``most``)."""
        taken = [digest for digest, _ in zip(self._waiting, range(most))]
        for digest in taken:
            del self._waiting[digest]
        return taken

    def forget(self, digests: Iterable[bytes]) -> None:
        """Let these keys wait no more: they were deleted. O(digests)."""
        for digest in digests:
            self._waiting.pop(digest, None)

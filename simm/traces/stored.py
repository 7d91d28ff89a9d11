"""SiMM's own policies in the simulation: the real `simm.arena.space.Space`, with a dictionary in place of the table.

Allocator, size classes, extents and eviction are those of a server; only the bytes of the values are missing. A hit
stores the visited byte, as a reader does. A put of a stored block replaces its value, as a client's put does.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b
from typing import Final

from ..arena.queues import KeyWords
from ..arena.space import Space
from ..constants import SLAB_BYTES
from .cache import Cache

#: Bytes of a unit: every size of whole pages up to a slab class's largest is a class of its own. A small room has
#: larger units, as what is fresh is a share of the whole region, also of the part that the room leaves over.
UNIT_BYTES: Final = 4096
SMALL_ROOM: Final = 4096
SMALL_ROOM_UNIT_BYTES: Final = 32_768


class Stored(Cache):
    """A server's data region with room for exactly ``room`` units, as far as one size is stored.

    The region has whole slabs. What is left beyond the room is allocated at the start and never published, so that
    nothing is stored there.
    """

    def __init__(self, room: int, policy: str, unit_bytes: int = 0) -> None:
        super().__init__(room)
        unit_bytes = unit_bytes or (UNIT_BYTES if room >= SMALL_ROOM else SMALL_ROOM_UNIT_BYTES)
        self._unit_bytes = unit_bytes
        slabs = -(-room // (SLAB_BYTES // unit_bytes))
        slots = slabs * (SLAB_BYTES // unit_bytes) + 1
        self.visited = bytearray(slots)
        self._slots: dict[int, int] = {}
        self._blocks: dict[int, int] = {}
        self._free = list(range(slots))
        self._words = array("Q", [0]) * slots
        keys = KeyWords(self._words, 1, 0)
        self.space = Space(slabs * SLAB_BYTES, slots, memoryview(self.visited), policy, self._evict, keys)
        for _ in range(slabs * (SLAB_BYTES // unit_bytes) - room):
            self.space.allocate(unit_bytes)

    def _evict(self, slot: int) -> None:
        del self._slots[self._blocks.pop(slot)]
        self._free.append(slot)
        self.space.release(self.space.offset(slot))

    def __contains__(self, block: int) -> bool:
        return block in self._slots

    def hit(self, block: int) -> None:
        self.visited[self._slots[block]] = 1

    def put(self, block: int, units: int) -> None:
        space = self.space
        offset = space.allocate(units * self._unit_bytes)
        if offset < 0:
            return
        slot = self._slots.get(block)  # the allocation may have evicted it
        if slot is None:
            slot = self._slots[block] = self._free.pop()
            self._blocks[slot] = block
            self._words[slot] = int.from_bytes(blake2b(b"%d" % block, digest_size=8).digest(), "little")
            space.publish(offset, slot)
        else:
            space.replace(space.offset(slot), offset, slot)

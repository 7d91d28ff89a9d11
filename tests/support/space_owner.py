"""A space's owner in tests: the table's part, and a reference model that knows every interval."""

from __future__ import annotations

from simm.arena.space import Space
from simm.constants import DEFAULT_POLICY, NO_SLOT, SLAB_BYTES, SLAB_CHUNK_BYTES_MAX
from simm.slab import chunk_bytes_for
from tests.support.consistency import check


class Chunk:
    """The model's record of an allocated chunk."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.slot = NO_SLOT
        self.holds = 0
        self.detached = False


class Owner:
    """The table's part, and a reference model: every allocated chunk by offset, and the slots' chunks."""

    def __init__(self, size: int, slots: int, policy: str = DEFAULT_POLICY, kind: type[Space] = Space) -> None:
        self.size = size
        self.visited = bytearray(slots)
        self.chunks: dict[int, Chunk] = {}
        self.slots: dict[int, int] = {}
        self.free_slots = list(range(slots))
        self.evicted: list[int] = []
        self.space = kind(size, slots, memoryview(self.visited), policy, self.on_evict)

    def on_evict(self, slot: int) -> None:
        offset = self.slots[slot]
        assert not self.chunks[offset].holds, "a held chunk was evicted"
        self.evicted.append(slot)
        self.release(slot)

    def release(self, slot: int) -> None:
        offset = self.slots.pop(slot)
        self.free_slots.append(slot)
        self.space.release(offset)
        self.gone(offset)

    def gone(self, offset: int) -> None:
        chunk = self.chunks[offset]
        if chunk.holds:
            chunk.detached, chunk.slot = True, NO_SLOT
        else:
            del self.chunks[offset]

    def grant(self, n: int) -> int:
        """Allocate and compare with the model; return the offset or -1."""
        possible = self.possible(n)
        self.evicted.clear()
        offset = self.space.allocate(n)
        assert (offset >= 0) == possible
        if offset < 0:
            assert not self.evicted, "evicted in vain"
            return -1
        size = chunk_bytes_for(n)
        assert 0 <= offset <= self.size - size
        assert all(o + c.size <= offset or offset + size <= o for o, c in self.chunks.items()), "overlap"
        self.chunks[offset] = Chunk(size)
        return offset

    def possible(self, n: int) -> bool:
        """Whether room can be made, from nothing but the intervals."""
        need = chunk_bytes_for(n)
        fenced: set[tuple[int, int]] = set()
        slabs: dict[int, list[Chunk]] = {}
        for offset, chunk in self.chunks.items():
            stuck = chunk.slot == NO_SLOT or chunk.holds > 0
            if chunk.size > SLAB_CHUNK_BYTES_MAX:
                if stuck:
                    fenced.add((offset, offset + chunk.size))
            else:
                base = offset - offset % SLAB_BYTES
                slabs.setdefault(base, []).append(chunk)
                if stuck:
                    fenced.add((base, base + SLAB_BYTES))
        if need <= SLAB_CHUNK_BYTES_MAX:
            for chunks in slabs.values():
                if chunks[0].size == need and (
                    len(chunks) < SLAB_BYTES // need or any(c.slot != NO_SLOT and not c.holds for c in chunks)
                ):
                    return True
        position = 0
        for start, end in [*sorted(fenced), (self.size, self.size)]:
            low = position if need > SLAB_CHUNK_BYTES_MAX else -(-position // SLAB_BYTES) * SLAB_BYTES
            if low + (need if need > SLAB_CHUNK_BYTES_MAX else SLAB_BYTES) <= start:
                return True
            position = end
        return False

    def publish(self, offset: int) -> int:
        slot = self.free_slots.pop()
        self.space.publish(offset, slot)
        self.chunks[offset].slot = slot
        self.slots[slot] = offset
        return slot

    def replace(self, slot: int, new: int) -> None:
        old = self.slots[slot]
        self.space.replace(old, new, slot)
        self.slots[slot] = new
        self.chunks[new].slot = slot
        self.gone(old)

    def drop(self, offset: int) -> None:
        self.space.drop(offset)
        self.gone(offset)

    def hold(self, offset: int) -> None:
        self.space.hold(offset)
        self.chunks[offset].holds += 1

    def unhold(self, offset: int) -> None:
        self.space.unhold(offset)
        chunk = self.chunks[offset]
        chunk.holds -= 1
        if not chunk.holds and chunk.detached:
            del self.chunks[offset]

    def granted(self) -> list[int]:
        return [o for o, c in self.chunks.items() if c.slot == NO_SLOT and not c.detached]

    def compare(self) -> None:
        check(self.space)
        assert self.space._allocator.used_bytes == sum(chunk.size for chunk in self.chunks.values())
        for offset, chunk in self.chunks.items():
            assert self.space._allocator.owner(offset) == chunk.slot
            assert self.space._allocator.chunk_bytes(offset) == chunk.size
            assert self.space.is_held(offset) == (chunk.holds > 0)
        for slot, offset in self.slots.items():
            assert self.space._offsets[slot] == offset

"""GET of ranges over RDMA: a value's slot and word as ever, and READs of the ranges alone between them.

``sdk/rdma_get.py`` has the steps, and ``rdma/remote_arena.py`` argues what confirms a value. All ranges of a value are
READ for one image of its slot, and count together if that image is confirmed. So they are parts of one value, however
many chains and queue pairs they took.

A range whose memory is registered arrives there; the others pass through a staging block, and are copied out of it once
they are confirmed. A value whose ranges need more than a block slides through all blocks. A value with STRIPE_BYTES or
more of ranges, all in registered memory, is striped over the queue pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...constants import SLOT_BYTES
from ...host.buffers import Copier, Part, Ranges, Span, fits
from ...host.parts import extents, scatter, section
from ...ipc.steps import Steps
from ...rdma.api import FENCED_READ, READ, Op, Rail
from ...rdma.remote_arena import CachedEntry
from ...rdma.staging import BLOCK_BYTES, StagingBuffer
from ..batch import Batch, misfit
from ..rdma_connection import PairedLink
from ..rdma_get import GROUP_BYTES, GROUP_BYTES_LEAST, GROUPS, LOOKUP_LEAST, KeyGroup, Reading, pieces_at
from ..rdma_pool import RdmaPath
from ..rdma_transfer import STRIPE_BYTES, key_of, unregistered


def read(
    path: RdmaPath, positions: Sequence[int], batch: Batch, copier: Copier, counters: dict[str, int]
) -> Steps[tuple[list[int], float]]:
    """Read ranges of the values at ``positions``, and fill in results, as ``rdma_get.read`` does for whole values."""
    reading = RangeReading(batch, copier, None)
    left = yield from reading.counted(path, positions, counters)
    return left, reading.tcp_until


#: What a version of an entry is known by: its arena's generation, its slot, that one's seq, its length and its crc.
#: Each slot counts by itself and begins anew with each arena, so a key that is stored again elsewhere may get the seq
#: that it had before.
Version = tuple[int, int, int, int, int]


def read_versions(
    path: RdmaPath, batch: Batch, versions: Sequence[Version], copier: Copier, counters: dict[str, int]
) -> Steps[list[int]]:
    """Read ranges of these versions of all values of a batch, and of no others; fill in the results of hits.

    Return the positions of all others.
    """
    reading = VersionReading(batch, copier, versions)
    positions = range(len(batch.digests))
    yield from reading.counted(path, positions, counters)
    return [position for position in positions if batch.results[position] <= 0]


class RangeReading(Reading):
    """One call's reads of ranges on one connection."""

    def _prepare(self) -> None:
        super()._prepare()
        #: By position: the parts that come by the block of its group, with their offsets there.
        self._staged: dict[int, list[Part]] = {}

    def needs_blocks(self, positions: Sequence[int]) -> bool:
        """Return whether some ranges go to memory that is not registered with all devices in use."""
        keepers = (keeper for position in positions for _, _, _, keeper in self._ranges(position).parts)
        return unregistered(keepers, self.links)

    def _ranges(self, position: int) -> Ranges:
        sink = self.sinks[position]
        assert isinstance(sink, Ranges)
        return sink

    def _sort_all(self, positions: Sequence[int]) -> None:
        size = 0
        for position in positions:
            entry = self.locations.get(self.digests[position])
            if entry is None:
                self._unknown.append(position)
            else:
                size += self._ranges(position).total
                self._sort(position, entry)
        self._group_bytes = min(GROUP_BYTES, max(GROUP_BYTES_LEAST, size // GROUPS))
        self._lookup_keys = min(self.connection.keys, max(LOOKUP_LEAST, -(-len(self._unknown) // GROUPS)))

    def _is_large(self, position: int, entry: CachedEntry, several: bool) -> bool:
        return self._ranges(position).total >= STRIPE_BYTES

    def _sort(self, position: int, entry: CachedEntry) -> None:
        ranges = self._ranges(position)
        if not fits(entry.length, ranges):
            self._known.append((position, entry))  # to be confirmed, without its bytes
        elif sum(length for _, length, _, keeper in ranges.parts if not _registered(keeper)) > BLOCK_BYTES:
            self._large.append((position, entry))
        elif (
            ranges.total >= STRIPE_BYTES and len(self.links) > 1
            and all(_registered(keeper) for _, _, _, keeper in ranges.parts)
        ):  # fmt: skip
            self._striped.append((position, entry))
        else:
            self._known.append((position, entry))

    def _fetch_known(self) -> bool:
        group = KeyGroup(self.next_link(), self._pages.pop())
        known, size = self._known, 0
        while known and len(group.entries) < self.connection.keys and size < self._group_bytes:
            group.entries.append(known.popleft())
            size += self._ranges(group.entries[-1][0]).total
        if self._fetch(group):
            return True
        self._pages.append(group.page)
        return False

    def _fetch(self, group: KeyGroup) -> bool:
        """Post a group's fetch. Return False, with all its entries queued again, if it needs a block and none is free.
        """
        link, page = group.link, group.page
        ops: list[Op] = []
        slots: list[Op] = []
        word_at, between_at, image_at, used = page.words, page.between, page.images, 0
        kind = FENCED_READ
        for position, entry in group.entries:
            ranges = self._ranges(position)
            parts = ranges.parts if fits(entry.length, ranges) else []
            keys = [_key(keeper, link.rail) for _, _, _, keeper in parts]
            need = sum(part[1] for part, key in zip(parts, keys) if not key)
            if need > BLOCK_BYTES:  # memory that could not be registered
                self._large.append((position, entry))
                continue
            if group.items and len(ops) + len(slots) + len(parts) > link.depth // 2:
                self._known.append((position, entry))  # with the next group, so that this one is not in several chains
                continue
            if need and not self._has_room(group, used, need):
                self._known.append((position, entry))
                continue
            self._head(ops, link, entry, word_at, between_at)
            staged: list[Part] = []
            for (offset, length, address, keeper), key in zip(parts, keys):
                local = address
                if not key:
                    assert group.block is not None
                    local, key = group.block.address + used, key_of(group.block, link)
                    staged.append((used, length, address, keeper))
                    used += length
                ops += pieces_at(link, entry, offset, length, local, key)
            self._staged[position] = staged
            where = entry.at(link.region_map)
            slots.append((kind, image_at, link.lkey, SLOT_BYTES, where.slot, where.slot_key))
            kind = READ
            group.items.append((position, entry, ranges.total if parts else 0, -1))
            word_at += 8
            between_at += SLOT_BYTES
            image_at += SLOT_BYTES
        group.entries = []
        if not group.items:
            self.free_block(group)
            return False
        self._send(group, ops + slots)
        return True

    def _has_room(self, group: KeyGroup, used: int, need: int) -> bool:
        """Return whether a group has a block with room for so many more bytes; get it one if it has none."""
        if group.block is None:
            self.borrow()
            if not self._free_blocks:  # groups in flight have them all
                return False
            group.block = self._free_blocks.pop()
        return used + need <= BLOCK_BYTES

    def _fetch_striped(self, position: int, entry: CachedEntry) -> None:
        """Post the ranges of a value on all queue pairs, into the caller's memory."""
        ranges, links = self._ranges(position), self.links
        keys = [[_key(keeper, link.rail) for _, _, _, keeper in ranges.parts] for link in links]
        if not all(map(all, keys)):
            self._large.append((position, entry))
            return
        group = KeyGroup(self.next_link(), self._pages.pop())
        chains: list[list[Op]] = [[] for _ in links]
        self._head(chains[links.index(group.link)], group.link, entry, group.page.words, group.page.between)
        turn = 0
        for number, (offset, length, address, _) in enumerate(ranges.parts):
            for at in range(0, length, STRIPE_BYTES):
                to = turn % len(links)
                turn += 1
                part = min(STRIPE_BYTES, length - at)
                chains[to] += pieces_at(links[to], entry, offset + at, part, address + at, keys[to][number])
        for link, ops in zip(links, chains):
            if ops:
                group.waits.append((link, link.post(ops, self.until)))
        group.slot_behind = True
        group.items = [(position, entry, ranges.total, -1)]
        self._staged[position] = []
        self._in_flight.append(group)

    def _read_large(self, position: int, entry: CachedEntry) -> None:
        """Read ranges into unregistered memory, through all blocks. No group is in flight."""
        ranges = self._ranges(position)
        group = KeyGroup(self.links[0], self._pages[-1])
        group.items = [(position, entry, ranges.total, -1)]
        self._staged[position] = []

        def build(link: PairedLink, block: StagingBuffer, at: int, size: int) -> list[Op]:
            key = key_of(block, link)
            ops: list[Op] = []
            local = block.address
            for offset, length in extents(ranges, at, size):
                ops += pieces_at(link, entry, offset, length, local, key)
                local += length
            return ops

        def drain(block: StagingBuffer, at: int, size: int) -> None:
            scatter(section(ranges, at, size), block.view, block.address, 0, self._copier)

        self._through_blocks(group, build, drain)

    def _deliver(self, position: int, entry: CachedEntry, length: int, group: KeyGroup | None, at: int) -> None:
        ranges = self._ranges(position)
        self.settled.add(position)
        self.locations.put(self.digests[position], entry)
        if not length:
            self.results[position] = misfit(entry.length, ranges)
            return
        self.count(length)
        staged = self._staged.pop(position)
        if staged:
            assert group is not None and group.block is not None
            scatter(Ranges(staged, 0, length), group.block.view, group.block.address, 0, self._copier)
        self.hits += 1
        self.results[position] = entry.length


class VersionReading(RangeReading):
    """Ranges of given versions. A slot that has another one by now leaves its key to the caller."""

    def __init__(self, batch: Batch, copier: Copier, versions: Sequence[Version]) -> None:
        super().__init__(batch, copier, None)
        self._versions = versions

    def _is_wanted(self, position: int, entry: CachedEntry) -> bool:
        seq = int.from_bytes(entry.image[:8], "little")
        generation = self.connection.arena.generation
        return (generation, entry.slot, seq, entry.length, entry.crc) == self._versions[position]

    def _sort_all(self, positions: Sequence[int]) -> None:
        generation, mine = self.connection.arena.generation, []
        for position in positions:
            if self._versions[position][0] != generation:  # nothing of it is here, and what is cached is for others
                self.left.append(position)
                continue
            mine.append(position)
            entry = self.locations.get(self.digests[position])  # it may be older or newer than the version
            if entry is not None and not self._is_wanted(position, entry):
                self.locations.drop(self.digests[position])
        super()._sort_all(mine)

    def _sort(self, position: int, entry: CachedEntry) -> None:
        if self._is_wanted(position, entry):
            super()._sort(position, entry)
        else:
            self.left.append(position)

    def _fetch(self, group: KeyGroup) -> bool:
        entries, group.entries = group.entries, []
        for position, entry in entries:
            if self._is_wanted(position, entry):
                group.entries.append((position, entry))
            else:
                self.left.append(position)
        return super()._fetch(group)


def _registered(keeper: Any) -> bool:
    return type(keeper) is Span and keeper.registration is not None


def _key(keeper: Any, rail: Rail) -> int:
    """Return the lkey of a range's memory; 0 if it must be staged."""
    registration = keeper.registration if type(keeper) is Span else None
    return 0 if registration is None else registration.lkey(rail) or 0

"""GET and EXISTS over RDMA: many keys in few chains, with the network never idle.

docs/architecture.md, "GET", has the two steps of a read, *lookup* and *fetch*, and ``rdma/remote_arena.py`` argues what
confirms a value. Keys travel in *groups* of up to PAGE_KEYS, each on one queue pair, with a page of the connection's
scratch memory; a group of cached keys takes the second step only. The next chains are posted before this one is waited
for, so one group's sets are looked up while another one's values arrive.

A value of STRIPE_BYTES and more is a group of its own if the connection has several queue pairs. A large value for
unregistered memory slides through the call's staging blocks. READs into the caller's own memory arrive before they are
confirmed, as on the other paths: the result says whether to use the bytes.

A key that changed in flight starts over without its cached entry, ATTEMPTS times at most. TCP handles what is neither a
confirmed hit nor a miss, and every key that was not settled when the connection broke.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from ..constants import SET_BYTES, SLOT_BYTES
from ..host.buffers import RELEASE_BYTES, Copier, Span, address_of, fits
from ..host.parts import HOST_TYPES
from ..ipc.steps import Steps, finish
from ..net.allowance import allowed
from ..rdma.api import FENCED_READ, READ, WRITE, Op
from ..rdma.remote_arena import CachedEntry, RemoteAddresses, confirmed
from ..rdma.staging import BLOCK_BYTES, StagingBuffer
from ..wire.shard_set import FROZEN, MOVING
from .batch import MISS, Batch, Sink, misfit
from .rdma_connection import Page, PairedLink, RdmaConnection
from .rdma_pool import RdmaPath
from .rdma_transfer import (
    DEEP,
    SHARE,
    STRIPE_BYTES,
    Build,
    Drain,
    Group,
    Transfer,
    add_pieces,
    chain_wait,
    key_of,
    stripes,
    unregistered,
)

log = logging.getLogger("simm.client")

ATTEMPTS: Final = 3
#: The least number of groups of a call, unless they become small. While one group is in flight the next one is made and
#: the previous one is checked; with a single group, network and processor would take turns.
GROUPS: Final = 4
#: Bytes of the values in one group: the most (except for a single value), and what counts as small.
GROUP_BYTES: Final = 4 << 20
GROUP_BYTES_LEAST: Final = 256 << 10
#: A lookup with this many keys or fewer counts as small.
LOOKUP_LEAST: Final = 12
#: The least time between two stores of a slot's visited byte, seconds.
TOUCH_S: Final = 1.0

_MOVING: Final = MOVING
_FROZEN: Final = FROZEN
_2SETS: Final = 2 * SET_BYTES


#: Whether bytes match their CRC; None to skip that.
Check = Callable[[int, int, Any], bool] | None


def read(
    path: RdmaPath, positions: Sequence[int], batch: Batch, copier: Copier, check: Check, counters: dict[str, int]
) -> Steps[tuple[list[int], float]]:
    """Read the keys at ``positions``, or find out whether they are stored, and fill in results, in steps.

    Return the positions that TCP must handle, and until when (monotonic seconds). Counts only what is RDMA's own.
    """
    reading = Reading(batch, copier, check)
    sinks = batch.sinks
    if sinks is None:
        left = yield from reading.run(path, positions, counters)
        return left, reading.tcp_until
    elsewhere = [position for position in positions if type(sinks[position]) not in HOST_TYPES]
    if elsewhere:  # a device, whose buffers know how RDMA reaches them
        positions = [position for position in positions if type(sinks[position]) in HOST_TYPES]
    left = (yield from reading.counted(path, positions, counters)) if positions else []
    if elsewhere:

        def read_host(part: Sequence[int], hosts: Any, got: dict[int, Any]) -> list[int]:
            staged = Batch(batch.digests, hosts)
            missed = finish(read(path, part, staged, copier, check, counters))[0]
            got.update((position, staged.results[position]) for position in part)
            return missed

        # The CPU cannot check values in a device's memory.
        rails = path.rails if check is None else ()
        left += sinks[elsewhere[0]].read_remote(read_host, elsewhere, sinks, batch.results, rails)  # type: ignore[union-attr]
        reading.path, reading.until = path, time.monotonic() + allowed(path.deadline_s) * SHARE
    return left, reading.tcp_until


class KeyGroup(Group):
    """Keys whose lookup or fetch is in flight."""

    __slots__ = ("entries", "items", "keys", "page", "slot_behind", "whole")

    def __init__(self, link: PairedLink, page: Page) -> None:
        super().__init__(link)
        self.page = page
        #: To look up.
        self.keys: list[int] = []
        #: To fetch.
        self.entries: list[tuple[int, CachedEntry]] = []
        #: Fetched: (position, entry, bytes, offset in the block or -1 if in the caller's memory or in ``whole``).
        self.items: list[tuple[int, CachedEntry, int, int]] = []
        #: A large value whose sink is None.
        self.whole: bytearray | None = None
        #: The slot is READ once all waits are done.
        self.slot_behind = False


class Reading(Transfer):
    """One call's reads on one connection. Without ``sinks`` it only asks whether the keys are stored."""

    def __init__(self, batch: Batch, copier: Copier, check: Check) -> None:
        super().__init__(copier, batch.digests)
        self._check = check
        self._only_exists = batch.sinks is None
        self.sinks: Sequence[Sink] = batch.sinks or ()
        self.results = batch.results
        self.settled: set[int] = set()
        #: For TCP, though the connection is sound.
        self.left: list[int] = []
        self.hits = self.retries = 0

    def counted(self, path: RdmaPath, positions: Sequence[int], counters: dict[str, int]) -> Steps[list[int]]:
        """Do :meth:`run`, and count the hits and retries."""
        left = yield from self.run(path, positions, counters)
        counters["rdma_gets"] += self.hits
        counters["rdma_retries"] += self.retries
        return left

    def begin(self, connection: RdmaConnection, until: float) -> None:
        """Use this connection until ``until``."""
        super().begin(connection, until)
        self.locations = connection.locations
        self.now = time.monotonic()

    def _prepare(self) -> None:
        """Make what a single read in one chain does not need."""
        self._tries: dict[int, int] = {}
        self._pages = list(self.connection.pages)
        self._in_flight: deque[KeyGroup] = deque()
        #: Keys without a cached entry; with one; with one and striped; with one and too large for a block.
        self._unknown: deque[int] = deque()
        self._known: deque[tuple[int, CachedEntry]] = deque()
        self._striped: deque[tuple[int, CachedEntry]] = deque()
        self._large: list[tuple[int, CachedEntry]] = []
        self._group_bytes = GROUP_BYTES
        self._lookup_keys = self.connection.keys

    def left_over(self, positions: Sequence[int], done: bool) -> list[int]:
        """Return the positions that TCP must handle."""
        return self.left if done else [position for position in positions if position not in self.settled]

    def needs_blocks(self, positions: Sequence[int]) -> bool:
        """Return whether some values go to memory that is not registered with all devices in use."""
        return not self._only_exists and unregistered(map(self.sinks.__getitem__, positions), self.links)

    def carry_out(self, positions: Sequence[int]) -> Steps[None]:
        """Read all. Raises TransportError; ``settled`` has the positions that were settled by then."""
        if len(positions) == 1 and not self._only_exists and self._read_one(positions[0]):
            return
        self._prepare()
        if self._only_exists:
            self._unknown.extend(positions)
        else:
            self._sort_all(positions)
        in_flight, deep = self._in_flight, DEEP * len(self.links)
        while True:
            while len(in_flight) < deep and self._pages and self._post_next():
                pass
            if in_flight:
                yield chain_wait(self, in_flight[0])
                self._advance(in_flight.popleft())
            elif not (self._known or self._unknown or self._striped):
                break
        for position, entry in self._large:
            self._read_large(position, entry)
        if len(self.settled) + len(self.left) != len(positions):  # no key may get lost silently
            missing = set(positions) - self.settled - set(self.left)
            log.error("%d keys got lost on their way: left to TCP", len(missing))
            self.left += missing

    def _sort_all(self, positions: Sequence[int]) -> None:
        """Decide how each key is read, and how large the groups are."""
        digests, get, size = self.digests, self.locations.get, 0
        for position in positions:
            entry = get(digests[position])
            if entry is None:
                self._unknown.append(position)
            else:
                size += entry.length
                self._sort(position, entry)
        self._group_bytes = min(GROUP_BYTES, max(GROUP_BYTES_LEAST, size // GROUPS))
        self._lookup_keys = min(self.connection.keys, max(LOOKUP_LEAST, -(-len(self._unknown) // GROUPS)))

    def _sort(self, position: int, entry: CachedEntry) -> None:
        """Decide how a value with a cached entry is read."""
        length = entry.length
        sink = self.sinks[position]
        if sink is not None and not fits(length, sink):
            self._known.append((position, entry))  # to be confirmed, without its bytes
        elif length > BLOCK_BYTES and not _registered(sink):
            self._large.append((position, entry))
        elif length >= STRIPE_BYTES and len(self.links) > 1 and _registered(sink):
            self._striped.append((position, entry))
        else:
            self._known.append((position, entry))

    def _post_next(self) -> bool:
        """Start another group; return False if there is none, or no room before others are done."""
        if self._known:
            return self._fetch_known()
        if self._unknown:
            self._lookup()
            return True
        if self._striped:
            self._fetch_striped(*self._striped.popleft())
            return True
        return False

    def _advance(self, group: KeyGroup) -> None:
        """Wait for a group and take its next step."""
        self.wait(group)
        if group.keys:
            self._looked_up(group)
            if group.entries and self._fetch(group):
                return
        elif group.slot_behind:
            group.slot_behind = False
            link, entry = group.link, group.items[0][1]
            where = entry.at(link.region_map)
            slot: Op = (READ, group.page.images, link.lkey, SLOT_BYTES, where.slot, where.slot_key)
            self._send(group, [slot])
            return
        else:
            self._confirm(group)
        self.free_block(group)
        self._pages.append(group.page)

    def _send(self, group: KeyGroup, ops: list[Op]) -> None:
        """Post a group's next chain."""
        group.waits = [(group.link, group.link.post(ops, self.until))]
        self._in_flight.append(group)

    # -- lookup -------------------------------------------------------------------------------------

    def _lookup(self) -> None:
        """Post the lookup of some keys."""
        link, page, unknown = self.next_link(), self._pages.pop(), self._unknown
        group = KeyGroup(link, page)
        keys = group.keys
        while unknown and len(keys) < self._lookup_keys:
            keys.append(unknown.popleft())
        digests, lkey = self.digests, link.lkey
        sets, meta = self.connection.arena.sets, link.region_map.meta
        sets_at, word_at = page.sets, page.words
        ops: list[Op] = []
        for position in keys:
            first, second, word = sets(digests[position])
            address, rkey = meta(first, SET_BYTES)
            ops.append((READ, sets_at, lkey, SET_BYTES, address, rkey))
            address, rkey = meta(second, SET_BYTES)
            ops.append((READ, sets_at + SET_BYTES, lkey, SET_BYTES, address, rkey))
            address, rkey = meta(word, 8)
            ops.append((READ, word_at, lkey, 8, address, rkey))
            sets_at += _2SETS
            word_at += 8
        self._send(group, ops)

    def _looked_up(self, group: KeyGroup) -> None:
        """Take a lookup's answers: entries to fetch, misses, and keys that TCP handles."""
        connection, page, digests = self.connection, group.page, self.digests
        memory, words, arena = connection.memory, connection.words, connection.arena
        at, word_at = page.sets_at, page.words_at
        several = len(self.links) > 1
        touches: list[Op] = []
        for position in group.keys:
            digest = digests[position]
            way = arena.find(memory, at, digest)
            if way < 0:
                if 0 < words[word_at] < _MOVING:
                    self.results[position] = MISS
                    self.settled.add(position)
                else:
                    self.left.append(position)
            elif self._only_exists:
                entry = arena.entry(memory, at, digest, way)
                if 0 < words[word_at] < _FROZEN and (entry is not None or not arena.is_for_stream(memory, at, way)):
                    self.results[position] = 1
                    self.settled.add(position)
                    self._exists(group.link, entry, digest, touches)
                else:
                    self.left.append(position)
            else:
                entry = arena.entry(memory, at, digest, way)
                if entry is None:
                    self._again(position)
                elif entry.length >= STRIPE_BYTES and self._is_large(position, entry, several):
                    self._sort(position, entry)
                else:
                    group.entries.append((position, entry))
            at += _2SETS
            word_at += 1
        group.keys = []
        if touches:
            group.link.post(touches, self.until)  # not waited for: the byte that it sends never changes

    def _is_large(self, position: int, entry: CachedEntry, several: bool) -> bool:
        """Return whether a value of STRIPE_BYTES or more is a group of its own, or must be sorted anyway."""
        return several or entry.length > BLOCK_BYTES

    def _exists(self, link: PairedLink, entry: CachedEntry | None, digest: bytes, touches: list[Op]) -> None:
        """Cache the entry of a stored key, and mark it as visited."""
        if entry is None:
            return
        known = self.locations.get(digest)
        if known is None or known.image != entry.image:
            self.locations.put(digest, entry)
            known = entry
        if self.now - known.touched >= TOUCH_S:
            touches.append(self._touch(link, known, known.at(link.region_map)))

    def _again(self, position: int) -> None:
        """Look a key up again that changed in flight, or leave it to TCP."""
        self.retries += 1
        tries = self._tries.get(position, 0) + 1
        self._tries[position] = tries
        if tries < ATTEMPTS:
            self._unknown.append(position)
        else:
            self.left.append(position)

    # -- chains -------------------------------------------------------------------------------------

    def _touch(self, link: PairedLink, entry: CachedEntry, where: RemoteAddresses) -> Op:
        """Return the WRITE that marks an entry as visited for the eviction policy."""
        entry.touched = self.now
        return WRITE, self.connection.one, link.lkey, 1, where.visited, where.visited_key

    def _head(
        self, ops: list[Op], link: PairedLink, entry: CachedEntry, word_at: int, between_at: int
    ) -> RemoteAddresses:
        """Append the operations before a value: the shard word, and the slot unless the entry is proved."""
        where = entry.at(link.region_map)
        lkey = link.lkey
        if self.now - entry.touched >= TOUCH_S:
            ops.append(self._touch(link, entry, where))
        ops.append((READ, word_at, lkey, 8, where.word, where.word_key))
        if not entry.proved:
            ops.append((READ, between_at, lkey, SLOT_BYTES, where.slot, where.slot_key))
        return where

    def _fetch_known(self) -> bool:
        """Post the fetch of some keys with cached entries; return False if all blocks are in use."""
        group = KeyGroup(self.next_link(), self._pages.pop())
        known, size = self._known, 0
        while known and len(group.entries) < self.connection.keys and size < self._group_bytes:
            group.entries.append(known.popleft())
            size += group.entries[-1][1].length
        if self._fetch(group):
            return True
        self._pages.append(group.page)
        return False

    def _fetch(self, group: KeyGroup) -> bool:
        """Post a group's fetch. Return False, with all its entries queued again, if it needs a block and none is free.

        A group has one block. Values that do not fit into it go with another group.
        """
        link, page, sinks = group.link, group.page, self.sinks
        lkey, rail = link.lkey, link.rail
        ops: list[Op] = []
        slots: list[Op] = []
        word_at, between_at, image_at, used = page.words, page.between, page.images, 0
        block = group.block
        block_key = 0
        items = group.items
        kind = FENCED_READ
        for position, entry in group.entries:
            sink, length, at = sinks[position], entry.length, -1
            local = key = 0
            if sink is not None and not fits(length, sink):
                length = 0
            elif type(sink) is Span and (registration := sink.registration) is not None:
                found = registration.lkey(rail)
                if found is not None:
                    local, key = sink.address, found
            if not key and length:
                if length > BLOCK_BYTES:  # its memory could not be registered
                    self._large.append((position, entry))
                    continue
                if block is None:
                    self.borrow()
                    if self._free_blocks:  # else groups in flight have them all
                        block = self._free_blocks.pop()
                        block_key = key_of(block, link)
                if block is None or used + length > BLOCK_BYTES:
                    self._known.append((position, entry))
                    continue
                group.block = block
                at, local, key = used, block.address + used, block_key
                used += (length + 63) & -64
            where = self._head(ops, link, entry, word_at, between_at)
            if length:
                add_pieces(ops, READ, where.pieces, local, key)
            slots.append((kind, image_at, lkey, SLOT_BYTES, where.slot, where.slot_key))
            kind = READ
            items.append((position, entry, length, at))
            word_at += 8
            between_at += SLOT_BYTES
            image_at += SLOT_BYTES
        group.entries = []
        if not items:
            return False
        self._send(group, ops + slots)
        return True

    def _fetch_striped(self, position: int, entry: CachedEntry) -> None:
        """Post the stripes of a large value on all queue pairs, into the caller's memory."""
        sink = self.sinks[position]
        assert type(sink) is Span and sink.registration is not None
        links = self.links
        keys = [sink.registration.lkey(link.rail) for link in links]
        if None in keys:
            self._large.append((position, entry))
            return
        group = KeyGroup(self.next_link(), self._pages.pop())
        for number, link in enumerate(links):
            key = keys[number]
            assert key is not None
            ops: list[Op] = []
            if link is group.link:
                self._head(ops, link, entry, group.page.words, group.page.between)
            # By the value's own bytes, as the rails' regions may be cut differently.
            for at, length in stripes(number, len(links), entry.length):
                ops += pieces_at(link, entry, at, length, sink.address + at, key)
            if ops:
                group.waits.append((link, link.post(ops, self.until)))
        group.slot_behind = True
        group.items = [(position, entry, entry.length, -1)]
        self._in_flight.append(group)

    def _read_large(self, position: int, entry: CachedEntry) -> None:
        """Read a large value into unregistered memory, through all blocks. No group is in flight.

        If it changes meanwhile, TCP reads it, which is no worse at that size.
        """
        sink, length = self.sinks[position], entry.length
        group = KeyGroup(self.links[0], self._pages[-1])
        group.items = [(position, entry, length, -1)]
        if sink is None:
            group.whole = bytearray(length)
            target = address_of(memoryview(group.whole))
        else:
            target = sink.address if type(sink) is Span else address_of(sink)  # type: ignore[arg-type]

        def build(link: PairedLink, block: StagingBuffer, at: int, part: int) -> list[Op]:
            return pieces_at(link, entry, at, part, block.address, key_of(block, link))

        def drain(block: StagingBuffer, at: int, part: int) -> None:
            self._copier.copy(target + at, block.address, part)

        self._through_blocks(group, build, drain)

    def _through_blocks(self, group: KeyGroup, build: Build, drain: Drain) -> None:
        """Read the only item of a group through all blocks, between its slot's images. No other group is in flight."""
        position, entry, length, _ = group.items[0]
        link, page = group.link, group.page
        head: list[Op] = []
        where = self._head(head, link, entry, page.words, page.between)
        link.qp.wait(link.post(head, self.until), self.until)
        self.slide(length, build, drain)
        slot: Op = (FENCED_READ, page.images, link.lkey, SLOT_BYTES, where.slot, where.slot_key)
        link.qp.wait(link.post([slot], self.until), self.until)
        self._tries[position] = ATTEMPTS
        self._confirm(group)

    def _read_one(self, position: int) -> bool:
        """Read a single cached key into registered memory in one chain; return False if that is impossible or failed.
        """
        digest = self.digests[position]
        entry = self.locations.get(digest)
        sink = self.sinks[position]
        if entry is None or type(sink) is not Span or sink.registration is None:
            return False
        length = entry.length
        if not fits(length, sink) or (length >= STRIPE_BYTES and len(self.links) > 1):
            return False
        link, page = self.links[0], self.connection.pages[-1]
        key = sink.registration.lkey(link.rail)
        if key is None:
            return False
        ops: list[Op] = []
        where = self._head(ops, link, entry, page.words, page.between)
        add_pieces(ops, READ, where.pieces, sink.address, key)
        ops.append((FENCED_READ, page.images, link.lkey, SLOT_BYTES, where.slot, where.slot_key))
        link.qp.wait(link.post(ops, self.until), self.until)
        memory, at, between_at = self.connection.memory, page.images_at, page.between_at
        between = memory[between_at : between_at + SLOT_BYTES]
        if confirmed(entry, between, memory[at : at + SLOT_BYTES], self.connection.words[page.words_at]):
            self._deliver(position, entry, length, None, -1)
            return True
        self.retries += 1
        self.locations.drop(digest)
        return False

    # -- results ------------------------------------------------------------------------------------

    def _confirm(self, group: KeyGroup) -> None:
        """Deliver the values of a fetch that are confirmed."""
        connection, page = self.connection, group.page
        memory, words = connection.memory, connection.words
        between_at, image_at, word_at = page.between_at, page.images_at, page.words_at
        for position, entry, length, at in group.items:
            between = memory[between_at : between_at + SLOT_BYTES]
            now = memory[image_at : image_at + SLOT_BYTES]
            if confirmed(entry, between, now, words[word_at]):
                self._deliver(position, entry, length, group, at)
            else:
                self._refuted(position, words[word_at])
            between_at += SLOT_BYTES
            image_at += SLOT_BYTES
            word_at += 1

    def _refuted(self, position: int, word: int) -> None:
        """Drop a cached entry that is no longer true; try its key again if its shard is here."""
        self.locations.drop(self.digests[position])
        if 0 < word < _FROZEN:
            self._again(position)
        else:
            self.left.append(position)

    def _deliver(self, position: int, entry: CachedEntry, length: int, group: KeyGroup | None, at: int) -> None:
        """Copy a confirmed value to its sink, unless it is there, and fill in its result."""
        sink, results = self.sinks[position], self.results
        self.settled.add(position)
        self.locations.put(self.digests[position], entry)
        if not length:
            results[position] = misfit(entry.length, sink)
            return
        got: Any = length
        data: Any
        if at >= 0:
            assert group is not None and group.block is not None
            block = group.block
            if sink is None:
                got = data = bytes(block.view[at : at + length])
            elif type(sink) is Span:
                self._copier.copy(sink.address, block.address + at, length)
            elif length < RELEASE_BYTES:
                sink[:length] = block.view[at : at + length]  # type: ignore[index]
            else:
                self._copier.copy(address_of(sink), block.address + at, length)  # type: ignore[arg-type]
        elif sink is None:
            assert group is not None and group.whole is not None
            got = data = bytes(group.whole)
        self.count(length)
        if self._check is not None:
            if sink is not None:
                data = sink.view()[:length] if isinstance(sink, Span) else sink[:length]
            if not self._check(entry.flags, entry.crc, data):
                results[position] = MISS
                return
        self.hits += 1
        results[position] = got


def pieces_at(link: PairedLink, entry: CachedEntry, at: int, length: int, local: int, key: int) -> list[Op]:
    """Return the READs of bytes ``at`` to ``at + length`` of a value to local memory."""
    ops: list[Op] = []
    add_pieces(ops, READ, link.region_map.split(entry.offset + at, length), local, key)
    return ops


def _registered(sink: Sink) -> bool:
    return type(sink) is Span and sink.registration is not None

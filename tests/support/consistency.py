"""Consistency checks of one worker's memory: each raises CorruptionError on the first contradiction.

``check(x)`` takes a store or one of its parts, and looks into their private state.
"""

from __future__ import annotations

import os
import weakref
from functools import singledispatch

import numpy as np

from simm.arena.coldest import NEVER, Coldest
from simm.arena.extents import Extents, _key
from simm.arena.hashing import shard_of
from simm.arena.layout import HOLD_LINE_BYTES, SEQ_BITS, SESSION_LINE_BYTES, SLOT_WORDS
from simm.arena.ledger import Ledger
from simm.arena.marks.kept import (
    HARD,
    HARD_GROUP,
    HARD_WAYS_MAX,
    KEPT_GROUPS,
    NEAR,
    NEAR_GROUPS,
    SOFT,
    SOFT_GROUPS,
    KeptEntries,
)
from simm.arena.queues import _NOWHERE, Policy
from simm.arena.shard_words import ShardWords
from simm.arena.space import Space
from simm.arena.store import Store
from simm.constants import NO_SLOT, PAGE_BYTES, SLAB_BYTES, WAYS
from simm.errors import CorruptionError
from simm.host.file_locks import held, leads_to
from simm.server.rdma_endpoint import Endpoint
from simm.server.rdma_lease import RdmaLease
from simm.shm import _OWNER_BYTE, OwnedSegment, _path
from simm.slab import (
    _FREE,
    _NIL,
    _SLAB_SHIFT,
    CHUNKS_PER_SLAB,
    FREE,
    LARGE,
    LARGE_GROUP,
    SLAB,
    Allocator,
    class_of,
)
from simm.table import Table, sets_of
from simm.wire.messages import ShardRole

#: By the kept entries of a region: the bounds of what is hard kept, and the least that was since these came.
_LEAST_KEPT: weakref.WeakKeyDictionary[KeptEntries, tuple[tuple[int, int], int]] = weakref.WeakKeyDictionary()


def demand(true: bool, text: str) -> None:
    """Raise CorruptionError with this text unless the condition is true."""
    if not true:
        raise CorruptionError(text)


@singledispatch
def check(part: object) -> None:
    """Raise CorruptionError unless a store, or a part of one, agrees with itself. O(everything)."""
    raise TypeError(f"no check is known for {type(part).__name__}")


def finished(words: ShardWords) -> list[int]:
    """The shards that the map lists as INCOMING and whose moves have ended."""
    return np.flatnonzero((words.roles == ShardRole.INCOMING) & (words._array() == words.since)).tolist()


# --- slab.py, arena/extents.py ----------------------------------------------------------------


@check.register
def _allocator(allocator: Allocator) -> None:
    allocator.end_recovery()
    _slabs(allocator)
    extents = allocator._extents
    position = 0
    kinds = [0, 0, 0]
    previous = -1
    while position < allocator.size:
        start, size, kind, _ = allocator.span_at(position)
        position += size
        where = f"span at {start}"
        demand(size > 0 and size % PAGE_BYTES == 0, f"{where} has an odd size")
        demand(not kind == FREE == previous, f"{where} is not joined with the free one before it")
        if kind != SLAB:
            demand(extents.ends.get(position) == start, f"{where} has an unknown end")
            cells = range(start >> _SLAB_SHIFT, (position - 1 >> _SLAB_SHIFT) + 1)
            demand(all(allocator._slabs[cell] is None for cell in cells), f"{where} overlaps a slab")
        kinds[kind] += 1
        previous = kind
    demand(position == allocator.size, "the last span leaves the region")
    demand(kinds[FREE] == len(extents.free) == len(extents._by_size), "free extents that no walk meets")
    demand(kinds[LARGE] == len(extents), "large chunks no walk meets")
    check(extents)


@check.register
def _extents(extents: Extents) -> None:
    demand(len(extents.ends) == len(extents.free) + len(extents), "ends of spans that are no more")
    keys = sorted(_key(start, size) for start, size in extents.free.items())
    demand(keys == extents._by_size, "the list of free extents by size is wrong")
    demand(sum(size for _, size in extents.large()) == extents.large_bytes, "large chunks do not add up")


def _slabs(allocator: Allocator) -> None:
    used = [0] * LARGE_GROUP
    tails = empty = 0
    for cell, slab in enumerate(allocator._slabs):
        if slab is None:
            continue
        where = f"slab at {slab.base}"
        in_region = slab.base == cell << _SLAB_SHIFT and slab.base + SLAB_BYTES <= allocator.size
        demand(in_region, f"{where} is misplaced")
        demand(slab.count == len(slab.owners) == CHUNKS_PER_SLAB[slab.group], f"{where} is miscounted")
        free = {index for index, word in enumerate(slab.owners) if _FREE <= word < NO_SLOT}
        index = slab.head
        while index != _NIL:
            demand(index in free, f"free list of {where} is broken at chunk {index}")
            free.remove(index)
            index = slab.owners[index] & 0xFFFF
        demand(not free, f"{where} has free chunks that are in no list")
        in_use = sum(1 for _ in allocator.chunks_of_slab(slab.base))
        demand(slab.used == in_use, f"{where} counts {slab.used} chunks in use, not {in_use}")
        partial = allocator._partial[slab.group]
        listed = 0 <= slab.position < len(partial) and partial[slab.position] is slab
        demand(listed == (in_use < slab.count), f"{where} is in the wrong list")
        demand((slab.base in allocator._empty) == (not in_use), f"{where} is wrong about being empty")
        used[slab.group] += in_use
        if in_use:
            tails += SLAB_BYTES - slab.count * slab.chunk
        else:
            empty += 1
    listed_all = sum(map(len, allocator._partial))
    partial_all = sum(1 for slab in allocator._slabs if slab is not None and slab.used < slab.count)
    demand(listed_all == partial_all, "lists of slabs with free chunks name others")
    demand(empty == len(allocator._empty), "empty slabs that are no more")
    demand(used == allocator._used, "chunks per class do not add up")
    demand(tails == allocator._tail_bytes, "slab tails do not add up")


# --- arena/eviction.py, arena/coldest.py, arena/space.py --------------------------------------


@check.register
def _policy(policy: Policy) -> None:
    slots = policy._slots
    members = 0
    for queue, size in enumerate(policy._sizes):
        sentinel = slots + queue
        node = sentinel
        found = 0
        # Without demand(): its text would be made for each entry and queue, which takes longer than to look at it.
        while (behind := policy._next[node]) != sentinel:
            if behind >= slots or policy._queue[behind] != queue:
                raise CorruptionError(f"queue {queue} leads to node {behind}")
            if policy._prev[behind] != node:
                raise CorruptionError(f"links around slot {behind} disagree")
            if policy._stamp[behind] > policy.clock:
                raise CorruptionError(f"slot {behind} comes from the future")
            found += 1
            if found > size:
                raise CorruptionError(f"queue {queue} has more than its {size} entries")
            node = behind
        if policy._prev[sentinel] != node:
            raise CorruptionError(f"the oldest entry of queue {queue} is not its last")
        if found != size:
            raise CorruptionError(f"queue {queue} has {found} entries, not {size}")
        hand = policy._hands[queue]
        if hand != sentinel and (hand >= slots or policy._queue[hand] != queue):
            raise CorruptionError(f"the hand of queue {queue} is elsewhere")
        members += found
    demand(members == slots - policy._queue.count(_NOWHERE), "slots that claim a queue and are in none")


@check.register
def _kept(kept: KeptEntries) -> None:
    used: dict[tuple[int, int], int] = {}
    pieces: dict[int, dict[int, int]] = {SOFT: {}, HARD: {}, NEAR: {}}
    own: dict[int, dict[int, int]] = {}
    near: dict[int, int] = {}
    by_set: dict[int, int] = {}
    by_space: dict[int, int] = {}
    for slot, entry in kept.items():
        offset = kept._offsets[slot]
        demand(offset >= 0, f"slot {slot} is kept, but has no chunk")
        size = kept._allocator.chunk_bytes(offset)
        demand(size == entry.bytes, f"kept slot {slot} counts {entry.bytes} bytes, not {size}")
        demand(entry.offset == offset, f"kept slot {slot} is elsewhere")
        used[entry.namespace, entry.how] = used.get((entry.namespace, entry.how), 0) + size
        for base in range(offset // SLAB_BYTES * SLAB_BYTES, offset + size, SLAB_BYTES):
            pieces[entry.how][base] = pieces[entry.how].get(base, 0) + 1
            if entry.how == HARD:
                mine = own.setdefault(entry.namespace, {})
                mine[base] = mine.get(base, 0) + 1
        if entry.how == NEAR:
            near[class_of(size)] = near.get(class_of(size), 0) + 1
        demand(slot in kept._due.get(entry.until, ()), f"kept slot {slot} never expires")
        demand(entry.until >= kept._due_from, f"the time of kept slot {slot} is not looked at any more")
        if entry.how == HARD:
            by_set[slot // WAYS] = by_set.get(slot // WAYS, 0) + 1
            by_space[entry.namespace] = by_space.get(entry.namespace, 0) + 1
    demand(sum(map(len, kept._due.values())) == len(kept), "more times than kept entries")
    demand(by_set == kept._set_slots and by_space == kept._own_slots, "slots of hard kept entries do not add up")
    demand(sum(by_set.values()) == kept.hard_slots, "slots of hard kept entries are miscounted")
    demand(max(by_set.values(), default=0) <= HARD_WAYS_MAX, "hard kept entries fill a set")
    demand(used == kept.bytes, "kept bytes do not add up")
    demand(pieces == kept._pieces and own == kept._own_pieces, "pieces with kept entries do not add up")
    hard = sum(count for (_, how), count in used.items() if how == HARD)
    demand(hard == kept.hard_bytes, f"{hard} bytes are hard kept, not {kept.hard_bytes}")
    # What is beyond a share that was cut stays until its time: it may get less from look to look, and never more.
    bounds = kept.hard_max, kept.hard_before
    known, least = _LEAST_KEPT.get(kept, (bounds, kept.hard_before))
    least = min(hard, least) if known == bounds else min(hard, kept.hard_before)
    demand(hard <= max(kept.hard_max, least), f"{hard} bytes are hard kept, of a share of {kept.hard_max}")
    _LEAST_KEPT[kept] = bounds, least
    copied = sum(count for (_, how), count in used.items() if how == NEAR)
    demand(copied == kept.near_bytes, f"near copies have {copied} bytes")
    demand(near == kept.near, "near copies are miscounted")


@check.register
def _coldest(coldest: Coldest) -> None:
    coldest.take_in()
    entries: set[tuple[int, int, int]] = set()
    for group, heap in coldest._heaps.items():
        for place, entry in enumerate(heap):
            demand(heap[max(0, place - 1) // 2] <= entry, f"slabs of class {group} are out of order")
            entries.add((group, *entry))
    for base, group in coldest._allocator.slabs():
        bound = coldest._bounds.get(base, -1)
        if bound >= NEVER:
            asleep = {(NEVER + wakes, at) for wakes, at, _ in coldest._asleep}
            demand((bound, base) in asleep, f"slab at {base} never wakes")
            continue
        demand((group, bound, base) in entries, f"slab at {base} is in no order")
        demand(bound <= coldest._policy.clock, f"slab at {base} comes from the future")


@check.register
def _space(space: Space) -> None:
    allocator, policy, offsets = space._allocator, space._policy, space._offsets
    check(allocator)
    check(policy)
    check(space._coldest)
    check(space.kept)
    published = 0
    chunks: list[tuple[int, int, int]] = []
    for span in allocator.walk():
        if span.kind == LARGE:
            chunks.append((span.offset, span.detail, LARGE_GROUP))
        elif span.kind == SLAB:
            chunks.extend((offset, slot, span.detail) for offset, slot in allocator.chunks_of_slab(span.offset))
    for offset, slot, group in chunks:
        if slot != NO_SLOT:
            published += 1
            if slot >= len(offsets) or offsets[slot] != offset:
                raise CorruptionError(f"chunk at {offset} and slot {slot} disagree")
            if how := space.kept.how(slot):
                group = {SOFT: SOFT_GROUPS + group, HARD: HARD_GROUP, NEAR: NEAR_GROUPS + group}[how]
            if policy.group_of(slot) != group:
                raise CorruptionError(f"slot {slot} is in the wrong group")
    known = len(offsets) - offsets.count(-1)
    demand(published == known, f"{known} slots have a chunk, but {published} chunks a slot")
    queued = sum(len(list(policy.slots(group))) for group in range(KEPT_GROUPS))
    demand(published == queued, f"{published} chunks are published, but {queued} slots queued")
    allocated = {offset: slot for offset, slot, _ in chunks}
    for offset, count in space._holds.items():
        demand(offset in allocated, f"held chunk at {offset} is not allocated")
        demand(count > 0, f"chunk at {offset} is held {count} times")
    for offset in space._detached:
        demand(offset in space._holds, f"detached chunk at {offset} is not held")
        demand(allocated[offset] == NO_SLOT, f"detached chunk at {offset} belongs to a slot")


# --- table.py, arena/ledger.py, arena/store.py ------------------------------------------------


@check.register
def _table(table: Table) -> None:
    words = table._words
    live = 0
    seen: set[bytes] = set()
    # All that is to be said of an empty slot is looked at by numpy; the loop has the others, and those that are wrong.
    rows = np.frombuffer(words, np.uint64)[: table.geometry.slots * SLOT_WORDS].reshape(-1, SLOT_WORDS)
    taken = (np.array(table._used, np.uint8)[:, None] >> np.arange(WAYS) & 1).astype(bool).reshape(-1)
    well = (rows[:, 0] & np.uint64(1) == 0) & (rows[:, 0] >> np.uint64(SEQ_BITS) <= np.uint64(table.incarnation))
    well &= ~rows[:, 1:4].any(axis=1)
    del rows  # or an error would keep the memory from being closed
    for slot in np.flatnonzero(taken | ~well).tolist():
        at = slot * SLOT_WORDS
        seq = words[at]
        used = table._used[slot // WAYS] >> slot % WAYS & 1
        demand(not seq & 1, f"slot {slot} is odd ({seq:#x}) while nothing is written")
        demand(seq >> SEQ_BITS <= table.incarnation, f"slot {slot} has a seq of a later incarnation")
        state = "live" if words[at + 3] else "empty"
        demand(bool(words[at + 3]) == bool(used), f"slot {slot} is {state}, its mask says otherwise")
        if not used:
            demand(not (words[at + 1] or words[at + 2]), f"slot {slot} is empty and has a digest")
            continue
        live += 1
        digest = table.entry(slot).digest
        demand(digest not in seen, f"digest {digest.hex()} is stored twice")
        seen.add(digest)
        demand(slot // WAYS in sets_of(digest, table.geometry.sets), f"slot {slot} is in none of its digest's sets")
        demand(table._tags[slot] == digest[7], f"slot {slot} has another tag than its digest")
    demand(live == table.entries, f"{live} live slots, {table.entries} counted")


@check.register
def _ledger(ledger: Ledger) -> None:
    lines = len(ledger._holds) // HOLD_LINE_BYTES
    used = [line for line, _ in ledger.holds()]
    if len(used) + len(ledger._free_holds) != lines or set(used) & set(ledger._free_holds):
        raise CorruptionError(f"{len(used)} holds and {len(ledger._free_holds)} free lines of {lines}")
    lines = len(ledger._sessions) // SESSION_LINE_BYTES
    used = [line for line, _ in ledger.sessions()]
    if len(used) + len(ledger._free_sessions) != lines or set(used) & set(ledger._free_sessions):
        raise CorruptionError(f"{len(used)} sessions and {len(ledger._free_sessions)} free lines of {lines}")


@check.register
def _store(store: Store) -> None:
    store.apply_pending()
    check(store.table)
    check(store.space)
    check(store.ledger)
    store.shard_words.check()
    space, allocator, data = store.space, store.space._allocator, store.geometry.data_offset
    named: dict[int, int] = {}
    for slot in store.table:
        entry = store.table.entry(slot)
        if entry.offset in named:
            raise CorruptionError(f"chunk at {entry.offset} is named by slots {named[entry.offset]} and {slot}")
        named[entry.offset] = slot
        owner = allocator.owner(entry.offset - data)
        demand(owner == slot, f"slot {slot} names a chunk that space gives to another")
        exact = allocator.chunk_bytes(entry.offset - data) == entry.chunk and 0 < entry.length <= entry.chunk
        demand(exact, f"slot {slot} is wrong about its chunk")
        shard = shard_of(entry.digest)
        mine = store.shards[shard] or shard in store.shard_words.clearing
        demand(bool(mine), f"slot {slot} is of a shard that is not mine")
    granted = pinned = 0
    lines = set()
    for session in store.sessions.by_id.values():
        mine = 0
        for offset, chunk, line in session.grants.values():
            mine += chunk
            lines.add(line)
            free = offset not in named and allocator.owner(offset - data) == NO_SLOT
            demand(free, f"granted chunk at {offset} belongs to an entry")
        for number, offset, chunk in session.prepared:
            same = session.grants.get(number, (offset, chunk))[:2] == (offset, chunk)
            demand(same, f"prepared grant {number:#x} differs from the one that is held")
        counted = session.granted_bytes
        demand(mine == counted, f"{session}: {mine} bytes granted, {counted} counted")
        granted += mine
        counted = sum(chunk for _, chunk, _ in session.pins.values())
        demand(counted == session.pinned_bytes, f"{session}: {counted} bytes pinned, {session.pinned_bytes} counted")
        pinned += counted
        for offset, _, line in session.pins.values():
            lines.add(line)
            demand(space.is_held(offset - data), f"pinned chunk at {offset} is not held")
    demand(pinned == store.sessions.pinned_bytes, f"{pinned} bytes pinned, {store.sessions.pinned_bytes} counted")
    demand(granted == store.sessions.granted_bytes, f"{granted} bytes granted, {store.sessions.granted_bytes} counted")
    written = {line for line, _ in store.ledger.holds()}
    demand(written == lines, f"hold lines {sorted(written ^ lines)[:5]} differ between ledger and sessions")


# --- server/rdma_endpoint.py, server/rdma_lease.py, server/rdma_devices.py --------------------


@check.register
def _lease(lease: RdmaLease) -> None:
    leased = list(lease.leased_grants())
    counted = lease.granted_bytes
    demand(sum(each.chunk for each in leased) == counted, f"a lease's grants do not have {counted} bytes")
    demand(len({each.number for each in leased}) == len(leased), "a lease has a grant twice")
    for each in leased:
        for number, bound_window in each.bound_windows.items():
            there = number < len(lease.queue_pairs) and lease.queue_pairs[number] is not None
            there = there and bound_window.rail == lease.rails[number]
            demand(there, f"grant {each.number:#x} has a window for queue pair {number}, which is not there")
            assert lease.windows is not None
            binding, address = bound_window.binding, lease.windows._registration.address_of(each.offset)
            exact = (binding.address, binding.length) == (address, each.chunk)
            demand(exact, f"the window of grant {each.number:#x} lies elsewhere than its chunk")


@check.register
def _endpoint(endpoint: Endpoint) -> None:
    leases: list[RdmaLease] = [peer.context for peer in endpoint.leases]
    for lease in leases:
        check(lease)
    total = endpoint.granted_bytes
    demand(sum(lease.granted_bytes for lease in leases) == total, f"the leases' grants do not have {total} bytes")
    leased = [each for lease in leases for each in lease.leased_grants()]
    current = [each.offset for each in leased if each.session is endpoint.keeper.session]
    demand(len(set(current)) == len(current), "two leases have the same chunk")
    for session in {each.session for each in leased}:
        held_by = sum(each.session is session for each in leased)
        what = f"session {session.session:#x} does not count its grants that leases hold"
        demand(len(session.copying) == held_by, what)
    windows = endpoint.devices.windows
    if windows is not None:
        idle = sum(len(each) for queue_pairs in windows._idle for each in queue_pairs.values())
        in_use = sum(len(each.bound_windows) for each in leased)
        demand(windows.made == idle + in_use, f"{windows.made} windows, of which {idle} are idle and {in_use} in use")


# --- shm.py -----------------------------------------------------------------------------------


@check.register
def _segment(segment: OwnedSegment) -> None:
    name = segment.name
    demand(segment.fd >= 0, f"segment {name} is closed")
    demand(leads_to(_path(name), segment.fd), f"the name of segment {name} was removed or replaced")
    size = os.fstat(segment.fd).st_size
    demand(size == segment.size, f"segment {name} is {size} bytes, not {segment.size}")
    demand(not segment.is_owner or held(segment.fd, _OWNER_BYTE), f"the owner lock of segment {name} is lost")

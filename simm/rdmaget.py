"""GET and EXISTS over RDMA: many keys in few chains, and the wire never idle.

Keys go in *groups* of up to PAGE_KEYS, each on one link, with a page of the lane's scratch memory. A group of keys
whose places are not known takes two steps, one of known keys the second only:

    look    READ both sets and the shard word of each key                          one chain
    fetch   READ the shard word, the slot and the value of each; then, behind a
            fence, READ the slot of each once more                                 one chain

One fence orders them all: it holds back what follows it on the link until everything ahead has completed. So a chain
costs one round trip of idle wire, not one a key. And the next chains are posted before this one is waited for: each
link has up to two groups under way, so that while the values of one come in, the sets of the next are looked at.

Values of STRIPE_BYTES and more are groups of their own where a lane has several links: pieces on all of them, and once
all are complete, the slot once more on one. Large values for memory that is not registered go through the lane's loan
of bounce blocks in a sliding window. The bytes that a READ brings to the caller's own memory are there before they are
confirmed, as on the other paths: the result says whether to use them.

What becomes of a key: confirmed is a hit; absent from both sets, with a plain shard word, a miss; changed under way, it
starts over with its place forgotten, ATTEMPTS times at most. All else is left to TCP, and so is every key that was
not settled when the lane broke. ``rdmapath.py`` lists what can go wrong.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from . import gpurdma
from .batch import MISS, SMALL, Sink
from .bounce import BLOCK_BYTES, Block
from .buffers import RELEASE_BYTES, Copier, Span, address_of
from .constants import SET_BYTES, SLOT_BYTES
from .errors import RemoteProtocolError, TransportError
from .fabric import FENCED_READ, READ, WRITE, FabricError, Op
from .lane import Lane, Page, Wire
from .layout import EntryFlag
from .rdmapath import SHARE, RdmaPath
from .remote_arena import OP_BYTES_MAX, Place, confirmed
from .shards import FROZEN, MOVING

log = logging.getLogger("simm.client")

ATTEMPTS: Final = 3
#: From here on a value is spread over all links of a lane.
STRIPE_BYTES: Final = OP_BYTES_MAX
#: Groups under way on each link.
DEEP: Final = 2
#: A call's keys go in so many groups at least, unless these became small: while one is on the wire the next is made,
#: and the last one looked at. With one group for 32 values of 64 KiB, wire and processor would take turns.
GROUPS: Final = 4
#: Bytes of the values in one group: at most (a single value may have more), and what counts as small.
GROUP_BYTES: Final = 4 << 20
GROUP_BYTES_LEAST: Final = 256 << 10
#: Keys in one group of the first step that count as few.
LOOK_LEAST: Final = 12
#: After so many bytes a deadline begins anew, as TCP's exchanges have it.
EXCHANGE_BYTES: Final = 64 << 20
#: A loan of bounce blocks.
LOAN_BLOCKS: Final = 8
#: A slot's visited byte is stored at most so often, seconds.
TOUCH_S: Final = 1.0

_CRC: Final = int(EntryFlag.CRC)
_MOVING: Final = MOVING
_FROZEN: Final = FROZEN
_2SETS: Final = 2 * SET_BYTES


class RdmaGet:
    """A client's reads by RDMA; any thread may call it. ``check`` says whether bytes have their crc."""

    def __init__(self, copier: Copier, check: Callable[[int, Any], bool] | None, counters: dict[str, int]) -> None:
        self._copier = copier
        self._check = check
        self.counters = counters

    def read(
        self, path: RdmaPath, positions: Sequence[int], digests: Sequence[bytes], sinks: Sequence[Sink],
        results: list[Any],
    ) -> tuple[list[int], float]:  # fmt: skip
        """Read what stands at ``positions`` and fill the results in: a length (the bytes, where the sink is None), MISS
        or SMALL. Returned are the positions that TCP must see to, and until when (monotonic seconds).

        Not counted but for what is RDMA's own."""
        reading = Reading(self._copier, self._check, digests, sinks, results)
        elsewhere: list[int] = []
        if any([isinstance(sinks[position], Span) and type(sinks[position]) is not Span for position in positions]):  # noqa: C419
            # GPU memory, which gpurdma.py knows to reach.
            elsewhere = [position for position in positions if isinstance(sinks[position], Span)
                         and type(sinks[position]) is not Span]  # fmt: skip
            positions = [position for position in positions if position not in set(elsewhere)]
        reading.until = time.monotonic() + path.deadline_s * SHARE
        left = self._run(path, reading, positions, reading.read) if positions else []
        self.counters["rdma_gets"] += reading.hits
        self.counters["rdma_retries"] += reading.retries
        if elsewhere:

            def by_way_of(part: Sequence[int], hosts: Any, got: Any) -> list[int]:
                return self.read(path, part, digests, hosts, got)[0]

            # Who has to look at values cannot do that in a GPU's memory.
            rails = path.rails if self._check is None else ()
            left += gpurdma.read(by_way_of, elsewhere, sinks, results, rails)
            reading.until = time.monotonic() + path.deadline_s * SHARE
        return left, reading.until + path.deadline_s * (1 - SHARE)

    def exists(
        self, path: RdmaPath, positions: Sequence[int], digests: Sequence[bytes], results: list[Any]
    ) -> tuple[list[int], float]:
        """Which are stored? 1 or MISS in ``results``; the positions that TCP must see to are returned, and until when.
        """
        reading = Reading(self._copier, None, digests, (), results)
        reading.until = time.monotonic() + path.deadline_s * SHARE
        left = self._run(path, reading, positions, reading.exists)
        return left, reading.until + path.deadline_s * (1 - SHARE)

    def _run(
        self, path: RdmaPath, reading: Reading, positions: Sequence[int], body: Callable[[Sequence[int]], None]
    ) -> list[int]:
        """Run ``body`` on a lane. Afterwards nothing of it is under way, whatever happened."""
        until = reading.until
        try:
            lane = path.take(until)
        except TransportError as exc:
            log.debug("%r: %s", path, exc)
            self.counters["rdma_fallbacks"] += len(positions)
            return list(positions)
        left: list[int] = []
        done = False
        try:
            try:
                reading.begin(path, lane, until)
                body(positions)
            except (TransportError, RemoteProtocolError) as exc:
                path.lost(lane, str(exc))
                left = [position for position in positions if position not in reading.settled]
            except BaseException:
                path.lost(lane, "interrupted")
                raise
            else:
                done = True
                path.give(lane)
                left = reading.left
        finally:
            if done or not lane.wires:  # else a link could not be closed, and may still write
                path.bounce.give(reading.loan)
        self.counters["rdma_fallbacks"] += len(left)
        return left


class _Group:
    """Keys that travel together. ``items``: (position, place, local memory) of those that are fetched."""

    __slots__ = ("block", "items", "keys", "page", "places", "slot_behind", "waits", "wire")

    def __init__(self, wire: Wire, page: Page) -> None:
        self.wire = wire
        self.page = page
        #: To look for.
        self.keys: list[int] = []
        #: To fetch: (position, place, bytes, where in the block or -1 where straight into the caller's memory)
        self.items: list[tuple[int, Place, int, int]] = []
        self.places: list[tuple[int, Place]] = []
        self.block: Block | None = None
        #: What must be done before the next step.
        self.waits: list[tuple[Wire, int]] = []
        #: The slot is READ once all that is complete.
        self.slot_behind = False


class Reading:
    """One call's reads on one lane."""

    def __init__(
        self, copier: Copier, check: Callable[[int, Any], bool] | None, digests: Sequence[bytes],
        sinks: Sequence[Sink], results: list[Any],
    ) -> None:  # fmt: skip
        self._copier = copier
        self._check = check
        self.digests = digests
        self.sinks = sinks
        self.results = results
        self.settled: set[int] = set()
        #: For TCP, though nothing is wrong with the lane.
        self.left: list[int] = []
        self.hits = self.retries = 0
        self.loan: list[Block] = []
        #: When this must be over: a share of the deadline.
        self.until = 0.0

    def begin(self, path: RdmaPath, lane: Lane, until: float) -> None:
        """On this lane, until then."""
        self.path = path
        self.lane = lane
        self.until = until
        self.wires = lane.wires
        self.locations = lane.locations
        self.now = time.monotonic()
        self._bytes = 0
        self._turn = 0
        self._tries: dict[int, int] = {}
        self._pages = list(lane.pages)
        self._blocks: list[Block] = []
        self._flying: deque[_Group] = deque()
        #: Places are not known; known; known and striped; known and too large for a block.
        self._unknown: deque[int] = deque()
        self._known: deque[tuple[int, Place]] = deque()
        self._striped: deque[tuple[int, Place]] = deque()
        self._large: list[tuple[int, Place]] = []
        self._group_bytes = GROUP_BYTES
        self._look_keys = lane.keys

    # -- exists -------------------------------------------------------------------------------------

    def exists(self, positions: Sequence[int]) -> None:
        """Look, and believe the shard word. Raises TransportError."""
        self._unknown.extend(positions)
        digests, results, locations, arena = self.digests, self.results, self.locations, self.lane.arena
        while True:
            while self._unknown and len(self._flying) < DEEP * len(self.wires) and self._pages:
                self._look()
            if not self._flying:
                return
            group = self._flying.popleft()
            self._wait(group)
            touches: list[tuple[int, Place]] = []
            page = group.page
            for at, position in enumerate(group.keys):
                digest = digests[position]
                word = self.lane.words[page.words_at + at]
                way = arena.find(self.lane.memory, page.sets_at + at * _2SETS, digest)
                if way >= 0 and 0 < word < _FROZEN:
                    results[position] = 1
                    self.settled.add(position)
                    place = arena.place(self.lane.memory, page.sets_at + at * _2SETS, digest, way)
                    if place is not None:
                        known = locations.get(digest)
                        if known is None or known.image != place.image:
                            locations.put(digest, place)
                            known = place
                        touches.append((position, known))
                elif way < 0 and 0 < word < _MOVING:
                    results[position] = MISS
                    self.settled.add(position)
                else:
                    self.left.append(position)
            self._touch(group.wire, touches)
            self._pages.append(page)

    def _touch(self, wire: Wire, places: list[tuple[int, Place]]) -> None:
        ops = [op for _position, place in places if (op := self._touched(wire, place)) is not None]
        if ops:
            wire.post(ops, self.until)  # nobody waits for it: what it reads is always there

    def _touched(self, wire: Wire, place: Place) -> Op | None:
        """The WRITE that tells the eviction policy, when it is time for it."""
        if self.now - place.touched < TOUCH_S:
            return None
        place.touched = self.now
        spots = place.at(wire.side)
        return WRITE, self.lane.one, wire.lkey, 1, spots.visited, spots.visited_key

    # -- read ---------------------------------------------------------------------------------------

    def read(self, positions: Sequence[int]) -> None:
        """Read them all. Raises TransportError; what was settled by then is in ``settled``."""
        if len(positions) == 1 and self._read_one(positions[0]):
            return
        digests, get, size = self.digests, self.locations.get, 0
        for position in positions:
            place = get(digests[position])
            if place is None:
                self._unknown.append(position)
            else:
                size += place.length
                self._sort(position, place)
        self._group_bytes = min(GROUP_BYTES, max(GROUP_BYTES_LEAST, size // GROUPS))
        self._look_keys = min(self.lane.keys, max(LOOK_LEAST, -(-len(self._unknown) // GROUPS)))
        flying, deep = self._flying, DEEP * len(self.wires)
        while True:
            while len(flying) < deep and self._pages and self._post_next():
                pass
            if flying:
                self._advance(flying.popleft())
            elif not (self._known or self._unknown or self._striped):
                break
        for position, place in self._large:
            self._read_large(position, place)
        if len(self.settled) + len(self.left) != len(positions):  # none may get lost without a word
            missing = set(positions) - self.settled - set(self.left)
            log.error("%d keys got lost on their way: left to TCP", len(missing))
            self.left += missing

    def _post_next(self) -> bool:
        """Start another group, where there is one to start."""
        if self._known:
            return self._fetch_known()
        if self._unknown:
            self._look()
            return True
        if self._striped:
            return self._fetch_striped(*self._striped.popleft())
        return False

    def _next_wire(self) -> Wire:
        self._turn += 1
        return self.wires[self._turn % len(self.wires)]

    def _sort(self, position: int, place: Place) -> None:
        """Which way a value goes whose place is known."""
        length = place.length
        sink = self.sinks[position]
        if sink is not None and length > len(sink):
            self._known.append((position, place))  # to be confirmed, without its bytes
        elif length > BLOCK_BYTES and not _registered(sink):
            self._large.append((position, place))
        elif length >= STRIPE_BYTES and len(self.wires) > 1 and _registered(sink):
            self._striped.append((position, place))
        else:
            self._known.append((position, place))

    def _look(self) -> None:
        """Post the first step of some keys."""
        wire, page, unknown = self._next_wire(), self._pages.pop(), self._unknown
        group = _Group(wire, page)
        keys = group.keys
        while unknown and len(keys) < self._look_keys:
            keys.append(unknown.popleft())
        digests, side, lkey = self.digests, wire.side, wire.lkey
        sets, meta = self.lane.arena.sets, side.meta
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
        group.waits = [(wire, wire.post(ops, self.until))]
        self._flying.append(group)

    def _fetch_known(self) -> bool:
        """Post the second step of some keys; False when there is no room to do so before others are done."""
        group = _Group(self._next_wire(), self._pages.pop())
        known, size = self._known, 0
        while known and len(group.places) < self.lane.keys and size < self._group_bytes:
            group.places.append(known.popleft())
            size += group.places[-1][1].length
        if self._fetch(group):
            return True
        self._pages.append(group.page)
        return False

    def _advance(self, group: _Group) -> None:
        """A group's next step is due."""
        self._wait(group)
        if group.keys:
            self._looked_at(group)
            if group.places and self._fetch(group):
                return
        elif group.slot_behind:
            group.slot_behind = False
            wire, (_position, place, _length, _at) = group.wire, group.items[0]
            spots = place.at(wire.side)
            ops: list[Op] = [(READ, group.page.images, wire.lkey, SLOT_BYTES, spots.slot, spots.slot_key)]
            group.waits = [(wire, wire.post(ops, self.until))]
            self._flying.append(group)
            return
        else:
            self._confirm(group)
        if group.block is not None:
            self._blocks.append(group.block)
            group.block = None
        self._pages.append(group.page)

    def _wait(self, group: _Group) -> None:
        for wire, ticket in group.waits:
            wire.link.wait(ticket, self.until)

    def _looked_at(self, group: _Group) -> None:
        """The sets of a group are here: hits to be fetched, misses, and those that TCP sees to."""
        lane, page, digests = self.lane, group.page, self.digests
        memory, words, arena = lane.memory, lane.words, lane.arena
        at, word_at = page.sets_at, page.words_at
        several = len(self.wires) > 1
        for position in group.keys:
            digest = digests[position]
            way = arena.find(memory, at, digest)
            if way < 0:
                if 0 < words[word_at] < _MOVING:
                    self.results[position] = MISS
                    self.settled.add(position)
                else:
                    self.left.append(position)
            else:
                place = arena.place(memory, at, digest, way)
                if place is None:
                    self._again(position)
                elif place.length >= STRIPE_BYTES and (several or place.length > BLOCK_BYTES):
                    self._sort(position, place)
                else:
                    group.places.append((position, place))
            at += _2SETS
            word_at += 1
        group.keys = []

    def _again(self, position: int) -> None:
        """It has changed under way: look for it anew, or leave it to TCP."""
        self.retries += 1
        tries = self._tries.get(position, 0) + 1
        self._tries[position] = tries
        if tries < ATTEMPTS:
            self._unknown.append(position)
        else:
            self.left.append(position)

    def _fetch(self, group: _Group) -> bool:
        """Post the second step; False, with all places known for later, where it needs a block and none is free now.

        A group has one block at most: what does not fit in it goes with another group.
        """
        wire, page, sinks = group.wire, group.page, self.sinks
        side, lkey, rail = wire.side, wire.lkey, wire.rail
        ops: list[Op] = []
        slots: list[Op] = []
        word_at, between_at, image_at, used = page.words, page.between, page.images, 0
        block = group.block
        block_key = 0
        items = group.items
        kind = FENCED_READ
        for position, place in group.places:
            sink, length, at = sinks[position], place.length, -1
            local = key = 0
            if sink is not None and length > len(sink):
                length = 0
            elif type(sink) is Span and (registration := sink.registration) is not None:
                found = registration.lkey(rail)
                if found is not None:
                    local, key = sink.address, found
            if not key and length:
                if length > BLOCK_BYTES:  # it turned out that its memory cannot be registered
                    self._large.append((position, place))
                    continue
                if block is None:
                    block = self._block()
                    if block is not None:
                        block_key = _key_of(block, wire)
                if block is None or used + length > BLOCK_BYTES:
                    self._known.append((position, place))
                    continue
                group.block = block
                at, local, key = used, block.address + used, block_key
                used += (length + 63) & -64
            spots = place.at(side)
            touch = self._touched(wire, place)
            if touch is not None:
                ops.append(touch)
            ops.append((READ, word_at, lkey, 8, spots.word, spots.word_key))
            if not place.proved:
                ops.append((READ, between_at, lkey, SLOT_BYTES, spots.slot, spots.slot_key))
            if length:
                for address, rkey, part in spots.pieces:
                    ops.append((READ, local, key, part, address, rkey))
                    local += part
            slots.append((kind, image_at, lkey, SLOT_BYTES, spots.slot, spots.slot_key))
            kind = READ
            items.append((position, place, length, at))
            word_at += 8
            between_at += SLOT_BYTES
            image_at += SLOT_BYTES
        group.places = []
        if not items:
            return False
        group.waits = [(wire, wire.post(ops + slots, self.until))]
        self._flying.append(group)
        return True

    def _block(self) -> Block | None:
        """A block of the loan; None while others have them all, and are under way."""
        if not self.loan:
            self.loan = self.path.bounce.take(LOAN_BLOCKS, self.until)
            self._blocks = list(self.loan)
        return self._blocks.pop() if self._blocks else None

    def _confirm(self, group: _Group) -> None:
        """What was fetched is here: is it the values?"""
        lane, page = self.lane, group.page
        memory, words = lane.memory, lane.words
        between_at, image_at, word_at = page.between_at, page.images_at, page.words_at
        for position, place, length, at in group.items:
            between = memory[between_at : between_at + SLOT_BYTES]
            now = memory[image_at : image_at + SLOT_BYTES]
            if confirmed(place, between, now, words[word_at]):
                self._deliver(position, place, length, group.block, at)
            else:
                self._refuted(position, words[word_at])
            between_at += SLOT_BYTES
            image_at += SLOT_BYTES
            word_at += 1

    def _refuted(self, position: int, word: int) -> None:
        """It is not what its place said."""
        self.locations.drop(self.digests[position])
        if 0 < word < _FROZEN:
            self._again(position)
        else:
            self.left.append(position)

    def _deliver(self, position: int, place: Place, length: int, block: Block | None, at: int) -> None:
        """A value that is right: to where it shall be, and into the results."""
        sink, results = self.sinks[position], self.results
        self.settled.add(position)
        self.locations.put(self.digests[position], place)
        if not length:
            results[position] = SMALL
            return
        got: Any = length
        data: Any
        if at >= 0:
            assert block is not None
            if sink is None:
                got = data = bytes(block.view[at : at + length])
            elif type(sink) is Span:
                self._copier.copy(sink.address, block.address + at, length)
            elif length < RELEASE_BYTES:
                sink[:length] = block.view[at : at + length]  # type: ignore[index]
            else:
                self._copier.copy(address_of(sink), block.address + at, length)  # type: ignore[arg-type]
        self._count(length)
        if place.flags & _CRC and self._check is not None:
            if sink is not None:
                data = sink.view()[:length] if isinstance(sink, Span) else sink[:length]
            if not self._check(place.crc, data):
                results[position] = MISS
                return
        self.hits += 1
        results[position] = got

    def _count(self, length: int) -> None:
        self._bytes += length
        if self._bytes >= EXCHANGE_BYTES:
            self._bytes = 0
            self.until = time.monotonic() + self.path.deadline_s * SHARE

    # -- large values ---------------------------------------------------------------------------------

    def _fetch_striped(self, position: int, place: Place) -> bool:
        """Post the pieces of a large value on all links, into the caller's memory."""
        sink = self.sinks[position]
        assert type(sink) is Span and sink.registration is not None
        wires = self.wires
        keys = [sink.registration.lkey(wire.rail) for wire in wires]
        if None in keys:
            self._large.append((position, place))
            return True
        group = _Group(self._next_wire(), self._pages.pop())
        waits = []
        for number, wire in enumerate(wires):
            key, spots = keys[number], place.at(wire.side)
            assert key is not None
            ops: list[Op] = []
            if wire is group.wire:
                touch = self._touched(wire, place)
                if touch is not None:
                    ops.append(touch)
                ops.append((READ, group.page.words, wire.lkey, 8, spots.word, spots.word_key))
                if not place.proved:
                    ops.append((READ, group.page.between, wire.lkey, SLOT_BYTES, spots.slot, spots.slot_key))
            # By the value's own bytes, as regions may be cut differently on each rail.
            for at in range(number * STRIPE_BYTES, place.length, len(wires) * STRIPE_BYTES):
                local = sink.address + at
                for remote, rkey, part in wire.side.split(place.offset + at, min(STRIPE_BYTES, place.length - at)):
                    ops.append((READ, local, key, part, remote, rkey))
                    local += part
            if ops:
                waits.append((wire, wire.post(ops, self.until)))
        group.waits = waits
        group.slot_behind = True
        group.items = [(position, place, place.length, -1)]
        self._flying.append(group)
        return True

    def _read_large(self, position: int, place: Place) -> None:
        """A large value into memory that is not registered: a sliding window of bounce blocks. Nothing else is under
        way. Changed under way, it is left to TCP, which is no worse at that size."""
        if not self.loan:
            self.loan = self.path.bounce.take(LOAN_BLOCKS, self.until)
            self._blocks = list(self.loan)
        sink, length = self.sinks[position], place.length
        new = bytearray(length) if sink is None else None
        target = (
            address_of(memoryview(new)) if new is not None
            else sink.address if type(sink) is Span else address_of(sink)  # type: ignore[arg-type]
        )  # fmt: skip
        page, first = self._pages[-1], self.wires[0]
        spots = place.at(first.side)
        touch = self._touched(first, place)
        head: list[Op] = [(READ, page.words, first.lkey, 8, spots.word, spots.word_key)]
        if not place.proved:
            head.append((READ, page.between, first.lkey, SLOT_BYTES, spots.slot, spots.slot_key))
        if touch is not None:
            head.append(touch)
        first.link.wait(first.post(head, self.until), self.until)
        blocks, window = self.loan, deque[tuple[Wire, int, Block, int, int]]()
        at = turn = 0
        while at < length or window:
            if at < length and len(window) < len(blocks):
                wire = self.wires[turn % len(self.wires)]
                block = blocks[turn % len(blocks)]
                part = min(BLOCK_BYTES, length - at)
                ops: list[Op] = []
                local, key = block.address, _key_of(block, wire)
                for remote, rkey, size in wire.side.split(place.offset + at, part):
                    ops.append((READ, local, key, size, remote, rkey))
                    local += size
                window.append((wire, wire.post(ops, self.until), block, at, part))
                at += part
                turn += 1
                continue
            wire, ticket, block, start, part = window.popleft()
            wire.link.wait(ticket, self.until)
            self._copier.copy(target + start, block.address, part)
        slot: Op = (FENCED_READ, page.images, first.lkey, SLOT_BYTES, spots.slot, spots.slot_key)
        first.link.wait(first.post([slot], self.until), self.until)
        between = self.lane.memory[page.between_at : page.between_at + SLOT_BYTES]
        now = self.lane.memory[page.images_at : page.images_at + SLOT_BYTES]
        if not confirmed(place, between, now, self.lane.words[page.words_at]):
            self.locations.drop(self.digests[position])
            self.retries += 1
            self.left.append(position)
            return
        self.settled.add(position)
        self.locations.put(self.digests[position], place)
        self._count(length)
        if place.flags & _CRC and self._check is not None:
            data: Any = new if new is not None else sink.view()[:length] if isinstance(sink, Span) else sink[:length]  # type: ignore[index]
            if not self._check(place.crc, data):
                self.results[position] = MISS
                return
        self.hits += 1
        self.results[position] = bytes(new) if new is not None else length

    # -- one key --------------------------------------------------------------------------------------

    def _read_one(self, position: int) -> bool:
        """A single key whose place is known, in one chain; False where that does not fit, or did not come out."""
        digest = self.digests[position]
        place = self.locations.get(digest)
        sink = self.sinks[position]
        if place is None or type(sink) is not Span or sink.registration is None:
            return False
        length = place.length
        if length > sink.size or (length >= STRIPE_BYTES and len(self.wires) > 1):
            return False
        wire, page = self.wires[0], self._pages[-1]
        key = sink.registration.lkey(wire.rail)
        if key is None:
            return False
        spots, lkey, local = place.at(wire.side), wire.lkey, sink.address
        ops: list[Op] = [(READ, page.words, lkey, 8, spots.word, spots.word_key)]
        if not place.proved:
            ops.append((READ, page.between, lkey, SLOT_BYTES, spots.slot, spots.slot_key))
        touch = self._touched(wire, place)
        if touch is not None:
            ops.append(touch)
        for address, rkey, part in spots.pieces:
            ops.append((READ, local, key, part, address, rkey))
            local += part
        ops.append((FENCED_READ, page.images, lkey, SLOT_BYTES, spots.slot, spots.slot_key))
        wire.link.wait(wire.post(ops, self.until), self.until)
        memory, at, between_at = self.lane.memory, page.images_at, page.between_at
        word = self.lane.words[page.words_at]
        between = memory[between_at : between_at + SLOT_BYTES]
        if confirmed(place, between, memory[at : at + SLOT_BYTES], word):
            self._deliver(position, place, length, None, -1)
            return True
        self.retries += 1
        self.locations.drop(digest)
        return False


def _registered(sink: Sink) -> bool:
    return type(sink) is Span and sink.registration is not None


def _key_of(block: Block, wire: Wire) -> int:
    """The key of a bounce block. Raises FabricError where it cannot be registered."""
    key = block.registration.lkey(wire.rail)
    if key is None:
        raise FabricError("the bounce pool cannot be registered: raise the memlock limit")
    return key

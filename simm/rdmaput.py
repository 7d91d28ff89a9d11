"""PUT over RDMA: WRITE into a granted chunk, make sure that it is there, commit.

    WRITE the value's pieces, READ their last 8 bytes       one chain a group, on one link
    COMMIT                                                  over the lane's control connection

The READ is the flush: when it has completed, the WRITEs ahead of it on its link are in the server's memory and visible
to its processors (a WRITE's own completion says only that the peer's device has it). Not before is the grant named
in a COMMIT. A value that is spread over several links is flushed on each of them.

Groups have up to GROUP_KEYS values and a few MiB. While one is committed the next ones are being written, and a COMMIT
is answered while others are under way; so a batch waits for the network's bandwidth only. Each commit asks for as many
grants as it spends (:func:`~simm.shmput.wanted`), so a put on its own is one chain and one exchange. Who needs grants
at once commits what is written first, and takes what the answers bring.

Errors: ``rdmapath.py`` says what becomes of what. Of a key that comes twice in a batch the later value is stored: when
the later one was settled here, the earlier one does not go by TCP after it.
An endpoint that has no grants to give because its worker is down says so, and is none the worse for it: what needs one
goes by TCP, and the lane stays.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from . import messages as M
from .bounce import BLOCK_BYTES, Block
from .buffers import RELEASE_BYTES, Copier, Span, address_of
from .channel import Refused
from .errors import RemoteProtocolError, TransportError
from .fabric import READ, WRITE, FabricError, Op
from .lane import Lane, LaneGrant, Wire
from .layout import EntryFlag
from .messages import Status
from .rdmapath import SHARE, RdmaPath
from .remote_arena import OP_BYTES_MAX
from .session import ahead
from .shmput import wanted
from .sizes import chunk_bytes_for

log = logging.getLogger("simm.client")

#: Values and bytes of one group, which is one commit.
GROUP_KEYS: Final = 16
GROUP_BYTES: Final = 2 << 20
#: Groups being written at a time, for each link; and commits that are not answered yet.
DEEP: Final = 2
FLYING_MAX: Final = 8
#: A batch asks for so many bytes of grants at once.
ASK_BYTES: Final = 32 << 20
LOAN_BLOCKS: Final = 8
#: From here on a value is spread over all links of a lane.
STRIPE_BYTES: Final = OP_BYTES_MAX
#: After so many bytes a deadline begins anew, as TCP's exchanges have it.
EXCHANGE_BYTES: Final = 64 << 20

_CRC: Final = int(EntryFlag.CRC)
_STALE: Final = int(Status.STALE_GRANT)
_UNAVAILABLE: Final = int(Status.UNAVAILABLE)

Source = memoryview | Span


class RdmaPut:
    """A client's puts by RDMA; any thread may call it."""

    def __init__(self, copier: Copier, checksum: bool, counters: dict[str, int]) -> None:
        self._copier = copier
        self._checksum = checksum
        self.counters = counters

    def put(
        self, path: RdmaPath, positions: Sequence[int], digests: Sequence[bytes], sources: Sequence[Source],
        statuses: list[int],
    ) -> tuple[list[int], float]:  # fmt: skip
        """Put what stands at ``positions`` and fill the Statuses in. Returned are the positions that TCP must see to,
        and until when (monotonic seconds).

        When it returns, or raises, nothing of it reads the caller's memory any more.
        """
        until = time.monotonic() + path.deadline_s * SHARE
        try:
            lane = path.take(until)
        except TransportError as exc:
            log.debug("%r: %s", path, exc)
            self.counters["rdma_fallbacks"] += len(positions)
            return list(positions), until + path.deadline_s * (1 - SHARE)
        writing = Writing(self._copier, self._checksum, digests, sources, statuses)
        done = False
        try:
            try:
                writing.begin(path, lane, until)
                writing.put(positions)
            except (TransportError, RemoteProtocolError) as exc:
                path.lost(lane, str(exc))
            except BaseException:
                path.lost(lane, "interrupted")
                raise
            else:
                lane.channel.bound()
                done = True
                path.give(lane)
        finally:
            if done or not lane.wires:  # else a link could not be closed, and may still read them
                path.bounce.give(writing.loan)
        left = writing.left_over(positions)
        self.counters["rdma_puts"] += writing.stored
        self.counters["rdma_fallbacks"] += len(left)
        return left, writing.until + path.deadline_s * (1 - SHARE)


class _Group:
    """Values that are written together, and then committed."""

    __slots__ = ("block", "bytes", "entries", "flushes", "grants", "ops", "positions", "used", "waits", "wire")

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.positions: list[int] = []
        self.entries: list[tuple[bytes, int, int, int, int, int]] = []
        self.grants: list[LaneGrant] = []
        self.ops: list[Op] = []
        #: The last bytes written on each link: (remote address, rkey, bytes).
        self.flushes: dict[Wire, tuple[int, int, int]] = {}
        self.waits: list[tuple[Wire, int]] = []
        self.block: Block | None = None
        self.used = 0
        self.bytes = 0


class Writing:
    """One call's puts on one lane."""

    def __init__(
        self, copier: Copier, checksum: bool, digests: Sequence[bytes], sources: Sequence[Source], statuses: list[int]
    ) -> None:
        self._copier = copier
        self._checksum = checksum
        self.digests = digests
        self.sources = sources
        self.statuses = statuses
        self.loan: list[Block] = []
        self.stored = 0
        #: When this must be over: a share of the deadline.
        self.until = 0.0
        #: Answered, whatever the answer; and those whose commit was sent.
        self._answered: set[int] = set()
        self._sent: set[int] = set()
        #: For TCP, though nothing is wrong with the lane.
        self._left: set[int] = set()

    def begin(self, path: RdmaPath, lane: Lane, until: float) -> None:
        """On this lane, until then."""
        self.path = path
        self.lane = lane
        self.until = until
        lane.channel.bound(until)
        self._turn = 0
        self._bytes = 0
        self._blocks: list[Block] = []
        self._writing: deque[_Group] = deque()
        self._flying: deque[tuple[int, _Group]] = deque()
        self._group: _Group | None = None
        self._positions: Sequence[int] = ()
        self._todo = 0
        self._refused = False

    def left_over(self, positions: Sequence[int]) -> list[int]:
        """What TCP must see to: neither answered nor sent, and not superseded by a later value of this batch."""
        left = [position for position in positions if position not in self._answered and position not in self._sent]
        if not left:
            return left
        digests, statuses = self.digests, self.statuses
        last: dict[bytes, int] = {}
        unknown = {digests[position] for position in self._sent - self._answered}
        for position in positions:
            if position in self._answered or position in self._sent:
                last[digests[position]] = position
        for position in self._sent - self._answered:
            statuses[position] = _UNAVAILABLE
        kept = []
        for position in left:
            digest = digests[position]
            later = last.get(digest, -1)
            if digest in unknown:  # that commit may yet be carried out, after whatever we do now
                statuses[position] = _UNAVAILABLE
            elif later > position:
                statuses[position] = statuses[later]
            else:
                kept.append(position)
        return kept

    # -- the batch ----------------------------------------------------------------------------------

    def put(self, positions: Sequence[int]) -> None:
        """Put them all. Raises TransportError; :meth:`left_over` says what is left then."""
        sources, lane = self.sources, self.lane
        self._positions = positions
        self._todo = len(positions)
        short = False
        for position in positions:
            source = sources[position]
            self._todo -= 1
            if isinstance(source, Span) and type(source) is not Span:
                self._left.add(position)  # GPU memory
                continue
            grant = self._grant(len(source))
            if grant is None:
                log.debug("%r: no grant for %d bytes", lane, len(source))
                self._left.add(position)
                short = True
                continue
            self._write(position, source, grant)
        self._post()
        while self._writing:
            self._commit(self._writing.popleft())
        while self._flying:
            self._collect()
        if short:  # who puts these now needs the room that we keep for others
            lane.return_idle()

    def _grant(self, length: int) -> LaneGrant | None:
        """A grant for a value of this size; None when there is no room for more."""
        lane = self.lane
        grant = lane.take(length)
        while grant is None and self._flying:
            self._collect()  # answers bring grants
            grant = lane.take(length)
        if grant is None:
            # Nobody waits for a grant while holding an uncommitted one.
            self._post()
            while self._writing:
                self._commit(self._writing.popleft())
            while self._flying:
                self._collect()
            grant = lane.take(length)
        if grant is None and not self._refused:
            try:
                lane.ask(length, self._alike(length))
                grant = lane.take(length)
                if grant is None and lane.return_idle():
                    lane.ask(length, 1)
                    grant = lane.take(length)
            except Refused as exc:  # its worker is down: reads by this lane go on meanwhile
                log.debug("no grants: %s", exc)
                self._refused = True
        return grant

    def _alike(self, length: int) -> int:
        """How many grants to ask for at once: for all values of this chunk size that are left, this one included."""
        chunk = chunk_bytes_for(length)
        most = max(1, ahead(chunk), ASK_BYTES // chunk)
        left = self._todo + 1
        if left == 1 or most == 1:
            return 1
        sources = self.sources
        alike = 0
        # Each chunk of another size than is needed may keep a slab from who needs it.
        for position in self._positions[-left:]:
            alike += chunk_bytes_for(len(sources[position])) == chunk
            if alike == most:
                break
        return alike

    def _write(self, position: int, source: Source, grant: LaneGrant) -> None:
        """Post, or get ready to post, the WRITEs of one value."""
        length = len(source)
        registration = source.registration if type(source) is Span else None
        wires = self.lane.wires
        if registration is not None and any([registration.lkey(wire.rail) is None for wire in wires]):  # noqa: C419
            registration = None
        if registration is None and length > BLOCK_BYTES:
            self._write_large(position, source, grant)
            return
        striped = length >= STRIPE_BYTES and len(wires) > 1 and registration is not None
        group = self._group
        if group is not None and (
            striped or len(group.positions) >= GROUP_KEYS or group.bytes + length > GROUP_BYTES
            or (registration is None and group.used + length > BLOCK_BYTES)
        ):  # fmt: skip
            self._post()
            group = None
        if group is None:
            self._turn += 1
            group = self._group = _Group(wires[self._turn % len(wires)])
        crc, flags = 0, 0
        if registration is None:
            local = self._into_block(group, source, length)
            assert group.block is not None
            key = _key_of(group.block, group.wire)
            if self._checksum:
                start = local - group.block.address
                crc, flags = zlib.crc32(group.block.view[start : start + length]), _CRC
        else:
            assert type(source) is Span
            local = source.address
            found = registration.lkey(group.wire.rail)
            assert found is not None
            key = found
            if self._checksum:
                crc, flags = zlib.crc32(source.view()), _CRC
        group.positions.append(position)
        group.entries.append((self.digests[position], grant[0], length, crc, flags, 0))
        group.grants.append(grant)
        group.bytes += length
        if not striped:
            self._add(group, group.wire, grant, 0, length, local, key, group.ops)
            return
        assert registration is not None
        for number, wire in enumerate(wires):
            ops: list[Op] = []
            found = registration.lkey(wire.rail)
            assert found is not None
            for at in range(number * STRIPE_BYTES, length, len(wires) * STRIPE_BYTES):
                self._add(group, wire, grant, at, min(STRIPE_BYTES, length - at), local + at, found, ops)
            if not ops:
                continue
            if wire is group.wire:
                group.ops = ops
            else:
                ops.append(self._flush(wire, group.flushes.pop(wire)))
                group.waits.append((wire, wire.post(ops, self.until)))
        self._post()

    def _add(
        self, group: _Group, wire: Wire, grant: LaneGrant, at: int, length: int, local: int, key: int, ops: list[Op]
    ) -> None:
        """WRITEs of bytes ``at`` to ``at + length`` of a value. Raises FabricError."""
        lane, side = self.lane, wire.side
        start = grant[1] + at
        if lane.windows:
            rkey = grant[3][wire.number]
            if not rkey:
                raise FabricError("a grant without a key for one of the links")
            pieces = side.keyed(start, length, rkey)
        else:
            pieces = side.split(start, length, writable=True)
        for remote, rkey, part in pieces:
            ops.append((WRITE, local, key, part, remote, rkey))
            local += part
        tail = min(8, length)
        group.flushes[wire] = side.split(start + length - tail, tail)[-1]

    def _flush(self, wire: Wire, last: tuple[int, int, int]) -> Op:
        """The READ behind the WRITEs of a chain."""
        address, rkey, tail = last
        return READ, self.lane.flushed, wire.lkey, tail, address, rkey

    def _post(self) -> None:
        """The group at hand is complete: off it goes; the oldest ones are committed."""
        group, self._group = self._group, None
        if group is None:
            return
        wire = group.wire
        if group.ops:
            group.ops.append(self._flush(wire, group.flushes[wire]))
            group.waits.append((wire, wire.post(group.ops, self.until)))
            group.ops = []
        writing = self._writing
        writing.append(group)
        # What is there by now is committed while the next group is made: with two groups in a batch it makes a third.
        while writing and (len(writing) > DEEP * len(self.lane.wires) or _arrived(writing[0])):
            self._commit(writing.popleft())

    # -- memory of our own --------------------------------------------------------------------------

    def _take_loan(self) -> None:
        if not self.loan:
            self.loan = self.path.bounce.take(LOAN_BLOCKS, self.until)
            self._blocks = list(self.loan)

    def _into_block(self, group: _Group, source: Source, length: int) -> int:
        """Copy a value into the group's block: where it lies."""
        if group.block is None:
            self._take_loan()
            while not self._blocks:
                self._commit(self._writing.popleft())  # whose block is free then
            group.block = self._blocks.pop()
        block, at = group.block, group.used
        group.used = at + (length + 63 & -64)
        if type(source) is Span:
            self._copier.copy(block.address + at, source.address, length)
        elif length < RELEASE_BYTES:
            block.view[at : at + length] = source  # type: ignore[assignment]
        else:
            self._copier.copy(block.address + at, address_of(source), length)  # type: ignore[arg-type]
        return block.address + at

    def _write_large(self, position: int, source: Source, grant: LaneGrant) -> None:
        """A large value out of memory that is not registered: block by block, each written while the next is filled.

        When it returns, all of it is there; the commit is a group's of its own.
        """
        self._post()
        self._take_loan()
        while self._writing:
            self._commit(self._writing.popleft())
        lane, length, blocks = self.lane, len(source), self.loan
        origin = source.address if type(source) is Span else address_of(source)  # type: ignore[arg-type]
        group = _Group(lane.wires[0])
        busy: deque[tuple[Wire, int]] = deque()
        crc = 0
        for turn, at in enumerate(range(0, length, BLOCK_BYTES)):
            part = min(BLOCK_BYTES, length - at)
            if len(busy) == len(blocks):
                wire, ticket = busy.popleft()
                wire.link.wait(ticket, self.until)
            block, wire = blocks[turn % len(blocks)], lane.wires[turn % len(lane.wires)]
            self._copier.copy(block.address, origin + at, part)
            if self._checksum:
                crc = zlib.crc32(block.view[:part], crc)
            ops: list[Op] = []
            self._add(group, wire, grant, at, part, block.address, _key_of(block, wire), ops)
            busy.append((wire, wire.post(ops, self.until)))
        for wire, last in group.flushes.items():
            wire.link.wait(wire.post([self._flush(wire, last)], self.until), self.until)
        group.positions, group.grants, group.bytes = [position], [grant], length
        flags = _CRC if self._checksum else 0
        group.entries = [(self.digests[position], grant[0], length, crc, flags, 0)]
        self._commit(group)

    # -- commits --------------------------------------------------------------------------------------

    def _commit(self, group: _Group) -> None:
        """Wait until a group is there, and commit it; the answer is taken later."""
        for wire, ticket in group.waits:
            wire.link.wait(ticket, self.until)
        if group.block is not None:
            self._blocks.append(group.block)
            group.block = None
        while len(self._flying) >= FLYING_MAX:
            self._collect()
        lane = self.lane
        spent: dict[int, int] = {}
        for entry in group.entries:
            spent[entry[2]] = spent.get(entry[2], 0) + 1
        wants = []
        left = self._todo + sum(len(other.positions) for other in self._writing)
        for length, count in spent.items():
            count = wanted(lane.have(length), count, left, ahead(chunk_bytes_for(length)))
            if count:
                wants.append((length, count))
        self._sent.update(group.positions)  # whatever becomes of the sending
        self._flying.append((lane.channel.submit(M.Commit(group.entries, wants)), group))
        self._bytes += group.bytes
        if self._bytes >= EXCHANGE_BYTES:
            self._bytes = 0
            self.until = time.monotonic() + self.path.deadline_s * SHARE
            lane.channel.bound(self.until)

    def _collect(self) -> None:
        """Take the oldest commit's answer."""
        number, group = self._flying.popleft()
        lane = self.lane
        answer: Any = lane.channel.result(lane.channel.wait(number))
        stale = False
        for position, status in zip(group.positions, lane.granted(answer, len(group.positions))):
            if status == _STALE:  # nothing was stored: the worker is another by now
                self._sent.discard(position)
                self._left.add(position)
                stale = True
                continue
            self._answered.add(position)
            self.statuses[position] = status
            self.stored += not status
            # Where it lay until now: to read there would cost the whole value, to find that it is not that any more.
            lane.locations.drop(self.digests[position])
        if stale:  # so are the others that we hold
            log.debug("%r: its grants were another worker's", lane)
            lane.return_idle()


def _arrived(group: _Group) -> bool:
    """Are its values in the server's memory? Does not wait. Raises FabricError when a link broke."""
    return all([wire.link.poll() >= ticket for wire, ticket in group.waits])  # noqa: C419


def _key_of(block: Block, wire: Wire) -> int:
    """The key of a bounce block. Raises FabricError where it cannot be registered."""
    key = block.registration.lkey(wire.rail)
    if key is None:
        raise FabricError("the bounce pool cannot be registered: raise the memlock limit")
    return key

"""PUT over RDMA: WRITE into a granted chunk, flush, commit. docs/architecture.md, "PUT", has the exchange.

A flush is a READ of the last 8 bytes. Once it has completed, the WRITEs before it on its queue pair are in the server's
memory and visible to its processors. (A WRITE's own completion only says that the peer's device has it.) A grant is
named in a COMMIT only after that. A value that is striped over several queue pairs is flushed on each of them.

While a group of up to GROUP_KEYS values is being committed, the next ones are being written, so a batch waits only for
the network's bandwidth. Each commit requests as many grants as it spends. A put that needs a grant at once first
commits what is written, and takes the grants that the answers bring.

If a key comes twice in a batch, the later value is stored: once the later one is settled here, the earlier one does not
go by TCP. An endpoint whose worker is down says that it has no grants. Puts that need one then use TCP, and the
connection stays.
"""

from __future__ import annotations

import itertools
import logging
import time
import zlib
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from ..arena.layout import ENTRY_CRC
from ..host.buffers import RELEASE_BYTES, Copier, Pieces, Span, address_of
from ..host.parts import checksum, cut, gather, host_pieces, on_device
from ..ipc.grant_pool import KeyedGrant, obtain, request_count, return_idle, target_count
from ..ipc.steps import Steps
from ..net.channel import ChannelWait, Refused
from ..rdma.api import READ, WRITE, FabricError, Op
from ..rdma.staging import BLOCK_BYTES, StagingBuffer
from ..slab import chunk_bytes_for
from ..wire import messages as M
from ..wire.messages import Status
from .batch import PutBatch
from .rdma_connection import PairedLink, RdmaConnection
from .rdma_pool import RdmaPath
from .rdma_transfer import (
    DEEP,
    STRIPE_BYTES,
    Group,
    Transfer,
    add_pieces,
    arrived,
    chain_wait,
    key_of,
    stripes,
    unregistered,
)

log = logging.getLogger("simm.client")

#: Values and bytes of one group, which is one commit.
GROUP_KEYS: Final = 16
GROUP_BYTES: Final = 2 << 20
#: The most commits without an answer.
COMMITS_MAX: Final = 8

Source = memoryview | Span


def put(
    path: RdmaPath, positions: Sequence[int], batch: PutBatch, copier: Copier, checksum: bool, counters: dict[str, int]
) -> Steps[tuple[list[int], float]]:
    """Put the values at ``positions`` and fill in their statuses, in steps.

    Return the positions that TCP must handle, and until when (monotonic seconds). When this returns or raises, nothing
    reads the caller's memory any more.
    """
    writing = Writing(batch, copier, checksum)
    left = yield from writing.run(path, positions, counters)
    counters["rdma_puts"] += writing.stored
    return left, writing.tcp_until


class _Group(Group):
    """Values that are written together and then committed."""

    __slots__ = ("bytes", "entries", "flushes", "grants", "ops", "positions", "used")

    def __init__(self, link: PairedLink) -> None:
        super().__init__(link)
        self.positions: list[int] = []
        self.entries: list[tuple[bytes, int, int, int, int, int]] = []
        self.grants: list[KeyedGrant] = []
        self.ops: list[Op] = []
        #: The last bytes written on each queue pair: (remote address, rkey, bytes).
        self.flushes: dict[PairedLink, tuple[int, int, int]] = {}
        self.used = 0
        self.bytes = 0


class Writing(Transfer):
    """One call's puts on one connection."""

    def __init__(self, batch: PutBatch, copier: Copier, checksum: bool) -> None:
        super().__init__(copier, batch.digests)
        self._checksum = checksum
        self.sources = batch.sources
        self.statuses = batch.statuses
        self._room = batch.room
        self.stored = 0
        #: Answered, whatever the answer; and those whose commit was sent.
        self._answered: set[int] = set()
        self._sent: set[int] = set()

    def begin(self, connection: RdmaConnection, until: float) -> None:
        """Use this connection until ``until``."""
        super().begin(connection, until)
        connection.channel.bound(until)
        self._writing: deque[_Group] = deque()
        self._committing: deque[tuple[int, _Group]] = deque()
        self._group: _Group | None = None
        self._positions: Sequence[int] = ()
        self._todo = 0
        self._refused = False

    def left_over(self, positions: Sequence[int], done: bool) -> list[int]:
        """Return the positions that TCP must handle: neither answered nor sent, nor superseded in this batch."""
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
            statuses[position] = Status.UNAVAILABLE
        kept = []
        for position in left:
            digest = digests[position]
            later = last.get(digest, -1)
            if digest in unknown:  # that commit may yet be carried out, after anything done now
                statuses[position] = Status.UNAVAILABLE
            elif later > position:
                statuses[position] = statuses[later]
            else:
                kept.append(position)
        return kept

    # -- the batch ----------------------------------------------------------------------------------

    def needs_blocks(self, positions: Sequence[int]) -> bool:
        """Return whether some values are in memory that is not registered with all devices in use."""
        sources = map(self.sources.__getitem__, positions)
        parts = itertools.chain.from_iterable(each.parts if type(each) is Pieces else (each,) for each in sources)
        return unregistered(parts, self.links)

    def carry_out(self, positions: Sequence[int]) -> Steps[None]:
        """Put all. Raises TransportError; :meth:`left_over` returns what is left then."""
        sources, connection = self.sources, self.connection
        self._positions = positions
        self._todo = len(positions)
        short = False
        for position in positions:
            source = sources[position]
            self._todo -= 1
            if on_device(source):
                continue
            grant = self._grant(len(source))
            if grant is None:
                log.debug("%r: no grant for %d bytes", connection, len(source))
                short = True
                continue
            self._write(position, source, grant)
        self._post()
        while self._writing:
            yield chain_wait(self, self._writing[0])
            connection.channel.extend(self.until)  # with this, if other work has held up the thread
            self._commit(self._writing.popleft())
        while self._committing:
            yield ChannelWait(connection.channel, self._committing[0][0], last=len(self._committing) == 1)
            self.extend(connection.channel.until)
            self._collect()
        if short:  # TCP needs the room that idle grants hold
            return_idle(connection)
        connection.channel.bound()

    def _settle(self) -> None:
        """Commit everything that was written, and take all answers."""
        self._post()
        while self._writing:
            self._commit(self._writing.popleft())
        while self._committing:
            self._collect()

    def _grant(self, length: int) -> KeyedGrant | None:
        """Return a grant for a value of this size; None if there is no room."""
        connection = self.connection
        grant = connection.pool.take(length)
        while grant is None and self._committing:
            self._collect()  # answers bring grants
            grant = connection.pool.take(length)
        if grant is None:
            self._settle()  # a put must not wait for a grant while it holds an uncommitted one
            grant = connection.pool.take(length)
        if grant is None and not self._refused:
            try:
                wait_s = (self.until - time.monotonic()) / 2
                grant = obtain(connection, length, self._alike(length), room=self._room, wait_s=wait_s)
            except Refused as exc:  # the worker is down; reads by this connection go on
                log.debug("no grants: %s", exc)
                self._refused = True
        return grant

    def _alike(self, length: int) -> int:
        """Return the number of grants to request: for all remaining values of this chunk size, including this one."""
        chunk = chunk_bytes_for(length)
        left = self._todo + 1
        most = request_count(chunk, left)
        if most == 1:
            return 1
        sources = self.sources
        alike = 0
        # A chunk of a size that is not needed may keep a slab from another client.
        for position in self._positions[-left:]:
            alike += chunk_bytes_for(len(sources[position])) == chunk
            if alike == most:
                break
        return alike

    def _write(self, position: int, source: Source, grant: KeyedGrant) -> None:
        """Post the WRITEs of one value, or add them to the current group."""
        length = len(source)
        registration = source.registration if type(source) is Span else None
        links = self.links
        if registration is not None and any([registration.lkey(link.rail) is None for link in links]):  # noqa: C419
            registration = None
        direct = registration is not None or (type(source) is Pieces and self._keys(source))
        if not direct and length > BLOCK_BYTES:
            self._write_large(position, source, grant)
            return
        striped = length >= STRIPE_BYTES and len(links) > 1 and registration is not None
        group = self._group
        if group is not None and (
            striped or len(group.positions) >= GROUP_KEYS or group.bytes + length > GROUP_BYTES
            or (not direct and group.used + length > BLOCK_BYTES)
        ):  # fmt: skip
            self._post()
            group = None
        if group is None:
            group = self._group = _Group(self.next_link())
        crc, flags = 0, 0
        key = local = 0
        if not direct:
            local = self._into_block(group, source, length)
            assert group.block is not None
            key = key_of(group.block, group.link)
            if self._checksum:
                start = local - group.block.address
                crc, flags = zlib.crc32(group.block.view[start : start + length]), ENTRY_CRC
        else:
            if registration is not None:
                local, key = source.address, _lkey(registration, group.link)  # type: ignore[union-attr]
            if self._checksum:
                crc, flags = checksum(host_pieces(source)), ENTRY_CRC
        group.positions.append(position)
        group.entries.append((self.digests[position], grant[0], length, crc, flags, 0))
        group.grants.append(grant)
        group.bytes += length
        if not striped:
            if direct and registration is None:
                self._add_pieces(group, grant, source)
            else:
                self._add(group, group.link, grant, 0, length, local, key, group.ops)
            return
        assert registration is not None
        for number, link in enumerate(links):
            ops: list[Op] = []
            found = _lkey(registration, link)
            for at, part in stripes(number, len(links), length):
                self._add(group, link, grant, at, part, local + at, found, ops)
            if not ops:
                continue
            if link is group.link:
                group.ops = ops
            else:
                ops.append(self._flush(link, group.flushes.pop(link)))
                group.waits.append((link, link.post(ops, self.until)))
        self._post()

    def _add_pieces(self, group: _Group, grant: KeyedGrant, pieces: Any) -> None:
        """Append the WRITEs of registered pieces, each to its place in the value. Raises FabricError."""
        at = 0
        for part in pieces.parts:
            self._add(
                group, group.link, grant, at, part.size, part.address, _lkey(part.registration, group.link), group.ops
            )
            at += part.size

    def _keys(self, pieces: Pieces) -> bool:
        """Return whether all pieces lie in memory that every rail in use has registered."""
        return all(
            type(part) is Span and part.registration is not None and part.registration.lkey(link.rail) is not None
            for part in pieces.parts for link in self.links
        )  # fmt: skip

    def _add(
        self, group: _Group, link: PairedLink, grant: KeyedGrant, at: int, length: int, local: int, key: int,
        ops: list[Op],
    ) -> None:  # fmt: skip
        """Append the WRITEs of bytes ``at`` to ``at + length`` of a value. Raises FabricError."""
        connection, region_map = self.connection, link.region_map
        start = grant[1] + at
        if connection.windows:
            rkey = grant[3][link.number]
            if not rkey:
                raise FabricError("a grant without a key for one of the queue pairs")
            pieces = region_map.keyed(start, length, rkey)
        else:
            pieces = region_map.split(start, length, writable=True)
        add_pieces(ops, WRITE, pieces, local, key)
        tail = min(8, length)
        group.flushes[link] = region_map.split(start + length - tail, tail)[-1]

    def _flush(self, link: PairedLink, last: tuple[int, int, int]) -> Op:
        """Return the READ behind the WRITEs of a chain."""
        address, rkey, tail = last
        return READ, self.connection.flushed, link.lkey, tail, address, rkey

    def _post(self) -> None:
        """Post the current group, and commit the oldest groups."""
        group, self._group = self._group, None
        if group is None:
            return
        link = group.link
        if group.ops:
            group.ops.append(self._flush(link, group.flushes[link]))
            group.waits.append((link, link.post(group.ops, self.until)))
            group.ops = []
        writing = self._writing
        writing.append(group)
        # Groups that have arrived are committed while the next one is made.
        while writing and (len(writing) > DEEP * len(self.links) or arrived(writing[0])):
            self._commit(writing.popleft())

    # -- staging memory -----------------------------------------------------------------------------

    def _into_block(self, group: _Group, source: Source, length: int) -> int:
        """Copy a value into the group's block and return its address."""
        if group.block is None:
            self.borrow()
            while not self._free_blocks:
                self._commit(self._writing.popleft())  # frees its block
            group.block = self._free_blocks.pop()
        block, at = group.block, group.used
        group.used = at + (length + 63 & -64)
        if type(source) is Span:
            self._copier.copy(block.address + at, source.address, length)
        elif type(source) is Pieces:
            gather(source.parts, block.view, block.address, at, self._copier)
        elif length < RELEASE_BYTES:
            block.view[at : at + length] = source  # type: ignore[assignment]
        else:
            self._copier.copy(block.address + at, address_of(source), length)  # type: ignore[arg-type]
        return block.address + at

    def _write_large(self, position: int, source: Source, grant: KeyedGrant) -> None:
        """Write a large value from unregistered memory block by block; each is in flight while the next is filled.

        The commit is a group of its own.
        """
        self._post()
        self.borrow()
        while self._writing:
            self._commit(self._writing.popleft())
        length = len(source)
        pieces = source.parts if type(source) is Pieces else [source]
        group = _Group(self.links[0])
        crc = 0

        def build(link: PairedLink, block: StagingBuffer, at: int, part: int) -> list[Op]:
            nonlocal crc
            gather(cut(pieces, at, part), block.view, block.address, 0, self._copier)
            if self._checksum:
                crc = zlib.crc32(block.view[:part], crc)
            ops: list[Op] = []
            self._add(group, link, grant, at, part, block.address, key_of(block, link), ops)
            return ops

        self.slide(length, build)
        for link, last in group.flushes.items():
            link.qp.wait(link.post([self._flush(link, last)], self.until), self.until)
        group.positions, group.grants, group.bytes = [position], [grant], length
        flags = ENTRY_CRC if self._checksum else 0
        group.entries = [(self.digests[position], grant[0], length, crc, flags, 0)]
        self._commit(group)

    # -- commits --------------------------------------------------------------------------------------

    def _commit(self, group: _Group) -> None:
        """Wait until a group has arrived, and send its commit."""
        self.wait(group)
        self.free_block(group)
        while len(self._committing) >= COMMITS_MAX:
            self._collect()
        connection = self.connection
        spent: dict[int, int] = {}
        for entry in group.entries:
            spent[entry[2]] = spent.get(entry[2], 0) + 1
        wants = []
        left = self._todo + sum(len(other.positions) for other in self._writing)
        for length, count in spent.items():
            keep = target_count(chunk_bytes_for(length))
            count = connection.pool.refill(connection.pool.count(length), count, left, keep)
            if count:
                wants.append((length, count))
        self._sent.update(group.positions)  # even if sending fails
        self._committing.append((connection.channel.submit(M.Commit(group.entries, wants)), group))
        if self.count(group.bytes):
            connection.channel.bound(self.until)

    def _collect(self) -> None:
        """Take the answer of the oldest commit."""
        number, group = self._committing.popleft()
        connection = self.connection
        answer: Any = connection.channel.result(connection.channel.wait(number))
        stale = False
        for position, status in zip(group.positions, connection.granted(answer, len(group.positions))):
            if status == Status.STALE_GRANT:  # nothing was stored: the worker is another by now
                self._sent.discard(position)
                stale = True
                continue
            self._answered.add(position)
            self.statuses[position] = status
            self.stored += not status
            # The old entry would cost a READ of the whole value to find that it is gone.
            connection.locations.drop(self.digests[position])
        if stale:  # so are the idle grants
            log.debug("%r: its grants were another worker's", connection)
            return_idle(connection)


def _lkey(registration: Any, link: PairedLink) -> int:
    """Return the lkey of registered memory. Raises FabricError if the link's rail does not know it any more."""
    key: int | None = registration.lkey(link.rail)
    if key is None:
        raise FabricError("memory that a put reads has been deregistered")
    return key

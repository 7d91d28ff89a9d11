"""What gets and puts over RDMA share: groups of keys on one connection, their chains, stripes, staging and deadline.

``sdk/rdma_get.py`` and ``sdk/rdma_put.py`` have what a group does. :class:`Transfer` runs one call's groups on a
connection of ``sdk/rdma_pool.py``, and leaves to TCP what they have not settled.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from ..errors import PeerError, TransportError
from ..host.buffers import Copier, Span
from ..ipc.steps import Polled, Steps
from ..net.allowance import allowed
from ..rdma.api import FabricError, Op
from ..rdma.remote_arena import OP_BYTES_MAX
from ..rdma.staging import BLOCK_BYTES, StagingBuffer
from .rdma_connection import PairedLink, RdmaConnection
from .rdma_pool import RdmaPath

log = logging.getLogger("simm.client")

#: The share of a deadline that RDMA may use before TCP has its turn.
SHARE: Final = 0.5
#: Values of this size and more are striped over all queue pairs of a connection.
STRIPE_BYTES: Final = OP_BYTES_MAX
#: Groups in flight on each queue pair.
DEEP: Final = 2
EXCHANGE_BYTES: Final = 64 << 20
STAGING_BLOCKS: Final = 8


#: For :meth:`Transfer.slide`: the operations of a part of a value (link, block, offset, bytes); what takes its bytes.
Build = Callable[[PairedLink, StagingBuffer, int, int], list[Op]]
Drain = Callable[[StagingBuffer, int, int], None]


class Group:
    """Keys that travel together, on ``link``; ``waits`` must be done before the next step."""

    __slots__ = ("block", "link", "waits")

    def __init__(self, link: PairedLink) -> None:
        self.link = link
        self.block: StagingBuffer | None = None
        self.waits: list[tuple[PairedLink, int]] = []


class Transfer:
    """One call's transfers on one connection. Subclasses implement the three methods that raise NotImplementedError.

    Chains are posted in groups of keys. Each group uses one queue pair, in turn, unless its value is striped over all
    of them. Values in unregistered memory pass through staging blocks, of which a call takes STAGING_BLOCKS at most,
    once; a group uses one, and a value larger than a block slides through all. A call may use SHARE of its deadline
    before TCP has its turn. After EXCHANGE_BYTES that starts anew, as in TCP's exchanges.
    """

    def __init__(self, copier: Copier, digests: Sequence[bytes]) -> None:
        self._copier = copier
        self.digests = digests
        #: The staging blocks of this call; ``_free_blocks`` are those that no group uses.
        self.blocks: list[StagingBuffer] = []
        #: When this must be over, monotonic seconds: a share of the deadline.
        self.until = 0.0

    def begin(self, connection: RdmaConnection, until: float) -> None:
        """Use this connection until ``until``."""
        self.connection = connection
        self.links = connection.links
        self.until = until
        self._turn = 0
        self._bytes = 0
        self._free_blocks: list[StagingBuffer] = []

    def needs_blocks(self, positions: Sequence[int]) -> bool:
        """Return whether some values are in unregistered memory. :meth:`begin` has been called."""
        raise NotImplementedError

    def carry_out(self, positions: Sequence[int]) -> Steps[None]:
        """Do it all. Raises TransportError."""
        raise NotImplementedError

    def left_over(self, positions: Sequence[int], done: bool) -> list[int]:
        """Return the positions that TCP must handle; ``done`` unless the connection was lost."""
        raise NotImplementedError

    def run(self, path: RdmaPath, positions: Sequence[int], counters: dict[str, int]) -> Steps[list[int]]:
        """Carry it out on a connection of ``path``; return the positions that TCP must handle.

        At the return, also by an exception, no transfer touches local memory any more.
        """
        self.path = path
        self.until = until = time.monotonic() + allowed(path.deadline_s) * SHARE
        try:
            connection = yield from path.acquired(until)
        except TransportError as exc:
            log.debug("%r: %s", path, exc)
            count = len(positions)
            counters["rdma_fallbacks"] += count
            return list(positions)
        done = False
        try:
            try:
                self.begin(connection, until)
                if self.needs_blocks(positions):
                    yield from self._borrow()
                yield from self.carry_out(positions)
            except PeerError as exc:
                path.lost(connection, str(exc))
            except BaseException:
                path.lost(connection, "interrupted")
                raise
            else:
                done = True
                path.release(connection)
        finally:
            if done or not connection.links:  # otherwise a queue pair was not closed and may still use the blocks
                path.staging.release(self.blocks)
        left = self.left_over(positions, done)
        count = len(left)
        counters["rdma_fallbacks"] += count
        return left

    @property
    def tcp_until(self) -> float:
        """When TCP must be done with what :meth:`run` has left over, monotonic seconds."""
        return self.until + allowed(self.path.deadline_s) * (1 - SHARE)

    def next_link(self) -> PairedLink:
        """Return the queue pair for the next group, in turn."""
        self._turn += 1
        return self.links[self._turn % len(self.links)]

    def count(self, length: int) -> bool:
        """Count bytes; return True if the deadline starts anew."""
        self._bytes += length
        if self._bytes < EXCHANGE_BYTES:
            return False
        self._bytes = 0
        self.until = time.monotonic() + allowed(self.path.deadline_s) * SHARE
        return True

    def wait(self, group: Group) -> None:
        """Wait until a group's chains are done. Raises FabricError, Timeout."""
        for link, ticket in group.waits:
            link.qp.wait(ticket, self.until)

    # -- staging memory ---------------------------------------------------------------------------

    def borrow(self) -> None:
        """Take this call's blocks, unless it has them. Raises TransportError when no block is free in time."""
        if not self.blocks:
            self.blocks = self.path.staging.take(STAGING_BLOCKS, self.until)
            self._free_blocks = list(self.blocks)

    def _borrow(self) -> Steps[None]:
        """Do :meth:`borrow` in steps. As with connections, other transfers of this thread may have blocks."""
        staging = self.path.staging
        while not self.blocks:
            self.blocks = staging.take_free(STAGING_BLOCKS)
            if not self.blocks and not (yield Polled(lambda: staging.has_blocks, self.until)):
                self.borrow()
        self._free_blocks = list(self.blocks)

    def free_block(self, group: Group) -> None:
        """Free a group's block for the next one."""
        if group.block is not None:
            self._free_blocks.append(group.block)
            group.block = None

    def slide(self, length: int, build: Build, drain: Drain | None = None) -> None:
        """Move a large value through this call's blocks, each on the next queue pair.

        ``build(link, block, at, bytes)`` returns the operations of a part. ``drain(block, at, bytes)`` takes its bytes
        once it is done. Without ``drain`` the last parts may still be in flight on return. No block may be in use.
        """
        self.borrow()
        links, blocks = self.links, self.blocks
        busy: deque[tuple[PairedLink, int, StagingBuffer, int, int]] = deque()

        def finish() -> None:
            link, ticket, block, at, part = busy.popleft()
            link.qp.wait(ticket, self.until)
            if drain is not None:
                drain(block, at, part)

        for turn, at in enumerate(range(0, length, BLOCK_BYTES)):
            if len(busy) == len(blocks):
                finish()
            link, block, part = links[turn % len(links)], blocks[turn % len(blocks)], min(BLOCK_BYTES, length - at)
            busy.append((link, link.post(build(link, block, at, part), self.until), block, at, part))
        while drain is not None and busy:
            finish()


class ChainWait(Polled):
    """The wait for a group's chains to be done."""

    __slots__ = ("_transfer",)

    def __init__(self, transfer: Transfer, group: Group) -> None:
        super().__init__(lambda: _done(group), transfer.until)
        self._transfer = transfer

    def extend(self, until: float) -> None:
        """Let the rest of the transfer last until then, monotonic seconds."""
        self._transfer.until = max(self._transfer.until, until)


def _done(group: Group) -> bool:
    """Return whether a group's chains are done, or will not be."""
    try:
        return arrived(group)
    except FabricError:
        return True


def arrived(group: Group) -> bool:
    """Return whether a group's chains are done. Raises FabricError if a queue pair broke."""
    return all([link.qp.poll() >= ticket for link, ticket in group.waits])  # noqa: C419


def key_of(block: StagingBuffer, link: PairedLink) -> int:
    """Return the lkey of a block. Raises FabricError if it cannot be registered."""
    key = block.registration.lkey(link.rail)
    if key is None:
        raise FabricError("staging memory cannot be registered: raise the memlock limit")
    return key


def unregistered(memory: Iterable[object], links: Sequence[PairedLink]) -> bool:
    """Return whether some of this host memory is not registered with the device of each queue pair."""
    known: set[int] = set()
    for each in memory:
        registration = each.registration if isinstance(each, Span) else None
        if registration is None:
            return True
        if id(registration) not in known:
            known.add(id(registration))
            if any(registration.lkey(link.rail) is None for link in links):
                return True
    return False


def stripes(number: int, links: int, length: int) -> Iterator[tuple[int, int]]:
    """Yield (offset, bytes) of the stripes of a value that go over queue pair ``number`` of ``links``."""
    for at in range(number * STRIPE_BYTES, length, links * STRIPE_BYTES):
        yield at, min(STRIPE_BYTES, length - at)


def add_pieces(ops: list[Op], kind: int, pieces: Iterable[tuple[int, int, int]], local: int, key: int) -> None:
    """Append an operation between local memory and each of the remote ``pieces`` (address, rkey, bytes), in order."""
    for remote, rkey, part in pieces:
        ops.append((kind, local, key, part, remote, rkey))
        local += part

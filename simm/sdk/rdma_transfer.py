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
from ..ipc.steps import PolledFor, Steps
from ..net.allowance import allowed
from ..rdma.api import FabricError, Op
from ..rdma.remote_arena import OP_BYTES_MAX
from ..rdma.staging import BLOCK_BYTES, StagingBuffer
from .rdma_connection import CLOSE_TRIES, PairedLink, RdmaConnection
from .rdma_pool import Hold, RdmaPath

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

_NO_STAGING: Final = "staging memory cannot be registered: raise the memlock limit"


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
        #: The staging blocks that this call has taken, and those of them that all devices in use know;
        #: ``_free_blocks`` are those that no group uses.
        self._taken: list[StagingBuffer] = []
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
        self._free_blocks = list(self.blocks)

    def needs_blocks(self, positions: Sequence[int]) -> bool:
        """Return whether some values are in unregistered memory. ``links`` are there.

        Memory is registered here at its first use, which takes as long as it takes.
        """
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
        self.until = time.monotonic() + allowed(path.deadline_s) * SHARE
        hold = Hold()
        begun = False
        failure: str | None = "interrupted"
        try:
            try:
                self.connection = connection = yield from path.acquired(self, hold)
                self.links = connection.links
                ready = not self._timed(positions)
                if not ready:
                    yield from self._borrow()
                    ready = len(self.blocks) > 0
            except TransportError as exc:  # nothing is in flight, so the connection is as good as before
                log.debug("%r: %s", path, exc)
                ready = False
            if ready:
                begun = True
                self.begin(connection, self.until)
                yield from self.carry_out(positions)
            failure = None
        except PeerError as exc:
            failure = str(exc)
        finally:
            # An interrupt may come before it has begun, and others after that one. Nothing is called outside of try.
            interrupted: BaseException | None = None
            tries = 0
            try:
                while True:
                    try:
                        self._end(hold, failure)
                        break
                    except FabricError:
                        raise
                    except BaseException as exc:
                        interrupted = exc if interrupted is None else interrupted
                        tries += 1
                        if tries == CLOSE_TRIES:
                            raise
            except FabricError:
                raise
            except BaseException:
                # The interpreter takes signals where the loop begins again, too, which no handler in it sees. What is
                # left is a further one, in this handler or between two of these lines, after one that came there.
                interrupted = None  # see below
                self._end(hold, failure)
                raise
            if interrupted is not None:
                try:
                    raise interrupted
                finally:
                    del interrupted  # else the exception and this frame hold each other, and with them the connection
        left = self.left_over(positions, failure is None) if begun else list(positions)
        count = len(left)
        counters["rdma_fallbacks"] += count
        return left

    def _timed(self, positions: Sequence[int]) -> bool:
        """Do :meth:`needs_blocks`, and count the deadline from after it."""
        began = time.monotonic()
        staged = self.needs_blocks(positions)
        self.until += time.monotonic() - began
        return staged

    def _end(self, hold: Hold, failure: str | None) -> None:
        """Give back the connection, closed if there was a ``failure``, and then the blocks. Twice is harmless."""
        connection = hold.connection
        if failure is None:
            self.path.give_back(hold)
        else:
            self.path.lose(hold, failure)
            if connection is not None and connection.links:  # one could not be closed, and may still use the blocks
                return
        self.path.staging.give_back(self._taken, self.blocks if len(self.blocks) < len(self._taken) else None)

    def extend(self, until: float) -> None:
        """Let it last until then, monotonic seconds: other work has held up the thread."""
        self.until = max(self.until, until)

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
            if not self._taken:
                self.path.staging.take(STAGING_BLOCKS, self.until, self._taken)
            if not self._sift():
                raise FabricError(_NO_STAGING)
            self._free_blocks = list(self.blocks)

    def _borrow(self) -> Steps[None]:
        """Do :meth:`borrow` in steps. As with connections, other transfers of this thread may have blocks.

        There are none if the devices take none. Raises TransportError.
        """
        staging = self.path.staging
        while not self._taken:
            staging.take_free(STAGING_BLOCKS, self._taken)
            if not self._taken and not (yield PolledFor(lambda: staging.has_blocks, self)):
                staging.take(STAGING_BLOCKS, self.until, self._taken)
        if not self._sift():
            log.debug("%r: %s", self.path, _NO_STAGING)

    def _sift(self) -> bool:
        """Take those blocks into use that all devices know; return whether there are any. They are registered here."""
        known = self.connection.staged
        if known.issuperset([block.memory for block in self._taken]):
            self.blocks = list(self._taken)
            return True
        began = time.monotonic()
        rails = [link.rail for link in self.links]
        for memory in dict.fromkeys(block.memory for block in self._taken):
            if None not in [memory.registration.lkey(rail, again=True) for rail in rails]:
                known.add(memory)
        self.blocks = [block for block in self._taken if block.memory in known]
        self.until += time.monotonic() - began
        return bool(self.blocks)

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


def chain_wait(transfer: Transfer, group: Group) -> PolledFor:
    """Return the wait for a group's chains to be done."""
    return PolledFor(lambda: _done(group), transfer)


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
        raise FabricError(_NO_STAGING)
    return key


def unregistered(memory: Iterable[object], links: Sequence[PairedLink]) -> bool:
    """Return whether some of this host memory is not registered with the device of each queue pair.

    All of it is registered here with all of them, as far as it can be: what is left out now would be registered while
    the transfer's deadline runs. What could not be registered before is tried again, until one cannot. O(memory), and
    milliseconds a MiB at its first use.
    """
    known: set[int] = set()
    found = failed = False
    for each in memory:
        registration = each.registration if isinstance(each, Span) else None
        if registration is None:
            found = True
        elif id(registration) not in known:
            known.add(id(registration))
            for link in links:
                if registration.lkey(link.rail, again=not failed) is None:
                    found = failed = True
    return found


def stripes(number: int, links: int, length: int) -> Iterator[tuple[int, int]]:
    """Yield (offset, bytes) of the stripes of a value that go over queue pair ``number`` of ``links``."""
    for at in range(number * STRIPE_BYTES, length, links * STRIPE_BYTES):
        yield at, min(STRIPE_BYTES, length - at)


def add_pieces(ops: list[Op], kind: int, pieces: Iterable[tuple[int, int, int]], local: int, key: int) -> None:
    """Append an operation between local memory and each of the remote ``pieces`` (address, rkey, bytes), in order."""
    for remote, rkey, part in pieces:
        ops.append((kind, local, key, part, remote, rkey))
        local += part

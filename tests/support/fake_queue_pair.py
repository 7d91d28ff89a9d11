"""A queue pair of the network in software: ``fake_fabric.py`` says what it promises and what is random."""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from simm.errors import UsageError
from simm.rdma.api import (
    FENCED_READ,
    READ,
    WRITE,
    Access,
    Binding,
    FabricError,
    Op,
    QueuePairAddress,
    Timeout,
    Window,
)
from tests.support.fake_region import FakeRegion, FakeWindow, Refused

if TYPE_CHECKING:
    from tests.support.fake_fabric import FakeRail

#: How long a post waits for room in the queue, in seconds.
POST_S: Final = 5.0
#: How often a wait with nothing to do looks again, in seconds.
_NAP_S: Final = 0.002
#: Operations of a queue pair that may have begun and not be done.
_BEGUN: Final = 16
_NAMES: Final = MappingProxyType({READ: "READ", WRITE: "WRITE", FENCED_READ: "FENCED_READ"})


class Operation:
    """One operation in flight."""

    __slots__ = ("acked", "data", "last", "op", "pieces", "serial", "ticket")

    def __init__(self, op: Op, serial: int, ticket: int, last: bool) -> None:
        self.op, self.serial, self.ticket, self.last = op, serial, ticket, last
        #: Of a WRITE: what left for the peer, and whether the sender knows that it arrived.
        self.data: bytes | None = None
        self.acked = False
        #: What has yet to be copied, in the order to come, last first.
        self.pieces: list[tuple[int, int]] = []


class FakeQueuePair:
    """One end of a queue pair.

    ``queue`` has the operations in flight, of which the first ``begun`` have begun; ``landing`` has the WRITEs that
    left and have not landed in the peer's memory, ``stray`` the READs whose queue pair broke meanwhile.
    """

    def __init__(self, rail: FakeRail) -> None:
        network = rail.network
        self.rail, self.network = rail, network
        self.depth = rail.limits.depth
        self.qpn = network.new_key(network.queue_pairs)
        self.psn = network.rng.randrange(1 << 24)
        self.peer: QueuePairAddress | None = None
        self.queue: deque[Operation] = deque()
        self.begun = 0
        self.landing: deque[Operation] = deque()
        self.stray: list[Operation] = []
        self.serials = self.tickets = self.done = 0
        self.open = True
        #: Its completion queue has overrun: operations go on, and nobody hears when they are done.
        self.overrun = False
        self.why = self.status = ""
        self._user = threading.Lock()
        self.born = next(network.births)
        network.queue_pairs[self.qpn] = self
        rail.queue_pairs.append(self)

    # --- what simm.rdma.api asks for ---

    @property
    def broken(self) -> str:
        return self.why if self.open else self.why or "closed"

    def address(self) -> QueuePairAddress:
        return QueuePairAddress(self.rail.gid, self.rail.lid, self.qpn, self.psn, self.rail.mtu, self.rail.limits.reads)

    def connect(self, peer: QueuePairAddress) -> None:
        with self._alone(), self.network.lock:
            self._usable()
            if self.peer is not None:
                raise FabricError("the queue pair is connected already")
            if peer.gid not in self.network.rails:
                self.fail("no way to the peer's address", "")
                raise FabricError(self.why)
            self.peer = peer
            self.network.changed.notify_all()

    def post(self, ops: Sequence[Op]) -> int:
        if not 0 < len(ops) <= self.depth:
            raise UsageError(f"a chain of {len(ops)} operations, the queue pair takes 1 to {self.depth}")
        if any(op[0] not in (READ, WRITE, FENCED_READ) or op[3] < 0 for op in ops):
            raise UsageError(f"no operations: {ops}")
        with self._alone():
            self._until(lambda: len(self.queue) + len(ops) <= self.depth, time.monotonic() + POST_S, "room to post")
            with self.network.lock:
                self._usable()
                if self.peer is None:
                    raise FabricError("the queue pair is not connected")
                self.tickets += 1
                for number, op in enumerate(ops, 1):
                    self.serials += 1
                    self.queue.append(Operation(op, self.serials, self.tickets, number == len(ops)))
                if self.network.posted is not None:
                    self.network.posted.append((self, tuple(ops)))
                self.network.wake(self)
                return self.tickets

    def poll(self) -> int:
        with self._alone():
            self.network.some_steps()
            with self.network.lock:
                self._usable()
                return self.done

    def wait(self, ticket: int, until: float) -> None:
        if not 0 < ticket <= self.tickets:
            raise UsageError(f"no chain has the ticket {ticket}")
        with self._alone():
            self._until(lambda: self.done >= ticket, until, f"chain {ticket}")

    def bind(self, bindings: Sequence[Binding]) -> None:
        with self._alone(), self.network.lock:
            self._usable()
            if self.peer is None:
                raise FabricError("the queue pair is not connected")
            for binding in bindings:
                window, region = self._own(binding.window), binding.region
                assert isinstance(region, FakeRegion)
                right = Access.WINDOWS | Access.LOCAL_WRITE
                if (
                    window.region is not None
                    or not region.open
                    or region.rail is not self.rail
                    or region.access & right != right
                    or binding.length < 1
                    or not region.covers(binding.address, binding.length)
                ):
                    self.fail(f"window not bound: {binding}", "MW_BIND_ERR")
                    raise FabricError(self.why, self.status)
                window.bind(self, region, binding.address, binding.length)
            self._heard("a bind")

    def invalidate(self, windows: Sequence[Window]) -> None:
        with self._alone(), self.network.lock:
            self._usable()
            own = [self._own(window) for window in windows]
            if any(window.qp is not self for window in own):
                self.fail("a window that is not bound to this queue pair was to be invalidated", "LOC_QP_OP_ERR")
                raise FabricError(self.why, self.status)
            self.settle({window.rkey for window in own})
            for window in own:
                window.unbind()
            self._usable()
            self._heard("an invalidation")

    def close(self) -> None:
        if not self._user.acquire(blocking=False):
            self.network.violation(f"{self}: closed while a thread was in it")
        else:
            self._user.release()
        with self.network.lock:
            if not self.open:
                return
            self.rail.fabric.touched()
            self.settle()
            if not self.why:
                self._leave()
            self.open = False
            self.stray.clear()
            for window in self.rail.windows:
                if window.qp is self:
                    window.unbind()
            self.rail.queue_pairs.remove(self)
            self.network.changed.notify_all()

    # --- for the network, its lock held ---

    def __repr__(self) -> str:
        return f"queue pair {self.qpn:#x} of {self.rail.name}"

    def fail(self, why: str, status: str) -> None:
        """Break this end."""
        if self.open and not self.why:
            self.why, self.status = why, status
            self.stray.extend(operation for operation in self.queue if operation.op[0] != WRITE and operation.pieces)
            self._leave()
            self.network.wake(self)
            self.network.changed.notify_all()

    def step(self) -> bool:
        """Do one random step; return False if there is none."""
        if not self.queue and not self.landing and not self.stray:
            return False
        try:
            far = self._far()
            if far is None:
                return False
            choices = [self._land, self._begin, self._advance, self._finish, self._bring_stray]
            self.network.rng.shuffle(choices)
            return any(choice(far) for choice in choices)
        except Refused as refused:
            self.break_off(str(refused), "the peer's end does not answer")
            return True

    def settle(self, keys: Container[int] | None = None) -> None:
        """Finish what arrives at this end by ``keys`` (None: by any key).

        It lands, after what is ahead of it on the queue pair; or it is refused, unless it was acknowledged.
        """
        near = self.network.queue_pairs.get(self.peer.qpn) if self.peer is not None else None
        if near is None or near.peer is None or near.peer.qpn != self.qpn:
            return
        while any(keys is None or operation.op[5] in keys for operation in near.landing):
            operation = near.landing[0]
            meant = keys is None or operation.op[5] in keys
            if meant and not operation.acked and self.network.rng.random() < 0.5:
                near.break_off("REM_ACCESS_ERR", "the peer refused a WRITE")
                self.fail("refused a WRITE of the peer", "LOC_ACCESS_ERR")
                return
            while near.landing and near.landing[0] is operation:
                near._land_one(self)

    def break_off(self, status: str, why: str) -> None:
        """Break this end: the peer takes nothing more from it, and answers nothing."""
        self.fail(why, status)
        self.landing.clear()
        self.stray.clear()

    # --- the steps ---

    def _begin(self, far: FakeQueuePair) -> bool:
        if self.begun == len(self.queue) or self.begun == _BEGUN:
            return False
        operation = self.queue[self.begun]
        kind, local, lkey, length, _, _ = operation.op
        if kind != WRITE:
            under_way = sum(self.queue[number].op[0] != WRITE for number in range(self.begun))
            if kind == FENCED_READ and under_way:
                return False
            if under_way >= min(self.rail.limits.reads, far.rail.limits.reads):
                return False
        try:
            self.rail.check_local(lkey, local, length, kind != WRITE)
        except Refused as refused:
            self.fail(f"{_NAMES[kind]} of {length} bytes: the local key does not allow it", str(refused))
            return True
        operation.pieces = self.network.cut(length)
        self.begun += 1
        self.network.count[_NAMES[kind]] += 1
        return True

    def _advance(self, far: FakeQueuePair) -> bool:
        """Copy a piece of a READ, or let a WRITE leave, or acknowledge a WRITE that arrived."""
        first = leaves = None
        able = []
        for operation in islice(self.queue, self.begun):
            if operation.op[0] != WRITE:
                if operation.pieces:
                    able.append(operation)
            elif not operation.acked:
                first = first or operation
                if leaves is None and operation.data is None:
                    leaves = operation
        if first is not None and first.data is not None:
            able.append(first)
        if self.network.hindered:
            able = [operation for operation in able if not self.network.stops(self, far, operation.op)]
        if leaves is not None:
            able.append(leaves)
        if not able:
            return False
        operation = self.network.rng.choice(able)
        kind, _, _, length, remote, rkey = operation.op
        if kind != WRITE:
            return self._copy(operation, far)
        if operation is leaves:
            return self._leaves(operation)
        try:
            far.rail.check_remote(far, rkey, remote, length, Access.REMOTE_WRITE)
        except Refused as refused:
            self._refused(operation, far, refused)
            return True
        operation.acked = True
        return True

    def _copy(self, operation: Operation, far: FakeQueuePair) -> bool:
        kind, local, lkey, length, remote, rkey = operation.op
        try:
            far.rail.check_remote(far, rkey, remote, length, Access.REMOTE_READ)
        except Refused as refused:
            self._refused(operation, far, refused)
            return True
        try:
            region = self.rail.check_local(lkey, local, length, True)
        except Refused as refused:
            operation.pieces.clear()
            self.fail(f"{_NAMES[kind]} of {length} bytes: the local key does not allow it", str(refused))
            return True
        offset, size = operation.pieces.pop()
        region.store(local + offset, remote + offset, size)
        self.network.copies += 1
        return True

    def _leaves(self, operation: Operation) -> bool:
        """Read the source of a WRITE, which leaves."""
        _, local, lkey, length, _, _ = operation.op
        try:
            region = self.rail.check_local(lkey, local, length, False)
        except Refused as refused:
            self.fail(f"WRITE of {length} bytes: the local key does not allow it", str(refused))
            return True
        operation.data = region.load(local, length)
        self.landing.append(operation)
        return True

    def _land(self, far: FakeQueuePair) -> bool:
        if not self.landing or self.network.stops(self, far, self.landing[0].op):
            return False
        self._land_one(far)
        return True

    def _land_one(self, far: FakeQueuePair) -> None:
        """Land one piece of the first WRITE that left."""
        operation = self.landing[0]
        _, _, _, length, remote, rkey = operation.op
        if operation.pieces:
            try:
                # The key is looked at with every packet.
                far.rail.check_remote(far, rkey, remote, length, Access.REMOTE_WRITE)
            except Refused as refused:
                self._refused(operation, far, refused)
                return
            assert operation.data is not None
            offset, size = operation.pieces.pop()
            ctypes.memmove(remote + offset, operation.data[offset : offset + size], size)
            self.network.copies += 1
        if not operation.pieces:
            self.landing.popleft()

    def _refused(self, operation: Operation, far: FakeQueuePair, refused: Refused) -> None:
        kind, _, _, length, remote, _ = operation.op
        text = f"{_NAMES[kind]} of {length} bytes at {remote:#x}"
        self.break_off(str(refused), f"the peer refused a {text}")
        far.fail(f"refused a {text}", "LOC_ACCESS_ERR")

    def _finish(self, far: FakeQueuePair) -> bool:
        if not self.begun:
            return False
        operation = self.queue[0]
        if self.network.stops(self, far, operation.op):
            return False
        if operation.op[0] == WRITE:
            ready = operation.acked
        else:
            ready = not operation.pieces and not (self.landing and self.landing[0].serial < operation.serial)
        if ready:
            self.queue.popleft()
            self.begun -= 1
            if operation.last and not self.overrun:
                self.done = operation.ticket
                self.network.changed.notify_all()
        return ready

    def _bring_stray(self, far: FakeQueuePair) -> bool:
        if not self.stray:
            return False
        operation = self.network.rng.choice(self.stray)
        if self.network.stops(self, far, operation.op):
            return False
        self._copy(operation, far)
        self.stray = [other for other in self.stray if other.pieces]
        return True

    # --- helpers ---

    def _leave(self) -> None:
        """Stop this end; some of the WRITEs that have begun have left."""
        for number in range(self.begun):
            operation = self.queue[number]
            if operation.op[0] == WRITE and operation.data is None:
                if self.network.rng.random() < 0.5:
                    break
                _, local, lkey, length, _, _ = operation.op
                try:
                    region = self.rail.check_local(lkey, local, length, False)
                except Refused:
                    break
                operation.data = region.load(local, length)
                self.landing.append(operation)
        self.queue.clear()
        self.begun = 0

    def _far(self) -> FakeQueuePair | None:
        """Return the peer's end, None before it has connected; raise Refused if it is not connected to this end."""
        if self.peer is None:
            return None
        far = self.network.queue_pairs.get(self.peer.qpn)
        if far is None or far.rail.gid != self.peer.gid or far.psn != self.peer.psn or not far.open or far.why:
            raise Refused("RETRY_EXC_ERR")
        if far.peer is None:
            return None
        if far.peer.qpn != self.qpn or far.peer.psn != self.psn or far.peer.gid != self.rail.gid:
            raise Refused("RETRY_EXC_ERR")
        return far

    def _heard(self, what: str) -> None:
        """Raise Timeout, as at the end of a wait, for what is done and is not said to be."""
        if self.overrun:
            raise Timeout(f"{self}: {what} is not done in time")

    def _own(self, window: Window) -> FakeWindow:
        assert isinstance(window, FakeWindow)
        if window.rail is not self.rail or not window.open:
            raise UsageError("a window of another rail, or a closed one")
        return window

    def _usable(self) -> None:
        self.rail.fabric.touched()
        if self.why:
            raise FabricError(f"{self.why} ({self.status})" if self.status else self.why, self.status)
        if not self.open:
            raise FabricError("the queue pair is closed")

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._user.acquire(blocking=False):
            self.network.violation(f"{self}: two threads at once")
            raise AssertionError(f"{self}: two threads at once")
        try:
            yield
        finally:
            self._user.release()

    def _until(self, ready: Callable[[], bool], until: float, what: str) -> None:
        network, turn = self.network, 0
        while True:
            with network.lock:
                if ready():
                    return
                self._usable()
            network.interlude()
            moved = not network.background and network.step()
            turn += 1
            if moved and turn & 63:
                continue
            left = until - time.monotonic()
            if left <= 0:
                raise Timeout(f"{self}: {what} is not there in time")
            if not moved:
                with network.lock:
                    if not ready():
                        network.changed.wait(min(left, _NAP_S))

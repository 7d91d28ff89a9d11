"""An RDMA network in software, in one process, that keeps the promises of ``simm.fabric`` and no other.

``FakeNetwork(seed)`` is the wire and the peers' memory; ``network.fabric(names)`` is what ``verbs.open_fabric`` gives
elsewhere. Remote addresses are addresses of this process: a READ or WRITE is a copy between two places of it, word by
word (8 bytes; longer operations in at most ``pieces`` runs of words), in a random order, at random moments between
post and completion. So tears and reordering really happen, and where code works by luck on a kind network, some seed
finds it out.

What is random, because nobody promised otherwise
-------------------------------------------------
* The words of a READ are read in any order, and before the words of the READ that was posted ahead of it, or before a
  WRITE posted ahead of it has landed. Only a FENCED_READ waits, for READs; completions come in order, though.
* A READ may be carried out before or after a WRITE that was posted behind it.
* A WRITE may be done, that is: its source may be used again, before it has landed at the peer's. A READ behind it is
  not done before it has. The source is read at any time until it is done.
* A WRITE that has left lands even if its sender's end is closed or broken. Closing the *peer's* end stops it.
* What a READ still brings to a broken link is written to local memory until that link is closed.
* An invalidation finds WRITEs under way: each lands before it returns, or is refused.

Time is the calls of :meth:`FakeNetwork.step`: ``poll`` and ``wait`` of any link make some, in the caller's thread.
With one thread all is determined by the seed; ``between`` is called between two steps of a ``wait`` (without the lock),
and is how a test with one thread lets a writer work in the middle of somebody's READ. ``background=True`` has a thread
of its own make the steps.

GPU memory: ``network.gpu`` is a ``fakecuda.FakeCuda``, whose memory can be registered by the dma-buf that it exports,
under addresses that count from 0 as pyverbs has it, and by its own address if ``network.peermem``. What is written
there is what that driver makes of it: not to be seen before a flush.

Faults: :meth:`FakeNetwork.hold` and ``release``, ``drop`` and ``restore`` (a rail's cable), ``sever`` (a pair of rails
that has no way to each other), ``kill`` (a link), ``gone`` (a device), the fields of ``Limits``, ``memlock``, and
``refuse`` (asked at registrations, links and windows).

What code under test must not do though no error tells (two threads in one link at once) is put on
``network.violations``; :func:`all_closed` is what every test ends with.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import random
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Final

from simm.errors import CorruptionError, UsageError
from simm.fabric import (
    FENCED_READ,
    READ,
    WRITE,
    Access,
    Binding,
    FabricError,
    Limits,
    LinkAddress,
    Op,
    Rail,
    Region,
    Timeout,
    Window,
)

WORD: Final = 8
#: How long a post waits for room in the queue, in seconds.
POST_S: Final = 5.0
#: How often a wait with nothing to do looks again, in seconds.
_NAP_S: Final = 0.002
#: Operations of a link that may have begun and not be done.
_BEGUN: Final = 16
_NAMES: Final = MappingProxyType({READ: "READ", WRITE: "WRITE", FENCED_READ: "FENCED_READ"})


class _Refused(Exception):
    """An operation is not allowed; the text is a completion's name."""


class FakeRegion:
    """Registered memory of a rail."""

    def __init__(self, rail: FakeRail, address: int, length: int, access: Access) -> None:
        self.address, self.length, self.access = address, length, access
        self.rail = rail
        #: What is added to an address of a GPU's memory; None for host memory.
        self.device: int | None = None
        self.lkey = rail.network.new_key(rail.lkeys)
        self.rkey = rail.network.new_key(rail.rkeys)
        self.open = True
        rail.lkeys[self.lkey] = self
        rail.rkeys[self.rkey] = self
        rail.regions.append(self)

    def covers(self, address: int, length: int) -> bool:
        return self.address <= address and address + length <= self.address + self.length

    def store(self, address: int, source: int, size: int) -> None:
        """Bytes from host memory to its own."""
        if self.device is None:
            ctypes.memmove(address, source, size)
        else:
            self.rail.network.gpu.dma_write(address + self.device, ctypes.string_at(source, size))

    def load(self, address: int, size: int) -> bytes:
        if self.device is None:
            return ctypes.string_at(address, size)
        data: bytes = self.rail.network.gpu.dma_read(address + self.device, size)
        return data

    def close(self) -> None:
        with self.rail.network.lock:
            if not self.open:
                return
            self.rail.fabric.touched()
            for window in [w for w in self.rail.windows if w.region is self]:
                window.unbind()
            self.open = False
            del self.rail.lkeys[self.lkey], self.rail.rkeys[self.rkey]
            self.rail.regions.remove(self)


class FakeWindow:
    """A memory window of type 2: bound to one link, with a new key each time."""

    def __init__(self, rail: FakeRail) -> None:
        self.rail = rail
        self._index = rail.network.rng.randrange(1, 1 << 24)
        self._tag = 0
        self.rkey = 0
        self.region: FakeRegion | None = None
        self.link: FakeLink | None = None
        self.address = self.length = 0
        self.open = True
        self.born = next(rail.network.births)
        rail.windows.append(self)

    def bind(self, link: FakeLink, region: FakeRegion, address: int, length: int) -> None:
        # The key's low byte is the user's and wraps around, as it does in the real ones.
        self._tag = (self._tag + 1) & 0xFF
        self.rkey = self._index << 8 | self._tag
        while self.rkey in self.rail.rkeys:
            self._index = self.rail.network.rng.randrange(1, 1 << 24)
            self.rkey = self._index << 8 | self._tag
        self.region, self.link, self.address, self.length = region, link, address, length
        self.rail.rkeys[self.rkey] = self

    def covers(self, address: int, length: int) -> bool:
        return self.address <= address and address + length <= self.address + self.length

    def unbind(self) -> None:
        if self.region is not None:
            del self.rail.rkeys[self.rkey]
            self.region = self.link = None

    def close(self) -> None:
        with self.rail.network.lock:
            if self.open:
                self.rail.fabric.touched()
                if self.link is not None:
                    self.link.settle((self.rkey,))
                self.unbind()
                self.open = False
                self.rail.windows.remove(self)


class _Flight:
    """One operation under way."""

    __slots__ = ("acked", "data", "last", "op", "pieces", "serial", "ticket")

    def __init__(self, op: Op, serial: int, ticket: int, last: bool) -> None:
        self.op, self.serial, self.ticket, self.last = op, serial, ticket, last
        #: Of a WRITE: what left for the peer, and whether the sender knows that it arrived.
        self.data: bytes | None = None
        self.acked = False
        #: What has yet to be copied, in the order to come, last first.
        self.pieces: list[tuple[int, int]] = []


class FakeLink:
    """One end of a link. What is under way is in ``queue``, the first ``begun`` of it have begun; ``landing`` has the
    WRITEs that left and have not landed at the peer's, ``stray`` the READs whose link broke under them.
    """

    def __init__(self, rail: FakeRail) -> None:
        network = rail.network
        self.rail, self.network = rail, network
        self.depth = rail.limits.depth
        self.qpn = network.new_key(network.links)
        self.psn = network.rng.randrange(1 << 24)
        self.peer: LinkAddress | None = None
        self.queue: deque[_Flight] = deque()
        self.begun = 0
        self.landing: deque[_Flight] = deque()
        self.stray: list[_Flight] = []
        self.serials = self.tickets = self.done = 0
        self.open = True
        self.why = self.status = ""
        self._user = threading.Lock()
        self.born = next(network.births)
        network.links[self.qpn] = self
        rail.links.append(self)

    # --- what simm.fabric asks for ---

    @property
    def broken(self) -> str:
        return self.why if self.open else self.why or "closed"

    def address(self) -> LinkAddress:
        return LinkAddress(self.rail.gid, self.rail.lid, self.qpn, self.psn, self.rail.mtu, self.rail.limits.reads)

    def connect(self, peer: LinkAddress) -> None:
        with self._alone(), self.network.lock:
            self._usable()
            if self.peer is not None:
                raise FabricError("the link is connected already")
            if peer.gid not in self.network.rails:
                self.fail("no way to the peer's address", "")
                raise FabricError(self.why)
            self.peer = peer
            self.network.changed.notify_all()

    def post(self, ops: Sequence[Op]) -> int:
        if not 0 < len(ops) <= self.depth:
            raise UsageError(f"a chain of {len(ops)} operations, the link takes 1 to {self.depth}")
        if any(op[0] not in (READ, WRITE, FENCED_READ) or op[3] < 0 for op in ops):
            raise UsageError(f"no operations: {ops}")
        with self._alone():
            self._until(lambda: len(self.queue) + len(ops) <= self.depth, time.monotonic() + POST_S, "room to post")
            with self.network.lock:
                self._usable()
                if self.peer is None:
                    raise FabricError("the link is not connected")
                self.tickets += 1
                for number, op in enumerate(ops, 1):
                    self.serials += 1
                    self.queue.append(_Flight(op, self.serials, self.tickets, number == len(ops)))
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
                raise FabricError("the link is not connected")
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

    def invalidate(self, windows: Sequence[Window]) -> None:
        with self._alone(), self.network.lock:
            self._usable()
            own = [self._own(window) for window in windows]
            if any(window.link is not self for window in own):
                self.fail("a window that is not bound to this link was to be invalidated", "LOC_QP_OP_ERR")
                raise FabricError(self.why, self.status)
            self.settle({window.rkey for window in own})
            for window in own:
                window.unbind()
            self._usable()

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
                if window.link is self:
                    window.unbind()
            self.rail.links.remove(self)
            self.network.changed.notify_all()

    # --- for the network, its lock held ---

    def __repr__(self) -> str:
        return f"link {self.qpn:#x} of {self.rail.name}"

    def fail(self, why: str, status: str) -> None:
        """This end is of no use any more."""
        if self.open and not self.why:
            self.why, self.status = why, status
            self.stray.extend(flight for flight in self.queue if flight.op[0] != WRITE and flight.pieces)
            self._leave()
            self.network.wake(self)
            self.network.changed.notify_all()

    def step(self) -> bool:
        """Do one thing, by chance; False when there is none to do."""
        if not self.queue and not self.landing and not self.stray:
            return False
        try:
            far = self._far()
            if far is None:
                return False
            choices = [self._land, self._begin, self._advance, self._finish, self._astray]
            self.network.rng.shuffle(choices)
            return any(choice(far) for choice in choices)
        except _Refused as refused:
            self.break_off(str(refused), "the peer's end does not answer")
            return True

    def settle(self, keys: Container[int] | None = None) -> None:
        """Nothing that arrives at this end by ``keys`` (None: at all) stays half done.

        It lands, and what is ahead of it on the link does before; or it is refused, unless it was acknowledged.
        """
        near = self.network.links.get(self.peer.qpn) if self.peer is not None else None
        if near is None or near.peer is None or near.peer.qpn != self.qpn:
            return
        while any(keys is None or flight.op[5] in keys for flight in near.landing):
            flight = near.landing[0]
            meant = keys is None or flight.op[5] in keys
            if meant and not flight.acked and self.network.rng.random() < 0.5:
                near.break_off("REM_ACCESS_ERR", "the peer refused a WRITE")
                self.fail("refused a WRITE of the peer", "LOC_ACCESS_ERR")
                return
            while near.landing and near.landing[0] is flight:
                near._land_one(self)

    def break_off(self, status: str, why: str) -> None:
        """The peer takes nothing more of what this end has sent, and answers nothing."""
        self.fail(why, status)
        self.landing.clear()
        self.stray.clear()

    # --- the steps ---

    def _begin(self, far: FakeLink) -> bool:
        if self.begun == len(self.queue) or self.begun == _BEGUN:
            return False
        flight = self.queue[self.begun]
        kind, local, lkey, length, _, _ = flight.op
        if kind != WRITE:
            under_way = sum(self.queue[number].op[0] != WRITE for number in range(self.begun))
            if kind == FENCED_READ and under_way:
                return False
            if under_way >= min(self.rail.limits.reads, far.rail.limits.reads):
                return False
        try:
            self.rail.check_local(lkey, local, length, kind != WRITE)
        except _Refused as refused:
            self.fail(f"{_NAMES[kind]} of {length} bytes: the local key does not allow it", str(refused))
            return True
        flight.pieces = self.network.cut(length)
        self.begun += 1
        self.network.count[_NAMES[kind]] += 1
        return True

    def _advance(self, far: FakeLink) -> bool:
        """A piece of a READ; or a WRITE leaves; or it arrives, and the sender knows."""
        flights = [self.queue[number] for number in range(self.begun)]
        writes = [flight for flight in flights if flight.op[0] == WRITE and not flight.acked]
        leaves = next((flight for flight in writes if flight.data is None), None)
        able = [flight for flight in flights if flight.op[0] != WRITE and flight.pieces]
        if writes and writes[0].data is not None:
            able.append(writes[0])
        able = [flight for flight in able if not self.network.stops(self, far, flight.op)]
        if leaves is not None:
            able.append(leaves)
        if not able:
            return False
        flight = self.network.rng.choice(able)
        kind, _, _, length, remote, rkey = flight.op
        if kind != WRITE:
            return self._copy(flight, far)
        if flight is leaves:
            return self._leaves(flight)
        try:
            far.rail.check_remote(far, rkey, remote, length, Access.REMOTE_WRITE)
        except _Refused as refused:
            self._refused(flight, far, refused)
            return True
        flight.acked = True
        return True

    def _copy(self, flight: _Flight, far: FakeLink) -> bool:
        kind, local, lkey, length, remote, rkey = flight.op
        try:
            far.rail.check_remote(far, rkey, remote, length, Access.REMOTE_READ)
        except _Refused as refused:
            self._refused(flight, far, refused)
            return True
        try:
            region = self.rail.check_local(lkey, local, length, True)
        except _Refused as refused:
            flight.pieces.clear()
            self.fail(f"{_NAMES[kind]} of {length} bytes: the local key does not allow it", str(refused))
            return True
        offset, size = flight.pieces.pop()
        region.store(local + offset, remote + offset, size)
        self.network.copies += 1
        return True

    def _leaves(self, flight: _Flight) -> bool:
        """What a WRITE sends is read from local memory."""
        _, local, lkey, length, _, _ = flight.op
        try:
            region = self.rail.check_local(lkey, local, length, False)
        except _Refused as refused:
            self.fail(f"WRITE of {length} bytes: the local key does not allow it", str(refused))
            return True
        flight.data = region.load(local, length)
        self.landing.append(flight)
        return True

    def _land(self, far: FakeLink) -> bool:
        if not self.landing or self.network.stops(self, far, self.landing[0].op):
            return False
        self._land_one(far)
        return True

    def _land_one(self, far: FakeLink) -> None:
        """One piece of the first WRITE that left."""
        flight = self.landing[0]
        _, _, _, length, remote, rkey = flight.op
        if flight.pieces:
            try:
                # The key is looked at with every packet.
                far.rail.check_remote(far, rkey, remote, length, Access.REMOTE_WRITE)
            except _Refused as refused:
                self._refused(flight, far, refused)
                return
            assert flight.data is not None
            offset, size = flight.pieces.pop()
            ctypes.memmove(remote + offset, flight.data[offset : offset + size], size)
            self.network.copies += 1
        if not flight.pieces:
            self.landing.popleft()

    def _refused(self, flight: _Flight, far: FakeLink, refused: _Refused) -> None:
        kind, _, _, length, remote, _ = flight.op
        text = f"{_NAMES[kind]} of {length} bytes at {remote:#x}"
        self.break_off(str(refused), f"the peer refused a {text}")
        far.fail(f"refused a {text}", "LOC_ACCESS_ERR")

    def _finish(self, far: FakeLink) -> bool:
        if not self.begun:
            return False
        flight = self.queue[0]
        if self.network.stops(self, far, flight.op):
            return False
        if flight.op[0] == WRITE:
            ready = flight.acked
        else:
            ready = not flight.pieces and not (self.landing and self.landing[0].serial < flight.serial)
        if ready:
            self.queue.popleft()
            self.begun -= 1
            if flight.last:
                self.done = flight.ticket
                self.network.changed.notify_all()
        return ready

    def _astray(self, far: FakeLink) -> bool:
        if not self.stray:
            return False
        flight = self.network.rng.choice(self.stray)
        if self.network.stops(self, far, flight.op):
            return False
        self._copy(flight, far)
        self.stray = [other for other in self.stray if other.pieces]
        return True

    # --- helpers ---

    def _leave(self) -> None:
        """This end stops: of the WRITEs that have begun, some have left."""
        for number in range(self.begun):
            flight = self.queue[number]
            if flight.op[0] == WRITE and flight.data is None:
                if self.network.rng.random() < 0.5:
                    break
                _, local, lkey, length, _, _ = flight.op
                try:
                    region = self.rail.check_local(lkey, local, length, False)
                except _Refused:
                    break
                flight.data = region.load(local, length)
                self.landing.append(flight)
        self.queue.clear()
        self.begun = 0

    def _far(self) -> FakeLink | None:
        """The peer's end; None before it has connected. Raises _Refused when it is not, or no more, ours."""
        if self.peer is None:
            return None
        far = self.network.links.get(self.peer.qpn)
        if far is None or far.rail.gid != self.peer.gid or far.psn != self.peer.psn or not far.open or far.why:
            raise _Refused("RETRY_EXC_ERR")
        if far.peer is None:
            return None
        if far.peer.qpn != self.qpn or far.peer.psn != self.psn or far.peer.gid != self.rail.gid:
            raise _Refused("RETRY_EXC_ERR")
        return far

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
            raise FabricError("the link is closed")

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


class FakeRail:
    """One port of a device."""

    def __init__(self, fabric: FakeFabric, name: str) -> None:
        self.fabric, self.network, self.name = fabric, fabric.network, name
        self.gid = self.network.new_gid()
        self.lid, self.mtu = 0, 4096
        self.limits = self.network.limits
        self.why = ""
        self.regions: list[FakeRegion] = []
        self.links: list[FakeLink] = []
        self.windows: list[FakeWindow] = []
        self.lkeys: dict[int, FakeRegion] = {}
        self.rkeys: dict[int, FakeRegion | FakeWindow] = {}
        self.network.rails[self.gid] = self

    def register(self, address: int, length: int, access: Access) -> Region:
        with self.network.lock:
            self._usable("register")
            if length < 1 or address < 1:
                raise FabricError(f"cannot register {length} bytes at {address:#x}", "EINVAL")
            if length > self.limits.region_bytes:
                raise FabricError(f"a region has at most {self.limits.region_bytes} bytes: register pieces", "EINVAL")
            if access & (Access.REMOTE_WRITE | Access.WINDOWS) and not access & Access.LOCAL_WRITE:
                raise FabricError("remote writing and windows need LOCAL_WRITE", "EINVAL")
            if sum(region.length for region in self.regions) + length > self.network.memlock:
                raise FabricError("cannot register: the limit on locked memory; raise it (ulimit -l)", "ENOMEM")
            on_gpu = self.network.gpu is not None and self.network.gpu.owns(address)
            if on_gpu and not self.network.peermem:
                raise FabricError(f"cannot register {length} bytes: that memory is not mapped", "EFAULT")
            region = FakeRegion(self, address, length, access)
            region.device = 0 if on_gpu else None
            return region

    def register_dmabuf(self, fd: int, offset: int, length: int, access: Access) -> Region:
        with self.network.lock:
            self._usable("register_dmabuf")
            if self.network.gpu is None or "fake-dma-buf" not in os.readlink(f"/proc/self/fd/{fd}"):
                raise FabricError("that descriptor is no dma-buf", "EBADF")
            start, size = struct.unpack("QQ", os.pread(fd, 16, 0))
            if offset < 0 or length < 1 or offset + length > size:
                raise FabricError(f"{length} bytes from {offset} on are not within the dma-buf", "EINVAL")
            region = FakeRegion(self, offset, length, access)
            region.device = start
            return region

    def link(self) -> FakeLink:
        with self.network.lock:
            self._usable("link")
            return FakeLink(self)

    def window(self) -> FakeWindow:
        with self.network.lock:
            self._usable("window")
            if len(self.windows) >= self.limits.windows:
                raise FabricError(f"a device has at most {self.limits.windows} windows", "ENOMEM")
            return FakeWindow(self)

    def close(self) -> None:
        with self.network.lock:
            for link in list(self.links):
                link.close()
            for window in list(self.windows):
                window.close()
            for region in list(self.regions):
                region.close()
            self.why = self.why or "closed"

    # --- for the links, the network's lock held ---

    def check_local(self, lkey: int, address: int, length: int, write: bool) -> FakeRegion:
        region = self.lkeys.get(lkey)
        if region is None or not region.covers(address, length) or (write and not region.access & Access.LOCAL_WRITE):
            raise _Refused("LOC_PROT_ERR")
        return region

    def check_remote(self, link: FakeLink, rkey: int, address: int, length: int, right: Access) -> None:
        """What this side, the responder, allows to whoever comes over its end ``link``."""
        held = self.rkeys.get(rkey)
        if isinstance(held, FakeWindow):
            allowed = held.link is link and right == Access.REMOTE_WRITE
        else:
            allowed = held is not None and bool(held.access & right)
        if held is None or not allowed or not held.covers(address, length):
            raise _Refused("REM_ACCESS_ERR")

    def _usable(self, what: str) -> None:
        self.fabric.touched()
        why = self.why or self.network.refuse(what, self)
        if why:
            raise FabricError(f"{self.name}: {what}: {why}")


class FakeFabric:
    """The rails of one "process"."""

    def __init__(self, network: FakeNetwork, names: Sequence[str]) -> None:
        self.network = network
        self.abandoned = False
        self.fakes = [FakeRail(self, name) for name in names]
        self.rails: Sequence[Rail] = self.fakes

    def close(self) -> None:
        self.touched()
        for rail in self.fakes:
            rail.close()

    def abandon(self) -> None:
        self.abandoned = True

    def touched(self) -> None:
        if self.abandoned:
            self.network.violation("a fabric that was abandoned is used")
            raise AssertionError("a fabric that was abandoned is used")


class FakeNetwork:
    """See the module's text. Durations are wall-clock seconds; everything else is counted in steps."""

    def __init__(
        self,
        seed: int = 0,
        *,
        region_bytes: int = 1 << 40,
        windows: int = 1 << 16,
        reads: int = 16,
        depth: int = 256,
        memlock: int = 1 << 50,
        pieces: int = 64,
        background: bool = False,
        refuse: Callable[[str, FakeRail], str] | None = None,
        between: Callable[[], None] | None = None,
    ) -> None:
        self.rng = random.Random(seed)
        #: The order in which links and windows were made.
        self.births = itertools.count()
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.limits = Limits(region_bytes, windows, reads, depth)
        self.memlock = memlock
        self.between = between
        #: Why a registration, a link or a window is not to be had now; empty when it is.
        self.refuse: Callable[[str, FakeRail], str] = refuse or (lambda what, rail: "")
        self.rails: dict[bytes, FakeRail] = {}
        self.links: dict[int, FakeLink] = {}
        self.fabrics: list[FakeFabric] = []
        #: What was carried out, and the chains posted, where a test wants them (set it to a list).
        self.count: Counter[str] = Counter()
        self.copies = 0
        self.posted: list[tuple[FakeLink, tuple[Op, ...]]] | None = None
        self.violations: list[str] = []
        #: A CUDA driver in software, and whether its memory can be registered by address.
        self.gpu: Any = None
        self.peermem = False
        self.background = background
        self._pieces = pieces
        self._busy: list[FakeLink] = []
        self._held: Callable[[FakeLink, Op], bool] | None = None
        self._dropped: set[bytes] = set()
        self._severed: set[frozenset[bytes]] = set()
        self._inside = threading.local()
        self._ended = False
        self._thread: threading.Thread | None = None
        if background:
            self._thread = threading.Thread(target=self._run, name="fake network", daemon=True)
            self._thread.start()

    def fabric(self, names: Sequence[str] = ("fake0",)) -> FakeFabric:
        """The rails of one more "process"."""
        with self.lock:
            made = FakeFabric(self, names)
            self.fabrics.append(made)
            return made

    # --- time ---

    def step(self) -> bool:
        """Do one thing that is under way, by chance; False when nothing can move."""
        with self.lock:
            order = self._busy if len(self._busy) == 1 else self.rng.sample(self._busy, len(self._busy))
            for link in list(order):
                if link.step():
                    return True
                if not link.queue and not link.landing and not link.stray:
                    self._busy.remove(link)
            return False

    def run(self) -> None:
        """Steps until nothing can move."""
        while self.step():
            pass

    def some_steps(self) -> None:
        for _ in range(0 if self.background else self.rng.randrange(8)):
            self.interlude()
            self.step()

    def interlude(self) -> None:
        """Let the test's ``between`` do something, unless it is what brought us here."""
        if self.between is not None and not getattr(self._inside, "busy", False):
            self._inside.busy = True
            try:
                self.between()
            finally:
                self._inside.busy = False

    # --- faults ---

    def hold(self, which: Callable[[FakeLink, Op], bool] | None = None) -> None:
        """Operations (those that ``which`` names, else all) leave and do not arrive, until :meth:`release`."""
        with self.lock:
            self._held = which or (lambda link, op: True)

    def release(self) -> None:
        with self.lock:
            self._held = None
            self.changed.notify_all()

    def drop(self, rail: Rail) -> None:
        """Its cable is out: nothing arrives, until :meth:`restore`; what was on its way then does."""
        with self.lock:
            self._dropped.add(rail.gid)

    def restore(self, rail: Rail) -> None:
        with self.lock:
            self._dropped.discard(rail.gid)
            self.changed.notify_all()

    def sever(self, one: Rail, other: Rail) -> None:
        """These two have no way to each other (others of theirs may)."""
        with self.lock:
            self._severed.add(frozenset((one.gid, other.gid)))

    def kill(self, link: FakeLink, status: str = "RETRY_EXC_ERR") -> None:
        """Both ends break."""
        with self.lock:
            far = self.links.get(link.peer.qpn) if link.peer is not None else None
            link.fail("killed by the test", status)
            if far is not None:
                far.fail("killed by the test", status)

    def gone(self, rail: Rail) -> None:
        """The device has gone: its links break, and nothing is to be had from it any more."""
        with self.lock:
            fake = self.rails[rail.gid]
            fake.why = "the device has gone"
            for link in list(fake.links):
                link.fail("the device has gone", "WR_FLUSH_ERR")

    def stops(self, link: FakeLink, far: FakeLink, op: Op) -> bool:
        """Whether an operation of ``link`` is kept from arriving now. The lock is held."""
        if self._held is not None and self._held(link, op):
            return True
        gids = (link.rail.gid, far.rail.gid)
        return (bool(self._dropped) and not self._dropped.isdisjoint(gids)) or (
            bool(self._severed) and frozenset(gids) in self._severed
        )

    # --- the end ---

    def check(self) -> list[str]:
        """What is still open, in words. Raises CorruptionError when the network contradicts itself."""
        with self.lock:
            for link in self.links.values():
                alive = link.open and not link.why
                if (link.queue and not alive) or link.begun > len(link.queue) or (link.stray and not link.open):
                    raise CorruptionError(f"{link}: {len(link.queue)} under way, {link.begun} begun, {link.open}")
                if (link.queue or link.landing or link.stray) and link not in self._busy:
                    raise CorruptionError(f"{link}: has work and nobody looks after it")
            found = []
            for fabric in self.fabrics:
                if not fabric.abandoned:
                    for rail in fabric.fakes:
                        found += [f"{rail.name}: region of {region.length} bytes" for region in rail.regions]
                        found += [f"{rail.name}: {link}" for link in rail.links]
                        found += [f"{rail.name}: window {window.rkey:#x}" for window in rail.windows]
            return found

    def close(self) -> None:
        """End the thread, if there is one."""
        self._ended = True
        if self._thread is not None:
            self._thread.join()

    # --- for the others, the lock held ---

    def wake(self, link: FakeLink) -> None:
        if link not in self._busy:
            self._busy.append(link)
            self.changed.notify_all()

    def violation(self, text: str) -> None:
        self.violations.append(text)

    def cut(self, length: int) -> list[tuple[int, int]]:
        """(offset, size) of pieces of ``length`` bytes in the order in which they are copied, last first."""
        words = (length + WORD - 1) // WORD
        if words <= self._pieces:
            starts = list(range(0, length, WORD))
        else:
            starts = sorted({0, *(WORD * self.rng.randrange(words) for _ in range(self._pieces - 1))})
        pieces = [(start, end - start) for start, end in zip(starts, [*starts[1:], length])]
        self.rng.shuffle(pieces)
        return pieces

    def new_key(self, taken: Container[int]) -> int:
        while True:
            key = self.rng.randrange(1, 1 << 24) << 8
            if key not in taken:
                return key

    def new_gid(self) -> bytes:
        return b"\xfe\x80" + bytes(10) + (len(self.rails) + 1).to_bytes(4, "big")

    def _run(self) -> None:
        while not self._ended:
            if not self.step():
                with self.lock:
                    self.changed.wait(_NAP_S)


def all_closed(network: FakeNetwork) -> None:
    """What every test ends with: nothing is open, nothing was done that must not be."""
    network.close()
    left = network.check()
    assert not left, left
    assert not network.violations, network.violations

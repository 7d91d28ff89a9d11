"""RDMA by pyverbs: the implementation of :mod:`simm.rdma.api` on real devices, and the only importer of pyverbs.

pyverbs is optional. It is looked for at the first use, and every failure to import it is an
:class:`~simm.rdma.api.Absence`, not an error.

docs/rdma.md explains what is peculiar to verbs from Python: the GIL, object lifetimes, fork, retries, completion
queues, reused work requests, dma-buf regions and memory windows. Regions and windows are in ``rdma/memory.py``, work
requests in ``rdma/work_requests.py``, the choice of ports in ``rdma/ports.py``.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

from .errors import UsageError
from .host import fork
from .rdma import ports as rails_
from .rdma import work_requests
from .rdma.api import (
    Absence,
    Access,
    Binding,
    Fabric,
    FabricError,
    Limits,
    Op,
    QueuePair,
    QueuePairAddress,
    Rail,
    Region,
    Timeout,
    Window,
)
from .rdma.completions import POLL_MANY, Completions
from .rdma.memory import Domain, VerbsRegion, VerbsWindow, check_bindings, own_window
from .rdma.work_requests import SPARES, Library, RequestRings, Stack, Tag, failed, meaning_of, split

#: The largest number of operations in one chain, and of operations in flight on one queue pair.
DEPTH: Final = 256
#: READs in flight from one end, and READs of the peer that one end accepts. All cards support 16.
READS: Final = 16
#: Seconds that a post waits for room, and a bind for its completion.
QUEUE_S: Final = 5.0
#: A message has at most 2^31 bytes, and each port has a limit. Longer operations are posted in pieces.
_MESSAGE_BYTES: Final = 1 << 30
_REGION_BYTES: Final = 1 << 46
_DEPTH_LEAST: Final = 16
#: Polls of the completion queue before :meth:`VerbsQueuePair.wait` sleeps, at most and at least. They are counted, not
#: timed: on a slow machine a poll and a sleep become slower alike. At 0.25 us each, they hold the GIL for 0.2 ms.
_LOOKS_MAX: Final = 800
_LOOKS_MIN: Final = 50

#: Opcode and flags of READ, WRITE and FENCED_READ in the kernel's interface, which is the same in all versions.
_OPCODES: Final = {0: 4, 1: 0, 2: 4}
_FLAGS: Final = {0: 0, 1: 0, 2: 1}
_SIGNALED: Final = 2
#: Device flags: memory windows of type 2A or 2B.
_WINDOWS_2: Final = 1 << 23 | 1 << 24
_ETHERNET: Final = 2
_FORK_DISABLED: Final = 0


class VerbsQueuePair:
    """A queue pair with its own completion queue; see :class:`simm.rdma.api.Queue pair`."""

    def __init__(self, rail: VerbsRail) -> None:
        self.rail = rail
        self.depth = rail.limits.depth
        self.windows: set[VerbsWindow] = set()
        self.open = True
        self._psn = secrets.randbits(24)
        self._connected = self._stopped = False
        self._why = self._status = ""
        #: Tickets of the last chain posted and the last chain done. Chains complete in order.
        self._ticket = self._done = 0
        #: Operations of each chain in flight, and the number of further operations that fit. The latter is 0 before the
        #: connection and after a failure, so a post checks one number.
        self._chains: deque[int] = deque()
        self._room = 0
        self._longest = rail.message_bytes
        self._looks = float(_LOOKS_MAX)
        library = self._library = rail.library
        self._stack = Stack(library)
        room, vector = self.depth + POLL_MANY, rail.next_vector()
        self._completions = Completions(library, rail.context, self._stack, room, vector)
        cq = self._completions.queue
        cap = library.QPCap(max_send_wr=self.depth, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
        attributes = library.QPInitAttr(qp_type=library.rc, scq=cq, rcq=cq, cap=cap, sq_sig_all=0)
        self._qp = self._stack.make("a queue pair", lambda: library.QP(rail.pd, attributes))
        self._post_send = self._qp.post_send
        self._cq_poll = cq.poll
        try:
            self._rings = SPARES.pop()
        except IndexError:
            self._rings = RequestRings()
        self._transfers = self._rings.transfers

    @property
    def broken(self) -> str:
        return self._why

    def address(self) -> QueuePairAddress:
        self._usable()
        rail = self.rail
        return QueuePairAddress(rail.gid, rail.lid, self._qp.qp_num, self._psn, rail.mtu, rail.limits.reads)

    def connect(self, peer: QueuePairAddress) -> None:
        self._usable()
        if self._connected:
            raise FabricError("the queue pair is connected already")
        library, rail = self._library, self.rail
        if rail.ethernet and not rails_.arp_resolves(peer.gid, rail.gid, rail.netdev):
            why = f"{rail.name}: nobody answers for {rails_.gid_text(peer.gid)}"
            self._break(why, "")
            raise FabricError(why)
        try:
            attributes = work_requests.rts_attributes(
                library, rail.port, rail.gid_index, rail.mtu, rail.limits.reads, rail.ethernet, self._psn, peer
            )
            self._qp.to_rts(attributes)
        except (library.Error, ValueError, OverflowError) as error:
            failure = failed(f"{rail.name}: cannot connect to {rails_.gid_text(peer.gid)}", error)
            self._break(str(failure), failure.status)
            raise failure from error
        self._connected = True
        self._room = self.depth

    # --- transfers ---

    def post(self, ops: Sequence[Op]) -> int:
        size = len(ops)
        if not 0 < size <= self._room:
            self._make_room(size)
        transfers = self._transfers
        if len(transfers) < size:
            self._rings.grow_transfers(self._library, size)
        opcodes, flags, longest = _OPCODES, _FLAGS, self._longest
        at = size
        flag = 0
        try:
            for kind, local, lkey, length, remote, rkey in ops:
                at -= 1
                wr, sge, set_wr_rdma = transfers[at]
                sge.addr = local
                sge.lkey = lkey
                sge.length = length
                set_wr_rdma(rkey, remote)
                wr.opcode = opcodes[kind]
                wr.send_flags = flag = flags[kind]
                if length > longest:
                    return self.post(split(ops, longest))
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(f"no operations: {ops!r}") from error
        last = transfers[0].wr
        last.send_flags = flag | _SIGNALED
        self._send(transfers[size - 1].wr, size)
        return self._ticket

    def poll(self) -> int:
        try:
            while not self._why and self._drain() == POLL_MANY:
                pass
        except self._library.Error as error:
            self._lost(error)
        if self._why:
            raise self._error()
        return self._done

    def wait(self, ticket: int, until: float) -> None:
        if ticket <= self._done:
            return
        if self._why:
            raise self._error()
        if ticket > self._ticket:
            raise UsageError(f"no chain has the ticket {ticket}")
        clock, look = time.monotonic, self._cq_poll
        looks = int(self._looks)
        start = clock()
        try:
            for number in range(looks):
                count, completions = look()
                if count:
                    self._take(completions)
                    if ticket <= self._done:
                        self._looks += (min(4 * number + _LOOKS_MIN, _LOOKS_MAX) - self._looks) / 8
                        return
                    if self._why:
                        raise self._error()
            looked = clock()
            self._sleep(ticket, until)
        except self._library.Error as error:
            self._lost(error)
            raise self._error() from error
        # Learn how many polls would have fitted into the time that the completion took.
        wanted = 2 * looks * (clock() - start) / max(looked - start, 1e-9)
        self._looks += ((wanted if wanted <= _LOOKS_MAX else _LOOKS_MIN) - self._looks) / 8

    def _drain(self) -> int:
        """Take the available completions, up to ``POLL_MANY``, and return their number."""
        completions = self._completions.take()
        self._take(completions)
        return len(completions)

    def _take(self, completions: Sequence[Any]) -> None:
        """Record which chains are done, or why the queue pair failed."""
        for completion in completions:
            status = completion.status
            if status or not self._chains:
                # The first error has the reason; everything behind it is flushed.
                name, meaning = meaning_of(status) if status else ("", "the device completed what nobody had posted")
                self._break(f"{self.rail.name}: {meaning}", name)
                return
            self._room += self._chains.popleft()
            self._done += 1

    def _sleep(self, ticket: int, until: float) -> None:
        """Wait for completion events until a chain is done. Raises Timeout, FabricError."""
        while True:
            self._completions.arm()
            # Take all: completions that are already in the queue raise no event.
            while self._drain() == POLL_MANY and ticket > self._done and not self._why:
                pass
            if ticket <= self._done:
                return
            if self._why:
                raise self._error()
            left = until - time.monotonic()
            if left <= 0:
                raise Timeout(f"{self.rail.name}: chain {ticket} was not done in time")
            self._completions.sleep(left)

    def _make_room(self, size: int) -> None:
        """Wait until ``size`` work requests fit. Raises FabricError, Timeout, UsageError."""
        self._usable()
        if not self._connected:
            raise FabricError("the queue pair is not connected")
        if not 0 < size <= self.depth:
            raise UsageError(f"a chain of {size} operations, the queue pair takes 1 to {self.depth}")
        until = time.monotonic() + QUEUE_S
        while self._room < size:
            self.wait(self._done + 1, until)

    def _send(self, first: Any, size: int) -> None:
        """Post a chain of which only the last request is signalled. It gets the next ticket."""
        try:
            self._post_send(first)
        except self._library.Error as error:
            # Part of the chain may be in flight.
            failure = failed(f"{self.rail.name}: cannot post", error)
            self._break(str(failure), failure.status)
            raise failure from error
        self._ticket += 1
        self._room -= size
        self._chains.append(size)

    # --- windows ---

    def bind(self, bindings: Sequence[Binding]) -> None:
        library = self._library
        check_bindings(self.rail, bindings)
        for start in range(0, len(bindings), self.depth):
            part = bindings[start : start + self.depth]
            if len(part) > self._room:
                self._make_room(len(part))
            self._rings.grow(library, self._rings.binds, library.bind, len(part))
            with self.rail.lock:
                keys = []
                for at, (window, region, address, length) in zip(range(len(part) - 1, -1, -1), part):
                    assert isinstance(window, VerbsWindow) and isinstance(region, VerbsRegion)
                    wr, mw = self._rings.binds[at], window.ready()
                    wr.set_bind_wr(mw, library.MWBindInfo(region.mr, address, length, library.remote_write))
                    if window.tag is None:
                        window.tag = Tag.of(wr, mw, address, length)
                    keys.append(wr.rkey)
                self._send(self._rings.binds[len(part) - 1], len(part))
                for key, (window, region, _, _) in zip(keys, part):
                    assert isinstance(window, VerbsWindow) and isinstance(region, VerbsRegion)
                    window.bound(self, region, key)
            self.wait(self._ticket, time.monotonic() + QUEUE_S)

    def invalidate(self, windows: Sequence[Window]) -> None:
        library = self._library
        own = [own_window(self.rail, window) for window in windows]
        if any(window.qp is not self for window in own) or len(set(own)) < len(own):
            raise UsageError("a window that is not bound to this queue pair")
        for start in range(0, len(own), self.depth):
            part = own[start : start + self.depth]
            if len(part) > self._room:
                self._make_room(len(part))
            self._rings.grow(library, self._rings.invalidations, library.invalidate, len(part))
            for at, window in zip(range(len(part) - 1, -1, -1), part):
                # invalidate_rkey and imm_data share one word, which pyverbs stores unchanged.
                self._rings.invalidations[at].imm_data = window.rkey
            self._send(self._rings.invalidations[len(part) - 1], len(part))
            self.wait(self._ticket, time.monotonic() + QUEUE_S)
            with self.rail.lock:
                for window in part:
                    if window.tag is None:
                        window.drop()
                    window.unbound()

    # --- the end ---

    def close(self) -> None:
        with self.rail.lock:
            if not self.open:
                return
            library = self._library
            if not self._stopped:
                with contextlib.suppress(library.Error):  # destroying it is the fence; this only shortens it
                    self._qp.modify(library.QPAttr(qp_state=library.error_state), library.state)
            self._stopped = True  # a close that is interrupted below is called again: what is destroyed takes no call
            self._break("the queue pair is closed", "")
            for window in list(self.windows):
                window.drop()
            self._stack.close()
            self.rail.queue_pairs.discard(self)
            self.open = False
            SPARES.append(self._rings)

    def forget(self) -> None:
        """Mark the queue pair unusable in a forked child, without closing it."""
        self.open = False
        self._room = 0
        self._why, self._status = "the queue pair belongs to the process that this one was forked from", ""

    def _break(self, why: str, status: str) -> None:
        if not self._why:
            self._why, self._status = why, status
            self._room = 0

    def _lost(self, error: BaseException) -> None:
        """Break, as the completion queue has failed: nothing is known of what is in flight."""
        failure = failed(f"{self.rail.name}: the completion queue failed", error)
        self._break(str(failure), failure.status)

    def _error(self) -> FabricError:
        status = self._status
        return FabricError(f"{self._why} ({status})" if status else self._why, status)

    def _usable(self) -> None:
        if self._why:
            raise self._error()


class VerbsRail(Domain):
    """One port of an open device; see :class:`simm.rdma.api.Rail`."""

    def __init__(self, library: Library, port: rails_.Port) -> None:
        gid = port.gid
        assert gid is not None, "rails.choose takes ports with a GID"
        self.library = library
        self.name = port.name
        self.port = port.number
        self.gid_index = gid.index
        self.netdev = gid.netdev
        self.lock = threading.RLock()
        self.regions: set[VerbsRegion] = set()
        self.queue_pairs: set[VerbsQueuePair] = set()
        self.windows: set[VerbsWindow] = set()
        self.open = True
        self._why = "the rail is closed"
        self._stack = Stack(library)
        self.context = self._stack.make("a context", lambda: library.Context(name=port.device))
        try:
            self._query()
        except library.Error as error:
            self._stack.close()
            raise failed("cannot ask the device", error) from error
        self.pd = self._stack.make("a protection domain", lambda: library.PD(self.context))

    def _query(self) -> None:
        """Ask the device for its attributes. Impossible values are clamped."""
        device = self.context.query_device()
        port = self.context.query_port(self.port)
        self.gid = ipaddress.IPv6Address(str(self.context.query_gid(self.port, self.gid_index))).packed
        self.lid: int = port.lid
        self.mtu = 128 << max(1, min(int(port.active_mtu), 5))
        self.ethernet = int(port.link_layer) == _ETHERNET
        self.message_bytes = min(int(port.max_msg_sz) or _MESSAGE_BYTES, _MESSAGE_BYTES)
        size = int(device.max_mr_size)
        windows = int(device.max_mw) if int(device.device_cap_flags) & _WINDOWS_2 else 0
        self.limits = Limits(
            region_bytes=size if 0 < size < _REGION_BYTES else _REGION_BYTES,
            windows=max(windows, 0),
            reads=max(1, min(int(device.max_qp_rd_atom), int(device.max_qp_init_rd_atom) or READS, READS)),
            depth=max(_DEPTH_LEAST, min(int(device.max_qp_wr), int(device.max_cqe) - POLL_MANY, DEPTH)),
        )
        self._vectors = itertools.cycle(range(max(1, int(self.context.num_comp_vectors))))

    def next_vector(self) -> int:
        """Return the completion vector of the next queue pair: they use the device's interrupts in turn."""
        return next(self._vectors)

    def register(self, address: int, length: int, access: Access) -> Region:
        return self._register(address, length, access, None)

    def register_dmabuf(self, fd: int, offset: int, length: int, access: Access) -> Region:
        return self._register(offset, length, access, fd)

    def _register(self, address: int, length: int, access: Access, dmabuf: int | None) -> Region:
        with self.lock:
            self._usable()
            region = VerbsRegion(self, address, length, access, dmabuf)
            self.regions.add(region)
            return region

    def queue_pair(self) -> QueuePair:
        with self.lock:
            self._usable()
            qp = VerbsQueuePair(self)
            self.queue_pairs.add(qp)
            return qp

    def window(self) -> Window:
        with self.lock:
            self._usable()
            if not self.limits.windows:
                raise FabricError(f"{self.name}: the device has no memory windows of type 2")
            window = VerbsWindow(self)
            self.windows.add(window)
            return window

    def close(self) -> None:
        with self.lock:
            if not self.open:
                return
            for qp in list(self.queue_pairs):
                qp.close()
            for window in list(self.windows):
                window.close()
            for region in list(self.regions):
                region.close()
            self._stack.close()
            self.open = False

    def forget(self) -> None:
        """Mark everything unusable in a forked child. Takes no lock: a thread of the parent may have held it."""
        self.lock = threading.RLock()
        self.open = False
        self._why = "the rail belongs to the process that this one was forked from"
        for qp in list(self.queue_pairs):
            qp.forget()
        for window in list(self.windows):
            window.open = False
        for region in list(self.regions):
            region.open = False

    def _usable(self) -> None:
        if not self.open:
            raise FabricError(f"{self.name}: {self._why}")


# --- opening -----------------------------------------------------------------------------------


def _import() -> Library:
    """Import pyverbs. Raises whatever the import raises."""
    import pyverbs.addr
    import pyverbs.cq
    import pyverbs.device
    import pyverbs.fork
    import pyverbs.mr
    import pyverbs.pd
    import pyverbs.pyverbs_error
    import pyverbs.qp
    import pyverbs.wr

    try:
        import pyverbs.enums as enums
    except ImportError:  # since version 59
        import pyverbs.libibverbs_enums as enums
    package: Any = pyverbs
    return Library({**vars(package), "enums": enums})


#: Set by the first import that succeeds.
_library: Library | None = None


def _load() -> Library | Absence:
    """Return pyverbs, or the reason why this Python has none."""
    global _library
    if _library is None:
        try:
            _library = _import()
        except ModuleNotFoundError as error:
            if error.name == "pyverbs":
                return Absence(
                    "pyverbs is not installed for this Python",
                    "install python3-pyverbs (Debian, Ubuntu, Fedora); in a virtual environment of the system's Python "
                    "add a folder with one link to that package to its path: simm doctor prints the commands",
                )
            return Absence(
                f"pyverbs is there and cannot be loaded ({error})",
                "it is built for the system's own Python: run SiMM with that; simm doctor says more",
            )
        except Exception as error:
            return Absence(
                f"pyverbs is there and cannot be loaded ({type(error).__name__}: {error})",
                "install rdma-core and python3-pyverbs of the same version",
            )
    return _library


class VerbsFabric:
    """The rails of this process; see :class:`simm.rdma.api.Fabric`.

    ``skipped`` lists the ports that are not used, each with the reason.
    """

    def __init__(self, opened: Sequence[VerbsRail], skipped: Sequence[tuple[str, str]]) -> None:
        self._rails = tuple(opened)
        self.rails: Sequence[Rail] = self._rails
        self.skipped = tuple(skipped)
        _OPEN.append(self)

    def close(self) -> None:
        for rail in self._rails:
            rail.close()
        if self in _OPEN:
            _OPEN.remove(self)

    def abandon(self) -> None:
        """Mark all rails unusable. Runs automatically in every forked child; a second call changes nothing."""
        for rail in self._rails:
            rail.forget()


#: All open fabrics. The list keeps them alive.
_OPEN: Final[list[VerbsFabric]] = []


def _in_the_child() -> None:
    work_requests.forget_lock()
    for fabric in _OPEN:
        fabric.abandon()
    # The child may open devices of its own; the inherited objects stay pinned.
    _OPEN.clear()


fork.in_child(_in_the_child)


def available(
    devices: str | None = None, *, numa: int = -1, env: Mapping[str, str] = os.environ, sys_root: str = "/"
) -> Absence | None:
    """Return None if :func:`open_fabric` may succeed, otherwise the reason. Reads some files, opens no device."""
    library = _load()
    if isinstance(library, Absence):
        return library
    found = rails_.usable(devices, numa, env, sys_root)
    return found if isinstance(found, Absence) else None


def open_fabric(
    devices: str | None = None, *, numa: int = -1, env: Mapping[str, str] = os.environ, sys_root: str = "/"
) -> Fabric | Absence:
    """Open the rails of NUMA node ``numa`` (-1: no particular node), or return the reason why there are none.

    ``devices`` restricts them (``mlx5_0,mlx5_1:2``), as the engines' variable in ``env`` does. A device that does not
    open is left out, with the reason in ``skipped``. The caller owns the result. Nothing missing raises an error.
    """
    library = _load()
    if isinstance(library, Absence):
        return library
    found = rails_.usable(devices, numa, env, sys_root)
    if isinstance(found, Absence):
        return found
    chosen, skipped = found
    if int(library.fork_status()) == _FORK_DISABLED:
        try:
            library.fork_init()
        except library.Error:
            pass  # too late: another library has registered memory already and must protect it itself
    opened = []
    for port in chosen:
        try:
            opened.append(VerbsRail(library, port))
        except FabricError as error:
            skipped.append((port.name, str(error)))
    if not opened:
        reasons = "; ".join(f"{name}: {why}" for name, why in skipped)
        return Absence(
            f"no RDMA device could be opened ({reasons})",
            "this user needs read and write access to /dev/infiniband/uverbs*, in a container too",
        )
    return VerbsFabric(opened, skipped)

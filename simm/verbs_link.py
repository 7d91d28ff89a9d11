"""The rails of :mod:`simm.verbs` and what is on them: regions, windows, links.

The promises are in :mod:`simm.fabric`, why it is done this way in :mod:`simm.verbs`.
"""

from __future__ import annotations

import ctypes
import ipaddress
import itertools
import secrets
import select
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from . import neighbours
from . import rails as rails_
from .errors import UsageError
from .fabric import (
    Access,
    Binding,
    FabricError,
    Limits,
    Link,
    LinkAddress,
    Op,
    Region,
    Timeout,
    Window,
)
from .verbs_wr import (
    DMABUF_HINTS,
    MW_TYPE_2,
    SPARES,
    Library,
    Rows,
    Stack,
    Tag,
    dmabuf_mr,
    failed,
    make_channel,
    meaning_of,
    split,
)

#: Operations of a chain, and under way on a link.
DEPTH: Final = 256
#: READs that one end has under way, and takes at a time. What all cards have; more helped nowhere.
READS: Final = 16
#: Seconds that a post waits for room, and a bind for its completion.
QUEUE_S: Final = 5.0

#: See "Endless retries": 268 ms, four times.
_TIMEOUT: Final = 16
_RETRIES: Final = 3
#: No side receives, so none is ever not ready to.
_RNR_RETRIES: Final = 3
_RNR_TIMER: Final = 12
_HOPS: Final = 64
#: A message has at most 2^31 bytes; ports say what they take. Longer operations are posted in pieces.
_MESSAGE_BYTES: Final = 1 << 30
_REGION_BYTES: Final = 1 << 46
_DEPTH_LEAST: Final = 16
#: How often to look before sleeping, at most and at least. Counted and not timed: what sleeping costs, and what a look
#: does, grow with the slowness of the machine alike. 0.25 us each natively, so a wait holds the GIL for 0.2 ms at most.
_LOOKS_MAX: Final = 800
_LOOKS_MIN: Final = 50
_POLL_MANY: Final = 16

#: Values of the kernel's interface, the same in all versions, by our kinds of operation: READ, WRITE, FENCED_READ.
_OPCODES: Final = {0: 4, 1: 0, 2: 4}
_FLAGS: Final = {0: 0, 1: 0, 2: 1}
_SIGNALED: Final = 2
#: Device flags: windows of type 2 A or B.
_WINDOWS_2: Final = 1 << 23 | 1 << 24
_ETHERNET: Final = 2


class VerbsRegion:
    """A memory region; see :class:`simm.fabric.Region`. ``dmabuf``: descriptor of the one that it is of; ``address`` is
    the offset in it then."""

    def __init__(
        self, rail: VerbsRail, address: int, length: int, access: Access, dmabuf: int | None = None
    ) -> None:
        if length < 1 or address < (1 if dmabuf is None else 0):
            raise FabricError(f"cannot register {length} bytes at {address:#x}", "EINVAL")
        if length > rail.limits.region_bytes:
            raise FabricError(
                f"{rail.name}: a region has at most {rail.limits.region_bytes} bytes: register pieces", "EINVAL"
            )
        if access & (Access.REMOTE_WRITE | Access.WINDOWS) and not access & Access.LOCAL_WRITE:
            raise FabricError("remote writing and windows need LOCAL_WRITE", "EINVAL")
        self.address, self.length, self.access = address, length, access
        self.rail = rail
        library = rail.library
        rights = sum(value for right, value in library.rights if access & right)
        stack = Stack(library)
        try:
            if dmabuf is None:
                self.mr = stack.make("a region", lambda: library.MR(rail.pd, length, rights, address=address))
            else:
                self.mr = stack.make("a region", lambda: dmabuf_mr(library, rail.pd, dmabuf, address, length, rights))
        except FabricError as error:
            what = f"{rail.name}: cannot register {length} bytes"
            if dmabuf is not None:
                hint = DMABUF_HINTS.get(error.status, "")
                raise FabricError(f"{what} of a dma-buf: {error}{hint}", error.status) from error
            if error.status in ("ENOMEM", "EPERM"):
                limit = rails_.memlock_bytes()
                raise FabricError(
                    f"{what}: out of lockable memory, or of the device's regions; the limit is "
                    f"{'unlimited' if limit is None else f'{limit} bytes'}: raise it (ulimit -l unlimited; in a "
                    "systemd unit LimitMEMLOCK=infinity; in a container the capability IPC_LOCK)",
                    error.status,
                ) from error
            hint = {
                "EFAULT": ": that memory is not mapped, or not writable",
                "EINVAL": ": the device does not take such memory or rights",
            }.get(error.status, "")
            raise FabricError(f"{what}: {error}{hint}", error.status) from error
        self._stack = stack
        self.lkey: int = self.mr.lkey
        self.rkey: int = self.mr.rkey
        self.windows: set[VerbsWindow] = set()
        self.open = True

    def close(self) -> None:
        with self.rail.lock:
            if not self.open:
                return
            for window in list(self.windows):
                window.drop()
            self._stack.close()
            self.open = False
            self.rail.regions.discard(self)


class VerbsWindow:
    """A memory window of type 2; see :class:`simm.fabric.Window`."""

    def __init__(self, rail: VerbsRail) -> None:
        self.rail = rail
        self.rkey = 0
        self.region: VerbsRegion | None = None
        self.link: VerbsLink | None = None
        self.open = True
        self.mw: Any = None
        #: The word to write new keys to; None where that is not to be had.
        self.tag: ctypes.c_uint32 | None = None
        self._stack = Stack(rail.library)
        self.ready()

    def ready(self) -> Any:
        """The pyverbs object, made anew if it has gone."""
        if self.mw is None:
            library = self.rail.library
            try:
                self.mw = self._stack.make("a memory window", lambda: library.MW(self.rail.pd, MW_TYPE_2))
            except FabricError as error:
                raise FabricError(f"{self.rail.name}: {error}", error.status) from error
        return self.mw

    def bound(self, link: VerbsLink, region: VerbsRegion, rkey: int) -> None:
        """Note what was posted."""
        self.link, self.region, self.rkey = link, region, rkey
        link.windows.add(self)
        region.windows.add(self)
        if self.tag is not None:
            self.tag.value = rkey

    def unbound(self) -> None:
        """Note that it allows nothing any more."""
        if self.link is not None:
            self.link.windows.discard(self)
        if self.region is not None:
            self.region.windows.discard(self)
        self.link = self.region = None

    def drop(self) -> None:
        """Free what the device has, bound or not; the next bind makes it anew."""
        self.tag = None
        self._stack.close()
        self.mw = None
        self.unbound()

    def close(self) -> None:
        with self.rail.lock:
            if self.open:
                self.drop()
                self.open = False
                self.rail.windows.discard(self)


class VerbsLink:
    """A queue pair with a completion queue of its own; see :class:`simm.fabric.Link`."""

    def __init__(self, rail: VerbsRail) -> None:
        self.rail = rail
        self.depth = rail.limits.depth
        self.windows: set[VerbsWindow] = set()
        self.open = True
        self._psn = secrets.randbits(24)
        self._connected = False
        self._why = self._status = ""
        #: Of the last chain posted, and of the last one done: they are done in order.
        self._ticket = self._done = 0
        #: Operations of each chain under way, and how many more can be. None can before the link is connected, nor when
        #: it is broken, so that a post looks at one number.
        self._chains: deque[int] = deque()
        self._room = 0
        self._longest = rail.message_bytes
        self._armed = False
        self._looks = float(_LOOKS_MAX)
        library = self._library = rail.library
        self._stack = Stack(library)
        self._channel, fd = make_channel(library, rail.context, self._stack)
        self._cq = self._stack.make(
            "a completion queue",
            lambda: library.CQ(rail.context, self.depth + _POLL_MANY, None, self._channel, rail.next_vector()),
        )
        cap = library.QPCap(max_send_wr=self.depth, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
        attributes = library.QPInitAttr(qp_type=library.rc, scq=self._cq, rcq=self._cq, cap=cap, sq_sig_all=0)
        self._qp = self._stack.make("a queue pair", lambda: library.QP(rail.pd, attributes))
        self._events = select.poll()
        self._events.register(fd, select.POLLIN)
        self._post_send = self._qp.post_send
        self._cq_poll = self._cq.poll
        try:
            self._rows = SPARES.pop()
        except IndexError:
            self._rows = Rows()
        self._transfers = self._rows.transfers

    @property
    def broken(self) -> str:
        return self._why

    def address(self) -> LinkAddress:
        self._usable()
        rail = self.rail
        return LinkAddress(rail.gid, rail.lid, self._qp.qp_num, self._psn, rail.mtu, rail.limits.reads)

    def connect(self, peer: LinkAddress) -> None:
        self._usable()
        if self._connected:
            raise FabricError("the link is connected already")
        library, rail = self._library, self.rail
        if rail.ethernet and not neighbours.answers(peer.gid, rail.gid, rail.netdev):
            why = f"{rail.name}: nobody answers for {_text_of(peer.gid)}"
            self._break(why, "")
            raise FabricError(why)
        try:
            gid = library.GID(ipaddress.IPv6Address(peer.gid).exploded)
            route = library.GlobalRoute(dgid=gid, sgid_index=rail.gid_index, hop_limit=_HOPS)
            # With the GID always: it reaches other subnets too. InfiniBand wants the peer's LID beside it.
            to = library.AHAttr(gr=route, is_global=1, port_num=rail.port, dlid=0 if rail.ethernet else peer.lid)
            attributes = library.QPAttr(port_num=rail.port)
            attributes.qp_access_flags = library.qp_rights
            attributes.pkey_index = 0
            attributes.ah_attr = to
            attributes.dest_qp_num = peer.qpn
            attributes.path_mtu = max(1, min(rail.mtu, peer.mtu).bit_length() - 8)
            attributes.rq_psn, attributes.sq_psn = peer.psn, self._psn
            attributes.max_rd_atomic = min(rail.limits.reads, max(peer.reads, 1))
            attributes.max_dest_rd_atomic = rail.limits.reads
            attributes.min_rnr_timer = _RNR_TIMER
            attributes.timeout, attributes.retry_cnt, attributes.rnr_retry = _TIMEOUT, _RETRIES, _RNR_RETRIES
            self._qp.to_rts(attributes)
        except (library.Error, ValueError, OverflowError) as error:
            failure = failed(f"{rail.name}: cannot connect to {_text_of(peer.gid)}", error)
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
            self._rows.grow_transfers(self._library, size)
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
        while not self._why and self._drain() == _POLL_MANY:
            pass
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
        # Would looking on have done? As many looks as fit into the time that it took.
        wanted = 2 * looks * (clock() - start) / max(looked - start, 1e-9)
        self._looks += ((wanted if wanted <= _LOOKS_MAX else _LOOKS_MIN) - self._looks) / 8

    def _drain(self) -> int:
        """Take some of the completions that are there; how many."""
        count, completions = self._cq_poll(_POLL_MANY)
        self._take(completions)
        return int(count)

    def _take(self, completions: Sequence[Any]) -> None:
        """Note what is done, or why the link is broken."""
        for completion in completions:
            status = completion.status
            if status:
                # The first one has the reason; what was behind it is flushed.
                name, meaning = meaning_of(status)
                self._break(f"{self.rail.name}: {meaning}", name)
                return
            self._room += self._chains.popleft()
            self._done += 1

    def _sleep(self, ticket: int, until: float) -> None:
        """Wait for events until a chain is done. Raises Timeout, FabricError."""
        while True:
            if not self._armed:
                # An event comes for what completes after this; what did before, the next look finds.
                self._cq.req_notify()
                self._armed = True
            # All of them: none of those that were there already brings an event.
            while self._drain() == _POLL_MANY and ticket > self._done and not self._why:
                pass
            if ticket <= self._done:
                return
            if self._why:
                raise self._error()
            left = until - time.monotonic()
            if left <= 0:
                raise Timeout(f"{self.rail.name}: chain {ticket} was not done in time")
            if self._events.poll(left * 1000 + 1):
                self._channel.get_cq_event(self._cq)
                self._cq.ack_events(1)
                self._armed = False

    def _make_room(self, size: int) -> None:
        """See that ``size`` work requests can be posted."""
        self._usable()
        if not self._connected:
            raise FabricError("the link is not connected")
        if not 0 < size <= self.depth:
            raise UsageError(f"a chain of {size} operations, the link takes 1 to {self.depth}")
        until = time.monotonic() + QUEUE_S
        while self._room < size:
            self.wait(self._done + 1, until)

    def _send(self, first: Any, size: int) -> None:
        """Post a chain whose last request, and no other, is signalled. It has the next ticket."""
        try:
            self._post_send(first)
        except self._library.Error as error:
            # Some of it may be under way.
            failure = failed(f"{self.rail.name}: cannot post", error)
            self._break(str(failure), failure.status)
            raise failure from error
        self._ticket += 1
        self._room -= size
        self._chains.append(size)

    # --- windows ---

    def bind(self, bindings: Sequence[Binding]) -> None:
        library = self._library
        taken: set[VerbsWindow] = set()
        for window, region, address, length in bindings:
            own = self._own(window)
            if own in taken or own.link is not None:
                raise UsageError("a window that is bound already")
            if not isinstance(region, VerbsRegion) or region.rail is not self.rail or not region.open:
                raise UsageError("a region of another rail, or a closed one")
            if length < 1 or address < region.address or address + length > region.address + region.length:
                raise UsageError(f"{length} bytes at {address:#x} are not within the region")
            taken.add(own)
        for start in range(0, len(bindings), self.depth):
            part = bindings[start : start + self.depth]
            if len(part) > self._room:
                self._make_room(len(part))
            self._rows.grow(library, self._rows.binds, library.bind, len(part))
            with self.rail.lock:
                keys = []
                for at, (window, region, address, length) in zip(range(len(part) - 1, -1, -1), part):
                    assert isinstance(window, VerbsWindow) and isinstance(region, VerbsRegion)
                    wr, mw = self._rows.binds[at], window.ready()
                    wr.set_bind_wr(mw, library.MWBindInfo(region.mr, address, length, library.remote_write))
                    if window.tag is None:
                        window.tag = Tag.of(wr, mw, address, length)
                    keys.append(wr.rkey)
                self._send(self._rows.binds[len(part) - 1], len(part))
                for key, (window, region, _, _) in zip(keys, part):
                    assert isinstance(window, VerbsWindow) and isinstance(region, VerbsRegion)
                    window.bound(self, region, key)
            self.wait(self._ticket, time.monotonic() + QUEUE_S)

    def invalidate(self, windows: Sequence[Window]) -> None:
        library = self._library
        own = [self._own(window) for window in windows]
        if any(window.link is not self for window in own) or len(set(own)) < len(own):
            raise UsageError("a window that is not bound to this link")
        for start in range(0, len(own), self.depth):
            part = own[start : start + self.depth]
            if len(part) > self._room:
                self._make_room(len(part))
            self._rows.grow(library, self._rows.invalidations, library.invalidate, len(part))
            for at, window in zip(range(len(part) - 1, -1, -1), part):
                # invalidate_rkey and imm_data are one word, and pyverbs stores it as it is.
                self._rows.invalidations[at].imm_data = window.rkey
            self._send(self._rows.invalidations[len(part) - 1], len(part))
            self.wait(self._ticket, time.monotonic() + QUEUE_S)
            with self.rail.lock:
                for window in part:
                    if window.tag is None:
                        window.drop()
                    window.unbound()

    def _own(self, window: Window) -> VerbsWindow:
        if not isinstance(window, VerbsWindow) or window.rail is not self.rail or not window.open:
            raise UsageError("a window of another rail, or a closed one")
        return window

    # --- the end ---

    def close(self) -> None:
        with self.rail.lock:
            if not self.open:
                return
            library = self._library
            try:
                self._qp.modify(library.QPAttr(qp_state=library.error_state), library.state)
            except library.Error:
                pass  # destroying it is what counts
            for window in list(self.windows):
                window.drop()
            self._stack.close()
            self.open = False
            self._break("the link is closed", "")
            self.rail.links.discard(self)
            SPARES.append(self._rows)

    def forget(self) -> None:
        """In a child: of no use, and not to be closed."""
        self.open = False
        self._room = 0
        self._why, self._status = "the link belongs to the process that this one was forked from", ""

    def _break(self, why: str, status: str) -> None:
        if not self._why:
            self._why, self._status = why, status
            self._room = 0

    def _error(self) -> FabricError:
        status = self._status
        return FabricError(f"{self._why} ({status})" if status else self._why, status)

    def _usable(self) -> None:
        if self._why:
            raise self._error()


def _text_of(gid: bytes) -> str:
    """A GID as people write it."""
    address = ipaddress.IPv6Address(gid)
    return str(address.ipv4_mapped or address)


class VerbsRail:
    """One port of an open device; see :class:`simm.fabric.Rail`."""

    def __init__(self, library: Library, port: rails_.Port) -> None:
        gid = port.gid
        assert gid is not None, "rails.choose takes ports with a GID"
        self.library = library
        self.name = port.name
        self.numa = port.numa
        self.port = port.number
        self.gid_index = gid.index
        self.netdev = gid.netdev
        self.lock = threading.RLock()
        self.regions: set[VerbsRegion] = set()
        self.links: set[VerbsLink] = set()
        self.windows: set[VerbsWindow] = set()
        self.open = True
        self._why = "the rail is closed"
        self._stack = Stack(library)
        self.context = self._stack.make("a context", lambda: library.Context(name=port.device))
        try:
            self._look()
        except library.Error as error:
            self._stack.close()
            raise failed("cannot ask the device", error) from error
        self.pd = self._stack.make("a protection domain", lambda: library.PD(self.context))

    def _look(self) -> None:
        """Ask the device what it can do. Values that cannot be are cut down, not believed."""
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
            depth=max(_DEPTH_LEAST, min(int(device.max_qp_wr), int(device.max_cqe) - _POLL_MANY, DEPTH)),
        )
        self._vectors = itertools.cycle(range(max(1, int(self.context.num_comp_vectors))))

    def next_vector(self) -> int:
        """Links take the device's interrupts in turn."""
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

    def link(self) -> Link:
        with self.lock:
            self._usable()
            link = VerbsLink(self)
            self.links.add(link)
            return link

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
            for link in list(self.links):
                link.close()
            for window in list(self.windows):
                window.close()
            for region in list(self.regions):
                region.close()
            self._stack.close()
            self.open = False

    def forget(self) -> None:
        """In a child: mark all as of no use. Takes no lock: another thread of the parent may have held it."""
        self.lock = threading.RLock()
        self.open = False
        self._why = "the rail belongs to the process that this one was forked from"
        for link in list(self.links):
            link.forget()
        for window in list(self.windows):
            window.open = False
        for region in list(self.regions):
            region.open = False

    def _usable(self) -> None:
        if not self.open:
            raise FabricError(f"{self.name}: {self._why}")

"""Work requests that are used many times, and pyverbs objects that are closed exactly once.

docs/rdma.md has the reasons. Nothing here imports pyverbs: :mod:`simm.verbs` does, and passes its names down in a
:class:`Library`.
"""

from __future__ import annotations

import ctypes
import errno
import ipaddress
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from .api import FENCED_READ, READ, Access, FabricError, Op, QueuePairAddress

_SIGNALED: Final = 2
MW_TYPE_2: Final = 2
#: Attempts to make a completion channel whose descriptor can be identified.
_CHANNEL_TRIES: Final = 20
#: A dead peer is detected after 268 ms times four tries; docs/rdma.md, "Finite retries".
_TIMEOUT: Final = 16
_RETRIES: Final = 3
#: Neither side posts receives, so "receiver not ready" cannot happen.
_RNR_RETRIES: Final = 3
_RNR_TIMER: Final = 12
_HOPS: Final = 64

#: Completion statuses in the order of their numbers, each with its meaning for an operator.
_STATUSES: Final = (
    ("SUCCESS", "done"),
    ("LOC_LEN_ERR", "an operation has a length that the device does not take"),
    ("LOC_QP_OP_ERR", "this end's device refused an operation: a bug, or an invalidated key"),
    ("LOC_EEC_OP_ERR", "this end's device failed"),
    ("LOC_PROT_ERR", "an operation names local memory that is not, or no longer, registered"),
    ("WR_FLUSH_ERR", "it was in flight, or posted, when the queue pair broke"),
    ("MW_BIND_ERR", "a memory window could not be bound"),
    ("BAD_RESP_ERR", "the peer's device answered nonsense"),
    ("LOC_ACCESS_ERR", "the peer used this end's memory in a way that it has no right to"),
    ("REM_INV_REQ_ERR", "the peer's device did not understand an operation"),
    ("REM_ACCESS_ERR", "refused by the peer: no right to that memory (or not any more)"),
    ("REM_OP_ERR", "the peer's device could not carry out an operation"),
    ("RETRY_EXC_ERR", "the peer does not answer"),
    ("RNR_RETRY_EXC_ERR", "the peer is not ready"),
    ("LOC_RDD_VIOL_ERR", "this end's device failed"),
    ("REM_INV_RD_REQ_ERR", "the peer's device did not understand a READ"),
    ("REM_ABORT_ERR", "the peer's device gave up"),
    ("INV_EECN_ERR", "this end's device failed"),
    ("INV_EEC_STATE_ERR", "this end's device failed"),
    ("FATAL_ERR", "the device failed"),
    ("RESP_TIMEOUT_ERR", "the peer does not answer in time"),
    ("GENERAL_ERR", "the device failed"),
)

_T = TypeVar("_T")


class Library:
    """The names of pyverbs that SiMM uses. ``modules`` has its modules by name, that of the constants as ``enums``."""

    def __init__(self, modules: Mapping[str, Any]) -> None:
        e = modules["enums"]
        self.AHAttr: Any = modules["addr"].AHAttr
        self.GID: Any = modules["addr"].GID
        self.GlobalRoute: Any = modules["addr"].GlobalRoute
        self.CQ: Any = modules["cq"].CQ
        self.CompChannel: Any = modules["cq"].CompChannel
        self.Context: Any = modules["device"].Context
        self.MR: Any = modules["mr"].MR
        #: None in versions before 34.
        self.DmaBufMR: Any = getattr(modules["mr"], "DmaBufMR", None)
        self.MW: Any = modules["mr"].MW
        self.MWBindInfo: Any = modules["mr"].MWBindInfo
        self.PD: Any = modules["pd"].PD
        self.QP: Any = modules["qp"].QP
        self.QPAttr: Any = modules["qp"].QPAttr
        self.QPCap: Any = modules["qp"].QPCap
        self.QPInitAttr: Any = modules["qp"].QPInitAttr
        self.SGE: Any = modules["wr"].SGE
        self.SendWR: Any = modules["wr"].SendWR
        self.Error: type[Exception] = modules["pyverbs_error"].PyverbsError
        self.fork_status: Callable[[], int] = modules["fork"].is_fork_initialized
        self.fork_init: Callable[[], None] = modules["fork"].fork_init
        self.rc: Any = e.IBV_QPT_RC
        self.state: Any = e.IBV_QP_STATE
        self.error_state: Any = e.IBV_QPS_ERR
        self.bind: Any = e.IBV_WR_BIND_MW
        self.invalidate: Any = e.IBV_WR_LOCAL_INV
        self.remote_write = int(e.IBV_ACCESS_REMOTE_WRITE)
        self.qp_rights = int(e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_READ | e.IBV_ACCESS_REMOTE_WRITE)
        self.rights = (
            (Access.LOCAL_WRITE, int(e.IBV_ACCESS_LOCAL_WRITE)),
            (Access.REMOTE_READ, int(e.IBV_ACCESS_REMOTE_READ)),
            (Access.REMOTE_WRITE, int(e.IBV_ACCESS_REMOTE_WRITE)),
            (Access.WINDOWS, int(e.IBV_ACCESS_MW_BIND)),
        )


def pin(made: Any) -> None:
    """Prevent an object's destructor from running; see docs/rdma.md, "Destructors"."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))


def unpin(closed: Any) -> None:
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(closed))


def failed(what: str, error: BaseException, remedy: str = "") -> FabricError:
    """Return a pyverbs error as a FabricError whose ``status`` is the name of its errno."""
    code = getattr(error, "error_code", -1)
    if code not in errno.errorcode:
        return FabricError(f"{what}: {error}{remedy}")
    return FabricError(f"{what}: {os.strerror(code)}{remedy}", errno.errorcode[code])


class Stack:
    """The pyverbs objects behind one of our objects. Each is closed once, the last one first."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._made: list[Any] = []

    def make(self, what: str, maker: Callable[[], _T]) -> _T:
        """Own and return what ``maker`` returns. If it fails, close all objects before it. Raises FabricError."""
        try:
            made = maker()
        except self._library.Error as error:
            self.close()
            raise failed(f"cannot make {what}", error) from error
        pin(made)
        self._made.append(made)
        return made

    def close(self) -> None:
        """Close all objects. If the device refuses one, keep it and those below it, and raise FabricError."""
        while self._made:
            last = self._made[-1]
            try:
                last.close()
            except self._library.Error as error:
                raise failed(f"cannot close a {type(last).__name__}", error) from error
            self._made.pop()
            unpin(last)


def dmabuf_mr(library: Library, pd: Any, fd: int, offset: int, length: int, rights: int) -> Any:
    """Return a memory region of a dma-buf. Raises FabricError if this pyverbs cannot; see docs/rdma.md, "dma-buf"."""
    if library.DmaBufMR is None:
        raise FabricError("this pyverbs has no call for it: install rdma-core and python3-pyverbs 44 or later")
    try:
        return library.DmaBufMR(pd, length, rights, dmabuf=fd, offset=offset)
    except TypeError as error:  # before descriptors were taken
        raise FabricError(f"this pyverbs takes no descriptor ({error}): install rdma-core 44 or later") from error


class Slot(NamedTuple):
    """A work request, its only SGE, and its most frequently used method."""

    wr: Any
    sge: Any
    set_wr_rdma: Callable[[int, int], None]


class RequestRings:
    """The work requests of one queue pair. Entry 0 ends each chain; entry i leads to entry i - 1. Lists grow on demand.
    """

    def __init__(self) -> None:
        self.transfers: list[Slot] = []
        self.binds: list[Any] = []
        self.invalidations: list[Any] = []

    def grow_transfers(self, library: Library, size: int) -> None:
        while len(self.transfers) < size:
            sge = library.SGE(0, 0, 0)
            wr = library.SendWR(num_sge=1, sg=[sge])
            # Now the request reads this SGE instead of its own copy, whose 16 bytes are lost once.
            wr.sg_list = sge
            if self.transfers:
                wr.next_wr = self.transfers[-1].wr
            pin(wr)
            pin(sge)
            self.transfers.append(Slot(wr, sge, wr.set_wr_rdma))

    def grow(self, library: Library, ring: list[Any], opcode: int, size: int) -> None:
        while len(ring) < size:
            wr = library.SendWR(opcode=opcode, send_flags=0 if ring else _SIGNALED)
            if ring:
                wr.next_wr = ring[-1]
            pin(wr)
            ring.append(wr)


#: Work requests of closed queue pairs, reused by the next ones.
SPARES: Final[list[RequestRings]] = []


class Tag:
    """Find the key word of an ``ibv_mw``; see docs/rdma.md, "Windows".

    The constants are offsets in ``ibv_send_wr.bind_mw`` and ``ibv_mw``.
    """

    _WORD = 8
    _ADDRESS, _LENGTH, _SIZE = 24, 32, 48
    _RKEY, _HANDLE, _TYPE = 16, 20, 24

    @classmethod
    def of(cls, wr: Any, mw: Any, address: int, length: int) -> ctypes.c_uint32 | None:
        """Return the word, found through a request to bind ``mw`` to that memory; None on any mismatch.

        The request object contains its ``ibv_send_wr``. The search finds the bind's key, address and length in it, next
        to the pointer to the ``ibv_mw``. Handle, key and type there must equal the values that pyverbs reports.
        """
        image = ctypes.string_at(id(wr), type(wr).__basicsize__)

        def word(at: int, size: int = 8) -> int:
            return int.from_bytes(image[at : at + size], sys.byteorder)

        found = [
            at
            for at in range(0, len(image) - cls._SIZE + 1, cls._WORD)
            if word(at + 8, 4) == wr.rkey and word(at + cls._ADDRESS) == address and word(at + cls._LENGTH) == length
        ]
        if len(found) != 1 or not word(found[0]):
            return None
        place = word(found[0])
        values = [ctypes.c_uint32.from_address(place + at).value for at in (cls._RKEY, cls._HANDLE, cls._TYPE)]
        if values != [mw.rkey, mw.handle, MW_TYPE_2]:
            return None
        return ctypes.c_uint32.from_address(place + cls._RKEY)


_channel_lock = threading.Lock()


def forget_lock() -> None:
    """Replace the lock in a forked child: a thread of the parent may have held it."""
    global _channel_lock
    _channel_lock = threading.Lock()


def _lowest_free() -> int:
    """Return the number that the next descriptor gets. Raises OSError."""
    lowest = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.close(lowest)
    return lowest


def _descriptors() -> set[str]:
    """Return the descriptors of this process by name, but for the lowest free one, which the listing itself has.

    Raises OSError.
    """
    names = set(os.listdir("/proc/self/fd"))
    return names - {str(_lowest_free())}


def _event_files(names: Iterable[str]) -> set[int]:
    """Return which of these descriptors are RDMA event files. One system call for each of them."""
    found = set()
    for name in names:
        try:
            if "infinibandevent" in os.readlink(f"/proc/self/fd/{name}"):
                found.add(int(name))
        except OSError:
            continue  # closed meanwhile
    return found


def make_channel(library: Library, context: Any, stack: Stack) -> tuple[Any, int]:
    """Return a new completion channel and its descriptor, which is non-blocking. Raises FabricError.

    O(open descriptors), but only those that have appeared are looked at: an engine has thousands.
    """
    with _channel_lock:
        for _ in range(_CHANNEL_TRIES):
            try:
                before, lowest = set[str](), -1
                if not hasattr(library.CompChannel, "fd"):
                    before, lowest = _descriptors(), _lowest_free()
                made = stack.make("a completion channel", lambda: library.CompChannel(context))
                fd = getattr(made, "fd", None)
                if isinstance(fd, int):
                    new, lowest = {fd}, fd
                else:
                    new = _event_files(_descriptors() - before)
                # Another library in this process may have made one at the same time; then try again. So does one with
                # another number than the next: another thread's descriptor may have had it at first, so that it is not
                # new, and the only new one is the other library's.
                if new == {lowest}:
                    os.set_blocking(lowest, False)
                    return made, lowest
            except OSError as error:
                stack.close()  # the channel may have been made
                raise FabricError(f"cannot tell a completion channel's descriptor: {error}") from error
            stack.close()
    raise FabricError("cannot tell a completion channel's descriptor: too many appear at the same time")


def meaning_of(status: int) -> tuple[str, str]:
    """Return the name of a completion status and its meaning for an operator."""
    return _STATUSES[status] if 0 <= status < len(_STATUSES) else (str(status), "the device failed")


def split(ops: Sequence[Op], longest: int) -> list[Op]:
    """Return the same operations in pieces of at most ``longest`` bytes. Only the first piece of a READ is fenced."""
    pieces: list[Op] = []
    for kind, local, lkey, length, remote, rkey in ops:
        for done in range(0, max(length, 1), longest):
            step = min(longest, length - done)
            pieces.append(
                (READ if done and kind == FENCED_READ else kind, local + done, lkey, step, remote + done, rkey)
            )
    return pieces


def rts_attributes(
    library: Library, port: int, gid_index: int, mtu: int, reads: int, ethernet: bool, psn: int, peer: QueuePairAddress
) -> Any:
    """Return the attributes with which a queue pair connects to ``peer``. Raises pyverbs' errors for a bad address."""
    gid = library.GID(ipaddress.IPv6Address(peer.gid).exploded)
    route = library.GlobalRoute(dgid=gid, sgid_index=gid_index, hop_limit=_HOPS)
    # The GID also reaches other subnets. InfiniBand needs the peer's LID as well.
    to = library.AHAttr(gr=route, is_global=1, port_num=port, dlid=0 if ethernet else peer.lid)
    attributes = library.QPAttr(port_num=port)
    attributes.qp_access_flags = library.qp_rights
    attributes.pkey_index = 0
    attributes.ah_attr = to
    attributes.dest_qp_num = peer.qpn
    attributes.path_mtu = max(1, min(mtu, peer.mtu).bit_length() - 8)
    attributes.rq_psn, attributes.sq_psn = peer.psn, psn
    attributes.max_rd_atomic = min(reads, max(peer.reads, 1))
    attributes.max_dest_rd_atomic = reads
    attributes.min_rnr_timer = _RNR_TIMER
    attributes.timeout, attributes.retry_cnt, attributes.rnr_retry = _TIMEOUT, _RETRIES, _RNR_RETRIES
    return attributes

"""The floors of ``simm bench``, which no store on this machine can beat: a bare memcpy, and a bare Python socket.

``simm bench`` alternates each operation with its floor in the same process, as machines differ more than stores do, and
one machine changes from minute to minute.

memcpy
    ``ctypes.memmove`` between rows of the same size. The shared side lies in a segment made like an arena (same
    tmpfs, same huge pages, faulted in), the private side in the memory that the operation uses. Both rotate in the same
    order over as many bytes, so the floor has no advantage from caches.
raw socket
    ``sendall`` on one side, ``recv_into`` on the other, pieces of the value's size on one TCP connection over the
    loopback. The sender never waits for an answer. The remote side is a separate process.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Final

from ...errors import TransportError
from ...shm import OwnedSegment

#: Each row starts on a new cache line, rows of whole pages start on a page.
ROW_ALIGN_BYTES: Final = 64
#: The buffer sizes of the SDK's TCP path.
SOCKET_BUFFER_BYTES: Final = 4 << 20
#: The least that an EXISTS must read or send: a slot in shared memory, a digest and an answer over TCP.
SLOT_COPY_BYTES: Final = 64
QUESTION_BYTES: Final = 32
ANSWER_BYTES: Final = 16

memmove: Final[Callable[[int, int, int], int]] = ctypes.memmove


def stride_of(size: int) -> int:
    """Return the bytes from one row to the next."""
    return -(-size // ROW_ALIGN_BYTES) * ROW_ALIGN_BYTES


class Area:
    """Memory that is divided into rows of one size.

    Args:
        size: bytes.
        shared: use a shared-memory segment like an arena's instead of private memory.

    Raises SegmentError if the machine has too little shared memory. Leaves nothing in /dev/shm: the constructor unlinks
    the segment.
    """

    def __init__(self, size: int, *, shared: bool = False) -> None:
        self.size = size
        self._segment: OwnedSegment | None = None
        self._map: mmap.mmap | None = None
        if shared:
            segment = OwnedSegment.create(f"simm-bench-{os.getpid()}-{os.urandom(4).hex()}", size)
            try:
                segment.populate(huge=True)
            except BaseException:
                segment.unlink()
                segment.close()
                raise
            segment.unlink()
            self._segment = segment
            self._whole = segment.buf
        else:
            self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._whole = memoryview(self._map)
        self._base = ctypes.c_char.from_buffer(self._whole)
        self.address = ctypes.addressof(self._base)

    def fill(self) -> None:
        """Fill the area with random bytes, which also faults every page in."""
        block = os.urandom(min(self.size, 1 << 20))
        for at in range(0, self.size, len(block)):
            piece = self._whole[at : at + len(block)]
            piece[:] = block[: len(piece)]

    def rows(self, first: int, count: int, size: int) -> list[memoryview]:
        """Return ``count`` rows of ``size`` bytes, from row ``first`` on."""
        stride = stride_of(size)
        return [self._whole[at : at + size] for at in range(first * stride, (first + count) * stride, stride)]

    def addresses(self, first: int, count: int, size: int) -> list[int]:
        """Return the addresses of these rows."""
        stride = stride_of(size)
        return list(range(self.address + first * stride, self.address + (first + count) * stride, stride))


def copy_many(targets: Sequence[int], sources: Sequence[int], size: int) -> None:
    """Copy a batch of rows."""
    for target, source in zip(targets, sources):
        memmove(target, source, size)


def copy_each(targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int]) -> None:
    """Copy a batch of rows, each its own number of bytes."""
    for target, source, size in zip(targets, sources, sizes):
        memmove(target, source, size)


# --- raw sockets --------------------------------------------------------------------------------

#: The order to the remote side: (kind, bytes of a piece or question).
_ORDER: Final = struct.Struct("<BQ")
_SEND: Final = 1
_TAKE: Final = 2
_ANSWER: Final = 3
_READY: Final = b"\x01"


def _tuned(sock: socket.socket) -> socket.socket:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
    return sock


def _receive_all(sock: socket.socket, target: memoryview) -> bool:
    """Fill ``target`` and return True, or False if the peer closed the connection."""
    at = 0
    while at < len(target):
        got = sock.recv_into(target[at:] if at else target)
        if not got:
            return False
        at += got
    return True


class RawStream:
    """A streaming connection to the remote side, for one burst.

    ``kind`` is ``"get"`` (receive), ``"put"`` (send) or ``"ask"`` (repeat a question of ``size`` bytes and an answer).
    Raises TransportError if the remote side is gone.
    """

    def __init__(self, address: tuple[str, int], kind: str, size: int) -> None:
        self.kind = kind
        order = {"get": _SEND, "put": _TAKE, "ask": _ANSWER}[kind]
        self._question = bytes(size) if kind == "ask" else b""
        self._answer = memoryview(bytearray(ANSWER_BYTES))
        self._sock = _tuned(socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC))
        try:
            self._sock.connect(address)
            self._sock.sendall(_ORDER.pack(order, size))
            # The remote side has its rows, so the timing covers the stream only.
            if self._sock.recv(1) != _READY:
                raise ConnectionError("it hung up")
        except OSError as exc:
            self._sock.close()
            raise TransportError(f"the raw socket's remote side does not answer: {exc.strerror or exc}") from exc

    def get(self, target: memoryview) -> None:
        """Receive one piece."""
        if not _receive_all(self._sock, target):
            raise TransportError("the raw socket's remote side has gone")

    def get_many(self, targets: Sequence[memoryview]) -> None:
        """Receive a batch of pieces."""
        for target in targets:
            self.get(target)

    def put(self, source: memoryview) -> None:
        """Send one piece."""
        self._sock.sendall(source)

    def put_many(self, sources: Sequence[memoryview]) -> None:
        """Send a batch of pieces."""
        sendall = self._sock.sendall
        for source in sources:
            sendall(source)

    def ask(self) -> None:
        """Send a question and receive the answer."""
        self._sock.sendall(self._question)
        self.get(self._answer)

    def finish(self) -> None:
        """Wait until the remote side has received everything, then close."""
        try:
            if self.kind == "put":
                self._sock.shutdown(socket.SHUT_WR)
                self._sock.recv(1)
        except OSError as exc:
            raise TransportError(f"the raw socket's remote side has gone: {exc.strerror or exc}") from exc
        finally:
            self._sock.close()


def serve_raw(listener: socket.socket, size: int) -> None:
    """Run the remote side's process: serve every connection in its own thread, until killed.

    ``size``: bytes that the rows of each connection rotate over.
    """
    while True:
        sock, _ = listener.accept()
        threading.Thread(target=_serve, args=(_tuned(sock), size), daemon=True).start()


def _serve(sock: socket.socket, size: int) -> None:
    """Execute a connection's order until the peer closes it."""
    order = memoryview(bytearray(_ORDER.size))
    with sock, contextlib.suppress(OSError):
        if not _receive_all(sock, order):
            return
        kind, piece = _ORDER.unpack(order)
        if kind == _ANSWER:
            question, answer = memoryview(bytearray(piece)), bytes(ANSWER_BYTES)
            sock.sendall(_READY)
            while _receive_all(sock, question):
                sock.sendall(answer)
            return
        wanted = (max(size, stride_of(piece)), piece)
        rows = _borrow(*wanted)
        try:
            sock.sendall(_READY)
            _rotate(sock, kind == _SEND, rows)
        finally:
            with _IDLE_LOCK:
                _IDLE.setdefault(wanted, []).append(rows)


def _rotate(sock: socket.socket, send: bool, rows: Sequence[memoryview]) -> None:
    """Send or receive row after row. Ends with OSError, or when the peer has sent everything."""
    while True:
        for row in rows:
            if send:
                sock.sendall(row)
            elif not _receive_all(sock, row):
                sock.sendall(b"\0")
                return


#: Unused rows, by (bytes, size). Every burst is a new connection, and only the first should pay for page faults.
_IDLE: Final[dict[tuple[int, int], list[list[memoryview]]]] = {}
_IDLE_LOCK: Final = threading.Lock()


def _borrow(total: int, size: int) -> list[memoryview]:
    with _IDLE_LOCK:
        for wanted in [key for key in _IDLE if key != (total, size)]:
            del _IDLE[wanted]  # sizes are measured one after another
        idle = _IDLE.get((total, size))
        if idle:
            return idle.pop()
    area = Area(total)
    area.fill()
    return area.rows(0, total // stride_of(size), size)

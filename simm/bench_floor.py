"""What no store on this machine can beat: a bare memcpy, and a bare socket between two Python processes.

``simm bench`` runs one of these beside every operation, in the same process and in turns with it, so that a figure
never stands alone: machines differ by more than stores do, and one machine differs from minute to minute.

memcpy
    ``ctypes.memmove`` between rows of the same size. The shared side lies in a segment made like an arena (same
    tmpfs, same huge pages, faulted in), the private side in the memory that the operation itself uses. Both
    rotate in the same order over as many bytes, so neither side sits in a cache that the store cannot have.
raw socket
    ``sendall`` on one side, ``recv_into`` on the other, pieces of the value's size on one TCP connection over the
    loopback, streaming: the sender never waits for an answer. The far side is a process of its own.
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

from .errors import TransportError
from .shm import OwnedSegment

#: Rows start on a cache line of their own; those of whole pages on a page.
ROW_ALIGN_BYTES: Final = 64
#: As the TCP path of the SDK asks for.
SOCKET_BUFFER_BYTES: Final = 4 << 20
#: What an EXISTS must at least look at or send: a slot here, a digest and a verdict there.
SLOT_COPY_BYTES: Final = 64
QUESTION_BYTES: Final = 32
ANSWER_BYTES: Final = 16

memmove: Final[Callable[[int, int, int], int]] = ctypes.memmove


def stride_of(size: int) -> int:
    """Bytes from one row to the next."""
    return -(-size // ROW_ALIGN_BYTES) * ROW_ALIGN_BYTES


class Area:
    """Memory that is cut into rows of one size after another.

    Args:
        size: bytes.
        shared: in a shared-memory segment as arenas are; else private memory of this process.

    Raises SegmentError when the machine has too little shared memory. Nothing stays behind in /dev/shm: the
    segment's name is gone before the constructor returns.
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
        """Random bytes everywhere, which also faults every page in."""
        block = os.urandom(min(self.size, 1 << 20))
        for at in range(0, self.size, len(block)):
            piece = self._whole[at : at + len(block)]
            piece[:] = block[: len(piece)]

    def rows(self, first: int, count: int, size: int) -> list[memoryview]:
        """``count`` rows of ``size`` bytes, from row ``first`` on."""
        stride = stride_of(size)
        return [self._whole[at : at + size] for at in range(first * stride, (first + count) * stride, stride)]

    def addresses(self, first: int, count: int, size: int) -> list[int]:
        """Where these rows lie."""
        stride = stride_of(size)
        return list(range(self.address + first * stride, self.address + (first + count) * stride, stride))


def copy_many(targets: Sequence[int], sources: Sequence[int], size: int) -> None:
    """A batch of bare copies."""
    for target, source in zip(targets, sources):
        memmove(target, source, size)


# --- raw sockets --------------------------------------------------------------------------------

#: What the far side shall do: (kind, bytes of a piece or question).
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
    """Fill ``target``; False when the peer is done."""
    at = 0
    while at < len(target):
        got = sock.recv_into(target[at:] if at else target)
        if not got:
            return False
        at += got
    return True


class RawStream:
    """One streaming connection to the far side; used for one burst.

    ``kind``: ``"get"`` (it sends, we receive), ``"put"`` (we send) or ``"ask"`` (a question of ``size`` bytes and
    an answer, again and again).
    Raises TransportError when the far side has gone.
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
            # The far side has its rows: what is timed from now on is the stream.
            if self._sock.recv(1) != _READY:
                raise ConnectionError("it hung up")
        except OSError as exc:
            self._sock.close()
            raise TransportError(f"the raw socket's far side does not answer: {exc.strerror or exc}") from exc

    def get(self, target: memoryview) -> None:
        """Receive one piece."""
        if not _receive_all(self._sock, target):
            raise TransportError("the raw socket's far side has gone")

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
        """One question, one answer."""
        self._sock.sendall(self._question)
        self.get(self._answer)

    def finish(self) -> None:
        """Wait until everything sent has been received; then close."""
        try:
            if self.kind == "put":
                self._sock.shutdown(socket.SHUT_WR)
                self._sock.recv(1)
        except OSError as exc:
            raise TransportError(f"the raw socket's far side has gone: {exc.strerror or exc}") from exc
        finally:
            self._sock.close()


def serve_raw(listener: socket.socket, size: int) -> None:
    """Body of the far side's process: serve every connection in a thread of its own, until killed.

    ``size``: bytes that each connection's rows rotate over.
    """
    while True:
        sock, _ = listener.accept()
        threading.Thread(target=_serve, args=(_tuned(sock), size), daemon=True).start()


def _serve(sock: socket.socket, size: int) -> None:
    """One connection: do what its order says until the peer closes."""
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
    """Send, or receive, row after row; ends with OSError, or when the peer has sent all."""
    while True:
        for row in rows:
            if send:
                sock.sendall(row)
            elif not _receive_all(sock, row):
                sock.sendall(b"\0")
                return


#: Rows that no connection uses now, by (bytes, size). Every burst is a connection of its own, and only the
#: first should pay for page faults.
_IDLE: Final[dict[tuple[int, int], list[list[memoryview]]]] = {}
_IDLE_LOCK: Final = threading.Lock()


def _borrow(total: int, size: int) -> list[memoryview]:
    with _IDLE_LOCK:
        for wanted in [key for key in _IDLE if key != (total, size)]:
            del _IDLE[wanted]  # the sizes come one after another: none comes back
        idle = _IDLE.get((total, size))
        if idle:
            return idle.pop()
    area = Area(total)
    area.fill()
    return area.rows(0, total // stride_of(size), size)

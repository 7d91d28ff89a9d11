"""The commit ring: request and reply frames through shared memory instead of a socket.

A session may own one ring: a sealed memfd that the client makes and passes to the worker. It
carries the very frames of the socket, a few at a time; the socket stays for everything else.

    header page, 64-bit words, each writer on a cache line of its own
      0   tail      requests posted so far           client
      8   head      replies posted so far            worker
     16   sleeping  1: kick me, I am not looking     worker
     24   coming    a commit is to be expected until then: CLOCK_MONOTONIC in ns, or 0      client
    SLOTS request slots, then SLOTS reply slots, SLOT_BYTES each: a frame from the slot's start

Request n lies in slot n mod SLOTS and its reply in the same reply slot. A client posts at most
SLOTS requests ahead of the replies it has read, so nothing is overwritten unread.

Why a poll, and what if the wake-up is lost
-------------------------------------------
A flag in shared memory comes and goes in 0.2 to 3 us, a UNIX socket takes 5 to 8 and the wake-up
of an idle core on top. So the worker polls the rings of active sessions for ``--poll-us`` after its
last work. Then it raises ``sleeping``, looks once more and waits in its selector; a client that sees
the flag sends KICK on the socket. Without a fence between its store and its second look, x86 may
let the two pass each other on both sides, and nobody kicks: so a client that has polled for about as
long as the worker kicks anyway. A lost wake-up costs microseconds, never a hang.

Why *coming*
------------
A client that puts values of some MiB one after the other posts every few hundred microseconds, which is about
as long as the worker looks. It so happened that it looked away just before the post, and three puts of 4 MiB in ten
had to kick it, at 150 us each. Nobody can know how long a copy takes but who makes it: so the client says when it
expects to be done, by a store and without a system call, and a worker that is still looking goes on until then.
It believes COMING_MAX_NS of that at most, so nonsense, or a client that has died, costs it no more.

Why the worker trusts nothing here
----------------------------------
The client can write anything at any time, also while the worker reads. The worker checks the tail
against the slots there are, reads each byte of a frame once before it looks at any, and demands the seals that
keep the memfd from being shrunk under it (which would be a SIGBUS).
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from typing import Final

from .constants import PAGE_BYTES
from .errors import RemoteProtocolError
from .rpc import HEADER_BYTES, CommitOne, CommittedOne, Frame, parse_commit_one, parse_committed_one, parse_header

SLOTS: Final = 4
SLOT_BYTES: Final = 32 << 10
RING_BYTES: Final = PAGE_BYTES + 2 * SLOTS * SLOT_BYTES
TAIL: Final = 0
HEAD: Final = 8
SLEEPING: Final = 16
COMING: Final = 24
#: An announcement of more than this is not believed.
COMING_MAX_NS: Final = 4_000_000
_REQUESTS: Final = PAGE_BYTES
_REPLIES: Final = PAGE_BYTES + SLOTS * SLOT_BYTES
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Ring:
    """Both ends' view of one ring."""

    __slots__ = ("_bytes", "_map", "done", "words")

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, RING_BYTES)
        self._bytes = memoryview(self._map)
        self.words = self._bytes[:PAGE_BYTES].cast("Q")
        #: Worker: requests handled. Client: replies read.
        self.done = 0

    @classmethod
    def create(cls) -> tuple[Ring, int]:
        """Client: a new ring and the descriptor to pass on (close it afterwards)."""
        fd = os.memfd_create("simm-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, RING_BYTES)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            ring = cls(fd)
            ring._map.madvise(mmap.MADV_DONTFORK)
        except BaseException:
            os.close(fd)
            raise
        return ring, fd

    @classmethod
    def attach(cls, fd: int) -> Ring:
        """Worker: map a client's ring. Raises RemoteProtocolError when it is not sealed or has another size."""
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError as exc:
            raise RemoteProtocolError(f"the ring is no memfd: {exc}") from exc
        if seals & _SEALS != _SEALS:
            raise RemoteProtocolError("the ring is not sealed against shrinking")
        if os.fstat(fd).st_size != RING_BYTES:
            raise RemoteProtocolError(f"the ring has {os.fstat(fd).st_size} bytes, not {RING_BYTES}")
        return cls(fd)

    # -- client -----------------------------------------------------------------------------

    def post(self, frame: bytes) -> int:
        """Put a request in and say so; its number. The caller keeps within SLOTS of the replies it has read."""
        words = self.words
        number: int = words[TAIL]
        at = _REQUESTS + number % SLOTS * SLOT_BYTES
        self._bytes[at : at + len(frame)] = frame
        words[TAIL] = number + 1
        return number

    def reply(self, number: int) -> Frame:
        """The reply to request ``number``, which HEAD says is there. Raises RemoteProtocolError."""
        return self._frame(_REPLIES + number % SLOTS * SLOT_BYTES)

    def committed_one(self, number: int) -> CommittedOne | None:
        """:meth:`reply`, as :func:`rpc.parse_committed_one` gives it; None where it has another shape."""
        return parse_committed_one(self._bytes, _REPLIES + number % SLOTS * SLOT_BYTES)

    # -- worker -----------------------------------------------------------------------------

    def next_commit(self) -> CommitOne | None:
        """The next request if it is a COMMIT of one entry and want, as :func:`rpc.parse_commit_one` gives it."""
        at = _REQUESTS + self.done % SLOTS * SLOT_BYTES
        if not 0 < self.words[TAIL] - self.done <= SLOTS:
            return None  # nothing there, or nonsense: next_request says which
        return parse_commit_one(self._bytes, at)

    def next_request(self) -> Frame | None:
        """The next request, copied out; None when there is none. Raises RemoteProtocolError."""
        tail = self.words[TAIL]
        if tail == self.done:
            return None
        if not 0 < tail - self.done <= SLOTS:
            raise RemoteProtocolError(f"ring tail {tail} with {self.done} handled")
        return self._frame(_REQUESTS + self.done % SLOTS * SLOT_BYTES)

    def answer(self, frame: bytes) -> None:
        """Post the reply to the request last taken."""
        if len(frame) > SLOT_BYTES:
            raise RemoteProtocolError(f"an answer of {len(frame)} bytes does not fit the ring: ask for less at once")
        at = _REPLIES + self.done % SLOTS * SLOT_BYTES
        self._bytes[at : at + len(frame)] = frame
        self.done += 1
        self.words[HEAD] = self.done

    def _frame(self, at: int) -> Frame:
        head = bytes(self._bytes[at : at + HEADER_BYTES])
        opcode, flags, status, request_id, size = parse_header(head)
        if size > SLOT_BYTES - HEADER_BYTES:
            raise RemoteProtocolError(f"a frame of {size} bytes does not fit a ring slot")
        start = at + HEADER_BYTES
        return Frame(opcode, flags, status, request_id, bytes(self._bytes[start : start + size]))

    def close(self) -> None:
        """Unmap. Twice is harmless."""
        with contextlib.suppress(BufferError, ValueError):
            self.words.release()
            self._bytes.release()
            self._map.close()

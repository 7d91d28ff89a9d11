"""The commit ring: request and answer frames through shared memory instead of a socket.

A session may have one ring: a sealed memfd that the client makes and passes to the worker. It carries the same frames
as the socket, a few at a time. The socket stays for everything else.

    header page, 64-bit words, each writer on cache lines of its own
      0   tail       requests posted so far           client
      8   head       answers posted so far            worker
     16   sleeping   1: the worker does not poll      worker
     24   announced  a commit is expected until then: CLOCK_MONOTONIC in ns, or 0      client
     32   brief      1: nothing follows soon; do not poll for it                       client
     64   counts     what the client has counted, COUNT_WORDS of them: see ``counts.py``   client
    SLOTS request slots, then SLOTS answer slots, SLOT_BYTES each: a frame from the slot's start

Request n lies in slot n mod SLOTS, and its answer in the same answer slot. A client posts at most SLOTS requests ahead
of the answers that it has read, so nothing is overwritten unread.

**Lost wake-ups.** The worker polls active rings (``server/ring_poller.py`` decides how long). Then it raises
``sleeping``, looks once more, and waits in its selector. A client that sees the flag sends KICK, the doorbell, by
socket. There is no fence between the worker's store and its second look. So x86 may let both sides miss each other, and
no KICK is sent. Therefore a client that has polled for about as long as the worker sends KICK anyway. A lost wake-up
costs microseconds, never a hang.

**Announcements.** A client that puts values of some MiB posts every few hundred microseconds, about as long as the
worker polls. If the worker stops just before, the commit waits for a wake-up. So the client stores the time at which
its copy will be done, without a system call, and a worker that still polls goes on until then. It believes at most
ANNOUNCED_MAX_NS, so nonsense or a dead client costs it no more.

**Brief visits.** A batch for several workers has a frame or two for each, and waits for none of them before the last
has its own. Its next frame comes after the visits to all others, so a worker that polled for it would burn more than a
wake-up costs, times the number of workers. The client sets ``brief`` for the time of the batch. The worker then serves
what a KICK has announced and sleeps again.

**What was given up.** A caller whose deadline passes hears that its put has failed. It may put a newer value by another
way, or let somebody do it, and the worker must not carry out the older one after that. So a client *abandons* its ring
before it tells its caller: it moves the tail to ABANDONED, behind all numbers. The worker reads the tail before each
request, and closes the session then. As it carries out one request at a time, what it has begun ends before the newer
one begins. The closed socket says the same, but may be looked at after the newer value has come by another ring.

**One request that was given up.** A stream or an endpoint has one session for all its clients, which must not end for
one of them. It *withdraws* the request: it sets the status in the header, which is 0 in any other request. The worker
answers without carrying it out, and gives the grants of a COMMIT back. A session that sends by its socket cannot change
what it has sent. So it shares a page with the worker, :class:`Withdrawals`, that has the ids of such requests until
they are answered. The worker looks there before each mutation of that session. In both cases the worker may just have
begun the request: then it ends before anything that comes later.

**Trust.** The client can write anything at any time, also while the worker reads. The worker checks the tail against
the slots, and reads each byte of a frame once before it looks at any. It demands the seals that keep the memfd from
being shrunk, which would be a SIGBUS.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Final, Protocol, TypeVar

from ..arena.sessions import PREPARED_ANSWER_MAX
from ..constants import COUNT_WORDS, PAGE_BYTES
from ..errors import PeerError, RemoteProtocolError, TransportError
from ..host.pages import keep_from_forks
from ..net.channel import Channel
from ..rpc import HEADER_BYTES, STATUS_AT, Frame, parse_header
from ..wire import messages as M
from ..wire.epoch_messages import ForNamespace
from ..wire.group_messages import Group
from ..wire.keep_messages import Keep
from ..wire.messages import Status
from ..wire.one_key import (
    CommitOne,
    CommittedOne,
    LocatedOne,
    parse_commit_one,
    parse_committed_one,
    parse_located_one,
)
from ..wire.trace_messages import Timed, answer_in

log = logging.getLogger("simm.ipc.commit_ring")

SLOTS: Final = 4
SLOT_BYTES: Final = 32 << 10
RING_BYTES: Final = PAGE_BYTES + 2 * SLOTS * SLOT_BYTES
TAIL: Final = 0
HEAD: Final = 8
SLEEPING: Final = 16
ANNOUNCED: Final = 24
BRIEF: Final = 32
COUNTS: Final = 64
#: The tail of a client that has given up what it has asked for.
ABANDONED: Final = 1 << 62
#: The worker does not believe an announcement of more than this.
ANNOUNCED_MAX_NS: Final = 4_000_000
#: Copies of at least this size are announced to a worker that polls. Shorter ones end before it would stop.
ANNOUNCE_BYTES: Final = 256 << 10
#: An announced commit is expected within this many ns, and half a one for each byte still to be copied (2 GB/s).
_ANNOUNCE_NS: Final = 100_000
_REQUESTS: Final = PAGE_BYTES
_REPLIES: Final = PAGE_BYTES + SLOTS * SLOT_BYTES
_VOID: Final = bytes(HEADER_BYTES)
assert (COUNTS + COUNT_WORDS) * 8 <= PAGE_BYTES
#: Grants that are asked for by ring: an answer there has room for these, and for those that were prepared before.
RING_GRANTS: Final = 1024
assert (RING_GRANTS + PREPARED_ANSWER_MAX) * 20 + 2 * HEADER_BYTES < SLOT_BYTES
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

#: By request: its answer, and the fields of both that have an item for each key.
ANSWERS: Final[dict[type, tuple[type | None, str, str]]] = {
    M.Grant: (M.Granted, "", ""),
    M.ReturnGrants: (M.Done, "", ""),
    M.Unpin: (M.Done, "", ""),
    M.ReleaseSessions: (M.Done, "", ""),
    M.Locate: (M.Located, "digests", "entries"),
    M.Exists: (M.Statuses, "digests", "statuses"),
    M.Delete: (M.Statuses, "digests", "statuses"),
    M.DeleteSized: (M.Statuses, "entries", "statuses"),
    Keep: (M.Statuses, "digests", "statuses"),
    Group: (M.Statuses, "counts", "statuses"),
    ForNamespace: (M.Statuses, "", ""),
}


def brought_by(answer: Any) -> tuple[Sequence[tuple[int, int, int]], list[int]]:
    """Return the grants and the ids of the pins that an answer brings. Raises RemoteProtocolError."""
    answer = answer_in(answer) if type(answer) is Timed else answer
    grants = answer.grants if type(answer) in (M.Granted, M.Committed) else ()
    pins = [entry[5] for entry in answer.entries if entry[5]] if type(answer) is M.Located else []
    return grants, pins


class Asker(Protocol):
    """What giving up a request needs of a session."""

    @property
    def frames(self) -> dict[int, Frame]: ...
    @property
    def ring(self) -> Ring | None: ...
    def disown(self, ticket: int) -> None: ...
    def give_up(self, why: str) -> None: ...


def let_go(session: Asker, ticket: int) -> bool:
    """Disown a request that the worker has answered. Return False where that is not known."""
    ring = session.ring
    if ticket not in session.frames and (ticket < 0 or ring is None or not ticket < ring.words[HEAD]):
        return False
    session.disown(ticket)
    return True


def let_go_after(session: Asker, ticket: int | None, exc: BaseException) -> None:
    """Disown or give up a request that was sent, if its caller is interrupted: ``exc`` is no error of the peer."""
    if ticket is not None and not isinstance(exc, PeerError) and not let_go(session, ticket):
        session.give_up(str(exc) or "interrupted")


#: A ring, or a page of withdrawals.
Made = TypeVar("Made", bound="_Shared")


class _Shared:
    """One end's mapping of a sealed memfd of ``BYTES`` bytes, that the client makes and the worker maps."""

    __slots__ = ("_bytes", "_map", "words")

    BYTES: ClassVar[int]

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, self.BYTES)
        self._bytes = memoryview(self._map)
        #: The first page.
        self.words = self._bytes[:PAGE_BYTES].cast("Q")

    @classmethod
    def create(cls: type[Made]) -> tuple[Made, int]:
        """Make one, and return it with the descriptor to pass on; the client closes that afterwards."""
        fd = os.memfd_create("simm-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, cls.BYTES)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            made = cls(fd)
            number = keep_from_forks(made._map)
            if number:
                raise OSError(number, os.strerror(number))
        except BaseException:
            os.close(fd)
            raise
        return made, fd

    @classmethod
    def offer(cls: type[Made], pass_on: Callable[[int], object]) -> Made:
        """Make one, and let ``pass_on`` give its descriptor to the worker. Raises OSError, and what that raises."""
        made, fd = cls.create()
        try:
            pass_on(fd)
        except BaseException:
            made.close()
            raise
        finally:
            os.close(fd)
        return made

    @classmethod
    def attach(cls: type[Made], fd: int) -> Made:
        """Map a client's. Raises RemoteProtocolError if it is not sealed, or of another size, or read-only."""
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError as exc:
            raise RemoteProtocolError(f"the ring is no memfd: {exc}") from exc
        if seals & _SEALS != _SEALS:
            raise RemoteProtocolError("the ring is not sealed against shrinking")
        if os.fstat(fd).st_size != cls.BYTES:
            raise RemoteProtocolError(f"the ring has {os.fstat(fd).st_size} bytes, not {cls.BYTES}")
        try:
            return cls(fd)
        except PermissionError as exc:
            raise RemoteProtocolError(f"the ring cannot be written: {exc.strerror}") from exc

    def close(self) -> None:
        """Unmap it. Idempotent."""
        with contextlib.suppress(BufferError, ValueError):
            self.words.release()
            self._bytes.release()
            self._map.close()


def offered(kind: type[Made], channel: Channel, path: str) -> Made | None:
    """Make one, and pass it to the worker; None if the system has no descriptor or memory left. Raises PeerError."""
    try:
        return kind.offer(lambda fd: channel.call(M.RingAttach(kind.BYTES), fds=(fd,)))
    except OSError as exc:  # the socket does the same, more slowly
        log.warning("no memory that is shared with %s: %s", path, exc)
        return None


class Withdrawals(_Shared):
    """The ids of requests that were sent by socket and withdrawn: their number in word 0, 0 or an id in the others.

    The client writes, the worker reads. Only what is of this session can be named here, so the worker believes it.
    """

    __slots__ = ()

    BYTES = PAGE_BYTES

    def add(self, number: int) -> bool:
        """Withdraw a request, if the worker has not begun it. Return False if there is no room. O(words)."""
        words = self.words
        if words[0] >= len(words) - 1:
            return False
        words[words.tolist().index(0, 1)] = number
        words[0] += 1  # last: the worker looks no further while this is 0
        return True

    def remove(self, number: int) -> None:
        """Free the place of a request that has been answered; do nothing if it was not withdrawn."""
        words = self.words
        if words[0] and number in (ids := words.tolist()[1:]):
            words[1 + ids.index(number)] = 0
            words[0] -= 1

    def has(self, number: int) -> bool:
        """Return whether a request has been withdrawn."""
        words = self.words
        return bool(words[0]) and number in words.tolist()[1:]


class Ring(_Shared):
    """One end's mapping of a ring."""

    __slots__ = ("done",)

    BYTES = RING_BYTES

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        #: Worker: requests handled. Client: answers read.
        self.done = 0

    @property
    def counts(self) -> memoryview:
        """Return the words in which the client counts."""
        return self.words[COUNTS : COUNTS + COUNT_WORDS]

    @property
    def is_full(self) -> bool:
        """Client: return whether it cannot post before the worker has answered."""
        return bool(self.words[TAIL] - self.words[HEAD] >= SLOTS)

    # -- client -----------------------------------------------------------------------------

    def post(self, frame: bytes) -> int:
        """Post a request and return its number. The caller stays within SLOTS of the answers that it has read.

        Raises TransportError if the ring was abandoned.
        """
        words = self.words
        number: int = words[TAIL]
        if number >= ABANDONED:
            raise TransportError("the session was given up")
        at = _REQUESTS + number % SLOTS * SLOT_BYTES
        self._bytes[at : at + len(frame)] = frame
        words[TAIL] = number + 1
        return number

    def abandon(self) -> None:
        """Let the worker carry out nothing more of what was posted. The session is of no use from now on.

        A thread that is posting just then may set the tail once more. So the requests that lie there are made void too:
        what it posts is its own caller's, who is not told before this is done again.
        """
        self.words[TAIL] = ABANDONED
        for at in range(_REQUESTS, _REPLIES, SLOT_BYTES):
            self._bytes[at : at + HEADER_BYTES] = _VOID

    def withdraw(self, number: int) -> None:
        """Let the worker answer a posted request without carrying it out, if it has not begun."""
        self._bytes[_REQUESTS + number % SLOTS * SLOT_BYTES + STATUS_AT] = Status.UNAVAILABLE  # a byte: never torn

    def announce(self, nbytes: int) -> None:
        """Let a polling worker go on polling: a commit follows the copy of ``nbytes`` bytes. No system call."""
        self.words[ANNOUNCED] = time.monotonic_ns() + min(_ANNOUNCE_NS + (nbytes >> 1), ANNOUNCED_MAX_NS - 1)

    def clear_announcement(self) -> None:
        """Take :meth:`announce` back: the commit has been sent."""
        self.words[ANNOUNCED] = 0

    @contextlib.contextmanager
    def brief(self) -> Iterator[None]:
        """Let the worker not poll for this ring inside the block."""
        words = self.words
        words[BRIEF] = 1
        try:
            yield
        finally:
            words[BRIEF] = 0

    def reply(self, number: int) -> Frame:
        """Return the answer to request ``number``, which HEAD says is there. Raises RemoteProtocolError."""
        return self._frame(_REPLIES + number % SLOTS * SLOT_BYTES)

    def committed_one(self, number: int) -> CommittedOne | None:
        """Return :meth:`reply` as ``parse_committed_one`` parses it, None if it has another shape."""
        return parse_committed_one(self._bytes, _REPLIES + number % SLOTS * SLOT_BYTES)

    def located_one(self, number: int) -> LocatedOne | None:
        """Return :meth:`reply` as ``parse_located_one`` parses it, None if it has another shape."""
        return parse_located_one(self._bytes, _REPLIES + number % SLOTS * SLOT_BYTES)

    # -- worker -----------------------------------------------------------------------------

    @property
    def abandoned(self) -> bool:
        """Return whether the client has given up what it has asked for."""
        return bool(self.words[TAIL] == ABANDONED)

    def next_commit(self) -> CommitOne | None:
        """Return the next request as ``parse_commit_one`` parses it, None if it has another shape."""
        at = _REQUESTS + self.done % SLOTS * SLOT_BYTES
        if not 0 < self.words[TAIL] - self.done <= SLOTS:
            return None  # nothing there, or nonsense: next_request says which
        return parse_commit_one(self._bytes, at)

    def next_request(self) -> Frame | None:
        """Return the next request, copied out; None if there is none, or none any more. Raises RemoteProtocolError."""
        tail = self.words[TAIL]
        if tail == self.done or tail == ABANDONED:
            return None
        if not 0 < tail - self.done <= SLOTS:
            raise RemoteProtocolError(f"ring tail {tail} with {self.done} handled")
        return self._frame(_REQUESTS + self.done % SLOTS * SLOT_BYTES)

    def answer(self, frame: bytes) -> None:
        """Post the answer to the request taken last. Raises RemoteProtocolError if it is too long."""
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

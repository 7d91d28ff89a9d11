"""A session with a worker on the same host: its connection, its exchanges, and the way it ends.

The session must never let a copy write into a chunk that is no longer its own. Grants are the pool's matter
(``ipc/grant_pool.py``). The end of a session is argued here:

* A session that ends is *retired*, not forgotten. Copies into its chunks may still run in other threads, and views of
  its pins may be alive. ``copying`` has an item for each. When it is empty, a later session of this process with the
  same arena tells the worker to release the retired one.
* A thread that has taken a grant and not begun its copy would be overlooked by that. So ``begin_copy`` adds its item
  before it reads ``closed``, and ``close`` sets ``closed`` before anything reads ``copying``: one of the two sees the
  other.

``lock`` is the only lock here. A thread holds it for one exchange with the worker, never during a copy of a value. No
signal leaves it taken (``net/allowance.py``).
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Sequence
from typing import Any, Final

from ..arena.reader import ArenaReader
from ..errors import DeadlineError, NotSentError, PeerError, RemoteProtocolError, TransportError
from ..host.numa import current_cpu
from ..host.users import NOT_TRUSTED, trusts
from ..net.allowance import ALLOWANCE, allowed, tries_of, tries_within
from ..net.channel import Channel, Refused, weakly
from ..net.peer_uid import credentials
from ..rpc import Frame, encode
from ..wire import messages as M
from ..wire.hello import client_hello
from ..wire.one_key import LocatedOne, committed_one_of, encode_commit_one
from . import commit_ring, grant_pool, pins
from .arena_files import passed_data
from .commit_ring import ANNOUNCE_BYTES, ANSWERS, HEAD, RING_GRANTS, SLEEPING, SLOT_BYTES, SLOTS, TAIL, Ring
from .grant_pool import GrantPool, GrantTuple
from .pins import RETIRED, RetiredSession

#: Polls of the ring before the client sends KICK and sleeps, about 100 us. Two wake-ups of a core cost more.
_RING_POLLS: Final = 3000 if len(os.sched_getaffinity(0)) > 1 else 0
#: Polls of the socket before the client sleeps, about as long.
_SOCKET_POLLS: Final = 150 if _RING_POLLS else 0
#: Two doorbells within this time, seconds, are a sign that client and worker take turns on one CPU.
DOORBELLS_APART_S: Final = 1e-3


class NotTrusted(TransportError):
    """The worker is of another user. It could end this process by truncating the arena that this one maps."""


class WorkerSession:
    """A session with the worker whose UNIX socket is ``path``. Each exchange takes ``deadline_s`` seconds at most.

    ``ring``: also make a commit ring, if the system allows it. ``cluster``: of the map that named the worker; 0 accepts
    any. ``trusted``: users besides this process's own and root whose worker is spoken with. Raises TransportError if
    the worker cannot be reached, NotTrusted if it is another user's, Refused if it refuses, SegmentError.
    """

    def __init__(
        self, path: str, namespace: str, deadline_s: float, *, ring: bool = True, role: int = M.Role.CLIENT,
        cluster: int = 0, trusted: Container[int] = (),
    ) -> None:  # fmt: skip
        self.path, self.deadline_s = path, deadline_s
        self.lock = threading.Lock()
        self.tries = tries_of(self.lock)
        #: An item for each copy in flight into or out of this session's chunks, and for each view of one. A list:
        #: append and pop are atomic, safe in finalizers, and cheaper than a lock.
        self.copying: list[None] = []
        #: No copy may begin. Separate from ``broken``: a broken session is closed by its owner, later.
        #: And: :meth:`close` is under way, or has ended; it has ended.
        self.closed = self._ending = self._over = False
        self.pool: GrantPool[GrantTuple] = GrantPool()
        self.unpins: deque[int] = deque()
        self.ring: Ring | None = None
        #: Without a ring, where requests that were sent can be withdrawn; None where they cannot.
        self.withdrawals: commit_ring.Withdrawals | None = None
        self._look: Callable[[], object] | None = None
        #: Answers that were taken in, by ticket, until what they bring is in its place. Only its waiter takes one out.
        self.frames: dict[int, Frame] = {}
        #: Tickets of answers that nobody waits for any more.
        self.forsaken: set[int] = set()
        #: A WAKE is in flight: polling the ring is worth it although the worker's flag may still be up.
        self._woken = False
        #: Id of a KICK whose answer has not been waited for, and the tail that it named; 0 for none.
        self._kicked = self._kicked_tail = 0
        self._polls_socket = False
        #: When the worker had to be woken last, and how often.
        self._doorbell_at, self.doorbells = 0.0, 0
        until = time.monotonic() + deadline_s
        self.channel = Channel.unix(path, deadline_s, weakly(self._on_push))
        self.channel.on_late = weakly(self._on_late)
        self.channel.bound(until)  # one deadline for connecting, HELLO and the ring
        try:
            uid = credentials(self.channel.sock)[1]
            if not trusts(uid, trusted):
                raise NotTrusted(f"{path} is of uid {uid}, {NOT_TRUSTED}")
            welcome = self.channel.call(client_hello(role, namespace=namespace, cluster=cluster, pid=os.getpid()))
            if not isinstance(welcome, M.Welcome):
                raise TransportError(f"{path} answered HELLO with {type(welcome).__name__}")
            self.welcome, self.session = welcome, welcome.session
            self.pool.bytes_max = welcome.grant_bytes_max
            with passed_data(self.channel, path) as data_fd:
                self.reader = ArenaReader(welcome.segment, cluster=cluster, data_fd=data_fd, trusted=trusted)
            self.counts, self.reader.namespace = self.reader.counts, welcome.namespace_id
            self.pool.within, self.pool.fail = (self.reader.data_offset, self.reader.data_end), self.channel.fail
            self.release_retired()
            if ring and (made := commit_ring.offered(Ring, self.channel, path)) is not None:
                self.ring, self.counts = made, made.counts
                self.reader.count_in(self.counts)
            self._polls_socket = self.ring is None and role == M.Role.CLIENT
            self.channel.bound()
        except BaseException:
            self.channel.close()
            raise

    def __repr__(self) -> str:
        return f"<WorkerSession {self.session:#x} {self.channel.broken or 'open'} {self.pool!r}>"

    @property
    def broken(self) -> str:
        """Why the session cannot be used; empty while it can."""
        return self.channel.broken

    def _on_push(self, msg: Any) -> None:
        if isinstance(msg, M.Recall):
            self.pool.recall(msg.bytes)

    # -- a worker that answers late --------------------------------------------------------------

    def outlive_silence(self, look: Callable[[], object]) -> None:
        """Let later answers be late: a deadline that passes then ends the wait, and not the session. Not with a ring.

        ``look``: a method that each wait calls every few ms. The worker carries out what it is late with, so who gives
        up a mutation must withdraw it, or end the session (:meth:`give_up`). Raises TransportError.
        """
        self._look = weakly(look)
        self.channel.outlives = True
        self.withdrawals = commit_ring.offered(commit_ring.Withdrawals, self.channel, self.path)

    def disown(self, ticket: int) -> None:
        """Say that nobody waits for an answer that has not been taken. What it brings is not lost. Needs no lock."""
        if ticket < 0 and ticket not in self.frames:
            self.channel.disown(-1 - ticket)
            return
        self.forsaken.add(ticket)
        self._hand_over(ticket)
        if (ring := self.ring) is None or ticket < ring.done:  # close() takes it away
            self.forsaken.discard(ticket)

    def _hand_over(self, ticket: int) -> None:
        """Take in what an answer brings that nobody waits for, once."""
        (frame,) = map(self.frames.pop, (ticket,), (None,))  # no call before the try: an interrupt would lose it
        if frame is not None:
            try:
                self._on_late(frame)
            except BaseException:
                self.frames[ticket] = frame
                raise
            self.forsaken -= {ticket}

    def _on_late(self, frame: Frame) -> None:
        if self.withdrawals is not None:
            self.withdrawals.remove(frame.request_id)
        try:
            if frame.opcode != M.OP_ERROR:
                grants, found = commit_ring.brought_by(self.channel.result(frame))
                self.unpins.extend(found)  # twice is harmless
                self.pool.add(grants)
        except PeerError as exc:  # its next user hears of it
            self.give_up(str(exc))

    def give_up(self, why: str) -> None:
        """Break the session, whose owner closes it then. The worker carries out nothing more of what it has of it.

        Needs no lock: another thread that waits for the worker hears of it at once.
        """
        channel, ring = self.channel, self.ring
        channel.broken = channel.broken or why
        if ring is not None:
            ring.abandon()
        with contextlib.suppress(OSError):
            channel.sock.shutdown(socket.SHUT_RDWR)

    def read_by(self, reader: ArenaReader) -> None:
        """Read by one that maps the same files, and unmap this session's. Call it before the session is used."""
        reader.count_in(self.counts)
        reader.namespace = self.reader.namespace
        self.reader = reader

    # -- exchanges; with ``_locked`` in the name the caller holds the lock --------------------

    def acquire(self, late: type[DeadlineError] = NotSentError) -> None:
        """Take the lock within the deadline. Raises TransportError; ``late`` if the call has no time left."""
        if ALLOWANCE.seconds <= 0.0:
            raise late("the call's deadline has passed")
        for got in self.tries:  # noqa: B007 -- see net/allowance.py
            break
        if not got:
            self.wait_for_lock(late)
        if self.channel.broken:  # no call may come between the lock and the ``try`` of whoever releases it
            self.lock.release()
            raise TransportError(self.channel.broken)

    def wait_for_lock(self, late: type[DeadlineError] = NotSentError) -> None:
        """Take the lock, which was not free, within the deadline. Raises ``late``."""
        (got,) = tries_within(self.lock, allowed(self.deadline_s))
        if not got:
            raise late("deadline passed while another thread waited for the worker")

    def exchange(self, msg: Any, items: int = 1) -> Any:
        """Make one exchange about ``items`` keys, and return the answer, checked. Raises TransportError, Refused."""
        self.acquire()
        ticket: int | None = None
        try:
            ticket = self.submit_locked(msg)
            answer = self.wait_locked(ticket, items)
            ticket = None  # it is answered
            return self.checked_locked(msg, answer)
        except BaseException as exc:
            commit_ring.let_go_after(self, ticket, exc)
            raise
        finally:
            self.lock.release()

    def answer(self, msg: Any, ticket: int, items: int = 1) -> Any:
        """Wait for the answer to ``msg``, which :meth:`submit` has sent; see :meth:`exchange`."""
        self.acquire(DeadlineError)
        try:
            return self.checked_locked(msg, self.wait_locked(ticket, items))
        finally:
            self.lock.release()

    def checked_locked(self, msg: Any, answer: Any) -> Any:
        """Return the answer to ``msg``. Break the session if it is none, or not for as many keys as were asked for."""
        kind, asked, told = ANSWERS.get(type(msg), (None, "", ""))
        if kind is not None and (
            type(answer) is not kind or (asked and len(getattr(msg, asked)) != len(getattr(answer, told)))
        ):
            self.channel.fail(f"the worker answered {type(msg).__name__} with something else")
        return answer

    def submit(self, msg: Any, in_flight: Any = (), about: Any = None) -> int:
        """Send a request and return its ticket; a list ``in_flight`` gets that and ``about``. Raises TransportError."""
        self.acquire()
        try:
            in_flight += ((ticket := self.submit_locked(msg), about),)  # at once: an interrupt finds it there
            return ticket
        finally:
            self.lock.release()

    def submit_locked(self, msg: Any) -> int:
        """Send a request by ring or socket, and return a ticket for :meth:`wait_locked`."""
        ring, many = self.ring, type(msg) is M.Grant and sum(count for _, count in msg.wants) > RING_GRANTS
        if ring is not None and not many and len(frame := encode(msg)) <= SLOT_BYTES:
            while ring.words[TAIL] - ring.done >= SLOTS:
                self._collect(ring)
            return ring.post(frame)
        return -1 - self.channel.submit(msg)

    def announce_commit(self, nbytes: int) -> None:
        """Tell a polling worker to go on polling: a commit follows the copy of ``nbytes`` bytes. No system call."""
        if (ring := self.ring) is not None and nbytes >= ANNOUNCE_BYTES:
            ring.announce(nbytes)

    def clear_announcement(self) -> None:
        """Take :meth:`announce_commit` back: the commit has been sent."""
        if (ring := self.ring) is not None:
            ring.clear_announcement()

    def wake(self, nbytes: int = 0) -> None:
        """Announce a commit, and wake the worker with WAKE if it sleeps.

        Waking a core takes about as long as copying a MiB. Never waits: with the lock another thread talks to it.
        """
        self.announce_commit(nbytes)
        if (ring := self.ring) is None or not ring.words[SLEEPING]:
            return
        for got in self.tries:  # noqa: B007 -- see net/allowance.py
            break
        try:
            if got and not self.channel.broken:
                self.channel.submit(M.Wake(current_cpu()))
                self._woken = True
        except TransportError:
            pass  # the commit will meet it
        finally:
            if got:
                self.lock.release()

    def brief(self) -> contextlib.AbstractContextManager[None]:
        """Let the worker not poll for this session inside the block, as its batch is one for several workers."""
        return contextlib.nullcontext() if (ring := self.ring) is None else ring.brief()

    def kick(self, *, always: bool = False) -> bool:
        """Let a worker that sleeps, or with ``always`` any, serve the ring. Does not wait.

        The next wait for the ring takes the answer. Return False if another thread talks to the worker just now.
        """
        if (ring := self.ring) is None or not (always or ring.words[SLEEPING]):
            return True
        for got in self.tries:  # noqa: B007 -- see net/allowance.py
            break
        if not got:
            return False
        try:
            if self._kicked and ring.words[HEAD] >= self._kicked_tail:
                self._drop_kick()
            if not self._kicked and not self.channel.broken:  # else it serves what has been posted since, too
                self._kicked_tail = ring.words[TAIL]
                self._kicked = self.channel.submit(M.Kick(self._kicked_tail))
        except TransportError:
            pass  # the wait for the answer meets it
        finally:
            self.lock.release()
        return True

    def _drop_kick(self) -> None:
        """Do not wait for the answer to that KICK: the ring has been served. The worker may be stopped since."""
        number, self._kicked = self._kicked, 0
        self.channel.disown(number)

    def _take_kick(self) -> None:
        """Wait for the answer to the KICK that was sent without a wait. The lock is held."""
        number, self._kicked = self._kicked, 0
        self.channel.until = max(self.channel.until, time.monotonic() + allowed(self.deadline_s))  # an earlier wait's
        self.channel.result(self.channel.wait(number))

    def has_answer(self, ticket: int) -> bool:
        """Return whether a wait for this answer ends at once: it has come, or the session is broken."""
        if self.channel.broken:
            return True
        if ticket < 0:
            return self.channel.has_input(-1 - ticket)
        return (ring := self.ring) is None or ring.words[HEAD] > ticket

    def wait_locked(self, ticket: int, items: int = 1) -> Any:
        """Wait for the answer to a request of ``items`` keys. More keys mean more polls before the doorbell."""
        self.frame_locked(ticket, items)
        return self.result(ticket)

    def frame_locked(self, ticket: int, items: int = 1) -> Frame:
        """Wait for an answer, and return it as it has come: it stays in ``frames``."""
        if ticket < 0 and ticket not in self.frames:
            self.frames[ticket] = self._wait_socket(-1 - ticket, items)
        ring: Any = self.ring
        while ticket >= 0 and ticket >= ring.done:
            self._collect(ring, _RING_POLLS + min(items, 64) * _RING_POLLS // 8)
        if ticket not in self.frames:
            raise TransportError("the answer was taken before")
        return self.frames[ticket]

    def result(self, ticket: int) -> Any:
        """Take an answer out of ``frames`` and return it. Its grants are in the pool. Raises TransportError, Refused.

        An interrupt finds all of that done, or nothing. Then its waiter takes it again, or disowns it.
        """
        try:
            answer = self.channel.result(self.frames[ticket])
            place, grants = self.pool.placed(commit_ring.brought_by(answer)[0])
        except Refused:
            del self.frames[ticket]
            raise
        except PeerError as exc:
            del self.frames[ticket]
            self.channel.fail(str(exc))
        del self.frames[ticket]
        place += grants  # with no call since the line before
        return answer

    def _await(self, ring: Ring, polls: int = _RING_POLLS) -> int:
        """Wait for at least one more answer, and return the ring's head, checked. Failing gives up what is posted."""
        try:
            return self._awaited(ring, polls)
        except BaseException as exc:
            self.give_up(str(exc) or "interrupted")
            raise

    def _awaited(self, ring: Ring, polls: int) -> int:
        words, done = ring.words, ring.done
        if self._kicked:
            (self._take_kick if words[HEAD] == done else self._drop_kick)()
        if words[HEAD] == done and (self._woken or not words[SLEEPING]):
            self._woken = False
            for _ in range(polls):
                if words[HEAD] != done:
                    break
        head: int = words[HEAD]
        if head == done:
            self._count_doorbell()
            self.channel.call(M.Kick(words[TAIL]))
            if (head := words[HEAD]) == done:
                self.channel.fail("the worker answered a KICK but not the ring")
        if not done < head <= words[TAIL]:
            self.channel.fail(f"the worker moved the ring's head to {head}, {done} handled of {words[TAIL]}")
        return head

    def _count_doorbell(self) -> None:
        """Note that the worker had to be woken.

        In quick succession: worker and client share a CPU, and each polls while the other cannot run. A WAKE names this
        CPU, and the worker moves to another one.
        """
        self.doorbells += 1
        now = time.monotonic()
        if now - self._doorbell_at < DOORBELLS_APART_S:
            with contextlib.suppress(NotSentError):  # the answer that has come must not be lost with it
                self.channel.submit(M.Wake(current_cpu()))
        self._doorbell_at = now

    def _wait_socket(self, number: int, items: int = 1) -> Frame:
        """Wait for the answer to a request sent by socket."""
        channel, slept = self.channel, self.channel.slept
        polls = _SOCKET_POLLS + min(items, 64) * _SOCKET_POLLS // 8 if self._polls_socket else 0
        try:
            frame = channel.wait(number, polls, self._look)
        except BaseException as exc:
            if channel.broken or not channel.outlives:  # else it is only late
                self.give_up(str(exc) or "interrupted")
            raise
        if channel.slept != slept:
            self._count_doorbell()
        return frame

    def _collect(self, ring: Ring, polls: int = _RING_POLLS) -> None:
        """Wait for at least one more answer, and take all that are there."""
        head = self._await(ring, polls)
        try:
            while ring.done < head:
                ticket = ring.done
                self.frames[ticket] = ring.reply(ticket)  # before the look, as disown() is called without the lock
                if ticket in self.forsaken:
                    self._hand_over(ticket)
                ring.done = ticket + 1
        except RemoteProtocolError as exc:
            self.give_up(str(exc))
            raise TransportError(str(exc)) from exc

    def commit_one(self, digest: bytes, grant: int, length: int, crc: int, flags: int, want: int, count: int) -> int:
        """Commit one entry, and ask for ``count`` grants for values of ``want`` bytes. Return its Status.

        The grants of the answer go to the pool. Raises TransportError; NotSentError breaks nothing.
        """
        for got in self.tries:  # noqa: B007 -- see net/allowance.py
            break
        if not got:
            self.wait_for_lock()
        ticket: int | None = None
        try:
            channel = self.channel
            if channel.broken:
                raise TransportError(channel.broken)
            ring = self.ring
            if ring is None:
                number = channel.next_id()
                channel.send_raw(encode_commit_one(digest, grant, length, crc, flags, want, count, number))
                ticket = -1 - number
                answered = committed_one_of(self.frame_locked(ticket))
            else:
                while ring.words[TAIL] - ring.done >= SLOTS:
                    self._collect(ring)
                ticket = ring.post(encode_commit_one(digest, grant, length, crc, flags, want, count))
                answered = None
                if ticket == ring.done:  # nothing else is in flight
                    self._await(ring)
                    answered = ring.committed_one(ticket)
            if answered is None:
                answer = self.wait_locked(ticket)
                ticket = None  # it is answered
                if not isinstance(answer, M.Committed) or len(answer.statuses) != 1:
                    channel.fail("the worker answered COMMIT with something else")
                return int(answer.statuses[0])
            status, granted = answered
            if granted is not None:
                place, grants = self.pool.placed((granted,))
            if ring is None:
                del self.frames[ticket]
            else:
                ring.done = ticket + 1
            if granted is not None:
                place += grants  # with no call since the answer was taken
            return status
        except BaseException as exc:
            commit_ring.let_go_after(self, ticket, exc)
            raise
        finally:
            self.lock.release()

    def take_pushes(self) -> None:
        """Take in what has come by socket, unless another thread talks to the worker. Raises TransportError."""
        for got in self.tries:  # noqa: B007 -- see net/allowance.py
            break
        try:
            if got:
                self.channel.poll_pushes()
        finally:
            if got:
                self.lock.release()

    # -- grants ---------------------------------------------------------------------------------

    def ask(self, wants: Sequence[tuple[int, int]]) -> None:
        """Ask for grants, (value bytes, count) each. What comes is in the pool; without room nothing comes."""
        self.exchange(M.Grant(list(wants)), sum(count for _, count in wants))

    def return_grants(self, numbers: Sequence[int]) -> None:
        """Return grants by id, as many as a message has room for; see :func:`grant_pool.return_idle`."""
        self.exchange(M.ReturnGrants(list(numbers)))

    # -- copies and pins --------------------------------------------------------------------------

    def begin_copy(self) -> None:
        """Count a copy into or out of a chunk. Raises TransportError if the session has been closed."""
        self.copying += (None,)  # no call, so no interrupt comes between this and the caller's try
        if self.closed:
            self.copying.pop()
            raise TransportError("the session was closed")

    def end_copy(self) -> None:
        """Count a copy as ended."""
        self.copying.pop()

    def pin_one(self, digest: bytes) -> LocatedOne:
        """Do :meth:`pin_many` for one value. The same wait is for the release of others."""
        return self.pin_many([digest])[0] if self.ring is None else pins.pin_one(self, digest)

    def pin_many(self, digests: Sequence[bytes], how: int = 0) -> list[LocatedOne]:
        """Do :func:`.pins.pin_many`. The caller has called :meth:`begin_copy`."""
        return pins.pin_many(self, digests, how)

    def unpin_later(self, pin: int) -> None:
        """Release a pin soon. Safe in finalizers: takes no lock and does no I/O."""
        self.unpins.append(pin)

    def flush_unpins(self) -> None:
        """Release all pins that are queued now. Raises TransportError."""
        pins.release(self, self.unpins)

    # -- maintenance and end -------------------------------------------------------------------------

    def maintain(self) -> int:
        """Read pushes, answer recalls, release pins and retired sessions. Call it periodically, from one thread.

        Return the bytes recalled since the last call. Raises TransportError.
        """
        self.take_pushes()
        recalled = grant_pool.maintain(self)
        self.flush_unpins()
        self.release_retired()
        return recalled

    def release_retired(self) -> None:
        """Release this process's retired sessions with this arena; see ``pins.py``. Raises TransportError."""
        pins.release_retired(self, self.welcome.segment)

    def close(self, *, clean: bool = True) -> bool:
        """End the session; with ``clean``, return grants and release pins first. Never raises. Twice is harmless.

        Return False if another thread is at it, which may be interrupted."""
        mine = got = False
        try:
            if self._ending:
                return self._over
            mine = self._ending = True
            clean, self.closed = clean and not self.closed, True  # once: what was interrupted had begun with that
            try:  # also when interrupted: its grants would be lost to all until this process ends
                if clean and not self.channel.broken:
                    with contextlib.suppress(TransportError):
                        self.flush_unpins()
                        grant_pool.return_idle(self)
                        grant_pool.return_unsent(self)
                        self.release_retired()
            finally:
                try:
                    if (ring := self.ring) is not None:
                        ring.abandon()  # what other threads have posted fails, and must not be carried out later
                    (got,) = tries_within(self.lock, allowed(self.deadline_s))
                    self.channel.close()
                    self.pool.clear()
                    if got:
                        self.ring = None  # unmapped with its last user: wake() reads it without the lock
                        self.counts = memoryview(bytearray(self.counts)).cast("Q")  # so that a view keeps no ring
                        self.reader.count_in(self.counts)
                finally:
                    if got:
                        self.lock.release()
                    ended = RetiredSession(self.welcome.segment, self.session, self.copying, self.unpins)
                    if ended not in RETIRED:
                        RETIRED.append(ended)
            self._over = True
            return True
        except BaseException:  # an interrupt, which may have spared a step: the next call ends it
            self._ending &= not mine
            raise

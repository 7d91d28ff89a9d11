"""Requests that are sent ahead, and the wait for a worker's answers.

In steps (``ipc/steps.py``), or for those to several commits, or for grants.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Final, TypeGuard

from ..constants import SLAB_CHUNK_BYTES_MAX
from ..errors import DeadlineError, NotSentError, PeerError, TransportError
from ..net.allowance import ALLOWANCE, LOOK_S, allowed, at_least, tries_within
from ..net.channel import Refused
from ..slab import chunk_bytes_for
from ..wire import messages as M
from .commit_ring import let_go
from .grant_pool import GrantTuple, RoomWait, obtain, request_count, target_count
from .session import WorkerSession

#: A batch whose call has no time left may wait for this share of a deadline to take the answers in flight. A worker
#: that is not silent has them ready. Otherwise their grants would be lost as long as the session lives.
LAST_SHARE: Final = 0.1
#: Looks for an answer before the thread sleeps, about 100 us.
_POLLS: Final = 500 if len(os.sched_getaffinity(0)) > 1 else 0
#: A thread that waits while another one has the session looks this often whether that has taken in its answer, seconds.
_LOOK_S: Final = 0.02


class AnswerWait:
    """The wait for the answer to a request that ``session`` has sent: ``ticket`` is of :meth:`WorkerSession.submit`.

    ``last``: nothing is left to be done but to take the answer.
    """

    __slots__ = ("_session", "_ticket", "last", "until")

    events = select.POLLIN

    def __init__(self, session: WorkerSession, ticket: int, *, last: bool = False) -> None:
        self._session = session
        self._ticket = ticket
        self.last = last
        self.until = time.monotonic() + allowed(session.deadline_s)

    def ready(self) -> bool:
        """Return True if the answer has come, or the session is broken."""
        return self._session.has_answer(self._ticket)

    def descriptor(self) -> int:
        """Wake the worker if it sleeps, and return the session's socket, which brings at least the answer to that.

        -1 if another thread has the session: it wakes the worker.
        """
        session = self._session
        return session.channel.fileno() if self._ticket < 0 or session.kick(always=True) else -1

    def receive(self) -> None:
        """Take in what has arrived at the socket, unless another thread does."""
        with suppress(PeerError):  # the wait meets it
            self._session.take_pushes()

    def extend(self, until: float) -> None:
        """Let the exchange last until then, monotonic seconds."""
        self._session.channel.until = max(self._session.channel.until, until)


def take(session: WorkerSession, ticket: int, items: int = 1) -> Any:
    """Wait for the answer to a posted request of ``items`` keys. Raises TransportError, Refused.

    Another thread that has the session may have taken it in meanwhile: then it needs no lock.
    """
    frames, lock = session.frames, session.lock  # once: of a session that is timed, each look is a call
    until = time.monotonic() + allowed(session.deadline_s)
    while ticket not in frames:
        left = until - time.monotonic()
        if ALLOWANCE.seconds <= 0.0:
            raise DeadlineError("the call's deadline has passed")
        for got in session.tries:  # noqa: B007 -- see net/allowance.py
            break
        if not got and left > 0.0:
            (got,) = tries_within(lock, min(left, _LOOK_S))
        if got:
            try:
                if ticket not in frames:  # else another thread has taken it in, and the session may be closed since
                    if session.broken:
                        raise TransportError(session.broken)
                    session.frame_locked(ticket, items)
            finally:
                lock.release()
        elif left <= 0.0:
            raise DeadlineError("deadline passed while another thread waited for the worker")
    return session.result(ticket)  # without the lock: no interrupt comes between this and what its caller notes


class HungUp(DeadlineError):
    """The client of another socket has hung up while its request waited."""


def until_answered(session: WorkerSession, ticket: int, client: int, meanwhile: Callable[[], object]) -> None:
    """Wait until a request is answered, for the client of another socket: as long as that has not hung up.

    ``client``: the socket's descriptor, or -1. ``meanwhile``: is called every LOOK_S. Raises HungUp, and DeadlineError
    after an exchange's time: the caller withdraws the request, or forsakes it.
    """
    wait = AnswerWait(session, ticket)
    for _ in range(_POLLS if ticket >= 0 else 0):
        if wait.ready():
            return
    poller = select.poll()
    if client >= 0:
        poller.register(client, select.POLLRDHUP)
    while not _answered(session, ticket):
        if (fd := wait.descriptor()) >= 0:
            poller.register(fd, select.POLLIN)
        hung_up = any(ready == client for ready, _ in poller.poll(LOOK_S * 1e3))
        if fd >= 0:
            poller.unregister(fd)
        wait.receive()
        if _answered(session, ticket):
            return
        if hung_up:
            raise HungUp("its client hung up while the worker was late")
        meanwhile()
        if time.monotonic() >= wait.until:
            raise DeadlineError("deadline passed while waiting for the worker")


def until_room(session: WorkerSession, client: int, meanwhile: Callable[[], object]) -> None:
    """Wait until the session's socket takes a request; the arguments and errors are those of :func:`until_answered`."""
    until = time.monotonic() + allowed(session.deadline_s)
    poller = select.poll()
    poller.register(session.channel.fileno(), select.POLLOUT)
    if client >= 0:
        poller.register(client, select.POLLRDHUP)
    while not session.broken and not session.channel.has_room():
        if any(ready == client for ready, _ in poller.poll(LOOK_S * 1e3)):
            raise HungUp("its client hung up before the worker took its request")
        meanwhile()
        if time.monotonic() >= until:
            raise NotSentError("deadline passed while the worker took nothing")


def _answered(session: WorkerSession, ticket: int) -> bool:
    """Return whether the answer itself is here, and not only something else to receive; or the session is broken."""
    return session.has_answer(ticket) if ticket >= 0 else session.channel.received(-1 - ticket)


def forsake(session: WorkerSession, tickets: Iterable[int]) -> None:
    """Give up mutations whose callers are told that they have failed: call it before that.

    What the worker has carried out came before all that a caller can do now. If one is left, the session ends, and the
    worker does not carry it out any more.
    """
    left = [ticket for ticket in tickets if not let_go(session, ticket)]
    if left:
        session.give_up("a request was given up")


def withdraw(session: WorkerSession, tickets: Iterable[int], since: float) -> bool:
    """Give up mutations as :func:`forsake` does, but let the session live: others use it, too.

    ``since``: when the wait for the first one began, monotonic seconds. Return False if one cannot be withdrawn: the
    caller ends the session.
    """
    ring, page = session.ring, session.withdrawals
    for ticket in tickets:
        if let_go(session, ticket):
            continue
        if session.broken:
            return False
        if ring is not None and ticket >= 0:
            ring.withdraw(ticket)
            session.disown(ticket)
        elif page is None or not page.add(-1 - ticket):
            return False
        else:
            session.channel.expect(-1 - ticket, False)
            session.channel.late_at = min(session.channel.late_at, since)
    return True


def look_for_late(session: WorkerSession) -> None:
    """Take the late answers that have come by socket. Does not wait. The session is broken if the worker is gone."""
    with suppress(TransportError), session.lock:
        session.channel.poll_pushes()


def collect(session: WorkerSession, in_flight: list[tuple[int, list[int]]], statuses: list[int]) -> None:
    """Wait for the answers to all commits in flight, and remove those that were taken.

    A caller that gives the others up calls :func:`forsake`.
    """
    while in_flight:
        ticket, positions = in_flight[0]
        try:
            answer = take(session, ticket, len(positions))
        except Refused:
            del in_flight[0]  # an answer too
            raise
        del in_flight[0]
        committed(session, answer, positions, statuses)


def committed(session: WorkerSession, answer: Any, positions: Sequence[int], statuses: list[int]) -> None:
    """Take the answer to a COMMIT, whose grants are in the pool: a status for each position."""
    if not isinstance(answer, M.Committed) or len(answer.statuses) != len(positions):
        session.channel.fail("the worker answered COMMIT with something else")
    for position, status in zip(positions, answer.statuses):
        statuses[position] = status


@contextmanager
def ending(
    session: WorkerSession, in_flight: list[tuple[int, list[int]]], asked: list[tuple[int, int]], statuses: list[int]
) -> Iterator[None]:
    """End a batch: take what was ``asked`` for and all that is in flight behind the block, whatever happens in it.

    What cannot be taken is given up.
    """
    under_way: BaseException | None = None
    with while_cleaning_up(session):
        try:
            yield
        except BaseException as exc:
            under_way = exc
        try:
            collect_grants(session, asked)
        except BaseException as exc:
            under_way = under_way if outranks(under_way, exc) else exc
        try:
            collect(session, in_flight, statuses)
        except BaseException as exc:
            under_way = under_way if outranks(under_way, exc) else exc
    if under_way is not None:
        try:
            forsake(session, [ticket for ticket, _ in in_flight])
            raise under_way
        finally:
            del under_way  # else the exception and this frame hold each other, and with them the arena


def forsake_batch(
    session: WorkerSession, in_flight: Sequence[tuple[int, list[int]]], asked: Sequence[tuple[int, int]]
) -> None:  # fmt: skip
    """Give up what :func:`ending` has not taken, as it has not begun, say. Twice is harmless. O(in flight)."""
    forsake(session, [ticket for ticket, _ in in_flight])
    for ticket, _ in asked:
        session.disown(ticket)


def outranks(under_way: BaseException | None, met: BaseException) -> TypeGuard[BaseException]:
    """Return whether a batch raises what was under way, and not what its clean-up has ``met``.

    An error of the peer does not take the place of an interrupt: nobody would hear of that.
    """
    return under_way is not None and not isinstance(under_way, PeerError) and isinstance(met, PeerError)


def while_cleaning_up(session: WorkerSession) -> AbstractContextManager[None]:
    """Let a batch that ends take what it has in flight, although its call has no time left."""
    return at_least(session.deadline_s * LAST_SHARE)


def ask_ahead(session: WorkerSession, length: int, left: int, asked: list[tuple[int, int]]) -> None:
    """Ask for grants that the pool lacks for ``left`` values, and note that for :func:`collect_grants` in ``asked``."""
    chunk = chunk_bytes_for(length)
    lack = left - len(session.pool.stock(chunk))
    if lack > 0:
        count = request_count(chunk, lack)
        session.submit(M.Grant([(length, count)]), asked, count)


def commit(
    session: WorkerSession, entries: list[tuple[bytes, int, int, int, int, int]], left: int, top: bool,
    in_flight: list[tuple[int, list[int]]], mine: list[int],
) -> None:  # fmt: skip
    """Send what is copied, with the grants that are wanted next. What is sent is ``in_flight``, as ``mine``.

    With ``top`` it also wants grants for large values: as many as the pool is to have when ``left`` more are put. They
    come with the answer after this one's.
    """
    spent: dict[int, int] = {}
    for entry in entries:
        length = entry[2]
        spent[length] = spent.get(length, 0) + 1
    wants = []
    for length, count in spent.items():
        chunk = chunk_bytes_for(length)
        keep = target_count(chunk)
        have = len(session.pool.stock(chunk))
        if chunk > SLAB_CHUNK_BYTES_MAX:  # each batch asks for what it lacks, while it copies what these have room for
            count = max(0, keep - max(0, have - left)) if top and not session.pool.line else 0
        else:
            count = session.pool.refill(have, count, left, keep)
        if count:
            wants.append((length, count))
    session.submit(M.Commit(entries, wants), in_flight, mine)


def obtain_some(session: WorkerSession, length: int, left: int, room: RoomWait) -> GrantTuple | None:
    """Return a grant for a value of this size from the worker; None if it has no room. Asks for ``left`` in all."""
    chunk = chunk_bytes_for(length)
    count = request_count(chunk, left)
    fits = chunk <= session.reader.geometry.data_bytes
    return obtain(session, length, count, retry=count, room=room if fits else None)


def collect_grants(session: WorkerSession, asked: list[tuple[int, int]]) -> None:
    """Wait for grants that were asked for ahead, tickets and numbers: they are in the pool then, and no more ``asked``.

    Also in a call that has no time left: nobody else takes them. After an interrupt they can still be taken.
    """
    with while_cleaning_up(session):
        while asked:
            ticket, count = asked[0]
            try:
                answer = take(session, ticket, count)
            except Refused:
                del asked[0]  # an answer, too
                raise
            except PeerError:
                del asked[0]
                session.disown(ticket)
                raise
            del asked[0]
            if not isinstance(answer, M.Granted):
                session.channel.fail("the worker answered GRANT with something else")

"""What a session says to its worker about pins: pin these values, release those.

Pins end one by one, also in finalizers, which must not wait. So they are queued, and go to the worker with the next
values that are pinned, or from the thread that maintains the session.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from itertools import islice
from threading import Lock
from typing import Any, Final, NamedTuple, Protocol

from ..arena.reader import ArenaReader
from ..host import fork
from ..net.channel import Channel
from ..rpc import Frame, batches
from ..wire import messages as M
from ..wire.one_key import LocatedOne, encode_pin_one
from .commit_ring import SLOTS, TAIL, Ring

#: Keys of one exchange; its answer has 27 bytes for each, and fits a slot of the ring.
_PIN_KEYS: Final = 1024
#: Pins that are released together: at least while values are pinned, and at most.
_UNPIN_LEAST: Final = 16
_UNPIN_MOST: Final = 1000


class Talk(Protocol):
    """What pins need of a session."""

    lock: Lock
    unpins: deque[int]
    reader: ArenaReader
    channel: Channel
    ring: Ring | None
    frames: dict[int, Frame]

    def acquire(self) -> None: ...
    def submit_locked(self, msg: Any) -> int: ...
    def wait_locked(self, ticket: int) -> Any: ...
    def frame_locked(self, ticket: int, items: int = 1) -> Frame: ...
    def _await(self, ring: Ring) -> int: ...
    def _collect(self, ring: Ring) -> None: ...
    def checked_locked(self, msg: Any, answer: Any) -> Any: ...
    def submit(self, msg: Any, in_flight: Any = (), about: Any = None) -> int: ...
    def exchange(self, msg: Any, items: int = 1) -> Any: ...
    def answer(self, msg: Any, ticket: int, items: int = 1) -> Any: ...
    def disown(self, ticket: int) -> None: ...


class RetiredSession(NamedTuple):
    """What is needed to release an ended session. Keeps no mapping alive."""

    segment: str
    session: int
    copying: list[None]
    #: Its pins that are to be released.
    unpins: deque[int]


#: The retired sessions of all clients of this process. Appending is atomic, removal is by value.
RETIRED: Final[list[RetiredSession]] = []
fork.in_child(RETIRED.clear)


def pin_one(session: Talk, digest: bytes) -> LocatedOne:
    """Do :meth:`~.session.WorkerSession.pin_one` of a session with a ring."""
    found: list[LocatedOne] = []
    try:
        session.acquire()
        try:
            unpins, ticket = ended(session.unpins), None
            try:
                if unpins:
                    ticket = session.submit_locked(M.Unpin(unpins))
                found += (_pin_locked(session, digest),)
                if ticket is not None:
                    session.wait_locked(ticket)
            except BaseException:
                session.unpins.extend(unpins)  # see release()
                if ticket is not None:
                    session.disown(ticket)
                raise
        finally:
            session.lock.release()
        check(session, found)
        return found[0]
    except BaseException:  # an interrupt may come behind the answer, too
        _release_later(session, found)
        raise


def _pin_locked(session: Talk, digest: bytes) -> LocatedOne:
    """Pin a value by ring. The caller holds the lock."""
    ring: Any = session.ring
    while ring.words[TAIL] - ring.done >= SLOTS:
        session._collect(ring)
    ticket = ring.post(encode_pin_one(digest))
    try:
        if ticket == ring.done:  # nothing else is in flight
            session._await(ring)
            if (found := ring.located_one(ticket)) is not None:
                ring.done = ticket + 1
                return found  # type: ignore[no-any-return]
        return located(session, M.Locate(M.LOCATE_PIN, [digest]), ticket)[0]
    except BaseException:
        session.disown(ticket)
        raise


def pin_many(session: Talk, digests: Sequence[bytes], how: int) -> list[LocatedOne]:
    """Pin values, and return for each its (status, flags, length, crc, offset, pin id). Raises TransportError.

    ``how``: more bits of LOCATE. One exchange for 1,024 values. What is pinned for a call that fails is released later.
    """
    queue = session.unpins
    if len(queue) > _UNPIN_MOST:
        release(session, queue)
    entries: list[LocatedOne] = []
    in_flight: list[tuple[int, Any]] = []
    unpins = ended(queue)
    try:
        # Before the others, as what is released makes room, but without a wait of its own: the worker takes both.
        if unpins:
            msg = M.Unpin(unpins)
            session.submit(msg, in_flight, msg)
        for at in range(0, len(digests), _PIN_KEYS):
            _pin_some(session, M.Locate(M.LOCATE_PIN | how, list(digests[at : at + _PIN_KEYS])), entries)
        for ticket, msg in in_flight:
            session.answer(msg, ticket)
        in_flight.clear()
        check(session, entries)
        return entries
    except BaseException:
        queue.extend(unpins)  # see release(); a pin that is released already is ignored
        _release_later(session, entries)
        for ticket, _ in in_flight:
            session.disown(ticket)
        raise


def _pin_some(session: Talk, msg: M.Locate, entries: list[LocatedOne]) -> None:
    """Make the exchange for some values, and note what the worker has pinned in ``entries``: see :func:`located`."""
    session.acquire()
    try:
        ticket = session.submit_locked(msg)
        try:
            entries += located(session, msg, ticket)
        except BaseException:
            session.disown(ticket)
            raise
    finally:
        session.lock.release()


def located(session: Talk, msg: M.Locate, ticket: int) -> list[LocatedOne]:
    """Wait for the answer to LOCATE, and return its entries, checked. The caller holds the lock.

    An interrupt may come as any function is called. So the caller disowns the ticket of what it does not get.
    """
    frame = session.frame_locked(ticket, len(msg.digests))
    entries: list[LocatedOne] = session.checked_locked(msg, session.channel.result(frame)).entries
    del session.frames[ticket]
    return entries


def check(session: Talk, entries: Sequence[LocatedOne]) -> None:
    """Break the session if the worker has pinned what is not data."""
    start, end, found = session.reader.data_offset, session.reader.data_end, int(M.Status.OK)
    for status, _flags, length, _crc, offset, _pin in entries:
        if status == found and not start <= offset <= end - length:
            session.channel.fail(f"the worker pinned {length} bytes at {offset}, which is outside of the data")


def _release_later(session: Talk, entries: Sequence[LocatedOne]) -> None:
    """Queue what the worker has pinned for a call that has failed: nobody else knows of it."""
    session.unpins.extend([entry[5] for entry in entries if entry[5]])


def ended(queue: deque[int]) -> list[int]:
    """Take the pins that are released beside the next values' pins: none as long as they are few."""
    return _some(queue) if len(queue) >= _UNPIN_LEAST else []


def release(session: Talk, queue: deque[int]) -> None:
    """Release the pins in a queue, of this session or of one that has ended. Raises TransportError."""
    for _ in range(0, len(queue), _UNPIN_MOST):
        pins = _some(queue)
        try:
            if pins:
                session.exchange(M.Unpin(pins))
        except BaseException:
            queue.extend(pins)  # another session may release them; a pin that is released already is ignored
            raise


def release_retired(session: Talk, segment: str) -> None:
    """Tell the worker of ``segment`` which sessions have no copy and no view any longer. Raises TransportError.

    And which of their pins are released: one long user of a session must not keep what all others had there.
    """
    mine = [old for old in list(RETIRED) if old.segment == segment]
    for old in mine:
        release(session, old.unpins)
    free = [old for old in mine if not old.copying]
    for part in batches(free):
        session.exchange(M.ReleaseSessions([old.session for old in part]))
        for old in part:
            with contextlib.suppress(ValueError):
                RETIRED.remove(old)


def _some(queue: deque[int]) -> list[int]:
    """Take pins that are to be released together."""
    pins: list[int] = []
    try:
        # One operation: an interrupt finds each pin in the queue or with the caller.
        pins += islice(iter(queue.popleft, None), _UNPIN_MOST)
    except IndexError:  # there are no more
        pass
    return pins

"""Sessions and what they hold: chunks they may write (grants) and values that stay for them (pins).

The bookkeeping half of a worker's store, under its entries; ``store.py`` says in which order things are stored and
why a death at any point is harmless.

Sessions end in two steps. ``close_session`` is for a connection that is gone: its holds
stay, quarantined, as a copy into or out of them may still be under way. ``end_session``
frees them, once the process has exited or has said by a later session that its copies
have ended. Nothing here ever ends a hold by time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from .layout import SEQ_BITS, Geometry
from .ledger import HoldKind, Ledger
from .sizes import chunk_bytes_for
from .space import Space

_GRANT: Final = int(HoldKind.GRANT)
_PIN: Final = int(HoldKind.PIN)

#: Ids of sessions and holds: incarnation above, a counter below; never drawn twice.
ID_BITS: Final = SEQ_BITS
#: All sessions' grants together may hold this share of the data region.
GRANTED_SHARE: Final = 8
#: Prepared grants that one answer brings at most: 10 KiB of a ring's slot of 32.
PREPARED_ANSWER_MAX: Final = 512


class Session:
    """One control connection's holds."""

    __slots__ = (
        "closed", "copies", "granted_bytes", "grants", "line", "namespace", "pid", "pins", "prepared", "session",
        "started",
    )  # fmt: skip

    def __init__(self, session: int, line: int, pid: int, started: int, namespace: int) -> None:
        self.session = session
        self.line = line
        self.pid = pid
        self.started = started
        self.namespace = namespace
        #: grant id -> (offset in the segment, chunk bytes, hold line)
        self.grants: dict[int, tuple[int, int, int]] = {}
        #: pin id -> (offset, hold line)
        self.pins: dict[int, tuple[int, int]] = {}
        self.granted_bytes = 0
        #: Of the grants, those that the client has not been told of: they go with its next answer.
        self.prepared: list[tuple[int, int, int]] = []
        #: The connection is gone; holds are quarantined.
        self.closed = False
        #: A mover's: the epoch of the map by which it copies, 0 for anybody else. See ShardWords.may_copy.
        self.copies = 0

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open"
        return f"<Session {self.session:#x} {state} pid={self.pid} grants={len(self.grants)} pins={len(self.pins)}>"


class Holder:
    """Sessions, grants and pins of one arena. The base of :class:`simm.store.Store`, which knows when to settle."""

    ledger: Ledger
    space: Space

    def __init__(self, geometry: Geometry, incarnation: int) -> None:
        self.geometry = geometry
        self.incarnation = incarnation
        self.sessions: dict[int, Session] = {}
        self._data = geometry.data_offset
        self._next_id = incarnation << ID_BITS
        #: Grants asked for with commits, still to be prepared: (session, value bytes, count).
        self._wanted: list[tuple[Session, int, int]] = []
        self.granted_bytes = 0
        self.granted_bytes_max = geometry.data_bytes // GRANTED_SHARE
        #: Set by the worker: ask a session for idle grants of so many bytes.
        self.recall: Callable[[Session, int], None] = lambda _session, _bytes: None

    def settle(self) -> None:
        """Do what commits left to do after their answers."""
        raise NotImplementedError

    # -- sessions -----------------------------------------------------------------------------

    def _draw_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def open_session(self, pid: int, started: int, namespace: str) -> Session:
        """A new session. Raises CapacityError when the ledger has no line left."""
        number = self.ledger.namespace(namespace)
        session = self._draw_id()
        line = self.ledger.add_session(session, pid, started, number)
        opened = Session(session, line, pid, started, number)
        self.sessions[session] = opened
        return opened

    def close_session(self, session: Session) -> None:
        """The connection is gone. Without holds the session ends; with holds they are quarantined.

        But those grants that its client was not told of: nobody writes into them.
        """
        session.closed = True
        self.settle()
        self._take_back(session)
        if not session.grants and not session.pins:
            self.end_session(session)

    def end_session(self, session: Session) -> None:
        """The session's process can touch no chunk any more: free what it held."""
        self.settle()
        if self.sessions.pop(session.session, None) is None:
            return
        self.return_grants(session, list(session.grants))
        self.unpin(session, list(session.pins))
        self.ledger.end_session(session.line)

    # -- grants -------------------------------------------------------------------------------

    def grant(self, session: Session, size: int, count: int) -> list[tuple[int, int, int]]:
        """Up to ``count`` chunks for values of ``size`` bytes: (grant id, offset, chunk bytes).

        Ahead-of-need grants stop at the cap for all sessions together; a session that holds none
        always gets one if there is any room at all.
        """
        self.settle()
        return self._grant(session, size, count)

    def want(self, session: Session, size: int, count: int) -> None:
        """:meth:`grant`, but later: the next :meth:`settle` prepares them for the session's next answer."""
        self._wanted.append((session, size, count))

    def take_prepared(self, session: Session) -> list[tuple[int, int, int]]:
        """The prepared grants, at most PREPARED_ANSWER_MAX of them: from now on the client may write into them."""
        prepared = session.prepared
        if not prepared:
            return []
        answer = prepared[:PREPARED_ANSWER_MAX]
        session.prepared = prepared[PREPARED_ANSWER_MAX:]
        held = session.grants
        for number, _, _ in answer:
            if number not in held:  # a client that guesses ids has spent it before it was told of it
                return [grant for grant in answer if grant[0] in held]
        return answer

    def _grant(self, session: Session, size: int, count: int) -> list[tuple[int, int, int]]:
        if not (size > 0 and count > 0):
            return []
        chunk = chunk_bytes_for(size)
        held, ledger, data = session.grants, self.ledger, self._data
        if count == 1 and self.granted_bytes + chunk <= self.granted_bytes_max and ledger.free_holds:
            # The usual case of a single put, 1.3 us; what follows takes 2.3 for one and 0.6 each for many.
            offset = self.space.allocate(size)
            if offset >= 0:
                offset += data
                self._next_id = number = self._next_id + 1
                held[number] = (offset, chunk, ledger.add_hold(number, session.session, offset, chunk, _GRANT))
                session.granted_bytes += chunk
                self.granted_bytes += chunk
                return [(number, offset, chunk)]
        room = (self.granted_bytes_max - self.granted_bytes) // chunk
        if count > room:
            if self._take_back_others(session):
                room = (self.granted_bytes_max - self.granted_bytes) // chunk
            if count > room:
                self._recall(session, chunk)
                count = max(room, 0 if held else 1)
        count = min(count, ledger.free_holds)  # before anything is evicted for it
        offsets = self.space.allocate_many(size, count)
        if len(offsets) < count:
            if self._take_back_others(session):
                offsets += self.space.allocate_many(size, count - len(offsets))
            if len(offsets) < count:
                self._recall(session, chunk)
        first = self._next_id + 1
        self._next_id += len(offsets)
        offsets = [offset + data for offset in offsets]
        lines = ledger.add_holds(first, session.session, offsets, chunk, _GRANT)
        grants = []
        for number, offset, line in zip(range(first, first + len(lines)), offsets, lines):
            held[number] = (offset, chunk, line)
            grants.append((number, offset, chunk))
        session.granted_bytes += chunk * len(lines)
        self.granted_bytes += chunk * len(lines)
        return grants

    def _take_back(self, session: Session) -> bool:
        """Take back the grants that the session's client has not been told of; were there any?"""
        prepared, session.prepared = session.prepared, []
        for number, _, _ in prepared:
            grant = session.grants.pop(number, None)
            if grant is not None:
                self._end_grant(session, grant)
        return bool(prepared)

    def _take_back_others(self, asking: Session) -> bool:
        """:meth:`_take_back` for all sessions but one: before clients are asked for theirs."""
        return sum(self._take_back(session) for session in self.sessions.values() if session is not asking) > 0

    def _recall(self, asking: Session, wanted: int) -> None:
        """Ask the greatest holder for idle grants."""
        others = [s for s in self.sessions.values() if not s.closed and s is not asking and s.granted_bytes]
        if others:
            self.recall(max(others, key=lambda s: s.granted_bytes), wanted)

    def return_grants(self, session: Session, numbers: Sequence[int]) -> int:
        """Take grants back; unknown ids are ignored. How many were known."""
        self.settle()
        known = 0
        for number in numbers:
            grant = session.grants.pop(number, None)
            if grant is None:
                continue
            self._end_grant(session, grant)
            known += 1
        return known

    def _end_grant(self, session: Session, grant: tuple[int, int, int]) -> None:
        offset, chunk, line = grant
        session.granted_bytes -= chunk
        self.granted_bytes -= chunk
        self.ledger.end_hold(line)
        self.space.drop(offset - self._data)

    # -- pins ---------------------------------------------------------------------------------

    def pin(self, session: Session, offset: int, chunk: int) -> int:
        """Pin a chunk for a session: the pin's id, 0 when the ledger has no line left."""
        number = self._draw_id()
        line = self.ledger.add_hold(number, session.session, offset, chunk, _PIN)
        if line < 0:
            return 0
        self.space.hold(offset - self._data)
        session.pins[number] = (offset, line)
        return number

    def unpin(self, session: Session, pins: Sequence[int]) -> int:
        """Give pins back; unknown ids are ignored. How many were known."""
        self.settle()
        known = 0
        for number in pins:
            pin = session.pins.pop(number, None)
            if pin is None:
                continue
            offset, line = pin
            self.ledger.end_hold(line)
            self.space.unhold(offset - self._data)
            known += 1
        return known

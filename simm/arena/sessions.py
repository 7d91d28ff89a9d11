"""Sessions, and the chunks they hold: grants, which they may write, and pins, which stay for them to read.

A :class:`SessionTable` is the bookkeeping half of a worker's store. ``arena/store.py`` has the order of stores that
makes a death at any point harmless.

A session ends in two steps. :meth:`SessionTable.close` follows the loss of its connection: its holds stay, quarantined,
as a copy into or out of them may still be in flight. :meth:`SessionTable.end` frees them, once the process has exited
or has declared through a later session that its copies have ended. No hold ever ends by time.

Shares
------
All sessions together may hold grants for an eighth of the data region, and as many holds as the ledger has lines. Of
either, a session may hold at most FAIR times what is left for others (a dynamic threshold, as switches share their
buffers). So a lone session gets four fifths, each of n sessions gets FAIR / (1 + n FAIR) in the end, and one that
comes late always finds a part free. A session without any grant gets one whatever its share is, if the arena has room.
That does not hold while its process has an eighth of the data region already: one process with many sessions would
have it all.

The ledger's lines for sessions are shared by process in the same way, and the last LINES_KEPT of them are for the
server's own processes. So no client, however often it connects, keeps streams, endpoints and movers from the arena.

Pins have a bound in bytes too: all together half the data region, of which each session has a share by the same rule.
So no client can pin the whole arena, and puts always find something to evict. A value may be pinned whatever its size
if nothing else is.

A session that gets less than it asks for makes the worker recall idle grants from others, the greatest holders first.
A session that was asked a moment ago is passed over, so that one shortage after another goes round all of them. What a
session owes that has not answered its last recall is not counted on: it may be stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Final

from ..constants import BATCH_KEYS_MAX, VALUE_BYTES_MAX
from ..errors import CapacityError, CorruptionError, RemoteProtocolError
from ..slab import chunk_bytes_for
from .layout import ENTRY_BOUND, ENTRY_EPOCH, SEQ_BITS, Geometry
from .ledger import GRANT, PIN, Ledger
from .rebuild import owned
from .space import Space

#: Ids of sessions and holds: the incarnation above, a counter below. An id is never used twice.
ID_BITS: Final = SEQ_BITS
#: The share of the data region that all sessions' grants together may hold.
GRANTED_SHARE: Final = 8
#: The share of the data region that all sessions' pins together may hold.
PINNED_SHARE: Final = 2
#: A session may hold this many times what is left for other sessions; see above.
FAIR: Final = 4
#: Session lines that clients never get: a stream or two, an endpoint and movers, each of them perhaps twice.
LINES_KEPT: Final = 32
#: A session is asked for idle grants at most so often, ms. Clients look for recalls about as often.
RECALL_AGAIN_MS: Final = 100
#: Most prepared grants in one answer: 10 KiB of a commit ring's slot of 32.
PREPARED_ANSWER_MAX: Final = 512
#: More bytes than a value has.
_MORE_THAN_ANY: Final = 1 << 62


class Session:
    """The holds of one control connection."""

    __slots__ = (
        "closed", "copies", "granted_bytes", "grants", "line", "namespace", "pid", "pinned_bytes", "pins", "prepared",
        "recalled_ms", "relays", "session", "silent", "started",
    )  # fmt: skip

    def __init__(self, session: int, line: int, pid: int, started: int, namespace: int) -> None:
        self.session = session
        self.line = line
        self.pid = pid
        self.started = started
        self.namespace = namespace
        #: grant id -> (offset in the segment, chunk bytes, hold line)
        self.grants: dict[int, tuple[int, int, int]] = {}
        #: pin id -> (offset, chunk bytes, hold line)
        self.pins: dict[int, tuple[int, int, int]] = {}
        self.granted_bytes = 0
        #: A chunk that is pinned twice counts twice.
        self.pinned_bytes = 0
        #: Grants among them that the client has not been sent yet; they go with its next answer.
        self.prepared: list[tuple[int, int, int]] = []
        #: The connection is gone; the holds are quarantined.
        self.closed = False
        #: For a mover: the epoch of the map by which it copies; 0 for others. See ShardWords.may_copy.
        self.copies = 0
        #: A stream or endpoint: it commits for clients of several namespaces.
        self.relays = False
        #: When it was last asked for idle grants, ms; and whether it has returned none since.
        self.recalled_ms = -RECALL_AGAIN_MS
        self.silent = False

    def flags(self, flags: int) -> int:
        """Return what a peer may say of its values: all but what the worker says. A mover copies what another said."""
        return flags & ~(ENTRY_EPOCH if self.copies else ENTRY_EPOCH | ENTRY_BOUND)

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open"
        return f"<Session {self.session:#x} {state} pid={self.pid} grants={len(self.grants)} pins={len(self.pins)}>"


def check_wants(wants: list[tuple[int, int]]) -> None:
    """Bound a request's work and its answer's size. Raise RemoteProtocolError."""
    count = sum(count for _, count in wants)
    if count > BATCH_KEYS_MAX:
        raise RemoteProtocolError(f"{count} grants in one request, {BATCH_KEYS_MAX} are allowed")
    for size, _ in wants:
        if not 0 < size <= VALUE_BYTES_MAX:
            raise RemoteProtocolError(f"a grant for a value of {size} bytes")


class SessionTable:
    """Sessions, grants and pins of one arena. Offsets are from the segment's start.

    ``apply_pending`` completes the bookkeeping that commits have deferred. Each method that allocates or frees calls it
    first. ``clock`` returns the time in ms.
    """

    def __init__(
        self, geometry: Geometry, incarnation: int, ledger: Ledger, space: Space, apply_pending: Callable[[], None],
        clock: Callable[[], int],
    ) -> None:  # fmt: skip
        self._clock = clock
        self._ledger = ledger
        self._space = space
        self._apply_pending = apply_pending
        self._data, self._slots = geometry.data_offset, geometry.slots
        self._next_id = incarnation << ID_BITS
        self.by_id: dict[int, Session] = {}
        #: Grants requested with commits and not made yet: (session, value bytes, count).
        self.wanted: list[tuple[Session, int, int]] = []
        self.granted_bytes = 0
        self.granted_bytes_max = geometry.data_bytes // GRANTED_SHARE
        self.pinned_bytes = 0
        self.pinned_bytes_max = geometry.data_bytes // PINNED_SHARE
        #: Calls of :meth:`grant` that brought nothing. Those that were cut short do not count: the next ones go on.
        self.refused = 0
        #: Asks a session's client for idle grants of about this many bytes. The worker sets it.
        self.recall: Callable[[Session, int], None] = lambda _session, _bytes: None

    # -- sessions -----------------------------------------------------------------------------

    def open(self, pid: int, started: int, namespace: str, serves: bool = False) -> Session:
        """Return a new session, of a process of the server if it ``serves``. O(sessions) for others.

        Raise CapacityError if the ledger has no line for it.
        """
        left = self._ledger.free_sessions - LINES_KEPT
        if not serves and sum(each.pid == pid for each in self.by_id.values()) >= FAIR * left:
            raise CapacityError("the arena has no more sessions for clients, or not for this process: too many clients")
        number = self._ledger.namespaces.number(namespace)
        session = self._allocate_id()
        line = self._ledger.add_session(session, pid, started, number)
        opened = Session(session, line, pid, started, number)
        self.by_id[session] = opened
        return opened

    def stats(self) -> dict[str, int]:
        """Return gauges. O(sessions)."""
        sessions = self.by_id.values()
        return {
            "granted_bytes": self.granted_bytes, "sessions": len(sessions),
            "sessions_quarantined": sum(each.closed for each in sessions), "pinned_bytes": self.pinned_bytes,
            "grants": sum(len(each.grants) for each in sessions), "pins": sum(len(each.pins) for each in sessions),
        }  # fmt: skip

    def close(self, session: Session) -> None:
        """Note that the connection is gone: end a session without holds, quarantine the holds of others.

        Prepared grants are revoked, as the client does not know them and cannot write into them.
        """
        session.closed = True
        self._apply_pending()
        self._revoke_prepared(session)
        if not session.grants and not session.pins:
            self.end(session)

    def end(self, session: Session) -> None:
        """Free all holds of a session whose process cannot touch a chunk any more."""
        self._apply_pending()
        if self.by_id.pop(session.session, None) is None:
            return
        self.return_grants(session, list(session.grants))
        self.unpin(session, list(session.pins))
        self._ledger.end_session(session.line)

    def restore(self) -> list[str]:
        """Take over the ledger's sessions, which have lost their connections, and their holds. Return notes.

        The entries have their chunks by now: they outrank grants. O(lines + slots).
        """
        ledger, space, data = self._ledger, self._space, self._data
        notes = []
        for line, fields in list(ledger.sessions()):
            session = Session(fields.session, line, fields.pid, fields.started, fields.namespace)
            session.closed = True
            self.by_id[fields.session] = session
        held: list[int] = []
        reserved: set[int] = set()
        holds = list(ledger.holds())
        live = owned(space.offsets(0, self._slots), [hold.offset - data for _, hold in holds])
        for line, hold in holds:
            owner = self.by_id.get(hold.session)
            offset = hold.offset - data
            outranked = hold.kind == GRANT and offset in live
            if owner is None or outranked:
                ledger.end_hold(line)
                continue
            if offset not in live and offset not in reserved:
                try:
                    space.reserve(offset, hold.chunk)
                except CorruptionError as exc:
                    notes.append(f"hold {hold.hold:#x} dropped: {exc}")
                    ledger.end_hold(line)
                    continue
                reserved.add(offset)
            if hold.kind == GRANT:
                owner.grants[hold.hold] = (hold.offset, hold.chunk, line)
                owner.granted_bytes += hold.chunk
                self.granted_bytes += hold.chunk
            else:
                self._note_pin(owner, hold.hold, hold.offset, hold.chunk, line)
                held.append(offset)
        for offset in held:
            space.hold(offset)
        for offset in reserved.intersection(held):
            space.release(offset)  # a pinned chunk without an entry is freed with its last pin
        return notes

    def _allocate_id(self) -> int:
        self._next_id += 1
        return self._next_id

    # -- grants -------------------------------------------------------------------------------

    def grant(self, session: Session, size: int, count: int) -> list[tuple[int, int, int]]:
        """Return up to ``count`` chunks for values of ``size`` bytes: (grant id, offset, chunk bytes).

        Grants stop at the session's share. A session without any gets one even so, with the exception above.
        """
        self._apply_pending()
        grants = self.allocate(session, size, count)
        if not grants and count > 0 and not self._space.cut_short:
            self.refused += 1
        return grants

    def grant_each(self, session: Session, wants: Sequence[tuple[int, int]]) -> tuple[list[tuple[int, int, int]], bool]:
        """Do :meth:`grant` for (value bytes, count) each. Return what came, and whether all did.

        To find that there is no room costs O(sessions), and wakes clients. So a want that is left short ends the search
        for values of half its size and more, as a rule: O(wants + log(bytes) * sessions), whatever the wants are.
        """
        grants: list[tuple[int, int, int]] = []
        short_of, space = _MORE_THAN_ANY, self._space
        try:
            for size, count in wants:
                if size < short_of:
                    got = self.grant(session, size, count)
                    grants += got
                    if len(got) < count:
                        short_of = power_below(size)
                    if space.waiting is not None:
                        space.gone += space.waiting()  # the next want has them dropped first
        finally:
            space.gone = 0
        return grants, short_of == _MORE_THAN_ANY

    def prepare_wanted(self) -> None:
        """Prepare what :meth:`want` has asked for since the last call, as far as there is room. Nothing is pending.

        What a session wants of a size comes together, up to BATCH_KEYS_MAX: evicted together, entries cost less.
        """
        together: dict[tuple[Session, int], int] = {}
        for session, size, count in self.wanted:
            together[session, size] = together.get((session, size), 0) + count
        self.wanted.clear()
        short_of: dict[int, int] = {}
        for (session, size), count in together.items():
            while count > 0 and not session.closed and size < short_of.get(session.session, _MORE_THAN_ANY):
                some = min(count, BATCH_KEYS_MAX)
                got = self.allocate(session, size, some)
                session.prepared += got
                count -= some
                if len(got) < some:
                    short_of[session.session] = power_below(size)

    def want(self, session: Session, size: int, count: int) -> None:
        """Request :meth:`grant` for later: the store's next ``apply_pending`` prepares them for the next answer."""
        self.wanted.append((session, size, count))

    def take_prepared(self, session: Session) -> list[tuple[int, int, int]]:
        """Return up to PREPARED_ANSWER_MAX prepared grants, which the client may write from now on."""
        prepared = session.prepared
        if not prepared:
            return []
        answer = prepared[:PREPARED_ANSWER_MAX]
        session.prepared = prepared[PREPARED_ANSWER_MAX:]
        held = session.grants
        for number, _, _ in answer:
            if number not in held:  # a client that guesses ids has spent the grant before it was sent
                return [grant for grant in answer if grant[0] in held]
        return answer

    def allocate(self, session: Session, size: int, count: int) -> list[tuple[int, int, int]]:
        """Do :meth:`grant` while nothing is pending."""
        if not (0 < size <= VALUE_BYTES_MAX and count > 0):
            return []
        chunk = chunk_bytes_for(size)
        held, ledger, data = session.grants, self._ledger, self._data
        fair = session.granted_bytes + chunk <= FAIR * (self.granted_bytes_max - self.granted_bytes - chunk)
        if count == 1 and fair and len(held) < ledger.free_holds:
            # The usual case, a single put: half the time of the general one below.
            offset = self._space.allocate(size)
            if offset >= 0:
                offset += data
                self._next_id = number = self._next_id + 1
                held[number] = (offset, chunk, ledger.add_hold(number, session.session, offset, chunk, GRANT))
                session.granted_bytes += chunk
                self.granted_bytes += chunk
                return [(number, offset, chunk)]
            if self._space.cut_short:
                return []
        room = self._room(session, chunk)
        if count > room:
            if self._revoke_others(session, session.granted_bytes):
                room = self._room(session, chunk)
            if count > room:
                self._recall(session, chunk)
                count = room
        offsets = self._space.allocate_many(size, count)
        if len(offsets) < count and not self._space.cut_short:  # else there is room once the session asks again
            if self._revoke_others(session):
                offsets += self._space.allocate_many(size, count - len(offsets))
            if len(offsets) < count:
                self._recall(session, chunk)
        first = self._next_id + 1
        self._next_id += len(offsets)
        offsets = [offset + data for offset in offsets]
        lines = ledger.add_holds(first, session.session, offsets, chunk, GRANT)
        numbers = range(first, first + len(lines))
        held.update(zip(numbers, zip(offsets, repeat(chunk), lines)))
        grants = list(zip(numbers, offsets, repeat(chunk)))
        session.granted_bytes += chunk * len(lines)
        self.granted_bytes += chunk * len(lines)
        return grants

    def _room(self, session: Session, chunk: int) -> int:
        """Return how many more such chunks the session may be granted: its share's, but one if it has none."""
        lines = self._ledger.free_holds
        left = FAIR * (self.granted_bytes_max - self.granted_bytes) - session.granted_bytes
        fair = left // ((FAIR + 1) * chunk)
        fair_lines = (FAIR * lines - len(session.grants) - len(session.pins)) // (FAIR + 1)
        room = min(fair, fair_lines)
        if room > 0:
            return room
        return int(not session.grants and lines > 0 and self._process_bytes(session) < self.granted_bytes_max)

    def _process_bytes(self, session: Session) -> int:
        """Return the bytes of grants of all sessions of the session's process. O(sessions)."""
        pid = session.pid
        return sum(each.granted_bytes for each in self.by_id.values() if each.pid == pid)

    def return_grants(self, session: Session, numbers: Sequence[int]) -> int:
        """Take back grants that the client returns. Ignore unknown ids; return the number of known ones."""
        self._apply_pending()
        session.silent = False
        known = 0
        for number in numbers:
            grant = session.grants.pop(number, None)
            if grant is None:
                continue
            self.release(session, grant)
            known += 1
        return known

    def release(self, session: Session, grant: tuple[int, int, int]) -> None:
        """End a grant that has left ``session.grants``, and free its chunk."""
        offset, chunk, line = grant
        session.granted_bytes -= chunk
        self.granted_bytes -= chunk
        self._ledger.end_hold(line)
        self._space.drop(offset - self._data)

    def _revoke_prepared(self, session: Session) -> bool:
        """Revoke the grants that the session's client has not been sent. Return True if there were any."""
        prepared, session.prepared = session.prepared, []
        for number, _, _ in prepared:
            grant = session.grants.pop(number, None)
            if grant is not None:
                self.release(session, grant)
        return bool(prepared)

    def _revoke_others(self, asking: Session, above: int = -1) -> bool:
        """Do :meth:`_revoke_prepared` for the other sessions that hold more than ``above`` bytes of grants.

        Their clients are asked for grants only after that. Return True if any was revoked.
        """
        others = [each for each in self.by_id.values() if each.granted_bytes > above and each is not asking]
        return sum(self._revoke_prepared(session) for session in others) > 0

    def _recall(self, asking: Session, chunk: int) -> None:
        """Ask other sessions for idle grants, as the module's text says, so that one chunk more can be granted."""
        now = self._clock()
        wanted = 2 * chunk  # a share grows by less than what comes back
        others = [s for s in self.by_id.values() if s.granted_bytes and not s.closed and s is not asking]
        for session in sorted(others, key=lambda s: -s.granted_bytes):
            if wanted <= 0:
                return
            if 0 <= now - session.recalled_ms < RECALL_AGAIN_MS:
                continue
            asked = min(wanted, session.granted_bytes)
            if not session.silent:
                wanted -= asked
            session.recalled_ms = now
            session.silent = True
            self.recall(session, asked)

    # -- pins ---------------------------------------------------------------------------------

    def pin(self, session: Session, offset: int, chunk: int) -> int:
        """Pin a chunk for a session. Return the pin's id; 0 if the ledger has no line for it, or its share is used."""
        if len(session.grants) + len(session.pins) >= FAIR * self._ledger.free_holds:
            return 0
        left = self.pinned_bytes_max - self.pinned_bytes - chunk
        if self.pinned_bytes and session.pinned_bytes + chunk > FAIR * left:
            return 0
        number = self._allocate_id()
        line = self._ledger.add_hold(number, session.session, offset, chunk, PIN)
        if line < 0:
            return 0
        self._space.hold(offset - self._data)
        self._note_pin(session, number, offset, chunk, line)
        return number

    def pin_many(self, session: Session, offsets: Sequence[int], chunks: Sequence[int]) -> Sequence[int]:
        """Do :meth:`pin` for many allocated chunks if all of them may be pinned. Return the pins' ids.

        None, with nothing changed, if there may be no room for one of them. O(chunks).
        """
        count, total = len(offsets), sum(chunks)
        if len(session.grants) + len(session.pins) + count > FAIR * (self._ledger.free_holds - count):
            return ()
        if session.pinned_bytes + total > FAIR * (self.pinned_bytes_max - self.pinned_bytes - total):
            return ()
        first = self._next_id + 1
        self._next_id += count
        ids = range(first, first + count)
        lines = self._ledger.add_holds(first, session.session, offsets, chunks, PIN)
        self._space.hold(*[offset - self._data for offset in offsets], known=True)
        session.pins.update(zip(ids, zip(offsets, chunks, lines)))
        session.pinned_bytes += total
        self.pinned_bytes += total
        return ids

    def _note_pin(self, session: Session, number: int, offset: int, chunk: int, line: int) -> None:
        session.pins[number] = (offset, chunk, line)
        session.pinned_bytes += chunk
        self.pinned_bytes += chunk

    def unpin(self, session: Session, pins: Sequence[int]) -> int:
        """Release pins. Ignore unknown ids; return the number of known ones."""
        self._apply_pending()
        pop, data = session.pins.pop, self._data
        ended = [pin for number in pins if (pin := pop(number, None)) is not None]
        total = sum([chunk for _, chunk, _ in ended])
        session.pinned_bytes -= total
        self.pinned_bytes -= total
        self._ledger.end_holds([line for _, _, line in ended])
        self._space.unhold(*[offset - data for offset, _, _ in ended])
        return len(ended)

    def unpin_for(self, session: Session, pins: Sequence[int]) -> int:
        """Release pins of a session, or of closed ones of its process, which they outlast. Return how many are known.

        The pins of a session that lives are released by it alone: one process may be the relay of many clients.
        O(pins), and O(sessions + pins of the process's closed sessions) if one is not the session's own.
        """
        left = set(pins).difference(session.pins)
        known = self.unpin(session, pins)
        if left:
            process = session.pid, session.started
            for each in self.by_id.values():
                if each.closed and (each.pid, each.started) == process and (found := each.pins.keys() & left):
                    known += self.unpin(each, sorted(found))
                    left -= found
        return known


def power_below(size: int) -> int:
    """Return the greatest power of two that is not above ``size``; ``size`` if that is not positive."""
    return 1 << size.bit_length() - 1 if size > 0 else size

"""A server process's session with its worker, and the arena that it reads.

Exchanges block the process's loop, for microseconds. A worker that does not answer costs ``WORKER_DEADLINE_S`` once.
Then the session counts as down, and a thread tries to make another: a stopped worker accepts connections and answers
none of them, and in the loop each try would cost all clients that long. Reads need no session and go on meanwhile. The
worker's successor has the same arena; where the arena is closed, the process ends with it.

A STORE outlives a silence (``stream_put.py``): it blocks nobody, and its client knows best how long it can wait. So
with ``parks`` the session lives on for ``SILENCE_S``, and all else fails at once from ``WORKER_DEADLINE_S`` on.

A worker that goes on carries out what it has been sent. A client may have given up a value meanwhile, and have put a
newer one elsewhere. But what a session has asked for that has ended, the worker leaves alone. So the session ends with
any other mutation that is given up, and as soon as such a client has gone.
"""

from __future__ import annotations

import enum
import logging
import random
import threading
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Final, Protocol

from ..arena.layout import ENTRY_LARGE, PINNED_FLAGS
from ..arena.namespaces import names_in
from ..arena.reader import ArenaReader, Located, Unsettled
from ..arena.sessions import PINNED_SHARE
from ..cluster.lookup import ASK_OWNER, miss_status, previous_status
from ..constants import DEFAULT_NAMESPACE
from ..errors import SegmentError, TransportError
from ..ipc.arena_lister import Lister
from ..ipc.session import WorkerSession
from ..net.allowance import at_most
from ..net.channel import Refused
from ..net.peer import PeerLoop
from ..rpc import batches
from ..wire import messages as M
from ..wire.group_messages import Group
from ..wire.keep_messages import Keep
from ..wire.messages import Status
from ..wire.shard_set import FROZEN

log = logging.getLogger("simm.server.stream")

#: A worker that is silent for so long counts as stopped. With ten runnable processes for each core, one that lives may
#: be silent for a second. Shorter than the clients' default deadline, so that they get an answer.
WORKER_DEADLINE_S: Final = 2.0
#: STOREs wait for a worker that is silent for so long, less than STALL_S. Then they fail at once, as each would cost a
#: client's deadline while a worker is stopped for minutes.
SILENCE_S: Final = 10.0
#: While STOREs wait, the keeper looks for answers so often.
LOOK_S: Final = 0.02
#: Requests that change nothing but by what their answers bring.
HARMLESS: Final = (M.Exists, M.Locate, M.Namespace, M.Grant)
RETRY_S: Final = (0.05, 1.0)
#: Values that all clients of a stream together may have in their leases.
LEASED_KEYS_MAX: Final = 65_536
#: A client that asks for nothing for so long loses its pins, seconds.
LEASE_S: Final = 60.0
#: Numbers of namespaces that a process remembers.
NUMBERS_MAX: Final = 1024


class State(enum.Enum):
    """Where the keeper is with its session."""

    #: Without a session; it makes one when the backoff is over.
    DOWN = enum.auto()
    #: A thread makes a session.
    CONNECTING = enum.auto()
    #: The session answered last time.
    UP = enum.auto()


class Parked(Protocol):
    """A STORE that waits for the worker."""

    def gave_up(self) -> bool:
        """Return True if its client has gone, and the worker might still store a value of it."""

    def resume(self) -> None:
        """Go on: the worker has answered, or is given up. It may be parked again."""


class WorkerSessionKeeper:
    """Keeps a session with the worker at ``uds``, and makes another one when it breaks. For one thread, the loop's.

    ``ring``: commit by a ring. The worker polls for it, and would take a core from a stream's transfers.
    ``parks``: STOREs are parked here while the worker is late; see the module.
    """

    def __init__(self, uds: str, *, ring: bool = False, parks: bool = False) -> None:
        assert not (ring and parks)
        self.uds = uds
        self._ring = ring
        self._parks = parks
        self.parked: list[Parked] = []
        self.state = State.DOWN
        #: The session as it was last seen; it may have broken since. None unless the state is UP.
        self.session: WorkerSession | None = None
        #: The arena, from the first session on. Later ones have the same reader: pins, grants in flight and memory that
        #: is registered may outlive the worker, and each would keep a mapping of its own of the same arena.
        self.reader: ArenaReader | None = None
        #: What the thread made, and the thread.
        self._made: WorkerSession | None = None
        self._maker: threading.Thread | None = None
        self._retry_at = 0.0
        self._retry_s = RETRY_S[0]
        self._lister: Lister | None = None
        self._down_since = time.monotonic()
        #: Ids of namespaces by name.
        self._numbers: dict[str, int] = {}

    @property
    def down_s(self) -> float:
        """Return for how long there has been no session that answers, seconds; 0 while there is one."""
        session = self.session
        if session is None:
            return time.monotonic() - self._down_since
        return late_s if (late_s := session.late_s) > WORKER_DEADLINE_S else 0.0

    def worker(self) -> WorkerSession | None:
        """Return the session, or None while the worker is down. Only the very first session is waited for."""
        session = self.session
        if session is not None and not session.broken:
            late_s = self._late_s(session) if session.channel.late else 0.0
            if not session.broken:
                return session if late_s <= WORKER_DEADLINE_S else None
        if session is not None and self.session is session:
            self._give_up(session, "broken")
        now = time.monotonic()
        if self.state is State.CONNECTING:
            if self._maker is not None and self._maker.is_alive():
                return None
            self._maker = None
            self.state = State.DOWN
            self._retry_at = now + self._retry_s * random.uniform(0.5, 1.0)
            self._retry_s = min(RETRY_S[1], self._retry_s * 2)
        elif now >= self._retry_at:
            if self.reader is None:
                self._make()
                self._retry_at = time.monotonic() + RETRY_S[1]
            else:
                self.state = State.CONNECTING
                self._maker = threading.Thread(target=self._make, name="simm-worker-session", daemon=True)
                self._maker.start()
                return None
        made, self._made = self._made, None
        if made is not None and made.broken:
            made.close(clean=False)
            return None
        if made is None:
            return None
        if self.reader is not None and self.reader.files == made.reader.files:
            made.read_by(self.reader)
        else:
            # Page faults in the middle of transfers halve their speed. They are taken ahead, with the GIL released.
            threading.Thread(target=_populate, args=(made.reader,), name="simm-populate", daemon=True).start()
            self._numbers.clear()
            self._lister = None
        if self._parks:
            made.outlive_silence()
        self.session, self.reader = made, made.reader
        self.state = State.UP
        self._retry_s = RETRY_S[0]
        self._retry_at = 0.0
        return made

    def _late_s(self, session: WorkerSession) -> float:
        """Return for how long the worker has been late now; break the session if that is too long."""
        session.look_for_late()
        late_s = session.late_s
        if late_s > SILENCE_S and not session.broken:
            self._give_up(session, f"the worker has been silent for {late_s:.1f} s")
        return late_s

    def _give_up(self, session: WorkerSession, why: str) -> None:
        """End the session at once: before a client is told that what it wants is not done."""
        session.give_up(why)
        session.close(clean=False)
        if self.session is session:
            self.session = None
            self.state = State.DOWN
            self._down_since = time.monotonic()

    def is_late(self) -> bool:
        """Return whether the session lives, and the worker has not answered all that it should have."""
        session = self.session
        if session is None or session.broken or not session.channel.late:
            return False
        return self._late_s(session) > 0.0 and not session.broken

    def park(self, store: Parked, loop: PeerLoop) -> None:
        """Resume a STORE when the worker has answered all, or is given up."""
        if not self.parked:
            loop.call_later(LOOK_S, partial(self._look, loop))
        self.parked.append(store)

    def _look(self, loop: PeerLoop) -> None:
        session = self.session
        if session is not None and self.is_late():
            if not any(each.gave_up() for each in self.parked):
                loop.call_later(LOOK_S, partial(self._look, loop))
                return
            self._give_up(session, "a client has given up a value that the silent worker may have")
        parked, self.parked = self.parked, []
        for each in parked:
            each.resume()

    def _make(self) -> None:
        """Make a session and leave it in ``_made``; None there if it fails."""
        try:
            self._made = WorkerSession(
                self.uds, DEFAULT_NAMESPACE, WORKER_DEADLINE_S, role=M.Role.STREAM, ring=self._ring
            )  # fmt: skip
        except (TransportError, SegmentError) as exc:
            log.warning("worker at %s: %s", self.uds, exc)

    def arena(self) -> ArenaReader | None:
        """Return the arena, whether its worker answers or not; None before the first session."""
        if self.reader is None:
            self.worker()
        return self.reader

    def is_of(self, cluster: int) -> bool:
        """Return True if the arena may have entries of this cluster, and has none of another one."""
        reader = self.arena()
        return reader is None or reader.cluster in (0, cluster)

    def close(self) -> None:
        """End the session."""
        if self._maker is not None:
            self._maker.join(2 * WORKER_DEADLINE_S)
        for session in (self.session, self._made):
            if session is not None:
                session.close()

    def maintain(self) -> int:
        """Maintain the session; call it about ten times a second. Return the bytes of grants recalled since."""
        session = self.worker()
        try:
            return session.maintain() if session is not None and not session.channel.late else 0
        except TransportError:
            return 0

    # -- exchanges --------------------------------------------------------------------------------

    def exchange(self, msg: Any) -> Any:
        """Make one exchange. Raises Refused with the worker's status, or with UNAVAILABLE if it is down."""
        session = self.worker()
        if session is None:
            raise Refused(Status.UNAVAILABLE, "the worker is down")
        try:
            if not session.channel.late:
                return session.exchange(msg)
            with at_most(WORKER_DEADLINE_S - session.late_s):
                return session.exchange(msg)
        except Refused:
            raise
        except TransportError as exc:
            log.warning("%s: %s", type(msg).__name__, exc)
            if not isinstance(msg, HARMLESS):
                self._give_up(session, "a mutation was given up")
            raise Refused(Status.UNAVAILABLE, str(exc)) from exc

    def namespace(self, name: str) -> int:
        """Return the id of a namespace in the arena. Raises Refused; with NO_SPACE if there is no room for its name.

        One exchange for each name, and another one after the worker has freed its place: ids outlive workers, and none
        becomes another namespace's.
        """
        number = self._numbers.get(name)
        if number is None or self.reader is None or not self.reader.has_namespace(number):
            answer = self.exchange(M.Namespace(name))
            if not isinstance(answer, M.Done):
                raise Refused(Status.UNAVAILABLE, "the worker answered NAMESPACE with something else")
            if len(self._numbers) >= NUMBERS_MAX:  # clients may name any number of them, one after the other
                has = self.reader.has_namespace if self.reader is not None else lambda _: False
                self._numbers = {each: at for each, at in self._numbers.items() if has(at)}
            number = self._numbers[name] = answer.items
        return number

    def names(self) -> set[str]:
        """Return the names of the arena's namespaces, as far as there is one."""
        reader = self.reader
        return set() if reader is None else names_in(reader.words, reader.geometry.names_offset // 8)

    def options_of(self, name: str, *, bound: bool) -> int:
        """Return COMMIT's options for the values of a client that has named this namespace. Raises Refused.

        ``bound``: the client may use no other. The values of one that may go with those of the session where there is
        no room for another name, or the name is none.
        """
        if name == DEFAULT_NAMESPACE and not bound:
            return 0  # the session's own
        try:
            return (self.namespace(name) + 1) << M.NAMESPACE_SHIFT | (M.BOUND if bound else 0)
        except Refused as exc:
            # Not where namespaces have epochs: with another one's epochs the values would outlive their own.
            plain = self.reader is not None and not self.reader.has_epochs
            if not bound and plain and exc.status in (Status.NO_SPACE, Status.BAD_REQUEST):
                return 0
            raise

    def statuses(self, msg: M.Exists | M.Delete | M.DeleteSized | Keep | Group) -> list[int]:
        """Return a status for each key or group of the message; UNAVAILABLE for all if the worker is down."""
        items: list[Any] = msg.digests if isinstance(msg, M.Exists | M.Delete | Keep) else msg[0]
        count = len(items)
        try:
            answer = self.exchange(msg)
        except Refused as exc:
            return [exc.status] * count
        if not isinstance(answer, M.Statuses) or len(answer.statuses) != count:
            log.error("the worker answered %s with %s", type(msg).__name__, type(answer).__name__)
            return [Status.UNAVAILABLE] * count
        return answer.statuses

    def resolve_misses(self, digests: list[bytes]) -> list[tuple[int, int]]:
        """Return (status, epoch with PREVIOUS) for each; UNAVAILABLE where the worker cannot be asked."""
        found: list[tuple[int, int]] = []
        for asked in batches(digests):
            status = Status.UNAVAILABLE
            try:
                answer = self.exchange(M.Locate(0, asked))
                if isinstance(answer, M.Located) and len(answer.entries) == len(asked):
                    found += [(entry[0], entry[4] if entry[0] == Status.PREVIOUS else 0) for entry in answer.entries]
                    continue
                log.error("the worker answered LOCATE with %s", type(answer).__name__)
            except Refused as exc:
                status = exc.status
            found += [(status, 0)] * len(asked)
        return found

    def lister(self) -> Lister:
        """Return a lister of the arena. Raises Refused if the worker is down, SegmentError if its arena is gone."""
        reader = self.arena()
        if reader is None:
            raise Refused(Status.UNAVAILABLE, "the worker is down")
        if self._lister is None or self._lister.reader is not reader:
            self._lister = Lister(reader)
        return self._lister


_OK: Final = int(Status.OK)
#: What :func:`locate` says of a value that a lease does not have.
_UNKNOWN: Final = (int(Status.NOT_FOUND), 0, None)


class Leased:
    """A value of a lease: a version of an entry, and the pin that keeps it, if it has one."""

    __slots__ = ("digest", "found", "pin", "reader", "session")

    def __init__(self, digest: bytes, found: Located, reader: ArenaReader) -> None:
        self.digest = digest
        self.found = found
        self.reader = reader
        #: The pin's id, and the session that has it; 0 and None without one.
        self.pin = 0
        self.session: WorkerSession | None = None

    def is_whole(self) -> bool:
        """Return True if bytes that were read until now are of this version. Without a pin its slot tells."""
        found = self.found
        return self.pin != 0 or self.reader.confirm_previous(self.digest, found.slot, found.seq)


class Lease:
    """The values that one client has pinned by its connection, which ends them."""

    __slots__ = ("bytes", "last", "used_at", "values")

    def __init__(self) -> None:
        self.values: dict[int, Leased] = {}
        #: Of pinned values.
        self.bytes = 0
        self.last = 0
        self.used_at = time.monotonic()


class Leases:
    """The values that a stream pins for its clients, each of whom is on another host and holds no pin by itself.

    A lease ends with its connection. A client that is stopped keeps its connection: so a lease that is not used for
    LEASE_S loses its pins. Its values stay readable as long as their slots do not change; then they are misses.

    All leases together pin at most what an arena may have pinned, and none more than is left for the others. What has
    no room is a value of the lease without a pin. The worker's bound (``arena/sessions.py``) holds in addition.

    Pins outlive the worker: they stay with the session that got them, which is not released while it has any.
    """

    def __init__(self, keeper: WorkerSessionKeeper) -> None:
        self._keeper = keeper
        #: Of all leases: values, and bytes of those that are pinned.
        self.keys = 0
        self.bytes = 0

    def take(
        self, lease: Lease, digests: Sequence[bytes], looked: Sequence[tuple[int, int, Located | None]], *,
        previous: bool,
    ) -> list[tuple[int, int, int, int, int, int]]:  # fmt: skip
        """Add values that have been found to a lease, pinned as far as there is room; return PINNED's entries.

        ``looked``: (status, epoch with PREVIOUS, location or None) for each. One exchange with the worker.
        """
        lease.used_at = time.monotonic()
        reader = self._keeper.arena()
        entries: list[tuple[int, int, int, int, int, int]] = []
        taken: list[Leased] = []
        values, last = lease.values, lease.last
        most = 0 if reader is None else min(LEASED_KEYS_MAX, reader.geometry.hold_lines // 4)
        for digest, (status, epoch, found) in zip(digests, looked):
            if found is None or reader is None:
                entries.append((status, 0, 0, 0, epoch, 0))
                continue
            _, seq, _, length, crc, flags = found
            if flags & ~PINNED_FLAGS:
                entries.append((Status.NOT_FOUND, flags & ENTRY_LARGE, 0, 0, 0, 0))  # its parts can be pinned
            elif len(values) >= most - self.keys:
                entries.append((Status.NO_SPACE, 0, 0, 0, 0, 0))
            else:
                last += 1
                values[last] = leased = Leased(digest, found, reader)
                self.keys += 1
                taken.append(leased)
                entries.append((_OK, flags, length, crc, last, seq))
        lease.last = last
        if taken and reader is not None:
            self._pin(lease, taken, reader, previous)
        return entries

    def _pin(self, lease: Lease, taken: Sequence[Leased], reader: ArenaReader, previous: bool) -> None:
        """Pin values as far as the lease's share goes."""
        session = self._keeper.worker()
        if session is None or session.channel.late or session.reader is not reader:
            return
        room = (reader.geometry.data_bytes // PINNED_SHARE - self.bytes - lease.bytes) // 2
        wanted: list[Leased] = []
        for leased in taken:
            room -= leased.found.length
            if room < 0:
                break
            wanted.append(leased)
        if not wanted:
            return
        try:
            session.begin_copy()
        except TransportError:
            return
        try:
            how = M.LOCATE_PREVIOUS if previous else 0
            entries = session.pin_many([leased.digest for leased in wanted], how)
            confirm, begin_copy = reader.confirm_previous, session.begin_copy
            for leased, (status, _flags, _length, _crc, offset, pin) in zip(wanted, entries):
                if status != _OK:
                    continue
                slot, seq, place, length, _, _ = leased.found
                # The slot has not changed since the entry was found, so it is this version that was pinned in between.
                if offset == place and confirm(leased.digest, slot, seq):
                    begin_copy()
                    leased.pin, leased.session = pin, session
                    lease.bytes += length
                    self.bytes += length
                else:
                    session.unpin_later(pin)
        except TransportError as exc:
            log.warning("pins for a client: %s", exc)
        finally:
            session.end_copy()

    def release(self, lease: Lease, numbers: Sequence[int]) -> int:
        """Take values out of a lease. Ignore unknown numbers; return the number of known ones."""
        lease.used_at = time.monotonic()
        known = 0
        for number in numbers:
            leased = lease.values.pop(number, None)
            if leased is not None:
                self._unpin(lease, leased)
                self.keys -= 1
                known += 1
        return known

    @staticmethod
    def held(
        lease: Lease | None, numbers: Sequence[int], now: float
    ) -> tuple[list[Leased | None], list[tuple[int, int, Located | None]], list[memoryview | None]]:
        """Return the values with these numbers: what they are, what :func:`locate` would say of them, their bytes.

        The lease counts as used ``now``.
        """
        known: dict[int, Leased] = {}
        if lease is not None:
            known, lease.used_at = lease.values, now
        leased = [known.get(number) for number in numbers]
        looked: list[tuple[int, int, Located | None]] = []
        values: list[memoryview | None] = []
        for each in leased:
            looked.append(_UNKNOWN if each is None else (_OK, 0, each.found))
            values.append(None if each is None else each.reader.value(each.found))
        return leased, looked, values

    def lapse(self, lease: Lease) -> None:
        """Unpin the values of a lease, which keeps them. None of them is being sent."""
        if lease.bytes:
            for leased in lease.values.values():
                self._unpin(lease, leased)

    def _unpin(self, lease: Lease, leased: Leased) -> None:
        session, leased.session = leased.session, None
        if session is not None:
            session.unpin_later(leased.pin)
            session.end_copy()
            leased.pin = 0
            lease.bytes -= leased.found.length
            self.bytes -= leased.found.length


#: Bytes to send: (position of the key, digest, location, the bytes of the value or of a range of it).
Part = tuple[int, bytes, Located, "memoryview | bytes"]


class Sending:
    """A FETCHED in flight: what is still to send, verdicts so far."""

    __slots__ = (
        "at", "bound", "current", "entries", "leased", "moving", "previous", "request_id", "size", "todo", "verdicts",
    )  # fmt: skip

    def __init__(
        self, request_id: int, todo: Iterable[Part], entries: Sequence[tuple[int, int, int, int]], size: int,
        *, previous: bool, bound: bool, leased: Sequence[Leased | None] | None, moving: bool,
    ) -> None:  # fmt: skip
        #: For a mover: values of old epochs are judged where they come to.
        self.moving = moving
        #: What FETCHED says, and the bytes of all values.
        self.entries, self.size = entries, size
        self.request_id = request_id
        self.previous = previous
        #: By position, for FETCH_PINNED.
        self.leased = leased
        #: The client may see no other namespace's bytes, whatever their verdict: they are copied and judged first.
        self.bound = bound
        #: Bytes of the current part that were handed to the kernel.
        self.at = 0
        self.todo = iter(todo)
        self.verdicts = [Status.OK] * len(entries)
        self.current: Part | None = None


def locate_many(
    reader: ArenaReader, digests: Sequence[bytes], previous: bool
) -> list[tuple[int, int, Located | None]]:
    """Do :meth:`locate` for each digest. Plain hits take the fewest steps."""
    looked: list[tuple[int, int, Located | None]] = []
    find, shard_word, visited = reader.locate, reader.shard_word, reader.visited
    for digest in digests:
        try:
            found = find(digest)
        except Unsettled:
            found = None
        if found is not None and found.length and (0 < shard_word(digest) < FROZEN):
            visited[found.slot] = 1
            looked.append((_OK, 0, found))
        else:
            looked.append(locate(reader, digest, previous))
    return looked


def locate(
    reader: ArenaReader, digest: bytes, previous: bool, *, asked: bool = False
) -> tuple[int, int, Located | None]:
    """Return (status, 0, location); the status is ASK_OWNER if the worker must be asked, unless it was ``asked``."""
    for _ in range(4):
        try:
            found = reader.locate(digest)
        except Unsettled:
            time.sleep(0.0005)
            continue
        if found is not None and not found.length:
            return Status.BUSY, 0, None  # a stray store, as no value is empty: a client would end the connection for it
        word = reader.shard_word(digest)
        if previous:
            if found is None or not word:
                return previous_status(word), 0, None
        elif found is None or not 0 < word < FROZEN:
            return miss_status(word, asked=asked), 0, None
        reader.touch(found.slot)
        return Status.OK, 0, found
    # The worker was interrupted while it wrote the slot, for longer than this waits. It answers when it goes on.
    return Status.BUSY if asked or previous else ASK_OWNER, 0, None


def _populate(reader: ArenaReader) -> None:
    while reader.populate_some():
        pass

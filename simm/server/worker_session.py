"""A server process's session with its worker, and the arena that it reads.

Exchanges block the process's loop, for microseconds. A worker that does not answer costs ``WORKER_DEADLINE_S`` once.
Then the session counts as down, and a thread tries to make another: a stopped worker accepts connections and answers
none of them, and in the loop each try would cost all clients that long. Reads need no session and go on meanwhile. The
worker's successor has the same arena; where the arena is closed, the process ends with it.

A STORE outlives a silence (``stream_put.py``): it blocks nobody, and its client knows best how long it can wait. So
with ``parks`` the session lives on for ``SILENCE_S``, and all else fails at once from ``WORKER_DEADLINE_S`` on.

A worker that goes on carries out what it has been sent. A client may have given up a value meanwhile, and have put a
newer one elsewhere. So a mutation is withdrawn as soon as its client has gone (``ipc/commit_ring.py``), and the session
lives on for all others. Where that cannot be, the session ends: the worker carries out nothing more of it then.

Whatever waits for this worker looks at the clients of all STOREs that it may still carry out, every LOOK_S. What is
left is the time from a hang-up until the keeper sees it: these 5 ms, and while the process itself does not run.

A silent worker's socket fills up with what was withdrawn. A request that would not fit is not begun: a send that is cut
off by its deadline would end the session. It waits for room as it would for an answer, and is refused then.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import random
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, Protocol

from ..arena.namespaces import names_in
from ..arena.reader import ArenaReader
from ..constants import DEFAULT_NAMESPACE, OTHERS_NAMESPACE
from ..errors import DeadlineError, NotSentError, SegmentError, TransportError
from ..ipc.answer_wait import HungUp, look_for_late, until_answered, until_room, withdraw
from ..ipc.arena_lister import Lister
from ..ipc.commit_ring import HEAD, RING_GRANTS
from ..ipc.grant_pool import GrantTuple
from ..ipc.session import WorkerSession
from ..net.allowance import LOOK_S, at_most
from ..net.channel import Refused
from ..net.peer import Peer, PeerLoop
from ..rpc import CODECS, batches
from ..wire import messages as M
from ..wire.epoch_messages import ForNamespace, for_namespace
from ..wire.group_messages import Group
from ..wire.keep_messages import Keep
from ..wire.messages import Status

log = logging.getLogger("simm.server.stream")

#: A worker that is silent for so long counts as stopped. With ten runnable processes for each core, one that lives may
#: be silent for a second. Shorter than the clients' default deadline, so that they get an answer.
WORKER_DEADLINE_S: Final = 2.0
#: STOREs wait for a worker that is silent for so long, less than STALL_S. Then they fail at once, as each would cost a
#: client's deadline while a worker is stopped for minutes.
SILENCE_S: Final = 10.0
#: Grants that are returned by a ring are waited for so long.
RETURN_S: Final = 0.02
#: Requests that change nothing but by what their answers bring.
HARMLESS: Final = (M.Exists, M.Locate, M.Namespace, M.Grant)
RETRY_S: Final = (0.05, 1.0)
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


class Storing(Protocol):
    """A STORE, as the keeper sees it."""

    def look(self) -> None:
        """Withdraw what the worker might still store of it, if its client has gone."""

    def is_answered(self) -> bool:
        """Return whether nothing is left but to take the answers to its commits, which have come."""

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
        self.parked: list[Storing] = []
        #: STOREs with commits that the worker has not answered.
        self.storing: set[Storing] = set()
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
        #: Of a ring: the first request that was withdrawn and has not been answered, and since when it is waited for.
        self._withdrawn: tuple[int, float] | None = None

    @property
    def down_s(self) -> float:
        """Return for how long there has been no session that answers, seconds; 0 while there is one."""
        session = self.session
        if session is None:
            return time.monotonic() - self._down_since
        return late_s if (late_s := session.channel.late_s) > WORKER_DEADLINE_S else 0.0

    def worker(self) -> WorkerSession | None:
        """Return the session, or None while the worker is down. Only the very first session is waited for."""
        session = self.session
        if session is not None and not session.broken:
            if self._silent_s(session) > WORKER_DEADLINE_S:
                self.give_up(session, "the worker is silent")
            late_s = self._late_s(session) if session.channel.late else 0.0
            if not session.broken:
                return session if late_s <= WORKER_DEADLINE_S else None
        if session is not None and self.session is session:
            self.give_up(session, "broken")
        now = time.monotonic()
        if self.state is State.CONNECTING:
            if self._maker is not None and self._maker.is_alive():
                return None
            self._back_off(now)
        elif now >= self._retry_at:
            if self.reader is None:
                self._make()
                self._retry_at = time.monotonic() + RETRY_S[1]
            else:
                self.state = State.CONNECTING
                self._maker = threading.Thread(target=self._make, name="simm-worker-session", daemon=True)
                try:
                    self._maker.start()
                except RuntimeError as exc:  # no more threads: reads go on, and the next try is later
                    log.warning("worker at %s: %s", self.uds, exc)
                    self._back_off(now)
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
            with contextlib.suppress(RuntimeError):  # no more threads: slower at first
                threading.Thread(target=_populate, args=(made.reader,), name="simm-populate", daemon=True).start()
            self._numbers.clear()
            self._lister = None
        self._withdrawn = None
        self.session, self.reader = made, made.reader
        self.state = State.UP
        self._retry_s = RETRY_S[0]
        self._retry_at = 0.0
        return made

    def _back_off(self, now: float) -> None:
        """Try again later, as the last try has brought no session."""
        self._maker = None
        self.state = State.DOWN
        self._retry_at = now + self._retry_s * random.uniform(0.5, 1.0)
        self._retry_s = min(RETRY_S[1], self._retry_s * 2)

    def _silent_s(self, session: WorkerSession) -> float:
        """Return for how long a withdrawn request in the ring has not been answered; 0 without one.

        Clients that hang up one after the other would else keep the loop waiting for as long as the worker is stopped.
        """
        if self._withdrawn is None or session.ring is None:
            return 0.0
        ticket, since = self._withdrawn
        if session.ring.words[HEAD] > ticket:
            self._withdrawn = None
            return 0.0
        return time.monotonic() - since

    def _late_s(self, session: WorkerSession) -> float:
        """Return for how long the worker has been late now; break the session if that is too long."""
        look_for_late(session)
        late_s = session.channel.late_s
        if late_s > SILENCE_S and not session.broken:
            self.give_up(session, f"the worker has been silent for {late_s:.1f} s")
        return late_s

    def give_up(self, session: WorkerSession, why: str) -> None:
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

    def park(self, store: Storing, loop: PeerLoop) -> None:
        """Resume a STORE when the worker has answered all, or is given up."""
        if not self.parked:
            loop.call_later(LOOK_S, partial(self._look, loop))
        self.parked.append(store)

    def _look(self, loop: PeerLoop) -> None:
        session, parked = self.session, self.parked
        if session is not None and self.is_late():
            self._look_at_stores()
            if not session.broken:
                answered: list[Storing] = []
                self.parked = []
                for each in parked:
                    (answered if each.is_answered() else self.parked).append(each)
                if self.parked:
                    loop.call_later(LOOK_S, partial(self._look, loop))
                for each in answered:
                    each.resume()
                return
        if session is not None and session.broken:
            self.give_up(session, session.broken)  # before anybody hears of it
        self.parked = []
        for each in parked:
            each.resume()

    def _look_at_stores(self) -> None:
        for each in list(self.storing):
            each.look()

    def _make(self) -> None:
        """Make a session and leave it in ``_made``; None there if it fails."""
        try:
            made = WorkerSession(self.uds, DEFAULT_NAMESPACE, WORKER_DEADLINE_S, role=M.Role.STREAM, ring=self._ring)
            try:
                if self._parks:
                    made.outlive_silence(self._look_at_stores)
            except BaseException:
                made.close(clean=False)
                raise
            self._made = made
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

    def exchange(self, msg: Any, peer: Peer | None = None, cluster: int = 0) -> Any:
        """Make one exchange. Raises Refused with the worker's status, or with UNAVAILABLE if it is down.

        ``peer``: the client of a mutation. ``cluster``: of the map that led it here, 0 for any. Raises Refused with
        WRONG_OWNER unless the arena is of that cluster: one that has none yet may be of another one before the request
        arrives. The session is taken before the look, and ends where the arena leaves a cluster.
        """
        if peer is not None and peer.hung_up():
            raise Refused(Status.UNAVAILABLE, "the client hung up while its request waited")
        harmless = isinstance(msg, HARMLESS)
        try:
            session = self.worker() if harmless else self.worker_for(peer)
            if session is None:
                raise Refused(Status.UNAVAILABLE, "the worker is down")
            if cluster and self.reader is not None and self.reader.cluster != cluster:
                raise Refused(Status.WRONG_OWNER, f"the arena is not of cluster {cluster:016x}")
            with at_most(WORKER_DEADLINE_S - max(session.channel.late_s, self._silent_s(session))):
                if not harmless:
                    return self.mutate(session, msg, peer)
                self._wait_room(session, None)
                return session.exchange(msg)
        except Refused:
            raise
        except TransportError as exc:
            kind = CODECS[msg.opcode].cls if isinstance(msg, ForNamespace) else type(msg)
            log.warning("%s: %s", kind.__name__, exc)
            raise Refused(Status.UNAVAILABLE, str(exc)) from exc

    def mutate(self, session: WorkerSession, msg: Any, peer: Peer | None) -> Any:
        """Let the worker carry out a mutation, as long as its client waits, and return the answer.

        Raises TransportError, Refused. The worker then does not carry it out any more.
        """
        since = time.monotonic()
        self._wait_room(session, peer)
        ticket = None
        try:
            ticket = session.submit(msg)
            self._wait_answered(session, ticket, peer)
            return session.answer(msg, ticket)
        except Refused:
            raise
        except NotSentError:
            raise
        except TransportError as exc:
            if ticket is None or (session.ring is not None and not isinstance(exc, HungUp)):
                # By ring, each later request to a worker that is silent would cost all clients that long.
                self.give_up(session, "a mutation was given up")
            else:
                self.withdraw(session, [ticket], since)
                self._withdrawn = self._withdrawn or (ticket, since)
            raise

    def worker_for(self, peer: Peer | None) -> WorkerSession | None:
        """Return :meth:`worker` when a mutation can be sent: its ring may be full of withdrawn ones.

        Raises HungUp if the client, ``peer``, hangs up meanwhile.
        """
        session = self.worker()
        if session is None or session.ring is None or not session.ring.is_full:
            return session
        try:
            self._wait_answered(session, session.ring.done, peer)
        except HungUp:
            raise
        except TransportError as exc:
            self.give_up(session, str(exc))
            return None
        if peer is not None and peer.hung_up():
            raise HungUp("its client hung up while the worker was late")
        return session

    def return_grants(self, session: WorkerSession, grants: Sequence[GrantTuple]) -> None:
        """Return grants to the worker. By ring with a short wait only; while that is full they are kept for later."""
        ring = session.ring
        try:
            for at in range(0, len(grants), RING_GRANTS):
                part = grants[at : at + RING_GRANTS]
                numbers = [number for number, _, _ in part]
                if ring is None:
                    session.return_grants(numbers)
                elif ring.is_full:
                    session.pool.add(part)
                else:
                    ticket = session.submit(M.ReturnGrants(numbers))
                    with contextlib.suppress(DeadlineError), at_most(RETURN_S):
                        self._wait_answered(session, ticket, None)
                    session.disown(ticket)
        except NotSentError:
            session.pool.add(grants[at:])
        except TransportError as exc:
            log.warning("grants not returned: %s", exc)

    def _wait_answered(self, session: WorkerSession, ticket: int, peer: Peer | None) -> None:
        """Wait for the answer as long as the client does; withdraw what STOREs wait for whose clients have gone."""
        until_answered(session, ticket, _descriptor(peer), self._look_at_stores)

    def _wait_room(self, session: WorkerSession, peer: Peer | None) -> None:
        """Wait until the worker takes a request, as long as the client does. Raises HungUp, NotSentError."""
        if self._parks and not session.channel.has_room():
            until_room(session, _descriptor(peer), self._look_at_stores)

    def withdraw(self, session: WorkerSession, tickets: Sequence[int], since: float) -> None:
        """Withdraw mutations of a client that has gone, which it has waited for ``since`` then; or end the session."""
        if session.broken or not withdraw(session, tickets, since):
            session.give_up("a mutation was given up")  # worker() closes it: a wait may have its lock

    def namespace(self, name: str) -> int:
        """Return the id of a namespace in the arena. Raises Refused: NO_SPACE or OVER_QUOTA without room for it.

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

        ``bound``: the client may use no other. The values of one that may go with OTHERS_NAMESPACE where there is no
        room for another name, or the name is none.
        """
        if name == DEFAULT_NAMESPACE and not bound:
            return 0  # the session's own
        try:
            return (self.namespace(name) + 1) << M.NAMESPACE_SHIFT | (M.BOUND if bound else 0)
        except Refused as exc:
            # Nothing goes there where namespaces have epochs (arena/namespaces.py).
            plain = self.reader is not None and not self.reader.has_epochs
            if bound or not plain or exc.status not in (Status.NO_SPACE, Status.BAD_REQUEST):
                raise
        return (self.namespace(OTHERS_NAMESPACE) + 1) << M.NAMESPACE_SHIFT

    def statuses(
        self, msg: M.Exists | M.Delete | M.DeleteSized | Keep | Group, peer: Peer | None = None, cluster: int = 0,
        bound_to: str | None = None,
    ) -> list[int]:  # fmt: skip
        """Return a status for each key or group of the message; UNAVAILABLE for all if the worker is down.

        ``peer``, ``cluster``: see :meth:`exchange`. ``bound_to``: the namespace of a client that may touch no other.
        """
        items: list[Any] = msg.digests if isinstance(msg, M.Exists | M.Delete | Keep) else msg[0]
        count = len(items)
        try:
            answer = self.exchange(msg if bound_to is None else for_namespace(bound_to, msg), peer, cluster)
        except Refused as exc:
            return [exc.status] * count
        if not isinstance(answer, M.Statuses) or len(answer.statuses) != count:
            log.error("the worker answered %s with %s", type(msg).__name__, type(answer).__name__)
            if self.session is not None:  # what it answers next may be out of step, too
                self.give_up(self.session, "the worker answered for another number of keys")
            return [Status.UNAVAILABLE] * count
        return answer.statuses

    def resolve_misses(self, digests: list[bytes], how: int = 0) -> list[tuple[int, int]]:
        """Return (status, epoch with PREVIOUS) for each; UNAVAILABLE where the worker cannot be asked.

        ``how``: LOCATE_HIDDEN asks as if nothing were stored for them.
        """
        found: list[tuple[int, int]] = []
        for asked in batches(digests):
            status = Status.UNAVAILABLE
            try:
                answer = self.exchange(M.Locate(how, asked))
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


def _descriptor(peer: Peer | None) -> int:
    return -1 if peer is None or peer.closed else peer.sock.fileno()


def _populate(reader: ArenaReader) -> None:
    while reader.populate_some():
        pass

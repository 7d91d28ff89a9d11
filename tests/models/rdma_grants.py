"""Grants across a network: who may write into a chunk while RDMA connections close and processes die.

There is one chunk, two connections of two clients, one endpoint and one worker. A state:

    chunk        free, published, or granted to a connection (the hold in the worker's ledger), and by which session:
                 the endpoint's present one with the worker, an earlier one (retired), or one of an endpoint that died
    worker       alive or not
    endpoint     alive; dying (its end is known, its queue pairs are there: an injected bug only); dead
    connections  the client's state, what the endpoint knows of the connection's grant, WRITEs in flight, the endpoint's
                 end of each of two queue pairs, and the window that is bound to it

The rules of ``server/rdma_lease.py`` and ``server/rdma_endpoint.py``:

* The worker grants. The endpoint counts a copy in flight, binds a window on each queue pair, and then tells the client.
* The client WRITEs by any queue pair, flushes each, and sends a commit or returns the grant. If a deadline passes, it
  closes its ends; WRITEs that have left are not stopped.
* At a commit or a return, the windows are invalidated, the copy ends, and then the endpoint tells the worker.
* When a connection closes, the endpoint destroys all its queue pairs and then returns its grants.
* When the worker dies, the holds stay, with a session that is now retired. The worker's successor frees them when no
  copy of a retired session is in flight. A commit or a return of such a grant only ends the copy.
* When the endpoint dies, its queue pairs are destroyed before its end is known; the worker (or its successor) frees
  what the endpoint held.

What must not happen: a WRITE that lands in a chunk that is published, or granted to the other connection; and a value
that is published with a WRITE of it in flight. With windows the first holds also where clients are ``rogue``: they
WRITE by an old key at any time, and commit without a flush.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

#: Faults to bug -> what it is, and the options of a model that shows it.
BUGS: Final[dict[str, tuple[str, dict[str, int]]]] = {
    "unflushed": ("a client commits while a WRITE is in flight; no windows", {"windows": 0}),
    "unflushed_windows": ("a client commits while a WRITE is in flight; with windows", {"windows": 1}),
    "one_flush": ("a client flushes one of the two queue pairs by which it wrote", {"windows": 0}),
    "timeout_returns": ("a put that is late returns its grant, and the connection stays", {"windows": 0}),
    "no_invalidate": ("a commit leaves the windows as they are", {"windows": 1, "rogue": 1}),
    "invalidate_late": ("a commit is forwarded first, its windows are invalidated then", {"windows": 1, "rogue": 1}),
    "one_window": ("a commit invalidates the window of one queue pair only", {"windows": 1, "rogue": 1}),
    "return_bound": ("a grant is returned with its windows bound", {"windows": 1, "rogue": 1}),
    "back_first": ("a connection that closes returns its grants before its queue pairs are destroyed", {"windows": 0}),
    "back_first_windows": ("the same with windows", {"windows": 1}),
    "one_link": ("a connection that closes destroys one queue pair of two", {"windows": 0}),
    "death_frees": ("the worker's successor frees the holds of all earlier sessions", {"windows": 0}),
    "copy_late": ("a copy is counted after the client has been told of the grant", {"windows": 0}),
    "copy_ends_early": ("the copy of a connection's grant ends with the session that it came by", {"windows": 1}),
    "ends_before_links": ("the endpoint's end is known before its queue pairs are destroyed", {"windows": 0}),
}

FREE, PUBLISHED, OF_X, OF_Y = 0, 1, 2, 3
PRESENT, RETIRED, ORPHAN = 0, 1, 2
#: The client: no connection, no grant, a grant, a commit sent, closed.
AWAY, IDLE, HOLDS, SENT, CLOSED = 0, 1, 2, 3, 4
#: The endpoint about a grant: none, the worker's answer is in flight, ready, told, commit forwarded, answered.
NONE, ASKED, READY, TOLD, FORWARDED, ANSWERED = 0, 1, 2, 3, 4, 5

FAULTS: Final = {
    "published": "a WRITE landed in a published chunk",
    "other": "a WRITE landed in a chunk that is granted to another connection",
    "unfinished": "a value was published with a WRITE of it in flight",
}


class Connection(NamedTuple):
    """One connection.

    By queue pair: ``fly``: a WRITE is in flight; ``end``: the endpoint's end exists; ``bound``: it has a bound window.
    """

    client: int = AWAY
    grant: int = NONE
    stale: bool = False
    copying: bool = False
    wrote: bool = False
    fly: tuple[bool, bool] = (False, False)
    end: tuple[bool, bool] = (False, False)
    bound: tuple[bool, bool] = (False, False)


class State(NamedTuple):
    """One state of the whole model."""

    chunk: int
    session: int
    worker: bool
    endpoint: int
    connections: tuple[Connection, Connection]


ALIVE, DYING, DEAD = 0, 1, 2
BOTH, NEITHER = (True, True), (False, False)
_FIRST: Final = State(FREE, PRESENT, True, ALIVE, (Connection(), Connection()))


def _put(pair: tuple[bool, bool], at: int, value: bool) -> tuple[bool, bool]:
    return (value, pair[1]) if at == 0 else (pair[0], value)


class GrantModel:
    """The rules, with some bugs injected.

    Args:
        windows: 1 if the endpoint has memory windows.
        rogue: the number of clients that keep no rule.
    """

    def __init__(self, *bugs: str, windows: int = 1, rogue: int = 0) -> None:
        if set(bugs) - BUGS.keys():
            raise ValueError(f"no such bug: {bugs}")
        if rogue and not windows:
            raise ValueError("without windows nothing holds a rogue client back")
        self.bugs = {bug.removesuffix("_windows") for bug in bugs}
        self.windows, self.rogues = bool(windows), rogue

    def initial(self) -> State:
        """Return the first state: everybody lives, nobody has a connection."""
        return _FIRST

    def fault(self, _state: State) -> str:
        """Return "": events are wrong in this model, not states."""
        return ""

    def successors(self, s: State) -> Iterator[tuple[str, State, str]]:
        """Yield (event, state after it, fault or "") for everything that can happen next."""
        yield from self._processes(s)
        for number in (0, 1):
            for event, after, fault in self._connection(s, number):
                yield f"{'xy'[number]}: {event}", after, fault

    # -- worker and endpoint ----------------------------------------------------------------------

    def _processes(self, s: State) -> Iterator[tuple[str, State, str]]:
        held = s.chunk in (OF_X, OF_Y)
        if s.chunk == PUBLISHED and s.worker:
            yield "worker: evicts or deletes", s._replace(chunk=FREE), ""
        if s.chunk == FREE and s.worker:
            yield "worker: publishes a value that came another way", s._replace(chunk=PUBLISHED, session=PRESENT), ""
        if s.worker:
            connections = tuple(self._bereft(conn) for conn in s.connections)
            session = RETIRED if held and s.session == PRESENT else s.session
            yield "worker: dies", s._replace(worker=False, session=session, connections=connections), ""  # type: ignore[arg-type]
        else:
            after = s._replace(worker=True)
            if "death_frees" in self.bugs and held:
                after = after._replace(chunk=FREE, session=PRESENT)
            yield "worker: a successor starts", after, ""
        used = any(conn.copying and conn.stale for conn in s.connections)
        if s.worker and held and s.session == RETIRED and s.endpoint == ALIVE and not used:
            yield "worker: frees what retired sessions held", s._replace(chunk=FREE, session=PRESENT), ""
        if s.worker and held and s.session == ORPHAN:
            yield "worker: frees what a dead endpoint held", s._replace(chunk=FREE, session=PRESENT), ""
        if s.endpoint == ALIVE:
            after = s._replace(session=ORPHAN if held else s.session)
            if "ends_before_links" in self.bugs:
                yield "endpoint: its end is known", after._replace(endpoint=DYING), ""
            else:
                yield "endpoint: dies, its queue pairs destroyed", self._without_queue_pairs(after), ""
        elif s.endpoint == DYING:
            yield "endpoint: its queue pairs are destroyed", self._without_queue_pairs(s), ""
        elif all(conn.client == AWAY for conn in s.connections):
            yield "endpoint: another starts", s._replace(endpoint=ALIVE), ""

    def _bereft(self, conn: Connection) -> Connection:
        """Return a connection as the endpoint sees it after the worker's death."""
        if conn.grant in (NONE, ASKED):
            return conn._replace(grant=NONE)
        copying = conn.copying and "copy_ends_early" not in self.bugs
        return conn._replace(stale=True, copying=copying)

    def _without_queue_pairs(self, s: State) -> State:
        x, y = (Connection(client=AWAY if conn.client in (AWAY, CLOSED) else CLOSED) for conn in s.connections)
        return s._replace(endpoint=DEAD, connections=(x, y))

    # -- a connection -------------------------------------------------------------------------------------

    def _connection(self, s: State, number: int) -> Iterator[tuple[str, State, str]]:
        conn = s.connections[number]
        rogue = number < self.rogues

        def put(conn: Connection, chunk: int = s.chunk, session: int = s.session) -> State:
            connections = (conn, s.connections[1]) if number == 0 else (s.connections[0], conn)
            return s._replace(connections=connections, chunk=chunk, session=session)

        yield from self._wire(s, number, conn)
        if s.endpoint != ALIVE:
            if conn.client == CLOSED and s.endpoint == DEAD:
                yield "client sees that the endpoint has gone", put(Connection()), ""
            return
        # The client.
        if conn.client == AWAY and conn == Connection():
            yield "opens a connection", put(Connection(client=IDLE, end=BOTH)), ""
        if conn.client == HOLDS or (rogue and conn.client in (IDLE, SENT)):
            for link in (0, 1):
                if not conn.fly[link]:
                    after = conn._replace(fly=_put(conn.fly, link, True), wrote=True)
                    yield f"WRITEs by queue pair {link}", put(after), ""
        if conn.client == HOLDS:
            flushed = conn.fly == NEITHER or rogue or "unflushed" in self.bugs
            flushed = flushed or ("one_flush" in self.bugs and not conn.fly[0])
            if flushed and (conn.wrote or rogue):
                yield "sends a commit", put(conn._replace(client=SENT)), ""
            if conn.fly == NEITHER or rogue or "timeout_returns" in self.bugs:
                yield "returns the grant", self._returned(s, number, conn), ""
        if conn.client in (IDLE, HOLDS, SENT):
            yield "closes its connection", put(conn._replace(client=CLOSED)), ""
        # The endpoint.
        if conn.client == IDLE and conn.grant == NONE and s.worker and s.chunk == FREE:
            yield "worker grants the chunk", put(conn._replace(grant=ASKED), chunk=OF_X + number, session=PRESENT), ""
        if conn.grant == ASKED and conn.client != CLOSED:
            copying = "copy_late" not in self.bugs
            bound = conn.end if self.windows else NEITHER
            ready = conn._replace(grant=READY, copying=copying, bound=bound, stale=False, wrote=False)
            yield "endpoint has the grant, binds windows", put(ready), ""
        if conn.grant == READY and conn.client == IDLE:
            yield "client is told of the grant", put(conn._replace(grant=TOLD, client=HOLDS)), ""
        if conn.grant == TOLD and not conn.copying and "copy_late" in self.bugs:
            yield "(fault) endpoint counts the copy", put(conn._replace(copying=True)), ""
        if conn.grant == TOLD and conn.client == SENT:
            yield from self._commit(s, number, conn)
        if conn.grant == FORWARDED:
            if s.worker and not conn.stale:
                fault = FAULTS["unfinished"] if any(conn.fly) and not rogue else ""
                yield "worker publishes", put(conn._replace(grant=ANSWERED), chunk=PUBLISHED, session=PRESENT), fault
            if conn.stale:
                yield "the commit's outcome is unknown", put(self._ended(conn)), ""
        if conn.grant == ANSWERED:
            yield "endpoint gets the answer", put(self._ended(conn)), ""
        if conn.client == CLOSED:
            yield from self._close(s, number, conn)

    def _wire(self, s: State, number: int, conn: Connection) -> Iterator[tuple[str, State, str]]:
        """Yield the arrivals of WRITEs."""
        for link in (0, 1):
            if conn.fly[link]:
                after = conn._replace(fly=_put(conn.fly, link, False))
                if not conn.end[link]:
                    event, fault = "dropped", ""
                elif self.windows and not conn.bound[link]:
                    event, fault = "refused: that end is broken", ""
                    after = after._replace(end=_put(after.end, link, False))
                else:
                    event, fault = "lands", ""
                    if s.chunk == PUBLISHED:
                        fault = FAULTS["published"]
                    elif s.chunk == OF_Y - number:
                        fault = FAULTS["other"]
                connections = (after, s.connections[1]) if number == 0 else (s.connections[0], after)
                yield f"a WRITE by queue pair {link} {event}", s._replace(connections=connections), fault

    def _commit(self, s: State, number: int, conn: Connection) -> Iterator[tuple[str, State, str]]:
        """Yield what the endpoint does with a commit: windows first."""
        bugs = self.bugs
        if self.windows and conn.bound != NEITHER and not bugs & {"no_invalidate", "invalidate_late"}:
            # What is in flight by them has landed before (its own step), or is refused when it comes.
            bound = (False, conn.bound[1]) if "one_window" in bugs else NEITHER
            conn = conn._replace(bound=bound)
        conn = conn._replace(grant=FORWARDED, copying=False)
        connections = (conn, s.connections[1]) if number == 0 else (s.connections[0], conn)
        yield "endpoint has the commit, invalidates, forwards it", s._replace(connections=connections), ""

    def _ended(self, conn: Connection) -> Connection:
        """Return a connection whose grant has been spent or returned, or is not known any more."""
        bound = conn.bound if "no_invalidate" in self.bugs else NEITHER
        client = IDLE if conn.client in (HOLDS, SENT) else conn.client
        return conn._replace(client=client, grant=NONE, stale=False, copying=False, wrote=False, bound=bound)

    def _returned(self, s: State, number: int, conn: Connection) -> State:
        after = self._ended(conn)
        if "return_bound" in self.bugs:
            after = after._replace(bound=conn.bound)
        connections = (after, s.connections[1]) if number == 0 else (s.connections[0], after)
        free = s.worker and s.chunk == OF_X + number and not conn.stale
        chunk, session = (FREE, PRESENT) if free else (s.chunk, s.session)
        return s._replace(connections=connections, chunk=chunk, session=session)

    def _close(self, s: State, number: int, conn: Connection) -> Iterator[tuple[str, State, str]]:
        """Yield what the endpoint does when the control connection is gone: queue pairs, then grants."""

        def put(conn: Connection, chunk: int = s.chunk, session: int = s.session) -> State:
            connections = (conn, s.connections[1]) if number == 0 else (s.connections[0], conn)
            return s._replace(connections=connections, chunk=chunk, session=session)

        if conn.end != NEITHER and not ("back_first" in self.bugs and conn.grant in (READY, TOLD)):
            if "one_link" in self.bugs and conn.end[1]:
                if conn.end[0]:
                    after = conn._replace(end=(False, True), fly=(False, conn.fly[1]), bound=(False, conn.bound[1]))
                    yield "endpoint destroys queue pair 0", put(after), ""
                    return
            else:
                after = conn._replace(end=NEITHER, fly=NEITHER, bound=NEITHER)
                yield "endpoint destroys the queue pairs", put(after), ""
                return
        if conn.grant == ASKED:
            conn = conn._replace(grant=READY, stale=False)  # comes too late: returned at once
        if conn.grant in (READY, TOLD):
            free = s.worker and not conn.stale and s.chunk == OF_X + number
            after = self._ended(conn)
            if "back_first" in self.bugs:
                after = after._replace(bound=conn.bound)
            chunk, session = (FREE, PRESENT) if free else (s.chunk, s.session)
            yield "endpoint returns the grant", put(after, chunk=chunk, session=session), ""
        elif conn.grant == NONE and (conn.end == NEITHER or "one_link" in self.bugs):
            # With the injected bug the other queue pair lives on, and the endpoint does not know of it.
            yield "the connection has gone", put(Connection(end=conn.end, fly=conn.fly)), ""

    # -- for people -------------------------------------------------------------------------------

    def describe(self, state: State) -> str:
        """Return one line for people."""

        def summary(conn: Connection) -> str:
            client = ("away", "idle", "holds", "sent", "closed")[conn.client]
            grant = ("-", "asked", "ready", "told", "forwarded", "answered")[conn.grant]
            links = " ".join(
                f"{'+' if conn.end[link] else 'x'}{'b' if conn.bound[link] else ''}{'~' if conn.fly[link] else ''}"
                for link in (0, 1)
            )
            return f"{client}/{grant}{' stale' if conn.stale else ''}{' copying' if conn.copying else ''} [{links}]"

        chunk = ("free", "published", "of x", "of y")[state.chunk]
        session = ("", " (retired)", " (orphan)")[state.session]
        endpoint = ("", " endpoint dying", " endpoint dead")[state.endpoint]
        worker = "" if state.worker else " worker dead"
        x, y = state.connections
        return f"chunk {chunk}{session}{worker}{endpoint}  x {summary(x)}  y {summary(y)}"


def with_bug(name: str) -> GrantModel:
    """Return the model that shows a bug."""
    return GrantModel(name, **BUGS[name][1])

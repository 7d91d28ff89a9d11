"""Grants across a network: who may write into a chunk, while lanes close and processes die.

One chunk, two lanes of two clients, one endpoint, one worker. A state:

    chunk     free, published, or granted to a lane (the hold in the worker's ledger), and by which session: the
              endpoint's present one with the worker, an earlier one (buried), or one of an endpoint that died
    worker    alive or not
    endpoint  alive; dying (its end is known, its links are there: a planted fault alone); dead
    lanes     what the client is at, what the endpoint knows of the lane's grant, WRITEs under way and the
              endpoint's end of each of two links, and the window that is bound to it

The rules of ``lane_end.py`` and ``endpoint.py``:

* the worker grants; the endpoint counts a copy under way, binds a window on each link, and then tells the client;
* the client WRITEs by any link, flushes each, and sends a commit or returns the grant. A deadline that passes, and
  it closes its ends; what has left goes on its way;
* a commit or a return: the windows are invalidated, the copy has ended, and then the worker is told;
* a lane that closes: all links are destroyed, then its grants are given back;
* the worker dies: the holds stay, of a session that is buried now. Its successor frees them when no copy of buried
  sessions is under way. A commit or a return of such a grant does no more than end the copy;
* the endpoint dies: its links are destroyed before its end is known; the worker (or its successor) frees what it held.

What must not be: a WRITE that lands in a chunk that is published, or granted to the other lane; and a value that is
published with a WRITE of it still under way. With windows the first must hold also where clients are ``rogue``: they
WRITE by an old key at any time, and commit without having flushed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final, NamedTuple

#: Faults to plant -> what it is, and the options of a model that shows it.
PLANTS: Final[dict[str, tuple[str, dict[str, int]]]] = {
    "unflushed": ("a client commits while a WRITE is under way; no windows", {"windows": 0}),
    "unflushed_windows": ("a client commits while a WRITE is under way; with windows", {"windows": 1}),
    "one_flush": ("a client flushes one of the two links by which it wrote", {"windows": 0}),
    "timeout_returns": ("a put that is late returns its grant, and the lane stays", {"windows": 0}),
    "no_invalidate": ("a commit leaves the windows as they are", {"windows": 1, "rogue": 1}),
    "invalidate_late": ("a commit is forwarded first, its windows are invalidated then", {"windows": 1, "rogue": 1}),
    "one_window": ("a commit invalidates the window of one link only", {"windows": 1, "rogue": 1}),
    "return_bound": ("a grant is given back with its windows bound", {"windows": 1, "rogue": 1}),
    "back_first": ("a lane that closes gives its grants back before its links are destroyed", {"windows": 0}),
    "back_first_windows": ("the same with windows", {"windows": 1}),
    "one_link": ("a lane that closes destroys one link of two", {"windows": 0}),
    "death_frees": ("the worker's successor frees the holds of all earlier sessions", {"windows": 0}),
    "copy_late": ("a copy is counted after the client has been told of the grant", {"windows": 0}),
    "copy_ends_early": ("the copy of a lane's grant ends with the session that it came by", {"windows": 1}),
    "ends_before_links": ("the endpoint's end is known before its links are destroyed", {"windows": 0}),
}

FREE, PUBLISHED, OF_X, OF_Y = 0, 1, 2, 3
PRESENT, BURIED, ORPHAN = 0, 1, 2
#: The client: no lane, no grant, a grant, a commit sent, closed.
AWAY, IDLE, HOLDS, SENT, CLOSED = 0, 1, 2, 3, 4
#: The endpoint about a lane's grant: none, the worker's answer is under way, ready, told, commit forwarded, answered.
NONE, ASKED, READY, TOLD, FORWARDED, ANSWERED = 0, 1, 2, 3, 4, 5

FAULTS: Final = {
    "published": "a WRITE landed in a published chunk",
    "other": "a WRITE landed in a chunk that is granted to another lane",
    "unfinished": "a value was published with a WRITE of it under way",
}


class Lane(NamedTuple):
    """By link: ``fly``: a WRITE is under way; ``end``: the endpoint's end is there; ``bound``: a window is, to it."""

    client: int = AWAY
    grant: int = NONE
    stale: bool = False
    copying: bool = False
    wrote: bool = False
    fly: tuple[bool, bool] = (False, False)
    end: tuple[bool, bool] = (False, False)
    bound: tuple[bool, bool] = (False, False)


class State(NamedTuple):
    """One state of all."""

    chunk: int
    session: int
    worker: bool
    endpoint: int
    lanes: tuple[Lane, Lane]


ALIVE, DYING, DEAD = 0, 1, 2
BOTH, NEITHER = (True, True), (False, False)
_FIRST: Final = State(FREE, PRESENT, True, ALIVE, (Lane(), Lane()))


class Found(NamedTuple):
    """What a search came to; ``trace`` is (event, state) from the start to the fault, empty where there is none."""

    states: int
    complete: bool
    fault: str
    trace: list[tuple[str, State]]

    def lines(self) -> list[str]:
        """For people."""
        if not self.trace:
            return [f"nothing found; {self.states:,} states" + ("" if self.complete else " (not all)")]
        return [f"FOUND: {self.fault} ({self.states:,} states)"] + [
            f"  {number:3}  {event:56} {describe(state)}" for number, (event, state) in enumerate(self.trace)
        ]


def _put(pair: tuple[bool, bool], at: int, value: bool) -> tuple[bool, bool]:
    return (value, pair[1]) if at == 0 else (pair[0], value)


class GrantModel:
    """The rules, with some faults planted. ``windows``: there are some; ``rogue``: so many clients keep to no rule."""

    def __init__(self, *plants: str, windows: int = 1, rogue: int = 0) -> None:
        if set(plants) - PLANTS.keys():
            raise ValueError(f"no such plants: {plants}")
        if rogue and not windows:
            raise ValueError("without windows nothing holds a rogue client back")
        self.plants = {plant.removesuffix("_windows") for plant in plants}
        self.windows, self.rogues = bool(windows), rogue

    def successors(self, s: State) -> Iterator[tuple[str, State, str]]:
        """(event, state after it, fault or empty) of everything that can happen next."""
        yield from self._processes(s)
        for number in (0, 1):
            for event, after, fault in self._lane(s, number):
                yield f"{'xy'[number]}: {event}", after, fault

    # -- worker and endpoint ----------------------------------------------------------------------

    def _processes(self, s: State) -> Iterator[tuple[str, State, str]]:
        held = s.chunk in (OF_X, OF_Y)
        if s.chunk == PUBLISHED and s.worker:
            yield "worker: evicts or deletes", s._replace(chunk=FREE), ""
        if s.chunk == FREE and s.worker:
            yield "worker: publishes a value that came another way", s._replace(chunk=PUBLISHED, session=PRESENT), ""
        if s.worker:
            lanes = tuple(self._bereft(lane) for lane in s.lanes)
            session = BURIED if held and s.session == PRESENT else s.session
            yield "worker: dies", s._replace(worker=False, session=session, lanes=lanes), ""  # type: ignore[arg-type]
        else:
            after = s._replace(worker=True)
            if "death_frees" in self.plants and held:
                after = after._replace(chunk=FREE, session=PRESENT)
            yield "worker: a successor starts", after, ""
        used = any(lane.copying and lane.stale for lane in s.lanes)
        if s.worker and held and s.session == BURIED and s.endpoint == ALIVE and not used:
            yield "worker: frees what buried sessions held", s._replace(chunk=FREE, session=PRESENT), ""
        if s.worker and held and s.session == ORPHAN:
            yield "worker: frees what a dead endpoint held", s._replace(chunk=FREE, session=PRESENT), ""
        if s.endpoint == ALIVE:
            after = s._replace(session=ORPHAN if held else s.session)
            if "ends_before_links" in self.plants:
                yield "endpoint: its end is known", after._replace(endpoint=DYING), ""
            else:
                yield "endpoint: dies, its links destroyed", self._linkless(after), ""
        elif s.endpoint == DYING:
            yield "endpoint: its links are destroyed", self._linkless(s), ""
        elif all(lane.client == AWAY for lane in s.lanes):
            yield "endpoint: another starts", s._replace(endpoint=ALIVE), ""

    def _bereft(self, lane: Lane) -> Lane:
        """The worker has died, as the endpoint sees it for a lane."""
        if lane.grant in (NONE, ASKED):
            return lane._replace(grant=NONE)
        copying = lane.copying and "copy_ends_early" not in self.plants
        return lane._replace(stale=True, copying=copying)

    def _linkless(self, s: State) -> State:
        x, y = (Lane(client=AWAY if lane.client in (AWAY, CLOSED) else CLOSED) for lane in s.lanes)
        return s._replace(endpoint=DEAD, lanes=(x, y))

    # -- a lane -----------------------------------------------------------------------------------

    def _lane(self, s: State, number: int) -> Iterator[tuple[str, State, str]]:
        lane = s.lanes[number]
        rogue = number < self.rogues

        def put(lane: Lane, chunk: int = s.chunk, session: int = s.session) -> State:
            lanes = (lane, s.lanes[1]) if number == 0 else (s.lanes[0], lane)
            return s._replace(lanes=lanes, chunk=chunk, session=session)

        yield from self._wire(s, number, lane)
        if s.endpoint != ALIVE:
            if lane.client == CLOSED and s.endpoint == DEAD:
                yield "client sees that the endpoint has gone", put(Lane()), ""
            return
        # The client.
        if lane.client == AWAY and lane == Lane():
            yield "opens a lane", put(Lane(client=IDLE, end=BOTH)), ""
        if lane.client == HOLDS or (rogue and lane.client in (IDLE, SENT)):
            for link in (0, 1):
                if not lane.fly[link]:
                    yield f"WRITEs by link {link}", put(lane._replace(fly=_put(lane.fly, link, True), wrote=True)), ""
        if lane.client == HOLDS:
            flushed = lane.fly == NEITHER or rogue or "unflushed" in self.plants
            flushed = flushed or ("one_flush" in self.plants and not lane.fly[0])
            if flushed and (lane.wrote or rogue):
                yield "sends a commit", put(lane._replace(client=SENT)), ""
            if lane.fly == NEITHER or rogue or "timeout_returns" in self.plants:
                yield "returns the grant", self._returned(s, number, lane), ""
        if lane.client in (IDLE, HOLDS, SENT):
            yield "closes its lane", put(lane._replace(client=CLOSED)), ""
        # The endpoint.
        if lane.client == IDLE and lane.grant == NONE and s.worker and s.chunk == FREE:
            yield "worker grants the chunk", put(lane._replace(grant=ASKED), chunk=OF_X + number, session=PRESENT), ""
        if lane.grant == ASKED and lane.client != CLOSED:
            copying = "copy_late" not in self.plants
            bound = lane.end if self.windows else NEITHER
            ready = lane._replace(grant=READY, copying=copying, bound=bound, stale=False, wrote=False)
            yield "endpoint has the grant, binds windows", put(ready), ""
        if lane.grant == READY and lane.client == IDLE:
            yield "client is told of the grant", put(lane._replace(grant=TOLD, client=HOLDS)), ""
        if lane.grant == TOLD and not lane.copying and "copy_late" in self.plants:
            yield "(fault) endpoint counts the copy", put(lane._replace(copying=True)), ""
        if lane.grant == TOLD and lane.client == SENT:
            yield from self._commit(s, number, lane)
        if lane.grant == FORWARDED:
            if s.worker and not lane.stale:
                fault = FAULTS["unfinished"] if any(lane.fly) and not rogue else ""
                yield "worker publishes", put(lane._replace(grant=ANSWERED), chunk=PUBLISHED, session=PRESENT), fault
            if lane.stale:
                yield "the commit's outcome is unknown", put(self._ended(lane)), ""
        if lane.grant == ANSWERED:
            yield "endpoint hears of it", put(self._ended(lane)), ""
        if lane.client == CLOSED:
            yield from self._close(s, number, lane)

    def _wire(self, s: State, number: int, lane: Lane) -> Iterator[tuple[str, State, str]]:
        """WRITEs that arrive."""
        for link in (0, 1):
            if lane.fly[link]:
                after = lane._replace(fly=_put(lane.fly, link, False))
                if not lane.end[link]:
                    event, fault = "dropped", ""
                elif self.windows and not lane.bound[link]:
                    event, fault = "refused: that end is broken", ""
                    after = after._replace(end=_put(after.end, link, False))
                else:
                    event, fault = "lands", ""
                    if s.chunk == PUBLISHED:
                        fault = FAULTS["published"]
                    elif s.chunk == OF_Y - number:
                        fault = FAULTS["other"]
                lanes = (after, s.lanes[1]) if number == 0 else (s.lanes[0], after)
                yield f"a WRITE by link {link} {event}", s._replace(lanes=lanes), fault

    def _commit(self, s: State, number: int, lane: Lane) -> Iterator[tuple[str, State, str]]:
        """The endpoint has a commit: windows first."""
        plants = self.plants
        if self.windows and lane.bound != NEITHER and not plants & {"no_invalidate", "invalidate_late"}:
            # What is under way by them has landed before (its own step), or is refused when it comes.
            bound = (False, lane.bound[1]) if "one_window" in plants else NEITHER
            lane = lane._replace(bound=bound)
        lane = lane._replace(grant=FORWARDED, copying=False)
        lanes = (lane, s.lanes[1]) if number == 0 else (s.lanes[0], lane)
        yield "endpoint has the commit, invalidates, forwards it", s._replace(lanes=lanes), ""

    def _ended(self, lane: Lane) -> Lane:
        """A grant that has been spent, given back, or is not known any more."""
        bound = lane.bound if "no_invalidate" in self.plants else NEITHER
        client = IDLE if lane.client in (HOLDS, SENT) else lane.client
        return lane._replace(client=client, grant=NONE, stale=False, copying=False, wrote=False, bound=bound)

    def _returned(self, s: State, number: int, lane: Lane) -> State:
        after = self._ended(lane)
        if "return_bound" in self.plants:
            after = after._replace(bound=lane.bound)
        lanes = (after, s.lanes[1]) if number == 0 else (s.lanes[0], after)
        free = s.worker and s.chunk == OF_X + number and not lane.stale
        return s._replace(lanes=lanes, chunk=FREE if free else s.chunk, session=PRESENT if free else s.session)

    def _close(self, s: State, number: int, lane: Lane) -> Iterator[tuple[str, State, str]]:
        """The control connection has gone: links, then grants."""

        def put(lane: Lane, chunk: int = s.chunk, session: int = s.session) -> State:
            lanes = (lane, s.lanes[1]) if number == 0 else (s.lanes[0], lane)
            return s._replace(lanes=lanes, chunk=chunk, session=session)

        if lane.end != NEITHER and not ("back_first" in self.plants and lane.grant in (READY, TOLD)):
            if "one_link" in self.plants and lane.end[1]:
                if lane.end[0]:
                    after = lane._replace(end=(False, True), fly=(False, lane.fly[1]), bound=(False, lane.bound[1]))
                    yield "endpoint destroys link 0", put(after), ""
                    return
            else:
                yield "endpoint destroys the links", put(lane._replace(end=NEITHER, fly=NEITHER, bound=NEITHER)), ""
                return
        if lane.grant == ASKED:
            lane = lane._replace(grant=READY, stale=False)  # comes too late: given back at once
        if lane.grant in (READY, TOLD):
            free = s.worker and not lane.stale and s.chunk == OF_X + number
            after = self._ended(lane)
            if "back_first" in self.plants:
                after = after._replace(bound=lane.bound)
            chunk, session = (FREE, PRESENT) if free else (s.chunk, s.session)
            yield "endpoint gives the grant back", put(after, chunk=chunk, session=session), ""
        elif lane.grant == NONE and (lane.end == NEITHER or "one_link" in self.plants):
            # With the planted fault the other link lives on, and nobody knows of it.
            yield "the lane has gone", put(Lane(end=lane.end, fly=lane.fly)), ""


def explore(model: GrantModel, limit: int = 2_000_000) -> Found:
    """Breadth-first over all states; a fault's trace is a shortest one."""
    came: dict[State, tuple[State, str] | None] = {_FIRST: None}
    queue = deque([_FIRST])
    while queue and len(came) < limit:
        state = queue.popleft()
        for event, after, fault in model.successors(state):
            new = after not in came
            if new:
                came[after] = (state, event)
                queue.append(after)
            if fault:
                trace = [(event, after)]
                at: State | None = state
                while at is not None:
                    before = came[at]
                    trace.append((before[1] if before else "", at))
                    at = before[0] if before else None
                return Found(len(came), False, fault, trace[::-1])
    return Found(len(came), not queue, "", [])


def planted(name: str) -> GrantModel:
    """The model that shows a fault."""
    return GrantModel(name, **PLANTS[name][1])


def describe(state: State) -> str:
    """For people."""

    def lane(lane: Lane) -> str:
        client = ("away", "idle", "holds", "sent", "closed")[lane.client]
        grant = ("-", "asked", "ready", "told", "forwarded", "answered")[lane.grant]
        links = " ".join(
            f"{'+' if lane.end[link] else 'x'}{'b' if lane.bound[link] else ''}{'~' if lane.fly[link] else ''}"
            for link in (0, 1)
        )
        return f"{client}/{grant}{' stale' if lane.stale else ''}{' copying' if lane.copying else ''} [{links}]"

    chunk = ("free", "published", "of x", "of y")[state.chunk]
    session = ("", " (buried)", " (orphan)")[state.session]
    endpoint = ("", " endpoint dying", " endpoint dead")[state.endpoint]
    worker = "" if state.worker else " worker dead"
    return f"chunk {chunk}{session}{worker}{endpoint}  x {lane(state.lanes[0])}  y {lane(state.lanes[1])}"

"""Advances of one namespace, in every order of events: manager, servers with their workers, puts and gets in flight.

What the manager waits for is the real :class:`simm.cluster.epochs.NamespaceEpochs`, and what extends a lease is the
real :class:`simm.cluster.epochs.Lease`. The model restates the rest: what the worker stores (``arena/namespaces.py``),
what a reader looks at and when (``arena/reader.py``), what a manager does that has lost its state
(``cluster/machine.py``).

A message that has not come is one that the network has lost or that its receiver has not read, so partitions and
stopped processes need no event: whatever is in flight may stay there for ever. Time passes by ticks.

Each value knows how many advances had been called when its put began (``born``). No get may yield one that was born
before an advance that had returned when the get began.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from simm.cluster.epochs import Acknowledged, Lease, NamespaceEpochs

NAME: Final = "n"
TICK_MS: Final = 1000

BUGS: Final = {
    "lease_from_answer": "a lease begins when the answer to the heartbeat comes, not when the heartbeat leaves",
    "lease_by_any_map": "a heartbeat extends the lease though the namespace has advanced since the workers' map",
    "lease_by_told": "a heartbeat extends the lease by the map that a server has, whatever its workers have stored",
    "no_wait": "the manager does not wait for the lease of a server that does not answer",
    "no_lease": "a reader does not look at the lease",
    "epoch_first": "a reader looks at the epoch, then at the lease",
    "no_epoch": "a reader does not look at the epoch",
    "no_flag": "a worker stores values with an epoch like others",
    "early_ack": "a worker acknowledges a first epoch before it has dropped the older entries",
    "sweep_forgotten": "the successor of a worker that died while it dropped them does not go on",
    "first_by_lease": "the first advance waits for a lease only",
    "adopts": "a manager that has lost its state takes the epoch that a server reports for the namespace's",
    "trusts_equal": "a manager that has lost its state takes an equal epoch for the same one",
    "no_unsure": "a manager that has lost its state does not wait for servers that it does not know",
    "pin_no_lease": "a worker pins a value of the epoch that it knows, whether its lease has ended or not",
    "pin_no_epoch": "a worker pins a value under its lease, whatever the epoch",
    "unstored": "the manager answers before a successor of it knows the epoch",
    "deaf_acks": "the map's acknowledgement by a server of a version without epochs counts",
    "late_is_new": "a put that was refused is repeated with the epoch of then",
}


class Value(NamedTuple):
    """An entry: how its digest ends, when it was born, and whether it has ENTRY_EPOCH."""

    tag: int
    born: int
    flag: bool


class Server(NamedTuple):
    """A data server. ``map``, ``table``: what its supervisor has; ``line``: what its worker has stored."""

    map: int = 0
    table: int = 0
    line: int = 0
    #: The worker has not dropped the entries without an epoch yet.
    unswept: bool = False
    #: Epoch of the map that all of it has taken.
    taken: int = 0
    until: int = 0
    values: frozenset[Value] = frozenset()
    #: A heartbeat on its way: (time, epoch, that of the map whose epochs its lines have); its answer: these, and since
    #: when nothing has advanced.
    beat: tuple[int, ...] = ()


class Get(NamedTuple):
    """A get in flight at a server: what had returned when it began, what it has found, what it has looked at."""

    server: int
    returned: int
    value: Value
    stage: int


class State(NamedTuple):
    """A state. ``known``: whether each server has joined the manager; ``acked``: what each has acknowledged to it."""

    now: int
    map: int
    epoch: int
    settled: bool
    #: What is stored of these two; nothing is, and the first map of this manager's own.
    stored: tuple[int, bool]
    blank: bool
    own: int
    known: tuple[bool, ...]
    acked: tuple[int, ...]
    unsure: int
    #: The advance that waits: (its number, its epoch, when that was made).
    waits: tuple[int, ...]
    called: int
    returned: int
    servers: tuple[Server, ...]
    #: A put in flight: (tag, born).
    put: tuple[int, ...]
    get: Get | None
    #: Epochs that clients may have heard of.
    heard: frozenset[int]
    losses: int
    restarts: int
    #: Changes of the map that advance nothing.
    maps: int
    deaths: int
    puts: int


class EpochModel:
    """The transition system. ``bugs``: of :data:`BUGS`. ``settled``: begin after a first advance, with a value.

    ``old``: the servers are of a version without epochs.
    State is only lost then: a manager that has lost its state cannot know of servers that keep values without an epoch.
    """

    def __init__(
        self, bugs: tuple[str, ...] = (), *, servers: int = 1, advances: int = 2, ticks: int = 4, lease: int = 1,
        losses: int = 0, deaths: int = 1, puts: int = 1, settled: bool = False, restarts: int = 0, maps: int = 0,
        old: bool = False,
    ) -> None:  # fmt: skip
        self.settled, self.restarts, self.maps, self.old = settled, restarts, maps, old
        self.bugs = frozenset(bugs)
        self.servers, self.advances, self.ticks, self.lease = servers, advances, ticks, lease
        self.losses, self.deaths, self.puts = losses, deaths, puts

    def initial(self) -> State:
        count = self.servers
        if self.settled:  # the first advance has returned
            value = Value(2, 1, True)
            server = Server(2, 2, 2, False, 2, self.lease, frozenset((value,)))
            return State(
                0, 2, 2, True, (2, True), False, 0, (True,) * count, (2,) * count, -9, (), 1, 1, (server,) * count, (),
                None, frozenset((0, 2)), self.losses, self.restarts, self.maps, self.deaths, self.puts,
            )  # fmt: skip
        return State(
            0, 1, 0, False, (0, False), False, 0, (True,) * count, (1,) * count, -9, (), 0, 0,
            (Server(1, 0, 0, False, 1),) * count, (), None, frozenset((0,)), self.losses, self.restarts, self.maps,
            self.deaths, self.puts,
        )  # fmt: skip

    def fault(self, state: State) -> str:
        return ""

    def describe(self, state: State) -> str:
        servers = "; ".join(
            f"map {s.map} line {s.line} taken {s.taken} until {s.until} values "
            f"{[(v.tag, v.born) for v in sorted(s.values)]}" for s in state.servers
        )  # fmt: skip
        return f"t{state.now} map {state.map} epoch {state.epoch} returned {state.returned}/{state.called} | {servers}"

    def successors(self, state: State) -> Iterator[tuple[str, State, str]]:
        if state.now < self.ticks:
            yield "tick", state._replace(now=state.now + 1), ""
        yield from self._manager(state)
        for at, server in enumerate(state.servers):
            yield from self._server(state, at, server)
        yield from self._clients(state)

    # -- the manager ---------------------------------------------------------------------------------

    def _manager(self, state: State) -> Iterator[tuple[str, State, str]]:
        if state.called < self.advances and not state.waits:
            epoch = state.map + 1
            yield "advance", state._replace(
                map=epoch, epoch=epoch, called=state.called + 1, waits=(state.called + 1, epoch, state.now),
                heard=state.heard | {epoch},
            ), ""  # fmt: skip
        if state.maps:
            yield "the map changes", state._replace(map=state.map + 1, maps=state.maps - 1), ""
        kept = (state.epoch, state.settled)
        if self.restarts and state.stored != kept and not state.blank:
            yield "the state is stored", state._replace(stored=kept), ""
        stored = not self.restarts or state.blank or "unstored" in self.bugs or state.stored[0] == state.epoch
        if state.waits and stored and not self._awaited(state):
            number = state.waits[0]
            yield "advance returns", state._replace(waits=(), returned=max(state.returned, number), settled=True), ""
        if state.losses:
            nobody = (False,) * self.servers
            yield "manager dies, its state is lost", state._replace(
                map=1, epoch=0, settled=False, known=nobody, acked=(0,) * self.servers, waits=(), unsure=state.now,
                losses=state.losses - 1, blank=True, own=1,
            ), ""  # fmt: skip
        if state.restarts:
            nobody = (False,) * self.servers
            yield "manager dies, its state is as it was stored", state._replace(
                map=state.map + 1, own=state.map + 1, epoch=state.stored[0], settled=state.stored[1], known=nobody,
                acked=(0,) * self.servers, waits=(), unsure=state.now, restarts=state.restarts - 1,
            ), ""  # fmt: skip

    def _awaited(self, state: State) -> str:
        """Ask the real table what the advance waits for."""
        _, epoch, since = state.waits
        settled = state.settled or "first_by_lease" in self.bugs
        table = NamespaceEpochs.from_state({NAME: [max(1, epoch), int(settled)]})
        follows = not self.old or "deaf_acks" in self.bugs
        nodes = [_Node(acked, follows) for known, acked in zip(state.known, state.acked) if known or not state.blank]
        epoch = max(epoch, state.own)
        if "no_wait" in self.bugs and state.settled:
            nodes = [_Node(epoch, follows)]
        unsure = -9.0 if "no_unsure" in self.bugs else float(state.unsure)
        looked = Acknowledged(nodes)
        return table.awaited(NAME, epoch, looked, float(state.now), float(since), unsure, float(self.lease))

    # -- a server ------------------------------------------------------------------------------------

    def _server(self, state: State, at: int, server: Server) -> Iterator[tuple[str, State, str]]:
        def now(**fields: object) -> State:
            servers = (*state.servers[:at], server._replace(**fields), *state.servers[at + 1 :])  # type: ignore[arg-type]
            return state._replace(servers=servers)

        if not state.known[at]:
            later = max(state.map, server.map + 1)
            joined = now()._replace(
                known=(*state.known[:at], True, *state.known[at + 1 :]), map=later,
                own=later if server.map >= state.map else state.own,
            )  # fmt: skip
            # A number that this manager has given before it knew of this server may be that of another advance.
            same = server.line == state.epoch and state.blank and "trusts_equal" not in self.bugs
            if server.line and (server.line > state.epoch or same):
                epoch = server.line if "adopts" in self.bugs else joined.map + 1
                # The advance that waits gets a later epoch than it has asked for: its servers acknowledge that.
                joined = joined._replace(map=joined.map + 1, epoch=epoch, heard=state.heard | {epoch})
            yield f"{at} joins", joined, ""
        elif server.map < state.map:
            yield f"{at} gets the map", now(map=state.map, table=0 if self.old else max(server.table, state.epoch)), ""
        if server.taken < server.map:
            if server.line < server.table:
                first = not server.line
                yield f"{at} stores the epoch", now(line=server.table, unswept=server.unswept or first), ""
            elif not server.unswept or "early_ack" in self.bugs:
                yield f"{at} has taken the map", now(taken=server.map), ""
        if server.unswept:
            left = frozenset(each for each in server.values if each.flag and each.tag == server.line)
            yield f"{at} drops old entries", now(unswept=False, values=left), ""
        if state.deaths:
            dead = now(unswept=bool(server.line) and "sweep_forgotten" not in self.bugs)
            yield f"{at}: worker dies", dead._replace(deaths=state.deaths - 1), ""
        if not server.beat:
            yield f"{at} sends a heartbeat", now(beat=(state.now, server.taken, self._stored(server))), ""
        elif len(server.beat) == 3 and state.known[at]:
            acked = (*state.acked[:at], server.beat[1], *state.acked[at + 1 :])
            advanced = max(state.epoch, state.own)
            yield f"{at}: heartbeat comes", now(beat=(*server.beat, advanced))._replace(acked=acked), ""
        elif len(server.beat) == 4:
            yield f"{at}: answer comes", now(beat=(), until=max(server.until, self._lease(state, server))), ""

    def _stored(self, server: Server) -> int:
        """Return the epoch of the newest map whose epochs are in the lines, whether it is taken over or not."""
        has = "lease_by_told" in self.bugs or (server.line == server.table and not self.old)
        return server.map if has else server.taken

    def _lease(self, state: State, server: Server) -> int:
        """Ask the real lease what an answer makes of it."""
        sent, _, stored, advanced = server.beat
        if "lease_from_answer" in self.bugs:
            sent = state.now
        lease = Lease()
        number = lease.sent(1 + sent * 1_000_000 * TICK_MS, stored)
        lease.answered(number, 0 if "lease_by_any_map" in self.bugs else advanced)
        return lease.until(self.lease * TICK_MS) // (1_000_000 * TICK_MS)

    # -- clients ---------------------------------------------------------------------------------------

    def _clients(self, state: State) -> Iterator[tuple[str, State, str]]:
        if state.puts and not state.put:
            for tag in state.heard:
                yield f"a put begins, epoch {tag}", state._replace(put=(tag, state.called), puts=state.puts - 1), ""
        if state.put:
            for at, server in enumerate(state.servers):
                yield from self._commit(state, at, server)
        if state.get is None:
            for at, server in enumerate(state.servers):
                for value in server.values:
                    yield from self._find(state, at, value)
        else:
            yield from self._look(state, state.get)

    def _commit(self, state: State, at: int, server: Server) -> Iterator[tuple[str, State, str]]:
        tag, born = state.put
        if server.line and tag != server.line:
            if "late_is_new" not in self.bugs:
                yield f"the put is refused at {at}", state._replace(put=()), ""
                return
            tag = server.line
        flag = bool(server.line) and "no_flag" not in self.bugs
        values = server.values | {Value(tag, born, flag)}
        servers = (*state.servers[:at], server._replace(values=values), *state.servers[at + 1 :])
        yield f"the put is stored at {at}", state._replace(put=(), servers=servers), ""

    def _find(self, state: State, at: int, value: Value) -> Iterator[tuple[str, State, str]]:
        get = Get(at, state.returned, value, 0)
        server = state.servers[at]
        current = server.line == value.tag or "pin_no_epoch" in self.bugs
        leased = state.now < server.until or "pin_no_lease" in self.bugs
        if value.flag and current and leased:  # what is held by its version was looked at like a get's
            yield f"the worker pins a value at {at}", state, _wrong(get)
        if value.flag:
            yield f"a get copies a value at {at}", state._replace(get=get), ""
        else:
            yield f"a get reads a value at {at}", state, _wrong(get)

    def _look(self, state: State, get: Get) -> Iterator[tuple[str, State, str]]:
        """Do a reader's next look, if it is at the present epoch under a lease. It misses otherwise."""
        server = state.servers[get.server]
        looks = ["epoch", "lease"] if "epoch_first" in self.bugs else ["lease", "epoch"]
        what = looks[get.stage]
        fine = state.now < server.until if what == "lease" else server.line == get.value.tag
        if not fine and f"no_{what}" not in self.bugs:
            yield f"the get misses by the {what}", state._replace(get=None), ""
        elif get.stage:
            yield "the get ends", state._replace(get=None), _wrong(get)
        else:
            yield f"the get has looked at the {what}", state._replace(get=get._replace(stage=1)), ""


class _Node:
    """What the table asks of a node."""

    left = False
    name = "node"

    def __init__(self, told_epoch: int, follows: bool) -> None:
        self.told_epoch, self.follows = told_epoch, follows


def _wrong(get: Get) -> str:
    if get.value.born < get.returned:
        return f"a value from before advance {get.value.born + 1} was read after advance {get.returned} had returned"
    return ""


#: The smallest model that shows each bug.
SMALLEST: Final[dict[str, dict[str, int]]] = {
    **{name: {"ticks": 2, "deaths": 0} for name in BUGS},
    "early_ack": {"ticks": 1, "deaths": 0},
    "sweep_forgotten": {"ticks": 1},
    "lease_by_told": {"deaths": 0, "ticks": 2, "settled": 1, "puts": 0},
    "adopts": {"losses": 1, "deaths": 0, "ticks": 2, "settled": 1, "puts": 0},
    "trusts_equal": {"losses": 1, "deaths": 0, "ticks": 2, "settled": 1, "puts": 0},
    "unstored": {"restarts": 1, "deaths": 0, "ticks": 2, "settled": 1, "puts": 0},
    "deaf_acks": {"deaths": 0, "ticks": 2, "advances": 1, "old": 1},
    "no_unsure": {"losses": 1, "deaths": 0, "ticks": 1, "settled": 1, "puts": 0, "servers": 2},
}

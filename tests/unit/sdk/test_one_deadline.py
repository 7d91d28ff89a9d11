"""A call that meets silent servers, in any order and number, loses one deadline in all. On a clock of its own."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from simm.arena.hashing import Hasher, shard_of
from simm.cluster.lookup import Unresolved
from simm.config.client_options import ClientOptions
from simm.errors import TransportError
from simm.ipc.grant_pool import GrantPool, RoomWait, obtain
from simm.ipc.patience import Patience
from simm.ipc.pins import RETIRED
from simm.ipc.session import WorkerSession
from simm.ipc.steps import Steps
from simm.net.allowance import ALLOWANCE, allowed, at_most
from simm.sdk.batch import LARGE, MISS, UNAVAILABLE, Batch
from simm.sdk.large.manifest import MANIFEST_BYTES, Manifest
from simm.sdk.large.pinned import pin_parts
from simm.sdk.large.values import Large
from simm.sdk.near.copies import NearPuts
from simm.sdk.ops.load_time import LoadTimes, Shares, Speeds
from simm.sdk.ops.prefix import Prefixes
from simm.sdk.ops.replicas import Replicas
from simm.sdk.reads import Gets
from simm.sdk.worker_path import Connections
from simm.sdk.writes import Puts
from simm.wire.messages import Status

DEADLINE_S = 1.0
COUNTERS = ("hits", "misses", "moved", "outages", "retries", "fallbacks", "redirects", "puts", "put_failures")


class Clock:
    """Time that passes only when somebody waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)
        monkeypatch.setattr("time.sleep", self.sleep)

    def first_over(self, waits: Collection[Any]) -> list[Any]:
        """Do what the function of this name in ``ipc/steps.py`` does, in no time."""
        ends = [each.ends_at if isinstance(each, Answer) else each.server.connected_at for each in waits]
        self.now = max(self.now, min(min(ends), min(each.until for each in waits)))
        return [each for each in waits if each.ready() or each.until <= self.now]

    def sleep(self, seconds: float) -> None:
        self.now += max(0.0, seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock(monkeypatch)
    monkeypatch.setattr("simm.ipc.patience.first_over", clock.first_over)
    yield clock
    assert ALLOWANCE.seconds == ALLOWANCE.until == math.inf, "the next call of this thread has its own deadline"


class Answer:
    """The wait for an answer that comes at ``ends_at``."""

    events = 0

    def __init__(self, clock: Clock, ends_at: float, until: float, last: bool) -> None:
        self.clock = clock
        self.ends_at = ends_at
        self.until = until
        self.last = last

    def ready(self) -> bool:
        return self.clock.now >= self.ends_at

    def descriptor(self) -> int:
        return -1

    def receive(self) -> None:
        pass

    def extend(self, until: float) -> None:
        self.until = max(self.until, until)


class Server:
    """A server that takes ``connect_s`` for a connection and ``answer_s`` for each of ``times`` exchanges, or never
    answers. The thread copies for ``copies_s`` before each."""

    reader = None

    def __init__(
        self, clock: Clock, connect_s: float, answer_s: float, *, fresh: bool = True, times: int = 1,
        copies_s: float = 0.0,
    ) -> None:  # fmt: skip
        self.clock = clock
        self.times = times
        self.copies_s = copies_s
        self.connect_s = connect_s
        self.answer_s = answer_s
        self.asked_fresh = fresh
        self.connected_at = math.inf if fresh else 0.0
        self.path = "tcp"
        #: What its exchanges were allowed, seconds.
        self.given: list[float] = []
        #: When the exchanges began and ended that it answered.
        self.answered: list[tuple[float, float]] = []
        #: When the thread copied for it.
        self.copied: list[tuple[float, float]] = []

    @property
    def fresh(self) -> bool:
        return self.path != "down" and self.clock.now < self.connected_at

    def connect_soon(self) -> None:
        self.connected_at = min(self.connected_at, self.clock.now + self.connect_s)

    def wait(self, seconds: float) -> bool:
        given = allowed(DEADLINE_S)
        self.clock.now += max(0.0, min(given, seconds))
        if seconds > given:
            self.path = "down"
        return seconds <= given

    def ready(self) -> bool:
        if self.fresh:
            self.connect_soon()
            self.wait(self.connected_at - self.clock.now)
        return self.path != "down"

    def arena(self) -> None:
        self.ready()

    def exchange(self) -> Steps[bool]:
        """Return whether it answered."""
        if not self.ready():
            return False
        for number in range(self.times):
            self.copied.append((self.clock.now, self.clock.now + self.copies_s))
            self.clock.now += self.copies_s
            began, given = self.clock.now, allowed(DEADLINE_S)
            self.given.append(given)
            wait = Answer(self.clock, began + self.answer_s, began + given, number == self.times - 1)
            yield wait
            self.clock.now = max(self.clock.now, min(wait.ends_at, wait.until))
            if not wait.ready():
                self.path = "down"
                return False
            self.answered.append((began, wait.ends_at))
        return True

    @property
    def healthy(self) -> bool:
        """Whether it has half a deadline left when it is connected, and answers in time."""
        connect_s = self.connect_s if self.asked_fresh else 0.0
        return connect_s <= DEADLINE_S / 2 and self.answer_s <= DEADLINE_S - connect_s


def some_servers(clock: Clock, rng: random.Random, copies: bool) -> list[Server]:
    times = (0.0, 0.001, 0.1, 0.3, 0.49, 0.6, 0.95, math.inf)
    return [
        Server(
            clock,
            rng.choice(times),
            rng.choice(times),
            fresh=rng.random() < 0.7,
            times=rng.randint(1, 3),
            copies_s=rng.choice((0.0, 0.0, 0.0, 0.3, 2.0)) if copies else 0.0,
        )
        for _ in range(rng.randint(1, 6))
    ]


class Routes:
    """Routes to servers: one key at each."""

    has_servers = True
    router: Any = SimpleNamespace(epoch=1)
    closed = False

    def __init__(self, clock: Clock, servers: Sequence[Server]) -> None:
        self.servers = list(servers)
        self.router = SimpleNamespace(
            epoch=1, subscription=SimpleNamespace(refresh=lambda: None),
            await_map=lambda _epoch, until: clock.sleep(until - clock.now),
        )  # fmt: skip

    def group(self, digests: Sequence[bytes], among: Sequence[int] | None = None) -> Any:
        return [(self.servers[each], [each]) for each in (range(len(digests)) if among is None else among)]

    def target(self, digest: bytes) -> Any:
        return self.servers[digest[0]]

    def patience(self, began: float | None = None) -> Patience:
        return Patience(DEADLINE_S, began)


def put(clock: Clock, servers: Sequence[Server], refuses: Callable[[Server], bool] = lambda _: False) -> list[int]:
    routes: Any = Routes(clock, servers)
    shm: Any = None
    puts = Puts(routes, shm, shm, ClientOptions(deadline_s=DEADLINE_S), dict.fromkeys(COUNTERS, 0))
    digests = [bytes([number]) * 16 for number in range(len(servers))]
    statuses = [int(Status.UNAVAILABLE)] * len(servers)

    def act(target: Any, positions: Sequence[int], _together: bool) -> Steps[None]:
        if (yield from target.exchange()):
            for position in positions:
                statuses[position] = Status.WRONG_OWNER if refuses(target) else Status.OK

    puts._everywhere(digests, statuses, act)
    return statuses


def get(clock: Clock, servers: Sequence[Server]) -> list[Any]:
    routes: Any = Routes(clock, servers)
    copier: Any = None
    gets = Gets(routes, copier, False, dict.fromkeys(COUNTERS, 0))

    def read(target: Any, positions: Sequence[int], keys: Batch) -> Steps[Unresolved]:
        for position in positions:
            keys.results[position] = MISS if (yield from target.exchange()) else UNAVAILABLE
        return Unresolved()

    gets._remote = SimpleNamespace(read=read)  # type: ignore[assignment]
    return gets.read_many([bytes([number]) * 16 for number in range(len(servers))], [None] * len(servers))


def lost(servers: Sequence[Server], passed: float) -> float:
    """Return the time that passed beside copies, and exchanges that were answered."""
    answered = 0.0
    end = -math.inf
    for began, ended in sorted(each for server in servers for each in server.answered + server.copied):
        answered += max(0.0, ended - max(began, end))
        end = max(end, ended)
    return passed - answered


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("call", [put, get], ids=["put", "get"])
def test_a_call_loses_one_deadline_whatever_it_meets(
    clock: Clock, call: Callable[..., list[Any]], copies: bool
) -> None:
    rng = random.Random(1)
    most = 0.0
    for _ in range(3000):
        servers = some_servers(clock, rng, copies)
        began = clock.now
        results = call(clock, servers)
        most = max(most, lost(servers, clock.now - began))
        known = [(each.connect_s, each.answer_s, each.times, each.asked_fresh, each.copies_s) for each in servers]
        assert most <= DEADLINE_S + 1e-9, known
        for server, result in zip(servers, results):
            assert all(given >= DEADLINE_S / 2 - 1e-9 for given in server.given), "a healthy server would count as dead"
            assert result in (MISS, Status.OK) or not server.healthy, (known, results)
    assert most > 0.99 * DEADLINE_S


def test_copies_for_one_server_are_not_the_connecting_of_another(clock: Clock) -> None:
    """However long they take. The connection is there long before they end."""
    servers = [Server(clock, 0.0, 0.1, fresh=False, copies_s=5 * DEADLINE_S), Server(clock, 0.3, 0.1)]
    assert put(clock, servers) == [Status.OK] * 2
    servers = [Server(clock, 0.0, 0.1, fresh=False, copies_s=5 * DEADLINE_S), Server(clock, math.inf, 0.1)]
    began = clock.now
    assert put(clock, servers) == [Status.OK, Status.UNAVAILABLE]
    assert lost(servers, clock.now - began) <= DEADLINE_S + 1e-9


@pytest.mark.parametrize("dead", [False, True])
def test_reads_of_arenas_meanwhile_are_no_wait_either(clock: Clock, dead: bool) -> None:
    """Neither for servers that are connected to meanwhile, nor for those that come after one that has failed."""
    first = Server(clock, 0.0, math.inf, fresh=False) if dead else Server(clock, 0.1, 0.1)
    servers = [first, Server(clock, 0.2, 0.1)]
    answered: list[bool] = []

    def visit(server: Server) -> Steps[None]:
        answered.append((yield from server.exchange()))

    with Patience(DEADLINE_S) as patience:
        patience.together([(each, visit(each)) for each in servers], lambda: clock.sleep(5 * DEADLINE_S))
        assert sorted(answered) == [not dead, True]
        assert patience.has_time_for(Server(clock, 0.0, 0.0, fresh=False))


def test_servers_that_answer_are_all_asked(clock: Clock) -> None:
    servers = [Server(clock, 0.01, 10.0 if number == 2 else 0.4) for number in range(8)]
    assert get(clock, servers) == [UNAVAILABLE if number == 2 else MISS for number in range(8)]
    servers = [Server(clock, 0.01, 0.4) for number in range(8)]
    began = clock.now
    assert put(clock, servers) == [Status.OK] * 8
    assert clock.now - began < 0.42, "all at the same time"


@pytest.mark.parametrize("call", [put, get], ids=["put", "get"])
def test_control_with_a_deadline_for_each_exchange_it_is_more(
    clock: Clock, call: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def allow(self: Patience, now: float, connecting_s: float = 0.0) -> bool:
        return self._left_s >= self._least_s

    monkeypatch.setattr(Patience, "_allow", allow)
    servers = [Server(clock, 0.49, math.inf), Server(clock, 0.0, math.inf)]
    began = clock.now
    call(clock, servers)
    assert clock.now - began > 1.4 * DEADLINE_S


@pytest.mark.parametrize("slow_s", [0.0, 0.1, 0.4])
def test_a_mutation_that_is_sent_on_ends_with_its_deadline(clock: Clock, slow_s: float) -> None:
    """A shard moves for as long as the call may last, and then its owner falls silent."""
    for turns in range(1, 30):
        server = Server(clock, 0.0, slow_s)
        asked = []

        def refuses(server: Server, asked: list[float] = asked, turns: int = turns) -> bool:
            asked.append(clock.now)
            if len(asked) == turns:
                server.answer_s = math.inf
            return True

        began = clock.now
        put(clock, [server], refuses)
        assert clock.now - began <= DEADLINE_S + 1e-9
        assert all(given >= DEADLINE_S / 4 - 1e-9 for given in server.given)


def test_a_wait_for_room_is_a_part_of_the_deadline(clock: Clock) -> None:
    """The worker has no room for half a deadline, and is silent then."""

    class Holder:
        pool: GrantPool[Any] = GrantPool()

        def ask(self, wants: Any) -> None:
            if clock.now - began > 0.4:
                clock.now += allowed(DEADLINE_S)
                raise TransportError("deadline passed")

        def return_grants(self, numbers: Any) -> None:
            pass

    for limit in ("one value", "a batch"):
        began = clock.now
        with pytest.raises(TransportError):
            if limit == "one value":
                with at_most(DEADLINE_S):
                    obtain(Holder(), 100, room=RoomWait(DEADLINE_S / 2), wait_s=DEADLINE_S / 2)
            else:
                with Patience(DEADLINE_S) as patience:
                    assert patience.has_time_for(Server(clock, 0.0, 0.0, fresh=False))
                    obtain(Holder(), 100, room=RoomWait(DEADLINE_S / 2), wait_s=DEADLINE_S / 2)
        assert clock.now - began <= DEADLINE_S + 0.01


def test_a_part_of_a_call_has_what_the_call_has_left(clock: Clock) -> None:
    with Patience(DEADLINE_S) as outer:
        assert outer.has_time_for(Server(clock, 0.3, 0.0))
        assert abs(ALLOWANCE.seconds - 0.7) < 1e-9
        with Patience(DEADLINE_S) as inner:
            assert inner.has_time_for(Server(clock, 0.0, 0.0)) and ALLOWANCE.seconds <= 0.7 + 1e-9
        assert abs(ALLOWANCE.seconds - 0.7) < 1e-9


@pytest.mark.parametrize("path", ["down", "shm"])
def test_what_a_server_that_failed_has_cost_is_taken_off(clock: Clock, path: str) -> None:
    """One server after another: a transfer with one that answered costs the next one nothing."""
    before: Any = SimpleNamespace(fresh=False, path="shm")
    after: Any = SimpleNamespace(fresh=False, path="shm")
    with Patience(DEADLINE_S) as patience:
        assert patience.has_time_for(before)
        clock.now += 0.6 * DEADLINE_S
        before.path = path
        assert patience.has_time_for(after) is (path == "shm")


# --- calls that are made of others ------------------------------------------------------------------------


class SpreadRoutes(Routes):
    """Routes to servers that each have some of the keys."""

    def __init__(self, clock: Clock, servers: Sequence[Server]) -> None:
        super().__init__(clock, servers)
        self.router.context, self.router.sole = SimpleNamespace(epoch=None), servers[0]

    def group(self, digests: Sequence[bytes], among: Sequence[int] | None = None) -> Any:
        groups: dict[Server, list[int]] = {}
        for at in range(len(digests)) if among is None else among:
            groups.setdefault(self.target(digests[at]), []).append(at)
        return list(groups.items())

    def target(self, digest: bytes) -> Any:
        return self.servers[shard_of(digest) % len(self.servers)]

    def table(self) -> Any:
        return SimpleNamespace(owner=lambda shard: self.servers[shard % len(self.servers)])

    def call_tcp(self, _target: Any, _tcp: Any, call: Steps[Any]) -> Steps[Any]:
        return (yield from call)


class Asked(Server):
    """A server that is also asked for sizes."""

    @property
    def tcp(self) -> Asked:
        return self

    @property
    def info(self) -> Any:
        return SimpleNamespace(node=str(id(self)))

    def sizes(self, digests: Sequence[bytes]) -> Steps[list[int]]:
        return [8] * len(digests) if (yield from self.exchange()) else []


class ManyCalls:
    """Calls for several keys, each of which makes an exchange with several servers."""

    VALUES, PARTS, PART = 4, 40, 10

    def __init__(self, clock: Clock, servers: Sequence[Server], rng: random.Random) -> None:
        self.routes = routes = SpreadRoutes(clock, servers)
        counters = dict.fromkeys((*COUNTERS, "large", "present"), 0)
        any_routes: Any = routes
        nothing: Any = None
        self.gets = gets = Gets(any_routes, nothing, False, counters)
        gets._remote = SimpleNamespace(read=self._read, read_uncounted=self._read, exist=self._exist)  # type: ignore[assignment]
        self.puts = puts = Puts(any_routes, nothing, nothing, ClientOptions(deadline_s=DEADLINE_S), counters)
        puts._put_at = self._put_at  # type: ignore[method-assign]
        puts._delete_at = self._delete_at  # type: ignore[method-assign]
        puts._keep_at = self._keep_at  # type: ignore[method-assign]
        self.digests = [rng.randbytes(16) for _ in range(self.VALUES)]
        self.manifests = {each: Manifest.new(self.PARTS * self.PART, self.PART) for each in self.digests}
        manifests: Any = SimpleNamespace(read_many=self._read_manifests, put=lambda names, _: [Status.OK] * len(names))
        self.large = Large(
            gets, puts, None, manifests, manifests, None, counters, put_once=False, deadline_s=DEADLINE_S
        )  # fmt: skip
        self.replicas = Replicas(any_routes, gets, puts, counters, random.Random(1))
        self.shares = Shares(any_routes, counters, self.replicas)
        self.counters = counters

    def _read_manifests(self, names: Sequence[bytes], rooms: Sequence[memoryview]) -> list[int]:
        for name, room in zip(names, rooms):
            room[:] = self.manifests[name].encode(name)
        return [MANIFEST_BYTES] * len(names)

    def _read(self, target: Any, positions: Sequence[int], batch: Any) -> Steps[Unresolved]:
        there = yield from target.exchange()
        for at in positions:
            batch.results[at] = len(batch.sinks[at]) if there else UNAVAILABLE
        return Unresolved()

    def _exist(self, target: Any, positions: Sequence[int], batch: Any) -> Steps[Unresolved]:
        there = yield from target.exchange()
        for at in positions:
            batch.results[at] = int(there)
        return Unresolved()

    def _mutate(self, target: Any, positions: Sequence[int], statuses: list[int]) -> Steps[None]:
        done = yield from target.exchange()
        for at in positions:
            statuses[at] = Status.OK if done else Status.UNAVAILABLE

    def _put_at(self, batch: Any, target: Any, positions: Sequence[int], _together: bool) -> Steps[None]:
        return self._mutate(target, positions, batch.statuses)

    def _delete_at(
        self, _digests: Any, _sizes: Any, statuses: list[int], _twice: Any, target: Any, positions: Sequence[int],
        _together: bool,
    ) -> Steps[None]:  # fmt: skip
        return self._mutate(target, positions, statuses)

    def _keep_at(
        self, _digests: Any, _how: int, _seconds: int, statuses: list[int], target: Any, positions: Sequence[int],
        _together: bool,
    ) -> Steps[None]:  # fmt: skip
        return self._mutate(target, positions, statuses)

    def large_get(self) -> None:
        results: list[Any] = [LARGE] * self.VALUES
        rooms = [memoryview(bytearray(self.PARTS * self.PART)) for _ in self.digests]
        self.large.resolve(self.digests, rooms, results)
        assert LARGE not in results

    def large_put(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("simm.sdk.large.manifest.PART_BYTES", self.PART)
            value = memoryview(bytes(self.PARTS * self.PART))
            self.large.put(self.digests, [value] * self.VALUES, lambda *_: [], self.PART)

    def large_delete(self) -> None:
        self.large.delete(self.digests)

    def large_keep(self) -> None:
        statuses: list[int] = [Status.TOO_LARGE] * self.VALUES
        self.large.keep(self.digests, statuses, 1, 60)
        assert Status.TOO_LARGE not in statuses

    def large_pin(self) -> None:
        """Of each value all parts are looked for, and one is not there."""
        pins: Any = SimpleNamespace(parted=set(range(self.VALUES)), keys=["k"] * self.VALUES)

        def pin(_keys: Any, names: Sequence[bytes]) -> Any:
            self.gets.stored_many(names)
            return SimpleNamespace(lengths=[], release=lambda: None)

        pinner: Any = SimpleNamespace(pin=pin)
        with self.routes.patience():
            pin_parts(self.large, pinner, pins, self.digests)

    def prefix(self) -> None:
        routes: Any = self.routes
        prefixes = Prefixes(routes, Hasher("n"), Speeds(), self.counters, self.gets.stored_many, self.shares)
        prefixes.find([f"k{number}" for number in range(20)], 1, True)

    def load_ms(self) -> None:
        LoadTimes(Speeds(), self.shares).ms([Hasher("n")(f"k{number}") for number in range(20)])


CALLS = ["large_get", "large_put", "large_delete", "large_keep", "large_pin", "prefix", "load_ms"]
#: What is stored or kept in part is undone, which has half a deadline of its own.
MOST = {"large_put": 1.5 * DEADLINE_S, "large_keep": 1.5 * DEADLINE_S}


def most_lost(clock: Clock, call: str, times: int) -> float:
    """Return the most time that a call has lost with servers of which some fail, over many sets of servers."""
    rng = random.Random(2)
    most = 0.0
    for _ in range(times):
        servers = [
            Asked(clock, 0.0, rng.choice((0.001, 0.001, math.inf)), fresh=rng.random() < 0.2)
            for _ in range(rng.randint(1, 30))
        ]
        calls = ManyCalls(clock, servers, rng)
        began = clock.now
        getattr(calls, call)()
        most = max(most, lost(servers, clock.now - began))
        least = min((given for server in servers for given in server.given), default=DEADLINE_S)
        assert least >= DEADLINE_S / (4 if call in MOST else 2) - 1e-9, "a healthy server would count as dead"
    return most


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_is_made_of_others_loses_one_deadline(clock: Clock, call: str) -> None:
    most = most_lost(clock, call, 150)
    assert 0.99 * DEADLINE_S < most <= MOST.get(call, DEADLINE_S) + 1e-9


@pytest.mark.parametrize("call", [each for each in CALLS if each != "large_pin"])  # one exchange for all its parts
def test_control_with_a_deadline_for_each_of_its_parts_it_is_more(
    clock: Clock, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Patience, "__enter__", lambda self: self)
    assert most_lost(clock, call, 150) > MOST.get(call, DEADLINE_S) + 0.4 * DEADLINE_S


def test_waits_for_a_moving_shard_are_a_part_of_the_calls_deadline(clock: Clock) -> None:
    server = Server(clock, 0.0, 0.001, fresh=False)
    began = clock.now
    with Patience(DEADLINE_S):
        for _ in range(5):
            assert put(clock, [server], lambda _: True) != [Status.OK]
    assert clock.now - began <= DEADLINE_S + 0.1


def test_what_a_part_of_a_call_has_lost_the_next_one_has_not(clock: Clock) -> None:
    with Patience(DEADLINE_S):
        with Patience(DEADLINE_S) as first:
            assert first.has_time_for(Server(clock, 0.3, 0.0))
        assert abs(ALLOWANCE.seconds - 0.7) < 1e-9
        with Patience(DEADLINE_S) as second:
            silent = Server(clock, 0.0, math.inf, fresh=False)
            assert second.has_time_for(silent) and list(silent.exchange())
            assert silent.given[0] <= 0.7 + 1e-9
        assert ALLOWANCE.seconds == 0.0, "the last server counts as well"
        with Patience(DEADLINE_S) as third:
            assert not third.has_time_for(Server(clock, 0.0, 0.0, fresh=False))


def test_a_delete_and_that_of_the_near_copies_have_one_deadline(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner is silent, and so is the server of the copies."""

    def lose() -> None:
        server = Server(clock, 0.0, math.inf, fresh=False)
        with Patience(DEADLINE_S) as patience:
            if patience.has_time_for(server):
                server.wait(server.answer_s)

    def delete(_self: Puts, digests: Sequence[bytes], _sizes: Any = None) -> list[int]:
        lose()
        return [Status.UNAVAILABLE] * len(digests)

    monkeypatch.setattr(Puts, "delete", delete)
    puts: Any = NearPuts.__new__(NearPuts)
    puts._routes = SimpleNamespace(patience=lambda: Patience(DEADLINE_S))
    reached: list[bool] = []

    def delete_near(*_: Any) -> None:
        reached.append(True)
        lose()

    puts.near = SimpleNamespace(delete=delete_near)
    began = clock.now
    assert puts.delete([bytes(16)]) == [Status.UNAVAILABLE] and reached
    assert clock.now - began <= DEADLINE_S + 1e-9


def test_a_replacement_and_the_end_of_an_old_copy_have_one_deadline(clock: Clock) -> None:
    """The server of a new copy is silent, and so is that of an old one."""

    def lose() -> None:
        server = Server(clock, 0.0, math.inf, fresh=False)
        with Patience(DEADLINE_S) as patience:
            if patience.has_time_for(server):
                server.wait(server.answer_s)

    def store(digests: Sequence[bytes], *_: Any) -> list[int]:
        lose()
        return [Status.OK] * len(digests)

    reached: list[int] = []

    def delete(digests: Sequence[bytes]) -> list[int]:
        reached.append(len(digests))
        lose()
        return [Status.UNAVAILABLE] * len(digests)

    routes: Any = SimpleNamespace(
        router=None, target=lambda _: None, patience=lambda: Patience(DEADLINE_S),
        table=lambda: SimpleNamespace(owner=lambda _: None),
    )  # fmt: skip
    gets: Any = SimpleNamespace(look_many=lambda digests, _: [1] * len(digests))
    puts: Any = SimpleNamespace(store=store, delete=delete, count=lambda *_: None)
    replicas = Replicas(routes, gets, puts, {"single_copies": 0})
    began = clock.now
    assert replicas.replace([bytes(16)], [memoryview(b"new")]) == [Status.UNAVAILABLE] and reached == [4]
    assert clock.now - began <= DEADLINE_S + 1e-9


def test_a_client_whose_workers_are_stopped_closes_within_one_deadline(clock: Clock) -> None:
    """Those that answer have time left, whatever their place."""
    took: dict[str, float] = {}

    class Closing:
        def __init__(self, name: str, needs_s: float) -> None:
            self.name, self.needs_s = name, needs_s

        def close(self, *, clean: bool) -> None:
            took[self.name] = min(self.needs_s, allowed(DEADLINE_S)) if clean else 0.0
            clock.now += took[self.name]

    options = SimpleNamespace(deadline_s=DEADLINE_S)
    context: Any = SimpleNamespace(options=options, rdma=SimpleNamespace(close=lambda _: True))
    made = Connections(context)
    stopped: list[Any] = [Closing(f"stopped {number}", math.inf) for number in range(6)]
    healthy: Any = Closing("healthy", 0.001)
    targets = [*stopped[:3], healthy, *stopped[3:]]
    made.targets = {(each.name, 0, 1): each for each in targets}
    began = clock.now
    made.close(0.0, clean=True)
    assert clock.now - began <= DEADLINE_S and len(took) == 7
    assert took["healthy"] == 0.001
    assert allowed(math.inf) == math.inf


def test_a_session_is_closed_within_what_its_call_has_left() -> None:
    """Another thread has it."""
    waits: list[float] = []
    session: Any = WorkerSession.__new__(WorkerSession)
    session._ending = session._over = False

    def acquire(blocking: bool, timeout: float = -1.0) -> bool:
        waits.append(timeout)
        return False

    session.lock, session.closed, session.ring, session.deadline_s = SimpleNamespace(acquire=acquire), False, None, 60.0
    session.channel = SimpleNamespace(broken="gone", close=lambda: None)
    session.pool, session.copying, session.unpins = GrantPool[Any](), [], []
    session.welcome, session.session = SimpleNamespace(segment="none"), 1
    with at_most(0.0):
        session.close()
    assert waits == [0.0]
    RETIRED[:] = [old for old in RETIRED if old.segment != "none"]

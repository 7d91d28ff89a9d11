"""A call that meets silent servers, in any order and number, loses one deadline in all. On a clock of its own."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from simm.cluster.lookup import Unresolved
from simm.config.client_options import ClientOptions
from simm.errors import TransportError
from simm.ipc.grant_pool import GrantPool, RoomWait, obtain
from simm.ipc.patience import Patience
from simm.ipc.steps import Steps
from simm.net.allowance import ALLOWANCE, allowed, at_most
from simm.sdk.batch import MISS, UNAVAILABLE, Batch
from simm.sdk.reads import Gets
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

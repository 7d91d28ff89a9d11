"""A call that meets silent servers, in any order and number, loses one deadline in all. On a clock of its own."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from simm.config.client_options import ClientOptions
from simm.errors import TransportError
from simm.ipc.grant_pool import GrantPool, RoomWait, obtain
from simm.net.allowance import ALLOWANCE, allowed, at_most
from simm.sdk.batch import MISS, UNAVAILABLE, Batch, Patience
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

    def sleep(self, seconds: float) -> None:
        self.now += max(0.0, seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    yield Clock(monkeypatch)
    assert ALLOWANCE.seconds == ALLOWANCE.until == math.inf, "the next call of this thread has its own deadline"


class Server:
    """A server that takes ``connect_s`` for a connection and ``answer_s`` for each exchange, or never answers."""

    reader = None

    def __init__(self, clock: Clock, connect_s: float, answer_s: float, *, fresh: bool = True) -> None:
        self.clock = clock
        self.connect_s = connect_s
        self.answer_s = answer_s
        self.fresh = fresh
        self.path = "tcp"
        #: What its exchanges were allowed, seconds.
        self.given: list[float] = []

    def wait(self, seconds: float) -> bool:
        given = allowed(DEADLINE_S)
        self.clock.now += max(0.0, min(given, seconds))
        if seconds > given:
            self.path = "down"
        return seconds <= given

    def ready(self) -> bool:
        if self.fresh:
            self.fresh = False
            self.wait(self.connect_s)
        return self.path != "down"

    def arena(self) -> None:
        self.ready()

    def exchange(self) -> bool:
        """Return whether it answered."""
        if not self.ready():
            return False
        self.given.append(allowed(DEADLINE_S))
        return self.wait(self.answer_s)

    @property
    def healthy(self) -> bool:
        return self.connect_s + self.answer_s < DEADLINE_S / 4


def some_servers(clock: Clock, rng: random.Random) -> list[Server]:
    times = (0.0, 0.001, 0.1, 0.3, 0.49, 0.6, 0.95, math.inf)
    return [
        Server(clock, rng.choice(times), rng.choice(times), fresh=rng.random() < 0.7) for _ in range(rng.randint(1, 6))
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

    def act(target: Any, positions: Sequence[int]) -> None:
        if target.exchange():
            for position in positions:
                statuses[position] = Status.WRONG_OWNER if refuses(target) else Status.OK

    puts._everywhere(digests, statuses, act)
    return statuses


def get(clock: Clock, servers: Sequence[Server]) -> list[Any]:
    routes: Any = Routes(clock, servers)
    copier: Any = None
    gets = Gets(routes, copier, False, dict.fromkeys(COUNTERS, 0))

    def read(target: Any, positions: Sequence[int], batch: Batch) -> tuple[()]:
        for position in positions:
            batch.results[position] = MISS if target.exchange() else UNAVAILABLE
        return ()

    gets._remote = SimpleNamespace(read=read)  # type: ignore[assignment]
    return gets.read_many([bytes([number]) * 16 for number in range(len(servers))], [None] * len(servers))


def lost(servers: Sequence[Server], passed: float) -> float:
    """Return the time that passed beside the exchanges of servers that answered."""
    return passed - sum(server.answer_s for server in servers if server.path != "down" and server.given)


@pytest.mark.parametrize("call", [put, get], ids=["put", "get"])
def test_a_call_loses_one_deadline_whatever_it_meets(clock: Clock, call: Callable[..., list[Any]]) -> None:
    rng = random.Random(1)
    most = 0.0
    for _ in range(3000):
        servers = some_servers(clock, rng)
        began = clock.now
        call(clock, servers)
        most = max(most, lost(servers, clock.now - began))
        assert most <= DEADLINE_S + 1e-9, [(server.connect_s, server.answer_s, server.fresh) for server in servers]
        for server in servers:
            assert all(given >= DEADLINE_S / 2 - 1e-9 for given in server.given), "a healthy server would count as dead"
    assert most > 0.99 * DEADLINE_S


def test_servers_that_answer_are_all_asked(clock: Clock) -> None:
    servers = [Server(clock, 0.01, 10.0 if number == 2 else 0.4) for number in range(8)]
    assert get(clock, servers) == [UNAVAILABLE if number == 2 else MISS for number in range(3)] + [UNAVAILABLE] * 5
    servers = [Server(clock, 0.01, 0.4) for number in range(8)]
    assert put(clock, servers) == [Status.OK] * 8, "time in exchanges that succeed is not lost"


@pytest.mark.parametrize("call", [put, get], ids=["put", "get"])
def test_control_with_a_deadline_for_each_exchange_it_is_more(
    clock: Clock, call: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def allow(self: Patience, now: float) -> bool:
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

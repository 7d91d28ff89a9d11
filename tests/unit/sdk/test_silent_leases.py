"""A call for pinned values loses one deadline in all, whichever servers elsewhere are silent. On a clock of its own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from simm.arena.hashing import Hasher, shard_of
from simm.constants import RANGES_MAX
from simm.errors import DeadlineError, DeviceError, TransportError
from simm.host.buffers import Copier
from simm.ipc.patience import Patience
from simm.ipc.steps import Steps, finish
from simm.net.allowance import ALLOWANCE
from simm.sdk.ops.arena_pins import ArenaPins
from simm.sdk.ops.pinner import Pinner
from simm.sdk.ops.pins import Pins
from simm.sdk.ops.remote_pins import RemotePins
from simm.sdk.reads import Gets
from simm.wire import messages as M
from simm.wire.messages import Status

DEADLINE_S = 1.0
EPOCH = 7
NAMES = ("hits", "misses", "moved", "outages", "retries", "fallbacks")
digest_of = Hasher("silent")


class Clock:
    """Time that passes only when somebody waits."""

    def __init__(self) -> None:
        self.now = 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr("time.monotonic", lambda: clock.now)
    yield clock
    left = ALLOWANCE.seconds, ALLOWANCE.until
    ALLOWANCE.mine.give_back(None, math.inf, math.inf)  # whatever it was: not for the tests after this one
    assert left == (math.inf, math.inf), "the next call of this thread has its own deadline"


class Lease:
    """A connection to a server that says of each key that it has it no more, or nothing."""

    broken = ""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.bound_s = self.until = 0.0
        self.asked: Any = None

    def bound(self, until: float) -> None:
        self.bound_s = until

    def submit(self, msg: Any) -> int:
        self.asked = msg
        self.server.asked += 1
        self.until = min(self.bound_s, self.server.clock.now + min(DEADLINE_S, ALLOWANCE.seconds))
        return 1

    def wait(self, _number: int) -> None:
        if self.server.silent:
            self.server.clock.now = max(self.server.clock.now, self.until)
            self.broken = "deadline passed"
            raise DeadlineError(self.broken)
        if self.server.resets:
            self.broken = "the peer closed the connection"
            raise TransportError(self.broken)

    def result(self, _frame: None) -> Any:
        return M.Pinned(1, [(Status.PREVIOUS, 0, 0, 0, EPOCH, 0, 0)] * len(self.asked.digests))

    def has_input(self, _number: int) -> bool:
        return not self.server.silent or self.server.clock.now >= self.until

    def fileno(self) -> int:
        return -1

    def close(self) -> None: ...


class Server:
    """A server of another host, and the path to it."""

    fresh, rdma, bulk, reader, session = False, None, True, None, None
    deadline_s = DEADLINE_S

    def __init__(self, clock: Clock, *, silent: bool = False, resets: bool = False) -> None:
        self.clock, self.silent, self.resets = clock, silent, resets
        self.tcp: Server | None = self
        self.info = SimpleNamespace(node="elsewhere")
        #: How many questions it was sent.
        self.asked = 0

    @property
    def path(self) -> str:
        return "down" if self.tcp is None else "tcp"

    def arena(self) -> None: ...

    def connect_soon(self) -> None: ...

    def ready(self) -> bool:
        return self.tcp is not None

    def tcp_lost(self, path: Server, _reason: str) -> None:
        if path is self.tcp:
            self.tcp = None

    def take_out(self, _until: float) -> Steps[Any]:
        yield from ()
        return Lease(self)

    def put_back(self, _lease: Lease) -> None: ...


class Routes:
    """Routes to servers that each have some keys, whose shards come from others."""

    closed = False

    def __init__(self, servers: Sequence[Server], previous: Sequence[Server] = ()) -> None:
        self.servers = servers
        self.wakes = 0
        self._table = SimpleNamespace(
            owner=lambda shard: servers[shard % len(servers)], since=lambda _: EPOCH,
            previous=lambda shard: (previous or servers)[shard % len(previous or servers)],
        )  # fmt: skip
        self.router = SimpleNamespace(sole=None, context=SimpleNamespace(epoch=None), table=self._table)

    def group(self, digests: Sequence[bytes]) -> Any:
        groups: dict[Server, list[int]] = {}
        for at, digest in enumerate(digests):
            groups.setdefault(self.servers[shard_of(digest) % len(self.servers)], []).append(at)
        return groups.items()

    def table(self) -> Any:
        return self._table

    def patience(self, began: float | None = None) -> Patience:
        return Patience(DEADLINE_S, began)

    def manager_connected(self) -> bool:
        return True

    def refresh(self) -> None: ...

    def wake(self) -> None:
        self.wakes += 1


def pinner_of(routes: Any, replicas: Any = None) -> Pinner:
    counters = dict.fromkeys(NAMES, 0)
    copier = Copier(1)
    return Pinner(routes, Gets(routes, copier, False, counters), copier, counters, replicas, DEADLINE_S)


def pin(pinner: Pinner, count: int = 12) -> None:
    digests = [digest_of(str(number)) for number in range(count)]
    with pinner.pin([str(number) for number in range(count)], digests) as pins:
        assert pins.lengths == [None] * count


def test_silent_previous_owners_cost_one_deadline(clock: Clock) -> None:
    previous = [Server(clock, silent=True) for _ in range(4)]
    routes = Routes([Server(clock) for _ in range(4)], previous)
    began = clock.now
    pin(pinner_of(routes))
    assert clock.now - began <= DEADLINE_S + 1e-9
    assert sum(server.asked for server in previous) == 1 == sum(server.path == "down" for server in previous)
    assert routes.wakes, "the client's thread connects again"


def test_a_silent_server_of_second_copies_costs_one_deadline(clock: Clock) -> None:
    servers = [Server(clock, silent=True), Server(clock)]

    def rounds(digests: Sequence[bytes]) -> Iterator[Any]:
        left = list(range(len(digests)))
        for step in range(5):
            yield left, [digest_of(f"{step}-{number}") for number in left], step == 4

    began = clock.now
    pin(pinner_of(Routes(servers, servers[1:]), SimpleNamespace(rounds=rounds)))
    assert clock.now - began <= DEADLINE_S + 1e-9
    assert servers[0].asked == 1


def test_pins_within_one_call_lose_one_deadline(clock: Clock) -> None:
    """As those of the parts of several values do."""
    routes = Routes([Server(clock, silent=True)])
    pinner = pinner_of(routes)
    began = clock.now
    with routes.patience():
        for _ in range(4):
            pin(pinner, 1)
    assert clock.now - began <= DEADLINE_S + 1e-9


def test_a_lease_that_has_lapsed_takes_no_path_down(clock: Clock) -> None:
    server = Server(clock, resets=True)
    pin(pinner_of(Routes([server])))
    assert server.asked == 1 and server.path == "tcp"


# -- reads ---------------------------------------------------------------------------------------------------


class Parts:
    """A value in parts, of which a read touches one."""

    total = 100

    def __init__(self, pins: Pins) -> None:
        self.pins = pins

    def divide(self, ranges: Any) -> Any:
        return [(0, ranges)]

    def read(self, wants: Any) -> bool:
        return None not in self.pins.read_wants(wants)


def held(routes: Any, servers: Sequence[Server]) -> Pins:
    """Return pinned values of 100 bytes, one at each server."""
    pins = Pins([str(number) for number in range(len(servers))], routes, Copier(1), lambda _: None, DEADLINE_S)
    for number, server in enumerate(servers):
        target: Any = server
        holder = finish(RemotePins.at(target, routes, Copier(1), None, dict.fromkeys(NAMES, 0)))
        assert holder is not None
        holder._values[number], holder._versions[number] = (1, 0, 100, 0), (bytes(16), (1, 0, 0, 100, 0))
        pins.take(number, holder, 100)
    pins.settle()
    return pins


def in_parts(routes: Any, values: Sequence[Pins]) -> Pins:
    pins = Pins([str(number) for number in range(len(values))], routes, Copier(1), lambda _: None, DEADLINE_S)
    pins.settle()
    for number, value in enumerate(values):
        pins.take_parts(number, Parts(value))
    return pins


@pytest.mark.parametrize("servers", [1, 5])
@pytest.mark.parametrize("call", ["read", "get_ranges_many"])
def test_reads_of_values_in_parts_lose_one_deadline(clock: Clock, call: str, servers: int) -> None:
    routes = Routes([Server(clock, silent=True) for _ in range(servers)])
    pins = in_parts(routes, [held(routes, [routes.servers[number % servers]]) for number in range(5)])
    rows = np.zeros((5, 10), np.uint8)
    began = clock.now
    if call == "read":
        assert pins.read([(0, 10, rows)]) == [None] * 5
    else:
        assert pins.get_ranges_many(range(5), [[(0, 10, row)] for row in rows]) == [None] * 5
    assert clock.now - began <= DEADLINE_S + 1e-9


class Locked:
    """A lock that another thread has."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.tried = 0

    def acquire(self, _blocking: bool, timeout: float) -> bool:
        if timeout > 0.0:
            self.tried += 1
            self.clock.now += timeout
        return False

    def locked(self) -> bool:
        return True

    def release(self) -> None: ...


def lock(pins: Pins, number: int, taken: Locked) -> RemotePins:
    """Let another thread use the lease of a value; return that."""
    holder = pins._holders[number]
    assert isinstance(holder, RemotePins)
    holder._lock = taken  # type: ignore[assignment]
    return holder


def test_values_in_parts_that_another_thread_waits_for_cost_one_deadline(clock: Clock) -> None:
    routes = Routes([Server(clock)])
    values = [held(routes, routes.servers) for _ in range(5)]
    for value in values:
        lock(value, 0, Locked(clock))
    began = clock.now
    assert in_parts(routes, values).read([(0, 10, np.zeros((5, 10), np.uint8))]) == [None] * 5
    assert clock.now - began <= DEADLINE_S + 1e-9


def many_ranges(values: int, runs: int) -> list[tuple[int, int, Any]]:
    """Return so many ranges of values that they are read in this number of runs."""
    count = RANGES_MAX * (runs - 1) + 1
    rows = np.zeros((values, count), np.uint8)
    return [(at % 100, 1, rows[:, at : at + 1]) for at in range(count)]


@pytest.mark.parametrize("kind", ["rows", "in parts"])
def test_runs_of_ranges_have_one_deadline(clock: Clock, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run reads one of the values, and finds its server silent."""
    routes = Routes([Server(clock, silent=True) for _ in range(3)])
    values = [held(routes, [server]) for server in routes.servers]
    pins = held(routes, routes.servers) if kind == "rows" else in_parts(routes, values)
    plain, asked = pins._read_run, []

    def read_one(run: Any, numbers: Sequence[int]) -> list[int | None]:
        asked.append(list(numbers))
        got = plain(run, numbers[:1])
        return [each or (100 if number in numbers[1:] else None) for number, each in enumerate(got)]

    monkeypatch.setattr(pins, "_read_run", read_one)
    began = clock.now
    assert pins.read(many_ranges(3, 5)) == [None] * 3
    assert clock.now - began <= DEADLINE_S + 1e-9
    assert asked == [[0, 1, 2], [1, 2], [2]], "what is gone is not read again, and nothing once all are"


def test_runs_of_ranges_wait_once_for_another_thread(clock: Clock) -> None:
    routes = Routes([Server(clock)])
    pins = held(routes, routes.servers)
    taken = Locked(clock)
    lock(pins, 0, taken)
    began = clock.now
    assert pins.read(many_ranges(1, 4)) == [None]
    assert clock.now - began <= DEADLINE_S + 1e-9 and taken.tried == 1


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each read of rows bring them."""

    def read_rows(_: Any, numbers: Sequence[int], _rows: Any, lengths: Any, results: list[int | None]) -> Any:
        for number in numbers:
            results[number] = lengths[number]
        yield from ()

    monkeypatch.setattr(RemotePins, "read_rows", read_rows)


@pytest.mark.usefixtures("answered")
def test_a_lease_that_another_thread_has_costs_its_own_values_alone(clock: Clock) -> None:
    """That thread waits for a server that is silent. There was one lock for all servers."""
    routes = Routes([Server(clock), Server(clock)])
    pins = held(routes, routes.servers)
    holder = lock(pins, 0, Locked(clock))
    began = clock.now
    assert pins.read([(0, 10, np.zeros((2, 10), np.uint8))]) == [None, 100]
    assert clock.now - began <= DEADLINE_S + 1e-9 and holder.counters["outages"] == 1


@pytest.mark.usefixtures("answered")
def test_a_thread_that_comes_forward_is_waited_for(clock: Clock) -> None:
    """It reads as much as it likes from a server that answers. After a deadline it was a miss that nobody counted."""
    routes = Routes([Server(clock)])
    pins = held(routes, routes.servers)

    class Busy(Locked):
        """A lock that another thread has for several exchanges."""

        def acquire(self, blocking: bool, timeout: float) -> bool:
            super().acquire(blocking, timeout)
            holder._turns += 1
            return self.tried > 3

    holder = lock(pins, 0, Busy(clock))
    assert pins.read([(0, 10, np.zeros((1, 10), np.uint8))]) == [100]
    assert holder.counters["outages"] == 0


def test_a_lease_that_is_gone_counts_once_for_all_runs(clock: Clock) -> None:
    routes = Routes([Server(clock, resets=True)])
    pins = held(routes, routes.servers)
    (holder,) = pins._holders
    assert isinstance(holder, RemotePins)
    assert pins.read(many_ranges(1, 4)) == [None]
    assert holder.counters["outages"] == 1


@pytest.mark.parametrize("where", ["elsewhere", "here"])
def test_a_gpu_that_fails_costs_the_values_of_one_holder_alone(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """It ended the exchanges of all others, and so their leases."""
    routes = Routes([Server(clock) for _ in range(3)])
    pins = held(routes, routes.servers)
    failed: list[DeviceError] = []
    pins._failed = failed.append
    here: Any = ArenaPins.__new__(ArenaPins)
    pins._holders[2] = here
    bad = here if where == "here" else pins._holders[0]

    def read(holder: Any, wants: Any, results: dict[int, Any]) -> None:
        if holder is bad:
            raise DeviceError("an illegal address")
        results.update((number, 1) for number, _ in wants)

    def read_remote(holder: Any, wants: Any, results: dict[int, Any]) -> Any:
        yield from ()
        read(holder, wants, results)

    monkeypatch.setattr(ArenaPins, "read", read)
    monkeypatch.setattr(RemotePins, "read", read_remote)
    wants: list[Any] = [[(0, 10, row)] for row in np.zeros((3, 10), np.uint8)]
    assert pins.get_ranges_many(range(3), wants) == ([100, 100, None] if bad is here else [None, 100, 100])
    assert len(failed) == 1
    assert not any(each._channel.broken for each in pins._holders if isinstance(each, RemotePins))

"""A call that asks workers of this host, all of them silent, loses one deadline in all. On a clock of its own.

It reads their arenas without them. It asks them for pins, for values that change all the time, and for the keys of
shards that are moving.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from simm.arena.hashing import Hasher, shard_of
from simm.arena.reader import VECTOR_KEYS, Unsettled
from simm.errors import DeadlineError, NotSentError
from simm.host.buffers import Copier
from simm.ipc.counts import Word
from simm.ipc.patience import Patience
from simm.ipc.steps import Steps
from simm.net.allowance import ALLOWANCE, allowed, spend
from simm.sdk.batch import MISS, UNAVAILABLE
from simm.sdk.ops.parts import ranges_of
from simm.sdk.ops.pinner import Pinner
from simm.sdk.reads import Gets
from simm.wire.messages import Status
from simm.wire.shard_set import MOVING

DEADLINE_S = 1.0
EPOCH = 7
digest_of = Hasher("silent")
NAMES = ("hits", "misses", "moved", "outages", "retries", "fallbacks")


class Clock:
    """Time that passes only when somebody waits."""

    def __init__(self) -> None:
        self.now = 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr("time.monotonic", lambda: clock.now)
    yield clock
    mine = ALLOWANCE.mine
    left = ALLOWANCE.seconds, ALLOWANCE.until
    mine.give_back(None, math.inf, math.inf)  # whatever it was: not for the tests after this one
    assert left == (math.inf, math.inf), "the next call of this thread has its own deadline"


class Reader:
    """An arena of which all shards are moving, and that has nothing; or with a value that changes all the time."""

    data_offset, node, of_cluster = 0, -1, True
    attempts = (iter(()),)
    data = memoryview(bytes(16))

    def __init__(self) -> None:
        self.counts = memoryview(bytearray(8 * 1024)).cast("Q")
        self.visited = bytearray(1)
        self.changes = False

    def locate(self, _digest: bytes) -> None:
        if self.changes:
            raise Unsettled

    def shard_word(self, _digest: bytes) -> int:
        return MOVING | EPOCH

    def contains_many(self, digests: Sequence[bytes]) -> list[bool]:
        return [False] * len(digests)

    def contains_previous(self, _digest: bytes) -> bool:
        return False

    def confirm(self, _digest: bytes, _slot: int, _seq: int) -> bool:
        return True

    confirm_previous = confirm

    def missed(self, _digest: bytes) -> None: ...


class Session:
    """A session with a worker that answers at once, or never."""

    closed, broken = False, ""

    def __init__(self, clock: Clock, reader: Reader) -> None:
        self.clock, self.reader, self.counts = clock, reader, reader.counts
        self.silent = True
        self.copying: list[None] = []
        self.asked = 0

    def _ask(self) -> None:
        if ALLOWANCE.seconds <= 0.0:
            raise NotSentError("the call's deadline has passed")
        self.asked += 1
        if self.silent:
            self.clock.now += max(0.0, allowed(DEADLINE_S))
            self.broken = "silent"
            raise DeadlineError("deadline passed")

    def pin_many(self, digests: Sequence[bytes], _how: int = 0) -> Any:
        self._ask()
        return [(Status.NOT_FOUND, 0, 0, 0, 0, 0)] * len(digests)

    def pin_one(self, digest: bytes) -> Any:
        return self.pin_many([digest])[0]

    def exchange(self, msg: Any) -> Any:
        self._ask()
        return SimpleNamespace(entries=[(Status.PREVIOUS, 0, 0, 0, EPOCH, 0)] * len(msg.digests))


class Worker:
    """A worker of this host, whose arena is mapped."""

    fresh, tcp, rdma, bulk = False, None, None, True

    def __init__(self, clock: Clock) -> None:
        self.reader = Reader()
        self.info = SimpleNamespace(node="here")
        self.session: Session | None = Session(clock, self.reader)
        self.sessions = [self.session]

    @property
    def path(self) -> str:
        return "down" if self.session is None else "shm"

    def arena(self) -> Reader:
        return self.reader

    def ready(self) -> bool:
        return self.session is not None


class Routes:
    """Routes to workers that each have some keys. All shards come from the last of them."""

    closed = False

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.workers = workers
        owners = np.arange(1 << 14, dtype=np.uint16) % len(workers)
        self._table = SimpleNamespace(
            owners=owners, by_position=workers, owner=lambda shard: workers[shard % len(workers)],
            previous=lambda _: workers[-1], since=lambda _: EPOCH,
        )  # fmt: skip
        self.router = SimpleNamespace(sole=None, context=SimpleNamespace(epoch=None), table=self._table)

    def group(self, digests: Sequence[bytes]) -> Any:
        groups: dict[Worker, list[int]] = {}
        for at, digest in enumerate(digests):
            groups.setdefault(self.workers[shard_of(digest) % len(self.workers)], []).append(at)
        return groups.items()

    def table(self) -> Any:
        return self._table

    def patience(self, began: float | None = None) -> Patience:
        return Patience(DEADLINE_S, began)

    def manager_connected(self) -> bool:
        return True

    def refresh(self) -> None: ...

    def wake(self) -> None: ...

    def session_failed(self, target: Worker, session: Session, _exc: Exception) -> None:
        if session.broken:
            target.session = None


class Calls:
    """The calls of a client of so many workers."""

    def __init__(self, clock: Clock, count: int) -> None:
        self.workers = [Worker(clock) for _ in range(count)]
        routes: Any = Routes(self.workers)
        self.counters = dict.fromkeys(NAMES, 0)
        copier = Copier(1)
        self.gets = Gets(routes, copier, False, self.counters)
        self.pinner = Pinner(routes, self.gets, copier, self.counters, None, DEADLINE_S)

    def asked(self) -> int:
        """Return how many questions the workers were sent."""
        return sum(session.asked for worker in self.workers for session in worker.sessions)

    def pin(self, digests: Sequence[bytes]) -> None:
        with self.pinner.pin([str(number) for number in range(len(digests))], digests) as pins:
            assert pins.lengths == [None] * len(digests)

    def exists(self, digests: Sequence[bytes]) -> None:
        assert self.gets.stored_many(digests) == [False] * len(digests)

    def look(self, digests: Sequence[bytes]) -> None:
        assert self.gets.look_many(digests) == [UNAVAILABLE] * len(digests)

    def get(self, digests: Sequence[bytes]) -> None:
        got = self.gets.read_many(digests, [memoryview(bytearray(8)) for _ in digests])
        assert {*got} <= {MISS, UNAVAILABLE}

    def get_changing(self, digests: Sequence[bytes]) -> None:
        for worker in self.workers:
            worker.reader.changes = True
        self.get(digests)


def digests_of(count: int) -> list[bytes]:
    return [digest_of(str(number)) for number in range(count)]


@pytest.mark.parametrize("call", ["pin", "exists", "look", "get", "get_changing"])
@pytest.mark.parametrize("keys", [12, 3 * VECTOR_KEYS])
@pytest.mark.parametrize("within", [False, True])
def test_a_call_to_silent_workers_loses_one_deadline(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, call: str, keys: int, within: bool
) -> None:
    """All by itself, and as a part of another call."""
    monkeypatch.setattr("simm.sdk.ops.owners.Arenas", lambda *_: SimpleNamespace(contain=nothing))
    calls = Calls(clock, 4)
    began = clock.now
    if within:
        with Patience(DEADLINE_S):
            getattr(calls, call)(digests_of(keys))
            assert ALLOWANCE.seconds <= 1e-9, "the call that it is a part of has lost it, too"
    else:
        getattr(calls, call)(digests_of(keys))
    assert clock.now - began <= DEADLINE_S + 1e-9
    assert calls.asked() == 1


def test_keys_for_which_no_time_is_left_are_late(clock: Clock) -> None:
    calls = Calls(clock, 4)
    digests = digests_of(12)
    calls.get(digests)
    others = [worker for worker in calls.workers if worker.session is not None]
    assert len(others) == 3, "those that were not asked are not down"
    wanted = [sum(calls.workers[shard_of(digest) % 4] is worker for digest in digests) for worker in others]
    assert [worker.reader.counts[Word.TIMEOUT] for worker in others] == wanted and all(wanted)


def nothing(keys: Any) -> Any:
    """Find no key in any arena: all shards are moving."""
    return np.zeros(len(keys.low), bool), np.full(len(keys.low), MOVING | EPOCH, np.uint64)


@pytest.mark.parametrize("keys", [12, 3 * VECTOR_KEYS])
@pytest.mark.parametrize("call", ["exists", "get"])
def test_issue_a_look_at_moving_shards_leaves_no_deadline_in_its_thread(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, call: str, keys: int
) -> None:
    """Shards of several workers move, and all of these answer. Later calls of the thread counted as its parts."""
    monkeypatch.setattr("simm.sdk.ops.owners.Arenas", lambda *_: SimpleNamespace(contain=nothing))
    calls = Calls(clock, 3)
    for worker in calls.workers:
        assert worker.session is not None
        worker.session.silent = False
    getattr(calls, call)(digests_of(keys))
    assert calls.asked() >= 3
    assert ALLOWANCE.seconds == ALLOWANCE.until == math.inf and ALLOWANCE.mine.owner is None


class Fresh(Worker):
    """A worker that answers, whose first connection takes a while. The value in its arena changes all the time."""

    def __init__(self, clock: Clock, after_s: float) -> None:
        super().__init__(clock)
        assert self.session is not None
        self.session.silent, self.reader.changes = False, True
        self.clock, self.after_s, self.arena_there = clock, after_s, self.reader
        self.reader: Any = None

    @property
    def fresh(self) -> bool:  # type: ignore[override]
        return self.reader is None

    def ready(self) -> bool:
        if self.reader is None:
            self.clock.now += self.after_s
            self.reader = self.arena_there
        return super().ready()


@pytest.mark.parametrize("after_s", [0.0, 0.4, 0.6, 0.7])
def test_issue_a_worker_is_asked_for_a_pin_although_its_connection_took_most_of_the_deadline(
    clock: Clock, after_s: float
) -> None:
    """As for all else of a call for one key, a quarter of the deadline is enough."""
    calls = Calls(clock, 1)
    worker = calls.workers[0] = Fresh(clock, after_s * DEADLINE_S)
    target: Any = worker
    assert worker.session is not None
    calls.gets.read(target, digests_of(1)[0], memoryview(bytearray(8)))
    assert worker.session.asked and not worker.arena_there.counts[Word.TIMEOUT]


def test_issue_ranges_of_a_changing_value_that_has_moved_are_all_that_counts(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker that is asked for a pin has it no more. It was read as a whole at its previous owner."""
    calls = Calls(clock, 1)
    (worker,) = calls.workers
    assert worker.session is not None
    worker.session.silent, worker.reader.changes = False, True
    sinks: list[Any] = []

    def copy(_reader: Any, batch: Any, position: int, _confirm: Any) -> int | bytes:
        sinks.append(batch.sinks[position])
        return bytes(4096) if sinks[-1] is None else 4096

    monkeypatch.setattr(calls.gets, "_copy", copy)
    target: Any = worker
    ranges = ranges_of([(0, 10, bytearray(10)), (90, 20, bytearray(20))])
    assert calls.gets.read_ranges(target, digests_of(1)[0], ranges) == 4096
    assert sinks == [ranges]
    assert worker.reader.counts[Word.HIT_BYTES] == 30


def test_a_call_that_has_ended_allows_nothing(clock: Clock) -> None:
    server: Any = SimpleNamespace(fresh=False, path="shm")
    begun: list[bool] = []

    def visit() -> Steps[None]:
        begun.append(True)
        yield from ()

    with Patience(DEADLINE_S) as patience:
        assert patience.has_time_for(server)
    assert not patience.has_time_for(server)
    patience.together([(server, visit())])
    patience.settle()
    assert not begun
    assert ALLOWANCE.seconds == ALLOWANCE.until == math.inf


class Answered:
    """The wait for an answer that has come."""

    events, last = 0, False

    def __init__(self, until: float) -> None:
        self.until = until

    def ready(self) -> bool:
        return True

    def descriptor(self) -> int:
        return -1

    def receive(self) -> None: ...

    def extend(self, until: float) -> None:
        self.until = until


@pytest.mark.parametrize("lost_s", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("waits", ["by itself", "in a part"])
def test_what_is_lost_meanwhile_is_lost_to_those_elsewhere(clock: Clock, lost_s: float, waits: str) -> None:
    """Its further exchanges get what is left, half a deadline at least: a healthy server would count as dead."""
    given: list[float] = []
    elsewhere: Any = SimpleNamespace(fresh=False, path="tcp")
    silent: Any = SimpleNamespace(fresh=False, path="shm")

    def visit() -> Steps[None]:
        given.append(allowed(math.inf))
        yield Answered(clock.now + allowed(DEADLINE_S))
        given.append(allowed(math.inf))

    def lose(patience: Patience) -> None:
        assert patience.has_time_for(silent)
        clock.now += lost_s * DEADLINE_S
        silent.path = "down"

    def meanwhile() -> None:
        clock.now += 5 * DEADLINE_S  # copies, which are no wait
        if waits == "by itself":
            lose(patience)
        else:
            with Patience(DEADLINE_S) as part:
                lose(part)

    with Patience(DEADLINE_S) as patience:
        patience.together([(elsewhere, visit())], meanwhile)
        assert patience.has_time_for(elsewhere) is (lost_s <= 0.5)
    wanted = [1.0, max(0.5, 1.0 - lost_s)]
    assert [round(each, 9) for each in given] == [each * DEADLINE_S for each in wanted]


@pytest.mark.parametrize("lost_s", [0.0, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("where", ["by itself", "in a part", "in a part, elsewhere"])
def test_issue_what_a_step_loses_is_lost_once_to_the_others(clock: Clock, lost_s: float, where: str) -> None:
    """What it lost in a part was taken off the others twice: less than nothing was left for a healthy server."""
    given: list[float] = []
    healthy: Any = SimpleNamespace(fresh=False, path="tcp")
    own: Any = SimpleNamespace(fresh=False, path="shm")
    silent: Any = SimpleNamespace(fresh=False, path="shm") if where.endswith("elsewhere") else own

    def visit() -> Steps[None]:
        for _ in range(2):
            given.append(allowed(math.inf))
            yield Answered(clock.now + allowed(DEADLINE_S))
        given.append(allowed(math.inf))

    def loses() -> Steps[None]:
        yield Answered(clock.now + allowed(DEADLINE_S))
        with contextlib.nullcontext(patience) if where == "by itself" else Patience(DEADLINE_S) as part:
            assert part.has_time_for(silent)
            clock.now += lost_s * DEADLINE_S
            if lost_s:
                silent.path = "down"

    with Patience(DEADLINE_S) as patience:
        patience.together([(healthy, visit()), (own, loses())])
        assert patience.has_time_for(healthy) is (lost_s <= 0.5)
    wanted = [1.0, 1.0, max(0.5, 1.0 - lost_s)]
    assert [round(each, 9) for each in given] == [each * DEADLINE_S for each in wanted]


@pytest.mark.parametrize("part", [True, False])
def test_issue_a_first_connection_is_not_charged_with_what_a_step_loses(clock: Clock, part: bool) -> None:
    """It is there when the step has ended, with 0.7 of a deadline left."""
    silent: Any = SimpleNamespace(fresh=False, path="shm")
    connecting: Any = SimpleNamespace(fresh=True, path="tcp", connect_soon=lambda: None, ready=lambda: True)
    given: list[float] = []

    def visit() -> Steps[None]:
        given.append(allowed(math.inf))
        yield from ()

    def loses() -> Steps[None]:
        yield Answered(clock.now + allowed(DEADLINE_S))
        with Patience(DEADLINE_S) if part else contextlib.nullcontext(patience) as mine:
            assert mine.has_time_for(silent)
            clock.now += 0.3 * DEADLINE_S
            silent.path, connecting.fresh = "down", False

    with Patience(DEADLINE_S) as patience:
        patience.together([(connecting, visit()), (silent, loses())])
    assert [round(each, 9) for each in given] == [0.7 * DEADLINE_S]


class Late:
    """A worker that is connected after a while. Time passes with each look."""

    path = "shm"

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.looks = 0

    @property
    def fresh(self) -> bool:
        self.clock.now += 0.05 * DEADLINE_S
        self.looks += 1
        return self.looks < 3

    def connect_soon(self) -> None: ...

    def ready(self) -> bool:
        return True


def test_a_worker_that_turns_out_to_be_here_has_what_its_connection_has_left(clock: Clock) -> None:
    """The step at it asks it for pins, as its arena is mapped by now. That it is silent counts once."""
    late = Late(clock)
    given: list[float] = []

    def visit() -> Steps[None]:
        assert patience.has_time_for(late)
        given.append(allowed(math.inf))
        clock.now += 0.1 * DEADLINE_S
        late.path = "down"
        yield from ()

    with Patience(DEADLINE_S) as patience:
        patience.together([(late, visit())])
        assert len(given) == 1 and 0.5 * DEADLINE_S <= given[0] < 0.9 * DEADLINE_S
        clock.now += 5 * DEADLINE_S  # copies, after that
        server: Any = SimpleNamespace(fresh=False, path="shm")
        assert patience.has_time_for(server)


def test_a_first_connection_is_not_charged_with_what_is_lost_meanwhile(clock: Clock) -> None:
    """It is there when the work here ends, with 0.7 of a deadline left."""
    silent: Any = SimpleNamespace(fresh=False, path="shm")
    connecting: Any = SimpleNamespace(fresh=True, path="tcp", connect_soon=lambda: None, ready=lambda: True)
    given: list[float] = []

    def visit() -> Steps[None]:
        given.append(allowed(math.inf))
        yield from ()

    def meanwhile() -> None:
        assert patience.has_time_for(silent)
        clock.now += 0.3 * DEADLINE_S
        silent.path = "down"
        connecting.fresh = False

    with Patience(DEADLINE_S) as patience:
        patience.together([(connecting, visit())], meanwhile)
    assert [round(each, 9) for each in given] == [0.7 * DEADLINE_S]


class At(Answered):
    """The wait for something that comes then. Time passes with each look."""

    def __init__(self, clock: Clock, at: float, until: float) -> None:
        super().__init__(until)
        self.clock, self.at = clock, at

    def ready(self) -> bool:
        self.clock.now += 0.001 * DEADLINE_S
        return self.clock.now >= self.at


class Coming:
    """A server that is connected, or turns out to be down, at a time."""

    def __init__(self, clock: Clock, at: float, path: str = "tcp") -> None:
        self.clock, self.at, self.path = clock, at, path

    @property
    def fresh(self) -> bool:
        self.clock.now += 0.001 * DEADLINE_S
        return self.clock.now < self.at

    def connect_soon(self) -> None: ...

    def ready(self) -> bool:
        return self.path != "down"


@pytest.mark.parametrize("lost_by", ["an exchange", "another connection"])
def test_issue_a_first_connection_is_not_charged_with_what_is_lost_beside_it(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, lost_by: str
) -> None:
    """One server is lost after 0.4 of a deadline, the next one is connected at 0.45: it has 0.55 left."""
    began = clock.now
    monkeypatch.setattr("time.sleep", lambda seconds: setattr(clock, "now", clock.now + seconds))
    given: list[float] = []
    lost: Any = SimpleNamespace(fresh=False, path="tcp")
    if lost_by == "another connection":
        lost = Coming(clock, began + 0.4 * DEADLINE_S, "down")

    def loses() -> Steps[None]:
        if lost_by == "an exchange":
            yield At(clock, began + 0.4 * DEADLINE_S, clock.now + allowed(DEADLINE_S))
            lost.path = "down"
        yield from ()

    def visit() -> Steps[None]:
        given.append(allowed(math.inf))
        yield from ()

    with Patience(DEADLINE_S) as patience:
        patience.together([(Coming(clock, began + 0.45 * DEADLINE_S), visit()), (lost, loses())])
    assert len(given) == 1 and abs(given[0] - 0.55 * DEADLINE_S) < 0.02 * DEADLINE_S


def test_issue_a_server_that_came_too_late_leaves_the_next_round_its_time(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fresh server of the next round was given no time to connect, and counted as down."""
    began = clock.now
    monkeypatch.setattr("time.sleep", lambda seconds: setattr(clock, "now", clock.now + seconds))
    healthy: Any = SimpleNamespace(fresh=False, path="tcp")
    given: list[float] = []

    def answers() -> Steps[None]:
        yield At(clock, began + 0.58 * DEADLINE_S, clock.now + allowed(DEADLINE_S))

    def visit() -> Steps[None]:
        given.append(allowed(math.inf))
        yield from ()

    with Patience(DEADLINE_S) as patience:
        patience.together([(Coming(clock, began + 0.59 * DEADLINE_S), visit()), (healthy, answers())])
        assert not given and allowed(math.inf) > 0.5 * DEADLINE_S
        patience.together([(Coming(clock, clock.now + 0.05 * DEADLINE_S), visit())])
    assert len(given) == 1


@pytest.mark.parametrize("room_s", [0.0, 0.2, 0.45])
def test_issue_half_a_deadline_is_kept_beside_a_wait_for_room(clock: Clock, room_s: float) -> None:
    """A healthy server waits for room in its first step, then another one loses all that it has."""
    given: list[float] = []
    healthy: Any = SimpleNamespace(fresh=False, path="tcp")
    silent: Any = SimpleNamespace(fresh=False, path="shm")

    def visit() -> Steps[None]:
        clock.now += room_s * DEADLINE_S
        spend(room_s * DEADLINE_S)
        yield Answered(clock.now + allowed(DEADLINE_S))
        given.append(allowed(math.inf))
        yield Answered(clock.now + allowed(DEADLINE_S))
        given.append(allowed(math.inf))

    def loses() -> Steps[None]:
        yield Answered(clock.now + allowed(DEADLINE_S))
        clock.now += allowed(DEADLINE_S)
        silent.path = "down"

    with Patience(DEADLINE_S) as patience:
        patience.together([(healthy, visit()), (silent, loses())])
    assert [round(each, 9) for each in given] == [round((1.0 - room_s) * DEADLINE_S, 9), 0.5 * DEADLINE_S]

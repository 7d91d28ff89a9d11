"""Puts that find all grants with others: they wait a moment, and fail only where there is no room to come."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from simm.arena.hashing import Hasher
from simm.constants import VALUE_BYTES_MAX
from simm.errors import TransportError
from simm.host.buffers import Copier
from simm.ipc import grant_pool, patience, put
from simm.ipc.grant_pool import GrantPool
from simm.ipc.patience import Line
from simm.ipc.put import ShmPut
from simm.ipc.session import WorkerSession
from simm.slab import chunk_bytes_for
from simm.wire import messages as M
from simm.wire.messages import Status
from tests.support.consistency import check
from tests.support.waiting import WAIT_S, wait_until
from tests.support.worker_thread import WorkerThread

MIB = 1 << 20
digest_of = Hasher("default")


@pytest.fixture
def worker() -> Iterator[WorkerThread]:
    with WorkerThread(64 * MIB) as running:
        yield running


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits that a busy machine does not cut short."""
    monkeypatch.setattr(grant_pool, "ROOM_WAIT_S", 20.0)


def put_all(session: WorkerSession, prefix: str, size: int, count: int, into: list[int]) -> None:
    put, value = ShmPut(Copier(1), False), memoryview(bytes(size))
    into += [put.put_one(session, digest_of(f"{prefix} {number}"), value) for number in range(count)]


@pytest.mark.parametrize(("count", "size"), [(4, 4 * MIB), (16, 4 * MIB), (64, MIB)])
def test_issue_threads_of_one_session_share_what_it_may_hold(worker: WorkerThread, count: int, size: int) -> None:
    """Four threads put values of 4 MiB where all grants together are 7: 67 of 80 failed, and later half of them."""
    session = worker.session(deadline_s=10 * WAIT_S)  # half of it is for the waits
    statuses: list[int] = []
    threads = [
        threading.Thread(target=put_all, args=(session, f"t{at}", size, 80 // count, statuses)) for at in range(count)
    ]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == [Status.OK] * (80 // count * count)
    with worker.frozen() as store:
        check(store)
    session.close()


class Grantor:
    """Grants one chunk each time it is told to; notes who asks, and how many ask at the same time."""

    def __init__(self) -> None:
        self.pool: GrantPool[Any] = GrantPool()
        self.open = threading.Semaphore(0)
        self.asked: list[str] = []
        self._asking = 0
        self.most = 0

    def ask(self, wants: Sequence[tuple[int, int]]) -> None:
        self._asking += 1
        self.most = max(self.most, self._asking)
        self.asked.append(threading.current_thread().name)
        if self.open.acquire(timeout=0.001):
            self.pool.add([(1, 0, chunk_bytes_for(wants[0][0]))])
        self._asking -= 1

    def return_grants(self, numbers: Sequence[int]) -> None:
        pytest.fail("there was no idle grant")


def served(grantor: Grantor, count: int) -> list[str]:
    """Let ``count`` threads wait, one after the other, then grant a chunk to each. Return who got one, in order."""
    order: list[str] = []

    def wait() -> None:
        if grant_pool.obtain(grantor, 4096, room=grant_pool.RoomWait(WAIT_S)) is not None:
            order.append(threading.current_thread().name)

    threads = [threading.Thread(target=wait, name=f"{at:02d}") for at in range(count)]
    for at, thread in enumerate(threads):
        thread.start()
        wait_until(lambda at=at: len(grantor.pool.line._places) > at, "it waits")  # type: ignore[misc]
    for at in range(count):
        grantor.open.release()
        wait_until(lambda at=at: len(order) > at, "one has got a grant")  # type: ignore[misc]
    for thread in threads:
        thread.join()
    return order


def test_who_waits_first_is_served_first_and_asks_alone() -> None:
    grantor = Grantor()
    order = served(grantor, 8)
    assert order == sorted(order) and len(order) == 8
    assert grantor.most == 1, "the others sleep"
    assert set(grantor.asked[: grantor.asked.index("01")]) == {"00"}


def test_mutation_a_line_without_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: everybody takes every moment for his turn."""
    inner = Line.wait

    def wait(self: Line, place: threading.Lock, seconds: float) -> bool:
        inner(self, place, 0.0)
        return True

    monkeypatch.setattr(Line, "wait", wait)

    def leave(self: Line, place: threading.Lock) -> None:
        self._places.remove(next(each for each in self._places if each[0] is place))

    monkeypatch.setattr(Line, "leave", leave)
    # Places of such short waits end soon, and on a busy machine while the thread still asks.
    monkeypatch.setattr(patience, "PLACE_MORE_S", 2 * WAIT_S)
    grantor = Grantor()
    served(grantor, 8)
    before = grantor.asked[: grantor.asked.index("01")]
    assert grantor.most > 1 or (len(set(grantor.asked)) > 1 and len(before) < len(grantor.asked))
    assert grantor.asked != sorted(grantor.asked), "they ask in no order"


@pytest.mark.parametrize("seed", range(20))
def test_a_line_is_a_queue(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever leaves, from whatever place: the turn is the first one's, as in a list."""
    monkeypatch.setattr(patience, "PLACE_MORE_S", 1e9)
    rng = random.Random(seed)
    line, model = Line(), list[threading.Lock]()
    for _ in range(200):
        if rng.random() < 0.5:
            place = threading.Lock()
            mine = line.wait(place, 0.0)
            assert mine == (not model)
            model.append(place)
        elif model:
            place = model.pop(rng.choice((0, rng.randrange(len(model)))))
            was_first = not model or (place not in model and line._places[0][0] is place)
            line.leave(place)
            line.leave(place)
            if was_first and model:
                assert model[0].acquire(blocking=False), "its turn has begun"
        assert [each for each, _ in line._places] == model and bool(line) == bool(model)
        assert all(each.locked() for each in model[1:]), "nobody else's turn has"


class Interrupted(BaseException):
    """What a signal's handler raises, wherever its thread is."""


def interrupt(name: str) -> Callable[..., None]:
    """Return a profile function that raises as a method of Line begins."""

    def look(frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_code is getattr(Line, name).__code__:
            sys.setprofile(None)
            raise Interrupted

    return look


@pytest.mark.parametrize(
    ("where", "more_s"), [("leave", 0.0), ("_call_first", 0.0), ("leave", 1e9)], ids=["enter", "call", "control"]
)
def test_issue_an_interrupt_in_leave_leaves_nobody_in_the_line(
    where: str, more_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The place ends by itself, and the next one's turn begins. The control is one that does not end."""
    monkeypatch.setattr(patience, "PLACE_MORE_S", more_s)
    # On a busy machine the place may have ended before the exception strikes.
    assert any(struck_in_time(where, more_s, place_s) for place_s in (0.2, 2.0, 20.0, WAIT_S))


def struck_in_time(where: str, more_s: float, place_s: float) -> bool:
    line, ghost, place = Line(), threading.Lock(), threading.Lock()
    assert line.wait(ghost, place_s)
    turns: list[bool] = []
    waiting = threading.Thread(target=lambda: turns.append(line.wait(place, 1.0 if more_s else 2 * WAIT_S)))
    waiting.start()
    wait_until(lambda: turns or any(each is place for each, _ in line._places), "it waits")
    there = line._places[0][0] is ghost
    sys.setprofile(interrupt(where))
    try:
        line.leave(ghost)
    except Interrupted:
        struck = there
    else:
        struck = False
    finally:
        sys.setprofile(None)
    waiting.join()
    assert turns == [not more_s]
    line.leave(place)
    assert bool(line) == bool(more_s)
    return struck


def test_no_put_asks_ahead_while_others_wait(worker: WorkerThread) -> None:
    """Or who has just put would be the first again. The control is the same put without a line."""
    session = worker.session()
    put, value = ShmPut(Copier(1), False), memoryview(bytes(MIB))
    assert put.put_one(session, digest_of("a"), value) == Status.OK  # the next answer brings what this one asked for
    session.ask([])
    ahead = session.pool.count(MIB)
    assert ahead > 0, "the control"
    place = threading.Lock()
    assert session.pool.line.wait(place, WAIT_S)
    for number in range(ahead):
        assert put.put_one(session, digest_of(f"b{number}"), value) == Status.OK
    session.ask([])
    assert session.pool.count(MIB) < ahead
    session.pool.line.leave(place)
    session.close()


def test_issue_sessions_share_the_grants(worker: WorkerThread) -> None:
    """Also with one that holds its whole share and does not answer."""
    stopped = worker.session()
    stopped.ask([(65536, 1000)])
    sessions = [worker.session(ring=at > 0, deadline_s=10 * WAIT_S) for at in range(3)]
    statuses: list[int] = []
    work = ((4096, 200), (2 * MIB, 20), (300_000, 40))
    threads = [
        threading.Thread(target=put_all, args=(session, f"s{at}", *work[at], statuses))
        for at, session in enumerate(sessions)
    ]  # fmt: skip
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        for session in sessions:  # as their clients' background threads do
            session.maintain()
        threads[0].join(0.05)
        threads[1].join(0.05)
        threads[2].join(0.05)
    assert statuses == [Status.OK] * 260
    for session in (*sessions, stopped):
        session.close()


def test_a_wait_in_vain_is_not_repeated_at_once(worker: WorkerThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """An arena full of grants: a batch waits once, not for each of its values."""
    holders = [worker.session() for _ in range(8)]
    for holder in holders:
        while True:
            before = holder.pool.count(8 * MIB)
            holder.ask([(8 * MIB, 1)])
            if holder.pool.count(8 * MIB) == before:
                break
    monkeypatch.setattr(grant_pool, "ROOM_WAIT_S", 0.01)
    monkeypatch.setattr(grant_pool, "ROOM_AGAIN_S", 1e6)
    session = worker.session()
    waits: list[float] = []
    inner = grant_pool._wait_for_room
    monkeypatch.setattr(grant_pool, "_wait_for_room", lambda *args: waits.append(args[2]) or inner(*args))
    statuses: list[int] = []
    put_all(session, "k", 9 * MIB, 5, statuses)
    assert statuses == [Status.NO_SPACE] * 5 and len(waits) == 1
    for each in (session, *holders):
        each.close()


class SlowGrantor:
    """A holder whose requests take ``ask_s`` on a clock of its own; the one of this number brings a grant."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ask_s: float, grants_at: int = 0) -> None:
        self.now = 1.0
        monkeypatch.setattr(grant_pool, "ROOM_WAIT_S", 0.5)
        monkeypatch.setattr(grant_pool, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))
        self.pool: GrantPool[Any] = GrantPool()
        self.asks = 0
        self._ask_s, self._grants_at = ask_s, grants_at

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def ask(self, wants: Sequence[tuple[int, int]]) -> None:
        self.asks += 1
        self.now += self._ask_s
        if self.asks == self._grants_at:
            self.pool.add([(1, 0, chunk_bytes_for(wants[0][0]))])

    def return_grants(self, _numbers: Sequence[int]) -> None:
        pytest.fail("it has none")

    def put(self, left_s: float) -> bool:
        """Return whether there is room for a value of a call that may wait for so long."""
        return grant_pool.obtain(self, 4 * MIB, room=grant_pool.RoomWait(left_s)) is not None


@pytest.mark.parametrize("ask_s", [0.0, 0.4])
def test_a_grantor_that_makes_room_bit_by_bit_is_asked_again(monkeypatch: pytest.MonkeyPatch, ask_s: float) -> None:
    """It evicts for as long as one request may, and answers as one without room does; but that one answers sooner."""
    holder = SlowGrantor(monkeypatch, ask_s, 16 if ask_s else 0)
    assert holder.put(60.0) == (ask_s > 0) == (holder.pool.no_wait_until == 0.0)
    assert ask_s or 1.5 <= holder.now < 1.6


@pytest.mark.parametrize(
    ("ask_s", "left_s", "waited_s"), [(0.04, 60.0, 0.7), (0.04, 1.5, 0.7), (0.15, 1.0, 1.2), (0.0, 0.3, 0.4)]
)
def test_a_slow_grantor_without_room_is_waited_for_once(
    monkeypatch: pytest.MonkeyPatch, ask_s: float, left_s: float, waited_s: float
) -> None:
    """Each put waited anew, for all that its call had left, where a busy grantor took 40 ms to say no."""
    holder = SlowGrantor(monkeypatch, ask_s)
    assert not holder.put(left_s)
    asks, took = holder.asks, holder.now - 1.0
    assert asks > 5 and took <= waited_s + ask_s and holder.pool.no_wait_until > holder.now
    assert not holder.put(left_s) and holder.asks == asks + 1, "the next one does not wait"


@pytest.mark.parametrize(("ask_s", "left_s"), [(0.0, 0.05), (0.4, 1.5)])
def test_a_wait_that_ends_too_early_to_tell_keeps_no_other_put_from_waiting(
    monkeypatch: pytest.MonkeyPatch, ask_s: float, left_s: float
) -> None:
    """It was short, or room was being made all the time."""
    holder = SlowGrantor(monkeypatch, ask_s)
    assert not holder.put(left_s) and holder.pool.no_wait_until == 0.0


def test_what_no_arena_has_room_for_fails_without_a_wait(
    worker: WorkerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = worker.session()
    monkeypatch.setattr(grant_pool, "_wait_for_room", lambda *args: pytest.fail("waited"))
    statuses: list[int] = []
    put_all(session, "k", 63 * MIB, 1, statuses)
    assert statuses == [Status.NO_SPACE]
    session.close()


def test_a_request_beyond_the_value_limit_ends_the_connection(worker: WorkerThread) -> None:
    for msg in (M.Grant([(VALUE_BYTES_MAX + 1, 1)]), M.Grant([(0, 1)]), M.Commit([], [(1 << 31, 1)])):
        channel, _ = worker.hello()
        with pytest.raises(TransportError):
            channel.call(msg)
        channel.close()


def test_each_size_of_a_request_is_served(worker: WorkerThread) -> None:
    """One size without room does not keep the next one from being granted."""
    channel, _ = worker.hello()
    granted = channel.call(M.Grant([(4096, 1), (60 * MIB, 1), (300_000, 2)]))
    assert [chunk for _, _, chunk in granted.grants] == [4096, 303_104, 303_104]
    channel.close()


class Stingy:
    """A worker's answers with time: it has room for one value only after some requests for it."""

    def __init__(self, session: WorkerSession, monkeypatch: pytest.MonkeyPatch, requests: int) -> None:
        self.now = 0.0
        self._requests = requests
        self._asked = 0
        self._ask = session.ask
        monkeypatch.setattr(session, "ask", self.ask)
        monkeypatch.setattr(put, "ask_ahead", lambda *_: None)
        monkeypatch.setattr(grant_pool, "refill_count", lambda *_: 0)
        monkeypatch.setattr(grant_pool, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))

    def ask(self, wants: Sequence[tuple[int, int]]) -> None:
        self._asked += 1
        if self._asked % self._requests == 0:
            self._ask([(wants[0][0], 1)])

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_all_waits_of_one_call_share_its_patience(worker: WorkerThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each value of a batch waited anew, so one with room for one value at a time lasted many deadlines."""
    session = worker.session()
    put = ShmPut(Copier(1), False)
    digests, values = [digest_of(f"b{number}") for number in range(60)], [memoryview(bytes(4096))] * 60
    with monkeypatch.context() as patch:
        clock = Stingy(session, patch, 12)
        statuses = [99] * 60
        room = grant_pool.RoomWait(0.5)
        put.put_many(session, digests, values, range(60), statuses, room)
        assert clock.now < 0.6 and room.left_s < 0.01
        stored = statuses.count(Status.OK)
        assert 0 < stored < 60 and statuses.count(Status.NO_SPACE) == 60 - stored
        put.put_many(session, digests, values, range(60), statuses, room)  # as at the call's next worker
        assert clock.now < 0.6
    put.put_many(session, digests, values, range(60), statuses)
    assert statuses == [Status.OK] * 60
    session.close()

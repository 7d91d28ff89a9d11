"""Puts that find all grants with others: they wait a moment, and fail only where there is no room to come."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import pytest

from simm.arena.hashing import Hasher
from simm.constants import VALUE_BYTES_MAX
from simm.errors import TransportError
from simm.host.buffers import Copier
from simm.ipc import grant_pool
from simm.ipc import put as put_module
from simm.ipc.put import ShmPut
from simm.ipc.session import WorkerSession
from simm.wire import messages as M
from simm.wire.messages import Status
from tests.support.consistency import check
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


def test_issue_threads_of_one_session_share_what_it_may_hold(worker: WorkerThread) -> None:
    """Four threads put values of 4 MiB where all grants together are 7: 67 of 80 failed."""
    session = worker.session()
    statuses: list[int] = []
    threads = [
        threading.Thread(target=put_all, args=(session, f"t{at}", 4 * MIB, 20, statuses)) for at in range(4)
    ]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == [Status.OK] * 80
    with worker.frozen() as store:
        check(store)
    session.close()


def test_issue_sessions_share_the_grants(worker: WorkerThread) -> None:
    """Also with one that holds its whole share and does not answer."""
    stopped = worker.session()
    stopped.ask([(65536, 1000)])
    sessions = [worker.session(ring=at > 0) for at in range(3)]
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
        monkeypatch.setattr(ShmPut, "_ask_ahead", staticmethod(lambda *_: None))
        monkeypatch.setattr(put_module, "refill_count", lambda *_: 0)
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

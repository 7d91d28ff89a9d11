"""What a mover gives up: counted once, and no more than what cannot be had."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

from simm.cluster import move_plan
from simm.constants import VALUE_BYTES_MAX
from simm.errors import TransportError
from simm.ipc.grant_pool import GrantPool
from simm.server import migration as mover_module
from simm.server.migration_peers import SESSIONS_MAX, TargetWorker, WorkerLost
from simm.wire import messages as M
from simm.wire.messages import Status
from tests.support.server_thread import WAIT_S, Liar, MoverThread, Pair, answer, digest_in, honest, pair, value_of
from tests.support.waiting import wait_until
from tests.support.worker_thread import WorkerThread

SHARDS = list(range(64))
VALUES = {digest_in(shard, shard): value_of(shard, 1000) for shard in range(8)}
#: Listed, but not to be had.
BAD = digest_in(9, "bad")

Script = dict[type, Callable[[Any], "bytes | None"]]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setattr(mover_module, "IDLE_S", 0.05)
    monkeypatch.setattr(mover_module, "RETRY_S", (0.005, 0.02))
    monkeypatch.setattr(move_plan, "GIVE_UP_S", 0.2)
    with pair() as made:
        yield made


def listing(*entries: tuple[bytes, int]) -> Callable[[Any], bytes]:
    """Return the script of a LIST that names these before VALUES."""
    found = [*entries, *((digest, len(value)) for digest, value in VALUES.items())]
    page = M.Listed(0, [(digest, length, 0, 3) for digest, length in found], [M.NamespaceName(3, "default")])
    return lambda _msg: answer(page)


def fetching(status_of: Callable[[bytes], int]) -> Callable[[Any], bytes]:
    """Return the script of a FETCH_PREVIOUS that answers with this status, and the value where it is OK."""

    def fetch(msg: M.FetchPrevious) -> bytes:
        statuses = [status_of(digest) for digest, _ in msg.keys]
        values = [b"" if status else VALUES[digest] for status, (digest, _) in zip(statuses, msg.keys)]
        entries = [(status, 0, len(value), 0) for status, value in zip(statuses, values)]
        return answer(M.Fetched(entries), b"".join(values), M.Verdict([0] * len(entries)))

    return fetch


def moved(world: Pair, script: Script) -> MoverThread:
    """Move the shards away from a scripted previous owner; return the mover, which has ended."""
    liar = Liar(script)
    world.instead = liar.info
    world.move(SHARDS)
    mover = world.mover()
    assert mover.wait() is True and world.moved() == SHARDS
    liar.close()
    return mover


# --- counted once ----------------------------------------------------------------------------------


@pytest.mark.parametrize("comes", [False, True], ids=["it never comes", "it comes later"])
def test_issue_a_value_is_lost_once_however_often_its_page_is_tried(
    world: Pair, monkeypatch: pytest.MonkeyPatch, comes: bool
) -> None:
    """The connection breaks at the second batch of a page, twice. Each try counted what the first batch had lost."""
    monkeypatch.setattr(mover_module, "BATCH_KEYS", 2)
    ill = next(iter(VALUES)) if comes else BAD
    asked = [0, 0]

    def status_of(digest: bytes) -> int:
        asked[1] += digest == ill
        return int(Status.NOT_FOUND) if digest == ill and not (comes and asked[1] > 1) else int(Status.OK)

    fetch = fetching(status_of)

    def breaks(msg: Any) -> bytes:
        asked[0] += 1
        if asked[0] in (2, 4):
            raise ConnectionError
        return fetch(msg)

    script = {**honest(VALUES), M.FetchPrevious: breaks, M.List: listing(*[] if comes else [(BAD, 1000)])}
    mover = moved(world, script)
    assert asked[0] > 4 and world.n.fetch(list(VALUES)) == list(VALUES.values())
    assert mover.mover.lost == mover.progress()[-1].lost == (not comes)
    assert mover.mover.values == len(VALUES)


def test_issue_what_goes_to_another_worker_meanwhile_is_not_lost(world: Pair) -> None:
    """The previous owner had some values no more, and a newer map gave half of their shards to another worker."""
    gone, away = list(VALUES)[2:6], SHARDS[4:]

    def status_of(digest: bytes) -> int:
        if world.owners[away[0]]:  # at the first question
            world.move(away, to=0, previous=False)
            mover.feed(world.message())
            wait_until(lambda: len(mover.mover.plan._wanted) == 4, "the mover has the map")
        return int(Status.NOT_FOUND if digest in gone else Status.OK)

    liar = Liar({**honest(VALUES), M.FetchPrevious: fetching(status_of)})
    world.instead = liar.info
    world.move(SHARDS)
    mover = world.mover()
    assert mover.wait() is True and world.moved() == SHARDS[:4]
    assert mover.mover.lost == mover.progress()[-1].lost == 2 and mover.mover.values == 2
    liar.close()


# --- a damaged slot at the previous owner ----------------------------------------------------------


@pytest.mark.parametrize("keys", [256, 1], ids=["among others", "a batch of its own"])
def test_issue_a_slot_for_which_there_is_no_answer_costs_one_value(
    world: Pair, monkeypatch: pytest.MonkeyPatch, keys: int
) -> None:
    """Its batch counted as not answered, again and again: all other values of its group of shards were given up."""
    monkeypatch.setattr(mover_module, "BATCH_KEYS", keys)
    fetch = fetching(lambda digest: int(Status.BUSY if digest == BAD else Status.OK))
    mover = moved(world, {**honest(VALUES), M.FetchPrevious: fetch, M.List: listing((BAD, 1000))})
    assert world.n.fetch([BAD, *VALUES]) == [None, *VALUES.values()]
    assert mover.mover.lost == 1 and mover.mover.values == len(VALUES)


def test_issue_a_damaged_slot_alone_on_a_page_costs_one_value(world: Pair) -> None:
    """Its page was tried again and again, as nothing else of it could be answered: the next pages were given up."""
    names = [M.NamespaceName(3, "default")]
    first = M.Listed(8192, [(BAD, 1000, 0, 3)], names)
    second = M.Listed(0, [(digest, len(value), 0, 3) for digest, value in VALUES.items()], names)
    fetch = fetching(lambda digest: int(Status.BUSY if digest == BAD else Status.OK))
    pages = {M.FetchPrevious: fetch, M.List: lambda msg: answer(second if msg.cursor else first)}
    mover = moved(world, {**honest(VALUES), **pages})
    assert world.n.fetch([BAD, *VALUES]) == [None, *VALUES.values()]
    assert mover.mover.lost == 1 and mover.mover.values == len(VALUES)


def test_issue_busy_slots_alone_end_however_the_other_groups_go_on(
    world: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tries began anew with the progress of any other group, and one of the threads that copy had no end."""
    monkeypatch.setattr(move_plan.CopyTries, "failed", lambda *_: False)
    mover = moved(world, {**honest(VALUES), M.FetchPrevious: fetching(lambda _: int(Status.BUSY))})
    assert mover.mover.lost == len(VALUES) and mover.mover.values == 0


def test_who_is_busy_with_everything_for_a_moment_is_asked_again(world: Pair) -> None:
    asked = [0]

    def status_of(_: bytes) -> int:
        asked[0] += 1
        return int(Status.BUSY if asked[0] <= 2 * len(VALUES) else Status.OK)

    mover = moved(world, {**honest(VALUES), M.FetchPrevious: fetching(status_of)})
    assert world.n.fetch(list(VALUES)) == list(VALUES.values()) and mover.mover.lost == 0


def test_who_is_busy_with_everything_is_given_up(world: Pair) -> None:
    """The control: the shards are finished."""
    mover = moved(world, {**honest(VALUES), M.FetchPrevious: fetching(lambda _: int(Status.BUSY))})
    assert mover.mover.lost == len(VALUES) and mover.mover.values == 0


def test_issue_an_impossible_length_is_left_out(world: Pair) -> None:
    """The list counted as not answered, and its group of shards was given up."""
    script = {**honest(VALUES), M.List: listing((BAD, 0), (digest_in(10, "long"), VALUE_BYTES_MAX + 1))}
    mover = moved(world, script)
    assert world.n.fetch([BAD, *VALUES]) == [None, *VALUES.values()]
    assert mover.mover.lost == 0 and mover.mover.values == len(VALUES)


# --- sessions of many namespaces -------------------------------------------------------------------


GRANT = (1, 0, 4096)


class Session:
    """A session with a worker that answers RETURN_GRANTS when the test says so. Its pool is empty."""

    def __init__(self, waits: Callable[[], object]) -> None:
        self.pool: GrantPool[Any] = GrantPool()
        self.waits = waits
        self.closed = False

    def return_grants(self, _: Any) -> None:
        self.waits()
        if self.closed:
            raise TransportError("closed")

    def close(self) -> None:
        self.closed = True


def returned_while_another_opens(held: int) -> TargetWorker:
    """Return idle grants; while the ``held``th session returns its own, open as many others as would close it."""
    reached, opened = threading.Event(), threading.Event()

    def hold() -> None:
        reached.set()
        assert opened.wait(WAIT_S)

    target: Any = TargetWorker.__new__(TargetWorker)
    target._lock, target._sessions = threading.Lock(), OrderedDict()
    waits = [hold if number == held else lambda: None for number in range(SESSIONS_MAX + held + 1)]
    target._open = lambda namespace: Session(waits[int(namespace)])
    for number in range(SESSIONS_MAX):
        with target.session(str(number)) as session:
            pass
        session.pool.add([GRANT])
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(target.return_idle)
        try:
            assert reached.wait(WAIT_S)
            for number in range(SESSIONS_MAX, len(waits)):
                with target.session(str(number)):
                    pass
        finally:
            opened.set()
        ended.result(WAIT_S)
    made: TargetWorker = target
    return made


@pytest.mark.parametrize("held", [0, 1, SESSIONS_MAX - 1])
def test_issue_a_session_that_returns_its_grants_is_not_closed_for_another(held: int) -> None:
    """The mover took the closed session for a worker that is gone, and ended."""
    target = returned_while_another_opens(held)
    kept = target._sessions
    assert len(kept) == SESSIONS_MAX and str(held) in kept and str(SESSIONS_MAX + held) in kept
    assert not any(each.users for each in kept.values())
    assert not any(each.session.pool.stock(4096) for name, each in kept.items() if int(name) < SESSIONS_MAX)


def test_a_worker_that_is_gone_is_lost() -> None:
    """The control."""
    target: Any = TargetWorker.__new__(TargetWorker)
    target._lock, target._sessions = threading.Lock(), OrderedDict()
    target._open = lambda _: Session(lambda: None)
    with pytest.raises(WorkerLost), target.session("one") as session:
        session.pool.add([GRANT])
        session.close()
    session.pool.add([GRANT])
    with pytest.raises(WorkerLost):
        target.return_idle()
    assert not any(each.users for each in target._sessions.values())


def test_a_session_that_is_given_back_holds_up_no_other() -> None:
    """The exchange with the worker takes up to the deadline, and a mover's threads share the lock."""
    target: Any = TargetWorker.__new__(TargetWorker)
    target._lock, target._sessions = threading.Lock(), OrderedDict()
    seen: list[int] = []

    def other() -> None:
        with target.session("other"):
            seen.append(target._sessions["one"].users)

    def waits() -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(WAIT_S)

    target._open = lambda name: Session(waits if name == "one" else lambda: None)
    with target.session("one") as session:
        session.pool.add([GRANT])
    assert seen == [1] and not target._sessions["one"].users and not session.pool.stock(4096)


def test_issue_a_session_that_nobody_uses_holds_no_grants() -> None:
    """The worker asked for them again and again, and nobody read that: in the end it closed the session."""
    with WorkerThread() as worker, closing(TargetWorker(worker.path)) as target:
        with target.session("a") as session:
            (grant,) = target.grants(session, [4096])
            assert grant is not None
            session.pool.release(grant)
            with target.session("a"):
                pass
            assert session.pool.stock(4096), "it is in use"
        assert not session.pool.stock(4096)
        with worker.frozen() as store:
            assert not store.sessions.by_id[session.session].grants
        with pytest.raises(TransportError, match="the source"), target.session("a") as session:
            session.pool.add([grant for grant in target.grants(session, [4096]) if grant is not None])
            assert session.pool.stock(4096)
            raise TransportError("the source")
        assert not session.pool.stock(4096) and not any(each.users for each in target._sessions.values())

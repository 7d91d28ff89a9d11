"""A mover's own limits, the rate and the budget: nobody starves there, and no wait there is taken for a fault of P."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from simm.cluster import move_plan
from simm.server import migration as mover_module
from simm.server.migration_peers import ByteBudget, TokenBucket
from simm.wire import messages as M
from simm.wire.messages import Status
from simm.wire.shard_set import shards_in
from tests.support.server_thread import WAIT_S, Liar, Pair, answer, digest_in, honest, pair, value_of
from tests.support.waiting import wait_until

SHARDS = list(range(64))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setattr(mover_module, "IDLE_S", 0.05)
    monkeypatch.setattr(move_plan, "GIVE_UP_S", 0.2)
    monkeypatch.setattr(move_plan, "GROUP_SHARDS", 16)
    monkeypatch.setattr(mover_module, "RETRY_S", (0.005, 0.02))
    with pair() as made:
        yield made


# --- a slow bucket -------------------------------------------------------------------------------


class Hung(ConnectionError):
    """Ends the connection on which it is raised."""


def moved_slowly(world: Pair, monkeypatch: pytest.MonkeyPatch, fails: Callable[[int], bool]) -> int:
    """Move a value of each shard, a wait of our own that is longer than GIVE_UP_S before each batch.

    Those FETCHes for which ``fails`` (by their number, from 0) end their connection. Return how many values got lost.
    """
    waits = 2 * move_plan.GIVE_UP_S
    real = TokenBucket.take

    def slowly(self: TokenBucket, count: int) -> None:
        if count > 0:
            threading.Event().wait(waits)
        real(self, count)

    monkeypatch.setattr(TokenBucket, "take", slowly)
    values = {digest_in(shard, shard): value_of(shard, 1000) for shard in SHARDS}
    script = honest(values)
    fetch, asked = script[M.FetchPrevious], [0]

    def fetched(msg: Any) -> bytes | None:
        number, asked[0] = asked[0], asked[0] + 1
        if fails(number):
            raise Hung
        return fetch(msg)

    script[M.FetchPrevious] = fetched
    liar = Liar(script)
    world.instead = liar.info
    world.move(SHARDS)
    mover = world.mover()
    assert mover.wait() is True and world.moved() == SHARDS
    got = world.n.fetch(list(values))
    assert all(value in (None, values[digest]) for digest, value in zip(values, got))
    assert got.count(None) == mover.mover.lost
    liar.close()
    return mover.mover.lost


def test_issue_one_lost_connection_loses_nothing(world: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress was further apart than GIVE_UP_S by the bucket alone: the first failure gave a whole group up."""
    monkeypatch.setattr(mover_module, "COPIERS", 1)  # else another one may bring something on at the same time
    assert moved_slowly(world, monkeypatch, lambda number: number == 2) == 0


def test_issue_one_lost_stream_breaks_all_connections_and_loses_nothing(
    world: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each copier meets it once, when its own wait is over."""
    assert moved_slowly(world, monkeypatch, lambda number: number < mover_module.COPIERS) == 0


def test_who_lists_and_sends_nothing_is_given_up(world: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positive control of the tests above: pages without values are no progress, however long we wait in between."""
    assert moved_slowly(world, monkeypatch, lambda number: True) == len(SHARDS)


def test_a_group_that_fails_while_others_wait_is_given_up(world: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its shards are finished, without what the others still copy."""
    values = {digest_in(shard, shard): value_of(shard, 1000) for shard in SHARDS}
    script = honest(values)
    listing, held = script[M.List], threading.Event()

    def lists(msg: Any) -> bytes | None:
        if SHARDS[0] in shards_in(msg.shards):
            raise Hung
        held.wait(WAIT_S)
        return listing(msg)

    script[M.List] = lists
    liar = Liar(script)
    world.instead = liar.info
    world.move(SHARDS)
    mover = world.mover()
    wait_until(lambda: world.moved() == SHARDS[:16], "the first group is finished")
    held.set()
    assert mover.wait() is True and world.moved() == SHARDS
    assert world.n.fetch(list(values))[16:] == list(values.values())[16:]
    liar.close()


@pytest.mark.parametrize("status", [int(Status.BUSY), int(Status.NOT_FOUND), int(Status.OK)])
def test_issue_what_does_not_come_passes_no_bucket(world: Pair, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    """Each try of a value for which the previous owner was BUSY took its bytes from the bucket: other values waited."""
    taken: list[int] = []
    monkeypatch.setattr(TokenBucket, "take", lambda _self, count: taken.append(count))
    values = {digest_in(shard, shard): value_of(shard, 1000) for shard in SHARDS}
    script = honest(values)
    if status:
        script[M.FetchPrevious] = lambda msg: answer(
            M.Fetched([(status, 0, 0, 0)] * len(msg.keys)), M.Verdict([0] * len(msg.keys))
        )
    liar = Liar(script)
    world.instead = liar.info
    world.move(SHARDS)
    mover = world.mover()
    assert mover.wait() is True and world.moved() == SHARDS
    assert sum(taken) == mover.mover.bytes == (0 if status else 1000 * len(SHARDS))
    assert sum(max(0, count) for count in taken) >= 1000 * len(SHARDS)
    liar.close()


# --- the budget ----------------------------------------------------------------------------------


class Turns:
    """Threads that reserve from a budget, and the order in which they were served."""

    def __init__(self, budget: ByteBudget) -> None:
        self.budget = budget
        self.served: list[int] = []
        self.stopped = False
        self.threads: list[threading.Thread] = []

    def start(self, count: int, again: bool = False, held: Callable[[], Any] = lambda: None) -> None:
        """Reserve ``count`` in another thread, over and over with ``again``, and call ``held`` with the reservation."""

        def body() -> None:
            while not self.stopped:
                with self.budget.reserve(count):
                    self.served.append(count)
                    held()
                if not again:
                    break

        self.threads.append(threading.Thread(target=body, daemon=True))
        self.threads[-1].start()

    def stop(self) -> None:
        self.stopped = True
        for thread in self.threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()
        assert self.budget.used == self.budget.waiting == 0


def test_issue_who_needs_all_is_served_though_others_come_all_the_time() -> None:
    """Three copiers always held something, so a fourth that had to hold its chunks alone waited for their end."""
    budget = ByteBudget(100)
    turns, apart = Turns(budget), threading.Event()
    for _ in range(3):
        turns.start(25, again=True, held=lambda: apart.wait(0.005))
    wait_until(lambda: len(turns.served) > 10, "they work")
    with budget.reserve(25):  # or the large one might be served before it is seen in the line
        turns.start(budget.most + 1)
        wait_until(lambda: budget.waiting == 4, "it waits, and so do all who come after it")
        before = len(turns.served)
    wait_until(lambda: budget.most + 1 in turns.served, "it is served")
    assert turns.served[before] == budget.most + 1, "by the next turn"
    turns.stop()


def test_the_line_is_kept() -> None:
    """A small one does not pass a large one that came first, and those behind it go on together."""
    budget = ByteBudget(100)
    turns, both = Turns(budget), threading.Barrier(3)
    with budget.reserve(60):
        turns.start(50)
        wait_until(lambda: budget.waiting == 1, "the first")
        for number in range(2):
            turns.start(30, held=lambda: both.wait(WAIT_S))
            wait_until(lambda number=number: budget.waiting == 2 + number, "the next")  # type: ignore[misc]
        assert not turns.served
    both.wait(WAIT_S)  # both hold theirs
    assert turns.served == [50, 30, 30]
    turns.stop()


def test_who_gives_up_leaves_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """And tells those behind it, for whom there is room now."""
    budget = ByteBudget(100)
    turns, failed, gives_up = Turns(budget), threading.Event(), threading.Event()
    real = budget._changed.wait_for

    def wait_for(_: Callable[[], bool]) -> bool:
        real(gives_up.is_set)
        raise MemoryError

    def large() -> None:
        with pytest.raises(MemoryError), budget.reserve(50):
            raise AssertionError("there was no room")
        failed.set()

    with budget.reserve(60):
        monkeypatch.setattr(budget._changed, "wait_for", wait_for)
        turns.threads.append(threading.Thread(target=large, daemon=True))
        turns.threads[-1].start()
        wait_until(lambda: budget.waiting == 1, "the large one waits")
        with budget._changed:  # so it does, and no longer looks for how
            monkeypatch.undo()
        turns.start(30)
        wait_until(lambda: budget.waiting == 2, "the small one waits")
        gives_up.set()
        with budget._changed:
            budget._changed.notify()  # the large one alone: it has waited longest
        wait_until(lambda: turns.served == [30] and failed.is_set(), "the small one is served")
    turns.stop()


# --- room that is made bit by bit ----------------------------------------------------------------


@pytest.mark.parametrize(("length", "takes_s", "room_at", "tries"), [
    (64 << 20, 0.25, 40, 40), (64 << 20, 0.01, 40, 3), (64 << 20, 0.25, 1000, 75), (1000, 0.25, 1000, 11),
])  # fmt: skip
def test_a_value_is_given_up_only_if_no_room_is_being_made(
    monkeypatch: pytest.MonkeyPatch, length: int, takes_s: float, room_at: int, tries: int
) -> None:
    """A request ends early where many values go with those that it evicts. After three the value counted as lost."""
    now, asked, outcome = [0.0], [0], mover_module.Outcome()

    def exchange(
        _source: Any, _job: Any, _channel: Any, _session: Any, items: list[Any], _outcome: Any
    ) -> list[Any]:  # fmt: skip
        asked[0] += 1
        now[0] += takes_s
        return [] if asked[0] == room_at else items

    monkeypatch.setattr(mover_module, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=lambda _: None))
    nothing = contextlib.nullcontext()
    mover: Any = SimpleNamespace(
        budget=SimpleNamespace(most=1 << 20, reserve=lambda _: nothing), bucket=SimpleNamespace(take=lambda _: None),
        target=SimpleNamespace(session=lambda _: nothing, return_idle=lambda: None), _exchange=exchange,
    )  # fmt: skip
    source: Any = SimpleNamespace(timeout=SimpleNamespace(progress=lambda _: None))
    batch, nobody = [(b"d" * 16, length)], (None, None)
    mover_module.Mover._copy_batch(mover, source, *nobody, "n", batch, outcome)  # type: ignore[arg-type]
    assert asked[0] == tries and len(outcome.lost) == (tries != room_at)

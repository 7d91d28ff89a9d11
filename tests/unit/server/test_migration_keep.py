"""What is kept stays kept when its shard moves, as far as the quotas have room; and what is a group stays one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from simm.arena.marks import told as told_module
from simm.arena.marks.awaited import AwaitedMarks
from simm.arena.marks.kept import HARD, SOFT
from simm.arena.marks.told import Told
from simm.host.processes import boottime_ns
from simm.ipc.session import WorkerSession
from simm.server import migration as mover_module
from simm.server import migration_peers
from simm.wire import messages as M
from simm.wire.group_messages import joined
from simm.wire.keep_messages import Keep, Marked, Marks
from simm.wire.messages import Status
from tests.support.server_thread import WAIT_S, Liar, Pair, answer, digest_in, frozen_channel, honest, pair, value_of

SHARDS = list(range(64))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setattr(mover_module, "IDLE_S", 0.05)
    with pair() as made:
        yield made


def keep(side: Any, digests: list[bytes], how: int, seconds: int) -> list[int]:
    with contextlib.closing(WorkerSession(side.worker.path, "default", WAIT_S, ring=False)) as session:
        got: list[int] = session.exchange(Keep(how, seconds, digests)).statuses
        return got


def kept(side: Any) -> dict[bytes, tuple[int, int]]:
    """How the entries of a worker are kept, and for how long yet."""
    now = boottime_ns() // 1_000_000_000
    with side.worker.frozen() as store:
        return {
            store.table.entry(slot).digest: (entry.how, entry.until - now) for slot, entry in store.space.kept.items()
        }


def test_what_is_kept_moves_with_its_marks(world: Pair) -> None:
    digests = [digest_in(shard, shard) for shard in SHARDS]
    for number, digest in enumerate(digests):
        world.p.put(digest, value_of(number, 4096))
    assert keep(world.p, digests[:10], HARD, 1000) + keep(world.p, digests[10:20], SOFT, 5000) == [Status.OK] * 20
    before = kept(world.p)
    world.move(SHARDS)
    assert world.mover().wait() is True
    after = kept(world.n)
    assert {digest: how for digest, (how, _) in after.items()} == {digest: how for digest, (how, _) in before.items()}
    assert all(left <= before[digest][1] + 1 and left > 0 for digest, (_, left) in after.items())
    assert keep(world.p, digests[:1], HARD, 5) == [Status.WRONG_OWNER]
    assert keep(world.n, digests[:1], HARD, 0) == [Status.OK] and len(kept(world.n)) == 19


def test_hard_ones_beyond_the_quota_are_soft_there(world: Pair) -> None:
    digests = [digest_in(shard, shard) for shard in SHARDS[:4]]
    for number, digest in enumerate(digests):
        world.p.put(digest, value_of(number, 4096))
    assert keep(world.p, digests, HARD, 1000) == [Status.OK] * 4
    with world.n.worker.frozen() as store:
        store.space.kept.__dict__["namespace_max"] = 2 * 4096
    world.move(SHARDS)
    assert world.mover().wait() is True
    assert sorted(how for how, _ in kept(world.n).values()) == [SOFT, SOFT, HARD, HARD]


def group(side: Any, groups: list[list[bytes]]) -> list[int]:
    with contextlib.closing(WorkerSession(side.worker.path, "default", WAIT_S, ring=False)) as session:
        got: list[int] = session.exchange(joined(groups)).statuses
        return got


def test_groups_move_as_groups(world: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those whose members are on several pages. One that the new owner has replaced is still a member."""
    groups = [[digest_in(shard, f"{shard}/{number}") for number in range(2 + shard % 4)] for shard in SHARDS]
    for digests in groups:
        for digest in digests:
            world.p.put(digest, value_of(len(digests), 4096))
    assert group(world.p, groups[:-1]) == [Status.OK] * (len(groups) - 1)
    assert keep(world.p, [groups[0][0]], SOFT, 100) == [Status.OK]
    monkeypatch.setattr(migration_peers, "LIST_MOST", 7)
    world.move(SHARDS)
    assert world.mover().wait() is True
    with world.n.worker.frozen() as store:
        assert store.groups.count == len(groups) - 1
        for digests in groups[:-1]:
            slots = {store.table.lookup(digest) for digest in digests}
            assert store.groups._ring(min(slots)) == slots
        assert store.delete([groups[3][0], groups[-1][0]]) == [Status.OK] * 2
        there = [[store.table.lookup(digest) >= 0 for digest in digests] for digests in groups]
    assert not any(there[3]) and there[-1] == [False] + [True] * (len(groups[-1]) - 1)
    assert len(kept(world.n)) == 1


def test_control_groups_that_do_not_move(world: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mover_module.TargetWorker, "group", lambda *_: None)
    with pytest.raises(AssertionError):
        test_groups_move_as_groups(world, monkeypatch)


def interject(monkeypatch: pytest.MonkeyPatch, say: Callable[[], None]) -> None:
    """Let a client say something at the new owner before the first mark comes."""
    real = mover_module.Mover._carry_marks

    def carry(self: Any, *details: Any) -> Any:
        monkeypatch.setattr(mover_module.Mover, "_carry_marks", real)
        say()
        return real(self, *details)

    monkeypatch.setattr(mover_module.Mover, "_carry_marks", carry)


def test_what_is_said_at_the_new_owner_outranks_older_marks(world: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A KEEP, the end of one, and a delete; a later move carries what was said there."""
    digests = [digest_in(5, number) for number in range(5)]
    for number, digest in enumerate(digests):
        world.p.put(digest, value_of(number, 4096))
    assert keep(world.p, digests, HARD, 1000) == [Status.OK] * 5

    def say() -> None:
        for number in (0, 1, 2, 4):
            world.n.put(digests[number], b"put there")
        assert keep(world.n, digests[:1], HARD, 0) + keep(world.n, digests[1:2], SOFT, 77) == [Status.OK] * 2
        assert world.n.delete(digests[2]) == Status.OK
        world.n.put(digests[2], b"another")

    interject(monkeypatch, say)
    world.move([5])
    assert world.mover().wait() is True
    after = kept(world.n)
    assert {digest: how for digest, (how, _) in after.items()} == {
        digests[1]: SOFT, digests[3]: HARD, digests[4]: HARD
    }  # fmt: skip
    assert 0 < after[digests[1]][1] <= 78
    with world.n.worker.frozen() as store:
        store.keeping.told.note(digests[0])
        assert len(store.keeping.told) == 0, "the move is over"


def test_a_group_that_is_made_at_the_new_owner_stays_one(world: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, three = (digest_in(5, name) for name in ("one", "two", "three"))
    for digest in (one, two, three):
        world.p.put(digest, value_of(1, 4096))
    assert group(world.p, [[one, two]]) == [Status.OK]

    def say() -> None:
        for digest in (one, three):
            world.n.put(digest, b"put there")
        assert group(world.n, [[one, three]]) == [Status.OK]

    interject(monkeypatch, say)
    world.move([5])
    assert world.mover().wait() is True
    with world.n.worker.frozen() as store:
        slots = [store.table.lookup(digest) for digest in (one, two, three)]
        assert store.groups._ring(slots[0]) == {slots[0], slots[2]} and store.groups._ring(slots[1]) == {slots[1]}


@pytest.mark.parametrize(
    "test",
    [test_what_is_said_at_the_new_owner_outranks_older_marks, test_a_group_that_is_made_at_the_new_owner_stays_one],
)
def test_control_marks_that_always_count(world: Pair, monkeypatch: pytest.MonkeyPatch, test: Any) -> None:
    monkeypatch.setattr(Told, "takes_mark", lambda *_: True)
    with pytest.raises(AssertionError):
        test(world, monkeypatch)


def test_beyond_the_bound_no_mark_counts(world: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(told_module, "TOLD_MAX", 1)
    digests = [digest_in(5, number) for number in range(4)]
    for number, digest in enumerate(digests):
        world.p.put(digest, value_of(number, 4096))
    assert keep(world.p, digests, SOFT, 1000) == [Status.OK] * 4

    def say() -> None:
        for number in range(2):
            world.n.put(digests[number], value_of(number, 4096))
        assert keep(world.n, digests[:2], HARD, 0) == [Status.OK] * 2

    interject(monkeypatch, say)
    world.move([5])
    assert world.mover().wait() is True
    assert kept(world.n) == {} and world.n.fetch(digests) == [value_of(number, 4096) for number in range(4)]


def test_no_copy_is_without_its_mark(world: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a batch is published, each of its values is kept; so no client's put can evict one."""
    digests = [digest_in(shard, shard) for shard in SHARDS]
    for number, digest in enumerate(digests):
        world.p.put(digest, value_of(number, 4096))
    assert keep(world.p, digests, HARD, 1000) == [Status.OK] * len(digests)
    real, published = mover_module.Mover._commit, []

    def commit(self: Any, job: Any, session: Any, entries: list[Any], outcome: Any) -> None:
        real(self, job, session, entries, outcome)
        published.append(({entry[0] for entry in entries}, set(kept(world.n))))

    monkeypatch.setattr(mover_module, "BATCH_KEYS", 3)
    monkeypatch.setattr(mover_module.Mover, "_commit", commit)
    world.move(SHARDS)
    assert world.mover().wait() is True
    assert len(published) > 10 and all(copied <= there for copied, there in published)
    with world.n.worker.frozen() as store:
        store.keeping.awaited.take(digests[0])
        assert not store.keeping.awaited.marks, "nothing moves any more"


def test_control_marks_that_are_not_awaited(world: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AwaitedMarks, "add", lambda *_: None)
    with pytest.raises(AssertionError):
        test_no_copy_is_without_its_mark(world, monkeypatch)


LIES: dict[str, Any] = {
    "too few": lambda msg: Marked([(HARD, 10, 0)] * (len(msg.digests) - 1)),
    "another message": lambda msg: M.Statuses([0] * len(msg.digests)),
}


@pytest.mark.parametrize("lie", [*LIES, "what cannot be"])
def test_a_previous_owner_is_not_believed(world: Pair, lie: str) -> None:
    values = {digest_in(shard, shard): value_of(shard, 1000) for shard in SHARDS}
    script = honest(values)
    listed: Any = script[M.List]
    wrong = LIES.get(lie, lambda msg: Marked([(3, 10, 0), (HARD, 0, 0), (SOFT, 1 << 31, 0)] + [(9, 9, 9)] * 61))

    def list_(msg: M.List) -> bytes:
        ((page, _),) = listed(msg).parts
        return answer(page._replace(entries=[(each[0], each[1], 1 << 15, each[3]) for each in page.entries]))

    script[M.List], script[Marks] = list_, lambda msg: answer(wrong(msg))
    liar = Liar(script)
    try:
        world.instead = liar.info
        world.move(SHARDS)
        assert world.mover().wait() is True
        assert world.n.fetch(list(values)) == list(values.values()) and kept(world.n) == {}
        with world.n.worker.frozen() as store:
            assert store.groups.count == 0
    finally:
        liar.close()


def test_marks_are_told_to_movers_alone_and_bounded(world: Pair) -> None:
    digest = digest_in(3, 3)
    world.p.put(digest, b"value")
    keep(world.p, [digest], SOFT, 100)
    with contextlib.closing(frozen_channel(world.p.stream.port)) as channel:
        got = channel.call(Marks([digest, digest_in(4, "none")])).entries
        assert got[0][0] == SOFT and 0 < got[0][1] <= 101 and got[1] == (0, 0, 0)
        assert channel.call(Marks([])).entries == []

"""What a map means for one data server, against a naive twin; old maps, fences, reports that are repeated."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable

import numpy as np
import pytest

from simm import messages as M
from simm.constants import NO_OWNER, SHARD_COUNT
from simm.errors import CorruptionError, RemoteProtocolError, UsageError
from simm.member import FENCE, Member
from simm.messages import MapReply, ShardRole, WorkerInfo
from simm.shardmap import ShardMap, pack_since, unpack_since
from simm.shards import BITMAP_BYTES, MOVING, ShardWords, bitmap_of, shards_in

NAME, INSTANCE = "n", 77


def info(worker: int, node: str = NAME, instance: int = INSTANCE) -> WorkerInfo:
    return WorkerInfo(worker, 0, 1, instance, 1 << 30, node, "", "127.0.0.1", 1000 + worker)


#: Both workers of the server, its former life, a namesake's worker that we do not have, and two strangers.
WORKERS = [info(0), info(1), info(0, instance=5), info(9), info(0, node="p"), info(1, node="q")]


def make_map(
    epoch: int, owners: list[int], previous: dict[int, int] | None = None, since: list[int] | None = None
) -> ShardMap:
    packed = pack_since(array("Q", since if since is not None else [epoch if at != NO_OWNER else 0 for at in owners]))
    return ShardMap(
        MapReply(epoch, 1, WORKERS, array("H", owners).tobytes(), sorted((previous or {}).items()), packed)
    )


def random_map(rng: random.Random, epoch: int) -> ShardMap:
    owners = [rng.choice([0, 1, 2, 3, 4, 5, NO_OWNER]) for _ in range(SHARD_COUNT)]
    previous = {}
    for shard in rng.sample(range(SHARD_COUNT), 3000):
        at = rng.randrange(len(WORKERS))
        if owners[shard] not in (NO_OWNER, at):
            previous[shard] = at
    return make_map(epoch, owners, previous, [rng.randint(1, epoch) for _ in owners])


class Twin:
    """The same, shard by shard."""

    def __init__(self) -> None:
        self.map: ShardMap | None = None

    def take(self, shard_map: ShardMap) -> bool:
        if self.map is not None and shard_map.epoch < self.map.epoch:
            return False
        self.map = shard_map
        return True

    def _ours(self, position: int, worker: int) -> bool:
        assert self.map is not None
        if position == NO_OWNER:
            return False
        found = self.map.workers[position]
        return (found.node, found.instance, found.worker) == (NAME, INSTANCE, worker)

    def role(self, shard: int, worker: int) -> tuple[int, int]:
        """(role, since)"""
        assert self.map is not None
        since = self.map.since[shard]
        if self._ours(self.map.owners[shard], worker):
            return (int(ShardRole.INCOMING if shard in self.map.previous else ShardRole.OWNER), since)
        if self._ours(self.map.previous.get(shard, NO_OWNER), worker):
            return (int(ShardRole.OUTGOING), since)
        return (int(ShardRole.NONE), 0)

    def tasks(self, worker: int) -> dict[int, list[int]]:
        assert self.map is not None
        found: dict[int, list[int]] = {}
        for shard in sorted(self.map.previous):
            if self._ours(self.map.owners[shard], worker):
                found.setdefault(self.map.previous[shard], []).append(shard)
        return found


@pytest.mark.parametrize("seed", range(4))
def test_as_the_twin_says(seed: int) -> None:
    rng = random.Random(f"member {seed}")
    member, twin = Member(NAME, INSTANCE, [0, 1]), Twin()
    newest = 0
    for _ in range(5):
        epoch = max(1, newest + rng.randint(-2, 3))
        shard_map = random_map(rng, epoch)
        answer = member.take_map(shard_map)
        assert (answer is not None) == twin.take(shard_map)
        newest = max(newest, epoch)
        assert member.epoch == newest
        member.check()
        for worker in (0, 1):
            order = member.order(worker)
            since, roles = np.frombuffer(order.since, np.uint64), order.roles
            assert answer is None or answer[worker] == (order.since, order.roles)
            assert [(roles[shard], int(since[shard])) for shard in range(SHARD_COUNT)] == [
                twin.role(shard, worker) for shard in range(SHARD_COUNT)
            ]
            tasks = twin.tasks(worker)
            assert member.tasks(worker) == [(WORKERS[at], tasks[at]) for at in sorted(tasks)]
            moving = sorted(shard for found in tasks.values() for shard in found)
            words = array("Q", bytes(8 * SHARD_COUNT))
            done = rng.sample(moving, len(moving) // 2)
            for shard in moving:
                words[shard] = int(since[shard]) | (0 if shard in done else rng.choice([MOVING, 1 << 40]))
            raw = words.tobytes()
            assert member.finished(worker, raw) == sorted(done)
            assert member.moving(worker, raw) == sorted(set(moving) - set(done))
            report = member.moved(worker, raw)
            assert report is not None and shards_in(report.shards) == sorted(done)
            assert (report.instance, report.epoch, report.name, report.worker) == (INSTANCE, newest, NAME, worker)


def test_what_it_says_is_what_shard_words_take() -> None:
    """The whole way of a shard between two workers of one server, by the real shard words."""
    member = Member(NAME, INSTANCE, [0, 1])
    words = {worker: ShardWords(memoryview(array("Q", bytes(8 * SHARD_COUNT)))) for worker in (0, 1)}

    def tell() -> None:
        for worker in (0, 1):
            order = member.order(worker)
            words[worker].retire(order.epoch, order.since, order.roles)
            words[worker].take()
            words[worker].check()

    member.take_map(make_map(1, [0] * SHARD_COUNT))
    tell()
    assert words[0].count == SHARD_COUNT and words[1].count == 0
    moving = make_map(2, [1 if shard < 5 else 0 for shard in range(SHARD_COUNT)], dict.fromkeys(range(5), 0),
                      [2 if shard < 5 else 1 for shard in range(SHARD_COUNT)])  # fmt: skip
    member.take_map(moving)
    tell()
    ((previous, shards),) = member.tasks(1)
    assert previous == WORKERS[0] and shards == [0, 1, 2, 3, 4] and not member.tasks(0)
    assert words[0].freeze(2, shards) == shards
    words[1].adopt(2, shards, shards)
    assert member.moved(1, bytes(words[1].words)) is None
    words[1].finish([0, 1, 2])
    for _ in range(2):  # said until the map agrees
        report = member.moved(1, bytes(words[1].words))
        assert report is not None and shards_in(report.shards) == [0, 1, 2]
    words[1].finish([3, 4])
    member.take_map(make_map(3, list(moving.owners), None, list(moving.since)))
    assert member.moved(1, bytes(words[1].words)) is None and not member.tasks(1)
    tell()
    assert words[1].count == 5 and not any(words[0].words[shard] for shard in range(5))


def test_before_the_first_map_and_when_fenced() -> None:
    member = Member(NAME, INSTANCE, [0])
    assert member.order(0) == FENCE == M.Shards(0, b"", b"")
    assert member.offer() is None and not member.tasks(0) and member.moved(0, bytes(8 * SHARD_COUNT)) is None
    shard_map = make_map(4, [0] * SHARD_COUNT)
    member.take_map(shard_map)
    order = member.order(0)
    member.fence()
    assert member.order(0) == FENCE and member.epoch == 4
    assert member.take_map(make_map(3, [0] * SHARD_COUNT)) is None, "an old map ends no fence"
    assert member.order(0) == FENCE
    assert member.take_map(shard_map) is not None, "the same map does"
    assert member.order(0) == order


def test_offer_is_the_newest_map() -> None:
    member = Member(NAME, INSTANCE, [0, 1])
    shard_map = random_map(random.Random(3), 9)
    member.take_map(shard_map)
    member.take_map(random_map(random.Random(4), 8))
    offer = member.offer()
    assert offer is not None
    again = ShardMap(offer)
    assert (again.epoch, again.cluster, again.owners, again.previous) == (
        9, shard_map.cluster, shard_map.owners, shard_map.previous
    )  # fmt: skip
    assert again.since == shard_map.since == unpack_since(offer.since) and list(again.workers) == WORKERS


@pytest.mark.parametrize("since", [[0] * SHARD_COUNT, [6] * SHARD_COUNT])
def test_refuses_owners_since_never_or_since_the_future(since: list[int]) -> None:
    member = Member(NAME, INSTANCE, [0])
    member.take_map(make_map(1, [0] * SHARD_COUNT))
    before = member.order(0)
    with pytest.raises(RemoteProtocolError):
        member.take_map(make_map(5, [0] * SHARD_COUNT, None, since))
    assert member.order(0) == before
    member.check()


def test_usage() -> None:
    with pytest.raises(UsageError):
        Member(NAME, INSTANCE, [0, 0])
    member = Member(NAME, INSTANCE, [0])
    member.take_map(make_map(1, [0] * SHARD_COUNT))
    with pytest.raises(UsageError):
        member.finished(0, bytes(8))
    assert repr(member) == "<Member n epoch=1 workers=1>"
    member.fence()
    assert repr(member) == "<Member n fenced workers=1>"


def _role(member: Member) -> None:
    member._roles[0][3] ^= 1


def _since(member: Member) -> None:
    member._since[1][3] += 1


def _no_map(member: Member) -> None:
    member.map = None


@pytest.mark.parametrize("damage", [_role, _since, _no_map])
def test_check_sees_damage(damage: Callable[[Member], None]) -> None:
    member = Member(NAME, INSTANCE, [0, 1])
    member.take_map(make_map(1, [0] * SHARD_COUNT))
    member.check()
    damage(member)
    with pytest.raises(CorruptionError):
        member.check()


def test_bitmaps() -> None:
    some = [0, 9, SHARD_COUNT - 1]
    assert len(bitmap_of([])) == BITMAP_BYTES and shards_in(bitmap_of(some)) == some
    assert BITMAP_BYTES * 8 == SHARD_COUNT


# --- positive controls --------------------------------------------------------------------------


def test_control_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the look at the instance, the shards of our former life would be ours: the twin sees it."""
    member, twin = Member(NAME, INSTANCE, [0, 1]), Twin()
    shard_map = random_map(random.Random(1), 3)
    monkeypatch.setattr(member, "instance", 5)
    member.take_map(shard_map)
    twin.take(shard_map)
    roles = member.order(0).roles
    assert any(roles[shard] != twin.role(shard, 0)[0] for shard in range(SHARD_COUNT))

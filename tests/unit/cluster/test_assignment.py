"""What a map means for one data server, against a reference model; old maps, fences, repeated reports."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable

import numpy as np
import pytest

from simm.arena.shard_words import ShardWords
from simm.cluster.assignment import DROP_ALL, FENCE, Member
from simm.cluster.shard_map import ShardMap, pack_since, unpack_since
from simm.constants import NO_OWNER, SHARD_COUNT
from simm.errors import CorruptionError, RemoteProtocolError, UsageError
from simm.wire import messages as M
from simm.wire.messages import MapReply, ShardRole, WorkerInfo
from simm.wire.shard_set import BITMAP_BYTES, MOVING, bitmap_of, shards_in
from tests.support.dose import dose

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


class ReferenceModel:
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
            return (ShardRole.OUTGOING, since)
        return (ShardRole.NONE, 0)

    def tasks(self, worker: int) -> dict[int, list[int]]:
        assert self.map is not None
        found: dict[int, list[int]] = {}
        for shard in sorted(self.map.previous):
            if self._ours(self.map.owners[shard], worker):
                found.setdefault(self.map.previous[shard], []).append(shard)
        return found


def check(member: Member) -> None:
    """Raise CorruptionError unless the workers' roles follow from the map. O(shards * workers)."""
    found = member.map
    if found is None:
        if member._roles or member._since:
            raise CorruptionError("roles without a map")
        return
    for worker in member.workers:
        positions = {
            at
            for at, info in enumerate(found.workers)
            if (info.node, info.instance, info.worker) == (member.name, member.instance, worker)
        }
        roles, since = member._roles[worker], member._since[worker]
        for shard in range(SHARD_COUNT):
            owns = found.owners[shard] in positions
            had = found.previous.get(shard, NO_OWNER) in positions
            if owns:
                role = ShardRole.INCOMING if shard in found.previous else ShardRole.OWNER
            else:
                role = ShardRole.OUTGOING if had else ShardRole.NONE
            if roles[shard] != role:
                raise CorruptionError(f"worker {worker} has role {roles[shard]} in shard {shard}, not {role}")
            if int(since[shard]) != (found.since[shard] if owns or had else 0):
                raise CorruptionError(f"worker {worker} has shard {shard} since {since[shard]}")


@pytest.mark.parametrize("seed", dose(range(4), quick=1))
def test_as_the_reference_model_says(seed: int) -> None:
    rng = random.Random(f"member {seed}")
    member, reference = Member(NAME, INSTANCE, [0, 1]), ReferenceModel()
    newest = 0
    for _ in range(5):
        epoch = max(1, newest + rng.randint(-2, 3))
        shard_map = random_map(rng, epoch)
        answer = member.take_map(shard_map)
        assert (answer is not None) == reference.take(shard_map)
        newest = max(newest, epoch)
        assert member.epoch == newest
        check(member)
        for worker in (0, 1):
            order = member.order(worker)
            since, roles = np.frombuffer(order.since, np.uint64), order.roles
            assert answer is None or answer[worker] == (order.since, order.roles)
            assert [(roles[shard], int(since[shard])) for shard in range(SHARD_COUNT)] == [
                reference.role(shard, worker) for shard in range(SHARD_COUNT)
            ]
            tasks = reference.tasks(worker)
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


def test_another_cluster() -> None:
    """Orders name the cluster. Once it is another one, the workers are to drop all, and any map of it is taken."""
    member = Member(NAME, INSTANCE, [0, 1])
    assert member.cluster == 0
    member.take_map(make_map(40, [0] * SHARD_COUNT))
    assert member.cluster == member.order(0).cluster == 1
    member.abandon()
    assert member.order(0) == member.order(1) == DROP_ALL and DROP_ALL.cluster == 0
    assert (member.epoch, member.cluster, member.offer(), member.owned(0)) == (0, 0, None, 0)
    check(member)
    member.fence()
    assert member.order(0) == DROP_ALL, "a fence would keep what readers find"
    member.take_map(make_map(3, [0] * SHARD_COUNT))
    assert member.epoch == 3 and member.order(0).epoch == 3 and not member.abandoned


def test_displaced_by_another_instance_of_its_name() -> None:
    """Not before the first map, nor by a map without the name; and not forever."""
    nobody = [NO_OWNER] * SHARD_COUNT
    member = Member(NAME, 3, [0])
    assert not member.displaced
    member.take_map(make_map(5, nobody))
    assert member.displaced
    for name, instance in ((NAME, INSTANCE), ("somebody else", 3)):
        other = Member(name, instance, [0])
        other.take_map(make_map(5, nobody))
        assert not other.displaced
    owners, since = array("H", nobody).tobytes(), pack_since(array("Q", [0] * SHARD_COUNT))
    member.take_map(ShardMap(MapReply(6, 1, [info(0, instance=3)], owners, [], since)))
    assert not member.displaced


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
    check(member)


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
    check(member)
    damage(member)
    with pytest.raises(CorruptionError):
        check(member)


def test_bitmaps() -> None:
    some = [0, 9, SHARD_COUNT - 1]
    assert len(bitmap_of([])) == BITMAP_BYTES and shards_in(bitmap_of(some)) == some
    assert BITMAP_BYTES * 8 == SHARD_COUNT


# --- positive controls --------------------------------------------------------------------------


def test_mutation_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the look at the instance, the shards of our former life would be ours: the reference model sees it."""
    member, reference = Member(NAME, INSTANCE, [0, 1]), ReferenceModel()
    shard_map = random_map(random.Random(1), 3)
    monkeypatch.setattr(member, "instance", 5)
    member.take_map(shard_map)
    reference.take(shard_map)
    roles = member.order(0).roles
    assert any(roles[shard] != reference.role(shard, 0)[0] for shard in range(SHARD_COUNT))


def test_a_worker_that_is_added() -> None:
    """By the map that is known it owns nothing; the next one may list it, or a manager may not know of it."""
    member = Member(NAME, INSTANCE, [0])
    member.add(9)
    assert member.workers == (0, 9) and member.order(9) == FENCE and not member.unlisted, "no map yet"
    with pytest.raises(UsageError):
        member.add(0)
    member.remove(9)
    assert member.take_map(make_map(4, [0] * SHARD_COUNT)) is not None
    member.add(2)
    order = member.order(2)
    assert (order.epoch, order.cluster) == (4, 1) and not any(order.since) and not any(order.roles)
    words = bytes(8 * SHARD_COUNT)
    assert member.owned(2) == 0 and not member.moving(2, words) and member.moved(2, words) is None
    assert member.unlisted == [2] and member.owned(0) == SHARD_COUNT
    member.remove(2)
    assert not member.unlisted and member.workers == (0,) and member.order(0).epoch == 4
    member.add(1)
    assert not member.unlisted, "the map lists it"
    assert member.take_map(make_map(5, [1] * SHARD_COUNT)) is not None and member.owned(1) == SHARD_COUNT
    member.abandon()
    member.add(7)
    assert member.order(7) == DROP_ALL and not member.unlisted

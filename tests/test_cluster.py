"""The cluster's state machine against a naive twin, shard dealing against brute force, and what it refuses to load."""

from __future__ import annotations

import copy
import itertools
import json
import random
from array import array
from collections.abc import Callable
from typing import Any

import pytest

from simm.cluster import (
    EPOCH_MAX,
    FORGET_S,
    NODE_WORKERS_MAX,
    WORKERS_MAX,
    Action,
    Answer,
    Cluster,
    MapChanged,
    NodeChanged,
    NodeState,
    Timing,
    apportion,
    deal,
)
from simm.constants import NO_OWNER, SHARD_COUNT
from simm.errors import CorruptionError, UsageError
from simm.messages import Done, Error, HeartbeatAck, Join, Joined, Status, WorkerInfo, WorkerLoad
from simm.rpc import encode

GIB = 1 << 30
SEEDS = range(4)


def join(name: str, instance: int, *capacities: int) -> Join:
    workers = [
        WorkerInfo(number, 0, 1, 0, capacity, "", f"/run/{name}.{number}", "10.0.0.1", 4000 + number)
        for number, capacity in enumerate(capacities or (GIB,))
    ]
    return Join(instance, 0, name, workers)


def answer(actions: list[Action]) -> tuple[Status, Any]:
    first = actions[0]
    assert isinstance(first, Answer)
    assert not any(isinstance(action, Answer) for action in actions[1:])
    return first.status, first.message


def map_epoch(actions: list[Action]) -> int | None:
    found = [action.epoch for action in actions if isinstance(action, MapChanged)]
    assert len(found) <= 1
    return found[0] if found else None


def states(cluster: Cluster) -> dict[str, str]:
    return {name: node.state.value for name, node in cluster.nodes.items()}


def owners(cluster: Cluster) -> list[tuple[str, int] | None]:
    return [cluster.owner(shard) for shard in range(SHARD_COUNT)]


# --- dealing ----------------------------------------------------------------------------------


def fewest_moves(held: list[int], weights: list[int], shards: int) -> int:
    """By trying every assignment of floors and ceilings that sums up."""
    total = sum(weights)
    choices = []
    for weight in weights:
        floor, rest = divmod(shards * weight, total)
        choices.append((floor, floor + 1) if rest else (floor,))
    kept = [
        sum(min(have, target) for have, target in zip(held, targets))
        for targets in itertools.product(*choices)
        if sum(targets) == shards
    ]
    return shards - max(kept)


@pytest.mark.parametrize("seed", range(300))
def test_deal_moves_the_least_and_balances(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randint(1, 6)
    shards = rng.randint(1, 40)
    weights = [rng.choice([0, 1, 1, 2, 3, 7]) for _ in range(count)]
    places = [*range(count), NO_OWNER]
    before = array("H", [rng.choice(places) for _ in range(shards)])
    homes = array("H", [rng.choice(places) for _ in range(shards)])
    after, homes_after = array("H", before), array("H", homes)
    moves = deal(after, homes_after, weights)
    if not any(weights):
        assert set(after) == {NO_OWNER} and moves == 0
        return
    total = sum(weights)
    for at, weight in enumerate(weights):
        ideal = shards * weight / total
        assert abs(list(after).count(at) - ideal) < 1
    held = [list(before).count(at) if weight else 0 for at, weight in enumerate(weights)]
    assert moves == fewest_moves(held, weights, shards) == sum(a != b for a, b in zip(before, after))
    gave_resident, has_guest = set(), set()
    for home, home_after, old, new in zip(homes, homes_after, before, after):
        by_plan = home == NO_OWNER or (home == old and weights[old] and new != old)
        assert home_after == (new if by_plan else home)
        if old != NO_OWNER and weights[old]:
            if old == home and new != old:
                gave_resident.add(old)
            if old != home and new == old:
                has_guest.add(old)
    assert not gave_resident & has_guest, "a worker gave what is its own before what is another's"


def test_apportion_gives_rest_to_the_largest_remainders() -> None:
    assert apportion([1, 1, 1], [0, 0, 0], 16) == [6, 5, 5]
    assert apportion([1, 1, 1], [0, 0, 6], 16) == [5, 5, 6]
    assert apportion([2, 3, 5], [0, 0, 0], 7) == [1, 2, 4]
    assert apportion([0, 0], [0, 0], 7) == [0, 0]


def test_a_returning_worker_gets_its_homes() -> None:
    cluster = Cluster(1, 0.0)
    for name in ("a", "b", "c"):
        cluster.join(0.0, join(name, 1))
    before = owners(cluster)
    mine = {shard for shard, owner in enumerate(before) if owner == ("a", 0)}
    cluster.leave(0.0, "a", 1)
    cluster.join(0.0, join("a", 2))
    again = {shard for shard, owner in enumerate(owners(cluster)) if owner == ("a", 0)}
    # One worker keeps a shard more than before: fewest moves come before homes.
    assert again <= mine and len(mine) - len(again) <= 1
    assert sum(x != y for x, y in zip(before, owners(cluster))) <= 1


def test_two_nodes_die_and_return_in_either_order() -> None:
    for order in (("a", "b"), ("b", "a")):
        cluster = Cluster(1, 0.0)
        for name in ("a", "b", "c", "d"):
            cluster.join(0.0, join(name, 1))
        before = owners(cluster)
        cluster.leave(0.0, "a", 1)
        cluster.leave(0.0, "b", 1)
        for name in order:
            cluster.join(0.0, join(name, 2))
            cluster.check()
        for old, new in zip(before, owners(cluster)):
            assert old is not None and new is not None
            assert old == new or {old[0], new[0]} == {"a", "b"}, "c and d never had to give what is theirs"


# --- life of a node ---------------------------------------------------------------------------


def test_the_first_node_gets_everything_and_the_last_leaves_nobody() -> None:
    cluster = Cluster(1, 0.0)
    assert set(owners(cluster)) == {None} and cluster.epoch == 1
    status, message = answer(actions := cluster.join(0.0, join("a", 7)))
    assert status is Status.OK and message == Joined(2, 1000) and map_epoch(actions) == 2
    assert NodeChanged("a", None, NodeState.JOINING, "joined") in actions
    assert set(owners(cluster)) == {("a", 0)}
    assert answer(actions := cluster.leave(0.0, "a", 7)) == (Status.OK, Done(1))
    assert map_epoch(actions) == 3 and set(owners(cluster)) == {None}
    reply = cluster.map_reply()
    assert reply.workers == [] and set(reply.owners) == {0xFF}
    cluster.check()


def test_workers_are_marked_with_their_node_and_instance() -> None:
    cluster = Cluster(1, 0.0)
    cluster.join(0.0, join("a", 7, GIB, 3 * GIB))
    assert [(info.node, info.instance, info.worker) for info in cluster.live_workers()] == [("a", 7, 0), ("a", 7, 1)]
    assert cluster.shards_held() == {("a", 0): SHARD_COUNT // 4, ("a", 1): SHARD_COUNT // 4 * 3}


def test_joining_up_suspect_dead_and_back() -> None:
    cluster = Cluster(1, 0.0, Timing(1.0, 3, 5, 0.0))
    cluster.join(0.0, join("a", 1))
    cluster.join(0.0, join("b", 2))
    assert states(cluster) == {"a": "joining", "b": "joining"}
    seen: list[tuple[float, str, bool]] = []
    now = 0.0
    while now < 7:
        now += 0.25
        cluster.heartbeat(now, "b", 2)
        actions = (cluster.heartbeat(now, "a", 1) if now <= 1 else []) + cluster.tick(now)
        seen += [
            (now, action.after.value, map_epoch(actions) is not None)
            for action in actions
            if isinstance(action, NodeChanged) and action.name == "a"
        ]
    assert seen == [(0.25, "up", False), (4.0, "suspect", False), (6.0, "dead", True)]
    assert set(owners(cluster)) == {("b", 0)}
    status, message = answer(cluster.heartbeat(now, "a", 1))
    assert status is Status.UNKNOWN_NODE and "join again" in message.text
    assert answer(cluster.leave(now, "a", 1))[0] is Status.UNKNOWN_NODE
    assert answer(cluster.join(now, join("a", 1)))[0] is Status.OK
    assert cluster.shards_held()["a", 0] == SHARD_COUNT // 2
    assert answer(cluster.heartbeat(now, "a", 1)) == (Status.OK, HeartbeatAck(cluster.epoch))
    assert states(cluster) == {"a": "up", "b": "up"}
    cluster.check()


def test_a_hiccup_moves_nothing() -> None:
    cluster = Cluster(1, 0.0)
    cluster.join(0.0, join("a", 1))
    for quarter in range(1, 17):
        cluster.tick(quarter / 4)
    assert states(cluster) == {"a": "suspect"}
    actions = cluster.heartbeat(4.1, "a", 1)
    assert NodeChanged("a", NodeState.SUSPECT, NodeState.UP, "heartbeat") in actions and map_epoch(actions) is None


def run(cluster: Cluster, start: float, end: float, each: Callable[[float], Any] = lambda now: None) -> list[Action]:
    """Tick four times a second."""
    actions: list[Action] = []
    steps = round((end - start) * 4)
    for step in range(1, steps + 1):
        now = start + step / 4
        each(now)
        actions += cluster.tick(now)
    return actions


def test_grace_keeps_the_shards_of_the_dead() -> None:
    cluster = Cluster(1, 0.0, Timing(1.0, 3, 5, 4.0))
    cluster.join(0.0, join("a", 1))
    cluster.join(0.0, join("b", 1))
    before = owners(cluster)
    run(cluster, 0.0, 8.75, lambda now: cluster.heartbeat(now, "b", 1))
    assert states(cluster)["a"] == "dead" and owners(cluster) == before
    cluster.check()
    # Back within its grace, as a new process: the same shards, nothing moved.
    moved = cluster.moved
    assert map_epoch(cluster.join(8.75, join("a", 2))) is not None
    assert owners(cluster) == before and cluster.moved == moved
    run(cluster, 8.75, 17.75, lambda now: cluster.heartbeat(now, "b", 1))
    assert set(owners(cluster)) == {("b", 0)}
    cluster.check()


def test_a_name_is_taken_while_its_instance_lives() -> None:
    cluster = Cluster(1, 0.0)
    cluster.join(0.0, join("a", 1))
    status, message = answer(cluster.join(1.0, join("a", 2)))
    assert status is Status.NAME_TAKEN and "--name" in message.text and "try again in 2.0 s" in message.text
    assert cluster.nodes["a"].instance == 1


@pytest.mark.parametrize("how", ["suspect", "dead", "left", "link lost"])
def test_a_new_instance_takes_over_from_one_that_does_not_live(how: str) -> None:
    cluster = Cluster(1, 0.0)
    cluster.join(0.0, join("a", 1))
    cluster.heartbeat(0.0, "a", 1)
    before = owners(cluster)
    now = 0.5
    if how == "suspect":
        run(cluster, 0.0, now := 3.0)
    elif how == "dead":
        run(cluster, 0.0, now := 6.0)
    elif how == "left":
        cluster.leave(now, "a", 1)
    else:
        cluster.link_lost(now, "a", 1)
    status, message = answer(actions := cluster.join(now, join("a", 2)))
    assert (status, message) == (Status.OK, Joined(cluster.epoch, 1000)) and map_epoch(actions) == cluster.epoch
    assert owners(cluster) == before
    assert {info.instance for info in cluster.live_workers()} == {2}
    # The old one, if it lived after all, is told, and is now the second.
    assert answer(cluster.heartbeat(now, "a", 1))[0] is Status.UNKNOWN_NODE
    assert answer(cluster.join(now, join("a", 1)))[0] is Status.NAME_TAKEN
    cluster.check()


def test_a_heartbeat_renews_a_lost_link() -> None:
    cluster = Cluster(1, 0.0)
    cluster.join(0.0, join("a", 1))
    cluster.link_lost(0.1, "a", 1)
    cluster.heartbeat(0.2, "a", 1)
    assert answer(cluster.join(0.3, join("a", 2)))[0] is Status.NAME_TAKEN
    cluster.link_lost(0.3, "a", 99)  # of another instance: nothing to us
    assert answer(cluster.join(0.3, join("a", 2)))[0] is Status.NAME_TAKEN


def test_joining_again_changes_the_map_only_with_the_workers() -> None:
    cluster = Cluster(1, 0.0)
    cluster.join(0.0, join("a", 1))
    epoch = cluster.epoch
    assert map_epoch(cluster.join(0.1, join("a", 1))) is None and cluster.epoch == epoch
    restarted = join("a", 1)
    restarted.workers[0] = restarted.workers[0]._replace(incarnation=2)
    assert map_epoch(cluster.join(0.2, restarted)) == epoch + 1
    assert cluster.live_workers()[0].incarnation == 2
    moved = cluster.moved
    assert map_epoch(cluster.join(0.3, join("a", 1, GIB, GIB))) == epoch + 2
    assert cluster.moved - moved == SHARD_COUNT // 2
    assert map_epoch(cluster.join(0.4, join("a", 1))) == epoch + 3
    assert set(owners(cluster)) == {("a", 0)}
    cluster.check()


def test_a_manager_that_slept_blames_nobody() -> None:
    cluster = Cluster(1, 0.0)
    cluster.join(0.0, join("a", 1))
    cluster.heartbeat(0.5, "a", 1)
    assert cluster.tick(10_000.0) == []
    assert cluster.heartbeat(10_000.1, "a", 1)[0] == Answer(HeartbeatAck(cluster.epoch))
    # Nor does a clock that goes back, or stands.
    for now in (5.0, 5.0, 0.0, -1e9):
        assert cluster.tick(now) == []
    assert states(cluster) == {"a": "up"}
    # But silence while it listens counts, from whatever time.
    run(cluster, -1e9, -1e9 + 6)
    assert states(cluster) == {"a": "dead"}


def test_a_server_with_a_newer_epoch_raises_ours() -> None:
    cluster = Cluster(1, 0.0)
    cluster.join(0.0, join("a", 1))
    actions = cluster.heartbeat(0.1, "a", 1, epoch=500)
    assert answer(actions)[1] == HeartbeatAck(501) and map_epoch(actions) == 501
    assert cluster.map_reply().epoch == 501
    assert map_epoch(cluster.heartbeat(0.2, "a", 1, epoch=EPOCH_MAX + 1)) is None
    assert cluster.epoch == 501


def test_the_long_gone_are_forgotten() -> None:
    cluster = Cluster(1, 0.0, Timing(10_000.0, 2, 3))
    cluster.join(0.0, join("a", 1))
    cluster.join(0.0, join("b", 1))
    cluster.leave(0.0, "a", 1)
    now = 0.0
    while now < FORGET_S - 10_000:
        cluster.heartbeat(now := now + 9_000.0, "b", 1)
        cluster.tick(now)
    assert set(cluster.nodes) == {"a", "b"}
    for _ in range(2):
        cluster.heartbeat(now := now + 9_000.0, "b", 1)
        cluster.tick(now)
    assert set(cluster.nodes) == {"b"}
    cluster.check()


@pytest.mark.parametrize(
    "bad",
    [
        join("", 1), join("n" * 129, 1), Join(1, 0, "a", []), join("a", 1, 0),
        join("a", 1, *[1] * (NODE_WORKERS_MAX + 1)),
        Join(1, 0, "a", [*join("a", 1).workers, *join("a", 1).workers]),
        Join(1, 0, "a", [join("a", 1).workers[0]._replace(uds="u" * 109)]),
        Join(1, 0, "a", [join("a", 1).workers[0]._replace(host="é" * 128)]),
    ],
)  # fmt: skip
def test_a_bad_join_is_refused_and_changes_nothing(bad: Join) -> None:
    cluster = Cluster(1, 0.0)
    status, message = answer(actions := cluster.join(0.0, bad))
    assert status is Status.BAD_REQUEST and isinstance(message, Error) and len(actions) == 1
    assert not cluster.nodes and cluster.epoch == 1


def test_the_largest_map_fits_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(1, 0.0)
    monkeypatch.setattr(cluster, "_remap", lambda actions: None)  # 30 deals of 1,900 workers prove nothing here
    for number in range(WORKERS_MAX // 50 + 1):
        msg = join(f"{number:0128d}", 1, *[GIB] * 50)
        msg = msg._replace(workers=[info._replace(uds="u" * 108, host="h" * 255) for info in msg.workers])
        status, _ = answer(cluster.join(0.0, msg))
    assert status is Status.NO_SPACE and len(cluster.live_workers()) == WORKERS_MAX
    monkeypatch.undo()
    cluster._remap([])
    cluster.check()
    assert encode(cluster.map_reply(), 1)


@pytest.mark.parametrize("timing", [Timing(0), Timing(1, 5, 5), Timing(1, 0, 5), Timing(1, 3, 5, -1.0)])
def test_impossible_timing(timing: Timing) -> None:
    with pytest.raises(UsageError):
        Cluster(1, 0.0, timing)


def test_status_for_people() -> None:
    cluster = Cluster(0xAB, 0.0)
    cluster.join(0.0, join("a", 1, GIB, GIB))
    cluster.heartbeat(0.5, "a", 1, cluster.epoch, [WorkerLoad(5, 4, 3, 2)] * 3)
    status = json.loads(json.dumps(cluster.status(1.0)))
    assert status["cluster"] == "00000000000000ab" and status["shards_without_owner"] == 0
    (node,) = status["nodes"]
    assert (node["state"], node["silent_s"], node["map_epoch"]) == ("up", 0.5, cluster.epoch)
    assert node["workers"][1]["used_bytes"] == 5 and node["workers"][1]["shards"] == SHARD_COUNT // 2


# --- the naive twin ---------------------------------------------------------------------------


class Twin:
    """Membership from the plainest reading of the rules: remember the last sign of life, decide when asked."""

    def __init__(self, timing: Timing) -> None:
        self.timing = timing
        self.heard: dict[str, float] = {}
        self.instance: dict[str, int] = {}
        self.capacities: dict[str, tuple[int, ...]] = {}
        self.gone: set[str] = set()  # left or dead: must join again
        self.left: set[str] = set()
        self.unlinked: set[str] = set()

    def quiet(self, name: str, now: float) -> float:
        return (now - self.heard[name]) / self.timing.heartbeat_s

    def join(self, now: float, name: str, instance: int, capacities: tuple[int, ...]) -> Status:
        known = self.instance.get(name)
        lives = known is not None and name not in self.gone and name not in self.unlinked
        if lives and known != instance and self.quiet(name, now) < self.timing.suspect_after:
            return Status.NAME_TAKEN
        self.instance[name], self.heard[name], self.capacities[name] = instance, now, capacities
        self.gone.discard(name)
        self.unlinked.discard(name)
        return Status.OK

    def member(self, name: str, instance: int) -> bool:
        return self.instance.get(name) == instance and name not in self.gone

    def tick(self, now: float) -> None:
        for name in self.heard:
            if self.quiet(name, now) >= self.timing.dead_after:
                self.gone.add(name)

    def in_map(self, name: str, now: float) -> bool:
        grace = self.timing.dead_after + self.timing.grace_s / self.timing.heartbeat_s
        return name not in self.gone or (name not in self.left and self.quiet(name, now) < grace)

    def live(self, now: float) -> dict[tuple[str, int], int]:
        return {
            (name, number): capacity
            for name, capacities in self.capacities.items()
            if self.in_map(name, now)
            for number, capacity in enumerate(capacities)
        }


@pytest.mark.parametrize("seed", SEEDS)
def test_storm_against_the_twin(seed: int) -> None:
    rng = random.Random(seed)
    # Binary fractions only, so that both sides' sums of time are exact.
    timing = Timing(1.0, 3, 5, rng.choice([0.0, 4.0]))
    cluster, twin = Cluster(seed, 0.0, timing), Twin(timing)
    names = [f"n{number}" for number in range(6)]
    silent: set[str] = set()
    instances: dict[str, int] = {}
    now, last_epoch, epochs = 0.0, cluster.epoch, 0
    before = owners(cluster)
    for _ in range(200):
        now += rng.choice([0.0, 0.25, 0.5, 0.5])
        name = rng.choice(names)
        event = rng.choice(["join", "new", "leave", "silence", "wake", "unlink", "restart", "beat", "beat", "nothing"])
        if event in ("join", "new"):
            fresh = event == "new" or name not in instances
            instance = rng.getrandbits(64) if fresh else instances[name]
            capacities = tuple(rng.choice([GIB, GIB, 3 * GIB]) for _ in range(rng.choice([1, 1, 2])))
            expected = twin.join(now, name, instance, capacities)
            assert answer(cluster.join(now, join(name, instance, *capacities)))[0] is expected
            if expected is Status.OK:
                instances[name] = instance
                twin.left.discard(name)
        elif event == "leave" and name in instances:
            member = twin.member(name, instances[name])
            status = answer(cluster.leave(now, name, instances[name]))[0]
            assert status is (Status.OK if member else Status.UNKNOWN_NODE)
            if member:
                twin.gone.add(name)
                twin.left.add(name)
        elif event == "silence":
            silent.add(name)
        elif event == "wake":
            silent.discard(name)
        elif event == "unlink" and name in instances:
            cluster.link_lost(now, name, instances[name])
            if twin.member(name, instances[name]):
                twin.unlinked.add(name)
        elif event == "restart" and rng.random() < 0.3:
            cluster.tick(now)
            twin.tick(now)
            state = json.loads(json.dumps(cluster.to_state()))
            again = Cluster.from_state(state, now, timing)
            assert again.map_reply() == cluster.map_reply() and again.to_state()["owners"] == state["owners"]
            cluster = again
            for known in twin.heard:  # everyone is given the time of a fresh one, or the whole grace
                if twin.in_map(known, now):
                    twin.heard[known] = now - (timing.dead_after if known in twin.gone else 0)
            twin.unlinked.clear()
        elif event == "beat":
            for name in names:
                if name in instances and name not in silent:
                    member = twin.member(name, instances[name])
                    status = answer(cluster.heartbeat(now, name, instances[name], cluster.epoch))[0]
                    assert status is (Status.OK if member else Status.UNKNOWN_NODE)
                    if member:
                        twin.heard[name] = now
                        twin.unlinked.discard(name)
        cluster.tick(now)
        twin.tick(now)

        live = twin.live(now)
        assert {(info.node, info.worker): info.capacity for info in cluster.live_workers()} == live
        assert {name for name, state in states(cluster).items() if state in ("dead", "left")} == twin.gone
        assert cluster.epoch >= last_epoch
        if cluster.epoch != last_epoch:
            cluster.check()
            after = owners(cluster)
            assert set(after) <= (set(live) or {None})
            for key, capacity in live.items():
                assert abs(after.count(key) - SHARD_COUNT * capacity / sum(live.values())) < 1
            if cluster.epoch == last_epoch + 1 and live:  # two changes at once are not one minimal change
                held = [before.count(key) for key in live]
                moves = sum(x != y for x, y in zip(before, after))
                assert moves == fewest_moves(held, list(live.values()), SHARD_COUNT)
            last_epoch, before, epochs = cluster.epoch, after, epochs + 1
        else:
            assert owners(cluster) == before
    assert epochs > 20


# --- stored state -----------------------------------------------------------------------------


def stored() -> dict[str, Any]:
    cluster = Cluster(5, 0.0)
    for name in ("a", "b", "c"):
        cluster.join(0.0, join(name, 1, GIB, GIB))
    cluster.leave(0.0, "b", 1)
    state: dict[str, Any] = json.loads(json.dumps(cluster.to_state()))
    return state


def test_state_round_trip() -> None:
    state = stored()
    cluster = Cluster.from_state(copy.deepcopy(state), 100.0)
    assert states(cluster) == {"a": "joining", "b": "left", "c": "joining"}
    assert answer(cluster.heartbeat(100.0, "a", 1, cluster.epoch)) == (Status.OK, HeartbeatAck(cluster.epoch))
    assert answer(cluster.heartbeat(100.0, "d", 1))[0] is Status.UNKNOWN_NODE
    assert answer(cluster.join(100.0, join("a", 9)))[0] is Status.NAME_TAKEN
    cluster = Cluster.from_state(copy.deepcopy(state), 0.0)
    run(cluster, 0.0, 6.0)
    assert set(states(cluster).values()) == {"dead", "left"} and set(owners(cluster)) == {None}


def change(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def apply(state: Any) -> None:
        *steps, last = [int(step) if step.isdigit() else step for step in path.split(".")]
        for step in steps:
            state = state[step]
        if value is ...:
            del state[last]
        else:
            state[last] = value

    return apply


@pytest.mark.parametrize(
    "damage",
    [
        change("format", 2), change("format", ...), change("cluster", -1), change("cluster", "x"), change("epoch", 0),
        change("epoch", 1.5), change("epoch", True), change("nodes", None), change("nodes", {}),
        change("nodes.0.name", ""), change("nodes.0.name", "c"), change("nodes.0.name", 5),
        change("nodes.0.instance", 1 << 64),
        change("nodes.0.state", "asleep"), change("nodes.0.released", True), change("nodes.1.released", False),
        change("nodes.0.workers", []), change("nodes.0.workers.0", [1, 2]), change("nodes.0.workers.0.4", 0),
        change("nodes.0.workers.0.5", "c"), change("nodes.0.workers.0.3", 2), change("nodes.0.workers.0.6", 5),
        change("nodes.0.workers.0.4", 5 << 30), change("keys", []), change("keys.0", ["x", 0]), change("keys.0.1", -1),
        change("keys.1", ["a", 0]), change("owners", "AAAA"), change("owners", "?"), change("owners", ...),
        change("owners", "//8A" * (SHARD_COUNT * 2 // 3) + "AAA="), change("homes", None),
        change("homes", "/38A" * (SHARD_COUNT * 2 // 3) + "AAA="), lambda state: state["nodes"].pop(),
    ],
)  # fmt: skip
def test_a_damaged_state_is_refused(damage: Callable[[dict[str, Any]], None]) -> None:
    state = stored()
    damage(state)
    with pytest.raises(CorruptionError):
        Cluster.from_state(state, 0.0)


@pytest.mark.parametrize("state", [None, [], "x", {}])
def test_what_is_no_state_is_refused(state: Any) -> None:
    with pytest.raises(CorruptionError):
        Cluster.from_state(state, 0.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_state_with_random_damage_is_loaded_whole_or_refused(seed: int) -> None:
    rng = random.Random(seed)
    text = json.dumps(stored())
    for _ in range(60):
        at = rng.randrange(len(text)) if rng.random() < 0.5 else rng.randrange(900)
        damaged = text[:at] + rng.choice('0123456789",:[]{}abc') + text[at + 1 :]
        try:
            state = json.loads(damaged)
        except ValueError:
            continue
        try:
            Cluster.from_state(state, 0.0).check()
        except CorruptionError:
            pass


def test_check_finds_what_does_not_belong() -> None:
    def owner(cluster: Cluster) -> None:
        cluster._owners[5] = NO_OWNER

    def unbalanced(cluster: Cluster) -> None:
        cluster._owners[:] = cluster._homes[:] = array("H", [0]) * SHARD_COUNT

    def home(cluster: Cluster) -> None:
        cluster._homes[5] = 2

    def lost_home(cluster: Cluster) -> None:
        cluster._homes[5] = NO_OWNER

    def beyond(cluster: Cluster) -> None:
        cluster._owners[5] = 99

    def twice(cluster: Cluster) -> None:
        cluster._keys[1] = cluster._keys[0]

    def other(cluster: Cluster) -> None:
        cluster.nodes["a"].instance += 1

    for damage in (owner, unbalanced, home, lost_home, beyond, twice, other):
        cluster = Cluster(1, 0.0)
        cluster.join(0.0, join("a", 1))
        cluster.join(0.0, join("b", 1))
        cluster.check()
        damage(cluster)
        with pytest.raises(CorruptionError):
            cluster.check()

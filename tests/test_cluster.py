"""The cluster's state machine: against a naive twin, by rules that hold after each event, and what it refuses."""

from __future__ import annotations

import base64
import copy
import json
import random
from array import array
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from simm import deal as deal_module
from simm import placement
from simm.cluster import (
    EPOCH_MAX,
    EPOCHS_RESERVED,
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
)
from simm.constants import NO_OWNER, SHARD_COUNT
from simm.errors import CorruptionError, UsageError
from simm.members import Node
from simm.messages import (
    Done,
    Error,
    HeartbeatAck,
    Join,
    Joined,
    MapOffer,
    MapReply,
    Moved,
    Status,
    WorkerInfo,
    WorkerLoad,
)
from simm.placement import NOTHING
from simm.rpc import encode
from simm.shardmap import ShardMap, pack_since
from simm.shards import BITMAP_BYTES, bitmap_of

GIB = 1 << 30
SEEDS = range(4)
DEFAULT = Timing()
ALL = Timing(moves_at_once=SHARD_COUNT)


class _Attentive(Cluster):
    """One whose servers all hear of each map at once, so that no shard waits for that."""

    def _remap(self, actions: list[Action], *, changed: bool = False, renewed: Any = NOTHING) -> None:
        for node in self.nodes.values():
            node.map_epoch = self.epoch
        super()._remap(actions, changed=changed, renewed=renewed)


def attentive(cluster: int, now: float, timing: Timing = DEFAULT) -> Cluster:
    return _Attentive(cluster, now, timing)


def attentive_again(state: Any, now: float, timing: Timing = DEFAULT, epoch: int = 0) -> Cluster:
    return _Attentive.from_state(state, now, timing, epoch)


def join(name: str, instance: int, *capacities: int, warm: bool = False, epoch: int = 0) -> Join:
    workers = [
        WorkerInfo(number, 0, 1, 0, capacity, "", f"/run/{name}.{number}", "10.0.0.1", 4000 + number)
        for number, capacity in enumerate(capacities or (GIB,))
    ]
    return Join(instance, int(warm), name, workers, epoch)


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


def moving(cluster: Cluster) -> dict[int, tuple[tuple[str, int], tuple[str, int]]]:
    """Shard -> (previous owner, owner)."""
    found = {}
    for shard in range(SHARD_COUNT):
        previous, owner = cluster.previous(shard), cluster.owner(shard)
        if previous is not None:
            assert owner is not None
            found[shard] = (previous, owner)
    return found


def tell(cluster: Cluster, now: float, key: tuple[str, int], shards: Iterable[int], epoch: int = 0) -> int:
    """MOVED by a worker; how many were taken."""
    msg = Moved(cluster.nodes[key[0]].instance, epoch or cluster.epoch, key[0], key[1], bitmap_of(shards))
    status, message = answer(cluster.moved(now, msg))
    assert status is Status.OK and isinstance(message, Done)
    return message.items


def arrive(cluster: Cluster, now: float = 0.0) -> int:
    """All that is moving arrives, and what follows from that; in how many steps."""
    for step in range(100):
        by_owner: dict[tuple[str, int], list[int]] = {}
        for shard, (_, owner) in moving(cluster).items():
            by_owner.setdefault(owner, []).append(shard)
        if not by_owner:
            return step
        for owner, shards in by_owner.items():
            assert tell(cluster, now, owner, shards) == len(shards)
            cluster.check()
    raise AssertionError("it never ends")


def of(cluster: Cluster, name: str) -> set[int]:
    """The shards of a node's only worker."""
    return {shard for shard in range(SHARD_COUNT) if cluster.owner(shard) == (name, 0)}


def offer(reply: MapReply) -> MapOffer:
    return MapOffer(*reply)


# --- whose shards -----------------------------------------------------------------------------


def test_a_returning_worker_gets_its_homes() -> None:
    cluster = attentive(1, 0.0)
    for name in ("a", "b", "c"):
        cluster.join(0.0, join(name, 1))
    arrive(cluster)
    before = owners(cluster)
    mine = of(cluster, "a")
    cluster.leave(0.0, "a", 1)
    cluster.join(0.0, join("a", 2))
    assert set(moving(cluster).values()) <= {(("b", 0), ("a", 0)), (("c", 0), ("a", 0))}
    arrive(cluster)
    again = {shard for shard, owner in enumerate(owners(cluster)) if owner == ("a", 0)}
    # One worker keeps a shard more than before: fewest moves come before homes.
    assert again <= mine and len(mine) - len(again) <= 1
    assert sum(x != y for x, y in zip(before, owners(cluster))) <= 1


def test_two_nodes_die_and_return_in_either_order() -> None:
    for order in (("a", "b"), ("b", "a")):
        cluster = attentive(1, 0.0)
        for name in ("a", "b", "c", "d"):
            cluster.join(0.0, join(name, 1))
            arrive(cluster)
        before = owners(cluster)
        cluster.leave(0.0, "a", 1)
        cluster.leave(0.0, "b", 1)
        for name in order:
            cluster.join(0.0, join(name, 2))
            cluster.check()
            arrive(cluster)
        for old, new in zip(before, owners(cluster)):
            assert old is not None and new is not None
            assert old == new or {old[0], new[0]} == {"a", "b"}, "c and d never had to give what is theirs"


# --- life of a node ---------------------------------------------------------------------------


def test_the_first_node_gets_everything_and_the_last_leaves_nobody() -> None:
    cluster = attentive(1, 0.0)
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
    cluster = attentive(1, 0.0)
    cluster.join(0.0, join("a", 7, GIB, 3 * GIB))
    assert [(info.node, info.instance, info.worker) for info in cluster.live_workers()] == [("a", 7, 0), ("a", 7, 1)]
    assert cluster.shards_held() == {("a", 0): SHARD_COUNT // 4, ("a", 1): SHARD_COUNT // 4 * 3}


def test_joining_up_suspect_dead_and_back() -> None:
    cluster = attentive(1, 0.0, ALL)
    cluster.join(0.0, join("a", 1))
    cluster.join(0.0, join("b", 2))
    arrive(cluster)
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
    assert seen == [(0.25, "running", False), (4.0, "suspect", False), (6.0, "dead", True)]
    assert set(owners(cluster)) == {("b", 0)}
    status, message = answer(cluster.heartbeat(now, "a", 1))
    assert status is Status.UNKNOWN_NODE and "join again" in message.text
    assert answer(cluster.leave(now, "a", 1))[0] is Status.UNKNOWN_NODE
    assert answer(cluster.join(now, join("a", 1)))[0] is Status.OK
    assert cluster.shards_held()["a", 0] == SHARD_COUNT // 2
    assert set(moving(cluster).values()) == {(("b", 0), ("a", 0))}, "what b has got meanwhile comes along"
    assert answer(cluster.heartbeat(now, "a", 1)) == (Status.OK, HeartbeatAck(cluster.epoch))
    assert states(cluster) == {"a": "running", "b": "running"}
    cluster.check()


def test_a_hiccup_moves_nothing() -> None:
    cluster = attentive(1, 0.0)
    cluster.join(0.0, join("a", 1))
    for quarter in range(1, 17):
        cluster.tick(quarter / 4)
    assert states(cluster) == {"a": "suspect"}
    actions = cluster.heartbeat(4.1, "a", 1)
    assert NodeChanged("a", NodeState.SUSPECT, NodeState.RUNNING, "heartbeat") in actions and map_epoch(actions) is None


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
    cluster = attentive(1, 0.0, Timing(1.0, 3, 5, 4.0))
    cluster.join(0.0, join("a", 1))
    cluster.join(0.0, join("b", 1))
    arrive(cluster)
    before = owners(cluster)
    run(cluster, 0.0, 8.75, lambda now: cluster.heartbeat(now, "b", 1))
    assert states(cluster)["a"] == "dead" and owners(cluster) == before
    cluster.check()
    # Back within its grace, as a new process: the same shards, nothing moved.
    moves = cluster.moves
    assert map_epoch(cluster.join(8.75, join("a", 2))) is not None
    assert owners(cluster) == before and cluster.moves == moves
    run(cluster, 8.75, 17.75, lambda now: cluster.heartbeat(now, "b", 1))
    assert set(owners(cluster)) == {("b", 0)}
    cluster.check()


def test_a_name_is_taken_while_its_instance_lives() -> None:
    cluster = attentive(1, 0.0)
    cluster.join(0.0, join("a", 1))
    status, message = answer(cluster.join(1.0, join("a", 2)))
    assert status is Status.NAME_TAKEN and "--name" in message.text and "try again in 2.0 s" in message.text
    assert cluster.nodes["a"].instance == 1


@pytest.mark.parametrize("how", ["suspect", "dead", "left", "link lost"])
def test_a_new_instance_takes_over_from_one_that_does_not_live(how: str) -> None:
    cluster = attentive(1, 0.0)
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
    cluster = attentive(1, 0.0)
    cluster.join(0.0, join("a", 1))
    cluster.link_lost(0.1, "a", 1)
    cluster.heartbeat(0.2, "a", 1)
    assert answer(cluster.join(0.3, join("a", 2)))[0] is Status.NAME_TAKEN
    cluster.link_lost(0.3, "a", 99)  # of another instance: nothing to us
    assert answer(cluster.join(0.3, join("a", 2)))[0] is Status.NAME_TAKEN


def test_joining_again_changes_the_map_only_with_the_workers() -> None:
    cluster = attentive(1, 0.0)
    cluster.join(0.0, join("a", 1))
    epoch = cluster.epoch
    assert map_epoch(cluster.join(0.1, join("a", 1))) is None and cluster.epoch == epoch
    restarted = join("a", 1)
    restarted.workers[0] = restarted.workers[0]._replace(incarnation=2)
    assert map_epoch(cluster.join(0.2, restarted)) == epoch + 1
    assert cluster.live_workers()[0].incarnation == 2
    moves = cluster.moves
    assert map_epoch(cluster.join(0.3, join("a", 1, GIB, GIB))) == epoch + 2
    assert cluster.moves - moves == cluster.timing.moves_at_once
    assert map_epoch(cluster.join(0.4, join("a", 1))) == epoch + 3
    assert not moving(cluster), "a worker that is gone is nobody's previous owner, nor does anything move to it"
    assert set(owners(cluster)) == {("a", 0)}
    cluster.check()


def test_a_manager_that_slept_blames_nobody() -> None:
    cluster = attentive(1, 0.0)
    cluster.join(0.0, join("a", 1))
    cluster.heartbeat(0.5, "a", 1)
    assert cluster.tick(10_000.0) == []
    assert cluster.heartbeat(10_000.1, "a", 1)[0] == Answer(HeartbeatAck(cluster.epoch))
    # Nor does a clock that goes back, or stands.
    for now in (5.0, 5.0, 0.0, -1e9):
        assert cluster.tick(now) == []
    assert states(cluster) == {"a": "running"}
    # But silence while it listens counts, from whatever time.
    run(cluster, -1e9, -1e9 + 6)
    assert states(cluster) == {"a": "dead"}


def test_a_server_with_a_newer_epoch_is_asked_for_its_map_and_raises_ours() -> None:
    cluster = attentive(1, 0.0)
    cluster.join(0.0, join("a", 1))
    assert answer(cluster.heartbeat(0.1, "a", 1, epoch=500))[0] is Status.UNKNOWN_NODE
    # It should have joined, with its map. One that will not is taken as it is.
    actions = cluster.heartbeat(0.1, "a", 1, epoch=500)
    assert answer(actions)[1] == HeartbeatAck(501) and map_epoch(actions) == 501
    assert cluster.map_reply().epoch == 501
    assert map_epoch(cluster.heartbeat(0.2, "a", 1, epoch=EPOCH_MAX + 1)) is None
    assert cluster.epoch == 501


def test_the_long_gone_are_forgotten() -> None:
    cluster = attentive(1, 0.0, Timing(10_000.0, 2, 3))
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
    cluster = attentive(1, 0.0)
    status, message = answer(actions := cluster.join(0.0, bad))
    assert status is Status.BAD_REQUEST and isinstance(message, Error) and len(actions) == 1
    assert not cluster.nodes and cluster.epoch == 1


def test_the_largest_map_fits_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = attentive(1, 0.0)
    monkeypatch.setattr(cluster, "_remap", lambda actions, **about: None)  # 30 deals prove nothing here
    for number in range(WORKERS_MAX // 50 + 1):
        msg = join(f"{number:0128d}", 1, *[GIB] * 50)
        msg = msg._replace(workers=[info._replace(uds="u" * 108, host="h" * 255) for info in msg.workers])
        status, _ = answer(cluster.join(0.0, msg))
    assert status is Status.NO_SPACE and len(cluster.live_workers()) == WORKERS_MAX
    monkeypatch.undo()
    cluster._remap([], changed=True)
    cluster.check()
    assert encode(cluster.map_reply(), 1)
    # All shards are moving, and their epochs are noise.
    noise = array("Q", random.Random(1).randbytes(8 * SHARD_COUNT))
    everything = [(shard, shard % WORKERS_MAX) for shard in range(SHARD_COUNT)]
    assert encode(cluster.map_reply()._replace(previous=everything, since=pack_since(noise)), 1)


@pytest.mark.parametrize(
    "timing",
    [
        Timing(0), Timing(1, 5, 5), Timing(1, 0, 5), Timing(1, 3, 5, -1.0), Timing(restart_grace_s=-1.0),
        Timing(moves_at_once=0), Timing(rebuild_beats=-1.0),
    ],
)  # fmt: skip
def test_impossible_timing(timing: Timing) -> None:
    with pytest.raises(UsageError):
        attentive(1, 0.0, timing)


def test_status_for_people() -> None:
    cluster = attentive(0xAB, 0.0)
    cluster.join(0.0, join("a", 1, GIB, GIB))
    cluster.heartbeat(0.5, "a", 1, cluster.epoch, [WorkerLoad(5, 4, 3, 2)] * 3)
    status = json.loads(json.dumps(cluster.status(1.0)))
    assert status["cluster"] == "00000000000000ab" and status["shards_without_owner"] == 0
    (node,) = status["nodes"]
    assert (node["state"], node["silent_s"], node["map_epoch"]) == ("running", 0.5, cluster.epoch)
    assert node["workers"][1]["used_bytes"] == 5 and node["workers"][1]["shards"] == SHARD_COUNT // 2


# --- moving -----------------------------------------------------------------------------------


def test_a_newcomer_is_filled_by_steps_and_each_shard_names_who_had_it() -> None:
    cluster = attentive(1, 0.0, Timing(moves_at_once=1000))
    cluster.join(0.0, join("a", 1))
    epoch = cluster.epoch
    assert {cluster.since(shard) for shard in range(SHARD_COUNT)} == {epoch} and not moving(cluster)
    actions = cluster.join(0.0, join("b", 1))
    moved = moving(cluster)
    assert len(moved) == 1000 and set(moved.values()) == {(("a", 0), ("b", 0))}
    assert cluster.waiting == SHARD_COUNT // 2 - 1000
    assert {cluster.since(shard) for shard in moved} == {map_epoch(actions)} == {epoch + 1}
    shard_map = ShardMap(cluster.map_reply())
    assert set(shard_map.previous) == set(moved) and shard_map.since[next(iter(moved))] == epoch + 1
    some = list(moved)[:10]
    assert tell(cluster, 0.1, ("b", 0), some) == 10 and tell(cluster, 0.1, ("b", 0), some) == 0
    assert len(moving(cluster)) == 1000 and not moving(cluster).keys() & set(some), "ten came, so ten more may go"
    assert arrive(cluster) == 9 and cluster.waiting == 0
    assert cluster.shards_held() == {("a", 0): SHARD_COUNT // 2, ("b", 0): SHARD_COUNT // 2}
    assert cluster.moves == SHARD_COUNT + SHARD_COUNT // 2


def test_what_moved_says_counts_only_for_what_its_sender_got_by_its_map() -> None:
    cluster = attentive(1, 0.0, ALL)
    cluster.join(0.0, join("a", 1))
    cluster.join(0.0, join("b", 2))
    shards = list(moving(cluster))
    assert tell(cluster, 0.0, ("b", 0), shards, epoch=cluster.epoch - 1) == 0, "it got them later than that"
    assert tell(cluster, 0.0, ("a", 0), shards) == 0, "they are not a's"
    assert tell(cluster, 0.0, ("b", 7), shards) == 0, "there is no such worker"
    for instance, name in ((3, "b"), (2, "x")):
        status, _ = answer(cluster.moved(0.0, Moved(instance, cluster.epoch, name, 0, bitmap_of(shards))))
        assert status is Status.UNKNOWN_NODE
    for bad in (b"", bytes(BITMAP_BYTES + 1)):
        assert answer(cluster.moved(0.0, Moved(2, cluster.epoch, "b", 0, bad)))[0] is Status.BAD_REQUEST
    assert len(moving(cluster)) == len(shards)
    assert tell(cluster, 0.0, ("b", 0), range(SHARD_COUNT), epoch=1 << 63) == len(shards)


def test_drain_empties_a_node_by_steps_and_resume_fills_it() -> None:
    cluster = attentive(1, 0.0, Timing(moves_at_once=1000))
    for name in ("a", "b", "c"):
        cluster.join(0.0, join(name, 1))
        arrive(cluster)
        cluster.heartbeat(0.0, name, 1)
    held = cluster.shards_held()["c", 0]
    status, message = answer(actions := cluster.drain(0.5, "c", True))
    assert status is Status.OK and message == Done(held - 2000), "a thousand are on their way to each of the others"
    assert NodeChanged("c", NodeState.RUNNING, NodeState.DRAINING, "drain") in actions
    assert {previous for previous, _ in moving(cluster).values()} == {("c", 0)}

    def about(name: str) -> dict[str, Any]:
        return next(node for node in cluster.status(0.5)["nodes"] if node["name"] == name)

    assert about("c")["state"] == "draining" and about("c")["draining"] and not about("c")["drained"]
    assert about("c")["workers"][0]["moving_out"] == 2000 and about("a")["workers"][0]["moving_in"] == 1000
    assert cluster.status(0.5)["shards_waiting"] == held - 2000
    assert map_epoch(cluster.drain(0.5, "c", True)) is None, "said twice"
    steps = arrive(cluster)
    assert steps == 3 and about("c")["drained"] and cluster.shards_held()["c", 0] == 0
    cluster.heartbeat(0.6, "c", 1)
    assert states(cluster)["c"] == "draining" and not about("a")["drained"]
    # It stays so when it comes back as another process, and when we do.
    cluster = attentive_again(json.loads(json.dumps(cluster.to_state())), 0.0, cluster.timing)
    cluster.leave(0.7, "c", 1)
    cluster.join(0.7, join("c", 2))
    assert not moving(cluster) and cluster.heartbeat(0.8, "c", 2) and states(cluster)["c"] == "draining"
    for name in ("a", "b"):
        cluster.heartbeat(0.8, name, 1)
    assert answer(cluster.drain(0.9, "c", False)) == (Status.OK, Done(1000)) and states(cluster)["c"] == "running"
    arrive(cluster)
    assert abs(cluster.shards_held()["c", 0] - SHARD_COUNT / 3) < 1


def test_who_cannot_be_drained() -> None:
    cluster = attentive(1, 0.0)
    status, message = answer(cluster.drain(0.0, "a", True))
    assert status is Status.UNKNOWN_NODE and "none has joined" in message.text
    cluster.join(0.0, join("pod-0", 1))
    status, message = answer(cluster.drain(0.0, "pod-1", True))
    assert status is Status.UNKNOWN_NODE and "'pod-0'" in message.text
    status, message = answer(actions := cluster.drain(0.0, "pod-0", True))
    assert status is Status.UNAVAILABLE and "only" in message.text and "simm dataserver" in message.text
    assert len(actions) == 1 and not cluster.nodes["pod-0"].draining
    assert answer(cluster.drain(0.0, "pod-0", False)) == (Status.OK, Done(SHARD_COUNT))
    cluster.join(0.0, join("pod-1", 1))
    arrive(cluster)
    assert answer(cluster.drain(0.0, "pod-0", True))[0] is Status.OK
    assert answer(cluster.drain(0.0, "pod-1", True))[0] is Status.UNAVAILABLE
    # With the last one gone that is not drained, the other must do.
    cluster.leave(0.1, "pod-1", 1)
    assert set(owners(cluster)) == {("pod-0", 0)} and not moving(cluster)
    cluster.check()
    # One that is away can be marked for when it is back.
    assert answer(cluster.drain(0.2, "pod-1", True)) == (Status.OK, Done(0)) and states(cluster)["pod-1"] == "left"
    cluster.check()


def test_a_drained_node_needs_no_step_while_its_takers_are_not_heard() -> None:
    cluster = attentive(1, 0.0, ALL)
    cluster.join(0.0, join("a", 1))
    cluster.join(0.0, join("b", 1))
    arrive(cluster)
    run(cluster, 0.0, 3.0, lambda now: cluster.heartbeat(now, "a", 1))
    assert states(cluster)["b"] == "suspect"
    cluster.drain(3.0, "a", True)
    assert not moving(cluster) and cluster.waiting == SHARD_COUNT // 2
    cluster.heartbeat(3.1, "b", 1)
    assert len(moving(cluster)) == SHARD_COUNT // 2 and cluster.waiting == 0
    cluster.check()


@pytest.mark.parametrize("how", ["leave", "leave warm", "die", "cold", "warm", "fewer workers"])
def test_a_previous_owner_that_goes_is_forgotten(how: str) -> None:
    cluster = attentive(1, 0.0, ALL)
    cluster.join(0.0, join("a", 1, GIB, GIB))
    cluster.join(0.0, join("b", 1))
    mine = of(cluster, "b")
    since = cluster.since(min(mine))
    assert moving(cluster).keys() == mine
    now = 0.5
    if how.startswith("leave"):
        cluster.leave(now, "a", 1, warm=how == "leave warm")
    elif how == "die":
        run(cluster, 0.0, now := 6.0, lambda now: cluster.heartbeat(now, "b", 1))
    elif how == "fewer workers":
        cluster.join(now, join("a", 1, GIB))
        assert {previous for previous, _ in moving(cluster).values()} <= {("a", 0), ("b", 0)}
    else:
        cluster.link_lost(now, "a", 1)
        cluster.join(now, join("a", 2, GIB, GIB, warm=how == "warm"))
    still = {shard for shard, (previous, _) in moving(cluster).items() if shard in mine and previous == ("a", 1)}
    assert not still and mine <= of(cluster, "b") | set(moving(cluster))
    assert {cluster.since(shard) for shard in mine & of(cluster, "b")} >= {since}
    cluster.check()


def test_an_owner_that_goes_while_shards_move_in_takes_the_fall_back_with_it() -> None:
    cluster = attentive(1, 0.0, ALL)
    for name in ("a", "b"):
        cluster.join(0.0, join(name, 1))
        arrive(cluster)
    cluster.join(0.0, join("c", 1))
    before = moving(cluster)
    since = {shard: cluster.since(shard) for shard in before}
    cluster.leave(0.1, "c", 1)
    assert not moving(cluster)
    for shard, (previous, _) in before.items():
        assert cluster.owner(shard) == previous and cluster.since(shard) > since[shard]


def test_a_warm_leave_keeps_the_shards_for_its_return() -> None:
    cluster = attentive(1, 0.0, Timing(restart_grace_s=10.0, moves_at_once=SHARD_COUNT))
    for name in ("a", "b"):
        cluster.join(0.0, join(name, 1))
        arrive(cluster)
    mine, epoch = of(cluster, "a"), cluster.epoch
    since = {shard: cluster.since(shard) for shard in mine}
    status, message = answer(actions := cluster.leave(0.5, "a", 1, warm=True))
    assert (status, message) == (Status.OK, Done(1)) and map_epoch(actions) is None and cluster.epoch == epoch
    assert states(cluster)["a"] == "left" and of(cluster, "a") == mine
    assert answer(cluster.heartbeat(0.6, "a", 1))[0] is Status.UNKNOWN_NODE
    # A newcomer gets its share of what the others have; nothing of the one that is away.
    cluster.join(1.0, join("c", 1))
    assert of(cluster, "a") == mine
    cluster.leave(1.5, "c", 1)
    cluster.check()
    cluster = attentive_again(json.loads(json.dumps(cluster.to_state())), 2.0, cluster.timing)
    cluster.heartbeat(2.0, "b", 1)
    run(cluster, 2.0, 8.0, lambda now: cluster.heartbeat(now, "b", 1))
    assert map_epoch(cluster.join(8.0, join("a", 2, warm=True, epoch=epoch))) is not None
    assert of(cluster, "a") == mine and {shard: cluster.since(shard) for shard in mine} == since
    assert not moving(cluster)
    cluster.check()


def test_an_arena_that_never_heard_of_its_shards_is_not_warm() -> None:
    """Between the instance that we know and this one was another, cold, that ended while nobody could tell us."""
    cluster = attentive(1, 0.0, ALL)
    cluster.join(0.0, join("a", 1))
    mine, since = of(cluster, "a"), cluster.since(0)
    cluster.link_lost(0.1, "a", 1)
    cluster.join(0.2, join("a", 3, warm=True, epoch=since - 1))
    assert of(cluster, "a") == mine and {cluster.since(shard) for shard in mine} == {cluster.epoch}
    assert cluster.epoch > since
    cluster.check()


def test_a_warm_leaver_that_does_not_come_back_in_time_loses_its_shards() -> None:
    cluster = attentive(1, 0.0, Timing(restart_grace_s=10.0, moves_at_once=SHARD_COUNT))
    for name in ("a", "b"):
        cluster.join(0.0, join(name, 1))
        arrive(cluster)
    cluster.leave(0.0, "a", 1, warm=True)
    actions = run(cluster, 0.0, 9.75, lambda now: cluster.heartbeat(now, "b", 1))
    assert of(cluster, "a")
    actions = run(cluster, 9.75, 10.5, lambda now: cluster.heartbeat(now, "b", 1))
    assert map_epoch(actions) == cluster.epoch and set(owners(cluster)) == {("b", 0)} and not moving(cluster)
    assert [action.why for action in actions if isinstance(action, NodeChanged)] == ["is not back after 10.0 s"]
    # Late, but welcome: a share of b's, with b's values.
    cluster.join(11.0, join("a", 2, warm=True))
    assert len(moving(cluster)) == SHARD_COUNT // 2


def test_no_grace_for_warm_leavers() -> None:
    cluster = attentive(1, 0.0, Timing(restart_grace_s=0.0))
    cluster.join(0.0, join("a", 1))
    cluster.leave(0.0, "a", 1, warm=True)
    assert set(owners(cluster)) == {None}
    cluster.check()


@pytest.mark.parametrize("heard", ["leave warm", "nothing"])
def test_a_cold_replacement_begins_anew_where_a_warm_one_does_not(heard: str) -> None:
    for warm in (False, True):
        cluster = attentive(1, 0.0, ALL)
        cluster.join(0.0, join("a", 1))
        cluster.join(0.0, join("b", 1))
        mine = of(cluster, "b")
        settled, arriving = sorted(mine)[:100], sorted(mine)[100:]
        tell(cluster, 0.0, ("b", 0), settled)
        since = {shard: cluster.since(shard) for shard in mine}
        if heard == "leave warm":
            cluster.leave(0.1, "b", 1, warm=True)
            assert moving(cluster).keys() == set(arriving), "they wait for it, and a for them"
        else:
            cluster.link_lost(0.1, "b", 1)
        cluster.join(0.2, join("b", 2, warm=warm, epoch=cluster.epoch))
        assert of(cluster, "b") == mine and not moving(cluster), "what b accepted may be newer than what a has"
        for shard in mine:
            assert (cluster.since(shard) == since[shard]) is warm
            assert cluster.since(shard) in (since[shard], cluster.epoch)
        cluster.check()


def test_progress_and_the_time_it_will_take() -> None:
    cluster = attentive(1, 0.0, ALL)
    cluster.join(0.0, join("a", 1))
    cluster.heartbeat(0.0, "a", 1, cluster.epoch, [WorkerLoad(1000 * SHARD_COUNT, 5, 0, 0)])
    cluster.join(0.0, join("b", 1))
    half = SHARD_COUNT // 2
    cluster.heartbeat(0.1, "b", 1, cluster.epoch, [WorkerLoad(0, 0, 0, 0, half, 500 * half, 100 * half)])
    status = json.loads(json.dumps(cluster.status(0.2)))
    worker = status["nodes"][1]["workers"][0]
    assert (worker["moving_in"], worker["moved_bytes"], worker["eta_s"]) == (half, 500 * half, 5.0)
    assert (status["shards_moving"], status["moved_bytes"], status["eta_s"]) == (half, 500 * half, 5.0)
    arrive(cluster)
    status = cluster.status(0.3)
    assert status["nodes"][1]["workers"][0]["eta_s"] is None and status["eta_s"] is None


# --- the state is lost --------------------------------------------------------------------------


def veterans(now: float = 0.0) -> tuple[Cluster, MapReply, MapReply]:
    """A cluster with a history, and two maps of it: an older one, and the newest."""
    cluster = attentive(77, now, ALL)
    for name in ("a", "b", "c"):
        cluster.join(now, join(name, 1))
        arrive(cluster)
    older = cluster.map_reply()
    cluster.join(now, join("d", 1))
    return cluster, older, cluster.map_reply()


def rejoin(cluster: Cluster, now: float, name: str, epoch: int, instance: int = 1, warm: bool = False) -> Joined:
    status, message = answer(cluster.join(now, join(name, instance, epoch=epoch, warm=warm)))
    assert status is Status.OK and isinstance(message, Joined)
    cluster.check()
    return message


def test_the_newest_map_of_the_servers_is_adopted() -> None:
    old, older, newest = veterans()
    cluster = attentive(5, 0.0, ALL)
    assert rejoin(cluster, 0.0, "a", older.epoch).wants_map == 1
    assert cluster.rebuilding and set(owners(cluster)) == {None}
    assert answer(actions := cluster.offer(0.1, offer(older))) == (Status.OK, Done(1))
    assert map_epoch(actions) is None, "nobody is told before it is over"
    assert rejoin(cluster, 0.2, "b", older.epoch).wants_map == 0
    assert rejoin(cluster, 0.3, "c", newest.epoch).wants_map == 1
    assert answer(cluster.heartbeat(0.4, "c", 1, newest.epoch))[0] is Status.OK
    assert answer(cluster.offer(0.4, offer(newest))) == (Status.OK, Done(1))
    assert answer(cluster.offer(0.5, offer(older))) == (Status.OK, Done(0)), "older than what we have"
    assert answer(cluster.drain(0.5, "a", True))[0] is Status.BUSY
    assert tell(cluster, 0.5, ("d", 0), range(SHARD_COUNT)) == 0, "it will say it again"
    assert rejoin(cluster, 0.6, "e", 0).wants_map == 0, "a new one has nothing to tell, and waits with the others"
    assert cluster.shards_held()["e", 0] == 0
    actions = run(cluster, 0.6, 2.1)
    assert not cluster.rebuilding and map_epoch(actions) == cluster.epoch > newest.epoch + EPOCHS_RESERVED
    assert cluster.cluster == 77 and states(cluster) == dict.fromkeys("abcde", "joining")
    # Everybody has what the map said, since when it said; except for what the new one gets of it.
    for shard in range(SHARD_COUNT):
        if cluster.owner(shard) != ("e", 0):
            assert cluster.owner(shard) == old.owner(shard) and cluster.since(shard) == old.since(shard)
            assert cluster.previous(shard) == old.previous(shard)
        else:
            assert cluster.previous(shard) == old.owner(shard) and cluster.since(shard) == cluster.epoch
    assert cluster.shards_held()["e", 0] > 1000
    cluster.check()
    # d never came: it has the time of any other, and its moving shards are dealt without values then.
    run(cluster, 2.1, 8.0, lambda now: [cluster.heartbeat(now, name, 1, cluster.epoch) for name in "abce"])
    assert states(cluster)["d"] == "dead" and ("d", 0) not in set(owners(cluster))
    cluster.check()


def test_who_was_replaced_while_the_state_was_lost_begins_anew() -> None:
    old, _, newest = veterans()
    for warm in (False, True):
        cluster = attentive(5, 0.0, ALL)
        rejoin(cluster, 0.0, "a", newest.epoch)
        rejoin(cluster, 0.1, "d", newest.epoch if warm else 0, instance=2, warm=warm)
        assert answer(cluster.offer(0.2, offer(newest))) == (Status.OK, Done(1))
        run(cluster, 0.2, 2.3)
        mine = [shard for shard in range(SHARD_COUNT) if old.owner(shard) == ("d", 0)]
        assert not moving(cluster).keys() & set(mine)
        for shard in mine:
            assert cluster.owner(shard) == ("d", 0) and (cluster.since(shard) == old.since(shard)) is warm
        cluster.check()


def test_a_client_with_a_map_makes_a_manager_without_state_listen() -> None:
    cluster = attentive(5, 0.0)
    cluster.noticed(0.0, 0)
    assert not cluster.rebuilding
    cluster.noticed(0.0, 40)
    assert cluster.rebuilding
    assert run(cluster, 0.0, 2.0) == [] and not cluster.rebuilding, "nobody came"
    assert rejoin(cluster, 2.0, "a", 50).wants_map == 1
    run(cluster, 2.0, 4.0)
    # It was asked and did not tell: dealt anew, in epochs that nobody has seen.
    assert set(owners(cluster)) == {("a", 0)} and cluster.since(0) == cluster.epoch == 51
    cluster.check()


def test_half_a_rebuild_is_not_stored() -> None:
    _, _, newest = veterans()
    cluster = attentive(5, 0.0)
    rejoin(cluster, 0.0, "a", newest.epoch)
    cluster.offer(0.0, offer(newest))
    again = attentive_again(json.loads(json.dumps(cluster.to_state())), 0.0, epoch=cluster.epoch + 5)
    assert not again.nodes and rejoin(again, 0.0, "a", newest.epoch).wants_map == 1
    again.offer(0.1, offer(newest))
    run(again, 0.1, 2.2)
    assert len(again.nodes) == 4 and again.epoch > newest.epoch


@pytest.mark.parametrize("lost", ["in the window", "by an old file"])
def test_shards_with_a_history_that_we_do_not_know_begin_anew(lost: str) -> None:
    old, older, newest = veterans()
    now = 2.5
    if lost == "in the window":
        # d was cut off while we listened, and has the newest map.
        cluster = attentive(5, 0.0, ALL)
        for name in "abc":
            rejoin(cluster, 0.0, name, older.epoch)
            cluster.offer(0.0, offer(older))
        run(cluster, 0.0, now)
        assert rejoin(cluster, now, "d", newest.epoch).wants_map == 1
    else:
        saved = attentive(77, 0.0, ALL)
        for name in "abc":
            saved.join(0.0, join(name, 1))
            arrive(saved)
        assert saved.map_reply().since == older.since
        state = json.loads(json.dumps(saved.to_state()))
        cluster = attentive_again(state, 0.0, ALL, epoch=older.epoch + EPOCHS_RESERVED)
        for name in "abc":
            cluster.heartbeat(now, name, 1, older.epoch)
        # It is not in the file at all; and a heartbeat of one that is, with the newest map, sends it to join.
        assert answer(cluster.heartbeat(now, "c", 1, newest.epoch))[0] is Status.UNKNOWN_NODE
        assert rejoin(cluster, now, "c", newest.epoch).wants_map == 1
        rejoin(cluster, now, "d", newest.epoch)
    before = owners(cluster)
    epoch = cluster.epoch
    foreign = [shard for shard in range(SHARD_COUNT) if old.owner(shard) == ("d", 0)]
    assert answer(cluster.offer(now, offer(newest))) == (Status.OK, Done(1))
    assert cluster.epoch > epoch and owners(cluster) == before
    assert {cluster.since(shard) for shard in foreign} == {cluster.epoch}
    assert not moving(cluster).keys() & set(foreign)
    assert all(cluster.since(shard) == old.since(shard) for shard, key in enumerate(before) if key == old.owner(shard)
               and shard not in foreign)  # fmt: skip
    assert answer(cluster.offer(now, offer(newest))) == (Status.OK, Done(0)), "said twice"
    cluster.check()


def test_offers_that_cannot_be() -> None:
    _, older, newest = veterans()
    cluster = attentive(5, 0.0)
    assert answer(cluster.offer(0.0, offer(newest))) == (Status.OK, Done(0)), "nobody asked"
    rejoin(cluster, 0.0, "a", newest.epoch)
    good = offer(newest)
    zero, late = array("Q", bytes(8 * SHARD_COUNT)), array("Q", [newest.epoch + 1]) * SHARD_COUNT
    for bad in (
        good._replace(owners=b""), good._replace(since=b"x"), good._replace(since=pack_since(zero)),
        good._replace(since=pack_since(late)), good._replace(epoch=0), good._replace(epoch=EPOCH_MAX + 1),
        good._replace(workers=good.workers[:1]), good._replace(previous=[(0, 99)]),
        good._replace(workers=[good.workers[0]] * 4), good._replace(workers=[
            info._replace(node="a", worker=at, instance=at) for at, info in enumerate(good.workers)]),
        good._replace(workers=[info._replace(node="") for info in good.workers]),
    ):  # fmt: skip
        status, message = answer(actions := cluster.offer(0.1, bad))
        assert status is Status.BAD_REQUEST and isinstance(message, Error) and len(actions) == 1
    assert states(cluster) == {"a": "joining"} and cluster.cluster == 5
    assert answer(cluster.offer(0.1, offer(older)))[1] == Done(1)


def test_another_clusters_map_teaches_nothing_but_its_epoch() -> None:
    _, _, newest = veterans()
    cluster = attentive(5, 0.0)
    cluster.join(0.0, join("x", 1))
    since = cluster.since(0)
    assert rejoin(cluster, 0.1, "a", newest.epoch).wants_map == 1
    assert cluster.epoch > newest.epoch
    assert answer(cluster.offer(0.1, offer(newest))) == (Status.OK, Done(0))
    assert since in {cluster.since(shard) for shard in range(SHARD_COUNT)}


# --- the naive twin ---------------------------------------------------------------------------


class Twin:
    """Membership from the plainest reading of the rules: remember the last sign of life, decide when asked."""

    def __init__(self, timing: Timing) -> None:
        self.timing = timing
        self.heard: dict[str, float] = {}
        self.instance: dict[str, int] = {}
        self.capacities: dict[str, tuple[int, ...]] = {}
        self.gone: set[str] = set()  # left or dead: must join again
        self.left: dict[str, float] = {}  # until when its shards wait for it
        self.unlinked: set[str] = set()
        self.draining: set[str] = set()

    def quiet(self, name: str, now: float) -> float:
        return (now - self.heard[name]) / self.timing.heartbeat_s

    def join(self, now: float, name: str, instance: int, capacities: tuple[int, ...]) -> Status:
        known = self.instance.get(name)
        lives = known is not None and name not in self.gone and name not in self.unlinked
        if lives and known != instance and self.quiet(name, now) < self.timing.suspect_after:
            return Status.NAME_TAKEN
        self.instance[name], self.heard[name], self.capacities[name] = instance, now, capacities
        self.gone.discard(name)
        self.left.pop(name, None)
        self.unlinked.discard(name)
        return Status.OK

    def member(self, name: str, instance: int) -> bool:
        return self.instance.get(name) == instance and name not in self.gone

    def leave(self, now: float, name: str, warm: bool) -> None:
        self.gone.add(name)
        self.left[name] = now + (self.timing.restart_grace_s if warm else 0)

    def drain(self, name: str, on: bool) -> Status:
        others = set(self.instance) - self.gone - self.draining - {name}
        if name not in self.instance:
            return Status.UNKNOWN_NODE
        if on and not others and name not in self.gone and name not in self.draining:
            return Status.UNAVAILABLE
        self.draining.symmetric_difference_update({name} if (name in self.draining) != on else set())
        return Status.OK

    def tick(self, now: float) -> None:
        for name in self.heard:
            if self.quiet(name, now) >= self.timing.dead_after:
                self.gone.add(name)

    def in_map(self, name: str, now: float) -> bool:
        if name in self.left:
            return now < self.left[name]
        grace = self.timing.dead_after + self.timing.grace_s / self.timing.heartbeat_s
        return name not in self.gone or self.quiet(name, now) < grace

    def live(self, now: float) -> dict[tuple[str, int], int]:
        return {
            (name, number): capacity
            for name, capacities in self.capacities.items()
            if self.in_map(name, now)
            for number, capacity in enumerate(capacities)
        }

    def serving(self) -> set[str]:
        return set(self.instance) - self.gone


class Picture:
    """A map as its readers see it. Workers go by numbers that hold for all pictures of one ``codes``; 0 is nobody."""

    def __init__(self, cluster: Cluster, codes: dict[tuple[str, int], int]) -> None:
        shard_map = ShardMap(cluster.map_reply())
        self.epoch = shard_map.epoch
        self.codes = codes
        keys = [(info.node, info.worker) for info in shard_map.workers]
        numbers = [codes.setdefault(key, len(codes) + 1) for key in keys]
        table = np.zeros(NO_OWNER + 1, np.int64)
        table[: len(numbers)] = numbers
        self.owners = table[np.array(shard_map.owners)]
        self.previous = np.zeros(SHARD_COUNT, np.int64)
        for shard, at in shard_map.previous.items():
            self.previous[shard] = numbers[at]
        self.since = np.array(shard_map.since)
        self.members = set(keys)
        #: Not of the map: how many shards wait, and up to which map each worker has heard.
        self.waiting = cluster.waiting
        self.heard = np.zeros(len(codes) + 1, np.int64)
        for (name, _), number in codes.items():
            if name in cluster.nodes:
                self.heard[number] = cluster.nodes[name].map_epoch

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Picture)
        tables = zip((self.owners, self.previous, self.since), (other.owners, other.previous, other.since))
        return self.members == other.members and all(bool((mine == theirs).all()) for mine, theirs in tables)

    def code(self, name: str, number: int) -> int:
        return self.codes.get((name, number), -1)


def check_step(before: Picture, after: Picture, serving: set[str], limit: int, free: Iterable[int] = ()) -> None:
    """What must hold of two maps, one event apart, whatever the event.

    ``free``: shards whose move has ended with the event, so that they may go on with the next.
    """
    assert after.epoch >= before.epoch
    if after.epoch == before.epoch:
        assert after == before, "one epoch, two maps"
        return
    codes = after.codes
    lives = np.array([False, *(name in serving for name, _ in codes)])
    listed = np.array([False, *(key in after.members for key in codes)])
    changed = after.owners != before.owners
    assert (after.since[changed] > before.since[changed]).all() and (after.since >= before.since).all()
    assert (after.since[changed] == after.epoch).all(), "one event makes one map"
    assert (after.since <= after.epoch).all()
    moving = after.previous != 0
    assert (after.previous[moving] != after.owners[moving]).all()
    assert lives[after.previous[moving]].all(), "a previous owner serves"
    assert listed[after.owners[after.owners != 0]].all()
    if serving:
        assert (after.owners == 0).sum() <= after.waiting, "nobody's only while nobody has heard whose it was"
    given, taken = changed & (after.owners != 0), changed & moving
    assert (after.heard[after.owners[given]] >= before.since[given]).all(), "who missed a map might show old values"
    assert (after.heard[after.previous[taken]] >= before.since[taken]).all(), "and so might a previous owner"
    # A shard on its way stays there while its owner is in the map, and its previous owner serves.
    was_moving = (lives & listed)[before.previous]
    was_moving[list(free)] = False
    there = listed[before.owners]
    assert not (changed & was_moving & there).any()
    assert ((after.previous == before.previous) | (after.previous == 0) | changed)[was_moving].all()
    # Taken from one who is in the map: it is named. Taken from one who is gone: nobody is.
    assert (after.previous[changed & there] == before.owners[changed & there]).all()
    assert (after.previous[changed & ~there] == 0).all()
    into = np.bincount(after.owners[moving], minlength=len(codes) + 1)
    already = np.bincount(after.owners[(before.previous != 0) & ~changed], minlength=len(codes) + 1)
    assert (into <= np.maximum(limit, already)).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_storm_against_the_twin(seed: int) -> None:
    rng = random.Random(seed)
    # Binary fractions only, so that both sides' sums of time are exact.
    timing = Timing(
        1.0, 3, 5, rng.choice([0.0, 4.0]), rng.choice([0.0, 2.0, 6.0]), rng.choice([500, 2048, SHARD_COUNT])
    )
    cluster, twin = Cluster(seed, 0.0, timing), Twin(timing)
    names = [f"n{number}" for number in range(5)]
    silent: set[str] = set()
    instances: dict[str, int] = {}
    now, epochs = 0.0, 0
    codes: dict[tuple[str, int], int] = {}
    before = Picture(cluster, codes)
    seen = set()
    for _ in range(220):
        now += rng.choice([0.0, 0.25, 0.5, 0.5])
        name = rng.choice(names)
        event = rng.choice([
            "join", "new", "leave", "silence", "wake", "unlink", "restart", "beat", "beat", "moved", "moved", "moved",
            "drain", "resume", "nothing",
        ])  # fmt: skip
        known = instances.get(name)
        cold = ""
        free: list[int] = []
        if event in ("join", "new"):
            instance = rng.getrandbits(64) if event == "new" or known is None else known
            capacities = tuple(rng.choice([GIB, GIB, 3 * GIB]) for _ in range(rng.choice([1, 1, 2])))
            warm = rng.random() < 0.5
            expected = twin.join(now, name, instance, capacities)
            msg = join(
                name, instance, *capacities, warm=warm, epoch=rng.choice([0, before.epoch]) if cluster.nodes else 0
            )
            assert answer(cluster.join(now, msg))[0] is expected
            if expected is Status.OK:
                instances[name] = instance
                if known not in (None, instance):
                    cold = "" if warm and msg.epoch else name
                    numbers = [code for (node, _), code in codes.items() if node == name]
                    free = np.flatnonzero(np.isin(before.owners, numbers) | np.isin(before.previous, numbers)).tolist()
        elif event == "leave" and known is not None:
            member, warm = twin.member(name, known), rng.random() < 0.5
            status = answer(cluster.leave(now, name, known, warm))[0]
            assert status is (Status.OK if member else Status.UNKNOWN_NODE)
            if member:
                twin.leave(now, name, warm)
        elif event == "silence":
            silent.add(name)
        elif event == "wake":
            silent.discard(name)
        elif event == "unlink" and known is not None:
            cluster.link_lost(now, name, known)
            if twin.member(name, known):
                twin.unlinked.add(name)
        elif event in ("drain", "resume"):
            on = event == "drain" and rng.random() < 0.7
            status, message = answer(cluster.drain(now, name, on))
            assert status is twin.drain(name, on)
            if status is Status.OK:
                held = cluster.shards_held()
                assert message == Done(sum(count for (node, _), count in held.items() if node == name))
        elif event == "moved" and known is not None:
            number, epoch = rng.choice([0, 0, 1]), rng.choice([before.epoch, before.epoch, before.epoch - 3])
            mine = np.flatnonzero(before.owners == before.code(name, number)).tolist()
            shards = mine if rng.random() < 0.6 else rng.sample(range(SHARD_COUNT), 3000)
            msg_moved = Moved(known, max(epoch, 0), name, number, bitmap_of(shards))
            status, message = answer(cluster.moved(now, msg_moved))
            if twin.member(name, known):
                code = before.code(name, number)
                known_to_it = (before.owners == code) & (before.previous != 0) & (before.since <= max(epoch, 0))
                arrived = free = [shard for shard in shards if known_to_it[shard]]
                assert (status, message) == (Status.OK, Done(len(arrived)))
                # It may have had to move on at once.
                assert all(cluster.previous(shard) in (None, (name, number)) for shard in arrived)
                if arrived:
                    seen.add("arrived")
            else:
                assert status is Status.UNKNOWN_NODE
        elif event == "beat":
            for name in names:
                if name in instances and name not in silent:
                    member = twin.member(name, instances[name])
                    late = rng.choice([0, 0, 0, 1, 3])  # maps behind
                    status = answer(cluster.heartbeat(now, name, instances[name], max(0, before.epoch - late)))[0]
                    assert status is (Status.OK if member else Status.UNKNOWN_NODE)
                    if member:
                        twin.heard[name] = now
                        twin.unlinked.discard(name)
                    cluster.check()
                    after = Picture(cluster, codes)
                    check_step(before, after, twin.serving(), timing.moves_at_once)
                    before = after
        after = Picture(cluster, codes)
        check_step(before, after, twin.serving(), timing.moves_at_once, free)
        cluster.check()
        if cold:
            mine = np.isin(after.owners, [code for (node, _), code in codes.items() if node == cold])
            assert (after.since[mine] == after.epoch).all(), "nothing of an older arena is taken for good"
            moved_in = mine & (after.previous != 0)
            assert (after.previous[moved_in] == before.owners[moved_in]).all()
        before = after
        cluster.tick(now)
        twin.tick(now)
        after = Picture(cluster, codes)
        check_step(before, after, twin.serving(), timing.moves_at_once)
        cluster.check()

        live = twin.live(now)
        assert {(info.node, info.worker): info.capacity for info in cluster.live_workers()} == live
        assert {name for name, state in states(cluster).items() if state in ("dead", "left")} == twin.gone
        assert {name for name, node in cluster.nodes.items() if node.draining} == twin.draining
        assert after.members == set(live)
        seen |= set(states(cluster).values()) | ({"moving"} if (after.previous != 0).any() else set())
        epochs += after.epoch != before.epoch
        before = after
        state = json.loads(json.dumps(cluster.to_state()))
        again = Cluster.from_state(state, now, timing)
        assert again.map_reply() == cluster.map_reply() and again.to_state()["since"] == state["since"]
        if event == "restart":
            cluster = again
            for name in twin.heard:  # everyone is given the time of a fresh one, or the whole grace
                if twin.in_map(name, now):
                    twin.heard[name] = now - (timing.dead_after if name in twin.gone else 0)
                    if name in twin.left:
                        twin.left[name] = now + timing.restart_grace_s
            twin.unlinked.clear()
    assert seen >= {"running", "suspect", "dead", "draining", "left", "moving", "arrived"}


def test_control_a_deal_that_forgets_previous_owners_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """If settling kept previous owners that do not serve, or moved shards on the move, the storm would say so."""
    monkeypatch.setattr(Node, "serving", property(lambda node: not node.released))
    with pytest.raises((AssertionError, CorruptionError)):
        test_storm_against_the_twin(0)


def test_control_a_deal_to_those_who_missed_a_map_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = deal_module.deal
    monkeypatch.setattr(
        placement, "deal", lambda tables, weights, standing, limit, heard: real(tables, weights, standing, limit)
    )
    with pytest.raises(AssertionError, match=r"old values|so might a previous owner"):
        for seed in SEEDS:
            test_storm_against_the_twin(seed)


# --- stored state -----------------------------------------------------------------------------


def stored() -> dict[str, Any]:
    """Three nodes and one that left; a moves in, c is being emptied."""
    cluster = attentive(5, 0.0)
    for name in ("a", "b", "c"):
        cluster.join(0.0, join(name, 1, GIB, GIB))
        arrive(cluster)
    cluster.leave(0.0, "b", 1)
    cluster.drain(0.0, "c", True)
    assert moving(cluster)
    state: dict[str, Any] = json.loads(json.dumps(cluster.to_state()))
    return state


def test_state_round_trip() -> None:
    state = stored()
    cluster = attentive_again(copy.deepcopy(state), 100.0)
    assert states(cluster) == {"a": "joining", "b": "left", "c": "joining"}
    assert answer(cluster.heartbeat(100.0, "a", 1, cluster.epoch)) == (Status.OK, HeartbeatAck(cluster.epoch))
    assert answer(cluster.heartbeat(100.0, "d", 1))[0] is Status.UNKNOWN_NODE
    assert answer(cluster.join(100.0, join("a", 9)))[0] is Status.NAME_TAKEN
    cluster = attentive_again(copy.deepcopy(state), 0.0)
    run(cluster, 0.0, 6.0)
    assert set(states(cluster).values()) == {"dead", "left"} and set(owners(cluster)) == {None}


def test_a_state_of_format_1_still_loads() -> None:
    state = stored()
    del state["since"], state["previous"]
    state["format"] = 1
    for node in state["nodes"]:
        del node["draining"]
    state["nodes"][0]["state"] = "up"
    cluster = attentive_again(state, 0.0, epoch=state["epoch"] + 7)
    assert states(cluster) == {"a": "joining", "b": "left", "c": "joining"} and cluster.epoch == state["epoch"] + 7
    assert not moving(cluster) and {cluster.since(shard) for shard in range(SHARD_COUNT)} == {state["epoch"]}
    cluster.check()
    assert cluster.to_state()["format"] == 2


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
        change("format", 3), change("format", True), change("format", ...),
        change("cluster", -1), change("cluster", "x"), change("epoch", 0),
        change("epoch", 1.5), change("epoch", True), change("nodes", None), change("nodes", {}),
        change("nodes.0.name", ""), change("nodes.0.name", "c"), change("nodes.0.name", 5),
        change("nodes.0.instance", 1 << 64),
        change("nodes.0.state", "asleep"), change("nodes.0.state", "up"), change("nodes.0.released", True),
        change("nodes.0.draining", ...),
        change("nodes.0.workers", []), change("nodes.0.workers.0", [1, 2]), change("nodes.0.workers.0.4", 0),
        change("nodes.0.workers.0.5", "c"), change("nodes.0.workers.0.3", 2), change("nodes.0.workers.0.6", 5),
        change("keys", []), change("keys.0", ["x", 0]), change("keys.0.1", -1),
        change("keys.1", ["a", 0]), change("owners", "AAAA"), change("owners", "?"), change("owners", ...),
        change("owners", "//8A" * (SHARD_COUNT * 2 // 3) + "AAA="), change("homes", None),
        change("homes", "/38A" * (SHARD_COUNT * 2 // 3) + "AAA="), change("previous", ...), change("since", ...),
        change("previous", "AAAA" * (SHARD_COUNT * 2 // 3) + "AAA="), change("since", "AAAA"), change("since", ""),
        change("since", base64.b64encode(pack_since(array("Q", [99]) * SHARD_COUNT)).decode()),
        lambda state: state["nodes"].pop(),
    ],
)  # fmt: skip
def test_a_damaged_state_is_refused(damage: Callable[[dict[str, Any]], None]) -> None:
    state = stored()
    damage(state)
    with pytest.raises(CorruptionError):
        attentive_again(state, 0.0)


@pytest.mark.parametrize("state", [None, [], "x", {}])
def test_what_is_no_state_is_refused(state: Any) -> None:
    with pytest.raises(CorruptionError):
        attentive_again(state, 0.0)


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
            attentive_again(state, 0.0).check()
        except CorruptionError:
            pass


def test_check_finds_what_does_not_belong() -> None:
    def owner(cluster: Cluster) -> None:
        cluster._placement.tables.owners[5] = NO_OWNER

    def unbalanced(cluster: Cluster) -> None:
        tables = cluster._placement.tables
        tables.owners[:] = tables.homes[:] = 0
        tables.previous[:] = NO_OWNER

    def home(cluster: Cluster) -> None:
        cluster._placement.tables.homes[5] = 2

    def lost_home(cluster: Cluster) -> None:
        cluster._placement.tables.homes[5] = NO_OWNER

    def beyond(cluster: Cluster) -> None:
        cluster._placement.tables.owners[5] = 99

    def to_come(cluster: Cluster) -> None:
        cluster._placement.tables.since[5] = cluster.epoch + 1

    def itself(cluster: Cluster) -> None:
        tables = cluster._placement.tables
        tables.previous[5] = tables.owners[5]

    def twice(cluster: Cluster) -> None:
        cluster._placement.keys[1] = cluster._placement.keys[0]

    def other(cluster: Cluster) -> None:
        cluster.nodes["a"].instance += 1

    def absent(cluster: Cluster) -> None:
        cluster.nodes["a"].state = NodeState.DEAD

    def forgotten(cluster: Cluster) -> None:
        cluster._placement.waiting += 1

    def lives(cluster: Cluster) -> None:
        cluster.nodes["a"].released = True

    def wish(cluster: Cluster) -> None:
        cluster.nodes["a"].state = NodeState.DRAINING

    for damage in (
        owner, unbalanced, home, lost_home, beyond, to_come, itself, twice, other, absent, forgotten, lives, wish,
    ):  # fmt: skip
        cluster = attentive(1, 0.0)
        cluster.join(0.0, join("a", 1))
        cluster.join(0.0, join("b", 1))
        cluster.check()
        damage(cluster)
        with pytest.raises(CorruptionError):
            cluster.check()

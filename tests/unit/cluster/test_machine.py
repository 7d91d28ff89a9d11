"""The manager's state machine, event by event: the life of a node, whose shards they are, moving."""

from __future__ import annotations

import json
import random
from array import array
from typing import Any

import pytest

from simm.cluster.absence import FORGET_S
from simm.cluster.nodes import NODE_WORKERS_MAX, WORKERS_MAX, Answer, NodeChanged, NodeState, Timing
from simm.cluster.shard_map import ShardMap, pack_since
from simm.constants import SHARD_COUNT
from simm.errors import UsageError
from simm.rpc import encode
from simm.wire.messages import (
    Done,
    Error,
    HeartbeatAck,
    Join,
    Joined,
    Moved,
    Status,
    WorkerLoad,
)
from simm.wire.shard_set import BITMAP_BYTES, EPOCHS_AHEAD, bitmap_of
from tests.support.machine import (
    ALL,
    GIB,
    answer,
    arrive,
    attentive,
    attentive_again,
    join,
    map_epoch,
    moving,
    of,
    owners,
    run,
    states,
    tell,
)
from tests.support.shards import shards_held

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
    assert status == Status.OK and message == Joined(2, 1000) and map_epoch(actions) == 2
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
    assert shards_held(cluster) == {("a", 0): SHARD_COUNT // 4, ("a", 1): SHARD_COUNT // 4 * 3}


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
        actions = (cluster.heartbeat(now, "a", 1) if now <= 1 else []) + cluster.maintain(now)
        seen += [
            (now, action.after.value, map_epoch(actions) is not None)
            for action in actions
            if isinstance(action, NodeChanged) and action.name == "a"
        ]
    assert seen == [(0.25, "running", False), (4.0, "suspect", False), (6.0, "dead", True)]
    assert set(owners(cluster)) == {("b", 0)}
    status, message = answer(cluster.heartbeat(now, "a", 1))
    assert status == Status.UNKNOWN_NODE and "join again" in message.text
    assert answer(cluster.leave(now, "a", 1))[0] == Status.UNKNOWN_NODE
    assert answer(cluster.join(now, join("a", 1)))[0] == Status.OK
    assert shards_held(cluster)["a", 0] == SHARD_COUNT // 2
    assert set(moving(cluster).values()) == {(("b", 0), ("a", 0))}, "what b has got meanwhile comes along"
    assert answer(cluster.heartbeat(now, "a", 1)) == (Status.OK, HeartbeatAck(cluster.epoch))
    assert states(cluster) == {"a": "running", "b": "running"}
    cluster.check()


def test_a_hiccup_moves_nothing() -> None:
    cluster = attentive(1, 0.0)
    cluster.join(0.0, join("a", 1))
    for quarter in range(1, 17):
        cluster.maintain(quarter / 4)
    assert states(cluster) == {"a": "suspect"}
    actions = cluster.heartbeat(4.1, "a", 1)
    assert NodeChanged("a", NodeState.SUSPECT, NodeState.RUNNING, "heartbeat") in actions and map_epoch(actions) is None


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
    assert status == Status.NAME_TAKEN and "--name" in message.text and "try again in 2.0 s" in message.text
    assert cluster.nodes["a"].instance == 1
    status, message = answer(cluster.join(1.75, join("a", 2)))
    assert status == Status.BUSY and "its name is free in 1.2 s" in message.text, "it may be dead"


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
    assert answer(cluster.heartbeat(now, "a", 1))[0] == Status.UNKNOWN_NODE
    assert answer(cluster.join(now, join("a", 1)))[0] == Status.NAME_TAKEN
    cluster.check()


def test_a_heartbeat_renews_a_lost_link() -> None:
    cluster = attentive(1, 0.0)
    cluster.join(0.0, join("a", 1))
    cluster.link_lost(0.1, "a", 1)
    cluster.heartbeat(0.2, "a", 1)
    assert answer(cluster.join(0.3, join("a", 2)))[0] == Status.NAME_TAKEN
    cluster.link_lost(0.3, "a", 99)  # of another instance: nothing to us
    assert answer(cluster.join(0.3, join("a", 2)))[0] == Status.NAME_TAKEN


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
    assert cluster.maintain(10_000.0) == []
    assert cluster.heartbeat(10_000.1, "a", 1)[0] == Answer(HeartbeatAck(cluster.epoch))
    # Nor does a clock that goes back, or stands.
    for now in (5.0, 5.0, 0.0, -1e9):
        assert cluster.maintain(now) == []
    assert states(cluster) == {"a": "running"}
    # But silence while it listens counts, from whatever time.
    run(cluster, -1e9, -1e9 + 6)
    assert states(cluster) == {"a": "dead"}


def test_a_server_with_a_newer_epoch_is_asked_for_its_map_and_raises_ours() -> None:
    cluster = attentive(1, 0.0)
    cluster.join(0.0, join("a", 1))
    assert answer(cluster.heartbeat(0.1, "a", 1, epoch=500))[0] == Status.UNKNOWN_NODE
    # It should have joined, with its map. One that will not is taken as it is.
    actions = cluster.heartbeat(0.1, "a", 1, epoch=500)
    ours = cluster.epoch
    assert 500 + EPOCHS_AHEAD // 8 < ours <= 500 + EPOCHS_AHEAD // 4, "clients may have later maps than that server"
    assert answer(actions)[1] == HeartbeatAck(ours) and map_epoch(actions) == ours == cluster.map_reply().epoch
    assert map_epoch(cluster.heartbeat(0.2, "a", 1, epoch=ours + EPOCHS_AHEAD + 1)) is None
    assert cluster.epoch == ours and cluster.nodes["a"].acked_epoch == ours - 1, "no map that it could hold"
    assert answer(cluster.join(0.3, join("a", 1, epoch=ours + EPOCHS_AHEAD + 1)))[0] == Status.OTHER_CLUSTER
    assert cluster.note_epoch(0.3, ours + EPOCHS_AHEAD + 1, server=True) == cluster.note_epoch(0.3, ours + 400) == []
    raised = map_epoch(cluster.note_epoch(0.3, ours + 400, server=True))
    assert raised is not None and EPOCHS_AHEAD // 8 < raised - (ours + 400) <= EPOCHS_AHEAD // 4


def test_a_server_is_believed_after_millions_of_false_epochs() -> None:
    cluster = attentive(1, 0.0)
    cluster.epoch = 1 << 61
    assert answer(cluster.join(0.1, join("a", 1, epoch=(1 << 61) + 9)))[0] == Status.OK


def test_the_long_gone_are_forgotten() -> None:
    cluster = attentive(1, 0.0, Timing(10_000.0, 2, 3))
    cluster.join(0.0, join("a", 1))
    cluster.join(0.0, join("b", 1))
    cluster.leave(0.0, "a", 1)
    now = 0.0
    while now < FORGET_S - 10_000:
        cluster.heartbeat(now := now + 9_000.0, "b", 1)
        cluster.maintain(now)
    assert set(cluster.nodes) == {"a", "b"}
    for _ in range(2):
        cluster.heartbeat(now := now + 9_000.0, "b", 1)
        cluster.maintain(now)
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
        Join(1, 0, "a", [join("a", 1).workers[0]._replace(host="ä..b")]),  # a resolver cannot even be asked for it
    ],
)  # fmt: skip
def test_a_bad_join_is_refused_and_changes_nothing(bad: Join) -> None:
    cluster = attentive(1, 0.0)
    status, message = answer(actions := cluster.join(0.0, bad))
    assert status == Status.BAD_REQUEST and isinstance(message, Error) and len(actions) == 1
    assert not cluster.nodes and cluster.epoch == 1


def test_the_largest_map_fits_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = attentive(1, 0.0)
    monkeypatch.setattr(cluster, "_remap", lambda actions, **about: None)  # 30 deals prove nothing here
    for number in range(WORKERS_MAX // 50 + 1):
        msg = join(f"{number:0128d}", 1, *[GIB] * 50)
        msg = msg._replace(workers=[info._replace(uds="u" * 108, host="h" * 255) for info in msg.workers])
        status, _ = answer(cluster.join(0.0, msg))
    assert status == Status.NO_SPACE and len(cluster.live_workers()) == WORKERS_MAX
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
    assert shards_held(cluster) == {("a", 0): SHARD_COUNT // 2, ("b", 0): SHARD_COUNT // 2}
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
        assert status == Status.UNKNOWN_NODE
    for bad in (b"", bytes(BITMAP_BYTES + 1)):
        assert answer(cluster.moved(0.0, Moved(2, cluster.epoch, "b", 0, bad)))[0] == Status.BAD_REQUEST
    assert len(moving(cluster)) == len(shards)
    assert tell(cluster, 0.0, ("b", 0), range(SHARD_COUNT), epoch=1 << 63) == len(shards)


def test_drain_empties_a_node_by_steps_and_resume_fills_it() -> None:
    cluster = attentive(1, 0.0, Timing(moves_at_once=1000))
    for name in ("a", "b", "c"):
        cluster.join(0.0, join(name, 1))
        arrive(cluster)
        cluster.heartbeat(0.0, name, 1)
    held = shards_held(cluster)["c", 0]
    status, message = answer(actions := cluster.drain(0.5, "c", True))
    assert status == Status.OK and message == Done(held - 2000), "a thousand are on their way to each of the others"
    assert NodeChanged("c", NodeState.RUNNING, NodeState.DRAINING, "drain") in actions
    assert {previous for previous, _ in moving(cluster).values()} == {("c", 0)}

    def about(name: str) -> dict[str, Any]:
        return next(node for node in cluster.status(0.5)["nodes"] if node["name"] == name)

    assert about("c")["state"] == "draining" and about("c")["draining"] and not about("c")["drained"]
    assert about("c")["workers"][0]["moving_out"] == 2000 and about("a")["workers"][0]["moving_in"] == 1000
    assert cluster.status(0.5)["shards_waiting"] == held - 2000
    assert map_epoch(cluster.drain(0.5, "c", True)) is None, "said twice"
    steps = arrive(cluster)
    assert steps == 3 and about("c")["drained"] and shards_held(cluster)["c", 0] == 0
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
    assert abs(shards_held(cluster)["c", 0] - SHARD_COUNT / 3) < 1


def test_who_cannot_be_drained() -> None:
    cluster = attentive(1, 0.0)
    status, message = answer(cluster.drain(0.0, "a", True))
    assert status == Status.UNKNOWN_NODE and "none has joined" in message.text
    cluster.join(0.0, join("pod-0", 1))
    status, message = answer(cluster.drain(0.0, "pod-1", True))
    assert status == Status.UNKNOWN_NODE and "'pod-0'" in message.text
    status, message = answer(actions := cluster.drain(0.0, "pod-0", True))
    assert status == Status.UNAVAILABLE and "only" in message.text and "simm dataserver" in message.text
    assert len(actions) == 1 and not cluster.nodes["pod-0"].draining
    assert answer(cluster.drain(0.0, "pod-0", False)) == (Status.OK, Done(SHARD_COUNT))
    cluster.join(0.0, join("pod-1", 1))
    arrive(cluster)
    assert answer(cluster.drain(0.0, "pod-0", True))[0] == Status.OK
    assert answer(cluster.drain(0.0, "pod-1", True))[0] == Status.UNAVAILABLE
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
    assert answer(cluster.heartbeat(0.6, "a", 1))[0] == Status.UNKNOWN_NODE
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
    assert set(owners(cluster)) == {("a", 0)}, "there is nobody else"
    cluster.check()
    cluster.join(0.0, join("b", 1))
    assert set(owners(cluster)) == {("b", 0)} and not moving(cluster)
    cluster.join(0.0, join("a", 2, warm=True, epoch=cluster.epoch))
    arrive(cluster)
    cluster.leave(0.0, "a", 2, warm=True)
    assert set(owners(cluster)) == {("b", 0)}
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


@pytest.mark.parametrize("how", ["dies", "dies, and is waited for", "leaves", "leaves warm"])
def test_issue_a_server_that_has_gone_copies_nothing_any_more(how: str) -> None:
    """Its last heartbeat counted for a day: in the cluster's rate, in what was copied, and in the time to go."""
    cluster = attentive(1, 0.0, ALL._replace(grace_s=60.0 if "waited" in how else 0.0))
    for name in ("a", "b"):
        cluster.join(0.0, join(name, 1))
        cluster.heartbeat(0.0, name, 1, cluster.epoch, [WorkerLoad(1000 * SHARD_COUNT, 5, 0, 0)])
    cluster.heartbeat(0.1, "b", 1, cluster.epoch, [WorkerLoad(7, 1, 0, 0, len(of(cluster, "b")), 500, 300)])
    status = cluster.status(0.2)
    assert (status["move_rate"], status["moved_bytes"]) == (300, 500) and status["eta_s"], "the control"
    if how.startswith("dies"):
        run(cluster, 0.2, 7.0, lambda now: cluster.heartbeat(now, "a", 1, cluster.epoch))
    else:
        cluster.leave(0.2, "b", 1, warm="warm" in how)
    assert states(cluster)["b"] == ("dead" if "dies" in how else "left")
    status = cluster.status(7.1)
    assert status["nodes"][1]["workers"][0]["used_bytes"] == 7, "what it had is still said"
    assert (status["move_rate"], status["moved_bytes"], status["eta_s"]) == (0, 0, None)

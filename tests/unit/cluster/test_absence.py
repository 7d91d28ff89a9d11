"""A server that is away keeps the shards that no other server has owned since: rule by rule."""

from __future__ import annotations

import json
from typing import Any

import pytest

from simm.cluster import absence, placement
from simm.cluster.absence import FORGET_S
from simm.cluster.machine import EPOCHS_RESERVED, Cluster
from simm.cluster.nodes import WORKERS_MAX, NodeState, Timing
from simm.constants import SHARD_COUNT
from simm.wire.messages import Status
from tests.support.absence import beat, node_of, sinces
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
    offer,
    owners,
    rejoin,
    run,
    states,
)

# --- rule by rule ---------------------------------------------------------------------------------


def pair(timing: Timing = ALL) -> Cluster:
    """Two nodes that share the shards and are heard from."""
    cluster = attentive(1, 0.0, timing)
    for name in ("a", "b"):
        cluster.join(0.0, join(name, 1))
        arrive(cluster)
    beat(cluster, 0.0, "a", "b")
    return cluster


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_lone_server_that_was_paused_has_all_as_before(workers: int, restart: bool) -> None:
    cluster = attentive(1, 0.0, Timing(grace_s=2.0))
    cluster.join(0.0, join("a", 1, *[GIB] * workers))
    before, since, reply = owners(cluster), sinces(cluster), cluster.map_reply()
    actions = run(cluster, 0.0, 60.0)
    assert states(cluster) == {"a": "dead"} and map_epoch(actions) is None
    assert cluster.status(60.0)["shards_without_owner"] == SHARD_COUNT, "as far as anybody can serve them"
    if restart:
        state = json.loads(json.dumps(cluster.to_state()))
        assert state["format"] == 2
        cluster = attentive_again(state, 100.0, cluster.timing, epoch=cluster.epoch + EPOCHS_RESERVED)
        run(cluster, 100.0, 160.0)
    assert owners(cluster) == before and sinces(cluster) == since and cluster.map_reply().workers == reply.workers
    cluster.check()
    assert answer(cluster.heartbeat(200.0, "a", 1))[0] == Status.UNKNOWN_NODE
    assert answer(cluster.join(200.0, join("a", 1, *[GIB] * workers)))[0] == Status.OK
    assert owners(cluster) == before and sinces(cluster) == since
    assert cluster.status(200.0)["shards_without_owner"] == 0
    cluster.check()


def test_as_soon_as_somebody_can_take_them_they_are_his() -> None:
    cluster = attentive(1, 0.0)
    cluster.join(0.0, join("a", 1))
    since = cluster.since(0)
    run(cluster, 0.0, 30.0)
    cluster.join(30.0, join("b", 1))
    assert set(owners(cluster)) == {("b", 0)} and not moving(cluster) and cluster.since(0) == cluster.epoch > since
    assert [info.node for info in cluster.live_workers()] == ["b"], "the map does without it"
    cluster.check()
    cluster.join(31.0, join("a", 1))
    assert set(moving(cluster).values()) == {(("b", 0), ("a", 0))}, "with what b has got, and nothing older"
    cluster.check()


@pytest.mark.parametrize("order", ["ab", "ba"])
@pytest.mark.parametrize("stagger", [0.0, 0.25, 0.75])
def test_two_that_were_paused_together_have_all_as_before(order: str, stagger: float) -> None:
    """One is found dead before the other, and one comes back before the other: neither gets what the other has."""
    cluster = pair()
    before, since = owners(cluster), sinces(cluster)
    run(cluster, 0.0, stagger)
    beat(cluster, stagger, "a")
    run(cluster, stagger, 30.0)
    assert states(cluster) == {"a": "dead", "b": "dead"}
    first, second = order
    cluster.join(30.0, join(first, 1))
    assert states(cluster) == {first: "joining", second: "joining"}
    run(cluster, 30.0, 34.0, lambda now: beat(cluster, now, first))
    assert owners(cluster) == before
    beat(cluster, 34.0, second)
    run(cluster, 34.0, 50.0, lambda now: beat(cluster, now, first, second))
    assert owners(cluster) == before and sinces(cluster) == since and not moving(cluster)
    cluster.check()


def test_the_first_heartbeat_counts_as_a_return_too() -> None:
    """b is only suspect when it is heard again, and a is dead already."""
    cluster = pair()
    before, since = owners(cluster), sinces(cluster)
    beat(cluster, 0.9, "b")
    run(cluster, 0.9, 5.5)
    assert states(cluster) == {"a": "dead", "b": "suspect"} and owners(cluster) == before
    beat(cluster, 5.5, "b")
    assert states(cluster) == {"a": "joining", "b": "running"} and owners(cluster) == before
    beat(cluster, 6.0, "a")
    assert owners(cluster) == before and sinces(cluster) == since


def test_others_are_waited_for_once() -> None:
    cluster = pair()
    mine, other = of(cluster, "a"), of(cluster, "b")
    run(cluster, 0.0, 30.0)
    cluster.join(30.0, join("a", 1))
    run(cluster, 30.0, 33.0)  # a is away again, and comes back
    assert states(cluster)["a"] == "suspect"
    beat(cluster, 33.0, "a")
    run(cluster, 33.0, 36.0, lambda now: beat(cluster, now, "a"))
    assert states(cluster)["b"] == "dead" and of(cluster, "a") == mine | other
    assert {cluster.since(shard) for shard in other} == {cluster.epoch}
    cluster.check()


def test_a_new_server_waits_for_nobody() -> None:
    for newcomer in (join("c", 1), join("a", 2)):
        cluster = pair()
        other = of(cluster, "b")
        run(cluster, 0.0, 30.0)
        cluster.join(30.0, newcomer)
        assert set(owners(cluster)) == {(newcomer.name, 0)}
        assert {cluster.since(shard) for shard in other} == {cluster.epoch}
        cluster.check()


def test_who_may_be_back_does_not_keep_its_name() -> None:
    """Its successor is not told that it runs, only because it was given more time."""
    cluster = pair()
    run(cluster, 0.0, 30.0)
    cluster.join(30.0, join("a", 1))
    assert answer(cluster.join(30.0, join("b", 2)))[0] == Status.OK
    cluster.check()


def test_a_suspect_gets_nothing_of_the_dead() -> None:
    """It may be dead in a second; if it is heard, it gets its part then."""
    cluster = attentive(1, 0.0, ALL)
    for name in ("a", "b", "c"):
        cluster.join(0.0, join(name, 1))
        arrive(cluster)
    mine, second = of(cluster, "a"), of(cluster, "b")
    beat(cluster, 1.0, "b")
    run(cluster, 1.0, 5.0, lambda now: beat(cluster, now, "c"))
    assert states(cluster) == {"a": "dead", "b": "suspect", "c": "running"}
    assert of(cluster, "b") == second and 0 < len(of(cluster, "a")) <= len(mine) // 2 + 1
    assert cluster.waiting == len(of(cluster, "a"))
    cluster.check()
    beat(cluster, 5.0, "b")
    assert not of(cluster, "a") and not cluster.waiting and of(cluster, "b") > second
    assert {info.node for info in cluster.live_workers()} == {"b", "c"}
    cluster.check()


@pytest.mark.parametrize("restart", [False, True])
def test_a_warm_restart_that_takes_longer_than_its_grace(restart: bool) -> None:
    cluster = attentive(1, 0.0, Timing(restart_grace_s=10.0))
    cluster.join(0.0, join("a", 1))
    since, epoch = sinces(cluster), cluster.epoch
    cluster.leave(0.0, "a", 1, warm=True)
    run(cluster, 0.0, 30.0)
    if restart:
        cluster = attentive_again(json.loads(json.dumps(cluster.to_state())), 30.0, cluster.timing)
        run(cluster, 30.0, 60.0)
    assert states(cluster) == {"a": "left"} and set(owners(cluster)) == {("a", 0)}
    cluster.join(60.0, join("a", 2, warm=True, epoch=epoch))
    assert sinces(cluster) == since
    cluster.check()
    # Cold, or warm on an arena that is older: all begins anew.
    for message in (join("a", 3), join("a", 4, warm=True, epoch=epoch - 1)):
        cluster.leave(60.0, "a", cluster.nodes["a"].instance, warm=True)
        run(cluster, 60.0, 90.0)
        cluster.join(90.0, message)
        assert set(sinces(cluster)) == {cluster.epoch}
        cluster.check()


def test_two_warm_restarts_that_take_longer_than_their_grace() -> None:
    cluster = pair(Timing(restart_grace_s=10.0, moves_at_once=SHARD_COUNT))
    before, since, epoch = owners(cluster), sinces(cluster), cluster.epoch
    for name in ("a", "b"):
        cluster.leave(0.0, name, 1, warm=True)
    run(cluster, 0.0, 30.0)
    cluster.join(30.0, join("a", 2, warm=True, epoch=epoch))
    run(cluster, 30.0, 32.0, lambda now: cluster.heartbeat(now, "a", 2, cluster.epoch))
    cluster.join(32.0, join("b", 2, warm=True, epoch=epoch))
    assert owners(cluster) == before and sinces(cluster) == since
    cluster.check()


@pytest.mark.parametrize("first", ["a", "b"])
@pytest.mark.parametrize("later", ["a", "b"])
def test_a_move_that_was_under_way_goes_on(first: str, later: str) -> None:
    """What b has not copied yet is at a, and nobody has owned it since. ``later``: found dead a little later."""
    cluster = attentive(1, 0.0, ALL)
    for name in ("a", "b"):
        cluster.join(0.0, join(name, 1))
    beat(cluster, 0.0, "a", "b")
    on_the_way, since = moving(cluster), sinces(cluster)
    assert len(on_the_way) == SHARD_COUNT // 2
    beat(cluster, 0.75, later)
    run(cluster, 0.75, 30.0)
    assert states(cluster) == {"a": "dead", "b": "dead"} and moving(cluster) == on_the_way
    cluster = attentive_again(json.loads(json.dumps(cluster.to_state())), 30.0, ALL)
    run(cluster, 30.0, 60.0)
    cluster.check()
    cluster.join(60.0, join(first, 1))
    assert moving(cluster) == on_the_way
    cluster.join(60.5, join("b" if first == "a" else "a", 1))
    assert moving(cluster) == on_the_way and sinces(cluster) == since
    arrive(cluster, 60.5)
    cluster.check()


def test_a_previous_owner_that_does_not_come_back_with_the_owner_is_forgotten() -> None:
    cluster = attentive(1, 0.0, ALL)
    for name in ("a", "b"):
        cluster.join(0.0, join(name, 1))
    mine = set(moving(cluster))
    run(cluster, 0.0, 30.0)
    cluster.join(30.0, join("b", 1))
    assert set(moving(cluster)) == mine, "a has its time"
    run(cluster, 30.0, 40.0, lambda now: beat(cluster, now, "b"))
    assert not moving(cluster) and set(owners(cluster)) == {("b", 0)}
    assert all(cluster.since(shard) < cluster.epoch for shard in mine), "they are b's as before"
    cluster.check()


def test_a_drained_server_that_dies_leaves_the_map() -> None:
    cluster = pair()
    cluster.drain(0.0, "b", True)
    arrive(cluster)
    run(cluster, 0.0, 6.0)
    assert states(cluster) == {"a": "dead", "b": "dead"}
    assert [info.node for info in cluster.live_workers()] == ["a"], "it has nothing to come back for"
    cluster.check()


def test_the_long_dead_are_forgotten_with_their_shards() -> None:
    cluster = attentive(1, 0.0, Timing(10_000.0, 2, 3))
    cluster.join(0.0, join("a", 1))
    since, now = cluster.since(0), 0.0
    while now < FORGET_S:
        cluster.maintain(now := now + 9_000.0)
    assert states(cluster) == {"a": "dead"} and cluster.since(0) == since
    for _ in range(4):
        cluster.maintain(now := now + 9_000.0)
        cluster.check()
    assert set(owners(cluster)) == {None} and cluster.since(0) == cluster.epoch > since
    for _ in range(12):
        cluster.maintain(now := now + 9_000.0)
    assert not cluster.nodes
    cluster.join(now, join("a", 1))
    assert cluster.since(0) == cluster.epoch, "nobody knows any more who had them"


def test_issue_names_that_come_and_go_are_not_all_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each change looked through all of them, and stored them: 145 ms for the 19,000 of a day."""
    monkeypatch.setattr(absence, "LEFT_MAX", 4)
    cluster = attentive(1, 0.0, ALL)
    cluster.join(0.0, join("stays", 1))
    for name in ("dead", "warm", "drained"):
        cluster.join(0.0, join(name, 1))
    cluster.drain(0.0, "drained", True)
    cluster.leave(0.0, "drained", 1)
    cluster.leave(0.0, "warm", 1, warm=True)
    run(cluster, 0.0, 50.0, lambda now: beat(cluster, now, "stays"))
    assert states(cluster) == {"stays": "running", "dead": "dead", "warm": "left", "drained": "left"}
    assert all(node.released for name, node in cluster.nodes.items() if name != "stays")
    kept = set(cluster.nodes)
    for number in range(1, 21):
        cluster.join(50.0 + number, join(f"n{number}", 1, GIB, GIB))
        cluster.leave(50.0 + number, f"n{number}", 1)
        cluster.check()
        assert set(cluster.nodes) == kept | {f"n{each}" for each in range(max(1, number - 1), number + 1)}, (
            "of two workers each; the dead may still be read, and of the drained one an operator has said something"
        )
    assert set(owners(cluster)) == {("stays", 0)}
    cluster.join(80.0, join("n3", 1))
    assert cluster.nodes["n3"].state.value == "joining"
    cluster.check()


def test_of_too_many_names_those_that_have_left_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(absence, "LEFT_MAX", 3)
    monkeypatch.setattr(absence, "KNOWN_MAX", 8)
    nodes = [node_of(f"n{number}", 1) for number in range(12)]
    for at, node in enumerate(nodes[1:], 1):
        node.changed, node.released = float(at), True
        node.state, node.cold = (NodeState.LEFT, True) if at > 6 else (NodeState.DEAD, False)
    assert [node.name for node in absence.surplus(nodes)] == ["n7", "n8", "n1", "n2"]
    assert not absence.surplus(nodes[:5])
    nodes[7].draining = nodes[8].draining = True
    assert [node.name for node in absence.surplus(nodes)] == ["n1", "n2", "n3", "n4"]


def test_a_state_with_thousands_who_have_left_is_taken_and_cleaned_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An older manager has stored it."""
    cluster = attentive(1, 0.0, ALL)
    cluster.join(0.0, join("stays", 1))
    for number in range(3 * absence.LEFT_MAX):
        node = cluster.nodes[f"n{number}"] = node_of(f"n{number}", 1)
        node.state, node.released, node.cold = NodeState.LEFT, True, True
    cluster._placement.set_keys([(info.node, info.worker) for each in cluster.nodes.values() for info in each.workers])
    again = attentive_again(cluster.to_state(), 0.0, ALL)
    assert len(again.nodes) == 3 * absence.LEFT_MAX + 1
    compacted: list[int] = []
    compact = placement.Placement.compact

    def counted(held: placement.Placement, nodes: Any) -> None:
        compacted.append(len(nodes))
        compact(held, nodes)

    monkeypatch.setattr(placement.Placement, "compact", counted)
    again.join(1.0, join("another", 1))
    assert len(again.nodes) == absence.LEFT_MAX + 2 and compacted == [absence.LEFT_MAX + 2]
    again.check()
    run(again, 1.0, 2.0, lambda now: beat(again, now, "stays"))
    for node in again.nodes.values():
        node.changed = -2 * FORGET_S
    compacted.clear()
    again.maintain(2.25)
    assert set(again.nodes) == {"stays", "another"} and compacted == [2], "a day later, too"


def test_the_dead_make_room_for_the_living() -> None:
    cluster = attentive(1, 0.0, ALL)
    each = 50
    for number in range(WORKERS_MAX // each):
        cluster.nodes[f"n{number}"] = node_of(f"n{number}", each)
    cluster._remap([], changed=True)
    run(cluster, 0.0, 6.0)
    assert set(states(cluster).values()) == {"dead"} and len(cluster.live_workers()) == WORKERS_MAX
    assert answer(cluster.join(6.0, join("new", 1)))[0] == Status.OK
    assert set(owners(cluster)) == {("new", 0)} and len(cluster.live_workers()) == 1
    cluster.check()


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("workers", [1, 2])
def test_an_arena_from_before_anothers_tenure_owns_nothing_until_it_has_taken_a_map(warm: bool, workers: int) -> None:
    """Two hosts, one name. Readers with the next map would find words, and values, from before the other's tenure."""
    capacities = [GIB] * workers
    cluster = Cluster(1, 0.0, ALL)
    cluster.join(0.0, join("a", 1, *capacities))
    old = cluster.epoch
    cluster.heartbeat(0.0, "a", 1, old)
    cluster.link_lost(0.0, "a", 1)
    cluster.join(0.0, join("a", 2, *capacities))  # on another host, in new arenas: at once its own
    assert set(owners(cluster)) == {("a", worker) for worker in range(workers)} and min(sinces(cluster)) > old
    cluster.heartbeat(0.0, "a", 2, cluster.epoch)
    cluster.link_lost(0.0, "a", 2)
    cluster.join(0.0, join("a", 3 if warm else 1, *capacities, warm=warm, epoch=old))
    instance, joined_at = cluster.nodes["a"].instance, cluster.epoch
    for _ in range(2):
        assert set(owners(cluster)) == {None} and cluster.waiting == SHARD_COUNT
        cluster.check()
        cluster.heartbeat(0.5, "a", instance, old)
    cluster.heartbeat(0.5, "a", instance, joined_at)
    assert set(owners(cluster)) == {("a", worker) for worker in range(workers)} and min(sinces(cluster)) > joined_at
    cluster.check()


@pytest.mark.parametrize("stage", ["dead", "paused"])
def test_a_manager_that_has_lost_its_state_while_the_server_was_away(stage: str) -> None:
    """The server brings its map, in which it owns what it has."""
    old = attentive(77, 0.0, ALL)
    old.join(0.0, join("a", 1))
    newest, since = old.map_reply(), sinces(old)
    cluster = attentive(5, 0.0, ALL)
    if stage == "dead":
        cluster.note_epoch(0.0, newest.epoch)  # a client is there first
        run(cluster, 0.0, 30.0)
    assert rejoin(cluster, 30.0, "a", newest.epoch).wants_map == 1
    cluster.offer(30.1, offer(newest))
    run(cluster, 30.1, 33.0)
    assert set(owners(cluster)) == {("a", 0)} and sinces(cluster) == since
    cluster.check()


def test_what_an_old_state_file_does_not_know_begins_anew() -> None:
    """b has owned all since then; the file says that a does, and that it is dead."""
    cluster = attentive(77, 0.0, ALL)
    cluster.join(0.0, join("a", 1))
    run(cluster, 0.0, 30.0)
    state, old_epoch = json.loads(json.dumps(cluster.to_state())), cluster.epoch
    cluster.join(30.0, join("b", 1))
    newest = cluster.map_reply()
    again = attentive_again(state, 0.0, ALL, epoch=old_epoch + EPOCHS_RESERVED)
    assert rejoin(again, 1.0, "b", newest.epoch).wants_map == 1
    assert answer(again.offer(1.0, offer(newest)))[1].items == 1
    assert min(sinces(again)) > newest.epoch, "nothing that a has is good"
    rejoin(again, 1.5, "a", old_epoch)
    assert min(sinces(again)) > newest.epoch
    again.check()


# --- histories from a seed --------------------------------------------------------------------------


def test_mutation_a_suspect_that_gets_shards_of_the_dead_loses_values(monkeypatch: pytest.MonkeyPatch) -> None:
    real = placement._assign_overdue

    def anybody(tables: Any, late: Any, lacking: Any, weights: Any, ready: Any, heard: Any) -> Any:
        return real(tables, late, lacking, weights, [True] * len(ready), heard)

    monkeypatch.setattr(placement, "_assign_overdue", anybody)
    with pytest.raises(AssertionError):
        test_two_that_were_paused_together_have_all_as_before("ab", 0.75)


def test_mutation_without_the_second_chance_the_first_takes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(absence, "spare", lambda *rest: False)
    with pytest.raises(AssertionError):
        test_two_that_were_paused_together_have_all_as_before("ab", 0.0)

"""The manager's state machine: lost state, servers of another cluster, stored and damaged state."""

from __future__ import annotations

import base64
import copy
import functools
import json
import random
from array import array
from collections.abc import Callable
from typing import Any

import pytest

from simm.cluster.machine import EPOCHS_RESERVED, Cluster
from simm.cluster.nodes import NodeState
from simm.cluster.shard_map import pack_since
from simm.constants import NO_OWNER, SHARD_COUNT
from simm.errors import CorruptionError
from simm.wire.messages import (
    Done,
    Error,
    HeartbeatAck,
    Join,
    Status,
)
from simm.wire.shard_set import BLANK_LIMIT, EPOCH_MASK, EPOCHS_AHEAD
from tests.support.dose import dose
from tests.support.machine import (
    ALL,
    GIB,
    SEEDS,
    answer,
    arrive,
    attentive,
    attentive_again,
    join,
    map_epoch,
    moving,
    offer,
    owners,
    rejoin,
    run,
    states,
    tell,
    veterans,
)
from tests.support.shards import shards_held

# --- the state is lost --------------------------------------------------------------------------


def test_the_newest_map_of_the_servers_is_adopted() -> None:
    old, older, newest = veterans()
    cluster = attentive(5, 0.0, ALL)
    assert rejoin(cluster, 0.0, "a", older.epoch).wants_map == 1
    assert cluster.rebuilding and set(owners(cluster)) == {None}
    assert answer(actions := cluster.offer(0.1, offer(older))) == (Status.OK, Done(1))
    assert map_epoch(actions) is None, "nobody is told before it is over"
    assert rejoin(cluster, 0.2, "b", older.epoch).wants_map == 0
    assert rejoin(cluster, 0.3, "c", newest.epoch).wants_map == 1
    assert answer(cluster.heartbeat(0.4, "c", 1, newest.epoch))[0] == Status.OK
    assert answer(cluster.offer(0.4, offer(newest))) == (Status.OK, Done(1))
    assert answer(cluster.offer(0.5, offer(older))) == (Status.OK, Done(0)), "older than what we have"
    assert answer(cluster.drain(0.5, "a", True))[0] == Status.BUSY
    assert tell(cluster, 0.5, ("d", 0), range(SHARD_COUNT)) == 0, "it will say it again"
    assert rejoin(cluster, 0.6, "e", 0).wants_map == 0, "a new one has nothing to tell, and waits with the others"
    assert shards_held(cluster)["e", 0] == 0
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
    assert shards_held(cluster)["e", 0] > 1000
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


def test_a_warm_server_is_back_before_the_lost_state_is() -> None:
    """It stopped after that map. Its name is free, and its shards and their epochs are as they were."""
    old, _, newest = veterans()
    for early in (True, False):
        cluster = attentive(5, 0.0, ALL)
        rejoin(cluster, 0.0, "a", newest.epoch)
        if early:
            assert answer(cluster.offer(0.1, offer(newest))) == (Status.OK, Done(1))
        status, _ = answer(cluster.join(0.2, warm_join("d", 2, newest.epoch, 77)))
        assert status == Status.OK
        if not early:
            assert answer(cluster.offer(0.3, offer(newest))) == (Status.OK, Done(1))
        run(cluster, 0.3, 2.4)
        assert cluster.cluster == 77 and cluster.nodes["d"].instance == 2 and cluster.nodes["d"].serving
        mine = [shard for shard in range(SHARD_COUNT) if old.owner(shard) == ("d", 0)]
        assert mine and all(cluster.since(shard) == old.since(shard) for shard in mine)
        assert all(cluster.owner(shard) == ("d", 0) for shard in mine)
        cluster.check()


def test_a_warm_server_of_a_later_map_than_the_one_that_was_brought_waits() -> None:
    """By the map that nobody brings, others may have had its shards, or it theirs. So may a cold one not just come."""
    _, older, newest = veterans()
    for again in (warm_join("a", 2, newest.epoch, 77), join("a", 2), join("a", 2, epoch=older.epoch)):
        cluster = attentive(5, 0.0, ALL)
        rejoin(cluster, 0.0, "b", older.epoch)
        assert answer(cluster.offer(0.1, offer(older))) == (Status.OK, Done(1))
        assert answer(cluster.join(0.2, again))[0] == Status.BUSY
    assert answer(cluster.join(0.3, warm_join("a", 2, older.epoch, 77)))[0] == Status.OK
    assert answer(cluster.join(0.4, warm_join("a", 3, older.epoch, 77)))[0] == Status.NAME_TAKEN, "now it is there"
    assert answer(cluster.join(0.4, join("b", 2, warm=True, epoch=older.epoch)))[0] == Status.NAME_TAKEN, "it spoke"


# --- servers of another cluster -----------------------------------------------------------------


def warm_join(name: str, instance: int, epoch: int, cluster: int) -> Join:
    return join(name, instance, warm=True, epoch=epoch)._replace(cluster=cluster)


@pytest.mark.parametrize("epoch", [0, 1, 3, 500])
@pytest.mark.parametrize("name", ["a", "z"])
def test_who_holds_values_of_another_cluster_is_refused(name: str, epoch: int) -> None:
    """Whatever its epoch, its name and its arenas; nothing has changed by it. It may join when it has dropped them."""
    cluster, _, newest = veterans()
    cluster.leave(0.1, "a", 1, warm=True)
    before = cluster.map_reply()
    status, message = answer(actions := cluster.join(0.2, warm_join(name, 2, epoch, 78)))
    assert status == Status.OTHER_CLUSTER and "drop them and join again" in message.text and len(actions) == 1
    assert cluster.map_reply() == before
    since = {shard: cluster.since(shard) for shard in range(SHARD_COUNT)}
    assert answer(cluster.join(0.3, join(name, 2)))[0] == Status.OK
    for shard in range(SHARD_COUNT):
        if cluster.owner(shard) == (name, 0):
            assert cluster.since(shard) > max(newest.epoch, since[shard] if name == "z" else 0)
    assert answer(cluster.join(0.4, join("b", 1, epoch=newest.epoch)._replace(cluster=77)))[0] == Status.OK


def test_while_a_map_is_collected_any_cluster_may_be_ours() -> None:
    _, _, newest = veterans()
    cluster = attentive(5, 0.0, ALL)
    assert answer(cluster.join(0.0, warm_join("a", 1, newest.epoch, 77)))[0] == Status.OK
    assert cluster.rebuilding
    assert answer(cluster.offer(0.1, offer(newest))) == (Status.OK, Done(1))
    run(cluster, 0.1, 2.3)
    assert cluster.cluster == 77 and cluster.nodes["a"].serving


def test_who_joined_while_we_listened_and_is_of_another_cluster_must_join_again() -> None:
    """No map came, or one of a third cluster: it is in no map before it has dropped what it has."""
    for adopted in (False, True):
        _, _, newest = veterans()
        cluster = attentive(5, 0.0, ALL)
        assert answer(cluster.join(0.0, warm_join("x", 9, newest.epoch, 99)))[0] == Status.OK
        assert answer(cluster.join(0.0, join("y", 9)))[0] == Status.OK
        if adopted:
            assert answer(cluster.join(0.1, warm_join("a", 1, newest.epoch, 77)))[0] == Status.OK
            assert answer(cluster.offer(0.1, offer(newest))) == (Status.OK, Done(1))
        actions = run(cluster, 0.1, 2.3)
        assert not cluster.rebuilding and cluster.cluster == (77 if adopted else 5)
        assert map_epoch(actions) is not None and "x" not in {info.node for info in cluster.map_reply().workers}
        assert answer(cluster.heartbeat(2.4, "x", 9, newest.epoch))[0] == Status.UNKNOWN_NODE
        assert answer(cluster.join(2.5, warm_join("x", 9, newest.epoch, 99)))[0] == Status.OTHER_CLUSTER
        assert answer(cluster.join(2.6, join("x", 9)))[0] == Status.OK
        assert "x" in {info.node for info in cluster.map_reply().workers}
        cluster.check()


def test_a_client_with_a_map_makes_a_manager_without_state_listen() -> None:
    cluster = attentive(5, 0.0)
    cluster.note_epoch(0.0, 0)
    assert not cluster.rebuilding
    cluster.note_epoch(0.0, 40)
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
        assert answer(cluster.heartbeat(now, "c", 1, newest.epoch))[0] == Status.UNKNOWN_NODE
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
        good._replace(since=pack_since(late)), good._replace(epoch=0),
        good._replace(epoch=BLANK_LIMIT + 1),
        good._replace(workers=good.workers[:1]), good._replace(previous=[(0, 99)]),
        good._replace(workers=[good.workers[0]] * 4), good._replace(workers=[
            info._replace(node="a", worker=at, instance=at) for at, info in enumerate(good.workers)]),
        good._replace(workers=[info._replace(node="") for info in good.workers]),
    ):  # fmt: skip
        status, message = answer(actions := cluster.offer(0.1, bad))
        assert status == Status.BAD_REQUEST and isinstance(message, Error) and len(actions) == 1
    assert states(cluster) == {"a": "joining"} and cluster.cluster == 5
    assert answer(cluster.offer(0.1, offer(older)))[1] == Done(1)


def test_issue_a_manager_goes_beyond_the_maps_that_followed_the_one_by_which_a_shard_is_frozen() -> None:
    """A life of which nobody knows sent some maps more. None of their epochs may name another map."""
    cluster, _, newest = veterans()
    frozen = newest.epoch + EPOCHS_RESERVED
    lost = range(frozen, frozen + 5)
    sent = [cluster.epoch]
    for epoch in lost:
        cluster.note_epoch(0.1, epoch, server=True)
        cluster.advance(0.1, "name")
        sent.append(cluster.epoch)
    assert not set(sent) & set(lost) and sent == sorted(sent)
    assert EPOCHS_AHEAD // 8 < sent[1] - frozen <= EPOCHS_AHEAD // 4 + 2
    cluster.check()


def test_a_server_that_names_its_epoch_again_and_again_drives_nothing() -> None:
    """Only what is above all that this manager has sent counts, and no more than it can have lost."""
    cluster, _, newest = veterans()
    assert cluster.note_epoch(0.1, newest.epoch + 7, server=True)
    driven = cluster.epoch
    for _ in range(100):
        for epoch in (1, newest.epoch, newest.epoch + 7, driven - 1, driven, 1 << 43, EPOCH_MASK):
            assert cluster.note_epoch(0.2, epoch, server=True) == []
    assert cluster.epoch == driven


def test_another_clusters_map_teaches_nothing_but_its_epoch() -> None:
    _, _, newest = veterans()
    cluster = attentive(5, 0.0)
    cluster.join(0.0, join("x", 1))
    since = cluster.since(0)
    assert rejoin(cluster, 0.1, "a", newest.epoch).wants_map == 1
    assert cluster.epoch > newest.epoch
    assert answer(cluster.offer(0.1, offer(newest))) == (Status.OK, Done(0))
    assert since in {cluster.since(shard) for shard in range(SHARD_COUNT)}


# --- stored state -----------------------------------------------------------------------------


@functools.cache
def stored_text() -> str:
    """Three nodes and one that left; a moves in, c is being emptied. Made once, as it takes a tenth of a second."""
    cluster = attentive(5, 0.0)
    for name in ("a", "b", "c"):
        cluster.join(0.0, join(name, 1, GIB, GIB))
        arrive(cluster)
    cluster.leave(0.0, "b", 1)
    cluster.drain(0.0, "c", True)
    assert moving(cluster)
    return json.dumps(cluster.to_state())


def stored() -> dict[str, Any]:
    """Return that state, a new one each time."""
    state: dict[str, Any] = json.loads(stored_text())
    return state


def test_state_round_trip() -> None:
    state = stored()
    cluster = attentive_again(copy.deepcopy(state), 100.0)
    assert states(cluster) == {"a": "joining", "b": "left", "c": "joining"}
    assert answer(cluster.heartbeat(100.0, "a", 1, cluster.epoch)) == (Status.OK, HeartbeatAck(cluster.epoch))
    assert answer(cluster.heartbeat(100.0, "d", 1))[0] == Status.UNKNOWN_NODE
    assert answer(cluster.join(100.0, join("a", 9)))[0] == Status.NAME_TAKEN, "it spoke to this manager"
    assert answer(cluster.join(100.0, join("c", 9)))[0] == Status.BUSY, "it has not spoken, and may be dead"
    cluster = attentive_again(copy.deepcopy(state), 0.0)
    run(cluster, 0.0, 6.0)
    assert set(states(cluster).values()) == {"dead", "left"}
    assert {key[0] for key in owners(cluster) if key} == {"a", "c"}, "there is nobody else"


def test_a_state_of_format_1_still_loads() -> None:
    state = stored()
    del state["since"], state["previous"]
    state["format"] = 1
    for node in state["nodes"]:
        del node["draining"]
    state["nodes"][0]["state"] = "up"
    cluster = attentive_again(state, 0.0, epoch=state["epoch"] + 7)
    assert states(cluster) == {"a": "joining", "b": "left", "c": "joining"} and cluster.epoch > state["epoch"] + 7
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


@pytest.mark.parametrize("seed", dose(SEEDS, quick=2))
def test_a_state_with_random_damage_is_loaded_whole_or_refused(seed: int) -> None:
    rng = random.Random(seed)
    text = stored_text()
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
        tables.owners[:] = tables.preferred[:] = 0
        tables.previous[:] = NO_OWNER

    def home(cluster: Cluster) -> None:
        cluster._placement.tables.preferred[5] = 2

    def lost_home(cluster: Cluster) -> None:
        cluster._placement.tables.preferred[5] = NO_OWNER

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
        cluster._placement._left = cluster._placement._left._replace(waiting=1)

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

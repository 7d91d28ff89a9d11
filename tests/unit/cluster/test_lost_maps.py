"""No epoch names two maps: what a manager sent is lost, and no server that comes back knows it. Only clients do."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from simm.cluster import machine, recovery
from simm.cluster.machine import EPOCHS_RESERVED, Cluster
from simm.cluster.recovery import CLAIMS_MAX, HEED_S
from simm.wire.messages import MapReply, Status
from simm.wire.shard_set import (
    BLANK_LIMIT,
    EPOCH_MASK,
    EPOCHS_AHEAD,
    beyond_lost,
    epoch_limit,
    lost_limit,
    stored_limit,
)
from tests.support.machine import ALL, answer, attentive, attentive_again, join, offer, rejoin, run, veterans

Maps = dict[int, MapReply]


def sends(cluster: Cluster, maps: Maps, count: int = 5) -> None:
    """Send the map and some later ones to a client. No server gets any of them."""
    for step in range(count):
        known = maps.setdefault(cluster.epoch, cluster.map_reply())
        assert known == cluster.map_reply(), f"epoch {cluster.epoch} names two maps"
        cluster.advance(float(step), "name")
    known = maps.setdefault(cluster.epoch, cluster.map_reply())
    assert known == cluster.map_reply(), f"epoch {cluster.epoch} names two maps"


def rebuilt(known: MapReply, claims: tuple[int, ...] = (), instance: int = 1) -> Cluster:
    """Return a manager that has lost its state, and to which the servers have come with that map."""
    cluster = attentive(random.randrange(1, 1 << 64), 0.0, ALL)
    for each in claims:
        cluster.note_epoch(0.0, each)
    for name in "abc":
        rejoin(cluster, 0.1, name, known.epoch)
    assert cluster.rebuilding and answer(cluster.offer(0.2, offer(known)))[0] == Status.OK
    cluster.join(0.3, join("new", instance))
    run(cluster, 0.3, 3.0)
    assert not cluster.rebuilding and cluster.cluster == known.cluster
    cluster.check()
    return cluster


def two_lives(known: Cluster) -> Maps:
    """Let a manager be killed twice while all servers are away. Return the maps that clients have of those lives."""
    maps: Maps = {}
    for _ in range(2):
        state = json.loads(json.dumps(known.to_state()))
        known = attentive_again(state, 0.0, ALL, epoch=known.epoch + EPOCHS_RESERVED)
        sends(known, maps)
    return maps


def test_two_lives_that_no_server_knows_and_a_lost_state() -> None:
    """What the simulator found with seed 1354: the new manager went on where the first of those lives had begun."""
    known, _, newest = veterans()
    maps = two_lives(known)
    assert min(maps) > newest.epoch + EPOCHS_RESERVED
    sends(rebuilt(newest), maps)


def test_a_manager_that_goes_on_at_a_fixed_distance_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    known, _, newest = veterans()
    monkeypatch.setattr(recovery, "beyond_lost", lambda known, _chance: known + EPOCHS_RESERVED)
    monkeypatch.setattr(machine, "beyond_stored", lambda known, _chance: known)
    maps = two_lives(known)
    with pytest.raises(AssertionError, match="names two maps"):
        sends(rebuilt(newest), maps)


# --- one state, two lives ---------------------------------------------------------------------------


def from_copy(state: str, now: float, drawn: int | None = None) -> Cluster:
    """Return a manager that begins with a copy of a stored state."""
    loaded = json.loads(state)
    return attentive_again(loaded, now, ALL, epoch=loaded["epoch"] + EPOCHS_RESERVED, drawn=drawn)


def two_lives_of_one_state() -> tuple[MapReply, Cluster]:
    """Return the newest map of a life that began with a state, and a later life that begins with a copy of it."""
    known, _, _ = veterans()
    state = json.dumps(known.to_state())
    first = from_copy(state, 0.0)
    for name in "abc":
        rejoin(first, 0.1, name, known.epoch)
    first.advance(0.2, "n")
    return first.map_reply(), from_copy(state, 100.0)


def test_a_copy_of_the_state_gives_other_epochs_to_its_maps() -> None:
    """Servers that have a map of the first life are asked for it, though the second one has made as many."""
    newest, second = two_lives_of_one_state()
    second.advance(100.0, "n")
    assert second.epoch != newest.epoch
    assert rejoin(second, 100.1, "a", newest.epoch).wants_map == 1
    assert answer(second.offer(100.2, offer(newest)))[0] == Status.OK
    assert second.epoch > newest.epoch, "clients that have the map of the first life take those of the second"


def test_lives_of_one_state_at_a_fixed_distance_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "beyond_stored", lambda known, _chance: known)
    newest, second = two_lives_of_one_state()
    second.advance(100.0, "n")
    while second.epoch < newest.epoch:
        second.advance(100.0, "n")
    assert second.epoch == newest.epoch and not rejoin(second, 100.1, "a", newest.epoch).wants_map


def test_a_copy_that_is_some_hundred_starts_old_is_of_use() -> None:
    """Servers that have gone on since are believed."""
    known, _, _ = veterans()
    state = json.dumps(known.to_state())
    life = known
    for start in range(256):
        life = from_copy(json.dumps(life.to_state()), float(start))
    second = from_copy(state, 1e4)
    rejoin(life, 300.0, "a", known.epoch)
    newest = life.map_reply()
    assert rejoin(second, 1e4 + 0.1, "a", newest.epoch).wants_map == 1


def test_a_client_with_a_map_of_the_life_before_is_passed() -> None:
    """That life stored nothing, no server has its map, and this one may have drawn a shorter way."""
    known, _, _ = veterans()
    state = json.dumps(known.to_state())
    for seed in range(20):
        first, second = from_copy(state, 0.0, 2 * seed + 1), from_copy(state, 100.0, seed)
        for name in "abc":
            rejoin(second, 100.1, name, known.epoch)
        second.note_epoch(100.2, first.epoch)
        assert second.epoch > first.epoch
        second.check()


def test_clients_do_not_drive_a_manager_that_was_restarted() -> None:
    known, _, _ = veterans()
    again = from_copy(json.dumps(known.to_state()), 0.0)
    before = again.epoch
    assert again.note_epoch(0.1, stored_limit(before) + 1) == [] and again.epoch == before
    assert again.note_epoch(0.2, before + 1) and before < again.epoch <= lost_limit(before)
    passed = again.epoch
    assert again.note_epoch(0.3, passed + 1) == [] and again.epoch == passed, "once in ten minutes"


def test_issue_a_state_of_a_life_that_knew_nothing_lets_clients_begin_a_collection() -> None:
    """The state was lost, "nothing" was stored, and the next start went on beyond the epoch that the clients named."""
    blank = attentive(5, 0.0, ALL)
    again = from_copy(json.dumps(blank.to_state()), 0.0)
    _, _, newest = veterans()
    assert newest.epoch < again.epoch
    again.note_epoch(0.1, newest.epoch)
    assert again.rebuilding
    assert rejoin(again, 0.2, "a", newest.epoch).wants_map == 1


def lost_again(newest: MapReply) -> None:
    """Lose the state again and again, each time before a server has a map of the manager."""
    maps: Maps = {}
    for life in range(6):
        sends(rebuilt(newest, instance=life + 1), maps)


def test_a_state_that_is_lost_again_before_any_server_has_a_map() -> None:
    _, _, newest = veterans()
    lost_again(newest)


def test_a_distance_that_is_not_drawn_by_chance_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, newest = veterans()
    monkeypatch.setattr(recovery, "beyond_lost", lambda known, _chance: beyond_lost(known, 5))
    with pytest.raises(AssertionError, match="names two maps"):
        lost_again(newest)


def test_all_maps_of_one_collection_lead_to_the_same_distance() -> None:
    """Else each server with a newer map would drive the epochs on."""
    _, older, newest = veterans()
    cluster = attentive(5, 0.0, ALL)
    rejoin(cluster, 0.0, "a", older.epoch)
    cluster.offer(0.1, offer(older))
    first = cluster.epoch - older.epoch
    rejoin(cluster, 0.2, "d", newest.epoch)
    cluster.offer(0.3, offer(newest))
    assert cluster.epoch - newest.epoch == first and EPOCHS_AHEAD // 8 <= first < EPOCHS_AHEAD // 4


# --- clients that have later maps -----------------------------------------------------------------


def ahead(newest: MapReply) -> int:
    """Return the epoch of a map of a life that went further than any other."""
    return newest.epoch + EPOCHS_AHEAD // 4


def test_clients_that_have_later_maps_are_passed() -> None:
    """They would ignore all maps of this manager. They tell while it collects, or come later."""
    _, _, newest = veterans()
    claimed = ahead(newest)
    assert rebuilt(newest, (claimed,)).epoch > claimed + EPOCHS_AHEAD // 8
    cluster = rebuilt(newest)
    before = cluster.epoch
    assert before <= claimed
    assert cluster.note_epoch(4.0, claimed) and cluster.epoch > claimed + EPOCHS_AHEAD // 8
    cluster.check()
    assert not cluster.note_epoch(4.1, claimed) and not cluster.note_epoch(4.1, before), "it has passed them"


def test_clients_do_not_drive_the_epochs() -> None:
    known, _, newest = veterans()
    assert known.note_epoch(1.0, known.epoch + 1000) == [], "it has lost nothing"
    # While it collects: within a bound, and the true one is heard, whatever others say.
    claimed = ahead(newest)
    cluster = rebuilt(newest, (claimed, EPOCH_MASK, 1 << 60, newest.epoch + EPOCHS_AHEAD))
    assert claimed < cluster.epoch < claimed + EPOCHS_AHEAD // 4 + 100
    flood = tuple(range(1, 2 * CLAIMS_MAX))
    assert len(rebuilt(newest, flood)._recovery._claims) == 0
    # Later: within a bound, and seldom.
    cluster = rebuilt(newest)
    assert cluster.note_epoch(4.0, lost_limit(cluster.epoch) + 1) == []
    first, now = cluster.epoch, 4.0
    for _ in range(100):
        cluster.note_epoch(now, lost_limit(cluster.epoch))
        cluster.maintain(now := now + 0.5)
    assert first < cluster.epoch <= first + EPOCHS_AHEAD // 2 + 100, "once"
    second = cluster.epoch
    run(cluster, now, now + HEED_S, lambda now: [cluster.heartbeat(now, name, 1, cluster.epoch) for name in "abc"])
    assert second < cluster.epoch <= second + EPOCHS_AHEAD // 2 + 100, "what was said meanwhile is heeded then, once"


def test_clients_make_a_manager_wait_once() -> None:
    """They come again and again, also where no server ever will. Who has its map from this manager starts nothing."""
    cluster = attentive(5, 0.0)
    cluster.note_epoch(0.0, cluster.epoch)
    assert not cluster.rebuilding
    cluster.note_epoch(0.0, 40)
    assert cluster.rebuilding and run(cluster, 0.0, 2.0) == []
    for epoch in (40, 41, EPOCH_MASK):
        cluster.note_epoch(2.0, epoch)
        assert not cluster.rebuilding
    rejoin(cluster, 2.0, "a", 40)
    assert cluster.rebuilding, "a server's word counts"


@pytest.mark.parametrize("epoch", [1, 7])
def test_issue_a_warm_server_that_asks_after_a_client_gets_the_cluster_that_was_lost(epoch: int) -> None:
    """It was told the new manager's own at once, took its arenas for another cluster's and began without values."""
    _, _, newest = veterans()
    cluster = attentive(5, 0.0, ALL)
    cluster.note_epoch(0.1, newest.epoch)
    run(cluster, 0.1, 2.6)
    assert not cluster.rebuilding
    assert cluster.note_epoch(2.7, epoch, supervisor=True) == [] and cluster.rebuilding, "it waits"
    assert rejoin(cluster, 3.0, "a", newest.epoch).wants_map == 1
    assert answer(cluster.offer(3.1, offer(newest)))[0] == Status.OK
    run(cluster, 3.1, 5.2)
    assert not cluster.rebuilding and cluster.cluster == newest.cluster == 77
    cluster.check()


def test_who_says_that_it_is_a_server_makes_each_asker_wait_for_one_collection() -> None:
    """It comes as often as it likes: it prolongs none of its own, and a server that joins ends it for good."""
    cluster = attentive(5, 0.0)
    assert cluster.note_epoch(0.0, 0, supervisor=True) == [] and not cluster.rebuilding
    cluster.note_epoch(0.0, 40)
    run(cluster, 0.0, 1.5)
    cluster.note_epoch(1.5, 40, supervisor=True)  # as long as without that client
    for start in (1.5, 3.5, 5.5):
        cluster.note_epoch(start, 40, supervisor=True)
        run(cluster, start, start + 1.75, lambda now: cluster.note_epoch(now, 41, supervisor=True))
        assert cluster.rebuilding
        cluster.maintain(start + 2.0)
        assert not cluster.rebuilding, "all who wait are answered"
    assert cluster.epoch == 1, "its word drives no epoch"
    cluster.join(7.5, join("a", 1))
    before = cluster.epoch
    for epoch in (1, before + 1, EPOCH_MASK):
        assert cluster.note_epoch(7.6, epoch, supervisor=True) == [] and not cluster.rebuilding
    assert cluster.epoch == before
    cluster.check()


def test_a_client_that_is_there_first_does_not_shorten_the_time_for_the_servers() -> None:
    _, older, newest = veterans()
    cluster = attentive(5, 0.0, ALL)
    cluster.note_epoch(0.0, newest.epoch)
    run(cluster, 0.0, 1.5)
    rejoin(cluster, 1.5, "a", older.epoch)
    cluster.offer(1.6, offer(older))
    run(cluster, 1.6, 3.1)
    assert cluster.rebuilding, "the second server has as long as without that client"
    assert rejoin(cluster, 3.1, "d", newest.epoch).wants_map == 1
    assert answer(cluster.offer(3.2, offer(newest)))[0] == Status.OK
    run(cluster, 3.2, 4.2)
    assert not cluster.rebuilding and cluster.epoch > newest.epoch + EPOCHS_AHEAD // 8
    assert len(cluster.live_workers()) == 4


# --- bounds ---------------------------------------------------------------------------------------


def test_a_state_may_be_lost_often() -> None:
    """A manager that knows nothing believes what many losses have made of the epochs. Servers keep their values."""
    _, _, newest = veterans()
    far = newest._replace(epoch=BLANK_LIMIT - 5)
    cluster = rebuilt(far)
    assert cluster.epoch > far.epoch
    for epoch in (BLANK_LIMIT + 1, EPOCH_MASK):
        blank = attentive(5, 0.0)
        assert answer(blank.join(0.0, join("a", 1, epoch=epoch)))[0] == Status.OTHER_CLUSTER
        assert not blank.rebuilding and not blank.nodes
    # One that knows a server is no such manager.
    cluster = attentive(5, 0.0)
    cluster.join(0.0, join("a", 1))
    assert answer(cluster.join(0.1, join("b", 1, epoch=cluster.epoch + EPOCHS_AHEAD + 1)))[0] == Status.OTHER_CLUSTER


@pytest.mark.parametrize("known", [1, 1 << 40, (1 << 60) - 1, 1 << 60, 1 << 61, EPOCH_MASK - 9, EPOCH_MASK])
def test_where_a_manager_goes_on(known: int) -> None:
    """Within what servers believe, so that one that has missed several of these steps does."""
    chances: Any = [0, 1, (1 << 64) - 1, *(random.getrandbits(64) for _ in range(50))]
    reached = {beyond_lost(known, chance) for chance in chances}
    assert all(known <= each <= lost_limit(known) <= epoch_limit(known) <= EPOCH_MASK for each in reached)
    if known < 1 << 61:
        assert len(reached) > 40 and min(reached) >= known + (epoch_limit(known) - known) // 8

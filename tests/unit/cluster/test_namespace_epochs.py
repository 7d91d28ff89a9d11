"""Whom an advance waits for."""

from __future__ import annotations

import pytest

from simm.cluster.epochs import DRIFT, FOR_EVER, LATE_S, Acknowledged, Lease, NamespaceEpochs
from simm.cluster.machine import Cluster
from simm.cluster.nodes import Answer, Node, NodeState
from simm.constants import DEFAULT_NAMESPACE, OTHERS_NAMESPACE
from simm.errors import CorruptionError
from simm.wire.epoch_messages import Epochs, NamespaceEpoch
from simm.wire.messages import Done, HeartbeatAck, MapOffer
from tests.support.machine import answer, join

LEASE_S = 30.0


def node(name: str, state: NodeState, acked: int, *, released: bool = False) -> Node:
    made = Node(name, 1, [], state, 0.0)
    made.told_epoch, made.released, made.follows = acked, released, True
    made.cold = released and state is NodeState.LEFT
    return made


def waits(*nodes: Node, now: float = 1.0, lease_s: float = LEASE_S, settled: bool = True) -> str:
    """Return what the advance to epoch 7, made at 0, waits for at ``now``."""
    table = NamespaceEpochs()
    table.advance("n", 3)
    if settled:
        left = Acknowledged([node("left", NodeState.LEFT, 0, released=True)])
        assert not table.awaited("n", 3, left, 0.0, 0.0, -1e9, LEASE_S)
    table.advance("n", 7)
    return table.awaited("n", 7, Acknowledged(nodes), now, 0.0, -1e9, lease_s)


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("state", [state for state in NodeState if state is not NodeState.LEFT])
def test_a_server_that_was_given_up_may_still_serve(state: NodeState, released: bool) -> None:
    """It was cut off from the manager, not from its clients: it loses its lease only later, and without one never."""
    given_up = node("a", state, 6, released=released)
    assert waits(given_up, node("b", NodeState.RUNNING, 7)).startswith("a must answer, or lose its lease")
    assert not waits(given_up, now=LEASE_S * (1 + DRIFT) + LATE_S + 0.1)
    assert "there are no leases" in waits(given_up, now=1e6, lease_s=0.0)
    assert "first advance" in waits(given_up, now=1e6, settled=False)


def test_one_that_said_goodbye_serves_nobody() -> None:
    assert not waits(node("a", NodeState.LEFT, 0, released=True), settled=False)
    assert waits(node("a", NodeState.LEFT, 0), settled=False), "with --warm it will be back"
    assert not waits(node("a", NodeState.RUNNING, 7), settled=False)


@pytest.mark.parametrize("settled", [False, True])
def test_a_server_of_a_version_without_epochs_acknowledges_none(settled: bool) -> None:
    """It takes the map without EPOCHS, and its readers look at no lease: no time makes up for that."""
    old = node("a", NodeState.RUNNING, 7)
    old.follows = False
    assert "a must" in waits(old, now=1e6, settled=settled)
    old.follows = None
    assert "a must answer" in waits(old, settled=settled), "it has asked for no map yet"


def cluster_of(*names: str) -> Cluster:
    cluster = Cluster(5, 0.0)
    for name in names:
        cluster.join(0.0, join(name, 1))
    return cluster


def report(cluster: Cluster, name: str, epoch: int, of: int) -> int:
    status, done = answer(cluster.report(0.0, Epochs(0, of, 0, [NamespaceEpoch("n", epoch)]), [name]))
    assert isinstance(done, Done) and not status
    return done.items


def test_epochs_of_another_cluster_mean_nothing() -> None:
    cluster = cluster_of("a")
    before = cluster.epoch
    assert report(cluster, "a", 3, 6) == report(cluster, "a", 3, 0) == 0
    assert cluster.epoch == before and not cluster.namespaces
    assert report(cluster, "a", 3, 5) == 1
    assert cluster.namespaces.newest == cluster.epoch == before + 1


@pytest.mark.parametrize("of", [5, 6])
def test_what_is_reported_while_a_lost_map_is_collected_counts_if_it_is_of_that_cluster(of: int) -> None:
    cluster = Cluster(5, 0.0)
    cluster.note_epoch(0.0, 90)
    assert cluster.rebuilding
    cluster.join(0.0, join("a", 1, epoch=90))
    assert report(cluster, "a", 80, of) == 0 and not cluster.namespaces
    now = 0.0
    while cluster.rebuilding:
        cluster.heartbeat(now, "a", 1, 90)
        cluster.maintain(now := now + 0.25)
    assert bool(cluster.namespaces) == (of == 5)
    assert of != 5 or cluster.namespaces.newest > 90


def test_what_stands_for_several_namespaces_has_no_epoch() -> None:
    assert "stands for several" in NamespaceEpochs().fault(OTHERS_NAMESPACE) and not NamespaceEpochs().fault("n")


def test_a_join_acknowledges_nothing_nor_does_a_map_of_an_earlier_life() -> None:
    """A warm server names an epoch beyond the advance, which it has never heard of."""
    cluster = cluster_of("b")
    cluster.advance(0.0, "n")
    epoch = cluster.epoch
    cluster.join(0.0, join("a", 1, warm=True, epoch=epoch + 50))
    table, nodes = cluster.namespaces, cluster.nodes.values()

    def why() -> str:
        return table.awaited("n", cluster.first_epoch(epoch), Acknowledged(nodes), 1.0, 0.0, -1e9, LEASE_S)

    assert cluster.nodes["a"].acked_epoch > epoch and why().startswith("a")
    cluster.heartbeat(0.1, "a", 1, epoch + 50, (), True)
    assert why().startswith("a") and cluster.first_epoch() > epoch + 50, "that map is of an earlier life"
    for name in "ab":
        cluster.heartbeat(0.2, name, 1, cluster.epoch, (), True)
    assert not why()


def test_maps_that_advance_nothing_end_no_lease() -> None:
    cluster, lease = cluster_of("a"), Lease()

    def beat(at: int, taken: int) -> bool:
        number = lease.sent(at, taken)
        (done, *_) = cluster.heartbeat(0.0, "a", 1, taken, (), True)
        assert isinstance(done, Answer) and isinstance(done.message, HeartbeatAck)
        return lease.answered(number, cluster.first_epoch())

    cluster.advance(0.0, DEFAULT_NAMESPACE)
    taken = cluster.epoch
    for at in range(1, 10):
        cluster.join(0.0, join(f"other-{at}", 1))
        assert cluster.epoch >= taken + at
        assert beat(at, taken), "its map is old, but no namespace has advanced since"
    cluster.advance(0.0, "another")
    assert not beat(20, cluster.epoch - 1), "its workers do not know the epoch"
    assert beat(21, cluster.epoch)
    assert lease.until(1) == 21 + 1_000_000


def test_an_older_manager_extends_the_lease_by_its_own_map_only() -> None:
    lease = Lease()
    for at, (taken, named, extended) in enumerate([(5, 5, True), (5, 6, False), (6, 5, False), (7, 7, True)], 1):
        assert lease.answered(lease.sent(at, taken), named, exactly=True) == extended
    assert not lease.answered(lease.sent(9, 0), FOR_EVER)


def test_a_stored_state_says_who_follows() -> None:
    cluster = cluster_of("a", "b", "c")
    cluster.heartbeat(0.0, "a", 1, 1, (), True)
    cluster.heartbeat(0.0, "b", 1, 1, (), False)
    again = Cluster.from_state(cluster.to_state(), 0.0)
    assert [again.nodes[name].follows for name in "abc"] == [True, False, None]
    state = cluster.to_state()
    for row in state["nodes"]:
        del row["follows"]  # of an older manager
    assert Cluster.from_state(state, 0.0).nodes["a"].follows is None


@pytest.mark.parametrize("server", [False, True])
def test_a_manager_that_has_lost_its_state_does_not_know_all_leases(server: bool) -> None:
    """Somebody names a map of a predecessor. An advance waits for leases that this one has given."""
    cluster = Cluster(1, 2.0)
    assert cluster.unsure == 2.0, "also if nobody does: the servers of a predecessor may all be cut off"
    cluster.note_epoch(3.0, 0)
    assert cluster.unsure == 2.0
    cluster.note_epoch(4.0, 7, server=server)
    assert cluster.rebuilding and cluster.unsure == 4.0
    cluster.note_epoch(5.0, 8, server=server)
    assert cluster.unsure == 4.0, "it waits once"
    cluster = Cluster(1, 2.0)
    cluster.unsure = 9.0
    cluster.note_epoch(4.0, 7, server=server)
    assert cluster.rebuilding and cluster.unsure == 9.0, "nor less long than it had to before"


def live(cluster: Cluster, start: float, end: float, *names: str) -> None:
    """Let time pass in which these servers send heartbeats."""
    for step in range(1, round((end - start) * 4) + 1):
        for name in names:
            cluster.heartbeat(start + step / 4, name, cluster.nodes[name].instance, cluster.epoch, (), True)
        cluster.maintain(start + step / 4)


def waits_for(cluster: Cluster, now: float) -> str:
    """Return what an advance that was made just before waits for."""
    epoch = cluster.namespaces.newest
    nodes = Acknowledged(cluster.nodes.values())
    return cluster.namespaces.awaited("n", cluster.first_epoch(epoch), nodes, now, now, cluster.unsure, LEASE_S)


def settled(*names: str) -> Cluster:
    """Return a cluster in which a namespace has advanced, a while after all leases of another manager have ended."""
    cluster = cluster_of(*names)
    live(cluster, 0.0, 2.0, *names)
    cluster.advance(2.0, "n")
    live(cluster, 2.0, 2 * LEASE_S, *names)
    assert not waits_for(cluster, 2 * LEASE_S)
    return cluster


@pytest.mark.parametrize("grace_s", [0.0, 3.0])
def test_a_server_that_is_awaited_warm_and_does_not_come_may_be_read(grace_s: float) -> None:
    """Its shards have gone to others. But clients on its host have its arena mapped, and its lease is as it was."""
    cluster, now = settled("a", "b"), 2 * LEASE_S
    cluster.timing = cluster.timing._replace(restart_grace_s=grace_s)
    cluster.leave(now, "a", 1, warm=True)
    live(cluster, now, now + 5.0, "b")
    now += 5.0
    assert cluster.nodes["a"].released and cluster.nodes["a"].state is NodeState.LEFT
    cluster.advance(now, "n")
    cluster.heartbeat(now, "b", 1, cluster.epoch, (), True)
    assert waits_for(cluster, now).startswith("a must answer, or lose its lease")
    again = Cluster.from_state(cluster.to_state(), -2 * LEASE_S)
    assert not again.nodes["a"].left
    # Control: after a cold goodbye nobody finds anything there.
    cluster.join(now, join("a", 2))
    cluster.leave(now, "a", 2)
    assert cluster.nodes["a"].left and Cluster.from_state(cluster.to_state(), 0.0).nodes["a"].left


@pytest.mark.parametrize("cold", [False, True])
def test_the_successor_of_a_server_that_was_given_up(cold: bool) -> None:
    """The first one may be cut off, and go on: with clients on its host, until its lease ends."""
    cluster, now = settled("a", "b"), 2 * LEASE_S
    if cold:
        cluster.leave(now, "a", 1)
    live(cluster, now, now + 15.0, "b")
    now += 15.0
    assert cluster.nodes["a"].released
    cluster.join(now, join("a", 2))
    live(cluster, now, now + 1.0, "a", "b")
    now += 1.0
    cluster.advance(now, "n")
    live(cluster, now, now + 0.25, "a", "b")
    assert bool(waits_for(cluster, now + 0.25)) is not cold, "the new one has acknowledged it"
    live(cluster, now, now + LEASE_S + 2.0, "a", "b")
    assert not waits_for(cluster, now + LEASE_S + 2.0)


def test_no_advance_is_confirmed_before_any_server_is_known() -> None:
    """Servers of a predecessor whose state is lost may be cut off, and have values without an epoch: no lease ends."""
    table = NamespaceEpochs()
    table.advance("n", 7)

    def why(*nodes: Node) -> str:
        return table.awaited("n", 7, Acknowledged(nodes), 1e6, 0.0, -1e9, LEASE_S)

    assert "no data server has joined" in why()
    assert "first advance" in why(node("a", NodeState.RUNNING, 6))
    assert not why(node("a", NodeState.RUNNING, 7))


def test_what_was_advanced_before_a_lost_map_came_advances_again() -> None:
    """That epoch is of no map of the cluster that comes back, and may be one that it has had."""
    old = cluster_of("a", "b")
    cluster = Cluster(99, 0.0)
    cluster.advance(0.1, "n")
    before = dict(cluster.namespaces.table())["n"]
    cluster.join(0.2, join("a", 1, epoch=old.epoch)._replace(cluster=old.cluster))
    cluster.offer(0.3, MapOffer(*old.map_reply()))
    for step in range(20):
        cluster.maintain(0.5 + step / 4)
    after = dict(cluster.namespaces.table())["n"]
    assert cluster.cluster == old.cluster and after == cluster.epoch > old.epoch > before


def test_issue_a_state_in_which_a_client_had_the_name_for_several_is_no_damaged_one() -> None:
    """An earlier build let it advance. The manager called its state malformed, and did not start."""
    found = NamespaceEpochs.from_state({OTHERS_NAMESPACE: [5, 1], "m": [6, 1]})
    assert found.to_state() == {"m": [6, 1]}
    with pytest.raises(CorruptionError, match="'n' is malformed"):
        NamespaceEpochs.from_state({OTHERS_NAMESPACE: [5, 1], "n": [0, 1]})


def test_a_text_names_a_few_servers_and_counts_the_others() -> None:
    """An advance that waits is asked why it does with each look, in a cluster of any size."""
    silent = [node(f"s{number:03}", NodeState.RUNNING, 6) for number in range(600)]
    assert waits(*silent).startswith("s000, s001, s002, s003, s004, s005, s006, s007 and 592 others must answer")
    assert waits(*silent[:2], node("b", NodeState.RUNNING, 7)).startswith("s000, s001 must answer")
    for each in silent:
        each.follows = False
    assert "and 592 others must be upgraded" in waits(*silent)


def test_the_server_that_is_most_behind_must_speak_first() -> None:
    nodes = [node("a", NodeState.RUNNING, 9), node("b", NodeState.SUSPECT, 7), node("c", NodeState.DEAD, 8)]
    assert [Acknowledged(nodes).behind(epoch) for epoch in (7, 8, 9, 10)] == [None, "b", "b", "b"]
    nodes[0].follows = None
    assert Acknowledged(nodes).behind(1) == "a", "it acknowledges none before it asks for EPOCHS"
    assert Acknowledged([node("l", NodeState.LEFT, 0, released=True)]).behind(9) is None

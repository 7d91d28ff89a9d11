"""A manager goes on with an old copy of its state, and no server is left that knows the last advances: clients do."""

from __future__ import annotations

import json
from typing import Any

import pytest

from simm.cluster.machine import EPOCHS_RESERVED, Cluster
from simm.cluster.nodes import Timing
from simm.config.client_options import ClientOptions
from simm.constants import DEFAULT_NAMESPACE
from simm.sdk.ops.epochs import ClientEpoch
from simm.wire.epoch_messages import Epochs, NamespaceEpoch
from tests.support.cluster_clients import published
from tests.support.fake_cluster import ALL, FakeCluster
from tests.support.machine import join

NAME = "weights"
SAID = "has lost an advance of namespace"


class World:
    """A manager, and what a client takes of it."""

    def __init__(self) -> None:
        self.cluster = Cluster(7, 0.0)
        self.cluster.join(0.0, join("a", 1))
        self.client = ClientEpoch(ClientOptions(namespace=NAME), lambda _hasher: None)

    def advance(self, name: str = NAME) -> None:
        self.cluster.advance(0.0, name)

    def tell(self) -> None:
        """Send EPOCHS, if there are any, and the map."""
        if table := self.cluster.namespaces.table():
            self.client.take(Epochs(self.cluster.epoch, self.cluster.cluster, 0, table))
        self.client.of_cluster(self.cluster.cluster)
        self.client.heed(self.cluster.epoch)

    def restore(self, state: Any) -> None:
        """Go on from a copy with one server, which starts cold."""
        self.cluster = Cluster.from_state(json.loads(state), 0.0, Timing(), self.cluster.epoch + EPOCHS_RESERVED)
        self.cluster.join(0.0, join("new", 9))


@pytest.mark.parametrize("other", [False, True], ids=["", "another has one"])
@pytest.mark.parametrize("before", [0, 1], ids=["the copy knows no epoch", "an old one"])
def test_issue_a_lost_advance_is_said_once(before: int, other: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Each put was refused and each get missed until somebody advanced the namespace, and nothing said why."""
    world = World()
    for _ in range(before):
        world.advance()
    if other:
        world.advance("other")
    state = json.dumps(world.cluster.to_state())
    world.tell()
    world.advance()
    world.tell()
    lost = world.client.epoch
    assert SAID not in caplog.text
    world.restore(state)
    for instance in range(3):
        world.cluster.join(0.0, join("new", 20 + instance))
        world.tell()
    assert caplog.text.count(SAID) == 1 and world.client.epoch == lost, "values of an older epoch may be left"
    world.advance()
    for _ in range(2):
        world.tell()
    assert caplog.text.count(SAID) == 1 and world.client.epoch == world.cluster.namespaces.newest > lost
    assert caplog.text.count(f"has advanced to epoch {world.client.epoch}, which the manager knows") == 1


def test_a_client_that_has_advanced_before_the_map_came_waits_for_it(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.advance()
    before = Epochs(world.cluster.epoch, 7, 0, world.cluster.namespaces.table())
    world.client.take(before)
    world.advance()
    world.client.advanced(world.cluster.epoch)  # the answer to its ADVANCE
    world.client.take(before)
    world.client.heed(before.epoch)
    world.tell()
    assert SAID not in caplog.text and world.client.epoch == world.cluster.epoch


def test_epochs_of_another_cluster_are_no_lost_ones(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.advance()
    world.tell()
    world.cluster = Cluster(8, 0.0)
    for _ in range(5):
        world.advance("other")
    world.tell()
    assert SAID not in caplog.text and world.client.epoch == 0


def test_a_client_says_it_and_works_again_after_an_advance(caplog: pytest.LogCaptureFixture) -> None:
    with FakeCluster(1) as cluster:
        cluster.settled({0: ALL})
        client = cluster.client("tcp")
        cluster.advance()
        old = cluster.epoch
        cluster.advance()
        published(cluster, client)
        assert client.put("key", b"old") and SAID not in caplog.text
        cluster.advanced[DEFAULT_NAMESPACE] = old  # what the manager's copy knows
        cluster.own({0: ALL})
        cluster.manager.epochs = Epochs(cluster.epoch, cluster.cluster, 0, [NamespaceEpoch(DEFAULT_NAMESPACE, old)])
        cluster.publish()
        published(cluster, client)
        assert caplog.text.count(SAID) == 1 and client._epoch.epoch > old
        cluster.advance()
        published(cluster, client)
        assert client.put("key", b"new") and client.get("key") == b"new"

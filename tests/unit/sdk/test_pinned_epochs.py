"""Pins of values with an epoch: found like others, never an old one, and those that were taken before stay."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from simm.arena.namespaces import NamespaceTable
from simm.arena.reader import ArenaReader
from simm.client import Client
from simm.cluster.epochs import FOR_EVER
from simm.sdk.ops.pins import Pins
from tests.support.cluster_clients import KEYS, full, published, value_of
from tests.support.fake_cluster import FakeCluster
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("nothing_retired")
VALUES = [value_of(key, 1) for key in KEYS]
NOTHING = [None] * len(KEYS)


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(1) as made:
        yield made


@pytest.fixture(params=["shm", "tcp"])
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["pins", "versions"])
def scarce(request: pytest.FixtureRequest, cluster: FakeCluster) -> bool:
    """Whether most values find no room among the pins."""
    if request.param == "versions":
        with cluster.nodes[0].worker.frozen() as store:
            store.sessions.pinned_bytes_max = 10 * 1024
    return str(request.param) == "versions"


@pytest.fixture
def clients(cluster: FakeCluster, path: str) -> tuple[Client, Client]:
    """One client that knows of the advance before the last only, and one that is told; values of that epoch."""
    late, told = full(cluster, path), cluster.client(path)
    cluster.advance()
    for client in (late, told):
        published(cluster, client)
    assert late.put_many(KEYS, VALUES) == [True] * len(KEYS)
    return late, told


def values(pins: Pins) -> list[bytes | None]:
    rooms = [bytearray(length or 1) for length in pins.lengths]
    got = pins.get_ranges_many(range(len(pins)), [[(0, len(room), room)] for room in rooms])
    return [None if length is None else bytes(room) for room, length in zip(rooms, got)]


def pinned(cluster: FakeCluster) -> int:
    with cluster.nodes[0].worker.frozen() as store:
        return int(store.stats()["pins"])


def test_values_with_an_epoch_are_pinned(cluster: FakeCluster, clients: tuple[Client, Client], scarce: bool) -> None:
    with clients[0].pin([*KEYS, "no"]) as pins:
        assert values(pins) == [*VALUES, None]
        assert pinned(cluster) > 0 and (pinned(cluster) == len(KEYS)) != scarce
    wait_until(lambda: pinned(cluster) == 0, "the pins are released")


def test_after_an_advance_no_old_value_is_pinned_and_older_pins_stay(
    cluster: FakeCluster, clients: tuple[Client, Client], scarce: bool
) -> None:
    late, told = clients
    with late.pin(KEYS) as before:
        cluster.advance()
        with late.pin(KEYS) as after:  # it has not heard, and asks for old digests
            assert after.lengths == NOTHING
        published(cluster, told)
        with told.pin(KEYS) as after:
            assert after.lengths == NOTHING
        stay = values(before)
        assert stay == VALUES or scarce, "a pin is a read that began before"
        assert all(value in (None, old) for value, old in zip(stay, VALUES))
        assert told.put_many(KEYS, [value_of(key, 2) for key in KEYS]) == [True] * len(KEYS)
        with told.pin(KEYS) as after:
            assert values(after) == [value_of(key, 2) for key in KEYS]


def test_without_a_lease_nothing_is_pinned(cluster: FakeCluster, clients: tuple[Client, Client], scarce: bool) -> None:
    late, _ = clients
    with late.pin(KEYS) as before:
        cluster.extend_leases(1)
        with late.pin(KEYS) as after:
            assert after.lengths == NOTHING
        assert values(before) == VALUES
    cluster.extend_leases(FOR_EVER)
    with late.pin(KEYS) as after:
        assert values(after) == VALUES


def test_while_the_worker_is_away_versions_are_held_as_epochs_allow(
    cluster: FakeCluster, clients: tuple[Client, Client]
) -> None:
    late, _ = clients
    cluster.nodes[0].worker.die()
    with late.pin(KEYS) as pins:
        assert values(pins) == VALUES
    cluster.nodes[0].worker.start()
    cluster.advance()
    cluster.nodes[0].worker.die()
    with late.pin(KEYS) as pins:
        assert pins.lengths == NOTHING
    cluster.nodes[0].worker.start()


def test_mutation_without_the_looks_old_values_are_pinned(
    cluster: FakeCluster, clients: tuple[Client, Client], scarce: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, _ = clients
    monkeypatch.setattr("simm.arena.namespaces.StaleEntries.step", lambda _: False)
    cluster.advance()
    monkeypatch.setattr(NamespaceTable, "readable", lambda *_: True)
    monkeypatch.setattr(ArenaReader, "is_current", lambda *_: True)
    with late.pin(KEYS) as pins:
        assert values(pins) == VALUES

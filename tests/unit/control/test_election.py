"""Managers and their coordinators on a model of etcd: who leads, and whose state is stored."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from simm.control import election
from simm.control.election import Coordinator, NotLeader
from simm.control.etcd import EtcdError
from simm.manager import Manager
from simm.net.loop import Loop
from tests.models.etcd import TTL_S, ModelEtcd, Network, Store
from tests.support.machine import join

LEADER = b"/simm/leader"


class House:
    """Managers on one etcd and one clock. The test does what their threads and loops do."""

    def __init__(self, count: int) -> None:
        self.store = Store()
        self.network = Network(self.store, random.Random(1), 0.0)
        self.loops = [Loop(lambda: self.store.now) for _ in range(count)]
        self.managers = [Manager(loop, coordinator=self.coordinator()) for loop in self.loops]

    def coordinator(self) -> Coordinator:
        connect: Any = lambda: ModelEtcd(self.network)  # noqa: E731
        return Coordinator(connect, "/simm", ttl_s=TTL_S, clock=lambda: self.store.now)

    def leads(self, manager: Manager) -> int:
        """Let its thread make one exchange with etcd, and its loop see the result. Return the term."""
        of(manager)._step()
        manager.poll()
        return of(manager).term

    def turn(self, manager: Manager) -> None:
        """Let the timers of its loop run that are due."""
        manager.loop.run_once(0.0)

    def stored(self) -> tuple[int, list[str]]:
        """Return the epoch and the servers that are stored."""
        reader = self.coordinator()
        reader._held = reader._held._replace(term=1, until=self.store.now + 1)
        cluster = reader.load()["cluster"]
        return cluster["epoch"], sorted(node["name"] for node in cluster["nodes"])

    def close(self) -> None:
        for loop in self.loops:
            loop.close()


def of(manager: Manager) -> Coordinator:
    assert manager._coordinator is not None
    return manager._coordinator


def joins(manager: Manager, *names: str) -> None:
    """Let servers join. The loop stores them a moment later."""
    for name in names:
        manager._apply(manager.cluster.join(manager.loop.now, join(name, 1)))


@pytest.fixture
def house() -> Iterator[House]:
    made = House(2)
    yield made
    made.close()


def test_issue_a_leader_of_a_later_term_does_not_store_what_it_knew_in_an_earlier_one(house: House) -> None:
    """It was stopped with a change to store. Others led and stored, and its thread wins before its loop notices."""
    one, two = house.managers
    first = house.leads(one)
    joins(one, "lost")
    house.store.now += 4 * TTL_S
    house.store.expire()
    assert house.leads(two) > first
    joins(two, "a", "b", "c")
    house.turn(two)
    two.state.save()
    epoch, names = house.stored()
    assert names == ["a", "b", "c"] and epoch > one.cluster.epoch
    of(two).close()

    while of(one).term in (0, first):
        of(one)._step()
    assert one.leading and one._term == first, "its loop does not know it"
    one._settled()
    assert house.stored() == (epoch, names)
    assert not one.leading, "it forgets what it knew"
    one.poll()
    assert one.leading and sorted(one.cluster.nodes) == names and one.cluster.epoch > epoch


@pytest.mark.parametrize("call", ["retry", "last"])
def test_issue_nor_at_its_next_attempt_nor_at_its_end(house: House, call: str) -> None:
    one, two = house.managers
    first = house.leads(one)
    joins(one, "lost")
    house.store.now += 4 * TTL_S
    house.store.expire()
    house.leads(two)
    joins(two, "a")
    two.state.save()
    before = house.stored()
    of(two).close()
    while of(one).term in (0, first):
        of(one)._step()
    if call == "retry":
        one.state._pausing = True
        one.state._retry()
    else:
        assert not one.state.save_now(last=True)
    assert house.stored() == before and not one.leading


def test_only_who_has_loaded_the_state_may_replace_it(house: House) -> None:
    coordinator = house.coordinator()
    coordinator._step()
    with pytest.raises(NotLeader, match="than that of our state"):
        coordinator.save({})
    house.network.fault = 1.0
    house.network.rng.random = lambda: 0.0  # type: ignore[method-assign] # etcd is away
    with pytest.raises(OSError, match="lost before"):
        coordinator.load()
    house.network.fault = 0.0
    with pytest.raises(NotLeader, match="than that of our state"):
        coordinator.save({})
    assert coordinator.load() is None
    coordinator.save({"a": 1})
    assert coordinator.load() == {"a": 1}


def delete_leader(house: House) -> None:
    """As ``etcdctl del /simm/leader`` does."""
    del house.store.keys[LEADER]
    house.store.revision += 1


@pytest.mark.parametrize("replaced", [True, False])
def test_issue_a_leader_whose_key_is_deleted_stops_leading(house: House, replaced: bool) -> None:
    """Its lease goes on. Without another manager it leads anew, in a later term."""
    one, two = house.managers
    first = house.leads(one)
    joins(one, "a")
    house.turn(one)
    one.state.save()
    delete_leader(house)
    second = house.leads(two) if replaced else 0
    house.store.now += TTL_S / 3
    house.leads(one)
    assert not one._leads() and of(one).term == 0
    assert len(house.store.leases) == replaced, "its lease is given back, the other's stays"
    for _ in range(20):
        house.store.now += TTL_S / 3
        house.store.expire()
        for manager in house.managers[: 1 + replaced]:
            house.leads(manager)
    assert two._leads() is replaced is not one._leads()
    assert of(two).term == second if replaced else of(one).term > first
    assert sorted((two if replaced else one).cluster.nodes) == ["a"]


def test_a_leader_whose_key_cannot_be_looked_at_leads_to_the_end_of_its_time(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a keepalive without an answer: nothing is extended. One answer in time is enough."""
    one = house.managers[0]
    term = house.leads(one)
    monkeypatch.setattr(ModelEtcd, "get", silent)
    for _ in range(3):
        house.store.now += 1.0
        with pytest.raises(EtcdError):
            of(one)._step()
        assert of(one).term == term
    monkeypatch.undo()
    of(one)._step()
    left = of(one).lead_left_s
    assert left == pytest.approx(TTL_S * (1 - election.MARGIN))
    monkeypatch.setattr(ModelEtcd, "get", silent)
    house.store.now += left
    assert of(one).term == 0


def silent(_etcd: ModelEtcd, _key: bytes, _deadline_s: float) -> Any:
    raise EtcdError("no whole answer in time")

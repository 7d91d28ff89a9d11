"""Managers and their coordinators on a model of etcd: who leads, and whose state is stored."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from simm.control import election
from simm.control.election import Coordinator, Leader, NotLeader
from simm.control.etcd import EtcdError, KeyValue
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


def test_a_new_leader_waits_for_one_whose_key_was_deleted(house: House) -> None:
    """It gives leases until it has looked, so a server may show old values for so much longer."""
    one, two = house.managers
    house.leads(one)
    assert one.cluster.unsure == house.store.now + TTL_S, "also of one that finds no state"
    joins(one, "a")
    house.turn(one)
    one.state.save()
    house.store.keys.pop(LEADER)
    house.leads(two)
    assert one.leading and one._leads() and two.leading and sorted(two.cluster.nodes) == ["a"]
    assert two.cluster.unsure == house.store.now + TTL_S


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


@pytest.mark.parametrize("name", ["id", "address", "http", "host"])
def test_a_leader_is_one_whose_address_can_be_shown(name: str) -> None:
    """A standby's pages and answers have it."""
    me = Leader("1", "host:1", "", "host", 7, 1.0)
    for leader in (me, Leader(*({**me._asdict(), name: "evil\ud800"}.values()))):
        value = json.dumps(leader._asdict()).encode()
        assert election._leader(KeyValue(LEADER, value, 1, 1, 1)) == (me if leader is me else None)


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


class Slow:
    """An etcd on the test's clock that takes its time for each kind of request, and gives none beyond a deadline."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.etcd: Any = ModelEtcd(Network(store, random.Random(1), 0.0))
        self.takes = {"keepalive": 0.0, "get": 0.0}

    def __getattr__(self, name: str) -> Any:
        def ask(*arguments: Any) -> Any:
            takes = self.takes.get(name, 0.0)
            self.store.now += min(takes, arguments[-1])
            if takes > arguments[-1]:
                raise EtcdError("no answer in time")
            return getattr(self.etcd, name)(*arguments)

        return ask


def renewed(store: Store, coordinator: Coordinator, seconds: float) -> int:
    """Let its thread renew for so long, at its pauses. Return how often it was found without its term."""
    without, until = 0, store.now + seconds
    while store.now < until:
        try:
            pause = coordinator._step()
        except EtcdError:
            pause = election.RETRY_S
        without += not coordinator.term
        store.now += pause
        store.expire()
        without += not coordinator.term
    return without


@pytest.mark.parametrize(("keepalive", "get"), [(0.9, 0.9), (1.1, 1.1), (0.01, 1.8), (1.6, 0.0)])
def test_a_slow_etcd_deposes_nobody_whom_its_keepalives_keep(keepalive: float, get: float) -> None:
    """Of a lease of five seconds. The look at the key has its own time, and is no reason to stop."""
    store = Store()
    slow = Slow(store)
    coordinator = Coordinator(lambda: slow, "/simm", ttl_s=5, clock=lambda: store.now)  # type: ignore[arg-type,return-value]
    while not coordinator.term:
        coordinator._step()
    slow.takes.update(keepalive=keepalive, get=get)
    assert renewed(store, coordinator, 60.0) == 0


def test_a_leader_whose_key_nobody_shows_it_leads_for_a_leases_time_more() -> None:
    store = Store()
    slow = Slow(store)
    coordinator = Coordinator(lambda: slow, "/simm", ttl_s=5, clock=lambda: store.now)  # type: ignore[arg-type,return-value]
    while not coordinator.term:
        coordinator._step()
    slow.takes["get"] = 60.0
    assert renewed(store, coordinator, 2.0) == 0, "a stall of reads alone"
    slow.takes["get"] = 0.0
    assert renewed(store, coordinator, 4.0) == 0
    slow.takes["get"] = 60.0
    began = store.now
    while coordinator.term:
        renewed(store, coordinator, 0.01)
    assert 5.0 < store.now - began <= 2 * 5.0 + 2.5

"""A model of etcd with a clock and a network that a seed drives, and managers' coordinators that use it.

:func:`play` lets a few coordinators campaign, save and load. Meanwhile requests get lost before or after they are
executed, or are executed much later; the clock and the other managers go on in the middle of a request; managers resign
and are killed, and an operator deletes the leader's key. What a manager saves names the term in which it has loaded the
state last, as its loop may not know yet that it has lost that term and won another. :func:`play` raises Broken when a
promise of ``simm/control/election.py`` does not hold.
"""

from __future__ import annotations

import contextlib
import random
from base64 import b64decode
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from simm.control.election import UNSEEN_TTLS, Coordinator, NotLeader
from simm.control.etcd import EtcdError, KeyValue, TxnResult
from tests.models.explorer import walk

TTL_S = 5


class Broken(AssertionError):
    """There are two leaders, or a state was lost or superseded by an older one."""


class Store:
    """The state that a majority agrees on: keys with revisions, and leases by a clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.revision = 1
        self.keys: dict[bytes, KeyValue] = {}
        #: Lease -> its end.
        self.leases: dict[int, float] = {}
        self.leases_made = 0

    def expire(self) -> None:
        for lease in [lease for lease, until in self.leases.items() if until <= self.now]:
            self.end(lease)

    def end(self, lease: int) -> None:
        if self.leases.pop(lease, None) is None:
            return
        gone = [key for key, value in self.keys.items() if value.lease == lease]
        self.revision += bool(gone)
        for key in gone:
            del self.keys[key]

    def txn(
        self, compare: Sequence[dict[str, Any]], success: Sequence[dict[str, Any]], failure: Sequence[dict[str, Any]]
    ) -> TxnResult:
        held = all(self._holds(condition) for condition in compare)
        chosen = success if held else failure
        puts = [part["request_put"] for part in chosen if "request_put" in part]
        if any(int(each["lease"]) and int(each["lease"]) not in self.leases for each in puts):
            raise EtcdError("requested lease not found", code=5)
        self.revision += any("request_range" not in part for part in chosen)
        found: list[KeyValue | None] = []
        for part in chosen:
            (asked,) = part.values()
            key = b64decode(asked["key"])
            before = self.keys.get(key)
            if "request_range" in part:
                found.append(before)
            elif "request_put" in part:
                born = before.create_revision if before else self.revision
                self.keys[key] = KeyValue(key, b64decode(asked["value"]), born, self.revision, int(asked["lease"]))
            else:
                end = b64decode(asked["range_end"])
                for each in [each for each in self.keys if key <= each < end]:
                    del self.keys[each]
        return TxnResult(held, self.revision, found)

    def _holds(self, condition: dict[str, Any]) -> bool:
        value = self.keys.get(b64decode(condition["key"]))
        if condition["target"] == "CREATE":
            return (value.create_revision if value else 0) == int(condition["create_revision"])
        return (value.mod_revision if value else 0) == int(condition["mod_revision"])


class Network:
    """Carries requests to the store; the share ``fault`` of them badly."""

    def __init__(self, store: Store, rng: random.Random, fault: float) -> None:
        self.store = store
        self.rng = rng
        self.fault = fault
        self.late: list[tuple[float, Callable[[], Any]]] = []
        #: Called in the middle of a request.
        self.meanwhile: Callable[[], None] = lambda: None

    def carry(self, request: Callable[[], Any], *, again: bool) -> Any:
        kind = self.rng.random() / self.fault if self.fault else 1.0
        if kind < 0.2:
            raise EtcdError("lost before", maybe=False)
        if kind < 0.5 and not again:
            self.late.append((self.store.now + self.rng.uniform(0, 20), request))
            raise EtcdError("carried out later", maybe=True)
        if kind < 0.8:
            self.meanwhile()
        self.deliver()
        result = request()
        if 0.8 <= kind < 1:
            raise EtcdError("lost after", maybe=True)
        return result

    def deliver(self) -> None:
        """Execute the late requests that are due."""
        self.store.expire()
        due = [request for at, request in self.late if at <= self.store.now]
        self.late = [(at, request) for at, request in self.late if at > self.store.now]
        for request in due:
            with contextlib.suppress(EtcdError):
                request()


class ModelEtcd:
    """The calls of simm.control.etcd.Etcd that a coordinator uses."""

    def __init__(self, network: Network) -> None:
        self.carry = network.carry
        self.store = network.store

    def get(self, key: bytes, _deadline_s: float) -> Any:
        return self.carry(lambda: self.store.keys.get(key), again=True)

    def txn(self, compare: Any, success: Any, failure: Any, _deadline_s: float) -> Any:
        return self.carry(lambda: self.store.txn(compare, success, failure), again=False)

    def grant(self, ttl_s: int, _deadline_s: float) -> Any:
        def make() -> tuple[int, int]:
            self.store.leases_made += 1
            self.store.leases[self.store.leases_made] = self.store.now + ttl_s
            return self.store.leases_made, ttl_s

        return self.carry(make, again=True)

    def keepalive(self, lease: int, _deadline_s: float) -> Any:
        def renew() -> int:
            if lease not in self.store.leases:
                return 0
            self.store.leases[lease] = self.store.now + TTL_S
            return TTL_S

        return self.carry(renew, again=True)

    def revoke(self, lease: int, _deadline_s: float) -> None:
        self.carry(lambda: self.store.end(lease), again=True)


class World:
    """The coordinators of some managers on one model. A state is (term, number) and some bytes."""

    def __init__(self, seed: int, managers: int = 3, fault: float = 0.3) -> None:
        self.rng = random.Random(seed)
        self.store = Store()
        self.network = Network(self.store, self.rng, fault)
        self.network.meanwhile = self.meanwhile
        self.coordinators = [self.new(self.network) for _ in range(managers)]
        #: The term of the state that each has.
        self.loaded: dict[Coordinator, int] = {}
        self.number = 0
        self.stored = (0, 0)
        self.acknowledged = (0, 0)
        self.terms: set[int] = set()
        #: Terms that have ended.
        self.over: set[int] = set()
        #: Terms whose key was deleted, and until when their managers may not know it.
        self.undermined: dict[int, float] = {}
        self.figures = {"saves": 0, "refused": 0, "failed": 0, "loads": 0, "meanwhile": 0, "deleted": 0}
        #: (coordinator, thread) in the middle of a request.
        self.busy: set[tuple[Coordinator, str]] = set()

    def new(self, network: Network) -> Coordinator:
        connect: Any = lambda: ModelEtcd(network)  # noqa: E731
        return Coordinator(connect, "/model", ttl_s=TTL_S, clock=lambda: self.store.now)

    def meanwhile(self) -> None:
        """Let the other managers, and the other thread of this one, act while one request waits."""
        if len(self.busy) < 3:
            self.figures["meanwhile"] += 1
            for _ in range(self.rng.randrange(1, 12)):
                self.act()

    @contextlib.contextmanager
    def within(self, coordinator: Coordinator, thread: str) -> Iterator[None]:
        self.busy.add((coordinator, thread))
        try:
            yield
        finally:
            self.busy.discard((coordinator, thread))

    def act(self) -> None:
        """Let some time pass and one manager act."""
        self.store.now += self.rng.choice([0.01, 0.03, 0.1, 0.1, 0.2, 0.2, 2.0])
        at = self.rng.randrange(len(self.coordinators))
        coordinator, what = self.coordinators[at], self.rng.random()
        thread = "campaign" if what < 0.6 else "loop"
        if (coordinator, thread) in self.busy:
            return
        with self.within(coordinator, thread):
            if what < 0.6:
                with contextlib.suppress(EtcdError):
                    coordinator._step()
            elif what < 0.9:
                # Mostly the loop has noticed that it leads anew.
                if coordinator.term != self.loaded.get(coordinator) and self.rng.random() < 0.8:
                    self.load(coordinator)
                self.save(coordinator)
            elif what < 0.95:
                self.load(coordinator)
            elif what < 0.96:
                self.delete()
            elif what < 0.98:
                coordinator.resign(self.rng.uniform(0, 5))
            elif not any(busy is coordinator and name == "campaign" for busy, name in self.busy):
                self.coordinators[at] = self.new(self.network)  # killed, and started anew
        self.check()

    def delete(self) -> None:
        """Delete the leader's key, as an operator can. Its manager learns it by its next renewal, or its time ends.

        With keepalives that are answered and reads that are not it leads for so many leases more.
        """
        if (found := self.store.keys.pop(b"/model/leader", None)) is not None:
            self.store.revision += 1
            self.undermined[found.create_revision] = self.store.now + (1 + UNSEEN_TTLS) * TTL_S
            self.figures["deleted"] += 1

    def save(self, coordinator: Coordinator) -> None:
        self.number += 1
        leads = coordinator.term
        mine = (self.loaded.get(coordinator, 0), self.number)
        try:
            coordinator.save({"saved": mine, "more": self.rng.randbytes(self.rng.randrange(150)).hex()})
        except NotLeader:
            self.figures["refused"] += 1
        except OSError:
            self.figures["failed"] += 1
        else:
            self.figures["saves"] += 1
            if not leads:
                raise Broken("a manager saved that did not lead")
            self.acknowledged = max(self.acknowledged, mine)

    def load(self, coordinator: Coordinator) -> None:
        before, term = self.acknowledged, coordinator.term
        try:
            state = coordinator.load()
        except (NotLeader, OSError):
            return
        self.figures["loads"] += 1
        self.loaded[coordinator] = term
        loaded = tuple(state["saved"]) if state else (0, 0)
        if loaded < before:
            raise Broken(f"{loaded} was loaded, {before} was acknowledged before")

    def check(self) -> None:
        """Check: at most one leader, of the newest term; no term comes back; the stored state never goes back."""
        leading = {coordinator.term for coordinator in self.coordinators} - {0}
        unknowing = {term for term, until in self.undermined.items() if self.store.now < until}
        leaders = sorted(leading - unknowing)
        if len(leaders) > 1:
            raise Broken(f"at {self.store.now:.2f} s two lead: terms {leaders}")
        self.terms.update(leading)
        self.over.update(self.terms - leading)
        if self.over & leading or (leaders and leaders[0] < max(self.terms)):
            raise Broken(f"one of the terms {sorted(leading)} is back, after {max(self.terms)}")
        # A reader that bypasses the network and takes itself for the leader for this moment.
        reader = self.new(Network(self.store, self.rng, 0.0))
        reader._held = reader._held._replace(term=1, until=self.store.now + 1)
        state = reader.load()
        stored = tuple(state["saved"]) if state else (0, 0)
        if stored < max(self.stored, self.acknowledged):
            raise Broken(f"{stored} is stored after {self.stored}, acknowledged was {self.acknowledged}")
        self.stored = stored

    def heal(self) -> None:
        """Lose nothing any more: a manager must lead soon, and find the state that was saved last."""
        self.network.fault = 0.0
        for _ in range(60):
            self.store.now += 0.5
            for coordinator in self.coordinators:
                coordinator._step()
            self.check()
        leader = next((each for each in self.coordinators if each.term), None)
        if leader is None:
            raise Broken("no manager leads although nothing is wrong")
        self.load(leader)


def play(seed: int, steps: int = 300) -> dict[str, int]:
    """Run one world and return what happened in it.

    Raises:
        Broken: a promise does not hold.
        CorruptionError: a state cannot be read.
    """
    world = World(seed)
    walk(steps, world.act)
    world.heal()
    return {**world.figures, "terms": len(world.terms)}

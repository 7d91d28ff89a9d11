"""A server that is away keeps the shards that no other server has owned since: histories from a seed.

In a history the cluster, ``Member`` and ``ShardWords`` are the real ones. Servers pause, are cut off, die, leave, come
back cold and warm, and move shards; the manager restarts. The reference model knows for each shard which arena the
manager named last, whether another was named since, and the last value that an owner accepted. It checks two things
after each event:

* *Safety.* An owner that is asked has no value but the last accepted one. A shard has the same ``since`` only if the
  same arena has it as before.
* *Values are kept.* An arena that has the shard again, with no other owner in between, has it with the same ``since``;
  and an arena drops a shard's value only if another was named the owner since it got it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from simm.arena.shard_words import ShardWords
from simm.cluster import placement
from simm.cluster.assignment import Member
from simm.cluster.machine import EPOCHS_RESERVED, Cluster
from simm.cluster.nodes import Action, Timing
from simm.cluster.shard_map import ShardMap
from simm.constants import NO_OWNER, SHARD_COUNT
from simm.errors import CorruptionError
from simm.wire.messages import Joined, Status, WorkerInfo
from simm.wire.shard_set import FROZEN
from tests.models.explorer import first_failure, walk
from tests.support.absence import Arena, Host, Table, joining
from tests.support.dose import dose, dosed
from tests.support.machine import (
    GIB,
    answer,
)


class History:
    """See the module's docstring."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.random = np.random.default_rng(seed)
        self.timing = Timing(
            1.0, 3, 5, rng.choice([0.0, 0.0, 3.0]), rng.choice([0.0, 4.0]), rng.choice([4096, SHARD_COUNT])
        )
        self.now = 0.0
        self.cluster = Cluster(seed + 1, 0.0, self.timing)
        self.hosts = [Host(f"h{number}", rng.choice([1, 1, 2])) for number in range(rng.choice([1, 2, 2, 3]))]
        self.numbers = 0
        self.arenas: dict[tuple[str, int, int], Arena] = {}
        self.by_number: dict[int, Arena] = {}
        #: For each shard: the last value that its owner accepted; the arena named last, and since when.
        self.current: Table = np.zeros(SHARD_COUNT, np.int64)
        self.tenant: Table = np.zeros(SHARD_COUNT, np.int64)
        self.since: Table = np.zeros(SHARD_COUNT, np.int64)
        self.values = 0
        self.seen: dict[str, int] = {}

    def note(self, what: str, count: int = 1) -> None:
        self.seen[what] = self.seen.get(what, 0) + count

    # -- the oracle -----------------------------------------------------------------------------------

    def owners(self) -> Table:
        """The arena that the manager names for each shard; 0 for none."""
        placed = self.cluster._placement
        table = np.zeros(NO_OWNER + 1, np.int64)
        for place, (name, worker) in enumerate(placed.keys):
            node = self.cluster.nodes.get(name)
            arena = self.arenas.get((name, node.instance, worker)) if node is not None else None
            table[place] = arena.number if arena is not None else 0
        return table[placed.tables.owners]

    def look(self) -> None:
        """After each event."""
        cluster = self.cluster
        cluster.check()
        owners, since = self.owners(), cluster._placement.tables.since.astype(np.int64)
        named = owners != 0
        same = named & (owners == self.tenant)
        other = named & ~same & (self.tenant != 0)
        bad = np.flatnonzero(other & (since <= self.since))
        assert not len(bad), f"shard {bad[0]} has another owner, since the same epoch"
        anew = np.flatnonzero(same & (since != self.since))
        for shard in anew.tolist():
            # An arena that has not heard of its shard has nothing of it.
            arena = self.by_number[int(owners[shard])]
            assert arena.epoch < self.since[shard], f"shard {shard} is back with its last owner, since a new epoch"
        for number in np.unique(self.tenant[other]).tolist():
            self.by_number[number].displaced |= other & (self.tenant == number)
        self.tenant = np.where(named, owners, self.tenant)
        self.since = np.where(named, since, self.since)
        for host in self.hosts:
            for arena in host.arenas:
                if host.state in ("up", "cut", "paused"):
                    word = arena.array()
                    asked = (owners == arena.number) & (word != 0) & (word < FROZEN) & (arena.values != 0)
                    bad = np.flatnonzero(asked & (arena.values != self.current))
                    assert not len(bad), f"shard {bad[0]}: {host.name} has a superseded value"
                    self.note("values there", int(asked.sum()))

    # -- servers ----------------------------------------------------------------------------------------

    def start(self, host: Host, *, warm: bool) -> None:
        host.instance = self.rng.getrandbits(62) | 1
        host.member = Member(host.name, host.instance, range(host.count))
        host.warm, host.joined, host.was_joined = warm, False, False
        if not warm:
            self.numbers += host.count
            host.arenas = [Arena(self.numbers - worker) for worker in range(host.count)]
        for worker, arena in enumerate(host.arenas):
            self.arenas[host.name, host.instance, worker] = self.by_number[arena.number] = arena
        host.words = [ShardWords(arena.words) for arena in host.arenas]
        for words in host.words:
            words.recover()
        host.state = "up"

    def take(self, host: Host) -> None:
        """The newest map, by each worker."""
        reply = self.cluster.map_reply()
        if self.cluster.rebuilding or (reply.epoch == host.member.epoch and not host.member.fenced):
            return
        if host.member.take_map(ShardMap(reply)) is not None:
            for worker in range(host.count):
                self.order(host, worker)

    def order(self, host: Host, worker: int) -> None:
        msg, arena, words = host.member.order(worker), host.arenas[worker], host.words[worker]
        if not msg.epoch:
            words.fence()
            return
        before = arena.array().copy()
        words.retire(msg.epoch, msg.since, msg.roles)
        lost = (arena.array() == 0) & (arena.values != 0)
        bad = np.flatnonzero(lost & ~arena.displaced)
        assert not len(bad), f"shard {bad[0]}: {host.name} drops a value, and nobody else has owned it"
        self.note("values dropped", int(lost.sum()))
        arena.values[lost] = 0
        words.take()
        word = arena.array()
        arena.displaced &= (word == before) | (word == 0) | (word >= FROZEN)  # the others are its own anew
        arena.epoch = max(arena.epoch, msg.epoch)

    def speak(self, host: Host) -> None:
        """Exchange a server's messages of one heartbeat."""
        if host.state != "up":
            return
        cluster, epoch = self.cluster, host.member.epoch
        if host.joined:
            status, _ = answer(cluster.heartbeat(self.now, host.name, host.instance, epoch))
            if status == Status.UNKNOWN_NODE:
                self.note("unknown")
                host.joined = False
                host.member.fence()
                for worker in range(host.count):
                    self.order(host, worker)
        if not host.joined:
            infos = [WorkerInfo(worker, 0, 1, 0, GIB, "", "", "h", 1) for worker in range(host.count)]
            warm = host.warm and not host.was_joined
            status, message = answer(cluster.join(self.now, joining(host, warm, infos)))
            if status != Status.OK:
                return
            host.joined = host.was_joined = True
            if isinstance(message, Joined) and message.wants_map and (msg := host.member.offer()) is not None:
                cluster.offer(self.now, msg)
            self.look()
        self.take(host)
        for worker in range(host.count):
            moved = host.member.moved(worker, host.arenas[worker].words)
            if moved is not None:
                cluster.moved(self.now, moved)
        self.look()

    def move(self, host: Host) -> None:
        """Some of what moves in, by a mover with the server's map; all at once, as nothing of it is under test."""
        if host.state not in ("up", "cut"):
            return
        for worker, words in enumerate(host.words):
            for info, shards in host.member.tasks(worker):
                left = [shard for shard in shards if not host.arenas[worker].words[shard]]
                left = left if self.rng.random() < 0.5 else left[: len(left) // 2]
                source = next(other for other in self.hosts if other.name == info.node)
                reached = source.state in ("up", "cut") and source.instance == info.instance
                known = source.member.epoch
                frozen = source.words[info.worker].freeze(host.member.epoch, left, known) if reached and left else []
                if frozen is None or not left or words.fenced:
                    continue
                words.adopt(host.member.epoch, left, frozen)
                if frozen:
                    there = source.arenas[info.worker].values
                    host.arenas[worker].values[frozen] = there[frozen]
                    self.note("values moved", int((there[frozen] != 0).sum()))
                words.finish(left)

    def put(self, host: Host) -> None:
        """Clients with any map put values; only where the manager names the owner this is the shard's last value."""
        if host.state not in ("up", "cut"):
            return
        owners = self.owners()
        adopted = np.ones(SHARD_COUNT, bool)
        for number in np.unique(owners[owners != 0]).tolist():
            adopted &= (owners != number) | (self.by_number[number].array() != 0)
        for arena, words in zip(host.arenas, host.words):
            word = np.frombuffer(words.accepting, np.uint64)
            accepted = np.flatnonzero((word != 0) & (word < FROZEN))
            # Who has not adopted its shard yet leaves mutations to the one before: nothing of that is under test.
            accepted = accepted[adopted[accepted]]
            chosen = accepted[self.random.random(len(accepted)) < 0.3]
            self.values += 1
            arena.values[chosen] = self.values
            right = chosen[owners[chosen] == arena.number]
            self.current[right] = self.values
            self.note("puts", len(right))
            self.note("puts while the manager took it for dead", len(right) * (not self.serves(host)))

    def serves(self, host: Host) -> bool:
        node = self.cluster.nodes.get(host.name)
        return node is not None and node.serving

    # -- events -----------------------------------------------------------------------------------------

    def wait(self, seconds: float) -> None:
        for _ in range(round(seconds * 4)):
            self.now += 0.25
            for host in self.hosts:
                if host.state == "up" and self.rng.random() < 0.4:
                    self.speak(host)
            self.cluster.maintain(self.now)
            self.look()

    def stop(self, host: Host, *, warm: bool) -> None:
        if not warm:
            for arena, words in zip(host.arenas, host.words):
                words.retire(max(1, host.member.epoch), bytes(8 * SHARD_COUNT), bytes(SHARD_COUNT))
                arena.values[:] = 0
        if host.state == "up" and host.joined:
            self.cluster.leave(self.now, host.name, host.instance, warm)
        host.state = "warm" if warm else "down"
        self.look()

    def kill(self, host: Host) -> None:
        self.cluster.link_lost(self.now, host.name, host.instance)
        host.state = "down"

    def restart_manager(self) -> None:
        state = json.loads(json.dumps(self.cluster.to_state()))
        epoch = self.cluster.epoch + self.rng.choice([0, EPOCHS_RESERVED])
        self.cluster = Cluster.from_state(state, self.now, self.timing, epoch)
        for host in self.hosts:
            host.joined = False
        self.look()

    def back(self, hosts: list[Host]) -> None:
        """They go on, in any order, some time apart; a push may be read before anything else is done."""
        self.rng.shuffle(hosts)
        for host in hosts:
            if host.state in ("paused", "cut"):
                host.state = "up"
                if self.rng.random() < 0.5:
                    if host.joined and host.member.epoch:
                        self.take(host)
                    self.put(host)
                self.wait(self.rng.choice([0.0, 0.25, 2.0]))

    def all_away(self) -> None:
        """All that run stop at once, or are cut off."""
        away = [host for host in self.hosts if host.state == "up"]
        for host in away:
            host.state = self.rng.choice(["paused", "cut"])
        self.note("all away", bool(away))
        for _ in range(self.rng.choice([1, 2, 3])):
            self.wait(self.rng.choice([1.0, 4.5, 6.0, 12.0]))
            if self.rng.random() < 0.3:
                self.restart_manager()
            for host in away:
                self.put(host)
                self.move(host)
        self.back(away)

    def step(self) -> None:
        rng = self.rng
        host = rng.choice(self.hosts)
        event = rng.choice(["wait", "put", "put", "move", "away", "one away", "kill", "stop", "manager", "worker",
                            "drain", "new"])  # fmt: skip
        if host.state in ("down", "warm"):
            self.start(host, warm=host.state == "warm" and rng.random() < 0.8)
        elif event == "put":
            for each in self.hosts:
                self.put(each)
        elif event == "move":
            for each in self.hosts:
                self.move(each)
        elif event == "away":
            self.all_away()
        elif event == "one away" and host.state == "up":
            host.state = rng.choice(["paused", "cut"])
        elif event == "one away":
            self.back([host])
        elif event == "kill" and rng.random() < 0.4:
            self.kill(host)
        elif event == "stop" and host.state == "up" and rng.random() < 0.6:
            self.stop(host, warm=rng.random() < 0.7)
        elif event == "manager":
            self.restart_manager()
        elif event == "worker" and host.state in ("up", "cut"):
            worker = rng.randrange(host.count)
            host.words[worker] = ShardWords(host.arenas[worker].words)
            host.words[worker].recover()
            if host.member.map is not None:
                self.order(host, worker)
        elif event == "drain":
            self.cluster.drain(self.now, host.name, rng.random() < 0.5)
        elif event == "new" and len(self.hosts) < 4 and rng.random() < 0.3:
            self.hosts.append(Host(f"h{len(self.hosts)}", 1))
        self.look()
        self.wait(rng.choice([0.25, 1.0, 1.0, 3.0, 8.0]))

    def run(self, steps: int) -> dict[str, int]:
        for host in self.hosts:
            self.start(host, warm=False)
        self.wait(3.0)
        walk(steps, self.step)
        return self.seen


SEEDS = range(12)


@pytest.mark.parametrize("seed", dose(SEEDS, quick=1))
def test_history(seed: int) -> None:
    seen = History(seed).run(dosed(40, quick=20))
    assert seen["values there"] and seen["puts"]


@pytest.mark.full
def test_histories_see_what_they_are_for() -> None:
    total: dict[str, int] = {}
    for seed in range(100, 106):
        for what, count in History(seed).run(30).items():
            total[what] = total.get(what, 0) + count
    wanted = ("all away", "unknown", "values moved", "values dropped", "puts while the manager took it for dead")
    assert all(total.get(what) for what in wanted), total


def found(text: str, seeds: range = SEEDS) -> None:
    """Check that one of the histories finds an injected bug."""
    first_failure(seeds, lambda seed: History(seed).run(40), AssertionError, CorruptionError, wanted=[text])


def test_mutation_since_that_stays_over_another_owner_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that gets its shards back keeps their epoch, although another one has owned them."""
    real: Callable[..., None] = Cluster._remap

    def keeps(self: Cluster, actions: list[Action], **about: Any) -> None:
        tables, known = self._placement.tables, self.__dict__.setdefault("known", {})
        real(self, actions, **about)
        tables = self._placement.tables
        for place in np.unique(tables.owners[tables.owners != NO_OWNER]).tolist():
            key = self._placement.keys[place]
            mine = np.flatnonzero(tables.owners == place)
            memory = known.setdefault(key, np.zeros(SHARD_COUNT, np.uint64))
            again = mine[memory[mine] != 0]
            tables.since[again] = memory[again]
            memory[mine] = tables.since[mine]
        self._reply = None

    monkeypatch.setattr(Cluster, "_remap", keeps)
    found("another owner, since the same epoch")


@pytest.mark.parametrize("bug", [False, True])
def test_mutation_superseded_values_are_seen_whatever_the_epochs(monkeypatch: pytest.MonkeyPatch, bug: bool) -> None:
    """A worker that keeps its words, and with them its values, over another's tenure: what ``since`` is there for."""
    real = ShardWords.retire

    def keeps(self: ShardWords, epoch: int, since: bytes, roles: bytes) -> bool:
        before = self._array().copy()
        gone = real(self, epoch, since, roles)
        for shard in np.flatnonzero((before != 0) & (self._array() == 0)).tolist():
            self.words[shard] = int(before[shard])
        self._recount()
        return gone

    history = History(0)
    history.timing = Timing(moves_at_once=SHARD_COUNT)
    history.cluster = Cluster(1, 0.0, history.timing)
    history.hosts = [Host("h0", 1), Host("h1", 1)]
    for host in history.hosts:
        history.start(host, warm=False)
    history.wait(3.0)
    for _ in range(3):
        for host in history.hosts:
            history.move(host)
        history.wait(2.0)
        history.put(history.hosts[0])
    history.hosts[0].state = "paused"
    history.wait(9.0)
    for _ in range(8):
        history.put(history.hosts[1])

    def first_again() -> None:
        history.hosts[0].state = "up"
        history.wait(6.0)
        history.hosts[1].state = "paused"
        history.wait(9.0)

    if bug:
        monkeypatch.setattr(ShardWords, "retire", keeps)
        with pytest.raises(AssertionError, match="superseded value"):
            first_again()
    else:
        first_again()
        assert history.seen["values dropped"] > 100


def test_mutation_shards_that_are_taken_for_nobody_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shards of dead servers have no owner at once, and begin anew with their next owner."""
    real = placement.rebalance

    def hasty(tables: Any, weights: Any, standing: Any, limit: int, heard: Any) -> Any:
        standing = [placement.Eligibility.DEAD if each is placement.Eligibility.OVERDUE else each for each in standing]
        return real(tables, weights, standing, limit, heard)

    monkeypatch.setattr(placement, "rebalance", hasty)
    monkeypatch.setattr(placement.Placement, "check", lambda self, *rest, **about: None)
    found("since a new epoch")

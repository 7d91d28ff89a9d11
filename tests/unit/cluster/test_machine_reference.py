"""The manager's state machine against a reference model, by seed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable

import numpy as np
import pytest

from simm.cluster import placement
from simm.cluster import placement as placement_module
from simm.cluster.machine import Cluster
from simm.cluster.nodes import Node, Timing
from simm.cluster.shard_map import ShardMap
from simm.constants import NO_OWNER, SHARD_COUNT
from simm.errors import CorruptionError
from simm.wire.messages import (
    Done,
    Moved,
    Status,
)
from simm.wire.shard_set import bitmap_of
from tests.models.explorer import first_failure
from tests.support.dose import dose, dosed
from tests.support.machine import GIB, SEEDS, answer, join, states
from tests.support.shards import shards_held


class ReferenceModel:
    """Membership from the plainest reading of the rules: remember the last sign of life, decide when asked."""

    def __init__(self, timing: Timing) -> None:
        self.timing = timing
        self.heard: dict[str, float] = {}
        self.instance: dict[str, int] = {}
        self.capacities: dict[str, tuple[int, ...]] = {}
        self.gone: set[str] = set()  # left or dead: must join again
        self.left: dict[str, float] = {}  # until when its shards wait for it
        self.cold: set[str] = set()  # left, and will not be back with anything
        self.unlinked: set[str] = set()
        self.draining: set[str] = set()
        self.heard_from: set[str] = set()  # by this manager, and not suspect
        self.suspects: set[str] = set()
        self.spared: set[str] = set()  # given more time in this absence

    def quiet(self, name: str, now: float) -> float:
        return (now - self.heard[name]) / self.timing.heartbeat_s

    def back(self, now: float, name: str, mapped: set[str]) -> None:
        """Note a heartbeat. If no node was heard from, give the others their time again, once."""
        if name in self.heard_from:
            return
        others = mapped - {name}
        if not others & self.heard_from:
            for other in others & (self.gone | self.suspects) - self.spared:
                self.spared.add(other)
                if other in self.left:
                    self.left[other] = now + self.timing.restart_grace_s
                else:
                    self.heard[other] = now
                    self.gone.discard(other)
                    self.suspects.discard(other)
                    self.unlinked.add(other)

    def present(self, name: str) -> None:
        self.heard_from.add(name)
        self.suspects.discard(name)
        self.spared.discard(name)

    def join(
        self, now: float, name: str, instance: int, capacities: tuple[int, ...], warm: bool, mapped: set[str]
    ) -> int:
        known = self.instance.get(name)
        lives = known is not None and name not in self.gone and name not in self.unlinked
        if lives and known != instance and self.quiet(name, now) < self.timing.suspect_after:
            speaks = name in self.heard_from and self.quiet(name, now) < 1.5
            return Status.NAME_TAKEN if speaks else Status.BUSY
        if known is not None and (known == instance or warm):
            self.back(now, name, mapped)
        self.present(name)
        self.cold.discard(name)
        self.instance[name], self.heard[name], self.capacities[name] = instance, now, capacities
        self.gone.discard(name)
        self.left.pop(name, None)
        self.unlinked.discard(name)
        return Status.OK

    def member(self, name: str, instance: int) -> bool:
        return self.instance.get(name) == instance and name not in self.gone

    def leave(self, now: float, name: str, warm: bool) -> None:
        self.gone.add(name)
        self.heard_from.discard(name)
        self.suspects.discard(name)
        self.left[name] = now + (self.timing.restart_grace_s if warm else 0)
        if not warm:
            self.cold.add(name)

    def drain(self, name: str, on: bool) -> int:
        others = set(self.instance) - self.gone - self.draining - {name}
        if name not in self.instance:
            return Status.UNKNOWN_NODE
        if on and not others and name not in self.gone and name not in self.draining:
            return Status.UNAVAILABLE
        self.draining.symmetric_difference_update({name} if (name in self.draining) != on else set())
        return Status.OK

    def maintain(self, now: float) -> None:
        for name in self.heard:
            if self.quiet(name, now) >= self.timing.dead_after:
                self.gone.add(name)
                self.suspects.discard(name)
            elif self.quiet(name, now) >= self.timing.suspect_after and name not in self.gone:
                self.suspects.add(name)
            if name in self.gone | self.suspects:
                self.heard_from.discard(name)

    def in_time(self, name: str, now: float) -> bool:
        """No worker may take its shards yet. Later it has them until a worker does."""
        if name in self.left:
            return now < self.left[name]
        grace = self.timing.dead_after + self.timing.grace_s / self.timing.heartbeat_s
        return name not in self.gone or self.quiet(name, now) < grace

    def about(self, now: float) -> dict[str, set[str]]:
        """What :func:`check_step` wants to know."""
        waited_for = {name for name in self.heard if self.in_time(name, now)}
        return {"waited_for": waited_for, "heard_from": set(self.heard_from), "cold": set(self.cold)}

    def live(self, now: float, named: set[str]) -> dict[tuple[str, int], int]:
        return {
            (name, number): capacity
            for name, capacities in self.capacities.items()
            if self.in_time(name, now) or name in named
            for number, capacity in enumerate(capacities)
        }

    def serving(self) -> set[str]:
        return set(self.instance) - self.gone


class Picture:
    """A map as its readers see it. Workers have numbers that hold for all pictures of one ``codes``; 0 is no worker."""

    def __init__(self, cluster: Cluster, codes: dict[tuple[str, int], int]) -> None:
        shard_map = ShardMap(cluster.map_reply())
        self.epoch = shard_map.epoch
        self.codes = codes
        keys = [(info.node, info.worker) for info in shard_map.workers]
        numbers = [codes.setdefault(key, len(codes) + 1) for key in keys]
        table = np.zeros(NO_OWNER + 1, np.int64)
        table[: len(numbers)] = numbers
        self.owners = table[np.array(shard_map.owners)]
        self.previous = np.zeros(SHARD_COUNT, np.int64)
        for shard, at in shard_map.previous.items():
            self.previous[shard] = numbers[at]
        self.since = np.array(shard_map.since)
        self.members = set(keys)
        #: Not of the map: how many shards wait, and up to which map each worker has heard.
        self.waiting = cluster.waiting
        self.heard = np.zeros(len(codes) + 1, np.int64)
        for (name, _), number in codes.items():
            if name in cluster.nodes:
                self.heard[number] = cluster.nodes[name].acked_epoch

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Picture)
        tables = zip((self.owners, self.previous, self.since), (other.owners, other.previous, other.since))
        return self.members == other.members and all(bool((mine == theirs).all()) for mine, theirs in tables)

    def code(self, name: str, number: int) -> int:
        return self.codes.get((name, number), -1)

    def named(self) -> set[str]:
        """Return the nodes that own a shard or are the previous owner of one."""
        numbers = {*self.owners.tolist(), *self.previous.tolist()}
        return {name for (name, _), number in self.codes.items() if number in numbers}


def check_step(
    before: Picture, after: Picture, serving: set[str], limit: int, free: Iterable[int] = (),
    anew: Iterable[int] = (), *, waited_for: set[str], heard_from: set[str], cold: Iterable[str] = (),
) -> None:  # fmt: skip
    """Check what must hold for two maps that are one event apart, whatever the event.

    ``free``: shards whose move has ended with the event, so that they may go on with the next. ``anew``: shards of a
    worker whose arena may have values from before another worker owned them; they have no owner until it answers.
    ``waited_for``: nodes whose shards are not reassigned yet. ``heard_from``: nodes that are not away. ``cold``: nodes
    that gave their shards up.
    """
    assert after.epoch >= before.epoch
    if after.epoch == before.epoch:
        assert after == before, "one epoch, two maps"
        return
    codes = after.codes
    lives = np.array([False, *(name in serving for name, _ in codes)])
    stays = np.array([False, *(name in waited_for and (name, number) in after.members for name, number in codes)])
    listed = np.array([False, *(key in after.members for key in codes)])
    changed = after.owners != before.owners
    assert (after.since[changed] > before.since[changed]).all() and (after.since >= before.since).all()
    assert (after.since[changed] == after.epoch).all(), "one event makes one map"
    assert (after.since <= after.epoch).all()
    moving = after.previous != 0
    assert (after.previous[moving] != after.owners[moving]).all()
    away = np.array([False, *(name not in heard_from for name, _ in codes)])
    assert (lives[after.previous] | away[after.owners])[moving].all(), "a previous owner serves, if the owner is there"
    assert listed[after.owners[after.owners != 0]].all()
    if serving:
        assert (after.owners == 0).sum() <= after.waiting, "nobody's only while nobody has heard whose it was"
    given, taken = changed & (after.owners != 0), changed & moving
    assert (after.heard[after.owners[given]] >= before.since[given]).all(), "who missed a map might show old values"
    assert (after.heard[after.previous[taken]] >= before.since[taken]).all(), "and so might a previous owner"
    # A shard on its way stays there while its owner is in the map, and its previous owner serves.
    was_moving = (lives & listed)[before.previous]
    was_moving[list(free)] = False
    there = stays[before.owners]
    there[list(anew)] = False
    known = np.array([True, *((name, number) not in before.members or name in {*cold, *waited_for}
                              for name, number in codes)])  # fmt: skip
    assert (after.owners[changed & ~known[before.owners]] != 0).all(), "nobody takes a shard to give it to nobody"
    assert not (changed & was_moving & there).any()
    assert ((after.previous == before.previous) | (after.previous == 0) | changed)[was_moving].all()
    # Taken from one who is in the map: it is named. Taken from one who is gone: nobody is.
    assert (after.previous[changed & there] == before.owners[changed & there]).all()
    assert (after.previous[changed & ~there] == 0).all()
    into = np.bincount(after.owners[moving], minlength=len(codes) + 1)
    already = np.bincount(after.owners[(before.previous != 0) & ~changed], minlength=len(codes) + 1)
    assert (into <= np.maximum(limit, already)).all()


@pytest.mark.parametrize("seed", dose(SEEDS, quick=1))
def test_storm_against_the_reference_model(seed: int) -> None:
    rng = random.Random(seed)
    # Binary fractions only, so that both sides' sums of time are exact.
    timing = Timing(
        1.0, 3, 5, rng.choice([0.0, 4.0]), rng.choice([0.0, 2.0, 6.0]), rng.choice([500, 2048, SHARD_COUNT])
    )
    cluster, reference = Cluster(seed, 0.0, timing), ReferenceModel(timing)
    names = [f"n{number}" for number in range(5)]
    silent: set[str] = set()
    instances: dict[str, int] = {}
    now, epochs, never_sent = 0.0, 0, range(0)
    codes: dict[tuple[str, int], int] = {}
    before = Picture(cluster, codes)
    seen = set()
    for _ in range(dosed(220, quick=120)):
        now += rng.choice([0.0, 0.25, 0.5, 0.5])
        name = rng.choice(names)
        event = rng.choice([
            "join", "new", "leave", "silence", "wake", "unlink", "restart", "beat", "beat", "moved", "moved", "moved",
            "drain", "resume", "nothing",
        ])  # fmt: skip
        known = instances.get(name)
        cold = ""
        free: list[int] = []
        anew: list[int] = []
        if event in ("join", "new"):
            instance = rng.getrandbits(64) if event == "new" or known is None else known
            capacities = tuple(rng.choice([GIB, GIB, 3 * GIB]) for _ in range(rng.choice([1, 1, 2])))
            warm = rng.random() < 0.5
            mapped = {node for node, _ in before.members}
            expected = reference.join(now, name, instance, capacities, warm, mapped)
            msg = join(
                name, instance, *capacities, warm=warm, epoch=rng.choice([0, before.epoch]) if cluster.nodes else 0
            )
            assert answer(cluster.join(now, msg))[0] is expected
            if expected == Status.OK:
                instances[name] = instance
                if known not in (None, instance):
                    cold = "" if warm and msg.epoch else name
                    numbers = [code for (node, _), code in codes.items() if node == name]
                    free = np.flatnonzero(np.isin(before.owners, numbers) | np.isin(before.previous, numbers)).tolist()
                    if msg.epoch:
                        lost = before.since > (msg.epoch if warm else 0)
                        anew = np.flatnonzero(np.isin(before.owners, numbers) & lost).tolist()
        elif event == "leave" and known is not None:
            member, warm = reference.member(name, known), rng.random() < 0.5
            status = answer(cluster.leave(now, name, known, warm))[0]
            assert status is (Status.OK if member else Status.UNKNOWN_NODE)
            if member:
                reference.leave(now, name, warm)
        elif event == "silence":
            silent.add(name)
        elif event == "wake":
            silent.discard(name)
        elif event == "unlink" and known is not None:
            cluster.link_lost(now, name, known)
            if reference.member(name, known):
                reference.unlinked.add(name)
        elif event in ("drain", "resume"):
            on = event == "drain" and rng.random() < 0.7
            status, message = answer(cluster.drain(now, name, on))
            assert status is reference.drain(name, on)
            if status == Status.OK:
                held = shards_held(cluster)
                assert message == Done(sum(count for (node, _), count in held.items() if node == name))
        elif event == "moved" and known is not None:
            number, epoch = rng.choice([0, 0, 1]), rng.choice([before.epoch, before.epoch, before.epoch - 3])
            mine = np.flatnonzero(before.owners == before.code(name, number)).tolist()
            shards = mine if rng.random() < 0.6 else rng.sample(range(SHARD_COUNT), 3000)
            msg_moved = Moved(known, max(epoch, 0), name, number, bitmap_of(shards))
            status, message = answer(cluster.moved(now, msg_moved))
            if reference.member(name, known):
                code = before.code(name, number)
                known_to_it = (before.owners == code) & (before.previous != 0) & (before.since <= max(epoch, 0))
                arrived = free = [shard for shard in shards if known_to_it[shard]]
                assert (status, message) == (Status.OK, Done(len(arrived)))
                # It may have had to move on at once.
                assert all(cluster.previous(shard) in (None, (name, number)) for shard in arrived)
                if arrived:
                    seen.add("arrived")
            else:
                assert status == Status.UNKNOWN_NODE
        elif event == "beat":
            for name in names:
                if name in instances and name not in silent:
                    member = reference.member(name, instances[name])
                    late = rng.choice([0, 0, 0, 1, 3])  # maps behind
                    named = max(0, before.epoch - late)
                    named = before.epoch if named in never_sent else named
                    status = answer(cluster.heartbeat(now, name, instances[name], named))[0]
                    assert status is (Status.OK if member else Status.UNKNOWN_NODE)
                    if member:
                        reference.back(now, name, {node for node, _ in before.members})
                        reference.heard[name] = now
                        reference.unlinked.discard(name)
                        reference.present(name)
                    cluster.check()
                    after = Picture(cluster, codes)
                    check_step(before, after, reference.serving(), timing.moves_at_once, **reference.about(now))
                    before = after
        after = Picture(cluster, codes)
        check_step(before, after, reference.serving(), timing.moves_at_once, free, anew, **reference.about(now))
        cluster.check()
        if cold:
            mine = np.isin(after.owners, [code for (node, _), code in codes.items() if node == cold])
            assert (after.since[mine] == after.epoch).all(), "nothing of an older arena is taken for good"
            moved_in = mine & (after.previous != 0)
            assert (after.previous[moved_in] == before.owners[moved_in]).all()
        before = after
        cluster.maintain(now)
        reference.maintain(now)
        after = Picture(cluster, codes)
        check_step(before, after, reference.serving(), timing.moves_at_once, **reference.about(now))
        cluster.check()

        live = reference.live(now, after.named())
        assert {(info.node, info.worker): info.capacity for info in cluster.live_workers()} == live
        assert {name for name, state in states(cluster).items() if state in ("dead", "left")} == reference.gone
        assert {name for name, node in cluster.nodes.items() if node.draining} == reference.draining
        assert after.members == set(live)
        seen |= set(states(cluster).values()) | ({"moving"} if (after.previous != 0).any() else set())
        epochs += after.epoch != before.epoch
        before = after
        state = json.loads(json.dumps(cluster.to_state()))
        again = Cluster.from_state(state, now, timing)
        assert again.map_reply()._replace(epoch=cluster.epoch) == cluster.map_reply()
        assert again.epoch > cluster.epoch and again.to_state()["since"] == state["since"]
        if event == "restart":
            never_sent = range(cluster.epoch + 1, again.epoch)
            cluster = again
            for name in reference.heard:  # everyone is given the time of a fresh one, or the whole grace
                if name in {node for node, _ in after.members}:
                    reference.heard[name] = now - (timing.dead_after if name in reference.gone else 0)
                    if name in reference.left:
                        reference.left[name] = now + timing.restart_grace_s
            reference.unlinked.clear()
            reference.heard_from.clear()
            reference.suspects.clear()
            reference.spared.clear()
    assert seen >= {"running", "suspect", "dead", "draining", "left", "moving", "arrived"}


def test_mutation_a_deal_that_forgets_previous_owners_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """If settling kept previous owners that do not serve, or moved shards on the move, the storm would say so."""
    monkeypatch.setattr(Node, "serving", property(lambda node: not node.released))
    with pytest.raises((AssertionError, CorruptionError)):
        test_storm_against_the_reference_model(0)


def test_mutation_a_deal_to_those_who_missed_a_map_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = placement_module.rebalance
    monkeypatch.setattr(
        placement, "rebalance", lambda tables, weights, standing, limit, heard: real(tables, weights, standing, limit)
    )
    _, text = first_failure(SEEDS, test_storm_against_the_reference_model, AssertionError)
    assert "old values" in text or "so might a previous owner" in text


@pytest.mark.full
def test_mutation_an_acknowledgement_that_is_not_heeded_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard may wait for a node to acknowledge a map: whoever rebalances too seldom leaves a step undone."""
    monkeypatch.setattr(placement_module.Placement, "awaits", lambda *_: False)
    first_failure(range(16), test_storm_against_the_reference_model, AssertionError, CorruptionError)

"""Namespaces that advance in the simulator: the product's own code of epochs, with injected bugs that are found."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from simm.arena.layout import EPOCH_WORD, LEASE_WORD, NAMESPACE_LINE_BYTES, NAMESPACES
from simm.arena.namespaces import NamespaceTable
from simm.arena.reader import ArenaReader
from simm.cluster import machine, recovery
from simm.cluster.epochs import Acknowledged, NamespaceEpochs
from simm.cluster.machine import EPOCHS_RESERVED
from simm.sdk.ops.epochs import ClientEpoch
from simm.sim.faults import DEFAULT
from simm.sim.oracle import SimFailure
from simm.sim.world import World, run_scenario, scenario
from tests.models.explorer import first_failure
from tests.support.dose import dose

#: Hosts that are cut off for longer than a lease, clients that are stopped, and workers that die.
CUTS: dict[str, Any] = {
    "advances": 0.9, "faults": ("island", "island", "worker", "client-pause"), "fault_s": 1.2,
    "fault_lasts_s": (2.0, 5.0), "nodes": 3, "clients": 4, "seconds": 16.0, "op_s": 0.03, "keys": 10, "entries": 200,
    "lease_s": 1.0, "heartbeat_s": 0.5,
}  # fmt: skip
#: All kinds of faults. The manager's clock does not jump: it is CLOCK_MONOTONIC, and leases are measured by it.
ALL: dict[str, Any] = {
    "advances": 0.8, "op_s": 0.03, "fault_s": 1.0, "seconds": 14.0,
    "faults": (*(kind for kind in DEFAULT if kind != "clock"), "island", "client-pause"),
}  # fmt: skip


def fail(seed: int, **options: Any) -> None:
    """Run a scenario; raise SimFailure if it fails."""
    report = run_scenario(seed, **options)
    if report.failure:
        raise SimFailure(report.failure)


def found_by_cuts(seeds: int, *wanted: str) -> None:
    """Fail unless one of these seeds fails in this way."""
    first_failure(range(seeds), partial(fail, **CUTS), SimFailure, wanted=wanted)


@pytest.mark.parametrize("options", [CUTS, ALL])
@pytest.mark.parametrize("seed", dose(range(8), 1))
def test_nothing_old_is_read_after_an_advance(seed: int, options: dict[str, Any]) -> None:
    report = run_scenario(seed, **options)
    assert not report.failure, report.failure
    assert report.figures["advanced"] > 3 and report.figures["epoch_hits"] > 50


@pytest.mark.slow
@pytest.mark.parametrize("options", [CUTS, ALL])
def test_nothing_old_is_read_by_many_seeds(options: dict[str, Any]) -> None:
    advanced = unconfirmed = 0
    for seed in range(1000, 1150):
        report = run_scenario(seed, **options)
        assert not report.failure, (seed, report.failure)
        advanced += report.figures["advanced"]
        unconfirmed += report.figures["unconfirmed"]
    assert advanced > 1000 and unconfirmed > 0


OLD = "what was put before an advance that had returned"
#: A manager that loses its state, servers that are away together, and hosts that are cut off.
LOST: dict[str, Any] = {**ALL, "faults": ("forget", "all-away", "manager", "crash", "island", "warm")}


def test_two_lives_of_a_manager_that_no_server_has_seen() -> None:
    """The state is lost then. The next life must not give their epochs to other maps."""
    report = run_scenario(1354, **ALL)
    assert not report.failure, report.failure
    assert report.figures["faults"]["all-away"] and report.figures["faults"]["forget"]


def test_a_manager_that_goes_on_at_a_fixed_distance_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """And does not hear what the clients have. If it did, it would go beyond that."""
    monkeypatch.setattr(recovery, "beyond_lost", lambda known, _chance: known + EPOCHS_RESERVED)
    monkeypatch.setattr(machine, "beyond_stored", lambda known, _chance: known)
    assert not run_scenario(1354, **ALL).failure
    monkeypatch.setattr(recovery.Recovery, "claim", lambda *_: None)
    with pytest.raises(SimFailure, match="names two maps"):
        fail(1354, **ALL)


def test_an_advance_of_a_manager_that_has_lost_its_state_and_met_nobody() -> None:
    """All servers are cut off, with values of before."""
    report = run_scenario(30009, **LOST)
    assert not report.failure, report.failure


def test_a_manager_without_state_that_takes_itself_for_the_first_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = NamespaceEpochs.awaited
    done: Any = SimpleNamespace(name="done", told_epoch=1 << 62, follows=True, left=False)

    def trusting(self: NamespaceEpochs, name: str, epoch: int, nodes: Acknowledged, now: float, since: float,
                 unsure: float, lease_s: float) -> str:  # fmt: skip
        if nodes.empty:
            nodes, unsure = Acknowledged([done]), -1e9
        return real(self, name, epoch, nodes, now, since, unsure, lease_s)

    monkeypatch.setattr(NamespaceEpochs, "awaited", trusting)
    with pytest.raises(SimFailure, match=OLD):
        fail(30009, **LOST)


def test_an_advance_that_does_not_wait_for_leases_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = NamespaceEpochs.awaited

    done: Any = SimpleNamespace(name="done", told_epoch=1 << 62, follows=True, left=False)

    def hasty(self: NamespaceEpochs, name: str, epoch: int, nodes: Acknowledged, *rest: Any) -> str:
        return real(self, name, epoch, Acknowledged([done]) if self._known[name].settled else nodes, *rest)

    monkeypatch.setattr(NamespaceEpochs, "awaited", hasty)
    found_by_cuts(12, OLD)


def test_a_client_that_ignores_a_newer_epoch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads nothing old, as servers refuse that. But it never puts again."""
    real = ClientEpoch.advanced
    monkeypatch.setattr(ClientEpoch, "advanced", lambda self, epoch: None if self.epoch else real(self, epoch))
    found_by_cuts(2, "could not put after an advance")


@pytest.mark.full
def test_a_server_that_forgets_the_epoch_after_a_restart_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's successor goes on with the epoch before, and its supervisor tells it only of newer ones."""
    stored: dict[int, list[int]] = {}
    store, recover = NamespaceTable._store_epoch, NamespaceTable.recover

    def noted(self: NamespaceTable, number: int, epoch: int) -> None:
        store(self, number, epoch)
        stored.setdefault(id(self._lines.obj), [0]).append(epoch)

    def forgetful(self: NamespaceTable) -> list[str]:
        notes = recover(self)
        past = stored.get(id(self._lines.obj), [0])
        for number in list(self.tags):
            self._epochs[self.names[number]] = past[-1]
            if past[-2]:
                store(self, number, past[-2])
        return notes

    monkeypatch.setattr(NamespaceTable, "_store_epoch", noted)
    monkeypatch.setattr(NamespaceTable, "recover", forgetful)
    options = {**CUTS, "faults": ("island", "worker", "worker"), "fault_s": 0.4, "fault_lasts_s": (0.5, 2.0)}
    run = partial(fail, **{**options, "nodes": 2, "op_s": 0.04, "keys": 8, "clients": 6})
    first_failure(range(60), run, SimFailure, wanted=[OLD])


@pytest.mark.full
@pytest.mark.parametrize("word", [LEASE_WORD, EPOCH_WORD])
def test_a_reader_that_leaves_out_a_look_is_found(monkeypatch: pytest.MonkeyPatch, word: int) -> None:
    real = ArenaReader.is_current

    class Words:
        """The words of an arena, of which the reader takes one for granted."""

        def __init__(self, words: Any, tag: int) -> None:
            self.words, self.tag = words, tag

        def __getitem__(self, at: int) -> int:
            line = at < NAMESPACES * NAMESPACE_LINE_BYTES // 8 and at % (NAMESPACE_LINE_BYTES // 8) == word
            granted = 1 << 62 if word == LEASE_WORD else self.tag
            return granted if line else self.words[at]

    def careless(self: ArenaReader, found: Any) -> bool:
        words: Any = self.words
        tag = words[self._slot_word + 8 * found.slot + 2] >> 32
        self.words = Words(words, tag)  # type: ignore[assignment]
        try:
            return real(self, found)
        finally:
            self.words = words

    monkeypatch.setattr(ArenaReader, "is_current", careless)
    found_by_cuts(20, OLD)


def test_the_oracle_can_fail() -> None:
    """Positive control: nobody is excepted, also if both are cut off."""
    world = World(scenario(1, faults=()))
    world.build()
    world.net.run(5.0)
    oracle, client, node = world.oracle, world.clients[0], next(iter(world.servers))
    oracle.advanced(7)
    oracle.advanced(5)
    oracle.of_epoch(client, node, 8, oracle.last_advance)
    oracle.trouble("*", True)
    with pytest.raises(SimFailure, match=OLD):
        oracle.of_epoch(client, node, 6, oracle.last_advance)

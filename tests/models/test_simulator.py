"""The simulator: the same seed is the same run, injected bugs are found, many seeds are clean."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simm.cluster.nodes import Timing
from simm.errors import SimmError, UsageError
from simm.sim.faults import DEFAULT, FAULTS
from simm.sim.manager import ManagerHost
from simm.sim.net import Net, Process
from simm.sim.oracle import SimFailure
from simm.sim.worker import Worker
from simm.sim.world import Options, Report, World, run_scenario, scenario
from simm.tools import simulate
from simm.wire.epoch_messages import SUBSCRIBE_EPOCHS, SUBSCRIBE_MAPS
from simm.wire.messages import MapGet, Status
from tests.models.explorer import first_failure
from tests.support.dose import dose, dosed

ROOT = Path(__file__).resolve().parents[2]
JOBS = min(4, os.cpu_count() or 1)
#: Clients that hold an old map for a while, and shards that move.
CUT_OFF = ("join", "drain", "partition", "loss")


def seeds_clean(first: int, count: int) -> None:
    bad, events = simulate.failures(range(first, first + count), JOBS, {})
    print(f"seeds {first} to {first + count - 1}: {events:,} events")
    assert not bad, "again with: simm simulate --replay SEED -v"


def commit_seed() -> int:
    """A number out of the commit under test, so that every commit looks at other seeds; 0 without git."""
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return int(found.stdout[:7], 16) if found.returncode == 0 else 0


# --- many seeds -----------------------------------------------------------------------------------


@pytest.mark.fault("F21", ci="100 seeds")
@pytest.mark.full
def test_100_seeds() -> None:
    seeds_clean(0, 80)
    seeds_clean(1_000_000 + commit_seed(), 20)


@pytest.mark.fault("F21", whole="10,000 seeds")
@pytest.mark.slow
def test_10000_seeds() -> None:
    seeds_clean(2_000_000, 10_000)


# --- the same again ---------------------------------------------------------------------------------


def same(one: Report, two: Report) -> bool:
    return (one.trace, one.failure, one.last, one.figures) == (two.trace, two.failure, two.last, two.figures)


@pytest.mark.parametrize("seed", dose([3, 24, 69], quick=1))
def test_a_seed_is_a_run(seed: int) -> None:
    report = run_scenario(seed)
    assert same(report, run_scenario(seed))
    assert report.trace != run_scenario(seed + 1).trace


@pytest.mark.full
def test_a_failure_comes_again_whatever_the_hash_seed() -> None:
    """In another process, by the command line: its last events are printed, with the same trace hash."""
    code = (
        "import simm.sim.world as w, simm.tools.simulate as s\n"
        "r = w.run_scenario(%d, plants=frozenset(['no_freeze']), faults=%r)\n"
        "print(r.trace, r.failure); s.print_last(r)\n"
    )
    seed = found_by("no_freeze", faults=CUT_OFF)
    runs = [
        subprocess.run(
            [sys.executable, "-c", code % (seed, CUT_OFF)], cwd=ROOT, capture_output=True, text=True,
            env={**os.environ, "PYTHONHASHSEED": number, "PYTHONPATH": str(ROOT)}, timeout=300, check=True,
        ).stdout
        for number in ("1", "2")
    ]  # fmt: skip
    assert runs[0] == runs[1]
    assert "FAILURE" in runs[0] and "manager: epoch" in runs[0]


# --- injected bugs ------------------------------------------------------------------------------------


def fail(seed: int, **options: Any) -> None:
    """Run a scenario; raise SimFailure if it fails."""
    report = run_scenario(seed, **options)
    if report.failure:
        raise SimFailure(report.failure)


def found_by(bug: str, **options: Any) -> int:
    """Return the first seed that finds an injected bug."""
    run = partial(fail, plants=frozenset([bug]), **options)
    return first_failure(range(60), run, SimFailure)[0]


@pytest.mark.full
@pytest.mark.parametrize(
    ("bug", "faults", "text"),
    [
        ("no_freeze", CUT_OFF, "took a mutation|version|accepted twice"),
        ("ignores_wrong_owner", CUT_OFF, "version|did not find"),
    ],
)
def test_an_injected_bug_is_found(bug: str, faults: tuple[str, ...], text: str) -> None:
    seed = found_by(bug, faults=faults)
    report = run_scenario(seed, plants=frozenset([bug]), faults=faults)
    assert any(part in report.failure for part in text.split("|")), report.failure
    assert "FAILURE" in report.last[-1][1]
    # Without it the same seed is clean.
    assert not run_scenario(seed, faults=faults).failure


def test_a_manager_that_confirms_before_it_has_stored_is_found() -> None:
    """It dies 8 ms after it has confirmed that a drain has ended, and the next one drains on."""
    seed = 2_001_976
    assert "is draining" in run_scenario(seed, plants=frozenset(["answers_early"])).failure
    assert not run_scenario(seed).failure


@pytest.mark.full
def test_a_manager_that_uses_epochs_again_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A manager that lost its state begins anew by its old name and ignores what servers report."""
    from simm.cluster.machine import Cluster
    from simm.cluster.recovery import Recovery

    made = Cluster.__init__
    monkeypatch.setattr(Cluster, "__init__", lambda self, _cluster, *rest: made(self, 1, *rest))
    monkeypatch.setattr(Cluster, "_note_epoch", lambda self, epoch, **_who: None)
    monkeypatch.setattr(Recovery, "is_unknown", lambda self, epoch, current, limit: False)
    monkeypatch.setattr(Recovery, "beyond", lambda self, epoch: epoch)  # of a server that it takes in
    run = partial(fail, faults=("forget", "join"))
    first_failure(range(6), run, SimFailure, wanted=("names two maps", "accepted at epoch"))


@pytest.mark.full
def test_rules_of_the_real_code_are_under_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulator drives the real cluster/ and arena/shard_words.py: break one of their rules and it is seen."""
    from simm.arena.shard_words import ShardWords

    monkeypatch.setattr(ShardWords, "note_dropped", lambda self, digest: None)
    run = partial(fail, faults=("join", "drain"), keys=6, op_s=0.02)
    first_failure(range(12), run, SimFailure, wanted=["version"])


def test_a_manager_that_never_calls_anybody_dead_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from simm.cluster.machine import Cluster

    monkeypatch.setattr(Cluster, "maintain", lambda self, now: [])
    options = Options(nodes=3, clients=2, seconds=12.0, seed=1, faults=())
    world = World(options)
    world.net.at(5.0, world_kill, world, "node0001")
    assert "no owner that accepts" in world.run().failure


def world_kill(world: World, name: str) -> None:
    world.oracle.trouble(name, True)
    world.servers[name].crash()


#: Small arenas that evict all the time, keys that are kept, and shards that move.
KEEPS: dict[str, Any] = {
    "faults": ("join", "drain", "worker", "mover", "partition"), "keeps": 0.25, "op_s": 0.03, "fault_s": 1.5,
    "entries": 12, "nodes": 2, "seconds": 14.0,
}  # fmt: skip


@pytest.mark.parametrize("seed", dose(range(12), quick=1))
def test_what_is_hard_kept_is_not_evicted(seed: int) -> None:
    report = run_scenario(seed, **KEEPS)
    assert not report.failure, report.failure
    assert report.figures["spared"] > 0


@pytest.mark.full
def test_kept_keys_that_are_evicted_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a mover that carries no marks, and by a worker that does not look whether a key is kept."""
    first_failure(range(12), partial(fail, plants=frozenset(["no_marks"]), **KEEPS), SimFailure, wanted=["is kept"])
    monkeypatch.setattr(Worker, "is_kept", lambda self, digest: False)
    monkeypatch.setattr(Worker, "_keep", lambda self, digest, until: not self.arena.kept.update({digest: until}))
    first_failure(range(12), partial(fail, **KEEPS), SimFailure, wanted=["is kept"])


# --- what was asked for by name ----------------------------------------------------------------------


def test_a_quiet_cluster_keeps_every_value() -> None:
    report = World(Options(nodes=3, clients=3, seconds=20.0, seed=5, faults=(), entries=10_000)).run()
    figures = report.figures
    assert not report.failure
    assert figures["failed"] == figures["late"] == figures["deaths"] == 0 and figures["puts"] > 50


def test_a_dead_server_is_noticed_and_its_shards_go_to_the_others() -> None:
    world = World(Options(nodes=4, clients=4, seconds=20.0, seed=11, faults=()))
    world.net.at(6.0, world_kill, world, "node0002")
    report = world.run()
    assert not report.failure, report.failure
    (seconds,) = report.figures["detection_s"]
    assert 4.0 <= seconds <= 6.5  # five heartbeats of a second
    assert report.figures["slowest_op_s"] <= world.options.deadline_s


@pytest.mark.fault("F20", ci=(40, 80), whole=(1000, 10_000))
@pytest.mark.full
def test_a_tenth_of_many_servers_dies_at_once(amount: tuple[int, int]) -> None:
    """They are found together, and their shards go to the others: the report has no failure."""
    nodes, clients = amount
    world = World(Options(nodes=nodes, clients=clients, seconds=dosed(40.0, quick=16.0), seed=20, faults=()))
    names = [f"node{number:04d}" for number in range(1, nodes, 10)]
    for name in names:
        world.net.at(8.0, world_kill, world, name)
    report = world.run()
    assert not report.failure, report.failure
    seconds = report.figures["detection_s"]
    assert len(seconds) == len(names) and max(seconds) <= 6.5  # five heartbeats of a second
    assert report.figures["slowest_op_s"] <= world.options.deadline_s


def test_draining_a_server_loses_nothing() -> None:
    world = World(Options(nodes=3, clients=3, seconds=30.0, seed=12, faults=(), entries=10_000, keys=300))
    kept: dict[str, int] = {}

    def count(name: str) -> None:
        kept[name] = sum(
            any(
                worker.arena.hit(key.digest) == key.done
                for server in world.servers.values()
                for worker in server.workers
            )
            for key in world.keys
            if key.done and key.done not in key.deleted
        )
        kept[name + " of"] = sum(bool(key.done and key.done not in key.deleted) for key in world.keys)

    world.net.at(14.0, count, "before")
    world.net.at(14.1, world.manager.drain, "node0001", True)
    world.net.at(29.9, count, "after")
    world.net.at(29.95, world.manager.drain, "node0001", False)
    report = world.run()
    assert not report.failure, report.failure
    assert kept["before"] == kept["before of"] > 30 and kept["after"] == kept["after of"]
    assert report.figures["moved_bytes"] > 0


def values_there(world: World) -> tuple[int, int]:
    """Of the values that were put, how many can be read; and how many there are."""
    wanted = [key for key in world.keys if key.done and key.done not in key.deleted and key.started == key.done]
    arenas = [worker.arena for server in world.servers.values() for worker in server.workers]
    return sum(any(arena.hit(key.digest) == key.done for arena in arenas) for key in wanted), len(wanted)


def all_away(seed: int, nodes: int, *, restart: bool) -> tuple[Report, list[tuple[int, int]]]:
    """All servers of a healthy cluster are away for so long that they count as dead; values before and after."""
    world = World(Options(nodes=nodes, clients=3, seconds=26.0, seed=seed, faults=(), entries=10_000, keys=120))
    counts: list[tuple[int, int]] = []

    def count() -> None:
        counts.append(values_there(world))

    world.net.at(8.0, count)
    world.net.at(8.0, world.plan.begin, "all-away", 9.0)
    if restart:
        world.net.at(14.5, world.manager.crash)
        world.net.at(15.0, world.manager.start)
    world.net.at(25.0, count)
    return world.run(), counts


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("nodes", dose([1, 2, 3, 4], quick=1))
def test_all_servers_away_together_lose_nothing(nodes: int, restart: bool) -> None:
    for seed in range(20, 26):
        report, (before, after) = all_away(seed, nodes, restart=restart)
        assert not report.failure, (seed, report.failure)
        assert report.figures["deaths"] >= nodes and before[0] == before[1] > 10 and after[0] == after[1], (seed, after)


def test_values_that_nobody_else_has_owned_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of dead servers once had no owner, and began anew with the next one: the oracle finds this."""
    from simm.cluster import placement
    from simm.cluster.placement import Eligibility

    real = placement.rebalance

    def hasty(tables: Any, weights: Any, standing: Any, limit: int, heard: Any) -> Any:
        standing = [Eligibility.DEAD if each is Eligibility.OVERDUE else each for each in standing]
        return real(tables, weights, standing, limit, heard)

    monkeypatch.setattr(placement, "rebalance", hasty)
    monkeypatch.setattr(placement.Placement, "check", lambda self, *rest, **about: None)
    report, _ = all_away(20, 1, restart=False)
    assert "which nobody else has owned" in report.failure


def test_a_manager_that_keeps_since_over_another_owner_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that gets a shard back finds it since the epoch of before, though another has had it and taken mutations."""
    from simm.cluster.machine import Cluster
    from simm.constants import NO_OWNER, SHARD_COUNT

    real = Cluster._remap

    def keeps(self: Cluster, actions: Any, **about: Any) -> None:
        real(self, actions, **about)
        tables, known = self._placement.tables, self.__dict__.setdefault("known", {})
        for place in np.unique(tables.owners[tables.owners != NO_OWNER]).tolist():
            node = self.nodes.get(self._placement.keys[place][0])
            if node is not None:
                memory = known.setdefault((node.name, node.instance), np.zeros(SHARD_COUNT, np.uint64))
                mine = np.flatnonzero(tables.owners == place)
                again = mine[memory[mine] != 0]
                tables.since[again] = memory[again]
                memory[mine] = tables.since[mine]
        self._reply = None

    monkeypatch.setattr(Cluster, "_remap", keeps)
    run = partial(fail, faults=("pause", "drain"), fault_s=1.0)
    wanted = ("version", "accepted at epoch", "took a mutation", "accepted twice")
    first_failure(range(500, 560), run, SimFailure, wanted=wanted)


def test_a_manager_that_forgets_everything_is_told() -> None:
    world = World(Options(nodes=3, clients=3, seconds=20.0, seed=13, faults=(), entries=10_000))
    world.net.at(8.0, lambda: world.manager.crash(lose_disk=True))
    world.net.at(9.0, world.manager.start)
    report = world.run()
    assert not report.failure, report.failure
    assert world.manager.cluster.cluster == world.clients[0].map.cluster  # type: ignore[union-attr]
    assert report.figures["failed"] == 0
    assert any("offers its map" in text for _, text in report.last)


@pytest.mark.parametrize("kind", dose(DEFAULT, quick=6))
def test_each_kind_of_fault_alone(kind: str) -> None:
    begun, seeds = 0, dosed(4, quick=2)
    for seed in range(500, 500 + seeds):
        report = run_scenario(seed, faults=(kind,), fault_s=1.0)
        assert not report.failure, (seed, report.failure)
        begun += report.figures["faults"].get(kind, 0)
    assert begun >= seeds


# --- the parts ------------------------------------------------------------------------------------------


def test_an_old_state_file_is_no_fault_of_ours() -> None:
    """Known and documented: it is not drawn by default, and can be asked for."""
    assert set(FAULTS) - set(DEFAULT) == {"old-file", "island", "client-pause", "stream"}
    reports = [run_scenario(seed, faults=("old-file",)) for seed in range(3)]
    assert sum(report.figures["faults"].get("old-file", 0) for report in reports) > 0


def test_a_process_that_is_stopped_does_it_all_later() -> None:
    net = Net(1)
    one, two = Process(net, "a", "one"), Process(net, "b", "two")
    one.start(), two.start()
    got: list[tuple[float, int]] = []

    def take(number: int) -> None:
        got.append((net.now, number))

    two.pause()
    for number in range(3):
        net.send(one, two, take, number)
        net.run(net.now + 0.1)
    assert not got
    two.resume()
    assert sorted(number for _, number in got) == [0, 1, 2]
    net.send(one, two, take, 3)
    two.die()
    two.start()
    net.run(net.now + 1)
    assert len(got) == 3, "what was meant for an earlier life"
    net.cuts.add(("a", "b"))
    assert not net.send(one, two, take, 4) and net.send(two, one, take, 5)
    net.run(net.now + 1)
    assert [number for _, number in got[3:]] == [5]


def test_the_oracle_can_fail() -> None:
    """Positive controls, one for each thing that must never happen."""
    world = World(scenario(1, faults=()))
    world.build()
    world.net.run(5.0)
    oracle, client = world.oracle, world.clients[0]
    key = world.keys[0]
    key.started = key.done = 4
    key.deleted.add(3)
    node = next(iter(world.servers))
    oracle.read(client, key, 4, 4, node)
    oracle.read(client, key, 4, 0, node)  # a miss is always allowed
    for version in (2, 5):
        with pytest.raises(SimFailure):
            oracle.read(client, key, 4, version, node)
    with pytest.raises(SimFailure):
        oracle.read(client, key, 2, 3, node)
    # Both cut off: the documented exception. One of the two is not enough.
    oracle.trouble(client.host, True)
    if client.host != node:
        with pytest.raises(SimFailure):
            oracle.read(client, key, 4, 2, node)
    oracle.trouble(node, True)
    oracle.read(client, key, 4, 2, node)
    assert oracle.exempt_reads == 1
    with pytest.raises(SimFailure):
        oracle.observed(client.name, world.manager.cluster.cluster, 0)
    reply = world.manager.cluster.map_reply()
    oracle.told(reply)
    with pytest.raises(SimFailure):
        oracle.told(reply._replace(workers=[info._replace(host="elsewhere") for info in reply.workers]))
    worker = world.servers[node].workers[0]
    oracle.accepting(worker)
    worker.arena.number += 1000
    with pytest.raises(SimFailure):
        oracle.accepting(worker)


@pytest.mark.full
def test_the_skipped_maps_of_a_large_cluster_say_nothing_new() -> None:
    """Above 64 nodes a server skips maps that do not concern it: the same run with and without that."""
    options = Options(
        nodes=6, clients=3, seconds=14.0, seed=4, faults=("crash", "drain", "join", "worker"), fault_s=1.0
    )
    exact, skipping = World(options), World(replace(options))
    skipping.exact = False
    skipped = 0
    concerns = skipping.concerns

    def counted(*details: Any) -> bool:
        nonlocal skipped
        needed = concerns(*details)
        skipped += not needed
        return needed

    skipping.concerns = counted  # type: ignore[method-assign]
    one, two = exact.run(), skipping.run()
    assert not one.failure and not two.failure
    assert skipped > 0


def test_a_manager_without_state_waits_for_each_server_that_asks() -> None:
    """As the real one does, also if a client has been here before; for a client it waits once."""
    net = Net(1)
    manager = ManagerHost(net, Timing(), 0.0)
    manager.start()
    heard: list[tuple[str, float]] = []

    def ask(process: Process) -> None:
        process.start()
        link = manager.connect(process, lambda: None)
        manager.request(link, MapGet(40, 0), lambda _reply, _status: heard.append((process.name, round(net.now))))

    client, server = Process(net, "h1", "client0"), Process(net, "h2", "n0")
    for seconds, process in ((0.0, client), (10.0, server), (20.0, client), (30.0, server)):
        net.run(seconds)
        ask(process)
    net.run(40.0)
    assert heard == [("client0", 2), ("n0", 12), ("client0", 20), ("n0", 32)]


@pytest.mark.parametrize("subscribe", [0, SUBSCRIBE_MAPS, SUBSCRIBE_EPOCHS, SUBSCRIBE_MAPS | SUBSCRIBE_EPOCHS])
def test_issue_maps_are_pushed_to_those_who_ask_for_that(subscribe: int) -> None:
    """As the real manager does. A later question that asks for something else ends it, and a mere one does not."""
    net = Net(1)
    manager = ManagerHost(net, Timing(), 0.0)
    manager.start()
    process = Process(net, "h1", "client0")
    process.start()
    link = manager.connect(process, lambda: None)
    for asked in (subscribe, 0):
        manager.request(link, MapGet(0, asked), lambda *_: None)
        assert (link in manager.subscribers) == bool(subscribe & SUBSCRIBE_MAPS)
    manager.request(link, MapGet(0, SUBSCRIBE_EPOCHS), lambda *_: None)
    assert link not in manager.subscribers


# --- the command ------------------------------------------------------------------------------------------


@pytest.mark.full
def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    seeds = dosed(3, quick=1)
    assert simulate.main(["--seeds", f"0:{seeds}", "--jobs", "1"]) == 0
    assert f"{seeds} scenario" in capsys.readouterr().out
    for faults in dosed(([], ["--faults", "none"]), quick=(["--faults", "none"],)):
        assert simulate.main(["--replay", "2", "-v", *faults]) == 0
        out = capsys.readouterr().out
        assert "manager starts" in out and "nothing wrong" in out and "trace" in out and "put" in out
    nodes, clients, hours = dosed(("80", "500", "0.02"), quick=("20", "100", "0.01"))
    arguments = ["--nodes", nodes, "--clients", clients, "--hours", hours, "--seed", "3", "--fault-s", "10"]
    assert simulate.main(arguments) == 0
    out = capsys.readouterr().out
    for word in ("sampled", "detection", "moved", "misses", "map", "messages a second", "maps", "events"):
        assert word in out
    for wrong in (["--seeds", "3"], ["--seeds", "3:3"], ["--faults", "flood"], ["--nodes", "0"]):
        with pytest.raises(UsageError):
            simulate.main(wrong)


def test_a_failure_is_an_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("simm.sim.client.Client.mutate", _never)
    assert simulate.main(["--seeds", "0:2", "--jobs", "1"]) == 1
    assert "simm simulate --replay 0 -v" in capsys.readouterr().out


def _never(*_details: Any) -> Any:
    return Status.NO_SPACE
    yield


@pytest.mark.parametrize("flag", ["--hours", "--fault-s"])
@pytest.mark.parametrize("value", ["nan", "inf", "0"])
def test_issue_a_time_that_has_no_end_is_a_mistake(flag: str, value: str) -> None:
    """It ran for ever, or ended in a traceback."""
    with pytest.raises(UsageError, match="are positive"):
        simulate.main(["--nodes", "1", "--clients", "1", flag, value])


def test_issue_a_process_that_was_killed_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(ThreadPoolExecutor):
        def map(self, *_: Any, **__: Any) -> Any:
            raise BrokenProcessPool("a child has ended")

    monkeypatch.setattr(simulate, "ProcessPoolExecutor", Broken)
    with pytest.raises(SimmError, match="give fewer --jobs"):
        simulate.main(["--seeds", "0:4", "--jobs", "2"])

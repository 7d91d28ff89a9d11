"""Sessions with pinned values, and ranges of values, in the simulator, with injected bugs that are found."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from simm.sim.arena import Room
from simm.sim.oracle import SimFailure
from simm.sim.world import Options, World, run_scenario
from tests.models.explorer import first_failure
from tests.support.dose import dose

#: Small arenas that use chunks again all the time, workers and streams that die, and shards that move.
PINS: dict[str, Any] = {
    "faults": ("join", "drain", "worker", "mover", "partition", "stream"), "op_s": 0.03, "fault_s": 1.5, "nodes": 2,
    "seconds": 12.0, "pins": 0.7, "entries": 16,
}  # fmt: skip
OTHER_BYTES = ["with bytes of another value"]


def fail(seed: int, **options: Any) -> None:
    """Run a scenario; raise SimFailure if it fails."""
    report = run_scenario(seed, **options)
    if report.failure:
        raise SimFailure(report.failure)


@pytest.mark.parametrize("seed", dose(range(8), quick=2))
def test_ranges_are_of_one_version_and_sessions_of_theirs(seed: int) -> None:
    report = run_scenario(seed, **PINS)
    assert not report.failure, report.failure
    figures = report.figures
    assert figures["sessions_read"] > 100 and figures["ranges_read"] > figures["sessions_read"] + 50


@pytest.mark.full
def test_sessions_outlive_workers_and_moves() -> None:
    """What is read is as it was, whatever has become of the worker and of the shard."""
    reports = [run_scenario(seed, **PINS) for seed in range(6)]
    assert [report.failure for report in reports] == [""] * len(reports)
    assert sum(report.figures["outlived_workers"] for report in reports) > 5
    assert sum(report.figures["outlived_moves"] for report in reports) > 10


@pytest.mark.slow
def test_sessions_by_many_seeds() -> None:
    for seed in range(1000, 1200):
        report = run_scenario(seed, **PINS)
        assert not report.failure, (seed, report.failure)
        report = run_scenario(seed, pins=0.5, keeps=0.05)  # all kinds of faults
        assert not report.failure, (seed, report.failure)


@pytest.mark.full
def test_a_successor_that_forgets_pins_is_found() -> None:
    """It uses chunks again that a session of this host reads without a look at the entry."""
    seed, _ = first_failure(
        range(20), partial(fail, plants=frozenset(["forgets_pins"]), **PINS), SimFailure, wanted=OTHER_BYTES
    )
    assert not run_scenario(seed, **PINS).failure


def test_a_read_that_takes_no_last_look_is_found() -> None:
    """Ranges of a value without a pin."""
    run = partial(fail, plants=frozenset(["no_verdict"]), **PINS)
    first_failure(range(4), run, SimFailure, wanted=OTHER_BYTES)


@pytest.mark.full
def test_chunks_that_are_used_again_though_they_are_pinned_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Room, "_is_pinned", lambda self, chunk: False)
    first_failure(range(4), partial(fail, **PINS), SimFailure, wanted=OTHER_BYTES)


@pytest.mark.full
def test_a_stream_that_knows_the_pins_of_another_life_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were released when it ended, as its connections were the leases."""
    from simm.sim import client

    real = client._at_place
    monkeypatch.setattr(client, "_at_place", lambda worker, ask, place: real(worker, ask, place._replace(life=0)))
    run = partial(fail, **{**PINS, "faults": ("stream", "join"), "fault_s": 0.5})
    first_failure(range(12), run, SimFailure, wanted=OTHER_BYTES)


def test_the_oracle_can_fail() -> None:
    world = World(Options(nodes=1, clients=1, seed=1, faults=()))
    world.build()
    client, key = world.clients[0], world.keys[0]
    whole = ((key.digest, 3), (key.digest, 3))
    oracle = world.oracle
    oracle.ranges(client, key, 3, whole)
    oracle.pinned(client, key, 3, whole, pinned=True, outlived=(True, False))
    oracle.pinned(client, key, 3, None, pinned=False, outlived=(True, False))
    assert (oracle.ranges_read, oracle.sessions_read, oracle.outlived_workers, oracle.outlived_moves) == (2, 1, 1, 0)
    other = ((key.digest, 3), (key.digest, 4))
    for wrong in (other, (other[1], other[1]), ((bytes(16), 3), (bytes(16), 3))):
        with pytest.raises(SimFailure, match="another value"):
            oracle.ranges(client, key, 3, wrong)
        with pytest.raises(SimFailure, match="another value"):
            oracle.pinned(client, key, 3, wrong, pinned=False, outlived=(False, False))
    with pytest.raises(SimFailure, match="which it had pinned"):
        oracle.pinned(client, key, 3, None, pinned=True, outlived=(False, False))


def test_chunks_are_used_again_once_nobody_holds_them() -> None:
    room = Room()
    room.place(b"a", 1)
    pin = room.pin(b"a", 0)
    lease = room.pin(b"a", 5)
    room.place(b"a", 2)
    room.place(b"b", 1)
    assert room.content[:3] == [(b"a", 1), (b"a", 2), (b"b", 1)] and not room.is_held(b"a")
    room.unpin(pin)
    room.unpin(pin)
    room.end_leases(5)
    room.place(b"c", 1)
    assert room.content[0] == (b"a", 1), "the lease holds it"
    room.end_leases(6)
    room.remove(b"b")
    assert lease not in room.pins
    room.place(b"d", 1)
    room.place(b"e", 1)
    assert {room.at[b"d"], room.at[b"e"]} == {0, 2}


def test_a_quarter_of_an_arena_is_pinned_at_most() -> None:
    world = World(Options(nodes=1, clients=1, seed=1, faults=(), entries=8))
    world.build()
    world.net.run(3.0)
    (worker,) = world.servers["node0000"].workers
    for number in range(3):
        worker._store(bytes([number] * 16), 1)
    pins = [worker.pin(bytes([number] * 16), 0) for number in range(3)]
    assert 0 not in pins[:2] and pins[2] == 0
    worker.arena.room.unpin(pins[0])
    assert worker.pin(bytes([2] * 16), 0)

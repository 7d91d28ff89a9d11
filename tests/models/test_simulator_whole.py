"""Groups and values in parts in the simulator: the product's own code of both, with injected bugs that are found."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from simm.arena.marks.groups import Groups
from simm.sdk.large.manifest import Manifest
from simm.sdk.large.values import Large
from simm.sim.oracle import SimFailure
from simm.sim.whole import PART_BYTES, PARTS_MOST, SimLarge, replayed, value_bytes, value_of
from simm.sim.whole import Groups as GroupsOfClient
from simm.sim.world import run_scenario
from simm.wire.messages import Status
from tests.models.explorer import first_failure
from tests.support.dose import dose

#: Small arenas that evict all the time, processes that die, and shards that move.
SMALL: dict[str, Any] = {
    "faults": ("join", "drain", "worker", "mover", "partition"), "op_s": 0.03, "fault_s": 1.5, "nodes": 2,
    "seconds": 10.0,
}  # fmt: skip
GROUPS: dict[str, Any] = {**SMALL, "groups": 0.7, "keeps": 0.05, "entries": 16}
LARGE: dict[str, Any] = {**SMALL, "large": 0.7, "entries": 60}


def fail(seed: int, **options: Any) -> None:
    """Run a scenario; raise SimFailure if it fails."""
    report = run_scenario(seed, **options)
    if report.failure:
        raise SimFailure(report.failure)


# --- groups ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", dose(range(8), quick=1))
def test_groups_are_whole(seed: int) -> None:
    report = run_scenario(seed, **GROUPS)
    assert not report.failure, report.failure
    assert report.figures["groups_left"] > 10


@pytest.mark.slow
def test_groups_are_whole_by_many_seeds() -> None:
    moved = 0
    for seed in range(1000, 1200):
        report = run_scenario(seed, **GROUPS)
        assert not report.failure, (seed, report.failure)
        moved += report.figures["groups_moved"]
    assert moved > 200


def test_a_worker_that_leaves_orphans_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Groups, "drop_orphans", lambda self: self.orphans.clear())
    first_failure(range(3), partial(fail, **GROUPS), SimFailure, wanted=["others of its group have left"])


@pytest.mark.full
def test_a_successor_that_forgets_groups_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Groups, "restore", lambda self: [])
    run = partial(fail, **{**GROUPS, "faults": ("worker",), "fault_s": 0.7})
    first_failure(range(8), run, SimFailure, wanted=["others of its group have left"])


@pytest.mark.full
def test_a_mover_that_carries_no_groups_is_found() -> None:
    run = partial(fail, **{**GROUPS, "plants": frozenset(["no_groups"])})
    first_failure(range(8), run, SimFailure, wanted=["others of its group have left"])


@pytest.mark.full
def test_a_client_that_leaves_half_of_a_failed_group_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says that it has deleted the keys."""
    def pretends(self: GroupsOfClient, digests: Any) -> list[int]:
        self.deletes = dict.fromkeys(digests, int(Status.OK))
        return [*self.deletes.values()]

    monkeypatch.setattr(GroupsOfClient, "delete_digests", pretends)
    run = partial(fail, **{**GROUPS, "entries": 6, "faults": ()})
    first_failure(range(8), run, SimFailure, wanted=["was there before it began", "which nobody put"])


# --- values in parts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", dose(range(8), quick=1))
def test_values_in_parts_are_whole_and_of_one_version(seed: int) -> None:
    report = run_scenario(seed, **LARGE)
    assert not report.failure, report.failure
    assert report.figures["wholes"] > 20


@pytest.mark.slow
def test_values_in_parts_by_many_seeds() -> None:
    for seed in range(1000, 1200):
        report = run_scenario(seed, **LARGE)
        assert not report.failure, (seed, report.failure)


def test_parts_without_a_version_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their digests name the key and the part only, so that a read may meet those of two puts."""
    real = Manifest.digest
    monkeypatch.setattr(Manifest, "digest", lambda self, key, at: real(self._replace(version=bytes(16)), key, at))
    first_failure(range(6), partial(fail, **LARGE), SimFailure, wanted=["of the puts"])


@pytest.mark.full
def test_a_read_that_leaves_out_missing_parts_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Large._read_parts

    def shortened(self: Large, digest: bytes, manifest: Manifest, sink: Any) -> Any:
        got = real(self, digest, manifest, sink)
        short = manifest._replace(total=manifest.part)
        return got if type(got) is bytes else real(self, digest, short, sink)

    monkeypatch.setattr(Large, "_read_parts", shortened)
    first_failure(range(6), partial(fail, **{**LARGE, "entries": 20}), SimFailure, wanted=["of the puts"])


@pytest.mark.full
def test_a_client_that_believes_a_manifest_of_before_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a delete or another put it reads old parts, of which nobody has told it that they are to be dropped."""
    known: dict[bytes, Manifest] = {}

    def forgetful(client: Any, digest: bytes) -> Any:
        def code(ask: Any) -> tuple[bytes, str]:
            large = SimLarge(client, ask)
            manifest = known.get(digest) or large.manifest(digest)
            if manifest is None:
                return b"", ""
            got = large._read_parts(digest, manifest, None)
            if type(got) is bytes:
                known[digest] = manifest
            return (got if type(got) is bytes else b""), large.node

        return (yield from replayed(code))

    monkeypatch.setattr("simm.sim.load.get_large", forgetful)
    monkeypatch.setattr(Large, "drop", lambda self, digest, manifest, until=0.0: None)
    first_failure(range(6), partial(fail, **LARGE), SimFailure, wanted=["was there before it began"])


# --- the parts --------------------------------------------------------------------------------------------


def test_code_that_waits_is_run_again_for_each_exchange() -> None:
    runs: list[int] = []

    def exchange(number: int) -> Any:
        answer = yield number
        return 10 * answer

    def code(ask: Any) -> list[int]:
        runs.append(1)
        return [ask(lambda number=number: exchange(number)) for number in (1, 2)]

    steps = replayed(code)
    assert steps.send(None) == 1
    assert steps.send(5) == 2
    with pytest.raises(StopIteration) as ended:
        steps.send(6)
    assert ended.value.value == [50, 60] and len(runs) == 3


def test_values_tell_the_version_of_their_put() -> None:
    for version in range(1, 9):
        value = value_of(version)
        assert len(value) == value_bytes(version) and PART_BYTES <= len(value) <= PARTS_MOST * PART_BYTES
        assert {value[at : at + PART_BYTES] for at in range(0, len(value), PART_BYTES)} == {
            version.to_bytes(PART_BYTES, "little")
        }

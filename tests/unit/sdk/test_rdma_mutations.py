"""A client's READs between the single stores of a real store; and the same with one safety check removed.

``tests/support/rdma_replay.py`` has the trace and the replay. With the code as it is, thousands of reads of many seeds
see nothing but values that were current. Each mutation test removes one check, and a bounded number of reads must then
find a violation. Checks against WRITEs that come late have their mutation tests elsewhere:
``unit/server/rdma_endpoint/test_fences.py`` (windows, queue pairs, copies in flight) and ``test_rdma_faults.py``
(buffers that are given back).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from simm.rdma.api import READ
from simm.rdma.remote_arena import CachedEntry, confirmed
from simm.sdk import rdma_get
from simm.wire.shard_set import FROZEN
from tests.models.explorer import first_failure, walk
from tests.support.dose import dosed
from tests.support.invariants import InvariantViolation
from tests.support.rdma_replay import EVERYTHING, OVERWRITES, SHARDS, StoreTrace, TraceReplay

STORES = 1500
#: Reads of one seed; a control may take so many seeds.
READS = 400
SEEDS = 12


@pytest.fixture(scope="module")
def traces() -> Iterator[Callable[[Sequence[str]], StoreTrace]]:
    """Return a function that gives the trace of each kind of operation, and makes it at its first use."""
    made: dict[Sequence[str], StoreTrace] = {}

    def trace(does: Sequence[str]) -> StoreTrace:
        if does not in made:
            made[does] = StoreTrace(1, STORES, does)
        return made[does]

    yield trace
    for each in made.values():
        each.close()


Traces = Callable[[Sequence[str]], StoreTrace]


@pytest.mark.parametrize(
    ("does", "jumps", "rails", "reads"),
    [(EVERYTHING, False, 1, 500), (EVERYTHING, False, 2, 200), (OVERWRITES, True, 1, 200), (SHARDS, False, 1, 300)],
)
def test_all_is_well(
    traces: Traces, does: Sequence[str], jumps: bool, rails: int, reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = dosed(reads, quick=reads // 4)
    with TraceReplay(traces(does), 1, monkeypatch, rails=rails, jumps=jumps) as replay:
        walk(reads, replay.read)
    assert replay.hits > reads // 20 and replay.hits + replay.misses + replay.left == reads
    print(f"{replay.hits} hits, {replay.misses} misses, {replay.left} for TCP, {replay.counters}")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 12))
@pytest.mark.parametrize("does", [EVERYTHING, OVERWRITES, SHARDS])
def test_all_is_well_for_longer(
    traces: Traces, does: Sequence[str], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TraceReplay(traces(does), seed, monkeypatch, rails=1 + seed % 2, jumps=seed % 3 == 0) as replay:
        walk(3000, replay.read)


def violation_in(trace: StoreTrace, monkeypatch: pytest.MonkeyPatch, *, jumps: bool = False, seeds: int = SEEDS) -> str:
    """Return the violation that the first successful seed finds; raise AssertionError if none finds one."""

    def run(seed: int) -> None:
        with TraceReplay(trace, seed, monkeypatch, jumps=jumps) as replay:
            walk(READS, replay.read)

    return first_failure(range(1, seeds + 1), run, InvariantViolation)[1]


def plain(word: int) -> bool:
    return 0 < word < FROZEN


def no_second_look(entry: CachedEntry, between: bytes, now: bytes, word: int) -> bool:
    return plain(word)


def seq_alone(entry: CachedEntry, between: bytes, now: bytes, word: int) -> bool:
    return now[:8] == entry.image[:8] and plain(word)


def two_images(entry: CachedEntry, between: bytes, now: bytes, word: int) -> bool:
    return now == entry.image and plain(word)


def no_word(entry: CachedEntry, between: bytes, now: bytes, word: int) -> bool:
    return confirmed(entry, between, now, 1)


@pytest.mark.full
@pytest.mark.parametrize(("rule", "does"), [(no_second_look, OVERWRITES), (seq_alone, OVERWRITES), (no_word, SHARDS)])
def test_mutation_a_weaker_rule(
    traces: Traces, rule: Callable[[CachedEntry, bytes, bytes, int], bool], does: Sequence[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(rdma_get, "confirmed", rule)
    assert violation_in(traces(does), monkeypatch)


def test_mutation_no_fence(traces: Traces, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdma_get, "FENCED_READ", READ)
    assert violation_in(traces(OVERWRITES), monkeypatch) == "a torn value"


@pytest.mark.full
def test_mutation_no_image_between(traces: Traces, monkeypatch: pytest.MonkeyPatch) -> None:
    """This is rare, as both images must be the same mixture: about one read in 300, if the clock jumps."""
    monkeypatch.setattr(rdma_get, "confirmed", two_images)
    assert violation_in(traces(OVERWRITES), monkeypatch, jumps=True, seeds=40)

"""Blocks that are in the same tiers as a whole are scored at once: the answer is the one of block by block."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("msgspec", reason="the extra simm-store[index] is not installed")
pytest.importorskip("xxhash", reason="the extra simm-store[index] is not installed")
pytest.importorskip("zmq", reason="the extra simm-store[index] is not installed")

from simm.index import places
from simm.index.blocks import Blocks
from simm.index.events import Stored, Where
from simm.index.keys import request_keys, token_bytes
from simm.index.prefixes import BITS, alike, tiers_of
from simm.index.scores import Scores, score
from simm.index.service import Service
from simm.index.sources import TIERS, Registration, Space

SPACE = Space("m", "", "default", "", 1)
MEDIA = ["GPU", "CPU", "DISK", "STORAGE", "of nobody"]


@pytest.mark.parametrize("seed", range(20))
def test_arrays_that_are_alike(seed: int) -> None:
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(12):
        counts = rng.integers(0, 1 << BITS * len(TIERS), rng.integers(0, 6), np.uint32)
        if rng.random() < 0.5 and len(counts):  # the same tiers, in other numbers
            there = tiers_of(counts[:1])[0]
            more = rng.integers(1, 16, (len(counts), len(TIERS)), np.uint32) * there
            counts = (more << np.arange(len(TIERS), dtype=np.uint32) * np.uint32(BITS)).sum(axis=1, dtype=np.uint32)
        found.append(counts)
    for counts, same in zip(found, alike(found)):
        rows = {tuple(row) for row in tiers_of(counts).tolist()}
        if len(rows) < 2:
            assert same == sum(there << tier for tier, there in enumerate(next(iter(rows), ())))
        else:
            assert same is None
    assert alike([]) == [] and alike([np.zeros(0, np.uint32)]) == [0]


def _ask(seed: int) -> tuple[Scores, Scores, Scores]:
    """Return the answers to three questions about a prompt, of which endpoints and a store have parts in any tier."""
    rng = random.Random(seed)
    index = Blocks()
    prompt = [rng.randrange(1000) for _ in range(80)]
    for number in range(10):
        kind = "simm" if number == 9 else "vllm"
        told = Registration(f"pod-{number}", "m", kind, block_size=1, rank=None, storage_removals=True)
        source = index.register(told)
        for _ in range(rng.choice([0, 1, 1, 2])):
            length = rng.choice([1, 15, 16, 17, 80])
            names = array("Q", request_keys(prompt[:length], 1))
            where = Where(medium=rng.choice(MEDIA), rank=rng.randrange(2))
            index.apply(source, [Stored(names, None, token_bytes(prompt[:length]), 1, where, standard=kind == "simm")])
        if rng.random() < 0.3:
            index.expect(source, SPACE, request_keys(prompt[: rng.randrange(80)], 1), until=1e18)
    keys = request_keys(prompt, 1)
    loads = {"pod-0": 3.0, "pod-1": 0.0}
    return (
        score(index, SPACE, keys, now=0.0), score(index, SPACE, keys, loads=loads, now=0.0),
        score(index, SPACE, keys, endpoints=["pod-1", "pod-2"], weights={"gpu": 0.0, "cpu": 1.0}, now=0.0),
    )  # fmt: skip


def _plain(found: Scores) -> object:
    """Return an answer without the last digits of its sums."""
    matches = {
        name: (each.blocks, each.tiers, each.ranks, each.expected, round(each.score, 6))
        for name, each in found.matches.items()
    }
    sums = [{name: round(value, 6) for name, value in each.items()} for each in (found.with_pool, found.costs)]
    return found.blocks, matches, sums, found.unknown_tiers


@pytest.mark.parametrize("seed", range(12))
def test_the_answer_is_that_of_block_by_block(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = _ask(seed)
    monkeypatch.setattr(places, "alike", lambda found: [None] * len(found))
    assert any(found.matches for found in fast)
    for quick, slow in zip(fast, _ask(seed)):
        assert _plain(quick) == _plain(slow)


def test_what_the_readers_change_is_read_under_their_lock() -> None:
    """A medium that nobody knew came while they were listed, and the question failed."""
    index = Blocks()
    source = index.register(Registration("A", "m", block_size=1))

    class Media(set[str]):
        def __iter__(self) -> Iterator[str]:
            assert index.lock._is_owned()  # type: ignore[attr-defined]
            return super().__iter__()

    source.media = Media(["tape", "drum"])
    assert score(index, SPACE, []).unknown_tiers == ["drum", "tape"]
    assert Service(index).workers()[0]["unknown_tiers"] == ["drum", "tape"]

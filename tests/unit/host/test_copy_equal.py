"""Copies of one size each: what they write, and what they leave alone, by one thread and by several."""

from __future__ import annotations

import random

import numpy as np
import pytest

from simm.host import buffers
from simm.host.buffers import PART_BYTES, Copier


@pytest.mark.parametrize("known", [False, True], ids=["on trial", "known"])
@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize(
    ("count", "size"),
    [(0, 5), (1, 1), (40, 100), (40, 40_000), (70, 64 << 10), (33, 100_001), (3, 3 << 20), (1, 9 << 20), (5, 700_000),
     (17, 1 << 20)],
)
def test_each_target_gets_its_source_and_nothing_else(
    threads: int, count: int, size: int, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And large ones are observed, whether it is known already which way is faster or not."""
    monkeypatch.setattr(Copier, "_ways", [buffers.memmove if known else None] * 64)
    rng = np.random.default_rng(count * size + threads)
    data = rng.integers(0, 256, count * size + 1000, dtype=np.uint8)
    gap = 64
    room = np.full(count * (size + gap) + gap, 77, np.uint8)
    places = random.Random(count).sample(range(count), count)
    targets = [room.ctypes.data + gap + place * (size + gap) for place in places]
    begins = [place * size + min(place, 900) for place in range(count)]
    copier = Copier(threads)
    seen: list[int] = []
    copier.observe = lambda total, _seconds: seen.append(total)
    for _ in range(3):  # batches of 16 and more change their way
        room[:] = 77
        copier.copy_equal(targets, [data.ctypes.data + begin for begin in begins], size)
        expected = np.full_like(room, 77)
        for place, begin in zip(places, begins):
            at = gap + place * (size + gap)
            expected[at : at + size] = data[begin : begin + size]
        assert np.array_equal(room, expected)
    copier.close()
    assert bool(seen) == (size >= buffers.OBSERVED_BYTES or (threads > 1 and count * size >= buffers.SPREAD_BYTES))


def test_batches_try_both_ways_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was the faster one with data in the caches may be the slower one without."""
    used: list[str] = []
    slow = "memmove"
    clock = [0]

    def way(name: str) -> None:
        def copy(_target: int, _source: int, size: int) -> None:
            used.append(name)
            clock[0] += size * (3 if name == slow else 1)

        monkeypatch.setattr(buffers, name, copy)

    way("memmove")
    way("block_copy")
    monkeypatch.setattr(buffers.time, "perf_counter_ns", lambda: clock[0])
    monkeypatch.setattr(Copier, "_batch_ways", [(0, False)] * 64)
    copier = Copier(1)
    spans = list(range(1, 41))
    tried = buffers._TURNS.count(True)
    copier.copy_equal(spans, spans, PART_BYTES // 4)
    assert used.count("memmove") == tried and used.count("block_copy") == 40 - tried
    slow = "block_copy"
    for _ in range(buffers._BATCHES):
        used.clear()
        copier.copy_equal(spans, spans, PART_BYTES // 4)
    assert used.count("block_copy") == tried and used.count("memmove") == 40 - tried

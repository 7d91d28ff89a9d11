"""Registered views take values of exactly their size: what engines of two models that share keys must never mix up.

Each path (shared memory, TCP, RDMA) with each kind of memory (host memory in three ways, a GPU's in two). The memory
around the view and, where a value is refused, the view itself keep their bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from simm.kv import Store
from simm.sdk import rdma_get, reads, remote_reads
from tests.support.dose import dose, dosed
from tests.support.kv_sizes import (
    CANARY,
    FAILED,
    KINDS,
    MIB,
    SIZES,
    driver_for,
    filled,
    memory_of,
    store_by,
    surrounded,
    value_of,
)

pytestmark = pytest.mark.quick


# --- one by one ---------------------------------------------------------------------------------


def play_singles(store: Store, make: Callable[[int], Any], sizes: list[int]) -> None:
    """Check that values of another size are refused and dropped; then store and read one of the right size."""
    for size in sizes:
        memory = make(size + 200)
        view = memory.view(77, size)
        untouched = surrounded(size + 200, 77, b"")
        for other in (1, size - 1, size + 1, 2 * size):
            for known in (False, True):  # over RDMA: by a lookup, then by the cached location
                key = f"{size} {other} {known}"
                assert store.put(key, filled(value_of(key, other))) == 0
                if known:
                    assert store.exists(key)
                before = store.stats()["unfit"]
                assert store.get(key, view) == FAILED
                assert memory.data() == untouched, "not one byte is written"
                assert store.stats()["unfit"] == before + 1
                assert store.exists(key) is False, "the next one puts it anew"
                assert store.get(key, view) == FAILED
                right = value_of((key, "right"), size)
                assert store.put(key, filled(right)) == 0
                for _ in range(2):
                    assert store.get(key, view) == size
                    assert memory.data() == surrounded(size + 200, 77, right)
                    memory.reset()
                assert store.delete(key) == 0  # the arena is small
        assert store.get("never stored", view) == FAILED
        assert memory.data() == untouched


@pytest.mark.parametrize("kind", dose(KINDS, quick=1))
def test_single_values(
    path: str, kind: str, request: pytest.FixtureRequest, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path.startswith("rdma"):
        monkeypatch.delenv("SIMM_NAMESPACE")
    with driver_for(kind, monkeypatch) as driver, store_by(path, request, monkeypatch, driver) as store:
        play_singles(store, lambda size: memory_of(kind, driver, size), SIZES)
        if driver is not None and path.startswith("rdma"):
            assert any(driver.dma) == (kind != "gpu staged"), "direct or staged, as it was meant"


# --- batches ------------------------------------------------------------------------------------


def play_batch(store: Store, make: Callable[[int], Any], count: int, size: int) -> None:
    """Read a batch with smaller, larger and missing values among right ones: only those fail."""
    at_of = [17 + at * (size + 32) for at in range(count)]
    total = at_of[-1] + size + 32
    memory = make(total)
    views = [memory.view(at, size) for at in at_of]
    keys = [f"{count} {size} {at}" for at in range(count)]
    sizes = [size, size - 1, size, 2 * size, 0, size, 1]
    stored = [sizes[at % len(sizes)] for at in range(count)]
    values = [value_of(key, length) for key, length in zip(keys, stored)]
    there = [at for at in range(count) if stored[at]]
    assert store.mput([keys[at] for at in there], [filled(values[at]) for at in there]) == [0] * len(there)
    assert store.mexists(keys) == [bool(length) for length in stored]
    before = store.stats()["unfit"]
    assert store.mget(keys, views) == [size if length == size else FAILED for length in stored]
    expected = bytearray(bytes([CANARY]) * total)
    for at, value in zip(at_of, values):
        if len(value) == size:
            expected[at : at + size] = value
    assert memory.data() == expected
    assert store.stats()["unfit"] == before + sum(length not in (0, size) for length in stored)
    absent = [length != size for length in stored]
    assert store.mexists(keys) == [not gone for gone in absent]
    again = [at for at in range(count) if absent[at]]
    for at in again:
        values[at] = value_of((keys[at], "right"), size)
    assert store.mput([keys[at] for at in again], [filled(values[at]) for at in again]) == [0] * len(again)
    memory.reset()
    assert store.mget(keys, views) == [size] * count
    for at, value in zip(at_of, values):
        expected[at : at + size] = value
    assert memory.data() == expected
    assert store.mdelete(keys) == [0] * count


#: Keys and bytes of a value. The last takes half of the time; single values of such sizes are in the quick run.
BATCHES = ((7, 900), (42, 900), (21, 40_000), (7, MIB + MIB // 2))


@pytest.mark.parametrize("kind", dose([*KINDS[3:], *KINDS[:3]], quick=1))
def test_batches(
    path: str, kind: str, request: pytest.FixtureRequest, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path.startswith("rdma"):
        monkeypatch.delenv("SIMM_NAMESPACE")
    with driver_for(kind, monkeypatch) as driver, store_by(path, request, monkeypatch, driver) as store:
        for count, size in dosed(BATCHES, quick=BATCHES[:-1]):
            play_batch(store, lambda total: memory_of(kind, driver, total), count, size)


@pytest.mark.parametrize("what", ["single", "batch"])
@pytest.mark.parametrize("kind", dose(["numpy", "gpu pointer", "gpu staged"], quick=1))
def test_mutation_without_the_check(
    path: str, kind: str, what: str, request: pytest.FixtureRequest, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the rule of unregistered memory, the tests above find a view whose head was filled."""
    if path.startswith("rdma"):
        monkeypatch.delenv("SIMM_NAMESPACE")
    for module in (reads, remote_reads, rdma_get):
        monkeypatch.setattr(module, "fits", lambda length, sink: length <= len(sink))
    with driver_for(kind, monkeypatch) as driver, store_by(path, request, monkeypatch, driver) as store:
        with pytest.raises(AssertionError):
            if what == "single":
                play_singles(store, lambda size: memory_of(kind, driver, size), [5000])
            else:
                play_batch(store, lambda size: memory_of(kind, driver, size), 42, 900)

"""Copies: whichever way they go, the very bytes and no others; and which way is found the faster."""

from __future__ import annotations

import ctypes
import random
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from simm.host import buffers
from simm.host.buffers import (
    ALIAS_BYTES,
    BLOCK_BYTES,
    RELEASE_BYTES,
    SPLIT_BYTES,
    TRIALS,
    Copier,
    address_of,
    block_copy,
    view_of,
)
from simm.host.copy_pool import POOL
from simm.testing import FakeClient

ROOM = 9 << 20


@pytest.fixture(autouse=True)
def fresh_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Copier, "_ways", [None] * 64)
    monkeypatch.setattr(Copier, "_trials", [buffers._Trial() for _ in range(64)])


@pytest.mark.parametrize("threads", [1, 3])
def test_a_copy_is_all_of_the_bytes_and_no_others(threads: int) -> None:
    rng = random.Random(threads)
    source = np.frombuffer(rng.randbytes(ROOM), np.uint8)
    target = np.zeros(ROOM, np.uint8)
    copier = Copier(threads)
    at_source, at_target = address_of(view_of(source)), address_of(view_of(target))
    sizes = [1, 100, RELEASE_BYTES, RELEASE_BYTES + 1, BLOCK_BYTES - 1, BLOCK_BYTES, 100_003, 1 << 20, SPLIT_BYTES + 5]
    for size in sizes * 2 + [BLOCK_BYTES] * (3 * TRIALS):
        begin, into = rng.randrange(4096), rng.choice([0, 1, 8, 16, 31, rng.randrange(4096)])
        copier.copy(at_target + into, at_source + begin, size)
        assert np.array_equal(target[into : into + size], source[begin : begin + size])
        assert not target[:into].any() and not target[into + size :].any()
        target[into : into + size] = 0
    copier.close()


@pytest.mark.parametrize("shift", [-70_000, -4096, -1, 1, 8, 4096, 70_000])
def test_numpys_loop_copies_what_overlaps(shift: int) -> None:
    """A caller may put what it sees in a view, so nobody relies on it; libc's memmove does as much."""
    data = bytearray(random.Random(shift).randbytes(400_000))
    want = bytes(data[100_000:300_000])
    block_copy(address_of(memoryview(data)) + 100_000 + shift, address_of(memoryview(data)) + 100_000, 200_000)
    assert data[100_000 + shift : 300_000 + shift] == want


@pytest.mark.parametrize("better", ["memmove", "block_copy"])
def test_the_faster_way_is_taken_after_the_trial(better: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0]
    took = {"memmove": 0, "block_copy": 0}

    def way(name: str) -> Callable[[int, int, int], None]:
        def copy(_target: int, _source: int, size: int) -> None:
            took[name] += 1
            clock[0] += size * (1 if name == better else 2) * (50 if took[name] == 1 else 1)  # the first one is slow

        return copy

    for name in took:
        monkeypatch.setattr(buffers, name, way(name))
    monkeypatch.setattr("simm.host.buffers.time.perf_counter_ns", lambda: clock[0])
    copier = Copier(1)
    for number in range(2 * TRIALS):
        copier.copy(0, 0, (1 << 20) + number)
    assert took == {"memmove": TRIALS, "block_copy": TRIALS}
    for _ in range(10):
        copier.copy(0, 0, 1 << 20)
    assert took[better] == TRIALS + 10
    copier.copy(0, 0, 4 << 20)  # another magnitude is another question
    assert sum(took.values()) == 2 * TRIALS + 11 and Copier._ways[(4 << 20).bit_length()] is None


def test_a_small_copy_avoids_what_libc_is_slow_at(monkeypatch: pytest.MonkeyPatch) -> None:
    took: list[str] = []
    monkeypatch.setattr(buffers, "memmove", lambda *_: took.append("memmove"))
    monkeypatch.setattr(buffers, "block_copy", lambda *_: took.append("block_copy"))
    copier = Copier(1)
    for ahead in (0, 1, ALIAS_BYTES - 1, ALIAS_BYTES, 4095):
        copier.copy(40960 + ahead, 8192, RELEASE_BYTES)
    assert took == ["memmove", "block_copy", "block_copy", "memmove", "memmove"]
    copier.copy(40960 + 8, 8192, RELEASE_BYTES - 1)
    assert took[-1] == "memmove"


def test_addresses_of_writable_and_of_read_only_memory() -> None:
    data = bytearray(100)
    view = memoryview(data)
    address = address_of(view)
    assert address_of(view[7:]) == address_of(view.toreadonly()[7:]) == address + 7
    ctypes.memset(address + 3, 9, 2)
    assert data[:6] == b"\0\0\0\x09\x09\0"
    frozen = bytes(range(50))
    assert ctypes.string_at(address_of(memoryview(frozen)), 50) == frozen


def test_a_part_that_an_interruption_has_lost_does_not_run_after_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C as a job is handed over, which has begun it and returns none: it wrote into the chunk's next value."""
    copier = Copier(3)
    source, target = np.ones(ROOM, np.uint8), np.zeros(ROOM, np.uint8)
    with ThreadPoolExecutor(1) as pool:
        go = threading.Event()
        pool.submit(go.wait)

        def interrupted(*job: Any) -> None:
            pool.submit(*job)
            raise KeyboardInterrupt

        monkeypatch.setattr(POOL, "_helpers", lambda *_: SimpleNamespace(hand_over=interrupted))
        with pytest.raises(KeyboardInterrupt):
            copier.copy(address_of(view_of(target)), address_of(view_of(source)), SPLIT_BYTES)
        go.set()
    assert not target.any()
    copier.close()


# --- what is lent ------------------------------------------------------------------------------------


class Tensor:
    """What SiMM sees of a torch tensor on the CPU. Its memory has another user when it is gone."""

    class device:
        type = "cpu"

    def __init__(self, data: bytes) -> None:
        self._memory = np.frombuffer(bytearray(data), np.uint8)
        weakref.finalize(self, self._memory.fill, 0xEE)

    def data_ptr(self) -> int:
        return int(self._memory.__array_interface__["data"][0])

    def numel(self) -> int:
        return len(self._memory)

    def element_size(self) -> int:
        return 1


def test_the_bytes_of_a_tensor_keep_it() -> None:
    view = view_of(Tensor(b"abcd"))
    assert bytes(view) == b"abcd"
    part = view[1:3].toreadonly()
    del view
    assert bytes(part) == b"bc"


def test_nothing_keeps_a_tensor_that_nobody_uses() -> None:
    tensor = Tensor(b"abcd")
    gone = weakref.ref(tensor)
    view = view_of(tensor)
    del tensor
    assert gone() is not None and bytes(view) == b"abcd"
    del view
    assert gone() is None, "no cycle keeps it"


def test_tensors_that_are_made_for_one_call() -> None:
    client = FakeClient()
    layers = [bytes([number]) * 64 for number in range(4)]
    assert client.put_gather("page", (Tensor(layer) for layer in layers))
    assert client.get("page") == b"".join(layers)
    tensor = Tensor(bytes(64))
    gone = weakref.ref(tensor)
    prepared = client.prepare_ranges([(0, 64, tensor)])
    del tensor
    assert gone() is not None, "prepared ranges keep their buffers"
    assert client.get_ranges("page", prepared) is not None
    del prepared
    assert gone() is None

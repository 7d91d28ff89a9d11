"""simm.host.company: copies release the GIL while several threads of the process work, and only then."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from simm.arena.reader import Located
from simm.host import company as company_module
from simm.host.buffers import RELEASE_BYTES, Copier
from simm.host.company import LOOK_S, LOOKS, WORK_NS, Company
from simm.ipc import get as get_module
from simm.ipc.get import ShmGet
from tests.support.client_values import forked
from tests.support.waiting import wait_until

WAIT_S = 120


class Threads:
    """Threads with names, and how much processor time each has used. ``ended``: the kernel knows it no more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.used: dict[str, int] = {}
        self.ended: set[str] = set()
        self.now = 0.0
        monkeypatch.setattr(threading, "enumerate", self._all)
        monkeypatch.setattr(company_module.time, "clock_gettime_ns", self._clock)
        monkeypatch.setattr(company_module.time, "monotonic", lambda: self.now)

    def _all(self) -> list[Any]:
        return [SimpleNamespace(name=name, native_id=number + 10) for number, name in enumerate(self.used)]

    def _clock(self, number: int) -> int:
        name = list(self.used)[~(number >> 3) - 10]
        if name in self.ended:
            raise OSError(22, "no such thread")
        return self.used[name]

    def work(self, company: Company, *names: str, ns: int = WORK_NS) -> int:
        """Let these work for so long, and look. Return what is held."""
        for name in names:
            self.used[name] = self.used.get(name, 0) + ns
        self.now += 0.1
        company.look()
        return company.held_bytes


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Threads:
    return Threads(monkeypatch)


def test_one_working_thread_keeps_the_gil(threads: Threads) -> None:
    company = Company()
    threads.used["sleeps"] = 0
    for _ in range(5):
        assert threads.work(company, "main") == RELEASE_BYTES
        assert threads.work(company, "main", "simm-client", "simm-copy_0") == RELEASE_BYTES, "our own are none"
    threads.work(company, "main", ns=10 * WORK_NS)
    assert threads.work(company, "main", "ticks", ns=WORK_NS - 1) == RELEASE_BYTES


@pytest.mark.parametrize("other", ["Thread-1", "simm-async_0"])
def test_two_working_threads_release_it_and_for_a_while_after(threads: Threads, other: str) -> None:
    company = Company()
    threads.work(company, "main", other)
    assert threads.work(company, "main", other) == 0
    threads.ended.add(other)
    for _ in range(LOOKS - 1):
        assert threads.work(company, "main") == 0
    assert threads.work(company, "main") == RELEASE_BYTES


def test_the_first_thread_of_a_child_is_counted() -> None:
    """Python gives it the number that its parent's has."""

    def body() -> bool:
        company = Company()
        company._after_fork()  # as the client's own, which were there before
        done = threading.Event()

        def work() -> None:
            while not done.wait(LOOK_S):
                burn()

        other = threading.Thread(target=work)
        other.start()
        deadline = time.monotonic() + WAIT_S
        while company.held_bytes and time.monotonic() < deadline:
            burn()
            time.sleep(LOOK_S)
            company.look()
        done.set()
        return company.held_bytes == 0

    def burn() -> None:
        until = time.thread_time_ns() + 2 * WORK_NS
        while time.thread_time_ns() < until:
            pass

    assert forked(body) == 0


def test_looks_are_not_made_too_often(threads: Threads) -> None:
    company = Company()
    threads.work(company, "main", "other")
    threads.work(company, "main", "other")
    threads.now += 0.01
    used = company._used
    company.look()
    assert company._used is used


def test_a_child_begins_anew(threads: Threads) -> None:
    company = Company()
    threads.work(company, "main", "other")
    assert threads.work(company, "main", "other") == 0
    company._after_fork()
    assert company.held_bytes == RELEASE_BYTES


def test_threads_that_work_are_seen_by_the_kernels_clock() -> None:
    company = Company()
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            sum(range(1000))

    other = threading.Thread(target=work)
    other.start()
    try:

        def seen() -> bool:
            until = time.thread_time() + 0.001
            while time.thread_time() < until:
                pass
            company.look()
            return company.held_bytes == 0

        wait_until(seen, "both threads are seen at work")
    finally:
        over.set()
        other.join(WAIT_S)


# -- what it changes ---------------------------------------------------------------------------------------


class _Reader:
    """An arena of a few pages."""

    data_offset = 0
    node = -1

    def __init__(self) -> None:
        self.array = np.random.default_rng(1).integers(0, 256, 1 << 16, np.uint8)
        self.data = memoryview(self.array)
        self.data_address = self.array.ctypes.data


@pytest.fixture(params=[RELEASE_BYTES, 0], ids=["held", "released"])
def held(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(get_module, "COMPANY", SimpleNamespace(held_bytes=request.param))
    yield request.param


@pytest.mark.parametrize("size", [1, 100, 4096, RELEASE_BYTES - 1])
@pytest.mark.parametrize("way", ["one", "batch"])
def test_copies_are_the_same_either_way(held: int, size: int, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control is in it: held, no function that releases the GIL is called."""
    reader: Any = _Reader()
    get = ShmGet(Copier(1), False, {})
    released: list[int] = []

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: (released.append(given[2]), real(*given))

    monkeypatch.setattr(get_module, "memmove", counted(get_module.memmove))
    monkeypatch.setattr(get._copier, "copy", counted(get._copier.copy))
    target = bytearray(size + 10)
    sink = memoryview(target)
    if way == "one":
        get.copy_out(reader, Located(0, 0, 77, size, 0, 0), sink)
    else:
        get._copy_group(reader, [0], [77], [size], [sink], np.ones(1, np.bool_))
    assert target == bytes(reader.data[77 : 77 + size]) + bytes(10)
    assert released == ([] if held else [size])

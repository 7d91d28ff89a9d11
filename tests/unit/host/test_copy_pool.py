"""simm.host.copy_pool and batches of copies: what is divided is copied whole, and nothing is copied afterwards."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from simm.host import buffers, copy_pool
from simm.host.buffers import Copier
from simm.host.copy_pool import THREADS_MAX, CopyPool, cpus_of, default_threads
from tests.support.scarce_threads import ERRORS, no_threads
from tests.support.waiting import wait_until

WAIT_S = 120


@pytest.fixture
def pool() -> Iterator[CopyPool]:
    made = CopyPool()
    made.join()
    yield made
    made.leave()


def copier_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("simm-copy")}


# -- batches -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("seed", range(3))
def test_a_batch_is_copied_whole_and_nothing_else(threads: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "SPREAD_BYTES", 100_000)
    monkeypatch.setattr(buffers, "PART_BYTES", 8192)
    rng = random.Random(seed)
    source = np.frombuffer(rng.randbytes(1 << 20), np.uint8)
    target = np.zeros(4 << 20, np.uint8)
    expected = target.copy()
    copier = Copier(threads)
    at = 0
    copies = []
    for _ in range(60):
        size = rng.choice([1, 100, 4096, 33_000, 70_000, rng.randrange(1, 150_000)])
        begin = rng.randrange(len(source) - size)
        at += rng.randrange(5000)
        if at + size > len(target):
            break
        copies.append((target.ctypes.data + at, source.ctypes.data + begin, size))
        expected[at : at + size] = source[begin : begin + size]
        at += size
    rng.shuffle(copies)
    copier.copy_all(copies)
    assert np.array_equal(target, expected)
    copier.copy_all([])
    copier.close()
    copier.copy_all(copies[:3])  # a call in another thread may still run


def test_parts_are_of_equal_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "PART_BYTES", 4096)
    monkeypatch.setattr(buffers, "memmove", lambda *_: None)
    counts: list[int] = []
    monkeypatch.setattr(buffers.POOL, "run", lambda part, count, *_: counts.append(count))
    copier = Copier(4)
    copier._copy_parts([(0, 0, 4 << 20), (0, 0, 4 << 20)], 8 << 20)
    copier._copy_parts([(0, 0, 8192)] * 1024, 8 << 20)
    copier._copy_parts([(0, 0, 8192)], 8192)
    assert counts == [8, 8, 2]
    copier.close()


def test_small_batches_stay_in_the_callers_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers.POOL, "run", lambda *_: pytest.fail("threads"))
    source, target = np.ones(4096, np.uint8), np.zeros(4096, np.uint8)
    copier = Copier(4)
    copier.copy_all([(target.ctypes.data, source.ctypes.data, 4096)])
    assert target.all()
    copier.close()


# -- the pool ------------------------------------------------------------------------------------------


def test_each_part_runs_once(pool: CopyPool) -> None:
    for count in (1, 2, 7, 100):
        done: list[int] = []
        pool.run(done.append, count, 3)
        assert sorted(done) == list(range(count))


def test_several_threads_take_part(pool: CopyPool) -> None:
    together = threading.Barrier(3)
    pool.run(lambda _: together.wait(WAIT_S) and None, 3, 3)


def test_a_pool_that_is_busy_delays_nobody(pool: CopyPool) -> None:
    """Another call's parts have all threads: this one does its own work by itself."""
    free, started = threading.Event(), threading.Barrier(3)

    def wait(_: int) -> None:
        started.wait(WAIT_S)
        free.wait(WAIT_S)

    other = threading.Thread(target=pool.run, args=(wait, 2, 2))
    other.start()
    started.wait(WAIT_S)
    done: list[str] = []
    pool.run(lambda _: done.append(threading.current_thread().name), 5, 2)
    assert done == [threading.current_thread().name] * 5
    free.set()
    other.join(WAIT_S)
    assert not other.is_alive()


@pytest.mark.parametrize("where", ["caller", "helper"])
def test_an_error_ends_the_others_first(pool: CopyPool, where: str) -> None:
    """When it is raised no part runs: the caller gives the chunks back."""
    main = threading.current_thread()
    failed, running = threading.Event(), []
    both = threading.Barrier(2)

    def part(_: int) -> None:
        both.wait(WAIT_S)
        if (threading.current_thread() is main) == (where == "caller"):
            failed.set()
            raise KeyboardInterrupt
        running.append(1)
        failed.wait(WAIT_S)
        running.pop()

    with pytest.raises(KeyboardInterrupt):
        pool.run(part, 2, 2)
    assert not running and failed.is_set()


def test_without_threads_the_caller_does_all(pool: CopyPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A submit() that fails may have left its job behind, which another thread begins later: it finds nothing to do."""
    done: list[str] = []
    late: list[Any] = []

    def fails(job: Any) -> None:
        late.append(job)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(pool, "_helpers", lambda *_: SimpleNamespace(submit=fails, shutdown=lambda wait: None))
    pool.run(lambda _: done.append(threading.current_thread().name), 4, 3)
    assert done == [threading.current_thread().name] * 4
    with ThreadPoolExecutor(1) as other:
        other.submit(late[0]).result(WAIT_S)
    assert len(done) == 4


@pytest.mark.parametrize("error", ERRORS)
def test_after_a_lack_of_threads_all_of_them_copy(
    pool: CopyPool, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an executor has queued then counts as an idle thread, so that it would start one less for good."""
    monkeypatch.setattr(copy_pool, "RENEW_S", 1e9)
    busy, go = threading.Barrier(3), threading.Event()

    def wait(_: int) -> None:
        busy.wait(WAIT_S)
        assert go.wait(WAIT_S)

    caller = threading.Thread(target=pool.run, args=(wait, 2, 4))
    caller.start()
    busy.wait(WAIT_S)  # one helper is there, and has no time
    ((executor, _),) = pool._executors.values()
    done: list[int] = []
    with no_threads("simm-copy", error):
        for _ in range(3):
            pool.run(done.append, 4, 4)
    assert sorted(done) == sorted(3 * [0, 1, 2, 3])
    assert list(pool._executors.values()) == [(executor, 3)], "it is not made anew at each copy"
    pool._renew_at = 1e-9
    go.set()
    caller.join(WAIT_S)
    wait_until(lambda: executor._shutdown or executor._work_queue.empty(), "it does not take what is queued")
    together = threading.Barrier(4)

    def meet(_: int) -> None:
        together.wait(WAIT_S)

    pool.run(meet, 4, 4)


def test_without_descriptors_the_caller_does_all(pool: CopyPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first copy of a process loads the module that makes threads, and reads its file for that."""

    def fails(*_: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(pool, "_helpers", fails)
    done: list[int] = []
    pool.run(done.append, 4, 3)
    assert done == [0, 1, 2, 3]


def test_copiers_share_threads_which_end_with_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "SPREAD_BYTES", 8192)
    monkeypatch.setattr(buffers, "PART_BYTES", 4096)
    monkeypatch.setattr(buffers, "POOL", CopyPool())  # copiers of other tests may still be there
    before = copier_threads()
    source, target = np.ones(1 << 20, np.uint8), np.zeros(1 << 20, np.uint8)
    copiers = [Copier(3) for _ in range(4)]
    for copier in copiers:
        copier.copy_all([(target.ctypes.data, source.ctypes.data, 1 << 20)])
    assert len(copier_threads() - before) <= 2
    ((executor, _),) = buffers.POOL._executors.values()
    for copier in copiers:
        copier.close()
        copier.close()
    for thread in executor._threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()


def where(pool: CopyPool, node: int) -> set[frozenset[int]]:
    """Return the CPUs that the helpers of a copy of this node's memory may run on."""
    caller, together = threading.current_thread(), threading.Barrier(3)
    found: set[frozenset[int]] = set()

    def part(_: int) -> None:
        together.wait(WAIT_S)
        if threading.current_thread() is not caller:
            found.add(frozenset(os.sched_getaffinity(0)))

    pool.run(part, 3, 3, node)
    return found


def test_the_threads_of_a_node_stay_on_it(pool: CopyPool, monkeypatch: pytest.MonkeyPatch) -> None:
    own = frozenset(os.sched_getaffinity(0))
    one = frozenset(sorted(own)[:1])
    monkeypatch.setattr(copy_pool, "cpus_of", lambda node: one if node == 1 else frozenset())
    assert where(pool, 1) == {one}
    assert where(pool, 0) == where(pool, -1) == {own}
    assert where(pool, 1) == {one}
    assert os.sched_getaffinity(0) == own, "the caller's thread stays where it is"
    assert sorted(pool._executors) == [-1, 1]
    threads = [thread for executor, _ in pool._executors.values() for thread in executor._threads]
    pool.leave()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    pool.join()


def test_a_refused_affinity_costs_no_copy(pool: CopyPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_pool, "cpus_of", lambda _: frozenset({4095}))
    assert where(pool, 0) == {frozenset(os.sched_getaffinity(0))}


def test_cpus_of_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, cpus in enumerate(("0-3", "4-7", "", "no list")):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(cpus + "\n")
    for allowed, found in (
        (range(8), {0: {0, 1, 2, 3}, 1: {4, 5, 6, 7}, 2: set(), 3: set(), 9: set(), -1: set()}),
        ({3, 4}, {0: {3}, 1: {4}}),
        ({0, 1}, {0: set(), 1: set()}),  # bound already, or none of them
    ):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, allowed=allowed: set(allowed))
        assert {node: set(cpus_of(node, str(tmp_path))) for node in found} == found


def test_a_child_makes_threads_of_its_own(pool: CopyPool) -> None:
    pool.run(lambda _: None, 4, 3)
    pool._after_fork()
    done: list[int] = []
    pool.run(done.append, 4, 3)
    assert sorted(done) == [0, 1, 2, 3]


def test_threads_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    nodes = str(tmp_path)
    assert default_threads(f"{nodes}/nowhere") == THREADS_MAX
    for number, cpus in enumerate(("0-3,8-9", "4-7", "")):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(cpus + "\n")
    (tmp_path / "online").write_text("0-2\n")
    assert default_threads(nodes) == 3
    for allowed, count in ((range(4), 2), ({4, 5}, 1), ({63}, 1), ({0}, 1)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, allowed=allowed: set(allowed))
        assert default_threads(nodes) == count
    (tmp_path / "node1" / "cpulist").write_text("no list\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert default_threads(nodes) == 4

"""simm.host.copy_pool and batches of copies: what is divided is copied whole, and nothing is copied afterwards."""

from __future__ import annotations

import errno
import gc
import os
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from simm.host import buffers, copy_pool
from simm.host.buffers import Copier
from simm.host.copy_pool import THREADS_MAX, CopyPool, cpus_of, default_threads
from simm.host.threads import Pool
from tests.support.interrupts import everywhere
from tests.support.scarce_threads import ERRORS, lose_jobs, no_threads
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
    """A job that another thread begins all the same, and later, finds nothing to do."""
    done: list[str] = []
    late: list[Any] = []
    monkeypatch.setattr(pool, "_helpers", lambda *_: SimpleNamespace(hand_over=late.append))
    pool.run(lambda _: done.append(threading.current_thread().name), 4, 3)
    assert done == [threading.current_thread().name] * 4
    with ThreadPoolExecutor(1) as other:
        other.submit(late[0]).result(WAIT_S)
    assert len(done) == 4


@pytest.mark.parametrize("where", ["helper", "lost helper"])
def test_issue_a_part_that_fails_fails_the_copy(pool: CopyPool, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Also one of a helper that nobody knows of: the copy counted as done, and a get with old bytes as a hit."""
    caller, begun = threading.current_thread(), threading.Event()
    threads: list[threading.Thread] = []

    def lost(helper: Callable[[], None]) -> None:
        threads.append(threading.Thread(target=helper))
        threads[0].start()
        assert begun.wait(WAIT_S)

    def part(_: int) -> None:
        if threading.current_thread() is not caller:
            begun.set()
            raise MemoryError
        assert begun.wait(WAIT_S)

    if where == "lost helper":
        monkeypatch.setattr(pool, "_helpers", lambda *_: SimpleNamespace(hand_over=lost))
    with pytest.raises(MemoryError):
        pool.run(part, 4, 3)
    for thread in threads:
        thread.join(WAIT_S)


def test_issue_the_last_user_ends_in_a_helpers_thread_that_is_just_starting(pool: CopyPool) -> None:
    """The collector ended it there: the helper waited for the lock of the caller, who waited for the helper."""
    pool.join()
    pool._pools[-1] = Pool(1, "simm-copy", lambda: [pool.leave() for _ in range(2)])
    done: list[int] = []
    caller = threading.Thread(target=pool.run, args=(done.append, 4, 2), daemon=True)
    caller.start()
    caller.join(WAIT_S)
    assert not caller.is_alive() and sorted(done) == [0, 1, 2, 3] and not pool._pools
    pool.join()


@pytest.mark.parametrize("how", ["part", "interrupt", "job"])
def test_a_copy_that_failed_keeps_nothing(pool: CopyPool, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """A cycle with the exception would keep the caller's arena until the collector runs."""
    if how == "interrupt":
        abandon = copy_pool._abandon

        def interrupted(*given: Any) -> None:
            abandon(*given)
            raise KeyboardInterrupt

        monkeypatch.setattr(copy_pool, "_abandon", interrupted)
    elif how == "job":
        lose_jobs(pool._helpers(1, -1), 1)

    class Arena:
        pass

    arena = Arena()
    gone, caller, begun = weakref.ref(arena), threading.current_thread(), threading.Event()

    def part(number: int, _arena: Arena = arena) -> None:
        if how == "job":  # the thread has the job by the time that the last part ends
            if number:
                wait_until(lambda: not pool._pools[-1]._jobs, "the job is lost")
            return
        if threading.current_thread() is not caller:
            begun.set()
            raise MemoryError
        assert begun.wait(WAIT_S)

    gc.collect()
    gc.disable()
    try:
        try:
            pool.run(part, 2, 2)
        except (MemoryError, KeyboardInterrupt) as exc:
            raised = type(exc)
        assert raised is (KeyboardInterrupt if how == "interrupt" else MemoryError)
        del part, arena
        wait_until(lambda: gone() is None, "the helper's thread has let go of it")
    finally:
        gc.enable()


def test_issue_no_interrupt_of_a_copy_stops_the_next_one(pool: CopyPool) -> None:
    """The lock of an executor's semaphore stayed taken, and with it that of all executors of the process."""
    together = threading.Barrier(3)
    pool.run(lambda _: together.wait(WAIT_S) and None, 3, 3)

    def check() -> None:
        done: list[int] = []
        another = threading.Thread(target=pool.run, args=(done.append, 6, 3), daemon=True)
        another.start()
        another.join(WAIT_S)
        assert not another.is_alive() and sorted(done) == list(range(6))

    modules = ("simm.host", "threading", "concurrent.futures")
    assert everywhere(lambda: pool.run(lambda _: None, 6, 3), check, modules) > 20
    pool.run(lambda _: together.wait(WAIT_S) and None, 3, 3)  # no thread is lost


def test_threads_are_added_when_more_are_asked_for(pool: CopyPool) -> None:
    found: list[set[threading.Thread]] = []
    for count in (2, 4, 3):
        together = threading.Barrier(count)
        pool.run(lambda _, together=together: together.wait(WAIT_S) and None, count, count)
        (only,) = pool._pools.values()
        found.append(set(only._threads))
    assert [len(each) for each in found] == [1, 3, 3] and found[0] < found[1] == found[2]


@pytest.mark.parametrize("error", ERRORS)
def test_after_a_lack_of_threads_all_of_them_copy(pool: CopyPool, error: type[Exception]) -> None:
    """An executor counts what it has queued then as an idle thread, and would start one less for good."""
    busy, go = threading.Barrier(3), threading.Event()

    def wait(_: int) -> None:
        busy.wait(WAIT_S)
        assert go.wait(WAIT_S)

    caller = threading.Thread(target=pool.run, args=(wait, 2, 4))
    caller.start()
    busy.wait(WAIT_S)  # one helper is there, and has no time
    done: list[int] = []
    with no_threads("simm-copy", error):
        for _ in range(3):
            pool.run(done.append, 4, 4)
    assert sorted(done) == sorted(3 * [0, 1, 2, 3])
    go.set()
    caller.join(WAIT_S)
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
    (only,) = buffers.POOL._pools.values()
    for copier in copiers:
        copier.close()
        copier.close()
    for thread in only._threads:
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
    assert sorted(pool._pools) == [-1, 1]
    threads = [thread for each in pool._pools.values() for thread in each._threads]
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

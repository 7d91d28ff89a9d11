"""Views in forked children: the bytes of the moment of the fork, or a UsageError that names the fork."""

from __future__ import annotations

import gc
import mmap
import multiprocessing
import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from simm.client import Client, View
from simm.errors import UsageError
from simm.host import fork_copies, pages
from tests.support.client_values import JOIN_S, MIB, WAIT_S, forked, pattern
from tests.support.segments import expect_segv
from tests.support.waiting import wait_until

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
#: Bytes of a value: several in one page, one with an odd size, one of many pages.
SIZES = (100, 4096, 70_001, 3 * MIB)


def says_fork(view: View) -> bool:
    """Return whether each way to the bytes raises a UsageError that names the fork."""
    for touch in (lambda: view.data, lambda: bytes(view)):
        try:
            touch()
        except UsageError as error:
            if "fork" not in str(error):
                return False
        else:
            return False
    return bool(view) and len(view) > 0 and "closed" in repr(view)


@pytest.fixture
def pinned(cluster: Any, namespace: str) -> Iterator[Client]:
    """A client by shared memory, as only its views lie in an arena."""
    with Client(cluster.manager, namespace=namespace, path="shm", deadline_s=30.0) as connected:
        assert connected.wait_ready(60.0)
        yield connected
    gc.collect()
    assert not fork_copies._LENT, "a view that has ended is lent still"


def test_a_child_reads_what_its_parent_has_views_of(client: Client) -> None:
    values = {f"{number} {size}": pattern(size, number) for size in SIZES for number in range(4)}
    assert all(client.put_many(list(values), list(values.values())))
    views = {key: client.view(key) for key in values}
    slices = {key: view.data[7:91] for key, view in views.items()}
    arrays = {key: np.frombuffer(view.data, np.uint8) for key, view in views.items()}
    miss = client.view("nothing")

    def child() -> bool:
        exact = all(
            bytes(views[key]) == value and slices[key] == value[7:91] and arrays[key].tobytes() == value
            for key, value in values.items()
        )
        again = forked(lambda: all(bytes(views[key]) == value for key, value in values.items())) == 0
        stored = client.put("child", views["0 4096"]) and client.get("child") == values["0 4096"]
        for view in views.values():
            view.close()
        still = all(arrays[key].tobytes() == value for key, value in values.items())
        views.clear(), slices.clear(), arrays.clear()
        gc.collect()
        return exact and again and stored and still and not miss and client.get("2 70001") == values["2 70001"]

    assert forked(child) == 0
    assert all(bytes(views[key]) == value for key, value in values.items())
    for view in views.values():
        view.close()


def test_what_the_parent_does_after_the_fork_changes_nothing(cluster: Any, pinned: Client) -> None:
    old, new = pattern(MIB, 1), pattern(MIB, 2)
    assert pinned.put("k", old)
    view = pinned.view("k")
    arrays = [np.frombuffer(view.data, np.uint8)]
    near, far = multiprocessing.Pipe()

    def child() -> bool:
        assert far.poll(WAIT_S) and far.recv() == "overwritten"
        return bytes(view) == old and arrays[0].tobytes() == old

    process = multiprocessing.get_context("fork").Process(target=lambda: exit(0 if child() else 1))
    process.start()
    try:
        copy = view.data[:10].tobytes()
        arrays.clear()
        view.close()
        gc.collect()
        assert copy == old[:10]
        wait_until(lambda: cluster.worker_stats()["pins"] == 0, "the pin goes, although the child has the view")
        for number in range(8):  # the chunk gets other bytes
            assert pinned.put("k", new) and pinned.put(f"more {number}", new)
        near.send("overwritten")
        process.join(JOIN_S)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()
        near.close(), far.close()


def test_views_beyond_the_bound_say_so(pinned: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_copies, "COPY_BYTES_MAX", 2 * MIB)
    values = [pattern(MIB, number) for number in range(4)]
    assert all(pinned.put_many([str(number) for number in range(4)], values))
    views = [pinned.view(str(number)) for number in range(4)]
    held = views[3].data[1:]

    def child() -> bool:
        found = [number for number in range(4) if not says_fork(views[number])]
        right = all(bytes(views[number]) == values[number] for number in found)
        fresh = pinned.view("3")
        return found in ([0, 1], [0]) and right and bytes(fresh) == values[3]

    def touch() -> bool:
        expect_segv()
        return bool(held[0])

    assert forked(child) == 0
    assert forked(touch) == -signal.SIGSEGV, "the documented end of a buffer whose value has no copy"
    assert [bytes(view) for view in views] == values


def test_without_memory_for_the_copy_views_say_so(pinned: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pinned.put("k", b"value" * 999)
    view = pinned.view("k")
    monkeypatch.setattr(pages, "map_anonymous", lambda length: None)
    assert forked(lambda: says_fork(view)) == 0
    monkeypatch.undo()
    assert forked(lambda: bytes(view) == b"value" * 999) == 0
    assert bytes(view) == b"value" * 999


def test_control_without_the_hook_a_child_dies(pinned: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pinned.put("k", b"value" * 999)
    view = pinned.view("k")
    hooks = [hook for hook in pages.fork._FUNCTIONS if hook is not fork_copies._place]
    assert len(hooks) == len(pages.fork._FUNCTIONS) - 1
    monkeypatch.setattr(pages.fork, "_FUNCTIONS", hooks)

    def child() -> bool:
        expect_segv()
        return bytes(view) == b"value" * 999

    assert forked(child) == -signal.SIGSEGV


def test_a_range_that_is_taken_is_not_overwritten(pinned: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that something else has mapped at the place, before the hooks run, is not the copy's to replace."""
    assert pinned.put("k", pattern(MIB))
    view = pinned.view("k")
    lent = next(iter(fork_copies._LENT.values()))
    start, stop = lent.pages
    reserve = pages.fork._FUNCTIONS.index(pages._reserve_in_child)

    def taken_first() -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | pages._MAP_FIXED_NOREPLACE
        assert pages._LIBC.mmap(start, stop - start, 3, flags, -1, 0) == start
        pages._reserve_in_child()

    hooks = list(pages.fork._FUNCTIONS)
    hooks[reserve] = taken_first
    monkeypatch.setattr(pages.fork, "_FUNCTIONS", hooks)
    assert forked(lambda: says_fork(view)) == 0


def test_forks_while_other_threads_take_and_drop_views(pinned: Client) -> None:
    """Whatever view a child finds is exact. A thread may be anywhere in taking or dropping one."""
    values = {f"k{number}": pattern(20_000 + number, number) for number in range(6)}
    assert all(pinned.put_many(list(values), list(values.values())))
    shared: dict[str, View] = {}
    stop = threading.Event()
    faults: list[str] = []

    def churn(keys: list[str]) -> None:
        while not stop.is_set():
            for key in keys:
                taken = pinned.view(key)
                if bytes(taken) != values[key]:
                    faults.append(key)
                shared[key] = taken

    threads = [threading.Thread(target=churn, args=(list(values)[start::2],)) for start in range(2)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: len(shared) == len(values), "all keys have views")
        for _ in range(30):
            assert forked(lambda: all(bytes(view) == values[key] for key, view in list(shared.items()))) == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not faults
    shared.clear()


def test_a_dropped_client_in_the_child_leaves_its_memory_alone(cluster: Any, namespace: str) -> None:
    """Arena and ring are unmapped by finalizers there. What the child has mapped meanwhile stays."""
    holder = [Client(cluster.manager, namespace=namespace, path="shm", deadline_s=30.0)]
    assert holder[0].put("k", pattern(MIB))
    views = [holder[0].view("k")]

    def child() -> bool:
        mine = [mmap.mmap(-1, size) for size in (4096, 64 << 10, MIB, 16 * MIB) for _ in range(50)]
        for each in mine:
            each[:8] = b"children"
        exact = bytes(views[0]) == pattern(MIB)
        holder.clear(), views.clear()
        gc.collect()
        return exact and all(each[:8] == b"children" for each in mine)

    assert forked(child) == 0
    assert holder[0].get("k") == bytes(views[0]) == pattern(MIB)
    views.clear()
    holder[0].close()

"""Staging memory: blocks that transfers share, and whole buffers."""

from __future__ import annotations

import gc
import os
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from simm.errors import CorruptionError, TransportError
from simm.host import threads as threads_module
from simm.rdma.staging import BLOCK_BYTES, IDLE_MAX, StagingMemory, StagingPool
from tests.support.client_checks import check_staging
from tests.support.waiting import wait_until

#: From 3.12 on CPython warns of every fork next to threads. They are the point of a test.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")

WAIT_S = 120.0
MIB = 1 << 20


class Rail:
    """Registers what it is given, and counts what is open."""

    name = "r0"

    def __init__(self) -> None:
        self.open = 0

    def register(self, address: int, length: int, access: Any) -> Any:
        self.open += 1

        def close() -> None:
            self.open -= 1

        return SimpleNamespace(address=address, lkey=7, rkey=8, close=close)


def test_blocks_are_shared_up_to_the_limit() -> None:
    pool = StagingPool(3 * BLOCK_BYTES)
    first = pool.take(2, time.monotonic() + WAIT_S)
    assert [block.size for block in first] == [BLOCK_BYTES] * 2
    second = pool.take(8, time.monotonic() + WAIT_S)
    assert len(second) == 1, "fewer than wanted, and one at least"
    addresses = {block.address for block in first + second}
    assert len(addresses) == 3
    for number, block in enumerate(first + second):
        block.view[:] = bytes([number]) * BLOCK_BYTES
    assert [block.view[-1] for block in first + second] == [0, 1, 2]
    with pytest.raises(TransportError, match="deadline passed while waiting for a staging buffer"):
        pool.take(1, time.monotonic() + 0.01)
    pool.release(second)
    pool.release([])
    assert {block.address for block in pool.take(1, time.monotonic() + WAIT_S)} <= addresses
    pool.release(first)
    check_staging(pool)
    assert "2 free of 3 blocks" in repr(pool)


def test_a_waiting_transfer_gets_what_another_releases() -> None:
    pool = StagingPool(BLOCK_BYTES)
    held = pool.take(1, time.monotonic() + WAIT_S)
    got: list[Any] = []
    waiting = threading.Thread(target=lambda: got.append(pool.take(4, time.monotonic() + WAIT_S)))
    waiting.start()
    pool.release(held)
    waiting.join(WAIT_S)
    assert [block.address for block in got[0]] == [held[0].address]


@pytest.mark.parametrize("wanted", [1, 2])
def test_issue_blocks_that_one_call_gives_back_reach_all_whom_they_suffice_for(
    wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One was woken and took its share. The others slept on, next to free blocks."""
    monkeypatch.setattr(threads_module, "AGAIN_S", 2 * WAIT_S)
    pool = StagingPool(4 * BLOCK_BYTES)
    held = pool.take(4, time.monotonic() + WAIT_S)
    addresses = {block.address for block in held}
    got: list[Any] = []

    def take() -> None:
        got.extend(pool.take(wanted, time.monotonic() + 2 * WAIT_S))

    waiting = [threading.Thread(target=take, daemon=True) for _ in range(4 // wanted)]
    for thread in waiting:
        thread.start()
    wait_until(lambda: len(pool._changed._waiting) == len(waiting), "they wait")
    pool.give_back(held)
    for thread in waiting:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert len(got) == 4 and {block.address for block in got} == addresses and not pool._changed


def test_issue_more_blocks_than_their_taker_wants_wake_no_more_than_one_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else dozens of threads look for each block, and all but one in vain."""
    monkeypatch.setattr(threads_module, "AGAIN_S", WAIT_S)
    pool = StagingPool(2 * BLOCK_BYTES)
    held = pool.take(2, time.monotonic() + WAIT_S)
    looks: list[int] = []
    real = pool._take_locked

    def look(*given: Any) -> bool:
        looks.append(1)
        return real(*given)

    monkeypatch.setattr(pool, "_take_locked", look)
    got: list[Any] = []
    waiting = [threading.Thread(target=lambda: got.append(pool.take(1, time.monotonic() + WAIT_S))) for _ in range(8)]
    for thread in waiting:
        thread.start()
    wait_until(lambda: len(pool._changed._waiting) == 8, "they wait")
    looks.clear()
    pool.give_back(held)
    wait_until(lambda: len(got) == 2, "two have one each")
    assert len(looks) == 2 and len(pool._changed._waiting) == 6
    for served in range(2, 8):
        pool.give_back(got[served - 2])
        wait_until(lambda served=served: len(got) == served + 1, "the next one has it")
    for thread in waiting:
        thread.join(WAIT_S)


def test_check_sees_a_block_that_is_free_twice() -> None:
    pool = StagingPool()
    blocks = pool.take(2, time.monotonic() + WAIT_S)
    pool.release(blocks)
    check_staging(pool)
    pool.release(blocks[:1])
    with pytest.raises(CorruptionError):
        check_staging(pool)


def test_whole_buffers_are_reused_the_smallest_that_fits() -> None:
    pool = StagingPool()
    large, small = pool.take_whole(5 * MIB), pool.take_whole(10)
    assert (large.size, small.size) == (8 * MIB, MIB)
    pool.release_whole(small)
    pool.release_whole(large)
    assert pool.take_whole(100) is small
    assert pool.take_whole(100) is large, "a larger one rather than a new one"
    pool.release_whole(large)
    exact = pool.take_whole(5000, exact=True)
    assert exact.size == 8192, "one that is held for long is never larger than asked for"
    assert exact.memory is not large.memory


def test_the_largest_stay_idle_and_the_others_are_deregistered() -> None:
    pool, rail = StagingPool(), Rail()
    buffers = [pool.take_whole(size * MIB) for size in (1, 2, 4, 8)]
    assert [buffer.registration.lkey(rail) for buffer in buffers] == [7] * 4  # type: ignore[arg-type]
    for buffer in buffers:
        pool.release_whole(buffer)
    assert rail.open == IDLE_MAX
    assert pool.take_whole(8 * MIB) is buffers[3]
    pool.drop(buffers[3])
    assert rail.open == 1
    assert buffers[3].registration.closed
    pool.close()
    assert rail.open == 0
    assert pool.take_whole(MIB) not in buffers


def test_closing_memory_tells_other_drivers_of_it() -> None:
    memory, ended = StagingMemory(4096), []
    assert (memory.data, memory.data_address, memory.name) == (memory.view, memory.address, "staging memory")
    memory.at_close.append(lambda: ended.append(1))
    memory.close()
    memory.close()
    assert ended == [1]


def test_no_memory_is_a_transport_error() -> None:
    with pytest.raises(TransportError, match="no memory for"):
        StagingMemory(1 << 60)


def test_a_forked_child_gives_all_of_it_up() -> None:
    """The memory is not there: it is neither touched nor unmapped, also when the objects go."""
    pool, rail = StagingPool(), Rail()
    blocks, whole = pool.take(2, time.monotonic() + WAIT_S), pool.take_whole(MIB)
    blocks[0].registration.lkey(rail)  # type: ignore[arg-type]
    pid = os.fork()
    if pid == 0:
        status = 99
        try:
            pool.forget()
            del blocks, whole
            gc.collect()
            assert rail.open == 1, "the parent's region"
            (block,) = pool.take(1, time.monotonic() + WAIT_S)
            block.view[:4] = b"mine"
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    pool.release(blocks)
    pool.release_whole(whole)
    check_staging(pool)
    assert bytes(blocks[0].view[:4]) == bytes(4)
    pool.close()
    assert rail.open == 0

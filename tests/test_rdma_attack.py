"""Attacks on the RDMA path: schedules, deaths and answers that nobody meant, one test for each hole that was found."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import threading
import time
from collections.abc import Iterator

import pytest
from clusters import wait_until
from rdmatown import RdmaTown, path_of, until_rdma

from simm import session as session_module

KIB = 1 << 10
MIB = 1 << 20


@pytest.fixture(autouse=True)
def nothing_buried() -> Iterator[None]:
    session_module._BURIED.clear()
    yield
    session_module._BURIED.clear()


# -- forks ---------------------------------------------------------------------------------------------------


def _map_at(address: int, size: int) -> int:
    """Map fresh memory at this very place, where nothing must be mapped; where it came to lie."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    noreplace = 0x100000
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | noreplace
    return int(libc.mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) or 0)


def test_a_child_that_drops_the_parents_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registered memory is not there in a child, so its addresses may be somebody else's: nobody may unmap them."""
    with RdmaTown(monkeypatch) as town:
        client = town.rdma()
        assert client.put("k", bytes(5000))  # a lane with its scratch, and bounce blocks
        path = path_of(client)
        scratch = path.take(time.monotonic() + 5)
        path.give(scratch)
        ours = [(pages.address, pages.size) for pages in (*path.bounce._pages, scratch._scratch)]
        del path, scratch
        child = os.fork()
        if not child:
            code = 1
            try:
                for address, size in ours:
                    if _map_at(address, size) != address:
                        os._exit(2)
                    ctypes.memset(address, 0x5A, size)
                town.clients.clear()
                del client
                gc.collect()
                if all(ctypes.string_at(address + size - 8, 8) == b"\x5a" * 8 for address, size in ours):
                    code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# -- ends ----------------------------------------------------------------------------------------------------


def test_a_path_that_is_closed_while_the_background_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane in the background's hands is closed as well, once, and by nobody else meanwhile."""
    with RdmaTown(monkeypatch) as town:
        client = town.rdma()
        assert client.put("k", b"value")
        path = path_of(client)
        tend, path.tend = path.tend, lambda now: None  # type: ignore[method-assign]
        time.sleep(0.25)
        tend(time.monotonic())  # whatever is left of a look before
        wait_until(lambda: path._idle and path._watched is None, "a lane is idle")
        town.network.hold()
        posted: list[int] = []
        asked = threading.Event()
        lane = path._idle[0]
        ask = lane.ask_pulse

        def ask_pulse() -> None:
            ask()
            posted.append(1)
            asked.set()

        lane.ask_pulse = ask_pulse  # type: ignore[method-assign]
        looking = threading.Thread(target=tend, args=(time.monotonic(),))
        looking.start()
        assert asked.wait(5)
        path.close()
        looking.join(5)
        assert not looking.is_alive()
        town.network.release()
        wait_until(lambda: not path._lanes, "no lane is left")
        assert not lane.wires


# -- time ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["get", "put", "exists"])
def test_a_full_queue_and_nobody_who_answers(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Posting waits for room, too: not beyond the deadline."""
    with RdmaTown(monkeypatch, depth=32, size=64 * MIB) as town:
        client = town.rdma(deadline_s=0.8)
        path_of(client).tend = lambda now: None  # type: ignore[method-assign]
        keys = [f"k{number}" for number in range(200)]
        values = [bytes(3000)] * 200
        assert all(client.put_many(keys, values))
        sinks = [client.register(bytearray(3000)) for _ in keys]
        town.network.hold()
        began = time.monotonic()
        if what == "get":
            assert client.get_into_many(keys, sinks) == [3000] * 200
        elif what == "put":
            assert all(client.put_many(keys, values))
        else:
            assert all(client.exists_many(keys))
        took = time.monotonic() - began
        town.network.release()
        assert took < 0.8 + 0.5, took
        until_rdma(client)


def test_one_large_value_and_a_full_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    with RdmaTown(monkeypatch, depth=16, size=128 * MIB) as town:
        client = town.rdma(deadline_s=0.8)
        path_of(client).tend = lambda now: None  # type: ignore[method-assign]
        value = bytes(40 * MIB)
        source = client.register(value)
        path_of(client).deadline_s = 60.0
        assert client.put("k", bytes(10 * MIB))
        path_of(client).deadline_s = 0.8
        town.network.hold()
        began = time.monotonic()
        client.put("k2", source)
        took = time.monotonic() - began
        town.network.release()
        assert took < 0.8 + 1.0, took

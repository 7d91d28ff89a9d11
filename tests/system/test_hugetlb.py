"""Data servers whose values are in reserved huge pages, through all that an arena goes through.

The pages are this host's. As root the tests reserve them, and give back what they reserved; else there must be some.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from simm.client import Client
from simm.constants import HUGE_PAGE_BYTES
from simm.host import memory
from tests.support.child import READY_S, child_environment
from tests.support.fleet import Fleet, Server
from tests.support.processes import HERE
from tests.support.waiting import wait_until

POOL: Final = Path("/proc/sys/vm/nr_hugepages")
#: Two arenas of ARENA, and some.
PAGES: Final = 40
ARENA: Final = "32M"
HUGETLB: Final = ("--hugetlb",)


@pytest.fixture(scope="module")
def reserved() -> Iterator[None]:
    """Have ``PAGES`` free huge pages, or skip."""
    before = POOL.read_text() if POOL.exists() else ""
    missing = PAGES - memory.reserved_bytes() // HUGE_PAGE_BYTES
    raised = missing > 0 and os.access(POOL, os.W_OK)
    try:
        if raised:
            with contextlib.suppress(OSError):
                POOL.write_text(str(int(before) + missing))
        if memory.reserved_bytes() < PAGES * HUGE_PAGE_BYTES:
            pytest.skip(f"no {PAGES} huge pages are free here, nor could they be reserved: sysctl vm.nr_hugepages")
        yield
        # What the tests used is free again: no map of it is left in any process.
        wait_until(lambda: memory.reserved_bytes() >= PAGES * HUGE_PAGE_BYTES, "the huge pages are back")
    finally:
        if raised:
            POOL.write_text(before)


@pytest.fixture
def fleet(reserved: None, nothing_is_left: Path) -> Iterator[Fleet]:
    folder = Path(tempfile.mkdtemp(prefix="h", dir=nothing_is_left))
    with Fleet(folder, 1, memory=ARENA, server_arguments=HUGETLB, heartbeat_ms=200) as fleet:
        yield fleet


def value_of(number: int, size: int) -> bytes:
    return (number.to_bytes(4, "little") * (size // 4 + 1))[:size]


def page_sizes(pid: int, name: str) -> set[int]:
    """Return the sizes of the pages, KiB, in which a process maps what has this in its name."""
    found = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path(f"/proc/{pid}/smaps").read_text(), flags=re.MULTILINE)
    return {int(size) for each in found if name in each.partition("\n")[0]
            for size in re.findall(r"^KernelPageSize: +(\d+) kB", each, re.MULTILINE)}  # fmt: skip


def data_of(server: Server) -> str:
    return f"/memfd:simm-{os.geteuid()}-{server.name}-"


@pytest.mark.parametrize("path", ["shm", "tcp"])
def test_values_of_all_sizes(fleet: Fleet, path: str) -> None:
    """Also the last byte of the arena, which the full one comes to; evicted ones miss."""
    with Client(fleet.manager.address, path=path, deadline_s=20.0) as client:
        sizes = [1, 4096, 4097, 65_536, 1_000_001, 3 << 20]
        for number, size in enumerate(sizes * 20):
            assert client.put(f"{path}/{number}", value_of(number, size))
            assert client.get(f"{path}/{number}") in (None, value_of(number, size))
        found = [client.get(f"{path}/{number}") for number in range(len(sizes) * 20)]
        for number, value in enumerate(found):
            assert value in (None, value_of(number, sizes[number % len(sizes)]))
        assert None in found and found.count(None) < len(found), "it was full"
        server = fleet.servers[0]
        assert page_sizes(server.worker_pid(), data_of(server)) == {HUGE_PAGE_BYTES >> 10}
        if path == "shm":
            assert page_sizes(os.getpid(), data_of(server)) == {HUGE_PAGE_BYTES >> 10}
    assert page_sizes(os.getpid(), data_of(server)) == set(), "a closed client maps nothing"
    assert "its data in reserved huge pages" in fleet.logs()
    fleet.assert_no_traceback()


def test_a_killed_worker_leaves_its_values(fleet: Fleet) -> None:
    server = fleet.servers[0]
    with Client(fleet.manager.address, path="shm", deadline_s=20.0) as client:
        assert all(client.put(f"k{number}", value_of(number, 8192)) for number in range(200))
        before = server.worker_pid()
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: server.succeeded(before), "the worker has a successor")
        wait_until(lambda: client.put("after", b"a"), "it takes puts again")
        assert [client.get(f"k{number}") for number in range(200)] == [value_of(n, 8192) for n in range(200)]
    fleet.assert_no_traceback()


def test_an_arena_added_to_a_running_server(fleet: Fleet) -> None:
    server = fleet.servers[0]
    free = memory.reserved_bytes()
    words = [sys.executable, "-m", "simm", "ctl", "grow", "--memory", ARENA, "--manager", fleet.manager.address]
    words += ["--runtime-dir", fleet.run_folder_seen_from_here(server)]
    done = subprocess.run(words, capture_output=True, text=True, env=child_environment(), timeout=READY_S, check=False)
    assert done.returncode == 0, (done, fleet.logs())
    assert memory.reserved_bytes() < free
    with Client(fleet.manager.address, path="shm", deadline_s=20.0) as client:
        for number in range(100):
            value = value_of(number, 65_536)
            assert client.put(f"g{number}", value)
            assert client.get(f"g{number}") in (None, value), "None: its shard moves, and the client's map is behind"
            wait_until(lambda: client.get(f"g{number}") == value, "it is found by the next map")  # noqa: B023
        assert server.worker_stats(1)["puts"] > 0, "the new worker has its part of them"
    fleet.assert_no_traceback()


#: Arguments beside --hugetlb -> exit code, and what the one line says.
REFUSED: Final = {
    ("--memory", "8T"): (1, "are free in reserved huge pages of 2 MiB; as root: sysctl vm.nr_hugepages=N, "),
    ("--memory", "32M", "--warm"): (2, "does not go with --warm"),
    ("--memory", "32M", "--group", str(os.getgid())): (2, "does not go with --group"),
}  # fmt: skip


@pytest.mark.parametrize("given", list(REFUSED), ids=lambda given: "".join(given[2:3]) or "too large")
def test_what_it_does_not_go_with(tmp_path: Path, given: tuple[str, ...]) -> None:
    """Said before anything is made. It needs no pool."""
    words = [sys.executable, "-m", "simm.dataserver", "--hugetlb", *given, "--numa", "0", "--name", f"{HERE}no"]
    words += ["--runtime-dir", str(tmp_path / "run"), "--manager", "127.0.0.1:9"]
    done = subprocess.run(words, capture_output=True, text=True, env=child_environment(), timeout=READY_S, check=False)
    code, why = REFUSED[given]
    lines = [line for line in done.stderr.splitlines() if not line[:4].isdigit()]
    assert done.returncode == code and len(lines) == 1 and why in lines[0], done

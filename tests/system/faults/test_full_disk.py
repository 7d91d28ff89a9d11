"""State and logs on a file system that is full, and then read-only: everything serves on, and the pages say so."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from simm.client import Client
from simm.wire import messages as M
from tests.support.fleet import Fleet
from tests.support.tmpfs import own_tmpfs
from tests.support.waiting import WAIT_S, wait_until

FAILURES = "simm_manager_state_write_failures_total"


def page(fleet: Fleet, path: str) -> str:
    with urllib.request.urlopen(f"http://{fleet.manager.http}{path}", timeout=WAIT_S) as answer:
        return str(answer.read().decode())


def failures(fleet: Fleet) -> int:
    """Return how many times the state could not be stored, by the manager's metrics."""
    found = re.search(rf"^{FAILURES} (\d+)$", page(fleet, "/metrics"), re.MULTILINE)
    assert found is not None
    return int(found[1])


def fill(folder: Path) -> None:
    """Write into a file there until nothing more fits."""
    with contextlib.suppress(OSError), open(folder / "other", "ab", buffering=0) as file:
        for size in (4096, 1):
            while True:
                with contextlib.suppress(OSError):
                    if file.write(bytes(size)) == size:
                        continue
                break


def change_the_map(fleet: Fleet, drain: int) -> None:
    """Drain the second server and fill it again; each is a new map, which the manager stores."""
    server = fleet.servers[1]
    before = fleet.manager_epoch()
    fleet.ask_manager(M.Drain(drain, server.name))
    wait_until(lambda: fleet.manager_epoch() > before, "another map")


def all_well(client: Client) -> None:
    for number in range(50):
        value = b"%d " % number * 500
        assert client.put(f"k/{number}", value) and client.get(f"k/{number}") == value, number


@pytest.mark.fault("F16", ci=1, whole=5)
def test_state_and_logs_on_a_full_disk(make_fleet: Callable[..., Fleet], tmp_path: Path, amount: int) -> None:
    with own_tmpfs(tmp_path / "disk", "512k") as disk:
        (disk / "state").mkdir()
        log = ("--log-level", "debug", "--log-file")
        fleet = make_fleet(
            2, memory="32M", heartbeat_ms=200, server_arguments=(*log, str(disk / "server.log")),
            manager_arguments=("--state-dir", str(disk / "state"), *log, str(disk / "manager.log")),
        )  # fmt: skip
        with Client(fleet.manager.address, deadline_s=20.0) as client:
            for _ in range(amount):
                scene(fleet, client, disk)
            assert client.delete_many([f"k/{number}" for number in range(50)])
        if amount > 1:  # the manager tries again after five seconds
            wait_until(lambda: page(fleet, "/healthz") == "ok\n", "the state is stored again")


def scene(fleet: Fleet, client: Client, disk: Path) -> None:
    """The disk is full, then the state's folder is read-only, then it is as it was. The map changes twice in each."""
    all_well(client)
    before, size = failures(fleet), (disk / "server.log").stat().st_size
    fill(disk)
    with pytest.raises(OSError, match="No space left"):  # the positive control: nobody can write there
        (disk / "new").write_bytes(bytes(1 << 16))
    for drain in (1, 0):
        change_the_map(fleet, drain)
        all_well(client)
    wait_until(lambda: failures(fleet) > before, f"{FAILURES} counts")
    assert page(fleet, "/healthz") == "ok; the state cannot be stored\n"
    worker = fleet.servers[0].worker_pid()
    os.kill(worker, 9)
    wait_until(lambda: restarted(fleet, worker), "a worker starts without a log")
    wait_until(lambda: all(client.put(f"k/{number}", b"again") for number in range(50)), "it takes puts")
    assert (disk / "server.log").stat().st_size <= size + (1 << 16)
    (disk / "other").unlink()
    (disk / "new").unlink()
    # A file system with files open for writing cannot be made read-only. One is mounted over the folder instead.
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(disk / "state")], check=True)
    try:
        with pytest.raises(OSError, match="Read-only file system"):
            (disk / "state" / "new").write_bytes(b"x")
        for drain in (1, 0):
            change_the_map(fleet, drain)
            all_well(client)
        assert page(fleet, "/healthz") == "ok; the state cannot be stored\n"
    finally:
        subprocess.run(["umount", "-l", str(disk / "state")], check=True)


def restarted(fleet: Fleet, before: int) -> bool:
    with contextlib.suppress(Exception):
        return fleet.servers[0].worker_pid() != before
    return False

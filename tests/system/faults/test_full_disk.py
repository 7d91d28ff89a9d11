"""State and logs that cannot be written, for want of room or of the right: everything serves on, the pages say so."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
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
    """Put and get. A new map may reach the client before the shard's new owner: until then a get there is a miss."""
    for number in range(50):
        key, value = f"k/{number}", b"%d " % number * 500
        assert client.put(key, value), number

        def is_back(key: str = key, value: bytes = value) -> bool:
            found = client.get(key)
            assert found in (None, value), key
            return found is not None

        wait_until(is_back, f"the value of {key} is found")


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
        failing = lambda: page(fleet, "/healthz") == "ok; the state cannot be stored\n"  # noqa: E731
        wait_until(failing, lambda: page(fleet, "/healthz"))  # it may have been stored before the folder was read-only
    finally:
        subprocess.run(["umount", "-l", str(disk / "state")], check=True)


def restarted(fleet: Fleet, before: int) -> bool:
    with contextlib.suppress(Exception):
        return fleet.servers[0].worker_pid() != before
    return False


@contextlib.contextmanager
def read_only(*files: Path) -> Iterator[None]:
    """Let nobody write into files, not even who has them open; skip the test where that cannot be."""
    done = subprocess.run(["chattr", "+i", *map(str, files)], capture_output=True, text=True, check=False)
    try:
        if done.returncode:
            pytest.skip(f"no file can be made immutable here: {done.stderr.strip()}")
        yield
    finally:
        subprocess.run(["chattr", "-i", *map(str, files)], capture_output=True, check=False)


@pytest.mark.fault("F16", ci=1, whole=5)
def test_logs_that_become_read_only(make_fleet: Callable[..., Fleet], nothing_is_left: Path, amount: int) -> None:
    """Everything serves on without log lines, processes start again, and say once on stderr why they log there."""
    if shutil.which("chattr") is None:
        pytest.skip("chattr is not installed (Debian: apt-get install e2fsprogs)")
    logs = Path(tempfile.mkdtemp(prefix="logs", dir=nothing_is_left))
    files = [logs / "server.log", logs / "manager.log"]
    debug = ("--log-level", "debug", "--log-file")
    fleet = make_fleet(
        2, memory="32M", heartbeat_ms=200, server_arguments=(*debug, str(files[0])),
        manager_arguments=(*debug, str(files[1])),
    )  # fmt: skip
    with Client(fleet.manager.address, deadline_s=20.0) as client:
        for again in range(amount):
            if again:  # the manager that has started without a log has none until it is started anew
                fleet.manager.end()
                fleet.manager.start()
                fleet.wait_settled()
            sizes = [path.stat().st_size for path in files]
            for drain in (1, 0):  # who is idle writes nothing
                change_the_map(fleet, drain)
            wait_until(
                lambda sizes=sizes: all(path.stat().st_size > size for path, size in zip(files, sizes)),  # type: ignore[misc]
                "both are written to",
            )
            all_well(client)
            with read_only(*files):
                with pytest.raises(OSError):  # the positive control: nobody can write there
                    files[0].open("a").close()
                sizes = [path.stat().st_size for path in files]
                for drain in (1, 0):
                    change_the_map(fleet, drain)
                    all_well(client)
                worker = fleet.servers[0].worker_pid()
                os.kill(worker, 9)
                wait_until(lambda worker=worker: restarted(fleet, worker), "a worker starts without a log")  # type: ignore[misc]
                wait_until(lambda: all(client.put(f"k/{number}", b"again") for number in range(50)), "it takes puts")
                fleet.manager.end()
                fleet.manager.start()
                fleet.wait_settled()
                all_well(client)
                assert [path.stat().st_size for path in files] == sizes, "nothing was written"
        assert client.delete_many([f"k/{number}" for number in range(50)])
    for server, path in zip((fleet.servers[0], fleet.manager), files):
        assert f"cannot write to the log file {path}: Operation not permitted" in server.log.read_text()
    assert f"cannot log to {files[1]} (Operation not permitted): logging to stderr" in fleet.manager.log.read_text()
    fleet.assert_no_traceback()
    fleet.stop()  # who runs makes its log file anew
    shutil.rmtree(logs)

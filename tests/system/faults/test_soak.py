"""F28 and F23: clients come, work and go, and workers are killed: nothing grows, and every byte comes back.

F23, the kernel's choice: who dies first when memory runs out is whose score is highest. Where a test cannot fill the
host's memory it reads the scores and kills in their order.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from simm.client import Client
from tests.support.fleet import Fleet, Server
from tests.support.load import OUTAGE, RAISED, WRONG, load
from tests.support.measures import measured
from tests.support.waiting import wait_until

#: A slope of resident memory that is noise over so short a time, bytes a second.
SLOPE = 1 << 20


class Watch:
    """Resident bytes and open descriptors of each process, and each worker's free bytes."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.rows: list[tuple[float, int, int]] = []

    def look(self) -> tuple[int, int]:
        """Return (bytes that are no arena's, descriptors) of all server processes."""
        rss = fds = 0
        for server in [self.fleet.manager, *self.fleet.servers]:
            for process in server.family():
                memory = process.memory_info()
                rss += memory.rss - memory.shared
                fds += process.num_fds()
        self.rows.append((time.monotonic(), rss, fds))
        return rss, fds

    def slopes(self) -> tuple[float, float]:
        """Return bytes and descriptors a second, over the second half."""
        rows = np.array(self.rows[len(self.rows) // 2 :], float)
        at = rows[:, 0] - rows[0, 0]
        return float(np.polyfit(at, rows[:, 1], 1)[0]), float(np.polyfit(at, rows[:, 2], 1)[0])


def free_bytes(fleet: Fleet) -> list[int]:
    """Of each worker, once nobody is connected. Streams keep grants for their next clients: new ones have none."""
    for server in fleet.servers:
        for process in server.family():
            if kind_of(process, server) == "stream":
                process.kill()

    def quiet() -> list[dict[str, int]] | None:
        found = [server.worker_stats() for server in fleet.servers]
        return found if not any(stats["grants"] or stats["pins"] for stats in found) else None

    found: list[dict[str, int]] = wait_until(quiet, "no client holds anything")
    return [stats["free_bytes"] for stats in found]


def soak(fleet: Fleet, seconds: float, fault_s: float, keep_s: float, deadline_s: float) -> None:
    """Rounds of clients of ``keep_s`` each; a worker is killed every ``fault_s``. All keys are deleted at the end."""
    forget(fleet)  # the fleet's earlier tests have put some of them
    empty = free_bytes(fleet)
    with Client(fleet.manager.address, path="tcp", deadline_s=20.0) as client:
        assert client.wait_ready(30.0), "new streams serve"
    watch = Watch(fleet)
    rng = random.Random(int(seconds))
    began = faulted = time.monotonic()
    faults = calls = 0
    before = watch.look()
    while time.monotonic() - began < seconds:
        with load(fleet.manager.address, fleet.folder, 2, deadline_s=deadline_s, keys=20) as clients:
            until = time.monotonic() + keep_s
            while time.monotonic() < until:
                time.sleep(0.25)
                watch.look()
            if time.monotonic() - faulted > fault_s:
                faulted = time.monotonic()
                kill_worker(rng.choice(fleet.servers))
                faults += 1
            records = clients.records()
        records.assert_right()
        assert records.count(WRONG, RAISED) == 0 and (faults or records.count(OUTAGE) == 0), records.summary()
        calls += len(records)
    forget(fleet)
    wait_until(lambda: watch.look()[1] <= before[1], lambda: f"descriptors are closed: {before} {watch.rows[-1]}")
    assert free_bytes(fleet) == empty, "every byte is free again"
    rss, fds = watch.slopes()
    grown = watch.rows[-1][1] - before[0]
    what = f"soak of {seconds:.0f} s, {calls} calls, {faults} workers killed"
    measured(f"{what}: resident bytes", rss / 1024, "KiB/s", grown=f"{grown >> 10} KiB in all")
    measured(f"{what}: descriptors", fds, "1/s")
    assert rss < SLOPE or grown < SLOPE * 8
    fleet.assert_no_traceback()


def forget(fleet: Fleet) -> None:
    """Delete all values that the load may have put."""
    with Client(fleet.manager.address, deadline_s=20.0) as client:
        assert client.wait_ready(30.0)
        client.delete_many([f"load/{writer}/{number}" for writer in range(2) for number in range(20)])


def kill_worker(server: Server) -> None:
    pid = server.worker_pid()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: succeeded(server, pid), "its successor serves")


def succeeded(server: Server, pid: int) -> bool:
    try:
        stats = server.worker_stats()
    except Exception:
        return False
    return bool(stats["pid"] != pid and stats["shards"] and not stats["fenced"])


@pytest.mark.fault("F28", ci="3 s")
def test_nothing_grows_and_every_byte_comes_back(fleet: Fleet) -> None:
    soak(fleet, 3.0, 1e9, 1.5, 5.0)


@pytest.mark.fault("F28", whole="20 minutes, a worker killed each minute")
@pytest.mark.slow
def test_nothing_grows_for_twenty_minutes(real_fleet: Fleet) -> None:
    soak(real_fleet, 1200.0, 60.0, 20.0, 5.0)


# -- F23 ---------------------------------------------------------------------------------------------------


def kind_of(process: psutil.Process, server: Server) -> str:
    if process.pid == server.pid:
        return "supervisor"
    if process.pid == server.worker_pid():
        return "worker"
    return "stream" if "stream" in names_of(server).get(process.pid, "") else "other"


def names_of(server: Server) -> dict[int, str]:
    """What the data server's log says of each process that it started."""
    return {int(pid): name for name, pid in re.findall(r": (\S.*) is process (\d+)", server.log.read_text())}


def scores(server: Server) -> list[tuple[int, str, psutil.Process]]:
    """(score, kind, process), the kernel's first choice first."""
    found = [
        (int(Path(f"/proc/{process.pid}/oom_score").read_text()), kind_of(process, server), process)
        for process in server.family()
    ]
    return sorted(found, key=lambda each: -each[0])


def kill_as_the_kernel_does(fleet: Fleet, times: int) -> None:
    """Kill the processes of one server in the order of their scores; its values stay."""
    server = fleet.servers[0]
    with Client(fleet.manager.address, namespace="oom", deadline_s=10.0) as client:
        values = {f"k{number}": f"v{number}".encode() * 500 for number in range(60)}
        assert all(client.put_many(list(values), list(values.values())))
        for _ in range(times):
            order = scores(server)
            kinds = [kind for _, kind, _ in order]
            kinds = [kind for kind in kinds if kind != "other"]
            assert kinds[-1] == "supervisor", "it restarts the others, so it dies last"
            assert kinds.index("stream") < kinds.index("worker"), "a stream costs least"
            worker = next(process.pid for _, kind, process in order if kind == "worker")
            for _, kind, process in order:
                if kind in ("stream", "worker"):
                    process.kill()
            wait_until(lambda worker=worker: succeeded(server, worker), "it serves again")  # type: ignore[misc]
            got = lambda: client.get_many(list(values)) == list(values.values())  # noqa: E731
            wait_until(got, "all values are there")
            put = lambda: all(client.put_many(list(values), list(values.values())))  # noqa: E731
            wait_until(put, "the client is connected again, and puts")
            assert server.running
        assert client.delete_many(list(values)) == [True] * len(values)
    fleet.wait_settled()
    fleet.assert_no_traceback()


@pytest.mark.fault("F23", ci=1)
def test_killed_in_the_order_of_the_kernel(fleet: Fleet) -> None:
    kill_as_the_kernel_does(fleet, 1)


@pytest.mark.fault("F23", whole=20)
@pytest.mark.slow
def test_killed_in_the_order_of_the_kernel_often(real_fleet: Fleet) -> None:
    kill_as_the_kernel_does(real_fleet, 20)

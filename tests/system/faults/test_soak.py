"""F28 and F23: clients come, work and go, and servers are killed or stopped: nothing grows, and every byte comes back.

F23, the kernel's choice: who dies first when memory runs out is whose score is highest. Where a test cannot fill the
host's memory it reads the scores and kills in their order.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest

from simm.client import Client
from tests.support.fleet import Fleet, Server
from tests.support.held_files import open_files
from tests.support.load import OUTAGE, PATIENT_S, RAISED, WRONG, load
from tests.support.measures import measured
from tests.support.waiting import WAIT_S, wait_until

#: What resident memory may grow by in an hour, bytes: the slope over the second half of a soak.
HOURLY = 1 << 20
#: What is noise, however short the soak: processes that were started anew, allocators.
NOISE = 8 << 20
#: How long a process is stopped, seconds.
STOP_S = 2.0


class Watch:
    """Resident bytes and open descriptors of each process, and each worker's free bytes."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.rows: list[tuple[float, int, int]] = []

    def look(self) -> tuple[int, int]:
        """Return (bytes that are no arena's, open files) of all server processes."""
        rss = fds = 0
        for server in [self.fleet.manager, *self.fleet.servers]:
            for process in server.family():
                with contextlib.suppress(psutil.Error, OSError):  # a mover may end meanwhile
                    memory = process.memory_info()
                    files = len(open_files(process.pid))
                    rss += memory.rss - memory.shared
                    fds += files
        self.rows.append((time.monotonic(), rss, fds))
        return rss, fds

    def slopes(self) -> tuple[float, float]:
        """Return bytes and descriptors a second, over the second half."""
        rows = np.array(self.rows[len(self.rows) // 2 :], float)
        at = rows[:, 0] - rows[0, 0]
        return float(np.polyfit(at, rows[:, 1], 1)[0]), float(np.polyfit(at, rows[:, 2], 1)[0])

    def fault(self) -> str:
        """Say what has grown too much over the second half; "" if nothing has."""
        seconds = self.rows[-1][0] - self.rows[len(self.rows) // 2][0]
        rss, fds = self.slopes()
        if rss * seconds > HOURLY * seconds / 3600 + NOISE:
            return f"resident memory grows by {rss * 3600 / (1 << 20):.1f} MiB an hour, over {seconds:.0f} s"
        if fds * seconds > 20:
            return f"descriptors grow by {fds * 3600:.0f} an hour, over {seconds:.0f} s"
        return ""


def free_bytes(fleet: Fleet) -> list[int]:
    """Of each worker, once nobody is connected. Streams keep grants for their next clients: new ones have none."""
    for server in fleet.servers:
        for process in server.family():
            if server.kind_of(process) == "stream":
                process.kill()

    def quiet() -> list[dict[str, int]] | None:
        found = [server.worker_stats() for server in fleet.servers]
        return found if not any(stats["grants"] or stats["pins"] for stats in found) else None

    found: list[dict[str, int]] = wait_until(quiet, "no client holds anything")
    return [stats["free_bytes"] for stats in found]


def soak(fleet: Fleet, seconds: float, fault_s: float, keep_s: float, deadline_s: float) -> None:
    """Rounds of clients of ``keep_s`` each; something fails every ``fault_s``. All keys are deleted at the end."""
    forget(fleet)  # the fleet's earlier tests have put some of them
    empty = free_bytes(fleet)
    with Client(fleet.manager.address, path="tcp", deadline_s=20.0) as client:
        assert client.wait_ready(WAIT_S), "new streams serve"
    watch = Watch(fleet)
    rng = random.Random(int(seconds))
    began = faulted = time.monotonic()
    calls = 0
    faults: Counter[str] = Counter()
    wait_until(lambda: at_rest(fleet), "no shard moves, and all streams are there")
    before = watch.look()
    while time.monotonic() - began < seconds:
        with load(fleet.manager.address, fleet.folder, 2, deadline_s=deadline_s, keys=20) as clients:
            until = time.monotonic() + keep_s
            while time.monotonic() < until:
                time.sleep(0.25)
                watch.look()
            if time.monotonic() - faulted > fault_s:
                faulted = time.monotonic()
                faults[fail_at_random(fleet, rng)] += 1
            records = clients.records()
        records.assert_right()
        assert records.count(WRONG, RAISED) == 0 and (faults or records.count(OUTAGE) == 0), records.summary()
        calls += len(records)
    forget(fleet)
    wait_until(lambda: watch.look()[1] <= before[1], lambda: f"files are closed: {before} {watch.rows[-1]}")
    # More than before is free where a worker was still dropping what an earlier test had moved away.
    free = free_bytes(fleet)
    assert all(now >= then for now, then in zip(free, empty)), f"every byte is free again: {free}, before {empty}"
    rss, fds = watch.slopes()
    grown = watch.rows[-1][1] - before[0]
    what = f"soak of {seconds:.0f} s, {calls} calls, faults {dict(faults) or 'none'}"
    measured(f"{what}: resident memory", rss * 3600 / (1 << 20), "MiB/h", grown=f"{grown >> 10} KiB in all")
    measured(f"{what}: descriptors", fds * 3600, "1/h")
    assert not watch.fault(), watch.fault()
    fleet.assert_no_traceback()


def at_rest(fleet: Fleet) -> bool:
    """Return whether each server has the processes that it always has, and no mover."""
    always = Counter({"supervisor": 1, "worker": 1, "stream": 1})
    kinds = [Counter(map(server.kind_of, server.family())) for server in fleet.servers]
    return all(each - Counter(other=each["other"]) == always for each in kinds)


def forget(fleet: Fleet) -> None:
    """Delete all values that the load may have put."""
    with Client(fleet.manager.address, deadline_s=20.0) as client:
        assert client.wait_ready(WAIT_S)
        client.delete_many([f"load/{writer}/{number}" for writer in range(2) for number in range(20)])


def fail_at_random(fleet: Fleet, rng: random.Random) -> str:
    """Kill the manager, a worker or a stream, or stop it for a while; return what was done, once all serve again."""
    server, what = rng.choice(fleet.servers), rng.choice(("worker", "stream", "manager"))
    how = rng.choice(("kill", "stop"))
    if what == "manager":
        process = psutil.Process(fleet.manager.pid)
    else:
        process = next(each for each in server.family() if server.kind_of(each) == what)
    if how == "stop":
        process.suspend()
        try:
            time.sleep(STOP_S)
        finally:
            process.resume()
    elif what == "manager":
        fleet.manager.kill()
        fleet.manager.start()
    else:
        process.kill()
        if what == "worker":
            wait_until(lambda: server.succeeded(process.pid), "its successor serves")
    fleet.wait_settled()
    return f"{how} {what}"


@pytest.mark.fault("F28", ci="3 s")
def test_nothing_grows_and_every_byte_comes_back(fleet: Fleet) -> None:
    soak(fleet, 3.0, 1e9, 1.5, PATIENT_S)


@pytest.mark.parametrize(
    ("hours", "memory", "descriptors", "says"),
    [(1.0, 0, 0, ""), (1.0, 30 << 20, 0, "memory"), (24.0, (1 << 20) // 2, 0, ""), (24.0, 2 << 20, 0, "memory"),
     (1.0, 0, 100, "descriptors")],
)  # fmt: skip
def test_control_what_grows_is_seen(hours: float, memory: int, descriptors: int, says: str) -> None:
    """Rows of a soak of ``hours`` with noise of a MiB, and so much growth an hour."""
    rng = random.Random(3)
    watch = Watch.__new__(Watch)
    watch.rows = [
        (hours * 3600 * at, (100 << 20) + int(memory * hours * at) + rng.randrange(1 << 20),
         90 + int(descriptors * hours * at))
        for at in (step / 2000 for step in range(2000))
    ]  # fmt: skip
    assert says in watch.fault() and bool(watch.fault()) == bool(says)


@pytest.mark.fault("F28", whole="20 minutes, a random fault each minute")
@pytest.mark.slow
def test_nothing_grows_for_twenty_minutes(real_fleet: Fleet) -> None:
    soak(real_fleet, 1200.0, 60.0, 20.0, 5.0)


# -- F23 ---------------------------------------------------------------------------------------------------


def scores(server: Server) -> list[tuple[int, str, psutil.Process]]:
    """(score, kind, process), the kernel's first choice first."""
    found = [
        (int(Path(f"/proc/{process.pid}/oom_score").read_text()), server.kind_of(process), process)
        for process in server.family()
    ]
    return sorted(found, key=lambda each: -each[0])


def kill_as_the_kernel_does(fleet: Fleet, times: int) -> None:
    """Kill the processes of one server in the order of their scores; its values stay."""
    server = fleet.servers[0]
    with Client(fleet.manager.address, namespace="oom", deadline_s=20.0) as client:
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
            wait_until(lambda worker=worker: server.succeeded(worker), "it serves again")  # type: ignore[misc]
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

"""Very many connections: 10,000 at a manager, 2,000 sessions with a worker, a thousand that come and go a second."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from simm.client import Client
from simm.wire import messages as M
from tests.support.crowds import crowd, enough_files
from tests.support.fleet import PATIENT_SERVERS, Fleet
from tests.support.load import FAILED, OUTAGE, PATIENT_S, load
from tests.support.measures import measured
from tests.support.standing import descriptors
from tests.support.waiting import wait_until

CONNECTIONS, SESSIONS, CHURN_PER_S = 10_000, 2_000, 1_000
MIB = 1 << 20
#: Memory that a connection or a session may take of a server.
EACH_BYTES = 50 << 10
#: What most systems allow a process before it asks for more.
SOFT_LIMIT = 1024


@pytest.fixture
def small(make_fleet: Callable[..., Fleet]) -> Fleet:
    """One data server; both are started with the soft limit of files that most systems have."""
    return make_fleet(1, patches=[f"files={SOFT_LIMIT}", *PATIENT_SERVERS])


def measure_exists(fleet: Fleet) -> None:
    """Note the p99 of a client's exists by each path; CI's machine is too busy for a bound."""
    for path in ("shm", "tcp"):
        with Client(fleet.manager.address, path=path, deadline_s=PATIENT_S) as client:
            assert client.wait_ready(PATIENT_S) and client.put("there", b"value")
            times = []
            for _ in range(500):
                asked = time.monotonic()
                assert client.exists("there")
                times.append(time.monotonic() - asked)
            assert client.delete("there")
        measured(f"beside {SESSIONS} sessions: p99 of exists by {path}", sorted(times)[494] * 1e3, "ms", "5 ms")


@pytest.mark.fault("F14", ci="10,000 connections", whole="the same")
def test_ten_thousand_control_connections(small: Fleet) -> None:
    enough_files(CONNECTIONS + 1000)
    pid = small.manager.pid
    process = psutil.Process(pid)
    host, _, port = small.manager.address.rpartition(":")
    before_fds, before = descriptors(pid), process.memory_info().rss
    with load(small.manager.address, small.folder, 1) as clients:
        began = time.monotonic()
        with crowd(CONNECTIONS, 4, kind="manager", host=host, port=int(port)) as many:
            assert sum(said["open"] for said in many.answers()) == CONNECTIONS
            measured(f"{CONNECTIONS} connections to one manager: all subscribed after", time.monotonic() - began, "s")
            assert small.status()["manager"]["connections"] >= CONNECTIONS
            assert descriptors(pid) >= CONNECTIONS
            there = process.memory_info().rss
            measured("manager's memory for a connection", (there - before) / CONNECTIONS / 1024, "KiB", "50 KiB")
            assert there - before <= CONNECTIONS * EACH_BYTES
            times = []
            for _ in range(20):
                asked = time.monotonic()
                small.ask_manager(M.ClusterStatus(0))
                times.append(time.monotonic() - asked)
            measured("beside them, the manager answers in", sorted(times)[10] * 1e3, "ms")
            # A change of the map reaches all of them.
            epoch = small.manager_epoch()
            small.servers[0].end()
            changed = time.monotonic()
            wait_until(lambda: small.manager_epoch() > epoch, "a new map")
            heard = many.command(f"epoch {epoch + 1}")
            assert sum(said["open"] for said in heard) == CONNECTIONS
            assert not any(said["late"] or said["lost"] for said in heard), heard
            last = max(said["at"] for said in heard) - changed
            measured("a change of the map has reached all of them after", last, "s")
            small.servers[0].start()
            small.wait_settled()
            many.command("close")
            wait_until(lambda: descriptors(pid) <= before_fds + 4, "the manager has closed them all")
        records = clients.records()
    records.assert_right()
    after = process.memory_info().rss
    measured("manager's descriptors left over", descriptors(pid) - before_fds, "", "0")
    measured("manager's memory afterwards, beyond that before", (after - before) / MIB, "MiB")
    small.assert_no_traceback()


@pytest.mark.fault("F14", ci="2,000 sessions", whole="the same")
def test_two_thousand_sessions_of_one_worker(small: Fleet) -> None:
    enough_files(3 * SESSIONS + 1000)
    server = small.servers[0]
    pid = server.worker_pid()
    process = psutil.Process(pid)
    wait_until(lambda: server.worker_stats()["sessions"], "the stream's own session, which stays")
    time.sleep(0.2)  # the connection that asked is closed
    before_fds, before = descriptors(pid), process.memory_info().rss
    with load(small.manager.address, small.folder, 1, paths=("shm",), deadline_s=PATIENT_S) as clients:
        began = time.monotonic()
        with crowd(SESSIONS, 4, kind="sessions", uds=server.uds()) as many:
            assert sum(said["open"] for said in many.answers()) == SESSIONS
            measured(f"{SESSIONS} sessions with one worker: all there, with a value each, after",
                     time.monotonic() - began, "s")  # fmt: skip
            stats = server.worker_stats()
            assert stats["sessions"] >= SESSIONS and stats["entries"] >= SESSIONS
            there = process.memory_info().rss
            measured("worker's memory for a session, ring and all", (there - before) / SESSIONS / 1024, "KiB", "50 KiB")
            assert there - before <= SESSIONS * EACH_BYTES
            measure_exists(small)
            began = time.monotonic()
            for said in many.command("put"):
                assert said["statuses"] == {"0": SESSIONS // 4}
            measured("puts through all of them, one after another in each of 4 processes",
                     (time.monotonic() - began) / SESSIONS * 1e6, "us a put")  # fmt: skip
            many.end(kill=True)
        wait_until(lambda: server.worker_stats()["sessions"] <= 8, "killed clients' sessions end")
        wait_until(lambda: descriptors(pid) <= before_fds + 6, "and their descriptors")
        records = clients.records()
    records.assert_right()
    assert records.count(FAILED, OUTAGE) == 0, records.summary()
    wait_until(lambda: descriptors(pid) <= before_fds, "all descriptors are closed")
    stats = server.worker_stats()
    assert stats["sessions_quarantined"] == 0 and server.worker_pid() == pid
    wait_until(lambda: descriptors(pid) <= before_fds, "that question's too")
    measured("worker's descriptors left over", descriptors(pid) - before_fds, "", "0")
    measured("worker's memory afterwards, beyond that before", (process.memory_info().rss - before) / MIB, "MiB")
    small.assert_no_traceback()


def churn(fleet: Fleet, seconds: float) -> None:
    """Come and go at manager, worker and stream."""
    server = fleet.servers[0]
    worker = fleet.ask_manager(M.MapGet(0, 0)).workers[0]
    host, _, port = fleet.manager.address.rpartition(":")
    targets = [[host, int(port)], server.uds(), [worker.host, worker.port]]
    processes = {process.pid: process for process in [psutil.Process(fleet.manager.pid), *server.family()]}
    settings = {"kind": "churn", "rate": CHURN_PER_S // 2, "targets": targets}

    def run(length: float) -> list[dict[str, Any]]:
        with crowd(2, 2, seconds=length, **settings) as many:
            return many.answers(length)

    run(1.0)  # what is allocated once
    time.sleep(0.5)
    before = {pid: (descriptors(pid), process.memory_info().rss) for pid, process in processes.items()}
    with load(fleet.manager.address, fleet.folder, 1, deadline_s=PATIENT_S) as clients:
        said = run(seconds)
        records = clients.records()
    records.assert_right()
    assert records.count(FAILED, OUTAGE) == 0, records.summary()
    done = sum(each["done"] for each in said)
    measured("churn: connections made and closed", done / max(each["seconds"] for each in said), "a second",
             f"{CHURN_PER_S}", all=done, failed=sum(each["failed"] for each in said))  # fmt: skip
    assert not any(each["failed"] for each in said)
    for pid, (fds, rss) in before.items():
        wait_until(lambda pid=pid, fds=fds: descriptors(pid) <= fds, f"process {pid} has closed all")  # type: ignore[misc]
        growth = processes[pid].memory_info().rss - rss
        name = "manager" if pid == fleet.manager.pid else processes[pid].name()
        measured(f"churn: memory of {name} {pid} grows by", growth / MIB, "MiB", "flat")
        assert growth < 8 * MIB
    fleet.assert_no_traceback()


@pytest.mark.fault("F14", ci="1,000 connections a second, 3 s")
def test_churn(small: Fleet) -> None:
    churn(small, 3.0)


@pytest.mark.fault("F14", whole=600)
@pytest.mark.slow
def test_churn_for_long(small: Fleet, amount: int | None) -> None:
    churn(small, amount or 60.0)

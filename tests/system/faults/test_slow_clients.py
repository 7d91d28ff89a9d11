"""Thousand clients that read a byte a second, at a stream, at the manager and at its HTTP page, all at once."""

from __future__ import annotations

import contextlib
import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from simm.client import Client
from simm.net.loop import MAINTENANCE_S
from simm.net.peer import OUT_TOTAL_BYTES, STALL_S
from simm.wire import messages as M
from tests.support.background import Background
from tests.support.child import Child, module_command
from tests.support.fleet import Fleet
from tests.support.load import FAILED, GET, MISS, OUTAGE, PATIENT_S, Records, load
from tests.support.measures import measured
from tests.support.pace import Pace
from tests.support.waiting import wait_until

COUNT = 1000
MIB = 1 << 20
#: What 1,000 slow clients may make of the p99 of others.
P99_TIMES = 1.1


@contextlib.contextmanager
def slow_clients(**settings: Any) -> Iterator[Child]:
    """A process of them, all connected."""
    words = module_command("tests.system.faults.slow", json.dumps(settings))
    with Child(words, name=f"slow clients of {settings['kind']}", talks=True) as process:
        process.expect("ready\n")
        yield process


class Prober(Background):
    """Asks something of the servers every 20 ms, in a thread; how long that takes."""

    def __init__(self, ask: Callable[[], Any]) -> None:
        super().__init__("prober")
        self.ask = ask
        self.times: list[tuple[float, float]] = []
        self.failures: list[str] = []

    def run(self) -> None:
        """Ask, again and again."""
        while not self.over.wait(0.02):
            began = time.monotonic()
            try:
                self.ask()
            except Exception as exc:
                self.failures.append(f"{type(exc).__name__}: {exc}")
            self.times.append((began, time.monotonic() - began))

    def p99(self, begin: float, end: float) -> float:
        """Of those that began in between, seconds."""
        times = sorted(took for began, took in self.times if begin <= began < end)
        return times[int(len(times) * 0.99)] if times else 0.0


def tcp_pages() -> int:
    """Memory pages that TCP sockets hold in the kernel."""
    words = Path("/proc/net/sockstat").read_text().split()
    return int(words[words.index("mem", words.index("TCP:")) + 1])


def p99_by_second(records: Records, begin: float, end: float) -> float:
    """Return the median, over whole seconds, of the p99 of GETs, seconds. A bad moment of the machine is one second."""
    each = [records.between(at, at + 1).of(0, kind=GET) for at in np.arange(begin, end - 1, 1.0)]
    return float(np.median([second.quantile(0.99) for second in each if len(second)]))


def crowd_of_slow(
    make_fleet: Callable[..., Fleet], stall_s: float, patches: list[str], *, calm_s: float = 3.0
) -> float:
    """The whole scene; return the p99 of GETs beside the slow ones as a multiple of that without.

    ``stall_s`` is after how long the servers should have lost patience, ``calm_s`` for how long nothing happens before.
    """
    fleet = make_fleet(1, memory="128M", patches=patches)
    server = fleet.servers[0]
    keys = [f"large/{number}" for number in range(4)]
    with Client(fleet.manager.address, path="tcp") as client:
        assert client.put_many(keys, [bytes([number]) * (2 * MIB) for number in range(4)]) == [True] * 4
        digests = [client.digest(key).hex() for key in keys]
        worker = fleet.ask_manager(M.MapGet(0, 0)).workers[0]
    http_host, _, http_port = fleet.manager.http.rpartition(":")
    manager_host, _, manager_port = fleet.manager.address.rpartition(":")
    targets = {
        "stream": {"host": worker.host, "port": worker.port, "digests": digests},
        "manager": {"host": manager_host, "port": int(manager_port)},
        "web": {"host": http_host, "port": int(http_port)},
    }

    def healthz() -> None:
        with urllib.request.urlopen(f"http://{fleet.manager.http}/healthz", timeout=300) as answer:
            assert answer.status == 200

    processes = {process.pid: process for process in [psutil.Process(fleet.manager.pid), *server.family()]}
    most_s = stall_s + MAINTENANCE_S + 120
    with contextlib.ExitStack() as stack:
        clients = stack.enter_context(
            load(fleet.manager.address, fleet.folder, 1, paths=("tcp",), deletes=False, deadline_s=PATIENT_S)
        )
        web = stack.enter_context(Prober(healthz))
        status = stack.enter_context(Prober(lambda: fleet.ask_manager(M.ClusterStatus(0))))
        calm = time.monotonic()
        time.sleep(calm_s)
        before = {pid: process.memory_info().rss for pid, process in processes.items()}
        peak = dict(before)
        began = time.monotonic()
        crowds = {
            kind: stack.enter_context(slow_clients(kind=kind, count=COUNT, most_s=most_s, **target))
            for kind, target in targets.items()
        }
        there = time.monotonic()
        pages = [tcp_pages()]

        def grown() -> bool:
            pages.append(tcp_pages())
            for pid, process in processes.items():
                peak[pid] = max(peak[pid], process.memory_info().rss)
            return not any(crowd.running for crowd in crowds.values())

        wait_until(grown, "the slow ones have been closed", most_s + 30, 0.1)
        over = time.monotonic()
        time.sleep(0.5)
        records = clients.records()
        closings = {kind: json.loads(crowd.rest()) for kind, crowd in crowds.items()}
    measured(f"{COUNT} slow clients each at stream, manager, web: all connected after", there - began, "s")
    for kind, said in closings.items():
        closed = [at for at in said["closed"] if at is not None]
        assert len(closed) == len(said["closed"]), f"{kind}: {len(said['closed']) - len(closed)} are still open"
        if kind != "web":
            assert said["refused"] == 0 and len(closed) == COUNT
            measured(f"slow clients of the {kind}: closed after, at most", max(closed), "s", "30 s", sooner=min(closed))
            assert min(closed) > stall_s * 0.9, "who is slow for a moment is not closed"
    # Neither engines nor probes notice much.
    assert not web.failures and not status.failures, (web.failures[:3], status.failures[:3])
    records.assert_right()
    served = records.between(clients.ready_at, float("inf"))
    failed = served.of(FAILED, OUTAGE, MISS)
    when = (failed.rows["began"] - there).round(2).tolist()
    assert not when, (served.summary(), when[:10], when[-10:], pages)
    ratio = p99_by_second(records, there, over) / p99_by_second(records, calm, began)
    measured("p99 of gets by TCP beside the slow ones, of that without", ratio, "times", f"{P99_TIMES:g}")
    for name, prober in (("manager's status", status), ("/healthz", web)):
        quiet_s, busy_s = prober.p99(calm, began), prober.p99(there, over)
        times = busy_s / max(quiet_s, 1e-6)
        measured(f"p99 of the {name} beside the slow ones, of that without", times, "times", "1.2",
                 ms=round(busy_s * 1e3, 2))  # fmt: skip
    measured("kernel's memory for the slow ones' sockets", max(pages) * 4096 / MIB, "MiB")
    for pid in processes:
        growth = peak[pid] - before[pid]
        name = "manager" if pid == fleet.manager.pid else "data server"
        measured(f"{name} process beside the slow ones: memory grows by", growth / MIB, "MiB")
        # A connection costs tens of KB in Python; then there is the bound that all queues share.
        assert growth < OUT_TOTAL_BYTES + COUNT * 128 * 1024, f"{name} {pid}: {growth >> 20} MiB more"
    fleet.assert_no_traceback()
    return ratio


@pytest.mark.fault("F10", ci="1,000 each at stream, manager, page; patience of 4 s")
def test_thousand_slow_clients(make_fleet: Callable[..., Fleet]) -> None:
    """With less patience than the real one, for the time it takes."""
    crowd_of_slow(make_fleet, 4.0, ["stall=4", "maintenance=1"])


@pytest.mark.fault("F10", whole="the same with the patience of 30 s")
@pytest.mark.slow
def test_thousand_slow_clients_and_the_real_patience(make_fleet: Callable[..., Fleet]) -> None:
    """Long enough for a bound on what the others notice, where nothing else keeps the processors busy."""
    with Pace() as pace:
        ratio = crowd_of_slow(make_fleet, STALL_S, [], calm_s=20.0)
    assert ratio <= P99_TIMES * pace.slowness, f"the p99 of GETs is {ratio:.2f} times that without slow clients"

"""Malformed frames at a manager, a worker and a stream, in real processes: each gets its end, and that is all."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable

import psutil
import pytest

from simm import messages as M

from .fleet import Fleet, child_environment
from .load import FAILED, MISS, OUTAGE, load
from .measures import measured

MIB = 1 << 20


def malformed(fleet: Fleet, count: int, seed: int) -> None:
    """``count`` of them, a third to each."""
    server = fleet.servers[0]
    worker = fleet.ask_manager(M.MapGet(0, 0)).workers[0]
    host, _, port = fleet.manager.address.rpartition(":")
    targets = {"manager": [host, int(port)], "worker": server.uds(), "stream": [worker.host, worker.port]}
    processes = {process.pid: process for process in [psutil.Process(fleet.manager.pid), *server.family()]}

    def run(each: int, seed: int) -> float:
        began = time.monotonic()
        senders = {
            kind: subprocess.Popen(
                [sys.executable, "-m", "faults.frames",
                 json.dumps({"kind": kind, "address": address, "seed": seed, "count": each})],
                stdout=subprocess.PIPE, text=True, env=child_environment(),
            )
            for kind, address in targets.items()
        }  # fmt: skip
        try:
            for kind, sender in senders.items():
                said, _ = sender.communicate()
                assert sender.returncode == 0, f"the sender of {kind} failed"
                told = json.loads(said)
                assert not told["wrong"], (kind, told)
                assert told["sent"] == each
        finally:
            for sender in senders.values():
                if sender.poll() is None:
                    sender.kill()
                    sender.communicate()
        return time.monotonic() - began

    with load(fleet.manager.address, fleet.folder, deletes=False) as clients:
        run(max(300, count // 60), seed + 1)  # what is allocated once
        before = {pid: process.memory_info().rss for pid, process in processes.items()}
        epoch = fleet.manager_epoch()
        took = run(count // 3, seed)
        records = clients.records()
    records.assert_right()
    served = records.between(clients.ready_at, float("inf"))
    assert served.count(FAILED, OUTAGE, MISS) == 0, served.summary()
    measured("malformed frames: sent, each closed in an orderly way", count // 3 * 3, "frames", "10^6 in the slow run",
             seconds=round(took, 1), seed=seed)  # fmt: skip
    for pid, process in processes.items():
        growth = process.memory_info().rss - before[pid]
        name = "manager" if pid == fleet.manager.pid else "data server"
        measured(f"malformed frames: memory of {name} process {pid} grows by", growth / MIB, "MiB", "flat")
        assert growth < 16 * MIB
    assert fleet.manager_epoch() == epoch, "something was believed"
    assert [process.pid for process in server.family()] == list(processes)[1:], "a process has died"
    fleet.assert_no_traceback()


def test_malformed_frames(make_fleet: Callable[..., Fleet]) -> None:
    malformed(make_fleet(1), 20_000, 7)


@pytest.mark.slow
def test_a_million_malformed_frames(make_fleet: Callable[..., Fleet]) -> None:
    malformed(make_fleet(1), 1_000_000, 11)

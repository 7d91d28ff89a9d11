"""Malformed frames at a manager, a worker and a stream, in real processes: each gets its end, and that is all."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable

import psutil
import pytest

from simm.wire import messages as M
from tests.support.child import Child, module_command
from tests.support.fleet import PATIENT_SERVERS, Fleet
from tests.support.load import FAILED, MISS, OUTAGE, PATIENT_S, load
from tests.support.measures import measured

MIB = 1 << 20
#: Bound for ten million frames, seconds.
SEND_S = 10 * 3600.0
#: Share of the load's calls that may be misses.
MISSED = 1e-4


def malformed(fleet: Fleet, count: int, seed: int) -> None:
    """``count`` of them, a third to each."""
    server = fleet.servers[0]
    worker = fleet.ask_manager(M.MapGet(0, 0)).workers[0]
    host, _, port = fleet.manager.address.rpartition(":")
    targets = {"manager": [host, int(port)], "worker": server.uds(), "stream": [worker.host, worker.port]}
    processes = {process.pid: process for process in [psutil.Process(fleet.manager.pid), *server.family()]}

    def run(each: int, seed: int) -> float:
        began = time.monotonic()
        with contextlib.ExitStack() as stack:
            senders = {
                kind: stack.enter_context(Child(module_command("tests.system.faults.frames", json.dumps(
                    {"kind": kind, "address": address, "seed": seed, "count": each}
                ))))
                for kind, address in targets.items()
            }  # fmt: skip
            for kind, sender in senders.items():
                told = json.loads(sender.rest(SEND_S))
                assert sender.process.returncode == 0, f"the sender of {kind} failed"
                assert not told["wrong"], (kind, told)
                assert told["sent"] == each
        return time.monotonic() - began

    with load(fleet.manager.address, fleet.folder, deletes=False, deadline_s=PATIENT_S) as clients:
        run(max(300, count // 60), seed + 1)  # what is allocated once
        before = {pid: process.memory_info().rss for pid, process in processes.items()}
        epoch = fleet.manager_epoch()
        took = run(count // 3, seed)
        records = clients.records()
    records.assert_right()
    served = records.between(clients.ready_at, float("inf"))
    measured("malformed frames: sent, each closed in an orderly way", count // 3 * 3, "frames", "10^7 in the whole"
             " dose",
             seconds=round(took, 1), seed=seed)  # fmt: skip
    for pid, process in processes.items():
        growth = process.memory_info().rss - before[pid]
        name = "manager" if pid == fleet.manager.pid else "data server"
        measured(f"malformed frames: memory of {name} process {pid} grows by", growth / MIB, "MiB", "flat")
        assert growth < 16 * MIB
    assert served.count(FAILED, OUTAGE) == 0, served.summary()
    # Some frames are whole, and their values take room in the arena. A value that is overwritten may be missed, too.
    assert served.count(MISS) <= len(served) * MISSED, served.summary()
    assert fleet.manager_epoch() == epoch, "something was believed"
    assert [process.pid for process in server.family()] == list(processes)[1:], "a process has died"
    fleet.assert_no_traceback()


@pytest.mark.fault("F11", ci=20_000)
def test_malformed_frames(make_fleet: Callable[..., Fleet]) -> None:
    malformed(make_fleet(1, patches=PATIENT_SERVERS), 20_000, 7)


@pytest.mark.fault("F11", whole=10_000_000)
@pytest.mark.slow
def test_a_million_malformed_frames(make_fleet: Callable[..., Fleet], amount: int | None) -> None:
    malformed(make_fleet(1, patches=PATIENT_SERVERS), amount or 1_000_000, 11)

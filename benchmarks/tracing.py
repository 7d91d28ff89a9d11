"""What tracing costs a call: switched off, against another tree's client; and on, by share of the calls recorded.

    python benchmarks/tracing.py                      # off, on without a call recorded, 1 %, 100 %
    python benchmarks/tracing.py --against ../main    # also the client of another checkout, which may lack tracing

One data server, values of ``--size`` bytes by shared memory. Rounds alternate between all variants, each in a process
of its own that stays, so a machine that slows down slows all of them. A figure is the processor time of the calling
thread for one call, in a burst of ``CALLS``; the least and the median over all bursts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

CALLS: Final = 300
_ROOT: Final = Path(__file__).resolve().parents[1]
#: Variant -> the ratio that its client traces by; None: it does not.
RATIOS: Final[dict[str, float | None]] = {"off": None, "on, none recorded": 0.0, "1 %": 0.01, "100 %": 1.0}

_WORKER: Final = """
import json, sys, time
from simm.client import Client
about = json.loads(sys.argv[1])
client = Client(about["manager"], path="shm", token=about["token"])
assert client.wait_ready()
value = bytes(about["size"])
sink = bytearray(about["size"])
assert client.put("k", value)
if about["ratio"] is not None:
    client.trace(about["ratio"])
def burst(calls):
    get, put = client.get_into, client.put
    began = time.thread_time_ns()
    for _ in range(calls):
        get("k", sink)
    middle = time.thread_time_ns()
    for _ in range(calls):
        put("k", value)
    return [(middle - began) / calls, (time.thread_time_ns() - middle) / calls]
burst(about["calls"])
print("ready", flush=True)
for line in sys.stdin:
    print(json.dumps(burst(about["calls"])), flush=True)
client.close()
"""


def worker(tree: Path, about: dict[str, Any]) -> subprocess.Popen[str]:
    """Start the process of one variant."""
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    made = subprocess.Popen(
        [sys.executable, "-c", _WORKER, json.dumps(about)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=environment, cwd=tree,
    )  # fmt: skip
    assert made.stdout is not None
    if made.stdout.readline().strip() != "ready":
        raise SystemExit(f"the process for {tree} did not start")
    return made


def one_burst(process: subprocess.Popen[str]) -> list[float]:
    """Return the ns of a get and of a put."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    found: list[float] = json.loads(process.stdout.readline())
    return found


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="another checkout")
    parser.add_argument("--seconds", type=float, default=60.0, help="to measure for; two rounds at least")
    parser.add_argument("--size", type=int, default=4096, help="bytes of a value")
    arguments = parser.parse_args()
    from simm.sdk.local_cluster import LocalCluster

    cluster = LocalCluster(memory="256M")
    processes: dict[str, subprocess.Popen[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SIMM_TRACE_DIR"] = folder
        try:
            common = {"manager": cluster.manager, "token": cluster.token, "size": arguments.size, "calls": CALLS}
            if arguments.against is not None:
                processes["other tree"] = worker(arguments.against.resolve(), {**common, "ratio": None})
            for name, ratio in RATIOS.items():
                processes[name] = worker(_ROOT, {**common, "ratio": ratio})
            taken: dict[str, list[list[float]]] = {name: [] for name in processes}
            until, rounds = time.monotonic() + arguments.seconds, 0
            while rounds < 2 or time.monotonic() < until:
                order = list(processes)
                for name in order if rounds % 2 else reversed(order):
                    taken[name].append(one_burst(processes[name]))
                rounds += 1
        finally:
            for process in processes.values():
                assert process.stdin is not None
                process.stdin.close()
            for process in processes.values():
                process.wait()
            cluster.close()
    print(f"{arguments.size} bytes, processor us of a call: least (median) of {rounds} bursts of {CALLS}")
    print(f"{'':20} {'get_into':>18} {'put':>18}")
    for name, bursts in taken.items():
        columns = [[burst[which] / 1000 for burst in bursts] for which in (0, 1)]
        cells = [f"{min(column):.2f} ({statistics.median(column):.2f})" for column in columns]
        print(f"{name:20} {cells[0]:>18} {cells[1]:>18}")


if __name__ == "__main__":
    main()

"""Run a changing load and check that the resident private memory of every server process stays flat.

    python benchmarks/soak.py --minutes 10 --memory 512M

Clients put, overwrite, delete and get values of 4 KiB to 4 MiB, several times the arena in sum. Clients come and go,
and some are killed in the middle of a put. Every ten seconds the script records the private memory of manager,
supervisor, worker and stream (RssAnon of /proc/PID/status, as Pss is not available everywhere). It prints a table, and
exits with 1 if the median of the last third exceeds that of the second third by more than 2 %, or if a byte was wrong.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import statistics
import subprocess
import sys
import time

import psutil

from simm.client import Client
from simm.config.parsers import parse_bytes
from simm.sdk.local_cluster import LocalCluster

SIZES = (4096, 5000, 16 << 10, 64 << 10, 300_000, 1 << 20, 4 << 20)
SAMPLE_S = 10.0


def value_of(key: str, version: int, size: int) -> bytes:
    """Return bytes that identify the value, so that a mixture of two values is seen."""
    block = hashlib.blake2b(f"{key}/{version}/{size}".encode(), digest_size=32).digest()
    return version.to_bytes(8, "little") + size.to_bytes(8, "little") + (block * (size // 32 + 1))[: size - 16]


def churn(manager: str, seed: int, until: float) -> int:
    """Run one client; return the number of wrong values that it met."""
    chance = random.Random(seed)
    wrong = 0
    while time.monotonic() < until:
        with Client(manager) as client:
            for _ in range(2000):
                if time.monotonic() > until:
                    break
                key = f"soak-{chance.randrange(20_000)}"
                act = chance.random()
                if act < 0.5:
                    size = chance.choice(SIZES)
                    client.put(key, value_of(key, chance.randrange(1 << 40), size))
                elif act < 0.95:
                    got = client.get(key)
                    if got is not None:
                        version, size = int.from_bytes(got[:8], "little"), int.from_bytes(got[8:16], "little")
                        wrong += size != len(got) or got != value_of(key, version, size)
                else:
                    client.delete(key)
    return wrong


def anonymous_bytes(pid: int) -> int:
    """Return RssAnon of a process: its private memory."""
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        for line in file:
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0


def main() -> int:
    """Run and report; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--memory", default="512M")
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--churn", nargs=3, metavar=("MANAGER", "SEED", "SECONDS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.churn:
        manager, seed, seconds = options.churn
        return min(100, churn(manager, int(seed), time.monotonic() + float(seconds)))
    seconds = options.minutes * 60
    wrong = 0
    with LocalCluster(parse_bytes(options.memory)) as cluster:
        server = psutil.Process(cluster.pids["dataserver"])
        names = {cluster.pids["manager"]: "manager", server.pid: "supervisor"}
        children = [child for child in server.children() if "resource_tracker" not in " ".join(child.cmdline())]
        for position, child in enumerate(children):
            names[child.pid] = ("worker", "stream")[position % 2]
        samples: dict[int, list[int]] = {pid: [] for pid in names}

        def start(number: int, left: float) -> subprocess.Popen[bytes]:
            command = [sys.executable, os.path.abspath(__file__), "--churn", cluster.manager, str(number), str(left)]
            return subprocess.Popen(command)

        began = time.monotonic()
        clients = [start(number, seconds) for number in range(options.clients)]
        number = options.clients
        while (left := began + seconds - time.monotonic()) > 0:
            time.sleep(min(SAMPLE_S, left))
            for pid, values in samples.items():
                values.append(anonymous_bytes(pid))
            victim = clients.pop(0)  # a client that dies in the middle of its work
            victim.send_signal(signal.SIGKILL)
            victim.wait()
            number += 1
            clients.append(start(number, max(0.1, began + seconds - time.monotonic())))
        for client in clients:
            wrong += client.wait()
    flat = True
    print(f"{options.minutes:g} minutes, {options.memory}, {number} clients, wrong values: {wrong}")
    print("| process | first sample | median, second third | median, last third | change |")
    print("|---|---|---|---|---|")
    for pid, values in samples.items():
        third = max(1, len(values) // 3)
        middle, last = statistics.median(values[third : 2 * third] or values), statistics.median(values[-third:])
        change = last / middle - 1
        flat &= change < 0.02
        shown = " | ".join(f"{size / 2**20:.1f} MiB" for size in (values[0], middle, last))
        print(f"| {names[pid]} | {shown} | {change:+.1%} |")
    return 0 if flat and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())

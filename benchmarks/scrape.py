"""How long a scrape takes: the pages of a data server with many values and clients.

    python benchmarks/scrape.py                       # 10^6 values, 1,000 clients; --entries, --clients, --namespaces

A cluster of its own: one data server with ``--entries`` values of 64 bytes, and ``--clients`` sessions by shared memory
in ``--namespaces`` namespaces, each with a commit ring in which it has counted. ``PROCESSES`` processes hold them. Each
page is asked for ``--scrapes`` times, over a connection that stays, as a scraper does, with pauses: under ``chrt`` the
kernel stops processes that never wait, for 50 ms of each second. The table has the least, the median and the longest of
these times, the processor time that the server took for one, and the bytes of a page.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import psutil

PROCESSES: Final = 4
VALUE: Final = b"v" * 64
BATCH: Final = 4096
#: Between two scrapes, seconds.
PAUSE_S: Final = 0.03


def hold() -> int:
    """Hold sessions, as one of the processes: settings come by the command line, and its end with that of stdin."""
    from simm.ipc.counts import Word, observe
    from simm.ipc.session import WorkerSession

    about = json.loads(sys.argv[2])
    held = []
    for number in range(about["count"]):
        session = WorkerSession(about["path"], f"namespace-{number % about['namespaces']}", 60.0)
        for word in (Word.HITS, Word.HIT_BYTES, Word.ABSENT, Word.PUTS, Word.PUT_BYTES):
            session.counts[word] += 1 + number
        for operation in range(4):
            observe(session.counts, operation, 10_000 + number)
        held.append(session)
    print("ready", flush=True)
    sys.stdin.read()
    for session in held:
        session.close()
    return 0


def free_port() -> int:
    """Return a port that is free now."""
    with contextlib.closing(socket.socket()) as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
    return port


def scrape(port: int, path: str, times: int, pid: int) -> str:
    """Return a line of the table. ``pid``: of the server."""
    server = psutil.Process(pid)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    took: list[float] = []
    size = 0

    def spent() -> float:
        times = server.cpu_times()
        return times.user + times.system

    with contextlib.closing(connection):
        before = spent()
        for _ in range(times):
            time.sleep(PAUSE_S)
            began = time.perf_counter()
            connection.request("GET", path)
            answer = connection.getresponse()
            body = answer.read()
            took.append((time.perf_counter() - began) * 1e3)
            if answer.status != 200:
                raise SystemExit(f"scrape: {path} answered {answer.status}: {body[:200]!r}")
            size = len(body)
        processor = (spent() - before) / times * 1e3
    return (
        f"{path:18}{min(took):10.2f}{statistics.median(took):10.2f}{max(took):10.2f}{processor:16.2f}{size:12,}"
    )


def main() -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=1_000_000, help="values stored")
    parser.add_argument("--clients", type=int, default=1000, help="sessions by shared memory")
    parser.add_argument("--namespaces", type=int, default=64, help="namespaces that these are in")
    parser.add_argument("--scrapes", type=int, default=100, help="times that each page is asked for")
    arguments = parser.parse_args()
    from simm.client import Client
    from simm.sdk.local_cluster import LocalCluster

    slots = max(16_384, arguments.entries * 3 // 2)
    memory = max(64 << 20, arguments.entries * 64 * 5 // 4 + slots * 72)
    http_at = free_port()
    flags = ("--http", f"127.0.0.1:{http_at}", "--slots", str(slots))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as undo:
        os.environ["SIMM_RUNTIME_DIR"] = folder
        cluster = undo.enter_context(LocalCluster(memory=memory, arguments=flags))
        with Client(cluster.manager, path="shm") as client:
            keys = [f"k{number}" for number in range(arguments.entries)]
            for start in range(0, len(keys), BATCH):
                part = keys[start : start + BATCH]
                while part:  # on a busy machine some may have to be tried again
                    stored = client.put_many(part, [VALUE] * len(part))
                    part = [key for key, done in zip(part, stored) if not done]
        path = str(Path(cluster.folder, "run", f"{cluster.name}.0.sock"))
        each = -(-arguments.clients // PROCESSES)
        processes = []
        for first in range(0, arguments.clients, each):
            about: dict[str, Any] = {
                "path": path, "count": min(each, arguments.clients - first), "namespaces": arguments.namespaces,
            }  # fmt: skip
            process = subprocess.Popen(
                [sys.executable, os.path.abspath(__file__), "--hold", json.dumps(about)], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
            )  # fmt: skip
            undo.callback(process.communicate)
            processes.append(process)
        for process in processes:
            assert process.stdout is not None
            if process.stdout.readline().strip() != "ready":
                raise SystemExit("scrape: not all clients could connect; the message is above")
        time.sleep(6.0)  # the worker looks at some clients ten times a second, its supervisor asks it once a second
        lines = [scrape(http_at, page, arguments.scrapes, cluster.pids["dataserver"])
                 for page in ("/metrics", "/healthz", "/readyz")]  # fmt: skip
        shown = _figures(http_at)
        print(f"{shown['simm_entries']:,.0f} values, {shown['simm_sessions']:,.0f} sessions, "
              f"{shown['namespaces']:,.0f} namespaces with counts")  # fmt: skip
        print(f"{'page':18}{'least ms':>10}{'median':>10}{'longest':>10}{'processor ms':>16}{'bytes':>12}")
        print("\n".join(lines))
    return 0


def _figures(port: int) -> dict[str, float]:
    """Return what the page says there is."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
    found = {name: float(line.split()[-1]) for name in ("simm_entries", "simm_sessions")
             for line in lines if line.startswith(f"{name}{{")}  # fmt: skip
    return {**found, "namespaces": sum(line.startswith("simm_hits_total{") and 'path="shm"' in line for line in lines)}


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # of this checkout, whatever is installed
    sys.exit(hold() if sys.argv[1:2] == ["--hold"] else main())

"""``simm ctl`` on a live data server, with the manager and without it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from simm.client import Client
from tests.support.processes import Cluster, new_folder
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def cluster(nothing_is_left: Path) -> Iterator[Cluster]:
    with Cluster(new_folder(), memory="16M") as running:
        yield running


def ctl(cluster: Cluster, *arguments: str) -> tuple[int, str]:
    """Run the command; return its exit code and output."""
    line = [sys.executable, "-m", "simm", "ctl", *arguments, "--runtime-dir", str(cluster.folder / "run")]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout


def rows(cluster: Cluster, what: str) -> list[dict[str, Any]]:
    code, text = ctl(cluster, what, "--json")
    assert code in (0, 1)
    found: list[dict[str, Any]] = json.loads(text)
    return found


@pytest.mark.quick
def test_what_clients_do_is_seen_also_without_a_manager(cluster: Cluster) -> None:
    with Client(cluster.manager, namespace="puts") as one, Client(cluster.manager, namespace="gets") as other:
        assert all(one.put(f"key {number}", b"x" * 5000) for number in range(20))
        assert all(one.get(f"key {number}") for number in range(20))
        assert not any(other.get(f"key {number}") for number in range(10))

        def seen() -> bool:
            found = {row["namespace"]: row for row in rows(cluster, "namespaces")}
            return found.get("puts", {}).get("hits") == 20 and found.get("gets", {}).get("gets") == 10

        wait_until(seen, "all is counted")
        found = {row["namespace"]: row for row in rows(cluster, "namespaces")}
        assert (found["puts"]["entries"], found["puts"]["bytes"], found["puts"]["clients"]) == (20, 100_000, 1)
        assert found["gets"]["hit_ratio"] == 0 and found["gets"]["misses"]["absent"] == 10
        clients = {row["namespace"]: row for row in rows(cluster, "clients")}
        assert clients["puts"]["pid"] == os.getpid() and clients["puts"]["bytes_put"] == 100_000
        assert clients["gets"]["gets"] == 10 and clients["gets"]["idle_s"] >= 0
        (worker,) = rows(cluster, "workers")
        assert worker["worker"] == f"{cluster.name}/0" and worker["clients"] == 2 and worker["entries"] == 20
        (chunks,) = rows(cluster, "slabs")
        assert (chunks["entries"], chunks["bytes"]) == (20, 100_000) and chunks["wasted_bytes"] < 20_000
        code, text = ctl(cluster, "why")
        assert code == 1 and "puts: 100.0%" in text and "one SIMM_NAMESPACE" in text
        assert ctl(cluster, "why", "puts")[0] == 0

        cluster.kill("manager")
        assert {row["namespace"] for row in rows(cluster, "clients")} == {"puts", "gets"}
        assert ctl(cluster, "workers")[0] == 0
        cluster.start_manager()


def test_a_worker_that_is_stopped_is_shown(cluster: Cluster) -> None:
    pid = cluster.worker_stats()["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        code, text = ctl(cluster, "workers")
        assert code == 1 and f"{cluster.name}/0" in text
        assert ctl(cluster, "clients")[0] == 2
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: ctl(cluster, "workers")[0] == 0, "it answers again")


@pytest.mark.quick
def test_exit_codes(cluster: Cluster, tmp_path: Path) -> None:
    assert ctl(cluster, "workers", "--server", "nobody")[0] == 2
    line = [sys.executable, "-m", "simm", "ctl", "workers", "--runtime-dir", str(tmp_path)]
    assert subprocess.run(line, capture_output=True, check=False).returncode == 2

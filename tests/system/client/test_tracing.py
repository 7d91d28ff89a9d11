"""Traces of real processes: spans of a client, a worker and a stream under one id, switched by `simm trace`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from simm.client import Client
from simm.tracing.context import context
from simm.tracing.perfetto import fault_of
from tests.support.ports import reserve_port
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


def simm_trace(folder: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "simm", "trace", *words, "--trace-dir", str(folder)], capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.quick
def test_an_operator_sees_a_client_and_its_server(cluster: Any, path: str, namespace: str, tmp_path: Path) -> None:
    folder, output = tmp_path / "trace", tmp_path / "trace.json"
    with Client(cluster.manager, namespace=namespace, path=path, deadline_s=30.0, trace_dir=str(folder)) as client:
        assert client.wait_ready(60.0)
        plain = type(client)
        simm_trace(folder, "start", "--ratio", "0", "--for", "1h")
        wait_until(lambda: type(client) is not plain, "the client traces")
        with context(PARENT):
            assert client.put("k", b"v" * 100_000) and client.get("k") == b"v" * 100_000
        assert client.put("other", b"v"), "nobody records it"
        simm_trace(folder, "stop")
        wait_until(lambda: type(client) is plain, "it does not any more")
    table = simm_trace(folder, "collect", "-o", str(output))
    events = [event for event in json.loads(output.read_text())["traceEvents"] if event["ph"] == "X"]
    assert not [event for event in events if fault_of(event)]
    assert {event["args"]["trace_id"] for event in events} == {TRACE}
    assert f"put {path}" in table and f"get {path}" in table
    of_server = [event for event in events if event["args"].get("server")]
    assert {event["name"] for event in of_server} >= ({"publish"} if path == "shm" else {"store", "read"})
    assert os.getpid() not in {event["pid"] for event in of_server}
    assert {event["pid"] for event in events if not event["args"].get("server")} == {os.getpid()}


def test_an_admin_lets_all_clients_of_the_cluster_trace(cluster: Any, namespace: str, tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    first, later = (
        Client(cluster.manager, namespace=namespace, deadline_s=30.0, trace_dir=str(folder), lazy=True)
        for folder in folders
    )
    of_manager = ("--manager", cluster.manager)
    with first:
        assert first.wait_ready(60.0)
        plain = type(first)
        text = simm_trace(tmp_path, "start", "--all", "--ratio", "1", "--for", "1h", *of_manager)
        assert "and those that come, record 1 of their calls for 3600 s" in text
        wait_until(lambda: type(first) is not plain, "the client traces, in a folder of its own")
        with later:
            wait_until(lambda: type(later) is not plain, "so does one that has come later")
            assert later.wait_ready(60.0), "it may have no map yet"
            assert first.put("k", b"v") and later.get("k") == b"v"
            assert "end it" in simm_trace(tmp_path, "stop", "--all", *of_manager)
            wait_until(lambda: type(first) is plain and type(later) is plain, "none does any more")
    with Client(cluster.manager, namespace=namespace, deadline_s=30.0, trace_dir=str(tmp_path / "third")) as third:
        assert third.get("k") == b"v" and type(third) is plain and not (tmp_path / "third").exists()
    outputs = [str(tmp_path / "one.json"), str(tmp_path / "two.json")]
    for folder, output in zip(folders, outputs):
        simm_trace(folder, "collect", "-o", output)
    table = simm_trace(tmp_path, "summary", *outputs)
    assert "put shm" in table and "get shm" in table


def test_a_trace_of_the_cluster_goes_on_under_the_next_manager(tmp_path: Path) -> None:
    """It is killed. Clients that come later trace, too, and an admin ends it."""
    address = f"127.0.0.1:{reserve_port()}"
    manager = ServerProcess("manager", tmp_path, "--listen", address, "--state-dir", str(tmp_path / "state"))
    folder = str(tmp_path / "trace")
    first, later = (Client(address, deadline_s=30.0, trace_dir=folder, lazy=True) for _ in range(2))
    with manager, first:
        plain = type(first)
        text = simm_trace(tmp_path, "start", "--all", "--ratio", "1", "--for", "1h", "--manager", address)
        assert "for 3600 s" in text
        wait_until(lambda: type(first) is not plain, "the client traces")
        manager.kill()
        manager.start()
        with later:
            wait_until(lambda: type(later) is not plain, "so does one that has met the next manager only")
            assert type(first) is not plain
            simm_trace(tmp_path, "stop", "--all", "--manager", address)
            wait_until(lambda: type(first) is plain and type(later) is plain, "none does any more")

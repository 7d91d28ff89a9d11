"""Log files of real servers: the form of their lines, rotation, and what is in none of them."""

from __future__ import annotations

import json
import logging
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from simm.client import Client
from simm.errors import SimmError
from tests.support.held_files import behind
from tests.support.notify_socket import NotifySocket
from tests.support.processes import Cluster
from tests.support.waiting import wait_until

TOKEN = "s3cr3t-t0ken-of-the-logs-test"
KEY = "a-key-that-no-log-shows"


def open_files(pid: int) -> list[str]:
    """Return the paths of a process's open files."""
    return list(behind(pid).values())


@pytest.mark.quick
@pytest.mark.usefixtures("patient")
def test_rotation_form_and_secrets(
    make_cluster: Callable[..., Cluster], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokens, log = tmp_path / "tokens", tmp_path / "simm.log"
    tokens.write_text(f"admin ops {TOKEN}\nclient team-a {TOKEN}-of-a-client")
    tokens.chmod(0o600)
    arguments = ("--token-file", str(tokens), "--log-format", "json")
    with NotifySocket(tmp_path / "n") as manager:
        cluster = make_cluster(
            memory="32M", manager_arguments=arguments, server_arguments=(*arguments, "--log-file", str(log)),
            environment={"NOTIFY_SOCKET": manager.address},
        )  # fmt: skip
        server = cluster.processes["dataserver"]
        family = [process.pid for process in server.family() if "resource_tracker" not in " ".join(process.cmdline())]
        assert len(family) == 3 and all(str(log) in open_files(pid) for pid in family), "worker and stream too"
        manager.waiting()

        old = log.rename(tmp_path / "simm.log.1")
        server.send_signal(signal.SIGHUP)
        wait_until(lambda: all(str(log) in open_files(pid) for pid in family), "all continue in a new file")
        assert not any(str(old) in open_files(pid) for pid in family), "and none keeps the old one"
        assert manager.wait_for("RELOADING=1") and manager.wait_for("READY=1")

        with caplog.at_level(logging.INFO, "simm"):
            use_in_many_ways(cluster.manager)
        worker = next(process for process in server.family() if process.pid == family[1])
        worker.kill()
        wait_until(lambda: "restarting it on its arena" in log.read_text(), "its death is logged in the new file")

        refused = "refusing 127.0.0.1"
        wait_until(lambda: refused in cluster.log("manager").read_text(), "the manager has logged what failed")
        lines = [json.loads(line) for file in (old, log) for line in file.read_text().splitlines()]
        assert {line["server"] for line in lines} == {cluster.name}
        assert {"supervisor", "worker-0"} <= {line["process"] for line in lines}
        assert all(line["time"][10] == "T" and line["time"][-6] in "+-" for line in lines)
        said = old.read_text() + log.read_text() + cluster.log("manager").read_text() + caplog.text
        assert '"level": "info"' in said and refused in said, "both files have lines, and of what failed"
        assert KEY not in said and TOKEN not in said


def use_in_many_ways(manager: str) -> None:
    """Put, get and delete, by both paths, and in ways that fail."""
    for path in ("shm", "tcp"):
        with Client(manager, path=path, token=TOKEN, namespace="logs") as client:
            assert client.put(KEY, b"v" * 5000) and client.get(KEY) == b"v" * 5000
            assert not client.put(KEY, b"v" * (40 << 20)), "no room"
            with client.view(KEY):
                client.put(KEY, b"w")
            client.get_into(KEY, bytearray(1))
            client.exists(KEY)
            client.delete(KEY)
    for token in (f"{TOKEN}-of-nobody", ""):
        with pytest.raises(SimmError):
            Client(manager, token=token)
    with Client(manager, token=f"{TOKEN}-of-a-client") as client:
        assert client.put(KEY, b"v")

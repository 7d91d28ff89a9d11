"""Real servers under a service manager that only listens: what they say, and what happens to a worker that hangs."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import psutil
import pytest

from simm.client import Client
from tests.support.child import Child, alive, child_environment
from tests.support.notify_socket import NotifySocket
from tests.support.processes import HERE, remove_left_by
from tests.support.waiting import WAIT_S, wait_until

VALUES = {f"key {number}": bytes([number]) * 10_000 for number in range(50)}


@pytest.mark.quick
def test_a_life_under_a_service_manager(tmp_path: Path, nothing_is_left: Path) -> None:
    """READY when it serves, a worker that hangs is replaced with all values, and a restart keeps them too."""
    name = f"{HERE}sd"

    def server(module: str, manager: NotifySocket, *arguments: str) -> Child:
        told = {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "3000000"}
        return Child(
            [sys.executable, "-m", f"simm.{module}", *arguments], log=tmp_path / module,
            environment=child_environment(**told),
        )  # fmt: skip

    with NotifySocket(nothing_is_left / "m") as of_manager, NotifySocket(f"@{name}") as of_server:
        manager_arguments = ("--listen", "127.0.0.1:0", "--state-dir", str(tmp_path / "state"))
        with server("manager", of_manager, *manager_arguments) as manager:
            address = manager.expect("READY ").split()[2]
            assert of_manager.wait_for("READY=1") and of_manager.wait_for("WATCHDOG=1")
            arguments = (
                "--listen", "127.0.0.1:0", "--manager", address, "--memory", "32M", "--numa", "0", "--name", name,
                "--runtime-dir", str(tmp_path / "run"), "--warm",
            )  # fmt: skip
            try:
                with server("dataserver", of_server, *arguments) as first, Client(address, deadline_s=30.0) as client:
                    of_server.wait_for("READY=1")
                    assert "EXTEND_TIMEOUT_USEC=" in " ".join(of_server.said), "a large arena takes its time"
                    assert client.wait_ready(WAIT_S), "it has heard of the server"
                    for key, value in VALUES.items():
                        assert client.put(key, value), "it serves when it says so"
                    of_server.wait_for("STATUS=serving 50 values")
                    _end_a_hanging_worker(first, of_server)
                    wait_until(lambda: client.put("key 0", VALUES["key 0"]), "the successor serves")
                    assert {key: client.get(key) for key in VALUES} == VALUES
                    assert "STOPPING=1" not in of_server.said + of_server.waiting()
                    assert first.end() == 0
                    of_server.wait_for("STOPPING=1")
                with server("dataserver", of_server, *arguments) as second, Client(address, deadline_s=30.0) as client:
                    of_server.wait_for("READY=1")
                    assert client.wait_ready(WAIT_S)
                    assert {key: client.get(key) for key in VALUES} == VALUES, "systemctl restart"
                    assert second.end() == 0
            finally:
                remove_left_by(name)
            assert of_manager.wait_for("STATUS=epoch")
            assert manager.end() == 0
            of_manager.wait_for("STOPPING=1")
    assert "Traceback" not in (tmp_path / "dataserver").read_text() + (tmp_path / "manager").read_text()


def _end_a_hanging_worker(server: Child, manager: NotifySocket) -> None:
    """Stop the worker, and wait until the supervisor has ended it. Signs of life go on all the time."""
    assert server.log is not None
    worker = int(server.log.read_text().partition("worker 0 is process ")[2].split()[0])
    process = psutil.Process(worker)
    process.send_signal(signal.SIGSTOP)
    manager.waiting()
    wait_until(lambda: not alive(process), "the worker that hangs is ended")
    manager.wait_for("WATCHDOG=1")
    assert f"worker 0 (process {worker}) hangs: ending it" in server.log.read_text()

"""A manager in a process of its own, and what its clients see of it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from simm.cluster.shard_map import ShardMap
from simm.constants import NO_OWNER
from simm.wire.messages import MapReply, WorkerInfo
from tests.support.manager_client import ManagerClient
from tests.support.ports import reserve_port
from tests.support.server_process import ServerProcess
from tests.support.waiting import WAIT_S

GIB = 1 << 30
#: Heartbeats so far apart that no server of a test, which sends few or none, is missed.
SELDOM = ("--heartbeat-ms", "20000")


@contextlib.contextmanager
def managers(factory: pytest.TempPathFactory) -> Iterator[Callable[..., Process]]:
    """Yield a function that starts managers. They end with the context."""
    running: list[Process] = []

    def start(folder: Path | None = None, *arguments: str) -> Process:
        running.append(Process(factory.mktemp("manager"), folder, *arguments))
        running[-1].start()
        return running[-1]

    try:
        yield start
    finally:
        for process in running:
            if process.running:
                process.kill()


def workers(*capacities: int, host: str = "10.0.0.1") -> list[WorkerInfo]:
    sizes = capacities or (GIB,)
    return [WorkerInfo(n, 0, 1, 0, size, "", f"/run/w{n}", host, 4000 + n) for n, size in enumerate(sizes)]


def owners(reply: MapReply) -> list[str | None]:
    table = array("H")
    table.frombytes(reply.owners)
    if sys.byteorder == "big":
        table.byteswap()
    return [reply.workers[owner].node if owner != NO_OWNER else None for owner in table]


class Process(ServerProcess):
    """A manager. ``start`` again after its end keeps folder and port."""

    def __init__(self, logs: Path, folder: Path | None, *arguments: str) -> None:
        state = ["--state-dir", str(folder)] if folder else []
        super().__init__("manager", logs, "--listen", f"127.0.0.1:{reserve_port()}", *arguments, *state)
        self._read = 0

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.address.rpartition(":")[2])

    def launch(self, *more: str) -> None:
        """Start it, at the same port each time."""
        self._read = self.log.stat().st_size if self.log.exists() else 0
        super().launch(*more)

    def ended(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Send a signal and wait; return its exit code, and what it said on stderr since its start."""
        self.send_signal(number)
        code = self.wait()
        return code, self.log.read_bytes()[self._read :].decode()

    def client(self, **arguments: Any) -> ManagerClient:
        """Connect to it. A manager that is slow to answer fails no test: only the deadline of one that hangs."""
        return ManagerClient([("127.0.0.1", self.port)], **{"deadline_s": WAIT_S, **arguments})


def fails(*arguments: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    """Exit code and stderr of a manager that does not start."""
    done = subprocess.run(
        [sys.executable, "-m", "simm.manager", *arguments], capture_output=True, text=True, timeout=WAIT_S,
        env={**os.environ, **(env or {})}, check=False,
    )  # fmt: skip
    assert done.stdout == "" and "Traceback" not in done.stderr
    return done.returncode, done.stderr


def next_map(client: ManagerClient) -> MapReply:
    """Wait for a push."""
    while True:
        pushed = client.poll_pushes()
        if pushed is not None:
            return pushed
        assert select.select([client], [], [], WAIT_S)[0], "no push"


def arrived(client: ManagerClient, instance: int, name: str) -> int:
    """Say that all shards that are moving to a node's only worker have come; how many were."""
    reply = client.get_map()
    shard_map = ShardMap(reply)
    mine = {at for at, info in enumerate(reply.workers) if info.node == name}
    moving = [shard for shard in shard_map.previous if shard_map.owners[shard] in mine]
    return client.moved(instance, reply.epoch, name, 0, moving) if moving else 0


def hear(client: ManagerClient, **instances: int) -> None:
    """All of them say that they have the newest map: what has just changed hands may go on."""
    epoch = client.get_map().epoch
    for name, instance in instances.items():
        client.heartbeat(instance, name, epoch)


def settle(client: ManagerClient, **instances: int) -> None:
    """Until nothing moves."""
    hear(client, **instances)
    while sum(arrived(client, instance, name) for name, instance in instances.items()):
        hear(client, **instances)


def about(client: ManagerClient, name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(node for node in client.status()["nodes"] if node["name"] == name)
    return found


def get(url: str, **headers: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=WAIT_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as exc:
        with exc:
            return exc.code, exc.read().decode()

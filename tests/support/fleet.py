"""A manager and any number of data servers as processes, each of which can be killed, stopped, and started again.

Names and addresses outlive restarts. A ``Place`` says where a process runs: here, or in a network namespace of
``system/partitions``. Everything ends with the test, whatever ended it, and ``stop`` removes what the killed left.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

import psutil

from simm.errors import TransportError
from simm.net.channel import Channel
from simm.wire import messages as M
from tests.support.child import THIS_HOST, Place
from tests.support.ports import reserve_port
from tests.support.processes import remove_folder, remove_left_by
from tests.support.server_process import ServerProcess
from tests.support.waiting import WAIT_S, wait_until

_numbers = itertools.count()
#: A bound for a manager that hangs, seconds. With thousands of clients on a busy machine it answers late.
ASK_S: Final = 30.0
#: Switches of ``tests.support.patched`` for tests in which no call may fail, and no server is made to be silent. By
#: TCP a call fails after 2 s of its worker's silence, however long its client waits. A worker of a busy machine may get
#: no processor for as long.
PATIENT_SERVERS: Final = ("worker=9",)


class Server(ServerProcess):
    """One server of a fleet: a manager or a data server."""

    def __init__(self, fleet: Fleet, module: str, name: str, place: Place, arguments: Sequence[str]) -> None:
        super().__init__(module, fleet.folder, *arguments, name=name, place=place)
        self.fleet = fleet

    def worker_pid(self, number: int = 0) -> int:
        """The process that owns arena ``number``: the one that holds its socket pair's name in STATS."""
        return int(self.worker_stats(number)["pid"])

    def uds(self, number: int = 0) -> str:
        """Path of a worker's socket, as this process sees it."""
        return os.path.join(self.fleet.run_folder_seen_from_here(self), f"{self.name}.{number}.sock")

    def worker_stats(self, number: int = 0) -> dict[str, Any]:
        """The worker's own counters."""
        with contextlib.closing(Channel.unix(self.uds(number), WAIT_S)) as channel:
            stats: dict[str, Any] = json.loads(channel.call(M.Stats(0)).json)
            return stats

    def succeeded(self, pid: int) -> bool:
        """Return whether the worker that was process ``pid`` has a successor that serves."""
        try:
            stats = self.worker_stats()
        except Exception:
            return False
        return bool(stats["pid"] != pid and stats["shards"] and not stats["fenced"])

    def kind_of(self, process: psutil.Process) -> str:
        """Return what a process of the family is: supervisor, worker, stream, mover, or other."""
        if process.pid == self.pid:
            return "supervisor"
        if process.pid == self.worker_pid():
            return "worker"
        kind = self._names().get(process.pid, "").partition(" ")[0]
        return kind if kind in ("stream", "mover") else "other"

    def _names(self) -> dict[int, str]:
        """Return what the data server's log says of each process that it started."""
        return {int(pid): name for name, pid in re.findall(r": (\S.*) is process (\d+)", self.log.read_text())}


class Fleet:
    """``with Fleet(folder, 3) as fleet``: a manager (``fleet.manager``) and data servers (``fleet.servers``).

    Args:
        memory: of each arena.
        heartbeat_ms: the manager's; None for its default.
        managers: further arguments of the manager; ``servers`` of the data servers.
        places: where the manager and each server run, in this order.
        patches: switches of ``tests.support.patched`` for all of them.
        run_folder: the runtime folder as each server sees it (in its own mount namespace perhaps).
    """

    #: All that have been started and not stopped.
    running: ClassVar[list[Fleet]] = []

    def __init__(
        self, folder: Path, count: int = 3, *, memory: str = "64M", heartbeat_ms: int | None = None,
        manager_arguments: Sequence[str] = (), server_arguments: Sequence[str] = (), places: Sequence[Place] = (),
        patches: Sequence[str] = (), run_folder: str = "", run_folders: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.folder = folder
        self.prefix = f"t{os.getpid()}-f{next(_numbers)}"
        places = list(places) or [THIS_HOST] * (count + 1)
        self._run_folder = run_folder or str(folder / "run")
        self._run_folders = dict(zip((f"{self.prefix}{number}" for number in range(count)), run_folders))
        beat = [] if heartbeat_ms is None else ["--heartbeat-ms", str(heartbeat_ms)]
        self.manager = Server(
            self, "manager", f"{self.prefix}m", places[0],
            ["--listen", f"{places[0].host}:{reserve_port()}", "--http", f"{places[0].host}:0",
             "--state-dir", str(folder / "state"), *places[0].exposed, *beat, *manager_arguments],
        )  # fmt: skip
        self.servers = [
            Server(
                self, "dataserver", f"{self.prefix}{number}", places[1 + number],
                ["--listen", f"{places[1 + number].host}:0", "--memory", memory, "--numa", "0",
                 "--name", f"{self.prefix}{number}", "--runtime-dir", self._run_folder,
                 *places[1 + number].exposed, *server_arguments],
            )
            for number in range(count)
        ]  # fmt: skip
        for server in [self.manager, *self.servers]:
            server.patches = patches
        self._channel: Channel | None = None

    def run_folder_seen_from_here(self, server: Server) -> str:
        """The folder of a server's sockets."""
        return self._run_folders.get(server.name, self._run_folder)

    def __enter__(self) -> Fleet:
        Fleet.running.append(self)
        try:
            self.manager.start()
            for server in self.servers:
                server.arguments += ["--manager", self.manager.address]
                server.start()
            self.wait_settled()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End all that runs, data servers first."""
        if self in Fleet.running:
            Fleet.running.remove(self)
        if self._channel is not None:
            self._channel.close()
        for server in [*self.servers, self.manager]:
            server.clean_up()
        for server in self.servers:
            remove_left_by(server.name)
        remove_folder(self.folder)

    def running_servers(self) -> list[Server]:
        """Manager and data servers that run."""
        return [server for server in [self.manager, *self.servers] if server.running]

    def last_words(self, lines: int = 40) -> str:
        """Return the end of each process's log, for a test that fails."""
        ends = [(server.name, server.log.read_text().splitlines()[-lines:]) for server in [self.manager, *self.servers]]
        return "\n".join(f"-- {name}\n" + "\n".join(end) for name, end in ends)

    # -- from outside -------------------------------------------------------------------------------

    def ask_manager(self, msg: Any) -> Any:
        """One exchange with the manager. Raises TransportError."""
        if self._channel is None or self._channel.broken:
            host, _, port = self.manager.address.rpartition(":")
            self._channel = self.manager.place.connect(host, int(port), ASK_S)
        try:
            return self._channel.call(msg)
        except TransportError:
            self._channel.close()
            self._channel = None
            raise

    def status(self) -> dict[str, Any]:
        """The manager's status; {} while it cannot be asked."""
        try:
            status: dict[str, Any] = json.loads(self.ask_manager(M.ClusterStatus(0)).json)
            return status
        except TransportError:
            return {}

    def manager_epoch(self) -> int:
        """Of the map that the manager gives now. Raises TransportError."""
        return int(self.ask_manager(M.MapGet(0, 0)).epoch)

    def node(self, server: Server) -> dict[str, Any]:
        """What the status says of a server; {} if it is unknown."""
        for node in self.status().get("nodes", ()):
            if node["name"] == server.name:
                return dict(node)
        return {}

    def shards_of(self, server: Server) -> int:
        """How many shards the map gives it."""
        return sum(worker["shards"] for worker in self.node(server).get("workers", ()))

    def settled(self, count: int | None = None) -> bool:
        """Do ``count`` servers (all that run) serve, each its share, with nothing moving and no shard without owner?"""
        status = self.status()
        if not status or status["shards_without_owner"]:
            return False
        nodes = {node["name"]: node for node in status["nodes"]}
        running = [server.name for server in self.servers if server.running]
        serving = [
            name for name, node in nodes.items()
            if node["state"] in ("up", "running") and node["workers"] and all(w["shards"] for w in node["workers"])
        ]  # fmt: skip
        moving = status.get("shards_moving", 0)
        return set(running) <= set(serving) and not moving and (count is None or len(serving) == count)

    def wait_settled(self, what: str = "all servers serve their share", timeout_s: float = WAIT_S) -> None:
        """Wait until :meth:`settled`."""
        wait_until(self.settled, lambda: f"{what}: {json.dumps(self.status())[:3000]}", timeout_s, 0.05)

    def logs(self) -> str:
        """All that the servers said."""
        paths = [server.log for server in [self.manager, *self.servers]]
        return "\n".join(path.read_text(errors="replace") for path in paths if path.exists())

    def assert_no_traceback(self) -> None:
        """No server has met a bug of its own."""
        said = self.logs()
        at = said.find("Traceback (most recent call last)")
        assert at < 0, said[max(0, at - 500) : at + 3000]

"""A real manager and a real data server in processes of their own, and waiting for what is to come."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from simm.ipc.segments import ArenaName
from simm.net.channel import Channel
from simm.shm import remove_leftovers
from simm.wire import messages as M
from tests.support.ports import reserve_port
from tests.support.server_process import ServerProcess
from tests.support.waiting import WAIT_S, wait_until

_numbers = itertools.count()
#: In all names of this session's servers.
HERE = f"t{os.getpid()}-"


class Cluster:
    """A manager and a data server, each in its own processes. Addresses and names outlive restarts.

    ``stop`` ends and cleans up whatever still runs.
    """

    def __init__(
        self, folder: Path, memory: str = "256M", heartbeat_ms: int = 1000, *, server_arguments: Sequence[str] = (),
        manager_arguments: Sequence[str] = (), script: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.folder = folder
        self.server_arguments = server_arguments
        self.manager_arguments = manager_arguments
        #: Runs a server in place of ``-m simm.SERVER``, and what it finds in its environment.
        self.script = script
        self.environment = environment or {}
        self.memory = memory
        self.heartbeat_ms = heartbeat_ms
        self.name = f"{HERE}{next(_numbers)}"
        self.manager = ""
        #: By module; each start makes a new one.
        self.processes: dict[str, ServerProcess] = {}

    def __enter__(self) -> Cluster:
        try:
            self.start_manager()
            self.start_server()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start_manager(self) -> None:
        """At the same address as before, if there was one."""
        started = self._launch(
            "manager", "--listen", self.manager or f"127.0.0.1:{reserve_port()}",
            "--state-dir", str(self.folder / "state"), "--heartbeat-ms", str(self.heartbeat_ms),
            *self.manager_arguments,
        )  # fmt: skip
        started.wait_ready()
        self.manager = started.address

    def start_server(self) -> None:
        """Under the same name as before."""
        self.launch_server().wait_ready()

    def launch_server(self) -> ServerProcess:
        """Start the data server, and do not wait until it is ready."""
        return self._launch(
            "dataserver", "--listen", "127.0.0.1:0", "--manager", self.manager, "--memory", self.memory,
            "--numa", "0", "--name", self.name, "--runtime-dir", str(self.folder / "run"), *self.server_arguments,
        )  # fmt: skip

    def _launch(self, module: str, *arguments: str) -> ServerProcess:
        before = self.processes.get(module)
        assert before is None or not before.running, f"the {module} runs already"
        program = [*self.script, module] if self.script else []
        process = ServerProcess(module, self.folder, *arguments, program=program, environment=self.environment)
        self.processes[module] = process
        process.launch()
        return process

    def log(self, module: str) -> Path:
        """What the process says on stderr."""
        return self.folder / f"{module}.log"

    def kill(self, module: str) -> None:
        """kill -9, and wait until it has gone with all its children."""
        self.processes[module].kill()

    def stop(self) -> None:
        """End what runs, the data server first; remove what a killed one left."""
        for module in ("dataserver", "manager"):
            if module in self.processes:
                self.processes[module].clean_up()
        remove_left_by(self.name)
        remove_folder(self.folder)

    def worker_stats(self) -> dict[str, Any]:
        """The worker's own counters."""
        with contextlib.closing(Channel.unix(str(self.folder / "run" / f"{self.name}.0.sock"), WAIT_S)) as channel:
            stats: dict[str, Any] = json.loads(channel.call(M.Stats(0)).json)
            return stats


def remove_left_by(server: str) -> None:
    """Remove the arenas that a data server of this very name has left."""
    remove_leftovers("simm-", only=lambda name: (parts := ArenaName.parse(name)) is not None and parts.server == server)


def remove_folder(folder: Path) -> None:
    """Remove a cluster's folder. Raises AssertionError naming what stays there, as where somebody still writes."""

    def gone() -> bool:
        shutil.rmtree(folder, ignore_errors=True)
        return not folder.exists()

    wait_until(gone, lambda: f"the folder goes: {[str(path) for path in folder.rglob('*')]}")


def new_folder() -> Path:
    """A folder for a cluster, where the session looks for leftovers. Short: a UNIX socket's path has 107 bytes."""
    return Path(tempfile.mkdtemp(prefix="c"))

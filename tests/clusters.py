"""A real manager and a real data server in processes of their own, and waiting for what is to come."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from simm import messages as M
from simm.channel import Channel
from simm.shm import remove_leftovers

ROOT = Path(__file__).resolve().parent.parent
#: Bounds for things that hang, seconds; none is a speed limit.
READY_S = 60.0
STOP_S = 20.0
WAIT_S = 20.0

_numbers = itertools.count()
#: In all names of this session's servers.
HERE = f"t{os.getpid()}-"


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = WAIT_S) -> Any:
    """The condition's first true value; AssertionError when the time is up."""
    until = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > until:
            raise AssertionError(f"not within {timeout_s:.0f} s: {what}")
        time.sleep(0.02)


class Cluster:
    """A manager and a data server, each in its own processes. Addresses and names outlive restarts.

    ``stop`` ends and cleans up whatever still runs.
    """

    def __init__(
        self, folder: Path, memory: str = "256M", heartbeat_ms: int = 1000, *, server_arguments: Sequence[str] = (),
        script: Sequence[str] = (), environment: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.folder = folder
        self.server_arguments = server_arguments
        #: Runs a server in place of ``-m simm.SERVER``, and what it finds in its environment.
        self.script = script
        self.environment = environment or {}
        self.memory = memory
        self.heartbeat_ms = heartbeat_ms
        self.name = f"{HERE}{next(_numbers)}"
        self.manager = ""
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        #: Their READY lines.
        self.ready: dict[str, str] = {}

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
        ready = self._start(
            "manager", "--listen", self.manager or "127.0.0.1:0", "--state-dir", str(self.folder / "state"),
            "--heartbeat-ms", str(self.heartbeat_ms),
        )  # fmt: skip
        self.manager = ready.split()[2]

    def start_server(self) -> None:
        """Under the same name as before."""
        self._start(
            "dataserver", "--listen", "127.0.0.1:0", "--manager", self.manager, "--memory", self.memory,
            "--numa", "0", "--name", self.name, "--runtime-dir", str(self.folder / "run"), *self.server_arguments,
        )  # fmt: skip

    def _start(self, module: str, *arguments: str) -> str:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("SIMM_")}
        environment["PYTHONPATH"] = str(ROOT)
        environment.update(self.environment)
        program = [*self.script, module] if self.script else ["-m", f"simm.{module}"]
        with open(self.log(module), "ab") as log:
            process = subprocess.Popen(
                [sys.executable, *program, "--end-with", str(os.getpid()), *arguments],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, env=environment, cwd=self.folder,
            )  # fmt: skip
        self.processes[module] = process
        assert process.stdout is not None
        line, until = b"", time.monotonic() + READY_S
        while not line.endswith(b"\n"):
            readable = select.select([process.stdout], [], [], max(0.0, until - time.monotonic()))[0]
            piece = os.read(process.stdout.fileno(), 1) if readable else b""
            if not piece:
                said = self.log(module).read_text(errors="replace")[-2000:]
                raise AssertionError(f"no READY from the {module}: {line!r}\n{said}")
            line += piece
        assert line.startswith(b"READY "), line
        self.ready[module] = line.decode()
        return self.ready[module]

    def log(self, module: str) -> Path:
        """What the process says on stderr."""
        return self.folder / f"{module}.log"

    def kill(self, module: str) -> None:
        """kill -9, and wait until it has gone with all its children."""
        process = self.processes.pop(module)
        family = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
        process.kill()
        process.wait(STOP_S)
        if process.stdout is not None:
            process.stdout.close()
        wait_until(lambda: not any(map(_alive, family)), f"the {module}'s children end with it")

    def stop(self) -> None:
        """End what runs, the data server first; remove what a killed one left."""
        for module in ("dataserver", "manager"):
            process = self.processes.pop(module, None)
            if process is None:
                continue
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
                process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
        remove_leftovers(f"simm-{os.geteuid()}-{self.name}-")
        shutil.rmtree(self.folder, ignore_errors=True)

    def worker_stats(self) -> dict[str, Any]:
        """The worker's own counters."""
        with contextlib.closing(Channel.unix(str(self.folder / "run" / f"{self.name}.0.sock"), WAIT_S)) as channel:
            stats: dict[str, Any] = json.loads(channel.call(M.Stats(0)).json)
            return stats


def _alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def new_folder() -> Path:
    """A folder for a cluster, where the session looks for leftovers. Short: a UNIX socket's path has 107 bytes."""
    return Path(tempfile.mkdtemp(prefix="c"))

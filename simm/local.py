"""A cluster of one manager and one data server as child processes, for embedding, tests and demos.

The children end with this process, whatever ends it: they hold a pidfd of it (``--end-with``). Their
files lie in a temporary folder that goes with them.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from .errors import SimmError
from .quantities import parse_bytes

START_S: Final = 60.0
STOP_S: Final = 5.0


class LocalCluster:
    """Starts at construction, ends at :meth:`close`; ``manager`` is the address for clients.

    Args:
        memory: bytes of each worker's arena, or text such as ``"2G"``.
        numa: as ``--numa``.
        arguments: further command-line arguments of the data server.
        quiet: keep the servers' logs in their folder instead of on stderr.

    Raises SimmError with what the server said when one does not start; nothing is left behind then.
    """

    def __init__(
        self, memory: int | str = 1 << 30, *, numa: str = "0", arguments: tuple[str, ...] = (), quiet: bool = True
    ) -> None:
        self._pid = os.getpid()
        self._processes: list[subprocess.Popen[bytes]] = []
        self.folder = tempfile.mkdtemp(prefix="simm-local-")
        self._quiet = quiet
        try:
            ready = self._start("manager", "--listen", "127.0.0.1:0", "--state-dir", os.path.join(self.folder, "state"))
            self.manager = ready.split()[2]
            name = f"local-{os.getpid()}-{secrets.token_hex(4)}"
            self._start(
                "dataserver", "--listen", "127.0.0.1:0", "--manager", self.manager,
                "--memory", str(parse_bytes(memory)),
                "--numa", numa, "--name", name, "--runtime-dir", os.path.join(self.folder, "run"), *arguments,
            )  # fmt: skip
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"<LocalCluster {getattr(self, 'manager', 'starting')}>"

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the manager and of the data server's supervisor."""
        return dict(zip(("manager", "dataserver"), (process.pid for process in self._processes)))

    def _start(self, module: str, *arguments: str) -> str:
        """Start a server and wait for its READY line."""
        environment = {key: value for key, value in os.environ.items() if not key.startswith("SIMM_")}
        # The children must find the very package that runs here.
        package = str(Path(__file__).resolve().parent.parent)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package, environment.get("PYTHONPATH")]))
        log_path = os.path.join(self.folder, f"{module}.log")
        with open(log_path, "wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", f"simm.{module}", "--end-with", str(self._pid), *arguments],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log if self._quiet else None, env=environment,
                start_new_session=True,  # a Ctrl-C is for us; we end them in order
            )  # fmt: skip
        self._processes.append(process)
        assert process.stdout is not None
        line = _first_line(process.stdout.fileno(), START_S)
        if line.startswith("READY "):
            return line
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        process.wait(STOP_S)
        with open(log_path, encoding="utf-8", errors="replace") as log_file:
            said = log_file.read().strip().splitlines()
        raise SimmError(f"the {module} did not start: {said[-1] if said else 'it said nothing'}")

    def close(self) -> None:
        """End both processes and remove their folder. Twice, and in a forked child, harmless."""
        if self._pid != os.getpid():
            return
        processes, self._processes = self._processes, []
        for process in reversed(processes):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
                process.send_signal(signal.SIGCONT)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _first_line(fd: int, seconds: float) -> str:
    """The first line from a pipe; what there is when it closes or the time is up."""
    until = time.monotonic() + seconds
    data = b""
    while b"\n" not in data:
        left = until - time.monotonic()
        if left <= 0 or not select.select([fd], [], [], left)[0]:
            break
        piece = os.read(fd, 4096)
        if not piece:
            break
        data += piece
    return data.split(b"\n")[0].decode(errors="replace")

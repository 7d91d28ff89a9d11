"""A manager and any number of data servers as processes, each of which can be killed, stopped, and started again.

Names and addresses outlive restarts. A ``Place`` says where a process runs: here, or in a network namespace of
:mod:`hosts`. Everything ends with the test, whatever ended it, and ``stop`` removes what the killed left.
"""

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
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import psutil

from simm import messages as M
from simm.channel import Channel
from simm.errors import TransportError
from simm.shm import remove_leftovers

TESTS: Final = Path(__file__).resolve().parent.parent
#: Bounds for things that hang, seconds; none is a speed limit.
READY_S: Final = 60.0
STOP_S: Final = 20.0
WAIT_S: Final = 60.0

_numbers = itertools.count()


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = WAIT_S, pause_s: float = 0.02) -> float:
    """Seconds until the condition was true; AssertionError when the time is up."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > timeout_s:
            raise AssertionError(f"not within {timeout_s:.0f} s: {what}")
        time.sleep(pause_s)
    return time.monotonic() - began


def child_environment() -> dict[str, str]:
    """The tests' own code and the package under test, and no settings from outside."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SIMM_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    return environment


class Place:
    """Where processes run. This one: on this host, as we do."""

    host = "127.0.0.1"
    #: Further arguments of a server that listens on ``host``.
    exposed: Sequence[str] = ()

    def command(self, words: Sequence[str]) -> list[str]:
        """The command line that runs ``words`` there."""
        return list(words)

    def connect(self, host: str, port: int, deadline_s: float) -> Channel:
        """A connection from there."""
        return Channel.tcp(host, port, deadline_s)


class Server:
    """One server of a fleet: a manager or a data server, running or not."""

    def __init__(self, fleet: Fleet, module: str, name: str, place: Place, arguments: Sequence[str]) -> None:
        self.fleet = fleet
        self.module = module
        self.name = name
        self.place = place
        self.arguments = list(arguments)
        #: Of a manager, once it has one: it keeps it.
        self.address = ""
        self.http = ""
        self.process: subprocess.Popen[bytes] | None = None
        #: (faults.patched switches) for the next start.
        self.patches: Sequence[str] = ()

    @property
    def log(self) -> Path:
        """What it says on stderr, over all its lives."""
        return self.fleet.folder / f"{self.name}.log"

    @property
    def pid(self) -> int:
        """Of the process that runs now."""
        assert self.process is not None, f"{self.name} does not run"
        return self.process.pid

    def start(self, *more: str) -> float:
        """Start it and wait for READY; how long that took, seconds."""
        assert self.process is None, f"{self.name} runs already"
        began = time.monotonic()
        module = f"simm.{self.module}"
        words = [sys.executable, "-m", module]
        if self.patches:
            words = [sys.executable, "-m", "faults.patched", *self.patches, "--", module]
        words += ["--end-with", str(os.getpid()), *self.arguments, *more]
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                self.place.command(words), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log,
                env=child_environment(), cwd=self.fleet.folder, start_new_session=True,
            )  # fmt: skip
        words = self._first_line().split()
        assert words[:1] == ["READY"], words
        if self.module == "manager":
            self.address = words[2]
            self.arguments[self.arguments.index("--listen") + 1] = self.address
        for word in words:
            if word.startswith("http="):
                self.http = word[5:]
        return time.monotonic() - began

    def _first_line(self) -> str:
        assert self.process is not None and self.process.stdout is not None
        line, until = b"", time.monotonic() + READY_S
        while not line.endswith(b"\n"):
            readable = select.select([self.process.stdout], [], [], max(0.0, until - time.monotonic()))[0]
            piece = os.read(self.process.stdout.fileno(), 1) if readable else b""
            if not piece:
                said = self.log.read_text(errors="replace")[-2000:]
                raise AssertionError(f"no READY from {self.name}: {line!r}\n{said}")
            line += piece
        return line.decode()

    def family(self) -> list[psutil.Process]:
        """The process and all that it has forked."""
        try:
            process = psutil.Process(self.pid)
            return [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def signal(self, number: int, *, family: bool = False) -> None:
        """Send a signal, to its children too if asked."""
        for process in self.family() if family else [psutil.Process(self.pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def kill(self) -> None:
        """kill -9, and wait until it has gone with all its children."""
        family = self.family()
        process, self.process = self.process, None
        assert process is not None
        process.kill()
        process.wait(STOP_S)
        if process.stdout is not None:
            process.stdout.close()
        wait_until(lambda: not any(map(_alive, family)), f"the children of {self.name} end with it")

    def end(self) -> float:
        """SIGTERM, and wait; how long it took, seconds. AssertionError if it fails or hangs."""
        began = time.monotonic()
        process, self.process = self.process, None
        assert process is not None
        process.terminate()
        try:
            code = process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise AssertionError(f"{self.name} does not end at SIGTERM") from None
        finally:
            if process.stdout is not None:
                process.stdout.close()
        assert code == 0, f"{self.name} ended with {code}"
        return time.monotonic() - began

    def clean_up(self) -> None:
        """End it if it runs, in any way."""
        if self.process is None:
            return
        self.signal(signal.SIGCONT, family=True)
        with contextlib.suppress(AssertionError):
            self.end()

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


class Fleet:
    """``with Fleet(folder, 3) as fleet``: a manager (``fleet.manager``) and data servers (``fleet.servers``).

    Args:
        memory: of each arena.
        heartbeat_ms: the manager's; None for its default.
        managers: further arguments of the manager; ``servers`` of the data servers.
        places: where the manager and each server run, in this order.
        patches: switches of ``faults.patched`` for all of them.
        run_folder: the runtime folder as each server sees it (in its own mount namespace perhaps).
    """

    def __init__(
        self, folder: Path, count: int = 3, *, memory: str = "64M", heartbeat_ms: int | None = None,
        manager_arguments: Sequence[str] = (), server_arguments: Sequence[str] = (), places: Sequence[Place] = (),
        patches: Sequence[str] = (), run_folder: str = "", run_folders: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.folder = folder
        self.prefix = f"t{os.getpid()}-f{next(_numbers)}"
        places = list(places) or [Place()] * (count + 1)
        self._run_folder = run_folder or str(folder / "run")
        self._run_folders = dict(zip((f"{self.prefix}{number}" for number in range(count)), run_folders))
        beat = [] if heartbeat_ms is None else ["--heartbeat-ms", str(heartbeat_ms)]
        self.manager = Server(
            self, "manager", f"{self.prefix}m", places[0],
            ["--listen", f"{places[0].host}:0", "--http", f"{places[0].host}:0", "--state-dir", str(folder / "state"),
             *places[0].exposed, *beat, *manager_arguments],
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
        if self._channel is not None:
            self._channel.close()
        for server in [*self.servers, self.manager]:
            server.clean_up()
        remove_leftovers(f"simm-{os.geteuid()}-{self.prefix}")
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- from outside -------------------------------------------------------------------------------

    def ask_manager(self, msg: Any) -> Any:
        """One exchange with the manager. Raises TransportError."""
        if self._channel is None or self._channel.broken:
            host, _, port = self.manager.address.rpartition(":")
            self._channel = self.manager.place.connect(host, int(port), 2.0)
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
        running = [server.name for server in self.servers if server.process is not None]
        serving = [
            name for name, node in nodes.items()
            if node["state"] in ("up", "running") and node["workers"] and all(w["shards"] for w in node["workers"])
        ]  # fmt: skip
        moving = status.get("shards_moving", 0)
        return set(running) <= set(serving) and not moving and (count is None or len(serving) == count)

    def wait_settled(self, what: str = "all servers serve their share", timeout_s: float = WAIT_S) -> float:
        """Seconds until :meth:`settled`."""
        try:
            return wait_until(self.settled, what, timeout_s, 0.05)
        except AssertionError as exc:
            raise AssertionError(f"{exc}: {json.dumps(self.status())[:3000]}") from None

    def logs(self) -> str:
        """All that the servers said."""
        paths = [server.log for server in [self.manager, *self.servers]]
        return "\n".join(path.read_text(errors="replace") for path in paths if path.exists())

    def assert_no_traceback(self) -> None:
        """No server has met a bug of its own."""
        said = self.logs()
        at = said.find("Traceback (most recent call last)")
        assert at < 0, said[max(0, at - 500) : at + 3000]


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@contextlib.contextmanager
def stopped(*processes: psutil.Process) -> Iterator[None]:
    """SIGSTOP, and SIGCONT at the end."""
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

"""What a server's processes write to: log files, standard streams, and nothing else that has their number.

A child of the supervisor gives up what it inherits. Its log handlers keep their file, no other object's number is ever
reused, and 0 to 2 are never an arena's or a socket's.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from simm.arena.layout import HEADER_BYTES, Geometry, State
from simm.client import Client
from simm.config import logs
from simm.config.parsers import parse_address
from simm.config.settings import Settings
from simm.ipc.segments import state_of
from simm.net.loop import Loop
from simm.net.process import log_descriptors
from simm.server.children import Children
from tests.support.child import ROOT, Child, Place, alive, child_environment, forked_by
from tests.support.held_files import behind
from tests.support.http_page import page
from tests.support.manager_client import ManagerClient
from tests.support.ports import reserve_port
from tests.support.processes import Cluster, new_folder
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until

KEYS = 200


def segment_of(cluster: Cluster) -> Path:
    found, _data = sorted(path for path in Path("/dev/shm").iterdir() if f"-{cluster.name}-0-" in path.name)
    return found


def put_and_get(cluster: Cluster, tag: str = "") -> int:
    """How many of KEYS values were stored and read back right."""
    right = 0
    with Client(cluster.manager, namespace="descriptors", path="shm", deadline_s=30.0) as client:
        for number in range(KEYS):
            value = f"{tag} {number}".encode() * 100
            right += client.put(f"{tag}{number}", value) and client.get(f"{tag}{number}") == value
    return right


def assert_intact(segment: Path) -> None:
    """The arena's header says what it must."""
    with open(segment, "rb") as file:
        header = file.read(HEADER_BYTES)
    size = segment.stat().st_size + Path(f"{segment}.data").stat().st_size
    Geometry.read(memoryview(header).cast("Q"), size, segment.name)
    assert state_of(segment.name) == State.OPEN


def family(cluster: Cluster) -> list[psutil.Process]:
    """The data server's processes, the supervisor first."""
    pid = cluster.processes["dataserver"].pid
    return [psutil.Process(pid), *forked_by(pid)]


def descriptors(cluster: Cluster) -> list[dict[int, str]]:
    """Where the descriptors of each of the data server's processes lead. A mover that has ended meanwhile is none."""
    found = []
    for process in family(cluster):
        with contextlib.suppress(FileNotFoundError):
            where = behind(process.pid)
            if alive(process):
                found.append(where)
    return found


def restart_worker(cluster: Cluster) -> None:
    pid = cluster.worker_stats()["pid"]
    os.kill(pid, signal.SIGKILL)

    def successor() -> bool:
        with contextlib.suppress(Exception):
            return bool(cluster.worker_stats()["pid"] != pid and cluster.worker_stats()["shards"])
        return False

    wait_until(successor, "a successor of the worker")


# -- log files ---------------------------------------------------------------------------------------


def test_a_log_file_is_no_arena(make_cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    """200 puts and gets with --log-file, before and after a worker's death; every process logs into that file."""
    path = tmp_path / "server.log"
    cluster = make_cluster(memory="32M", server_arguments=("--log-file", str(path), "--log-level", "debug"))
    segment = segment_of(cluster)
    assert put_and_get(cluster) == KEYS
    assert_intact(segment)
    restart_worker(cluster)
    wait_until(lambda: put_and_get(cluster, "again") == KEYS, "it serves on")
    assert_intact(segment)
    lines = path.read_text()
    (number,) = [fd for fd, where in behind(family(cluster)[0].pid).items() if where == str(path)]
    held = descriptors(cluster)
    assert len(held) >= 3 and all(where[number] == str(path) for where in held), held
    assert f" worker-0[{cluster.worker_stats()['pid']}] simm.server.worker: " in lines
    assert segment.read_bytes().find(b" simm.") < 0


def test_a_log_file_that_is_renamed(make_cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    """As logrotate does it with ``create``. Lines go into the new file, without a signal; nothing else changes."""
    path, moved = tmp_path / "server.log", tmp_path / "server.log.1"
    cluster = make_cluster(memory="32M", server_arguments=("--log-file", str(path)))
    path.rename(moved)
    path.touch()
    before = moved.stat().st_size
    restart_worker(cluster)
    wait_until(lambda: put_and_get(cluster) == KEYS, "it serves on")
    assert moved.stat().st_size == before and path.stat().st_size > 0
    assert_intact(segment_of(cluster))


def test_a_log_on_a_full_disk(nothing_is_left: Path) -> None:
    """Log and stderr take nothing, and children are started all the same."""
    cluster = Cluster(new_folder(), memory="32M", server_arguments=("--log-file", "/dev/full", "--log-level", "debug"))
    cluster.log("dataserver").symlink_to("/dev/full")
    with cluster:
        assert put_and_get(cluster) == KEYS
        restart_worker(cluster)
        wait_until(lambda: put_and_get(cluster) == KEYS, "it serves on")
        assert_intact(segment_of(cluster))


def test_what_a_log_file_does_not_take_is_said_once(
    capsys: pytest.CaptureFixture[str], logging_as_it_was: None
) -> None:
    logs.set_up_logging(Settings(log_file=Path("/dev/full")), "test")
    for _ in range(3):
        logging.getLogger("simm").warning("a line")
    assert capsys.readouterr().err.count("cannot write to the log file /dev/full") == 1
    with contextlib.suppress(OSError):
        logging.getLogger("simm").handlers[0].close()


# -- what a child holds ------------------------------------------------------------------------------


def children_of(keep_nothing: Callable[[Any], Any], tmp_path: Path) -> dict[str, Any]:
    """What a forked child of a supervisor says."""
    loop = Loop()
    children = Children(loop, list)

    def body(sock: socket.socket) -> None:
        sock.sendall(json.dumps(keep_nothing(sock)).encode())

    child = children.fork(body, [])
    try:
        child.sock.settimeout(30)
        said = b""
        while piece := child.sock.recv(1 << 16):
            said += piece
        os.waitpid(child.pid, 0)
        answer: dict[str, Any] = json.loads(said)
        return answer
    finally:
        child.lost()
        loop.close()


@pytest.fixture
def handlers(tmp_path: Path) -> Iterator[dict[Path, logging.Handler]]:
    """Log files of all loggers that servers write to."""
    made: dict[Path, logging.Handler] = {}
    names = ["", "simm", "simm.server.worker", "simm.dataserver"]
    for number, name in enumerate(names):
        path = tmp_path / f"log {number}"
        made[path] = logging.FileHandler(path)
        logging.getLogger(name or None).addHandler(made[path])
    yield made
    for name, handler in zip(names, made.values()):
        logging.getLogger(name or None).removeHandler(handler)
        handler.close()


def test_a_childs_handlers_lead_where_they_should(handlers: dict[Path, logging.Handler], tmp_path: Path) -> None:
    def child(_sock: socket.socket) -> dict[str, Any]:
        opened = [os.open(tmp_path / f"arena {number}", os.O_RDWR | os.O_CREAT) for number in range(30)]
        logging.getLogger("simm.server.worker").error("from the child")
        where = behind(os.getpid())
        return {
            "handlers": {str(path): where[handler.stream.fileno()] for path, handler in handlers.items()},  # type: ignore[attr-defined]
            "written": [os.fstat(fd).st_size for fd in opened],
        }

    assert {handler.stream.fileno() for handler in handlers.values()} <= log_descriptors()  # type: ignore[attr-defined]
    said = children_of(child, tmp_path)
    assert said["handlers"] == {str(path): str(path) for path in handlers}
    assert not any(said["written"])
    assert "from the child" in (tmp_path / "log 2").read_text()


def test_no_number_of_the_parents_is_used_again(tmp_path: Path) -> None:
    """Files, sockets and cycles of the parent are alive in the child; nothing that they do reaches its files."""
    file = open(tmp_path / "parents", "wb", buffering=0)
    left, right = socket.socketpair()
    cycle: list[Any] = [open(tmp_path / "in a cycle", "wb", buffering=0)]
    cycle.append(cycle)
    gc.disable()

    def child(_sock: socket.socket) -> dict[str, Any]:
        numbers = {file.fileno(), left.fileno(), right.fileno()}
        opened = [os.open(tmp_path / f"new {number}", os.O_RDWR | os.O_CREAT) for number in range(30)]
        refused = 0
        for write in (lambda: file.write(b"log line"), lambda: left.send(b"log line")):
            try:
                write()
            except OSError:
                refused += 1
        gc.collect()
        return {
            "refused": refused,
            "reused": sorted(numbers & set(opened)),
            "sizes": [os.fstat(fd).st_size for fd in opened],  # raises where the collector closed one
        }

    number = cycle[0].fileno()
    del cycle
    try:
        said = children_of(child, tmp_path)
    finally:
        gc.enable()
        gc.collect()
        for each in (file, left, right):
            each.close()
    assert said == {"refused": 2, "reused": [], "sizes": [0] * 30}
    assert not os.path.exists(f"/proc/self/fd/{number}")


def test_servers_fork_in_one_place() -> None:
    """So what is shown of ``Children.fork`` holds for workers, streams, endpoints, movers and resolvers."""
    found = set()
    for path in (ROOT / "simm").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.fork", "os.forkpty", "pty.fork"):
                found.add(path.name)
    assert found == {"children.py"}


# -- 0, 1 and 2 --------------------------------------------------------------------------------------


class Without(Place):
    """Here, with these descriptors closed; ``silent``: stdout is /dev/null otherwise."""

    def __init__(self, *numbers: int, silent: bool = False) -> None:
        self.redirections = [">/dev/null"] * silent + [f"{number}>&-" for number in numbers]

    def command(self, words: Sequence[str]) -> list[str]:
        return ["sh", "-c", f'exec "$@" {" ".join(self.redirections)}', "sh", *words]


@pytest.mark.parametrize("numbers", [(2,), (1, 2), (0, 1, 2)], ids=str)
def test_closed_standard_descriptors(make_cluster: Callable[..., Cluster], numbers: tuple[int, ...]) -> None:
    """A server that was started without them has the null device there, and so have its children."""
    cluster = make_cluster(memory="32M")
    other = Cluster(cluster.folder)
    other.name, other.manager = f"{cluster.name}closed", cluster.manager
    process = ServerProcess(
        "dataserver", cluster.folder, "--listen", "127.0.0.1:0", "--manager", cluster.manager, "--memory", "32M",
        "--numa", "0", "--name", other.name, "--runtime-dir", str(cluster.folder / "run"), "--log-level", "debug",
        name="closed", place=Without(*numbers, silent=True),
    )  # fmt: skip
    process.launch()
    try:
        other.processes["dataserver"] = process

        def serves() -> bool:
            with contextlib.suppress(Exception):
                return bool(other.worker_stats()["shards"])
            return False

        wait_until(serves, "it has shards", 60)
        restart_worker(other)
        wait_until(lambda: put_and_get(other) == KEYS, "it serves")
        held = descriptors(other)
        assert len(held) >= 3
        for where in held:
            assert [where[number] for number in range(3)] == [os.devnull] * 3, where
        assert_intact(segment_of(other))
    finally:
        process.end()


class Mute(Place):
    """Here, with a stdout that takes nothing: on a full disk, or a pipe whose reader has ended."""

    def __init__(self, how: str) -> None:
        self.how = how

    def command(self, words: Sequence[str]) -> list[str]:
        redirected = {"full disk": "exec > /dev/full", "closed pipe": "exec > >(:); wait $!"}[self.how]
        return ["bash", "-c", f'{redirected}; exec "$@"', "bash", *words]


HOWS = ("full disk", "closed pipe")


@pytest.mark.parametrize("how", HOWS)
def test_a_data_server_whose_stdout_takes_nothing(make_cluster: Callable[..., Cluster], how: str) -> None:
    """It serves, says so once in its log, restarts nothing, and its clean end is one. It used to restart 60 times."""
    cluster = make_cluster(memory="32M")
    other = Cluster(cluster.folder)
    other.name, other.manager = f"{cluster.name}mute", cluster.manager
    process = ServerProcess(
        "dataserver", cluster.folder, "--listen", "127.0.0.1:0", "--manager", cluster.manager, "--memory", "32M",
        "--numa", "0", "--name", other.name, "--runtime-dir", str(cluster.folder / "run"), "--http",
        f"127.0.0.1:{reserve_port()}", name="mute", place=Mute(how),
    )  # fmt: skip
    process.launch()
    try:
        other.processes["dataserver"] = process
        wait_until(lambda: "READY dataserver" in process.log.read_text(), "its log has the line", 60)
        supervisor, worker = process.pid, other.worker_stats()["pid"]
        # While shards move to a server that has just joined, a client by shm alone may not have its arena yet: a miss.
        wait_until(lambda: put_and_get(other) == KEYS, "all values are read back")
        _, metrics = page(process.arguments[process.arguments.index("--http") + 1], "/metrics")
        restarts = [line for line in metrics.splitlines() if line.startswith("simm_process_restarts_total")]
        assert restarts and all(line.endswith(" 0") for line in restarts), restarts
        assert process.pid == supervisor and other.worker_stats()["pid"] == worker
    finally:
        process.end()  # with exit code 0, although stdout still takes nothing
    said = [line for line in process.log.read_text().splitlines() if "READY dataserver" in line]
    assert len(said) == 1 and "cannot print" in said[0] and "WARN" in said[0], said
    assert "Traceback" not in process.log.read_text() and "Exception ignored" not in process.log.read_text()


@pytest.mark.parametrize("how", HOWS)
def test_a_manager_whose_stdout_takes_nothing(nothing_is_left: Path, how: str) -> None:
    folder = new_folder()
    address = f"127.0.0.1:{reserve_port()}"
    process = ServerProcess("manager", folder, "--listen", address, place=Mute(how))
    process.launch()
    try:
        wait_until(lambda: "READY manager" in process.log.read_text(), "its log has the line", 60)
        with ManagerClient([parse_address(address)], deadline_s=30.0) as client:
            assert client.status()["manager"]["connections"] >= 1
        process.end()
        text = process.log.read_text()
        assert text.count("cannot print") == 1 and "Exception ignored" not in text, text
    finally:
        process.clean_up()
        Cluster(folder).stop()


@pytest.mark.parametrize("how", HOWS)
def test_a_local_cluster_whose_stdout_takes_nothing(nothing_is_left: Path, how: str) -> None:
    folder = new_folder()
    address = f"127.0.0.1:{reserve_port()}"
    words = ["local", "--memory", "32M", "--numa", "0", "--listen", address, "--insecure", "--runtime-dir", "run"]
    log = folder / "local.log"
    with Child(
        [sys.executable, "-m", "simm", *words], name="simm local", place=Mute(how), log=log, folder=folder
    ) as local:
        wait_until(lambda: "READY local" in log.read_text(), "its log has the line", 60)
        with Client(address, deadline_s=30.0) as client:
            assert client.put("k", b"value") and client.get("k") == b"value"
        code = local.end()
        assert code == 128 + signal.SIGTERM, (code, local.said())
    assert log.read_text().count("cannot print") == 1, log.read_text()
    Cluster(folder).stop()


def test_a_manager_with_closed_standard_descriptors(nothing_is_left: Path) -> None:
    folder = new_folder()
    process = ServerProcess(
        "manager", folder, "--listen", "127.0.0.1:0", "--state-dir", str(folder / "state"), "--log-file",
        str(folder / "log"), place=Without(0, 1, 2),
    )  # fmt: skip
    process.launch()
    try:
        log = folder / "log"
        wait_until(lambda: log.exists() and "READY manager" in log.read_text(), "it is ready", 60)
        where = behind(process.pid)
        assert [where[number] for number in range(3)] == [os.devnull] * 3
    finally:
        process.end()
        Cluster(folder).stop()


def test_standard_streams_are_never_missing() -> None:
    """What a program prints to a closed stderr does not come out at stdout."""
    script = (
        "import sys\nfrom simm.config.logs import hold_standard_descriptors\nhold_standard_descriptors()\n"
        "print('to stderr', file=sys.stderr, flush=True)\nprint('done', flush=True)\n"
    )
    done = subprocess.run(
        Without(2).command([sys.executable, "-c", script]), env=child_environment(), capture_output=True, text=True,
        timeout=300, check=True,
    )  # fmt: skip
    assert done.stdout == "done\n"


@pytest.mark.parametrize("arguments", [["version"], ["--help"], ["config", "show"], ["nothing"]], ids=str)
@pytest.mark.parametrize("closed", [(1,), (2,), (0, 1, 2)], ids=str)
def test_a_command_without_a_standard_stream_ends_as_with_it(arguments: list[str], closed: tuple[int, ...]) -> None:
    """Without stdout it used to end with an AttributeError, and without stderr it said at stdout what went wrong."""
    command = [sys.executable, "-m", "simm", *arguments]
    usual, done = (
        subprocess.run(each, env=child_environment(), capture_output=True, text=True, timeout=300, check=False)
        for each in (command, Without(*closed).command(command))
    )
    assert done.returncode == usual.returncode
    assert done.stdout == ("" if 1 in closed else usual.stdout) and done.stderr == ("" if 2 in closed else usual.stderr)

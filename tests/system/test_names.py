"""A data server's name on its host: who has it, what happens to the paths under it, and what /healthz says of both."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from simm.client import Client
from simm.host.file_locks import LockFile
from tests.support.child import READY_S, forked_by, stopped
from tests.support.http_page import page
from tests.support.processes import Cluster
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until

KEYS = 30


def right(cluster: Cluster, path: str, tag: str) -> int:
    """How many of KEYS values a new client stores and reads back by this path alone."""
    count = 0
    with Client(cluster.manager, path=path, deadline_s=30.0) as client:
        for number in range(KEYS):
            value = f"{tag} {number}".encode() * 100
            count += client.put(f"{tag}{number}", value) and client.get(f"{tag}{number}") == value
    return count


def run_folder(cluster: Cluster) -> Path:
    return cluster.folder / "run"


def uds(cluster: Cluster) -> Path:
    return run_folder(cluster) / f"{cluster.name}.0.sock"


def second(cluster: Cluster) -> ServerProcess:
    """Another data server of the same name in the same folder, not started."""
    return ServerProcess(
        "dataserver", cluster.folder, "--listen", "127.0.0.1:0", "--manager", cluster.manager, "--memory", "32M",
        "--numa", "0", "--name", cluster.name, "--runtime-dir", str(run_folder(cluster)), *cluster.server_arguments,
        name="second",
    )  # fmt: skip


def occupy(path: Path) -> None:
    """Make a folder of a worker's path, so that nothing can be bound there. The worker may be faster: then again."""
    while not path.is_dir():
        path.unlink(missing_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir()


def refused(server: ServerProcess) -> str:
    """Start a server that must end by itself, and return what it says."""
    before = server.log.read_text() if server.log.exists() else ""
    server.launch()
    wait_until(lambda: server.child is not None and not server.child.running, "it ends", READY_S)
    assert server.wait() == 1
    return server.log.read_text().removeprefix(before)


# -- two starts of one name ------------------------------------------------------------------------------


def test_a_second_server_of_the_name_is_refused(make_cluster: Callable[..., Cluster]) -> None:
    """At once and with a sentence, and the first one notices nothing."""
    cluster = make_cluster(memory="32M")
    lock = run_folder(cluster) / f"{cluster.name}.lock"
    assert lock.read_text() == f"{cluster.processes['dataserver'].pid}\n"
    said = refused(second(cluster))
    assert f"a data server named '{cluster.name}' is running on this host already" in said and "another --name" in said
    assert right(cluster, "shm", "a") == right(cluster, "tcp", "b") == KEYS
    cluster.processes["dataserver"].end()
    assert not list(run_folder(cluster).iterdir()), "a clean stop leaves neither socket nor lock"


def test_two_starts_at_once(make_cluster: Callable[..., Cluster], nothing_is_left: Path) -> None:
    """The first has no socket yet, as it waits for its manager. It used to lose its sockets to the second later."""
    cluster = make_cluster(memory="32M", server_arguments=("--warm",))
    assert right(cluster, "shm", "a") == KEYS
    cluster.processes["dataserver"].end()
    with stopped(psutil.Process(cluster.processes["manager"].pid)):
        first = cluster.launch_server()
        wait_until(lambda: "asking the manager" in first.log.read_text(), "the first one asks", 60)
        assert "is running on this host already" in refused(second(cluster))
    first.wait_ready()
    assert right(cluster, "shm", "b") == right(cluster, "tcp", "c") == KEYS


def test_many_starts_at_once(make_cluster: Callable[..., Cluster]) -> None:
    """One of them serves, the others are refused."""
    cluster = make_cluster(memory="32M")
    cluster.processes["dataserver"].end()
    servers = [second(cluster) for _ in range(4)]
    for number, server in enumerate(servers):
        server.name = f"start{number}"
        server.launch()
    try:
        def ended() -> list[ServerProcess]:
            return [server for server in servers if server.child is not None and not server.child.running]

        wait_until(lambda: len(ended()) == 3, "three are refused", 60)
        for server in ended():
            assert "is running on this host already" in server.log.read_text()
            assert server.wait() == 1
        (winner,) = [server for server in servers if server.running]
        winner.wait_ready()
        assert right(cluster, "shm", "a") == right(cluster, "tcp", "b") == KEYS
    finally:
        for server in servers:
            server.clean_up()


def test_the_next_server_after_a_killed_one(make_cluster: Callable[..., Cluster]) -> None:
    """Lock and sockets that kill -9 leaves are in nobody's way, and a server that is being replaced is waited for."""
    cluster = make_cluster(memory="32M")
    os.kill(cluster.processes["dataserver"].pid, signal.SIGKILL)
    successor = second(cluster)
    with successor:
        assert right(cluster, "shm", "a") == right(cluster, "tcp", "b") == KEYS
    cluster.processes["dataserver"].wait()


# -- lost paths --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", ["socket", "replaced", "folder"])
def test_a_lost_path_is_bound_again(make_cluster: Callable[..., Cluster], lost: str) -> None:
    """Streams need no path; local clients find the worker again, and so they do after the worker's death."""
    cluster = make_cluster(memory="32M")
    path = uds(cluster)
    before = path.stat().st_ino
    with contextlib.ExitStack() as stack:
        with Client(cluster.manager, path="shm", deadline_s=30.0) as old:
            assert old.put("old", b"value")
            if lost == "folder":
                shutil.rmtree(path.parent)
            else:
                path.unlink()
            if lost == "replaced":
                stack.enter_context(contextlib.closing(other := socket.socket(socket.AF_UNIX))).bind(str(path))
                other.listen()
                before = path.stat().st_ino
            assert right(cluster, "tcp", "a") == KEYS

            def bound() -> bool:
                with contextlib.suppress(OSError):
                    return path.stat().st_ino != before and path.with_name(f"{cluster.name}.lock").exists()
                return False

            wait_until(bound, "the path is bound again, and the name locked", 30)
            # It is bound a moment before anybody listens there.
            wait_until(lambda: right(cluster, "shm", "b") == KEYS, "clients of this host find the worker")
            assert old.put("old", b"other") and old.get("old") == b"other"
        assert "is running on this host already" in refused(second(cluster))
        pid = cluster.worker_stats()["pid"]
        os.kill(pid, signal.SIGKILL)

        def served() -> bool:
            return right(cluster, "shm", "c") == right(cluster, "tcp", "d") == KEYS

        wait_until(served, "the successor serves", 60)
    cluster.processes["dataserver"].end()
    assert not list(run_folder(cluster).iterdir())


def test_streams_need_no_path(make_cluster: Callable[..., Cluster]) -> None:
    """A worker, and then a stream, that start while the path leads elsewhere: puts by TCP succeed."""
    cluster = make_cluster(memory="32M", server_arguments=("--streams", "1"))
    path = uds(cluster)
    worker, stream = forked_by(cluster.processes["dataserver"].pid)[:2]
    os.kill(worker.pid, signal.SIGSTOP)  # so that it binds nothing again
    occupy(path)
    os.kill(stream.pid, signal.SIGKILL)
    os.kill(worker.pid, signal.SIGKILL)
    wait_until(lambda: right(cluster, "tcp", "a") == KEYS, "puts by TCP succeed", 60)
    assert "cannot be bound again" in cluster.log("dataserver").read_text()
    path.rmdir()
    wait_until(lambda: path.is_socket(), "and then it can", 30)
    wait_until(lambda: right(cluster, "shm", "b") == KEYS, "clients of this host find the worker")


def test_a_server_whose_name_was_taken_ends(make_cluster: Callable[..., Cluster]) -> None:
    """Somebody removed its lock, and another process has it: it ends, and leaves the other's files alone."""
    cluster = make_cluster(memory="32M")
    server = cluster.processes["dataserver"]
    lock = run_folder(cluster) / f"{cluster.name}.lock"
    with stopped(psutil.Process(server.pid)):
        lock.unlink()
        other = LockFile.take(str(lock))
        assert other is not None
    try:
        assert server.wait() == 1
        assert "another data server of this name has been started" in cluster.log("dataserver").read_text()
        assert other.held and uds(cluster).is_socket()
    finally:
        other.release()
    assert not lock.exists()


# -- health --------------------------------------------------------------------------------------------------


def test_healthz_sees_a_stream_and_a_path(make_cluster: Callable[..., Cluster]) -> None:
    """A stream that hangs, and a path that nothing can be bound at, are no health."""
    cluster = make_cluster(memory="32M", server_arguments=("--http", "127.0.0.1:0"))
    server = cluster.processes["dataserver"]
    assert page(server.http, "/healthz")[0] == 200
    with stopped(forked_by(server.pid)[1]):
        wait_until(lambda: page(server.http, "/healthz")[0] == 503, "a stopped stream is seen", 60)
        assert "a stream process of workers [0]" in page(server.http, "/healthz")[1]
        cut_off = f'simm_streams_cut_off{{server="{cluster.name}",worker="0",numa="0"}} 1'
        assert cut_off in page(server.http, "/metrics")[1]
    wait_until(lambda: page(server.http, "/healthz")[0] == 200, "it goes on", 60)
    occupy(uds(cluster))
    wait_until(lambda: f"{uds(cluster)} is lost" in page(server.http, "/healthz")[1], "the path is missed", 60)
    assert page(server.http, "/healthz")[0] == 503
    uds(cluster).rmdir()
    wait_until(lambda: page(server.http, "/healthz")[0] == 200, "it is back", 60)

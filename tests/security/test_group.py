"""A user who is only in the ``--group`` of a data server, and one who is not even that."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from simm.client import Client
from simm.config.startup import ensure_runtime_dir
from simm.net.admission import HELLO_S
from simm.net.listeners import NamedSocket
from simm.rpc import encode
from simm.wire import messages as M
from simm.wire.hello import client_hello
from tests.support.child import Child, alive, stopped
from tests.support.other_user import GID, command_as, let_through, needs_root, run_as
from tests.support.processes import Cluster, new_folder
from tests.support.waiting import wait_until

pytestmark = needs_root

TOKEN = "a token of sixteen bytes or more"

USE = """if True:
    from simm.client import Client
    with Client(sys.argv[1], namespace="group", token=sys.argv[2], path=sys.argv[3], deadline_s=60.0) as client:
        tests.support.waiting.wait_until(lambda: client.put("from the member", b"m" * 100_000), "it can put")
        assert client.get("from the member") == b"m" * 100_000
        assert client.get("from the server's user") == b"s" * 100_000
        with client.view("from the server's user") as view:
            assert bytes(view.data) == b"s" * 100_000
        workers = client.stats()["workers"]
        print([worker["path"] for worker in workers], [worker["reason"] for worker in workers])
"""


#: What a member can do with the files of an arena.
ATTACK = """if True:
    import mmap, pathlib
    from simm.ipc.session import WorkerSession
    from simm.shm import AttachedSegment
    taken = []
    real = AttachedSegment.from_fd
    def from_fd(name, fd):
        taken.append(os.dup(fd))
        return real(name, fd)
    AttachedSegment.from_fd = from_fd
    session = WorkerSession(sys.argv[1], "attack", 60.0)
    arena = pathlib.Path("/dev/shm", session.reader.name)
    (data,) = taken
    size = os.fstat(data).st_size
    def refused(what, *arguments):
        try:
            what(*arguments)
        except PermissionError as error:
            return
        raise AssertionError(f"{what.__name__}{arguments} was allowed")
    for length in (0, size - 4096, size + 4096):
        refused(os.ftruncate, data, length)
    refused(os.open, f"/proc/self/fd/{data}", os.O_RDWR)
    refused(os.open, f"/proc/self/fd/{data}", os.O_RDWR | os.O_TRUNC)
    refused(os.open, arena, os.O_RDWR)
    refused(os.truncate, arena, 0)
    refused(os.unlink, arena)
    metadata = os.open(arena, os.O_RDONLY)
    refused(lambda: mmap.mmap(metadata, 4096, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE))
    assert not arena.with_name(arena.name + ".data").exists(), "it has no name"
    with mmap.mmap(data, size) as everything:
        everything[:] = os.urandom(1 << 20) * (size >> 20) + bytes(size & (1 << 20) - 1)
    print("done")
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A data server with a group, and a token that all know."""
    folder = new_folder()
    let_through(folder)
    (folder / "token").write_text(TOKEN)
    (folder / "token").chmod(0o600)
    with Cluster(
        folder, "64M", server_arguments=("--group", str(GID)), environment={"SIMM_TOKEN_FILE": str(folder / "token")}
    ) as made:
        with Client(made.manager, namespace="group", token=TOKEN, path="shm", deadline_s=60.0) as client:
            wait_until(lambda: client.put("from the server's user", b"s" * 100_000), "the worker takes a put")
        yield made


def test_a_member_puts_and_gets_by_shared_memory(cluster: Cluster) -> None:
    """The socket was the user's own group's: a member could map the arena, and not speak to its worker."""
    assert run_as(USE, cluster.manager, TOKEN, "shm").startswith("['shm']")
    with Client(cluster.manager, namespace="group", token=TOKEN, path="shm", deadline_s=60.0) as client:
        assert client.get("from the member") == b"m" * 100_000


def test_a_user_outside_of_the_group_has_tcp_only(cluster: Cluster) -> None:
    """With the token he reads and writes, but no file and no socket opens for him."""
    assert run_as(USE, cluster.manager, TOKEN, "shm,tcp", group=None).startswith("['tcp']")


def test_a_member_writes_values_and_nothing_else(cluster: Cluster) -> None:
    """No slot, no header, no size: whatever he does, the server and its other clients go on."""
    uds = cluster.folder / "run" / f"{cluster.name}.0.sock"
    with Client(cluster.manager, namespace="attack", token=TOKEN, path="shm", deadline_s=60.0, checksum=True) as client:
        before = {f"key {number}": os.urandom(20_000) for number in range(50)}
        assert all(client.put_many(list(before), list(before.values())))
        pid = cluster.worker_stats()["pid"]
        assert run_as(ATTACK, str(uds)) == "done\n"
        assert client.exists_many(list(before)) == [True] * 50, "the table is as it was"
        assert client.get_many(list(before)) == [None] * 50, "a checksum tells what is not as it was stored"
        assert all(client.put_many(list(before), list(before.values())))
        assert client.get_many(list(before)) == list(before.values())
        assert cluster.worker_stats()["pid"] == pid


SILENT = """if True:
    import contextlib, socket
    from simm.ipc.session import WorkerSession
    def connected():
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(sys.argv[1])
        return sock
    print("ready", flush=True)
    sys.stdin.readline()
    socks = [connected() for _ in range(300)]
    with contextlib.closing(WorkerSession(sys.argv[1], "quiet", 60.0)):
        print("said HELLO", flush=True)
        sys.stdin.read()
"""


def test_a_member_that_connects_and_says_nothing(cluster: Cluster) -> None:
    """It costs the worker 256 connections at most, and no other user's: each gives way to its own."""
    for _ in range(10):
        answer, took = beside_a_silent_member(cluster)
        if answer:
            return
        assert took > HELLO_S, "it was closed for the member's"
    pytest.fail("all of this takes longer than a stranger may")


def beside_a_silent_member(cluster: Cluster) -> tuple[bytes, float]:
    """Say HELLO by a connection that is older than a member's many; return the answer, and the connection's age."""
    uds = str(cluster.folder / "run" / f"{cluster.name}.0.sock")
    answer = b""
    with socket.socket(socket.AF_UNIX) as own, Child(command_as(SILENT, uds), talks=True) as member:
        member.expect("ready")
        began = time.monotonic()
        own.connect(uds)  # the oldest of all
        member.tell("go")
        member.expect("said HELLO")
        assert cluster.worker_stats()["connections"] < 256 + 20
        with contextlib.suppress(ConnectionError):
            own.sendall(encode(client_hello(M.Role.CLIENT), 1))
            answer = own.recv(1 << 16)
        return answer, time.monotonic() - began


def test_issue_a_killed_supervisor_leaves_no_table_of_sealed_data(nothing_is_left: Path) -> None:
    """Its worker heard the kernel's signal before the connection's end, and kept 2 % of the arena for nobody."""
    with Cluster(new_folder(), "32M", server_arguments=("--group", str(GID), "--warm")) as cluster:
        worker, server = psutil.Process(cluster.worker_stats()["pid"]), cluster.processes["dataserver"]
        with stopped(worker):
            server.send_signal(signal.SIGKILL)
            wait_until(lambda: worker.ppid() != server.pid, "the supervisor has gone")
        wait_until(lambda: not alive(worker), "the worker has gone")
        assert not [name for name in os.listdir("/dev/shm") if f"-{cluster.name}-" in name]


def test_the_socket_is_the_groups_when_it_is_bound_again(tmp_path: Path) -> None:
    path = ensure_runtime_dir(tmp_path / "run", GID) / "w.sock"
    unix = NamedSocket(str(path), GID)
    try:
        for _ in range(2):
            state = path.stat()
            assert (state.st_uid, state.st_gid, stat.S_IMODE(state.st_mode)) == (os.geteuid(), GID, 0o660)
            folder = path.parent.stat()
            assert (folder.st_uid, folder.st_gid, stat.S_IMODE(folder.st_mode)) == (os.geteuid(), GID, 0o710)
            path.unlink()
            path.parent.rmdir()
            again = unix.bind_again()
            again.close()
    finally:
        unix.close()

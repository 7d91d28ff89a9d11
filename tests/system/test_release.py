"""A client releases what it no longer needs at once, by reference counts: maps of arenas above all.

An arena is most of a machine's memory, and its pages stay used as long as any process maps it. If a client held a dead
server's arena until the cycle collector ran, the server's successor could not start. So the client here is a process
without a collector, and /proc shows what it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from simm import shm
from simm.client import Client
from simm.cluster import move_plan
from simm.control.etcd import Etcd
from simm.errors import RemoteProtocolError, TransportError, UsageError
from simm.gpu import cuda, direct
from simm.gpu.buffers import DeviceSpan
from simm.gpu.cuda import CudaError
from simm.host import copy_pool, memory
from simm.ipc import commit_ring
from simm.ipc import segments as arenas_module
from simm.ipc import session as session_module
from simm.ipc.session import WorkerSession
from simm.rdma import registration
from simm.rpc import Connection
from simm.sdk.rdma_connection import RdmaConnection
from simm.sdk.worker_path import Target
from simm.server import migration
from simm.server.worker_session import WorkerSessionKeeper
from simm.shm import data_name
from simm.wire import messages as M
from tests.support.child import ROOT
from tests.support.client_process import Engine, arenas, mapped, opened
from tests.support.fake_cluster import ALL, FakeCluster
from tests.support.fake_rdma_cluster import FakeRdmaCluster, path_of, until_rdma
from tests.support.manager_client import ManagerClient
from tests.support.processes import Cluster
from tests.support.tmpfs import own_tmpfs
from tests.support.waiting import wait_until
from tests.support.worker_thread import WorkerThread

WAIT_S = 60.0
#: The deadline of calls that must succeed. A server that is in the map no more is let go after one deadline, so it is
#: far below ``WAIT_S``.
PATIENT_S = 10.0
MIB = 1 << 20


@pytest.fixture(autouse=True)
def without_collector() -> Iterator[None]:
    """No cycle is collected in a test, also of those whose objects are in this process."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    session_module.RETIRED.clear()


@pytest.fixture
def cluster(make_cluster: Callable[..., Cluster]) -> Cluster:
    """A cluster that may be killed."""
    return make_cluster(memory="64M")


@pytest.fixture
def engine(cluster: Cluster) -> Iterator[Engine]:
    """A client of that cluster, by shm."""
    with Engine() as running:
        running.call("connect", manager=cluster.manager, path="shm", deadline_s=PATIENT_S)
        yield running
        assert running.call("wrongs") == 0


def arena_of(engine: Engine) -> str:
    """The one arena that the engine has mapped."""
    (name,) = arenas(engine.pid)
    return name


def maps_of(arena: str) -> dict[str, int]:
    """The maps of an arena in a client: of its metadata, of its values and of their visited bytes."""
    return {arena: 1, data_name(arena): 2}


def has_one_session(engine: Engine) -> bool:
    """Whether the engine has one arena mapped, and the maps of one session: of the arena and of the ring."""
    names = list(arenas(engine.pid))
    return len(names) == 1 and mapped(engine.pid) == {**maps_of(names[0]), "simm-ring": 1}


def until_gone(engine: Engine, name: str) -> None:
    wait_until(lambda: name not in arenas(engine.pid), f"the engine lets go of {name}", WAIT_S)


def until_more(engine: Engine, count: int) -> None:
    """Wait until its threads have got so many values more."""
    before = engine.call("progress").get("gets", 0)
    wait_until(lambda: engine.call("progress").get("gets", 0) > before + count, "it works", WAIT_S)


# -- a server that dies -------------------------------------------------------------------------------------------


def test_a_dead_servers_arena_is_let_go_under_load(cluster: Cluster, engine: Engine) -> None:
    engine.call("work", size=100_000, threads=2)
    until_more(engine, 20)
    for _ in range(2):
        old = arena_of(engine)
        cluster.kill("dataserver")
        cluster.start_server()
        until_gone(engine, old)
        until_more(engine, 20)
        wait_until(lambda: has_one_session(engine), "a second try's session goes", WAIT_S)
    engine.call("rest")


@pytest.mark.parametrize("end", ["killed", "stopped", "replaced", "cut off"])
def test_an_idle_client_lets_go_of_a_dead_servers_arena(cluster: Cluster, engine: Engine, end: str) -> None:
    """Not one call is made after the server's death."""
    assert engine.call("put", key="k", size=5000)
    old = arena_of(engine)
    if end == "stopped":
        cluster.processes["dataserver"].send_signal(signal.SIGTERM)
    else:
        if end == "cut off":
            cluster.kill("manager")
        cluster.kill("dataserver")
        if end == "replaced":
            cluster.start_server()
    until_gone(engine, old)
    wait_until(lambda: not mapped(engine.pid), "the ring goes, too", WAIT_S)
    if end == "stopped":
        assert cluster.processes["dataserver"].wait() == 0


def test_a_session_that_is_replaced_leaves_no_second_map(cluster: Cluster, engine: Engine) -> None:
    """The worker dies, and its server starts another on the same arena."""
    for _ in range(2):
        sessions = engine.call("sessions")
        os.kill(cluster.worker_stats()["pid"], signal.SIGKILL)
        wait_until(lambda: engine.call("sessions") not in ([], sessions), "there is another session", WAIT_S)  # noqa: B023
        wait_until(lambda: has_one_session(engine), "the first one's maps go", WAIT_S)
        assert engine.call("put", key="k", size=5000) and engine.call("get", key="k", size=5000)


def test_a_view_keeps_its_bytes_and_nothing_else(cluster: Cluster, engine: Engine) -> None:
    assert engine.call("put", key="k", size=300_000) and engine.call("look", key="k")
    old = arena_of(engine)
    sockets = opened(engine.pid).count("socket")
    cluster.kill("dataserver")
    wait_until(lambda: not engine.call("readers"), "the server's end is noticed", WAIT_S)
    # The view holds the arena; the session's ring and connection it does not need.
    wait_until(lambda: mapped(engine.pid) == maps_of(old), "the ring goes", WAIT_S)
    wait_until(lambda: opened(engine.pid).count("socket") < sockets, "the connection goes", WAIT_S)
    cluster.start_server()
    wait_until(lambda: engine.call("put", key="new", size=300_000), "the new one serves", WAIT_S)
    assert engine.call("get", key="new", size=300_000)
    assert engine.call("seen", key="k", size=300_000)
    assert old in arenas(engine.pid)
    engine.call("drop")
    assert old not in arenas(engine.pid)


@pytest.mark.parametrize("restart", [False, True])
def test_copies_under_way_keep_their_arena_to_their_end(cluster: Cluster, engine: Engine, restart: bool) -> None:
    """Two threads are in the middle of a GET and two in the middle of a PUT when the arena is let go."""
    assert engine.call("put", key="large", size=8 * MIB)  # no key of those threads
    old = arena_of(engine)
    engine.call("hold")
    engine.call("work", size=2 * MIB, threads=2)  # stop in their first put
    engine.call("read", key="large", size=8 * MIB, threads=2)  # and these in their get
    wait_until(lambda: engine.call("held") >= 4, "all copies are in their middle", WAIT_S)
    cluster.kill("dataserver")
    if restart:
        cluster.start_server()
    wait_until(lambda: not engine.call("holds", name=old), "the client lets go", WAIT_S)
    assert old in arenas(engine.pid), "it was unmapped under a copy"
    engine.call("rest")
    until_gone(engine, old)


def test_large_copies_without_a_pause_while_servers_come_and_go(cluster: Cluster, engine: Engine) -> None:
    engine.call("work", size=4 * MIB, threads=3)
    for _ in range(3):
        until_more(engine, 5)
        old = arena_of(engine)
        cluster.kill("dataserver")
        cluster.start_server()
        until_gone(engine, old)
    engine.call("rest")


# -- a client's end -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["shm", "tcp"])
@pytest.mark.parametrize("end", ["close", "forget"])
def test_a_client_that_ends_leaves_nothing(cluster: Cluster, path: str, end: str) -> None:
    with Engine() as engine:
        engine.call("connect", manager=cluster.manager, path=path, copy_threads=2, deadline_s=PATIENT_S)
        engine.call("everything")
        engine.call(end)
        left: dict[str, Any] = {}

        def nothing() -> bool:
            left.update(engine.call("left"))
            return not any(left.values())

        with contextlib.suppress(AssertionError):
            wait_until(nothing, "nothing is left", WAIT_S / 2)
        assert left == {"maps": {}, "open": [], "threads": []}
        assert engine.call("collectable") == []


def test_nothing_waits_for_the_collector(cluster: Cluster, engine: Engine) -> None:
    """Not even small objects: a cycle holds whatever one of its objects comes to refer to."""
    engine.call("everything")
    cluster.kill("dataserver")
    wait_until(lambda: not engine.call("readers"), "the server's end is noticed", WAIT_S)
    for _ in range(3):
        assert not engine.call("put", key="k", size=100) and not engine.call("get", key="k", size=100)
    cluster.start_server()
    wait_until(lambda: engine.call("put", key="k", size=5000), "the new one serves", WAIT_S)
    engine.call("everything")
    assert engine.call("collectable") == []


# -- memory for one arena only ----------------------------------------------------------------------------------------

SMALL = """
import gc
gc.disable()
from simm.client import Client
from tests.support.client_process import arenas
from tests.support.processes import Cluster, new_folder
from tests.support.waiting import wait_until
with Cluster(new_folder(), memory="64M") as cluster:
    with Client(cluster.manager, path="shm", deadline_s=30.0) as client:
        assert client.put("k", b"v")
        for _ in range(3):
            cluster.kill("dataserver")
            wait_until(lambda: not arenas(), "the client lets go", 60)
            cluster.start_server()
            wait_until(lambda: client.put("k", b"v"), "the new one serves", 60)
            assert client.get("k") == b"v" and len(arenas()) == 1
        cluster.kill("dataserver")
        wait_until(lambda: not arenas(), "the client lets go", 60)
        cluster.start_server()
print("done")
"""


def test_a_server_comes_back_where_there_is_room_for_one_arena_only() -> None:
    """In a mount namespace whose /dev/shm has 96 MiB: the client lives, and arenas of 64 MiB come and go."""
    script = 'mount -t tmpfs -o size=96m tmpfs /dev/shm || exit 77; exec "$@"'
    command = ["unshare", "-m", "sh", "-c", script, "sh", sys.executable, "-c", SMALL]
    if os.geteuid() or not shutil.which("unshare"):
        pytest.skip("needs root and unshare")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip("mount namespaces are not allowed here")
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


@pytest.fixture
def own_shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Use a tmpfs of the test's own as SHM_DIR, so that no other process's files come and go there."""
    with own_tmpfs(tmp_path / "shm", "32m") as at:
        monkeypatch.setattr(shm, "SHM_DIR", str(at))
        yield at


def leftover(name: str) -> None:
    """A segment that its owner has left, with all its pages."""
    segment = shm.OwnedSegment.create(name, 16 * MIB)
    segment.populate()
    segment.close()


def test_a_start_waits_for_the_memory_of_what_it_removed(own_shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arenas_module, "LET_GO_S", WAIT_S)
    leftover("simm-x-old")
    free = memory.shm_free_bytes(shm.SHM_DIR)
    reader = shm.AttachedSegment.open("simm-x-old")
    reader.map(0, 4096, writable=False)
    removed: list[str] = []
    thread = threading.Thread(target=lambda: removed.extend(arenas_module.remove_old(["simm-x-old"])), daemon=True)
    thread.start()
    wait_until(lambda: not list(own_shm.iterdir()), "the name goes", WAIT_S)
    assert memory.shm_free_bytes(shm.SHM_DIR) < free + 15 * MIB, "the reader holds the pages"
    assert removed == []
    reader.close()
    thread.join(WAIT_S)
    assert removed == ["simm-x-old"]
    assert memory.shm_free_bytes(shm.SHM_DIR) >= free + 15 * MIB


def test_a_start_does_not_wait_for_ever(
    own_shm: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(arenas_module, "LET_GO_S", 0.05)
    leftover("simm-x-old")
    with shm.AttachedSegment.open("simm-x-old") as reader:
        reader.map(0, 4096, writable=False)
        assert arenas_module.remove_old(["simm-x-old"]) == ["simm-x-old"]
    assert "16 MiB of what was removed are not free yet" in caplog.text


# -- objects ------------------------------------------------------------------------------------------------------


def refs(session: WorkerSession) -> list[weakref.ref[Any]]:
    ring = session.ring
    assert ring is not None
    return [weakref.ref(each) for each in (session, session.channel, session.reader, ring._map)]


@pytest.mark.parametrize("end", ["closed", "closed twice", "broken", "dropped"])
def test_a_session_is_freed_by_its_references(end: str) -> None:
    with WorkerThread() as worker:
        session = worker.session()
        session.ask([(1000, 4)])
        seen = refs(session)
        if end == "broken":
            worker.die()
            with pytest.raises(TransportError):
                session.exchange(M.Ping(1))
            worker.start()
        if end != "dropped":
            session.close(clean=end != "broken")
        if end == "closed twice":
            session.close()
        del session
        assert [each() for each in seen] == [None] * 4


def test_a_session_that_was_not_to_be_leaves_no_map(monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails after its arena is mapped."""
    with WorkerThread() as worker:
        name = worker.segment.name

        def held() -> tuple[int, int]:
            return mapped()[name], sum(name in each for each in opened())

        peers = len(worker.loop.peers)
        for error in (TransportError, RemoteProtocolError, UsageError):

            def fail(*_: object, error: type[Exception] = error) -> None:
                raise error("not today")

            monkeypatch.setattr(commit_ring, "offered", fail)
            before = held()
            with contextlib.suppress(error):
                worker.session()
            assert held() == before, error
            wait_until(lambda: len(worker.loop.peers) == peers, "the connection is closed")


class Thing:
    """Stands for what a caller has: an arena, a buffer."""


def interrupted_copy(_: pytest.MonkeyPatch) -> None:
    """Ctrl-C while a copy is split over threads."""

    class Parts(list[None]):
        looked = False

        def __len__(self) -> int:
            if not self.looked:
                self.looked = True
                raise KeyboardInterrupt
            return 0

    copy_pool._abandon(Parts(), [])


def interrupted_connection(_: pytest.MonkeyPatch) -> None:
    """Ctrl-C while a connection is closed."""

    class Closing:
        tried = False

        def close(self) -> None:
            if not self.tried:
                self.tried = True
                raise KeyboardInterrupt

    connection: Any = RdmaConnection.__new__(RdmaConnection)
    connection.broken, connection.pool, connection.links = "", {}, [SimpleNamespace(qp=Closing())]
    connection.channel = SimpleNamespace(broken="", close=lambda: None)
    connection._scratch = SimpleNamespace(close=lambda: None)
    connection.close()


def failed_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that cannot be asked whether what was written is there."""

    def order(*_: Any) -> Any:
        raise CudaError("played by the test")

    monkeypatch.setattr(cuda, "load", order)
    direct.flush([0, 1])


def failed_staging(_: pytest.MonkeyPatch) -> None:
    """A value that was to come by TCP, and its GPU has no driver here."""
    span = DeviceSpan(4096, 5, device=0)
    span.read_remote(lambda *_: [], [0], [span], [0], ())


def wrong_bytes(_: pytest.MonkeyPatch) -> None:
    """A peer that speaks another protocol; the connection object stays."""
    conn = Connection()
    KEPT.append(conn)
    with contextlib.suppress(RemoteProtocolError):
        conn.receive_data(b"GET / HTTP/1.1" * 4)
        conn.next_frame()
    conn.receive_data(b"more")


def no_etcd(_: pytest.MonkeyPatch) -> None:
    """No process listens at the address."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        Etcd([("127.0.0.1", 1)])._connect(("127.0.0.1", bound.getsockname()[1]), time.monotonic() + WAIT_S)


def no_previous_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mover's previous owner does not answer."""

    def freeze(*_: Any) -> None:
        raise TransportError("played by the test")

    monkeypatch.setattr(move_plan, "FREEZE_S", -1.0)
    job: Any = SimpleNamespace(epoch=1, since={1: 1})
    previous: Any = SimpleNamespace(freeze=freeze)
    itself: Any = SimpleNamespace(plan=SimpleNamespace(wanted_of=lambda _job: [1]))
    assert migration.Mover._freeze(itself, previous, job) == []
    raise TransportError("given up")


KEPT: list[Any] = []


@pytest.mark.parametrize(
    ("call", "error"),
    [(interrupted_copy, KeyboardInterrupt), (interrupted_connection, KeyboardInterrupt), (failed_flush, CudaError),
     (failed_staging, CudaError), (wrong_bytes, RemoteProtocolError), (no_etcd, OSError),
     (no_previous_owner, TransportError)],
)  # fmt: skip
def test_an_error_that_is_dealt_with_holds_no_frames(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[pytest.MonkeyPatch], None], error: type[BaseException]
) -> None:
    """An exception holds all frames that it has passed, so keeping it in one of these frames makes a cycle."""

    def called() -> weakref.ref[Thing]:
        thing = Thing()
        try:
            call(monkeypatch)
        except error:
            return weakref.ref(thing)
        raise AssertionError("no error")

    try:
        assert called()() is None
    finally:
        KEPT.clear()


def test_a_call_in_a_thread_that_raised_holds_no_frames(cluster: Cluster) -> None:
    """The caller of asyncio gets the thread's exception; no cycle remains on either side."""

    def ended(cancelled: bool) -> weakref.ref[Client]:
        began, go = threading.Event(), threading.Event()

        def call() -> None:
            began.set()
            go.wait(WAIT_S)
            raise UsageError("no")

        async def run(client: Client) -> None:
            waiting = asyncio.ensure_future(client.in_thread(call))
            await asyncio.get_running_loop().run_in_executor(None, began.wait)
            if cancelled:
                waiting.cancel()
                asyncio.get_running_loop().call_later(0.01, go.set)
            else:
                go.set()
            await asyncio.wait((waiting,))
            if cancelled:
                assert waiting.cancelled()
            else:
                assert isinstance(waiting.exception(), UsageError)

        with Client(cluster.manager, path="shm") as client:
            asyncio.run(run(client))
            return weakref.ref(client)

    for cancelled in (False, True):
        seen = ended(cancelled)
        wait_until(lambda: seen() is None, f"the client goes, cancelled={cancelled}")  # noqa: B023


def test_a_managers_client_is_freed_by_its_references(cluster: Cluster) -> None:
    host, port = cluster.manager.rsplit(":", 1)
    manager = ManagerClient([(host, int(port))])
    manager.subscribe()
    seen = weakref.ref(manager), weakref.ref(manager._channel)
    del manager
    assert [each() for each in seen] == [None, None]


def test_a_session_that_broke_unseen_is_closed_when_another_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call has met the session's end, nor has the background; its chunks are released all the same."""
    monkeypatch.setattr(Target, "maintain", lambda *_: None)
    monkeypatch.setattr(Target, "wants_connection", lambda *_: False)
    with FakeCluster(1) as cluster:
        cluster.settled({0: ALL})
        client = cluster.client("shm")
        assert client.put("k", b"v")
        (place,) = client._router.targets.values()  # type: ignore[union-attr]
        old = place.session
        assert old is not None
        old.channel.broken = "played by the test"
        new = cluster.nodes[0].worker.session()
        place._connected(new, None, "", False, None)
        assert old.closed
        assert place.session is new
        assert client.put("k", b"w") and client.get("k") == b"w"


def test_a_session_of_a_stream_that_broke_at_once_is_closed() -> None:
    with WorkerThread() as worker:
        keeper = WorkerSessionKeeper(worker.path)
        made = worker.session(ring=False)
        made.channel.broken = "played by the test"
        keeper._made = made
        keeper._retry_at = float("inf")
        assert keeper.worker() is None
        assert made.closed
        keeper.close()


def test_trouble_with_one_server_does_not_keep_anothers_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeCluster(2) as cluster:
        cluster.settled({0: ALL[::2], 1: ALL[1::2]})
        client = cluster.client("shm")
        assert client.wait_ready()
        router = client._router
        assert router is not None
        first, second = router.targets.values()
        real = Target.maintain

        def tend(place: Target, now: float) -> None:
            if place is first:
                raise ValueError("played by the test")
            real(place, now)

        monkeypatch.setattr(Target, "maintain", tend)
        cluster.nodes[1].die()
        wait_until(lambda: second.reader is None, "the arena is let go", WAIT_S)


# -- RDMA -----------------------------------------------------------------------------------------------------------


def rdma_objects(client: Client) -> list[weakref.ref[Any]]:
    path = path_of(client)
    found: list[Any] = [path, path.arena]
    with path._lock:
        connections = path._idle + ([path._watched] if path._watched is not None else [])
    assert connections
    found += [thing for connection in connections for thing in (connection, connection.channel, connection.memory)]
    return [weakref.ref(each) for each in found]


def test_connections_and_what_they_know_of_an_arena_go_with_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeRdmaCluster(monkeypatch) as cluster:
        client = cluster.rdma(deadline_s=5.0)
        for number in range(8):
            assert client.put(f"k{number}", bytes(100_000)) and client.get(f"k{number}")
        wait_until(lambda: path_of(client)._idle, "a connection is idle")
        seen = rdma_objects(client)
        cluster.node.restart_stream()  # at another port: the map names another target
        cluster.settled({0: ALL})
        wait_until(lambda: all(each() is None for each in seen), "all of it goes", WAIT_S)
        until_rdma(client)
        assert client.put("k", bytes(100_000)) and client.get("k")
        wait_until(lambda: path_of(client)._idle, "a connection is idle")
        seen = rdma_objects(client)
        client.close()
        # A thread that has connected may still be on its way out.
        wait_until(lambda: all(each() is None for each in seen), "all of it goes", WAIT_S)


def test_rails_in_use_when_their_client_ends_are_closed_when_they_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeRdmaCluster(monkeypatch) as cluster:
        client = cluster.rdma(deadline_s=0.3)
        path = path_of(client)
        connection = path.acquire(time.monotonic() + WAIT_S)
        client.close()
        assert registration._SHARED, "the rails are in use"
        path.release(connection)
        wait_until(lambda: not registration._SHARED, "they are closed", WAIT_S)

"""Schedules designed to break moving shards, membership and recovery.

Each one broke something, or would do so without a rule that its test names.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from simm.client import Client
from simm.cluster.machine import Cluster
from simm.cluster.nodes import Timing
from simm.constants import NO_OWNER
from simm.ipc.session import WorkerSession
from simm.sdk.worker_path import Target
from simm.server.migration_peers import SourceWorker
from simm.wire import messages as M
from tests.support.child import stopped
from tests.support.fake_cluster import ALL, FakeCluster, Node
from tests.support.fleet import Fleet, Server
from tests.support.patched_moves import STOPPED
from tests.support.shards import shards_held
from tests.support.waiting import wait_until
from tests.support.worker_thread import WAIT_S

OLD, NEW = b"old" * 500, b"new" * 500
#: Heartbeats of several servers where no value may be lost: a busy machine may delay five of 200 ms.
PATIENT_MS = 1000


def put_at(node: Node, digest: bytes, value: bytes) -> int:
    """Put as a client with the right map; return the status."""
    session = WorkerSession(node.worker.path, "default", WAIT_S, ring=False)
    try:
        session.ask([(len(value), 1)])
        grant = session.pool.take(len(value))
        assert grant is not None
        start = grant[1] - session.reader.data_offset
        session.reader.data[start : start + len(value)] = value
        status: int = session.exchange(M.Commit([(digest, grant[0], len(value), 0, 0, 0)], [])).statuses[0]
        return status
    finally:
        session.close()


def digest_of(client: Client, key: str) -> bytes:
    """The key's digest, as the client has it."""
    return client._digest(key)


def owner_of(client: Client, key: str) -> Target:
    """By the client's map."""
    target = client._routes.target(digest_of(client, key))
    assert target is not None
    return target


# --- whose previous owner -----------------------------------------------------------------------


ASKS: dict[str, Callable[[Client], object]] = {
    "get": lambda client: client.get("k"),
    "batch": lambda client: client.get_many(["k"])[0],
    "exists": lambda client: client.exists("k") or None,
}


@pytest.mark.parametrize("path", ["shm", "tcp"])
@pytest.mark.parametrize("ask", ASKS)
def test_previous_of_a_later_move_is_not_looked_for_at_that_of_an_earlier_one(path: str, ask: str) -> None:
    """P -> N, P is not told that it is released; N -> Q, a put there; Q -> N, not adopted yet. A client with the first
    map, whose manager's push is late, asks N: "it may be at the previous owner" is Q, and not P of its own map."""
    with FakeCluster(3) as cluster:
        p, n, q = cluster.nodes
        cluster.settled({0: ALL})
        client = cluster.client(path)
        assert client.put("k", OLD)
        digest = digest_of(client, "k")
        cluster.own({1: ALL}, previous=0)
        cluster.instruct()
        cluster.publish()
        n.adopt(cluster.epoch, ALL)
        epoch = cluster.epoch
        wait_until(lambda: client.stats()["epoch"] == epoch, "the client has the first map")
        assert client.get("k") == OLD, "it is still at the previous owner"
        n.finish(cluster.epoch, ALL)
        cluster.forget_previous()
        cluster.own({2: ALL}, previous=1)
        cluster.instruct(1, 2)
        q.adopt(cluster.epoch, ALL)
        assert put_at(q, digest, NEW) == M.Status.OK
        cluster.forget_previous()
        cluster.own({1: ALL}, previous=2)
        cluster.instruct(1, 2)
        assert p.worker.store.table.lookup(digest) >= 0, "it has never heard of its release"
        assert ASKS[ask](client) is None
        cluster.publish()
        late = cluster.epoch
        wait_until(lambda: client.stats()["epoch"] == late, "the client has the newest map")
        assert ASKS[ask](client) in (NEW, True)


# --- the end of a server ------------------------------------------------------------------------


@pytest.fixture
def two_servers(nothing_is_left: Path) -> Iterator[Fleet]:
    folder = Path(tempfile.mkdtemp(prefix="a", dir=nothing_is_left))
    with Fleet(folder, 2, heartbeat_ms=PATIENT_MS) as fleet:
        yield fleet


def test_who_leaves_has_given_up_its_shards_before_others_get_them(two_servers: Fleet) -> None:
    """Stop A's worker and then ask A to end: it leaves, B gets the shards and accepts a put.

    A client that has not got that map yet must not find the old value in A's arena.
    """
    leaver = two_servers.servers[0]
    with Client(two_servers.manager.address) as late, Client(two_servers.manager.address) as client:
        key = next(key for key in map(str, range(1000)) if owner_of(late, key).info.node == leaver.name)
        wait_until(lambda: client.put(key, OLD), "it is stored")
        wait_until(lambda: late.get(key) == OLD, "the other client finds it")
        wait_until(lambda: client.stats()["epoch"] == late.stats()["epoch"], "both have one map")
        late._router.subscription.close()  # type: ignore[union-attr]
        epoch = late.stats()["epoch"]
        with stopped(psutil.Process(leaver.worker_pid())):
            leaver.send_signal(signal.SIGTERM)
            wait_until(lambda: client.stats()["epoch"] > epoch, "the map without the leaver")
            wait_until(lambda: client.put(key, NEW), "the next owner takes it")
            assert late.get(key) in (None, NEW)
            assert late.stats()["epoch"] == epoch
        assert leaver.wait() == 0
        assert wait_until(lambda: client.get(key), "it is found") == NEW


# --- what the manager deals ---------------------------------------------------------------------


def join(name: str, instance: int, epoch: int = 0, *, warm: bool = False, workers: int = 1) -> M.Join:
    infos = [M.WorkerInfo(number, 0, 1, 0, 1 << 30, "", f"/{name}", "h", 1) for number in range(workers)]
    return M.Join(instance, int(warm), name, infos, epoch)


def unowned(cluster: Cluster) -> int:
    return sum(cluster.owner(shard) is None for shard in ALL)


def test_no_shard_waits_for_a_server_that_never_catches_up() -> None:
    """d's worker is stopped: its server lives, and reports an old map. a dies, then b.

    The shards that b got from a must not go to d, which has missed that, so c gets more than its share of them.
    """
    cluster = Cluster(1, 0.0, Timing(moves_at_once=len(ALL)))
    now = 0.0

    def beats(*names: str) -> None:
        for name in names:
            cluster.heartbeat(now, name, 1, epoch=stuck if name == "d" else cluster.epoch)

    stuck = 0
    for name in "abcd":
        cluster.join(now, join(name, 1))
        for shard in ALL:
            if cluster.previous(shard):
                owner = cluster.owner(shard)
                assert owner is not None
                cluster.moved(now, M.Moved(1, cluster.epoch, owner[0], 0, b"\xff" * (len(ALL) // 8)))
        stuck = cluster.epoch
        beats(*"abcd"["abcd".index("a") : "abcd".index(name) + 1])
    for victims in ("a", "ab"):
        for _ in range(12):
            now += 0.5
            beats(*(name for name in "abcd" if name not in victims))
            cluster.maintain(now)
        assert cluster.nodes[victims[-1]].state.value == "dead"
        assert not unowned(cluster), f"{unowned(cluster)} shards wait for d"
        cluster.check()


def test_half_a_warm_start_is_given_nothing_before_it_has_caught_up() -> None:
    """m stops warm and stays away too long: its shards are n's. It returns with one worker more, so not warm.

    It has its old arena, whose words still say that the shards are its own, and whose values are older than n's.
    """
    cluster = Cluster(1, 0.0, Timing(restart_grace_s=1.0, moves_at_once=len(ALL)))
    cluster.join(0.0, join("m", 1))
    before = cluster.epoch
    cluster.heartbeat(0.0, "m", 1, epoch=before)
    cluster.leave(0.0, "m", 1, warm=True)
    cluster.join(0.0, join("n", 1))
    now = 0.0
    for _ in range(4):
        now += 0.5
        cluster.heartbeat(now, "n", 1, epoch=cluster.epoch)
        cluster.maintain(now)
    assert set(shards_held(cluster).values()) == {len(ALL)}, "n has them"
    cluster.join(now, join("m", 2, epoch=before, workers=2))
    assert not any(cluster.previous(shard) for shard in ALL), "nothing is moved to who does not know what it lost"
    assert sum(shards_held(cluster).values()) == len(ALL) == shards_held(cluster)["n", 0]
    cluster.heartbeat(now, "m", 2, epoch=cluster.epoch)
    assert shards_held(cluster)["m", 0] > 5000, "and now it is"
    cluster.check()


# --- a supervisor without means -----------------------------------------------------------------


def test_a_fork_that_fails_ends_no_server(nothing_is_left: Path) -> None:
    """The mover cannot be forked, then the stream and the worker, when they have died: EAGAIN, as in a full cgroup. Out
    of a timer that ended the data server with all that it held; out of a worker's answer, that worker."""
    folder = Path(tempfile.mkdtemp(prefix="f", dir=nothing_is_left))
    with Fleet(folder, 1, heartbeat_ms=PATIENT_MS) as fleet, Client(fleet.manager.address, deadline_s=30.0) as client:
        assert all(client.put(str(number), OLD) for number in range(50))
        first = fleet.servers[0]
        more = Server(fleet, "dataserver", f"{fleet.prefix}x", first.place, first.arguments)
        more.arguments[more.arguments.index("--name") + 1] = more.name
        more.patches = ("forks=2",)
        fleet.servers.append(more)
        more.start()
        fleet.wait_settled()
        for pid in (more.worker_pid(), *(child.pid for child in psutil.Process(more.pid).children())):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: all(client.get(str(number)) == OLD for number in range(50)), "all values are there")
        wait_until(lambda: all(client.put(str(number), NEW) for number in range(50)), "and can be replaced")
        assert "cannot start a process" in more.log.read_text()
        fleet.assert_no_traceback()


# --- nobody's for a moment ----------------------------------------------------------------------


@pytest.mark.parametrize("path", ["shm", "tcp"])
def test_a_put_waits_for_a_shard_that_nobody_has_for_a_moment(path: str) -> None:
    """Two of three servers stop together. Without any server a put fails at once.

    The shards that the second one had from the first have no owner until the third has acknowledged that map.
    """
    with FakeCluster(2) as cluster:
        cluster.settled({0: ALL})
        client = cluster.client(path)
        assert client.put("k", OLD)
        cluster.own({0: ()})
        cluster.owners[:] = array("H", [NO_OWNER]) * len(ALL)
        cluster.instruct()
        cluster.publish()
        nobodys = cluster.epoch
        wait_until(lambda: client.stats()["epoch"] == nobodys, "the map in which nobody has anything")
        timer = threading.Timer(0.2, lambda: cluster.settled({1: ALL}))
        timer.start()
        assert client.put("k", NEW) and client.put_many(["a", "b"], [OLD, NEW]) == [True, True]
        assert client.get("k") == NEW
        timer.join()
        cluster.own({0: ()})
        cluster.owners[:] = array("H", [NO_OWNER]) * len(ALL)
        cluster.manager.publish(cluster.map()._replace(workers=[]))
        empty = cluster.epoch
        wait_until(lambda: client.stats()["epoch"] == empty, "the map without servers")
        redirects = client.counters["redirects"]
        assert not client.put("k", OLD)
        assert client.counters["redirects"] == redirects, "at once"


def test_a_mover_that_stops_is_replaced(nothing_is_left: Path) -> None:
    """Stopped in the middle of its copies."""
    folder = Path(tempfile.mkdtemp(prefix="s", dir=nothing_is_left))
    with Fleet(folder, 1, heartbeat_ms=PATIENT_MS) as fleet, Client(fleet.manager.address, deadline_s=30.0) as client:
        value = bytes(100_000)
        assert all(client.put(str(number), value) for number in range(160))
        first = fleet.servers[0]
        more = Server(fleet, "dataserver", f"{fleet.prefix}x", first.place, first.arguments)
        more.arguments[more.arguments.index("--name") + 1] = more.name
        more.patches = ("mover=1", "call=tests.support.patched_moves:first_stops")
        fleet.servers.append(more)
        more.start()
        wait_until((more.folder / STOPPED).exists, "the mover has stopped in the middle of its copies")
        fleet.wait_settled()
        assert "says nothing: ending it" in more.log.read_text()
        assert all(client.get(str(number)) == value for number in range(160)), "and nothing is lost"


def test_connections_to_a_previous_owner_are_dropped_by_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look and the taking another thread takes the last one: that ended the mover."""
    info = M.WorkerInfo(0, 0, 1, 1, 1, "p", "", "127.0.0.1", 1)

    class Racing(list[Any]):
        def __bool__(self) -> bool:
            return True  # as it was a moment ago

    previous = SourceWorker(info, "")
    monkeypatch.setattr(previous, "_idle", Racing())
    previous.drop_connections()

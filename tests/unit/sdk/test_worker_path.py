"""A client and one worker: what a dead, stopped or slow worker costs, and what the client can still read from it."""

from __future__ import annotations

import itertools
import logging
import os
import re
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from simm.config.client_options import ClientOptions
from simm.errors import TransportError
from simm.ipc import session as session_module
from simm.ipc.session import WorkerSession
from simm.net.channel import BACKOFF_S, Backoff
from simm.rpc import reply
from simm.sdk import worker_path
from simm.sdk.path import STALE_S, ClientContext
from simm.sdk.tcp import TcpPath
from simm.sdk.worker_path import Target
from simm.server.worker import Worker
from simm.wire import messages as M
from simm.wire.messages import Status
from tests.support.client_values import forked
from tests.support.cluster_clients import KEYS, WAIT_S, full, published, value_of
from tests.support.fake_cluster import ALL, FakeCluster
from tests.support.interrupts import everywhere
from tests.support.waiting import wait_until


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    session_module.RETIRED.clear()
    with FakeCluster(2) as running:
        yield running
    session_module.RETIRED.clear()


def test_pauses_double_with_jitter_and_start_over() -> None:
    for jitter in (0.5, 1.0):
        breaker = Backoff(lambda low, high, jitter=jitter: low + (high - low) * (jitter - 0.5) * 2)
        now, pauses = 1000.0, []
        for _ in range(8):
            assert breaker.due(now)
            breaker.failed(now)
            pauses.append(breaker.retry_at - now)
            assert not breaker.due(now)
            assert not breaker.due(breaker.retry_at - 1e-6)
            now = breaker.retry_at
        wanted = [min(BACKOFF_S[1], BACKOFF_S[0] * 2**step) * jitter for step in range(8)]
        assert pauses == pytest.approx(wanted)
        breaker.worked()
        assert breaker.failures == 0
        breaker.failed(now)
        assert breaker.retry_at - now == pytest.approx(BACKOFF_S[0] * jitter)


def refused(*_: Any, **__: Any) -> Any:
    raise TransportError("nobody there")


def test_a_dead_server_is_tried_at_the_breakers_pace_and_by_no_operation(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[float] = []
    clock = [1000.0]

    def connecting(*_: Any, **__: Any) -> Any:
        tries.append(clock[0])
        refused()

    monkeypatch.setattr(worker_path, "WorkerSession", connecting)
    monkeypatch.setattr(TcpPath, "connect", refused)
    context = ClientContext(ClientOptions(namespace="n", deadline_s=WAIT_S), clock=lambda: clock[0])
    there = Target(cluster.nodes[0].info, context)
    assert not there.ready()
    assert len(tries) == 1
    for _ in range(1000):
        assert not there.ready()  # operations
    assert len(tries) == 1
    assert there.path == "down"
    for _ in range(60 * 20):  # a minute of ticks
        clock[0] += 0.05
        if there.wants_connection(clock[0]):
            there.connect_soon()
            wait_until(lambda: not there.connecting, "that try ends")
    gaps = [later - earlier for earlier, later in itertools.pairwise(tries)]
    assert 60 <= len(tries) <= 130
    assert gaps[0] <= 0.15
    assert all(0.4 <= gap <= 1.1 for gap in gaps[6:])
    monkeypatch.undo()
    there.connect_soon()
    wait_until(lambda: there.path == "shm", "it is back")
    assert there.ready()
    assert there.backoff.failures == 0
    there.close()
    there.connect_soon()
    assert not there.connecting


def test_each_outage_is_one_warning_and_its_end_another(
    cluster: FakeCluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second outage as well as the first, however often each is met; and the end of none is said twice.

    With real servers, and one outage: tests/system/client/test_outages.py.
    """
    there = Target(cluster.nodes[0].info, ClientContext(ClientOptions(namespace="n", deadline_s=WAIT_S, path="tcp")))
    connect = TcpPath.connect

    def attempt(*, works: bool) -> bool:
        monkeypatch.setattr(TcpPath, "connect", connect if works else refused)
        there._attempt()
        return there.path != "down"

    try:
        for outage in range(1, 4):  # the first one is there from the beginning
            for _ in range(3):
                assert not attempt(works=False)
            for _ in range(3):
                assert attempt(works=True)
            said = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
            assert ["is down" in each for each in said] == [True, False] * outage, said
            assert " answers again, by tcp, after " in said[-1]
            assert there.tcp is not None
            there.tcp_lost(there.tcp, "it broke")
            assert there.path == "down"
    finally:
        there.close()


def test_the_first_connection_costs_a_deadline_at_most_and_only_once(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a name server hangs, say, the attempt continues in the background, and all threads wait for the same one."""
    go_on = threading.Event()
    tries: list[int] = []

    def hanging(*_: Any, **__: Any) -> Any:
        tries.append(1)
        go_on.wait(2 * WAIT_S)
        refused()

    monkeypatch.setattr(worker_path, "WorkerSession", hanging)
    monkeypatch.setattr(TcpPath, "connect", refused)
    there = Target(cluster.nodes[0].info, ClientContext(ClientOptions(namespace="n", deadline_s=0.3)))
    began = time.monotonic()
    answers: list[bool] = []
    threads = [threading.Thread(target=lambda: answers.append(there.ready())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert not any(there.ready() for _ in range(1000))
    assert answers == [False] * 4
    assert tries == [1]
    assert time.monotonic() - began < WAIT_S
    assert not there.wants_connection(time.monotonic() + 100)  # that one is still under way
    go_on.set()
    wait_until(lambda: not there.connecting, "it ends")
    assert there.wants_connection(time.monotonic() + 100)


def test_a_stopped_worker_is_read_from_and_costs_one_deadline(cluster: FakeCluster) -> None:
    client = full(cluster, "shm", deadline_s=0.3)
    with cluster.nodes[0].worker.frozen():
        failures = client.stats()["outages"]
        assert client.put("k0", b"v") is False
        assert [client.put("k0", b"v") for _ in range(200)] == [False] * 200
        assert client.stats()["outages"] - failures <= 1
        there = client._routes.target(client.digest("k1"))
        assert there is not None
        # Long after: its heart has stood still, the manager still says that these shards are its own.
        there.maintain(time.monotonic() + 100 * STALE_S)
        assert client.get("k1") == value_of("k1")
        assert client.exists_many(KEYS) == [True] * len(KEYS)
        # Without a manager nobody would tell us if they were another's by now.
        cluster.manager.stop()
        wait_until(lambda: client.stats()["manager"] != "connected", "the client notices")
        there.maintain(time.monotonic() + 100 * STALE_S)
        assert client.get("k1") is None
    wait_until(lambda: client.put("k0", b"w"), "it is back")
    assert client.get("k1") == value_of("k1")


def test_a_dead_servers_arena_is_let_go_before_the_manager_knows(cluster: FakeCluster) -> None:
    client = full(cluster, "shm", deadline_s=2.0)
    assert client.get("k0") == value_of("k0")
    began = time.monotonic()
    cluster.nodes[0].die()
    wait_until(lambda: client.get("k0") is None, "its keys are misses")
    print(f"misses after {time.monotonic() - began:.2f} s")
    assert client.exists("k0") is False
    assert not client.view("k0")
    assert client.stats()["workers"][0]["path"] == "down"
    cluster.own({1: ALL})
    cluster.instruct()
    published(cluster, client)
    assert client.put("k0", b"v")
    assert client.get("k0") == b"v"


def test_what_went_by_tcp_for_want_of_an_answer_goes_by_shm_later(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.settled({0: ALL})
    with monkeypatch.context() as first:
        first.setattr(worker_path, "WorkerSession", refused)
        client = cluster.client("auto")
        assert client.put("k", b"v")
        assert client.stats()["workers"][0]["path"] == "tcp"
    there = client._routes.target(client.digest("k"))
    assert there is not None
    assert not there.wants_connection(time.monotonic())
    assert there.wants_connection(time.monotonic() + 100)
    there.connect_soon()
    wait_until(lambda: there.path == "shm", "it does")
    assert client.get("k") == b"v"
    assert there.tcp is None


def test_a_session_in_use_is_not_replaced(cluster: FakeCluster) -> None:
    """Whoever finds a target without a connection looks without its lock, and another thread's attempt may end then."""
    client = full(cluster, "shm")
    there = client._routes.target(client.digest("k0"))
    assert there is not None
    session = there.session
    assert session is not None
    there.connect_soon()
    assert not there.connecting, "there is nothing to connect for"
    second, reason, upgrade = there._connect_shm()
    assert second is not None
    there._connected(second, None, reason, upgrade, None)
    assert there.session is session and not session.closed and second.closed
    assert client.put("k0", b"v") and client.get("k0") == b"v"
    session.give_up("by the test")
    third, reason, upgrade = there._connect_shm()
    there._connected(third, None, reason, upgrade, None)
    assert there.session is third and session.closed, "one that has broken is"
    assert client.put("k0", b"w") and client.get("k0") == b"w"


def test_issue_a_call_in_a_handler_misses_as_its_thread_starts_the_first_attempt() -> None:
    """It waited for the lock of the call that it had interrupted, for ever."""
    info = M.WorkerInfo(0, 0, 1, 0, 1 << 30, "n", "", "127.0.0.1", 1)
    target = Target(info, ClientContext(ClientOptions(namespace="n", deadline_s=0.05)))
    with target._lock:
        assert not target.ready() and target.arena() is None
    assert target.fresh and not target.connecting
    target.close()


class Ended:
    """A session, or a path, that is to be closed."""

    broken = True
    down_reason = "down"

    def __init__(self) -> None:
        self.closed = False

    def close(self, *, clean: bool = True) -> bool:
        self.closed = True
        return True


@pytest.mark.parametrize("how", ["lost", "tcp_lost", "close"])
def test_issue_what_an_interrupt_leaves_open_is_closed_by_the_next_call(how: str) -> None:
    """Ctrl-C between taking a session out of use and closing it: its grants stayed with the process."""
    info = M.WorkerInfo(0, 0, 1, 0, 1 << 30, "n", "", "127.0.0.1", 1)
    context = ClientContext(ClientOptions(namespace="n"))
    made: list[tuple[Target, list[Any]]] = []

    def call() -> None:
        target, parts = Target(info, context), [Ended(), Ended(), Ended()]
        target.session, target.tcp, target.rdma = parts  # type: ignore[assignment]
        made.append((target, parts))
        if how == "lost":
            target.lost("broken")
        elif how == "tcp_lost":
            target.tcp_lost(parts[1], "broken")  # type: ignore[arg-type]
        else:
            target.close()

    def check() -> None:
        if not made:
            return
        target, parts = made.pop()
        in_use: list[Any] = [target.session, target.tcp, target.rdma]
        target._close_left()  # as the background does at its next turn
        assert all(each.closed or each in in_use for each in parts)
        target.close()
        assert all(each.closed for each in parts)

    assert everywhere(call, check, ("simm.sdk.worker_path", "simm.sdk.path")) > 3


def test_issue_a_session_whose_close_is_interrupted_beside_another_is_closed_by_the_next_call() -> None:
    """The other thread, which had left it to the interrupted one, took it for closed."""
    info = M.WorkerInfo(0, 0, 1, 0, 1 << 30, "n", "", "127.0.0.1", 1)
    target = Target(info, ClientContext(ClientOptions(namespace="n")))
    session: Any = WorkerSession.__new__(WorkerSession)
    closed: list[bool] = []
    waits: list[float] = []

    def acquire(_blocking: bool, timeout: float = -1.0) -> bool:
        waits.append(timeout)
        if len(waits) == 1:  # Ctrl-C comes during this wait, and the background has its turn before
            background = threading.Thread(target=target._close_left)
            background.start()
            background.join(WAIT_S)
            raise KeyboardInterrupt
        return False

    session.lock, session.ring, session.deadline_s = SimpleNamespace(acquire=acquire), None, 1.0
    session.closed = session._ending = session._over = False
    session.channel = SimpleNamespace(broken="lost", close=lambda: closed.append(True))
    session.pool, session.copying, session.unpins = SimpleNamespace(clear=lambda: None), [], []
    session.welcome, session.session = SimpleNamespace(segment="none"), 1
    target.session = session
    with pytest.raises(KeyboardInterrupt):
        target.lost("broken")
    assert len(waits) == 1 and not closed and len(target._left) == 1
    target._close_left()  # as the background does at its next turn
    assert closed == [True] and not target._left
    assert session.close() and target.close() and closed == [True], "it has ended"
    session_module.RETIRED[:] = [old for old in session_module.RETIRED if old.segment != "none"]


class Upgraded(Target):
    """A session takes the place of TCP right after the first look at one of the two."""

    later: Any = None

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name in ("session", "tcp") and (later := self.later) is not None:
            self.later = None
            self.session, self.tcp = later, None
        return value


@pytest.mark.parametrize("look", ["path", "ready"])
def test_between_tcp_and_a_session_a_target_is_not_down(cluster: FakeCluster, look: str) -> None:
    client = full(cluster, "shm")
    there = client._routes.target(client.digest("k0"))
    assert there is not None
    there.session, there.later = None, there.session  # type: ignore[attr-defined]
    there.tcp = TcpPath(there._context, there.info.host, there.info.port)
    there.__class__ = Upgraded
    assert there.path == "shm" if look == "path" else there.ready()
    assert there.tcp is None and there.session is not None


def test_a_batch_that_finds_servers_connected_after_all(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread's call has connected to them between the batch's look and its attempt."""
    cluster.settled({node: [shard for shard in ALL if shard % 2 == node] for node in range(2)})
    client = cluster.client("shm")
    assert client.wait_ready(WAIT_S)
    router = client._router
    assert router is not None
    targets = list(router.targets.values())
    sessions = [there.session for there in targets]
    looked: list[Target] = []
    fresh = Target.fresh.fget  # type: ignore[attr-defined]

    def out_of_date(there: Target) -> bool:
        if there in looked:
            return bool(fresh(there))
        looked.append(there)
        return True

    monkeypatch.setattr(Target, "fresh", property(out_of_date))
    assert client.put_many(KEYS, [value_of(key) for key in KEYS]) == [True] * len(KEYS)
    assert len(looked) == 2
    wait_until(lambda: not any(there.connecting for there in targets), "no attempt")
    assert [there.session for there in targets] == sessions and not any(each.closed for each in sessions if each)


def test_pooled_connections_to_a_server_that_was_restarted_are_replaced_together(cluster: FakeCluster) -> None:
    client = full(cluster, "tcp")
    there = client._routes.target(client.digest("k0"))
    assert there is not None
    assert there.tcp is not None
    channels = [there.tcp.take(time.monotonic() + WAIT_S) for _ in range(5)]
    for channel in channels:
        there.tcp.give(channel)
        channel.sock.shutdown(socket.SHUT_RDWR)
    assert client.get("k0") == value_of("k0")
    assert client.put("k0", b"v")
    assert client.stats()["outages"] == 0


@pytest.fixture
def entered_by_all() -> Iterator[Path]:
    """A folder that all users may enter. ``tmp_path`` lies in folders of this user's own."""
    with tempfile.TemporaryDirectory(prefix="simm-test-", dir="/tmp") as name:
        os.chmod(name, 0o711)
        yield Path(name)


def test_a_refused_permission_is_no_missing_socket(cluster: FakeCluster, entered_by_all: Path) -> None:
    """The socket is there, in a folder that another user may not enter."""
    hidden = entered_by_all / "run"
    hidden.mkdir(mode=0)
    info = cluster.nodes[0].info._replace(uds=str(hidden / "s.sock"))
    target = Target(info, ClientContext(ClientOptions(namespace="n")))
    absent = Target(info._replace(uds=str(entered_by_all / "s.sock")), ClientContext(ClientOptions(namespace="n")))

    def reasons() -> bool:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setuid(65_534)
        refused, missing = target._connect_shm()[1], absent._connect_shm()[1]
        return f"uid {os.geteuid()} has no permission for {hidden}" in refused and "is not on this host" in missing

    assert forked(reasons) == 0


def test_a_worker_of_another_user_is_used_by_tcp_with_one_warning(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Positive control: a client that names the user maps the arena."""
    monkeypatch.setattr(session_module, "credentials", lambda _sock: (1, 4711, 4711))
    for named, path in (((), "tcp"), ((4711,), "shm")):
        caplog.clear()
        target = Target(cluster.nodes[0].info, ClientContext(ClientOptions(namespace="n", server_uids=named)))
        for _ in range(3):
            target._attempt()
        found = re.compile("not reached by shared memory.*is of uid 4711, which is neither").search
        said = list(filter(found, caplog.messages))
        assert (target.path, len(said), "SIMM_SERVER_UID" in target.reason) == (path, not named, not named)
        assert bool(target.reader) == bool(named)
        target.close()


@pytest.mark.full
def test_a_server_of_the_same_name_that_the_map_does_not_name_is_not_read(cluster: FakeCluster) -> None:
    """It is cut off from the manager, and another one has its name by now, with the same path on another host."""
    worker = cluster.nodes[0].worker
    settings = worker.worker.settings
    own = cluster.nodes[0].info.instance
    cluster.settled({0: ALL})
    with worker.frozen():
        worker.worker.settings = replace(settings, instance=own + 1)
    client = cluster.client("auto")
    assert client.wait_ready(WAIT_S) and client.put("k", b"value") and client.get("k") == b"value"
    (found,) = [each for each in client.stats()["workers"] if each["node"] == cluster.nodes[0].name]
    assert found["path"] == "tcp" and "another data server of this name" in str(found)
    with worker.frozen():
        worker.worker.settings = replace(settings, instance=own)
    wait_until(lambda: client.get("k") and client.stats()["workers"][0]["path"] == "shm", "it is the one of the map")


@pytest.mark.parametrize("status", [Status.NO_SPACE, Status.UNAVAILABLE, Status.UNAUTHORIZED])
def test_a_worker_that_had_no_room_for_a_session_is_tried_again(
    cluster: FakeCluster, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control is a refusal that stays one."""
    hello = Worker._hello
    refusals = 0

    def refuse(self: Worker, peer: Any, state: Any, request_id: int, msg: Any) -> bytes:
        nonlocal refusals
        if msg.role != M.Role.CLIENT or refusals:
            return hello(self, peer, state, request_id, msg)
        refusals += 1
        return reply(M.Error("not now"), request_id, status)

    monkeypatch.setattr(Worker, "_hello", refuse)
    clock = [1000.0]
    options = ClientOptions(namespace="n", deadline_s=WAIT_S, path="shm,tcp")
    there = Target(cluster.nodes[0].info, ClientContext(options, clock=lambda: clock[0]))
    try:
        assert there.ready() and there.path == "tcp" and refusals == 1
        assert not there.wants_connection(clock[0])
        clock[0] += worker_path.UPGRADE_S[1]
        assert there.wants_connection(clock[0]) is (status != Status.UNAUTHORIZED)
        if status != Status.UNAUTHORIZED:
            there.connect_soon()
            wait_until(lambda: there.path == "shm", "it has room by now")
    finally:
        there.close()

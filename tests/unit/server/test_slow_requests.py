"""``--slow-ms`` at a worker and a stream: what is logged, and that nothing is there without it."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator

import pytest

from simm.config import logs
from simm.config.live import LiveSettings
from simm.errors import TransportError
from simm.ipc.session import WorkerSession
from simm.ipc.tally import Served
from simm.server.operators.admin import follow_in_stream, follow_settings
from simm.server.requests import slow
from simm.tracing.context import context
from simm.tracing.slow import SlowLog
from simm.wire import messages as M
from simm.wire.epoch_messages import for_namespace
from simm.wire.hello import client_hello
from tests.support.fake_cluster import ALL, FakeCluster, Node
from tests.support.waiting import WAIT_S, wait_until

#: What a data server can change while it runs (``simm/dataserver.py``).
LIVE = {
    "log_level": "info", "poll_us": 50, "slow_ms": 0, "policy": "lru", "keep_share": 25, "keep_namespace_share": 12,
    "near_share": 10,
}  # fmt: skip


@pytest.fixture
def live() -> Iterator[LiveSettings]:
    before = list(logs._HOOKS)
    yield LiveSettings(LIVE)
    logs._HOOKS[:] = before
    slow.watch_stream(0)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCluster]:
    monkeypatch.setattr(slow, "SLOW", SlowLog())
    with FakeCluster(1) as running:
        running.settled({0: ALL})
        yield running


def use(cluster: FakeCluster) -> None:
    """Put and get by both paths, and by a message that is no COMMIT of one key."""
    for path in ("shm", "tcp"):
        with contextlib.closing(cluster.client(path)) as client:
            assert client.put("k", b"v") and client.get("k") == b"v" and client.exists_many(["k"]) == [True]
            assert client.delete("k") and client.put_many(["a", "b"], [b"1", b"2"]) == [True, True]


def switch(live: LiveSettings, value: str) -> None:
    live.set("slow_ms", value)
    logs.reopen_logs()


def test_nothing_is_there_until_it_is_wanted(
    cluster: FakeCluster, live: LiveSettings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    node = cluster.nodes[0]
    worker = node.worker.worker
    with node.worker.frozen():
        follow_settings(live, worker)
    follow_in_stream(live)
    names = {"handle", "_commit_one"}
    plain = worker.rings._handle, worker.rings._commit_one, Served._timed
    assert not names & vars(worker).keys() and plain[:2] == (worker.handle, worker._commit_one)
    use(cluster)
    with node.worker.frozen():
        switch(live, "1")
    assert names <= vars(worker).keys()
    now = [0]

    def clock() -> int:
        now[0] += 2_000_000  # each look at the clock is 2 ms after the one before
        return now[0]

    monkeypatch.setattr(slow, "_ns", clock)
    use(cluster)
    with node.worker.frozen():
        switch(live, "0")
    assert not names & vars(worker).keys()
    assert (worker.rings._handle, worker.rings._commit_one, Served._timed) == plain
    lines = [record.getMessage() for record in caplog.records if record.name == "simm.slow"]
    assert any(line.startswith("slow: a worker's Commit took 2.000 ms") for line in lines)
    assert any("a worker's Hello took" in line for line in lines)
    caplog.clear()
    use(cluster)
    assert not [record for record in caplog.records if record.name == "simm.slow"]


@pytest.fixture
def node(cluster: FakeCluster, live: LiveSettings, monkeypatch: pytest.MonkeyPatch) -> Node:
    """A node whose worker logs all requests, as each takes 2 ms."""
    node = cluster.nodes[0]
    with node.worker.frozen():
        follow_settings(live, node.worker.worker)
        switch(live, "1")
    now = itertools.count(0, 2_000_000)
    monkeypatch.setattr(slow, "_ns", lambda: next(now))
    return node


def test_a_line_names_the_session_and_the_trace(
    cluster: FakeCluster, node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    with contextlib.closing(cluster.client("shm", trace=0)) as client, context(f"00-{'ab' * 16}-{'cd' * 8}-01"):
        assert client.put("k", b"v")
        sessions = {f"{session:#x}" for session in node.worker.worker.peers}
    commits = [record for record in caplog.records if "a worker's Commit took" in record.getMessage()]
    about = [(each.__dict__.get("session"), each.__dict__.get("trace_id")) for each in commits]
    assert about and {session for session, _ in about} <= sessions and ("ab" * 16) in {trace for _, trace in about}


def test_a_line_names_what_a_stream_asks_for_a_bound_client(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    with contextlib.closing(WorkerSession(node.worker.path, "default", WAIT_S, role=M.Role.STREAM)) as session:
        session.exchange(for_namespace("red", M.Delete([bytes(range(16))])))
    wait_until(lambda: "a worker's Delete took" in caplog.text, "its line")


def test_a_streams_line_names_the_trace(
    cluster: FakeCluster, live: LiveSettings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    follow_in_stream(live)
    switch(live, "1")
    now = itertools.count(1 << 62, 2_000_000)
    monkeypatch.setattr(slow, "_ns", lambda: next(now))
    monkeypatch.setattr(slow, "SLOW", SlowLog(lambda: float(next(now))))  # no limit
    with contextlib.closing(cluster.client("tcp", trace=0)) as client:
        with context(f"00-{'ab' * 16}-{'cd' * 8}-01"):
            assert client.put("k", b"v") and client.get("k") == b"v" and client.exists("k") and client.delete("k")
        assert client.get("k") is None

    def lines() -> list[tuple[str, str | None]]:
        found = [each for each in caplog.records if "a stream's" in each.getMessage()]
        return [(each.getMessage().split()[3], each.__dict__.get("trace_id")) for each in found]

    mine = "ab" * 16
    wanted = [("put", mine), ("get", mine), ("exists_many", mine), ("delete", mine), ("get", None)]
    wait_until(lambda: len(lines()) == len(wanted), "a line of each call")
    assert lines() == wanted


def test_what_a_client_causes_is_logged_with_its_session(
    cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    worker = cluster.nodes[0].worker.worker
    with contextlib.closing(cluster.client("shm")) as client:
        assert client.put("k", b"v")
        (session,) = {target.session for target in client._routes.route if target is not None and target.session}
        with contextlib.suppress(TransportError):
            session.channel.call(client_hello(M.Role.CLIENT, namespace="default"))  # a second one
        wait_until(lambda: "a second HELLO" in caplog.text, "the worker closes the connection")
    (line,) = [record for record in caplog.records if "a second HELLO" in record.getMessage()]
    assert line.name == "simm.net.loop" and line.__dict__["session"] == f"{session.session:#x}"
    assert worker.loop.protocol_errors == 1


def test_a_request_that_is_fast_enough_is_not_logged(
    cluster: FakeCluster, live: LiveSettings, caplog: pytest.LogCaptureFixture
) -> None:
    with cluster.nodes[0].worker.frozen():
        follow_settings(live, cluster.nodes[0].worker.worker)
        switch(live, "1h")
    follow_in_stream(live)
    use(cluster)
    assert not [record for record in caplog.records if record.name == "simm.slow"]


def test_a_stream_names_what_was_slow(
    live: LiveSettings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(slow, "SLOW", SlowLog())
    live.set("slow_ms", "1")
    follow_in_stream(live)
    served = Served()
    served.fetched("n", [0], 0, 5, time.perf_counter_ns() - 5_000_000, False)
    served.fetched("n", [0], 0, 5, time.perf_counter_ns() + 10_000_000_000, False)
    assert [record.getMessage().split(" took ")[0] for record in caplog.records] == ["slow: a stream's get"]
    assert sum(served.latencies["get"][1:]) == 2, "both are counted"

"""Until when a client may write: commits, connections that end, workers and endpoints that die."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from simm.errors import NotSentError, TransportError
from simm.ipc.session import WorkerSession
from simm.rdma.api import FabricError
from simm.server import rdma_endpoint
from simm.server.rdma_lease import RdmaLease
from simm.wire import messages as M
from simm.wire import rdma_messages as R
from simm.wire.messages import Status
from tests.support import endpoint_thread
from tests.support.endpoint_checks import OK, digest_of, gone, granted, hold_writes, queue_pairs_of, stored, worker_dies
from tests.support.endpoint_thread import WAIT_S, EndpointThread, RawConnection, connection
from tests.support.fake_fabric import FakeNetwork, all_closed
from tests.support.waiting import wait_until
from tests.support.worker_thread import WorkerThread, nothing_is_lost

# --- fences ----------------------------------------------------------------------------------------


def test_what_is_committed_is_written_no_more(worker: WorkerThread) -> None:
    """A client commits with a WRITE still in flight: the WRITE lands before the value is published, or never."""
    outcomes = set()
    for seed in range(12):
        network = FakeNetwork(seed, background=True)
        with EndpointThread(worker.path, network) as server:
            server.ready()
            mine = RawConnection(server)
            (grant,) = mine.grant(4096)
            mine.write(grant, b"a" * 4096)
            hold_writes(network)
            mine.post_write(grant, b"b" * 4096)
            time.sleep(0.002)
            key = f"late{seed}"
            try:
                statuses, _ = mine.commit((digest_of(key), grant, 4096))
                assert statuses == [OK]
            except TransportError:
                statuses = []  # the refused WRITE broke the queue pair and the connection: nothing was committed
            seen = stored(worker, key)
            assert (seen is not None) == bool(statuses)
            outcomes.add(seen)
            network.release()
            network.run()
            assert stored(worker, key) == seen, "a published value was written to"
            mine.close()
            server.until(lambda stats: not stats["rdma_connections"], "the connection is closed")
            assert granted(worker) == 0
        all_closed(network)
    assert len(outcomes) > 1, "every seed the same: nothing was under way"


def test_mutation_without_the_fence_a_published_value_is_written_to(
    worker: WorkerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RdmaLease, "fence", lambda self, leased_grants: None)
    monkeypatch.setattr(endpoint_thread, "check", lambda _: None)
    with pytest.raises(AssertionError, match="a published value was written to"):
        test_what_is_committed_is_written_no_more(worker)


def late_write(worker: WorkerThread, network: FakeNetwork, hang_up: Callable[[RawConnection], object]) -> None:
    """End a connection with WRITEs in flight, grant its chunk to another client that fills it, and let them arrive."""
    with EndpointThread(worker.path, network) as server, connection(server.ready()) as mine:
        (grant,) = mine.grant(300_000)
        mine.write(grant, b"a" * 300_000)
        hold_writes(network)
        mine.post_write(grant, b"b" * 300_000)
        hang_up(mine)
        server.until(lambda stats: not stats["rdma_connections"], "the connection is closed")
        wait_until(lambda: granted(worker) == 0, "its grants are back")
        session = worker.session(ring=False)
        others: list[tuple[int, int, int]] = []
        while grant.offset not in {other[1] for other in others}:
            session.ask([(300_000, 1)])
            other = session.pool.take(300_000)
            assert other is not None, "the chunk is never given again"
            others.append(other)
        number, offset, chunk = others[-1]
        start = offset - session.reader.data_offset
        session.reader.data[start : start + chunk] = b"c" * chunk
        assert session.commit_one(digest_of("c"), number, 300_000, 0, 0, 300_000, 0) == OK
        network.release()
        network.run()
        seen = stored(worker, "c")
        session.close()
        assert seen == b"c" * 300_000, "a late WRITE landed in a chunk that is somebody else's"


ENDS: dict[str, Callable[[RawConnection], object]] = {
    "hangs up": lambda connection: connection.hang_up(),
    "nonsense": lambda connection: connection.channel.send_raw(b"nonsense" * 8),
    "queue pair breaks": lambda connection: connection.fabric.network.kill(connection.fabric.fakes[0].queue_pairs[0]),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_connection_that_ends_in_the_middle(end: str, worker: WorkerThread, network: FakeNetwork) -> None:
    late_write(worker, network, ENDS[end])


def test_mutation_links_that_outlive_their_connection_write_into_others_chunks(
    worker: WorkerThread, network: FakeNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    def careless(connection: RdmaLease) -> list[Any]:
        connection.closed, connection.queue_pairs = True, []
        leased = list(connection.leased_grants())
        connection.grants, connection.prepared, connection.granted_bytes = {}, [], 0
        return leased

    monkeypatch.setattr(RdmaLease, "close", careless)
    monkeypatch.setattr(endpoint_thread, "check", lambda _: None)
    with pytest.raises(AssertionError, match="somebody else's"):
        late_write(worker, network, ENDS["hangs up"])


def test_a_link_that_cannot_be_destroyed_ends_the_endpoint(
    worker: WorkerThread, network: FakeNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    with EndpointThread(worker.path, network) as server:
        server.ready()
        mine = RawConnection(server)
        mine.grant(4096)
        before = granted(worker)
        (qp,) = queue_pairs_of(server)

        def stuck() -> None:
            raise FabricError("device or resource busy")

        with monkeypatch.context() as patch:
            patch.setattr(qp, "close", stuck)
            mine.hang_up()
            server.thread.join(WAIT_S)
            assert not server.thread.is_alive() and "busy" in server.endpoint.failed
        assert granted(worker) == before, "the chunk is not reused while the process lives"
        mine.close()
        for fabric in server.fabrics:  # what the kernel does when the process ends
            fabric.close()
        for peer in list(server.loop.peers):
            peer.sock.close()
        server.endpoint.keeper.close()
        server.listener.close()


def test_a_worker_is_replaced_while_connections_hold_grants(worker: WorkerThread, network: FakeNetwork) -> None:
    worker_dies(worker, network)


def test_mutation_grants_that_are_not_counted_are_given_away_by_the_next_worker(
    worker: WorkerThread, network: FakeNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WorkerSession, "begin_copy", lambda self: None)
    monkeypatch.setattr(WorkerSession, "end_copy", lambda self: None)
    monkeypatch.setattr(endpoint_thread, "check", lambda _: None)
    with pytest.raises(AssertionError, match="may write into"):
        worker_dies(worker, network)


def test_the_endpoint_stops(worker: WorkerThread, network: FakeNetwork) -> None:
    with EndpointThread(worker.path, network) as server:
        server.ready()
        with connection(server) as mine, connection(server) as other:
            mine.grant(4096, 3)
            other.grant(64)
            server.stop()
            assert not queue_pairs_of(server) and granted(worker) == 0
            gone(mine)
            with pytest.raises(FabricError):
                mine.read(0, 8)


def test_without_windows_all_data_is_writable(worker: WorkerThread) -> None:
    for number, windows in ((1 << 16, False), (0, True)):
        network = FakeNetwork(1, windows=number, background=True)
        with EndpointThread(worker.path, network, windows=windows) as server, connection(server.ready()) as mine:
            assert mine.opened.flags == 0 and not server.stats()["protected"]
            (grant,) = mine.grant(5000)
            assert grant.keys == []
            mine.write(grant, b"w" * 5000)
            assert mine.commit((digest_of("w"), grant, 5000), wants=[(5000, 1)])[0] == [OK]
            assert stored(worker, "w") == b"w" * 5000
            assert mine.region(0, grant.offset).flags == R.REGION_WRITABLE
            assert mine.region(0, 0).flags == 0
        all_closed(network)


@pytest.mark.parametrize("windows", [True, False])
def test_issue_grants_of_a_session_that_has_ended_are_taken_back(
    worker: WorkerThread, network: FakeNetwork, windows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that the session had was quarantined as long as one client kept one grant.

    Without windows only the end of its queue pairs keeps a client from writing there.
    """
    monkeypatch.setattr(rdma_endpoint, "FORMER_S", 0.3)
    with EndpointThread(worker.path, network, windows=windows) as server:
        server.ready()
        client = RawConnection(server)
        grant = client.grant(100)[0]
        old = server.endpoint.keeper.session
        assert old is not None
        worker.die()
        worker.start()

        def released() -> bool:
            with worker.frozen() as store:
                return old.session not in store.sessions.by_id

        wait_until(released, "the former session is released")
        assert not old.copying
        if windows:
            commit = M.Commit([(digest_of("key"), grant.number, 100, 0, 0, 0)], [])
            assert client.channel.call(commit).statuses == [Status.STALE_GRANT]
            assert client.grant(100), "the connection goes on"
        else:
            server.until(lambda stats: not stats["rdma_connections"], "it is closed")
        client.close()


def test_issue_a_worker_that_is_late_with_returned_grants_keeps_its_session(
    server: EndpointThread, worker: WorkerThread
) -> None:
    """The wait for the answer is short. It must not be the next exchange's."""
    one, other = RawConnection(server), RawConnection(server)
    one.grant(4096)
    session = server.endpoint.keeper.session
    assert session is not None
    with worker.frozen():
        one.close()
        server.until(lambda stats: stats["rdma_connections"] == 1, "it is closed")
        asked = other.channel.submit(M.Grant([(4096, 1)]))
        time.sleep(0.1)
    assert other.take(other.channel.result(other.channel.wait(asked)))
    assert server.endpoint.keeper.session is session and not session.broken
    other.close()


@pytest.mark.parametrize("kind", [M.Commit, M.ReturnGrants])
def test_grants_are_not_lost_where_the_worker_cannot_be_asked_just_now(
    server: EndpointThread, worker: WorkerThread, monkeypatch: pytest.MonkeyPatch, kind: type[Any]
) -> None:
    client = RawConnection(server)
    grants = client.grant(4096, 2)
    session = server.endpoint.keeper.session
    assert session is not None
    refused: list[str] = []
    submit = WorkerSession.submit

    def submitted(self: WorkerSession, msg: Any) -> int:
        if isinstance(msg, kind) and self is session:
            refused.append(type(msg).__name__)
            raise NotSentError("by the test")
        return submit(self, msg)

    monkeypatch.setattr(WorkerSession, "submit", submitted)
    for grant in grants:
        client.write(grant, bytes(4096))
    if kind is M.Commit:
        statuses, _ = client.commit(*((digest_of(f"k{each.number}"), each, 4096) for each in grants))
        assert statuses == [Status.UNAVAILABLE] * 2
    client.close()
    server.until(lambda stats: not stats["rdma_connections"], "it is closed")
    assert refused
    server.do(lambda: nothing_is_lost(worker, session))

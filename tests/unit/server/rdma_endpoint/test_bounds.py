"""Bounds on what the connections of an RDMA endpoint hold, and grants that it returns."""

from __future__ import annotations

import socket
import time

import pytest

from simm.constants import VALUE_BYTES_MAX
from simm.errors import TransportError
from simm.ipc.session import WorkerSession
from simm.net.peer import STALL_S
from simm.rdma.api import QueuePairAddress
from simm.rpc import encode
from simm.server import rdma_endpoint as endpoint_module
from simm.server import rdma_lease as lease_module
from simm.server.rdma_endpoint import Endpoint
from simm.server.rdma_lease import QUEUE_PAIRS_MAX, RdmaLease
from simm.wire import messages as M
from simm.wire import rdma_messages as R
from simm.wire.messages import Status
from tests.support.endpoint_checks import OK, digest_of, granted
from tests.support.endpoint_thread import EndpointThread, RawConnection, connection, refusal
from tests.support.fake_fabric import FakeNetwork
from tests.support.fake_queue_pair import FakeQueuePair
from tests.support.waiting import wait_until
from tests.support.worker_thread import WorkerThread

# --- bounds ----------------------------------------------------------------------------------------


def test_grants_are_bounded_for_a_connection_and_for_all(network: FakeNetwork) -> None:
    with WorkerThread(64 << 20) as worker, EndpointThread(worker.path, network) as server:
        server.ready()
        most = worker.store.sessions.granted_bytes_max
        total = most * endpoint_module.GRANTED_PERCENT // 100
        connections = [RawConnection(server) for _ in range(6)]
        leased = []
        for mine in connections:
            answer = mine.channel.submit(M.Grant([(64 << 10, 4000)]))
            frame = mine.channel.wait(answer)
            assert frame.status == Status.NO_SPACE
            leased.append(mine.take(mine.channel.result(frame)))
            assert leased[-1], "a connection that has none gets one at least"
            assert sum(grant.chunk for grant in leased[-1]) <= total // endpoint_module.LEASE_SHARE
        stats = server.stats()
        assert stats["granted_bytes"] <= total + 2 * (64 << 10) and granted(worker) <= most
        assert sum(map(len, leased[:4])) > sum(map(len, leased[4:]))
        assert len(connections[0].grant(64)) == 0, "it holds its share"
        #: Those that have most were asked for some.
        connections[0].channel.call(M.Ping(1))
        assert any(isinstance(push, M.Recall) and push.bytes > 0 for push in connections[0].pushes)
        assert connections[0].return_grants(*leased[0]) == len(leased[0])
        assert len(connections[5].grant(64 << 10, 3)) == 3, "room again"
        for mine in connections:
            mine.close()


def test_a_connection_at_its_bound_gets_no_more_for_what_others_do_not_use(network: FakeNetwork) -> None:
    with WorkerThread(64 << 20) as worker, EndpointThread(worker.path, network) as server:
        total = worker.store.sessions.granted_bytes_max * endpoint_module.GRANTED_PERCENT // 100
        with connection(server.ready()) as mine, connection(server) as other:
            leased = mine.grant(64 << 10, 4000)
            for turn in range(20):
                (one,) = other.grant(4096)
                other.write(one, b"1" * 4096)
                for wants in ([(4096, 4)], []):  # leaves some in the endpoint's pool
                    other.return_grants(*other.commit((digest_of(str(turn)), one, 4096), wants=wants)[1])
                leased += mine.grant(64 << 10)
            assert sum(grant.chunk for grant in leased) <= total // endpoint_module.LEASE_SHARE
            session = server.endpoint.keeper.session
            assert session is not None and any(session.pool.stocks.values()), "nor are theirs given back for it"


def test_what_is_prepared_is_told_when_there_is_no_room_for_more(network: FakeNetwork) -> None:
    with (
        WorkerThread(16 << 20) as worker,
        EndpointThread(worker.path, network) as server,
        connection(server.ready()) as mine,
    ):
        one, *_held = mine.grant(64 << 10, 4)
        mine.write(one, b"1" * 4096)
        assert mine.commit((digest_of("k"), one, 4096), wants=[(64 << 10, 8)])[0] == [OK]
        (prepared,) = server.do(lambda: [len(peer.context.prepared) for peer in server.endpoint.leases])
        assert prepared > 1
        greedy = worker.session(ring=False)
        before = -1
        while len(greedy.pool.stock(64 << 10)) > before:
            before = len(greedy.pool.stock(64 << 10))
            greedy.ask([(64 << 10, 1)])
        assert len(mine.grant(64 << 10, 8)) == prepared, "and not given back for one of their kind"
        greedy.close()


def test_idle_connections_are_asked_for_their_grants(server: EndpointThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "IDLE_S", 1e6)
    with connection(server) as mine:
        (one,) = mine.grant(4096)
        mine.write(one, b"1" * 4096)
        mine.commit((digest_of("1"), one, 4096), wants=[(4096, 3)])
        assert server.stats()["granted_bytes"] == 3 * 4096
        monkeypatch.setattr(endpoint_module, "IDLE_S", 0.2)
        server.until(lambda stats: stats["granted_bytes"] == 0, "what the client was not told of is taken back")
        assert not mine.pushes
        (two,) = mine.grant(4096)
        server.until(lambda stats: stats["recalls"] == 1, "it is asked for what it knows of")
        time.sleep(0.4)
        assert server.stats()["recalls"] == 1, "once"
        mine.channel.poll_pushes()
        assert mine.pushes == [M.Recall(4096)]
        assert mine.return_grants(two) == 1


def test_what_is_kept_for_clients_goes_back_when_none_asks(
    server: EndpointThread, worker: WorkerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_module, "IDLE_S", 1e6)
    near, far = socket.socketpair()
    server.do(lambda: server.endpoint.adopt_supervisor(far))
    with connection(server) as mine:
        for number in range(3):
            one = mine.grant(4096)[0]
            mine.write(one, b"1" * 4096)
            mine.commit((digest_of(str(number)), one, 4096), wants=[(4096, 5)])
        assert granted(worker) > 5 * 4096, "more than the connection has"
    monkeypatch.setattr(endpoint_module, "IDLE_S", 0.2)

    def asked() -> bool:
        near.sendall(encode(M.Stats(0), 1))  # as a supervisor does all the time
        assert near.recv(1 << 16)
        return granted(worker) == 0

    wait_until(asked, "nobody keeps a grant")
    server.stop()
    near.close()


def test_the_workers_recall_goes_on_to_connections(server: EndpointThread, worker: WorkerThread) -> None:
    with connection(server) as mine:
        mine.grant(4096, 4)
        with worker.frozen() as store:
            (session,) = [each for each in store.sessions.by_id.values() if each.granted_bytes]
            worker.worker._recall(session, 8192)
        server.until(lambda stats: stats["recalls"], "the recall is passed on")
        mine.channel.call(M.Ping(1))
        assert mine.pushes == [M.Recall(8192)]


def test_issue_a_request_that_comes_short_asks_each_other_connection_once(
    server: EndpointThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its wants had asked all others, and nobody else was served meanwhile."""
    monkeypatch.setattr(endpoint_module, "IDLE_S", 1e6)
    monkeypatch.setattr(endpoint_module, "RECALL_AGAIN_MS", 1e9)
    tried = []
    real = Endpoint._room

    def room(self: Endpoint, lease: RdmaLease, session: WorkerSession, chunk: int) -> int:
        tried.append(chunk)
        return real(self, lease, session, chunk)

    with connection(server) as mine, connection(server) as one, connection(server) as another:
        for each in (mine, one, another):
            each.grant(4096)
        monkeypatch.setattr(Endpoint, "_room", room)
        ask = M.Grant([(VALUE_BYTES_MAX, 1)] * 4000 + [(4096, 1)])

        def asked() -> int:
            frame = mine.channel.wait(mine.channel.submit(ask))
            assert frame.status == Status.NO_SPACE
            assert len(mine.take(mine.channel.result(frame))) == 1, "there is room for a small one"
            recalls: int = server.stats()["recalls"]
            return recalls

        assert asked() == 2 and len(tried) < 10
        assert asked() == 2, "nor is any asked again at once"
        monkeypatch.setattr(endpoint_module, "RECALL_AGAIN_MS", 0)
        assert asked() == 4, "control"
        for each in (one, another):
            each.channel.call(M.Ping(1))
            assert each.pushes == [M.Recall(4096)] * 2


def test_links_are_bounded(server: EndpointThread) -> None:
    with connection(server) as mine:
        for _ in range(QUEUE_PAIRS_MAX - 1):
            answer = mine.connect(0, 0)
            assert mine.channel.call(R.RdmaDisconnect(answer.link)).items == 1
        with pytest.raises(TransportError, match="queue pairs"):
            mine.connect(0, 0)


def test_links_are_bounded_also_where_none_is_made(server: EndpointThread) -> None:
    with connection(server) as mine:
        bad = R.RdmaConnect(0, 0, b"\xff" * 16, 1, 1, 4096, 1)
        for _ in range(QUEUE_PAIRS_MAX - 1):
            assert refusal(lambda: mine.channel.call(bad)).status == Status.UNAVAILABLE
        with pytest.raises(TransportError, match="queue pairs"):
            mine.channel.call(bad)


def test_a_client_that_nobody_answers_for_holds_up_nobody(
    server: EndpointThread, network: FakeNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connecting to such an end would wait, and the endpoint's only thread with it."""
    met: list[bytes] = []
    real = FakeQueuePair.connect

    def connect(self: FakeQueuePair, peer: QueuePairAddress) -> None:
        if peer.gid in network.silent:
            met.append(peer.gid)
        real(self, peer)

    monkeypatch.setattr(FakeQueuePair, "connect", connect)
    monkeypatch.setattr(lease_module, "ARP_ANSWER_S", 1e6)
    with connection(server) as mine, connection(server) as other:
        own = mine.fabric.rails[0]
        network.silent = {own.gid}
        ours = own.queue_pair().address()
        ask = R.RdmaConnect(0, ours.lid, ours.gid, ours.qpn, ours.psn, ours.mtu, ours.reads)
        late = [mine.channel.submit(ask), mine.channel.submit(ask)]
        assert isinstance(other.channel.call(M.Ping(1)), M.Pong)
        assert isinstance(mine.channel.call(M.Ping(2)), M.Pong)
        (lease,) = (peer.context for peer in server.endpoint.leases if peer.context.connects)
        assert len(lease.connects) == 2 and not met, "one after the other"
        network.silent = set()
        links = [mine.channel.result(mine.channel.wait(number)).link for number in late]
        assert links == [1, 2]
        elsewhere = bytes(10) + b"\xff\xff" + bytes(4)
        network.silent = {own.gid, elsewhere}
        monkeypatch.setattr(lease_module, "ARP_ANSWER_S", 0.0)
        monkeypatch.setattr(lease_module, "SILENT_S", 1e6)
        for _ in range(2):
            refused = refusal(lambda: mine.channel.call(ask))
            assert refused.status == Status.UNAVAILABLE and "nobody answers for" in str(refused)
            monkeypatch.setattr(lease_module, "ARP_ANSWER_S", 1e6)  # which the second one does not wait for
        mine.channel.submit(ask._replace(gid=elsewhere))
        mine.hang_up()
        server.until(lambda stats: stats["rdma_connections"] == 1, "one that hangs up meanwhile is forgotten")
        assert not met


def test_a_client_that_vanishes_is_found(server: EndpointThread) -> None:
    channel = server.channel()
    (peer,) = server.do(lambda: list(server.loop.peers))
    assert peer.sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert peer.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= STALL_S
    assert peer.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= STALL_S * 1000
    channel.close()

"""Values of namespaces for which an arena has no place: no tenant's, and refused where nothing would bound them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from simm.arena.hashing import Hasher
from simm.arena.layout import NAMESPACES
from simm.config.tokens import Token, TokenRole
from simm.constants import DEFAULT_NAMESPACE, OTHERS_NAMESPACE
from simm.errors import CapacityError
from simm.net.channel import Channel, Refused, greet
from simm.server.migration_peers import TargetWorker
from simm.wire import messages as M
from simm.wire.hello import client_hello
from simm.wire.messages import Role, Service, Status
from tests.support.endpoint_thread import EndpointThread, connection
from tests.support.fake_fabric import FakeNetwork
from tests.support.worker_thread import StreamThread, WorkerThread

FREE = Token("the-token-of-all-engines", TokenRole.CLIENT, "engines")
TENANT = Token("the-token-of-a-tenant", TokenRole.CLIENT, "tenant", {DEFAULT_NAMESPACE: None})
LATE = Token("the-token-of-who-came-late", TokenRole.CLIENT, "late", {"late": None})
TOKENS = (FREE, TENANT, LATE)


@pytest.fixture
def worker() -> Iterator[WorkerThread]:
    """Of its arena's places all are kept for names, as where a token file has so many."""
    with WorkerThread() as made:
        with made.frozen() as store:
            names = [DEFAULT_NAMESPACE, *(f"name {number}" for number in range(NAMESPACES - 2))]
            assert store.ledger.namespaces.keep(names) == []
            with pytest.raises(CapacityError):
                store.ledger.namespaces.number("one more")
        yield made


def client(stream: StreamThread, token: Token, namespace: str) -> Channel:
    channel = stream.channel(hello=False)
    greet(channel, Service.STREAM, client_hello(Role.CLIENT, namespace=namespace), token.secret)
    return channel


def put(channel: Channel, digest: bytes) -> int:
    number = channel.submit(M.Store([(digest, 5, 0, 0, 0)]))
    channel.sock.sendall(b"value")
    (status,) = channel.result(channel.wait(number)).statuses
    return int(status)


def fetched(channel: Channel, digest: bytes) -> int:
    """Return the status of a look at a value, of which no byte is sent."""
    number = channel.submit(M.Fetch([(digest, 0)]))
    entries = channel.result(channel.wait(number)).entries
    channel.result(channel.wait(number))
    return int(entries[0][0])


def statuses(channel: Channel, digest: bytes) -> list[int]:
    deleted: Sequence[int] = channel.call(M.Delete([digest])).statuses
    found: Sequence[int] = channel.call(M.Exists([digest])).statuses
    pinned: int = channel.call(M.Pin(0, [digest])).entries[0][0]
    return [fetched(channel, digest), *deleted, *found, pinned]


def namespace_of(worker: WorkerThread, digest: bytes) -> str:
    with worker.frozen() as store:
        return store.ledger.names[store.table.entry(store.table.lookup(digest)).namespace]


def test_issue_a_tenant_of_default_reaches_no_value_of_a_name_without_a_place(worker: WorkerThread) -> None:
    """Such values were those of the namespace "default", to which a token may be bound."""
    digest = Hasher("team-x")("key")
    with StreamThread(worker.path, tokens=TOKENS) as stream:
        team, tenant, late = (
            client(stream, token, name)
            for token, name in ((FREE, "team-x"), (TENANT, DEFAULT_NAMESPACE), (LATE, "late"))
        )
        assert put(team, digest) == Status.OK and namespace_of(worker, digest) == OTHERS_NAMESPACE
        assert statuses(tenant, digest) == [Status.NOT_FOUND] * 4
        assert fetched(team, digest) == Status.TOO_LARGE, "it is there for whoever is bound to nothing"
        assert put(late, Hasher("late")("key")) == Status.NO_SPACE, "who is bound to a name has that one or none"
        with worker.frozen() as store:
            store.stale.take({"name 0": 5})
        assert put(team, Hasher("team-x")("another")) == Status.NO_SPACE, "advances could not reach it"
        for channel in (team, tenant, late):
            channel.close()


def test_issue_a_name_with_a_quota_and_without_a_place_stores_nothing(worker: WorkerThread) -> None:
    """Its values were counted for nobody."""
    with worker.frozen() as store:
        store.set_quotas({"team-x": 1 << 30})
    with StreamThread(worker.path, tokens=TOKENS) as stream:
        team, free = client(stream, FREE, "team-x"), client(stream, FREE, "team-y")
        assert put(team, Hasher("team-x")("key")) == Status.OVER_QUOTA
        assert put(free, Hasher("team-y")("key")) == Status.OK
        team.close()
        free.close()


def test_by_rdma_they_go_the_same_way(worker: WorkerThread) -> None:
    digest = Hasher("team-x")("key")
    with EndpointThread(worker.path, FakeNetwork(1)) as server, connection(server.ready()) as mine:
        server.do(lambda: setattr(next(iter(server.endpoint.leases)).context, "namespace", "team-x"))
        first, second = mine.grant(64, 2)
        mine.write(first, bytes(64))
        assert mine.commit((digest, first, 64))[0] == [Status.OK]
        assert namespace_of(worker, digest) == OTHERS_NAMESPACE
        with worker.frozen() as store:
            store.stale.take({"name 0": 5})
        mine.write(second, bytes(64))
        assert mine.commit((Hasher("team-x")("another"), second, 64))[0] == [Status.NO_SPACE]


def test_movers_bring_them_and_no_client_names_them(worker: WorkerThread) -> None:
    target = TargetWorker(worker.path)
    with target.session(OTHERS_NAMESPACE) as session, worker.frozen() as store:
        assert store.ledger.names[session.reader.namespace] == OTHERS_NAMESPACE
    target.close()
    with pytest.raises(Refused, match="stands for several") as caught:
        worker.hello(namespace=OTHERS_NAMESPACE)
    assert caught.value.status == Status.BAD_REQUEST
    with StreamThread(worker.path) as stream, pytest.raises(Refused, match="stands for several"):
        stream.channel(namespace=OTHERS_NAMESPACE)
    with EndpointThread(worker.path, FakeNetwork(1)) as server:
        channel = server.channel(hello=False)
        with pytest.raises(Refused, match="stands for several") as caught:
            greet(channel, Service.ENDPOINT, client_hello(Role.CLIENT, namespace=OTHERS_NAMESPACE), "")
        assert caught.value.status == Status.BAD_REQUEST
        channel.close()

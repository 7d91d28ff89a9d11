"""What releases pins: all handles, by one deadline for all servers, and connections that are used again."""

from __future__ import annotations

import gc
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from simm.sdk.ops.remote_pins import RemotePins
from simm.sdk.tcp import TcpPath
from simm.testing import FakeClient
from simm.wire import messages as M
from tests.support.cluster_clients import KEYS, full, value_of
from tests.support.fake_cluster import ALL, FakeCluster
from tests.support.iterated import AddedTo, Interrupting, ends
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("nothing_retired")


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(2) as made:
        yield made


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Has an item for each connection that is made."""
    made: list[float] = []
    make = TcpPath._make

    def counted(self: TcpPath, until: float) -> Any:
        made.append(until)
        return make(self, until)

    monkeypatch.setattr(TcpPath, "_make", counted)
    return made


def test_a_pin_that_finds_nothing_keeps_its_connection(cluster: FakeCluster, connections: list[float]) -> None:
    client = full(cluster, "tcp")
    client.pin(["absent"]).release()
    before = len(connections)
    for _ in range(5):
        assert client.pin(["absent", "absent too"]).lengths == [None, None]
    assert len(connections) == before


def test_issue_a_pin_by_a_connection_that_the_server_has_closed_is_made_by_another(cluster: FakeCluster) -> None:
    """Its streams have restarted. Each idle connection cost a pin, and the path."""
    client = full(cluster, "tcp")
    target = client._routes.target(client.digest("k0"))
    assert target is not None
    path = target.tcp
    assert path is not None
    held = [client.pin(KEYS) for _ in range(3)]  # a connection each
    for each in held:
        each.release()
    stale = list(path._idle)
    assert len(stale) > 2
    for channel in stale:
        channel.sock.shutdown(socket.SHUT_RDWR)
    with client.pin(KEYS) as pins:
        assert pins.lengths == [len(value_of(key)) for key in KEYS]
        assert not path._idle, "they were dropped with the first of them"
    assert target.tcp is path and not any(channel in path._idle for channel in stale)
    assert path._open == len(path._idle) == 1
    assert client.stats()["outages"] == 0


def test_values_that_are_gone_are_released_at_the_server(cluster: FakeCluster, connections: list[float]) -> None:
    client = full(cluster, "tcp")
    leases = cluster.nodes[0].stream.stream.leases
    with cluster.nodes[0].worker.frozen() as store:
        store.sessions.pinned_bytes_max = 10 * 1024
    with client.pin(KEYS) as pins:
        assert client.put_many(KEYS, [value_of(key, 1) for key in KEYS]) == [True] * len(KEYS)
        rooms = [bytearray(8) for _ in KEYS]
        got = pins.get_ranges_many(range(len(KEYS)), [[(0, 8, room)] for room in rooms])
        assert 0 < got.count(None) < len(KEYS)
        before = len(connections)
    assert leases.keys == 0 and leases.bytes == 0
    assert client.get("k1") == value_of("k1", 1) and len(connections) == before, "the connection was kept"


@pytest.mark.parametrize("by", ["release", "close"])
def test_all_servers_are_told_before_any_answer_is_waited_for(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """So those that are silent cost one deadline, not one each."""
    cluster.settled({0: ALL[::2], 1: ALL[1::2]})
    client = cluster.client("tcp")
    assert client.put_many(KEYS, [value_of(key) for key in KEYS]) == [True] * len(KEYS)
    held = [client.pin(KEYS) for _ in range(1 if by == "release" else 3)]
    calls: list[tuple[str, float]] = []
    begin, end = RemotePins.begin_end, RemotePins.end

    def begun(self: RemotePins, until: float) -> None:
        calls.append(("begin", until))
        begin(self, until)

    def ended(self: RemotePins) -> None:
        calls.append(("end", 0.0))
        end(self)

    monkeypatch.setattr(RemotePins, "begin_end", begun)
    monkeypatch.setattr(RemotePins, "end", ended)
    if by == "release":
        held[0].release()
    else:
        client.close()
    count = 2 * len(held)
    assert [name for name, _ in calls] == ["begin"] * count + ["end"] * count
    assert len({until for name, until in calls if name == "begin"}) == 1
    for node in cluster.nodes:
        wait_until(lambda: node.stream.stream.leases.keys == 0, "the values are released")  # noqa: B023


def test_close_while_another_thread_pins() -> None:
    """Its list of pins changed under the iteration, and RuntimeError went to the engine."""
    client = FakeClient()
    assert client.put("k", b"value")
    held = [client.pin(["k"]) for _ in range(3)]
    pinner = client._pinner
    pinner._made = made = AddedTo(pinner._made, lambda: held.append(client.pin(["k"])))
    pinner.release_all()
    assert len(held) == 4 and len(made) == 4
    assert ["released" in repr(each) for each in held] == [True, True, True, False], "the last one came after"
    client.close()
    assert all("released" in repr(each) for each in held)


def test_a_signal_s_handler_closes_the_client_while_its_thread_pins() -> None:
    """It waited for ever for a lock that its own thread held."""
    client = FakeClient()
    assert client.put("k", b"value")
    held = [client.pin(["k"])]
    client._pinner._made = Interrupting(client._pinner._made, client.close)
    assert ends(lambda: held.append(client.pin(["k"])))
    assert len(held) == 2 and "released" in repr(held[0])
    held[1].release()


def test_pins_that_are_gone_are_forgotten() -> None:
    with FakeClient() as client:
        assert client.put("k", b"value")
        held = client.pin(["k"])
        client.pin(["k"]).release()
        gc.collect()
        assert [each() for each in client._pinner._made] == [held]
        held.release()


def test_all_queued_pins_are_released_at_once(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    full(cluster, "shm")
    session = cluster.nodes[0].worker.session(ring=False)
    sent: list[int] = []
    monkeypatch.setattr(session, "exchange", lambda msg: sent.extend(msg.pins) if isinstance(msg, M.Unpin) else None)
    for pin in range(2500):
        session.unpin_later(pin)
    session.flush_unpins()
    assert sent == list(range(2500))
    monkeypatch.undo()
    session.close()


@pytest.mark.parametrize("path", ["shm", "tcp"])
def test_after_a_worker_s_death_each_pin_is_released_alone(cluster: FakeCluster, path: str) -> None:
    """Its successor has the pins of a session that has ended. One that is held on keeps no other."""
    client = full(cluster, path)
    worker = cluster.nodes[0].worker

    def pinned() -> int:
        with worker.frozen() as store:
            return int(store.stats()["pins"])

    with client.pin(KEYS[:10]) as held:
        released = client.pin(KEYS[10:40])
        assert pinned() == 40
        worker.die()
        worker.start()
        cluster.instruct()
        wait_until(lambda: client.put("new", b"value"), "the worker serves")
        assert pinned() == 40
        released.release()
        wait_until(lambda: pinned() == 10, "the pins are released")
        room = bytearray(8)
        assert held.get_ranges(3, [(0, 8, room)]) == len(value_of(KEYS[3])) and room == value_of(KEYS[3])[:8]
    wait_until(lambda: pinned() == 0, "the others, too")

"""Scripted faults of the RDMA path: writers in the middle of READs, queue pairs and endpoints that die, deadlines.

And mutation tests: each safety check is removed once, and the script that it guards must then find a violation.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import Any

import pytest

from simm.arena.layout import State, Word
from simm.errors import UsageError
from simm.rdma import remote_arena
from simm.rdma.api import READ, WRITE
from simm.rdma.remote_arena import CachedEntry
from simm.sdk import rdma_connection as connection_module
from simm.sdk import rdma_get, rdma_pool
from simm.sdk.path import STALE_S
from simm.sdk.tcp import TcpPath
from tests.support.client_checks import check_staging, forget
from tests.support.dose import dosed
from tests.support.fake_cluster import ALL
from tests.support.fake_fabric import FakeQueuePair
from tests.support.fake_rdma_cluster import FakeRdmaCluster, brief_rdma, leave_alone, path_of, until_rdma
from tests.support.invariants import InvariantViolation
from tests.support.rdma_script import (
    KEYS,
    ROOM,
    finds_harm,
    queue_pairs_outlive_failures,
    reads,
    reuse_the_chunk,
    value_of,
    version_in,
)
from tests.support.waiting import wait_until

#: A bound for things that hang, seconds.
WAIT_S = 30.0
KIB = 1 << 10
MIB = 1 << 20


pytestmark = pytest.mark.usefixtures("nothing_retired")


# -- a writer between the steps of a READ ----------------------------------------------------------------


def storm(monkeypatch: pytest.MonkeyPatch, seed: int, rails: int = 1) -> int:
    """Read into host memory while a writer works between any two steps; return the number of hits."""
    names = [f"r{number}" for number in range(rails)]
    with FakeRdmaCluster(monkeypatch, seed=seed, rails=names, mine=names, pieces=12) as cluster:
        client = cluster.rdma(deadline_s=20.0)
        sinks = [client.register(bytearray(ROOM)) for _ in KEYS]
        return reads(cluster, client, seed, sinks, lambda sink, size: bytes(sink.view()[:size]))


@pytest.mark.parametrize("rails", [1, 2])
def test_a_writer_between_all_steps(monkeypatch: pytest.MonkeyPatch, rails: int) -> None:
    assert sum(storm(monkeypatch, seed, rails) for seed in range(dosed(4, quick=1))) > dosed(50, quick=10)


def _believe(entry: CachedEntry, between: bytes, now: bytes, word: int) -> bool:
    return True


def test_mutation_without_the_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdma_get, "confirmed", _believe)
    finds_harm(storm)


def late_value(monkeypatch: pytest.MonkeyPatch, *, single: bool) -> None:
    """Hold a value's READ up until its chunk is another's, while all else goes on; raise if the client believes it."""
    with FakeRdmaCluster(monkeypatch, pieces=4) as cluster:
        client, writer = cluster.rdma(deadline_s=20.0), cluster.client("shm")
        path_of(client).maintain = lambda now: None  # type: ignore[method-assign]
        assert writer.put("k", value_of("k", 1, 700))
        sinks = [client.register(bytearray(700)) for _ in range(2)]
        assert client.get_into("k", sinks[0]) == 700
        cluster.network.hold(lambda qp, op: op[0] != WRITE and op[3] == 700)
        steps = reuse_the_chunk(cluster, client, writer)
        sinks[0].view()[:] = bytes(700)
        keys = ["k"] if single else ["k", "missing"]
        got = client.get_into_many(keys, sinks[: len(keys)])
        cluster.network.between = None
        assert next(steps) > 201
        if got[0] is not None:
            raise InvariantViolation(f"believed: {bytes(sinks[0].view()[:16])!r}")


@pytest.mark.parametrize("single", [True, False])
def test_a_value_that_comes_late(monkeypatch: pytest.MonkeyPatch, single: bool) -> None:
    late_value(monkeypatch, single=single)


@pytest.mark.parametrize("single", [True, False])
def test_mutation_without_the_fence_before_it(monkeypatch: pytest.MonkeyPatch, single: bool) -> None:
    monkeypatch.setattr(rdma_get, "FENCED_READ", READ)
    with pytest.raises(InvariantViolation):
        late_value(monkeypatch, single=single)


def stale_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Move a shard, and leave the value in the old owner's arena; raise InvariantViolation if it is read there."""
    with FakeRdmaCluster(monkeypatch, 2) as cluster:
        cluster.settled({0: ALL})
        client, writer = cluster.rdma(), cluster.client("shm")
        assert writer.put("k", value_of("k", 1, 500))
        sink = client.register(bytearray(500))
        assert client.get_into("k", sink) == 500
        # The client's map stays the old one, and nobody answers its questions by TCP.
        cluster.own({1: ALL}, previous=0)
        cluster.instruct()
        cluster.nodes[0].freeze(cluster.epoch, ALL)
        for cached in (True, False):
            if not cached:
                forget(path_of(client).locations)
            if client.get_into("k", sink) is not None:
                raise InvariantViolation("a value was read at a worker that has given the shard up")


def test_an_owner_that_was(monkeypatch: pytest.MonkeyPatch) -> None:
    stale_owner(monkeypatch)


def test_mutation_without_the_shard_word(monkeypatch: pytest.MonkeyPatch) -> None:
    def confirmed(entry: CachedEntry, between: bytes, now: bytes, word: int) -> bool:
        return remote_arena.confirmed(entry, between, now, 1)

    monkeypatch.setattr(rdma_get, "confirmed", confirmed)
    with pytest.raises(InvariantViolation):
        stale_owner(monkeypatch)


# -- deadlines ---------------------------------------------------------------------------------------------


def late_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the deadline pass with a READ into the caller's buffer in flight; raise if it is written afterwards."""
    with FakeRdmaCluster(monkeypatch, size=64 * MIB) as cluster:
        client = cluster.rdma(deadline_s=60.0)
        value = value_of("k", 1, 100 * KIB)
        assert client.put("k", value)
        sink = client.register(bytearray(len(value)))
        assert client.get_into("k", sink) == len(value)
        cluster.network.hold(lambda qp, op: op[0] != WRITE and op[3] >= 100 * KIB)
        sink.view()[:] = bytes(len(value))
        began = time.monotonic()
        with brief_rdma():
            assert client.get_into("k", sink) == len(value)  # by TCP, within the deadline
        assert time.monotonic() - began < WAIT_S
        assert sink.view() == value
        sink.view()[:] = b"\xee" * len(value)  # it is the caller's again
        cluster.network.release()
        cluster.network.run()
        if bytes(sink.view()) != b"\xee" * len(value):
            raise InvariantViolation("the buffer was written after the call had returned")
        assert client.counters["rdma_fallbacks"] == 1
        assert client.stats()["workers"][0]["path"] in ("tcp", "rdma")
        until_rdma(client)
        assert client.get_into("k", sink) == len(value)
        assert client.counters["rdma_fallbacks"] == 1


def test_a_deadline_with_a_read_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    late_bytes(monkeypatch)


def test_mutation_without_closing_the_links_first(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvariantViolation), queue_pairs_outlive_failures(monkeypatch):
        late_bytes(monkeypatch)


def test_a_deadline_with_a_write_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller may change the value once put has returned; the stored value is the one that was passed."""
    with FakeRdmaCluster(monkeypatch, size=64 * MIB) as cluster:
        client = cluster.rdma(deadline_s=60.0)
        value = value_of("k", 1, 100 * KIB)
        source = client.register(bytearray(value))
        cluster.network.hold(lambda qp, op: op[0] == WRITE and op[3] >= 100 * KIB)
        with brief_rdma():
            assert client.put("k", source)
        source.view()[:] = bytes(len(value))
        cluster.network.release()
        cluster.network.run()
        assert cluster.client("shm").get("k") == value
        assert client.counters["rdma_fallbacks"] == 1
        assert client.counters["rdma_puts"] == 0


def test_an_endpoint_that_says_nothing_after_a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The outcome of the put is unknown, so the client does not put again by TCP."""
    with FakeRdmaCluster(monkeypatch) as cluster:
        client = cluster.rdma(deadline_s=60.0)
        leave_alone(path_of(client))  # so that there is one connection
        assert all(client.put("k", b"first") for _ in range(5))  # its grants are there from now on
        asleep, go_on = threading.Event(), threading.Event()

        def sleep() -> None:
            asleep.set()
            go_on.wait(2 * WAIT_S)

        sleeper = threading.Thread(target=cluster.node.endpoint.call, args=(sleep,))
        sleeper.start()
        assert asleep.wait(WAIT_S)
        with pytest.MonkeyPatch.context() as inner:
            stored: list[Any] = []

            def store(_path: TcpPath, entries: Any, until: float) -> list[int]:
                stored.append(entries)
                return [0] * len(entries)

            inner.setattr(TcpPath, "store", store)
            began = time.monotonic()
            with brief_rdma(0.025):  # time enough for all that comes before the commit
                assert not client.put("k", b"second")
            assert time.monotonic() - began < WAIT_S
            assert not stored
        go_on.set()
        sleeper.join()
        until_rdma(client)
        assert client.get("k") in (b"first", b"second")
        assert client.put("k", b"third")
        assert client.get("k") == b"third"


def test_all_connections_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeRdmaCluster(monkeypatch) as cluster:
        client = cluster.rdma(deadline_s=60.0)
        assert client.put("k", b"value")
        path = path_of(client)
        connections = [path.acquire(time.monotonic() + 5) for _ in range(rdma_pool.CONNECTIONS_MAX)]
        with brief_rdma():
            assert client.get("k") == b"value"  # by TCP
        assert client.counters["rdma_fallbacks"] == 1
        timer = threading.Timer(0.05, path.release, [connections.pop()])
        timer.start()
        assert client.get("k") == b"value"
        assert client.counters["rdma_fallbacks"] == 1
        timer.join()
        for connection in connections:
            path.release(connection)


def connections_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail connections of the time before the path went down, and then one of the time since."""
    with FakeRdmaCluster(monkeypatch) as cluster:
        client = cluster.rdma(deadline_s=60.0)
        path = path_of(client)
        leave_alone(path)
        first, second, third, fourth = (path.acquire(time.monotonic() + WAIT_S) for _ in range(4))

        def up() -> bool:
            path.backoff.retry_at = 0.0
            return path.down_reason is None

        path.lost(first, "its link is broken")
        assert path.down_reason == "its link is broken"
        wait_until(up, "the path is up again")
        path.lost(second, "its link has broken, too")
        if path.down_reason is not None:
            for connection in (third, fourth):
                path.release(connection)
            raise InvariantViolation("a connection of before took the path down")
        path.release(third)
        path.release(fourth)
        assert path._connections == len(path._idle) == 3, "nothing is lost, and nothing counted twice"
        assert path.acquire(time.monotonic() + WAIT_S) is fourth
        path.lost(fourth, "it has not been used since")
        assert path.down_reason is None and path._connections == 2
        new = next(each for each in path._idle if each is not third)
        path._idle.remove(new)
        path.lost(new, "this one is of now")
        assert path.down_reason == "this one is of now" and not path._connections
        wait_until(up, "the path is up again")
        assert client.put("k", b"value") and client.get("k") == b"value"
        assert client.counters["rdma_fallbacks"] == 0


def test_a_connection_of_before_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    connections_of_before(monkeypatch)


def test_mutation_where_any_failure_takes_the_path_down(monkeypatch: pytest.MonkeyPatch) -> None:
    drop = rdma_pool.RdmaPath.drop
    monkeypatch.setattr(rdma_pool.RdmaPath, "drop", lambda self, reason, era=-1: drop(self, reason))
    with pytest.raises(InvariantViolation):
        connections_of_before(monkeypatch)


def test_a_closed_arena_of_before_leaves_the_path_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection that maintenance has kept may be to the arena of a server that has been replaced."""
    with FakeRdmaCluster(monkeypatch) as cluster:
        client = cluster.rdma(deadline_s=60.0)
        path = path_of(client)
        leave_alone(path)
        old, other = (path.acquire(time.monotonic() + WAIT_S) for _ in range(2))
        path.lost(other, "broken")

        def up() -> bool:
            path.backoff.retry_at = 0.0
            return path.down_reason is None

        wait_until(up, "the path is up again")
        monkeypatch.setattr(old, "read_heartbeat", lambda: (State.CLOSED, 1))
        assert path._poll(old, time.monotonic())
        assert path.down_reason is None
        new = path.acquire(time.monotonic() + WAIT_S)
        monkeypatch.setattr(new, "read_heartbeat", lambda: (State.CLOSED, 1))
        assert path._poll(new, time.monotonic())
        assert path.down_reason == "the worker's arena is closed"
        for connection in (old, new):
            path.lost(connection, "the test is over")


# -- what dies -----------------------------------------------------------------------------------------------


def queue_pairs_of(cluster: FakeRdmaCluster) -> list[FakeQueuePair]:
    return [qp for rail in cluster.fabrics[-1].fakes for qp in rail.queue_pairs]


def test_a_link_that_breaks_in_the_middle_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Break the link at every step: each key gives its value or a miss, and no connection stays open."""
    for step in range(0, 120, 29):
        with FakeRdmaCluster(monkeypatch, seed=step, rails=("a", "b"), mine=("c", "d"), pieces=4) as cluster:
            client = cluster.rdma(deadline_s=60.0)
            keys = [f"k{number}" for number in range(60)]
            values = [value_of(key, 1, 3000) for key in keys]
            assert all(client.put_many(keys, values))
            count = 0

            def between(cluster: FakeRdmaCluster = cluster, step: int = step) -> None:
                nonlocal count
                count += 1
                if count == step + 20:
                    for qp in queue_pairs_of(cluster)[:1]:
                        cluster.network.kill(qp)

            cluster.network.between = between
            sinks = [client.register(bytearray(3000)) for _ in keys]
            assert client.get_into_many(keys, sinks) == [3000] * 60
            assert [bytes(sink.view()) for sink in sinks] == values
            count = 0
            assert all(client.put_many(keys, [value_of(key, 2, 3000) for key in keys])) or count
            cluster.network.between = None
            until_rdma(client)
            for key, got in zip(keys, client.get_many(keys)):
                assert got is not None
                assert version_in(key, got) in (1, 2)


@pytest.mark.full
def test_a_rail_that_goes_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two rails fails: its queue pair is not used, and is used again once the rail works."""
    with FakeRdmaCluster(monkeypatch, rails=("a", "b"), mine=("c", "d")) as cluster:
        client = cluster.rdma(deadline_s=6.0)
        value = value_of("k", 1, 2 * MIB)
        source = client.register(bytearray(value))
        assert client.put("k", source)
        second = cluster.fabrics[0].fakes[1]
        cluster.network.drop(second)
        sink = client.register(bytearray(len(value)))

        def noticed() -> bool:
            until_rdma(client)  # a busy machine may have lost the connection before
            assert client.get_into("k", sink) == len(value)
            assert sink.view() == value
            return client.counters["rdma_fallbacks"] > 0

        with brief_rdma(0.1):
            wait_until(noticed, "a get meets the rail that failed")
        until_rdma(client)
        connections = path_of(client)
        connection = connections.acquire(time.monotonic() + 5)
        assert [link.rail.name for link in connection.links] == ["c"]
        connections.release(connection)
        assert client.get_into("k", sink) == len(value)
        cluster.network.restore(second)
        connections.drop("look again")
        until_rdma(client)
        connection = connections.acquire(time.monotonic() + 5)
        assert [link.rail.name for link in connection.links] == ["c", "d"]
        connections.release(connection)
        assert client.get_into("k", sink) == len(value)
        assert sink.view() == value


def test_rails_that_do_not_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first pairing of rails does not work, and the client finds the one that does."""
    with FakeRdmaCluster(monkeypatch, rails=("a", "b"), mine=("c",)) as cluster:
        monkeypatch.setattr(connection_module, "QUEUE_PAIRS_MAX", 1)
        probe = cluster.rdma(deadline_s=5.0)
        mine = cluster.fabrics[0].fakes[0]
        theirs = cluster.node.endpoint.fabric.fakes
        path = path_of(probe)
        for blocked, wanted in ((0, 1), (1, 0)):
            cluster.network._severed.clear()
            cluster.network.sever(mine, theirs[blocked])
            path.drop("again")
            until_rdma(probe)
            connection = path.acquire(time.monotonic() + 5)
            assert [link.region_map.rail for link in connection.links] == [wanted]
            path.release(connection)
            assert probe.put("k", b"value")
            assert probe.get("k") == b"value"
        cluster.network.sever(mine, theirs[0])
        path.drop("again")
        wait_until(lambda: "no pair of rails works" in str(path.down_reason), "no pair is found")
        assert probe.stats()["workers"][0]["path"] == "tcp"
        assert probe.get("k") == b"value"


def test_an_endpoint_that_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeRdmaCluster(monkeypatch) as cluster:
        client = cluster.rdma(deadline_s=60.0)
        assert client.put("k", b"value" * 100)
        assert client.get("k") == b"value" * 100
        arena = path_of(client).arena
        cluster.node.endpoint.stop()
        with brief_rdma(0.05):
            assert client.get("k") == b"value" * 100
            assert client.put("k", b"other" * 100)
            assert client.get("k") == b"other" * 100
        assert client.stats()["workers"][0]["path"] == "tcp"
        cluster.node.endpoint.start()
        until_rdma(client)
        before = client.counters["rdma_gets"]
        assert client.get("k") == b"other" * 100
        assert client.counters["rdma_gets"] == before + 1
        assert path_of(client).arena is not arena  # other keys: what was cached is of no use
        assert client.put("k", b"third")
        assert client.get("k") == b"third"


def test_a_worker_that_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """READs continue during the restart. Older grants are stale: the put goes by TCP, the next one by new grants."""
    with FakeRdmaCluster(monkeypatch) as cluster:
        client = cluster.rdma(deadline_s=5.0)
        keys = [f"k{number}" for number in range(20)]
        assert all(client.put_many(keys, [value_of(key, 1, 2000) for key in keys]))
        before = client.counters["rdma_gets"]
        cluster.node.worker.die()
        for key, got in zip(keys, client.get_many(keys)):
            assert got == value_of(key, 1, 2000)
        assert client.counters["rdma_gets"] == before + 20
        cluster.node.worker.start()
        cluster.instruct()

        def stored() -> bool:
            return client.put("new", value_of("new", 1, 2000))

        wait_until(stored, "puts work again")
        assert client.get("new") == value_of("new", 1, 2000)
        puts = client.counters["rdma_puts"]
        until_rdma(client)
        wait_until(lambda: stored() and client.counters["rdma_puts"] > puts, "puts go by RDMA again")


def test_a_closed_arena_is_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeRdmaCluster(monkeypatch) as cluster:
        client = cluster.rdma()
        assert client.put("k", b"value")
        segment = memoryview(cluster.node.worker.segment.mm).cast("Q")
        state = segment[Word.STATE]
        segment[Word.STATE] = State.SUSPENDED
        wait_until(lambda: path_of(client).down_reason is not None, "the path is dropped")
        assert "closed" in str(path_of(client).down_reason)
        segment[Word.STATE] = state
        segment.release()
        until_rdma(client)
        assert client.get("k") == b"value"


@pytest.mark.full
def test_a_heartbeat_that_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a manager the client ignores it. Without one it drops the path until the heartbeat continues."""
    with FakeRdmaCluster(monkeypatch) as cluster:
        client = cluster.rdma(deadline_s=5.0)
        assert client.put("k", b"value")
        cluster.node.worker.die()
        time.sleep(2 * STALE_S)
        assert path_of(client).down_reason is None
        assert client.get("k") == b"value"
        cluster.manager.stop()
        wait_until(lambda: path_of(client).down_reason is not None, "the path is dropped")
        wait_until(lambda: "heartbeat" in str(path_of(client).down_reason), "for that reason")
        path_of(client).backoff.retry_at = 0.0
        before = path_of(client).backoff.failures
        wait_until(lambda: path_of(client).backoff.failures > before, "a try in vain")
        assert path_of(client).down_reason is not None
        cluster.node.worker.start()
        cluster.instruct()
        path_of(client).backoff.retry_at = 0.0
        wait_until(lambda: path_of(client).down_reason is None, "it comes back")
        wait_until(lambda: client.put("k", b"other"), "puts work again")
        assert client.get("k") == b"other"


def test_a_server_whose_memory_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The background thread finds out that the path is down without any call."""
    with FakeRdmaCluster(monkeypatch) as cluster:
        client = cluster.rdma()
        monkeypatch.setattr(rdma_pool, "HEARTBEAT_TIMEOUT_S", 0.2)
        cluster.network.hold()
        wait_until(lambda: path_of(client).down_reason is not None, "the background finds out")
        cluster.network.release()
        until_rdma(client)
        assert client.put("k", b"value")


def test_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupt at every step: the call raises, nothing writes its memory afterwards, and the next call works."""
    with FakeRdmaCluster(monkeypatch, rails=("a", "b"), mine=("c", "d"), pieces=4) as cluster:
        client = cluster.rdma(deadline_s=60.0)
        path_of(client).maintain = lambda now: None  # type: ignore[method-assign]
        keys = [f"k{number}" for number in range(8)]
        values = [value_of(key, 1, 2000) for key in keys]
        me = threading.get_ident()
        hit = 0
        for step in range(1, 60, 7):
            until_rdma(client)
            count = 0

            def between(step: int = step) -> None:
                nonlocal count
                if threading.get_ident() == me:
                    count += 1
                    if count == step:
                        raise KeyboardInterrupt

            sources = [client.register(bytearray(value)) for value in values]
            sinks = [client.register(bytearray(2000)) for _ in values]
            for act, memory in ((client.put_many, sources), (client.get_into_many, sinks)):
                cluster.network.between = between
                try:
                    act(keys, memory)
                except KeyboardInterrupt:
                    hit += 1
                finally:
                    cluster.network.between = None
                for sink in sinks:
                    sink.view()[:] = b"\xee" * 2000
                for source in sources:
                    source.view()[:] = bytes(2000)
                cluster.network.run()
                assert all(bytes(sink.view()) == b"\xee" * 2000 for sink in sinks)
                for source, value in zip(sources, values):
                    source.view()[:] = value
                count = 0
        assert hit > 5
        until_rdma(client)
        assert all(client.put_many(keys, values))
        assert client.get_many(keys) == values
        check_staging(path_of(client).staging)


def test_after_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child uses none of the parent's connections, and the parent's keep working."""
    with FakeRdmaCluster(monkeypatch) as cluster:
        client = cluster.rdma()
        span = client.register(bytearray(b"x" * 5000))
        assert client.put("k", span)
        fabric = cluster.fabrics[0]
        read, write = os.pipe()
        child = os.fork()
        if not child:
            try:
                os.write(write, f"{fabric.abandoned} {span.registration._regions} {client._routes.router}".encode())
            finally:
                os._exit(0)
        os.close(write)
        os.waitpid(child, 0)
        said = os.read(read, 1000)
        os.close(read)
        assert said == b"True {} None"
        assert not fabric.abandoned
        sink = client.register(bytearray(5000))
        assert client.get_into("k", sink) == 5000
        assert sink.view() == b"x" * 5000
        assert client.counters["rdma_fallbacks"] == 0


def test_closing_while_others_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeRdmaCluster(monkeypatch, background=True) as cluster:
        client = cluster.rdma(deadline_s=3.0)
        assert client.put("k", value_of("k", 1, 5000))
        wrong: list[Any] = []
        read = []
        go = threading.Event()

        def work() -> None:
            sink = client.register(bytearray(5000))
            go.set()
            with contextlib.suppress(UsageError):  # closed
                for _ in range(2000):
                    got = client.get_into("k", sink)
                    if got:
                        read.append(got)
                    if got and bytes(sink.view()) != value_of("k", 1, 5000):
                        wrong.append(got)
                    if client._closed and got is None:
                        return

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        go.wait(5)
        time.sleep(0.1)
        client.close()
        for thread in threads:
            thread.join(20)
        assert read and not wrong
        assert not any(thread.is_alive() for thread in threads)


def test_one_key_twice_when_the_connection_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The later value is stored, whichever of the two went by RDMA, and it never replaces that of a later put."""
    for step in range(5, 200, 39):
        with FakeRdmaCluster(monkeypatch, seed=step, pieces=4) as cluster:
            client = cluster.rdma(deadline_s=60.0)
            count = 0

            def between(cluster: FakeRdmaCluster = cluster, step: int = step) -> None:
                nonlocal count
                count += 1
                if count == step:
                    for qp in queue_pairs_of(cluster):
                        cluster.network.kill(qp)

            keys = [f"k{number % 20}" for number in range(40)]
            values = [value_of(key, 1 + number // 20, 400) for number, key in enumerate(keys)]
            cluster.network.between = between
            done = client.put_many(keys, values)
            cluster.network.between = None
            for key, good, got in zip(keys[20:], done[20:], client.get_many(keys[20:])):
                if good:
                    assert got is not None
                    assert version_in(key, got) == 2, step


def test_grants_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeRdmaCluster(monkeypatch) as cluster:
        client = cluster.rdma()
        assert all(client.put_many([f"k{number}" for number in range(40)], [bytes(3000)] * 40))
        path = path_of(client)
        wait_until(lambda: path._connections == len(path._idle), "nobody has a connection")
        connections = list(path._idle)
        assert any(pool for connection in connections for pool in connection.pool.stocks.values())
        cluster.node.endpoint.call(lambda: cluster.node.endpoint.endpoint._recall(1 << 30))
        wait_until(
            lambda: not any(pool for connection in connections for pool in connection.pool.stocks.values()),
            "the background returns them",
        )
        assert client.put("k", bytes(3000))
        client.close()
        wait_until(lambda: not cluster.node.endpoint.endpoint.leases, "the connections are gone")
        wait_until(lambda: not cluster.node.endpoint.endpoint.granted_bytes, "and their grants")


def test_no_room_is_said_by_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeRdmaCluster(monkeypatch) as cluster:
        client = cluster.rdma()
        assert not client.put("k", bytes(40 * MIB))
        assert client.put("k", bytes(MIB))
        assert client.get("k") == bytes(MIB)

"""What a stream keeps of a STORE that has ended, which is nothing whatever the garbage collector does; what it stores.
"""

from __future__ import annotations

import gc
import os
import select
import threading
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from simm.arena.hashing import Hasher
from simm.arena.marks.near import COMMIT_NEAR
from simm.cluster.assignment import DROP_ALL
from simm.constants import KEEP_SOFT
from simm.errors import PeerError, TransportError
from simm.ipc import answer_wait
from simm.ipc.session import WorkerSession
from simm.net.channel import Channel
from simm.rpc import encode
from simm.server import stream_put, worker_session
from simm.server.stream_put import Receiving
from simm.wire import messages as M
from simm.wire.group_messages import joined
from simm.wire.keep_messages import Keep
from simm.wire.messages import Status
from tests.support import raw_stores
from tests.support.store_world import ALL_SHARDS, owned
from tests.support.waiting import wait_until
from tests.support.worker_thread import StreamThread, WorkerThread

digest_of = Hasher("default")
#: Values of one STORE: those that come with its frame, and those that do not fit a socket's buffer.
SIZES = (10, 5000, 3 << 20)


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def begin(channel: Channel, name: str) -> int:
    """Send a STORE without its bytes; return its number."""
    return channel.submit(M.Store([(digest_of(f"{name} {size}"), size, 0, 0, 0) for size in SIZES]))


def store(channel: Channel, name: str) -> None:
    number = begin(channel, name)
    for size in SIZES:
        channel.sock.sendall(bytes(size))
    assert channel.result(channel.wait(number)).statuses == [Status.OK] * len(SIZES)


def stores_over_a_workers_death() -> weakref.ref[WorkerSession]:
    """Let a worker die when STOREs have ended, and others are in the middle; return the session of all of them."""
    with WorkerThread() as worker, StreamThread(worker.path) as stream:
        whole, half, gone = (stream.channel() for _ in range(3))
        store(whole, "whole")
        session = weakref.ref(stream.stream.keeper.session)
        assert isinstance(session(), WorkerSession)
        for channel in (half, gone):
            begin(channel, str(channel.fileno()))
            channel.sock.sendall(bytes(SIZES[0] + 1))
        wait_until(lambda: stores_of(stream) == 2, "both are in the middle of the second value")
        gone.close()
        wait_until(lambda: stores_of(stream) == 1, "one is abandoned")
        worker.die()
        worker.start()
        wait_until(lambda: stream.stream.keeper.session not in (None, session()), "a session with the new worker")
        assert session() is not None, "the value in the middle is written into its chunk"
        store(whole, "again")
        half.close()
        wait_until(lambda: stores_of(stream) == 0, "the other is abandoned")
        whole.close()
    return session


def stores_of(stream: StreamThread) -> int:
    """Return the number of STOREs that have a part of their second value in its chunk."""
    stores = [each for peer in list(stream.loop.peers) if (each := peer.context.receiving) is not None]
    return sum(each.target is not None and len(each.statuses) == 1 and each.at > 0 for each in stores)


def test_the_session_of_stores_that_have_ended_is_let_go(no_collector: None) -> None:
    assert stores_over_a_workers_death()() is None


def test_mutation_a_store_in_a_cycle_keeps_the_session(no_collector: None, monkeypatch: pytest.MonkeyPatch) -> None:
    start = Receiving.start

    def in_a_cycle(self: Receiving) -> None:
        end = self.on_end
        self.on_end = lambda _: end(self)
        start(self)

    monkeypatch.setattr(Receiving, "start", in_a_cycle)
    session = stores_over_a_workers_death()
    assert session() is not None
    gc.collect()
    assert session() is None


# --- a server that comes to another cluster --------------------------------------------------------

A, B = 0xAA, 0xBB
VALUES = {key: key.encode() * 1000 for key in ("first", "second", "third")}


def comes_to(worker: WorkerThread, cluster: int) -> None:
    """Give the worker the first map of a cluster, with all shards."""
    worker.supervisor.call(M.Shards(1, *owned(ALL_SHARDS, 1), cluster))


def client_of(stream: StreamThread, cluster: int) -> Channel:
    """Connect a client that has come by a map of this cluster, 0 for none."""
    channel = stream.channel(hello=False)
    channel.call(M.Hello(M.PROTOCOL_MIN, M.PROTOCOL_MAX, M.Role.CLIENT, 0, 0, "default", "", [], cluster))
    return channel


def half(stream: StreamThread) -> bool:
    """Whether a STORE has its first value, and waits for others."""
    return any(
        store is not None and len(store.statuses) == 1
        for store in [peer.context.receiving for peer in list(stream.loop.peers)]
    )


@pytest.mark.parametrize("sent", [3, 2], ids=["of three values", "of two values"])
@pytest.mark.parametrize("now", [B, 0], ids=["with a map", "before its map"])
@pytest.mark.parametrize("mapped", [A, 0], ids=["by a map", "by no map"])
def test_issue_a_store_ends_when_its_server_comes_to_another_cluster(mapped: int, now: int, sent: int) -> None:
    """It went on by the next session, and the second cluster's clients read what one of the first had sent."""
    values = dict(list(VALUES.items())[:sent])
    with WorkerThread(all_shards=False) as worker:
        comes_to(worker, A)
        with StreamThread(worker.path) as stream:
            channel = client_of(stream, mapped)
            assert raw_stores.store(channel, {"warm": VALUES["first"]}) == [Status.OK]
            first = stream.stream.keeper.session
            number = raw_stores.begin(channel, values, 1)
            wait_until(lambda: half(stream), "its first value is there")
            worker.supervisor.call(DROP_ALL)
            if now:
                comes_to(worker, now)
            wait_until(lambda: stream.stream.keeper.session not in (None, first), "a session after the change")
            channel.sock.sendall(b"".join(list(values.values())[1:]))
            with pytest.raises(PeerError):
                raw_stores.end(channel, number)
            wait_until(lambda: stores_left(stream) == 0, "the stream has ended it")
            if not now:
                comes_to(worker, B)
            asked = client_of(stream, B)
            found = asked.call(M.Exists([raw_stores.digest_of(key) for key in ("warm", *values)])).statuses
            assert found == [Status.NOT_FOUND] * (1 + sent)
            assert raw_stores.store(asked, values) == [Status.OK] * sent, "clients of the second cluster are served"
            for each in (channel, asked):
                each.close()


def test_issue_a_commit_before_the_first_map_does_not_land_in_its_cluster() -> None:
    """The worker took the first map of the second cluster before a COMMIT that was on its way, and carried it out."""
    values = dict(list(VALUES.items())[:2])
    with WorkerThread(all_shards=False) as worker:
        comes_to(worker, A)
        with StreamThread(worker.path) as stream:
            warming = client_of(stream, A)
            assert raw_stores.store(warming, {"warm": VALUES["first"]}) == [Status.OK]
            first = stream.stream.keeper.session
            worker.supervisor.call(DROP_ALL)
            wait_until(lambda: stream.stream.keeper.session not in (None, first), "a session after the change")
            channel = client_of(stream, A)
            assert raw_stores.store(channel, values) == [Status.WRONG_OWNER] * 2, "and grants for two more"
            number = raw_stores.begin(channel, values, 1)
            wait_until(lambda: half(stream), "its first value is there")
            with worker.frozen():
                channel.sock.sendall(values["second"])
                wait_until(lambda: not half(stream), "its second value is there, too")
                worker.worker.shards.take_map(None, 1, M.Shards(1, *owned(ALL_SHARDS, 1), B))
            assert raw_stores.end(channel, number) == [Status.WRONG_OWNER] * 2
            asked = client_of(stream, B)
            found = asked.call(M.Exists([raw_stores.digest_of(key) for key in values])).statuses
            assert found == [Status.NOT_FOUND] * 2
            assert raw_stores.store(asked, values) == [Status.OK] * 2
            for each in (warming, channel, asked):
                each.close()


DIGESTS = [raw_stores.digest_of(key) for key in ("first", "second")]
CHANGES = {
    "delete": M.Delete(DIGESTS), "delete of a size": M.DeleteSized([(each, len(VALUES["first"])) for each in DIGESTS]),
    "keep": Keep(KEEP_SOFT, 60, DIGESTS), "group": joined([DIGESTS]),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_issue_a_change_before_the_first_map_does_not_land_in_its_cluster(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it was with all that a client of the first cluster had asked for, and not only with what it stored."""
    msg = CHANGES[change]
    on_its_way, real = threading.Event(), answer_wait.until_answered

    def until_answered(*arguments: Any) -> None:
        on_its_way.set()
        real(*arguments)

    with WorkerThread(all_shards=False) as worker:
        comes_to(worker, A)
        with StreamThread(worker.path) as stream:
            warming = client_of(stream, A)
            assert raw_stores.store(warming, {"warm": VALUES["first"]}) == [Status.OK]
            first = stream.stream.keeper.session
            worker.supervisor.call(DROP_ALL)
            wait_until(lambda: stream.stream.keeper.session not in (None, first), "a session after the change")
            channel = client_of(stream, A)
            assert set(channel.call(msg).statuses) == {Status.WRONG_OWNER}
            with worker.frozen() as store:
                monkeypatch.setattr(worker_session, "until_answered", until_answered)
                number = channel.submit(msg)
                answered = partial(select.select, [channel.sock], [], [], 0)
                wait_until(lambda: on_its_way.is_set() or bool(answered()[0]), "the stream has taken it")
                worker.worker.shards.take_map(None, 1, M.Shards(1, *owned(ALL_SHARDS, 1), B))
                owner = store.sessions.open(os.getpid(), 1, "default")
                for digest in DIGESTS:
                    ((grant, *_),) = store.sessions.grant(owner, len(VALUES["first"]), 1)
                    entry = digest, grant, len(VALUES["first"]), 0, 0, 0
                    assert store.commit(owner, [entry]) == [Status.OK], "a client of the second cluster"
            assert set(raw_stores.end(channel, number)) == {Status.WRONG_OWNER}
            with worker.frozen() as store:
                assert store.exists(DIGESTS) == [Status.OK] * 2
                assert not len(store.space.kept) and not store.groups.used
                store.sessions.close(owner)
            for each in (warming, channel):
                each.close()


def test_issue_a_store_ends_in_the_first_cluster_that_comes() -> None:
    """Of a client without a map, and begun before the first one: only the cluster in which it began ended it."""
    with WorkerThread(all_shards=False) as worker, StreamThread(worker.path) as stream:
        channel = client_of(stream, 0)
        number = raw_stores.begin(channel, VALUES, 1)
        wait_until(lambda: half(stream), "its first value is there")
        comes_to(worker, A)
        channel.sock.sendall(VALUES["second"])
        wait_until(lambda: two(stream), "its second value is there")
        first = stream.stream.keeper.session
        comes_to(worker, B)
        wait_until(lambda: stream.stream.keeper.session not in (None, first), "a session after the change")
        channel.sock.sendall(VALUES["third"])
        with pytest.raises(PeerError):
            raw_stores.end(channel, number)
        channel.close()


def two(stream: StreamThread) -> bool:
    """Whether a STORE has two values, and waits for the third."""
    return any(
        store is not None and len(store.statuses) == 2
        for store in [peer.context.receiving for peer in list(stream.loop.peers)]
    )


def stores_left(stream: StreamThread) -> int:
    """Return the number of STOREs under way."""
    return sum(peer.context.receiving is not None for peer in list(stream.loop.peers))


def test_a_store_outlives_a_session_of_the_same_cluster() -> None:
    """The control: the worker dies, and its successor goes on in the cluster."""
    with WorkerThread(all_shards=False) as worker:
        comes_to(worker, A)
        with StreamThread(worker.path) as stream:
            channel = client_of(stream, A)
            assert raw_stores.store(channel, {"warm": VALUES["first"]}) == [Status.OK]
            first = stream.stream.keeper.session
            number = raw_stores.begin(channel, VALUES, 1)
            wait_until(lambda: half(stream), "its first value is there")
            worker.die()
            worker.start()
            comes_to(worker, A)
            wait_until(lambda: stream.stream.keeper.session not in (None, first), "a session with the new worker")
            channel.sock.sendall(VALUES["second"] + VALUES["third"])
            assert raw_stores.end(channel, number)[2] == Status.OK
            channel.close()


def test_issue_a_store_asks_another_arena_for_its_own_number() -> None:
    """The rest of a STORE went to the namespace that had its number there."""
    with WorkerThread() as worker, WorkerThread() as cold, StreamThread(worker.path) as stream:
        for each, name in ((worker, "mine"), (cold, "theirs")):
            with each.frozen() as found:
                assert found.ledger.namespaces.number(name) == 0
        channel = stream.channel(namespace="mine")
        number = raw_stores.begin(channel, VALUES, 1)
        wait_until(lambda: half(stream), "its first value is there")
        stream.stream.keeper.uds = cold.path
        first = stream.stream.keeper.session
        worker.die()
        wait_until(lambda: stream.stream.keeper.session not in (None, first), "a session with the new worker")
        channel.sock.sendall(VALUES["second"] + VALUES["third"])
        assert raw_stores.end(channel, number)[2] == Status.OK
        with cold.frozen() as found:
            entry = found.table.entry(found.table.lookup(digest_of("third")))
            assert found.ledger.names[entry.namespace] == "mine"
        channel.close()


def test_what_comes_by_tcp_is_no_near_copy() -> None:
    """Near copies are made on the host of their reader, and take a share of the arena that others have then not."""
    with WorkerThread() as worker, StreamThread(worker.path) as stream:
        channel = stream.channel()
        number = channel.submit(M.Store([(digest_of("value"), 5, 0, COMMIT_NEAR, 0)]))
        channel.sock.sendall(b"value")
        assert channel.result(channel.wait(number)).statuses == [Status.OK]
        with worker.frozen() as store:
            store.apply_pending()
            assert store.table.lookup(digest_of("value")) >= 0
            assert not store.near.counts["made"] and not store.space.kept.near_bytes
        channel.close()


def test_issue_a_store_whose_worker_dies_is_not_told_that_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client sent it again and again, for as long as it would wait for room."""

    def dies(session: WorkerSession, *_: Any) -> None:
        session.give_up("its worker has died")
        raise TransportError("its worker has died")

    monkeypatch.setattr(stream_put, "obtain", dies)
    with WorkerThread() as worker, StreamThread(worker.path) as stream:
        channel = stream.channel()
        number = channel.next_id()
        # In one piece: by the next turn of the loop there may be another session.
        channel.sock.sendall(encode(M.Store([(digest_of("k"), 5, 0, 0, 0)]), number) + b"value")
        assert channel.result(channel.wait(number)).statuses == [Status.UNAVAILABLE]
        channel.close()

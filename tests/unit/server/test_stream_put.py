"""What a stream keeps of a STORE that has ended: nothing, at once, whatever the garbage collector does."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from simm.arena.hashing import Hasher
from simm.ipc.session import WorkerSession
from simm.net.channel import Channel
from simm.server.stream_put import Receiving
from simm.wire import messages as M
from simm.wire.messages import Status
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

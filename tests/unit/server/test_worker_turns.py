"""What a worker does in turns of its own: however much there is, it serves others in between, and it gets done."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from simm.arena.hashing import Hasher
from simm.arena.layout import Word
from simm.arena.marks import keeping
from simm.arena.marks.keeping import Keeping
from simm.arena.marks.kept import HARD, SOFT
from simm.arena.sessions import Session
from simm.arena.store import Store
from simm.ipc.arena_files import OwnedArena
from simm.net.loop import Loop
from simm.server import worker as worker_module
from simm.server.worker import Worker, WorkerSettings
from simm.wire.messages import Status
from tests.support.shards import set_shards
from tests.support.store_world import ALL_SHARDS, new_segment, owned, remove_segment
from tests.support.waiting import wait_until

_digest = Hasher("world")
COUNT = 300


class Turns(Loop):
    """A loop whose turns the test takes. Each look at the clock finds that a turn has had its time."""

    def __init__(self) -> None:
        self.later: list[Callable[[], None]] = []
        self.ticks = 0
        super().__init__(self._tick)

    def _tick(self) -> float:
        self.ticks += 1
        return float(self.ticks)

    def call_later(self, delay: float, callback: Callable[[], None]) -> None:
        self.later.append(callback)

    def take_one(self) -> None:
        self.later.pop(0)()


@pytest.fixture
def segment() -> Iterator[OwnedArena]:
    made = new_segment(16 << 20)
    yield made
    remove_segment(made)


@pytest.fixture
def worker(segment: OwnedArena) -> Iterator[Worker]:
    """It serves nobody, and its loop does not run."""
    store = Store.create(segment.mm)
    set_shards(store, 1, *owned(ALL_SHARDS, 1))
    turns = Turns()
    made = Worker(store, WorkerSettings(segment.name, segment.data.fd, poll_us=0), turns)
    turns.later.clear()  # beats
    yield made
    turns.close()
    store.release()


def turns_of(worker: Worker) -> Turns:
    assert isinstance(worker.loop, Turns)
    return worker.loop


def put(store: Store, session: Session, digests: list[bytes]) -> None:
    grants = store.sessions.grant(session, 64, len(digests))
    statuses = store.commit(session, [(digest, grant[0], 64, 0, 0, 0) for digest, grant in zip(digests, grants)])
    assert statuses == [Status.OK] * len(digests)
    store.apply_pending()


def test_what_ends_at_one_time_ends_in_turns_and_not_at_the_pace_of_the_heartbeat(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A million values that were kept with one ttl could not be evicted for 100 seconds more."""
    monkeypatch.setattr(keeping, "EXPIRE_ENTRIES", 50)
    store, turns = worker.store, turns_of(worker)
    digests = [_digest(str(number)) for number in range(COUNT)]
    put(store, store.sessions.open(1, 1, "a"), digests)
    monkeypatch.setattr(worker_module, "_now_s", lambda: 1000)
    assert store.keep(digests[:-1], SOFT, 10, 1000) == [Status.OK] * (COUNT - 1)
    assert store.keep(digests[-1:], HARD, 60, 1000) == [Status.OK]
    worker._beat()
    assert len(store.space.kept) == COUNT and not turns.later
    monkeypatch.setattr(worker_module, "_now_s", lambda: 1011)
    worker._beat()
    took = 0
    while turns.later:
        before = len(store.space.kept)
        worker._beat()  # it does not take turns of its own meanwhile
        assert len(store.space.kept) == before and len(turns.later) == 1
        turns.take_one()
        assert before - len(store.space.kept) <= 50
        took += 1
    assert took == 5 and len(store.space.kept) == 1


def test_readers_see_a_heartbeat_while_the_kept_entries_of_a_predecessor_end(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    header, moved = worker.store.header, []

    def slow(self: Keeping, now: int) -> None:
        start = header[Word.HEARTBEAT]
        wait_until(lambda: header[Word.HEARTBEAT] - start >= 3, "the heartbeat moves")
        moved.append(now)

    monkeypatch.setattr(Keeping, "begin", slow)
    with closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind("")  # of no name that anybody could take
        listener.listen()
        worker.start(listener)
    assert moved

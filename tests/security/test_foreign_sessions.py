"""F27 and F12: what one session can do to another one of the same worker, by what it may send and by what it may write.

Grant ids, pin ids and session numbers are counted, so anybody can guess them; what a client maps of its commit ring it
can write at any moment. Another client's values stay exact, its grants and pins its own, and the worker well.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import pytest

from simm.arena.hashing import Hasher
from simm.errors import TransportError
from simm.ipc.commit_ring import HEAD, RING_BYTES, SLEEPING, TAIL
from simm.ipc.session import WorkerSession
from simm.wire import messages as M
from simm.wire.messages import Status
from tests.support.consistency import check
from tests.support.measures import measured
from tests.support.waiting import WAIT_S, wait_until
from tests.support.worker_thread import WorkerThread

A, B = Hasher("a"), Hasher("b")
KEYS = [f"k{number}" for number in range(40)]


def value_of(key: str) -> bytes:
    return key.encode() * 100


@pytest.fixture
def worker() -> Iterator[WorkerThread]:
    with WorkerThread() as running:
        yield running


class Tenant:
    """A session of namespace ``a`` with values, a pin, and grants that it has not spent."""

    def __init__(self, worker: WorkerThread) -> None:
        self.worker = worker
        self.channel, self.welcome = worker.hello(namespace="a")
        grants = self.channel.call(M.Grant([(400, len(KEYS) + 10)])).grants
        entries = []
        for key, (number, offset, _) in zip(KEYS, grants):
            value = value_of(key)
            worker.segment.buf[offset : offset + len(value)] = value
            entries.append((A(key), number, len(value), 0, 0, 0))
        assert set(self.channel.call(M.Commit(entries, [])).statuses) == {Status.OK}
        self.grants = grants[len(KEYS) :]
        for _, offset, chunk in self.grants:
            worker.segment.buf[offset : offset + chunk] = b"\xa5" * chunk
        self.pins = [entry[5] for entry in self.channel.call(M.Locate(1, [A(KEYS[0])])).entries]
        assert all(self.pins)

    def assert_whole(self) -> None:
        """Nothing of it has changed, and what it holds is still its own."""
        buf = self.worker.segment.buf
        for key, (status, _, length, _, offset, _) in zip(
            KEYS, self.channel.call(M.Locate(0, [A(key) for key in KEYS])).entries
        ):
            assert status == Status.OK and bytes(buf[offset : offset + length]) == value_of(key)
        assert all(bytes(buf[offset : offset + chunk]) == b"\xa5" * chunk for _, offset, chunk in self.grants)
        with self.worker.frozen() as store:
            check(store)
            mine = store.sessions.by_id[self.welcome.session]
            assert set(mine.grants) == {number for number, _, _ in self.grants} and set(mine.pins) == set(self.pins)

    def close(self) -> None:
        assert self.channel.call(M.Unpin(self.pins)).items == len(self.pins)
        assert self.channel.call(M.ReturnGrants([number for number, _, _ in self.grants])).items == len(self.grants)
        self.channel.close()


def free_bytes(worker: WorkerThread) -> int:
    with worker.frozen() as store:
        return int(store.stats()["free_bytes"])


def try_everything(worker: WorkerThread, tries: int) -> None:
    before = free_bytes(worker)
    tenant = Tenant(worker)
    with worker.frozen() as store:
        held = int(store.stats()["free_bytes"])
    channel, welcome = worker.hello(namespace="b")
    rng = random.Random(tries)
    foreign = [number for number, _, _ in tenant.grants]
    base = (welcome.session >> 40) << 40
    for each in range(tries):
        what = each % 6
        guess = rng.choice((rng.choice(foreign), tenant.pins[0], base + rng.randrange(300), rng.getrandbits(64)))
        key = B(rng.choice(KEYS))  # the same keys, in its own namespace
        if what == 0:
            assert channel.call(M.Commit([(key, guess, 300, 0, 0, 0)], [])).statuses == [Status.STALE_GRANT]
        elif what == 1:
            assert channel.call(M.ReturnGrants([guess])).items == 0
        elif what == 2:
            assert channel.call(M.Unpin([guess])).items == 0
        elif what == 3:
            assert channel.call(M.Delete([key])).statuses == [Status.NOT_FOUND]
        elif what == 4:
            ((status, *_),) = channel.call(M.Locate(rng.randrange(2), [key])).entries
            assert status == Status.NOT_FOUND
        else:
            assert channel.call(M.Exists([key])).statuses == [Status.NOT_FOUND]
    # A length beyond the own chunk, which would publish the neighbour's bytes.
    ((number, _, chunk),) = channel.call(M.Grant([(400, 1)])).grants
    assert channel.call(M.Commit([(B("k"), number, chunk + 1, 0, 0, 0)], [])).statuses == [Status.BAD_REQUEST]
    tenant.assert_whole()
    with worker.frozen() as store:
        free = int(store.stats()["free_bytes"])
    assert free == held
    channel.close()
    tenant.close()
    other, _ = worker.hello(namespace="a")
    assert set(other.call(M.Delete([A(key) for key in KEYS])).statuses) == {Status.OK}
    other.close()
    wait_until(lambda: free_bytes(worker) == before, "all bytes are free again")


@pytest.mark.fault("F27", ci=3000)
def test_nothing_of_another_session_can_be_named(worker: WorkerThread) -> None:
    try_everything(worker, 3000)


@pytest.mark.fault("F27", whole=100_000)
@pytest.mark.slow
def test_nothing_of_another_session_can_be_named_long(worker: WorkerThread) -> None:
    try_everything(worker, 100_000)


def test_control_ids_that_are_not_checked_are_seen(worker: WorkerThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grants are looked up among those of all sessions."""
    from simm.arena.sessions import SessionTable

    real = SessionTable.return_grants

    def return_grants(self: SessionTable, session: object, numbers: list[int]) -> int:
        return sum(real(self, each, numbers) for each in list(self.by_id.values()))

    monkeypatch.setattr(SessionTable, "return_grants", return_grants)
    with pytest.raises(AssertionError):
        try_everything(worker, 600)


# -- F12: a client that writes at random into what it shares with the worker -------------------------------


def scribble(session: WorkerSession, rng: random.Random) -> None:
    """Overwrite a few places of the commit ring, as often as not its words."""
    ring = session.ring
    assert ring is not None
    for _ in range(rng.randint(1, 8)):
        if rng.random() < 0.5:
            ring.words[rng.choice((HEAD, TAIL, SLEEPING, rng.randrange(len(ring.words))))] = rng.choice(
                (0, 1, rng.randrange(64), rng.getrandbits(64), (1 << 64) - 1)
            )
        else:
            at = rng.randrange(RING_BYTES - 64)
            ring._map[at : at + 64] = rng.randbytes(64)


def ring_storm(worker: WorkerThread, rounds: int) -> None:
    tenant = Tenant(worker)
    before = free_bytes(worker)
    rng = random.Random(rounds)
    ended = 0
    wild = worker.session(deadline_s=WAIT_S)
    for _ in range(rounds):
        scribble(wild, rng)
        with contextlib.suppress(TransportError):
            wild.channel.submit(M.Kick(rng.getrandbits(32)))
        if rng.random() < 0.2:
            with contextlib.suppress(TransportError):  # a bare poll would look before a busy machine's worker has run
                wild.channel.call(M.Ping(0))
        if wild.broken:
            ended += 1
            wild.close(clean=False)
            wild = worker.session(deadline_s=WAIT_S)
    assert ended, "the worker ends sessions whose ring makes no sense"
    wild.close(clean=False)
    tenant.assert_whole()
    # The wild sessions' grants, if a frame of theirs made sense, go back once their process says so.
    last = worker.session()
    last.release_retired()
    last.close()
    wait_until(lambda: free_bytes(worker) == before, "what they held is free again")
    assert worker.worker.loop.handler_errors == 0, "the worker met a bug of its own"
    measured(f"{rounds} rounds of random bytes in a commit ring: sessions ended", ended, "sessions")
    tenant.close()


@pytest.mark.fault("F12", ci=600)
def test_a_ring_of_random_bytes_harms_nobody_else(worker: WorkerThread) -> None:
    ring_storm(worker, 600)


@pytest.mark.fault("F12", whole=100_000)
@pytest.mark.slow
def test_a_ring_of_random_bytes_harms_nobody_else_long(worker: WorkerThread) -> None:
    ring_storm(worker, 100_000)

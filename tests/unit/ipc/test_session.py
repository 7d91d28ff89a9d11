"""How a session ends: chunks under copies and views of a broken one are nobody else's until those have ended.

A real worker runs in a thread; it dies and comes back as told, so every interleaving here is scripted.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import threading
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from simm.arena.hashing import Hasher
from simm.client import View
from simm.errors import TransportError
from simm.host import buffers
from simm.ipc import commit_ring, grant_pool
from simm.ipc import session as session_module
from simm.ipc.commit_ring import ABANDONED, ANNOUNCED, ANNOUNCED_MAX_NS
from simm.ipc.put import ShmPut
from simm.ipc.session import WorkerSession
from simm.ipc.steps import finish
from simm.net.channel import Refused
from simm.rpc import Frame, reply
from simm.wire import messages as M
from simm.wire.messages import Status
from tests.support.client_values import forked
from tests.support.consistency import check
from tests.support.waiting import wait_until
from tests.support.worker_thread import WorkerThread

digest_of = Hasher("default")
MIB = 1 << 20


@pytest.fixture
def worker() -> Iterator[WorkerThread]:
    session_module.RETIRED.clear()
    with WorkerThread() as running:
        yield running
    session_module.RETIRED.clear()


def grant_of(session: WorkerSession, size: int) -> tuple[int, int, int]:
    session.ask([(size, 1)])
    grant = session.pool.take(size)
    assert grant is not None
    return grant


def put(session: WorkerSession, key: str, data: bytes) -> int:
    """One PUT, by hand. The chunk's offset."""
    grant = grant_of(session, len(data))
    session.begin_copy()
    start = grant[1] - session.reader.data_offset
    session.reader.data[start : start + len(data)] = data
    session.end_copy()
    answer = session.exchange(M.Commit([(digest_of(key), grant[0], len(data), 0, 0, 0)], []))
    assert answer.statuses == [Status.OK]
    return grant[1]


def view(session: WorkerSession, key: str) -> View:
    seen, status, *_ = View.of_pin(session, digest_of(key))
    assert seen is not None and status == Status.OK
    return seen


def fill(session: WorkerSession, size: int) -> set[int]:
    """Put until things are evicted; the offsets that were used."""
    used = set()
    for number in range(3 * (16 * MIB // size)):
        used.add(put(session, f"fill {number}", bytes([number % 251]) * size))
    return used


def test_issue_a_view_outlives_its_session(worker: WorkerThread) -> None:
    """The next session of the process named the old one free, as no copy was running: but a view was."""
    first = worker.session()
    offset = put(first, "seen", b"s" * MIB)
    seen = view(first, "seen")
    worker.die()
    worker.start()
    with pytest.raises(TransportError):
        first.exchange(M.Ping(1))
    first.close(clean=False)
    second = worker.session()
    second.maintain()
    assert offset not in fill(second, MIB)
    assert bytes(seen.data) == b"s" * MIB
    seen.close()
    gc.collect()
    second.maintain()  # now it is free, and the worker hears of it from the session there is
    with worker.frozen() as store:
        assert first.session not in store.sessions.by_id and store.stats()["pins"] == 0
        check(store)
    second.close()


def test_issue_a_pin_without_a_broken_session_ends_with_its_view(worker: WorkerThread) -> None:
    session = worker.session()
    put(session, "seen", b"s" * MIB)
    array = (ctypes.c_ubyte * 16)()
    seen = view(session, "seen")
    inner = memoryview(seen.data)[16:32]  # made from it, and alive longer
    seen.close()
    session.maintain()
    with worker.frozen() as store:
        assert store.stats()["pins"] == 1
    array[:] = inner
    assert bytes(array) == b"s" * 16
    del inner
    gc.collect()
    session.maintain()
    with worker.frozen() as store:
        assert store.stats()["pins"] == 0
    assert not session.copying
    session.close()


def test_a_view_is_alive_after_its_client_closed_and_then_given_back(worker: WorkerThread) -> None:
    first = worker.session()
    offset = put(first, "seen", b"s" * MIB)
    seen = view(first, "seen")
    first.close()
    second = worker.session()
    second.maintain()
    assert offset not in fill(second, MIB)
    assert bytes(seen.data) == b"s" * MIB
    del seen
    gc.collect()
    second.maintain()
    with worker.frozen() as store:
        assert len(store.sessions.by_id) == 1 and store.stats()["pins"] == 0
    second.close()


def test_a_copy_that_runs_on_after_a_break_writes_into_nobodys_chunk(worker: WorkerThread) -> None:
    """The thread is in the middle of its memmove when the worker dies, returns, and the process connects anew."""
    first = worker.session()
    grant = grant_of(first, MIB)
    first.begin_copy()
    worker.die()
    worker.start()
    with pytest.raises(TransportError):
        first.exchange(M.Ping(1))
    first.close(clean=False)
    second = worker.session()
    second.maintain()
    used = fill(second, MIB)
    assert grant[1] not in used
    start = grant[1] - first.reader.data_offset
    first.reader.data[start : start + MIB] = b"L" * MIB  # late
    for number in range(1000):
        found = second.reader.locate(digest_of(f"fill {number}"))
        if found is not None:
            assert bytes(second.reader.value(found)) == bytes([number % 251]) * MIB
    first.end_copy()
    second.maintain()
    with worker.frozen() as store:
        assert list(store.sessions.by_id) == [second.session]
    second.close()


def test_issue_no_copy_begins_after_the_end(worker: WorkerThread) -> None:
    """A thread had taken its grant and not begun its copy when the session was retired: nothing held it back."""
    first = worker.session()
    grant_of(first, MIB)
    first.close(clean=False)
    second = worker.session()
    with worker.frozen() as store:
        assert first.session not in store.sessions.by_id  # rightly: nobody copies
    with pytest.raises(TransportError):
        first.begin_copy()
    assert not first.copying
    second.close()


def test_release_is_believed_though_the_end_was_not_seen(worker: WorkerThread) -> None:
    """test_issue: a forked child that holds the socket, or an end still in the queue, made it stay for ever."""
    first = worker.session()
    grant_of(first, MIB)
    held = os.dup(first.channel.fileno())  # as a child of a fork would
    first.close(clean=False)
    second = worker.session()
    with worker.frozen() as store:
        assert list(store.sessions.by_id) == [second.session]
        assert store.sessions.granted_bytes == 0
    os.close(held)
    second.close()


def test_sessions_of_other_processes_and_arenas_are_not_released(worker: WorkerThread) -> None:
    first = worker.session()
    grant_of(first, MIB)
    first.close(clean=False)
    retired = session_module.RETIRED[0]
    with worker.frozen() as store:
        store.sessions.by_id[first.session].pid += 1  # somebody else's
    second = worker.session()
    with worker.frozen() as store:
        assert first.session in store.sessions.by_id
        store.sessions.by_id[first.session].pid -= 1
    session_module.RETIRED[:] = [retired._replace(segment="another")]
    second.maintain()
    with worker.frozen() as store:
        assert first.session in store.sessions.by_id
    assert second.exchange(M.ReleaseSessions([second.session, 12345])) == M.Done(0)  # not itself, nor what is not there
    second.close()


def test_pins_whose_release_failed_are_released_by_the_next_session(
    worker: WorkerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = worker.session()
    put(first, "k", b"k" * 4096)
    first.begin_copy()
    ((status, *_, pin),) = first.pin_many([digest_of("k")])
    assert status == M.Status.OK
    first.unpin_later(pin)
    second = worker.session()
    first.close(clean=False)  # a copy of it goes on

    with monkeypatch.context() as patch:
        patch.setattr(second, "exchange", lost)
        with pytest.raises(TransportError):
            second.release_retired()
    with worker.frozen() as store:
        assert store.sessions.pinned_bytes
    second.release_retired()
    with worker.frozen() as store:
        assert not store.sessions.pinned_bytes
    first.end_copy()
    second.maintain()
    second.close()


def test_pins_are_released_on_the_way_before_others_are_made(worker: WorkerThread) -> None:
    """What is released makes room for what is pinned, in one wait. If that fails, the release is not forgotten."""
    with contextlib.closing(worker.session()) as session:
        put(session, "k", b"k" * 4096)
        put(session, "l", b"l" * 4096)
        session.begin_copy()
        before = [session.pin_one(digest_of("k"))[5] for _ in range(20)]
        with worker.frozen() as store:
            store.sessions.pinned_bytes_max = 24 * 4096  # of which one session gets four fifths
        assert session.pin_one(digest_of("l"))[0] == Status.NO_SPACE
        for pin in before:
            session.unpin_later(pin)
        (entry,) = session.pin_many([digest_of("l")])
        assert entry[0] == Status.OK and not session.unpins
        with worker.frozen() as store:
            assert store.stats()["pins"] == 1
        many = [session.pin_one(digest_of("k"))[5] for _ in range(16)]
        for pin in many:
            session.unpin_later(pin)
        real, session.frame_locked = session.frame_locked, lost  # type: ignore[method-assign]
        with pytest.raises(TransportError):
            session.pin_many([digest_of("l")])
        assert sorted(session.unpins) == sorted(many)
        session.frame_locked = real  # type: ignore[method-assign]
        session.end_copy()
        session.flush_unpins()
        assert len(session.unpins) == 1, "what was pinned for the call that failed"
        session.flush_unpins()
        assert not session.frames and not session.forsaken, "nor is the answer to it kept"
        with worker.frozen() as store:
            assert store.stats()["pins"] == 1


def lost(_ticket: int, _items: int = 1) -> Any:
    raise TransportError("the connection was lost")


def test_a_client_that_closed_leaves_no_chunk_behind(worker: WorkerThread) -> None:
    session = worker.session()
    put(session, "k", b"k" * 4096)
    session.ask([(4096, 20), (MIB, 1)])
    session.close()
    with worker.frozen() as store:
        assert not store.sessions.by_id and store.sessions.granted_bytes == 0
        check(store)


def test_issue_waking_a_worker_whose_session_has_been_closed_meanwhile(worker: WorkerThread) -> None:
    """The background thread unmapped the ring while a put was about to look at its flag: a ValueError in the engine."""
    session = worker.session()
    ring = session.ring
    assert ring is not None
    session.close(clean=False)
    session.wake()
    assert ring.words[0] == ABANDONED  # whoever has it still may look at it
    for what in (lambda: session.commit_one(bytes(16), 1, 1, 0, 0, 1, 1), lambda: session.exchange(M.Ping(1))):
        with pytest.raises(TransportError):
            what()


def test_recalled_grants_come_back_from_an_idle_client(worker: WorkerThread) -> None:
    hog, other = worker.session(), worker.session()
    hog.ask([(65536, 1000)])
    kept = hog.pool.count(65536)
    other.ask([(65536, 1000)])
    got = other.pool.count(65536)
    assert 0 < got < kept
    wait_until(lambda: hog.maintain() > 0, "the worker asks the hog")
    assert hog.pool.count(65536) == kept - 2
    other.ask([(65536, 1)])
    assert other.pool.count(65536) == got + 1
    hog.close()
    other.close()


def test_a_process_that_ends_frees_what_it_held(worker: WorkerThread) -> None:
    """By its pidfd, not by the end of its connection, which a child still holds open."""
    near, far = os.pipe()
    done, go = os.pipe()

    def dies() -> bool:
        os.close(near)
        os.close(go)
        session = WorkerSession(worker.path, "default", 20.0)
        session.ask([(MIB, 1)])
        if not os.fork():
            os.read(done, 1)  # the grandchild keeps the socket
            os._exit(0)
        return os.write(far, session.session.to_bytes(8, "little")) == 8

    def live() -> bool:
        with worker.frozen() as store:
            return number in store.sessions.by_id

    try:
        assert forked(dies) == 0
        os.close(far)
        number = int.from_bytes(os.read(near, 8), "little")
        assert number, "it had a session"
        wait_until(lambda: not live(), "the session ends with its process")
        with worker.frozen() as store:
            assert store.sessions.granted_bytes == 0
            check(store)
    finally:
        for fd in (go, near, done):
            os.close(fd)


def test_after_a_restart_only_the_living_are_quarantined(worker: WorkerThread) -> None:
    session = worker.session()
    grant_of(session, MIB)
    with worker.frozen() as store:
        alive = store.sessions.by_id[session.session]
        dead = store.sessions.open(alive.pid, alive.started + 1, "default")  # a pid that is another's by now
        gone = store.sessions.open((1 << 22) - 1, 5, "default")
        store.sessions.grant(dead, MIB, 1)
        store.sessions.grant(gone, MIB, 1)
    worker.die()
    worker.start()
    with worker.frozen() as store:
        assert list(store.sessions.by_id) == [session.session]
        assert store.sessions.granted_bytes == MIB
    with contextlib.suppress(TransportError):
        session.exchange(M.Ping(1))
    session.close(clean=False)


def test_issue_a_large_batch_of_grants_fits_one_answer() -> None:
    """4,096 grants of 20 bytes do not fit a slot of 32 KiB: the session broke."""
    with WorkerThread(256 * MIB) as worker:
        session = worker.session()
        session.ask([(4096, 1024)])
        assert len(session.pool.stocks[4096]) == 1024
        session.close()


def sync_asks(session: WorkerSession, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by an item each time that somebody waits for grants with nothing else to do."""
    asks: list[int] = []
    ask = session.ask

    def counted(wants: Sequence[tuple[int, int]]) -> None:
        asks.extend(count for _, count in wants)
        ask(wants)

    monkeypatch.setattr(session, "ask", counted)
    return asks


def held_by(worker: WorkerThread, session: WorkerSession) -> tuple[set[int], set[int]]:
    """Grant ids that the worker holds for a session, and those that its client knows of or will be told of."""
    with worker.frozen() as store:
        store.apply_pending()
        check(store)
        mine = store.sessions.by_id[session.session]
        known = {grant[0] for pool in session.pool.stocks.values() for grant in pool}
        return set(mine.grants), known | {grant[0] for grant in mine.prepared}


def stored(session: WorkerSession, key: str) -> bytes:
    found = session.reader.locate(digest_of(key))
    return bytes(session.reader.value(found)) if found is not None else b""


def test_a_large_value_has_its_grant_ahead_from_the_third_of_its_size_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """And none stays behind when no more of them come, nor for sizes that came once."""
    size = (4 << 20) + 1
    monkeypatch.setattr(grant_pool, "LARGE_IDLE_S", 1e6)
    with WorkerThread(320 * MIB) as worker:
        session = worker.session()
        asks = sync_asks(session, monkeypatch)
        path = ShmPut(buffers.Copier(1), checksum=False)
        for number in range(6):
            assert path.put_one(session, digest_of(f"k{number}"), memoryview(bytes([number]) * size)) == Status.OK
            assert stored(session, f"k{number}") == bytes([number]) * size
        assert asks == [1, 2]
        assert len(held_by(worker, session)[0]) == 2
        assert path.put_one(session, digest_of("other"), memoryview(bytes(size + 4096))) == Status.OK
        assert asks == [1, 2, 1]
        session.maintain()
        assert len(held_by(worker, session)[0]) == 2  # of the size before; it may come back
        pool = session.pool
        pool._large = (pool._large[0], pool._large[1] - 1e6)
        session.maintain()
        assert held_by(worker, session) == (set(), set())
        session.close()


def test_no_large_grant_is_kept_where_it_is_much_of_what_all_may_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    with WorkerThread(64 * MIB) as worker:
        session = worker.session()
        asks = sync_asks(session, monkeypatch)
        path = ShmPut(buffers.Copier(1), checksum=False)
        for _ in range(4):
            assert path.put_one(session, digest_of("k"), memoryview(bytes(5 * MIB))) == Status.OK
            assert held_by(worker, session) == (set(), set())
        assert asks == [1] * 4
        session.close()


@pytest.mark.parametrize("ring", [True, False])
@pytest.mark.parametrize("size", [700, 64 << 10, 300_000, MIB, 5 * MIB])
def test_batches_of_any_size_are_stored_and_leave_no_grant_unknown(size: int, ring: bool) -> None:
    """More than the session may hold at once, so that grants run out in the middle."""
    with WorkerThread(96 * MIB) as worker:
        session = worker.session(ring=ring)
        path = ShmPut(buffers.Copier(1), checksum=True)
        count = min(40, 48 * MIB // size)
        for turn in range(3):
            values = [memoryview(bytes([turn * 50 + number]) * size) for number in range(count)]
            digests = [digest_of(f"b{number}") for number in range(count)]
            statuses = [99] * count
            path.put_many(session, digests, values, range(count), statuses)
            assert statuses == [Status.OK] * count
            for number, value in enumerate(values):
                assert stored(session, f"b{number}") == value
            held, known = held_by(worker, session)
            assert held == known
            with worker.frozen() as store:
                assert store.sessions.granted_bytes <= store.sessions.granted_bytes_max
        session.close()


@pytest.mark.parametrize("at", [0, 1, 7, 19])
def test_an_interrupted_batch_loses_no_grant(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """test_issue: chunks that were filled and not committed yet stayed the session's until its end, unknown to it."""
    with WorkerThread(256 * MIB) as worker:
        session = worker.session()
        path = ShmPut(buffers.Copier(1), checksum=False)
        copies: list[int] = []
        copy = path._copier.copy

        def interrupted(target: int, source: int, size: int, *node: int) -> None:
            if len(copies) == at:
                raise KeyboardInterrupt
            copies.append(size)
            copy(target, source, size, *node)

        monkeypatch.setattr(path._copier, "copy", interrupted)
        values = [memoryview(bytes([number]) * MIB) for number in range(20)]
        with pytest.raises(KeyboardInterrupt):
            path.put_many(session, [digest_of(f"i{n}") for n in range(20)], values, range(20), [99] * 20)
        held, known = held_by(worker, session)
        assert held == known and not session.copying and not session.frames
        for number in range(20):
            assert stored(session, f"i{number}") in (b"", values[number])
        session.close()


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("at", [0, 5, 16, 40, 59])
def test_an_interrupted_batch_of_small_values_loses_no_grant(
    at: int, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are copied in runs, whose grants are given back together."""
    with WorkerThread(64 * MIB) as worker:
        session = worker.session()
        path = ShmPut(buffers.Copier(1), checksum=True)
        data = [ctypes.create_string_buffer(bytes([number]) * 4096, 4096) for number in range(60)]
        values = [buffers.Span(ctypes.addressof(each), 4096, keep=each) for each in data]
        digests = [digest_of(f"s{number}") for number in range(60)]
        for _ in range(20):
            if session.pool.count(4096) > 64:
                break
            path.put_many(session, digests, values, range(60), [99] * 60)
        assert session.pool.count(4096) > 64
        copies: list[int] = []

        def interrupted(target: int, source: int, size: int) -> None:
            if len(copies) == at:
                raise KeyboardInterrupt
            copies.append(size)
            buffers.memmove(target, source, size)

        monkeypatch.setattr("simm.ipc.put.memmove", interrupted)
        digests = [digest_of(f"t{number}") for number in range(60)]
        steps = path.put_steps(session, digests, values, range(60), [99] * 60, together=together)
        with pytest.raises(KeyboardInterrupt):
            finish(steps)
        held, known = held_by(worker, session)
        assert held == known and not session.copying and not session.frames
        for number in range(60):
            assert stored(session, f"t{number}") in (b"", data[number].raw)
        session.close()


def test_an_announced_commit_is_believed_for_milliseconds(
    worker: WorkerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = worker.session()
    ring = session.ring
    assert ring is not None
    with worker.frozen():
        rings = worker.worker.rings
        rings.active = [(ring, worker.worker.peers[session.session])]
        now = time.monotonic()
        monkeypatch.setattr(commit_ring, "time", SimpleNamespace(monotonic_ns=lambda: int(now * 1e9)))
        assert not rings._commit_announced(now)
        session.announce_commit(MIB)
        assert rings._commit_announced(now) and not rings._commit_announced(now + ANNOUNCED_MAX_NS / 1e9)
        session.clear_announcement()
        assert not rings._commit_announced(now)
        session.announce_commit(100)  # not worth it
        assert not rings._commit_announced(now)
        ring.words[ANNOUNCED] = (1 << 64) - 1
        assert not rings._commit_announced(now)
        rings.active = []
        monkeypatch.undo()
    session.close()


def test_issue_an_interrupted_copy_has_ended_when_it_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle of a copy by threads: its chunk went back to the pool while they were still writing."""
    started, interrupted, ended = threading.Barrier(3), threading.Event(), []
    main = threading.current_thread()

    def stalled(_target: int, _source: int, _size: int) -> None:
        if interrupted.is_set():
            return  # another part of a thread that was faster than the interruption
        started.wait()
        if threading.current_thread() is main:
            interrupted.set()
            raise KeyboardInterrupt
        interrupted.wait()
        ended.append(1)

    monkeypatch.setattr(buffers.Copier, "_ways", [stalled] * 64)
    copier = buffers.Copier(3)
    with pytest.raises(KeyboardInterrupt):
        copier.copy(0, 0, buffers.SPLIT_BYTES)
    assert len(ended) == 2
    copier.close()


def test_an_interrupted_close_leaves_no_grants(worker: WorkerThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C within close(): the grants stayed the process's to its end, as no later session knew of them."""
    session = worker.session()
    session.ask([(4096, 10)])

    def interrupted(_holder: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(session_module.grant_pool, "return_idle", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.close()
    later = worker.session()  # releases it
    with worker.frozen() as store:
        assert session.session not in store.sessions.by_id
    later.close()


# -- what a worker answers -------------------------------------------------------------------------------


@pytest.mark.parametrize("ring", [True, False])
@pytest.mark.parametrize(("offset", "length"), [(0, 10), (1 << 40, 10), (None, 1 << 31)])
def test_a_pin_outside_of_the_data_breaks_the_session(
    worker: WorkerThread, monkeypatch: pytest.MonkeyPatch, offset: int | None, length: int, ring: bool
) -> None:
    with contextlib.closing(worker.session(ring=ring)) as session:
        put(session, "key", b"value")
        at = session.reader.data_offset if offset is None else offset
        with worker.frozen() as store:
            monkeypatch.setattr(store, "locate", lambda *_: [(int(Status.OK), 0, length, 0, at, 1)])
        session.begin_copy()
        with pytest.raises(TransportError, match="outside of the data"):
            session.pin_one(digest_of("key"))
        session.end_copy()
        assert session.channel.broken
        monkeypatch.undo()
    with contextlib.closing(worker.session(ring=ring)) as session:
        status, _, size, _, at, pin = session.pin_one(digest_of("key"))
        assert (status, size) == (Status.OK, 5)
        assert bytes(session.reader.data[at - session.reader.data_offset :][:5]) == b"value"
        session.unpin_later(pin)


@pytest.mark.parametrize("answer", [M.Done(1), M.Located([]), M.Located([(0, 0, 5, 0, 1 << 20, 1)] * 2)], ids=repr)
def test_a_pin_that_is_answered_by_something_else_breaks_the_session(
    worker: WorkerThread, monkeypatch: pytest.MonkeyPatch, answer: Any
) -> None:
    with contextlib.closing(worker.session()) as session:
        with worker.frozen():
            rings = worker.worker.rings
            monkeypatch.setattr(rings, "_handle", lambda _, frame: reply(answer, frame.request_id))
        session.begin_copy()
        with pytest.raises(TransportError, match="something else"):
            session.pin_one(digest_of("key"))
        session.end_copy()
        monkeypatch.undo()


@pytest.mark.parametrize("ring", [True, False])
def test_views_release_those_before_them(worker: WorkerThread, ring: bool) -> None:
    """Pins of ended views are released sixteen at a time, with the pin of a later one."""
    with contextlib.closing(worker.session(ring=ring)) as session:
        put(session, "key", b"value")
        most = 0
        for _ in range(100):
            view(session, "key").close()
            with worker.frozen() as store:
                most = max(most, len(store.sessions.by_id[session.session].pins))
        assert 1 < most <= 17
        session.flush_unpins()
        with worker.frozen() as store:
            assert not store.sessions.by_id[session.session].pins and not session.copying


def test_pins_whose_release_is_refused_are_released_later(
    worker: WorkerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(worker.session()) as session:
        put(session, "key", b"value")
        for _ in range(16):
            view(session, "key").close()
        queued = sorted(session.unpins)
        plain = worker.worker.rings._handle

        def refusing(peer: Any, frame: Frame) -> bytes:
            if frame.opcode == M.OPCODES[M.Unpin]:
                return reply(M.Error("not now"), frame.request_id, Status.UNAVAILABLE)
            return plain(peer, frame)

        with worker.frozen():
            monkeypatch.setattr(worker.worker.rings, "_handle", refusing)
        session.begin_copy()
        with pytest.raises(Refused, match="not now"):
            session.pin_one(digest_of("key"))
        session.end_copy()
        assert {*queued} < {*session.unpins} and len(session.unpins) == len(queued) + 1, "the one without a view, too"
        monkeypatch.undo()
        session.flush_unpins()
        with worker.frozen() as store:
            assert not store.sessions.by_id[session.session].pins


def test_the_pool_takes_only_grants_within_the_arena(worker: WorkerThread) -> None:
    with contextlib.closing(worker.session()) as session:
        geometry = session.reader.geometry
        assert session.pool.within == (geometry.data_offset, geometry.data_end)

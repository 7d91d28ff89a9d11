"""Clients that hang up while the worker is late: whatever the stream waits for then, it withdraws their STOREs.

test_stream_silence.py has what outlives a silence.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Final

import pytest

from simm.errors import DeadlineError, NotSentError, TransportError
from simm.ipc import grant_pool, pins
from simm.ipc.grant_pool import GrantPool
from simm.ipc.session import WorkerSession
from simm.net.channel import Channel, Refused
from simm.server import stream_put, worker_session
from simm.server.stream_put import COMMIT_KEYS
from simm.wire import messages as M
from simm.wire.messages import Status
from simm.wire.shard_set import FROZEN, bitmap_of, shards_in
from tests.support.newer_value import KEY, NEW, OLD, Newer, digest_of, stored
from tests.support.raw_stores import begin, end, store
from tests.support.waiting import WAIT_S, wait_until
from tests.support.worker_thread import StreamThread, WorkerThread, nothing_is_lost

#: A shard that no test stores anything in.
SHARD: Final = 5
#: Longer than a test waits for anything.
FOR_EVER_S = 2 * WAIT_S


@pytest.fixture
def worker() -> Iterator[WorkerThread]:
    with WorkerThread(128 << 20) as made:
        yield made


@pytest.fixture
def stream(worker: WorkerThread, monkeypatch: pytest.MonkeyPatch) -> Iterator[StreamThread]:
    """One that gives nothing up by itself, and has grants for a hundred small values."""
    monkeypatch.setattr(worker_session, "WORKER_DEADLINE_S", FOR_EVER_S)
    monkeypatch.setattr(worker_session, "SILENCE_S", FOR_EVER_S)
    with StreamThread(worker.path) as made:
        channel = made.channel()
        warm = [f"warm {number}" for number in range(2 * COMMIT_KEYS)]
        wait_until(lambda: store(channel, old(*warm)) == [Status.OK] * len(warm), "a session with the worker")
        channel.close()
        made.loop.call_later(0.0, lambda: session_of(made).ask([(len(OLD), 4 * COMMIT_KEYS)]))
        wait_until(lambda: session_of(made).pool.count(len(OLD)) >= 4 * COMMIT_KEYS, "grants")
        yield made


def old(*keys: str) -> dict[str, bytes]:
    return dict.fromkeys(keys, OLD)


def session_of(stream: StreamThread) -> WorkerSession:
    session = stream.stream.keeper.session
    assert session is not None
    return session


def check(newer: Newer, stream: StreamThread) -> None:
    """The newer value is stored, and stays when the stream has all answers."""
    newer.check()
    wait_until(lambda: not stream.stream.keeper.is_late(), "the stream has all answers")
    assert stored(newer.session) == NEW
    newer.session.close()


def own_answer(stream: StreamThread, gone: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop waits for the answer to its own commit."""
    monkeypatch.setattr(stream_put, "PATIENCE_S", FOR_EVER_S)
    begin(gone, old("key"))


def parked(stream: StreamThread, gone: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(gone, old("key"))
    wait_until(lambda: stream.stream.keeper.parked, "it is parked")


def more_to_come(stream: StreamThread, gone: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first values are committed, and others are on their way."""
    begin(gone, old("key", *(f"other {number}" for number in range(COMMIT_KEYS))), COMMIT_KEYS)


def asks(message: Callable[[], Any]) -> Callable[..., Channel]:
    """The loop waits for the answer to another client's question, beside a STORE of which more is to come.

    Returns the other client, which hangs up when it is forgotten.
    """

    def make(stream: StreamThread, gone: Channel, monkeypatch: pytest.MonkeyPatch) -> Channel:
        other = stream.channel()
        more_to_come(stream, gone, monkeypatch)
        wait_until(lambda: stream.stream.keeper.storing, "its first commit")
        other.submit(message())
        time.sleep(0.05)  # no matter if it is less
        return other

    return make


def no_room(stream: StreamThread, gone: Channel, monkeypatch: pytest.MonkeyPatch) -> Channel:
    """The worker's socket takes nothing more, which another client's DELETE waits for; see :func:`asks`."""
    other = stream.channel()
    more_to_come(stream, gone, monkeypatch)
    wait_until(lambda: stream.stream.keeper.storing, "its first commit")
    monkeypatch.setattr(session_of(stream).channel, "has_room", lambda: False)
    other.submit(M.Delete([digest_of("nothing")]))
    time.sleep(0.05)
    return other


WAITS = {
    "its own answer": own_answer,
    "parked": parked,
    "more of it is to come": more_to_come,
    "a PIN": asks(lambda: M.Pin(0, [digest_of("warm 1")])),
    "a DELETE": asks(lambda: M.Delete([digest_of("nothing")])),
    "an EXISTS": asks(lambda: M.FetchPrevious([(digest_of("nothing"), 100)])),
    "room in the socket": no_room,
}


@pytest.mark.parametrize("what", WAITS)
def test_issue_a_store_is_withdrawn_whatever_the_loop_waits_for(
    worker: WorkerThread, stream: StreamThread, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client was not looked at in some waits, for up to 2 s. The old value then replaced one that was put since."""
    session = session_of(stream)
    assert session.withdrawals is not None
    words, newer, gone = session.withdrawals.words, Newer(worker), stream.channel()
    with worker.frozen():
        newer.ring()
        kept = WAITS[what](stream, gone, monkeypatch)
        wait_until(lambda: stream.stream.keeper.storing, "its commit is under way")
        gone.close()
        wait_until(lambda: words[0], "the worker is told", WAIT_S / 2)
        newer.put()
        monkeypatch.undo()
    check(newer, stream)
    assert stream.stream.keeper.session is session and not any(words)
    del kept


@pytest.mark.parametrize("what", ["a PIN", "its own answer"])
def test_mutation_a_wait_that_does_not_look(
    worker: WorkerThread, stream: StreamThread, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = session_of(stream)
    assert session.withdrawals is not None
    monkeypatch.setattr(session, "_look", None)
    words, gone = session.withdrawals.words, stream.channel()
    with worker.frozen():
        kept = WAITS[what](stream, gone, monkeypatch)
        wait_until(lambda: stream.stream.keeper.storing, "its commit is under way")
        gone.close()
        with pytest.raises(AssertionError, match="the worker is told"):
            wait_until(lambda: words[0], "the worker is told", 0.5)
    wait_until(lambda: stored(session) == OLD, "it is stored late")
    del kept


def noted(session: WorkerSession, monkeypatch: pytest.MonkeyPatch) -> list[M.Freeze]:
    """The FREEZEs that the worker is sent from now on."""
    real, sent = session.submit, []

    def submit(msg: Any) -> int:
        ticket = real(msg)
        if isinstance(msg, M.Freeze):
            sent.append(msg)
        return ticket

    monkeypatch.setattr(session, "submit", submit)
    return sent


def test_issue_a_freeze_is_withdrawn_when_its_mover_hangs_up(
    worker: WorkerThread, stream: StreamThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was carried out however late, with nobody there any more who would adopt the shard."""
    session, gone, sent = session_of(stream), stream.channel(M.Role.MOVER), noted(session_of(stream), monkeypatch)
    assert session.withdrawals is not None
    words = session.withdrawals.words
    with worker.frozen():
        gone.submit(M.Freeze(2, bitmap_of([SHARD])))
        wait_until(lambda: sent, "the worker is asked")
        gone.close()
        wait_until(lambda: words[0], "the worker is told", WAIT_S / 2)
    wait_until(lambda: not stream.stream.keeper.is_late() and not any(words), "the stream has its answer")
    assert worker.store.shards[SHARD] == 1 and stream.stream.keeper.session is session


def test_issue_a_freeze_whose_mover_hung_up_while_the_loop_waited_freezes_nothing(
    worker: WorkerThread, stream: StreamThread
) -> None:
    session, gone, go_on, waits = session_of(stream), stream.channel(M.Role.MOVER), threading.Event(), threading.Event()

    def block() -> None:
        waits.set()
        go_on.wait(WAIT_S)

    stream.loop.call_later(0.0, block)
    assert waits.wait(WAIT_S)
    gone.submit(M.Freeze(2, bitmap_of([SHARD])))
    gone.close()
    go_on.set()
    wait_until(lambda: not stream.loop.peers, "it is closed")
    session.exchange(M.Exists([KEY]))  # the worker has done all that it was sent before
    assert worker.store.shards[SHARD] == 1


def test_a_mover_that_stays_has_its_shard_frozen(
    worker: WorkerThread, stream: StreamThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positive control of the two tests above."""
    stays, sent = stream.channel(M.Role.MOVER), noted(session_of(stream), monkeypatch)
    with worker.frozen():
        number = stays.submit(M.Freeze(2, bitmap_of([SHARD])))
        wait_until(lambda: sent, "the worker is asked")
    answer = stays.result(stays.wait(number))
    assert shards_in(answer.shards) == [SHARD] and worker.store.shards[SHARD] == FROZEN | 2
    stays.close()


@pytest.mark.parametrize("size", [10, 60_000])
def test_issue_a_client_that_hung_up_while_the_loop_waited_stores_nothing(
    worker: WorkerThread, stream: StreamThread, size: int
) -> None:
    """All of its STORE lay there when the loop went on. It took two turns to read, the second of which was quick."""
    session, gone, go_on, waits = session_of(stream), stream.channel(), threading.Event(), threading.Event()

    def block() -> None:
        waits.set()
        go_on.wait(WAIT_S)

    stream.loop.call_later(0.0, block)
    assert waits.wait(WAIT_S)
    gone.submit(M.Store([(KEY, size, 0, 0, 0)]))
    gone.sock.sendall(bytes(size))
    gone.close()
    go_on.set()
    wait_until(lambda: not stream.loop.peers, "it is closed")
    assert stored(session) is None
    nothing_is_lost(worker, session)


def test_issue_pins_of_the_parts_that_worked_are_released(
    worker: WorkerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were pinned for as long as the session lived, when a later part of the same call failed."""
    session = worker.session()
    session.ask([(len(OLD), 2)])
    for key in ("one", "two"):
        grant = session.pool.take(len(OLD))
        assert grant is not None
        assert session.commit_one(digest_of(key), grant[0], len(OLD), 0, 0, len(OLD), 0) == Status.OK
    monkeypatch.setattr(pins, "_PIN_KEYS", 1)
    real, asked = session.submit_locked, []

    def submit_locked(msg: Any) -> Any:
        asked.append(msg)
        if len(asked) == 2:
            raise DeadlineError("no")
        return real(msg)

    session.begin_copy()
    monkeypatch.setattr(session, "submit_locked", submit_locked)
    with pytest.raises(DeadlineError):
        session.pin_many([digest_of("one"), digest_of("two")])
    monkeypatch.setattr(session, "submit_locked", real)
    session.end_copy()
    session.flush_unpins()
    with worker.frozen() as arena:
        assert not arena.sessions.by_id[session.session].pins
    session.close()


def test_an_answer_that_nobody_waits_for_and_that_lies_ends_the_session(worker: WorkerThread) -> None:
    """It raises nothing where it is taken in, which may be a timer."""
    session = worker.session()
    session.pool.within = (0, 0)
    ticket = session.submit(M.Grant([(len(OLD), 3)]))
    session.kick(always=True)
    wait_until(lambda: session.has_answer(ticket), "an answer")
    session.disown(ticket)
    with pytest.raises(TransportError):
        session.exchange(M.Exists([KEY]))
    assert "outside of the data" in session.broken
    session.close()


def test_issue_hang_ups_do_not_fill_the_workers_socket(worker: WorkerThread, stream: StreamThread) -> None:
    """They did, and the next request was sent in part. That ended the session, and failed whoever had a STORE there."""
    session = session_of(stream)
    session.channel.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 10)
    waiting, asking = stream.channel(), stream.channel()
    with worker.frozen():
        number = begin(waiting, old("waits"))
        wait_until(lambda: stream.stream.keeper.parked, "it is parked")
        for turn in range(20):
            gone = stream.channel()
            gone.submit(M.Delete([digest_of(f"nothing {turn} {key}") for key in range(100)]))
            time.sleep(0.01)
            gone.close()
        assert not session.channel.has_room() and not session.broken
        others = [stream.channel() for _ in range(3)]
        late = [(channel, begin(channel, old(f"late {each}"))) for each, channel in enumerate(others)]
        asked = asking.submit(M.Delete([digest_of("warm 1")]))
        wait_until(lambda: len(stream.stream.keeper.parked) == 1 + len(late), "they wait, too")
    assert end(waiting, number) == [Status.OK] and end(asking, asked) == [Status.OK]
    assert stream.stream.keeper.session is session and stream.loop.handler_errors == 0
    assert [end(*each) for each in late] == [[Status.OK]] * 3, "what had no room is sent when there is"
    assert session.withdrawals is not None
    wait_until(lambda: not any(session.withdrawals.words), "all is answered")
    nothing_is_lost(worker, session)


def test_a_commit_waits_for_room(
    worker: WorkerThread, stream: StreamThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one whose worker is late with nothing. Values that are complete keep their grants."""
    session, channel = session_of(stream), stream.channel()
    number = begin(channel, old("key", "another"), 1)
    wait_until(lambda: stream.loop.peers, "it has come")
    with monkeypatch.context() as patched:
        patched.setattr(session.channel, "has_room", lambda: False)
        channel.sock.sendall(OLD)
        wait_until(lambda: stream.stream.keeper.parked, "it waits")
        assert not session.channel.late
    assert end(channel, number) == [Status.OK] * 2
    wait_until(lambda: not stream.stream.keeper.parked, "nothing waits")
    nothing_is_lost(worker, session)


def test_issue_nobody_hears_of_a_broken_session_that_has_not_ended(
    worker: WorkerThread, stream: StreamThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A send that failed only marked it. STOREs were told UNAVAILABLE, whose commits the worker then carried out."""
    keeper, session = stream.stream.keeper, session_of(stream)
    monkeypatch.setattr(keeper, "maintain", int)  # which ends it within a tenth of a second
    newer, told, other = Newer(worker), stream.channel(), stream.channel()
    had = session.pool.count(len(OLD))
    other_number = begin(other, old("a", "b"), 1)
    wait_until(lambda: session.pool.count(len(OLD)) == had - 2, "its second value is expected")

    def send(data: bytes, *_: Any) -> None:
        session.channel.fail("deadline passed while sending")

    with worker.frozen():
        newer.ring()
        number = begin(told, old("key"))
        wait_until(lambda: keeper.parked, "it is parked")
        monkeypatch.setattr(session.channel, "send_raw", send)
        other.sock.sendall(OLD)
        assert end(told, number) == [Status.UNAVAILABLE] and end(other, other_number) == [Status.UNAVAILABLE] * 2
        newer.put()
    check(newer, stream)


def test_issue_a_commit_that_is_refused_does_not_settle_the_others(
    worker: WorkerThread, stream: StreamThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that was under way counted as failed. The worker carried it out, and nobody would have withdrawn it."""
    real, refused = stream_put.collect, []

    def refuse_first(*arguments: Any) -> None:
        real(*arguments)
        if not refused:
            refused.append(True)
            arguments[2][:COMMIT_KEYS] = [int(Status.UNAVAILABLE)] * COMMIT_KEYS
            raise Refused(Status.BAD_REQUEST, "not this one")

    monkeypatch.setattr(stream_put, "collect", refuse_first)
    keys = [f"key {number}" for number in range(COMMIT_KEYS + 3)]
    assert store(stream.channel(), old(*keys)) == [Status.UNAVAILABLE] * COMMIT_KEYS + [Status.OK] * 3
    assert not stream.stream.keeper.storing
    nothing_is_lost(worker, session_of(stream))


def test_issue_an_answered_store_waits_for_nobody_else(worker: WorkerThread, stream: StreamThread) -> None:
    """It was parked for as long as the worker was late with anything, such as what others had withdrawn."""
    session, channel = session_of(stream), stream.channel()
    never = 1 << 30
    with worker.frozen():
        number = begin(channel, old("key"))
        wait_until(lambda: stream.stream.keeper.parked, "it is parked")
        session.channel.late[never] = False
    assert end(channel, number) == [Status.OK] and session.channel.late == {never: False}
    session.channel.late.clear()
    nothing_is_lost(worker, session)


@pytest.mark.parametrize("error", [NotSentError, DeadlineError])
@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_grants_that_could_not_be_returned_are_nobody_elses(
    error: type[TransportError], fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What may have been sent may be another's now. What was not sent is in the pool as before."""
    monkeypatch.setattr(grant_pool, "batches", lambda grants: (grants[at : at + 2] for at in range(0, len(grants), 2)))
    pool: GrantPool[tuple[int, int, int]] = GrantPool()
    pool.within = (0, 1 << 20)
    grants = [(number, number * 64, 64) for number in range(5)]
    pool.add(grants)
    returned: list[int] = []

    def give(numbers: list[int]) -> None:
        if len(returned) == 2 * fails_at:
            raise error("no")
        returned.extend(numbers)

    with pytest.raises(error):
        grant_pool.return_idle(SimpleNamespace(pool=pool, return_grants=give))  # type: ignore[arg-type]
    gone = 2 * fails_at + (0 if error is NotSentError else 2)
    left = pool.drain()
    assert len(left) == max(0, 5 - gone) and not {grant[0] for grant in left} & set(returned)

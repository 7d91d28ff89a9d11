"""A worker that is silent for longer than a stream waits for one: STOREs outlive it, and nothing is done late."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator

import pytest

from simm.arena.layout import ENTRY_LARGE
from simm.ipc.commit_ring import Withdrawals
from simm.server import stream_put, worker_session
from simm.server.worker_session import WorkerSessionKeeper
from simm.wire import messages as M
from simm.wire.messages import Status
from tests.support.raw_stores import begin, digest_of, end, store
from tests.support.waiting import WAIT_S, wait_until
from tests.support.worker_thread import StreamThread, WorkerThread, nothing_is_lost

#: Of the worker, in these tests.
DEADLINE_S = 0.5


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerThread]:
    monkeypatch.setattr(worker_session, "WORKER_DEADLINE_S", DEADLINE_S)
    monkeypatch.setattr(worker_session, "SILENCE_S", WAIT_S)
    with WorkerThread(128 << 20) as made:
        yield made


@pytest.fixture
def stream(worker: WorkerThread) -> Iterator[StreamThread]:
    with StreamThread(worker.path) as made:
        channel = made.channel()
        wait_until(lambda: store(channel, {"warm": bytes(10)}) == [Status.OK], "a session with the worker")
        assert store(channel, {"warm": bytes(10)}) == [Status.OK]  # its answer brings a grant for the next one
        channel.close()
        yield made


def fetched(stream: StreamThread, key: str) -> bytes | None:
    channel = stream.channel()
    number = channel.submit(M.Fetch([(digest_of(key), 1 << 20)]))
    status, _, length, _ = channel.result(channel.wait(number)).entries[0]
    value = bytearray(length if status == Status.OK else 0)
    channel.receive_bulk(memoryview(value))
    assert channel.result(channel.wait(number)).statuses == [Status.OK]
    channel.close()
    return bytes(value) if status == Status.OK else None


def committing(stream: StreamThread) -> None:
    """Wait until a STORE waits for the answer to a commit."""
    parked = stream.stream.keeper.parked
    wait_until(lambda: any(each.in_flight for each in parked), "a commit under way")  # type: ignore[attr-defined]


def waits(stream: StreamThread, stores: int) -> None:
    """Wait until so many STOREs wait for the worker, longer than anything else would."""
    keeper = stream.stream.keeper

    def silent() -> bool:
        session = keeper.session
        return len(keeper.parked) == stores and session is not None and session.channel.late_s > DEADLINE_S

    wait_until(silent, f"{stores} STOREs that wait")


@pytest.mark.parametrize("size", [10, 200_000, 5 << 20])
def test_issue_stores_outlive_a_silence(worker: WorkerThread, stream: StreamThread, size: int) -> None:
    """One whose commit is under way, or that asks for room, and one that comes later. Reads go on meanwhile."""
    session = stream.stream.keeper.session
    first, second = stream.channel(), stream.channel()
    with worker.frozen():
        numbers = [begin(first, {"a": b"a" * size})] if size < 1 << 20 else [
            first.submit(M.Store([(digest_of("a"), size, 0, 0, 0)]))  # it waits for room: nothing is read
        ]  # fmt: skip
        wait_until(lambda: len(stream.stream.keeper.parked) == 1, "the first one waits")
        numbers.append(begin(second, {"b": b"b" * 10, "c": b"c" * 100}))
        waits(stream, 2)
        assert fetched(stream, "warm") == bytes(10)
        assert fetched(stream, "a") is None
    if size >= 1 << 20:
        first.sock.sendall(b"a" * size)
    assert end(first, numbers[0]) == [Status.OK] and end(second, numbers[1]) == [Status.OK, Status.OK]
    assert stream.stream.keeper.session is session, "the session has lived on"
    assert fetched(stream, "b") == b"b" * 10 and fetched(stream, "c") == b"c" * 100
    assert session is not None
    nothing_is_lost(worker, session)


@pytest.mark.parametrize("late", [False, True])
def test_issue_the_first_value_of_a_namespace_outlives_a_silence(
    worker: WorkerThread, stream: StreamThread, late: bool
) -> None:
    """Its number is asked for first. That failed at once, or held up all other clients for two seconds.

    ``late``: the worker is known to be silent when the value comes.
    """
    session = stream.stream.keeper.session
    assert session is not None
    first, second = stream.channel(), stream.channel(namespace="another")
    numbers = []
    with worker.frozen():
        if late:
            numbers.append((first, begin(first, {"a": b"a" * 10})))
            waits(stream, 1)
        numbers.append((second, begin(second, {"b": b"b" * 20, "c": b"c" * 30})))
        wait_until(lambda: len(stream.stream.keeper.parked) == len(numbers), "it waits")
        assert fetched(stream, "warm") == bytes(10)
    assert [end(*each) for each in numbers] == [[Status.OK]] * late + [[Status.OK, Status.OK]]
    assert stream.stream.keeper.session is session, "the session has lived on"
    assert fetched(stream, "b") == b"b" * 20 and fetched(stream, "c") == b"c" * 30
    keeper = stream.stream.keeper
    assert "another" in keeper.names()
    found = session.reader.locate(digest_of("b"))
    assert found is not None and session.reader.namespace_of(found.slot) == keeper.namespace("another")
    nothing_is_lost(worker, session)


@pytest.mark.parametrize("deadline_s", [DEADLINE_S, 4 * WAIT_S])
def test_issue_what_a_client_has_given_up_is_not_stored_late(
    worker: WorkerThread, stream: StreamThread, deadline_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have put a newer value elsewhere meanwhile. What others wait for is stored, by the same session.

    Also if the client has a shorter deadline than the worker has for other requests.
    """
    monkeypatch.setattr(worker_session, "WORKER_DEADLINE_S", deadline_s)
    monkeypatch.setattr(worker_session, "SILENCE_S", 8 * WAIT_S)
    session = stream.stream.keeper.session
    assert session is not None and session.withdrawals is not None
    withdrawn = session.withdrawals.words
    channel, other = stream.channel(), stream.channel()
    with worker.frozen():
        begin(channel, {"old": b"old value."})
        committing(stream)
        number = begin(other, {"other": b"other"})
        if deadline_s == DEADLINE_S:
            waits(stream, 2)
        channel.close()
        wait_until(lambda: withdrawn[0] == 1, "the worker is told")
    assert end(other, number) == [Status.OK]
    wait_until(lambda: len(stream.loop.peers) == 1, "the one that has gone is closed")
    assert store(other, {"new": b"new"}) == [Status.OK]
    assert fetched(stream, "old") is None and fetched(stream, "new") == b"new"
    assert stream.stream.keeper.session is session and not any(withdrawn)
    nothing_is_lost(worker, session)


@pytest.mark.parametrize("why", ["no page", "no room"])
def test_where_nothing_can_be_withdrawn_the_session_ends(
    worker: WorkerThread, stream: StreamThread, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_session, "SILENCE_S", 8 * WAIT_S)
    session = stream.stream.keeper.session
    assert session is not None and session.withdrawals is not None
    if why == "no page":
        session.withdrawals = None
    else:
        session.withdrawals.words[0] = len(session.withdrawals.words) - 1
    channel = stream.channel()
    with worker.frozen():
        begin(channel, {"old": b"old value."})
        committing(stream)
        channel.close()
        wait_until(lambda: stream.stream.keeper.session is not session, "the session has ended")
        wait_until(lambda: not stream.stream.keeper.parked, "nothing waits")
    again = stream.channel()
    wait_until(lambda: store(again, {"new": b"new"}) == [Status.OK], "another session")
    assert fetched(stream, "old") is None and fetched(stream, "new") == b"new"


@pytest.mark.parametrize("fault", ["the client is not looked at", "the worker does not look"])
def test_mutation_what_was_given_up_is_stored(
    worker: WorkerThread, stream: StreamThread, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "the worker does not look":
        monkeypatch.setattr(Withdrawals, "has", lambda *_: False)
    else:
        monkeypatch.setattr(stream_put.Receiving, "look", lambda _: None)
    session = stream.stream.keeper.session
    assert session is not None and session.withdrawals is not None
    channel = stream.channel()
    with worker.frozen():
        begin(channel, {"old": b"old value."})
        committing(stream)
        waits(stream, 1)
        channel.close()
        if fault == "the worker does not look":
            wait_until(lambda: session.withdrawals.words[0], "it is withdrawn")
    wait_until(lambda: fetched(stream, "old") == b"old value.", "it is stored late")


@pytest.mark.parametrize("pause_s", [0.04, 0.12])
def test_issue_who_hangs_up_costs_others_nothing(
    worker: WorkerThread, stream: StreamThread, pause_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each pause of the worker some hang up. Each of them ended the session, and others' deletes failed with it."""
    monkeypatch.setattr(worker_session, "WORKER_DEADLINE_S", WAIT_S)
    add, withdrawn = Withdrawals.add, []
    monkeypatch.setattr(Withdrawals, "add", lambda page, number: (withdrawn.append(number), add(page, number))[1])
    session = stream.stream.keeper.session
    assert session is not None and session.withdrawals is not None
    session.deadline_s = WAIT_S
    over, failed = threading.Event(), []

    def delete() -> None:
        channel = stream.channel()
        while not over.wait(0.005):
            (status,) = end(channel, channel.submit(M.Delete([digest_of("nothing")])))
            if status != Status.NOT_FOUND:
                failed.append(status)
        channel.close()

    thread = threading.Thread(target=delete)
    thread.start()
    turns = 0
    while turns < 10 or len(withdrawn) < 3:
        gone = [stream.channel() for _ in range(3)]
        with worker.frozen():
            begin(gone[0], {f"{turns}": b"value"})
            gone[1].submit(M.Delete([digest_of("warm")]))
            begin(gone[2], {f"{turns}, too": b"value"})
            for each in gone:
                time.sleep(pause_s)
                each.close()
        turns += 1
    over.set()
    thread.join(WAIT_S)
    keeper = stream.stream.keeper
    assert not failed and keeper.session is session
    wait_until(lambda: not keeper.is_late() and not stream.loop.peers, "all is over")
    assert not any(session.withdrawals.words)
    nothing_is_lost(worker, session)


def test_a_client_that_gave_up_before_its_commit_leaves_nothing(worker: WorkerThread, stream: StreamThread) -> None:
    """A STORE that came while the worker was late ends with its client, and the session goes on for the others."""
    session = stream.stream.keeper.session
    other, gone = stream.channel(), stream.channel()
    with worker.frozen():
        number = begin(other, {"other": b"other"})
        wait_until(lambda: len(stream.stream.keeper.parked) == 1, "the STORE waits")
        begin(gone, {"gone": b"gone"})
        waits(stream, 2)
        gone.close()
    assert end(other, number) == [Status.OK]
    wait_until(lambda: len(stream.loop.peers) == 1, "the one that has gone is closed")
    assert stream.stream.keeper.session is session is not None and fetched(stream, "gone") is None
    nothing_is_lost(worker, session)


def test_a_worker_that_is_stopped_for_long_fails_stores_at_once(
    worker: WorkerThread, stream: StreamThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_session, "SILENCE_S", 2 * DEADLINE_S)
    channel = stream.channel()
    with worker.frozen():
        for name in ("a", "b", "c"):
            assert store(channel, {name: b"value"}) == [Status.UNAVAILABLE]
        assert stream.stream.keeper.session is None and stream.stream.keeper.down_s > 0
    wait_until(lambda: store(channel, {"d": b"value"}) == [Status.OK], "another session")
    assert fetched(stream, "a") is None


def test_other_requests_fail_after_their_deadline_and_none_is_done_late(
    worker: WorkerThread, stream: StreamThread
) -> None:
    """Questions leave the session be. A DELETE that was refused is not carried out when the worker goes on."""
    keeper, channel = stream.stream.keeper, stream.channel()
    session = keeper.session
    assert session is not None
    unknown = [digest_of("nothing")]
    with worker.frozen():
        assert keeper_answers(stream, M.Exists(unknown)) == [Status.UNAVAILABLE]
        assert keeper_answers(stream, M.Exists(unknown)) == [Status.UNAVAILABLE], "at once"
        assert keeper.down_s > DEADLINE_S
    wait_until(lambda: keeper_answers(stream, M.Exists(unknown)) == [Status.NOT_FOUND], "it answers")
    assert keeper.session is session
    nothing_is_lost(worker, session)
    with worker.frozen():
        number = channel.submit(M.Delete([digest_of("warm")]))
        assert end(channel, number) == [Status.UNAVAILABLE]
    wait_until(lambda: not keeper.is_late(), "the worker has answered that it is withdrawn")
    assert keeper.session is session and fetched(stream, "warm") == bytes(10)
    nothing_is_lost(worker, session)


def keeper_answers(stream: StreamThread, msg: M.Exists) -> list[int]:
    """Ask the worker from the loop's thread."""
    found: list[list[int]] = []
    stream.loop.call_later(0.0, lambda: found.append(stream.stream.keeper.statuses(msg)))
    wait_until(lambda: bool(found), "an answer")
    return found[0]


def test_late_answers_bring_what_they_have(worker: WorkerThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grants go to the pool, and pins are released, although nobody waits for them any more."""
    monkeypatch.setattr(worker_session, "WORKER_DEADLINE_S", WAIT_S)
    keeper = WorkerSessionKeeper(worker.path, parks=True)
    session = keeper.worker()
    assert session is not None
    session.ask([(1000, 1)])
    grant = session.pool.take(1000)
    assert grant is not None
    session.commit_one(digest_of("pinned"), grant[0], 1000, 0, ENTRY_LARGE, 1000, 0)
    session.channel.deadline_s = 0.05
    with worker.frozen():
        for ask in (lambda: session.ask([(5000, 3)]), lambda: session.pin_many([digest_of("pinned")])):
            with pytest.raises(M_ERRORS):
                ask()
        assert keeper.is_late() and not session.broken
    session.channel.deadline_s = WAIT_S
    wait_until(lambda: not keeper.is_late(), "the answers")
    assert session.pool.take(5000) is not None and len(session.unpins) == 1
    session.flush_unpins()
    with worker.frozen() as arena:
        assert not arena.sessions.by_id[session.session].pins
    keeper.close()


M_ERRORS = worker_session.TransportError


@pytest.mark.full
def test_many_clients_over_many_silences(
    worker: WorkerThread, stream: StreamThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is under way when the worker stops: all is stored, once it goes on, and can be read."""
    monkeypatch.setattr(stream_put, "PATIENCE_S", 0.01)
    dice, faults = random.Random(20_261_128), []
    over = threading.Event()

    def client(number: int) -> None:
        mine = random.Random(number)
        channel = stream.channel()
        for turn in range(30):
            sizes = [mine.choice((1, 100, 5000, 200_000)) for _ in range(mine.randrange(1, 60))]
            values = {f"{number}/{at}": bytes([turn]) * size for at, size in enumerate(sizes)}
            if store(channel, values) != [Status.OK] * len(values):
                faults.append((number, turn))
            if fetched(stream, f"{number}/0") not in (values[f"{number}/0"], None):
                faults.append((number, turn))
        channel.close()

    threads = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        with worker.frozen():
            time.sleep(dice.choice((0.0, 0.02, 0.1)))
        time.sleep(dice.choice((0.0, 0.005, 0.05)))
    over.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert not faults
    session = stream.stream.keeper.session
    assert session is not None and stream.loop.handler_errors == 0
    wait_until(lambda: not stream.stream.keeper.parked, "nothing waits")
    nothing_is_lost(worker, session)


def test_issue_the_first_session_is_waited_for(worker: WorkerThread) -> None:
    """It is made for the first value of a namespace, and had only the time of a STORE's wait in the loop."""
    with StreamThread(worker.path) as stream:
        channel = stream.channel(namespace="another")
        with worker.frozen():
            number = begin(channel, {"a": b"a"})
            time.sleep(2 * stream_put.PATIENCE_S)
        assert end(channel, number) == [Status.OK]
        channel.close()

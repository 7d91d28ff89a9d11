"""An exception that a signal's handler raises anywhere leaves no lock taken, and no allowance of a call that has ended.

Nor a copy that counts as running, nor a grant that is lost or held twice.

Each place where CPython runs handlers is tried in turn.
"""

from __future__ import annotations

import contextlib
import gc
import math
import threading
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from simm.arena.hashing import Hasher
from simm.errors import DeadlineError, NotSentError, UnfinishedCopy
from simm.host import fork_copies
from simm.host.buffers import Span, address_of
from simm.ipc import answer_wait, put
from simm.ipc import pins as pins_of_session
from simm.ipc.answer_wait import AnswerWait, take
from simm.ipc.grant_pool import GrantPool, return_idle
from simm.ipc.patience import Patience
from simm.ipc.pins import RETIRED
from simm.ipc.put import ShmPut
from simm.ipc.session import WorkerSession
from simm.ipc.steps import Steps, finish
from simm.net.allowance import ALLOWANCE, Left, allowed, at_least, at_most, tries_of, tries_within
from simm.sdk.batch import View
from simm.sdk.ops.arena_pins import ArenaPins
from simm.sdk.ops.pinner import Pinner
from simm.sdk.ops.pins import Pins
from simm.sdk.ops.remote_pins import RemotePins
from simm.sdk.tracing import parts
from simm.sdk.tracing.parts import TracedShmPut
from simm.slab import chunk_bytes_for
from simm.tracing.spans import CURRENT
from simm.wire.messages import Locate, Status
from tests.support.interrupts import everywhere
from tests.support.waiting import wait_until
from tests.support.worker_thread import WorkerThread


class Session:
    """A session whose worker answers at once."""

    acquire, wait_for_lock = WorkerSession.acquire, WorkerSession.wait_for_lock
    exchange, answer, submit = WorkerSession.exchange, WorkerSession.answer, WorkerSession.submit
    commit_one, wake, kick = WorkerSession.commit_one, WorkerSession.wake, WorkerSession.kick
    take_pushes, announce_commit = WorkerSession.take_pushes, WorkerSession.announce_commit
    deadline_s, broken = 0.0, ""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.tries = tries_of(self.lock)
        self.frames: dict[int, Any] = {}
        self.ring: Any = SimpleNamespace(
            words=[1] * 64, done=1, post=lambda _: 1, committed_one=lambda _: (0, None), announce=lambda _: None
        )
        self.channel: Any = SimpleNamespace(broken="", submit=lambda _: 1, poll_pushes=lambda: None)
        self._kicked = self._kicked_tail = 0

    def _await(self, ring: Any) -> None:
        ring.done = 1

    def submit_locked(self, _msg: Any) -> int:
        return 1

    def wait_locked(self, _ticket: int, _items: int = 1) -> int:
        return 1

    def frame_locked(self, ticket: int, _items: int = 1) -> None:
        self.frames[ticket] = None

    def result(self, ticket: int) -> None:
        del self.frames[ticket]

    def give_up(self, _: Any) -> None: ...

    disown = give_up

    def checked_locked(self, _msg: Any, answer: Any) -> Any:
        return answer


CALLS: dict[str, Callable[[Any], object]] = {
    "exchange": lambda session: session.exchange("ask"),
    "answer": lambda session: session.answer("ask", 1),
    "submit": lambda session: session.submit("ask"),
    "commit_one": lambda session: session.commit_one(bytes(16), 1, 1, 0, 0, 0, 0),
    "wake": lambda session: session.wake(),
    "kick": lambda session: session.kick(always=True),
    "take_pushes": lambda session: session.take_pushes(),
    "take": lambda session: take(session, 1),
    "receive": lambda session: AnswerWait(session, 1).receive(),
}


@pytest.mark.parametrize("call", CALLS)
def test_no_interrupt_leaves_a_session_locked(call: str) -> None:
    session = Session()

    def check() -> None:
        assert not session.lock.locked()
        session.ring.done, session._kicked = 1, 0

    assert everywhere(lambda: CALLS[call](session), check) > 0


def test_mutation_a_lock_that_is_taken_by_a_call_stays_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    session: Any = Session()

    def acquire(self: Any, _late: Any = None) -> None:
        assert self.lock.acquire(False)

    monkeypatch.setattr(Session, "acquire", acquire)
    taken: list[bool] = []

    def check() -> None:
        taken.append(session.lock.locked())
        if session.lock.locked():
            session.lock.release()

    everywhere(lambda: session.exchange("ask"), check)
    assert any(taken)


def test_an_interrupted_wait_for_another_thread_leaves_a_session_locked_by_that_thread_alone() -> None:
    session: Any = Session()
    session.deadline_s = 60.0

    def call() -> None:
        with contextlib.suppress(RuntimeError):
            session.lock.acquire()
        releasing = threading.Timer(0.001, session.lock.release)
        releasing.start()
        try:
            session.exchange("ask")
        finally:
            releasing.join()

    def check() -> None:
        wait_until(lambda: not session.lock.locked(), "nobody has it")

    assert everywhere(call, check) > 0


@pytest.mark.parametrize("late", [NotSentError, DeadlineError])
def test_control_a_session_that_another_thread_has_is_waited_for_until_the_deadline(late: type[DeadlineError]) -> None:
    session: Any = Session()
    with session.lock:
        with pytest.raises(late):
            session.acquire(late)
        with pytest.raises(NotSentError):
            CALLS["commit_one"](session)
        with pytest.raises(DeadlineError):
            take(session, 1)
        session.wake()
        session.take_pushes()
        assert session.kick(always=True) is False
        assert session.lock.locked(), "each of them leaves it to that thread"
    session.exchange("ask")
    assert not session.lock.locked()


def test_a_lock_is_taken_in_two_ways() -> None:
    lock = threading.Lock()
    tries = tries_of(lock)
    assert next(tries) is True and next(tries) is False
    (got,) = tries_within(lock, -1.0)
    assert got is False
    lock.release()
    (got,) = tries_within(lock, 0.0)
    assert got is True and next(tries) is False


def test_no_interrupt_leaves_a_lease_locked() -> None:
    lease: Any = RemotePins.__new__(RemotePins)
    lease._lock, lease._path, lease._turns = threading.Lock(), SimpleNamespace(deadline_s=0.0), 0
    lease.counters = {"outages": 0}
    met: list[int] = []

    def work() -> Steps[None]:
        met.append(1)
        yield from ()

    patience = Patience(1.0)
    everywhere(
        lambda: finish(lease.in_turn(work(), 3, patience)), lambda: lease._lock.acquire(False) and lease._lock.release()
    )
    assert met and lease._lock.acquire(False)
    met.clear()
    finish(lease.in_turn(work(), 3, patience))
    assert not met and lease._lock.locked() and lease.counters == {"outages": 3}, "another thread has it"


# -- copies and grants ---------------------------------------------------------------------------------------


class PutSession(Session):
    """A session that takes commits, and knows where each of its grants is."""

    begin_copy, end_copy = WorkerSession.begin_copy, WorkerSession.end_copy
    closed = False

    def __init__(self) -> None:
        super().__init__()
        self.memory = bytearray(8 << 20)
        address = address_of(memoryview(self.memory))
        self.reader = SimpleNamespace(data=memoryview(self.memory), data_address=address, data_offset=0, node=-1)
        self.copying: list[None] = []
        self.renew()

    def renew(self) -> None:
        self.pool: GrantPool[Any] = GrantPool()
        self.spent: list[int] = []
        #: Frames that were sent, and those whose answers are waited for or given up.
        self.frames_sent, self.awaited = 0, set[int]()
        self.pool.add([(number, number * CHUNK, CHUNK) for number in range(8)])

    def commit_one(self, _digest: bytes, number: int, *_: Any) -> int:
        self.spent.append(number)
        return 0

    def submit_locked(self, message: Any) -> int:
        self.spent += [entry[1] for entry in message.entries]
        self.frames_sent += 1
        return self.frames_sent

    def collect(self, in_flight: list[Any], _statuses: Any) -> None:
        self.forsake([ticket for ticket, _ in in_flight])
        in_flight.clear()

    def forsake(self, tickets: list[int]) -> None:
        self.awaited.update(tickets)

    def wake(self, *_: Any) -> None: ...

    announce_commit = clear_announcement = wake

    def grants(self) -> list[int]:
        """Return all grants that somebody has or has used, by number."""
        unsent = [number for number in self.pool.unsent if number not in self.spent]  # those the worker does not know
        return sorted([grant[0] for grant in self.pool.drain()] + unsent + self.spent)


CHUNK = chunk_bytes_for(1 << 20)
COPIER: Any = SimpleNamespace(threads=1, copy=lambda *_: None, copy_all=lambda *_: None)
SPREADING: Any = SimpleNamespace(**{**vars(COPIER), "threads": 2})
VALUE = memoryview(bytes(1 << 20))


@pytest.mark.parametrize("value", [VALUE, Span(address_of(VALUE), len(VALUE))], ids=["view", "span"])
@pytest.mark.parametrize("announced", [False, True])
def test_no_interrupt_of_a_put_loses_its_grant_or_its_copy(
    value: Any, announced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(put, "ANNOUNCE_BYTES", 1 if announced else 1 << 30)
    session: Any = PutSession()
    path = ShmPut(COPIER, checksum=False)

    def check() -> None:
        assert not session.copying
        assert session.grants() == [*range(8)]
        session.renew()

    assert everywhere(lambda: path.put_one(session, bytes(16), value), check) > 10


@pytest.mark.parametrize("copier", [COPIER, SPREADING], ids=["one thread", "several"])
@pytest.mark.parametrize("size", [1 << 20, (1 << 20) - 1])
def test_no_interrupt_of_a_batch_loses_a_grant_or_a_copy(
    copier: Any, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub_batches(monkeypatch)
    session: Any = PutSession()
    path = ShmPut(copier, checksum=False)
    digests, values = [bytes(16)] * 7, [VALUE[:size]] * 7

    def check() -> None:
        assert not session.copying
        assert session.grants() == [*range(8)]
        assert session.awaited == {*range(1, session.frames_sent + 1)}, "nobody takes an answer"
        session.renew()

    assert everywhere(lambda: path.put_many(session, digests, values, range(7), [0] * 7), check) > 50


def stub_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let batches talk to a PutSession, in short frames."""
    for name, stub in (
        ("ask_ahead", lambda *_: None), ("RELEASE_BYTES", 1 << 20), ("COMMIT_KEYS", 3), ("ANNOUNCE_BYTES", 1 << 30),
        ("on_device", lambda _: True),
    ):  # fmt: skip
        monkeypatch.setattr(put, name, stub)
    for module in (put, answer_wait):
        monkeypatch.setattr(module, "collect", PutSession.collect)
    monkeypatch.setattr(answer_wait, "forsake", PutSession.forsake)


class OnDevice(bytes):
    """A value in a device's memory."""

    size = 1 << 20

    def pinned(self, _: Any) -> int:
        return 1

    def copy_to_host(self, copies: Any) -> None: ...


def test_no_interrupt_of_a_batch_from_a_device_loses_a_grant_or_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is one both in the pool and among those that are to be returned: another value would get its chunk."""
    stub_batches(monkeypatch)
    session: Any = PutSession()
    path = ShmPut(COPIER, checksum=False)
    digests, values = [bytes(16)] * 7, [OnDevice(VALUE)] * 7

    def check() -> None:
        assert not session.copying and not session.pool.running
        assert session.grants() == [*range(8)]
        assert session.awaited == {*range(1, session.frames_sent + 1)}, "nobody takes an answer"
        session.renew()

    assert everywhere(lambda: path.put_many(session, digests, values, range(7), [0] * 7), check) > 50


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a generator that is interrupted ends
@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize("how", ["take", "drain", "return"])
def test_no_interrupt_loses_grants_that_are_taken_together(how: str, count: int) -> None:
    session: Any = PutSession()
    taken: list[int] = []
    session.return_grants = taken.extend
    calls: dict[str, Callable[[], object]] = {
        "take": lambda: taken.extend([grant[0] for grant in session.pool.take_many(1 << 20, count + 1)]),
        "drain": lambda: taken.extend([grant[0] for grant in session.pool.drain(count * CHUNK)]),
        "return": lambda: return_idle(session, count * CHUNK),
    }

    def check() -> None:
        assert sorted(taken + session.grants()) == [*range(8)]
        assert len(taken) in (0, count, min(8, count + 1))
        taken.clear()
        session.renew()

    calls[how]()  # what a cache has is one place less
    check()
    assert everywhere(calls[how], check) > 1


class Unfinished(bytes):
    """A value on a device whose driver cannot say that its copy has ended."""

    #: Where the copy may still write; -1: none has begun.
    start = -1

    def copy_to_mapping(self, _reader: Any, start: int, _length: int) -> None:
        self.start = start
        raise UnfinishedCopy("by the test")


@pytest.mark.parametrize("batch", [False, True])
def test_control_a_copy_that_may_still_run_keeps_its_grant(batch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody may get its chunk, and the session counts it for good."""
    monkeypatch.setattr(put, "ending", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(put, "ask_ahead", lambda *_: None)
    session: Any = PutSession()
    path = ShmPut(COPIER, checksum=False)
    value: Any = Unfinished(VALUE)
    with pytest.raises(UnfinishedCopy):
        if batch:
            path.put_many(session, [bytes(16)] * 2, [VALUE, value], range(2), [0] * 2)
        else:
            path.put_one(session, bytes(16), value)
    assert session.copying == [None] and len(session.grants()) == 7


class UnfinishedGroup(OnDevice):
    """The same among others, which the device copies together."""

    start = -1

    def copy_to_host(self, copies: Any) -> None:
        for copied in {each[0] for each in copies}:
            copied.start = copies[0][1]
        raise UnfinishedCopy("by the test")


class Traced:
    """An operation that is traced, in whose methods interrupts come too."""

    def segment(self, *_: Any) -> None: ...


@pytest.mark.parametrize("kind", [ShmPut, TracedShmPut])
@pytest.mark.parametrize("how", ["one", "batch", "device"])
def test_no_interrupt_frees_a_chunk_that_a_device_may_still_write(
    kind: type[ShmPut], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the place of the exception that says so."""
    stub_batches(monkeypatch)
    monkeypatch.setattr(parts, "_timed", lambda session: session)
    session: Any = PutSession()
    path = kind(COPIER, checksum=False)
    value: Any = UnfinishedGroup(VALUE) if how == "device" else Unfinished(VALUE)
    token = CURRENT.set(Traced())  # type: ignore[arg-type]
    begun = 0

    def call() -> None:
        with contextlib.suppress(UnfinishedCopy):
            if how == "one":
                path.put_one(session, bytes(16), value)
            else:
                others = value if how == "device" else VALUE
                path.put_many(session, [bytes(16)] * 2, [others, value], range(2), [0] * 2)

    def check() -> None:
        nonlocal begun
        if value.start >= 0:
            begun += 1
            number = (value.start - (session.reader.data_address if how == "device" else 0)) // CHUNK
            assert number in session.pool.running and session.copying == [None]
            assert number not in session.grants()
        value.start = -1
        session.copying.clear()
        session.renew()

    try:
        assert everywhere(call, check, ("simm.", __name__)) > 10
    finally:
        CURRENT.reset(token)
    assert begun > (kind is TracedShmPut)


def test_no_interrupt_leaves_a_copy_that_has_not_begun() -> None:
    session: Any = PutSession()

    def copy() -> None:
        session.begin_copy()
        try:
            pass
        finally:
            session.copying.pop()  # no function whose begin could be interrupted

    everywhere(copy, lambda: session.copying and pytest.fail("a copy counts as running"))


@pytest.mark.parametrize("found", [Status.OK, Status.NOT_FOUND])
def test_no_interrupt_of_a_view_leaves_a_copy(found: Status) -> None:
    session: Any = PutSession()
    unpinned: list[int] = []
    session.pin_one = lambda _: (found, 0, 100, 0, 0, 7)
    session.unpin_later = unpinned.append

    views: list[Any] = []

    def view() -> None:
        views.append(View.of_pin(session, bytes(16))[0])

    def check() -> None:
        views.clear()
        gc.collect()
        assert not session.copying and not fork_copies._LENT

    assert everywhere(view, check) > 3
    assert 7 in unpinned


def test_no_interrupt_of_pins_leaves_a_copy_or_a_call() -> None:
    session: Any = PutSession()
    session.pin_many = lambda *_: [(0, 0, 100, 0, 0, 7)]
    session.unpin_later = lambda _: None
    target: Any = SimpleNamespace(session=session)
    pinner: Any = Pinner.__new__(Pinner)
    routes: Any = SimpleNamespace(closed=False)
    pins: Any = Pins([], routes, COPIER, lambda _: None, 0.0)

    holders: list[Any] = []

    def call() -> None:
        holders.append(ArenaPins(session.reader, COPIER, None))
        pinner._pinned(target, session.reader, holders[-1], [bytes(16)], 0)
        with pins._in_use():
            assert pins._calls

    def check() -> None:
        holders.clear()
        gc.collect()
        assert not session.copying and not pins._calls and not pins._lock.locked()

    assert everywhere(call, check) > 10


@pytest.mark.parametrize("queued", [0, 16])
@pytest.mark.parametrize("many", [True, False])
def test_issue_no_interrupt_leaks_a_pin(many: bool, queued: int) -> None:
    """Whoever has asked for it knows of it, or it is to be released, as the one whose answer nobody has taken.

    ``queued``: pins that are released by the same call.
    """
    kept: list[Any] = []
    digest = Hasher("default")("k")
    with WorkerThread(poll_us=0) as worker, contextlib.closing(worker.session()) as owner:
        owner.ask([(5, 1)])
        grant, offset, _ = owner.pool.take(5) or (0, 0, 0)
        at = offset - owner.reader.data_offset
        memoryview(owner.reader.data)[at : at + 5] = b"value"
        assert owner.commit_one(digest, grant, 5, 0, 0, 0, 0) == Status.OK

        def fresh() -> WorkerSession:
            session = worker.session()
            if queued:
                session.unpins.extend(entry[5] for entry in session.pin_many([digest] * queued))
            return session

        session = fresh()

        def pin() -> None:
            if many:
                kept.extend(session.pin_many([digest] * 3))
            else:
                kept.append(session.pin_one(digest))

        def check() -> None:
            nonlocal session
            assert not session.lock.locked()
            if not session.broken:  # else the worker releases all of them
                session.exchange(Locate(0, [digest]))  # takes in what nobody waits for
                with worker.frozen() as store:
                    pinned = {*store.sessions.by_id[session.session].pins}
                assert pinned <= {entry[5] for entry in kept} | {*session.unpins}
                assert not session.frames and not session.forsaken
            session.close(clean=False)
            RETIRED.clear()
            kept.clear()
            session = fresh()

        assert everywhere(pin, check) > 30
        session.close()
    RETIRED.clear()


@pytest.mark.parametrize("count", [3, 2000])
def test_issue_no_interrupt_loses_pins_that_are_to_be_released(count: int) -> None:
    session: Any = Session()
    queue = deque(range(count))
    released: list[int] = []

    def submit(msg: Any) -> int:
        released.extend(msg.pins)
        return 1

    def check() -> None:
        assert {*queue, *released} == {*range(count)}
        released.clear()
        queue.clear()
        queue.extend(range(count))

    session.submit_locked = submit
    assert everywhere(lambda: pins_of_session.release(session, queue), check, ("simm.ipc.pins",)) > 3


def test_issue_an_interrupted_close_of_a_session_is_ended_by_the_next() -> None:
    """It did nothing: the socket stayed open, and with it the session, as long as a view kept it."""
    with WorkerThread() as worker:
        sessions: list[WorkerSession] = []

        def begin() -> None:
            sessions.append(worker.session())
            sessions[0].ask([(4096, 4)])

        def check() -> None:
            session = sessions.pop()
            session.close()
            assert session.closed and session.ring is None and session.channel.sock.fileno() == -1
            assert not session.lock.locked()
            ours = session.welcome.segment, session.session
            assert [(old.segment, old.session) for old in RETIRED].count(ours) == 1
            begin()  # which releases it
            with worker.frozen() as store:
                assert session.session not in store.sessions.by_id

        modules = ("simm.ipc.session", "simm.ipc.commit_ring", "simm.net.channel")
        begin()
        assert everywhere(lambda: sessions[0].close(), check, modules) > 10
        sessions[0].close()


class Server:
    """A server that is connected."""

    path, fresh = "shm", False

    def connect_soon(self) -> None: ...

    def ready(self) -> bool:
        return True


def patience() -> None:
    with Patience(1.0) as mine:
        mine.has_time_for(Server())
        with Patience(0.5) as part:
            part.has_time_for(Server())


def nested() -> None:
    with at_most(0.0), at_least(1.0), at_most(2.0):
        allowed(1.0)


@pytest.mark.parametrize("call", [patience, nested])
def test_no_interrupt_leaves_an_allowance_to_the_next_call(call: Callable[[], None]) -> None:
    def check() -> None:
        assert allowed(math.inf) == math.inf
        assert ALLOWANCE.seconds == ALLOWANCE.until == math.inf

    assert everywhere(call, check) > 0


@pytest.mark.parametrize("call", [patience, nested])
def test_mutation_without_an_owner_it_is_left(call: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Left, "own", lambda *_: None)
    left: list[bool] = []

    def check() -> None:
        left.append(ALLOWANCE.seconds != math.inf or ALLOWANCE.until != math.inf)
        ALLOWANCE.seconds = ALLOWANCE.until = math.inf

    everywhere(call, check)
    assert any(left)


def test_what_was_left_is_not_the_next_calls() -> None:
    """As of a call that was interrupted when it set its allowance back."""
    left = Patience(3.0)
    left.__enter__()
    ALLOWANCE.seconds, ALLOWANCE.until = 0.0, 0.0
    assert allowed(1.0) <= 0.0, "the control"
    del left
    with Patience(3.0) as mine:
        assert mine.has_time_for(Server()) and ALLOWANCE.seconds > 1.0
    assert ALLOWANCE.seconds == ALLOWANCE.until == math.inf


def test_control_a_part_of_a_call_does_not_outlast_it() -> None:
    with at_most(0.0):
        with Patience(3.0) as part:
            assert not part.has_time_for(Server())
        assert allowed(1.0) <= 0.0, "the call's is there again"
    assert allowed(1.0) == 1.0

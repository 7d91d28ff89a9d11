"""One call's transfer on a path of its own: what it takes of the path and of the staging memory, and gives back."""

from __future__ import annotations

import dis
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from simm.config.client_options import ClientOptions
from simm.errors import DeadlineError
from simm.host.buffers import Span
from simm.host.threads import Waiters
from simm.ipc.steps import Steps, finish
from simm.rdma.api import FabricError, Timeout
from simm.rdma.registration import Registration
from simm.rdma.staging import BLOCK_BYTES, StagingPool
from simm.sdk import rdma_transfer
from simm.sdk.path import ClientContext, ClientRdma, PathState
from simm.sdk.rdma_pool import CONNECTIONS_MAX, Hold, RdmaPath
from simm.sdk.rdma_transfer import SHARE, STAGING_BLOCKS, Transfer, key_of, unregistered
from tests.support.client_checks import check_staging
from tests.support.interrupts import Interrupted, everywhere
from tests.support.waiting import wait_until

WAIT_S = 120.0
#: What threading has is in Python, too.
MODULES = ("simm.", "threading")


class Rail:
    """Registers everything, but for what a test refuses."""

    name = "r0"

    def __init__(self) -> None:
        self.registered = 0
        #: Registrations that fail, by their number.
        self.fails: set[int] = set()

    def register(self, address: int, length: int, access: Any) -> Any:
        self.registered += 1
        if self.registered in self.fails:
            raise FabricError("cannot register", "ENOMEM")
        return SimpleNamespace(address=address, length=length, lkey=7, rkey=8, close=lambda: None)


class Connection:
    """A connection with one queue pair, which is in :attr:`links` until it is closed."""

    def __init__(self, rail: Rail) -> None:
        self.broken = ""
        self.era = 0
        self.arena: Any = None
        self.locations: Any = None
        self.staged: set[Any] = set()
        self.links: list[Any] = [SimpleNamespace(rail=rail)]

    def close(self, reason: str = "closed") -> None:
        self.broken = reason
        self.links.clear()


class Up(RdmaPath):
    """A path that is up. Its connections are made at once, and reach nothing."""

    def __init__(self, pool: StagingPool | None = None) -> None:
        staging = StagingPool(16 * BLOCK_BYTES) if pool is None else pool
        super().__init__(ClientContext(ClientOptions(), rdma=ClientRdma(staging=staging)), ("nowhere", 1))
        self.rail = Rail()
        self.deadline_s = 60.0
        self.up()

    def up(self) -> None:
        with self._lock:
            self._set_up()

    def _open(self, until: float) -> Any:
        return Connection(self.rail)

    def _adopt(self, connection: Any) -> None:
        connection.era, connection.arena = self._era, self.arena

    def check(self) -> None:
        """Nobody has the lock, and every connection that counts is idle, and whole. It goes up again."""
        assert not self._lock.locked() and not self.staging._lock.locked()
        assert self._connections == len(self._idle)
        assert all(connection.links for connection in self._idle)
        check_staging(self.staging)
        assert len(self.staging._free) == self.staging._made, "no block is lost"
        if self.state is not PathState.CLOSED:
            self.up()


class Moving(Transfer):
    """Transfers of values that pass through staging blocks."""

    sources: list[Any] = [None]

    def __init__(self) -> None:
        super().__init__(None, [b""])  # type: ignore[arg-type]
        self.moved = 0
        self.links_seen: Any = None

    def needs_blocks(self, positions: Any) -> bool:
        return unregistered(self.sources, self.links)

    def carry_out(self, positions: Any) -> Steps[None]:
        self.links_seen = self.links
        for _ in range(len(self.blocks)):
            key_of(self._free_blocks.pop(), self.links[0])
            self.moved += 1
        yield from ()

    def left_over(self, positions: Any, done: bool) -> list[int]:
        return [] if done else list(positions)


def run(path: RdmaPath, transfer: Transfer | None = None) -> tuple[list[int], int]:
    """Run a transfer of one value; return what is left to TCP, and the fallbacks."""
    counters = {"rdma_fallbacks": 0}
    return finish((transfer or Moving()).run(path, [0], counters)), counters["rdma_fallbacks"]


# -- interruptions ------------------------------------------------------------------------------------------------


def test_no_interrupt_of_a_call_costs_a_connection_a_block_or_the_lock() -> None:
    path = Up()

    def check() -> None:
        path.check()
        assert run(path) == ([], 0)
        assert path._idle, "the next call finds one"

    assert everywhere(lambda: run(path), check, MODULES) > 20


def test_no_interrupt_of_a_call_with_a_connection_of_its_own_costs_any() -> None:
    path = Up()

    def check() -> None:
        path.check()
        path.drop("so that the next call makes one")
        path.check()

    assert everywhere(lambda: run(path), check, MODULES) > 20


def test_no_interrupt_of_the_end_of_a_path_leaves_a_call_that_waits_for_it() -> None:
    paths = [Up()]

    def close() -> None:
        run(paths[0])
        paths[0].gone(time.monotonic())

    def check() -> None:
        paths[0].check()
        assert paths[0].gone(time.monotonic()), "closing it again is all that is needed"
        paths[0] = Up()

    assert everywhere(close, check, MODULES) > 20


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("late", ["lose", "_end", "_uncount"])
def test_further_interrupts_leave_nothing_in_flight(monkeypatch: pytest.MonkeyPatch, late: str, times: int) -> None:
    """Of the third one a connection's room was lost, and the staging blocks of its call."""
    path = Up()
    run(path)
    hit: list[int] = []
    whose: Any = Moving if late == "_end" else path
    real = getattr(whose, late)

    def interrupted(*arguments: Any) -> Any:
        if len(hit) < times:
            hit.append(1)
            raise Interrupted(len(hit))
        return real(*arguments)

    def first(self: Any, positions: Any) -> Any:
        self.links_seen = self.links
        raise KeyboardInterrupt

    monkeypatch.setattr(Moving, "carry_out", first)
    monkeypatch.setattr(whose, late, interrupted)
    transfer = Moving()
    with pytest.raises(Interrupted, match=r"^1$"):
        run(path, transfer)
    assert len(hit) == times
    assert transfer.links_seen == [], "its queue pairs are closed"
    path.check()


def test_an_interrupt_as_the_clean_up_begins_again_leaves_nothing_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPython runs handlers at a loop's end, too, which no handler within the loop sees."""
    path = Up()
    run(path)
    code = Transfer.run.__code__
    ends = {each.offset for each in dis.get_instructions(code) if each.opname.startswith("JUMP_BACKWARD")}
    assert ends
    hit: list[int] = []
    real = Transfer._end

    def first(self: Transfer, *arguments: Any) -> None:
        if not hit:
            hit.append(1)
            raise Interrupted(1)
        real(self, *arguments)

    def look(frame: Any, event: str, _: object) -> Any:
        if frame.f_code is code:
            frame.f_trace_opcodes = True
            if event == "opcode" and frame.f_lasti in ends and len(hit) == 1:
                hit.append(2)
                raise Interrupted(2)
        return look

    monkeypatch.setattr(Transfer, "_end", first)
    before = sys.gettrace()
    sys.settrace(look)
    try:
        with pytest.raises(Interrupted):
            run(path)
    finally:
        sys.settrace(before)
    assert hit == [1, 2]
    path.check()


def test_a_queue_pair_that_cannot_be_closed_ends_the_clean_up_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is not given back: what cannot be destroyed may still write."""
    path = Up()
    tries: list[int] = []

    def lose(*_: Any) -> None:
        tries.append(1)
        raise FabricError("cannot be destroyed")

    def first(self: Any, positions: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Moving, "carry_out", first)
    monkeypatch.setattr(path, "lose", lose)
    with pytest.raises(FabricError):
        run(path)
    assert len(tries) == 1 and len(path.staging._free) < path.staging._made


@pytest.mark.parametrize("what", ["a connection", "a block"])
def test_no_interrupt_of_a_wait_costs_the_lock(what: str) -> None:
    path = Up()
    held = [path.acquire(time.monotonic(), Hold()) for _ in range(CONNECTIONS_MAX)]
    blocks = path.staging.take(100, time.monotonic())

    def wait() -> None:
        try:
            if what == "a connection":
                path.acquire(time.monotonic() + 0.001, Hold())
            else:
                path.staging.take(1, time.monotonic() + 0.001)
        except DeadlineError:
            pass

    def check() -> None:
        assert not path._lock.locked() and not path.staging._lock.locked()
        assert path._connections == CONNECTIONS_MAX and not path._idle and not path.staging._free

    assert everywhere(wait, check, MODULES) > 5
    path.staging.release(blocks)
    for connection in held:
        path.release(connection)
    path.check()


def test_who_gives_back_again_after_an_interrupt_wakes_those_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Up(StagingPool(BLOCK_BYTES))
    real = Waiters.notify
    told: list[Any] = []

    def interrupted(self: Waiters) -> None:
        told.append(self)
        if len(told) == 1:
            raise Interrupted
        real(self)

    def give(back: Any, waits: Any, brings: Any) -> None:
        got: list[Any] = []
        waiting = threading.Thread(target=lambda: got.append(waits(time.monotonic() + WAIT_S)))
        waiting.start()
        wait_until(lambda: bool(path._changed) or bool(path.staging._changed), "it waits")
        told.clear()
        with monkeypatch.context() as patch:
            patch.setattr(Waiters, "notify", interrupted)
            with pytest.raises(Interrupted):
                back()
            back()
        waiting.join(WAIT_S)
        assert len(got) == 1
        brings(got[0])

    holds = [Hold() for _ in range(CONNECTIONS_MAX)]
    for hold in holds:
        path.acquire(time.monotonic(), hold)
    give(lambda: path.give_back(holds[0]), path.acquire, path.release)
    path._idle.pop().close()
    room = Hold()
    room.counted = True
    give(lambda: path.give_back(room), path.acquire, path.release)
    blocks = path.staging.take(1, time.monotonic())
    give(lambda: path.staging.give_back(blocks), lambda until: path.staging.take(1, until), path.staging.release)
    for hold in holds[1:]:
        path.give_back(hold)
    path.check()


def test_what_comes_too_late_is_left_to_others() -> None:
    """A call whose time is over would only break what it has just been given."""
    path = Up(StagingPool(BLOCK_BYTES))
    looks: list[int] = []

    def late(*_: Any) -> bool:
        looks.append(1)
        return len(looks) > 1

    path._reserve = late  # type: ignore[method-assign, assignment]
    with pytest.raises(DeadlineError):
        path.acquire(time.monotonic() + 0.001)
    assert len(looks) == 1
    path.staging._take_locked = late  # type: ignore[method-assign, assignment]
    looks.clear()
    with pytest.raises(DeadlineError):
        path.staging.take(1, time.monotonic() + 0.001)
    assert len(looks) == 1


@pytest.mark.parametrize("way", ["lose", "give_back"])
def test_what_does_not_go_back_to_the_path_is_closed_before_it_is_uncounted(way: str) -> None:
    path = Up()
    seen: list[Any] = []

    def begin() -> Any:
        path.up()
        hold = Hold()
        connection: Any = path.acquire(time.monotonic(), hold)
        path.drop("down meanwhile")
        seen[:] = hold, connection
        return hold

    def end(hold: Any) -> None:
        if way == "lose":
            path.lose(hold, "broken")
        else:
            path.give_back(hold)

    def check() -> None:
        hold, connection = seen
        assert not connection.links or (hold.counted and path._connections == 1), "open, and nobody counts it"
        end(hold)
        assert not connection.links and path._connections == 0
        end(hold)
        assert path._connections == 0
        begin()

    begin()
    assert everywhere(lambda: end(seen[0]), check, MODULES) > 3
    hold, connection = seen
    hold.counted, path._connections = False, 0  # an interruption has left it so
    end(hold)
    assert not connection.links and path._connections == 0


def test_a_connection_that_went_back_is_not_closed_by_who_had_it() -> None:
    path = Up()
    hold = Hold()
    connection = path.acquire(time.monotonic(), hold)
    path.give_back(hold)
    assert path.acquire(time.monotonic()) is connection, "another call has it"
    path.give_back(hold)
    path.lose(hold, "interrupted")
    assert connection.links and path.down_reason is None and path._connections == 1
    path.release(connection)
    path.check()


# -- staging memory -----------------------------------------------------------------------------------------------


def test_a_call_that_waits_for_blocks_in_vain_leaves_the_path_up() -> None:
    path = Up(StagingPool(BLOCK_BYTES))
    run(path)
    held = path.staging.take(1, time.monotonic())
    path.deadline_s = 0.01
    (connection,) = path._idle
    assert run(path) == ([0], 1), "TCP does it"
    assert path.down_reason is None
    assert path._idle == [connection] and path._connections == 1 and connection.links
    path.staging.release(held)
    path.deadline_s = 60.0
    assert run(path) == ([], 0)
    path.check()


def test_blocks_that_a_device_does_not_take_are_not_used() -> None:
    path = Up()
    path.rail.fails = {2}
    for _ in range(6):
        transfer = Moving()
        assert run(path, transfer) == ([], 0)
        assert 0 < transfer.moved < STAGING_BLOCKS, "the half of them that is registered"
    assert path.rail.registered == 2
    path.check()


def test_without_any_block_that_devices_take_tcp_does_it() -> None:
    path = Up()
    path.rail.fails = set(range(100))
    for _ in range(CONNECTIONS_MAX + 1):
        assert run(path) == ([0], 1)
        assert path.down_reason is None and path._connections == 1
    path.check()


def test_memory_that_all_rails_know_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Up()
    asked: list[Any] = []
    real = Registration.lkey

    def lkey(self: Registration, rail: Any, *, again: bool = False) -> Any:
        asked.append(self)
        return real(self, rail, again=again)

    class Unused(Moving):
        def carry_out(self, positions: Any) -> Steps[None]:
            assert len(self.blocks) == STAGING_BLOCKS
            yield from ()

    monkeypatch.setattr(Registration, "lkey", lkey)
    assert run(path, Unused()) == ([], 0)
    assert len(asked) == len(path.staging._memory), "each memory once, not each block"
    for _ in range(3):
        assert run(path, Unused()) == ([], 0)
    assert len(asked) == len(path.staging._memory)
    path.drop("another connection may have other rails")
    path.up()
    assert run(path, Unused()) == ([], 0)
    assert len(asked) == 2 * len(path.staging._memory)


def test_all_that_can_be_registered_is_before_the_deadline_counts() -> None:
    first, second = Rail(), Rail()
    first.fails = {1}
    memory = bytearray(4096)
    spans = [Span(4096, 4096, registration=Registration(4096, 4096, keep=memory)) for _ in range(2)]
    links: Any = [SimpleNamespace(rail=first), SimpleNamespace(rail=second)]
    assert unregistered([None, spans[0], spans[1], spans[0]], links)
    assert first.registered == second.registered == 2
    assert unregistered(spans[:1], links) and not unregistered(spans[1:], links)
    assert first.registered == second.registered == 2


def test_blocks_that_are_of_no_use_are_taken_last() -> None:
    pool = StagingPool(16 * BLOCK_BYTES)
    taken = pool.take(8, time.monotonic())
    good, all_of_them = taken[::2], list(taken)
    pool.give_back(taken, good)
    pool.give_back(taken, good)
    assert not taken
    check_staging(pool)
    assert pool.take(4, time.monotonic()) == good
    assert set(all_of_them) - set(good) <= set(pool._free)


# -- the deadline -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("staged", [False, True])
def test_the_deadline_counts_from_after_what_is_registered(monkeypatch: pytest.MonkeyPatch, staged: bool) -> None:
    """The first use of a large registered pool takes longer than any deadline."""
    now = [1000.0]
    monkeypatch.setattr(rdma_transfer, "time", SimpleNamespace(monotonic=lambda: now[0]))
    path = Up()
    register = path.rail.register

    def slowly(*arguments: Any) -> Any:
        now[0] += 100.0
        return register(*arguments)

    monkeypatch.setattr(path.rail, "register", slowly)
    memory = bytearray(4096)
    left: list[float] = []

    class Timed(Moving):
        sources = [None if staged else Span(4096, 4096, registration=Registration(4096, 1 << 40, keep=memory))]

        def carry_out(self, positions: Any) -> Steps[None]:
            left.append(self.until - now[0])
            if left[-1] <= 0:
                raise Timeout("the time was over before it began")
            yield from ()

    transfer = Timed()
    assert run(path, transfer) == ([], 0)
    assert left == [pytest.approx(path.deadline_s * SHARE)]
    assert transfer.tcp_until - now[0] == pytest.approx(path.deadline_s), "and TCP has its share"
    assert path.down_reason is None

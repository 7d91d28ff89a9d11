"""A step of the supervisor's that fails after a death: whatever it is, another process comes, or the server ends."""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from simm import shm
from simm.arena.layout import HEADER_BYTES, MAGIC, State, Word
from simm.cluster.assignment import Member
from simm.dataserver import DataServer
from simm.errors import SegmentError
from simm.ipc import segments
from simm.ipc.arena_files import OwnedArena
from simm.net.loop import Loop
from simm.net.process import Child, end_children
from simm.server import children as children_module
from simm.server.arena_stock import ArenaStock
from simm.server.children import Children, StreamProcess, Supervised, WorkerSlot
from simm.server.options import DataServerOptions
from tests.support.waiting import wait_until

LACKS = [OSError(28, "no watches"), MemoryError(), RuntimeError("no thread")]


def waits(sock: socket.socket) -> None:
    """What each process runs."""
    while sock.recv(4096):  # it is sent orders
        pass


class House:
    """A data server of which only the parts exist that start and restart the processes of one worker."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(children_module, "FORK_AGAIN_S", 0.01)
        monkeypatch.setattr(children_module, "PAUSE_S", (0.01, 0.02))
        self.loop = Loop(lasting=True)
        self.children = Children(self.loop, lambda: ())
        self.arena: Any = SimpleNamespace(heartbeat=lambda: 1, close=lambda: None, name="an arena", size=1)
        self.slot = WorkerSlot(0, 0, self.arena)
        self.slot.worker = self.worker()
        self.slot.mover = Supervised(self.children, "a mover", waits, [], lambda *_: None)
        self.slot.streams = [StreamProcess(self.children, "a stream", waits, [])]
        self.gave_up: list[str] = []
        nothing: Any = SimpleNamespace(
            reap=lambda: None, tick=lambda: None, stop=lambda: None, close=lambda: None, processes=list,
            status=lambda _: None, stopping=lambda _: None, extend=lambda _: None, end=lambda: True,
        )  # fmt: skip
        link = SimpleNamespace(offered=True, warm=True, joined=False, all_answered=True, leave=lambda warm: False)
        self.server: Any = object.__new__(DataServer)
        vars(self.server).update(
            loop=self.loop, children=self.children, slots=[self.slot], endpoints=nothing, growth=nothing,
            member=Member("n", 7, [0]), membership=link, _stopping=False, notify=nothing, failed="",
            _shared=[], _web=None, _lock=None, give_up=self.gave_up.append,
            opener=SimpleNamespace(worker_of=lambda _: self.worker()),
        )  # fmt: skip

    def worker(self) -> Supervised:
        return Supervised(self.children, "worker 0", waits, [], lambda *_: None)

    def start(self) -> None:
        self.server.start_worker(self.slot)
        self.slot.streams[0].start()
        self.loop.call_every(0.01, self.server._reap)

    def until(self, condition: Callable[[], object], what: str) -> None:
        wait_until(lambda: (self.loop.run_once(0.01), condition())[1], what)

    def close(self) -> None:
        self.children.stopping = True
        made = [each.child for each in (self.slot.worker, *self.slot.streams)]
        end_children([child for child in made if child is not None], 0.0)
        self.loop.close()


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    made = House(monkeypatch)
    yield made
    made.close()


def once(what: Callable[..., Any], error: BaseException, calls: list[int]) -> Callable[..., Any]:
    """Return a function that raises ``error`` the first time, and then is ``what``."""

    def step(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise error
        return what(*arguments, **named)

    return step


@pytest.mark.parametrize("of", ["worker", "stream"])
@pytest.mark.parametrize("error", LACKS)
@pytest.mark.parametrize("step", ["fork", "adopt"])
def test_issue_a_process_that_cannot_be_started_is_tried_again(
    house: House, monkeypatch: pytest.MonkeyPatch, of: str, error: Exception, step: str
) -> None:
    """Only a failed fork was; and one that nobody hears was left."""
    house.start()
    process = house.slot.worker if of == "worker" else house.slot.streams[0]
    first, calls = process.child, list[int]()
    assert first is not None
    owner = house.children if step == "fork" else house.loop
    monkeypatch.setattr(owner, step, once(getattr(owner, step), error, calls))
    process.kill()
    house.until(lambda: len(calls) > 1 and process.child, "another one")
    assert process.child is not first and not process._due


def test_one_that_nobody_hears_is_ended(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    process, made, fork = house.worker(), list[Child](), house.children.fork

    def seen(*arguments: Any, **named: Any) -> Child:
        made.append(fork(*arguments, **named))
        return made[-1]

    monkeypatch.setattr(house.children, "fork", seen)
    monkeypatch.setattr(house.loop, "adopt", once(house.loop.adopt, MemoryError(), []))
    with pytest.raises(OSError, match="no connection to worker 0: MemoryError"):
        process.start()
    (child,) = made
    assert process.child is None and child.code is not None and child.sock.fileno() == -1


@pytest.mark.parametrize("error", [*LACKS, ValueError("a mistake in SiMM")])
@pytest.mark.parametrize("step", ["count", "pause"])
def test_issue_a_death_that_is_not_dealt_with_is_no_last_one(
    house: House, monkeypatch: pytest.MonkeyPatch, error: Exception, step: str
) -> None:
    """The process had been reaped, so nobody looked at it again."""
    house.start()
    first, calls = house.slot.worker.child, list[int]()
    if step == "count":
        monkeypatch.setattr(house.slot, "worker_died", once(house.slot.worker_died, error, calls))
    else:
        monkeypatch.setattr(house.children, "or_later", once(house.children.or_later, error, calls))
    house.slot.worker.kill()
    house.until(lambda: calls and house.slot.worker.child not in (None, first), "another one")


@pytest.mark.parametrize("error", LACKS)
def test_issue_who_hears_nothing_of_its_map_is_told_again(
    house: House, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """A start whose second half fails forks no second process."""
    house.start()
    house.slot.worker.kill()
    calls: list[int] = []
    monkeypatch.setattr(house.slot.worker, "send", once(house.slot.worker.send, error, calls))
    house.until(lambda: len(calls) == 2, "it is told")
    child = house.slot.worker.child
    house.loop.run_once(0.02)
    assert child is not None and house.slot.worker.child is child and house.slot.deaths["worker"] == 1


@pytest.mark.parametrize("error", [*LACKS, SegmentError("no room")])
def test_issue_a_cold_start_that_fails_ends_the_server(house: House, error: Exception) -> None:
    def fails(*_: Any) -> None:
        raise error

    house.server.stock = SimpleNamespace(replace=fails)
    house.server._start_cold(house.slot)
    (why,) = house.gave_up
    assert "worker 0 cannot start cold" in why and (str(error) or "MemoryError") in why


def test_issue_a_cold_start_makes_no_arena_that_it_cannot_keep(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that had been faulted in stayed in /dev/shm, as no slot had it when memory for its vault was refused."""
    made: list[int] = []
    house.server.stock = SimpleNamespace(replace=lambda *_: made.append(1))
    monkeypatch.setattr("simm.dataserver.Vault", no_vault)
    house.server._start_cold(house.slot)
    assert len(house.gave_up) == 1 and not made


def no_vault() -> None:
    raise OSError(errno.ENOMEM, "as of mmap")


def test_issue_a_cold_start_takes_no_processor_time_back(house: House) -> None:
    house.server.stock = SimpleNamespace(replace=lambda *_: house.slot.segment)
    house.slot.worker.cpu_s = 7.0
    before = house.slot.worker
    house.server._start_cold(house.slot)
    assert house.slot.worker is not before and house.slot.worker.cpu_s == 7.0 and house.slot.worker.child is not None


class ColdStart:
    """A house whose worker cannot recover its arena, which a reader maps until /dev/shm was looked at ``let_go`` times.

    ``stop_at``: the server is to stop at this look.
    """

    def __init__(self, house: House, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(segments, "LET_GO_S", 600.0)
        monkeypatch.setattr(segments, "shm_free_bytes", self._free)
        self.house, self.goes_on = house, True
        self.looks, self.let_go, self.stop_at = 0, 4, 0
        house.server._goes_on = lambda: self.goes_on
        self.stock = house.server.stock = ArenaStock(DataServerOptions("gpu", "", [0]), 7, lambda: self.goes_on)
        monkeypatch.setattr(self.stock, "new", self._new)
        #: Whether the reader had let go, for each arena that was made.
        self.made: list[bool] = []
        self.fault: SegmentError | None = None
        self.old = OwnedArena.create(f"simm-test-{os.getpid()}-old", 16 << 20)
        self.old.mm[: 1 << 20] = bytes(1 << 20)  # pages
        with memoryview(self.old.mm)[:HEADER_BYTES].cast("Q") as words:
            words[Word.MAGIC], words[Word.STATE] = MAGIC, State.OPEN
        self.held = sum(os.fstat(fd).st_blocks * 512 for fd in self.old.fds)
        reader = shm.AttachedSegment.open(self.old.name)
        self.header = reader.map(0, HEADER_BYTES, writable=False)
        # As a child of the supervisor's has them that was forked a moment ago, and has not run yet.
        self.forked = [os.dup(file._owner_fd) for file in (self.old.meta, self.old.data)]  # type: ignore[union-attr]
        self.reader = reader
        house.slot.segment, house.slot.unrecovered = self.old, 1

    def _free(self, _directory: str) -> int:
        self.looks += 1
        self.goes_on = self.goes_on and self.looks != self.stop_at
        return 1 << 30 if self.looks < self.let_go else (1 << 30) + self.held

    def _new(self, _size: int, _numbers: list[int], progress: Callable[[int, int, int], bool]) -> dict[int, Any]:
        self.made.append(self.looks >= self.let_go)
        if self.fault is not None:
            raise self.fault
        return {0: self.house.arena} if progress(0, 0, 1) else {}

    def run(self) -> None:
        self.house.server._start_cold(self.house.slot)

    @property
    def files(self) -> list[str]:
        """What is left of the old arena."""
        names = self.old.name, shm.data_name(self.old.name)
        return [each for each in names if os.path.exists(f"{shm.SHM_DIR}/{each}")]

    @property
    def closed(self) -> bool:
        """Whether the reader finds the arena closed."""
        with memoryview(self.header).cast("Q") as words:
            return bool(words[Word.STATE] == State.CLOSED)

    def close(self) -> None:
        for fd in self.forked:
            os.close(fd)
        self.header.close()
        self.reader.close()
        self.old.close()
        segments.remove_if_left(self.old.name)


@pytest.fixture
def cold(house: House, monkeypatch: pytest.MonkeyPatch) -> Iterator[ColdStart]:
    made = ColdStart(house, monkeypatch)
    yield made
    made.close()


def test_issue_a_cold_start_removes_the_old_arena_and_waits_for_its_memory(cold: ColdStart) -> None:
    """The new one, of the same size, found no room. And what a new child had the lock of was left, as if in use."""
    cold.run()
    assert not cold.files and cold.closed
    assert cold.made == [True] and cold.looks == cold.let_go, "readers had let go"
    assert not cold.house.gave_up and cold.house.slot.worker.child is not None
    assert cold.house.slot.segment is cold.house.arena and not cold.old.is_owner


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("end", ["as it waits", "as it is faulted in", "no room"])
def test_issue_a_cold_start_ends_when_the_server_is_to_stop(
    cold: ColdStart, end: str, warm: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It went on, whatever signal came. And the end of the server looked for the arena that it had removed."""
    cold.let_go, cold.stop_at = {"as it waits": (1 << 30, 3), "as it is faulted in": (4, 4), "no room": (4, 0)}[end]
    if end == "as it is faulted in":
        cold.stock._while_running = lambda: True  # its look comes before
    if end == "no room":
        cold.fault = SegmentError("no room")
    cold.run()
    house = cold.house
    assert cold.looks == (3 if end == "as it waits" else 4)
    assert cold.made == ([] if end == "as it waits" else [True]) and bool(house.gave_up) == (end == "no room")
    assert house.slot.worker.child is None and not house.slot.worker._due
    house.server.options = SimpleNamespace(warm=warm)
    house.server.stop()
    said = [each.message for each in caplog.records if each.levelno >= logging.WARNING]
    assert not cold.files and said == [f"{cold.old.name} is set aside and removed: worker 0 starts cold"]


@pytest.mark.parametrize("ended", [True, False])
def test_an_arena_is_kept_only_once_no_endpoint_uses_it(
    house: House, ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clients of one that the kernel does not end may write to it, also when the next server has it."""
    kept: list[Any] = []
    monkeypatch.setattr(segments, "store_closed", lambda _name: None)
    house.arena.is_owner, house.arena.unlink = True, lambda: kept.append("removed")
    house.server.options = SimpleNamespace(warm=True)
    house.server.stock = SimpleNamespace(keep=lambda arena, *_: kept.append(arena) or True)
    house.server.endpoints.end = lambda: ended
    house.server.stop()
    assert kept == [house.arena if ended else "removed"]


def test_issue_a_worker_that_was_taken_back_in_its_pause_is_told_nothing(house: House) -> None:
    """The manager had refused it, and the server's map has no part for it."""
    house.slot.worker.start_or_retry(lambda: house.server.start_worker(house.slot), 0.01)
    house.slot.worker.retire()
    house.server.slots.remove(house.slot)
    house.server.send_shards = lambda _slot: pytest.fail("it has no shards")
    house.server.member.abandoned = True
    house.until(lambda: not house.slot.worker._due, "the end of its pause")
    assert house.slot.worker.child is None and not house.loop.handler_errors


@pytest.mark.parametrize("error", LACKS)
@pytest.mark.parametrize("step", ["fork", "watch"])
def test_issue_a_name_that_cannot_be_looked_up_is_answered(
    house: House, monkeypatch: pytest.MonkeyPatch, error: Exception, step: str
) -> None:
    """Else the link to the manager waits for the answer for good."""
    owner = house.children if step == "fork" else house.loop
    monkeypatch.setattr(owner, step, once(getattr(owner, step), error, []))
    found: list[str] = []
    house.children.resolve("localhost", found.append)
    assert found == [""]

    def ended() -> bool:
        house.children.reap()
        return not house.children._resolvers

    house.until(ended, "its process ends")

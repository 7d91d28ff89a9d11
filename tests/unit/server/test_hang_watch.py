"""Which processes of a data server hang, by looks at when they answered last."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from simm.dataserver import DataServer
from simm.net.loop import Loop
from simm.net.sd_notify import TICK_S, Notifier
from simm.server import migration, rdma_supervisor
from simm.server.children import Children, Supervised
from simm.server.slots.hang_watch import HANG_S, HangWatch


class FakeProcess:
    """What :class:`HangWatch` uses of a ``Supervised``."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.child: Any = self
        self.pid = 1
        self.last_seen = 0.0
        self.kills = 0

    def kill(self) -> None:
        self.kills += 1


class FakeSlot:
    """What it uses of a ``WorkerSlot``."""

    def __init__(self) -> None:
        self.worker = FakeProcess("worker 0")
        self.streams = [FakeProcess("stream of worker 0")]
        self.ready = True

    def answer(self, at: float) -> None:
        self.worker.last_seen = self.streams[0].last_seen = at


@pytest.fixture
def slot() -> FakeSlot:
    return FakeSlot()


def watch(slot: FakeSlot, looks: int = 3) -> HangWatch:
    return HangWatch([slot], looks)  # type: ignore[list-item]


def test_who_answers_between_looks_lives(slot: FakeSlot) -> None:
    hangs = watch(slot)
    for at in range(20):
        slot.answer(float(at))
        assert hangs.maintain()
    assert slot.worker.kills == slot.streams[0].kills == 0


@pytest.mark.parametrize("which", ["worker", "stream"])
def test_who_hangs_is_ended_once_and_its_successor_starts_afresh(slot: FakeSlot, which: str) -> None:
    hangs = watch(slot)
    hung, other = (slot.worker, slot.streams[0])[:: 1 if which == "worker" else -1]
    assert hangs.maintain()
    for at in range(3):
        assert hung.kills == 0
        other.last_seen = at + 1.0
        assert hangs.maintain(), "to end it is what helps"
    assert (hung.kills, other.kills) == (1, 0)
    hung.last_seen = 50.0  # its successor starts
    for at in range(3):
        assert hangs.maintain()
        slot.answer(51.0 + at)
    assert (hung.kills, other.kills) == (1, 0)


def test_issue_a_stream_that_hangs_is_ended_beside_others_of_its_worker(slot: FakeSlot) -> None:
    """They have the same name, and the others' answers counted as its own."""
    hangs = watch(slot)
    hung, other = slot.streams[0], FakeProcess(slot.streams[0].name)
    slot.streams.append(other)
    for at in range(4):
        slot.worker.last_seen = other.last_seen = at + 1.0
        assert hangs.maintain()
    assert (hung.kills, other.kills) == (1, 0)


def test_who_does_not_go_is_no_sign_of_life(slot: FakeSlot) -> None:
    hangs = watch(slot)
    assert [hangs.maintain() for _ in range(6)] == [True, True, True, True, False, False]
    assert slot.worker.kills == 1
    slot.answer(9.0)
    assert hangs.maintain(), "it went on after all"


def test_a_worker_that_recovers_its_arena_may_take_long(slot: FakeSlot) -> None:
    hangs = watch(slot)
    slot.ready, slot.streams = False, []
    assert all(hangs.maintain() for _ in range(20)) and slot.worker.kills == 0
    slot.worker.child = None
    slot.ready = True
    assert all(hangs.maintain() for _ in range(20)) and slot.worker.kills == 0


def test_a_supervisor_that_was_stopped_itself_blames_nobody(slot: FakeSlot) -> None:
    """All that it sees after its pause is old. Seconds would condemn everybody; the look that it missed does not."""
    hangs = watch(slot)
    slot.answer(1.0)
    assert hangs.maintain()
    # An hour later the loop's timer runs once, before the answers that wait in the sockets are read.
    assert hangs.maintain()
    slot.answer(3600.0)
    assert hangs.maintain() and slot.worker.kills == 0


@pytest.mark.parametrize("which", ["worker", "stream"])
def test_issue_without_a_service_manager_who_hangs_is_ended_all_the_same(slot: FakeSlot, which: str) -> None:
    """As in Kubernetes: a kubelet ended the data server for it, with all values."""
    now = 1000.0
    server: Any = object.__new__(DataServer)
    loop = Loop(lambda: now)
    vars(slot).update(sharded=True)
    vars(server).update(
        announced=False, membership=SimpleNamespace(joined=True), endpoints=SimpleNamespace(awaited=False),
        slots=[slot], options=SimpleNamespace(listen_host=""), notify=Notifier(), loop=loop, _http="",
        pages=SimpleNamespace(ready=lambda *_: "READY", status=str),
    )  # fmt: skip
    hung, other = (slot.worker, slot.streams[0])[:: 1 if which == "worker" else -1]
    with contextlib.closing(loop):
        server._announce()
        for looks in range(1, round(HANG_S / TICK_S) + 2):
            assert hung.kills == 0, looks
            now += TICK_S
            other.last_seen = now
            loop.run_once(0.0)
    assert (hung.kills, other.kills) == (1, 0)


# -- endpoints and movers ------------------------------------------------------------------------------


class Looker:
    """A supervisor that looks at its endpoint, or at its mover, at a time that the test sets."""

    def __init__(self, kind: str) -> None:
        self.now, self.kills = 1000.0, 0
        self.loop = Loop(lambda: self.now)
        self.process = process = Supervised(Children(self.loop, lambda: ()), kind, lambda _: None, ())
        process.child = SimpleNamespace(pid=1, peer=None, ended=lambda: False)  # type: ignore[assignment]
        process.kill = self._kill  # type: ignore[method-assign]
        process.last_seen = self.now
        self.limit, self.every = migration.SILENT_S, 0.05
        server: Any = object.__new__(DataServer)
        nothing = SimpleNamespace(reap=lambda: None, tick=lambda: None)
        worker = SimpleNamespace(ended=lambda: None, start_if_missing=lambda _start: None)
        slot = SimpleNamespace(worker=worker, mover=process, streams=[])
        vars(server).update(children=nothing, endpoints=nothing, growth=nothing, slots=[slot])
        self._look: Callable[[], None] = server._reap
        if kind == "endpoint":
            self.limit, self.every = rdma_supervisor.SILENT_S, rdma_supervisor.POLL_S
            endpoints: Any = object.__new__(rdma_supervisor.Endpoints)
            endpoints.by_worker = {0: SimpleNamespace(process=process)}
            self._look = endpoints._poll

    def _kill(self) -> None:
        self.kills += 1

    def look(self, seconds: float, *, answers: bool) -> None:
        """Look again and again for so long; ``answers``: the process answers in between."""
        until = self.now + seconds
        while self.now < until:
            self.now += self.every
            self._look()
            if answers:
                self.process.last_seen = self.now


@pytest.fixture(params=["endpoint", "mover"])
def looker(request: pytest.FixtureRequest) -> Iterator[Looker]:
    made = Looker(request.param)
    yield made
    made.process.child = None
    made.loop.close()


def test_who_says_nothing_for_long_is_ended_once(looker: Looker) -> None:
    looker.look(2 * looker.limit, answers=True)
    looker.look(0.9 * looker.limit, answers=False)
    assert looker.kills == 0
    looker.look(0.2 * looker.limit, answers=False)
    assert looker.kills == 1
    looker.look(0.5 * looker.limit, answers=False)
    assert looker.kills == 1, "its end takes a while"


def test_issue_a_supervisor_that_was_stopped_ends_no_endpoint_and_no_mover(looker: Looker) -> None:
    """It asked nothing meanwhile, and so nothing was said. It ended all endpoints when it went on."""
    for _ in range(20):
        looker.look(1.0, answers=True)
        looker.now += 3600.0
    assert looker.kills == 0


def test_a_process_that_hangs_is_ended_also_if_its_supervisor_seldom_looks(looker: Looker) -> None:
    for _ in range(20):
        looker.now += looker.limit
        looker.look(looker.every, answers=False)
    assert looker.kills > 0

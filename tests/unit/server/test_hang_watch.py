"""Which processes of a data server hang, by looks at when they answered last."""

from __future__ import annotations

from typing import Any

import pytest

from simm.server.children import HangWatch


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

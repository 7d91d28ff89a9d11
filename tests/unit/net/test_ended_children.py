"""How child processes are ended, also those that the kernel does not end at once."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from simm.net import process
from simm.net.process import KILLED_S, end_children
from simm.server.rdma_supervisor import DEAD_S, Endpoints


class Stuck:
    """A child that goes on for so long after SIGKILL, as its memory is given back."""

    code = None

    def __init__(self, pid: int, clock: Clock, lasts_s: float) -> None:
        self.pid, self.clock, self.lasts_s = pid, clock, lasts_s
        self.ends_at = float("inf")
        self.closed = False

    def ended(self) -> bool:
        assert self.clock.now < 1000.0, "it is waited for without end"
        return self.clock.now >= self.ends_at

    def lost(self) -> None:
        self.closed = True


class Clock:
    """The time, which passes as somebody sleeps, and the children that signals go to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.children: dict[int, Stuck] = {}
        self.sent: list[tuple[int, int]] = []
        monkeypatch.setattr(process, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))
        monkeypatch.setattr(os, "kill", self.kill)

    def sleep(self, seconds: float) -> None:
        self.now += 0.1

    def kill(self, pid: int, number: int) -> None:
        self.sent.append((pid, number))
        if number == signal.SIGKILL:
            self.children[pid].ends_at = self.now + self.children[pid].lasts_s

    def child(self, lasts_s: float) -> Any:
        pid = len(self.children) + 1
        made = self.children[pid] = Stuck(pid, self, lasts_s)
        return made


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.mark.parametrize("killed_s", [KILLED_S, 20.0])
def test_issue_one_that_does_not_end_is_left(clock: Clock, killed_s: float) -> None:
    """A supervisor waited for it without end, and its heartbeats with it. All are killed before one is waited for."""
    stuck, slow, fast = clock.child(float("inf")), clock.child(killed_s / 2), clock.child(0.0)
    assert end_children([stuck, slow, fast], 3.0, killed_s) == [stuck]
    assert clock.now < 100.0 + 3.0 + killed_s + 1.0
    assert [pid for pid, number in clock.sent if number == signal.SIGKILL] == [1, 2, 3]
    assert stuck.closed and slow.closed and fast.closed


@pytest.mark.parametrize("lasts_s", [DEAD_S / 2, float("inf")])
def test_a_server_gives_up_an_endpoint_that_does_not_end(clock: Clock, lasts_s: float) -> None:
    """Its clients read the arena meanwhile, and write to it."""
    gave_up: list[str] = []
    endpoints: Any = object.__new__(Endpoints)
    endpoints.by_worker = {0: SimpleNamespace(process=SimpleNamespace(child=clock.child(lasts_s)))}
    endpoints._give_up = gave_up.append
    assert endpoints.end() == (not gave_up) == (lasts_s < DEAD_S)
    assert all("process 1 was killed and does not end" in each for each in gave_up)

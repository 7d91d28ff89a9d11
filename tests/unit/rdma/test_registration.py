"""Registrations of a client's memory with its rails: what fails, and when it is tried again."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from simm.gpu.direct import DeviceRegistration
from simm.rdma import registration
from simm.rdma.api import FabricError
from simm.rdma.registration import AGAIN_S, Registration
from tests.support.waiting import wait_until

WAIT_S = 120.0


class Rail:
    """Registers nothing while there is a reason."""

    name = "r0"

    def __init__(self) -> None:
        self.why = "the kernel is short of memory"
        self.asked = 0

    def register(self, address: int, length: int, access: Any) -> Any:
        self.asked += 1
        if self.why:
            raise FabricError(self.why, "ENOMEM")
        return SimpleNamespace(address=address, lkey=7, rkey=8, close=lambda: None)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [1000.0]
    monkeypatch.setattr(registration, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    return clock


def test_what_could_not_be_registered_is_tried_again_after_a_pause(
    now: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    rail: Any = Rail()
    memory = Registration(4096, 4096)
    pause_s, longest_s = AGAIN_S
    with caplog.at_level(logging.WARNING, "simm.client"):
        for tries in range(1, 12):
            assert memory.lkey(rail, again=True) is None
            assert memory.lkey(rail, again=True) is None
            assert rail.asked == tries, "once for each pause"
            now[0] += pause_s - 0.001
            assert memory.lkey(rail, again=True) is None and rail.asked == tries
            now[0] += 0.002
            pause_s = min(2 * pause_s, longest_s)
    assert len(caplog.records) == 1
    rail.why = ""
    assert memory.lkey(rail) is None and rail.asked == 11, "nor does whoever has no time for it"
    assert memory.lkey(rail, again=True) == 7
    assert memory.lkey(rail) == 7 and rail.asked == 12
    memory.close()
    assert memory.lkey(rail) is None and rail.asked == 12


def test_no_thread_waits_for_the_further_try_of_another(now: list[float]) -> None:
    rail: Any = Rail()
    memory = Registration(4096, 4096)
    assert memory.lkey(rail) is None
    inside, go_on = threading.Event(), threading.Event()

    def slowly(*_: Any) -> Any:
        inside.set()
        ended.append(go_on.wait(10.0))
        raise FabricError("still short of memory", "ENOMEM")

    rail.register = slowly
    now[0] += 2 * AGAIN_S[0]
    keys: list[Any] = []
    ended: list[bool] = []
    trying = threading.Thread(target=lambda: memory.lkey(rail, again=True))
    others = threading.Thread(target=lambda: keys.extend([memory.lkey(rail), memory.lkey(rail, again=True)]))
    trying.start()
    assert inside.wait(WAIT_S)
    others.start()
    try:
        wait_until(lambda: len(keys) == 2, "the others have their answers")
        now[0] += 2 * AGAIN_S[1]
        assert memory.lkey(rail, again=True) is None
        assert not ended, "nor if it takes longer than a pause"
    finally:
        go_on.set()
        trying.join(WAIT_S)
        others.join(WAIT_S)
    assert keys == [None, None]


def test_memory_of_a_gpu_is_tried_once(now: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """What it lacks does not come by waiting."""
    rail: Any = Rail()
    tries: list[int] = []

    def made(self: Any, rail: Any) -> Any:
        tries.append(1)
        raise FabricError("no kernel module")

    monkeypatch.setattr(DeviceRegistration, "_made", made)
    memory = DeviceRegistration(SimpleNamespace(address=4096, size=4096, writable=True, keep=None, device=0))  # type: ignore[arg-type]
    for _ in range(3):
        assert memory.lkey(rail, again=True) is None
        now[0] += 2 * AGAIN_S[1]
    assert len(tries) == 1

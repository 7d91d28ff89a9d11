"""What many threads set and one waits for, also where a signal's handler raises."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from simm.host.threads import Wake
from tests.support.ended import ended
from tests.support.interrupts import everywhere

WAIT_S = 120.0
MODULES = ("simm.", "threading")


def test_what_is_set_ends_one_wait() -> None:
    wake = Wake()
    assert not wake.wait(0.0)
    wake.set()
    wake.set()
    assert wake.wait(0.0) and not wake.wait(0.0), "twice is once"
    waited: list[bool] = []
    thread = threading.Thread(target=lambda: waited.append(wake.wait(WAIT_S)))
    thread.start()
    wake.set()
    thread.join(WAIT_S)
    assert waited == [True] and not wake.wait(0.0)


def test_many_threads_set_it() -> None:
    wake, ready = Wake(), threading.Barrier(8)

    def set_often() -> None:
        ready.wait(WAIT_S)
        for _ in range(200):
            wake.set()

    threads = [threading.Thread(target=set_often) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            wake.wait(0.0)
    wake.set()
    assert wake.wait(0.0) and not wake.wait(0.0)


def test_no_interrupt_leaves_it_stuck() -> None:
    wake = Wake()

    def check() -> None:
        assert ended(wake.set) and wake.wait(0.0) and not wake.wait(0.0)

    assert everywhere(wake.set, check, MODULES) >= 2


def test_what_a_handler_raises_is_not_taken_for_its_own() -> None:
    class Interrupted:
        def release(self) -> None:
            raise RuntimeError("of a handler")

    wake: Any = Wake()
    wake._unset = Interrupted()
    with pytest.raises(RuntimeError, match="of a handler"):
        wake.set()

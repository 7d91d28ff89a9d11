"""Waits for what a lock guards to change, and what an interrupt of one leaves."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from simm.host import threads as threads_module
from simm.host.threads import Waiters
from tests.support.interrupts import Interrupted, everywhere
from tests.support.waiting import wait_until

WAIT_S = 120.0
MODULES = ("simm.", "threading")


class Room:
    """Some of something, for which calls wait."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.changed = Waiters(self.lock)
        self.left = 0

    def take(self) -> bool:
        assert self.lock.locked()
        if self.left:
            self.left -= 1
            return True
        return False

    def give(self, count: int) -> None:
        with self.lock:
            self.left += count
            self.changed.notify_all()


def test_it_waits_for_what_another_thread_brings() -> None:
    room = Room()
    got: list[bool] = []
    threads = [
        threading.Thread(target=lambda: got.append(room.changed.wait_for(room.take, time.monotonic() + WAIT_S)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for count in (1, 3):
        wait_until(lambda: bool(room.changed), "somebody waits")
        room.give(count)
    for thread in threads:
        thread.join(WAIT_S)
    assert got == [True] * 4 and not room.left and not room.changed


def test_the_first_look_needs_no_time_and_a_late_one_is_for_those_who_ask_for_it() -> None:
    room = Room()
    room.left = 2
    assert room.changed.wait_for(room.take, 0.0) and room.changed.wait_for(room.take, 0.0, late=False)
    assert not room.changed.wait_for(room.take, 0.0) and not room.changed

    def brought_at_the_end() -> bool:
        looks.append(1)
        return len(looks) > 1

    for late in (True, False):
        looks: list[int] = []
        assert room.changed.wait_for(brought_at_the_end, time.monotonic() + 0.001, late=late) == late
        assert len(looks) == 1 + late and not room.changed and not room.lock.locked()


def test_what_a_look_raises_leaves_the_lock_free() -> None:
    room = Room()
    with pytest.raises(ZeroDivisionError):
        room.changed.wait_for(lambda: bool(1 // 0), time.monotonic() + WAIT_S)
    assert not room.lock.locked() and not room.changed


def test_no_interrupt_of_a_wait_leaves_the_lock_taken_or_a_thread_that_is_not_woken() -> None:
    room = Room()

    def call() -> None:
        if not room.changed.wait_for(room.take, time.monotonic() + 0.001):
            raise Interrupted if sys.getprofile() is None else TimeoutError

    def check() -> None:
        assert not room.lock.locked()
        other = threading.Thread(target=lambda: room.changed.wait_for(room.take, time.monotonic() + WAIT_S))
        before = len(room.changed._waiting)
        other.start()
        wait_until(lambda: len(room.changed._waiting) > before, "it waits")
        room.give(1)
        other.join(WAIT_S)
        assert not room.left and not room.changed

    def waits() -> None:
        try:
            call()
        except TimeoutError:
            pass

    assert everywhere(waits, check, MODULES) > 5


def test_no_interrupt_of_a_wait_releases_the_lock_of_another_thread() -> None:
    """At each place at which the waiting thread does not have the lock, another one takes it first."""
    room = Room()
    stop = 0
    while True:
        left, taken = stop, False

        def look(frame: Any, event: str, _: object) -> None:
            nonlocal left, taken
            if frame.f_globals["__name__"].startswith(MODULES) and event in ("call", "c_return"):
                left -= 1
                if left == -1:
                    sys.setprofile(None)
                    taken = room.lock.acquire(False)  # such a lock does not know its thread
                    raise Interrupted

        sys.setprofile(look)
        try:
            room.changed.wait_for(room.take, time.monotonic() + 0.001)
        except Interrupted:
            pass
        finally:
            sys.setprofile(None)
        assert room.lock.locked() == taken, f"place {stop}"
        if taken:
            room.lock.release()
        if left >= 0:
            break
        stop += 1
    assert stop > 5


def test_a_wake_up_that_was_interrupted_is_made_again() -> None:
    """Also if those who were woken are waiting no more."""
    room = Room()
    woken: list[int] = []

    def wait() -> None:
        room.changed.wait_for(lambda: room.left > 0, time.monotonic() + WAIT_S)
        woken.append(1)

    threads: list[threading.Thread] = []

    def begin() -> None:
        room.left = 0
        woken.clear()
        threads[:] = [threading.Thread(target=wait) for _ in range(3)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(room.changed._waiting) == 3, "they wait")

    def check() -> None:
        room.give(1)
        for thread in threads:
            thread.join(WAIT_S)
        assert len(woken) == 3 and not room.changed
        begin()

    begin()
    try:
        assert everywhere(lambda: room.give(1), check, MODULES) > 3
    finally:
        room.give(1)
        for thread in threads:
            thread.join(WAIT_S)


def test_one_wake_up_makes_one_thread_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else dozens of threads look for each connection that is given back, and all but one in vain."""
    monkeypatch.setattr(threads_module, "AGAIN_S", WAIT_S)
    room = Room()
    looks: list[int] = []

    def look() -> bool:
        looks.append(1)
        return room.take()

    threads = [threading.Thread(target=room.changed.wait_for, args=(look, time.monotonic() + WAIT_S)) for _ in range(8)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(room.changed._waiting) == 8, "they wait")
    for given in range(8):
        looks.clear()
        with room.lock:
            room.left += 1
            room.changed.notify()
        wait_until(lambda: room.left == 0, "one has taken it")
        assert len(looks) == 1 and len(room.changed._waiting) == 7 - given
    for thread in threads:
        thread.join(WAIT_S)


def test_a_wake_up_that_comes_too_late_goes_to_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads_module, "AGAIN_S", WAIT_S)
    room = Room()
    got: dict[str, bool] = {}

    def wait(name: str, until: float) -> None:
        got[name] = room.changed.wait_for(room.take, until, late=False)

    soon = time.monotonic() + 0.2
    threads = []
    for count, (name, until) in enumerate([("late", soon), ("next", soon + WAIT_S)], 1):
        threads.append(threading.Thread(target=wait, args=(name, until)))
        threads[-1].start()
        wait_until(lambda count=count: len(room.changed._waiting) == count or "late" in got, "it waits")
    with room.lock:
        room.left = 1
        room.changed.notify()
        while time.monotonic() < soon:  # who was woken needs the lock to look
            time.sleep(0.01)
    for thread in threads:
        thread.join(WAIT_S)
    assert got == {"late": False, "next": True}


def test_issue_a_wake_up_that_ends_in_an_error_goes_to_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads_module, "AGAIN_S", 2 * WAIT_S)
    room = Room()
    ended: list[str] = []

    def fail() -> bool:
        if room.left:
            raise ZeroDivisionError
        return False

    def wait(name: str, look: Callable[[], bool]) -> None:
        try:
            room.changed.wait_for(look, time.monotonic() + 2 * WAIT_S)
        except ZeroDivisionError:
            pass
        ended.append(name)

    both = (("bad", fail), ("next", room.take))
    threads = [threading.Thread(target=wait, args=each, daemon=True) for each in both]
    for count, thread in enumerate(threads, 1):
        thread.start()
        wait_until(lambda count=count: len(room.changed._waiting) == count, "it waits")
    with room.lock:
        room.left = 1
        room.changed.notify()
    for thread in threads:
        thread.join(WAIT_S)
    assert sorted(ended) == ["bad", "next"] and not room.left and not room.changed


def test_a_lost_wake_up_costs_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads_module, "AGAIN_S", 0.01)
    room = Room()
    thread = threading.Thread(target=room.changed.wait_for, args=(room.take, time.monotonic() + WAIT_S))
    thread.start()
    wait_until(lambda: bool(room.changed), "it waits")
    with room.lock:
        room.left = 1  # and nobody is told
    thread.join(WAIT_S)
    assert not thread.is_alive() and not room.left

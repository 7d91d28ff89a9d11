"""A supervisor's loop: a timer that fails by a mistake does not take all arenas with it."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator

import pytest

from simm import dataserver
from simm.errors import CorruptionError, LocalProtocolError, SegmentError
from simm.net.loop import Loop
from tests.support.clock import Clock


@pytest.fixture
def loops() -> Iterator[Callable[..., tuple[Loop, Clock]]]:
    """Make loops with a clock of their own."""
    with contextlib.ExitStack() as stack:

        def make(**how: bool) -> tuple[Loop, Clock]:
            clock = Clock()
            loop = Loop(clock, **how)
            stack.callback(loop.close)
            return loop, clock

        yield make


def raising(exc: BaseException, calls: list[int]) -> Callable[[], None]:
    def fail() -> None:
        calls.append(1)
        raise exc

    return fail


@pytest.mark.parametrize("exc", [ZeroDivisionError(), MemoryError(), LocalProtocolError("X cannot be packed")])
def test_a_timer_that_fails_is_counted_and_the_others_go_on(
    exc: Exception, loops: Callable[..., tuple[Loop, Clock]], caplog: pytest.LogCaptureFixture
) -> None:
    loop, clock = loops(lasting=True)
    calls: list[int] = []
    others: list[int] = []
    loop.call_every(0.25, raising(exc, calls))
    loop.call_every(0.25, lambda: others.append(1))
    for _ in range(3):
        clock.now += 0.25
        loop.run_once(0)
    assert len(calls) == len(others) == loop.handler_errors == 3
    assert "a timer failed" in caplog.text and type(exc).__name__ in caplog.text


def test_so_is_the_handler_of_a_watched_descriptor(
    loops: Callable[..., tuple[Loop, Clock]], caplog: pytest.LogCaptureFixture
) -> None:
    """Its descriptor stays readable: the lines that each turn would log are limited, and timers have their turns."""
    loop, clock = loops(lasting=True)
    ours, theirs = socket.socketpair()
    others: list[int] = []
    with ours, theirs:
        loop.watch(ours, lambda _mask: raising(ZeroDivisionError(), [])())
        loop.call_every(0.25, lambda: others.append(1))
        theirs.send(b"x")
        for _ in range(100):
            clock.now += 0.0025
            loop.run_once(0)
        loop.unwatch(ours)
    assert loop.handler_errors == 100 and len(others) == 1
    assert 0 < caplog.text.count("the handler of a watched descriptor failed") < 30


@pytest.mark.parametrize("exc", [CorruptionError("x"), SegmentError("x"), KeyboardInterrupt(), SystemExit(1)])
def test_what_is_raised_on_purpose_ends_it(
    exc: BaseException, loops: Callable[..., tuple[Loop, Clock]]
) -> None:
    loop, clock = loops(lasting=True)
    loop.call_later(0.1, raising(exc, []))
    clock.now += 0.2
    with pytest.raises(type(exc)):
        loop.run_once(0)


def test_another_loop_ends_by_it(loops: Callable[..., tuple[Loop, Clock]]) -> None:
    """A worker's successor recovers the arena, a manager has its state: nobody knows what was left half done."""
    loop, clock = loops()
    loop.call_later(0.1, raising(ZeroDivisionError(), []))
    clock.now += 0.2
    with pytest.raises(ZeroDivisionError):
        loop.run_once(0)


def test_the_supervisor_has_such_a_loop() -> None:
    with open(dataserver.__file__, encoding="utf-8") as file:
        text = file.read()
    assert text.count("Loop(") == text.count("Loop(lasting=True)") == 1

"""Processes that die again and again: after which pauses they are restarted, and for how long."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from simm.net.loop import Loop
from simm.net.process import Child, end_children
from simm.rpc import encode
from simm.server.children import (
    CORRUPT,
    DOWN_S,
    FRUITLESS_MAX,
    PAUSE_S,
    RESTART_WINDOW_S,
    RESTARTS_MAX,
    SILENT_S,
    STARTS_MAX,
    STREAM_PAUSE_S,
    Children,
    Supervised,
    WorkerSlot,
    pause_after,
)
from simm.wire import messages as M
from tests.support.waiting import wait_until

GONE = -9


def test_pauses_grow_while_nothing_serves() -> None:
    assert pause_after(0) == 0.0, "the first successor comes at once"
    assert [pause_after(count) for count in range(1, 7)] == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0]
    assert pause_after(RESTARTS_MAX + 1) == PAUSE_S[1]
    assert pause_after(RESTARTS_MAX, STREAM_PAUSE_S) == STREAM_PAUSE_S < SILENT_S, "so long a stream may be silent"


def slot_with(served: bool) -> WorkerSlot:
    slot = WorkerSlot(0, 0, SimpleNamespace(heartbeat=lambda: 1))  # type: ignore[arg-type]
    slot.worker = SimpleNamespace(child=None)  # type: ignore[assignment]
    slot.ready = served
    return slot


@pytest.mark.parametrize("served", [True, False])
@pytest.mark.parametrize("code", [GONE, CORRUPT])
def test_issue_a_worker_that_does_not_come_to_serve_is_tried_for_minutes(served: bool, code: int) -> None:
    """60 deaths within some seconds ended the server, whatever was scarce just then."""
    slot, now, deaths = slot_with(served), 1000.0, 0
    while not slot.hopeless():
        slot.worker_died(code, now)
        deaths += 1
        now += pause_after(slot.fruitless)
    assert deaths == (RESTARTS_MAX + 1 if served else STARTS_MAX), "the first one had served"
    assert f"died {RESTARTS_MAX if served else STARTS_MAX} times in a row before it served" in slot.hopeless()
    assert now - 1000.0 > (240 if served else 10)


def test_a_worker_that_serves_and_dies_all_the_time_ends_its_server() -> None:
    slot, deaths = slot_with(True), 0
    while not slot.hopeless():
        slot.ready = True
        slot.worker_died(GONE, 1000.0 + deaths / 2)
        assert pause_after(slot.fruitless) == 0.0
        deaths += 1
    assert deaths == RESTARTS_MAX and f"within {RESTART_WINDOW_S:.0f} s" in slot.hopeless()


def test_issue_a_worker_that_has_served_is_due_for_minutes() -> None:
    """A kubelet ended the server, with all values, when the host had no process to spare for some seconds."""
    slot, now = slot_with(True), 1000.0
    slot.worker_died(GONE, now)
    assert slot.comes_up(now) and slot.comes_up(now + 10), "it cannot be started: no death counts that"
    assert slot.comes_up(now + DOWN_S) and not slot.comes_up(now + DOWN_S + 1), "but not for ever"
    for _ in range(RESTARTS_MAX - 1):
        slot.worker_died(GONE, now)
        pause_s = pause_after(slot.fruitless)
        assert slot.comes_up(now) and slot.comes_up(now + pause_s)
        now += pause_s
    slot.worker_died(GONE, now)
    assert not slot.comes_up(now)


def test_a_worker_that_never_served_must_be_there_when_it_is_due() -> None:
    slot, now = slot_with(False), 1000.0
    assert not slot.comes_up(now)
    for _ in range(3):
        slot.worker_died(GONE, now)
        pause_s = pause_after(slot.fruitless)
        assert slot.comes_up(now) and slot.comes_up(now + pause_s) and not slot.comes_up(now + pause_s + 10)
        now += pause_s


def test_issue_processes_that_live_long_do_not_prolong_it() -> None:
    """Each recovery took a minute and ended by the memory's limit: 60 of them would be an hour without that worker."""
    slot, now, deaths = slot_with(True), 1000.0, 0
    while not slot.hopeless():
        slot.worker_died(GONE, now)
        deaths += 1
        now += 60.0
    assert FRUITLESS_MAX < deaths < 10 and "has not served for" in slot.hopeless()
    slot.ready = True
    slot.worker_died(GONE, now)
    assert not slot.hopeless(), "one has served"


@pytest.fixture
def children() -> Iterator[Children]:
    loop = Loop()
    yield Children(loop, lambda: ())
    loop.close()


def end(process: Supervised) -> None:
    if process.child is not None:
        end_children([process.child], 0.0)
        process.ended()


def test_who_has_said_something_was_of_use(children: Children) -> None:
    """Of a stream no more is known. Its next death is the first one again."""
    speaks = [False]
    heard: list[Any] = []

    def body(sock: socket.socket) -> None:
        if speaks[0]:
            sock.sendall(encode(M.Done(1)))
            sock.recv(1)

    process = Supervised(children, "a stream", body, [], lambda msg, _: heard.append(msg))
    try:
        for count in (1, 2, 3):
            process.start()
            wait_until(process.ended, "it has ended")
            assert process.fruitless == count
        speaks[0] = True
        process.start()
        wait_until(lambda: children.loop.run_once(0.01) or heard, "it speaks")
        process.kill()
        wait_until(process.ended, "it has ended")
        assert process.fruitless == 0
    finally:
        end(process)


def test_a_pause_ends_with_the_server(children: Children) -> None:
    started: list[int] = []
    for stopping in (False, True):
        children.or_later(lambda: started.append(1), 0.01)
        assert not started
        children.stopping = stopping
        for _ in range(5):
            children.loop.run_once(0.02)
        assert bool(started) != stopping
        started.clear()


def test_processes_that_were_forked_earlier_see_that_all_ends(children: Children) -> None:
    def body(sock: socket.socket) -> None:
        while sock.recv(1):
            sock.sendall(b"1" if children.stopping else b"0")

    child = children.fork(body, [])
    try:
        seen = []
        for stopping in (False, True):
            children.stopping = stopping
            child.sock.sendall(b"?")
            seen.append(child.sock.recv(1))
        assert seen == [b"0", b"1"]
    finally:
        end_children([child], 0.0)


def test_issue_sigterm_ends_a_child_that_does_not_expect_it(children: Children) -> None:
    """The supervisor's handler stops the supervisor's loop, of which a child has a copy that never runs."""
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    made: list[Child] = []
    try:
        for _ in range(20):
            child = children.fork(lambda sock: (sock.recv(1), None)[1], [])
            made.append(child)
            os.kill(child.pid, signal.SIGTERM)  # at whatever point of its start
            wait_until(child.ended, "it ends")
            assert child.code == -signal.SIGTERM
        assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        end_children(made, 0.0)
        signal.signal(signal.SIGTERM, before)

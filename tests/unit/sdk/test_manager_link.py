"""A subscription takes what is pushed to it when it arrives, even in one piece with an answer."""

from __future__ import annotations

import contextlib
import errno
import functools
import math
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from simm.config.client_options import ClientOptions
from simm.constants import NO_OWNER, SHARD_COUNT
from simm.errors import DeadlineError, TransportError
from simm.net.channel import Channel
from simm.rpc import Flag, Frame, decode, encode, reply
from simm.sdk import manager_link
from simm.sdk.manager_link import Subscription
from simm.sdk.ops import epochs
from simm.wire import messages as M
from simm.wire.epoch_messages import Advanced
from simm.wire.trace_messages import OrderTrace
from tests.support.frame_server import FrameServer
from tests.support.waiting import WAIT_S, wait_until

NEVER_S = (1e6, 1e6)
#: Nothing would end it: the thread sleeps until something arrives.
HANGS_S = 60.0
OWNERS = NO_OWNER.to_bytes(2, "little") * SHARD_COUNT


class PushingManager(FrameServer):
    """Pushes an order to trace in one piece with its answer to each request of one type."""

    def __init__(self, beside: type) -> None:
        self.beside = beside
        self.orders = 0
        super().__init__()

    def on_frame(self, sock: socket.socket, frame: Frame, state: Any) -> None:
        msg = decode(frame)
        answer: Any = M.MapReply(1, 1, [], OWNERS)
        if isinstance(msg, M.Hello):
            answer = M.Welcome(1, 0, 0, 0, 0, 0, 0, "")
        elif isinstance(msg, M.Ping):
            answer = M.Pong(msg.cookie)
            manager_link.PING_S = NEVER_S  # type: ignore[misc]
        sent = reply(answer, frame.request_id)
        if isinstance(msg, self.beside):
            self.orders += 1
            sent += encode(OrderTrace(self.orders, 0, 60), 0, flags=Flag.PUSH)
        sock.sendall(sent)


@contextlib.contextmanager
def following(manager: PushingManager) -> Iterator[Subscription]:
    subscription = Subscription([manager.address], WAIT_S, "", lambda _map: True)
    try:
        subscription.connect(WAIT_S)
        subscription.start()
        yield subscription
    finally:
        subscription.close()
        subscription.join(WAIT_S)
        manager.stop()


@pytest.mark.parametrize("beside", [M.MapGet, M.Ping])
def test_a_push_in_one_piece_with_an_answer(monkeypatch: pytest.MonkeyPatch, beside: type) -> None:
    """It is taken although nothing arrives afterwards: at the first answer, and at a later one."""
    monkeypatch.setattr(manager_link, "ASK_ANYWAY_S", NEVER_S)
    monkeypatch.setattr(manager_link, "PING_S", NEVER_S if beside is M.MapGet else (0.05, 0.05))
    with following(PushingManager(beside)) as subscription:

        def taken() -> int:
            return subscription.traces[0].ratio if subscription.traces is not None else 0

        wait_until(lambda: taken() == 1, "the push beside the first answer", HANGS_S)
        if beside is M.MapGet:
            subscription.refresh()
            wait_until(lambda: taken() == 2, "the push beside a later answer", HANGS_S)
        assert subscription.connected


# --- a process that has nothing left --------------------------------------------------------------


def test_without_a_descriptor_there_is_no_subscription(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "eventfd", none_left)
    with pytest.raises(TransportError, match="Too many open files"):
        Subscription([("127.0.0.1", 1)], WAIT_S, "", lambda _map: True)


@pytest.mark.parametrize("interrupted", [False, True])
def test_one_whose_thread_did_not_start_is_closed_whole(monkeypatch: pytest.MonkeyPatch, interrupted: bool) -> None:
    """Its descriptor stayed open: the thread was to close it."""

    def none_left(_thread: threading.Thread) -> None:
        if interrupted:
            raise KeyboardInterrupt
        raise RuntimeError("can't start new thread")

    raised: Any = (KeyboardInterrupt, None) if interrupted else (TransportError, "can't start new thread")

    manager = PushingManager(M.MapGet)
    subscription = Subscription([manager.address], WAIT_S, "", lambda _map: True)
    try:
        subscription.connect(WAIT_S)
        channel, wake = subscription._channel, subscription._wake
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", none_left)
            with pytest.raises(raised[0], match=raised[1]):
                subscription.start()
        subscription.close()
        subscription.join(WAIT_S)
        assert channel is not None and channel.fileno() == -1 and subscription._wake == -1
        with pytest.raises(OSError):
            os.fstat(wake)
    finally:
        subscription.close()
        manager.stop()


def test_an_error_of_this_process_while_it_connects_does_not_end_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last descriptor is the socket's, and there is none to load a module with. It used to have no map ever after.

    Whoever waits for the first round need not wait for the next one.
    """
    real, failed = manager_link.greet, threading.Event()

    def greet(*arguments: Any, **more: Any) -> Any:
        if not failed.is_set():
            failed.set()
            raise OSError(errno.EMFILE, "Too many open files")
        return real(*arguments, **more)

    monkeypatch.setattr(manager_link, "greet", greet)
    manager = PushingManager(M.MapGet)
    subscription = Subscription([manager.address], WAIT_S, "", lambda _map: True)
    try:
        subscription.start()
        subscription.await_first_round(WAIT_S)
        assert failed.is_set()
        wait_until(lambda: subscription.connected, "it has tried again", HANGS_S)
    finally:
        subscription.close()
        subscription.join(WAIT_S)
        manager.stop()


class Clock:
    """Time that passes when somebody waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)
        by_clock = functools.partial(epochs.confirmed, clock=lambda: self.now, sleep=self.sleep)
        monkeypatch.setattr(epochs, "confirmed", by_clock)

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class ScriptedManagers:
    """Managers by port: those above 1 are silent, ``leader`` answers, 1 refuses. HELLO takes ``hello_s``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, hello_s: float = 0.0) -> None:
        self.clock = Clock(monkeypatch)
        #: What each connection was allowed, seconds; what the leader was asked, and when its answer was awaited until.
        self.allowed: list[float] = []
        self.asked: list[tuple[int, float]] = []

        def tcp(_host: str, port: int, deadline_s: float, *_: Any, **__: Any) -> Any:
            self.allowed.append(deadline_s)
            if port > 1:
                self.clock.now += deadline_s
                raise DeadlineError("no answer")
            return self.Link(self)

        def greet(link: ScriptedManagers.Link, *_: Any, **__: Any) -> None:
            self.clock.now += hello_s
            if self.clock.now >= link.bounded:
                raise DeadlineError("no answer to HELLO")

        monkeypatch.setattr(Channel, "tcp", tcp)
        monkeypatch.setattr(manager_link, "greet", greet)

    class Link:
        """A connection to the leader."""

        broken = ""

        def __init__(self, managers: ScriptedManagers) -> None:
            self.managers = managers
            self.deadline_s = self.bounded = math.inf

        def bound(self, until: float = math.inf) -> None:
            self.bounded = until

        def poll_pushes(self) -> None:
            pass

        def close(self) -> None:
            pass

        def call(self, msg: Any) -> Any:
            assert self.bounded == math.inf
            self.managers.asked.append((msg.timeout_ms, self.deadline_s))
            return Advanced(7)


def advance(ports: list[int], timeout_s: float) -> int:
    options = ClientOptions.resolve(manager=",".join(f"127.0.0.1:{port}" for port in ports))
    return epochs.advance(options, "n", timeout_s)


def test_silent_managers_cost_an_advance_no_more_than_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    managers = ScriptedManagers(monkeypatch)
    assert advance([2, 3, 1], 60.0) == 7
    assert managers.allowed == [epochs.CONNECT_S] * 3
    left_s = 60.0 - 2 * epochs.CONNECT_S
    assert managers.asked == [(round(left_s * 1000), left_s + epochs.GRACE_S)], "what is left when it is asked"


@pytest.mark.parametrize("timeout_s", [0.5, 2.0, 7.0])
def test_an_advance_that_no_manager_answers_ends_in_time(monkeypatch: pytest.MonkeyPatch, timeout_s: float) -> None:
    managers = ScriptedManagers(monkeypatch)
    began = managers.clock.now
    with pytest.raises(TransportError, match="not confirmed"):
        advance([2, 3, 4, 5], timeout_s)
    assert managers.clock.now - began <= timeout_s + 1e-9 and max(managers.allowed) <= epochs.CONNECT_S


def test_hello_is_a_part_of_a_managers_share(monkeypatch: pytest.MonkeyPatch) -> None:
    managers = ScriptedManagers(monkeypatch, hello_s=epochs.CONNECT_S)
    with pytest.raises(TransportError, match="HELLO"):
        advance([1], epochs.CONNECT_S + 0.1)
    assert not managers.asked


@pytest.mark.parametrize("addresses", [1, 2, 4, 10])
def test_silent_managers_cost_a_new_client_no_more_than_its_time(
    monkeypatch: pytest.MonkeyPatch, addresses: int
) -> None:
    """A round that had begun went on to its end: ten of them took 20 s of 5. Each has its share of the time."""
    now, tried = [100.0], list[tuple[int, float]]()
    subscription = Subscription([("127.0.0.1", 1 + number) for number in range(addresses)], 30.0, "", lambda _map: True)

    def silent(_host: str, port: int, seconds: float, *_: object) -> Channel:
        now[0] += seconds
        tried.append((port, seconds))
        raise DeadlineError("nobody answers")

    with monkeypatch.context() as patch:
        patch.setattr("time.monotonic", lambda: now[0])
        patch.setattr("time.sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
        patch.setattr(Channel, "tcp", silent)
        with pytest.raises(TransportError, match="no manager answers"):
            subscription.connect(5.0)
    assert now[0] <= 105.0 + addresses * manager_link.LEAST_S
    assert {port for port, seconds in tried[:addresses] if seconds >= 0.5 - 1e-9} == set(range(1, 1 + addresses))
    subscription.close()

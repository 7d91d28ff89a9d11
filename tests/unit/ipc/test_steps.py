"""Work in steps: run as a plain call, and several pieces of it by one thread."""

from __future__ import annotations

import errno
import select
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from simm.errors import TransportError
from simm.ipc.steps import Steps, Wait, finish, first_over, side_by_side
from simm.net.channel import Channel, ChannelWait
from simm.rpc import reply
from simm.wire import messages as M

WAIT_S = 30.0


class Pipe:
    """A wait for a byte. ``noise``: bytes that come before it and mean nothing."""

    last = False
    events = select.POLLIN

    def __init__(self, patience_s: float = WAIT_S, *, blind: bool = False, noise: int = 0) -> None:
        self.near, self.far = socket.socketpair()
        self.until = time.monotonic() + patience_s
        self.blind = blind
        self.noise = noise
        self.came = False
        self.looks = 0

    def ready(self) -> bool:
        self.looks += 1
        if self.blind:
            self.receive()
        return self.came

    def descriptor(self) -> int:
        return -1 if self.blind else self.near.fileno()

    def receive(self) -> None:
        try:
            self.near.recv(1, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        self.came = self.noise == 0
        self.noise -= 1

    def extend(self, until: float) -> None:
        self.until = until

    def close(self) -> None:
        self.near.close()
        self.far.close()


@pytest.fixture
def pipes() -> Iterator[list[Pipe]]:
    made = [Pipe(), Pipe(), Pipe(blind=True)]
    yield made
    for pipe in made:
        pipe.close()


def test_a_piece_of_work_is_a_plain_call() -> None:
    waits: list[Wait] = [Pipe(), Pipe()]

    def work() -> Steps[str]:
        yield from waits
        return "done"

    assert finish(work()) == "done"
    assert all(isinstance(wait, Pipe) and not wait.looks for wait in waits), "it waits by itself"

    def fails() -> Steps[None]:
        yield waits[0]
        raise TransportError("broken")

    with pytest.raises(TransportError):
        finish(fails())
    for wait in waits:
        assert isinstance(wait, Pipe)
        wait.close()


@pytest.mark.parametrize("which", range(3))
def test_whatever_comes_first_is_gone_on_with(pipes: list[Pipe], which: int) -> None:
    sender = threading.Timer(0.01, lambda: pipes[which].far.send(b"x"))
    sender.start()
    assert first_over(pipes) == [pipes[which]]
    sender.join()
    assert first_over(pipes) == [pipes[which]], "at once"


def test_it_sleeps_until_then(pipes: list[Pipe]) -> None:
    sender = threading.Timer(0.1, lambda: pipes[1].far.send(b"x"))
    sender.start()
    assert first_over(pipes[:2]) == [pipes[1]]
    sender.join()
    assert pipes[0].looks < 5000, "a thread that polled all that time would have looked more often"


def test_what_comes_and_is_no_answer_is_taken_in(pipes: list[Pipe]) -> None:
    """Or the thread would find the descriptor readable for ever, and never sleep."""
    pipes[0].noise = 3
    pipes[0].far.send(b"abc")
    sender = threading.Timer(0.05, lambda: pipes[0].far.send(b"x"))
    sender.start()
    assert first_over(pipes[:2]) == [pipes[0]]
    sender.join()


def test_what_has_no_time_left_is_over(pipes: list[Pipe]) -> None:
    pipes[1].until = time.monotonic() + 0.01
    assert first_over(pipes) == [pipes[1]] and not pipes[1].ready()


def test_a_reply_that_lies_decrypted_in_a_tls_socket_is_seen() -> None:
    """The kernel knows nothing of it any more."""

    class Tls(socket.socket):
        waiting = 0

        def pending(self) -> int:
            return self.waiting

    near, far = socket.socketpair()
    sock = Tls(fileno=near.detach())
    channel = Channel(sock, WAIT_S)
    wait = ChannelWait(channel, channel.submit(M.Ping(1)))
    assert not wait.ready()
    sock.waiting = 10
    assert wait.ready()
    sock.waiting = 0
    far.send(reply(M.Pong(1), 1))
    assert wait.ready() and channel.result(channel.wait(1)) == M.Pong(1)
    assert not ChannelWait(channel, channel.submit(M.Ping(2))).ready()
    channel.close()
    far.close()


def test_room_to_send_is_waited_for_apart_from_replies() -> None:
    near, far = socket.socketpair()
    channel = Channel(near, WAIT_S)
    wait = ChannelWait(channel, channel.next_id(), sending=True)
    assert wait.ready() and wait.events == select.POLLOUT
    near.setblocking(False)
    with pytest.raises(BlockingIOError):
        while True:
            near.send(bytes(1 << 16))
    assert not wait.ready()
    with pytest.raises(BlockingIOError):
        while True:
            far.recv(1 << 20, socket.MSG_DONTWAIT)
    assert first_over([wait]) == [wait] and wait.ready()
    channel.close()
    far.close()


def works(pipes: list[Pipe]) -> Steps[list[bool]]:
    """Return work that waits for all of the pipes."""

    def work(pipe: Pipe) -> Steps[bool]:
        yield pipe
        return pipe.came

    return side_by_side([work(pipe) for pipe in pipes])


@pytest.mark.parametrize("fails", ["epoll_create", "epoll_ctl"])
def test_without_a_descriptor_for_several_they_are_waited_for_all_the_same(
    pipes: list[Pipe], monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """The error went through to the engine, out of a batch for several servers with several connections to each."""
    tried: list[int] = []
    closed: list[int] = []

    def register(_fd: int, _events: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def epoll(_size: int) -> Any:
        tried.append(1)
        if fails == "epoll_create":
            raise OSError(errno.EMFILE, "Too many open files")
        return SimpleNamespace(register=register, close=lambda: closed.append(1))

    monkeypatch.setattr(select, "epoll", epoll)
    steps = works(pipes[:2])
    wait = next(steps)
    sender = threading.Timer(0.2, lambda: pipes[1].far.send(b"x"))
    sender.start()
    assert first_over([wait]) == [wait]
    sender.join()
    assert 1 < len(tried) == len(closed) + len(tried) * (fails == "epoll_create")
    assert pipes[0].looks < 5000, "a thread that polled all that time would have looked more often"
    steps.close()


def test_a_descriptor_for_several_is_made_once_there_is_one(
    pipes: list[Pipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(_size: int) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    steps = works(pipes[:2])
    wait = next(steps)
    with monkeypatch.context() as patch:
        patch.setattr(select, "epoll", none_left)
        assert wait.descriptor() == wait.descriptor() == -1
    assert wait.descriptor() == wait.descriptor() >= 0
    steps.close()

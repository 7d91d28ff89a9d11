"""How a client's connection ends. What it carries is tested with the client."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
from types import SimpleNamespace

import pytest

from simm.config.parsers import TlsOptions
from simm.errors import DeadlineError, TransportError
from simm.net import channel as net_channel
from simm.net import tls
from simm.net.channel import Channel
from simm.rpc import reply
from simm.wire import messages as M
from tests.support.segments import child, status_of
from tests.support.waiting import WAIT_S


@pytest.mark.parametrize("fails", [True, False])
def test_a_channel_that_failed_is_reset(fails: bool) -> None:
    """What it has not delivered must not arrive later; a sound one ends in the ordinary way."""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:
        channel = Channel.tcp("127.0.0.1", listener.getsockname()[1], 0.2)
        server, _ = listener.accept()
        with contextlib.closing(server):
            if fails:
                channel.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
                with pytest.raises(TransportError, match="deadline"):
                    while True:  # until nothing more fits on the way: the rest waits in our kernel
                        channel.send_raw(bytes(1 << 20))
            else:
                channel.submit(M.Ping(1))
            channel.close()
            server.settimeout(10)
            if fails:
                with pytest.raises(ConnectionResetError):
                    while server.recv(1 << 20):
                        pass
            else:
                assert len(server.recv(1000)) > 20 and server.recv(1000) == b""


def sockets() -> set[str]:
    """Return the sockets that this process has open, by the kernel's names for them."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{number}"))
    return {each for each in found if each.startswith("socket:")}


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.parametrize("step", ["connect", "handshake"])
def test_issue_a_child_has_no_socket_of_a_connection_that_is_being_made(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it had one, for as long as it lived, the server did not see that the client had hung up."""
    owner, name = (net_channel, "connect") if step == "connect" else (tls.ChannelSocket, "_wait")
    real, connecting, go = getattr(owner, name), threading.Event(), threading.Event()

    def held(*arguments: object) -> object:
        connecting.set()
        assert go.wait(WAIT_S)
        return real(*arguments)

    monkeypatch.setattr(owner, name, held)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.sslsocket_class = tls.ChannelSocket
    monkeypatch.setattr(tls, "for_channels", lambda options: SimpleNamespace(options=options, get=lambda: context))
    made: list[Channel] = []
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(contextlib.closing(socket.create_server(("127.0.0.1", 0))))
        before = sockets()

        def connect() -> None:
            options = TlsOptions("any") if step == "handshake" else None
            with contextlib.suppress(TransportError):
                made.append(Channel.tcp("127.0.0.1", listener.getsockname()[1], WAIT_S, tls=options))

        thread = threading.Thread(target=connect)
        thread.start()
        stack.callback(thread.join, WAIT_S)
        stack.callback(listener.close)
        stack.callback(go.set)
        assert connecting.wait(WAIT_S)
        assert len(sockets() - before) == 1
        assert status_of(child(lambda: len(sockets() - before))) == 0
        go.set()
        listener.accept()[0].close()  # which ends the handshake
        thread.join(WAIT_S)
        for channel in made:
            stack.enter_context(contextlib.closing(channel))
        assert len(made) == len(sockets() - before) == (step == "connect")
        assert status_of(child(lambda: len(sockets() - before))) == 0, "nor of one that is made"


def test_issue_a_late_reply_is_found_behind_one_that_was_waited_for() -> None:
    """Both came in one piece. The second one counted as late until something else came, and then as never answered."""
    ours, theirs = socket.socketpair()
    channel = Channel(ours, 10.0)
    late: list[int] = []
    channel.on_late = lambda frame: late.append(frame.request_id)
    channel.outlives = True
    with contextlib.closing(theirs), contextlib.closing(channel):
        first, second, third = (channel.submit(M.Ping(cookie)) for cookie in range(3))
        channel.until = 0.0
        for number in (second, third):
            with pytest.raises(DeadlineError):
                channel.wait(number)
        channel.expect(third)
        theirs.sendall(b"".join(reply(M.Pong(cookie), number) for cookie, number in enumerate((first, second, third))))
        assert channel.result(channel.wait(first)) == M.Pong(0)
        channel.poll_pushes()
        assert late == [second] and not channel.late and not channel.broken
        assert channel.result(channel.wait(third)) == M.Pong(2)


@pytest.mark.parametrize("closed", [False, True])
def test_issue_whether_something_has_come_is_asked_while_another_thread_waits(
    monkeypatch: pytest.MonkeyPatch, closed: bool
) -> None:
    """A poller that two threads poll raises RuntimeError, which broke the channel. A closed one has come to its end."""
    monkeypatch.setattr(net_channel, "LOOK_S", WAIT_S)
    ours, theirs = socket.socketpair()
    channel = Channel(ours, WAIT_S)
    polling = threading.Event()
    poller = channel._poller

    class Told:
        def poll(self, for_ms: float) -> list[tuple[int, int]]:
            polling.set()
            return poller.poll(for_ms)

    channel._poller = Told()  # type: ignore[assignment]
    with contextlib.closing(theirs), contextlib.closing(channel):
        number = channel.submit(M.Ping(1))
        got: list[object] = []
        waiter = threading.Thread(target=lambda: got.append(channel.wait(number, look=bool)))
        waiter.start()
        try:
            assert polling.wait(WAIT_S)
            for _ in range(1000):
                assert not channel.has_input(number) and channel.has_room()
        finally:
            theirs.sendall(reply(M.Pong(1), number))
            waiter.join(WAIT_S)
        assert len(got) == 1 and not channel.broken
        if closed:
            channel.sock.close()
            assert channel.has_input(number) and channel.has_room()


@pytest.mark.parametrize("arrived", [False, True])
def test_a_reply_that_nobody_waits_for_breaks_nothing(arrived: bool) -> None:
    """It is handed over once, is not late, and others are waited for as before."""
    ours, theirs = socket.socketpair()
    channel = Channel(ours, 10.0)
    handed: list[int] = []
    channel.on_late = lambda frame: handed.append(frame.request_id)
    with contextlib.closing(theirs), contextlib.closing(channel):
        first, second = (channel.submit(M.Ping(cookie)) for cookie in range(2))
        answers = b"".join(reply(M.Pong(cookie), number) for cookie, number in enumerate((first, second)))
        if arrived:
            theirs.sendall(answers)
            channel.poll_pushes()
        channel.disown(first)
        assert handed == [first] * arrived and not channel.late
        if not arrived:
            theirs.sendall(answers)
        assert channel.result(channel.wait(second)) == M.Pong(1)
        assert handed == [first] and not channel._early and not channel._disowned and channel.late_s == 0.0
        third = channel.submit(M.Ping(3))
        channel.until = 0.0
        with pytest.raises(DeadlineError):
            channel.wait(third)
        assert channel.broken, "a deadline breaks it as before"


@pytest.mark.parametrize(("until", "began", "ended", "late_at"), [(7.0, 5.0, 7.0, 5.0), (7.0, 5.0, 60.0, 58.0)])
def test_issue_the_wait_for_a_late_reply_counts_as_silence(
    until: float, began: float, ended: float, late_at: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counted from the end of that wait on, so the next request waited for as long again.

    Not more than was to be waited for: who was stopped meanwhile knows nothing of the peer.
    """
    ours, theirs = socket.socketpair()
    channel = Channel(ours, 10.0)
    channel.on_late = lambda _: None
    channel.outlives = True
    with contextlib.closing(theirs), contextlib.closing(channel):
        number = channel.submit(M.Ping(1))
        channel.until = until
        monkeypatch.setattr(channel, "_arm", lambda *_: ours.setblocking(False))
        ticks = iter((began, ended))
        monkeypatch.setattr(net_channel, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
        with pytest.raises(DeadlineError):
            channel.wait(number)
        assert channel.late_at == late_at

"""Who may connect without a token: refusals are told and counted, and those who have gone are no refusals."""

from __future__ import annotations

import socket

import pytest

from simm.net import local_users, peer_uid
from simm.net.local_users import LocalUsers
from simm.net.loop import Loop
from simm.net.peer import Peer, Service
from simm.rpc import Frame, decode, encode
from simm.wire import messages as M
from tests.support.waiting import wait_until


class Guarded(Service):
    """Takes connections as a server without tokens does."""

    def __init__(self) -> None:
        self.refused = 0
        self.heard: list[Frame] = []
        self.closed: list[str] = []

    def on_connect(self, peer: Peer) -> None:
        LocalUsers().check(peer, self.count)
        peer.service.on_close = lambda _peer, reason: self.closed.append(reason)  # type: ignore[method-assign]

    def on_frame(self, peer: Peer, frame: Frame) -> None:
        self.heard.append(frame)

    def count(self) -> None:
        """Count a refusal."""
        self.refused += 1


def meet(guarded: Guarded, *, gone: bool) -> bytes:
    """Let a client connect, ask, and perhaps close, before the server looks. Return what the client is told."""
    loop = Loop()
    try:
        listener = socket.create_server(("127.0.0.1", 0))
        client = socket.create_connection(listener.getsockname())
        client.sendall(encode(M.Ping(7), 1))
        if gone:
            client.close()
        loop.listen(listener, guarded)
        wait_until(lambda: loop.run_once(0.01) is None or guarded.heard or guarded.closed, "the server takes it")
        if gone:
            return b""
        with client:
            return client.recv(1 << 12) if guarded.closed else b""
    finally:
        loop.close()


def test_ones_own_processes_are_heard() -> None:
    guarded = Guarded()
    assert meet(guarded, gone=False) == b"" and not guarded.refused
    assert [decode(frame) for frame in guarded.heard] == [M.Ping(7)]


def test_who_has_gone_is_not_heard_and_not_counted_as_refused() -> None:
    """A busy server accepts connections that their clients have given up: they are of nobody, and no intruders."""
    guarded = Guarded()
    meet(guarded, gone=True)
    assert guarded.closed and not guarded.heard and not guarded.refused


def test_others_are_told_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_users, "tcp_uid", lambda _sock: 4711)
    guarded = Guarded()
    told = meet(guarded, gone=False)
    assert b"uid 4711" in told and guarded.refused == 1 and not guarded.heard and guarded.closed == ["unauthorized"]


def test_issue_a_server_with_tokens_asks_for_one_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """As gRPC's server does, whose sockets a library has."""
    ends = ("127.0.0.1", 1), ("127.0.0.1", 2)
    monkeypatch.setattr(local_users, "uid_of_peer", lambda *_: 4711)
    assert "show a token of its --token-file, or start" in LocalUsers().fault_of(*ends, tokens=True)
    assert "a server without --token-file" in LocalUsers().fault_of(*ends)

    def unknown(*_: object) -> int:
        raise peer_uid.UnknownUser("no sock_diag")

    monkeypatch.setattr(local_users, "uid_of_peer", unknown)
    assert LocalUsers().fault_of(*ends, tokens=True).endswith("(no sock_diag): show a token of its --token-file")

"""No exchange lasts longer than its deadline, even if the other end sends and receives one byte at a time."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from simm.client import Client
from simm.config.client_options import ClientOptions
from simm.errors import TransportError
from simm.ipc.steps import finish
from simm.net.channel import Channel
from simm.rpc import Flag, encode, reply
from simm.sdk.path import ClientContext
from simm.sdk.tcp import TcpPath
from simm.wire import messages as M
from tests.support.silent_servers import Silent
from tests.support.waiting import wait_until

#: A bound for things that hang, seconds.
WAIT_S = 30.0


class Peer:
    """The other end of a connection, which follows a script."""

    def __init__(self, body: Callable[[socket.socket], None]) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        self.over = threading.Event()
        self._body = body
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while not self.over.is_set():
                sock = self.listener.accept()[0]
                with sock, contextlib.suppress(OSError):
                    self._body(sock)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join(WAIT_S)

    def dribble(self, sock: socket.socket, data: bytes) -> None:
        """Send single bytes more often than the timeout of one receive, and for longer than WAIT_S."""
        for at in range(len(data)):
            if self.over.wait(DRIBBLE_S):
                return
            sock.sendall(data[at : at + 1])


DEADLINE_S = 0.4
#: Between two bytes, seconds.
DRIBBLE_S = 0.1
#: So many bytes take longer than WAIT_S.
MANY = 400
LONG = M.Error("x" * MANY)


def costs_its_deadline(call: Callable[[], Any]) -> None:
    began = time.monotonic()
    with pytest.raises(TransportError, match="deadline"):
        call()
    assert time.monotonic() - began < WAIT_S


def test_a_reply_that_dribbles_does_not_stretch_a_call() -> None:
    with Peer(lambda sock: peer.dribble(sock, reply(LONG, 1))) as peer:
        channel = Channel.tcp("127.0.0.1", peer.port, DEADLINE_S)
        costs_its_deadline(lambda: channel.call(M.Ping(1)))
        assert channel.broken
        channel.close()


def test_pushes_without_end_do_not_stretch_a_call() -> None:
    def body(sock: socket.socket) -> None:
        push = encode(M.Recall(1), 0, flags=Flag.PUSH)
        while not peer.over.is_set():
            sock.sendall(push)

    with Peer(body) as peer:
        heard: list[Any] = []
        channel = Channel.tcp("127.0.0.1", peer.port, DEADLINE_S, heard.append)
        channel.poll_pushes()  # comes back
        costs_its_deadline(lambda: channel.call(M.Ping(1)))
        assert heard
        channel.close()


def test_a_peer_that_takes_a_byte_at_a_time_does_not_stretch_a_send() -> None:
    def body(sock: socket.socket) -> None:
        while not peer.over.wait(0.001) and sock.recv(64):
            pass

    with Peer(body) as peer:
        channel = Channel.tcp("127.0.0.1", peer.port, DEADLINE_S)
        channel.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        costs_its_deadline(lambda: channel.send_raw(bytes(64 << 20)))
        channel.close()


def test_a_reply_that_came_in_time_counts_though_nobody_waited_for_it() -> None:
    with Peer(lambda sock: (sock.sendall(reply(M.Pong(7), 1)), peer.over.wait(WAIT_S))[0]) as peer:
        channel = Channel.tcp("127.0.0.1", peer.port, DEADLINE_S)
        number = channel.submit(M.Ping(7))
        wait_until(lambda: channel.has_input(number) and time.monotonic() > channel.until, "a long copy is over")
        assert channel.result(channel.wait(number)) == M.Pong(7)
        channel.close()


WELCOME = M.Welcome(1, 0, 2, 0, 0, 0, 0, "")


@pytest.mark.parametrize("slow", ["hello", "head", "value", "verdict"])
def test_a_fetch_that_dribbles_anywhere_costs_one_deadline(slow: str) -> None:
    """The deadline covers making the connection too."""

    def body(sock: socket.socket) -> None:
        def say(what: str, data: bytes) -> None:
            if what == slow:
                peer.dribble(sock, data)
            else:
                peer.over.wait(0.1)  # each piece takes a part of the time
                sock.sendall(data)

        sock.recv(1 << 16)
        say("hello", reply(WELCOME._replace(segment="x" * MANY), 1))
        sock.recv(1 << 16)
        say("head", reply(M.Fetched([(0, 0, 200, 0)] * MANY), 2))
        for _ in range(MANY):
            say("value", bytes(200))
        say("verdict", reply(M.Verdict([0] * MANY), 2))
        peer.over.wait(WAIT_S)

    with Peer(body) as peer:
        path = TcpPath(ClientContext(ClientOptions(namespace="n", deadline_s=DEADLINE_S)), "127.0.0.1", peer.port)
        sink = memoryview(bytearray(200))
        costs_its_deadline(lambda: finish(path.fetch([(bytes(16), 200, lambda length: sink[:length])] * MANY)))
        path.close()


def test_a_store_to_a_server_that_takes_a_byte_at_a_time_costs_one_deadline() -> None:
    def body(sock: socket.socket) -> None:
        sock.recv(1 << 16)
        sock.sendall(reply(WELCOME, 1))
        while not peer.over.wait(0.001) and sock.recv(64):
            pass

    with Peer(body) as peer:
        path = TcpPath(ClientContext(ClientOptions(namespace="n", deadline_s=DEADLINE_S)), "127.0.0.1", peer.port)
        path.connect()
        costs_its_deadline(lambda: finish(path.store([(bytes(16), [memoryview(bytes(32 << 20))], 0, 0)])))
        path.close()


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("call", ["put", "get", "exists", "delete"])
def test_a_call_to_four_silent_servers_waits_for_one_of_them(call: str, replicas: int) -> None:
    """All are asked, and waited for at the same time."""
    keys = [f"k{number}" for number in range(64)]
    calls: dict[str, Callable[[Client], Any]] = {
        "put": lambda client: client.put_many(keys, [b"v"] * 64),
        "get": lambda client: client.get_many(keys),
        "exists": lambda client: client.exists_many(keys),
        "delete": lambda client: client.delete_many(keys),
    }
    for deadline_s in (DEADLINE_S, 10 * DEADLINE_S, 50 * DEADLINE_S):  # on a busy machine connecting takes its time
        with Silent(4) as servers:
            address = "{}:{}".format(*servers.manager.address)
            with Client(address, path="tcp", deadline_s=deadline_s, replicas=replicas) as client:
                assert not any(calls[call](client))
                if servers.asked() == 4:
                    stats = client.stats()
                    failed = stats["put_failures"] if call == "put" else stats["outages"]
                    assert failed >= 64
                    return
    pytest.fail("they were not all asked")

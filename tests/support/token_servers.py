"""The three kinds of servers that peers reach by TCP, each in a thread of this process."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from simm.config.tokens import Token
from simm.manager import Manager
from simm.net.listeners import listen_tcp
from simm.net.loop import Loop
from simm.wire.messages import Role, Service
from tests.support.endpoint_thread import EndpointThread
from tests.support.fake_fabric import FakeNetwork
from tests.support.manager_client import ManagerClient
from tests.support.waiting import WAIT_S
from tests.support.worker_thread import StreamThread, WorkerThread

KINDS: Final = ("manager", "stream", "endpoint")


class ManagerThread:
    """A manager in a thread of this process."""

    def __init__(self, tokens: Sequence[Token]) -> None:
        self.loop = Loop()
        self.manager = Manager(self.loop, tokens=tuple(tokens))
        listener = listen_tcp("127.0.0.1", 0)
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self.loop.listen(listener, self.manager)
        self._stop, far = socket.socketpair()
        self._far = far
        self.loop.watch(far, lambda _mask: self.loop.stop())
        self._thread = threading.Thread(target=self.loop.run, daemon=True)
        self._thread.start()

    def client(self, token: Token, role: int = Role.ADMIN) -> ManagerClient:
        """Connect to it."""
        return ManagerClient([self.address], deadline_s=WAIT_S, token=token.secret, role=role)

    def close(self) -> None:
        """End it."""
        self._stop.send(b"x")
        self._thread.join(WAIT_S)
        self.loop.close()
        self.manager.state.close()
        self._stop.close()
        self._far.close()


class Served(NamedTuple):
    """A server that runs: where it listens, and what a token is shown to there."""

    kind: str
    address: tuple[str, int]
    service: int
    loop: Loop


@contextlib.contextmanager
def serving(kind: str, tokens: Sequence[Token]) -> Iterator[Served]:
    """Run a server of one of ``KINDS``, which asks for the tokens. A stream and an endpoint have a worker."""
    with contextlib.ExitStack() as stack:
        if kind == "manager":
            manager = ManagerThread(tokens)
            stack.callback(manager.close)
            yield Served(kind, manager.address, Service.MANAGER, manager.loop)
            return
        worker = stack.enter_context(WorkerThread())
        if kind == "stream":
            stream = stack.enter_context(StreamThread(worker.path, tokens=tokens))
            yield Served(kind, stream.address, Service.STREAM, stream.loop)
        else:
            endpoint = stack.enter_context(EndpointThread(worker.path, FakeNetwork(), tokens=tokens))
            yield Served(kind, endpoint.address, Service.ENDPOINT, endpoint.loop)

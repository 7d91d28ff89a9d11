"""A fake cluster whose nodes also have endpoints, on a network in software: clients reach them by RDMA.

The client's rails are of one ``FakeFabric``, each node's of another; all run in this process, in threads.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from simm.client import Client
from simm.net.listeners import listen_tcp
from simm.net.loop import Loop
from simm.rdma import registration
from simm.sdk import rdma_get, rdma_pool, rdma_transfer
from simm.sdk.rdma_pool import RdmaPath
from simm.server.rdma_endpoint import Endpoint
from tests.support.fake_cluster import ALL, FakeCluster, Node, StreamThread
from tests.support.fake_fabric import FakeFabric, FakeNetwork
from tests.support.waiting import wait_until
from tests.support.worker_thread import WAIT_S


class EndpointThread:
    """The code of an endpoint process, in a thread. Its port outlives :meth:`stop` and :meth:`start`."""

    def __init__(self, uds: str, network: FakeNetwork, rails: Sequence[str], **options: Any) -> None:
        self.uds, self.network, self.rails, self.options = uds, network, rails, options
        self.listener = listen_tcp("127.0.0.1", 0)
        self.port: int = self.listener.getsockname()[1]
        self.start()

    def start(self) -> None:
        self.fabric: FakeFabric = self.network.fabric(self.rails)
        self.loop = Loop()
        self.endpoint = Endpoint(self.loop, self.uds, lambda: self.fabric, **self.options)
        self.loop.listen(self.listener.dup(), self.endpoint)
        self._near, far = socket.socketpair()
        self._far = far
        self.loop.watch(far, lambda _mask: self.loop.stop())
        self.thread = threading.Thread(target=self.loop.run, daemon=True)
        self.thread.start()
        wait_until(lambda: self.endpoint.devices.down_reason is None, "the endpoint is ready")

    def stop(self) -> None:
        self._near.send(b"x")
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive(), "the endpoint is stuck"
        self.loop.close()
        self.endpoint.close()
        self._near.close()
        self._far.close()

    def call(self, what: Any) -> None:
        """Call a function in the loop's thread, and wait for it."""
        done = threading.Event()

        def run() -> None:
            what()
            done.set()

        self.loop.call_later(0.0, run)
        self._near.send(b"")
        assert done.wait(WAIT_S)


class RdmaNode(Node):
    """A node with an endpoint that its stream announces."""

    def __init__(
        self, number: int, network: FakeNetwork, rails: Sequence[str], *, size: int = 16 << 20, **options: Any
    ) -> None:
        super().__init__(number, size=size)
        self.endpoint = EndpointThread(self.worker.path, network, rails, **options)
        self.stream.stream.rdma_port = self.endpoint.port

    def restart_stream(self) -> None:
        self.stream.stop()
        self.stream = StreamThread(self.worker.path)
        self.stream.stream.rdma_port = self.endpoint.port

    def close(self) -> None:
        self.endpoint.stop()
        self.endpoint.listener.close()
        super().close()


class FakeRdmaCluster(FakeCluster):
    """One or more nodes, a network, and a client's rails."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, nodes: int = 1, *, seed: int = 1, rails: Sequence[str] = ("s0",),
        mine: Sequence[str] = ("c0",), size: int = 16 << 20, windows: bool = True, piece_bytes: int = 1 << 30,
        background: bool = False, **limits: Any,
    ) -> None:  # fmt: skip
        super().__init__(0)
        self.network = FakeNetwork(seed, background=background, **limits)
        self.nodes: list[Any] = [
            RdmaNode(number, self.network, rails, size=size, windows=windows, piece_bytes=piece_bytes)
            for number in range(nodes)
        ]
        self.fabrics: list[FakeFabric] = []

        def opener(_devices: str) -> FakeFabric:
            made = self.network.fabric(mine)
            self.fabrics.append(made)
            return made

        monkeypatch.setattr(registration, "opener", opener)
        # A busy machine's silence is not a dead device's. A test whose devices are silent says how long they may be.
        monkeypatch.setattr(rdma_pool, "HEARTBEAT_TIMEOUT_S", WAIT_S)
        monkeypatch.setattr(registration, "_SHARED", {})  # whatever an earlier test has left open is of another network
        self.settled({0: ALL} if nodes == 1 else {number: ALL[number::nodes] for number in range(nodes)})

    def __enter__(self) -> FakeRdmaCluster:
        return self

    @property
    def node(self) -> RdmaNode:
        node: RdmaNode = self.nodes[0]
        return node

    def rdma(self, **more: Any) -> Client:
        """Return a client that reaches all its targets by RDMA."""
        client = self.client("rdma,tcp", **more)
        until_rdma(client)
        return client

    def __exit__(self, *arguments: Any) -> None:
        super().__exit__(*arguments)
        self.network.close()
        left = self.network.check()
        assert not left, left
        assert not self.network.violations, self.network.violations


@contextlib.contextmanager
def brief_rdma(share: float = 0.01) -> Iterator[None]:
    """Let RDMA have no more than this share of a call's deadline, of which TCP has the rest.

    So a call is soon done with devices that do not answer, and its deadline may be so long that no server misses it on
    a busy machine.
    """
    with pytest.MonkeyPatch.context() as patch:
        for module in (rdma_transfer, rdma_get):
            patch.setattr(module, "SHARE", share)
        yield


def until_rdma(client: Client) -> None:
    """Wait until a client reaches every worker by RDMA."""

    def up() -> bool:
        workers = client.stats()["workers"]
        for target in client._router.targets.values():  # type: ignore[union-attr]
            target.ready()
        return bool(workers) and all(worker["path"] == "rdma" for worker in workers)

    wait_until(up, f"RDMA is up: {client.stats()['workers']}")


def leave_alone(path: RdmaPath) -> None:
    """Keep the background from a path's connections from now on, and wait until all of them are idle.

    It reads heartbeats by one of them. A call that comes meanwhile finds none, and makes another one.
    """
    path.maintain = lambda now: None  # type: ignore[method-assign]

    def idle() -> bool:
        if path._watched is not None:
            RdmaPath.maintain(path, time.monotonic())
        return bool(path._idle) and path._connections == len(path._idle)

    wait_until(idle, "its connections are idle")


def path_of(client: Client, number: int = 0) -> RdmaPath:
    """Return a client's RDMA path to a node."""
    found: RdmaPath = list(client._router.targets.values())[number].rdma  # type: ignore[union-attr]
    return found

"""A real endpoint in a thread, on a network in software, and a client's connection that the test drives by hand."""

from __future__ import annotations

import contextlib
import ctypes
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, TypeVar

from simm.net.channel import Channel, Refused, greet
from simm.net.listeners import listen_tcp
from simm.net.loop import Loop
from simm.rdma.api import READ, WRITE, Absence, Access, Fabric, Op, QueuePair, QueuePairAddress
from simm.server.rdma_endpoint import Endpoint
from simm.wire import messages as M
from simm.wire import rdma_messages as R
from simm.wire.hello import client_hello
from tests.support.consistency import check
from tests.support.fake_fabric import FakeFabric, FakeNetwork
from tests.support.waiting import WAIT_S

T = TypeVar("T")


class EndpointThread:
    """An endpoint for the worker at ``path``; a context manager. Its rails are ``names`` of ``network``."""

    def __init__(
        self, path: str, network: FakeNetwork, names: Sequence[str] = ("s0",), *,
        open_fabric: Callable[[], Fabric | Absence] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        self.network = network
        self.loop = Loop()
        self.fabrics: list[FakeFabric] = []

        def opened() -> FakeFabric:
            self.fabrics.append(network.fabric(names))
            return self.fabrics[-1]

        self.endpoint = Endpoint(self.loop, path, open_fabric or opened, **options)
        self.listener = listen_tcp("127.0.0.1", 0)
        self.address: tuple[str, int] = self.listener.getsockname()[:2]
        self.loop.listen(self.listener, self.endpoint)
        #: (what to call, where its outcome goes)
        self._asks: queue.SimpleQueue[tuple[Callable[[], Any], Any]] = queue.SimpleQueue()
        self._ring, far = socket.socketpair()
        self._far = far
        self.loop.watch(far, lambda _mask: self._serve())
        self.thread = threading.Thread(target=self.loop.run, name="test-endpoint", daemon=True)
        self.thread.start()

    def __enter__(self) -> EndpointThread:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def _serve(self) -> None:
        self._far.recv(1)
        call, answer = self._asks.get()
        try:
            answer.put((True, call()))
        except BaseException as exc:
            answer.put((False, exc))

    def do(self, call: Callable[[], T]) -> T:
        """Call a function in the loop's thread; return its result."""
        answer: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()
        self._asks.put((call, answer))
        self._ring.send(b"x")
        good, value = answer.get(timeout=WAIT_S)
        if not good:
            raise value
        result: T = value
        return result

    def stats(self) -> dict[str, Any]:
        """Check the endpoint's state and return its counters."""
        def call() -> dict[str, Any]:
            check(self.endpoint)
            return self.endpoint.stats()

        return self.do(call)

    def until(self, condition: Callable[[dict[str, Any]], Any], what: str) -> dict[str, Any]:
        """Wait for counters that fulfil a condition, and return them."""
        until = time.monotonic() + WAIT_S
        while True:
            stats = self.stats()
            if condition(stats):
                return stats
            assert time.monotonic() < until, f"not in time: {what}: {stats}"
            time.sleep(0.005)

    def ready(self) -> EndpointThread:
        """Wait until connections can be opened."""
        self.until(lambda stats: stats["ready"], "ready")
        return self

    def stop(self) -> None:
        """Stop as ``run_endpoint`` does; a second call has no effect."""
        if self.loop.running:
            with contextlib.suppress(OSError):
                self.do(self.loop.stop)
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive(), "the endpoint is stuck"
        if self._ring.fileno() >= 0:
            if not self.endpoint.failed:
                self.loop.close()
                self.endpoint.close()
            self._ring.close()
            self._far.close()

    def channel(self, token: str = "", *, hello: bool = True, on_push: Callable[[Any], None] | None = None) -> Channel:
        """Return a connection that has sent HELLO."""
        channel = Channel.tcp(*self.address, WAIT_S, on_push)
        if hello:
            try:
                greet(channel, M.Service.ENDPOINT, client_hello(M.Role.CLIENT, namespace="default"), token)
            except BaseException:
                channel.close()
                raise
        return channel


class Grant:
    """A grant of a connection: id, offset, chunk bytes, and the key of each queue pair."""

    def __init__(self, number: int, offset: int, chunk: int, keys: Sequence[int]) -> None:
        self.number, self.offset, self.chunk, self.keys = number, offset, chunk, list(keys)


class RawConnection:
    """A client's end of a connection, driven by hand: a queue pair for each of ``pairs`` (own rail, server's rail)."""

    def __init__(self, server: EndpointThread, pairs: Sequence[tuple[int, int]] = ((0, 0),), buffer: int = 1 << 20):
        self.server = server
        self.pushes: list[Any] = []
        self.channel = server.channel(on_push=self.pushes.append)
        self.opened: R.RdmaOpened = self.channel.call(R.RdmaOpen(0))
        self.fabric = server.network.fabric([f"c{number}" for number in range(1 + max(own for own, _ in pairs))])
        self.queue_pairs: list[QueuePair] = []
        self.owns: list[int] = []
        self.theirs: list[int] = []
        self.buffer = ctypes.create_string_buffer(buffer)
        self.address = ctypes.addressof(self.buffer)
        self.local = [
            rail.register(self.address, buffer, Access.LOCAL_WRITE).lkey for rail in self.fabric.rails
        ]
        for own, their in pairs:
            self.connect(own, their)

    def connect(self, own: int, their: int) -> R.RdmaConnected:
        """Open one more queue pair."""
        qp = self.fabric.rails[own].queue_pair()
        ours = qp.address()
        answer = self.channel.call(R.RdmaConnect(their, ours.lid, ours.gid, ours.qpn, ours.psn, ours.mtu, ours.reads))
        assert isinstance(answer, R.RdmaConnected) and answer.link == len(self.queue_pairs)
        qp.connect(QueuePairAddress(answer.gid, answer.lid, answer.qpn, answer.psn, answer.mtu, answer.reads))
        self.queue_pairs.append(qp)
        self.owns.append(own)
        self.theirs.append(their)
        return answer

    def region(self, qp: int, offset: int) -> R.RdmaRegion:
        """Return the region of a byte of the segment, as seen by a queue pair."""
        for region in self.opened.regions:
            if region.rail == self.theirs[qp] and region.start <= offset < region.start + region.length:
                return region
        raise AssertionError(f"byte {offset} is not registered")

    def op(self, kind: int, qp: int, offset: int, length: int, key: int | None = None, at: int = 0) -> Op:
        """Return an operation between the buffer's byte ``at`` and the segment's byte ``offset``."""
        region = self.region(qp, offset)
        remote = region.address + offset - region.start
        return kind, self.address + at, self.local[self.owns[qp]], length, remote, region.rkey if key is None else key

    def run(self, qp: int, *ops: Op) -> None:
        """Post a chain and wait for it."""
        self.queue_pairs[qp].wait(self.queue_pairs[qp].post(ops), time.monotonic() + WAIT_S)

    def read(self, offset: int, length: int, qp: int = 0) -> bytes:
        """Read bytes of the segment, split where a region ends."""
        parts = []
        while length:
            region = self.region(qp, offset)
            size = min(length, region.start + region.length - offset)
            self.run(qp, self.op(READ, qp, offset, size))
            parts.append(self.buffer.raw[:size])
            offset, length = offset + size, length - size
        return b"".join(parts)

    def post_write(self, grant: Grant, data: bytes, qp: int = 0, at: int = 0) -> int:
        """Post a WRITE into a grant; return its ticket."""
        ctypes.memmove(self.address + at, data, len(data))
        key = grant.keys[qp] if grant.keys else None
        return self.queue_pairs[qp].post([self.op(WRITE, qp, grant.offset, len(data), key, at)])

    def write(self, grant: Grant, data: bytes, qp: int = 0) -> None:
        """Write a value into its chunk, followed by the READ that shows that it has landed."""
        self.post_write(grant, data, qp)
        self.run(qp, self.op(READ, qp, grant.offset, 8, at=len(self.buffer) - 8))

    def take(self, answer: R.RdmaGranted) -> list[Grant]:
        """Return the grants of an answer."""
        queue_pairs = len(answer.keys) // len(answer.grants) if answer.grants else 0
        return [
            Grant(*grant, answer.keys[at * queue_pairs : (at + 1) * queue_pairs])
            for at, grant in enumerate(answer.grants)
        ]

    def grant(self, size: int, count: int = 1) -> list[Grant]:
        """Ask for grants; return those that come."""
        return self.take(self.channel.call(M.Grant([(size, count)])))

    def commit(
        self, *entries: tuple[bytes, Grant, int], wants: Sequence[tuple[int, int]] = ()
    ) -> tuple[list[int], list[Grant]]:
        """Commit (digest, grant, length) each; return their statuses and new grants."""
        answer = self.channel.call(
            M.Commit([(digest, grant.number, length, 0, 0, 0) for digest, grant, length in entries], list(wants))
        )
        return answer.statuses, self.take(answer)

    def return_grants(self, *grants: Grant) -> int:
        """Return grants; return the number that the server took."""
        answer: M.Done = self.channel.call(M.ReturnGrants([grant.number for grant in grants]))
        return answer.items

    def hang_up(self) -> None:
        """Close the control connection only."""
        self.channel.close()

    def close(self) -> None:
        """Close the connection and its queue pairs."""
        for qp in self.queue_pairs:
            qp.close()
        self.channel.close()
        self.fabric.close()


@contextlib.contextmanager
def connection(
    server: EndpointThread, pairs: Sequence[tuple[int, int]] = ((0, 0),), **more: Any
) -> Iterator[RawConnection]:
    """Yield a connection, and close it at the end."""
    made = RawConnection(server, pairs, **more)
    try:
        yield made
    finally:
        made.close()


def refusal(call: Callable[[], Any]) -> Refused:
    """Return the error that a call is refused with."""
    try:
        answer = call()
    except Refused as exc:
        return exc
    raise AssertionError(f"not refused: {answer}")

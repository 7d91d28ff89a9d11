"""A real endpoint in a thread of this process, on a network in software; and a lane that speaks the protocol itself."""

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

from fakefabric import FakeFabric, FakeNetwork

from simm import messages as M
from simm.channel import Channel, Refused
from simm.endpoint import Endpoint
from simm.fabric import READ, WRITE, Absence, Access, Fabric, Link, LinkAddress, Op
from simm.loop import Loop, listen_tcp

WAIT_S = 20.0
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
        """Call it in the loop's thread."""
        answer: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()
        self._asks.put((call, answer))
        self._ring.send(b"x")
        good, value = answer.get(timeout=WAIT_S)
        if not good:
            raise value
        result: T = value
        return result

    def stats(self) -> dict[str, Any]:
        """The endpoint's counters, and a check of its books."""
        def call() -> dict[str, Any]:
            self.endpoint.check()
            return self.endpoint.stats()

        return self.do(call)

    def until(self, condition: Callable[[dict[str, Any]], Any], what: str) -> dict[str, Any]:
        """The first counters that fulfil a condition."""
        until = time.monotonic() + WAIT_S
        while True:
            stats = self.stats()
            if condition(stats):
                return stats
            assert time.monotonic() < until, f"not in time: {what}: {stats}"
            time.sleep(0.005)

    def ready(self) -> EndpointThread:
        """Wait until lanes can be opened."""
        self.until(lambda stats: stats["ready"], "ready")
        return self

    def stop(self) -> None:
        """As ``run_endpoint`` ends. Twice is harmless."""
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
        """A connection, which has said HELLO."""
        channel = Channel.tcp(*self.address, WAIT_S, on_push)
        if hello:
            try:
                channel.call(M.Hello(M.PROTOCOL_MIN, M.PROTOCOL_MAX, M.Role.CLIENT, 0, 0, "default", token, []))
            except BaseException:
                channel.close()
                raise
        return channel


class Grant:
    """What a lane was given: (id, offset, chunk bytes), and the key of each link."""

    def __init__(self, number: int, offset: int, chunk: int, keys: Sequence[int]) -> None:
        self.number, self.offset, self.chunk, self.keys = number, offset, chunk, list(keys)


class RawLane:
    """A client's end of a lane: the protocol by hand, one link for each of ``pairs`` (own rail, the server's)."""

    def __init__(self, server: EndpointThread, pairs: Sequence[tuple[int, int]] = ((0, 0),), buffer: int = 1 << 20):
        self.server = server
        self.pushes: list[Any] = []
        self.channel = server.channel(on_push=self.pushes.append)
        self.opened: M.RdmaOpened = self.channel.call(M.RdmaOpen(0))
        self.fabric = server.network.fabric([f"c{number}" for number in range(1 + max(own for own, _ in pairs))])
        self.links: list[Link] = []
        self.owns: list[int] = []
        self.theirs: list[int] = []
        self.buffer = ctypes.create_string_buffer(buffer)
        self.address = ctypes.addressof(self.buffer)
        self.local = [
            rail.register(self.address, buffer, Access.LOCAL_WRITE).lkey for rail in self.fabric.rails
        ]
        for own, their in pairs:
            self.connect(own, their)

    def connect(self, own: int, their: int) -> M.RdmaConnected:
        """One more link."""
        link = self.fabric.rails[own].link()
        ours = link.address()
        answer = self.channel.call(M.RdmaConnect(their, ours.lid, ours.gid, ours.qpn, ours.psn, ours.mtu, ours.reads))
        assert isinstance(answer, M.RdmaConnected) and answer.link == len(self.links)
        link.connect(LinkAddress(answer.gid, answer.lid, answer.qpn, answer.psn, answer.mtu, answer.reads))
        self.links.append(link)
        self.owns.append(own)
        self.theirs.append(their)
        return answer

    def region(self, link: int, offset: int) -> M.RdmaRegion:
        """Where a byte of the segment lies, as seen by a link."""
        for region in self.opened.regions:
            if region.rail == self.theirs[link] and region.start <= offset < region.start + region.length:
                return region
        raise AssertionError(f"byte {offset} is not registered")

    def op(self, kind: int, link: int, offset: int, length: int, key: int | None = None, at: int = 0) -> Op:
        """An operation between the buffer's byte ``at`` and the segment's byte ``offset``."""
        region = self.region(link, offset)
        remote = region.address + offset - region.start
        return kind, self.address + at, self.local[self.owns[link]], length, remote, region.rkey if key is None else key

    def run(self, link: int, *ops: Op) -> None:
        """Post a chain and wait for it."""
        self.links[link].wait(self.links[link].post(ops), time.monotonic() + WAIT_S)

    def read(self, offset: int, length: int, link: int = 0) -> bytes:
        """Bytes of the segment; split where a region ends."""
        parts = []
        while length:
            region = self.region(link, offset)
            size = min(length, region.start + region.length - offset)
            self.run(link, self.op(READ, link, offset, size))
            parts.append(self.buffer.raw[:size])
            offset, length = offset + size, length - size
        return b"".join(parts)

    def post_write(self, grant: Grant, data: bytes, link: int = 0, at: int = 0) -> int:
        """Post a WRITE into a grant; its ticket."""
        ctypes.memmove(self.address + at, data, len(data))
        key = grant.keys[link] if grant.keys else None
        return self.links[link].post([self.op(WRITE, link, grant.offset, len(data), key, at)])

    def write(self, grant: Grant, data: bytes, link: int = 0) -> None:
        """A value into its chunk, and the READ behind which it lies there."""
        self.post_write(grant, data, link)
        self.run(link, self.op(READ, link, grant.offset, 8, at=len(self.buffer) - 8))

    def take(self, answer: M.RdmaGranted) -> list[Grant]:
        """The grants of an answer."""
        links = len(answer.keys) // len(answer.grants) if answer.grants else 0
        return [
            Grant(*grant, answer.keys[at * links : (at + 1) * links]) for at, grant in enumerate(answer.grants)
        ]

    def grant(self, size: int, count: int = 1) -> list[Grant]:
        """Grants, as many as come."""
        return self.take(self.channel.call(M.Grant([(size, count)])))

    def commit(
        self, *entries: tuple[bytes, Grant, int], wants: Sequence[tuple[int, int]] = ()
    ) -> tuple[list[int], list[Grant]]:
        """(digest, grant, length): their statuses, and fresh grants."""
        answer = self.channel.call(
            M.Commit([(digest, grant.number, length, 0, 0, 0) for digest, grant, length in entries], list(wants))
        )
        return answer.statuses, self.take(answer)

    def give_back(self, *grants: Grant) -> int:
        """RETURN_GRANTS: how many were ours."""
        answer: M.Done = self.channel.call(M.ReturnGrants([grant.number for grant in grants]))
        return answer.items

    def hang_up(self) -> None:
        """The control connection only."""
        self.channel.close()

    def close(self) -> None:
        """All of it."""
        for link in self.links:
            link.close()
        self.channel.close()
        self.fabric.close()


@contextlib.contextmanager
def lane(server: EndpointThread, pairs: Sequence[tuple[int, int]] = ((0, 0),), **more: Any) -> Iterator[RawLane]:
    """A lane for the time of a block."""
    made = RawLane(server, pairs, **more)
    try:
        yield made
    finally:
        made.close()


def refusal(call: Callable[[], Any]) -> Refused:
    """What a call is refused with."""
    try:
        answer = call()
    except Refused as exc:
        return exc
    raise AssertionError(f"not refused: {answer}")

"""A fake cluster: a manager that the test controls, and real workers and streams in threads.

with FakeCluster(2) as cluster:
    cluster.own({0: range(SHARD_COUNT)})              # map of epoch 1: node 0 has everything
    client = cluster.client("shm")
    cluster.move(0, 1)                                # map of epoch 2: node 1 has it, node 0 had it before
    cluster.nodes[1].adopt(...)                       # what a mover would do, when the test wants it
"""

from __future__ import annotations

import contextlib
import socket
import threading
from array import array
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import numpy as np

from simm.client import Client
from simm.cluster.epochs import FOR_EVER
from simm.cluster.shard_map import pack_since
from simm.constants import DEFAULT_NAMESPACE, NO_OWNER, SHARD_COUNT
from simm.net.listeners import listen_tcp
from simm.net.loop import Loop
from simm.rpc import Flag, Frame, decode, encode, reply
from simm.server.stream import Stream
from simm.wire import epoch_messages as E
from simm.wire import messages as M
from simm.wire.messages import ShardRole, Status
from simm.wire.shard_set import bitmap_of
from tests.support.frame_server import FrameServer
from tests.support.waiting import wait_until
from tests.support.worker_thread import WAIT_S, WorkerThread

ALL = range(SHARD_COUNT)


class FakeManager(FrameServer):
    """Answers HELLO, PING and MAP_GET and pushes what is published; or is a standby, or does not answer."""

    def __init__(self) -> None:
        self.map: M.MapReply | None = None
        #: What comes before each map; None as long as no namespace has epochs.
        self.epochs: E.Epochs | None = None
        self.leads = True
        self.silent = False
        #: Names of the messages received.
        self.heard: list[str] = []
        super().__init__()

    def on_frame(self, sock: socket.socket, frame: Frame, state: Any) -> None:
        """Answer what it is asked."""
        msg = decode(frame)
        self.heard.append(type(msg).__name__)
        answer: Any
        status = 0
        if isinstance(msg, M.Ping):
            answer = M.Pong(msg.cookie)
        elif isinstance(msg, M.Hello):
            answer = M.Welcome(1, 0, 0, 0, 0, 0, 0, "")
        elif self.leads and self.map is not None:
            answer = self.map
        else:
            answer, status = M.Error("another one leads"), Status.NOT_LEADER
        with self.lock:
            if not self.silent:
                if answer is self.map and self.epochs is not None:
                    sock.sendall(encode(self.epochs, 0, flags=Flag.PUSH))
                sock.sendall(reply(answer, frame.request_id, status))

    def publish(self, shard_map: M.MapReply) -> None:
        """Set the map and push it to all clients."""
        if self.epochs is not None:
            self.push(self.epochs)
        self.push(shard_map)
        self.map = shard_map

    def push(self, msg: Any) -> None:
        """Push a message to all connections."""
        frame = encode(msg, 0, flags=Flag.PUSH)
        with self.lock:
            if not self.silent:
                for sock in self.links:
                    with contextlib.suppress(OSError):
                        sock.sendall(frame)


class StreamThread:
    """The code of a stream process, in a thread."""

    def __init__(self, uds: str) -> None:
        self.listener = listen_tcp("127.0.0.1", 0)
        self.port: int = self.listener.getsockname()[1]
        self.loop = Loop()
        self.stream = Stream(self.loop, uds)
        self.loop.listen(self.listener, self.stream)
        self._near, far = socket.socketpair()
        self._far = far
        self.loop.watch(far, lambda _mask: self.loop.stop())
        self.thread = threading.Thread(target=self.loop.run, daemon=True)
        self.thread.start()
        # With many runnable processes the first one may take longer than a stream gives its worker.
        wait_until(lambda: self.stream.keeper.session is not None, "a session with the worker")

    def stop(self) -> None:
        self._near.send(b"x")
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive(), "the stream is stuck"
        self.loop.close()
        if self.stream.keeper.session is not None:
            self.stream.keeper.session.close()
        self._near.close()
        self._far.close()


class Node:
    """A data server with one worker: real except for its supervisor, whose part the test takes."""

    def __init__(self, number: int, *, size: int = 16 << 20) -> None:
        self.number = number
        self.name = f"node{number}"
        # Each test gives it its shards; to take all away again takes a tenth of a second.
        self.worker = WorkerThread(size, all_shards=False)
        self.stream = StreamThread(self.worker.path)
        self.dead = False

    @property
    def info(self) -> M.WorkerInfo:
        return M.WorkerInfo(
            0, 0, 1, 100 + self.number, 16 << 20, self.name, self.worker.path, "127.0.0.1", self.stream.port
        )

    def call(self, msg: Any) -> Any:
        """Send a message to the worker, as its supervisor does."""
        return self.worker.supervisor.call(msg)

    def freeze(self, epoch: int, shards: Iterable[int]) -> None:
        self.call(M.Freeze(epoch, bitmap_of(shards)))

    def adopt(self, epoch: int, shards: Iterable[int], fallback: Iterable[int] | None = None) -> None:
        shards = list(shards)
        self.call(M.Adopt(epoch, bitmap_of(shards), bitmap_of(shards if fallback is None else fallback)))

    def finish(self, epoch: int, shards: Iterable[int]) -> None:
        self.call(M.Finish(epoch, bitmap_of(shards)))

    def die(self) -> None:
        """Kill the whole server: no process listens any more."""
        if not self.dead:
            self.dead = True
            self.stream.stop()
            self.worker.die()

    def close(self) -> None:
        if self.dead:
            self.worker.start()
        else:
            self.stream.stop()
        self.worker.__exit__(None, None, None)


class FakeCluster:
    """Some nodes, a manager, and the map that both have."""

    def __init__(self, nodes: int = 2, *, cluster: int = 7, size: int = 16 << 20) -> None:
        self.cluster = cluster
        self.manager = FakeManager()
        self.nodes = [Node(number, size=size) for number in range(nodes)]
        self.epoch = 10  # a worker that is started anew may have a map of its own, of epoch 1
        self.owners = array("H", [NO_OWNER]) * SHARD_COUNT
        self.since = array("Q", bytes(8 * SHARD_COUNT))
        self.previous: dict[int, int] = {}
        self.clients: list[Client] = []
        #: The epochs of namespaces.
        self.advanced: dict[str, int] = {}

    def __enter__(self) -> FakeCluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        for client in self.clients:
            client.close()
        self.manager.stop()
        for node in self.nodes:
            node.close()

    def client(self, path: str = "shm", **more: Any) -> Client:
        """Return a connected client, which the cluster closes."""
        client = Client("{}:{}".format(*self.manager.address), **{"path": path, "deadline_s": 30.0, **more})
        self.clients.append(client)
        return client

    def map(self) -> M.MapReply:
        """Return the current map."""
        return M.MapReply(
            self.epoch, self.cluster, [node.info for node in self.nodes], self.owners.tobytes(),
            sorted(self.previous.items()), pack_since(self.since),
        )  # fmt: skip

    def own(self, owners: dict[int, Iterable[int]], previous: int | None = None) -> None:
        """Start an epoch in which these nodes own these shards, which they got from ``previous`` if it is given."""
        self.epoch += 1
        for number, some in owners.items():
            shards = list(some)
            np.frombuffer(self.owners, np.uint16)[shards] = number
            np.frombuffer(self.since, np.uint64)[shards] = self.epoch
            if previous is not None:
                self.previous.update(dict.fromkeys(shards, previous))
            elif self.previous:
                for shard in shards:
                    self.previous.pop(shard, None)

    def forget_previous(self) -> None:
        """Start an epoch in which all moves are over."""
        self.epoch += 1
        self.previous.clear()

    def advance(self, name: str = DEFAULT_NAMESPACE, *, until_ns: int = FOR_EVER) -> None:
        """Advance a namespace: tell the workers, not the clients. ``until_ns``: the lease."""
        self.epoch += 1
        self.advanced[name] = self.epoch
        table = [E.NamespaceEpoch(*each) for each in sorted(self.advanced.items())]
        self.manager.epochs = E.Epochs(self.epoch, self.cluster, 0, table)
        for node in self.nodes:
            node.call(self.manager.epochs)
        self.instruct()
        self.extend_leases(until_ns)

    def extend_leases(self, until_ns: int) -> None:
        """Let values with an epoch be read until then, by CLOCK_BOOTTIME."""
        for node in self.nodes:
            node.call(E.EpochLease(until_ns))

    def publish(self) -> None:
        """Push the map to the clients."""
        self.manager.publish(self.map())

    def instruct(self, *numbers: int) -> None:
        """Send the map's shards to the workers of these nodes, or of all nodes if none is given."""
        for number in numbers or range(len(self.nodes)):
            node = self.nodes[number]
            if node.dead:
                continue
            mine = np.frombuffer(self.owners, np.uint16) == number
            roles = np.where(mine, ShardRole.OWNER, ShardRole.NONE).astype(np.uint8)
            for shard, before in self.previous.items():
                if mine[shard]:
                    roles[shard] = ShardRole.INCOMING
                elif before == number:
                    roles[shard] = ShardRole.OUTGOING
            since = np.where(roles != ShardRole.NONE, np.frombuffer(self.since, np.uint64), np.uint64(0))
            node.call(M.Shards(self.epoch, since.tobytes(), roles.tobytes(), self.cluster))

    def settled(self, owners: dict[int, Iterable[int]]) -> None:
        """Apply :meth:`own` without a move; send it to workers and clients."""
        self.own(owners)
        self.instruct()
        self.publish()

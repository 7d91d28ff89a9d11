"""A map of servers that take connections and never answer, and its manager, which does."""

from __future__ import annotations

import contextlib
import socket
from array import array

from simm.cluster.shard_map import pack_since
from simm.constants import SHARD_COUNT
from simm.wire import messages as M
from tests.support.fake_cluster import FakeManager


class Silent:
    """A map of servers that take connections and never answer."""

    def __init__(self, count: int) -> None:
        self.listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
        self.manager = FakeManager()
        workers = [
            M.WorkerInfo(0, 0, 1, 100 + at, 1 << 20, f"n{at}", "/nowhere", *listener.getsockname()[:2])
            for at, listener in enumerate(self.listeners)
        ]
        owners = array("H", [shard % count for shard in range(SHARD_COUNT)])
        self.manager.publish(M.MapReply(1, 7, workers, owners.tobytes(), [], pack_since(array("Q", [1] * SHARD_COUNT))))

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_: object) -> None:
        self.manager.stop()
        for listener in self.listeners:
            listener.close()

    def asked(self) -> int:
        """Return how many of the servers have been connected to since the last call."""
        found = 0
        for listener in self.listeners:
            listener.settimeout(0)
            connected = 0
            with contextlib.suppress(BlockingIOError):
                while True:
                    listener.accept()[0].close()
                    connected = 1
            found += connected
        return found

"""A link to a manager for tests: the calls of data servers, and a subscription to the map, from one thread.

Tests number the instances of a data server. :func:`secret_of` and :func:`instance` make real ones of the numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

from simm.constants import SHARD_COUNT
from simm.errors import TransportError
from simm.net.channel import Channel, weakly
from simm.sdk import manager_link
from simm.wire import messages as M
from simm.wire.identity import SECRET_BYTES, instance_of
from simm.wire.messages import MapReply, WorkerInfo, WorkerLoad
from simm.wire.shard_set import bitmap_of


def secret_of(number: int) -> bytes:
    """Return the secret of a test's ``number``th instance."""
    return number.to_bytes(SECRET_BYTES, "little")


@functools.cache
def instance(number: int, name: str) -> int:
    """Return the instance that is made of that secret."""
    return instance_of(name, secret_of(number))


def joining(
    number: int, name: str, workers: Sequence[WorkerInfo], *, warm: bool = False, epoch: int = 0
) -> M.Join:
    """Return the JOIN of a test's ``number``th instance of a data server."""
    return M.Join(instance(number, name), int(warm), name, list(workers), epoch, 0, secret_of(number))


class ManagerClient(manager_link.ManagerClient):
    """One link to a manager that says it is a ``role``. Renews the subscription with the link."""

    def __init__(
        self, addresses: Sequence[tuple[str, int]], *, deadline_s: float = 3.0, token: str = "",
        role: int = M.Role.ADMIN,
    ) -> None:  # fmt: skip
        super().__init__(addresses, deadline_s=deadline_s, token=token)
        self.role = role
        self._pushed: MapReply | None = None
        self._subscribed = False

    @property
    def linked(self) -> bool:
        """Whether there is a link that is not known to be broken."""
        return self._channel is not None and not self._channel.broken

    def _connect(self, host: str, port: int) -> Channel:
        channel = super()._connect(host, port)
        channel._on_push = weakly(self._on_push)
        try:
            if self._subscribed:
                self._on_push(channel.call(M.MapGet(0, 1)))
        except TransportError:
            channel.close()
            raise
        return channel

    def close(self) -> None:
        """Close the link. The next call makes another one, with the subscription."""
        super().close()
        self._pushed = None

    def fileno(self) -> int:
        """Return the link's descriptor, readable when pushes wait. Raises TransportError without a link."""
        return self._linked().fileno()

    def _linked(self) -> Channel:
        if self._channel is None or self._channel.broken:
            raise TransportError("no link to the manager" if self._channel is None else self._channel.broken)
        return self._channel

    # -- what a data server says ------------------------------------------------------------------

    def join(
        self, number: int, name: str, workers: Sequence[WorkerInfo], *, warm: bool = False, epoch: int = 0
    ) -> M.Joined:
        """Offer workers; ``epoch`` is that of the newest map known. Refused with NAME_TAKEN while a namesake lives."""
        return self.call(joining(number, name, workers, warm=warm, epoch=epoch), M.Joined)

    def heartbeat(self, number: int, name: str, epoch: int = 0, loads: Sequence[WorkerLoad] = ()) -> int:
        """Report that the node lives; return the current epoch. Refused with UNKNOWN_NODE if it must join again."""
        return self.call(M.Heartbeat(instance(number, name), epoch, name, list(loads)), M.HeartbeatAck).epoch

    def leave(self, number: int, name: str, *, warm: bool = False) -> None:
        """Leave the cluster, ``warm`` to return with the values. Refused with UNKNOWN_NODE for a node not in it."""
        self.call(M.Leave(instance(number, name), name, int(warm)), M.Done)

    def moved(self, number: int, epoch: int, name: str, worker: int, shards: Iterable[int]) -> int:
        """Report shards that a worker has copied completely; return how many of them the manager took for moving."""
        return self.call(M.Moved(instance(number, name), epoch, name, worker, bitmap_of(shards)), M.Done).items

    def offer(self, shard_map: MapReply) -> bool:
        """Give a map to a manager that has lost its own; return whether it took it over. Only after :meth:`join`."""
        return self.call(M.MapOffer(*shard_map), M.Done).items > 0

    # -- the map ----------------------------------------------------------------------------------

    def get_map(self, known_epoch: int = 0) -> MapReply:
        """Return the shard map."""
        return _checked(self.call(M.MapGet(known_epoch, 0), MapReply))

    def ping(self, cookie: int = 0) -> None:
        """Check that the manager answers. Raises TransportError if it does not."""
        if self.call(M.Ping(cookie), M.Pong).cookie != cookie:
            self._linked().fail("the manager answered PING with another cookie")

    def subscribe(self) -> MapReply:
        """Return the shard map. :meth:`poll_pushes` returns every later one."""
        reply = _checked(self.call(M.MapGet(0, 1), MapReply))
        self._subscribed = True
        return reply

    def poll_pushes(self) -> MapReply | None:
        """Return the newest map pushed since the last call, or None; never wait.

        Raises TransportError if the link broke.
        """
        self._linked().poll_pushes()
        pushed, self._pushed = self._pushed, None
        return pushed

    def _on_push(self, msg: Any) -> None:
        if isinstance(msg, MapReply):
            self._pushed = _checked(msg)


def _checked(reply: MapReply) -> MapReply:
    if len(reply.owners) != 2 * SHARD_COUNT:
        raise TransportError(f"the manager sent a map of {len(reply.owners)} bytes")
    return reply

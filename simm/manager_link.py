"""A client of the manager: blocking calls with a deadline, and pushes that a thread can select on.

For tools, tests and whoever needs the map or the membership without an event loop. Several
addresses are tried in turn, and those that only stand by (NOT_LEADER) are passed over; a link that broke is made again
by the next call, and the subscription with it.

    with ManagerClient(parse_addresses("127.0.0.1:30001")) as manager:
        shard_map = manager.subscribe()
        while True:
            shard_map = manager.poll_pushes() or shard_map
            select.select([manager], [], [])

Errors: :class:`~simm.channel.Refused` (a TransportError with the ``status``) when the manager says no,
TransportError when none can be reached within the deadline or the link breaks. Not thread-safe.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, TypeVar

from . import messages as M
from .channel import Channel, Refused
from .constants import SHARD_COUNT
from .errors import TransportError, UsageError
from .messages import MapReply, Status, WorkerInfo, WorkerLoad
from .shards import bitmap_of

_Reply = TypeVar("_Reply")


class ManagerClient:
    """One link to a manager.

    Args:
        addresses: (host, port) of each manager, tried in turn.
        deadline_s: for each connect and each exchange, in seconds.
        token: what the manager's --token-file holds, if it has one.
        role: who we say we are.
    """

    def __init__(
        self, addresses: Sequence[tuple[str, int]], *, deadline_s: float = 3.0, token: str = "",
        role: M.Role = M.Role.ADMIN,
    ) -> None:  # fmt: skip
        if not addresses:
            raise UsageError("no manager address given")
        self.addresses = list(addresses)
        self.deadline_s = deadline_s
        self.token = token
        self.role = role
        self._channel: Channel | None = None
        self._at = 0
        self._pushed: MapReply | None = None
        self._subscribed = False

    def __repr__(self) -> str:
        state = "linked" if self.linked else "not linked"
        return f"<ManagerClient {self.addresses[self._at % len(self.addresses)]} {state}>"

    def __enter__(self) -> ManagerClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- link ----------------------------------------------------------------------------------

    @property
    def linked(self) -> bool:
        """Whether there is a link that has not broken, as far as we know."""
        return self._channel is not None and not self._channel.broken

    def connect(self) -> None:
        """Make a link if there is none that still stands. Raises TransportError naming each address and its trouble."""
        if self._channel is not None and not self._channel.broken:
            try:
                self._channel.poll_pushes()  # notices a peer that has closed since the last call
                return
            except TransportError:
                pass
        self._drop()
        why = []
        for _ in self.addresses:
            host, port = self.addresses[self._at % len(self.addresses)]
            try:
                channel = Channel.tcp(host, port, self.deadline_s, self._on_push)
                try:
                    hello = M.Hello(M.PROTOCOL_MIN, M.PROTOCOL_MAX, self.role, 0, 0, "", self.token, [])
                    if not isinstance(channel.call(hello), M.Welcome):
                        channel.fail("answered HELLO with something else")
                    if self._subscribed:
                        self._on_push(channel.call(M.MapGet(0, 1)))
                except TransportError:
                    channel.close()
                    raise
            except TransportError as exc:
                if isinstance(exc, Refused) and exc.status != Status.NOT_LEADER:
                    raise  # the manager is there and says no: another address would only hide it
                why.append(f"{host}:{port}: {exc}")
                self._at += 1
                continue
            self._channel = channel
            return
        raise TransportError(f"no manager answers ({'; '.join(why)}): start one with `python -m simm.manager`")

    def close(self) -> None:
        """Close the link and end the subscription. Twice is harmless."""
        self._drop()
        self._subscribed = False

    def _drop(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self._pushed = None

    def fileno(self) -> int:
        """The link's descriptor, readable when pushes wait. Raises TransportError without a link."""
        return self._linked().fileno()

    def _linked(self) -> Channel:
        if self._channel is None or self._channel.broken:
            raise TransportError("no link to the manager" if self._channel is None else self._channel.broken)
        return self._channel

    def _call(self, msg: Any, answer: type[_Reply]) -> _Reply:
        why = ""
        for _ in self.addresses:
            self.connect()
            channel = self._linked()
            try:
                reply = channel.call(msg)
            except Refused as exc:
                if exc.status != Status.NOT_LEADER:
                    raise
                host, port = self.addresses[self._at % len(self.addresses)]
                why = f"{host}:{port}: {exc}"
                self._drop()
                self._at += 1
                continue
            if not isinstance(reply, answer):
                channel.fail(f"the manager answered {type(msg).__name__} with {type(reply).__name__}")
                raise AssertionError("unreachable")
            return reply
        raise TransportError(f"no manager leads ({why}): name them all, or wait until one does")

    # -- calls ---------------------------------------------------------------------------------

    def join(
        self, instance: int, name: str, workers: Sequence[WorkerInfo], *, warm: bool = False, epoch: int = 0
    ) -> M.Joined:
        """Offer workers; ``epoch`` of the newest map we have. Refused with NAME_TAKEN while a namesake lives."""
        return self._call(M.Join(instance, int(warm), name, list(workers), epoch), M.Joined)

    def heartbeat(self, instance: int, name: str, epoch: int = 0, loads: Sequence[WorkerLoad] = ()) -> int:
        """Say that we live; the current epoch. Refused with UNKNOWN_NODE when we must join again."""
        return self._call(M.Heartbeat(instance, epoch, name, list(loads)), M.HeartbeatAck).epoch

    def leave(self, instance: int, name: str, *, warm: bool = False) -> None:
        """Say goodbye, or see you soon. Refused with UNKNOWN_NODE when we are no member."""
        self._call(M.Leave(instance, name, int(warm)), M.Done)

    def moved(self, instance: int, epoch: int, name: str, worker: int, shards: Iterable[int]) -> int:
        """Say that a worker has all of some shards; how many of them the manager took for moving."""
        return self._call(M.Moved(instance, epoch, name, worker, bitmap_of(shards)), M.Done).items

    def offer(self, shard_map: MapReply) -> bool:
        """Give a map to a manager that has lost its own; whether it learnt something. Only after :meth:`join`."""
        return self._call(M.MapOffer(*shard_map), M.Done).items > 0

    def drain(self, name: str, on: bool = True) -> int:
        """Move everything away from a data server, or let it take its share again; how many shards it owns now.

        Refused with UNKNOWN_NODE for a name that there is not, UNAVAILABLE when nobody else could hold its shards.
        """
        return self._call(M.Drain(int(on), name), M.Done).items

    def get_map(self, known_epoch: int = 0) -> MapReply:
        """The shard map."""
        return self._checked(self._call(M.MapGet(known_epoch, 0), MapReply))

    def status(self) -> dict[str, Any]:
        """The cluster for people and programs: epoch, nodes, workers, the manager's counters."""
        status: dict[str, Any] = json.loads(self._call(M.ClusterStatus(1), M.StatsReply).json)
        return status

    def ping(self, cookie: int = 0) -> None:
        """Is it there? Raises TransportError if not."""
        if self._call(M.Ping(cookie), M.Pong).cookie != cookie:
            self._linked().fail("the manager answered PING with another cookie")

    def subscribe(self) -> MapReply:
        """The shard map; every later one comes by :meth:`poll_pushes`."""
        reply = self._checked(self._call(M.MapGet(0, 1), MapReply))
        self._subscribed = True
        return reply

    def poll_pushes(self) -> MapReply | None:
        """The newest map that came since the last call, or None; never waits. TransportError when the link broke."""
        channel = self._linked()
        channel.poll_pushes()
        pushed, self._pushed = self._pushed, None
        return pushed

    # -- internals -----------------------------------------------------------------------------

    def _on_push(self, msg: Any) -> None:
        if isinstance(msg, MapReply):
            self._pushed = self._checked(msg)

    def _checked(self, reply: MapReply) -> MapReply:
        if len(reply.owners) != 2 * SHARD_COUNT:
            raise TransportError(f"the manager sent a map of {len(reply.owners)} bytes")
        return reply

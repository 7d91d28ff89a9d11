"""What the link to the manager asks of a data server, and of all its workers together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ...wire.epoch_messages import NamespaceEpoch
from ...wire.messages import Moved, WorkerInfo, WorkerLoad


class MembershipDelegate(Protocol):
    """What the membership needs from its data server. ``Membership`` (``server/membership.py``) calls nothing else."""

    def infos(self) -> list[WorkerInfo] | None:
        """All workers, or None while one of them is not up. One that recovers is up once there was a JOINED."""

    def loads(self) -> list[WorkerLoad]:
        """Of all workers, for a heartbeat."""

    def moved(self) -> list[Moved]:
        """What has moved in and stands in the map as moving."""

    def taken(self) -> int:
        """Epoch of the newest map that all workers have taken over; 0 for none."""

    def stored(self) -> int:
        """Epoch of the newest map whose epochs of namespaces all workers say they have stored; 0 for none."""

    def frozen(self) -> int:
        """Highest epoch by which a shard of a worker is frozen; 0 for none."""

    def epochs(self, cluster: int) -> list[NamespaceEpoch]:
        """The newest epochs of namespaces of this cluster that the workers know."""

    def on_lease(self) -> None:
        """The lease has been extended: tell the workers."""

    def on_map(self) -> None:
        """``member`` has taken a map, or has been fenced: tell the workers."""

    def on_abandoned(self) -> None:
        """``member`` has been abandoned: tell the workers, and no :meth:`infos` before they have done it."""

    def give_up(self, why: str) -> None:
        """There is no way to join: end."""

    def resolve(self, host: str, callback: Callable[[str], None]) -> None:
        """Find a host's address; the callback gets it, or nothing, from the loop."""

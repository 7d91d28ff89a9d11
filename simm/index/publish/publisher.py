"""One process's turn: what the workers of this host told goes out in every form, and replays are answered."""

from __future__ import annotations

import time
from collections.abc import Container, Mapping
from typing import Any, Final

from ..libraries import zmq
from .host import Host
from .outlet import Outlet

#: Between two looks at the rings, ms. A worker tells what it stores ten times a second, and what goes at once.
LOOK_MS: Final = 10


class EventPublisher:
    """See above. One thread.

    Args:
        at: form -> addresses of the stream and of the replay.
        node: the name of this host in events.
        server, trusted: as for :class:`Host`.

    Raises UsageError for an address that cannot be bound.
    """

    def __init__(
        self, at: Mapping[str, tuple[str, str]], node: str, *, server: str = "", trusted: Container[int] = ()
    ) -> None:
        self.host = Host(server, trusted)
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self.outlets: dict[str, Outlet] = {}
        try:
            for form, (stream, replay) in at.items():
                outlet = Outlet(self._context, form, stream, replay, node, self.host.claims.all)
                self.outlets[form] = outlet
                self._poller.register(outlet.router, zmq.POLLIN)
        except BaseException:
            self.close()
            raise

    def turn(self) -> None:
        """Do what is due, and wait for 10 ms at most."""
        asked: dict[Any, int] = dict(self._poller.poll(LOOK_MS))
        now = time.monotonic()
        deltas = self.host.poll(now)
        for outlet in self.outlets.values():
            outlet.publish(deltas, now)
            # Not before the tables were looked at: an early snapshot would be of nothing.
            if outlet.router in asked and self.host.settled:
                outlet.answer()

    def close(self) -> None:
        """Close all sockets."""
        for outlet in self.outlets.values():
            outlet.close()
        self._context.destroy(0)

"""One process's turn: what the workers of this host told goes out in every form, and replays are answered."""

from __future__ import annotations

import time
from collections.abc import Container, Mapping
from typing import Final

from ...net.http import Page, Route
from ...net.loop import Loop
from ...net.metrics import Samples
from . import figures
from .host import Host
from .outlet import Outlet

#: Between two looks at the rings, seconds. A worker tells what it stores ten times a second, and what goes at once.
LOOK_S: Final = 0.01
#: The same between two pages of a table.
PAGE_S: Final = 0.001


class EventPublisher:
    """See above. One thread.

    Args:
        at: form -> addresses of the stream and of the replay.
        node: the name of this host in events.
        server, trusted: as for :class:`Host`.
        loop: None for one of its own.

    Raises SimmError for an address that cannot be bound.
    """

    def __init__(
        self, at: Mapping[str, tuple[str, str]], node: str, *, server: str = "", trusted: Container[int] = (),
        loop: Loop | None = None,
    ) -> None:  # fmt: skip
        self.host = host = Host(server, trusted)
        self._own = loop is None
        self._loop = Loop() if loop is None else loop
        self._looked = -LOOK_S
        self.outlets: dict[str, Outlet] = {}
        try:
            for form, (stream, replay) in at.items():
                # A snapshot before the tables were looked at would be of nothing.
                self.outlets[form] = Outlet(
                    self._loop, form, stream, replay, node, host.claims.all, lambda: host.settled
                )
        except BaseException:
            self.close()
            raise

    def turn(self) -> None:
        """Do what is due, and wait for 10 ms at most."""
        pause = LOOK_S if self.host.settled else PAGE_S
        self._loop.run_once(pause)
        now = time.monotonic()
        if now - self._looked < pause:
            return
        self._looked = now
        deltas = self.host.poll(now)
        for outlet in self.outlets.values():
            outlet.publish(deltas, now)
            outlet.answer()

    @property
    def routes(self) -> dict[str, Route]:
        """Pages, by path."""
        return {"/healthz": lambda: Page("ok\n"), "/readyz": self._readyz, "/metrics": self.metrics}

    def _readyz(self) -> Page:
        return Page("ready\n") if self.host.settled else Page("the tables are not known yet\n", status=503)

    def status(self) -> str:
        """Return a line on what it does."""
        host = self.host
        peers = sum(len(each.stream.peers) for each in self.outlets.values())
        return f"{host.claims.entries:,} blocks of {len(host.workers)} workers, {peers} subscribers, {host.gaps} gaps"

    def metrics(self) -> Samples:
        """Return the metrics page."""
        samples, host = Samples(figures.METRICS), self.host
        samples.add(figures.WORKERS, len(host.workers))
        samples.add(figures.BLOCKS, host.claims.entries)
        samples.add(figures.GAPS, host.gaps)
        samples.add(figures.LOOKS, host.looks)
        for form, outlet in self.outlets.items():
            samples.add(figures.MESSAGES, outlet.messages, form)
            samples.add(figures.CHANGES, outlet.blocks, form)
            samples.add(figures.KEPT, outlet.kept_bytes, form)
            samples.add(figures.REPLAYS, outlet.replays, form)
            samples.add(figures.SNAPSHOTS, outlet.snapshots, form)
            samples.add(figures.SKIPPED, outlet.skipped, form)
            for name, door in (("stream", outlet.stream), ("replay", outlet.replay)):
                samples.add(figures.PEERS, len(door.peers), form, name)
                samples.add(figures.REFUSED, door.refused, form, name)
                samples.add(figures.DROPPED, door.dropped, form, name)
        samples.add_process()
        return samples

    def close(self) -> None:
        """Close all sockets."""
        for outlet in self.outlets.values():
            outlet.close()
        if self._own:
            self._loop.close()

"""Looking at a running cluster from outside, all the time: does the epoch ever go back, do two workers own a shard?

The maps come from the manager, the shard words straight from the workers' segments (read, not mapped: what a
worker does is not disturbed). A worker accepts mutations of a shard at most while its word is an epoch, without FROZEN
(``simm.arena.shard_words``): that is since when the shard has been its own. An owner is given by exactly one map, so
the same shard with the same epoch at two workers, at whatever times, means that two have accepted mutations in one
ownership.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from simm.arena.layout import HEADER_BYTES, MAGIC
from simm.constants import SHARD_COUNT
from simm.errors import TransportError
from simm.wire import messages as M
from simm.wire.shard_set import EPOCH_MASK, FROZEN
from tests.support.background import Background
from tests.support.fleet import Fleet

PERIOD_S: Final = 0.1
_MAGIC: Final = MAGIC.to_bytes(8, "little")


def read_words(path: Path) -> np.ndarray[Any, Any] | None:
    """A segment's shard words, or None when it has gone or is no metadata: values look like anything."""
    try:
        with open(path, "rb", buffering=0) as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                return None
            file.seek(HEADER_BYTES)
            return np.frombuffer(file.read(8 * SHARD_COUNT), np.uint64)
    except (OSError, ValueError):
        return None


class Owners:
    """Who accepts what since when, as far as seen. ``look`` raises nothing: ``conflicts`` says what was wrong."""

    def __init__(self) -> None:
        #: Worker -> the epoch in which it was last seen to accept each shard, 0 for never.
        self.seen: dict[str, np.ndarray[Any, Any]] = {}
        self.conflicts: list[str] = []
        self.looks = 0

    def look(self, worker: str, words: np.ndarray[Any, Any]) -> None:
        """One worker's words at some moment."""
        self.looks += 1
        accepting = (words != 0) & (words < FROZEN)
        epochs = np.where(accepting, words & np.uint64(EPOCH_MASK), 0)
        last = self.seen.setdefault(worker, np.zeros(SHARD_COUNT, np.uint64))
        np.copyto(last, epochs, where=accepting)
        for other, theirs in self.seen.items():
            if other != worker:
                both = np.flatnonzero((theirs == last) & (last != 0))
                if len(both) and len(self.conflicts) < 10:
                    self.conflicts.append(
                        f"shard {both[0]} and {len(both) - 1} more: {worker} and {other} since {int(last[both[0]])}"
                    )


class Watch(Background):
    """``with Watch(fleet) as watch``: looks every ``PERIOD_S``; :meth:`assert_right` at the end.

    ``path_of`` says where this process finds a server's segment, given the server's position and the segment's name.
    """

    def __init__(self, fleet: Fleet, path_of: Callable[[int, str], Path] | None = None) -> None:
        super().__init__("watch")
        self.fleet = fleet
        self.path_of = path_of or (lambda _position, name: Path("/dev/shm", name))
        self.owners = Owners()
        self.epochs: list[tuple[float, int]] = []
        self.back: list[str] = []
        self._last: tuple[int, int] = (0, 0)

    def run(self) -> None:
        """Look, again and again."""
        # A connection of its own: the test uses the fleet's at the same time.
        channel = None
        host, _, port = self.fleet.manager.address.rpartition(":")
        while not self.over.wait(PERIOD_S):
            try:
                if channel is None:
                    channel = self.fleet.manager.place.connect(host, int(port), 1.0)
                self._note(channel.call(M.MapGet(0, 0)))
            except TransportError:
                if channel is not None:
                    channel.close()
                channel = None
            for position, server in enumerate(self.fleet.servers):
                self._look(position, server.name)
        if channel is not None:
            channel.close()

    def _note(self, reply: Any) -> None:
        cluster, epoch = self._last
        if cluster == reply.cluster and reply.epoch < epoch:
            self.back.append(f"epoch {reply.epoch} after {epoch}")
        if reply.epoch != epoch:
            self.epochs.append((time.monotonic(), reply.epoch))
        self._last = (reply.cluster, reply.epoch)

    def _look(self, position: int, name: str) -> None:
        folder = self.path_of(position, "")
        with contextlib.suppress(OSError):
            for path in folder.glob(f"simm-*-{name}-*"):
                words = read_words(path)
                if words is not None and len(words) == SHARD_COUNT:
                    self.owners.look(path.name, words)

    @property
    def epoch(self) -> int:
        """The newest epoch that was seen."""
        return self._last[1]

    def assert_right(self) -> None:
        """No epoch went back, and no shard had two owners in one epoch. After the ``with``."""
        assert not self.back, self.back
        assert not self.owners.conflicts, self.owners.conflicts
        assert self.owners.looks > 3 and self.epochs, "it has seen something"

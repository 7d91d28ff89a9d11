"""Simulate the clock, the event queue, hosts with processes, and a network with all its faults.

A process is *running*, *paused* (SIGSTOP: events and timers wait for it) or *dead* (events for it are lost, and the
kernel tells its peers if the network lets it). Each start is another *life*: no event meant for an earlier life
reaches it.

Messages take a latency with jitter, more on slow hosts, so they overtake each other. ``loss`` delays a message by
retransmission, as TCP does. ``duplicates`` delivers it twice. A *cut* between two hosts, or one way only, drops it.
"""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, Final

Act = Callable[..., object]

#: Retransmission time-out of a TCP connection, seconds.
RETRANSMIT_S: Final = 0.2
#: Events kept for the report of a failure.
KEPT: Final = 4096


class Process:
    """A process on a host: a manager, supervisor, worker, mover or client."""

    __slots__ = ("host", "life", "name", "on_epochs", "on_push", "paused", "resumed_at", "running", "waiting", "world")

    def __init__(self, world: Net, host: str, name: str) -> None:
        self.world = world
        self.host = host
        self.name = name
        self.running = False
        self.paused = False
        self.life = 0
        self.waiting: deque[tuple[Act, tuple[Any, ...]]] = deque()
        #: Takes a map that the manager pushes.
        self.on_push: Act = ignored
        #: Takes the epochs that come before a map, with the number of the connection. Returns False if it is closed.
        self.on_epochs: Callable[..., bool] = ignored
        #: When it went on after it had been paused, the last time.
        self.resumed_at = -1.0

    def __repr__(self) -> str:
        state = "dead" if not self.running else "paused" if self.paused else "running"
        return f"<{self.name} {state} life={self.life}>"

    def start(self) -> None:
        """Begin a new life."""
        self.life += 1
        self.running, self.paused = True, False
        self.waiting.clear()

    def die(self) -> None:
        """End at once, and drop all events that wait."""
        self.running = self.paused = False
        self.waiting.clear()

    def pause(self) -> None:
        if self.running:
            self.paused = True

    def resume(self) -> None:
        """Go on: the events that waited happen now, in order."""
        if self.paused:
            self.paused, self.resumed_at = False, self.world.now
            while self.waiting and not self.paused and self.running:
                act, details = self.waiting.popleft()
                act(*details)

    def take(self, life: int, act: Act, details: tuple[Any, ...]) -> None:
        """Take an event of a life, now or once resumed."""
        if not self.running or life != self.life:
            return
        if self.paused:
            self.waiting.append((act, details))
        else:
            act(*details)

    def later(self, seconds: float, act: Act, *details: Any) -> None:
        """Set a timer of this life."""
        self.world.at(self.world.now + seconds, self.take, self.life, act, details)


class Net:
    """Clock, queue and network.

    Args:
        seed: of all random numbers.
        latency_s: mean latency between two hosts.
    """

    def __init__(self, seed: int, latency_s: float = 0.0004) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now = 0.0
        self.latency_s = latency_s
        self.loss = 0.0
        self.duplicates = 0.0
        self.reordering = 0.0
        #: host -> factor of its latency.
        self.slow: dict[str, float] = {}
        #: (from, to): messages are dropped. "*" is every host.
        self.cuts: set[tuple[str, str]] = set()
        self.events = 0
        self.messages = 0
        self._queue: list[tuple[float, int, Act, tuple[Any, ...]]] = []
        self._number = 0
        self._trace = 0
        self.said: deque[tuple[float, str]] = deque(maxlen=KEPT)
        self.verbose = False

    # -- time ---------------------------------------------------------------------------------

    def at(self, when: float, act: Act, *details: Any) -> None:
        """Have something happen at a time."""
        self._number += 1
        heappush(self._queue, (when, self._number, act, details))

    def run(self, until: float) -> None:
        """Run all events up to a time."""
        queue = self._queue
        while queue and queue[0][0] <= until:
            when, _, act, details = heappop(queue)
            if when > self.now:
                self.now = when
            self.events += 1
            act(*details)
        self.now = max(self.now, until)

    def say(self, text: str) -> None:
        """Log an event: for the trace's hash, and for people."""
        line = f"{self.now:.6f} {text}"
        self._trace = zlib.crc32(line.encode(), self._trace) | (zlib.adler32(line.encode()) ^ self._trace >> 32) << 32
        self.said.append((self.now, text))
        if self.verbose:
            print(f"{self.now:10.4f}  {text}")

    @property
    def trace(self) -> str:
        """A hash of the log: equal for two runs of a seed."""
        return f"{self._trace:016x}-{self.events}"

    # -- messages ---------------------------------------------------------------------------------

    def reaches(self, source: str, target: str) -> bool:
        """Return True if a message gets from one host to another now."""
        cuts = self.cuts
        return source == target or not cuts or not (
            (source, target) in cuts or (source, "*") in cuts or ("*", target) in cuts
        )  # fmt: skip

    def delay(self, source: str, target: str) -> float:
        """Return the delay of the next message, seconds."""
        rng = self.random.random
        if source == target:
            return 0.00002  # in order, as through a local socket
        seconds = self.latency_s * (0.5 + rng())
        if self.slow:
            seconds *= self.slow.get(source, 1.0) * self.slow.get(target, 1.0)
        if self.loss and rng() < self.loss:
            seconds += RETRANSMIT_S * (1 + rng())
        if self.reordering and rng() < self.reordering:
            seconds += 0.05 * rng()
        return seconds

    def send(self, source: Process, target: Process, act: Act, *details: Any, once: bool = False) -> bool:
        """Send a message to the current life of a process; return True if it is in flight.

        ``once``: never duplicated, as on one TCP connection. Others may be repeated on a connection that replaces it.
        """
        self.messages += 1
        if not self.reaches(source.host, target.host):
            return False
        if not target.running:
            return False
        when = self.now + self.delay(source.host, target.host)
        self.at(when, self._arrive, source.host, target, target.life, act, details)
        if self.duplicates and not once and source.host != target.host and self.random.random() < self.duplicates:
            self.at(when + 0.05 * self.random.random(), self._arrive, source.host, target, target.life, act, details)
        return True

    def _arrive(self, source: str, target: Process, life: int, act: Act, details: tuple[Any, ...]) -> None:
        """Deliver a message, unless a cut came while it was in flight."""
        if self.reaches(source, target.host):
            target.take(life, act, details)


def ignored(*_details: Any) -> bool:
    """Take an event that has no consequences."""
    return False

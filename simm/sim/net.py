"""The clock, the queue of events, hosts with processes, and a network with everything that is wrong with networks.

A process is *running*, *paused* (SIGSTOP: what comes for it waits, its timers too) or *dead* (what comes for it is
lost, whoever has a connection with it is told by the kernel, if the network lets him). Each start of it is another
*life*: nothing that was meant for an earlier one reaches it.

Messages take a latency, more on slow hosts and with jitter, so they overtake each other. ``loss`` delays a message by
retransmission, as TCP does; ``duplicates`` brings it twice. A *cut* between two hosts, or one way only, swallows it.
"""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, Final

Act = Callable[..., None]

#: Of a TCP connection that loses a segment, seconds.
RETRANSMIT_S: Final = 0.2
#: Events kept for the report of a failure.
KEPT: Final = 4096


class Process:
    """Something that runs on a host: a manager, a supervisor, a worker, a mover, a client."""

    __slots__ = ("host", "life", "name", "on_push", "paused", "running", "waiting", "world")

    def __init__(self, world: Net, host: str, name: str) -> None:
        self.world = world
        self.host = host
        self.name = name
        self.running = False
        self.paused = False
        self.life = 0
        self.waiting: deque[tuple[Act, tuple[Any, ...]]] = deque()
        #: What it does with a map that a manager pushes.
        self.on_push: Act = _nothing

    def __repr__(self) -> str:
        state = "dead" if not self.running else "paused" if self.paused else "running"
        return f"<{self.name} {state} life={self.life}>"

    def start(self) -> None:
        """A new life."""
        self.life += 1
        self.running, self.paused = True, False
        self.waiting.clear()

    def die(self) -> None:
        """At once, with all that waits for it."""
        self.running = self.paused = False
        self.waiting.clear()

    def pause(self) -> None:
        if self.running:
            self.paused = True

    def resume(self) -> None:
        """What has waited happens now, in its order."""
        if self.paused:
            self.paused = False
            while self.waiting and not self.paused and self.running:
                act, details = self.waiting.popleft()
                act(*details)

    def take(self, life: int, act: Act, details: tuple[Any, ...]) -> None:
        """Something for it to do."""
        if not self.running or life != self.life:
            return
        if self.paused:
            self.waiting.append((act, details))
        else:
            act(*details)

    def later(self, seconds: float, act: Act, *details: Any) -> None:
        """A timer of this life."""
        self.world.at(self.world.now + seconds, self.take, self.life, act, details)


class Net:
    """Clock, queue and network.

    Args:
        seed: of everything random.
        latency_s: of a message between two hosts, in the mean.
    """

    def __init__(self, seed: int, latency_s: float = 0.0004) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.latency_s = latency_s
        self.loss = 0.0
        self.duplicates = 0.0
        self.reordering = 0.0
        #: host -> factor of its latency.
        self.slow: dict[str, float] = {}
        #: (from, to): swallowed. "*" is everybody.
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
        """All events up to a time."""
        queue = self._queue
        while queue and queue[0][0] <= until:
            when, _, act, details = heappop(queue)
            if when > self.now:
                self.now = when
            self.events += 1
            act(*details)
        self.now = max(self.now, until)

    def say(self, text: str) -> None:
        """Note what happened: for the trace, its hash, and people."""
        line = f"{self.now:.6f} {text}"
        self._trace = zlib.crc32(line.encode(), self._trace) | (zlib.adler32(line.encode()) ^ self._trace >> 32) << 32
        self.said.append((self.now, text))
        if self.verbose:
            print(f"{self.now:10.4f}  {text}")

    @property
    def trace(self) -> str:
        """A hash of all that was said: the same for two runs of a seed."""
        return f"{self._trace:016x}-{self.events}"

    # -- messages ---------------------------------------------------------------------------------

    def reaches(self, source: str, target: str) -> bool:
        """Does a message get from host to host now?"""
        cuts = self.cuts
        return source == target or not cuts or not (
            (source, target) in cuts or (source, "*") in cuts or ("*", target) in cuts
        )  # fmt: skip

    def delay(self, source: str, target: str) -> float:
        """Of the next message, seconds."""
        rng = self.random.random
        if source == target:
            return 0.00002  # in order, as through a socket of the host's own
        seconds = self.latency_s * (0.5 + rng())
        if self.slow:
            seconds *= self.slow.get(source, 1.0) * self.slow.get(target, 1.0)
        if self.loss and rng() < self.loss:
            seconds += RETRANSMIT_S * (1 + rng())
        if self.reordering and rng() < self.reordering:
            seconds += 0.05 * rng()
        return seconds

    def send(self, source: Process, target: Process, act: Act, *details: Any, once: bool = False) -> bool:
        """A message to a life of a process that runs now; whether it is on its way. ``once``: never twice, as by one
        TCP connection; others may come again by a connection that replaces the first."""
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
        """What was on its way when a cut came is lost too."""
        if self.reaches(source, target.host):
            target.take(life, act, details)


def _nothing(*_details: Any) -> None:
    pass

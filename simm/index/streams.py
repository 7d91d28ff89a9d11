"""One publisher's messages in their order: what was lost is replayed, or else everything that was known is forgotten.

Messages have consecutive numbers, which begin at 0 in each process of a publisher. A number that is missing may have
been a removal. So from then on nothing that is known of this publisher is counted (``Source.stale``) until a replay has
filled the hole. Without a replay, or if that has dropped the message too, all is forgotten. What is learned since then
is true again, but not all that the publisher has (``Source.lost``), until it has cleared its cache or begun anew.

Data servers' publishers answer a replay from any number on, if need be with all that there is, behind a message that
clears (``publish/outlet.py``). So what was lost of them is asked for again until it comes (:meth:`Stream.retry`).

A number that was seen before, or a connection that broke, is taken for a new process, which has nothing in its cache.
A message that cannot be read is lost too, and so is an event of which nobody can say what it removed.

This module does no I/O: ``publishers`` tells it what arrives.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Final

from .blocks import Blocks
from .events import MESSAGE_BYTES_MAX, BadEvent, Cleared, decode
from .sources import LOGGED, Source

log = logging.getLogger("simm.index.streams")

#: Messages that wait for the end of a replay, and their bytes.
PENDING_MAX: Final = 20_000
PENDING_BYTES_MAX: Final = 4 * MESSAGE_BYTES_MAX


class Stream:
    """See above. One thread.

    Args:
        replays: the publisher answers replays.
    """

    def __init__(self, index: Blocks, source: Source, *, replays: bool) -> None:
        self._index = index
        self.source = source
        self._replays = replays
        #: Number of the next message; None before the first.
        self.next: int | None = None
        #: Number of the last message that came by itself.
        self._live = -1
        self.replaying = False
        self._connected = False
        #: All that the publisher has is known.
        self.complete = False
        self.counts: Counter[str] = Counter()
        self._pending: list[tuple[int, bytes]] = []
        self._pending_bytes = 0

    # -- what arrives ------------------------------------------------------------------------------------

    def connected(self) -> int | None:
        """Note a connection. Return the number from which a replay must begin, if one must."""
        self._connected = True
        return self._replay(0) if self._replays and self.next is None and not self.replaying else None

    def disconnected(self) -> None:
        """Note that the connection broke: another process may be at its other end next time."""
        self.counts["disconnects"] += 1
        self._connected = False
        self._anew()

    def message(self, number: int, payload: bytes) -> int | None:
        """Take a message. Return the number from which a replay must begin, if one must."""
        if number <= self._live:
            self.counts["restarts"] += 1
            self._anew()
        self._live = number
        if self.replaying:
            self._pending.append((number, payload))
            self._pending_bytes += len(payload)
            if len(self._pending) > PENDING_MAX or self._pending_bytes > PENDING_BYTES_MAX:
                self.replay_failed()
            return None
        if self._replays and number > (self.next or 0):
            self.counts["gaps"] += self.next is not None
            start = self._replay(self.next or 0)
            self._pending.append((number, payload))
            return start
        self._take(number, payload)
        return None

    def retry(self) -> int | None:
        """Return the number from which a replay must begin, if what was lost can be had again."""
        again = self.source.registration.type == "simm" and self._replays and self.source.lost
        if not again or self.replaying or not self._connected:
            return None
        self.next = None  # the answer begins with what clears all
        return self._replay(0)

    def replayed(self, number: int, payload: bytes) -> None:
        """Take a message of the replay."""
        if self.replaying:
            self._take(number, payload)

    def replay_ended(self) -> None:
        """Note that the publisher has replayed all that it had."""
        if self.replaying:
            self.counts["replays"] += 1
            self._settle()

    def replay_failed(self) -> None:
        """Note that no answer came, or that too much came meanwhile."""
        if self.replaying:
            self.counts["failed replays"] += 1
            if self.next is not None:
                self._lose()
                self.next = None
            self._settle()

    # -- what follows ------------------------------------------------------------------------------------

    def _replay(self, start: int) -> int:
        self.replaying = self.source.stale = True
        return start

    def _settle(self) -> None:
        """Apply what came during the replay."""
        pending, self._pending, self._pending_bytes = self._pending, [], 0
        self.replaying = self.source.stale = False
        for number, payload in pending:
            self._take(number, payload)

    def _anew(self) -> None:
        """Begin with a publisher of which nothing is known."""
        self._lose()
        self.next, self._live = None, -1
        self.replaying = self.source.stale = False
        self._pending, self._pending_bytes = [], 0

    def _lose(self) -> None:
        """Forget all, as it may be wrong."""
        self._index.clear(self.source)
        self.complete = False
        self.source.lost = True

    def _take(self, number: int, payload: bytes) -> None:
        """Apply a message unless it was applied, and forget everything before it if one is missing."""
        if self.next is None:
            if number == 0:
                self.complete, self.source.lost = True, False
        elif number < self.next:
            return
        elif number > self.next:
            self.counts["gaps"] += not self.replaying
            self._lose()
        self.next = number + 1
        self.counts["messages"] += 1
        try:
            batch = decode(payload)
        except BadEvent as exc:
            self._complain(str(exc))
            self._lose()
            return
        for why in batch.refused:
            self._complain(why)
        if batch.doubtful:
            self._lose()
        self.counts["events"] += len(batch.events)
        self._index.apply(self.source, batch.events, batch.rank)
        told = self.source.registration
        if any(isinstance(each, Cleared) for each in batch.events) and (not told.store or told.type == "simm"):
            self.complete, self.source.lost = True, False

    def _complain(self, why: str) -> None:
        self.counts["refused"] += 1
        if self.counts["refused"] in LOGGED:
            name = self.source.registration.instance
            log.warning("%r sent what cannot be read (%d so far): %.200r", name, self.counts["refused"], why)

"""One publisher's messages in their order: what was lost is replayed, or else everything that was known is forgotten.

Messages have consecutive numbers, which begin at 0 in each process of a publisher. A number that is missing may have
been a removal. So from then on nothing that is known of this publisher is counted (``Source.stale``) until a replay has
filled the hole. Without a replay, or if that has dropped the message too, all is forgotten. What is learned since then
is true again, but not all that the publisher has (``Source.lost``), until it has cleared its cache or begun anew.

A replay that gets no answer, or only a part of one, is asked for again (:meth:`Stream.retry`):

- For a hole, ``HOLE_ASKS`` times in all, from the first message that is missing. Nothing counts meanwhile, and nothing
  is forgotten. After that all is forgotten, and what comes counts. A publisher that has not answered the last question
  is asked once. Of an engine only failures without a new message count: one that answers part by part is asked for
  each. A message that another part had is not new. A store's answer may have begun anew each time
  (``publish/outlet.py``).
- Then for everything, up to ``ASKS_MAX`` questions without anything new. Such a question is *aside*: what comes
  meanwhile counts, and is kept too. When the answer begins, all is forgotten for it, and what was kept follows it.
- Once a publisher has said all that it keeps, it is not asked again, as it keeps the last messages only: one that it
  has not then it never has again.

Data servers' publishers answer a replay from any number on, if need be with all that there is, behind a message that
clears (``publish/outlet.py``). So what was lost of them is asked for without an end.

A number that was seen before, or a connection that broke, is taken for a new process, which has nothing in its cache.
A message that cannot be read is lost too, and so is an event of which nobody can say what it removed.

This module does no I/O: ``publishers`` tells it what arrives.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import Final

from .blocks import Blocks
from .events import MESSAGE_BYTES_MAX, BadEvent, Cleared, decode, slices
from .sources import LOGGED, Source

log = logging.getLogger("simm.index.streams")

#: Messages that wait for the end of a replay, and their bytes.
PENDING_MAX: Final = 20_000
PENDING_BYTES_MAX: Final = 4 * MESSAGE_BYTES_MAX
#: Questions for a hole before all is forgotten, and questions in a row without a whole answer or anything new.
HOLE_ASKS: Final = 4
ASKS_MAX: Final = 16
#: Blocks that are applied before others may ask the index: some milliseconds.
_SLICE: Final = 4096


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
        #: A replay was asked for, whose answer has not begun, and what comes counts meanwhile.
        self.aside = False
        #: Replays that failed since the last whole answer, or the last new part of an engine's.
        self.failures = 0
        #: :attr:`next` when the replay was asked for; None if that was for everything.
        self._asked: int | None = None
        #: Number behind the last message that any part of an answer had since the last whole answer.
        self._reached = 0
        #: Something was not applied: what comes next asks for no replay, but :meth:`retry` does.
        self.held = False
        #: The next failure has others after it before what was known is forgotten.
        self._patient = False
        #: Number of the message since which all is known.
        self._since = 0
        self._connected = False
        #: All that the publisher has is known: it is since a message before which it had nothing, no event was refused,
        #: and there was room for all.
        self.complete = False
        #: The same, but for events that were refused or had no room: an answer to a replay would bring nothing else.
        self._heard_all = False
        #: ``Source.lost`` and ``_heard_all`` as they are if one of several ranks was not heard yet when all others had
        #: cleared their caches; None unless all is known by that alone.
        self._unheard: tuple[bool, bool] | None = None
        #: Other messages follow at once, and then a ``Blocks.flush``.
        self.more = False
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

    def failed(self) -> None:
        """Note that something of this publisher was not applied, whatever it was. The connection is as it was.

        It counts as a replay that failed: another one is asked for, after a longer pause each time. What comes until
        then counts, as far as it is applied. Others that fail until then count as the same one.
        """
        failures, again = self.failures, self.held and not self.asking
        reached = self._reached if self._asked is None else 0  # all that is asked for now is new behind a hole
        self._anew()
        self.failures, self._reached, self.held = failures, reached, True
        if not again:
            self._count_failure()

    def message(self, number: int, payload: bytes) -> int | None:
        """Take a message. Return the number from which a replay must begin, if one must."""
        if number <= self._live:
            self.counts["restarts"] += 1
            self._anew()
        self._live = number
        if self.replaying:
            self._keep(number, payload)
            return None
        if self._replays and number > (self.next or 0) and not (self.held and self.next is None):
            self.counts["gaps"] += self.next is not None
            start = self._replay(self.next or 0)
            self._keep(number, payload)
            return start
        if self.aside:
            self._keep(number, payload)
        self._take(number, payload)
        return None

    @property
    def asking(self) -> bool:
        """True if an answer to a replay is awaited, or the next question."""
        return self.replaying or self.aside

    def retry(self) -> int | None:
        """Return the number from which a replay must be asked for now, if one must. No question is open."""
        if self.replaying:
            return self.next
        store = self.source.registration.type == "simm"
        unanswered = self.failures and (store or self.failures < ASKS_MAX) and not self._heard_all
        if not self._connected or not self._replays or not (unanswered or (store and self.source.lost)):
            return None
        self.aside = True
        return 0

    def replayed(self, number: int, payload: bytes) -> None:
        """Take a message of the replay."""
        if self.aside:
            self.aside = False
            engine = self.source.registration.type != "simm"
            if engine and number and self.next is not None and number >= self._since:
                self._answered()  # it has nothing that is not known
                return
            self._forget()
            self.next = self._asked = None
            self._patient = True
            self.replaying = self.source.stale = True
        if self.replaying:
            self._take(number, payload)

    def replay_ended(self) -> None:
        """Note that the publisher has replayed all that it had."""
        if self.asking:
            self.counts["replays"] += 1
            self._answered()

    def replay_failed(self) -> None:
        """Note that no answer came, or only a part of one."""
        if not self.asking:
            return
        reached = (self.next or 0) if self.replaying and self.next != self._asked else 0
        if reached > self._reached and self.source.registration.type != "simm":
            self._reached, self.failures, self._patient = reached, 0, True
        self._failed()
        if self.aside or self.next is None or not self._patient or self.failures >= HOLE_ASKS:
            self._give_up()

    # -- what follows ------------------------------------------------------------------------------------

    def _replay(self, start: int) -> int:
        self._drop_kept()
        self.aside, self._patient, self._asked = False, not self.failures, self.next
        self.replaying = self.source.stale = True
        return start

    def _keep(self, number: int, payload: bytes) -> None:
        """Keep what came during a replay; give that up if it is too much."""
        self._pending.append((number, payload))
        self._pending_bytes += len(payload)
        if len(self._pending) > PENDING_MAX or self._pending_bytes > PENDING_BYTES_MAX:
            self._failed()
            self._give_up()

    def _drop_kept(self) -> list[tuple[int, bytes]]:
        kept, self._pending, self._pending_bytes = self._pending, [], 0
        return kept

    def _failed(self) -> None:
        self.counts["failed replays"] += 1
        self._count_failure()

    def _count_failure(self) -> None:
        self.failures += 1
        told = self.source.registration
        if self.failures == ASKS_MAX and told.type != "simm":
            log.warning("none of %d replays of %r could be followed: it is asked no more", ASKS_MAX, told.instance)

    def _answered(self) -> None:
        self.failures, self._reached, self.held = 0, 0, False
        self._settle()

    def _give_up(self) -> None:
        """Go on without a replay."""
        if self.replaying and self.next is not None:
            self._lose()
            self.next = None
            if self._asked is not None:
                self._reached = 0  # in a hole, behind which all that an answer for everything begins with is new
        self._settle()

    def _settle(self) -> None:
        """Apply what came during the replay. What came beside one that has not begun is applied already."""
        kept = self._drop_kept()
        if not self.replaying:
            kept.clear()
        self.replaying = self.aside = False
        for number, payload in kept:
            self._take(number, payload)
        self.source.stale = False  # only now: these may have removed something

    def _anew(self) -> None:
        """Begin with a publisher of which nothing is known, nor which ranks it has.

        If it is the same process after all, a rank that is heard later takes back what clears have said until then.
        """
        self._lose()
        self.source.ranks.clear()
        with self._index.lock:  # whoever asks goes through them
            self.source.dense.clear()
        self.next, self._live, self.held = None, -1, False
        self.replaying = self.aside = self.source.stale = False
        self.failures = self._reached = 0
        self._drop_kept()

    def _lose(self) -> None:
        """Forget all, as it may be wrong."""
        self._forget()
        self.source.lost = True

    def _forget(self) -> None:
        self._index.clear(self.source)
        self.source.known.clear()
        self._doubt()
        self.complete = self._heard_all = False

    def _know_all(self) -> None:
        self.complete = self._heard_all = True
        self.source.lost = False

    def _cleared(self) -> None:
        """Know all, as each rank that was heard has cleared its cache."""
        if self.source.registration.rank is None and not self.complete:
            lost, heard = self._unheard or (False, True)
            self._unheard = self.source.lost or lost, self._heard_all and heard
        self._know_all()

    def _doubt(self) -> None:
        """Take back what is known by clears alone."""
        if self._unheard is not None:
            self.source.lost, self._heard_all = self._unheard
            self.complete, self._unheard = False, None

    def _take(self, number: int, payload: bytes) -> None:
        """Apply a message unless it was applied, and forget everything before it if one is missing."""
        if self.next is None:
            self._since = number
            if number == 0:
                self._unheard = None
                self._know_all()
        elif number < self.next:
            return
        elif number > self.next:
            self.counts["gaps"] += not self.replaying
            self._lose()
            self._since = number
        self.next = number + 1
        self.counts["messages"] += 1
        try:
            batch = decode(payload)
        except BadEvent as exc:
            self._complain(str(exc))
            self._lose()
            self._since = self.next
            return
        for why in batch.refused:
            self._complain(why)
        if batch.refused:
            self.complete = False
        events = batch.events
        if batch.doubtful:  # it may have removed what was known, and what this message told before it
            self._lose()
            self._since = number
            events = events[batch.sure :]
        self.counts["events"] += len(events)
        told, missed = self.source.registration, self.source.missed
        heard = set(self.source.ranks) if self._unheard is not None else None
        parts = slices(events, _SLICE, block_size=told.block_size, gpu_only=told.type == "vllm")
        for number, part in enumerate(parts):
            if number:
                time.sleep(0)  # whoever waits for the index has a turn
            self._index.apply(self.source, part, batch.rank, more=self.more or number + 1 < len(parts))
        if self.source.missed > missed:
            self.complete = False
        if heard is not None and not self.source.ranks - heard <= self.source.known:
            self._doubt()  # a rank that was not heard before: what it had then is not known
        if batch.refused and told.rank is None:
            self.source.known.clear()  # nobody can say whose event that was
        if any(isinstance(each, Cleared) for each in batch.events[batch.whole :]) and self._speaks_for_all():
            self._cleared()

    def _speaks_for_all(self) -> bool:
        """Return True if each rank has said that it has nothing any more, and all is known that came since."""
        told = self.source.registration
        return (told.type == "simm" or not told.store) and self.source.ranks <= self.source.known

    def _complain(self, why: str) -> None:
        self.counts["refused"] += 1
        if self.counts["refused"] in LOGGED:
            name = self.source.registration.instance
            log.warning("%r sent what cannot be read (%d so far): %.200r", name, self.counts["refused"], why)

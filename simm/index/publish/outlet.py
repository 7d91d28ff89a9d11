"""The sockets of one form of events: a stream, and a replay that can always begin at the beginning.

Messages have consecutive numbers. They begin at the microseconds of the clock when the publisher starts, so those of a
later publisher are higher, and a consumer sees the gap. The stream is a PUB socket: a subscriber that is too slow loses
messages, and sees the gap by the next number. While nothing happens an empty message goes out each second, so that a
lost one is noticed.

A replay is vLLM's: a DEALER asks a ROUTER for all messages from a number on, and the last answer has number -1. In
vLLM's form each answer has the topic before its number, and the last an empty one, as of vLLM 0.32 and SGLang 0.5.23.
In RFC 1527's form, in which nobody else has replays, answers have no topic, as of older vLLM. Other publishers keep the
last messages only; who asks for an earlier one never learns what was in them. Here the answer is
then a *snapshot*: messages that say that nothing is there, and then everything that is, at message S. They are numbered
so that the last of them is S; behind it come the messages from S + 1 on. So a consumer that knows nothing of snapshots
treats them right: its replay begins behind a gap, with a message that clears all. Where the first number would be one
that the consumer has seen, and would skip, S is made higher by empty messages before.

Most of a snapshot's numbers are those of kept messages too. Who asks for one of them may have had a part of the
snapshot, so the answer is a snapshot again: the kept messages from there on are no rest of it.

What is kept
------------
The last messages, once for all: a subscriber is a number, that of its next message, and a replay is one too
(``peers``). One that is so slow that its next message is not kept any more goes on with the first that is, or its
replay with a snapshot. A snapshot is kept as long as the messages behind it are, so a crowd of consumers does not make
one each. Nobody can make the process do little else than take snapshots: it pauses ten times as long as one took.
Peers that still read older ones hold them, two at most: who reads the oldest gives way to a new one.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Final

from ...errors import SimmError
from ...net.loop import Loop
from . import zmtp
from .claims import Delta
from .messages import FORMS, message, messages, snapshot
from .peers import QUESTIONS_MAX, TOPICS_MAX, Door, Peer

log = logging.getLogger("simm.index.publish")

#: Messages that are kept, and their bytes.
KEPT_MESSAGES: Final = 10_000
KEPT_BYTES: Final = 64 << 20
#: What a peer is handed at a time, at least if there is so much. A message may be larger.
HANDED_BYTES: Final = 64 << 10
#: Between two snapshots, in times that the last one took.
SNAPSHOT_PAUSE: Final = 10.0
#: Older snapshots that replays still read.
SNAPSHOTS_HELD: Final = 2
#: Seconds of one replay.
REPLAY_S: Final = 300.0
IDLE_S: Final = 1.0
_END: Final = (-1).to_bytes(8, "big", signed=True)
#: A number and a message of a replay; None: not now.
_Part = tuple[bytes, bytes] | None


class Outlet:
    """See above. One thread, the loop's.

    Args:
        form: of ``messages.FORMS``.
        stream, replay: addresses to bind.
        everything: returns all claims as they are after the last message.
        settled: returns False before that is known.

    Raises SimmError for an address that cannot be bound.
    """

    def __init__(
        self, loop: Loop, form: str, stream: str, replay: str, node: str, everything: Callable[[], Iterable[Delta]],
        settled: Callable[[], bool] = lambda: True,
    ) -> None:  # fmt: skip
        self._loop = loop
        self._form = form
        self._node = node
        self._everything = everything
        self._settled = settled
        self._topic = f"kv@{node}@simm".encode() if form == "vllm" else b""
        number = zmtp.header(8, zmtp.MORE)
        self._before = zmtp.header(len(self._topic), zmtp.MORE) + self._topic + number
        # What a ROUTER puts before a number: an empty frame, and the topic.
        topic, none = (self._before, zmtp.header(0, zmtp.MORE) + number) if form == "vllm" else (number, number)
        self._answer_before, self._end_before = (zmtp.header(0, zmtp.MORE) + each for each in (topic, none))
        #: Number of the next message.
        self.number = time.time_ns() // 1000
        self._kept: deque[bytes] = deque()
        self._kept_bytes = 0
        #: The number of the message that the kept snapshot is of, and its messages.
        self._snapshot: tuple[int, list[bytes]] | None = None
        self._next_snapshot = 0.0
        #: First and last numbers that snapshots have had, as long as they are kept messages' too: in order, apart.
        self._twice: deque[tuple[int, int]] = deque()
        self._sent = time.monotonic()
        #: What was done: messages, blocks in them, replays, snapshots, and messages that slow subscribers have missed.
        self.messages = self.blocks = self.replays = self.snapshots = self.skipped = 0
        self.stream = Door(loop, stream, "PUB", self._subscribed, self._of_stream)
        try:
            self.replay = Door(loop, replay, "ROUTER", self._asked, self._of_replay)
        except SimmError:
            self.stream.close()
            raise
        self._send(message([FORMS[form][1]]))  # what an earlier publisher said is void

    @property
    def addresses(self) -> tuple[str, str]:
        """Where the stream and the replay are."""
        return self.stream.address, self.replay.address

    @property
    def kept_bytes(self) -> int:
        """Bytes of the messages and of the snapshot that are kept."""
        return self._kept_bytes + sum(map(len, self._snapshot[1] if self._snapshot else ()))

    def publish(self, deltas: Sequence[Delta], now: float) -> None:
        """Send changes, or a sign of life if there were none for a while. Never waits. ``now``: monotonic seconds."""
        for raw in messages(self._form, deltas, self._node):
            self._send(raw)
        self.blocks += sum(len(each.names) for each in deltas)
        if now - self._sent >= IDLE_S:
            self._send(message([]))
        self.stream.pump_all()

    def answer(self) -> None:
        """Go on with the replays that wait for a snapshot. All changes so far have been published."""
        for peer in list(self.replay.peers):
            if peer.feed is not None and self._loop.now - peer.fed > REPLAY_S:
                self.replay.once("long", "closing the connection of a peer whose replay takes too long")
                self.replay.drop(peer)
        self.replay.pump_all()

    def close(self) -> None:
        """Close the sockets."""
        self.stream.close()
        self.replay.close()

    def _send(self, raw: bytes) -> None:
        self._sent = time.monotonic()
        self.messages += 1
        self._kept.append(raw)
        self._kept_bytes += len(raw)
        while len(self._kept) > KEPT_MESSAGES or (self._kept_bytes > KEPT_BYTES and len(self._kept) > 1):
            self._kept_bytes -= len(self._kept.popleft())
        self.number += 1
        first = self.number - len(self._kept)
        if self._snapshot is not None and self._snapshot[0] + 1 < first:
            self._snapshot = None  # nobody can be sent what is behind it
        while self._twice and self._twice[0][1] < first:
            self._twice.popleft()

    # -- subscribers -------------------------------------------------------------------------------------

    def _subscribed(self, peer: Peer, said: list[bytes] | zmtp.Subscription) -> None:
        if not isinstance(said, zmtp.Subscription):
            return
        if not said.wanted:
            if said.topic in peer.topics:
                peer.topics.remove(said.topic)
            return
        if len(peer.topics) >= TOPICS_MAX:
            raise zmtp.BadPeer(f"more than {TOPICS_MAX} subscriptions")
        if not self._wants(peer):
            peer.cursor = self.number
        peer.topics.append(said.topic)

    def _wants(self, peer: Peer) -> bool:
        return any(map(self._topic.startswith, peer.topics))

    def _of_stream(self, peer: Peer) -> list[bytes]:
        """Return the next messages for a subscriber."""
        if not self._wants(peer):
            return []
        first = self.number - len(self._kept)
        if peer.cursor < first:
            self.skipped += first - peer.cursor
            self.stream.once("slow", "a subscriber is too slow, and misses messages")
            peer.cursor = first
        found: list[bytes] = []
        size = 0
        while peer.cursor < self.number and size < HANDED_BYTES:
            raw = self._kept[peer.cursor - first]
            found += self._before + peer.cursor.to_bytes(8, "big") + zmtp.header(len(raw)), raw
            peer.cursor += 1
            size += len(raw)
        return found

    # -- replays -----------------------------------------------------------------------------------------

    def _asked(self, peer: Peer, said: list[bytes] | zmtp.Subscription) -> None:
        if isinstance(said, list) and len(said) == 2 and not said[0] and len(said[1]) == 8:
            if len(peer.questions) >= QUESTIONS_MAX:
                raise zmtp.BadPeer(f"more than {QUESTIONS_MAX} questions at a time")
            peer.questions.append(int.from_bytes(said[1], "big"))

    def _of_replay(self, peer: Peer) -> list[bytes]:
        """Return the next messages of a peer's replay."""
        found: list[bytes] = []
        size = 0
        while size < HANDED_BYTES:
            if peer.feed is None:
                if not peer.questions:
                    break
                self.replays += 1
                peer.feed, peer.fed = self._answers(peer, peer.questions.popleft()), self._loop.now
            try:
                part = next(peer.feed)
            except StopIteration:
                peer.feed = None
                continue
            if part is None:
                break
            before = self._end_before if part[0] == _END else self._answer_before
            found += before + part[0] + zmtp.header(len(part[1])), part[1]
            size += len(part[1])
        return found

    def _answers(self, peer: Peer, start: int) -> Iterator[_Part]:
        """Yield the numbers and messages of a replay, None where it has to wait."""
        while start != self.number:
            kept = self.number - len(self._kept) <= start < self.number
            if not kept or any(first <= start <= last for first, last in self._twice):
                start = 1 + (yield from self._whole(peer, start))
            while 0 <= (at := start - self.number + len(self._kept)) < len(self._kept):
                yield start.to_bytes(8, "big"), self._kept[at]
                start += 1
        yield _END, b""

    def _whole(self, peer: Peer, start: int) -> Generator[_Part, None, int]:
        """Yield a snapshot's numbers and messages. Return its number. Behind it the peer holds nothing of it."""
        while (taken := self._taken(start)) is None:
            yield None
        peer.snapshot = at, found = taken
        for number, raw in enumerate(found, at - len(found) + 1):
            yield number.to_bytes(8, "big"), raw
        peer.snapshot = None
        return at

    def _taken(self, start: int) -> tuple[int, list[bytes]] | None:
        """Return a snapshot, and the number of its message: a kept one if all messages behind it are kept too.

        Its messages have numbers from ``start`` on. None if none can be taken now.
        """
        first = self.number - len(self._kept)
        known = self._snapshot
        later = known is not None and start < self.number and known[0] - len(known[1]) + 1 < start
        if known is None or known[0] + 1 < first or later:
            began = time.monotonic()
            if began < self._next_snapshot or not self._settled():
                return None
            self.snapshots += 1
            self._let_go()
            known = self._snapshot = None  # before there is another one
            found = snapshot(self._form, self._everything(), self._node)
            if start < self.number:  # else it is of another publisher
                while self.number - len(found) < start:
                    self._send(message([]))
            known = self._snapshot = self.number - 1, found
            first = self.number - len(found)
            while self._twice and first <= self._twice[-1][1]:
                first = min(first, self._twice.pop()[0])
            self._twice.append((first, self.number - 1))
            ended = time.monotonic()
            self._next_snapshot = ended + SNAPSHOT_PAUSE * (ended - began)
        return known

    def _let_go(self) -> None:
        """Close the connections that read the oldest snapshots, so that few are held beside a new one."""
        held = {peer: peer.snapshot[0] for peer in self.replay.peers if peer.snapshot is not None}
        for at in sorted(set(held.values()))[:-SNAPSHOTS_HELD]:
            self.replay.once("held", "closing the connections of peers that read a snapshot too slowly")
            for peer in [each for each, mine in held.items() if mine == at]:
                self.replay.drop(peer)

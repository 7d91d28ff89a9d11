"""The sockets of one form of events: a stream, and a replay that can always begin at the beginning.

Messages have consecutive numbers. They begin at the microseconds of the clock when the publisher starts, so those of a
later publisher are higher, and a consumer sees the gap. The stream is a PUB socket: a subscriber that is too slow loses
messages, and sees the gap by the next number. While nothing happens an empty message goes out each second, so that a
lost one is noticed.

A replay is vLLM's: a DEALER asks a ROUTER for all messages from a number on, and the last answer has number -1. Other
publishers keep the last messages only; who asks for an earlier one never learns what was in them. Here the answer is
then a *snapshot*: messages that say that nothing is there, and then everything that is, at message S. They are numbered
so that the last of them is S; behind it come the messages from S + 1 on. So a consumer that knows nothing of snapshots
treats them right: its replay begins behind a gap, with a message that clears all. Where the first number would be one
that the consumer has seen, and would skip, S is made higher by empty messages before.

A snapshot is kept as long as the messages behind it are, so a crowd of consumers does not make one each.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from ...errors import UsageError
from ..libraries import zmq
from .claims import Delta
from .messages import FORMS, message, messages, snapshot

log = logging.getLogger("simm.index.publish")

#: Messages that are kept for replays, and their bytes; and what waits for one subscriber.
KEPT_MESSAGES: Final = 10_000
KEPT_BYTES: Final = 64 << 20
QUEUE_MESSAGES: Final = 10_000
#: What waits for one that asked for a replay: a whole one, and a snapshot of 300 million blocks before it. Whoever asks
#: again and again and reads nothing gets no more than that, and what it then lacks it sees by the numbers.
REPLAY_QUEUE: Final = 2 * KEPT_MESSAGES
#: Replays that one turn answers, at most.
REPLAYS: Final = 8
IDLE_S: Final = 1.0
_END: Final = (-1).to_bytes(8, "big", signed=True)


class Outlet:
    """See above. One thread.

    Args:
        form: of ``messages.FORMS``.
        stream, replay: addresses to bind.
        everything: returns all claims as they are after the last message.

    Raises UsageError for an address that cannot be bound.
    """

    def __init__(
        self, context: Any, form: str, stream: str, replay: str, node: str, everything: Callable[[], Sequence[Delta]]
    ) -> None:
        self._form = form
        self._node = node
        self._everything = everything
        self._topic = f"kv@{node}@simm".encode() if form == "vllm" else b""
        #: Number of the next message.
        self.number = time.time_ns() // 1000
        self._kept: deque[bytes] = deque()
        self._kept_bytes = 0
        #: The number of the message that the kept snapshot is of, and its messages.
        self._snapshot: tuple[int, list[bytes]] | None = None
        self._sent = time.monotonic()
        self.replays = 0
        self.snapshots = 0
        self._pub = self._bound(context, zmq.PUB, stream, QUEUE_MESSAGES)
        try:
            self._router = self._bound(context, zmq.ROUTER, replay, REPLAY_QUEUE)
        except UsageError:
            self._pub.close(0)
            raise
        self._send(message([FORMS[form][1]]))  # what an earlier publisher said is void

    @staticmethod
    def _bound(context: Any, kind: int, address: str, queue: int) -> Any:
        sock = context.socket(kind)
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.SNDHWM, queue)
        sock.setsockopt(zmq.MAXMSGSIZE, 1 << 10)  # of what comes in
        sock.setsockopt(zmq.HEARTBEAT_IVL, 2000)
        sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10_000)
        try:
            sock.bind(address)
        except zmq.ZMQError as exc:
            sock.close(0)
            raise UsageError(f"cannot publish at {address}: {exc}") from None
        return sock

    @property
    def addresses(self) -> tuple[str, str]:
        """Where the stream and the replay are."""
        at = [each.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0") for each in (self._pub, self._router)]
        return at[0], at[1]

    @property
    def router(self) -> Any:
        """The socket that replays are asked of."""
        return self._router

    def publish(self, deltas: Sequence[Delta], now: float) -> None:
        """Send changes, or a sign of life if there were none for a while. Never waits. ``now``: monotonic seconds."""
        for raw in messages(self._form, deltas, self._node):
            self._send(raw)
        if now - self._sent >= IDLE_S:
            self._send(message([]))

    def _send(self, raw: bytes) -> None:
        self._sent = time.monotonic()
        self._kept.append(raw)
        self._kept_bytes += len(raw)
        while len(self._kept) > KEPT_MESSAGES or (self._kept_bytes > KEPT_BYTES and len(self._kept) > 1):
            self._kept_bytes -= len(self._kept.popleft())
        number, self.number = self.number, self.number + 1
        # A PUB socket drops what a slow subscriber has no room for.
        self._pub.send_multipart([self._topic, number.to_bytes(8, "big"), raw], zmq.NOBLOCK)

    def answer(self) -> None:
        """Answer those that have asked for a replay, a few of them. All changes so far have been published."""
        for _ in range(REPLAYS):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) == 3 and not frames[1] and len(frames[2]) == 8:
                self._replay(frames[0], int.from_bytes(frames[2], "big"))

    def _replay(self, peer: bytes, start: int) -> None:
        self.replays += 1
        first = self.number - len(self._kept)
        if not first <= start <= self.number:
            at, found = self._taken(first, start)
            first = self.number - len(self._kept)
            for number, raw in enumerate(found, at - len(found) + 1):
                self._answer(peer, number.to_bytes(8, "big"), raw)
            start = at + 1
        for number in range(start, self.number):
            self._answer(peer, number.to_bytes(8, "big"), self._kept[number - first])
        self._answer(peer, _END, b"")

    def _answer(self, peer: bytes, number: bytes, raw: bytes) -> None:
        # A ROUTER drops what a slow peer has no room for, and what is for one that has gone.
        self._router.send_multipart([peer, b"", number, raw], zmq.NOBLOCK)

    def _taken(self, first: int, start: int) -> tuple[int, list[bytes]]:
        """Return a snapshot, and the number of its message: a kept one if all messages behind it are kept too.

        Its messages have numbers from ``start`` on.
        """
        known = self._snapshot
        later = known is not None and start < self.number and known[0] - len(known[1]) + 1 < start
        if known is None or known[0] + 1 < first or later:
            self.snapshots += 1
            found = snapshot(self._form, self._everything(), self._node)
            if start < self.number:  # else it is of another publisher
                while self.number - len(found) < start:
                    self._send(message([]))
            known = self._snapshot = self.number - 1, found
        return known

    def close(self) -> None:
        """Close the sockets."""
        self._pub.close(0)
        self._router.close(0)

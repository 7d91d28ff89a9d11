"""A previous owner as a mover sees it: what can be asked of its stream process, and everything it says checked.

Whatever P does wrong, by mistake or not, ends as a TransportError and a closed connection, never as a value. Each
length must be the one listed and not above the limit, each digest be of a shard asked for, each list end (its cursor
only grows). A value counts when P's VERDICT came after its last byte, and its checksum is right where
it has one. Its digest is the one asked for, not one that P names.
"""

from __future__ import annotations

import contextlib
import socket
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import Final

from . import messages as M
from .channel import Channel
from .constants import DEFAULT_NAMESPACE, VALUE_BYTES_MAX
from .errors import UsageError
from .hashing import shard_of
from .layout import EntryFlag
from .messages import Status, WorkerInfo
from .shards import bitmap_of, shards_in

#: Deadline of an exchange; one with values has a second more for each SLOWEST_BYTES.
EXCHANGE_S: Final = 3.0
SLOWEST_BYTES: Final = 4 << 20
#: Deadline of a FREEZE: writers wait for it.
FREEZE_TRY_S: Final = 1.0
#: Entries on a page of LISTED.
LIST_MOST: Final = 4096

_OK: Final = int(Status.OK)
_TORN: Final = int(Status.TORN)
#: Answers for a key that say nothing about it.
_NO_ANSWER: Final = frozenset((int(Status.UNAVAILABLE), int(Status.BUSY), int(Status.INTERNAL)))


class Previous:
    """One previous owner, by its stream process: a few connections, and what can be asked.

    Methods raise TransportError (Refused for an ERROR) for all that is P's fault. Thread-safe, a connection is not.
    """

    def __init__(self, info: WorkerInfo, token: str) -> None:
        self.info = info
        self.token = token
        self._idle: list[Channel] = []
        #: When it last brought us on.
        self.progress_at = time.monotonic()
        #: It had its time and was given up; progress resets that.
        self.given_up = False

    def __repr__(self) -> str:
        return f"<Previous {self.info.node}/{self.info.worker} at {self.info.host}:{self.info.port}>"

    def progress(self) -> None:
        """It has brought us on."""
        self.progress_at = time.monotonic()
        self.given_up = False

    @contextlib.contextmanager
    def channel(self) -> Iterator[Channel]:
        """A connection. It is kept for the next one unless something goes wrong."""
        try:
            channel = self._idle.pop()
        except IndexError:
            channel = self._connect(EXCHANGE_S)
        try:
            yield channel
        except BaseException:
            channel.close()
            raise
        self._idle.append(channel)

    def _connect(self, deadline_s: float) -> Channel:
        channel = Channel.tcp(self.info.host, self.info.port, deadline_s)
        try:
            with contextlib.suppress(OSError):
                channel.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
            hello = M.Hello(M.PROTOCOL_MIN, M.PROTOCOL_MAX, M.Role.MOVER, 0, 0, DEFAULT_NAMESPACE, self.token, [])
            if not isinstance(channel.call(hello), M.Welcome):
                channel.fail("the previous owner answered HELLO with something else")
        except BaseException:
            channel.close()
            raise
        return channel

    def drop_connections(self) -> None:
        """Those that wait may be broken as one was."""
        with contextlib.suppress(IndexError):  # other threads take from it meanwhile
            while True:
                self._idle.pop().close()

    def freeze(self, epoch: int, shards: Sequence[int]) -> list[int]:
        """Those of the shards that are frozen there and may have values."""
        with contextlib.closing(self._connect(FREEZE_TRY_S)) as channel:
            answer = channel.call(M.Freeze(epoch, bitmap_of(shards)))
            if not isinstance(answer, M.Frozen):
                channel.fail("the previous owner answered FREEZE with something else")
            try:
                frozen = shards_in(answer.shards)
            except UsageError as exc:
                channel.fail(str(exc))
            if not set(frozen) <= set(shards):
                channel.fail("the previous owner froze shards that nobody asked for")
            return frozen

    @staticmethod
    def list_page(channel: Channel, shards: bytes, cursor: int, asked: frozenset[int]) -> M.Listed:
        """A page of what it has, checked."""
        page = channel.call(M.List(shards, cursor, LIST_MOST))
        if not isinstance(page, M.Listed) or len(page.entries) > LIST_MOST:
            channel.fail("the previous owner answered LIST with something else")
        if page.cursor and page.cursor <= cursor:
            channel.fail(f"the previous owner lists slot {page.cursor} after slot {cursor}")
        known = {space.number for space in page.namespaces}
        for digest, length, _flags, namespace in page.entries:
            if shard_of(digest) not in asked or not 0 < length <= VALUE_BYTES_MAX or namespace not in known:
                channel.fail("the previous owner lists what nobody asked for, or what cannot be")
        return page

    @staticmethod
    def fetch(channel: Channel, wants: Sequence[tuple[bytes, memoryview]]) -> list[tuple[int, int, int]]:
        """Values straight into their chunks: (status, crc, flags) each. OK: whole, and of the chunk's length."""
        number = channel.submit(M.FetchPrevious([(digest, len(target)) for digest, target in wants]))
        channel.until += sum(len(target) for _, target in wants) / SLOWEST_BYTES
        fetched = channel.result(channel.wait(number))
        if not isinstance(fetched, M.Fetched) or len(fetched.entries) != len(wants):
            channel.fail("the previous owner answered FETCH_PREVIOUS with something else")
        for (status, _flags, length, _crc), (_, target) in zip(fetched.entries, wants):
            if status == _OK:
                if length != len(target):
                    channel.fail(f"the previous owner sends {length} bytes of a value that has {len(target)}")
                channel.receive_bulk(target)
        verdict = channel.result(channel.wait(number))
        if not isinstance(verdict, M.Verdict) or len(verdict.statuses) != len(wants):
            channel.fail("the previous owner sent no verdict")
        if any(status in _NO_ANSWER for status, *_ in fetched.entries):
            channel.fail("the previous owner's worker is out of reach")
        answers = []
        for (status, flags, _length, crc), judged, (_, target) in zip(fetched.entries, verdict.statuses, wants):
            whole = status or judged
            if whole == _OK and flags & EntryFlag.CRC and zlib.crc32(target) != crc:
                whole = _TORN
            answers.append((whole, crc, flags))
        return answers

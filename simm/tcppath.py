"""The client's TCP path: values straight from a socket into the caller's buffer, and back.

A small pool of connections to one stream process; each operation borrows one, so threads do not
wait for each other. Any failure in the middle of an exchange discards that connection.

A GET's bytes land in the caller's buffer before the server has said that they are whole: its
VERDICT comes after them. So a miss may leave part of a value in the buffer, as the shm path's
re-check may; the answer says that there is nothing to use.

The deadline is for an exchange as a whole, with the connection that it may have to make first and with what it
has to ask for twice. One exchange carries 64 MiB at most, so a larger batch is several.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from . import messages as M
from .channel import Channel, Refused
from .errors import TransportError
from .messages import Status
from .rpc import encode

POOL_MAX: Final = 8
#: How often a value that changed under way is asked for again.
ATTEMPTS: Final = 3
#: One FETCH or STORE carries at most so many bytes, so that a deadline means the same at every batch size.
EXCHANGE_BYTES: Final = 64 << 20
EXCHANGE_KEYS: Final = 1024
_IOV_MAX: Final = 512

_OK: Final = int(Status.OK)
_TORN: Final = int(Status.TORN)
_TOO_LARGE: Final = int(Status.TOO_LARGE)

#: (digest, most bytes, where they go once the length is known)
Want = tuple[bytes, int, Callable[[int], memoryview]]
#: What became of a key: (status, length, crc, flags).
Got = tuple[int, int, int, int]


class TcpPath:
    """One worker by TCP. Methods raise TransportError when the server is out of reach."""

    def __init__(self, host: str, port: int, namespace: str, deadline_s: float, token: str = "") -> None:
        self.host = host
        self.port = port
        self.namespace = namespace
        self.deadline_s = deadline_s
        self.token = token
        #: Of the connection made last.
        self.welcome: M.Welcome | None = None
        self._idle: list[Channel] = []
        self._closed = False
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<TcpPath {self.host}:{self.port} idle={len(self._idle)}>"

    # -- connections ------------------------------------------------------------------------------

    def connect(self) -> None:
        """Make sure that the server answers. Raises TransportError, Refused."""
        self._give(self._take(time.monotonic() + self.deadline_s))

    def greet(self) -> None:
        """Ask anew what the server offers: see ``welcome``. Raises TransportError, Refused."""
        self._give(self._make(time.monotonic() + self.deadline_s))

    def _take(self, until: float) -> Channel:
        with contextlib.suppress(IndexError):
            channel = self._idle.pop()
            channel.bound(until)
            return channel
        return self._make(until)

    def _make(self, until: float) -> Channel:
        left = until - time.monotonic()
        if left <= 0:
            raise TransportError("deadline passed before the connection was made")
        channel = Channel.tcp(self.host, self.port, left)
        channel.deadline_s = self.deadline_s
        channel.bound(until)
        try:
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                with contextlib.suppress(OSError):
                    channel.sock.setsockopt(socket.SOL_SOCKET, option, 4 << 20)
            hello = M.Hello(M.PROTOCOL_MIN, M.PROTOCOL_MAX, M.Role.CLIENT, 0, 0, self.namespace, self.token, [])
            welcome = channel.call(hello)
            if not isinstance(welcome, M.Welcome):
                channel.fail("the server answered HELLO with something else")
            self.welcome = welcome
        except TransportError:
            channel.close()
            raise
        return channel

    def _give(self, channel: Channel) -> None:
        with self._lock:
            if not channel.broken and not self._closed and len(self._idle) < POOL_MAX:
                self._idle.append(channel)
                return
        channel.close()

    def close(self) -> None:
        """Close idle connections; borrowed ones close when they come back."""
        self._closed = True
        self._drop_idle()

    def abandon(self) -> None:
        """After a fork, in the child: close the copies of the idle connections' sockets."""
        for channel in self._idle:
            with contextlib.suppress(OSError):
                channel.sock.close()

    def _drop_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for channel in idle:
            channel.close()

    def _exchange(self, body: Callable[[Channel], Any], until: float = 0.0) -> Any:
        """Run an exchange on a pooled connection, until ``until`` (monotonic seconds) or for ``deadline_s``.

        One that went stale while idle is replaced once, and its like with it: the server was restarted.
        """
        until = until or time.monotonic() + self.deadline_s
        for attempt in range(2):
            fresh = not self._idle
            channel = self._take(until)
            try:
                result = body(channel)
            except TransportError as exc:
                if channel.broken:
                    channel.close()
                else:
                    self._give(channel)
                if attempt == 0 and not fresh and "deadline" not in str(exc) and not isinstance(exc, Refused):
                    self._drop_idle()
                    continue
                raise
            except BaseException:
                channel.broken = channel.broken or "interrupted"  # in the middle: who knows what is still on its way
                channel.close()
                raise
            self._give(channel)
            return result
        raise AssertionError("unreachable")

    # -- operations -------------------------------------------------------------------------------

    def fetch(self, wants: Sequence[Want], *, previous: bool = False, until: float = 0.0) -> list[Got]:
        """Values into the caller's memory. A status above OK means that the key brought nothing.

        ``previous``: we were sent here as to a previous owner; values of frozen shards count. ``until``: when the
        first exchange must be over, monotonic seconds; 0: ``deadline_s`` from now.
        """
        kind = M.FetchPrevious if previous else M.Fetch
        results: list[Got] = [(int(Status.NOT_FOUND), 0, 0, 0)] * len(wants)
        for chunk in _chunks([(position, want[1]) for position, want in enumerate(wants)]):
            left = chunk
            until = until or time.monotonic() + self.deadline_s
            for _ in range(ATTEMPTS):
                part = [wants[position] for position in left]
                torn = []
                for position, got in zip(left, self._exchange(partial(self._fetch, kind=kind, wants=part), until)):
                    results[position] = got
                    if got[0] == _TORN:
                        torn.append(position)
                if not torn:
                    break
                left = torn
            until = 0.0
        return results

    def _fetch(self, channel: Channel, kind: Callable[[Any], Any], wants: Sequence[Want]) -> list[Got]:
        number = channel.submit(kind([(digest, most) for digest, most, _ in wants]))
        fetched = channel.result(channel.wait(number))
        if not isinstance(fetched, M.Fetched) or len(fetched.entries) != len(wants):
            channel.fail("the server answered FETCH with something else")
        for (status, _flags, length, _crc), (_, most, target) in zip(fetched.entries, wants):
            if status == _OK:
                if not 0 < length <= most:
                    channel.fail(f"the server sends {length} bytes, {most} were asked for at most")
                channel.receive_bulk(target(length))
        verdict = channel.result(channel.wait(number))
        if not isinstance(verdict, M.Verdict) or len(verdict.statuses) != len(wants):
            channel.fail("the server sent no verdict")
        return [
            (status or judged, length, crc, flags)
            for (status, flags, length, crc), judged in zip(fetched.entries, verdict.statuses)
        ]

    def store(self, entries: Sequence[tuple[bytes, memoryview, int, int]], until: float = 0.0) -> list[int]:
        """Values out of the caller's memory: (digest, bytes, crc, flags); a Status for each. ``until`` as in fetch."""
        results = [int(Status.UNAVAILABLE)] * len(entries)
        for chunk in _chunks([(position, len(entry[1])) for position, entry in enumerate(entries)]):
            part = [entries[position] for position in chunk]
            for position, status in zip(chunk, self._exchange(partial(self._store, entries=part), until)):
                results[position] = status
            until = 0.0
        return results

    def _store(self, channel: Channel, entries: Sequence[tuple[bytes, memoryview, int, int]]) -> list[int]:
        number = channel.next_id()
        head = encode(M.Store([(digest, len(view), crc, flags, 0) for digest, view, crc, flags in entries]), number)
        pieces: list[bytes | memoryview] = [head, *(view for _, view, _, _ in entries)]
        self._send(channel, pieces)
        answer = channel.result(channel.wait(number))
        if not isinstance(answer, M.Statuses) or len(answer.statuses) != len(entries):
            channel.fail("the server answered STORE with something else")
        statuses: list[int] = answer.statuses
        return statuses

    def _send(self, channel: Channel, pieces: list[bytes | memoryview]) -> None:
        sock = channel.sock
        channel.begin()
        at = 0
        while at < len(pieces):
            channel.arm("sending a value", sending=True)
            try:
                sent = sock.sendmsg(pieces[at : at + _IOV_MAX])
            except OSError as exc:
                channel.fail(f"connection lost while sending a value, or deadline passed: {exc.strerror or exc}")
            while at < len(pieces) and sent >= len(pieces[at]):
                sent -= len(pieces[at])
                at += 1
            if at < len(pieces) and sent:
                pieces[at] = memoryview(pieces[at])[sent:]

    def exists(self, digests: Sequence[bytes], until: float = 0.0) -> list[int]:
        """A Status for each. ``until`` as in fetch."""
        return self._statuses(M.Exists, digests, until)

    def exists_previous(self, digests: Sequence[bytes]) -> list[int]:
        """OK for those that a previous owner has, whatever else for the others."""
        found = self.meanings(digests, previous=True)
        return [status if status == _OK else int(Status.NOT_FOUND) for status, _ in found]

    def meanings(self, digests: Sequence[bytes], *, previous: bool = False) -> list[tuple[int, int]]:
        """(status, epoch with PREVIOUS) for each: they are asked for, and not one byte is taken."""
        wants: list[Want] = [(digest, 0, _no_room) for digest in digests]
        return [
            (_OK, 0) if status == _TOO_LARGE else (status, length | crc << 32)
            for status, length, crc, _flags in self.fetch(wants, previous=previous)
        ]

    def delete(self, digests: Sequence[bytes]) -> list[int]:
        """A Status for each."""
        return self._statuses(M.Delete, digests)

    def _statuses(
        self, kind: Callable[[list[bytes]], Any], digests: Sequence[bytes], until: float = 0.0
    ) -> list[int]:
        results: list[int] = []
        for start in range(0, len(digests), EXCHANGE_KEYS):
            part = list(digests[start : start + EXCHANGE_KEYS])
            answer = self._exchange(partial(_call, request=kind(part)), until)
            until = 0.0
            if not isinstance(answer, M.Statuses) or len(answer.statuses) != len(part):
                raise TransportError(f"the server answered with {type(answer).__name__}")
            results += answer.statuses
        return results


def _no_room(_length: int) -> memoryview:
    return memoryview(b"")


def _call(channel: Channel, request: Any) -> Any:
    return channel.call(request)


def _chunks(sizes: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Positions in runs of at most EXCHANGE_KEYS keys and about EXCHANGE_BYTES bytes."""
    chunks: list[list[int]] = []
    total = 0
    for position, size in sizes:
        if not chunks or len(chunks[-1]) >= EXCHANGE_KEYS or total + size > EXCHANGE_BYTES:
            chunks.append([])
            total = 0
        chunks[-1].append(position)
        total += size
    return chunks

"""The client's TCP path: values straight from a socket into the caller's buffer, and back.

Each operation borrows one of a small pool of connections to one stream process, so threads do not wait for each other.
The bytes of a GET reach the caller's buffer before the server's VERDICT confirms them, so a miss may leave part of a
value there. The deadline bounds an exchange as a whole, including a connection that it must make first and values that
it requests again. One exchange carries 64 MiB at most; a larger batch takes several.
"""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from ..errors import TransportError
from ..net.allowance import allowed
from ..net.channel import Channel, Refused, greet
from ..rpc import encode
from ..wire import messages as M
from ..wire.hello import client_hello
from ..wire.messages import Status
from .path import ClientContext, Path, PathState

POOL_MAX: Final = 8
#: How often a value is requested that changes while it is sent.
ATTEMPTS: Final = 3
#: Bytes that one FETCH or STORE carries at most, so that a deadline means the same at every batch size.
EXCHANGE_BYTES: Final = 64 << 20
EXCHANGE_KEYS: Final = 1024
_IOV_MAX: Final = 512

_CLOSED: Final = PathState.CLOSED

#: (digest, most bytes, function from the length to the memory for them)
Want = tuple[bytes, int, Callable[[int], memoryview]]
#: The result of a key: (status, length, crc, flags).
Got = tuple[int, int, int, int]


class TcpPath(Path):
    """One worker by TCP. Methods raise TransportError when the server is out of reach.

    It connects in its caller's thread, and its owner closes it after the first failure.

    Args:
        context: the client's.
        host: name or address of the worker's stream process.
        cluster: id in the map that led here; 0 for any.
        server: whom that map names here (``wire/auth.py``).
    """

    _idle: list[Channel]

    def __init__(self, context: ClientContext, host: str, port: int, *, cluster: int = 0, server: str = "") -> None:
        super().__init__(context)
        self.server = server
        self.host = host
        self.port = port
        self.deadline_s = context.options.deadline_s
        self.cluster = cluster
        #: No put sends a value again for want of room before this time, as one did so in vain; monotonic seconds.
        self.no_wait_until = 0.0
        #: From the most recent connection.
        self.welcome: M.Welcome | None = None

    def __repr__(self) -> str:
        return f"<TcpPath {self.host}:{self.port} idle={len(self._idle)}>"

    # -- connections ------------------------------------------------------------------------------

    def connect(self) -> None:
        """Check that the server answers. Raises TransportError, Refused."""
        self._give(self._take(time.monotonic() + self.deadline_s))
        with self._lock:
            self._set_up()

    def greet(self) -> None:
        """Update ``welcome`` by a new connection. Raises TransportError, Refused."""
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
        channel = Channel.tcp(self.host, self.port, left, tls=self._context.options.tls)
        channel.deadline_s = self.deadline_s
        channel.bound(until)
        try:
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                with contextlib.suppress(OSError):
                    channel.sock.setsockopt(socket.SOL_SOCKET, option, 4 << 20)
            options = self._context.options
            hello = client_hello(M.Role.CLIENT, namespace=options.namespace, cluster=self.cluster)
            self.welcome = greet(channel, M.Service.STREAM, hello, options.token, self.server, options.server_uids)
        except TransportError:
            channel.close()
            raise
        return channel

    def _give(self, channel: Channel) -> None:
        with self._lock:
            if not channel.broken and self.state is not _CLOSED and len(self._idle) < POOL_MAX:
                self._idle.append(channel)
                return
        channel.close()

    def _drop_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for channel in idle:
            channel.close()

    def _exchange(self, body: Callable[[Channel], Any], until: float = 0.0) -> Any:
        """Run an exchange on a pooled connection, until ``until`` (monotonic seconds) or for ``deadline_s``.

        An idle connection that the server has closed is replaced once, and all idle ones with it: the server has
        restarted.
        """
        until = min(until or math.inf, time.monotonic() + allowed(self.deadline_s))
        for attempt in range(2):
            new = not self._idle
            channel = self._take(until)
            try:
                result = body(channel)
            except TransportError as exc:
                if channel.broken:
                    channel.close()
                else:
                    self._give(channel)
                if attempt == 0 and not new and "deadline" not in str(exc) and not isinstance(exc, Refused):
                    self._drop_idle()
                    continue
                raise
            except BaseException:
                channel.broken = channel.broken or "interrupted"  # the rest of the exchange may still arrive
                channel.close()
                raise
            self._give(channel)
            return result
        raise AssertionError("unreachable")

    # -- operations -------------------------------------------------------------------------------

    def fetch(self, wants: Sequence[Want], *, previous: bool = False, until: float = 0.0) -> list[Got]:
        """Read values into the caller's memory; return the result of each key. A status above OK means no value.

        ``previous``: read as from a previous owner, so that values of frozen shards count. ``until``: when the first
        exchange must be over, monotonic seconds; 0 for ``deadline_s`` from now.
        """
        kind = M.FetchPrevious if previous else M.Fetch
        results: list[Got] = [(Status.NOT_FOUND, 0, 0, 0)] * len(wants)
        for chunk in _chunks([(position, want[1]) for position, want in enumerate(wants)]):
            left = chunk
            until = until or time.monotonic() + allowed(self.deadline_s)
            for _ in range(ATTEMPTS):
                part = [wants[position] for position in left]
                torn = []
                for position, got in zip(left, self._exchange(partial(self._fetch, kind=kind, wants=part), until)):
                    results[position] = got
                    if got[0] == Status.TORN:
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
            if status == Status.OK:
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
        """Store (digest, bytes, crc, flags) each; return a Status for each. ``until`` as in fetch."""
        results = [Status.UNAVAILABLE] * len(entries)
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
        """Return a Status for each: OK if the key is stored. ``until`` as in fetch."""
        return self._statuses(M.Exists, digests, until)

    def resolve_misses(self, digests: Sequence[bytes], *, previous: bool = False) -> list[tuple[int, int]]:
        """Return (status, epoch with PREVIOUS) for each. No value is sent."""
        wants: list[Want] = [(digest, 0, _no_room) for digest in digests]
        return [
            (Status.OK, 0) if status == Status.TOO_LARGE else (status, length | crc << 32)
            for status, length, crc, _flags in self.fetch(wants, previous=previous)
        ]

    def delete(self, digests: Sequence[bytes]) -> list[int]:
        """Drop keys; return a Status for each."""
        return self._statuses(M.Delete, digests)

    def delete_sized(self, entries: Sequence[tuple[bytes, int]]) -> list[int]:
        """Drop values of these sizes, (digest, size) each; return a Status for each."""
        return self._statuses(M.DeleteSized, entries)

    def _statuses(self, kind: Callable[[Any], Any], items: Sequence[Any], until: float = 0.0) -> list[int]:
        results: list[int] = []
        for start in range(0, len(items), EXCHANGE_KEYS):
            part = list(items[start : start + EXCHANGE_KEYS])
            answer = self._exchange(partial(Channel.call, msg=kind(part)), until)
            until = 0.0
            if not isinstance(answer, M.Statuses) or len(answer.statuses) != len(part):
                raise TransportError(f"the server answered with {type(answer).__name__}")
            results += answer.statuses
        return results


def _no_room(_length: int) -> memoryview:
    return memoryview(b"")


def _chunks(sizes: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Return positions in runs of at most EXCHANGE_KEYS keys and about EXCHANGE_BYTES bytes."""
    chunks: list[list[int]] = []
    total = 0
    for position, size in sizes:
        if not chunks or len(chunks[-1]) >= EXCHANGE_KEYS or total + size > EXCHANGE_BYTES:
            chunks.append([])
            total = 0
        chunks[-1].append(position)
        total += size
    return chunks

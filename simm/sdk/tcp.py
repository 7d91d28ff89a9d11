"""The client's TCP path: values straight from a socket into the caller's buffer, and back.

Each operation borrows one of a small pool of connections to one stream process, so threads do not wait for each other.
The bytes of a GET reach the caller's buffer before the server's VERDICT confirms them, so a miss may leave part of a
value there. The deadline bounds an exchange as a whole, including a connection that it must make first and values that
it requests again. One exchange carries 64 MiB at most; a larger batch takes several.

A large exchange is shared out among several connections, by bytes (``tcp_streams``), as a network may bound what one
connection gets. The caller's thread serves them all, and one deadline bounds them together. A call takes the further
connections as far as they are open and idle. A thread makes those that lack, for later calls. So no call waits for a
connection that it can do without.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final

from ..arena.layout import ENTRY_LARGE
from ..constants import VALUE_BYTES_MAX
from ..errors import DeadlineError, PeerError, TransportError
from ..host.buffers import RELEASE_BYTES, Ranges
from ..host.parts import views_of
from ..ipc.steps import Steps, side_by_side
from ..net.allowance import allowed
from ..net.channel import Channel, ChannelWait, Refused, greet
from ..rpc import encode
from ..wire import messages as M
from ..wire.group_messages import joined
from ..wire.hello import client_hello
from ..wire.messages import Status
from .batch import EXCHANGE_KEYS, by_bytes, chunks
from .path import ClientContext, Path, PathState

log = logging.getLogger("simm.client")

#: Idle connections that a path keeps. It makes no further one for a large batch while so many are open.
POOL_MAX: Final = 8
#: How often a value is requested that changes while it is sent. On a busy machine one that others overwrite may do so
#: in several transfers running. After so many, and at the deadline, it is a miss.
ATTEMPTS: Final = 8
#: Ranges that are each below RELEASE_BYTES are received together, up to about so many bytes.
TOGETHER_BYTES: Final = 256 << 10
_IOV_MAX: Final = 512
#: Before a value of this size a thread that reads from several servers looks which of them has sent more.
STEP_BYTES: Final = 64 << 10
#: So much of a value is received before that look. The sockets' buffers hold more, so no other server stops meanwhile.
PIECE_BYTES: Final = 1 << 20
#: Bytes for each connection at least that an exchange is shared out among.
STREAM_BYTES: Final = 2 << 20
#: Pause after a further connection could not be made, seconds.
FURTHER_AGAIN_S: Final = 5.0

_CLOSED: Final = PathState.CLOSED

#: (digest, most bytes, function from the length to the memory for them)
Want = tuple[bytes, int, Callable[[int], memoryview]]
#: A value to store: (digest, the pieces that make it up, crc, flags)
Entry = tuple[bytes, Sequence[memoryview], int, int]
#: The result of a key: (status, length, crc, flags).
Got = tuple[int, int, int, int]


class TcpPath(Path):
    """One worker by TCP. Operations are in steps, and raise TransportError when the server is out of reach.

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
        #: Connections that are open, lent or idle, without those taken out; how many large batches want; when to make
        #: more, monotonic seconds.
        self._open = 0
        self._wanted = 1
        self._further_at = 0.0
        #: Whether a call waits for a connection, as none was idle.
        self._lacks = False

    def __repr__(self) -> str:
        return f"<TcpPath {self.host}:{self.port} idle={len(self._idle)}>"

    # -- connections ------------------------------------------------------------------------------

    def connect(self) -> None:
        """Check that the server answers. Raises TransportError, Refused."""
        self.give(self.take(time.monotonic() + self.deadline_s))
        with self._lock:
            self._set_up()

    def greet(self) -> None:
        """Update ``welcome`` by a new connection. Raises TransportError, Refused."""
        self.give(self._make(time.monotonic() + self.deadline_s))

    def _one_idle(self, until: float) -> Steps[float]:
        """Wait for an idle connection, which a thread makes, however many are lent. Return as ``attempt_over``."""
        if not self._idle:
            self._lacks = True
            self.connect_soon()
            until = yield from self.attempt_over(until)
        return until

    def take(self, until: float) -> Channel:
        with contextlib.suppress(IndexError):
            channel = self._idle.pop()
            channel.bound(until)
            return channel
        return self._make(until)

    def _make(self, until: float) -> Channel:
        left = until - time.monotonic()
        if left <= 0:
            raise DeadlineError("deadline passed before the connection was made")
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
        with self._lock:
            self._open += 1
        return channel

    def give(self, channel: Channel) -> None:
        with self._lock:
            if not channel.broken and self.state is not _CLOSED and len(self._idle) < POOL_MAX:
                self._note_ready()
                self._idle.append(channel)
                return
        self._end(channel)

    def take_out(self, until: float) -> Steps[Channel]:
        """Take a connection that is used for one thing only until :meth:`put_back`. It may also just be dropped.

        One that the server has closed is replaced, and all idle ones with it.
        """
        until = yield from self._one_idle(until)
        channel = self.take(until)
        try:
            channel.poll_pushes()  # finds what the server has closed
        except BaseException as exc:
            self._end(channel)
            if not isinstance(exc, TransportError):
                raise
            self._drop_idle()
            until = yield from self._one_idle(until)
            channel = self.take(until)
        with self._lock:
            self._open -= 1
        return channel

    def put_back(self, channel: Channel) -> None:
        """Return a connection of :meth:`take_out`."""
        with self._lock:
            self._open += 1
        self.give(channel)

    def _end(self, connection: Channel, reason: str = "closed") -> None:
        connection.close()
        with self._lock:
            self._open -= 1

    def _drop_idle(self) -> None:
        with self._lock:
            self._leave_idle()
        self._end_left()

    @contextlib.contextmanager
    def _further(self, keys: int, size: int) -> Iterator[list[Channel]]:
        """Lend the idle connections that an exchange of ``size`` bytes is worth besides its own, and have more made."""
        wanted = min(self._context.options.tcp_streams, keys, size // STREAM_BYTES)
        lent: list[Channel] = []
        if wanted > 1:
            with contextlib.suppress(IndexError):  # take() holds no lock
                while len(lent) < wanted - 1 and len(self._idle) > 1:
                    lent.append(self._idle.pop())
            if len(lent) < wanted - 1:
                self._make_further(wanted)
        try:
            yield lent
        finally:
            while lent:
                self.give(lent.pop())

    def _make_further(self, wanted: int) -> None:
        """Make connections in a thread, until ``wanted`` are open."""
        self._wanted = max(self._wanted, min(wanted, POOL_MAX))
        if self._open < self._wanted and time.monotonic() >= self._further_at:
            self.connect_soon()

    def _needed(self) -> bool:
        return self._open < self._wanted or (self._lacks and not self._idle)

    def _no_thread(self, reason: str) -> None:
        log.debug("no further connection to %s:%d: %s", self.host, self.port, reason)
        self._further_at = time.monotonic() + FURTHER_AGAIN_S

    def _attempt(self) -> None:
        try:
            while self._needed() and self.state is not _CLOSED:
                self._lacks = False
                self.give(self._make(time.monotonic() + self.deadline_s))
        except PeerError as exc:  # those that there are suffice
            log.debug("no further connection to %s:%d: %s", self.host, self.port, exc)
            self._further_at = time.monotonic() + FURTHER_AGAIN_S
        finally:
            with self._lock:
                self.connecting, self._wanted = False, 1
                self._changed.notify_all()

    def _exchange(
        self, body: Callable[[Channel], Steps[Any]], until: float = 0.0, lent: list[Channel] | None = None, *,
        once: bool = False,
    ) -> Steps[Any]:  # fmt: skip
        """Run an exchange on a pooled connection, until ``until`` (monotonic seconds) or for ``deadline_s``.

        An idle connection that the server has closed is replaced once, and all idle ones with it: the server has
        restarted. ``lent``: connections to take one of, if there are any. ``once``: only if nothing was sent.
        """
        until = min(until or math.inf, time.monotonic() + allowed(self.deadline_s))
        for attempt in range(2):
            new = not self._idle and not lent
            if lent:
                channel = lent.pop()
                channel.bound(until)
            else:
                if lent is None:
                    until = yield from self._one_idle(until)
                channel = self.take(until)
            sent = False
            try:
                if once:
                    channel.poll_pushes()  # finds what the server has closed
                    sent = True
                result = yield from body(channel)
            except TransportError as exc:
                if channel.broken:
                    self._end(channel)
                else:
                    self.give(channel)
                if attempt == 0 and not (new or sent or isinstance(exc, Refused | DeadlineError)):
                    self._drop_idle()
                    while lent:
                        self._end(lent.pop())
                    continue
                raise
            except BaseException:
                channel.broken = channel.broken or "interrupted"  # the rest of the exchange may still arrive
                self._end(channel)
                raise
            self.give(channel)
            return result
        raise AssertionError("unreachable")

    def _shared_out(
        self, positions: Sequence[int], sizes: Sequence[int],
        body: Callable[[Channel, Sequence[int]], Steps[list[Any]]], until: float, *, once: bool = False,
    ) -> Steps[list[tuple[int, Any]]]:  # fmt: skip
        """Run an exchange for these positions of a batch, shared out among connections. Return each one's answer.

        ``body`` does the part for some positions on a channel. ``until``, for all together, and ``once`` as there.
        """

        def at(part: Sequence[int]) -> Callable[[Channel], Steps[list[Any]]]:
            return lambda channel: body(channel, part)

        until = yield from self._one_idle(min(until or math.inf, time.monotonic() + allowed(self.deadline_s)))
        with self._further(len(positions), sum([sizes[position] for position in positions])) as lent:
            parts = by_bytes(positions, sizes, 1 + len(lent))
            if len(parts) > 1:
                until = min(until, time.monotonic() + allowed(self.deadline_s))
                works = [self._exchange(at(part), until, lent, once=once) for part in parts]
                every = yield from side_by_side(works)
        if len(parts) == 1:
            every = [(yield from self._exchange(at(positions), until, once=once))]
        return [pair for part, answers in zip(parts, every) for pair in zip(part, answers)]

    # -- operations, in steps ----------------------------------------------------------------------

    def fetch(
        self, wants: Sequence[Want], *, previous: bool = False, until: float = 0.0, kind: int = 0
    ) -> Steps[list[Got]]:
        """Read values into the caller's memory; return the result of each key. A status above OK means no value.

        ``kind``: ENTRY_LARGE to read manifests. What is of the other kind is received, but goes nowhere.

        ``previous``: read as from a previous owner, so that values of frozen shards count. ``until``: when the first
        exchange must be over, monotonic seconds; 0 for ``deadline_s`` from now.
        """
        exchange = partial(self._fetch, message=M.FetchPrevious if previous else M.Fetch, kind=kind)
        sizes = [want[1] for want in wants]
        return self._fetch_all(exchange, wants, sizes, chunks(list(enumerate(sizes))), until)

    def fetch_ranges(
        self, wants: Sequence[tuple[bytes, Ranges]], *, previous: bool = False, until: float = 0.0
    ) -> Steps[list[Got]]:
        """Read ranges of values, none of them on a device; the rest as in fetch. OUT_OF_RANGE: a value is too short."""
        exchange = partial(self._fetch_ranges, previous=int(previous))
        sizes = [ranges.total for _, ranges in wants]
        parts = chunks(list(enumerate(sizes)), lambda at: len(wants[at][1].parts))
        return self._fetch_all(exchange, wants, sizes, parts, until)

    def _fetch_all(
        self, exchange: Callable[..., Steps[list[Got]]], wants: Sequence[Any], sizes: Sequence[int],
        parts: Sequence[list[int]], until: float,
    ) -> Steps[list[Got]]:  # fmt: skip
        """Run ``exchange(channel, wants=...)`` for each chunk, and again for values that changed meanwhile."""

        def body(channel: Channel, positions: Sequence[int]) -> Steps[list[Got]]:
            return exchange(channel, wants=[wants[position] for position in positions])

        results: list[Got] = [(Status.NOT_FOUND, 0, 0, 0)] * len(wants)
        for chunk in parts:
            left = chunk
            until = until or time.monotonic() + allowed(self.deadline_s)
            for _ in range(ATTEMPTS):
                torn = []
                answers = yield from self._shared_out(left, sizes, body, until)
                for position, got in answers:
                    results[position] = got
                    if got[0] == Status.TORN:
                        torn.append(position)
                if not torn:
                    break
                left = torn
            until = 0.0
        return results

    def _fetch_ranges(self, channel: Channel, previous: int, wants: Sequence[Any]) -> Steps[list[Got]]:
        return receive_ranges(channel, partial(M.FetchRanges, previous), wants)

    def _fetch(
        self, channel: Channel, message: Callable[[Any], Any], kind: int, wants: Sequence[Want]
    ) -> Steps[list[Got]]:
        number = channel.submit(message([(digest, most) for digest, most, _ in wants]))
        yield ChannelWait(channel, number)
        fetched = channel.result(channel.wait(number))
        if not isinstance(fetched, M.Fetched) or len(fetched.entries) != len(wants):
            channel.fail("the server answered FETCH with something else")
        for (status, flags, length, _crc), (_, most, target) in zip(fetched.entries, wants):
            if status == Status.OK:
                if not 0 < length <= most:
                    channel.fail(f"the server sends {length} bytes, {most} were asked for at most")
                if (flags ^ kind) & ENTRY_LARGE:
                    target = _nowhere
                yield from receive_large(channel, number, target(length))
        last = any(most for _, most, _ in wants)  # who asks for sizes has more to do
        return (yield from judged(channel, number, fetched.entries, last=last))

    def store(self, entries: Sequence[Entry], until: float = 0.0) -> Steps[list[int]]:
        """Store values; return a Status for each. ``until`` as in fetch. What may be stored is not sent again."""
        results = [Status.UNAVAILABLE] * len(entries)
        sizes = [sum(map(len, entry[1])) for entry in entries]
        one_order = _repeats(entries)

        def body(channel: Channel, positions: Sequence[int]) -> Steps[list[int]]:
            return self._store(channel, [entries[position] for position in positions])

        for chunk in chunks(list(enumerate(sizes))):
            if one_order:
                part = [entries[position] for position in chunk]
                statuses = yield from self._exchange(partial(self._store, entries=part), until, once=True)
                answers = list(zip(chunk, statuses))
            else:
                answers = yield from self._shared_out(chunk, sizes, body, until, once=True)
            for position, status in answers:
                results[position] = status
            until = 0.0
        return results

    def _store(self, channel: Channel, entries: Sequence[Entry]) -> Steps[list[int]]:
        number = channel.next_id()
        sizes = [(digest, sum(map(len, views)), crc, flags, 0) for digest, views, crc, flags in entries]
        pieces: list[bytes | memoryview] = [encode(M.Store(sizes), number)]
        for _, views, _, _ in entries:
            pieces += views
        yield from self._send(channel, number, pieces)
        yield ChannelWait(channel, number, last=True)
        answer = channel.result(channel.wait(number))
        if not isinstance(answer, M.Statuses) or len(answer.statuses) != len(entries):
            channel.fail("the server answered STORE with something else")
        statuses: list[int] = answer.statuses
        return statuses

    def _send(self, channel: Channel, number: int, pieces: list[bytes | memoryview]) -> Steps[None]:
        sock = channel.sock
        channel.begin()
        at = 0
        flags: int = socket.MSG_DONTWAIT
        while at < len(pieces):
            channel.arm("sending a value", sending=True)
            try:
                sent = sock.sendmsg(pieces[at : at + _IOV_MAX], (), flags)
            except OSError as exc:
                if flags and isinstance(exc, BlockingIOError):
                    room = yield ChannelWait(channel, number, sending=True)
                    flags = socket.MSG_DONTWAIT if room else 0
                    continue
                channel.lose(exc, "sending a value")
            while at < len(pieces) and sent >= len(pieces[at]):
                sent -= len(pieces[at])
                at += 1
            if at < len(pieces) and sent:
                pieces[at] = memoryview(pieces[at])[sent:]

    def exists(self, digests: Sequence[bytes], until: float = 0.0) -> Steps[list[int]]:
        """Return a Status for each: OK if the key is stored. ``until`` as in fetch."""
        return self.statuses(M.Exists, digests, until)

    def resolve_misses(self, digests: Sequence[bytes], previous: bool, room: int = 0) -> Steps[list[tuple[int, int]]]:
        """Return (status, epoch with PREVIOUS, or the entry's flags with OK) for each. With room it counts as a get."""
        answers = yield from self.fetch([(digest, room, _nowhere) for digest in digests], previous=previous)
        return [
            (Status.OK, flags) if status in (Status.OK, Status.TOO_LARGE) else (status, length | crc << 32)
            for status, length, crc, flags in answers
        ]

    def sizes(self, digests: Sequence[bytes], *, previous: bool = False, until: float = 0.0) -> Steps[list[int]]:
        """Return each value's size: 0 for a miss, -1 if it is not known. No value is sent. The rest as in fetch."""
        answers = yield from self.fetch([(digest, 0, _nowhere) for digest in digests], previous=previous, until=until)
        return [
            min(length, VALUE_BYTES_MAX) if status == Status.TOO_LARGE
            else -1 if status in (Status.PREVIOUS, Status.WRONG_OWNER) else 0
            for status, length, _crc, _flags in answers
        ]  # fmt: skip

    def group(self, requests: Iterable[Sequence[Sequence[bytes]]]) -> Steps[list[int]]:
        """Make groups, those of each request by one message; return a Status for each."""
        results: list[int] = []
        for groups in requests:
            results += yield from self.statuses(joined, groups)
        return results

    def statuses(
        self, kind: Callable[[Any], Any], items: Sequence[Any], until: float = 0.0, *, twice: set[int] | None = None
    ) -> Steps[list[int]]:
        """Send requests made by ``kind`` of some items each; return a Status for each item. ``until`` as in fetch.

        ``twice`` gets the positions of the items whose request was sent again after its connection broke. The server
        may have carried it out both times, and the Status is of the second.
        """
        results: list[int] = []
        for start in range(0, len(items), EXCHANGE_KEYS):
            part = list(items[start : start + EXCHANGE_KEYS])
            sent: list[Channel] = []
            body = self._call if twice is None else partial(self._call_noted, sent=sent)
            answer = yield from self._exchange(partial(body, msg=kind(part)), until)
            until = 0.0
            if not isinstance(answer, M.Statuses) or len(answer.statuses) != len(part):
                raise TransportError(f"the server answered with {type(answer).__name__}")
            results += answer.statuses
            if twice is not None and len(sent) > 1:
                twice.update(range(start, start + len(part)))
        return results

    def _call_noted(self, channel: Channel, msg: Any, sent: list[Channel]) -> Steps[Any]:
        """Do :meth:`_call`, and note the channel in ``sent`` before the request may go out.

        A server that restarted while the connection was idle has closed it, so nothing is sent there.
        """
        channel.poll_pushes()
        sent.append(channel)
        return (yield from self._call(channel, msg))

    def _call(self, channel: Channel, msg: Any) -> Steps[Any]:
        """Send a request and return the decoded reply."""
        number = channel.submit(msg)
        yield ChannelWait(channel, number, last=True)
        return channel.result(channel.wait(number))


def receive_ranges(
    channel: Channel, kind: Callable[[Any, Any], Any], wants: Sequence[tuple[Any, Ranges]]
) -> Steps[list[Got]]:
    """Ask for ranges of values by ``kind(keys, ranges)``, and receive them. No range is on a device.

    ``wants``: for each value, what the server knows it by, and its ranges. Raises TransportError.
    """
    names = [(name, len(ranges.parts)) for name, ranges in wants]
    number = channel.submit(kind(names, [part[:2] for _, ranges in wants for part in ranges.parts]))
    yield ChannelWait(channel, number)
    fetched = channel.result(channel.wait(number))
    if not isinstance(fetched, M.Fetched) or len(fetched.entries) != len(wants):
        channel.fail("the server answered a request for ranges with something else")
    views: list[memoryview] = []
    for (status, _flags, length, _crc), (_, ranges) in zip(fetched.entries, wants):
        if status == Status.OK:
            if not ranges.least <= length <= VALUE_BYTES_MAX:
                channel.fail(f"the server sends ranges up to byte {ranges.least} of a value of {length} bytes")
            views += views_of(ranges)
        elif status == Status.OUT_OF_RANGE and length >= ranges.least:
            channel.fail(f"the server finds no byte {ranges.least} in a value of {length} bytes")
    yield from _receive(channel, number, views)
    return (yield from judged(channel, number, fetched.entries))


def judged(channel: Channel, number: int, entries: Sequence[Any], *, last: bool = True) -> Steps[list[Got]]:
    """Wait for the verdict on values that have been received. ``last``: nothing else is left to be done."""
    yield ChannelWait(channel, number, last=last)
    verdict = channel.result(channel.wait(number))
    if not isinstance(verdict, M.Verdict) or len(verdict.statuses) != len(entries):
        channel.fail("the server sent no verdict")
    return [
        (status or judged, length, crc, flags)
        for (status, flags, length, crc), judged in zip(entries, verdict.statuses)
    ]


def _nowhere(length: int) -> memoryview:
    return memoryview(bytearray(length))


def _receive(channel: Channel, number: int, views: Sequence[memoryview]) -> Steps[None]:
    """Receive bytes into many pieces of memory. Small ones in a row are received together: a call costs more."""
    small: list[memoryview] = []
    size = 0
    for view in views:
        if len(view) < RELEASE_BYTES and size < TOGETHER_BYTES:
            small.append(view)
            size += len(view)
            continue
        _receive_small(channel, small, size)
        small, size = [], 0
        yield from receive_large(channel, number, view)
    _receive_small(channel, small, size)


def receive_large(channel: Channel, number: int, view: memoryview) -> Steps[None]:
    """Receive bytes into one piece of memory. The caller may turn to other servers before each PIECE_BYTES of it."""
    size = len(view)
    if size >= STEP_BYTES:
        for at in range(0, size, PIECE_BYTES):
            yield ChannelWait(channel, number)
            channel.receive_bulk(view[at : at + PIECE_BYTES])
    else:
        channel.receive_bulk(view)


def _receive_small(channel: Channel, views: Sequence[memoryview], size: int) -> None:
    if len(views) == 1:
        channel.receive_bulk(views[0])
    elif views:
        data = memoryview(bytearray(size))
        channel.receive_bulk(data)
        at = 0
        for view in views:
            view[:] = data[at : at + len(view)]
            at += len(view)


def _repeats(entries: Sequence[Entry]) -> bool:
    """Return True if a key comes twice. Its last value must stay, so all go by one connection."""
    return len({entry[0] for entry in entries}) < len(entries)

"""The two ends of a move, as a mover sees them, and the limits of its copying.

:class:`TargetWorker` is the mover's own worker: sessions with it, grants, and the orders that only a mover gives. Any
trouble with it raises WorkerLost, and the mover ends.

:class:`SourceWorker` is a previous owner, by its stream process. Whatever it does wrong ends as a TransportError and a
closed connection, never as a value. Each length must be the one listed. Each digest must be of a shard that was asked
for. Each list must end: its cursor only grows. A value counts if the source's VERDICT came after its last byte, and if
its checksum is right where it has one. Its digest is the one that the mover asked for, not one that the source names.

A damaged slot of a source costs its value alone. An entry with an impossible length is left out of its page. A value
for which the source is BUSY is asked for again, and then given up.

A :class:`TokenBucket` bounds how fast a mover copies, a :class:`ByteBudget` how much it holds at once. Several threads
share both.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..arena.hashing import check_namespace, shard_of
from ..arena.layout import ENTRY_CRC, HEADER_BYTES
from ..arena.marks.near import COMMIT_NEAR
from ..arena.reader import ArenaReader
from ..cluster.move_plan import ProgressTimeout
from ..config.parsers import TlsOptions
from ..constants import (
    BATCH_KEYS_MAX,
    DEFAULT_NAMESPACE,
    KEEP_HARD,
    KEEP_S_MAX,
    KEEP_SOFT,
    OTHERS_NAMESPACE,
    SHARD_COUNT,
    VALUE_BYTES_MAX,
)
from ..errors import SegmentError, SimmError, TransportError, UsageError
from ..ipc.grant_pool import GrantTuple, obtain_each, return_idle
from ..ipc.session import WorkerSession
from ..net.channel import Channel, Refused, greet
from ..wire import messages as M
from ..wire.group_messages import joined, requests_of
from ..wire.hello import client_hello
from ..wire.keep_messages import Keep, Marked, Marks
from ..wire.messages import Status, WorkerInfo
from ..wire.shard_set import bitmap_of, shards_in

DEADLINE_S: Final = 3.0
#: Namespaces whose sessions are kept.
SESSIONS_MAX: Final = 32

_Reply = TypeVar("_Reply")


class WorkerLost(SimmError):
    """The mover's own worker is out of reach: the mover must end."""


class SessionRefused(SimmError):
    """The worker refuses a session of a namespace: its name is wrong, or there is no room for another."""


@contextlib.contextmanager
def _lost_without_worker() -> Iterator[None]:
    try:
        yield
    except TransportError as exc:
        raise WorkerLost(str(exc)) from exc


class _Kept:
    """A session and how many threads use it."""

    __slots__ = ("session", "users")

    def __init__(self, session: WorkerSession) -> None:
        self.session = session
        self.users = 0


class TargetWorker:
    """The mover's own worker: a session for each namespace, and one for orders. Thread-safe."""

    def __init__(self, uds: str) -> None:
        self.uds = uds
        self._lock = threading.Lock()
        self._sessions: OrderedDict[str, _Kept] = OrderedDict()
        #: Held for an ADOPT, and for a COMMIT together with the look at the map that allows it.
        self.gate = threading.Lock()
        try:
            self._orders = self._open(DEFAULT_NAMESPACE)
        except SessionRefused as exc:
            raise WorkerLost(str(exc)) from exc
        self.reader: ArenaReader = self._orders.reader
        #: What all sessions together may be granted, bytes.
        self.grant_bytes_max = int(self._orders.welcome.grant_bytes_max)
        self._words = np.frombuffer(self.reader.words, np.uint64, SHARD_COUNT, HEADER_BYTES)

    def _open(self, namespace: str) -> WorkerSession:
        try:
            if namespace != OTHERS_NAMESPACE:
                check_namespace(namespace)  # here, as the worker closes a connection whose HELLO is too long
        except UsageError as exc:
            raise SessionRefused(str(exc)) from exc
        try:
            return WorkerSession(self.uds, namespace, DEADLINE_S, ring=False, role=M.Role.MOVER)
        except Refused as exc:
            raise SessionRefused(f"namespace {namespace!r}: {exc}") from exc
        except (TransportError, SegmentError) as exc:
            raise WorkerLost(str(exc)) from exc

    def words(self) -> NDArray[np.uint64]:
        """Return a copy of the shard words."""
        words: NDArray[np.uint64] = self._words.copy()
        return words

    # -- orders -----------------------------------------------------------------------------------

    @staticmethod
    def ask(session: WorkerSession, msg: object, answer: type[_Reply]) -> _Reply:
        """Make one exchange. Raises WorkerLost."""
        with _lost_without_worker():
            found = session.exchange(msg)
        if not isinstance(found, answer):
            raise WorkerLost(f"the worker answered {type(msg).__name__} with {type(found).__name__}")
        return found

    def adopt(self, epoch: int, shards: Iterable[int], fallback: Iterable[int]) -> int:
        """Take shards over, and return how many the worker owns now. The caller holds the gate."""
        return self.ask(self._orders, M.Adopt(epoch, bitmap_of(shards), bitmap_of(fallback)), M.Done).items

    def finish(self, epoch: int, shards: Iterable[int]) -> None:
        """Tell the worker that it has all values of these shards."""
        self.ask(self._orders, M.Finish(epoch, bitmap_of(shards)), M.Done)

    def keep(self, digests: Sequence[bytes], how: int, seconds: int) -> None:
        """Keep values that are here or come next, the hard kept ones as soft ones where the quotas have no room."""
        statuses = self.ask(self._orders, Keep(how, seconds, list(digests)), M.Statuses).statuses
        over = [digest for digest, status in zip(digests, statuses) if status == Status.OVER_QUOTA]
        if over:
            self.ask(self._orders, Keep(KEEP_SOFT, seconds, over), M.Statuses)

    def group(self, groups: Sequence[Sequence[bytes]]) -> None:
        """Make groups of values that have been copied. Those of which one has gone stay ordinary values."""
        for part in requests_of(groups):
            self.ask(self._orders, joined(part), M.Statuses)

    # -- sessions and chunks ------------------------------------------------------------------------

    @contextlib.contextmanager
    def session(self, namespace: str) -> Iterator[WorkerSession]:
        """Lend a session of the namespace, without grants once nobody uses it. Raises SessionRefused, WorkerLost.

        Recalls of grants are read in exchanges only. The worker ends a session that leaves too many of them unread.
        """
        with self._lock:
            kept = self._sessions.get(namespace)
            if kept is None:
                idle = [name for name, other in self._sessions.items() if not other.users]
                for name in idle[: max(0, len(self._sessions) + 1 - SESSIONS_MAX)]:
                    self._sessions.pop(name).session.close()
                kept = self._sessions[namespace] = _Kept(self._open(namespace))
            self._sessions.move_to_end(namespace)
            kept.users += 1
        try:
            yield kept.session
        finally:
            self._leave(kept)

    def grants(self, session: WorkerSession, lengths: Sequence[int]) -> list[GrantTuple | None]:
        """Return a grant for each value, None where there is no room."""
        with _lost_without_worker():
            return obtain_each(session, lengths)

    def return_idle(self) -> None:
        """Return the grants in all pools: other sizes may need their room. Raises WorkerLost."""
        with self._lock:
            names = list(self._sessions)
        for name in names:
            with self._lock:
                kept = self._sessions.get(name)
                if kept is None:
                    continue  # its session was closed for another one's, and returned them so
                kept.users += 1  # else it may be closed in the middle, which looks like a worker that is gone
            try:
                with _lost_without_worker():
                    return_idle(kept.session)
            finally:
                self._leave(kept)

    def _leave(self, kept: _Kept) -> None:
        """Give a session back. The last one to do so returns the grants in its pool. Raises WorkerLost."""
        while True:
            with self._lock:
                if kept.users > 1 or not any(kept.session.pool.stocks.values()):
                    kept.users -= 1
                    return
            try:  # without the lock, as others wait for that, and as a user, so nobody closes the session
                with _lost_without_worker():
                    return_idle(kept.session)
            except BaseException:
                with self._lock:
                    kept.users -= 1
                raise

    def close(self) -> None:
        """End all sessions, and return their grants."""
        for kept in self._sessions.values():
            kept.session.close()
        self._sessions.clear()
        self._orders.close()


#: Shortest wait, seconds: a fraction of a byte would otherwise be waited for again and again.
_NAP_S = 1e-3
#: Between two looks at the rate, seconds.
_RATE_S = 0.5


class TokenBucket:
    """At most ``rate`` bytes a second (0: no limit), of which a tenth of a second's worth may come at once.

    A caller may overdraw the bucket, and the next one waits for it. So a value larger than the bucket passes too.
    """

    def __init__(
        self, rate: int, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.set_rate(rate)
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._tokens = self.burst
        self._at = clock()

    def set_rate(self, rate: int) -> None:
        """Take another rate. A signal's handler may call it: it waits for no lock."""
        self.rate, self.burst = rate, rate / 10

    def take(self, count: int) -> None:
        """Wait until ``count`` bytes may pass. A negative count puts bytes back."""
        while rate := self.rate:
            with self._lock:
                now = self._clock()
                self._tokens = min(rate / 10, self._tokens + (now - self._at) * rate)
                self._at = now
                if self._tokens >= 0 or count <= 0:
                    self._tokens -= count
                    return
                wait = -self._tokens / rate
            self._sleep(min(max(wait, _NAP_S), _RATE_S))  # the rate may be another one by then


class ByteBudget:
    """At most ``most`` bytes of chunks are held at once. A caller that needs more holds them alone.

    Callers are served in the order in which they came. Smaller ones that pass a large one would leave no room for it as
    long as they come.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.used = 0
        self._changed = threading.Condition()
        #: Whoever waits, the next one first.
        self._line: deque[object] = deque()

    @property
    def waiting(self) -> int:
        """Return the number of callers that wait."""
        return len(self._line)

    @contextlib.contextmanager
    def reserve(self, count: int) -> Iterator[None]:
        """Wait for room, and keep it inside the block."""
        line, place = self._line, object()
        with self._changed:
            line.append(place)
            try:
                self._changed.wait_for(lambda: line[0] is place and (not self.used or self.used + count <= self.most))
                self.used += count
            finally:
                line.remove(place)  # also when the wait raises: it would hold up all others
                self._changed.notify_all()  # there may be room for the next one, too
        try:
            yield
        finally:
            with self._changed:
                self.used -= count
                self._changed.notify_all()


#: Deadline of an exchange; one with values has a second more for each SLOWEST_BYTES.
EXCHANGE_S: Final = 3.0
SLOWEST_BYTES: Final = 4 << 20
#: Deadline of a FREEZE: writers wait for it.
FREEZE_TRY_S: Final = 1.0
#: Entries on a page of LISTED.
LIST_MOST: Final = BATCH_KEYS_MAX

#: Answers for a key that say nothing about it, nor about any other.
_NO_ANSWER: Final = frozenset((Status.UNAVAILABLE, Status.INTERNAL))


class SourceWorker:
    """One previous owner, by its stream process: a few connections, and what can be asked.

    Methods raise TransportError (Refused for an ERROR) for every fault of it. Thread-safe, but a connection is not.
    """

    def __init__(
        self, info: WorkerInfo, token: str, cluster: int = 0, tls: TlsOptions | None = None,
        trusted: Container[int] = (),
    ) -> None:  # fmt: skip
        self.info = info
        self.token = token
        self.tls = tls
        self._trusted = trusted
        #: The cluster of the map that names the source. A source of another cluster refuses.
        self.cluster = cluster
        self._idle: list[Channel] = []
        self.timeout = ProgressTimeout()

    def __repr__(self) -> str:
        return f"<SourceWorker {self.info.node}/{self.info.worker} at {self.info.host}:{self.info.port}>"

    @contextlib.contextmanager
    def channel(self) -> Iterator[Channel]:
        """Lend a connection, and keep it for the next caller unless something goes wrong."""
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
        channel = Channel.tcp(self.info.host, self.info.port, deadline_s, tls=self.tls)
        try:
            with contextlib.suppress(OSError):
                channel.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
            hello = client_hello(M.Role.MOVER, namespace=DEFAULT_NAMESPACE, cluster=self.cluster)
            greet(channel, M.Service.STREAM, hello, self.token, self.info.server, self._trusted)
        except BaseException:
            channel.close()
            raise
        return channel

    def drop_connections(self) -> None:
        """Close the idle connections."""
        with contextlib.suppress(IndexError):  # other threads take from it meanwhile
            while True:
                self._idle.pop().close()

    def freeze(self, epoch: int, shards: Sequence[int]) -> list[int]:
        """Freeze shards; return those that may have values."""
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
        """Return one page of the source's list, checked, without entries that have an impossible length."""
        page = channel.call(M.List(shards, cursor, LIST_MOST))
        if not isinstance(page, M.Listed):
            channel.fail("the previous owner answered LIST with something else")
        if page.cursor and page.cursor <= cursor:
            channel.fail(f"the previous owner lists slot {page.cursor} after slot {cursor}")
        known = {space.number for space in page.namespaces}
        for digest, _length, _flags, namespace in page.entries:
            if shard_of(digest) not in asked or namespace not in known:
                channel.fail("the previous owner lists what nobody asked for, or what cannot be")
        return page._replace(entries=[entry for entry in page.entries if 0 < entry[1] <= VALUE_BYTES_MAX])

    @staticmethod
    def marks(channel: Channel, digests: Sequence[bytes]) -> list[tuple[int, int, int]]:
        """Return for each value how it is kept, 0 for not, for how many seconds yet, and the number of its group."""
        answer = channel.call(Marks(list(digests)))
        if not isinstance(answer, Marked) or len(answer.entries) != len(digests):
            channel.fail("the previous owner answered MARKS with something else")
        return [
            (how, seconds, group) if how in (KEEP_SOFT, KEEP_HARD) and 0 < seconds <= KEEP_S_MAX else (0, 0, group)
            for how, seconds, group in answer.entries
        ]

    @staticmethod
    def fetch(channel: Channel, wants: Sequence[tuple[bytes, memoryview]]) -> list[tuple[int, int, int]]:
        """Receive values in their chunks; return (status, crc, flags) each. OK: whole, and of the chunk's length.

        TORN, BUSY: it may be whole at another try.
        """
        number = channel.submit(M.FetchPrevious([(digest, len(target)) for digest, target in wants]))
        channel.until += sum(len(target) for _, target in wants) / SLOWEST_BYTES
        fetched = channel.result(channel.wait(number))
        if not isinstance(fetched, M.Fetched) or len(fetched.entries) != len(wants):
            channel.fail("the previous owner answered FETCH_PREVIOUS with something else")
        for (status, _flags, length, _crc), (_, target) in zip(fetched.entries, wants):
            if status == Status.OK:
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
            if whole == Status.OK and flags & ENTRY_CRC and zlib.crc32(target) != crc:
                whole = Status.TORN
            answers.append((whole, crc, flags & ~COMMIT_NEAR))  # that would not be kept as what moves is
        return answers

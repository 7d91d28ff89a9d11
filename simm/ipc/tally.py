"""Adds up what clients have counted (``ipc/counts.py`` has the words): a worker's side, and totals of any process."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from heapq import nsmallest
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from ..constants import GHOST_STEP, NAMESPACE_BYTES_MAX, OTHERS_NAMESPACE
from ..net.admission import LogLimit
from ..net.allowance import free_within
from ..wire.report_messages import CLIENTS_MAX
from ..wire.status import Status
from .counts import (
    BUCKETS,
    COUNTERS,
    DELETE,
    EXISTS_MANY,
    GET,
    GET_MANY,
    PUT,
    PUT_MANY,
    STRIDE,
    TIMED,
    USED,
    Word,
    bound_s,
    bucket_of,
    missed_keys,
    new_words,
    numbers_in,
)

if TYPE_CHECKING:  # clients have no use for it
    from ..arena.sessions import Session

log = logging.getLogger("simm.ipc.tally")

#: What a worker believes of one session: operations in a second; bytes, or ns of all threads together, in a second.
COUNTS_A_SECOND: Final = 100_000_000
AMOUNT_A_SECOND: Final = 10_000_000_000_000
#: Time that a session is given in addition, seconds.
_GRACE_S: Final = 1.0
#: Sessions that one look takes in.
LOOK_SESSIONS: Final = 32
#: Namespaces with counts, at most. Beyond, those go whose names the arena has no more, then all others' counts join
#: those of :data:`~simm.constants.OTHERS_NAMESPACE`.
NAMESPACES_MAX: Final = 512
#: Misses that a sample gives to evicted keys before they come, at most.
RESTS_MAX: Final = 100.0
#: Bytes and ns, not operations.
_AMOUNTS: Final = (Word.HIT_BYTES, Word.PUT_BYTES, *range(COUNTERS, USED, STRIDE))
_LIMITS: Final = np.full(USED, float(COUNTS_A_SECOND))
_LIMITS[list(_AMOUNTS)] = float(AMOUNT_A_SECOND)


def quantile_s(latencies: Sequence[int], share: float) -> float | None:
    """Return a quantile of the latencies of one operation, as the bound of its bucket; None without any. Seconds."""
    counts = latencies[1:]
    wanted = share * sum(counts)
    passed = 0
    for bucket, count in enumerate(counts):
        passed += count
        if count and passed >= wanted:
            return bound_s(min(bucket, BUCKETS - 2))
    return None


# -- totals ------------------------------------------------------------------------------------------


def _is_name(name: str) -> bool:
    """Return whether a namespace has counters of its own: no page shows two names alike, or one that acts on it."""
    return name.isprintable() and len(name.encode(errors="replace")) <= NAMESPACE_BYTES_MAX


class Totals:
    """Counters by namespace, and latencies by operation. They only grow.

    ``most``: namespaces with counters of their own. None for a sum of totals, each of which has its bound.
    """

    def __init__(self, most: int | None = NAMESPACES_MAX) -> None:
        self._most = most
        self.namespaces: dict[str, list[int]] = {}
        #: By operation: a sum in ns, then BUCKETS numbers.
        self.latencies: dict[str, list[int]] = {}

    def counters(self, namespace: str) -> list[int]:
        """Return the counters of a namespace, to be added to. A name that cannot be one goes with others."""
        found = self.namespaces.get(namespace)
        if found is None:
            full = self._most is not None and len(self.namespaces) >= self._most
            if namespace != OTHERS_NAMESPACE and (full or not _is_name(namespace)):
                return self.counters(OTHERS_NAMESPACE)
            found = self.namespaces[namespace] = [0] * COUNTERS
        return found

    def observe(self, operation: int, ns: int) -> None:
        """Count a call of an operation of TIMED that took so long."""
        latencies = self._latencies(TIMED[operation])
        latencies[0] += ns
        latencies[1 + bucket_of(ns)] += 1

    def _latencies(self, operation: str) -> list[int]:
        return self.latencies.setdefault(operation, [0] * (BUCKETS + 1))

    def add_words(self, namespace: str, words: NDArray[np.uint64]) -> None:
        """Add what a session has counted. O(words that are not 0)."""
        counters = self.counters(namespace)
        at = np.flatnonzero(words)
        for word, count in zip(at.tolist(), words[at].tolist()):
            if word < COUNTERS:
                counters[word] += count
                continue
            operation, place = divmod(word - COUNTERS, STRIDE)
            if place <= BUCKETS:
                self._latencies(TIMED[operation])[place] += count

    def move_away(self, tcp: Totals) -> None:
        """Count what clients have shown of servers elsewhere as the path tcp does, the last one that is tried."""
        for name, counts in self.namespaces.items():
            for word, away in ((Word.UNREACHABLE, Word.AWAY_UNREACHABLE), (Word.TIMEOUT, Word.AWAY_TIMEOUT)):
                if counts[away]:
                    tcp.counters(name)[word] += counts[away]
                    counts[away] = 0

    def forget_but(self, names: Collection[str]) -> None:
        """Forget namespaces that are not among these."""
        kept = {*names, OTHERS_NAMESPACE}
        self.namespaces = {name: counts for name, counts in self.namespaces.items() if name in kept}

    def as_json(self) -> dict[str, Any]:
        """Return what STATS shows, and :meth:`add` takes."""
        return {"namespaces": self.namespaces, "latencies": self.latencies}

    def add(self, other: Mapping[str, Any]) -> None:
        """Add the totals of another process, as its STATS show them."""
        for name, counts in other.get("namespaces", {}).items():
            mine = self.counters(name)
            for word, count in enumerate(counts[:COUNTERS]):
                mine[word] += count
        for operation, counts in other.get("latencies", {}).items():
            mine = self._latencies(operation)
            for place, count in enumerate(counts[: BUCKETS + 1]):
                mine[place] += count


class Served(Totals):
    """The totals of a server's process, which sees statuses. ``began``: when a request was taken, perf_counter ns.

    ``names``: returns the names that the arena has now. A client may name any, and as many as it likes; what the arena
    does not have goes first, so that it does not take the others' counters.
    """

    def __init__(self, names: Callable[[], Collection[str]] | None = None) -> None:
        super().__init__()
        self._names = names
        #: The trace of the request that is counted just now; empty for one in none.
        self.trace = b""

    def counters(self, namespace: str) -> list[int]:
        if len(self.namespaces) >= NAMESPACES_MAX and namespace not in self.namespaces and self._names is not None:
            self.forget_but(self._names())
        return super().counters(namespace)

    def fetched(
        self, namespace: str, statuses: Sequence[int], torn: int, size: int, began: int, previous: bool
    ) -> None:
        """Count a FETCH that is answered with ``size`` bytes; ``torn``: values that changed meanwhile.

        Keys for which the client has to ask elsewhere, or again, are not counted. Without ``statuses`` it was no get.
        """
        if not statuses:
            return
        counters = self.counters(namespace)
        counters[Word.MOVED_HITS if previous else Word.BATCH_HITS] += statuses.count(Status.OK) - torn
        counters[Word.MOVING if previous else Word.ABSENT] += statuses.count(Status.NOT_FOUND)
        counters[Word.HIT_BYTES] += size
        counters[Word.WRONG_SIZE] += statuses.count(Status.TOO_LARGE) + statuses.count(Status.OUT_OF_RANGE)
        counters[Word.UNREACHABLE] += statuses.count(Status.UNAVAILABLE) + statuses.count(Status.BUSY)
        self._timed(GET_MANY if len(statuses) > 1 else GET, began)

    def stored(self, namespace: str, statuses: Sequence[int], sizes: Sequence[int], began: int = 0) -> None:
        """Count puts of values of these sizes. Without ``began`` their time is not known."""
        counters = self.counters(namespace)
        stored = [size for status, size in zip(statuses, sizes) if status == Status.OK]
        counters[Word.BATCH_PUTS] += len(stored)
        counters[Word.PUT_BYTES] += sum(stored)
        counters[Word.PUT_FAILURES] += len(sizes) - len(stored)
        if began:
            self._timed(PUT_MANY if len(sizes) > 1 else PUT, began)

    def looked(self, namespace: str, statuses: Sequence[int], began: int) -> None:
        """Count an EXISTS."""
        counters = self.counters(namespace)
        counters[Word.FOUND] += statuses.count(Status.OK)
        counters[Word.NOT_FOUND] += statuses.count(Status.NOT_FOUND)
        self._timed(EXISTS_MANY, began)

    def deleted(self, namespace: str, statuses: Sequence[int], began: int) -> None:
        """Count a DELETE."""
        counters = self.counters(namespace)
        counters[Word.DELETES] += statuses.count(Status.OK)
        counters[Word.DELETES_ABSENT] += statuses.count(Status.NOT_FOUND)
        self._timed(DELETE, began)

    def _timed(self, operation: int, began: int) -> None:
        self.observe(operation, time.perf_counter_ns() - began)


class Continued:
    """The totals of a process and of those whose place it took, so that a restart takes nothing back."""

    def __init__(self) -> None:
        self._before = Totals()
        self._pid = 0
        self._newest: Mapping[str, Any] = {}

    def take(self, pid: int, totals: Mapping[str, Any]) -> None:
        """Take note of a process's totals."""
        if pid != self._pid:
            self._before.add(self._newest)
            self._pid = pid
        self._newest = totals

    def totals(self) -> Totals:
        """Return the sum."""
        together = Totals(None)
        together.add(self._before.as_json())
        together.add(self._newest)
        return together


# -- the worker's side -------------------------------------------------------------------------------


class WorkerView(Protocol):
    """A worker's settings, as far as they are shown."""

    segment: str
    poll_us: int


class Counted:
    """What a worker knows of one session's words."""

    __slots__ = (
        "at", "believed", "changed_at", "evicted_share", "missed", "namespace", "number", "raw", "rests", "seen",
        "words",
    )  # fmt: skip

    def __init__(self, number: int, namespace: str, words: memoryview, now: float) -> None:
        self.number = number
        self.namespace = namespace
        self.words = words
        self.raw = b""
        #: The words as they were believed last.
        self.seen: NDArray[np.uint64] = np.zeros(USED, np.uint64)
        #: When they were looked at, and when they had changed; by the loop's clock.
        self.at = self.changed_at = now
        self.believed = True
        #: Keys of its sample that have been looked at; the share of the last ones that had been evicted; and what is
        #: left of misses that are shared out by it, by word.
        self.missed = 0
        self.evicted_share = 0.0
        self.rests = {Word.ABSENT: 0.0, Word.NOT_FOUND: 0.0}


class Tally:
    """The counts of a worker's sessions, added up by namespace. ``names``: returns the names that the arena has now.

    ``evicted``: returns True for one of GHOST_STEP keys that the worker has lately evicted, by the upper half of its
    digest. Clients show a sample of the keys that they miss, and all misses are shared out as the last of the sample
    are.
    """

    def __init__(
        self, clock: Callable[[], float], names: Callable[[], Collection[str]],
        evicted: Callable[[int], bool] = lambda _key: False,
    ) -> None:  # fmt: skip
        self._clock = clock
        self._evicted = evicted
        self._names = names
        self.totals = Totals()
        #: By session id.
        self.sessions: dict[int, Counted] = {}
        #: Sessions that are not believed any more, so far.
        self.disbelieved = 0
        self._noise = LogLimit(log, clock)

    def now(self) -> float:
        """Return the time by its clock, seconds."""
        return self._clock()

    def open(self, number: int, namespace: str, words: memoryview) -> None:
        """Count for a session from now on."""
        self.sessions[number] = Counted(number, namespace, words, self._clock())

    def close(self, number: int) -> None:
        """Take in what a session has counted last, and let go of its memory."""
        counted = self.sessions.pop(number, None)
        if counted is not None:
            self._take(counted)

    def maintain(self) -> None:
        """Take in what the next sessions have counted. O(LOOK_SESSIONS)."""
        for number in list(islice(self.sessions, LOOK_SESSIONS)):  # each goes to the end: all have their turn
            counted = self.sessions[number] = self.sessions.pop(number)
            self._take(counted)
        if len(self.totals.namespaces) > NAMESPACES_MAX // 2:
            self.totals.forget_but(self._names())

    def _take(self, counted: Counted) -> None:
        now = self._clock()
        elapsed, counted.at = now - counted.at, now
        if not counted.believed:
            return
        raw = bytes(counted.words)
        if raw == counted.raw:
            return
        new = numbers_in(counted.words, raw)
        if new is not None and not self._plausible(counted.seen, new, elapsed):
            # A copy of many words promises nothing about each of them. Loads of single words do.
            new = numbers_in(counted.words)
            if new is not None and not self._plausible(counted.seen, new, elapsed):
                counted.believed = False
                self.disbelieved += 1
                self._noise(
                    logging.WARNING, "session %#x of namespace %r has counts that cannot be: no more of it is counted",
                    counted.number, counted.namespace, session=counted.number,
                )  # fmt: skip
                return
        if new is None:
            return  # its log turned all the time: the next look counts it, for as long as it takes
        self.totals.add_words(counted.namespace, self._by_reason(counted, new - counted.seen))
        counted.raw, counted.seen, counted.changed_at = raw, new, now

    def _by_reason(self, counted: Counted, more: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return new counts with the share of misses that goes to evicted keys. O(MISSED_KEYS)."""
        if not (more[Word.ABSENT] or more[Word.NOT_FOUND]):
            return more
        counted.missed, keys = missed_keys(counted.words, counted.missed)
        if keys:
            counted.evicted_share = GHOST_STEP * sum(map(self._evicted, keys)) / len(keys)
        for word, evicted in ((Word.ABSENT, Word.EVICTED), (Word.NOT_FOUND, Word.NOT_FOUND_EVICTED)):
            exact = int(more[word]) * counted.evicted_share + counted.rests[word]
            share = min(int(exact), int(more[word]))
            # A share may be above 1 by chance: what is too many now is given to later misses.
            counted.rests[word] = min(exact - share, RESTS_MAX)
            more[word] -= np.uint64(share)
            more[evicted] = share
        return more

    @staticmethod
    def _plausible(seen: NDArray[np.uint64], new: NDArray[np.uint64], elapsed: float) -> bool:
        """Return whether the words have only grown, and by no more than they can in so many seconds."""
        return not ((new < seen) | (new - seen > _LIMITS * (elapsed + _GRACE_S))).any()

    def stats(self) -> dict[str, Any]:
        """Return what STATS shows."""
        return {**self.totals.as_json(), "disbelieved": self.disbelieved}


#: Sessions in one answer; those that counted last come first. With the longest names, and all counts that there may
#: be, it fits a frame.
CLAIMS_MAX: Final = 300


def claims(
    sessions: Iterable[Session], names: Mapping[int, str], tally: Tally, settings: WorkerView, detail: int = 1
) -> dict[str, Any]:
    """Return what a worker knows of its sessions and of itself, for operators. O(sessions log sessions).

    ``detail`` 1: of all sessions, CLAIMS_MAX at most; 2: of clients, as many as a report to the manager has.
    A session without counts has none in memory: a stream or an endpoint, one of a dead predecessor, or an old client.
    """
    now = tally.now()
    every = list(sessions)
    clients = [session for session in every if not (session.relays or session.copies)]

    def quiet_s(session: Session) -> tuple[bool, float, int]:
        counted = tally.sessions.get(session.session)
        return counted is None, now - counted.changed_at if counted is not None else 0.0, session.session

    listed, most = (clients, CLIENTS_MAX) if detail == 2 else (every, CLAIMS_MAX)
    found = []
    for session in nsmallest(most, listed, key=quiet_s):
        counted = tally.sessions.get(session.session)
        row: dict[str, Any] = {
            "session": session.session, "pid": session.pid, "namespace": names.get(session.namespace, ""),
            "kind": "server" if session.relays else "mover" if session.copies else "client",
            "quarantined": session.closed, "grants": len(session.grants), "granted_bytes": session.granted_bytes,
            "pins": len(session.pins), "idle_s": None, "believed": counted is None or counted.believed,
        }  # fmt: skip
        if counted is not None:
            row["idle_s"] = round(now - counted.changed_at, 3)
            row["counts"] = counters_summary(counted.seen[:COUNTERS].tolist())
        found.append(row)
    return {
        "segment": settings.segment, "poll_us": settings.poll_us, "clients_in_all": len(clients),
        "clients": found, "clients_left_out": len(listed) - len(found),
    }  # fmt: skip


# -- the client's side -------------------------------------------------------------------------------


def _own(words: memoryview) -> NDArray[np.uint64]:
    """Return the numbers of this process, whose threads may count meanwhile."""
    while (found := numbers_in(words)) is None:
        pass
    return found


#: No thread has the lock of a client's counters for so long, seconds: the caller has interrupted the one who has it.
LOCK_S: Final = 1.0


class Tallies:
    """All words in which one client counts, by path. Any thread may call it."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        #: Guards what follows: sessions come in threads of their own.
        self._lock = threading.Lock()
        #: Of arenas: each with what tells whether it is still in use.
        self._arenas: list[tuple[Callable[[], object], memoryview]] = []
        self._ended = Totals()
        self.rdma, self.tcp = new_words(), new_words()

    def add(self, used: Callable[[], object], words: memoryview) -> None:
        """Add the words of a session by shared memory.

        ``used`` returns the reader that has them as its ``counts``, or copies of them since the session's end, and None
        when nobody counts in them any more.
        """
        with self._lock:
            self._release_ended_locked()
            self._arenas.append((used, words))

    def _release_ended_locked(self) -> None:
        """Add up the words that nobody uses any more, and let go of them; also of those that others have replaced."""
        kept = []
        for used, words in self._arenas:
            reader = used()
            if reader is None:
                self._ended.add_words("", _own(words))
            else:
                kept.append((used, getattr(reader, "counts", words)))
        self._arenas = kept

    def release_ended(self) -> None:
        """Let go of the memory of sessions that have ended. Call it now and then."""
        with self._lock:
            self._release_ended_locked()

    def totals(self) -> dict[str, Totals]:
        """Return what has been counted, by path.

        In a signal's handler that has interrupted one who counts, an arena that has just ended may count twice.
        """
        shm = Totals()
        free = free_within(self._lock, LOCK_S)
        with self._lock if free else contextlib.nullcontext():
            if free:
                self._release_ended_locked()
            shm.add(self._ended.as_json())
            for _, words in self._arenas:
                shm.add_words("", _own(words))
        shm.move_away(Totals())  # they are in the words of the path
        found = {"shm": shm, "rdma": Totals(), "tcp": Totals()}
        for path, words in (("rdma", self.rdma), ("tcp", self.tcp)):
            found[path].add_words("", _own(words))
        return found

    def unanswered(self, words: memoryview, unreachable: int, late: int) -> None:
        """Count keys of servers elsewhere that could not be asked, or had not answered in time, in a path's words.

        A server of this host is shown them too, if there is one.
        """
        if not (unreachable or late) or not free_within(self._lock, LOCK_S):
            return  # nothing to count, or in a signal's handler that has interrupted one who counts
        with self._lock:
            words[Word.UNREACHABLE] += unreachable
            words[Word.TIMEOUT] += late
            for used, shown in reversed(self._arenas):
                reader = used()
                if reader is not None:
                    shown = getattr(reader, "counts", shown)
                    shown[Word.AWAY_UNREACHABLE] += unreachable
                    shown[Word.AWAY_TIMEOUT] += late
                    break

    def outside_counters(self) -> tuple[int, int, int]:
        """Return hits of single gets, misses and single puts in arenas, which no other counter of the client has."""
        counts = self.totals()["shm"].counters("")
        return counts[Word.HITS], counts[Word.ABSENT], counts[Word.PUTS]

    def after_fork(self) -> None:
        """Begin anew in the child of a fork, which has not inherited the memory."""
        self._begin()


def summary(totals: Totals) -> dict[str, Any]:
    """Return totals for people and programs: keys, bytes, latencies in seconds."""
    counts = [sum(column) for column in zip(*totals.namespaces.values())] or [0] * COUNTERS
    found: dict[str, Any] = counters_summary(counts)
    found["seconds"] = {
        operation: {
            "calls_timed": sum(latencies[1:]),
            "p50": quantile_s(latencies, 0.5),
            "p99": quantile_s(latencies, 0.99),
        }
        for operation, latencies in totals.latencies.items()
    }
    return found


def counters_summary(counts: Sequence[int]) -> dict[str, Any]:
    """Return counters by what they mean."""
    hits = counts[Word.HITS] + counts[Word.BATCH_HITS] + counts[Word.MOVED_HITS] + counts[Word.VIEWS]
    return {
        "hits": hits,
        "misses": {reason: sum([counts[word] for word in words]) for reason, words in MISSES.items()},
        "bytes_read": counts[Word.HIT_BYTES],
        "puts": counts[Word.PUTS] + counts[Word.BATCH_PUTS],
        "put_failures": counts[Word.PUT_FAILURES],
        "bytes_put": counts[Word.PUT_BYTES],
        "exists_found": counts[Word.FOUND],
        "exists_absent": counts[Word.NOT_FOUND] + counts[Word.NOT_FOUND_EVICTED],
        "exists_evicted": counts[Word.NOT_FOUND_EVICTED],
        "deletes": counts[Word.DELETES],
        "deletes_absent": counts[Word.DELETES_ABSENT],
        "retries": counts[Word.RETRIES],
        "pinned": counts[Word.PINNED],
    }


#: Why a get has no value -> its words.
MISSES: Final = {
    "absent": (Word.ABSENT,), "moving": (Word.MOVING,), "wrong_size": (Word.WRONG_SIZE,), "unsound": (Word.UNSOUND,),
    "unreachable": (Word.UNREACHABLE, Word.AWAY_UNREACHABLE), "timeout": (Word.TIMEOUT, Word.AWAY_TIMEOUT),
    "evicted": (Word.EVICTED,),
}  # fmt: skip

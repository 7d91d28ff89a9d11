"""A mover's own worker: sessions with it, its chunks, and the orders that only a mover gives.

Every trouble with it is WorkerLost, and then the mover ends: its successor comes with the worker's.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from . import messages as M
from .channel import Refused
from .constants import DEFAULT_NAMESPACE, SHARD_COUNT
from .errors import SegmentError, SimmError, TransportError
from .layout import HEADER_BYTES
from .reader import ArenaReader
from .session import GrantTuple, WorkerSession
from .shards import bitmap_of

DEADLINE_S: Final = 3.0
#: Namespaces whose sessions are kept.
SESSIONS_MAX: Final = 32

_Reply = TypeVar("_Reply")


class WorkerLost(SimmError):
    """Our own worker is out of reach: this mover is of no use any more."""


class Unwelcome(SimmError):
    """Our worker wants no session of a namespace: its name is wrong, or there is no room for another."""


class _Kept:
    """A session and how many threads use it."""

    __slots__ = ("session", "users")

    def __init__(self, session: WorkerSession) -> None:
        self.session = session
        self.users = 0


class OwnWorker:
    """Our worker: a session for each namespace, and one for orders.

    Args:
        uds: its UNIX socket.

    Thread-safe.
    """

    def __init__(self, uds: str) -> None:
        self.uds = uds
        self._lock = threading.Lock()
        self._sessions: OrderedDict[str, _Kept] = OrderedDict()
        #: Held for an ADOPT, and for a COMMIT together with the look at the map that allows it.
        self.gate = threading.Lock()
        try:
            self._orders = self._open(DEFAULT_NAMESPACE)
        except Unwelcome as exc:
            raise WorkerLost(str(exc)) from exc
        self.reader: ArenaReader = self._orders.reader
        #: What all sessions together may be granted, bytes.
        self.grant_bytes_max = int(self._orders.welcome.grant_bytes_max)
        self._words = np.frombuffer(self.reader.words, np.uint64, SHARD_COUNT, HEADER_BYTES)

    def _open(self, namespace: str) -> WorkerSession:
        try:
            return WorkerSession(self.uds, namespace, DEADLINE_S, ring=False, role=M.Role.MOVER)
        except Refused as exc:
            raise Unwelcome(f"namespace {namespace!r}: {exc}") from exc
        except (TransportError, SegmentError) as exc:
            raise WorkerLost(str(exc)) from exc

    def words(self) -> NDArray[np.uint64]:
        """A copy of the shard words."""
        words: NDArray[np.uint64] = self._words.copy()
        return words

    # -- orders -----------------------------------------------------------------------------------

    @staticmethod
    def ask(session: WorkerSession, msg: object, answer: type[_Reply]) -> _Reply:
        """One exchange."""
        try:
            found = session.exchange(msg)
        except TransportError as exc:
            raise WorkerLost(str(exc)) from exc
        if not isinstance(found, answer):
            raise WorkerLost(f"the worker answered {type(msg).__name__} with {type(found).__name__}")
        return found

    def adopt(self, epoch: int, shards: Iterable[int], fallback: Iterable[int]) -> int:
        """Take shards over; how many are the worker's now. The caller holds the gate."""
        return self.ask(self._orders, M.Adopt(epoch, bitmap_of(shards), bitmap_of(fallback)), M.Done).items

    def finish(self, epoch: int, shards: Iterable[int]) -> None:
        """These are wholly here."""
        self.ask(self._orders, M.Finish(epoch, bitmap_of(shards)), M.Done)

    # -- sessions and chunks ------------------------------------------------------------------------

    @contextlib.contextmanager
    def session(self, namespace: str) -> Iterator[WorkerSession]:
        """A session of the namespace. Raises Unwelcome."""
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
            with self._lock:
                kept.users -= 1

    def grants(self, session: WorkerSession, lengths: Sequence[int]) -> list[GrantTuple | None]:
        """A chunk for each value, None where there is no room. Waits for nobody."""
        found = [session.take(length) for length in lengths]
        wants: dict[int, int] = {}
        for length, grant in zip(lengths, found):
            if grant is None:
                wants[length] = wants.get(length, 0) + 1
        if wants:
            try:
                session.ask(list(wants.items()))
            except TransportError as exc:
                raise WorkerLost(str(exc)) from exc
            found = [grant or session.take(length) for length, grant in zip(lengths, found)]
        return found

    def return_idle(self) -> None:
        """Hand back the chunks in all pools: other sizes may need their room."""
        with self._lock:
            sessions = [kept.session for kept in self._sessions.values()]
        for session in sessions:
            try:
                session.return_idle()
            except TransportError as exc:
                raise WorkerLost(str(exc)) from exc

    def close(self) -> None:
        """Hand everything back."""
        for kept in self._sessions.values():
            kept.session.close()
        self._sessions.clear()
        self._orders.close()

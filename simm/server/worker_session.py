"""A server process's session with its worker, and the arena that it reads.

Exchanges block the process's loop, for microseconds. A worker that does not answer costs ``WORKER_DEADLINE_S`` once.
Then the session counts as down, and a thread tries to make another: a stopped worker accepts connections and answers
none of them, and in the loop each try would cost all clients that long. Reads need no session and go on meanwhile. The
worker's successor has the same arena; where the arena is closed, the process ends with it.
"""

from __future__ import annotations

import enum
import logging
import random
import threading
import time
from typing import Any, Final

from ..arena.reader import ArenaReader, Lister
from ..constants import DEFAULT_NAMESPACE
from ..errors import SegmentError, TransportError
from ..ipc.session import WorkerSession
from ..net.channel import Refused
from ..wire import messages as M
from ..wire.messages import Status

log = logging.getLogger("simm.server.stream")

#: A worker that is silent for so long counts as stopped. With ten runnable processes for each core, one that lives may
#: be silent for a second. Shorter than the clients' default deadline, so that they get an answer.
WORKER_DEADLINE_S: Final = 2.0
RETRY_S: Final = (0.05, 1.0)
#: Keys of one LOCATE; its answer has 31 bytes for each.
LOCATE_KEYS: Final = 4096


class State(enum.Enum):
    """Where the keeper is with its session."""

    #: Without a session; it makes one when the backoff is over.
    DOWN = enum.auto()
    #: A thread makes a session.
    CONNECTING = enum.auto()
    #: The session answered last time.
    UP = enum.auto()


class WorkerSessionKeeper:
    """Keeps a session with the worker at ``uds``, and makes another one when it breaks. For one thread, the loop's.

    ``ring``: commit by a ring. The worker polls for it, and would take a core from a stream's transfers.
    """

    def __init__(self, uds: str, *, ring: bool = False) -> None:
        self.uds = uds
        self._ring = ring
        self.state = State.DOWN
        #: The session as it was last seen; it may have broken since. None unless the state is UP.
        self.session: WorkerSession | None = None
        #: The arena, from the first session on.
        self.reader: ArenaReader | None = None
        #: What the thread made, and the thread.
        self._made: WorkerSession | None = None
        self._maker: threading.Thread | None = None
        self._retry_at = 0.0
        self._retry_s = RETRY_S[0]
        self._lister: Lister | None = None
        self._down_since = time.monotonic()
        #: Ids of namespaces by name.
        self._numbers: dict[str, int] = {}

    @property
    def down_s(self) -> float:
        """Return for how long there has been no session, seconds; 0 while there is one."""
        return 0.0 if self.session is not None else time.monotonic() - self._down_since

    def worker(self) -> WorkerSession | None:
        """Return the session, or None while the worker is down. Only the very first session is waited for."""
        session = self.session
        if session is not None and not session.broken:
            return session
        if session is not None:
            session.close(clean=False)
            self.session = None
            self.state = State.DOWN
            self._down_since = time.monotonic()
        now = time.monotonic()
        if self.state is State.CONNECTING:
            if self._maker is not None and self._maker.is_alive():
                return None
            self._maker = None
            self.state = State.DOWN
            self._retry_at = now + self._retry_s * random.uniform(0.5, 1.0)
            self._retry_s = min(RETRY_S[1], self._retry_s * 2)
        elif now >= self._retry_at:
            if self.reader is None:
                self._make()
                self._retry_at = time.monotonic() + RETRY_S[1]
            else:
                self.state = State.CONNECTING
                self._maker = threading.Thread(target=self._make, name="simm-worker-session", daemon=True)
                self._maker.start()
                return None
        made, self._made = self._made, None
        if made is not None and made.broken:
            made.close(clean=False)
            return None
        if made is None:
            return None
        # Page faults in the middle of transfers halve their speed. They are taken ahead, with the GIL released.
        threading.Thread(target=_populate, args=(made.reader,), name="simm-populate", daemon=True).start()
        if self.reader is not None and self.reader.name != made.reader.name:
            self._numbers.clear()
        self.session, self.reader = made, made.reader
        self.state = State.UP
        self._lister = None  # it has the mapping of the session before
        self._retry_s = RETRY_S[0]
        self._retry_at = 0.0
        return made

    def _make(self) -> None:
        """Make a session and leave it in ``_made``; None there if it fails."""
        try:
            self._made = WorkerSession(
                self.uds, DEFAULT_NAMESPACE, WORKER_DEADLINE_S, role=M.Role.STREAM, ring=self._ring
            )  # fmt: skip
        except (TransportError, SegmentError) as exc:
            log.warning("worker at %s: %s", self.uds, exc)

    def arena(self) -> ArenaReader | None:
        """Return the arena, whether its worker answers or not; None before the first session."""
        if self.reader is None:
            self.worker()
        return self.reader

    def is_of(self, cluster: int) -> bool:
        """Return True if the arena may have entries of this cluster, and has none of another one."""
        reader = self.arena()
        return reader is None or reader.cluster in (0, cluster)

    def close(self) -> None:
        """End the session."""
        if self._maker is not None:
            self._maker.join(2 * WORKER_DEADLINE_S)
        for session in (self.session, self._made):
            if session is not None:
                session.close()

    def maintain(self) -> int:
        """Maintain the session; call it about ten times a second. Return the bytes of grants recalled since."""
        session = self.worker()
        try:
            return session.maintain() if session is not None else 0
        except TransportError:
            return 0

    # -- exchanges --------------------------------------------------------------------------------

    def exchange(self, msg: Any) -> Any:
        """Make one exchange. Raises Refused with the worker's status, or with UNAVAILABLE if it is down."""
        session = self.worker()
        if session is None:
            raise Refused(Status.UNAVAILABLE, "the worker is down")
        try:
            return session.exchange(msg)
        except Refused:
            raise
        except TransportError as exc:
            log.warning("%s: %s", type(msg).__name__, exc)
            raise Refused(Status.UNAVAILABLE, str(exc)) from exc

    def namespace(self, name: str) -> int:
        """Return the id of a namespace in the arena. Raises Refused; with NO_SPACE if there is no room for its name.

        One exchange for each name, and another one after the worker has freed its place: ids outlive workers, and none
        becomes another namespace's.
        """
        number = self._numbers.get(name)
        if number is None or self.reader is None or not self.reader.has_namespace(number):
            answer = self.exchange(M.Namespace(name))
            if not isinstance(answer, M.Done):
                raise Refused(Status.UNAVAILABLE, "the worker answered NAMESPACE with something else")
            number = self._numbers[name] = answer.items
        return number

    def options_of(self, name: str, *, bound: bool) -> int:
        """Return COMMIT's options for the values of a client that has named this namespace. Raises Refused.

        ``bound``: the client may use no other. The values of one that may go with those of the session where there is
        no room for another name, or the name is none.
        """
        if name == DEFAULT_NAMESPACE and not bound:
            return 0  # the session's own
        try:
            return (self.namespace(name) + 1) << M.NAMESPACE_SHIFT | (M.BOUND if bound else 0)
        except Refused as exc:
            if not bound and exc.status in (Status.NO_SPACE, Status.BAD_REQUEST):
                return 0
            raise

    def statuses(self, msg: M.Exists | M.Delete | M.DeleteSized) -> list[int]:
        """Return a status for each key of the message; UNAVAILABLE for all if the worker is down."""
        count = len(msg.entries if isinstance(msg, M.DeleteSized) else msg.digests)
        try:
            answer = self.exchange(msg)
        except Refused as exc:
            return [exc.status] * count
        if not isinstance(answer, M.Statuses) or len(answer.statuses) != count:
            log.error("the worker answered %s with %s", type(msg).__name__, type(answer).__name__)
            return [Status.UNAVAILABLE] * count
        return answer.statuses

    def resolve_misses(self, digests: list[bytes]) -> list[tuple[int, int]]:
        """Return (status, epoch with PREVIOUS) for each; UNAVAILABLE where the worker cannot be asked."""
        found: list[tuple[int, int]] = []
        for start in range(0, len(digests), LOCATE_KEYS):
            asked = digests[start : start + LOCATE_KEYS]
            status = Status.UNAVAILABLE
            try:
                answer = self.exchange(M.Locate(0, asked))
                if isinstance(answer, M.Located) and len(answer.entries) == len(asked):
                    found += [(entry[0], entry[4] if entry[0] == Status.PREVIOUS else 0) for entry in answer.entries]
                    continue
                log.error("the worker answered LOCATE with %s", type(answer).__name__)
            except Refused as exc:
                status = exc.status
            found += [(status, 0)] * len(asked)
        return found

    def lister(self) -> Lister:
        """Return a lister of the arena. Raises Refused if the worker is down, SegmentError if its arena is gone."""
        reader = self.arena()
        if reader is None:
            raise Refused(Status.UNAVAILABLE, "the worker is down")
        if self._lister is None or self._lister.reader is not reader:
            self._lister = Lister(reader)
        return self._lister


def _populate(reader: ArenaReader) -> None:
    while reader.populate_some():
        pass

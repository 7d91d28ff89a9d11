"""A stream's session with its worker, and the arena that it reads.

Exchanges block the stream's loop, for microseconds. A worker that does not answer costs ``WORKER_DEADLINE_S`` once;
then the session counts as down, and a thread tries to make another: a worker that is stopped accepts connections and
answers none of them, and in the loop each try would cost all clients that long. Reads need no session and go on
meanwhile: the worker's successor has the same arena, and where that is closed so are we.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from typing import Any, Final

from . import messages as M
from .channel import Refused
from .errors import SegmentError, TransportError
from .listing import Lister
from .messages import Status
from .reader import ArenaReader
from .session import WorkerSession

log = logging.getLogger("simm.stream")

WORKER_DEADLINE_S: Final = 0.5
RETRY_S: Final = (0.05, 1.0)
#: Keys of one LOCATE: its answer has 31 bytes for each.
LOCATE_KEYS: Final = 4096


class Upstream:
    """The session with the worker at ``uds``, if there is one now: ``session``. For one thread, the loop's.

    ``ring``: commit by a ring. A worker polls for that, and would take a core from a stream's transfers.
    """

    def __init__(self, uds: str, *, ring: bool = False) -> None:
        self.uds = uds
        self._ring = ring
        self.session: WorkerSession | None = None
        #: The arena, from the first session on.
        self.reader: ArenaReader | None = None
        self._made: WorkerSession | None = None
        self._maker: threading.Thread | None = None
        self._retry_at = 0.0
        self._retry_s = RETRY_S[0]
        self._lister: Lister | None = None

    def worker(self) -> WorkerSession | None:
        """The session with the worker, or None while it is down. Waits for the very first one only."""
        session = self.session
        if session is not None and not session.broken:
            return session
        if session is not None:
            session.close(clean=False)
            self.session = None
        now = time.monotonic()
        if self._maker is not None:
            if self._maker.is_alive():
                return None
            self._maker = None
            self._retry_at = now + self._retry_s * random.uniform(0.5, 1.0)
            self._retry_s = min(RETRY_S[1], self._retry_s * 2)
        elif self._made is None and now >= self._retry_at:
            if self.reader is None:
                self._make()
                self._retry_at = time.monotonic() + RETRY_S[1]
            else:
                self._maker = threading.Thread(target=self._make, name="simm-worker-session", daemon=True)
                self._maker.start()
                return None
        made, self._made = self._made, None
        if made is None or made.broken:
            return None
        # Page faults in the middle of transfers cost half their speed; they are taken ahead, with the GIL released.
        threading.Thread(target=_populate, args=(made.reader,), name="simm-populate", daemon=True).start()
        self.session, self.reader = made, made.reader
        self._retry_s = RETRY_S[0]
        self._retry_at = 0.0
        return made

    def _make(self) -> None:
        """Body of the thread: a session to be found in ``_made``, or not."""
        try:
            self._made = WorkerSession(self.uds, "default", WORKER_DEADLINE_S, role=M.Role.STREAM, ring=self._ring)
        except (TransportError, SegmentError) as exc:
            log.warning("worker at %s: %s", self.uds, exc)

    def arena(self) -> ArenaReader | None:
        """The arena to read, whether its worker answers or not; None before there was a first session."""
        if self.reader is None:
            self.worker()
        return self.reader

    def close(self) -> None:
        """End the session."""
        if self._maker is not None:
            self._maker.join(2 * WORKER_DEADLINE_S)
        for session in (self.session, self._made):
            if session is not None:
                session.close()

    def tend(self) -> None:
        """Look after the session: call it about ten times a second."""
        session = self.worker()
        if session is not None:
            with contextlib.suppress(TransportError):
                session.tend()

    # -- questions --------------------------------------------------------------------------------

    def exchange(self, msg: Any) -> Any:
        """One exchange. Raises Refused with the worker's status, or with UNAVAILABLE when it is down."""
        session = self.worker()
        if session is None:
            raise Refused(int(Status.UNAVAILABLE), "the worker is down")
        try:
            return session.exchange(msg)
        except Refused:
            raise
        except TransportError as exc:
            log.warning("%s: %s", type(msg).__name__, exc)
            raise Refused(int(Status.UNAVAILABLE), str(exc)) from exc

    def statuses(self, msg: M.Exists | M.Delete) -> list[int]:
        """The statuses of an EXISTS or DELETE; UNAVAILABLE for each where the worker cannot be asked."""
        try:
            answer = self.exchange(msg)
        except Refused as exc:
            return [exc.status] * len(msg.digests)
        if not isinstance(answer, M.Statuses) or len(answer.statuses) != len(msg.digests):
            log.error("the worker answered %s with %s", type(msg).__name__, type(answer).__name__)
            return [int(Status.UNAVAILABLE)] * len(msg.digests)
        return answer.statuses

    def meanings(self, digests: list[bytes]) -> list[tuple[int, int]]:
        """What misses mean: (status, epoch with PREVIOUS) for each; UNAVAILABLE where the worker cannot be asked."""
        found: list[tuple[int, int]] = []
        for start in range(0, len(digests), LOCATE_KEYS):
            asked = digests[start : start + LOCATE_KEYS]
            status = int(Status.UNAVAILABLE)
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
        """Lists the worker's arena. Raises Refused when the worker is down, SegmentError when its arena is gone."""
        reader = self.arena()
        if reader is None:
            raise Refused(int(Status.UNAVAILABLE), "the worker is down")
        if self._lister is None or self._lister.reader is not reader:
            self._lister = Lister(reader)
        return self._lister


def _populate(reader: ArenaReader) -> None:
    while reader.populate_some():
        pass

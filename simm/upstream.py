"""A stream's session with its worker: made when there is none, retried in the background.

Exchanges block the stream's loop, for microseconds. A worker that does not answer costs ``WORKER_DEADLINE_S`` once;
then the session counts as down and is retried while reads go on.
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
    """The session with the worker at ``uds``, if there is one now: ``session``."""

    def __init__(self, uds: str) -> None:
        self.uds = uds
        self.session: WorkerSession | None = None
        self._retry_at = 0.0
        self._retry_s = RETRY_S[0]
        self._lister: Lister | None = None

    def worker(self) -> WorkerSession | None:
        """The session with the worker, or None while it is down."""
        session = self.session
        if session is not None and not session.broken:
            return session
        if session is not None:
            self._bury(session)
        now = time.monotonic()
        if now < self._retry_at:
            return None
        try:
            # Without a ring: a worker that polls for us would take a core from the transfers it waits for.
            self.session = WorkerSession(self.uds, "default", WORKER_DEADLINE_S, role=M.Role.STREAM, ring=False)
        except (TransportError, SegmentError) as exc:
            self._retry_at = now + self._retry_s * random.uniform(0.5, 1.0)
            self._retry_s = min(RETRY_S[1], self._retry_s * 2)
            log.warning("worker at %s: %s", self.uds, exc)
            return None
        # Page faults in the middle of transfers cost half their speed; they are taken ahead, with the GIL released.
        threading.Thread(target=_populate, args=(self.session.reader,), name="simm-populate", daemon=True).start()
        self._retry_s = RETRY_S[0]
        return self.session

    def _bury(self, session: WorkerSession) -> None:
        session.close(clean=False)
        self.session = None
        self._lister = None

    def close(self) -> None:
        """End the session."""
        if self.session is not None:
            self.session.close()

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
        session = self.worker()
        if session is None:
            raise Refused(int(Status.UNAVAILABLE), "the worker is down")
        if self._lister is None or self._lister.reader is not session.reader:
            self._lister = Lister(session.reader)
        return self._lister


def _populate(reader: ArenaReader) -> None:
    while reader.populate_some():
        pass

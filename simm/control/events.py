"""What has happened in the cluster of late: each event a line in the log, and one on the manager's page."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from ..cluster.nodes import Action, MapChanged, NodeChanged, NodeState
from ..errors import printable

log = logging.getLogger("simm.manager")

#: The page has so many events, the newest.
EVENTS_MAX: Final = 100
#: Characters of one.
TEXT_MAX: Final = 300


class Event(NamedTuple):
    """An event: when, by the wall clock in seconds, whether somebody should look at it, and what it was."""

    time: float
    warning: bool
    text: str


class EventLog:
    """Logs events, and keeps the last ones. ``workers``: returns the number of workers in the map."""

    def __init__(self, workers: Callable[[], int], clock: Callable[[], float] = time.time) -> None:
        self._workers = workers
        self._clock = clock
        #: Changes of the cluster so far.
        self.count = 0
        self._events: deque[Event] = deque(maxlen=EVENTS_MAX)

    def note(self, action: Action) -> bool:
        """Log what changes the cluster's state. Return False for an action that does not."""
        if isinstance(action, NodeChanged):
            before = action.before.value if action.before is not None else "unknown"
            text = f"node {action.name}: {before} -> {action.after.value}: {action.why}"
            self.add(text, warning=action.after in (NodeState.SUSPECT, NodeState.DEAD))
        elif isinstance(action, MapChanged):
            self.add(f"epoch {action.epoch}: {self._workers()} workers")
        else:
            return False
        self.count += 1
        return True

    def add(self, text: str, *, warning: bool = False) -> None:
        """Log an event and keep it."""
        log.log(logging.WARNING if warning else logging.INFO, "%s", text)
        self._events.append(Event(round(self._clock(), 3), warning, printable(text, TEXT_MAX)))

    def newest(self) -> list[dict[str, Any]]:
        """Return the events that are kept, the newest first."""
        return [event._asdict() for event in reversed(self._events)]

"""The workers of this host that tell events: found, followed, and forgotten when their server has ended."""

from __future__ import annotations

import logging
from collections.abc import Container
from typing import Final

from ...errors import SimmError
from ...ipc.event_files import EventFile, told_by_servers
from .claims import Claims, Delta
from .tabled import Tabled

log = logging.getLogger("simm.index.publish")

#: Between two looks for servers that came or went, seconds.
LOOK_S: Final = 0.2


class Host:
    """See above.

    Args:
        server: only the data server of this name; "" for all.
        trusted: users besides this process's own and root whose servers are believed.
    """

    def __init__(self, server: str = "", trusted: Container[int] = ()) -> None:
        self._server = server
        self._trusted = trusted
        self._files: dict[int, EventFile] = {}
        self._next = 1
        self._names: dict[tuple[int, int], str] = {}
        self._refused: set[str] = set()
        self._looked = -LOOK_S
        #: The worker whose table was looked at last.
        self._paged = 0
        self.claims = Claims(self._name_of)
        #: Of rings that are gone.
        self._gaps = self._looks = 0

    @property
    def workers(self) -> list[str]:
        """The names of the arenas that are followed."""
        return [each.name for each in self._files.values()]

    @property
    def gaps(self) -> int:
        """Times that records were lost."""
        return self._gaps + sum(each.follower.gaps for each in self._files.values())

    @property
    def looks(self) -> int:
        """Times that a table was looked at."""
        return self._looks + sum(each.follower.looks for each in self._files.values())

    @property
    def settled(self) -> bool:
        """True if all that the workers have told is known."""
        return self._looked >= 0 and not any(each.follower.due for each in self._files.values())

    def poll(self, now: float) -> list[Delta]:
        """Return what has changed since the last call. ``now``: monotonic seconds.

        Of the workers whose tables are looked at, one is followed, by a page: each in its turn.
        """
        found: list[Delta] = []
        if now - self._looked >= LOOK_S:
            self._looked = now
            found += self._find()
        # One page a turn: others are answered between two of them.
        due = [number for number, file in self._files.items() if file.follower.due]
        self._paged = min((number for number in due if number > self._paged), default=min(due, default=0))
        for number, file in self._files.items():
            if number != self._paged and file.follower.due:
                continue
            step = file.step()
            if not step.empty:
                found += self.claims.take(number, step)
        return found

    def _find(self) -> list[Delta]:
        """Begin to follow new workers, and forget those whose server has ended."""
        found: list[Delta] = []
        there = set(told_by_servers(self._server))
        for number, file in list(self._files.items()):
            # A server that was restarted between two looks has the same arena, and another ring.
            if file.name not in there or file.table.closed or file.replaced:
                log.info("%s has ended", file.name)
                del self._files[number]
                self._gaps += file.follower.gaps
                self._looks += file.follower.looks
                found += self.claims.drop(number)
                self._names = {key: name for key, name in self._names.items() if key[0] != number}
        known = {file.name for file in self._files.values()}
        self._refused &= there
        for name in sorted(there - known):
            try:
                file = EventFile(name, self._trusted, Tabled)
            except (OSError, SimmError) as exc:
                if name not in self._refused:  # it may be starting
                    log.info("%s cannot be followed yet: %s", name, exc)
                self._refused.add(name)
                continue
            if not file.table.closed:
                self._files[self._next] = file
                self._next += 1
        return found

    def _name_of(self, owner: int, number: int) -> str:
        """Return a namespace's name. A number never gets another name, so one is looked up once."""
        name = self._names.get((owner, number))
        if name is None:
            name = self._names[owner, number] = self._files[owner].table.namespace_name(number) or f"#{number}"
        return name

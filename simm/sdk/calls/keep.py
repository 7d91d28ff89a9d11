"""Keeping values from eviction for some time (docs/keep.md)."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Final

from ...constants import KEEP_HARD, KEEP_S_MAX, KEEP_SOFT
from ...errors import UsageError
from ...wire.status import Status
from ..batch import awaitable

if TYPE_CHECKING:
    from ...arena.hashing import Hasher
    from ..large.values import Large
    from ..ops.replicas import Replicas
    from ..routing import Routes
    from ..writes import Puts

_CLASSES: Final = {"soft": KEEP_SOFT, "hard": KEEP_HARD}


def class_of(how: object) -> int:
    """Return the number of a class of keeping. Raises UsageError."""
    number = _CLASSES.get(how) if isinstance(how, str) else None
    if number is None:
        raise UsageError(f"a value is kept 'soft' or 'hard', not {how!r}")
    return number


def seconds_of(ttl: object) -> int:
    """Return a time as whole seconds, rounded up. Raises UsageError."""
    if isinstance(ttl, bool) or not isinstance(ttl, int | float) or not 0 < ttl <= KEEP_S_MAX:
        raise UsageError(f"a value is kept for more than 0 s and at most {KEEP_S_MAX} s (30 days), not {ttl!r}")
    return math.ceil(ttl)


def wish_of(ttl: object, keep: object) -> tuple[int, int]:
    """Return (class, seconds) of a put's arguments; a class that is not given is soft. Raises UsageError."""
    if ttl is None:
        raise UsageError(f"keep={keep!r} needs a ttl: for how many seconds")
    return class_of("soft" if keep is None else keep), seconds_of(ttl)


class KeepCalls:
    """A part of :class:`simm.client.Client`."""

    _hasher: Hasher
    _routes: Routes
    _puts: Puts
    _replicas: Replicas | None
    if TYPE_CHECKING:
        in_thread: Callable[..., Coroutine[Any, Any, Any]]

        @property
        def _large(self) -> Large:
            """What keeps values in parts."""

    def keep(self, keys: Sequence[str], ttl: float, how: str = "soft") -> list[bool]:
        """Keep values for ``ttl`` seconds from now on; return for each whether it is.

        ``"hard"``: it is not evicted before that (docs/keep.md). ``"soft"``: it is evicted last. False: it is not
        stored, its namespace keeps too much, or its server does not answer; of a value in parts nothing is kept then. A
        later call replaces time and class. Raises UsageError for a ``ttl`` that is not above 0, or longer than 30 days.
        """
        number, seconds = class_of(how), seconds_of(ttl)
        return [status == Status.OK for status in self.keep_digests(self._hasher.many(keys), number, seconds)]

    def unkeep(self, keys: Sequence[str]) -> list[bool]:
        """End the keeping of values, which may be evicted as any other then; return for each whether it is stored."""
        return [status == Status.OK for status in self.keep_digests(self._hasher.many(keys), KEEP_SOFT, 0)]

    def keep_digests(self, digests: Sequence[bytes], how: int, seconds: int) -> list[int]:
        """Do :meth:`keep` for digests, with a class and whole seconds, 0 to end it; return a Status for each."""
        with self._routes.patience():
            statuses = (self._replicas or self._puts).keep(digests, how, seconds)
            if Status.TOO_LARGE in statuses:
                self._large.keep(digests, statuses, how, seconds)
        return statuses

    def _keep_stored(self, digests: Sequence[bytes], statuses: list[int], wish: tuple[int, int]) -> list[int]:
        """Keep what a put has stored. Return the statuses, in which a value that is not kept has why."""
        stored = [position for position, status in enumerate(statuses) if status == Status.OK]
        kept = self.keep_digests([digests[position] for position in stored], *wish)
        for position, status in zip(stored, kept):
            statuses[position] = status
        if any(kept):
            self._puts.note_not_kept(next(filter(None, kept)))
        return statuses

    keep_async = awaitable(keep)
    unkeep_async = awaitable(unkeep)

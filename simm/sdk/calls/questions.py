"""Questions about values that read none of them, and what is done to all of them at once."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from ..batch import UNLOADABLE, awaitable

if TYPE_CHECKING:
    from ...arena.hashing import Hasher
    from ..large.values import Large
    from ..ops.epochs import ClientEpoch
    from ..ops.load_time import LoadTimes
    from ..ops.pinner import Pinner
    from ..ops.pins import Pins
    from ..ops.prefix import Prefix, Prefixes
    from ..routing import Routes


class QuestionCalls:
    """A part of :class:`simm.client.Client`."""

    namespace: str
    _hasher: Hasher
    _routes: Routes
    _epoch: ClientEpoch
    _load_times: LoadTimes
    _pinner: Pinner
    _prefixes: Prefixes
    _counters: dict[str, int]
    if TYPE_CHECKING:
        in_thread: Callable[..., Coroutine[Any, Any, Any]]

        @property
        def _large(self) -> Large:
            """What reads and puts values in parts."""

    def load_ms(self, keys: Sequence[str]) -> float:
        """Return how long getting these values with one call is expected to take, in milliseconds.

        Only those that are stored count; 0.0 if none is. The figures come from this client's own gets by the same path
        (``sdk/ops/load_time.py``). It costs one exchange with each worker on another host, as :meth:`exists_many` does.
        """
        return self.load_ms_digests(self._hasher.many(keys))

    def pin(self, keys: Sequence[str]) -> Pins:
        """Return the values of these keys, to read ranges of them as often as wanted, and to release (docs/pins.md).

        Each stays as it is now, whatever happens to its key; one that is not stored is a miss. Release them soon, as
        pinned values are not evicted. What is beyond this client's share of the memory stays until it is evicted.
        """
        if not isinstance(keys, str):  # which the hasher refuses
            keys = tuple(keys)
        digests = self._hasher.many(keys)
        with self._routes.patience():
            pins = self._pinner.pin(keys, digests)
            if pins.parted:
                parted = len(pins.parted)  # no call while counting
                self._counters["large"] += parted
                try:
                    from ..large.pinned import pin_parts  # few clients pin values in parts

                    pin_parts(self._large, self._pinner, pins, digests)
                except UNLOADABLE:
                    self._counters["outages"] += parted
                except BaseException:
                    pins.release()
                    raise
        pins.in_thread = self.in_thread
        return pins

    def prefix(self, keys: Sequence[str], *, group: int = 1, exact: bool = True) -> Prefix:
        """Return how many leading keys are stored now, where, and what loading them is expected to take: one exchange
        with each worker on another host. ``group``: keys of a page, of which all or none count. ``exact``: look for
        each key that is counted (docs/routing.md). Raises UsageError."""
        return self._prefixes.find(keys, group, exact)

    def load_ms_digests(self, digests: Sequence[bytes]) -> float:
        """Do :meth:`load_ms` for digests."""
        self._routes.check_open()
        if not self._counters["large"]:
            return self._load_times.ms(digests)
        with self._routes.patience():
            return self._load_times.ms(self._large.with_parts(digests))

    def advance(self, namespace: str | None = None, *, timeout_s: float = 60.0) -> int:
        """Make all that was stored in a namespace before unreadable on every host; return its new epoch. O(1) but for
        the first (docs/epochs.md). Raises TransportError if after ``timeout_s`` old values may still be readable."""
        self._routes.check_open()
        return self._epoch.advance(self.namespace if namespace is None else namespace, timeout_s)

    load_ms_async = awaitable(load_ms)
    pin_async = awaitable(pin)
    prefix_async = awaitable(prefix)
    advance_async = awaitable(advance)

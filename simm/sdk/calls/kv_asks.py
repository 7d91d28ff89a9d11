"""What ``simm.kv`` tells of values without reading them, and does to all of them at once."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ...errors import Code, SimmError, UsageError
from ..batch import awaitable
from .kv_part import StorePart

log = logging.getLogger("simm.kv")


class Asks(StorePart):
    """A part of :class:`simm.kv.Store`: answers instead of errors, as everywhere there."""

    def load_ms(self, keys: Sequence[str]) -> float:
        """Return how long getting these values with one call is expected to take, in milliseconds, as far as they are
        stored; 0.0 if none is, or if that cannot be found out. Of a closed store INVALID_ARGUMENT: no time is negative.
        """
        if self._client is None:
            self._refuse(len(keys), "the store is closed")
            return float(Code.INVALID_ARGUMENT)
        client, digests, _, _ = self._checked(keys)
        if client is None:  # no key is valid
            return 0.0
        try:
            expected_ms: float = client.load_ms_digests(digests)
            return expected_ms
        except UsageError as exc:  # another thread has just closed it
            self._refuse(len(digests), "%s", exc)
            return float(Code.INVALID_ARGUMENT)

    def prefix(self, keys: Sequence[str], group: int = 1) -> int:
        """Return how many leading keys are stored now, a multiple of ``group``; 0 if that cannot be found out."""
        client = self._client
        if client is None:
            self._refuse(len(keys), "the store is closed")
            return 0
        try:
            count: int = client.prefix(keys, group=group).keys
            return count
        except UsageError as exc:  # a bad key or group, or another thread has just closed it
            self._refuse(len(keys), "%s", exc)
            return 0

    def advance(self) -> int:
        """Make all that was put before unreadable, on every host: after a weight update, for example; return a code.

        0: nobody can read an old value any more. UNAVAILABLE: that is not certain, as a server does not answer.
        """
        client = self._client
        try:
            if client is None:
                raise UsageError("the store is closed")
            client.advance()
        except UsageError as exc:
            self._refuse(1, "advance: %s", exc)
            return int(Code.INVALID_ARGUMENT)
        except SimmError as exc:
            log.error("advance: %s", exc)
            return int(Code.UNAVAILABLE)
        return 0

    load_ms_async = awaitable(load_ms)
    prefix_async = awaitable(prefix)
    advance_async = awaitable(advance)

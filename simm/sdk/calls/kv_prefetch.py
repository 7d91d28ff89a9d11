"""Copies of other hosts' values on this one, as ``simm.kv`` offers them: a code for each key in place of errors."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import Code, UsageError
from ..batch import awaitable
from .kv_part import StorePart


class Prefetches(StorePart):
    """A part of :class:`simm.kv.Store`."""

    def mprefetch(self, keys: Sequence[str]) -> list[int]:
        """Have values of other hosts copied to this one in the background; return codes, at once.

        0: it will be tried, or the owner is here. UNAVAILABLE: it will not, as too many wait, or there is no server on
        this host. INVALID_ARGUMENT: a bad key, or ``SIMM_NEAR_COPIES`` is not set. See docs/prefetch.md.
        """
        results = [int(Code.INVALID_ARGUMENT)] * len(keys)
        try:
            client, digests, _, positions = self._checked(keys)
            if client is None:
                return results
            answers = client.prefetch_digests(digests)
        except UsageError as exc:  # no near copies, or another thread has just closed it
            self._refuse(len(keys), "%s", exc)
            return results
        for position, answer in zip(range(len(keys)) if positions is None else positions, answers):
            results[position] = 0 if answer >= 0 else int(Code.UNAVAILABLE)
        return results

    mprefetch_async = awaitable(mprefetch)

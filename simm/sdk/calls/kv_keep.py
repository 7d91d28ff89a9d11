"""Keeping values from eviction, as ``simm.kv`` offers it: a code for each key in place of errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ...constants import KEEP_SOFT
from ...errors import Code, UsageError
from ...wire.status import Status
from ..batch import awaitable
from .keep import class_of, seconds_of
from .kv_part import StorePart

#: By status; any other is UNAVAILABLE.
_CODES: Final = {
    Status.OK: 0, Status.NOT_FOUND: int(Code.KEY_NOT_FOUND), Status.OVER_QUOTA: int(Code.PUT_FAILED),
}  # fmt: skip


class Keeps(StorePart):
    """A part of :class:`simm.kv.Store`."""

    def mkeep(self, keys: Sequence[str], ttl_s: float, how: str = "soft") -> list[int]:
        """Keep values for so many seconds, ``"hard"`` (not evicted) or ``"soft"`` (evicted last); return codes.

        0: it is kept. KEY_NOT_FOUND: it is not stored. PUT_FAILED: the namespace keeps too much. See docs/keep.md.
        """
        try:
            number, seconds = class_of(how), seconds_of(ttl_s)
        except UsageError as exc:
            self._refuse(len(keys), "%s", exc)
            return [int(Code.INVALID_ARGUMENT)] * len(keys)
        return self._keep(keys, number, seconds)

    def munkeep(self, keys: Sequence[str]) -> list[int]:
        """End the keeping of values, which may be evicted as any other then; return codes.

        0: it is stored, and not kept. KEY_NOT_FOUND: it is not stored.
        """
        return self._keep(keys, KEEP_SOFT, 0)

    def _keep(self, keys: Sequence[str], how: int, seconds: int) -> list[int]:
        results = [int(Code.INVALID_ARGUMENT)] * len(keys)
        try:
            client, digests, _, positions = self._checked(keys)
            if client is None:
                return results
            statuses = client.keep_digests(digests, how, seconds)
        except UsageError as exc:  # another thread has just closed the client
            self._refuse(len(keys), "%s", exc)
            return results
        for position, status in zip(range(len(keys)) if positions is None else positions, statuses):
            results[position] = _CODES.get(status, int(Code.UNAVAILABLE))
        return results

    mkeep_async = awaitable(mkeep)
    munkeep_async = awaitable(munkeep)

"""Copies of other hosts' values on this one (docs/prefetch.md)."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import UsageError
from ..batch import WAITS, awaitable

if TYPE_CHECKING:
    from ...arena.hashing import Hasher
    from ..near.copies import Near


class PrefetchCalls:
    """A part of :class:`simm.client.Client`."""

    _hasher: Hasher
    _near: Near | None
    if TYPE_CHECKING:
        in_thread: Callable[..., Coroutine[Any, Any, Any]]

    def prefetch(self, keys: Sequence[str]) -> int:
        """Have values of other hosts copied to this one in the background; return how many keys wait for that now.

        Returns at once. Keys whose owner is on this host wait for nothing. A key that is not stored, or whose value has
        more than 64 MiB, comes to nothing. Raises UsageError for a client without ``near_copies``.
        """
        return self.prefetch_digests(self._hasher.many(keys)).count(WAITS)

    def prefetch_digests(self, digests: Sequence[bytes]) -> list[int]:
        """Do :meth:`prefetch`; return for each 1 if it waits, 0 if its owner is here, -1 if it will not be copied."""
        if self._near is None:
            raise UsageError(
                "prefetch needs a client with near_copies=True (SIMM_NEAR_COPIES=1), which promises that the value of "
                "a key never changes (docs/prefetch.md)"
            )
        return self._near.prefetch(digests)

    prefetch_async = awaitable(prefetch)

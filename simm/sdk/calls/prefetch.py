"""Copies of other hosts' values on this one (docs/prefetch.md)."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import UsageError
from ..batch import WAITS, NoValue, Result, awaitable, sink_of

if TYPE_CHECKING:
    from ...arena.hashing import Hasher
    from ..near.copies import Near
    from ..routing import Routes


class PrefetchCalls:
    """A part of :class:`simm.client.Client`."""

    _hasher: Hasher
    _near: Near | None
    _routes: Routes
    if TYPE_CHECKING:
        in_thread: Callable[..., Coroutine[Any, Any, Any]]

        def get_digest(self, digest: bytes, sink: Any) -> Result:
            """Copy one value out; return its length, or why there is none."""

        def get_into_many(self, keys: Sequence[str], buffers: Sequence[Any]) -> list[int | None]:
            """Copy values to the buffers' heads; return their lengths, None for a miss."""

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

    # -- of values that change ------------------------------------------------------------------------

    def get_digest_at_owner(self, digest: bytes, sink: Any) -> Result:
        """Do ``get_digest`` at the owner, into host memory: no near copy is read, and none is made.

        For a value that may change. With near copies a value in parts is no hit.
        """
        if self._near is None:
            return self.get_digest(digest, sink)
        return self._near.originals.read(self._routes.target(digest), digest, sink)  # type: ignore[return-value]

    def get_into_many_at_owner(self, keys: Sequence[str], buffers: Sequence[Any]) -> list[int | None]:
        """Do ``get_into_many`` at the owners: no near copy is read, and none is made. For values that may change.

        With near copies a value in parts is no hit. Raises UsageError as ``get_into_many`` does.
        """
        if self._near is None:
            return self.get_into_many(keys, buffers)
        if len(keys) != len(buffers):
            raise UsageError(f"{len(keys)} keys and {len(buffers)} buffers")
        sinks = [sink_of(buffer) for buffer in buffers]
        results = self._near.originals.read_many(self._hasher.many(keys), sinks)
        for key, sink, got in zip(keys, sinks, results):
            if got == NoValue.TOO_SMALL:
                raise UsageError(f"the value of {key!r} does not fit a buffer of {len(sink)} bytes")
        return [got if got > 0 else None for got in results]

    prefetch_async = awaitable(prefetch)

"""``async with``: a client or a store that ends with a block of asyncio's."""

from __future__ import annotations

from typing import TypeVar

_T = TypeVar("_T", bound="AsyncClosing")


class AsyncClosing:
    """A part of :class:`simm.client.Client` and :class:`simm.kv.Store`, whose ``close`` waits for calls in flight."""

    def close(self) -> None:
        """Close all. Twice is harmless."""
        raise NotImplementedError

    async def close_async(self) -> None:
        """:meth:`close`, awaitable: the event loop goes on. It is carried out to its end, also if it is cancelled."""
        import asyncio

        # In a thread of its own: a client's threads are among what it waits for, and the loop's own may all be busy.
        from concurrent.futures import ThreadPoolExecutor

        from ..ops.waiting import in_executor

        executor = ThreadPoolExecutor(1, thread_name_prefix="simm-close")
        try:
            await asyncio.shield(in_executor(executor, self.close, ()))
        finally:
            executor.shutdown(wait=False)

    async def __aenter__(self: _T) -> _T:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close_async()

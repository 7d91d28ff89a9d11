"""The asyncio forms of a client's calls: wait for a thread. Loaded by the first of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, TypeVar

_T = TypeVar("_T")


async def in_executor(executor: Executor, call: Callable[..., _T], arguments: tuple[Any, ...]) -> _T:
    """Run a call in a thread. A cancellation is delivered when it has ended and no longer uses its buffers."""
    job = executor.submit(call, *arguments)
    waiting = asyncio.wrap_future(job)
    try:
        return await asyncio.shield(waiting)
    except asyncio.CancelledError:
        if not job.cancel():
            await _ended(waiting)
        raise
    finally:
        del job, waiting  # they hold the call's exception, which holds this frame, and with it the client


async def _ended(waiting: asyncio.Future[Any]) -> None:
    """Wait for a thread's call to end, deferring further cancellations. Its result is not needed."""
    while not waiting.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait((waiting,))
    if not waiting.cancelled():
        waiting.exception()  # retrieved, or asyncio complains; not raised, or it would hold this frame

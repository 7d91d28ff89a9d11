"""The asyncio forms of a client's calls: wait for a thread. Loaded by the first of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from ...errors import UsageError
from ...host.threads import Pool

_T = TypeVar("_T")


async def in_own_thread(call: Callable[..., Any], *arguments: Any) -> None:
    """Run what closes something in a thread of its own, to its end also if this is cancelled.

    A client's threads are among what its end waits for, the loop's own may all be busy, or gone at the interpreter's
    exit.
    """
    pool = Pool(1, "simm-close")
    try:
        await asyncio.shield(answer_of(pool, call, arguments))
    finally:
        pool.shutdown(wait=False)


def answer_of(pool: Pool, call: Callable[..., _T], arguments: tuple[Any, ...]) -> Coroutine[Any, Any, _T]:
    """Give a call to a thread at once. Return what does :func:`result_of` for it.

    In a process that can start no thread, the caller's thread runs the call: late is better than an error.
    """
    job = pool.hand_over(call, *arguments)
    return result_of(job) if job is not None else _run_here(call, arguments)


async def _run_here(call: Callable[..., _T], arguments: tuple[Any, ...]) -> _T:
    return call(*arguments)


async def result_of(job: Future[_T]) -> _T:
    """Return a thread's answer. A cancellation is delivered when its call has ended and no longer uses its buffers.

    Raises UsageError for a call that never began, as the client was closed.
    """
    waiting = asyncio.wrap_future(job)
    try:
        # Not the future itself: who awaits one that close() cancels looks cancelled, and cannot tell the two apart.
        await asyncio.wait((waiting,))
        if waiting.cancelled():
            raise UsageError("this client is closed")
        return waiting.result()
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

"""The asyncio forms of a client's calls: wait for a thread. Loaded by the first of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

from ...errors import UsageError

_T = TypeVar("_T")


#: A call, its arguments and its answer, until somebody has taken them.
_Todo = list[tuple[Callable[..., _T], tuple[Any, ...], "Future[_T]"]]


async def in_executor(executor: Executor, call: Callable[..., _T], arguments: tuple[Any, ...]) -> _T:
    """Run a call in a thread, and do :func:`result_of`."""
    return await answer_of(executor, call, arguments)


def answer_of(executor: Executor, call: Callable[..., _T], arguments: tuple[Any, ...]) -> Coroutine[Any, Any, _T]:
    """Give a call to a thread at once. Return what does :func:`result_of` for it.

    In a process that can start no thread, the caller's thread runs the call: late is better than an error. By then the
    executor has queued the job, and a thread of it may take it at any time. It is run once.
    """
    answer: Future[_T] = Future()
    todo: _Todo[_T] = [(call, arguments, answer)]
    try:
        return result_of(executor.submit(_run, todo))  # type: ignore[arg-type]
    except RuntimeError:
        return _run_here(todo, answer)


def _run(todo: _Todo[_T], raises: bool = True) -> _T | None:
    """Run a call that nobody has taken yet. Its answer gets the result too, for those who cannot have the job's."""
    try:
        call, arguments, answer = todo.pop()
    except IndexError:
        return None
    if not answer.set_running_or_notify_cancel():
        return None
    try:
        result = call(*arguments)
    except BaseException as exc:
        answer.set_exception(exc)
        if raises:
            raise
        return None
    else:
        answer.set_result(result)
        return result
    finally:
        del answer, call, arguments  # the answer holds the call's exception, which holds this frame


async def _run_here(todo: _Todo[_T], answer: Future[_T]) -> _T:
    _run(todo, raises=False)  # the job that the executor keeps has nothing left to hold
    waiting = result_of(answer)
    del answer
    return await waiting


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

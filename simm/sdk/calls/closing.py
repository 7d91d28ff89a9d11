"""The end of a client or a store: ``close``, also in a signal's handler, and ``async with``.

A handler runs in the middle of whatever its thread does. A ``close`` there may need a lock that the interrupted call
holds, and gives back only once the handler has returned. So :func:`carry_out` looks at the stack. If a call of SiMM is
under way below, the end is carried out in a thread, and the handler waits for ``ASIDE_S`` at most. Where no thread can
be started in that time, the end is left to the next ``close``. Operations are refused until then.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, TypeVar

from ..batch import UNLOADABLE

if TYPE_CHECKING:
    from ...host.buffers import Copier
    from ...host.threads import Pool
    from ..near.copies import Near
    from ..ops.pinner import Pinner
    from ..routing import Routes

_T = TypeVar("_T", bound="AsyncClosing")

log = logging.getLogger("simm.client")

#: How long a ``close`` within another call waits for its thread, seconds, and how often it tries to start one.
ASIDE_S: Final = 1.0
_AGAIN_S: Final = 0.05
#: Whose functions may hold a lock that a client's end needs: these modules', and of those below these packages'.
_MODULES: Final = frozenset(("simm.client", "simm.verbs"))
_PACKAGES: Final = frozenset(
    ("arena", "cluster", "config", "gpu", "host", "ipc", "net", "rdma", "sdk", "testing", "tracing", "wire")
)
#: Functions that call ``close``, and hold nothing while they do.
_CLOSERS: Final = frozenset(
    [("simm.client", "__exit__"), ("simm.testing", "local_cluster")]
    + [(__name__, name) for name in ("__aexit__", "_end_aside", "carry_out", "close", "close_async")]
    + [("simm.host.threads", name) for name in ("_run", "_work")]
    + [("simm.sdk.ops.waiting", name) for name in ("_run_here", "answer_of", "in_own_thread")]
)


def _within_a_call(also: tuple[str, ...]) -> bool:
    """Return whether a call of SiMM is under way in this thread, besides those that close. O(depth of the stack).

    ``also``: see :func:`carry_out`.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith("simm."):
            name = frame.f_code.co_name
            ours = module in _MODULES or module.split(".", 2)[1] in _PACKAGES
            if (ours and (module, name) not in _CLOSERS) or f"{module}.{name}" in also:
                return True
        frame = frame.f_back
    return False


def carry_out(
    end: Callable[[], None], also: tuple[str, ...] = (), *, begins: Callable[[threading.Thread], None] = lambda _: None,
    put_off: Callable[[], None] = lambda: None,
) -> bool:  # fmt: skip
    """Do what ends a client or a store; return True. Within another call of this thread a thread does it: False.

    This waits for that thread for ``ASIDE_S`` at most, and passes it to ``begins`` before. Without a thread to spare
    it calls ``put_off`` after that time, and nothing does it. ``also``: functions that may hold a lock too, each as
    ``module.function``. Raises what ``end`` raises, unless a thread has done it.
    """
    if not _within_a_call(also):
        end()
        return True
    until = time.monotonic() + ASIDE_S
    thread = threading.Thread(target=_end_aside, args=(end,), name="simm-close-aside", daemon=True)
    begins(thread)
    while not _started(thread):
        if time.monotonic() >= until:
            put_off()
            log.warning("close() in a signal's handler: no thread can be started for it, and the next close() ends it")
            return False
        time.sleep(_AGAIN_S)
    thread.join(max(0.0, until - time.monotonic()))
    return False


def _started(thread: threading.Thread) -> bool:
    """Start a thread; return False if there is none to spare."""
    try:
        thread.start()
    except (RuntimeError, MemoryError):
        if thread.ident is not None:  # it runs: another handler has raised this
            raise
        return False
    return True


def _end_aside(end: Callable[[], None]) -> None:
    try:
        end()
    except Exception:
        log.exception("closing")


class AsyncClosing:
    """A part of :class:`simm.client.Client` and :class:`simm.kv.Store`, whose ``close`` waits for calls in flight."""

    def close(self) -> None:
        """Close all. Twice is harmless."""
        raise NotImplementedError

    async def close_async(self) -> None:
        """:meth:`close`, awaitable: the event loop goes on. It is carried out to its end, also if it is cancelled."""
        try:
            import queue  # noqa: F401 -- a pool needs it

            from ..ops.waiting import in_own_thread
        except UNLOADABLE:  # late is better than an error
            self.close()
            return
        await in_own_thread(self.close)

    async def __aenter__(self: _T) -> _T:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close_async()


class ClientClosing(AsyncClosing):
    """A part of :class:`simm.client.Client`: how it ends."""

    deadline_s: float
    _start_lock: threading.Lock
    _closed: bool
    #: close() is under way, or has ended.
    _ending = False
    #: It has ended.
    _over = False
    #: The thread that carries out a close() of a signal's handler.
    _closer: threading.Thread | None = None
    _owned: Any
    _executor: Pool | None
    _routes: Routes
    _copier: Copier
    _pinner: Pinner
    _near: Near | None
    if TYPE_CHECKING:

        def _end_tracing(self) -> None: ...

    @property
    def _unfinished(self) -> bool:
        """Whether a close() was interrupted, or put off, and no thread is at it."""
        return self._closed and not self._ending

    def close(self) -> None:
        """Close all connections, and end a local cluster. Twice is harmless, and ends what was interrupted before.

        In a signal's handler that has interrupted another call of the client's this returns within about a second. A
        thread ends then what that call still uses. In a process that can start no thread the next close() does. A
        close() beside that thread waits for it, for a deadline and a second at most; in a call of :meth:`in_thread` it
        does not, as that thread waits for the call.
        """
        if carry_out(self._close_now, begins=self._note, put_off=self._put_off):
            earlier, mine = self._closer, threading.current_thread()
            executor = self._executor
            if earlier is None or earlier.ident is None or earlier is mine:
                return
            if executor is None or mine not in executor._threads:
                earlier.join(ASIDE_S + self.deadline_s)  # it may wait for a call that waits for this thread

    def _note(self, closer: threading.Thread) -> None:
        """Note who is about to carry out a close(), unless another thread is at it."""
        earlier = self._closer
        if earlier is None or not earlier.is_alive():
            self._closer = closer

    def _put_off(self) -> None:
        """Refuse operations, and leave the rest to the next close(). Takes no lock."""
        self._closed = self._routes.closed = True
        self._routes.route = []

    def _close_now(self) -> None:
        mine = False
        try:
            with self._start_lock:
                self._closed = True
                if self._ending:
                    return  # it has ended, or another thread is at it
                mine = self._ending = True
            with contextlib.ExitStack() as left:  # from the last to the first
                if (owned := self._owned) is not None:
                    left.callback(owned.close)
                left.callback(self._copier.close)
                left.callback(self._routes.close)
                left.callback(self._pinner.release_all)
                if self._near is not None:
                    left.callback(self._near.close)
                left.callback(self._end_tracing)
                if (executor := self._executor) is not None:
                    executor.shutdown(wait=True, cancel_futures=True)
            self._over = True
        except BaseException:
            self._ending &= not mine
            raise

    def _closed_in_child(self) -> None:
        """Go on in a forked child. A client that was being closed is closed there: the thread that was at it is not."""
        self._closer = None
        self._ending = False
        if self._closed:
            self._routes.closed = True

"""Tracing of a client's calls: on and off, by the program or by ``simm trace`` (docs/tracing.md).

Four may want it: the options that the client was made with, the program by :meth:`TraceCalls.trace`, an operator of
this host by the control file in the folder for traces, and an admin of the cluster by the manager. The operator's word
counts while it is there, then the admin's, then the program's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from ...config.client_options import ClientOptions
from ...constants import TRACE_CONTROL

if TYPE_CHECKING:
    from pathlib import Path

    from ...tracing.spool import Asked, Control, Spool
    from ..routing import Router

log = logging.getLogger("simm.client")

#: Between two looks at what an operator asks for, seconds.
LOOK_S: Final = 1.0
#: After tracing could not begin it is tried again so much later, seconds: the process may have had no descriptor left.
RETRY_S: Final = 10.0
#: A client that ends waits so long for a thread that is at the folder for traces, seconds: its disk may hang.
CLOSE_S: Final = 2.0


class TraceCalls:
    """A part of :class:`simm.client.Client`."""

    _options: ClientOptions
    _closed: bool
    if TYPE_CHECKING:

        @property
        def _router(self) -> Router | None: ...

    #: Class attributes, so that a client that never traces has none of its own.
    _tracing: Tracing | None = None
    _decision: Any = None
    #: Whether the constructor has made all that a trace touches. The router's thread runs before that.
    _traceable: bool = False

    def trace(self, ratio: float | None = 1.0, *, slow_ms: float = 0) -> Path | None:
        """Record this share of the calls from now on, 0 to 1; return the folder for it (docs/tracing.md).

        ``slow_ms``: also log calls that take so many milliseconds, with their segments; 0: none. ``ratio`` None ends
        both, when what was recorded is written, and returns None. With 0 only calls in a trace of the caller's that is
        sampled are recorded (:func:`simm.tracing.context.context`). What a signal's handler within such a call wants
        is done by that call, so the handler may get None. Raises UsageError, ConfigError.
        """
        options = self._options.with_tracing("off" if ratio is None else str(ratio), slow_ms)
        tracing = _tracing_of(self)
        tracing.take(options)
        return tracing.folder if tracing.on else None

    def _begin_tracing(self) -> None:
        """Trace as the options say. Where it cannot be, a line says so: an engine starts all the same."""
        self._traceable = True
        if self._options.trace != "off" or self._options.slow_ms:
            _tracing_of(self).begin()

    def _end_tracing(self) -> None:
        """Write what was recorded, and trace no more."""
        if self._tracing is not None:
            self._tracing.close()


def _tracing_of(client: Any) -> Tracing:
    if client._tracing is None:
        vars(client).setdefault("_tracing", Tracing(client))  # the first of two threads
    tracing: Tracing = client._tracing
    return tracing


def follow_operator(client: TraceCalls) -> Callable[[], None]:
    """Return what a client's background thread calls often: it looks now and then whether an operator wants traces.

    It does not keep the client. A thread looks, as the folder's disk may hang: nobody waits for it, and there is no
    second one meanwhile.
    """
    from ...host.threads import lives  # which the import of simm.client does without

    mine = weakref.ref(client)
    look_at = 0.0
    looking = threading.Thread()

    def look() -> None:
        nonlocal look_at, looking
        now = time.monotonic()
        if now < look_at or lives(looking):
            return
        look_at = now + LOOK_S
        looking = threading.Thread(target=_look, args=(mine,), name="simm-trace-look", daemon=True)
        with contextlib.suppress(RuntimeError, MemoryError):  # no more threads: the next time
            looking.start()

    return look


def _look(mine: weakref.ref[TraceCalls]) -> None:
    """Body of the thread that looks."""
    client = mine()
    if client is None or client._closed or not client._traceable:
        return
    tracing = _tracing_of(client)
    del client  # which a folder that hangs must not keep
    tracing.look()


class Tracing:
    """What one client records, and for whom. The client has one from the first look on. Any thread may call it."""

    def __init__(self, client: Any) -> None:
        from ...net import allowance  # only who traces needs it, and close() must have it

        self._allowance = allowance
        self._client = weakref.ref(client)
        #: Reentrant, as a signal's handler may call :meth:`take` while its thread does.
        self._lock = threading.RLock()
        self._options: ClientOptions = client._options
        self._asked: Asked | None = None
        self._control: Control | None = None
        self._control_path = os.path.join(self._options.trace_dir, TRACE_CONTROL)
        self._spool: Spool | None = None
        #: When it is tried again what could not be, monotonic seconds; None: nothing failed.
        self._again_at: float | None = None
        #: The client ends. Whoever has the lock looks at it last, and ends what it may just have begun.
        self._over = False
        #: A call in this thread is at it, and does what those within it want.
        self._settling = False
        #: Whether the client traces. It stays true until tracing has ended, so an interrupted end is made again.
        self.on = False

    @property
    def folder(self) -> Path | None:
        """Where it records; None while it does not."""
        spool = self._spool  # once, as another thread may end it
        return None if spool is None else spool.folder

    def begin(self) -> None:
        """Trace as the client's options say. Never raises: a line says what is wrong, and :meth:`look` tries again."""
        try:
            self.take(self._options)
        except Exception as exc:  # of any kind: an engine starts all the same
            self._failed(exc)

    def take(self, options: ClientOptions) -> None:
        """Trace as these options say, unless an operator says otherwise. Raises ConfigError, UsageError.

        The options before hold then, unless a call within this one, as of a signal's handler, wants others meanwhile:
        what that fails by is logged, and tried again by :meth:`look`.
        """
        with self._lock:
            before, self._options = self._options, options
            try:
                self._settle()
                self._again_at = None
            except Exception as exc:
                if self._options is options:
                    self._options = before
                    raise
                self._failed(exc)
            except BaseException:  # of a signal's handler: half of it may be done, which the next look puts right
                self._again_at = 0.0
                if self._options is options:
                    self._options = before
                raise
            finally:
                self._end_if_over()

    def _failed(self, exc: Exception) -> None:
        """Try again later; the first time in a row a line says why."""
        if self._again_at is None:
            log.warning("nothing is traced: %s", str(exc) or type(exc).__name__)
        self._asked, self._again_at = None, time.monotonic() + RETRY_S

    def look(self) -> None:
        """Do what an operator asks for now. Never raises."""
        again_at = self._again_at
        if again_at is not None and time.monotonic() < again_at:
            return
        try:
            of_cluster = self._of_cluster()
            known = of_cluster or self._asked or self.on or again_at is not None
            if known or os.path.lexists(self._control_path):
                self._follow(of_cluster)
        except Exception as exc:  # of any kind, as an operator's wish would be lost with it
            self._failed(exc)

    def _follow(self, of_cluster: Asked | None) -> None:
        with self._lock:
            try:
                if self._control is None:
                    from ...tracing.spool import Control  # few clients are ever asked

                    self._control = Control(self._control_path)
                asked = self._control.look(time.time()) or of_cluster
                news = asked != self._asked
                if news or self._again_at is not None:
                    self._asked = asked
                    self._settle()
                    self._again_at = None
                if news:
                    log.info("an operator %s", "wants traces" if asked is not None else "wants no more traces")
                if self._spool is not None:
                    self._spool.go_on()
            finally:
                self._end_if_over()

    def _of_cluster(self) -> Asked | None:
        """Return what an admin wants all clients of the cluster to trace now; None for nothing."""
        router = getattr(self._client(), "_router", None)
        found = router.subscription.traces if router is not None else None
        if found is None or time.monotonic() >= found[1]:
            return None
        from ...tracing.spool import Asked
        from ...wire.trace_messages import RATIO_ALL  # the link to the manager has loaded it

        return Asked(found[0].ratio / RATIO_ALL, found[0].slow_ms, 0.0)

    def _settle(self) -> None:
        """Do what is wanted, and again if that changes meanwhile. Under the lock.

        A call within this one, of a signal's handler or a finalizer, changes it and returns.
        """
        done: tuple[Asked | None, ClientOptions] | None = None
        while not self._settling and done != (wanted := (self._asked, self._options)):
            self._settling = True
            try:
                self._apply(*wanted)
            except Exception:
                if wanted == (self._asked, self._options):  # else nobody wants any more what failed
                    raise
            finally:
                self._settling = False
            done = wanted

    def _apply(self, asked: Asked | None, options: ClientOptions) -> None:
        client = self._client()
        if client is None or self._over or client._closed:
            return
        from ...tracing.spans import Decision, Recorder, ratio_of
        from ..tracing.switch import switch_on  # which a client that does not trace does without

        ratio = ratio_of(options.trace) if asked is None else asked.ratio
        slow_ms = options.slow_ms if asked is None else asked.slow_ms or options.slow_ms
        if ratio is None and not slow_ms:
            self._end(client)
            return
        slow_ns = int(slow_ms * 1_000_000)
        if ratio is not None and (self._spool is None or not self._spool.has(self)):
            from ...tracing.spool import spool_in

            self._spool = spool_in(options.trace_dir)
            try:
                self._spool.join(self)
            except BaseException:
                self._spool = None
                raise
        self.on = True
        if ratio is not None and self._spool is not None:
            switch_on(client, Decision(ratio, self._spool.recorder, slow_ns))
        else:  # slow calls are logged, and nothing is recorded: that needs no folder
            switch_on(client, Decision(0.0, Recorder(0), slow_ns))
            self._leave()

    def _end(self, client: Any) -> None:
        if self.on or self._spool is not None:
            from ..tracing.switch import switch_off

            switch_off(client)
            self._leave()
            self.on = False

    def _leave(self) -> None:
        if self._spool is not None:
            self._spool.leave(self)
            self._spool = None  # last: an interrupted end is made again

    def close(self) -> None:
        """Trace no more, and write what was recorded.

        Takes about ``CLOSE_S`` seconds while the folder's disk hangs. A thread that is at it then ends what it does
        there once it can.
        """
        self._over = True
        (got,) = self._allowance.tries_within(self._lock, self._allowance.allowed(CLOSE_S))
        try:
            if got:
                self._end_if_over()
        finally:
            if got:
                self._lock.release()
        if not got:
            log.warning("the folder for traces does not answer: what was recorded may be lost")

    def _end_if_over(self) -> None:
        """End tracing if the client ends. Under the lock."""
        client = self._client()
        if not self._settling and client is not None and (self._over or client._closed):
            self._end(client)

    def after_fork(self) -> None:
        """Go on in a forked child, with a lock of its own."""
        if self._settling:  # another thread was at it: the next look does it from the start
            if self._spool is not None:
                self._spool.forget(self)
            self._spool, self._asked, self._again_at = None, None, 0.0
        self._lock, self._settling = threading.RLock(), False

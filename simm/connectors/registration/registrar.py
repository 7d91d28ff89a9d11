"""Registers the scheme of a connector's keys in the store, for routers: when it changes, and again now and then.

Nothing in the connector depends on it, so it costs the connector a comparison, fails with a line in the log, and never
raises. The store is asked in a thread, which ends with the answer.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from ...client import Client, source_of
from ...host import fork
from ...host.processes import process_start
from ...host.threads import Wake, ended_within, lives
from ...net.allowance import tries_within
from ...schemes import registry
from ...schemes.scheme import Scheme
from ...wire.status import Status
from ..complaints import Complaints
from ..keyspace import replace as replaced

#: A scheme is registered again after so many seconds, as its value may be evicted; and after a failure.
REGISTER_S: Final = 60.0
RETRY_S: Final = 5.0
#: While a connector's engine is being made.
NOT_YET_S: Final = 0.2
_NUMBERS: Final = itertools.count()


def _here() -> str:
    """Return what this process and those that it can look at have in common: the host, its boot, the pid namespace."""
    return _here_of(os.getpid())


@functools.lru_cache(maxsize=1)
def _here_of(_pid: int) -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except (OSError, ValueError):
        return ""


def owner_name(number: int) -> str:
    """Return the name of one registrar of this process; empty where nobody could tell later whether it lives."""
    here = _here()
    try:
        start = process_start(os.getpid())
    except OSError:
        start = 0
    return f"{here}/{os.getpid()}/{start}/{number}" if here and start else ""


def has_ended(name: str) -> bool:
    """Return True for the name of a process that could be seen from here, and has ended. Never raises."""
    parts = name.split("/")
    if len(parts) != 5 or "/".join(parts[:2]) != _here() or not all(map(_is_number, parts[2:])):
        return False
    try:
        pid = int(parts[2])
        start = process_start(pid)
        return start != int(parts[3]) if start else not _exists(pid)
    except (OSError, ValueError):
        return False


def _exists(pid: int) -> bool:
    """Return whether there is a process, also another user's that a /proc with hidepid does not show."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 20


class NotYet(Exception):
    """What the keys are is not known yet."""


class Partly(Exception):
    """Some of what was to be registered cannot be told. ``schemes`` are the others."""

    def __init__(self, schemes: list[Scheme], why: str) -> None:
        super().__init__(why)
        self.schemes = schemes


class _Values:
    """A client that puts a value in place of another, whatever the client's settings say."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.get_into_many_at_owner = client.get_into_many_at_owner

    def put(self, key: str, value: Any) -> bool:
        return replaced(self._client, [self._client.digest(key)], [source_of(value)]) == [Status.OK]


class Registrar:
    """Registers what one connector's keys are. Any thread may call it; no method raises.

    Args:
        client: whose namespace it is. Its owner closes it, after this.
        complain: logs failures.
    """

    def __init__(self, client: Client, complain: Complaints) -> None:
        self._client = client
        self._complain = complain
        #: Tells the registrars of a process apart.
        self._number = next(_NUMBERS)
        #: Held for moments only, and while a thread is being started: not waited for without a bound.
        self._lock = threading.Lock()
        #: What was asked for last, and when it is due again.
        self._of: Hashable = None
        self._due = 0.0
        #: The epoch, and what returns the schemes.
        self._wanted: tuple[int, Callable[[], Iterable[Scheme]]] = 0, tuple
        self._thread: threading.Thread | None = None
        self._closed = False
        #: Set when it is closed.
        self._end = Wake()
        #: What the log says of the last failure.
        self._said = ""
        fork.in_child(self._after_fork)

    def _after_fork(self) -> None:
        """Go on without the thread, and without the locks that it, or another one, may hold."""
        self._lock = threading.Lock()
        self._thread = None

    def tell(self, of: Hashable, make: Callable[[], Iterable[Scheme]]) -> None:
        """Register what ``make`` returns if ``of`` is new, or the last time is ``REGISTER_S`` ago. Never waits.

        ``of``: what the keys depend on, beside the epoch of the client's namespace. ``make`` runs in a thread, and may
        raise: :class:`NotYet`, to be asked again soon, :class:`Partly`, whose schemes are registered, or another
        exception, to be asked when ``of`` changes.
        """
        try:
            epoch = self._client._epoch.epoch
            if (self._of == (of, epoch) and time.monotonic() < self._due) or self._closed:
                return
            (got,) = tries_within(self._lock, 0.0)
            if not got:
                return  # the next call comes here again
            try:
                self._of, self._due = (of, epoch), time.monotonic() + REGISTER_S
                self._wanted = epoch, make
                if self._thread is None or not lives(self._thread):
                    # It is noted before it is started: it may run after an interrupt, and ends under the lock. One that
                    # could not be started does not live.
                    self._thread = threading.Thread(target=self._run, name="simm-scheme", daemon=True)
                    self._thread.start()
            finally:
                self._lock.release()
        except Exception as exc:
            self._failed(str(exc))

    def _run(self) -> None:
        """Register what is wanted, until it is registered, given up, or due again."""
        while True:
            wanted = self._wanted
            again_s = self._attempt(*wanted)
            if again_s and time.monotonic() < self._due and not self._closed:
                self._end.wait(again_s)
                if not self._closed:
                    continue
            with self._lock:
                if self._wanted is wanted:
                    if self._thread is threading.current_thread():  # else it was started again after an interrupt
                        self._thread = None
                    return

    def _attempt(self, epoch: int, make: Callable[[], Iterable[Scheme]]) -> float:
        """Register schemes; return after how many seconds to try again, 0 for no more."""
        partly = ""
        try:
            schemes = list(make())
        except NotYet:
            return NOT_YET_S
        except Partly as exc:
            schemes, partly = exc.schemes, str(exc)
        except Exception as exc:  # the same whenever it is tried
            with self._lock:
                if self._wanted == (epoch, make):  # and not of what is wanted by now
                    self._due = float("inf")
            self._failed(str(exc))
            return 0.0
        values = _Values(self._client)
        fault = ""
        told = []
        for each in schemes:
            try:
                told.append(replace(each, namespace=self._client.namespace, epoch=epoch))
            except Exception as exc:
                fault = str(exc)
        for each in told:
            try:
                if not registry.register(values, each, owner_name(self._number), also=told, over=has_ended):
                    fault = "the store did not take it"
            except Exception as exc:  # of this one: the others are registered all the same
                fault = str(exc)
        if fault or partly:
            self._failed(fault or partly)
        else:
            self._said = ""
        return RETRY_S if fault else 0.0

    def _failed(self, why: str) -> None:
        """Log a failure, once until there is another one, or none."""
        if why != self._said and not self._closed:
            self._said = why
            self._complain("scheme", "the scheme of the keys is not registered, routers do not know it: %s", why)

    def settled(self, timeout_s: float) -> bool:
        """Wait until nothing is under way; return whether it is so."""
        (got,) = tries_within(self._lock, timeout_s)  # while a thread is being started
        thread = self._thread
        if got:
            self._lock.release()
        if thread is not None and thread is not threading.current_thread():
            return ended_within(thread, timeout_s)
        return True

    def close(self) -> None:
        """Try nothing any more, and wait for what is under way: for two deadlines of the client at the most."""
        self._closed = True
        self._end.set()
        self.settled(2 * self._client.deadline_s)


def all_of(makers: Iterable[Callable[[], Iterable[Scheme]]]) -> list[Scheme]:
    """Return the schemes of several makers. Raises NotYet if one does.

    Raises :class:`Partly` if some cannot tell theirs, and what the first one raised if none can.
    """
    found: list[Scheme] = []
    first: Exception | None = None
    for make in makers:
        try:
            found += make()
        except NotYet:
            raise
        except Partly as exc:
            found += exc.schemes
            first = first or exc
        except Exception as exc:
            first = first or exc
    if first is not None:
        raise Partly(found, str(first)) if found else first
    return found


def under_names(scheme: Scheme, names: Sequence[object]) -> list[Scheme]:
    """Return a scheme for each name under which requests may have its model, without empty ones.

    Raises as :func:`all_of`, for names that cannot be.
    """

    def under(name: str) -> list[Scheme]:
        return [replace(scheme, model=name)]

    return all_of(partial(under, name) for name in dict.fromkeys(str(each) for each in names if each))

"""Tell the service manager (systemd) how this server is, in the datagrams of sd_notify(3), without its library.

    READY=1      it serves               STATUS=...        a line for ``systemctl status``
    RELOADING=1  it reopens its log      EXTEND_TIMEOUT_USEC=...  a start or a stop takes so long, and does not hang
    STOPPING=1   it ends                 WATCHDOG=1        it is alive

Without ``NOTIFY_SOCKET`` nothing is sent and nothing runs. Sending never blocks and never raises: a message that the
socket does not take waits for the next tick, where a newer one of its kind replaces it.

What proves that a server is alive is its event loop: ticks come from there. ``alive`` may forbid one. A data server's
does when a worker hangs and cannot be replaced (``server/slots/hang_watch.py``).
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Final

from ..config.logs import reopen_logs
from ..errors import printable
from .loop import Loop

log = logging.getLogger("simm.net.sd_notify")

#: Longest time between two ticks, seconds. The watchdog's time is three ticks at least, so two may be late.
TICK_S: Final = 5.0
TICKS_PER_WATCHDOG: Final = 3
STATUS_CHARACTERS: Final = 400


class Notifier:
    """The sender of one process. It does nothing without an ``address``.

    Args:
        address: of a datagram socket: a path, or @ and a name in the abstract namespace.
        watchdog_s: without a sign of life for so long, the service manager ends this process; 0 for ever.
    """

    def __init__(self, address: str = "", watchdog_s: float = 0.0) -> None:
        self.address = address
        self.watchdog_s = watchdog_s
        #: Open from the start: a process without descriptors left is alive too.
        self._sock: socket.socket | None = None
        #: What the socket has not taken yet, by name.
        self._waiting: dict[str, str] = {}
        self._status = ""
        self._ready = False
        if address:
            self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str] = os.environ) -> Notifier:
        """Return a notifier as systemd describes it to this process, and take its variables out of the environment.

        A program that this process starts is not the service, and must not speak for it.
        """
        address = environment.pop("NOTIFY_SOCKET", "")
        watchdog_us = environment.pop("WATCHDOG_USEC", "")
        watchdog_pid = environment.pop("WATCHDOG_PID", "")
        if not address:
            return cls()
        if address[0] not in "/@":
            log.warning("NOTIFY_SOCKET=%s is neither a path nor an abstract socket: ignored", address)
            return cls()
        mine = watchdog_pid in ("", str(os.getpid()))
        watched = mine and watchdog_us.isdecimal() and len(watchdog_us) < 19
        return cls(address, int(watchdog_us) / 1e6 if watched else 0.0)

    @property
    def active(self) -> bool:
        """Return True if a service manager listens."""
        return self._sock is not None

    @property
    def tick_s(self) -> float:
        """Return the time between two ticks, seconds."""
        return min(TICK_S, self.watchdog_s / TICKS_PER_WATCHDOG) if self.watchdog_s else TICK_S

    def close(self) -> None:
        """Send nothing from now on."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def status(self, text: str) -> None:
        """Say in a line what this server does, unless it was said before."""
        text = printable(text.strip(), STATUS_CHARACTERS)
        if text != self._status:
            self._status = text
            self._say(STATUS=text)

    def ready(self, text: str) -> None:
        """Say that this server serves."""
        self._ready = True
        self._status = printable(text.strip(), STATUS_CHARACTERS)
        self._say(READY="1", STATUS=self._status)

    def stopping(self, text: str) -> None:
        """Say that this server ends."""
        self._status = printable(text.strip(), STATUS_CHARACTERS)
        self._say(STOPPING="1", STATUS=self._status)

    def extend(self, seconds: float) -> None:
        """Ask for so much time, from now on, before a start or a stop counts as failed."""
        self._say(EXTEND_TIMEOUT_USEC=str(round(seconds * 1e6)))

    @contextlib.contextmanager
    def reloading(self) -> Iterator[None]:
        """Say that the configuration is read again, and after the block that this is done."""
        if not self._ready:  # systemd would take the end of it for the end of the start
            yield
            return
        self._say(RELOADING="1", MONOTONIC_USEC=str(time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000))
        try:
            yield
        finally:
            if self._waiting.pop("RELOADING", ""):  # was never sent
                self._waiting.pop("MONOTONIC_USEC", "")
            else:
                self._say(READY="1")

    def beat(self) -> None:
        """Send a sign of life, if one is expected, and what waits."""
        self._say(**({"WATCHDOG": "1"} if self.watchdog_s else {}))

    def flush(self) -> bool:
        """Send what waits. Return False if the socket does not take it now."""
        if self._sock is None or not self._waiting:
            return True
        text = "\n".join(f"{name}={value}" for name, value in self._waiting.items())
        address = self.address
        try:
            self._sock.sendto(text.encode(), b"\0" + os.fsencode(address[1:]) if address[0] == "@" else address)
        except OSError as exc:
            log.debug("%s does not take %r: %s", address, text, exc)
            return False
        self._waiting.clear()
        return True

    def _say(self, **fields: str) -> None:
        if self._sock is not None:
            self._waiting.update(fields)
            self.flush()


def reload_logs(notifier: Notifier, children: Iterable[int] = ()) -> None:
    """Do what ``systemctl reload`` asks for: open the log files anew, here and in the processes ``children``."""
    with notifier.reloading():
        reopen_logs()
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGHUP)
        log.info("the log file was opened anew")


def keep_informed(
    loop: Loop, notifier: Notifier, status: Callable[[], str], alive: Callable[[], bool] = lambda: True
) -> None:
    """Send the status and signs of life from a loop, once a tick.

    ``alive``: no sign of life is sent in a tick for which this returns False. With a watchdog, a server that does not
    answer in time gets SIGABRT, and stderr shows where its threads were.
    """
    if not notifier.active:
        return
    if notifier.watchdog_s:
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # stderr is no file
            faulthandler.enable()

    def tick() -> None:
        lives = alive()
        notifier.status(status())
        if lives:
            notifier.beat()
        else:
            notifier.flush()

    loop.call_every(notifier.tick_s, tick)

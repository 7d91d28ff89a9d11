"""Set-up of every long-running SiMM process: signals, its parent's death, descriptors, child processes."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import resource
import select
import signal
import socket
import time
from collections.abc import Callable, Collection, Sequence
from typing import Final

from ..config.logs import reopen_logs
from ..errors import ConfigError
from .loop import Loop
from .peer import Peer

log = logging.getLogger("simm.net.process")

#: A server with fewer descriptors has no room for clients.
FILES_MIN: Final = 64

_PR_SET_PDEATHSIG: Final = 1
#: The lowest oom_score_adj: the OOM killer never chooses such a process.
OOM_NEVER: Final = -1000
#: The kernel may take so long to end a process that was killed, as it gives its memory back. A supervisor that serves
#: waits no longer, as its heartbeats wait too.
KILLED_S: Final = 1.0
#: Both ends of the socket pairs that signals write into. They stay open, as a signal may arrive while a process ends.
_WAKES: Final[list[socket.socket]] = []


def die_with_parent(signum: int = signal.SIGTERM) -> None:
    """Ask the kernel to send ``signum`` when the parent ends (prctl(2) PR_SET_PDEATHSIG). Best effort."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)


def oom_score_adj() -> int:
    """Return by how much the OOM killer prefers this process, in thousandths of the memory; 0 if that is unknown."""
    try:
        with open("/proc/self/oom_score_adj", encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 0


def set_oom_score_adj(value: int) -> None:
    """Let the OOM killer prefer this process by ``value``. Best effort: to lower it takes CAP_SYS_RESOURCE."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write(str(max(OOM_NEVER, min(-OOM_NEVER, value))))


def has_terminal() -> bool:
    """Return True if this process has a controlling terminal that is open."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def stop_on_signals(loop: Loop, *, interrupt: bool = False, reload: Callable[[], object] = reopen_logs) -> None:
    """Stop the loop at SIGTERM, and with ``interrupt`` at SIGINT. Call ``reload`` from the loop at SIGHUP.

    Without ``interrupt`` ignore SIGINT: a terminal sends it to the parent as well, which handles it. A terminal that
    closes sends SIGHUP: then a process with ``interrupt`` stops, if it had one at its start. With ``nohup`` it
    does not, and a SIGHUP means ``reload`` all the same: settings and quotas that have changed reach it by that.

    A forked child may have got a SIGHUP before, as while it recovered an arena. Nothing has come of it, so this calls
    :func:`~simm.config.logs.reopen_logs` once.
    """
    nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    had_terminal = interrupt and not nohup and has_terminal()
    wake_read, wake_write = socket.socketpair()
    wake_read.setblocking(False)
    wake_write.setblocking(False)
    _WAKES.extend((wake_read, wake_write))
    signal.set_wakeup_fd(wake_write.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda *_: loop.stop())
    signal.signal(signal.SIGINT, (lambda *_: loop.stop()) if interrupt else signal.SIG_IGN)
    signal.signal(signal.SIGHUP, lambda *_: None)  # its number comes through the socket pair

    def woken(_mask: int) -> None:
        numbers = b""
        with contextlib.suppress(BlockingIOError):
            numbers = wake_read.recv(64)
        if signal.SIGHUP not in numbers:
            return
        if had_terminal and not has_terminal():
            loop.stop()
        else:
            reload()

    loop.watch(wake_read, woken)
    reopen_logs()


def raise_file_limit() -> None:
    """Raise the limit of open files to the hard limit, as thousands of connections exceed the usual soft limit.

    Children inherit it. A session with a commit ring takes two descriptors of a worker and one more of a client.

    Raises ConfigError for a hard limit that leaves no room for clients: a server that runs out of descriptors in the
    middle of its start could not even remove what it has made.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if 0 <= hard < FILES_MIN:
        raise ConfigError(
            f"this process may open {hard} files only: a server needs {FILES_MIN} at least; raise the hard limit "
            "(`ulimit -Hn`, LimitNOFILE= in a systemd unit)"
        )
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def end_with(loop: Loop, pid: int) -> Callable[[], bool]:
    """Stop the loop when process ``pid`` ends, or at once if it has ended.

    Return what does that outside of the loop's turns, for long work, and returns whether the loop runs then. O(1).
    """
    end = select.poll()
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        fd = -1
        loop.call_later(0.0, loop.stop)
    else:
        loop.watch(fd, lambda _mask: loop.stop())
        end.register(fd, select.POLLIN)

    def goes_on() -> bool:
        if fd < 0 or end.poll(0):
            loop.stop()
        return loop.running

    return goes_on


def log_descriptors() -> set[int]:
    """Return the descriptors that handlers of the root logger and of SiMM's loggers write to."""
    loggers = [logging.getLogger(), logging.getLogger("simm")]
    for name, found in logging.Logger.manager.loggerDict.items():
        if name.startswith("simm.") and isinstance(found, logging.Logger):
            loggers.append(found)
    numbers = set()
    for handler in (handler for logger in loggers for handler in logger.handlers):
        for file in (getattr(handler, name, None) for name in ("stream", "sock", "socket")):
            with contextlib.suppress(AttributeError, OSError, ValueError):
                numbers.add(int(file.fileno()))  # type: ignore[union-attr]
    return numbers - {-1}


def give_up_descriptors_but(keep: Collection[int]) -> None:
    """Replace every inherited descriptor in a forked child, except ``keep``, 0 to 2, and those of log handlers.

    The parent's objects (sockets, files, maps) live on in the child and know descriptor numbers. If a number were free,
    the next opened file would get it, and a write of such an object would go to that file. So the child fills each
    number with a descriptor that can neither be read nor written. It also exempts the parent's objects from garbage
    collection, which would close numbers.
    """
    gc.freeze()
    keep = {0, 1, 2, *keep, *log_descriptors()}
    nothing = os.open("/", os.O_PATH | os.O_CLOEXEC)
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd not in keep and fd != nothing and _is_open(fd):
            os.dup2(nothing, fd, inheritable=False)
    os.close(nothing)


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


class Child:
    """A forked process and the parent's end of its socket pair."""

    def __init__(self, pid: int, sock: socket.socket) -> None:
        self.pid = pid
        self.sock = sock
        self.peer: Peer | None = None
        #: Its exit code once it has ended, negative for a signal; and the processor time that it used, seconds.
        self.code: int | None = None
        self.cpu_s = 0.0

    def __repr__(self) -> str:
        return f"<Child {self.pid}>"

    @property
    def cause(self) -> str:
        """Return how it has ended, for a sentence about its death; empty if that is unknown."""
        if self.code is None:
            return ""
        if self.code >= 0:
            return f" with exit code {self.code}"
        with contextlib.suppress(ValueError):
            return f" by {signal.Signals(-self.code).name}"
        return f" by signal {-self.code}"

    def ended(self) -> bool:
        """Return whether the process has ended, and reap it."""
        if self.code is not None:
            return True
        try:
            done, status, usage = os.wait4(self.pid, os.WNOHANG)
        except ChildProcessError:
            return True
        if done == self.pid:
            self.code = os.waitstatus_to_exitcode(status)
            self.cpu_s = usage.ru_utime + usage.ru_stime
        return done == self.pid

    def lost(self) -> None:
        """Close the connection to a process that has ended, or is about to."""
        peer, self.peer = self.peer, None
        if peer is not None:
            peer.close("process ended")
        self.sock.close()


def reaped(pid: int) -> bool:
    """Return whether child ``pid`` has ended, and reap it."""
    try:
        done, _ = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return True
    return done == pid


def end_children(children: Sequence[Child], seconds: float, killed_s: float = KILLED_S) -> list[Child]:
    """Send SIGTERM to child processes, SIGKILL to those left after ``seconds``; reap them and close their sockets.

    Return those that have not ended ``killed_s`` after SIGKILL, which are to be reaped later. They execute nothing any
    more, but have their memory, descriptors and RDMA connections until they end.
    """
    left = [child for child in children if not child.ended()]
    for child in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGTERM)
            os.kill(child.pid, signal.SIGCONT)  # a stopped process cannot end
    left = _left_after(seconds, left)
    for child in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)
    left = _left_after(killed_s, left)
    if left:
        log.error("processes %s were killed and have not ended", [child.pid for child in left])
    for child in children:
        child.lost()
    return left


def _left_after(seconds: float, left: list[Child]) -> list[Child]:
    """Return which of these children have not ended by then, or earlier if all have."""
    until = time.monotonic() + seconds
    while left and time.monotonic() < until:
        left = [child for child in left if not child.ended()]
        if left:
            time.sleep(0.001)
    return left

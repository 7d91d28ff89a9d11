"""A child process of a test: it has a log, is waited for by its state, told lines, signalled, and gone at the end."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import psutil

from simm.net.channel import Channel
from tests.support.waiting import WAIT_S, wait_until

Self = TypeVar("Self", bound="Child")

ROOT: Final = Path(__file__).resolve().parents[2]
#: Bounds for things that hang, seconds; none is a speed limit. A start in an emulator takes more than a minute.
READY_S: Final = 180.0
STOP_S: Final = 120.0


def child_environment(**more: str) -> dict[str, str]:
    """Return an environment with the tests' own code, the package under test, and no settings from outside."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SIMM_")}
    return {**environment, "PYTHONPATH": str(ROOT), **more}


def module_command(module: str, *arguments: str, patches: Sequence[str] = ()) -> list[str]:
    """Return the command line that runs a module; ``patches`` are switches of ``tests.support.patched``."""
    patched = ["tests.support.patched", *patches, "--"] if patches else []
    return [sys.executable, "-m", *patched, module, *arguments]


class Place:
    """Where processes run. This one: on this host, as the tests do."""

    host = "127.0.0.1"
    #: Further arguments of a server that listens on ``host``.
    exposed: Sequence[str] = ()

    def command(self, words: Sequence[str]) -> list[str]:
        """Return the command line that runs ``words`` there."""
        return list(words)

    def connect(self, host: str, port: int, deadline_s: float) -> Channel:
        """Connect from there."""
        return Channel.tcp(host, port, deadline_s)


THIS_HOST: Final = Place()


class Child:
    """A process started by a test. As a context manager it is killed at the end, unless it has ended.

    Args:
        words: its command line.
        name: for messages; the command line if empty.
        place: where it runs.
        talks: it is told lines on its stdin, which is /dev/null otherwise.
        log: the file that takes its stderr; None for the stderr of the tests.
        environment: None for :func:`child_environment`.
        pass_fds: descriptors that it inherits.
        preexec_fn: runs in the child before the program.
    """

    def __init__(
        self, words: Sequence[str], *, name: str = "", place: Place = THIS_HOST, talks: bool = False,
        log: Path | None = None, environment: Mapping[str, str] | None = None, folder: Path | None = None,
        pass_fds: Sequence[int] = (), preexec_fn: Callable[[], object] | None = None,
    ) -> None:  # fmt: skip
        self.name = name or " ".join(words)
        self.log = log
        self._unread = b""
        with contextlib.ExitStack() as stack:
            self.process: subprocess.Popen[bytes] = subprocess.Popen(
                place.command(words), stdin=subprocess.PIPE if talks else subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=None if log is None else stack.enter_context(open(log, "ab")),
                env=child_environment() if environment is None else environment, cwd=folder, pass_fds=pass_fds,
                preexec_fn=preexec_fn, start_new_session=True,
            )  # fmt: skip

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    @property
    def running(self) -> bool:
        """True until it has ended."""
        return self.process.poll() is None

    def said(self) -> str:
        """Return the end of its log, for messages."""
        return self.log.read_text(errors="replace")[-2000:] if self.log is not None and self.log.exists() else ""

    # -- lines on its stdout and stdin ------------------------------------------------------------

    def read_line(self, timeout_s: float = READY_S) -> str:
        """Return its next line, or "" at the end of its output. Raises AssertionError if none comes in time."""
        assert self.process.stdout is not None
        pipe, until = self.process.stdout.fileno(), time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        while b"\n" not in self._unread:
            if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
                raise AssertionError(f"{self.name} says nothing in {timeout_s:.0f} s: {self._unread!r}\n{self.said()}")
            piece = os.read(pipe, 1 << 16)
            if not piece:
                break
            self._unread += piece
        line, end, self._unread = self._unread.partition(b"\n")
        return (line + end).decode()

    def expect(self, start: str, timeout_s: float = READY_S) -> str:
        """Return its next line. Raises AssertionError unless it begins with ``start``."""
        line = self.read_line(timeout_s)
        if not line.startswith(start):
            raise AssertionError(f"no {start.strip()} from {self.name}: {line!r}\n{self.said()}")
        return line

    def tell(self, line: str) -> None:
        """Write a line to its stdin."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())
        self.process.stdin.flush()

    def ask(self, request: Any) -> Any:
        """Tell it a line of JSON, and return the line of JSON that it answers."""
        self.tell(json.dumps(request))
        return self.answer()

    def answer(self, timeout_s: float = READY_S) -> Any:
        """Return its next line of JSON."""
        line = self.read_line(timeout_s)
        assert line, f"{self.name} has ended: {self.process.wait(WAIT_S)}\n{self.said()}"
        return json.loads(line)

    def close_input(self) -> None:
        """End its input."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def rest(self, timeout_s: float = WAIT_S) -> str:
        """End its input, wait until it has ended, and return what it still says."""
        if self.process.stdin is not None:
            self.close_input()
            self.process.stdin = None
        out, _ = self.process.communicate(timeout=timeout_s)
        unread, self._unread = self._unread, b""
        return (unread + out).decode()

    # -- the process and its end ----------------------------------------------------------------------

    def family(self) -> list[psutil.Process]:
        """Return the process and all that it has forked."""
        try:
            process = psutil.Process(self.pid)
            return [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def send_signal(self, number: int, *, family: bool = False) -> None:
        """Send a signal, to its children too if asked.

        A family that is to be killed is stopped first: between two signals its members would see each other end, and
        a busy machine gives them the time to clean up.
        """
        numbers = (signal.SIGSTOP, number) if family and number == signal.SIGKILL else (number,)
        processes = self.family() if family else [psutil.Process(self.pid)]
        for each in numbers:
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(each)

    def wait(self, timeout_s: float = STOP_S) -> int:
        """Wait until it has ended; return its exit code. Kill it and raise AssertionError if it hangs."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"{self.name} does not end\n{self.said()}") from None
        finally:
            self._close()

    def end(self, number: int = signal.SIGTERM, timeout_s: float = STOP_S) -> int:
        """Send SIGTERM, or another signal, and wait; as :meth:`wait`."""
        self.process.send_signal(number)
        return self.wait(timeout_s)

    def kill(self) -> None:
        """Send SIGKILL, and wait until it and all its children have ended. No effect if it has ended."""
        if self.running:
            family = self.family()
            self.process.kill()
            self.process.wait(STOP_S)
            wait_until(lambda: not any(map(alive, family)), f"the children of {self.name} end with it")
        self._close()

    def _close(self) -> None:
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


def alive(process: psutil.Process) -> bool:
    """Return True if a process runs, and is no zombie."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def forked_by(pid: int) -> list[psutil.Process]:
    """Return the children that a server has forked; CPython's own resource tracker is another program.

    A mover may end while we look.
    """
    found = []
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended, or is a zombie
            if not any("resource_tracker" in word for word in child.cmdline()):
                found.append(child)
    return found


@contextlib.contextmanager
def stopped(*processes: psutil.Process) -> Iterator[None]:
    """Send SIGSTOP to processes, and SIGCONT at the end."""
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

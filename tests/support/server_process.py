"""A SiMM server as a process that can be started again after its end: its name, place, arguments and log stay."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import psutil

from tests.support.child import READY_S, THIS_HOST, Child, Place, child_environment

Self = TypeVar("Self", bound="ServerProcess")


class ServerProcess:
    """A manager or a data server, running or not. It ends with the tests' process, whatever ends that.

    Args:
        module: ``manager`` or ``dataserver``.
        folder: its working folder, with its log ``NAME.log``: what it says on stderr, over all its lives.
        arguments: of its command line.
        program: what Python runs in place of ``-m simm.MODULE``.
        patches: switches of ``tests.support.patched``, from the next start on.
        environment: further variables.
    """

    def __init__(
        self, module: str, folder: Path, *arguments: str, name: str = "", place: Place = THIS_HOST,
        program: Sequence[str] = (), patches: Sequence[str] = (), environment: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.module = module
        self.folder = folder
        self.name = name or module
        self.place = place
        self.arguments = list(arguments)
        self.program = program
        self.patches = patches
        self.environment = environment or {}
        #: The READY line of the last start.
        self.ready = ""
        self.child: Child | None = None

    def __enter__(self: Self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.clean_up()

    @property
    def log(self) -> Path:
        """The file of its log."""
        return self.folder / f"{self.name}.log"

    @property
    def running(self) -> bool:
        """True between a start and the end that was waited for."""
        return self.child is not None

    @property
    def pid(self) -> int:
        """Of the process that runs now."""
        return self._child.pid

    @property
    def address(self) -> str:
        """Where a manager listens, by its READY line."""
        return self.ready.split()[2]

    @property
    def http(self) -> str:
        """Where its pages are, by its READY line; "" without any."""
        return next((word[5:] for word in self.ready.split() if word.startswith("http=")), "")

    @property
    def _child(self) -> Child:
        assert self.child is not None, f"{self.name} does not run"
        return self.child

    def launch(self, *more: str) -> None:
        """Start it, with ``more`` arguments this time."""
        assert self.child is None, f"{self.name} runs already"
        program = list(self.program) or ["-m", f"simm.{self.module}"]
        if self.patches:
            program = ["-m", "tests.support.patched", *self.patches, "--", f"simm.{self.module}"]
        words = [sys.executable, *program, "--end-with", str(os.getpid()), *self.arguments, *more]
        environment = child_environment(**self.environment)
        self.child = Child(
            words, name=self.name, place=self.place, log=self.log, environment=environment, folder=self.folder
        )

    def wait_ready(self) -> None:
        """Wait for its READY line."""
        self.ready = self._child.expect("READY ", READY_S)

    def start(self, *more: str) -> float:
        """Start it and wait for READY; return how long that took, seconds."""
        began = time.monotonic()
        self.launch(*more)
        self.wait_ready()
        return time.monotonic() - began

    def family(self) -> list[psutil.Process]:
        """Return the process and all that it has forked."""
        return self._child.family()

    def send_signal(self, number: int, *, family: bool = False) -> None:
        """Send a signal, to its children too if asked."""
        self._child.send_signal(number, family=family)

    def kill(self) -> None:
        """Send SIGKILL, and wait until it has gone with all its children."""
        child, self.child = self._child, None
        child.kill()

    def wait(self) -> int:
        """Wait until it has ended; return its exit code. Raises AssertionError if it hangs."""
        child, self.child = self._child, None
        return child.wait()

    def end(self, number: int = signal.SIGTERM) -> float:
        """Send SIGTERM, and wait; return how long it took, seconds. Raises AssertionError if it fails or hangs."""
        began = time.monotonic()
        self.send_signal(number)
        code = self.wait()
        assert code == 0, f"{self.name} ended with {code}"
        return time.monotonic() - began

    def clean_up(self) -> None:
        """End it if it runs, in any way."""
        if self.child is None:
            return
        self.send_signal(signal.SIGCONT, family=True)
        with contextlib.suppress(AssertionError):
            self.end()

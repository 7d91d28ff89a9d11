"""Several processes of ``tests.system.faults.crowd`` as one crowd of connections."""

from __future__ import annotations

import contextlib
import json
import resource
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.child import READY_S, Child, module_command


class Crowd:
    """Several crowd processes as one."""

    def __init__(self, count: int, processes: int, **settings: Any) -> None:
        each = count // processes
        self.processes = [
            Child(module_command("tests.system.faults.crowd", json.dumps(asked)), name="crowd", talks=True)
            for asked in ({"count": each, "first": at * each, **settings} for at in range(processes))
        ]

    def answers(self, after_s: float = 0.0) -> list[dict[str, Any]]:
        """One line of each, which has first to do something for so long, seconds."""
        return [process.answer(after_s + READY_S) for process in self.processes]

    def command(self, words: str) -> list[dict[str, Any]]:
        """Tell all, and hear them."""
        for process in self.processes:
            process.tell(words)
        return self.answers()

    def end(self, *, kill: bool = False) -> None:
        """Of all of them."""
        for process in self.processes:
            if kill:
                process.kill()
            else:
                process.rest()


@contextlib.contextmanager
def crowd(count: int, processes: int, **settings: Any) -> Iterator[Crowd]:
    """A crowd that is gone at the end."""
    made = Crowd(count, processes, **settings)
    try:
        yield made
    finally:
        made.end(kill=True)


def enough_files(wanted: int) -> None:
    """Skip where the machine does not let one process have so many."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard < wanted:
        pytest.skip(f"the hard limit of open files is {hard}, {wanted} are wanted")

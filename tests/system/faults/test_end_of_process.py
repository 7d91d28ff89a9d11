"""Programs that fork, execute and end without a word to their client: no hang, and nothing of theirs stays."""

from __future__ import annotations

import contextlib
import time

import pytest

from simm.client import Client
from tests.support.child import READY_S, Child, module_command
from tests.support.fleet import Fleet
from tests.support.pace import Pace
from tests.support.waiting import wait_until
from tests.system.faults.end_of_process import CHILDREN

#: An interpreter with an open client ends within this time, seconds.
END_S = 2.0


@pytest.mark.fault("F24", ci=1, whole=50)
def test_fork_exec_threads_and_an_end_without_close(lone: Fleet, amount: int) -> None:
    """Both paths at once, as most of the time goes by for starts of Python."""
    worker = lone.servers[0]
    for _ in range(amount):
        with Pace() as pace:
            programs = {
                path: Child(module_command("tests.system.faults.end_of_process", lone.manager.address, path), name=path)
                for path in ("shm", "tcp")
            }
            ended: dict[str, float] = {}

            def all_ended(programs: dict[str, Child] = programs, ended: dict[str, float] = ended) -> bool:
                for path, program in programs.items():
                    if path not in ended and not program.running:
                        ended[path] = time.monotonic()
                return len(ended) == len(programs)

            with contextlib.ExitStack() as stack:
                for program in programs.values():
                    stack.enter_context(program)
                wait_until(all_ended, lambda: f"both end, and not only {list(ended)}", READY_S)  # noqa: B023
                told = {path: (program.answer(), program.wait()) for path, program in programs.items()}
            for path, (said, code) in told.items():
                assert code == 0
                pace.check(f"a program with an open client by {path}: ended after", ended[path] - said["at"], END_S)
                # A child has connections of its own: more sockets than it inherited, and the parent's answers are its.
                assert [child["right"] for child in said["children"]] == [True] * CHILDREN, said
                assert all(child["own"] >= 1 for child in said["children"]), "each opened a connection: a control"
                assert said["executed"] == [], "a program that a child executes inherits nothing"
                assert said["right"]
        wait_until(lambda: worker.worker_stats()["sessions"] == 1, "their sessions have ended, the stream's stays")
        with Client(lone.manager.address, namespace="ends", deadline_s=20.0) as client:
            left = ["parent", *(f"thread/{number}" for number in range(4))]
            # Again and again: the stream may still have a put that it was sent before its client ended.
            wait_until(
                lambda: client.delete_many(left) and not worker.worker_stats()["entries"],  # noqa: B023
                "no value is left",
            )

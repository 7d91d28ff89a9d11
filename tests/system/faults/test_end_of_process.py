"""Programs that fork, execute and end without a word to their client: no hang, and nothing of theirs stays."""

from __future__ import annotations

import time

import pytest

from simm.client import Client
from tests.support.child import Child, module_command
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
            for path, program in programs.items():
                with program:
                    said = program.answer()
                    assert program.wait() == 0
                    took = time.monotonic() - said["at"]
                pace.check(f"a program with an open client by {path}: ended after", took, END_S)
                # A child has connections of its own: more sockets than it inherited, and the parent's answers are its.
                assert said["children"] == [{"right": True, "own": said["children"][0]["own"]}] * CHILDREN, said
                assert said["children"][0]["own"] >= 1, "the positive control: it opened a connection"
                assert said["executed"] == [], "a program that a child executes inherits nothing"
                assert said["right"]
        wait_until(lambda: worker.worker_stats()["sessions"] == 1, "their sessions have ended, the stream's stays")
        with Client(lone.manager.address, namespace="ends", deadline_s=20.0) as client:
            left = ["parent", *(f"thread/{number}" for number in range(4))]
            client.delete_many(left)
            wait_until(lambda: worker.worker_stats()["entries"] == 0, "no value is left")

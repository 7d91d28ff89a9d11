"""What is told of another process, whatever it is called and wherever the wall clock goes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from simm.host.processes import boottime_ns, process_start, program_of
from tests.support.waiting import wait_until

#: It has what a careless reader of /proc/PID/stat takes for the end of the name, and for the fields after it.
NAME = "a) R 1 2 (b"


@pytest.fixture
def child(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], int, int]]:
    """A process called NAME, and CLOCK_BOOTTIME before and after its start, ns."""
    (tmp_path / NAME).symlink_to("/bin/cat")
    before = boottime_ns()
    with subprocess.Popen([tmp_path / NAME], stdin=subprocess.PIPE) as process:
        after = boottime_ns()
        wait_until(lambda: program_of(process.pid) == NAME, "the program has its name")
        yield process, before, after
        process.kill()


def test_the_start_is_counted_from_the_boot(child: tuple[subprocess.Popen[bytes], int, int]) -> None:
    """From 1970 it would change with the wall clock, and a client that lives would be taken for one that has ended."""
    process, before, after = child
    tick = 10**9 // os.sysconf("SC_CLK_TCK")
    start = process_start(process.pid)
    assert before // tick <= start <= after // tick + 1
    assert process_start(process.pid) == start


def test_who_has_ended_has_neither(child: tuple[subprocess.Popen[bytes], int, int]) -> None:
    process = child[0]
    assert program_of(process.pid) == NAME
    process.kill()
    process.wait()
    assert (process_start(process.pid), program_of(process.pid)) == (0, "")

"""A process whose start is tried again: not any more once nobody wants it."""

from __future__ import annotations

import os
import signal

import pytest

from simm.net.loop import Loop
from simm.server import children as children_module
from simm.server.children import Children, Supervised
from tests.support.waiting import wait_until


@pytest.mark.parametrize("retired", [False, True])
def test_a_retired_process_is_not_started_later(monkeypatch: pytest.MonkeyPatch, retired: bool) -> None:
    """The system had no process to spare. By the time it has, what the process would serve is closed."""
    loop, forks = Loop(), [0]
    children = Children(loop, lambda: ())

    def fork(*_: object, **__: object) -> None:
        forks[0] += 1
        raise OSError(11, "no process to spare")

    monkeypatch.setattr(children, "fork", fork)
    monkeypatch.setattr(children_module, "FORK_AGAIN_S", 0.0)
    try:
        process = Supervised(children, "a stream", lambda _sock: None, [])
        process.start_or_retry()
        assert forks == [1]
        if retired:
            process.retire()
        for _ in range(3):
            loop.run_once(0.01)
        assert (forks == [1]) == retired
    finally:
        loop.close()


def test_one_that_has_not_ended_is_reaped_later() -> None:
    loop = Loop()
    process = Supervised(Children(loop, lambda: ()), "a stream", lambda sock: (sock.recv(1), None)[1], [])
    try:
        process.start()
        child = process.child
        assert child is not None
        process.retire()
        assert process.child is child, "it still runs"
        process.kill()
        assert wait_until(process.ended, "it ends") is child and child.code == -signal.SIGKILL
        with pytest.raises(ChildProcessError):
            os.waitpid(child.pid, os.WNOHANG)
        process.start()
        assert process.child is None, "it is retired"
    finally:
        process.kill()
        loop.close()

"""A process whose start is tried again: not any more once nobody wants it."""

from __future__ import annotations

import pytest

from simm.net.loop import Loop
from simm.server import children as children_module
from simm.server.children import Children, Supervised


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

"""SIGHUP: settings and quotas that have changed reach each process by it, whenever it comes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from simm.config import logs
from simm.config.live import LiveSettings, level_now, set_level
from simm.ipc.tally import Served
from simm.net.loop import Loop
from simm.net.process import end_children, stop_on_signals
from simm.server import migration
from simm.server.children import Children
from simm.server.operators.admin import follow_in_stream

_SERVER = """
import os, signal, sys
from simm.net.loop import Loop
from simm.net.process import stop_on_signals
signal.signal(signal.SIGHUP, signal.SIG_IGN if sys.argv[1] == "nohup" else signal.SIG_DFL)
loop, found = Loop(), []
stop_on_signals(loop, interrupt=True, reload=lambda: found.append("reloaded"))
os.kill(os.getpid(), signal.SIGHUP)
for _ in range(3):
    loop.run_once(0.0)
print(*found, "runs" if loop.running else "stops")
"""


@pytest.mark.parametrize("how", ["nohup", "plain"])
def test_sighup_means_reload(how: str) -> None:
    """Without a terminal; with nohup also if it had one."""
    command = [sys.executable, "-c", _SERVER, how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, start_new_session=True, check=False)
    assert done.stdout.split() == ["reloaded", "runs"], done.stderr


@pytest.fixture
def live() -> Iterator[LiveSettings]:
    """Settings that this process follows, as a supervisor does."""
    hooks, level, handler = list(logs._HOOKS), level_now(), signal.signal(signal.SIGHUP, lambda *_: None)
    made = LiveSettings({"log_level": "info", "slow_ms": 0, "move_mib_s": 9})
    made.follow("log_level", set_level)
    yield made
    signal.signal(signal.SIGHUP, handler)
    logs._HOOKS[:] = hooks
    set_level(level)


def test_issue_one_that_came_before_a_child_listens_counts(live: LiveSettings) -> None:
    """Of a change while a worker recovered its arena, or a stream began, it learned by the next one only."""
    loop = Loop()

    def body(supervisor: socket.socket) -> None:
        plain = Served._timed
        follow_in_stream(live)
        supervisor.sendall(b"begun")
        supervisor.recv(1)
        stop_on_signals(mine := Loop())
        mine.run_once(0.0)
        supervisor.sendall(f"{level_now()}, {'all' if Served._timed is plain else 'slow ones'}".encode())

    child = Children(loop, lambda: ()).fork(body, [])
    try:
        assert child.sock.recv(100) == b"begun"
        live.set("log_level", "debug")
        live.set("slow_ms", "1")
        os.kill(child.pid, signal.SIGHUP)
        child.sock.sendall(b"x")
        assert child.sock.recv(100) == b"debug, slow ones"
    finally:
        end_children([child], 0.0)
        loop.close()


def test_issue_one_that_came_before_a_mover_listens_counts(live: LiveSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[int] = []

    class Mover(SimpleNamespace):
        values = bytes = lost = 0
        bucket = SimpleNamespace(set_rate=rates.append)

        def run(self) -> bool:
            assert level_now() == "debug" and rates == [7 << 20]
            return True

        def close(self) -> None:
            pass

    def made(*_: Any) -> Mover:
        live.set("move_mib_s", "7")
        return Mover()

    live.set("log_level", "debug")
    monkeypatch.setattr(migration, "Mover", made)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    migration.run_mover(SimpleNamespace(live=live, worker=0), None)  # type: ignore[arg-type]
    assert rates, "it ran"

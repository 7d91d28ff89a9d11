"""SIGHUP to a server that was started by nohup: settings and quotas that have changed reach it by that signal."""

from __future__ import annotations

import subprocess
import sys

import pytest

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

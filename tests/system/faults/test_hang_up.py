"""A closed terminal sends SIGHUP to a server and to all its children: a clean stop, as by SIGTERM.

Without a terminal, or while it is open, SIGHUP asks for new log files, see ``tests/system/test_logs.py``.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence

from tests.support.child import THIS_HOST, Place
from tests.support.fleet import Fleet
from tests.support.left_arenas import segments
from tests.support.waiting import wait_until

#: The leader of a session gets the terminal that it opens first.
_IN_TERMINAL = "import os, sys; os.open(sys.argv[1], os.O_RDWR); os.execv(sys.argv[2], sys.argv[2:])"


class Terminal(Place):
    """This host, with a terminal of its own for what runs there."""

    def __init__(self) -> None:
        self.master, self._slave = os.openpty()

    def command(self, words: Sequence[str]) -> list[str]:
        return [sys.executable, "-c", _IN_TERMINAL, os.ttyname(self._slave), *words]

    def close(self) -> None:
        """Hang up."""
        os.close(self.master)
        os.close(self._slave)


def test_issue_a_data_server_stops_cleanly(make_fleet: Callable[..., Fleet]) -> None:
    terminal = Terminal()
    fleet = make_fleet(1, memory="16M", places=[THIS_HOST, terminal])
    server = fleet.servers[0]
    assert segments(server.name)
    server.send_signal(signal.SIGHUP)
    wait_until(lambda: "the log file was opened anew" in fleet.logs(), "the terminal is open: nobody has hung up")
    terminal.close()
    assert server.wait() == 0
    assert not segments(server.name)
    assert "restarting" not in fleet.logs()
    fleet.assert_no_traceback()

"""A closed terminal sends SIGHUP to a server and to all its children: a clean stop, as by SIGTERM."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from tests.support.fleet import Fleet
from tests.support.left_arenas import segments


@pytest.mark.parametrize("family", [False, True])
def test_issue_a_data_server_stops_cleanly(make_fleet: Callable[..., Fleet], family: bool) -> None:
    fleet = make_fleet(1, memory="16M")
    server = fleet.servers[0]
    assert segments(server.name)
    server.send_signal(signal.SIGHUP, family=family)
    assert server.wait() == 0
    assert not segments(server.name)
    assert "restarting" not in fleet.logs()
    fleet.assert_no_traceback()

"""SIGTERM to a data server whose hundred clients are in the middle of calls, and whose manager is gone."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import psutil
import pytest

from tests.support.child import Child, module_command, stopped
from tests.support.fleet import Fleet, Server
from tests.support.left_arenas import segments
from tests.support.pace import Pace
from tests.support.waiting import wait_until

CLIENTS = 100
#: A data server ends within this time, seconds.
END_S = 15.0


def end(server: Server, crowd: Child, what: str) -> None:
    """SIGTERM it while clients put and get; it ends soon, with code 0, and nothing of it is left."""
    family = server.family()
    before = crowd.ask("count")["done"]
    wait_until(lambda: crowd.ask("count")["done"] > before + CLIENTS, "they are in the middle of calls", pause_s=0.05)
    with Pace() as pace:
        took = server.end()
    wait_until(lambda: not [each for each in family if each.is_running()], "no child is left, not even as a zombie")
    assert not segments(server.name) and not os.path.exists(server.uds())
    pace.check(f"SIGTERM with {CLIENTS} clients and a manager that is {what}: ended after", took, END_S)


@pytest.mark.fault("F25", ci=1, whole=25)
def test_sigterm_with_clients_and_without_a_manager(make_fleet: Callable[..., Fleet], amount: int) -> None:
    fleet = make_fleet(2, memory="32M", heartbeat_ms=200)
    for number in range(amount):
        if number:
            fleet.manager.start()
            for server in fleet.servers:
                server.start()
            fleet.wait_settled()
        settings = json.dumps({"kind": "busy", "count": CLIENTS, "manager": fleet.manager.address})
        with Child(module_command("tests.system.faults.crowd", settings), name="crowd", talks=True) as crowd:
            assert crowd.answer()["open"] == CLIENTS
            with stopped(psutil.Process(fleet.manager.pid)):
                end(fleet.servers[0], crowd, "stopped")
            fleet.manager.kill()
            end(fleet.servers[1], crowd, "killed")
            said = crowd.ask("close")
        assert not said["wrong"] and not said["raised"] and said["done"] > CLIENTS, said

"""A manager whose disk stands still serves its cluster all the same."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

from simm.client import Client
from tests.support.fleet import Fleet
from tests.support.processes import new_folder
from tests.support.waiting import wait_until

KEYS = [f"key{number}" for number in range(200)]


def test_a_stuck_fsync_stops_neither_moves_nor_clients(nothing_is_left: Path) -> None:
    folder = new_folder()
    stuck = folder / "stuck"
    with Fleet(folder, 2, heartbeat_ms=1000, patches=[f"fsync={stuck}"]) as fleet:
        second = fleet.servers[1]
        with Client(fleet.manager.address, deadline_s=30.0) as client:
            assert all(client.put_many(KEYS, [key.encode() for key in KEYS]))
            second.end()
            wait_until(lambda: fleet.settled(1), "one server has all shards")
            stuck.touch()
            try:
                second.start()
                fleet.wait_settled("the other one has its share again, though nothing can be stored")
                assert stored(fleet) is False
                with Client(fleet.manager.address, deadline_s=30.0) as other:
                    assert all(other.put_many(KEYS, [key.encode() * 2 for key in KEYS]))
                assert client.get_many(KEYS) == [key.encode() * 2 for key in KEYS]
            finally:
                stuck.unlink()
            wait_until(lambda: stored(fleet), "all is stored")
            epoch = fleet.manager_epoch()
            fleet.manager.kill()
            fleet.manager.start()
            wait_until(lambda: fleet.settled(2), "the manager that was killed knows both servers")
            assert fleet.manager_epoch() >= epoch
            assert client.get_many(KEYS) == [key.encode() * 2 for key in KEYS]

            # It stops while the disk stands still: whoever connects is refused at once, and goes to another manager.
            stuck.touch()
            try:
                second.end()  # a change that is to be stored
                fleet.manager.send_signal(signal.SIGTERM)
                host, _, port = fleet.manager.address.rpartition(":")
                wait_until(lambda: refused(host, int(port)), "its listener is closed")
                assert fleet.manager.running, "it waits for what it stores"
            finally:
                stuck.unlink()
            assert fleet.manager.wait() == 0


def stored(fleet: Fleet) -> bool:
    """Whether all that the manager knows is stored, as soon as it says so."""
    status = wait_until(fleet.status, "the manager answers")
    return bool(status["manager"]["state_stored"])


def refused(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), 1.0).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False  # the listener went while it had this connection
    return False

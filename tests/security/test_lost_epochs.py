"""What a peer has made of the epochs locks no server out, whatever the manager forgets."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from simm.client import Client
from simm.constants import SHARD_COUNT
from simm.control.state_file import StateFile
from simm.net.channel import Channel, Refused
from simm.wire import messages as M
from simm.wire.hello import client_hello
from simm.wire.shard_set import BLANK_LIMIT, EPOCHS_AHEAD, bitmap_of
from tests.support.fleet import Fleet
from tests.support.processes import new_folder
from tests.support.waiting import WAIT_S, wait_until

EVERY = bitmap_of(range(SHARD_COUNT))


def freeze(fleet: Fleet, ahead: int) -> int:
    """Freeze all shards of the first server as a mover would, by an epoch so far ahead; return that."""
    reply = fleet.ask_manager(M.MapGet(0, 0))
    wait_until(lambda: frozen(fleet, ahead, reply), "the server has the map that is gone beyond")
    return int(reply.epoch) + ahead


def frozen(fleet: Fleet, ahead: int, reply: M.MapReply) -> bool:
    """Return False if the server does not believe in the epoch, as it does not have the newest map yet."""
    with contextlib.closing(Channel.tcp(reply.workers[0].host, reply.workers[0].port, WAIT_S)) as channel:
        channel.call(client_hello(M.Role.MOVER, namespace="default"))
        try:
            return isinstance(channel.call(M.Freeze(reply.epoch + ahead, EVERY)), M.Frozen)
        except Refused as refused:
            assert "no map has epoch" in str(refused)
            return False


def driven_beyond(fleet: Fleet, epoch: int) -> None:
    wait_until(lambda: fleet.manager_epoch() > epoch, "the manager goes beyond it")


@pytest.mark.quick
def test_a_manager_that_lost_its_state_takes_servers_of_a_high_epoch(nothing_is_left: Path) -> None:
    """They drop their values. But they do not stay outside for ever."""
    with Fleet(new_folder(), 1, heartbeat_ms=100) as fleet, Client(fleet.manager.address, deadline_s=WAIT_S) as client:
        assert client.put("before", b"value")
        driven_beyond(fleet, freeze(fleet, EPOCHS_AHEAD - 1000))
        fleet.manager.kill()
        with contextlib.closing(StateFile(fleet.folder / "state", "manager")) as stored:
            state = stored.load()
            state["epochs_reserved"] += 2 * BLANK_LIMIT  # as if a thousand peers had done so
            stored.save(state)
        fleet.manager.start()
        wait_until(lambda: fleet.status().get("epoch", 0) > BLANK_LIMIT, "the manager goes on from there")
        fleet.wait_settled("the server has a map of there")
        fleet.manager.kill()
        (fleet.folder / "state" / "manager.json").unlink()
        fleet.manager.start()
        fleet.wait_settled("the server is in the cluster again")
        wait_until(lambda: client.put("after", b"value") and client.get("after") == b"value", "the client stores")
        assert client.get("before") is None, "its values are dropped"

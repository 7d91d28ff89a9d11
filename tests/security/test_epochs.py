"""No peer drives an epoch to where no map can follow."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from simm.client import Client
from simm.constants import SHARD_COUNT
from simm.errors import TransportError
from simm.net.channel import Channel, Refused
from simm.sdk.manager_link import ManagerClient
from simm.wire import messages as M
from simm.wire.hello import client_hello
from simm.wire.messages import MapReply, Status
from simm.wire.shard_set import BLANK_LIMIT, EPOCH_MASK, EPOCHS_AHEAD, bitmap_of
from tests.support.manager_process import WAIT_S, Process, owners, workers
from tests.support.processes import Cluster
from tests.support.waiting import wait_until

EVERY = bitmap_of(range(SHARD_COUNT))
#: As epochs, what no cluster reaches.
ABSURD = (1 << 43, (1 << 43) + 1, 1 << 60, EPOCH_MASK, EPOCH_MASK + 1, (1 << 64) - 1)


def map_of(cluster: Cluster) -> MapReply:
    host, _, port = cluster.manager.rpartition(":")
    with ManagerClient([(host, int(port))], deadline_s=WAIT_S) as link:
        return link.call(M.MapGet(0, 0), MapReply)


@contextlib.contextmanager
def mover(cluster: Cluster) -> Iterator[Channel]:
    """A connection to the server's stream that says it is a mover's."""
    (info,) = map_of(cluster).workers
    with contextlib.closing(Channel.tcp(info.host, info.port, WAIT_S)) as channel:
        channel.call(client_hello(M.Role.MOVER, namespace="default"))
        yield channel


def stores(client: Client, key: str) -> bool:
    return client.put(key, b"value") and client.get(key) == b"value"


def test_a_server_is_not_frozen_for_good(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster()
    with Client(cluster.manager, deadline_s=WAIT_S) as client:
        wait_until(lambda: stores(client, "before"), "the server stores")
        for epoch in (*ABSURD, map_of(cluster).epoch + EPOCHS_AHEAD + 1):
            with mover(cluster) as channel, pytest.raises(TransportError):
                channel.call(M.Freeze(epoch, EVERY))
            assert client.put("after", b"value"), epoch
        assert client.get("before") == b"value"


@pytest.mark.quick
def test_what_was_frozen_by_a_map_that_nobody_has_thaws(make_cluster: Callable[..., Cluster]) -> None:
    """The manager learns of the epoch from the server, and goes beyond it."""
    cluster = make_cluster()
    with Client(cluster.manager, deadline_s=WAIT_S) as client:
        wait_until(lambda: stores(client, "before"), "the server stores")
        false = map_of(cluster).epoch + 1000
        with mover(cluster) as channel:
            assert isinstance(channel.call(M.Freeze(false, EVERY)), M.Frozen)
        wait_until(lambda: map_of(cluster).epoch > false, "the manager goes beyond it")
        wait_until(lambda: stores(client, "after"), "the server stores again")
        with mover(cluster) as channel, pytest.raises(Refused) as refused:
            channel.call(M.Freeze(false + 1, EVERY))  # the server's map is as new: no other one would come
        assert refused.value.status == Status.WRONG_OWNER
        assert client.get("after") == b"value" and client.put("last", b"value")


@pytest.mark.quick
@pytest.mark.parametrize("blank", [True, False])
def test_no_peer_drives_the_manager_s_epoch(run: Callable[..., Process], blank: bool) -> None:
    process = run(None, "--heartbeat-ms", "50")
    with process.client(deadline_s=WAIT_S) as server, process.client(deadline_s=WAIT_S) as peer:
        if not blank:
            server.join(1, "a", workers())
            server.heartbeat(1, "a", server.get_map().epoch)
        before = peer.get_map().epoch
        for epoch in (1000, EPOCHS_AHEAD, *ABSURD):
            assert peer.get_map(epoch).epoch == before
        for epoch in (*ABSURD, BLANK_LIMIT + 1 if blank else before + EPOCHS_AHEAD + 1):
            with pytest.raises(Refused) as caught:
                peer.join(2, "b", workers(), epoch=epoch)
            assert caught.value.status == Status.OTHER_CLUSTER
        server.join(1, "a", workers())
        for epoch in ABSURD:
            server.heartbeat(1, "a", epoch)
            assert server.get_map(epoch).epoch <= before + 2
        wait_until(lambda: set(owners(server.get_map())) == {"a"}, "it has all shards")


def test_a_member_that_knows_of_a_later_epoch_is_believed_within_a_bound(run: Callable[..., Process]) -> None:
    with run().client() as server:
        server.join(1, "a", workers())
        epoch = server.get_map().epoch
        raised = server.get_map(epoch + 1000).epoch
        assert EPOCHS_AHEAD // 8 < raised - (epoch + 1000) <= EPOCHS_AHEAD // 4
        assert server.get_map(raised + EPOCHS_AHEAD + 1).epoch == server.get_map(raised).epoch == raised

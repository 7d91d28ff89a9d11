"""By RDMA, too, a batch is with all its workers before it waits for any, and waits for nothing that others wait for."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from simm.client import Client
from simm.errors import TransportError
from simm.ipc.grant_pool import RoomWait
from simm.ipc.patience import Patience
from simm.ipc.steps import PolledFor, Steps, finish
from simm.net.channel import ChannelWait
from simm.rdma.staging import BLOCK_BYTES, StagingBuffer, StagingPool
from simm.sdk import rdma_pool
from simm.sdk.batch import PutBatch
from simm.sdk.rdma_connection import RdmaConnection
from simm.sdk.rdma_pool import Hold, RdmaPath
from simm.sdk.rdma_put import Writing
from simm.sdk.rdma_transfer import Transfer
from simm.wire.messages import Status
from tests.support.cluster_clients import WAIT_S, one_after_the_other, value_of
from tests.support.fake_rdma_cluster import FakeRdmaCluster, path_of
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("nothing_retired")

NODES = 4
KEYS = [f"k{number}" for number in range(20)]
VALUES = [value_of(key) for key in KEYS]
ALL_TRUE = [True] * len(KEYS)
CALLS: dict[str, Callable[[Client], list[bool]]] = {
    "put": lambda client: client.put_many(KEYS, VALUES),
    "get": lambda client: [got == value for got, value in zip(client.get_many(KEYS), VALUES)],
    "exists": lambda client: client.exists_many(KEYS),
}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRdmaCluster]:
    with FakeRdmaCluster(monkeypatch, nodes=NODES) as running:
        yield running


def filled(cluster: FakeRdmaCluster) -> Client:
    client = cluster.rdma()
    assert CALLS["put"](client) == ALL_TRUE
    client._counters.update(rdma_fallbacks=0)
    return client


def by_rdma_alone(cluster: FakeRdmaCluster, client: Client) -> bool:
    """Return whether nothing went by TCP, and no path was given up."""
    return not client.counters["rdma_fallbacks"] and all(
        path_of(client, number).down_reason is None for number in range(NODES)
    )


@pytest.mark.parametrize("way", ["together", "control"])
@pytest.mark.parametrize("call", CALLS)
def test_all_transfers_begin_before_one_has_ended(
    cluster: FakeRdmaCluster, call: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = filled(cluster)
    events: list[str] = []
    begin, give_back = Transfer.begin, RdmaPath.give_back

    def noted_begin(self: Transfer, connection: RdmaConnection, until: float) -> None:
        events.append("begin")
        begin(self, connection, until)

    def noted_give_back(self: RdmaPath, hold: Hold) -> None:
        if threading.current_thread() is threading.main_thread():
            events.append("end")
        give_back(self, hold)

    monkeypatch.setattr(Transfer, "begin", noted_begin)
    monkeypatch.setattr(RdmaPath, "give_back", noted_give_back)
    if way == "control":
        monkeypatch.setattr(Patience, "together", one_after_the_other)
    assert CALLS[call](client) == ALL_TRUE
    assert events == (["begin"] * NODES + ["end"] * NODES if way == "together" else ["begin", "end"] * NODES)
    assert by_rdma_alone(cluster, client)


@pytest.mark.parametrize("way", ["in steps", "control"])
@pytest.mark.parametrize("call", ["put", "get"])
def test_staging_memory_for_one_transfer_is_enough(
    cluster: FakeRdmaCluster, call: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transfer that waited for blocks by itself would keep the thread from the one that has them."""
    client = filled(cluster)
    pool = StagingPool(BLOCK_BYTES)
    for number in range(NODES):
        path_of(client, number).staging = pool
    if way == "control":

        def borrow(self: Transfer) -> Steps[None]:
            if not pool.has_blocks:
                raise TransportError("it has waited in vain for its whole deadline")
            self.borrow()
            yield from ()

        monkeypatch.setattr(Transfer, "_borrow", borrow)
    assert CALLS[call](client) == ALL_TRUE
    assert by_rdma_alone(cluster, client) == (way == "in steps")
    pool.close()


def test_two_threads_with_a_connection_each_do_not_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has the connection that the other one wants next."""
    monkeypatch.setattr(rdma_pool, "CONNECTIONS_MAX", 1)
    with FakeRdmaCluster(monkeypatch, nodes=2, background=True) as cluster:
        client = cluster.rdma(deadline_s=4 * WAIT_S)
        assert client.put_many(KEYS, VALUES) == ALL_TRUE
        both, begin = threading.Barrier(2), Transfer.begin
        holders: set[int] = set()
        results: list[list[bool]] = []

        def begin_together(self: Transfer, connection: RdmaConnection, until: float) -> None:
            if threading.get_ident() not in holders:
                holders.add(threading.get_ident())
                both.wait(WAIT_S)
            begin(self, connection, until)

        monkeypatch.setattr(Transfer, "begin", begin_together)
        first = {client._routes.target(client.digest(key)): key for key in KEYS}  # a key of each node
        orders = [list(first.values()), list(first.values())[::-1]]
        threads = [
            threading.Thread(target=lambda keys=keys: results.append(client.exists_many(keys))) for keys in orders
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert not any(thread.is_alive() for thread in threads) and results == [[True, True]] * 2


def test_a_server_that_does_not_answer_fails_its_own_keys_alone(cluster: FakeRdmaCluster) -> None:
    filled(cluster)
    client = cluster.rdma(deadline_s=6.0)
    owner = {key: client._routes.target(client.digest(key)).info.node for key in KEYS}  # type: ignore[union-attr]
    silent = cluster.nodes[1]
    with silent.worker.frozen():
        results = client.put_many(KEYS, VALUES)
    assert [stored for key, stored in zip(KEYS, results) if owner[key] != silent.name] == [True] * sum(
        name != silent.name for name in owner.values()
    )


def put_in_steps(client: Client, statuses: list[int]) -> tuple[Writing, Steps[list[int]]]:
    """Begin to put a value of the first node, as a call to several servers does."""
    target = next(iter(client._router.targets.values()))
    digest = next(each for each in map(client.digest, KEYS) if client._routes.target(each) is target)
    batch = PutBatch([digest], [memoryview(bytes(4096))], statuses, RoomWait(0.0))
    writing = Writing(batch, client._copier, False)
    return writing, writing.run(path_of(client), [0], Counter[str]())


@pytest.mark.parametrize("held_up_at", ["the last chain", "the commit", "control"])
def test_a_put_goes_on_after_other_work_has_held_up_the_thread(cluster: FakeRdmaCluster, held_up_at: str) -> None:
    """Its connection kept the old time limit: the commit was sent and its answer not taken, and the path was lost."""
    client, statuses = cluster.rdma(), [int(Status.UNAVAILABLE)]
    writing, steps = put_in_steps(client, statuses)
    wait = next(steps)
    assert not isinstance(wait, ChannelWait)
    if held_up_at == "the commit":
        wait_until(wait.ready, "the chain is done")
        wait = steps.send(True)
        assert isinstance(wait, ChannelWait)
    channel = writing.connection.channel
    past = time.monotonic() - 1.0
    writing.until = past
    channel.bound(past)
    channel.until = min(channel.until, past)
    wait_until(wait.ready, "the answer is there")
    if held_up_at != "control":
        wait.extend(time.monotonic() + WAIT_S)
    # The control fails, as the wait after this one is over at its begin, and its answer is not there yet.
    with contextlib.ExitStack() as silent:
        if held_up_at == "control":
            for node in cluster.nodes:
                silent.enter_context(node.worker.frozen())
        assert finish(steps) == [] and (statuses == [Status.OK]) == (held_up_at != "control")
    assert (path_of(client).down_reason is None) == (held_up_at != "control")


@pytest.mark.parametrize("lacks", ["a connection", "blocks"])
@pytest.mark.parametrize("way", ["extended", "control"])
def test_what_was_waited_for_is_of_use_after_other_work(
    cluster: FakeRdmaCluster, lacks: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transfer began with a time limit that was over, and lost a sound connection, and with it the path."""
    monkeypatch.setattr(rdma_pool, "CONNECTIONS_MAX", 1)
    client, statuses = cluster.rdma(), [int(Status.UNAVAILABLE)]
    path, taken = path_of(client), list[StagingBuffer]()
    path.staging = pool = StagingPool(BLOCK_BYTES)
    held = path.acquire(time.monotonic() + WAIT_S)
    if lacks == "blocks":
        path.release(held)
        pool.take(1, time.monotonic() + WAIT_S, taken)
    writing, steps = put_in_steps(client, statuses)
    wait = next(steps)
    assert isinstance(wait, PolledFor) and not wait.ready()
    writing.until = time.monotonic() - 1.0
    if lacks == "blocks":
        pool.give_back(taken)
    else:
        path.release(held)
    wait_until(wait.ready, "it is there")
    if way == "extended":
        wait.extend(time.monotonic() + WAIT_S)
    finish(steps)
    assert (statuses == [Status.OK]) == (path.down_reason is None) == (way == "extended")
    pool.close()

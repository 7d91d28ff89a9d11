"""What a stream does for clients that only look: no value counts as got, nor as used."""

from __future__ import annotations

import pytest

from simm.ipc.counts import GET, GET_MANY, TIMED, Word
from simm.ipc.steps import finish
from simm.net.channel import Refused
from simm.wire import messages as M
from simm.wire.messages import Status
from tests.support.fake_cluster import ALL, FakeCluster, Node
from tests.support.waiting import wait_until
from tests.support.worker_thread import StreamThread, WorkerThread

KEYS = [f"k{number}" for number in range(8)]


def used(node: Node, digests: list[bytes], *, forget: bool = False) -> list[int]:
    """Return the bytes that say which of these values have been used of late; ``forget`` that."""
    reader = node.stream.stream.keeper.reader
    assert reader is not None
    slots = reader.slots_of_many(digests)
    assert min(slots) >= 0
    for slot in slots if forget else ():
        reader.visited[slot] = 0
    return [reader.visited[slot] for slot in slots]


def test_issue_an_estimate_is_no_get() -> None:
    """It counted each stored key as one of a wrong size, each other as absent, and made all of them younger."""
    with FakeCluster(1) as cluster:
        cluster.settled({0: ALL})
        (node,), client = cluster.nodes, cluster.client("tcp")
        assert client.put_many(KEYS, [bytes(100)] * len(KEYS)) == [True] * len(KEYS)
        digests = [client.digest(key) for key in KEYS]
        assert used(node, digests, forget=True) == [0] * len(KEYS)
        counted = node.stream.stream.counted
        assert client.load_ms([*KEYS, "no"]) > 0.0
        assert used(node, digests) == [0] * len(KEYS)
        assert not {TIMED[GET], TIMED[GET_MANY]} & counted.latencies.keys()
        assert client.get_many([*KEYS, "no"]) == [bytes(100)] * len(KEYS) + [None]
        counts = counted.namespaces["default"]
        wait_until(lambda: counts[Word.BATCH_HITS] == len(KEYS) and counts[Word.ABSENT], "counted after the answers")
        assert (counts[Word.ABSENT], counts[Word.WRONG_SIZE]) == (1, 0)
        # The control. The worker takes such a byte back when it has noted it.
        wait_until(lambda: client.get_many(KEYS) and used(node, digests) == [1] * len(KEYS), "they count as used")


def test_issue_what_misses_of_a_get_mean_is_counted() -> None:
    """A client whose values go by RDMA alone asks so for what it has not found there."""
    with FakeCluster(1) as cluster:
        cluster.settled({0: ALL})
        (node,), client = cluster.nodes, cluster.client("tcp")
        assert client.put("one byte", b"1") and client.put("more", b"22")
        (target,) = client._router.targets.values()
        digests = [client.digest(key) for key in ("one byte", "more", "no")]
        used(node, digests[:2], forget=True)
        counts = node.stream.stream.counted.counters("default")
        for room, absent in ((0, 0), (1, 1)):
            answers = finish(target.tcp.resolve_misses(digests, False, room))
            assert answers == [(Status.OK, 0), (Status.OK, 0), (Status.NOT_FOUND, 0)]
            assert client.get("no") is None  # by the same connection: what came before is counted
            wait_until(lambda absent=absent, room=room: counts[Word.ABSENT] == absent + room + 1, "it is counted")  # type: ignore[misc]
        assert not counts[Word.WRONG_SIZE] and used(node, digests[:2]) == [0, 0], "a get of them has failed otherwise"


def test_a_namespace_that_no_worker_takes_is_refused_at_once() -> None:
    with WorkerThread() as worker, StreamThread(worker.path) as stream:
        with pytest.raises(Refused, match="1 to 64 bytes") as caught:
            stream.channel(namespace="n" * 65)
        assert caught.value.status == Status.BAD_REQUEST
        channel = stream.channel(namespace="n" * 64)
        assert channel.call(M.Ping(1)) == M.Pong(1)
        channel.close()

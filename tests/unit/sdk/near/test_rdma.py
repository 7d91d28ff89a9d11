"""Near copies of a client that reaches other hosts by RDMA, on a fabric in software: made, read and dropped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from simm.sdk.near.copies import Near, NearPuts
from simm.sdk.reads import Gets
from simm.sdk.tracing import switch
from simm.sdk.writes import Puts
from simm.tracing.spans import Decision, Recorder
from tests.support.fake_rdma_cluster import FakeRdmaCluster
from tests.support.several_hosts import HostClient, separate
from tests.support.waiting import wait_until

COUNT = 6


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRdmaCluster]:
    separate(monkeypatch)
    with FakeRdmaCluster(monkeypatch, 2, size=32 << 20) as made:
        yield made


def on_host(cluster: FakeRdmaCluster, home: int) -> HostClient:
    """A client on the host of a node, which reaches the other node by RDMA."""
    client = HostClient(
        cluster.nodes[home].info.node, "{}:{}".format(*cluster.manager.address), path="auto", near_copies=True,
        deadline_s=30.0,
    )  # fmt: skip
    cluster.clients.append(client)

    def up() -> bool:
        for target in client._router.targets.values():  # type: ignore[union-attr]
            target.ready()
        return sorted(worker["path"] for worker in client.stats()["workers"]) == ["rdma", "shm"]

    wait_until(up, lambda: f"one by shared memory, one by RDMA: {client.stats()['workers']}")
    return client


def far_keys(client: HostClient, name: str = "key") -> list[str]:
    """Return keys whose owner is elsewhere."""
    found: list[str] = []
    for number in range(10_000):
        target = client._routes.target(client.digest(f"{name} {number}"))
        if target is not None and target.reader is None:
            found.append(f"{name} {number}")
            if len(found) == COUNT:
                return found
    raise AssertionError("no such keys")


def values(version: int = 0) -> list[bytes]:
    return [bytes([version, number]) * (3000 + number) for number in range(COUNT)]


def near_of(client: HostClient) -> Near:
    assert client._near is not None
    return client._near


def copied(client: HostClient, count: int) -> None:
    """Wait until so many values have been copied or dropped, and nothing waits."""

    def done() -> bool:
        made = client.counters["near_copies"] + client.counters["near_dropped"]
        return made >= count and not len(near_of(client)._promotion)

    wait_until(done, lambda: f"{client.counters}")


def with_copies(cluster: FakeRdmaCluster) -> tuple[HostClient, list[str]]:
    """A client whose values of the other host have copies here: some by prefetch, others by their second hit."""
    client = on_host(cluster, 0)
    keys = far_keys(client)
    assert client.put_many(keys, values()) == [True] * COUNT and client.stats()["rdma_puts"] == COUNT
    assert client.prefetch(keys[:2]) == 2
    copied(client, 2)
    own = near_of(client)._plain.counters
    assert own["rdma_gets"] == 2, "what was copied has come by RDMA"
    for _ in range(2):
        assert client.get_many(keys[2:]) == values()[2:]
    copied(client, COUNT)
    assert client.counters["near_copies"] == COUNT and own["rdma_gets"] == COUNT
    assert client.counters["rdma_gets"] == 2 * (COUNT - 2) and client.counters["near_hits"] == 0
    return client, keys


def test_copies_come_by_rdma_and_are_read_here(cluster: FakeRdmaCluster) -> None:
    client, keys = with_copies(cluster)
    reads = client.counters["rdma_gets"]
    assert client.get_many(keys) == values()
    part = bytearray(100)
    for key, value in zip(keys, values()):
        room = client.register(bytearray(len(value)))  # memory that RDMA could read into
        assert client.get_into(key, room) == len(value) and bytes(room.view()) == value
        assert client.get_ranges(key, [(2000, 100, part)]) == len(value) and part == value[2000:2100]
    assert client.counters["near_hits"] == 3 * COUNT
    assert client.counters["rdma_gets"] == reads, "no READ was posted for what is here"
    other = on_host(cluster, 0)
    assert other.get_many(keys) == values() and other.counters["near_hits"] == COUNT, "all processes find them"


def test_copies_are_read_without_the_owners_endpoint(cluster: FakeRdmaCluster) -> None:
    client, keys = with_copies(cluster)
    cluster.nodes[1].endpoint.stop()
    try:
        assert client.get_many(keys) == values() and client.counters["near_hits"] == COUNT
    finally:
        cluster.nodes[1].endpoint.start()


def test_a_delete_on_the_owners_host_drops_them(cluster: FakeRdmaCluster) -> None:
    """The copies are elsewhere for who deletes: it reaches them by messages to each worker."""
    client, keys = with_copies(cluster)
    owner = on_host(cluster, 1)
    assert owner.delete_many(keys) == [True] * COUNT
    assert client.get_many(keys) == [None] * COUNT
    assert owner.put_many(keys, values(1)) == [True] * COUNT
    assert client.get_many(keys) == values(1) and client.counters["near_hits"] == 0


def test_a_delete_here_drops_them(cluster: FakeRdmaCluster) -> None:
    client, keys = with_copies(cluster)
    assert client.delete_many(keys) == [True] * COUNT
    assert client.get_many(keys) == [None] * COUNT
    assert client.put_many(keys, values(1)) == [True] * COUNT
    assert client.get_many(keys) == values(1) and client.counters["near_hits"] == 0


@pytest.mark.parametrize("test", [test_a_delete_on_the_owners_host_drops_them, test_a_delete_here_drops_them])
def test_without_that_the_value_before_is_found(
    cluster: FakeRdmaCluster, monkeypatch: pytest.MonkeyPatch, test: Any
) -> None:
    monkeypatch.setattr(NearPuts, "delete", Puts.delete)
    with pytest.raises(AssertionError):
        test(cluster)


def test_what_is_deleted_while_it_is_copied_leaves_no_copy(
    cluster: FakeRdmaCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The value has been read by RDMA, and is gone before its copy is stored."""
    client, owner = on_host(cluster, 0), on_host(cluster, 1)
    keys = far_keys(client)
    assert client.put_many(keys, values()) == [True] * COUNT
    real = Near._values

    def then_gone(self: Near, digests: Any, scratch: Any) -> Any:
        found = [*real(self, digests, scratch)]  # read, all of them
        assert owner.delete_many(keys) == [True] * COUNT
        return found

    monkeypatch.setattr(Near, "_values", then_gone)
    assert client.prefetch(keys) == COUNT
    copied(client, COUNT)
    assert client.counters["near_copies"] == 0 and client.counters["near_dropped"] == COUNT
    assert client.get_many(keys) == [None] * COUNT and client.counters["near_hits"] == 0


def test_without_the_second_question_they_stay(cluster: FakeRdmaCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    monkeypatch.setattr(Gets, "stored_many", lambda _, digests, *__: [True] * len(digests))
    with pytest.raises(AssertionError):
        test_what_is_deleted_while_it_is_copied_leaves_no_copy(cluster, monkeypatch)


def test_a_trace_has_the_copies_that_are_read_made_and_dropped(cluster: FakeRdmaCluster) -> None:
    client = on_host(cluster, 0)
    keys = far_keys(client)
    assert client.put_many(keys, values()) == [True] * COUNT
    near = near_of(client)
    plain = [type(part) for part in (client._gets, client._puts, near, near._put)]
    switch.switch_on(client, Decision(1.0, recorder := Recorder()))
    try:
        assert client.prefetch(keys) == COUNT
        copied(client, COUNT)
        assert client.get_many(keys) == values() and client.counters["near_hits"] == COUNT
        assert all(client.delete_many(keys[:2])) and client.get(keys[0]) is None
    finally:
        switch.switch_off(client)
    assert [type(part) for part in (client._gets, client._puts, near, near._put)] == plain
    # The thread that copies ends its operation after what the counters tell.
    ended = recorder.take()

    def told() -> bool:
        ended.extend(recorder.take())
        return sum(each.about["keys"] for each in ended if each.name == "promote") >= COUNT

    wait_until(told, "all copies")

    def segments(name: str) -> set[str]:
        return {segment.name for each in ended if each.name == name for segment in each.segments if not segment.pid}

    assert {"rdma", "lookup", "fetch", "copy", "commit"} <= segments("promote")
    assert {"near", "locate", "copy", "confirm"} <= segments("get") and "near" in segments("delete")
    promoted = [each.about for each in ended if each.name == "promote"]
    assert sum(about["keys"] for about in promoted) == sum(about["done"] for about in promoted) == COUNT
    (whole,) = (each for each in ended if each.name == "get" and each.about["keys"] == COUNT)
    assert whole.about["path"] == "shm" and whole.about["done"] == COUNT
    assert client.get_many(keys[2:]) == values()[2:] and not recorder.take(), "without traces nothing is noted"

"""Values in parts that are pinned: by each path, with little room, beside changes of the key, and released."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from simm.arena.hashing import shard_of
from simm.client import Client
from simm.errors import UsageError
from simm.ipc.steps import Steps
from simm.net.channel import Channel
from simm.sdk.large import pinned as pinned_module
from simm.sdk.large.manifest import Manifest
from simm.sdk.ops.pins import Pins
from simm.sdk.tcp import TcpPath
from simm.server.stream_get import Leases
from simm.testing import FakeClient
from simm.wire.messages import Status
from tests.support.client_values import pattern
from tests.support.cluster_clients import WAIT_S
from tests.support.fake_cluster import ALL, FakeCluster
from tests.support.small_limits import MOST, PART, small_limits
from tests.support.waiting import wait_until

SIZE = 20 * PART + 9

pytestmark = pytest.mark.usefixtures("nothing_retired")


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with small_limits(), FakeCluster(2) as made:
        made.settled({0: [*ALL][::2], 1: [*ALL][1::2]})
        yield made


@pytest.fixture(params=["shm", "tcp"])
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def stored(cluster: FakeCluster, path: str) -> Client:
    """A client by a path that has stored two values in parts, and an ordinary one."""
    client = cluster.client(path=path)
    assert client.put_many(["one", "two", "small"], [pattern(SIZE, 1), pattern(SIZE, 2), pattern(99)]) == [True] * 3
    return client


def pinned(cluster: FakeCluster) -> int:
    """How many pins there are at all nodes."""
    count = 0
    for node in cluster.nodes:
        with node.worker.frozen() as store:
            count += int(store.stats()["pins"])
    return count


def whole(pins: Pins, key: str) -> bytes | None:
    """Read a value in ranges that cross its parts."""
    room = bytearray(SIZE)
    ranges = [(at, min(300, SIZE - at), memoryview(room)[at : at + 300]) for at in range(0, SIZE, 300)]
    return None if pins.get_ranges(key, ranges) is None else bytes(room)


def test_all_parts_stay_whatever_happens_to_the_key(cluster: FakeCluster, path: str) -> None:
    """A fresh client pins: it has met no value in parts before."""
    client = stored(cluster, path)
    reader = cluster.client(path=path)
    with reader.pin(["one", "no", "two", "small"]) as pins:
        assert pins.lengths == [SIZE, None, SIZE, 99]
        assert pinned(cluster) >= 2 * 21
        assert client.put("one", pattern(SIZE, 3)) and client.delete("two")
        for turn in range(20):
            client.put_many([f"{turn} {at}" for at in range(40)], [pattern(PART, turn)] * 40)
        assert whole(pins, "one") == pattern(SIZE, 1) and whole(pins, "two") == pattern(SIZE, 2)
        rows = np.zeros((4, 90), np.uint8)
        assert pins.read([(5, 90, rows)]) == pins.lengths
        assert [bytes(row) for row in rows[[0, 2, 3]]] == [
            pattern(SIZE, 1)[5:95], pattern(SIZE, 2)[5:95], pattern(99)[5:95]
        ]  # fmt: skip
        with pytest.raises(UsageError, match=f"{SIZE} bytes"):
            pins.get_ranges("one", [(SIZE - 1, 2, bytearray(2))])
        with pytest.raises(UsageError, match="at most"):
            pins.get_ranges("small", [(0, 99, bytearray(99)) for _ in range(MOST // 99 + 1)])
        assert reader.stats()["large"] == 2
    with pytest.raises(UsageError, match="released"):
        whole(pins, "one")
    wait_until(lambda: pinned(cluster) == 0, "all pins are released")
    assert client.get("one") == pattern(SIZE, 3) and client.get("two") is None


def test_a_part_that_is_missing_is_a_miss_of_the_whole(cluster: FakeCluster, path: str) -> None:
    client = stored(cluster, path)
    digest = client.digest("one")
    manifest = client._large.manifest(digest)
    assert manifest is not None and client._puts.delete([manifest.digest(digest, 20)]) == [Status.OK]
    with client.pin(["one", "two"]) as pins:
        assert pins.lengths == [None, SIZE]
        assert pins.get_ranges("one", [(0, 1, bytearray(1))]) is None and whole(pins, "two") == pattern(SIZE, 2)
        wait_until(lambda: pinned(cluster) <= 23, "nothing of the first one stays, but its manifest")
    wait_until(lambda: pinned(cluster) == 0, "all pins are released")


def test_a_part_that_is_missing_is_a_miss_of_the_whole_at_a_fake_client() -> None:
    with small_limits():
        client = FakeClient()
        assert client.put_many(["one", "two"], [pattern(SIZE, 1), pattern(SIZE, 2)]) == [True] * 2
        digest = client.digest("one")
        manifest = client._large.manifest(digest)
        assert manifest is not None and client._puts.delete([manifest.digest(digest, 20)]) == [Status.OK]
        with client.pin(["one", "two"]) as pins:
            assert pins.lengths == [None, SIZE] and whole(pins, "two") == pattern(SIZE, 2)


def test_control_a_value_that_lacks_a_part(
    cluster: FakeCluster, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned_module.PinnedParts, "whole", True)
    with pytest.raises(AssertionError):
        test_a_part_that_is_missing_is_a_miss_of_the_whole(cluster, path)


def test_values_in_parts_share_the_leases_of_a_call(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each had a connection of its own to each server, and many of them took all of an engine's descriptors."""
    client = stored(cluster, "tcp")
    client.pin(["one"]).release()
    made: list[TcpPath] = []
    take_out = TcpPath.take_out

    def counted(self: TcpPath, until: float) -> Steps[Channel]:
        made.append(self)
        return take_out(self, until)

    monkeypatch.setattr(TcpPath, "take_out", counted)
    keys = [f"large {number}" for number in range(6)]
    assert client.put_many(keys, [pattern(SIZE, number) for number in range(6)]) == [True] * 6
    with client.pin([*keys, "small", "gone"]) as pins:
        assert pins.lengths == [SIZE] * 6 + [99, None]
        assert [whole(pins, key) for key in keys] == [pattern(SIZE, number) for number in range(6)]
        assert len(made) <= 2 * 2, "one at each server for the keys, and one for the parts"
    wait_until(lambda: pinned(cluster) == 0, "all pins are released")


def test_parts_without_room_are_held_by_their_versions(
    cluster: FakeCluster, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those are gone with the key, and the reads that touch them are misses. No read has bytes of another value."""
    client = stored(cluster, path)
    for node in cluster.nodes:
        with node.worker.frozen() as store:
            store.sessions.pinned_bytes_max = 4 * PART
    with client.pin(["one"]) as pins:
        assert pins.lengths == [SIZE] and whole(pins, "one") == pattern(SIZE, 1)
        assert client.put("one", pattern(SIZE, 7))
        for turn in range(20):
            client.put_many([f"{turn} {at}" for at in range(40)], [pattern(PART, turn)] * 40)
        assert whole(pins, "one") is None
        value, seen = pattern(SIZE, 1), 0
        for at in range(0, SIZE, 64):
            room = bytearray(min(64, SIZE - at))
            if pins.get_ranges("one", [(at, len(room), room)]) is not None:
                assert room == value[at : at + len(room)]
                seen += 1
        assert 0 < seen < SIZE // 64


@pytest.mark.parametrize("times", [1, 2])
def test_one_that_is_replaced_while_it_is_pinned_is_of_one_put(
    cluster: FakeCluster, path: str, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    client, writer = stored(cluster, path), cluster.client(path=path)
    real, left = Manifest.digests, [pattern(SIZE, 5), pattern(SIZE, 6)][:times]

    def digests(self: Manifest, key: bytes) -> list[bytes]:
        monkeypatch.setattr(Manifest, "digests", real)
        if left:
            assert writer.put("one", left.pop())
            monkeypatch.setattr(Manifest, "digests", digests)
        return real(self, key)

    monkeypatch.setattr(Manifest, "digests", digests)
    with client.pin(["one"]) as pins:
        assert not left
        assert whole(pins, "one") == (pattern(SIZE, 5) if times == 1 else None)


def test_a_server_that_does_not_tell_leaves_a_miss(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of before: their answer for a manifest is that of a key that is not stored."""
    client = stored(cluster, "tcp")
    real = Leases.take

    def take(self: Leases, *details: Any, **more: Any) -> Any:
        return [(each[0], each[1] if each[0] == Status.OK else 0, *each[2:]) for each in real(self, *details, **more)]

    monkeypatch.setattr(Leases, "take", take)
    with client.pin(["one", "small"]) as pins:
        assert pins.lengths == [None, 99]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_silent_server_costs_the_values_with_parts_there_alone(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    """Its parts are pinned with those of the others, which are whole."""
    client = cluster.client(path="tcp", deadline_s=1.0)
    keys = [key for key in map("k{}".format, range(64)) if shard_of(client.digest(key)) % 2][:3]
    there, digest_of = client.digest(keys[place]), Manifest.digest

    def digest(self: Manifest, key: bytes, index: int) -> bytes:
        """All but that value have all their parts at the second server."""
        name = digest_of(self, key, index)
        return name if key == there else bytes([name[0] | 1]) + name[1:]

    monkeypatch.setattr(Manifest, "digest", digest)
    assert client.put_many(keys, [pattern(SIZE, number) for number in range(3)]) == [True] * 3
    stopped, go, real = cluster.nodes[0].stream.stream.leases, threading.Event(), Leases.take

    def take(self: Leases, *details: Any, **more: Any) -> Any:
        if self is stopped:
            go.wait(WAIT_S)
        return real(self, *details, **more)

    monkeypatch.setattr(Leases, "take", take)
    try:
        with client.pin(keys) as pins:
            assert pins.lengths == [None if number == place else SIZE for number in range(3)]
            for number in {0, 1, 2} - {place}:
                assert whole(pins, keys[number]) == pattern(SIZE, number)
    finally:
        go.set()
    wait_until(lambda: pinned(cluster) == 0, "all pins are released")


@pytest.mark.parametrize("most", [30, 50, 1000])
def test_a_bounded_number_of_parts_is_pinned_together(
    cluster: FakeCluster, path: str, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """A forged manifest may name 4,096 parts, and a call may be for thousands of values."""
    monkeypatch.setattr(pinned_module, "PARTS_ASKED", most)
    client = stored(cluster, path)
    keys = [f"large {number}" for number in range(4)]
    assert client.put_many(keys, [pattern(SIZE, number) for number in range(4)]) == [True] * 4
    asked: list[int] = []
    pin = client._pinner.pin

    def counted(names: Sequence[str], digests: Sequence[bytes]) -> Pins:
        asked.append(len(digests))
        return pin(names, digests)

    monkeypatch.setattr(client._pinner, "pin", counted)
    with client.pin(keys) as pins:
        assert [whole(pins, key) for key in keys] == [pattern(SIZE, number) for number in range(4)]
    assert asked == [4, *{30: [21] * 4, 50: [42] * 2, 1000: [84]}[most]]
    wait_until(lambda: pinned(cluster) == 0, "all pins are released")


def test_they_end_with_the_client(cluster: FakeCluster, path: str) -> None:
    client = stored(cluster, path)
    reader = cluster.client(path=path)
    pins = reader.pin(["one", "two"])
    assert whole(pins, "one") == pattern(SIZE, 1) and pinned(cluster) > 40
    reader.close()
    with pytest.raises(UsageError):
        whole(pins, "one")
    wait_until(lambda: pinned(cluster) == 0, "all pins are released")
    del client


# -- copies of different kinds -------------------------------------------------------------------------------


def different(cluster: FakeCluster, path: str) -> Client:
    """Return a client whose reads begin with the first copy of "one". That is a value in parts, the second copy an
    ordinary value, as two puts at once may leave them.
    """
    client = cluster.client(path=path, replicas=2)
    assert client.put("one", pattern(SIZE, 1)) and client._replicas is not None
    client._replicas._random = lambda: 0.0
    second = client._replicas.second(client.digest("one"))
    assert second is not None and client._puts.store([second], [memoryview(b"x" * 99)]) == [Status.OK]
    return client


def test_of_two_copies_of_different_kinds_one_alone_is_pinned(cluster: FakeCluster, path: str) -> None:
    """Reads went to both: of the ordinary value, at offsets that it does not have, or with its bytes for a hit."""
    client = different(cluster, path)
    misses = client.counters["misses"]
    with client.pin(["one"]) as pins:
        assert pins.lengths == [SIZE] and whole(pins, "one") == pattern(SIZE, 1)
        assert pins._holders == [None]
        assert client.counters["misses"] >= misses


def test_a_value_in_parts_is_found_whichever_copy_is_asked_first(cluster: FakeCluster, path: str) -> None:
    """Each read of the manifest may begin with the other copy, which is an ordinary value."""
    client = different(cluster, path)
    copies = client._large._manifest_copies
    assert copies is not None
    copies._random = lambda: 0.9
    assert client.get("one") == pattern(SIZE, 1)
    with client.pin(["one"]) as pins:
        assert pins.lengths == [SIZE]

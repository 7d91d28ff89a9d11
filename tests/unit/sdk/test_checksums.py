"""Values that are read from pins: what is delivered is what was checked, and the client's copier copies it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from simm.arena.reader import ArenaReader, Unsettled
from simm.ipc import session as session_module
from simm.ipc.get import ShmGet
from simm.sdk.ops import remote_pins
from simm.sdk.ops.checked import Checked
from simm.sdk.ops.replicas import candidates
from simm.sdk.reads import Gets
from tests.support.fake_cluster import ALL, FakeCluster
from tests.support.waiting import wait_until

VALUE = bytes(range(256)) * 16


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    session_module.RETIRED.clear()
    with FakeCluster(1) as running:
        running.settled({0: ALL})
        yield running


@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("checked", ["the copy", "control"])
def test_a_pinned_value_is_checked_once_it_is_copied(
    cluster: FakeCluster, into: bool, checked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process overwrites the arena between the check and the copy. A client got its bytes as a hit.

    The control: a check of the value in place.
    """
    client = cluster.client("shm", checksum=True)
    assert client.put("k", VALUE)
    segment: Any = cluster.nodes[0].worker.segment
    check, locate = ShmGet.check, ArenaReader.locate
    done: list[bool] = []

    def unsettled(reader: ArenaReader, digest: bytes) -> Any:
        locate(reader, digest)
        raise Unsettled

    def then_spoil(gets: ShmGet, flags: int, crc: int, data: Any) -> bool:
        done.append(check(gets, flags, crc, data))
        at = segment.mm.find(VALUE)
        segment.mm[at : at + len(VALUE)] = bytes(len(VALUE))
        return done[-1]

    monkeypatch.setattr(ArenaReader, "locate", unsettled)
    monkeypatch.setattr(ShmGet, "check", then_spoil)
    if checked == "control":
        pinned = Gets._pinned
        monkeypatch.setattr(Gets, "_pinned", lambda gets, target, digest, **_: pinned(gets, target, digest))
    buffer = bytearray(len(VALUE))
    got = (bytes(buffer) if client.get_into("k", buffer) else None) if into else client.get("k")
    assert done == [True] and client.counters["fallbacks"] == 1
    assert got == (bytes(len(VALUE)) if checked == "control" else VALUE)


def test_a_read_of_pins_delivers_what_was_checked(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process overwrites the arena between the check of a read and its copy to where it belongs."""
    segment: Any = cluster.nodes[0].worker.segment
    check = ShmGet.check
    done: list[bool] = []

    def then_spoil(gets: ShmGet, *looked_at: Any) -> bool:
        done.append(check(gets, *looked_at))
        if len(done) == 2:  # the first one is of the pin
            at = segment.mm.find(VALUE)
            segment.mm[at : at + len(VALUE)] = bytes(len(VALUE))
        return done[-1]

    monkeypatch.setattr(ShmGet, "check", then_spoil)
    client = cluster.client("shm", checksum=True)
    assert client.put("k", VALUE)
    head = bytearray(100)
    with client.pin(["k"]) as pins:
        assert pins.get_ranges("k", [(8, 100, head)]) == len(VALUE) and head == VALUE[8:108]
        head[:] = bytes(100)
        assert pins.get_ranges("k", [(8, 100, head)]) is None and head == bytes(100), "nothing of it is delivered"
    assert done == [True, True, False]


def flip(cluster: FakeCluster, digest: bytes, node: int = 0) -> None:
    """Change a bit of a node's copy of a value, or change it back."""
    arena = ArenaReader(cluster.nodes[node].worker.segment.name)
    (found,) = filter(None, map(arena.locate, (digest, *candidates(digest))))
    arena.data[found.offset - arena.data_offset + 5] ^= 1


def test_issue_a_wrong_copy_does_not_hide_the_sound_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pin took the first copy without a look at it, and each read was a miss."""
    session_module.RETIRED.clear()
    value = os.urandom(20_000)
    with FakeCluster(2) as cluster:
        cluster.settled({0: ALL[::2], 1: ALL[1::2]})
        client = cluster.client("shm", checksum=True, replicas=2)
        assert client.put("k", value)
        digest = client.digest("k")
        for node in (0, 1):
            flip(cluster, digest, node)
            for turn in (0.0, 1.0):
                monkeypatch.setattr(client._replicas, "_random", lambda turn=turn: turn)
                head = bytearray(100)
                with client.pin(["k"]) as pins:
                    assert pins.get_ranges("k", [(0, 100, head)]) == len(value) and head == value[:100]
            flip(cluster, digest, node)
        flip(cluster, digest, 0)
        flip(cluster, digest, 1)
        hits = client.counters["hits"]
        with client.pin(["k"]) as pins:
            assert pins.lengths == [None], "who pins to know what is there is not promised a value that is wrong"
        assert client.counters["hits"] == hits


@pytest.mark.parametrize("path", ["shm", "tcp"])
def test_issue_a_wrong_value_is_looked_at_once(
    cluster: FakeCluster, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each read from elsewhere fetched all of it again."""
    value = os.urandom(50_000)
    client = cluster.client(path, checksum=True)
    assert client.put("k", value)
    fetched: list[int] = []
    receive = remote_pins.receive_ranges

    def received(channel: Any, kind: Any, asked: Any) -> Any:
        fetched.extend(ranges.total for _, ranges in asked)
        return receive(channel, kind, asked)

    monkeypatch.setattr(remote_pins, "receive_ranges", received)
    with client.pin(["k"]) as pins:
        flip(cluster, client.digest("k"))
        for at in range(0, len(value), 5000):
            assert pins.get_ranges("k", [(at, 5000, bytearray(5000))]) is None
    assert client.counters["crc_errors"] == 1
    assert fetched == ([len(value)] if path == "tcp" else [])
    wait_until(lambda: cluster.nodes[0].worker.store.stats()["pins"] == 0, "what is wrong is released, too")


@pytest.mark.parametrize("path", ["shm", "tcp"])
def test_issue_room_is_made_for_what_is_looked_at(
    cluster: FakeCluster, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was made for whole values, of which huge pages took far more memory than the bytes that were wanted."""
    values = [os.urandom(400_000) for _ in range(3)]
    keys = ["k", "l", "m"]
    client = cluster.client(path, checksum=True)
    assert all(client.put_many(keys, values))
    rooms: list[int] = []
    holds = Checked.holds

    def noted(one: Checked, copy: memoryview, *more: Any) -> bool:
        rooms.append(len(copy))
        return holds(one, copy, *more)

    monkeypatch.setattr(Checked, "holds", noted)
    with client.pin(keys) as pins:
        for layer in range(40):
            rooms.clear()
            one, other = np.zeros((3, 5000), np.uint8), np.zeros((3, 5000), np.uint8)
            ranges = [(layer * 5000, 5000, one), (200_000 + layer * 5000, 5000, other)]
            assert pins.read(ranges) == [len(value) for value in values]
            for value, *rows in zip(values, one, other):
                assert [bytes(row) for row in rows] == [value[at : at + 5000] for at, *_ in ranges]
            assert len(rooms) == 3 and (max(rooms) <= 2 * (5000 + 2 * 6250) or (layer == 0 and path == "tcp"))


@pytest.mark.parametrize("path", ["shm", "by version", "tcp"])
def test_issue_a_load_layer_by_layer_looks_at_a_value_a_few_times(
    cluster: FakeCluster, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each read of a layer copied and checked the whole value, so the load took as many times as long as it has layers.

    The first look is at the whole value, on this host in place; after it, each byte is copied and checked once more,
    with those beside it.
    """
    layers, layer = 32, 5000
    value = os.urandom(layers * layer)
    taken: list[int] = []
    checked: list[int] = []
    check = ShmGet.check

    def noted(gets: ShmGet, flags: int, crc: int, data: Any, *more: int) -> bool:
        checked.append(len(data))
        return check(gets, flags, crc, data, *more)

    monkeypatch.setattr(ShmGet, "check", noted)
    client = cluster.client("tcp" if path == "tcp" else "shm", checksum=True)
    assert client.put("k", value)
    assert client.put("other", VALUE)
    copy, receive = client._copier.copy, remote_pins.receive_ranges

    def copied(target: int, source: int, size: int, *more: Any) -> None:
        taken.append(size)
        copy(target, source, size, *more)

    def received(channel: Any, kind: Any, asked: Any) -> Any:
        taken.extend(ranges.total for _, ranges in asked)
        return receive(channel, kind, asked)

    monkeypatch.setattr(client._copier, "copy", copied)
    monkeypatch.setattr(remote_pins, "receive_ranges", received)
    with contextlib.ExitStack() as held:
        if path == "by version":
            held.enter_context(client.pin(["other"]))  # the first pin always finds room
            with cluster.nodes[0].worker.frozen() as store:
                store.sessions.pinned_bytes_max = 0
        checked.clear()
        pins = held.enter_context(client.pin(["k"]))
        with cluster.nodes[0].worker.frozen() as store:
            assert store.stats()["pins"] == 1
        rows = np.zeros((layers, layer), np.uint8)
        for number, row in enumerate(rows):
            assert pins.get_ranges("k", [(number * layer, layer, row)]) == len(value)
        assert rows.tobytes() == value
    assert len(checked) == layers + (path == "shm")
    assert len(value) < sum(taken) <= (1 if path == "shm" else 2) * len(value) + layers * 4096
    assert sum(checked) < 3 * len(value)


def test_issue_values_without_a_checksum_are_read_in_place(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each read copied all of them, with nothing to check."""
    assert cluster.client("shm").put_many(["k", "l"], [VALUE, VALUE])
    client = cluster.client("shm", checksum=True)
    with client.pin(["k", "l"]) as pins:
        monkeypatch.setattr(client._copier, "copy", lambda *_: pytest.fail("a value is copied"))
        rows = np.zeros((2, 100), np.uint8)
        assert pins.read([(8, 100, rows)]) == [len(VALUE)] * 2
        assert rows.tobytes() == VALUE[8:108] * 2


def test_issue_rows_of_values_without_a_checksum_come_by_one_call(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each was received by itself, as values are that are checked."""
    assert cluster.client("shm").put_many(["k", "l"], [VALUE, VALUE])
    client = cluster.client("tcp", checksum=True)
    assert client.put("m", VALUE)
    calls: list[int] = []
    receive = remote_pins.receive_rows

    def received(channel: Any, handles: Any, *more: Any) -> Any:
        calls.append(len(handles))
        return receive(channel, handles, *more)

    monkeypatch.setattr(remote_pins, "receive_rows", received)
    for keys in (["k", "l"], ["k", "l", "m"]):
        rows = np.zeros((len(keys), 100), np.uint8)
        with client.pin(keys) as pins:
            assert pins.read([(8, 100, rows)]) == [len(VALUE)] * len(keys)
        assert rows.tobytes() == VALUE[8:108] * len(keys)
        assert calls == [2], "not of those with one that has a checksum"


@pytest.mark.parametrize("size", [100, 1 << 20])
def test_a_pinned_value_is_copied_without_the_gil(
    cluster: FakeCluster, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slices copied it, which kept all threads of the engine from running meanwhile."""
    client = cluster.client("shm")
    value = os.urandom(size)
    assert client.put("k", value)
    copied: list[int] = []
    copy = client._copier.copy

    def noted(target: int, source: int, size: int, *more: Any) -> None:
        copied.append(size)
        copy(target, source, size, *more)

    def unsettled(*_: Any) -> Any:
        raise Unsettled

    monkeypatch.setattr(client._copier, "copy", noted)
    monkeypatch.setattr(ArenaReader, "locate", unsettled)
    rooms = [bytearray(size + 1), bytearray(size + 1)]
    for room, sink in zip(rooms, (rooms[0], client.register(rooms[1]))):
        assert client.get_into("k", sink) == size
        assert room == value + b"\0"
    assert copied == [size, size] and client.counters["fallbacks"] == 2

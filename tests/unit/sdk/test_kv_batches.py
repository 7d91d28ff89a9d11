"""Batches of ``simm.kv`` with one mistake, which only the value or the client shows: it costs its own element alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from simm.client import Client
from simm.constants import RANGES_MAX, VALUE_BYTES_MAX
from simm.errors import Code, UsageError
from simm.kv import Block, BlockView, Store
from simm.sdk.calls.kv_pins import PinnedKeys
from simm.sdk.ops import kv_memory
from simm.testing import FakeClient
from tests.support.fake_cluster import ALL, FakeCluster
from tests.support.kv_values import content, filled
from tests.support.small_limits import MOST, PART, small_limits

WRONG = int(Code.INVALID_ARGUMENT)
GROUPS = [[f"page{{{number}}}/k", f"page{{{number}}}/v"] for number in range(4)]


def store_of(client: Client) -> Store:
    store: Any = Store.__new__(Store)
    store._client, store.rejected, store.unfit = client, 0, 0
    return store  # type: ignore[no-any-return]


@pytest.fixture
def client() -> Iterator[FakeClient]:
    with FakeClient() as made:
        yield made


@pytest.fixture
def store(client: FakeClient) -> Store:
    return store_of(client)


def test_a_group_with_a_value_that_must_be_in_parts(store: Store, client: FakeClient) -> None:
    """The members of a group are stored as they are. All groups of the call were refused."""
    memory = np.zeros(VALUE_BYTES_MAX + 1, np.uint8)  # which nobody reads
    wide, widest = BlockView.from_tensor(memory), BlockView.from_tensor(memory[:VALUE_BYTES_MAX])
    views = [[filled(b"k"), filled(b"v")], [filled(b"k"), wide], [wide, filled(b"v")], [filled(b"k"), widest]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeClient, "put_groups", lambda _, groups, values: [True] * len(groups))
        assert store.mput_groups(GROUPS, views) == [0, WRONG, WRONG, 0], "the largest that is stored whole"
        assert store.put_group(GROUPS[1], views[1]) == WRONG
    assert store.rejected == 3
    assert store.mput_groups(GROUPS[:3], views[:3]) == [0, WRONG, WRONG]
    assert store.mexists_groups(GROUPS) == [True, False, False, False]
    assert asyncio.run(store.mput_groups_async(GROUPS[:2], views[:2])) == [0, WRONG]
    with pytest.raises(UsageError):  # what refused all of them
        client.put_groups(GROUPS[:2], [[view._piece for view in each] for each in views[:2]])


def test_a_view_in_place_of_a_group_s_views(store: Store) -> None:
    """It has as many bytes as the group has keys."""
    assert store.mput_groups(GROUPS[:2], [filled(b"kv"), [filled(b"k"), filled(b"v")]]) == [WRONG, 0]  # type: ignore[list-item]


# --- ranges that ask too much of their value --------------------------------------------------------


@pytest.fixture
def parts(client: FakeClient) -> Iterator[FakeClient]:
    """Values in parts, and ordinary ones."""
    with small_limits():
        assert client.put_many(["a", "large", "b"], [b"a" * 100, b"l" * (2 * MOST), b"b" * MOST]) == [True] * 3
        yield client


def too_many(of: int) -> list[tuple[int, int, BlockView]]:
    """Ranges of more bytes than one call may read of these of a value."""
    return [(0, of, Block(of).view()) for _ in range(MOST // of + 1)]


def test_ranges_that_only_their_value_shows_to_be_too_many(
    parts: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("simm.sdk.large.sections.VALUE_BYTES_MAX", MOST)
    store = store_of(parts)
    rooms = [Block(10).view() for _ in range(2)]
    keys = ["a", "large", "b", "large", "never"]
    ranges = [[(0, 10, rooms[0])], too_many(PART), too_many(500), [(1990, 10, rooms[1])], too_many(PART)]
    failed = int(Code.GET_FAILED)
    assert store.mget_ranges(keys, ranges) == [100, WRONG, WRONG, 2 * MOST, failed]
    assert [content(room) for room in rooms] == [b"a" * 10, b"l" * 10]
    assert store.rejected == 2
    assert store.get_ranges("large", too_many(PART)) == WRONG
    with pytest.raises(UsageError, match="overlap"):
        parts.get_ranges_many(["a", "large"], [[(0, 1, bytearray(1))], bytes_of(too_many(PART))])
    with pytest.raises(UsageError, match="overlap"):
        parts.get_ranges("large", bytes_of(too_many(PART)))
    with pytest.raises(UsageError, match="at most"):
        parts.get_ranges_many(["b"], [bytes_of(too_many(500))])


def bytes_of(ranges: list[tuple[int, int, BlockView]]) -> list[tuple[int, int, bytearray]]:
    return [(offset, length, bytearray(length)) for offset, length, _ in ranges]


def test_a_layer_of_many_ranges(client: FakeClient) -> None:
    """More than one value may be asked for by itself."""
    assert client.put_many(["a", "b"], [b"a" * 100, b"b" * 100]) == [True] * 2
    store = store_of(client)
    room = np.zeros((RANGES_MAX + 1, 3), np.uint8)
    start = room.__array_interface__["data"][0]
    ranges = [(0, 1, [BlockView.from_buffer(start + 3 * at + key, 1) for key in range(3)]) for at in range(len(room))]
    with store.mpin(["a", "b", "no"]) as pins:
        assert pins.read(ranges) == [100, 100, int(Code.GET_FAILED)]
        assert room.tobytes() == b"ab\0" * len(room)
        assert pins.read(ranges[1:]) == [100, 100, int(Code.GET_FAILED)]
        rooms = [Block(1).view() for _ in range(3)]
        assert pins.read([(0, 1, rooms)]) == [100, 100, int(Code.GET_FAILED)]


def test_a_wrong_key_costs_a_layer_of_many_ranges_its_own_values(client: FakeClient) -> None:
    assert client.put_many(["a", "b"], [b"a" * 100, b"b" * 50]) == [True] * 2
    store = store_of(client)
    room = np.zeros((2 * RANGES_MAX + 1, 4), np.uint8)
    start = room.__array_interface__["data"][0]
    ranges = [(0, 1, [BlockView.from_buffer(start + 4 * at + key, 1) for key in range(4)]) for at in range(len(room))]
    with store.mpin(["a", "", "b", "no"]) as pins:
        assert pins.read(ranges) == [100, WRONG, 50, int(Code.GET_FAILED)]
        assert room.tobytes() == b"a\0b\0" * len(room)
        beyond = (70, 1, ranges[0][2])
        assert pins.read([*ranges[1:], beyond]) == [100, WRONG, int(Code.GET_FAILED), int(Code.GET_FAILED)]


def test_no_mistake_keeps_one_of_another_kind_out_of_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kv_memory, "_complained_at", {})
    problems = ("the key 'a' is bad", "the key 'b' is bad", "the memory is read-only", "too few: 3", "too few: 4")
    for problem in problems:
        kv_memory.complain("invalid argument: %s", problem)
    assert [each.getMessage().removeprefix("invalid argument: ") for each in caplog.records] == [
        "the key 'a' is bad", "the memory is read-only", "too few: 3"
    ]  # fmt: skip
    for number in range(1000):
        kv_memory.complain("a" * number)
    assert len(kv_memory._complained_at) <= 256


@pytest.mark.parametrize("text", ["<BlockView of 99 bytes at {:#x}>", "the key 'it\\'s {:x}' is bad", 'and "\\"{:x}"'])
def test_neither_an_address_nor_a_key_makes_a_kind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    """An engine that gets into pages of read-only memory would fill the log."""
    monkeypatch.setattr(kv_memory, "_complained_at", {})
    for number in range(1000):
        kv_memory.complain("invalid argument: %s", text.format(0x7F3C1A2B0000 + number * 4096))
    assert len(caplog.records) == 1


def test_where_there_are_too_many_kinds_those_that_are_known_stay_limited(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(kv_memory, "_complained_at", {})
    monkeypatch.setattr(kv_memory, "time", SimpleNamespace(monotonic=lambda: clock.now))
    for _ in range(2):
        for number in range(1000):
            kv_memory.complain("a" * (number + 1))
    assert len(caplog.records) == 256
    clock.now += 11
    kv_memory.complain("b")
    kv_memory.complain("a")
    assert len(caplog.records) == 258, "old ones have made room"


def test_pinned_values(parts: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simm.sdk.large.sections.VALUE_BYTES_MAX", MOST)
    store = store_of(parts)
    rooms = [Block(10).view() for _ in range(2)]
    with store.mpin(["a", "large", "b"]) as pins:
        assert pins.lengths == [100, 2 * MOST, MOST]
        keys = ["a", "large", "b", "large"]
        ranges = [[(0, 10, rooms[0])], too_many(PART), too_many(500), [(1990, 10, rooms[1])]]
        assert pins.mget_ranges(keys, ranges) == [100, WRONG, WRONG, 2 * MOST]
        assert [content(room) for room in rooms] == [b"a" * 10, b"l" * 10]
        assert store.rejected == 2
        assert pins.get_ranges("large", too_many(PART)) == WRONG
        assert pins.get_ranges("large", [(0, 10, rooms[0])]) == 2 * MOST
    assert pins.mget_ranges(keys, ranges) == [WRONG] * 4, "released"


@pytest.mark.parametrize("path", ["shm", "tcp"])
def test_issue_prepared_ranges_are_no_view(path: str) -> None:
    """A put raised AttributeError into the engine, and one in a batch took all other keys with it."""
    with FakeCluster(1) as cluster:
        cluster.settled({0: ALL})
        store = store_of(cluster.client(path))
        view = filled(b"value")
        ranges: Any = Store.prepare_ranges([(0, 2, Block(2).view())])
        assert store.put("k", ranges) == store.get("k", ranges) == WRONG
        assert store.mput(["a", "k", "b"], [view, ranges, view]) == [0, WRONG, 0]
        assert store.mget(["a", "k", "b"], [view, ranges, view]) == [5, WRONG, 5]
        assert store.put_gather("k", [view, ranges]) == WRONG
        assert store.mget_ranges(["a", "never"], [ranges, [(0, 1, Block(1).view())]]) == [5, int(Code.GET_FAILED)]
        assert store.rejected == 5 and not store.exists("k")


def test_prepared_ranges_cannot_be_registered(client: FakeClient) -> None:
    with pytest.raises(UsageError):
        client.register(client.prepare_ranges([(0, 2, bytearray(2))]))
    with pytest.raises(TypeError):
        BlockView.from_tensor(client.prepare_ranges([(0, 2, bytearray(2))]))


class Compared(str):
    """A key that counts how often it is compared."""

    __slots__ = ()
    times = 0

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Compared.times += 1
        return str.__eq__(self, other)


def test_issue_pinned_keys_are_found_by_name_without_a_search() -> None:
    """Each name was compared with all keys before it: a layer of 20,000 took seconds, with the GIL."""
    names = [f"k{number}" for number in range(500)]
    pinned = PinnedKeys([*map(Compared, names), "k7", 3, [], None], None, None, lambda *_: None)
    Compared.times = 0
    assert [pinned._position(Compared(name)) for name in names] == [*range(500)], "of equal ones the first"
    assert Compared.times < 4 * len(names)
    others: list[Any] = ["never", 3, 503, 504, -1, True, None, []]
    assert [*map(pinned._position, others)] == [None, 3, 503, None, None, None, None, None]

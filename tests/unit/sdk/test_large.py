"""Values in parts: manifests as bytes, sections of memory, and what happens when parts or manifests change."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from simm.arena.hashing import TAG_AT, Hasher, shard_of
from simm.client import NoValue
from simm.constants import LARGE_BYTES_MAX, VALUE_BYTES_MAX
from simm.errors import UsageError
from simm.host.buffers import Copier, Pieces, Ranges
from simm.ipc.tally import Tallies
from simm.sdk.large import sections
from simm.sdk.large.kinds import ManifestGets
from simm.sdk.large.manifest import MANIFEST_BYTES, PART_BYTES, PARTS_MAX, Manifest
from simm.testing import FakeClient, FakeStore
from simm.wire.status import Status
from tests.support.client_values import pattern
from tests.support.small_limits import MOST, PART, small_limits

KEY = Hasher("namespace")("key")


@pytest.fixture
def small() -> Iterator[None]:
    with small_limits():
        yield


# --- manifests ------------------------------------------------------------------------------------


@pytest.mark.parametrize("total", [1, PART_BYTES, VALUE_BYTES_MAX + 1, LARGE_BYTES_MAX])
def test_a_manifest_comes_back(total: int) -> None:
    made = Manifest.new(total)
    raw = made.encode(KEY)
    assert len(raw) == MANIFEST_BYTES and Manifest.decode(KEY, raw) == made
    assert sum(size for _, size in made.bounds()) == total and len([*made.bounds()]) == made.parts <= PARTS_MAX
    assert Manifest.new(total).version != made.version


def test_a_damaged_manifest_is_none() -> None:
    raw = Manifest.new(1 << 30).encode(KEY)
    for end in range(MANIFEST_BYTES):
        assert Manifest.decode(KEY, raw[:end]) is None
    assert Manifest.decode(KEY, raw + b"\0") is None
    for at in range(MANIFEST_BYTES * 8):
        damaged = bytearray(raw)
        damaged[at // 8] ^= 1 << at % 8
        assert Manifest.decode(KEY, bytes(damaged)) is None
    assert Manifest.decode(Hasher("namespace")("other"), raw) is None


def test_without_the_checksum_damage_goes_unnoticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    monkeypatch.setattr("simm.sdk.large.manifest._checksum", lambda *_: bytes(16))
    damaged = bytearray(Manifest.new(1 << 30).encode(KEY))
    damaged[40] ^= 1
    assert Manifest.decode(KEY, bytes(damaged)) is not None


@pytest.mark.parametrize(
    ("total", "part"),
    [(0, 1), (LARGE_BYTES_MAX + 1, VALUE_BYTES_MAX), (1 << 63, 1 << 31), (1000, 0), (1 << 30, VALUE_BYTES_MAX + 1),
     (PARTS_MAX + 1, 1), (LARGE_BYTES_MAX, PART_BYTES // 2)],
)  # fmt: skip
def test_a_forged_manifest_is_bounded(total: int, part: int) -> None:
    """Its checksum is right: whoever may write the arena can compute it."""

    class Forged(Manifest):
        @property
        def parts(self) -> int:
            return -(-total // part) & 0xFFFF_FFFF if part else 1

    assert Manifest.decode(KEY, Forged(total, part, bytes(16)).encode(KEY)) is None
    assert Manifest.decode(KEY, Manifest(1000, 10, bytes(16)).encode(KEY)) is not None, "the control"


def test_parts_are_no_other_keys_or_puts_and_end_as_their_key() -> None:
    one, two = Manifest.new(LARGE_BYTES_MAX), Manifest.new(LARGE_BYTES_MAX)
    other = Hasher("namespace")("other")
    names = [*one.digests(KEY), *two.digests(KEY), *one.digests(other)]
    assert len({*names}) == 3 * PARTS_MAX
    assert all(name[TAG_AT:] == KEY[TAG_AT:] for name in one.digests(KEY))
    assert len({shard_of(name) for name in one.digests(KEY)}) > PARTS_MAX // 2, "spread over the shards"


# --- sections of memory -----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_sections_are_what_slices_are(seed: int) -> None:
    rng = random.Random(seed)
    total, part = rng.randrange(1, 3000), rng.randrange(1, 400)
    value = rng.randbytes(total)
    manifest = Manifest.new(total, part)
    cuts = sorted({0, total, *(rng.randrange(total) for _ in range(rng.randrange(6)))})
    pieces = Pieces([memoryview(value)[start:end] for start, end in itertools.pairwise(cuts)])
    for source in (memoryview(value), pieces):
        made = [sections.source_section(source, start, size) for start, size in manifest.bounds()]
        assert b"".join(bytes(each if type(each) is memoryview else each.view()) for each in made) == value  # type: ignore[union-attr]
    parts, naive = [], []
    for _ in range(rng.randrange(1, 8)):
        offset = rng.randrange(total)
        length = rng.randrange(1, total - offset + 1)
        room = np.zeros(length, np.uint8)
        where = (0, memoryview(room)) if rng.random() < 0.5 else (room.ctypes.data, room)
        parts.append((offset, length, *where))
        naive.append((value[offset : offset + length], room))
    wanted = sections.sinks_of(manifest, Ranges(parts, max(o + n for o, n, *_ in parts), sum(n for _, n, *_ in parts)))
    bounds = [*manifest.bounds()]
    for index, size, ranges in wanted:
        assert bounds[index][1] == size and ranges.least <= size
        assert ranges.total == sum(length for _, length, *_ in ranges.parts)
        for inside, length, address, keeper in ranges.parts:
            at = bounds[index][0] + inside
            if not address:
                keeper[:] = value[at : at + length]
            else:
                start = address - keeper.ctypes.data
                keeper[start : start + length] = np.frombuffer(value[at : at + length], np.uint8)
    assert all(bytes(room) == bytes_ for bytes_, room in naive)


def test_one_part_is_not_sent_many_times(small: None) -> None:
    parts = [(0, 200, 0, memoryview(bytearray(200))) for _ in range(6)]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(UsageError, match="overlap"):
        patch.setattr(sections, "VALUE_BYTES_MAX", MOST)
        sections.sinks_of(Manifest.new(2000, PART), Ranges(parts, 200, 1200))


# --- changes meanwhile ------------------------------------------------------------------------------


class Changing(FakeClient):
    """A client that another one comes between: ``before`` is called before each exchange that reads parts."""

    before: Any = None

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        plain = self._large._read_plain

        def read(digests: Sequence[bytes], sinks: Sequence[Any]) -> list[Any]:
            if self.before is not None:
                self.before()
            return plain(digests, sinks)

        self._large._read_plain = read


@pytest.fixture
def pair(small: None) -> Iterator[tuple[Changing, FakeClient]]:
    store = FakeStore()
    with pytest.MonkeyPatch.context() as patch, Changing(store=store) as client, FakeClient(store=store) as other:
        patch.setattr("simm.sdk.large.values.PARTS_TOGETHER", 2)
        yield client, other


def replace_once(client: Changing, other: FakeClient, value: bytes, exchange: int) -> None:
    """Let another client put ``value`` before the n-th exchange."""
    left = [exchange]

    def before() -> None:
        left[0] -= 1
        if not left[0]:
            assert other.put("k", value)

    client.before = before


OLD, NEW = b"\1" * 3000, b"\2" * 3000


@pytest.mark.parametrize("exchange", [1, 2, 3, 6])
def test_a_read_beside_a_put_is_of_one_of_both(pair: tuple[Changing, FakeClient], exchange: int) -> None:
    client, other = pair
    assert other.put("k", OLD)
    replace_once(client, other, NEW, exchange)
    room = bytearray(3000)
    assert client.get_into("k", room) == 3000 and room == NEW
    assert other.put("k", OLD)
    replace_once(client, other, NEW[:2000], exchange)
    assert client.get("k") == NEW[:2000]


def test_without_the_version_the_same_shows_some_of_each(
    pair: tuple[Changing, FakeClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: parts of all puts have the same digests."""
    monkeypatch.setattr(Manifest, "new", classmethod(lambda cls, total, part: cls(total, part, bytes(16))))
    client, other = pair
    assert other.put("k", OLD)
    replace_once(client, other, NEW, 3)
    got = client.get("k")
    assert got is not None and {*got} == {1, 2}


def test_a_value_replaced_again_and_again_is_a_miss(pair: tuple[Changing, FakeClient]) -> None:
    client, other = pair
    assert other.put("k", OLD)
    client.before = lambda: other.put("k", NEW) or None
    assert client.get("k") is None
    client.before = None
    assert client.get("k") == NEW


def test_a_value_that_becomes_an_ordinary_one_is_a_miss_or_that(pair: tuple[Changing, FakeClient]) -> None:
    client, other = pair
    assert other.put("k", OLD)
    replace_once(client, other, b"short", 2)
    assert client.get("k") in (None, b"short", OLD)
    assert client.get("k") == b"short"


@pytest.mark.parametrize("missing", [0, 5, 11])
def test_a_missing_part_is_a_miss(pair: tuple[Changing, FakeClient], missing: int) -> None:
    client, _ = pair
    assert client.put("k", OLD)
    digest = client.digest("k")
    manifest = client._large.manifest(digest)
    assert manifest is not None and client._puts.delete([manifest.digest(digest, missing)]) == [Status.OK]
    assert client.get("k") is None and client.get_into("k", bytearray(3000)) is None
    with client.view("k") as view:
        assert not view
    assert client.exists("k"), "it asks for no parts"
    inside, outside = bytearray(1), bytearray(1)
    other = (missing + 3) % 12 * PART
    assert client.get_ranges_many(["k", "k"], [[(missing * PART, 1, inside)], [(other, 1, outside)]]) == [None, 3000]


def test_parts_of_another_size_do_not_count(pair: tuple[Changing, FakeClient]) -> None:
    client, _ = pair
    assert client.put("k", OLD)
    digest = client.digest("k")
    manifest = client._large.manifest(digest)
    assert manifest is not None
    for wrong in (b"\1" * (PART - 1), b"\1" * (PART + 1)):
        client._puts.put([manifest.digest(digest, 4)], [memoryview(wrong)])
        assert client.get("k") is None and client.get_into("k", bytearray(3000)) is None
    client._puts.put([manifest.digest(digest, 4)], [memoryview(b"\1" * PART)])
    assert client.get("k") == OLD


def test_a_forged_manifest_without_parts_is_a_miss(small: None) -> None:
    """64 GiB: nothing is allocated for what is not there."""
    client = FakeClient()
    digest = client.digest("k")
    forged = Manifest(LARGE_BYTES_MAX, PART_BYTES, bytes(16)).encode(digest)
    assert client._large._put_manifests([digest], [memoryview(forged)]) == [Status.OK]
    assert client.get("k") is None
    with pytest.raises(UsageError, match="does not fit"):
        client.get_into("k", bytearray(100))
    for raw in (forged[:-1], forged + b"\0", bytes(64), b"x"):
        client._large._put_manifests([digest], [memoryview(raw)])
        assert client.get("k") is None
        assert client.get_into("k", bytearray(100)) is None


SPARING: list[dict[str, Any]] = [{"put_if_absent": True}, {"replicas": 2}]


@pytest.mark.parametrize("arguments", SPARING)
@pytest.mark.parametrize("missing", [0, 5, 11])
def test_a_put_that_spares_what_is_stored_mends_what_is_not_whole(
    small: None, arguments: dict[str, Any], missing: int
) -> None:
    """The engine computes the value again as its get was a miss. Without its parts, the manifest is no value."""
    store = FakeStore()
    client = FakeClient(store=store, **arguments)
    assert client.put("k", OLD)
    whole = len(store)
    assert client.put("k", OLD) and client.stats()["present"] == 1 and len(store) == whole, "nothing is stored"
    digest = client.digest("k")
    manifest = client._large.manifest(digest)
    assert manifest is not None
    client._large._delete([manifest.digest(digest, missing)])
    assert client.exists("k")
    assert client.put("k", OLD) and client.get("k") == OLD
    assert len(store) == whole, "the parts of the value that was not whole are gone"
    assert client.put("k", OLD) and client.stats()["present"] == 2 and len(store) == whole


def test_a_read_that_misses_a_part_drops_nothing(small: None) -> None:
    """A miss of one of several copies may be the silence of another one's server."""
    store = FakeStore()
    client = FakeClient(store=store, replicas=2)
    assert client.put("k", OLD)
    plain = client._large._read_plain
    client._large._read_plain = lambda digests, sinks: [NoValue.MISS] * len(digests)
    whole = len(store)
    assert client.get("k") is None and len(store) == whole
    client._large._read_plain = plain
    assert client.get("k") == OLD


def test_a_value_in_parts_does_not_take_the_place_of_a_small_one(small: None) -> None:
    """With ``replicas`` the first value stays. No part of the second is left over, however often it is put."""
    store = FakeStore()
    client = FakeClient(store=store, replicas=2)
    assert client.put("k", b"short")
    there = len(store)
    for _ in range(3):
        assert client.put("k", OLD) and client.get("k") == b"short" and len(store) == there
    put = client._large._put_manifests
    assert client.delete("k")

    def late(digests: Sequence[bytes], sources: Sequence[Any]) -> list[int]:
        assert client.put("k", b"short")
        return put(digests, sources)

    client._large._put_manifests = late
    assert client.put("k", OLD) and client.get("k") == b"short" and len(store) == there


def test_who_mends_what_another_one_mends_leaves_nothing(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FakeStore()
    client, other = FakeClient(store=store, replicas=2), FakeClient(store=store, replicas=2)
    assert client.put("k", OLD)
    whole = len(store)
    large, digest = client._large, client.digest("k")
    manifest = large.manifest(digest)
    assert manifest is not None
    large._delete([manifest.digest(digest, 3)])
    put = large._put_manifests

    def late(digests: Sequence[bytes], sources: Sequence[Any]) -> list[int]:
        assert other.put("k", OLD)  # after the manifest of the rest is gone
        return put(digests, sources)

    monkeypatch.setattr(large, "_put_manifests", late)
    assert client.put("k", OLD) and client.get("k") == OLD and len(store) == whole


@pytest.mark.parametrize("missing", [0, 11])
def test_a_put_that_cannot_take_the_place_of_a_rest_fails(
    small: None, monkeypatch: pytest.MonkeyPatch, missing: int
) -> None:
    """The manifest of what is not whole cannot be dropped: no put says that it has stored something."""
    store = FakeStore()
    client = FakeClient(store=store, replicas=2)
    assert client.put("k", OLD)
    large, digest = client._large, client.digest("k")
    manifest = large.manifest(digest)
    assert manifest is not None
    large._delete([manifest.digest(digest, missing)])
    rest = len(store)
    delete = large._delete
    monkeypatch.setattr(large, "_delete", lambda digests: None if digests == [digest] else delete(digests))
    assert client.put("k", OLD) is False and client.get("k") is None and len(store) == rest
    assert client.stats()["put_failures"] == 1
    monkeypatch.undo()
    assert client.put("k", OLD) and client.get("k") == OLD


def test_a_manifest_that_cannot_be_read_is_not_taken_for_anothers(
    small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = FakeClient(replicas=2)
    large = client._large
    seen: list[bytes] = []
    read = large._look_manifests

    def unread(digests: Sequence[bytes], sinks: Sequence[Any]) -> list[Any]:
        seen.extend(digests)
        return read(digests, sinks) if len(seen) < 2 else [NoValue.UNAVAILABLE]

    monkeypatch.setattr(large, "_look_manifests", unread)
    assert client.put("k", OLD) and len(seen) == 2
    monkeypatch.undo()
    assert client.get("k") == OLD, "the parts of a value that is stored are not dropped"


def test_an_ordinary_value_is_large_to_a_read_of_manifests_and_is_not_counted() -> None:
    """For a real client as for a fake: of both alike a put in parts learns that something is there."""
    counters = {"large": 0}
    nothing: Any = None
    real = ManifestGets(nothing, Copier(1), False, counters, None, Tallies())
    fake = FakeClient(replicas=2)
    for gets in (real, fake._manifest_paths()[0]):
        assert gets.other_kind() is NoValue.LARGE
    assert counters["large"] == fake.stats()["large"] == 0


def test_a_put_over_an_ordinary_value_leaves_no_parts(small: None) -> None:
    store = FakeStore()
    client = FakeClient(store=store, replicas=2)
    assert client.put("k", b"ordinary")
    for value in (OLD, NEW):
        assert client.put("k", value) and len(store) == 1 and client.get("k") == b"ordinary"


def test_of_two_that_put_once_the_first_counts(small: None) -> None:
    store = FakeStore()
    client, other = FakeClient(store=store, replicas=2), FakeClient(store=store, replicas=2)
    assert client._large.manifest(client.digest("k")) is None  # it is made
    put = client._large._put_manifests

    def late(digests: Sequence[bytes], sources: Sequence[Any]) -> list[int]:
        assert other.put("k", NEW)
        return put(digests, sources)

    client._large._put_manifests = late
    assert client.put("k", OLD) and client.get("k") == NEW
    alone = FakeStore()
    assert FakeClient(store=alone, replicas=2).put("k", NEW) and len(store) == len(alone), "no parts are left over"


# --- outages and room -------------------------------------------------------------------------------


def test_an_outage_is_a_miss_and_a_failed_put_leaves_no_value(small: None) -> None:
    store = FakeStore()
    client = FakeClient(store=store)
    value = pattern(20 * PART)
    # Parts that were stored are dropped. If the manifest's server does not answer, it may store it later: they stay.
    for failing, left in ((2, 0), (3, 20)):
        store.fail(failing, operation="put")
        assert client.put("k", value) is False
        assert len(store) == left
    assert client.put("k", value) is True
    assert client.stats()["put_failures"] == 2
    for failing, wanted in ((1, NoValue.UNAVAILABLE), (2, NoValue.MISS), (3, NoValue.UNAVAILABLE)):
        store.fail(failing, operation="get")
        assert client.get_digest(client.digest("k"), memoryview(bytearray(20 * PART))) is wanted
    assert client.get("k") == value
    store.unavailable = True
    assert client.put("k", value) is False and client.get("k") is None and client.delete("k") is False


def test_an_evicted_part_is_a_miss(small: None) -> None:
    client = FakeClient(store=FakeStore(3500))
    assert client.put("k", pattern(3000)) and client.get("k") == pattern(3000)
    assert client.put("other", pattern(900)) and client.get("k") is None
    assert client.put("k", pattern(3000, 2)) and client.get("k") == pattern(3000, 2)

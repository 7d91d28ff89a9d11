"""What a batch of questions finds in one arena: the same as few keys at a time, also while shards move."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest

from simm.arena.hashing import Hasher
from simm.arena.reader import EACH_KEYS, ArenaReader
from simm.arena.store import Store
from simm.ipc.counts import FOUND, NOT_FOUND, SAMPLE_BATCHES
from simm.sdk.batch import Batch
from simm.sdk.ops.owners import exist_in
from simm.wire.shard_set import FROZEN, MOVING
from tests.support.fake_cluster import ALL, FakeCluster
from tests.support.store_world import new_segment, remove_segment

digest_of = Hasher("exist")
#: Positions that are left, by why.
Left = tuple[list[tuple[int, bool]], list[tuple[int, int, bool]], list[int]]


@pytest.fixture
def arena() -> Iterator[tuple[Store, ArenaReader]]:
    segment = new_segment(16 << 20, 1024)
    store = Store.create(segment.mm, slots=1024)
    store.open()
    reader = ArenaReader(segment.name)
    try:
        yield store, reader
    finally:
        del reader
        store.release()
        remove_segment(segment)


def asked(reader: ArenaReader, digests: Sequence[bytes], each: int) -> tuple[list[bool], Left, list[int]]:
    """Ask for so many keys at a time; return what was found, what is left, and what was counted."""
    batch = Batch(digests, None)
    left: Left = [], [], []
    before = [reader.counts[FOUND], reader.counts[NOT_FOUND]]
    for start in range(0, len(digests), each):
        found = exist_in(reader, range(start, min(start + each, len(digests))), batch, observed=False)
        left[0].extend(found.ask_owner)
        left[1].extend(found.at_previous_owner)
        left[2].extend(found.not_owner)
    assert batch.plain == (each >= len(digests) and not any(left))
    assert not batch.plain or all(type(got) is bool for got in batch.results)
    counted = [reader.counts[word] - past for word, past in zip((FOUND, NOT_FOUND), before)]
    return [got == 1 for got in batch.results], left, counted


@pytest.mark.parametrize(
    "words", [(5,), (5, 5, 0), (5, FROZEN | 7), (5, FROZEN - 1), (0, 1, 5, FROZEN - 1, FROZEN, FROZEN | 7)]
)
@pytest.mark.parametrize("count", [EACH_KEYS, 500])
def test_a_batch_answers_as_few_keys_at_a_time(
    arena: tuple[Store, ArenaReader], words: Sequence[int], count: int
) -> None:
    store, reader = arena
    rng = random.Random(f"{words} {count}")
    for shard in range(len(store.shards)):
        store.shards[shard] = rng.choice(words)
    digests = [digest_of(f"{number}") for number in range(count)]
    for number, digest in enumerate(digests):
        if number % 2:
            store.table.publish(digest, store.geometry.data_offset + 4096 * number, 100, 0, 4096, 0, 0, 1)
    few, many = asked(reader, digests, EACH_KEYS - 1), asked(reader, digests, count)
    assert many == few
    assert sum(few[2]) == count and (words == (5,)) == (not any(few[1]))
    if words == (5,):
        assert few[0] == [bool(number % 2) for number in range(count)]


@pytest.mark.parametrize("count", [2, EACH_KEYS, 500])
def test_issue_a_second_look_at_all_keys_in_another_order_leaves_the_right_ones(
    arena: tuple[Store, ArenaReader], count: int
) -> None:
    """It took the place of each open key for another one's: a stored key was not known then, and an open one a miss."""
    store, reader = arena
    digests = [digest_of(f"{number}") for number in range(count)]
    for shard in range(len(store.shards)):
        store.shards[shard] = MOVING | 7
    stored = range(0, count, 2)
    for number in stored:
        store.table.publish(digests[number], store.geometry.data_offset + 4096 * number, 100, 0, 4096, 0, 0, 1)
    positions = list(range(count))
    random.Random(count).shuffle(positions)
    if positions == sorted(positions):
        positions.reverse()
    batch = Batch(digests, None, counted=False)
    left = exist_in(reader, positions, batch, observed=False)
    assert [got == 1 for got in batch.results] == [number in stored for number in range(count)]
    assert sorted(left.positions()) == [number for number in range(count) if number not in stored]


def test_issue_questions_about_keys_of_several_arenas_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass answers them. No key of it was in the metrics of a server, and none in the client's own."""
    missed: list[bytes] = []
    with FakeCluster(2) as cluster:
        cluster.settled({0: ALL[::2], 1: ALL[1::2]})
        client = cluster.client("shm")
        assert client.wait_ready(30.0)
        keys = [f"k{number}" for number in range(100)]
        assert client.put_many(keys[::2], [b"v"] * 50) == [True] * 50
        monkeypatch.setattr(ArenaReader, "missed", lambda _, digest: missed.append(digest))
        for _ in range(SAMPLE_BATCHES):
            assert client.exists_many(keys) == [True, False] * 50
        told = client.stats()["paths"]["shm"]
        assert [told["exists_found"], told["exists_absent"]] == [50 * SAMPLE_BATCHES] * 2
        assert told["seconds"]["exists_many"]["calls_timed"] == 1
        assert len(missed) == 2 * SAMPLE_BATCHES, "one of each arena"
        assert {*missed} <= {*map(client.digest, keys[1::2])}
        assert {client._routes.target(digest) for digest in missed} == {*client._routes.table().by_position}
        for target in client._routes.table().by_position:
            mine = [key for key in keys if client._routes.target(client.digest(key)) is target]
            assert target.session is not None
            found = sum(key in keys[::2] for key in mine)
            counts = target.session.counts
            assert [counts[FOUND], counts[NOT_FOUND]] == [
                found * SAMPLE_BATCHES, (len(mine) - found) * SAMPLE_BATCHES
            ]  # fmt: skip

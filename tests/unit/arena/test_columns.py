"""A batch that is located, copied and confirmed by column, against one key after the other, and against time.

What the steps are good for is shown by leaving each out: the harm is seen then.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from simm.arena import reader as reader_module
from simm.arena.hashing import Hasher, shard_of
from simm.arena.layout import ENTRY_BOUND, ENTRY_CRC, SLOT_WORDS, Word
from simm.arena.reader import ArenaReader, LocatedMany, Unsettled
from simm.arena.store import Store
from simm.constants import SHARD_COUNT
from simm.host.buffers import Copier, Span, fits
from simm.ipc import get
from simm.ipc.arena_files import OwnedArena
from simm.ipc.get import ShmGet
from simm.sdk.batch import Batch
from simm.sdk.ops.owners import holds_in
from simm.wire.shard_set import FROZEN
from tests.support import crash
from tests.support.crash import A, Cut, read_everywhere, reuse_of_a_chunk, small
from tests.support.store_world import World, is_value, new_segment, remove_segment
from tests.support.trace_replay import read_by_column

SIZE = 16 << 20
#: Loads and copies of a read by column: where time may pass.
STEPS = 20
digest_of = Hasher("columns")


@pytest.fixture
def segment() -> Iterator[OwnedArena]:
    made = new_segment(SIZE)
    try:
        yield made
    finally:
        remove_segment(made)


class Arena:
    """A store with ``count`` values of different lengths, and a reader."""

    def __init__(self, segment: OwnedArena, count: int = 400, cluster: int = 7) -> None:
        self.store = Store.create(segment.mm, slots=2048)
        self.store.open()
        self.words = memoryview(segment.mm).cast("Q")
        for shard in range(SHARD_COUNT):
            self.store.shards[shard] = 3
        self.digests = [digest_of(str(number)) for number in range(count)]
        self.lengths = {digest: 100 + 7 * number for number, digest in enumerate(self.digests)}
        self.reader = ArenaReader(segment.name, cluster=cluster)
        for number, digest in enumerate(self.digests):
            offset = self.store.geometry.data_offset + 4096 * number
            start = offset - self.reader.data_offset
            self.reader.data[start : start + 4096] = digest * 256
            self.store.table.publish(digest, offset, self.lengths[digest], 0, 4096, 0, 0, 1)

    def value(self, digest: bytes) -> bytes:
        return (digest * 256)[: self.lengths[digest]]

    def word_of(self, digest: bytes, field: int = 0) -> int:
        """The position of a slot's word, in words from the arena's start."""
        return self.store.geometry.slots_offset // 8 + self.store.table.lookup(digest) * SLOT_WORDS + field

    def close(self) -> None:
        self.words.release()
        del self.reader
        self.store.release()


@pytest.fixture
def arena(segment: OwnedArena) -> Iterator[Arena]:
    remove_segment(segment)
    segment.__dict__ = new_segment(SIZE, 2048).__dict__
    made = Arena(segment)
    yield made
    made.close()


def spoil(arena: Arena, rng: random.Random, digest: bytes) -> None:
    """Store something into one slot's fields that no worker would."""
    words = arena.words
    at = arena.word_of(digest)
    data_offset, data_end = arena.reader.data_offset, arena.reader.data_end
    bits = (1 << 64) - 1
    kind = rng.randrange(8)
    if kind == 0:
        words[at] |= 1
    elif kind == 1:
        words[at + rng.choice([1, 2])] ^= 1 << rng.randrange(64)
    elif kind == 2:
        words[at + 3] = rng.choice([0, data_offset - 1, data_end, data_end - 1, 1 << 63, bits, bits - 4096, 1 << 62])
    elif kind == 3:
        words[at + 4] = rng.choice([(1 << 32) - 1, 1 << 31, data_end - data_offset, 0])
    elif kind == 4:
        words[at + 3], words[at + 4] = bits - rng.randrange(1 << 33), (1 << 32) - 1 - rng.randrange(4096)
    elif kind == 5:
        words[at + 5] |= rng.choice([ENTRY_CRC, ENTRY_BOUND, 1 << 15]) << 48
    elif kind == 6:
        words[at + 5] |= 0xFFFF << 32  # another namespace
    else:
        words[at + 4] |= 0xFFFF_FFFF << 32  # a checksum


def naive(reader: ArenaReader, digest: bytes, slot: int) -> tuple[int, int, int] | None:
    """Seq, start and length of an entry in a slot, field by field; None if there is none for everybody."""
    at = reader._slots_offset + slot * 64
    seq, found, offset, length, _, _, _, flags = struct.unpack_from("<Q16sQIIIHH", reader._meta, at)
    inside = reader.data_offset <= offset <= reader.data_end - length
    if slot < 0 or seq & 1 or found != digest or not inside or flags & ~ENTRY_CRC:
        return None
    return seq, offset - reader.data_offset, length


@pytest.mark.parametrize("seed", range(6))
def test_places_are_those_of_single_calls(arena: Arena, seed: int) -> None:
    rng = random.Random(seed)
    reader = arena.reader
    for digest in rng.sample(arena.digests, 200):
        spoil(arena, rng, digest)
    strangers = [digest_of(f"stranger {number}") for number in range(50)]
    batch = rng.choices(arena.digests + strangers, k=300)
    keys, slots = reader.candidates(batch)
    found = reader.locate_many(keys, slots)
    expected = [naive(reader, digest, slot) for digest, slot in zip(batch, slots.tolist())]
    assert None in expected and len(set(expected)) > 50
    assert found.settled.tolist() == [each is not None for each in expected]
    for number, each in enumerate(expected):
        if each is not None:
            got = tuple(int(column[number]) for column in (found.seqs, found.starts, found.lengths))
            assert got == each
        else:
            assert found.lengths[number] == 0
    assert int(found.lengths.sum()) == sum(each[2] for each in expected if each is not None)


@pytest.mark.parametrize("seed", range(6))
def test_copies_are_confirmed_as_single_calls_do(arena: Arena, seed: int) -> None:
    rng = random.Random(seed)
    reader, store = arena.reader, arena.store
    batch = rng.choices(arena.digests, k=200)
    keys, slots = reader.candidates(batch)
    found = reader.locate_many(keys, slots)
    unsettled = rng.sample(range(len(batch)), 20)
    found.settled[unsettled] = False
    for digest in rng.sample(arena.digests, 100):
        arena.words[arena.word_of(digest)] += rng.choice([1, 2, 2 << 44])
    for digest in rng.sample(arena.digests, 100):
        store.shards[shard_of(digest)] = rng.choice([0, FROZEN, FROZEN | 3, (1 << 64) - 1, FROZEN - 1])
    for cluster in (0, 7, 8):  # 8 is another cluster's
        arena.words[Word.CLUSTER] = cluster
        reader.visited[:] = bytes(len(reader.visited))
        kept = reader.confirm_many(found)
        single = [
            number not in unsettled and reader.confirm(digest, slot, int(seq))
            for number, (digest, slot, seq) in enumerate(zip(batch, found.slots.tolist(), found.seqs))
        ]
        assert kept.tolist() == single and any(single) == (cluster != 8)
        used = {slot for slot, hit in zip(found.slots.tolist(), single) if hit}
        assert {slot for slot in range(2048) if reader.visited[slot]} == used


def test_a_key_that_is_published_in_the_last_slot_after_the_search(arena: Arena) -> None:
    """The place of a miss, -1, is that slot's. Not its visited byte was set, but one of the stamp behind them all."""
    reader, words, geometry = arena.reader, arena.words, arena.store.geometry
    digest = digest_of("stranger")
    keys, slots = reader.candidates([digest])
    assert slots.tolist() == [-1]
    first, last = arena.word_of(arena.digests[0]), geometry.slots_offset // 8 + (geometry.slots - 1) * SLOT_WORDS
    words[last : last + SLOT_WORDS] = words[first : first + SLOT_WORDS]
    words[last + 1 : last + 3] = memoryview(digest).cast("Q")
    stamp = words[geometry.size // 8 - 1]
    assert reader.confirm_many(reader.locate_many(keys, slots)).tolist() == [True]
    assert words[geometry.size // 8 - 1] == stamp and reader.visited[geometry.slots - 1] == 1


# -- copies --------------------------------------------------------------------------------------------


def sinks_for(arena: Arena, batch: list[bytes], rng: random.Random) -> list[Any]:
    """Buffers of all kinds: of the value's size, larger, smaller, for one size only, and none."""
    sinks: list[Any] = []
    for digest in batch:
        size = max(1, arena.lengths.get(digest, 100) + rng.choice([0, 0, 0, 5, -5]))
        room = np.full(size, 0xEE, np.uint8)
        kind = rng.randrange(4)
        span = Span(room.ctypes.data, size, keep=room)
        span.least = size if kind == 2 else 0
        sinks.append(memoryview(room) if kind == 0 else span if kind < 3 else rng.choice([None, memoryview(room)]))
    return sinks


def bytes_of(sink: Any) -> bytes:
    return bytes(sink if type(sink) is memoryview else sink.view())


def length_of(sink: Any) -> int:
    return len(sink)


@pytest.mark.parametrize("group", [4096, 30_000, 8 << 20])
@pytest.mark.parametrize("seed", range(3))
def test_values_are_copied_whole_or_not_at_all(
    arena: Arena, seed: int, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(get, "GROUP_BYTES", group)
    rng = random.Random(seed)
    batch = rng.sample([*arena.digests[:200], *(digest_of(f"stranger {number}") for number in range(20))], 150)
    sinks = sinks_for(arena, batch, rng)
    results: list[Any] = [None] * (2 * len(batch))
    positions = sorted(rng.sample(range(len(results)), len(batch)))  # of a batch with other owners too
    spread: list[Any] = ["another owner's"] * len(results)
    for position, sink in zip(positions, sinks):
        spread[position] = sink
    rest = ShmGet(Copier(), False, {}).copy_many(
        arena.reader, positions, *arena.reader.candidates(batch), spread, results
    )
    for number, (position, digest, sink) in enumerate(zip(positions, batch, sinks)):
        length = arena.lengths.get(digest, -1)
        if length < 0 or sink is None or not fits(length, sink):
            assert number in rest and results[position] is None
            assert sink is None or bytes_of(sink) == b"\xee" * length_of(sink), "not one byte is written"
        else:
            assert results[position] == length
            assert bytes_of(sink) == arena.value(digest) + b"\xee" * (length_of(sink) - length)
    assert sum(got is not None for got in results) == len(batch) - len(rest)


def test_what_changes_while_it_is_copied_is_left(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = arena.digests[:60]
    changed = batch[::7]
    real = ShmGet._copy_group

    def slow(self: ShmGet, *arguments: Any) -> None:
        real(self, *arguments)
        for digest in changed:
            arena.words[arena.word_of(digest)] += 2

    monkeypatch.setattr(ShmGet, "_copy_group", slow)
    sinks = [memoryview(bytearray(arena.lengths[digest])) for digest in batch]
    results: list[Any] = [None] * len(batch)
    rest = ShmGet(Copier(), False, {}).copy_many(
        arena.reader, range(len(batch)), *arena.reader.candidates(batch), sinks, results
    )
    assert [batch[number] for number in rest] == changed
    assert [got is None for got in results] == [digest in changed for digest in batch]


@pytest.mark.parametrize("count", [5, 60])
@pytest.mark.parametrize("seed", range(4))
def test_what_a_put_of_what_is_absent_takes_for_stored(arena: Arena, seed: int, count: int) -> None:
    """A value of that length that a get would deliver: none in a write, of another owner or of another's client."""
    rng = random.Random(seed)
    reader = arena.reader
    reader.namespace = 0
    batch = rng.sample([*arena.digests, *(digest_of(f"stranger {number}") for number in range(100))], count)
    lengths = [arena.lengths.get(digest, 100) + rng.choice([0, 0, 0, 1]) for digest in batch]
    for digest in rng.sample(arena.digests, 100):
        at = arena.word_of(digest)
        kind = rng.randrange(4)
        if kind == 0:
            arena.words[at] |= 1
        elif kind == 1:
            arena.words[at + 5] |= ENTRY_BOUND << 48
        elif kind == 2:
            arena.words[at + 5] |= ENTRY_BOUND << 48 | 1 << 32  # of another namespace
        else:
            arena.store.shards[shard_of(digest)] = rng.choice([0, FROZEN | 3])
    expected = []
    for digest, length in zip(batch, lengths):
        try:
            found = reader.locate(digest)
        except Unsettled:
            found = None
        there = found is not None and found.length == length and reader.confirm(digest, found.slot, found.seq)
        expected.append(int(there and found is not None and reader.is_own(found)))
    routes: Any = None
    keys = Batch(["another owner's", *batch], None)  # type: ignore[list-item]
    reader.visited[:] = bytes(len(reader.visited))
    assert not holds_in([0, *lengths], routes, reader, range(1, count + 1), keys, None)
    assert keys.results == [0, *expected] and 0 < sum(expected) < count
    assert sum(reader.visited) == sum(expected)


# -- time passes ---------------------------------------------------------------------------------------


def stopped_reader(segment: OwnedArena) -> None:
    """A reader is stopped at each of its loads while its value's chunk passes to another tenant."""
    world = World(segment, slots=64)
    tape, contents = reuse_of_a_chunk(world, lambda player: world.store.delete([A]))
    old = next(iter(contents[0].values()))
    small(tape, contents, 5)
    seen = read_everywhere(
        world, tape, contents, lambda result: not isinstance(result, bytes) or result == old, read_by_column, STEPS
    )
    assert seen["hit"] and seen["miss"] and seen["unsettled"], seen


def overwritten(segment: OwnedArena) -> None:
    """The same while the value is overwritten, and its first chunk gets another tenant."""
    world = World(segment, slots=64)
    tape, contents = reuse_of_a_chunk(world, lambda player: world.put(player, A, 4096))
    old = next(iter(contents[0].values()))
    new = world.values[A]
    small(tape, contents, 5)
    read_everywhere(
        world, tape, contents,
        lambda result: not isinstance(result, bytes) or result == old or is_value(result, new), read_by_column, STEPS,
    )  # fmt: skip


def lost_shard(segment: OwnedArena) -> None:
    """No reader that starts after A's shard word is 0 gets A."""
    world = World(segment, slots=64)
    mine = bytearray(world.mine)
    mine[shard_of(A) >> 3] &= ~(1 << (shard_of(A) & 7))
    world.put(world.join(), A, 4096)
    cut = Cut(world, lambda world: lambda: world.set_shards(bytes(mine)))
    reader = world.reader
    looked = 0
    for frame in cut.tape.frames:
        cut.show(frame)
        if not 0 < reader.shard_word(A) < FROZEN:
            looked += 1
            result = read_by_column(reader, A, lambda: None, lambda found: bytes(reader.value(found)))
            assert not isinstance(result, bytes), "a value of a shard that was given up was read"
    assert looked >= 3


def dead_in_an_overwrite(segment: OwnedArena) -> None:
    """No time passes: whatever a death in an overwrite has left, a reader gets the old value or the new one."""
    world = World(segment, slots=64)
    cut = Cut(world, crash.overwrite)
    reader, before, after = world.reader, cut.before.values, cut.after.values
    for frame in cut.tape.frames:
        cut.show(frame)
        result = read_by_column(reader, A, lambda: None, lambda found: bytes(reader.value(found)))
        if isinstance(result, bytes):
            assert any(is_value(result, values[A]) for values in (before, after)), "a mix"


Patch = pytest.MonkeyPatch


def confirming(patch: Patch, change: Callable[[ArenaReader, LocatedMany], None]) -> None:
    """Let the reader confirm something else than what it has copied."""
    real = ArenaReader.confirm_many

    def confirm(self: ArenaReader, found: LocatedMany) -> Any:
        shards = self._np_shards
        try:
            return real(self, change(self, found) or found)
        finally:
            self._np_shards = shards

    patch.setattr(ArenaReader, "confirm_many", confirm)


def no_recheck(patch: Patch) -> None:
    """The seq words are what they are now."""
    confirming(patch, lambda self, found: found._replace(seqs=self._np_slots.take(found.at)))


def no_shard_check(patch: Patch) -> None:
    class Owned:
        def take(self, at: Any) -> Any:
            return np.full(len(at), 1, np.uint64)

    def change(self: ArenaReader, found: LocatedMany) -> None:
        self._np_shards = Owned()  # type: ignore[assignment]

    confirming(patch, change)


def no_odd_seqs(patch: Patch) -> None:
    """A slot in the middle of a write counts as any other."""
    patch.setattr(reader_module, "_EVEN", np.uint64((1 << 64) - 1))


SCRIPTS = [stopped_reader, overwritten, lost_shard, dead_in_an_overwrite]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_all_is_well_with_all_steps(segment: OwnedArena, script: Callable[[OwnedArena], None]) -> None:
    script(segment)


@pytest.mark.parametrize(
    ("take_away", "script"),
    [
        (no_recheck, stopped_reader), (no_recheck, overwritten), (no_shard_check, lost_shard),
        (no_odd_seqs, dead_in_an_overwrite),
    ],
    ids=lambda function: function.__name__,
)  # fmt: skip
def test_the_harm_is_seen(
    segment: OwnedArena, take_away: Callable[[Patch], None], script: Callable[[OwnedArena], None], monkeypatch: Patch
) -> None:
    take_away(monkeypatch)
    with pytest.raises(AssertionError):
        script(segment)

"""The allocator against a reference model (a dict of intervals), its waste, its recovery, and what it refuses."""

from __future__ import annotations

import random
import sys
import tracemalloc
from bisect import bisect_left
from collections.abc import Callable

import pytest

from simm.arena.extents import Extents
from simm.constants import NO_SLOT, PAGE_BYTES, SLAB_BYTES, SLAB_CHUNK_BYTES_MAX, VALUE_BYTES_MAX
from simm.errors import CorruptionError, UsageError
from simm.slab import (
    CHUNK_SIZES,
    CHUNKS_PER_SLAB,
    FREE,
    GROUPS,
    LARGE,
    LARGE_GROUP,
    SLAB,
    SLOTS_MAX,
    Allocator,
    chunk_bytes_for,
    class_of,
)
from tests.support.consistency import check
from tests.support.counted_dict import CountedDict
from tests.support.dose import dose, dosed

MIB = 1 << 20


class Model:
    """What is allocated, as offset -> (bytes, owner), and the slowest way to answer everything from it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.live: dict[int, tuple[int, int]] = {}

    def allocated(self, offset: int, n: int) -> None:
        size = chunk_bytes_for(n)
        assert n <= size and 0 <= offset <= self.size - size
        starts = sorted(self.live)
        place = bisect_left(starts, offset)
        if place < len(starts):
            assert offset + size <= starts[place]
        if place:
            before = starts[place - 1]
            assert before + self.live[before][0] <= offset
        if size <= SLAB_CHUNK_BYTES_MAX:
            assert offset % SLAB_BYTES % size == 0
            cell = offset - offset % SLAB_BYTES
            for other, (other_size, _) in self.live.items():
                if other < cell + SLAB_BYTES and other + other_size > cell:
                    assert other_size == size, "two kinds of chunks in one slab"
        if n % PAGE_BYTES == 0:
            assert offset % PAGE_BYTES == 0
        self.live[offset] = (size, NO_SLOT)

    def cells(self) -> dict[int, list[int]]:
        """Base of every slab that holds a live chunk -> sizes of its live chunks."""
        cells: dict[int, list[int]] = {}
        for offset, (size, _) in self.live.items():
            if size <= SLAB_CHUNK_BYTES_MAX:
                cells.setdefault(offset - offset % SLAB_BYTES, []).append(size)
        return cells

    def gaps(self) -> list[tuple[int, int]]:
        """Stretches without a live slab or large chunk."""
        taken = [(base, base + SLAB_BYTES) for base in self.cells()]
        taken += [(o, o + size) for o, (size, _) in self.live.items() if size > SLAB_CHUNK_BYTES_MAX]
        gaps, position = [], 0
        for start, end in [*sorted(taken), (self.size, self.size)]:
            if start > position:
                gaps.append((position, start))
            position = end
        return gaps

    def has_room(self, n: int) -> bool:
        need = chunk_bytes_for(n)
        if need > SLAB_CHUNK_BYTES_MAX:
            return any(end - start >= need for start, end in self.gaps())
        if any(sizes[0] == need and len(sizes) < SLAB_BYTES // need for sizes in self.cells().values()):
            return True
        return any(-(-start // SLAB_BYTES) * SLAB_BYTES + SLAB_BYTES <= end for start, end in self.gaps())

    def free_bytes(self) -> int:
        tails = sum(SLAB_BYTES % sizes[0] for sizes in self.cells().values())
        return self.size - sum(size for size, _ in self.live.values()) - tails

    def compare(self, allocator: Allocator) -> None:
        check(allocator)
        assert allocator.free_bytes == self.free_bytes()
        assert allocator.used_bytes == sum(size for size, _ in self.live.values())
        seen = {}
        for span in allocator.walk():
            if span.kind == LARGE:
                seen[span.offset] = (span.size, span.detail)
            elif span.kind == SLAB:
                size = CHUNK_SIZES[span.detail]
                seen.update({o: (size, owner) for o, owner in allocator.chunks_of_slab(span.offset)})
        assert seen == self.live


def is_allocated(allocator: Allocator, offset: int) -> bool:
    try:
        allocator.owner(offset)
    except CorruptionError:
        return False
    return True


def _any_size(rng: random.Random) -> int:
    kind = rng.randrange(6)
    if kind == 0:
        return rng.randint(1, 2000)
    if kind == 1:
        return 4096 * rng.randint(1, 32)
    if kind == 2:
        return rng.randint(1, SLAB_CHUNK_BYTES_MAX)
    if kind == 3:
        return rng.randint(SLAB_CHUNK_BYTES_MAX - 5000, SLAB_CHUNK_BYTES_MAX + 5000)
    return rng.randint(SLAB_CHUNK_BYTES_MAX, 3 * MIB)


@pytest.mark.parametrize("seed", dose(range(6), quick=2))
def test_every_answer_equals_that_of_a_reference_model(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice((8 * MIB, 15 * MIB + 5 * PAGE_BYTES, 24 * MIB))
    allocator, model = Allocator(size), Model(size)
    refused = 0
    for step in range(900):
        action = rng.random()
        if action < 0.55 or not model.live:
            n = _any_size(rng)
            offset = allocator.alloc(n)
            if offset < 0:
                refused += 1
                assert not model.has_room(n)
            else:
                assert model.has_room(n)
                model.allocated(offset, n)
        elif action < 0.85:
            offset = rng.choice(list(model.live))
            assert allocator.free(offset) == model.live.pop(offset)[1]
        else:
            offset = rng.choice(list(model.live))
            size_of, owner = model.live[offset]
            new = NO_SLOT if owner != NO_SLOT else rng.randrange(SLOTS_MAX)
            assert allocator.set_owner(offset, new) == class_of(size_of)
            model.live[offset] = (size_of, new)
            assert (allocator.owner(offset), allocator.chunk_bytes(offset)) == (new, size_of)
        if step % 60 == 0:
            model.compare(allocator)
    model.compare(allocator)
    assert refused > 5, "the region never filled: the test tests nothing"
    for offset in list(model.live):
        allocator.free(offset)
        del model.live[offset]
    model.compare(allocator)
    assert allocator.alloc(size) == 0, "an empty region has room for one value of its size"


@pytest.mark.parametrize("seed", dose(range(4), quick=2))
def test_recovery_in_any_order_gives_the_same_region_back(seed: int) -> None:
    rng = random.Random(seed)
    before = Allocator(24 * MIB)
    live: dict[int, int] = {}
    for _ in range(400):
        n = _any_size(rng)
        offset = before.alloc(n)
        if offset >= 0:
            live[offset] = chunk_bytes_for(n)
        if live and rng.random() < 0.45:
            gone = rng.choice(list(live))
            before.free(gone)
            del live[gone]
    after, model = Allocator(24 * MIB), Model(24 * MIB)
    order = list(live)
    rng.shuffle(order)
    for count, offset in enumerate(order):
        after.reserve(offset, live[offset])
        model.live[offset] = (live[offset], NO_SLOT)
        if count == len(order) // 2:
            check(after)  # a look in between ends the recovery; the next reserve begins it anew
    model.compare(after)
    assert after.free_bytes == before.free_bytes
    for offset in order[::3]:
        after.free(offset)
        del model.live[offset]
    for _ in range(300):
        n = _any_size(rng)
        offset = after.alloc(n)
        assert (offset >= 0) == model.has_room(n)
        if offset >= 0:
            model.allocated(offset, n)
    model.compare(after)


def test_recovery_refuses_what_contradicts() -> None:
    allocator = Allocator(8 * MIB)
    allocator.reserve(4096, 4096)
    allocator.reserve(3 * MIB, 2 * MIB)
    for offset, size in (
        (4096, 4096),  # twice
        (0, 8192),  # another class in a known slab
        (MIB, MIB),  # a large chunk in a slab
        (4 * MIB, MIB),  # large over large
        (2 * MIB, MIB + 4096),  # large over the start of another
        (2 * MIB, 4096),  # a slab that would overlap a large chunk
        (6 * MIB + 100, 4096),  # between two chunks
        (6 * MIB, 4097),  # no chunk size
        (6 * MIB, 0),
        (6 * MIB, MIB + 100),
        (6 * MIB + 64, MIB),  # large and not aligned
        (6 * MIB + SLAB_BYTES // 4352 * 4352, 4352),  # in the slab's tail
        (7 * MIB, 2 * MIB),  # leaves the region
        (8 * MIB, 4096),
        (-4096, 4096),
    ):
        with pytest.raises(CorruptionError):
            allocator.reserve(offset, size)
    check(allocator)
    assert sorted(s.offset for s in allocator.walk() if s.kind != FREE) == [0, 3 * MIB]
    assert [o for o, _ in allocator.chunks_of_slab(0)] == [4096]


def test_a_slab_does_not_fit_into_the_regions_last_part() -> None:
    allocator = Allocator(3 * MIB)
    with pytest.raises(CorruptionError):
        allocator.reserve(2 * MIB, 4096)
    assert allocator.alloc(4096) < SLAB_BYTES
    assert allocator.alloc(64) == -1
    assert allocator.alloc(MIB) == 2 * MIB
    check(allocator)


def test_sizes_of_the_classes() -> None:
    assert LARGE_GROUP == len(CHUNK_SIZES) == GROUPS - 1
    assert list(CHUNK_SIZES) == sorted(set(CHUNK_SIZES))
    assert set(CHUNK_SIZES) >= set(range(64, 1025, 64)) | set(range(4096, SLAB_CHUNK_BYTES_MAX + 1, 4096))
    for low in (2**k for k in range(10, 17)):
        assert sum(low < size <= 2 * low for size in CHUNK_SIZES) == 16
    for n in range(1, SLAB_CHUNK_BYTES_MAX + 1):
        group = class_of(n)
        assert CHUNK_SIZES[group] >= n and (group == 0 or CHUNK_SIZES[group - 1] < n)
        assert chunk_bytes_for(n) == CHUNK_SIZES[group]
    assert class_of(SLAB_CHUNK_BYTES_MAX + 1) == class_of(1 << 40) == LARGE_GROUP
    for n in (0, -1, -64, -(1 << 40)):
        with pytest.raises(UsageError):
            class_of(n)
        with pytest.raises(UsageError):
            Allocator(SLAB_BYTES).alloc(n)


def test_no_uniform_workload_wastes_an_eighth() -> None:
    # Every size up to the largest slab class, slab tail included.
    worst = 0.0
    for n in range(1025, SLAB_CHUNK_BYTES_MAX + 1):
        group = class_of(n)
        worst = max(worst, 1 - CHUNKS_PER_SLAB[group] * n / SLAB_BYTES)
    # Above, the waste falls within each chunk size as n grows: the first n of every step is its worst.
    for n in range(SLAB_CHUNK_BYTES_MAX + 1, 64 * MIB + 1, PAGE_BYTES):
        assert chunk_bytes_for(n) - n < PAGE_BYTES
        worst = max(worst, 1 - n / chunk_bytes_for(n))
    assert chunk_bytes_for(VALUE_BYTES_MAX) == VALUE_BYTES_MAX
    assert 0.08 < worst < 0.087 < 0.125


@pytest.mark.parametrize("n", [4097, 34_817, 69_633, 131_073, MIB + 1, 700_001])
def test_a_full_region_holds_what_the_bound_promises(n: int) -> None:
    allocator = Allocator(64 * MIB)
    count = 0
    while allocator.alloc(n) >= 0:
        count += 1
    rest = 0 if n <= SLAB_CHUNK_BYTES_MAX else chunk_bytes_for(n)  # of the region itself
    assert count * n >= 0.875 * (64 * MIB - rest)


def test_an_empty_slab_serves_other_classes_and_large_values() -> None:
    allocator = Allocator(4 * MIB)
    chunks = [allocator.alloc(4096) for _ in range(1024)]
    assert allocator.alloc(8192) == allocator.alloc(MIB) == allocator.alloc(4096) == -1
    for offset in chunks[:512]:
        allocator.free(offset)
    assert allocator.alloc(8192) >= 0
    assert allocator.alloc(MIB) == -1
    for offset in chunks[512:]:
        allocator.free(offset)
    assert allocator.alloc(2 * MIB) >= 0
    check(allocator)
    slab, large = sorted((span for span in allocator.walk() if span.kind != FREE), key=lambda span: span.kind)
    assert (slab.kind, slab.detail, large.kind, large.size) == (SLAB, class_of(8192), LARGE, 2 * MIB)
    assert allocator.used_of_slab(slab.offset) == 1


def test_spans_are_walked_both_ways() -> None:
    allocator = Allocator(9 * MIB)
    rng = random.Random(5)
    live = [o for o in (allocator.alloc(_any_size(rng)) for _ in range(40)) if o >= 0]
    for offset in live[::3]:
        allocator.free(offset)
    forward = list(allocator.walk())
    assert forward[0].offset == 0 and sum(span.size for span in forward) == 9 * MIB
    boundary, backward = 9 * MIB, []
    while boundary:
        backward.append(allocator.span_before(boundary))
        boundary = backward[-1].offset
    assert backward[::-1] == forward
    assert {span.kind for span in forward} == {FREE, SLAB, LARGE}
    kept = next(offset for offset in live if is_allocated(allocator, offset))
    assert allocator.span_of(kept) in forward
    with pytest.raises(CorruptionError):
        allocator.span_at(forward[1].offset + 64)
    with pytest.raises(CorruptionError):
        allocator.span_before(forward[1].offset + 64)


def test_what_is_no_allocated_chunk_is_refused_and_changes_nothing() -> None:
    allocator = Allocator(8 * MIB)
    small, large = allocator.alloc(5000), allocator.alloc(MIB)
    free_small, free_large = allocator.alloc(5000), allocator.alloc(MIB)
    allocator.free(free_small)
    allocator.free(free_large)
    before = (allocator.free_bytes, list(allocator.walk()))
    tail = small - small % SLAB_BYTES + 2 * MIB - 64
    for offset in (free_small, free_large, small + 64, large + 4096, tail, -64, -1, 8 * MIB, 1 << 60):
        for call in (allocator.free, allocator.owner, allocator.chunk_bytes, allocator.span_of):
            if call is allocator.span_of and offset in (free_small, free_large, small + 64, tail):
                continue  # names the span a chunk would lie in
            with pytest.raises(CorruptionError):
                call(offset)
        with pytest.raises(CorruptionError):
            allocator.set_owner(offset, 1)
        assert not is_allocated(allocator, offset)
    for offset in (small, large):
        allocator.set_owner(offset, 7)
        with pytest.raises(CorruptionError):
            allocator.set_owner(offset, 8)
        for slot in (-1, SLOTS_MAX, NO_SLOT + 1):
            with pytest.raises(UsageError):
                allocator.set_owner(offset, slot)
        allocator.set_owner(offset, NO_SLOT)
    assert before == (allocator.free_bytes, list(allocator.walk()))
    check(allocator)


@pytest.mark.parametrize("size", [0, SLAB_BYTES - PAGE_BYTES, SLAB_BYTES + 1, 32 << 40, -SLAB_BYTES])
def test_impossible_regions_are_refused(size: int) -> None:
    with pytest.raises(UsageError):
        Allocator(size)


def _lose_free_chunk(allocator: Allocator) -> None:
    slab = next(s for s in allocator._slabs if s is not None)
    slab.head = slab.owners[slab.head] & 0xFFFF


def _revive_chunk(allocator: Allocator) -> None:
    slab = next(s for s in allocator._slabs if s is not None)
    slab.owners[slab.head] = 3


def _miscount(allocator: Allocator) -> None:
    allocator._used[class_of(4096)] += 1


def _lose_extent(allocator: Allocator) -> None:
    allocator._extents._by_size.pop()


def _shrink_extent(allocator: Allocator) -> None:
    start, size = next(iter(allocator._extents.free.items()))
    allocator._extents.free[start] = size - PAGE_BYTES


def _lose_large(allocator: Allocator) -> None:
    allocator._extents._words.popitem()


def _split_extent(allocator: Allocator) -> None:
    start, size = next(iter(allocator._extents.free.items()))
    allocator._extents._remove(start)
    allocator._extents._put(start, PAGE_BYTES)
    allocator._extents._put(start + PAGE_BYTES, size - PAGE_BYTES)


def _wrong_list(allocator: Allocator) -> None:
    allocator._partial[class_of(4096)].pop()


def _lose_tail(allocator: Allocator) -> None:
    allocator._tail_bytes -= 64


@pytest.mark.parametrize(
    "damage",
    [
        _lose_free_chunk,
        _revive_chunk,
        _miscount,
        _lose_extent,
        _shrink_extent,
        _lose_large,
        _split_extent,
        _wrong_list,
        _lose_tail,
    ],
)
def test_check_sees_each_kind_of_damage(damage) -> None:  # type: ignore[no-untyped-def]
    allocator = Allocator(8 * MIB)
    for n in (4096, 4096, MIB, 200_000):
        allocator.alloc(n)
    check(allocator)
    damage(allocator)
    with pytest.raises(CorruptionError):
        check(allocator)


def test_a_chunk_costs_four_bytes_and_a_large_value_little() -> None:
    Allocator(SLAB_BYTES).alloc(4096)  # what is made once only
    tracemalloc.start()
    try:
        half = dosed(128, quick=64) * MIB
        allocator = Allocator(2 * half)
        start = tracemalloc.get_traced_memory()[0]
        count = 0
        while allocator.used_bytes < half:
            allocator.alloc(4096)
            count += 1
        small = (tracemalloc.get_traced_memory()[0] - start) / count
        start = tracemalloc.get_traced_memory()[0]
        large_count = 0
        while allocator.alloc(SLAB_CHUNK_BYTES_MAX + 1) >= 0:
            large_count += 1
        large = (tracemalloc.get_traced_memory()[0] - start) / large_count
    finally:
        tracemalloc.stop()
    assert count == half // 4096 and large_count > dosed(900, quick=400)
    assert small < 6
    assert large < 400
    assert sys.getsizeof(allocator._extents._by_size) < 10_000


def test_what_is_known_of_slabs_and_free_extents() -> None:
    allocator = Allocator(16 * SLAB_BYTES)
    assert list(allocator.slabs()) == [] and allocator.grown == set()
    assert [span.size for span in allocator.largest_free(4)] == [16 * SLAB_BYTES]
    small = [allocator.alloc(65_536) for _ in range(40)]
    large = allocator.alloc(300_000)
    bases = {offset - offset % SLAB_BYTES for offset in small}
    assert {base for base, _ in allocator.slabs()} == allocator.grown == bases and len(bases) == 2
    group = class_of(65_536)
    assert all(allocator.class_of_slab(base) == group for base in bases)
    assert allocator.class_of_slab(large) == -1
    for slot, offset in enumerate(small[:36]):
        allocator.set_owner(offset, slot)
    first = small[0] - small[0] % SLAB_BYTES
    assert sorted(allocator.sample_of_slab(first, 32)) == list(range(32))
    assert allocator.sample_of_slab(first, 8) == [allocator.owner(first + 4 * at * 65_536) for at in range(8)]
    (second,) = bases - {first}
    assert sorted(allocator.sample_of_slab(second, 32)) == list(range(32, 36))
    first_chunk, lone = allocator.alloc(4096), allocator.alloc(4096)  # one of four places of a sample, and none
    allocator.set_owner(lone, 99)
    assert allocator.sample_of_slab(first_chunk, 4) == [99]
    check(allocator)


@pytest.mark.parametrize("seed", range(4))
def test_free_lists_are_linked_as_one_by_one(seed: int) -> None:
    """All free chunks of a recovered slab, in address order, and then a chunk for each."""
    rng = random.Random(seed)
    for size in (64, 4096, 102_400, 131_072):
        count = CHUNKS_PER_SLAB[class_of(size)]
        used = set(rng.sample(range(count), rng.choice([1, count // 2, count - 1, count])))
        allocator = Allocator(SLAB_BYTES)
        for index in used:
            allocator.reserve(index * size, size)
        allocator.end_recovery()
        check(allocator)
        free = [index * size for index in range(count) if index not in used]
        assert allocator.alloc_many(size, count) == free
        assert allocator.alloc(size) == -1
        check(allocator)


def emptied(slabs: int, keep: Callable[[int], bool]) -> Allocator:
    """A region of slabs of one class, of which those are empty again that are not to be kept."""
    allocator = Allocator(slabs * SLAB_BYTES)
    offsets = allocator.alloc_many(SLAB_CHUNK_BYTES_MAX, slabs * CHUNKS_PER_SLAB[-1])
    assert len(offsets) == slabs * CHUNKS_PER_SLAB[-1]
    for offset in offsets:
        if not keep(offset // SLAB_BYTES):
            allocator.free(offset)
    return allocator


def counted(allocator: Allocator) -> CountedDict:
    """Count the looks at the empty slabs and the free extents from now on."""
    looks = CountedDict(allocator._empty)
    allocator._empty = looks
    allocator._extents.free = looks.beside(allocator._extents.free)
    return looks


def test_a_value_as_large_as_a_slab_frees_one_and_a_larger_one_all_of_them() -> None:
    allocator = emptied(1000, lambda _: False)
    assert allocator.alloc(MIB) >= 0 and len(allocator._empty) == 999
    assert allocator.alloc(MIB) >= 0 and len(allocator._empty) == 999, "the rest of that slab"
    assert allocator.alloc(2 * MIB) >= 0 and len(allocator._empty) == 998
    check(allocator)
    assert allocator.alloc(5 * MIB) >= 0 and not allocator._empty
    check(allocator)


def test_issue_a_large_value_sorts_the_free_extents_once_after_a_mass_delete(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each slab was placed by itself, with a move of all behind it: a quarter of a second for 16,384, in one turn."""
    allocator, placed = emptied(400, lambda slab: slab % 2 == 1), []
    monkeypatch.setattr(Extents, "_put", lambda self, start, size: placed.append(start))
    assert allocator.alloc(3 * MIB) == -1
    check(allocator)
    assert not placed and len(allocator._extents.free) == 200


def test_issue_looks_for_room_among_empty_slabs_are_as_many_as_those() -> None:
    """Every other slab is empty. All were looked at again by each value that found no room, and only 64 were freed."""
    slabs = 2000
    allocator = emptied(slabs, lambda slab: slab % 2 == 1)
    looks = counted(allocator)
    for base in range(SLAB_BYTES, slabs * SLAB_BYTES, 20 * SLAB_BYTES):
        assert allocator.alloc(7 * MIB) == -1
        for offset in range(base, base + SLAB_BYTES, SLAB_CHUNK_BYTES_MAX):
            allocator.free(offset)
    assert looks.count < 10 * slabs
    assert allocator.alloc(6 * MIB) >= 0
    check(allocator)


@pytest.mark.parametrize("many", [1, 1 << 40], ids=["one by one", "at once"])
@pytest.mark.parametrize("seed", dose(range(20), quick=4))
def test_a_large_value_fits_wherever_empty_slabs_and_free_extents_meet(
    seed: int, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("simm.arena.extents.MANY", many)
    rng = random.Random(seed)
    size = 24 * MIB + rng.randrange(3) * PAGE_BYTES
    allocator, model = Allocator(size), Model(size)
    fits = refused = 0
    for _ in range(300):
        n = rng.choice([SLAB_CHUNK_BYTES_MAX] * 4 + [MIB, 2 * MIB, 3 * MIB, 5 * MIB, 9 * MIB])
        offset = allocator.alloc(n)
        if offset < 0:
            refused += n > SLAB_BYTES
            assert not model.has_room(n)
            # As many go together as a mass delete takes: whole slabs and large values side by side.
            first = rng.randrange(size)
            for each in [each for each in model.live if first <= each < first + 5 * MIB]:
                allocator.free(each)
                del model.live[each]
        else:
            fits += n > SLAB_BYTES
            model.allocated(offset, n)
        model.compare(allocator)
    assert fits and refused


def test_what_is_free_is_known_after_a_recovery_too() -> None:
    allocator = Allocator(16 * SLAB_BYTES)
    allocator.reserve(0, 4096)
    assert [span.size for span in allocator.largest_free(1)] == [15 * SLAB_BYTES]
    allocator.reserve(4096, 4096)
    assert allocator.span_before(16 * SLAB_BYTES).size == 15 * SLAB_BYTES
    check(allocator)

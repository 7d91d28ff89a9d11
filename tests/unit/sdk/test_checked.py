"""Values with checksums that are read in ranges: no byte is delivered that was not stored, and few are looked at."""

from __future__ import annotations

import itertools
import random
import zlib

import pytest

from simm.arena.layout import ENTRY_CRC
from simm.host.buffers import Ranges
from simm.sdk.ops.checked import Checked, bytes_of, packed

SIZES = (1, 4095, 4096, 4097, 8192, 300_001)


def check(flags: int, crc: int, data: memoryview, before: int = 0) -> bool:
    """Do ``ShmGet.check`` without a client."""
    return zlib.crc32(data, before) == crc and bool(flags & ENTRY_CRC) and len(data) > 0


def ranges_of(*parts: tuple[int, int]) -> Ranges:
    return Ranges(
        [(offset, length, 0, None) for offset, length in parts], max(map(sum, parts)), sum(part[1] for part in parts)
    )


def some_ranges(rng: random.Random, size: int) -> Ranges:
    """Return ranges in any order, which may overlap."""
    starts = [rng.randrange(size) for _ in range(rng.choice((1, 1, 2, 5)))]
    return ranges_of(*((at, rng.randint(1, min(size - at, max(1, size // 20)))) for at in starts))


def copy_of(value: bytes, runs: list[tuple[int, int]]) -> memoryview:
    """Return what a reader has of a value: the bytes of the runs, and others behind them."""
    return memoryview(b"".join(value[first:end] for first, end in runs) + bytes(5))


@pytest.mark.parametrize("size", SIZES)
def test_what_is_delivered_is_checked_and_little_more(size: int) -> None:
    rng = random.Random(size)
    value = rng.randbytes(size)
    one = Checked(size, ENTRY_CRC, zlib.crc32(value))
    runs = one.runs(ranges_of((0, 1)))
    assert runs == [(0, size)], "the whole value, at first"
    assert one.holds(copy_of(value, runs), runs, check)
    for _ in range(100):
        ranges = some_ranges(rng, size)
        runs = one.runs(ranges)
        assert all(any(first <= at and at + length <= end for first, end in runs) for at, length, *_ in ranges.parts)
        assert all(before[1] < after[0] for before, after in itertools.pairwise(runs)), "nothing is looked at twice"
        beside = 2 * len(ranges.parts) * max(4096, size // 64 + 1)
        assert bytes_of(runs) <= ranges.total + beside
        copy = copy_of(value, runs)
        assert one.holds(copy, runs, check)
        for before, after in zip(ranges.parts, packed(ranges, runs).parts, strict=True):
            assert copy[after[0] : after[0] + after[1]] == value[before[0] : before[0] + before[1]]
            assert before[1:] == after[1:]
        spoilt = bytearray(value)
        at = rng.randrange(size)
        spoilt[at] ^= 1 << rng.randrange(8)
        seen = any(first <= at < end for first, end in runs)
        assert one.holds(copy_of(bytes(spoilt), runs), runs, check) is not seen


@pytest.mark.parametrize("size", SIZES)
def test_a_value_that_is_wrong_from_the_first_look_on_is_never_right(size: int) -> None:
    value = random.Random(size).randbytes(size)
    one = Checked(size, ENTRY_CRC, zlib.crc32(value) ^ 1)
    for _ in range(2):
        runs = one.runs(ranges_of((0, 1)))
        assert runs == [(0, size)] and not one.holds(copy_of(value, runs), runs, check)


def test_what_was_stored_without_a_checksum() -> None:
    assert Checked.of(100, 0, 0) is None
    lost = Checked.of(100, 0, zlib.crc32(bytes(100)))
    assert lost is not None, "its flag is lost: the checksum in its entry says so"
    assert not lost.holds(memoryview(bytes(100)), lost.runs(ranges_of((0, 1))), check)


@pytest.mark.parametrize(
    ("layers", "layer", "apart"),
    [(32, 8192, 1), (61, 7000, 1), (80, 8192, 2), (126, 4096, 2), (80, 2048, 2)],
)
def test_a_load_layer_by_layer_looks_twice_and_at_one_block_more_for_each_range(
    layers: int, layer: int, apart: int
) -> None:
    """A range that ends within a block makes two layers look at that one. ``apart``: ranges of a layer (K and V)."""
    value, part = bytes(layers * layer), layer // apart
    one = Checked(len(value), ENTRY_CRC, zlib.crc32(value))
    looked = 0
    for number in range(layers):
        ranges = ranges_of(*((each * layers * part + number * part, part) for each in range(apart)))
        runs = one.runs(ranges)
        looked += bytes_of(runs)
        assert number or one.holds(copy_of(value, runs), runs, check)
    assert looked <= 2 * len(value) + layers * apart * max(4096, len(value) // 64 + 1)

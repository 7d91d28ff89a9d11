"""Copies between a value and the pieces of memory that its parts lie in, against slices of bytes."""

from __future__ import annotations

import random
import zlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simm.errors import UsageError
from simm.host import buffers
from simm.host.buffers import RELEASE_BYTES, Copier, Pieces, Ranges, Span, address_of, fits, host_view
from simm.host.company import COMPANY
from simm.host.copy_pool import POOL
from simm.host.parts import HostRows, HostTable, checksum, cut, extents, gather, host_pieces, scatter, section, views_of

LARGE = RELEASE_BYTES + 3
KIB = 1 << 10


def part_of(offset: int, target: bytearray, *, by_address: bool) -> tuple[int, int, int, Any]:
    view = memoryview(target)
    return offset, len(target), address_of(view) if by_address else 0, view


def ranges_at(offsets: list[tuple[int, int]], rng: random.Random) -> tuple[Ranges, list[bytearray]]:
    """Return ranges into new memory, and that memory."""
    targets = [bytearray(length) for _, length in offsets]
    parts = [
        part_of(offset, target, by_address=len(target) >= RELEASE_BYTES or rng.random() < 0.5)
        for (offset, _), target in zip(offsets, targets)
    ]
    return Ranges(parts, max(offset + length for offset, length in offsets), sum(map(len, targets))), targets


RANGE = st.tuples(st.integers(0, 200), st.integers(1, 60))


@given(st.lists(RANGE, min_size=1, max_size=8), st.integers(0, 400), st.integers(1, 400), st.randoms())
@settings(max_examples=200, deadline=None)
def test_ranges_and_sections_of_them(offsets: list[tuple[int, int]], start: int, size: int, rng: Any) -> None:
    value = random.Random(1).randbytes(300)
    ranges, targets = ranges_at(offsets, rng)
    data = memoryview(b"before" + value)
    scatter(ranges, data, address_of(data), 6, Copier(1))
    whole = b"".join(value[offset : offset + length] for offset, length in offsets)
    assert b"".join(targets) == whole
    wanted = whole[start : start + size]
    assert b"".join(value[offset : offset + length] for offset, length in extents(ranges, start, size)) == wanted
    for target in targets:
        target[:] = bytes(len(target))
    if wanted:
        block = memoryview(bytearray(wanted))
        scatter(section(ranges, start, size), block, address_of(block), 0, Copier(1))
    untouched = bytearray(len(whole))
    untouched[start : start + size] = wanted
    assert b"".join(targets) == untouched[: len(whole)]


@pytest.mark.parametrize("lengths", [[1], [5, LARGE, 7], [LARGE, LARGE], [100_000, 1, 100_000]])
def test_large_and_small_parts(lengths: list[int]) -> None:
    rng = random.Random(len(lengths))
    value = rng.randbytes(300_000)
    ranges, targets = ranges_at([(rng.randrange(300_000 - length), length) for length in lengths], rng)
    scatter(ranges, memoryview(value), address_of(memoryview(value)), 0, Copier(1))
    assert all(value[part[0] : part[0] + part[1]] == target for part, target in zip(ranges.parts, targets))
    pieces: list[memoryview | Span] = [memoryview(value)[:length] for length in lengths]
    held = bytearray(value[: lengths[-1]])
    pieces[-1] = Span(address_of(memoryview(held)), lengths[-1], keep=held)
    made = Pieces(pieces)
    room = bytearray(made.size + 9)
    view = memoryview(room)
    gather(made.parts, view, address_of(view), 4, Copier(1))
    joined = b"".join(value[:length] for length in lengths)
    assert room == bytes(4) + joined + bytes(5)
    assert bytes(host_view(made)) == joined == b"".join(host_pieces(made))
    assert checksum(host_pieces(made)) == zlib.crc32(joined)
    assert len(made) == len(joined)


@given(st.lists(st.binary(min_size=1, max_size=9), min_size=1, max_size=6), st.integers(0, 40), st.integers(0, 40))
@settings(max_examples=200, deadline=None)
def test_cuts_of_pieces(parts: list[bytes], start: int, size: int) -> None:
    held = [bytearray(part) for part in parts]
    views: list[memoryview | Span] = [
        Span(address_of(memoryview(part)), len(part), keep=part) if number % 2 else memoryview(part)
        for number, part in enumerate(held)
    ]
    got = b"".join(bytes(host_view(piece)) for piece in cut(views, start, size))
    assert got == b"".join(parts)[start : start + size]


@pytest.mark.parametrize(("threads", "shares"), [(4, 1), (1, 0)])
def test_threads_share_ranges_that_are_much_together(
    monkeypatch: pytest.MonkeyPatch, threads: int, shares: int
) -> None:
    """None of them is large enough for that alone."""
    real, runs = POOL.run, []
    monkeypatch.setattr(buffers.POOL, "run", lambda *each: (runs.append(each[1]), real(*each))[1])
    rng = random.Random(3)
    value = memoryview(rng.randbytes(4 << 20))
    offsets = [(number * 64 * KIB + 5, 48 * KIB + number) for number in range(60)] + [(7, 11)]
    ranges, targets = ranges_at(offsets, rng)
    copier = Copier(threads)
    scatter(ranges, value, address_of(value), 0, copier)
    assert targets == [value[offset : offset + length] for offset, length in offsets]
    assert len(runs) == shares
    few, targets = ranges_at(offsets[:10], rng)
    scatter(few, value, address_of(value), 0, copier)
    assert targets == [value[offset : offset + length] for offset, length in offsets[:10]]
    assert len(runs) == shares, "little is copied by the caller"
    copier.close()


def test_ranges_land_in_their_memory() -> None:
    ranges, targets = ranges_at([(0, 5), (7, LARGE)], random.Random(1))
    for number, view in enumerate(views_of(ranges)):
        view[:] = bytes([number + 1]) * len(view)
    assert [set(target) for target in targets] == [{1}, {2}]


def test_ranges_fit_what_is_long_enough() -> None:
    """No length passes for the ranges' own: a path that compares it with a value's takes the value as fitting."""
    ranges, _ = ranges_at([(50, 10), (5, 10)], random.Random(1))
    assert len(ranges) == ranges.least == 60 and ranges.total == 20
    assert [fits(length, ranges) for length in (20, 59, 60, 61, 1 << 25)] == [False, False, True, True, True]


def test_they_are_no_single_piece_of_memory() -> None:
    ranges, _ = ranges_at([(0, 5)], random.Random(1))
    pieces = Pieces([memoryview(b"abc")])
    for each in (ranges, pieces):
        with pytest.raises(AttributeError):
            _ = each.address
    with pytest.raises(UsageError):
        ranges.view()


@pytest.mark.parametrize("held_bytes", [0, RELEASE_BYTES])
@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize(
    ("sizes", "done"),
    [([64 * KIB] * 16, True), ([64 * KIB] * 70, True), ([100_001] * 33, True), ([512 * KIB] * 17, True),
     ([5] * 3, False), ([1, 70, 300], False), ([64 * KIB] * 15, False), ([40 * KIB] * 20, False),
     ([700 * KIB] * 16, False), ([64 * KIB, 5], False)],
)  # fmt: skip
def test_rows_take_what_addresses_take(
    threads: int, held_bytes: int, sizes: list[int], done: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whichever way they are copied, nothing outside of them is written. Small ones go as views, if alone."""
    monkeypatch.setattr(COMPANY, "held_bytes", held_bytes)
    monkeypatch.setattr(Copier, "_batch_ways", [(0, False)] * 64)
    rng = random.Random(threads)
    value = rng.randbytes(sum(sizes) + 100)
    data = memoryview(b"before" + value)
    room = bytearray(sum(sizes) + 9 * len(sizes) + 9)
    parts, wanted, at = [], bytearray(len(room)), 9
    for size in sizes:
        offset = rng.randrange(len(value) - size)
        view = memoryview(room)[at : at + size]
        parts.append((offset, size, rng.choice((0, address_of(view))), view))
        wanted[at : at + size] = value[offset : offset + size]
        at += size + 9
    ranges = Ranges(parts, max(part[0] + part[1] for part in parts), sum(sizes))
    rows = HostRows.of(ranges)
    assert rows is not None and rows.low == address_of(memoryview(room)) + 9
    assert rows.high == rows.low + len(room) - 18
    copier = Copier(threads)
    small = max(sizes) < RELEASE_BYTES and held_bytes > 0
    for _ in range(3):
        room[:] = bytes(len(room))
        assert rows.copy(data, 6, copier, -1) is (done or small)
        assert room == (wanted if done or small else bytes(len(room)))
    if done or small:
        with pytest.raises(ValueError, match=r"broadcast|different structures"):
            rows.copy(data[: 6 + ranges.least - 1], 6, copier, -1)
    copier.close()


@pytest.mark.parametrize("by_block", [False, True])
def test_rows_of_a_table_that_go_to_one_array(by_block: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any order, some of them twice, with bytes before and behind; and those that only look like it."""
    monkeypatch.setattr(Copier, "_batch_ways", [(7, by_block)] * 64)
    size, rng = 64 * KIB, random.Random(4)
    value = rng.randbytes(30 * size)
    data = memoryview(b"before" + value + b"behind")
    for step, order, base in (
        (size, [*range(20)], 0), (size, [3, 3, 9, 17] * 5, 77), (size, [19, *range(19)], 5),
        (size + 1, [*range(20)], 0), (size // 2, [*range(0, 40, 2)], 1), (size // 2, [*range(20)], 0),
    ):  # fmt: skip
        offsets = [base + at * step for at in order]
        for places in ([*range(20)], [1, 0, *range(2, 20)], [0, *range(2, 21)]):
            room = bytearray(22 * size)
            view = memoryview(room)[size:]
            parts = [
                (offset, size, address_of(view[at * size :]), view) for offset, at in zip(offsets, places)
            ]  # fmt: skip
            ranges = Ranges(parts, max(offsets) + size, 20 * size)
            table = HostTable.of_parts(ranges)
            assert (table is None) == (places != [*range(20)] or any((at - min(offsets)) % size for at in offsets))
            rows = table or HostRows.of(ranges)
            assert rows is not None and rows.copy(data, 6, Copier(1), -1)
            assert table is None or table.parts() == parts
            wanted = bytearray(len(room))
            for offset, at in zip(offsets, places):
                wanted[(at + 1) * size : (at + 2) * size] = value[offset : offset + size]
            assert room == wanted
            with pytest.raises(ValueError, match=r"shape|different structures|broadcast"):
                rows.copy(data[: 6 + max(offsets) + size - 1], 6, Copier(1), -1)

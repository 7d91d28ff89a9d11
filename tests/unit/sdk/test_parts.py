"""What callers may pass as ranges and pieces: every mistake is a UsageError that says what is wrong."""

from __future__ import annotations

import array
import random
import re
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import simm
from simm.constants import LARGE_BYTES_MAX, RANGES_MAX, VALUE_BYTES_MAX
from simm.errors import UsageError
from simm.host.buffers import RELEASE_BYTES, Copier, Span, address_of
from simm.host.parts import scatter
from simm.sdk.batch import LargeValue
from simm.sdk.ops.parts import check_apart, overlapping, pieces_of, prepared, ranges_of, ranges_of_many
from tests.support.dose import dosed

BIG = RELEASE_BYTES + 1


def span(size: int, *, writable: bool = True) -> Span:
    held = bytearray(size)
    return Span(address_of(memoryview(held)), size, writable=writable, keep=held)


SINKS: list[Any] = [
    bytearray, lambda size: memoryview(bytearray(size)), lambda size: np.zeros(size, np.uint8),
    lambda size: np.zeros((size // 8, 2), np.float32), lambda size: array.array("i", bytes(size)),
    lambda size: np.zeros(size // 2, np.float16), lambda size: np.zeros(size + 3, np.uint8)[3:], span,
]  # fmt: skip


@pytest.mark.parametrize("make", SINKS)
@pytest.mark.parametrize("size", [8, BIG // 8 * 8 + 8])
def test_every_kind_of_buffer(make: Any, size: int) -> None:
    value = random.Random(size).randbytes(3 * size)
    one, two, spare = make(size), make(size), make(size)
    for ranges in ([(5, size, one)], [(size, size, two), (np.int64(0), 8, spare)]):
        made = ranges_of(ranges)
        data = memoryview(value)
        scatter(made, data, address_of(data), 0, Copier(1))
    got = [bytes(each.view() if isinstance(each, Span) else memoryview(each)) for each in (one, two, spare)]
    assert got == [value[5 : 5 + size], value[size : 2 * size], value[:8] + bytes(size - 8)]


MISTAKES: list[tuple[Any, str]] = [
    ([], "1 to 4096 ranges, not in 0"),
    ([(0, 1, bytearray(1))] * (RANGES_MAX + 1), "1 to 4096 ranges, not in 4097"),
    (5, "ranges are a list, not int"),
    (None, "ranges are a list"),
    (b"abc", "ranges are a list, not bytes"),
    ("abc", "ranges are a list, not str"),
    ([5], r"a range is \(offset, length, buffer\)"),
    ([(0, 1)], r"a range is \(offset, length, buffer\)"),
    ([(0, 1, bytearray(1), 2)], r"a range is \(offset, length, buffer\)"),
    ([(0.0, 1, bytearray(1))], "ints, not float"),
    ([(0, "1", bytearray(1))], "ints, not str"),
    ([(True, 1, bytearray(1))], "ints, not bool"),
    ([(0, 0, bytearray(1))], "at least 1 byte, not 0"),
    ([(0, -1, bytearray(1))], "at least 1 byte, not -1"),
    ([(-1, 1, bytearray(1))], "no value has 1 bytes at -1"),
    ([(VALUE_BYTES_MAX, 1, bytearray(1))], "no value has"),
    ([(1 << 70, 1, bytearray(1))], "no value has"),
    ([(0, 1 << 70, bytearray(1))], "no value has"),
    ([(0, 2, bytearray(1))], "2 bytes does not fit a buffer of 1 bytes"),
    ([(0, BIG, np.zeros(BIG - 1, np.uint8))], "does not fit a buffer"),
    ([(0, 1, bytearray())], "does not fit a buffer of 0 bytes"),
    ([(0, 1, b"x")], "read-only"),
    ([(0, BIG, np.frombuffer(bytes(BIG), np.uint8))], "read-only"),
    ([(0, 8, span(8, writable=False))], "read-only"),
    ([(0, 1, 5)], "not int"),
    ([(0, BIG, np.zeros((BIG, 2), np.uint8)[:, 0])], "not contiguous"),
    ([(0, BIG, np.zeros(BIG, object))], "Python objects"),
    ([(0, 8, np.zeros(8, object))], "Python objects"),
]


@pytest.mark.parametrize(("ranges", "text"), MISTAKES)
def test_mistakes_of_ranges(ranges: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        ranges_of(ranges)
    with pytest.raises(UsageError, match=text):
        ranges_of_many(["a"], [ranges])
    if isinstance(ranges, list) and len(ranges) == 1:  # the same where it is not the only one
        with pytest.raises(UsageError, match=text):
            ranges_of([(0, 1, bytearray(1)), *ranges])


def test_ranges_have_together_what_a_value_has() -> None:
    half = np.zeros(VALUE_BYTES_MAX // 2 + 1, np.uint8)
    with pytest.raises(UsageError, match="together"):
        ranges_of([(0, len(half), half), (0, len(half), half.copy())])


def test_any_iterable_is_a_list() -> None:
    assert ranges_of((0, 1, bytearray(1)) for _ in range(3)).total == 3
    assert len(pieces_of(iter([b"ab", b"c"]))) == 3
    assert ranges_of(((1, 2, bytearray(2)),)).least == 3


def test_overlapping_buffers() -> None:
    page = bytearray(100)
    view = memoryview(page)
    ranges_of([(0, 50, view[:50]), (0, 50, view[50:])])
    ranges_of([(0, 50, view[50:]), (0, 50, view)])  # of the second only the head is written
    for ranges in (
        [(0, 51, view[:51]), (0, 50, view[50:])], [(0, 1, view), (7, 1, page)],
        [(0, BIG, np.zeros(BIG, np.uint8))] * 2, [(0, 8, view), (0, 8, Span(address_of(view) + 7, 8, keep=page))],
    ):  # fmt: skip
        with pytest.raises(UsageError, match="overlap"):
            ranges_of(ranges)
        with pytest.raises(UsageError, match="overlap"):
            ranges_of_many(["a", "b"], [[each] for each in ranges])
    with pytest.raises(UsageError, match="2 keys and 1"):
        ranges_of_many(["a", "b"], [[(0, 1, view)]])


@given(st.lists(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)), min_size=1, max_size=3), max_size=6))
@settings(max_examples=200, deadline=None)
def test_what_is_refused_for_overlaps(keys: list[list[tuple[int, int]]]) -> None:
    """What is left shares no byte, and nothing is refused without need if nothing does."""
    page = np.zeros(80, np.uint8)
    sinks = [ranges_of([(0, size, page[at:]) for at, size in each], apart=False) for each in keys]
    refused = overlapping(sinks)
    cells = [cell for at, each in enumerate(keys) if at not in refused for a, n in each for cell in range(a, a + n)]
    assert len(cells) == len(set(cells))
    everything = [cell for each in keys for a, n in each for cell in range(a, a + n)]
    assert bool(refused) == (len(everything) != len(set(everything)))
    if refused:
        with pytest.raises(UsageError, match="overlap"):
            check_apart(sinks)


@given(
    st.lists(st.tuples(st.integers(0, 900), st.integers(1, 70)), min_size=1, max_size=20), st.booleans(),
    st.sampled_from([np.int64, np.uint16, np.int32]), st.sampled_from([8, BIG, 64 << 10]), st.integers(0, 3),
)  # fmt: skip
@settings(max_examples=dosed(150, quick=40), deadline=None)
def test_arrays_are_what_a_list_is(
    given_ranges: list[tuple[int, int]], equal: bool, kind: Any, unit: int, more: int
) -> None:
    """Ranges by arrays of offsets and lengths go to one buffer, one after the other, as a list says it row by row."""
    lengths = [unit if equal else length * unit // 8 for _, length in given_ranges]
    offsets = [at * (unit if at % 2 and kind is np.int64 else 1) for at, _ in given_ranges]
    value = memoryview(random.Random(more).randbytes(max(map(int.__add__, offsets, lengths)) + more))
    total = sum(lengths)
    wanted = b"".join(bytes(value[at : at + length]) for at, length in zip(offsets, lengths)) + bytes(more)
    outs: list[Any] = [bytearray(total + more), np.zeros(total + more, np.uint8), span(total + more)]
    if not (total + more) % 4:
        outs.append(np.zeros((2, (total + more) // 4), np.float16))
    for out in outs:
        sizes = lengths[0] if equal and more else np.array(lengths, np.int32)
        made = ranges_of((np.array(offsets, kind), sizes, out))
        scatter(made, value, address_of(value), 0, Copier(1))
        assert bytes(out.view() if isinstance(out, Span) else memoryview(out).cast("B")) == wanted
        assert (made.total, made.least) == (total, max(map(int.__add__, offsets, lengths)))
        assert [(at, length) for at, length, _, _ in made.parts] == [*zip(offsets, lengths)]
        assert [at - made.parts[0][2] for _, _, at, _ in made.parts] == [*accumulate([0, *lengths[:-1]])]
        assert prepared(made) is made and not overlapping([made])
        assert overlapping([made, ranges_of([(0, 1, out)])]) == {1}


OFFSETS = np.arange(4) * 8
LOCKED = np.zeros(32, np.uint8)
LOCKED.flags.writeable = False
WRONG_ARRAYS: list[tuple[Any, Any, Any, str]] = [
    (OFFSETS, 9, bytearray(32), "36 bytes together do not fit a buffer of 32 bytes"),
    (OFFSETS, OFFSETS + 1, np.zeros(51, np.uint8), "52 bytes together do not fit a buffer of 51 bytes"),
    (OFFSETS, 8, LOCKED, "read-only"), (OFFSETS, 8, bytes(32), "read-only"),
    (OFFSETS, 8, span(32, writable=False), "read-only"), (OFFSETS, 8, np.zeros(64, np.uint8)[::2], "not contiguous"),
    (OFFSETS, 8, np.zeros(32, object), "Python objects"), (OFFSETS, 8, 5, "not int"),
    (OFFSETS - 1, 8, bytearray(32), "no value has 8 bytes at -1"),
    (OFFSETS, 0, bytearray(32), "at least 1 byte, not 0"),
    (OFFSETS, -1, bytearray(32), "at least 1 byte"), (OFFSETS, OFFSETS, bytearray(99), "at least 1 byte, not 0"),
    (OFFSETS, 8.0, bytearray(32), "ints, not float"), (OFFSETS, True, bytearray(32), "ints, not bool"),
    (OFFSETS, None, bytearray(32), "ints, not NoneType"), (OFFSETS, [8] * 4, bytearray(32), "ints, not list"),
    (OFFSETS, OFFSETS[:3] + 8, bytearray(99), "an array of 4 integers"),
    (OFFSETS, OFFSETS + 8.0, bytearray(99), "array of 4"),
    (OFFSETS[:0], 8, bytearray(32), "1 to 4096 ranges, not in 0"),
    (np.arange(RANGES_MAX + 1), 1, bytearray(5000), "1 to 4096 ranges, not in 4097"),
    (OFFSETS.reshape(2, 2), 8, bytearray(32), "one dimension"), (OFFSETS + 0.0, 8, bytearray(32), "array of integers"),
    (OFFSETS > 9, 8, bytearray(32), "array of integers"),
    (OFFSETS[0], 8, bytearray(32), "ranges are a list|a range is"),
    (OFFSETS + LARGE_BYTES_MAX, 8, bytearray(32), "no value has 8 bytes at"),
    (np.array([0, (1 << 64) - 1], np.uint64), 8, bytearray(32), f"no value has 8 bytes at {(1 << 64) - 1}"),
    (OFFSETS, 1 << 70, bytearray(32), "no value has"),
    (OFFSETS + LARGE_BYTES_MAX - 31, 8, bytearray(32), "no value has 8"),
]  # fmt: skip


@pytest.mark.parametrize(("offsets", "lengths", "out", "text"), WRONG_ARRAYS)
def test_mistakes_of_arrays(offsets: Any, lengths: Any, out: Any, text: str) -> None:
    for call in (ranges_of, lambda given: ranges_of_many(["a"], [given]), prepared):
        with pytest.raises(UsageError, match=text):
            call((offsets, lengths, out))


def test_arrays_that_only_a_value_in_parts_has() -> None:
    for offsets, length in ((np.array([0, VALUE_BYTES_MAX]), 8), (np.zeros(2, int), VALUE_BYTES_MAX // 2 + 1)):
        out = np.empty(2 * length, np.uint8)
        with pytest.raises(LargeValue) as caught:
            ranges_of((offsets, length, out))
        assert [part[:2] for part in caught.value.memory.parts] == [(at, length) for at in offsets.tolist()]
        assert prepared((offsets, length, out)).total == 2 * length


def test_issue_a_masked_array_of_lengths_reaches_no_byte_behind_the_buffer() -> None:
    """Its sum leaves items out, so more bytes were copied than there was room for."""
    lengths = np.ma.array([4096] * 3, mask=[0, 1, 1])  # type: ignore[no-untyped-call]
    with pytest.raises(UsageError):
        ranges_of((np.array([0, 4096, 8192]), lengths, bytearray(4096)))
    assert ranges_of((np.array([0, 4096, 8192]), lengths, bytearray(3 * 4096))).total == 3 * 4096


def test_issue_all_kinds_of_ranges_count_as_ranges() -> None:
    """Who asked for the exact type took rows for plain memory: wide ones went to servers, a GPU's to sockets."""
    exact = re.compile(r"type\([^)]*\)+ is (not )?Ranges\b")
    package = Path(simm.__file__).parent
    assert [str(path) for path in package.rglob("*.py") if exact.search(path.read_text())] == []
    assert exact.search("if type(sinks[at]) is not Ranges:") and not exact.search("isinstance(sink, Ranges)")


def test_an_array_of_offsets_may_change_after_it_was_checked() -> None:
    offsets, out = np.array([0, 8]), np.zeros(16, np.uint8)
    made = prepared((offsets, 8, out))
    offsets[:] = -5
    assert [part[:2] for part in made.parts] == [(0, 8), (8, 8)]
    with pytest.raises(UsageError, match="no value has 8 bytes at -5"):
        ranges_of((offsets, 8, out))


def test_memory_stays_in_its_place() -> None:
    """A buffer that could move or shrink while ranges are copied into it is held until they are dropped."""
    for size in (10, BIG):
        page = bytearray(size)
        made = ranges_of([(0, size, page)])
        with pytest.raises(BufferError):
            page.clear()
        del made
        page.clear()
    grown = np.zeros(BIG, np.uint8)
    held = ranges_of([(0, BIG, grown), (0, 1, bytearray(1))])
    with pytest.raises(ValueError, match="references"):
        grown.resize(2 * BIG)
    assert held.total == BIG + 1


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        ([], "1 to 4096 pieces, not in 0"),
        ([b"x"] * (RANGES_MAX + 1), "not in 4097"),
        (b"abc", "pieces are a list, not bytes"),
        (np.int64(5), "pieces are a list, not int64"),
        ([b"ab", b""], "a piece of a value has 1 to"),
        ([b"ab", 5], "not int"),
        ([np.zeros((4, 4))[:, 0]], "not contiguous"),
        ([bytes(VALUE_BYTES_MAX), b"x"], "these pieces 67088385"),
    ],
)
def test_mistakes_of_pieces(pieces: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        pieces_of(pieces)

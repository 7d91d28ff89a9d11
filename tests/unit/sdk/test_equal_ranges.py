"""Large ranges of one size are checked all at once. That accepts what one after the other does, and nothing else."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from simm.constants import RANGES_MAX, VALUE_BYTES_MAX
from simm.errors import UsageError
from simm.host.buffers import RELEASE_BYTES
from simm.host.parts import EQUAL_FROM
from simm.sdk.batch import LargeValue
from simm.sdk.ops import parts
from simm.sdk.ops.parts import ranges_of

SIZE = RELEASE_BYTES + 1000
COUNT = EQUAL_FROM + 4


def good(rng: random.Random) -> list[Any]:
    """Ranges of one size, each to a part of one array, or to an array of its own."""
    room = np.zeros((COUNT, SIZE), np.uint8)
    wide = np.zeros((COUNT, SIZE // 8 + 1), np.float64)
    places = rng.sample(range(COUNT), COUNT)
    kinds = [lambda at: room[at], lambda at: wide[at], lambda _: np.zeros((3, SIZE), np.int16)]
    return [(rng.randrange(5 * SIZE), SIZE, rng.choice(kinds)(at)) for at in places]


def outcome(ranges: Any, **named: Any) -> Any:
    try:
        made = ranges_of(ranges, **named)
    except LargeValue as exc:
        return "large", str(exc), [part[:3] for part in exc.memory.parts]
    except UsageError as exc:
        return type(exc), str(exc)
    return made.least, made.total, [part[:3] for part in made.parts], [id(part[3]) for part in made.parts]


def read_only(array: Any) -> Any:
    array = array.copy()
    array.flags.writeable = False
    return array


#: What replaces one range: each is refused, or is not for all at once.
ODD: dict[str, Any] = {
    "another size": lambda offset, length, buffer: (offset, length - 1, buffer),
    "no byte": lambda offset, length, buffer: (offset, 0, buffer),
    "negative": lambda offset, length, buffer: (-1, length, buffer),
    "beyond": lambda offset, length, buffer: (VALUE_BYTES_MAX, length, buffer),
    "far beyond": lambda offset, length, buffer: (1 << 62, length, buffer),
    "numpy's ints": lambda offset, length, buffer: (np.int64(offset), np.uint32(length), buffer),
    "a truth value": lambda offset, length, buffer: (True, length, buffer),
    "a float": lambda offset, length, buffer: (float(offset), length, buffer),
    "a pair": lambda offset, length, buffer: (offset, length),
    "no range": lambda offset, length, buffer: None,
    "too small": lambda offset, length, buffer: (offset, length, np.zeros(length - 1, np.uint8)),
    "no item": lambda offset, length, buffer: (offset, length, np.zeros((length, 0), np.uint8)),
    "a number": lambda offset, length, buffer: (offset, length, np.array(5)),
    "read-only": lambda offset, length, buffer: (offset, length, read_only(buffer)),
    "not contiguous": lambda offset, length, buffer: (offset, length, np.zeros((length, 2), np.uint8)[:, 0]),
    "objects": lambda offset, length, buffer: (offset, length, np.zeros(length, object)),
    "bytes": lambda offset, length, buffer: (offset, length, bytes(length)),
    "a bytearray": lambda offset, length, buffer: (offset, length, bytearray(length)),
    "a memoryview": lambda offset, length, buffer: (offset, length, memoryview(bytearray(length + 5))),
    "dates": lambda offset, length, buffer: (offset, length, np.zeros(length, "M8[s]")),
}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("odd", [None, "overlap", "the same", "too many", *ODD])
def test_all_at_once_is_one_after_the_other(seed: int, odd: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    ranges = good(rng)
    at = rng.randrange(COUNT)
    if odd == "overlap":
        whole = np.zeros(SIZE + 100, np.uint8)
        ranges[at] = 0, SIZE, whole[100:]
        ranges[at - 1] = 0, SIZE, whole[:SIZE]
    elif odd == "the same":
        ranges[at] = ranges[at - 1]
    elif odd == "too many":
        ranges = ranges * (RANGES_MAX // COUNT + 1)
    elif odd is not None:
        ranges[at] = ODD[odd](*ranges[at])
    assert len(ranges) >= EQUAL_FROM
    for named in ({}, {"apart": False}):
        fast = outcome(ranges, **named)
        with monkeypatch.context() as patch:
            patch.setattr(parts, "EQUAL_FROM", 1 << 40)
            slow = outcome(ranges, **named)
        assert fast == slow
    if odd is None:
        assert parts._equal_ranges(ranges, VALUE_BYTES_MAX, True) is not None, "the control: this is all at once"
    elif odd in ("overlap", "the same", "read-only", "objects", "too small", "negative", "no item"):
        assert isinstance(outcome(ranges)[0], type), "the control: it is refused"

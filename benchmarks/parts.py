"""Compare ranges and pieces of values with whole values, and with numpy's own gathers, in bursts that alternate.

    python benchmarks/parts.py                 a cluster of its own, by shared memory; --path tcp by TCP

What slows the machine for longer than a burst slows both of a pair. Each pair gives a ratio; the median of all pairs is
the result, with the quartiles beside it. Gathers copy the same bytes between the same places: from the value in the
arena, which numpy sees through a view, to the same arrays. *Warm*: of one value, again and again, so that both find it
in the processor's caches. *Cold*: of eight values in turn, more than the caches hold. The bar is 1.1 of each gather.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from simm.client import Client

MEMORY_BYTES: Final = 512 << 20
VALUE_BYTES: Final = 16 << 20
PAGE_BYTES: Final = 4096
KEYS: Final = VALUE_BYTES // PAGE_BYTES
RANGES: Final = 64
RANGE_BYTES: Final = 64 << 10
#: As many values and their buffers are more than a processor's caches hold.
COLD_VALUES: Final = 8


def burst(call: Callable[[int], Any], calls: int) -> float:
    """Return microseconds per call."""
    began = time.perf_counter()
    for number in range(calls):
        call(number)
    return (time.perf_counter() - began) / calls * 1e6


def compare(name: str, base: Callable[[int], Any], other: Callable[[int], Any], calls: int, pairs: int) -> None:
    """Print the ratio of two calls."""
    burst(base, calls)
    burst(other, calls)
    times, ratios = [], []
    for _ in range(pairs):
        first, middle, last = burst(base, calls), burst(other, calls), burst(base, calls)
        times.append((first + last) / 2)
        ratios.append(2 * middle / (first + last))
    low, ratio, high = statistics.quantiles(ratios, n=4)
    print(f"{name:<84}{statistics.median(times):10.1f}{ratio:9.2f}   {low:.2f} to {high:.2f}", flush=True)


def main() -> None:
    """Run all comparisons."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", default="shm", choices=("shm", "tcp"))
    parser.add_argument("--pairs", type=int, default=60)
    given = parser.parse_args()
    if given.pairs < 2:
        parser.error("--pairs: at least 2, as quartiles are of several")
    with Client.local(MEMORY_BYTES, path=given.path, deadline_s=30.0) as client:
        rng = np.random.default_rng(1)
        value = rng.integers(0, 256, VALUE_BYTES, dtype=np.uint8)
        keys = [f"page {number}" for number in range(KEYS)]
        places = rng.permutation(KEYS).tolist()
        assert client.put("value", value)
        assert all(client.put(key, value[:PAGE_BYTES]) for key in keys)
        page = bytearray(PAGE_BYTES)
        print(f"{'us of the first, ratio of the second to it, quartiles':<84}")
        compare(
            "a value of 4 KiB, one of 4,096; 4 KiB out of one of 16 MiB",
            lambda number: client.get_into(keys[places[number % KEYS]], page),
            lambda number: client.get_ranges("value", [(places[number % KEYS] * PAGE_BYTES, PAGE_BYTES, page)]),
            400 if given.path == "shm" else 50, given.pairs,
        )  # fmt: skip
        place = rng.permutation(VALUE_BYTES // RANGE_BYTES)[:RANGES]
        names = [f"value {number}" for number in range(COLD_VALUES)]
        assert all(client.put_many(names, [value] * COLD_VALUES))
        views = [client.view(name) for name in names]
        seen = [np.frombuffer(view.data, np.uint8) for view in views]
        tables = [each.reshape(-1, RANGE_BYTES) for each in seen]
        together = np.zeros((COLD_VALUES, RANGES, RANGE_BYTES), np.uint8)
        into = [
            [(int(at) * RANGE_BYTES, RANGE_BYTES, row) for at, row in zip(place, rows)] for rows in together
        ]  # fmt: skip

        def take(number: int) -> None:
            np.take(tables[number], place, axis=0, out=together[number])

        def take_clipped(number: int) -> None:
            np.take(tables[number], place, axis=0, out=together[number], mode="clip")

        def fancy(number: int) -> None:
            tables[number][place]

        def slices(number: int) -> None:
            source = seen[number]
            for offset, length, row in into[number]:
                row[:] = source[offset : offset + length]

        prepared = [client.prepare_ranges(each) for each in into]

        def ranges(number: int) -> None:
            client.get_ranges(names[number], into[number])

        def ready(number: int) -> None:
            client.get_ranges(names[number], prepared[number])

        offsets = place * RANGE_BYTES

        def columns(number: int) -> None:
            client.get_ranges(names[number], (offsets, RANGE_BYTES, together[number]))

        gathers: list[tuple[str, Callable[[int], None]]] = [
            ('numpy.take(out=, mode="clip") of 64 rows of 64 KiB', take_clipped),
            ("a loop of 64 numpy slice copies of 64 KiB", slices),
            ("table[rows], a new array", fancy),
            ("numpy.take(out=), which copies twice", take),
        ]
        for name, gather in gathers:
            for form, read in (("64 ranges", ranges), ("64 by an array", columns), ("64 prepared ranges", ready)):
                compare(f"{name}; {form}, warm", lambda _, gather=gather: gather(0), lambda _, read=read: read(0), 8,
                        given.pairs)  # fmt: skip
                compare(f"{name}; {form}, cold", lambda number, gather=gather: gather(number % COLD_VALUES),
                        lambda number, read=read: read(number % COLD_VALUES), 8, given.pairs)  # fmt: skip
        pieces = [value[int(at) * RANGE_BYTES :][:RANGE_BYTES] for at in place]
        whole = value[: RANGES * RANGE_BYTES]
        compare("a put of 4 MiB; of 64 pieces of 64 KiB", lambda _: client.put("whole", whole),
                lambda _: client.put_gather("pieces", pieces), 10, given.pairs)  # fmt: skip
        for view in views:
            view.close()


if __name__ == "__main__":
    main()

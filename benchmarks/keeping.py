"""Compare reads and puts of values that nobody keeps, with a fifth of the arena kept and with nothing kept.

    python benchmarks/keeping.py                    clusters of its own, by shared memory; --path tcp by TCP

The arena is full all the time, so each put evicts. Between two bursts a fifth of it is kept, or is no longer, in turns:
what slows the machine for longer than a burst slows both. The result is the median of the pairs' ratios, with the
quartiles beside it. At the end everything that was kept must be there, after puts of several times the arena.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from simm.client import Client

MEMORY_BYTES: Final = 64 << 20
SIZES: Final = (4 << 10, 64 << 10)
KEEP_S: Final = 3600
RECENT: Final = 200
#: How often what was evicted is put again, to be kept.
ATTEMPTS: Final = 20


def burst(call: Callable[[], Any], calls: int) -> float:
    """Return microseconds per call."""
    began = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - began) / calls * 1e6


def compare(client: Client, size: int, how: str, pairs: int) -> None:
    """Print a line for each operation on values of one size."""
    value = np.ones(size, np.uint8)
    kept = [f"kept {size} {number}" for number in range(MEMORY_BYTES // 5 // size)]
    recent = [""] * RECENT
    numbers = itertools.count()
    draw = random.Random(size)
    buffer = bytearray(size)
    stored = 0

    def put() -> None:
        nonlocal stored
        number = next(numbers)
        recent[number % RECENT] = f"{how} {size} {number}"
        stored += client.put(recent[number % RECENT], value)

    def get() -> None:
        client.get_into(draw.choice(recent), buffer)

    while stored < 2 * MEMORY_BYTES // size:
        put()
    calls = 400 if size < 32 << 10 else 100
    times: dict[str, dict[bool, list[float]]] = {
        name: {False: [], True: []} for name in ("get_into", "exists", "put")
    }  # fmt: skip
    ways: dict[str, Callable[[], Any]] = {
        "get_into": get, "exists": lambda: client.exists(draw.choice(recent)), "put": put,
    }  # fmt: skip

    def keep() -> None:
        for _ in range(ATTEMPTS):
            gone = [key for key, held in zip(kept, client.keep(kept, KEEP_S, how)) if not held]
            if not gone:
                return
            client.put_many(gone, [value] * len(gone))  # evicted, as nobody kept them; some may be so at once
        raise AssertionError(f"{len(gone)} of {len(kept)} values cannot be kept: {client.stats()['last_put_failure']}")

    for pair in range(pairs):
        for keeps in (False, True) if pair % 2 else (True, False):
            if keeps:
                keep()
            else:
                client.unkeep(kept)
            for name, way in ways.items():
                burst(way, calls // 10)
                times[name][keeps].append(burst(way, calls))
    keep()
    for name, each in times.items():
        low, ratio, high = statistics.quantiles([kept / plain for kept, plain in zip(each[True], each[False])], n=4)
        print(
            f"{name:<10}{size:>8,}  {how:<6}{statistics.median(each[False]):10.2f}{statistics.median(each[True]):10.2f}"
            f"{ratio:9.3f}   {low:.3f} to {high:.3f}",
            flush=True,
        )
    while stored < 10 * MEMORY_BYTES // size:
        client.put_many([f"scan {size} {next(numbers)}" for _ in range(64)], [value] * 64)
        stored += 64
    there = client.exists_many(kept).count(True)
    print(f"{'':<10}{size:>8,}  {how:<6}{there} of {len(kept)} kept values are there after ten times the arena")
    assert there == len(kept)


def main() -> None:
    """Run the command line; see the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", default="shm", choices=("shm", "tcp"))
    parser.add_argument("--pairs", type=int, default=40)
    given = parser.parse_args()
    if given.pairs < 2:
        parser.error("--pairs: at least 2, as quartiles are of several")
    print(f"{'by ' + given.path:<18}  {'keep':<6}{'none, us':>10}{'kept, us':>10}{'ratio':>9}   quartiles")
    for size, how in itertools.product(SIZES, ("hard", "soft")):
        with Client.local(MEMORY_BYTES, path=given.path, deadline_s=30.0) as client:  # as slabs are of one size
            assert client.wait_ready(60.0)
            compare(client, size, how, given.pairs)


if __name__ == "__main__":
    main()

"""Measure what asking for a prompt's prefix takes, by shared memory.

    python benchmarks/prefix.py [--keys 256] [--times 2000]

The keys are those of SGLang's backend, k and v of each page, and all are stored. Medians and quartiles of wall time:

* *the last page*: bisection, and a check of the last page (``exact=False``). Pages before it are taken for granted.
* *every key*: the same, and each key that is counted is looked for (the default). Of that the digests alone.
* the same two where half of the prompt is stored, and where nothing is.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

from simm.arena.hashing import Hasher
from simm.client import Client
from simm.schemes import sglang


def quartiles(call: Callable[[], object], times: int) -> str:
    """Return the median of a call's wall time, us, and the quartiles."""
    spent = []
    for _ in range(times):
        began = time.perf_counter_ns()
        call()
        spent.append((time.perf_counter_ns() - began) / 1000)
    first, middle, third = statistics.quantiles(spent, n=4)
    return f"{middle:6.1f} us ({first:.1f} to {third:.1f})"


def main() -> None:
    """Print all figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=256)
    parser.add_argument("--times", type=int, default=2000)
    arguments = parser.parse_args()
    pages, times = arguments.keys // 2, arguments.times
    prompts = [list(range(first, first + 64 * pages)) for first in (1000, 2000, 3000)]
    whole, half, absent = (sglang.simm_keys(sglang.page_hashes(tokens, 64)) for tokens in prompts)
    with Client.local("256M") as client:
        for keys in (whole, half[: len(half) // 2]):
            assert all(client.put_many(keys, [bytes(4096)] * len(keys)))
        digests = Hasher(client.namespace)
        print(f"{len(whole)} keys, digests alone:       {quartiles(lambda: digests.many(whole), times)}")
        for name, keys in (("all stored", whole), ("half stored", half), ("none stored", absent)):
            for what, exact in (("the last page", False), ("every key", True)):
                found = client.prefix(keys, group=2, exact=exact)
                assert found.exact == exact or not found.keys
                told = quartiles(lambda keys=keys, exact=exact: client.prefix(keys, group=2, exact=exact), times)  # type: ignore[misc]
                print(f"{len(keys)} keys, {name}, {what:13}: {told}")


if __name__ == "__main__":
    main()

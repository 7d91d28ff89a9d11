"""Compare an arena in ordinary pages with one in reserved huge pages, in bursts that alternate.

    sysctl vm.nr_hugepages=600                      as root, for the default of 1 GiB and some
    python benchmarks/huge_pages.py

Two clusters, each with a full arena of 4 KiB values; a burst reads, or stores, keys in random order, so that the
processor finds the translation of nearly no address at hand. The page tables are those of this process, when it has
touched all of an arena.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from simm.client import Client
from simm.sdk.local_cluster import LocalCluster

PAGE: Final = 4096
BURST: Final = 1000


def page_tables() -> int:
    """Return the bytes of this process's page tables."""
    found = re.search(r"^VmPTE:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found.group(1)) << 10 if found else 0


def burst(call: Callable[[str], Any], keys: list[str]) -> float:
    """Return microseconds per call."""
    began = time.perf_counter()
    for key in keys:
        call(key)
    return (time.perf_counter() - began) / len(keys) * 1e6


def compare(name: str, calls: list[Callable[[str], Any]], keys: Callable[[], list[str]], pairs: int) -> None:
    """Print both times and their ratio."""
    times: list[list[float]] = [[], []]
    for call in calls:
        burst(call, keys())
    for _ in range(pairs):
        chosen = keys()
        for at, call in enumerate(calls):
            times[at].append(burst(call, chosen))
    low, ratio, high = statistics.quantiles([huge / small for small, huge in zip(*times)], n=4)
    small, huge = (statistics.median(each) for each in times)
    print(f"{name:<44}{small:9.2f}{huge:9.2f}{ratio:8.2f}   {low:.2f} to {high:.2f}", flush=True)


def main() -> None:
    """Run all comparisons."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--memory-mib", type=int, default=1024, help="of each arena")
    parser.add_argument("--pairs", type=int, default=30)
    given = parser.parse_args()
    if given.pairs < 2:
        parser.error("--pairs: at least 2, as quartiles are of several")
    size = given.memory_mib << 20
    with contextlib.ExitStack() as stack:
        clients, tables, starts = [], [], []
        for arguments in ((), ("--hugetlb",)):
            began = time.perf_counter()
            cluster = LocalCluster(size, arguments=arguments)
            stack.callback(cluster.close)
            starts.append(time.perf_counter() - began)
            client = stack.enter_context(Client(cluster.manager, path="shm", token=cluster.token))
            value = np.random.default_rng(1).integers(0, 256, PAGE, np.uint8)
            before = page_tables()
            count = size // PAGE
            for start in range(0, count, 1024):
                client.put_many([f"page {n}" for n in range(start, start + 1024)], [value] * 1024)
            stored = [f"page {n}" for n in range(count) if client.exists(f"page {n}")]
            for key in stored:
                client.get(key)
            tables.append(page_tables() - before)
            clients.append((client, stored))
        rng = np.random.default_rng(2)
        both = sorted(set(clients[0][1]) & set(clients[1][1]))
        print(f"{len(both)} values of 4 KiB in each of two arenas of {given.memory_mib} MiB; us a call\n")
        print(f"{'':<44}{'4 KiB':>9}{'2 MiB':>9}{'ratio':>8}   quartiles")
        into = bytearray(PAGE)
        fresh = iter(range(1 << 60))

        def some() -> list[str]:
            return [both[at] for at in rng.integers(0, len(both), BURST).tolist()]

        def new() -> list[str]:
            return [f"new {next(fresh)}" for _ in range(BURST)]

        compare("get into a buffer", [lambda key, c=c: c.get_into(key, into) for c, _ in clients], some, given.pairs)
        compare("exists", [lambda key, c=c: c.exists(key) for c, _ in clients], some, given.pairs)
        compare("put, new keys", [lambda key, c=c: c.put(key, value) for c, _ in clients], new, given.pairs)
        print(f"\nthe start of a cluster took {starts[0]:.2f} s and {starts[1]:.2f} s")
        print(f"page tables of this process: {tables[0] >> 10:,} KiB and {tables[1] >> 10:,} KiB")


if __name__ == "__main__":
    main()

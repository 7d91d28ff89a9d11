"""Compare two checkouts of SiMM, operation by operation, in bursts that alternate between them.

    python benchmarks/compare.py BEFORE AFTER            two folders, each a checkout with simm/ in it
    python benchmarks/compare.py . .                     what the method itself cannot tell apart

Two runs of ``simm bench`` one after the other differ by 10 % and more on a machine with other guests, whatever the code
does. Here each checkout has a process and a cluster of its own for the whole time, and only one of them works at any
moment: a burst of a few milliseconds of one operation, then the same burst in the other, in an order that changes with
each pair. What slows the machine for longer than a burst slows both. Each pair gives a ratio; the median of these is
the result, with the quartiles beside it.

With ``--least`` the bursts are a tenth as long, and the least of each side is the result: what the code takes when
nothing disturbs it. A busy machine repeats that to 2 % where its medians differ by half. It says nothing of calls that
wait for another process.

With ``--processor`` the result is the calling thread's processor time, for calls that wait for nobody: what others do
on the machine weighs less then.

It uses nothing but the public client, so it runs with any two versions that have ``Client.local``. The cache is full
all the time, and puts store new keys, as content hashes are: so each put also evicts. Reads are of the newest keys.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Final

MEMORY_BYTES: Final = 256 << 20
#: Newest keys of each size that are read.
RECENT: Final = {4096: 1024, 64 << 10: 256, 1 << 20: 32}
#: Keys of a batch, unless ``--batch`` says how many.
BATCH: Final = 32
#: Keys of one question about many: those of a long prompt, of which half are stored.
ASKED: Final = 512
#: Name, value size in bytes, and calls in one burst.
BURSTS: Final = (
    ("put", 4096, 200),
    ("get_into", 4096, 400),
    ("exists", 4096, 600),
    ("put_many", 4096, 12),
    ("get_into_many", 4096, 20),
    ("exists_many", 4096, 60),
    ("exists_512", 4096, 20),
    ("view", 4096, 60),
    ("put", 64 << 10, 100),
    ("get_into", 64 << 10, 200),
    ("put", 1 << 20, 20),
    ("get_into", 1 << 20, 20),
)


def operations(client: Any, size: int, most: int) -> dict[str, Callable[[int], Any]]:
    """Return the calls of each operation, by the number of the call. Batches have up to ``most`` keys."""
    value = bytes(range(256)) * (size // 256)
    numbers = itertools.count()
    recent = [""] * RECENT[size]
    batch = min(most, len(recent))
    targets = [bytearray(size) for _ in range(batch)]

    def fresh() -> str:
        number = next(numbers)
        key = recent[number % len(recent)] = f"{size}/{number}"
        return key

    def known(number: int) -> list[str]:
        start = number * batch % (len(recent) - batch + 1)
        return recent[start : start + batch]

    def view(number: int) -> None:
        with client.view(recent[number % len(recent)]) as found:
            found.data[0]

    never = [f"never {number}" for number in range(ASKED // 2)]

    def asked(number: int) -> list[str]:
        start = number * batch % (len(recent) - len(never)) if len(recent) > len(never) else 0
        return recent[start : start + len(never)] + never

    return {
        "put": lambda _: client.put(fresh(), value),
        "get_into": lambda number: client.get_into(recent[number % len(recent)], targets[0]),
        "exists": lambda number: client.exists(recent[number % len(recent)]),
        "put_many": lambda _: client.put_many([fresh() for _ in range(batch)], [value] * batch),
        "get_into_many": lambda number: client.get_into_many(known(number), targets),
        "exists_many": lambda number: client.exists_many(known(number)),
        "exists_512": lambda number: client.exists_many(asked(number)),
        "view": view,
    }


def serve(batch: int) -> int:
    """Carry out the bursts that stdin asks for; answer each with its seconds."""
    from simm.client import Client

    with Client.local(memory=MEMORY_BYTES) as client:
        if not client.wait_ready():
            raise SystemExit("compare: the cluster does not come up")
        calls = {size: operations(client, size, batch) for size in RECENT}
        for size in sorted(RECENT, reverse=True):  # each once over the arena, the small values last
            for number in range(MEMORY_BYTES // size):
                calls[size]["put"](number)
        print("ready", flush=True)
        number = 0
        for line in sys.stdin:
            name, size, count, processor = json.loads(line)
            clock = time.thread_time if processor else time.perf_counter
            call = calls[size][name]
            if not name.startswith("put"):  # what is read must be there: other sizes have evicted it
                for each in range(RECENT[size]):
                    calls[size]["put"](each)
            for warm in range(number, number + count // 10 + 1):  # another process has had the caches
                call(warm)
            began = clock()
            for each in range(number, number + count):
                call(each)
            print(clock() - began, flush=True)
            number += count
    return 0


class Side:
    """One checkout at work."""

    def __init__(self, folder: str, processor: bool, batch: int) -> None:
        self.processor = processor
        self.process = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), "--serve", str(batch)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": os.path.abspath(folder)}, cwd=folder,
        )  # fmt: skip
        if self._line() != "ready":
            raise SystemExit(f"compare: {folder} did not start; its message is above")

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def burst(self, name: str, size: int, count: int) -> float:
        """Return the seconds that so many calls took."""
        assert self.process.stdin is not None
        print(json.dumps([name, size, count, self.processor]), file=self.process.stdin, flush=True)
        return float(self._line())

    def end(self) -> None:
        """End it, whatever it does."""
        self.process.communicate(timeout=60)


def main() -> int:
    """Run the command line; see the module."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("before", help="folder of a checkout")
    parser.add_argument("after", help="folder of a checkout")
    parser.add_argument("--pairs", type=int, default=200, help="bursts of each operation in each (default: 200)")
    parser.add_argument("--only", default="", help="these operations, with commas between them")
    parser.add_argument("--batch", type=int, default=BATCH, help=f"keys of a batch (default: {BATCH})")
    parser.add_argument("--least", action="store_true", help="short bursts, and the least of each side")
    parser.add_argument("--processor", action="store_true", help="processor time of the calling thread")
    options = parser.parse_args()
    if options.pairs < 2:
        parser.error("--pairs: at least 2, as quartiles are of several")
    if options.batch < 1:
        parser.error("--batch: at least 1")
    sides: list[Side] = []
    try:
        sides = [Side(folder, options.processor, options.batch) for folder in (options.before, options.after)]
        print(f"{'operation':<16}{'value':>9}{'before us':>12}{'after us':>12}{'after/before':>14}   quartiles")
        for name, size, count in BURSTS:
            if options.only and name not in options.only.split(","):
                continue
            if options.least:
                count = max(2, count // 10)
            rows = []
            for _ in range(options.pairs):
                order = [0, 1] if random.random() < 0.5 else [1, 0]
                took = {side: sides[side].burst(name, size, count) / count * 1e6 for side in order}
                rows.append((took[0], took[1], took[1] / took[0]))
            before, after, ratio = (statistics.median(column) for column in zip(*rows))
            if options.least:
                before, after = (min(row[side] for row in rows) for side in (0, 1))
                ratio = after / before
            low, _, high = statistics.quantiles([row[2] for row in rows], n=4)
            figures = f"{before:>12.2f}{after:>12.2f}{ratio:>14.3f}   {low:.3f} to {high:.3f}"
            print(f"{name:<16}{size:>9,}{figures}", flush=True)
    finally:
        for side in sides:
            side.end()
    return 0


if __name__ == "__main__":
    sys.exit(serve(int(sys.argv[2])) if sys.argv[1:2] == ["--serve"] else main())

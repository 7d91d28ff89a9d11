"""What a batch costs that is spread over several workers: processor time of client and workers, and time, for each key.

    python benchmarks/workers.py                    one worker against two and four, by shared memory
    python benchmarks/workers.py --path tcp --size 64K

Each number of workers has a cluster of its own for the whole time. Rounds alternate between them, so what slows the
machine slows all. A round does the same batch many times, and its processor time is that of all their processes, by the
kernel's clocks (which count polling, too). The table has the medians of the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil

from simm.client import Client
from simm.config.parsers import parse_bytes
from simm.sdk.local_cluster import LocalCluster

OPERATIONS: Final = ("put", "get", "exists")
#: Memory of all workers together.
MEMORY_BYTES: Final = 256 << 20


class Cost(NamedTuple):
    """Microseconds a key."""

    client: float
    servers: float
    wall: float


class World:
    """A cluster with so many workers on one node, and a client."""

    def __init__(self, workers: int, path: str) -> None:
        self.cluster = LocalCluster(MEMORY_BYTES // workers, arguments=("--workers", str(workers)))
        self.client = Client(self.cluster.manager, token=self.cluster.token, path=path)
        self.client.wait_ready()
        server = psutil.Process(self.cluster.pids["dataserver"])
        self.pids = [child.pid for child in server.children(recursive=True)]

    def processor_ns(self) -> int:
        """Return the processor time of the server's processes."""
        total = 0
        for pid in self.pids:
            with contextlib.suppress(OSError):  # a process that has ended
                total += time.clock_gettime_ns(~pid << 3 | 2)  # as clock_getcpuclockid(3) has it
        return total

    def close(self) -> None:
        """End both."""
        self.client.close()
        self.cluster.close()


def calls(client: Client, operation: str, count: int, size: int) -> Callable[[Sequence[str]], Any]:
    """Return what does a batch of so many keys."""
    if operation == "put":
        values = [os.urandom(size) for _ in range(count)]
        return lambda keys: client.put_many(keys, values)
    if operation == "get":
        buffers = [bytearray(size) for _ in range(count)]
        return lambda keys: client.get_into_many(keys, buffers)
    return client.exists_many


def measure(world: World, operation: str, count: int, size: int, times: int) -> Cost:
    """Do the same batches ``times`` times over 8 sets of keys."""
    sets = [[f"{number}-{each}" for each in range(count)] for number in range(8)]
    call = calls(world.client, operation, count, size)
    for keys in sets if operation == "put" else sets[:1]:
        assert all(call(keys)), "the batch failed"
    servers, client, wall = world.processor_ns(), time.process_time_ns(), time.perf_counter_ns()
    for number in range(times):
        call(sets[number % len(sets)])
    ends = time.process_time_ns(), world.processor_ns(), time.perf_counter_ns()
    used = [(end - begin) / 1000 / times / count for end, begin in zip(ends, (client, servers, wall))]
    return Cost(*used)


def main() -> int:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--workers", default="1,2,4", help="numbers of workers to compare; the first is the base")
    parser.add_argument("--keys", default="32,128", help="keys in a batch")
    parser.add_argument("--size", type=parse_bytes, default=4096, metavar="BYTES", help="of each value")
    parser.add_argument("--path", default="shm", choices=("shm", "tcp"))
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--times", type=int, default=40, help="batches in a round")
    arguments = parser.parse_args()
    numbers = [int(each) for each in arguments.workers.split(",")]
    worlds: dict[int, World] = {}
    try:
        for number in numbers:
            worlds[number] = World(number, arguments.path)
        print("op       keys  workers   client  servers     sum  ratio    wall   us a key")
        for operation in OPERATIONS:
            for count in (int(each) for each in arguments.keys.split(",")):
                found: dict[int, list[Cost]] = {number: [] for number in numbers}
                for turn in range(arguments.rounds):
                    for number in numbers if turn % 2 else numbers[::-1]:
                        cost = measure(worlds[number], operation, count, arguments.size, arguments.times)
                        found[number].append(cost)
                sums = {at: statistics.median(each.client + each.servers for each in found[at]) for at in numbers}
                for at in numbers:
                    client, servers, wall = (statistics.median(column) for column in zip(*found[at]))
                    print(
                        f"{operation:8}{count:5}{at:9}{client:9.2f}{servers:9.2f}{sums[at]:8.2f}"
                        f"{sums[at] / sums[numbers[0]]:7.2f}{wall:8.2f}"
                    )
    finally:
        for world in worlds.values():
            world.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

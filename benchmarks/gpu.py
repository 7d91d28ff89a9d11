#!/usr/bin/env python3
"""Compare SiMM's GET and PUT between GPU memory and an arena on this host with bare copies from pinned memory.

    python benchmarks/gpu.py                            a cluster of its own, the first GPU
    python benchmarks/gpu.py --device 1 --sizes 64K,1M,16M --json result.json
    python benchmarks/gpu.py --staged                   also without registration of the arena

Without a GPU or its driver the script prints one line and ends with status 0.

- ``copy`` is ``cuMemcpyHtoDAsync`` (for get; ``DtoH`` for put) between GPU memory and page-locked memory of this
  process on one stream, and the wait for it. This is what driver, GPU and bus provide: the lower bound. SiMM also
  finds the entry and confirms after the copy that the bytes were its value, or commits the granted chunk.
- ``get`` and ``put`` are single calls, each compared with one copy; ``mget`` and ``mput`` are batches, compared with as
  many copies and one wait.
- Every round runs each operation once for about ``--seconds``; the order rotates from round to round. A ratio is the
  median over the rounds of the ratios within a round: 1.00 is as fast as the bare copy.
- The script overwrites the buffers before each burst and checks them after it; a wrong byte ends the run.
- The client registers the arena with the driver in the background at its first use. The run begins when that is done,
  and prints how long it took.
"""

from __future__ import annotations

import argparse
import json
import mmap
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from simm import __version__  # noqa: E402
from simm.client import Client  # noqa: E402
from simm.config.parsers import parse_bytes  # noqa: E402
from simm.gpu import copy, cuda, pinning  # noqa: E402
from simm.gpu.buffers import DeviceSpan  # noqa: E402
from simm.gpu.cuda import CudaError, Driver  # noqa: E402
from simm.gpu.pinning import Pinned  # noqa: E402
from simm.host.buffers import address_of  # noqa: E402
from simm.sdk.local_cluster import LocalCluster  # noqa: E402
from tests.support.gpu import shut_down  # noqa: E402

KIB, MIB = 1 << 10, 1 << 20
#: Bytes and keys of a batch, at most.
BATCH_BYTES, BATCH_KEYS = 64 * MIB, 128
REGISTER_S = 300.0


class Wrong(Exception):
    """A value is wrong, so the figures mean nothing."""


@dataclass
class Row:
    """One operation at one size: seconds per byte moved, of each round."""

    name: str
    floor: str
    size: int
    seconds: list[float] = field(default_factory=list)


class Bench:
    """The operations that are measured, on one device."""

    def __init__(self, client: Client, driver: Driver, device: int, size: int) -> None:
        self.client = client
        self.driver = driver
        self.device = device
        self.size = size
        self.count = max(1, min(BATCH_KEYS, BATCH_BYTES // size))
        self.host = mmap.mmap(-1, self.count * size)
        self.host_address = address_of(memoryview(self.host))
        self.keys = [f"{size} {at}" for at in range(self.count)]
        self._turn = 0
        driver.push(device)
        try:
            driver.host_register(self.host_address, self.count * size)
            self.memory = driver.allocate(self.count * size)
            self.stream = driver.stream_create()
        finally:
            driver.pop()
        self.spans = [DeviceSpan(self.memory + at * size, size, device=device) for at in range(self.count)]
        self.whole = DeviceSpan(self.memory, self.count * size, device=device)
        self.value = b"".join(bytes([(at * 37 + 11) % 251 + 1]) * size for at in range(self.count))

    def close(self) -> None:
        """Free everything."""
        self.client.delete_many(self.keys)
        self.driver.push(self.device)
        try:
            self.driver.free(self.memory)
            self.driver.stream_destroy(self.stream)
            self.driver.host_unregister(self.host_address)
        finally:
            self.driver.pop()

    # -- before and after a burst ------------------------------------------------------------------

    def spoil(self, name: str) -> None:
        """Make the values to overwrite wrong, and the values to read right."""
        if "get" in name:
            self.host[:] = self.value
            copy.copy_in(self.whole, memoryview(bytes(self.count * self.size)))
            if "copy" not in name:
                values = memoryview(self.value)
                self.client.put_many(
                    self.keys, [values[at : at + self.size] for at in range(0, len(values), self.size)]
                )
        else:
            self.host[:] = bytes(self.count * self.size)
            copy.copy_in(self.whole, memoryview(self.value))
            if "copy" not in name:
                self.client.put_many(self.keys, [b"\xff" * self.size] * self.count)

    def look(self, name: str, touched: int) -> None:
        """Raise Wrong unless the first ``touched`` values are right."""
        wanted = self.value[: touched * self.size]
        if "get" in name:
            got: Any = copy.host_copy(self.whole, touched * self.size)
        elif "copy" in name:
            got = self.host[: touched * self.size]
        else:
            got = b"".join(data or b"" for data in self.client.get_many(self.keys[:touched]))
        if got != wanted:
            raise Wrong(f"{name} of {self.size} bytes: wrong bytes")

    # -- the operations: each moves one value, or all -------------------------------------------------

    def get(self) -> None:
        at = self._next()
        if self.client.get_into(self.keys[at], self.spans[at]) != self.size:
            raise Wrong("get: a miss")

    def put(self) -> None:
        at = self._next()
        if not self.client.put(self.keys[at], self.spans[at]):
            raise Wrong("put: refused")

    def mget(self) -> None:
        if self.client.get_into_many(self.keys, self.spans) != [self.size] * self.count:
            raise Wrong("mget: a miss")

    def mput(self) -> None:
        if self.client.put_many(self.keys, self.spans) != [True] * self.count:
            raise Wrong("mput: refused")

    def copy_get(self) -> None:
        self._copies([self._next()], self.driver.to_device)

    def copy_put(self) -> None:
        self._copies([self._next()], self._to_host)

    def copy_mget(self) -> None:
        self._copies(range(self.count), self.driver.to_device)

    def copy_mput(self) -> None:
        self._copies(range(self.count), self._to_host)

    def _to_host(self, device: int, host: int, size: int, stream: int) -> None:
        self.driver.to_host(host, device, size, stream)

    def _copies(self, which: Sequence[int], begin: Callable[[int, int, int, int], None]) -> None:
        driver, size = self.driver, self.size
        driver.push(self.device)
        for at in which:
            begin(self.memory + at * size, self.host_address + at * size, size, self.stream)
        driver.stream_synchronize(self.stream)
        driver.pop()

    def _next(self) -> int:
        self._turn = (self._turn + 1) % self.count
        return self._turn

    # -- a burst --------------------------------------------------------------------------------------

    def burst(self, row: Row, seconds: float) -> None:
        """Run one operation for the given time; add its seconds per byte to the row."""
        operation = getattr(self, row.name.replace(" staged", "").replace(" ", "_"))
        single = not row.name.replace("copy ", "").startswith("m")
        self.spoil(row.name)
        self._turn = -1
        moved = calls = 0
        start = time.perf_counter()
        while (spent := time.perf_counter() - start) < seconds or not calls:
            operation()
            calls += 1
            moved += self.size if single else self.size * self.count
        spent = time.perf_counter() - start
        row.seconds.append(spent / moved)
        self.look(row.name, min(calls, self.count) if single else self.count)


def measure(bench: Bench, seconds: float, rounds: int, staged: bool) -> list[Row]:
    """Measure all rows of one size."""
    rows = [Row(f"copy {name}", "", bench.size) for name in ("get", "put", "mget", "mput")]
    rows += [Row(name, f"copy {name}", bench.size) for name in ("get", "put", "mget", "mput")]
    if staged:
        rows += [Row(f"{name} staged", f"copy {name}", bench.size) for name in ("get", "put", "mget", "mput")]
    direct = Pinned.direct
    for turn in range(rounds):
        for row in rows[turn % len(rows) :] + rows[: turn % len(rows)]:
            if "staged" in row.name:
                Pinned.direct = lambda *_: 0  # type: ignore[method-assign]
            try:
                bench.burst(row, seconds)
            finally:
                Pinned.direct = direct  # type: ignore[method-assign]
    return rows


def report(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Print the table of one size; return the same for JSON."""
    known = {row.name: row for row in rows}
    answers = []
    for row in rows:
        gigabytes = 1 / statistics.median(row.seconds) / 1e9
        ratio = None
        if row.floor:
            ratio = statistics.median(
                floor / mine for floor, mine in zip(known[row.floor].seconds, row.seconds, strict=True)
            )
        micro = statistics.median(row.seconds) * row.size * 1e6
        print(f"{row.size:>10}  {row.name:<12} {micro:>10.1f} us a value {gigabytes:>8.2f} GB/s"
              + (f"   {ratio:.2f} of the bare copy" if ratio is not None else ""))  # fmt: skip
        answers.append({"size": row.size, "operation": row.name, "GB/s": gigabytes, "us": micro, "ratio": ratio,
                        "seconds_per_byte": row.seconds})  # fmt: skip
    return answers


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 0, or 1 for a wrong value."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", type=int, default=0, help="ordinal of the GPU")
    parser.add_argument("--sizes", default="4K,64K,1M,16M", help="bytes of a value, separated by commas")
    parser.add_argument("--memory", default="2G", help="bytes of the arena")
    parser.add_argument("--seconds", type=float, default=0.5, help="length of each burst")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--staged", action="store_true", help="also measure without the arena's registration")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args(arguments)
    try:
        driver = cuda.load()
        if options.device >= driver.devices:
            print(f"no GPU {options.device} here, there are {driver.devices}: nothing was measured")
            return 0
        name = driver.device_name(options.device)
    except CudaError as exc:
        print(f"no GPU here ({exc}): nothing was measured")
        return 0
    cluster = LocalCluster(memory=options.memory)
    answers: list[dict[str, Any]] = []
    try:
        with Client(cluster.manager, path="shm", deadline_s=30.0) as client:
            client.wait_ready()
            client.put("first", b"x")
            router = client._router
            assert router is not None
            (target,) = router.targets.values()
            reader = target.reader
            if reader is None:
                print(f"the client does not reach its server by shared memory ({target.reason}): nothing was measured")
                return 0
            began = time.monotonic()
            arena = pinning.pinned_for(reader, driver, options.device)
            while arena.ready < arena.size and not arena.failure and time.monotonic() < began + REGISTER_S:
                time.sleep(0.01)
            took = time.monotonic() - began
            del reader, target
            print(f"SiMM {__version__}, Python {platform.python_version()}, GPU {options.device}: {name}")
            if arena.ready < arena.size:
                why = arena.failure or "slow"
                print(f"{arena.ready >> 20} of {arena.size >> 20} MiB of the arena are registered: {why}")
            else:
                print(f"the arena's {arena.size >> 20} MiB were registered in {took:.2f} s")
            for size in (parse_bytes(text) for text in options.sizes.split(",")):
                bench = Bench(client, driver, options.device, size)
                try:
                    answers += report(measure(bench, options.seconds, options.rounds, options.staged))
                finally:
                    bench.close()
    except Wrong as exc:
        print(f"WRONG: {exc}")
        return 1
    finally:
        shut_down()  # before the arena goes
        cluster.close()
    if options.json:
        options.json.write_text(json.dumps({"gpu": name, "registered_s": took, "rows": answers}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Compare each operation beyond put, get and exists with the plain call beside it, in bursts that alternate.

    python benchmarks/operations.py                  a cluster of its own, by shared memory; --path tcp by TCP
    python benchmarks/operations.py --path near      near copies: two servers, each of which stands for a host
    scripts/test-rdma --shell 'python benchmarks/operations.py --path rdma --memory 256M --pairs 6 --no-parts'

Each row names an operation, and the plain call that an engine would make without it, with as many keys and bytes. A
pair is a burst of the plain call, one of the operation, and one of the plain call again. What slows the machine for
longer than a burst slows both. The times are the least of all bursts, in us a call, and *least* is their ratio: what a
busy machine repeats. *median* is the median of the pairs' ratios, with the quartiles beside it: what a caller meets
there. Each call is checked: one that fails, or is a miss, ends the run.

An ``advance`` has no plain call that does the same: its row shows it beside a put. A value in parts is shown beside two
values of half its length.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from simm.client import Client  # noqa: E402
from simm.constants import VALUE_BYTES_MAX  # noqa: E402
from simm.sdk.local_cluster import LocalCluster  # noqa: E402

KIB, MIB = 1 << 10, 1 << 20
PAGES: Final = 32
PAGE_BYTES: Final = 64 * KIB
LAYER_BYTES: Final = 4 * KIB
MANY: Final = 512
WHOLE_BYTES: Final = 16 * MIB
#: A value in parts, and the two plain ones beside it.
LARGE_BYTES: Final = 2 * VALUE_BYTES_MAX
CALLS_MAX: Final = 400

Call = Callable[[], object]


class Row(NamedTuple):
    """A plain call, an operation, and at most so many calls of a burst."""

    operation: str
    beside: str
    plain: Call
    call: Call
    most: int = CALLS_MAX


def check(good: object) -> None:
    """End the run if a call has failed."""
    if not good:
        raise SystemExit("operations: a call failed, or was a miss")


def burst(call: Call, calls: int) -> float:
    """Return microseconds per call."""
    began = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - began) / calls * 1e6


def compare(row: Row, pairs: int, burst_ms: float) -> None:
    """Print the times of both calls, and their ratio."""
    counts = []
    for call in (row.plain, row.call):
        burst(call, 1)
        counts.append(max(1, min(row.most, round(burst_ms * 1e3 / burst(call, 1)))))
    first, then, ratios = [], [], []
    for _ in range(pairs):
        before, middle, after = burst(row.plain, counts[0]), burst(row.call, counts[1]), burst(row.plain, counts[0])
        first += [before, after]
        then.append(middle)
        ratios.append(2 * middle / (before + after))
    low, ratio, high = statistics.quantiles(ratios, n=4)
    times = f"{min(first):11.1f}{min(then):11.1f}{min(then) / min(first):8.2f}{ratio:8.2f}"
    print(f"{row.operation:<44}{row.beside:<36}{times}   {low:.2f} to {high:.2f}", flush=True)


def pages_of(client: Client) -> tuple[list[str], list[Any], Iterator[int]]:
    """Store pages; return their keys, their values, and endless numbers of them."""
    keys = [f"page {number}" for number in range(PAGES)]
    pages = list(np.random.default_rng(1).integers(0, 256, (PAGES, PAGE_BYTES), np.uint8))
    check(all(client.put_many(keys, pages)))
    return keys, pages, itertools.cycle(range(PAGES))


def rows_of(client: Client) -> Iterator[Row]:
    """Yield all rows of one path but those of near copies."""
    keys, pages, at = pages_of(client)
    layers = [f"layer {number}" for number in range(PAGES)]
    check(all(client.put_many(layers, [page[:LAYER_BYTES] for page in pages])))
    check(client.put("whole", np.resize(pages[0], WHOLE_BYTES)))
    check(client.put("one MiB", np.resize(pages[1], MIB)))
    rows = np.zeros((PAGES, LAYER_BYTES), np.uint8)
    parts = np.zeros((16, PAGE_BYTES), np.uint8)
    layer, mib = rows[0], parts.reshape(-1)
    spots = [[(number * LAYER_BYTES, LAYER_BYTES, layer)] for number in range(PAGES)]
    spread = [(number * MIB + 4096, PAGE_BYTES, parts[number]) for number in range(16)]
    heads = [[(8192, LAYER_BYTES, row)] for row in rows]
    pieces = [np.split(page, 16) for page in pages]
    halves = [np.split(page, 2) for page in pages]
    groups = [[f"{{{number}}}k", f"{{{number}}}v"] for number in range(PAGES // 2)]
    loose = [[f"{number}k", f"{number}v"] for number in range(PAGES // 2)]
    couple = pages[:2]
    for group in groups:
        check(client.put_group(group, couple))
    many = [f"one of {number}" for number in range(MANY)]
    check(all(client.put_many(many, [pages[0][:LAYER_BYTES]] * MANY)))

    def all_there(keys: list[str]) -> Call:
        return lambda: check(all(client.exists_many(keys)))

    def put(key: str, **options: Any) -> Call:
        return lambda: check(client.put(key, pages[next(at)], **options))

    def get_layers() -> None:
        check(None not in client.get_into_many(layers, list(rows)))

    yield Row(
        "get_ranges: 4 KiB out of 16 MiB", "get_into of 4 KiB",
        lambda: check(client.get_into(layers[next(at)], layer)),
        lambda: check(client.get_ranges("whole", spots[next(at)])),
    )  # fmt: skip
    yield Row("get_ranges: 16 of 64 KiB out of 16 MiB", "get_into of 1 MiB",
              lambda: check(client.get_into("one MiB", mib)),
              lambda: check(client.get_ranges("whole", spread)))  # fmt: skip
    yield Row("get_ranges_many: 4 KiB of each of 32", "get_into_many of 32, 4 KiB", get_layers,
              lambda: check(None not in client.get_ranges_many(keys, heads)))  # fmt: skip
    yield Row("put_gather: 16 pieces of 4 KiB", "put of 64 KiB", put("put"),
              lambda: check(client.put_gather("gather", pieces[next(at)])))  # fmt: skip
    yield Row("put_gather_many: 32 of 2 pieces", "put_many of 32, 64 KiB",
              lambda: check(all(client.put_many(keys, pages))),
              lambda: check(all(client.put_gather_many(keys, halves))))  # fmt: skip
    yield Row("pin and release: 32 keys", "exists_many of 32", all_there(keys), lambda: client.pin(keys).release())
    with client.pin(keys) as pins:
        check(None not in pins.lengths)
        yield Row("pins.read: 4 KiB of each of 32", "get_into_many of 32, 4 KiB", get_layers,
                  lambda: check(None not in pins.read([(8192, LAYER_BYTES, rows)])))  # fmt: skip
    yield Row("put with a ttl, 64 KiB", "put of 64 KiB", put("put"), put("kept", ttl=60))
    yield Row("keep: 32 keys", "exists_many of 32", all_there(keys), lambda: check(all(client.keep(keys, 60))))
    check(all(client.unkeep(keys)))
    yield Row("put_group: 2 of 64 KiB", "put_many of 2, 64 KiB",
              lambda: check(all(client.put_many(loose[next(at) // 2], couple))),
              lambda: check(client.put_group(groups[next(at) // 2], couple)))  # fmt: skip
    yield Row("exists_groups: 16 of 2", "exists_many of 32", all_there(keys),
              lambda: check(all(client.exists_groups(groups))))  # fmt: skip
    yield Row("load_ms: 512 keys", "exists_many of 512", all_there(many), lambda: check(client.load_ms(many)))
    # A namespace's first advance is another one (docs/epochs.md), and only some of the others are let through at once.
    check(client.advance("advanced"))
    yield Row("advance", "put of 4 KiB", lambda: check(client.put("small", layer)),
              lambda: check(client.advance("advanced")), 1)  # fmt: skip


def large_rows_of(client: Client) -> Iterator[Row]:
    """Yield the rows of values in parts."""
    value = np.resize(np.random.default_rng(2).integers(0, 256, MIB, np.uint8), LARGE_BYTES)
    half = value[:VALUE_BYTES_MAX]
    room, half_room = np.zeros(LARGE_BYTES, np.uint8), np.zeros(VALUE_BYTES_MAX, np.uint8)

    def put_two() -> None:
        check(client.put("half", half) and client.put("other half", half))

    def get_two() -> None:
        check(client.get_into("half", half_room) and client.get_into("other half", half_room))

    yield Row("put of 128 MiB, in parts", "two puts of 64 MiB", put_two, lambda: check(client.put("large", value)), 1)
    yield Row("get_into of 128 MiB, in parts", "two of 64 MiB", get_two,
              lambda: check(client.get_into("large", room)), 1)  # fmt: skip


def near_rows() -> Iterator[Row]:
    """Yield the rows of near copies: a client at one of two servers, whose keys are the other one's."""
    import pytest

    from tests.support.fleet import Fleet
    from tests.support.processes import new_folder
    from tests.support.several_hosts import HostClient, separate
    from tests.support.waiting import wait_until

    with pytest.MonkeyPatch.context() as patch, Fleet(new_folder(), 2, memory="256M") as fleet:
        separate(patch)
        home = fleet.servers[0].name
        address = fleet.manager.address
        with HostClient(home, address) as plain, HostClient(home, address, near_copies=True) as client:
            check(plain.wait_ready(60) and client.wait_ready(60))

            def is_far(key: str) -> bool:
                target = plain._routes.target(plain.digest(key))
                return target is not None and target.info.node != home

            far = [key for number in range(8 * PAGES) if is_far(key := f"page {number}")]
            keys = far[:PAGES]
            at = itertools.cycle(keys)
            value = np.ones(PAGE_BYTES, np.uint8)
            check(all(plain.put_many(far, [value] * len(far))))
            room, rooms = bytearray(PAGE_BYTES), list(np.zeros((PAGES, PAGE_BYTES), np.uint8))
            client.prefetch(keys)
            wait_until(lambda: client.counters.get("near_copies", 0) >= PAGES, "all keys have copies")
            yield Row("get_into of a near copy, 64 KiB", "get_into from elsewhere",
                      lambda: check(plain.get_into(next(at), room)),
                      lambda: check(client.get_into(next(at), room)))  # fmt: skip
            yield Row("get_into_many of 32 near copies, 64 KiB", "get_into_many from elsewhere",
                      lambda: check(None not in plain.get_into_many(keys, rooms)),
                      lambda: check(None not in client.get_into_many(keys, rooms)))  # fmt: skip
            here = [key for number in range(8 * PAGES) if not is_far(key := f"page {number}")][:PAGES]
            check(all(plain.put_many(here, [value] * PAGES)))
            yield Row("prefetch of 32 keys that are copied", "exists_many from elsewhere",
                      lambda: check(all(plain.exists_many(keys))), lambda: client.prefetch(keys), 4)  # fmt: skip
            at_home = itertools.cycle(here)
            yield Row("get_into of 64 KiB, owned here, near_copies", "the same, without",
                      lambda: check(plain.get_into(next(at_home), room)),
                      lambda: check(client.get_into(next(at_home), room)))  # fmt: skip


@contextlib.contextmanager
def connected(path: str, memory: str) -> Iterator[Client]:
    """Return a client of a cluster of its own that reaches it by this path."""
    arguments, devices = [], ""
    if path == "rdma":
        from simm.rdma.ports import ports

        usable = [port for port in ports() if not port.trouble]
        if not usable:
            raise SystemExit("operations: no usable RDMA port; without hardware: scripts/test-rdma --shell '...'")
        arguments = ["--rdma", "on", "--rdma-devices", usable[min(1, len(usable) - 1)].name]
        devices = usable[0].name
    with (
        LocalCluster(memory, arguments=tuple(arguments)) as cluster,
        Client(
            cluster.manager, token=cluster.token, path=path, deadline_s=60.0, rdma_devices=devices, tls_ca=""
        ) as client,
    ):
        if not client.wait_ready(60):
            raise SystemExit(f"operations: the cluster is not reached by {path}: {client.stats()['workers']}")
        yield client


def main() -> None:
    """Run all comparisons."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--path", default="shm", choices=("shm", "tcp", "rdma", "near"))
    parser.add_argument("--pairs", type=int, default=150)
    parser.add_argument("--burst-ms", type=float, default=1.0, help="about how long a burst is")
    parser.add_argument("--memory", default="1G")
    parser.add_argument("--no-parts", action="store_true", help="leave out values of 128 MiB, for slow machines")
    given = parser.parse_args()
    if given.pairs < 2:
        parser.error("--pairs: at least 2, as quartiles are of several")
    head = f"{'plain':>11}{'operation':>11}{'least':>8}{'median':>8}   quartiles"
    print(f"{f'by {given.path}; us':<44}{'beside':<36}{head}")
    if given.path == "near":
        for row in near_rows():
            compare(row, given.pairs, given.burst_ms)
        return
    with connected(given.path, given.memory) as client:
        for row in rows_of(client):
            compare(row, given.pairs, given.burst_ms)
        for row in () if given.no_parts else large_rows_of(client):
            compare(row, max(2, given.pairs // 4), given.burst_ms)


if __name__ == "__main__":
    main()

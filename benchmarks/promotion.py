#!/usr/bin/env python3
"""Compare the load of eight data servers under Zipf-distributed reads, with near copies and without.

    python benchmarks/promotion.py                          # --servers 8 --keys 2000 --reads 4000 --zipf 0.99

Each data server stands for a host: the client of a host reaches its own server by shared memory and all others by TCP.
The servers, the clients and what they decide are the real ones; only the network between the hosts is the loopback.

- All keys are put once. Then the clients read one key at a time, in turns, each its own draws. The same draws are read
  by clients without near copies and by clients with them, each in a namespace of its own, after the other.
- A server's *load* is the number of values that it serves: to its own host's client out of its arena, copies included,
  to others by TCP, and to the threads that make copies. The bar is that the busiest has at most twice the mean.
- *far* is the share of reads that another host served. The time of a read is the mean over all reads of that run. On
  one machine the loopback stands for the network, so it says what copies save of the client's and the stream's work.

It ends with status 1 if a value is wrong, or the busiest server with near copies has more than twice the mean.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from simm.config.parsers import parse_bytes  # noqa: E402
from tests.support.fleet import Fleet  # noqa: E402
from tests.support.processes import new_folder  # noqa: E402
from tests.support.several_hosts import HostClient, separate  # noqa: E402

BAR = 2.0


class Wrong(Exception):
    """A value is wrong, so the figures mean nothing."""


def draws(options: argparse.Namespace) -> list[list[int]]:
    """Return the numbers of the keys that each host's client reads, in turns."""
    rng = np.random.default_rng(options.seed)
    chances = 1.0 / np.arange(1, options.keys + 1) ** options.zipf
    found: list[list[int]] = rng.choice(
        options.keys, (options.reads, options.servers), p=chances / chances.sum()
    ).tolist()
    return found


def owner_of(client: HostClient, key: str) -> str:
    target = client._routes.target(client.digest(key))
    assert target is not None
    return target.info.node


def measure(fleet: Fleet, options: argparse.Namespace, turns: list[list[int]], near: bool) -> dict[str, Any]:
    """Put all keys, and let each host's client read its draws."""
    namespace = "near" if near else "plain"
    names = [server.name for server in fleet.servers]
    clients = [
        HostClient(name, fleet.manager.address, namespace=namespace, near_copies=near, deadline_s=30.0)
        for name in names
    ]
    served = dict.fromkeys(names, 0)
    try:
        if not all(client.wait_ready(60) for client in clients):
            raise Wrong("the servers are not ready")
        keys = [f"page {number}" for number in range(options.keys)]
        size = parse_bytes(options.size)
        values = [np.full(size, number % 251, np.uint8).tobytes() for number in range(options.keys)]
        if not all(clients[0].put_many(keys, values)):
            raise Wrong(f"a put failed: {clients[0].stats()['last_put_failure']}")
        owners = [owner_of(clients[0], key) for key in keys]
        by_digest = {clients[0].digest(key): owner for key, owner in zip(keys, owners)}
        for client in clients:
            if client._near is not None:  # what is read to be copied is load, too
                count_copies(client._near._plain, by_digest, served)
        far = 0
        seconds = 0.0
        for row in turns:
            for client, number in zip(clients, row):
                hits = client._counters.get("near_hits", 0)
                began = time.perf_counter()
                got = client.get(keys[number])
                seconds += time.perf_counter() - began
                if got != values[number]:
                    raise Wrong(f"{keys[number]}: {'a miss' if got is None else 'other bytes'}")
                here = owners[number] == client._home or client._counters.get("near_hits", 0) > hits
                served[client._home if here else owners[number]] += 1
                far += not here
        stats = [client.stats() for client in clients]
    finally:
        for client in clients:
            client.close()
    reads = options.reads * options.servers
    total = sum(served.values())
    return {
        "near": near, "served": sorted(served.values(), reverse=True), "busiest": max(served.values()) / total,
        "ratio": max(served.values()) * len(served) / total, "far": far / reads, "read_us": seconds / reads * 1e6,
        "copies": sum(each.get("near_copies", 0) for each in stats),
        "dropped": sum(each.get("near_dropped", 0) for each in stats),
    }  # fmt: skip


def count_copies(reads: Any, owners: dict[bytes, str], served: dict[str, int]) -> None:
    """Count the values that a client's thread reads."""
    read_many = reads.read_many

    def counted(digests: Sequence[bytes], sinks: Sequence[Any], *more: Any) -> list[Any]:
        for digest in digests:
            served[owners[digest]] += 1
        answers: list[Any] = read_many(digests, sinks, *more)
        return answers

    reads.read_many = counted


def show(found: dict[str, Any]) -> str:
    name = "near copies" if found["near"] else "without"
    return (
        f"{name:12} busiest/mean {found['ratio']:.2f}   far {found['far']:.0%}   a read {found['read_us']:.0f} us   "
        f"copies {found['copies']} (dropped {found['dropped']})   served {found['served']}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--servers", type=int, default=8, help="data servers, each with a client (default: 8)")
    parser.add_argument("--keys", type=int, default=2000)
    parser.add_argument("--reads", type=int, default=4000, help="of each client")
    parser.add_argument("--size", default="4K", help="of a value")
    parser.add_argument("--memory", default="32M", help="of an arena")
    parser.add_argument("--zipf", type=float, default=0.99)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args(arguments)
    turns = draws(options)
    logging.getLogger("simm").setLevel(logging.ERROR)
    with pytest.MonkeyPatch.context() as patch, Fleet(new_folder(), options.servers, memory=options.memory) as fleet:
        separate(patch)
        try:
            found = [measure(fleet, options, turns, near) for near in (False, True)]
        except Wrong as exc:
            print(exc, file=sys.stderr)
            return 1
    for each in found:
        print(show(each))
    if options.json is not None:
        options.json.write_text(json.dumps({"options": {**vars(options), "json": str(options.json)}, "runs": found}))
    if found[1]["ratio"] > BAR:
        print(f"the busiest server has more than {BAR} times the mean", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Replay prompts against the eviction policies, and print the share of KV blocks that each finds again.

    python benchmarks/eviction.py conversation_trace.jsonl                      # a recorded trace
    python benchmarks/eviction.py conversation_trace.jsonl --shares 0.05,0.2 --sizes 4K,64K,256K
    python benchmarks/eviction.py --generate 7                                  # conversations generated from a seed

A trace has one JSON object per line, one for each request, with ``timestamp`` (milliseconds; the order of requests) and
``hash_ids`` (a number for each block of the prompt, the same number for the same block after the same prefix).
The Mooncake project publishes such traces: https://github.com/kvcache-ai/Mooncake, FAST25-release/traces,
conversation_trace.jsonl (Apache License 2.0).

Each request does what an engine does: it reads the prompt's blocks in order up to the first miss, and then stores the
missing ones. A hit is a block that was read. A stored block after the first miss is not a hit.

The policies run in the real `simm.arena.space.Space`: allocator, size classes, eviction and the visited bytes,
without the bytes of the values. The capacity is a share of the bytes of all distinct blocks, rounded up to whole
slabs. The baselines are a textbook LRU and FIFO (ordered dictionaries) with the same capacity in bytes. With several
``--sizes``, each run of 64 ids has one size and the next run has the next size. Values of several sizes then share the
region, and the baselines show what an eviction order over all of them would keep.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from simm.arena.space import Space
from simm.config.parsers import parse_bytes
from simm.constants import DEFAULT_POLICY, POLICY_NAMES, SLAB_BYTES
from simm.slab import CHUNK_SIZES, CHUNKS_PER_SLAB, LARGE_GROUP, chunk_bytes_for, class_of

#: Consecutive ids that have one size if there are several sizes.
RUN = 64

Prompts = Sequence[Sequence[int]]


class Result(NamedTuple):
    """The result of one replay."""

    name: str
    hits: int
    blocks: int
    evictions: dict[str, int]

    @property
    def ratio(self) -> float:
        """Return the share of blocks that were read."""
        return self.hits / max(1, self.blocks)


class Cache:
    """What a request needs of a cache: read a block, look for one, store one."""

    evictions: dict[str, int] = {}

    def get(self, block: int) -> bool:
        """Read a block; return False if it is not stored."""
        raise NotImplementedError

    def has(self, block: int) -> bool:
        """Return True if a block is stored, without using it."""
        raise NotImplementedError

    def put(self, block: int, size: int) -> None:
        """Store a block that is not stored yet."""
        raise NotImplementedError


class SpaceCache(Cache):
    """The real allocator and policy, with a dictionary in place of the table."""

    def __init__(self, capacity: int, slots: int, policy: str) -> None:
        self._visited = bytearray(slots)
        self._free = list(range(slots))
        self._where: dict[int, int] = {}
        self._block: dict[int, int] = {}
        self.space = Space(capacity, slots, memoryview(self._visited), policy, self._evict)

    def _evict(self, slot: int) -> None:
        del self._where[self._block.pop(slot)]
        self._free.append(slot)
        self.space.release(self.space._offsets[slot])

    def get(self, block: int) -> bool:
        slot = self._where.get(block, -1)
        if slot >= 0:
            self._visited[slot] = 1
        return slot >= 0

    def has(self, block: int) -> bool:
        return block in self._where

    def put(self, block: int, size: int) -> None:
        offset = self.space.allocate(size)
        if offset < 0:
            return
        slot = self._free.pop()
        self._where[block], self._block[slot] = slot, block
        self.space.publish(offset, slot)
        self.evictions = self.space.evictions


class Textbook(Cache):
    """Least recently used, or first in first out, by an ordered dictionary and exact bytes."""

    def __init__(self, capacity: int, lru: bool) -> None:
        self._room = capacity
        self._lru = lru
        self._sizes: OrderedDict[int, int] = OrderedDict()

    def get(self, block: int) -> bool:
        found = block in self._sizes
        if found and self._lru:
            self._sizes.move_to_end(block)
        return found

    def has(self, block: int) -> bool:
        return block in self._sizes

    def put(self, block: int, size: int) -> None:
        self._room -= chunk_bytes_for(size)
        self._sizes[block] = chunk_bytes_for(size)
        while self._room < 0:
            _, size = self._sizes.popitem(last=False)
            self._room += size


def replay(name: str, cache: Cache, prompts: Prompts, size_of: Callable[[int], int]) -> Result:
    """Replay all prompts, one after the other."""
    hits = 0
    for prompt in prompts:
        found = 0
        while found < len(prompt) and cache.get(prompt[found]):
            found += 1
        hits += found
        for block in prompt[found:]:
            if not cache.has(block):
                cache.put(block, size_of(block))
    return Result(name, hits, sum(map(len, prompts)), dict(cache.evictions))


def compare(
    prompts: Prompts, share: float, sizes: Sequence[int], policies: Sequence[str] = POLICY_NAMES
) -> list[Result]:
    """Replay on each policy and both baselines, with room for ``share`` of the bytes of all distinct blocks."""

    def size_of(block: int) -> int:
        return sizes[block // RUN % len(sizes)]

    distinct = {block for prompt in prompts for block in prompt}
    slabs = -(-int(share * sum(_slab_bytes(size_of(block)) for block in distinct)) // SLAB_BYTES)
    capacity = max(1, slabs) * SLAB_BYTES
    usable = capacity
    if len(sizes) == 1 and class_of(sizes[0]) != LARGE_GROUP:  # no value uses the ends of slabs
        group = class_of(sizes[0])
        usable = capacity // SLAB_BYTES * CHUNKS_PER_SLAB[group] * CHUNK_SIZES[group]
    slots = min(len(distinct) + 1, capacity // min(map(chunk_bytes_for, sizes)) + 1)
    results = [
        replay(name, SpaceCache(capacity, slots, name), prompts, size_of) for name in policies
    ]  # fmt: skip
    results += [
        replay(f"textbook {'LRU' if lru else 'FIFO'}", Textbook(usable, lru), prompts, size_of) for lru in (True, False)
    ]
    return results


def _slab_bytes(size: int) -> int:
    """Return the bytes of the region that a value takes up: its chunk and its part of the slab's unused end."""
    group = class_of(size)
    return chunk_bytes_for(size) if group == LARGE_GROUP else SLAB_BYTES // CHUNKS_PER_SLAB[group]


def conversations(seed: int, requests: int = 4000) -> list[list[int]]:
    """Generate prompts of conversations: shared system prompts, turns that return after a while, one-off prompts.

    The prompt of a turn is the whole conversation so far and some more blocks. A conversation that waits for its user
    returns after tens to hundreds of other requests, and ends after a few turns.
    """
    rng = random.Random(seed)
    fresh = iter(range(1 << 40))
    systems = [[next(fresh) for _ in range(rng.randint(2, 12))] for _ in range(8)]
    weights = [1 / (rank + 1) for rank in range(len(systems))]
    waiting: list[tuple[int, int, list[int]]] = []  # (when it returns, turns left, blocks)
    prompts: list[list[int]] = []
    for now in range(requests):
        waiting.sort(key=lambda turn: turn[0], reverse=True)
        if waiting and waiting[-1][0] <= now:
            _, left, blocks = waiting.pop()
            blocks = blocks + [next(fresh) for _ in range(rng.randint(1, 6))]
        else:
            blocks = list(rng.choices(systems, weights)[0])
            blocks += [next(fresh) for _ in range(rng.randint(1, 30))]
            left = 0 if rng.random() < 0.4 else rng.randint(1, 6)
        prompts.append(blocks)
        if left:
            waiting.append((now + int(rng.lognormvariate(4.3, 0.8)) + 1, left - 1, blocks))
    return prompts


def read_trace(path: Path) -> list[list[int]]:
    """Return the prompts of a trace file in order of time.

    Raises:
        ValueError: a line is not a request; the text names it.
    """
    requests: list[tuple[float, int, list[int]]] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                request = json.loads(line)
                requests.append((float(request["timestamp"]), number, [int(block) for block in request["hash_ids"]]))
            except (ValueError, KeyError, TypeError) as exc:
                raise ValueError(f"{path}, line {number}: {exc!r}") from None
    requests.sort()
    return [blocks for _, _, blocks in requests]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Hit ratios of the eviction policies on prompts of a trace.")
    parser.add_argument("trace", nargs="?", type=Path, help="trace: a JSON object with timestamp and hash_ids per line")
    parser.add_argument("--generate", type=int, metavar="SEED", help="generate conversations from a seed instead")
    parser.add_argument("--requests", type=int, metavar="N", help="only the first N requests")
    parser.add_argument("--shares", default="0.02,0.05,0.1,0.2,0.5", metavar="LIST",
                        help="capacities as shares of all distinct blocks (%(default)s)")  # fmt: skip
    parser.add_argument("--sizes", default="64K", metavar="LIST", help="bytes of a block (%(default)s)")
    parser.add_argument("--policies", default=",".join(POLICY_NAMES), metavar="LIST", help="(%(default)s)")
    arguments = parser.parse_args(argv)
    if (arguments.trace is None) == (arguments.generate is None):
        parser.error("name a trace file, or --generate SEED")
    try:
        shares = [float(share) for share in arguments.shares.split(",")]
        sizes = [parse_bytes(size) for size in arguments.sizes.split(",")]
        prompts = conversations(arguments.generate) if arguments.trace is None else read_trace(arguments.trace)
    except (ValueError, OSError) as exc:
        parser.error(str(exc))
    policies = arguments.policies.split(",")
    if not set(policies) <= set(POLICY_NAMES) or min(shares) <= 0 or min(sizes) < 1:
        parser.error(f"policies are {', '.join(POLICY_NAMES)}; shares and sizes are positive")
    prompts = prompts[: arguments.requests]
    blocks, distinct = sum(map(len, prompts)), len({block for prompt in prompts for block in prompt})
    print(f"{len(prompts):,} requests, {blocks:,} blocks, {distinct:,} distinct; "
          f"no cache of any size finds more than {(blocks - distinct) / max(1, blocks):.3f}")  # fmt: skip
    print(f"blocks of {arguments.sizes}; hits of all blocks, the default is {DEFAULT_POLICY}")
    for position, share in enumerate(shares):
        results = compare(prompts, share, sizes, policies)
        if not position:
            print("capacity  " + "".join(f"{result.name:>15}" for result in results))
        print(f"{share:8.3f}  " + "".join(f"{result.ratio:15.4f}" for result in results), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

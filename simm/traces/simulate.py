"""Replay a trace through caches, and count what each finds.

A request does what an engine does. It looks for the leading run of its prompt's blocks that are stored, reads them, and
stores the rest. Only the leading run counts as found: attention needs all blocks before a block. A stored block beyond
the first missing one is computed and stored again, which the policy sees as a use of it.

`POLICIES` is the table of all policies. An entry makes a cache from its room and the trace; only MIN looks at the
trace. SiMM's own policies are in it under ``simm-`` and their names: see `simm.traces.stored`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from ..constants import POLICY_NAMES
from ..errors import UsageError
from .adaptive import Arc, Lru2, Min
from .cache import Cache
from .formats import Trace
from .queues import Fifo, Lru, S3Fifo, Sieve, Unbounded
from .stored import Stored

Factory = Callable[[int, Trace], Cache]


def _stored(name: str) -> Factory:
    return lambda room, _: Stored(room, name)


#: Name -> maker of a cache with room for so many units, for a trace.
POLICIES: Final[dict[str, Factory]] = {
    "fifo": lambda room, _: Fifo(room),
    "sieve": lambda room, _: Sieve(room),
    "s3-fifo": lambda room, _: S3Fifo(room),
    "lru": lambda room, _: Lru(room),
    "arc": lambda room, _: Arc(room),
    "lru-2": lambda room, _: Lru2(room),
    "min": Min,
    "unbounded": lambda room, _: Unbounded(room),
    **{f"simm-{name}": _stored(name) for name in POLICY_NAMES},
}
#: What a run compares with by default: SiMM's own are measured.
REFERENCES: Final = tuple(name for name in POLICIES if not name.startswith("simm-"))


@dataclass(frozen=True)
class Outcome:
    """What one replay found."""

    policy: str
    room: int
    requests: int
    blocks: int
    hit_blocks: int
    tokens: int
    hit_tokens: int

    @property
    def ratio(self) -> float:
        """Return the share of blocks that were found."""
        return self.hit_blocks / max(1, self.blocks)

    @property
    def token_ratio(self) -> float:
        """Return the share of prompt tokens that were found."""
        return self.hit_tokens / max(1, self.tokens)


def replay(trace: Trace, cache: Cache, policy: str, counted_from: int = 0) -> Outcome:
    """Replay all requests. Count those from number ``counted_from`` on; those before only fill the cache. O(blocks)."""
    blocks = hits = tokens = hit_tokens = 0
    for number, request in enumerate(trace.requests):
        run = request_once(cache, request.blocks, trace.units[request.model])
        if number >= counted_from:
            blocks += len(request.blocks)
            hits += run
            tokens += request.tokens
            hit_tokens += min(request.tokens, run * trace.block_tokens)
    requests = max(0, len(trace.requests) - counted_from)
    return Outcome(policy, cache.room, requests, blocks, hits, tokens, hit_tokens)


def request_once(cache: Cache, blocks: tuple[int, ...], units: int) -> int:
    """Replay one request and return its leading run of stored blocks."""
    cache.begin(blocks, units)
    run = 0
    for block in blocks:
        if block not in cache:
            break
        run += 1
    hit, put = cache.hit, cache.put
    for block in blocks[:run]:
        hit(block)
    for block in blocks[run:]:
        put(block, units)
    return run


def known_policies(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names, each once. Raises UsageError for one that is not in the table."""
    found = tuple(dict.fromkeys(names))
    for name in found:
        if name not in POLICIES:
            raise UsageError(f"{name!r} is no simulated policy; choose from {', '.join(POLICIES)}")
    return found


def simulate(
    trace: Trace, room: int, names: Iterable[str] = tuple(POLICIES), counted_from: int = 0
) -> Iterator[Outcome]:  # fmt: skip
    """Yield the outcome of each policy with room for ``room`` units. Raises UsageError."""
    if room < 1:
        raise UsageError(f"room for {room} blocks: 1 at least")
    for name in known_policies(names):
        yield replay(trace, POLICIES[name](room, trace), name, counted_from)

"""What the index says of a prompt: the longest prefix of each endpoint, host and pool, weighed by tiers, and by load.

The score of an endpoint is the sum of the weights of its leading blocks, each by the best tier that has it, until the
first block that it has in no tier with a weight. That is the scorer of llm-d, but that a tier which nobody knows weighs
nothing: what cannot be told to be loadable is no reason to send a request there. The answer names such tiers.

A shared store has a score of its own, ``pool:NAME``, and each of its hosts has ``node:NAME``. So a router sees what any
endpoint can load. ``with_pool`` adds that to each endpoint: a block counts by the endpoint's tier or by the store's,
whichever weighs more.

With loads, the answer also has costs as Dynamo's router has them: blocks to prefill, less what overlaps, plus the load.
"""

from __future__ import annotations

import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .blocks import Blocks
from .places import Found
from .prefixes import run_of, tiers_of
from .sources import TIERS, U64, Holder, Registration, Source, Space

#: Of llm-d for gpu and cpu, of Dynamo for disk and shared storage. ``expected``: of what a router has just sent there.
WEIGHTS: Final[Mapping[str, float]] = {
    "gpu": 1.0, "cpu": 0.8, "disk": 0.25, "storage": 0.5, "unknown": 0.0, "expected": 1.0
}  # fmt: skip

_Bits = NDArray[np.bool_]
_NONE: Final = np.zeros((0, len(TIERS)), np.bool_)
assert TIERS[:2] == ("gpu", "cpu")
#: The bits of these two.
_NEAR: Final = 3
#: For each set of tiers, a bit each, their names and numbers.
_OF_TIERS: Final = [
    [(name, tier) for tier, name in enumerate(TIERS) if bits >> tier & 1] for bits in range(1 << len(TIERS))
]
_NO_RUNS: Final = dict.fromkeys(TIERS, 0)
_NO_BLOCKS: Final[Found] = (np.zeros(0, np.uint32), 0)


@dataclass(slots=True)
class Match:
    """What one endpoint, host or pool has of a prompt.

    Attributes:
        blocks: leading blocks, in any tier.
        tiers: leading blocks that are in one tier all, by tier.
        near: leading blocks that are in the memory of a device or of its host.
        ranks: leading blocks by data-parallel rank.
        devices: of these those in the memory of devices.
        expected: leading blocks that a router has just sent there, as far as it said so.
    """

    tenant: str
    blocks: int = 0
    tiers: dict[str, int] = field(default_factory=_NO_RUNS.copy)
    near: int = 0
    ranks: dict[int, int] = field(default_factory=dict)
    devices: dict[int, int] = field(default_factory=dict)
    expected: int = 0
    score: float = 0.0
    #: Of the leading blocks, for each rank; or a number of blocks and the weight of each.
    weights: list[NDArray[np.float64] | tuple[int, float]] = field(default_factory=list, repr=False)

    def add(self, rank: int, bits: _Bits, weights: NDArray[np.float64], expected: int = 0, told: float = 0.0) -> None:
        """Count what one rank has: for each leading block its tiers."""
        self.blocks = max(self.blocks, len(bits))
        if len(bits):
            runs = np.where(bits.all(axis=0), len(bits), bits.argmin(axis=0)).tolist()
            for name, run in zip(TIERS, runs):
                self.tiers[name] = max(self.tiers[name], run)
            self.devices[rank] = max(self.devices.get(rank, 0), runs[0])
            self.near = max(self.near, run_of(np.asarray(bits[:, 0] | bits[:, 1])))
        self.ranks[rank] = max(self.ranks.get(rank, 0), len(bits))
        self.expected = max(self.expected, expected)
        mine = np.zeros(max(len(bits), expected))
        mine[: len(bits)] = (bits * weights).max(axis=1, initial=0.0)
        mine[:expected] = np.maximum(mine[:expected], told)
        self.weights.append(mine)
        self.score = max(self.score, _sum(mine))

    @classmethod
    def of(cls, tenant: str, rank: int, blocks: int, tiers: int, weights: Sequence[float]) -> Match:
        """Return what an endpoint of one rank has, whose blocks are all in the same tiers, a bit each."""
        best, runs = 0.0, _NO_RUNS.copy()
        for name, tier in _OF_TIERS[tiers]:
            runs[name] = blocks
            if weights[tier] > best:
                best = weights[tier]
        return cls(
            tenant, blocks, runs, blocks if tiers & _NEAR else 0, {rank: blocks}, {rank: blocks if tiers & 1 else 0}, 0,
            best * blocks, [(blocks, best)],
        )  # fmt: skip

    def add_alike(self, rank: int, blocks: int, tiers: int, weights: Sequence[float]) -> None:
        """Do :meth:`add` for blocks that are all in the same tiers, a bit each."""
        best = 0.0
        for name, tier in _OF_TIERS[tiers]:
            self.tiers[name] = max(self.tiers[name], blocks)
            best = max(best, weights[tier])
        self.blocks = max(self.blocks, blocks)
        if tiers & _NEAR:
            self.near = max(self.near, blocks)
        self.devices[rank] = max(self.devices.get(rank, 0), blocks if tiers & 1 else 0)
        self.ranks[rank] = max(self.ranks.get(rank, 0), blocks)
        self.weights.append((blocks, best))
        self.score = max(self.score, best * blocks)


def _arrays(weights: Sequence[NDArray[np.float64] | tuple[int, float]]) -> list[NDArray[np.float64]]:
    return [np.full(*each) if isinstance(each, tuple) else each for each in weights]


def _sum(weights: NDArray[np.float64]) -> float:
    return float(weights[: run_of(weights > 0)].sum())


@dataclass
class Scores:
    """The answer to one question.

    Attributes:
        blocks: full blocks of the prompt.
        matches: by endpoint, and ``node:`` and ``pool:`` with their names.
        with_pool: an endpoint's score where it can also load what any pool has.
        costs: by endpoint, in blocks, if the caller gave loads; the least is the best.
        unknown_tiers: media that weigh nothing as nobody knows them.
        stale: endpoints of which messages were lost: they are not counted until it is known again what they have, or
            count only for what they have stored since.
    """

    blocks: int
    matches: dict[str, Match]
    with_pool: dict[str, float]
    costs: dict[str, float]
    unknown_tiers: list[str]
    stale: list[str]


def score(
    index: Blocks, space: Space, keys: Sequence[int] | U64, *, names: Sequence[Sequence[int]] = (),
    pairs: Sequence[int] | U64 = (), weights: Mapping[str, float] = WEIGHTS,
    endpoints: Sequence[str] | None = None, loads: Mapping[str, float] | None = None, load_weight: float = 1.0,
    now: float | None = None,
) -> Scores:  # fmt: skip
    """Return what is known of a prompt. O(blocks of the prefixes x endpoints).

    Args:
        names: of the same blocks as LMCache's servers may call them, by each of their algorithms.
        pairs: of the same blocks with the token behind each (:func:`~simm.index.keys.pair_chain`).
        weights: by tier; 0 for those that are missing.
        endpoints: only these, and pools and nodes; None for all.
        loads: of endpoints, in blocks: what they prefill and decode already.
        now: the monotonic time, seconds, for what is expected.
    """
    now = time.monotonic() if now is None else now
    asked = None if endpoints is None else frozenset(endpoints)
    of_tiers = [weights.get(name, 0.0) for name in TIERS]
    vector = np.array(of_tiers)
    with index.lock:
        found = _found(index, space, keys, names, pairs)
        there = {each.source for each in index.spaces.get(space, {}).values()}
        sources = [each for each in index.sources.values() if _asked(each, space, asked, there)]
        told = {each: _expected(each, space, np.asarray(keys, np.uint64), now) for each in sources if each.expected}
        unknown = sorted({medium for each in sources for medium in each.media})
        wanted = {each: each.groups(space.block_size) for each in sources if len(each.dense) > 1}
    matches: dict[str, Match] = {}
    pools: dict[str, list[tuple[Holder, _Bits]]] = {}
    ranks: dict[tuple[Source, int], list[Found]] = {}
    for holder, (counts, same) in found:
        registration = holder.source.registration
        if registration.store:
            pools.setdefault(registration.pool or registration.instance, []).append((holder, tiers_of(counts)))
        elif asked is None or registration.instance in asked:
            ranks.setdefault((holder.source, holder.rank), []).append((counts, same))
    for (source, rank), mine in ranks.items():
        if wanted and len(mine) < wanted.get(source, 0):
            mine = [_NO_BLOCKS]  # one of its groups has none in this space
        (counts, same), *others = mine
        if same is not None and not others and not (told and told.get(source)):
            name = source.registration.instance
            known = matches.get(name)
            if known is not None:
                known.add_alike(rank, len(counts), same, of_tiers)
            else:
                matches[name] = Match.of(space.tenant, rank, len(counts), same, of_tiers)
            continue
        groups = [tiers_of(each) for each, _ in mine]
        length = min(map(len, groups))
        # Each group has to have the block, whatever its tier: the worst of them counts.
        least = groups[0][:length]
        if len(groups) > 1:
            least = min(groups, key=lambda bits: _sum((bits[:length] * vector).max(axis=1, initial=0.0)))[:length]
        theirs = told.get(source, {})
        expected = max(theirs.pop(rank, 0), theirs.pop(None, 0))
        match = _match(matches, source.registration.instance, space)
        match.add(rank, least, vector, expected, weights.get("expected", 0.0))
    for source, theirs in told.items():
        if not source.stale and not source.registration.store:
            for at, expected in theirs.items():
                _match(matches, source.registration.instance, space).add(
                    at or source.registration.rank or 0, _NONE, vector, expected, weights.get("expected", 0.0)
                )
    shared = np.zeros(len(keys) if pools else 0)
    for pool, holders in pools.items():
        # Some members call the blocks by other names than the others, and have a prefix of another length.
        together = np.zeros((max(len(bits) for _, bits in holders), len(TIERS)), np.bool_)
        for _, bits in holders:
            together[: len(bits)] |= bits
        together = together[: run_of(np.asarray(together.any(axis=1)))]
        match = _match(matches, f"pool:{pool}", space)
        match.add(0, together, vector)
        for each in _arrays(match.weights):
            shared[: len(each)] = np.maximum(shared[: len(each)], each)
        for holder, bits in holders:
            if holder.node:
                run = run_of(np.asarray(bits.any(axis=1)))
                _match(matches, f"node:{holder.node}", space).add(0, bits[:run], vector)
    matches = {name: match for name, match in matches.items() if match.blocks or match.expected}
    return _answer(len(keys), matches, shared, sources, unknown, loads, load_weight)


def _found(
    index: Blocks, space: Space, keys: Sequence[int] | U64, names: Sequence[Sequence[int]],
    pairs: Sequence[int] | U64,
) -> list[tuple[Holder, Found]]:
    """Return what each holder has, by what it calls the blocks. Under the index' lock.

    ``Source.stale`` changes without that: a source that was stale at the first look is left out.
    """
    found = dict(index.match(space, keys))
    for mine in names:
        for holder, part in index.match(space, mine):
            if holder in found and holder.source.registration.hashed and len(part[0]) > len(found[holder][0]):
                found[holder] = part
    if len(pairs):
        for holder, part in index.match(space, pairs):
            if holder in found and holder.source.pairs and len(part[0]) > len(found[holder][0]):
                found[holder] = part
    return list(found.items())


def _answer(
    blocks: int, matches: dict[str, Match], shared: NDArray[np.float64], sources: Sequence[Source], unknown: list[str],
    loads: Mapping[str, float] | None, load_weight: float,
) -> Scores:  # fmt: skip
    names = {each.registration.instance for each in sources if not each.registration.store}
    with_pool = {}
    any_shared = len(shared) > 0 and bool(shared.any())
    for name in sorted(names):
        if not any_shared:
            with_pool[name] = matches[name].score if name in matches else 0.0
            continue
        mine = _arrays(matches[name].weights) if name in matches else [np.zeros(0)]
        best = 0.0
        for each in mine:
            both = shared.copy()
            both[: len(each)] = np.maximum(both[: len(each)], each)
            best = max(best, _sum(both))
        with_pool[name] = best
    costs = {}
    if loads is not None:
        costs = {
            name: blocks - with_pool.get(name, 0.0) + load_weight * load for name, load in loads.items()
        }  # fmt: skip
    stale = sorted({each.registration.instance for each in sources if each.stale or each.lost})
    return Scores(blocks, matches, with_pool, costs, unknown, stale)


def _match(matches: dict[str, Match], name: str, space: Space) -> Match:
    return matches.setdefault(name, Match(space.tenant))


def _asked(source: Source, space: Space, endpoints: Container[str] | None, there: Container[Source]) -> bool:
    """Return True for a source that the question is about, whether it holds something or not. O(1).

    ``there``: those that have a holder in the space.
    """
    told: Registration = source.registration
    if not (told.store or endpoints is None or told.instance in endpoints):
        return False
    alike = space.model in source.models if told.hashed else told.model == space.model
    return (alike and told.tenant == space.tenant) or source in there


def _expected(source: Source, space: Space, keys: NDArray[np.uint64], now: float) -> dict[int | None, int]:
    """Return the leading blocks that a router has just sent there, by rank; None where it named none."""
    while source.expected and source.expected[0].until <= now:
        source.expected.popleft()
    found: dict[int | None, int] = {}
    for each in source.expected:
        if each.until > now and each.space == space:
            length = min(len(keys), len(each.keys))
            run = run_of(keys[:length] == each.keys[:length])
            if run > found.get(each.rank, 0):
                found[each.rank] = run
    return found

"""Simulated policies: each against a naive twin, MIN against every possible choice, and the hit measure."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from simm.constants import POLICY_NAMES
from simm.errors import UsageError
from simm.traces.adaptive import Arc, Lru2, Min
from simm.traces.cache import Cache
from simm.traces.formats import Request, Trace
from simm.traces.queues import Fifo, Lru, S3Fifo, Sieve
from simm.traces.simulate import POLICIES, REFERENCES, known_policies, replay, request_once, simulate
from tests.support.naive_caches import (
    NaiveArc,
    NaiveFifo,
    NaiveLru,
    NaiveLru2,
    NaiveMin,
    NaiveS3Fifo,
    NaiveSieve,
)


def chained(draw: random.Random, requests: int, widths: tuple[int, ...], units: dict[str, int] | None = None) -> Trace:
    """A trace whose prompts are paths from the root of a random tree, so that equal blocks mean equal prefixes."""
    units = units or {"-": 1}
    children: dict[tuple[Any, ...], int] = {}
    found = []
    for number in range(requests):
        model = draw.choice(list(units))
        path: tuple[Any, ...] = (model,)
        blocks = []
        for width in widths[: draw.randint(1, len(widths))]:
            path = (*path, min(draw.randrange(width), draw.randrange(width)))
            blocks.append(children.setdefault(path, len(children)))
        found.append(Request(float(number), 16 * len(blocks), tuple(blocks), model))
    return Trace("chained", tuple(found), 16, units)


TWINS: dict[str, tuple[Callable[[int], Any], Callable[[int], Any]]] = {
    "fifo": (Fifo, NaiveFifo),
    "lru": (Lru, NaiveLru),
    "sieve": (Sieve, NaiveSieve),
    "s3-fifo": (S3Fifo, NaiveS3Fifo),
    "arc": (Arc, NaiveArc),
    "lru-2": (Lru2, NaiveLru2),
    "lru-2 with a memory": (lambda room: Lru2(room, 1), lambda room: NaiveLru2(room, 1)),
}


def differences(trace: Trace, one: Any, other: Any) -> int:
    """Number of requests after which the two caches have found or stored something different."""
    blocks = {block for request in trace.requests for block in request.blocks}
    wrong = 0
    for request in trace.requests:
        runs = [request_once(each, request.blocks, 1) for each in (one, other)]
        wrong += runs[0] != runs[1] or any((block in one) != (block in other) for block in blocks)
    return wrong


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", TWINS)
def test_a_policy_does_what_its_naive_twin_does(name: str, seed: int) -> None:
    draw = random.Random(seed)
    trace = chained(draw, 300, (3, 4, 4, 3))
    room = draw.choice((1, 2, 5, 12, 30, 60))
    make, naive = TWINS[name]
    assert differences(trace, make(room), naive(room)) == 0


@pytest.mark.parametrize("seed", range(12))
def test_min_does_what_its_naive_twin_does(seed: int) -> None:
    draw = random.Random(seed)
    trace = chained(draw, 120, (3, 4, 4, 3))
    uses = [block for request in trace.requests for block in request.blocks]
    room = draw.choice((1, 2, 5, 12, 30))
    naive: Any = NaiveMin(room, uses)
    twin = replay(trace, naive, "naive")
    assert replay(trace, Min(room, trace), "min").hit_blocks == twin.hit_blocks


@pytest.mark.parametrize("name", [name for name in TWINS if name != "fifo"])
def test_control_twins_of_two_policies_differ(name: str) -> None:
    """Positive control: the comparison above can fail, with each policy."""
    trace = chained(random.Random(1), 300, (3, 4, 4, 3))
    assert differences(trace, TWINS[name][0](12), NaiveFifo(12)) > 0


def most_hits(trace: Trace, room: int) -> int:
    """The most blocks that any choice of victims finds, by trying them all. A victim may be the block that is put."""
    steps = [request.blocks for request in trace.requests]

    @cache
    def best(number: int, stored: frozenset[int]) -> int:
        if number == len(steps):
            return 0
        run = 0
        while run < len(steps[number]) and steps[number][run] in stored:
            run += 1
        ends = {stored}
        for block in steps[number][run:]:
            after = set()
            for each in ends:
                more = each | {block}
                if len(more) <= room:
                    after.add(more)
                else:
                    after.update(more - {victim} for victim in more)
            ends = after
        return run + max(best(number + 1, each) for each in ends)

    return best(0, frozenset())


@pytest.mark.parametrize("seed", range(25))
def test_no_choice_of_victims_finds_more_than_min(seed: int) -> None:
    draw = random.Random(seed)
    trace = chained(draw, 14, (2, 2, 3))
    for room in (1, 2, 3, 4):
        found = replay(trace, Min(room, trace), "min").hit_blocks
        assert found == most_hits(trace, room)
        assert all(outcome.hit_blocks <= found for outcome in simulate(trace, room, TWINS_IN_TABLE))


TWINS_IN_TABLE = ("fifo", "lru", "sieve", "s3-fifo", "arc", "lru-2")


def test_only_the_leading_run_counts() -> None:
    trace = Trace("t", (Request(0, 40, (1, 2, 3)), Request(1, 70, (1, 9, 2, 3)), Request(2, 33, (1, 2, 3))), 16)
    outcome = replay(trace, Fifo(100), "fifo")
    # Of the second request 2 and 3 are stored, but not 9 before them. The third one finds a block with one token.
    assert (outcome.blocks, outcome.hit_blocks) == (10, 1 + 3)
    assert (outcome.tokens, outcome.hit_tokens) == (143, 16 + 33)
    assert outcome.ratio == 0.4 and outcome.token_ratio == pytest.approx(49 / 143)


def test_the_first_requests_may_only_fill() -> None:
    trace = Trace("t", tuple(Request(at, 32, (1, 2)) for at in range(4)), 16)
    outcome = replay(trace, Lru(2), "lru", counted_from=3)
    assert (outcome.requests, outcome.blocks, outcome.hit_blocks, outcome.tokens) == (1, 2, 2, 32)


class Watched(Cache):
    """Check what each replay tells a policy."""

    def __init__(self) -> None:
        super().__init__(9)
        self.calls: list[tuple[Any, ...]] = []

    def begin(self, blocks: Any, units: int) -> None:
        self.calls.append(("begin", tuple(blocks), units))

    def __contains__(self, block: int) -> bool:
        return block in (1, 2, 4)

    def hit(self, block: int) -> None:
        self.calls.append(("hit", block))

    def put(self, block: int, units: int) -> None:
        self.calls.append(("put", block, units))


def test_a_replay_tells_hits_before_puts_in_order() -> None:
    cache = Watched()
    assert request_once(cache, (1, 2, 3, 4), 5) == 2
    assert cache.calls == [("begin", (1, 2, 3, 4), 5), ("hit", 1), ("hit", 2), ("put", 3, 5), ("put", 4, 5)]


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_what_is_stored_never_exceeds_the_room(name: str, seed: int) -> None:
    draw = random.Random(seed)
    units = {"small": 1, "large": 4, "huge": 40}
    trace = chained(draw, 400, (4, 4, 4), units)
    of = {block: units[request.model] for request in trace.requests for block in request.blocks}
    room = 600 if name.startswith("simm-") else 32  # a real region has 512 units at least
    cache = POLICIES[name](room, trace)
    most = 0
    for request in trace.requests:
        request_once(cache, request.blocks, units[request.model])
        stored = sum(of[block] for block in of if block in cache)
        assert name == "unbounded" or stored <= room
        most = max(most, stored)
        kept = request.blocks[-1] in cache
        assert kept or units[request.model] > room or name == "min", "the newest block is stored"
    assert most > room * 0.7


@pytest.mark.parametrize("name", POLICY_NAMES)
@pytest.mark.parametrize("room", (1, 511, 512, 1000))
def test_a_real_region_has_exactly_the_room(name: str, room: int) -> None:
    trace = Trace("t", (Request(0, 0, tuple(range(room + 50))),), 16)
    cache = POLICIES[f"simm-{name}"](room, trace)
    request_once(cache, trace.requests[0].blocks, 1)
    assert sum(block in cache for block in range(room + 50)) == room


def test_simms_fifo_in_the_real_region_is_the_twin() -> None:
    """Nothing is put twice here, which would renew it. So FIFO has one right answer, and the region adds nothing."""
    blocks = list(range(3000))
    one, other = POLICIES["simm-fifo"](700, Trace("t", ())), Fifo(700)
    for block in blocks:
        one.put(block, 1)
        other.put(block, 1)
    assert [block for block in blocks if block in one] == [block for block in blocks if block in other]


def test_names_are_checked() -> None:
    assert known_policies(["lru", "arc", "lru"]) == ("lru", "arc")
    with pytest.raises(UsageError, match="'mru' is no simulated policy; choose from fifo"):
        known_policies(["mru"])
    with pytest.raises(UsageError, match="room for 0 blocks"):
        list(simulate(Trace("t", ()), 0, ["lru"]))
    assert {"fifo", "lru", "arc", "lru-2", "s3-fifo", "sieve", "min", "unbounded"} == set(REFERENCES)

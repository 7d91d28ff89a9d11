"""Synthetic traces: what their kinds promise, read back from the prompts alone."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from simm.errors import UsageError
from simm.traces import generate as generator
from simm.traces.formats import Request, Trace
from simm.traces.generate import KINDS, MIXED_MODELS, SYSTEM_PROMPTS, TOOL_SETS, generate
from simm.traces.simulate import simulate


def sharers(trace: Trace) -> dict[int, int]:
    """Block -> number of requests that have it."""
    return Counter(block for request in trace.requests for block in request.blocks)


def shared_prefix(one: Request, other: Request) -> int:
    """Leading blocks that two prompts have in common."""
    same = 0
    while same < min(len(one.blocks), len(other.blocks)) and one.blocks[same] == other.blocks[same]:
        same += 1
    return same


@pytest.mark.parametrize("kind", KINDS)
def test_a_trace_is_in_order_chained_and_the_seeds_own(kind: str) -> None:
    trace = generate(kind, 5, 600)
    assert trace == generate(kind, 5, 600) and trace.requests != generate(kind, 6, 600).requests
    assert len(trace.requests) == 600 and trace.unchained() == 0
    assert all(len(set(request.blocks)) == len(request.blocks) > 0 for request in trace.requests)
    times = [request.at_ms for request in trace.requests]
    assert times == sorted(times) and times[-1] > times[0] >= 0
    for request in trace.requests:
        assert 0 <= request.tokens - trace.block_tokens * len(request.blocks) < trace.block_tokens
    # A longer trace begins with the shorter one.
    assert generate(kind, 5, 700).requests[:600] == trace.requests


@pytest.mark.parametrize("kind", KINDS)
def test_the_rate_is_about_what_it_should_be(kind: str) -> None:
    trace = generate(kind, 2, 6000)
    rate = 1000 * len(trace.requests) / (trace.requests[-1].at_ms - trace.requests[0].at_ms)
    assert 0.6 * generator.REQUESTS_PER_S < rate < 1.6 * generator.REQUESTS_PER_S


def test_system_prompts_are_shared_by_many_and_questions_by_none() -> None:
    trace = generate("system", 1, 2000)
    count = sharers(trace)
    firsts = Counter(request.blocks[0] for request in trace.requests)
    assert len(firsts) == SYSTEM_PROMPTS
    assert firsts.most_common()[0][1] > 3 * firsts.most_common()[-1][1] > 0
    for request in trace.requests:
        alone = [block for block in request.blocks if count[block] == 1]
        assert 1 <= len(alone) <= 6 and tuple(alone) == request.blocks[-len(alone) :]


def test_turns_of_a_conversation_extend_it() -> None:
    trace = generate("chat", 1, 2000)
    by_start: dict[int, list[Request]] = {}
    firsts = {request.blocks[0] for request in trace.requests}
    assert len(firsts) == 3
    systems = {first: min(shared_prefix(a, b) for a in trace.requests[:200] for b in trace.requests[:200]
                          if a.blocks[0] == b.blocks[0] == first) for first in firsts}  # fmt: skip
    for request in trace.requests:
        by_start.setdefault(request.blocks[systems[request.blocks[0]]], []).append(request)
    turns = [len(requests) for requests in by_start.values()]
    assert 2.5 < sum(turns) / len(turns) < 4 and turns.count(1) > 0.15 * len(turns) and max(turns) > 6
    gaps = []
    for requests in by_start.values():
        for before, after in pairwise(requests):
            assert after.blocks[: len(before.blocks)] == before.blocks
            assert 1 <= len(after.blocks) - len(before.blocks) <= 6
            gaps.append(after.at_ms - before.at_ms)
    # A user's answer comes after about a minute, in which hundreds of other requests come.
    assert 40_000 < sorted(gaps)[len(gaps) // 2] < 100_000


def test_agents_go_on_from_a_step_and_sometimes_from_an_earlier_one() -> None:
    trace = generate("agents", 1, 2000)
    assert len({request.blocks[0] for request in trace.requests}) == TOOL_SETS
    extend = branch = begin = 0
    for number, request in enumerate(trace.requests):
        before = trace.requests[max(0, number - 400) : number]
        parents = [each for each in before if request.blocks[: len(each.blocks)] == each.blocks]
        if not parents:
            begin += 1
            continue
        parent = max(parents, key=lambda each: len(each.blocks))
        assert 1 <= len(request.blocks) - len(parent.blocks) <= 5
        siblings = [each for each in before if each is not parent and len(each.blocks) > len(parent.blocks)
                    and each.blocks[: len(parent.blocks)] == parent.blocks]  # fmt: skip
        branch += bool(siblings)
        extend += not siblings
    assert 40 < begin < 400 and 0.03 < branch / (extend + branch) < 0.3


def test_documents_are_long_and_read_more_than_once() -> None:
    trace = generate("documents", 1, 1500)
    readers = Counter(request.blocks[0] for request in trace.requests)
    assert 60 < len(readers) <= generator.DOCUMENTS and max(readers.values()) > 50
    assert all(61 <= len(request.blocks) <= 242 for request in trace.requests)
    assert sum(count > 1 for count in readers.values()) > 0.8 * len(readers)


def test_scans_never_come_back() -> None:
    trace = generate("scans", 1, 3000)
    count = sharers(trace)
    scanned = [request for request in trace.requests if all(count[block] == 1 for block in request.blocks)]
    assert 300 < len(scanned) < 1200 and all(20 <= len(request.blocks) <= 80 for request in scanned)
    # The rest is "system": so a cache of any size finds its shared prompts and nothing else.
    rest = [request for request in trace.requests if request not in scanned]
    assert len({request.blocks[0] for request in rest}) == SYSTEM_PROMPTS
    (outcome,) = simulate(trace, 1, ["unbounded"])
    prompts = {block for request in rest for block in request.blocks if count[block] > 1}
    assert outcome.hit_blocks == sum(count[block] for block in prompts) - len(prompts)


def test_mixed_has_each_kind_and_models_of_several_sizes() -> None:
    trace = generate("mixed", 1, 3000)
    models = Counter(request.model for request in trace.requests)
    assert set(models) == set(trace.units) == set(MIXED_MODELS) and min(models.values()) > 50
    assert sorted(trace.units.values()) == [1, 2, 8]
    owner: dict[int, str] = {}
    for request in trace.requests:
        assert all(owner.setdefault(block, request.model) == request.model for block in request.blocks)


def test_kinds_ask_for_different_policies() -> None:
    """The reason for several kinds: no simple policy is the best for all of them."""
    found = {}
    for kind, share in (("system", 0.01), ("chat", 0.3), ("agents", 0.1)):
        trace = generate(kind, 7, 2000)
        outcomes = list(simulate(trace, int(share * trace.distinct), ["fifo", "lru", "sieve"]))
        found[kind] = max(outcomes, key=lambda outcome: outcome.ratio).policy
    assert found == {"system": "sieve", "chat": "lru", "agents": "lru"}


def test_a_wrong_kind_is_told() -> None:
    with pytest.raises(UsageError, match="'web' is no kind of trace; choose from system, chat"):
        generate("web", 1)
    with pytest.raises(UsageError, match="a trace of 0 requests"):
        generate("chat", 1, 0)

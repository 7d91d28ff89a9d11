"""The network in software: a reference model of transfers, and what is ordered and what is not."""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Callable

import pytest

from simm.errors import UsageError
from simm.rdma.api import FENCED_READ, READ, WRITE, Op
from tests.support.fake_pair import SEEDS, SIZE, Make, Pair, order, seen

# --- against a reference model ---------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_against_a_reference_model(make: Make, seed: int) -> None:
    """Run chains of random operations: WRITEs end as if done in order, a READ brings what was there at some time."""
    pair, rng = make(seed), random.Random(seed)
    for word in range(64):
        pair.theirs[word] = rng.getrandbits(64)
    for _ in range(12):
        history = [{pair.theirs[word]} for word in range(64)]
        reference = list(pair.theirs.words[:64])
        ops: list[Op] = []
        reads = []
        for number in range(rng.randrange(1, 12)):
            mine, words = 32 * number, rng.randrange(1, 17)
            theirs = rng.randrange(64 - words)
            kind = rng.choice((READ, WRITE, WRITE, FENCED_READ))
            ops.append(pair.op(kind, mine, theirs, words))
            for word in range(words):
                if kind == WRITE:
                    pair.mine[mine + word] = reference[theirs + word] = rng.getrandbits(64)
                    history[theirs + word].add(reference[theirs + word])
                else:
                    pair.mine[mine + word] = 0
                    reads.append((mine + word, theirs + word))
        ops.append(pair.op(READ, 500, 63))
        tickets = []
        while ops:
            cut = rng.randrange(1, len(ops) + 1)
            tickets.append(pair.qp.post(ops[:cut]))
            ops = ops[cut:]
        assert tickets == sorted(tickets)
        pair.qp.wait(tickets[-1], time.monotonic() + 120)
        assert pair.qp.poll() == tickets[-1]
        # The READ at the end was done after all WRITEs had landed.
        assert pair.theirs.words[:64] == reference
        for mine, theirs in reads:
            assert pair.mine[mine] in history[theirs]


@pytest.mark.parametrize("length", [1, 7, 8, 9, 513, 4093])
def test_lengths_that_are_no_words(make: Make, length: int) -> None:
    pair = make(length)
    text = random.Random(length).randbytes(SIZE)
    ctypes.memmove(pair.theirs.address, text, SIZE)
    ops: list[Op] = [(READ, pair.mine.at(0), pair.mine.region.lkey, length, pair.theirs.at(0), pair.theirs.region.rkey)]
    pair.do(*ops)
    assert ctypes.string_at(pair.mine.address, SIZE) == text[:length] + bytes(SIZE - length)
    ops = [(WRITE, pair.mine.at(0), pair.mine.region.lkey, 0, pair.theirs.at(0), pair.theirs.region.rkey)]
    pair.do(*ops)


def test_the_same_seed_does_the_same() -> None:
    def run(seed: int) -> list[int]:
        pair = Pair(seed)
        seen = []

        def count() -> None:
            pair.theirs[0] += 1
            pair.theirs[9] += 1

        pair.network.between = count
        for _ in range(5):
            pair.do(pair.op(READ, 0, 0, 10), pair.op(READ, 20, 0))
            seen += [pair.mine[0], pair.mine[9], pair.mine[20]]
        pair.close()
        return seen

    assert run(3) == run(3) != run(4)


# --- order ------------------------------------------------------------------------------------


def test_words_of_a_read_come_in_any_order(make: Make) -> None:
    looks = seen(make, lambda pair: [pair.op(READ, 0, 0, 2)], lambda pair: order(pair.mine[0], pair.mine[1]))
    assert looks >= {"<", ">"}


def test_reads_are_ordered_by_a_fence_alone(make: Make) -> None:
    def chain(kind: int) -> Callable[[Pair], list[Op]]:
        return lambda pair: [pair.op(READ, 0, 0), pair.op(kind, 1, 1)]

    def look(pair: Pair) -> str:
        return order(pair.mine[0], pair.mine[1])

    assert seen(make, chain(READ), look) >= {"<", ">"}
    assert seen(make, chain(FENCED_READ), look) <= {"<", "="}


def test_a_fence_waits_for_earlier_chains_too(make: Make) -> None:
    for seed in SEEDS:
        pair = make(seed)
        pair.network.between = lambda pair=pair: pair.theirs.__setitem__(0, pair.theirs[0] + 1)
        pair.qp.post([pair.op(READ, number, 0) for number in range(6)])
        pair.do(pair.op(FENCED_READ, 8, 0))
        assert max(pair.mine.words[:6]) < pair.mine[8]


def test_a_write_is_done_before_it_has_landed_and_a_read_behind_it_is_not(make: Make) -> None:
    early = set()
    for seed in SEEDS:
        pair = make(seed)
        pair.mine[0] = 5
        pair.do(pair.op(WRITE, 0, 3))
        early.add(pair.theirs[3])
        pair.mine[0] = 6  # the WRITE is done, so its source may change
        pair.do(pair.op(READ, 1, 9))
        assert pair.theirs[3] == 5
    assert early == {0, 5}


def test_what_a_write_sends_is_read_until_it_is_done(make: Make) -> None:
    landed = set()
    for seed in SEEDS:
        pair = make(seed)
        pair.mine[0] = 1
        pair.network.between = lambda pair=pair: pair.mine.__setitem__(0, 2)
        pair.qp.post([pair.op(WRITE, 0, 0)])
        for _ in range(seed % 3):
            pair.network.step()
        pair.do(pair.op(READ, 1, 1))
        landed.add(pair.theirs[0])
    assert landed == {1, 2}


def test_a_read_and_a_write_pass_each_other(make: Make) -> None:
    got = set()
    for seed in SEEDS:
        pair = make(seed)
        pair.mine[0], pair.theirs[0] = 2, 1
        pair.do(pair.op(READ, 1, 0), pair.op(WRITE, 0, 0), pair.op(READ, 2, 0))
        got.add((pair.mine[1], pair.mine[2]))
    # Both READs may see either value: the later one completes after the WRITE has landed, but may have read before.
    assert got == {(1, 1), (1, 2), (2, 1), (2, 2)}


def test_writes_of_two_links_have_no_order(make: Make) -> None:
    ended = set()
    for seed in SEEDS:
        pair = make(seed)
        other, _ = pair.connected()
        pair.mine[0], pair.mine[1] = 1, 2
        pair.qp.post([pair.op(WRITE, 0, 0)])
        other.post([pair.op(WRITE, 1, 0)])
        pair.network.run()
        ended.add(pair.theirs[0])
    assert ended == {1, 2}


def test_depth(make: Make) -> None:
    pair = make(1, depth=4)
    with pytest.raises(UsageError, match="5 operations"):
        pair.qp.post([pair.op(READ, 0, 0)] * 5)
    with pytest.raises(UsageError):
        pair.qp.post([])
    for _ in range(5):
        ticket = pair.qp.post([pair.op(READ, 0, 0)] * 3)  # waits for room
        assert len(pair.qp.queue) <= 4
    pair.qp.wait(ticket, time.monotonic() + 120)
    with pytest.raises(UsageError, match="ticket"):
        pair.qp.wait(ticket + 1, time.monotonic())

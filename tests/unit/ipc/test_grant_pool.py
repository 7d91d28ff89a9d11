"""The grant pool against a naive model of its grantor: no grant leaks, or is used twice, or is kept in vain."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Sequence

import pytest

from simm.errors import RemoteProtocolError, TransportError
from simm.ipc import grant_pool
from simm.ipc.grant_pool import (
    LARGE_BYTES,
    LARGE_IDLE_S,
    LENGTHS_MAX,
    REQUEST_BYTES,
    REQUEST_MAX,
    TARGET_BYTES,
    TARGET_MAX,
    TOP_UP,
    GrantPool,
    GrantTuple,
    maintain,
    obtain,
    obtain_each,
    obtain_many,
    refill_count,
    request_count,
    return_all,
    return_idle,
    single_count,
    target_count,
)
from simm.slab import chunk_bytes_for
from tests.models.explorer import first_failure, walk

MIB = 1 << 20
LENGTHS = (1, 64, 100, 4096, 5000, 64 << 10, 100_000, 300_000, MIB, 3 * MIB, 4 * MIB, 4 * MIB + 1, 9 * MIB)


class Grantor:
    """A minimal worker: a set of granted ids, and a bounded sum of bytes."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.next_id = 1
        #: id -> (holder, chunk bytes); with those that are prepared, and not sent yet.
        self.granted: dict[int, tuple[Holder, int]] = {}
        self.spent: set[int] = set()

    @property
    def used(self) -> int:
        return sum(chunk for _, chunk in self.granted.values())

    def make(self, holder: Holder, length: int, count: int) -> list[GrantTuple]:
        made: list[GrantTuple] = []
        chunk = chunk_bytes_for(length)
        while len(made) < count and self.used + chunk <= self.bytes_max:
            self.granted[self.next_id] = holder, chunk
            made.append((self.next_id, self.next_id << 32, chunk))
            self.next_id += 1
        return made

    def commit(self, holder: Holder, number: int) -> None:
        assert number not in self.spent, "a grant is used twice"
        assert self.granted.pop(number)[0] is holder, "a grant of another holder"
        self.spent.add(number)


class Holder:
    """A session, as far as its pool knows: exchanges that may fail before or after the grantor has done its part."""

    def __init__(self, grantor: Grantor) -> None:
        self.grantor = grantor
        self.pool: GrantPool[GrantTuple] = GrantPool()
        self.pool.bytes_max = grantor.bytes_max
        self.prepared: list[GrantTuple] = []
        self.busy: list[GrantTuple] = []
        self.exchanges = 0
        self.fails = False

    def ask(self, wants: Sequence[tuple[int, int]]) -> None:
        self.exchanges += 1
        if self.fails:
            raise TransportError("injected")
        for length, count in wants:
            assert count > 0
            self.prepared += self.grantor.make(self, length, count)
        self.pool.add(self.prepared)
        self.prepared = []

    def return_grants(self, numbers: Sequence[int]) -> None:
        self.exchanges += 1
        if self.fails:
            for number in numbers:  # the session is broken: its end frees them
                del self.grantor.granted[number]
            raise TransportError("injected")
        for number in numbers:
            assert self.grantor.granted.pop(number)[0] is self, "a grant is returned twice, or was never this holder's"

    def commit(self, wants: Sequence[tuple[int, int]] = ()) -> None:
        """Commit one busy grant; the answer brings what earlier commits asked for."""
        grant = self.busy.pop()
        self.grantor.commit(self, grant[0])
        self.pool.add(self.prepared)
        self.prepared = [made for length, count in wants for made in self.grantor.make(self, length, count)]

    def known(self) -> list[GrantTuple]:
        return [grant for stock in self.pool.stocks.values() for grant in stock] + self.busy + self.prepared


class World:
    """Some holders of one grantor, driven at random, and checked after each step."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.grantor = Grantor(rng.choice((2, 16, 64, 512)) * MIB)
        self.holders = [Holder(self.grantor) for _ in range(rng.randint(1, 4))]
        self.lengths = rng.sample(LENGTHS, rng.randint(1, 5))

    def check(self) -> None:
        for holder in self.holders:
            known = holder.known()
            assert len({grant[0] for grant in known}) == len(known), "a grant is in two places"
            mine = {number for number, (owner, _) in self.grantor.granted.items() if owner is holder}
            assert {grant[0] for grant in known} == mine, "a grant leaks, or one is kept that was returned"
            for chunk, stock in holder.pool.stocks.items():
                assert all(grant[2] == chunk for grant in stock)
            for length, (stock, target, _) in holder.pool.by_length.items():
                assert stock is holder.pool.stocks[chunk_bytes_for(length)], "a list that nobody fills"
                assert target == target_count(chunk_bytes_for(length))
        assert self.grantor.used <= self.grantor.bytes_max

    def put(self, holder: Holder, length: int) -> None:
        stock, target, _ = holder.pool.for_length(length)
        grant = holder.pool.take(length) or obtain(holder, length, request_count(chunk_bytes_for(length), 3))
        if grant is None:
            kept = sum(chunk for owner, chunk in self.grantor.granted.values() if owner is not holder)
            kept += sum(grant[2] for grant in holder.busy)
            assert kept + chunk_bytes_for(length) > self.grantor.bytes_max, "starved by what the holder itself kept"
            return
        assert length <= grant[2] == chunk_bytes_for(length)
        holder.busy.append(grant)
        fate = self.rng.random()
        if fate < 0.2:
            holder.pool.release(holder.busy.pop())
        elif fate < 0.9:
            one = self.rng.random() < 0.5
            count = single_count(len(stock), target) if one else refill_count(len(stock), 1, 0, target)
            if not target:
                count = int(holder.pool.repeats_large(grant[2]) and not stock)
            holder.commit([(length, count)] if count else [])

    def step(self) -> None:
        rng = self.rng
        holder, length = rng.choice(self.holders), rng.choice(self.lengths)
        kind = rng.randrange(20)
        if kind < 12:
            self.put(holder, length)
        elif kind == 12:
            holder.busy += obtain_many(holder, length, rng.randint(0, 8))
        elif kind == 13:
            lengths = [rng.choice(self.lengths) for _ in range(rng.randint(1, 8))]
            grants = obtain_each(holder, lengths)
            assert all(grant is None or grant[2] == chunk_bytes_for(size) for grant, size in zip(grants, lengths))
            holder.busy += [grant for grant in grants if grant is not None]
        elif kind == 14:
            while holder.busy:
                holder.commit()
        elif kind == 15:
            before = sum(grant[2] for grant in holder.known())
            wanted = rng.randint(0, 4 * MIB)
            idle = before - sum(grant[2] for grant in holder.busy + holder.prepared)
            freed = return_idle(holder, wanted)
            assert freed == before - sum(grant[2] for grant in holder.known())
            assert min(wanted, idle) <= freed < wanted + 10 * MIB
        elif kind == 16:
            return_all(holder)
            assert not holder.prepared and holder.known() == holder.busy
        elif kind == 17:
            wanted = rng.randint(1, 4 * MIB)
            holder.pool.recall(wanted)
            busy = list(holder.busy)
            maintain(holder)
            assert holder.busy == busy, "a recall takes no grant from a copy"
            idle = sum(grant[2] for grant in holder.known()) - sum(grant[2] for grant in busy + holder.prepared)
            if idle:
                before = holder.exchanges
                maintain(holder)
                assert holder.exchanges == before, "a recall is answered once"
        elif kind == 18:
            self.fail(holder, length)
        else:
            holder.pool.release(holder.busy.pop()) if holder.busy else None

    def fail(self, holder: Holder, length: int) -> None:
        """Let an exchange fail: grants that were taken for the caller are not lost while the session lives."""
        known = {grant[0] for grant in holder.known()}
        holder.fails = True
        more = 1 + holder.pool.count(length)
        attempts: list[Callable[[], object]] = [
            lambda: obtain(holder, length), lambda: obtain_many(holder, length, more),
            lambda: obtain_each(holder, [length] * more),
        ]  # fmt: skip
        with pytest.raises(TransportError):
            self.rng.choice(attempts)()
        holder.fails = False
        assert {grant[0] for grant in holder.known()} == known


def play(seed: int, steps: int = 300) -> None:
    world = World(random.Random(f"grant pool {seed}"))
    walk(steps, world.step, world.check)
    for holder in world.holders:
        while holder.busy:
            holder.commit()
        return_all(holder)
    world.check()
    assert not world.grantor.granted, "after the end nothing is granted"


@pytest.mark.parametrize("block", range(10))
def test_random_holders_against_the_model(block: int) -> None:
    for seed in range(block * 20, block * 20 + 20):
        play(seed)


# -- injected bugs: the model finds each ------------------------------------------------------------------


def taken_twice(pool: GrantPool[GrantTuple], length: int) -> GrantTuple | None:
    stock = pool.stocks.get(chunk_bytes_for(length))
    return stock[-1] if stock else None


def drained_and_kept(
    pool: GrantPool[GrantTuple], wanted: int | None = None, above: int = 0
) -> list[GrantTuple]:
    return [grant for stock in pool.stocks.values() for grant in stock]


def replaced_stock(pool: GrantPool[GrantTuple], grants: Sequence[GrantTuple]) -> None:
    for grant in grants:
        pool.stocks[grant[2]] = [grant]


def lost_release(pool: GrantPool[GrantTuple], grant: GrantTuple) -> None:
    pass


def recalled_forever(pool: GrantPool[GrantTuple]) -> int:
    return pool.recalled


def hoarding(holder: Holder, wanted: int | None = None, *, above: int = 0) -> int:
    return 0


@pytest.mark.parametrize(
    "name, bug",
    [
        ("take", taken_twice), ("drain", drained_and_kept), ("add", replaced_stock), ("release", lost_release),
        ("take_recalled", recalled_forever),
    ],
)  # fmt: skip
def test_an_injected_bug_is_found(name: str, bug: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GrantPool, name, bug)
    first_failure(range(40), play, AssertionError, KeyError)


def test_an_injected_starvation_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grant_pool, "return_idle", hoarding)
    first_failure(range(40), play, AssertionError)


# -- what a worker may not grant ---------------------------------------------------------------------------


@pytest.mark.parametrize("grant", [(1, 4095, 4096), (1, 8193, 4096), (1, 1 << 63, 4096), (1, 4096, 1 << 40)])
def test_no_grant_leads_out_of_the_data(grant: GrantTuple) -> None:
    pool: GrantPool[GrantTuple] = GrantPool()
    pool.within = (4096, 12288)
    pool.add([(7, 4096, 4096), (8, 8192, 4096), (9, 4096, 8192)])
    assert len(pool.drain()) == 3
    with pytest.raises(RemoteProtocolError, match="outside of the data"):
        pool.add([grant])
    assert not pool.drain()


# -- threads ---------------------------------------------------------------------------------------------


def test_threads_share_a_pool_and_no_grant() -> None:
    """Takes, releases, answers, new lengths and recalls at once: each grant is with one thread at a time."""
    pool: GrantPool[GrantTuple] = GrantPool()
    total, wrong = 400, []
    holders: list[int] = [0] * (total + 1)
    start = threading.Barrier(5)

    def work(seed: int) -> None:
        rng = random.Random(seed)
        start.wait()
        if seed == 0:
            for number in range(1, total + 1):
                pool.add([(number, number << 20, chunk_bytes_for(LENGTHS[number % 8]))])
        for _ in range(3000):
            length = rng.choice(LENGTHS[:8])
            if seed == 1 and not rng.randrange(50):
                for grant in pool.drain(rng.randrange(MIB)):
                    pool.release(grant)
            pool.for_length(length)
            grant = pool.take(length)
            if grant is None:
                continue
            holders[grant[0]] += 1
            if holders[grant[0]] != 1:
                wrong.append(grant)
            holders[grant[0]] -= 1
            pool.release(grant)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert sorted(grant[0] for grant in pool.drain()) == list(range(1, total + 1))
    assert all(stock is pool.stocks[chunk_bytes_for(length)] for length, (stock, *_) in pool.by_length.items())


# -- numbers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [64, 4096, 64 << 10, 1 << 20, 4 << 20])
@pytest.mark.parametrize("batch", [1, 16, 64])
def test_a_pool_finds_its_level_and_stays(chunk: int, batch: int) -> None:
    """Batches of puts, each batch in commits of at most 16, whose wants are answered one commit later."""
    target = target_count(chunk)
    pool, coming, asks = 0, 0, []
    for turn in range(200):
        left = batch
        while left:
            spent = min(16, left)
            left -= spent
            if pool < spent:
                asks.append(turn)
                pool += max(spent + left - pool, 0)
            pool -= spent
            want = refill_count(pool, spent, left, target)
            pool, coming = pool + coming, want
        assert pool + coming <= 2 * target + max(TOP_UP, batch) + 16
    assert not [turn for turn in asks if turn > 20] or batch > target
    assert target <= TARGET_MAX


@pytest.mark.parametrize("chunk", [64, 4096, 64 << 10, 128 << 10, 256 << 10, 512 << 10, MIB, 2 * MIB, 4 * MIB])
def test_single_puts_ask_for_a_quarter_at_a_time(chunk: int) -> None:
    """And the pool neither runs dry nor grows. What a commit asks for comes with the next answer."""
    target = target_count(chunk)
    pool, coming = target, 0
    asks: list[tuple[int, int]] = []
    for turn in range(20 * target):
        assert pool, f"dry at turn {turn}"
        pool -= 1
        count = single_count(pool, target)
        pool, coming = pool + coming, count
        if count:
            asks.append((turn, count))
        assert pool + coming <= 2 * target + TOP_UP
    if target >= 8:
        assert {count for _, count in asks} == {target // 4}
        assert {later - turn for (turn, _), (later, _) in itertools.pairwise(asks)} == {target // 4}
    assert single_count(target, target) == single_count(2 * target, target) == 0
    assert single_count(0, target) > 1, "a pool that is low grows"


@pytest.mark.parametrize("length", LENGTHS)
def test_targets_and_requests_are_bounded(length: int) -> None:
    chunk = chunk_bytes_for(length)
    target = target_count(chunk)
    assert (target == 0) == (chunk > LARGE_BYTES)
    assert target <= 2 or (target <= TARGET_MAX and target * chunk <= TARGET_BYTES)
    for needed in (1, 2, 100, 10**6):
        count = request_count(chunk, needed)
        assert 1 <= count <= min(needed, REQUEST_MAX) and (count == 1 or count * chunk <= REQUEST_BYTES)


def test_a_large_grant_is_kept_while_its_size_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(grant_pool.time, "monotonic", lambda: now[0])
    pool: GrantPool[GrantTuple] = GrantPool()
    pool.bytes_max = 64 * MIB
    assert not pool.repeats_large(8 * MIB) and pool.repeats_large(8 * MIB)
    assert not pool.repeats_large(6 * MIB), "another size"
    now[0] += LARGE_IDLE_S
    assert not pool.repeats_large(6 * MIB), "too late"
    assert not pool.repeats_large(9 * MIB) and not pool.repeats_large(9 * MIB), "too much of what all may hold"
    assert not pool.large_is_over()
    now[0] += LARGE_IDLE_S + 0.1
    assert pool.large_is_over() and not pool.large_is_over()


def test_grants_to_prefetch_serve_the_same_request_again() -> None:
    pool: GrantPool[GrantTuple] = GrantPool()
    for have in range(20):
        for count in range(10):
            missing = pool.prefetch_count(64, count)
            after = max(0, have - count) + missing
            assert after >= count and (not missing or after == count)
        pool.add([(have, 0, 64)])


def test_lengths_are_forgotten_before_they_are_too_many() -> None:
    pool: GrantPool[GrantTuple] = GrantPool()
    for length in range(1, 2 * LENGTHS_MAX):
        pool.for_length(length)
        assert len(pool.by_length) <= LENGTHS_MAX

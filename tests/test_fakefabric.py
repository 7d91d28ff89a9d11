"""The network in software: it keeps the promises of ``simm.fabric``, and breaks what nobody promised."""

from __future__ import annotations

import ctypes
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from fakefabric import FakeLink, FakeNetwork, FakeRegion, FakeWindow, all_closed

from simm.errors import TransportError, UsageError
from simm.fabric import FENCED_READ, READ, WRITE, Access, Binding, Fabric, FabricError, Op, Timeout

SIZE = 4096
RIGHTS = Access.LOCAL_WRITE | Access.REMOTE_READ | Access.REMOTE_WRITE | Access.WINDOWS
SEEDS = range(40)


class Memory:
    """Registered memory of one side."""

    def __init__(self, fabric: Fabric, access: Access = RIGHTS, size: int = SIZE) -> None:
        self.words = (ctypes.c_uint64 * (size // 8))()
        self.address = ctypes.addressof(self.words)
        region = fabric.rails[0].register(self.address, size, access)
        assert isinstance(region, FakeRegion)
        self.region = region

    def at(self, word: int) -> int:
        return self.address + 8 * word

    def __getitem__(self, word: int) -> int:
        return self.words[word]

    def __setitem__(self, word: int, value: int) -> None:
        self.words[word] = value


class Pair:
    """Two sides with memory, and a link between them."""

    def __init__(self, seed: int = 0, access: Access = RIGHTS, **options: object) -> None:
        self.network = FakeNetwork(seed, **options)  # type: ignore[arg-type]
        self.near, self.far = self.network.fabric(("near0",)), self.network.fabric(("far0",))
        self.mine, self.theirs = Memory(self.near), Memory(self.far, access)
        self.link, self.end = self.connected()

    def connected(self) -> tuple[FakeLink, FakeLink]:
        one, other = self.near.fakes[0].link(), self.far.fakes[0].link()
        one.connect(other.address())
        other.connect(one.address())
        return one, other

    def op(self, kind: int, mine: int, theirs: int, words: int = 1, rkey: int = 0) -> Op:
        return (
            kind,
            self.mine.at(mine),
            self.mine.region.lkey,
            8 * words,
            self.theirs.at(theirs),
            rkey or self.theirs.region.rkey,
        )

    def do(self, *ops: Op) -> None:
        self.link.wait(self.link.post(ops), time.monotonic() + 20)

    def window(self, word: int, words: int) -> FakeWindow:
        window = self.far.fakes[0].window()
        self.end.bind([Binding(window, self.theirs.region, self.theirs.at(word), 8 * words)])
        return window

    def close(self) -> None:
        self.near.close()
        self.far.close()
        all_closed(self.network)


@pytest.fixture
def make() -> Iterator[Callable[..., Pair]]:
    """Makes pairs, and sees to it that they are closed, with nothing left."""
    made: list[Pair] = []

    def new(*args: int, **options: object) -> Pair:
        made.append(Pair(*args, **options))  # type: ignore[arg-type]
        return made[-1]

    yield new
    for pair in made:
        pair.close()


Make = Callable[..., Pair]


# --- against a naive twin ---------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_against_a_naive_twin(make: Make, seed: int) -> None:
    """Chains of random operations: a WRITE ends as if done in order, a READ brings what was there at some time."""
    pair, rng = make(seed), random.Random(seed)
    for word in range(64):
        pair.theirs[word] = rng.getrandbits(64)
    for _ in range(12):
        history = [{pair.theirs[word]} for word in range(64)]
        twin = list(pair.theirs.words[:64])
        ops: list[Op] = []
        reads = []
        for number in range(rng.randrange(1, 12)):
            mine, words = 32 * number, rng.randrange(1, 17)
            theirs = rng.randrange(64 - words)
            kind = rng.choice((READ, WRITE, WRITE, FENCED_READ))
            ops.append(pair.op(kind, mine, theirs, words))
            for word in range(words):
                if kind == WRITE:
                    pair.mine[mine + word] = twin[theirs + word] = rng.getrandbits(64)
                    history[theirs + word].add(twin[theirs + word])
                else:
                    pair.mine[mine + word] = 0
                    reads.append((mine + word, theirs + word))
        ops.append(pair.op(READ, 500, 63))
        tickets = []
        while ops:
            cut = rng.randrange(1, len(ops) + 1)
            tickets.append(pair.link.post(ops[:cut]))
            ops = ops[cut:]
        assert tickets == sorted(tickets)
        pair.link.wait(tickets[-1], time.monotonic() + 20)
        assert pair.link.poll() == tickets[-1]
        # The READ at the end was done after all WRITEs had landed.
        assert pair.theirs.words[:64] == twin
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


def seen(make: Make, chain: Callable[[Pair], list[Op]], look: Callable[[Pair], str], **options: object) -> set[str]:
    """What ``look`` finds after the chain, over the seeds, while word 0 and then word 1 of theirs count upwards."""
    found = set()
    for seed in SEEDS:
        pair = make(seed, **options)

        def count(pair: Pair = pair) -> None:
            pair.theirs[0] += 1
            pair.theirs[1] += 1

        pair.network.between = count
        pair.do(*chain(pair))
        found.add(look(pair))
    return found


def order(first: int, second: int) -> str:
    return "<" if first < second else ">" if first > second else "="


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
        pair.link.post([pair.op(READ, number, 0) for number in range(6)])
        pair.do(pair.op(FENCED_READ, 8, 0))
        assert max(pair.mine.words[:6]) < pair.mine[8]


def test_a_write_is_done_before_it_has_landed_and_a_read_behind_it_is_not(make: Make) -> None:
    early = set()
    for seed in SEEDS:
        pair = make(seed)
        pair.mine[0] = 5
        pair.do(pair.op(WRITE, 0, 3))
        early.add(pair.theirs[3])
        pair.mine[0] = 6  # it was done: its source is ours again
        pair.do(pair.op(READ, 1, 9))
        assert pair.theirs[3] == 5
    assert early == {0, 5}


def test_what_a_write_sends_is_read_until_it_is_done(make: Make) -> None:
    landed = set()
    for seed in SEEDS:
        pair = make(seed)
        pair.mine[0] = 1
        pair.network.between = lambda pair=pair: pair.mine.__setitem__(0, 2)
        pair.link.post([pair.op(WRITE, 0, 0)])
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
    # Both READs may see either: the one behind is done after the WRITE has landed, and may have read before.
    assert got == {(1, 1), (1, 2), (2, 1), (2, 2)}


def test_writes_of_two_links_have_no_order(make: Make) -> None:
    ended = set()
    for seed in SEEDS:
        pair = make(seed)
        other, _ = pair.connected()
        pair.mine[0], pair.mine[1] = 1, 2
        pair.link.post([pair.op(WRITE, 0, 0)])
        other.post([pair.op(WRITE, 1, 0)])
        pair.network.run()
        ended.add(pair.theirs[0])
    assert ended == {1, 2}


def test_depth(make: Make) -> None:
    pair = make(1, depth=4)
    with pytest.raises(UsageError, match="5 operations"):
        pair.link.post([pair.op(READ, 0, 0)] * 5)
    with pytest.raises(UsageError):
        pair.link.post([])
    for _ in range(5):
        ticket = pair.link.post([pair.op(READ, 0, 0)] * 3)  # waits for room
        assert len(pair.link.queue) <= 4
    pair.link.wait(ticket, time.monotonic() + 20)
    with pytest.raises(UsageError, match="ticket"):
        pair.link.wait(ticket + 1, time.monotonic())


# --- keys -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("kind", "offset", "length", "access"),
    [
        (READ, 0, 8, Access.LOCAL_WRITE | Access.REMOTE_WRITE),
        (WRITE, 0, 8, Access.REMOTE_READ),
        (READ, -1, 8, RIGHTS),
        (WRITE, -8, 16, RIGHTS),
        (READ, SIZE - 7, 8, RIGHTS),
        (FENCED_READ, SIZE, 8, RIGHTS),
        (WRITE, 0, SIZE + 8, RIGHTS),
    ],
)
def test_no_byte_beyond_what_a_key_allows(
    make: Make, seed: int, kind: int, offset: int, length: int, access: Access
) -> None:
    pair = make(seed, access)
    wide = Memory(pair.near, RIGHTS, 2 * SIZE)
    before = bytes(pair.theirs.words)
    ctypes.memset(wide.address, 0xEE, 2 * SIZE)
    op = (kind, wide.address, wide.region.lkey, length, pair.theirs.address + offset, pair.theirs.region.rkey)
    with pytest.raises(FabricError) as raised:
        pair.do(op)
    assert raised.value.status == "REM_ACCESS_ERR" and isinstance(raised.value, TransportError)
    assert pair.link.broken and pair.end.broken
    assert bytes(pair.theirs.words) == before
    assert bytes(wide.words) == b"\xee" * 2 * SIZE
    for use in (pair.link.poll, pair.end.poll):
        with pytest.raises(FabricError):
            use()
    with pytest.raises(FabricError):
        pair.link.post([op])


@pytest.mark.parametrize("key", ["lkey of theirs", "rkey as lkey", "none", "closed"])
def test_local_keys(make: Make, key: str) -> None:
    pair = make(2)
    lkey = {"lkey of theirs": pair.theirs.region.lkey, "rkey as lkey": pair.mine.region.rkey, "none": 0}.get(key)
    if lkey is None:
        lkey = pair.mine.region.lkey
        pair.mine.region.close()
    with pytest.raises(FabricError) as raised:
        pair.do((READ, pair.mine.address, lkey, 8, pair.theirs.address, pair.theirs.region.rkey))
    assert raised.value.status == "LOC_PROT_ERR"
    assert not pair.end.broken  # it learns of it when it sends something itself
    with pytest.raises(FabricError):
        pair.end.wait(
            pair.end.post([(READ, pair.theirs.address, pair.theirs.region.lkey, 8, pair.mine.address, 1)]),
            time.monotonic() + 20,
        )


def test_local_memory_that_may_only_be_read(make: Make) -> None:
    pair = make(2)
    still = Memory(pair.near, Access(0))
    still[0] = 77
    op = (WRITE, still.address, still.region.lkey, 8, pair.theirs.address, pair.theirs.region.rkey)
    pair.do(op, pair.op(READ, 0, 1))
    assert pair.theirs[0] == 77
    with pytest.raises(FabricError, match="LOC_PROT_ERR"):
        pair.do((READ, *op[1:]))
    assert still[0] == 77


@pytest.mark.parametrize("seed", SEEDS)
def test_a_region_closed_under_a_transfer(make: Make, seed: int) -> None:
    pair = make(seed)
    pair.link.post([pair.op(READ, 0, 0, 200), pair.op(WRITE, 200, 200, 100), pair.op(READ, 500, 0)])
    for _ in range(2 * seed):
        pair.network.step()
    pair.theirs.region.close()
    after = bytes(pair.theirs.words)
    pair.theirs.region.close()
    pair.network.run()
    assert bytes(pair.theirs.words) == after
    assert pair.link.broken


# --- windows ----------------------------------------------------------------------------------


def test_a_window_allows_writing_there_over_its_link_alone(make: Make) -> None:
    rights = Access.LOCAL_WRITE | Access.REMOTE_READ | Access.WINDOWS

    def refused(words: range, kind: int = WRITE, other: bool = False, stale: bool = False) -> bool:
        pair = make(5, rights)
        window = pair.window(8, 4)
        key = window.rkey
        pair.mine[0] = 1
        if other:
            pair.link.close()
            pair.link, end = pair.connected()
            assert end is not pair.end
        if stale:
            pair.end.invalidate([window])
            pair.end.bind([Binding(window, pair.theirs.region, pair.theirs.at(8), 32)])
            assert window.rkey != key
        before = bytes(pair.theirs.words)
        try:
            pair.do(pair.op(kind, 0, words.start, len(words), key))
            pair.do(pair.op(READ, 100, 0))
        except FabricError as error:
            assert error.status == "REM_ACCESS_ERR"
            assert bytes(pair.theirs.words) == before
            return True
        assert pair.theirs[8] == 1
        return False

    assert not refused(range(8, 12))
    assert refused(range(7, 9))
    assert refused(range(8, 13))
    assert refused(range(8, 9), READ)
    assert refused(range(8, 9), other=True)
    assert refused(range(8, 9), stale=True)


@pytest.mark.parametrize("what", ["twice", "beyond", "no windows", "another rail", "unbound", "closed region"])
def test_windows_bound_wrongly(make: Make, what: str) -> None:
    access = RIGHTS if what != "no windows" else Access.LOCAL_WRITE | Access.REMOTE_WRITE
    pair = make(5, access)
    window = pair.far.fakes[0].window()
    if what == "unbound":
        with pytest.raises(FabricError):
            pair.end.invalidate([window])
    elif what == "another rail":
        with pytest.raises(UsageError):
            pair.link.bind([Binding(window, pair.mine.region, pair.mine.at(0), 8)])
        return
    else:
        if what == "twice":
            pair.end.bind([Binding(window, pair.theirs.region, pair.theirs.at(0), 8)])
        if what == "closed region":
            pair.theirs.region.close()
        length = SIZE + 8 if what == "beyond" else 8
        with pytest.raises(FabricError) as raised:
            pair.end.bind([Binding(window, pair.theirs.region, pair.theirs.at(0), length)])
        assert raised.value.status == "MW_BIND_ERR"
    assert pair.end.broken


def test_nothing_lands_after_an_invalidation(make: Make) -> None:
    landed = set()
    for seed in range(150):
        pair = make(seed, Access.LOCAL_WRITE | Access.REMOTE_READ | Access.WINDOWS)
        window, other = pair.window(0, 16), pair.window(16, 8)
        for word in range(24):
            pair.mine[word] = 1
        ticket = pair.link.post([pair.op(WRITE, 0, 0, 16, window.rkey), pair.op(WRITE, 16, 16, 8, other.rkey)])
        for _ in range(seed // 3):
            pair.network.step()
        done = pair.link.done == ticket
        try:
            pair.end.invalidate([window])
        except FabricError:
            assert pair.end.broken
        after = sum(pair.theirs.words[:16])
        assert window.region is None or pair.end.broken
        pair.network.run()
        assert sum(pair.theirs.words[:16]) == after
        if done:
            assert after == 16  # what was acknowledged has landed
        landed.add(after)
        if not pair.link.broken:
            assert after == 16 and sum(pair.theirs.words[16:24]) == 8
    assert {0, 16} < landed  # refused whole, taken whole, and cut in the middle


def test_an_invalidation_leaves_other_windows_alone(make: Make) -> None:
    for seed in SEEDS:
        pair = make(seed, Access.LOCAL_WRITE | Access.REMOTE_READ | Access.WINDOWS)
        window, other = pair.window(0, 16), pair.window(16, 8)
        pair.mine[3] = 1
        pair.do(pair.op(WRITE, 0, 0, 8, window.rkey), pair.op(READ, 100, 7))
        pair.link.post([pair.op(WRITE, 0, 16, 8, other.rkey)])
        for _ in range(seed % 8):
            pair.network.step()
        pair.end.invalidate([window])
        pair.do(pair.op(READ, 100, 16))
        assert pair.theirs[19] == 1


def test_as_many_windows_as_the_limit_says(make: Make) -> None:
    pair = make(1, windows=2)
    rail = pair.far.fakes[0]
    first, _ = rail.window(), rail.window()
    with pytest.raises(FabricError, match="at most 2"):
        rail.window()
    first.close()
    first.close()
    rail.window()
    bare = make(1, windows=0)
    with pytest.raises(FabricError, match="at most 0"):
        bare.far.fakes[0].window()


def test_keys_of_a_window_come_again(make: Make) -> None:
    """The user's byte of a key wraps around: who keeps an old key must not live on its being refused for ever."""
    pair = make(1)
    window = pair.far.fakes[0].window()
    keys = []
    for _ in range(300):
        pair.end.bind([Binding(window, pair.theirs.region, pair.theirs.at(0), 8)])
        keys.append(window.rkey)
        pair.end.invalidate([window])
    assert all(one != other for one, other in itertools.pairwise(keys)) and len(set(keys)) < 300


# --- ends -------------------------------------------------------------------------------------


def test_nothing_comes_after_the_close(make: Make) -> None:
    lands = set()
    for seed in range(150):
        pair = make(seed)
        for word in range(16):
            pair.mine[word] = pair.theirs[100 + word] = 1
        pair.link.post([pair.op(WRITE, 0, 0, 16), pair.op(READ, 100, 100, 16)])
        for _ in range(seed // 3):
            pair.network.step()
        pair.link.close()
        pair.link.close()
        before, theirs = pair.mine.words[100:116], sum(pair.theirs.words[:16])
        for word in range(16):
            pair.mine[word] = 2  # a WRITE that goes on has left already
        pair.network.run()
        assert pair.mine.words[100:116] == before
        assert sum(pair.theirs.words[:16]) in (0, 16) and 2 not in pair.theirs.words[:16]
        lands.add(sum(pair.theirs.words[:16]) > theirs)
    assert lands == {True, False}


def test_closing_the_peers_end_stops_writes_under_way(make: Make) -> None:
    amounts = set()
    for seed in range(150):
        pair = make(seed)
        for word in range(16):
            pair.mine[word] = 1
        ticket = pair.link.post([pair.op(WRITE, 0, 0, 16)])
        for _ in range(seed // 5):
            pair.network.step()
        done = pair.link.done == ticket
        if seed % 2:
            pair.link.close()
        pair.end.close()
        after = sum(pair.theirs.words[:16])
        assert after == 16 or not done
        pair.network.run()
        assert sum(pair.theirs.words[:16]) == after
        amounts.add(after)
        if not seed % 2:
            with pytest.raises(FabricError) as raised:
                pair.do(pair.op(READ, 0, 0))
            assert raised.value.status in ("RETRY_EXC_ERR", "REM_ACCESS_ERR")
    assert {0, 16} < amounts


def test_a_broken_link_still_brings_what_it_was_reading_until_it_is_closed(make: Make) -> None:
    came = set()
    for seed in SEEDS:
        pair = make(seed)
        for word in range(16):
            pair.theirs[word] = 1
        pair.link.post([pair.op(READ, 0, 0, 16)])
        for _ in range(5):
            pair.network.step()
        with pair.network.lock:
            pair.link.fail("a test", "WR_FLUSH_ERR")
        with pytest.raises(FabricError, match="WR_FLUSH_ERR"):
            pair.link.wait(1, time.monotonic() + 20)
        before = sum(pair.mine.words[:16])
        for _ in range(5):
            pair.network.step()
        came.add(sum(pair.mine.words[:16]) > before)
        pair.link.close()
        before = sum(pair.mine.words[:16])
        pair.network.run()
        assert sum(pair.mine.words[:16]) == before
    assert came == {True}


# --- faults -----------------------------------------------------------------------------------


def late(pair: Pair) -> None:
    with pytest.raises(Timeout):
        pair.link.wait(pair.link.tickets, time.monotonic() + 0.01)


def test_held_back_and_released(make: Make) -> None:
    pair = make(3)
    pair.mine[0], pair.theirs[9] = 7, 8
    pair.network.hold()
    pair.link.post([pair.op(WRITE, 0, 0), pair.op(READ, 1, 9)])
    late(pair)
    assert pair.theirs[0] == pair.mine[1] == 0
    pair.network.release()
    pair.link.wait(1, time.monotonic() + 20)
    assert (pair.theirs[0], pair.mine[1]) == (7, 8)
    # Only WRITEs: a WRITE that left lands after its sender has closed.
    pair.network.hold(lambda link, op: op[0] == WRITE)
    pair.mine[0] = 9
    pair.link.post([pair.op(WRITE, 0, 0)])
    late(pair)
    pair.link.close()
    assert pair.theirs[0] == 7
    pair.network.release()
    pair.network.run()
    assert pair.theirs[0] == 9


def test_a_cable_out_and_in_again(make: Make) -> None:
    pair = make(3)
    for rail in (pair.near.fakes[0], pair.far.fakes[0]):
        pair.network.drop(rail)
        pair.mine[0] += 1
        pair.link.post([pair.op(WRITE, 0, 0), pair.op(READ, 1, 0)])
        late(pair)
        pair.network.restore(rail)
        pair.link.wait(pair.link.tickets, time.monotonic() + 20)
        assert pair.theirs[0] == pair.mine[0]


def test_no_way_between_two_rails(make: Make) -> None:
    pair = make(3)
    more = pair.network.fabric(("far1",))
    pair.network.sever(pair.near.rails[0], pair.far.rails[0])
    pair.link.post([pair.op(READ, 0, 0)])
    late(pair)
    there = Memory(more)
    one, other = pair.near.fakes[0].link(), more.fakes[0].link()
    one.connect(other.address())
    one.post([(READ, pair.mine.address, pair.mine.region.lkey, 8, there.address, there.region.rkey)])
    with pytest.raises(Timeout):
        one.wait(1, time.monotonic() + 0.01)  # the other end has not connected yet
    other.connect(one.address())
    one.wait(1, time.monotonic() + 20)
    more.close()


def test_a_link_killed_and_a_device_gone(make: Make) -> None:
    pair = make(3)
    other, end = pair.connected()
    pair.network.kill(pair.link)
    assert pair.link.broken and pair.end.broken and not other.broken
    pair.network.gone(pair.far.rails[0])
    assert end.broken and not other.broken
    other.post([pair.op(READ, 0, 0)])
    with pytest.raises(FabricError, match="does not answer"):
        other.wait(1, time.monotonic() + 20)
    for use in (pair.far.fakes[0].link, pair.far.fakes[0].window, lambda: Memory(pair.far)):
        with pytest.raises(FabricError, match="gone"):
            use()


def test_registrations_that_fail(make: Make) -> None:
    pair = make(3, memlock=3 * SIZE, region_bytes=2 * SIZE)
    with pytest.raises(FabricError, match="at most"):
        Memory(pair.near, RIGHTS, 3 * SIZE)
    more = Memory(pair.near, RIGHTS, 2 * SIZE)
    with pytest.raises(FabricError, match="ulimit"):
        Memory(pair.near, RIGHTS, SIZE)
    more.region.close()
    Memory(pair.near, RIGHTS, SIZE)
    with pytest.raises(FabricError, match="LOCAL_WRITE"):
        Memory(pair.near, Access.REMOTE_WRITE)
    pair.network.refuse = lambda what, rail: "not now" if what == "link" else ""
    with pytest.raises(FabricError, match="not now"):
        pair.near.fakes[0].link()


def test_links_that_were_not_connected_to_each_other(make: Make) -> None:
    pair = make(3)
    one, other = pair.near.fakes[0].link(), pair.far.fakes[0].link()
    with pytest.raises(FabricError, match="not connected"):
        one.post([pair.op(READ, 0, 0)])
    one.connect(other.address())
    with pytest.raises(FabricError, match="already"):
        one.connect(other.address())
    other.connect(pair.link.address())
    one.post([pair.op(READ, 0, 0)])
    with pytest.raises(FabricError):
        one.wait(1, time.monotonic() + 20)
    lost = pair.near.fakes[0].link()
    with pytest.raises(FabricError):
        lost.connect(other.address()._replace(gid=bytes(16)))
    stale = pair.near.fakes[0].link()
    fresh = pair.far.fakes[0].link()
    stale.connect(fresh.address()._replace(psn=fresh.psn ^ 1))
    fresh.connect(stale.address())
    stale.post([pair.op(READ, 0, 0)])
    with pytest.raises(FabricError):
        stale.wait(1, time.monotonic() + 20)


# --- threads, processes, leaks ----------------------------------------------------------------


@pytest.mark.parametrize("background", [False, True])
def test_threads(make: Make, background: bool) -> None:
    pair = make(3, background=background)
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            link, _ = links[number]
            at = 64 * number
            for turn in range(1, 40):
                pair.mine[at] = turn
                ticket = link.post([pair.op(WRITE, at, at), pair.op(FENCED_READ, at + 1, at)])
                link.wait(ticket, time.monotonic() + 20)
                ticket = link.post([pair.op(READ, at + 1, at)])
                while link.poll() < ticket:
                    pass
                assert pair.mine[at + 1] == turn
        except BaseException as error:
            failed.append(error)

    links = [pair.connected() for _ in range(4)]
    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_two_threads_in_one_link_are_told_on() -> None:
    pair = Pair(3)
    pair.network.hold()
    pair.link.post([pair.op(READ, 0, 0)])
    thread = threading.Thread(target=lambda: late(pair))
    inside = threading.Event()
    pair.network.between = inside.set
    thread.start()
    inside.wait(20)
    pair.network.between = lambda: time.sleep(0.005)
    with pytest.raises(AssertionError, match="two threads"):
        while thread.is_alive():
            pair.link.poll()
    thread.join()
    pair.near.close()
    pair.far.close()
    with pytest.raises(AssertionError, match="two threads"):
        all_closed(pair.network)


def test_abandoned_after_a_fork() -> None:
    pair = Pair(3)
    pair.near.abandon()
    with pytest.raises(AssertionError, match="abandoned"):
        pair.link.close()
    pair.far.close()
    assert pair.network.check() == []
    assert pair.network.violations


def test_what_is_left_open_is_said() -> None:
    pair = Pair(3)
    window = pair.window(0, 1)
    assert len(pair.network.check()) == 5
    with pytest.raises(AssertionError, match="region of 4096 bytes"):
        all_closed(pair.network)
    window.close()
    pair.link.close()
    pair.mine.region.close()
    assert len(pair.network.check()) == 2
    pair.far.close()
    all_closed(pair.network)

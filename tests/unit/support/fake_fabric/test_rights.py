"""The network in software: keys of regions and of windows."""

from __future__ import annotations

import ctypes
import itertools
import time

import pytest

from simm.errors import TransportError, UsageError
from simm.rdma.api import FENCED_READ, READ, WRITE, Access, Binding, FabricError
from tests.support.fake_pair import RIGHTS, SEEDS, SIZE, Make, Memory

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
    assert pair.qp.broken and pair.end.broken
    assert bytes(pair.theirs.words) == before
    assert bytes(wide.words) == b"\xee" * 2 * SIZE
    for use in (pair.qp.poll, pair.end.poll):
        with pytest.raises(FabricError):
            use()
    with pytest.raises(FabricError):
        pair.qp.post([op])


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
    assert not pair.end.broken  # it notices when it sends something itself
    with pytest.raises(FabricError):
        pair.end.wait(
            pair.end.post([(READ, pair.theirs.address, pair.theirs.region.lkey, 8, pair.mine.address, 1)]),
            time.monotonic() + 120,
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
    pair.qp.post([pair.op(READ, 0, 0, 200), pair.op(WRITE, 200, 200, 100), pair.op(READ, 500, 0)])
    for _ in range(2 * seed):
        pair.network.step()
    pair.theirs.region.close()
    after = bytes(pair.theirs.words)
    pair.theirs.region.close()
    pair.network.run()
    assert bytes(pair.theirs.words) == after
    assert pair.qp.broken


# --- windows ----------------------------------------------------------------------------------


def test_a_window_allows_writing_there_over_its_link_alone(make: Make) -> None:
    rights = Access.LOCAL_WRITE | Access.REMOTE_READ | Access.WINDOWS

    def refused(words: range, kind: int = WRITE, other: bool = False, stale: bool = False) -> bool:
        pair = make(5, rights)
        window = pair.window(8, 4)
        key = window.rkey
        pair.mine[0] = 1
        if other:
            pair.qp.close()
            pair.qp, end = pair.connected()
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
            pair.qp.bind([Binding(window, pair.mine.region, pair.mine.at(0), 8)])
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
        ticket = pair.qp.post([pair.op(WRITE, 0, 0, 16, window.rkey), pair.op(WRITE, 16, 16, 8, other.rkey)])
        for _ in range(seed // 3):
            pair.network.step()
        done = pair.qp.done == ticket
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
        if not pair.qp.broken:
            assert after == 16 and sum(pair.theirs.words[16:24]) == 8
    assert {0, 16} < landed  # refused, landed, and stopped in the middle


def test_an_invalidation_leaves_other_windows_alone(make: Make) -> None:
    for seed in SEEDS:
        pair = make(seed, Access.LOCAL_WRITE | Access.REMOTE_READ | Access.WINDOWS)
        window, other = pair.window(0, 16), pair.window(16, 8)
        pair.mine[3] = 1
        pair.do(pair.op(WRITE, 0, 0, 8, window.rkey), pair.op(READ, 100, 7))
        pair.qp.post([pair.op(WRITE, 0, 16, 8, other.rkey)])
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
    """The user's byte of a key wraps around: code must not rely on an old key being refused forever."""
    pair = make(1)
    window = pair.far.fakes[0].window()
    keys = []
    for _ in range(300):
        pair.end.bind([Binding(window, pair.theirs.region, pair.theirs.at(0), 8)])
        keys.append(window.rkey)
        pair.end.invalidate([window])
    assert all(one != other for one, other in itertools.pairwise(keys)) and len(set(keys)) < 300

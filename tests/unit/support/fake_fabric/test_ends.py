"""The network in software: queue pairs that close or break, faults, threads, forks and leaks."""

from __future__ import annotations

import threading
import time

import pytest

from simm.rdma.api import FENCED_READ, READ, WRITE, Access, FabricError, Timeout
from tests.support.fake_fabric import all_closed
from tests.support.fake_pair import RIGHTS, SEEDS, SIZE, Make, Memory, Pair

# --- ends -------------------------------------------------------------------------------------


def test_nothing_comes_after_the_close(make: Make) -> None:
    lands = set()
    for seed in range(150):
        pair = make(seed)
        for word in range(16):
            pair.mine[word] = pair.theirs[100 + word] = 1
        pair.qp.post([pair.op(WRITE, 0, 0, 16), pair.op(READ, 100, 100, 16)])
        for _ in range(seed // 3):
            pair.network.step()
        pair.qp.close()
        pair.qp.close()
        before, theirs = pair.mine.words[100:116], sum(pair.theirs.words[:16])
        for word in range(16):
            pair.mine[word] = 2  # a WRITE that continues has left already
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
        ticket = pair.qp.post([pair.op(WRITE, 0, 0, 16)])
        for _ in range(seed // 5):
            pair.network.step()
        done = pair.qp.done == ticket
        if seed % 2:
            pair.qp.close()
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
        pair.qp.post([pair.op(READ, 0, 0, 16)])
        for _ in range(5):
            pair.network.step()
        with pair.network.lock:
            pair.qp.fail("a test", "WR_FLUSH_ERR")
        with pytest.raises(FabricError, match="WR_FLUSH_ERR"):
            pair.qp.wait(1, time.monotonic() + 120)
        before = sum(pair.mine.words[:16])
        for _ in range(5):
            pair.network.step()
        came.add(sum(pair.mine.words[:16]) > before)
        pair.qp.close()
        before = sum(pair.mine.words[:16])
        pair.network.run()
        assert sum(pair.mine.words[:16]) == before
    assert came == {True}


# --- faults -----------------------------------------------------------------------------------


def late(pair: Pair) -> None:
    with pytest.raises(Timeout):
        pair.qp.wait(pair.qp.tickets, time.monotonic() + 0.01)


def test_held_back_and_released(make: Make) -> None:
    pair = make(3)
    pair.mine[0], pair.theirs[9] = 7, 8
    pair.network.hold()
    pair.qp.post([pair.op(WRITE, 0, 0), pair.op(READ, 1, 9)])
    late(pair)
    assert pair.theirs[0] == pair.mine[1] == 0
    pair.network.release()
    pair.qp.wait(1, time.monotonic() + 120)
    assert (pair.theirs[0], pair.mine[1]) == (7, 8)
    # Only WRITEs: a WRITE that left lands after its sender has closed.
    pair.network.hold(lambda qp, op: op[0] == WRITE)
    pair.mine[0] = 9
    pair.qp.post([pair.op(WRITE, 0, 0)])
    late(pair)
    pair.qp.close()
    assert pair.theirs[0] == 7
    pair.network.release()
    pair.network.run()
    assert pair.theirs[0] == 9


def test_a_cable_out_and_in_again(make: Make) -> None:
    pair = make(3)
    for rail in (pair.near.fakes[0], pair.far.fakes[0]):
        pair.network.drop(rail)
        pair.mine[0] += 1
        pair.qp.post([pair.op(WRITE, 0, 0), pair.op(READ, 1, 0)])
        late(pair)
        pair.network.restore(rail)
        pair.qp.wait(pair.qp.tickets, time.monotonic() + 120)
        assert pair.theirs[0] == pair.mine[0]


def test_no_way_between_two_rails(make: Make) -> None:
    pair = make(3)
    more = pair.network.fabric(("far1",))
    pair.network.sever(pair.near.rails[0], pair.far.rails[0])
    pair.qp.post([pair.op(READ, 0, 0)])
    late(pair)
    there = Memory(more)
    one, other = pair.near.fakes[0].queue_pair(), more.fakes[0].queue_pair()
    one.connect(other.address())
    one.post([(READ, pair.mine.address, pair.mine.region.lkey, 8, there.address, there.region.rkey)])
    with pytest.raises(Timeout):
        one.wait(1, time.monotonic() + 0.01)  # the other end has not connected yet
    other.connect(one.address())
    one.wait(1, time.monotonic() + 120)
    more.close()


def test_a_link_killed_and_a_device_gone(make: Make) -> None:
    pair = make(3)
    other, end = pair.connected()
    pair.network.kill(pair.qp)
    assert pair.qp.broken and pair.end.broken and not other.broken
    pair.network.gone(pair.far.rails[0])
    assert end.broken and not other.broken
    other.post([pair.op(READ, 0, 0)])
    with pytest.raises(FabricError, match="does not answer"):
        other.wait(1, time.monotonic() + 120)
    for use in (pair.far.fakes[0].queue_pair, pair.far.fakes[0].window, lambda: Memory(pair.far)):
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
    pair.network.refuse = lambda what, rail: "not now" if what == "queue pair" else ""
    with pytest.raises(FabricError, match="not now"):
        pair.near.fakes[0].queue_pair()


def test_links_that_were_not_connected_to_each_other(make: Make) -> None:
    pair = make(3)
    one, other = pair.near.fakes[0].queue_pair(), pair.far.fakes[0].queue_pair()
    with pytest.raises(FabricError, match="not connected"):
        one.post([pair.op(READ, 0, 0)])
    one.connect(other.address())
    with pytest.raises(FabricError, match="already"):
        one.connect(other.address())
    other.connect(pair.qp.address())
    one.post([pair.op(READ, 0, 0)])
    with pytest.raises(FabricError):
        one.wait(1, time.monotonic() + 120)
    lost = pair.near.fakes[0].queue_pair()
    with pytest.raises(FabricError):
        lost.connect(other.address()._replace(gid=bytes(16)))
    stale = pair.near.fakes[0].queue_pair()
    fresh = pair.far.fakes[0].queue_pair()
    stale.connect(fresh.address()._replace(psn=fresh.psn ^ 1))
    fresh.connect(stale.address())
    stale.post([pair.op(READ, 0, 0)])
    with pytest.raises(FabricError):
        stale.wait(1, time.monotonic() + 120)


# --- threads, processes, leaks ----------------------------------------------------------------


@pytest.mark.parametrize("background", [False, True])
def test_threads(make: Make, background: bool) -> None:
    pair = make(3, background=background)
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            qp, _ = queue_pairs[number]
            at = 64 * number
            for turn in range(1, 40):
                pair.mine[at] = turn
                ticket = qp.post([pair.op(WRITE, at, at), pair.op(FENCED_READ, at + 1, at)])
                qp.wait(ticket, time.monotonic() + 120)
                ticket = qp.post([pair.op(READ, at + 1, at)])
                while qp.poll() < ticket:
                    pass
                assert pair.mine[at + 1] == turn
        except BaseException as error:
            failed.append(error)

    queue_pairs = [pair.connected() for _ in range(4)]
    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_two_threads_in_one_link_are_told_on() -> None:
    pair = Pair(3)
    pair.network.hold()
    pair.qp.post([pair.op(READ, 0, 0)])
    thread = threading.Thread(target=lambda: late(pair))
    inside, go_on = threading.Event(), threading.Event()

    def between() -> None:
        inside.set()
        go_on.wait(60)

    pair.network.between = between
    thread.start()
    assert inside.wait(60)
    with pytest.raises(AssertionError, match="two threads"):
        pair.qp.poll()
    go_on.set()
    thread.join()
    pair.near.close()
    pair.far.close()
    with pytest.raises(AssertionError, match="two threads"):
        all_closed(pair.network)


def test_abandoned_after_a_fork() -> None:
    pair = Pair(3)
    pair.near.abandon()
    with pytest.raises(AssertionError, match="abandoned"):
        pair.qp.close()
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
    pair.qp.close()
    pair.mine.region.close()
    assert len(pair.network.check()) == 2
    pair.far.close()
    all_closed(pair.network)

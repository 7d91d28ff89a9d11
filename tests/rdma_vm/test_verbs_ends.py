"""``simm.verbs`` on real verbs: queue pairs and processes that end, many chains, forks, and the choice of devices."""

from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from simm import verbs
from simm.rdma.api import (
    READ,
    WRITE,
    Absence,
    Access,
    Binding,
    FabricError,
    QueuePair,
    QueuePairAddress,
    Timeout,
)
from tests.rdma_vm.verbs_pair import MIB, THEIRS, Both, Here, environment, objects_of, run
from tests.rdma_vm.verbs_peer import Peer, soon
from tests.support.pace import Pace

# --- ends ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("closing", [True, False], ids=["closed", "control: left open"])
def test_nothing_is_written_after_close(peer: Peer, here: Here, closing: bool) -> None:
    qp, _ = peer.join(here.rail)
    size = 16 * MIB
    here.memory.bytes[:size] = bytes(size)
    peer.memory.bytes[:size] = b"\x77" * size
    for _ in range(4):
        qp.post([here.op(READ, peer, 0, size, 0)])
    time.sleep(0.01)
    start = time.monotonic()
    if closing:
        qp.close()
    took = time.monotonic() - start
    image = here.memory.bytes[:size]
    time.sleep(0.5)
    assert (here.memory.bytes[:size] == image) is closing
    print(f"closing a queue pair with 64 MiB under way: {took * 1e3:.1f} ms")
    qp.close()
    with pytest.raises(FabricError):
        qp.post([here.op(READ, peer, 0, 8, 0)])


def test_close_in_any_order_twice_and_nothing_is_left() -> None:
    """The kernel counts the objects that are left."""
    before = len(objects_of(os.getpid()))
    both = Both()
    queue_pairs = [both.pair() for _ in range(3)]
    windows = [both.server.window() for _ in range(3)]
    for (far, near), window in zip(queue_pairs, windows):
        far.bind([Binding(window, both.region, both.region.address, 8)])
        near.post([both.write(window.rkey)] * 50)
    assert len(objects_of(os.getpid())) == before + 6 + 6 + 2 + 2, "queue pairs, their queues, regions, domains"
    both.region.close()  # what is bound to it goes first
    queue_pairs[0][0].close()
    windows[1].close()
    for rail in (both.server, both.client, both.client, both.server):
        rail.close()
    for _, near in queue_pairs:
        near.close()
        assert near.broken
    for thing in (both.region, both.local, *windows):
        thing.close()
    for call in (
        both.server.queue_pair,
        both.server.window,
        lambda: both.server.register(both.memory.at, 4096, Access.LOCAL_WRITE),
    ):
        with pytest.raises(FabricError, match="closed"):
            call()
    assert len(objects_of(os.getpid())) == before
    both.memory.close()


def test_a_dead_peer_is_noticed() -> None:
    peer, here = Peer(THEIRS, MIB), Here()
    qp, _ = peer.join(here.rail)
    idle, _ = peer.join(here.rail)
    run(qp, here.op(READ, peer, 0, 8, 0))
    peer.kill()
    with Pace() as pace:
        start, busy = time.monotonic(), time.thread_time()
        with pytest.raises(FabricError) as caught:
            run(qp, here.op(READ, peer, 0, 8, 0))
        took, busy = time.monotonic() - start, time.thread_time() - busy
    assert caught.value.status == "RETRY_EXC_ERR" and "does not answer" in str(caught.value)
    print(f"a dead peer is noticed after {took:.2f} s, of which {busy:.2f} s on the processor")
    pace.check("a dead peer is noticed after", took, 3.0)
    assert busy < took / 2, "asleep meanwhile"
    idle.close()
    here.rail.close()
    assert not objects_of(peer.process.pid)
    here.memory.close()
    peer.close()


def test_a_deadline_is_kept_and_other_threads_run_meanwhile(peer: Peer, here: Here) -> None:
    qp, number = peer.join(here.rail)
    # A queue pair without a peer: nothing answers until the retries have ended.
    peer.ask("close_queue_pair", number)
    ticks = 0
    over = threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not over.wait(0.01):
            ticks += 1

    thread = threading.Thread(target=tick)
    thread.start()
    with Pace() as pace:
        start = time.monotonic()
        with pytest.raises(Timeout):
            qp.wait(qp.post([here.op(READ, peer, 0, 8, 0)]), start + 0.4)
        took = time.monotonic() - start
    over.set()
    thread.join()
    assert took >= 0.4 and ticks > 5
    pace.check("a deadline of 0.4 s is kept", took, 1.0)
    with pytest.raises(FabricError) as caught:
        qp.wait(1, soon())
    assert caught.value.status == "RETRY_EXC_ERR"
    qp.close()


def test_nobody_at_that_address(here: Here) -> None:
    qp = here.rail.queue_pair()
    nobody = QueuePairAddress(bytes(10) + b"\xff\xff" + bytes((10, 77, 0, 99)), 0, 17, 0, 4096, 16)
    with pytest.raises(FabricError):
        qp.connect(nobody)
        run(qp, (READ, here.memory.at, here.region.lkey, 8, 4096, 1))
    assert qp.broken
    qp.close()
    fresh = here.rail.queue_pair()
    with pytest.raises(FabricError, match="not connected"):
        fresh.post([(READ, here.memory.at, here.region.lkey, 8, 4096, 1)])
    fresh.close()


# --- many ---------------------------------------------------------------------------------------


def resident_kib() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // 1024


def test_memory_stays_flat_over_many_chains_and_links(peer: Peer, here: Here, qp: QueuePair) -> None:
    """pyverbs never frees work requests: 50,000 chains of new ones would take 10 MiB."""
    ops = [here.op(WRITE, peer, 0, 8, 0)]

    def chains(count: int) -> None:
        for turn in range(count):
            ticket = qp.post(ops)
            if not turn & 31:
                qp.wait(ticket, soon())
        qp.wait(qp.post(ops), soon())

    def queue_pairs(count: int) -> None:
        for _ in range(count):
            made = here.rail.queue_pair()
            made.close()

    chains(500)
    queue_pairs(8)
    start, began = resident_kib(), time.monotonic()
    chains(50_000)
    took = time.monotonic() - began
    queue_pairs(60)
    grown = resident_kib() - start
    print(f"50,000 chains: {took / 50_000 * 1e6:.0f} us each; {grown} KiB more with 60 queue pairs")
    assert grown < 6000, "more than a huge page or two"


def test_threads_with_a_link_each(peer: Peer, here: Here) -> None:
    """Threads also create their queue pairs at the same time: each must find its own completion channel."""
    failures: list[BaseException] = []
    barrier = threading.Barrier(4)
    lock = threading.Lock()

    def work(number: int) -> None:
        try:
            rng = random.Random(number)
            barrier.wait()
            qp = here.rail.queue_pair()
            with lock:
                theirs, gid, *rest = peer.ask("queue_pair")
                ours = qp.address()
                qp.connect(QueuePairAddress(bytes.fromhex(gid), *rest))
                peer.ask("connect", theirs, ours.gid.hex(), *ours[1:])
            base = number * MIB
            for _ in range(60):
                size = rng.choice((8, 4096, 60_000))
                data = rng.randbytes(size)
                here.memory.bytes[base : base + size] = data
                run(qp, here.op(WRITE, peer, base, size, base))
                qp._looks = 0.0  # type: ignore[attr-defined]  # asleep each time
                run(qp, here.op(READ, peer, base + MIB // 2, size, base))
                assert here.memory.bytes[base + MIB // 2 : base + MIB // 2 + size] == data
            qp.close()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


# --- forks --------------------------------------------------------------------------------------

FORK = """
    import gc, os, sys
    from simm import verbs
    from simm.rdma import work_requests as verbs_wr
    from simm.errors import SimmError
    if sys.argv[1] == "bare":
        verbs_wr.pin = verbs_wr.unpin = lambda thing: None
    from simm.rdma.api import READ, WRITE, FabricError
    from tests.rdma_vm.verbs_pair import environment, Both, run
    both = Both()
    far, near = both.pair()
    op = both.write(both.region.rkey)
    run(near, op)
    near.post([op] * 20)
    pid = os.fork()
    if not pid:
        told = []
        for call in (lambda: near.post([op]), both.client.queue_pair, lambda: far.bind([])):
            try:
                call()
                told.append("nothing")
            except SimmError as error:
                told.append(str(error))
        both.client.close(); near.close(); far.close(); both.region.close()
        verbs.open_fabric("rxe1").close()
        assert all("forked" in text for text in told[:2]), told
        if sys.argv[1] == "bare":
            verbs._OPEN.clear()
        del both, far, near
        gc.collect()
        sys.exit(0)  # with all that an interpreter does at its end
    assert os.waitpid(pid, 0)[1] == 0
    try:
        for turn in range(50):
            both.memory.bytes[1 << 19:(1 << 19) + 8] = text = b"%08d" % turn
            run(near, op)
            assert both.memory.bytes[:8] == text
        print("whole")
    except FabricError as error:
        print("broken", error)
    os._exit(0)
"""


@pytest.mark.parametrize("how", ["pinned", "bare"])
def test_a_forked_child_harms_nothing(how: str) -> None:
    """``bare`` is the control: without the extra reference, the child's destructors destroy the parent's objects."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FORK), how],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "whole" if how == "pinned" else "broken" in done.stdout, done


# --- opening ------------------------------------------------------------------------------------


def test_devices_are_chosen_and_named() -> None:
    assert verbs.available() is None
    fabric = verbs.open_fabric("rxe0,rxe1:1")
    assert not isinstance(fabric, Absence)
    assert [rail.name for rail in fabric.rails] == ["rxe0:1", "rxe1:1"]
    for rail in fabric.rails:
        assert rail.gid[:12] == bytes(10) + b"\xff\xff" and rail.mtu == 4096 and rail.lid == 0
        assert rail.limits.windows > 1000 and rail.limits.depth >= 256 and 1 <= rail.limits.reads <= 16
        assert rail.limits.region_bytes >= 1 << 40
    fabric.close()
    other = verbs.open_fabric(None, env={"SICL_NET_DEVICES": "rxe1"})
    assert not isinstance(other, Absence) and [rail.name for rail in other.rails] == ["rxe1:1"]
    other.close()
    absent = verbs.open_fabric("rxe77")
    assert isinstance(absent, Absence) and "rxe77" in absent.why and "--rdma-devices" in absent.why

"""``simm.verbs`` on real verbs: what simm.rdma.api promises of transfers and rights, across processes."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import textwrap
import time
from typing import Any

import pytest

from simm.errors import UsageError
from simm.rdma.api import (
    FENCED_READ,
    READ,
    WRITE,
    Access,
    FabricError,
    QueuePair,
)
from tests.rdma_vm.verbs_pair import MIB, OURS, SIZE, Here, environment, refused, run
from tests.rdma_vm.verbs_peer import Peer, soon

# --- transfers ----------------------------------------------------------------------------------


SIZES = [1, 2, 7, 8, 63, 64, 65, 511, 4095, 4096, 4097, 65_537, MIB, 8 * MIB + 3, 64 * MIB]


@pytest.mark.parametrize("size", SIZES)
def test_every_size_both_ways_at_odd_addresses(peer: Peer, here: Here, qp: QueuePair, size: int) -> None:
    data = random.Random(size).randbytes(size)
    mine, theirs = here.memory.bytes, peer.memory.bytes
    mine[: size + 64] = b"\x11" * (size + 64)
    theirs[: size + 64] = b"\x22" * (size + 64)
    mine[5 : 5 + size] = data
    run(qp, here.op(WRITE, peer, 5, size, 13))
    # After a READ the WRITE has certainly landed; on these devices it has when it completes.
    run(qp, here.op(READ, peer, 1024 if size < 512 else 5, 1, 13))
    mine[: size + 64] = b"\x11" * (size + 64)
    assert theirs[13 : 13 + size] == data and theirs[:13] == b"\x22" * 13
    assert theirs[13 + size : size + 64] == b"\x22" * 51
    run(qp, here.op(READ, peer, 3, size, 13))
    assert mine[3 : 3 + size] == data and mine[:3] == b"\x11" * 3
    assert mine[3 + size : size + 64] == b"\x11" * 61


@pytest.mark.parametrize("seed", range(4))
def test_random_chains_against_a_reference_model(peer: Peer, here: Here, qp: QueuePair, seed: int) -> None:
    """WRITEs keep their order; a FENCED_READ sees what was posted before it, at the end and in the middle of chains."""
    rng = random.Random(seed)
    area, source, sink = 1 << 16, 1 << 20, 2 << 20
    reference = bytearray(rng.randbytes(area))
    peer.memory.bytes[:area] = bytes(reference)
    here.memory.bytes[source : source + area] = stock = rng.randbytes(area)
    for _ in range(60):
        ops, expected, at = [], [], sink
        for _ in range(rng.choice((1, 2, 3, 8, 40))):
            size = rng.choice((1, 3, 8, 64, 500, 5000))
            there = rng.randrange(area - size)
            if rng.random() < 0.5:
                begin = rng.randrange(area - size)
                reference[there : there + size] = stock[begin : begin + size]
                ops.append(here.op(WRITE, peer, source + begin, size, there))
            else:
                ops.append(here.op(FENCED_READ, peer, at, size, there))
                expected.append((at, bytes(reference[there : there + size])))
                at += size
        run(qp, *ops)
        assert all(here.memory.bytes[place : place + len(data)] == data for place, data in expected)
    assert peer.memory.bytes[:area] == reference


def test_flags_are_set_anew_in_each_chain(peer: Peer, here: Here, qp: QueuePair) -> None:
    rows: list[Any] = qp._rings.transfers  # type: ignore[attr-defined]
    signaled, fence = 2, 1
    run(qp, *[here.op(FENCED_READ, peer, 0, 8, 0)] * 3)
    assert [slot.wr.send_flags for slot in rows[:3]] == [signaled | fence, fence, fence]
    run(qp, *[here.op(READ, peer, 0, 8, 0)] * 3)
    assert [slot.wr.send_flags for slot in rows[:3]] == [signaled, 0, 0]
    run(qp, here.op(FENCED_READ, peer, 0, 8, 0), here.op(WRITE, peer, 0, 8, 0))
    assert [slot.wr.send_flags for slot in rows[:2]] == [signaled, fence]


def test_more_chains_than_the_queue_takes_and_chains_too_long(peer: Peer, here: Here, qp: QueuePair) -> None:
    here.memory.bytes[:4096] = data = os.urandom(4096)
    tickets = [qp.post([here.op(WRITE, peer, i, 1, 4096 + i)]) for i in range(1024)]
    full = qp.post([here.op(WRITE, peer, 1024 + 12 * i, 12, 5120 + 12 * i) for i in range(qp.depth)])
    assert [*tickets, full] == list(range(tickets[0], full + 1))
    qp.wait(full, soon())
    assert qp.poll() == full
    assert peer.memory.bytes[4096 : 4096 + 4096] == data
    # There are more completions than one poll takes, and no event will come for any of them.
    last = [qp.post([here.op(WRITE, peer, 0, 1, 0)]) for _ in range(100)][-1]
    time.sleep(0.3)
    qp._looks = 0.0  # type: ignore[attr-defined]
    qp.wait(last, until := soon())
    assert time.monotonic() < until - 5, "found, and not by the deadline's coming"
    for wrong in ([], [here.op(READ, peer, 0, 8, 0)] * (qp.depth + 1), [(7, *here.op(READ, peer, 0, 8, 0)[1:])]):
        with pytest.raises(UsageError):
            qp.post(wrong)
    with pytest.raises(UsageError):
        qp.wait(last + 1, soon())
    run(qp, here.op(READ, peer, 0, 8, 0))
    assert not qp.broken


def test_what_the_peer_overwrites_is_never_older_than_the_post(peer: Peer, here: Here, qp: QueuePair) -> None:
    """A READ needs no help of the peer's processors and sees what was there when it was posted, or later."""
    for number in range(200):
        peer.memory.bytes[:8] = number.to_bytes(8, "little")
        run(qp, here.op(READ, peer, 0, 8, 0))
        assert int.from_bytes(here.memory.bytes[:8], "little") == number


# --- rights -------------------------------------------------------------------------------------


def test_beyond_a_region_and_without_a_right(peer: Peer, here: Here) -> None:
    other, _ = peer.join(here.rail)
    at, read_only = peer.ask("register", "read only", 0, 8192, int(Access.REMOTE_READ))
    assert at == peer.at
    peer.memory.bytes[:8200] = before = bytes(8200)
    here.memory.bytes[:64] = b"\xff" * 64
    cases = (
        (here.op(WRITE, peer, 0, 8, 0, read_only), "REM_ACCESS_ERR"),
        (here.op(READ, peer, 0, 8, 8185, read_only), "REM_ACCESS_ERR"),
        (here.op(READ, peer, 0, 16, -8), "REM_ACCESS_ERR"),
        (here.op(READ, peer, 0, 8, 0, 0x1234_5678), "REM_ACCESS_ERR"),
        (here.op(READ, peer, SIZE - 4, 8, 0), "LOC_PROT_ERR"),
        ((READ, here.memory.at, 0x1234_5678, 8, peer.at, peer.rkey), "LOC_PROT_ERR"),
    )
    for op, status in cases:
        qp, _ = peer.join(here.rail)
        assert not qp.broken
        assert refused(qp, op) == status
        assert qp.broken
        for _ in range(2):
            with pytest.raises(FabricError):
                qp.post([here.op(READ, peer, 0, 8, 0)])
            with pytest.raises(FabricError):
                qp.poll()
        qp.close()
    assert peer.memory.bytes[:8200] == before
    run(other, here.op(READ, peer, 64, 8, 0, read_only))  # no other queue pair is affected
    other.close()
    peer.ask("deregister", "read only")


def test_deregistered_under_a_transfer(peer: Peer, here: Here, qp: QueuePair) -> None:
    _, rkey = peer.ask("register", "short", 0, 32 * MIB, int(Access.REMOTE_READ))
    ticket = qp.post([here.op(READ, peer, 0, 32 * MIB, 0, rkey)] * 4)
    peer.ask("deregister", "short")
    with pytest.raises(FabricError) as caught:
        qp.wait(ticket, soon())
    # Refused between two READs; in the middle of a READ, soft-RoCE reports nothing.
    assert caught.value.status in ("REM_ACCESS_ERR", "RETRY_EXC_ERR")


def test_registrations_that_cannot_be(here: Here) -> None:
    rail = here.rail
    for address, length, access in (
        (here.memory.at, 0, Access.LOCAL_WRITE),
        (0, 4096, Access.LOCAL_WRITE),
        (here.memory.at, 4096, Access.REMOTE_WRITE),
        (here.memory.at, 1 << 60, Access.LOCAL_WRITE),
        (1 << 46, 1 << 20, Access.LOCAL_WRITE),  # nothing is mapped there
    ):
        with pytest.raises(FabricError, match=r"register|region|LOCAL_WRITE"):
            rail.register(address, length, access)


def test_soft_roce_takes_no_dma_buf_and_says_so(here: Here) -> None:
    """All that can be seen here: pyverbs takes the call, and its refusal is reported."""
    fd = os.memfd_create("no-dma-buf")
    try:
        with pytest.raises(FabricError, match=r"of a dma-buf: .*: the device's driver takes none") as caught:
            here.rail.register_dmabuf(fd, 4096, 4096, Access.LOCAL_WRITE)
    finally:
        os.close(fd)
    assert caught.value.status in ("EOPNOTSUPP", "ENOTSUP")


def test_the_memlock_limit_is_named() -> None:
    """Run as the user nobody, because root may pin any amount."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(f"""
            import os, resource, mmap, ctypes
            from simm.rdma.api import Access, FabricError
            from tests.rdma_vm.verbs_peer import Memory, rail_of
            memory = Memory(16 << 20)
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))
            os.setgid(65534); os.setuid(65534)
            rail = rail_of({OURS!r})
            try:
                rail.register(memory.at, 16 << 20, Access.LOCAL_WRITE)
            except FabricError as error:
                print(error.status, error)
            rail.close()
        """)],
        capture_output=True, text=True, env=environment(), check=False,
    )  # fmt: skip
    assert done.stdout.startswith("ENOMEM ") and "ulimit -l" in done.stdout, done
    assert "LimitMEMLOCK" in done.stdout and "1048576 bytes" in done.stdout

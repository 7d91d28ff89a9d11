"""Ports of workers, and room for one more arena."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from simm.config.tokens import parse_tokens, quotas_of
from simm.errors import SegmentError, UsageError
from simm.host import memory
from simm.server import arena_stock
from simm.server.arena_stock import ArenaStock
from simm.server.options import DataServerOptions
from simm.server.slots.opening import Opener

MIB = 1 << 20


def test_no_two_listeners_have_one_port() -> None:
    """Those of the first workers are as they were before there were others."""
    options = DataServerOptions("gpu", "", [0, 1], listen_port=7000)
    assert [options.port_of(number) for number in range(2)] == [7000, 7001]
    assert [options.port_of(number, rdma=True) for number in range(2)] == [7002, 7003]
    ports = [options.port_of(number, rdma=rdma) for number in range(64) for rdma in (False, True)]
    assert len(set(ports)) == 128 and min(ports) == 7000 and max(ports) == 7127
    assert DataServerOptions("gpu", "", [0]).port_of(5, rdma=True) == 0


def test_a_quota_is_dealt_as_the_shards_are() -> None:
    tokens = parse_tokens(f"client a {'s' * 40} x=1000", "f")
    assert quotas_of(tokens, 64, 64) == {"x": 1000}
    assert [quotas_of(tokens, part, 128)["x"] for part in (96, 32)] == [750, 250]


def test_room_for_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """In /dev/shm for the arena, in the cgroup for its processes too."""
    in_shm = memory.Bound(64 * MIB, "are free in /dev/shm", "remount it")
    cgroup = memory.Bound(200 * MIB, "are left of the cgroup", "raise it")
    monkeypatch.setattr(memory, "segment_bounds", lambda _directory: [in_shm, cgroup])
    stock = ArenaStock(DataServerOptions("gpu", "", [0]), 7)
    stock.require_room(64 * MIB, 0)
    with pytest.raises(SegmentError, match=r"66\.0 MiB, but only 64\.0 MiB are free in /dev/shm; remount it"):
        stock.require_room(66 * MIB, 0)
    cgroup = cgroup._replace(bytes=100 * MIB)
    with pytest.raises(SegmentError, match=r"the arena and its processes need .* are left of the cgroup; raise it"):
        stock.require_room(64 * MIB, 0)
    with pytest.raises(UsageError, match="at least"):
        stock.require_room(2 * MIB, 0)
    monkeypatch.setattr(arena_stock.numa, "nodes", lambda: [0, 1])
    monkeypatch.setattr(arena_stock.numa, "node_free_bytes", lambda node: MIB << node)
    with pytest.raises(SegmentError, match=r"on NUMA node 1, which has 2\.0 MiB left"):
        stock.require_room(16 * MIB, 1)


def test_processes_that_were_forked_earlier_see_how_much_memory_there_is_now() -> None:
    """So each worker's part of a quota becomes smaller when another one is added."""
    nothing: Any = None
    opener = Opener(DataServerOptions("gpu", "", [0]), 7, nothing, nothing, nothing, nothing, nothing)
    slot: Any = SimpleNamespace(segment=SimpleNamespace(size=64 * MIB))
    assert opener._share_of(slot) == (64 * MIB, 64 * MIB)
    opener.memory = 64 * MIB
    reads, writes = os.pipe()
    pid = os.fork()
    if not pid:
        os.read(reads, 1)
        os._exit(opener._share_of(slot) != (64 * MIB, 96 * MIB))
    opener.memory = 96 * MIB
    os.write(writes, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(reads)
    os.close(writes)

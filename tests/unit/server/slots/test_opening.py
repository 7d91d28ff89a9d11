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
from simm.server.slots import opening
from simm.server.slots.opening import Opener
from tests.support.segments import child, status_of

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


@pytest.mark.parametrize("hugetlb", [False, True])
def test_the_default_size_fits_nodes_that_are_unequally_used(
    monkeypatch: pytest.MonkeyPatch, hugetlb: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """All arenas have one size. The bound on the whole host alone gives each one more than node 1 has."""
    left = {0: 800 * MIB, 1: 100 * MIB}
    host = memory.Bound(900 * MIB, "are free", "free more")
    monkeypatch.setattr(memory, "segment_bounds", lambda _directory: [host])
    monkeypatch.setattr(memory, "reserved_bound", lambda *_: host)
    monkeypatch.setattr(arena_stock.numa, "bind_memory", lambda *_: arena_stock.numa.Outcome(True))
    for name in ("node_free_bytes", "reserved_free_bytes"):
        monkeypatch.setattr(arena_stock.numa, name, lambda node, _root="/": left[node])

    def size(nodes: list[int], given: int = 0) -> int:
        return ArenaStock(DataServerOptions("gpu", "", nodes, memory=given, hugetlb=hugetlb), 7).size()

    share = 100 if hugetlb else 80
    assert size([0, 1]) == share * MIB
    assert size([0, 1, 1]) == share // 4 * 2 * MIB
    assert size([0, 1], 64 * MIB) == 64 * MIB, "what was asked for is looked at when it is faulted in"
    left[1] = 800 * MIB
    caplog.clear()
    assert size([0, 1]) == (450 if hugetlb else 360) * MIB and not caplog.text, "the control"
    left[1] = 40 * MIB
    assert size([0, 1]) == (40 if hugetlb else 32) * MIB
    assert "NUMA node 1 has 40.0 MiB" in caplog.text, "nobody wants a tiny store, so it is said"
    for few in (0, 1 * MIB, 7 * MIB):
        left[1] = few
        with pytest.raises(SegmentError, match=r"NUMA node 1 has .* left for each .*--numa"):
            size([0, 1])
        assert size([0, 1], 64 * MIB) == 64 * MIB, "what was asked for"


@pytest.mark.parametrize(
    ("in_shm", "cgroup", "workers", "slots", "says"),
    [
        (64, 100, 1, 0, r"at least 8 MiB, not \d+ bytes; only 100\.0 MiB are left of the cgroup, .*: raise it"),
        (4096, 90, 1, 0, r"at least 8 MiB, .* only 90\.0 MiB are left of the cgroup"),
        (9, 4096, 1, 0, r"at least 8 MiB, .* only 9\.0 MiB are free in /dev/shm, .*: remount it"),
        (64, 4096, 8, 0, r"at least 8 MiB, .* only 64\.0 MiB are free in /dev/shm, for 8 arena"),
        (1, 4096, 1, 0, r"only 1\.0 MiB are free in /dev/shm, .*; remount it"),
        (64, 4096, 1, 1 << 20, r"no room for 1048576 slots .* only 64\.0 MiB are free in /dev/shm"),
    ],
)
def test_issue_memory_that_is_short_for_a_while_is_no_wrong_setting(
    monkeypatch: pytest.MonkeyPatch, in_shm: int, cgroup: int, workers: int, slots: int, says: str
) -> None:
    """It ended with status 2, after which a unit does not try again, and named neither bound nor remedy."""
    bounds = [
        memory.Bound(in_shm * MIB, "are free in /dev/shm", "remount it"),
        memory.Bound(cgroup * MIB, "are left of the cgroup", "raise it"),
    ]
    monkeypatch.setattr(memory, "segment_bounds", lambda _directory: bounds)
    monkeypatch.setattr(arena_stock.numa, "share_of_nodes", lambda *_: None)
    with pytest.raises(SegmentError, match=says):
        ArenaStock(DataServerOptions("gpu", "", [0] * workers, slots=slots), 7).size()
    with pytest.raises(UsageError, match="no room for 1048576 slots"):  # the control: what was asked for
        bounds = [bound._replace(bytes=4096 * MIB) for bound in bounds]
        ArenaStock(DataServerOptions("gpu", "", [0], memory=16 * MIB, slots=1 << 20), 7).size()


def test_processes_that_were_forked_earlier_see_how_much_memory_there_is_now() -> None:
    """So each worker's part of a quota becomes smaller when another one is added."""
    nothing: Any = None
    opener = Opener(DataServerOptions("gpu", "", [0]), 7, nothing, nothing, nothing, nothing, nothing)
    slot: Any = SimpleNamespace(segment=SimpleNamespace(size=64 * MIB))
    assert opener._share_of(slot) == (64 * MIB, 64 * MIB)
    opener.memory = 64 * MIB
    reads, writes = os.pipe()
    pid = child(lambda: not os.read(reads, 1) or opener._share_of(slot) != (64 * MIB, 96 * MIB))
    opener.memory = 96 * MIB
    os.write(writes, b"x")
    assert status_of(pid) == 0
    os.close(reads)
    os.close(writes)


@pytest.mark.parametrize("orphaned", [False, True], ids=["stopped", "killed"])
@pytest.mark.parametrize(("warm", "sealed"), [(False, False), (True, False), (True, True)])
def test_what_a_worker_leaves_of_its_arena(
    monkeypatch: pytest.MonkeyPatch, orphaned: bool, warm: bool, sealed: bool
) -> None:
    """With --warm also if its supervisor was killed. Sealed data ends with that one, who alone could move it."""
    done: list[str] = []
    monkeypatch.setattr(opening.segments, "remove_if_left", lambda *_: done.append("remove"))
    nothing: Any = None
    children: Any = SimpleNamespace(stopping=not orphaned)
    opener = Opener(DataServerOptions("gpu", "", [0], warm=warm), 7, children, *[nothing] * 4)
    arena: Any = SimpleNamespace(name="x", sealed=sealed, unlock=lambda: done.append("unlock"))

    def suspended() -> bool:
        done.append("suspend")
        return True

    opener._leave(arena, orphaned, suspended, lambda: done.append("close"))
    kept = warm and not (orphaned and sealed)
    assert done == (["suspend"] if kept else ["close", "unlock", "remove"])

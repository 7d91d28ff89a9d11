"""simm.host.numa on fake trees of 1, 2 and 4 nodes, and its system calls on this machine."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
from pathlib import Path

import pytest

from simm.errors import ConfigError, UsageError
from simm.host import numa

GIB = 1 << 30
KIB_PER_GIB = 1 << 20


def write(root: Path, path: str, text: str) -> None:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)


def tree(root: Path, online: str, nodes: dict[int, tuple[str, int]], mems: str | None = None) -> str:
    """A fake root: nodes maps a number to its CPU list and its GiB of memory."""
    write(root, "sys/devices/system/node/online", online + "\n")
    for number, (cpus, gib) in nodes.items():
        base = f"sys/devices/system/node/node{number}"
        write(root, f"{base}/cpulist", cpus + "\n")
        write(
            root,
            f"{base}/meminfo",
            f"Node {number} MemTotal: {gib * KIB_PER_GIB:>12} kB\n"
            f"Node {number} MemFree: {gib * KIB_PER_GIB // 2:>12} kB\n"
            f"Node {number} Inactive(file):   1024 kB\nNode {number} SReclaimable:     2048 kB\n",
        )
    write(root, "proc/meminfo", f"MemTotal: {sum(gib for _, gib in nodes.values()) * KIB_PER_GIB} kB\n")
    if mems is not None:
        write(root, "proc/self/status", f"Name:\tpython\nMems_allowed:\t3\nMems_allowed_list:\t{mems}\n")
    return str(root)


@pytest.fixture
def two(tmp_path: Path) -> str:
    return tree(tmp_path, "0-1", {0: ("0-3,8", 64), 1: ("4-7", 32)})


@pytest.fixture
def four(tmp_path: Path) -> str:
    """Node 1 offline, node 3 memory only, node 4 CPUs only, its directory there for all."""
    return tree(tmp_path, "0,2-4", {0: ("0-1", 8), 1: ("2-3", 8), 2: ("4-5", 16), 3: ("", 128), 4: ("6-7", 0)})


def test_two_nodes(two: str) -> None:
    assert numa.nodes(two) == [
        numa.Node(0, (0, 1, 2, 3, 8), 64 * GIB),
        numa.Node(1, (4, 5, 6, 7), 32 * GIB),
    ]


def test_offline_memory_only_and_cpu_only_nodes(four: str) -> None:
    found = numa.nodes(four)
    assert [node.id for node in found] == [0, 2, 3, 4]
    assert found[2] == numa.Node(3, (), 128 * GIB)
    assert found[3] == numa.Node(4, (6, 7), 0)


def test_a_machine_without_numa_is_one_node(tmp_path: Path) -> None:
    write(tmp_path, "proc/meminfo", "MemTotal:       16777216 kB\n")
    assert numa.nodes(str(tmp_path)) == [numa.Node(0, tuple(sorted(os.sched_getaffinity(0))), 16 * GIB)]


def test_a_sole_node_has_the_memory_of_the_machine(tmp_path: Path) -> None:
    root = tree(tmp_path, "0", {0: ("0-1", 8)})
    write(tmp_path, "proc/meminfo", f"MemTotal: {24 * KIB_PER_GIB} kB\n")
    assert numa.nodes(root) == [numa.Node(0, (0, 1), 24 * GIB)]


@pytest.mark.parametrize("garbage", ["", "x", "3-", "1-x", "\xff"])
def test_garbage_in_sysfs_is_one_node(tmp_path: Path, garbage: str) -> None:
    write(tmp_path, "sys/devices/system/node/online", garbage)
    assert [node.id for node in numa.nodes(str(tmp_path))] == [0]


@pytest.mark.parametrize(
    ("spec", "expected"), [("all", [0, 1]), ("0", [0]), ("1,0", [1, 0]), (" 0 , 1 ", [0, 1]), ("01", [1])]
)
def test_parse_numa(two: str, spec: str, expected: list[int]) -> None:
    assert numa.parse_numa(spec, two, allowed_cpus=range(16)) == expected


@pytest.mark.parametrize("spec", ["", "2", "0,2", "0,0", "-1", "0-1", "zero", "0,", "1e0", "٣", "99999999999"])
def test_parse_numa_refuses_and_names_what_there_is(two: str, spec: str) -> None:
    with pytest.raises(ConfigError, match=r"0, 1|twice; --workers"):
        numa.parse_numa(spec, two, allowed_cpus=range(16))


def test_all_leaves_out_nodes_where_no_worker_can_be(four: str) -> None:
    assert numa.parse_numa("all", four, allowed_cpus=range(8)) == [0, 2]
    assert numa.parse_numa("3", four, allowed_cpus=range(8)) == [3]  # memory only, but asked for
    with pytest.raises(ConfigError, match="no memory"):
        numa.parse_numa("4", four, allowed_cpus=range(8))
    with pytest.raises(ConfigError, match="no node 1"):
        numa.parse_numa("1", four, allowed_cpus=range(8))


def test_the_containers_cpuset_is_respected(tmp_path: Path) -> None:
    root = tree(tmp_path, "0-1", {0: ("0-3", 8), 1: ("4-7", 8)}, mems="1")
    assert numa.allowed_memory_nodes(root) == (1,)
    assert numa.parse_numa("all", root, allowed_cpus=range(8)) == [1]
    with pytest.raises(ConfigError, match="node 0 has no memory that this process may use"):
        numa.parse_numa("0", root, allowed_cpus=range(8))
    with pytest.raises(ConfigError, match="cpuset"):
        numa.parse_numa("all", root, allowed_cpus=[0])


@pytest.mark.parametrize(
    ("cpus", "node"),
    [({4, 5}, 1), ({8}, 0), ({0, 1, 2, 3, 8}, 0), ({3, 4}, -1), (range(9), -1), ({77}, -1), (set(), -1)],
)
def test_own_node(two: str, cpus: set[int], node: int) -> None:
    assert numa.own_node(two, allowed_cpus=cpus) == node


def test_one_node_is_no_node_in_particular(tmp_path: Path) -> None:
    """Else a host without NUMA would leave out the devices that name none."""
    root = tree(tmp_path, "0", {0: ("0-3", 8)})
    assert numa.own_node(root, allowed_cpus={0}) == -1 and numa.own_node() in (-1, *range(64))


def test_reserved_free_bytes_of_a_node(two: str) -> None:
    assert numa.reserved_free_bytes(0, two) is None
    write(Path(two), "sys/devices/system/node/node0/hugepages/hugepages-2048kB/free_hugepages", "12\n")
    assert numa.reserved_free_bytes(0, two) == 24 << 20 and numa.reserved_free_bytes(1, two) is None


def test_node_free_bytes_counts_what_can_be_dropped(two: str) -> None:
    assert numa.node_free_bytes(0, two) == 32 * GIB + 3072 * 1024
    assert numa.node_free_bytes(7, two) is None


def test_the_active_part_of_the_cache_can_be_dropped(two: str, tmp_path: Path) -> None:
    """Files that programs have mapped, or read twice; what must be written first does not count."""
    write(
        tmp_path, "sys/devices/system/node/node1/meminfo",
        "Node 1 MemTotal: 67108864 kB\nNode 1 MemFree: 1024 kB\nNode 1 Active(anon): 7777 kB\n"
        "Node 1 Inactive(anon): 7777 kB\nNode 1 Active(file): 50331648 kB\nNode 1 Inactive(file): 1024 kB\n"
        "Node 1 Unevictable: 7777 kB\nNode 1 Dirty: 512 kB\nNode 1 Writeback: 256 kB\nNode 1 WritebackTmp: 7777 kB\n"
        "Node 1 SReclaimable: 2048 kB\n",
    )  # fmt: skip
    assert numa.node_free_bytes(1, two) == 48 * GIB + (1024 + 1024 - 768 + 2048) * 1024
    write(
        tmp_path, "sys/devices/system/node/node1/meminfo",
        "Node 1 MemFree: 1024 kB\nNode 1 Active(file): 1024 kB\nNode 1 Dirty: 4096 kB\n",
    )  # fmt: skip
    assert numa.node_free_bytes(1, two) == 1024 * 1024, "a cache that is all dirty takes nothing off what is free"


def test_the_share_of_the_fullest_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tree(tmp_path, "0-1", {0: ("0-3", 64), 1: ("4-7", 16)})
    assert numa.share_of_nodes([0, 0, 0, 1], str(tmp_path / "one")) is None, "there is one node"
    monkeypatch.setattr(numa, "bind_memory", lambda _addr, _length, _node, _root: numa.Outcome(True))
    ends = 3072 * 1024  # the cache of each
    assert numa.share_of_nodes([0, 1], root) == (8 * GIB + ends, 1)
    assert numa.share_of_nodes([0, 0, 0, 0, 0, 1], root) == ((32 * GIB + ends) // 5, 0)
    assert numa.share_of_nodes([0, 7], root) == (32 * GIB + ends, 0), "of node 7 the kernel says nothing"
    assert numa.share_of_nodes([0, 1], root, free=lambda node, _: 10 << node) == (10, 0)
    monkeypatch.setattr(numa, "bind_memory", lambda _addr, _length, node, _root: numa.Outcome(node == 0))
    assert numa.share_of_nodes([0, 1], root) == (32 * GIB + ends, 0), "node 1 sets none: its pages may come from 0"


def in_child(code: object) -> int:
    """Run a function in a forked child and return its exit status (its process-wide changes stay there)."""
    pid = os.fork()
    if pid == 0:
        status = 99
        try:
            status = int(code())  # type: ignore[operator]
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_pin_keeps_to_the_nodes_allowed_cpus(tmp_path: Path) -> None:
    mine = sorted(os.sched_getaffinity(0))
    root = tree(tmp_path, "0-2", {0: (f"{mine[0]},100000", 8), 1: ("100001", 8), 2: ("", 8)})

    def pinned() -> int:
        if numa.pin(1, root) != () or numa.pin(2, root) != ():
            return 1
        if os.sched_getaffinity(0) != set(mine):
            return 2  # nothing may change when there is nothing to pin to
        if numa.pin(0, root) != (mine[0],):
            return 3
        return 0 if os.sched_getaffinity(0) == {mine[0]} else 4

    assert in_child(pinned) == 0
    with pytest.raises(UsageError, match="0, 1, 2"):
        numa.pin(9, root)


def test_binding_is_nothing_on_one_node(tmp_path: Path) -> None:
    root = tree(tmp_path, "0", {0: ("0", 8)})
    outcome = numa.bind_memory(0, 4096, 0, root)
    assert not outcome
    assert "one NUMA node" in outcome.reason


def _policy_of(address: int) -> tuple[int, int] | None:
    """(mode, first word of the node mask) of the policy at an address, by get_mempolicy(2); None if refused."""
    number = {"x86_64": 239, "aarch64": 236}.get(platform.machine())
    if number is None:
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    mode, mask = ctypes.c_int(-1), (ctypes.c_uint64 * 16)()
    flags = 2 if address else 0  # MPOL_F_ADDR
    if libc.syscall(
        ctypes.c_long(number), ctypes.byref(mode), mask, ctypes.c_ulong(1024), ctypes.c_void_p(address),
        ctypes.c_ulong(flags),
    ):  # fmt: skip
        return None
    return mode.value, mask[0]


def test_the_kernel_takes_our_masks(two: str) -> None:
    """Node 0 exists everywhere; the fake tree only makes the module go as far as the system call."""
    if _policy_of(0) is None:
        pytest.skip("get_mempolicy is not allowed or not known here")

    def bound() -> int:
        page = mmap.mmap(-1, 8192)
        address = ctypes.addressof(ctypes.c_char.from_buffer(page))
        if not numa.bind_memory(address, 8192, 0, two):
            return 1
        return 0 if _policy_of(address) == (2, 1) else 2

    assert in_child(bound) == 0


def test_a_refused_binding_is_reported_not_raised(two: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with mmap.mmap(-1, 4096) as page:
        address = ctypes.addressof(ctypes.c_char.from_buffer(page))
        for node in (63, 64, 1000):  # also across the words of the mask
            outcome = numa.bind_memory(address, 4096, node, two)
            assert not outcome
            assert outcome.reason

    def refuse(*_: object) -> int:
        ctypes.set_errno(errno.EPERM)
        return -1

    class Libc:
        syscall = staticmethod(refuse)

    monkeypatch.setattr(numa, "_LIBC", Libc)
    if platform.machine() in ("x86_64", "aarch64"):
        assert "seccomp" in numa.bind_memory(0, 4096, 0, two).reason
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert "riscv64" in numa.bind_memory(0, 4096, 0, two).reason

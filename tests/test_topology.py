"""simm.topology on fake trees of 1, 2 and 4 nodes, and its system calls on this machine."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
from pathlib import Path

import pytest

from simm import topology
from simm.errors import ConfigError, UsageError

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
    assert topology.nodes(two) == [
        topology.Node(0, (0, 1, 2, 3, 8), 64 * GIB),
        topology.Node(1, (4, 5, 6, 7), 32 * GIB),
    ]


def test_offline_memory_only_and_cpu_only_nodes(four: str) -> None:
    found = topology.nodes(four)
    assert [node.id for node in found] == [0, 2, 3, 4]
    assert found[2] == topology.Node(3, (), 128 * GIB)
    assert found[3] == topology.Node(4, (6, 7), 0)


def test_a_machine_without_numa_is_one_node(tmp_path: Path) -> None:
    write(tmp_path, "proc/meminfo", "MemTotal:       16777216 kB\n")
    assert topology.nodes(str(tmp_path)) == [topology.Node(0, tuple(sorted(os.sched_getaffinity(0))), 16 * GIB)]


def test_a_sole_node_has_the_memory_of_the_machine(tmp_path: Path) -> None:
    root = tree(tmp_path, "0", {0: ("0-1", 8)})
    write(tmp_path, "proc/meminfo", f"MemTotal: {24 * KIB_PER_GIB} kB\n")
    assert topology.nodes(root) == [topology.Node(0, (0, 1), 24 * GIB)]


@pytest.mark.parametrize("garbage", ["", "x", "3-", "1-x", "\xff"])
def test_garbage_in_sysfs_is_one_node(tmp_path: Path, garbage: str) -> None:
    write(tmp_path, "sys/devices/system/node/online", garbage)
    assert [node.id for node in topology.nodes(str(tmp_path))] == [0]


@pytest.mark.parametrize(
    ("spec", "expected"), [("all", [0, 1]), ("0", [0]), ("1,0", [1, 0]), (" 0 , 1 ", [0, 1]), ("01", [1])]
)
def test_parse_numa(two: str, spec: str, expected: list[int]) -> None:
    assert topology.parse_numa(spec, two, allowed_cpus=range(16)) == expected


@pytest.mark.parametrize("spec", ["", "2", "0,2", "0,0", "-1", "0-1", "zero", "0,", "1e0", "٣", "99999999999"])
def test_parse_numa_refuses_and_names_what_there_is(two: str, spec: str) -> None:
    with pytest.raises(ConfigError, match=r"0, 1|twice"):
        topology.parse_numa(spec, two, allowed_cpus=range(16))


def test_all_leaves_out_nodes_where_no_worker_can_be(four: str) -> None:
    assert topology.parse_numa("all", four, allowed_cpus=range(8)) == [0, 2]
    assert topology.parse_numa("3", four, allowed_cpus=range(8)) == [3]  # memory only, but asked for
    with pytest.raises(ConfigError, match="no memory"):
        topology.parse_numa("4", four, allowed_cpus=range(8))
    with pytest.raises(ConfigError, match="no node 1"):
        topology.parse_numa("1", four, allowed_cpus=range(8))


def test_the_containers_cpuset_is_respected(tmp_path: Path) -> None:
    root = tree(tmp_path, "0-1", {0: ("0-3", 8), 1: ("4-7", 8)}, mems="1")
    assert topology.allowed_memory_nodes(root) == (1,)
    assert topology.parse_numa("all", root, allowed_cpus=range(8)) == [1]
    with pytest.raises(ConfigError, match="node 0 has no memory that this process may use"):
        topology.parse_numa("0", root, allowed_cpus=range(8))
    with pytest.raises(ConfigError, match="cpuset"):
        topology.parse_numa("all", root, allowed_cpus=[0])


@pytest.mark.parametrize(
    ("cpus", "node"),
    [({4, 5}, 1), ({8}, 0), ({0, 1, 2, 3, 8}, 0), ({3, 4}, -1), (range(9), -1), ({77}, -1), (set(), -1)],
)
def test_own_node(two: str, cpus: set[int], node: int) -> None:
    assert topology.own_node(two, allowed_cpus=cpus) == node


def test_one_node_is_no_node_in_particular(tmp_path: Path) -> None:
    """Else a host without NUMA would leave out the devices that name none."""
    root = tree(tmp_path, "0", {0: ("0-3", 8)})
    assert topology.own_node(root, allowed_cpus={0}) == -1 and topology.own_node() in (-1, *range(64))


def test_node_free_bytes_counts_what_can_be_dropped(two: str) -> None:
    assert topology.node_free_bytes(0, two) == 32 * GIB + 3072 * 1024
    assert topology.node_free_bytes(7, two) is None


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
        if topology.pin(1, root) != () or topology.pin(2, root) != ():
            return 1
        if os.sched_getaffinity(0) != set(mine):
            return 2  # nothing may change when there is nothing to pin to
        if topology.pin(0, root) != (mine[0],):
            return 3
        return 0 if os.sched_getaffinity(0) == {mine[0]} else 4

    assert in_child(pinned) == 0
    with pytest.raises(UsageError, match="0, 1, 2"):
        topology.pin(9, root)


def test_binding_is_nothing_on_one_node(tmp_path: Path) -> None:
    root = tree(tmp_path, "0", {0: ("0", 8)})
    for outcome in (topology.bind_memory(0, 4096, 0, root), topology.prefer_node(0, root)):
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
        if not topology.bind_memory(address, 8192, 0, two):
            return 1
        if _policy_of(address) != (2, 1):
            return 2
        if not topology.prefer_node(0, two):
            return 3
        return 0 if _policy_of(0) == (1, 1) else 4

    assert in_child(bound) == 0


def test_a_refused_binding_is_reported_not_raised(two: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with mmap.mmap(-1, 4096) as page:
        address = ctypes.addressof(ctypes.c_char.from_buffer(page))
        for node in (63, 64, 1000):  # also across the words of the mask
            outcome = topology.bind_memory(address, 4096, node, two)
            assert not outcome
            assert outcome.reason

    def refuse(*_: object) -> int:
        ctypes.set_errno(errno.EPERM)
        return -1

    class Libc:
        syscall = staticmethod(refuse)

    monkeypatch.setattr(topology, "_LIBC", Libc)
    if platform.machine() in ("x86_64", "aarch64"):
        assert "seccomp" in topology.prefer_node(0, two).reason
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert "riscv64" in topology.prefer_node(0, two).reason


# ---------------------------------------------------------------------------- memory cgroups, huge pages


def test_no_cgroup_no_limit(tmp_path: Path) -> None:
    assert topology.memory_limit_bytes(str(tmp_path)) is None


def test_cgroup_v2_takes_the_tightest_ancestor(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/a/b\n")
    base = "sys/fs/cgroup"
    for where, limit, usage in (("", None, None), ("/a", str(10 * GIB), str(4 * GIB)), ("/a/b", "max", str(GIB))):
        if limit is not None:
            write(tmp_path, f"{base}{where}/memory.max", limit + "\n")
            write(tmp_path, f"{base}{where}/memory.current", f"{usage}\n")
    write(tmp_path, f"{base}/a/memory.stat", f"anon 5\ninactive_file {GIB}\nactive_file 7\n")
    assert topology.memory_limit_bytes(str(tmp_path)) == 7 * GIB
    write(tmp_path, f"{base}/a/b/memory.max", str(2 * GIB))
    assert topology.memory_limit_bytes(str(tmp_path)) == GIB


def test_cgroup_v1_and_its_unlimited(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "9:name=systemd:/x\n4:cpuset,memory:/docker/abc\n0::/\n")
    base = "sys/fs/cgroup/memory"
    write(tmp_path, f"{base}/memory.limit_in_bytes", "9223372036854771712\n")
    write(tmp_path, f"{base}/memory.usage_in_bytes", "4096\n")
    assert topology.memory_limit_bytes(str(tmp_path)) is None
    # A container that sees its own cgroup as the mount's root: the path of /proc is not there.
    write(tmp_path, f"{base}/memory.limit_in_bytes", f"{4 * GIB}\n")
    assert topology.memory_limit_bytes(str(tmp_path)) == 4 * GIB - 4096
    write(tmp_path, f"{base}/docker/abc/memory.limit_in_bytes", f"{GIB}\n")
    write(tmp_path, f"{base}/docker/abc/memory.usage_in_bytes", f"{2 * GIB}\n")
    assert topology.memory_limit_bytes(str(tmp_path)) == 0


@pytest.mark.parametrize(
    ("general", "own", "allowed"),
    [
        ("always within_size [advise] never deny force", None, True),
        ("always within_size advise [never] deny force", None, False),
        ("always within_size [advise] never deny force", "always [inherit] within_size advise never", True),
        ("always within_size [advise] never deny force", "always inherit within_size advise [never]", False),
        ("always within_size advise [never] deny force", "[always] inherit within_size advise never", True),
        ("always within_size advise never [deny] force", "[always] inherit within_size advise never", False),
        (None, None, False),
    ],
)
def test_huge_pages_allowed(tmp_path: Path, general: str | None, own: str | None, allowed: bool) -> None:
    base = "sys/kernel/mm/transparent_hugepage"
    if general is not None:
        write(tmp_path, f"{base}/shmem_enabled", general)
    if own is not None:
        write(tmp_path, f"{base}/hugepages-2048kB/shmem_enabled", own)
    assert topology.huge_pages_allowed(str(tmp_path)) is allowed

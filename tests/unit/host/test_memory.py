"""simm.host.memory on fake trees: cgroup limits of both versions, and huge pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from simm.host import memory

GIB = 1 << 30


def write(root: Path, path: str, text: str) -> None:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)


def test_no_cgroup_no_limit(tmp_path: Path) -> None:
    assert memory.memory_limit_bytes(str(tmp_path)) is None


def test_cgroup_v2_takes_the_tightest_ancestor(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/a/b\n")
    base = "sys/fs/cgroup"
    for where, limit, usage in (("", None, None), ("/a", str(10 * GIB), str(4 * GIB)), ("/a/b", "max", str(GIB))):
        if limit is not None:
            write(tmp_path, f"{base}{where}/memory.max", limit + "\n")
            write(tmp_path, f"{base}{where}/memory.current", f"{usage}\n")
    write(tmp_path, f"{base}/a/memory.stat", f"anon 5\ninactive_file {GIB}\nactive_file 7\n")
    assert memory.memory_limit_bytes(str(tmp_path)) == 7 * GIB
    write(tmp_path, f"{base}/a/b/memory.max", str(2 * GIB))
    assert memory.memory_limit_bytes(str(tmp_path)) == GIB


def test_cgroup_v1_and_its_unlimited(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "9:name=systemd:/x\n4:cpuset,memory:/docker/abc\n0::/\n")
    base = "sys/fs/cgroup/memory"
    write(tmp_path, f"{base}/memory.limit_in_bytes", "9223372036854771712\n")
    write(tmp_path, f"{base}/memory.usage_in_bytes", "4096\n")
    assert memory.memory_limit_bytes(str(tmp_path)) is None
    # A container that sees its own cgroup as the mount's root: the path of /proc is not there.
    write(tmp_path, f"{base}/memory.limit_in_bytes", f"{4 * GIB}\n")
    assert memory.memory_limit_bytes(str(tmp_path)) == 4 * GIB - 4096
    write(tmp_path, f"{base}/docker/abc/memory.limit_in_bytes", f"{GIB}\n")
    write(tmp_path, f"{base}/docker/abc/memory.usage_in_bytes", f"{2 * GIB}\n")
    assert memory.memory_limit_bytes(str(tmp_path)) == 0


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
    assert memory.huge_pages_allowed(str(tmp_path)) is allowed


def reserve(root: Path, **counts: int) -> None:
    for name, count in counts.items():
        write(root, f"sys/kernel/mm/hugepages/hugepages-2048kB/{name}", f"{count}\n")


def test_reserved_pages_that_are_free(tmp_path: Path) -> None:
    """Those that others were promised are not; those that the kernel may still make are."""
    assert memory.reserved_bytes(str(tmp_path)) == 0, "a kernel without any"
    reserve(tmp_path, free_hugepages=10, resv_hugepages=3, nr_overcommit_hugepages=0, surplus_hugepages=0)
    assert memory.reserved_bytes(str(tmp_path)) == 14 << 20
    reserve(tmp_path, nr_overcommit_hugepages=4, surplus_hugepages=1)
    assert memory.reserved_bytes(str(tmp_path)) == 20 << 20
    reserve(tmp_path, free_hugepages=1, resv_hugepages=8)
    assert memory.reserved_bytes(str(tmp_path)) == 0
    assert "13 more than now" in memory.reserved_bound(26 << 20, str(tmp_path)).remedy

"""Memory that this process may use: what the machine, its cgroup and /dev/shm have left, and huge pages.

The memory that a container may use is in its cgroup. ``/proc/meminfo`` is the host's.

``sys_root`` is the directory that holds ``sys`` and ``proc``. Tests pass a tree of their own.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final, NamedTuple

from ..constants import HUGE_PAGE_BYTES
from ..errors import SegmentError, UsageError

#: Share of the memory left that a default arena takes.
DEFAULT_ARENA_PERCENT: Final = 80


def text_of(path: Path) -> str | None:
    """Return a file's text, None if it cannot be read."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return None


def field_bytes(text: str | None, field: str) -> int | None:
    """Return the bytes of a line ``Field:   123 kB``, the form of both meminfo files. None without such a line."""
    found = re.search(rf"\b{re.escape(field)}:\s+(\d+) kB", text or "")
    return int(found.group(1)) << 10 if found else None


def mib(count: int) -> str:
    """Return bytes as text, in MiB."""
    return f"{count / (1 << 20):,.1f} MiB"


def meminfo_bytes(field: str, sys_root: str = "/") -> int | None:
    """Return a field of ``/proc/meminfo`` (``MemTotal``, ``MemAvailable``...) in bytes, None if it is absent.

    Not by psutil, which clients would load for one line: the nodes' meminfo files, which it does not read, have the
    same form.
    """
    return field_bytes(text_of(Path(sys_root, "proc/meminfo")), field)


def _number(path: Path) -> int | None:
    """Return the number in a one-line file. None if it is absent, no number ("max"), or v1's "unlimited"."""
    try:
        value = int(path.read_text())
    except (OSError, ValueError):
        return None
    return value if value < 1 << 60 else None


def memory_limit_bytes(sys_root: str = "/", *, spared: int = 0) -> int | None:
    """Return the bytes that this process's memory cgroups still allow, None if none of them has a limit.

    ``spared``: bytes of shared memory that count as free, as far as a cgroup has shared memory. Whose that is, the
    kernel does not say: the caller has to know that these bytes are of this process's cgroup.

    Each cgroup, v1 or v2, allows its limit less its working set: usage without inactive file cache, which the kernel
    drops first. The result is the least over the cgroup and its ancestors. Inside a container the cgroup's own path is
    often not visible, and the mount's root stands for it; the walk ends there.
    """
    root = Path(sys_root, "sys/fs/cgroup")
    lines = (text_of(Path(sys_root, "proc/self/cgroup")) or "").splitlines()
    left: list[int] = []
    for base, kind, limit_file, usage_file, field, shared in (
        (root, "", "memory.max", "memory.current", "inactive_file", "shmem"),
        (root / "memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file",
         "total_shmem"),
    ):  # fmt: skip
        inside = "/"
        for line in lines:
            number, _, rest = line.partition(":")
            controllers, _, where = rest.partition(":")
            if (kind in controllers.split(",") and kind) or (not kind and number == "0"):
                inside = where
        at = base / inside.strip("/")
        for directory in (at, *at.parents):
            limit, usage = _number(directory / limit_file), _number(directory / usage_file)
            if limit is not None:
                stat = text_of(directory / "memory.stat") or ""
                working_set = (usage or 0) - _stat_bytes(stat, field) - min(spared, _stat_bytes(stat, shared))
                left.append(max(0, limit - max(0, working_set)))
            if directory == base:
                break
    return min(left, default=None)


def _stat_bytes(stat: str, field: str) -> int:
    """Return a field of a cgroup's memory.stat, 0 if it is absent."""
    found = re.search(rf"^{field} (\d+)$", stat, re.M)
    return int(found.group(1)) if found else 0


def huge_pages_allowed(sys_root: str = "/") -> bool:
    """Return whether the kernel's switches let MADV_HUGEPAGE have an effect on shared memory."""
    base = Path(sys_root, "sys/kernel/mm/transparent_hugepage")

    def chosen(path: Path) -> str:
        found = re.search(r"\[(\w+)\]", text_of(path) or "")
        return found.group(1) if found else ""

    general = chosen(base / "shmem_enabled")
    own = chosen(base / "hugepages-2048kB/shmem_enabled")  # Linux 6.10 and later
    effective = general if own in ("", "inherit") or general in ("deny", "force") else own
    return effective in ("always", "within_size", "advise", "force")


def whole_huge_pages(size: int) -> int:
    """Return the bytes of the huge pages that ``size`` bytes take."""
    return -(-size // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES


def reserved_bytes(sys_root: str = "/") -> int:
    """Return the bytes of reserved huge pages (HugeTLB) of 2 MiB that are free; 0 on a kernel without any.

    What other programs have been promised and not yet touched is not free. Pages that the kernel may still take from
    ordinary memory (``vm.nr_overcommit_hugepages``) count, although it may find none that hang together.
    """
    base = Path(sys_root, "sys/kernel/mm/hugepages", f"hugepages-{HUGE_PAGE_BYTES >> 10}kB")

    def count(name: str) -> int:
        return _number(base / name) or 0

    free = count("free_hugepages") - count("resv_hugepages")
    free += max(0, count("nr_overcommit_hugepages") - count("surplus_hugepages"))
    return max(0, free) * HUGE_PAGE_BYTES


class Bound(NamedTuple):
    """A limit on the size of a new segment: bytes, a phrase that says what sets it, and how to raise it."""

    bytes: int
    what: str
    remedy: str


def shm_free_bytes(directory: str) -> int:
    """Return the bytes that the file system of ``directory`` can still take. Raises SegmentError if it is missing."""
    try:
        state = os.statvfs(directory)
    except OSError as error:
        raise SegmentError(
            f"{directory}: {error.strerror}; mount a tmpfs there (kubernetes: an emptyDir of medium Memory)"
        ) from error
    return state.f_bavail * state.f_frsize


def segment_bounds(directory: str) -> list[Bound]:
    """Return every bound on a new segment in ``directory``, its file system's first.

    Raises SegmentError if the directory is missing.
    Swap does not count: a swapped-out cache is slower than the computation that it replaces.
    """
    remedy = f"mount -o remount,size=... {directory} (docker: --shm-size)"
    return [Bound(shm_free_bytes(directory), f"are free in {directory}", remedy), *process_bounds()]


def process_bounds() -> list[Bound]:
    """Return every bound on what this process and its children may take, shared memory included."""
    bounds = []
    limit = memory_limit_bytes()
    if limit is not None:
        bounds.append(Bound(limit, "are left of the memory cgroup's limit", "raise the container's memory limit"))
    available = meminfo_bytes("MemAvailable")
    if available is not None:
        bounds.append(Bound(available, "of memory are available", "end other programs"))
    return bounds


def reserved_bound(wanted: int = 0, sys_root: str = "/") -> Bound:
    """Return the bound on what HugeTLB pages can hold. ``wanted``: bytes that the remedy makes room for."""
    free = reserved_bytes(sys_root)
    more = whole_huge_pages(max(0, wanted - free)) // HUGE_PAGE_BYTES
    return Bound(
        free, "are free in reserved huge pages of 2 MiB",
        f"as root: sysctl vm.nr_hugepages=N, {more} more than now; a container also needs a limit of hugepages-2Mi",
    )  # fmt: skip


def default_arena_bytes(directory: str, workers: int = 1) -> int:
    """Return the size of an arena when none is configured, for each of ``workers`` workers on this host.

    It is 80 % of the tightest bound, divided by the number of workers and rounded down to 2 MiB. Raises SegmentError if
    less than 2 MiB are left for each.
    """
    if workers < 1:
        raise UsageError(f"workers={workers}: at least one is needed")
    least = min(segment_bounds(directory))
    share = least.bytes * DEFAULT_ARENA_PERCENT // 100 // workers // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if share == 0:
        raise SegmentError(f"only {mib(least.bytes)} {least.what}, too little for {workers} arena(s); {least.remedy}")
    return share

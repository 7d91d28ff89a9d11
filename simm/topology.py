"""What this host has and lets us use: NUMA nodes, memory left, huge pages; and how to stay on a node.

Platform facts this module rests on
-----------------------------------
* Linux lists its nodes in ``/sys/devices/system/node``. Node numbers have holes (offline nodes), some
  nodes have memory and no CPUs (CXL, HBM), some CPUs and no memory. A kernel built without NUMA has no
  such directory: that is one node.
* A container sees the whole host there, yet may run on part of it: the CPUs of ``sched_getaffinity``
  and the nodes of ``Mems_allowed_list``. Asking for more is refused by the kernel (EINVAL).
* ``mbind`` and ``set_mempolicy`` are system calls without a libc wrapper; libnuma wraps them. We call
  them by number, which spares a dependency and works in any libc. Their ``maxnode`` argument is one
  more than the number of bits the kernel reads (it has been off by one since 2.6; see BUGS in mbind(2)).
* What a container may use of the memory is in its cgroup, not in /proc/meminfo, which is the host's.
* Default container seccomp profiles refuse both with EPERM. Binding is an optimisation, never a
  condition for running, so a refusal is reported, not raised.

``sys_root`` is the directory that holds ``sys`` and ``proc``; tests give a tree of their own.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from simm.errors import ConfigError, UsageError

_MPOL_PREFERRED = 1
_MPOL_BIND = 2
_MASK_WORD_BITS = 64

#: (mbind, set_mempolicy) by machine; aarch64 uses the kernel's generic table.
_SYSCALLS = {"x86_64": (237, 238), "aarch64": (235, 237)}

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.syscall.restype = ctypes.c_long


@dataclass(frozen=True)
class Node:
    """One NUMA node. `cpus` is empty for a memory-only node, `memory_bytes` 0 for one without memory."""

    id: int
    cpus: tuple[int, ...]
    memory_bytes: int


@dataclass(frozen=True)
class Outcome:
    """What became of a request to the kernel: true when done, else `reason` says why not."""

    done: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.done


def _parse_list(text: str) -> tuple[int, ...]:
    """Read the kernel's list format, ``0-3,8,10-11``. ValueError when it is none."""
    found: set[int] = set()
    for part in text.strip().split(","):
        if not part:
            continue
        first, dash, last = part.partition("-")
        found.update(range(int(first), int(last if dash else first) + 1))
    return tuple(sorted(found))


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return None


def _kib_field(text: str | None, field: str) -> int | None:
    """Bytes of a ``Field:   123 kB`` line, as both meminfo files have them."""
    found = re.search(rf"\b{re.escape(field)}:\s+(\d+) kB", text or "")
    return int(found.group(1)) << 10 if found else None


def meminfo_bytes(field: str, sys_root: str = "/") -> int | None:
    """One field of ``/proc/meminfo`` in bytes (``MemTotal``, ``MemAvailable``...), None when absent."""
    return _kib_field(_read(Path(sys_root, "proc/meminfo")), field)


def _number(path: Path) -> int | None:
    """The number in a one-line file; None when absent, or not a number ("max"), or v1's "unlimited"."""
    try:
        value = int(path.read_text())
    except (OSError, ValueError):
        return None
    return value if value < 1 << 60 else None


def _inactive_file_bytes(path: Path, field: str) -> int:
    try:
        found = re.search(rf"^{field} (\d+)$", path.read_text(), re.M)
    except OSError:
        return 0
    return int(found.group(1)) if found else 0


def memory_limit_bytes(sys_root: str = "/") -> int | None:
    """Bytes that this process's memory cgroups still allow; None when none of them has a limit.

    Limit less working set (usage without inactive file cache, which the kernel drops first), least over the
    cgroup and its ancestors, v1 and v2. Inside a container the cgroup's own path is often not visible and
    the mount's root stands for it, so the walk ends there in any case.
    """
    root = Path(sys_root, "sys/fs/cgroup")
    try:
        lines = Path(sys_root, "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    left: list[int] = []
    for base, kind, limit_file, usage_file, field in (
        (root, "", "memory.max", "memory.current", "inactive_file"),
        (root / "memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
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
                working_set = (usage or 0) - _inactive_file_bytes(directory / "memory.stat", field)
                left.append(max(0, limit - max(0, working_set)))
            if directory == base:
                break
    return min(left, default=None)


def huge_pages_allowed(sys_root: str = "/") -> bool:
    """Whether MADV_HUGEPAGE may have an effect on shared memory here, by the kernel's own switches."""
    base = Path(sys_root, "sys/kernel/mm/transparent_hugepage")

    def chosen(path: Path) -> str:
        try:
            found = re.search(r"\[(\w+)\]", path.read_text())
        except OSError:
            return ""
        return found.group(1) if found else ""

    general = chosen(base / "shmem_enabled")
    own = chosen(base / "hugepages-2048kB/shmem_enabled")  # Linux 6.10 and later
    effective = general if own in ("", "inherit") or general in ("deny", "force") else own
    return effective in ("always", "within_size", "advise", "force")


def nodes(sys_root: str = "/") -> list[Node]:
    """The online NUMA nodes in ascending order; never empty.

    A machine that does not list any is one node, 0, with every CPU this process may use.
    """
    base = Path(sys_root, "sys/devices/system/node")
    found: list[Node] = []
    try:
        online = _parse_list(_read(base / "online") or "")
    except ValueError:
        online = ()
    for number in online:
        meminfo = _read(base / f"node{number}" / "meminfo")
        try:
            cpus = _parse_list(_read(base / f"node{number}" / "cpulist") or "")
        except ValueError:
            cpus = ()
        if meminfo is not None or cpus:
            found.append(Node(number, cpus, _kib_field(meminfo, "MemTotal") or 0))
    total = meminfo_bytes("MemTotal", sys_root) or 0
    if len(found) == 1:
        # Some guests (memory hotplug, seen in practice) count only the memory of boot here; a sole node has all.
        return [Node(found[0].id, found[0].cpus, max(found[0].memory_bytes, total))]
    if found:
        return found
    return [Node(0, tuple(sorted(os.sched_getaffinity(0))), total)]


def node_free_bytes(node: int, sys_root: str = "/") -> int | None:
    """Bytes a node can still give without swapping: free, plus clean file cache and slabs. None = not told."""
    text = _read(Path(sys_root, f"sys/devices/system/node/node{node}/meminfo"))
    free = _kib_field(text, "MemFree")
    if free is None:
        return None
    return free + sum(_kib_field(text, name) or 0 for name in ("Inactive(file)", "SReclaimable"))


def allowed_memory_nodes(sys_root: str = "/") -> tuple[int, ...] | None:
    """Nodes from which this process's cpuset lets it take memory; None when the kernel does not say."""
    found = re.search(r"^Mems_allowed_list:\s*(\S+)", _read(Path(sys_root, "proc/self/status")) or "", re.M)
    try:
        return _parse_list(found.group(1)) if found else None
    except ValueError:
        return None


def own_node(sys_root: str = "/", *, allowed_cpus: Collection[int] | None = None) -> int:
    """The node with all CPUs that this process may use (numactl, taskset, a cpuset); -1 when they lie on several."""
    cpus = set(os.sched_getaffinity(0) if allowed_cpus is None else allowed_cpus)
    found = nodes(sys_root)
    if len(found) < 2:
        return -1
    return next((node.id for node in found if cpus and cpus <= set(node.cpus)), -1)


def parse_numa(spec: str, sys_root: str = "/", *, allowed_cpus: Collection[int] | None = None) -> list[int]:
    """Turn ``"0"``, ``"0,1"`` or ``"all"`` into node numbers, one worker each.

    ``all`` takes the nodes on which a worker can both run and allocate here: memory-only nodes and those
    outside the container's cpuset are left out. A node named outright need only have memory and be allowed.

    Raises ConfigError, naming the nodes that exist.
    """
    known = {node.id: node for node in nodes(sys_root)}
    mems = allowed_memory_nodes(sys_root)
    cpus = set(os.sched_getaffinity(0) if allowed_cpus is None else allowed_cpus)
    there = ", ".join(str(number) for number in known)

    def has_memory(node: Node) -> bool:
        return (node.memory_bytes > 0 or len(known) == 1) and (mems is None or node.id in mems)

    if spec.strip() == "all":
        usable = [node.id for node in known.values() if has_memory(node) and cpus.intersection(node.cpus)]
        if not usable:
            raise ConfigError(
                f"numa=all: no node has both CPUs and memory that this process may use (nodes here: {there}); "
                "widen the container's cpuset, or name a node"
            )
        return usable
    chosen: list[int] = []
    for part in spec.split(","):
        if not re.fullmatch(r"[0-9]{1,6}", part.strip()):
            raise ConfigError(f"numa={spec!r} is no list of nodes; write 'all' or some of: {there}")
        number = int(part)
        if number in chosen:
            raise ConfigError(f"numa={spec!r} names node {number} twice")
        if number not in known:
            raise ConfigError(f"numa={spec!r}: there is no node {number} here; nodes: {there}")
        if not has_memory(known[number]):
            raise ConfigError(
                f"numa={spec!r}: node {number} has no memory that this process may use (nodes here: {there}, "
                f"allowed by its cpuset: {'all' if mems is None else mems})"
            )
        chosen.append(number)
    return chosen


def pin(node: int, sys_root: str = "/") -> tuple[int, ...]:
    """Keep the calling thread, and the threads and children it starts, on a node's CPUs.

    Only CPUs already allowed are kept, so a container's cpuset and an operator's taskset stay respected.
    Returns the CPUs now allowed; ``()`` when the node has none of them (memory-only, outside the cpuset)
    or the kernel refused, and then nothing has changed. UsageError for a node that does not exist.
    """
    by_id = {each.id: each for each in nodes(sys_root)}
    if node not in by_id:
        raise UsageError(f"there is no NUMA node {node}; nodes: {', '.join(map(str, by_id))}")
    cpus = sorted(set(by_id[node].cpus) & os.sched_getaffinity(0))
    if not cpus:
        return ()
    try:
        os.sched_setaffinity(0, cpus)
    except OSError:
        return ()
    return tuple(cpus)


def _policy_call(which: int, node: int, before: tuple[ctypes.c_void_p | ctypes.c_ulong, ...], mode: int,
                 after: tuple[ctypes.c_ulong, ...]) -> Outcome:  # fmt: skip
    """Make one of the two policy calls: arguments before the mode, mode, node mask, its size, the rest."""
    numbers = _SYSCALLS.get(platform.machine())
    if numbers is None:
        return Outcome(False, f"no system call number known for {platform.machine()}")
    words = node // _MASK_WORD_BITS + 1
    mask = (ctypes.c_uint64 * words)()
    mask[node // _MASK_WORD_BITS] = 1 << (node % _MASK_WORD_BITS)
    result = _LIBC.syscall(
        ctypes.c_long(numbers[which]), *before, ctypes.c_ulong(mode), ctypes.byref(mask),
        ctypes.c_ulong(words * _MASK_WORD_BITS + 1), *after,
    )  # fmt: skip
    if result == 0:
        return Outcome(True)
    number = ctypes.get_errno()
    hint = {
        errno.EPERM: "; the container's seccomp profile forbids it (allow mbind and set_mempolicy, or CAP_SYS_NICE)",
        errno.ENOSYS: "; this kernel has no NUMA support",
        errno.EINVAL: "; the node is offline, has no memory, or lies outside this cpuset",
    }.get(number, "")
    return Outcome(False, f"{os.strerror(number)}{hint}")


def bind_memory(addr: int, length: int, node: int, sys_root: str = "/") -> Outcome:
    """Have the pages of a mapping, once faulted in, come from one node only (``mbind``, ``MPOL_BIND``).

    addr: page-aligned start; length: bytes. On a shared mapping of tmpfs the policy belongs to the file,
    so it holds whoever faults the page. Pages already present stay where they are. On a machine with one
    node there is nothing to do, and the outcome is false and says so.

    MPOL_BIND kills rather than spills when the node runs out: check `node_free_bytes` first.
    """
    if len(nodes(sys_root)) < 2:
        return Outcome(False, "this machine has one NUMA node")
    return _policy_call(
        0, node, (ctypes.c_void_p(addr), ctypes.c_ulong(length)), _MPOL_BIND, (ctypes.c_ulong(0),)
    )


def prefer_node(node: int, sys_root: str = "/") -> Outcome:
    """Let the calling thread's own allocations come from `node` first (``set_mempolicy``, ``MPOL_PREFERRED``).

    Unlike a binding it spills to other nodes when `node` is full. Nothing to do on a machine with one node.
    """
    if len(nodes(sys_root)) < 2:
        return Outcome(False, "this machine has one NUMA node")
    return _policy_call(1, node, (), _MPOL_PREFERRED, ())


_sched_getcpu = ctypes.CDLL(None).sched_getcpu


def current_cpu() -> int:
    """The CPU that the calling thread runs on at this moment; -1 where that cannot be told. 0.3 us."""
    return int(_sched_getcpu())


def step_aside(cpu: int) -> bool:
    """Leave ``cpu`` if we run on it and may run elsewhere; afterwards all our CPUs are allowed again.

    For a process that was woken by one it is going to poll for: schedulers like to put the woken beside the
    waker, where the two would take turns instead of working at the same time.
    """
    if current_cpu() != cpu:
        return False
    allowed = os.sched_getaffinity(0)
    if cpu not in allowed or len(allowed) < 2:
        return False
    try:
        os.sched_setaffinity(0, allowed - {cpu})
        os.sched_setaffinity(0, allowed)
    except OSError:
        return False
    return True

"""NUMA nodes of the host, and ways to stay on one: CPU affinity and memory policy.

Platform facts that this module relies on
-----------------------------------------
* Linux lists its nodes in ``/sys/devices/system/node``. Node numbers have gaps (offline nodes). Some nodes have memory
  and no CPUs (CXL, HBM), some have CPUs and no memory. A kernel built without NUMA has no such directory; that counts
  as one node.
* A container sees the whole host there, but may run on part of it: the CPUs of ``sched_getaffinity`` and the nodes of
  ``Mems_allowed_list``. The kernel refuses a request for more with EINVAL.
* ``mbind`` has no libc wrapper; libnuma wraps it. Calling it by number saves a dependency and works with any libc. Its
  ``maxnode`` argument is one more than the number of bits that the kernel reads (off by one since 2.6; see BUGS in
  mbind(2)).
* The default seccomp profiles of containers refuse it with EPERM. Binding is an optimisation and no condition for
  running, so a refusal is reported and not raised.

``sys_root`` is the directory that holds ``sys`` and ``proc``. Tests pass a tree of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import platform
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..constants import HUGE_PAGE_BYTES
from ..errors import ConfigError, UsageError
from .memory import field_bytes, meminfo_bytes, text_of

_MPOL_BIND = 2
_MASK_WORD_BITS = 64

#: Number of mbind by machine; aarch64 uses the kernel's generic table.
_MBIND = {"x86_64": 237, "aarch64": 235}

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.syscall.restype = ctypes.c_long


@dataclass(frozen=True)
class Node:
    """A NUMA node. ``cpus`` is empty for a memory-only node, ``memory_bytes`` is 0 for a node without memory."""

    id: int
    cpus: tuple[int, ...]
    memory_bytes: int


@dataclass(frozen=True)
class Outcome:
    """The result of a request to the kernel: true if done, otherwise ``reason`` says why not."""

    done: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.done


def _parse_list(text: str) -> tuple[int, ...]:
    """Parse the kernel's list format, ``0-3,8,10-11``. Raises ValueError for another format."""
    found: set[int] = set()
    for part in text.strip().split(","):
        if not part:
            continue
        first, dash, last = part.partition("-")
        found.update(range(int(first), int(last if dash else first) + 1))
    return tuple(sorted(found))


def nodes(sys_root: str = "/") -> list[Node]:
    """Return the online NUMA nodes in ascending order; never an empty list.

    A machine that lists none counts as one node, 0, with every CPU that this process may use.
    """
    base = Path(sys_root, "sys/devices/system/node")
    found: list[Node] = []
    try:
        online = _parse_list(text_of(base / "online") or "")
    except ValueError:
        online = ()
    for number in online:
        meminfo = text_of(base / f"node{number}" / "meminfo")
        try:
            cpus = _parse_list(text_of(base / f"node{number}" / "cpulist") or "")
        except ValueError:
            cpus = ()
        if meminfo is not None or cpus:
            found.append(Node(number, cpus, field_bytes(meminfo, "MemTotal") or 0))
    total = meminfo_bytes("MemTotal", sys_root) or 0
    if len(found) == 1:
        # Some guests with memory hotplug count only the memory present at boot here. A sole node has all of it.
        return [Node(found[0].id, found[0].cpus, max(found[0].memory_bytes, total))]
    if found:
        return found
    return [Node(0, tuple(sorted(os.sched_getaffinity(0))), total)]


def node_free_bytes(node: int, sys_root: str = "/") -> int | None:
    """Return the bytes that a node can allocate without swapping, None if the kernel does not say.

    The sum of free memory, clean file cache and reclaimable slabs. The active part of the cache counts, such as files
    that programs have mapped: the kernel takes that too before a bound allocation fails. Pages that are to be written
    first do not count, as their disk may be slow. An upper bound: MemAvailable, which is of the whole host, leaves out
    the kernel's reserve and a part of cache and slabs.
    """
    text = text_of(Path(sys_root, f"sys/devices/system/node/node{node}/meminfo"))
    free = field_bytes(text, "MemFree")
    if free is None:
        return None

    def total(*names: str) -> int:
        return sum(field_bytes(text, name) or 0 for name in names)

    cache = total("Active(file)", "Inactive(file)") - total("Dirty", "Writeback")
    return free + max(0, cache) + total("SReclaimable")


def share_of_nodes(
    chosen: Sequence[int], sys_root: str = "/", *, free: Callable[[int, str], int | None] | None = None
) -> tuple[int, int] | None:
    """Return the bytes that each worker can have of its node, if all are to have the same, and the node with no more.

    ``chosen``: the node of each worker. ``free`` says what a node has, by default :func:`node_free_bytes`. None if no
    node sets a limit: there is only one, the kernel lets this process bind no memory, or it does not say what is free.
    """
    with contextlib.closing(mmap.mmap(-1, mmap.PAGESIZE)) as page:
        at = ctypes.c_char.from_buffer(page)
        bound = [node for node in set(chosen) if bind_memory(ctypes.addressof(at), mmap.PAGESIZE, node, sys_root)]
        del at  # or the page cannot be closed
    free = free or node_free_bytes
    left = [(free(node, sys_root), node) for node in bound]
    return min(((each // chosen.count(node), node) for each, node in left if each is not None), default=None)


def reserved_free_bytes(node: int, sys_root: str = "/") -> int | None:
    """Return the bytes of a node's free HugeTLB pages of 2 MiB, None if the kernel does not say."""
    pages = f"hugepages/hugepages-{HUGE_PAGE_BYTES >> 10}kB/free_hugepages"
    text = text_of(Path(sys_root, f"sys/devices/system/node/node{node}", pages))
    return int(text) * HUGE_PAGE_BYTES if text and text.strip().isdecimal() else None


def allowed_memory_nodes(sys_root: str = "/") -> tuple[int, ...] | None:
    """Return the nodes from which the cpuset lets this process allocate, None if the kernel does not say."""
    found = re.search(r"^Mems_allowed_list:\s*(\S+)", text_of(Path(sys_root, "proc/self/status")) or "", re.M)
    try:
        return _parse_list(found.group(1)) if found else None
    except ValueError:
        return None


def own_node(sys_root: str = "/", *, allowed_cpus: Collection[int] | None = None) -> int:
    """Return the node that has all CPUs of this process (numactl, taskset, a cpuset), -1 if several nodes have them."""
    cpus = set(os.sched_getaffinity(0) if allowed_cpus is None else allowed_cpus)
    found = nodes(sys_root)
    if len(found) < 2:
        return -1
    return next((node.id for node in found if cpus and cpus <= set(node.cpus)), -1)


def parse_numa(spec: str, sys_root: str = "/", *, allowed_cpus: Collection[int] | None = None) -> list[int]:
    """Return the node numbers of ``"0"``, ``"0,1"`` or ``"all"``. Each gets as many workers.

    ``all`` selects the nodes on which a worker can both run and allocate. It omits memory-only nodes and nodes outside
    the container's cpuset. An explicitly named node only needs memory that the cpuset allows.

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
            raise ConfigError(f"numa={spec!r} is not a list of nodes; use 'all' or some of: {there}")
        number = int(part)
        if number in chosen:
            raise ConfigError(f"numa={spec!r} names node {number} twice; --workers says how many workers a node gets")
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
    """Restrict the calling thread, and the threads and children that it starts, to a node's CPUs.

    The result stays within the CPUs allowed before, so a container's cpuset and an operator's taskset hold. Returns
    the CPUs now allowed. Returns ``()`` and changes nothing if the node has none of them (a memory-only node, or one
    outside the cpuset) or the kernel refuses. Raises UsageError for a node that does not exist.
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


def bind_memory(addr: int, length: int, node: int, sys_root: str = "/") -> Outcome:
    """Bind the pages of a mapping to one node (``mbind``, ``MPOL_BIND``). Pages that are present do not move.

    ``addr`` is the page-aligned start and ``length`` the size in bytes. On a shared mapping of tmpfs the policy belongs
    to the file, so it holds for every process that faults a page in. On a machine with one node this does nothing, and
    the outcome is false.

    With MPOL_BIND the kernel kills the process when the node runs out, so check :func:`node_free_bytes` first.
    """
    if len(nodes(sys_root)) < 2:
        return Outcome(False, "this machine has one NUMA node")
    number = _MBIND.get(platform.machine())
    if number is None:
        return Outcome(False, f"no system call number known for {platform.machine()}")
    words = node // _MASK_WORD_BITS + 1
    mask = (ctypes.c_uint64 * words)()
    mask[node // _MASK_WORD_BITS] = 1 << (node % _MASK_WORD_BITS)
    result = _LIBC.syscall(
        ctypes.c_long(number), ctypes.c_void_p(addr), ctypes.c_ulong(length), ctypes.c_ulong(_MPOL_BIND),
        ctypes.byref(mask), ctypes.c_ulong(words * _MASK_WORD_BITS + 1), ctypes.c_ulong(0),
    )  # fmt: skip
    if result == 0:
        return Outcome(True)
    error = ctypes.get_errno()
    hint = {
        errno.EPERM: "; the container's seccomp profile forbids it (allow mbind and set_mempolicy, or CAP_SYS_NICE)",
        errno.ENOSYS: "; this kernel has no NUMA support",
        errno.EINVAL: "; the node is offline, has no memory, or lies outside this cpuset",
    }.get(error, "")
    return Outcome(False, f"{os.strerror(error)}{hint}")


_sched_getcpu = ctypes.CDLL(None).sched_getcpu


def current_cpu() -> int:
    """Return the CPU that the calling thread runs on now, -1 if it is unknown."""
    return int(_sched_getcpu())


def avoid_cpu(cpu: int) -> bool:
    """Migrate away from ``cpu`` and return True, if the thread runs on it and may run elsewhere.

    Does not change which CPUs are allowed. For a process that polls for the process that woke it: schedulers tend to
    put both on one CPU, where they would take turns instead of running in parallel.
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

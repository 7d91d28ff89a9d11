"""Is this host fit for SiMM? Checks that look, judge, and say what to do; they change nothing.

Each check is a function of ``sys_root`` (the directory that holds ``proc``, ``sys``, ``dev``...; tests give
trees of their own) and returns one `Finding`. Limits of the process and facts of the interpreter are those of
the running one. Judgements:

* ``fail``: a data server will not start here, or would give wrong data.
* ``warn``: it runs, with less memory, speed or safety than the host could give.
* ``ok``: nothing to do; ``remedy`` is empty then.

A check that cannot see what it needs says so in its detail instead of guessing. One that breaks is itself a
finding, so that the others are still told.
"""

from __future__ import annotations

import mmap
import os
import platform
import re
import resource
import sys
from collections.abc import Callable
from pathlib import Path

from simm import pages, shm, topology
from simm.doctor_rdma import check_memlock, check_pyverbs, check_rails, check_rdma_access, check_rdma_devices
from simm.errors import SimmError
from simm.findings import Finding, entries, gib, limit, text

#: What all names of SiMM's segments begin with, for the check on leftovers.
SEGMENT_PREFIX = "simm"
#: Docker's default is 64 MiB, which holds no arena worth having.
SHM_BYTES_MIN = 256 << 20
#: Each client takes a socket and a pidfd, each TCP stream a socket more.
OPEN_FILES_MIN = 4096
#: The initial pid namespace has this fixed inode number (PROC_PID_INIT_INO in the kernel).
_INITIAL_PID_NAMESPACE = "pid:[4026531836]"
#: Users below this are system users, whose segments logind leaves alone.
_FIRST_REGULAR_UID = 1000


# --------------------------------------------------------------------------------------------- memory


def check_shm_size(sys_root: str = "/") -> Finding:
    """Size of /dev/shm against the machine's memory."""
    name = "shm-size"
    try:
        state = os.statvfs(Path(sys_root, "dev/shm"))
    except OSError as error:
        return Finding(
            name, "fail", f"/dev/shm: {error.strerror}", "mount -t tmpfs -o mode=1777,size=50% tmpfs /dev/shm"
        )
    total, free = state.f_blocks * state.f_frsize, state.f_bavail * state.f_frsize
    memory = topology.meminfo_bytes("MemTotal", sys_root)
    detail = f"/dev/shm: {gib(free)} free of {gib(total)}, memory: {gib(memory) if memory else 'unknown'}"
    remedy = (
        "mount -o remount,size=80% /dev/shm (docker: --shm-size=64g; "
        "kubernetes: an emptyDir with medium: Memory on /dev/shm)"
    )
    if free < SHM_BYTES_MIN:
        return Finding(name, "fail", detail, remedy)
    if memory and total < memory // 2:
        return Finding(name, "warn", f"{detail}: arenas can take less than half of the memory", remedy)
    return Finding(name, "ok", detail)


def check_memory_limit(sys_root: str = "/") -> Finding:
    """What the memory cgroup leaves."""
    name = "cgroup-memory"
    left = topology.memory_limit_bytes(sys_root)
    if left is None:
        return Finding(name, "ok", "no memory cgroup limits this process")
    detail = f"the memory cgroup leaves {gib(left)}"
    remedy = "raise the container's memory limit (docker: --memory; kubernetes: resources.limits.memory); arenas count"
    if left < SHM_BYTES_MIN:
        return Finding(name, "fail", detail, remedy)
    available = topology.meminfo_bytes("MemAvailable", sys_root)
    if available is not None and left < available // 2:
        return Finding(name, "warn", f"{detail} of {gib(available)} available on the host", remedy)
    return Finding(name, "ok", detail)


def check_overcommit(sys_root: str = "/") -> Finding:
    """Strict overcommit accounting refuses large mappings that other programs need."""
    name = "overcommit"
    mode = text(sys_root, "proc/sys/vm/overcommit_memory")
    if mode == "2":
        return Finding(
            name,
            "warn",
            "vm.overcommit_memory=2: faulted-in arenas count against the commit limit of all programs",
            "sysctl vm.overcommit_memory=0, or raise vm.overcommit_ratio by the arenas' share of memory",
        )
    return Finding(name, "ok", f"vm.overcommit_memory={mode or 'unknown'}")


def check_huge_pages(sys_root: str = "/") -> Finding:
    """Transparent huge pages for shared memory."""
    name = "huge-pages"
    switch = text(sys_root, "sys/kernel/mm/transparent_hugepage/shmem_enabled")
    if switch is None:
        return Finding(name, "ok", "this kernel has no transparent huge pages for shared memory")
    if topology.huge_pages_allowed(sys_root):
        return Finding(name, "ok", f"huge pages for shared memory: {switch}")
    return Finding(
        name,
        "warn",
        f"huge pages for shared memory: {switch}",
        "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled (as root, before the server starts)",
    )


def check_populate(sys_root: str = "/") -> Finding:
    """Whether the kernel can fault pages in without touching them, and has memfd."""
    name = "populate"
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        populate = pages.populate_read(page)
    missing = [] if populate else ["MADV_POPULATE (Linux 5.14)"]
    if not hasattr(os, "memfd_create"):
        missing.append("memfd_create")
    release = platform.release()
    if not missing:
        return Finding(name, "ok", f"Linux {release}: MADV_POPULATE and memfd_create are there")
    return Finding(
        name,
        "warn",
        f"Linux {release} lacks {' and '.join(missing)}: slower starts and first copies",
        "use Linux 5.14 or newer and a Python built against its headers",
    )


def check_leftovers(sys_root: str = "/") -> Finding:
    """Segments of dead owners, which hold memory until the next start removes them."""
    name = "leftovers"
    found = shm.leftovers(SEGMENT_PREFIX)
    if not found:
        return Finding(name, "ok", f"no segments of dead owners in {shm.SHM_DIR}")
    held = 0
    for each in found:
        try:
            held += os.stat(f"{shm.SHM_DIR}/{each}").st_blocks * 512
        except OSError:
            continue  # removed meanwhile
    return Finding(
        name,
        "warn",
        f"{len(found)} segments of dead owners hold {gib(held)}: {', '.join(found[:4])}{'...' if found[4:] else ''}",
        f"start the data server again, which removes them, or: rm {shm.SHM_DIR}/{found[0]}",
    )


def check_remove_ipc(sys_root: str = "/") -> Finding:
    """logind removes a regular user's /dev/shm files at logout unless told not to."""
    name = "remove-ipc"
    if not Path(sys_root, "run/systemd/system").is_dir():
        return Finding(name, "ok", "systemd does not run here")
    if os.geteuid() < _FIRST_REGULAR_UID:
        return Finding(name, "ok", f"uid {os.geteuid()} is a system user, whose segments logind leaves alone")
    setting = "yes"
    files = [f"etc/systemd/logind.conf.d/{each}" for each in entries(sys_root, "etc/systemd/logind.conf.d")]
    for path in ("etc/systemd/logind.conf", *(each for each in files if each.endswith(".conf"))):
        for value in re.findall(r"^\s*RemoveIPC\s*=\s*(\S+)", text(sys_root, path) or "", re.M):
            setting = value
    if setting.lower() in ("no", "false", "off", "0"):
        return Finding(name, "ok", "logind keeps /dev/shm files at logout (RemoveIPC=no)")
    return Finding(
        name,
        "warn",
        f"logind removes this user's /dev/shm files when the last session ends (RemoveIPC={setting})",
        "set RemoveIPC=no in /etc/systemd/logind.conf, or run the server as a system user",
    )


# ------------------------------------------------------------------------------------------ processors


def check_cpus(sys_root: str = "/") -> Finding:
    """CPUs this process may use."""
    name = "cpus"
    count = len(os.sched_getaffinity(0))
    if count > 1:
        return Finding(name, "ok", f"{count} of {os.cpu_count()} CPUs are allowed")
    return Finding(
        name,
        "warn",
        "one CPU is allowed: server and engine take turns on it, and every RPC waits for a switch",
        "allow more CPUs (taskset, docker: --cpuset-cpus, kubernetes: resources.requests.cpu)",
    )


def check_numa(sys_root: str = "/") -> Finding:
    """NUMA nodes, and whether the kernel reclaims a node's cache before it looks at the next node."""
    name = "numa"
    found = topology.nodes(sys_root)
    seen = "; ".join(f"node {each.id}: {len(each.cpus)} CPUs, {gib(each.memory_bytes)}" for each in found)
    mode = text(sys_root, "proc/sys/vm/zone_reclaim_mode") or "0"
    if mode != "0" and len(found) > 1:
        return Finding(name, "warn", f"{seen}; vm.zone_reclaim_mode={mode}", "sysctl vm.zone_reclaim_mode=0")
    return Finding(name, "ok", seen)


def check_machine(sys_root: str = "/") -> Finding:
    """The one-sided read path relies on the order in which x86-64 makes loads and stores visible."""
    name = "machine"
    machine = platform.machine()
    detail = f"{machine}, {sys.byteorder}-endian, {sys.maxsize.bit_length() + 1} bits"
    if sys.byteorder != "little" or sys.maxsize < 1 << 32:
        return Finding(name, "fail", detail, "SiMM runs on 64-bit little-endian machines only")
    if machine != "x86_64":
        return Finding(
            name, "warn", f"{detail}: one-sided reads stay off, GETs ask the worker", "use x86-64 for full speed"
        )
    return Finding(name, "ok", detail)


# ------------------------------------------------------------------------------------ process, container


def check_open_files(sys_root: str = "/") -> Finding:
    """RLIMIT_NOFILE."""
    name = "open-files"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    detail = f"open files: {limit(soft)} (hard limit {limit(hard)})"
    if soft == resource.RLIM_INFINITY or soft >= OPEN_FILES_MIN:
        return Finding(name, "ok", detail)
    return Finding(
        name,
        "warn",
        f"{detail}: each client takes two or three",
        f"ulimit -n {OPEN_FILES_MIN * 16} (systemd: LimitNOFILE=; docker: --ulimit nofile=)",
    )


def check_python(sys_root: str = "/") -> Finding:
    """Version and build of the interpreter."""
    name = "python"
    version = sys.version_info[:2]
    detail = f"{platform.python_implementation()} {platform.python_version()}"
    if version < (3, 10) or platform.python_implementation() != "CPython":
        return Finding(name, "fail", detail, "use CPython 3.10 to 3.13")
    if version > (3, 13) or not getattr(sys, "_is_gil_enabled", lambda: True)():
        return Finding(name, "warn", f"{detail}: not tested with SiMM", "use CPython 3.10 to 3.13 with the GIL")
    return Finding(name, "ok", detail)


def check_container(sys_root: str = "/") -> Finding:
    """In a container, engines elsewhere may see neither our segments nor our pids."""
    name = "container"
    try:
        namespace = os.readlink(Path(sys_root, "proc/self/ns/pid"))
    except OSError:
        namespace = ""
    marks = [each for each in (".dockerenv", "run/.containerenv") if Path(sys_root, each).exists()]
    if Path(sys_root, "var/run/secrets/kubernetes.io").is_dir():
        marks.append("kubernetes")
    own_pids = namespace not in ("", _INITIAL_PID_NAMESPACE)
    if not marks and not own_pids:
        return Finding(name, "ok", "no container seen")
    seen = ", ".join([*marks, *(["a pid namespace of its own"] if own_pids else [])])
    return Finding(
        name,
        "warn",
        f"this is a container ({seen}): engines outside it reach the server by TCP only unless /dev/shm is shared",
        "run server and engines with one --ipc and --pid (docker: --ipc=host --pid=host; kubernetes: one pod, "
        "shareProcessNamespace: true, one emptyDir with medium: Memory on /dev/shm)",
    )


CHECKS: tuple[Callable[[str], Finding], ...] = (
    check_python,
    check_machine,
    check_cpus,
    check_numa,
    check_shm_size,
    check_memory_limit,
    check_overcommit,
    check_huge_pages,
    check_populate,
    check_memlock,
    check_open_files,
    check_rdma_devices,
    check_rdma_access,
    check_rails,
    check_pyverbs,
    check_container,
    check_remove_ipc,
    check_leftovers,
)


def run_checks(sys_root: str = "/") -> list[Finding]:
    """Run every check, in an order fit for reading. Never raises; takes a few milliseconds."""
    findings = []
    for check in CHECKS:
        try:
            findings.append(check(sys_root))
        except (OSError, ValueError, SimmError) as error:
            name = check.__name__.removeprefix("check_").replace("_", "-")
            remedy = "run it as the server's user; if it still breaks, report it with this line"
            findings.append(Finding(name, "warn", f"could not be checked: {error}", remedy))
    return findings

"""``simm doctor``: checks that report what on this host would make SiMM fail or slow, and the remedy.

Each check is a function of ``sys_root``, the directory that holds ``proc``, ``sys`` and ``dev``; tests pass trees of
their own. It changes nothing and returns one :class:`Finding`. Limits and interpreter are those of this process.

* ``fail``: a data server does not start on this host, or would return wrong data.
* ``warn``: it runs with less memory, speed or safety than the host could give.
* ``ok``: there is nothing to do, and ``remedy`` is empty.

A check that lacks information says so in its detail and does not guess. A check that raises is itself a finding, so the
others still run.
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

from simm import shm
from simm.constants import ARENA_BYTES_MIN
from simm.errors import SimmError
from simm.host import memory, numa, pages
from simm.ipc.segments import ArenaName, metadata_of
from simm.tools.doctor_arenas import check_value_size, check_workers, held_by_arenas, suspended
from simm.tools.doctor_rdma import check_memlock, check_pyverbs, check_rails, check_rdma_access, check_rdma_devices
from simm.tools.doctor_tls import check_settings, check_tls
from simm.tools.findings import Finding, Verdict, check, entries, fail, gib, limit, ok, text, warn

#: Prefix of all names of SiMM's segments, and of those of ``simm bench``.
SEGMENT_PREFIX = "simm-"
BENCH_PREFIX = "simm-bench-"
#: Docker's default of 64 MiB is too small for a useful arena.
SHM_BYTES_MIN = 256 << 20
#: What /dev/shm should be of the machine's memory, percent.
SHM_PERCENT = 80
#: Each client takes a socket and a pidfd, and each TCP stream one more socket.
OPEN_FILES_MIN = 4096
#: The initial pid namespace has this fixed inode number (PROC_PID_INIT_INO in the kernel).
_INITIAL_PID_NAMESPACE = "pid:[4026531836]"
#: Users below this uid are system users, whose segments logind does not remove.
_FIRST_REGULAR_UID = 1000


# --------------------------------------------------------------------------------------------- memory


@check("shm-size")
def check_shm_size(sys_root: str) -> Verdict:
    """Compare the size of /dev/shm with the machine's memory."""
    try:
        state = os.statvfs(Path(sys_root, "dev/shm"))
    except OSError as error:
        return fail(f"/dev/shm: {error.strerror}", "mount -t tmpfs -o mode=1777,size=50% tmpfs /dev/shm")
    total, free = state.f_blocks * state.f_frsize, state.f_bavail * state.f_frsize
    installed = memory.meminfo_bytes("MemTotal", sys_root)
    held = held_by_arenas(sys_root)
    arenas = held.named
    detail = f"/dev/shm: {gib(free)} free of {gib(total)}, memory: {gib(installed) if installed else 'unknown'}"
    if arenas:
        detail = f"{detail}, arenas: {gib(arenas)}"
    if free + arenas < SHM_BYTES_MIN:
        return fail(detail, _more_shm(total, installed))
    if free + arenas - held.unseen < SHM_BYTES_MIN:
        whose = ", ".join(f"uid {uid}" for uid in held.uids)
        return warn(
            f"{detail}: enough only if the {gib(held.unseen)} in files of {whose}, which this user may not open, are "
            "arenas of running servers",
            f"run simm doctor as root, or as {whose}; of other files, see ls -lS /dev/shm",
        )
    if installed and total < installed // 2:
        return warn(f"{detail}: arenas can take less than half of the memory", _more_shm(total, installed))
    return ok(detail)


def _more_shm(total: int, installed: int | None) -> str:
    """Return how to get more room in a /dev/shm of so many bytes: never by a size that may be less than it has."""
    if installed and total >= installed * SHM_PERCENT // 100:
        return "remove other files from /dev/shm, which is large enough: ls -lS /dev/shm (of SiMM's, see leftovers)"
    size = f"{SHM_PERCENT}%" if installed else f"SIZE, with a SIZE above {gib(total)},"
    return (
        f"mount -o remount,size={size} /dev/shm (docker: a larger --shm-size; "
        "kubernetes: an emptyDir with medium: Memory on /dev/shm)"
    )


@check("cgroup-memory")
def check_memory_limit(sys_root: str) -> Verdict:
    """Check the memory that the cgroup leaves for arenas: that of those which are there counts as left.

    Shared memory of a cgroup may be anybody's, and arenas in /dev/shm another cgroup's. Only those are known to count
    here whose owner is in this cgroup, as in one unit or container.
    """
    unused = memory.memory_limit_bytes(sys_root)
    if unused is None:
        return ok("no memory cgroup limits this process")
    arenas = held_by_arenas(sys_root)
    left = memory.memory_limit_bytes(sys_root, spared=arenas.named + arenas.sealed) or unused
    detail = f"the memory cgroup leaves {gib(left)} to arenas"
    remedy = "raise the container's memory limit (docker: --memory; kubernetes: resources.limits.memory); arenas count"
    if left < SHM_BYTES_MIN:
        return fail(detail, remedy)
    available = memory.meminfo_bytes("MemAvailable", sys_root)
    if available is not None and left < (available + left - unused) // 2:
        return warn(f"{detail} of {gib(available + left - unused)} available on the host", remedy)
    known = memory.memory_limit_bytes(sys_root, spared=arenas.here) or unused
    if known < SHM_BYTES_MIN or (available is not None and known < (available + known - unused) // 2):
        return warn(
            f"{detail} only if the shared memory of this cgroup is arenas: without it, {gib(known)}",
            f"run simm doctor in the data server's unit or container, as its user; for another server, {remedy}",
        )
    return ok(detail)


@check("overcommit")
def check_overcommit(sys_root: str) -> Verdict:
    """Check that overcommit accounting is not strict, as it would refuse large mappings to other programs."""
    mode = text(sys_root, "proc/sys/vm/overcommit_memory")
    if mode == "2":
        return warn(
            "vm.overcommit_memory=2: faulted-in arenas count against the commit limit of all programs",
            "sysctl vm.overcommit_memory=0, or raise vm.overcommit_ratio by the arenas' share of memory",
        )
    return ok(f"vm.overcommit_memory={mode or 'unknown'}")


@check("huge-pages")
def check_huge_pages(sys_root: str) -> Verdict:
    """Check transparent huge pages for shared memory."""
    switch = text(sys_root, "sys/kernel/mm/transparent_hugepage/shmem_enabled")
    if switch is None:
        return ok("this kernel has no transparent huge pages for shared memory")
    if memory.huge_pages_allowed(sys_root):
        return ok(f"huge pages for shared memory: {switch}")
    reserved = memory.reserved_bytes(sys_root) + held_by_arenas(sys_root).reserved
    if reserved >= ARENA_BYTES_MIN:
        return ok(f"huge pages for shared memory: {switch}; {memory.mib(reserved)} of reserved ones: see --hugetlb")
    return warn(
        f"huge pages for shared memory: {switch}",
        "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled (as root, before the server starts)",
    )


@check("populate")
def check_populate(sys_root: str) -> Verdict:
    """Check that the kernel can fault pages in without touching them, and has memfd."""
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        populate = pages.populate_read(page)
    missing = [] if populate else ["MADV_POPULATE (Linux 5.14)"]
    if not hasattr(os, "memfd_create"):
        missing.append("memfd_create")
    release = platform.release()
    if not missing:
        return ok(f"Linux {release}: MADV_POPULATE and memfd_create are available")
    return warn(
        f"Linux {release} lacks {' and '.join(missing)}: slower starts and first copies",
        "use Linux 5.14 or newer and a Python built against its headers",
    )


@check("sglang-builtin")
def check_sglang_builtin(sys_root: str) -> Verdict:
    """Check what the SiMM backend in SGLang's own wheel needs. The backend that SiMM brings needs nothing."""
    if Path(sys_root, "sys/class/infiniband").is_dir():
        return ok("SGLang's built-in backend simm finds /sys/class/infiniband")
    if not any(Path(sys_root, "sys/devices/system/cpu").glob("cpu[0-9]*/node0")):
        return ok("SGLang's built-in backend simm does without /sys/class/infiniband here")
    return warn(
        "no /sys/class/infiniband: SGLang's built-in backend simm fails when it starts, RDMA or not",
        "take the flags of `simm engine sglang`, whose backend does not need it; or: modprobe ib_core",
    )


@check("leftovers")
def check_leftovers(sys_root: str) -> Verdict:
    """Look for segments of dead owners, which hold memory until the next start removes them.

    Those of a server that stopped with ``--warm`` hold its values for the next start: nobody is advised to remove them.
    """
    found = shm.leftovers(SEGMENT_PREFIX, _is_ours)
    kept = [each for each in found if suspended(each)]
    dead = [each for each in found if each not in kept]
    first = [f"{shm.SHM_DIR}/{each}" for each in dead if metadata_of(each) == metadata_of(dead[0])]
    waiting = f"{_sum_up(kept, 'arenas')} of servers that stopped with --warm wait for their next start" if kept else ""
    if not dead:
        return ok(waiting or f"no segments of dead owners in {shm.SHM_DIR}")
    return warn(
        f"{_sum_up(dead, 'segments')} of dead owners are left{waiting and f'; {waiting}'}",
        f"start the data server again, which removes its own, or: rm {' '.join(first)}",
    )


def _is_ours(name: str) -> bool:
    """Return whether SiMM made a file of this name: other programs' files may begin alike, and have no lock of ours."""
    return name.startswith(BENCH_PREFIX) or ArenaName.parse(name) is not None


def _sum_up(segments: list[str], what: str) -> str:
    """Return number, size and names of segments; the files of an arena count as one."""
    held = 0
    for each in segments:
        try:
            held += os.stat(f"{shm.SHM_DIR}/{each}").st_blocks * 512
        except OSError:
            continue  # removed meanwhile
    segments = sorted({metadata_of(each) for each in segments})
    return f"{len(segments)} {what} with {gib(held)} ({', '.join(segments[:4])}{'...' if segments[4:] else ''})"


@check("remove-ipc")
def check_remove_ipc(sys_root: str) -> Verdict:
    """Check that logind does not remove this user's /dev/shm files at logout."""
    if not Path(sys_root, "run/systemd/system").is_dir():
        return ok("systemd does not run here")
    if os.geteuid() < _FIRST_REGULAR_UID:
        return ok(f"uid {os.geteuid()} is a system user, whose segments logind leaves alone")
    setting = "yes"
    files = [f"etc/systemd/logind.conf.d/{each}" for each in entries(sys_root, "etc/systemd/logind.conf.d")]
    for path in ("etc/systemd/logind.conf", *(each for each in files if each.endswith(".conf"))):
        for value in re.findall(r"^\s*RemoveIPC\s*=\s*(\S+)", text(sys_root, path) or "", re.M):
            setting = value
    if setting.lower() in ("no", "false", "off", "0"):
        return ok("logind keeps /dev/shm files at logout (RemoveIPC=no)")
    return warn(
        f"logind removes this user's /dev/shm files when the last session ends (RemoveIPC={setting})",
        "set RemoveIPC=no in /etc/systemd/logind.conf, or run the server as a system user",
    )


# ------------------------------------------------------------------------------------------ processors


@check("cpus")
def check_cpus(sys_root: str) -> Verdict:
    """Count the CPUs that this process may use."""
    count = len(os.sched_getaffinity(0))
    if count > 1:
        return ok(f"{count} of {os.cpu_count()} CPUs are allowed")
    return warn(
        "one CPU is allowed: server and engine take turns on it, and every RPC waits for a switch",
        "allow more CPUs (taskset, docker: --cpuset-cpus, kubernetes: resources.requests.cpu)",
    )


@check("numa")
def check_numa(sys_root: str) -> Verdict:
    """List NUMA nodes; check that the kernel does not reclaim a node's cache before it allocates elsewhere."""
    found = numa.nodes(sys_root)
    seen = "; ".join(f"node {each.id}: {len(each.cpus)} CPUs, {gib(each.memory_bytes)}" for each in found)
    mode = text(sys_root, "proc/sys/vm/zone_reclaim_mode") or "0"
    if mode != "0" and len(found) > 1:
        return warn(f"{seen}; vm.zone_reclaim_mode={mode}", "sysctl vm.zone_reclaim_mode=0")
    return ok(seen)


@check("machine")
def check_machine(sys_root: str) -> Verdict:
    """Check the machine: one-sided reads rely on the memory order of x86-64."""
    machine = platform.machine()
    detail = f"{machine}, {sys.byteorder}-endian, {sys.maxsize.bit_length() + 1} bits"
    if sys.byteorder != "little" or sys.maxsize < 1 << 32:
        return fail(detail, "SiMM runs on 64-bit little-endian machines only")
    if machine != "x86_64":
        return warn(f"{detail}: one-sided reads stay off, GETs ask the worker", "use x86-64 for full speed")
    return ok(detail)


# ------------------------------------------------------------------------------------ process, container


@check("open-files")
def check_open_files(sys_root: str) -> Verdict:
    """Check RLIMIT_NOFILE."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    detail = f"open files: {limit(soft)} (hard limit {limit(hard)})"
    if soft == resource.RLIM_INFINITY or soft >= OPEN_FILES_MIN:
        return ok(detail)
    return warn(
        f"{detail}: each client takes two or three",
        f"ulimit -n {OPEN_FILES_MIN * 16} (systemd: LimitNOFILE=; docker: --ulimit nofile=)",
    )


@check("python")
def check_python(sys_root: str) -> Verdict:
    """Check the interpreter's version and build."""
    version = sys.version_info[:2]
    detail = f"{platform.python_implementation()} {platform.python_version()}"
    if version < (3, 10) or platform.python_implementation() != "CPython":
        return fail(detail, "use CPython 3.10 to 3.13")
    if version > (3, 13) or not getattr(sys, "_is_gil_enabled", lambda: True)():
        return warn(f"{detail}: not tested with SiMM", "use CPython 3.10 to 3.13 with the GIL")
    return ok(detail)


@check("container")
def check_container(sys_root: str) -> Verdict:
    """Detect a container: engines outside it may see neither its segments nor its pids."""
    try:
        namespace = os.readlink(Path(sys_root, "proc/self/ns/pid"))
    except OSError:
        namespace = ""
    marks = [each for each in (".dockerenv", "run/.containerenv") if Path(sys_root, each).exists()]
    if Path(sys_root, "var/run/secrets/kubernetes.io").is_dir():
        marks.append("kubernetes")
    own_pids = namespace not in ("", _INITIAL_PID_NAMESPACE)
    if not marks and not own_pids:
        return ok("no container seen")
    seen = ", ".join([*marks, *(["a pid namespace of its own"] if own_pids else [])])
    return warn(
        f"this is a container ({seen}): engines outside it reach the server by TCP only unless /dev/shm is shared",
        "run server and engines with one --ipc and --pid (docker: --ipc=host --pid=host; kubernetes: one pod, "
        "shareProcessNamespace: true, one emptyDir with medium: Memory on /dev/shm)",
    )


CHECKS: tuple[Callable[..., Finding], ...] = (
    check_settings,
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
    check_value_size,
    check_workers,
    check_sglang_builtin,
    check_tls,
)


def run_checks(sys_root: str = "/") -> list[Finding]:
    """Run all checks and return their findings in reading order. Never raises. Takes a few milliseconds."""
    findings = []
    for each in CHECKS:
        try:
            findings.append(each(sys_root))
        except Exception as error:  # of any kind: the other checks say more than its traceback
            name = each.__name__.removeprefix("check_").replace("_", "-")
            remedy = "run this as the server's user; if the check still breaks, report this line"
            text = str(error) if isinstance(error, (OSError, SimmError)) else f"{type(error).__name__}: {error}"
            findings.append(Finding(name, "warn", f"could not be checked: {text}", remedy))
    return findings

"""What Linux tells of processes."""

from __future__ import annotations

import contextlib
import functools
import os
import time


def process_start(pid: int) -> int:
    """Return a process's start time in clock ticks since boot (proc(5), stat field 22); 0 if it has ended.

    Not by psutil, whose create_time() counts from 1970: a clock that is set meanwhile changes it, and a worker that
    restarts would take a client that lives for one that has ended, and reuse the memory that it writes to. Raises
    OSError if that cannot be told: no descriptor is left. 0 also if a /proc with hidepid does not tell.
    """
    try:
        return int(_stat(pid)[19])
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0


def _stat(pid: int | str) -> list[bytes]:
    """Return the fields of /proc/PID/stat behind the name, from the third on. Raises OSError."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        stat = file.read()
    return stat[stat.rindex(b")") + 2 :].split()


def thread_count() -> int:
    """Return the number of this process's threads. Raises OSError."""
    return int(_stat("self")[17])


def start_time() -> float:
    """Return when this process started, seconds since 1970, the same for life. Raises OSError.

    Not by psutil, which takes the time of the boot from /proc/stat: a unit with ProcSubset=pid has none, and a psutil
    before 7.1 then makes no Process at all.
    """
    return _start_time(os.getpid())


@functools.lru_cache(maxsize=1)
def _start_time(_pid: int) -> float:
    """Do :func:`start_time` once in a process: a clock that is set later would look like a restart."""
    ticks = int(_stat("self")[19])
    boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return boot + ticks / os.sysconf("SC_CLK_TCK")


def of_my_cgroup() -> set[int]:
    """Return the ids of the processes in this process's control group, without its own.

    It reads the hierarchy in which systemd keeps units: cgroups(7) version 2, or the one named ``systemd``. Raises
    OSError if there is none that this process can read.
    """
    with open("/proc/self/cgroup", encoding="utf-8", errors="surrogateescape") as file:
        groups = dict(line.rstrip("\n").split(":", 2)[1:] for line in file)
    mounts = [("name=systemd", "/sys/fs/cgroup/systemd"), ("", "/sys/fs/cgroup/unified"), ("", "/sys/fs/cgroup")]
    for name, folder in mounts:
        with contextlib.suppress(FileNotFoundError):
            if name in groups:
                with open(f"{folder}{groups[name]}/cgroup.procs", encoding="ascii") as file:
                    return {int(line) for line in file} - {os.getpid()}
    raise FileNotFoundError("no control group of this process in /sys/fs/cgroup")


def program_of(pid: int) -> str:
    """Return the name of a process; empty for one that has ended, or is not to be seen from here.

    Not by psutil, whose name() takes a long one from the command line.
    """
    with contextlib.suppress(OSError), open(f"/proc/{pid}/comm", errors="replace") as file:
        return file.read().strip()
    return ""


def boottime_ns() -> int:
    """Return CLOCK_BOOTTIME in ns. A host has one, which runs while processes are stopped and the host sleeps."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)

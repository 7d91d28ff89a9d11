"""Which files a process holds: by descriptors, and by maps.

A forked child of a server has placeholders where its parent has descriptors (``give_up_descriptors_but``): they lead to
``/`` and are of no use. Their number is that of what the supervisor had open at the fork, so a process that was forked
later may have some more of them. They are no growth, and are not counted.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from typing import Final

from simm.ipc.segments import ArenaName

#: What a process has of the one arena that it reads (``ArenaReader``): Python's maps keep a descriptor each.
READER: Final = Counter({"fd": 1, "map": 1, "fd .data": 2, "map .data": 2})
#: The path at a line's end in /proc/PID/maps, of what is a file of memory.
_MAPPED: Final = re.compile(r" (/dev/shm/\S+|/memfd:\S+)( \(deleted\))?$")


def behind(pid: int) -> dict[int, str]:
    """Return where a process's descriptors lead."""
    found = {}
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            found[int(name)] = os.readlink(f"/proc/{pid}/fd/{name}")
    return found


def open_files(pid: int) -> list[str]:
    """Return where a process's descriptors lead, without placeholders."""
    return [where for where in behind(pid).values() if where != "/"]


def maps(pid: int) -> list[str]:
    """Return the file of each map of memory of a process that has one."""
    with open(f"/proc/{pid}/maps") as lines:
        return [found[1] for line in lines if (found := _MAPPED.search(line.rstrip()))]


def of_arenas(pid: int, server: str) -> Counter[str]:
    """Return what a process has of a data server's arenas: descriptors and maps of each kind of file.

    ``fd`` and ``map`` are of the table, ``fd .data`` and ``map .data`` of the data: see :data:`READER`.
    """
    found: Counter[str] = Counter()
    for how, paths in (("fd", open_files(pid)), ("map", maps(pid))):
        for path in paths:
            name = os.path.basename(path.removesuffix(" (deleted)"))
            parts = ArenaName.parse(name)
            if parts is not None and parts.server == server:
                found[f"{how} {name.removeprefix(str(parts))}".rstrip()] += 1
    return found

"""A server with some of its surroundings replaced: ``python -m faults.patched SWITCH... -- simm.manager ARGUMENTS``.

    clock=FILE     the wall clock (time.time, time.time_ns) is off by as many seconds as FILE's first double says,
                   now and in all children; the file is mapped, so it can be changed at any moment
    stall=SECONDS  how long a peer may stand still (simm.loop.STALL_S)
    mover=SECONDS  how long a mover may say nothing (simm.mover.SILENT_S)
    sweep=SECONDS  how often the loop looks for those (simm.loop.SWEEP_S)
    forks=NUMBER   of the forks after so many each second one fails, as in a cgroup that is full
    files=NUMBER   the soft limit of open files, as most systems set it
    call=MODULE:FUNCTION  whatever a function of the tests' own does
"""

from __future__ import annotations

import importlib
import itertools
import mmap
import os
import resource
import runpy
import struct
import sys
import time


def patch(switch: str) -> None:
    """Apply one."""
    name, _, value = switch.partition("=")
    if name == "clock":
        with open(value, "r+b") as file:
            memory = mmap.mmap(file.fileno(), 8)
        real, real_ns = time.time, time.time_ns

        def offset() -> float:
            return float(struct.unpack_from("<d", memory)[0])

        time.time = lambda: real() + offset()
        time.time_ns = lambda: real_ns() + int(offset() * 1e9)
    elif name == "forks":
        fork, number = os.fork, itertools.count(1)

        def sometimes() -> int:
            after = next(number) - int(value)
            if after > 0 and after % 2:
                raise BlockingIOError(11, "Resource temporarily unavailable")
            return fork()

        os.fork = sometimes
    elif name == "files":
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(value), hard))
    elif name == "call":
        module, _, function = value.partition(":")
        getattr(importlib.import_module(module), function)()
    elif name == "mover":
        import simm.mover

        simm.mover.SILENT_S = float(value)
    elif name in ("stall", "sweep"):
        import simm.loop

        setattr(simm.loop, f"{name.upper()}_S", float(value))
    else:
        sys.exit(f"what is {switch!r}?")


def main() -> None:
    """Patch, then be the module."""
    at = sys.argv.index("--")
    for switch in sys.argv[1:at]:
        patch(switch)
    module = sys.argv[at + 1]
    sys.argv = [module, *sys.argv[at + 2 :]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

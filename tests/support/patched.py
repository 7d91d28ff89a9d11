"""``python -m tests.support.patched SWITCH... -- simm.manager ARGUMENTS``: a server in replaced surroundings.

    clock=FILE     the wall clock (time.time, time.time_ns) is off by as many seconds as FILE's first double says,
                   now and in all children; the file is mapped, so it can be changed at any moment
    stall=SECONDS  how long a peer may stand still (simm.net.peer.STALL_S)
    mover=SECONDS  how long a mover may say nothing (simm.server.migration.SILENT_S)
    worker=SECONDS how long a worker may say nothing to its streams (simm.server.worker_session.WORKER_DEADLINE_S)
    hang=SECONDS   how long a worker or a stream may say nothing to its supervisor (simm.server.slots.hang_watch.HANG_S)
    maintenance=SECONDS  how often the loop checks for those (simm.net.loop.MAINTENANCE_S)
    forks=NUMBER   of the forks after so many each second one fails, as in a cgroup that is full
    fsync=FILE     an fsync does not return while FILE exists, as of a disk that is about to fail
    moves=FILE     each mover copies some values and then none while FILE exists
    files=NUMBER   the soft limit of open files, as most systems set it
    limit=NUMBER   the hard limit of open files too
    protocol=MIN:MAX  the versions of the wire protocol that it speaks
    layout=NUMBER  the layout of its arenas
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
    elif name == "fsync":
        fsync = os.fsync

        def stuck(fd: int) -> None:
            while os.path.exists(value):
                time.sleep(0.01)
            fsync(fd)

        os.fsync = stuck
    elif name == "moves":
        from simm.server.migration_peers import TokenBucket

        take, passed = TokenBucket.take, [0]

        def held(bucket: TokenBucket, count: int) -> None:
            while count > 0 and passed[0] > 100_000 and os.path.exists(value):
                time.sleep(0.01)
            passed[0] += count
            take(bucket, count)

        TokenBucket.take = held  # type: ignore[assignment, method-assign]
    elif name == "files":
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(value), hard))
    elif name == "limit":
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(value), int(value)))
    elif name == "protocol":
        import simm.wire.messages as messages

        least, most = map(int, value.split(":"))
        vars(messages).update(PROTOCOL_MIN=least, PROTOCOL_MAX=most)  # before others take them by name
        assert "simm.wire.hello" not in sys.modules
    elif name == "layout":
        import simm.arena.layout as layout

        vars(layout).update(LAYOUT_VERSION=int(value))
        assert "simm.ipc.segments" not in sys.modules
    elif name == "call":
        module, _, function = value.partition(":")
        getattr(importlib.import_module(module), function)()
    elif name == "mover":
        import simm.server.migration

        simm.server.migration.SILENT_S = float(value)
    elif name == "hang":
        import simm.server.slots.hang_watch as hang_watch

        vars(hang_watch).update(HANG_S=float(value))
    elif name == "worker":
        import simm.server.worker_session as worker_session

        seconds = float(value)
        assert seconds < worker_session.SILENCE_S
        vars(worker_session).update(WORKER_DEADLINE_S=seconds)
    elif name == "stall":
        import simm.net.loop
        import simm.net.peer

        simm.net.peer.STALL_S = simm.net.loop.STALL_S = float(value)
    elif name == "maintenance":
        import simm.net.loop

        simm.net.loop.MAINTENANCE_S = float(value)
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

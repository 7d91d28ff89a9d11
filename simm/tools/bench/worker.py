"""The worker of the cluster that ``simm bench`` has started: what it has evicted, and its processor time.

The processor time is of the worker's main thread, which does all its work, in nanoseconds from the kernel's scheduler
(``/proc/PID/schedstat``). A kernel without it has clock ticks only, which are exact enough over a second. What the
worker polls without finding anything is not work, and subtracted: the worker counts it (``server/ring_poller.py``).
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any, Final

import psutil

from ...arena.events.victims import evicted_in
from ...errors import SimmError
from ...ipc.segments import socket_path
from ...net.channel import Channel
from ...sdk.local_cluster import LocalCluster
from ...wire import messages as M

_DEADLINE_S: Final = 10.0


class LocalWorker:
    """The only worker of a cluster. Raises SimmError if it does not answer."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._socket = socket_path(str(Path(cluster.folder) / "run"), cluster.name, 0)
        self.pid = 0
        stats = self._stats()
        self.pid = int(stats["pid"])
        self.data_bytes = int(stats["data_bytes"])
        self.slots = int(stats["slots"])

    def _stats(self) -> dict[str, Any]:
        with contextlib.closing(Channel.unix(self._socket, _DEADLINE_S)) as channel:
            stats: dict[str, Any] = json.loads(channel.call(M.Stats(0)).json)
        if self.pid and int(stats["pid"]) != self.pid:
            raise SimmError("the worker has died and its successor serves: the figures would mean nothing")
        return stats

    def evicted(self) -> int:
        """Return the number of entries that were evicted so far. Raises SimmError."""
        return evicted_in(self._stats())

    def polled_ns(self) -> int:
        """Return the time that the worker has polled in vain so far. Raises SimmError."""
        return int(float(self._stats()["polled_idle_s"]) * 1e9)

    def cpu_ns(self) -> int | None:
        """Return the worker's processor time so far, None where the kernel does not tell, or if it has died."""
        return cpu_ns(self.pid)


def cpu_ns(pid: int) -> int | None:
    """Return the processor time of a process's main thread in nanoseconds; None if that cannot be told."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[0])
    with contextlib.suppress(psutil.Error, OSError):
        times = psutil.Process(pid).cpu_times()
        return int((times.user + times.system) * 1e9)
    return None

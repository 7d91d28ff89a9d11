"""What every test of a fault leaves as it was: segments, processes, ports, descriptors, bytes, and clean logs."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import psutil

from simm.errors import TransportError
from tests.support.fleet import Fleet
from tests.support.processes import HERE
from tests.support.waiting import wait_until


def _name(fleet: Fleet) -> str:
    return f"-{fleet.prefix}"


def segments() -> set[str]:
    """Return the segments of this session's clusters, but not those of the fleets that run."""
    found = {name for name in os.listdir("/dev/shm") if HERE in name or f"-local-{os.getpid()}-" in name}
    return {name for name in found if not any(_name(fleet) in name for fleet in Fleet.running)}


def processes() -> dict[int, str]:
    """Return this process's descendants and all that name one of its clusters, but not those of fleets that run."""
    of_fleets = {each.pid for fleet in Fleet.running for server in fleet.running_servers() for each in server.family()}
    found = {}
    descendants = {each.pid for each in psutil.Process().children(recursive=True)}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            ours = pid in descendants or (HERE in line and pid != os.getpid())
            if ours and pid not in of_fleets and "resource_tracker" not in line:
                found[pid] = line or f"process {pid}, which nobody has waited for"
    return found


def listening(pids: set[int]) -> set[int]:
    """Return the TCP ports that these processes listen at."""
    found = set()
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            connections = process.net_connections if hasattr(process, "net_connections") else process.connections
            found |= {each.laddr.port for each in connections("tcp") if each.status == psutil.CONN_LISTEN}
    return found


def descriptors(pid: int) -> int:
    """Return the number of files that a process has open; 0 if it has ended."""
    return len(opened(pid))


def opened(pid: int) -> list[str]:
    """Return what a process's descriptors lead to; nothing if it has ended."""
    found = []
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    return found


class Held(NamedTuple):
    """What one worker holds for clients, and what its values take."""

    grants: int
    pins: int
    entries: int
    used_bytes: int


def held(fleet: Fleet) -> dict[str, Held]:
    """Return what each worker of a fleet holds, by its server; not of one that does not answer."""
    found = {}
    for server in fleet.servers:
        with contextlib.suppress(TransportError, AssertionError):
            stats = server.worker_stats()
            used = stats["data_bytes"] - stats["free_bytes"] - stats["granted_bytes"]
            found[server.name] = Held(stats["grants"], stats["pins"], stats["entries"], used)
    return found


def at_rest(fleet: Fleet) -> bool:
    """Return True if each worker has its stream's session, which stays, and no other."""
    with contextlib.suppress(TransportError, AssertionError):
        return all(server.worker_stats()["sessions"] == 1 for server in fleet.servers if server.running)
    return False


def _kinds(links: list[str]) -> int:
    """Return how many descriptors lead to different things. A stream opens its arena again when it first lists it."""
    return len(set(links)) + sum(count - 1 for link, count in Counter(links).items() if not link.startswith("/dev/shm"))


def _more(pid: int, before: list[str]) -> str:
    """Say what a process has open that it had not before."""
    sockets = {str(each.fd): each for each in psutil.net_connections("all") if each.pid == pid}
    more = sorted((Counter(opened(pid)) - Counter(before)).elements())
    return f"{' '.join(psutil.Process(pid).cmdline())[:200]} (process {pid}) closes {more}; it has {sockets}"


class Standing:
    """Looks at everything when it is made; :meth:`check` raises AssertionError for what is not as it was then."""

    def __init__(self) -> None:
        for fleet in Fleet.running:
            wait_until(lambda fleet=fleet: at_rest(fleet), "streams have their sessions, and dead clients none")  # type: ignore[misc]
            wait_until(fleet.status, "the fleet is connected to its manager, as it will be in the end")
        self._segments = segments()
        self._processes = processes()
        self._ports = listening({os.getpid(), *self._processes})
        self._opened = {
            each.pid: opened(each.pid)
            for fleet in Fleet.running for server in fleet.running_servers() for each in server.family()
        }  # fmt: skip

    def check(self) -> None:
        """All that the test started has ended. What ends by itself is waited for."""
        wait_until(lambda: set(processes()) <= set(self._processes), lambda: f"processes: {processes()}")
        assert segments() <= self._segments, f"segments left in /dev/shm: {segments() - self._segments}"
        # Waited for, too: a process that a server is just forking is not known to be its own.
        ports = lambda: listening({os.getpid(), *processes()}) - self._ports  # noqa: E731
        wait_until(lambda: not ports(), lambda: f"ports are listened at: {ports()}")
        for fleet in Fleet.running:
            fleet.assert_no_traceback()
            self._check_bytes(fleet)
        for pid, before in self._opened.items():
            wait_until(lambda: _kinds(opened(pid)) <= _kinds(before), lambda: _more(pid, before))  # noqa: B023

    def _check_bytes(self, fleet: Fleet) -> None:
        """Dead clients hold nothing, and an arena without values and grants has every byte free.

        The end of a slab that no chunk fits into is not free while a grant has one of the slab's chunks.
        """

        def left() -> dict[str, Held]:
            return {
                name: each for name, each in held(fleet).items()
                if each.pins or (each.used_bytes and not each.entries and not each.grants)
            }  # fmt: skip

        wait_until(lambda: not left(), lambda: f"held: {left()}")

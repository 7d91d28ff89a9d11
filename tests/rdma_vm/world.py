"""Servers on the even ends of the machine's cables, clients on the odd ones, and looking into both."""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import psutil

from simm.client import Client
from simm.sdk.rdma_pool import RdmaPath
from simm.sdk.worker_path import Target
from tests.rdma_vm.devices import CLIENT, SERVER
from tests.support.fleet import Fleet, Server
from tests.support.waiting import wait_until

#: By RDMA, and by TCP what that leaves over.
PATHS: Final = "rdma,tcp"
#: For paths to come (back) in the emulator, seconds. A bound for what hangs.
WAIT_S: Final = 120.0
#: A call's deadline in tests that do not look at deadlines: the emulator is slow.
DEADLINE_S: Final = 20.0


def start(
    base: Path, count: int = 1, *, devices: str = SERVER, memory: str = "64M", more: Sequence[str] = (), **others: Any
) -> Fleet:
    """A fleet of data servers that are ready when their endpoints are. Not started yet."""
    folder = Path(tempfile.mkdtemp(prefix="v", dir=base))
    arguments = ["--rdma", "on", "--rdma-devices", devices, "--streams", "1", *more]
    return Fleet(folder, count, memory=memory, server_arguments=arguments, **others)


def until(condition: Callable[[], Any], what: Callable[[], str] | str, timeout_s: float = WAIT_S) -> float:
    """Return the seconds until the condition was true, as ``wait_until`` in the emulator's time."""
    began = time.monotonic()
    wait_until(condition, what, timeout_s)
    return time.monotonic() - began


def targets(client: Client) -> list[Target]:
    """The workers as the client knows them."""
    router = client._router
    assert router is not None
    return list(router.targets.values())


def path_of(client: Client, number: int = 0) -> RdmaPath:
    """The RDMA path to one of them."""
    rdma = targets(client)[number].rdma
    assert rdma is not None, targets(client)[number].reason
    return rdma


def wait_rdma(client: Client, count: int = 1) -> float:
    """Seconds until all of its (``count`` or more) workers are reached by RDMA."""

    def there() -> bool:
        known = targets(client)
        return len(known) >= count and all(target.path == "rdma" for target in known)

    return until(there, lambda: str([(target.path, target.reason) for target in targets(client)]))


@contextlib.contextmanager
def connected(fleet: Fleet, devices: str = CLIENT, **arguments: Any) -> Iterator[Client]:
    """A client, once all servers are reached by RDMA. Its connections are gone afterwards."""
    arguments = {"path": PATHS, "deadline_s": DEADLINE_S, "rdma_devices": devices, **arguments}
    with Client(fleet.manager.address, **arguments) as client:
        assert client.wait_ready(WAIT_S)
        wait_rdma(client, len(fleet.servers))
        yield client


@contextlib.contextmanager
def all_by_rdma(client: Client) -> Iterator[None]:
    """What is done within must not need TCP for a single key."""
    before = client.counters["rdma_fallbacks"]
    yield
    assert client.counters["rdma_fallbacks"] == before, [target.reason for target in targets(client)]


def data(size: int, seed: object = 0) -> bytes:
    """Bytes that are different everywhere."""
    return random.Random(f"{size} {seed}").randbytes(size)


def family(server: Server) -> dict[str, psutil.Process]:
    """A data server's processes by what its log calls them: ``worker 0``, ``endpoint 0``, and ``supervisor``."""
    found = {"supervisor": psutil.Process(server.pid)}
    for line in server.log.read_text().splitlines():
        words = line.rpartition(": ")[2].split()
        # "worker 0 is process 213", "endpoint of worker 0 is process 215"
        if words[-3:-1] == ["is", "process"]:
            name = f"{words[0]} {words[-4]}"
            with contextlib.suppress(psutil.NoSuchProcess):
                found[name] = psutil.Process(int(words[-1]))
    return found


def segment_pages(pid: int, segment: str) -> dict[int, int]:
    """NUMA node -> pages of a process's maps of a shared-memory segment, by /proc/PID/numa_maps."""
    found: dict[int, int] = {}
    for line in Path(f"/proc/{pid}/numa_maps").read_text().splitlines():
        if f"/{segment}" in line:
            for word in line.split():
                if word[0] == "N" and word[1:2].isdigit():
                    node, _, pages = word[1:].partition("=")
                    found[int(node)] = found.get(int(node), 0) + int(pages)
    return found


def segments(prefix: str) -> list[str]:
    """Names of a fleet's segments."""
    return sorted(name for name in os.listdir("/dev/shm") if prefix in name)

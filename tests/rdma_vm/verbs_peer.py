"""A process at the other end of a queue pair: registers memory that the test can look into, and does as it is told.

    python -m tests.rdma_vm.verbs_peer DEVICE DESCRIPTOR BYTES

It reads a JSON list ``[name, argument...]`` per line and answers with one of ``{"is": ...}`` or ``{"error": ...}``.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
import time
from typing import Any

from simm import verbs
from simm.errors import SimmError
from simm.rdma.api import Absence, Access, Binding, FabricError, QueuePair, QueuePairAddress, Rail, Region, Window
from tests.support.child import Child, module_command

ALL = Access.LOCAL_WRITE | Access.REMOTE_READ | Access.REMOTE_WRITE | Access.WINDOWS


class Memory:
    """Anonymous memory with an address; another process's where a descriptor is given."""

    def __init__(self, size: int, fd: int = -1) -> None:
        self.fd = os.memfd_create("rdma test", 0) if fd < 0 else fd
        if fd < 0:
            os.ftruncate(self.fd, size)
        self.bytes = mmap.mmap(self.fd, size)
        held = ctypes.c_char.from_buffer(self.bytes)
        self.at = ctypes.addressof(held)
        self.size = size
        del held

    def close(self) -> None:
        self.bytes.close()
        os.close(self.fd)


def rail_of(device: str) -> Rail:
    """The only rail of a fabric of its own."""
    fabric = verbs.open_fabric(device)
    assert not isinstance(fabric, Absence), fabric
    return fabric.rails[0]


class Served:
    """What the peer does."""

    def __init__(self, device: str, fd: int, size: int) -> None:
        self.memory = Memory(size, fd)
        self.rail = rail_of(device)
        self.queue_pairs: list[QueuePair] = []
        self.windows: list[Window] = []
        self.regions: dict[str, Region] = {}

    def register(self, name: str, start: int, length: int, access: int) -> list[int]:
        region = self.rail.register(self.memory.at + start, length, Access(access))
        self.regions[name] = region
        return [region.address, region.rkey]

    def deregister(self, name: str) -> None:
        self.regions.pop(name).close()

    def queue_pair(self) -> list[Any]:
        self.queue_pairs.append(self.rail.queue_pair())
        gid, *rest = self.queue_pairs[-1].address()
        return [len(self.queue_pairs) - 1, gid.hex(), *rest]

    def connect(self, number: int, gid: str, *rest: int) -> None:
        self.queue_pairs[number].connect(QueuePairAddress(bytes.fromhex(gid), *rest))

    def close_queue_pair(self, number: int) -> None:
        self.queue_pairs[number].close()

    def close_queue_pairs(self) -> None:
        for qp in self.queue_pairs:
            qp.close()

    def bind(self, number: int, region: str, places: list[list[int]]) -> list[int]:
        while len(self.windows) < len(places):
            self.windows.append(self.rail.window())
        held = self.regions[region]
        self.queue_pairs[number].bind(
            [Binding(window, held, held.address + at, size) for window, (at, size) in zip(self.windows, places)]
        )
        return [window.rkey for window in self.windows[: len(places)]]

    def invalidate(self, number: int, count: int) -> None:
        self.queue_pairs[number].invalidate(self.windows[:count])


def serve() -> None:
    served = Served(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    print(json.dumps({"is": None}), flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            answer = {"is": getattr(served, name)(*arguments)}
        except SimmError as error:
            answer = {"error": str(error), "status": getattr(error, "status", "")}
        print(json.dumps(answer), flush=True)


class Peer:
    """The test's handle of such a process."""

    def __init__(self, device: str, size: int) -> None:
        self.memory = Memory(size)
        words = module_command("tests.rdma_vm.verbs_peer", device, str(self.memory.fd), str(size))
        self.process = Child(words, name="peer", talks=True, pass_fds=[self.memory.fd])
        self._take(self.process.answer())
        self.at, self.rkey = self.ask("register", "all", 0, size, int(ALL))

    def ask(self, *words: Any) -> Any:
        return self._take(self.process.ask(words))

    def _take(self, answer: Any) -> Any:
        if "error" in answer:
            raise FabricError(answer["error"], answer["status"])
        return answer["is"]

    def join(self, rail: Rail) -> tuple[QueuePair, int]:
        """A new queue pair from ``rail`` to the peer, connected; and its number there."""
        qp = rail.queue_pair()
        number, gid, *rest = self.ask("queue_pair")
        ours = qp.address()
        qp.connect(QueuePairAddress(bytes.fromhex(gid), *rest))
        self.ask("connect", number, ours.gid.hex(), *ours[1:])
        return qp, number

    def kill(self) -> None:
        self.process.kill()

    def close(self) -> None:
        self.process.kill()
        self.memory.close()


def soon(seconds: float = 20.0) -> float:
    """A deadline that a slow machine makes."""
    return time.monotonic() + seconds


if __name__ == "__main__":
    serve()

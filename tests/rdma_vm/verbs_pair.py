"""The two ends rxe0 - rxe1 of one machine: the peer (another process) has rxe0, this process rxe1."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from simm.rdma.api import (
    WRITE,
    Access,
    FabricError,
    Op,
    QueuePair,
    Rail,
    Region,
    Timeout,
)
from tests.rdma_vm.verbs_peer import ALL, Memory, Peer, rail_of, soon

MIB = 1 << 20
SIZE = 66 * MIB
THEIRS, OURS = "rxe0", "rxe1"


class Here:
    """This process's end: a rail and registered memory."""

    def __init__(self) -> None:
        self.memory = Memory(SIZE)
        self.rail: Rail = rail_of(OURS)
        self.region: Region = self.rail.register(self.memory.at, SIZE, Access.LOCAL_WRITE)

    def op(self, kind: int, peer: Peer, here: int, size: int, there: int, rkey: int | None = None) -> Op:
        """Return an operation from offsets instead of addresses."""
        return kind, self.memory.at + here, self.region.lkey, size, peer.at + there, peer.rkey if rkey is None else rkey


class Both:
    """Two rails in this process, for tests that need both ends."""

    def __init__(self) -> None:
        self.memory = Memory(MIB)
        self.server, self.client = rail_of(THEIRS), rail_of(OURS)
        self.region = self.server.register(self.memory.at, MIB // 2, ALL)
        self.local = self.client.register(self.memory.at + MIB // 2, MIB // 2, Access.LOCAL_WRITE)

    def pair(self) -> tuple[QueuePair, QueuePair]:
        far, near = self.server.queue_pair(), self.client.queue_pair()
        far.connect(near.address())
        near.connect(far.address())
        return far, near

    def write(self, rkey: int, offset: int = 0, size: int = 8) -> Op:
        return WRITE, self.local.address, self.local.lkey, size, self.region.address + offset, rkey

    def close(self) -> None:
        self.server.close()
        self.client.close()
        self.memory.close()


def run(qp: QueuePair, *ops: Op) -> None:
    qp.wait(qp.post(ops), soon())


def refused(qp: QueuePair, *ops: Op) -> str:
    """Return the status with which a chain fails."""
    with pytest.raises(FabricError) as caught:
        run(qp, *ops)
    assert not isinstance(caught.value, Timeout)
    return caught.value.status


def objects_of(pid: int) -> list[str]:
    """Return what is left of a process in the kernel."""
    found = []
    for kind in ("qp", "mr", "pd", "cq"):
        shown = subprocess.run(["rdma", "resource", "show", kind], capture_output=True, text=True, check=True).stdout
        found += re.findall(rf"^.*\bpid {pid}\b.*$", shown, re.M)
    return found


def environment() -> dict[str, str]:
    root = Path(__file__).resolve().parents[2]
    return {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}

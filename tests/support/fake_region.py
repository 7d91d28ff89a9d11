"""Registered memory and memory windows of the network in software (``fake_fabric.py``)."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from simm.rdma.api import (
    Access,
)

if TYPE_CHECKING:
    from tests.support.fake_fabric import FakeRail
    from tests.support.fake_queue_pair import FakeQueuePair


class Refused(Exception):
    """An operation is not allowed; the text is the name of a completion's status."""


class FakeRegion:
    """Registered memory of a rail."""

    def __init__(self, rail: FakeRail, address: int, length: int, access: Access) -> None:
        self.address, self.length, self.access = address, length, access
        #: The same as a plain number: an operator of a flag takes a microsecond, and each piece asks.
        self.rights = int(access)
        self.rail = rail
        #: What is added to an address of a GPU's memory; None for host memory.
        self.device: int | None = None
        self.lkey = rail.network.new_key(rail.lkeys)
        self.rkey = rail.network.new_key(rail.rkeys)
        self.open = True
        rail.lkeys[self.lkey] = self
        rail.rkeys[self.rkey] = self
        rail.regions.append(self)

    def covers(self, address: int, length: int) -> bool:
        return self.address <= address and address + length <= self.address + self.length

    def store(self, address: int, source: int, size: int) -> None:
        """Copy bytes from host memory to the region's."""
        if self.device is None:
            ctypes.memmove(address, source, size)
        else:
            self.rail.network.gpu.dma_write(address + self.device, ctypes.string_at(source, size))

    def load(self, address: int, size: int) -> bytes:
        if self.device is None:
            return ctypes.string_at(address, size)
        data: bytes = self.rail.network.gpu.dma_read(address + self.device, size)
        return data

    def close(self) -> None:
        with self.rail.network.lock:
            if not self.open:
                return
            self.rail.fabric.touched()
            for window in [w for w in self.rail.windows if w.region is self]:
                window.unbind()
            self.open = False
            del self.rail.lkeys[self.lkey], self.rail.rkeys[self.rkey]
            self.rail.regions.remove(self)


class FakeWindow:
    """A memory window of type 2: bound to one queue pair, with a new key each time."""

    def __init__(self, rail: FakeRail) -> None:
        self.rail = rail
        self._index = rail.network.rng.randrange(1, 1 << 24)
        self._tag = 0
        self.rkey = 0
        self.region: FakeRegion | None = None
        self.qp: FakeQueuePair | None = None
        self.address = self.length = 0
        self.open = True
        self.born = next(rail.network.births)
        rail.windows.append(self)

    def bind(self, qp: FakeQueuePair, region: FakeRegion, address: int, length: int) -> None:
        # The key's low byte is the user's and wraps around, as it does in the real ones.
        self._tag = (self._tag + 1) & 0xFF
        self.rkey = self._index << 8 | self._tag
        while self.rkey in self.rail.rkeys:
            self._index = self.rail.network.rng.randrange(1, 1 << 24)
            self.rkey = self._index << 8 | self._tag
        self.region, self.qp, self.address, self.length = region, qp, address, length
        self.rail.rkeys[self.rkey] = self

    def covers(self, address: int, length: int) -> bool:
        return self.address <= address and address + length <= self.address + self.length

    def unbind(self) -> None:
        if self.region is not None:
            del self.rail.rkeys[self.rkey]
            self.region = self.qp = None

    def close(self) -> None:
        with self.rail.network.lock:
            if self.open:
                self.rail.fabric.touched()
                if self.qp is not None:
                    self.qp.settle((self.rkey,))
                self.unbind()
                self.open = False
                self.rail.windows.remove(self)

"""Stores by each path and memory of each kind, for the tests of registered views and their sizes."""

from __future__ import annotations

import contextlib
import gc
import random
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from simm import kv
from simm.errors import Code
from simm.gpu import copy, direct
from simm.kv import Block, BlockView, Store, register_mr, set_flag
from simm.rdma import registration
from simm.sdk.tcp import TcpPath
from simm.server import worker_session
from tests.support.fake_rdma_cluster import FakeRdmaCluster, until_rdma
from tests.support.gpu import InPython, forget_ways, installed
from tests.support.gpu import Tensor as DeviceTensor

MIB = 1 << 20
KIB = 1 << 10
CANARY = 0xEE
FAILED = int(Code.GET_FAILED)
#: Below and above what releases the GIL, what fits one staging block, and what is spread over several links.
SIZES = [64, 5000, 300_000, 3 * MIB + 8]


def forget_clients() -> None:
    for client in kv._clients.values():
        client.close()
    kv._clients.clear()
    kv._users.clear()


def point_at(host: str, port: object) -> None:
    assert set_flag("cm_primary_node_ip", host)
    assert set_flag("cm_primary_node_port", str(port))


@contextlib.contextmanager
def store_by(
    path: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, driver: Any = None
) -> Iterator[Store]:
    """Yield a store whose client takes this path: to the session's cluster, or on a network in software."""
    if not path.startswith("rdma"):
        host, port = request.getfixturevalue("cluster").manager.split(":")
        point_at(host, port)
        monkeypatch.setenv("SIMM_PATH", path)
        with Store() as store:
            assert store._client is not None and store._client.wait_ready(60.0), store._client.stats()["workers"]
            yield store
        return
    rails = [f"r{number}" for number in range(int(path[4:]))]
    monkeypatch.setattr(worker_session, "WORKER_DEADLINE_S", 60.0)  # its worker is a thread of this process
    with FakeRdmaCluster(monkeypatch, rails=rails, mine=rails, size=64 * MIB) as cluster:
        cluster.network.gpu = driver
        point_at(*cluster.manager.address)
        monkeypatch.setenv("SIMM_PATH", "rdma,tcp")
        assert set_flag("clnt_sync_req_timeout_ms", "60000")  # RDMA has half of it, on a busy machine too
        with Store() as store:
            assert store._client is not None
            until_rdma(store._client)
            monkeypatch.setattr(TcpPath, "fetch", lambda *_, **__: pytest.fail("a value was asked for by TCP"))
            yield store


PATHS = ["shm", "tcp", "rdma1", "rdma2"]


class Tensor:
    """A tensor like one of torch, in host memory."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self.device = types.SimpleNamespace(type="cpu")

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def numel(self) -> int:
        return int(self.array.size)

    def element_size(self) -> int:
        return int(self.array.itemsize)


class Host:
    """A registered pool in host memory, whose pages are named as a tensor, an array, or a pointer and a size."""

    def __init__(self, kind: str, size: int) -> None:
        self.kind = kind
        self.pool = np.full(size, CANARY, np.uint8)
        whole: Any = Tensor(self.pool) if kind == "tensor" else self.pool
        self.mr = register_mr(self.pool.ctypes.data, size) if kind == "pointer" else register_mr(whole)
        assert self.mr is not None

    def view(self, at: int, size: int) -> BlockView:
        part = self.pool[at : at + size]
        if self.kind == "pointer":
            return BlockView.from_buffer(self.pool.ctypes.data + at, size, self.mr)
        return BlockView.from_tensor(Tensor(part) if self.kind == "tensor" else part, self.mr)

    def data(self) -> bytes:
        return self.pool.tobytes()

    def reset(self) -> None:
        self.pool[:] = CANARY


class Device:
    """A registered pool in a GPU's memory."""

    def __init__(self, driver: Any, kind: str, size: int) -> None:
        self.driver, self.kind, self.size = driver, kind, size
        self.address = driver.alloc(1, size)
        self.reset()
        self.mr = register_mr(DeviceTensor(self.address, size))
        assert self.mr is not None

    def view(self, at: int, size: int) -> BlockView:
        if self.kind == "gpu tensor":
            return BlockView.from_tensor(DeviceTensor(self.address + at, size), self.mr)
        return BlockView.from_buffer(self.address + at, size, self.mr)

    def data(self) -> bytes:
        data: bytes = self.driver.peek(self.address, self.size)
        return data

    def reset(self) -> None:
        self.driver.poke(self.address, bytes([CANARY]) * self.size)


KINDS = ["tensor", "numpy", "pointer", "gpu tensor", "gpu pointer", "gpu staged"]


@contextlib.contextmanager
def driver_for(kind: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield a CUDA driver in software if the kind of memory needs one, else None."""
    if not kind.startswith("gpu"):
        yield None
        return
    monkeypatch.setattr(direct, "PEERMEM_MODULES", ["/nowhere"])
    running = installed(InPython())
    driver = next(running).library
    driver.dma_buf = kind != "gpu staged"
    try:
        yield driver
        forget_clients()
        copy.staging.close()
        gc.collect()
        registration.close_dropped()
        assert next(running, None) is None
    finally:
        running.close()
        copy.staging.close()
        forget_ways()


def memory_of(kind: str, driver: Any, size: int) -> Any:
    return Host(kind, size) if driver is None else Device(driver, kind, size)


def value_of(seed: object, size: int) -> bytes:
    return random.Random(repr(seed)).randbytes(size)


def filled(data: bytes) -> BlockView:
    block = Block(len(data))
    block._span.view()[:] = data
    return block.view()


def surrounded(size: int, at: int, value: bytes) -> bytes:
    """Return a pool of ``size`` bytes with a value in it, surrounded by canary bytes."""
    return bytes([CANARY]) * at + value + bytes([CANARY]) * (size - at - len(value))

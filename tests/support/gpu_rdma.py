"""A cluster in threads whose RDMA devices reach the memory of a CUDA driver in software."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest

from simm.client import Client
from simm.gpu import copy
from simm.gpu import direct as gpu_direct
from simm.gpu.buffers import DeviceSpan
from simm.ipc import session as session_module
from simm.rdma import registration
from tests.support.fake_cuda import FakeCuda
from tests.support.fake_rdma_cluster import FakeRdmaCluster
from tests.support.gpu import MIB, InPython, Tensor, forget_ways, installed


def descriptors() -> list[str]:
    """Return the open dma-bufs."""
    names = []
    for each in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{each}"))
        except OSError:
            continue
    return [name for name in names if "dma-buf" in name]


def driver_with_rdma(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """Yield a fake driver as the process's driver; check at the end that SiMM left nothing in it."""
    session_module.RETIRED.clear()
    monkeypatch.setattr(gpu_direct, "PEERMEM_MODULES", ["/nowhere"])
    try:
        for handle in installed(InPython()):
            yield handle.library
            copy.staging.close()
            gc.collect()
            registration.close_dropped()
            assert not descriptors()
    finally:
        copy.staging.close()
        forget_ways()
        session_module.RETIRED.clear()


def cluster_with(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, rails: int = 1, way: str = "dma-buf", **more: Any
) -> Any:
    """Yield a fake cluster whose rails reach the driver's memory in this way."""
    names = [f"r{number}" for number in range(rails)]
    cluster = FakeRdmaCluster(monkeypatch, rails=names, mine=names, size=64 * MIB, **more)
    cluster.network.gpu = fake
    fake.dma_buf = way == "dma-buf"
    if way == "nvidia-peermem":
        load_peermem(cluster, monkeypatch)
    return cluster


def load_peermem(cluster: FakeRdmaCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.network.peermem = True
    monkeypatch.setattr(gpu_direct, "PEERMEM_MODULES", ["/nowhere", "/sys"])


def memory(client: Client, fake: FakeCuda, size: int, data: bytes = b"", *, device: int = 0, at: int = 0) -> DeviceSpan:
    """Return registered memory of a GPU, from an offset into its allocation."""
    address = fake.alloc(device, at + size + 7) + at
    fake.poke(address, data)
    span = client.register(Tensor(address, size))
    assert type(span) is DeviceSpan
    return span


def ways_said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if " over " in record.message]

"""GPU memory over RDMA through staging memory, on a driver and a network in software.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from simm.errors import TransportError, UsageError
from simm.gpu import copy
from simm.ipc import session as session_module
from simm.sdk.rdma_get import Reading
from tests.support.fake_cuda import FakeCuda
from tests.support.fake_rdma_cluster import FakeRdmaCluster, until_rdma
from tests.support.gpu import (
    MIB,
    noise,
    span_of,
)

#: From 3.12 on CPython warns of every fork next to threads. They are the point of some tests.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


# -- by RDMA, on a network in software ---------------------------------------------------------------------------------


@pytest.fixture
def nothing_retired() -> Iterator[None]:
    session_module.RETIRED.clear()
    yield
    copy.staging.close()
    session_module.RETIRED.clear()


@pytest.mark.parametrize("rails", [1, 2])
def test_by_rdma_values_pass_through_pinned_memory(
    fake: FakeCuda, nothing_retired: None, monkeypatch: pytest.MonkeyPatch, rails: int
) -> None:
    """No byte goes by TCP, and the CPU copies nothing."""
    names = [f"r{number}" for number in range(rails)]
    with FakeRdmaCluster(monkeypatch, rails=names, mine=names, size=64 * MIB) as cluster:
        client = cluster.rdma()
        sizes = [1, 100, 4096, 70_000, MIB + 1, 2 * MIB]
        values = [noise(size, size) for size in sizes]
        sources: list[Any] = [span_of(fake, at % 2, size, values[at]) for at, size in enumerate(sizes)]
        for turn in range(2):
            keys = [f"key {turn} {size}" for size in sizes]
            assert client.put_many(keys, sources) == [True] * len(keys)
            assert client.get_many(keys) == values
            rooms: list[Any] = [span_of(fake, (at + turn) % 2, size + 5) for at, size in enumerate(sizes)]
            assert client.get_into_many([*keys, "absent"], [*rooms, span_of(fake, 0, 64)]) == [*sizes, None]
            assert [fake.peek(room.address, room.size) for room in rooms] == [value + bytes(5) for value in values]
        assert client.put("single", sources[2])
        assert client.get_into("single", rooms[2]) == 4096
        mixed = [values[0], sources[1], values[2], sources[3]]
        assert client.put_many(["twice", "a", "b", "twice"], mixed) == [True] * 4
        assert client.get("twice") == values[3]
        assert client.put_many(["twice", "twice"], [sources[3], values[0]]) == [True] * 2
        assert client.get("twice") == values[0]
        assert client.get_into_many(["a", "b"], [bytearray(100), rooms[2]]) == [100, 4096]
        assert client.get_into_many(["a", "b"], [rooms[1], host := bytearray(4096)]) == [100, 4096]
        assert host == values[2]
        with pytest.raises(UsageError, match="does not fit"):
            client.get_into("b", span_of(fake, 0, 4095))
        assert client.counters["rdma_fallbacks"] == 0
        assert fake.pageable == 0
        assert len(copy.staging._idle) <= 2
        assert fake.dma == [0, 0], "nothing of it was registered, and so none of it direct"
        client.close()


def test_by_rdma_a_connection_that_breaks_leaves_its_staging_memory(
    fake: FakeCuda, nothing_retired: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeRdmaCluster(monkeypatch, size=64 * MIB) as cluster:
        client = cluster.rdma()
        span = span_of(fake, 0, 70_000, noise(1, 70_000))
        assert client.put("key", span)
        (buffer,) = copy.staging._idle
        lost = []

        def breaks(*_: Any) -> None:
            lost.append(1)
            raise TransportError("broken")

        with monkeypatch.context() as patch:
            patch.setattr(Reading, "carry_out", breaks)
            assert client.get_into("key", span_of(fake, 1, 70_000)) == 70_000, "by TCP"
        assert lost
        assert buffer not in copy.staging._idle
        assert buffer.registration.closed
        until_rdma(client)
        room = span_of(fake, 1, 70_000)
        assert client.get_into("key", room) == 70_000
        assert fake.peek(room.address, 70_000) == noise(1, 70_000)
        fake.fail_next("cuMemcpyDtoHAsync_v2", [1])
        assert not client.put("other", span)
        fake.fail_next("cuMemcpyHtoDAsync_v2", [1])
        assert client.get_into("key", room) is None
        fake.failing.clear()
        assert client.get_into("key", room) == 70_000
        client.close()

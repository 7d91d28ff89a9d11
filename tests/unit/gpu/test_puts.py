"""What the worker does while a device copies a put's values out of its memory: it wakes, commits and grants."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from simm.arena.hashing import Hasher
from simm.gpu import copy
from simm.gpu.buffers import device_span
from simm.gpu.cuda import CudaError
from simm.host.buffers import Copier
from simm.ipc import answer_wait, put, session
from simm.ipc.put import ShmPut
from simm.ipc.session import WorkerSession
from simm.wire.messages import Status
from tests.support.fake_cuda import FakeCuda
from tests.support.fake_rdma_cluster import FakeRdmaCluster
from tests.support.gpu import MIB, Tensor, noise
from tests.support.put_failures import BREAKS, INTERRUPTED, LATE, unsent_at_each_failure
from tests.support.worker_thread import WorkerThread, nothing_is_lost


@pytest.fixture(autouse=True)
def nothing_retired() -> Iterator[None]:
    session.RETIRED.clear()
    yield
    copy.staging.close()
    session.RETIRED.clear()


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a put does, in order: wakes the worker, copies, asks for grants and waits for them, commits."""
    seen: list[str] = []

    def note(owner: Any, name: str, word: str) -> None:
        real = getattr(owner, name)

        def noted(*arguments: Any, **more: Any) -> Any:
            seen.append(word)
            return real(*arguments, **more)

        monkeypatch.setattr(owner, name, noted)

    note(WorkerSession, "wake", "wake")
    note(copy, "_carry_out", "copy")
    note(answer_wait, "obtain_some", "wait")
    note(put, "commit", "commit")
    note(WorkerSession, "commit_one", "commit")
    return seen


@pytest.mark.parametrize("size", [4096, MIB, 8 * MIB])
def test_the_worker_wakes_while_the_device_copies(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, steps: list[str], size: int
) -> None:
    with FakeRdmaCluster(monkeypatch, size=64 * MIB) as cluster:
        client = cluster.client("shm", deadline_s=60.0)
        address = fake.alloc(0, size)
        fake.poke(address, noise(1, size))
        assert client.put("k", Tensor(address, size))
        steps.clear()
        assert client.put("k", Tensor(address, size))
        assert [step for step in steps if step != "wait"] == ["wake", "copy", "commit"]
        assert client.get("k") == noise(1, size)


def test_a_batch_of_large_values_asks_for_room_while_it_copies(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, steps: list[str]
) -> None:
    """It waits for grants once at most, instead of once for each value."""
    size, count = 5 * MIB, 8
    with FakeRdmaCluster(monkeypatch, size=256 * MIB) as cluster:
        client = cluster.client("shm", deadline_s=60.0)
        tensors = []
        for number in range(count):
            address = fake.alloc(0, size)
            fake.poke(address, noise(number, size))
            tensors.append(Tensor(address, size))
        keys = [f"k{number}" for number in range(count)]
        for _ in range(3):
            steps.clear()
            assert client.put_many(keys, tensors) == [True] * count
        assert client.get_many(keys) == [noise(number, size) for number in range(count)]
        copies = steps.count("copy")
        assert 1 < copies == steps.count("commit") and steps.count("wait") <= 1
        for at in (at for at, step in enumerate(steps) if step == "copy"):
            assert steps[at - 1] == "wake"


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_batch_that_fails_keeps_its_grants(fake: FakeCuda, failing: int) -> None:
    """Also those that it had asked for ahead."""
    size, count = 40_000, 200
    with WorkerThread(256 * MIB) as worker:
        mine = worker.session()
        path = ShmPut(Copier(1), checksum=False)
        spans = [device_span(Tensor(fake.alloc(0, size), size)) for _ in range(count)]
        digests = [Hasher("default")(f"k{number}") for number in range(count)]
        fake.fail_next("cuMemcpyDtoHAsync_v2", [1] * 20)
        with pytest.raises(CudaError):
            path.put_many(mine, digests[:50], spans[:50], range(50), [99] * 50)
        assert 0 < len(mine.pool.for_length(size)[0]) < count, "it asks ahead, and need not wait for that"
        fake.fail_next("cuMemcpyDtoHAsync_v2", [0] * failing + [1] * 20)
        with pytest.raises(CudaError):
            path.put_many(mine, digests, spans, range(count), [99] * count)
        fake.failing.clear()
        nothing_is_lost(worker, mine)
        statuses = [99] * count
        path.put_many(mine, digests, spans, range(count), statuses)
        assert statuses == [Status.OK] * count
        nothing_is_lost(worker, mine)
        mine.close()


@pytest.mark.parametrize("how", [*BREAKS, LATE, INTERRUPTED])
def test_what_a_batch_has_not_sent(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    size, count = 40_000, 200
    spans = [device_span(Tensor(fake.alloc(0, size), size)) for _ in range(count)]
    with WorkerThread(256 * MIB) as worker:
        found = unsent_at_each_failure(worker, monkeypatch, spans, together=False, how=how)
        assert how == INTERRUPTED or (found[0] >= count - put.DEVICE_KEYS and found[-1] < count // 2)

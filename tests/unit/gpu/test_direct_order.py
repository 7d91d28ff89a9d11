"""GPU memory that RDMA devices read and write themselves: order, visibility, and transfers that end badly.

The driver's memory cannot be touched by the CPU, carries work out when a caller waits for it and not before, and shows
what other devices wrote after a flush and not before. Mutation tests remove one safety check and must find a violation.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from simm.errors import TransportError
from simm.gpu import cuda
from simm.gpu import direct as gpu_direct
from simm.gpu.buffers import DeviceSpan, device_span
from simm.gpu.cuda import CudaError
from simm.rdma import registration
from simm.rdma.api import FENCED_READ, READ, WRITE
from simm.rdma.remote_arena import CachedEntry
from simm.sdk import rdma_get, writes
from simm.sdk.tcp import TcpPath
from tests.support.client_checks import rails_of
from tests.support.dose import dosed
from tests.support.fake_cuda import LEGACY, FakeCuda
from tests.support.fake_fabric import FakeQueuePair
from tests.support.fake_rdma_cluster import FakeRdmaCluster, until_rdma
from tests.support.gpu import KIB, MIB, Tensor, forget_ways, noise, use_driver
from tests.support.gpu_rdma import cluster_with, descriptors, driver_with_rdma, memory
from tests.support.invariants import InvariantViolation
from tests.support.rdma_script import KEYS, ROOM, finds_harm, queue_pairs_outlive_failures, reads
from tests.support.waiting import WAIT_S

#: From 3.12 on CPython warns of every fork next to threads. They are the point of some tests.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    yield from driver_with_rdma(monkeypatch)


# -- order with the GPU's own work --------------------------------------------------------------------------------


def unordered(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, *, put: bool, named: bool) -> None:
    """Call while the stream still works on the memory. Raises InvariantViolation if the call does not wait for it."""
    size = 10_000
    with cluster_with(fake, monkeypatch) as cluster:
        client = cluster.rdma()
        span = memory(client, fake, size, noise(1, size), at=64)
        assert client.put("key", span)
        stream = fake.user_stream(0) if named else LEGACY
        if named:
            span = device_span(span, stream)
        fake.work(stream, 0, span.address, noise(2, size))
        if put:
            assert client.put("key", span)
            if client.get("key") != noise(2, size):
                raise InvariantViolation("the value was sent before it had been made")
        else:
            assert client.get_into("key", span) == size
            for context in (1, 2):
                fake._contexts().append(context)
                assert fake.cuCtxSynchronize() == 0
                fake._contexts().pop()
            if fake.peek(span.address, size) != noise(1, size):
                raise InvariantViolation("the value was overwritten by what came before the call")
        fake._handles.pop(stream, None)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("put", [False, True])
def test_it_comes_after_what_was_issued_before(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, put: bool, named: bool
) -> None:
    unordered(fake, monkeypatch, put=put, named=named)
    assert fake.dma[0] == 10_000 * (1 + put) and fake.dma[1] == 10_000 * (not put)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("put", [False, True])
def test_mutation_without_waiting_for_streams(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, put: bool, named: bool
) -> None:
    monkeypatch.setattr(gpu_direct, "after_work", lambda spans: None)
    with pytest.raises(InvariantViolation):
        try:
            unordered(fake, monkeypatch, put=put, named=named)
        finally:
            for handle in [key for key, each in fake._handles.items() if not getattr(each, "blocking", True)]:
                del fake._handles[handle]


def test_the_streams_that_are_waited_for(fake: FakeCuda) -> None:
    def waited(*spans: tuple[int, int]) -> list[str]:
        fake.calls.clear()
        gpu_direct.after_work([DeviceSpan(4096, 1, device=device, stream=stream) for device, stream in spans])
        assert not fake._contexts()
        return [call for call in fake.calls if "Sync" in call]

    mine = fake.user_stream(1)
    assert waited() == []
    assert waited((0, 0), (0, 0)) == ["cuStreamSynchronize"]
    assert waited((0, LEGACY)) == ["cuStreamSynchronize"]
    assert waited((1, mine)) == ["cuStreamSynchronize"] * 2, "the default one too"
    assert waited((1, mine), (1, 0), (0, 0)) == ["cuStreamSynchronize"] * 3
    assert waited((0, cuda.STREAM_PER_THREAD)) == ["cuCtxSynchronize"]
    with pytest.raises(CudaError):
        waited((1, 12345))
    assert not fake._contexts()
    del fake._handles[mine]


def test_a_gpu_that_cannot_be_waited_for(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster_with(fake, monkeypatch) as cluster:
        client = cluster.rdma()
        span = memory(client, fake, 5000, noise(1, 5000))
        assert client.put("key", span)
        fake.failing["cuStreamSynchronize"] = [700]
        assert not client.put("key", span)
        fake.failing["cuStreamSynchronize"] = [700]
        assert client.get_into("key", span) is None
        assert fake.dma == [5000, 0]
        assert client.get_into("key", span) == 5000
        assert fake.dma == [5000, 5000]


# -- when it can be seen ---------------------------------------------------------------------------------------------


def unflushed(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, single: bool) -> None:
    """Raise InvariantViolation if a get returns before the GPU sees what was read."""
    with cluster_with(fake, monkeypatch, 2) as cluster:
        client = cluster.rdma()
        sizes = [5000, 2 * MIB]
        spans: list[Any] = [memory(client, fake, size, noise(size, size), device=at) for at, size in enumerate(sizes)]
        assert client.put_many(["a", "b"], spans) == [True, True]
        for span in spans:
            fake.poke(span.address, bytes(span.size))
        for _ in range(2):
            if single:
                assert [client.get_into(key, span) for key, span in zip("ab", spans)] == sizes
            else:
                assert client.get_into_many(["a", "b"], spans) == sizes
            if [fake.peek(span.address, span.size) for span in spans] != [noise(size, size) for size in sizes]:
                raise InvariantViolation("the value is not there yet")
            assert not fake.posted
            for span in spans:
                fake.poke(span.address, bytes(span.size))


@pytest.mark.parametrize("ordering", [0, 100, 200])
@pytest.mark.parametrize("single", [False, True])
def test_what_was_read_is_there_at_the_return(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, single: bool, ordering: int
) -> None:
    fake.ordering = ordering
    unflushed(fake, monkeypatch, single)
    assert fake.flushed == (4 if ordering < 200 else 0), "once for each call and GPU"


@pytest.mark.parametrize("single", [False, True])
def test_mutation_without_the_flush(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, single: bool) -> None:
    monkeypatch.setattr(gpu_direct, "flush", lambda devices: None)
    with pytest.raises(InvariantViolation):
        unflushed(fake, monkeypatch, single)


@pytest.mark.parametrize("missing", ["option", "function"])
def test_a_gpu_whose_writes_cannot_be_flushed_is_not_read_into(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, missing: str
) -> None:
    with cluster_with(fake, monkeypatch) as cluster, caplog.at_level(logging.INFO, "simm.gpu.copy"):
        if missing == "option":
            fake.flush_options = 2
        else:
            monkeypatch.delitem(cuda.load()._calls, "flush_writes")
            with pytest.raises(CudaError, match=r"older than CUDA 11\.3"):
                cuda.load().flush_writes()
        client = cluster.rdma()
        span = memory(client, fake, 5000, noise(1, 5000))
        for _ in range(2):
            assert client.put("key", span)
            assert client.get_into("key", span) == 5000
        assert fake.peek(span.address, 5000) == noise(1, 5000)
        assert fake.dma == [10_000, 0], "WRITES need no flush"
        said = [record.message for record in caplog.records if "flush" in record.message]
        assert len(said) == 1
        assert "GPU 0: values are read into it through pinned memory" in said[0]
        # Of a GPU that orders them all by itself nobody asks for it.
        forget_ways()
        fake.ordering = 200
        assert client.get_into("key", span) == 5000
        assert fake.dma == [10_000, 5000]


def test_a_flush_that_fails(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster_with(fake, monkeypatch) as cluster:
        client = cluster.rdma()
        spans: list[Any] = [memory(client, fake, 5000, noise(1, 5000), device=device) for device in (0, 1)]
        assert client.put("key", spans[0])
        for calls in (1, 2):
            fake.failing["cuFlushGPUDirectRDMAWrites"] = [999]
            before = fake.flushed
            if calls == 1:
                assert client.get_into("key", spans[0]) is None
            else:
                assert client.get_into_many(["key", "key"], spans) == [None, None]
                assert fake.flushed == before + 1, "the other GPU's all the same"
        fake.land()
        assert client.get_into("key", spans[0]) == 5000
        assert not fake._contexts()
        with pytest.raises(CudaError):
            fake.failing["cuFlushGPUDirectRDMAWrites"] = [999]
            gpu_direct.flush([0])


def test_a_ctrl_c_at_the_door_of_the_flush(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster_with(fake, monkeypatch) as cluster:
        client = cluster.rdma()
        span = memory(client, fake, 5000, noise(1, 5000))
        assert client.put("key", span)
        real, interrupted = gpu_direct.flush, []

        def flush(devices: Any) -> None:
            if not interrupted:
                interrupted.append(1)
                raise KeyboardInterrupt
            real(devices)

        monkeypatch.setattr(gpu_direct, "flush", flush)
        fake.poke(span.address, bytes(5000))
        with pytest.raises(KeyboardInterrupt):
            client.get_into("key", span)
        assert not fake.posted
        assert fake.peek(span.address, 5000) == noise(1, 5000)

        # One during the READ stays one, though the GPU has failed as well.
        def wait(*_: Any) -> None:
            cluster.network.run()
            fake.failing["cuFlushGPUDirectRDMAWrites"] = [999]
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(FakeQueuePair, "wait", wait)
            with pytest.raises(KeyboardInterrupt):
                client.get_into("key", span)
        assert not fake.failing["cuFlushGPUDirectRDMAWrites"]
        fake.land()


# -- a writer between the steps of a READ ------------------------------------------------------------------------------


def storm(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, seed: int, rails: int = 1, way: str = "dma-buf") -> int:
    """Read into a GPU while a writer works between the steps; return the number of hits. Raises InvariantViolation."""
    with cluster_with(fake, monkeypatch, rails, way, seed=seed, pieces=12) as cluster:
        client = cluster.rdma(deadline_s=20.0)
        rooms = [memory(client, fake, ROOM, at=number) for number in range(len(KEYS))]
        hits = reads(cluster, client, seed, rooms, lambda room, size: fake.peek(room.address, size), rounds=20)
        assert bool(fake.dma[1]) is (way != "staged")
    return hits


@pytest.mark.parametrize("rails", [1, 2])
def test_a_writer_between_all_steps(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, rails: int) -> None:
    hits = 0
    for seed in range(dosed(4, quick=1)):
        with pytest.MonkeyPatch.context() as inner:
            hits += storm(fake, inner, seed, rails)
    assert hits > dosed(50, quick=10)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["dma-buf", "nvidia-peermem", "staged"])
def test_a_writer_between_all_steps_for_longer(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    for seed in range(4, 64):
        with pytest.MonkeyPatch.context() as inner:
            fake.dma = [0, 0]
            storm(fake, inner, seed, 1 + seed % 2, way)


def test_mutation_without_the_second_look(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def believe(place: CachedEntry, between: bytes, now: bytes, word: int) -> bool:
        return True

    monkeypatch.setattr(rdma_get, "confirmed", believe)
    finds_harm(partial(storm, fake))


# -- deadlines and ends ------------------------------------------------------------------------------------------------


def held_until_the_deadline(cluster: Any, which: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold these operations back. A wait for one does all others, and ends by its deadline at once.

    No clock decides, so that a busy machine has time for TCP.
    """
    real = FakeQueuePair.wait

    def wait(self: FakeQueuePair, ticket: int, until: float) -> None:
        if self.network._held is None:
            real(self, ticket, until)
            return
        self.network.run()
        real(self, ticket, 0.0)

    monkeypatch.setattr(FakeQueuePair, "wait", wait)
    cluster.network.hold(which)


def late_bytes(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, part: bool) -> None:
    """Let the deadline pass with a READ into the GPU in flight, or with an old value read but not confirmed.

    Raises InvariantViolation if the caller's memory is written after the return.
    """
    size = 100 * KIB
    with cluster_with(fake, monkeypatch) as cluster:
        client = cluster.rdma()
        span = memory(client, fake, size, noise(1, size))
        assert client.put("key", span)
        assert client.get_into("key", span) == size
        if part:
            held_until_the_deadline(cluster, lambda link, op: op[0] == FENCED_READ, monkeypatch)
        else:
            held_until_the_deadline(cluster, lambda link, op: op[0] == READ and op[3] == size, monkeypatch)
        old = fake.dma[1]
        assert client.get_into("key", span) == size, "by TCP"
        assert (fake.dma[1] - old == size) is part
        assert client.counters["rdma_fallbacks"] == 1
        until_now = fake.dma[1]
        fake.poke(span.address, b"\xee" * size)  # it is the caller's again
        cluster.network.release()
        cluster.network.run()
        fake.land()
        if fake.dma[1] != until_now or fake.peek(span.address, size) != b"\xee" * size:
            raise InvariantViolation("the memory was written after the call had returned")
        until_rdma(client)
        assert client.get_into("key", span) == size
        assert fake.peek(span.address, size) == noise(1, size)
        assert client.counters["rdma_fallbacks"] == 1


@pytest.mark.parametrize("part", [False, True])
def test_a_deadline_with_a_read_under_way(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, part: bool) -> None:
    late_bytes(fake, monkeypatch, part)


def test_mutation_without_closing_the_links_first(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvariantViolation), queue_pairs_outlive_failures(monkeypatch):
        late_bytes(fake, monkeypatch, False)


def test_mutation_a_link_that_was_closed_is_not_flushed(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_direct, "flush", lambda devices: None)
    with pytest.raises(InvariantViolation):
        late_bytes(fake, monkeypatch, True)


def test_a_deadline_with_a_write_under_way(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller may change the memory once put has returned; the stored value is the one that was passed."""
    size = 100 * KIB
    with cluster_with(fake, monkeypatch) as cluster:
        client = cluster.rdma()
        span = memory(client, fake, size, noise(1, size))
        held_until_the_deadline(cluster, lambda link, op: op[0] == WRITE and op[3] >= size, monkeypatch)
        assert client.put("key", span), "by TCP"
        before = fake.dma[0]
        fake.poke(span.address, bytes(size))
        cluster.network.release()
        cluster.network.run()
        assert fake.dma[0] == before
        assert cluster.client("shm").get("key") == noise(1, size)
        assert client.counters["rdma_fallbacks"] == 1
        assert client.counters["rdma_puts"] == 0


def test_a_connection_that_breaks_leaves_the_rest_to_tcp(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """TCP copies with the CPU, so it must not receive device addresses."""
    with cluster_with(fake, monkeypatch) as cluster:
        client = cluster.rdma()
        spans: list[Any] = [memory(client, fake, 9000, noise(at, 9000), device=at % 2, at=at) for at in range(6)]
        spans[3] = device_span(Tensor(spans[3].address, 9000))  # staged
        keys = [f"k{at}" for at in range(6)]

        def breaks(*_: Any) -> None:
            raise TransportError("broken")

        for transfer in ("rdma_put.Writing", "rdma_get.Reading"):
            with monkeypatch.context() as patch:
                patch.setattr(f"simm.sdk.{transfer}.carry_out", breaks)
                if transfer == "rdma_put.Writing":
                    assert client.put_many(keys, spans) == [True] * 6
                else:
                    for span in spans:
                        fake.poke(span.address, bytes(9000))
                    assert client.get_into_many(keys, spans) == [9000] * 6
                    assert [fake.peek(span.address, 9000) for span in spans] == [noise(at, 9000) for at in range(6)]
            until_rdma(client)
        assert client.counters["rdma_fallbacks"] == 12
        assert fake.dma == [0, 0]


@pytest.mark.parametrize("first", ["host", "staged", "direct"])
def test_what_is_left_to_tcp_is_copied_to_host_memory_in_parts(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """Copying a whole batch would need as much host memory as the batch has bytes."""
    monkeypatch.setattr(writes, "HOST_PART_BYTES", 20_000)
    with cluster_with(fake, monkeypatch) as cluster:
        client = cluster.rdma()
        sources: list[Any] = [memory(client, fake, 9000, noise(at, 9000)) for at in range(8)]
        if first == "host":
            sources[0] = noise(0, 9000)
        elif first == "staged":
            sources[0] = Tensor(sources[0].address, 9000)

        def breaks(*_: Any) -> None:
            raise TransportError("broken")

        stored: list[int] = []
        real = TcpPath.store

        def store(self: TcpPath, entries: Any, until: float = 0.0) -> list[int]:
            stored.append(sum(view.nbytes for entry in entries for view in entry[1]))
            return real(self, entries, until)

        monkeypatch.setattr("simm.sdk.rdma_put.Writing.carry_out", breaks)
        monkeypatch.setattr(TcpPath, "store", store)
        keys = [f"k{at}" for at in range(8)]
        assert client.put_many(keys, sources) == [True] * 8
        assert sum(stored) == 72_000 and max(stored) <= 20_000
        assert client.get_many(keys) == [noise(at, 9000) for at in range(8)]


def test_memory_deregistered_under_a_call(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """This is the caller's mistake: the device refuses the memory, and TCP does the rest."""
    with cluster_with(fake, monkeypatch) as cluster:
        client = cluster.rdma()
        span = memory(client, fake, 9000, noise(1, 9000))
        assert client.put("key", span)
        real = gpu_direct.after_work

        def after_work(spans: Any) -> None:
            real(spans)
            client.deregister(span)

        with monkeypatch.context() as patch:
            patch.setattr(gpu_direct, "after_work", after_work)
            fake.poke(span.address, bytes(9000))
            assert client.get_into("key", span) == 9000
        assert fake.peek(span.address, 9000) == noise(1, 9000)
        assert client.counters["rdma_fallbacks"] == 1
        assert fake.dma == [9000, 0]


def test_registrations_end_with_their_span_and_with_their_rail(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster_with(fake, monkeypatch, 2) as cluster:
        client = cluster.rdma(deadline_s=WAIT_S)  # what a busy machine does late goes by RDMA all the same
        regions = [rail.regions for rail in cluster.fabrics[0].fakes] if cluster.fabrics else []

        def on_gpu() -> int:
            return sum(region.device is not None for each in regions for region in each)

        class Owner(Tensor):
            gone = False

            def __del__(self) -> None:
                Owner.gone = True

        owner = Owner(fake.alloc(0, 5000), 5000)
        span: Any = client.register(owner)
        del owner
        assert client.put("key", span)
        assert on_gpu() == 2
        part = span.part(0, 100)
        del span
        gc.collect()
        assert on_gpu() == 2 and not Owner.gone
        del part
        gc.collect()
        registration.close_dropped()
        gc.collect()
        assert on_gpu() == 0 and Owner.gone
        span = memory(client, fake, 5000)
        until_rdma(client)  # a busy machine's connection may have been made anew meanwhile
        assert client.get_into("key", span) == 5000
        assert sorted(rail.name for rail in rails_of(span.registration)) == ["r0", "r1"]
        client.deregister(span)
        client.deregister(span)
        assert on_gpu() == 0
        span = client.register(span)
        assert client.get_into("key", span) == 5000
        client.close()
        assert rails_of(span.registration) == [], "with the rails"
        another = cluster.rdma()
        fake.poke(span.address, noise(2, 5000))
        assert another.put("key", span), "and again with the next ones"
        assert another.get("key") == noise(2, 5000)
        assert fake.dma[0] == 10_000
        assert not descriptors()


def test_a_fork_in_the_middle_of_registering(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster_with(fake, monkeypatch) as cluster:
        client = cluster.rdma()
        span = memory(client, fake, 4096, noise(1, 4096))
        pids: list[int] = []

        def refuse(what: str, rail: Any) -> str:
            if what == "register_dmabuf" and not pids:
                assert len(descriptors()) == 1
                pid = os.fork()
                if pid == 0:
                    os._exit(len(descriptors()))
                pids.append(pid)
            return ""

        cluster.network.refuse = refuse
        assert client.put("key", span)
        assert os.waitstatus_to_exitcode(os.waitpid(pids[0], 0)[1]) == 0, "descriptors left in the child"
        assert fake.dma == [4096, 0]
        calls = len(fake.calls)
        pid = os.fork()
        if pid == 0:
            status = 99
            try:
                assert rails_of(span.registration) == []
                assert not client.put("other", span)
                assert client.get_into("key", span) is None
                assert len(fake.calls) == calls, "the driver was called in a forked child"
                span.registration.close()
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert client.get_into("key", span) == 4096
        assert fake.dma == [4096, 4096]


def test_host_memory_goes_its_way_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    before = use_driver(None)
    try:
        with FakeRdmaCluster(monkeypatch) as cluster:
            client = cluster.rdma()
            span = client.register(bytearray(b"v" * 100))
            assert client.put("key", span)
            assert client.get_into("key", span) == 100
            assert type(span.registration) is registration.Registration
        assert cuda._driver is None
    finally:
        use_driver(before)

"""Clients of a cluster that put from GPU memory and get into it, on a CUDA driver in software.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import json
import os
import random
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from simm import kv
from simm.client import Client
from simm.config import engine_flags
from simm.constants import LARGE_BYTES_MAX
from simm.errors import UsageError
from simm.gpu import copy, cuda, pinning
from simm.gpu.buffers import DeviceSpan, device_span
from simm.gpu.cuda import CudaError
from simm.gpu.pinning import Pinned
from simm.host import fork
from simm.host.buffers import Span
from simm.ipc.grant_pool import return_idle
from simm.ipc.put import DEVICE_KEYS
from simm.ipc.session import WorkerSession
from simm.kv import BlockView, deregister_mr, register_mr
from simm.sdk.ops import kv_memory
from simm.sdk.reads import Gets
from tests.support import fake_cuda
from tests.support.fake_cuda import FakeCuda
from tests.support.gpu import (
    KIB,
    MIB,
    Array,
    Tensor,
    noise,
    reader_of,
    registered_by,
    shut_down,
    span_of,
    use_driver,
)
from tests.support.invariants import InvariantViolation
from tests.support.small_limits import small_limits
from tests.support.waiting import wait_until

#: From 3.12 on CPython warns of every fork next to threads. They are the point of some tests.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


# -- end to end ------------------------------------------------------------------------------------------------


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> str:
    """The test's own: the cluster is shared."""
    return f"gpu-{zlib.crc32(request.node.name.encode())}"


@pytest.fixture(params=["shm", "tcp"])
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def connect(cluster: Any, namespace: str, path: str = "shm", **more: Any) -> Client:
    return Client(cluster.manager, namespace=namespace, path=path, deadline_s=30.0, **more)


def test_put_and_get(devices: Any, cluster: Any, path: str, namespace: str) -> None:
    with connect(cluster, namespace, path) as client:
        assert client.put("first", b"x")
        registered_by(client)
        for number, size in enumerate((1, 4096, 40_000, 300_001, 5 * MIB + 3)):
            value = noise(size, size)
            address = devices.alloc(number % 2, size)
            devices.poke(address, value)
            assert client.put(f"from {size}", Tensor(address, size))
            assert client.get(f"from {size}") == value
            room = devices.alloc((number + 1) % 2, size + 8)
            assert client.get_into(f"from {size}", Array(room, size + 8)) == size
            assert devices.peek(room, size + 8) == value + bytes(8)
            assert client.put(f"of the host {size}", value)
            devices.poke(room, bytes(size))
            assert client.get_into(f"of the host {size}", device_span(Tensor(room, size))) == size
            assert devices.peek(room, size) == value
        assert client.get_into("absent", Tensor(devices.alloc(0, 64), 64)) is None


def test_values_in_parts(devices: Any, cluster: Any, path: str, namespace: str) -> None:
    """Out of a device's memory and into it, and ranges of both kinds of memory."""
    value = noise(7, 2000)
    with small_limits(), connect(cluster, namespace, path) as client:
        address, room = devices.alloc(0, 2000), devices.alloc(1, 2010)
        devices.poke(address, value)
        assert client.put("k", Tensor(address, 2000)) and client.stats()["large"] == 1
        assert client.get("k") == value
        assert client.get_into("k", Tensor(room, 2010)) == 2000
        assert devices.peek(room, 2010) == value + bytes(10)
        assert client.put_gather("g", [value[:99], Tensor(address, 2000)])
        devices.poke(room, bytes(2010))
        head = bytearray(300)
        assert client.get_ranges("g", [(0, 300, head), (200, 1500, Tensor(room, 1500))]) == 2099
        whole = value[:99] + value
        assert head == whole[:300] and devices.peek(room, 1500) == whole[200:1700]


@pytest.mark.parametrize("end", ["close", "lost"])
def test_a_clients_registration_ends_with_its_use_of_the_arena(
    fake: FakeCuda, cluster: Any, namespace: str, end: str
) -> None:
    """Without the cycle collector: no other process can have what the driver has pinned."""
    gc.disable()
    try:
        with connect(cluster, namespace) as client:
            assert client.put("k", Tensor(fake.alloc(0, 40_000), 40_000))
            registered_by(client)
            address, size = reader_of(client).data_address, len(reader_of(client).data)

            def registered() -> bool:
                return any(address <= each < address + size for each in list(fake.ranges))

            assert registered()
            if end == "lost":
                (target,) = client._router.targets.values()  # type: ignore[union-attr]
                target.close(clean=False)
                wait_until(lambda: not registered(), "it is undone")
        wait_until(lambda: not registered(), "it is undone")
    finally:
        gc.enable()
    assert not fake.violations


def test_batches(devices: Any, cluster: Any, path: str, namespace: str) -> None:
    """Batches with misses, host memory and both devices among them."""
    with connect(cluster, namespace, path) as client:
        count = 3 * DEVICE_KEYS // 2
        sizes = [random.Random(at).choice((100, 4096, 20_000, 50_000)) for at in range(count)]
        values = [noise(at, size) for at, size in enumerate(sizes)]
        sources: list[Any] = []
        for at, value in enumerate(values):
            if at % 7 == 3:
                sources.append(value)
                continue
            address = devices.alloc(at % 2, sizes[at])
            devices.poke(address, value)
            sources.append(Tensor(address, sizes[at]))
        keys = [f"batch {at}" for at in range(count)]
        assert client.put_many(keys, sources) == [True] * count
        assert client.get_many(keys) == values
        wanted = [key if at % 5 else "absent" for at, key in enumerate(keys)]
        rooms: list[Any] = []
        for at, size in enumerate(sizes):
            rooms.append(bytearray(size) if at % 6 == 5 else Tensor(devices.alloc((at + 1) % 2, size), size))
        got = client.get_into_many(wanted, rooms)
        assert got == [size if at % 5 else None for at, size in enumerate(sizes)]
        for at, room in enumerate(rooms):
            if at % 5:
                data = bytes(room) if isinstance(room, bytearray) else devices.peek(room.data_ptr(), sizes[at])
                assert data == values[at]
        # A first sink or source in host memory: the others are done one by one.
        order = sorted(range(count), key=lambda at: not isinstance(sources[at], bytes))
        assert client.put_many([f"again {at}" for at in order], [sources[at] for at in order]) == [True] * count
        assert client.get_many([f"again {at}" for at in order]) == [values[at] for at in order]
        few = order[:1] + [at for at in order if not isinstance(sources[at], bytes)][:3]
        sinks = [bytearray(sizes[few[0]]), *(Tensor(devices.alloc(0, sizes[at]), sizes[at]) for at in few[1:])]
        assert client.get_into_many([f"again {at}" for at in few], sinks) == [sizes[at] for at in few]
        for at, sink in zip(few[1:], sinks[1:]):
            assert devices.peek(sink.data_ptr(), sizes[at]) == values[at]


def test_small_buffers_and_wrong_ones(fake: FakeCuda, cluster: Any, path: str, namespace: str) -> None:
    with connect(cluster, namespace, path) as client:
        client.put("key", b"v" * 100)
        room = fake.alloc(0, 99)
        with pytest.raises(UsageError, match="does not fit a buffer of 99 bytes"):
            client.get_into("key", Tensor(room, 99))
        with pytest.raises(UsageError, match="does not fit a buffer of 99 bytes"):
            client.get_into_many(["key", "key"], [Tensor(room, 99), Tensor(fake.alloc(0, 100), 100)])
        assert not any(fake.peek(room, 99)), "not one byte is written"
        with pytest.raises(UsageError, match="read-only"):
            client.get_into("key", Array(room, 99, data=(room, True)))
        with pytest.raises(UsageError, match="not contiguous"):
            client.put("key", Tensor(room, 99, contiguous=False))
        with pytest.raises(UsageError, match="a tensor on xpu cannot be copied"):
            client.put("key", Tensor(room, 99, kind="xpu"))
        with pytest.raises(UsageError, match=f"1 to {LARGE_BYTES_MAX} bytes"):
            client.put("key", Tensor(fake.alloc(0, 1), LARGE_BYTES_MAX + 1))
        span = client.register(Tensor(room, 99))
        assert type(span) is DeviceSpan
        assert client.register(span) is span
        assert type(client.register(Array(room, 99))) is DeviceSpan
        assert client.put("other", span)


def test_checksums(fake: FakeCuda, cluster: Any, path: str, namespace: str) -> None:
    with connect(cluster, namespace, path, checksum=True) as client, connect(cluster, namespace) as trusting:
        values = [noise(at, 50_000) for at in range(4)]
        sources = [span_of(fake, 0, 50_000, value) for value in values]
        keys = [f"key {at}" for at in range(4)]
        assert client.put_many(keys, sources) == [True] * 4
        assert client.put("single", sources[0])
        rooms = [span_of(fake, 1, 50_000) for _ in range(4)]
        assert client.get_into_many(keys, rooms) == [50_000] * 4
        assert client.get_into("single", rooms[0]) == 50_000
        assert [fake.peek(room.address, 50_000) for room in rooms] == [values[0], *values[1:]]
        view = trusting.view("key 1")
        assert view
        found = reader_of(trusting).locate(trusting.digest("key 1"))
        reader_of(trusting).data[found.offset - reader_of(trusting).data_offset] ^= 1
        view.close()
        assert client.get_into_many(keys, rooms) == [50_000, None, 50_000, 50_000]
        assert client.counters["crc_errors"] == 1


def test_two_copies(fake: FakeCuda, cluster: Any, path: str, namespace: str) -> None:
    with connect(cluster, namespace, path, replicas=2) as client:
        span = span_of(fake, 0, 5000, noise(3, 5000))
        assert client.put("key", span)
        room = span_of(fake, 1, 5000)
        assert client.get_into("key", room) == 5000
        assert fake.peek(room.address, 5000) == noise(3, 5000)


def test_async_and_the_callers_streams(fake: FakeCuda, cluster: Any, path: str, namespace: str) -> None:
    """A put out of memory that is still being computed stores what comes out of it."""
    with connect(cluster, namespace, path) as client:
        client.put("first", b"x")
        registered_by(client)
        mine = fake.user_stream(0)
        for stream, named in ((mine, mine), (cuda.STREAM_LEGACY, None), (mine, cuda.STREAM_PER_THREAD)):
            address = fake.alloc(0, 4096)
            fake.work(stream, 0, address, b"computed" + bytes(4088))
            assert asyncio.run(client.put_async("key", Array(address, 4096, stream=named)))
            assert client.get("key") == b"computed" + bytes(4088)
            room = fake.alloc(0, 4096)
            assert asyncio.run(client.get_into_async("key", Array(room, 4096, stream=named))) == 4096
            assert fake.peek(room, 8) == b"computed"
        fake._handles.pop(mine)


def test_engines_by_kv(fake: FakeCuda, cluster: Any, monkeypatch: pytest.MonkeyPatch, namespace: str) -> None:
    for name in [name for name in os.environ if name.startswith("SIMM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SIMM_CLUSTER_MANAGER", cluster.manager)
    monkeypatch.setenv("SIMM_NAMESPACE", namespace)
    monkeypatch.setattr(engine_flags, "_flags", {})
    monkeypatch.setattr(kv_memory, "_torch", lambda: None)
    size, page = 64 * KIB, 4 * KIB
    pool = fake.alloc(1, size)
    fake.poke(pool, noise(9, size))
    tensor = Tensor(pool, size)
    with kv.Store() as store:
        mr = register_mr(tensor)
        assert mr is not None
        assert "MrExt" in repr(mr)
        views = [BlockView.from_buffer(pool + at, page, mr) for at in range(0, size, page)]
        keys = [f"page {at}" for at in range(len(views))]
        assert store.mput(keys, views) == [0] * len(views)
        out = fake.alloc(0, size)
        other = register_mr(Array(out, size))
        assert other is not None
        rooms = [BlockView.from_buffer(out + at, page, other) for at in range(0, size, page)]
        assert store.mget(keys, rooms) == [page] * len(rooms)
        assert fake.peek(out, size) == noise(9, size)
        whole = BlockView.from_tensor(tensor, mr)
        assert store.put("whole", whole) == 0
        assert store.get("whole", BlockView.from_tensor(Array(out, size))) == size
        assert store.get("whole", rooms[0]) < 0
        assert whole.as_ref().__cuda_array_interface__["data"] == (pool, False)
        read_only = register_mr(Array(out, size, data=(out, True)))
        assert read_only is not None
        assert store.get("whole", BlockView.from_buffer(out, size, read_only)) == -1000
        wrong = BlockView.from_buffer(out + (1 << 40), page, other)
        assert store.put("nowhere", wrong) < 0
        assert store.get(keys[0], wrong) < 0
        assert deregister_mr(mr)
        assert isinstance(mr._span, DeviceSpan)
        assert register_mr(Tensor(pool, size, contiguous=False)) is None


# -- what the confirmation is worth --------------------------------------------------------------------------------


def overwritten_while_copied(fake: FakeCuda, cluster: Any, namespace: str, keys: Sequence[str]) -> None:
    """Overwrite a value's key while its DMA is in flight, and fill its chunk with other values."""
    size = 64 * KIB
    old, new = b"o" * size, b"n" * size
    with connect(cluster, namespace) as client, connect(cluster, namespace) as other:
        for key in keys:
            assert client.put(key, old)
        registered_by(client)
        struck: list[int] = []

        def strike(into: bool, _host: int, length: int) -> None:
            if into and length == size and not struck:
                struck.append(1)
                for key in keys:
                    assert other.put(key, new)
                for at in range(3 * len(keys) + 8):
                    assert other.put(f"others' {at}", b"x" * size)

        fake.on_copy = strike
        rooms = [span_of(fake, 0, size) for _ in keys]
        got = client.get_into_many(keys, rooms) if len(keys) > 1 else [client.get_into(keys[0], rooms[0])]
        data = [fake.peek(room.address, size) for room in rooms]
        fake.on_copy = None
        for length, value in zip(got, data):
            if length is not None and value not in (old, new):
                raise InvariantViolation(f"a hit, with {value[:4]!r}")
        if not struck:
            raise InvariantViolation("the copy was not carried out before the call returned")
        assert got == [size] * len(keys)
        assert data == [new] * len(keys)


@pytest.mark.parametrize("count", [1, 3, 40])
def test_a_value_that_changes_under_its_dma(fake: FakeCuda, cluster: Any, namespace: str, count: int) -> None:
    overwritten_while_copied(fake, cluster, namespace, [f"key {at}" for at in range(count)])


def arenas_kept(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Readers of arenas that copies go to and from: a control that carries copies out after their call, and after their
    client's end, must keep the maps itself."""
    kept: list[Any] = []
    real = DeviceSpan.pinned

    def pinned(self: DeviceSpan, mapping: Any) -> Pinned:
        kept.append(mapping)
        return real(self, mapping)

    monkeypatch.setattr(DeviceSpan, "pinned", pinned)
    return kept


def copies_only_begun(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Inject a bug: nobody waits for a copy. Return the copies in flight."""
    late: list[Any] = []

    def begin_only(copies: Any, *, inward: bool) -> None:
        late.append(in_flight := copy.InFlightCopies(cuda.load()))
        for span, address, size, part in copies:
            in_flight.begin(span, address, size, part, inward)

    monkeypatch.setattr(copy, "_carry_out", begin_only)
    return late


@pytest.mark.parametrize("count", [1, 40])
def test_mutation_confirmed_before_it_was_copied(
    fake: FakeCuda, cluster: Any, namespace: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = arenas_kept(monkeypatch)
    late = copies_only_begun(monkeypatch)
    with pytest.raises(InvariantViolation):
        overwritten_while_copied(fake, cluster, namespace, [f"key {at}" for at in range(count)])
    assert kept
    for copies in reversed(late):
        copies.wait()


def stored_as_it_was(fake: FakeCuda, cluster: Any, namespace: str, count: int) -> None:
    """A put stores what the memory had at the call, also if the memory changes right after it."""
    with connect(cluster, namespace) as client:
        client.put("first", b"x")
        registered_by(client)
        spans = [span_of(fake, 0, 8 * KIB, b"v" * 8 * KIB) for _ in range(count)]
        keys = [f"key {at}" for at in range(count)]
        assert client.put_many(keys, spans) == [True] * count
        for span in spans:
            fake.poke(span.address, b"later" * 8)
        if client.get_many(keys) != [b"v" * 8 * KIB] * count:
            raise InvariantViolation("a put came back before it had read its memory")


@pytest.mark.parametrize("count", [1, DEVICE_KEYS + 3])
def test_a_put_has_read_when_it_returns(fake: FakeCuda, cluster: Any, namespace: str, count: int) -> None:
    stored_as_it_was(fake, cluster, namespace, count)


def test_mutation_committed_before_it_was_copied(
    fake: FakeCuda, cluster: Any, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = arenas_kept(monkeypatch)
    late = copies_only_begun(monkeypatch)
    with pytest.raises(InvariantViolation):
        stored_as_it_was(fake, cluster, namespace, 5)
    assert kept
    monkeypatch.undo()
    for copies in reversed(late):
        copies._driver.push(0)
        copies.wait()
    while fake._contexts():
        cuda.load().pop()


# -- a GPU that fails ------------------------------------------------------------------------------------------------


def session_of(client: Client) -> WorkerSession:
    router = client._router
    assert router is not None
    (target,) = router.targets.values()
    assert target.session is not None
    return target.session


def grants_of(client: Client) -> int:
    return sum(map(len, session_of(client).pool.stocks.values()))


@pytest.mark.parametrize("count", [1, 20])
def test_a_failing_gpu_is_an_outage(fake: FakeCuda, cluster: Any, path: str, namespace: str, count: int) -> None:
    with connect(cluster, namespace, path) as client:
        values = [noise(at, 9000) for at in range(count)]
        keys = [f"key {at}" for at in range(count)]
        spans = [span_of(fake, 0, 9000, value) for value in values]
        assert client.put_many(keys, spans) == [True] * count
        before = grants_of(client) if path == "shm" else 0
        for name, wrong in (("cuMemcpyDtoHAsync_v2", 1), ("cuCtxSetCurrent", 700)):
            fake.fail_next(name, [wrong])
            assert client.put_many([f"failed {key}" for key in keys], spans) == [False] * count
            assert fake.failing.pop(name) == []
        for name, wrong in (("cuMemcpyHtoDAsync_v2", 1), ("cuCtxSetCurrent", 700)):
            outages = client.counters["outages"]
            # By TCP new staging memory is registered first, as the failure before has dropped the old one: the context
            # is set for that, and set back, which is tried twice.
            failures = [wrong] * (4 if (path, name) == ("tcp", "cuCtxSetCurrent") else 1)
            fake.fail_next(name, list(failures))
            assert client.get_into_many(keys, spans) == [None] * count
            assert client.counters["outages"] - outages == count
            fake.failing.clear()
            fake.fail_next(name, list(failures))
            assert client.get_into(keys[0], spans[0]) is None
            fake.failing.clear()
        if path == "shm":
            assert grants_of(client) >= before, "grants of values that were not copied are back in the pool"
            assert not session_of(client).copying
        assert client.put_many(keys, spans) == [True] * count
        assert client.get_into_many(keys, spans) == [9000] * count
        assert client.stats()["workers"][0]["path"] == path, "the path is none the worse for it"
        assert client.get_many(keys) == [fake.peek(span.address, 9000) for span in spans]


def late_writes(fake: FakeCuda, cluster: Any, namespace: str, count: int) -> None:
    """The driver cannot say that a put's copies have ended, and they go on long after."""
    size = 9000
    with connect(cluster, namespace) as client:
        client.put("first", b"x" * size)
        registered_by(client)
        session = session_of(client)
        spans = [span_of(fake, 0, size, b"late" * (size // 4)) for _ in range(count)]
        return_idle(session)
        fake.failing["cuStreamSynchronize"] = [700]
        assert client.put_many([f"failed {at}" for at in range(count)], spans) == [False] * count
        still_there = list(session.copying)
        keys = [f"later {at}" for at in range(4 * count + 8)]
        values = [noise(at, size) for at in range(len(keys))]
        assert client.put_many(keys, values) == [True] * len(keys)
        for each in list(fake._handles.values()):
            if isinstance(each, fake_cuda.Stream):
                fake._run(each)
        # A miss is no harm: the cluster's memory may be full of other tests' values.
        found = [(got, value) for got, value in zip(client.get_many(keys), values) if got is not None]
        assert len(found) > 4
        wrong = sum(got != value for got, value in found)
        session.copying.clear()
    kept = list(fork._KEPT.values())
    fork._KEPT.clear()
    for stream in kept:
        if isinstance(stream, copy._Stream):
            cuda.load().push(0)
            stream.close()
            cuda.load().pop()
    for part in [*pinning._pinned.values(), *(part for part in kept if isinstance(part, Pinned))]:
        part.stuck = False
        part.close()
    if wrong:
        raise InvariantViolation(f"a late write went into {wrong} others' values")
    assert still_there == [None], "the session's grants are kept until the process ends"


@pytest.mark.parametrize("count", [1, 20])
def test_a_chunk_that_may_still_be_written_is_never_given_back(
    fake: FakeCuda, cluster: Any, namespace: str, count: int
) -> None:
    late_writes(fake, cluster, namespace, count)


@pytest.mark.parametrize("count", [1, 20])
def test_mutation_a_chunk_given_back_too_early(
    fake: FakeCuda, cluster: Any, namespace: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy, "UnfinishedCopy", CudaError)
    with pytest.raises(InvariantViolation, match="a late write"):
        late_writes(fake, cluster, namespace, count)


# -- forks ---------------------------------------------------------------------------------------------------------


def test_a_forked_child_has_no_gpu_and_the_rest_as_ever(fake: FakeCuda, cluster: Any, namespace: str) -> None:
    with connect(cluster, namespace) as client:
        span = span_of(fake, 0, 4096, noise(1, 4096))
        assert client.put("key", span)
        registered_by(client)
        calls = len(fake.calls)
        pid = os.fork()
        if pid == 0:
            status = 99
            try:
                host = bytearray(4096)
                wait_until(lambda: client.get_into("key", host) == 4096, "it connects again")
                assert host == noise(1, 4096)
                assert client.get_into("key", span) is None
                assert client.put("other", span) is False
                assert client.put_many(["a", "b"], [span, span]) == [False, False]
                try:
                    device_span(Tensor(span.address, 4096))
                except UsageError as exc:
                    assert "does not survive a fork" in str(exc)
                else:
                    raise AssertionError("a span in a forked child")
                shut_down()
                client.close()
                gc.collect()
                assert len(fake.calls) == calls, "the driver was called in a forked child"
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert client.get_into("key", span) == 4096


# -- the CPU's part ----------------------------------------------------------------------------------------------------


def test_host_memory_goes_its_way_without_a_driver(cluster: Any, namespace: str) -> None:
    """SiMM does not touch CUDA if no caller passes GPU memory."""
    before = use_driver(None)
    try:
        with connect(cluster, namespace) as client:
            client.put("key", b"v" * 100)
            buffer = bytearray(100)
            assert client.get_into("key", buffer) == 100
            assert client.get_into("key", client.register(buffer)) == 100
            assert isinstance(client.register(buffer), Span)
        assert cuda._driver is None
        assert cuda._why == ""
    finally:
        use_driver(before)


def benchmark() -> Any:
    path = Path(__file__).resolve().parents[3] / "benchmarks" / "gpu.py"
    found = importlib.util.spec_from_file_location("gpu_benchmark", path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules["gpu_benchmark"] = module
    found.loader.exec_module(module)
    return module


def test_the_benchmark_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cuda, "LIBRARY", "libthere-is-none.so.1")
    before = use_driver(None)
    try:
        assert benchmark().main([]) == 0
    finally:
        use_driver(before)
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert said.startswith("no GPU here (no CUDA driver: libthere-is-none.so.1: ")


def test_the_benchmark_runs(fake: FakeCuda, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """On the fake, whose figures mean nothing."""
    out = tmp_path / "result.json"
    options = ["--sizes", "4K,300000", "--seconds", "0", "--rounds", "1", "--memory", "512M", "--json", str(out)]
    assert benchmark().main([*options, "--staged"]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 24
    assert all(row["GB/s"] > 0 for row in rows)
    assert "Fake GPU 0" in capsys.readouterr().out
    assert benchmark().main(["--device", "7"]) == 0
    assert "no GPU 7 here" in capsys.readouterr().out


def test_mutation_the_benchmark_sees_wrong_bytes(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def read_nothing(self: Gets, target: Any, reader: Any, positions: Any, batch: Any) -> None:
        for position in positions:
            batch.results[position] = len(batch.sinks[position])

    monkeypatch.setattr(Gets, "_read_into_device", read_nothing)
    assert benchmark().main(["--sizes", "4K", "--seconds", "0", "--rounds", "1", "--memory", "512M"]) == 1
    assert "WRONG: mget of 4096 bytes" in capsys.readouterr().out

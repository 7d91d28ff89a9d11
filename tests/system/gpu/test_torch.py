"""Tensors of the real torch on the machine's GPU. Without torch or a GPU all of this is skipped.

The driver in software cannot show what these do: which stream torch computes on, whether its allocator's memory is
exported, whether a copy out of the arena really is a DMA of the device.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import os
import threading
import zlib
from collections.abc import Iterator
from typing import Any

import pytest

from simm import kv
from simm.client import Client
from simm.config import engine_flags
from simm.errors import UsageError
from simm.gpu import copy, cuda, direct
from simm.gpu.buffers import device_span
from simm.kv import BlockView, register_mr
from tests.support.gpu import KIB, MIB, Real, current, registered_by, shut_down

pytestmark = pytest.mark.skipif(
    bool(Real.missing()) or importlib.util.find_spec("torch") is None, reason="no GPU, or no torch"
)
#: Cycles that a GPU is kept busy: a tenth of a second on today's.
BUSY = 200_000_000


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> str:
    return f"torch-{zlib.crc32(request.node.name.encode())}"


@pytest.fixture(autouse=True)
def all_undone() -> Iterator[None]:
    yield
    gc.collect()
    shut_down()


def connect(cluster: Any, namespace: str, path: str = "shm", **more: Any) -> Client:
    client = Client(cluster.manager, namespace=namespace, path=path, deadline_s=30.0, **more)
    client.wait_ready()
    return client


def drawn(torch: Any, *shape: int, seed: int = 1, dtype: str = "bfloat16") -> Any:
    source = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randint(-120, 120, shape, generator=source, device="cuda").to(getattr(torch, dtype))


def bytes_of(tensor: Any) -> bytes:
    import torch

    return bytes(tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes())


@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize("path", ["shm", "tcp"])
def test_tensors_there_and_back(torch: Any, cluster: Any, namespace: str, path: str, checksum: bool) -> None:
    with connect(cluster, namespace, path, checksum=checksum) as client:
        for number, (shape, dtype) in enumerate(
            [((1,), "uint8"), ((3, 5, 7), "bfloat16"), ((128, 8, 128), "float16"), ((2, 1 << 20), "float32"),
             ((9, 333_333), "int64")]
        ):  # fmt: skip
            value = drawn(torch, *shape, seed=number, dtype=dtype)
            for registered in (False, True):
                if registered and path == "shm":
                    registered_by(client)
                assert client.put(f"k{number}", value)
                assert client.get(f"k{number}") == bytes_of(value)
                room = torch.zeros_like(value)
                assert client.get_into(f"k{number}", room) == value.numel() * value.element_size()
                assert torch.equal(room.view(torch.uint8), value.view(torch.uint8))
        part = drawn(torch, 64, 64)
        assert client.put("part", part[8:16]) and client.get("part") == bytes_of(part[8:16])
        rooms = torch.zeros(64, 64, dtype=torch.bfloat16, device="cuda")
        assert client.get_into("part", rooms[1:9]) == 8 * 64 * 2
        assert torch.equal(rooms[1:9], part[8:16]) and not rooms[0].any() and not rooms[9:].any()
        with pytest.raises(UsageError, match="not contiguous"):
            client.put("bad", part[:, 3:5])
        with pytest.raises(UsageError, match="does not fit"):
            client.get_into("part", rooms[0])
        weight = torch.ones(10, device="cuda", requires_grad=True)
        assert client.put("weight", weight) and client.get("weight") == bytes_of(weight.detach())


def test_copies_are_the_devices_own(
    torch: Any, cluster: Any, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a registered arena no byte passes staging memory."""
    staged: list[int] = []
    real = copy._Stream.stage

    def stage(self: Any, target: int, source: int, size: int, inward: bool) -> int:
        staged.append(size)
        return real(self, target, source, size, inward)

    monkeypatch.setattr(copy._Stream, "stage", stage)
    with connect(cluster, namespace) as client:
        assert client.put("first", b"x")
        registered_by(client)
        value = drawn(torch, 8 * MIB, dtype="uint8")
        assert client.put("k", value)
        room = torch.zeros_like(value)
        assert client.get_into("k", room) == 8 * MIB and torch.equal(room, value)
        assert not staged
        copy.copy_in(device_span(room), memoryview(bytes(100)))
        assert staged, "the test would see a staged copy"


@pytest.mark.parametrize("registered", [False, True])
def test_what_is_still_being_computed_is_stored(torch: Any, cluster: Any, namespace: str, registered: bool) -> None:
    """On torch's stream of the moment, whichever it is, if it is the default one or is named."""
    with connect(cluster, namespace) as client:
        assert client.put("first", b"x")
        if registered:
            registered_by(client)
        value = torch.zeros(MIB, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        torch.cuda._sleep(BUSY)
        value.fill_(7)
        assert client.put("default", value)
        assert client.get("default") == b"\x07" * MIB
        side = torch.cuda.Stream()
        for busy in range(1, 9):  # longer and longer, as a busy CPU may come too late
            value.fill_(7)
            torch.cuda.synchronize()
            with torch.cuda.stream(side):
                for _ in range(1 << busy):
                    torch.cuda._sleep(BUSY)
                value.fill_(9)
                # Nobody says which stream: this is what the documentation warns of, and it shows that the GPU was busy.
                assert client.put("unnamed", value)
                assert client.put("side", device_span(value, stream=side.cuda_stream))
            assert client.get("side") == b"\x09" * MIB
            if client.get("unnamed") == b"\x07" * MIB:
                break
        else:
            raise AssertionError("the GPU was not busy: the test shows nothing")


@pytest.mark.parametrize("registered", [False, True])
def test_what_was_read_is_there_for_every_stream(torch: Any, cluster: Any, namespace: str, registered: bool) -> None:
    with connect(cluster, namespace) as client:
        value = drawn(torch, 16 * MIB, dtype="uint8")
        assert client.put("k", value)
        if registered:
            registered_by(client)
        side = torch.cuda.Stream()
        for _ in range(20):
            room = torch.zeros_like(value)
            torch.cuda.synchronize()
            assert client.get_into("k", room) == 16 * MIB
            with torch.cuda.stream(side):
                same = torch.equal(room, value)
            assert same


def test_threads_and_batches(torch: Any, cluster: Any, namespace: str) -> None:
    """Four threads, each with its own tensors and stream, and the asynchronous forms."""
    wrong: list[str] = []
    with connect(cluster, namespace) as client:
        assert client.put("first", b"x")

        def work(number: int) -> None:
            with torch.cuda.stream(torch.cuda.Stream()):
                for turn in range(10):
                    values = [drawn(torch, 64 * KIB, seed=99 * number + turn + at, dtype="uint8") for at in range(12)]
                    rooms = [torch.zeros_like(value) for value in values]
                    torch.cuda.current_stream().synchronize()
                    keys = [f"{number} {turn} {at}" for at in range(12)]
                    if client.put_many(keys, values) != [True] * 12:
                        wrong.append(f"{number} {turn}: not stored")
                    if client.get_into_many(keys, rooms) != [64 * KIB] * 12:
                        wrong.append(f"{number} {turn}: a miss")
                    wrong.extend(f"{key}: wrong" for key, a, b in zip(keys, values, rooms) if not torch.equal(a, b))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong

        async def both_ways() -> bool:
            value = drawn(torch, MIB, dtype="uint8")
            room = torch.zeros_like(value)
            assert await client.put_async("async", value)
            assert await client.get_into_async("async", room) == MIB
            return bool(torch.equal(room, value))

        assert asyncio.run(both_ways())


def test_parts_and_ranges(torch: Any, cluster: Any, namespace: str) -> None:
    """A page of which each rank reads its half of every layer."""
    with connect(cluster, namespace) as client:
        layers = [drawn(torch, 16, 8, 128, seed=layer) for layer in range(12)]
        assert client.put_gather("page", [b"head" * 8, *layers])
        size = layers[0].numel() * 2
        for rank in range(2):
            rooms = [torch.zeros(8, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in layers]
            half = size // 2
            ranges = [(32 + layer * size + rank * half, half, room) for layer, room in enumerate(rooms)]
            assert client.get_ranges("page", ranges) == 32 + 12 * size
            assert all(torch.equal(room, each[rank * 8 : rank * 8 + 8]) for room, each in zip(rooms, layers))


@pytest.mark.parametrize("path", ["shm", "tcp"])
def test_layers_of_pinned_pages(torch: Any, cluster: Any, namespace: str, path: str) -> None:
    """A layer of all pages at a time, while torch computes on a stream of its own."""
    pages, layers = 12, 6
    with connect(cluster, namespace, path) as client:
        values = drawn(torch, pages, layers, 2, 16, 64)
        size = values[0, 0].numel() * 2
        keys = [f"page {page}" for page in range(pages)]
        assert client.put_many(keys, list(values)) == [True] * pages
        pool = torch.zeros_like(values)
        torch.cuda.synchronize()
        with client.pin([*keys, "absent"]) as pins, torch.cuda.stream(torch.cuda.Stream()):
            spare = torch.zeros_like(values[0, 0])
            for layer in range(layers):
                torch.cuda._sleep(BUSY // 20)
                got = pins.read([(layer * size, size, [*(pool[page, layer] for page in range(pages)), spare])])
                assert got == [layers * size] * pages + [None]
                assert torch.equal(pool[:, layer], values[:, layer]), "it is there when the call has returned"
                assert not pool[:, layer + 1 :].any()


def test_pages_of_a_pool_by_kv(torch: Any, cluster: Any, monkeypatch: pytest.MonkeyPatch, namespace: str) -> None:
    """As an engine does it: one registered pool, pages by address."""
    for name in [name for name in os.environ if name.startswith("SIMM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SIMM_CLUSTER_MANAGER", cluster.manager)
    monkeypatch.setenv("SIMM_NAMESPACE", namespace)
    monkeypatch.setattr(engine_flags, "_flags", {})
    pool = drawn(torch, 64, 2, 16, 8, 64)
    page = pool[0].numel() * 2
    out = torch.zeros_like(pool)
    with kv.Store() as store:
        mr, other = register_mr(pool), register_mr(out)
        assert mr is not None and other is not None
        keys = [f"page {at}" for at in range(64)]
        views = [BlockView.from_buffer(pool.data_ptr() + at * page, page, mr) for at in range(64)]
        rooms = [BlockView.from_buffer(out.data_ptr() + at * page, page, other) for at in range(64)]
        assert store.mput(keys, views) == [0] * 64
        assert store.mget(keys, rooms) == [page] * 64 and torch.equal(out, pool)
        assert store.get("absent", rooms[0]) < 0
        assert store.put("tensor", BlockView.from_tensor(pool[3], mr)) == 0
        assert store.get("tensor", BlockView.from_tensor(out[5], other)) == page and torch.equal(out[5], pool[3])


def test_memory_of_torch_is_exported_as_dma_buf(torch: Any) -> None:
    """What an RDMA device gets: a descriptor of all pages that the tensor touches."""
    driver = cuda.load()
    tensor = torch.zeros(4 * MIB, dtype=torch.uint8, device="cuda")
    if not driver.attribute(0, cuda.DMA_BUF_SUPPORTED):
        pytest.skip("this driver exports no dma-buf")
    page = os.sysconf("SC_PAGESIZE")
    with current(driver, 0):
        fd = driver.dma_buf(tensor.data_ptr() // page * page, 4 * MIB)
    try:
        assert os.readlink(f"/proc/self/fd/{fd}").startswith(("/dmabuf", "anon_inode:dmabuf"))
    finally:
        os.close(fd)
    direct.flush([0])


def test_a_forked_child_is_refused_and_the_parent_goes_on(torch: Any, cluster: Any, namespace: str) -> None:
    with connect(cluster, namespace) as client:
        value = drawn(torch, MIB, dtype="uint8")
        assert client.put("k", value)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                cuda.load()
            except cuda.CudaError:
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        room = torch.zeros_like(value)
        assert client.get_into("k", room) == MIB and torch.equal(room, value)

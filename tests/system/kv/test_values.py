"""``simm.kv`` on a real server: the surface that engines use, put and get, batches, memory."""

from __future__ import annotations

import array
import asyncio
import functools
import gc
import hashlib
import importlib
import inspect
import mmap
import pickle
import random
import sys
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simm import kv
from simm.constants import LARGE_BYTES_MAX, PAGE_BYTES, VALUE_BYTES_MAX
from simm.errors import Code, UsageError
from simm.kv import Block, BlockView, MrExt, Store, deregister_mr, register_mr, set_flag
from simm.sdk.ops import kv_memory
from tests.support.kv_values import MIB, as_like, content, filled, point_at, run_python
from tests.support.waiting import WAIT_S, wait_until

#: From 3.12 on CPython warns of every fork beside threads. Ours are the point of the tests.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


# --- the surface --------------------------------------------------------------------------------


def test_what_engines_import() -> None:
    names = {"Block", "BlockView", "Code", "MrExt", "Store", "deregister_mr", "register_mr", "set_flag"}
    assert set(kv.__all__) == names
    assert all(hasattr(kv, name) for name in names)
    assert not inspect.signature(Store).parameters
    forms = ("put", "get", "exists", "delete", "mput", "mget", "mexists")
    assert all(inspect.iscoroutinefunction(getattr(Store, f"{name}_async")) for name in forms)


def test_the_codes_are_named_and_have_upstreams_numbers() -> None:
    assert {code.name: int(code) for code in Code} == {
        "OK": 0, "INVALID_ARGUMENT": -1000, "NO_ROUTE": -2002, "PUT_FAILED": -2100, "GET_FAILED": -2101,
        "UNAVAILABLE": -2300, "KEY_NOT_FOUND": -4003,
    }  # fmt: skip


def test_importing_and_using_it_imports_no_torch(cluster: Any, namespace: str) -> None:
    """Torch takes seconds and a GiB; an engine without it must not pay for it."""
    code = (
        "import sys; sys.modules['torch'] = None; import simm.kv as kv\n"
        f"kv.set_flag('cm_primary_node_ip', '{cluster.manager.split(':')[0]}')\n"
        f"kv.set_flag('cm_rpc_inter_port', '{cluster.manager.split(':')[1]}')\n"
        "s = kv.Store(); b = s.allocate(10); r = b.as_ref(); r[:] = 7\n"
        "assert type(r).__module__ == 'numpy', type(r)\n"
        "g = s.allocate(10); assert s.put('k', b.view()) == 0 and s.get('k', g.view()) == 10\n"
        "assert (g.as_ref() == 7).all()\n"
    )
    done = run_python(code, namespace)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_what_sglang_does_in_its_order(cluster: Any, namespace: str, tmp_path: Path) -> None:
    point_at(cluster.manager)
    assert set_flag("clnt_log_file", str(tmp_path / "20261121-021235-20131" / "simm_clnt.log")) is True
    assert set_flag("clnt_thread_pool_size", "10") is True
    store = Store()
    key = "sglang_simm_warmup_key" + "0" * 32
    text = b"this is a warm-up value of some bytes"
    block = store.allocate(4096)
    block.as_ref()[: len(text)] = as_like(Block(len(text)), text)
    assert store.put(key, block.view()) == 0
    assert store.exists(key) is True
    back = store.allocate(4096)
    assert (store.get(key, back.view()) >= 0) is True
    assert content(back)[: len(text)] == text

    # Pages of two layouts in one pool: k in its first half, v in the second.
    pages, page = 40, 3 * 1024
    pool = np.frombuffer(random.Random(1).randbytes(2 * pages * page), np.uint16).reshape(2, pages, -1).copy()
    wanted = pool.copy()
    mr = register_mr(pool)
    assert isinstance(mr, MrExt)
    base = pool.ctypes.data
    keys, views = [], []
    for number in range(pages):
        digest = hashlib.sha256(b"%d" % number).hexdigest()
        for half, kind in enumerate("kv"):
            keys.append(f"{digest}_0_{kind}")
            views.append(BlockView.from_buffer(base + (half * pages + number) * page, page, mr))
    assert store.mexists(keys) == [False] * len(keys)
    assert store.mput(keys[:20], views[:20]) == [0] * 20
    there = store.mexists(keys)
    assert there == [True] * 20 + [False] * 60
    absent = [position for position, found in enumerate(there) if not found]
    assert store.mput([keys[at] for at in absent], [views[at] for at in absent]) == [0] * 60
    there[0] = False  # SGLang assigns into it
    pool[:] = 0
    assert store.mget(keys, views) == [page] * len(keys)
    assert (pool == wanted).all()
    assert (tmp_path / "20261121-021235-20131" / "simm_clnt.log").exists()


# --- put and get --------------------------------------------------------------------------------

SIZES = [1, 500, 4096, 4097, 33_333, 1 << 17, MIB, 4 * MIB, VALUE_BYTES_MAX]


@pytest.mark.quick
@pytest.mark.parametrize("size", SIZES)
def test_a_value_comes_back_and_results_are_plain(store: Store, size: int) -> None:
    value = random.Random(size).randbytes(size)
    view = filled(value)
    # A stream may hold grants that another test's puts by TCP have left. It returns them at its next maintenance.
    wait_until(lambda: store.put("k", view) == 0, "there is room", WAIT_S)
    results = [store.put("k", view), store.get("k", Block(size).view()), *store.mput(["k"], [view])]
    assert results == [0, size, 0]
    assert {type(result) for result in results} == {int}
    assert type(store.exists("k")) is bool
    assert type(store.delete("k")) is int
    assert store.exists("k") is False


def test_a_larger_buffer_is_filled_at_its_head_only(store: Store) -> None:
    for size in (100, 40_000):
        value = random.Random(size).randbytes(size)
        assert store.put("k", filled(value)) == 0
        pool = bytearray(b"\xee" * (size + 3000))
        address = np.frombuffer(pool, np.uint8).ctypes.data
        # A view of a piece: neither what is before it nor what is behind the value is touched.
        assert store.get("k", BlockView.from_buffer(address + 1000, size + 1000)) == size
        assert pool == b"\xee" * 1000 + value + b"\xee" * 2000


@pytest.mark.parametrize("size", [2, 5000, 2 * MIB])
def test_a_smaller_buffer_is_get_failed_and_untouched(store: Store, size: int) -> None:
    assert store.put("k", filled(b"v" * size)) == 0
    view = filled(b"\xee" * (size - 1))
    assert store.get("k", view) == Code.GET_FAILED
    assert store.mget(["k"] * 20, [view] * 20) == [int(Code.GET_FAILED)] * 20
    assert content(view) == b"\xee" * (size - 1)


def test_a_miss_is_a_code_for_every_call(store: Store) -> None:
    view = filled(b"\xee" * 10)
    assert store.get("absent", view) == Code.GET_FAILED
    assert store.exists("absent") is False
    assert store.delete("absent") == Code.KEY_NOT_FOUND
    assert store.mget(["absent"], [view]) == [int(Code.GET_FAILED)]
    assert store.mexists(["absent"]) == [False]
    assert store.mdelete(["absent"]) == [int(Code.KEY_NOT_FOUND)]
    assert content(view) == b"\xee" * 10


def test_put_on_an_existing_key_is_0_and_overwrites(store: Store) -> None:
    for size in (10, 10, 5000, 1):
        assert store.put("k", filled(bytes([size % 251]) * size)) == 0
        back = Block(5000)
        assert store.get("k", back.view()) == size
        assert content(back)[:size] == bytes([size % 251]) * size


# --- batches ------------------------------------------------------------------------------------


def test_one_bad_key_or_view_fails_alone(store: Store) -> None:
    good = filled(b"value")
    read_only = BlockView.from_tensor(b"constant")
    keys: list[Any] = ["a", "", "b", "x" * 257, "c", 5, "d", "\ud800", "e", "f", "g", "h", None, b"i", "\0"]
    views: list[Any] = [good] * 8 + [
        BlockView.from_buffer(4096, LARGE_BYTES_MAX + 1), BlockView.from_buffer(0, 10), BlockView.from_buffer(4096, 0),
        None, good, good, good,
    ]  # fmt: skip
    bad = int(Code.INVALID_ARGUMENT)
    codes = [0, bad, 0, bad, 0, bad, 0, bad, bad, bad, bad, bad, bad, bad, 0]
    assert store.mput(keys, views) == codes
    there = [code == 0 for code in codes]
    assert store.mexists(keys) == there
    got = store.mget(keys, views)
    assert got == [5, bad, 5, bad, 5, bad, 5, bad, int(Code.GET_FAILED), bad, bad, bad, bad, bad, 5]
    assert store.mget(["a", "a", "b"], [good, read_only, good]) == [5, bad, 5]
    assert store.put("constant", read_only) == 0
    missing = int(Code.KEY_NOT_FOUND)
    refused = [not isinstance(key, str) or key in ("", "\ud800") or len(key) > 256 for key in keys]
    assert store.mdelete(keys) == [
        bad if no else 0 if yes else missing for no, yes in zip(refused, there)
    ]  # fmt: skip
    for key, no in zip(keys, refused):
        if no:
            assert store.put(key, good) == store.get(key, good) == store.delete(key) == bad
            assert store.exists(key) is False
    assert store.stats()["rejected"] > 0
    assert all(type(code) is int for code in [*store.mput(keys, views), *store.mget(keys, views)])


def test_a_single_call_answers_as_a_batch_of_one(store: Store) -> None:
    """It takes a path of its own, so every kind of key and view is tried on both."""
    registered = np.zeros(8, np.uint8)
    mr = register_mr(registered)
    assert mr is not None
    views: list[Any] = [
        filled(b"value"), filled(b"much longer"), filled(b"v"), BlockView.from_tensor(b"constant"),
        BlockView.from_buffer(registered.ctypes.data, LARGE_BYTES_MAX + 1), BlockView.from_buffer(0, 10), None, "text",
        BlockView.from_buffer(registered.ctypes.data, 8, mr), BlockView.from_tensor(np.zeros(100_000, np.uint8)),
    ]  # fmt: skip
    keys: list[Any] = ["a", "", "x" * 257, 5, None, "\ud800", b"bytes", ["a"], "absent", "a\0"]
    codes = set()
    for key in keys:
        for view in views:
            for single, many in ((store.put, store.mput), (store.get, store.mget)):
                for _ in range(2):  # a value of another size is there at first, and dropped
                    assert store.put("a", views[0]) == 0
                    one = single(key, view)
                    assert store.put("a", views[0]) == 0
                    assert [one] == many([key], [view]) and type(one) is int, (key, view)
                    codes.add(one)
        assert [store.exists(key)] == store.mexists([key]) and type(store.exists(key)) is bool
    assert {0, 5, int(Code.INVALID_ARGUMENT), int(Code.GET_FAILED)} <= codes


def test_a_single_call_makes_no_batch(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    view = filled(b"value")
    assert store.put("k", view) == 0  # connected by now

    def batch(*_: object) -> Any:
        raise AssertionError("a batch of one")

    for name in ("put_digests", "get_digests", "exists_digests"):
        monkeypatch.setattr(store._client, name, batch)
    for name in ("mput", "mget", "mexists"):
        monkeypatch.setattr(store, name, batch)
    assert store.put("k", view) == 0 and store.get("k", view) == 5
    assert store.exists("k") is True and store.exists("l") is False
    assert store.get("l", view) == Code.GET_FAILED


def test_a_store_that_another_thread_closes_in_the_middle(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    view, client = filled(b"value"), store._client

    def closed(*_: object) -> Any:
        raise UsageError("this client is closed")

    for name in ("put_digest", "get_digest", "exists_digest"):
        monkeypatch.setattr(client, name, closed)
    bad = int(Code.INVALID_ARGUMENT)
    assert store.put("k", view) == store.get("k", view) == bad and store.exists("k") is False
    assert store.rejected == 3


def test_batches_of_different_lengths_and_empty_ones(store: Store) -> None:
    view = filled(b"v")
    assert store.mput(["a", "b"], [view]) == [int(Code.INVALID_ARGUMENT)] * 2
    assert store.mget(["a"], [view, view]) == [int(Code.INVALID_ARGUMENT)]
    assert store.mput([], [view]) == []
    assert store.exists("a") is False
    for result in (store.mput([], []), store.mget([], []), store.mexists([]), store.mdelete([])):
        assert result == []


def test_of_a_key_that_comes_twice_the_later_wins(store: Store) -> None:
    for count in (2, 50):
        keys = ["k"] * count + ["other"]
        assert store.mput(keys, [filled(b"%d" % number) for number in range(count + 1)]) == [0] * (count + 1)
        back = Block(8)
        length = store.get("k", back.view())
        assert content(back)[:length] == b"%d" % (count - 1)


def test_20_000_keys_in_one_mexists(store: Store) -> None:
    keys = [f"{number:064x}_0_k" for number in range(20_000)]
    stored = keys[::40]
    assert store.mput(stored, [filled(b"v")] * len(stored)) == [0] * len(stored)
    assert store.mexists(keys) == [number % 40 == 0 for number in range(20_000)]


def test_results_are_new_lists(store: Store) -> None:
    view = filled(b"v")
    keys = [f"k{number}" for number in range(20)]
    calls: list[Callable[[], list[Any]]] = [
        lambda: store.mput(keys, [view] * 20), lambda: store.mget(keys, [view] * 20), lambda: store.mexists(keys),
        lambda: store.mdelete(keys),
    ]  # fmt: skip
    for call in calls:
        first, second = call(), call()
        assert type(first) is list
        first[0] = None
        assert None not in second
        assert None not in call()


# --- memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 4095, 4096, 3 * MIB + 1])
def test_a_block_is_page_aligned_zeroed_writable_memory(store: Store, size: int) -> None:
    block = store.allocate(size)
    reference = block.as_ref()
    array_ = np.asarray(reference)
    assert (array_.ctypes.data % PAGE_BYTES, array_.shape, str(array_.dtype)) == (0, (size,), "uint8")
    assert not array_.any()
    reference[size - 1] = 9
    assert content(block.view())[-1] == 9
    assert len(block) == len(block.view()) == size
    assert block.view().view().size == size


@pytest.mark.parametrize(("size", "error"), [(0, UsageError), (-1, UsageError), ("8", TypeError), (1.5, TypeError),
                                             (True, TypeError), (1 << 62, MemoryError)])  # fmt: skip
def test_a_block_of_no_size_is_refused(store: Store, size: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        store.allocate(size)


def test_views_and_references_keep_a_block_alive() -> None:
    block = Block(1 << 16)
    view = block.view()
    reference = view.as_ref()
    reference[:] = as_like(block, b"\x5a" * (1 << 16))
    del block
    gc.collect()
    assert content(view) == b"\x5a" * (1 << 16)
    del view
    gc.collect()
    assert np.asarray(reference).tobytes() == b"\x5a" * (1 << 16)


class Tensor:
    """What register_mr needs of a torch tensor."""

    def __init__(self, array_: Any, contiguous: bool = True, device: str = "cpu") -> None:
        self.array = array_
        self.contiguous = contiguous
        self.device = types.SimpleNamespace(type=device)

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def numel(self) -> int:
        return int(self.array.size)

    def element_size(self) -> int:
        return int(self.array.itemsize)

    def is_contiguous(self) -> bool:
        return self.contiguous


class Interface:
    """Memory by the array interface alone."""

    def __init__(self, array_: Any) -> None:
        self.__array_interface__ = array_.__array_interface__
        self.array = array_
MEMORY: dict[str, Callable[[], Any]] = {
    "tensor": lambda: Tensor(np.zeros((4, 8), np.float16)),
    "array": lambda: np.zeros((4, 8), np.float16),
    "misaligned array": lambda: np.zeros(71, np.uint8)[7:],
    "array without a buffer": lambda: np.zeros(8, "datetime64[s]"),
    "structured array": lambda: np.zeros(8, [("a", "<i4"), ("b", ">i4")]),
    "bytearray": lambda: bytearray(64),
    "memoryview": lambda: memoryview(bytearray(64)),
    "array.array": lambda: array.array("d", bytes(64)),
    "mmap": lambda: mmap.mmap(-1, 64),
    "array interface": lambda: Interface(np.zeros(16, np.float32)),
}


@pytest.mark.parametrize("kind", MEMORY)
def test_all_kinds_of_memory_are_registered_and_viewed(store: Store, kind: str) -> None:
    memory = MEMORY[kind]()
    mr = register_mr(memory)
    assert isinstance(mr, MrExt)
    assert "64 bytes" in repr(mr)
    view = BlockView.from_tensor(memory, mr)
    assert view.size == 64
    assert store.put("k", filled(bytes(range(64)))) == 0
    assert store.get("k", view) == 64
    raw = memory.array if hasattr(memory, "array") and not isinstance(memory, array.array) else memory
    assert (raw.tobytes() if isinstance(raw, np.ndarray) else bytes(memoryview(raw).cast("B"))) == bytes(range(64))
    assert deregister_mr(mr) is True
    assert deregister_mr(mr) is False
    assert store.get("k", view) == 64


def test_memory_by_address_and_size(store: Store) -> None:
    pool = np.zeros(1000, np.uint8)
    mr = register_mr(pool.ctypes.data, 1000)
    assert isinstance(mr, MrExt)
    assert register_mr(np.int64(pool.ctypes.data), np.uint32(10)) is not None
    view = BlockView.from_buffer(np.uint64(pool.ctypes.data + 3), np.int32(5), mr)
    assert store.put("k", filled(b"value")) == 0
    assert store.get("k", view) == 5
    assert pool[:10].tobytes() == b"\0\0\0value\0\0"


@pytest.mark.parametrize("thing", ["text", 5, None, [1, 2], object(), 1.5, np.array([object()])])
def test_what_is_no_memory_is_a_type_error(thing: Any) -> None:
    with pytest.raises(TypeError):
        register_mr(thing)
    with pytest.raises(TypeError):
        BlockView.from_tensor(thing)


@pytest.mark.parametrize(("pointer", "size"), [("0", 8), (8, "8"), (1.0, 8), (8, None), (True, 8)])
def test_addresses_and_sizes_that_are_no_ints_are_type_errors(pointer: Any, size: Any) -> None:
    with pytest.raises(TypeError):
        BlockView.from_buffer(pointer, size)
    if size is not None:
        with pytest.raises(TypeError):
            register_mr(pointer, size)
    with pytest.raises(TypeError):
        BlockView.from_buffer(4096, 8, "mr")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("memory", "remedy"),
    [(Tensor(np.zeros(8), contiguous=False), "contiguous"), (Tensor(np.zeros(8), device="cuda"), "cuda"),
     (np.zeros((4, 4))[:, ::2], "contiguous"), (np.zeros(0), "empty"), (bytearray(), "empty")],
    ids=["tensor", "cuda tensor", "stride", "empty array", "empty bytearray"],
)  # fmt: skip
def test_memory_that_cannot_be_registered_is_none_with_the_reason_logged(
    memory: Any, remedy: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert register_mr(memory) is None
    assert remedy in caplog.text
    with pytest.raises(UsageError, match=remedy):
        BlockView.from_tensor(memory)
    assert register_mr(0, 10) is None
    assert register_mr(4096, -1) is None


def test_regions_twice_overlapping_and_stale_are_harmless(store: Store) -> None:
    """FlexKV frees a tensor under a held MR; a later tensor may get the same address."""
    pool = np.full(4096, 1, np.uint8)
    first, second = register_mr(pool), register_mr(pool[1000:3000])
    assert first is not None
    assert second is not None
    gone = weakref.ref(pool)
    address = pool.ctypes.data
    del pool
    gc.collect()
    assert gone() is not None  # the MR keeps it
    view = BlockView.from_buffer(address + 1500, 1000, second)
    assert deregister_mr(first)
    assert deregister_mr(second)
    gc.collect()
    assert gone() is not None  # and so does a view made with it
    assert store.put("k", view) == 0
    assert store.get("k", view) == 1000
    del view
    gc.collect()
    assert gone() is None
    other = np.zeros(100, np.uint8)
    stale = BlockView.from_buffer(other.ctypes.data, 100, first)  # an MR that has nothing to do with it
    assert store.put("k", stale) == 0
    assert deregister_mr(None) is False  # type: ignore[arg-type]


def test_a_read_only_region_is_a_source_and_no_sink(store: Store) -> None:
    constant = bytes(range(100))
    mr = register_mr(constant)
    address = np.frombuffer(constant, np.uint8).ctypes.data
    view = BlockView.from_buffer(address + 10, 20, mr)
    assert store.put("k", view) == 0
    assert store.get("k", view) == Code.INVALID_ARGUMENT
    assert not np.asarray(view.as_ref()).flags.writeable
    assert constant == bytes(range(100))
    with pytest.raises(UsageError, match="no memory"):
        BlockView.from_buffer(0, 1).as_ref()


def test_as_ref_is_a_torch_tensor_over_the_same_bytes() -> None:
    torch = pytest.importorskip("torch")
    block = Block(4096)
    reference = block.as_ref()
    assert type(reference) is torch.Tensor
    assert (reference.dtype, reference.ndim, reference.is_contiguous()) == (torch.uint8, 1, True)
    reference[:3] = torch.tensor([1, 2, 3], dtype=torch.uint8)
    assert content(block)[:4] == b"\1\2\3\0"
    tensor = torch.zeros(2, 3, 4, dtype=torch.bfloat16)
    assert register_mr(tensor) is not None
    assert BlockView.from_tensor(tensor).size == 48
    assert register_mr(tensor.transpose(0, 2)) is None


# --- logging, exit, outages ---------------------------------------------------------------------


def test_a_torch_that_is_there_already_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torch installed here: the module is asked by frombuffer with the very memory, and not imported again."""
    asked: list[Any] = []

    def frombuffer(memory: Any, dtype: Any) -> str:
        asked.append((memory, dtype))
        return "tensor"

    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(uint8="uint8", frombuffer=frombuffer))
    monkeypatch.setattr(kv_memory, "_torch", functools.cache(kv_memory._torch.__wrapped__))
    monkeypatch.setattr(importlib, "import_module", lambda name: pytest.fail(f"{name} imported"))
    block = Block(100)
    assert block.as_ref() == "tensor"
    memory, dtype = asked[0]
    assert dtype == "uint8"
    assert (memoryview(memory).nbytes, memoryview(memory).readonly) == (100, False)
    memory[5] = 7
    monkeypatch.setattr(kv_memory, "_torch", lambda: None)
    assert block.as_ref()[5] == 7


def test_codes_pickle_and_read_well() -> None:
    assert pickle.loads(pickle.dumps(Code.NO_ROUTE)) is Code.NO_ROUTE
    assert Code(-2101).name == "GET_FAILED"


def test_an_advance_ends_all_values_of_the_store_s_namespace(store: Store) -> None:
    """In both forms, as the other forms for asyncio: of deletes, and of the end."""
    keys = ["one", "two"]
    assert store.mput(keys, [filled(b"old")] * 2) == [0, 0]
    assert store.advance() == 0 and store.mexists(keys) == [False, False]

    async def again() -> None:
        assert await store.mput_async(keys, [filled(b"new")] * 2) == [0, 0]
        assert await store.mexists_async(keys) == [True, True]
        assert await store.mdelete_async(keys[:1]) == [0]
        assert await store.advance_async() == 0
        assert await store.mexists_async(keys) == [False, False]
        await store.close_async()

    asyncio.run(again())
    assert store.advance() == Code.INVALID_ARGUMENT

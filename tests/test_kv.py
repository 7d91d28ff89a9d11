"""simm.kv as engines use it: the surface, the codes, the flags, and that nothing of it can hurt an engine."""

from __future__ import annotations

import array
import asyncio
import gc
import hashlib
import importlib
import inspect
import logging
import mmap
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import weakref
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simm import blocks, config, kv
from simm.constants import DEFAULT_MANAGER_PORT, PAGE_BYTES, VALUE_BYTES_MAX
from simm.errors import Code, UsageError
from simm.kv import Block, BlockView, MrExt, Store, deregister_mr, register_mr, set_flag

#: From 3.12 on CPython warns of every fork beside threads. Ours are the point of the tests.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")

ROOT = Path(__file__).resolve().parent.parent
WAIT_S = 30.0
MIB = 1 << 20


def until(condition: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, f"not within {WAIT_S:.0f} s: {what}"
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No flags, clients, environment or log handler of another test."""
    for name in [name for name in os.environ if name.startswith("SIMM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(blocks, "_complained_at", -1e9)
    before = dict(kv._flags)
    kv._flags.clear()
    yield
    for client in kv._clients.values():
        client.close()
    kv._clients.clear()
    kv._users.clear()
    kv._flags.clear()
    kv._log_to(config.Settings())
    kv._flags.update(before)


@pytest.fixture
def namespace(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The test's own: the cluster is shared."""
    name = f"k{zlib.crc32(request.node.nodeid.encode()):08x}"
    monkeypatch.setenv("SIMM_NAMESPACE", name)
    return name


def point_at(address: str) -> None:
    """As SGLang does it."""
    host, port = address.split(":")
    assert set_flag("cm_primary_node_ip", host) is True
    assert set_flag("cm_primary_node_port", port) is True


@pytest.fixture
def store(cluster: Any, namespace: str) -> Store:
    point_at(cluster.manager)
    return Store()


def filled(data: bytes) -> BlockView:
    block = Block(len(data))
    block.as_ref()[:] = as_like(block, data)
    return block.view()


def as_like(block: Block | BlockView, data: bytes) -> Any:
    """The bytes as what as_ref() gives: a torch tensor where torch is installed."""
    array_ = np.frombuffer(data, np.uint8).copy()
    reference = block.as_ref()
    return array_ if isinstance(reference, np.ndarray) else sys.modules["torch"].from_numpy(array_)


def content(view: BlockView | Block) -> bytes:
    return np.asarray(view.as_ref()).tobytes()


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


def run_python(code: str, namespace: str = "default", **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "SIMM_NAMESPACE": namespace, **environment}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=env, stdin=subprocess.DEVNULL
    )


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


@pytest.mark.parametrize("size", SIZES)
def test_a_value_comes_back_and_results_are_plain(store: Store, size: int) -> None:
    value = random.Random(size).randbytes(size)
    view = filled(value)
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
        mr = register_mr(pool)
        address = np.frombuffer(pool, np.uint8).ctypes.data
        # A view of a piece: neither what is before it nor what is behind the value is touched.
        assert store.get("k", BlockView.from_buffer(address + 1000, size + 1000, mr)) == size
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
        BlockView.from_buffer(4096, VALUE_BYTES_MAX + 1), BlockView.from_buffer(0, 10), BlockView.from_buffer(4096, 0),
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


# --- flags --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "good"),
    [("cm_primary_node_ip", "10.0.0.1", True), ("cm_primary_node_ip", "manager.simm.svc", True),
     ("cm_primary_node_ip", "::1", True), ("cm_primary_node_ip", "", True), ("cm_primary_node_ip", "a b", False),
     ("cm_primary_node_ip", "10.0.0.1:30001", False), ("cm_primary_node_port", "9400", True),
     ("cm_rpc_inter_port", "30001", True), ("cm_rpc_inter_port", "0", False), ("cm_rpc_inter_port", "65536", False),
     ("cm_rpc_inter_port", "port", False), ("cm_rpc_inter_port", 30001, True), ("clnt_log_file", "/x/y.log", True),
     ("clnt_thread_pool_size", "10", True), ("clnt_thread_pool_size", "-1", False),
     ("clnt_sync_req_timeout_ms", "500", True), ("clnt_sync_req_timeout_ms", "0", False),
     ("clnt_async_req_timeout_ms", "1000", True), ("clnt_syncreq_enable_retry", "true", True),
     ("clnt_syncreq_enable_retry", "maybe", False), ("clnt_syncreq_retry_count", "3", True),
     ("clnt_use_k8s", "false", True), ("clnt_use_k8s", "False", True), ("clnt_unheard_of", "1", False),
     ("", "", False), (None, "1", False), ("cm_rpc_inter_port", None, False), ([], {}, False)],
    ids=repr,
)  # fmt: skip
def test_set_flag_answers_whether_it_took(name: Any, value: Any, good: bool, caplog: pytest.LogCaptureFixture) -> None:
    assert set_flag(name, value) is good
    assert bool(caplog.records) is not good


def test_every_flag_has_a_word_of_help_and_every_alias_a_flag() -> None:
    assert all(flag.help for flag in kv.FLAGS.values())
    assert set(kv.ALIASES.values()) <= set(kv.FLAGS)


MANAGER_CASES: list[tuple[dict[str, str], dict[str, str], str]] = [
    ({}, {}, f"127.0.0.1:{DEFAULT_MANAGER_PORT}"),
    ({"cm_primary_node_ip": "10.0.0.1"}, {}, f"10.0.0.1:{DEFAULT_MANAGER_PORT}"),
    ({"cm_primary_node_ip": "10.0.0.1", "cm_primary_node_port": "9400"}, {}, "10.0.0.1:9400"),
    ({"cm_primary_node_ip": "10.0.0.1", "cm_rpc_inter_port": "9401"}, {}, "10.0.0.1:9401"),
    ({"cm_primary_node_ip": "::1", "cm_rpc_inter_port": "9401"}, {}, "[::1]:9401"),
    ({"cm_rpc_inter_port": "9402"}, {}, "127.0.0.1:9402"),
    ({}, {"SIMM_CLUSTER_MANAGER": "10.0.0.2:5"}, "10.0.0.2:5"),
    ({"cm_rpc_inter_port": "9402"}, {"SIMM_CLUSTER_MANAGER": "10.0.0.2:5"}, "10.0.0.2:5"),
    ({"cm_primary_node_ip": "10.0.0.1"}, {"SIMM_CLUSTER_MANAGER": "10.0.0.2:5"}, f"10.0.0.1:{DEFAULT_MANAGER_PORT}"),
    ({"cm_primary_node_ip": "10.0.0.1", "clnt_use_k8s": "true"}, {}, f"10.0.0.1:{DEFAULT_MANAGER_PORT}"),
    ({"cm_primary_node_ip": ""}, {"SIMM_CLUSTER_MANAGER": "10.0.0.2:5"}, "10.0.0.2:5"),
]


@pytest.mark.parametrize(("flags", "environment", "wanted"), MANAGER_CASES)
def test_which_manager_it_is(
    flags: dict[str, str], environment: dict[str, str], wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for name, value in flags.items():
        assert set_flag(name, value)
    assert kv._wanted(kv._settings()).manager == wanted


def test_the_other_flags_reach_the_client(cluster: Any, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    point_at(cluster.manager)
    monkeypatch.setattr(kv, "DEFAULT_COPY_THREADS", 3)
    with Store() as store:
        assert store._client is not None
        assert store._client.deadline_s == 3.0
        assert store._client.namespace == namespace
    assert set_flag("clnt_async_req_timeout_ms", "700")
    assert set_flag("clnt_thread_pool_size", "10")
    assert kv._wanted(kv._settings())[4:] == (0.7, False, 3, "", 1, "")
    assert set_flag("clnt_sync_req_timeout_ms", "900")
    assert set_flag("clnt_thread_pool_size", "2")
    with Store() as store:
        assert store._client is not None
        assert store._client.deadline_s == 0.9
        assert store._client._copier.threads == 2


def test_the_environment_names_the_manager(cluster: Any, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMM_CLUSTER_MANAGER", cluster.manager)
    with Store() as store:
        assert store.put("k", filled(b"v")) == 0


# --- stores -------------------------------------------------------------------------------------


def test_no_manager_is_a_runtime_error_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simm.routing.MAP_TIMEOUT_S", 0.0)
    with socket.socket() as taken:  # bound but not listening: refused, by nobody else's mistake
        taken.bind(("127.0.0.1", 0))
        point_at(f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(RuntimeError, match=r"no manager answers .*cm_primary_node_ip"):
            Store()


def test_a_bad_environment_is_a_runtime_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMM_CLUSTER_MANAGER", "not an address")
    with pytest.raises(RuntimeError, match="SIMM_CLUSTER_MANAGER"):
        Store()


def test_stores_share_a_client_until_the_last_is_closed(cluster: Any, namespace: str) -> None:
    point_at(cluster.manager)
    first, second = Store(), Store()
    client = first._client
    assert client is not None
    assert second._client is client
    assert set_flag("clnt_sync_req_timeout_ms", "4321")
    third = Store()
    assert third._client is not client
    assert first.put("k", filled(b"v")) == 0
    assert third.exists("k") is True
    first.close()
    first.close()
    assert second.exists("k") is True
    second.close()
    assert client._closed
    assert third.exists("k") is True
    third.close()


def test_a_dropped_store_closes_nothing(cluster: Any, namespace: str) -> None:
    point_at(cluster.manager)
    store = Store()
    client = store._client
    assert client is not None
    del store
    gc.collect()
    assert not client._closed
    assert Store()._client is client


def test_a_closed_store_answers_without_raising(cluster: Any, namespace: str) -> None:
    point_at(cluster.manager)
    keeper = Store()
    view = filled(b"v")
    bad = int(Code.INVALID_ARGUMENT)
    with Store() as store:
        assert store.put("k", view) == 0
    for closed in (store, keeper):
        if closed is keeper:
            assert keeper._client is not None
            keeper._client.close()  # by someone else, while the store is in use
        assert closed.put("k", view) == closed.get("k", view) == closed.delete("k") == bad
        assert closed.exists("k") is False
        assert closed.mexists(["k", "l"]) == [False, False]
        assert closed.mput(["k"], [view]) == [bad]
        assert asyncio.run(closed.put_async("k", view)) == bad
        assert asyncio.run(closed.mexists_async(["k"])) == [False]
        assert closed.stats()["rejected"] > 0
    assert "closed" in repr(store)


def test_stores_in_processes_share_the_data(store: Store, cluster: Any, namespace: str) -> None:
    """FlexKV asks in its main process and moves data in a worker process."""
    assert store.put("parent", filled(b"from the parent")) == 0
    host, port = cluster.manager.split(":")
    code = (
        "from simm.kv import *\n"
        f"set_flag('cm_primary_node_ip', '{host}'); set_flag('cm_primary_node_port', '{port}')\n"
        "s = Store(); b = s.allocate(100)\n"
        "assert s.get('parent', b.view()) == 15 and s.put('child', b.view()) == 0\n"
    )
    done = run_python(code, namespace)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert store.mexists(["parent", "child"]) == [True, True]


def test_a_forked_child_uses_its_parents_store_and_one_of_its_own(store: Store) -> None:
    view = filled(b"value")
    assert store.put("k", view) == 0
    pid = os.fork()
    if not pid:
        code = 1
        try:
            signal.alarm(60)
            back = Block(5)
            good = store.get("k", back.view()) == 5 and content(back) == b"value"
            own = Store()
            good = good and own._client is not store._client and own.put("child", view) == 0
            own.close()
            store.close()
            code = 0 if good else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert store.mexists(["k", "child"]) == [True, True]


def test_one_store_in_many_threads(store: Store) -> None:
    """SGLang's three and some more: backups, prefetch look-ups, prefetch reads."""
    wrong: list[str] = []
    pages = [(f"{number:064x}_0_k", bytes([number + 1]) * (5000 + number)) for number in range(32)]

    def work(seed: int) -> None:
        try:
            rng = random.Random(seed)
            backs = [Block(6000) for _ in pages]
            for _ in range(25):
                some = rng.sample(range(len(pages)), 8)
                keys = [pages[number][0] for number in some]
                kind = rng.randrange(3)
                if kind == 0:
                    assert store.mput(keys, [filled(pages[number][1]) for number in some]) == [0] * 8
                elif kind == 1:
                    assert all(type(found) is bool for found in store.mexists(keys))
                else:
                    got = store.mget(keys, [backs[number].view() for number in some])
                    for number, length in zip(some, got):
                        assert length == Code.GET_FAILED or content(backs[number])[:length] == pages[number][1]
        except BaseException as exc:
            wrong.append(repr(exc))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert not wrong


# --- asyncio ------------------------------------------------------------------------------------


def test_the_async_forms_answer_the_same(store: Store) -> None:
    async def body() -> None:
        view, back = filled(b"value"), Block(10)
        assert await store.put_async("k", view) == 0
        assert await store.get_async("k", back.view()) == 5
        assert content(back) == b"value\0\0\0\0\0"
        assert await store.exists_async("k") is True
        assert await store.mput_async(["a", "", "b"], [view] * 3) == [0, int(Code.INVALID_ARGUMENT), 0]
        assert await store.mget_async(["a", "c"], [view, view]) == [5, int(Code.GET_FAILED)]
        assert await store.mexists_async(["a", "b", "c"]) == [True, True, False]
        assert await store.delete_async("k") == 0
        assert await store.delete_async("k") == Code.KEY_NOT_FOUND
        assert await asyncio.gather(*(store.put_async(f"k{n}", view) for n in range(50))) == [0] * 50

    asyncio.run(body())


def test_after_a_cancellation_the_buffer_is_left_alone(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The read is held open while the task is cancelled: it must not look cancelled before the write is over."""
    assert store.put("k", filled(b"value")) == 0
    client = store._client
    assert client is not None
    entered, go_on = threading.Event(), threading.Event()
    read = client.get_digests

    def slow(*arguments: Any) -> list[int]:
        entered.set()
        go_on.wait(WAIT_S)
        return read(*arguments)

    monkeypatch.setattr(client, "get_digests", slow)
    back = Block(5)

    async def body() -> None:
        task = asyncio.ensure_future(store.get_async("k", back.view()))
        while not entered.is_set():
            await asyncio.sleep(0)
        task.cancel()
        for _ in range(50):
            await asyncio.sleep(0)
        assert not task.done()
        assert content(back) == bytes(5)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert content(back) == b"value"

    asyncio.run(body())


# --- logging, exit, outages ---------------------------------------------------------------------


def test_a_log_file_gets_what_is_logged_and_the_program_keeps_the_rest(
    cluster: Any, namespace: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    point_at(cluster.manager)
    path = tmp_path / "a" / "b" / "simm_clnt.log"
    assert set_flag("clnt_log_file", str(path))
    store = Store()
    assert store.put("", filled(b"v")) == Code.INVALID_ARGUMENT
    assert "a key has at least 1 byte" in path.read_text()
    assert capfd.readouterr() == ("", "")
    other = tmp_path / "other.log"
    assert set_flag("clnt_log_file", str(other))
    Store()
    logging.getLogger("simm").warning("to the other one")
    assert "other one" in other.read_text()
    assert "other one" not in path.read_text()
    assert len(logging.getLogger("simm").handlers) == 1


def test_a_log_file_that_cannot_be_made_is_said_once_on_stderr(
    cluster: Any, namespace: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    point_at(cluster.manager)
    (tmp_path / "file").write_text("")
    assert set_flag("clnt_log_file", str(tmp_path / "file" / "simm_clnt.log")) is True
    stores = [Store(), Store()]
    assert stores[0].put("k", filled(b"v")) == 0
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err.count("logging to stderr") == 1


def test_mistakes_do_not_flood_the_log(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(50):
        store.mput(["", "ok"], [filled(b"v")] * 2)
    assert len([record for record in caplog.records if "invalid argument" in record.getMessage()]) == 1
    assert store.stats()["rejected"] == 50


EXITS = {
    "plain": "",
    "after a fork": (
        "import os, warnings\n"
        "warnings.simplefilter('ignore')\n"
        "pid = os.fork()\n"
        "if pid: assert os.waitpid(pid, 0)[1] == 0\n"
        "s.exists('k')\n"
    ),
    "with a thread at work": (
        "import threading\n"
        "def work():\n"
        "    while True: s.put('k', b.view()); s.get('k', b.view())\n"
        "threading.Thread(target=work, daemon=True).start()\n"
    ),
    "by sys.exit in a callback": "import asyncio\nasyncio.run(s.put_async('k', b.view()))\nimport sys\nsys.exit(0)\n",
    "with an exception": "import sys\nsys.excepthook = lambda *_: sys.stderr.flush()\n",
}


@pytest.mark.parametrize("how", EXITS)
def test_a_program_ends_without_close(cluster: Any, namespace: str, how: str) -> None:
    host, port = cluster.manager.split(":")
    code = (
        "from simm.kv import *\n"
        f"set_flag('cm_primary_node_ip', '{host}'); set_flag('cm_primary_node_port', '{port}')\n"
        "s = Store(); b = s.allocate(100000); assert s.put('k', b.view()) == 0; assert s.get('k', b.view()) == 100000\n"
    )
    done = run_python(code + EXITS[how], namespace)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_program_ends_though_its_servers_hang(make_cluster: Any) -> None:
    """Goodbyes are bounded: with everything stopped, exit waits a second and not for the deadlines of 60."""
    cluster = make_cluster(memory="64M")
    host, port = cluster.manager.split(":")
    code = (
        "from simm.kv import *\nimport os, signal\n"
        f"set_flag('cm_primary_node_ip', '{host}'); set_flag('cm_primary_node_port', '{port}')\n"
        "set_flag('clnt_sync_req_timeout_ms', '3600000')\n"
        "s = Store(); b = s.allocate(5000); assert s.put('k', b.view()) == 0\n"
        f"os.kill({cluster.worker_stats()['pid']}, signal.SIGSTOP)\n"
        f"os.kill({cluster.processes['manager'].pid}, signal.SIGSTOP)\n"
    )
    worker = cluster.worker_stats()["pid"]
    try:
        done = run_python(code)
    finally:
        os.kill(worker, signal.SIGCONT)
        os.kill(cluster.processes["manager"].pid, signal.SIGCONT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_outages_are_codes_and_end(make_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = make_cluster(memory="64M", heartbeat_ms=200)
    point_at(cluster.manager)
    assert set_flag("clnt_sync_req_timeout_ms", "2000")
    store = Store()
    view = filled(b"value")
    gone = {int(Code.UNAVAILABLE), int(Code.NO_ROUTE)}
    assert store.put("k", view) == 0
    cluster.kill("dataserver")
    assert store.put("k", view) in gone
    assert store.delete("k") in gone
    until(lambda: store.get("k", view) in gone, "gets fail")
    # The manager gives a dead node's shards away; where nobody is left they have no owner.
    until(lambda: store.put("k", view) == Code.NO_ROUTE, "the route goes")
    assert store.get("k", view) == store.delete("k") == Code.NO_ROUTE
    assert store.mput(["k", ""], [view, view]) == [int(Code.NO_ROUTE), int(Code.INVALID_ARGUMENT)]
    before = store.stats()["outages"]
    assert store.exists("k") is False
    assert store.mexists(["k", "l"]) == [False, False]
    assert store.stats()["outages"] == before + 3
    cluster.start_server()
    until(lambda: store.put("k", view) == 0, "puts are stored again")
    assert store.get("k", view) == 5
    assert store.exists("k") is True


def test_a_value_that_finds_no_room_is_put_failed(make_cluster: Any) -> None:
    cluster = make_cluster(memory="32M")
    point_at(cluster.manager)
    store = Store()
    big = Block(VALUE_BYTES_MAX).view()
    small = filled(b"v")
    assert store.put("big", big) == Code.PUT_FAILED
    assert store.mput(["a", "big", "b"], [small, big, small]) == [0, int(Code.PUT_FAILED), 0]


def test_a_torch_that_is_there_already_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torch installed here: the module is asked by frombuffer with the very memory, and not imported again."""
    asked: list[Any] = []

    def frombuffer(memory: Any, dtype: Any) -> str:
        asked.append((memory, dtype))
        return "tensor"

    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(uint8="uint8", frombuffer=frombuffer))
    monkeypatch.setattr(blocks, "_torch_module", None)
    monkeypatch.setattr(importlib, "import_module", lambda name: pytest.fail(f"{name} imported"))
    block = Block(100)
    assert block.as_ref() == "tensor"
    memory, dtype = asked[0]
    assert dtype == "uint8"
    assert (memoryview(memory).nbytes, memoryview(memory).readonly) == (100, False)
    memory[5] = 7
    monkeypatch.setattr(blocks, "_torch_module", blocks._NO_TORCH)
    assert block.as_ref()[5] == 7


def test_codes_pickle_and_read_well() -> None:
    assert pickle.loads(pickle.dumps(Code.NO_ROUTE)) is Code.NO_ROUTE
    assert Code(-2101).name == "GET_FAILED"

"""Runs the released LMCache over SiMM, by both of its seats. Started by the tests, as a process, with a JSON request.

The report is one line on stdout: for each step what the test needs to judge it. What chunks contain is computed from
the seed, so a reader never has the writer's bytes. Steps are functions here, by name with ``_`` for ``-``. Those behind
a step ``new-process`` run in another process. All are forked from one that has imported LMCache, which takes seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.metadata
import io
import json
import os
import select
import signal
import sys
import threading
import time
import traceback
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import engine_content
import numpy as np
import psutil
import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1 import basic_check
from lmcache.v1.check.utils import EventLoopManager
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.mooncake_store_l2_adapter import MooncakeStoreL2AdapterConfig
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.lookup_client.factory import LookupClientFactory
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.multiprocess.token_hasher import TokenHasher
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.remote_backend import RemoteBackend
from lmcache.v1.token_database import ChunkedTokenDatabase

from simm import cli

#: Files of the wheel that take part.
WHEEL_FILES = (
    "lmcache/v1/basic_check.py",
    "lmcache/v1/storage_backend/remote_backend.py",
    "lmcache/v1/storage_backend/connector/__init__.py",
    "lmcache/v1/distributed/l2_adapters/plugin_l2_adapter.py",
    "lmcache/v1/token_database.py",
)
CHUNK = 64
#: How long a put may take that LMCache does not wait for.
PUT_S = 60.0


@dataclass
class Case:
    prompt: str
    model: str = "org/model"
    dtype: str = "bfloat16"
    layers: int = 2
    heads: int = 4
    worker: int = 0
    world: int = 1
    chunks: int = 6
    #: Tokens of the last chunk.
    last: int = CHUNK
    #: How LMCache is told of SiMM: a plugin's name, or an address; ``mooncakestore`` for Mooncake's API, and
    #: ``mooncakestore+meta`` for it with LMCache's metadata in the values.
    seat: str = "plugin"
    deadline_ms: int = 3000
    salt: str = ""
    #: SiMM's options for what LMCache's keys do not name.
    weights: str = ""
    own_salt: str = ""
    #: Tokens of each chunk.
    chunk: int = CHUNK
    #: A byte of chunk 1 of which one bit is stored wrong.
    flip: int | None = None

    @property
    def kv_shape(self) -> tuple[int, int, int, int, int]:
        return self.layers, 2, self.chunk, self.heads, 16

    @property
    def options(self) -> dict[str, Any]:
        given = {"weight_version": self.weights, "salt": self.own_salt}
        return {"deadline_ms": self.deadline_ms, **{name: value for name, value in given.items() if value}}

    def tokens(self, seed: int) -> list[int]:
        return engine_content.tokens(seed, self.prompt, (self.chunks - 1) * self.chunk + self.last)

    def content(self, seed: int, chunk: int, size: int) -> Any:
        return engine_content.page_part(seed, self.prompt, self.worker, chunk, 0, size)


class Remote:
    """LMCache's remote backend, with the keys that its token database makes."""

    def __init__(self, case: Case, manager: str) -> None:
        self.case = case
        head = "remote_storage_plugin.simm."
        extra: dict[str, Any] = {
            f"{head}module_path": "simm.connectors.lmcache", f"{head}class_name": "SimmAdapter",
            f"{head}manager_address": manager, **{f"{head}{name}": value for name, value in case.options.items()},
        }  # fmt: skip
        url = f"simm://{manager}/?{urlencode(case.options)}"
        mooncake = case.seat.startswith("mooncakestore")
        if mooncake:
            extra = {"local_hostname": "localhost", "master_server_address": manager, "metadata_server": "none",
                     "save_chunk_meta": case.seat.endswith("+meta"),
                     # Of a put, 1 s if nothing is said. LMCache drops what takes longer, as on a busy machine.
                     "transfer_timeout": case.deadline_ms / 1000}  # fmt: skip
            url = f"mooncakestore://{manager}/"
        plugins = [] if mooncake else ["simm"]
        self.config = LMCacheEngineConfig.from_defaults(
            chunk_size=case.chunk, local_cpu=False, max_local_cpu_size=0.05, save_unfull_chunk=True, extra_config=extra,
            remote_storage_plugins=plugins, remote_url=None if case.seat == "plugin" else url, remote_serde="naive",
            pre_caching_hash_algorithm="builtin", blocking_timeout_secs=30,
        )  # fmt: skip
        self.metadata = LMCacheMetadata(
            model_name=case.model, world_size=case.world, local_world_size=case.world, worker_id=case.worker,
            local_worker_id=case.worker, kv_dtype=getattr(torch, case.dtype), kv_shape=case.kv_shape,
            chunk_size=case.chunk,
        )  # fmt: skip
        self.loop = EventLoopManager()
        self.loop.start()
        self.cpu = LocalCPUBackend(self.config, self.metadata, dst_device="cpu")
        self.backend = RemoteBackend(
            self.config, self.metadata, self.loop.get_loop(), self.cpu, dst_device="cpu",
            plugin_name="simm" if case.seat == "plugin" else None,
        )  # fmt: skip
        assert self.backend.connection is not None

    @property
    def connector(self) -> Any:
        return self.backend.connection.getWrappedConnector()

    def keys(self, seed: int) -> list[CacheEngineKey]:
        database = ChunkedTokenDatabase(self.config, self.metadata)
        return [key for _, _, key in database.process_tokens(self.case.tokens(seed))]

    def objects(self, seed: int) -> list[Any]:
        made = []
        for chunk in range(self.case.chunks):
            count = self.case.last if chunk == self.case.chunks - 1 else self.case.chunk
            obj = self.cpu.allocate(self.metadata.get_shapes(count), self.metadata.get_dtypes(), MemoryFormat.KV_2LTD)
            data = np.frombuffer(obj.byte_array, np.uint8)
            data[:] = self.case.content(seed, chunk, len(data))
            if self.case.flip is not None and chunk == 1:
                data[self.case.flip] ^= 1
            made.append(obj)
        return made

    def wrong(self, seed: int, objects: list[Any]) -> list[list[int]]:
        """Return chunk and first byte of what differs from the seed's content, and release the objects."""
        found = []
        for chunk, obj in enumerate(objects):
            if obj is None:
                continue
            data = np.frombuffer(obj.byte_array, np.uint8)
            bad = np.flatnonzero(data != self.case.content(seed, chunk, len(data)))
            if bad.size:
                found.append([chunk, int(bad[0])])
            obj.ref_count_down()
        return found

    def put(self, keys: list[CacheEngineKey], objects: list[Any]) -> None:
        """Store as LMCache does, and wait until LMCache says that the puts have ended."""
        left, ended = set(keys), threading.Event()

        def one(key: CacheEngineKey) -> None:
            left.discard(key)
            if not left:
                ended.set()

        self.backend.batched_submit_put_task(keys, objects, on_complete_callback=one)
        assert ended.wait(PUT_S)

    def ping(self) -> int:
        """Return 0 for a healthy store, as for one that LMCache does not ask."""
        if not self.connector.support_ping():
            return 0
        return int(asyncio.run_coroutine_threadsafe(self.connector.ping(), self.loop.get_loop()).result(30))

    def used(self) -> int:
        """Return how many bytes of LMCache's memory are in use."""
        return int(self.cpu.memory_allocator.pin_allocator.total_allocated_size)

    def close(self) -> None:
        self.backend.close()
        self.loop.stop()
        self.cpu.memory_allocator.close()


@contextlib.contextmanager
def remote(case: Case, manager: str) -> Iterator[Remote]:
    made = Remote(case, manager)
    try:
        yield made
    finally:
        made.close()


def remote_write(case: Case, manager: str, seed: int, step: dict[str, Any]) -> dict[str, Any]:
    """Store a prompt's chunks by LMCache's remote backend."""
    with remote(case, manager) as engine:
        keys, objects = engine.keys(seed), engine.objects(seed)
        engine.put(keys, objects)
        for obj in objects:
            obj.ref_count_down()
        return {"keys": [key.to_string() for key in keys], "used": engine.used(), "chunks": len(keys)}


def remote_read(case: Case, manager: str, seed: int, step: dict[str, Any]) -> dict[str, Any]:
    """Look for a prompt's chunks in each way that LMCache has, and get them in each."""
    with remote(case, manager) as engine:
        keys = engine.keys(seed)
        one = engine.backend.contains(keys[0])
        sync = engine.connector.exists_sync(keys[0])
        hits = engine.backend.batched_contains(keys)
        batch = engine.backend.batched_get_blocking(keys)
        single = [engine.backend.get_blocking(key) for key in keys]
        ask = engine.backend.batched_get_non_blocking("lookup", keys)
        leading = asyncio.run_coroutine_threadsafe(ask, engine.loop.get_loop()).result(30)
        shapes = [list(obj.get_shape()) for obj in batch if obj is not None]
        found = [sum(obj is not None for obj in each) for each in (batch, single, leading)]
        wrong = [engine.wrong(seed, each) for each in (batch, single, leading)]
        return {
            "one": bool(one), "sync": bool(sync), "hits": hits, "found": found, "wrong": wrong, "last": shapes[-1:],
            "ping": engine.ping(), "used": engine.used(),
        }  # fmt: skip


def mooncake_lookup(case: Case, manager: str, seed: int, step: dict[str, Any]) -> dict[str, Any]:
    """What the scheduler's client for Mooncake says is stored of a prompt, and of one that is longer: tokens."""
    with remote(case, manager) as engine:
        engine.config.external_lookup_client = f"mooncakestore://{manager}"
        client = LookupClientFactory.create_lookup_client(engine.config, engine.metadata)
        tokens = case.tokens(seed)
        longer = [*tokens, *engine_content.tokens(seed, "longer", 2 * case.chunk)]
        found = [client.lookup(each) for each in (tokens, longer, tokens[1:])]
        client.close()
        return {"client": type(getattr(client, "actual_lookup_client", client)).__name__, "found": found}


def mooncake_server(case: Case, manager: str, seed: int, step: dict[str, Any]) -> dict[str, Any]:
    """Why the server's own adapter for Mooncake cannot be made."""
    setup = {"local_hostname": "localhost", "metadata_server": "P2PHANDSHAKE", "master_server_addr": manager}
    wanted = {"type": "mooncake_store", "num_workers": 1, **setup}
    config = MooncakeStoreL2AdapterConfig.from_dict(wanted)
    try:
        create_l2_adapter(config)
    except RuntimeError as exc:
        return {"reason": str(exc), "cause": str(exc.__cause__)}
    return {"reason": ""}


def remote_remove(case: Case, manager: str, seed: int, step: dict[str, Any]) -> dict[str, Any]:
    """Remove the first chunk; the others are no prefix then."""
    with remote(case, manager) as engine:
        keys = engine.keys(seed)
        removed = [engine.backend.remove(keys[0]), engine.backend.remove(keys[0])]
        return {"removed": removed, "hits": engine.backend.batched_contains(keys)}


# -- the L2 adapter of the server ------------------------------------------------------------------------


class L2:
    """An adapter as the server makes it, on an arena of this process: one row for each object."""

    def __init__(self, case: Case, manager: str) -> None:
        self.case = case
        self.dtype = getattr(torch, case.dtype)
        self.shape = torch.Size([2, case.layers, case.chunk, case.heads * 16])
        size = self.shape.numel() * self.dtype.itemsize
        self.arena = torch.full((case.chunks, size), engine_content.CANARY, dtype=torch.uint8)
        desc = L1MemoryDesc(self.arena.data_ptr(), self.arena.numel(), 1)
        config = PluginL2AdapterConfig(
            "simm.connectors.lmcache_server", "SimmL2Adapter",
            {"manager_address": manager, **case.options},
        )  # fmt: skip
        self.adapter: Any = create_l2_adapter(config, l1_memory_desc=desc)
        self.raw = self.arena.numpy()

    def keys(self, seed: int) -> list[ObjectKey]:
        hashes = TokenHasher(self.case.chunk).compute_chunk_hashes(self.case.tokens(seed))
        rank = ObjectKey.ComputeKVRank(self.case.world, self.case.worker, self.case.world, self.case.worker)
        return [ObjectKey(each, self.case.model, rank, 0, self.case.salt) for each in hashes]

    def objects(self) -> list[Any]:
        made = []
        for row in self.arena:
            meta = MemoryObjMetadata(
                self.shape, self.dtype, row.data_ptr(), row.numel(), 1, fmt=MemoryFormat.KV_2LTD, shapes=[self.shape],
                dtypes=[self.dtype],
            )  # fmt: skip
            made.append(TensorMemoryObj(row, meta, parent_allocator=None))
        return made

    def fill(self, seed: int) -> None:
        for chunk in range(self.case.chunks):
            self.raw[chunk] = self.case.content(seed, chunk, self.raw.shape[1])
        if self.case.flip is not None:
            self.raw[1, self.case.flip] ^= 1

    def wrong(self, seed: int, rows: list[int]) -> list[list[int]]:
        found = []
        for chunk in rows:
            bad = np.flatnonzero(self.raw[chunk] != self.case.content(seed, chunk, self.raw.shape[1]))
            if bad.size:
                found.append([chunk, int(bad[0])])
        return found

    def store(self, keys: list[ObjectKey]) -> bool:
        task = self.adapter.submit_store_task(keys, self.objects())
        self.wait(self.adapter.get_store_event_fd())
        return bool(self.adapter.pop_completed_store_tasks()[task].is_successful())

    def lookup(self, keys: list[ObjectKey]) -> list[int]:
        task = self.adapter.submit_lookup_and_lock_task(keys, {})
        self.wait(self.adapter.get_lookup_and_lock_event_fd())
        found = self.adapter.query_lookup_and_lock_result(task)
        assert self.adapter.query_lookup_and_lock_result(task) is None
        return [at for at in range(len(keys)) if found.test(at)]

    def load(self, keys: list[ObjectKey]) -> list[int]:
        task = self.adapter.submit_load_task(keys, self.objects())
        self.wait(self.adapter.get_load_event_fd())
        found = self.adapter.query_load_result(task)
        return [at for at in range(len(keys)) if found.test(at)]

    def locked(self) -> int:
        return int(self.adapter.report_status()["locked"])

    @staticmethod
    def wait(descriptor: int) -> None:
        ready, _, _ = select.select([descriptor], [], [], PUT_S)
        assert ready, "no event"
        os.eventfd_read(descriptor)


@contextlib.contextmanager
def l2(case: Case, manager: str) -> Iterator[L2]:
    made = L2(case, manager)
    try:
        yield made
    finally:
        made.adapter.close()


def names_of(keys: list[ObjectKey]) -> list[str]:
    """Return the keys' text, by LMCache's own function for other stores."""
    from lmcache.v1.distributed.l2_adapters.native_connector_l2_adapter import _object_key_to_string

    return [_object_key_to_string(key) for key in keys]


def l2_write(case: Case, manager: str, seed: int, step: dict[str, Any]) -> dict[str, Any]:
    """Store a prompt's objects."""
    with l2(case, manager) as server:
        server.fill(seed)
        keys = server.keys(seed)
        stored, again = server.store(keys), server.store(keys)
        usage = server.adapter.get_usage().total_bytes_used
        descriptors = {
            server.adapter.get_store_event_fd(), server.adapter.get_load_event_fd(),
            server.adapter.get_lookup_and_lock_event_fd(),
        }  # fmt: skip
        return {
            "keys": names_of(keys), "stored": stored, "again": again, "usage": usage, "bytes": server.arena.numel(),
            "descriptors": len(descriptors), "rank": keys[0].kv_rank, "hashes": [key.chunk_hash.hex() for key in keys],
        }  # fmt: skip


def l2_read(case: Case, manager: str, seed: int, step: dict[str, Any]) -> dict[str, Any]:
    """Look for a prompt's objects, load and unlock them."""
    with l2(case, manager) as server:
        keys = server.keys(seed)
        found = server.lookup(keys)
        locked = server.locked()
        loaded = server.load(keys)
        server.adapter.submit_unlock(keys)
        strayed = [row for row in range(case.chunks) if row not in loaded and not (server.raw[row] == 0xA5).all()]
        return {
            "found": found, "locked": locked, "loaded": loaded, "wrong": server.wrong(seed, loaded), "left": strayed,
            "unlocked": server.locked(),
        }  # fmt: skip


def l2_lock(case: Case, manager: str, seed: int, step: dict[str, Any]) -> dict[str, Any]:
    """Objects that were looked up can be loaded though they are deleted meanwhile; those that were not, cannot."""
    with l2(case, manager) as server, l2(case, manager) as other:
        keys = server.keys(seed)
        server.fill(seed)
        stored = server.store(keys)
        server.raw[:] = engine_content.CANARY
        found = server.lookup(keys)
        twice = server.lookup(keys[:2])
        other.adapter.delete(keys)
        free = other.lookup(keys)
        loaded = server.load(keys)
        wrong = server.wrong(seed, loaded)
        server.adapter.submit_unlock(keys)
        still = server.load(keys)
        server.adapter.submit_unlock(keys)  # the first two had two locks, the others have none
        after = server.load(keys)
        return {
            "stored": stored, "found": found, "twice": twice, "free": free, "loaded": loaded, "wrong": wrong,
            "still": still, "after": after, "locked": server.locked(),
        }  # fmt: skip


# -- failures --------------------------------------------------------------------------------------------


def remote_calls(engine: Remote, keys: list[CacheEngineKey], objects: list[Any]) -> dict[str, Any]:
    """Return what each call finds, and how long the slowest took."""
    slowest = 0.0

    def timed(call: Callable[[], Any]) -> Any:
        nonlocal slowest
        began = time.monotonic()
        answer = call()
        slowest = max(slowest, time.monotonic() - began)
        return answer

    hits = timed(lambda: engine.backend.batched_contains(keys))
    one = timed(lambda: engine.backend.contains(keys[0]))
    got = timed(lambda: engine.backend.batched_get_blocking(keys))
    timed(lambda: engine.put(keys, objects))
    found = sum(obj is not None for obj in got)
    for obj in got:
        if obj is not None:
            obj.ref_count_down()
    return {"hits": hits, "one": one, "found": found, "slowest": slowest}


def l2_calls(server: L2, keys: list[ObjectKey]) -> dict[str, Any]:
    """Return what each call finds, and how long the slowest took."""
    slowest = 0.0
    answers: dict[str, Any] = {}
    for name, call in (("lookup", server.lookup), ("load", server.load), ("store", server.store)):
        began = time.monotonic()
        answers[name] = call(keys)
        slowest = max(slowest, time.monotonic() - began)
    return {**answers, "slowest": slowest}


def failing(case: Case, manager: str, seed: int, step: dict[str, Any]) -> dict[str, Any]:
    """Each call of the client raises, on a prompt that is stored."""
    with remote(case, manager) as engine, l2(case, manager) as server:
        keys, objects, server_keys = engine.keys(seed), engine.objects(seed), server.keys(seed)
        engine.put(keys, objects)
        server.fill(seed)
        stored = server.store(server_keys)
        server.raw[:] = engine_content.CANARY
        before = [engine.backend.batched_contains(keys), len(server.lookup(server_keys))]
        server.adapter.submit_unlock(server_keys)
        clients = (engine.connector._client, server.adapter._client)
        for client in clients:
            for name in ("get_digests", "get_many", "put_digests", "exists_digests", "delete_digests", "pin"):
                setattr(client, name, fails)
        failed, failed_l2 = remote_calls(engine, keys, objects), l2_calls(server, server_keys)
        untouched = bool((server.raw == engine_content.CANARY).all())
        for client in clients:
            for name in ("get_digests", "get_many", "put_digests", "exists_digests", "delete_digests", "pin"):
                delattr(client, name)
        after = [engine.backend.batched_contains(keys), len(server.lookup(server_keys))]
        for obj in objects:
            obj.ref_count_down()
        return {
            "stored": stored, "before": before, "failed": failed, "failed_l2": failed_l2, "untouched": untouched,
            "after": after, "used": engine.used(),
        }  # fmt: skip


def fails(*_: Any, **__: Any) -> Any:
    raise OSError("injected")


def stopped(case: Case, manager: str, seed: int, step: dict[str, Any]) -> dict[str, Any]:
    """All servers are stopped under connected clients, which reach them by TCP: every call would wait for ever."""
    os.environ["SIMM_PATH"] = "tcp"
    family = [each for pid in step["servers"] for each in (psutil.Process(pid), *psutil.Process(pid).children(True))]
    try:
        with remote(case, manager) as engine, l2(case, manager) as server:
            keys, objects, server_keys = engine.keys(seed), engine.objects(seed), server.keys(seed)
            engine.put(keys, objects)
            server.fill(seed)
            until = time.monotonic() + PUT_S
            # The deadline is for servers that are stopped. A busy machine may miss it with any put before.
            while (stored := [server.store(server_keys), engine.backend.batched_contains(keys)]) != [True, len(keys)]:
                assert time.monotonic() < until, stored
                engine.put(keys, objects)
            server.raw[:] = engine_content.CANARY
            for each in family:
                each.send_signal(signal.SIGSTOP)
            try:
                halted, halted_l2 = remote_calls(engine, keys, objects), l2_calls(server, server_keys)
                untouched = bool((server.raw == engine_content.CANARY).all())
            finally:
                for each in family:
                    each.send_signal(signal.SIGCONT)
            until = time.monotonic() + PUT_S
            while None in (back := engine.backend.batched_get_blocking(keys)) and time.monotonic() < until:
                for obj in back:
                    if obj is not None:
                        obj.ref_count_down()
                time.sleep(0.05)
            for obj in objects:
                obj.ref_count_down()
            return {
                "stored": stored, "halted": halted, "halted_l2": halted_l2, "untouched": untouched,
                "back": sum(obj is not None for obj in back), "wrong": engine.wrong(seed, back), "used": engine.used(),
            }  # fmt: skip
    finally:
        del os.environ["SIMM_PATH"]


def absent_manager(case: Case, manager: str, seed: int, step: dict[str, Any]) -> dict[str, Any]:
    """No manager listens: the engine starts, and finds nothing."""
    nobody = "127.0.0.1:1"
    with remote(case, nobody) as engine, l2(case, nobody) as server:
        objects = engine.objects(seed)
        answers = remote_calls(engine, engine.keys(seed), objects)
        for obj in objects:
            obj.ref_count_down()
        return {
            "remote": answers, "l2": l2_calls(server, server.keys(seed)), "ping": engine.ping(),
            "healthy": server.adapter.report_status()["is_healthy"], "used": engine.used(),
        }  # fmt: skip


def printed(engine: str, manager: str) -> dict[str, Any]:
    """Return what ``simm engine`` prints."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert cli.main(["engine", engine, "--manager", manager, "--json"]) == 0
    found: dict[str, Any] = json.loads(said.getvalue())
    return found


def basic(case: Case, manager: str, seed: int, step: dict[str, Any]) -> dict[str, Any]:
    """LMCache's own check with what ``simm engine`` prints. Its exit code says nothing, so return what it prints."""
    os.environ.update(printed("lmcache", manager)["environment"])
    os.environ.update({"LMCACHE_REMOTE_URL": "plugin://simm", "LMCACHE_MAX_LOCAL_CPU_SIZE": "0.05",
                       "LMCACHE_LOCAL_CPU": "false"})  # fmt: skip
    name, adapter = printed("lmcache-server", manager)["flags"][-2:]
    assert name == "--l2-adapter"
    said = io.StringIO()
    before = sys.argv
    sys.argv = ["basic_check", "--mode", step["mode"], "--model", case.model, name, adapter]
    try:
        with contextlib.redirect_stdout(said):
            asyncio.run(basic_check.main())
    finally:
        sys.argv = before
    return {"said": said.getvalue()}


# -- the process -----------------------------------------------------------------------------------------


def wheel_is_unmodified() -> dict[str, bool]:
    """Each file that matters here against the digest in the RECORD that came with the wheel."""
    found: dict[str, bool] = {}
    for entry in importlib.metadata.distribution("lmcache").files or ():
        if str(entry) in WHEEL_FILES and entry.hash is not None:
            digest = hashlib.new(entry.hash.mode, Path(str(entry.locate())).read_bytes()).digest()
            found[str(entry)] = urlsafe_b64encode(digest).rstrip(b"=").decode() == entry.hash.value
    return {name: found.get(name, False) for name in WHEEL_FILES}


COMMANDS: dict[str, Callable[[Case, str, int, dict[str, Any]], dict[str, Any]]] = {
    each.__name__.replace("_", "-"): each
    for each in (remote_write, remote_read, remote_remove, mooncake_lookup, mooncake_server, l2_write, l2_read, l2_lock,
                 failing, stopped, absent_manager, basic)
}  # fmt: skip


def in_a_child(steps: list[dict[str, Any]], manager: str, seed: int) -> list[dict[str, Any]]:
    """Return the results of steps that another process runs."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            os.close(reader)
            results = [run_step(step, manager, seed) for step in steps]
            with os.fdopen(writer, "w") as out:
                json.dump(results, out)
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as answer:
        said = answer.read()
    _, status = os.waitpid(child, 0)
    if status or not said:
        return [{"error": f"the process ended with {status}"}] * len(steps)
    results: list[dict[str, Any]] = json.loads(said)
    return results


def run_step(step: dict[str, Any], manager: str, seed: int) -> dict[str, Any]:
    try:
        return COMMANDS[step["command"]](Case(**step["case"]), manager, seed, step)
    except Exception:
        return {"error": traceback.format_exc()}


def main() -> int:
    request = json.loads(sys.argv[1])
    # The JSON line owns stdout. What LMCache prints goes to stderr.
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    groups: list[list[dict[str, Any]]] = [[]]
    for step in request["steps"]:
        if step["command"] == "new-process":
            groups.append([])
        else:
            groups[-1].append(step)
    assert threading.active_count() == 1, "a fork would leave threads behind"
    steps = [result for group in groups for result in in_a_child(group, request["manager"], request["seed"])]
    summary = {"lmcache": importlib.metadata.version("lmcache"), "unmodified": wheel_is_unmodified(), "steps": steps}
    print(json.dumps(summary), file=report, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Runs adapters in released engines over a client each of whose calls fails once. Started by the tests, as a process.

    python faults_driver.py REQUEST_JSON

A request has the ``seed`` and one step, whose command names the adapters: ``lmcache`` or ``vllm``. The cluster is a
store in this process, and the k-th call of its client fails, for each k and each way to fail. The report is one line on
stdout: by adapter how many calls there were, what was wrong, and which calls of the adapter's source, and which of its
methods, no run has reached.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

from simm.testing import FakeClient, FakeStore
from tests.support import fault_sites
from tests.support.faulty_client import FAULTS, NONE, Faulty

NOWHERE = "127.0.0.1:1"


class Adapter(NamedTuple):
    """An adapter: its class and modules, what an engine does with it, and what checks what is left in the store."""

    made: type
    modules: tuple[str, ...]
    run: Callable[[FakeStore, int], None]


def over(adapter: Adapter, client: Any, store: FakeStore, seed: int) -> None:
    """Run an engine whose adapter gets this client when it connects."""
    with mock.patch(f"{adapter.made.__module__}.connect", lambda *_, **__: client):
        adapter.run(store, seed)


def checked(adapter: Adapter, seed: int) -> dict[str, Any]:
    """Fail each call once, in each way; return what was wrong, and what was not reached."""
    counts, wrong = {}, []
    for how in FAULTS:
        for at in itertools.count():
            store = FakeStore()
            client = Faulty(store, how, at)
            client.armed = True
            for each, what in ((client, "with the fault"), (FakeClient(store=store), "after it")):
                try:
                    over(adapter, each, store, seed)
                except Exception:
                    wrong.append(f"{how} {at} {what}: {traceback.format_exc()[-1500:]}")
                store.unavailable = False
            if not client.hit:
                break
        counts[how] = at
    reached = set()
    with fault_sites.watched(adapter.made) as called:
        for replicas in (1, 2):
            client = Faulty(FakeStore(), "late", NONE, replicas=replicas)
            client.armed = True
            over(adapter, client, client.store, seed)
            reached |= client.reached
    missing = fault_sites.unreached(fault_sites.sites(*adapter.modules), reached)
    return {
        "counts": counts, "wrong": wrong[:3], "unreached": [list(each) for each in missing],
        "uncalled": sorted(fault_sites.methods(adapter.made) - called),
    }  # fmt: skip


# -- vLLM's tier -----------------------------------------------------------------------------------------------


def vllm() -> dict[str, Adapter]:
    from vllm_driver import CHUNKS, Case, engine

    from simm.connectors import vllm as module

    def run(store: FakeStore, seed: int) -> None:
        case = Case("faults")
        with engine(case, NOWHERE) as one, engine(case, NOWHERE) as other:
            assert one.store(seed) == CHUNKS
            found = other.find(seed)
            assert not found["wrong"], found
            other.manager.reset_cache()
            assert not one.find(seed)["wrong"] and not other.find(seed)["wrong"]

    return {"SimmTier": Adapter(module.SimmTier, ("vllm", "keyspace"), run)}


# -- LMCache's two seats ------------------------------------------------------------------------------------------


def lmcache() -> dict[str, Adapter]:
    import lmcache_driver
    from lmcache_driver import CHUNK, Case, engine_content, l2, remote

    from simm.connectors import lmcache as module
    from simm.connectors import lmcache_server as server_module
    from simm.schemes.encodings import short_key

    def foreign(store: FakeStore, name: str) -> None:
        """Put a value of another layout in place of a chunk's."""
        with FakeClient(store=store) as other:
            other.delete(name)
            assert other.put(name, b"another layout")

    made, memory = lmcache_driver.LocalCPUBackend, []

    def made_once(*given: Any, **named: Any) -> Any:
        """LMCache's memory, the same for all runs: making it takes longer than a run."""
        if not memory:
            memory.append(made(*given, **named))
            memory[0].memory_allocator.close = lambda: None
        return memory[0]

    def run(store: FakeStore, seed: int) -> None:
        with mock.patch("lmcache_driver.LocalCPUBackend", made_once):
            chunks(store, seed)

    def chunks(store: FakeStore, seed: int) -> None:
        with remote(Case("faults", chunks=4, last=CHUNK // 2), NOWHERE) as engine:
            connector = engine.connector
            keys, objects = engine.keys(seed), engine.objects(seed)

            def wait(call: Any) -> Any:
                return asyncio.run_coroutine_threadsafe(call, engine.loop.get_loop()).result(30)

            connector.post_init()
            flags = (connector.support_batched_contains, connector.support_batched_get, connector.support_batched_put,
                     connector.support_ping)  # fmt: skip
            assert all(flag() is True for flag in flags)
            wait(connector.put(keys[0], objects[0]))
            wait(connector.batched_put(keys, objects))
            for _ in range(2):
                ones = [wait(connector.exists(keys[0])), connector.exists_sync(keys[0])]
                assert set(ones) <= {True, False} and wait(connector.ping()) in (0, 1)
                counts = [connector.batched_contains(keys), wait(connector.batched_async_contains("l", keys))]
                assert all(0 <= each <= len(keys) for each in counts)
                for got in (
                    [wait(connector.get(key)) for key in keys], wait(connector.batched_get(keys)),
                    wait(connector.batched_get_non_blocking("l", keys)),
                ):  # fmt: skip
                    assert len(got) <= len(keys) and not engine.wrong(seed, got)
            foreign(store, short_key(keys[1].to_string()))
            (got,) = wait(connector.batched_get(keys[1:2]))
            assert got is None, "another layout"
            assert connector.remove_sync(keys[0]) in (True, False) and wait(connector.list()) == []
            for each in objects:
                each.ref_count_down()
            assert engine.used() == 0

    def run_server(store: FakeStore, seed: int) -> None:
        with l2(Case("faults", chunks=4), NOWHERE) as server:
            keys = server.keys(seed)
            descriptors = {server.adapter.get_store_event_fd(), server.adapter.get_lookup_and_lock_event_fd(),
                           server.adapter.get_load_event_fd()}  # fmt: skip
            assert len(descriptors) == 3
            server.fill(seed)
            server.store(keys)
            for unlocks in (True, False):
                server.raw[:] = engine_content.CANARY
                assert not server.wrong(seed, server.load(keys)), "without a lock"
                found = server.lookup(keys)
                assert set(found) <= set(range(4)) and not server.wrong(seed, server.load(keys))
                if unlocks:
                    server.adapter.submit_unlock(keys)
                assert server.adapter.report_status()["is_healthy"] in (True, False)
            assert server.lookup(server.keys(seed + 1)) == [], "nobody has stored these"
            server.adapter.submit_unlock(keys[:1])
            foreign(store, server.adapter._names(keys[:1])[0])
            assert server.load(keys[:1]) == [], "another layout"
            server.adapter.delete(keys)
            server.fill(seed)
            server.store(keys)
            server.lookup(keys)  # and the end has locks to give up

    return {
        "SimmConnector": Adapter(module.SimmConnector, ("lmcache", "lmcache_values"), run),
        "SimmL2Adapter": Adapter(server_module.SimmL2Adapter, ("lmcache_server", "lmcache_values"), run_server),
    }


def main() -> int:
    request = json.loads(sys.argv[1])
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    (step,) = request["steps"]
    adapters = {"vllm": vllm, "lmcache": lmcache}[step["command"]]()
    logging.disable(logging.CRITICAL)  # of thousands of failures, each with its trace
    found = {name: checked(each, request["seed"]) for name, each in adapters.items()}
    print(json.dumps(found), file=report, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""F30 at the adapters: whatever a call of SiMM's client does, an engine gets misses, and computes the rest.

The k-th call fails, for each k: it raises, meets an outage at once or after its deadline, or is late. And with real
clients no server ever answers: a call of an engine waits one deadline.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from simm.client import Client
from simm.connectors.keyspace import Keyspace
from simm.connectors.mooncake import MooncakeDistributedStore
from simm.testing import FakeClient, FakeStore
from tests.support import fake_sglang, fault_sites
from tests.support.fake_sglang import Config, Pool, PoolName, PoolTransfer, Served
from tests.support.faulty_client import FAULTS, NONE, Faulty
from tests.support.pace import Pace
from tests.support.silent_servers import Silent

PAGES = 6
KEYS = [f"{number:064x}" for number in range(PAGES)]
#: Prompts, by their pages. The first ones fill the store.
PROMPTS = [range(4), range(6), range(3), range(6)]


def computed(page: int) -> bytes:
    """What the model computes for a page."""
    return np.random.default_rng(page).integers(1, 256, 192, np.uint8).tobytes()


WITHOUT = [computed(page) for prompt in PROMPTS for page in prompt]


class SGLangEngine:
    """Restores what it finds of a prompt, computes the rest and stores it, by SGLang's calls."""

    sources = ("sglang", "keyspace", "hicache/host_pools")

    def __init__(self, module: Any, client: Any) -> None:
        self.pool = Pool(pages=PAGES)
        self.backend = module.HiCacheSimm(Config(), {}, client=client)
        self.backend.register_mem_pool_host(self.pool)

    @staticmethod
    def adapter_of(module: Any) -> type:
        adapter: type = module.HiCacheSimm
        return adapter

    def others(self, store: FakeStore) -> None:
        """Make the calls that :meth:`run` does not, and end."""
        backend, bools = self.backend, {True, False}
        new, pages = [f"{number + 1000:064x}" for number in range(PAGES)], self.pool.indices(*ALL)
        swa = PoolTransfer(PoolName.SWA, pages, KEYS)
        backend.register_mem_host_pool_v2(Pool(pages=PAGES), PoolName.SWA)
        store.fail(1, operation="put")
        assert set(backend.batch_set_v1(new, pages)) <= bools
        for _ in range(2):
            assert backend.exists(KEYS[0]) in bools
            assert set(backend.batch_set_v2([swa])[PoolName.SWA]) <= bools
            assert 0 <= backend.batch_exists_v2(KEYS, [swa]).kv_hit_pages <= PAGES
            assert set(backend.batch_get_v2([swa])[PoolName.SWA]) <= bools
            assert backend.set("flat", np.ones(64, np.uint8)) in bools
            assert backend.batch_set(KEYS[:2], [np.ones(64, np.uint8)] * 2) in bools
            got = np.zeros(64, np.uint8)
            assert backend.get("flat", got) is None or got.all()
        short = np.zeros(32, np.uint8)
        assert backend.batch_get(KEYS[:2], [short, short]) == [None, None] and not short.any(), "of another size"
        assert backend.get_stats() is None
        backend.clear()
        backend._owns = True
        backend.close()

    def run(self) -> list[bytes]:
        outputs = []
        for prompt in PROMPTS:
            keys = [KEYS[page] for page in prompt]
            self.pool.raw[:] = 0
            hits = self.backend.batch_exists(keys)
            assert type(hits) is int and 0 <= hits <= len(keys)
            got = self.backend.batch_get_v1(keys[:hits], self.pool.indices(*prompt[:hits])) if hits else []
            assert len(got) == hits and set(map(type, got)) <= {bool}
            for page in prompt:
                if page >= hits or not all(got[: page + 1]):
                    self.pool.raw[:, page] = np.frombuffer(computed(page), np.uint8).reshape(2, -1)
                outputs.append(self.pool.raw[:, page].tobytes())
            stored = self.backend.batch_set_v1(keys, self.pool.indices(*prompt))
            assert len(stored) == len(keys) and set(map(type, stored)) <= {bool}
        return outputs


class MooncakeEngine:
    """The same by Mooncake's calls, as consumers of its store make them."""

    sources = ("mooncake", "mooncake_sessions", "keyspace")

    @staticmethod
    def adapter_of(_module: Any) -> type:
        return MooncakeDistributedStore

    def others(self, store: FakeStore) -> None:
        """Make the calls that :meth:`run` does not, and end."""
        self.store.put("k", b"v")
        for at, call in enumerate(OTHERS):
            assert call(self.store, self.at + 64, "k"), at
        self.store.put("k", b"v")
        self.store.batch_get_session_start(["k"])
        assert self.store.unregister_buffer(self.at + 64) in (0, -600)
        assert self.store.register_buffer(self.at + 64, 8) in (0, -600) and self.store.close() == 0
        assert self.store.get_hostname() == "localhost" and self.store.batch_is_exist(KEYS) == [-1] * PAGES

    def __init__(self, _module: Any, client: Any) -> None:
        self.memory = (ctypes.c_ubyte * (PAGES * 192))()
        self.at = ctypes.addressof(self.memory)
        self.store = MooncakeDistributedStore()
        self.store.use(client)
        self.store.register_buffer(self.at, len(self.memory))

    def run(self) -> list[bytes]:
        outputs = []
        for prompt in PROMPTS:
            keys, places = [KEYS[page] for page in prompt], [self.at + 192 * page for page in prompt]
            sizes = [192] * len(keys)
            ctypes.memset(self.at, 0, len(self.memory))
            there = self.store.batch_is_exist(keys)
            assert len(there) == len(keys) and set(there) <= {0, 1, -1}
            hits = next((at for at, each in enumerate(there) if each != 1), len(keys))
            got = self.store.batch_get_into(keys[:hits], places[:hits], sizes[:hits])
            assert len(got) == hits and all(code == 192 or code < 0 for code in got)
            for page in prompt:
                if page >= hits or min(got[: page + 1]) < 0:
                    ctypes.memmove(places[page], computed(page), 192)
                outputs.append(bytes(self.memory[192 * page : 192 * (page + 1)]))
            stored = self.store.batch_put_from(keys, places, sizes)
            assert len(stored) == len(keys) and all(code <= 0 for code in stored)
        return outputs


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Without the log: of thousands of failures, each with its trace, it takes most of the time."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def module() -> Iterator[Any]:
    with fake_sglang.install(Served()) as made:
        yield made


@pytest.mark.fault("F30", ci="each call of the client", whole="each call of the client")
@pytest.mark.parametrize("how", FAULTS)
@pytest.mark.parametrize("engine", [SGLangEngine, MooncakeEngine])
def test_each_call_may_fail(module: Any, engine: Any, how: str) -> None:
    """The output is that of a run without a cache, also of the engine that comes next."""
    for at in itertools.count():
        store = FakeStore()
        client = Faulty(store, how, at)
        client.armed = True
        made = engine(module, client)
        assert made.run() == WITHOUT, (at, how)
        stored = len(store)
        made.others(store)
        store._failing.clear()
        assert engine(module, FakeClient(store=store)).run() == WITHOUT, f"what the fault has left: {at}"
        if not client.hit:
            break
    assert at > 30, "each call has failed once"
    assert stored > PAGES, "the control: values were stored"


@pytest.mark.parametrize("engine", [SGLangEngine, MooncakeEngine])
def test_these_are_all_calls(module: Any, engine: Any) -> None:
    """An engine's calls of the adapter, and the adapter's calls of the client: one that is added is missing here."""
    adapter = engine.adapter_of(module)
    reached = set()
    with fault_sites.watched(adapter) as called:
        for replicas in (1, 2):
            store = FakeStore()
            client = Faulty(store, "late", NONE, replicas=replicas)
            client.armed = True
            made = engine(module, client)
            made.run()
            made.others(store)
            reached |= client.reached
    assert fault_sites.unreached(fault_sites.sites(*engine.sources), reached) == []
    assert fault_sites.methods(adapter) - called <= MAKING


#: These make a client: what they meet is a code, as they return it for a wrong address.
MAKING = {"setup", "setup_dummy"}


def test_control_a_call_that_is_added_is_missed() -> None:
    added = "class A:\n    def a(self):\n        self._client.put_group([], [])\n"
    ((wanted,),) = [fault_sites.sites("sglang", source=added)]
    assert wanted[:4] == ("sglang", 3, 3, "put_group")
    assert fault_sites.unreached([wanted], [("put_group", "sglang", 4), ("put_many", "sglang", 3)]) == [wanted]
    assert fault_sites.unreached([wanted], [("put_group", "sglang", 3)]) == []
    for hidden in ("self._client.get_many", "c.get_many(1)", "a().pin([])"):
        ((wanted,),) = [fault_sites.sites("sglang", source=f"x = [{hidden}]\n")]
        assert wanted.wrong and fault_sites.unreached([wanted], [(wanted.call, "sglang", 1)]) == [wanted]
    ((renamed,),) = [fault_sites.sites("sglang", source="c = self._client\n")]
    assert renamed.wrong


def test_control_a_value_of_another_page_is_seen(module: Any) -> None:
    class Mixed(FakeClient):
        def get_digests(self, digests: Any, sinks: Any) -> Any:
            return super().get_digests(list(reversed(digests)), sinks)

    store = FakeStore()
    assert SGLangEngine(module, FakeClient(store=store)).run() == WITHOUT
    assert SGLangEngine(module, Mixed(store=store)).run() != WITHOUT


#: Other calls of Mooncake's, by an address and a key.
OTHERS: tuple[Callable[[MooncakeDistributedStore, int, str], Any], ...] = (
    lambda store, at, key: store.put(key, b"v") in (0, -900),
    lambda store, at, key: store.upsert(key, b"v") in (0, -900),
    lambda store, at, key: store.put_parts(key, b"v") in (0, -900),
    lambda store, at, key: store.put_batch([key], [b"v"]) in (0, -900),
    lambda store, at, key: store.put_from(key, at, 1) in (0, -900),
    lambda store, at, key: store.batch_put_from_multi_buffers([key], [[at]], [[1]])[0] in (0, -900),
    lambda store, at, key: store.get(key) in (b"", b"v"),
    lambda store, at, key: store.get_batch([key])[0] in (b"", b"v"),
    lambda store, at, key: store.get_buffer(key) in (None, b"v"),
    lambda store, at, key: store.batch_get_buffer([key])[0] in (None, b"v"),
    lambda store, at, key: store.get_size(key) in (1, -600, -704),
    lambda store, at, key: store.get_into(key, at, 64) in (1, -600, -704),
    lambda store, at, key: store.batch_get_into_multi_buffers([key], [[at]], [[1]])[0] in (1, -600, -704),
    lambda store, at, key: store.batch_get_session_start([key])[0] in (0, -600, -704),
    lambda store, at, key: store.batch_get_into_multi_buffer_ranges([key], [[at]], [[1]], [[0]])[0] in (1, -600, -704),
    lambda store, at, key: store.batch_get_session_end([key]) in (0, -600),
    lambda store, at, key: store.is_exist(key) in (0, 1, -1),
    lambda store, at, key: set(store.batch_get_replica_desc([key])) <= {key},
    lambda store, at, key: store.batch_get_session_start(["absent"]) in ([-600], [-704]),
    lambda store, at, key: store.batch_get_into_multi_buffers([key], [[at]], [[2]])[0] in (-600, -704, -800),
    lambda store, at, key: store.remove(key) in (0, -704, -900),
    lambda store, at, key: store.batch_remove([key])[0] in (0, -704, -900),
    lambda store, at, key: store.remove_all() in (0, -900),
    lambda store, at, key: store.health_check() in (0, 1, 2),
    lambda store, at, key: store.unregister_buffer(at) in (0, -600),
    lambda store, at, key: store.register_buffer(at, 64) in (0, -600),
)


@pytest.mark.parametrize("how", FAULTS)
def test_no_other_call_of_mooncakes_raises(how: str) -> None:
    memory = (ctypes.c_ubyte * 64)()
    at = ctypes.addressof(memory)
    for number in range(100):
        client = Faulty(FakeStore(), how, number)
        store = MooncakeDistributedStore()
        store.use(client)  # type: ignore[arg-type]
        assert store.put("k", b"v") == 0
        client.armed = True
        for call in OTHERS:
            assert call(store, at, "k"), (number, how)
        if not client.hit:
            break
    assert 20 < number < 99
    client.armed = False
    assert store.close() == 0


# -- servers that never answer --------------------------------------------------------------------------------

SILENT_DEADLINE_S = 0.3
#: With it the pages are of all servers, and not of that alone which was asked for the generation and is down by then.
GENERATION = 1_700_000_000_000_000_000
ALL = list(range(PAGES))
#: Calls on (SGLang's backend, its pool) or (Mooncake's store, an address), and what they return for misses.
SGLANG: dict[str, tuple[Callable[[Any, Pool], Any], Any]] = {
    "batch_exists": (lambda backend, pool: backend.batch_exists(KEYS), 0),
    "batch_get_v1": (lambda backend, pool: backend.batch_get_v1(KEYS, pool.indices(*ALL)), [False] * PAGES),
    "batch_set_v1": (lambda backend, pool: backend.batch_set_v1(KEYS, pool.indices(*ALL)), [False] * PAGES),
    "batch_get_v2": (
        lambda backend, pool: backend.batch_get_v2([PoolTransfer(PoolName.KV, pool.indices(*ALL), KEYS)]),
        {PoolName.KV: [False] * PAGES},
    ),
    "batch_set": (lambda backend, pool: backend.batch_set(KEYS[:2], [np.zeros(64, np.uint8)] * 2), False),
    "clear": (lambda backend, pool: backend.clear(), None),
}  # fmt: skip
MOONCAKE: dict[str, tuple[Callable[[Any, int], Any], Any]] = {
    "batch_is_exist": (lambda store, at: store.batch_is_exist(KEYS), [0] * PAGES),
    "batch_get_into": (lambda store, at: store.batch_get_into(KEYS, [at] * PAGES, [64] * PAGES), [-704] * PAGES),
    "batch_put_from": (lambda store, at: store.batch_put_from(KEYS, [at] * PAGES, [64] * PAGES), [-900] * PAGES),
    "remove": (lambda store, at: store.remove("k"), -900),
}


def took(module: Any, silent: Silent, name: str) -> float:
    """Make a call of a new engine that knows its generation; how long it took. Its answer is that of misses."""
    client = Client("{}:{}".format(*silent.manager.address), deadline_s=SILENT_DEADLINE_S, path="tcp")
    with client, contextlib.ExitStack() as at_the_end:
        if name in SGLANG:
            pool = Pool(pages=PAGES)
            made = module.HiCacheSimm(Config(), {}, client=client)
            at_the_end.callback(made.close)  # or it tries for a minute to register its scheme
            made.register_mem_pool_host(pool)
            keyspace, (call, wanted), more = made._keyspace, SGLANG[name], pool
        else:
            memory = (ctypes.c_ubyte * 64)()
            made = MooncakeDistributedStore()
            made.use(client)
            keyspace, (call, wanted), more = made._keys, MOONCAKE[name], ctypes.addressof(memory)
        keyspace._known = GENERATION
        began = time.monotonic()
        assert call(made, more) == wanted
        first = time.monotonic() - began
        assert call(made, more) == wanted  # its servers count as down by now
        return first


@pytest.mark.parametrize("name", [*SGLANG, *MOONCAKE])
def test_servers_that_never_answer_cost_one_deadline(module: Any, name: str) -> None:
    with Silent(3) as silent, Pace() as pace:
        pace.check(f"{name} at servers that never answer", took(module, silent, name), 1.5 * SILENT_DEADLINE_S)


def test_control_who_waits_for_the_generation_and_then_for_pages_waits_twice(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient = Keyspace.generation

    def generation(self: Keyspace) -> str | None:
        return patient(self) or f"{self._known:016x}"

    monkeypatch.setattr(Keyspace, "generation", generation)
    with Silent(3) as silent:
        assert took(module, silent, "batch_exists") > 1.9 * SILENT_DEADLINE_S

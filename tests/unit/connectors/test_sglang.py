"""SiMM's backend for SGLang over fakes of what it needs of SGLang. tests/engines runs it in the released engine."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simm.connectors.hicache import facts, host_pools, weight_versions
from simm.schemes import registry
from simm.schemes.scheme import Request
from simm.schemes.sglang import page_hashes
from simm.schemes.stored import stored
from simm.testing import FakeClient, FakeStore
from tests.support import fake_sglang
from tests.support.fake_sglang import Config, Pool, PoolHitPolicy, PoolName, PoolTransfer, Served
from tests.support.waiting import wait_until

KEYS = [f"{number:064x}" for number in range(8)]
ROWS = range(8)


@pytest.fixture
def served() -> Served:
    return Served()


@pytest.fixture
def sglang(served: Served) -> Iterator[Any]:
    with fake_sglang.install(served) as module:
        yield module


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


class Engines:
    """Makes backends as SGLang does, each with a client of its own on one store."""

    def __init__(self, module: Any, store: FakeStore) -> None:
        self.module, self.store = module, store
        self.clients: list[FakeClient] = []
        self.made: list[Any] = []

    def __call__(self, pool: Pool | None = None, others: dict[Any, Pool] | None = None, **config: Any) -> Any:
        self.clients.append(FakeClient(store=self.store))
        backend = self.module.HiCacheSimm(Config(**config), {}, client=self.clients[-1])
        self.made.append(backend)
        backend.register_mem_pool_host(pool or Pool())
        for name, other in (others or {}).items():
            backend.register_mem_host_pool_v2(other, name)
        return backend


@pytest.fixture
def engine(sglang: Any, store: FakeStore) -> Iterator[Engines]:
    made = Engines(sglang, store)
    yield made
    for backend in made.made:
        backend.close()  # its registrar would try for a minute to register by a client that is closed
    for client in made.clients:
        client.close()


def filled(seed: int, **fields: Any) -> Pool:
    pool = Pool(**fields)
    pool.raw[:] = np.random.default_rng(seed).integers(1, 256, pool.raw.shape, np.uint8)
    return pool


def stores(backend: Any, pool: Pool, count: int = 8) -> bool:
    return bool(all(backend.batch_set_v1(KEYS[:count], pool.indices(*ROWS[:count]))))


def elsewhere(call: Callable[[], Any]) -> Any:
    """What a call returns in a new thread, as SGLang has after a flush."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


# -- pages go in and come back ---------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 2, 6])
def test_pages_come_back_into_other_places(engine: Engines, parts: int) -> None:
    source, target = filled(1, parts=parts), Pool(parts=parts)
    assert engine(source).batch_set_v1(KEYS, source.indices(*ROWS)) == [True] * 8
    reader = engine(target)
    assert reader.batch_exists([*KEYS, "f" * 64]) == 8 and reader.exists(KEYS[3]) is True
    rows = [5, 0, 7, 2, 1, 6, 4, 3]
    assert reader.batch_get_v1(KEYS, target.indices(*rows)) == [True] * 8
    assert (target.raw[:, rows] == source.raw).all()


def test_a_page_that_is_missing_fails_alone_and_leaves_its_place(engine: Engines) -> None:
    pool = filled(2)
    backend = engine(pool)
    assert stores(backend, pool, 2)
    target = Pool()
    got = engine(target).batch_get_v1([KEYS[0], KEYS[5], KEYS[1]], target.indices(0, 1, 2))
    assert got == [True, False, True]
    assert not target.raw[:, 1].any() and (target.raw[:, [0, 2]] == pool.raw[:, :2]).all()


def test_what_is_stored_is_not_stored_again(engine: Engines, store: FakeStore) -> None:
    pool = filled(3)
    backend = engine(pool)
    puts: list[int] = []
    assert stores(backend, pool, 4)
    wait_until(lambda: backend._registrar._thread is None, "its keys are registered, which is a put")
    store.latency = lambda operation, keys: puts.append(keys) if operation == "put" else None
    assert stores(backend, pool, 6) and stores(backend, pool, 6)
    assert puts == [2]


def test_pages_as_tensors(engine: Engines) -> None:
    page, back = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    backend = engine()
    assert backend.set(KEYS[0], page) is True and backend.batch_set(KEYS[1:3], [page, page]) is True
    assert backend.get(KEYS[0], back) is back and (back == page).all()
    assert backend.get(KEYS[5], back) is None
    address = back.__array_interface__["data"][0]
    back[:] = 0
    assert backend.batch_get(KEYS[1:2], [address], [64]) == [address] and (back == page).all()
    assert backend.set(KEYS[4], target_location=address, target_sizes=64) is True
    assert not backend.exists(KEYS[0]), "a page in this form is not one of the pool's"


def test_a_value_of_another_size_is_dropped(engine: Engines) -> None:
    pool = filled(4)
    backend = engine(pool)
    assert stores(backend, pool, 1)
    (digest,) = backend._batch([(backend._pool("kv"), KEYS[:1])]).digests
    engine.clients[0].put_digest(digest, memoryview(b"longer than a page" * 20))
    assert backend.batch_get_v1(KEYS[:1], pool.indices(0)) == [False]
    assert not backend.exists(KEYS[0])


def test_a_page_that_no_value_can_hold_is_refused(
    engine: Engines, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pool = filled(5)
    backend = engine(pool)
    monkeypatch.setattr(engine.module, "VALUE_BYTES_MAX", 191)
    assert backend.batch_set_v1(KEYS[:2], pool.indices(0, 1)) == [False, False]
    assert "--page-size smaller" in caplog.text


# -- nobody reads another one's pages ----------------------------------------------------------------------


POOLS = [
    {"layout": "page_first_direct"}, {"dtype": "float16"}, {"dtype": "float8_e5m2"}, {"layer_num": 3},
    {"start_layer": 2}, {"end_layer": 3}, {"page_size": 8}, {"heads": 2},
]  # fmt: skip
CONFIGS = [
    {"model_name": "other"}, {"tp_size": 2}, {"tp_rank": 1, "tp_size": 2}, {"pp_size": 2}, {"pp_rank": 1},
    {"attn_cp_size": 2}, {"attn_cp_rank": 1}, {"is_mla_model": True}, {"extra_config": {"salt": "s"}},
    {"extra_config": {"model": "m"}}, {"extra_config": {"weight_version": "2"}},
]  # fmt: skip
SERVED = [
    {"model_path": "/models/other"}, {"revision": "r2"}, {"quantization": "fp8"}, {"dtype": "float16"},
    {"kv_cache_dtype": "fp8_e5m2"}, {"json_model_override_args": '{"rope_theta": 1}'}, {"weight_version": "2"},
    {"load_format": "dummy"}, {"quantization_param_path": "/not/there.json"},
]  # fmt: skip
SERVED += [{name: "other"} for name in (*facts._WEIGHTS, *facts._NUMBERS, *facts._DRAFT)]
VARIANTS = [("pool", each) for each in POOLS] + [("config", each) for each in CONFIGS]
VARIANTS += [("served", each) for each in SERVED]


def variant(engine: Engines, served: Served, kind: str, change: dict[str, Any]) -> tuple[Any, Pool]:
    """Return a backend that differs in this from ``engine(Pool())``, and its pool."""
    pool = Pool(**(change if kind == "pool" else {}))
    if kind == "served":
        for name, value in change.items():
            setattr(served, name, value)
    return engine(pool, **(change if kind == "config" else {})), pool


@pytest.mark.parametrize(("kind", "change"), VARIANTS, ids=str)
def test_a_difference_in_anything_shares_nothing(
    engine: Engines, served: Served, kind: str, change: dict[str, Any]
) -> None:
    pool = filled(6)
    plain = engine(pool)
    assert stores(plain, pool) and engine(Pool()).batch_exists(KEYS) == 8
    other, target = variant(engine, served, kind, change)
    assert other.batch_exists(KEYS) == 0
    assert other.batch_get_v1(KEYS[:4], target.indices(*range(4))) == [False] * 4 and not target.raw.any()


@pytest.mark.parametrize("change", SERVED, ids=str)
def test_the_option_model_stands_for_name_path_and_revision_only(
    engine: Engines, served: Served, change: dict[str, Any]
) -> None:
    pool, named = filled(6), {"extra_config": {"model": "m"}}
    assert stores(engine(pool, **named), pool)
    for name, value in change.items():
        setattr(served, name, value)
    same = set(change) <= {"model_path", "revision"}
    assert engine(Pool(), **named, model_name="other").batch_exists(KEYS) == (8 if same else 0)


def test_a_pool_without_layers_of_the_draft_model_is_shared_whatever_that_is(engine: Engines, served: Served) -> None:
    def pools() -> tuple[Pool, dict[Any, Pool]]:
        main, mixed, draft = filled(7), filled(8), filled(9)
        main.target_layer_num, mixed.target_layer_num, draft.target_layer_num = 2, 1, 2  # type: ignore[attr-defined]
        return main, {PoolName.SWA: mixed, PoolName.DRAFT: draft}

    def held(backend: Any) -> list[bool]:
        names = (PoolName.KV, PoolName.SWA, PoolName.DRAFT)
        return [backend._stored([(backend._pool(name), KEYS[:1])])[0][0] for name in names]

    main, others = pools()
    backend = engine(main, others)
    assert stores(backend, main)
    backend.batch_set_v2([PoolTransfer(name, each.indices(0), KEYS[:1]) for name, each in others.items()])
    assert held(engine(*pools())) == [True, True, True]
    served.speculative_draft_model_path = "/models/draft"  # type: ignore[attr-defined]
    assert held(engine(*pools())) == [True, False, False]


def test_scales_are_known_by_the_contents_of_their_file(engine: Engines, served: Served, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("one.json", "copy.json", "other.json")]
    for file, scale in zip(files, (1, 1, 2)):
        file.write_text(f'{{"scale": {scale}}}')
    pool = filled(6)
    found = []
    for file in files:
        served.quantization_param_path = str(file)  # type: ignore[attr-defined]
        backend = engine(pool)
        found.append(backend.batch_exists(KEYS))
        stores(backend, pool)
    assert found == [0, 8, 0]


@pytest.mark.parametrize(("kind", "change"), VARIANTS[:2] + VARIANTS[8:10], ids=str)
def test_control_without_an_identity_the_other_ones_pages_are_read(
    engine: Engines, served: Served, monkeypatch: pytest.MonkeyPatch, kind: str, change: dict[str, Any]
) -> None:
    monkeypatch.setattr(host_pools, "identity", lambda _: "same")
    monkeypatch.setattr(engine.module, "identity", lambda _: "same")
    pool = filled(6)
    assert stores(engine(pool), pool)
    assert variant(engine, served, kind, change)[0].batch_exists(KEYS) == 8


def test_ranks_of_an_mla_model_share_and_ranks_of_others_do_not(engine: Engines) -> None:
    pool = filled(7, heads=None, parts=1)
    assert stores(engine(pool, is_mla_model=True, tp_size=4), pool)
    for rank, width in ((3, 4), (1, 8), (0, 1)):
        target = Pool(heads=None, parts=1)
        other = engine(target, is_mla_model=True, tp_rank=rank, tp_size=width)
        assert other.batch_get_v1(KEYS, target.indices(*ROWS)) == [True] * 8 and (target.raw == pool.raw).all()


def test_what_ranks_of_an_mla_model_have_for_themselves_is_not_shared(engine: Engines) -> None:
    """Mamba states, and a draft model with heads; its indexer is shared."""

    def others(seed: int) -> dict[Any, Pool]:
        mamba = filled(seed, heads=None, page_size=1)
        return {PoolName.MAMBA: mamba, PoolName.DRAFT: filled(seed), PoolName.INDEXER: filled(seed, heads=None)}

    def transfers(pools: dict[Any, Pool]) -> list[PoolTransfer]:
        return [PoolTransfer(name, each.indices(0, 1), KEYS[:2]) for name, each in pools.items()]

    main: dict[str, Any] = {"heads": None, "parts": 1}
    first, second = others(8), others(9)
    one = engine(Pool(**main), first, is_mla_model=True, tp_size=2)
    two = engine(Pool(**main), second, is_mla_model=True, tp_size=2, tp_rank=1)
    assert one.batch_set_v2(transfers(first)) == {name: [True, True] for name in first}
    got = two.batch_get_v2(transfers(second))
    assert got == {PoolName.MAMBA: [False] * 2, PoolName.DRAFT: [False] * 2, PoolName.INDEXER: [True] * 2}


def test_widths_share_groups_of_heads_if_they_are_told_to(engine: Engines) -> None:
    """TP 1 with four heads and TP 2 with two, both with "tp_lcm_size": 2."""
    wide = filled(10, layout="page_head", heads=4)
    one = engine(wide, tp_lcm_size=2, should_split_heads=True)
    assert stores(one, wide)
    for rank in range(2):
        narrow = Pool(layout="page_head", heads=2, part_bytes=48)
        two = engine(narrow, tp_lcm_size=2, tp_size=2, tp_rank=rank)
        assert two.batch_get_v1(KEYS, narrow.indices(*ROWS)) == [True] * 8
        assert (narrow.raw == wide.raw[:, :, rank * 48 : (rank + 1) * 48]).all()
        apart = engine(Pool(layout="page_head", heads=2, part_bytes=48), tp_size=2, tp_rank=rank)
        assert apart.batch_exists(KEYS) == 0, "not told"
    back = Pool(layout="page_head", heads=4)
    assert engine(back, tp_lcm_size=2, should_split_heads=True).batch_get_v1(KEYS, back.indices(*ROWS)) == [True] * 8
    assert (back.raw == wide.raw).all()
    engine.clients[1].delete_digests(one._batch([(one._pool("kv"), KEYS[:1])]).digests[:1])
    assert one.batch_exists(KEYS) == 0 and one.batch_exists(KEYS[1:]) == 7, "half a page is none"


def settle(engine: Engines) -> None:
    """Wait until no registration of these backends is under way."""
    wait_until(lambda: all(each._registrar.settled(0.1) for each in engine.made), "an end of registering")


# -- what routers are told ---------------------------------------------------------------------------------


def asked(engine: Engines, pool: Pool, salt: str | None = None) -> list[tuple[int, int]]:
    """Return for each scheme that is registered how many keys the prompt has, and how many of them are stored."""
    settle(engine)
    client = engine.clients[0]
    found = []
    for scheme in registry.registered(client, "model"):
        keys, per_page = scheme.keys(list(range(8 * pool.page_size)), Request(cache_salt=salt))
        assert len(keys) == 8 * per_page
        found.append((len(keys), sum(client.exists_many(keys))))
    return found


@pytest.mark.parametrize(("ranks", "mla"), [(1, False), (2, False), (2, True)])
def test_the_keys_of_a_prompts_pages_are_what_is_registered(engine: Engines, ranks: int, mla: bool) -> None:
    """Of all ranks, by the first of them: a page can be loaded if each rank's part of it is stored."""
    fields: dict[str, Any] = {"heads": None, "parts": 1} if mla else {}
    pool = filled(12, **fields)
    hashes = page_hashes(list(range(8 * pool.page_size)), pool.page_size)
    backends = [engine(pool, tp_rank=rank, tp_size=ranks, is_mla_model=mla) for rank in range(ranks)]
    values = 1 if mla else ranks
    for rank, backend in reversed(list(enumerate(backends))):
        assert backend.batch_set_v1(hashes, pool.indices(*ROWS)) == [True] * 8
        assert len(asked(engine, pool)) == (rank == 0)
    assert asked(engine, pool) == [(8 * values, 8 * values)]
    assert asked(engine, pool, "salt") == [(8 * values, 0)], "of other requests"
    backends[0].clear()
    assert asked(engine, pool) == [(8 * values, 0)], "nobody reads the old ones any more"
    assert backends[0].batch_set_v1(hashes[:3], pool.indices(0, 1, 2)) == [True] * 3
    assert asked(engine, pool) == [(8 * values, 3)], "in place of the one before the flush"
    other = engine(filled(13, layout="layer_first", **fields), tp_size=ranks, is_mla_model=mla)
    assert other.batch_set_v1(hashes[:1], pool.indices(0)) == [True]
    assert asked(engine, pool) == [(8 * values, 3), (8 * values, 1)], "another form of pages, beside it"


def test_with_eagle_pages_are_of_pairs_of_tokens(engine: Engines, served: Served) -> None:
    served.speculative_algorithm = "EAGLE"
    pool = filled(16)
    tokens = list(range(8 * pool.page_size + 1))
    hashes = page_hashes(tokens, pool.page_size, bigram=True)
    backend = engine(pool)
    assert backend.batch_set_v1(hashes, pool.indices(*ROWS)) == [True] * 8
    settle(engine)
    client = engine.clients[0]
    (scheme,) = registry.registered(client, "model")
    assert stored(client, scheme, tokens, Request(), generations={}, libraries={}).tokens == 8 * pool.page_size
    served.speculative_algorithm = "of a plug-in"
    other = engine(filled(16, layout="layer_first"))
    assert other.batch_set_v1(hashes[:1], pool.indices(0)) == [True]
    wait_until(lambda: "OF A PLUG-IN" in other._registrar._said, "a line in the log")
    assert registry.registered(client, "model") == [scheme]


@pytest.mark.parametrize("config", [{"pp_size": 2}, {"attn_cp_size": 2}, {"model_name": None}], ids=str)
def test_what_cannot_be_told_is_not_registered(engine: Engines, store: FakeStore, config: dict[str, Any]) -> None:
    pool = filled(14)
    backend = engine(pool, **config)
    assert stores(backend, pool)
    assert asked(engine, pool) == []
    plain = engine(pool)
    engine.clients[-1].get_into_many = None  # type: ignore[method-assign, assignment]
    assert plain.batch_set_v1(KEYS[:1], pool.indices(0)) == [True], "a registration that fails harms nothing"
    wait_until(lambda: plain._registrar._said, "a line in the log")
    plain.close()
    assert asked(engine, pool) == []


def test_another_width_than_the_heads_allow_stores_nothing(engine: Engines) -> None:
    backend = engine(filled(11, layout="page_head", heads=3), tp_lcm_size=2, should_split_heads=True)
    assert backend.batch_set_v1(KEYS[:1], Pool().indices(0)) == [False] and backend.batch_exists(KEYS) == 0


# -- weights, flushes ---------------------------------------------------------------------------------------


def test_a_thread_that_saw_other_weights_stores_and_finds_nothing(engine: Engines, served: Served) -> None:
    """An update of the weights, while the storage threads still have pages of the old ones; then the flush."""
    pool = filled(12)
    backend = engine(pool)
    assert stores(backend, pool, 2)
    served.weight_version = "step-2"
    assert not stores(backend, pool, 4) and backend.batch_exists(KEYS) == 0
    assert elsewhere(lambda: backend.batch_exists(KEYS)) == 0, "nothing of the old weights, nor stored late"
    assert elsewhere(lambda: stores(backend, pool, 3)) and elsewhere(lambda: backend.batch_exists(KEYS)) == 3
    served.weight_version = "default"
    assert backend.batch_exists(KEYS) == 2, "the old weights again, and this thread's version again"


class Thread:
    """A storage thread that makes a call when it is told to, perhaps the first one of its life."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call, self._go = call, threading.Event()
        self.found: Any = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self._go.wait()
        self.found = self._call()

    def __call__(self) -> Any:
        self._go.set()
        self._thread.join()
        return self.found


def test_a_thread_that_has_called_nothing_yet_keeps_to_the_weights_it_began_with(
    engine: Engines, served: Served
) -> None:
    """Pages that were computed before an update without a flush are the first that it stores."""
    pool = filled(12)
    backend = engine(pool)
    late = Thread(lambda: stores(backend, pool))
    assert backend.batch_exists(KEYS) == 0, "a prompt of before the update"
    served.weight_version = "step-2"
    assert not late() and elsewhere(lambda: backend.batch_exists(KEYS)) == 0
    assert elsewhere(lambda: stores(backend, pool)), "threads of after the flush"


def test_a_flush_before_the_update_is_as_good(engine: Engines, served: Served) -> None:
    """Trainers pause the engine, flush it, and then update it: the new threads live before the version changes."""
    pool = filled(12)
    backend = engine(pool)
    assert elsewhere(lambda: stores(backend, pool))
    threads = [Thread(lambda: stores(backend, pool)), Thread(lambda: backend.batch_exists(KEYS))]
    served.weight_version = "step-2"
    assert threads[0]() and threads[1]() == 8


def test_threads_that_begin_while_the_version_changes_are_not_noted_as_of_before() -> None:
    """The list of threads is taken between two looks at the version, and counts only if both are equal."""
    versions = iter(["1", "2", "2", "2"])
    watch = weight_versions.WeightVersions(lambda: next(versions))
    assert watch.of_caller() == "2" and next(versions, None) is None


def test_clear_tells_routers_of_the_weights_of_now(engine: Engines, served: Served) -> None:
    """It is called by a thread that no flush replaces."""
    told: list[str] = []
    backend = engine(Pool())
    backend._registrar.tell = lambda what, _: told.append(what[0])
    for version in ("default", "step-2"):
        served.weight_version = version
        backend.clear()
    assert told == [":default", ":step-2"]


def test_control_without_the_version_of_the_thread_old_pages_are_stored_late(
    engine: Engines, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.module.HiCacheSimm, "_weights", lambda _: f":{served.weight_version}")
    pool = filled(12)
    backend = engine(pool)
    assert stores(backend, pool, 2)
    served.weight_version = "step-2"
    assert stores(backend, pool, 4) and elsewhere(lambda: backend.batch_exists(KEYS)) == 4


def test_clear_reaches_all_ranks_and_engines_of_the_model_and_no_other(engine: Engines) -> None:
    pool = filled(13)
    ranks = [engine(pool, tp_rank=rank, tp_size=2) for rank in range(2)]
    other = engine(pool, model_name="other")
    assert all(stores(each, pool) for each in (*ranks, other))
    ranks[0].clear()
    assert [each.batch_exists(KEYS) for each in (*ranks, other)] == [0, 0, 8]
    assert stores(ranks[1], pool, 3)
    assert [each.batch_exists(KEYS) for each in ranks] == [0, 3]


# -- pools and their policies -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_hits_of_several_pools_are_what_a_model_says(engine: Engines, seed: int) -> None:
    """Random pages of each pool are stored; what can be restored is compared with the definition, page by page."""
    dice = random.Random(seed)
    pools: dict[Any, Pool] = {
        PoolName.INDEXER: filled(1, parts=1), PoolName.SWA: filled(2), PoolName.MAMBA: filled(3, parts=3, page_size=1),
    }  # fmt: skip
    main = filled(4)
    backend = engine(main, pools)
    stored = {name: [dice.random() < 0.8 for _ in KEYS] for name in (PoolName.KV, *pools)}
    stored[PoolName.KV] = [at < dice.randrange(4, 9) for at in range(8)]
    for name, pool in ((PoolName.KV, main), *pools.items()):
        rows = [row for row in ROWS if stored[name][row]]
        keys = [KEYS[row] for row in rows]
        if name is PoolName.KV:
            assert all(backend.batch_set_v1(keys, pool.indices(*rows)))
        else:
            assert backend.batch_set_v2([PoolTransfer(name, pool.indices(*rows), keys)])[name] == [True] * len(rows)
    window = dice.randrange(1, 4)
    transfers = [
        PoolTransfer(PoolName.INDEXER),
        PoolTransfer(PoolName.SWA, keys=KEYS[-window:], hit_policy=PoolHitPolicy.TRAILING_PAGES),
        PoolTransfer(PoolName.MAMBA, hit_policy=PoolHitPolicy.BLOCK_GROUPS, block_pages=4, group_pages=1),
    ]
    found = backend.batch_exists_v2(KEYS, transfers)

    def leading(flags: list[bool]) -> int:
        return flags.index(False) if False in flags else len(flags)

    pages = leading(stored[PoolName.KV])
    indexer = {p for p in range(1, pages + 1) if all(stored[PoolName.INDEXER][:p])}
    swa = {p for p in range(1, pages + 1) if all(stored[PoolName.SWA][max(0, p - window) : p])}
    assert found.restorable_prefix_pages == sorted(indexer & swa)
    assert found.kv_hit_pages == max(indexer & swa, default=0)
    blocks = leading([stored[PoolName.MAMBA][at] for at in (3, 7)]) * 4
    verdicts = {PoolName.KV: pages, PoolName.INDEXER: max(indexer, default=0), PoolName.SWA: max(swa, default=0)}
    verdicts[PoolName.MAMBA] = blocks
    assert found.extra_pool_hit_pages == {name: count for name, count in verdicts.items() if count}


def test_groups_may_have_keys_of_their_own(engine: Engines) -> None:
    groups = filled(1)
    backend = engine(Pool(), {PoolName.SWA: groups})
    backend.batch_set_v2([PoolTransfer(PoolName.SWA, groups.indices(0, 1, 2), ["g0", "g1", "g2"])])
    wanted = PoolTransfer(
        PoolName.SWA, keys=["g0", "g1", "g2", "g3"], hit_policy=PoolHitPolicy.BLOCK_GROUPS, block_pages=3, group_pages=2
    )
    found = backend.batch_exists_v2(KEYS, [wanted])
    assert found.extra_pool_hit_pages == {PoolName.SWA: 3} and found.kv_hit_pages == 0


def test_a_main_pool_without_memory_hits_what_the_others_have(engine: Engines) -> None:
    swa = filled(1)
    backend = engine(Pool(logical=True), {PoolName.SWA: swa})
    assert backend.batch_set_v1(KEYS, Pool().indices(*ROWS)) == [True] * 8
    assert backend.batch_get_v1(KEYS, Pool().indices(*ROWS)) == [True] * 8
    assert backend.batch_exists(KEYS) == 0, "nothing is stored for it alone"
    backend.batch_set_v2([PoolTransfer(PoolName.SWA, swa.indices(0, 1, 2), KEYS[:3])])
    assert backend.batch_exists_v2(KEYS, [PoolTransfer(PoolName.SWA)]).kv_hit_pages == 3
    assert backend.batch_exists_v2(KEYS, []).kv_hit_pages == 0


def test_a_transfer_that_makes_no_sense_fails_alone(engine: Engines) -> None:
    swa = filled(1)
    backend = engine(Pool(), {PoolName.SWA: swa})
    bad = [PoolTransfer("unknown", swa.indices(0), KEYS[:1]), PoolTransfer(PoolName.MAMBA, None, KEYS[:2])]
    good = PoolTransfer(PoolName.SWA, swa.indices(0), KEYS[:1])
    assert backend.batch_set_v2([bad[0], good, bad[1]]) == {
        "unknown": [False], PoolName.SWA: [True], PoolName.MAMBA: [False, False],
    }  # fmt: skip
    assert backend.batch_set_v2([replace(good, host_indices=swa.indices(0, 1))]) == {PoolName.SWA: [False]}
    assert backend.batch_exists_v2(KEYS, [PoolTransfer("unknown")]).kv_hit_pages == 0
    assert backend.batch_exists_v2(KEYS, [replace(good, hit_policy="new_policy")]).kv_hit_pages == 0
    assert backend.batch_get_v2([]) == {} and backend.batch_set_v1([], swa.indices()) == []


@pytest.mark.parametrize("what", [lambda *_: 1 / 0, lambda *_: ([1, 2, 3], [1, 2, 3])], ids=["raises", "odd pieces"])
def test_a_pool_that_cannot_say_where_its_pages_are_fails_alone(engine: Engines, what: Any) -> None:
    main, swa = filled(1), filled(2)
    backend = engine(main, {PoolName.SWA: swa})
    transfers = [PoolTransfer(PoolName.SWA, swa.indices(0, 1), KEYS[:2]),
                 PoolTransfer(PoolName.KV, main.indices(0, 1), KEYS[:2])]  # fmt: skip
    assert stores(backend, main, 1)
    swa.get_page_buffer_meta = what  # type: ignore[method-assign]
    wanted = {PoolName.SWA: [False, False], PoolName.KV: [True, True]}
    assert backend.batch_set_v2(transfers) == wanted
    assert backend.batch_get_v2(transfers) == wanted


# -- failures -----------------------------------------------------------------------------------------------


def calls(backend: Any, pool: Pool) -> dict[str, Any]:
    """What every call of SGLang's returns."""
    at = pool.indices(0, 1)
    transfer = [PoolTransfer(PoolName.SWA, at, KEYS[:2])]
    page = np.zeros(64, np.uint8)
    return {
        "batch_exists": backend.batch_exists(KEYS), "exists": backend.exists(KEYS[0]),
        "batch_get_v1": backend.batch_get_v1(KEYS[:2], at), "batch_set_v1": backend.batch_set_v1(KEYS[:2], at),
        "v2": backend.batch_exists_v2(KEYS, transfer).kv_hit_pages,
        "batch_get_v2": backend.batch_get_v2(transfer), "batch_set_v2": backend.batch_set_v2(transfer),
        "get": backend.get(KEYS[0], page), "set": backend.set(KEYS[0], page),
        "batch_get": backend.batch_get(KEYS[:2], [page, page]), "batch_set": backend.batch_set(KEYS[:1], [page]),
        "clear": backend.clear(), "get_stats": backend.get_stats(),
    }  # fmt: skip


NOTHING = {
    "batch_exists": 0, "exists": False, "batch_get_v1": [False] * 2, "batch_set_v1": [False] * 2, "v2": 0,
    "batch_get_v2": {PoolName.SWA: [False] * 2}, "batch_set_v2": {PoolName.SWA: [False] * 2}, "get": None,
    "set": False, "batch_get": [None] * 2, "batch_set": False, "clear": None, "get_stats": None,
}  # fmt: skip


def test_an_outage_is_a_miss_for_every_call(engine: Engines, store: FakeStore) -> None:
    pool = filled(1)
    backend = engine(pool, {PoolName.SWA: pool})
    assert stores(backend, pool)
    store.unavailable = True
    assert calls(backend, pool) == NOTHING


def test_an_error_of_any_kind_is_a_miss_for_every_call(
    engine: Engines, store: FakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    """The client itself raises, as a bug of ours would. Nothing reaches the engine, and each is logged."""
    pool = filled(1)
    backend = engine(pool, {PoolName.SWA: pool})

    def broken(operation: str, keys: int) -> None:
        raise ZeroDivisionError(operation)

    store.latency = broken
    assert calls(backend, pool) == NOTHING
    assert {record.levelno for record in caplog.records if "goes on without" in record.message} == {logging.WARNING}


def test_every_nth_call_fails_and_what_comes_back_is_right(engine: Engines, store: FakeStore) -> None:
    pool = filled(14)
    reader_pool = Pool()
    backend, reader = engine(pool), engine(reader_pool)
    dice = random.Random(5)
    read = 0
    for _ in range(300):
        store.fail(dice.randrange(1, 4))
        row = dice.randrange(8)
        backend.batch_set_v1([KEYS[row]], pool.indices(row))
        reader_pool.raw[:] = 0
        if reader.batch_get_v1([KEYS[row]], reader_pool.indices(7 - row)) == [True]:
            assert (reader_pool.raw[:, 7 - row] == pool.raw[:, row]).all()
            read += 1
    assert read > 20


def test_after_close_everything_is_a_miss(engine: Engines) -> None:
    pool = filled(1)
    backend = engine(pool, {PoolName.SWA: pool})
    assert stores(backend, pool)
    engine.clients[0].close()
    backend.close()
    assert calls(backend, pool) == NOTHING


def test_pools_that_were_never_registered_are_misses(sglang: Any) -> None:
    with FakeClient() as client:
        backend = sglang.HiCacheSimm(Config(), client=client)
        assert calls(backend, Pool()) == NOTHING


def test_wrong_settings_are_a_sentence(sglang: Any) -> None:
    for extra in ({"deadline_ms": "soon"}, {"manager_address": "::::"}, {"namespace": "n" * 300}):
        with pytest.raises(RuntimeError, match=r"^SiMM: "):
            sglang.HiCacheSimm(Config(extra_config=extra))


def test_an_engine_that_publishes_nothing_works(store: FakeStore) -> None:
    with fake_sglang.install(None) as module, FakeClient(store=store) as client:
        pool = filled(1)
        backend = module.HiCacheSimm(None, client=client)
        backend.register_mem_pool_host(pool)
        assert stores(backend, pool) and backend.batch_exists(KEYS) == 8


def test_the_log_says_what_an_identity_is_made_of(engine: Engines, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "simm.connectors")
    assert engine(filled(1), tp_size=2).batch_exists(KEYS) == 0
    (line,) = [record.message for record in caplog.records if record.message.startswith("pool kv")]
    for fact in ("bfloat16", "page_first", "'tp_size': 2", "/models/model", "weight_version"):
        assert fact in line

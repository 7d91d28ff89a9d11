"""SiMM's connector for vLLM over fakes of what it needs of vLLM. tests/engines runs it in the released engine."""

from __future__ import annotations

import logging
import pickle
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from simm.connectors import vllm_facts
from simm.connectors.vllm_plan import Block, Load, Plan, Report
from simm.schemes import registry
from simm.schemes.scheme import Scheme
from simm.testing import FakeClient, FakeStore
from tests.support import fake_vllm
from tests.support.fake_vllm import Role, World
from tests.support.waiting import wait_until

#: No request goes on in a step.
NONE = SimpleNamespace(req_ids=[], num_computed_tokens=[], resumed_req_ids=set())


class Engines:
    """Makes connectors as vLLM does, each with a client of its own on one store."""

    def __init__(self, module: Any, world: World) -> None:
        self.module, self.world, self.store = module, world, FakeStore()
        self.made: list[Any] = []

    def __call__(self, role: Role = Role.WORKER, **changes: Any) -> Any:
        world = replace(World(), **changes)
        vars(self.world).update(vars(world))
        client = FakeClient(store=self.store, deadline_s=120.0)
        one = self.module.SimmConnector(world.config(), role, world.cache(), client=client)
        self.made.append(one)
        if role is Role.WORKER:
            one.register_kv_caches(world.tensors())
        return one

    def identity(self, **changes: Any) -> tuple[str, str]:
        one = self(**changes)
        return one._keyspace.scope, one.get_handshake_metadata().identity


@pytest.fixture
def engines() -> Iterator[Engines]:
    world = World()
    with fake_vllm.install(world) as module:
        made = Engines(module, world)
        yield made
        for each in made.made:
            each.shutdown()


@pytest.mark.parametrize(
    "other",
    [
        {"model": "org/other"}, {"revision": "2"}, {"dtype": "bfloat16"}, {"cache_dtype": "fp8"}, {"layers": 3},
        {"quantization": "awq"}, {"tokens": 8}, {"tp": 2}, {"tp": 2, "rank": 1}, {"stages": 2, "stage": 1},
        {"turned": True}, {"heads": 1}, {"hash": "sha256_cbor"}, {"draft": "org/draft"}, {"extra": {"salt": "s"}},
        {"extra": {"weight_version": "2"}}, {"extra": {"model": "name"}}, {"kind": "sliding_window", "window": 64},
        {"kinds": ("full_attention", "sliding_window"), "window": 9}, {"kind": "mla_attention"},
        *({"more": {"model_config": {name: "other"}}} for name in (*vllm_facts.MODEL, "hf_overrides")),
        *({"more": {"multimodal_config": {name: "other"}}} for name in vllm_facts.MEDIA),
        *({"more": {"cache_config": {name: "other"}}} for name in vllm_facts.CACHE),
        *({"more": {"attention_config": {name: "other"}}} for name in vllm_facts.ATTENTION),
        *({"more": {"lora_config": {name: "other"}}} for name in vllm_facts.ADAPTERS),
        {"more": {"model_config": {"original_max_model_len": -1}}},
        {"more": {"load_config": {"load_format": "dummy"}}},
        {"more": {"load_config": {"model_loader_extra_config": {"tensorizer_uri": "s3://other"}}}},
        {"more": {"cache_config": {"kv_cache_dtype_skip_layers": ["0"]}}},
    ],
    ids=str,
)  # fmt: skip
def test_engines_that_differ_share_nothing(engines: Engines, other: dict[str, Any]) -> None:
    own = engines.identity()
    assert own == engines.identity() and own != engines.identity(**other)


@pytest.mark.parametrize("name", vllm_facts.VARIABLES)
def test_variables_that_decide_weights_and_layouts_keep_engines_apart(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    own = engines.identity()
    monkeypatch.setenv(name, "1")
    assert own != engines.identity()


class Layer:
    """A layer of vLLM, after it has chosen its kernels."""

    def __init__(self, isa: str | None, backend: str) -> None:
        if isa is not None:
            self.isa = isa
        self.backend = backend

    def get_attn_backend(self) -> Any:
        return SimpleNamespace(get_name=lambda: self.backend)


@pytest.mark.parametrize("other", [("amx", "CPU_ATTN"), (None, "CPU_MLA")], ids=str)
def test_kernels_that_pack_blocks_in_other_ways_share_nothing(engines: Engines, other: tuple[str | None, str]) -> None:
    """On processors with AMX keys lie in another order, in memory of the same form. A reset covers both."""

    def named(isa: str | None, backend: str) -> tuple[str, str]:
        layers = {f"0.{number}": Layer(isa, backend) for number in range(2)}
        return engines.identity(more={"compilation_config": {"static_forward_context": layers}})

    one = (None, "AMX_MLA") if other[0] is None else ("vec", "CPU_ATTN")
    own, found = named(*one), named(*other)
    assert own == named(*one) and own[1] != found[1] and own[0] == found[0]


@pytest.mark.parametrize("how", ["architecture", "amx"])
def test_processors_of_other_kinds_share_nothing(engines: Engines, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Where a layer does not say its instruction set, what vLLM chooses one by counts."""
    found = []
    for machine, has_amx in (("x86_64", False), ("aarch64", False) if how == "architecture" else ("x86_64", True)):
        torch: Any = ModuleType("torch")
        torch.cpu = SimpleNamespace(_is_amx_tile_supported=lambda has_amx=has_amx: has_amx)
        monkeypatch.setitem(sys.modules, "torch", torch)
        monkeypatch.setattr("platform.machine", lambda machine=machine: machine)
        found.append(engines.identity()[1])
    assert found[0] != found[1]


@pytest.mark.parametrize(
    "more",
    [*({"draft_model_config": {name: "other"}} for name in vllm_facts.DRAFT), {"draft": {"kv_cache_dtype": "fp8"}}],
    ids=str,
)
def test_engines_with_other_draft_models_share_nothing(engines: Engines, more: dict[str, Any]) -> None:
    own = engines.identity(draft="org/draft")
    assert own == engines.identity(draft="org/draft") and own != engines.identity(draft="org/draft", more=more)


def test_a_length_that_fits_the_memory_is_the_same_at_each_start(engines: Engines) -> None:
    """With ``--max-model-len auto`` the memory that happens to be free decides."""

    def named(wanted: int, length: int) -> Any:
        more = {"model_config": {"original_max_model_len": wanted, "max_model_len": length}}
        return engines.identity(more=more)

    assert named(-1, 81920) == named(-1, 81904)
    assert len({named(-1, 81920), named(81920, 81920), named(81904, 81904)}) == 3


def test_engines_that_load_the_same_weights_in_another_way_share(engines: Engines) -> None:
    assert engines.identity() == engines.identity(more={"load_config": {"load_format": "runai_streamer"}})


@pytest.mark.parametrize("speed", [
    {"num_threads": 4, "enable_multithread_load": True}, {},
    {"concurrency": 4, "memory_limit": 1 << 30, "distributed": True}, {"tensorizer_config": {"num_readers": 4}},
    {"mode": "copy", "fallback": False, "connect_timeout_s": 1.0},
    {"tensorizer_config": {
        "s3_access_key_id": "i", "s3_secret_access_key": "s", "encryption_keyfile": "/f",
        "stream_kwargs": {"s3_secret_access_key": "t"}, "deserialization_kwargs": {"encryption": "e", "num_readers": 2},
    }},
], ids=str)  # fmt: skip
def test_how_fast_a_loader_is_costs_no_hits(engines: Engines, speed: dict[str, Any]) -> None:
    """Its other settings may name folders with other weights."""

    def named(settings: dict[str, Any]) -> Any:
        return engines.identity(more={"load_config": {"model_loader_extra_config": settings}})

    assert named(speed) == engines.identity()
    assert named({**speed, "pattern": "other"}) == named({"pattern": "other"}) != engines.identity()


@pytest.mark.parametrize("settings", [
    {"tensorizer_config": {"stream_kwargs": {"s3_endpoint": "other"}}}, {"socket_path": "/other"},
    {"socket_dir": "/other"}, {"mode": "other"}, {"fallback": "other"},
], ids=str)  # fmt: skip
def test_what_may_name_other_weights_keeps_engines_apart(engines: Engines, settings: dict[str, Any]) -> None:
    assert engines.identity(more={"load_config": {"model_loader_extra_config": settings}}) != engines.identity()


def test_issue_no_log_has_values_of_a_loaders_settings(engines: Engines, caplog: pytest.LogCaptureFixture) -> None:
    """They may be secrets, under any name. Two engines can be compared all the same."""
    caplog.set_level(logging.DEBUG)

    def loading(settings: Any) -> tuple[str, str]:
        more = {"load_config": {"model_loader_extra_config": settings}}
        engines(Role.SCHEDULER, more=more)
        caplog.clear()
        one = engines(more=more)._identity
        (line,) = [each.getMessage() for each in caplog.records if "blocks are stored as" in each.getMessage()]
        assert "secret" not in caplog.text and "model_loader_extra_config" in line
        return one, line

    def code(password: str = "secret-4") -> str:
        return password

    plain = {"token": "secret-1", "tensorizer_config": {"tensorizer_uri": "s3://secret-2", "more": ["secret-3"]}}
    found = [loading(plain), loading(plain), loading({**plain, "token": "secret-5"}), loading({"hook": code})]
    assert "is code" in caplog.text, "the control"
    assert found[0] == found[1] and len({one for one, _ in found}) == len({line for _, line in found}) == 3


def test_gpus_that_encode_fp8_in_other_ways_share_nothing(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM keeps FP8 as bytes, and the same command line means another encoding on some GPUs."""
    found = []
    for encoding in ("torch.float8_e4m3fn", "torch.float8_e4m3fnuz", "torch.float8_e4m3fn"):
        platforms: Any = ModuleType("vllm.platforms")
        platforms.current_platform = SimpleNamespace(fp8_dtype=lambda encoding=encoding: encoding)
        monkeypatch.setitem(sys.modules, platforms.__name__, platforms)
        found.append(engines.identity(cache_dtype="fp8"))
    assert found[0] == found[2] != found[1]


def test_models_and_weights_have_scopes_of_their_own_and_ranks_one(engines: Engines) -> None:
    """A reset covers a scope."""
    scope = engines.identity()[0]
    assert {engines.identity(**each)[0] for each in ({"tp": 2}, {"dtype": "bfloat16"}, {"layers": 3})} == {scope}
    others = [{"model": "x"}, {"extra": {"salt": "s"}}, {"extra": {"weight_version": "2"}}, {"revision": "r"}]
    assert len({scope, *(engines.identity(**each)[0] for each in others)}) == 5
    assert engines.identity(extra={"model": "n"}) == engines.identity(extra={"model": "n"}, model="/a/path")


def test_ranks_of_a_model_with_latent_attention_have_one_identity(engines: Engines) -> None:
    same = {engines.identity(kind="mla_attention", heads=1, tp=tp, rank=rank) for tp, rank in ((1, 0), (2, 0), (2, 1))}
    assert len(same) == 1
    kinds = ("mla_attention", "full_attention")
    assert engines.identity(kinds=kinds, tp=2) != engines.identity(kinds=kinds, tp=2, rank=1)
    shares = [engines.made[at]._worker._share for at in range(3)]
    assert shares == [(0, 1), (0, 2), (1, 2)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"extra": {"manager": "x"}}, r"no options \['manager'\]"),
        ({"policy": "fail"}, '"kv_load_failure_policy": "recompute"'),
        ({"kind": "mamba"}, "kind mamba"),
        ({"kinds": ("full_attention", "mamba")}, "kind mamba"),
        ({"kind": "chunked_local_attention"}, "chunked"),
        ({"kind": "sliding_window", "window": None}, "several windows"),
        ({"dcp": 2}, "context parallelism"),
        ({"extra": {"layerwise": 1}}, "true or false"),
        ({"extra": {"layerwise": True}, "tp": 2}, "on one rank"),
        ({"extra": {"layerwise": True}, "kinds": ("full_attention",) * 2}, "one KV cache group"),
        ({"extra": {"layerwise": True}, "asynchronous": True}, "--no-async-scheduling"),
        ({"extra": {"staging_mb": 0}}, "staging_mb"),
    ],
)
def test_settings_that_cannot_work_stop_the_start(engines: Engines, changes: dict[str, Any], words: str) -> None:
    for role in Role:
        with pytest.raises(RuntimeError, match=words):
            engines(role, **changes)


def test_memory_that_is_not_the_hosts_stops_the_start(engines: Engines) -> None:
    world = World()
    one = engines(Role.SCHEDULER)
    worker = engines.module.SimmConnector(world.config(), Role.WORKER, world.cache(), client=one._client)
    engines.made.append(worker)
    tensors = world.tensors()
    tensors["0.1"].device = SimpleNamespace(type="cuda")
    with pytest.raises(RuntimeError, match="simm engine vllm"):
        worker.register_kv_caches(tensors)
    del tensors["0.1"]
    with pytest.raises(RuntimeError, match=r"0\.1"):
        worker.register_kv_caches(tensors)
    assert worker.get_handshake_metadata() is None


def test_the_scheduler_looks_for_what_all_workers_have(engines: Engines) -> None:
    workers = [engines(tp=2, rank=rank) for rank in range(2)]
    scheduler = engines(Role.SCHEDULER, tp=2)
    said = {(0, at): pickle.loads(pickle.dumps(each.get_handshake_metadata())) for at, each in enumerate(workers)}
    scheduler.set_xfer_handshake_metadata_pp_aware(said)
    assert scheduler._scheduler.identities == [each.get_handshake_metadata().identity for each in workers]


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor", "xxhash"])
def test_the_scheduler_registers_how_keys_are_made(
    engines: Engines, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all ranks and groups, under the names of the model; adapters when requests have them, and anew behind a reset.

    vLLM keeps the seed of ``xxhash`` to itself, and so do we.
    """
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    fields: dict[str, Any] = {"tp": 2, "kinds": ("full_attention", "sliding_window"), "window": 9, "hash": algorithm}
    workers = [engines(rank=rank, **fields) for rank in range(2)]
    scheduler = engines(Role.SCHEDULER, **fields, extra={"model": "own"})
    client = scheduler._client
    scheduler.set_xfer_handshake_metadata_pp_aware({
        (0, at): each.get_handshake_metadata() for at, each in enumerate(workers)
    })  # fmt: skip
    step = SimpleNamespace(num_scheduled_tokens={}, scheduled_new_reqs=[], scheduled_cached_reqs=NONE)

    def registered(name: str = "served") -> list[Scheme]:
        wait_until(lambda: scheduler._scheduler._generation is not None, "the generation")
        scheduler.build_connector_meta(step)
        assert scheduler._registrar.settled(120.0)
        return registry.registered(client, name)

    if algorithm == "xxhash":
        assert registered() == []
        return
    wait_until(registered, "the registration")
    (scheme,) = registered()
    for name in ("own", "org/model"):
        assert [each.options for each in registered(name)] == [scheme.options]
    identities = ",".join(each.get_handshake_metadata().identity for each in workers)
    generation = scheduler._keyspace.generation()
    assert (scheme.scheme, scheme.page, scheme.ranks) == ("vllm-blocks", 4, 2)
    assert scheme.options == {
        "algorithm": algorithm, "seed": "seed of the process", "groups": "0:4:9,1:4:9", "hash_tokens": 4,
        "scope": scheduler._keyspace.scope, "generation": generation, "identities": identities,
    }  # fmt: skip
    lora = SimpleNamespace(lora_name="sql", lora_path="/adapters/sql", lora_int_id=1)
    scheduler.on_new_request(SimpleNamespace(request_id="1", lora_request=lora))
    wait_until(lambda: registered() != [scheme], "the registration")
    (more,) = registered()
    assert more.options == {**scheme.options, "loras": '{"sql": "/adapters/sql"}'}
    scheduler.reset_cache()
    wait_until(lambda: registered() != [more], "the registration")
    (anew,) = registered()
    assert str(anew.options["generation"]) > str(generation)


def test_issue_adapters_come_while_others_are_registered(engines: Engines) -> None:
    """Threads that look things up register while the engine's thread brings requests: nobody's walk is disturbed."""
    scheduler = engines(Role.SCHEDULER)

    def arrives(number: int) -> None:
        lora = SimpleNamespace(lora_name=f"a{number}", lora_path=f"/adapters/{number}", lora_int_id=number)
        scheduler.on_new_request(SimpleNamespace(request_id=str(number), lora_request=lora))

    for number in range(3):
        arrives(number)
    walk = iter(scheduler._adapters.items())
    found = [next(walk)]
    arrives(3)
    found += walk
    assert [name for name, _ in found] == ["a0", "a1", "a2"]
    assert list(scheduler._adapters) == ["a0", "a1", "a2", "a3"]


def test_issue_an_adapter_that_is_known_moves_where_there_is_no_room_for_more(engines: Engines) -> None:
    scheduler = engines(Role.SCHEDULER)
    for number in range(66):
        lora = SimpleNamespace(lora_name=f"a{number % 65}", lora_path=f"/adapters/{number}", lora_int_id=number)
        scheduler.on_new_request(SimpleNamespace(request_id=str(number), lora_request=lora))
    assert len(scheduler._adapters) == 64 and scheduler._adapters["a0"] == "/adapters/65"


def ran(worker: Any, plan: Plan) -> None:
    """A step of a worker, without a model."""
    worker.bind_connector_metadata(pickle.loads(pickle.dumps(worker.MODULE._Metadata(plan))))
    worker.start_load_kv(None)
    for layer in ("0.0", "0.1"):
        worker.wait_for_layer_load(layer)
        worker.save_kv_layer(layer, None, None)
    worker.wait_for_save()


@pytest.mark.parametrize("groups", [1, 2])
def test_a_block_goes_and_comes_and_failures_are_named(engines: Engines, groups: int) -> None:
    """With several groups vLLM takes whole requests that have failed, and no blocks."""
    one, other = (engines(kinds=("full_attention",) * groups) for _ in range(2))
    one.MODULE = other.MODULE = engines.module
    there, gone = Block(groups - 1, 3, b"h" * 32), Block(0, 5, b"g" * 32)
    tensor = next(span.keep for span in (one._worker._staging,))
    assert tensor is not None
    ran(one, Plan(saves={"g": [there]}))
    assert one._worker.wait_saved(120.0)
    assert one.get_kv_connector_stats().data["blocks_stored"] == 1
    ran(other, Plan([Load("good", "g", [there]), Load("bad", "g", [gone])]))
    done: set[str] = set()
    failed: set[str] = set()
    bad: set[int] = set()
    while done != {"good", "bad"}:
        results = other.get_transfer_results(set())
        done |= results.finished_recving
        failed |= results.failed_recving
        bad |= other.get_block_ids_with_load_errors()
    assert (failed, bad) == ((set(), {5}) if groups == 1 else ({"bad"}, set()))
    report = pickle.loads(pickle.dumps(other.build_connector_worker_meta())).report
    assert report == Report({"bad"}, 0, [], [(0, b"g" * 32)]) and other.build_connector_worker_meta() is None


@pytest.mark.parametrize(
    ("changes", "ends"),
    [
        ({}, True), ({"draft": "org/draft"}, True), ({"stages": 2}, True),
        ({"stages": 2, "stage": 1, "draft": "org/draft"}, True), ({"stages": 2, "draft": "org/draft"}, False),
    ],
    ids=str,
)  # fmt: skip
def test_issue_a_stage_whose_steps_vllm_does_not_end_stores(
    engines: Engines, changes: dict[str, Any], ends: bool
) -> None:
    """The first runner waits for the saves of a model with a draft where the draft has run: on the last stage."""
    one = engines(**changes)
    one._worker.begin(Plan(saves={"g": [Block(0, 3, b"h" * 32)]}))
    one._worker.load(Plan())
    one.get_transfer_results(set())
    assert one._worker._open is ends
    one._worker.end()
    assert one._worker.wait_saved(120.0) and one.get_kv_connector_stats().data["blocks_stored"] == 1


def test_what_workers_say_reaches_the_scheduler(engines: Engines) -> None:
    scheduler = engines(Role.SCHEDULER, extra={"layerwise": True})
    request = SimpleNamespace(request_id="r", num_tokens=9, block_hashes=[])
    scheduler.on_new_request(request)
    evicted: list[set[int]] = []
    scheduler._kv_cache_manager = SimpleNamespace(
        get_block_ids=lambda number: ([1, 2, 3],), evict_blocks=lambda blocks: evicted.append(set(blocks))
    )
    told = engines.module._WorkerMetadata(Report({"r"}, 1)).aggregate(
        engines.module._WorkerMetadata(Report(gone=[(0, bytes(31) + b"\x07")]))
    )
    scheduler.update_connector_output(SimpleNamespace(kv_connector_worker_meta=told, invalid_block_ids={2}))
    assert evicted == [{2, 3}], "what was not loaded, and what was computed on it"
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    (event,) = scheduler.take_events()
    assert (event.block_hashes, event.medium, event.group_idx) == ([7], "STORAGE", 0)
    scheduler.update_connector_output(SimpleNamespace(kv_connector_worker_meta=None))
    assert scheduler.build_connector_meta(output()).plan == Plan(failures=1, idle=True)
    assert scheduler.request_finished_all_groups(request, ([],)) == (False, None)
    assert scheduler.reset_cache() is True and scheduler.requires_kv_delivery is False


def test_events_say_what_vllms_own_do(engines: Engines, caplog: pytest.LogCaptureFixture) -> None:
    """A router that hashes tokens again would else take a block with an image or a salt for its tokens alone."""
    scheduler = engines(Role.SCHEDULER, kinds=("full_attention", "sliding_window"), window=9)
    side = scheduler._scheduler
    side.identities = ["rank"]

    def stored(number: str, **fields: Any) -> list[Any]:
        hashes = [number.encode() * 16 + bytes([at] * 16) for at in range(3)]
        request = SimpleNamespace(
            request_id=number, block_hashes=hashes, all_token_ids=list(range(12)), lora_request=None, **fields
        )
        side.added(request)
        for group in range(2):
            for block in range(3):
                side._expect(side._requests[number], group, block)
        side.heard(Report(stored=[(group, each) for group in range(2) for each in hashes]))
        return list(scheduler.take_events())

    plain = stored("p", mm_features=[], cache_salt=None)
    assert [each.extra_keys for each in plain] == [[None]] * 6
    assert [each.kv_cache_spec_kind for each in plain] == ["full_attention"] * 3 + ["sliding_window"] * 3
    assert {each.group_idx: each.kv_cache_spec_sliding_window for each in plain} == {0: 9, 1: 9}
    images = [
        SimpleNamespace(identifier=name, mm_position=SimpleNamespace(offset=at, length=2))
        for name, at in (("cat.png", 5), ("dog.png", 7))
    ]
    special = stored("s", mm_features=images, cache_salt="tenant")
    assert [each.extra_keys for each in special] == 2 * [
        [("tenant",)], [(("cat.png", 1), ("dog.png", 3))], [(("dog.png", -1),)],
    ]  # fmt: skip
    assert [each.token_ids for each in special[:3]] == [list(range(at, at + 4)) for at in (0, 4, 8)]
    assert stored("x") == [], "of another vLLM, which does not say it"
    assert caplog.text.count("is in no event") == 1


def test_hit_sources_are_vllms_and_sum_up(engines: Engines) -> None:
    """By the interface of vLLM 0.32 and 0.33: counts by source that sum up to the tokens, and none of zero."""
    scheduler, worker = engines(Role.SCHEDULER), engines()
    request = SimpleNamespace(request_id="r")
    scheduler._scheduler.added(request)
    scheduler._scheduler._requests["r"].here = [True, False, True, True]
    asked = [scheduler.get_external_cache_hit_sources(request, tokens) for tokens in (0, 4, 8, 16)]
    assert asked == [{}, {"host": 4}, {"host": 4, "external": 4}, {"host": 12, "external": 4}]
    assert scheduler.get_external_cache_hit_sources(SimpleNamespace(request_id="x"), 8) == {"external": 8}
    assert worker.get_external_cache_hit_sources(request, 8) == {"external": 8}


def output() -> Any:
    cached = SimpleNamespace(req_ids=[], num_computed_tokens=[], resumed_req_ids=set())
    return SimpleNamespace(scheduled_new_reqs=[], scheduled_cached_reqs=cached, num_scheduled_tokens={})


def test_graphs_leave_room_for_layers(engines: Engines) -> None:
    connector = engines.module.SimmConnector
    assert connector.requires_piecewise_for_cudagraph({"layerwise": True})
    assert not connector.requires_piecewise_for_cudagraph({})
    stats = connector.build_kv_connector_stats({"lookups": 2})
    assert stats.aggregate(connector.build_kv_connector_stats({"lookups": 1})).reduce() == {"SiMM lookups": 3}
    assert not stats.is_empty()
    stats.reset()
    assert stats.is_empty()

"""Connectors' registrations: once, again when it is time, never in the way, and what engines' configurations say."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from simm.connectors.complaints import Complaints
from simm.connectors.registration import of_lmcache, of_mooncake, of_vllm, registrar
from simm.connectors.registration.callers import caller, local_values
from simm.connectors.registration.registrar import NotYet, Registrar, under_names
from simm.errors import UsageError
from simm.schemes import registry, vllm
from simm.schemes.scheme import TEXT_MAX, Scheme
from simm.testing import FakeClient, FakeStore
from tests.support.waiting import wait_until

WAIT_S = 120.0
SCHEME = Scheme("m", "vllm-tier", 16)


@pytest.fixture
def client() -> Iterator[FakeClient]:
    with FakeClient(namespace="n") as made:
        yield made


@pytest.fixture
def told(client: FakeClient) -> Iterator[Registrar]:
    made = Registrar(client, Complaints(logging.getLogger("simm.connectors.test")))
    yield made
    made.close()


def test_it_registers_once_and_when_something_changes(
    client: FakeClient, told: Registrar, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def make(name: str = "m") -> list[Scheme]:
        made.append(name)
        return under_names(SCHEME, [name, None, name, ""])

    for _ in range(50):
        told.tell("a", make)
        assert told.settled(WAIT_S)
    assert made == ["m"]
    (found,) = registry.registered(client, "m")
    assert (found.namespace, found.epoch, found.scheme) == ("n", 0, "vllm-tier")
    told.tell("b", lambda: make("other"))
    assert told.settled(WAIT_S) and len(registry.registered(client, "other")) == 1
    client.delete(registry.value_key("other", "vllm-tier"))  # as an eviction
    told.tell("b", lambda: make("other"))
    assert told.settled(WAIT_S) and not registry.registered(client, "other"), "not yet"
    monkeypatch.setattr(told, "_due", 0.0)
    told.tell("b", lambda: make("other"))
    assert told.settled(WAIT_S) and len(registry.registered(client, "other")) == 1, "it is time"
    epoch = client.advance()
    told.tell("b", lambda: make("other"))
    assert told.settled(WAIT_S)
    (found,) = registry.registered(client, "other")
    assert found.epoch == epoch > 0, "of the new epoch"
    assert made == ["m", "other", "other", "other"]


def test_it_never_waits_for_the_store(client: FakeClient, told: Registrar) -> None:
    """Calls return while the first one's thread is held up; what was asked for last is registered then."""
    go = threading.Event()
    original = client.get_into_many

    def slow(keys: Any, buffers: Any) -> Any:
        assert go.wait(WAIT_S)
        return original(keys, buffers)

    client.get_into_many = slow  # type: ignore[method-assign]
    for number in range(20):
        told.tell(number, lambda number=number: under_names(SCHEME, [f"m{number}"]))  # type: ignore[misc]
    assert not told.settled(0.0)
    go.set()
    assert told.settled(WAIT_S)
    client.get_into_many = original  # type: ignore[method-assign]
    assert registry.registered(client, "m0") and registry.registered(client, "m19")
    assert not registry.registered(client, "m7"), "only the last one counts"


def test_failures_are_logged_once_and_tried_again(
    client: FakeClient, told: Registrar, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(registrar, "RETRY_S", 0.01)
    monkeypatch.setattr("simm.connectors.complaints.COMPLAIN_S", 0.0)
    calls = 0

    def fails(*_: Any) -> Any:
        nonlocal calls
        calls += 1
        raise OSError("injected")

    original = client.get_into_many
    client.get_into_many = fails  # type: ignore[method-assign]
    told.tell("a", lambda: [SCHEME])
    wait_until(lambda: calls > 3, "attempts")
    assert [each.getMessage().rpartition(": ")[2] for each in caplog.records] == ["injected"]
    client.get_into_many = original  # type: ignore[method-assign]
    assert told.settled(WAIT_S) and registry.registered(client, "m") != []


def test_a_scheme_that_cannot_be_told_is_asked_for_once(told: Registrar, caplog: pytest.LogCaptureFixture) -> None:
    calls = []

    def raises() -> list[Scheme]:
        calls.append(1)
        raise UsageError("nobody knows")

    for _ in range(20):
        told.tell("a", raises)
        assert told.settled(WAIT_S)
    assert len(calls) == 1 and sum("nobody knows" in each.getMessage() for each in caplog.records) == 1
    told.tell("b", raises)
    assert told.settled(WAIT_S) and len(calls) == 2, "something has changed"
    left = [SCHEME]

    def later() -> list[Scheme]:
        calls.append(1)
        if len(calls) < 6:
            raise NotYet
        return left

    told.tell("c", later)
    assert told.settled(WAIT_S) and len(calls) == 6, "asked until it is known, without another call"


def test_issue_what_was_wanted_before_ends_not_what_is_wanted_now(told: Registrar) -> None:
    """A scheme that cannot be told, after a newer one was wanted: that is registered again after its time."""
    begun, go_on = threading.Event(), threading.Event()

    def slow() -> list[Scheme]:
        begun.set()
        assert go_on.wait(WAIT_S)
        raise UsageError("nobody knows")

    told.tell("old", slow)
    assert begun.wait(WAIT_S)
    told.tell("new", lambda: [SCHEME])
    go_on.set()
    assert told.settled(WAIT_S) and told._due < float("inf")


def test_after_the_end_nothing_is_registered(client: FakeClient, told: Registrar) -> None:
    told.close()
    told.tell("a", lambda: [SCHEME])
    assert told.settled(WAIT_S) and registry.registered(client, "m") == []
    broken: Any = None
    Registrar(broken, told._complain).tell("b", lambda: [SCHEME])  # raises nothing


@pytest.mark.parametrize("name", ["", "m" * (TEXT_MAX + 1), "no \ud800 Unicode"])
def test_issue_a_model_that_cannot_be_registered_leaves_the_others_be(
    client: FakeClient, told: Registrar, name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process of LMCache's server registers all models that were stored, in the order in which they came."""
    hasher = SimpleNamespace(hash_algorithm_name="blake3", none_hash=b"")
    context = SimpleNamespace(token_hasher=hasher, chunk_size=128)
    models = [("a", 1, 1), (name, 1, 1), ("ranks", 1 << 20, 1), ("b", 2, 1)]
    for _ in range(2):
        told.tell("models", lambda: of_lmcache.all_server_schemes(context, models))
        assert told.settled(WAIT_S)
        assert [len(registry.registered(client, each)) for each in ("a", "b", "ranks")] == [1, 1, 0]
        client.delete(registry.value_key("b", "lmcache-server"))
        monkeypatch.setattr(told, "_due", 0.0)
    mine = [each for each in caplog.records if each.name == "simm.connectors.test"]  # threads of other tests log, too
    assert len(mine) == 1, "what cannot be is said once"
    told.tell("names", lambda: under_names(SCHEME, [name, "c"]))
    assert told.settled(WAIT_S) and len(registry.registered(client, "c")) == 1, "a name among others"
    told.tell("none", lambda: of_lmcache.all_server_schemes(context, models[2:3]))
    assert told.settled(WAIT_S) and told._due == float("inf"), "nothing can be told: not until it changes"


def test_issue_a_value_that_the_store_chokes_on_leaves_the_others_be(
    client: FakeClient, told: Registrar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registrar, "RETRY_S", 0.01)
    original, broken = client.get_into_many, True

    def fails_for_one(keys: Any, buffers: Any) -> Any:
        if broken and registry.value_key("one", "vllm-tier") in keys:
            raise OSError("injected")
        return original(keys, buffers)

    client.get_into_many = fails_for_one  # type: ignore[method-assign]
    told.tell("a", lambda: under_names(SCHEME, ["one", "other"]))
    wait_until(lambda: registry.registered(client, "other") != [], "the other one")
    broken = False
    assert told.settled(WAIT_S) and registry.registered(client, "one") != [], "tried again"


def test_issue_a_process_that_proc_hides_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """With hidepid two users of a host dropped each other's registrations, time and again."""
    mine = registrar.owner_name(0)
    monkeypatch.setattr(registrar, "process_start", lambda _: 0)
    assert not registrar.has_ended(mine)

    def of_another_user(pid: int, sent: int) -> None:
        assert (pid, sent) == (os.getpid(), 0)
        raise PermissionError

    monkeypatch.setattr(os, "kill", of_another_user)
    assert not registrar.has_ended(mine)


def test_issue_a_restarted_process_takes_the_place_of_the_one_before(client: FakeClient, told: Registrar) -> None:
    """Of one that lives, or that cannot be seen from here, all stays."""
    ended = subprocess.Popen([sys.executable, "-c", "pass"])
    ended.wait(WAIT_S)
    mine = registrar.owner_name(0)
    here, _, own = mine.partition(f"/{os.getpid()}/")
    start = own.partition("/")[0]
    for name, over in (
        (mine, False), (f"{here}/{ended.pid}/{start}/0", True), (f"{here}/{os.getpid()}/1/0", True),
        (f"elsewhere/1/{ended.pid}/{start}/0", False), ("", False), (f"{here}/-1/x/0", False), ("/" * 4, False),
        (f"{here}/{'9' * 30}/1/0", False), (f"{here}/99999999999999/1/0", True),
    ):  # fmt: skip
        assert registrar.has_ended(name) == over, name
    for by in (f"{here}/{ended.pid}/{start}/0", "elsewhere/1/2/3/4", mine):
        registry.register(client, Scheme("m", "vllm-tier", 32, namespace="n", options={"seed": by[-20:]}), by)
    told.tell("a", lambda: [SCHEME, Scheme("m", "vllm-tier", 8)])
    assert told.settled(WAIT_S)
    assert [each.options.get("seed", each.page) for each in registry.registered(client, "m")] == [
        "elsewhere/1/2/3/4", mine[-20:], 16, 8,
    ]  # fmt: skip
    told.tell("b", lambda: [Scheme("m", "vllm-tier", 64)])
    assert told.settled(WAIT_S)
    assert [each.page for each in registry.registered(client, "m")] == [32, 32, 64]


def test_values_are_replaced_in_a_namespace_that_keeps_what_is_stored() -> None:
    store = FakeStore()
    with FakeClient(store=store, replicas=2) as once:
        for model in ("a", "b"):
            told = Registrar(once, Complaints(logging.getLogger("simm.connectors.test")))
            told.tell(model, lambda model=model: [Scheme("m", "lmcache", 64, options={"model_name": model})])  # type: ignore[misc]
            assert told.settled(WAIT_S)
            told.close()
        assert [each.options["model_name"] for each in registry.registered(once, "m")] == ["a", "b"]


# -- what engines say ----------------------------------------------------------------------------------------


class MooncakeStore:
    """As SGLang's backend for Mooncake; the module's name is set below."""

    def __init__(self, **fields: Any) -> None:
        self.storage_config = SimpleNamespace(**{
            "tp_rank": 0, "pp_rank": 0, "tp_size": 2, "pp_size": 1, "is_mla_model": False, "model_name": "org/m",
            "should_split_heads": False, "extra_config": None, **fields,
        })  # fmt: skip
        self.mem_pool_host: Any = None
        self.user = of_mooncake.user()


MooncakeStore.__module__ = "sglang.srt.mem_cache.storage.mooncake_store.mooncake_store"
SCOPE = {"scope": "mooncake/default", "generation": "01"}


def test_a_caller_is_known_by_its_class() -> None:
    class Other:
        def __init__(self) -> None:
            self.found = caller("sglang.srt", "MooncakeStore")
            self.values = local_values(("alpha", "beta"))

    alpha, beta = 1, 2
    made = Other()
    assert made.found is None and made.values == [alpha, beta] and local_values(("alpha", "gamma")) is None
    backend = MooncakeStore()
    assert backend.user is not None
    kept = backend.user
    del backend, made
    gc.collect()
    with pytest.raises(NotYet):
        kept(SCOPE)  # nothing keeps the engine's object


def test_issue_looking_at_callers_keeps_nothing_of_theirs() -> None:
    """A frame whose variables were looked at keeps what they were then: a model that its function has dropped since."""

    class Model:
        pass

    def engine() -> bool:
        model = Model()
        known = weakref.ref(model)
        assert caller("sglang.srt", "MooncakeStore") is None and local_values(("alpha", "gamma")) is None
        del model
        return known() is None

    assert engine()


def published(monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> None:
    """Let SGLang have been started so."""
    module: Any = ModuleType("sglang.srt.runtime_context")
    module.get_server_args = lambda: SimpleNamespace(**arguments)
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.parametrize(
    ("algorithm", "pairs"),
    [(None, False), ("NGRAM", False), ("STANDALONE", False), ("EAGLE", True), ("eagle3", True), ("NEXTN", True),
     ("FROZEN_KV_MTP", True), ("MINE", None)],
)  # fmt: skip
def test_pages_of_sglang_are_of_pairs_with_eagle(
    algorithm: str | None, pairs: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = MooncakeStore()
    backend.mem_pool_host = SimpleNamespace(page_size=64)
    assert backend.user is not None
    published(monkeypatch, speculative_algorithm=algorithm)
    if pairs is None:
        with pytest.raises(UsageError, match="'MINE'"):
            backend.user(SCOPE)
        kinds: Any = ModuleType("sglang.srt.speculative.spec_info")
        mine = SimpleNamespace(is_eagle=lambda: True)
        kinds.SpeculativeAlgorithm = SimpleNamespace(from_string={"MINE": mine}.__getitem__)
        monkeypatch.setitem(sys.modules, kinds.__name__, kinds)
    (scheme,) = backend.user(SCOPE)
    assert scheme.options.get("bigram", False) is (pairs is not False)


def test_what_sglang_does_not_tell_is_not_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = MooncakeStore()
    backend.mem_pool_host = SimpleNamespace(page_size=64)
    assert backend.user is not None
    with pytest.raises(UsageError, match="speculates"):
        backend.user(SCOPE)
    published(monkeypatch)
    with pytest.raises(UsageError, match="speculates"):
        backend.user(SCOPE)
    module: Any = sys.modules["sglang.srt.runtime_context"]

    def nothing() -> None:
        raise ValueError("Global server args is not set yet!")

    module.get_server_args = nothing
    (scheme,) = backend.user(SCOPE)
    assert "bigram" not in scheme.options, "a program that embeds parts of SGLang, none of which speculate"
    before: Any = ModuleType("sglang.srt.server_args")
    before.get_global_server_args = lambda: SimpleNamespace(speculative_algorithm="EAGLE")
    monkeypatch.setitem(sys.modules, before.__name__, before)
    (scheme,) = backend.user(SCOPE)
    assert scheme.options["bigram"] is True
    module.get_spec = lambda: SimpleNamespace(speculative_algorithm="NGRAM")
    (scheme,) = backend.user(SCOPE)
    assert "bigram" not in scheme.options, "as resolved"


def test_sglangs_backend_for_mooncake(monkeypatch: pytest.MonkeyPatch) -> None:
    published(monkeypatch, speculative_algorithm=None)
    backend = MooncakeStore(extra_config={"extra_backend_tag": "t"})
    assert backend.user is not None
    with pytest.raises(NotYet):
        backend.user(SCOPE)
    backend.mem_pool_host = SimpleNamespace(page_size=64)
    (scheme,) = backend.user(SCOPE)
    assert (scheme.model, scheme.scheme, scheme.page, scheme.ranks) == ("org/m", "sglang-mooncake", 64, 2)
    assert scheme.options == {**SCOPE, "model_name": "org/m", "mla": False, "tag": "t"}
    backend.storage_config.tp_rank = 1
    assert backend.user(SCOPE) == [], "the first rank tells it"
    backend.storage_config.tp_rank, backend.storage_config.attn_cp_size = 0, 2
    with pytest.raises(UsageError, match="split by tokens"):
        backend.user(SCOPE)
    del backend.storage_config.attn_cp_size
    backend.registered_pools = {"kv": 1, "mamba": 2}  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="hybrid"):
        backend.user(SCOPE)


def test_nobody_who_is_known() -> None:
    assert of_mooncake.user() is None


def vllm_config(algorithm: str = "sha256", served: Any = "served") -> Any:
    model = SimpleNamespace(model="/models/m", served_model_name=served)
    return SimpleNamespace(cache_config=SimpleNamespace(prefix_caching_hash_algo=algorithm), model_config=model)


def test_vllms_hashes_and_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.delitem(sys.modules, "vllm.v1.core.kv_cache_utils", raising=False)
    assert of_vllm.hashing_of(vllm_config()).options == {"algorithm": "sha256", "seed": vllm.DEFAULT_SEED}
    old = ModuleType("vllm.v1.core.kv_cache_utils")
    monkeypatch.setitem(sys.modules, old.__name__, old)
    with pytest.raises(UsageError, match="random seed"):
        of_vllm.hashing_of(vllm_config())
    old.get_none_hash_seed = lambda: "of the process"  # type: ignore[attr-defined]
    assert of_vllm.seed() == "of the process"
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert of_vllm.hashing_of(vllm_config("sha256_cbor")) == ("sha256_cbor", "0")
    with pytest.raises(UsageError, match="xxhash"):
        of_vllm.hashing_of(vllm_config("xxhash"))
    assert of_vllm.names_of(vllm_config(), "own") == ["served", "own", "/models/m"]
    assert of_vllm.names_of(vllm_config(served=["a", "b"])) == ["a", "b", "/models/m"]
    groups = of_vllm.Groups([(0, 16, 0), (2, 24, 9)], 8)
    assert groups.page == 48 and groups.options == {"groups": "0:16:0,2:24:9", "hash_tokens": 8}
    paths = {f"adapter-{number}": f"/adapters/{number}" for number in range(1000)}
    kept = Scheme("m", "vllm-blocks", 16, options=of_vllm.adapters(paths))
    assert "adapter-999" in str(kept.options["loras"]) and "adapter-1\"" not in str(kept.options["loras"])
    assert of_vllm.adapters({}) == {}


def lmcache_config(**fields: Any) -> Any:
    return SimpleNamespace(**{
        "pre_caching_hash_algorithm": "builtin", "extra_config": None, "use_layerwise": False, "chunk_size": 64,
        **fields,
    })  # fmt: skip


def metadata(**fields: Any) -> Any:
    return SimpleNamespace(**{
        "model_name": "org/m", "served_model_name": "served", "world_size": 2, "worker_id": 0, "use_mla": False,
        "kv_dtype": "dtype", "kv_shape": (3, 2, 64, 4, 16), **fields,
    })  # fmt: skip


def test_lmcaches_keys_in_an_engines_process(monkeypatch: pytest.MonkeyPatch) -> None:
    database = ModuleType("lmcache.v1.token_database")
    monkeypatch.setitem(sys.modules, database.__name__, database)
    for name in ("vllm.utils.hashing", "vllm.utils"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    def schemes(config: Any, of: Any) -> list[Scheme]:
        return of_lmcache.engine_schemes(config, of, {"dtype": "half"}, {})

    with pytest.raises(UsageError, match="begin"):
        schemes(lmcache_config(), metadata())
    database.NONE_HASH = -7  # type: ignore[attr-defined]
    served, plain = schemes(lmcache_config(pre_caching_hash_algorithm="sha256_cbor"), metadata())
    assert (served.model, plain.model, plain.page, plain.ranks) == ("served", "org/m", 64, 2)
    assert plain.options == {"algorithm": "builtin", "root": -7, "model_name": "org/m", "dtype": "half", "layers": 0}, (
        "without vLLM LMCache hashes by its own, whatever it is told"
    )
    (*_, layered) = schemes(lmcache_config(use_layerwise=True), metadata(use_mla=True))
    assert layered.options["layers"] == 3 and layered.options["mla"] is True
    (*_, each) = schemes(lmcache_config(extra_config={"save_only_first_rank": False}), metadata(use_mla=True))
    assert (each.options["world"], each.ranks) == (2, 1), "the first rank's number stands for all"
    (*_, each) = schemes(lmcache_config(extra_config={"remote_enable_mla_worker_id_as0": True}), metadata(world_size=4))
    assert "world" not in each.options and each.ranks == 4, "it is of models with latent attention alone"
    with pytest.raises(UsageError, match="blending"):
        schemes(lmcache_config(enable_blending=True), metadata())
    monkeypatch.setitem(sys.modules, "vllm.utils.hashing", ModuleType("vllm.utils.hashing"))
    monkeypatch.setenv("PYTHONHASHSEED", "5")
    with pytest.raises(UsageError, match="begin"):
        schemes(lmcache_config(pre_caching_hash_algorithm="sha256_cbor_64bit"), metadata())
    database.NONE_HASH = int.from_bytes(vllm.none_hash("sha256_cbor", "5")[:8], "big")  # type: ignore[attr-defined]
    (*_, found) = schemes(lmcache_config(pre_caching_hash_algorithm="sha256_cbor_64bit"), metadata())
    assert (found.options["algorithm"], found.options["seed"]) == ("sha256_cbor", "5")
    with pytest.raises(UsageError, match="xxhash"):
        schemes(lmcache_config(pre_caching_hash_algorithm="xxhash"), metadata())


def test_lmcaches_server(monkeypatch: pytest.MonkeyPatch) -> None:
    hasher = SimpleNamespace(hash_algorithm_name="blake3", none_hash=b"")
    context = SimpleNamespace(token_hasher=hasher, chunk_size=128)
    (scheme,) = of_lmcache.server_schemes(context, "org/m", 2, 1)
    assert (scheme.scheme, scheme.page, scheme.ranks) == ("lmcache-server", 128, 2)
    assert scheme.options == {"algorithm": "blake3", "object_groups": 1}
    (weighted,) = of_lmcache.server_schemes(context, "org/m", 2, 1, head="0a/")
    assert weighted.options == {**scheme.options, "head": "0a/"}
    monkeypatch.setenv("PYTHONHASHSEED", "5")
    hasher.hash_algorithm_name = "sha256_cbor"
    with pytest.raises(UsageError, match="begin"):
        of_lmcache.server_schemes(context, "org/m", 2, 1)
    hasher.none_hash = vllm.none_hash("sha256_cbor", "5")
    assert of_lmcache.server_schemes(context, "org/m", 2, 1)[0].options["seed"] == "5"
    hasher.hash_algorithm_name = "builtin"
    with pytest.raises(UsageError, match="builtin"):
        of_lmcache.server_schemes(context, "org/m", 2, 1)
    with pytest.raises(UsageError, match="something else"):
        of_lmcache.server_schemes(None, "org/m", 2, 1)

"""SiMM's tier for vLLM over fakes of what it needs of vLLM. tests/engines runs it in the released tiering manager."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from simm.client import NoValue
from simm.connectors import vllm_facts
from simm.testing import FakeClient, FakeStore
from tests.support import fake_vllm_tier
from tests.support.fake_vllm import World
from tests.support.fake_vllm_tier import Context, Job, Key, Words
from tests.support.waiting import wait_until

KEYS = [Key(bytes([number]) * 32) for number in range(3)]
ROWS = [0, 1, 2]


class Tiers:
    """Makes tiers, each with a client and a memory of its own on one store."""

    def __init__(self, module: Any) -> None:
        self.module, self.store = module, FakeStore()
        self.made: list[Any] = []
        self.jobs = itertools.count()

    def __call__(self, config: Any = None, **options: Any) -> Any:
        """Make a tier as vLLM's connector with this configuration does; None: as another program does."""
        self.made.append(self._connected(config, None, options) if config is not None else self._tier(options))
        return self.made[-1]

    def _connected(self, vllm_config: Any, kv_cache_config: Any, options: dict[str, Any]) -> Any:
        return self._tier(options)

    def _tier(self, options: dict[str, Any]) -> Any:
        raw = fake_vllm_tier.memory()
        client = FakeClient(store=self.store)
        tier = self.module.SimmTier(fake_vllm_tier.spec(), memoryview(raw), "SimmTier", client=client, **options)
        tier.raw = raw
        return tier

    def scope(self, config: Any = None, **options: Any) -> str:
        scope: str = self(config, **options)._keyspace.scope
        return scope

    def stores(self, tier: Any, context: Context) -> bool:
        """Store all keys for a request; return whether vLLM is told that they are."""
        number = next(self.jobs)
        tier.submit_store(Job(number, KEYS, ROWS, False, context))
        wait_until(lambda: not tier._running, "the job ends")
        (result,) = tier.get_finished_jobs()
        assert result.job_id == number
        return bool(result.success)


@pytest.fixture
def tiers() -> Iterator[Tiers]:
    with fake_vllm_tier.install() as module:
        made = Tiers(module)
        yield made
        for each in made.made:
            each.shutdown()


@pytest.mark.parametrize(
    "other",
    [
        {"revision": "2"}, {"quantization": "awq"}, {"cache_dtype": "fp8"}, {"hash": "sha256_cbor"},
        *({"more": {"model_config": {name: "other"}}} for name in (*vllm_facts.MODEL, "hf_overrides")),
        {"more": {"load_config": {"load_format": "dummy"}}},
        {"more": {"load_config": {"model_loader_extra_config": {"tensorizer_uri": "s3://other"}}}},
        {"more": {"cache_config": {"kv_cache_dtype_skip_layers": ["0"]}}},
    ],
    ids=str,
)  # fmt: skip
def test_engines_that_differ_share_nothing(tiers: Tiers, other: dict[str, Any]) -> None:
    own = tiers.scope(World().config())
    assert own == tiers.scope(World().config()) and own != tiers.scope(World(**other).config())


@pytest.mark.parametrize("name", vllm_facts.VARIABLES)
def test_variables_that_decide_weights_and_layouts_keep_engines_apart(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A Mamba layer's state may be transposed, in as many bytes."""
    own = tiers.scope(World().config())
    monkeypatch.setenv(name, "1")
    assert own != tiers.scope(World().config())


def test_issue_no_log_has_values_of_a_loaders_settings(tiers: Tiers, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    tiers.scope(World(more={"load_config": {"model_loader_extra_config": {"token": "secret"}}}).config())
    assert "model_loader_extra_config" in caplog.text and "secret" not in caplog.text


def test_a_length_that_fits_the_memory_is_the_same_at_each_start(tiers: Tiers) -> None:
    """With ``--max-model-len auto`` the memory that happens to be free decides."""

    def named(wanted: int, length: int) -> Any:
        more = {"model_config": {"original_max_model_len": wanted, "max_model_len": length}}
        return tiers.scope(World(more=more).config())

    assert named(-1, 81920) == named(-1, 81904)
    assert len({named(-1, 81920), named(81920, 81920), named(81904, 81904)}) == 3


def test_widths_are_told_apart_by_vllm_alone(tiers: Tiers) -> None:
    """vLLM says which chunks are the same at any width: the settings have none in them."""
    assert tiers.scope(World().config()) == tiers.scope(World(tp=2, rank=1).config())


@pytest.mark.parametrize("config", [None, object()], ids=["of another program", "of another vLLM"])
def test_a_tier_without_vllms_configuration_says_so(
    tiers: Tiers, caplog: pytest.LogCaptureFixture, config: Any
) -> None:
    known = tiers.scope(World().config())
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING], "the control"
    own = tiers.scope(config)
    (told,) = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert "weight_version" in told
    assert own == tiers.scope(config) and own != known
    assert own != tiers.scope(config, weight_version="2"), "which is what the warning advises"


def test_what_runs_at_a_reset_is_not_stored_after_it(tiers: Tiers) -> None:
    """vLLM offers its chunks once more, and they may be of the old weights."""
    one, other = tiers(World().config(), enable_kv_events=True), tiers(World().config())
    old, new = Context("old"), Context("new")
    one.on_new_request(old)
    assert tiers.stores(one, old) and other.stored(KEYS) == [True] * 3, "the control"
    assert [len(each.keys) for each in one.take_events()] == [3]
    one.drain_jobs()
    assert not tiers.stores(one, old) and other.stored(KEYS) == [False] * 3
    assert not list(one.take_events())
    one.on_new_request(new)
    assert tiers.stores(one, new) and other.stored(KEYS) == [True] * 3
    assert not tiers.stores(one, old), "another one's success is not its own"
    one.drain_jobs()
    assert not tiers.stores(one, new) and other.stored(KEYS) == [False] * 3


@pytest.mark.parametrize(
    "options",
    [
        *({"threads": each} for each in ("4", 0, -1, 65, 2.5, True)),
        *({"enable_kv_events": each} for each in ("yes", 1)),
    ],
    ids=str,
)  # fmt: skip
def test_issue_wrong_options_are_a_sentence(tiers: Tiers, options: dict[str, Any]) -> None:
    """A text for a number ended vLLM's engine at the first store; without threads no job ended."""
    with pytest.raises(RuntimeError, match=rf"^SiMM: {next(iter(options))} is "):
        tiers(World().config(), **options)


def test_a_locality_that_vllm_does_not_know_is_a_sentence(tiers: Tiers) -> None:
    with pytest.raises(RuntimeError, match=r"^SiMM: locality is LOCAL or "):
        tiers(World().config(), locality="local")


@pytest.mark.parametrize("how", ["an outage", "no generation", "an error", "another size"])
def test_issue_only_what_is_not_stored_is_told_as_removed(
    tiers: Tiers, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever had not been loaded was, so routers forgot chunks that are stored."""
    tier, context = tiers(World().config(), enable_kv_events=True), Context("r")
    assert tiers.stores(tier, context) and tier.take_events()

    def loads() -> list[Any]:
        """Load all chunks; return those that are told as removed."""
        tier.submit_load(Job(next(tiers.jobs), KEYS, ROWS, True, context))
        wait_until(lambda: not tier._running, "the job ends")
        (result,) = tier.get_finished_jobs()
        assert not result.success
        return [key for event in tier.take_events() if event.removed for key in event.keys]

    with monkeypatch.context() as patch:
        if how == "an outage":
            patch.setattr(tiers.store, "unavailable", True)
        elif how == "no generation":
            patch.setattr(tier._keyspace, "generation", lambda: None)
        else:
            results = {"another size": [NoValue.UNAVAILABLE, 3, 3]}
            patch.setattr(tier._client, "get_digests", lambda *_: results[how])
        tier.on_new_request(context)
        assert tier.lookup(KEYS[0], context) is Words.RETRY
        assert loads() == [] and tier.lookup(KEYS[0], context) is Words.MISS
    assert tier.stored(KEYS) == [True] * 3
    tier._client.delete_digests(tier._digests(KEYS[1:]))
    assert loads() == KEYS[1:]


def test_requests_that_have_ended_are_forgotten(tiers: Tiers) -> None:
    """And their numbers may come again."""
    one = tiers(World().config())
    context = Context("0")
    for at in range(100):
        context = Context(str(at))
        one.on_new_request(context)
        one.drain_jobs()
        one.on_request_finished(context)
    assert not one._requests and not one._stale
    one.on_new_request(context)
    assert tiers.stores(one, context)


def test_issue_a_late_lookup_is_a_miss(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request waited for all those before it, however long a slow server took."""
    tier = tiers(World().config())
    one, other = Context("one"), Context("other")
    tier.on_new_request(one)
    with monkeypatch.context() as patch:
        patch.setattr(tier._lookups, "lookup", lambda key, context: None)
        tier.on_new_request(other)
        assert tier.lookup(KEYS[0], other) is Words.RETRY
        patch.setattr(tier._client, "deadline_s", 0.01)
        assert tier.lookup(KEYS[0], one) is Words.RETRY

        def late() -> bool:
            tier.on_schedule_end(None)
            return bool(tier.lookup(KEYS[0], one) is Words.MISS)

        wait_until(late, "it is late")
    tier.on_schedule_end(None)
    tier.on_schedule_end(None)
    assert not tier._late_at, "nobody asks"
    for each in (one, other):
        tier.on_request_finished(each)
    assert not tier._asking and not tier._requests


@pytest.mark.parametrize("how", ["it ends", "it is late"])
def test_issue_a_request_that_waits_no_longer_makes_no_miss_of_what_others_asked(tiers: Tiers, how: str) -> None:
    """vLLM has one answer of a chunk for all requests, and keeps it for as long as any of them runs."""
    tier, one, other = tiers(World().config()), Context("one"), Context("other")
    assert tiers.stores(tier, one)
    tier._lookups.held = True
    for each in (one, other):
        tier.on_new_request(each)
        assert tier.lookup(KEYS[0], each) is Words.RETRY
    tier.on_schedule_end(None)
    if how == "it ends":
        tier.on_request_finished(one)
    else:
        tier._late_at["one"] = 0.0
        assert tier.lookup(KEYS[0], one) is Words.MISS
    tier._lookups.answer()
    assert tier.lookup(KEYS[0], other) is Words.HIT


def test_a_request_that_waits_again_has_a_deadline_again(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has asked nothing for a while: what it waits for now was not asked before."""
    tier, one = tiers(World().config()), Context("one")
    tier.on_new_request(one)
    monkeypatch.setattr(tier._lookups, "lookup", lambda key, context: None)
    monkeypatch.setattr(tier._client, "deadline_s", 3600.0)
    assert tier.lookup(KEYS[0], one) is Words.RETRY
    tier.on_schedule_end(None)
    tier._late_at["one"] = 0.0  # long ago
    tier.on_schedule_end(None)  # a step in which it asks nothing
    assert tier.lookup(KEYS[0], one) is Words.RETRY

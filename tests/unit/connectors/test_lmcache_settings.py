"""LMCache in an engine: options that are mistyped, and engines whose requests LMCache's keys do not tell apart."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from simm.connectors.registration import of_lmcache
from simm.testing import FakeClient
from tests.support import fake_lmcache
from tests.support.fake_lmcache import Backend, Config, Metadata

HEAD = "remote_storage_plugin."
LISTED = ["simm", "simm.b", "fs"]
#: What each instance has beside its options.
CLASSES = {
    f"{HEAD}{name}.{part}": "x" for name in ("simm", "simm.b", "fs") for part in ("module_path", "class_name")
}  # fmt: skip


@pytest.fixture
def module() -> Iterator[Any]:
    with fake_lmcache.engine() as made:
        yield made


class LMCacheConnectorV1Impl:
    """LMCache's part in an engine of vLLM."""

    def __init__(self, **config: Any) -> None:
        self._vllm_config = SimpleNamespace(**config)

    def register_kv_caches(self, make: Any) -> Any:
        return make()


LMCacheConnectorV1Impl.__module__ = "lmcache.integration.vllm.vllm_v1_adapter"


@pytest.mark.parametrize(
    "name", ["simm.weight-version", "simm.weigth_version", "simm.salt_", "simm.b.weight-version", "simm.weight.version"]
)
def test_issue_a_mistyped_option_stops_the_connection(module: Any, name: str) -> None:
    """It was ignored, and chunks of other weights were read."""
    extra = {**CLASSES, f"{HEAD}simm.salt": "s", f"{HEAD}{name}": "2"}
    with pytest.raises(RuntimeError, match=f"^SiMM: extra_config has {HEAD}{name}; options are manager_address, "):
        module._options("plugin://simm", "simm", extra, LISTED)


@pytest.mark.parametrize(
    ("plugin", "name"),
    [
        ("simm", "simm.v2.weight_version"), ("simm", "simm.b.salt"), ("simm", "SIMM.weight_version"),
        ("simm", "Simm.b.weight-version"), ("simm.b", "simm.weight_version"), ("simm.b", "simm.c.salt"),
    ],
)  # fmt: skip
def test_issue_an_option_of_a_plugin_that_is_none_stops_the_connection(module: Any, plugin: str, name: str) -> None:
    """It was ignored, as another one's, and chunks of other weights were read."""
    mine = {f"{HEAD}{plugin}.{part}": "x" for part in ("module_path", "class_name")}
    with pytest.raises(RuntimeError, match=f"^SiMM: extra_config has {HEAD}{name}; .*, of the plugins fs, {plugin}$"):
        module._options(f"plugin://{plugin}", plugin, {**mine, f"{HEAD}{name}": "2"}, [plugin, "fs"])


def test_settings_that_may_be_another_plugins_are_in_the_log_once(
    module: Any, caplog: pytest.LogCaptureFixture
) -> None:
    extra = {f"{HEAD}sim.weight_version": "2", f"{HEAD}salt": "s", f"{HEAD}fs.namespace": "n", f"{HEAD}sim.path": "/"}
    for _ in range(2):
        assert module._options("plugin://simm", "simm", {**extra, 7: "x"}, ["simm", "fs"]) == {}
    (told,) = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert f"has {HEAD}salt, {HEAD}sim.weight_version, of no plugin" in told


@pytest.mark.parametrize("url", ["simm://h:1/", None])
def test_an_address_has_options_of_its_own_beside_a_plugins(module: Any, url: str | None) -> None:
    """LMCache makes a connection for each of them. Without the address nobody reads its options."""
    settings = Config(use_layerwise=False, extra_config={f"{HEAD}simm.salt": "s", f"{HEAD}simm.b.salt": "t"})
    for name, value in {"remote_storage_plugins": ["simm.b"], "remote_url": url}.items():
        setattr(settings, name, value)
    with FakeClient() as client:

        def connected(own: str, plugin: str | None) -> Any:
            made = module.SimmConnector(
                None, Backend(), settings, Metadata(), url=own, plugin_name=plugin, client=client
            )
            asyncio.run(made.close())
            return made._head

        if url is None:
            with pytest.raises(RuntimeError, match=f"has {HEAD}simm.salt; "):
                connected("plugin://simm.b", "simm.b")
        else:
            assert connected("plugin://simm.b", "simm.b") != connected(url, None) != ""


def test_instances_have_options_of_their_own(module: Any) -> None:
    extra = {
        **CLASSES, f"{HEAD}simm.salt": "one", f"{HEAD}simm.b.salt": "other", f"{HEAD}simm.b.namespace": "n",
        f"{HEAD}fs.base_path": "/tmp", "save_only_first_rank": True,
    }  # fmt: skip
    assert module._options("plugin://simm", "simm", extra, LISTED) == {"salt": "one"}
    assert module._options("plugin://simm.b", "simm.b", extra, ["simm.b"]) == {"salt": "other", "namespace": "n"}


def test_issue_an_address_without_a_host_leaves_it_to_the_configuration(module: Any) -> None:
    extra = {f"{HEAD}simm.manager_address": "h:1", f"{HEAD}simm.salt": "s"}
    assert module._options("simm:///?salt=t", None, extra, []) == {"manager_address": "h:1", "salt": "t"}
    assert module._options("simm://g:2/", None, extra, []) == {"manager_address": "g:2", "salt": "s"}


def warned(module: Any, caplog: pytest.LogCaptureFixture, algorithm: str = "sha256_cbor", **config: Any) -> list[str]:
    """Make two connections of an engine; return what was logged as a warning."""
    caplog.clear()
    settings = Config(use_layerwise=False, pre_caching_hash_algorithm=algorithm)
    with FakeClient() as client:
        for _ in range(2):
            made = LMCacheConnectorV1Impl(**config).register_kv_caches(
                lambda: module.SimmConnector(None, Backend(), settings, Metadata(), client=client)
            )
            asyncio.run(made.close())
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.fixture
def vllms_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """LMCache finds vLLM's algorithms."""
    monkeypatch.setitem(sys.modules, "vllm.utils.hashing", ModuleType("vllm.utils.hashing"))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"lora_config": SimpleNamespace(max_loras=1)}, "have no LoRA adapters"),
        ({"model_config": SimpleNamespace(enable_prompt_embeds=True)}, "have no prompt embeddings"),
    ],
)  # fmt: skip
def test_issue_requests_that_keys_do_not_tell_apart_are_warned_of_once(
    module: Any, vllms_hashes: None, caplog: pytest.LogCaptureFixture, config: dict[str, Any], words: str
) -> None:
    plain: dict[str, Any] = {"lora_config": None, "model_config": SimpleNamespace(enable_prompt_embeds=False)}
    assert warned(module, caplog, **plain) == [], "the control"
    (told,) = warned(module, caplog, **{**plain, **config})
    assert words in told and "wrong tokens" in told


def test_issue_a_hash_whose_collisions_can_be_made_is_warned_of_once(
    module: Any, vllms_hashes: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (told,) = warned(module, caplog, "builtin")
    assert "LMCACHE_PRE_CACHING_HASH_ALGORITHM=sha256_cbor" in told
    assert [of_lmcache.hashes_weakly(each) for each in ("sha256", "sha256_cbor_64bit", "xxhash", "builtin")] == [
        False, False, True, True,
    ]  # fmt: skip
    monkeypatch.delitem(sys.modules, "vllm.utils.hashing")
    assert of_lmcache.hashes_weakly("sha256_cbor"), "LMCache does not find it, and takes Python's"

"""``simm engine``: the flags that it prints are those that a shell and the engine take."""

from __future__ import annotations

import importlib.util
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from simm import cli
from simm.schemes import vllm
from simm.tools import engine

MANAGER = "10.0.0.5:30001,[::1]:30002"


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["engine", *arguments]) == 0
    return capsys.readouterr().out


def flags_of(text: str) -> dict[str, str]:
    """Return what a shell makes of the lines that begin with a flag."""
    words = shlex.split(text[text.index("\n--") :].replace("\\\n", ""))
    values = {}
    for word, after in zip(words, [*words[1:], "--"]):
        if word.startswith("--"):
            values[word] = "" if after.startswith("--") else after
    return values


def extra_of(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(flags_of(text)["--hicache-storage-backend-extra-config"])
    return found


def test_sglang(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "sglang", "--manager", MANAGER)
    flags = flags_of(text)
    assert list(flags) == [
        "--enable-hierarchical-cache", "--hicache-mem-layout", "--hicache-storage-backend",
        "--hicache-storage-backend-extra-config",
    ]  # fmt: skip
    assert flags["--hicache-storage-backend"] == "dynamic"
    extra = extra_of(text)
    assert extra == {**engine.SGLANG, "manager_address": MANAGER}
    assert importlib.util.find_spec(extra["module_path"]) is not None
    source = importlib.util.find_spec(extra["module_path"]).loader.get_source(extra["module_path"])  # type: ignore[union-attr]
    assert f"class {extra['class_name']}(HiCacheStorage)" in source


def test_sglang_with_a_namespace(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "sglang", "--namespace", "it's ours")
    assert extra_of(text)["namespace"] == "it's ours"


def test_sglang_builtin_takes_one_manager_and_a_namespace(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "sglang-builtin", "--manager", "10.0.0.5:30001")
    assert extra_of(text) == {"manager_address": "10.0.0.5:30001"} and "SIMM_MANAGER" not in text
    assert flags_of(text)["--hicache-storage-backend"] == "simm" and "export SIMM_NAMESPACE=MODEL-tp1" in text
    assert "export SIMM_NAMESPACE=llama" in printed(capsys, "sglang-builtin", "--namespace", "llama")


def test_sglang_by_mooncakes_backend(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "sglang-mooncake", "--manager", "10.0.0.5:30001")
    assert "SIMM_MANAGER" not in text
    assert extra_of(text)["master_server_address"] == "10.0.0.5:30001"
    assert "# python -m simm.connectors.mooncake -- " in text and "export SIMM_NAMESPACE=MODEL" in text
    assert importlib.util.find_spec("simm.connectors.mooncake") is not None


@pytest.mark.parametrize("manager", [MANAGER, "[::1]:30002", "10.0.0.5:30001,10.0.0.6:30001"])
def test_issue_managers_that_an_engine_cannot_take_are_in_its_environment(
    capsys: pytest.CaptureFixture[str], manager: str
) -> None:
    """All but the first were dropped without a word, and the engine split an address of IPv6 at its colon."""
    builtin = printed(capsys, "sglang-builtin", "--manager", manager)
    assert extra_of(builtin) == {"manager_address": ":"}, "which leaves it to the environment"
    for text in (builtin, printed(capsys, "sglang-mooncake", "--manager", manager)):
        assert f"export SIMM_MANAGER={shlex.quote(manager)}" in text


@pytest.mark.parametrize("name", engine.ENGINES)
def test_issue_what_flags_say_is_in_the_environment(
    capsys: pytest.CaptureFixture[str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was left out of the recipe without a word, so the engine was refused or connected without TLS."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SIMM_DEADLINE_MS", "700")
    (tmp_path / "c.json").write_text('{"replicas": 2}')
    flags = ("--token-file", "t", "--path", "shm,tcp", "--tls-ca", "/ca.pem", "--checksum", "--config", "c.json")
    found = json.loads(printed(capsys, name, "--json", "--namespace", "n", *flags))["environment"]
    assert {variable: value for variable, value in found.items() if variable.startswith("SIMM_")} == {
        "SIMM_TOKEN_FILE": str(tmp_path / "t"), "SIMM_PATH": "shm,tcp", "SIMM_TLS_CA": "/ca.pem",
        "SIMM_CHECKSUM": "true", "SIMM_CONFIG": str(tmp_path / "c.json"),
        **({"SIMM_NAMESPACE": "n"} if name in ("sglang-builtin", "sglang-mooncake") else {}),
    }  # fmt: skip


def test_lmcache(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(printed(capsys, "lmcache", "--manager", MANAGER, "--namespace", "it's ours", "--json"))
    head = "remote_storage_plugin.simm."
    extra = json.loads(found["environment"]["LMCACHE_EXTRA_CONFIG"])
    assert extra == {
        f"{head}module_path": "simm.connectors.lmcache", f"{head}class_name": "SimmAdapter",
        f"{head}manager_address": MANAGER, f"{head}namespace": "it's ours",
    }  # fmt: skip
    assert found["environment"]["LMCACHE_REMOTE_STORAGE_PLUGINS"] == "simm"
    assert found["environment"]["LMCACHE_PRE_CACHING_HASH_ALGORITHM"] in vllm.ALGORITHMS, "and routers make its hashes"
    assert found["environment"]["PYTHONHASHSEED"] == "0"
    assert any("PYTHONHASHSEED stays a variable" in each for each in found["notes"]), "LMCache's file cannot have it"
    assert "LMCacheConnectorV1" in flags_of(printed(capsys, "lmcache"))["--kv-transfer-config"]


def test_lmcache_server(capsys: pytest.CaptureFixture[str]) -> None:
    flags = flags_of(printed(capsys, "lmcache-server", "--manager", MANAGER))
    adapter = json.loads(flags["--l2-adapter"])
    assert {"--l1-size-gb", "--eviction-policy"} <= set(flags), "the server does not start without"
    assert adapter == {**engine.LMCACHE_SERVER, "adapter_params": {"manager_address": MANAGER}}


def test_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "vllm", "--manager", MANAGER, "--namespace", "n")
    extra = json.loads(flags_of(text)["--kv-transfer-config"])["kv_connector_extra_config"]
    assert extra["secondary_tiers"] == [{**engine.VLLM, "manager_address": MANAGER, "namespace": "n"}]
    spec = importlib.util.find_spec(engine.VLLM["module_path"])
    assert spec is not None and spec.origin is not None
    assert f"class {engine.VLLM['type']}(SecondaryTierManager)" in Path(spec.origin).read_text()


def test_vllm_connector(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "vllm-connector", "--manager", MANAGER, "--namespace", "n")
    transfer = json.loads(flags_of(text)["--kv-transfer-config"])
    extra = {"manager_address": MANAGER, "namespace": "n"}
    assert transfer == {**engine.VLLM_CONNECTOR, "kv_connector_extra_config": extra}
    assert transfer["kv_load_failure_policy"] == "recompute"
    spec = importlib.util.find_spec(engine.VLLM_CONNECTOR["kv_connector_module_path"])
    assert spec is not None and spec.origin is not None
    assert f"class {transfer['kv_connector']}(KVConnectorBase_V1, SupportsHMA)" in Path(spec.origin).read_text()


@pytest.mark.parametrize(("found", "base"), [(engine.LMCACHE, "ConnectorAdapter"),
                                             (engine.LMCACHE_SERVER, "L2AdapterInterface")])  # fmt: skip
def test_the_classes_that_lmcache_loads_are_there(found: dict[str, str], base: str) -> None:
    spec = importlib.util.find_spec(found["module_path"])
    assert spec is not None and f"class {found['class_name']}({base})" in spec.loader.get_source(spec.name)  # type: ignore[union-attr]


@pytest.mark.parametrize("name", engine.ENGINES)
def test_json_has_the_same(capsys: pytest.CaptureFixture[str], name: str) -> None:
    found = json.loads(printed(capsys, name, "--json"))
    text = printed(capsys, name)
    for word in found["flags"]:
        assert shlex.quote(word) in text
    assert all(f"# {note}" in text for note in found["notes"])
    assert all(f"export {variable}=" in text for variable in found["environment"])


def test_another_engine_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["engine", "tgi"]) == 2
    assert "sglang" in capsys.readouterr().err

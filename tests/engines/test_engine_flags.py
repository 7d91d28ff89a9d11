"""``simm engine NAME``: the released engines' own parsers take what it prints, and make of it what is meant."""

from __future__ import annotations

from typing import Any

import pytest

from simm.tools import engine as printed
from tests.engines.engine_processes import Engine

MANAGER = "10.0.0.5:30001"

pytestmark = [pytest.mark.engines, pytest.mark.slow]


def parsed(engine: Engine, *names: str, **environment: str) -> dict[str, Any]:
    steps = [{"command": name} for name in names]
    ran = engine.run(MANAGER, 0, steps, driver="flags_driver.py", as_expected=False, **environment)
    assert list(ran.report) == list(names)
    return ran.report


def test_sglang(engine: Engine, whole_packages: str) -> None:
    report = parsed(engine, "sglang", "sglang-builtin", "sglang-mooncake", ENGINE_PACKAGES=whole_packages)
    assert all((each["cache"], each["layout"]) == (True, "page_first") for each in report.values())
    assert [each["backend"] for each in report.values()] == ["dynamic", "simm", "mooncake"]
    own, builtin, mooncake = (each["extra"] for each in report.values())
    assert own == {**printed.SGLANG, "manager_address": MANAGER} and builtin == {"manager_address": MANAGER}
    assert mooncake == {"master_server_address": MANAGER, "local_hostname": "localhost"}


def test_lmcache(lmcache: Engine) -> None:
    report = parsed(lmcache, "lmcache", "lmcache-server", LMCACHE_TRACK_USAGE="false")
    extra = {f"remote_storage_plugin.simm.{name}": value for name, value in printed.LMCACHE.items()}
    extra["remote_storage_plugin.simm.manager_address"] = MANAGER
    assert report["lmcache"]["plugins"] == ["simm"] and report["lmcache"]["extra"] == extra
    server = report["lmcache-server"]
    assert (server["module"], server["class"]) == ("simm.connectors.lmcache_server", "SimmL2Adapter")
    assert server["params"] == {"manager_address": MANAGER}


def test_vllm(vllm: Engine) -> None:
    """And vLLM's factories find the classes."""
    report = parsed(vllm, "vllm", "vllm-connector")
    tier, connector = report["vllm"], report["vllm-connector"]
    assert (tier["class"], tier["role"], tier["tiers"]) == ("OffloadingConnector", "kv_both", ["SimmTier"])
    assert tier["extra"]["secondary_tiers"] == [{**printed.VLLM, "manager_address": MANAGER}]
    assert (connector["class"], connector["role"], connector["tiers"]) == ("SimmConnector", "kv_both", [])
    assert connector["policy"] == "recompute" and connector["extra"] == {"manager_address": MANAGER}

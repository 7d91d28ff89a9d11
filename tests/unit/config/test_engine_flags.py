"""Flags of ``simm.kv``: what ``set_flag`` takes, and which manager a store then uses."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from simm.config import engine_flags
from simm.config.client_options import ClientOptions
from simm.config.engine_flags import set_flag
from simm.constants import DEFAULT_MANAGER_PORT
from simm.errors import ConfigError


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings from outside."""
    for name in [name for name in os.environ if name.startswith("SIMM_")]:
        monkeypatch.delenv(name)


def manager() -> str:
    return ClientOptions.from_settings(engine_flags.load(3)).manager


@pytest.mark.parametrize(
    ("name", "value", "good"),
    [("cm_primary_node_ip", "10.0.0.1", True), ("cm_primary_node_ip", "manager.simm.svc", True),
     ("cm_primary_node_ip", "::1", True), ("cm_primary_node_ip", "[::1]", True), ("cm_primary_node_ip", "", True),
     ("cm_primary_node_ip", "10.0.0.1:30001", True), ("cm_primary_node_ip", "[::1]:31001", True),
     ("cm_primary_node_ip", "a:1,[::1]:2, ::1,c", True), ("cm_primary_node_ip", "a b", False),
     ("cm_primary_node_ip", "[", False), ("cm_primary_node_ip", "[::1", False), ("cm_primary_node_ip", ",", False),
     ("cm_primary_node_ip", "a:0", False), ("cm_primary_node_ip", "a,b c", False), ("cm_primary_node_ip", None, False),
     ("cm_primary_node_ip", "tcp://a:1", False), ("cm_primary_node_port", "9400", True),
     ("cm_primary_node_port", "1,b", False), ("cm_primary_node_port", "", True), ("cm_rpc_inter_port", "30001", True),
     ("cm_rpc_inter_port", "0", False), ("cm_rpc_inter_port", "65536", False), ("cm_rpc_inter_port", "port", False),
     ("cm_rpc_inter_port", 30001, True), ("clnt_log_file", "/x/y.log", True), ("clnt_log_file", None, False),
     ("clnt_log_file", "", True), ("clnt_log_file", "~nobody-has-this-name/y.log", False),
     ("clnt_thread_pool_size", "10", True), ("clnt_thread_pool_size", "-1", False),
     ("clnt_sync_req_timeout_ms", "500", True), ("clnt_sync_req_timeout_ms", "0", False),
     ("clnt_async_req_timeout_ms", "1000", True), ("clnt_syncreq_enable_retry", "true", True),
     ("clnt_syncreq_enable_retry", "maybe", False), ("clnt_syncreq_retry_count", "3", True),
     ("clnt_use_k8s", "false", True), ("clnt_use_k8s", "False", True), ("clnt_use_k8s", True, True),
     ("clnt_put_if_absent", "true", True), ("clnt_put_if_absent", "perhaps", False),
     ("clnt_unheard_of", "1", False), ("", "", False), (None, "1", False), ("cm_rpc_inter_port", None, False),
     ([], {}, False)],
    ids=repr,
)  # fmt: skip
def test_set_flag_answers_whether_it_took(name: Any, value: Any, good: bool, caplog: pytest.LogCaptureFixture) -> None:
    assert set_flag(name, value) is good
    assert bool(caplog.records) is not good


def test_every_flag_has_a_word_of_help_and_every_alias_a_flag() -> None:
    assert all(flag.help for flag in engine_flags.FLAGS.values())
    assert set(engine_flags.ALIASES.values()) <= set(engine_flags.FLAGS)


LIST = {"SIMM_MANAGER": "10.0.0.2:5,10.0.0.3:5,[::1]:6"}
MANAGER_CASES: list[tuple[dict[str, str], dict[str, str], str]] = [
    ({}, {}, f"127.0.0.1:{DEFAULT_MANAGER_PORT}"),
    ({"cm_primary_node_ip": "10.0.0.1"}, {}, f"10.0.0.1:{DEFAULT_MANAGER_PORT}"),
    ({"cm_primary_node_ip": "10.0.0.1", "cm_primary_node_port": "9400"}, {}, "10.0.0.1:9400"),
    ({"cm_primary_node_ip": "10.0.0.1", "cm_rpc_inter_port": "9401"}, {}, "10.0.0.1:9401"),
    ({"cm_primary_node_ip": "::1", "cm_rpc_inter_port": "9401"}, {}, "[::1]:9401"),
    ({"cm_primary_node_ip": "[::1]:31001"}, {}, "[::1]:31001"),
    ({"cm_primary_node_ip": "[::1]:31001", "cm_rpc_inter_port": "31001"}, {}, "[::1]:31001"),
    ({"cm_primary_node_ip": "a,b:2,::1"}, {}, f"a:{DEFAULT_MANAGER_PORT},b:2,[::1]:{DEFAULT_MANAGER_PORT}"),
    ({"cm_primary_node_ip": "a,b:2,::1", "cm_rpc_inter_port": "2"}, {}, "a:2,b:2,[::1]:2"),
    ({"cm_rpc_inter_port": "9402"}, {}, "127.0.0.1:9402"),
    ({}, {"SIMM_CLUSTER_MANAGER": "10.0.0.2:5"}, "10.0.0.2:5"),
    ({"cm_rpc_inter_port": "9402"}, {"SIMM_CLUSTER_MANAGER": "10.0.0.2:5"}, "10.0.0.2:5"),
    ({"cm_primary_node_ip": "10.0.0.1"}, {"SIMM_CLUSTER_MANAGER": "10.0.0.2:5"}, f"10.0.0.1:{DEFAULT_MANAGER_PORT}"),
    ({"cm_primary_node_ip": "10.0.0.1", "clnt_use_k8s": "true"}, {}, f"10.0.0.1:{DEFAULT_MANAGER_PORT}"),
    ({"cm_primary_node_ip": ""}, {"SIMM_CLUSTER_MANAGER": "10.0.0.2:5"}, "10.0.0.2:5"),
    # One of the settings' managers stands for all of them.
    ({"cm_primary_node_ip": "10.0.0.3", "cm_primary_node_port": "5"}, LIST, LIST["SIMM_MANAGER"]),
    ({"cm_primary_node_ip": "10.0.0.3"}, LIST, LIST["SIMM_MANAGER"]),
    ({"cm_primary_node_ip": "[::1]:6,10.0.0.2:5"}, LIST, LIST["SIMM_MANAGER"]),
    ({"cm_primary_node_ip": "10.0.0.3", "cm_primary_node_port": "7"}, LIST, "10.0.0.3:7"),
    ({"cm_primary_node_ip": "10.0.0.3:5,10.0.0.4:5"}, LIST, "10.0.0.3:5,10.0.0.4:5"),
    # As SGLang splits ":", which leaves it to the settings.
    ({"cm_primary_node_ip": "", "cm_primary_node_port": ""}, LIST, LIST["SIMM_MANAGER"]),
]


@pytest.mark.parametrize(("flags", "environment", "wanted"), MANAGER_CASES)
def test_which_manager_it_is(
    flags: dict[str, str], environment: dict[str, str], wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for name, value in flags.items():
        assert set_flag(name, value)
    assert manager() == wanted


@pytest.mark.parametrize("name", ["cm_primary_node_ip", "cm_primary_node_port", "cm_rpc_inter_port"])
def test_a_refused_address_is_never_ignored(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where the environment names a manager: it may be another cluster's."""
    monkeypatch.setenv("SIMM_MANAGER", "10.0.0.2:5")
    assert set_flag("cm_primary_node_ip", "10.0.0.1")
    assert not set_flag(name, "[")
    for _ in range(2):
        with pytest.raises(ConfigError, match=rf"set_flag\('{name}', '\['\) was refused: .*SIMM_MANAGER"):
            manager()
    assert set_flag(name, "")
    assert manager() == ("10.0.0.2:5" if name == "cm_primary_node_ip" else f"10.0.0.1:{DEFAULT_MANAGER_PORT}")


def test_other_refused_flags_change_nothing() -> None:
    assert set_flag("clnt_sync_req_timeout_ms", "700")
    assert not set_flag("clnt_sync_req_timeout_ms", "-1")
    assert engine_flags.load(3).deadline_ms == 700


def test_puts_of_what_is_absent_are_an_option_of_the_client() -> None:
    assert not ClientOptions.from_settings(engine_flags.load(3)).put_if_absent
    for text, on in (("true", True), ("false", False)):
        assert set_flag("clnt_put_if_absent", text)
        assert ClientOptions.from_settings(engine_flags.load(3)).put_if_absent is on


def test_the_log_file() -> None:
    for given, wanted in ((" ~/y.log ", Path.home() / "y.log"), ("", None)):
        assert set_flag("clnt_log_file", given)
        assert engine_flags.load(3).log_file == wanted


def test_two_ports_for_one_address() -> None:
    assert set_flag("cm_primary_node_ip", "a:1")
    assert set_flag("cm_primary_node_port", "2")
    with pytest.raises(ConfigError, match="leave the port out"):
        manager()

"""Settings: parsers, the four sources and their order, origins, and errors that name the source and a remedy."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simm.config import settings as config_settings
from simm.config.parsers import Address, parse_address, parse_addresses, parse_bytes, parse_duration
from simm.config.settings import (
    COMMANDS,
    SERVER,
    SETTINGS,
    Settings,
    add_arguments,
    format_value,
    load,
    load_command,
)
from simm.config.startup import ensure_runtime_dir, read_tokens
from simm.errors import ConfigError
from tests.support.acl import USER, acls_of, named, set_acl


def write(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


# --- parsers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0), ("17", 17), (17, 17), ("8G", 8 << 30), ("8g", 8 << 30), ("512MiB", 512 << 20), ("512MB", 512 << 20),
        ("3k", 3072), ("1T", 1 << 40), ("1.5G", 3 << 29), (" 4 K ", 4096), ("10B", 10),
    ],
)  # fmt: skip
def test_parse_bytes(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", "G", "-1", "1P", "8 gigs", "0x10", "1e9", "1.5", "1,5G", "8GG", -1, True, 1.5, None]
    + ["9" * 400 + ".0T", "9" * 5000],
)  # fmt: skip
def test_parse_bytes_refuses(text: Any) -> None:
    with pytest.raises(ConfigError):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:30001", ("127.0.0.1", 30001)), ("[::1]:5", ("::1", 5)), ("[fe80::1%eth0]:5", ("fe80::1%eth0", 5)),
        ("[::1]", ("::1", 9)), ("node-3.example", ("node-3.example", 9)), (" h:0 ", ("h", 0)),
        ("h:65535", ("h", 65535)),
    ],
)  # fmt: skip
def test_parse_address(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text, 9) == address


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no host"), (":5", "0.0.0.0"), ("::1", "brackets"), ("[::1", "IPv6"), ("[::1]5", "IPv6"),
        ("h:", "no port"),
        ("[h]:5", "no IP"), ("h:65536", "no port"), ("h:-1", "no port"), ("h:٣", "no port"), ("http://h:5", "URL"),
        ("a b:5", "no host name"), ("h/x:5", "no host name"),
    ],
)  # fmt: skip
def test_parse_address_refuses(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_address(text, 9)


def test_a_port_is_needed_where_there_is_no_default() -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        parse_address("localhost")


def test_several_addresses_each_once() -> None:
    assert parse_addresses("a:1, b:2,a:1,", 9) == (("a", 1), ("b", 2))
    with pytest.raises(ConfigError):
        parse_addresses(" , ", 9)


@given(st.sampled_from(["10.0.0.1", "h", "::1", "fe80::2"]), st.integers(0, 65535))
def test_an_address_reads_back(host: str, port: int) -> None:
    assert parse_address(str(Address(host, port))) == (host, port)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False),
     ("10.0.0.1", False), ("localhost.evil", False), ("fe80::1%lo", False)],
)  # fmt: skip
def test_loopback(host: str, loopback: bool) -> None:
    assert Address(host, 1).loopback is loopback


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("250ms", 0.25), ("5s", 5.0), ("50us", 50e-6), ("2m", 120.0), ("2min", 120.0), ("1h", 3600.0), ("1.5s", 1.5),
        ("0s", 0.0),
    ],
)  # fmt: skip
def test_parse_duration(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


def test_a_bare_number_needs_the_callers_unit() -> None:
    assert parse_duration("250", "ms") == 0.25
    assert parse_duration(250, "ms") == 0.25
    assert parse_duration("1s", "ms") == 1.0
    with pytest.raises(ConfigError, match="5s or 5ms"):
        parse_duration("5")


@pytest.mark.parametrize(
    "text", ["", "ms", "-1s", "5 parsecs", "1e3s", "nan", "inf", True, None, [], float("nan"), float("inf")]
)
def test_parse_duration_refuses(text: Any) -> None:
    with pytest.raises(ConfigError):
        parse_duration(text, "s")


@given(st.integers(0, 10**9))
def test_whole_milliseconds_stay_whole(ms: int) -> None:
    assert load("manager", {"grace_ms": f"{ms}ms"}, {}).grace_ms == ms
    assert load("manager", {"grace_ms": str(ms)}, {}).grace_ms == ms


# --- sources ----------------------------------------------------------------------------------


def test_defaults() -> None:
    settings = load("dataserver", {}, {"XDG_RUNTIME_DIR": "/run/user/7"})
    assert settings.manager == (("127.0.0.1", 30001),)
    assert settings.listen == ("127.0.0.1", 0)
    assert settings.memory is None and settings.http is None and settings.warm is False
    assert settings.runtime_dir == Path("/run/user/7/simm")
    assert settings.origin("runtime_dir") == "environment XDG_RUNTIME_DIR"
    assert settings.name and settings.origin("name") == "default (host name)"
    assert load("manager", {}, {}).listen == ("127.0.0.1", 30001)
    assert load("manager", {}, {}).runtime_dir == Path(f"/tmp/simm-{os.getuid()}")
    assert Settings(poll_us=0).poll_us == 0


def test_each_source_overrides_the_next(tmp_path: Path) -> None:
    file = write(tmp_path / "simm.json", {"poll_us": 3, "streams": 4, "slots": "5", "slow-ms": "1s"})
    env = {"SIMM_POLL_US": "2", "SIMM_STREAMS": "8"}
    settings = load("dataserver", {"poll_us": "1"}, env, file)
    assert (settings.poll_us, settings.streams, settings.slots, settings.slow_ms) == (1, 8, 5, 1000)
    assert settings.origin("poll_us") == "--poll-us"
    assert settings.origin("streams") == "environment SIMM_STREAMS"
    assert settings.origin("slots") == f"file {file}"
    assert settings.origin("policy") == "default"


def test_the_environment_may_name_the_file(tmp_path: Path) -> None:
    file = write(tmp_path / "simm.json", {"streams": 4})
    assert load("dataserver", {}, {"SIMM_CONFIG": str(file)}).streams == 4
    other = write(tmp_path / "other.json", {"streams": 5})
    assert load("dataserver", {}, {"SIMM_CONFIG": str(file)}, other).streams == 5


def test_a_commands_own_table_wins_for_it_alone(tmp_path: Path) -> None:
    file = write(tmp_path / "simm.json", {"listen": "0.0.0.0:5", "dataserver": {"listen": "0.0.0.0:6", "warm": True}})
    server = load("dataserver", {}, {}, file)
    assert server.listen == ("0.0.0.0", 6) and server.warm
    assert server.origin("listen") == f"file {file} [dataserver]"
    assert load("manager", {}, {}, file).listen == ("0.0.0.0", 5)


@pytest.mark.parametrize(
    ("name", "value"), [("allow_uid", "no-such-user"), ("name", "no name"), ("heartbeat_ms", 5), ("memory", "1K")]
)
def test_issue_what_another_command_s_setting_is_in_the_file_stops_none(
    tmp_path: Path, name: str, value: str | int
) -> None:
    """An engine's container has no user of the servers, and a client no heartbeat. Names are checked all the same."""
    file = write(tmp_path / "simm.json", {name: value, "deadline_ms": 7})
    client, plain = load("client", {}, {}, file), load("client", {}, {})
    assert client.deadline_ms == 7 and getattr(client, name) == getattr(plain, name)
    assert client.origin(name) == plain.origin(name)
    with pytest.raises(ConfigError, match=rf"{name} \(from file"):
        load("manager" if name in ("allow_uid", "heartbeat_ms") else "dataserver", {}, {}, file)
    with pytest.raises(ConfigError, match="unknown setting"):
        load("client", {}, {}, write(tmp_path / "typo.json", {name + "x": value}))


def test_managers_as_text_or_list(tmp_path: Path) -> None:
    file = write(tmp_path / "simm.json", {"manager": ["a:1", "b"]})
    assert load("client", {}, {}, file).manager == (("a", 1), ("b", 30001))
    assert load("client", {}, {"SIMM_MANAGER": "c:3,d:4"}, file).manager == (("c", 3), ("d", 4))


def test_upstreams_variable_names_the_manager_but_ours_wins() -> None:
    env = {"SIMM_CLUSTER_MANAGER": "up:1"}
    settings = load("client", {}, env)
    assert settings.manager == (("up", 1),) and settings.origin("manager") == "environment SIMM_CLUSTER_MANAGER"
    assert load("client", {}, {**env, "SIMM_MANAGER": "own:2"}).manager == (("own", 2),)


def test_pod_name() -> None:
    settings = load("dataserver", {}, {"POD_NAME": "simm-0"})
    assert settings.name == "simm-0" and settings.origin("name") == "environment POD_NAME"
    assert load("dataserver", {"name": "x"}, {"POD_NAME": "simm-0"}).name == "x"


@pytest.mark.parametrize("pod", ["ns/pod", "a" * 150])
def test_a_pod_s_name_that_no_data_server_can_have_stops_data_servers_only(pod: str) -> None:
    for command, roles in COMMANDS.items():
        if SERVER in roles:
            with pytest.raises(ConfigError, match="is no name of a data server"):
                load(command, {}, {"POD_NAME": pod})
        else:
            assert load(command, {}, {"POD_NAME": pod}).origin("name") == "default (host name)"


def test_an_address_to_listen_on_without_a_port() -> None:
    """`--manager HOST` means a manager's usual port, so `simm manager --listen HOST` must listen there."""
    for command, port in (("manager", 30001), ("local", 30001), ("dataserver", 0)):
        for written, host in (("10.0.0.5", "10.0.0.5"), ("[::1]", "::1")):
            assert load(command, {"listen": written}, {}).listen == (host, port)
            assert load(command, {}, {"SIMM_LISTEN": written}).listen == (host, port)
            assert load(command, {"listen": f"{written}:0"}, {}).listen == (host, 0)
            assert load(command, {"listen": f"{written}:7"}, {}).listen == (host, 7)
        with pytest.raises(ConfigError, match="names no port"):
            load(command, {"http": "10.0.0.5"}, {})
    # `simm config show` without a command.
    assert load("config", {}, {"SIMM_LISTEN": "0.0.0.0"}).listen == ("0.0.0.0", 30001)
    assert load("config", {}, {}).listen == load("manager", {}, {}).listen == ("127.0.0.1", 30001)


def test_finished_values_pass_as_they_are() -> None:
    settings = load("manager", {"listen": Address("h", 1), "state_dir": Path("/s"), "insecure": True}, {})
    assert settings.listen == ("h", 1) and settings.state_dir == Path("/s") and settings.insecure is True


def test_rows_read_back_to_the_same_settings() -> None:
    settings = load("dataserver", {"manager": "a:1,[::1]:2", "memory": "1G", "warm": "yes", "poll_us": "1ms"}, {})
    again = load("dataserver", {name: value for name, value, _ in settings.rows()}, {})
    assert again == settings
    assert [name for name, _, _ in settings.rows()] == list(SETTINGS)
    assert format_value(True) == "true" and format_value(None) == ""


def test_toml(tmp_path: Path) -> None:
    pytest.importorskip("tomllib", reason="this Python has no tomllib")
    file = write(tmp_path / "simm.toml", 'memory = "2G"\nwarm = true\n[manager]\nheartbeat_ms = 200\n')
    assert load("dataserver", {}, {}, file).memory == 2 << 30
    assert load("dataserver", {}, {}, file).heartbeat_ms == 1000
    assert load("manager", {}, {}, file).heartbeat_ms == 200
    with pytest.raises(ConfigError, match="not valid TOML"):
        load("manager", {}, {}, write(tmp_path / "bad.toml", "memory = "))


@pytest.mark.parametrize("value", ["2026-01-02", "07:32:00", "2026-01-02T07:32:00Z"])
@pytest.mark.parametrize("table", ["", "[manager]"])
def test_issue_a_date_is_no_value_of_a_setting(tmp_path: Path, value: str, table: str) -> None:
    """It was taken as it is, by commands of another table too."""
    pytest.importorskip("tomllib", reason="this Python has no tomllib")
    file = write(tmp_path / "simm.toml", f"warm = true\n{table}\ngrace_ms = {value}\n")
    with pytest.raises(ConfigError, match=r"grace_ms in .*simm.toml.* is a date or a time.*in quotes"):
        load("dataserver", {}, {}, file)


def test_toml_without_tomllib_names_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tomllib", None)
    with pytest.raises(ConfigError, match="JSON"):
        load("manager", {}, {}, write(tmp_path / "simm.toml", ""))


# --- errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "env", "says"),
    [
        ({"memroy": "1G"}, {}, "'memory'"),
        ({"runtime_dir": "~nobody-has-this-name/x"}, {}, r"runtime_dir \(from --runtime-dir\): '~nobody.*no such user"),
        ({}, {"SIMM_TOKEN_FILE": "~nobody-has-this-name/x"}, r"token_file \(from environment .*no such user's folder"),
        ({"memory": "lots"}, {}, r"memory \(from --memory\).*8G"),
        ({}, {"SIMM_WARM": "perhaps"}, r"warm \(from environment SIMM_WARM\).*true nor false"),
        ({"policy": "seive"}, {}, "did you mean 'sieve'"),
        ({"near_share": "51"}, {}, r"near_share \(from --near-share\).*from 0 to 50"),
        ({"keep_share": "91"}, {}, r"keep_share \(from --keep-share\).*from 0 to 90"),
        ({}, {"SIMM_KEEP_NAMESPACE_SHARE": "half"}, "SIMM_KEEP_NAMESPACE_SHARE.*from 0 to 90"),
        ({"streams": "-1"}, {}, "from 0 to 256"),
        ({"streams": 1.0}, {}, "from 0 to 256"),
        ({"workers": "0"}, {}, "from 1 to 64"),
        ({}, {"SIMM_WORKERS": "2.5"}, r"workers \(from environment SIMM_WORKERS\)"),
        ({"name": "a b"}, {}, "is no name of a data server"),
        ({"namespace": "n" * 65}, {}, "64 bytes"),
        ({"namespace": "\udcff"}, {}, r"namespace \(from --namespace\): .* is not UTF-8"),
        ({"name": "\udcff"}, {}, "is no name of a data server"),
        ({"poll_us": "1.5us"}, {}, "whole number of us"),
        ({"heartbeat_ms": "9"}, {}, "from 10 to 60000"),
        ({"dead_after": "3"}, {}, r"dead_after \(3, --dead-after\) must be larger than suspect_after \(3, default\)"),
        ({"path": ["udp"]}, {}, "some of shm, rdma, tcp"),
        ({"trace": "1%"}, {}, r"trace \(from --trace\): '1%' is no share of the calls"),
        ({"trace": True}, {}, "from 0 to 1"),
        ({"slow_ms": "-1"}, {}, "slow_ms"),
        ({}, {"POD_NAME": "a b"}, "is no name of a data server"),
        ({"allow_uid": "0,no-such-user"}, {}, r"allow_uid \(from --allow-uid\): 'no-such-user' is no user"),
        ({}, {"SIMM_SERVER_UID": "4294967295"}, "SIMM_SERVER_UID.*is no user"),
        ({"allow_uid": [True]}, {}, "is no user"),
        ({"allow_uid": 1.5}, {}, "must be text"),
    ],
)  # fmt: skip
def test_a_bad_value_names_its_source(argv: dict[str, Any], env: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load("dataserver", argv, env)


@pytest.mark.parametrize("command", ["dataserver", "manager", "client"])
def test_an_unknown_variable_is_a_warning(
    command: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(config_settings, "_warned", set())
    env = {"SIMM_MEMROY": "1G", "SIMM_HOME": "/opt", "SIMM_VERSION": "1", "SIMM_SERVICE_HOST": "10.0.0.1"}
    for _ in range(2):
        assert load(command, {}, env).memory is None
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3, "once each, and none for what Kubernetes sets"
    assert said[0] == "ignoring the environment variable SIMM_MEMROY: the nearest setting is SIMM_MEMORY"


def test_a_variable_of_another_command_does_not_matter() -> None:
    env = {"SIMM_MEMORY": "lots", "SIMM_NAME": "a b", "SIMM_NAMESPACE": "mine"}
    assert load("client", {}, env).namespace == "mine"
    assert load("client", {}, env).memory is None
    with pytest.raises(ConfigError, match="SIMM_MEMORY"):
        load("dataserver", {}, env)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"memroy": "1G"}, "simm.json:.*'memroy'.*'memory'"),
        ({"manager": {"heartbeat": 1}}, r"\[manager\].*'heartbeat'.*'heartbeat_ms'"),
        ({"managr": {"heartbeat_ms": 1}}, "table in .*'managr'.*'manager'"),
        ({"memory": True}, r"memory \(from file .*simm.json\)"),
        ({"warm": 1}, "warm"),
        ({"numa": 0}, "must be text"),
        ('{"warm": true, "warm": false}', "twice"),
        ("[1]", "one JSON object"),
        ("warm = true", "not valid JSON.*must end in .toml"),
        ("[" * 100_000, "not valid JSON"),
    ],
)  # fmt: skip
def test_a_bad_file_names_the_place(tmp_path: Path, content: Any, says: str) -> None:
    file = write(tmp_path / "simm.json", content)
    with pytest.raises(ConfigError, match=says):
        load("dataserver", {}, {}, file)


def test_an_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load("manager", {}, {}, tmp_path / "none.json")
    with pytest.raises(ConfigError, match="cannot read"):
        load("manager", {}, {}, tmp_path)
    (tmp_path / "latin.json").write_bytes(b'{"name": "\xe9"}')
    with pytest.raises(ConfigError, match="not UTF-8"):
        load("manager", {}, {}, tmp_path / "latin.json")


def test_what_kubernetes_and_our_scripts_plant_is_ignored() -> None:
    env = {
        "SIMM_SERVICE_HOST": "10.0.0.1", "SIMM_SERVICE_PORT": "30001", "SIMM_PORT": "tcp://10.0.0.1:30001",
        "SIMM_PORT_30001_TCP": "x", "SIMM_PORT_30001_TCP_ADDR": "x", "SIMM_MANAGER_SERVICE_HOST": "x",
        "SIMM_MANAGER_SERVICE_PORT_RPC": "x", "SIMM_MANAGER_PORT": "tcp://x",
        "SIMM_MANAGER_PORT_30001_TCP_PROTO": "tcp",
        "SIMM_ENGINES": "0", "SIMM_ENGINE_ENV": "/x", "OTHER": "1",
    }  # fmt: skip
    assert load("client", {}, env).manager == Settings().manager


def test_an_unknown_command() -> None:
    with pytest.raises(ConfigError, match="'manager'"):
        load("manger", {}, {})


# --- command lines ----------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_flags_of_every_command_parse_and_show_help(command: str) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser, command)
    assert "--config" in parser.format_help()
    assert load_command(command, parser.parse_args([]), {}) == load(command, {}, {})


def test_flags_reach_the_settings(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("keys", nargs="*")
    add_arguments(parser, "dataserver")
    file = write(tmp_path / "f.json", {"streams": 2})
    line = ["--memory", "1G", "--no-huge-pages", "--warm", "--poll-us", "0", "--config", str(file), "key"]
    settings = load_command("dataserver", parser.parse_args(line), {"SIMM_HUGE_PAGES": "1"})
    assert (settings.memory, settings.huge_pages, settings.warm, settings.poll_us, settings.streams) == (
        1 << 30, False, True, 0, 2,
    )  # fmt: skip
    assert settings.origin("huge_pages") == "--huge-pages"
    assert load_command("dataserver", parser.parse_args(line), {}, poll_us=7).poll_us == 7


def test_a_command_has_only_its_own_flags() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser, "manager")
    with pytest.raises(SystemExit):
        parser.parse_args(["--memory", "1G"])


def test_every_field_is_a_setting_with_help_and_a_role() -> None:
    assert {field.name for field in dataclasses.fields(Settings)} == {*SETTINGS, "origins"}
    for setting in SETTINGS.values():
        assert setting.help and setting.roles and (setting.metavar or setting.is_switch)
        assert set(setting.roles) <= {config_settings.MANAGER, config_settings.SERVER, config_settings.CLIENT}


# --- the runtime folder -----------------------------------------------------------------------


def test_the_runtime_folder_is_ours_alone(tmp_path: Path) -> None:
    path = ensure_runtime_dir(tmp_path / "a" / "simm")
    assert path.stat().st_mode & 0o7777 == 0o700
    path.chmod(0o777)
    assert ensure_runtime_dir(path).stat().st_mode & 0o7777 == 0o700
    assert ensure_runtime_dir(path, os.getgid()).stat().st_mode & 0o7777 == 0o710


def test_a_planted_runtime_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="links are not followed"):
        ensure_runtime_dir(tmp_path / "link")
    write(tmp_path / "file", "")
    with pytest.raises(ConfigError, match="not a folder"):
        ensure_runtime_dir(tmp_path / "file")
    with pytest.raises(ConfigError, match="--runtime-dir"):
        ensure_runtime_dir(tmp_path / "file" / "below")
    ours = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: ours + 1)
    with pytest.raises(ConfigError, match=f"belongs to uid {ours}"):
        ensure_runtime_dir(tmp_path)


def test_a_secret_is_for_its_owner_and_group(tmp_path: Path) -> None:
    """fsGroup makes a Secret's files readable for a group. Nobody else may read one, and no group may write one."""
    path = tmp_path / "token"
    path.write_text("a-token-of-enough-bytes")
    for mode in range(0o1000):
        path.chmod(mode | 0o400)
        if mode & 0o027:
            with pytest.raises(ConfigError, match=r"may be read by all users, or written by its group: chmod 600"):
                read_tokens(path)
        else:
            assert [token.secret for token in read_tokens(path)] == ["a-token-of-enough-bytes"]


def test_issue_the_mode_of_the_runtime_folder_says_all(tmp_path: Path) -> None:
    """Sockets in it are for a group, and with an ACL of the folder's they would be for whom it names as well."""
    folder = tmp_path / "run"
    folder.mkdir()
    for gid in (None, os.getegid()):
        set_acl(folder, named((USER, 7, 4711)))
        set_acl(folder, named((USER, 7, 4711)), "default")
        ensure_runtime_dir(folder, gid)
        assert acls_of(folder) == [] and folder.stat().st_mode & 0o777 == (0o700 if gid is None else 0o710)


def test_brackets_hold_an_address_of_either_family() -> None:
    assert parse_address("[10.0.0.7]:5") == Address("10.0.0.7", 5)
    assert parse_address("[fd00::7]:5") == Address("fd00::7", 5)
    with pytest.raises(ConfigError, match=r"no IP address \(brackets"):
        parse_address("[a-host]:5")

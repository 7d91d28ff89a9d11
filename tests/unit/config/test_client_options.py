"""One source of settings for clients: arguments win over the environment, the file and the defaults."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from simm.config.client_options import ClientOptions
from simm.config.parsers import TlsOptions
from simm.config.settings import Settings, load
from simm.errors import ConfigError, SimmError, UsageError
from simm.testing import FakeClient

TOKEN = "a-token-of-some-length"

#: Option -> (variable, its text, the option's value, another value as argument).
SOURCES: dict[str, tuple[str, str, Any, Any]] = {
    "manager": ("SIMM_MANAGER", "a:1,b:2", "a:1,b:2", "c:3"),
    "namespace": ("SIMM_NAMESPACE", "ns", "ns", "other"),
    "path": ("SIMM_PATH", "tcp", "tcp", "shm"),
    "deadline_s": ("SIMM_DEADLINE_MS", "700ms", 0.7, 4.0),
    "checksum": ("SIMM_CHECKSUM", "yes", True, False),
    "copy_threads": ("SIMM_COPY_THREADS", "3", 3, 0),
    "tcp_streams": ("SIMM_TCP_STREAMS", "2", 2, 8),
    "token": ("SIMM_TOKEN_FILE", "FILE", TOKEN, ""),
    "replicas": ("SIMM_REPLICAS", "2", 2, 1),
    "tls_ca": ("SIMM_TLS_CA", "/ca.pem", "/ca.pem", ""),
    "rdma_devices": ("SIMM_RDMA_DEVICES", "mlx5_0", "mlx5_0", ""),
    "put_if_absent": ("SIMM_PUT_IF_ABSENT", "yes", True, False),
    "trace": ("SIMM_TRACE", "1e-2", "0.01", "off"),
    "slow_ms": ("SIMM_SLOW_MS", "1s", 1000, 0),
    "trace_dir": ("SIMM_TRACE_DIR", "/traces", "/traces", "/elsewhere"),
    "near_copies": ("SIMM_NEAR_COPIES", "yes", True, False),
    "server_uids": ("SIMM_SERVER_UID", "1001,root", (1001, 0), ()),
}


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    path.chmod(0o600)
    return path


@pytest.fixture(params=SOURCES)
def source(request: pytest.FixtureRequest, token_file: Path) -> tuple[str, str, str, Any, Any]:
    name = str(request.param)
    variable, text, value, other = SOURCES[name]
    return name, variable, str(token_file) if text == "FILE" else text, value, other


def test_every_option_that_is_a_setting_is_in_the_table() -> None:
    others = {"ring", "lazy", "tls_cert", "tls_key", "tls_name"}  # the last three: see below
    assert SOURCES.keys() == {each.name for each in dataclasses.fields(ClientOptions)} - others


def test_without_any_setting_both_have_the_same_defaults() -> None:
    assert ClientOptions.resolve() == ClientOptions() == ClientOptions.from_settings(Settings())


def test_the_environment_counts(source: tuple[str, str, str, Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    name, variable, text, value, _ = source
    monkeypatch.setenv(variable, text)
    assert ClientOptions.resolve() == dataclasses.replace(ClientOptions(), **{name: value})
    # The simm command and simm.kv build theirs in this way.
    assert ClientOptions.from_settings(load("client")) == ClientOptions.resolve()


def test_the_file_counts_where_the_environment_is_silent(
    source: tuple[str, str, str, Any, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name, variable, text, value, _ = source
    file = tmp_path / "simm.json"
    file.write_text(json.dumps({variable.removeprefix("SIMM_").lower(): text, "client": {"poll_us": 1}}))
    monkeypatch.setenv("SIMM_CONFIG", str(file))
    assert ClientOptions.resolve() == dataclasses.replace(ClientOptions(), **{name: value})


def test_an_argument_wins(source: tuple[str, str, str, Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    name, variable, text, _, other = source
    monkeypatch.setenv(variable, text)
    assert getattr(ClientOptions.resolve(**{name: other}), name) == other


def test_a_client_takes_them(source: tuple[str, str, str, Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    name, variable, text, value, other = source
    monkeypatch.setenv(variable, text)
    with FakeClient() as one, FakeClient(**{name: other}) as two:
        assert getattr(one._options, name) == value
        assert getattr(two._options, name) == other
        assert (one.namespace, one.deadline_s, one.checksum) == (
            one._options.namespace, one._options.deadline_s, one._options.checksum,
        )  # fmt: skip


def test_a_token_given_leaves_the_file_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SIMM_TOKEN_FILE", str(tmp_path / "missing"))
    assert ClientOptions.resolve(token="").token == ""
    with pytest.raises(ConfigError, match="cannot read the token file"):
        ClientOptions.resolve()


def test_with_everything_given_no_setting_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pickled client stays what it was, whatever the environment of the process is where it arrives."""
    monkeypatch.setenv("SIMM_DEADLINE_MS", "wrong")
    assert ClientOptions.resolve(**dataclasses.asdict(ClientOptions(token=TOKEN))).token == TOKEN
    with pytest.raises(ConfigError, match="SIMM_DEADLINE_MS"):
        ClientOptions.resolve(manager="a:1")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"manager": 30001}, "manager is text, as 127.0.0.1:30001, not 30001"),
        ({"manager": ("127.0.0.1", 30001)}, "manager is text"),
        ({"manager": ""}, "no address given"),
        ({"namespace": 7}, "namespace is text, not 7"),
        ({"path": "udp"}, "path: "),
        ({"deadline_s": 0}, "above 0"),
        ({"deadline_s": -1.0}, "above 0"),
        ({"deadline_s": math.inf}, "3600 at most, not inf"),
        ({"deadline_s": math.nan}, "not nan"),
        ({"deadline_s": 1e9}, "3600 at most"),
        ({"deadline_s": "2"}, "deadline_s is a number of seconds"),
        ({"deadline_s": True}, "deadline_s is a number of seconds"),
        ({"checksum": 1}, "checksum is True or False"),
        ({"copy_threads": -1}, "copy_threads is a whole number from 0 to 256, not -1"),
        ({"copy_threads": 1000}, "from 0 to 256"),
        ({"copy_threads": 1.5}, "from 0 to 256"),
        ({"tcp_streams": 0}, "tcp_streams is a whole number from 1 to 8, not 0"),
        ({"tcp_streams": 9}, "from 1 to 8"),
        ({"tcp_streams": True}, "from 1 to 8"),
        ({"token": b"secret-secret-secret"}, "token is text"),
        ({"token": "secret-secret-secret\ud800"}, "token is text"),
        ({"replicas": 3}, "replicas is 1 or 2, not 3"),
        ({"replicas": "2"}, "replicas is 1 or 2"),
        ({"rdma_devices": ["mlx5_0"]}, "rdma_devices is text"),
        ({"lazy": "no"}, "lazy is True or False"),
        ({"ring": 0}, "ring is True or False"),
        ({"server_uids": 7}, "server_uids is a list of users' numbers, not 7"),
        ({"server_uids": ["root"]}, "server_uids is a list"),
        ({"server_uids": [-1]}, "server_uids is a list"),
    ],
)
def test_a_wrong_argument_is_the_callers_mistake(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        FakeClient(**wrong)
    assert isinstance(caught.value, SimmError)
    assert "secret" not in str(caught.value)
    assert isinstance(caught.value, UsageError) or wrong == {"manager": ""}


def test_files_for_tls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They are absolute, so that a program may change its folder, and half a set is refused."""
    monkeypatch.chdir(tmp_path)
    for name in ("ca", "cert", "key"):
        monkeypatch.setenv(f"SIMM_TLS_{name.upper()}", f"{name}.pem")
    options = ClientOptions.resolve(tls_name="simm")
    assert options == ClientOptions.from_settings(load("client"), tls_name="simm")
    monkeypatch.setenv("SIMM_TLS_NAME", "simm")
    assert options == ClientOptions.resolve() and ClientOptions.resolve(tls_name="").tls_name == ""
    folder = str(tmp_path)
    assert options.tls == TlsOptions(f"{folder}/ca.pem", f"{folder}/cert.pem", f"{folder}/key.pem", name="simm")
    assert ClientOptions.resolve(tls_ca="", tls_cert="", tls_key="").tls is None
    for given in ({"tls_key": "k"}, {"tls_cert": "c"}, {"tls_ca": "a", "tls_key": "k"}, {"tls_name": "simm"}):
        with pytest.raises(UsageError, match="tls_ca"):
            ClientOptions(**given)


def test_a_name_alone_is_no_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who sets it believes that connections are encrypted. A program may still say that its cluster has no TLS."""
    monkeypatch.setenv("SIMM_TLS_NAME", "simm")
    with pytest.raises(UsageError, match=r"tls_name goes with tls_ca \(SIMM_TLS_CA\)"):
        ClientOptions.resolve()
    with pytest.raises(UsageError, match="tls_name goes with tls_ca"):
        FakeClient()
    assert ClientOptions.resolve(tls_ca="").tls is None and ClientOptions.resolve(tls_name="").tls is None
    monkeypatch.setenv("SIMM_TLS_CA", "/ca.pem")
    assert ClientOptions.resolve().tls == TlsOptions("/ca.pem", name="simm")
    assert ClientOptions.resolve(tls_ca="").tls is None
    with pytest.raises(UsageError, match="tls_name goes with tls_ca"):
        ClientOptions.resolve(tls_ca="", tls_name="simm")

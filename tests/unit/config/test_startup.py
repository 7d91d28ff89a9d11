"""What a server takes for TLS, and what it refuses as half a set."""

from __future__ import annotations

from pathlib import Path

import pytest

from simm.config.parsers import TlsOptions
from simm.config.settings import load
from simm.config.startup import server_tls_options
from simm.errors import ConfigError

FILES = {"tls_ca": "ca.pem", "tls_cert": "cert.pem", "tls_key": "key.pem", "tls_client_ca": "clients.pem"}


def options(command: str, *names: str, **more: str) -> TlsOptions | None:
    given = {**{name: FILES[name] for name in names}, **more}
    return server_tls_options(load(command, given, {}), connects=command == "dataserver")


def test_whole_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    here = {name: str(tmp_path / file) for name, file in FILES.items()}
    assert options("dataserver") is options("manager") is None
    assert options("manager", "tls_cert") == TlsOptions(cert=here["tls_cert"])
    assert options("dataserver", *FILES, tls_name="simm") == TlsOptions(*here.values(), name="simm")


@pytest.mark.parametrize(
    ("command", "names", "why"),
    [
        ("dataserver", ("tls_cert",), "--tls-cert goes with --tls-ca"),
        ("dataserver", ("tls_ca",), "--tls-ca goes with --tls-cert"),
        ("dataserver", ("tls_key", "tls_ca"), "goes with --tls-cert"),
        ("manager", ("tls_client_ca",), "--tls-client-ca goes with --tls-cert"),
        ("manager", ("tls_key",), "--tls-key goes with --tls-cert"),
    ],
)
def test_half_a_set(command: str, names: tuple[str, ...], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        options(command, *names)

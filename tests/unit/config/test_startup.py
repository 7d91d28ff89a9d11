"""What a server takes for TLS, and what it refuses as half a set; what is said of a secret that cannot be read."""

from __future__ import annotations

import errno
import grp
import os
import pwd
import ssl
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from simm import dataserver, manager
from simm.config.parsers import TlsOptions
from simm.config.settings import load
from simm.config.startup import read_secret, read_tokens, server_tls_options
from simm.errors import ConfigError, may_pass
from simm.server import rdma_supervisor

FILES = {"tls_ca": "ca.pem", "tls_cert": "cert.pem", "tls_key": "key.pem", "tls_client_ca": "clients.pem"}


def options(command: str, *names: str, **more: str) -> TlsOptions | None:
    given = {**{name: FILES[name] for name in names}, **more}
    return server_tls_options(load(command, given, {}), connects=command == "dataserver")


def test_whole_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    here = {name: str(tmp_path / file) for name, file in FILES.items()}
    assert options("dataserver") is options("manager") is None
    assert options("manager", "tls_cert") == TlsOptions(cert=here["tls_cert"])
    named = tmp_path / "simm.json"
    named.write_text('{"tls_name": "simm"}')
    assert server_tls_options(load("manager", {}, {}, named), connects=False) is None, "in a common file"
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


def test_a_name_without_a_certificate() -> None:
    """It would connect and listen in plain text, and the operator takes it for encrypted."""
    with pytest.raises(ConfigError, match=r"--tls-name goes with --tls-cert, without which .* plain text"):
        options("dataserver", tls_name="simm")
    settings = load("dataserver", {}, {"SIMM_TLS_NAME": "simm"})
    with pytest.raises(ConfigError, match="environment SIMM_TLS_NAME goes with --tls-cert"):
        server_tls_options(settings, connects=True)


def denied(*_: object, **_named: object) -> Any:
    raise PermissionError(13, "Permission denied")


@pytest.mark.parametrize(
    ("user", "group", "remedy"),
    [("simm", "simm", "chgrp simm {0} && chmod 640 {0}"), ("alice", "users", "chown alice {0}")],
    ids=["a group of its own", "a group of many"],
)
def test_issue_who_may_not_read_a_secret_hears_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: str, group: str, remedy: str
) -> None:
    """It said `Permission denied`, and not that the file is root's alone and the unit runs as another user."""
    path = tmp_path / "a token"
    path.touch(mode=0o600)
    monkeypatch.setattr(Path, "read_text", denied)
    mine = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(os.getegid()).gr_name
    monkeypatch.setattr(os, "geteuid", lambda: 64030)
    monkeypatch.setattr(os, "getegid", lambda: 64031)
    names, groups = pwd.getpwuid, grp.getgrgid
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: (user,) if uid == 64030 else names(uid))
    monkeypatch.setattr(grp, "getgrgid", lambda gid: (group,) if gid == 64031 else groups(gid))
    with pytest.raises(ConfigError) as refused:
        read_tokens(path)
    said = f"it is of {mine[0]}:{mine[1]}, mode 0600, and this process is user {user} (uid 64030) of group {group}"
    assert str(refused.value) == f"cannot read the token file {path}: {said}: {remedy.format(repr(str(path)))}"


def test_who_may_not_enter_a_secrets_folder_hears_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "stat", denied)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])  # it has no name
    with pytest.raises(ConfigError, match=r"this process is user \d+ .*may not enter a folder above it; name another"):
        read_secret(tmp_path / "x", "the login", "; name another")


@pytest.mark.parametrize(("number", "code"), [(errno.EIO, 1), (errno.ESTALE, 1), (errno.ENOENT, 2), (errno.EACCES, 2)])
@pytest.mark.parametrize("module", [manager, dataserver], ids=["manager", "dataserver"])
@pytest.mark.parametrize("flag", ["--token-file", "--config"])
def test_issue_a_file_that_cannot_be_read_now_is_no_wrong_setting(
    flag: str, module: ModuleType, number: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A unit does not try again after 2, and the server stayed away when its file system was well again."""

    def fails(path: Path, *_: object) -> Any:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(module, "set_up_logging", lambda *_: None)
    for each in ("read_text", "read_bytes"):
        monkeypatch.setattr(Path, each, fails)
    file = tmp_path / "file"
    file.touch(mode=0o600)
    assert module.main([flag, str(file)]) == code


def test_what_openssl_refuses_stays_refused(tmp_path: Path) -> None:
    """Its errors are the system's by their type, with numbers of its own."""
    file = tmp_path / "ca.pem"
    file.write_text("no certificate")
    with pytest.raises(ssl.SSLError) as refused:
        ssl.create_default_context(cafile=str(file))
    assert not may_pass(refused.value) and not may_pass(OSError("no certificate can name this host"))


@pytest.mark.parametrize(
    ("module", "given", "code"),
    [(manager, "--allow-uid=nobody-knows-this", 1), (manager, "--allow-uid=99999999999", 2),
     (dataserver, "--server-uid=nobody-knows-this", 1), (dataserver, "--allow-uid=0,nobody-knows-this", 1),
     (dataserver, "--allow-uid=-1", 2), (dataserver, "--group=nobody-knows-this", 1),
     (dataserver, "--group=99999999999", 2)],
)  # fmt: skip
def test_issue_a_name_of_a_directory_that_does_not_answer_yet_is_no_wrong_setting(
    module: ModuleType, given: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """At a host's start, as with sssd. A unit does not try again after 2."""
    monkeypatch.setattr(module, "set_up_logging", lambda *_: None)
    for name in [name for name in os.environ if name.startswith("SIMM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SIMM_RUNTIME_DIR", str(tmp_path / "run"))
    assert module.main([given]) == code
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and given.partition("=")[2].split(",")[-1] in said, said
    assert given.partition("=")[0].strip("-").replace("-", "_") in said, "which setting it is"


def test_issue_a_device_that_is_not_there_yet_is_no_wrong_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its driver may be loaded after the data server starts. A port that is down was waited for as well."""
    monkeypatch.setattr(rdma_supervisor.ports, "ports", lambda: ())
    nothing: Any = None
    options: Any = SimpleNamespace(rdma="on")
    endpoints = rdma_supervisor.Endpoints(options, nothing, nothing, on_ready=nothing, give_up=nothing)
    with pytest.raises(ConfigError, match="--rdma on, but this host has no RDMA device") as refused:
        endpoints.detect()
    assert may_pass(refused.value)

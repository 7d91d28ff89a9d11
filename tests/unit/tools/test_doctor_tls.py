"""``simm doctor`` on certificates: those that are well, end soon, have ended, or cannot be read; and on settings."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from simm.config.parsers import TlsOptions
from simm.errors import ConfigError
from simm.net import tls
from simm.tools import doctor, doctor_tls
from simm.tools.findings import Finding
from tests.support.certificates import Authority, needs_openssl


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("doctor"))


def judged(monkeypatch: pytest.MonkeyPatch, **files: object) -> Finding:
    for name in ("CA", "CERT", "KEY", "CLIENT_CA"):
        monkeypatch.setenv(f"SIMM_TLS_{name}", str(files.get(name.lower(), "")))
    return doctor_tls.check_tls()


def test_without_any(monkeypatch: pytest.MonkeyPatch) -> None:
    found = judged(monkeypatch)
    assert (found.status, found.remedy) == ("ok", "") and "plain text" in found.detail


@needs_openssl
def test_certificates(authority: Authority, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ca, folder = authority.ca, authority.folder
    lasting, short, ended = (authority.issue(f"days{days}", days=days) for days in (400, 3, -1))
    other = Authority(tmp_path, "other").ca
    readable = folder / "readable"
    readable.write_text(lasting.read_text())
    readable.chmod(0o644)
    for files, status, words in (
        ({"ca": ca}, "ok", "by TLS"),
        ({"ca": ca, "cert": lasting}, "ok", "is valid until"),
        ({"ca": ca, "cert": folder / "days400.crt", "key": lasting, "client_ca": ca}, "ok", "is valid until"),
        ({"ca": ca, "cert": short}, "warn", "days more"),
        ({"ca": ca, "cert": ended}, "fail", "has expired"),
        ({"ca": other, "cert": lasting}, "warn", "does not accept it"),
        ({"ca": tmp_path / "none"}, "fail", "--tls-ca"),
        ({"cert": readable}, "fail", "chmod 600"),
        ({"cert": lasting, "client_ca": readable.with_name("none")}, "fail", "--tls-client-ca"),
    ):
        found = judged(monkeypatch, **files)
        assert found.status == status and words in found.detail, (files, found)
        assert bool(found.remedy) == (status != "ok")


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Finding]:
    """Return what writes a settings file and checks TLS by it."""

    def write(**settings: object) -> Finding:
        path = tmp_path / "simm.json"
        path.write_text(json.dumps(settings, default=str))
        monkeypatch.setenv("SIMM_CONFIG", str(path))
        return doctor_tls.check_tls()

    return write


@needs_openssl
def test_issue_each_command_has_the_settings_that_it_reads_itself(
    authority: Authority, written: Callable[..., Finding]
) -> None:
    """A table of one command was nobody's, so what ends the server was well."""
    missing = written(dataserver={"tls_cert": "/nonexistent.pem", "tls_ca": "/x.pem"})
    assert missing.status == "fail" and "/x.pem" in missing.detail and "(data server)" in missing.detail
    good, ended = authority.issue("days500", days=500), authority.issue("ended", days=-1)
    tables = {
        "manager": {"tls_cert": good}, "dataserver": {"tls_cert": good, "tls_ca": authority.ca},
        "client": {"tls_ca": authority.ca},
    }  # fmt: skip
    found = written(**tables)
    assert found.status == "ok" and "is valid until" in found.detail
    assert "(manager, data server)" in found.detail and "by TLS" in found.detail and "(client)" in found.detail
    for command, name in (("manager", "manager"), ("dataserver", "data server"), ("client", "client")):
        found = written(**{**tables, command: {"tls_cert": ended, "tls_ca": authority.ca}})
        assert found.status == "fail" and "has expired: " in found.detail and f"({name})" in found.detail, found


@needs_openssl
def test_half_a_set_is_a_fault_where_it_is_meant(authority: Authority, written: Callable[..., Finding]) -> None:
    """A host of engines has no certificate, and a manager no authorities: nobody says what the host is for."""
    half = {"tls_cert": authority.issue("half", days=500)}
    assert (found := written(dataserver=half)).status == "fail" and "goes with --tls-ca" in found.detail
    assert written(client=half).status == "fail" and written(manager=half).status == "ok"
    assert written(manager=half, dataserver=half).status == "fail", "though the manager can use it"
    found = written(**half)
    assert found.status == "warn" and "a data server would not start with this" in found.detail
    assert written(tls_ca=authority.ca).status == "ok" and written(dataserver={"tls_ca": authority.ca}).status == "fail"
    found = written(tls_key="/x")
    assert found.status == "fail" and "goes with --tls-cert" in found.detail and "client" in found.detail
    named = {"tls_name": "simm"}
    assert written(**named).status == written(client=named).status == written(dataserver=named).status == "fail"
    assert written(tls_ca=authority.ca, client=named).status == "ok"


@needs_openssl
def test_issue_what_ends_a_data_server_is_not_well(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text said that a data server would not start, and the status was ok: who reads the status alone saw none."""
    lasting, short, ended = (authority.issue(f"no_ca{days}", days=days) for days in (400, 3, -1))
    found = judged(monkeypatch, cert=lasting.with_suffix(".crt"), key=lasting)
    assert (found.status, found.remedy) == ("warn", "set SIMM_TLS_CA") and "goes with --tls-ca" in found.detail
    assert judged(monkeypatch, cert=lasting, ca=authority.ca).status == "ok"
    for cert, status in ((short, "warn"), (ended, "fail")):  # what else is wrong is said too, and no less of a fault
        found = judged(monkeypatch, cert=cert)
        assert found.status == status and found.remedy.startswith("put a new certificate"), found
        assert found.remedy.endswith("; set SIMM_TLS_CA")


def test_issue_a_setting_that_cannot_be_read_is_named_and_no_fault_of_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor_tls.check_settings().status == "ok"
    monkeypatch.setenv("SIMM_MEMORY", "zz")
    found = {each.name: each for each in doctor.run_checks()}
    assert found["settings"].status == "fail" and found["settings"].remedy == "correct the setting that is named"
    assert "environment SIMM_MEMORY" in found["settings"].detail and "(data server)" in found["settings"].detail
    assert found["tls"].status == "ok" and "not checked: data server, see settings" in found["tls"].detail
    assert not [each for each in found.values() if "could not be checked" in each.detail]


def test_issue_a_certificate_that_is_missing_is_not_called_a_key() -> None:
    """Without --tls-key its file has the key too; the operator was told of a setting that nobody had given."""
    with pytest.raises(ConfigError, match=r"certificate and key /missing.pem \(--tls-cert, SIMM_TLS_CERT\)"):
        tls.for_ports(TlsOptions(cert="/missing.pem"))
    with pytest.raises(ConfigError, match=r"the key /missing.key \(--tls-key, SIMM_TLS_KEY\)"):
        tls.for_ports(TlsOptions(cert="/missing.pem", key="/missing.key"))

"""``simm doctor`` on certificates: those that are well, end soon, have ended, or cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from simm.tools import doctor_tls
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
        ({"cert": folder / "days400.crt", "key": lasting, "client_ca": ca}, "ok", "is valid until"),
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

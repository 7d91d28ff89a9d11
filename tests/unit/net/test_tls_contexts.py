"""Contexts of TLS follow their files: also a mode that is set afterwards, and a failure that passes by itself."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from simm.config.certificates import validity
from simm.config.parsers import TlsOptions
from simm.net.tls import LOOK_S, Context, for_loops, for_pages
from tests.support.certificates import Authority, needs_openssl
from tests.support.clock import Clock

pytestmark = needs_openssl


class Files:
    """A certificate, one that lasts longer, and the file that a server uses."""

    def __init__(self, folder: Path) -> None:
        authority = Authority(folder)
        self.ca = authority.ca
        self.first = authority.issue("first").read_text()
        self.lasting = authority.issue("lasting", days=9).read_text()
        self.used = folder / "used.pem"
        self.put(self.first)

    def put(self, text: str, mode: int = 0o600) -> None:
        """Put another file in the place of the one in use."""
        new = self.used.with_suffix(".new")
        new.write_text(text)
        new.chmod(mode)
        os.replace(new, self.used)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def files(made: Files) -> Files:
    made.put(made.first)
    return made


def ends_of(pem: str) -> float:
    return validity(pem)[1]


def test_a_key_whose_mode_is_corrected_is_read(files: Files, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    context = Context(TlsOptions(cert=str(files.used)), for_pages, clock)
    before = context.get()
    files.put(files.lasting, mode=0o644)
    clock.sleep(LOOK_S)
    assert context.get() is before and "chmod 600" in caplog.text
    files.used.chmod(0o600)  # which changes neither size nor mtime
    clock.sleep(LOOK_S)
    assert context.get() is not before and context.ends() == ends_of(files.lasting)


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ESTALE])
def test_a_failure_that_passes_is_tried_again(
    files: Files, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    clock = Clock()
    context = Context(TlsOptions(cert=str(files.used)), for_pages, clock)
    before = context.get()
    real = Path.read_text

    def failing(path: Path, *arguments: Any, **more: Any) -> str:
        if path == files.used:
            raise OSError(code, os.strerror(code))
        return real(path, *arguments, **more)

    files.put(files.lasting)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", failing)
        for _ in range(3):
            clock.sleep(LOOK_S)
            assert context.get() is before
    assert caplog.text.count("what was read before stays in use") == 1, "one warning for one trouble"
    clock.sleep(LOOK_S)
    assert context.get() is not before and context.ends() == ends_of(files.lasting)


def test_what_is_no_certificate_is_read_once_only(files: Files, caplog: pytest.LogCaptureFixture) -> None:
    clock, made = Clock(), []

    def make(options: TlsOptions) -> Any:
        made.append(options)
        return for_pages(options)

    context = Context(TlsOptions(cert=str(files.used)), make, clock)
    files.put("half a certificate")
    for _ in range(3):
        clock.sleep(LOOK_S)
        context.get()
    assert len(made) == 2 and caplog.text.count("what was read before stays in use") == 1


def test_authorities_that_are_away_for_a_while(files: Files, tmp_path: Path) -> None:
    """A file system that is not mounted for a while: the same file comes back, or another one."""
    used = tmp_path / "ca.pem"
    used.write_text(files.ca.read_text())
    clock = Clock()
    context = Context(TlsOptions(str(used)), lambda options: for_loops(options).get(), clock)
    before = context.get()
    used.rename(used.with_suffix(".away"))
    clock.sleep(LOOK_S)
    assert context.get() is before
    used.write_text(files.ca.read_text() * 2)
    clock.sleep(LOOK_S)
    assert context.get() is not before

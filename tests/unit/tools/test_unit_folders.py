"""Where commands find the sockets of data servers that run as units: which folders they take, and what they say."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from simm.config.settings import Settings, load
from simm.errors import UsageError
from simm.tools.connect import on_host
from simm.tools.ctl import unit_folders
from simm.tools.ctl.tuning import no_socket
from simm.tools.ctl.workers import ask_all
from tests.support.other_user import UID, needs_root


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of /run."""
    folder = tmp_path / "run"
    folder.mkdir()
    monkeypatch.setattr(unit_folders, "RUN", folder)
    return folder


@pytest.fixture
def bound() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def unit(run: Path, name: str, bound: contextlib.ExitStack, uid: int | None = None) -> Path:
    """The folder of a unit's data server, with a worker's socket at which nobody answers."""
    folder = run / name
    folder.mkdir(mode=0o700)
    listener = bound.enter_context(socket.socket(socket.AF_UNIX))
    listener.bind(str(folder / "host-main.0.sock"))
    if uid is not None:
        for path in (folder / "host-main.0.sock", folder):
            os.chown(path, uid, uid)
    return folder


def settings(tmp_path: Path, **more: str) -> Settings:
    """Settings of a user whose own folder is ``tmp_path/simm``."""
    return load("client", {}, {"XDG_RUNTIME_DIR": str(tmp_path), **more})


def test_issue_the_folder_of_a_unit_is_found(run: Path, tmp_path: Path, bound: contextlib.ExitStack) -> None:
    """``simm ctl`` found no data server where there is one as documented, and no page named the folder."""
    assert on_host(settings(tmp_path)).runtime_dir == tmp_path / "simm", "there is none yet"
    (run / "simm-empty").mkdir()
    folder = unit(run, "simm-main", bound)
    found = on_host(settings(tmp_path))
    assert found.runtime_dir == folder
    assert [(each.server, each.worker) for each in ask_all(found.runtime_dir)] == [("host-main", 0)]
    named = settings(tmp_path, SIMM_RUNTIME_DIR=str(tmp_path / "other"))
    assert on_host(named).runtime_dir == tmp_path / "other", "a named one is what is meant"
    (tmp_path / "simm").mkdir()
    own = bound.enter_context(socket.socket(socket.AF_UNIX))
    own.bind(str(tmp_path / "simm" / "mine.0.sock"))
    assert on_host(settings(tmp_path)).runtime_dir == tmp_path / "simm", "the user's own server"


def test_of_several_units_one_is_to_be_named(run: Path, tmp_path: Path, bound: contextlib.ExitStack) -> None:
    folders = [unit(run, name, bound) for name in ("simm-a", "simm-b")]
    asked = on_host(settings(tmp_path))
    with pytest.raises(UsageError) as refused:
        ask_all(asked.runtime_dir)
    for said in (str(refused.value), str(no_socket(asked, ""))):
        assert "--runtime-dir" in said and f"there are sockets in {folders[0]}, {folders[1]}" in said


def test_the_error_says_where_it_looked(run: Path, tmp_path: Path) -> None:
    for make in (False, True):
        if make:
            (tmp_path / "simm").mkdir()
        with pytest.raises(UsageError) as refused:
            ask_all(on_host(settings(tmp_path)).runtime_dir)
        for said in (str(refused.value), str(no_socket(settings(tmp_path), ""))):
            assert str(tmp_path / "simm") in said and f"{run}/simm-*, where units have theirs, has none either" in said


@needs_root
def test_a_strangers_folder_is_not_looked_into(run: Path, tmp_path: Path, bound: contextlib.ExitStack) -> None:
    """Unless its user is one that the settings name, as README says for the units' user."""
    folder = unit(run, "simm-main", bound, UID)
    assert on_host(settings(tmp_path)).runtime_dir == tmp_path / "simm"
    with pytest.raises(UsageError, match=f"{folder} is of uid {UID}.*SIMM_SERVER_UID"):
        ask_all(tmp_path / "simm")
    assert on_host(settings(tmp_path, SIMM_SERVER_UID=str(UID))).runtime_dir == folder
    os.chown(folder / "host-main.0.sock", UID + 1, UID + 1)
    assert unit_folders.with_sockets((UID,)) == [], "a stranger's socket in a trusted folder"


def test_nor_is_one_where_others_make_sockets(run: Path, tmp_path: Path, bound: contextlib.ExitStack) -> None:
    folder = unit(run, "simm-main", bound)
    folder.chmod(0o1777)
    assert on_host(settings(tmp_path)).runtime_dir == tmp_path / "simm"
    assert f"others than its owner may make files in {folder}" in unit_folders.elsewhere(tmp_path, ())
    folder.rename(tmp_path / "real")
    (tmp_path / "real").chmod(0o700)
    folder.symlink_to(tmp_path / "real")
    assert unit_folders.with_sockets(()) == [], "a link"
    (run / "simm-file.sock").touch()
    (run / "simm-other").mkdir()
    (run / "simm-other" / "a.0.sock").touch()
    assert unit_folders.with_sockets(()) == [], "no sockets"
    assert unit_folders.elsewhere(tmp_path, ()).endswith("has none either")

"""The environment that a local cluster gives its child processes, and its folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import simm
from simm import shm
from simm.host.file_locks import LockFile
from simm.sdk import local_cluster
from simm.sdk.local_cluster import child_environment
from tests.support.left_arenas import make_arena
from tests.support.processes import remove_left_by


def test_children_import_the_same_package_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMM_MANAGER", "elsewhere:1")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    environment = child_environment()
    assert "SIMM_MANAGER" not in environment and "SIMM_MANAGER" in os.environ
    script = "import simm; print(simm.__file__)"
    found = subprocess.check_output([sys.executable, "-c", script], cwd=tmp_path, env=environment, text=True)
    assert Path(found.strip()) == Path(simm.__file__).resolve()


def test_the_search_path_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/one:/two")
    assert child_environment()["PYTHONPATH"].split(os.pathsep)[1:] == ["/one", "/two"]


@pytest.mark.parametrize("given", ["", ":", ":/one", "/one:", "/one::/two"])
def test_the_current_folder_is_not_searched(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty entry stands for it."""
    monkeypatch.setenv("PYTHONPATH", given)
    assert "" not in child_environment()["PYTHONPATH"].split(os.pathsep)


def test_a_folder_that_another_process_cleans_away_is_made_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is one without a lock until its owner has taken it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    take, gone = LockFile.take, []

    def late(path: str) -> LockFile | None:
        if not gone:
            gone.append(path)
            shutil.rmtree(os.path.dirname(path))
        return take(path)

    monkeypatch.setattr(LockFile, "take", late)
    with contextlib.ExitStack() as undo:
        folder = local_cluster._make_folder(undo)
        assert os.listdir(folder) == [local_cluster._LOCK] and not gone[0].startswith(folder)
    assert os.listdir(tmp_path) == []


def test_issue_the_arena_of_another_data_server_of_this_name_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two ``simm local`` with one name the first took five seconds to end. What its own processes hold goes."""
    name = f"both{os.getpid()}"
    other, own = (make_arena(f"simm-{os.geteuid()}-{name}-0-{instance:016x}") for instance in (1, 2))

    def released(_seconds: float) -> None:
        assert process.poll() is None and not looks, "it waits for its own processes alone"
        looks.append(_seconds)
        own.close()
        process.kill()
        process.wait()

    looks: list[float] = []
    monkeypatch.setattr(local_cluster.time, "sleep", released)
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        local_cluster._remove_arenas(name, [process.pid], keep_suspended=True)
        assert looks and os.path.exists(f"{shm.SHM_DIR}/{other.name}")
        assert not os.path.exists(f"{shm.SHM_DIR}/{own.name}")
        other.close()
        local_cluster._remove_arenas(name, [process.pid], keep_suspended=True)
        assert not os.path.exists(f"{shm.SHM_DIR}/{other.name}")
    finally:
        process.kill()
        process.wait()
        remove_left_by(name)

"""The environment that a local cluster gives its child processes, and its folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import simm
import simm.testing
from simm import shm
from simm.client import Client
from simm.config.client_options import ClientOptions
from simm.config.local_token import find_sockets
from simm.config.parsers import Address
from simm.host.file_locks import LockFile
from simm.sdk import local_cluster
from simm.sdk.local_cluster import child_environment
from simm.tools import demo
from simm.tools.bench import replay
from tests.support.acl import USER, acls_of, named, set_acl
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


@contextlib.contextmanager
def published(sockets: Path, folder: Path | None = None) -> Iterator[None]:
    """Publish a cluster whose sockets are in a folder, without its servers. A ``folder`` is one that is named."""
    cluster = object.__new__(local_cluster.LocalCluster)
    with contextlib.ExitStack() as undo:
        cluster.sockets, cluster.token, cluster.manager, cluster._undo = sockets, "", "127.0.0.1:30001", undo
        cluster._publish(folder)
        yield


def found_in(folder: Path) -> Path | None:
    return find_sockets(folder, [Address("127.0.0.1", 30001)])


@pytest.mark.parametrize("acl", [False, True])
def test_issue_a_folder_that_another_data_server_uses_keeps_its_mode(
    acl: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group of ``--group`` could not enter it any more, once a cluster of this user had published its manager."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    shared = tmp_path / "simm"
    shared.mkdir()
    shared.chmod(0o710)
    if acl:
        set_acl(shared, named((USER, 1, 4711), group=1, mask=1))
    before = shared.stat().st_mode, acls_of(shared)
    with published(tmp_path / "run"):
        assert found_in(shared) == found_in(tmp_path / "run") == tmp_path / "run"
        assert (shared.stat().st_mode, acls_of(shared)) == before
        assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700, "one that is missing is made"
    with published(shared):
        assert found_in(shared) == shared and (shared.stat().st_mode, acls_of(shared)) == before
    assert found_in(shared) is None


def test_nothing_is_published_where_others_may_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But the folder that the cluster's own data server takes for itself is made private."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "simm").symlink_to(tmp_path)
    loose, own = tmp_path / "loose", tmp_path / "own"
    for folder, mode in ((loose, 0o770), (own, 0o777)):
        folder.mkdir()
        folder.chmod(mode)
    with published(own, loose):
        assert found_in(own) == own and own.stat().st_mode & 0o777 == 0o700
        assert found_in(loose) is None and loose.stat().st_mode & 0o777 == 0o770
        assert found_in(tmp_path) is None, "links are not followed"


class Reached(Exception):
    """A client would connect now."""


@pytest.mark.parametrize("by", ["Client.local", "simm.testing", "simm demo", "simm bench --trace"])
def test_issue_the_tls_of_the_environment_is_for_another_cluster(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With SIMM_TLS_CA set, clients of an own cluster, which has no TLS, wanted some."""
    reached: list[ClientOptions] = []

    class Cluster:
        manager, token = "127.0.0.1:9", "t"

        def __init__(self, *_: Any, **__: Any) -> None: ...

        def __enter__(self) -> Cluster:
            return self

        def __exit__(self, *_: object) -> None: ...

        def close(self) -> None: ...

    class Noted(Client):
        def __init__(self, manager: str, **given: Any) -> None:
            reached.append(ClientOptions.resolve(manager=manager, **given))
            raise Reached

    for name, value in (("CA", "/ca.pem"), ("CERT", "/cert.pem"), ("KEY", "/key.pem"), ("NAME", "simm")):
        monkeypatch.setenv(f"SIMM_TLS_{name}", value)
    assert ClientOptions.resolve().tls is not None, "the control"
    for module in (local_cluster, replay):
        monkeypatch.setattr(module, "LocalCluster", Cluster)
    for user in (simm.testing, demo, replay):
        monkeypatch.setattr(user, "Client", Noted)
    with pytest.raises(Reached):
        if by == "Client.local":
            Noted.local()
        elif by == "simm.testing":
            with simm.testing.local_cluster():
                pass
        elif by == "simm demo":
            demo.Engine(Cluster.manager, "auto")
        else:
            replay.main(["--generate", "chat", "--requests", "10", "--room", "100"])
    (options,) = reached
    assert (options.tls, options.tls_name, options.manager) == (None, "", Cluster.manager)

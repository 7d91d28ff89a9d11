"""Which workers of this host a command means, where a folder has those of several clusters or is found unnamed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from simm import cli
from simm.arena.layout import Word
from simm.config.local_token import PublishedToken
from simm.config.parsers import Address
from simm.config.settings import Settings, load
from simm.errors import SegmentError, TransportError, UsageError
from simm.tools.connect import PUBLISHED, on_host
from simm.tools.ctl import command, tuning, unit_folders, whose
from simm.tools.ctl.whose import Meant, cluster_in, cluster_of
from simm.tools.ctl.workers import Asked
from tests.support.left_arenas import make_arena

OURS, OTHERS = 0xA, 0xB
#: By their names. One has joined no cluster yet, one's arena cannot be read, one does not answer.
CLUSTERS = {"ours": OURS, "others": OTHERS, "new": 0, "unread": None}
WORKERS = [Asked(name, 0, f"/{name}.0.sock", {"segment": name, "clients": []}) for name in CLUSTERS]
WORKERS.append(Asked("silent", 0, "/silent.0.sock", {}, "it hangs"))
ALL = [each.server for each in WORKERS]
KNOWN = ["ours"]
NOT_OTHERS = ["ours", "new", "unread", "silent"]

Manager = Callable[[str | None], list[Address]]


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Manager:
    """Say what the manager answers, None for nothing; return the managers that are asked from now on."""

    def inspect(name: str) -> Any:
        if (cluster := CLUSTERS[name]) is None:
            raise SegmentError("there is no segment")
        return SimpleNamespace(cluster=cluster)

    def say(cluster: str | None) -> list[Address]:
        asked: list[Address] = []

        def client(settings: Settings) -> Any:
            asked.extend(settings.manager)
            if cluster is None:
                raise TransportError("no manager answers")
            return contextlib.nullcontext(SimpleNamespace(status=lambda: {"cluster": cluster}))

        monkeypatch.setattr(whose, "manager_client", client)
        return asked

    monkeypatch.setattr(whose, "inspect", inspect)
    return say


def settings(named: str, folder: str, tmp_path: Path) -> Settings:
    """Settings with a manager that is named so, if it is, and a folder of this origin."""
    made = load("client", {"manager": named} if named else {}, {"XDG_RUNTIME_DIR": str(tmp_path)})
    made.origins["runtime_dir"] = folder  # type: ignore[index]
    return made


NEAR, FAR, FOUND, NAMED = "127.0.0.1:30001", "10.0.0.5:30001", "default", "--runtime-dir"


@pytest.mark.parametrize(
    ("named", "folder", "answer", "changed", "looked_at"),
    [
        (NEAR, FOUND, f"{OURS:016x}", KNOWN, NOT_OTHERS),
        (NEAR, NAMED, f"{OURS:016x}", NOT_OTHERS, NOT_OTHERS),
        (NEAR, PUBLISHED, f"{OURS:016x}", NOT_OTHERS, NOT_OTHERS),
        (NEAR, FOUND, None, None, ALL),
        (NEAR, FOUND, "no number", None, ALL),
        (NEAR, NAMED, None, ALL, ALL),
        (NEAR, PUBLISHED, None, ALL, ALL),
        (NEAR, NAMED, f"{0xC:016x}", ["new", "unread", "silent"], ["new", "unread", "silent"]),
        (NEAR, FOUND, f"{0xC:016x}", None, ["new", "unread", "silent"]),
        (FAR, FOUND, f"{OURS:016x}", KNOWN, ALL),
        (FAR, FOUND, None, None, ALL),
        ("", FOUND, f"{OURS:016x}", KNOWN, ALL),
        ("", FOUND, None, ALL, ALL),
        ("", NAMED, f"{OURS:016x}", ALL, ALL),
        ("", PUBLISHED, f"{OURS:016x}", NOT_OTHERS, ALL),
    ],
)  # fmt: skip
def test_workers_of_another_cluster_are_left_out(
    named: str, folder: str, answer: str | None, changed: list[str] | None, looked_at: list[str], manager: Manager,
    tmp_path: Path,
) -> None:  # fmt: skip
    """What changes something wants more: no worker of which nothing is known, in a folder that nobody has named."""
    asked = manager(answer)
    meant = Meant(settings(named, folder, tmp_path))
    assert [each.server for each in meant.to_look_at(WORKERS)] == looked_at
    if named == FAR:
        assert not asked, "a look must not wait for a manager that is far"
    if changed is None:
        with pytest.raises(UsageError, match="--runtime-dir"):
            meant.to_change(WORKERS)
    else:
        assert [each.server for each in meant.to_change(WORKERS)] == changed
    assert len(asked) <= 1, "it is asked once"


def test_a_look_at_others_alone_is_refused(manager: Manager, tmp_path: Path) -> None:
    manager(f"{OURS:016x}")
    meant = Meant(settings(NEAR, FOUND, tmp_path))
    with pytest.raises(UsageError, match=f"known to be of the cluster of the manager {NEAR}"):
        meant.to_look_at(WORKERS[1:2])
    assert [each.server for each in meant.to_look_at(WORKERS[1:2], OTHERS)] == ["others"], "the caller knows better"
    assert meant.to_look_at([]) == [] and cluster_in({}) == cluster_in({"cluster": 7}) == 0


def test_servers_are_told_apart_by_their_workers(
    manager: Manager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Admin sockets know of no cluster: ``settings set`` and ``grow`` go by the workers beside them."""
    manager(f"{OURS:016x}")
    monkeypatch.setattr(whose, "ask_all", lambda *_: WORKERS)
    monkeypatch.setattr(tuning, "admin_sockets", lambda *_: {each.server: each.path for each in WORKERS})
    assert list(tuning.sockets_to_change(settings(NEAR, FOUND, tmp_path), "")) == KNOWN
    assert list(tuning.sockets_to_change(settings("", NAMED, tmp_path), "")) == ALL


@pytest.mark.parametrize(
    "words", [["evict", "*"], ["settings", "set", "poll_us", "1"], ["grow", "--memory", "8M"], ["why"], ["workers"]]
)
def test_issue_a_command_for_another_cluster_took_what_it_found(
    words: list[str], manager: Manager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The only unit's folder was taken for the named manager's: ``evict '*'`` for a local cluster emptied it."""
    manager(f"{OURS:016x}")
    folder = tmp_path / "run" / "simm-main"
    monkeypatch.setattr("simm.tools.connect.with_sockets", lambda _: [folder])
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(unit_folders, "RUN", tmp_path / "run")
    for module in (command, whose):
        monkeypatch.setattr(module, "ask_all", lambda *_: WORKERS[1:2])
    monkeypatch.setattr(tuning, "admin_sockets", lambda *_: {"others": "/nowhere"})
    reached: list[Any] = []
    monkeypatch.setattr(command.entries, "evict", lambda *given, **_: reached.append(given) or [])
    monkeypatch.setattr(command, "_local", lambda *given: reached.append(given) or ([], "", True))
    for module in (tuning, command.grow):
        monkeypatch.setattr(module, "ask_admin", lambda *given: reached.append(given) or b"[]")
    assert cli.main(["ctl", *words, "--manager", NEAR]) == 2 and not reached
    out, err = capsys.readouterr()
    assert out == "" and str(folder) in err and err.count("\n") == 1


def test_a_folder_that_a_local_cluster_publishes_can_be_relied_on(tmp_path: Path) -> None:
    folder = tmp_path / "simm"
    folder.mkdir(mode=0o700)
    found = load("client", {"manager": NEAR}, {"XDG_RUNTIME_DIR": str(tmp_path)})
    made = PublishedToken(folder, Address("127.0.0.1", 30001), "", tmp_path / "run")
    try:
        assert on_host(found).runtime_dir == tmp_path / "run" and on_host(found).origin("runtime_dir") == PUBLISHED
    finally:
        made.close()
    assert on_host(found).origin("runtime_dir") != PUBLISHED


def test_an_arena_says_which_cluster_it_is_of() -> None:
    name = f"simm-{os.geteuid()}-whose{os.getpid()}-0-{1:016x}"
    arena = make_arena(name)
    try:
        its = Asked("a", 0, "/nowhere", {"segment": name})
        assert cluster_of(its) == 0
        memoryview(arena.mm).cast("Q")[Word.CLUSTER] = OURS
        assert cluster_of(its) == OURS
    finally:
        arena.unlink()
        arena.close()
    assert cluster_of(its) == cluster_of(Asked("a", 0, "/nowhere", {})) == 0, "it has gone, or does not answer"

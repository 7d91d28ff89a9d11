"""Which workers of this host a command means, where a folder has those of several clusters or is found unnamed."""

from __future__ import annotations

import contextlib
import os
import socket
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
from simm.errors import SegmentError, SimmError, TransportError, UsageError
from simm.net.channel import Refused
from simm.tools.connect import PUBLISHED, on_host
from simm.tools.ctl import command, grow, tuning, unit_folders, whose
from simm.tools.ctl.whose import NOT_KNOWN, Meant, cluster_in, cluster_of
from simm.tools.ctl.workers import Asked
from simm.wire.messages import Status
from tests.support.left_arenas import make_arena

OURS, OTHERS = 0xA, 0xB
#: By their names. One has joined no cluster yet, one's arena cannot be read, one does not answer.
CLUSTERS = {"ours": OURS, "others": OTHERS, "new": 0, "unread": None}
WORKERS = [Asked(name, 0, f"/{name}.0.sock", {"segment": name, "clients": []}) for name in CLUSTERS]
WORKERS.append(Asked("silent", 0, "/silent.0.sock", {}, "it hangs"))
ALL = [each.server for each in WORKERS]
KNOWN = ["ours"]
ONE = [each for each in WORKERS if each.server != "others"]
NOT_OTHERS = ["ours", "new", "unread", "silent"]

#: What a manager answers that there is, but that tells nothing, and that nobody listens.
REFUSES, SILENT, ABSENT = "refuses", "silent", None
Manager = Callable[[str | None], list[Address]]


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Manager:
    """Say what the manager answers; return the managers that are asked from now on."""

    def inspect(name: str) -> Any:
        if (cluster := CLUSTERS[name]) is None:
            raise SegmentError("there is no segment")
        return SimpleNamespace(cluster=cluster)

    def say(cluster: str | None) -> list[Address]:
        asked: list[Address] = []

        def client(settings: Settings) -> Any:
            asked.extend(settings.manager)
            if cluster == REFUSES:
                raise Refused(Status.UNAUTHORIZED, "wrong or missing token")
            if cluster in (ABSENT, SILENT):
                raise TransportError("no manager answers")
            return contextlib.nullcontext(SimpleNamespace(status=lambda: {"cluster": cluster}))

        monkeypatch.setattr(whose, "manager_client", client)
        monkeypatch.setattr(whose, "_listens", lambda _: cluster is not ABSENT)
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
        (NEAR, FOUND, ABSENT, "--runtime-dir", ALL),
        (NEAR, FOUND, REFUSES, "--runtime-dir", ALL),
        (NEAR, FOUND, "no number", "--runtime-dir", ALL),
        (NEAR, NAMED, ABSENT, "--server", ALL),
        (NEAR, NAMED, REFUSES, "--server", ALL),
        (NEAR, PUBLISHED, ABSENT, "--server", ALL),
        (NEAR, NAMED, f"{0xC:016x}", ["new", "unread", "silent"], ["new", "unread", "silent"]),
        (NEAR, FOUND, f"{0xC:016x}", "--runtime-dir", ["new", "unread", "silent"]),
        (FAR, FOUND, f"{OURS:016x}", KNOWN, ALL),
        (FAR, FOUND, ABSENT, "--runtime-dir", ALL),
        ("", FOUND, f"{OURS:016x}", KNOWN, ALL),
        ("", FOUND, ABSENT, "--server", ALL),
        ("", FOUND, SILENT, "--runtime-dir", ALL),
        ("", FOUND, REFUSES, "--runtime-dir", ALL),
        ("", NAMED, f"{OURS:016x}", ALL, ALL),
        ("", NAMED, REFUSES, ALL, ALL),
        ("", PUBLISHED, f"{OURS:016x}", NOT_OTHERS, ALL),
        ("", PUBLISHED, REFUSES, "--server", ALL),
    ],
)  # fmt: skip
def test_workers_of_another_cluster_are_left_out(
    named: str, folder: str, answer: str | None, changed: list[str] | str, looked_at: list[str], manager: Manager,
    tmp_path: Path,
) -> None:  # fmt: skip
    """What changes something wants more: no worker of which nothing is known, in a folder that nobody has named.

    A manager that refuses, or hangs, is there: its cluster is meant, and nobody knows which that is.
    """
    asked = manager(answer)
    meant = Meant(settings(named, folder, tmp_path))
    assert [each.server for each in meant.to_look_at(WORKERS)] == looked_at
    if named == FAR:
        assert not asked, "a look must not wait for a manager that is far"
    if isinstance(changed, str):
        with pytest.raises(UsageError, match=changed):
            meant.to_change(WORKERS)
    else:
        found = meant.to_change(WORKERS)
        assert [each.server for each in found if NOT_KNOWN not in each.why] == changed
        assert not any(each.stats for each in found if NOT_KNOWN in each.why), "nothing can be done to them"
        assert {each.server for each in found} >= {"new", "unread", "silent"}, "none is left out without a word"
    assert len(asked) <= 1, "it is asked once"


@pytest.mark.parametrize(
    ("named", "folder", "answer", "changed", "warned"),
    [
        (NEAR, NAMED, ABSENT, NOT_OTHERS, True),
        (NEAR, NAMED, REFUSES, NOT_OTHERS, True),
        ("", PUBLISHED, ABSENT, NOT_OTHERS, False),
        ("", FOUND, ABSENT, KNOWN, False),
        ("", FOUND, SILENT, None, False),
        ("", FOUND, REFUSES, None, False),
    ],
)
def test_a_folder_with_one_cluster_is_meant_without_a_manager(
    named: str, folder: str, answer: str | None, changed: list[str] | None, warned: bool, manager: Manager,
    tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """It says so if one was named; but not in a folder that was found while a manager is there that tells nothing."""
    manager(answer)
    meant = Meant(settings(named, folder, tmp_path))
    if changed is None:
        with pytest.raises(UsageError, match="--runtime-dir"):
            meant.to_change(ONE)
    else:
        found = meant.to_change(ONE)
        assert [each.server for each in found if NOT_KNOWN not in each.why] == changed and len(found) == len(ONE)
    out, err = capsys.readouterr()
    assert out == "" and err.count("could not be asked") == warned


def test_without_a_manager_nothing_tells_workers_apart_that_store_nothing(manager: Manager, tmp_path: Path) -> None:
    manager(ABSENT)
    meant = Meant(settings("", FOUND, tmp_path))
    assert meant.to_change(WORKERS[2:3]) == WORKERS[2:3]
    with pytest.raises(UsageError, match="of one cluster"):
        meant.to_change(WORKERS[2:])


def half_silent(server: str) -> list[Asked]:
    """The workers of one data server, named as its cluster, of which the second one hangs."""
    return [
        Asked(server, 0, f"/{server}.0.sock", {"segment": server, "clients": []}),
        Asked(server, 1, f"/{server}.1.sock", {}, "it hangs"),
    ]


@pytest.mark.parametrize("folder", [FOUND, NAMED])
def test_issue_a_worker_that_hangs_was_left_out_without_a_word(folder: str, manager: Manager, tmp_path: Path) -> None:
    """``evict`` emptied the other worker of its data server alone, and ended with 0. One speaks for both."""
    manager(f"{OURS:016x}")
    meant = Meant(settings(NEAR, folder, tmp_path))
    both = [*half_silent("ours"), *half_silent("others")]
    assert meant.to_change(both) == half_silent("ours") == meant.to_look_at(both)
    new = [Asked("new", 0, "/new.0.sock", {"segment": "new", "clients": []})]
    rows = command.entries.evict(meant.to_change([*half_silent("ours")[1:], *half_silent("ours")[:1], *new]), None)
    assert rows[0]["reason"] == "it hangs" and (NOT_KNOWN in rows[2]["reason"]) == (folder == FOUND)
    silent = half_silent("ours")[1:]
    assert meant.to_change(silent) == silent, "all hang: the command says why"


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
    found, left = tuning.sockets_to_change(settings(NEAR, FOUND, tmp_path), "")
    assert list(found) == KNOWN and [line.split(":")[0] for line in left] == ["new", "unread", "silent"]
    assert list(tuning.sockets_to_change(settings(NEAR, PUBLISHED, tmp_path), "")[0]) == NOT_OTHERS
    found, left = tuning.sockets_to_change(settings("", NAMED, tmp_path), "")
    assert list(found) == ALL and left == []


@pytest.mark.parametrize(
    ("workers", "answer", "may"),
    [
        (WORKERS[-1:], f"{OURS:016x}", True),
        ([], f"{OURS:016x}", True),
        (WORKERS[-1:], ABSENT, True),
        (WORKERS[-1:] + WORKERS[:1], f"{OURS:016x}", True),
        (WORKERS[-1:] + WORKERS[1:2], f"{OURS:016x}", False),
        (WORKERS[-1:], REFUSES, False),
        ([*half_silent("silent")[1:], Asked("silent", 0, "", {"segment": "others"})], f"{OURS:016x}", False),
    ],
)
def test_issue_a_data_server_whose_workers_hang_took_no_setting(
    workers: list[Asked], answer: str | None, may: bool, manager: Manager, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Its admin socket serves meanwhile. One that is meant alone may be changed, if nothing speaks against it."""
    manager(answer)

    def ask_all(*_: Any) -> list[Asked]:
        if not workers:
            raise UsageError("there is no socket of a worker")
        return workers

    monkeypatch.setattr(whose, "ask_all", ask_all)
    monkeypatch.setattr(tuning, "admin_sockets", lambda *_: {"silent": "/silent.admin.sock"})
    its = settings(NEAR if answer else "", FOUND, tmp_path)
    if may:
        assert tuning.sockets_to_change(its, "silent") == ({"silent": "/silent.admin.sock"}, [])
    else:
        with pytest.raises(UsageError, match="--runtime-dir"):
            tuning.sockets_to_change(its, "silent")


def test_issue_data_servers_that_hang_were_left_out_without_a_word(
    manager: Manager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A setting is set where it may be, and the command fails. Growing would take the one that is left."""
    manager(f"{OURS:016x}")
    reached: list[str] = []
    monkeypatch.setattr(whose, "ask_all", lambda *_: [WORKERS[0], WORKERS[-1]])
    monkeypatch.setattr(tuning, "admin_sockets", lambda *_: {"ours": "/ours", "silent": "/silent"})
    monkeypatch.setattr(tuning, "ask_admin", lambda _, path, ask: reached.append(path) or b"[]")
    its = settings(NEAR, FOUND, tmp_path)
    monkeypatch.setattr(tuning, "_rows", lambda _, name: [{"server": name, "name": "poll_us"}])
    with pytest.raises(SimmError, match=f"not all servers have taken it: silent: {NOT_KNOWN}"):
        tuning.settings_rows(its, ["set", "poll_us", "1"], "", manager=False)
    assert reached == ["/ours"]
    with pytest.raises(SimmError, match=f"nothing has grown: silent: {NOT_KNOWN}; name one by --server: ours"):
        grow.Target(its, "", "")


@pytest.mark.parametrize(("taken", "listens"), [(True, True), (False, False)])
def test_a_manager_that_hangs_is_told_from_one_that_is_not_there(taken: bool, listens: bool) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        if taken:
            held.listen()
        assert whose._listens(Address(*held.getsockname())) is listens


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

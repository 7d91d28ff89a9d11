"""The state file's folder may hold what an operator, or somebody else, has put there."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from simm import manager
from simm.control import state_file
from simm.control.state_file import StateFile
from simm.errors import ConfigError, CorruptionError
from tests.support.acl import USER, named, set_acl
from tests.support.other_user import UID, needs_root


def test_issue_the_lock_follows_no_link(tmp_path: Path) -> None:
    """It did, and truncated the file behind it."""
    precious = tmp_path / "precious"
    precious.write_text("of the operator")
    folder = tmp_path / "state"
    folder.mkdir()
    (folder / "manager.lock").symlink_to(precious)
    with pytest.raises(ConfigError, match="state-dir"):
        StateFile(folder, "manager")
    assert precious.read_text() == "of the operator"


def test_issue_a_new_state_follows_no_link(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("of the operator")
    folder = tmp_path / "state"
    with contextlib.closing(StateFile(folder, "manager")) as file:
        (folder / "manager.tmp").symlink_to(precious)
        with pytest.raises(OSError, match="symbolic links"):
            file.save({"epoch": 1})
        assert precious.read_text() == "of the operator"
        file.save({"epoch": 1})  # the link has been removed
        assert file.load() == {"epoch": 1}


def planted(folder: Path, how: str) -> None:
    """Be another user, who has made the folder or a file of it first, and lets everybody write there."""
    if how == "a link":
        folder.rename(folder.with_name("of an operator"))
        folder.symlink_to("of an operator")
        os.chown(folder, UID, UID, follow_symlinks=False)
    elif how == "the folder":
        os.chown(folder, UID, UID)
    else:
        path = folder / how
        path.write_text("{}")
        path.chmod(0o666)
        os.chown(path, UID, UID)


@needs_root
@pytest.mark.parametrize("mode", [0o1777, 0o2770])
@pytest.mark.parametrize("how", ["the folder", "a link", "manager.lock", "manager.json"])
def test_issue_what_another_user_has_made_first_is_not_used(tmp_path: Path, how: str, mode: int) -> None:
    """Where all may write, as in /tmp, or a group with other members: he could say what the cluster is."""
    shared = tmp_path / "shared"
    folder = shared / "state"
    folder.mkdir(parents=True)
    os.chown(shared, -1, UID)
    shared.chmod(mode)
    os.chown(folder, -1, UID)
    folder.chmod(mode)
    planted(folder, how)
    with pytest.raises((ConfigError, CorruptionError), match=f"belongs to uid {UID}"):
        with contextlib.closing(StateFile(folder, "manager")) as file:
            file.load()
    assert how != "a link" or not list(folder.iterdir())


@needs_root
def test_issue_what_others_may_make_by_an_acl_is_not_used(tmp_path: Path) -> None:
    """Its mode names the user's own group, which has nobody else."""
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o700)
    set_acl(shared, named((USER, 7, UID)))
    folder = shared / "state"
    folder.mkdir()
    os.chown(folder, UID, -1)
    with pytest.raises(ConfigError, match=f"belongs to uid {UID}"):
        StateFile(folder, "manager")
    set_acl(shared, named((USER, 5, UID)))
    StateFile(folder, "manager").close()  # the control: nobody else could have made it


@needs_root
@pytest.mark.parametrize("made", ["a folder", "a link"])
@pytest.mark.parametrize("of", [UID, 0])
def test_issue_what_lies_on_the_way_to_it_is_no_other_users(tmp_path: Path, made: str, of: int) -> None:
    """Nobody else may write in the folder above, but that is his: he may have made all of it, or make it anew."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    there = shared / "there"
    if made == "a link":
        (tmp_path / "elsewhere").mkdir()
        there.symlink_to(tmp_path / "elsewhere")
    else:
        there.mkdir(mode=0o755)
    os.chown(there, UID, UID, follow_symlinks=False)
    folder = there / "state"
    folder.mkdir(mode=0o700)
    os.chown(folder, of, of)
    with pytest.raises(ConfigError, match=f"{there} belongs to uid {UID}"):
        StateFile(folder, "manager")
    shared.chmod(0o755)  # the control: nobody else could have made it
    StateFile(folder, "manager").close()


@needs_root
def test_issue_where_a_link_leads_nobody_else_may_have_made_it(tmp_path: Path) -> None:
    """What counts is the folder that it is in, not the one that the link is in."""
    shared = tmp_path / "shared"
    (shared / "state").mkdir(parents=True)
    shared.chmod(0o1777)
    os.chown(shared / "state", UID, UID)
    link = tmp_path / "state"
    link.symlink_to(shared / "state")
    with pytest.raises(ConfigError, match=f"{shared / 'state'} belongs to uid {UID}"):
        StateFile(link, "manager")


@needs_root
@pytest.mark.parametrize(
    ("link_to", "below"), [("shared/theirs", "state"), ("shared/theirs/state", ""), ("shared/last", "")]
)
def test_issue_where_a_link_leads_is_no_link_of_another_user(tmp_path: Path, link_to: str, below: str) -> None:
    """An operator's link led to a folder that another user chose, although the folder at the end is the operator's."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)  # not sticky: the kernel itself may refuse to follow others' links there
    state = tmp_path / "elsewhere" / "state"
    state.mkdir(parents=True)
    for name, end in ("theirs", "../elsewhere"), ("last", "../elsewhere/state"):
        (shared / name).symlink_to(end)
        os.chown(shared / name, UID, UID, follow_symlinks=False)
    (tmp_path / "link").symlink_to(link_to if below else tmp_path / link_to)
    folder = tmp_path / "link" / below
    with pytest.raises(ConfigError, match=f"{shared}/(theirs|last) belongs to uid {UID}"):
        StateFile(folder, "manager")
    assert list(state.iterdir()) == []
    shared.chmod(0o755)  # the control: nobody else could have made it
    StateFile(folder, "manager").close()
    assert [each.name for each in state.iterdir()] == ["manager.lock"]


def test_links_that_lead_to_each_other_stop_no_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may come after the folder has been made: the kernel has refused those that were there before."""
    (tmp_path / "one").symlink_to("other")
    (tmp_path / "other").symlink_to(tmp_path / "one")
    monkeypatch.setattr(Path, "mkdir", lambda *args, **kwargs: None)
    with pytest.raises(ConfigError, match=os.strerror(errno.ELOOP)):
        StateFile(tmp_path / "one" / "state", "manager")


@needs_root
def test_what_an_operator_has_made_is_used_whosever_it_is(tmp_path: Path) -> None:
    """A network's file system may show every file as somebody else's. Nobody else makes one there."""
    folder = tmp_path / "state"
    with contextlib.closing(StateFile(folder, "manager")) as file:
        file.save({"epoch": 1})
    for each in (tmp_path, folder, folder / "manager.json", folder / "manager.lock"):
        os.chown(each, UID, UID)
    with contextlib.closing(StateFile(folder, "manager")) as file:
        assert file.load() == {"epoch": 1}


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_issue_a_pipe_does_not_stop_the_start(tmp_path: Path, make: Callable[[Path], None]) -> None:
    """Whoever opens it waits for somebody who writes, for ever."""
    with contextlib.closing(StateFile(tmp_path / "state", "manager")) as file:
        make(tmp_path / "state" / "manager.json")
        with pytest.raises(CorruptionError, match=r"(?i)no ordinary file|is a directory"):
            file.load()


@pytest.mark.parametrize(
    ("name", "number", "code"),
    [("manager.lock", errno.EROFS, 1), ("manager.lock", errno.ENOSPC, 1), ("manager.lock", errno.EACCES, 2),
     ("manager.json", errno.EIO, 1), ("manager.json", errno.ESTALE, 1), ("manager.json", errno.EACCES, 2)],
)  # fmt: skip
def test_issue_a_disk_that_fails_at_the_start_is_no_wrong_setting(
    name: str, number: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A unit does not try again after 2, and the manager stayed away when the disk was well again."""
    real = state_file._open_own

    def opens(path: Path, how: int) -> int:
        if path.name == name:
            raise OSError(number, os.strerror(number))
        return real(path, how)

    monkeypatch.setattr(state_file, "_open_own", opens)
    monkeypatch.setattr(manager, "set_up_logging", lambda *_: None)
    monkeypatch.setattr(manager, "raise_file_limit", lambda: None)
    assert manager.main(["--listen", "127.0.0.1:0", "--state-dir", str(tmp_path)]) == code
    said = capsys.readouterr().err
    assert os.strerror(number) in said and ("begin anew" in said) == (name == "manager.json" and code == 2)

"""Whom a process trusts, and the number that stands for any user of another namespace."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from simm.host import users

STRANGER = 4711


def test_own_user_root_and_who_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for own in (0, 1000):
        monkeypatch.setattr(os, "geteuid", lambda own=own: own)
        assert users.trusts(own) and users.trusts(0)
        assert not users.trusts(STRANGER) and not users.trusts(-1, [-1]) and not users.trusts(2**32 - 1, [2**32 - 1])
        assert users.trusts(STRANGER, (1, STRANGER))


def test_the_overflow_uid_is_nobody_in_particular(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where this process has it: all users that the namespace does not know have it there."""
    nobody = users.overflow_uid()
    monkeypatch.setattr(os, "geteuid", lambda: nobody)
    for whole, trusted in ((True, True), (False, False)):
        monkeypatch.setattr(users, "has_all_uids", lambda whole=whole: whole)
        assert users.trusts(nobody) == users.trusts(nobody, [nobody]) == trusted
        assert users.trusts(0)


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        (b"         0          0 4294967295\n", True),
        (b"0 0 1000\n1000 1000 4294966295\n", True),
        (b"         0       1000          1\n", False),
        (b"0 100000 65536\n", False),
        (b"", False), (b"0 0\n", False), (b"0 0 many\n", False),
    ],
)  # fmt: skip
def test_which_namespace_has_all_users(
    text: bytes, whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / "uid_map"
    made.write_bytes(text)
    monkeypatch.setattr("builtins.open", lambda _path, mode: os.fdopen(os.open(made, os.O_RDONLY), mode))
    assert users.has_all_uids() == whole


def folder_of(mode: int, uid: int = 0, gid: int = 0) -> os.stat_result:
    """Return what ``stat`` tells of a folder."""
    return os.stat_result((stat.S_IFDIR | mode, 1, 1, 2, uid, gid, 0, 0, 0, 0))


#: Groups of the system: name, members. Of the second the user is a member, of the third another one is.
GROUPS = {1000: ("me", []), 2000: ("me", ["me"]), 3000: ("me", ["me", "else"]), 4000: ("staff", []), 5000: ("me2", [])}


@pytest.fixture
def as_me(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be user 1000 of a system that knows GROUPS."""

    def group(gid: int) -> SimpleNamespace:
        name, members = GROUPS[gid]
        return SimpleNamespace(gr_name=name, gr_mem=members)

    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(users.pwd, "getpwuid", {1000: SimpleNamespace(pw_name="me")}.__getitem__)
    monkeypatch.setattr(users.grp, "getgrgid", group)


@pytest.mark.parametrize(
    ("mode", "gid", "make", "replace"),
    [
        (0o700, 4000, False, False), (0o755, 4000, False, False),
        (0o777, 1000, True, True), (0o1777, 1000, True, False), (0o702, 1000, True, True),
        (0o775, 1000, False, False), (0o775, 2000, False, False), (0o775, 3000, True, True),
        (0o775, 4000, True, True), (0o3775, 4000, True, False), (0o775, 5000, True, True),
        (0o775, 9999, True, True),
    ],
)  # fmt: skip
def test_who_may_make_and_replace_what_is_in_a_folder(
    as_me: None, mode: int, gid: int, make: bool, replace: bool
) -> None:
    assert users.others_may_make(folder_of(mode, 1000, gid)) == make
    for owner in (0, 1000):
        assert users.others_may_replace(folder_of(mode, owner, gid)) == replace
    assert users.others_may_replace(folder_of(mode, STRANGER, gid))


def test_a_user_without_a_name_has_no_private_group(as_me: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container."""
    monkeypatch.setattr(users.pwd, "getpwuid", {}.__getitem__)
    assert users.others_may_make(folder_of(0o775, 1000, 1000))

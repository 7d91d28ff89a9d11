"""Whom a process trusts, and the number that stands for any user of another namespace."""

from __future__ import annotations

import errno
import os
import random
import stat
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest

from simm.host import users
from tests.support import acl

STRANGER = 4711
#: Nothing is there, so it has no ACL.
NOWHERE = "/proc/self/comm"


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
    assert users.others_may_make(folder_of(mode, 1000, gid), NOWHERE) == make
    for owner in (0, 1000):
        assert users.others_may_replace(folder_of(mode, owner, gid), NOWHERE) == replace
    assert users.others_may_replace(folder_of(mode, STRANGER, gid), NOWHERE)


def test_a_user_without_a_name_has_no_private_group(as_me: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container."""
    monkeypatch.setattr(users.pwd, "getpwuid", {}.__getitem__)
    assert users.others_may_make(folder_of(0o775, 1000, 1000), NOWHERE)


# -- ACLs ------------------------------------------------------------------------------------------------


def asked_of(folder: Path) -> tuple[bool, bool]:
    """Return whether others may make files in it, and replace what is there, by its real mode and ACL."""
    about = os.stat(folder)
    return users.others_may_make(about, folder), users.others_may_replace(about, folder)


@pytest.mark.parametrize(
    ("entries", "mask", "others"),
    [
        ([(acl.USER, 7, STRANGER)], 7, True), ([(acl.USER, 2, STRANGER)], 2, True),
        ([(acl.USER, 7, STRANGER)], 5, False), ([(acl.USER, 5, STRANGER)], 7, False),
        ([(acl.GROUP, 7, STRANGER)], 7, True), ([(acl.GROUP, 5, STRANGER)], 7, False),
        ([(acl.USER, 7, -1)], 7, False), ([(acl.USER, 7, 0)], 7, False),
        ([(acl.USER, 7, -1), (acl.USER, 3, STRANGER)], 7, True),
    ],
)  # fmt: skip
def test_issue_an_acl_lets_others_make_files(
    tmp_path: Path, entries: list[acl.Entry], mask: int, others: bool
) -> None:
    """The mode has the mask in place of the group's bits: with the user's own group they looked harmless."""
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o700)
    assert asked_of(folder) == (False, False)
    own = [(tag, bits, os.geteuid() if number < 0 else number) for tag, bits, number in entries]
    acl.set_acl(folder, acl.named(*sorted(own), mask=mask))
    assert bool(folder.stat().st_mode & stat.S_IWGRP) == bool(mask & 2)
    assert asked_of(folder) == (others, others)
    folder.chmod(folder.stat().st_mode | stat.S_ISVTX)
    assert asked_of(folder) == (others, False)


def test_an_acl_of_the_group_counts_as_its_mode(tmp_path: Path, as_me: None) -> None:
    """With an ACL the mode says what a group may do at the most."""
    acl.set_acl(tmp_path, acl.named((acl.USER, 5, 1000), group=7))
    assert users.others_may_make(folder_of(0o770, 1000, 4000), tmp_path)
    assert not users.others_may_make(folder_of(0o770, 1000, 2000), tmp_path), "the user's own"
    acl.set_acl(tmp_path, acl.named((acl.USER, 7, 1000), group=5))
    assert not users.others_may_make(folder_of(0o770, 1000, 4000), tmp_path), "only the user is named"
    acl.set_acl(tmp_path, acl.named((acl.GROUP, 7, 2000), group=5))
    assert not users.others_may_make(folder_of(0o770, 1000, 4000), tmp_path)
    acl.set_acl(tmp_path, acl.named((acl.GROUP, 7, 2000), (acl.GROUP, 7, 5000)))
    assert users.others_may_make(folder_of(0o770, 1000, 4000), tmp_path)


def test_an_acl_that_makes_no_sense_lets_everybody_in(as_me: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever bytes there are: no exception, and nothing that is not understood counts as harmless."""
    good = acl.named((acl.USER, 5, STRANGER))
    told = good

    def getxattr(_path: object, _name: str) -> bytes:
        return told

    monkeypatch.setattr(os, "getxattr", getxattr)
    about = folder_of(0o770, 1000, 1000)
    assert not users.others_may_make(about, NOWHERE)
    dice = random.Random(20_261_128)
    wrong = [b"", good[:3], good[:-1], good + b"\0", acl.packed([(3, 0, 0)]), acl.packed([(0, 0, 0)]),
             acl.packed([(acl.USER, 8, 1000)]), good[:4] + bytes(8), struct.pack("<I", 1) + good[4:]]  # fmt: skip
    wrong += [acl.packed([(acl.USER, 2, STRANGER)]), acl.packed([(acl.GROUP, 2, 0xFFFF_FFFF)])]  # no mask: no bound
    for told in wrong:
        assert users.others_may_make(about, NOWHERE), told.hex()
    for _ in range(2000):
        told = dice.randbytes(dice.choice((0, 4, 12, 28, 65_532)) + dice.randrange(2))
        assert users.others_may_make(about, NOWHERE)
    for number, others in ((errno.ENODATA, False), (errno.ENOTSUP, False), (errno.EACCES, True), (errno.EIO, True)):

        def fails(_path: object, _name: str, number: int = number) -> bytes:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "getxattr", fails)
        assert users.others_may_make(about, NOWHERE) == others

"""Whom a process trusts, and the number that stands for any user of another namespace."""

from __future__ import annotations

import os
from pathlib import Path

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

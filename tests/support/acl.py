"""POSIX ACLs, packed by hand: no program for them is needed."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

USER_OBJ, USER, GROUP_OBJ, GROUP, MASK, OTHER = 0x01, 0x02, 0x04, 0x08, 0x10, 0x20
NO_ID: Final = 0xFFFF_FFFF
Entry = tuple[int, int, int]


def packed(entries: Sequence[Entry], version: int = 2) -> bytes:
    """Return entries of (tag, permissions, uid or gid) as the kernel has them."""
    return struct.pack("<I", version) + b"".join(struct.pack("<HHI", *each) for each in entries)


def named(*entries: Entry, owner: int = 7, group: int = 0, mask: int = 7) -> bytes:
    """Return an ACL that names these users and groups, in the order that the kernel wants."""
    users = [each for each in entries if each[0] == USER]
    groups = [each for each in entries if each[0] == GROUP]
    return packed([
        (USER_OBJ, owner, NO_ID), *users, (GROUP_OBJ, group, NO_ID), *groups, (MASK, mask, NO_ID), (OTHER, 0, NO_ID),
    ])  # fmt: skip


def set_acl(path: Path, acl: bytes, which: str = "access") -> None:
    """Give a file an ACL; skip the test where its file system has none."""
    try:
        os.setxattr(path, f"system.posix_acl_{which}", acl)
    except OSError as exc:
        if exc.errno in (errno.ENOTSUP, errno.EPERM, errno.ENOSYS):
            pytest.skip(f"no ACLs in {path.parent}: {exc.strerror}")
        raise


def acls_of(path: Path) -> list[str]:
    """Return the kinds of ACLs that a file has."""
    return sorted(name for name in os.listxattr(path) if name.startswith("system.posix_acl_"))

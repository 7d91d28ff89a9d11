"""Which users of its host a process trusts: its own, root, and those that an option names.

The kernel names the user of a local peer or of a file (SO_PEERCRED, sock_diag, stat). In a user namespace it shows
every user of the host that has no number there as the *overflow uid*, 65534. So that number proves nothing, unless the
namespace has all numbers.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Container
from typing import Final

#: What a client says of another user's server: its memory could end the client, its answers be anything.
NOT_TRUSTED: Final = "which is neither this process's user nor root; name users you trust in SIMM_SERVER_UID"
_OVERFLOW_UID: Final = 65534
_ALL_UIDS: Final = (1 << 32) - 1


def overflow_uid() -> int:
    """Return the number that stands for users without one in this namespace."""
    try:
        with open("/proc/sys/kernel/overflowuid", "rb") as file:
            return int(file.read())
    except (OSError, ValueError):
        return _OVERFLOW_UID


def has_all_uids() -> bool:
    """Return True if every user of the host has a number in this process's user namespace."""
    try:
        with open("/proc/self/uid_map", "rb") as file:
            return sum(int(line.split()[2]) for line in file) >= _ALL_UIDS
    except (OSError, ValueError, IndexError):
        return False


def is_certain(uid: int) -> bool:
    """Return True if the kernel means one user by this number."""
    return 0 <= uid < _ALL_UIDS and (uid != overflow_uid() or has_all_uids())


def trusts(uid: int, named: Container[int] = ()) -> bool:
    """Return True for this process's own (effective) user, root, and a user that is named."""
    return (uid in (os.geteuid(), 0) or uid in named) and is_certain(uid)


def others_may_make(folder: os.stat_result) -> bool:
    """Return True if users besides its owner and root may make files in a folder."""
    if folder.st_mode & stat.S_IWOTH:
        return True
    return bool(folder.st_mode & stat.S_IWGRP) and not _is_private_group(folder.st_gid)


def others_may_replace(folder: os.stat_result) -> bool:
    """Return True if users that this process does not trust may rename or remove what this user has in a folder."""
    return not trusts(folder.st_uid) or (others_may_make(folder) and not folder.st_mode & stat.S_ISVTX)


def _is_private_group(gid: int) -> bool:
    """Return True for a group that has this user alone: many systems give each user one, of the user's name.

    A user whose primary group it is, too, is not among its members there. Nobody is given another user's private one.
    """
    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}

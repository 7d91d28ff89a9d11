"""Which users of its host a process trusts: its own, root, and those that an option names.

The kernel names the user of a local peer or of a file (SO_PEERCRED, sock_diag, stat). In a user namespace it shows
every user of the host that has no number there as the *overflow uid*, 65534. So that number proves nothing, unless the
namespace has all numbers.
"""

from __future__ import annotations

import os
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

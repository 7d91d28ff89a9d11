"""Which users of its host a process trusts: its own, root, and those that an option names.

The kernel names the user of a local peer or of a file (SO_PEERCRED, sock_diag, stat). In a user namespace it shows
every user of the host that has no number there as the *overflow uid*, 65534. So that number proves nothing, unless the
namespace has all numbers.

A file's mode does not say all where it has a POSIX ACL: the bits of the group are then the most that any named user or
group has. So the ACL is read where these bits let somebody in. The ACLs of an NFSv4 server are not seen.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
import struct
from collections.abc import Container
from typing import Final, NamedTuple

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


def others_may_make(folder: os.stat_result, path: str | os.PathLike[str]) -> bool:
    """Return True if users besides its owner and root may make files in the folder at ``path``, by mode or ACL."""
    if folder.st_mode & stat.S_IWOTH:
        return True
    if not folder.st_mode & stat.S_IWGRP:
        return False
    acl = _acl_of(path)
    if acl is None:
        return not _is_private_group(folder.st_gid)
    return acl.lets_others(stat.S_IWOTH) or (acl.lets_group(stat.S_IWOTH) and not _is_private_group(folder.st_gid))


def others_may_replace(folder: os.stat_result, path: str | os.PathLike[str]) -> bool:
    """Return True if users that this process does not trust may rename or remove what this user has in a folder."""
    return not trusts(folder.st_uid) or (others_may_make(folder, path) and not folder.st_mode & stat.S_ISVTX)


# -- ACLs: a version, and entries of (tag, permissions as the lowest bits of a mode, uid or gid) --------------

_ACL: Final = "system.posix_acl_access"
_NO_ACL: Final = (errno.ENODATA, errno.ENOTSUP)
_VERSION: Final = struct.pack("<I", 2)
_ENTRY: Final = struct.Struct("<HHI")
_USER_OBJ, _USER, _GROUP_OBJ, _GROUP, _MASK, _OTHER = 0x01, 0x02, 0x04, 0x08, 0x10, 0x20


class _Acl(NamedTuple):
    """What an ACL says beside a mode, with its mask applied. Attributes: permissions by uid, of the group, by gid."""

    users: dict[int, int]
    group: int
    groups: dict[int, int]

    def lets_group(self, permission: int) -> bool:
        """Return True if the file's group has a permission, given as the bit of others in a mode."""
        return bool(self.group & permission)

    def lets_others(self, permission: int) -> bool:
        """Return True if a named user has it that this process does not trust, or a named group of others."""
        users = [uid for uid, bits in self.users.items() if bits & permission]
        groups = [gid for gid, bits in self.groups.items() if bits & permission]
        return not all(map(trusts, users)) or not all(map(_is_private_group, groups))


#: What is taken for an ACL that cannot be read or makes no sense.
_EVERYBODY: Final = _Acl({_ALL_UIDS: 7}, 7, {_ALL_UIDS: 7})


def _acl_of(path: str | os.PathLike[str]) -> _Acl | None:
    """Return a file's ACL; None without one. O(entries), of which the kernel keeps 8191 at the most."""
    try:
        raw = os.getxattr(path, _ACL)
    except OSError as exc:
        return None if exc.errno in _NO_ACL else _EVERYBODY
    return _parsed(raw)


def _parsed(raw: bytes) -> _Acl:
    size = _ENTRY.size
    if raw[:4] != _VERSION or (len(raw) - 4) % size:
        return _EVERYBODY
    users: dict[int, int] = {}
    groups: dict[int, int] = {}
    group, mask = 0, 7
    for tag, bits, number in _ENTRY.iter_unpack(raw[4:]):
        if bits > 7:
            return _EVERYBODY
        if tag == _USER:
            users[number] = users.get(number, 0) | bits
        elif tag == _GROUP:
            groups[number] = groups.get(number, 0) | bits
        elif tag == _GROUP_OBJ:
            group |= bits
        elif tag == _MASK:
            mask &= bits
        elif tag not in (_USER_OBJ, _OTHER):  # those are what the mode says
            return _EVERYBODY
    return _Acl({at: bits & mask for at, bits in users.items()}, group & mask,
                {at: bits & mask for at, bits in groups.items()})  # fmt: skip


def _is_private_group(gid: int) -> bool:
    """Return True for a group that has this user alone: many systems give each user one, of the user's name.

    A user whose primary group it is, too, is not among its members there. Nobody is given another user's private one.
    """
    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}

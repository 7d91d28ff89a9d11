"""Locks on bytes of an open file (open file description locks, ``F_OFD_SETLK``).

* The kernel drops them with the last reference to the open file, so ``kill -9`` releases them.
* They belong to the open file, not to the process. POSIX locks would vanish as soon as any code in the process closed
  any descriptor of the file.
* ``F_OFD_GETLK`` tests a lock without taking it, on a read-only descriptor too. A ``flock`` can only be tested by
  taking it for a moment, and a test at the wrong moment makes the real owner fail.
* A forked child inherits them, and a mapping keeps its open file alive as well. The owner of a lock therefore gives it
  an open file of its own and never maps that one.

The bytes locked are only numbers: nothing stored there is touched, and memory access ignores locks.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import struct
from typing import Final

from ..errors import SegmentError

#: struct flock: type, whence, (4 bytes padding), start, length, pid (0 for OFD locks), tail padding.
_FLOCK: Final = struct.Struct("@hhqqi4x")
assert _FLOCK.size == 32
_F_OFD_GETLK: Final = getattr(fcntl, "F_OFD_GETLK", 36)
_F_OFD_SETLK: Final = getattr(fcntl, "F_OFD_SETLK", 37)


def try_lock(fd: int, first: int, count: int = 1) -> bool:
    """Lock bytes first .. first+count-1 for this open file, all or none. Return False if another file has one."""
    try:
        fcntl.fcntl(fd, _F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, first, count, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise SegmentError(f"cannot lock a file: {error.strerror}; SiMM needs Linux 3.15 or newer") from error
    return True


def unlock(fd: int, byte: int) -> None:
    """Release this open file's lock on a byte."""
    fcntl.fcntl(fd, _F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, byte, 1, 0))


def held(fd: int, first: int, count: int = 1) -> bool:
    """Return True if another open file holds a lock on one of these bytes. Take nothing."""
    answer = fcntl.fcntl(fd, _F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, first, count, 0))
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def leads_to(path: str, fd: int) -> bool:
    """Return True if the path, which may not be a link, leads to the open file."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(fd))
    except OSError:
        return False


class LockFile:
    """A file whose lock says that its owner lives. :meth:`take` makes one.

    As the file is removed at the end, a lock counts only if the path leads to the locked inode afterwards.
    """

    def __init__(self, path: str, fd: int) -> None:
        """Internal, for `take`."""
        self.path = path
        self._fd = fd

    @classmethod
    def take(cls, path: str) -> LockFile | None:
        """Make and lock the file, or return None if another process has the lock. Follow no link. Raises OSError."""
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
            made = cls(path, fd)
            try:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise OSError(errno.EINVAL, "not a regular file", path)
                if not try_lock(fd, 0):
                    os.close(fd)
                    return None
                if made.held:
                    with contextlib.suppress(OSError):  # the pid is for people; a full disk prevents nothing
                        os.ftruncate(fd, 0)
                        os.pwrite(fd, b"%d\n" % os.getpid(), 0)
                    return made
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)  # its last owner removed it in between

    @property
    def held(self) -> bool:
        """Return False if the file was removed or replaced, so that another process may have a lock there."""
        return leads_to(self.path, self._fd)

    def release(self) -> None:
        """Remove the file, if it is still this one, and release the lock. No effect the second time."""
        fd, held = self._fd, self._fd >= 0 and self.held
        self._fd = -1
        if held:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
        if fd >= 0:
            os.close(fd)

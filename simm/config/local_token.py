"""The token of a cluster that one user runs on this host (``simm local``), where this user's programs find it.

The cluster's process writes it to ``local-HOST-PORT.token`` in the runtime folder, by its manager's address, with mode
0600, and holds a lock on the file while it lives. A client of that address without a token of its own takes it from
there. A file without a lock is of a process that was killed: another server may have the port by now.

Whoever publishes a token first removes what was left. A file that has just been made has no lock yet and looks the
same. So a file is removed under its lock, and who makes one looks whether it is still there once it is locked.

A comment before the token names the folder with the sockets of the cluster's data server, which is one of its own. So
``simm ctl`` and ``simm top`` look there without being told. A cluster whose clients show another token, or none, has a
file with that comment alone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from .parsers import Address

_BYTES_MAX: Final = 8192
_FOLDER: Final = "# sockets "
#: Attempts, where another process is always at the same file at the same moment, and seconds between two.
_TRIES: Final = 100
_PAUSE_S: Final = 0.001
#: How often a file that is in the way is swept before it counts as a live process's, and seconds before each time.
_SWEEPS: Final = 20
_SWEEP_PAUSE_S: Final = 0.01
#: Addresses by which a client on this host reaches a listener on all of them.
_LOOPBACK: Final = {"localhost": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}


def line_of(token: str) -> str:
    """Return the line of a token file: a local cluster's user may do everything with it."""
    return f"admin local {token}\n"


def token_path(folder: Path, manager: Address) -> Path:
    """Return where the token of the cluster with this manager is."""
    return folder / f"local-{_LOOPBACK.get(manager.host, manager.host)}-{manager.port}.token"


class PublishedToken:
    """A token in the runtime folder until :meth:`close`. Raises OSError, also if a live process has one there.

    ``token``: empty if the cluster has drawn none. ``sockets``: the runtime folder of the cluster's own data server.
    """

    def __init__(self, folder: Path, manager: Address, token: str, sockets: Path | None = None) -> None:
        self.path = token_path(folder, manager)
        for left in folder.glob("local-*.token"):  # by processes that were killed
            with contextlib.suppress(OSError):
                _sweep(left)
        self._fd = _replace(self.path)
        try:
            named = f"{_FOLDER}{sockets}\n" if sockets is not None and "\n" not in str(sockets) else ""
            os.write(self._fd, f"{named}{line_of(token) if token else ''}".encode())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Remove it. No effect the second time."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        with contextlib.suppress(OSError):
            if _is_at(fd, self.path):
                os.unlink(self.path)
        os.close(fd)


def _replace(path: Path) -> int:
    """Do :func:`_create` where another process may be removing what was left. Raises OSError as it does.

    Who sweeps has the lock of the file meanwhile, so it looks like a live process's.
    """
    for _ in range(_SWEEPS):
        with contextlib.suppress(FileExistsError):
            return _create(path)
        time.sleep(_SWEEP_PAUSE_S)
        with contextlib.suppress(OSError):
            _sweep(path)
    return _create(path)


def _create(path: Path) -> int:
    """Return a descriptor of a new file, locked. Raises OSError, FileExistsError if there is one."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    for _ in range(_TRIES):
        fd = os.open(path, flags, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)  # those who look, or sweep, have it for a moment
            if _is_at(fd, path):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # it was swept before it had its lock
    raise OSError(errno.EAGAIN, "others remove it again and again", str(path))


def _sweep(path: Path) -> None:
    """Remove a file that no process has locked. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        for _ in range(_TRIES):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(fd, path):  # else another process has swept it, and may have made the next one
                    os.unlink(path)
                return
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return  # its process lives
            fcntl.flock(fd, fcntl.LOCK_UN)  # a client looks at it
            time.sleep(_PAUSE_S)
    finally:
        os.close(fd)


def _is_at(fd: int, path: Path) -> bool:
    """Return True if a path still names the file of a descriptor."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    return False


def find(folder: Path, managers: Iterable[Address]) -> str:
    """Return the token of this user's local cluster at one of the addresses; empty if there is none."""
    lines = [line for line in _published(folder, managers).splitlines() if not line.startswith("#")]
    return (" ".join(lines).split() or [""])[-1]


def find_sockets(folder: Path, managers: Iterable[Address]) -> Path | None:
    """Return the folder with the sockets of this user's local cluster at one of the addresses; None without one."""
    line = _published(folder, managers).partition("\n")[0]
    return Path(line.removeprefix(_FOLDER)) if line.startswith(_FOLDER) else None


def _published(folder: Path, managers: Iterable[Address]) -> str:
    """Return what this user's local cluster at one of the addresses has published; empty if there is none."""
    for manager in managers:
        if not Address(_LOOPBACK.get(manager.host, manager.host), manager.port).loopback:
            continue
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if text := _take(token_path(folder, manager)):
                return text
    return ""


def _take(path: Path) -> str | None:
    """Return what is in a file of this user; None if no process has it locked. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        about = os.fstat(fd)
        private = not stat.S_IMODE(about.st_mode) & 0o077
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or not private:
            return None
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None
        text = os.read(fd, _BYTES_MAX).decode()
        return text if _is_at(fd, path) else None  # else the lock was of who swept it
    finally:
        os.close(fd)

"""Keep a small JSON state that survives crashes: checksum, atomic replacement, one owner.

    DIR/NAME.json   {"kind": ..., "format": 1, "crc32": of the state's canonical JSON, "state": {...}}
    DIR/NAME.lock   flock'ed by the process that may write; its pid inside, for operators
    DIR/NAME.tmp    the next version while it is written; a leftover has no meaning and is removed

A save writes the temporary file, fsyncs it, renames it over the old one and fsyncs the folder. After a crash at any
point the file holds the old state or the new one, whole. A state that cannot be read with certainty is never replaced
by an empty one: the error says what is wrong and what to do.

Whoever writes the state says what the cluster is. Where other users may write, as in /tmp, one may have made the
folder or a file of it first, or a folder or link on the way to it. So what lies there must be this user's or root's. A
pipe would stop the start for ever, so files are ordinary ones anywhere.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import zlib
from pathlib import Path
from typing import Any, Final

from ..errors import ConfigError, CorruptionError, SimmError, may_pass
from ..host.users import others_may_make, trusts

FILE_FORMAT: Final = 1
FILE_BYTES_MAX: Final = 64 << 20
#: On the way to the folder. The kernel follows as many.
LINKS_MAX: Final = 40


#: A link in the folder could name any file of this user: the lock and the new state would overwrite it. A pipe has
#: nobody at its other end.
_OPEN: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class StateFile:
    """The state called ``name`` in a folder. Holds its lock from construction to :meth:`close`.

    Raises ConfigError if the folder cannot be used, SimmError if another process owns the state.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.kind = f"simm {name} state"
        self.path = folder / f"{name}.json"
        self._tmp = folder / f"{name}.tmp"
        self._folder = folder
        lock = folder / f"{name}.lock"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _require_own_way(folder)
            self._lock = _open_own(lock, os.O_RDWR | os.O_CREAT)
        except OSError as exc:
            raise ConfigError(
                f"cannot use the state folder {folder}: {exc.strerror or exc}; name another with --state-dir"
            ) from exc
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            owner = os.read(self._lock, 32).decode("ascii", "replace").strip() or "unknown"
            os.close(self._lock)
            raise SimmError(
                f"{self.path} belongs to process {owner}, which is running: stop it, or give this one another "
                "--state-dir"
            ) from exc
        # The pid is for operators: a full disk must not prevent the start.
        with contextlib.suppress(OSError):
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, b"%d\n" % os.getpid(), 0)
        with contextlib.suppress(FileNotFoundError):
            self._tmp.unlink()

    @property
    def where(self) -> str:
        """Its name, for messages."""
        return str(self.path)

    def load(self) -> Any:
        """Return the state last saved, or None before the first.

        Raises CorruptionError with the remedy, SimmError if the file may be readable later.
        """
        way_out = f"to begin anew, move {self.path} away (the cluster then refills from its servers)"
        try:
            with open(_open_own(self.path, os.O_RDONLY), "rb") as file:
                raw = file.read(FILE_BYTES_MAX + 1)
        except FileNotFoundError:
            return None
        except OSError as exc:
            if may_pass(exc):  # the state is whole, as far as anybody knows: nobody is advised to give it up
                raise SimmError(f"cannot read {self.path} now: {exc.strerror or exc}") from exc
            raise CorruptionError(f"cannot read {self.path}: {exc.strerror or exc}; {way_out}") from exc
        if len(raw) > FILE_BYTES_MAX:
            raise CorruptionError(f"{self.path} is larger than {FILE_BYTES_MAX >> 20} MiB: not a state file; {way_out}")
        try:
            top = json.loads(raw)
        except (ValueError, RecursionError) as exc:
            raise CorruptionError(f"{self.path} is damaged ({exc}): restore a copy, or, {way_out}") from None
        if not isinstance(top, dict) or top.get("kind") != self.kind:
            raise CorruptionError(f"{self.path} is not a {self.kind}: is this the right --state-dir? Else, {way_out}")
        version = top.get("format")
        if version != FILE_FORMAT:
            raise CorruptionError(
                f"{self.path} has format {version!r}, this build reads {FILE_FORMAT}: run the SiMM that wrote it, or, "
                f"{way_out}"
            )
        state = top.get("state")
        if top.get("crc32") != zlib.crc32(canonical(state)):
            raise CorruptionError(f"{self.path} is damaged (checksum): restore a copy, or, {way_out}")
        return state

    def save(self, state: Any) -> None:
        """Replace the state, durably. Raises OSError, as for a full disk.

        The old state is then there, or the new one if only the fsync of the folder failed: whole, in any case.
        """
        body = canonical(state)
        head = json.dumps({"kind": self.kind, "format": FILE_FORMAT, "crc32": zlib.crc32(body)})
        try:
            fd = _open_own(self._tmp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            with open(fd, "wb") as file:
                file.write(head[:-1].encode() + b', "state": ' + body + b"}\n")
                file.flush()
                os.fsync(fd)
            os.rename(self._tmp, self.path)
        except OSError:
            with contextlib.suppress(OSError):
                self._tmp.unlink()
            raise
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def close(self) -> None:
        """Release the lock. Twice is harmless."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _require_own(path: Path, about: os.stat_result) -> None:
    """Raise PermissionError for what is another user's than this one's or root's, where other users may make it."""
    if not trusts(about.st_uid) and others_may_make(os.stat(path.parent), path.parent):
        raise PermissionError(
            errno.EPERM,
            f"{path} belongs to uid {about.st_uid}, not to {os.geteuid()} or root, and others may write in "
            f"{path.parent}",
        )


def _require_own_way(folder: Path) -> None:
    """Raise PermissionError if another user may have made a folder, one above, or any link that leads to it.

    Goes as the kernel does: a link that another link leads to says where the state is, too. Raises OSError for what it
    cannot look at, and for more than LINKS_MAX links.
    """
    at, links = Path("/"), 0
    left = list(reversed(folder.absolute().parts))
    while left:
        each = at / left.pop()  # begins anew at the "/" of a link's absolute path
        if each.name == "..":
            at = at.parent
            continue
        about = os.lstat(each)
        _require_own(each, about)
        if not stat.S_ISLNK(about.st_mode):
            at = each
            continue
        links += 1
        if links > LINKS_MAX:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        left += reversed(Path(os.readlink(each)).parts)


def _open_own(path: Path, how: int) -> int:
    """Open a file of the state. Raises OSError, also for one that another user may have made, or no ordinary one."""
    fd = os.open(path, how | _OPEN, 0o600)
    try:
        about = os.fstat(fd)
        _require_own(path, about)
        if not stat.S_ISREG(about.st_mode):
            raise OSError(errno.EINVAL, f"{path} is no ordinary file")
    except BaseException:
        os.close(fd)
        raise
    return fd


def canonical(state: Any) -> bytes:
    """Return a state as JSON that depends on its content only."""
    return json.dumps(state, sort_keys=True, separators=(",", ":")).encode()

"""A folder through which the processes of a user on one host trace together.

    control.json      what `simm trace start` asks of all of them; its end is in it
    PID-START.spans   what one process has recorded: a JSON object a line, the newest last
    PID-START.old     what it recorded before that

Whoever can write here can make this user's clients trace, and nothing else. So the folder has the mode 0700, and it and
each file in it must belong to this user (or root); links are not followed. Whoever can write to the folder *around* it
could put a link to any folder in its place, in which files would then be written and removed. So that must be this
user's or root's too: without settings it is in /tmp, where anybody can make the name first.

What else lies in the folder is not touched: only regular files with these names are counted, read and removed. A folder
that other users can see into is tightened to 0700 if it has nothing else, and refused if it has.

**Bounds.** A process keeps two files of ``FILE_BYTES_MAX``. A folder keeps the files of ``PROCESSES_MAX`` processes: a
process that begins removes the oldest beyond that. A thread writes, so a disk that hangs delays no call, and what does
not fit the memory of the recorder meanwhile is counted and left out. A process that is killed loses a second.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..constants import TRACE_CONTROL, TRACE_S_MAX
from ..errors import ConfigError, UsageError
from ..host import fork
from ..host.threads import Wake
from ..host.users import others_may_replace
from .perfetto import LINE_BYTES_MAX, Event, events_of, read_lines
from .spans import Recorder, ratio_of

log = logging.getLogger("simm.tracing")

FILE_BYTES_MAX: Final = 8 << 20
PROCESSES_MAX: Final = 64
#: What is collected at a time: the newest. A span takes some 2 KiB of memory.
EVENTS_MAX: Final = 500_000
WRITE_S: Final = 0.5
_CONTROL_BYTES_MAX: Final = 4096
#: Why a file cannot be opened at this moment, whatever it is.
_OF_A_MOMENT: Final = (errno.EMFILE, errno.ENFILE, errno.EINTR)
_NEWEST, _OLDER = ".spans", ".old"
#: The names of files with spans, and those of what else is made here. START has 16 digits: `2024-10.old` is no trace.
_SPANS: Final = re.compile(r"[0-9]{1,10}-[0-9a-f]{16}\.(?:spans|old)", re.ASCII)
_CONTROL: Final = re.compile(rf"{re.escape(TRACE_CONTROL)}|\.{re.escape(TRACE_CONTROL)}\.[0-9]+", re.ASCII)


def open_folder(folder: Path) -> Path:
    """Make the folder, or check it, and return it. Its mode is 0700 then.

    Raises ConfigError if others could write there, or replace it, or if its mode must change and it has other files;
    and for what the file system or a lack of descriptors refuses.
    """
    with _in_words(folder):
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        check_folder(folder)
        if folder.lstat().st_mode & 0o077:
            foreign = _foreign(folder)
            if foreign:
                raise ConfigError(
                    f"other users may look into {folder}, and it has files that are no traces, as {foreign}: name an "
                    "empty folder by --trace-dir, or give this one the mode 0700"
                )
            folder.chmod(0o700)
    return folder


@contextlib.contextmanager
def _in_words(folder: Path) -> Iterator[None]:
    """Raise ConfigError for what the system says of a folder."""
    try:
        yield
    except OSError as exc:
        raise ConfigError(f"no folder for traces at {folder}: {exc.strerror}; name another by --trace-dir") from exc


def _foreign(folder: Path) -> str:
    """Return the name of something in the folder that is not of this module, "" if there is nothing."""
    with os.scandir(folder) as entries:
        for entry in entries:
            ours = _SPANS.fullmatch(entry.name) or _CONTROL.fullmatch(entry.name)
            if not ours or not entry.is_file(follow_symlinks=False):
                return entry.name
    return ""


def check_folder(folder: Path) -> bool:
    """Return whether there is a folder for traces. Raises ConfigError if it is another user's, or could be replaced."""
    with _in_words(folder):
        try:
            around, about = folder.parent.lstat(), folder.lstat()
        except FileNotFoundError:
            return False
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
        raise ConfigError(f"{folder} is no folder of uid {os.geteuid()}; name another by --trace-dir")
    if others_may_replace(around, folder.parent):
        raise ConfigError(f"other users can replace what is in {folder.parent}; name another folder by --trace-dir")
    return True


def _own(fd: int) -> bool:
    about = os.fstat(fd)
    return stat.S_ISREG(about.st_mode) and about.st_uid in (os.geteuid(), 0)


# -- what all processes of the host are asked for -----------------------------------------------------


class Asked(NamedTuple):
    """What `simm trace start` asks for. ``until``: seconds since 1970."""

    ratio: float
    slow_ms: int
    until: float


def share_of(ratio: str) -> float:
    """Return the share of operations that is to be traced. Raises UsageError."""
    share = ratio_of(ratio)
    if share is None:
        raise UsageError("simm trace stop ends it; start takes a share of operations from 0 to 1")
    return share


def checked_seconds(seconds: float) -> float:
    """Return how long to trace. Raises UsageError."""
    if not 0 < seconds <= TRACE_S_MAX:
        raise UsageError(f"tracing is for more than 0 s and at most {TRACE_S_MAX} s (a day), not {seconds:g}")
    return seconds


def ask(folder: Path, ratio: str, slow_ms: int, seconds: float) -> Asked:
    """Ask all clients that use this folder to trace for so many seconds. Raises UsageError, ConfigError."""
    share = share_of(ratio)
    asked = Asked(share, slow_ms, time.time() + checked_seconds(seconds))
    open_folder(folder)
    temporary = folder / f".{TRACE_CONTROL}.{os.getpid()}"
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with open(fd, "w", encoding="utf-8") as file:
            json.dump(asked._asdict(), file)
        temporary.replace(folder / TRACE_CONTROL)
    except OSError as exc:
        raise ConfigError(f"cannot write {folder / TRACE_CONTROL}: {exc.strerror}") from exc
    return asked


def end(folder: Path) -> bool:
    """Ask for no more traces; return whether anything was asked for. Raises ConfigError."""
    check_folder(folder)
    try:
        (folder / TRACE_CONTROL).unlink()
    except FileNotFoundError:
        return False
    except OSError as exc:
        raise ConfigError(f"cannot remove {folder / TRACE_CONTROL}: {exc.strerror}") from exc
    return True


class Control:
    """What a folder's control file asks for, read again only when it has changed, or could not be read."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._seen: tuple[int, int] = (0, 0)
        self._asked: Asked | None = None
        #: Whether the last line said what is wrong with the file: whoever writes it again and again gets one line.
        self._said = False

    def look(self, now: float) -> Asked | None:
        """Return what is asked for at ``now``, seconds since 1970; None for nothing. One stat unless it changed."""
        try:
            about = os.stat(self._path, follow_symlinks=False)
        except OSError:
            self._seen, self._asked = (0, 0), None
            return None
        seen = about.st_ino, about.st_mtime_ns
        if seen != self._seen:
            try:
                self._asked, self._seen = self._read(), seen
            except OSError as exc:
                if exc.errno not in _OF_A_MOMENT:
                    self._asked, self._seen = None, (0, 0)
                    if exc.errno != errno.ENOENT:  # else it has just been removed
                        self._say("%s cannot be read: %s", self._path, exc.strerror)
        asked = self._asked
        return asked if asked is not None and now < asked.until <= now + TRACE_S_MAX else None

    def _read(self) -> Asked | None:
        """Return what the file says. Raises OSError if it cannot be read."""
        fd = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if not _own(fd):
                self._say("%s belongs to another user, or is no file: nothing is traced for it", self._path)
                return None
            found = json.loads(os.read(fd, _CONTROL_BYTES_MAX))
            ratio, slow_ms, until = found["ratio"], found["slow_ms"], found["until"]
            if not (0 <= ratio <= 1 and 0 <= slow_ms <= 3_600_000 and type(slow_ms) is int):
                raise ValueError("out of range")
            asked = Asked(float(ratio), slow_ms, float(until))
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as exc:
            self._say("%s is not what `simm trace start` writes: %s", self._path, type(exc).__name__)
            return None
        finally:
            os.close(fd)
        self._said = False
        return asked

    def _say(self, text: str, *about: object) -> None:
        if not self._said:
            log.warning(text, *about)
        self._said = True


# -- what one process has recorded -------------------------------------------------------------------


class Spool:
    """The files of this process, and the thread that appends to them what its recorder keeps.

    ``folder`` has been checked by :func:`open_folder`. Several clients of a process share one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.recorder = Recorder()
        #: Reentrant, as a signal's handler or a finalizer may end or begin a client while its thread does.
        self._lock = threading.RLock()
        self._writing = threading.Lock()
        self._begin()
        fork.in_child(self._after_fork)

    def _begin(self) -> None:
        #: Whoever wants what is recorded to be written. Twice is once, so an interrupted call can be made again. Weak,
        #: as a client may be dropped that nobody has closed.
        self._users: weakref.WeakSet[object] = weakref.WeakSet()
        self._wake = Wake()
        self._thread: threading.Thread | None = None
        self._name = f"{os.getpid()}-{time.time_ns():016x}"
        self._size = 0
        self._failed = False

    @property
    def path(self) -> Path:
        """The file that it appends to."""
        return self.folder / (self._name + _NEWEST)

    def join(self, user: object) -> None:
        """Write from now on, for one user more. Raises ConfigError; after any exception it is none more."""
        forget_oldest(self.folder)
        try:
            with self._lock:
                self._users.add(user)
            self.go_on()
        except BaseException:  # of a signal's handler
            self.leave(user)
            raise

    def forget(self, user: object) -> None:
        """Take a user for none, in a forked child: without the lock, and nothing is written."""
        self._users.discard(user)

    def has(self, user: object) -> bool:
        """Return whether it writes for this user."""
        return user in self._users

    def go_on(self) -> None:
        """Begin to write, unless it does: threads do not survive a fork."""
        with self._lock:
            if self._thread is not None or not self._users:
                return
            self._wake = Wake()
            self._thread = threading.Thread(target=self._run, args=(self._wake,), name="simm-trace", daemon=True)
            try:
                self._thread.start()
            except RuntimeError as exc:  # no more threads, or the interpreter is ending
                self._thread = None
                log.warning("what is traced is not written: %s", exc)

    def leave(self, user: object) -> None:
        """Write for this user no more; its operations are written before this returns.

        On a disk that hangs they are not, and this takes ``4 * WRITE_S`` seconds: a thread waits for that disk.
        """
        with self._lock:
            self._users.discard(user)
            thread = None
            if not self._users and self._thread is not None:
                thread, self._thread = self._thread, None
                self._wake.set()
        try:
            if thread is None:
                thread = threading.Thread(target=self.write, name="simm-trace-end", daemon=True)
                thread.start()
            thread.join(4 * WRITE_S)
        except RuntimeError:  # no more threads, or this is the thread that writes
            self.write()

    def _run(self, over: Wake) -> None:
        while not over.wait(WRITE_S) and self._needs(over):
            self.write()
        self.write()  # here, as a disk that hangs must not delay who leaves

    def _needs(self, over: Wake) -> bool:
        """Return whether the thread that ``over`` ends is still needed: a call of leave() may have been cut short."""
        with self._lock:
            if self._users and self._wake is over:
                return True
            if self._wake is over:
                self._thread = None
            return False

    def write(self) -> None:
        """Append what the recorder has. Never raises: what cannot be written is lost, and logged once."""
        if not self._writing.acquire(timeout=2 * WRITE_S):
            return  # a disk that hangs
        try:
            lines = self._lines()
            if lines:
                self._append(lines)
        except (OSError, ConfigError) as exc:
            if not self._failed:
                log.warning("traces cannot be written to %s: %s", self.folder, getattr(exc, "strerror", None) or exc)
            self._failed = True
        finally:
            self._writing.release()

    def _lines(self) -> list[bytes]:
        """Return what the recorder has as lines: of the newest operations what two files can hold."""
        found: list[list[bytes]] = []
        room = 2 * FILE_BYTES_MAX
        for operation in reversed(self.recorder.take()):
            found.append([
                json.dumps(event, separators=(",", ":")).encode() + b"\n" for event in events_of(operation, os.getpid())
            ])  # fmt: skip
            room -= sum(map(len, found[-1]))
            if room <= 0:
                break
        return [line for lines in reversed(found) for line in lines]

    def _append(self, lines: list[bytes]) -> None:
        at = 0
        while at < len(lines):
            if not self._size:  # of a forked child's first file too, which has joined nothing
                forget_oldest(self.folder, PROCESSES_MAX - 1)
            if self._size >= FILE_BYTES_MAX:
                with contextlib.suppress(FileNotFoundError):  # whoever cleans /tmp has taken it
                    self.path.replace(self.folder / (self._name + _OLDER))
                self._size = 0
            part: list[bytes] = []
            size = self._size
            while at < len(lines) and (not part or size + len(lines[at]) <= FILE_BYTES_MAX):
                part.append(lines[at])
                size += len(lines[at])
                at += 1
            fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
            with open(fd, "wb") as file:
                try:
                    file.write(b"".join(part))
                    file.flush()
                finally:  # a full disk takes a part of it; and the file may be a new one, if others have removed it
                    self._size = os.fstat(fd).st_size
            if at < len(lines):
                self._size = max(self._size, FILE_BYTES_MAX)

    def _after_fork(self) -> None:
        """Begin anew: what is kept is the parent's, and so is its file."""
        self.recorder.clear()
        self._lock, self._writing = threading.RLock(), threading.Lock()
        users = self._users
        self._begin()
        self._users = users


#: Of this process, by folder. Its keys are strings, so ``setdefault`` is atomic and needs no lock: one that was held
#: during the I/O of a folder would keep others from closing their clients, and from forking.
_SPOOLS: Final[dict[str, Spool]] = {}


def spool_in(path: str | Path) -> Spool:
    """Return this process's spool in a folder. Raises ConfigError. Takes as long as the folder's file system does."""
    folder = Path(path)
    spool = _SPOOLS.get(str(folder))
    return spool or _SPOOLS.setdefault(str(folder), Spool(open_folder(folder)))


def files_in(folder: Path) -> list[Path]:
    """Return the files with spans, the oldest first. What has another name, or is no regular file, is none."""
    return _found_in(folder)[0]


def _found_in(folder: Path) -> tuple[list[Path], int]:
    """Return the files with spans, the oldest first, and how much else has such a name: links, pipes, folders."""
    found = []
    others = 0
    with _in_words(folder), contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if _SPANS.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    about = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(about.st_mode):
                        found.append((about.st_mtime_ns, entry.path))
                    else:
                        others += 1
    return [Path(path) for _, path in sorted(found)], others


def forget_oldest(folder: Path, keep: int = PROCESSES_MAX) -> int:
    """Remove the oldest files beyond those of so many processes; return how many were removed. Raises ConfigError."""
    check_folder(folder)
    files = files_in(folder)
    over = files[: max(0, len(files) - 2 * keep)]
    for path in over:
        with contextlib.suppress(OSError):
            path.unlink()
    return len(over)


class Collected(NamedTuple):
    """What the files of a folder have: spans, lines that are none, and how many spans were left out as the oldest.

    ``refused``: files that are of other users or unreadable, links and the like among them.
    """

    events: list[Event]
    bad: int
    refused: int
    left_out: int


def collect(folder: Path, *, only: Callable[[Path], bool] = lambda _: True) -> Collected:
    """Return the newest spans of all files, ``EVENTS_MAX`` at most, in no order.

    The clock of spans starts again with the host. So a file's newest span counts as of when the file was written, and
    the others as so much older. Memory: what is returned, and the spans of a file. Raises ConfigError if the folder is
    another user's.
    """
    check_folder(folder)
    #: When each was recorded, microseconds since 1970.
    events: list[tuple[float, Event]] = []
    files, refused = _found_in(folder)
    bad = left_out = 0
    for path in files:
        if not only(path):
            continue
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            refused += 1
            continue
        with open(fd, "rb") as file:
            if not _own(fd):
                refused += 1
                continue
            written = os.fstat(fd).st_mtime_ns / 1000
            found, wrong = read_lines(_lines(file))
        bad += wrong
        boot = written - max((event["ts"] for event in found), default=0.0)
        events += ((boot + event["ts"], event) for event in found)
        if (over := len(events) - EVENTS_MAX) > 0:
            events.sort(key=itemgetter(0))
            del events[:over]
            left_out += over
    return Collected([event for _, event in events], bad, refused, left_out)


def _lines(file: Any) -> Iterator[bytes]:
    """Yield lines, of which none is longer than is looked at; and no more than a file of ours has."""
    left = 2 * FILE_BYTES_MAX
    while left > 0:
        line = file.readline(LINE_BYTES_MAX + 1)
        if not line:
            return
        left -= len(line)
        if len(line) > LINE_BYTES_MAX:
            while left > 0 and line and not line.endswith(b"\n"):
                line = file.readline(LINE_BYTES_MAX)
                left -= len(line)
            yield b""
        else:
            yield line

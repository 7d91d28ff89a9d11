"""Shared-memory segments: their owners, their readers, and who may write or remove one.

**An attach must never unlink.** ``multiprocessing.shared_memory.SharedMemory`` removes the owner's segment in two ways:
when its ``mmap`` fails during an attach, and, up to CPython 3.12, when an attaching process exits, through the resource
tracker. Hence two types: only `OwnedSegment` has ``unlink``, and `AttachedSegment` opens the file itself.
`OwnedSegment` uses ``SharedMemory`` for the exclusive creation alone, closes it at once, and has the tracker forget it.

**Two locks.** The supervisor owns a segment for life. It forks the worker that alone writes the segment, and that may
die earlier. So there are an *owner* lock and a *writer* lock (``host/file_locks.py``) on bytes 0 and 1. A segment is a
leftover when neither is held. Each lock has an open file of its own that is never mapped, and the forked child gives up
its copies with `OwnedSegment.release_in_child`; otherwise a segment would look owned until its last child exits.

**Creation against clean-up.** Between its exclusive creation and the lock, a segment is visible and unlocked, and
another process's `remove_leftovers` may take it for a leftover. Both follow one rule: *only a process that has the
owner lock, and then still finds the name leading to the inode that it locked, decides over it.* A remover unlinks only
by that rule. A creator that loses finds its inode without a name and starts again, with nothing stored yet. If a
remover lets two creators of one name interleave, one gets the lock and the other an error.

**SIGBUS.** tmpfs hands out sizes that it cannot back: ``ftruncate`` to 1 TiB succeeds, and the first store beyond the
limit kills the process. Creation therefore compares the size with what /dev/shm, the cgroup and the machine have left.
`MappedFile.populate` faults pages in with ``MADV_POPULATE_WRITE``, which reports a full tmpfs (EFAULT) instead of a
signal; before Linux 5.14 ``posix_fallocate`` does so (ENOSPC). A cgroup limit reached meanwhile still calls the OOM
killer: no system call can ask in advance.

Limitations: Linux only. Every process that may write the file may lock it, so the locks protect against mistakes and
deaths, not against a hostile process of the same user. Clients that only read open with ``writable=False``.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pwd
import re
import stat
import sys
import time
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from typing import Any

from simm.errors import SegmentError, UsageError
from simm.host import memory
from simm.host.file_locks import held, leads_to, try_lock, unlock
from simm.host.mapped_file import MappedFile
from simm.host.memory import mib
from simm.host.pages import keep_from_forks

_SYSTEM_SHM_DIR = "/dev/shm"
#: Where segments are files. Another tmpfs works as well; tests point it at one of their own.
SHM_DIR = _SYSTEM_SHM_DIR

#: How long a creator waits for a remover, or another creator of the same name, that locked its new file.
CREATE_WAIT_S = 5.0

_OWNER_BYTE = 0
_WRITER_BYTE = 1


# ---------------------------------------------------------------------------------------------- names


def _path(name: str) -> str:
    """Return a segment's path. Raise UsageError for names that could lead out of the directory."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,199}", name):
        raise UsageError(f"{name!r} is no segment name: 1 to 200 letters, digits, '_', '-', '.', no leading '.' or '-'")
    return f"{SHM_DIR}/{name}"


def data_name(name: str) -> str:
    """Return the name of the file with an arena's data, by that of its metadata."""
    return f"{name}.data"


def events_name(name: str) -> str:
    """Return the name of the file with an arena's ring of events, by that of its metadata."""
    return f"{name}.events"


def _user(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


def _whose(path: str) -> str:
    try:
        state = os.stat(path, follow_symlinks=False)
    except OSError:
        return "was just removed"
    return f"belongs to {_user(state.st_uid)}, mode {stat.S_IMODE(state.st_mode):#o},"


def _open(path: str, *, writable: bool) -> int:
    """Open a file of SHM_DIR. Follow no link, and do not wait for the writer of a FIFO."""
    mode = os.O_RDWR if writable else os.O_RDONLY
    return os.open(path, mode | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)


# ---------------------------------------------------------------------------------------------- locks


def is_locked(name: str, first: int = _OWNER_BYTE, count: int = 2) -> bool:
    """Return True if a live process owns or writes the segment, False if there is none of this name."""
    try:
        fd = _open(_path(name), writable=False)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise SegmentError(f"cannot look at segment {name}: {error.strerror}") from error
    try:
        return held(fd, first, count)
    finally:
        os.close(fd)


# -------------------------------------------------------------------------------------- owned segments


def _create_file(name: str, size: int) -> None:
    """Create the file exclusively, with mode 0600, `size` bytes and no pages. Raise FileExistsError if it exists."""
    if SHM_DIR != _SYSTEM_SHM_DIR:  # shm_open knows one directory only
        fd = os.open(_path(name), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, size)
        except OSError:
            os.unlink(_path(name))
            raise
        finally:
            os.close(fd)
        return
    if sys.version_info >= (3, 13):
        SharedMemory(name, create=True, size=size, track=False).close()
    else:
        try:
            made = SharedMemory(name, create=True, size=size)
        except FileExistsError:
            raise
        except OSError as error:
            # Registration comes last, and earlier failures remove the file. With a broken pipe, or with the file
            # present, only the tracker (a helper process) could not be started, and the file is complete.
            if not isinstance(error, BrokenPipeError) and not os.path.exists(_path(name)):
                raise
        else:
            with contextlib.suppress(OSError):
                resource_tracker.unregister(f"/{name}", "shared_memory")
            made.close()


def _set_access(name: str, fd: int, mode: int, group: int | None) -> None:
    try:
        if group is not None:
            os.fchown(fd, -1, group)
        os.fchmod(fd, mode)
    except OSError as error:
        raise SegmentError(
            f"cannot give segment {name} mode {mode:#o} and group {group}: {error.strerror}; "
            "choose a group that this user is a member of"
        ) from error


class OwnedSegment(MappedFile):
    """A segment that this process created (or adopted), owns by lock, and may remove.

    `size` is in bytes; `fd` is read-write; `mm` and `buf` map all of it read-write. A forked child inherits the mapping
    and `fd`, but not the ownership: it calls `release_in_child`.
    """

    def __init__(self, name: str, size: int, fd: int, owner_fd: int) -> None:
        """Internal, for `create` and `adopt`. Takes both descriptors over unless it raises."""
        super().__init__(name, size, fd)
        self._owner_fd = owner_fd
        self._owner_pid = os.getpid()
        self._writer_fd = -1
        self._writer_pid = 0
        self._unlinked = False

    @classmethod
    def create(
        cls, name: str, size: int, *, mode: int = 0o600, group: int | None = None, moved: bool = False
    ) -> OwnedSegment:
        """Create a segment of `size` zero bytes, none faulted in yet, and take its owner lock.

        mode: 0600, or 0640 or 0660 to let the file's group (`group`, a gid) attach. moved: the segment takes no more
        memory than another file gives back meanwhile, so that only the room in /dev/shm counts.

        Raise UsageError for bad arguments; SegmentError if the name is taken, memory is short (with the numbers and the
        remedy), or the group is not allowed. Nothing is left behind then.
        """
        path = _path(name)
        if size <= 0:
            raise UsageError(f"a segment of {size} bytes cannot be")
        if mode & ~0o660 or mode & 0o600 != 0o600:
            raise UsageError(f"mode {mode:#o}: a segment is 0600, 0640 or 0660, never open to others")
        for at_hand, what, remedy in memory.segment_bounds(SHM_DIR)[: 1 if moved else None]:
            if size > at_hand:
                raise SegmentError(
                    f"segment {name} needs {mib(size)}, but only {mib(at_hand)} {what}; "
                    f"{remedy}, or configure a smaller arena"
                )
        with contextlib.ExitStack() as undo:
            owner_fd = cls._create_locked(name, path, size)
            undo.callback(os.close, owner_fd)
            undo.callback(os.unlink, path)  # runs first, so that the name goes while we have the lock
            _set_access(name, owner_fd, mode, group)
            fd = cls._reopen(name)
            undo.callback(os.close, fd)
            segment = cls(name, size, fd, owner_fd)
            undo.pop_all()
        return segment

    @staticmethod
    def _reopen(name: str) -> int:
        try:
            return _open(_path(name), writable=True)
        except OSError as error:
            raise SegmentError(f"cannot open segment {name}: {error.strerror}") from error

    @staticmethod
    def _create_locked(name: str, path: str, size: int) -> int:
        """Create the file and lock it, by the module's rule. Return the descriptor with the owner lock."""
        deadline = time.monotonic() + CREATE_WAIT_S
        while True:
            try:
                _create_file(name, size)
            except FileExistsError as error:
                state = "in use by a live process" if is_locked(name) else "a leftover of a dead owner"
                raise SegmentError(
                    f"segment {name} exists and is {state}; end that server, remove leftovers, or use another name"
                ) from error
            except OSError as error:
                raise SegmentError(f"cannot create segment {name} of {mib(size)}: {error.strerror}") from error
            try:
                fd = _open(path, writable=True)
            except FileNotFoundError:  # removed before the open
                if time.monotonic() > deadline:
                    raise SegmentError(f"segment {name} is removed as often as it is created") from None
                continue
            except OSError as error:
                os.unlink(path)
                raise SegmentError(f"cannot open segment {name}: {error.strerror}") from error
            while not try_lock(fd, _OWNER_BYTE):
                if time.monotonic() > deadline:
                    os.close(fd)
                    raise SegmentError(f"segment {name} was taken by another process while it was being created")
                time.sleep(0.001)  # the remover holds it only to unlink it
            if leads_to(path, fd) and os.fstat(fd).st_size == size:
                return fd
            os.close(fd)
            if time.monotonic() > deadline:
                raise SegmentError(f"segment {name} is removed as often as it is created")

    @classmethod
    def adopt(cls, name: str) -> OwnedSegment:
        """Take over an existing segment whose owner and writer are gone, as it is (warm start).

        Adopt before `remove_leftovers`, which would remove it. Raise SegmentError if it is missing, foreign, or in use.
        """
        with AttachedSegment.open(name, writable=True) as attached, contextlib.ExitStack() as undo:
            if attached.owner_uid != os.geteuid():
                raise SegmentError(f"segment {name} belongs to {_user(attached.owner_uid)}; only they can adopt it")
            owner_fd = os.dup(attached.fd)  # this open file gets the lock and is never mapped
            undo.callback(os.close, owner_fd)
            # Both bytes, so that no worker of the old owner still writes; then release the writer's.
            if not try_lock(owner_fd, _OWNER_BYTE, 2):
                raise SegmentError(f"segment {name} is still in use by a live process; end it first")
            unlock(owner_fd, _WRITER_BYTE)
            if not leads_to(_path(name), owner_fd):
                raise SegmentError(f"segment {name} was removed while it was being adopted")
            fd = cls._reopen(name)
            undo.callback(os.close, fd)
            segment = cls(name, attached.size, fd, owner_fd)
            undo.pop_all()
        return segment

    def __repr__(self) -> str:
        role = "owner" if self.is_owner else "no owner"
        return f"<OwnedSegment {self.name} {self.size} bytes, {role}{', writer' if self.is_writer else ''}>"

    @property
    def is_owner(self) -> bool:
        """Return True if this process holds the owner lock. A forked child with the descriptor does not."""
        return self._owner_fd >= 0 and self._owner_pid == os.getpid()

    @property
    def is_writer(self) -> bool:
        """Return True if this process holds the writer lock."""
        return self._writer_fd >= 0 and self._writer_pid == os.getpid()

    def set_access(self, *, mode: int, group: int | None) -> None:
        """Change mode and group, as in `create`. Raise SegmentError."""
        _set_access(self.name, self.fd, mode, group)

    def bounds(self) -> list[memory.Bound]:
        """Return every bound on the memory of a segment."""
        return memory.segment_bounds(SHM_DIR)

    # -- locks

    def lock_writer(self) -> None:
        """Take the writer lock, as a worker does before its first store, for life. No effect while it has it.

        Raise SegmentError if another process has it, or the segment was removed.
        """
        if not self.is_writer:
            self._drop("_writer_fd")
            self._writer_fd = self._locked_fd(_WRITER_BYTE, "has another writer that is still alive")
            self._writer_pid = os.getpid()

    def _locked_fd(self, byte: int, refusal: str) -> int:
        """Lock a byte through an open file of its own, which is never mapped."""
        path = _path(self.name)
        try:
            fd = _open(path, writable=True)
        except OSError as error:
            raise SegmentError(f"cannot lock segment {self.name}: {error.strerror}") from error
        try:
            if not try_lock(fd, byte):
                raise SegmentError(f"segment {self.name} {refusal}")
            if self.fd < 0 or not os.path.samestat(os.fstat(fd), os.fstat(self.fd)) or not leads_to(path, fd):
                raise SegmentError(f"segment {self.name} was closed, removed or replaced; there is nothing to lock")
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _drop(self, which: str) -> None:
        fd = getattr(self, which)
        if fd >= 0:
            setattr(self, which, -1)
            os.close(fd)

    def unlock(self) -> None:
        """Release both locks. The segment is then a leftover."""
        self._drop("_writer_fd")
        self._drop("_owner_fd")

    def release_in_child(self) -> None:
        """Drop the parent's lock descriptors in a forked child. The mapping stays.

        The parent's locks then end with the parent, not with its last child. The child can take the writer lock for
        itself; it can neither unlink nor own. UsageError in the owning process.
        """
        if self.is_owner or self.is_writer:
            raise UsageError("release_in_child() is for a forked child, and this process holds the locks itself")
        self._drop("_owner_fd")
        self._drop("_writer_fd")

    # -- removal

    def unlink(self) -> None:
        """Remove the name. Maps stay until they are closed. The caller stores *closed* in the header first.

        No effect in a forked child, or the second time. Raise SegmentError if another process has the writer lock (end
        the worker first), UsageError after `close` or `unlock`.
        """
        if self._unlinked or self._owner_pid != os.getpid():
            return
        if not self.is_owner:
            raise UsageError(f"segment {self.name} is closed or unlocked; unlink() comes before that")
        path = _path(self.name)
        if leads_to(path, self.fd):
            self.lock_writer()
            os.unlink(path)
        self._unlinked = True

    def close(self) -> None:
        """Drop locks, descriptor and mapping. The name stays: without `unlink` the segment becomes a leftover.

        A mapping with exported views stays until they are gone. No effect the second time.
        """
        self.unlock()
        super().close()


# ----------------------------------------------------------------------------------- attached segments

class AttachedSegment:
    """A segment that another process owns; this class cannot remove it.

    `size` is in bytes, at the time of opening. The caller compares `owner_uid` with the uid that it expects. `file` is
    device and inode, which no other file has as long as this one is open or mapped.
    """

    def __init__(self, name: str, fd: int, *, writable: bool) -> None:
        """Internal: see `open`."""
        state = os.fstat(fd)
        self.name = name
        self.fd = fd
        self.size = state.st_size
        self.owner_uid = state.st_uid
        self.file = state.st_dev, state.st_ino
        self.writable = writable
        self._maps: list[mmap.mmap] = []

    @classmethod
    def open(cls, name: str, *, writable: bool = False) -> AttachedSegment:
        """Open a segment by name without mapping it. With writable=False the kernel refuses every store.

        Raise SegmentError if there is none, it is not a regular file, or access is refused.
        """
        try:
            path = _path(name)
        except UsageError as error:
            raise SegmentError(f"{error}; refusing to open it") from error
        try:
            fd = _open(path, writable=writable)
        except FileNotFoundError as error:
            raise SegmentError(
                f"there is no segment {name} in {SHM_DIR}; its server has ended, or runs in a container whose "
                "/dev/shm is not shared with this process (docker: --ipc=host)"
            ) from error
        except PermissionError as error:
            raise SegmentError(
                f"segment {name} {_whose(path)} and refuses {'writing' if writable else 'reading'}; "
                "run as that user, or start the server with a group that you are in"
            ) from error
        except OSError as error:  # ELOOP for a symbolic link, ENXIO for a socket, EISDIR...
            raise SegmentError(f"{path} is no segment: {error.strerror}") from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise SegmentError(f"{path} is no segment: not a regular file")
        return cls(name, fd, writable=writable)

    @classmethod
    def from_fd(cls, name: str, fd: int) -> AttachedSegment:
        """Return the segment that another process has passed as a descriptor, for reading and writing.

        The descriptor stays the caller's. Raise SegmentError for a file that is no segment.
        """
        try:
            kept = os.dup(fd)
        except OSError as error:
            raise SegmentError(f"cannot use the descriptor of segment {name}: {error.strerror}") from error
        if not stat.S_ISREG(os.fstat(kept).st_mode):
            os.close(kept)
            raise SegmentError(f"the descriptor of segment {name} is no file")
        return cls(name, kept, writable=True)

    def __repr__(self) -> str:
        state = "closed" if self.fd < 0 else f"{len(self._maps)} maps"
        return f"<AttachedSegment {self.name} {self.size} bytes, {state}>"

    def map(self, offset: int, length: int, *, writable: bool, dontfork: bool = True) -> mmap.mmap:
        """Map bytes offset .. offset+length, shared and readable. The offset must be page-aligned.

        writable: also for stores, if the segment was opened so. dontfork: forked children do not inherit the map;
        touching it there is a SIGSEGV. Raise UsageError for a bad range, SegmentError if the segment is shorter by now
        or the address space is exhausted.
        """
        if self.fd < 0:
            raise UsageError(f"segment {self.name} is closed")
        if writable and not self.writable:
            raise UsageError(f"segment {self.name} was opened read-only")
        if offset < 0 or length <= 0 or offset % mmap.ALLOCATIONGRANULARITY:
            raise UsageError(f"cannot map {length} bytes at offset {offset}: the offset must be page-aligned")
        actual = os.fstat(self.fd).st_size
        if offset + length > actual:
            raise SegmentError(f"segment {self.name} has {actual} bytes, too few for {length} at offset {offset}")
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        try:
            mm = mmap.mmap(self.fd, length, flags=mmap.MAP_SHARED, prot=protection, offset=offset)
        except (OSError, ValueError) as error:
            raise SegmentError(
                f"cannot map {mib(length)} of segment {self.name}: {error}; see ulimit -v and vm.max_map_count"
            ) from error
        if dontfork:
            number = keep_from_forks(mm)
            if number:
                mm.close()
                raise SegmentError(f"cannot keep a map of segment {self.name} from forks: {os.strerror(number)}")
        self._maps.append(mm)
        return mm

    def close(self) -> None:
        """Close the descriptor and the maps. A map with exported views is closed with them. Never raise."""
        maps, self._maps = self._maps, []
        for mm in maps:
            with contextlib.suppress(BufferError):
                mm.close()
        fd, self.fd = self.fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)

    def __enter__(self) -> AttachedSegment:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


# ------------------------------------------------------------------------------------------- leftovers


def _candidates(prefix: str, only: Callable[[str], bool] | None) -> list[str]:
    """Return the names under `prefix` that are regular files of this user and pass `only`."""
    if not prefix:
        raise UsageError("an empty prefix would name every segment of this user")
    found = []
    try:
        with os.scandir(SHM_DIR) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    state = entry.stat(follow_symlinks=False)
                    mine = stat.S_ISREG(state.st_mode) and state.st_uid == os.geteuid()
                    if mine and entry.name.startswith(prefix) and (only is None or only(entry.name)):
                        found.append(entry.name)
    except FileNotFoundError:
        return []
    return sorted(found)


def leftovers(prefix: str, only: Callable[[str], bool] | None = None) -> list[str]:
    """Return the names of this user's segments under `prefix` without owner and writer. Change nothing.

    `only` selects among the names, as other segments may share the prefix.
    """
    found = []
    for name in _candidates(prefix, only):
        with contextlib.suppress(SegmentError, UsageError):
            if not is_locked(name) and os.path.exists(_path(name)):
                found.append(name)
    return found


def without_owner(prefix: str, only: Callable[[str], bool] | None = None) -> list[str]:
    """Return the names of this user's segments under `prefix` that have a writer, but no owner. Change nothing.

    Such a writer's owner has died, and it is about to end. `only` is as for `leftovers`. O(entries of /dev/shm).
    """
    found = []
    for name in _candidates(prefix, only):
        with contextlib.suppress(SegmentError, UsageError):
            if is_locked(name, _WRITER_BYTE, 1) and not is_locked(name, _OWNER_BYTE, 1):
                found.append(name)
    return found


def remove_leftovers(
    prefix: str, *, only: Callable[[str], bool] | None = None, before_unlink: Callable[[str], None] | None = None
) -> list[str]:
    """Remove this user's segments under `prefix` whose owner and writer are gone; return their names.

    `only` is as for `leftovers`. `before_unlink` gets each name, under both locks, to store *closed* for readers that
    still map the segment; it also gets half-made files. If it raises, that segment stays and the exception propagates.
    Safe against concurrent creators and removers. O(entries of /dev/shm).
    """
    removed = []
    for name in _candidates(prefix, only):
        try:
            path = _path(name)
            fd = _open(path, writable=True)
        except (OSError, UsageError):
            continue  # removed already, or not a file of SiMM
        try:
            if os.fstat(fd).st_uid != os.geteuid() or not try_lock(fd, _OWNER_BYTE, 2) or not leads_to(path, fd):
                continue
            if before_unlink is not None:
                before_unlink(name)
            os.unlink(path)
            removed.append(name)
        finally:
            os.close(fd)
    return removed

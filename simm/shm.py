"""Shared-memory segments: who owns one, who merely maps it, and who may write or remove it.

What can go wrong, and what we chose
====================================

**An attach must never unlink.** ``multiprocessing.shared_memory.SharedMemory`` unlinks the owner's
segment in two ways that have nothing to do with the owner. When its ``mmap`` fails during an attach it
removes the name, and up to CPython 3.12 every attach registers with the resource tracker, which removes
the name when the attaching process exits. Hence two types: `OwnedSegment` alone has ``unlink``, and
`AttachedSegment` opens the file by itself. `OwnedSegment` uses ``SharedMemory`` for the one thing it does
well, the exclusive creation, closes it at once, and tells the tracker to forget it (3.13: never tells it).

**Two locks.** The supervisor owns a segment for life, and forks the worker that alone writes it, and that
may die while the supervisor lives. So there are an *owner* lock and a *writer* lock, and a segment is a
leftover when neither is held. Both are open-file-description locks (``F_OFD_SETLK``) on bytes 0 and 1:

* The kernel drops them when the last reference to the open file goes, so ``kill -9`` releases them.
* They belong to the open file, not to the process. POSIX locks would vanish as soon as any code in the
  process closed any descriptor of the file; these do not.
* ``F_OFD_GETLK`` asks without taking, on a read-only descriptor too. Testing a ``flock`` means taking it
  for a moment, and a test at the wrong moment makes the real owner fail.
* They are inherited through ``fork``, and a *mapping* keeps its open file alive as well. So each lock has
  an open file of its own that is never mapped, and the forked child gives up its copies with
  `OwnedSegment.release_in_child`; otherwise a segment would look owned until its last child is gone.

The bytes locked are only numbers. Nothing stored there is touched, and memory access ignores locks.

**Creation against clean-up.** Between the exclusive creation and the lock a segment is visible and
unlocked, and another process's `remove_leftovers` may take it for a leftover. Both sides follow one rule:
*whoever has the owner lock, and then still finds the name leading to the inode that it locked, decides over
it.* The remover unlinks only by that rule. The creator that loses finds its inode without a name and
starts again, with nothing lost, as nothing was stored yet. No lock file, no directory lock, no temporary
names; the cost is one more stat per creation and per removal. It follows also that when two creators of
one name are mixed up by a remover between them, one of them gets the lock and the other an error.

**SIGBUS.** tmpfs hands out sizes it cannot back: ``ftruncate`` of 1 TiB succeeds, and the first store
beyond the limit kills the process. So creation compares the size with what /dev/shm, the cgroup and the
machine have left, and `OwnedSegment.populate` faults pages in with ``MADV_POPULATE_WRITE``, which reports a
full tmpfs (EFAULT) where a store would be a signal. On kernels before 5.14 ``posix_fallocate`` does so
(ENOSPC). A cgroup limit reached in between still means the OOM killer; no call can ask in advance.

An `OwnedSegment`'s map *is* inherited, but its page tables are not: the kernel leaves a shared file
mapping to be faulted again. The worker populates what it writes once more, which finds the pages there.

LIMITATIONS. Linux only. Everyone who may write the file may lock it, so the locks protect against mistakes
and deaths, not against a hostile process of the same user. A descriptor opened for reading and writing can
map read-write whatever the first map said; clients that only read should open with ``writable=False``.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import pwd
import re
import stat
import struct
import sys
import time
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from typing import Any

from simm import topology
from simm.constants import HUGE_PAGE_BYTES, PAGE_BYTES
from simm.errors import CorruptionError, SegmentError, UsageError
from simm.pages import address_of, ask_for_huge_pages, keep_from_forks, page_range, populate_write
from simm.topology import memory_limit_bytes

_SYSTEM_SHM_DIR = "/dev/shm"
#: Where segments are files. Another tmpfs works as well; tests point it at one of their own.
SHM_DIR = _SYSTEM_SHM_DIR

#: How long a creator waits for a remover, or another creator of the same name, that locked its new file.
CREATE_WAIT_S = 5.0
#: Share of the memory at hand that a default arena takes.
DEFAULT_ARENA_PERCENT = 80

_OWNER_BYTE = 0
_WRITER_BYTE = 1
#: struct flock: type, whence, (4 bytes padding), start, length, pid (0 for OFD locks), tail padding.
_FLOCK = struct.Struct("@hhqqi4x")
assert _FLOCK.size == 32
_F_OFD_GETLK = getattr(fcntl, "F_OFD_GETLK", 36)
_F_OFD_SETLK = getattr(fcntl, "F_OFD_SETLK", 37)



# ---------------------------------------------------------------------------------------------- names


def _path(name: str) -> str:
    """Path of a segment. UsageError for names that could lead out of the directory."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,199}", name):
        raise UsageError(f"{name!r} is no segment name: 1 to 200 letters, digits, '_', '-', '.', no leading '.' or '-'")
    return f"{SHM_DIR}/{name}"


def _mib(count: int) -> str:
    return f"{count / (1 << 20):,.1f} MiB"


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


def _same_file(fd: int, path: str) -> bool:
    """Whether `path` still leads to the file behind `fd`."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _open(path: str, *, writable: bool) -> int:
    """Open a file of SHM_DIR without following links or waiting for the writer of a FIFO."""
    mode = os.O_RDWR if writable else os.O_RDONLY
    return os.open(path, mode | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)


# ---------------------------------------------------------------------------------------------- locks


def _try_lock(fd: int, first: int, count: int = 1) -> bool:
    """Take bytes first .. first+count-1 for this open file, all or none. False when someone has one of them."""
    try:
        fcntl.fcntl(fd, _F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, first, count, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise SegmentError(f"cannot lock a segment: {error.strerror}; SiMM needs Linux 3.15 or newer") from error
    return True


def _unlock(fd: int, byte: int) -> None:
    fcntl.fcntl(fd, _F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, byte, 1, 0))


def _held(fd: int, first: int, count: int = 1) -> bool:
    """Whether another open file holds a lock on these bytes. Takes nothing."""
    answer = fcntl.fcntl(fd, _F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, first, count, 0))
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def _held_by_name(name: str, first: int, count: int) -> bool:
    try:
        fd = _open(_path(name), writable=False)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise SegmentError(f"cannot look at segment {name}: {error.strerror}") from error
    try:
        return _held(fd, first, count)
    finally:
        os.close(fd)


def is_locked(name: str) -> bool:
    """Whether some live process owns or writes the segment. False when there is no such segment."""
    return _held_by_name(name, _OWNER_BYTE, 2)


def owner_locked(name: str) -> bool:
    """Whether some live process holds the owner lock of the segment."""
    return _held_by_name(name, _OWNER_BYTE, 1)


def writer_locked(name: str) -> bool:
    """Whether some live process holds the writer lock of the segment."""
    return _held_by_name(name, _WRITER_BYTE, 1)


# ----------------------------------------------------------------------------- memory that may be used


def shm_free_bytes() -> int:
    """Bytes that the file system of SHM_DIR can still take. SegmentError when there is no such directory."""
    try:
        state = os.statvfs(SHM_DIR)
    except OSError as error:
        raise SegmentError(
            f"{SHM_DIR}: {error.strerror}; mount a tmpfs there (kubernetes: an emptyDir of medium Memory)"
        ) from error
    return state.f_bavail * state.f_frsize


def _memory_at_hand() -> list[tuple[int, str, str]]:
    """(bytes, what allows them, how to get more) for every bound that a segment must stay under.

    Swap does not count: a cache that is swapped out is slower than the computation it replaces.
    """
    bounds = [
        (shm_free_bytes(), f"are free in {SHM_DIR}", f"mount -o remount,size=... {SHM_DIR} (docker: --shm-size)"),
    ]
    limit = memory_limit_bytes()
    if limit is not None:
        bounds.append((limit, "are left of the memory cgroup's limit", "raise the container's memory limit"))
    available = topology.meminfo_bytes("MemAvailable")
    if available is not None:
        bounds.append((available, "of memory are available", "end other programs"))
    return bounds


def default_arena_bytes(workers: int = 1) -> int:
    """Size of an arena when none is configured, for each of `workers` workers on this host.

    80 % of what /dev/shm, the memory cgroup and the machine all still have, shared out, rounded down to 2 MiB.
    SegmentError when not even 2 MiB are left for each.
    """
    if workers < 1:
        raise UsageError(f"workers={workers}: at least one is needed")
    least, what, remedy = min(_memory_at_hand())
    share = least * DEFAULT_ARENA_PERCENT // 100 // workers // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if share == 0:
        raise SegmentError(f"only {_mib(least)} {what}, too little for {workers} arena(s); {remedy}")
    return share


# -------------------------------------------------------------------------------------- owned segments


def _create_file(name: str, size: int) -> None:
    """Make the file, exclusively, 0600, `size` bytes and no page of them. FileExistsError when it is there."""
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
            # Registration comes last, and earlier failures remove the file. So if the pipe is broken, or the file
            # is there, then it is complete and only the tracker could not be started (it is a helper process, and
            # sys.executable may not be runnable here).
            if not isinstance(error, BrokenPipeError) and not os.path.exists(_path(name)):
                raise
        else:
            with contextlib.suppress(OSError):
                resource_tracker.unregister(f"/{name}", "shared_memory")
            made.close()


class OwnedSegment:
    """A segment this process made (or took over), owns by lock, and may remove.

    `name`; `size` in bytes; `fd` read-write; `mm` and `buf` the whole of it, mapped read-write. The mapping and
    `fd` are inherited by forked children, ownership is not: a child calls `release_in_child`.
    """

    def __init__(self, name: str, size: int, fd: int, owner_fd: int) -> None:
        """Internal: `create` and `adopt` make segments. Takes both descriptors over unless it raises."""
        try:
            self.mm = mmap.mmap(fd, size)
        except (OSError, ValueError) as error:
            raise SegmentError(f"cannot map {_mib(size)} of segment {name}: {error}; see ulimit -v") from error
        self.buf = memoryview(self.mm)
        self.name = name
        self.size = size
        self.fd = fd
        self._owner_fd = owner_fd
        self._owner_pid = os.getpid()
        self._writer_fd = -1
        self._writer_pid = 0
        self._unlinked = False

    @classmethod
    def create(cls, name: str, size: int, *, mode: int = 0o600, group: int | None = None) -> OwnedSegment:
        """Make a segment of `size` bytes of zeros, none faulted in yet, and take its owner lock.

        mode: 0600, or 0660 to let the file's group (`group`, a gid, when given) attach for writing.

        Raises UsageError for bad arguments; SegmentError when the name is taken, memory would not do (with
        the numbers and the remedy), or the group may not be given. Nothing is left behind then.
        """
        path = _path(name)
        if size <= 0:
            raise UsageError(f"a segment of {size} bytes cannot be")
        if mode & ~0o660 or mode & 0o600 != 0o600:
            raise UsageError(f"mode {mode:#o}: a segment is 0600, 0640 or 0660, never open to others")
        for at_hand, what, remedy in _memory_at_hand():
            if size > at_hand:
                raise SegmentError(
                    f"segment {name} needs {_mib(size)}, but only {_mib(at_hand)} {what}; "
                    f"{remedy}, or configure a smaller arena"
                )
        with contextlib.ExitStack() as undo:
            owner_fd = cls._create_locked(name, path, size)
            undo.callback(os.close, owner_fd)
            undo.callback(os.unlink, path)  # runs first, so that the name goes while we have the lock
            try:
                if group is not None:
                    os.fchown(owner_fd, -1, group)
                os.fchmod(owner_fd, mode)
            except OSError as error:
                raise SegmentError(
                    f"cannot give segment {name} mode {mode:#o} and group {group}: {error.strerror}; "
                    "choose a group that this user is a member of"
                ) from error
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
        """Create the file until one is ours by lock (see the essay). Returns the descriptor with the owner lock."""
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
                raise SegmentError(f"cannot create segment {name} of {_mib(size)}: {error.strerror}") from error
            try:
                fd = _open(path, writable=True)
            except FileNotFoundError:  # a remover was faster
                if time.monotonic() > deadline:
                    raise SegmentError(f"segment {name} is removed as often as it is created") from None
                continue
            except OSError as error:
                os.unlink(path)
                raise SegmentError(f"cannot open segment {name}: {error.strerror}") from error
            while not _try_lock(fd, _OWNER_BYTE):
                if time.monotonic() > deadline:
                    os.close(fd)
                    raise SegmentError(f"segment {name} was taken by another process while it was being created")
                time.sleep(0.001)  # the remover holds it only to unlink it
            if _same_file(fd, path) and os.fstat(fd).st_size == size:
                return fd
            os.close(fd)
            if time.monotonic() > deadline:
                raise SegmentError(f"segment {name} is removed as often as it is created")

    @classmethod
    def adopt(cls, name: str) -> OwnedSegment:
        """Own an existing segment whose owner and writer are gone, as it is (warm start).

        Adopt before `remove_leftovers`, to which such a segment is a leftover. Raises SegmentError when it is
        missing, foreign, or still in use.
        """
        with AttachedSegment.open(name, writable=True) as attached, contextlib.ExitStack() as undo:
            if attached.owner_uid != os.geteuid():
                raise SegmentError(f"segment {name} belongs to {_user(attached.owner_uid)}; only they can adopt it")
            owner_fd = os.dup(attached.fd)  # the open file that gets the lock, which nothing maps
            undo.callback(os.close, owner_fd)
            # Both bytes, so that no worker of the old owner still writes; then the writer's is given back.
            if not _try_lock(owner_fd, _OWNER_BYTE, 2):
                raise SegmentError(f"segment {name} is still in use by a live process; end it first")
            _unlock(owner_fd, _WRITER_BYTE)
            if not _same_file(owner_fd, _path(name)):
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
        """Whether this very process holds the owner lock (a forked child does not, even with the descriptor)."""
        return self._owner_fd >= 0 and self._owner_pid == os.getpid()

    @property
    def is_writer(self) -> bool:
        """Whether this very process holds the writer lock."""
        return self._writer_fd >= 0 and self._writer_pid == os.getpid()

    def check(self) -> None:
        """Raise CorruptionError unless the name still leads to this segment, at its size, under our lock.

        An administrator's ``rm``, or logind's ``RemoveIPC=yes`` at logout, takes the name away: clients that map
        it go on, new ones find nothing. O(1), three system calls.
        """
        if self.fd < 0:
            raise CorruptionError(f"segment {self.name} is closed")
        if not _same_file(self.fd, _path(self.name)):
            raise CorruptionError(f"the name of segment {self.name} was removed or replaced behind its owner's back")
        if os.fstat(self.fd).st_size != self.size:
            raise CorruptionError(f"segment {self.name} is {os.fstat(self.fd).st_size} bytes, not {self.size}")
        if self.is_owner and not _held(self.fd, _OWNER_BYTE):
            raise CorruptionError(f"the owner lock of segment {self.name} is lost")

    # -- memory

    def populate(
        self, offset: int = 0, length: int | None = None, *, huge: bool = True, node: int | None = None
    ) -> bool:
        """Fault pages in for writing, so that no later store can be a SIGBUS. Their contents stay.

        offset, length in bytes (default: all). huge: ask for huge pages where the kernel has them on for
        shared memory. node: take the pages from this NUMA node; best effort, as containers often forbid it.
        Returns whether huge pages were asked for. O(pages), about 60 ms per 256 MiB; the GIL is released.

        Raises SegmentError saying what is missing; pages had until then stay until the segment is removed.
        """
        start, stop = page_range(offset, length, self.size)
        if node is not None:
            with address_of(self.mm) as base:
                if topology.bind_memory(base + start, stop - start, node):
                    self._require_on_node(node, stop - start)
        asked = huge and ask_for_huge_pages(self.mm, start, stop)
        failed = populate_write(self.mm, start, stop, self._populate_by_fallocate)
        if failed is not None:
            number, at = failed
            raise self._short_of_memory(number, stop - at)
        return asked

    def _require_on_node(self, node: int, wanted: int) -> None:
        """MPOL_BIND on a full node calls the OOM killer, so ask first. Pages the file has are not counted again."""
        missing = min(wanted, self.size - os.fstat(self.fd).st_blocks * 512)
        free = topology.node_free_bytes(node)
        if free is not None and missing > free:
            raise SegmentError(
                f"segment {self.name} needs {_mib(missing)} on NUMA node {node}, which has {_mib(free)} left; "
                "configure a smaller arena or another node"
            )

    def _populate_by_fallocate(self, offset: int, length: int) -> int:
        """What kernels before 5.14 have: reserve the pages in the file, then map them by reading one byte each."""
        try:
            os.posix_fallocate(self.fd, offset, min(length, self.size - offset))
        except OSError as error:
            return error.errno or errno.EIO
        bytes(self.buf[offset : offset + length : PAGE_BYTES])
        return 0

    def _short_of_memory(self, number: int, wanted: int) -> SegmentError:
        missing = min(wanted, max(0, self.size - os.fstat(self.fd).st_blocks * 512))
        least, what, remedy = min(_memory_at_hand())
        return SegmentError(
            f"segment {self.name} ({_mib(self.size)}) still needs {_mib(missing)}, but only {_mib(least)} {what} "
            f"({os.strerror(number)}); {remedy}, or configure a smaller arena"
        )

    # -- locks

    def lock_owner(self) -> None:
        """Take the owner lock, as `create` has done already; harmless when this process has it.

        Raises SegmentError when another process has it, or the segment was removed.
        """
        if not self.is_owner:
            self._drop("_owner_fd")
            self._owner_fd = self._locked_fd(_OWNER_BYTE, "is owned by another live process")
            self._owner_pid = os.getpid()

    lock = lock_owner

    def lock_writer(self) -> None:
        """Take the writer lock: a worker does so before its first store, and keeps it for life.

        Harmless when this process has it. Raises SegmentError when another process has it, or the segment was
        removed.
        """
        if not self.is_writer:
            self._drop("_writer_fd")
            self._writer_fd = self._locked_fd(_WRITER_BYTE, "has another writer that is still alive")
            self._writer_pid = os.getpid()

    def _locked_fd(self, byte: int, refusal: str) -> int:
        """Open the segment anew (a lock has an open file of its own, never a mapped one) and lock a byte."""
        path = _path(self.name)
        try:
            fd = _open(path, writable=True)
        except OSError as error:
            raise SegmentError(f"cannot lock segment {self.name}: {error.strerror}") from error
        try:
            if not _try_lock(fd, byte):
                raise SegmentError(f"segment {self.name} {refusal}")
            if self.fd < 0 or not os.path.samestat(os.fstat(fd), os.fstat(self.fd)) or not _same_file(fd, path):
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

    def unlock_writer(self) -> None:
        """Give the writer lock back. Harmless without it."""
        self._drop("_writer_fd")

    def unlock(self) -> None:
        """Give both locks back; from now on the segment is a leftover to everyone. Harmless without them."""
        self._drop("_writer_fd")
        self._drop("_owner_fd")

    def release_in_child(self) -> None:
        """In a forked child: drop the inherited descriptors of the parent's locks. The mapping stays.

        The parent's locks stay too, and end with the parent, no longer with its last child. The child can take
        the writer lock for itself, and can neither unlink nor own. UsageError in the process that owns.
        """
        if self.is_owner or self.is_writer:
            raise UsageError("release_in_child() is for a forked child, and this process holds the locks itself")
        self._drop("_owner_fd")
        self._drop("_writer_fd")

    # -- the end

    def unlink(self) -> None:
        """Remove the name; maps go on until they are closed. Store *closed* in the header first.

        Only the process that owns does anything here: in a forked child, and the second time, nothing happens.
        Raises SegmentError when another process still has the writer lock (end the worker first), and UsageError
        after `close` or `unlock`, when the segment is nobody's and no longer ours to remove.
        """
        if self._unlinked or self._owner_pid != os.getpid():
            return
        if not self.is_owner:
            raise UsageError(f"segment {self.name} is closed or unlocked; unlink() comes before that")
        path = _path(self.name)
        if _same_file(self.fd, path):
            self.lock_writer()
            os.unlink(path)
        self._unlinked = True

    def close(self) -> None:
        """Drop locks, descriptor and mapping. The name stays: without `unlink` the segment becomes a leftover.

        A mapping of which views are still exported stays until they are gone. Harmless twice.
        """
        self.unlock()
        self._drop("fd")
        with contextlib.suppress(BufferError):
            self.buf.release()
            self.mm.close()


# ----------------------------------------------------------------------------------- attached segments

class AttachedSegment:
    """A segment that another process owns. Nothing here can remove it.

    `name`; `size` in bytes when it was opened; `fd`; `owner_uid`, for the caller to compare with whom it expects.
    """

    def __init__(self, name: str, fd: int, *, writable: bool) -> None:
        """Internal: see `open`."""
        state = os.fstat(fd)
        self.name = name
        self.fd = fd
        self.size = state.st_size
        self.owner_uid = state.st_uid
        self.writable = writable
        self._maps: list[mmap.mmap] = []

    @classmethod
    def open(cls, name: str, *, writable: bool = False) -> AttachedSegment:
        """Open a segment by name; nothing is mapped yet. With writable=False the kernel refuses every store.

        Raises SegmentError when there is none, when it is no regular file, or when access is refused.
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

    def __repr__(self) -> str:
        state = "closed" if self.fd < 0 else f"{len(self._maps)} maps"
        return f"<AttachedSegment {self.name} {self.size} bytes, {state}>"

    def map(self, offset: int, length: int, *, writable: bool, dontfork: bool = True) -> mmap.mmap:
        """Map bytes offset .. offset+length (both in bytes, offset page-aligned), shared, readable.

        writable: also for stores, which needs a segment opened so. dontfork: forked children do not inherit the
        map; touching it there is a SIGSEGV. Raises UsageError for a bad range, SegmentError when the segment is
        shorter than that by now, or the address space is exhausted. The segment itself is never affected.
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
                f"cannot map {_mib(length)} of segment {self.name}: {error}; see ulimit -v and vm.max_map_count"
            ) from error
        if dontfork:
            number = keep_from_forks(mm)
            if number:
                mm.close()
                raise SegmentError(f"cannot keep a map of segment {self.name} from forks: {os.strerror(number)}")
        self._maps.append(mm)
        return mm

    def writer_locked(self) -> bool:
        """Whether the segment's writer is alive, by its lock; works after the name was removed too."""
        if self.fd < 0:
            raise UsageError(f"segment {self.name} is closed")
        return _held(self.fd, _WRITER_BYTE)

    def close(self) -> None:
        """Close the descriptor and the maps made here; a map with exported views goes when they go. Never raises."""
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


def _candidates(prefix: str) -> list[str]:
    """Names under `prefix` that are regular files of this user."""
    if not prefix:
        raise UsageError("an empty prefix would name every segment of this user")
    found = []
    try:
        with os.scandir(SHM_DIR) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    state = entry.stat(follow_symlinks=False)
                    mine = stat.S_ISREG(state.st_mode) and state.st_uid == os.geteuid()
                    if entry.name.startswith(prefix) and mine:
                        found.append(entry.name)
    except FileNotFoundError:
        return []
    return sorted(found)


def leftovers(prefix: str) -> list[str]:
    """Names of this user's segments under `prefix` that nobody owns or writes. Changes nothing."""
    found = []
    for name in _candidates(prefix):
        with contextlib.suppress(SegmentError, UsageError):
            if not is_locked(name) and os.path.exists(_path(name)):
                found.append(name)
    return found


def remove_leftovers(prefix: str, *, before_unlink: Callable[[str], None] | None = None) -> list[str]:
    """Remove this user's segments under `prefix` whose owner and writer are gone; return their names.

    before_unlink is called with the name, under both locks, to store *closed* for readers that still map the
    segment; it meets half-made files too. If it raises, that segment stays and the exception goes on.
    Safe against creators and other removers at work at the same time. O(entries of /dev/shm).
    """
    removed = []
    for name in _candidates(prefix):
        try:
            path = _path(name)
            fd = _open(path, writable=True)
        except (OSError, UsageError):
            continue  # gone already, or not a file that SiMM could have made
        try:
            if os.fstat(fd).st_uid != os.geteuid() or not _try_lock(fd, _OWNER_BYTE, 2) or not _same_file(fd, path):
                continue
            if before_unlink is not None:
                before_unlink(name)
            os.unlink(path)
            removed.append(name)
        finally:
            os.close(fd)
    return removed

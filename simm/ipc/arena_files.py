"""The two files of an arena: who may open them, and what a process that has one can do with it.

Clients store values into an arena, and must not store into its table. The right to write a file holds for all of it, so
the metadata and the data are files of their own (``arena/layout.py`` has their contents):

    metadata   /dev/shm/NAME         written by the worker; clients map it read-only. 0600, with a group 0640
    data       /dev/shm/NAME.data    written by clients too; 0600
               or a sealed memfd     with a group, or in reserved huge pages (``--hugetlb``)
    events     /dev/shm/NAME.events  where a server tells its events (arena/events/ring.py): as the metadata

The worker passes the data to a client as a descriptor, over its UNIX socket, whose mode decides who may connect. So
nobody but the server's user opens the data by its name.

Truncation
----------
Whoever can write a file can also truncate it, and the kernel then ends each process that touches what it has mapped of
it (SIGBUS). For an ordinary file no mode and no flag separates the two. Sealing does: a memfd with F_SEAL_SHRINK and
F_SEAL_GROW keeps its size whoever has it, and however it is opened again (``/proc/PID/fd``). Files of a tmpfs that have
a name cannot be sealed, and a memfd cannot be given a name.

* *Without a group* only processes of the server's user get at the data. They can also trace each other and the server,
  so a seal would add nothing: the data has a name.
* *With a group* the data is a sealed memfd. The supervisor and its children keep it, so it outlives the worker. A clean
  stop with ``--warm`` moves it into the named file, which only the user may open, and the next start moves it out again
  (:func:`move_bytes`, which holds no more than ``MOVE_BYTES`` twice). A move costs about a second for each GiB. A move
  out that finds no memory goes back. A supervisor that is killed in the middle, or at work, takes the data with it: the
  next start is cold.

Reserved huge pages
-------------------
Where the kernel gives /dev/shm no huge pages, a host may have reserved some (HugeTLB). Only a hugetlbfs that is mounted
gives them names, and few are; so with ``--hugetlb`` the data is a sealed memfd of such pages. The kernel promises them
when the owner maps the file. Such a file ends with a whole huge page, so it is up to 2 MiB longer than the arena.

It ends with its processes, and pages that it gives back do not become ordinary memory: a stop with ``--warm`` would
need the arena's size a second time. So it goes without ``--warm``. Nor does it go with a group: a page that a member
punches out of the file goes back to the host's pool, and with the pool empty the next access to it is a SIGBUS.

What the seals leave open: a process with the data's descriptor can punch holes into it (``fallocate``). Their bytes
read as zeros, as if it had written them, and the next access takes pages anew. With memory overcommit switched off that
may fail, with SIGBUS; a sealed memfd cannot prevent it, as the seal that does would forbid writing.

Belonging together
------------------
The names contain the server's instance, which no two starts share. The metadata's GENERATION and the data's last word,
the stamp, are one random number. A warm start compares them (``ipc/segments.py``), and counts the pages of both. The
stamp is moved last, so a move that was cut short is seen. Files are made metadata first and removed data first, so the
locks of the metadata decide over both.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import mmap
import os
import secrets
import socket
import sys
from collections.abc import Iterator
from typing import Any, Final

from .. import shm
from ..arena.layout import Geometry, Word, laid_out
from ..constants import HUGE_PAGE_BYTES, PAGE_BYTES
from ..errors import SegmentError, TransportError, UsageError
from ..host import numa
from ..host.mapped_file import MappedFile
from ..host.memory import Bound, mib, reserved_bound, whole_huge_pages
from ..host.pages import map_side_by_side
from ..net.channel import Channel
from ..shm import OwnedSegment, data_name, events_name
from ..wire.messages import DataAttach

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
#: Bytes that exist twice while data moves from one file to another.
MOVE_BYTES: Final = 32 << 20


def new_generation() -> int:
    """Return a random number for a new arena, not 0."""
    return secrets.randbits(63) | 1


class SealedData(MappedFile):
    """The data of an arena as a memfd that nobody can shrink or grow. It has no name, and ends with its processes."""

    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING

    def __init__(self, name: str, size: int, *, moved: bool = False) -> None:
        """Make one of ``size`` zero bytes, none faulted in yet. Raises SegmentError.

        ``moved``: it takes no more memory than a file gives back meanwhile.
        """
        if not moved:
            self._require_room(name, size)
        try:
            fd = os.memfd_create(name, self.flags)
        except OSError as error:
            raise SegmentError(f"cannot create {name} as a memfd: {error.strerror}") from error
        try:
            os.fchmod(fd, 0o600)  # for /proc/PID/fd
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            super().__init__(name, size, fd)
        except OSError as error:
            os.close(fd)
            raise SegmentError(f"cannot seal {name} of {mib(size)}: {error.strerror}") from error
        except BaseException:
            os.close(fd)
            raise

    def _require_room(self, name: str, size: int) -> None:
        """Raise SegmentError unless all bounds have room for ``size`` bytes."""
        for at_hand, what, remedy in self.bounds():
            if size > at_hand:
                raise SegmentError(
                    f"{name} needs {mib(size)}, but only {mib(at_hand)} {what}; {remedy}, or configure a smaller arena"
                )

    def release_in_child(self) -> None:
        """Do nothing: it has no locks."""

    def unlock(self) -> None:
        """Do nothing: it has no locks."""

    def unlink(self) -> None:
        """Do nothing: it has no name."""


class ReservedData(SealedData):
    """The same in reserved huge pages (HugeTLB). ``size``: up to whole ones."""

    flags = SealedData.flags | os.MFD_HUGETLB | os.MFD_HUGE_2MB

    def __init__(self, name: str, size: int) -> None:
        """Make one of ``size`` zero bytes, for which the kernel has promised pages. Raises SegmentError."""
        self._wanted = whole_huge_pages(size)
        try:
            super().__init__(name, self._wanted)
        except SegmentError:
            self._require_room(name, self._wanted)  # others have taken pages since
            raise

    def bounds(self) -> list[Bound]:
        """Return the bound on its memory: no other limits it."""
        return [reserved_bound(self._wanted)]

    def free_on_node(self, node: int) -> int | None:
        """Return the bytes of the node's reserved huge pages that are free."""
        return numa.reserved_free_bytes(node)


class OwnedArena:
    """Both files of an arena, owned by this process as an OwnedSegment is.

    ``size`` is that of both, in bytes. A forked child inherits the descriptors, but not the ownership: it calls
    `release_in_child`.
    """

    def __init__(self, meta: OwnedSegment, data: OwnedSegment | SealedData) -> None:
        """Internal, for `create` and `adopt`. Takes both over unless it raises."""
        self.meta = meta
        self.data = data
        #: The ring of events; None without one. A warm start makes a new one.
        self.events: OwnedSegment | None = None
        self.name = meta.name
        self.size = laid_out(meta.size + data.size)

    @functools.cached_property
    def mm(self) -> mmap.mmap:
        """Both files, mapped read-write one after the other at the first use: a supervisor needs no such map."""
        try:
            align = HUGE_PAGE_BYTES if isinstance(self.data, ReservedData) else PAGE_BYTES
            return map_side_by_side([(self.meta.fd, self.meta.size), (self.data.fd, self.data.size)], align)
        except (OSError, ValueError) as error:
            raise SegmentError(f"cannot map {mib(self.size)} of {self.name}: {error}; see ulimit -v") from error

    @classmethod
    def create(
        cls, name: str, size: int, *, slots: int = 0, group: int | None = None, hugetlb: bool = False
    ) -> OwnedArena:
        """Make an arena of ``size`` zero bytes in all, for a table of ``slots`` slots (0: by its size).

        ``group``: a gid whose members may read the metadata; the data is sealed then. ``hugetlb``: the data is in
        reserved huge pages. Raises UsageError for impossible sizes and for both together, SegmentError if a name is
        taken or memory is short. Nothing is left behind then.
        """
        if hugetlb and group is not None:
            raise UsageError("data in reserved huge pages is for its owner's processes, not for a group's")
        geometry = Geometry.plan(size, slots)
        with contextlib.ExitStack() as undo:
            meta = OwnedSegment.create(name, geometry.meta_bytes, **_access(group))
            undo.callback(_discard, meta)
            data: OwnedSegment | SealedData
            if hugetlb:
                data = ReservedData(data_name(name), geometry.data_file_bytes)
            elif group is None:
                data = OwnedSegment.create(data_name(name), geometry.data_file_bytes)
            else:
                data = SealedData(data_name(name), geometry.data_file_bytes)
            undo.callback(_discard, data)
            made = cls(meta, data)
            undo.pop_all()
        return made

    @classmethod
    def adopt(cls, name: str, *, group: int | None = None) -> OwnedArena:
        """Take over the arena that a clean stop with ``--warm`` has left, for this group from now on.

        Raises SegmentError if a file is missing, foreign or in use, or memory is short. It stays as it is then, unless
        others take the memory by which its data would come back.
        """
        with contextlib.ExitStack() as undo:
            meta = OwnedSegment.adopt(name)
            undo.callback(meta.close)
            named = OwnedSegment.adopt(data_name(name))
            undo.callback(named.close)
            meta.set_access(**_access(group))
            data: OwnedSegment | SealedData = named
            if group is not None:
                data = SealedData(named.name, named.size, moved=True)
                undo.callback(data.close)
                move_bytes(named, data, back=True)
            made = cls(meta, data)
            undo.pop_all()
        if data is not named:
            _discard(named)
        return made

    def tell_events(self, size: int, group: int | None) -> None:
        """Make the ring of events, of ``size`` bytes, faulted in. Raises SegmentError; there is none then."""
        made = OwnedSegment.create(events_name(self.name), size, **_access(group))
        try:
            made.populate(huge=False)
        except BaseException:
            _discard(made)
            raise
        self.events = made

    def drop_events(self) -> None:
        """Remove the ring of events, if there is one: what it has told is of this data server."""
        if self.events is not None:
            _discard(self.events)
            self.events = None

    def __repr__(self) -> str:
        return f"<OwnedArena {self.meta!r} {self.data!r}>"

    @property
    def fds(self) -> tuple[int, ...]:
        """The descriptors that a child which uses the arena must keep."""
        return self.meta.fd, self.data.fd, *([self.events.fd] if self.events is not None else [])

    def heartbeat(self) -> int:
        """Return the worker's heartbeat counter without a map of the arena, 0 if there is none."""
        return int.from_bytes(os.pread(self.meta.fd, 8, 8 * Word.HEARTBEAT), sys.byteorder)

    @property
    def is_owner(self) -> bool:
        """True if this process owns both files: not after :meth:`close`, nor in a forked child."""
        return self.meta.is_owner

    @property
    def sealed(self) -> bool:
        """True if the data is a sealed memfd, which ends with its processes."""
        return isinstance(self.data, SealedData)

    def keep(self) -> None:
        """Move sealed data into the named file, for the next start. Called by the owner, without any worker.

        Raises SegmentError if there is no room; nothing is left of the data then.
        """
        sealed = self.data
        if not isinstance(sealed, SealedData):
            return
        self._unmap()
        self.data = named = OwnedSegment.create(sealed.name, sealed.size, moved=True)
        try:
            move_bytes(sealed, named)
        except BaseException:
            named.unlink()
            raise
        finally:
            sealed.close()

    @functools.cached_property
    def buf(self) -> memoryview:
        """A view of `mm`."""
        return memoryview(self.mm)

    def _unmap(self) -> None:
        """Unmap `mm`. A map with exported views stays."""
        buf, mm = self.__dict__.pop("buf", None), self.__dict__.pop("mm", None)
        with contextlib.suppress(BufferError):
            if buf is not None:
                buf.release()
            if mm is not None:
                mm.close()

    # -- as OwnedSegment ------------------------------------------------------------------------

    @property
    def files(self) -> tuple[MappedFile, MappedFile]:
        """Both files, to fault them in."""
        return self.meta, self.data

    def populate(self, *, huge: bool = True, node: int | None = None) -> bool:
        """Do `MappedFile.populate` for all of both files."""
        asked = [file.populate(huge=huge, node=node) for file in self.files]
        return all(asked)

    def remap(self, *, huge: bool = True) -> None:
        """Do `MappedFile.remap` for both files."""
        self.meta.remap(huge=huge)
        self.data.remap(huge=huge)

    def lock_writer(self) -> None:
        """Take the writer lock, as a worker does before its first store. Raises SegmentError."""
        self.meta.lock_writer()

    def unlock(self) -> None:
        """Release all locks. The arena is then a leftover."""
        if self.events is not None:
            self.events.unlock()
        self.data.unlock()
        self.meta.unlock()

    def release_in_child(self) -> None:
        """Drop the parent's lock descriptors in a forked child. The map stays."""
        self.meta.release_in_child()
        self.data.release_in_child()
        if self.events is not None:
            self.events.release_in_child()

    def unlink(self) -> None:
        """Remove the names, as `OwnedSegment.unlink` does; the data's first. Raises SegmentError, UsageError."""
        if self.events is not None:
            self.events.unlink()
        self.data.unlink()
        self.meta.unlink()

    def close(self) -> None:
        """Drop locks, descriptors and maps; the names stay. A map with exported views stays. Twice is harmless."""
        self.data.close()
        self.meta.close()
        if self.events is not None:
            self.events.close()
        self._unmap()


def _access(group: int | None) -> dict[str, Any]:
    return {"mode": 0o600 if group is None else 0o640, "group": group}


def _discard(segment: OwnedSegment | SealedData) -> None:
    segment.unlink()
    segment.close()


def move_bytes(source: MappedFile, target: MappedFile, *, back: bool = False) -> None:
    """Move all bytes, in order, and give the source's pages back on the way. Raises SegmentError if memory is short.

    The target is empty, and of the same size. ``back``: what was moved comes back then. O(bytes).
    """
    step = MOVE_BYTES // 2
    gone = 0  # bytes that the source has given back. A piece stays until the next one is copied: room for the way back.
    try:
        for at in range(0, source.size, step):
            _copy(source, target, at, step)
            if at:
                source.mm.madvise(mmap.MADV_REMOVE, gone, step)
                gone = at
        source.mm.madvise(mmap.MADV_REMOVE, gone, source.size - gone)
    except OSError as error:
        what = f"cannot move {mib(source.size)} of {source.name} ({error.strerror})"
        if back and _moved_back(source, target, gone, step):
            raise SegmentError(
                f"{what}, and it stays where it is: it needs {mib(MOVE_BYTES)} of memory for a while; "
                "free some, or start once without --warm"
            ) from error
        raise SegmentError(
            f"{what}: {mib(source.size - gone)} are left; the next start has to be cold, or needs more of {shm.SHM_DIR}"
        ) from error


def _moved_back(source: MappedFile, target: MappedFile, gone: int, step: int) -> bool:
    """Move the first bytes back, which the source has no more. The first ones come last: the rest has to be whole."""
    try:
        target.mm.madvise(mmap.MADV_REMOVE, gone, target.size - gone)
        for at in reversed(range(0, gone, step)):
            _copy(target, source, at, step)
            target.mm.madvise(mmap.MADV_REMOVE, at, step)
    except OSError:
        return False
    return True


def _copy(source: MappedFile, target: MappedFile, at: int, count: int) -> None:
    """Copy so many bytes, or as far as there are any. Raises OSError."""
    with memoryview(source.buf)[at : at + count] as piece:
        done = 0
        while done < len(piece):
            done += os.pwrite(target.fd, piece[done:], at + done)


@contextlib.contextmanager
def passed_data(channel: Channel, path: str) -> Iterator[int]:
    """Yield a descriptor of an arena's data, which the worker at ``path`` passes by a socket made for that.

    Raises TransportError.
    """
    try:
        ours, theirs = socket.socketpair()
    except OSError as exc:
        raise TransportError(f"cannot make a socket: {exc.strerror}") from exc
    with ours:
        with theirs:
            channel.call(DataAttach(0), fds=(theirs.fileno(),))
        try:
            _, fds, _, _ = socket.recv_fds(ours, 1, 1, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC)
        except OSError as exc:
            raise TransportError(f"{path} has passed no data: {exc.strerror}") from exc
    if len(fds) != 1:
        raise TransportError(f"{path} has passed no data: this process may be out of descriptors")
    try:
        yield fds[0]
    finally:
        os.close(fds[0])

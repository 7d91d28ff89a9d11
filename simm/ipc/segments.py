"""The files of a data server's arenas: their names, what predecessors left, what a header says, and clean-up.

Nothing here maps more than a header and shard words, or changes a file in use. An arena goes by the name of its
metadata; that of its data has a suffix (``ipc/arena_files.py``). A file's name is

    simm-<uid>-<server's name>-<worker's number>-<instance, 16 hex digits>[.data|.events]

A server's name may have dashes and digits, so one server's prefix may begin another one's names: ``simm-0-gpu-`` those
of ``gpu-1`` too. Read from the right a name has one meaning only (:class:`ArenaName`), so segments are found only by
parsing their names.

An embedded cluster (``sdk/local_cluster.py``) makes a server name that is used once. The next server that starts
removes what such a cluster has left. So users' servers may not have a name of that form (:func:`check_server_name`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from .. import shm
from ..arena.layout import HEADER_BYTES, LAYOUT_VERSION, MAGIC, SHARDS_BYTES, STAMP_BYTES, Geometry, State, Word
from ..config.startup import ensure_runtime_dir
from ..constants import WAYS
from ..errors import ConfigError, SegmentError, SimmError, UsageError
from ..host.file_locks import LockFile
from ..host.memory import shm_free_bytes
from ..shm import AttachedSegment, data_name, events_name, leftovers, remove_leftovers

log = logging.getLogger("simm.dataserver")

#: Of one server.
WORKERS_MAX: Final = 64
#: A starting server waits so long for the processes of a dead one, and for readers to unmap what it removed.
LET_GO_S: Final = 5.0
#: Bytes of a UNIX socket's path (``sun_path``), without the final zero.
SOCKET_PATH_BYTES_MAX: Final = 107
#: And for each so many bytes of their arenas a second more: the kernel unmaps them before it releases their locks.
UNMAP_BYTES_PER_S: Final = 4 << 30
#: Of a data server's admin socket in the runtime folder.
ADMIN_SUFFIX: Final = ".admin.sock"
_PREFIX: Final = "simm-"
_DATA: Final = data_name("")
_EVENTS: Final = events_name("")
_NAME: Final = re.compile(r"simm-(0|[1-9][0-9]*)-(.+)-(0|[1-9][0-9]*)-([0-9a-f]{16})", re.DOTALL)
_EMBEDDED: Final = re.compile(r"local-([1-9][0-9]*)-[0-9a-f]{8}")


class ArenaName(NamedTuple):
    """The parts of an arena's name; ``str`` makes the name."""

    uid: int
    server: str
    number: int
    instance: int

    def __str__(self) -> str:
        return f"{_PREFIX}{self.uid}-{self.server}-{self.number}-{self.instance:016x}"

    @classmethod
    def parse(cls, name: str) -> ArenaName | None:
        """Return the parts of the name of one of an arena's files, None for any other name."""
        found = _NAME.fullmatch(metadata_of(name))
        if found is None:
            return None
        uid, server, number, instance = found.groups()
        return cls(int(uid), server, int(number), int(instance, 16))


def embedded_server_name(pid: int) -> str:
    """Return a new name for the data server of a cluster that process ``pid`` embeds."""
    return f"local-{pid}-{secrets.token_hex(4)}"


def check_server_name(name: str, end_with: int) -> None:
    """Raise ConfigError for an embedded cluster's name, unless the server ends with that cluster's process."""
    found = _EMBEDDED.fullmatch(name)
    if found is not None and int(found[1]) != end_with:
        raise ConfigError(
            f"--name {name}: names like this one are those of clusters that a program has for itself, and what they "
            "leave is removed by any other server: choose another --name"
        )


def socket_path(runtime_dir: str, name: str, number: int) -> str:
    """Return the path of a worker's UNIX socket."""
    return os.path.join(runtime_dir, f"{name}.{number}.sock")


def admin_path(runtime_dir: str, name: str) -> str:
    """Return the path of a data server's admin socket."""
    return os.path.join(runtime_dir, f"{name}{ADMIN_SUFFIX}")


def check_socket_paths(runtime_dir: str, name: str, workers: int) -> None:
    """Raise ConfigError if the kernel takes no UNIX socket of so long a path."""
    path = max(socket_path(runtime_dir, name, workers - 1), admin_path(runtime_dir, name), key=len)
    size = len(os.fsencode(path))
    if size > SOCKET_PATH_BYTES_MAX:
        raise ConfigError(
            f"the sockets' path {path} has {size} bytes, {SOCKET_PATH_BYTES_MAX} are allowed: choose a shorter "
            "--runtime-dir or --name"
        )


def metadata_of(name: str) -> str:
    """Return the name of an arena's metadata, by that of one of its files."""
    return name.removesuffix(_DATA).removesuffix(_EVENTS)


def is_metadata(name: str) -> bool:
    """Return True unless this is the name of an arena's data or of its ring of events."""
    return not name.endswith((_DATA, _EVENTS))


def is_arena_of(server: str, name: str) -> bool:
    """Return True if this is an arena of this user's data server of that very name, or an arena's data."""
    parts = ArenaName.parse(name)
    return parts is not None and parts.uid == os.geteuid() and parts.server == server


def _is_embedded(name: str) -> bool:
    """Return True if this is an arena, or an arena's data, of an embedded cluster of this user."""
    parts = ArenaName.parse(name)
    return parts is not None and parts.uid == os.geteuid() and _EMBEDDED.fullmatch(parts.server) is not None


def take_name(runtime_dir: str, name: str, wait: Callable[[], bool] = lambda: True) -> LockFile:
    """Lock a data server's name in its runtime folder, and remove the sockets of a dead one of this name.

    Whoever has the lock is the only server of this name there: it takes the lock before it looks at any arena, and
    keeps it to its end. ``wait`` is called with the lock and before any look at the sockets: it waits for the processes
    of a dead server (:func:`await_writers`). If it returns False, the sockets stay. Raises SimmError if another server
    has the name, OSError.
    """
    path = os.path.join(runtime_dir, f"{name}.lock")
    lock = LockFile.take(path)
    if lock is None:
        raise _taken(name, f"{path} is locked")
    try:
        for number in range(WORKERS_MAX if wait() else 0):
            _remove_socket(socket_path(runtime_dir, name, number), name)
    except BaseException:
        lock.release()
        raise
    return lock


def keep_name(lock: LockFile, group: int | None) -> LockFile:
    """Return the lock of a server's name, locked again if its file was removed. ``group`` may enter its folder.

    Raises SimmError if another server has the name meanwhile.
    """
    if lock.held:
        return lock
    try:
        ensure_runtime_dir(Path(lock.path).parent, group)
        again = LockFile.take(lock.path)
    except (OSError, SimmError) as exc:
        log.error("%s is lost and cannot be locked again: %s", lock.path, exc)
        return lock
    if again is None:
        raise SimmError(f"{lock.path} was removed, and another data server of this name has been started")
    log.warning("%s was lost, and is locked again", again.path)
    lock.release()
    return again


def _taken(name: str, why: str) -> SimmError:
    return SimmError(
        f"a data server named {name!r} is running on this host already ({why}): "
        "stop it, or give this one another --name"
    )


def _remove_socket(path: str, name: str) -> None:
    """Remove a dead server's socket. Its processes may take a moment to end. Raises SimmError if they do not."""
    until = time.monotonic() + LET_GO_S
    while os.path.exists(path):
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as probe:
            probe.settimeout(0.5)
            try:
                probe.connect(path)
            except OSError:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                return
        if time.monotonic() > until:
            raise _taken(name, path)
        time.sleep(0.02)


def await_writers(
    server: str, while_running: Callable[[], bool] = lambda: True, on_wait: Callable[[int], object] = lambda size: None
) -> None:
    """Wait until the workers of a dead data server of this very name have let go of its arenas, and log that.

    ``on_wait`` gets the bytes of those before the wait, which ends early once ``while_running`` returns False.

    Whoever calls it has locked the server's name (:func:`take_name`). The sockets of such a worker may be closed
    already. An arena that has an owner is not waited for: it is of a server with another runtime folder. Takes
    ``LET_GO_S`` seconds and one for each ``UNMAP_BYTES_PER_S`` bytes at most.
    """
    until = 0.0
    while while_running() and (names := shm.without_owner(_PREFIX, partial(is_arena_of, server))):
        now = time.monotonic()
        if not until:
            size = 0
            for file in {*names, *map(data_name, names)}:
                with contextlib.suppress(FileNotFoundError):
                    size += os.stat(f"{shm.SHM_DIR}/{file}").st_size
            until = now + LET_GO_S + size / UNMAP_BYTES_PER_S
            log.info("%s is let go by a worker whose server has died: waiting for that", ", ".join(names))
            on_wait(size)
        elif now > until:
            log.warning("%s is still in use by a worker whose server has died: it is not used", ", ".join(names))
            return
        time.sleep(0.02)


class Left(NamedTuple):
    """A leftover arena, as its header describes it. ``state`` 0: it never was one, or only its data is there."""

    name: str
    number: int
    #: Bytes of both files.
    size: int
    state: int = 0
    #: The cluster of its entries; 0 without entries.
    cluster: int = 0
    epoch: int = 0
    slots: int = 0
    #: Why this build cannot take it over; empty if it can.
    fault: str = ""
    #: NUMA node + 1 if it was added to a running server; 0 if not.
    grown: int = 0


def left_by(server: str) -> list[Left]:
    """Return what data servers of this very name have left. Changes nothing."""
    found = []
    names = leftovers(_PREFIX, partial(is_arena_of, server))
    for name in sorted({metadata_of(name) for name in names}):
        with contextlib.suppress(SegmentError):  # removed meanwhile, or refused
            if name in names:
                found.append(inspect(name))
            elif not os.path.lexists(f"{shm.SHM_DIR}/{name}"):  # else it is in use
                found.append(Left(name, -1, 0, fault="only its data is there"))
    return found


def inspect(name: str) -> Left:
    """Read an arena's header. It is not mapped, as the file may be shorter. Raises SegmentError without a segment."""
    parts = ArenaName.parse(name)
    with AttachedSegment.open(name) as segment:
        about = os.fstat(segment.fd)
        header = os.pread(segment.fd, HEADER_BYTES, 0)
    data_size, data_pages, stamp = _inspect_data(name)
    left = Left(name, parts.number if parts is not None else -1, about.st_size + data_size)
    if len(header) < HEADER_BYTES:
        return left._replace(fault=f"with {len(header)} bytes it is too short for a header")
    words = memoryview(header).cast("Q")
    if words[Word.MAGIC] != MAGIC:
        return left._replace(fault="its header has no SiMM magic")
    left = left._replace(state=words[Word.STATE], cluster=words[Word.CLUSTER], epoch=words[Word.EPOCH])
    try:
        if words[Word.VERSION] == LAYOUT_VERSION and not data_size:
            return left._replace(fault="its data is gone")
        geometry = Geometry.read(words, left.size, name)
        if not geometry.is_planned() or about.st_size != geometry.meta_bytes:
            raise SegmentError(f"{name} has a header with sizes that no SiMM chooses")
    except SimmError as exc:
        return left._replace(fault=str(exc).removeprefix(f"{name} "))
    if about.st_blocks * 512 < geometry.meta_bytes or data_pages < data_size:
        # Servers fault every page in. A missing page would be read as zeros.
        return left._replace(fault="pages of it are missing: it was cut short and made longer again, or has holes")
    if stamp != words[Word.GENERATION]:
        return left._replace(fault="its data is another arena's")
    return left._replace(slots=geometry.slots, grown=words[Word.GROWN])


def _inspect_data(name: str) -> tuple[int, int, int]:
    """Return the size of an arena's data, the bytes of its pages, and its stamp; zeros if it is not there."""
    try:
        with AttachedSegment.open(data_name(name)) as data:
            about = os.fstat(data.fd)
            last = os.pread(data.fd, STAMP_BYTES, max(0, about.st_size - STAMP_BYTES))
    except SegmentError:
        return 0, 0, 0
    return about.st_size, about.st_blocks * 512, int.from_bytes(last, sys.byteorder)


def fit_for_warm(
    left: Iterable[Left], workers: int, memory: int = 0, slots_for: Callable[[int], int] = lambda size: 0
) -> tuple[dict[int, Left], dict[str, str]]:
    """Return the arenas that a warm start takes, by worker number: one for each worker, or none.

    Return also, by name, why each other suspended arena is not taken. JOIN says *warm* and an epoch for all workers
    together: a server with one arena that does not fit would get its shards anew, and drop the entries of the others.
    ``memory`` is the configured one, and ``slots_for`` returns the slots that an arena of so many bytes is to have; 0
    for any.

    An arena that was added to a running server comes back with the others, whatever its size, if its map is theirs.
    Without it they are as good: what the map gives its worker is assigned anew, by a later epoch than theirs.
    """
    suspended = [each for each in left if each.state == State.SUSPENDED]
    why: dict[str, str] = {}
    found: dict[int, list[Left]] = {}
    for each in sorted(suspended, key=lambda each: -each.epoch):
        slots = slots_for(each.size)
        table = max(2, -(-slots // WAYS)) * WAYS if slots else each.slots
        if each.fault:
            why[each.name] = each.fault
        elif each.number >= workers and (not each.grown or each.number >= WORKERS_MAX):
            why[each.name] = f"this server has {workers} workers"
        elif memory and each.number < workers and each.size != memory:
            why[each.name] = f"it has {each.size >> 20} MiB, and --memory asks for {memory >> 20}"
        elif table != each.slots:
            why[each.name] = f"it has {each.slots} slots, and --slots or --value-size asks for {table}"
        else:
            found.setdefault(each.number, []).append(each)
    fit: dict[int, Left] = {}
    for number, (newest, *older) in found.items():
        if any(each.epoch == newest.epoch for each in older):
            why[newest.name] = "there is another one of the same age"
        else:
            fit[number] = newest
        why.update((each.name, f"{newest.name} is at least as new") for each in older)
    rest = ""
    first = [each for number, each in fit.items() if number < workers]
    if len(first) < workers:
        rest = f"of {workers} workers' arenas {len(first)} can be used"
    elif len({each.epoch for each in first}) > 1:
        rest = "the workers' arenas end with different maps"
    if rest:
        why.update((each.name, rest) for each in fit.values())
        return {}, why
    late = {each.name for each in fit.values() if each.epoch != first[0].epoch}
    why.update((name, "it was added to the running server, and ends with another map than the others") for name in late)
    return {number: each for number, each in fit.items() if each.name not in late}, why


def running() -> list[str]:
    """Return the names of all arenas whose servers run, also other users'. O(entries of /dev/shm)."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for name in sorted(os.listdir(shm.SHM_DIR)):
            if ArenaName.parse(name) is not None and is_metadata(name):
                with contextlib.suppress(SegmentError, UsageError):  # refused, or no file of SiMM
                    if shm.is_locked(name):
                        found.append(name)
    return found


class LetGo:
    """The memory of files that are about to be removed. It is free once readers have unmapped them.

    They do so within tenths of a second. The size of a new arena depends on that memory, or it needs it. Raises
    SegmentError if the folder of segments is missing.
    """

    def __init__(self) -> None:
        self._free = shm_free_bytes(shm.SHM_DIR)
        self._held = 0

    def measure(self, name: str) -> None:
        """Add the pages of a file, if there is one of this name. Call it before the file is removed."""
        with contextlib.suppress(SegmentError), AttachedSegment.open(name) as segment:
            self._held += os.fstat(segment.fd).st_blocks * 512

    def wait(self, while_running: Callable[[], bool]) -> None:
        """Wait until the memory is free: ``LET_GO_S`` at most, and only as long as ``while_running`` returns True."""
        until = time.monotonic() + LET_GO_S
        while (missing := self._free + self._held - shm_free_bytes(shm.SHM_DIR)) > self._held // 100:
            if not while_running():
                return
            if time.monotonic() > until:
                log.warning(
                    "%d MiB of what was removed are not free yet: views of values, or programs that are stopped, keep "
                    "them", missing >> 20,
                )  # fmt: skip
                return
            time.sleep(0.02)


def remove_old(names: Collection[str], while_running: Callable[[], bool] = lambda: True) -> list[str]:
    """Remove these leftover arenas and all of embedded clusters. Return those that could be removed.

    Waits for their memory, see :meth:`LetGo.wait`.
    """

    def wanted(name: str) -> bool:
        return name in names or _is_embedded(name)

    memory = LetGo()
    removed = _remove(wanted, memory.measure)
    memory.wait(while_running)
    return removed


def _remove(wanted: Callable[[str], bool], before: Callable[[str], None] = lambda name: None) -> list[str]:
    """Remove the leftover arenas with a wanted name, their data first. Return their names.

    Readers that still map one find it closed. ``before`` gets the name of each file. The metadata stays as long as the
    data: the kernel releases the locks of a process that ends one after the other, and data without metadata would
    stay until the next start.
    """

    def end_data(name: str) -> None:
        before(name)
        with contextlib.suppress(SegmentError):
            state_of(metadata_of(name))
            store_closed(metadata_of(name))

    def end(name: str) -> None:
        before(name)
        store_closed(name)

    def is_data(name: str) -> bool:
        metadata = metadata_of(name)
        return not is_metadata(name) and wanted(metadata) and not shm.is_locked(metadata)

    found = remove_leftovers(_PREFIX, only=is_data, before_unlink=end_data)

    def is_last(name: str) -> bool:
        others = data_name(name), events_name(name)
        alone = not any(os.path.exists(f"{shm.SHM_DIR}/{each}") for each in others)
        return alone and is_metadata(name) and wanted(name)

    removed = remove_leftovers(_PREFIX, only=is_last, before_unlink=end)
    return sorted({*removed, *(metadata_of(name) for name in found)})


def remove_events(name: str) -> None:
    """Remove the ring of events that a dead server has left beside an arena that is taken over."""
    remove_leftovers(_PREFIX, only=events_name(name).__eq__)


def remove_if_left(name: str, wait_s: float = 0.0) -> None:
    """Remove an arena without owner and writer. Wait ``wait_s`` seconds at most until its owner has ended."""
    until = time.monotonic() + wait_s
    while True:
        _remove(name.__eq__)
        if time.monotonic() >= until or not os.path.exists(f"{shm.SHM_DIR}/{name}"):
            return
        time.sleep(0.005)


def state_of(name: str) -> int:
    """Return an arena's STATE word, 0 if it was never one. Raises SegmentError if there is none."""
    return inspect(name).state


def store_closed(name: str) -> None:
    """Store *closed* in a segment without a writer, so that readers which still map it look elsewhere.

    The shard words are zeroed too, as readers check those with each value and the state only now and then. Other
    layouts may have them elsewhere. A segment that cannot be changed is logged. An arena's data has no such words.
    """
    if not is_metadata(name):
        return
    try:
        with AttachedSegment.open(name, writable=True) as segment:
            size = HEADER_BYTES + SHARDS_BYTES
            if segment.size < size:
                return
            mapped = segment.map(0, size, writable=True)
            with memoryview(mapped).cast("Q") as words:
                if words[Word.MAGIC] != MAGIC:
                    return
                words[Word.STATE] = State.CLOSED
                if words[Word.VERSION] == LAYOUT_VERSION:
                    words[HEADER_BYTES // 8 :] = memoryview(bytes(SHARDS_BYTES)).cast("Q")
    except SegmentError as exc:
        log.warning("cannot mark %s closed: %s", name, exc)

"""Checks of ``simm doctor`` on the arenas of running data servers: is the table of the right size, do workers keep up?

They read a part of each table, without asking anybody and without a lock. Keys spread evenly over a table's sets, so
its first sets are a fair sample. A slot that changes meanwhile is left out.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Collection
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import shm
from ..arena.layout import HEADER_BYTES, MAGIC, SLOT_FIELDS, Geometry, State, Word, slots_for
from ..constants import SLOT_BYTES
from ..errors import SegmentError, UsageError
from ..host import numa
from ..host.processes import of_my_cgroup
from ..ipc.segments import ArenaName, is_metadata, metadata_of, running, state_of
from ..shm import AttachedSegment, data_name
from .findings import Verdict, check, ok, warn

__all__ = ["check_value_size", "check_workers", "held_by_arenas", "suspended"]

#: Fewer values of a sample say nothing.
VALUES_MIN: Final = 1000
#: Slots of a sample; more, if fewer values are among them.
SAMPLE_SLOTS: Final = (1 << 17, 1 << 20)
#: A table is too large if it has so many times the slots that are needed, and this part of the arena more.
SPARE_TIMES: Final = 2
SPARE_PART: Final = 200
#: Part of its slots that a table takes before sets overflow.
FULL: Final = 0.8
#: Puts a second from which on further workers pay: about half of what one process commits (docs/performance.md).
BUSY_PUTS_S: Final = 50_000
#: Cores that each further worker wants for itself and for those who use it.
CORES_A_WORKER: Final = 4
#: An owner's or a writer's lock in /proc/PID/fdinfo; its group is the file's inode. Readers have none.
_OWNS: Final = re.compile(r"^lock:.* OFDLCK .* WRITE +-?\d+ [0-9a-f]+:[0-9a-f]+:(\d+) [01] ", re.M)


class Held(NamedTuple):
    """Bytes that arenas hold by design: in /dev/shm, in sealed files without a name, in reserved huge pages."""

    named: int = 0
    sealed: int = 0
    reserved: int = 0
    #: The part of ``named`` in files that this process may not open: anybody may give a file such a name.
    unseen: int = 0
    #: The owners of these files.
    uids: tuple[int, ...] = ()
    #: The part of ``named`` and ``sealed`` whose owner is seen in this process's control group.
    here: int = 0


def held_by_arenas(sys_root: str) -> Held:
    """Return what arenas hold that run or wait for their next start. O(entries of /dev/shm).

    Those of other users count too, which this process may not open: only what it sees to be left by a dead owner does
    not. Data without a name is known by a header that it may read.
    """
    named = sealed = reserved = unseen = 0
    uids: set[int] = set()
    by_arena: dict[str, int] = {}
    inodes: dict[str, int] = {}
    folder = Path(sys_root, "dev/shm")
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            arena = ArenaName.parse(entry.name)
            lives = _lives(entry.name) if arena is not None else False
            if arena is None or lives is False:
                continue
            with contextlib.suppress(OSError, SegmentError):
                about = entry.stat(follow_symlinks=False)
                if not stat.S_ISREG(about.st_mode) or about.st_uid != arena.uid:
                    continue
                taken = about.st_blocks * 512
                named += taken
                if lives is None:
                    unseen += taken
                    uids.add(arena.uid)
                    continue
                name = metadata_of(entry.name)
                by_arena[name] = by_arena.get(name, 0) + taken
                if is_metadata(entry.name):
                    inodes[name] = about.st_ino
                if is_metadata(entry.name) and not Path(folder, data_name(entry.name)).exists():
                    size = max(0, _whole_bytes(entry.name) - about.st_size)
                    # Members of a group may read the metadata, and reserved pages do not go with one.
                    if about.st_mode & stat.S_IRGRP:
                        sealed += size
                        by_arena[name] += size
                    else:
                        reserved += size
    here = sum(by_arena[name] for name in _owned_here(inodes))
    return Held(named, sealed, reserved, unseen, tuple(sorted(uids)), here)


def _lives(name: str) -> bool | None:
    """Return whether a file is a running server's or waits for its next start; None if it cannot be opened."""
    try:
        return shm.is_locked(name) or suspended(name)
    except SegmentError:
        return None
    except UsageError:
        return False


def _owned_here(inodes: dict[str, int]) -> Collection[str]:
    """Return those of these arenas (metadata's name -> inode) that a process of this one's control group owns.

    Pages count for the control group that first touched them, which is their server's. Links are read, and no file is
    looked up: one on a dead network file system would not return.
    """
    found: set[str] = set()
    with contextlib.suppress(OSError):  # no hierarchy that this process can read
        for pid in of_my_cgroup() if inodes else ():
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                for fd in os.listdir(f"/proc/{pid}/fd"):
                    with contextlib.suppress(OSError):
                        name = os.path.basename(os.readlink(f"/proc/{pid}/fd/{fd}"))
                        if name in inodes and name not in found:
                            info = Path(f"/proc/{pid}/fdinfo/{fd}").read_text()
                            if str(inodes[name]) in _OWNS.findall(info):
                                found.add(name)
    return found


def _whole_bytes(name: str) -> int:
    """Return the size of an open arena with its data, by its header. Raises SegmentError."""
    with AttachedSegment.open(name) as segment:
        head = memoryview(_read(segment, 0, HEADER_BYTES)).cast("Q")
        return head[Word.SIZE] if head[Word.MAGIC] == MAGIC and head[Word.STATE] == State.OPEN else 0


def suspended(segment: str) -> bool:
    """Return True for a file of an arena that waits for its server's next start."""
    try:
        return state_of(metadata_of(segment)) == State.SUSPENDED
    except SegmentError:
        return False


class Sample(NamedTuple):
    """A part of an arena's table."""

    arena: ArenaName
    size: int
    slots: int
    data_bytes: int
    #: Live slots of the part, and which part of all slots it is.
    rows: NDArray[np.void]
    part: float
    #: It was added to the running server: only a warm start has it again.
    grown: bool = False

    @property
    def entries(self) -> int:
        return round(len(self.rows) / self.part)


def samples() -> list[Sample]:
    """Return a sample of each running arena that this process may read, by name."""
    found = []
    for name in running():
        arena = ArenaName.parse(name)
        try:
            sampled = _sample(arena, name) if arena is not None else None
        except SegmentError:
            continue  # gone by now, of another layout, or another user's
        if sampled is not None:
            found.append(sampled)
    return found


def _sample(arena: ArenaName, name: str) -> Sample | None:
    with AttachedSegment.open(name) as segment:
        head = memoryview(_read(segment, 0, HEADER_BYTES)).cast("Q")
        geometry = Geometry.read(head, head[Word.SIZE], name)
        state = head[Word.STATE]
        if state != State.OPEN or geometry.ledger_offset > segment.size:
            return None
        for most in SAMPLE_SLOTS:
            slots = min(geometry.slots, most)
            rows = _live(segment, geometry, slots)
            if slots == geometry.slots or len(rows) >= VALUES_MIN:
                break
    grown = bool(head[Word.GROWN])
    return Sample(arena, geometry.size, geometry.slots, geometry.data_bytes, rows, slots / geometry.slots, grown)


def _live(segment: AttachedSegment, geometry: Geometry, slots: int) -> NDArray[np.void]:
    """Return copies of the live ones among the first ``slots`` slots, without those that are being written."""
    first, again = (
        np.frombuffer(_read(segment, geometry.slots_offset, slots * SLOT_BYTES), SLOT_FIELDS) for _ in range(2)
    )
    settled = (first["seq"] == again["seq"]) & (first["seq"] & np.uint64(1) == 0)
    return first.compress(settled & (first["offset"] != 0))


def _read(segment: AttachedSegment, offset: int, size: int) -> bytes:
    """Return bytes of another process's file, which it may cut short: a map would then end this process (SIGBUS)."""
    found = os.pread(segment.fd, size, offset)
    if len(found) < size:
        raise SegmentError(f"{segment.name} was cut short")
    return found


def _text(size: int) -> str:
    """Return bytes as a setting takes them, exactly."""
    for unit, scale in (("M", 1 << 20), ("K", 1 << 10)):
        if size % scale == 0:
            return f"{size // scale}{unit}"
    return str(size)


def suggested(mean_chunk: float) -> int:
    """Return the ``--value-size`` for chunks of this mean size: an eighth less, rounded down to two digits of a size.

    Too large a table costs 65 bytes a slot, too small a one leaves memory empty.
    """
    size = max(64, int(mean_chunk * 7 / 8))
    unit = 1 << max(6, size.bit_length() - 4)
    return size // unit * unit


@check("value-size")
def check_value_size(sys_root: str) -> Verdict:
    """Compare the tables of running arenas with the values that they hold."""
    seen = []
    for each in samples():
        label = f"{each.arena.server}, worker {each.arena.number}"
        if len(each.rows) < VALUES_MIN:
            seen.append(f"{label}: {each.entries:,} values, too few to tell")
            continue
        mean = float(each.rows["chunk"].mean())
        size = suggested(mean)
        fits = int(each.slots * FULL * mean)
        needed = slots_for(each.size, int(mean))
        spare = (each.slots - needed) * (SLOT_BYTES + 1)
        text = (
            f"{label}: about {each.entries:,} values in chunks of {mean:,.0f} bytes at the mean, {each.slots:,} slots"
        )
        if fits < 0.9 * each.data_bytes:
            return warn(
                f"{text}: the table is full when {100 * fits / each.data_bytes:.0f} % of the memory is",
                f"start the data server with --value-size {_text(size)}: a larger table",
            )
        if each.slots > SPARE_TIMES * needed and spare > each.size // SPARE_PART:
            return warn(
                f"{text}: {spare >> 20:,} MiB of the table will never be used",
                f"start the data server with --value-size {_text(size)}: a smaller table",
            )
        seen.append(text)
    return ok("; ".join(seen) or f"no data server of which this user sees arenas in {shm.SHM_DIR} runs here")


@check("workers")
def check_workers(sys_root: str) -> Verdict:
    """Find the busiest second of each worker among the values that it still holds."""
    found = samples()
    by_server: dict[tuple[int, str], list[Sample]] = {}
    for each in found:
        by_server.setdefault((each.arena.uid, each.arena.server), []).append(each)
    seen = []
    nodes = [node for node in numa.nodes(sys_root) if node.cpus]
    cores = len(os.sched_getaffinity(0)) if Path(sys_root) == Path("/") else sum(len(node.cpus) for node in nodes)
    for (_, server), mine in by_server.items():
        rate = max(busiest(each) for each in mine)
        each_node = -(-len(mine) // len(nodes))
        text = f"{server}: {len(mine)} worker(s), {rate:,.0f} puts in the busiest second of one"
        if grown := [each for each in mine if each.grown]:
            size = sum(each.size for each in grown) >> 20
            text += f", {len(grown)} of them added while it ran: a start without --warm has {size:,} MiB less"
        if rate >= BUSY_PUTS_S and cores // len(nodes) >= CORES_A_WORKER * (each_node + 1):
            return warn(
                f"{text}, of about {2 * BUSY_PUTS_S:,} that one process commits",
                f"start the data server with --workers {each_node + 1}, and --memory so much smaller",
            )
        seen.append(text)
    return ok("; ".join(seen) or f"no data server of which this user sees arenas in {shm.SHM_DIR} runs here")


def busiest(sample: Sample) -> float:
    """Return the most puts of one second, of the values that are still there: what was evicted is not counted."""
    if len(sample.rows) < VALUES_MIN:
        return 0.0
    _, counts = np.unique(sample.rows["stored"] // np.uint64(1000), return_counts=True)
    return float(counts.max()) / sample.part

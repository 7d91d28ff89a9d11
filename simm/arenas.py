"""A data server's arenas around its life: is the name free, what did predecessors leave, what does a segment say.

Nothing here maps more than a header, and nobody's live segment is changed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket

from .errors import SegmentError, SimmError
from .layout import HEADER_BYTES, SHARDS_BYTES, State, Word
from .shm import AttachedSegment, OwnedSegment, leftovers, remove_leftovers

log = logging.getLogger("simm.dataserver")

_WORKERS_MAX = 64


def check_name_is_free(runtime_dir: str, name: str) -> None:
    """Refuse a second data server of this name on this host: its sockets and segments are the other's.

    Sockets of a dead one are removed. Raises SimmError.
    """
    for number in range(_WORKERS_MAX):
        path = os.path.join(runtime_dir, f"{name}.{number}.sock")
        if not os.path.exists(path):
            continue
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as probe:
            probe.settimeout(0.5)
            with contextlib.suppress(OSError):
                probe.connect(path)
                raise SimmError(
                    f"a data server named {name!r} is running on this host already ({path}): "
                    "stop it, or give this one another --name"
                )
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def suspended(prefix: str, workers: int) -> dict[int, OwnedSegment]:
    """Segments that a clean ``--warm`` stop left under a prefix, by worker number; they are ours from now on."""
    found: dict[int, OwnedSegment] = {}
    for name in leftovers(prefix):
        number = int(name[len(prefix) :].split("-")[0])
        if number >= workers or number in found:
            continue
        try:
            if state_of(name) == State.SUSPENDED:
                found[number] = OwnedSegment.adopt(name)
                log.info("worker %d: warm start on %s", number, name)
        except SegmentError as exc:
            log.warning("cannot start warm on %s: %s", name, exc)
    return found


def remove_old(prefix: str) -> list[str]:
    """Remove leftovers: ours by name, and those of embedded clusters, whose names nobody will use again."""
    removed = remove_leftovers(prefix, before_unlink=store_closed)
    removed += remove_leftovers(f"simm-{os.geteuid()}-local-", before_unlink=store_closed)
    return removed


def state_of(name: str) -> int:
    """The STATE word of a segment; 0 when it was never an arena. Raises SegmentError when there is none."""
    with AttachedSegment.open(name) as segment:
        if segment.size < HEADER_BYTES:
            return 0
        mapped = segment.map(0, HEADER_BYTES, writable=False)
        with memoryview(mapped).cast("Q") as words:
            return int(words[Word.STATE])


def epoch_of(segment: OwnedSegment) -> int:
    """The highest map epoch that an arena has acted on."""
    with memoryview(segment.mm)[:HEADER_BYTES].cast("Q") as words:
        return int(words[Word.EPOCH])


def store_closed(name: str) -> None:
    """Say *closed* in a segment that nobody writes, so that readers which still map it look elsewhere.

    Shard words go too: a reader looks at the state now and then, but at those with each value.
    """
    with AttachedSegment.open(name, writable=True) as segment:
        size = HEADER_BYTES + SHARDS_BYTES
        if segment.size < size:
            return
        mapped = segment.map(0, size, writable=True)
        with memoryview(mapped).cast("Q") as words:
            if words[Word.MAGIC]:
                words[Word.STATE] = State.CLOSED
                words[HEADER_BYTES // 8 :] = memoryview(bytes(SHARDS_BYTES)).cast("Q")

"""Surroundings of a data server that has too little memory, for ``tests.support.patched call=``."""

from __future__ import annotations

from typing import Any


def expect_room() -> None:
    """Whoever looks finds plenty of room in /dev/shm, until a segment's pages are taken: others were faster."""
    from simm.host import memory
    from simm.shm import OwnedSegment

    real, populate = memory.shm_free_bytes, OwnedSegment.populate

    def late(segment: OwnedSegment, **more: Any) -> bool:
        memory.shm_free_bytes = real
        return populate(segment, **more)

    memory.shm_free_bytes = lambda _directory: 1 << 40
    OwnedSegment.populate = late  # type: ignore[method-assign]

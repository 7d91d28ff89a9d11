"""Surroundings of a data server that has too little memory, for ``tests.support.patched call=``."""

from __future__ import annotations

from typing import Any


def expect_room() -> None:
    """Whoever looks finds plenty of room in /dev/shm, until a segment's pages are taken: others were faster."""
    from simm.host import memory
    from simm.shm import OwnedSegment

    real, fault_in = memory.shm_free_bytes, OwnedSegment.fault_in

    def late(segment: OwnedSegment, *pages: Any) -> None:
        memory.shm_free_bytes = real
        fault_in(segment, *pages)

    memory.shm_free_bytes = lambda _directory: 1 << 40
    OwnedSegment.fault_in = late  # type: ignore[method-assign]

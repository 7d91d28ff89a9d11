"""Consistency checks of what a client remembers of RDMA and GPUs: each raises CorruptionError on a contradiction."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simm.errors import CorruptionError

if TYPE_CHECKING:
    from simm.gpu.pinning import Pinned
    from simm.rdma.api import Rail
    from simm.rdma.registration import Registration
    from simm.rdma.remote_arena import Locations
    from simm.rdma.staging import StagingPool


def check_staging(pool: StagingPool) -> None:
    """No block is free twice, and there are not too many."""
    with pool._lock:
        addresses = {block.address for block in pool._free}
        if len(addresses) != len(pool._free) or len(pool._free) > pool._made or pool._made > pool._limit:
            raise CorruptionError(f"{len(pool._free)} free blocks, {len(addresses)} different, {pool._made} made")


def check_locations(locations: Locations) -> None:
    """The cache holds not too many entries, and none under another digest."""
    if len(locations._young) * 2 >= locations._most + 2 or len(locations._old) * 2 >= locations._most + 2:
        raise CorruptionError(f"{len(locations)} entries, at most {locations._most}")
    for digest, entry in (*locations._young.items(), *locations._old.items()):
        if entry.image[8:24] != digest:
            raise CorruptionError(f"the entry of {digest.hex()} is another's")


def forget(locations: Locations) -> None:
    """Empty the cache."""
    locations._young = {}
    locations._old = {}


def check_pinned(pinned: Pinned) -> None:
    """The pieces add up to what is registered."""
    expected = [pinned.address + at for at in range(0, pinned.ready, pinned.piece)]
    if (
        not 0 <= pinned.ready <= pinned.size or pinned._pieces != expected or (expected and pinned._data is None)
    ):  # fmt: skip
        raise CorruptionError(f"{pinned!r} has pieces at {[hex(piece) for piece in pinned._pieces]}")


def rails_of(registration: Registration) -> list[Rail]:
    """Return the rails that a registration is registered with."""
    return [rail for rail, _region in registration._regions.values()]

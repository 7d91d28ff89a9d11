"""Decide which arenas a starting data server takes over, which it removes, and which it makes.

A segment that a server of the same name has left is one of these:

* *Not suspended* (its server was killed), or no arena at all. Nobody can use it. It is removed.
* *Suspended, without a cluster.* It never had a shard, so it holds nothing. It is removed.
* *Suspended, of the manager's cluster.* A warm start takes it over if it fits (``segments.fit_for_warm``). Otherwise it
  is marked closed and removed, with the reason in the log.
* *Suspended, of another cluster.* That cluster's server has the same name and other folders, and may come back for it.
  It is neither read nor removed, and the log says how to remove it.

So a server that finds a suspended arena asks its manager for the cluster's id before it decides anything.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Final

from .. import shm
from ..arena.layout import HEADER_BYTES, Geometry, State, Word
from ..arena.store import Store
from ..arena.vault import Vault
from ..constants import SLAB_BYTES
from ..errors import SegmentError, UsageError
from ..host import memory, numa
from ..host.memory import mib
from ..ipc import segments
from ..ipc.arena_files import OwnedArena, new_generation
from ..shm import data_name
from .options import DataServerOptions

log = logging.getLogger("simm.dataserver")

#: What a supervisor takes of memory, and each of its processes beside the arena; measured, and rounded up.
SUPERVISOR_BYTES: Final = 48 << 20
CHILD_BYTES: Final = 16 << 20
#: A process that maps an arena has page tables of this part of it.
PAGE_TABLE_PART: Final = 512


class ArenaStock:
    """The arenas of one data server. The names of new segments contain ``instance``."""

    def __init__(self, options: DataServerOptions, instance: int) -> None:
        self.options = options
        self.instance = instance
        #: The cluster of the arenas that were taken over, and the newest epoch that they acted on; 0 for none.
        self.cluster = 0
        self.epoch = 0
        self._foreign: list[segments.Left] = []

    @staticmethod
    def is_fresh(arena: OwnedArena, vault: Vault) -> bool:
        """Return True if the arena has not been laid out yet."""
        if vault.filled:
            return False
        with memoryview(arena.mm)[:HEADER_BYTES].cast("Q") as words:
            return bool(words[Word.MAGIC] == 0)

    def store_in(self, arena: OwnedArena, vault: Vault) -> Store:
        """Lay out a fresh arena, or recover one, in a worker's process. Raises what makes it unusable."""
        policy = self.options.policy
        if self.is_fresh(arena, vault):
            return Store.create(
                arena.mm, slots=self.options.slots, policy=policy, generation=new_generation(), vault=vault
            )
        return Store.recover(arena.mm, arena.name, policy=policy, vault=vault)

    def undecided(self) -> list[segments.Left]:
        """Return the suspended arenas with a cluster, whose fate depends on the manager's cluster."""
        return [left for left in segments.left_by(self.options.name) if left.state == State.SUSPENDED and left.cluster]

    def take_over(self, cluster: int) -> dict[int, OwnedArena]:
        """Return all workers' arenas as a clean ``--warm`` stop left them, or none. Remove this server's other ones.

        ``cluster``: the manager's; 0 if nothing was undecided. Raises SegmentError.
        """
        options = self.options
        left = segments.left_by(options.name)
        suspended = [each for each in left if each.state == State.SUSPENDED]
        self._foreign = [each for each in suspended if each.cluster not in (0, cluster)]
        for each in self._foreign:
            log.warning(
                "%s (%d MiB) is suspended and of cluster %016x, not of this one, %016x: it is neither used nor "
                "removed. If that cluster's data server will not come back: rm %s",
                each.name, each.size >> 20, each.cluster, cluster, _files(each.name),
            )  # fmt: skip
        why = {each.name: each.fault or "it never had a shard" for each in suspended if not each.cluster}
        fit: dict[int, segments.Left] = {}
        if options.warm:
            ours = [each for each in suspended if each.cluster and each.cluster == cluster]
            memory = options.memory // SLAB_BYTES * SLAB_BYTES
            fit, unfit = segments.fit_for_warm(ours, len(options.nodes), memory, options.slots)
            why |= unfit
        taken = {number: OwnedArena.adopt(each.name, group=options.group) for number, each in fit.items()}
        for number, segment in taken.items():
            log.info("worker %d: warm start on %s", number, segment.name)
        kept = {each.name for each in (*fit.values(), *self._foreign)}
        # By name, as another cluster's server of this name may suspend an arena meanwhile.
        for name in segments.remove_old([each.name for each in left if each.name not in kept]):
            if name in why:
                log.warning("%s is set aside and removed, and its worker starts cold: %s", name, why[name])
            else:
                stopped = any(each.name == name for each in suspended)
                end = "stopped with --warm" if stopped else "died"
                log.warning("removed %s, left by a data server that %s", name, end)
        self.cluster = cluster if fit else 0
        self.epoch = max((each.epoch for each in fit.values()), default=0)
        return taken

    def size(self) -> int:
        """Return the bytes of a new arena. Raises SegmentError or UsageError if there is too little memory.

        The processes need some too. Without it the kernel would end one of them, sooner or later.
        """
        workers = len(self.options.nodes)
        with self._explained():
            size = self.options.memory or memory.default_arena_bytes(shm.SHM_DIR, workers)
            in_shm, *bounds = memory.segment_bounds(shm.SHM_DIR)
            if size * workers > in_shm.bytes:
                raise SegmentError(
                    f"{workers} arena(s) of {mib(size)} need {mib(size * workers)}, but only {mib(in_shm.bytes)} "
                    f"{in_shm.what}; {in_shm.remedy}, or configure a smaller arena"
                )
            if bounds:
                least = min(bounds)
                children = workers * (2 + self.options.streams)
                room = least.bytes - SUPERVISOR_BYTES - children * CHILD_BYTES
                fits = room * PAGE_TABLE_PART // (PAGE_TABLE_PART * workers + children)
                if not self.options.memory:
                    size = min(size, max(fits, SLAB_BYTES))
                elif size > fits:
                    raise SegmentError(
                        f"{workers} arena(s) of {mib(size)} and the processes of a data server need "
                        f"{mib(size * workers + least.bytes - fits * workers)}, but only {mib(least.bytes)} "
                        f"{least.what}; {least.remedy}, or configure a smaller arena: {mib(max(0, fits))} at most"
                    )
            size = size // SLAB_BYTES * SLAB_BYTES
            Geometry.plan(size, self.options.slots)  # raises for impossible sizes before memory is taken
        return size

    def new(self, number: int, node: int, size: int) -> OwnedArena:
        """Make a worker's arena, faulted in on its NUMA node. Raises SegmentError with nothing left behind."""
        name = str(segments.ArenaName(os.geteuid(), self.options.name, number, self.instance))
        with self._explained():
            segment = OwnedArena.create(name, size, slots=self.options.slots, group=self.options.group)
            try:
                self.populate(segment, number, node)
            except BaseException:
                segment.unlink()
                segment.close()
                raise
        return segment

    def populate(self, segment: OwnedArena, number: int, node: int) -> None:
        """Fault a worker's arena in, and unmap the pages from this process again. Raises SegmentError."""
        multi = len(numa.nodes()) > 1
        huge = segment.populate(huge=self.options.huge_pages, node=node if multi else None)
        segment.remap(huge=huge)
        extra = ", huge pages asked for" if huge else ""
        log.info("worker %d: %d MiB on node %d%s", number, segment.size >> 20, node, extra)

    def keep(self, arena: OwnedArena) -> bool:
        """Keep an arena for the next start if its worker has suspended it. Return False if it is to be removed.

        Sealed data is moved into its file, which may find no room. Raises SegmentError if the arena is gone.
        """
        if segments.state_of(arena.name) != State.SUSPENDED:
            return False
        try:
            arena.keep()
        except SegmentError as exc:
            log.error("%s", exc)
            return False
        return True

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Add to an error for want of memory that another cluster's arenas take some."""
        try:
            yield
        except (SegmentError, UsageError) as exc:
            if not self._foreign:
                raise
            names = ", ".join(f"{_files(each.name)} ({each.size >> 20} MiB)" for each in self._foreign)
            raise SegmentError(
                f"{exc}; {names} is kept for another cluster's data server of this name: remove it if that one will "
                "not come back"
            ) from exc


def _files(name: str) -> str:
    """Return the paths of an arena's files."""
    return f"{shm.SHM_DIR}/{name} {shm.SHM_DIR}/{data_name(name)}"

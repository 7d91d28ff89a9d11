"""Decide which arenas a starting data server takes over, which it removes, and which it makes.

A segment that a server of the same name has left is one of these:

* *Not suspended* (its worker was killed with its server), or no arena at all. Nobody can use it. It is removed.
* *Suspended, without a cluster.* It never had a shard, so it holds nothing. It is removed.
* *Suspended, of the manager's cluster.* A warm start takes it over if it fits (``segments.fit_for_warm``). Otherwise it
  is marked closed and removed, with the reason in the log.
* *Suspended, of another cluster.* That cluster's server has the same name and other folders, and may come back for it.
  It is neither read nor removed, and the log says how to remove it.

An arena that was added to the running server (``slots/growth.py``) comes back with those that the settings ask for. Its
header names its NUMA node. A start that has no use for it removes it like any other.

A worker whose server was killed may still hold a suspended arena: the kernel unmaps it first, which takes seconds for
hundreds of GiB. A start waits for that before it looks at anything, sockets and ports included.

So a server that finds a suspended arena asks its manager for the cluster's id before it decides anything.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from .. import shm
from ..arena.events.ring import HEADER_BYTES as RING_HEADER_BYTES
from ..arena.events.ring import EventRing, attach
from ..arena.layout import HEADER_BYTES, Geometry, State, Word, slots_for
from ..arena.marks.kept import Shares
from ..arena.store import Store
from ..arena.vault import Vault, is_newer, suspend
from ..constants import ARENA_BYTES_MIN, SLAB_BYTES
from ..errors import SegmentError, SimmError, UsageError
from ..host import memory, numa
from ..host.memory import mib
from ..host.populate import Progress, Wanted, populate_all
from ..ipc import segments
from ..ipc.arena_files import OwnedArena, new_generation
from ..shm import data_name, events_name
from ..slab import chunk_bytes_for
from ..wire.messages import Shards
from .options import DataServerOptions

log = logging.getLogger("simm.dataserver")

#: What a supervisor takes of memory, and each of its processes beside the arena; measured, and rounded up.
SUPERVISOR_BYTES: Final = 48 << 20
CHILD_BYTES: Final = 16 << 20
#: Between two lines that say how far the arenas are faulted in, seconds.
LOG_S: Final = 1.0
#: A process that maps an arena has page tables of this part of it.
PAGE_TABLE_PART: Final = 512


class ArenaStock:
    """The arenas of one data server. The names of new segments contain ``instance``.

    ``while_running`` returns False once the server is to stop. ``on_wait`` gets the bytes of the arenas that dead
    workers are about to let go of, before the wait for that.
    """

    def __init__(
        self, options: DataServerOptions, instance: int, while_running: Callable[[], bool] = lambda: True,
        on_wait: Callable[[int], object] = lambda size: None,
    ) -> None:  # fmt: skip
        self.options = options
        self.instance = instance
        self._while_running = while_running
        self._on_wait = on_wait
        #: The cluster of the arenas that were taken over, and the newest epoch that they acted on; 0 for none.
        self.cluster = 0
        self.epoch = 0
        #: The NUMA node of each worker, those that were added to the running server too.
        self.nodes = dict(enumerate(options.nodes))
        self._foreign: list[segments.Left] = []
        self._waited = False

    @staticmethod
    def is_fresh(arena: OwnedArena, vault: Vault) -> bool:
        """Return True if the arena has not been laid out yet."""
        if vault.filled:
            return False
        with memoryview(arena.mm)[:HEADER_BYTES].cast("Q") as words:
            return bool(words[Word.MAGIC] == 0)

    def store_in(self, number: int, arena: OwnedArena, vault: Vault, policy: str, shares: Shares) -> Store:
        """Lay out a worker's fresh arena, or recover it, in the worker's process. Raises what makes it unusable.

        ``policy``, ``shares``: as an operator may have changed them since the start of the server.
        """
        ring = None if arena.events is None else EventRing(arena.events.buf)
        if ring is not None:
            ring.anew()  # before anything changes
        if self.is_fresh(arena, vault):
            store = Store.create(
                arena.mm, slots=self.slots_for(arena.size), policy=policy, generation=new_generation(), vault=vault,
                shares=shares,
            )  # fmt: skip
        else:
            store = Store.recover(arena.mm, arena.name, policy=policy, vault=vault, shares=shares)
        vault.header[Word.GROWN] = self.nodes[number] + 1 if number >= len(self.options.nodes) else 0
        with memoryview(arena.mm)[:HEADER_BYTES].cast("Q") as words:
            words[Word.GROWN] = vault.header[Word.GROWN]
        store.near.say(shares[2])
        if ring is not None:
            attach(ring, store.table, store.shard_words, store.ledger.namespaces)
        return store

    def undecided(self) -> list[segments.Left]:
        """Return the suspended arenas with a cluster, whose fate depends on the manager's cluster."""
        return [left for left in self._left() if left.state == State.SUSPENDED and left.cluster]

    def await_workers(self) -> bool:
        """Wait for the workers of a server of this name that has died, once. Return whether this one is to go on.

        The kernel unmaps their arenas before it closes their files. So it is done before sockets and ports are looked
        at, too, which they have open that long. See :func:`segments.await_writers` for how long that may be.
        """
        self._await_once()
        return self._while_running()

    def _await_once(self) -> None:
        if not self._waited:
            self._waited = True
            segments.await_writers(self.options.name, self._while_running, self._on_wait)

    def _left(self) -> list[segments.Left]:
        """Return what servers of this name have left. The first call waits for the workers of one that has died."""
        self._await_once()
        return segments.left_by(self.options.name)

    def take_over(self, cluster: int) -> dict[int, OwnedArena]:
        """Return all workers' arenas as a clean ``--warm`` stop left them, or none. Remove this server's other ones.

        ``cluster``: the manager's; 0 if nothing was undecided. Raises SegmentError or OSError; the next start can take
        over then what this one has taken.
        """
        options = self.options
        left = self._left()
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
            fit, unfit = segments.fit_for_warm(ours, len(options.nodes), memory, self.slots_for)
            why |= unfit
        there = {node.id for node in numa.nodes()}
        for number, each in fit.items():
            if number not in self.nodes:
                self.nodes[number] = each.grown - 1 if each.grown - 1 in there else options.nodes[0]
        taken: dict[int, OwnedArena] = {}
        with contextlib.ExitStack() as undo:
            for number, each in fit.items():
                taken[number] = segment = OwnedArena.adopt(each.name, group=options.group)
                undo.callback(_put_back, segment)
            for number, segment in taken.items():
                segments.remove_events(segment.name)  # of a server that was killed
                if options.events:
                    segment.tell_events(RING_HEADER_BYTES + options.events, options.group)
                log.info("worker %d: warm start on %s", number, segment.name)
            kept = {each.name for each in (*fit.values(), *self._foreign)}
            # By name, as another cluster's server of this name may suspend an arena meanwhile.
            for name in segments.remove_old([each.name for each in left if each.name not in kept], self._while_running):
                if name in why:
                    log.warning("%s is set aside and removed, and its worker starts cold: %s", name, why[name])
                else:
                    stopped = any(each.name == name for each in suspended)
                    end = "stopped with --warm" if stopped else "died"
                    log.warning("removed %s, left by a data server that %s", name, end)
            undo.pop_all()
        self.cluster = cluster if fit else 0
        self.epoch = max((each.epoch for each in fit.values()), default=0)
        return taken

    @contextlib.contextmanager
    def handing_over(self, arenas: Mapping[int, OwnedArena]) -> Iterator[None]:
        """Put arenas back if the body raises, or remove them if they are new: nobody else has them yet.

        ``arenas``: all that :meth:`take_over` or :meth:`new` has returned.
        """
        with contextlib.ExitStack() as undo:
            for arena in arenas.values():
                if self.cluster:
                    undo.callback(_put_back, arena)
                else:
                    undo.callback(arena.close)
                    undo.callback(arena.unlink)
            yield
            undo.pop_all()

    def size(self) -> int:
        """Return the bytes of a new arena. Raises SegmentError if there is too little memory.

        The processes need some too. Without it the kernel would end one of them, sooner or later. Raises UsageError if
        no arena of the size that was asked for has so many slots.
        """
        workers = len(self.options.nodes)
        with self._explained():
            if self.options.hugetlb:
                return self._size_in_reserved(workers)
            size = self.options.memory or memory.default_arena_bytes(shm.SHM_DIR, workers)
            if not self.options.memory and (share := numa.share_of_nodes(self.options.nodes)) is not None:
                size = _within(size, share, memory.DEFAULT_ARENA_PERCENT, "")
            in_shm, *bounds = memory.segment_bounds(shm.SHM_DIR)
            by = min([in_shm, *bounds])
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
                if size > fits and self.options.memory:
                    raise SegmentError(
                        f"{workers} arena(s) of {mib(size)} and the processes of a data server need "
                        f"{mib(size * workers + least.bytes - fits * workers)}, but only {mib(least.bytes)} "
                        f"{least.what}; {least.remedy}, or configure a smaller arena: {mib(max(0, fits))} at most"
                    )
                if size > fits:
                    size, by = max(0, fits), least
            size = size // SLAB_BYTES * SLAB_BYTES
            self._plan(size, by)
        return size

    def _plan(self, size: int, bound: memory.Bound) -> Geometry:
        """Return the layout of a new arena, before memory is taken. Raises UsageError for a size that was asked for.

        A size by default follows from ``bound``, which other programs may give back: SegmentError, so that a unit tries
        again.
        """
        try:
            return Geometry.plan(size, self.slots_for(size))
        except UsageError as exc:
            if self.options.memory:
                raise
            raise SegmentError(
                f"{exc}; only {mib(bound.bytes)} {bound.what}, for {len(self.options.nodes)} arena(s) and the "
                f"processes: {bound.remedy}"
            ) from None

    def _size_in_reserved(self, workers: int) -> int:
        """Return the bytes of a new arena whose data is in reserved huge pages: by default all that are free.

        Raises SegmentError or UsageError. The table is in ordinary memory, of which it takes 2 % of that.
        """
        bound = memory.reserved_bound(ARENA_BYTES_MIN * workers)
        free = bound.bytes
        if not self.options.memory and free // workers < ARENA_BYTES_MIN:
            raise SegmentError(
                f"{workers} arena(s) in reserved huge pages need at least {mib(ARENA_BYTES_MIN * workers)}, but only "
                f"{mib(free)} {bound.what}; {bound.remedy}, or leave --hugetlb out"
            )
        size = self.options.memory or free // workers
        left = None if self.options.memory else numa.share_of_nodes(self.options.nodes, free=numa.reserved_free_bytes)
        if left is not None:
            size = _within(size, left, 100, " in reserved huge pages")
        size = size // SLAB_BYTES * SLAB_BYTES
        geometry = self._plan(size, bound)
        reserved = memory.whole_huge_pages(geometry.data_file_bytes)
        if reserved * workers > free:
            bound = memory.reserved_bound(reserved * workers)
            raise SegmentError(
                f"{workers} arena(s) of {mib(size)} need {mib(reserved * workers)} of reserved huge pages (--hugetlb), "
                f"but only {mib(free)} {bound.what}; {bound.remedy}, or configure a smaller arena"
            )
        processes = SUPERVISOR_BYTES + workers * (2 + self.options.streams) * CHILD_BYTES
        for bound in memory.segment_bounds(shm.SHM_DIR):
            if (needed := geometry.meta_bytes * workers + processes) > bound.bytes:
                raise SegmentError(
                    f"{workers} table(s) of {mib(geometry.meta_bytes)} and the processes of a data server need "
                    f"{mib(needed)}, but only {mib(bound.bytes)} {bound.what}; {bound.remedy}, or ask for fewer --slots"
                )
        return size

    def require_room(self, size: int, node: int) -> None:
        """Raise SegmentError or UsageError unless a running server can have one more arena of ``size`` bytes."""
        geometry = Geometry.plan(size, self.slots_for(size))
        reserved = memory.whole_huge_pages(geometry.data_file_bytes) if self.options.hugetlb else 0
        ordinary = geometry.meta_bytes if reserved else size
        processes = 2 + self.options.streams
        needed = ordinary + ordinary // PAGE_TABLE_PART * processes + processes * CHILD_BYTES
        with self._explained():
            in_shm, *bounds = memory.segment_bounds(shm.SHM_DIR)
            wanted = [(ordinary, "the arena needs", in_shm)]
            wanted += [(needed, "the arena and its processes need", bound) for bound in bounds]
            if reserved:
                wanted.append((reserved, "the arena needs", memory.reserved_bound(reserved)))
            for count, what, bound in wanted:
                if count > bound.bytes:
                    raise SegmentError(f"{what} {mib(count)}, but only {mib(bound.bytes)} {bound.what}; {bound.remedy}")
            if len(numa.nodes()) > 1:
                for count, what, left in (
                    (ordinary, "", numa.node_free_bytes(node)),
                    (reserved, " in reserved huge pages", numa.reserved_free_bytes(node)),
                ):
                    if left is not None and count > left:
                        raise SegmentError(
                            f"the arena needs {mib(count)}{what} on NUMA node {node}, which has {mib(left)} left"
                        )

    def create(self, number: int, size: int) -> OwnedArena:
        """Make the files of a worker's arena, none of their pages yet. Raises SegmentError; nothing is left then."""
        options = self.options
        name = str(segments.ArenaName(os.geteuid(), options.name, number, self.instance))
        with contextlib.ExitStack() as undo:
            arena = OwnedArena.create(
                name, size, slots=self.slots_for(size), group=options.group, hugetlb=options.hugetlb
            )
            undo.callback(arena.close)
            undo.callback(arena.unlink)
            if options.events:
                arena.tell_events(RING_HEADER_BYTES + options.events, options.group)
            undo.pop_all()
        return arena

    def new(self, size: int, numbers: Iterable[int], progress: Progress) -> dict[int, OwnedArena]:
        """Make an arena for each of these workers, faulted in; none if ``progress`` ends that, see :meth:`populate`.

        Raises SegmentError. Nothing is left behind in both cases.
        """
        made: dict[int, OwnedArena] = {}
        with self._explained(), contextlib.ExitStack() as undo:
            for number in numbers:
                made[number] = arena = self.create(number, size)
                undo.callback(arena.close)
                undo.callback(arena.unlink)
            if not self.populate(made, progress):
                return {}
            undo.pop_all()
        return made

    def replace(self, number: int, old: OwnedArena, progress: Progress) -> OwnedArena | None:
        """Remove a worker's arena and make one of its size, faulted in. None once the server is to stop.

        The new one may need the memory of the old one. That is waited for, but for data in a memfd, as with ``--group``
        and of huge pages. Raises SegmentError. As long as the old one is there this process owns it. A new one is there
        only if it is returned.
        """
        if not self._while_running():
            return None
        log.warning("%s is set aside and removed: worker %d starts cold", old.name, number)
        let_go = segments.LetGo()
        for name in (old.name, data_name(old.name), events_name(old.name)):
            let_go.measure(name)
        segments.store_closed(old.name)
        old.unlink()  # by its owner: a child that was forked a moment ago may have the lock, too
        old.close()
        let_go.wait(self._while_running)
        return self.new(old.size, [number], progress).get(number) if self._while_running() else None

    def populate(self, arenas: Mapping[int, OwnedArena], progress: Progress) -> bool:
        """Fault workers' arenas in, by number, and unmap the pages from this process again. Raises SegmentError.

        Takes as long as it takes, and logs a line each ``LOG_S`` seconds. Returns False if ``progress`` has ended it.
        """
        nodes, multi = self.nodes, len(numa.nodes()) > 1
        wanted = [Wanted(file, nodes[number], multi) for number, arena in arenas.items() for file in arena.files]
        began = time.monotonic()
        next_s = began + LOG_S

        def tell(done: int, new: int, total: int) -> bool:
            nonlocal next_s
            now = time.monotonic()
            if now >= next_s:
                next_s = now + LOG_S
                rate = done / (now - began)
                left = f", {(total - done) / rate:,.0f} s to go" if done else ""
                log.info("faulted in %s of %s, %s/s%s", mib(done), mib(total), mib(round(rate)), left)
            return progress(done, new, total)

        if not populate_all(wanted, huge=self.options.huge_pages, progress=tell):
            return False
        spent = max(1e-3, time.monotonic() - began)
        huge = self.options.huge_pages and memory.huge_pages_allowed()
        for number, arena in arenas.items():
            arena.remap(huge=huge)
            extra = ", huge pages asked for" if huge else ""
            if self.options.hugetlb:
                extra = ", its data in reserved huge pages"
            log.info("worker %d: %d MiB on node %d%s", number, arena.size >> 20, nodes[number], extra)
        total = sum(arena.size for arena in arenas.values())
        log.info("faulted in %s in %.1f s, %s/s", mib(total), spent, mib(round(total / spent)))
        return True

    def slots_for(self, size: int) -> int:
        """Return the configured slots of an arena of ``size`` bytes, 0 for the default."""
        options = self.options
        return slots_for(size, chunk_bytes_for(options.value_bytes)) if options.value_bytes else options.slots

    def keep(self, arena: OwnedArena, vault: Vault | None, order: Shards) -> bool:
        """Keep an arena for the next start, which no worker uses any more. Return False if it is to be removed.

        If its worker has not suspended it, or missed the newest map, ``order``, that is done now, from its ``vault``.
        With None it must be suspended. A start takes arenas only if they end with the same map: see
        ``segments.fit_for_warm``.

        Sealed data is moved into its file, which may find no room. Raises SegmentError if the arena is gone.
        """
        left = segments.inspect(arena.name)
        if left.state != State.SUSPENDED or is_newer(order, left.epoch):
            if vault is None or not suspend(arena.mm, arena.name, vault, order):
                return False
            log.warning("%s is suspended by the supervisor: its worker did not, or missed the last map", arena.name)
        try:
            arena.keep()
        except SegmentError as exc:
            log.error("%s", exc)
            return False
        arena.drop_events()  # last: what fails here costs no value
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


def _put_back(arena: OwnedArena) -> None:
    """Leave an arena that was taken over as it was found. No worker has used it."""
    for step in (arena.keep, arena.drop_events):
        try:
            step()
        except (SimmError, OSError) as exc:
            log.error("putting %s back: %s", arena.name, exc)
    arena.close()


def _within(size: int, share: tuple[int, int], percent: int, what: str) -> int:
    """Return a default size that fits the fullest node, too, and log it if that is a smaller one.

    ``share``: of ``numa.share_of_nodes``. Raises SegmentError if no arena fits.
    """
    left, node = share
    fits = left * percent // 100
    if fits >= size:
        return size
    if fits < ARENA_BYTES_MIN:
        raise SegmentError(
            f"an arena needs at least {mib(ARENA_BYTES_MIN)}, but NUMA node {node} has {mib(left)}{what} left for each "
            "of its workers; free some there, or leave the node out: --numa"
        )
    log.warning(
        "arenas of %s by default, where the whole host has room for %s each: NUMA node %d has %s%s left for each of "
        "its workers; --numa leaves a node out", mib(fits // SLAB_BYTES * SLAB_BYTES), mib(size), node, mib(left), what,
    )  # fmt: skip
    return fits


def _files(name: str) -> str:
    """Return the paths of an arena's files."""
    return f"{shm.SHM_DIR}/{name} {shm.SHM_DIR}/{data_name(name)}"

"""An endpoint's devices: opening them, registering the arena on them, and the memory windows over granted chunks.

There may be no library, no device, no active port, no permission, or too little lockable memory; or a device may
disappear in use. None of that ends the endpoint. :attr:`Devices.down_reason` has the reason, and the endpoint tries
again every REOPEN_S seconds. A device that disappears breaks its queue pairs and thereby its leases. That becomes known
when no new queue pair can be made. Once the last lease is closed, the endpoint opens all devices again.

A worker may come back with another arena. The endpoint then closes all leases and devices at its next upkeep, and opens
the devices for the new arena. Until then it makes no grants, as a client would write into the old one.

Memory windows
--------------
A client may write a granted chunk through a memory window. The endpoint binds the window to one queue pair and one
chunk when it grants the chunk, which makes a key. It invalidates the window before the chunk is published or returned,
which ends the key. The device refuses a later WRITE and breaks its queue pair.

* Windows are pooled per queue pair, because allocating one is a system call and binding one takes a few hundred ns.
  When a process is killed, the kernel destroys its objects in reverse creation order. Destroying a queue pair blocks
  while a window created *before* it is still bound to it. On soft-RoCE this took 50 s per queue pair, during which the
  process could not be replaced. If a device has no more windows, idle ones of other queue pairs are freed.
* The state of a window whose queue pair was destroyed is unknown. Such a window is freed, not pooled.
* Cards compare a WRITE with the window's bounds. Soft-RoCE (Linux 6.1) checks the window's key and queue pair, but the
  bounds of the region below it. There only the time of a WRITE is guarded, not its length.
* A window lies within one region. A chunk that crosses the end of a piece gets a region of its own while it is granted.

Registered regions
------------------
The registrations decide what a peer may access, whatever the peer believes:

    header, shards, slots   read
    visited                 read and written: a byte per slot; at worst an entry stays longer
    ledger                  not registered
    data                    read; written by memory windows or, on devices without them, by every client

Registering pins pages and holds the interpreter, 0.1 to 2 s per GiB, and some devices limit the size of a region. So
the loop registers the arena in pieces, one per turn (:meth:`ArenaRegions.step`).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..arena.layout import Word
from ..arena.reader import ArenaReader
from ..constants import PAGE_BYTES
from ..errors import SegmentError
from ..net.loop import Loop
from ..rdma.api import Absence, Access, Binding, Fabric, FabricError, QueuePair, Rail, Region, Window
from ..shm import AttachedSegment
from ..wire import rdma_messages as R
from .worker_session import WorkerSessionKeeper

log = logging.getLogger("simm.server.rdma_endpoint")

#: Between two tries to open the devices.
REOPEN_S: Final = 10.0
ANOTHER_ARENA: Final = "the worker has another arena"


class ArenaGone(FabricError):
    """The arena that was to be registered is not there any more. Nothing is wrong with the devices."""


class Devices:
    """The rails of one endpoint with its arena registered on them.

    Args:
        keeper: has the arena.
        open_fabric: opens this process's rails, or says why there are none.
        windows: let chunks be written by memory windows, if all devices have them.
        piece_bytes: the most that is registered at a time.
        on_lost: closes everything made of the devices, which are about to be closed.
    """

    def __init__(
        self, loop: Loop, keeper: WorkerSessionKeeper, open_fabric: Callable[[], Fabric | Absence], *,
        windows: bool, piece_bytes: int, on_lost: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._loop = loop
        self._keeper = keeper
        self._open_fabric = open_fabric
        self._use_windows = windows
        self._piece_bytes = piece_bytes
        self._on_lost = on_lost
        #: Why there is no RDMA just now; None when there is.
        self.down_reason: str | None = "starting"
        self.fabric: Fabric | None = None
        self.registration: ArenaRegions | None = None
        self.windows: WindowPool | None = None
        #: How often the devices have failed: with ``--rdma on`` the server ends if they do before RDMA was ready.
        self.opens_failed = 0
        #: Why they have failed, until there is RDMA: registering takes minutes, and may fail again.
        self._failure = ""
        #: Why a queue pair could not be made: the devices may have gone.
        self.suspect = ""
        self._open_at = 0.0

    @property
    def reason(self) -> str:
        """:attr:`down_reason` as text, with how far the registration is."""
        registration = self.registration
        if registration is not None and not self.has(self._keeper.reader):
            return ANOTHER_ARENA
        if self.down_reason is None:
            return ""
        if registration is not None and registration.done_bytes < registration.total_bytes:
            return f"registering, {registration.progress}"
        return self.down_reason

    def has(self, arena: ArenaReader | None) -> bool:
        """Return True if ``arena`` is the one registered. A client can write into the chunks of no other one."""
        return self.registration is not None and self.registration.arena is arena

    def maintain(self, in_use: bool) -> None:
        """Open the devices when it is time; ``in_use`` while leases are open. Call it a few times per second.

        Raises FabricError as :meth:`close` does.
        """
        if self.fabric is None:
            if self._loop.now >= self._open_at:
                self._open()
        elif not self.has(self._keeper.reader):
            self._lost(ANOTHER_ARENA, failed=False)
            self._open_at = 0.0  # nothing is wrong with the devices
        elif self.suspect and not in_use:
            self._lost(self.suspect)

    def _not_ready(self, reason: str) -> None:
        if reason != self.down_reason:
            self.down_reason = reason
            level = logging.INFO if reason.startswith("registering") else logging.WARNING
            log.log(level, "no RDMA: %s", reason)

    def _open(self) -> None:
        arena = self._keeper.arena()
        if arena is None:
            self._not_ready("the worker is down")
            return
        self._open_at = self._loop.clock() + REOPEN_S
        self.suspect = ""
        try:
            found = self._open_fabric()
            if isinstance(found, Absence):
                raise FabricError(str(found))
            self.fabric = found
            if not found.rails:
                raise FabricError("no port of an RDMA device is to be used")
            windows = self._use_windows and all(rail.limits.windows for rail in found.rails)
            if self._use_windows and not windows:
                log.warning("not all RDMA devices have memory windows: every client can write all of the data")
            self.registration = ArenaRegions(arena, found.rails, windows=windows, piece_bytes=self._piece_bytes)
            self.windows = WindowPool(self.registration) if windows else None
        except FabricError as exc:
            self._lost(str(exc), failed=not isinstance(exc, ArenaGone))
            return
        self._not_ready(f"registering again after: {self._failure}" if self._failure else "registering")
        self._register(self.registration)

    def _register(self, registration: ArenaRegions) -> None:
        """Register a piece, and the next one in the next turn of the loop."""
        if registration is not self.registration:
            return
        try:
            more = registration.step()
        except FabricError as exc:
            self._lost(str(exc))
            return
        if more:
            self._loop.call_later(0.0, lambda: self._register(registration))
            return
        self.down_reason, self._failure = None, ""
        log.info(
            "RDMA: %d MiB in %d regions on %s; %s", registration.done_bytes >> 20, len(registration.regions),
            ", ".join(rail.name for rail in registration.rails),
            "chunks are written by memory windows" if registration.windows else "clients may write all of the data",
        )  # fmt: skip

    def _lost(self, reason: str, *, failed: bool = True) -> None:
        """Close the devices and everything made on them, and try again later. ``failed``: the devices are to blame."""
        self.opens_failed += failed
        self._failure = reason if failed else ""
        self._not_ready(reason)
        self._open_at = self._loop.clock() + REOPEN_S
        self._on_lost(reason)
        self.close()

    def close(self) -> None:
        """Close the devices. Raises FabricError if that is impossible; this process must end then."""
        fabric, self.fabric = self.fabric, None
        self.registration = self.windows = None
        if fabric is not None:
            fabric.close()


#: Idle windows kept, for each queue pair.
IDLE_MAX: Final = 4096


class BoundWindow:
    """A window bound to one chunk and one queue pair. ``bridge`` is the region that was made for it, if any."""

    __slots__ = ("binding", "bridge", "qp", "rail")

    def __init__(self, rail: int, qp: QueuePair, binding: Binding, bridge: Region | None) -> None:
        self.rail = rail
        self.qp = qp
        self.binding = binding
        self.bridge = bridge

    @property
    def key(self) -> int:
        """The rkey that allows WRITEs, valid since :meth:`WindowPool.bind`."""
        return self.binding.window.rkey


class WindowPool:
    """The windows of all rails."""

    def __init__(self, registration: ArenaRegions) -> None:
        self._registration = registration
        self._rails = registration.rails
        #: For each rail, by queue pair; which are compared by identity, and kept until :meth:`close_idle`.
        self._idle: list[dict[QueuePair, list[Window]]] = [{} for _ in self._rails]
        self._made = [0] * len(self._rails)

    @property
    def made(self) -> int:
        """Return the number of windows."""
        return sum(self._made)

    def prepare(self, rail: int, qp: QueuePair, chunks: Sequence[tuple[int, int]]) -> list[BoundWindow]:
        """Return windows, not yet bound, for a queue pair of that rail and chunks (offset in the segment, bytes).

        Raises FabricError if there are too few, and takes none then.
        """
        bound_windows: list[BoundWindow] = []
        try:
            for offset, length in chunks:
                bound_windows.append(self._one(rail, qp, offset, length))
        except FabricError:
            self.release(bound_windows)
            raise
        return bound_windows

    def _one(self, rail: int, qp: QueuePair, offset: int, length: int) -> BoundWindow:
        registration, place = self._registration, self._rails[rail]
        address = registration.address_of(offset)
        region = registration.region_of(rail, offset, length)
        bridge = None
        if region is None:
            if length > place.limits.region_bytes:
                raise FabricError(f"{place.name} has no region as long as a chunk of {length} bytes")
            region = bridge = place.register(address, length, Access.REMOTE_READ | Access.LOCAL_WRITE | Access.WINDOWS)
        idle = self._idle[rail].get(qp)
        if idle:
            window = idle.pop()
        else:
            try:
                if self._made[rail] >= place.limits.windows and not self._free_one(rail):
                    raise FabricError(f"all {place.limits.windows} memory windows of {place.name} are in use")
                window = self._new(rail)
            except FabricError:
                if bridge is not None:
                    bridge.close()
                raise
            self._made[rail] += 1
        return BoundWindow(rail, qp, Binding(window, region, address, length), bridge)

    def _new(self, rail: int) -> Window:
        """Return a new window. Other processes have windows of the device too: one that is idle makes room for it."""
        place = self._rails[rail]
        try:
            return place.window()
        except FabricError:
            if not self._free_one(rail):
                raise
            return place.window()

    def _free_one(self, rail: int) -> bool:
        """Free an idle window of the queue pair that has most; return False if there is none. Raises FabricError."""
        idle = max(self._idle[rail].values(), key=len, default=None)
        if not idle:
            return False
        self._close(rail, idle.pop())
        return True

    def bind(self, qp: QueuePair, bound_windows: Sequence[BoundWindow]) -> None:
        """Bind windows to a queue pair, which makes their keys. Raises FabricError: close the queue pair then."""
        for start in range(0, len(bound_windows), qp.depth):
            qp.bind([bound_window.binding for bound_window in bound_windows[start : start + qp.depth]])

    def unbind(self, qp: QueuePair, bound_windows: Sequence[BoundWindow]) -> None:
        """Invalidate windows: no WRITE by their keys is in flight when this returns.

        Raises FabricError: nothing is certain then until the queue pair is closed.
        """
        for start in range(0, len(bound_windows), qp.depth):
            qp.invalidate([bound_window.binding.window for bound_window in bound_windows[start : start + qp.depth]])

    def release(self, bound_windows: Iterable[BoundWindow]) -> None:
        """Keep unbound windows for the next chunks of their queue pair."""
        for bound_window in bound_windows:
            idle = self._idle[bound_window.rail].setdefault(bound_window.qp, [])
            if len(idle) < IDLE_MAX:
                idle.append(bound_window.binding.window)
            else:
                self._close(bound_window.rail, bound_window.binding.window)
            if bound_window.bridge is not None:
                bound_window.bridge.close()

    def free(self, bound_windows: Iterable[BoundWindow]) -> None:
        """Free windows whose queue pair was closed while they were bound."""
        for bound_window in bound_windows:
            self._close(bound_window.rail, bound_window.binding.window)
            if bound_window.bridge is not None:
                bound_window.bridge.close()

    def close_idle(self, rail: int, qp: QueuePair) -> None:
        """Free the idle windows of a closed queue pair of that rail."""
        for window in self._idle[rail].pop(qp, ()):
            self._close(rail, window)

    def _close(self, rail: int, window: Window) -> None:
        window.close()
        self._made[rail] -= 1


PIECE_BYTES: Final = 1 << 30


class Piece(NamedTuple):
    """Bytes ``start`` to ``start + length`` of the arena, mapped here at ``address``."""

    start: int
    length: int
    address: int
    access: Access
    flags: int
    data: bool


def map_meta(arena: ArenaReader) -> NDArray[np.uint64]:
    """Map header, shards and slots once more, writable, though nothing is stored there.

    Up to Linux 6.1 pages of a read-only shared map cannot be pinned, not even for reading (EFAULT): the kernel asks for
    writable ones and overrides that for private maps only. Raises FabricError, ArenaGone if there is no such
    segment any more or it is another one now.
    """
    try:
        segment = AttachedSegment.open(arena.name, writable=True)
        try:
            meta = np.frombuffer(segment.map(0, arena.geometry.reader_bytes, writable=True), np.uint64)
        finally:
            segment.close()  # the map stays with its view
    except SegmentError as exc:
        gone = isinstance(exc.__cause__, FileNotFoundError)
        raise (ArenaGone if gone else FabricError)(str(exc)) from exc
    # Not the incarnation, which is 1 in each new arena.
    if int(meta[Word.GENERATION]) != int(arena.words[Word.GENERATION]):
        raise ArenaGone(f"{arena.name} is another arena now")
    return meta


def pieces(arena: ArenaReader, meta: NDArray[np.uint64], *, windows: bool, most: int) -> list[Piece]:
    """Return what is registered on one rail, in pieces of at most ``most`` bytes (a multiple of the page size)."""
    geometry = arena.geometry
    data = Access.REMOTE_READ | Access.LOCAL_WRITE | (Access.WINDOWS if windows else Access.REMOTE_WRITE)
    parts = (
        Piece(0, geometry.reader_bytes, meta.ctypes.data, Access.REMOTE_READ, 0, False),
        Piece(
            geometry.visited_offset, geometry.slots,
            np.frombuffer(arena.visited, np.uint8).ctypes.data,
            Access.REMOTE_READ | Access.REMOTE_WRITE | Access.LOCAL_WRITE, R.REGION_WRITABLE, False,
        ),
        Piece(
            geometry.data_offset, geometry.data_bytes, arena.data_address, data,
            0 if windows else R.REGION_WRITABLE, True,
        ),
    )  # fmt: skip
    return [
        part._replace(start=part.start + at, length=min(most, part.length - at), address=part.address + at)
        for part in parts
        for at in range(0, part.length, most)
    ]


class ArenaRegions:
    """The regions of one arena on all rails. They end with their rails.

    The arena is mapped for writing, and kept, as its maps must stay as long as the regions. Raises FabricError if there
    are too many regions, or the arena is gone.
    """

    def __init__(
        self, arena: ArenaReader, rails: Sequence[Rail], *, windows: bool, piece_bytes: int = PIECE_BYTES
    ) -> None:
        self.arena = arena
        self._meta = map_meta(arena)
        self.rails = rails
        self.windows = windows
        #: What is registered, as a client is told.
        self.regions: list[R.RdmaRegion] = []
        self.done_bytes = 0
        self._todo: deque[tuple[int, Piece]] = deque()
        #: For each rail: bytes of its pieces, and the regions of the data, in order.
        self._most: list[int] = []
        self._data: list[list[Region]] = []
        for number, rail in enumerate(rails):
            most = min(piece_bytes, rail.limits.region_bytes) // PAGE_BYTES * PAGE_BYTES
            if most <= 0:
                raise FabricError(f"{rail.name} registers no more than {rail.limits.region_bytes} bytes at a time")
            # A device's limit cannot be helped; our own gives way before an arena has too many pieces.
            enough = R.RDMA_REGIONS_MAX // (2 * len(rails))
            while arena.geometry.size // most > enough and most * 2 <= rail.limits.region_bytes:
                most *= 2
            self._most.append(most)
            self._data.append([])
            self._todo += [(number, piece) for piece in pieces(arena, self._meta, windows=windows, most=most)]
        if len(self._todo) > R.RDMA_REGIONS_MAX:
            raise FabricError(
                f"{len(self._todo)} regions would be needed, {R.RDMA_REGIONS_MAX} are possible: the devices "
                f"register no more than {min(self._most)} bytes at a time"
            )
        self.total_bytes = sum(piece.length for _, piece in self._todo)

    def step(self) -> bool:
        """Register the next piece; return whether there are more. Raises FabricError."""
        if not self._todo:
            return False
        number, piece = self._todo[0]
        region = self.rails[number].register(piece.address, piece.length, piece.access)
        self._todo.popleft()
        if piece.data:
            self._data[number].append(region)
        self.regions.append(R.RdmaRegion(number, piece.flags, piece.start, piece.length, piece.address, region.rkey))
        self.done_bytes += piece.length
        return bool(self._todo)

    @property
    def progress(self) -> str:
        """Return the progress as text."""
        return f"{self.done_bytes >> 20} of {self.total_bytes >> 20} MiB"

    def address_of(self, offset: int) -> int:
        """Return the address of a byte of the data in this process."""
        return self.arena.data_address + offset - self.arena.data_offset

    def region_of(self, rail: int, offset: int, length: int) -> Region | None:
        """Return the region that has all of these bytes of the data; None if they cross the end of a piece."""
        most = self._most[rail]
        at = offset - self.arena.data_offset
        first = at // most
        return self._data[rail][first] if first == (at + length - 1) // most else None

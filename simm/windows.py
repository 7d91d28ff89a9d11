"""Memory windows over granted chunks: who has a grant can write there, by this link, and nowhere else.

A window is bound to one link and one chunk when the chunk is granted, which makes a key, and invalidated before the
chunk is published or given back, which ends the key: a WRITE that comes later is refused by the device, and breaks
the link that it came by. So a late WRITE, of a client that was thought dead or that is mad, never reaches a chunk
that is somebody else's by now.

* Making a window is a call into the kernel; binding one is a few hundred ns of the device. They are pooled, for each
  link of its own: the kernel destroys what a process that is killed had in the reverse order of making, and a queue
  pair that is to go while an *older* window is bound to it is waited for. With soft-RoCE that was 50 s for each link,
  with the process undead and no successor all the while. Where a device has no more of them, idle ones of other links
  are freed, or a link that had many once would keep them from all others.
* A window that was bound when its link was destroyed is in no state to be relied upon: it is freed, not pooled.
* Cards compare a WRITE with the window's bounds. Linux's soft-RoCE (rxe, as of 6.1) looks up the window's key, and its
  link, and then compares with the bounds of the region below it: there only the time of a WRITE is guarded, not its
  length.
* A window lies within one region. A chunk across the end of one (of a few MiB at a piece's end, one GiB apart) gets a
  region of its own as long as it is granted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from .arena_regions import Registration
from .errors import CorruptionError
from .fabric import Access, Binding, FabricError, Link, Region, Window

#: Idle windows kept, for each link.
IDLE_MAX: Final = 4096


class Cover:
    """A window over one chunk for one link. ``bridge``: the region of its own that it needed."""

    __slots__ = ("binding", "bridge", "link", "rail")

    def __init__(self, rail: int, link: Link, binding: Binding, bridge: Region | None) -> None:
        self.rail = rail
        self.link = link
        self.binding = binding
        self.bridge = bridge

    @property
    def key(self) -> int:
        """What allows to WRITE, since :meth:`Windows.bind`."""
        return self.binding.window.rkey


class Windows:
    """The windows of all rails."""

    def __init__(self, registration: Registration) -> None:
        self._registration = registration
        self._rails = registration.rails
        #: For each rail, by link; which are compared by identity, and kept until :meth:`retire`.
        self._idle: list[dict[Link, list[Window]]] = [{} for _ in self._rails]
        self._made = [0] * len(self._rails)

    @property
    def made(self) -> int:
        """How many there are."""
        return sum(self._made)

    def address_of(self, offset: int) -> int:
        """Where a byte of the segment's data lies in this process."""
        return self._registration.address_of(offset)

    def check(self, in_use: int) -> None:
        """``in_use``: windows of all lanes. Raises CorruptionError when the books contradict themselves."""
        idle = sum(len(windows) for links in self._idle for windows in links.values())
        if self.made != idle + in_use:
            raise CorruptionError(f"{self.made} windows, of which {idle} are idle and {in_use} in use")

    def prepare(self, rail: int, link: Link, chunks: Sequence[tuple[int, int]]) -> list[Cover]:
        """Windows, not yet bound, for a link of that rail and chunks (offset in the segment, bytes).

        Raises FabricError when there are not enough, and has taken none then.
        """
        covers: list[Cover] = []
        try:
            for offset, length in chunks:
                covers.append(self._one(rail, link, offset, length))
        except FabricError:
            self.recycle(covers)
            raise
        return covers

    def _one(self, rail: int, link: Link, offset: int, length: int) -> Cover:
        registration, place = self._registration, self._rails[rail]
        address = registration.address_of(offset)
        region = registration.region_of(rail, offset, length)
        bridge = None
        if region is None:
            if length > place.limits.region_bytes:
                raise FabricError(f"{place.name} has no region as long as a chunk of {length} bytes")
            region = bridge = place.register(
                address, length, Access.REMOTE_READ | Access.LOCAL_WRITE | Access.WINDOWS
            )
        idle = self._idle[rail].get(link)
        if idle:
            window = idle.pop()
        else:
            try:
                if self._made[rail] >= place.limits.windows and not self._free_one(rail):
                    raise FabricError(f"all {place.limits.windows} memory windows of {place.name} are in use")
                window = place.window()
            except FabricError:
                if bridge is not None:
                    bridge.close()
                raise
            self._made[rail] += 1
        return Cover(rail, link, Binding(window, region, address, length), bridge)

    def _free_one(self, rail: int) -> bool:
        """Free an idle window of whichever link of that rail has most; was there one? Raises FabricError."""
        idle = max(self._idle[rail].values(), key=len, default=None)
        if not idle:
            return False
        self._close(rail, idle.pop())
        return True

    def bind(self, link: Link, covers: Sequence[Cover]) -> None:
        """Bind them to a link: their keys are good from now on. Raises FabricError: close the link then."""
        for start in range(0, len(covers), link.depth):
            link.bind([cover.binding for cover in covers[start : start + link.depth]])

    def unbind(self, link: Link, covers: Sequence[Cover]) -> None:
        """End what they allow: no WRITE by their keys is under way when this returns.

        Raises FabricError: nothing is sure then until the link has been closed.
        """
        for start in range(0, len(covers), link.depth):
            link.invalidate([cover.binding.window for cover in covers[start : start + link.depth]])

    def recycle(self, covers: Iterable[Cover]) -> None:
        """Keep windows that are not bound for the next chunks of their link."""
        for cover in covers:
            idle = self._idle[cover.rail].setdefault(cover.link, [])
            if len(idle) < IDLE_MAX:
                idle.append(cover.binding.window)
            else:
                self._close(cover.rail, cover.binding.window)
            if cover.bridge is not None:
                cover.bridge.close()

    def free(self, covers: Iterable[Cover]) -> None:
        """Windows whose link has been closed while they were bound."""
        for cover in covers:
            self._close(cover.rail, cover.binding.window)
            if cover.bridge is not None:
                cover.bridge.close()

    def retire(self, rail: int, link: Link) -> None:
        """A link of that rail has been closed: free those that were kept for it."""
        for window in self._idle[rail].pop(link, ()):
            self._close(rail, window)

    def _close(self, rail: int, window: Window) -> None:
        window.close()
        self._made[rail] -= 1

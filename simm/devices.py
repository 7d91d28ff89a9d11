"""An endpoint's devices: opened, the arena registered on them, and opened again when they came late or broke.

What can go wrong: there is no library, no device, no port that is up, no permission, no room under the limit on
locked memory; or a device goes while it is in use. None of that ends the endpoint. :attr:`Devices.why` has the reason,
for clients and for people, and there is another try every REOPEN_S seconds. Registering holds the interpreter, so it
is done a piece a turn of the loop.

A device that goes breaks its links, and so its lanes; that it has gone is known when no new link can be made. Then,
when the last lane has been closed, all devices are opened anew: those that are left, and those that came since.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from .arena_regions import Registration
from .fabric import Absence, Fabric, FabricError
from .loop import Loop
from .upstream import Upstream
from .windows import Windows

log = logging.getLogger("simm.endpoint")

#: Between two tries to open the devices.
REOPEN_S: Final = 10.0


class Devices:
    """The rails of one endpoint, and its arena on them.

    Args:
        upstream: where the arena comes from.
        open_fabric: opens this process's rails, or says why there are none.
        windows: let chunks be written by memory windows, where all devices have them.
        piece_bytes: the most that is registered at a time.
        on_lost: the devices are about to be closed: close whatever is made of them.
    """

    def __init__(
        self, loop: Loop, upstream: Upstream, open_fabric: Callable[[], Fabric | Absence], *,
        windows: bool, piece_bytes: int, on_lost: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._loop = loop
        self._upstream = upstream
        self._open_fabric = open_fabric
        self._use_windows = windows
        self._piece_bytes = piece_bytes
        self._on_lost = on_lost
        #: Why there is no RDMA just now; empty when there is.
        self.why = "starting"
        self.fabric: Fabric | None = None
        self.registration: Registration | None = None
        self.windows: Windows | None = None
        self.opens_failed = 0
        #: Why a link could not be made: the devices may have gone.
        self.suspect = ""
        self._open_at = 0.0

    @property
    def reason(self) -> str:
        """:attr:`why`, with how far it is while it is under way."""
        registration = self.registration
        if self.why and registration is not None and registration.done_bytes < registration.total_bytes:
            return f"registering, {registration.progress}"
        return self.why

    def look(self, in_use: bool) -> None:
        """Open them if it is time; ``in_use``: lanes are open. Call it a few times a second. Raises FabricError as
        :meth:`close` does."""
        if self.fabric is None:
            if self._loop.now >= self._open_at:
                self._open()
        elif self.suspect and not in_use:
            self._lost(self.suspect)

    def _not_ready(self, why: str) -> None:
        if why != self.why:
            self.why = why
            log.log(logging.INFO if why == "registering" else logging.WARNING, "no RDMA: %s", why)

    def _open(self) -> None:
        arena = self._upstream.arena()
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
            self.registration = Registration(arena, found.rails, windows=windows, piece_bytes=self._piece_bytes)
            self.windows = Windows(self.registration) if windows else None
        except FabricError as exc:
            self._lost(str(exc))
            return
        self._not_ready("registering")
        self._register(self.registration)

    def _register(self, registration: Registration) -> None:
        """Register a piece, and the next one in the loop's next turn."""
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
        self.why = ""
        log.info(
            "RDMA: %d MiB in %d regions on %s; %s", registration.done_bytes >> 20, len(registration.regions),
            ", ".join(rail.name for rail in registration.rails),
            "chunks are written by memory windows" if registration.windows else "clients may write all of the data",
        )  # fmt: skip

    def _lost(self, why: str) -> None:
        """They are of no use: close what is made of them, and then them; try again later."""
        self.opens_failed += 1
        self._not_ready(why)
        self._open_at = self._loop.clock() + REOPEN_S
        self._on_lost(why)
        self.close()

    def close(self) -> None:
        """Close them. Raises FabricError when that cannot be: this process must end then."""
        fabric, self.fabric = self.fabric, None
        self.registration = self.windows = None
        if fabric is not None:
            fabric.close()

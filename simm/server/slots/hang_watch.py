"""End workers and streams that hang, where a service manager or a kubelet would else end the whole data server."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

from ...net.loop import Loop
from ...net.sd_notify import Notifier
from ..children import Supervised, WorkerSlot

log = logging.getLogger("simm.dataserver")

#: Who has answered nothing for so long hangs, if no watchdog has another time. A liveness probe of /healthz has to wait
#: longer, as in deploy/kubernetes: what it ends loses its values.
HANG_S: Final = 30.0


class HangWatch:
    """Ends workers and streams that hang, so that nobody else need end the data server with its values.

    It counts looks, not seconds: a supervisor that was stopped itself has not looked meanwhile, and blames nobody.

    Args:
        looks: of so many in a row, a process that serves has answered nothing in between. Then it gets SIGKILL, and its
            successor has all values.
    """

    def __init__(self, slots: Sequence[WorkerSlot], looks: int) -> None:
        self._slots = slots
        self._looks = max(1, looks)
        #: When each last answered, and the number of looks since. Streams of one worker have the same name.
        self._silent: dict[Supervised, tuple[float, int]] = {}

    def maintain(self) -> bool:
        """Look at all processes. Return False if one that was killed is still there: no restart of it can help."""
        fine = True
        for slot in self._slots:
            for process in (slot.worker, *slot.streams):
                serves = process.child is not None and (slot.ready or process is not slot.worker)
                last_seen, looks = self._silent.get(process, (-1.0, 0))
                looks = looks + 1 if serves and process.last_seen == last_seen else 0
                self._silent[process] = process.last_seen, looks
                if looks == self._looks and process.child is not None:
                    log.error("%s (process %d) hangs: ending it", process.name, process.child.pid)
                    process.kill()
                fine = fine and looks <= self._looks
        return fine


def watch_hangs(loop: Loop, notifier: Notifier, slots: Sequence[WorkerSlot]) -> Callable[[], bool]:
    """Return what ends workers and streams that hang: half a watchdog's time, or ``HANG_S``.

    It is to be called once a tick, which :func:`~simm.net.sd_notify.keep_informed` does for a service manager, and the
    loop where there is none.
    """
    hangs = HangWatch(slots, round((notifier.watchdog_s / 2 or HANG_S) / notifier.tick_s))
    if not notifier.active:
        loop.call_every(notifier.tick_s, hangs.maintain)
    return hangs.maintain

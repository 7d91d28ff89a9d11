"""Data servers with something broken in them, or that can be broken from outside: for ``faults.patched``'s ``call=``.

Each function here is called in the supervisor, before it forks.
"""

from __future__ import annotations

import contextlib
import signal
from typing import Any

#: The one of this process.
_endpoints: list[Any] = []


def by_signal() -> None:
    """An endpoint kills its ends of all lanes' queue pairs at SIGUSR1, and deregisters the arena's data at SIGUSR2."""
    import simm.endpoint
    import simm.endpoints

    made = simm.endpoint.Endpoint.__init__
    run = simm.endpoints.run_endpoint

    def note(self: Any, *arguments: Any, **named: Any) -> None:
        _endpoints.append(self)
        made(self, *arguments, **named)

    def run_with_signals(*arguments: Any, **named: Any) -> None:
        signal.signal(signal.SIGUSR1, lambda *_: _kill_queue_pairs())
        signal.signal(signal.SIGUSR2, lambda *_: _revoke())
        run(*arguments, **named)

    simm.endpoint.Endpoint.__init__ = note  # type: ignore[method-assign]
    simm.endpoints.run_endpoint = run_with_signals


def kill_queue_pair(link: Any) -> None:
    """Put a link's queue pair into the error state, as a device does that has had enough of it."""
    library = link._library
    link._qp.modify(library.QPAttr(qp_state=library.error_state), library.state)


def _kill_queue_pairs() -> None:
    for endpoint in _endpoints:
        for peer in endpoint.lanes:
            for link in peer.context.links:
                if link is not None:
                    with contextlib.suppress(Exception):
                        kill_queue_pair(link)


def _revoke() -> None:
    for endpoint in _endpoints:
        for regions in endpoint.devices.registration._data:
            for region in regions:
                region.close()


def no_fence() -> None:
    """Windows are not invalidated when a grant is spent or given back, nor links destroyed with their lane."""
    import simm.lane_end
    import simm.windows

    def nothing(*_: Any) -> None:
        pass

    simm.windows.Windows.unbind = nothing  # type: ignore[method-assign]
    simm.windows.Windows.recycle = nothing  # type: ignore[method-assign]
    simm.windows.Windows.free = nothing  # type: ignore[method-assign]

    def close(self: Any) -> list[Any]:
        self.closed = True
        held = list(self.holds())
        self.grants, self.prepared, self.granted_bytes = {}, [], 0
        _kept.extend(self.links)
        self.links = []
        return held

    simm.lane_end.LaneEnd.close = close  # type: ignore[method-assign]


#: Links that should have been destroyed.
_kept: list[Any] = []

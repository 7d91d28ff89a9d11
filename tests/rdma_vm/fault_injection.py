"""Data servers and clients that are broken, or can be from outside: for ``call=`` of ``support/patched.py``.

The functions for data servers are called in the supervisor, before it forks.
"""

from __future__ import annotations

import contextlib
import signal
from typing import Any

#: The one of this process.
_endpoints: list[Any] = []


def by_signal() -> None:
    """An endpoint kills its ends of all leases' queue pairs at SIGUSR1, and deregisters the arena's data at SIGUSR2.

    It deregisters between two turns of its loop, in the middle of its clients' transfers. Within a turn it could be in
    the middle of binding a window to what is gone, and pyverbs follows a null pointer then, which no device makes.
    """
    import simm.server.rdma_endpoint
    import simm.server.rdma_supervisor

    made = simm.server.rdma_endpoint.Endpoint.__init__
    run = simm.server.rdma_supervisor.run_endpoint

    def note(self: Any, *arguments: Any, **named: Any) -> None:
        _endpoints.append(self)
        made(self, *arguments, **named)
        self.loop.call_every(0.005, _revoke_if_asked)

    def run_with_signals(*arguments: Any, **named: Any) -> None:
        signal.signal(signal.SIGUSR1, lambda *_: _kill_queue_pairs())
        signal.signal(signal.SIGUSR2, lambda *_: _asked.append(True))
        run(*arguments, **named)

    simm.server.rdma_endpoint.Endpoint.__init__ = note  # type: ignore[method-assign]
    simm.server.rdma_supervisor.run_endpoint = run_with_signals


def kill_queue_pair(qp: Any) -> None:
    """Put a queue pair into the error state, as a device does that has had enough of it."""
    library = qp._library
    qp._qp.modify(library.QPAttr(qp_state=library.error_state), library.state)


def _kill_queue_pairs() -> None:
    for endpoint in _endpoints:
        for peer in endpoint.leases:
            for qp in peer.context.queue_pairs:
                if qp is not None:
                    with contextlib.suppress(Exception):
                        kill_queue_pair(qp)


#: The data is to be deregistered.
_asked: list[bool] = []


def _revoke_if_asked() -> None:
    if not _asked:
        return
    _asked.clear()
    for endpoint in _endpoints:
        for regions in endpoint.devices.registration._data:
            for region in regions:
                region.close()


def no_fence() -> None:
    """Windows are not invalidated when a grant is spent or given back, nor queue pairs destroyed with their lease."""
    import simm.server.rdma_devices
    import simm.server.rdma_lease

    def nothing(*_: Any) -> None:
        pass

    simm.server.rdma_devices.WindowPool.unbind = nothing  # type: ignore[method-assign]
    simm.server.rdma_devices.WindowPool.release = nothing  # type: ignore[method-assign]
    simm.server.rdma_devices.WindowPool.free = nothing  # type: ignore[method-assign]

    def close(self: Any) -> list[Any]:
        self.closed = True
        leased = list(self.leased_grants())
        self.grants, self.prepared, self.granted_bytes = {}, [], 0
        _kept.extend(self.queue_pairs)
        self.queue_pairs = []
        return leased

    simm.server.rdma_lease.RdmaLease.close = close  # type: ignore[method-assign]


#: Queue pairs that should have been destroyed.
_kept: list[Any] = []


def no_reread() -> None:
    """A client takes what it has read for right, whatever the slot says afterwards."""
    import simm.rdma.remote_arena
    import simm.sdk.rdma_get

    always: Any = lambda *_: True  # noqa: E731
    for module in (simm.rdma.remote_arena, simm.sdk.rdma_get):
        if hasattr(module, "confirmed"):
            module.confirmed = always  # type: ignore[attr-defined]

"""Test doubles for programs that embed SiMM: a client without a cluster, and a cluster in one call.

:class:`FakeClient` is a :class:`~simm.client.Client` that keeps values in this process. Fakes that share a
:class:`FakeStore` see each other's values, as clients of one cluster do; namespaces are separate. Without ``store=``
each fake has its own.

    store = FakeStore()
    with FakeClient(store=store) as one, FakeClient(store=store) as other:
        one.put("k", b"value")
        other.get("k")                    # b"value"

The store fails on request, in the ways in which a cluster does, so nothing raises:

    FakeStore("64M")                      # evicts values when it is full: misses appear
    store.unavailable = True              # gets miss and puts fail until it is False again
    store.fail(3)                         # the third call from now is an outage, the others are not
    store.fail(1, operation="put")        # the next put is an outage
    store.latency = lambda operation, keys: time.sleep(0.01)
    store.clear()                         # as after a restart of the server

:func:`local_cluster` is a real cluster, as child processes that end with the block. With pytest:

    @pytest.fixture(scope="session")
    def simm_cluster():
        with local_cluster() as cluster: yield cluster

A fixture for the fake is just ``return FakeClient()``.

Differences of the fake
-----------------------
It has no arena: a value takes its own length of the capacity, and a value may fit that a real arena is too small for.
Hard kept values are bounded by their bytes alone, as it has no pieces and no slots.
The order of eviction is no promise, here or there. A forked child has a copy of the store from then on. A fake can be
pickled only for the process that has its store. Checksums find nothing.

How it works
------------
The fake replaces the paths to the servers (``paths.py``) and nothing else. The client's own code checks arguments,
makes results and errors, and runs the asyncio forms. ``tests/system/client/test_conformance.py`` runs one suite on
both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from ..client import Client
from ..errors import SimmError
from .client import FakeClient
from .store import OPERATIONS, FakeStore

__all__ = ["OPERATIONS", "FakeClient", "FakeStore", "RunningCluster", "local_cluster"]

#: Room for many values of an engine's size, and quick to fault in.
CLUSTER_MEMORY: Final = "64M"
READY_S: Final = 60.0


class RunningCluster(NamedTuple):
    """A cluster of :func:`local_cluster`: the manager's address, for more clients, and a connected client."""

    manager: str
    client: Client


@contextlib.contextmanager
def local_cluster(memory: int | str = CLUSTER_MEMORY, **arguments: Any) -> Iterator[RunningCluster]:
    """Run a manager and a data server as child processes, with a client; nothing is left after the block.

        with local_cluster(namespace="tests") as (manager, client):
            client.put("k", b"value")

    ``memory``: bytes (or ``"2G"``) of the arena. Other arguments are the client's. Takes about a second.

    Raises SimmError, with the server's last message, if it cannot start. The children also end with this process,
    whatever ends it.
    """
    from ..sdk.local_cluster import WITHOUT_TLS, LocalCluster  # the fake does not need the code that starts processes

    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(memory))
        client = stack.enter_context(Client(cluster.manager, **{"token": cluster.token, **WITHOUT_TLS, **arguments}))
        if not client.wait_ready(READY_S):
            reason = "; ".join(worker["reason"] for worker in client.stats()["workers"]) or "no data server"
            raise SimmError(f"the cluster does not get ready: {reason}")
        yield RunningCluster(cluster.manager, client)

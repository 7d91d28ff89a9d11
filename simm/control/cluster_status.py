"""Answer CLUSTER_STATUS: the cluster as JSON, for people and tools, in a frame whatever the cluster holds.

What can go wrong, and what we chose
------------------------------------
* *A client asks again and again.* A large cluster takes milliseconds to describe, and the manager's loop waits for it.
  So the description is kept for ``API_S``, unless the cluster changes: who has ordered a drain sees it in the next
  answer. Loads and silences are as old at most. What the manager says of itself is made anew for each answer.
* *It does not fit a frame.* Names of 128 bytes and hosts of 255 for each of 1,500 workers do not. Then data servers are
  left out, those first that own nothing and are away longest, and counted like those that ``cluster/snapshot.py``
  leaves out.
* *A client must not know all namespaces* (SECURITY.md). One that is bound to some is told the epochs of these alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from ..cluster.machine import Cluster
from ..constants import FRAME_BYTES_MAX
from ..net.loop import Loop
from ..wire.auth import Gate
from ..wire.messages import StatsReply
from .epochs import visible
from .events import EventLog
from .pages import API_S

#: Bytes that are kept free for the manager's own part, epochs of 64 namespaces and the frame.
OWN_BYTES_MAX: Final = 64 << 10
_AWAY: Final = ("dead", "left")
_encode: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class ClusterStatus:
    """The answers to CLUSTER_STATUS of one manager.

    Args:
        cluster: returns the present one.
        own: returns what the manager says of itself.
        events: counts what happens to the cluster.
    """

    def __init__(
        self, loop: Loop, cluster: Callable[[], Cluster], own: Callable[[], dict[str, Any]], events: EventLog
    ) -> None:
        self._loop = loop
        self._cluster = cluster
        self._own = own
        self._events = events
        #: The last description, without braces; when it was made, of which cluster, and how that was then.
        self._text = b""
        self._at = 0.0
        self._of: tuple[Cluster, int, bool, int] | None = None

    def answer(self, gate: Gate) -> StatsReply:
        """Return the answer to a peer."""
        own = self._own()  # which may find that this manager leads no more, and has another cluster
        cluster, now = self._cluster(), self._loop.now
        as_it_is = cluster, cluster.epoch, cluster.rebuilding, self._events.count
        if self._of != as_it_is or now - self._at >= API_S:
            described = cluster.status(now)
            del described["namespace_epochs"]
            self._text = fitting(described, FRAME_BYTES_MAX - OWN_BYTES_MAX)[1:-1]
            self._of, self._at = as_it_is, now
        epochs = dict(visible(cluster.namespaces.table(), gate))
        mine = _encode({"manager": own, "namespace_epochs": epochs}).encode()
        return StatsReply(b"".join((mine[:-1], b",", self._text, b"}")))


def fitting(status: Mapping[str, Any], room: int) -> bytes:
    """Return a cluster's status as JSON of at most ``room`` bytes. Data servers for which it has none are counted."""
    whole = _encode(status).encode()
    if len(whole) <= room:
        return whole
    nodes = status["nodes"]
    sizes = [len(_encode(node).encode()) + 1 for node in nodes]
    # A server that owns shards is away only for a while, or nobody can take them. One that is to be empty is asked for.
    worth = [
        (
            node["state"] not in _AWAY, node["draining"], any(each["shards"] for each in node["workers"]),
            -node["in_state_s"],
        )
        for node in nodes
    ]  # fmt: skip
    excess, left = len(whole) + len(str(len(nodes))) - room, set()
    for place in sorted(range(len(nodes)), key=worth.__getitem__):
        if excess > 0:
            excess -= sizes[place]
            left.add(place)
    kept = [node for place, node in enumerate(nodes) if place not in left]
    return _encode({**status, "nodes": kept, "nodes_left_out": status["nodes_left_out"] + len(left)}).encode()

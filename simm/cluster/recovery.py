"""Tell which maps an earlier life of this manager sent that it does not know, and collect a map that it lost. No I/O.

What can go wrong, and what we chose
------------------------------------
* *All state is lost.* A manager that knows no node, and learns that a server or client has a map, *collects*: it waits
  ``rebuild_beats`` before it assigns any shard. It asks every server whose map is newer than the best so far for that
  map (MAP_OFFER), and adopts the newest: owners, previous owners, epochs. Which nodes were to be drained is lost.
* *Some state is lost* (an old file restored; a full disk and then a kill). Then servers hold maps that this manager
  cannot have made, or does not remember. It asks a server that joins with such a map for it, and a server whose
  heartbeat names one must join. It raises its own epoch above that map's. A shard that changed owner in it since the
  last certain map may have had owners that the manager does not know: its ``since`` becomes new, so that every worker
  drops its values of it.
* *A peer names an epoch that cannot be*, to drive this manager's beyond all that fit a map. Epochs are believed up to
  ``epoch_limit``. A client's only starts a collection: clients know nothing that servers do not have. A server whose
  map is of a higher epoch, because this manager has lost an epoch that peers had driven up, drops its values and joins.
* *A worker is frozen by a map that nobody has.* Its server says so by MAP_GET, and the manager goes beyond that epoch:
  only a map that is newer thaws the shard.
* *Several lives are lost.* Each life leaves ``EPOCHS_RESERVED`` epochs out. If all servers were away during two of them
  or more, and then the state is lost, no server knows how far those lives went, and an epoch may name two maps. A
  client that has the other map asks wrong servers, which refuse: misses, until the next change. Clients could tell, and
  are not believed, as any of them could drive the epochs up.
* *The lost map never comes.* After ``rebuild_beats`` the manager goes on with what it has.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..constants import NO_OWNER
from ..wire.messages import Join, MapOffer
from ..wire.shard_set import epoch_limit
from .nodes import Node
from .shard_map import ShardMap, Tables

Epochs = NDArray[np.uint64]


class Recovery:
    """What is certain of maps sent earlier, and the collection of a lost map while that runs."""

    def __init__(self, tables: Tables) -> None:
        #: The last epoch whose map is known for certain, and what it says.
        self.base_epoch = 0
        self.base_since: Epochs = tables.since.copy()
        #: The first epoch of this manager's own maps after it.
        self.own_epoch = 1
        #: Observed time at which the collection ends; None if none runs.
        self.until: float | None = None
        #: While it runs: the nodes that have joined, and the newest epoch that any server named.
        self.joins: dict[str, Join] = {}
        self.newest_seen = 0
        #: Names of the nodes in the adopted map.
        self._by_map: frozenset[str] = frozenset()

    @property
    def collecting(self) -> bool:
        """A collection runs: the manager sends no map."""
        return self.until is not None

    # -- epochs ------------------------------------------------------------------------------------

    def restore(self, epoch: int, since: Epochs, own_epoch: int) -> None:
        """Start from a stored state of ``epoch``."""
        self.base_epoch, self.base_since, self.own_epoch = epoch, since.copy(), own_epoch

    def is_unknown(self, epoch: int, current: int) -> bool:
        """Return True if the map of ``epoch`` is one of an earlier life that this manager does not know.

        ``current``: the manager's epoch.
        """
        if self.collecting:
            return self.base_epoch < epoch <= epoch_limit(current)
        return self.base_epoch < epoch < self.own_epoch or current < epoch <= epoch_limit(current)

    def skip_to(self, epoch: int, current: int, since: Epochs) -> None:
        """Note that maps up to ``epoch`` were sent; ``since`` is what the map of ``current`` says."""
        self.base_epoch, self.base_since = current, since.copy()
        self.own_epoch = epoch + 1

    def learn(self, epoch: int, since: Epochs) -> NDArray[np.int64]:
        """Note a map of an earlier life. Return the shards that changed owner in it since the last certain one."""
        stale = np.flatnonzero(since > self.base_since)
        self.base_epoch, self.base_since = epoch, np.maximum(self.base_since, since)
        return stale

    # -- collection --------------------------------------------------------------------------------

    def note_epoch(self, epoch: int, until: float, *, blank: bool) -> None:
        """Note that a server or client has a map. If the manager is ``blank``, collect until ``until``."""
        if blank and not self.collecting and epoch > 0:
            self.until = until
            self.base_epoch = self.newest_seen = 0
            self.joins = {}

    def saw(self, epoch: int, current: int) -> None:
        """Note an epoch that a server named, if a collection runs. ``current``: the manager's epoch."""
        if self.collecting and epoch <= epoch_limit(current):
            self.newest_seen = max(self.newest_seen, epoch)

    def adopt(self, offered: ShardMap, since: Epochs, nodes: frozenset[str]) -> None:
        """Make an offered map the last certain one."""
        self.base_epoch, self.base_since, self._by_map = offered.epoch, since.copy(), nodes

    def end(self, current: int) -> int:
        """End the collection; return the manager's epoch from now on."""
        self.until = None
        self.joins = {}
        epoch = max(current, self.newest_seen)
        self.own_epoch = epoch + 1
        return epoch

    def expects(self, node: Node, msg: Join) -> bool:
        """Return True for the warm successor of a node known only by the adopted map, if it stopped by then.

        One that has acted on a later map, which no server has brought, must wait: by that map other workers may have
        had its shards.
        """
        return node.name in self._by_map and not node.present and bool(msg.warm) and 0 < msg.epoch <= self.base_epoch


def offer_fault(msg: MapOffer, offered: ShardMap, current: int) -> str:
    """Return what is wrong with the epochs of an offered map; empty if nothing is. Raises RemoteProtocolError.

    ``current``: the manager's epoch.
    """
    since = np.frombuffer(offered.since, np.uint64)
    owned = np.frombuffer(offered.owners, np.uint16) != NO_OWNER
    if not 0 < msg.epoch <= epoch_limit(current) or (since > msg.epoch).any() or (owned & (since == 0)).any():
        return f"a map of epoch {msg.epoch} with impossible epochs"
    return ""

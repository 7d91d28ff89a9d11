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
* *Two lives begin with one state.* A copy of the file is restored, or a life stores nothing on a failing disk. If both
  went on from the same epoch, servers with a map of the one would take it for a map of the other, and an advance would
  be confirmed by who has never heard of it. So each life that begins with a stored state goes on by 2^20 to 2^21
  epochs, drawn by chance (``beyond_stored``). Two of 1,000 maps each meet with a probability of 2 in 1,000, and servers
  are believed if the copy is two thousand starts old. Clients may have later maps than this life then, as after a lost
  state: see below.
* *A peer names an epoch that cannot be*, to drive this manager's beyond all that fit a map. Epochs are believed up to
  ``epoch_limit``; by a manager that knows nothing up to ``BLANK_LIMIT``, so that it may lose its state thousands of
  times. A client's starts a collection, once: clients come again and again, and would keep a manager waiting for
  servers that do not come, and all who ask it for a map with it. A server whose map is of a higher epoch, because this
  manager has lost an epoch that peers had driven up, drops its values and joins.
* *A warm server asks which cluster this is*, before it joins, when a client has been here and the collection is over.
  With the answer of a manager that knows nothing it would take its own arenas for another cluster's. So who has said
  in HELLO that it is a data server (with tokens, only who has a data server's or an admin's) starts a collection each
  time. One that lies could do so for ever; but it cannot prolong one that a data server began. At the end of each one
  all who wait are answered, and none starts any more once a server has joined. So it makes each who asks wait for
  ``rebuild_beats``, twice that at most if a client began, and only while there is no server to name. A longer time
  between two would bring back the wrong answer, and who may say so may join as well, which is worse.
* *A worker is frozen by a map that nobody has.* Its server says so by MAP_GET, and the manager goes beyond that epoch:
  only a map that is newer thaws the shard.
* *Nobody brings the newest map.* All servers were away while it was sent, or those that have it are gone for good, and
  only clients know it. No epoch may name two maps: a client would take the other map of its epoch for current, and
  read at the previous owner that it names, whose values may be superseded. So a manager that adopts a map, or learns
  that a server has a newer one, goes on by 2^29 to 2^30 epochs (``beyond_lost``), which no manager sends meanwhile. The
  distance is drawn by chance: if the state is lost again before a server has a map of this manager, the next one goes
  on from the same map, but elsewhere. Two such lives of 1,000 maps each meet with a probability of 4 in a million, if
  no client says otherwise.
* *Clients have maps above ours*, of such a life that went further. They ignore older maps, so this manager must pass
  them. Clients are believed by a manager that has adopted a map, within 2^30 epochs, all at once at the end of the
  collection, and later once in ``HEED_S``. So a client can drive the epochs by no more than a data server can. One that
  has begun with a stored state believes them within 2^24 epochs, what eight lives go on by at least.
* *The lost map never comes.* After ``rebuild_beats`` the manager goes on with what it has. If the servers that alone
  had the newest map have died cold, nobody knows of it: an older owner of a shard serves what it has, and a value that
  was superseded there shows again. So it does only for a key that was put with two values, which no content hash is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ..constants import NO_OWNER
from ..wire.messages import Join, MapOffer, WorkerInfo
from ..wire.shard_set import BLANK_LIMIT, beyond_lost, beyond_stored, epoch_limit, lost_limit, stored_limit
from .nodes import Node, NodeState, join_fault
from .shard_map import ShardMap, Tables

Epochs = NDArray[np.uint64]
#: Returns so many random bits.
Chance = Callable[[int], int]

#: Epochs of clients that are remembered until they are heeded, and how long it takes at least from one time that they
#: are heeded to the next, observed seconds.
CLAIMS_MAX: Final = 256
HEED_S: Final = 600.0


class Recovery:
    """What is certain of maps sent earlier, and the collection of a lost map while that runs."""

    def __init__(self, tables: Tables, chance: Chance) -> None:
        self._chance = chance
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
        #: One has run, or runs.
        self._listened = False
        #: What runs was begun by a client's word.
        self._for_client = False
        #: Names of the nodes in the adopted map.
        self._by_map: frozenset[str] = frozenset()
        #: A map was adopted: earlier lives of this cluster may have sent maps that no server has brought.
        self._adopted = False
        #: It has begun from a stored state, of which a part may be lost.
        self._stored = False
        #: What decides by how much the epochs of this collection go on beyond the map that is adopted.
        self._drawn = 0
        #: Epochs that clients have named and that are above ours; until when they wait.
        self._claims: set[int] = set()
        self._heed_at = 0.0

    @property
    def collecting(self) -> bool:
        """A collection runs: the manager sends no map."""
        return self.until is not None

    # -- epochs ------------------------------------------------------------------------------------

    def restore(self, epoch: int, since: Epochs, own_epoch: int) -> None:
        """Start from a stored state of ``epoch``."""
        self._stored = True
        self.base_epoch, self.base_since, self.own_epoch = epoch, since.copy(), own_epoch

    def limit(self, current: int, *, blank: bool) -> int:
        """Return the highest epoch that is believed of a server. ``current``: the manager's epoch.

        ``blank``: it knows no server, or only those that have joined since it began to collect.
        """
        blank = not self.base_epoch if self.collecting else blank
        return max(epoch_limit(current), BLANK_LIMIT if blank else 0)

    def is_unknown(self, epoch: int, current: int, limit: int) -> bool:
        """Return True if the map of ``epoch`` is one of an earlier life that this manager does not know.

        ``current``: the manager's epoch. ``limit``: see :meth:`limit`.
        """
        if self.collecting:
            return self.base_epoch < epoch <= limit
        return self.base_epoch < epoch < self.own_epoch or current < epoch <= limit

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

    def begin(self, epoch: int, current: int, until: float, *, server: bool, supervisor: bool = False) -> None:
        """Collect until ``until``, as a server or client has the map of ``epoch`` and this manager knows nothing.

        ``current``: the manager's epoch. The first server with a map gives the others all that time, even if a client
        was here before it. A client's word counts once: it can come again and again although no server will.
        ``supervisor``: who asks says that it is a server, and has not joined; it prolongs a client's collection only.
        """
        if server:
            believed = epoch > 0
        elif supervisor:
            believed = epoch > 0 and (self._for_client or not self.collecting)
        else:
            # A life that knew nothing may have stored that, and this one goes on beyond it.
            unknown = epoch > current or self.base_epoch < epoch < self.own_epoch
            believed = unknown and not self._listened
        if believed:
            self.until, self._listened, self._for_client = until, True, not (server or supervisor)
            self.base_epoch = self.newest_seen = 0
            self.joins = {}
            self._adopted, self._drawn = False, self._chance(64)

    def saw(self, epoch: int, limit: int) -> None:
        """Note an epoch that a server named, if a collection runs. ``limit``: see :meth:`limit`."""
        if self.collecting and epoch <= limit:
            self.newest_seen = max(self.newest_seen, epoch)

    def adopt(self, offered: ShardMap, since: Epochs, nodes: frozenset[str], current: int) -> int:
        """Make an offered map the last certain one; return the manager's epoch from now on.

        That is beyond the maps that were sent after the offered one, and that nobody has brought.
        """
        self.base_epoch, self.base_since, self._by_map = offered.epoch, since.copy(), nodes
        self._adopted = True
        return max(current, beyond_lost(offered.epoch, self._drawn))

    def end(self, current: int) -> int:
        """End the collection; return the manager's epoch from now on."""
        self.until = None
        self.joins = {}
        epoch = max(current, self.newest_seen)
        if epoch > current and (self._adopted or self._stored):  # else it goes on as another cluster
            epoch = beyond_lost(epoch, self._drawn)
        self._heed_at = 0.0
        epoch = self.heed(0.0, epoch) or epoch
        self._heed_at = 0.0
        self.own_epoch = epoch + 1
        return epoch

    def beyond(self, epoch: int) -> int:
        """Return an epoch to go on from if a peer has the map of ``epoch``, which this manager has lost."""
        return beyond_lost(epoch, self._chance(64))

    # -- what clients say --------------------------------------------------------------------------

    def claim(self, epoch: int, current: int) -> None:
        """Note that a client has a map of this epoch. ``current``: the manager's epoch."""
        believed = self.collecting or epoch <= self._claimed_limit(current)
        if believed and epoch > current and len(self._claims) < CLAIMS_MAX:
            self._claims.add(epoch)

    def heed(self, now: float, current: int) -> int:
        """Return the epoch to go on from if clients have maps that this manager has lost; 0 if it may go on as it is.

        ``now``: observed seconds. ``current``: the manager's epoch. O(claims).
        """
        if not self._claims or self.collecting or now < self._heed_at:
            return 0
        limit = self._claimed_limit(current)
        known = max((each for each in self._claims if current < each <= limit), default=0)
        self._claims.clear()
        if not known:
            return 0
        self._heed_at = now + HEED_S
        return self.beyond(known) if self._adopted else beyond_stored(known, self._chance(64))

    def _claimed_limit(self, current: int) -> int:
        """Return the highest epoch that is believed of a client; 0 if nothing can have been lost."""
        if self._adopted:
            return lost_limit(current)
        return stored_limit(current) if self._stored else 0

    def expects(self, node: Node, msg: Join) -> bool:
        """Return True for the warm successor of a node known only by the adopted map, if it stopped by then.

        One that has acted on a later map, which no server has brought, must wait: by that map other workers may have
        had its shards.
        """
        return node.name in self._by_map and not node.present and bool(msg.warm) and 0 < msg.epoch <= self.base_epoch


def offer_fault(msg: MapOffer, offered: ShardMap, limit: int) -> str:
    """Return what is wrong with the epochs of an offered map; empty if nothing is. Raises RemoteProtocolError.

    ``limit``: see :meth:`Recovery.limit`.
    """
    since = np.frombuffer(offered.since, np.uint64)
    owned = np.frombuffer(offered.owners, np.uint16) != NO_OWNER
    if not 0 < msg.epoch <= limit or (since > msg.epoch).any() or (owned & (since == 0)).any():
        return f"a map of epoch {msg.epoch} with impossible epochs"
    return ""


def nodes_in(offered: ShardMap, now: float, last_seen: float) -> tuple[dict[str, Node], str]:
    """Return the nodes of an offered map, and what is wrong with them; empty if nothing is. Times are observed."""
    groups: dict[str, list[WorkerInfo]] = {}
    for info in offered.workers:
        groups.setdefault(info.node, []).append(info)
    nodes: dict[str, Node] = {}
    for name, workers in groups.items():
        instance = workers[0].instance
        fault = join_fault(Join(instance, 0, name, workers))
        if fault or any(info.instance != instance for info in workers):
            return {}, f"node {name!r}: {fault or 'two instances of it'}"
        nodes[name] = Node(name, instance, workers, NodeState.JOINING, now)
        nodes[name].last_seen = last_seen
    return nodes, ""

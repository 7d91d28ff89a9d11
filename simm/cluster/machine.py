"""Decide who is in the cluster and which worker owns which shard: a pure state machine.

Events in, actions out, the clock an argument. No socket, no file, no thread: the manager runs this code, and so does
the simulator with thousands of nodes.

A node's life
-------------
A node is known by its *name*, which survives restarts and moves between hosts. One run of it is known by its
*instance*, a random number generated at its start.

    (join) -> JOINING -> RUNNING or DRAINING <-> SUSPECT -> DEAD -> (join again)
                 \\------ \\------------------- \\-> LEFT -> (join again)

* JOINING: in the map, but no heartbeat has come yet, as for every node of a state file after the manager's restart.
  RUNNING: heartbeats come. DRAINING: they come, and its target is 0 shards, over all restarts until it is resumed.
* SUSPECT: ``suspect_after`` heartbeats missed. It keeps its shards: no shard moves for a hiccup.
* DEAD: ``dead_after`` missed. It must join again, and ``grace_s`` later its shards go to the survivors.
* LEFT: it said goodbye; its shards go to others at once, or wait for it if it said *warm* (``cluster/absence.py``).

Owners, previous owners, epochs
-------------------------------
``cluster/placement.py`` decides which worker gets which shard. Each shard has the epoch of its last change of owner
(*since*), by which a worker knows which values in its arena are good. It stays the same over any absence of an owner
that no other has followed: an owner loses a shard only to the next owner, by its own cold goodbye, or when it is
forgotten. While values are being copied a shard also has a *previous owner*. The map names one only while it serves, or
while the owner is away too; otherwise one that dies, leaves or is replaced is dropped at once, and values not copied
are lost.

What can go wrong, and what we chose
------------------------------------
* *Two servers with one name* (a copied configuration). While the first one lives, the second is refused with
  NAME_TAKEN. It does not live if it is DEAD, LEFT or SUSPECT, or if its connection is lost: the kernel of a killed
  process closes that at once, so a restarted server need not wait for the suspicion. If the first one was alive
  nevertheless, its next heartbeat is answered UNKNOWN_NODE, and then *it* is the second.
* *A server comes back with its manager.* The manager knows its predecessor from the stored state only, and waits for
  it as for any other. The server is refused with BUSY until then, as it is when its predecessor has just fallen
  silent. It waits for as long as it takes; only NAME_TAKEN, about a server that speaks, makes it give up.
* *A new instance* keeps the shards of the old one unless others have got them. But what the old one accepted is lost
  unless the new one starts warm, so ``since`` becomes new: no older arena of that name ever passes for a good one. With
  such an arena it owns what began anew only after it has acknowledged a map at least as new, as readers look at its
  shard words as soon as the map names it. Previous owners are dropped, warm or not: their values may be older than
  what was lost.
* *The manager slept* (SIGSTOP). All nodes look dead at its wake-up, while their heartbeats wait in its sockets. So
  silence is measured in *observed* time, which advances by at most one heartbeat per event, and :meth:`maintain` must
  be called more often than that. A clock that jumps does no harm.
* *State is lost*, all of it or some: see ``cluster/recovery.py``.
* *A server of another cluster joins*: its address list was changed, or ours was taken over from another manager. JOIN
  names the cluster of its values. It is refused until it has dropped them, as our clients read there from the first
  map that names it. During a collection this cluster's id may yet become that one; if it does not, the server is
  released.

LIMITATIONS: a manager without state gives a new server that is its first every shard at once; old servers start empty.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..constants import NO_OWNER
from ..errors import CorruptionError, RemoteProtocolError, UsageError
from ..wire.epoch_messages import Advanced, Epochs
from ..wire.messages import Done, HeartbeatAck, Join, Joined, MapOffer, MapReply, Moved, Status, WorkerInfo, WorkerLoad
from ..wire.shard_set import beyond_stored, shards_in
from . import absence, snapshot
from .epochs import FOR_EVER, NamespaceEpochs
from .nodes import (
    WORKERS_MAX,
    Action,
    Answer,
    Key,
    MapChanged,
    Node,
    NodeChanged,
    NodeState,
    Timing,
    join_fault,
    last_server,
    name_taken,
    node_fault,
    refusal,
    unknown_name,
)
from .placement import NO_SHARDS, Placement, Shards
from .recovery import Chance, Recovery, nodes_in, offer_fault
from .shard_map import ShardMap, Tables

#: Epochs that may have been sent beyond the newest that is known for certain.
EPOCHS_RESERVED: Final = 1000
assert WORKERS_MAX < absence.KNOWN_MAX < NO_OWNER
_COLLECTING: Final = "the manager is collecting the map that it lost: try again in some seconds"


class Cluster:
    """Membership and shard map.

    ``now`` is any monotonic clock, in seconds; a step back counts as no step, and the steps from there on count again.
    So all events have the time of their turn, and leases that of the moment (``at``). Events return actions.
    ``chance`` returns so many random bits.
    """

    def __init__(
        self, cluster: int, now: float, timing: Timing = Timing(), chance: Chance = secrets.randbits,  # noqa: B008
    ) -> None:  # fmt: skip
        timing.check()
        #: Identifies this cluster for its whole life: epochs of two clusters are never compared.
        self.cluster = cluster
        self.timing = timing
        self.epoch = 1
        self.nodes: dict[str, Node] = {}
        #: Changes of owner so far.
        self.moves = 0
        #: Also since when no server has a lease that this manager does not know of, as ``now``.
        self.namespaces = NamespaceEpochs()
        self.unsure = now
        self._placement = Placement()
        self._clock, self._observed, self._moment = now, 0.0, now
        self._reply: MapReply | None = None
        self._recovery = Recovery(self._placement.tables, chance)

    def __repr__(self) -> str:
        return f"<Cluster epoch={self.epoch} nodes={len(self.nodes)} workers={len(self.live_workers())}>"

    # -- events: nodes ---------------------------------------------------------------------------

    def join(self, now: float, msg: Join, at: float = -math.inf) -> list[Action]:
        """Take a JOIN: a node's first, one of the same instance, or one after a restart. ``at``: now, if later."""
        self._advance(now, at)
        if reason := join_fault(msg):
            return [refusal(Status.BAD_REQUEST, reason)]
        if msg.epoch > self._limit:
            # Not for ever, as the epoch may have been true: then this manager has lost it, and can never catch up.
            text = f"{msg.name!r} holds values by a map of epoch {msg.epoch}, this is epoch {self.epoch}"
            return [refusal(Status.OTHER_CLUSTER, f"{text}: drop them and join again")]
        node = self.nodes.get(msg.name)
        others = [other for other in self.nodes.values() if other is not node and not other.released]
        if sum(len(other.workers) for other in others if not other.overdue) + len(msg.workers) > WORKERS_MAX:
            return [refusal(Status.NO_SPACE, f"a cluster has at most {WORKERS_MAX} workers")]
        another = node is not None and node.instance != msg.instance
        if node is not None and another and self._alive(node) and not self._recovery.expects(node, msg):
            return [name_taken(node, self._observed - node.last_seen, self.timing)]
        self._note_epoch(msg.epoch, server=True)
        if msg.cluster not in (0, self.cluster) and not self.rebuilding:
            text = f"this is cluster {self.cluster:016x}, and {msg.name!r} holds values of cluster {msg.cluster:016x}"
            return [refusal(Status.OTHER_CLUSTER, f"{text}: drop them and join again")]
        wants_map = self._recovery.is_unknown(msg.epoch, self.epoch, self._limit)
        raised = False
        if self.rebuilding:
            self._recovery.joins[msg.name] = msg
        elif self.epoch < msg.epoch:
            self._skip_to(self._recovery.beyond(msg.epoch))
            raised = True
        raised |= absence.make_room(others, WORKERS_MAX - len(msg.workers))
        actions: list[Action] = []
        self._accept(msg, actions, changed=raised)
        self.nodes[msg.name].asked |= wants_map
        return [Answer(Joined(self.epoch, max(1, round(self.timing.heartbeat_s * 1000)), int(wants_map))), *actions]

    def heartbeat(
        self, now: float, name: str, instance: int, epoch: int = 0, loads: Sequence[WorkerLoad] = (),
        follows: bool | None = None,
    ) -> list[Action]:  # fmt: skip
        """Take a heartbeat: all workers hold the map of ``epoch`` or later. ``follows``: it asks for EPOCHS."""
        self._advance(now)
        node = self._current(name, instance)
        if node is None:
            text = f"{name!r} is not in this cluster (any more) as this instance: join again"
            return [refusal(Status.UNKNOWN_NODE, text)]
        unknown = not self.rebuilding and self._recovery.is_unknown(epoch, self.epoch, self._limit)
        if unknown and not node.asked:
            node.asked = True
            return [refusal(Status.UNKNOWN_NODE, f"{name!r} has map {epoch}, which is not known here: join again")]
        away = not node.ready
        node.last_seen = self._observed
        node.linked = node.present = True
        node.spared = False
        acked = epoch if epoch <= self._limit else 0
        before, node.acked_epoch = node.acked_epoch, max(node.acked_epoch, acked)
        node.told_epoch, node.follows = acked, node.follows if follows is None else follows
        node.loads = list(loads[: len(node.workers)])
        actions: list[Action] = []
        state = NodeState.DRAINING if node.draining else NodeState.RUNNING
        turned = node.state is not state
        if turned:
            self._turn(node, state, "heartbeat", actions)
        due = away and (self._back(node, actions) or self._placement.receives(node))
        if due or (turned and self.waiting) or self._placement.awaits(node, before):
            self._remap(actions)
        if self.rebuilding:
            self._recovery.saw(epoch, self._limit)
        elif unknown and epoch > self.epoch:
            # Servers must not see two maps of one epoch.
            self._skip_to(self._recovery.beyond(epoch))
            self._remap(actions, changed=True)
        return [Answer(HeartbeatAck(self.epoch)), *actions]

    def leave(self, now: float, name: str, instance: int, warm: bool = False) -> list[Action]:
        """Take a goodbye: the shards go to others at once, or wait for a warm return."""
        self._advance(now)
        if (node := self._current(name, instance)) is None:
            return [refusal(Status.UNKNOWN_NODE, f"{name!r} is not in this cluster as this instance")]
        actions: list[Action] = []
        node.released = node.cold = not warm
        node.overdue = warm and not self.timing.restart_grace_s
        ends = node.released or node.overdue
        wish = "" if ends else f", will be back within {self.timing.restart_grace_s:g} s"
        self._turn(node, NodeState.LEFT, f"said goodbye{wish}", actions)
        self._recovery.joins.pop(name, None)
        self._remap(actions, changed=node.released)
        return [Answer(Done(1)), *actions]

    def link_lost(self, now: float, name: str, instance: int) -> list[Action]:
        """Note that a node's connection has closed: a new instance may take its name."""
        self._advance(now)
        if (node := self._current(name, instance)) is not None:
            node.linked = False
        return []

    def maintain(self, now: float) -> list[Action]:
        """Draw the consequences of time. Call it several times a heartbeat, even if nothing else happens."""
        self._advance(now)
        actions: list[Action] = []
        passed = absence.pass_time(self.nodes.values(), self._observed, self.timing, self._turner(actions))
        if passed.forgotten:
            self._forget(passed.forgotten)
        if (until := self._recovery.until) is not None and self._observed >= until:
            self._end_rebuild(actions)
        elif passed.due:
            self._remap(actions, changed=passed.changed)
        self._heed_clients(actions)
        return actions

    # -- events: shards --------------------------------------------------------------------------

    def moved(self, now: float, msg: Moved) -> list[Action]:
        """Take MOVED: a worker has all values of some shards. Answer: DONE, with how many were moving."""
        self._advance(now)
        if self._current(msg.name, msg.instance) is None:
            return [refusal(Status.UNKNOWN_NODE, f"{msg.name!r} is not in this cluster as this instance: join again")]
        try:
            shards = shards_in(msg.shards)
        except UsageError as exc:
            return [refusal(Status.BAD_REQUEST, str(exc))]
        if self.rebuilding:
            return [Answer(Done(0))]
        # A shard that it lost and got again after that map is still moving.
        done = self._placement.arrived((msg.name, msg.worker), shards, min(msg.epoch, self.epoch))
        actions: list[Action] = []
        if done:
            self._remap(actions, changed=True)
        return [Answer(Done(done)), *actions]

    def drain(self, now: float, name: str, on: bool) -> list[Action]:
        """Start or end a node's drain. Answer: DONE, with how many shards it owns."""
        self._advance(now)
        node = self.nodes.get(name)
        if node is None:
            return [unknown_name(name, self.nodes)]
        if self.rebuilding:
            return [refusal(Status.BUSY, _COLLECTING)]
        takers = [other for other in self.nodes.values() if other is not node and other.serving and not other.draining]
        if on and not node.draining and node.serving and not takers:
            return [last_server(name)]
        actions: list[Action] = []
        if node.draining != on:
            node.draining = on
            if node.state in (NodeState.RUNNING, NodeState.DRAINING):
                state, why = (NodeState.DRAINING, "drain") if on else (NodeState.RUNNING, "resume")
                self._turn(node, state, why, actions)
            else:
                wish = "to be drained" if on else "not to be drained any more"
                actions.append(NodeChanged(name, node.state, node.state, wish))
            self._remap(actions)
        held = self._placement.held((name, info.worker) for info in node.workers)
        return [Answer(Done(sum(held.values()))), *actions]

    def advance(self, now: float, name: str) -> list[Action]:
        """Give a namespace a new epoch, that of the next map. Answer: ADVANCED, which is for later; or a refusal."""
        self._advance(now)
        if self.rebuilding:
            return [refusal(Status.BUSY, _COLLECTING)]
        if fault := self.namespaces.fault(name):
            return [refusal(Status.BAD_REQUEST, fault)]
        actions: list[Action] = []
        self.namespaces.lost.add(name)
        self._remap(actions, changed=True)
        return [Answer(Advanced(self.epoch)), *actions]

    def report(self, now: float, msg: Epochs, names: Iterable[str]) -> list[Action]:
        """Take the epochs that the servers of these names know. Answer: DONE, with how many advances were lost."""
        self._advance(now)
        actions: list[Action] = []
        msg = msg._replace(namespaces=[each for each in msg.namespaces if each.epoch <= self._limit])
        nodes = [node for name in names if (node := self.nodes.get(name)) is not None]
        if lost := self.namespaces.report(msg, nodes, 0 if self.rebuilding else self.cluster):
            self._remap(actions, changed=True)
        return [Answer(Done(lost)), *actions]

    def first_epoch(self, epoch: int = 0) -> int:
        """Return the first map that proves the epochs until now, or until ``epoch``; none of an earlier life does."""
        newest = FOR_EVER if self.rebuilding else epoch or self.namespaces.newest
        return max(newest, self._recovery.own_epoch)

    def note_epoch(self, now: float, epoch: int, *, server: bool = False, supervisor: bool = False) -> list[Action]:
        """Note that a server or client knows this epoch: if all state is lost, servers will bring its map.

        ``server``: a member names it. The epoch goes beyond it: shards there may be frozen by a map that is lost.
        ``supervisor``: of who names it, HELLO said so. Before it joins it is believed only that maps may be lost.
        """
        self._advance(now)
        self._note_epoch(epoch, server=server, supervisor=supervisor)
        actions: list[Action] = []
        if not server:
            self._recovery.claim(epoch, self.epoch)
            self._heed_clients(actions)
        elif not self.rebuilding and self.epoch < epoch <= self._limit:
            self._skip_to(self._recovery.beyond(epoch))
            self._remap(actions, changed=True)
        return actions

    def offer(self, now: float, msg: MapOffer) -> list[Action]:
        """Take a server's map that was asked for. Answer: DONE, 1 if it was of use."""
        self._advance(now)
        try:
            offered = ShardMap(msg)
            fault = offer_fault(msg, offered, self._limit)
        except RemoteProtocolError as exc:
            fault = str(exc)
        if fault:
            return [refusal(Status.BAD_REQUEST, fault)]
        since = np.frombuffer(offered.since, np.uint64)
        actions: list[Action] = []
        learnt = False
        if self.rebuilding:
            if msg.epoch > self._recovery.base_epoch:
                if fault := self._adopt(offered, since, actions):
                    return [refusal(Status.BAD_REQUEST, fault)]
                learnt = True
        elif self._recovery.is_unknown(msg.epoch, self.epoch, self._limit) and msg.cluster == self.cluster:
            if msg.epoch > self.epoch:
                self._skip_to(self._recovery.beyond(msg.epoch))
            # An unknown owner may have had these: no worker's values of them can be told from superseded ones.
            stale = self._recovery.learn(msg.epoch, since)
            self._placement.tables.previous[stale] = NO_OWNER
            self._remap(actions, changed=True, renewed=stale)
            learnt = True
        return [Answer(Done(int(learnt))), *actions]

    # -- questions ---------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Shards that still have to move: only so many move at once."""
        return self._placement.waiting

    @property
    def rebuilding(self) -> bool:
        """The state is lost and a map is being collected: none is sent until that is over."""
        return self._recovery.collecting

    def live_workers(self) -> list[WorkerInfo]:
        """Return the workers of the map, in its order."""
        return [info for _, node in sorted(self.nodes.items()) if not node.released for info in node.workers]

    def map_reply(self) -> MapReply:
        """Return the current map. O(1) until it changes."""
        self._reply = self._reply or self._placement.reply(self.epoch, self.cluster, self.live_workers())
        return self._reply

    def owner(self, shard: int) -> Key | None:
        """Return (node name, worker number) of a shard's owner, or None."""
        return self._placement.key(self._placement.tables.owners[shard])

    def previous(self, shard: int) -> Key | None:
        """Return the previous owner of a moving shard, or None."""
        return self._placement.key(self._placement.tables.previous[shard])

    def since(self, shard: int) -> int:
        """Return the epoch of a shard's last change of owner."""
        return int(self._placement.tables.since[shard])

    def status(self, now: float) -> dict[str, Any]:
        """Return the cluster for people and programs, JSON-able."""
        self._advance(now)
        about = {"cluster": f"{self.cluster:016x}", "epoch": self.epoch, "rebuilding": self.rebuilding}
        about |= {"shards_moved": self.moves, "shards_waiting": self.waiting}
        about["namespace_epochs"] = dict(self.namespaces.table())
        return about | snapshot.report(self.nodes, self._placement.indexes, self._placement.tables, self._observed)

    # -- storing -------------------------------------------------------------------------------------

    def to_state(self) -> dict[str, Any]:
        """Return what must survive a restart, JSON-able."""
        if self.rebuilding:  # half a state must not pass for a whole one
            return snapshot.dump(self.cluster, self.epoch, [], [], Tables(), self.namespaces)
        held = self._placement
        return snapshot.dump(self.cluster, self.epoch, self.nodes.values(), held.keys, held.tables, self.namespaces)

    @classmethod
    def from_state(
        cls, state: Any, now: float, timing: Timing = Timing(), epoch: int = 0,  # noqa: B008 -- immutable
        chance: Chance = secrets.randbits, drawn: int | None = None,
    ) -> Cluster:  # fmt: skip
        """Make a cluster from what :meth:`to_state` returned. ``epoch``: one that no map can have had before.

        It goes on some way beyond that one, as the state may be a copy by which another life went on: ``drawn``, 64
        random bits, else those of ``chance``, say how far.
        Nodes that were alive are JOINING: they have the time of a new node to send a heartbeat, or ``return_s`` if that
        is more. Graces begin anew, as no clock outlives the manager. Raises CorruptionError for a state that
        :meth:`to_state` cannot have made.
        """
        stored = snapshot.load(state)
        made = cls(stored.cluster, now, timing, chance)
        made.nodes, made.namespaces, made.unsure = stored.nodes, stored.namespaces, now
        made._placement.set_keys(stored.keys, stored.tables)
        made.epoch = max(stored.epoch, epoch)
        for node in made.nodes.values():
            if node.state is NodeState.DEAD:
                node.last_seen = -timing.dead_after * timing.heartbeat_s
            elif node.serving:
                node.last_seen = made._returning
        made.check(settled=False)
        made.epoch = beyond_stored(made.epoch, chance(64) if drawn is None else drawn)
        made._recovery.restore(stored.epoch, stored.tables.since, made.epoch)
        made._remap([])  # other settings may make a step due
        return made

    # -- internals -----------------------------------------------------------------------------------

    def _advance(self, now: float, at: float = -math.inf) -> None:
        """Advance observed time, by at most a heartbeat per event: see the module's docstring."""
        step = now - self._clock
        self._clock, self._moment = now, max(now, at)
        if step > 0:
            self._observed += min(step, self.timing.heartbeat_s)

    @property
    def _returning(self) -> float:
        """When a node counts as last seen that is only known from a map: so that its time begins now."""
        return self._observed + max(0.0, self.timing.return_s - self.timing.dead_after * self.timing.heartbeat_s)

    def _current(self, name: str, instance: int) -> Node | None:
        """Return the node if this instance of it is a member."""
        node = self.nodes.get(name)
        return node if node is not None and node.instance == instance and node.serving else None

    def _alive(self, node: Node) -> bool:
        """Return True if its name is taken."""
        silent_s = self._observed - node.last_seen
        return node.serving and node.linked and silent_s < self.timing.suspect_after * self.timing.heartbeat_s

    def _turn(self, node: Node, state: NodeState, why: str, actions: list[Action], *, always: bool = False) -> None:
        if node.state is state and not always:
            return
        actions.append(NodeChanged(node.name, node.state, state, why))
        node.state = state
        node.changed = self._observed

    def _turner(self, actions: list[Action]) -> absence.Turn:
        """Return the callback for ``cluster/absence.py``; it notes LEFT twice for a node that is not back in time."""
        return lambda node, state, why: self._turn(node, state, why, actions, always=state is NodeState.LEFT)

    def _back(self, node: Node, actions: list[Action]) -> bool:
        """Extend the time of the others when a node is back. Return True if there are any: a rebalance is due then."""
        turn = self._turner(actions)
        return not self.rebuilding and absence.spare(self.nodes.values(), node, self._observed, self._returning, turn)

    def _accept(self, msg: Join, actions: list[Action], *, changed: bool = False) -> None:
        """Make a node of a JOIN, or renew it. ``changed``: the map gets a new epoch in any case."""
        workers = [info._replace(node=msg.name, instance=msg.instance) for info in msg.workers]
        node = self.nodes.get(msg.name)
        before = node.state if node is not None else None
        away = node is not None and not node.ready and (node.instance == msg.instance or bool(msg.warm))
        renewed = NO_SHARDS
        if node is None:
            node = self.nodes[msg.name] = Node(msg.name, msg.instance, workers, NodeState.JOINING, self._observed)
            why, changed = "joined", True
        elif node.instance == msg.instance:
            why = "joined again"
            changed |= node.workers != workers or node.released
        else:
            gone = node.state.value if node.linked or node.released else "gone: its connection has closed"
            why, changed = f"replaces an instance that is {gone}" + (", warm" if msg.warm else ""), True
            self.unsure = self.unsure if node.left else max(self.unsure, self._moment)
            renewed = self._placement.replace(node, msg.epoch if msg.warm else 0, fresh=not msg.epoch)
            node.asked, node.follows = False, None
        if before is None or node.instance != msg.instance:
            # No value in its arenas is older: new arenas are empty, warm ones name their last epoch. Of a mixture of
            # old and new ones nothing is known until it has taken a map.
            node.acked_epoch, node.told_epoch = msg.epoch if msg.warm else 0 if msg.epoch else self.epoch, 0
        node.instance, node.workers, node.loads = msg.instance, workers, []
        node.last_seen = self._observed
        node.linked = node.present = True
        node.released = node.overdue = node.spared = node.cold = False
        if before is None:
            actions.append(NodeChanged(msg.name, None, NodeState.JOINING, why))
        elif changed or before in (NodeState.SUSPECT, NodeState.DEAD, NodeState.LEFT):
            self._turn(node, NodeState.JOINING, why, actions, always=True)
        if away:
            self._back(node, actions)
        self._remap(actions, changed=changed, renewed=renewed)

    def _note_epoch(self, epoch: int, *, server: bool, supervisor: bool = False) -> None:
        """Begin to collect a lost map if this manager knows nothing and a server or client does."""
        until = self._observed + self.timing.rebuild_beats * self.timing.heartbeat_s
        begun = self.rebuilding
        if not self.nodes and self._placement.unowned:
            self._recovery.begin(epoch, self.epoch, until, server=server, supervisor=supervisor)
        if self.rebuilding and not begun:
            self.unsure = max(self.unsure, self._moment)  # a predecessor has given leases
        if server:
            self._recovery.saw(epoch, self._limit)

    @property
    def _limit(self) -> int:
        """The highest epoch that is believed of a server."""
        return self._recovery.limit(self.epoch, blank=not self.nodes and self._placement.unowned)

    def _heed_clients(self, actions: list[Action]) -> None:
        """Go beyond the maps that only clients have, if earlier lives of this manager have lost some."""
        if epoch := self._recovery.heed(self._observed, self.epoch):
            self._skip_to(epoch)
            self._remap(actions, changed=True)

    def _skip_to(self, epoch: int) -> None:
        """Go on beyond ``epoch``: maps up to it were sent. The caller makes the next one."""
        self._recovery.skip_to(epoch, self.epoch, self._placement.tables.since)
        self.epoch = epoch

    def _adopt(self, offered: ShardMap, since: NDArray[np.uint64], actions: list[Action]) -> str:
        """Take over a server's map and the nodes that have joined. Return what is wrong with it, or ""."""
        nodes, fault = nodes_in(offered, self._observed, self._returning)
        if fault:
            return fault
        added = [len(msg.workers) for name, msg in self._recovery.joins.items() if name not in nodes]
        if len(offered.workers) + sum(added) > WORKERS_MAX:
            return f"a cluster has at most {WORKERS_MAX} workers"
        why = f"known from the map of epoch {offered.epoch}"
        actions += [NodeChanged(name, None, NodeState.JOINING, why) for name in nodes]
        self.nodes, self.cluster = nodes, offered.cluster
        self.epoch = self._recovery.adopt(offered, since, frozenset(nodes), self.epoch)
        self._placement.take_map(offered, since)
        for msg in self._recovery.joins.values():
            self._accept(msg, actions)
        return ""

    def _end_rebuild(self, actions: list[Action]) -> None:
        joins = self._recovery.joins
        self.epoch = self._recovery.end(self.epoch)
        self.namespaces.collected(self.cluster)
        for name, msg in joins.items():
            node = self.nodes.get(name)
            # During the collection this cluster's id could still become that of its map. Now it must drop its values.
            if msg.cluster not in (0, self.cluster) and node is not None and node.instance == msg.instance:
                node.released = node.cold = True
                self._turn(node, NodeState.LEFT, "holds values of another cluster", actions)
        if self.nodes:
            self._remap(actions, changed=True)

    def _remap(self, actions: list[Action], *, changed: bool = False, renewed: Shards = NO_SHARDS) -> None:
        """Draw the consequences of a change: drop previous owners that do not serve, rebalance, make a new epoch.

        ``renewed``: shards that begin anew with the same owner.
        """
        other, moved = self._placement.rebalance(self.nodes, self.timing.moves_at_once, assign=not self.rebuilding)
        self.moves += len(moved)
        changed |= other
        begun = np.concatenate((renewed, moved))
        if changed or len(begun):
            self.epoch += 1
            self._placement.tables.since[begun] = self.epoch
            self.namespaces.renew(self.epoch)
            self._forget(absence.surplus(self.nodes.values()))
            self._reply = None
            if not self.rebuilding:
                actions[:] = [action for action in actions if not isinstance(action, MapChanged)]
                actions.append(MapChanged(self.epoch))

    def _forget(self, nodes: Iterable[Node]) -> None:
        """Forget these nodes, and drop what is not needed any more."""
        for node in nodes:
            del self.nodes[node.name]
        self._placement.compact(self.nodes)

    def check(self, *, settled: bool = True) -> None:
        """Raise CorruptionError unless every invariant holds. O(shards + workers).

        ``settled``: check also that no step is due.
        """
        faults = [fault for name, node in self.nodes.items() if (fault := node_fault(name, node))]
        if faults or not 1 <= self.epoch < 1 << 62 or len(self.live_workers()) > WORKERS_MAX:
            raise CorruptionError(f"cluster: epoch {self.epoch}, {len(self.live_workers())} workers; {faults}")
        limit = self.timing.moves_at_once if settled and not self.rebuilding else None
        self._placement.check(self.nodes, self.epoch, limit, assign=not self.rebuilding)

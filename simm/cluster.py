"""Who is in the cluster and who owns which shard: a pure state machine.

Events in, actions out, the clock an argument. No socket, no file, no thread, no time of its own, so
the same code runs in the manager and in a simulator that plays thousands of nodes.

A node's life
-------------
A node is known by its *name*, which survives restarts and moves between hosts; one run of it
by its *instance*, a random number drawn at its start.

    (join) -> JOINING -> RUNNING or DRAINING <-> SUSPECT -> DEAD -> (join again)
                 \\------ \\------------------- \\-> LEFT -> (join again)

* JOINING: accepted, in the map, and not heard from yet by a heartbeat. So is every node of a state
  file after the manager's restart. RUNNING: heartbeats come. DRAINING: they come, and somebody wants it empty: it
  serves, its share is nothing, and its shards move away. That wish stays, over all restarts, until it is resumed.
* SUSPECT: ``suspect_after`` heartbeats missed. It keeps its shards: nothing is moved for a hiccup.
* DEAD: ``dead_after`` missed. ``grace_s`` later its shards go to the survivors. Its heartbeats are
  answered UNKNOWN_NODE from DEAD on: it must join again before it may own anything.
* LEFT: it said goodbye; its shards go to others at once. If it said *warm*, that it will be back with all values, they
  wait for it for ``restart_grace_s``.

Owners, previous owners, epochs
-------------------------------
``deal.py`` says who gets which shard. Each has the epoch of its last change of owner (*since*), by which a worker
knows what of its arena is good, and while its values are being copied a *previous* owner, who has what the owner
lacks. The previous one is named only while it serves; one that dies, leaves or is replaced is forgotten at once, and
what has not been copied is lost.

What can go wrong, and what we chose
------------------------------------
* *Two servers with one name* (a copied configuration). While the first one lives, the second is
  refused with NAME_TAKEN. It does not live when it is DEAD, LEFT, SUSPECT, or when its connection has
  been lost: the kernel of a killed process closes that at once, so a restarted server need not
  wait for the suspicion. If the first was alive all the same, its next heartbeat is answered
  UNKNOWN_NODE and then *it* is the second.
* *A new instance* keeps the shards of the old one, if nobody else has got them. But what the old one accepted is lost,
  unless the new one starts warm: so ``since`` becomes new, by which no older arena of that name, on another
  host perhaps, is ever taken for good; and previous owners are forgotten, warm or not, as their values may be older
  than what was lost.
* *The manager slept* (SIGSTOP, a stalled host), and at its wake-up all nodes look dead, although
  their heartbeats wait in its sockets. Silence is therefore measured in *observed* time, which moves by
  at most one heartbeat per event: a manager that did not listen blames nobody. A clock that jumps
  cannot do harm either. It follows that :meth:`Cluster.tick` must be called more often than once a heartbeat.
* *All state is lost.* A cluster that knows nothing, and hears that somebody has a map, listens for ``rebuild_beats``
  before it deals anything; every server with a newer map than the best so far is asked for it (MAP_OFFER), and the
  newest is adopted: owners, previous owners, epochs. Wishes to drain are lost.
* *Some state is lost* (an old file restored; a full disk and then a kill): servers hold maps that we cannot have made
  or do not remember. Whoever joins with one is asked for it, and whose heartbeat speaks of one must join. Our epoch is
  raised above it, and shards that changed owner in it since what we know are taken to have had owners that we do not
  know: their ``since`` becomes new, so what anybody has of them is dropped.

LIMITATIONS: a manager without state whose first server is a new one deals it everything at once; old ones that come
later start empty.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from . import clusterstate, clusterstatus
from .clusterstate import Key
from .constants import NO_OWNER
from .deal import Tables
from .errors import CorruptionError, RemoteProtocolError, UsageError
from .members import (
    HOST_BYTES_MAX,
    NAME_BYTES_MAX,
    NODE_WORKERS_MAX,
    UDS_BYTES_MAX,
    WORKERS_MAX,
    Action,
    Answer,
    MapChanged,
    Node,
    NodeChanged,
    NodeState,
    Timing,
    join_fault,
    refusal,
)
from .messages import Done, HeartbeatAck, Join, Joined, MapOffer, MapReply, Moved, Status, WorkerInfo, WorkerLoad
from .placement import NOTHING, Placement, Shards
from .shardmap import ShardMap
from .shards import shards_in

__all__ = [
    "EPOCHS_RESERVED", "EPOCH_MAX", "FORGET_S", "HOST_BYTES_MAX", "KNOWN_MAX", "NAME_BYTES_MAX", "NODE_WORKERS_MAX",
    "UDS_BYTES_MAX", "WORKERS_MAX", "Action", "Answer", "Cluster", "MapChanged", "Node", "NodeChanged", "NodeState",
    "Timing",
]  # fmt: skip

#: Workers remembered in all, those away included; the longest away are forgotten first.
KNOWN_MAX: Final = 20_000
#: Observed seconds after which a dead or left node is forgotten.
FORGET_S: Final = 86_400.0
#: Epochs that may have been told beyond the newest that is known for certain.
EPOCHS_RESERVED: Final = 1000
#: A server's claim of an epoch beyond is garbage: at 1,000 changes a second it is 278 years off.
EPOCH_MAX: Final = 1 << 43
assert WORKERS_MAX < KNOWN_MAX < NO_OWNER


class Cluster:
    """Membership and shard map. See the module's docstring.

    ``now`` is any monotonic clock, in seconds; a step back counts as no step.
    """

    def __init__(self, cluster: int, now: float, timing: Timing = Timing()) -> None:  # noqa: B008 -- immutable
        timing.check()
        #: Names this cluster for ever, so that its epochs are not compared with another's.
        self.cluster = cluster
        self.timing = timing
        self.epoch = 1
        self.nodes: dict[str, Node] = {}
        #: Changes of owner by all deals so far.
        self.moves = 0
        self._placement = Placement()
        self._clock = now
        self._observed = 0.0
        self._reply: MapReply | None = None
        #: The last epoch of which we know the map for certain, what it said, and the first that was ours again.
        self._base_epoch = 0
        self._base_since = self._placement.tables.since.copy()
        self._own_epoch = 1
        #: While we have lost our state and listen: until when, who has joined, and the newest epoch heard of.
        self._rebuild_until: float | None = None
        self._joins: dict[str, Join] = {}
        self._heard_of = 0

    def __repr__(self) -> str:
        return f"<Cluster epoch={self.epoch} nodes={len(self.nodes)} workers={len(self.live_workers())}>"

    # -- events: nodes ---------------------------------------------------------------------------

    def join(self, now: float, msg: Join) -> list[Action]:
        """A node offers its workers: for the first time, again, or after a restart."""
        self._advance(now)
        reason = join_fault(msg)
        if reason:
            return [refusal(Status.BAD_REQUEST, reason)]
        node = self.nodes.get(msg.name)
        others = sum(len(other.workers) for other in self.nodes.values() if other is not node and not other.released)
        if others + len(msg.workers) > WORKERS_MAX:
            return [refusal(Status.NO_SPACE, f"a cluster has at most {WORKERS_MAX} workers")]
        if node is not None and node.instance != msg.instance and self._alive(node):
            quiet = self.timing.suspect_after * self.timing.heartbeat_s - (self._observed - node.heard)
            text = (
                f"a data server named {msg.name!r} is running (at {node.workers[0].host}): give this one another "
                f"--name, or stop that one; if it has just died, try again in {max(quiet, 0.1):.1f} s"
            )
            return [refusal(Status.NAME_TAKEN, text)]
        self._noticed(msg.epoch)
        wants_map = self._foreign(msg.epoch)
        raised = False
        if self.rebuilding:
            self._joins[msg.name] = msg
        elif self.epoch < msg.epoch <= EPOCH_MAX:
            self._raise(msg.epoch)
            raised = True
        actions: list[Action] = []
        self._accept(msg, actions, changed=raised)
        self.nodes[msg.name].asked |= wants_map
        return [Answer(Joined(self.epoch, max(1, round(self.timing.heartbeat_s * 1000)), int(wants_map))), *actions]

    def heartbeat(
        self, now: float, name: str, instance: int, epoch: int = 0, loads: Sequence[WorkerLoad] = ()
    ) -> list[Action]:
        """A node lives, and all its workers hold the map of ``epoch``, or a newer one."""
        self._advance(now)
        node = self._current(name, instance)
        if node is None:
            text = f"{name!r} is not in this cluster (any more) as this instance: join again"
            return [refusal(Status.UNKNOWN_NODE, text)]
        foreign = not self.rebuilding and self._foreign(epoch)
        if foreign and not node.asked:
            node.asked = True
            return [refusal(Status.UNKNOWN_NODE, f"{name!r} has map {epoch}, which is not known here: join again")]
        node.heard = self._observed
        node.linked = node.present = True
        caught_up, node.map_epoch = epoch > node.map_epoch, max(node.map_epoch, epoch)
        node.loads = list(loads[: len(node.workers)])
        actions: list[Action] = []
        state = NodeState.DRAINING if node.draining else NodeState.RUNNING
        if node.state is not state:
            self._turn(node, state, "heartbeat", actions)
            caught_up = True
        if caught_up and self.waiting:
            self._remap(actions)
        if self.rebuilding:
            self._heard_of = max(self._heard_of, epoch if epoch <= EPOCH_MAX else 0)
        elif foreign and epoch > self.epoch:
            # Servers must not see an epoch again with another map.
            self._raise(epoch)
            self._remap(actions, changed=True)
        return [Answer(HeartbeatAck(self.epoch)), *actions]

    def leave(self, now: float, name: str, instance: int, warm: bool = False) -> list[Action]:
        """A clean goodbye: the shards go to others at once, or wait for a warm return."""
        self._advance(now)
        node = self._current(name, instance)
        if node is None:
            return [refusal(Status.UNKNOWN_NODE, f"{name!r} is not in this cluster as this instance")]
        actions: list[Action] = []
        node.released = not warm or not self.timing.restart_grace_s
        wish = "" if node.released else f", will be back within {self.timing.restart_grace_s:g} s"
        self._turn(node, NodeState.LEFT, f"said goodbye{wish}", actions)
        self._joins.pop(name, None)
        self._remap(actions, changed=node.released)
        return [Answer(Done(1)), *actions]

    def link_lost(self, now: float, name: str, instance: int) -> list[Action]:
        """The connection that a node's heartbeats came by has closed: a new instance may take its name."""
        self._advance(now)
        node = self._current(name, instance)
        if node is not None:
            node.linked = False
        return []

    def tick(self, now: float) -> list[Action]:
        """Time passes. Call it several times a heartbeat, also when nothing else happens."""
        self._advance(now)
        timing = self.timing
        actions: list[Action] = []
        remap = released = False
        for node in list(self.nodes.values()):
            quiet = self._observed - node.heard
            away = self._observed - node.changed
            if node.serving and quiet >= timing.dead_after * timing.heartbeat_s:
                self._turn(node, NodeState.DEAD, f"silent for {quiet:.1f} s", actions)
                remap = True
            elif node.serving and quiet >= timing.suspect_after * timing.heartbeat_s:
                self._turn(node, NodeState.SUSPECT, f"silent for {quiet:.1f} s", actions)
            if node.state is NodeState.DEAD and not node.released:
                node.released = quiet >= timing.dead_after * timing.heartbeat_s + timing.grace_s
                released |= node.released
            elif node.state is NodeState.LEFT and not node.released and away >= timing.restart_grace_s:
                node.released = released = True
                self._turn(node, NodeState.LEFT, f"is not back after {away:.1f} s", actions, always=True)
            elif node.released and away >= FORGET_S:
                self._forget(node)
        if self._rebuild_until is not None and self._observed >= self._rebuild_until:
            self._end_rebuild(actions)
        elif remap or released:
            self._remap(actions, changed=released)
        return actions

    # -- events: shards --------------------------------------------------------------------------

    def moved(self, now: float, msg: Moved) -> list[Action]:
        """A worker has all that the previous owner had of some shards. Answer: DONE, with how many were moving."""
        self._advance(now)
        if self._current(msg.name, msg.instance) is None:
            return [refusal(Status.UNKNOWN_NODE, f"{msg.name!r} is not in this cluster as this instance: join again")]
        try:
            shards = shards_in(msg.shards)
        except UsageError as exc:
            return [refusal(Status.BAD_REQUEST, str(exc))]
        if self.rebuilding:
            return [Answer(Done(0))]
        # It speaks of what it got by its map; what it lost and got again since then is another matter.
        done = self._placement.arrived((msg.name, msg.worker), shards, min(msg.epoch, self.epoch))
        actions: list[Action] = []
        if done:
            self._remap(actions, changed=True)
        return [Answer(Done(done)), *actions]

    def drain(self, now: float, name: str, on: bool) -> list[Action]:
        """Somebody wants a node to be empty, or to take its share again. Answer: DONE, with how many shards it owns."""
        self._advance(now)
        node = self.nodes.get(name)
        if node is None:
            near = difflib.get_close_matches(name, list(self.nodes), n=1, cutoff=0.0)
            known = f"the nearest name is {near[0]!r}" if near else "none has joined"
            return [refusal(Status.UNKNOWN_NODE, f"there is no data server named {name!r}; {known}")]
        if self.rebuilding:
            return [refusal(Status.BUSY, "the manager is collecting the map that it lost: try again in some seconds")]
        takers = [other for other in self.nodes.values() if other is not node and other.serving and not other.draining]
        if on and not node.draining and node.serving and not takers:
            text = (
                f"{name!r} is the only data server that could hold its shards: start another one (`simm dataserver`), "
                "or take one back with `simm node resume`, and try again; to drop its values, just stop it"
            )
            return [refusal(Status.UNAVAILABLE, text)]
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

    def noticed(self, now: float, epoch: int) -> None:
        """Somebody has a map of this epoch, a client perhaps: if we have lost our state, servers will come with it."""
        self._advance(now)
        self._noticed(epoch)

    def offer(self, now: float, msg: MapOffer) -> list[Action]:
        """A server's map, as we asked. Answer: DONE, 1 if we learnt something."""
        self._advance(now)
        try:
            offered = ShardMap(msg)
            since = np.frombuffer(offered.since, np.uint64)
            owned = np.frombuffer(offered.owners, np.uint16) != NO_OWNER
        except RemoteProtocolError as exc:
            return [refusal(Status.BAD_REQUEST, str(exc))]
        if not 0 < msg.epoch <= EPOCH_MAX or (since > msg.epoch).any() or (owned & (since == 0)).any():
            return [refusal(Status.BAD_REQUEST, f"a map of epoch {msg.epoch} with impossible epochs")]
        actions: list[Action] = []
        learnt = False
        if self.rebuilding:
            if msg.epoch > self._base_epoch:
                fault = self._adopt(offered, since, actions)
                if fault:
                    return [refusal(Status.BAD_REQUEST, fault)]
                learnt = True
        elif self._foreign(msg.epoch) and msg.cluster == self.cluster:
            if msg.epoch > self.epoch:
                self._raise(msg.epoch)
            # Had an owner that we do not know of: nobody's values of it can be told from superseded ones.
            stale = np.flatnonzero(since > self._base_since)
            self._placement.tables.previous[stale] = NO_OWNER
            self._base_epoch = msg.epoch
            self._base_since = np.maximum(self._base_since, since)
            self._remap(actions, changed=True, renewed=stale)
            learnt = True
        return [Answer(Done(int(learnt))), *actions]

    # -- questions ---------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Shards that have to move and do not yet: their number at once is limited."""
        return self._placement.waiting

    @property
    def rebuilding(self) -> bool:
        """We have lost our state and listen; the map is nobody's business until that is over."""
        return self._rebuild_until is not None

    def live_workers(self) -> list[WorkerInfo]:
        """The workers of the map, in its order."""
        members = [self.nodes[name] for name in sorted(self.nodes)]
        return [info for node in members if not node.released for info in node.workers]

    def map_reply(self) -> MapReply:
        """The current map. O(1) until it changes."""
        if self._reply is None:
            self._reply = self._placement.reply(self.epoch, self.cluster, self.live_workers())
        return self._reply

    def owner(self, shard: int) -> Key | None:
        """(node name, worker number) that owns a shard, or None."""
        return self._placement.key(self._placement.tables.owners[shard])

    def previous(self, shard: int) -> Key | None:
        """Who had a shard that is moving, or None."""
        return self._placement.key(self._placement.tables.previous[shard])

    def since(self, shard: int) -> int:
        """The epoch of a shard's last change of owner."""
        return int(self._placement.tables.since[shard])

    def shards_held(self) -> dict[Key, int]:
        """How many shards each worker of the map owns."""
        return self._placement.held((info.node, info.worker) for info in self.live_workers())

    def status(self, now: float) -> dict[str, Any]:
        """The cluster for people and programs, JSON-able."""
        self._advance(now)
        about = {
            "cluster": f"{self.cluster:016x}",
            "epoch": self.epoch,
            "rebuilding": self.rebuilding,
            "shards_moved": self.moves,
            "shards_waiting": self.waiting,
        }
        return about | clusterstatus.report(self.nodes, self._placement.places, self._placement.tables, self._observed)

    # -- storing -------------------------------------------------------------------------------------

    def to_state(self) -> dict[str, Any]:
        """What must survive a restart, JSON-able."""
        if self.rebuilding:  # half of it would pass for the whole
            return clusterstate.dump(self.cluster, self.epoch, [], [], Tables())
        return clusterstate.dump(
            self.cluster, self.epoch, self.nodes.values(), self._placement.keys, self._placement.tables
        )

    @classmethod
    def from_state(
        cls, state: Any, now: float, timing: Timing = Timing(), epoch: int = 0,  # noqa: B008 -- immutable
    ) -> Cluster:  # fmt: skip
        """A cluster as :meth:`to_state` left it; ``epoch``: one that nobody can have been told before.

        Raises CorruptionError for anything that it could not have left. Nodes that were alive are JOINING: they are
        given the time of a fresh one to be heard, or ``return_s`` if that is more. Graces begin anew: how much of
        them has passed is unknown.
        """
        stored = clusterstate.load(state)
        made = cls(stored.cluster, now, timing)
        made.nodes = stored.nodes
        made._placement.name(stored.keys, stored.tables)
        made._base_epoch = stored.epoch
        made._base_since = stored.tables.since.copy()
        made.epoch = made._own_epoch = max(stored.epoch, epoch)
        for node in made.nodes.values():
            if node.state is NodeState.DEAD:
                node.heard = -timing.dead_after * timing.heartbeat_s
            elif node.serving:
                node.heard = made._returning
        made.check(settled=False)
        made._remap([])  # what other settings make due
        return made

    # -- internals -----------------------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        """Observe: time moves by at most a heartbeat per event, see the module's docstring."""
        step = now - self._clock
        self._clock = now
        if step > 0:
            self._observed += min(step, self.timing.heartbeat_s)

    @property
    def _returning(self) -> float:
        """When a node counts as heard that is only known: as late as it must be to have its time from now on."""
        return self._observed + max(0.0, self.timing.return_s - self.timing.dead_after * self.timing.heartbeat_s)

    def _current(self, name: str, instance: int) -> Node | None:
        """The node, if this instance of it is a member."""
        node = self.nodes.get(name)
        return node if node is not None and node.instance == instance and node.serving else None

    def _alive(self, node: Node) -> bool:
        """Whether its name is taken."""
        if not node.serving or not node.linked:
            return False
        return self._observed - node.heard < self.timing.suspect_after * self.timing.heartbeat_s

    def _turn(self, node: Node, state: NodeState, why: str, actions: list[Action], *, always: bool = False) -> None:
        if node.state is state and not always:
            return
        actions.append(NodeChanged(node.name, node.state, state, why))
        node.state = state
        node.changed = self._observed

    def _accept(self, msg: Join, actions: list[Action], *, changed: bool = False) -> None:
        """Make a node of a JOIN, or renew it. ``changed``: the map must have a new epoch anyway."""
        workers = [info._replace(node=msg.name, instance=msg.instance) for info in msg.workers]
        node = self.nodes.get(msg.name)
        before = node.state if node is not None else None
        renewed = NOTHING
        if node is None:
            node = self.nodes[msg.name] = Node(msg.name, msg.instance, workers, NodeState.JOINING, self._observed)
            why, changed = "joined", True
        elif node.instance == msg.instance:
            why = "joined again"
            changed |= node.workers != workers or node.released
        else:
            gone = node.state.value if node.linked or node.released else "gone: its connection has closed"
            why, changed = f"replaces an instance that is {gone}" + (", warm" if msg.warm else ""), True
            renewed = self._placement.replace(node, msg.epoch if msg.warm else 0)
            node.asked = False
        if before is None or node.instance != msg.instance:
            # Nothing in its arenas is older than that: new ones are empty, warm ones say how far they came. Of some
            # that are old and some that are new nothing is known until it has taken a map.
            node.map_epoch = msg.epoch if msg.warm else 0 if msg.epoch else self.epoch
        node.instance = msg.instance
        node.workers = workers
        node.loads = []
        node.heard = self._observed
        node.linked = node.present = True
        node.released = False
        if before is None:
            actions.append(NodeChanged(msg.name, None, NodeState.JOINING, why))
        elif changed or before in (NodeState.SUSPECT, NodeState.DEAD, NodeState.LEFT):
            self._turn(node, NodeState.JOINING, why, actions, always=True)
        self._remap(actions, changed=changed, renewed=renewed)

    def _noticed(self, epoch: int) -> None:
        """Begin to listen, if we know nothing and somebody does."""
        blank = not self.nodes and not self.rebuilding and self._placement.unowned
        if blank and 0 < epoch <= EPOCH_MAX:
            self._rebuild_until = self._observed + self.timing.rebuild_beats * self.timing.heartbeat_s
            self._base_epoch = self._heard_of = 0
            self._joins = {}
        if self.rebuilding and epoch <= EPOCH_MAX:
            self._heard_of = max(self._heard_of, epoch)

    def _foreign(self, epoch: int) -> bool:
        """Is the map of this epoch one that we do not know and that came before what we tell now?"""
        if self.rebuilding:
            return self._base_epoch < epoch <= EPOCH_MAX
        return self._base_epoch < epoch < self._own_epoch or self.epoch < epoch <= EPOCH_MAX

    def _raise(self, epoch: int) -> None:
        """Somebody was told maps up to ``epoch``; go on beyond. The caller makes the next one."""
        self._base_epoch, self._base_since = self.epoch, self._placement.tables.since.copy()
        self.epoch = epoch
        self._own_epoch = epoch + 1

    def _adopt(self, offered: ShardMap, since: NDArray[np.uint64], actions: list[Action]) -> str:
        """Make a server's map ours, and let those who have joined join it; what is wrong with it, or nothing."""
        groups: dict[str, list[WorkerInfo]] = {}
        for info in offered.workers:
            groups.setdefault(info.node, []).append(info)
        nodes: dict[str, Node] = {}
        for name, workers in groups.items():
            instance = workers[0].instance
            fault = join_fault(Join(instance, 0, name, workers))
            if fault or any(info.instance != instance for info in workers):
                return f"node {name!r}: {fault or 'two instances of it'}"
            nodes[name] = Node(name, instance, workers, NodeState.JOINING, self._observed)
            nodes[name].heard = self._returning
        added = [len(msg.workers) for name, msg in self._joins.items() if name not in nodes]
        if len(offered.workers) + sum(added) > WORKERS_MAX:
            return f"a cluster has at most {WORKERS_MAX} workers"
        why = f"known from the map of epoch {offered.epoch}"
        actions += [NodeChanged(name, None, NodeState.JOINING, why) for name in nodes]
        self.nodes = nodes
        self.cluster = offered.cluster
        self.epoch = max(self.epoch, offered.epoch) + EPOCHS_RESERVED
        self._base_epoch, self._base_since = offered.epoch, since.copy()
        self._placement.adopt(offered, since)
        for msg in self._joins.values():
            self._accept(msg, actions)
        return ""

    def _end_rebuild(self, actions: list[Action]) -> None:
        self._rebuild_until = None
        self._joins = {}
        self.epoch = max(self.epoch, self._heard_of)
        self._own_epoch = self.epoch + 1
        if self.nodes:
            self._remap(actions, changed=True)

    def _remap(self, actions: list[Action], *, changed: bool = False, renewed: Shards = NOTHING) -> None:
        """All that follows from a change: forget previous owners that do not serve, deal, and make an epoch if need be.

        ``renewed``: shards that begin anew, with their owner.
        """
        lost, dealt = self._placement.settle(self.nodes, self.timing.moves_at_once, dealing=not self.rebuilding)
        self.moves += len(dealt)
        changed |= lost
        begun = np.concatenate((renewed, dealt))
        if changed or len(begun):
            self.epoch += 1
            self._placement.tables.since[begun] = self.epoch
            self._compact()
            self._reply = None
            if not self.rebuilding:
                actions[:] = [action for action in actions if not isinstance(action, MapChanged)]
                actions.append(MapChanged(self.epoch))

    def _compact(self) -> None:
        """Drop what means nothing any more, and the longest away when there are too many."""
        if sum(len(node.workers) for node in self.nodes.values()) > KNOWN_MAX:
            self._forget(min((node for node in self.nodes.values() if node.released), key=lambda node: node.changed))
        else:
            self._placement.compact(self.nodes)

    def _forget(self, node: Node) -> None:
        del self.nodes[node.name]
        self._compact()

    def check(self, *, settled: bool = True) -> None:
        """Raise CorruptionError unless every invariant holds. O(shards + workers).

        ``settled``: no step is due, either.
        """

        def must(fact: bool, text: str) -> None:
            if not fact:
                raise CorruptionError(f"cluster: {text}")

        must(1 <= self.epoch < 1 << 62, f"epoch {self.epoch}")
        for name, node in self.nodes.items():
            must(name == node.name and bool(node.workers), f"node {name!r} is not itself")
            must(not node.released or not node.serving, f"{node!r} lives without shards")
            must(node.draining or node.state is not NodeState.DRAINING, f"{node!r} drains, and nobody wanted it to")
            for info in node.workers:
                must(info.node == name and info.instance == node.instance, f"{node!r} has another's worker")
        workers = len(self.live_workers())
        must(workers <= WORKERS_MAX, f"{workers} workers")
        limit = self.timing.moves_at_once if settled and not self.rebuilding else None
        self._placement.check(self.nodes, self.epoch, limit, dealing=not self.rebuilding)

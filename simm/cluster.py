"""Who is in the cluster and who owns which shard: a pure state machine.

Events in, actions out, the clock an argument. No socket, no file, no thread, no time of its own, so
the same code runs in the manager and in a simulator that plays thousands of nodes.

A node's life
-------------
A node is known by its *name*, which survives restarts and moves between hosts; one run of it
by its *instance*, a random number drawn at its start.

    (join) -> JOINING -> UP <-> SUSPECT -> DEAD -> (join again)
                 \\------ \\------- \\-> LEFT -> (join again)

* JOINING: accepted, in the map, and not heard from yet by a heartbeat. So is every node of a state
  file after the manager's restart. UP: heartbeats come.
* SUSPECT: ``suspect_after`` heartbeats missed. It keeps its shards: nothing is moved for a hiccup.
* DEAD: ``dead_after`` missed. ``grace_s`` later its shards go to the survivors. Its heartbeats are
  answered UNKNOWN_NODE from DEAD on: it must join again before it may own anything.
* LEFT: it said goodbye; its shards go to others at once.

What can go wrong, and what we chose
------------------------------------
* *Two servers with one name* (a copied configuration). While the first one lives, the second is
  refused with NAME_TAKEN. It does not live when it is DEAD, LEFT, SUSPECT, or when its connection has
  been lost: the kernel of a killed process closes that at once, so a restarted server need not
  wait for the suspicion. If the first was alive all the same, its next heartbeat is answered
  UNKNOWN_NODE and then *it* is the second.
* *The manager slept* (SIGSTOP, a stalled host), and at its wake-up all nodes look dead, although
  their heartbeats wait in its sockets. Silence is therefore measured in *observed* time, which moves by
  at most one heartbeat per event: a manager that did not listen blames nobody. A clock that jumps
  cannot do harm either. It follows that :meth:`Cluster.tick` must be called more often than once a heartbeat.
* *An epoch goes back* because the state file was lost or could not be written. A heartbeat says which
  epoch its server holds; if that is newer than ours, ours is raised above it.
* *A server returns* and should find its shards, as its arena may still hold their values. Each shard
  remembers its *home*, the last worker that got it by plan and not by somebody's death; elsewhere it
  is a *guest*. A worker that comes back gets its own first, and who has to give some gives guests
  first. Homes of nodes away for ``FORGET_S`` are forgotten.

How shards are dealt
--------------------
:func:`apportion` gives each worker the floor or the ceiling of its share by capacity, :func:`deal`
moves as few shards as that allows: those without an owner and those above a worker's number, never
any other. It is O(shards + workers log workers), about 10 ms, and runs only when membership changes.

LIMITATIONS: shards change their owner at once and their values are not copied (a miss is always allowed).
The map names no previous owner yet.
"""

from __future__ import annotations

import base64
import binascii
from array import array
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Final, NamedTuple

from .constants import FRAME_BYTES_MAX, NO_OWNER, SHARD_COUNT
from .errors import CorruptionError, UsageError
from .messages import (
    Done,
    Error,
    HeartbeatAck,
    Join,
    Joined,
    MapReply,
    Status,
    WorkerInfo,
    WorkerLoad,
)

STATE_FORMAT: Final = 1
#: Limits that let every map fit one frame: 1,900 workers of the longest text allowed, and the owners.
WORKERS_MAX: Final = 1_900
NODE_WORKERS_MAX: Final = 64
NAME_BYTES_MAX: Final = 128
UDS_BYTES_MAX: Final = 108
HOST_BYTES_MAX: Final = 255
_WORKER_BYTES_MAX: Final = 32 + 6 + NAME_BYTES_MAX + UDS_BYTES_MAX + HOST_BYTES_MAX
assert WORKERS_MAX * _WORKER_BYTES_MAX + 2 * SHARD_COUNT + 64 <= FRAME_BYTES_MAX

#: Workers remembered in all, those away included; the longest away are forgotten first.
KNOWN_MAX: Final = 20_000
#: Observed seconds after which a dead or left node is forgotten.
FORGET_S: Final = 86_400.0
#: A server's claim of an epoch beyond is garbage: at 1,000 changes a second it is 278 years off.
EPOCH_MAX: Final = 1 << 43
assert WORKERS_MAX < KNOWN_MAX < NO_OWNER and WORKERS_MAX < SHARD_COUNT


class NodeState(str, Enum):
    """See the module's docstring."""

    JOINING = "joining"
    UP = "up"
    SUSPECT = "suspect"
    DEAD = "dead"
    LEFT = "left"


# --- actions ----------------------------------------------------------------------------------


class Answer(NamedTuple):
    """Send this to who asked. Always the first action of a request."""

    message: Any
    status: Status = Status.OK


class MapChanged(NamedTuple):
    """There is a new map: store the state, then push the map to all subscribers."""

    epoch: int


class NodeChanged(NamedTuple):
    """A node changed its state: log it and store the state. ``before`` is None for a new node."""

    name: str
    before: NodeState | None
    after: NodeState
    why: str


Action = Answer | MapChanged | NodeChanged


# --- dealing shards ---------------------------------------------------------------------------


def apportion(weights: Sequence[int], held: Sequence[int], shards: int = SHARD_COUNT) -> list[int]:
    """How many shards each worker should own: the floor or the ceiling of its share by weight.

    Who gets a ceiling is chosen so that the fewest shards move: first those that hold more than their
    floor already, then by the largest remainder (Hamilton's method), then by position.
    All 0 when all weights are. O(n log n).
    """
    total = sum(weights)
    if not total:
        return [0] * len(weights)
    numbers = [shards * weight // total for weight in weights]
    rest = shards - sum(numbers)
    # Only a share that is no whole number may be rounded up.
    candidates = [at for at, weight in enumerate(weights) if shards * weight % total]
    candidates.sort(key=lambda at: (held[at] <= numbers[at], -(shards * weights[at] % total), at))
    for at in candidates[:rest]:
        numbers[at] += 1
    return numbers


def deal(owners: array[int], homes: array[int], weights: Sequence[int]) -> int:
    """Give every shard an owner by weight, in place; how many moved.

    ``owners`` and ``homes`` are positions in ``weights`` or NO_OWNER. A worker of weight 0 is away: it
    owns nothing afterwards and stays the home of its shards. Moves the least that any assignment
    by :func:`apportion` can; returning workers get their homes first. O(shards + n log n).
    """
    count = len(weights)
    held = [0] * count
    orphans = 0
    for at, owner in enumerate(owners):
        if owner != NO_OWNER and weights[owner]:
            held[owner] += 1
        else:
            owners[at] = NO_OWNER
            orphans += 1
    targets = apportion(weights, held, len(owners))
    lacking = [max(0, target - have) for target, have in zip(targets, held)]
    surplus = [max(0, have - target) for target, have in zip(targets, held)]
    moves = sum(lacking)

    # Home-comers first: an orphan, or a shard that its owner has to give up anyway, goes home.
    if moves:
        for at, home in enumerate(homes):
            if home == NO_OWNER or not lacking[home]:
                continue
            owner = owners[at]
            if owner == NO_OWNER:
                orphans -= 1
            elif surplus[owner]:
                surplus[owner] -= 1
            else:
                continue
            owners[at] = home
            lacking[home] -= 1
    # Then the rest of the surplus is freed: guests (whose home is elsewhere) before residents.
    for guests in (True, False):
        if not any(surplus):
            break
        for at, owner in enumerate(owners):
            if owner != NO_OWNER and surplus[owner] and (homes[at] != owner) == guests:
                surplus[owner] -= 1
                owners[at] = NO_OWNER
                orphans += 1
                if not guests:
                    homes[at] = NO_OWNER  # moved by plan: its next owner is its home
    if orphans and moves:
        takers = (taker for taker in range(count) for _ in range(lacking[taker]))
        for at, owner in enumerate(owners):
            if owner == NO_OWNER:
                owners[at] = next(takers)
    for at, home in enumerate(homes):
        if home == NO_OWNER:
            homes[at] = owners[at]
    return moves


# --- the state machine ------------------------------------------------------------------------


class Timing(NamedTuple):
    """Seconds between heartbeats, heartbeats missed until suspect and until dead, seconds of grace."""

    heartbeat_s: float = 1.0
    suspect_after: int = 3
    dead_after: int = 5
    grace_s: float = 0.0


class Node:
    """One logical node. ``heard`` and ``since`` are in observed seconds."""

    __slots__ = ("changed", "heard", "instance", "linked", "loads", "map_epoch", "name", "released", "state", "workers")

    def __init__(self, name: str, instance: int, workers: list[WorkerInfo], state: NodeState, now: float) -> None:
        self.name = name
        self.instance = instance
        self.workers = workers
        self.state = state
        self.heard = now
        self.changed = now
        #: Its connection has not been lost, as far as we know.
        self.linked = True
        #: Its shards have gone to others: the map does without it.
        self.released = False
        self.loads: list[WorkerLoad] = []
        self.map_epoch = 0

    def __repr__(self) -> str:
        return f"<Node {self.name} {self.state.value} instance={self.instance:#x} workers={len(self.workers)}>"


class Cluster:
    """Membership and shard map. See the module's docstring.

    ``now`` is any monotonic clock, in seconds; a step back counts as no step.
    """

    def __init__(self, cluster: int, now: float, timing: Timing = Timing()) -> None:  # noqa: B008 -- immutable
        if not 0 < timing.suspect_after < timing.dead_after or timing.heartbeat_s <= 0 or timing.grace_s < 0:
            raise UsageError(f"impossible timing {timing}")
        #: Names this cluster for ever, so that its epochs are not compared with another's.
        self.cluster = cluster
        self.timing = timing
        self.epoch = 1
        self.nodes: dict[str, Node] = {}
        #: Shards moved by all deals so far.
        self.moved = 0
        self._owners = array("H", [NO_OWNER]) * SHARD_COUNT
        self._homes = array("H", [NO_OWNER]) * SHARD_COUNT
        #: What positions in _owners and _homes mean: (node name, worker number).
        self._keys: list[tuple[str, int]] = []
        self._clock = now
        self._observed = 0.0
        self._reply: MapReply | None = None

    def __repr__(self) -> str:
        return f"<Cluster epoch={self.epoch} nodes={len(self.nodes)} workers={len(self.live_workers())}>"

    # -- events ----------------------------------------------------------------------------------

    def join(self, now: float, msg: Join) -> list[Action]:
        """A node offers its workers: for the first time, again, or after a restart."""
        self._advance(now)
        reason = _join_fault(msg)
        if reason:
            return [_refusal(Status.BAD_REQUEST, reason)]
        node = self.nodes.get(msg.name)
        others = sum(len(other.workers) for other in self.nodes.values() if other is not node and not other.released)
        if others + len(msg.workers) > WORKERS_MAX:
            return [_refusal(Status.NO_SPACE, f"a cluster has at most {WORKERS_MAX} workers")]
        workers = [info._replace(node=msg.name, instance=msg.instance) for info in msg.workers]
        before = node.state if node is not None else None
        if node is None:
            node = self.nodes[msg.name] = Node(msg.name, msg.instance, workers, NodeState.JOINING, self._observed)
            why, changed = "joined", True
        elif node.instance == msg.instance:
            why, changed = "joined again", node.workers != workers or node.released
        elif self._alive(node):
            quiet = self.timing.suspect_after * self.timing.heartbeat_s - (self._observed - node.heard)
            return [
                _refusal(
                    Status.NAME_TAKEN,
                    f"a data server named {msg.name!r} is running (at {node.workers[0].host}): give this one another "
                    f"--name, or stop that one; if it has just died, try again in {max(quiet, 0.1):.1f} s",
                )
            ]
        else:
            gone = node.state.value if node.linked or node.released else "gone: its connection has closed"
            why, changed = f"replaces an instance that is {gone}", True
        node.instance = msg.instance
        node.workers = workers
        node.loads = []
        node.heard = self._observed
        node.linked = True
        node.released = False
        actions: list[Action] = []
        if before is None:
            actions.append(NodeChanged(msg.name, None, NodeState.JOINING, why))
        elif changed or before in (NodeState.SUSPECT, NodeState.DEAD, NodeState.LEFT):
            self._turn(node, NodeState.JOINING, why, actions, always=True)
        if changed:
            self._remap(actions)
        return [Answer(Joined(self.epoch, max(1, round(self.timing.heartbeat_s * 1000)))), *actions]

    def heartbeat(
        self, now: float, name: str, instance: int, epoch: int = 0, loads: Sequence[WorkerLoad] = ()
    ) -> list[Action]:
        """A node lives and holds the map of ``epoch``."""
        self._advance(now)
        node = self._current(name, instance)
        if node is None:
            text = f"{name!r} is not in this cluster (any more) as this instance: join again"
            return [_refusal(Status.UNKNOWN_NODE, text)]
        node.heard = self._observed
        node.linked = True
        node.map_epoch = epoch
        node.loads = list(loads[: len(node.workers)])
        actions: list[Action] = []
        if node.state is not NodeState.UP:
            self._turn(node, NodeState.UP, "heartbeat", actions)
        if self.epoch < epoch <= EPOCH_MAX:
            # Our state is older than what we once told: servers must not see an epoch again with another map.
            self.epoch = epoch
            self._bump(actions)
        return [Answer(HeartbeatAck(self.epoch)), *actions]

    def leave(self, now: float, name: str, instance: int) -> list[Action]:
        """A clean goodbye: the shards go to others at once."""
        self._advance(now)
        node = self._current(name, instance)
        if node is None:
            return [_refusal(Status.UNKNOWN_NODE, f"{name!r} is not in this cluster as this instance")]
        actions: list[Action] = []
        self._turn(node, NodeState.LEFT, "said goodbye", actions)
        node.released = True
        self._remap(actions)
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
        release = False
        for node in list(self.nodes.values()):
            quiet = self._observed - node.heard
            if node.state in (NodeState.JOINING, NodeState.UP, NodeState.SUSPECT):
                if quiet >= timing.dead_after * timing.heartbeat_s:
                    self._turn(node, NodeState.DEAD, f"silent for {quiet:.1f} s", actions)
                elif quiet >= timing.suspect_after * timing.heartbeat_s and node.state is not NodeState.SUSPECT:
                    self._turn(node, NodeState.SUSPECT, f"silent for {quiet:.1f} s", actions)
            if node.state is NodeState.DEAD and not node.released:
                if quiet >= timing.dead_after * timing.heartbeat_s + timing.grace_s:
                    node.released = True
                    release = True
            elif node.released and self._observed - node.changed >= FORGET_S:
                self._forget(node)
        if release:
            self._remap(actions)
        return actions

    # -- questions ---------------------------------------------------------------------------------

    def live_workers(self) -> list[WorkerInfo]:
        """The workers of the map, in its order."""
        members = [self.nodes[name] for name in sorted(self.nodes)]
        return [info for node in members if not node.released for info in node.workers]

    def map_reply(self) -> MapReply:
        """The current map. O(1) until it changes."""
        if self._reply is None:
            workers = self.live_workers()
            position = {(info.node, info.worker): at for at, info in enumerate(workers)}
            table = [position.get(key, NO_OWNER) for key in self._keys]
            owners = array("H", [table[owner] if owner != NO_OWNER else NO_OWNER for owner in self._owners])
            self._reply = MapReply(self.epoch, self.cluster, workers, _little_endian(owners))
        return self._reply

    def owner(self, shard: int) -> tuple[str, int] | None:
        """(node name, worker number) that owns a shard, or None."""
        owner = self._owners[shard]
        return self._keys[owner] if owner != NO_OWNER else None

    def shards_held(self) -> dict[tuple[str, int], int]:
        """How many shards each worker owns."""
        counts = {(info.node, info.worker): 0 for info in self.live_workers()}
        for owner in self._owners:
            if owner != NO_OWNER:
                counts[self._keys[owner]] += 1
        return counts

    def status(self, now: float) -> dict[str, Any]:
        """The cluster for people and programs, JSON-able."""
        self._advance(now)
        held = self.shards_held()
        nodes = []
        for name in sorted(self.nodes):
            node = self.nodes[name]
            loads = node.loads + [WorkerLoad(0, 0, 0, 0)] * (len(node.workers) - len(node.loads))
            workers = [
                {
                    "worker": info.worker,
                    "numa_node": info.numa_node,
                    "address": f"{info.host}:{info.port}",
                    "capacity_bytes": info.capacity,
                    "shards": held.get((name, info.worker), 0),
                    **load._asdict(),
                }
                for info, load in zip(node.workers, loads)
            ]
            nodes.append(
                {
                    "name": name,
                    "state": node.state.value,
                    "instance": f"{node.instance:016x}",
                    "silent_s": round(self._observed - node.heard, 3),
                    "in_state_s": round(self._observed - node.changed, 3),
                    "map_epoch": node.map_epoch,
                    "workers": workers,
                }
            )
        unowned = sum(1 for owner in self._owners if owner == NO_OWNER)
        return {
            "cluster": f"{self.cluster:016x}",
            "epoch": self.epoch,
            "shards": SHARD_COUNT,
            "shards_without_owner": unowned,
            "shards_moved": self.moved,
            "nodes": nodes,
        }

    # -- storing -------------------------------------------------------------------------------------

    def to_state(self) -> dict[str, Any]:
        """What must survive a restart, JSON-able. Times are not in it: they mean nothing to the next process."""
        return {
            "format": STATE_FORMAT,
            "cluster": self.cluster,
            "epoch": self.epoch,
            "nodes": [
                {
                    "name": node.name,
                    "instance": node.instance,
                    "state": node.state.value,
                    "released": node.released,
                    "workers": [list(info) for info in node.workers],
                }
                for node in self.nodes.values()
            ],
            "keys": [list(key) for key in self._keys],
            "owners": base64.b64encode(_little_endian(self._owners)).decode(),
            "homes": base64.b64encode(_little_endian(self._homes)).decode(),
        }

    @classmethod
    def from_state(cls, state: Any, now: float, timing: Timing = Timing()) -> Cluster:  # noqa: B008 -- immutable
        """A cluster as :meth:`to_state` left it. Raises CorruptionError for anything that it could not have left.

        Nodes that were alive are JOINING: they are given the time of a fresh one to be heard.
        """
        if not isinstance(state, Mapping):
            raise CorruptionError("a cluster's state must be an object")
        if state.get("format") != STATE_FORMAT:
            raise CorruptionError(f"the state has format {state.get('format')!r}, this build reads {STATE_FORMAT}")
        try:
            made = cls(_whole(state["cluster"], 1 << 64), now, timing)
            made.epoch = _whole(state["epoch"], 1 << 63)
            for row in state["nodes"]:
                name, instance = row["name"], _whole(row["instance"], 1 << 64)
                workers = [WorkerInfo(*values) for values in row["workers"]]
                fault = _join_fault(Join(instance, 0, name, workers))
                if fault or name in made.nodes or any(info.node != name for info in workers):
                    raise ValueError(f"node {name!r}: {fault or 'twice, or with workers of another'}")
                before = NodeState(row["state"])
                alive = before not in (NodeState.DEAD, NodeState.LEFT)
                node = Node(name, instance, workers, NodeState.JOINING if alive else before, 0.0)
                node.released = row["released"] is True
                made.nodes[name] = node
                if before is NodeState.DEAD:
                    # Its grace starts anew: how much of it passed while we were down is unknown.
                    node.heard = -timing.dead_after * timing.heartbeat_s
            made._keys = [(str(name), _whole(number, 1 << 16)) for name, number in state["keys"]]
            made._owners = _shard_table(state["owners"])
            made._homes = _shard_table(state["homes"])
        except (KeyError, TypeError, ValueError, AttributeError, binascii.Error) as exc:
            raise CorruptionError(f"the cluster's state is malformed: {exc}") from exc
        made.check()
        return made

    # -- internals -----------------------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        """Observe: time moves by at most a heartbeat per event, see the module's docstring."""
        step = now - self._clock
        self._clock = now
        if step > 0:
            self._observed += min(step, self.timing.heartbeat_s)

    def _current(self, name: str, instance: int) -> Node | None:
        """The node, if this instance of it is a member."""
        node = self.nodes.get(name)
        if node is None or node.instance != instance or node.state in (NodeState.DEAD, NodeState.LEFT):
            return None
        return node

    def _alive(self, node: Node) -> bool:
        """Whether its name is taken."""
        if node.state in (NodeState.DEAD, NodeState.LEFT) or not node.linked:
            return False
        return self._observed - node.heard < self.timing.suspect_after * self.timing.heartbeat_s

    def _turn(self, node: Node, state: NodeState, why: str, actions: list[Action], *, always: bool = False) -> None:
        if node.state is state and not always:
            return
        actions.append(NodeChanged(node.name, node.state, state, why))
        node.state = state
        node.changed = self._observed

    def _bump(self, actions: list[Action]) -> None:
        self.epoch += 1
        self._reply = None
        actions[:] = [action for action in actions if not isinstance(action, MapChanged)]
        actions.append(MapChanged(self.epoch))

    def _remap(self, actions: list[Action]) -> None:
        """Deal the shards among the workers there are now, and give the map a new epoch."""
        weights = {(info.node, info.worker): info.capacity for info in self.live_workers()}
        known = set(self._keys)
        self._keys += [key for key in weights if key not in known]
        # A worker number that its node no longer has stays a home only while the node is away.
        self.moved += deal(self._owners, self._homes, [weights.get(key, 0) for key in self._keys])
        self._compact(weights)
        self._bump(actions)

    def _compact(self, weights: Mapping[tuple[str, int], int]) -> None:
        """Drop keys that mean nothing any more; homes of those become their owners."""
        away = {(node.name, info.worker) for node in self.nodes.values() if node.released for info in node.workers}
        keep = [key for key in self._keys if key in weights or key in away]
        if len(keep) == len(self._keys) <= KNOWN_MAX:
            return
        if len(keep) > KNOWN_MAX:
            gone = min((node for node in self.nodes.values() if node.released), key=lambda node: node.changed)
            self._forget(gone)
            self._compact(weights)
            return
        position = {key: at for at, key in enumerate(keep)}
        table = [position.get(key, NO_OWNER) for key in self._keys]
        for at, owner in enumerate(self._owners):
            home = self._homes[at]
            self._owners[at] = owner = table[owner] if owner != NO_OWNER else NO_OWNER
            home = table[home] if home != NO_OWNER else NO_OWNER
            self._homes[at] = home if home != NO_OWNER else owner
        self._keys = keep

    def _forget(self, node: Node) -> None:
        del self.nodes[node.name]
        self._compact({(info.node, info.worker): info.capacity for info in self.live_workers()})

    def check(self) -> None:
        """Raise CorruptionError unless every invariant holds. O(shards + workers)."""

        def must(fact: bool, text: str) -> None:
            if not fact:
                raise CorruptionError(f"cluster: {text}")

        must(1 <= self.epoch < 1 << 63, f"epoch {self.epoch}")
        must(len(self._owners) == len(self._homes) == SHARD_COUNT, "a shard table of the wrong size")
        must(len(set(self._keys)) == len(self._keys), "a worker with two positions")
        live: dict[tuple[str, int], int] = {}
        away: set[tuple[str, int]] = set()
        for name, node in self.nodes.items():
            must(name == node.name and bool(node.workers), f"node {name!r} is not itself")
            must(node.released <= (node.state in (NodeState.DEAD, NodeState.LEFT)), f"{node!r} lives without shards")
            must(node.released or node.state is not NodeState.LEFT, f"{node!r} left with its shards")
            for info in node.workers:
                must(info.node == name and info.instance == node.instance, f"{node!r} has another's worker")
                if node.released:
                    away.add((name, info.worker))
                else:
                    live[name, info.worker] = info.capacity
        must(len(live) <= WORKERS_MAX, f"{len(live)} workers")
        must(set(live) <= set(self._keys) <= set(live) | away, "positions do not match the members")
        counts = dict.fromkeys(live, 0)
        for shard, owner in enumerate(self._owners):
            home = self._homes[shard]
            must(home == NO_OWNER or home < len(self._keys), f"shard {shard} has home {home}")
            if owner == NO_OWNER:
                must(not live, f"shard {shard} has no owner")
                continue
            must(owner < len(self._keys) and self._keys[owner] in live, f"shard {shard} has owner {owner}")
            must(home != NO_OWNER, f"shard {shard} of {owner} has no home")
            counts[self._keys[owner]] += 1
        total = sum(live.values())
        for key, weight in live.items():
            low = SHARD_COUNT * weight // total
            high = -(-SHARD_COUNT * weight // total)
            must(low <= counts[key] <= high, f"{key} owns {counts[key]} shards instead of {low} to {high}")


def _refusal(status: Status, text: str) -> Answer:
    return Answer(Error(text), status)


def _join_fault(msg: Join) -> str:
    """What is wrong with a JOIN; empty when nothing is."""
    if not isinstance(msg.name, str) or not 1 <= len(msg.name.encode()) <= NAME_BYTES_MAX:
        return f"a node's name has 1 to {NAME_BYTES_MAX} bytes"
    if not 1 <= len(msg.workers) <= NODE_WORKERS_MAX:
        return f"a node has 1 to {NODE_WORKERS_MAX} workers, not {len(msg.workers)}"
    if len({info.worker for info in msg.workers}) != len(msg.workers):
        return "two workers with one number"
    for info in msg.workers:
        numbers = (info.worker, info.numa_node, info.incarnation, info.instance, info.capacity, info.port)
        limits = (1 << 16, 1 << 16, 1 << 32, 1 << 64, 1 << 64, 1 << 16)
        if not all(isinstance(n, int) and 0 <= n < limit for n, limit in zip(numbers, limits)):
            return f"worker {info.worker} has a number out of range"
        if not info.capacity:
            return f"worker {info.worker} has no capacity"
        if len(info.uds.encode()) > UDS_BYTES_MAX or len(info.host.encode()) > HOST_BYTES_MAX:
            return f"worker {info.worker} has too long an address"
    return ""


def _whole(value: Any, limit: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < limit:
        raise ValueError(f"{value!r} is no number from 0 to {limit - 1}")
    return value


def _little_endian(table: array[int]) -> bytes:
    if _BIG_ENDIAN:
        table = array("H", table)
        table.byteswap()
    return table.tobytes()


def _shard_table(text: Any) -> array[int]:
    raw = base64.b64decode(text, validate=True)
    if len(raw) != 2 * SHARD_COUNT:
        raise ValueError(f"a shard table of {len(raw)} bytes instead of {2 * SHARD_COUNT}")
    table = array("H")
    table.frombytes(raw)
    if _BIG_ENDIAN:
        table.byteswap()
    return table


_BIG_ENDIAN: Final = array("H", [1]).tobytes() != b"\x01\x00"
assert array("H").itemsize == 2

"""Vocabulary of the cluster's state machine: its limits, a node and its states, what comes of an event. No I/O."""

from __future__ import annotations

from enum import Enum
from typing import Any, Final, NamedTuple

from .constants import FRAME_BYTES_MAX, NO_OWNER, SHARD_COUNT
from .errors import UsageError
from .messages import Error, Join, Status, WorkerInfo, WorkerLoad

#: Limits that let every map fit one frame: workers of the longest text allowed, the owners, all shards moving, and
#: epochs that zlib cannot press.
WORKERS_MAX: Final = 1_500
NODE_WORKERS_MAX: Final = 64
NAME_BYTES_MAX: Final = 128
UDS_BYTES_MAX: Final = 108
HOST_BYTES_MAX: Final = 255
_WORKER_BYTES_MAX: Final = 32 + 6 + NAME_BYTES_MAX + UDS_BYTES_MAX + HOST_BYTES_MAX
_SHARD_BYTES_MAX: Final = 2 + 4 + 8
assert WORKERS_MAX * _WORKER_BYTES_MAX + _SHARD_BYTES_MAX * SHARD_COUNT + 512 <= FRAME_BYTES_MAX
assert WORKERS_MAX < NO_OWNER and WORKERS_MAX < SHARD_COUNT


class NodeState(str, Enum):
    """See cluster.py."""

    JOINING = "joining"
    RUNNING = "running"
    SUSPECT = "suspect"
    DEAD = "dead"
    DRAINING = "draining"
    LEFT = "left"


#: States in which a node answers for its shards.
SERVING: Final = frozenset({NodeState.JOINING, NodeState.RUNNING, NodeState.SUSPECT, NodeState.DRAINING})


class Timing(NamedTuple):
    """The cluster's settings; times in seconds, and others in heartbeats."""

    heartbeat_s: float = 1.0
    #: Heartbeats missed.
    suspect_after: int = 3
    dead_after: int = 5
    #: How long a dead node's shards wait for it.
    grace_s: float = 0.0
    #: How long the shards of one that said it would be back wait for it.
    restart_grace_s: float = 30.0
    #: Shards that move into one worker at a time.
    moves_at_once: int = 2048
    #: Heartbeats for which a manager that has lost its state listens before it deals shards.
    rebuild_beats: float = 2.0
    #: Least time that nodes known from a stored state or a map have to be heard: their servers have lost a manager, and
    #: may ask others first.
    return_s: float = 0.0

    def check(self) -> None:
        """Raise UsageError if it cannot be."""
        times = (self.grace_s, self.restart_grace_s, self.rebuild_beats, self.return_s)
        beats = 0 < self.suspect_after < self.dead_after and self.heartbeat_s > 0
        if not beats or min(times) < 0 or self.moves_at_once < 1:
            raise UsageError(f"impossible timing {self}")


class Node:
    """One logical node. ``heard`` and ``changed`` are in observed seconds."""

    __slots__ = (
        "asked", "changed", "draining", "heard", "instance", "linked", "loads", "map_epoch", "name", "present",
        "released", "state", "workers",
    )  # fmt: skip

    def __init__(self, name: str, instance: int, workers: list[WorkerInfo], state: NodeState, now: float) -> None:
        self.name = name
        self.instance = instance
        self.workers = workers
        self.state = state
        self.heard = now
        self.changed = now
        #: Its connection has not been lost, as far as we know.
        self.linked = True
        #: It has spoken to us, and is not only known from a state file or somebody's map.
        self.present = False
        #: It was asked for a map that is newer than what we know.
        self.asked = False
        #: Somebody wants it empty. Stays until somebody wants it back.
        self.draining = False
        #: Its shards have gone to others: the map does without it.
        self.released = False
        self.loads: list[WorkerLoad] = []
        #: Of the newest map that all its workers are known to hold; nothing that it has is older than that allows.
        self.map_epoch = 0

    def __repr__(self) -> str:
        return f"<Node {self.name} {self.state.value} instance={self.instance:#x} workers={len(self.workers)}>"

    @property
    def serving(self) -> bool:
        """It answers for its shards, as far as we know."""
        return self.state in SERVING

    @property
    def ready(self) -> bool:
        """It is heard from, so shards may be moved from it and to it."""
        return self.state in (NodeState.RUNNING, NodeState.DRAINING) or (
            self.state is NodeState.JOINING and self.present
        )


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


def refusal(status: Status, text: str) -> Answer:
    """An answer that says no, and why."""
    return Answer(Error(text), status)


def join_fault(msg: Join) -> str:
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

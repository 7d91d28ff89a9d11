"""Define the vocabulary of the state machine: limits, a node and its states, the actions after an event. No I/O."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import Enum
from typing import Any, Final, NamedTuple

from ..constants import FRAME_BYTES_MAX, NO_OWNER, SHARD_COUNT
from ..errors import UsageError
from ..wire.messages import TEXT_MAX, Error, Join, Status, WorkerInfo, WorkerLoad

#: Limits that let every map fit one frame: workers of the longest text allowed, the owners, all shards moving, and
#: epochs that zlib cannot compress.
WORKERS_MAX: Final = 1_500
NODE_WORKERS_MAX: Final = 64
NAME_BYTES_MAX: Final = 128
UDS_BYTES_MAX: Final = 108
HOST_BYTES_MAX: Final = 255
_COMPARED_MAX: Final = 256
_WORKER_BYTES_MAX: Final = 32 + 6 + NAME_BYTES_MAX + UDS_BYTES_MAX + HOST_BYTES_MAX
_SHARD_BYTES_MAX: Final = 2 + 4 + 8
assert WORKERS_MAX * _WORKER_BYTES_MAX + _SHARD_BYTES_MAX * SHARD_COUNT + 512 <= FRAME_BYTES_MAX
assert WORKERS_MAX < NO_OWNER and WORKERS_MAX < SHARD_COUNT


#: A living server's heartbeats are not so far apart, in heartbeats.
QUIET_BEATS: Final = 1.5

#: A worker: its node's name and its number there.
Key = tuple[str, int]


class NodeState(str, Enum):
    """The states of a node; ``cluster/machine.py`` draws the transitions."""

    JOINING = "joining"
    RUNNING = "running"
    SUSPECT = "suspect"
    DEAD = "dead"
    DRAINING = "draining"
    LEFT = "left"


#: States in which a node answers for its shards.
SERVING: Final = frozenset({NodeState.JOINING, NodeState.RUNNING, NodeState.SUSPECT, NodeState.DRAINING})
#: The others, as a status says them: such a node holds nothing, and the manager remembers it for a day.
GONE: Final = (NodeState.DEAD.value, NodeState.LEFT.value)


class Timing(NamedTuple):
    """The cluster's settings; times in seconds, and others in heartbeats."""

    heartbeat_s: float = 1.0
    #: Heartbeats missed.
    suspect_after: int = 3
    dead_after: int = 5
    #: How long a dead node's shards wait for it although other workers could take them.
    grace_s: float = 0.0
    #: How long they wait for a node that announced its return.
    restart_grace_s: float = 30.0
    #: Shards that move into one worker at a time.
    moves_at_once: int = 2048
    #: Heartbeats for which a manager without its state listens before it assigns shards.
    rebuild_beats: float = 2.0
    #: Least time for nodes known from a stored state or a map to send a heartbeat: their servers have lost a manager
    #: and may try other addresses first.
    return_s: float = 0.0

    def check(self) -> None:
        """Raise UsageError for impossible settings."""
        times = (self.grace_s, self.restart_grace_s, self.rebuild_beats, self.return_s)
        beats = 0 < self.suspect_after < self.dead_after and self.heartbeat_s > 0
        if not beats or min(times) < 0 or self.moves_at_once < 1:
            raise UsageError(f"impossible timing {self}")


class Node:
    """One logical node. ``last_seen`` and ``changed`` are observed seconds."""

    __slots__ = (
        "acked_epoch", "asked", "changed", "cold", "draining", "follows", "instance", "last_seen", "linked", "loads",
        "name", "overdue", "present", "released", "spared", "state", "told_epoch", "workers",
    )  # fmt: skip

    def __init__(self, name: str, instance: int, workers: list[WorkerInfo], state: NodeState, now: float) -> None:
        self.name = name
        self.instance = instance
        self.workers = workers
        self.state = state
        self.last_seen = now
        self.changed = now
        #: Its connection is open, as far as the manager knows.
        self.linked = True
        #: This manager has had a message from it, and does not only know it from a state file or a map.
        self.present = False
        #: It was asked for a map that is newer than the manager's.
        self.asked = False
        #: An operator wants it empty. Stays set until it is resumed.
        self.draining = False
        #: Its shards go to other workers as soon as one can take them. See cluster/absence.py.
        self.overdue = False
        #: Its time in this absence was extended because another node came back.
        self.spared = False
        #: It is not in the map: it owns nothing and is no shard's previous owner.
        self.released = False
        #: Its goodbye, if it has said one, was cold: nobody finds a value in its arenas any more.
        self.cold = False
        self.loads: list[WorkerLoad] = []
        #: Epoch of the newest map that all its workers hold, as far as they have acknowledged one.
        self.acked_epoch = 0
        #: The same, of maps of this manager: 0 before the first heartbeat.
        self.told_epoch = 0
        #: Whether this instance asks for EPOCHS with its maps; None if it has asked for no map yet.
        self.follows: bool | None = None

    @property
    def left(self) -> bool:
        """Whether it has said goodbye, and nobody finds a value in its arenas.

        A dead node may still serve clients that reach it, and clients on its host read in arenas that wait for a warm
        start, also if they wait in vain.
        """
        return self.released and self.cold and self.state is NodeState.LEFT

    def __repr__(self) -> str:
        return f"<Node {self.name} {self.state.value} instance={self.instance:#x} workers={len(self.workers)}>"

    @property
    def serving(self) -> bool:
        """It answers for its shards, as far as the manager knows."""
        return self.state in SERVING

    @property
    def ready(self) -> bool:
        """Its heartbeats come, so shards may move from it and to it."""
        return self.state in (NodeState.RUNNING, NodeState.DRAINING) or (
            self.state is NodeState.JOINING and self.present
        )


# --- actions ----------------------------------------------------------------------------------


class Answer(NamedTuple):
    """Answer the request. Always its first action."""

    message: Any
    status: int = Status.OK


class MapChanged(NamedTuple):
    """The map has changed: store the state, then push the map to all subscribers."""

    epoch: int


class NodeChanged(NamedTuple):
    """A node changed its state: log it and store the state. ``before`` is None for a new node."""

    name: str
    before: NodeState | None
    after: NodeState
    why: str


Action = Answer | MapChanged | NodeChanged


def refusal(status: int, text: str) -> Answer:
    """Return an answer with an error. Its text fits a message, whatever a peer's request put into it."""
    return Answer(Error(text[:TEXT_MAX]), status)


def name_taken(node: Node, quiet: float, timing: Timing) -> Answer:
    """Refuse another instance of a node that is silent for ``quiet`` seconds: NAME_TAKEN, or BUSY if it may be dead."""
    left = max(timing.suspect_after * timing.heartbeat_s - quiet, 0.1)
    where = f"a data server named {node.name!r} (at {node.workers[0].host})"
    if not node.present:
        return refusal(Status.BUSY, f"{where} may be running: this manager waits for it {left:.1f} s longer")
    if quiet >= QUIET_BEATS * timing.heartbeat_s:
        return refusal(Status.BUSY, f"{where} is silent: if it is dead, its name is free in {left:.1f} s")
    remedy = f"give this one another --name, or stop that one; if it has just died, try again in {left:.1f} s"
    return refusal(Status.NAME_TAKEN, f"{where} is running: {remedy}")


def is_word(text: str) -> bool:
    """Return True if a terminal, a page or a log line can show ``text`` as one word."""
    return text.isprintable() and " " not in text


def join_fault(msg: Join) -> str:
    """Return what is wrong with a JOIN; empty if nothing is."""
    if not isinstance(msg.name, str) or not 1 <= len(msg.name.encode()) <= NAME_BYTES_MAX:
        return f"a node's name has 1 to {NAME_BYTES_MAX} bytes"
    if not is_word(msg.name) or "/" in msg.name:
        return "a node's name has printable characters, and no spaces and slashes"
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
            return f"worker {info.worker} has an address that is too long"
        if not _is_host(info.host) or not info.uds.isprintable():
            return f"worker {info.worker} has an address with characters that no address has"
    return ""


def _is_host(host: str) -> bool:
    """Return whether a resolver can be asked for this name, or it is an address."""
    try:
        return is_word(host) and bool(host.isascii() or host.encode("idna"))
    except UnicodeError:
        return False


def unknown_name(name: str, known: Iterable[str]) -> Answer:
    """Return the refusal of a request about a server that is none of the ``known`` ones."""
    if len(name) > NAME_BYTES_MAX:
        return refusal(Status.BAD_REQUEST, f"a data server's name has 1 to {NAME_BYTES_MAX} bytes")
    names = list(known)
    # A comparison takes 60 us, and anybody may ask: names of about the same length, and so many of them at most.
    alike = [each for each in names if abs(len(each) - len(name)) <= 2] or names
    near = difflib.get_close_matches(name, alike[:_COMPARED_MAX], n=1, cutoff=0.0)
    hint = f"the nearest name is {near[0]!r}" if near else "none has joined"
    return refusal(Status.UNKNOWN_NODE, f"there is no data server named {name!r}; {hint}")


def last_server(name: str) -> Answer:
    """Return the refusal of a drain of the only server that could hold its shards."""
    text = (
        f"{name!r} is the only data server that could hold its shards: start another one (`simm dataserver`), "
        "or take one back with `simm node resume`, and try again; to drop its values, just stop it"
    )
    return refusal(Status.UNAVAILABLE, text)


def node_fault(name: str, node: Node) -> str:
    """Return which invariant a node breaks, empty for none."""
    if name != node.name or not node.workers:
        return f"node {name!r} is not itself"
    if (node.released or node.overdue) and node.serving:
        return f"{node!r} lives without shards"
    if node.state is NodeState.DRAINING and not node.draining:
        return f"{node!r} drains without being told to"
    if any(info.node != name or info.instance != node.instance for info in node.workers):
        return f"{node!r} has a worker of another node"
    return ""

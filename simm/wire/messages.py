"""The messages between clients, workers, streams and managers: field names, formats, opcodes, statuses.

docs/protocol.md specifies what each message and field means, who may send it, and what answers it. The docstrings here
name a message; they do not restate that. A test holds its tables against this module and ``wire/rdma_messages.py``.
Opcodes and statuses are never reused or renumbered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from ..constants import BATCH_KEYS_MAX, SHARD_COUNT
from ..rpc import OPCODES, message, structure
from .status import STATUS_NAMES as STATUS_NAMES
from .status import PathBit as PathBit
from .status import Role as Role
from .status import Service as Service
from .status import ShardRole as ShardRole
from .status import Status as Status
from .status import status_name as status_name

#: Oldest and newest protocol version of this build. HELLO offers the range.
PROTOCOL_MIN: Final = 2
PROTOCOL_MAX: Final = 2
#: Grants in one answer: what was asked for, and what earlier requests had asked for.
GRANTS_MAX: Final = 2 * BATCH_KEYS_MAX


# --- sessions ---------------------------------------------------------------------------------


@message(0x01, "H H H H I s s *Q Q")
class Hello(NamedTuple):
    """First message of a connection but for AUTH. ``flags``, ``token`` and ``old_sessions`` are unused."""

    proto_min: int
    proto_max: int
    role: int
    flags: int
    pid: int
    namespace: str
    token: str
    old_sessions: list[int]
    cluster: int = 0


@message(0x02, "H H H H Q Q Q s Q")
class Welcome(NamedTuple):
    """Answer to HELLO. ``segment`` is empty without a shm path, ``rdma_port`` or the server's ``instance`` 0: none."""

    proto: int
    namespace_id: int
    paths: int
    rdma_port: int
    session: int
    incarnation: int
    grant_bytes_max: int
    segment: str
    instance: int = 0


@message(0x03, "s")
class Error(NamedTuple):
    """Why a request failed, as text for people. The header's status is for programs."""

    text: str


@message(0x04, "Q")
class Ping(NamedTuple):
    """Ask for a PONG. Any role may send it at any time."""

    cookie: int


@message(0x05, "Q")
class Pong(NamedTuple):
    """Answer PING with its cookie."""

    cookie: int


@message(0x06, "I")
class Done(NamedTuple):
    """Answer a request that has no other answer: ``items`` of its items were processed."""

    items: int


@message(0x07, "H H 16s 16s s")
class Auth(NamedTuple):
    """The sender has a token, and will say HELLO as ``role`` to this ``service`` of ``server`` (wire/auth.py).

    ``token`` is the token's id, not the token. Answer: CHALLENGE.
    """

    role: int
    service: int
    nonce: bytes
    token: bytes
    server: str = ""


@message(0x08, "H 16s b")
class Challenge(NamedTuple):
    """``proof``: by the token that AUTH names, 32 bytes; empty from a server that has no tokens."""

    service: int
    nonce: bytes
    proof: bytes


@message(0x09, "b")
class Prove(NamedTuple):
    """The sender's proof. Answer: DONE; with UNAUTHORIZED the connection closes."""

    proof: bytes


# --- worker: mutations ------------------------------------------------------------------------


@message(0x10, "*16sQIIHI *II")
class Commit(NamedTuple):
    """Publish values that lie in granted chunks, and order grants for the next ones.

    ``entries``: (digest, grant id, length, crc32, entry flags, options, see :data:`ABSENT`). ``wants``: (value bytes,
    count).
    """

    entries: list[tuple[bytes, int, int, int, int, int]]
    wants: list[tuple[int, int]]


@message(0x11, "*B *QQI", grants=GRANTS_MAX)
class Committed(NamedTuple):
    """A status per entry, and fresh grants: (grant id, offset in the segment, chunk bytes)."""

    statuses: list[int]
    grants: list[tuple[int, int, int]]


@message(0x12, "*II")
class Grant(NamedTuple):
    """Ask for chunks: (value bytes, count)."""

    wants: list[tuple[int, int]]


@message(0x13, "*QQI", grants=GRANTS_MAX)
class Granted(NamedTuple):
    """Grants as in COMMITTED, in the order requested; fewer if room or the session's cap ran out."""

    grants: list[tuple[int, int, int]]


@message(0x14, "*Q")
class ReturnGrants(NamedTuple):
    """Return grants. No copy or WRITE into them may be in flight."""

    grants: list[int]


@message(0x15, "Q")
class Recall(NamedTuple):
    """Push: please return idle grants of about this many bytes."""

    bytes: int


@message(0x16, "*16s")
class Delete(NamedTuple):
    """Delete entries."""

    digests: list[bytes]


@message(0x17, "*B")
class Statuses(NamedTuple):
    """A status per item of the request."""

    statuses: list[int]


@message(0x18, "B *16s")
class Locate(NamedTuple):
    """Ask where values lie. ``pin``: bits :data:`LOCATE_PIN`, :data:`LOCATE_PREVIOUS`, :data:`LOCATE_HIDDEN`."""

    pin: int
    digests: list[bytes]


@message(0x19, "*BHIIQQ")
class Located(NamedTuple):
    """(status, entry flags, length, crc32, offset in the segment or with PREVIOUS an epoch, pin id or 0)."""

    entries: list[tuple[int, int, int, int, int, int]]


@message(0x1A, "*Q")
class Unpin(NamedTuple):
    """Release pins."""

    pins: list[int]


@message(0x1C, "*Q")
class ReleaseSessions(NamedTuple):
    """Sessions of this process that ended with a dead worker or connection; no copy uses them any more."""

    sessions: list[int]


@message(0x1e, "*16sI")
class DeleteSized(NamedTuple):
    """Delete entries whose values have this many bytes, and no others."""

    entries: list[tuple[bytes, int]]


@message(0x1f, "Q")
class DataAttach(NamedTuple):
    """Pass me the arena's data by the UNIX socket that travels with this frame (SCM_RIGHTS). ``bytes``: reserved, 0."""

    bytes: int


@message(0x20, "I")
class RingAttach(NamedTuple):
    """Commit through the sealed memfd that travels with this frame (SCM_RIGHTS)."""

    bytes: int


@message(0x22, "Q")
class Kick(NamedTuple):
    """Poll my ring now. Answer: DONE once it is drained."""

    tail: int


@message(0x23, "Q")
class Wake(NamedTuple):
    """A commit follows soon: poll my ring. One way, no answer. ``cpu`` is the sender's."""

    cpu: int


@message(0x24, "Q b b Q")
class Shards(NamedTuple):
    """Supervisor to worker: what the map of ``epoch`` says of each shard.

    ``since``: a u64 per shard, 0 if the worker has no role. ``roles``: a :class:`ShardRole` each. Both empty: fence.
    """

    epoch: int
    since: bytes
    roles: bytes
    cluster: int = 0


@message(0x28, "Q b")
class Freeze(NamedTuple):
    """A new owner's mover to the previous owner: take no more mutations in this bitmap of shards."""

    epoch: int
    shards: bytes


@message(0x29, "b")
class Frozen(NamedTuple):
    """The shards among them that are frozen here and may have values. The others are not here at all."""

    shards: bytes


@message(0x2A, "Q b b")
class Adopt(NamedTuple):
    """Mover to its own worker: take these shards over now. The previous owner has values of those in ``fallback``."""

    epoch: int
    shards: bytes
    fallback: bytes


@message(0x2B, "Q b")
class Finish(NamedTuple):
    """Mover to its own worker: all values of these shards have been copied from the previous owner."""

    epoch: int
    shards: bytes


@message(0x2D, "I Q Q Q Q")
class MoveProgress(NamedTuple):
    """Push, mover to its supervisor: shards left, bytes copied, recent bytes per second, values copied and lost."""

    left: int
    bytes: int
    rate: int
    values: int
    lost: int


@message(0x2E, "s")
class Namespace(NamedTuple):
    """Ask for the id of a namespace in this arena, a new one for a new name. Answer: DONE with the id."""

    name: str


@message(0x26, "B")
class Stats(NamedTuple):
    """Ask a worker or stream for its counters. Answer: STATS_REPLY."""

    detail: int


@message(0x27, "b")
class StatsReply(NamedTuple):
    """A JSON object of counters and gauges."""

    json: bytes


# --- stream: bulk over TCP -------------------------------------------------------------------


@message(0x40, "*16sI")
class Fetch(NamedTuple):
    """Ask for values: (digest, largest value that fits the caller's buffer)."""

    keys: list[tuple[bytes, int]]


@message(0x41, "*BHII")
class Fetched(NamedTuple):
    """(status, entry flags, length, crc32) per key; then the hits' bytes in order, bare, and a VERDICT frame."""

    entries: list[tuple[int, int, int, int]]


@message(0x42, "*16sI")
class FetchPrevious(NamedTuple):
    """Send :class:`Fetch` to a previous owner: values of frozen shards count too. Same answer."""

    keys: list[tuple[bytes, int]]


@message(0x43, "*B")
class Verdict(NamedTuple):
    """After the bytes of a FETCHED: which values were whole (OK) and which changed in transit (TORN)."""

    statuses: list[int]


@message(0x44, "*16sIIHH")
class Store(NamedTuple):
    """(digest, length, crc32, entry flags, 0) per key; then the values' bytes in order, bare. Answer: STATUSES."""

    entries: list[tuple[bytes, int, int, int, int]]


@message(0x46, "*16s")
class Exists(NamedTuple):
    """Ask which values are stored. Answer: STATUSES (OK, NOT_FOUND, PREVIOUS or WRONG_OWNER)."""

    digests: list[bytes]


@message(0x4A, "B *16sH *II")
class FetchRanges(NamedTuple):
    """Ask for ranges of values: (digest, how many ranges), and these one after the other: (offset, bytes).

    ``previous`` 1: as FETCH_PREVIOUS. Answer: as to :class:`Fetch`, but only the ranges' bytes (``wire/ranges.py``).
    """

    previous: int
    keys: list[tuple[bytes, int]]
    ranges: list[tuple[int, int]]


@message(0x4B, "B *16s")
class Pin(NamedTuple):
    """Ask a stream to pin values for this connection, until UNPIN. ``previous`` 1: as FETCH_PREVIOUS."""

    previous: int
    digests: list[bytes]


@message(0x4C, "Q *BHIIQQI")
class Pinned(NamedTuple):
    """The arena; (status, entry flags, length, crc32, handle or with PREVIOUS an epoch, seq, slot) per key."""

    generation: int
    entries: list[tuple[int, int, int, int, int, int, int]]


@message(0x4D, "*QH *II")
class FetchPinned(NamedTuple):
    """Ask for ranges of pinned values: (handle, how many ranges), then as :class:`FetchRanges`. Same answer."""

    keys: list[tuple[int, int]]
    ranges: list[tuple[int, int]]


@structure("H s")
class NamespaceName(NamedTuple):
    """The name of a namespace id in one arena."""

    number: int
    name: str


@message(0x48, "b I I")
class List(NamedTuple):
    """Ask for at most ``most`` values of these frozen shards (one bit each) in slots from ``cursor`` on."""

    shards: bytes
    cursor: int
    most: int


@message(0x49, "I *16sIHH [NamespaceName]")
class Listed(NamedTuple):
    """(digest, length, entry flags, namespace id) each. ``cursor`` is where to continue, 0 at the end."""

    cursor: int
    entries: list[tuple[bytes, int, int, int]]
    namespaces: list[NamespaceName]


# --- manager -----------------------------------------------------------------------------------


@structure("H H I Q Q s s s H")
class WorkerInfo(NamedTuple):
    """One worker in the shard map. ``uds`` and ``segment`` are valid on its own host only."""

    worker: int
    numa_node: int
    incarnation: int
    instance: int
    capacity: int
    node: str
    uds: str
    host: str
    port: int

    @property
    def server(self) -> str:
        """What names this worker in AUTH: the run of the data server, and its number."""
        return f"{self.node}/{self.worker}/{self.instance:016x}"


@structure("Q Q Q Q I Q Q")
class WorkerLoad(NamedTuple):
    """One worker's load. The last three: shards still moving in, bytes copied of them, recent bytes per second."""

    used_bytes: int
    entries: int
    puts: int
    evictions: int
    moves_left: int = 0
    moved_bytes: int = 0
    move_rate: int = 0


@message(0x60, "Q B s [WorkerInfo] Q Q b")
class Join(NamedTuple):
    """A data server offers its workers. ``warm`` 1: its arenas hold values.

    ``epoch``: of its newest map. ``cluster``: of its arenas' values. Both are 0 for none. ``secret``: what ``instance``
    was made of (wire/identity.py); empty once it has been checked.
    """

    instance: int
    warm: int
    name: str
    workers: list[WorkerInfo]
    epoch: int = 0
    cluster: int = 0
    secret: bytes = b""


@message(0x61, "Q I B")
class Joined(NamedTuple):
    """Accepted; send a HEARTBEAT every ``heartbeat_ms``, and with ``wants_map`` 1 a MAP_OFFER."""

    epoch: int
    heartbeat_ms: int
    wants_map: int = 0


@message(0x62, "Q Q s [WorkerLoad]")
class Heartbeat(NamedTuple):
    """All workers of this live server have taken over the map of ``epoch``. Answer: HEARTBEAT_ACK."""

    instance: int
    epoch: int
    name: str
    loads: list[WorkerLoad]


@message(0x63, "Q")
class HeartbeatAck(NamedTuple):
    """The current epoch; a server with an older map asks for the new one."""

    epoch: int


@message(0x64, "Q s B")
class Leave(NamedTuple):
    """Leave cleanly. With ``warm`` 1 keep the shards for the grace period of a restart. Answer: DONE."""

    instance: int
    name: str
    warm: int = 0


@message(0x65, "Q Q s H b")
class Moved(NamedTuple):
    """By the map of ``epoch``: the worker has all values of these shards (one bit each). Answer: DONE."""

    instance: int
    epoch: int
    name: str
    worker: int
    shards: bytes


@message(0x66, "Q B")
class MapGet(NamedTuple):
    """Ask for the shard map; with ``subscribe`` 1 also for a push of every later change."""

    known_epoch: int
    subscribe: int


@message(0x67, "Q Q [WorkerInfo] b *HH b", previous=SHARD_COUNT)
class MapReply(NamedTuple):
    """The map. ``owners``: SHARD_COUNT u16 positions in ``workers`` (0xFFFF: none).

    ``previous``: (shard, position) of the moving shards. ``since``: SHARD_COUNT u64, compressed by zlib.
    """

    epoch: int
    cluster: int
    workers: list[WorkerInfo]
    owners: bytes
    previous: Sequence[tuple[int, int]] = ()
    since: bytes = b""


@message(0x68, "Q Q [WorkerInfo] b *HH b", previous=SHARD_COUNT)
class MapOffer(NamedTuple):
    """A data server's newest map, for a manager that asked for it. Fields as in MAP_REPLY. Answer: DONE."""

    epoch: int
    cluster: int
    workers: list[WorkerInfo]
    owners: bytes
    previous: Sequence[tuple[int, int]]
    since: bytes


@message(0x6A, "B")
class ClusterStatus(NamedTuple):
    """Ask for the state of the cluster, for people. Answer: STATS_REPLY."""

    detail: int


@message(0x6C, "B s")
class Drain(NamedTuple):
    """Move all shards away from a data server (1), or give it its share again (0). Answer: DONE with its shards."""

    drain: int
    name: str


#: COMMIT's option bits: refuse the value if the key is there, or may be; refuse it if another namespace's value is
#: there, and note in the entry that a client stored it which is bound to its namespace.
ABSENT: Final = 1
BOUND: Final = 2
#: From this bit on: the id of the value's namespace, plus 1; 0 for the session's.
NAMESPACE_SHIFT: Final = 4
#: An ERROR's text has so many characters at most: what a peer sent may be part of it.
TEXT_MAX: Final = 2000
#: LOCATE's bits.
LOCATE_PIN: Final = 1
LOCATE_PREVIOUS: Final = 2
LOCATE_HIDDEN: Final = 4

#: Opcodes that hot loops compare with.
OP_COMMIT: Final = OPCODES[Commit]
OP_KICK: Final = OPCODES[Kick]
OP_WAKE: Final = OPCODES[Wake]
OP_ERROR: Final = OPCODES[Error]

"""Every message on SiMM's wire: field names, formats, opcodes, statuses.

``docs/protocol.md`` says what each means and who may send it when; a test holds its table
against this module. Opcodes and statuses are never reused or renumbered.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Final, NamedTuple

from .codec import OPCODES, message, structure

#: Oldest and newest protocol this build speaks; HELLO offers the range.
PROTOCOL_MIN: Final = 1
PROTOCOL_MAX: Final = 1


class Status(IntEnum):
    """Outcome of a request, in the header; and of one key, in bodies. Never renumber."""

    OK = 0
    NOT_FOUND = 1
    NO_SPACE = 2
    WRONG_OWNER = 3
    BAD_REQUEST = 4
    UNAUTHORIZED = 5
    VERSION = 6
    BUSY = 7
    STALE_GRANT = 8
    TOO_LARGE = 9
    INTERNAL = 10
    NAME_TAKEN = 11
    TORN = 12
    CLOSED = 13
    UNKNOWN_NODE = 14
    UNAVAILABLE = 15
    PREVIOUS = 16
    PRESENT = 17
    NOT_LEADER = 18


# --- sessions ---------------------------------------------------------------------------------


class Role(IntEnum):
    """Who a HELLO comes from."""

    CLIENT = 0
    STREAM = 1
    SUPERVISOR = 2
    ADMIN = 3
    MOVER = 4


class ShardRole(IntEnum):
    """What a map makes of a shard for one worker."""

    NONE = 0
    #: Mine, and nobody else has anything of it.
    OWNER = 1
    #: Mine, and the previous owner may have what I lack.
    INCOMING = 2
    #: Another's, and I am the previous owner: frozen, until the map forgets me.
    OUTGOING = 3


class PathBit(IntEnum):
    """Data paths that a WELCOME offers, as bits."""

    SHM = 1
    TCP = 2
    RDMA = 4


@message(0x01, "H H H H I s s *Q")
class Hello(NamedTuple):
    """First message of every connection to a worker or a stream.

    ``old_sessions`` is not used: before WELCOME a client cannot know that this is still the arena whose
    sessions it names. RELEASE_SESSIONS comes after.
    """

    proto_min: int
    proto_max: int
    role: int
    flags: int
    pid: int
    namespace: str
    token: str
    old_sessions: list[int]


@message(0x02, "H H H H Q Q Q s")
class Welcome(NamedTuple):
    """Answer to HELLO. ``session`` names the session for life; ``segment`` is empty without a shm path.

    ``rdma_port``: where on this host an RDMA lane is opened, 0 where none can be.
    """

    proto: int
    namespace_id: int
    paths: int
    rdma_port: int
    session: int
    incarnation: int
    grant_bytes_max: int
    segment: str


@message(0x03, "s")
class Error(NamedTuple):
    """Why a request failed, for people; the header's status is for programs."""

    text: str


@message(0x04, "Q")
class Ping(NamedTuple):
    """Are you there? Any role, any time."""

    cookie: int


@message(0x05, "Q")
class Pong(NamedTuple):
    """Answer to PING, with its cookie."""

    cookie: int


@message(0x06, "I")
class Done(NamedTuple):
    """A request without any other answer has been carried out; ``items`` of its items were."""

    items: int


# --- worker: mutations ------------------------------------------------------------------------


@message(0x10, "*16sQIIHH *II")
class Commit(NamedTuple):
    """Publish values that lie in granted chunks.

    ``entries``: (digest, grant id, length, crc32, entry flags, options), where option bit 0 (:data:`ABSENT`) is a
    mover's: store only what its worker has not seen since it took the shard over. ``wants``: (value bytes, count)
    of fresh grants. They are made after the answer has left, off the path that somebody waits on, and come
    with the session's next COMMITTED or GRANTED; whoever needs them at once sends GRANT.
    """

    entries: list[tuple[bytes, int, int, int, int, int]]
    wants: list[tuple[int, int]]


@message(0x11, "*B *QQI")
class Committed(NamedTuple):
    """A status for each entry, and fresh grants: (grant id, offset in the segment, chunk bytes).

    The grants are those that earlier COMMITs wanted, as far as there was room. Each comes once; a session that
    ends before it was told of one loses nothing.
    """

    statuses: list[int]
    grants: list[tuple[int, int, int]]


@message(0x12, "*II")
class Grant(NamedTuple):
    """Ask for chunks: (value bytes, count)."""

    wants: list[tuple[int, int]]


@message(0x13, "*QQI")
class Granted(NamedTuple):
    """(grant id, offset, chunk bytes), in the order asked; fewer when room or the session's cap ran out.

    Ahead of them come the grants that earlier COMMITs wanted and no answer has brought yet.
    """

    grants: list[tuple[int, int, int]]


@message(0x14, "*Q")
class ReturnGrants(NamedTuple):
    """Hand grants back. No copy or WRITE into them may still be under way."""

    grants: list[int]


@message(0x15, "Q")
class Recall(NamedTuple):
    """Push: please return idle grants of about so many bytes."""

    bytes: int


@message(0x16, "*16s")
class Delete(NamedTuple):
    """Drop entries. Answer: STATUSES."""

    digests: list[bytes]


@message(0x17, "*B")
class Statuses(NamedTuple):
    """A status for each item of the request."""

    statuses: list[int]


@message(0x18, "B *16s")
class Locate(NamedTuple):
    """Where values lie. ``pin`` is bits: :data:`LOCATE_PIN` pins each hit for this session, :data:`LOCATE_PREVIOUS`
    says that the asker was sent here as to a previous owner, so that values of frozen shards count too."""

    pin: int
    digests: list[bytes]


@message(0x19, "*BHIIQQ")
class Located(NamedTuple):
    """(status, entry flags, length, crc32, offset in the segment, pin id or 0).

    With status PREVIOUS the offset is the epoch since which the shard is this worker's: the previous owner that
    is meant is the one of a map that says the same.
    """

    entries: list[tuple[int, int, int, int, int, int]]


@message(0x1A, "*Q")
class Unpin(NamedTuple):
    """Give pins back. Answer: DONE."""

    pins: list[int]


@message(0x1C, "*Q")
class ReleaseSessions(NamedTuple):
    """Sessions of this process that ended with a dead worker or connection, now free of copies."""

    sessions: list[int]


@message(0x20, "I")
class RingAttach(NamedTuple):
    """Commit through the sealed memfd that travels with this frame (SCM_RIGHTS)."""

    bytes: int


@message(0x22, "Q")
class Kick(NamedTuple):
    """Look at my ring now; answered by DONE when it is drained."""

    tail: int


@message(0x23, "Q")
class Wake(NamedTuple):
    """A commit comes soon: poll my ring now. One way, no answer. ``cpu`` is the one that the sender runs on."""

    cpu: int


@message(0x24, "Q b b")
class Shards(NamedTuple):
    """Supervisor to worker: what the map of ``epoch`` says of each shard.

    ``since``: SHARD_COUNT u64, the epoch since which the shard is yours, 0 where it is not. ``roles``: SHARD_COUNT
    bytes, a :class:`ShardRole` each; of an OUTGOING shard ``since`` is its new owner's. Both empty: the manager
    does not know us, so take no mutation until the next SHARDS.
    """

    epoch: int
    since: bytes
    roles: bytes


@message(0x28, "Q b")
class Freeze(NamedTuple):
    """A new owner, by its mover, to the previous one: the map of ``epoch`` gave me these shards (one bit each, LSB
    first); take no more mutations in them, and keep what you have until the map forgets you. Answer: FROZEN."""

    epoch: int
    shards: bytes


@message(0x29, "b")
class Frozen(NamedTuple):
    """Those of the shards that are frozen here and may still have values. The others are not here at all."""

    shards: bytes


@message(0x2A, "Q b b")
class Adopt(NamedTuple):
    """Mover to its own worker: take these shards over now. In those of ``fallback`` what you do not have may still be
    at the previous owner, which is frozen. Answer: DONE, with how many are yours now."""

    epoch: int
    shards: bytes
    fallback: bytes


@message(0x2B, "Q b")
class Finish(NamedTuple):
    """Mover to its own worker: all that the previous owner had of these shards has been copied. Answer: DONE."""

    epoch: int
    shards: bytes


@message(0x2D, "I Q Q Q Q")
class MoveProgress(NamedTuple):
    """Push, mover to its supervisor: shards still to be done, bytes copied since it started, bytes a second of late,
    values copied, values of the previous owner that did not come along."""

    left: int
    bytes: int
    rate: int
    values: int
    lost: int


@message(0x26, "B")
class Stats(NamedTuple):
    """Counters of a worker or stream, please. Answer: STATS_REPLY."""

    detail: int


@message(0x27, "b")
class StatsReply(NamedTuple):
    """A JSON object of counters and gauges."""

    json: bytes


# --- stream: bulk over TCP -------------------------------------------------------------------


@message(0x40, "*16sI")
class Fetch(NamedTuple):
    """Values please: (digest, most bytes I can take)."""

    keys: list[tuple[bytes, int]]


@message(0x41, "*BHII")
class Fetched(NamedTuple):
    """(status, entry flags, length, crc32) a key; the hits' bytes follow bare, in order, then a VERDICT frame.

    With status PREVIOUS length and crc32 are the lower and the upper half of the epoch that LOCATED has then.
    """

    entries: list[tuple[int, int, int, int]]


@message(0x42, "*16sI")
class FetchPrevious(NamedTuple):
    """:class:`Fetch` from a previous owner: values of frozen shards count too. Same answer."""

    keys: list[tuple[bytes, int]]


@message(0x43, "*B")
class Verdict(NamedTuple):
    """After the bytes of a FETCHED: which of them were whole (OK) and which changed under way (TORN)."""

    statuses: list[int]


@message(0x44, "*16sIIHH")
class Store(NamedTuple):
    """(digest, length, crc32, entry flags, 0) a key; the values' bytes follow bare, in order. Answer: STATUSES."""

    entries: list[tuple[bytes, int, int, int, int]]


@message(0x46, "*16s")
class Exists(NamedTuple):
    """Which of these are stored? Answer: STATUSES (OK, NOT_FOUND, PREVIOUS or WRONG_OWNER)."""

    digests: list[bytes]


@structure("H s")
class NamespaceName(NamedTuple):
    """What a namespace id means in one arena."""

    number: int
    name: str


@message(0x48, "b I I")
class List(NamedTuple):
    """Which values of these frozen shards (one bit each) lie in slots from ``cursor`` on? At most ``most``."""

    shards: bytes
    cursor: int
    most: int


@message(0x49, "I *16sIHH [NamespaceName]")
class Listed(NamedTuple):
    """(digest, length, entry flags, namespace id) each, and where to go on: ``cursor`` 0 when that was all."""

    cursor: int
    entries: list[tuple[bytes, int, int, int]]
    namespaces: list[NamespaceName]


# --- RDMA: the control connection of a lane --------------------------------------------------


@structure("16s H H I s")
class RdmaRail(NamedTuple):
    """A rail of the server: its port's GID and LID (0 on Ethernet), its MTU in bytes, what it is called there."""

    gid: bytes
    lid: int
    mtu: int
    reads: int
    name: str


@structure("H H Q Q Q I")
class RdmaRegion(NamedTuple):
    """A piece of the arena, registered on a rail: segment bytes ``start`` to ``start + length`` lie at ``address``.

    ``flags``: :data:`REGION_WRITABLE` where ``rkey`` allows WRITEs too. READs it always allows.
    """

    rail: int
    flags: int
    start: int
    length: int
    address: int
    rkey: int


#: Bit of RdmaRegion.flags.
REGION_WRITABLE: Final = 1
#: Bit of RdmaOpened.flags: chunks are written by the keys that come with their grants.
RDMA_WINDOWS: Final = 1


@message(0x50, "I")
class RdmaOpen(NamedTuple):
    """Client to endpoint, after HELLO: what is there? Answer: RDMA_OPENED, or ERROR with UNAVAILABLE and the reason."""

    flags: int


@message(0x51, "Q Q I [RdmaRail] [RdmaRegion]")
class RdmaOpened(NamedTuple):
    """Size of the segment and incarnation of its worker, the server's rails, and where the arena lies on each."""

    size: int
    incarnation: int
    flags: int
    rails: list[RdmaRail]
    regions: list[RdmaRegion]


@message(0x52, "H H 16s I I H H")
class RdmaConnect(NamedTuple):
    """Connect your rail ``rail`` to this end of mine. Answer: RDMA_CONNECTED, or ERROR."""

    rail: int
    lid: int
    gid: bytes
    qpn: int
    psn: int
    mtu: int
    reads: int


@message(0x53, "H H 16s I I H H")
class RdmaConnected(NamedTuple):
    """The server's end of link number ``link`` of this lane; it is ready to be read and written."""

    link: int
    lid: int
    gid: bytes
    qpn: int
    psn: int
    mtu: int
    reads: int


@message(0x54, "H")
class RdmaDisconnect(NamedTuple):
    """Link ``link`` is of no use: destroy your end. Answer: DONE, after which nothing it sent can arrive."""

    link: int


@message(0x55, "*B *QQI *I")
class RdmaGranted(NamedTuple):
    """Answer to COMMIT and GRANT: a status for each entry, and grants as in COMMITTED.

    With :data:`RDMA_WINDOWS`, ``keys`` has for each grant one rkey a link, in the order of the links' numbers (0 for
    one that was disconnected): it allows WRITEs to that chunk, and ends with the grant. Without, ``keys`` is empty.
    """

    statuses: list[int]
    grants: list[tuple[int, int, int]]
    keys: list[int]


# --- manager -----------------------------------------------------------------------------------


@structure("H H I Q Q s s s H")
class WorkerInfo(NamedTuple):
    """One worker as the shard map names it. ``uds`` and ``segment`` mean something on its own host only."""

    worker: int
    numa_node: int
    incarnation: int
    instance: int
    capacity: int
    node: str
    uds: str
    host: str
    port: int


@structure("Q Q Q Q I Q Q")
class WorkerLoad(NamedTuple):
    """What a worker reports with each heartbeat. The last three: shards still moving in, bytes copied for that since
    the move began, bytes a second of late."""

    used_bytes: int
    entries: int
    puts: int
    evictions: int
    moves_left: int = 0
    moved_bytes: int = 0
    move_rate: int = 0


@message(0x60, "Q B s [WorkerInfo] Q")
class Join(NamedTuple):
    """A data server offers its workers. ``instance`` is drawn at its start, so a namesake is told apart.

    ``warm`` 1: its arenas hold what they held when it said LEAVE. ``epoch``: of the newest map it has, 0 for none.
    """

    instance: int
    warm: int
    name: str
    workers: list[WorkerInfo]
    epoch: int = 0


@message(0x61, "Q I B")
class Joined(NamedTuple):
    """Accepted; send a HEARTBEAT every ``heartbeat_ms``. ``wants_map`` 1: the manager has lost its state and asks for
    the newest map there is, as MAP_OFFER."""

    epoch: int
    heartbeat_ms: int
    wants_map: int = 0


@message(0x62, "Q Q s [WorkerLoad]")
class Heartbeat(NamedTuple):
    """I live, and all my workers have taken over the map of ``epoch``; one load a worker. Answer: HEARTBEAT_ACK."""

    instance: int
    epoch: int
    name: str
    loads: list[WorkerLoad]


@message(0x63, "Q")
class HeartbeatAck(NamedTuple):
    """The current epoch; a server whose map is older asks for the new one."""

    epoch: int


@message(0x64, "Q s B")
class Leave(NamedTuple):
    """A clean goodbye: my shards may go to others at once; with ``warm`` 1 I shall be back with all values, please
    keep them for me for the grace of a restart. Answer: DONE."""

    instance: int
    name: str
    warm: int = 0


@message(0x65, "Q Q s H b")
class Moved(NamedTuple):
    """A worker of mine has all that the previous owner had of these shards (one bit each): it may be forgotten.
    ``epoch`` is that of the map I hold. Said again until the map agrees. Answer: DONE."""

    instance: int
    epoch: int
    name: str
    worker: int
    shards: bytes


@message(0x66, "Q B")
class MapGet(NamedTuple):
    """The shard map please; with ``subscribe`` 1 every later change is pushed too."""

    known_epoch: int
    subscribe: int


@message(0x67, "Q Q [WorkerInfo] b *HH b")
class MapReply(NamedTuple):
    """The map: owners are SHARD_COUNT u16 positions in ``workers`` (0xFFFF: none).

    ``previous``: (shard, position) of the shards that are moving: who had it before and may have what the owner
    lacks. ``since``: SHARD_COUNT u64, the epoch in which each shard got its owner, compressed by zlib.
    """

    epoch: int
    cluster: int
    workers: list[WorkerInfo]
    owners: bytes
    previous: Sequence[tuple[int, int]] = ()
    since: bytes = b""


@message(0x68, "Q Q [WorkerInfo] b *HH b")
class MapOffer(NamedTuple):
    """A data server gives the newest map it has to a manager that asked for it. Fields as MAP_REPLY. Answer: DONE."""

    epoch: int
    cluster: int
    workers: list[WorkerInfo]
    owners: bytes
    previous: Sequence[tuple[int, int]]
    since: bytes


@message(0x6A, "B")
class ClusterStatus(NamedTuple):
    """The cluster for people, please. Answer: STATS_REPLY."""

    detail: int


@message(0x6C, "B s")
class Drain(NamedTuple):
    """Move everything away from a data server (1), or let it take its share again (0). Answer: DONE, with how many
    shards it owns now."""

    drain: int
    name: str


#: COMMIT's option bit.
ABSENT: Final = 1
#: LOCATE's bits.
LOCATE_PIN: Final = 1
LOCATE_PREVIOUS: Final = 2

#: Opcodes that hot loops compare with, looked up once.
OP_COMMIT: Final = OPCODES[Commit]
OP_KICK: Final = OPCODES[Kick]
OP_WAKE: Final = OPCODES[Wake]
OP_ERROR: Final = OPCODES[Error]

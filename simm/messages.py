"""Every message on SiMM's wire: field names, formats, opcodes, statuses.

``docs/protocol.md`` says what each means and who may send it when; a test holds its table
against this module. Opcodes and statuses are never reused or renumbered.
"""

from __future__ import annotations

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


# --- sessions ---------------------------------------------------------------------------------


class Role(IntEnum):
    """Who a HELLO comes from."""

    CLIENT = 0
    STREAM = 1
    SUPERVISOR = 2
    ADMIN = 3


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
    """Answer to HELLO. ``session`` names the session for life; ``segment`` is empty without a shm path."""

    proto: int
    namespace_id: int
    paths: int
    reserved: int
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

    ``entries``: (digest, grant id, length, crc32, entry flags, 0). ``wants``: (value bytes, count)
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
    """Where values lie; with ``pin`` 1 each hit is pinned for this session."""

    pin: int
    digests: list[bytes]


@message(0x19, "*BHIIQQ")
class Located(NamedTuple):
    """(status, entry flags, length, crc32, offset in the segment, pin id or 0)."""

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


@message(0x24, "Q b")
class Shards(NamedTuple):
    """Supervisor to worker: which shards are yours since which epoch (one bit a shard, LSB first)."""

    epoch: int
    mine: bytes


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
    """(status, entry flags, length, crc32) a key; the hits' bytes follow bare, in order, then a VERDICT frame."""

    entries: list[tuple[int, int, int, int]]


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
    """Which of these are stored? Answer: STATUSES (OK or NOT_FOUND)."""

    digests: list[bytes]


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


@structure("Q Q Q Q")
class WorkerLoad(NamedTuple):
    """What a worker reports with each heartbeat."""

    used_bytes: int
    entries: int
    puts: int
    evictions: int


@message(0x60, "Q B s [WorkerInfo]")
class Join(NamedTuple):
    """A data server offers its workers. ``instance`` is drawn at its start, so a namesake is told apart."""

    instance: int
    warm: int
    name: str
    workers: list[WorkerInfo]


@message(0x61, "Q I")
class Joined(NamedTuple):
    """Accepted; send a HEARTBEAT every ``heartbeat_ms``."""

    epoch: int
    heartbeat_ms: int


@message(0x62, "Q Q s [WorkerLoad]")
class Heartbeat(NamedTuple):
    """I live and hold the map of ``epoch``; one load a worker. Answer: HEARTBEAT_ACK."""

    instance: int
    epoch: int
    name: str
    loads: list[WorkerLoad]


@message(0x63, "Q")
class HeartbeatAck(NamedTuple):
    """The current epoch; a server whose map is older asks for the new one."""

    epoch: int


@message(0x64, "Q s")
class Leave(NamedTuple):
    """A clean goodbye: my shards may go to others at once. Answer: DONE."""

    instance: int
    name: str


@message(0x66, "Q B")
class MapGet(NamedTuple):
    """The shard map please; with ``subscribe`` 1 every later change is pushed too."""

    known_epoch: int
    subscribe: int


@message(0x67, "Q Q [WorkerInfo] b")
class MapReply(NamedTuple):
    """The map: owners are SHARD_COUNT u16 positions in ``workers`` (0xFFFF: none)."""

    epoch: int
    cluster: int
    workers: list[WorkerInfo]
    owners: bytes


@message(0x6A, "B")
class ClusterStatus(NamedTuple):
    """The cluster for people, please. Answer: STATS_REPLY."""

    detail: int


#: Opcodes that hot loops compare with, looked up once.
OP_COMMIT: Final = OPCODES[Commit]
OP_KICK: Final = OPCODES[Kick]
OP_WAKE: Final = OPCODES[Wake]
OP_ERROR: Final = OPCODES[Error]

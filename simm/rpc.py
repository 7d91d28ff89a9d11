"""Frames and messages: bytes in, events out, no socket anywhere.

The wire format is stated in ``docs/protocol.md``; a test holds its opcode table against
this module. The design is h11's: a :class:`Connection` is told which bytes arrived and
says which frames they make, one class for both ends, and whoever owns a socket feeds it.

What can go wrong with a binary protocol, and what stands against it:

* *Two lists of fields that drift apart.* Each message has one format string, checked at
  import against its field names; the same compiled codec packs and unpacks it.
* *A length that lies.* The header's body length is capped before a byte of the body is
  kept, every string and list is checked against what is left, and a body must be consumed
  to its last byte.
* *A peer of another kind or age.* The first four bytes are a magic; the framing version is
  in every header; the protocol version is settled by HELLO and WELCOME (highest common).
* *Numbers that change their meaning.* Opcodes and statuses are never reused.

Anything malformed raises :class:`RemoteProtocolError`, never another error; the connection
is then of no further use and is closed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import IntEnum
from typing import Any, ClassVar, Final, NamedTuple, TypeVar

from .constants import FRAME_BYTES_MAX
from .errors import LocalProtocolError, RemoteProtocolError

MAGIC: Final = int.from_bytes(b"SiMM", "little")
FRAMING_VERSION: Final = 1
#: Oldest and newest protocol this build speaks; HELLO offers the range.
PROTOCOL_MIN: Final = 1
PROTOCOL_MAX: Final = 1

# off size field
#   0    4 magic        "SiMM"
#   4    2 version      of the framing; another one is refused
#   6    2 opcode
#   8    2 flags        see Flag
#  10    2 status       see Status; 0 in requests
#  12    8 request_id   chosen by the asker, echoed in the reply; 0 for pushes
#  20    4 body_bytes   <= FRAME_BYTES_MAX
HEADER: Final = struct.Struct("<IHHHHQI")
HEADER_BYTES: Final = HEADER.size
assert HEADER_BYTES == 24
_pack_header = HEADER.pack
_unpack_header = HEADER.unpack_from


class Flag(IntEnum):
    """Bits of the header's flags field."""

    REPLY = 1
    PUSH = 2


_FLAGS_KNOWN: Final = int(Flag.REPLY) | int(Flag.PUSH)


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


class Frame(NamedTuple):
    """One whole frame. ``body`` is bytes of its own: it outlives the receive buffer."""

    opcode: int
    flags: int
    status: int
    request_id: int
    body: bytes


# ---------------------------------------------------------------------------------------------
# Codecs: one format string a message.
#
#   B H I Q 16s   a struct code: fixed fields first are packed by one Struct
#   s             UTF-8 text, u16 length ahead
#   b             bytes, u32 length ahead
#   *CODES        u32 count, then that many fixed records (tuples; plain values for one code)
#   [Name]        u16 count, then that many messages of the plain structure Name
# ---------------------------------------------------------------------------------------------

_U16 = struct.Struct("<H")
_U32 = struct.Struct("<I")

_Message = TypeVar("_Message", bound=type)
_Writer = Callable[[Any], bytes]
_Reader = Callable[[bytes, int], tuple[Any, int]]


def _text_codec() -> tuple[_Writer, _Reader]:
    def write(value: str) -> bytes:
        raw = value.encode("utf-8")
        if len(raw) > 0xFFFF:
            raise LocalProtocolError(f"text of {len(raw)} bytes does not fit a 16-bit length")
        return _U16.pack(len(raw)) + raw

    def read(body: bytes, at: int) -> tuple[str, int]:
        (size,) = _U16.unpack_from(body, at)
        end = at + 2 + size
        if end > len(body):
            raise RemoteProtocolError(f"text of {size} bytes runs past the end of the message")
        return body[at + 2 : end].decode("utf-8"), end

    return write, read


def _bytes_codec() -> tuple[_Writer, _Reader]:
    def write(value: bytes) -> bytes:
        return _U32.pack(len(value)) + value

    def read(body: bytes, at: int) -> tuple[bytes, int]:
        (size,) = _U32.unpack_from(body, at)
        end = at + 4 + size
        if end > len(body):
            raise RemoteProtocolError(f"{size} bytes run past the end of the message")
        return body[at + 4 : end], end

    return write, read


def _records_codec(codes: str) -> tuple[_Writer, _Reader]:
    record = struct.Struct("<" + codes)
    single = len(record.unpack(bytes(record.size))) == 1
    pack, size = record.pack, record.size

    def write(value: Any) -> bytes:
        rows = [pack(row) for row in value] if single else [pack(*row) for row in value]
        return _U32.pack(len(rows)) + b"".join(rows)

    def read(body: bytes, at: int) -> tuple[list[Any], int]:
        (count,) = _U32.unpack_from(body, at)
        at += 4
        end = at + count * size
        if end > len(body):
            raise RemoteProtocolError(f"{count} records of {size} bytes run past the end of the message")
        rows = record.iter_unpack(body[at:end])
        return ([row[0] for row in rows] if single else list(rows)), end

    return write, read


def _nested_codec(name: str) -> tuple[_Writer, _Reader]:
    codec = _STRUCTURES[name]

    def write(value: Any) -> bytes:
        return _U16.pack(len(value)) + b"".join(codec.write(item) for item in value)

    def read(body: bytes, at: int) -> tuple[list[Any], int]:
        (count,) = _U16.unpack_from(body, at)
        at += 2
        items = []
        for _ in range(count):
            item, at = codec.read(body, at)
            items.append(item)
        return items, at

    return write, read


class Codec:
    """Packs and unpacks one message type by its format string."""

    def __init__(self, cls: Any, layout: str) -> None:
        tokens = layout.split()
        if len(tokens) != len(cls._fields):
            raise LocalProtocolError(f"{cls.__name__}: {len(tokens)} codes for {len(cls._fields)} fields")
        fixed = []
        for token in tokens:
            if token[0] in "sb*[":
                break
            fixed.append(token)
        self.cls = cls
        self.layout = layout
        self._head = struct.Struct("<" + "".join(fixed))
        self._head_fields = len(fixed)
        self._tail: list[tuple[_Writer, _Reader]] = []
        for token in tokens[len(fixed) :]:
            if token == "s":
                self._tail.append(_text_codec())
            elif token == "b":
                self._tail.append(_bytes_codec())
            elif token[0] == "*":
                self._tail.append(_records_codec(token[1:]))
            elif token[0] == "[":
                self._tail.append(_nested_codec(token[1:-1]))
            else:
                self._tail.append(_records_codec_one(token))

    def write(self, message: Any) -> bytes:
        """The message's body."""
        split = self._head_fields
        try:
            out = self._head.pack(*message[:split])
            for (write, _), value in zip(self._tail, message[split:]):
                out += write(value)
        except (struct.error, TypeError, AttributeError) as exc:
            raise LocalProtocolError(f"{self.cls.__name__} cannot be packed: {exc}") from exc
        return out

    def read(self, body: bytes, at: int = 0) -> tuple[Any, int]:
        """The message that starts at ``at`` and where it ends."""
        try:
            values = list(self._head.unpack_from(body, at))
            at += self._head.size
            for _, read in self._tail:
                value, at = read(body, at)
                values.append(value)
        except (struct.error, UnicodeDecodeError) as exc:
            raise RemoteProtocolError(f"malformed {self.cls.__name__}: {exc}") from exc
        return self.cls(*values), at

    def decode(self, body: bytes) -> Any:
        """The message that fills ``body`` to its last byte."""
        message, end = self.read(body)
        if end != len(body):
            raise RemoteProtocolError(f"{self.cls.__name__} has {len(body) - end} bytes too many")
        return message


def _records_codec_one(code: str) -> tuple[_Writer, _Reader]:
    """A fixed field behind a variable one."""
    record = struct.Struct("<" + code)

    def read(body: bytes, at: int) -> tuple[Any, int]:
        return record.unpack_from(body, at)[0], at + record.size

    return record.pack, read


CODECS: dict[int, Codec] = {}
_STRUCTURES: dict[str, Codec] = {}


def message(opcode: int, layout: str) -> Callable[[_Message], _Message]:
    """Class decorator: register a NamedTuple as the message with this opcode."""

    def register(cls: _Message) -> _Message:
        if opcode in CODECS:
            raise LocalProtocolError(f"opcode {opcode:#x} is taken by {CODECS[opcode].cls.__name__}")
        cls.opcode = opcode  # type: ignore[attr-defined]
        CODECS[opcode] = Codec(cls, layout)
        return cls

    return register


def structure(layout: str) -> Callable[[_Message], _Message]:
    """Class decorator: register a NamedTuple that only occurs inside messages."""

    def register(cls: _Message) -> _Message:
        _STRUCTURES[cls.__name__] = Codec(cls, layout)
        return cls

    return register


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
    """First message of every connection to a worker or a stream."""

    opcode: ClassVar[int]
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

    opcode: ClassVar[int]
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

    opcode: ClassVar[int]
    text: str


@message(0x04, "Q")
class Ping(NamedTuple):
    opcode: ClassVar[int]
    cookie: int


@message(0x05, "Q")
class Pong(NamedTuple):
    opcode: ClassVar[int]
    cookie: int


@message(0x06, "I")
class Done(NamedTuple):
    """A request without any other answer has been carried out; ``count`` of its items were."""

    opcode: ClassVar[int]
    count: int


# --- worker: mutations ------------------------------------------------------------------------


@message(0x10, "*16sQIIHH *II")
class Commit(NamedTuple):
    """Publish values that lie in granted chunks.

    ``entries``: (digest, grant id, length, crc32, entry flags, 0). ``wants``: (value bytes, count)
    of fresh grants that the answer should bring.
    """

    opcode: ClassVar[int]
    entries: list[tuple[bytes, int, int, int, int, int]]
    wants: list[tuple[int, int]]


@message(0x11, "*B *QQI")
class Committed(NamedTuple):
    """A status for each entry, and fresh grants: (grant id, offset in the segment, chunk bytes)."""

    opcode: ClassVar[int]
    statuses: list[int]
    grants: list[tuple[int, int, int]]


@message(0x12, "*II")
class Grant(NamedTuple):
    """Ask for chunks: (value bytes, count)."""

    opcode: ClassVar[int]
    wants: list[tuple[int, int]]


@message(0x13, "*QQI")
class Granted(NamedTuple):
    """(grant id, offset, chunk bytes), in the order asked; fewer when room or the session's cap ran out."""

    opcode: ClassVar[int]
    grants: list[tuple[int, int, int]]


@message(0x14, "*Q")
class ReturnGrants(NamedTuple):
    """Hand grants back. No copy or WRITE into them may still be under way."""

    opcode: ClassVar[int]
    grants: list[int]


@message(0x15, "Q")
class Recall(NamedTuple):
    """Push: please return idle grants of about so many bytes."""

    opcode: ClassVar[int]
    bytes: int


@message(0x16, "*16s")
class Delete(NamedTuple):
    opcode: ClassVar[int]
    digests: list[bytes]


@message(0x17, "*B")
class Statuses(NamedTuple):
    """A status for each item of the request."""

    opcode: ClassVar[int]
    statuses: list[int]


@message(0x18, "B *16s")
class Locate(NamedTuple):
    """Where values lie; with ``pin`` 1 each hit is pinned for this session."""

    opcode: ClassVar[int]
    pin: int
    digests: list[bytes]


@message(0x19, "*BHIIQQ")
class Located(NamedTuple):
    """(status, entry flags, length, crc32, offset in the segment, pin id or 0)."""

    opcode: ClassVar[int]
    entries: list[tuple[int, int, int, int, int, int]]


@message(0x1A, "*Q")
class Unpin(NamedTuple):
    opcode: ClassVar[int]
    pins: list[int]


@message(0x1C, "*Q")
class ReleaseSessions(NamedTuple):
    """Sessions of this process that ended with a dead worker or connection, now free of copies."""

    opcode: ClassVar[int]
    sessions: list[int]


@message(0x20, "I")
class RingAttach(NamedTuple):
    """Commit through the sealed memfd that travels with this frame (SCM_RIGHTS)."""

    opcode: ClassVar[int]
    bytes: int


@message(0x22, "Q")
class Kick(NamedTuple):
    """Look at my ring now; answered by DONE when it is drained."""

    opcode: ClassVar[int]
    tail: int


@message(0x24, "Q b")
class Shards(NamedTuple):
    """Supervisor to worker: which shards are yours since which epoch (one bit a shard, LSB first)."""

    opcode: ClassVar[int]
    epoch: int
    mine: bytes


@message(0x26, "B")
class Stats(NamedTuple):
    opcode: ClassVar[int]
    detail: int


@message(0x27, "b")
class StatsReply(NamedTuple):
    """A JSON object of counters and gauges."""

    opcode: ClassVar[int]
    json: bytes


# --- stream: bulk over TCP -------------------------------------------------------------------


@message(0x40, "*16sI")
class Fetch(NamedTuple):
    """Values please: (digest, most bytes I can take)."""

    opcode: ClassVar[int]
    keys: list[tuple[bytes, int]]


@message(0x41, "*BHII")
class Fetched(NamedTuple):
    """(status, entry flags, length, crc32) a key; the hits' bytes follow bare, in order, then a VERDICT frame."""

    opcode: ClassVar[int]
    entries: list[tuple[int, int, int, int]]


@message(0x43, "*B")
class Verdict(NamedTuple):
    """After the bytes of a FETCHED: which of them were whole (OK) and which changed under way (TORN)."""

    opcode: ClassVar[int]
    statuses: list[int]


@message(0x44, "*16sIIHH")
class Store(NamedTuple):
    """(digest, length, crc32, entry flags, 0) a key; the values' bytes follow bare, in order. Answer: STATUSES."""

    opcode: ClassVar[int]
    entries: list[tuple[bytes, int, int, int, int]]


@message(0x46, "*16s")
class Exists(NamedTuple):
    opcode: ClassVar[int]
    digests: list[bytes]


# --- manager -----------------------------------------------------------------------------------


@structure("H H I Q Q s s s H")
class WorkerInfo(NamedTuple):
    """One worker as the shard map names it. ``uds`` and ``segment`` mean something on its own host only."""

    index: int
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
    used_bytes: int
    entries: int
    puts: int
    evictions: int


@message(0x60, "Q B s [WorkerInfo]")
class Join(NamedTuple):
    """A data server offers its workers. ``instance`` is drawn at its start, so a namesake is told apart."""

    opcode: ClassVar[int]
    instance: int
    warm: int
    name: str
    workers: list[WorkerInfo]


@message(0x61, "Q I")
class Joined(NamedTuple):
    opcode: ClassVar[int]
    epoch: int
    heartbeat_ms: int


@message(0x62, "Q Q s [WorkerLoad]")
class Heartbeat(NamedTuple):
    opcode: ClassVar[int]
    instance: int
    epoch: int
    name: str
    loads: list[WorkerLoad]


@message(0x63, "Q")
class HeartbeatAck(NamedTuple):
    """The current epoch; a server whose map is older asks for the new one."""

    opcode: ClassVar[int]
    epoch: int


@message(0x64, "Q s")
class Leave(NamedTuple):
    opcode: ClassVar[int]
    instance: int
    name: str


@message(0x66, "Q B")
class MapGet(NamedTuple):
    """The shard map please; with ``subscribe`` 1 every later change is pushed too."""

    opcode: ClassVar[int]
    known_epoch: int
    subscribe: int


@message(0x67, "Q Q [WorkerInfo] b")
class MapReply(NamedTuple):
    """The map: owners are SHARD_COUNT u16 positions in ``workers`` (0xFFFF: none)."""

    opcode: ClassVar[int]
    epoch: int
    cluster: int
    workers: list[WorkerInfo]
    owners: bytes


@message(0x6A, "B")
class ClusterStatus(NamedTuple):
    opcode: ClassVar[int]
    detail: int


# ---------------------------------------------------------------------------------------------


def encode(msg: Any, request_id: int = 0, *, status: int = 0, flags: int = 0) -> bytes:
    """A whole frame. Raises LocalProtocolError for values that do not fit."""
    codec = CODECS.get(getattr(msg, "opcode", -1))
    if codec is None:
        raise LocalProtocolError(f"{type(msg).__name__} is no message")
    body = codec.write(msg)
    if len(body) > FRAME_BYTES_MAX:
        raise LocalProtocolError(f"{type(msg).__name__} of {len(body)} bytes exceeds {FRAME_BYTES_MAX}")
    return _pack_header(MAGIC, FRAMING_VERSION, msg.opcode, flags, status, request_id, len(body)) + body


def reply(msg: Any, request_id: int, status: int = 0) -> bytes:
    """A whole reply frame."""
    return encode(msg, request_id, status=status, flags=Flag.REPLY)


def decode(frame: Frame) -> Any:
    """The message inside a frame. Raises RemoteProtocolError for an unknown opcode or a malformed body."""
    codec = CODECS.get(frame.opcode)
    if codec is None:
        raise RemoteProtocolError(f"unknown opcode {frame.opcode:#x}")
    return codec.decode(frame.body)


def parse_header(buf: bytes | bytearray | memoryview, at: int = 0) -> tuple[int, int, int, int, int]:
    """(opcode, flags, status, request id, body bytes) of a header, checked. Raises RemoteProtocolError."""
    magic, version, opcode, flags, status, request_id, size = _unpack_header(buf, at)
    if magic != MAGIC:
        raise RemoteProtocolError(
            f"not a SiMM peer: the frame starts with {magic:#010x}; is this the right port?"
        )
    if version != FRAMING_VERSION:
        raise RemoteProtocolError(
            f"peer frames with version {version}, this build with {FRAMING_VERSION}: upgrade the older one"
        )
    if opcode not in CODECS:
        raise RemoteProtocolError(f"unknown opcode {opcode:#x}")
    if flags & ~_FLAGS_KNOWN:
        raise RemoteProtocolError(f"unknown frame flags {flags:#x}")
    if size > FRAME_BYTES_MAX:
        raise RemoteProtocolError(f"a body of {size} bytes exceeds the cap of {FRAME_BYTES_MAX}")
    return opcode, flags, status, request_id, size


class Connection:
    """Frames of one connection, from bytes; sans-I/O, the same class at both ends.

    >>> conn = Connection()
    >>> conn.receive_data(encode(Ping(7), 1))
    >>> decode(conn.next_frame())
    Ping(cookie=7)

    The unparsed input never holds more than one frame's cap plus what one ``receive_data``
    brought: callers parse before they read on. Once an error was raised every further call
    raises it again.
    """

    __slots__ = ("_at", "_buf", "_error")

    def __init__(self) -> None:
        self._buf = bytearray()
        self._at = 0
        self._error: RemoteProtocolError | None = None

    def receive_data(self, data: bytes | bytearray | memoryview) -> None:
        """Take bytes that arrived. O(len(data)) amortised."""
        if self._error is not None:
            raise self._error
        if self._at:
            del self._buf[: self._at]
            self._at = 0
        self._buf += data

    def next_frame(self) -> Frame | None:
        """The next whole frame, or None until more bytes arrive. Raises RemoteProtocolError."""
        if self._error is not None:
            raise self._error
        buf, at = self._buf, self._at
        have = len(buf) - at
        if have < HEADER_BYTES:
            if have and buf[at : at + 4] != b"SiMM"[: min(have, 4)]:
                # Say so at the first wrong byte: a foreign client may wait for us and never send 24.
                self._fail("not a SiMM peer: is this the right port?")
            return None
        try:
            opcode, flags, status, request_id, size = parse_header(buf, at)
        except RemoteProtocolError as exc:
            self._error = exc
            raise
        end = at + HEADER_BYTES + size
        if len(buf) < end:
            return None
        self._at = end
        return Frame(opcode, flags, status, request_id, bytes(buf[at + HEADER_BYTES : end]))

    def take_rest(self) -> bytes:
        """All bytes not parsed yet: the head of bulk data that follows a frame bare."""
        rest = bytes(self._buf[self._at :])
        self._buf.clear()
        self._at = 0
        return rest

    def take(self, most: int) -> bytes:
        """At most ``most`` of the unparsed bytes, as bulk data."""
        end = min(self._at + most, len(self._buf))
        data = bytes(self._buf[self._at : end])
        self._at = end
        return data

    @property
    def pending_bytes(self) -> int:
        """Bytes received and not yet parsed."""
        return len(self._buf) - self._at

    def at_eof(self) -> None:
        """The peer closed. Raises RemoteProtocolError when that was in the middle of a frame."""
        if self._error is None and self.pending_bytes:
            self._fail(f"the peer closed {self.pending_bytes} bytes into a frame")

    def _fail(self, text: str) -> None:
        self._error = RemoteProtocolError(text)
        raise self._error

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
from enum import IntEnum
from typing import Any, Final, NamedTuple

from . import messages as messages  # registers every codec
from .codec import CODECS, OPCODES
from .constants import FRAME_BYTES_MAX
from .errors import LocalProtocolError, RemoteProtocolError

MAGIC: Final = int.from_bytes(b"SiMM", "little")
FRAMING_VERSION: Final = 1

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


_REPLY: Final = int(Flag.REPLY)


class Frame(NamedTuple):
    """One whole frame. ``body`` is bytes of its own: it outlives the receive buffer."""

    opcode: int
    flags: int
    status: int
    request_id: int
    body: bytes


def encode(msg: Any, request_id: int = 0, *, status: int = 0, flags: int = 0) -> bytes:
    """A whole frame. Raises LocalProtocolError for values that do not fit."""
    opcode = OPCODES.get(type(msg))
    if opcode is None:
        raise LocalProtocolError(f"{type(msg).__name__} is no message")
    body = CODECS[opcode].write(msg)
    if len(body) > FRAME_BYTES_MAX:
        raise LocalProtocolError(f"{type(msg).__name__} of {len(body)} bytes exceeds {FRAME_BYTES_MAX}")
    return _pack_header(MAGIC, FRAMING_VERSION, opcode, flags, status, request_id, len(body)) + body


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


# --- one-key forms ----------------------------------------------------------------------------
#
# A put of one value is one COMMIT of one entry and one want, answered by one status and at most one grant. The
# codec takes 1.6 to 2.5 us to pack or unpack such a message and there are four of those in a round trip of 10 us,
# so these shapes have their own structs: the very same bytes, as a test asserts, in 0.3 us. What never varies
# in such a frame is compared as bytes, so a frame of any other shape is not taken for one.

#: frame head, request id, body bytes and entries, [digest, grant, length, crc, flags], 0 and wants, [size, count]
_COMMIT_ONE: Final = struct.Struct("<12sQ8s" + "16sQIIH" + "6s" + "II")
#: frame head, request id, body bytes and statuses, status, grants, [grant, offset, chunk]
_COMMITTED_NONE: Final = struct.Struct("<12sQ8s" + "BI")
_COMMITTED_ONE: Final = struct.Struct("<12sQ8s" + "BI" + "QQI")
COMMIT_ONE_BYTES: Final = _COMMIT_ONE.size
COMMITTED_ONE_BYTES: Final = _COMMITTED_ONE.size


#: The same behind the frame's header, for whom a :class:`Connection` has taken that off.
_COMMIT_ONE_BODY: Final = struct.Struct("<4s" + "16sQIIH" + "6s" + "II")
_COMMITTED_ONE_BODY: Final = struct.Struct("<4s" + "BI" + "QQI")
COMMIT_ONE_BODY_BYTES: Final = COMMIT_ONE_BYTES - HEADER_BYTES
COMMITTED_ONE_BODY_BYTES: Final = COMMITTED_ONE_BYTES - HEADER_BYTES
assert (_COMMIT_ONE_BODY.size, _COMMITTED_ONE_BODY.size) == (COMMIT_ONE_BODY_BYTES, COMMITTED_ONE_BODY_BYTES)


def _head(msg: type, flags: int) -> bytes:
    return _pack_header(MAGIC, FRAMING_VERSION, OPCODES[msg], flags, 0, 0, 0)[:12]


def _count(frame_bytes: int) -> bytes:
    return struct.pack("<II", frame_bytes - HEADER_BYTES, 1)


_COMMIT_HEAD: Final = _head(messages.Commit, 0)
_COMMIT_COUNT: Final = _count(COMMIT_ONE_BYTES)
_COMMIT_WANTS: Final = struct.pack("<HI", 0, 1)
_COMMITTED_HEAD: Final = _head(messages.Committed, _REPLY)
_COMMITTED_NONE_COUNT: Final = _count(_COMMITTED_NONE.size)
_COMMITTED_ONE_COUNT: Final = _count(COMMITTED_ONE_BYTES)
_ONE: Final = struct.pack("<I", 1)
_OP_COMMIT: Final = OPCODES[messages.Commit]
_OP_COMMITTED: Final = OPCODES[messages.Committed]
#: (entry, want, count, request id)
CommitOne = tuple[tuple[bytes, int, int, int, int, int], int, int, int]
#: (status, grant)
CommittedOne = tuple[int, tuple[int, int, int] | None]


def encode_commit_one(
    digest: bytes, grant: int, length: int, crc: int, flags: int, want: int, count: int, request_id: int = 0
) -> bytes:
    """``encode(Commit([(digest, grant, length, crc, flags, 0)], [(want, count)]), request_id)``."""
    return _COMMIT_ONE.pack(
        _COMMIT_HEAD, request_id, _COMMIT_COUNT, digest, grant, length, crc, flags, _COMMIT_WANTS, want, count
    )


def parse_commit_one(buf: bytes | memoryview, at: int = 0) -> CommitOne | None:
    """(entry, want, count, request id) of a COMMIT frame of that shape at ``at``; None for any other.

    There must be COMMIT_ONE_BYTES from ``at`` on. Each byte is read once, so they may change meanwhile.
    """
    head, request_id, entries, digest, grant, length, crc, flags, wants, want, count = _COMMIT_ONE.unpack_from(buf, at)
    if entries != _COMMIT_COUNT or head != _COMMIT_HEAD or wants != _COMMIT_WANTS:
        return None
    return (digest, grant, length, crc, flags, 0), want, count, request_id


def reply_committed_one(status: int, request_id: int, grants: list[tuple[int, int, int]]) -> bytes:
    """``reply(Committed([status], grants), request_id)``."""
    if not grants:
        return _COMMITTED_NONE.pack(_COMMITTED_HEAD, request_id, _COMMITTED_NONE_COUNT, status, 0)
    if len(grants) == 1:
        return _COMMITTED_ONE.pack(_COMMITTED_HEAD, request_id, _COMMITTED_ONE_COUNT, status, 1, *grants[0])
    return reply(messages.Committed([status], grants), request_id)


def parse_committed_one(buf: bytes | memoryview, at: int = 0) -> CommittedOne | None:
    """(status, grant or None) of a COMMITTED frame of one status and at most one grant at ``at``; None for any other.

    There must be COMMITTED_ONE_BYTES from ``at`` on, whether the frame fills them or not.
    """
    head, _, statuses, status, grants, grant, offset, chunk = _COMMITTED_ONE.unpack_from(buf, at)
    if head != _COMMITTED_HEAD:
        return None
    if statuses == _COMMITTED_ONE_COUNT and grants == 1:
        return status, (grant, offset, chunk)
    if statuses == _COMMITTED_NONE_COUNT and grants == 0:
        return status, None
    return None


def commit_one_of(frame: Frame) -> CommitOne | None:
    """:func:`parse_commit_one` of a frame that came by socket."""
    if frame.opcode != _OP_COMMIT or len(frame.body) != COMMIT_ONE_BODY_BYTES:
        return None
    entries, digest, grant, length, crc, flags, wants, want, count = _COMMIT_ONE_BODY.unpack(frame.body)
    if entries != _ONE or wants != _COMMIT_WANTS:
        return None
    return (digest, grant, length, crc, flags, 0), want, count, frame.request_id


def committed_one_of(frame: Frame) -> CommittedOne | None:
    """:func:`parse_committed_one` of a frame that came by socket, with a grant; None for one without, too."""
    if frame.opcode != _OP_COMMITTED or len(frame.body) != COMMITTED_ONE_BODY_BYTES:
        return None
    statuses, status, grants, grant, offset, chunk = _COMMITTED_ONE_BODY.unpack(frame.body)
    return (status, (grant, offset, chunk)) if statuses == _ONE and grants == 1 else None


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

"""Pack and parse requests of one key, and their answers, without the general codec.

A put of one value is one COMMIT of one entry and one want. Its answer has one status and at most one grant. A view is
one LOCATE of one key that pins it. These functions produce and accept the codec's bytes for these shapes, as a test
asserts. They take 0.3 us each where the codec takes 1.6 to 2.5, four times in a round trip (``python -m simm bench``
measures the whole put).

The constant bytes of a frame are compared as one, so a frame of any other shape is left to the codec.
"""

from __future__ import annotations

import struct
from typing import Final

from ..constants import DIGEST_BYTES
from ..rpc import FRAMING_VERSION, HEADER, HEADER_BYTES, MAGIC, OPCODES, Flag, Frame, reply
from .messages import LOCATE_PIN, Commit, Committed, Locate, Located

#: frame head, request id, body bytes and entries, [digest, grant, length, crc, flags], 0 and wants, [size, count]
_COMMIT_ONE: Final = struct.Struct("<12sQ8s" + "16sQIIH" + "8s" + "II")
#: frame head, request id, body bytes and statuses, status, grants, [grant, offset, chunk]
_COMMITTED_NONE: Final = struct.Struct("<12sQ8s" + "BI")
_COMMITTED_ONE: Final = struct.Struct("<12sQ8s" + "BI" + "QQI")
COMMIT_ONE_BYTES: Final = _COMMIT_ONE.size
COMMITTED_ONE_BYTES: Final = _COMMITTED_ONE.size

#: The bodies alone, of frames that a :class:`~simm.rpc.Connection` has parsed.
_COMMIT_ONE_BODY: Final = struct.Struct("<4s" + "16sQIIH" + "8s" + "II")
_COMMITTED_ONE_BODY: Final = struct.Struct("<4s" + "BI" + "QQI")
_COMMIT_ONE_BODY_BYTES: Final = COMMIT_ONE_BYTES - HEADER_BYTES
_COMMITTED_ONE_BODY_BYTES: Final = COMMITTED_ONE_BYTES - HEADER_BYTES
assert (_COMMIT_ONE_BODY.size, _COMMITTED_ONE_BODY.size) == (_COMMIT_ONE_BODY_BYTES, _COMMITTED_ONE_BODY_BYTES)


def _head(msg: type, flags: int) -> bytes:
    return HEADER.pack(MAGIC, FRAMING_VERSION, OPCODES[msg], flags, 0, 0, 0)[:12]


def _count(frame_bytes: int) -> bytes:
    return struct.pack("<II", frame_bytes - HEADER_BYTES, 1)


_COMMIT_HEAD: Final = _head(Commit, 0)
_COMMIT_COUNT: Final = _count(COMMIT_ONE_BYTES)
_COMMIT_WANTS: Final = struct.pack("<II", 0, 1)
_COMMITTED_HEAD: Final = _head(Committed, Flag.REPLY)
_COMMITTED_NONE_COUNT: Final = _count(_COMMITTED_NONE.size)
_COMMITTED_ONE_COUNT: Final = _count(COMMITTED_ONE_BYTES)
_ONE: Final = struct.pack("<I", 1)
_OP_COMMIT: Final = OPCODES[Commit]
_OP_COMMITTED: Final = OPCODES[Committed]
#: (entry, want, count, request id)
CommitOne = tuple[tuple[bytes, int, int, int, int, int], int, int, int]
#: (status, grant)
CommittedOne = tuple[int, tuple[int, int, int] | None]


def encode_commit_one(
    digest: bytes, grant: int, length: int, crc: int, flags: int, want: int, count: int, request_id: int = 0
) -> bytes:
    """Return ``encode(Commit([(digest, grant, length, crc, flags, 0)], [(want, count)]), request_id)``."""
    return _COMMIT_ONE.pack(
        _COMMIT_HEAD, request_id, _COMMIT_COUNT, digest, grant, length, crc, flags, _COMMIT_WANTS, want, count
    )


def parse_commit_one(buf: bytes | memoryview, at: int = 0) -> CommitOne | None:
    """Return (entry, want, count, request id) of the COMMIT of one key at ``at``, None for any other frame.

    The buffer must have COMMIT_ONE_BYTES from ``at`` on. Each byte is read once, so the writer may change them
    meanwhile.
    """
    head, request_id, entries, digest, grant, length, crc, flags, wants, want, count = _COMMIT_ONE.unpack_from(buf, at)
    if entries != _COMMIT_COUNT or head != _COMMIT_HEAD or wants != _COMMIT_WANTS:
        return None
    return (digest, grant, length, crc, flags, 0), want, count, request_id


def reply_committed_one(status: int, request_id: int, grants: list[tuple[int, int, int]]) -> bytes:
    """Return ``reply(Committed([status], grants), request_id)``."""
    if not grants:
        return _COMMITTED_NONE.pack(_COMMITTED_HEAD, request_id, _COMMITTED_NONE_COUNT, status, 0)
    if len(grants) == 1:
        return _COMMITTED_ONE.pack(_COMMITTED_HEAD, request_id, _COMMITTED_ONE_COUNT, status, 1, *grants[0])
    return reply(Committed([status], grants), request_id)


def parse_committed_one(buf: bytes | memoryview, at: int = 0) -> CommittedOne | None:
    """Return (status, grant or None) of the COMMITTED at ``at``, None if it has more statuses or grants.

    The buffer must have COMMITTED_ONE_BYTES from ``at`` on, whether the frame fills them or not.
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
    """Return :func:`parse_commit_one` of a frame that came by socket."""
    if frame.opcode != _OP_COMMIT or len(frame.body) != _COMMIT_ONE_BODY_BYTES:
        return None
    entries, digest, grant, length, crc, flags, wants, want, count = _COMMIT_ONE_BODY.unpack(frame.body)
    if entries != _ONE or wants != _COMMIT_WANTS:
        return None
    return (digest, grant, length, crc, flags, 0), want, count, frame.request_id


def committed_one_of(frame: Frame) -> CommittedOne | None:
    """Return :func:`parse_committed_one` of a frame that came by socket. Without a grant it is left to the codec."""
    if frame.opcode != _OP_COMMITTED or len(frame.body) != _COMMITTED_ONE_BODY_BYTES:
        return None
    statuses, status, grants, grant, offset, chunk = _COMMITTED_ONE_BODY.unpack(frame.body)
    return (status, (grant, offset, chunk)) if statuses == _ONE and grants == 1 else None


#: frame head, request id, body bytes, pin and digests, digest
_PIN_ONE: Final = struct.Struct("<12sQ9s" + "16s")
#: frame head, request id, body bytes and entries, [status, flags, length, crc, offset, pin]
_LOCATED_ONE: Final = struct.Struct("<12sQ8s" + "BHIIQQ")
LOCATED_ONE_BYTES: Final = _LOCATED_ONE.size
_PIN_HEAD: Final = _head(Locate, 0)
_PIN_COUNT: Final = struct.pack("<IBI", _PIN_ONE.size - HEADER_BYTES, LOCATE_PIN, 1)
_PIN_BODY_HEAD: Final = _PIN_COUNT[4:]
_PIN_BODY_BYTES: Final = _PIN_ONE.size - HEADER_BYTES
_LOCATED_HEAD: Final = _head(Located, Flag.REPLY)
_LOCATED_COUNT: Final = _count(LOCATED_ONE_BYTES)
_OP_LOCATE: Final = OPCODES[Locate]
#: (status, flags, length, crc, offset, pin)
LocatedOne = tuple[int, int, int, int, int, int]


def encode_pin_one(digest: bytes, request_id: int = 0) -> bytes:
    """Return ``encode(Locate(LOCATE_PIN, [digest]), request_id)``."""
    return _PIN_ONE.pack(_PIN_HEAD, request_id, _PIN_COUNT, digest)


def pin_one_of(frame: Frame) -> bytes | None:
    """Return the digest of a LOCATE that pins one key, None for any other frame."""
    body = frame.body
    if frame.opcode != _OP_LOCATE or len(body) != _PIN_BODY_BYTES or not body.startswith(_PIN_BODY_HEAD):
        return None
    return body[-DIGEST_BYTES:]


def reply_located_one(found: LocatedOne, request_id: int) -> bytes:
    """Return ``reply(Located([found]), request_id)``."""
    return _LOCATED_ONE.pack(_LOCATED_HEAD, request_id, _LOCATED_COUNT, *found)


def parse_located_one(buf: bytes | memoryview, at: int = 0) -> LocatedOne | None:
    """Return the one entry of the LOCATED at ``at``, None for any other frame.

    The buffer must have LOCATED_ONE_BYTES from ``at`` on, whether the frame fills them or not.
    """
    head, _, entries, status, flags, length, crc, offset, pin = _LOCATED_ONE.unpack_from(buf, at)
    if entries != _LOCATED_COUNT or head != _LOCATED_HEAD:
        return None
    return status, flags, length, crc, offset, pin

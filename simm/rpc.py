"""Pack messages into frames and parse frames from bytes, without any I/O.

``wire/messages.py`` lists the messages and registers them here; docs/protocol.md specifies the bytes, and a test holds
its tables against both modules. A :class:`Connection` follows h11's design: its owner feeds it the bytes that arrive,
and takes frames out. Both ends of a socket use the same class.

Failure modes of a binary protocol, and the mitigations:

* *Writer and reader disagree on the fields.* One format string per message serves both directions. It is checked
  against the field names at import.
* *A wrong length.* The body length is checked against a cap before any byte of the body is kept. Each string and list
  is checked against the bytes left. A body must be consumed to its last byte.
* *Too much work.* A frame has room for 65,000 keys, which would hold a worker for a quarter of a second. Each list has
  ``BATCH_KEYS_MAX`` items at most, unless its message says how many. Senders split longer ones (:func:`batches`).
* *Another program or version.* Every header starts with a magic and the framing version. HELLO and WELCOME settle the
  protocol version.
* *A number that changes its meaning.* Opcodes and statuses are never reused.

Malformed input raises :class:`RemoteProtocolError` and nothing else. The connection is then unusable; its owner
closes it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from itertools import starmap
from typing import Any, Final, NamedTuple, TypeVar

from .constants import BATCH_KEYS_MAX, FRAME_BYTES_MAX
from .errors import LocalProtocolError, RemoteProtocolError

# --- codecs: one format string packs and unpacks a message ------------------------------------
#
#   B H I Q 16s   a struct code; one Struct packs all leading ones
#   s             UTF-8 text after a u16 length
#   b             bytes after a u32 length
#   *CODES        u32 count, then that many fixed records (tuples; plain values for a single code)
#   [Name]        u16 count, then that many of the structure Name
#
# A list, of either kind, has no more items than its codec allows.
#
# All little-endian, without padding.

_U16 = struct.Struct("<H")
_U32 = struct.Struct("<I")

_Item = TypeVar("_Item")
_Message = TypeVar("_Message", bound=type)
_Writer = Callable[[Any], bytes]
_Reader = Callable[[bytes, int], tuple[Any, int]]


def _write_text(value: str) -> bytes:
    raw = value.encode("utf-8")
    if len(raw) > 0xFFFF:
        raise LocalProtocolError(f"text of {len(raw)} bytes does not fit a 16-bit length")
    return _U16.pack(len(raw)) + raw


def _read_text(body: bytes, at: int) -> tuple[str, int]:
    (size,) = _U16.unpack_from(body, at)
    end = at + 2 + size
    if end > len(body):
        raise RemoteProtocolError(f"text of {size} bytes runs past the end of the message")
    return body[at + 2 : end].decode("utf-8"), end


def _write_bytes(value: bytes) -> bytes:
    return _U32.pack(len(value)) + value


def _read_bytes(body: bytes, at: int) -> tuple[bytes, int]:
    (size,) = _U32.unpack_from(body, at)
    end = at + 4 + size
    if end > len(body):
        raise RemoteProtocolError(f"{size} bytes run past the end of the message")
    return body[at + 4 : end], end


def _write_octets(value: Any) -> bytes:
    try:
        return _U32.pack(len(value)) + bytes(list(value))
    except ValueError as exc:
        raise LocalProtocolError(f"{value!r} do not fit a byte each: {exc}") from exc


def _read_octets(body: bytes, at: int) -> tuple[list[int], int]:
    (count,) = _U32.unpack_from(body, at)
    at += 4
    end = at + count
    if end > len(body):
        raise RemoteProtocolError(f"{count} records of 1 bytes run past the end of the message")
    return list(body[at:end]), end


def _records(codes: str) -> tuple[_Writer, _Reader]:
    record = struct.Struct("<" + codes)
    single = len(record.unpack(bytes(record.size))) == 1
    pack, size = record.pack, record.size
    if codes == "B":
        return _write_octets, _read_octets  # statuses: a bytes object packs them five times as fast

    def write(value: Any) -> bytes:
        return _U32.pack(len(value)) + b"".join(map(pack, value) if single else starmap(pack, value))

    def read(body: bytes, at: int) -> tuple[list[Any], int]:
        (count,) = _U32.unpack_from(body, at)
        at += 4
        end = at + count * size
        if end > len(body):
            raise RemoteProtocolError(f"{count} records of {size} bytes run past the end of the message")
        rows = record.iter_unpack(body[at:end])
        return ([row[0] for row in rows] if single else list(rows)), end

    return write, read


def _structures(name: str) -> tuple[_Writer, _Reader]:
    codec = STRUCTURES[name]

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


def _fixed(code: str) -> tuple[_Writer, _Reader]:
    """A fixed field behind a variable one."""
    field = struct.Struct("<" + code)

    def read(body: bytes, at: int) -> tuple[Any, int]:
        return field.unpack_from(body, at)[0], at + field.size

    return field.pack, read


def _list(token: str, name: str, most: int) -> tuple[_Writer, _Reader]:
    """A list of at most ``most`` items. ``name``: what it is called in an error."""
    inner_write, inner_read = _records(token[1:]) if token[0] == "*" else _structures(token[1:-1])
    length = _U32 if token[0] == "*" else _U16

    def write(value: Any) -> bytes:
        if len(value) > most:
            raise LocalProtocolError(f"{name} has {len(value)} items, at most {most} are allowed")
        return inner_write(value)

    def read(body: bytes, at: int) -> tuple[Any, int]:
        (count,) = length.unpack_from(body, at)
        if count > most:
            raise RemoteProtocolError(f"{name} has {count} items, at most {most} are allowed")
        return inner_read(body, at)

    return write, read


def _field(token: str) -> tuple[_Writer, _Reader]:
    if token == "s":
        return _write_text, _read_text
    if token == "b":
        return _write_bytes, _read_bytes
    return _fixed(token)


class Codec:
    """Pack and unpack one message type by its format string.

    ``most``: items of a list, by the name of its field; others have ``BATCH_KEYS_MAX`` at most.
    """

    def __init__(self, cls: Any, layout: str, **most: int) -> None:
        tokens = layout.split()
        if len(tokens) != len(cls._fields):
            raise LocalProtocolError(f"{cls.__name__}: {len(tokens)} codes for {len(cls._fields)} fields")
        #: The most items of each list, by the name of its field.
        self.most = {
            name: most.get(name, BATCH_KEYS_MAX) for name, token in zip(cls._fields, tokens) if token[0] in "*["
        }
        if not most.keys() <= self.most.keys():
            raise LocalProtocolError(f"{cls.__name__} has no list {sorted(most.keys() - self.most.keys())}")
        fixed = 0
        while fixed < len(tokens) and tokens[fixed][0] not in "sb*[":
            fixed += 1
        self.cls = cls
        self.layout = layout
        self._head = struct.Struct("<" + "".join(tokens[:fixed]))
        self._head_fields = fixed
        self._tail = [
            _list(token, f"{cls.__name__}.{name}", self.most[name]) if name in self.most else _field(token)
            for name, token in zip(cls._fields[fixed:], tokens[fixed:])
        ]

    def write(self, message: Any) -> bytes:
        """Return the message's body. Raise LocalProtocolError for values that do not fit."""
        split = self._head_fields
        try:
            out = self._head.pack(*message[:split])
            for (write, _), value in zip(self._tail, message[split:]):
                out += write(value)
        except (struct.error, TypeError, AttributeError, UnicodeEncodeError) as exc:
            raise LocalProtocolError(f"{self.cls.__name__} cannot be packed: {exc}") from exc
        return out

    def read(self, body: bytes, at: int = 0) -> tuple[Any, int]:
        """Return the message that starts at ``at``, and its end."""
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
        """Return the message that fills ``body`` to its last byte."""
        message, end = self.read(body)
        if end != len(body):
            raise RemoteProtocolError(f"{self.cls.__name__} has {len(body) - end} bytes too many")
        return message


#: Codecs by opcode, opcodes by type, codecs of structures by name.
CODECS: dict[int, Codec] = {}
OPCODES: dict[type, int] = {}
STRUCTURES: dict[str, Codec] = {}


def message(opcode: int, layout: str, **most: int) -> Callable[[_Message], _Message]:
    """Register a NamedTuple as the message with this opcode (class decorator). ``most`` as in :class:`Codec`."""

    def register(cls: _Message) -> _Message:
        if opcode in CODECS:
            raise LocalProtocolError(f"opcode {opcode:#x} is taken by {CODECS[opcode].cls.__name__}")
        OPCODES[cls] = opcode
        CODECS[opcode] = Codec(cls, layout, **most)
        return cls

    return register


def structure(layout: str) -> Callable[[_Message], _Message]:
    """Register a NamedTuple that occurs only inside messages (class decorator)."""

    def register(cls: _Message) -> _Message:
        STRUCTURES[cls.__name__] = Codec(cls, layout)
        return cls

    return register


def batches(items: Sequence[_Item]) -> Iterator[list[_Item]]:
    """Yield the items of a list, in their order, in parts that fit a message each."""
    for start in range(0, len(items), BATCH_KEYS_MAX):
        yield list(items[start : start + BATCH_KEYS_MAX])


# --- frames -----------------------------------------------------------------------------------

MAGIC: Final = int.from_bytes(b"SiMM", "little")
FRAMING_VERSION: Final = 1

# off size field
#   0    4 magic        "SiMM"
#   4    2 version      of the framing; another one is refused
#   6    2 opcode
#   8    2 flags        see Flag
#  10    2 status       see wire/messages.py; 0 in requests
#  12    8 request_id   chosen by the requester, echoed in the reply; 0 for pushes
#  20    4 body_bytes   <= FRAME_BYTES_MAX
HEADER: Final = struct.Struct("<IHHHHQI")
HEADER_BYTES: Final = HEADER.size
#: Where the status begins. It is 0 in a request, but for one in a ring that its client has withdrawn.
STATUS_AT: Final = 10
assert HEADER_BYTES == 24
_pack_header = HEADER.pack
_unpack_header = HEADER.unpack_from


class Flag:
    """Bits of the header's flags field."""

    REPLY: Final = 1
    PUSH: Final = 2


_FLAGS_KNOWN: Final = Flag.REPLY | Flag.PUSH


class Frame(NamedTuple):
    """One whole frame. ``body`` is a copy, so it outlives the receive buffer."""

    opcode: int
    flags: int
    status: int
    request_id: int
    body: bytes


def encode(msg: Any, request_id: int = 0, *, status: int = 0, flags: int = 0) -> bytes:
    """Return a message as a whole frame. Raise LocalProtocolError for values that do not fit."""
    opcode = OPCODES.get(type(msg))
    if opcode is None:
        raise LocalProtocolError(f"{type(msg).__name__} is not a message")
    body = CODECS[opcode].write(msg)
    if len(body) > FRAME_BYTES_MAX:
        raise LocalProtocolError(f"{type(msg).__name__} of {len(body)} bytes exceeds {FRAME_BYTES_MAX}")
    return _pack_header(MAGIC, FRAMING_VERSION, opcode, flags, status, request_id, len(body)) + body


class Encoded:
    """A message that is sent again and again: it is encoded once, and all frames share its body.

    Raises LocalProtocolError as :func:`encode` does.
    """

    __slots__ = ("_opcode", "body", "msg")

    def __init__(self, msg: Any) -> None:
        self.msg = msg
        #: What follows the header.
        self.body = encode(msg)[HEADER_BYTES:]
        self._opcode = OPCODES[type(msg)]

    def header(self, request_id: int = 0, *, flags: int = 0) -> bytes:
        """Return the header of a frame with this message; with :attr:`body` it is what :func:`encode` returns."""
        return _pack_header(MAGIC, FRAMING_VERSION, self._opcode, flags, 0, request_id, len(self.body))


def reply(msg: Any, request_id: int, status: int = 0) -> bytes:
    """Return a message as a whole reply frame."""
    return encode(msg, request_id, status=status, flags=Flag.REPLY)


def decode(frame: Frame) -> Any:
    """Return the message in a frame. Raise RemoteProtocolError for an unknown opcode or a malformed body."""
    codec = CODECS.get(frame.opcode)
    if codec is None:
        raise RemoteProtocolError(f"unknown opcode {frame.opcode:#x}")
    return codec.decode(frame.body)


def parse_header(buf: bytes | bytearray | memoryview, at: int = 0) -> tuple[int, int, int, int, int]:
    """Check a header and return (opcode, flags, status, request id, body bytes). Raise RemoteProtocolError."""
    magic, version, opcode, flags, status, request_id, size = _unpack_header(buf, at)
    if magic != MAGIC:
        raise RemoteProtocolError(_foreign(magic & 0xFF, f"the frame starts with {magic:#010x}; "))
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


def _foreign(first: int, detail: str = "") -> str:
    """Return what is wrong with a peer whose first byte this is. 21 and 22 begin an alert and a handshake of TLS."""
    hint = " It speaks TLS, and this side does not: see --tls-cert and --tls-ca" if first in (21, 22) else ""
    return f"not a SiMM peer: {detail}is this the right port?{hint}"


class Connection:
    """Frames of one connection, parsed from bytes without I/O.

    >>> conn = Connection()
    >>> conn.receive_data(encode(Ping(7), 1))
    >>> decode(conn.next_frame())
    Ping(cookie=7)

    The unparsed input stays below the cap of one frame plus the bytes of one ``receive_data``, as callers parse before
    they read on. After an error every call raises it again.
    """

    __slots__ = ("_at", "_buf", "_error", "body_max")

    def __init__(self) -> None:
        self._buf = bytearray()
        self._at = 0
        #: The most bytes of a body that are accepted.
        self.body_max = FRAME_BYTES_MAX
        #: Text of the error, empty without one. The exception itself would keep its traceback's frames alive.
        self._error = ""

    def receive_data(self, data: bytes | bytearray | memoryview) -> None:
        """Append bytes that arrived. O(len(data)) amortised."""
        if self._error:
            raise RemoteProtocolError(self._error)
        if self._at:
            del self._buf[: self._at]
            self._at = 0
        self._buf += data

    def next_frame(self) -> Frame | None:
        """Return the next whole frame, or None until more bytes arrive. Raise RemoteProtocolError."""
        if self._error:
            raise RemoteProtocolError(self._error)
        buf, at = self._buf, self._at
        have = len(buf) - at
        if have < HEADER_BYTES:
            if have and buf[at : at + 4] != b"SiMM"[: min(have, 4)]:
                # Fail at the first wrong byte: a foreign client may wait for an answer and never send 24.
                self._fail(_foreign(buf[at]))
            return None
        try:
            opcode, flags, status, request_id, size = parse_header(buf, at)
        except RemoteProtocolError as exc:
            self._error = str(exc)
            raise
        if size > self.body_max:
            self._fail(f"a body of {size} bytes where {self.body_max} are allowed: the first message must be HELLO")
        end = at + HEADER_BYTES + size
        if len(buf) < end:
            return None
        self._at = end
        return Frame(opcode, flags, status, request_id, bytes(buf[at + HEADER_BYTES : end]))

    def take(self, most: int) -> bytes:
        """Remove and return at most ``most`` unparsed bytes, as bulk data."""
        end = min(self._at + most, len(self._buf))
        data = bytes(self._buf[self._at : end])
        self._at = end
        return data

    @property
    def pending_bytes(self) -> int:
        """Bytes received but not yet parsed."""
        return len(self._buf) - self._at

    def at_eof(self) -> None:
        """Note that the peer closed. Raise RemoteProtocolError if that was in the middle of a frame."""
        if not self._error and self.pending_bytes:
            self._fail(f"the peer closed {self.pending_bytes} bytes into a frame")

    def _fail(self, text: str) -> None:
        self._error = text
        raise RemoteProtocolError(text)

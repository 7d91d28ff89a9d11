"""Message codecs: one format string packs and unpacks a message.

    B H I Q 16s   a struct code; leading ones are packed by one Struct
    s             UTF-8 text, u16 length ahead
    b             bytes, u32 length ahead
    *CODES        u32 count, then that many fixed records (tuples; plain values for one code)
    [Name]        u16 count, then that many of the structure Name

All little-endian, no padding. A format is checked against its field names at import, so the
two cannot drift apart. Malformed input raises RemoteProtocolError and nothing else.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, TypeVar

from .errors import LocalProtocolError, RemoteProtocolError

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
    if codes == "B":
        return _octets_codec()

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


def _octets_codec() -> tuple[_Writer, _Reader]:
    """``*B``, a status for each key: as bytes, 0.02 us each instead of 0.1."""

    def write(value: Any) -> bytes:
        try:
            return _U32.pack(len(value)) + bytes(list(value))
        except ValueError as exc:
            raise LocalProtocolError(f"{value!r} are no bytes: {exc}") from exc

    def read(body: bytes, at: int) -> tuple[list[int], int]:
        (count,) = _U32.unpack_from(body, at)
        at += 4
        end = at + count
        if end > len(body):
            raise RemoteProtocolError(f"{count} records of 1 bytes run past the end of the message")
        return list(body[at:end]), end

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
        except (struct.error, TypeError, AttributeError, UnicodeEncodeError) as exc:
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


#: By opcode, and the opcode by type.
CODECS: dict[int, Codec] = {}
OPCODES: dict[type, int] = {}
_STRUCTURES: dict[str, Codec] = {}


def message(opcode: int, layout: str) -> Callable[[_Message], _Message]:
    """Class decorator: register a NamedTuple as the message with this opcode."""

    def register(cls: _Message) -> _Message:
        if opcode in CODECS:
            raise LocalProtocolError(f"opcode {opcode:#x} is taken by {CODECS[opcode].cls.__name__}")
        OPCODES[cls] = opcode
        CODECS[opcode] = Codec(cls, layout)
        return cls

    return register


def structure(layout: str) -> Callable[[_Message], _Message]:
    """Class decorator: register a NamedTuple that only occurs inside messages."""

    def register(cls: _Message) -> _Message:
        _STRUCTURES[cls.__name__] = Codec(cls, layout)
        return cls

    return register

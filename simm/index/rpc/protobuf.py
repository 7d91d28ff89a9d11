"""The messages of llm-d's gRPC interface ``indexer.v1``, in protobuf's encoding, and what is added to them for tokens.

    message GetPodScoresRequest {            message GetPodScoresResponse { repeated PodScore scores = 1; }
      string prompt = 1;                     message PodScore {
      string model_name = 2;                   string pod = 1;
      repeated string pod_identifiers = 3;     double score = 2;
      // Ours, with numbers far from llm-d's   optional int32 data_parallel_rank = 3;   // never set here
      repeated uint32 token_ids = 1000;      }
      uint32 block_size = 1001;
      string lora_name = 1002;
      string tenant_id = 1003;
      string cache_salt = 1004;
    }

A field is a key, its number times 8 and its wire type, and a value. Integers are *varints*: 7 bits a byte, the lowest
first, the top bit set in all but the last. Unknown fields are skipped. Of fields that are no list the last one counts.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ...errors import UsageError
from ..events import TOKENS_MAX

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED: Final = {_FIXED64: 8, _FIXED32: 4}
_VARINT_BYTES: Final = 10
_NUMBER_MAX: Final = (1 << 29) - 1
#: Fields of a request: one for each pod, and one for each token where they are not packed. Each takes microseconds.
_FIELDS_MAX: Final = 1 << 17
_TEXTS: Final = {1: "prompt", 2: "model", 1002: "lora_name", 1003: "tenant_id", 1004: "cache_salt"}
_PODS, _TOKENS, _BLOCK_SIZE = 3, 1000, 1001
_UINT32_BYTES: Final = 5

#: A number, or a part of the message.
_Value = int | memoryview


def _varint(raw: memoryview, at: int) -> tuple[int, int]:
    """Return a varint and the position behind it. Raises UsageError."""
    value = 0
    for count in range(_VARINT_BYTES):
        if at + count >= len(raw):
            raise UsageError("the message is cut short")
        byte = raw[at + count]
        value |= (byte & 0x7F) << (7 * count)
        if byte < 0x80:
            if value >> 64:
                break
            return value, at + count + 1
    raise UsageError("the message has a number of more than 64 bits")


def fields(raw: memoryview) -> Iterator[tuple[int, int, _Value]]:
    """Yield the fields of a message: number, wire type, value. O(bytes). Raises UsageError for what is none."""
    at, count = 0, 0
    while at < len(raw):
        count += 1
        if count > _FIELDS_MAX:
            raise UsageError(f"the message has more than {_FIELDS_MAX} fields: pack token_ids")
        key, at = _varint(raw, at)
        number, kind = key >> 3, key & 7
        if not 0 < number <= _NUMBER_MAX:
            raise UsageError(f"the message has a field of the number {number}")
        if kind == _VARINT:
            value, at = _varint(raw, at)
            yield number, kind, value
            continue
        if kind == _BYTES:
            size, at = _varint(raw, at)
        elif kind in _FIXED:
            size = _FIXED[kind]
        else:
            raise UsageError(f"the message has a field of the wire type {kind}")
        if size > len(raw) - at:
            raise UsageError("the message is cut short")
        yield number, kind, raw[at : at + size]
        at += size


def packed(raw: memoryview) -> NDArray[np.uint64]:
    """Return the numbers below 2**32 of a packed list. O(bytes). Raises UsageError."""
    data = np.frombuffer(raw, np.uint8)
    ends = np.flatnonzero(data < 0x80)
    if not len(data):
        return np.zeros(0, np.uint64)
    if not len(ends) or ends[-1] != len(data) - 1:
        raise UsageError("token_ids are cut short")
    if len(ends) > TOKENS_MAX:
        raise UsageError(f"token_ids is a list of at most {TOKENS_MAX}")
    starts = np.concatenate((np.zeros(1, np.intp), ends[:-1] + 1))
    lengths = ends - starts + 1
    if lengths.max() > _UINT32_BYTES:
        raise UsageError("token ids are below 2**32")
    values = np.zeros(len(ends), np.uint64)
    for place in range(_UINT32_BYTES):
        longer = np.flatnonzero(lengths > place)
        values[longer] |= (data[starts[longer] + place] & np.uint8(0x7F)).astype(np.uint64) << np.uint64(7 * place)
    if values.max() >= 1 << 32:
        raise UsageError("token ids are below 2**32")
    return values


def question(raw: bytes) -> dict[str, Any]:
    """Return a GetPodScoresRequest as the body of a ``POST /score``. Raises UsageError."""
    body: dict[str, Any] = {}
    pods: list[str] = []
    parts: list[bytes] = []
    for number, kind, value in fields(memoryview(raw)):
        if number in _TEXTS:
            body[_TEXTS[number]] = _text(number, value)
        elif number == _PODS:
            pods.append(_text(number, value))
        elif number == _BLOCK_SIZE:
            body["block_size"] = _whole(number, kind, value)
        elif number == _TOKENS:
            # One list may come in several parts, packed and not. They are read at once, as there may be many.
            whole = isinstance(value, memoryview) and kind == _BYTES
            part = bytes(value) if whole else _put_varint(_whole(number, kind, value))
            if part and part[-1] >= 0x80:
                raise UsageError("token_ids are cut short")
            parts.append(part)
    tokens = packed(memoryview(b"".join(parts))).tolist()
    if body.pop("prompt", "") and not tokens:
        raise UsageError(f"this index has no tokenizer: send token_ids, field {_TOKENS}, not a prompt")
    return body | {"token_ids": tokens} | ({"pod_identifiers": pods} if pods else {})


def _text(number: int, value: _Value) -> str:
    try:
        if isinstance(value, memoryview):
            return str(value, "utf-8")
    except UnicodeDecodeError:
        pass
    raise UsageError(f"field {number} is no text in UTF-8")


def _whole(number: int, kind: int, value: _Value) -> int:
    if kind == _VARINT and isinstance(value, int) and value < 1 << 32:
        return value
    raise UsageError(f"field {number} is a number below 2**32")


def _put_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _put(number: int, body: bytes) -> bytes:
    return _put_varint(number << 3 | _BYTES) + _put_varint(len(body)) + body


def answer(scores: Iterable[tuple[str, float]]) -> bytes:
    """Return a GetPodScoresResponse of pods and their scores."""
    key = _put_varint(2 << 3 | _FIXED64)
    parts = (_put(1, pod.encode()) + key + struct.pack("<d", value) for pod, value in scores)
    return b"".join(_put(1, part) for part in parts)


__all__ = ["answer", "fields", "packed", "question"]

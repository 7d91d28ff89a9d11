"""One message of each type, from a seed."""

from __future__ import annotations

import random
import re
from typing import Any

from simm.rpc import CODECS, FRAMING_VERSION, HEADER, MAGIC, OPCODES, STRUCTURES, Codec
from simm.wire import admin_messages as admin_messages  # registers its message
from simm.wire import epoch_messages as epoch_messages  # registers its messages
from simm.wire import group_messages as group_messages  # likewise
from simm.wire import keep_messages as keep_messages  # likewise
from simm.wire import messages as messages  # likewise
from simm.wire import rdma_messages as rdma_messages  # likewise
from simm.wire import report_messages as report_messages  # likewise
from simm.wire import trace_messages as trace_messages  # likewise

TYPES = [CODECS[opcode].cls for opcode in sorted(CODECS)]
STRUCTURE_TYPES = {name: made.cls for name, made in STRUCTURES.items()}
UNSIGNED = {"B": 8, "H": 16, "I": 32, "Q": 64}


def lists_of(made: Codec) -> dict[str, str]:
    """The fields of a message or structure that are lists, with their codes."""
    return {name: code for name, code in zip(made.cls._fields, made.layout.split()) if code[0] in "*["}


def filled(cls: Any, field: str, count: int, rng: random.Random) -> Any:
    """A message of a type whose list ``field`` has so many items, and whose other lists are short."""
    msg = sample(cls, rng)
    return msg._replace(**{field: getattr(msg, field)[:1] * count})


def without_bounds(cls: Any) -> Codec:
    """A codec of a message or structure that takes lists of any length."""
    made = CODECS[OPCODES[cls]] if cls in OPCODES else STRUCTURES[cls.__name__]
    return Codec(cls, made.layout, **dict.fromkeys(lists_of(made), 1 << 32))


def long_frame(cls: Any, field: str, count: int, request_id: int, rng: random.Random) -> bytes:
    """A frame with a message as :func:`filled` makes it, of a sender that knows no bounds."""
    body = without_bounds(cls).write(filled(cls, field, count, rng))
    return HEADER.pack(MAGIC, FRAMING_VERSION, OPCODES[cls], 0, 0, request_id, len(body)) + body


def field_codes(codes: str) -> list[str]:
    return re.findall(r"\d+s|[BHIQ]", codes)


def sample(cls: Any, rng: random.Random) -> Any:
    """One message of a type, every list and text non-empty, from a seed."""

    def value(token: str) -> Any:
        if token in UNSIGNED:
            return rng.getrandbits(UNSIGNED[token])
        if re.fullmatch(r"\d+s", token):
            return rng.randbytes(int(token[:-1]))
        if token == "s":
            return "ä" + "".join(rng.choices("abc", k=rng.randint(1, 5)))
        if token == "b":
            return rng.randbytes(rng.randint(1, 9))
        if token[0] == "*":
            codes = field_codes(token[1:])
            rows = [tuple(value(code) for code in codes) for _ in range(rng.randint(1, 2))]
            return rows if len(codes) > 1 else [row[0] for row in rows]
        return [sample(STRUCTURE_TYPES[token[1:-1]], rng) for _ in range(rng.randint(1, 2))]

    made = CODECS[OPCODES[cls]] if cls in OPCODES else STRUCTURES[cls.__name__]
    return cls(*(value(token) for token in made.layout.split()))

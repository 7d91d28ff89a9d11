"""What LMCache's multi-process server sends to its coordinator, as of LMCache 0.5.6: bounded and checked.

The body of ``POST /events`` has batches. A batch has its sender, that process's number (its incarnation), the batch's
number in it from 1 on, what happened, where, and the keys to which it happened. A key names a part of a chunk: what one
rank of an engine, and one group of layers, has of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Annotated, Any, Final, NamedTuple

from ...errors import UsageError
from ...schemes.encodings import BLOCK_TOKENS_MAX
from ..events import TEXT_MAX, BadEvent
from ..libraries import msgspec
from ..sources import NO_INSTANCES

BATCHES_MAX: Final = 4096
#: Of a body. One has 150 bytes at least, so no server sends more in a body that is taken.
ENTRIES_MAX: Final = 1 << 16
SALT_MAX: Final = 128
BACKEND_MAX: Final = 64
HASH_BYTES_MAX: Final = 64
GROUPS_MAX: Final = 16
NUMBER_MAX: Final = (1 << 63) - 1

STORE: Final = "store"
DELETE: Final = "delete"
#: What changes no placement.
OTHERS: Final = ("access", "config")
TIERS: Final = ("l1", "l2")


def _text(most: int, least: int = 0) -> Any:
    return msgspec.Meta(min_length=least, max_length=most)


class Head(msgspec.Struct, gc=False):
    """A batch without its keys. Fields that decide nothing here are skipped."""

    instance_id: Annotated[str, _text(TEXT_MAX, 1)]
    incarnation: Annotated[int, msgspec.Meta(ge=0, le=NUMBER_MAX)]
    seq: Annotated[int, msgspec.Meta(ge=1, le=NUMBER_MAX)]
    event_type: Annotated[str, _text(32)]
    tier: Annotated[str, _text(8)]
    backend: Annotated[str, _text(BACKEND_MAX)]
    entries: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=ENTRIES_MAX)] = []
    shared: bool = False


class _Key(msgspec.Struct, gc=False):
    chunk_hash_hex: Annotated[str, _text(2 * HASH_BYTES_MAX, 2)]
    model_name: Annotated[str, _text(TEXT_MAX, 1)]
    kv_rank: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    object_group_id: Annotated[int, msgspec.Meta(ge=0, lt=GROUPS_MAX)] = 0
    cache_salt: Annotated[str, _text(SALT_MAX)] = ""


class _Entry(msgspec.Struct, gc=False):
    key: _Key
    token_ids: Annotated[list[int], msgspec.Meta(max_length=BLOCK_TOKENS_MAX)] = []


class _Body(msgspec.Struct, gc=False):
    batches: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=BATCHES_MAX)] = []


class Batch(NamedTuple):
    """A batch, and the digest of its bytes."""

    head: Head
    digest: bytes


class Entry(NamedTuple):
    """A part of a chunk.

    Attributes:
        world: ranks that each have a part of the chunk.
        tokens: how many the chunk has; 0 where the event has none.
    """

    digest: bytes
    model: str
    salt: str
    world: int
    rank: int
    group: int
    tokens: int


_body = msgspec.json.Decoder(_Body)
_head = msgspec.json.Decoder(Head)
_entry = msgspec.json.Decoder(_Entry)
_FAILURES: Final = (msgspec.MsgspecError, RecursionError, UnicodeError, ValueError)


def batches(body: bytes) -> list[Batch]:
    """Return the batches of a body. Their keys are not decoded yet. O(bytes). Raises UsageError.

    A sender's name has no blanks around it, as in a registration.
    """
    found, left = [], ENTRIES_MAX
    try:
        for each in _body.decode(body).batches:
            raw = bytes(each)
            head = _head.decode(raw)
            head.instance_id = head.instance_id.strip()
            if not head.instance_id or head.instance_id.startswith(NO_INSTANCES):
                raise ValueError(f"no server has the instance_id {head.instance_id!r:.80}")
            left -= len(head.entries)
            if left < 0:
                raise ValueError(f"more than {ENTRIES_MAX} keys")
            found.append(Batch(head, blake2b(raw, digest_size=16).digest()))
    except _FAILURES as exc:
        raise UsageError(f"no batches of events: {exc}") from None
    return found


def entry(raw: Any) -> Entry | None:
    """Return a key of a batch; None for one that no engine asks for. Raises BadEvent if it cannot be read."""
    try:
        found = _entry.decode(raw)
        digest = bytes.fromhex(found.key.chunk_hash_hex)
    except _FAILURES as exc:
        raise BadEvent(f"no key: {exc}") from None
    key = found.key
    world, rank = key.kv_rank >> 24, key.kv_rank >> 16 & 0xFF
    # A look-up asks for ranks in this one form.
    if not digest or rank >= world or key.kv_rank & 0xFFFF != world << 8 | rank:
        return None
    return Entry(digest, key.model_name, key.cache_salt, world, rank, key.object_group_id, len(found.token_ids))


class Told(NamedTuple):
    """What a server says of itself when it registers."""

    instance: str
    address: str
    port: int


def told(body: Mapping[str, Any]) -> Told:
    """Return a registration; the instance is "" if the server leaves its name to the index. Raises UsageError."""
    instance, address, port = body.get("instance_id"), body.get("ip"), body.get("http_port")
    instance = "" if instance is None else instance
    if not isinstance(instance, str) or len(instance) > TEXT_MAX:
        raise UsageError(f"instance_id is a text of at most {TEXT_MAX} characters")
    if not isinstance(address, str) or not 0 < len(address.strip()) <= TEXT_MAX:
        raise UsageError(f"ip is a text of 1 to {TEXT_MAX} characters")
    if type(port) is not int or not 0 < port < 1 << 16:
        raise UsageError(f"http_port is 1 to 65535, not {port!r:.40}")
    return Told(instance.strip(), address.strip(), port)

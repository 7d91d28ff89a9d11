"""What publishers say, in every form that they say it: vLLM, SGLang, LMCache through vLLM, and Mooncake's RFC 1527.

A message is MessagePack: an array of a time, a list of events, and a data-parallel rank. An event is a map with a
``type``, or with an ``event_type`` in RFC 1527, or an array that begins with the type. A message of maps is decoded at
once. If that fails, each event is decoded by itself, so a wrong one stops no other. Everything is bounded before it is
believed: sizes, depth, counts, types, ranges.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from typing import Annotated, Any, Final, NamedTuple, TypeAlias

from ..schemes.encodings import BLOCK_TOKENS_MAX
from .keys import token_bytes
from .libraries import msgspec

#: Bounds of a message, and of the events in it. vLLM tells each block that it evicts by an event of its own, all those
#: of a step in one message: as many blocks as a prompt of 2 million tokens has.
MESSAGE_BYTES_MAX: Final = 16 << 20
EVENTS_MAX: Final = 1 << 17
#: Of blocks, those of one event and of all of a message. SGLang tells all that it evicts at once by one event, and a
#: page can be one token.
BLOCKS_MAX: Final = 1 << 20
#: Of an event that is not cut, as any of its blocks may say what all others depend on.
WHOLE_MAX: Final = 1 << 16
#: Of an event's tokens, of its blocks that have extra keys, and of a text.
TOKENS_MAX: Final = 1 << 20
EXTRAS_MAX: Final = 1 << 16
TEXT_MAX: Final = 512
RANK_MAX: Final = 1 << 16
GROUPS_MAX: Final = 64
EXTRA_BYTES_MAX: Final = 4096
#: Parts of a message, and fields of an event in the array form: more than any publisher has.
_PARTS_MAX: Final = 64

_MASK: Final = (1 << 64) - 1
#: Of the objects of an event that waits for its parent, beside those of its blocks.
_STORED_BYTES: Final = 1200
_Hash = int | bytes
#: Numbers in one buffer, as numpy takes them without a look at each.
Hashes: TypeAlias = "array[int]"


class BadEvent(Exception):
    """An event, or a whole message, that cannot be believed. Its text says why."""


class Where(NamedTuple):
    """What an event says of its blocks beside their names. None where it says nothing, see ``Source.said`` for "".

    Attributes:
        salt: of a tenant or deployment; in vLLM only a prompt's first block has it.
        group: of a hybrid model's cache, and ``kind`` what that group keeps.
        owner: who holds the blocks, if not the publisher: vLLM's ``ownership``, RFC 1527's ``backend_id``.
        locality: LOCAL or REMOTE to the publisher.
    """

    medium: str | None = None
    model: str | None = None
    lora: str | None = None
    tenant: str | None = None
    salt: str | None = None
    rank: int | None = None
    group: int = 0
    kind: str | None = None
    owner: str | None = None
    locality: str | None = None


class Stored(NamedTuple):
    """Consecutive blocks of a prompt.

    Attributes:
        hashes: the publisher's names, unsigned 64 bits.
        tokens: of all blocks, 4 bytes each; None if the event has none.
        standard: the names are RFC 1527's rolling hashes.
        extras: for each block what it depends on beside tokens, adapter and salt; may be shorter.
        pairs: the blocks are of pairs of neighbouring tokens. ``tokens`` has the first of each, and ``extras`` begin
            with the token behind the block, as :func:`~simm.index.keys.pair_chain` hashes it.
        rest: a further part of an event that was cut (:func:`slices`).
        rooted: any part of one with tokens and without a parent: no copies (``Blocks._add_part``).
        whole: blocks and ``nbytes`` of all parts of an event that was cut; None of one that was not.
    """

    hashes: Hashes
    parent: int | None
    tokens: memoryview | None
    block_size: int | None
    where: Where
    standard: bool = False
    extras: tuple[bytes, ...] = ()
    pairs: bool = False
    rest: bool = False
    rooted: bool = False
    whole: tuple[int, int] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its tokens and extras, and about those of the objects that it is made of. O(blocks)."""
        return _STORED_BYTES + len(self.tokens or b"") + sum(map(len, self.extras)) + 256 * len(self.hashes)


class Removed(NamedTuple):
    """Blocks that are not there any more."""

    hashes: Hashes
    where: Where


class Cleared(NamedTuple):
    """No block is there any more."""

    where: Where


Event = Stored | Removed | Cleared


class Batch(NamedTuple):
    """A message: its events, its rank, and why others of its events were refused.

    Attributes:
        doubtful: one of those may have removed blocks.
        sure: how many events came before the last one that may have.
        whole: how many events came before the last one that was refused.
    """

    events: list[Event]
    rank: int | None
    refused: list[str]
    doubtful: bool = False
    sure: int = 0
    whole: int = 0


def _most(length: int) -> Any:
    """The most items of a list. They are counted before any of them is made."""
    return msgspec.Meta(max_length=length)


class _Map(msgspec.Struct, gc=False):
    """The fields of all map forms. Others are skipped."""

    type: str | None = None
    event_type: str | None = None
    block_hashes: Annotated[list[_Hash], _most(BLOCKS_MAX)] | None = None
    seq_hashes: Annotated[list[int], _most(BLOCKS_MAX)] | None = None
    parent_block_hash: _Hash | None = None
    parent_hash: int | None = None
    base_block_idx: int | None = None
    token_ids: Annotated[list[int], _most(TOKENS_MAX)] | None = None
    block_size: int | None = None
    lora_id: int | None = None
    lora_name: str | None = None
    medium: str | None = None
    extra_keys: Annotated[list[msgspec.Raw], _most(EXTRAS_MAX)] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    locality: str | None = None
    ownership: str | None = None
    cache_salt: str | None = None
    additional_salt: str | None = None
    model_name: str | None = None
    tenant_id: str | None = None
    backend_id: str | None = None
    dp_rank: int | None = None


class _MapOfPairs(_Map, gc=False):
    """The same with pairs of neighbouring tokens: what SGLang tells where it decodes with EAGLE."""

    token_ids: Annotated[list[tuple[int, int]], _most(TOKENS_MAX)] | None = None  # type: ignore[assignment]


#: What events have said of their blocks, as nearly all of a publisher say the same.
_PLACES_MAX: Final = 4096
_places: dict[tuple[str | int | None, ...], Where] = {}

#: Fields of the array forms, behind the type.
_ARRAYS: Final = {
    "BlockStored": (
        "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
        "group_idx", "kv_cache_spec_kind",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}  # fmt: skip
_STANDARD: Final = {"stored": "BlockStored", "removed": "BlockRemoved", "cleared": "AllBlocksCleared"}

_message = msgspec.msgpack.Decoder(Annotated[list[msgspec.Raw], _most(_PARTS_MAX)])
_events = msgspec.msgpack.Decoder(Annotated[list[msgspec.Raw], _most(EVENTS_MAX)])
_map = msgspec.msgpack.Decoder(_Map)
_map_of_pairs = msgspec.msgpack.Decoder(_MapOfPairs)
_maps = msgspec.msgpack.Decoder(Annotated[list[_Map], _most(EVENTS_MAX)])
_number = msgspec.msgpack.Decoder(int | float | None)
_FAILURES: Final = (msgspec.MsgspecError, RecursionError, MemoryError, ValueError, UnicodeError)


def _is_array(raw: Any) -> bool:
    first = memoryview(raw)[0]
    return first >> 4 == 9 or first in (0xDC, 0xDD)


def decode(payload: bytes | memoryview) -> Batch:
    """Return the events of a message. O(bytes). Raises BadEvent if it is none."""
    if len(payload) > MESSAGE_BYTES_MAX:
        raise BadEvent(f"a message of {len(payload)} bytes, {MESSAGE_BYTES_MAX} at most")
    try:
        parts = _message.decode(payload)
        if len(parts) < 2:
            raise BadEvent("a message has a time and events")
        _number.decode(parts[0])
        events = _all_maps(parts[1])
        raws = _events.decode(parts[1]) if events is None else ()
        rank = _number.decode(parts[2]) if len(parts) > 2 else None
    except _FAILURES as exc:
        raise BadEvent(f"no message: {exc}") from None
    if isinstance(rank, float) or (rank is not None and not 0 <= rank < RANK_MAX):
        raise BadEvent(f"{rank!r} is no rank")
    batch = Batch(events or [], rank, [])
    for raw in raws:
        count = len(batch.events)
        try:
            batch.events.append(_event(_fields(raw)))
        except BadEvent as exc:
            batch.refused.append(str(exc))
        except _FAILURES as exc:
            batch.refused.append(f"no event: {exc}")
        else:
            continue
        batch = batch._replace(whole=count)
        if any(name in bytes(raw) for name in (b"emoved", b"leared")):
            batch = batch._replace(doubtful=True, sure=count)
    if len(payload) > BLOCKS_MAX:  # a hash has a byte at least
        blocks = sum(len(each.hashes) for each in batch.events if not isinstance(each, Cleared))
        if blocks > BLOCKS_MAX:
            raise BadEvent(f"{blocks} blocks in a message, {BLOCKS_MAX} at most")
    return batch


def slices(
    events: Sequence[Event], most: int, *, block_size: int | None = None, gpu_only: bool = False
) -> list[list[Event]]:
    """Return events in their order in slices of at most so many blocks, and longer events in parts. O(events + bytes).

    An event whose tokens are not those of all its blocks is a slice of its own, as nobody adds its blocks.

    Args:
        most: blocks of a slice. An event that names none counts as one.
        block_size: tokens of a block, of events that do not tell.
        gpu_only: no event of another tier is cut that has tokens and no extras. Of vLLM's, any block may say what
            salt and images all others depend on. One of more than WHOLE_MAX blocks is cut without its tokens: it then
            counts for the blocks that are known.
    """
    found: list[list[Event]] = []
    left = 0
    for event in events:
        count = 1 if isinstance(event, Cleared) else max(1, len(event.hashes))
        if count > most and not isinstance(event, Cleared):
            found += [[part] for part in _parts(event, most, block_size, gpu_only)]
            left = 0
        elif count > left:
            found.append([event])
            left = most - count
        else:
            found[-1].append(event)
            left -= count
    return found


def _parts(event: Stored | Removed, most: int, block_size: int | None, gpu_only: bool) -> Iterator[Event]:
    """Yield an event in parts, each of which has the last block of the part before it as its parent."""
    names = event.hashes
    if isinstance(event, Removed):
        for at in range(0, len(names), most):
            yield event._replace(hashes=names[at : at + most])
        return
    tokens, step = event.tokens, 4 * (event.block_size or block_size or 0)
    rooted = tokens is not None and event.parent is None
    if tokens is not None and len(tokens) != step * len(names):
        yield event
        return
    if tokens is not None and gpu_only and not event.extras and (event.where.medium or "gpu").lower() != "gpu":
        if len(names) <= WHOLE_MAX:
            yield event
            return
        tokens, event = None, event._replace(standard=False)  # whose names are no keys, as with tokens
    if tokens is None:
        names = array("Q", dict.fromkeys(names))  # a name that comes again is no copy
    whole = len(names), event.nbytes + (len(names) - 1) // most * _STORED_BYTES
    for at in range(0, len(names), most):
        stop = at + most
        yield event._replace(
            hashes=names[at:stop], parent=names[at - 1] if at else event.parent, extras=event.extras[at:stop],
            # A copy: a part may wait for long, and must not keep the tokens of all others.
            tokens=None if tokens is None else memoryview(bytes(tokens[step * at : step * stop])),
            rest=at > 0, rooted=rooted, whole=whole,
        )  # fmt: skip


def _all_maps(raw: Any) -> list[Event] | None:
    """Return the events of a list that are all maps and can all be believed; None for others."""
    try:
        return [_event(fields) for fields in _maps.decode(raw)]
    except (BadEvent, *_FAILURES):
        return None


def _fields(raw: Any) -> _Map:
    """Return the fields of an event in either form. Raises BadEvent, and those of ``_FAILURES``."""
    if not _is_array(raw):
        return _map_of(raw)
    items = _message.decode(raw)
    name = msgspec.msgpack.decode(items[0], type=str) if items else ""
    fields = _ARRAYS.get(name)
    if fields is None:
        raise BadEvent(f"unknown event {name[:40]!r}")
    # Through the checks of the map form: one place knows the types. A newer publisher may append fields.
    pairs = dict(zip(fields, items[1:]))
    return _map_of(msgspec.msgpack.encode({"type": name, **pairs}))


def _map_of(raw: Any) -> _Map:
    try:
        return _map.decode(raw)
    except msgspec.ValidationError as exc:
        if "token_ids" not in str(exc):
            raise
        return _map_of_pairs.decode(raw)


def _event(fields: _Map) -> Event:
    name = fields.type or _STANDARD.get(fields.event_type or "")
    said = (
        fields.medium, fields.lora_name, fields.lora_id, fields.group_idx, fields.kv_cache_spec_kind, fields.cache_salt,
        fields.model_name, fields.tenant_id, fields.locality, fields.ownership, fields.backend_id, fields.dp_rank,
        fields.additional_salt,
    )  # fmt: skip
    where = _places.get(said)
    if where is None:
        if len(_places) >= _PLACES_MAX:
            _places.clear()
        where = _places[said] = _where(fields)
    if name == "AllBlocksCleared":
        return Cleared(where)
    if name not in ("BlockStored", "BlockRemoved"):
        raise BadEvent(f"unknown event {(fields.type or fields.event_type or '')[:40]!r}")
    standard = bool(fields.seq_hashes)
    given: Sequence[_Hash] = (fields.seq_hashes if standard else fields.block_hashes) or ()
    if not 0 < len(given) <= BLOCKS_MAX:
        raise BadEvent(f"{len(given)} blocks in an event, 1 to {BLOCKS_MAX} are allowed")
    hashes = _hashes(given)
    if name == "BlockRemoved":
        return Removed(hashes, where)
    size = fields.block_size
    if size == 0 and not fields.token_ids:
        size = None  # vLLM's offloading names a block so that it has told of before
    if size is not None and not 0 < size <= BLOCK_TOKENS_MAX:
        raise BadEvent(f"blocks of {size} tokens, 1 to {BLOCK_TOKENS_MAX} are allowed")
    tokens = None
    pairs = isinstance(fields, _MapOfPairs)
    behind: Sequence[bytes] = ()
    if fields.token_ids:
        if len(fields.token_ids) > TOKENS_MAX:
            raise BadEvent(f"{len(fields.token_ids)} tokens in an event, {TOKENS_MAX} at most")
        try:
            tokens, behind = _pairs(fields, len(hashes)) if pairs else (token_bytes(fields.token_ids), behind)
        except Exception as exc:
            raise BadEvent(str(exc)) from None
    parent = fields.parent_hash if standard else fields.parent_block_hash
    if standard and parent is None and fields.base_block_idx is None and tokens is not None:
        raise BadEvent("blocks that are nowhere in a prompt: neither parent_hash nor base_block_idx")
    extras: tuple[bytes, ...] = ()
    if fields.extra_keys:
        salt, extras = _extras(fields.extra_keys, where, parent is None)
        where = where if salt is None else where._replace(salt=salt)
    if behind:
        extras = tuple(map(bytes.__add__, behind, chain(extras, repeat(b""))))
    return Stored(hashes, None if parent is None else _hash(parent), tokens, size, where, standard, extras, pairs)


def _pairs(fields: _Map, blocks: int) -> tuple[memoryview, list[bytes]]:
    """Return the first token of each pair, and the token behind each block. Raises BadEvent, UsageError, TypeError.

    A block's last pair has the first token of the next block. So the block is another one if that differs.
    """
    given: Any = fields.token_ids
    step, rest = divmod(len(given), blocks)
    if rest:
        raise BadEvent(f"{len(given)} pairs of tokens are not those of {blocks} whole blocks")
    firsts, seconds = zip(*given)
    if firsts[1:] != seconds[:-1]:
        raise BadEvent("pairs of tokens that are no neighbours")
    ends = token_bytes(list(seconds[step - 1 :: step]))
    return token_bytes(list(firsts)), [bytes(ends[at : at + 4]) for at in range(0, len(ends), 4)]


def _hashes(given: Sequence[_Hash]) -> Hashes:
    """Return :func:`_hash` of each."""
    numbers: Any = given
    try:
        return array("Q", numbers)  # all of them in one call, where none is negative or bytes
    except (TypeError, OverflowError):
        return array("Q", [_hash(each) for each in given])


def _hash(value: _Hash) -> int:
    """Return a publisher's name of a block as an unsigned number: the last 8 bytes of a longer one."""
    if isinstance(value, bytes):
        if not 0 < len(value) <= 64:
            raise BadEvent(f"a block's hash of {len(value)} bytes")
        return int.from_bytes(value[-8:], "big")
    if not -(1 << 63) <= value < 1 << 64:
        raise BadEvent(f"a block's hash is {value}")
    return value & _MASK


def _where(fields: _Map) -> Where:
    texts = {
        "medium": fields.medium, "model": fields.model_name, "tenant": fields.tenant_id,
        "lora": _first(fields.lora_name, f"id-{fields.lora_id}" if fields.lora_id else None),
        "salt": _first(fields.cache_salt, fields.additional_salt), "kind": fields.kv_cache_spec_kind,
        "owner": _first(fields.ownership, fields.backend_id), "locality": fields.locality,
    }  # fmt: skip
    for name, text in texts.items():
        if text is not None and len(text) > TEXT_MAX:
            raise BadEvent(f"{name} has {len(text)} characters, {TEXT_MAX} at most")
    group = fields.group_idx or 0
    if not 0 <= group < GROUPS_MAX:
        raise BadEvent(f"group {group}, 0 to {GROUPS_MAX - 1} are allowed")
    rank = fields.dp_rank
    if rank is not None and not 0 <= rank < RANK_MAX:
        raise BadEvent(f"{rank} is no rank")
    return Where(rank=rank, group=group, **texts)


def _first(*texts: str | None) -> str | None:
    """Return the first text that is not empty, else "" if one is there at all."""
    return next(filter(None, texts), "" if "" in texts else None)


def _extras(given: list[Any] | None, where: Where, first: bool) -> tuple[str | None, tuple[bytes, ...]]:
    """Return the salt that vLLM's extra keys name, and what else each block depends on.

    vLLM hashes keys with tags and publishes them without: the adapter's name before all others, pairs for images, and
    in a prompt's first block the salt, a text. ``first``: the blocks begin with that one. With tags they are read too.
    """
    salt = None
    found = []
    for at, each in enumerate(given or ()):
        if len(memoryview(each)) > EXTRA_BYTES_MAX:
            raise BadEvent(f"extra keys of {len(memoryview(each))} bytes, {EXTRA_BYTES_MAX} at most")
        keys = msgspec.msgpack.decode(each)
        rest = []
        for place, key in enumerate(keys if isinstance(keys, list) else () if keys is None else (keys,)):
            tag, name = (key[0], key[1]) if isinstance(key, list) and len(key) > 1 else (None, key)
            if isinstance(name, str) and (tag == "lora" or (place, key) == (0, where.lora)):
                continue
            salted = (tag == "cache_salt" and len(key) == 2) or (tag is None and first and at == 0)
            if salted and salt is None and isinstance(name, str) and len(name) <= TEXT_MAX:
                salt = name
            else:
                rest.append(key)
        raw = msgspec.msgpack.encode(rest) if rest else b""
        if len(raw) > EXTRA_BYTES_MAX:
            raise BadEvent(f"extra keys of {len(raw)} bytes, {EXTRA_BYTES_MAX} at most")
        found.append(raw)
    return salt, tuple(found) if any(found) else ()


__all__ = ["BadEvent", "Batch", "Cleared", "Event", "Removed", "Stored", "Where", "decode", "slices"]

"""Changes of the claims as messages: in the form of Mooncake's RFC 1527, and in vLLM's.

A message is MessagePack: a time, events, and no rank. Each event has blocks of one namespace. A block is an entry of
the store, and its hash the first half of the digest of its key, a little-endian number: whoever knows the key can
compute it. ``block_size`` is 1, as the store does not know how many tokens a value is of.

    RFC 1527    event_type stored, removed, cleared; seq_hashes, medium STORAGE, tenant_id (the namespace), backend_id
    vLLM        type BlockStored, BlockRemoved, AllBlocksCleared; block_hashes, no token_ids, medium STORAGE,
                locality LOCAL, ownership simm
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from ..libraries import msgspec
from .claims import Delta

#: Blocks of one message, at most.
BLOCKS: Final = 1 << 15
MEDIUM: Final = "STORAGE"
OWNER: Final = "simm"

#: An event of these blocks and this namespace, stored or removed.
Form = Callable[[bool, list[int], str, str], dict[str, Any]]


def rfc1527(stored: bool, hashes: list[int], namespace: str, node: str) -> dict[str, Any]:
    """Return an event in the form of RFC 1527."""
    event = {
        "event_type": "stored" if stored else "removed", "seq_hashes": hashes, "medium": MEDIUM,
        "tenant_id": namespace, "backend_id": node,
    }  # fmt: skip
    return event | {"block_size": 1} if stored else event


def vllm(stored: bool, hashes: list[int], namespace: str, node: str) -> dict[str, Any]:
    """Return an event in vLLM's form, which has no place for the namespace."""
    event: dict[str, Any] = {"type": "BlockStored" if stored else "BlockRemoved", "block_hashes": hashes}
    if stored:
        event |= {"parent_block_hash": None, "token_ids": [], "block_size": 1, "lora_id": None}
    return event | {"medium": MEDIUM, "locality": "LOCAL", "ownership": OWNER}


FORMS: Final[Mapping[str, tuple[Form, dict[str, Any]]]] = {
    "rfc1527": (rfc1527, {"event_type": "cleared"}), "vllm": (vllm, {"type": "AllBlocksCleared"}),
}  # fmt: skip


def message(events: Iterable[dict[str, Any]]) -> bytes:
    """Return a message of these events."""
    raw: bytes = msgspec.msgpack.encode([time.time(), list(events), None])
    return raw


def messages(form: str, deltas: Iterable[Delta], node: str) -> Iterator[bytes]:
    """Yield changes as messages, in order. O(blocks)."""
    make = FORMS[form][0]
    events: list[dict[str, Any]] = []
    count = 0
    for delta in deltas:
        for start in range(0, len(delta.names), BLOCKS):
            names = delta.names[start : start + BLOCKS].tolist()
            if events and count + len(names) > BLOCKS:
                yield message(events)
                events, count = [], 0
            events.append(make(delta.stored, names, delta.namespace, node))
            count += len(names)
    if events:
        yield message(events)


def snapshot(form: str, deltas: Iterable[Delta], node: str) -> list[bytes]:
    """Return messages that say: nothing is there, and then all that is."""
    return [message([FORMS[form][1]]), *messages(form, deltas, node)]

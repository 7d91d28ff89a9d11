"""How long the lists of messages are: the rule, for all that there are."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest

from simm.constants import BATCH_KEYS_MAX, SHARD_COUNT
from simm.errors import LocalProtocolError, RemoteProtocolError
from simm.rpc import CODECS, OPCODES, STRUCTURES, Codec, batches
from simm.wire.access import LEAST
from simm.wire.trace_messages import SPANS_MAX
from tests.support.wire_samples import STRUCTURE_TYPES, TYPES, filled, lists_of, without_bounds

#: Lists whose bound is not ``BATCH_KEYS_MAX``, and how long they may be. None of them is in a client's request.
LONGER = {
    "Committed.grants": 2 * BATCH_KEYS_MAX, "Granted.grants": 2 * BATCH_KEYS_MAX, "RdmaGranted.keys": 1 << 16,
    "RdmaOpened.regions": 1 << 14,
    "MapReply.previous": SHARD_COUNT, "MapOffer.previous": SHARD_COUNT, "Timed.spans": SPANS_MAX,
}  # fmt: skip


def codec_of(cls: Any) -> Codec:
    return CODECS[OPCODES[cls]] if cls in OPCODES else STRUCTURES[cls.__name__]


LISTS = [
    (cls, field) for cls in (*TYPES, *STRUCTURE_TYPES.values()) for field in lists_of(codec_of(cls))
]  # fmt: skip
IDS = [f"{cls.__name__}.{field}" for cls, field in LISTS]


def test_the_lists_are_found() -> None:
    assert len(IDS) > 50 and LONGER.keys() <= set(IDS)
    assert {"Exists.digests", "Delete.digests", "Keep.digests", "WorkerActivity.counts"} <= set(IDS)


@pytest.mark.parametrize(("cls", "field"), LISTS, ids=IDS)
def test_no_list_is_longer_than_its_bound(cls: Any, field: str) -> None:
    """A frame has room for 65,000 keys, and one with so many held a worker for a quarter of a second."""
    made = codec_of(cls)
    most = LONGER.get(f"{cls.__name__}.{field}", BATCH_KEYS_MAX)
    assert made.most[field] == most
    rng = random.Random(field)
    longest = filled(cls, field, most, rng)
    body = made.write(longest)
    assert made.read(body) == (longest, len(body))
    above = filled(cls, field, most + 1, rng)
    text = rf"{cls.__name__}\.{field} has {most + 1} items, at most {most} are allowed"
    with pytest.raises(LocalProtocolError, match=text):
        made.write(above)
    body = without_bounds(cls).write(above)
    with pytest.raises(RemoteProtocolError, match=text):
        made.read(body)
    assert without_bounds(cls).read(body) == (above, len(body)), "the control: nothing else is wrong with it"


def test_what_clients_ask_for_has_no_longer_lists() -> None:
    requests = {CODECS[opcode].cls.__name__ for opcode in LEAST}
    assert {name for name in LONGER if name.split(".")[0] in requests} == {"MapOffer.previous"}


def test_a_new_message_has_the_bound_unless_it_says_otherwise() -> None:
    class New(NamedTuple):
        first: list[int]
        second: list[int]

    made = Codec(New, "*Q *Q", second=7)
    assert made.most == {"first": BATCH_KEYS_MAX, "second": 7}
    with pytest.raises(RemoteProtocolError, match="second has 8 items"):
        made.decode(without_bound_of(New).write(New([], [1] * 8)))
    with pytest.raises(LocalProtocolError, match="no list"):
        Codec(New, "*Q *Q", third=7)


def without_bound_of(cls: Any) -> Codec:
    return Codec(cls, "*Q *Q", first=1 << 32, second=1 << 32)


@pytest.mark.parametrize("count", [0, 1, BATCH_KEYS_MAX, BATCH_KEYS_MAX + 1, 3 * BATCH_KEYS_MAX])
def test_batches(count: int) -> None:
    items = range(count)
    parts = list(batches(items))
    assert [item for part in parts for item in part] == list(items)
    assert all(0 < len(part) <= BATCH_KEYS_MAX for part in parts) and len(parts) == -(-count // BATCH_KEYS_MAX)

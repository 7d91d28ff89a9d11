"""The decoded map: what it says, and that whatever it is made from, it is one or RemoteProtocolError, and small."""

from __future__ import annotations

import random
import tracemalloc
import zlib
from array import array
from collections.abc import Callable

import pytest

from simm.cluster.shard_map import ShardMap, pack_since, unpack_since
from simm.constants import NO_OWNER, SHARD_COUNT
from simm.errors import RemoteProtocolError
from simm.rpc import Connection, decode, encode
from simm.wire import messages as M
from tests.support.dose import dose

WORKERS = [M.WorkerInfo(0, 0, 1, 7 + number, 1 << 30, f"n{number}", "/w.sock", "10.0.0.1", 5) for number in range(3)]
#: What decoding may take at its worst: a map's tables some times over, whatever the bytes say.
BYTES_MAX = 3 << 20


def owners_of(owner: Callable[[int], int]) -> bytes:
    table = array("H", [owner(shard) for shard in range(SHARD_COUNT)])
    return table.tobytes()


def some_map(seed: int = 0) -> M.MapReply:
    rng = random.Random(seed)
    owners = array("H", [rng.choice([0, 1, 2, NO_OWNER]) for _ in range(SHARD_COUNT)])
    since = array("Q", [rng.choice([3, 5, 9]) for _ in range(SHARD_COUNT)])
    moving = [shard for shard in range(SHARD_COUNT) if owners[shard] != NO_OWNER and rng.random() < 0.1]
    previous = [(shard, (owners[shard] + 1) % 3) for shard in moving]
    return M.MapReply(9, 77, WORKERS, owners.tobytes(), previous, pack_since(since))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", [M.MapReply, M.MapOffer])
def test_it_says_what_went_in_through_the_wire_too(seed: int, kind: type) -> None:
    msg = kind(*some_map(seed))
    conn = Connection()
    conn.receive_data(encode(msg, 5))
    frame = conn.next_frame()
    assert frame is not None
    for shard_map in (ShardMap(msg), ShardMap(decode(frame))):
        assert (shard_map.epoch, shard_map.cluster, list(shard_map.workers)) == (9, 77, WORKERS)
        assert shard_map.owners.tobytes() == msg.owners
        assert shard_map.previous == dict(msg.previous)
        assert pack_since(shard_map.since) == msg.since
        assert shard_map.since is shard_map.since  # decoded once


def test_no_epochs_are_zeros() -> None:
    assert unpack_since(b"") == array("Q", bytes(8 * SHARD_COUNT))
    assert ShardMap(M.MapReply(1, 1, [], owners_of(lambda _: NO_OWNER))).since[5] == 0


@pytest.mark.parametrize("epochs", [[0] * 4, [1, 2**64 - 1, 2**63, 7]])
def test_epochs_come_back(epochs: list[int]) -> None:
    since = array("Q", epochs * (SHARD_COUNT // 4))
    assert unpack_since(pack_since(since)) == since


GOOD = some_map()
BAD: dict[str, M.MapReply] = {
    "no owners": GOOD._replace(owners=b""),
    "one byte short": GOOD._replace(owners=GOOD.owners[:-1]),
    "one shard too many": GOOD._replace(owners=GOOD.owners + b"\0\0"),
    "an owner beyond the list": GOOD._replace(owners=owners_of(lambda shard: 3 if shard == 99 else 0), previous=[]),
    "owners and no workers": GOOD._replace(workers=[], previous=[]),
    "a previous owner beyond the list": GOOD._replace(previous=[(5, 3)], owners=owners_of(lambda _: 0)),
    "nobody as the previous owner": GOOD._replace(previous=[(5, NO_OWNER)], owners=owners_of(lambda _: 0)),
    "a shard that there is not": GOOD._replace(previous=[(SHARD_COUNT, 1)], owners=owners_of(lambda _: 0)),
    "a move from the owner itself": GOOD._replace(previous=[(5, 0)], owners=owners_of(lambda _: 0)),
    "two previous owners": GOOD._replace(previous=[(5, 1), (5, 2)], owners=owners_of(lambda _: 0)),
    "a move to nobody": GOOD._replace(previous=[(5, 0)], owners=owners_of(lambda _: NO_OWNER)),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=list(BAD))
def test_a_map_that_contradicts_itself_is_none(bad: M.MapReply) -> None:
    with pytest.raises(RemoteProtocolError):
        ShardMap(bad)


WHOLE = pack_since(array("Q", [1]) * SHARD_COUNT)


@pytest.mark.parametrize(
    "make",
    [lambda: b"\0", lambda: b"not zlib", lambda: WHOLE[:-1], lambda: WHOLE[:-4], lambda: WHOLE + b"x",
     lambda: WHOLE + WHOLE, lambda: zlib.compress(b""), lambda: zlib.compress(bytes(8 * SHARD_COUNT - 1)),
     lambda: zlib.compress(bytes(8 * SHARD_COUNT + 1)), lambda: zlib.compress(bytes(64 << 20), 9)],
    ids=["byte", "text", "cut", "no checksum", "tail", "twice", "empty", "short", "long", "bomb"],
)  # fmt: skip
def test_epochs_that_are_none(make: Callable[[], bytes]) -> None:
    packed = make()
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError):
            unpack_since(packed)
        assert tracemalloc.get_traced_memory()[1] < BYTES_MAX
    finally:
        tracemalloc.stop()


def made_of(data: bytes) -> bool:
    """A map, or RemoteProtocolError: nothing else, and not much memory. Was it one?"""
    conn = Connection()
    try:
        conn.receive_data(data)
        frame = conn.next_frame()
        if frame is None:
            return False
        msg = decode(frame)
        if not isinstance(msg, M.MapReply | M.MapOffer):
            return False
        shard_map = ShardMap(msg)
        assert len(shard_map.owners) == len(shard_map.since) == SHARD_COUNT
    except RemoteProtocolError:
        return False
    return True


@pytest.mark.parametrize("seed", dose(range(4), quick=1))
def test_cut_and_corrupted_bytes_never_do_anything_else(seed: int) -> None:
    rng = random.Random(seed)
    whole = encode(some_map(seed)._replace(owners=owners_of(lambda shard: shard % 3), previous=[(1, 2), (2, 0)]), 1)
    assert made_of(whole)
    # The tables are long and alike: their edges, the lists' counts and the tail are what matters.
    places = [*range(400), *range(len(whole) - 400, len(whole)), *rng.sample(range(len(whole)), 200)]
    tracemalloc.start()
    try:
        for at in places:
            assert not made_of(whole[:at])
            changed = bytearray(whole)
            changed[at] = rng.choice([0, 0xFF, changed[at] ^ 1 << rng.randrange(8)])
            made_of(bytes(changed))
        assert tracemalloc.get_traced_memory()[1] < BYTES_MAX
    finally:
        tracemalloc.stop()

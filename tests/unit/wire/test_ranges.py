"""FETCH_RANGES: what a server believes of it, and what it refuses before it looks at a key."""

from __future__ import annotations

import pytest

from simm.constants import BATCH_KEYS_MAX, FRAME_BYTES_MAX, RANGES_MAX, VALUE_BYTES_MAX
from simm.errors import RemoteProtocolError
from simm.rpc import HEADER_BYTES, encode
from simm.wire.messages import FetchRanges
from simm.wire.ranges import ranges_by_key

A, B = bytes(16), b"b" * 16


def test_ranges_go_to_their_keys() -> None:
    msg = FetchRanges(1, [(A, 2), (B, 1)], [(0, 5), (9, 1), (1 << 31, 7)])
    assert ranges_by_key(msg) == [[(0, 5), (9, 1)], [(1 << 31, 7)]]
    assert ranges_by_key(FetchRanges(0, [], [])) == []
    most = FetchRanges(0, [(A, RANGES_MAX)], [(0, VALUE_BYTES_MAX // RANGES_MAX)] * RANGES_MAX)
    assert len(ranges_by_key(most)[0]) == RANGES_MAX
    all_keys = FetchRanges(0, [(A, 1)] * BATCH_KEYS_MAX, [(0, VALUE_BYTES_MAX)] * BATCH_KEYS_MAX)
    assert len(ranges_by_key(all_keys)) == BATCH_KEYS_MAX
    for msg in (most, all_keys):
        assert len(encode(msg)) < HEADER_BYTES + FRAME_BYTES_MAX


@pytest.mark.parametrize(
    ("msg", "text"),
    [
        (FetchRanges(2, [(A, 1)], [(0, 1)]), "previous=2"),
        (FetchRanges(0, [(A, 1)], []), "has 0 ranges"),
        (FetchRanges(0, [(A, 1)], [(0, 1), (0, 1)]), "has 2 ranges"),
        (FetchRanges(0, [], [(0, 1)]), "has 1 ranges"),
        (FetchRanges(0, [(A, 0), (B, 1)], [(0, 1)]), "ranges of 1 to"),
        (FetchRanges(0, [(A, 1)], [(0, 0)]), "ranges of 1 to"),
        (FetchRanges(0, [(A, 2)], [(0, 0), (0, 1)]), "no byte"),
        (FetchRanges(0, [(A, 1)], [(0, VALUE_BYTES_MAX + 1)]), "ranges of 1 to"),
        (FetchRanges(0, [(A, 2)], [(0, VALUE_BYTES_MAX), (0, 1)]), "ranges of 1 to"),
        (FetchRanges(0, [(A, 3)], [(0, 0xFFFF_FFFF)] * 3), "ranges of 1 to"),
    ],
)
def test_what_no_client_sends(msg: FetchRanges, text: str) -> None:
    with pytest.raises(RemoteProtocolError, match=text):
        ranges_by_key(msg)

"""The ranges of FETCH_RANGES and FETCH_PINNED: what a stream checks before it believes them.

A range may be named many times. So there is a bound on the bytes that the server sends for one key, which are those of
the largest value, as there is on the ranges of a frame (``rpc.py``), which it looks at in one turn of its loop. The
rest of the work is done as the client takes the bytes.
"""

from __future__ import annotations

from itertools import islice

from ..constants import VALUE_BYTES_MAX
from ..errors import RemoteProtocolError
from .messages import FetchPinned, FetchRanges


def ranges_by_key(msg: FetchRanges | FetchPinned) -> list[list[tuple[int, int]]]:
    """Return the ranges of each key, one list for all if they are the same. O(ranges).

    Raises RemoteProtocolError for what no client may send.
    """
    name = "FETCH_RANGES" if isinstance(msg, FetchRanges) else "FETCH_PINNED"
    if isinstance(msg, FetchRanges) and msg.previous > 1:
        raise RemoteProtocolError(f"FETCH_RANGES with previous={msg.previous}")
    if sum(count for _, count in msg.keys) != len(msg.ranges):
        raise RemoteProtocolError(f"a {name} has {len(msg.ranges)} ranges, and its keys have others")
    counts = [count for _, count in msg.keys]
    same = msg.ranges[: counts[0]] if counts else []
    checked: list[list[tuple[int, int]]]
    if counts.count(len(same)) == len(counts) and same * len(counts) == msg.ranges:
        by_key = [same] * len(counts)
        checked = by_key[:1]  # as of a layer of many pages: to be looked at once
    else:
        left = iter(msg.ranges)
        checked = by_key = [list(islice(left, count)) for count in counts]
    for ranges in checked:
        if not 0 < sum(length for _, length in ranges) <= VALUE_BYTES_MAX:
            raise RemoteProtocolError(f"ranges of 1 to {VALUE_BYTES_MAX} bytes are allowed for a key")
        for _, length in ranges:
            if not length:
                raise RemoteProtocolError("a range of no byte")
    return by_key

"""The message that makes groups of entries. ``arena/marks/groups.py`` says what a group is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final, NamedTuple

from ..errors import RemoteProtocolError
from ..rpc import message

#: Keys of one request: so many, and what their last group has more.
REQUEST_KEYS: Final = 1024


@message(0x33, "*B *16s")
class Group(NamedTuple):
    """Make groups of stored entries: how many digests each has, and the digests of all, one group after the other."""

    counts: list[int]
    digests: list[bytes]


def joined(groups: Sequence[Sequence[bytes]]) -> Group:
    """Return the request for these groups."""
    return Group([len(digests) for digests in groups], [digest for digests in groups for digest in digests])


def requests_of(groups: Sequence[Sequence[bytes]]) -> Iterator[list[Sequence[bytes]]]:
    """Yield the groups, in their order, in parts that fit a request each."""
    part: list[Sequence[bytes]] = []
    keys = 0
    for digests in groups:
        part.append(digests)
        keys += len(digests)
        if keys >= REQUEST_KEYS:
            yield part
            part, keys = [], 0
    if part:
        yield part


def groups_in(msg: Group) -> list[list[bytes]]:
    """Return the digests of each group. Raise RemoteProtocolError for what no client may send. O(digests)."""
    if sum(msg.counts) != len(msg.digests):
        raise RemoteProtocolError(f"a GROUP has {len(msg.digests)} digests, and its groups have others")
    if 0 in msg.counts:
        raise RemoteProtocolError("a group of no key")
    left = iter(msg.digests)
    return [list(islice(left, count)) for count in msg.counts]

"""Puts that leave a stored value alone, for keys that are hashes of what they name.

Engines compute the same page in several processes, and put it under the same key. If it is stored already, a put would
copy the same bytes to a new chunk, and the worker would replace the entry. Here the client looks first. In an arena
that it maps this is a search of the table, without the worker; elsewhere one exchange for all keys of a server.

What counts as stored
---------------------
* *In an arena on this host*: a whole entry that a get would find, whose value has exactly the length of the one to put.
  So a page of another model under the same key is replaced. It is marked as used, as a put would.
* *On another host*: what ``exists`` says, which is a miss for what a bound client has planted.

A value that is evicted a moment later is a miss then, as after a put. A key whose shard is moving, and whose owner does
not have it yet, is put. A client with ``checksum`` puts always: to trust what is stored it would have to read it.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...host.buffers import Span
from ...wire.messages import Status
from ..reads import Gets
from ..writes import Puts


def put(
    gets: Gets, puts: Puts, digests: Sequence[bytes], sources: Sequence[memoryview | Span], counters: dict[str, int]
) -> list[int]:
    """Store the values that are not stored yet, and count the results; return a Status for each key.

    Of a duplicate key only the later value counts, whose status all of them get. O(keys).
    """
    if gets.checksum:
        return puts.put(digests, sources)
    last = {digest: position for position, digest in enumerate(digests)}
    if len(last) < len(digests):  # an earlier value may have another length, and would be put over the later one
        statuses = put(gets, puts, [*last], [sources[position] for position in last.values()], counters)
        of = dict(zip(last, statuses))
        return [of[digest] for digest in digests]
    held = gets.holds_many(digests, [len(source) for source in sources])
    absent = [position for position, there in enumerate(held) if not there]
    present = len(digests) - len(absent)
    counters["present"] += present
    if not absent:
        return [Status.OK] * len(digests)
    if len(absent) == len(digests):
        return puts.put(digests, sources)
    statuses = [Status.OK] * len(digests)
    some = puts.put([digests[position] for position in absent], [sources[position] for position in absent])
    for position, status in zip(absent, some):
        statuses[position] = status
    return statuses

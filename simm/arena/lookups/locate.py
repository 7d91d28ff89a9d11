"""Tell peers where values lie, and pin them.

A batch is looked up by column, and its pins are made together: one after the other a key takes four times as long, and
a client that pins the pages of a prompt waits for it. The columns hold all plain hits, whose pins all fit. Every other
key is looked up by itself (:meth:`Locator._one`), which has the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Final

import numpy as np

from ...constants import OTHERS_NAMESPACE
from ...wire.messages import LOCATE_HIDDEN, LOCATE_PREVIOUS, Status
from ...wire.shard_set import FROZEN
from ..hashing import SHARD_MASK, shard_of, words_of
from ..layout import ENTRY_BOUND

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ...table import Entry, Table
    from ..namespaces import NamespaceTable
    from ..sessions import Session, SessionTable
    from ..shard_words import ShardWords
    from ..space import Space

#: (status, flags, length, crc, offset in the segment, pin id), as ``messages.Located`` has it.
Answer = tuple[int, int, int, int, int, int]

#: From this many keys on they are looked up by column.
COLUMNS_FROM: Final = 32
_ABSENT: Final = (int(Status.NOT_FOUND), 0, 0, 0, 0, 0)
_OK: Final = int(Status.OK)


class Locator:
    """Finds and pins the values of one store.

    Args:
        table, space, sessions, namespaces, shard_words: the store's.
        shards: the words of its shards. visited: the bytes that say which slots are used.
        data: where the data begins in the segment.
    """

    def __init__(
        self, table: Table, space: Space, sessions: SessionTable, namespaces: NamespaceTable, shard_words: ShardWords,
        shards: memoryview, visited: memoryview, data: int, check: Callable[[int, Entry], None],
    ) -> None:  # fmt: skip
        self._table, self._space, self._sessions, self._namespaces = table, space, sessions, namespaces
        self._shard_words, self._shards, self._visited, self._data, self._check = (
            shard_words, shards, visited, data, check,
        )  # fmt: skip

    def locate(self, session: Session | None, digests: Sequence[bytes], how: int = 0) -> list[Answer]:
        """Return what is stored for each digest: see :meth:`simm.arena.store.Store.locate`. Nothing is pending."""
        if how & LOCATE_HIDDEN:
            return [self._hidden(digest) for digest in digests]
        if len(digests) < COLUMNS_FROM or how & LOCATE_PREVIOUS:
            return [self._one(session, digest, how) for digest in digests]
        found = self._by_column(session, digests)
        one = self._one
        return [one(session, digests[at], how) if each is None else each for at, each in enumerate(found)]

    def _one(self, session: Session | None, digest: bytes, how: int) -> Answer:
        word = self._shards[shard_of(digest)]
        if not 0 < word < FROZEN and not (word and how & LOCATE_PREVIOUS):
            return self._miss(digest)
        slot = self._table.lookup(digest)
        if slot < 0:
            return _ABSENT if word >= FROZEN else self._miss(digest)
        entry = self._table.entry(slot)
        self._check(slot, entry)
        if not self._namespaces.readable(entry.namespace, digest, entry.flags):
            return _ABSENT
        pin = 0
        if session is not None:
            # Whoever stored a foreign entry is not believed about the key. A stream looks at that by itself.
            if entry.flags & ENTRY_BOUND and entry.namespace != session.namespace and not session.relays:
                return _ABSENT
            pin = self._sessions.pin(session, entry.offset, entry.chunk)
            if not pin:
                return Status.NO_SPACE, 0, 0, 0, 0, 0
        self._visited[slot] = 1
        return _OK, entry.flags, entry.length, entry.crc, entry.offset, pin

    def _hidden(self, digest: bytes) -> Answer:
        """Answer as if no other namespace had stored anything. A value of OTHERS_NAMESPACE may be any namespace's."""
        slot = self._table.lookup(digest)
        if slot >= 0 and self._table.entry(slot).namespace == self._namespaces.find(OTHERS_NAMESPACE):
            return _ABSENT
        return self._miss(digest)

    def _miss(self, digest: bytes) -> Answer:
        status = self._shard_words.status_of_miss(digest)
        since = self._shard_words.moved_since(digest) if status == Status.PREVIOUS else 0
        return status, 0, 0, 0, since, 0

    def _by_column(self, session: Session | None, digests: Sequence[bytes]) -> Sequence[Answer | None]:
        """Do :meth:`_one` for plain hits, all of them or none if they are to be pinned. None for every other key."""
        keys = words_of(digests)
        slots, rows = self._table.rows_of(keys)
        shards: NDArray[np.uint64] = np.frombuffer(self._shards, np.uint64)
        words = shards.take((keys[:, 0] & np.uint64(SHARD_MASK)).view(np.intp))
        # 0 < word < FROZEN in one comparison, as 0 - 1 wraps to the greatest word.
        plain = (slots >= 0) & (words - np.uint64(1) < np.uint64(FROZEN - 1))
        lengths, crcs, chunks = rows["length"], rows["crc"], rows["chunk"]
        flags, spaces = rows["flags"], rows["namespace"]
        if session is not None and not session.relays:
            plain &= (flags & ENTRY_BOUND == 0) | (spaces == session.namespace)
        for number in np.unique(spaces[plain]).tolist():
            mine = spaces == number
            plain &= ~mine | self._namespaces.readable_many(number, keys[:, 1], flags)
        whole = bool(plain.all())
        at = slice(None) if whole else np.flatnonzero(plain)
        slots, offsets = slots[at], rows["offset"][at].astype(np.int64)
        starts = offsets - self._data
        lengths, chunks = lengths[at], chunks[at]
        if not (
            (starts == self._space.offsets_of(slots)).all() and ((lengths > 0) & (lengths <= chunks)).all()
            and chunks.tolist() == list(map(self._space.chunk_bytes, starts.tolist()))
        ):  # fmt: skip
            return [None] * len(digests)  # one of them is not as it should be: looked up by itself, it raises
        places, sizes = offsets.tolist(), chunks.tolist()
        pins: Sequence[int] | repeat[int] = repeat(0)
        if session is not None:
            pins = self._sessions.pin_many(session, places, sizes)
            if len(pins) < len(places):
                return [None] * len(digests)
        np.frombuffer(self._visited, np.uint8)[slots] = 1
        answers = list(zip(repeat(_OK), flags[at].tolist(), lengths.tolist(), crcs[at].tolist(), places, pins))
        if whole:
            return answers
        found: list[Answer | None] = [None] * len(digests)
        for position, answer in zip(np.flatnonzero(plain).tolist(), answers):
            found[position] = answer
        return found

"""What a worker's successor has to believe, where no client can store: the vault of an arena.

A process of the data server's own user can open an arena's metadata for writing, and a stray store of it can hit any
word. Slots must lie there, as readers look at them. What decides about ownership and memory need not:

    header      geometry, incarnation, state, cluster, epoch
    shards      the shard words; the arena's are a copy for readers
    ledger      undo record, namespaces, sessions, holds; the arena has a copy of the namespaces for listers

The supervisor makes the vault before it forks the first worker: anonymous memory that its children share, and that has
no name and no descriptor. It ends with the data server. So a suspended arena is complete: :meth:`Vault.save` writes all
of it there at a clean stop, and the next server's worker takes it over with :meth:`Vault.load`. Where a worker dies
before that, the supervisor saves what it has left (:func:`suspend`): the next server's worker recovers the arena from
that as the dead one's successor would have done.

Mending
-------
Each heartbeat of the worker compares the vault with the arena's copies of it: header, shard words and namespaces. What
differs was stored by somebody else, and is put right. Slots have no second copy, as they are the table itself. But the
worker's private state knows where each slot's value lies, and which slots are free. So after such a find, and after a
recovery that found something, the worker looks at all slots once, in slices, and drops those that contradict it. It
goes on until a round finds nothing.

A slot whose value, checksum, flags or digest were overwritten cannot be told from a right one. Clients with checksums
tell (``sdk/reads.py``). A CorruptionError, where a request meets a spoilt slot first, still ends the worker
(``arena/store.py``).

Order of stores: first the vault, then the copy. A worker that dies in between has told nobody, and its successor goes
by the vault.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Final, Protocol

from ..errors import SegmentError
from ..table import Table
from ..wire.messages import Shards
from .layout import (
    HEADER_BYTES,
    HEADER_WORDS,
    HOLD_LINE_BYTES,
    HOLD_LINES_MAX,
    MAGIC,
    NAMESPACE_LINE_BYTES,
    NAMESPACES,
    SEQ_BITS,
    SESSION_LINE_BYTES,
    SESSION_LINES_MAX,
    SHARDS_BYTES,
    STAMP_BYTES,
    UNDO_BYTES,
    Geometry,
    State,
    Word,
    laid_out,
)
from .ledger import Ledger
from .shard_words import ShardWords
from .space import Space

#: Workers that one segment can have in succession. With a supervisor's pauses that takes years.
INCARNATION_MAX: Final = (1 << 64 - SEQ_BITS) - 1
#: Of the largest ledger. Memory is taken page by page, as it is used.
VAULT_BYTES: Final = (
    HEADER_BYTES
    + SHARDS_BYTES
    + UNDO_BYTES
    + NAMESPACES * NAMESPACE_LINE_BYTES
    + SESSION_LINES_MAX * SESSION_LINE_BYTES
    + HOLD_LINES_MAX * HOLD_LINE_BYTES
)
#: Slots that a mender looks at in one turn: about two milliseconds. So long are its pauses.
SLICE_SLOTS: Final = 2048
PAUSE_S: Final = 0.002
_LEDGER_AT: Final = HEADER_BYTES + SHARDS_BYTES


class Vault:
    """The vault of one arena. It is of use in the process that makes it and in those that this one forks."""

    def __init__(self) -> None:
        """Raises OSError if there is no memory."""
        whole = memoryview(mmap.mmap(-1, VAULT_BYTES))
        #: The header's words. The magic is stored last: with it everything is there.
        self.header = whole[:HEADER_BYTES].cast("Q")
        self.shards = whole[HEADER_BYTES:_LEDGER_AT].cast("Q")
        self.ledger = whole[_LEDGER_AT:]
        self.undo = self.ledger[:UNDO_BYTES]

    @property
    def filled(self) -> bool:
        """Return True if some worker has laid the arena out, or has taken it over."""
        return bool(self.header[Word.MAGIC] == MAGIC)

    def load(self, mm: mmap.mmap, geometry: Geometry) -> None:
        """Take over what a suspended arena says. The caller has checked its header, which ``geometry`` is from."""
        with memoryview(mm) as arena:
            self.shards[:] = arena[HEADER_BYTES:_LEDGER_AT].cast("Q")
            at = geometry.ledger_offset
            self.ledger[: geometry.ledger_bytes] = arena[at : at + geometry.ledger_bytes]
            self.fill(arena[:HEADER_BYTES].cast("Q"), geometry)

    def fill(self, words: memoryview, geometry: Geometry) -> None:
        """Take over a header's words, those of the geometry as given."""
        self.header[Word.VERSION : HEADER_WORDS] = words[Word.VERSION : HEADER_WORDS]
        for at, field in enumerate(geometry, Word.SIZE):
            self.header[at] = field
        self.header[Word.MAGIC] = MAGIC

    def geometry(self) -> Geometry:
        """Return the arena's geometry."""
        return Geometry(*self.header[Word.SIZE : Word.DATA_BYTES + 1])

    def show_header(self, words: memoryview) -> int:
        """Store the header in the arena's, without the heartbeat, where it differs. Return the number of words."""
        spoilt = 0
        for at in range(HEADER_WORDS):
            if at != Word.HEARTBEAT and words[at] != self.header[at]:
                words[at] = self.header[at]
                spoilt += 1
        return spoilt

    def save(self, arena: memoryview) -> None:
        """Write all of it into the arena, which is being suspended."""
        geometry = self.geometry()
        self.show_header(arena[:HEADER_BYTES].cast("Q"))
        arena[HEADER_BYTES:_LEDGER_AT] = self.shards.cast("B")
        arena[geometry.size - STAMP_BYTES : geometry.size].cast("Q")[0] = self.header[Word.GENERATION]
        at = geometry.ledger_offset
        arena[at : at + geometry.ledger_bytes] = self.ledger[: geometry.ledger_bytes]


def take_over(mm: mmap.mmap, name: str, vault: Vault | None) -> tuple[Geometry, int]:
    """Return the geometry of a dead worker's arena, and count its successor's incarnation.

    Without a vault the arena is believed, as it is by an empty one. Raise SegmentError for a foreign or closed arena.
    """
    with memoryview(mm)[:HEADER_BYTES].cast("Q") as words:
        kept = words if vault is None else vault.header
        if vault is not None and vault.filled:
            geometry = vault.geometry()
        else:
            geometry = Geometry.read(words, laid_out(len(mm)), name)
            if vault is not None:
                vault.load(mm, geometry)
        if kept[Word.STATE] == State.CLOSED:
            raise SegmentError(f"{name} is closed and cannot be taken over")
        incarnation = kept[Word.INCARNATION] + 1
        if incarnation > INCARNATION_MAX:
            raise SegmentError(f"{name} has had {incarnation - 1} workers, more than its sequence numbers can tell")
        kept[Word.INCARNATION] = incarnation
        if vault is not None:
            vault.show_header(words)
    return geometry, incarnation


def is_newer(order: Shards | None, epoch: int) -> bool:
    """Return whether an order is that of a map, and a newer one than that of ``epoch``."""
    return order is not None and bool(order.since) and order.epoch > epoch


def suspend(mm: mmap.mmap, name: str, vault: Vault, order: Shards | None = None) -> bool:
    """Suspend an arena without a worker, as that would have done. Return False if it has nothing to be kept.

    ``order``: what the newest map means for the worker. What it takes away is given up, and what it moves out is
    frozen, as the next server will say that its arenas know that map. What it gives waits for the next server's first
    map: a word over entries that are still to be dropped would make them valid again.

    A death at any point leaves an arena that is not suspended, unless it was when this began and nothing has changed.
    Raise SegmentError for a foreign arena. O(shards + ledger lines).
    """
    with memoryview(mm) as whole, whole[:HEADER_BYTES].cast("Q") as words:
        header = vault.header
        if not vault.filled:  # no worker has taken it over
            if words[Word.STATE] != State.SUSPENDED:
                return False
            if not is_newer(order, words[Word.EPOCH]):
                return True
            vault.load(mm, Geometry.read(words, laid_out(len(mm)), name))
        if header[Word.STATE] == State.CLOSED or not header[Word.CLUSTER]:
            return False
        if order is not None and order.since and order.cluster != header[Word.CLUSTER]:
            return False
        newer = order if is_newer(order, header[Word.EPOCH]) else None
        if newer is None and words[Word.STATE] == State.SUSPENDED:
            return True
        # Not before all of it is there.
        header[Word.STATE] = words[Word.STATE] = State.OPEN
        if newer is not None:
            ShardWords(vault.shards).retire(newer.epoch, newer.since, newer.roles)
            header[Word.EPOCH] = newer.epoch
        vault.save(whole)
        header[Word.STATE] = words[Word.STATE] = State.SUSPENDED
    return True


class Mended(Protocol):
    """What a mender must know of a store."""

    vault: Vault | None
    header: memoryview
    shard_words: ShardWords
    ledger: Ledger
    table: Table
    space: Space
    geometry: Geometry
    notes: list[str]

    def apply_pending(self) -> None: ...

    def drop_spoilt(self, slot: int) -> None: ...


class Mender:
    """Mends one store's arena.

    Args:
        store: does nothing if it has no vault.
        later: calls a function after so many seconds.
        say: takes a number for the log, and what of: words or slots.
    """

    def __init__(
        self, store: Mended, later: Callable[[float, Callable[[], None]], object], say: Callable[[int, str], object]
    ) -> None:
        self._store = store
        self._later = later
        self._say = say
        #: Words, names and slots that were put right.
        self.mended = 0
        #: Where the round is, -1 without one; whether another one is due; whether a turn of it is.
        self._at = 0 if store.notes else -1
        self._again = self._due = False

    def maintain(self) -> None:
        """Put right what is kept twice. Begin a round over all slots if that was something. O(shards), by numpy."""
        store = self._store
        if store.vault is None:
            return
        found = store.vault.show_header(store.header) + store.shard_words.mend() + store.ledger.namespaces.mend()
        if found:
            self._count(found, "words")
        if self._at >= 0 and not self._due:
            self._due = True
            self._later(PAUSE_S, self._turn)

    def _turn(self) -> None:
        """Look at the next slots of a round, and drop the spoilt ones. O(SLICE_SLOTS)."""
        store = self._store
        store.apply_pending()
        start = self._at
        stop = min(start + SLICE_SLOTS, store.geometry.slots)
        spoilt = self._spoilt(start, stop)
        for slot in spoilt:
            store.drop_spoilt(slot)
        if spoilt:
            self._count(len(spoilt), "slots")
        self._at = stop
        if stop == store.geometry.slots:
            self._at = 0 if self._again else -1
            self._again = False
        self._due = self._at >= 0
        if self._due:
            self._later(PAUSE_S, self._turn)

    def _count(self, found: int, what: str) -> None:
        self.mended += found
        self._say(found, what)
        if self._at < 0:
            self._at = 0
        else:
            self._again = True

    def _spoilt(self, start: int, stop: int) -> list[int]:
        store = self._store
        space, data = store.space, store.geometry.data_offset
        own = space.offsets(start, stop)
        offsets = own + data
        offsets[own < 0] = 0
        spoilt = set(store.table.strange(start, stop, offsets))
        for slot, (offset, chunk) in enumerate(zip(own.tolist(), store.table.chunks(start, stop)), start):
            if offset >= 0 and slot not in spoilt and chunk != space.chunk_bytes(offset):
                spoilt.add(slot)
        return sorted(spoilt)

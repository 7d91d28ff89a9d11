"""One worker's store: table, chunks, policy and ledger together, as a structure over a buffer.

No I/O, no sockets, no clock (``now_ms`` is set by the owner before a batch of calls): the worker
process drives it, and the tests and models drive the same code.

The order of stores inside each operation is what makes a death at any point harmless:

    grant     allocate chunk (private) -> hold line -> the client is told, now or with its next answer
    commit    slots published -> hold lines ended -> the replaced chunks freed
    pin       hold line -> the client is told
    evict     slot cleared -> chunk freed
    release   hold line ended -> chunk freed

so at any moment a chunk is named by a slot, by a hold line, or by neither and then free. A
commit cut between its two steps leaves both; the slot wins at recovery. (Where a batch stores a key twice, the
first value's chunk is then named by its hold line alone: it stays quarantined with its session.)

What sessions hold, and how they end: ``grants.py``. What becomes of entries whose shard moves: ``shards.py``.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from .constants import NO_SLOT
from .errors import CorruptionError, SegmentError
from .grants import Holder, Session
from .hashing import SHARD_MASK, shard_of
from .layout import HEADER_BYTES, SEQ_BITS, SHARDS_BYTES, Geometry, State, Word, publish
from .ledger import HoldKind, Ledger
from .messages import ABSENT, LOCATE_PREVIOUS, Status
from .shards import FROZEN, ShardWords
from .space import Space
from .table import ZERO_DIGEST, Table

_OK: Final = int(Status.OK)
_NOT_FOUND: Final = int(Status.NOT_FOUND)
_NO_SPACE: Final = int(Status.NO_SPACE)
_WRONG_OWNER: Final = int(Status.WRONG_OWNER)
_BAD_REQUEST: Final = int(Status.BAD_REQUEST)
_STALE: Final = int(Status.STALE_GRANT)
_PRESENT: Final = int(Status.PRESENT)
_FROZEN: Final = FROZEN
_GRANT: Final = int(HoldKind.GRANT)

#: Workers that one segment can have had, one after another; a supervisor's pauses make that years.
INCARNATION_MAX: Final = (1 << 64 - SEQ_BITS) - 1


class Store(Holder):
    """A worker's arena. Construct by :meth:`create` or :meth:`recover`.

    All offsets that leave this class are from the segment's start.
    """

    def __init__(self, mm: mmap.mmap, geometry: Geometry, incarnation: int, policy: str) -> None:
        super().__init__(geometry, incarnation)
        self.now_ms = 0
        self.notes: list[str] = []
        self._mm = mm
        whole = memoryview(mm)
        self._whole = whole
        self.header = whole[:HEADER_BYTES].cast("Q")
        self.shards = whole[HEADER_BYTES : HEADER_BYTES + SHARDS_BYTES].cast("Q")
        self.shard_words = ShardWords(self.shards)
        self.visited = whole[geometry.visited_offset : geometry.visited_offset + geometry.slots]
        self.table = Table(mm, geometry, incarnation)
        self.ledger = Ledger(mm, geometry)
        self.policy_name = policy
        self.space = Space(geometry.data_bytes, geometry.slots, self.visited, policy, self._evict)
        #: Commits whose bookkeeping is still to be done: (replaced chunk or -1, chunk, slot). See settle().
        self._unsettled: list[tuple[int, int, int]] = []
        # Counters, for STATS and /metrics.
        self.puts = 0
        self.overwrites = 0
        self.deletes = 0
        self.set_evictions = 0
        self.put_failures = 0
        self.stale_commits = 0
        self.copies = 0

    # -- birth and rebirth --------------------------------------------------------------------

    @classmethod
    def create(
        cls, mm: mmap.mmap, *, slots: int = 0, policy: str = "sieve", incarnation: int = 1, instance: int = 0
    ) -> Store:
        """Lay out a fresh, zeroed segment. The caller holds its writer lock and has faulted it in."""
        geometry = Geometry.plan(len(mm), slots)
        words = memoryview(mm)[:HEADER_BYTES].cast("Q")
        geometry.write(words)
        words[Word.INCARNATION] = incarnation
        words[Word.INSTANCE] = instance
        words[Word.STATE] = State.STARTING
        store = cls(mm, geometry, incarnation, policy)
        publish(words)
        words.release()
        return store

    @classmethod
    def recover(cls, mm: mmap.mmap, name: str, *, policy: str = "sieve") -> Store:
        """Take over a dead worker's segment. The caller holds its writer lock.

        Raises SegmentError for a foreign or closed segment. O(slots + ledger lines).
        """
        words = memoryview(mm)[:HEADER_BYTES].cast("Q")
        try:
            geometry = Geometry.read(words, len(mm), name)
            if words[Word.STATE] == State.CLOSED:
                raise SegmentError(f"{name} is closed and cannot be taken over")
            incarnation = words[Word.INCARNATION] + 1
            if incarnation > INCARNATION_MAX:
                raise SegmentError(f"{name} has had {incarnation - 1} workers, more than its sequence numbers can tell")
            words[Word.INCARNATION] = incarnation
        finally:
            words.release()
        store = cls(mm, geometry, incarnation, policy)
        store._rebuild()
        return store

    def _rebuild(self) -> None:
        """Everything private from what lies in the arena: entries first, then holds that they do not outrank."""
        table, space, ledger = self.table, self.space, self.ledger
        self.shard_words.recover()
        self.notes = table.recover()
        ledger.recover()
        self._drop_rows_of_lost_shards()
        found = table.live()
        # Oldest first, so that the policy's queues come out in the order of storing.
        order = np.argsort(found.stored, kind="stable")
        rows = list(
            zip(
                found.slots[order].tolist(),
                (found.offsets[order] - np.uint64(self._data)).tolist(),
                found.chunks[order].tolist(),
            )
        )
        reserve = space.reserve
        live: dict[int, int] = {}
        for slot, offset, chunk in rows:
            try:
                reserve(offset, chunk)
            except CorruptionError as exc:
                self.notes.append(f"slot {slot} dropped: {exc}")
                table.clear(slot)
                continue
            live[offset] = slot
        sessions: dict[int, Session] = {}
        for line, fields in list(ledger.sessions()):
            session = Session(fields.session, line, fields.pid, fields.started, fields.namespace)
            session.closed = True
            sessions[fields.session] = session
        held: list[int] = []
        reserved: set[int] = set()
        for line, hold in list(ledger.holds()):
            owner = sessions.get(hold.session)
            offset = hold.offset - self._data
            outranked = hold.kind == _GRANT and offset in live
            if owner is None or outranked:
                ledger.end_hold(line)
                continue
            if offset not in live and offset not in reserved:
                try:
                    space.reserve(offset, hold.chunk)
                except CorruptionError as exc:
                    self.notes.append(f"hold {hold.hold:#x} dropped: {exc}")
                    ledger.end_hold(line)
                    continue
                reserved.add(offset)
            if hold.kind == _GRANT:
                owner.grants[hold.hold] = (hold.offset, hold.chunk, line)
                owner.granted_bytes += hold.chunk
                self.granted_bytes += hold.chunk
            else:
                owner.pins[hold.hold] = (hold.offset, line)
                held.append(offset)
        publish = space.publish
        for offset, slot in live.items():
            publish(offset, slot)
        for offset in held:
            space.hold(offset)
        for offset in reserved:
            # A pinned chunk whose entry is gone: it goes when its last pin does.
            if offset in held:
                space.release(offset)
        self.sessions = sessions

    def _drop_rows_of_lost_shards(self) -> None:
        """Recovery, before any chunk is reserved: a predecessor may have died between giving a shard up and here."""
        lost = self._slots_of_lost_shards()
        for slot in lost:
            self.table.clear(slot)
        if lost:
            self.notes.append(f"{len(lost)} entries of shards given up dropped")

    def open(self) -> None:
        """From now on readers may rely on the arena."""
        self.header[Word.STATE] = State.OPEN

    def close(self) -> None:
        """Say *closed*, for good: readers re-resolve. Shard words go too, as those are what readers look at."""
        self.header[Word.STATE] = State.CLOSED
        for shard in range(len(self.shards)):
            self.shards[shard] = 0

    def release(self) -> None:
        """Drop every view of the segment."""
        self.table.release()
        self.ledger.release()
        for view in (self.header, self.shards, self.visited, self._whole):
            view.release()

    # -- shards -------------------------------------------------------------------------------

    def set_shards(self, epoch: int, since: bytes, roles: bytes) -> int:
        """Take over and give up shards as the map says (``messages.Shards``); how many are mine.

        Entries of shards that are not mine any more as the map has it are dropped before a word is set. So an
        entry in a shard whose word is 0 does not exist outside this method (or goes at recovery, where that was
        cut short by a death), and a word may be set without a look at the table. Raises UsageError for what is
        no map. O(shards), and O(slots) where any was lost.
        """
        self.settle()
        words = self.shard_words
        if words.retire(epoch, since, roles):
            self.drop_foreign()
        self.header[Word.EPOCH] = epoch
        return words.take()

    def fence(self) -> None:
        """No mutation is accepted until the next :meth:`set_shards`: the manager does not know us."""
        self.shard_words.fence()

    def freeze(self, epoch: int, shards: Sequence[int]) -> list[int] | None:
        """A new owner takes these shards over: see :meth:`ShardWords.freeze`."""
        self.settle()
        return self.shard_words.freeze(epoch, shards)

    def adopt(self, epoch: int, shards: Sequence[int], fallback: Sequence[int]) -> int:
        """Take over shards that wait for their mover: see :meth:`ShardWords.adopt`."""
        return self.shard_words.adopt(epoch, shards, fallback)

    def finish(self, epoch: int, shards: Sequence[int]) -> int:
        """All that the previous owner had of these shards is here: see :meth:`ShardWords.finish`."""
        return self.shard_words.finish(shards, epoch)

    def drop_foreign(self) -> int:
        """Drop entries of shards that are not mine; how many. O(slots)."""
        self.settle()
        dropped = self._slots_of_lost_shards()
        for slot in dropped:
            self._drop_entry(slot)
        return len(dropped)

    def _slots_of_lost_shards(self) -> list[int]:
        found = self.table.live()
        words = np.frombuffer(self.shards, np.uint64)
        slots: list[int] = found.slots[words[found.shards.astype(np.intp)] == 0].tolist()
        return slots

    # -- entries ------------------------------------------------------------------------------

    def commit(self, session: Session, entries: Sequence[tuple[bytes, int, int, int, int, int]]) -> list[int]:
        """Publish values in granted chunks, (digest, grant id, length, crc, flags, options) each; a Status for each.

        A grant id is spent, whatever its status. What readers and recovery rely on is done when this returns;
        the private bookkeeping waits for :meth:`settle`, so that the answer can leave first.
        """
        grants, shards = session.grants, self.shard_words.accepting
        publish, unsettled = self.table.publish, self._unsettled
        namespace, now = session.namespace, self.now_ms
        statuses = []
        #: Of the grants whose chunks are published: all their lines end together, 0.15 us a key less.
        lines = []
        spent = 0
        try:
            for digest, number, length, crc, flags, options in entries:
                grant = grants.pop(number, None)
                if grant is None:
                    self.stale_commits += 1
                    statuses.append(_STALE)
                    continue
                offset, chunk, line = grant
                if not 0 < length <= chunk:
                    self._end_grant(session, grant)
                    statuses.append(_BAD_REQUEST)
                    continue
                if not 0 < shards[(digest[0] | digest[1] << 8) & SHARD_MASK] < _FROZEN:
                    self._end_grant(session, grant)
                    statuses.append(_WRONG_OWNER)
                    continue
                if options and (refused := self._refuse(session, digest, options)):
                    self._end_grant(session, grant)
                    statuses.append(refused)
                    continue
                done = publish(digest, offset, length, crc, chunk, namespace, flags, now)
                if done is None and digest != ZERO_DIGEST and self._evict_from_sets(digest):
                    done = publish(digest, offset, length, crc, chunk, namespace, flags, now)
                if done is None:
                    self._end_grant(session, grant)
                    self.put_failures += 1
                    statuses.append(_NO_SPACE if digest != ZERO_DIGEST else _BAD_REQUEST)
                    continue
                lines.append(line)
                spent += chunk
                unsettled.append(done)
                statuses.append(_OK)
        finally:
            self.ledger.end_holds(lines)
            session.granted_bytes -= spent
            self.granted_bytes -= spent
        return statuses

    def _refuse(self, session: Session, digest: bytes, options: int) -> int:
        """Why a commit with options is not to be, or 0."""
        if options != ABSENT:
            return _BAD_REQUEST
        if not self.shard_words.may_copy(digest, session.copies) or self.table.lookup(digest) >= 0:
            return _PRESENT
        self.copies += 1
        return _OK

    def settle(self) -> None:
        """What commits left to do after their answers: chunks to their entries, replaced chunks free, and then
        the grants that were asked for. O(entries and grants since the last)."""
        if self._unsettled:
            self._settle_entries()
        if self._wanted:
            wanted, self._wanted = self._wanted, []
            for session, size, count in wanted:
                if not session.closed:
                    session.prepared += self._grant(session, size, count)

    def _settle_entries(self) -> None:
        unsettled = self._unsettled
        todo = unsettled[:]
        unsettled.clear()  # in place: a commit under way has it at hand
        space, data = self.space, self._data
        self.puts += len(todo)
        if len(todo) == 1:
            old, new, slot = todo[0]
            if old < 0:
                space.publish(new - data, slot)
            else:
                space.replace(old - data, new - data, slot)
                self.overwrites += 1
            return
        fresh: list[tuple[int, int]] = []
        for old, new, slot in todo:
            if old < 0:
                fresh.append((new - data, slot))
                continue
            if fresh:  # the slot may be one of them
                space.publish_many(fresh)
                fresh = []
            space.replace(old - data, new - data, slot)
            self.overwrites += 1
        if fresh:
            space.publish_many(fresh)

    def delete(self, digests: Sequence[bytes]) -> list[int]:
        """Drop entries; a Status for each. OK also where the previous owner may have had the value: it is gone."""
        self.settle()
        words = self.shard_words
        statuses = []
        for digest in digests:
            if not words.accepts(shard_of(digest)):
                statuses.append(_WRONG_OWNER)
                continue
            slot = self.table.lookup(digest)
            if slot >= 0:
                self._drop_entry(slot)
                self.deletes += 1
            elif words.moving and words.status_of_miss(digest) == Status.PREVIOUS:
                words.note_dropped(digest)
            else:
                statuses.append(_NOT_FOUND)
                continue
            statuses.append(_OK)
        return statuses

    def locate(
        self, session: Session | None, digests: Sequence[bytes], how: int = 0
    ) -> list[tuple[int, int, int, int, int, int]]:
        """(status, flags, length, crc, offset, pin id) for each; with a session, each hit is pinned for it.

        A miss has the status that :meth:`exists` gives, and with PREVIOUS the offset is the epoch since which the shard
        is ours: the previous owner that is meant is that of a map which says the same. ``how`` with LOCATE_PREVIOUS:
        who asks was sent to us as a previous owner, so entries of frozen shards are hits.
        """
        self.settle()
        found: list[tuple[int, int, int, int, int, int]] = []
        for digest in digests:
            word = self.shards[shard_of(digest)]
            if not 0 < word < _FROZEN and not (word and how & LOCATE_PREVIOUS):
                found.append(self._miss(digest))
                continue
            slot = self.table.lookup(digest)
            if slot < 0:
                found.append((_NOT_FOUND, 0, 0, 0, 0, 0) if word >= _FROZEN else self._miss(digest))
                continue
            entry = self.table.entry(slot)
            pin = 0
            if session is not None:
                pin = self.pin(session, entry.offset, entry.chunk)
                if not pin:
                    found.append((_NO_SPACE, 0, 0, 0, 0, 0))
                    continue
            self.visited[slot] = 1
            found.append((_OK, entry.flags, entry.length, entry.crc, entry.offset, pin))
        return found

    def _miss(self, digest: bytes) -> tuple[int, int, int, int, int, int]:
        """What :meth:`locate` says of a miss."""
        status = self.shard_words.status_of_miss(digest)
        since = self.shard_words.moved_since(digest) if status == Status.PREVIOUS else 0
        return int(status), 0, 0, 0, since, 0

    def exists(self, digests: Sequence[bytes]) -> list[int]:
        """OK, NOT_FOUND, PREVIOUS (the previous owner may have it) or WRONG_OWNER for each."""
        words, lookup, shards = self.shard_words, self.table.lookup, self.shards
        return [
            _OK
            if 0 < shards[shard_of(digest)] < _FROZEN and lookup(digest) >= 0
            else int(words.status_of_miss(digest))
            for digest in digests
        ]

    def contains(self, digest: bytes) -> bool:
        """Is it stored?"""
        return self.table.lookup(digest) >= 0

    # -- eviction -----------------------------------------------------------------------------

    def _drop_entry(self, slot: int) -> None:
        if self.shard_words.moving:
            self.shard_words.note_dropped(self.table.entry(slot).digest)
        offset = self.table.offset(slot) - self._data
        self.table.clear(slot)
        self.space.release(offset)

    def _evict(self, slot: int) -> None:
        """Called by Space for each victim."""
        self._drop_entry(slot)

    def _evict_from_sets(self, digest: bytes) -> bool:
        """Make room in the digest's full sets: the coldest entry that nobody pins goes; False if all are pinned."""
        self._settle_entries()  # and no grants: making them may evict
        table, space, visited = self.table, self.space, self.visited
        best, best_rank = -1, (True, 1 << 64)
        for slot in table.candidates(digest):
            if space.is_held(table.offset(slot) - self._data):
                continue
            rank = (visited[slot] > 0, table.stored(slot))  # readers write the byte, whatever they please
            if rank < best_rank:
                best, best_rank = slot, rank
        if best < 0:
            return False
        self._drop_entry(best)
        self.set_evictions += 1
        visited[best] = 0
        return True

    # -- inspection ---------------------------------------------------------------------------

    @property
    def free_bytes(self) -> int:
        """Bytes in free chunks."""
        self.settle()
        free: int = self.space.free_bytes
        return free

    def stats(self) -> dict[str, Any]:
        """Counters and gauges. O(classes)."""
        self.settle()
        return {
            "entries": self.table.entries,
            "slots": self.geometry.slots,
            "data_bytes": self.geometry.data_bytes,
            "free_bytes": self.space.free_bytes,
            "granted_bytes": self.granted_bytes,
            "sessions": len(self.sessions),
            "sessions_quarantined": sum(s.closed for s in self.sessions.values()),
            "grants": sum(len(s.grants) for s in self.sessions.values()),
            "pins": sum(len(s.pins) for s in self.sessions.values()),
            "puts": self.puts,
            "overwrites": self.overwrites,
            "deletes": self.deletes,
            "evictions": dict(self.space.evictions),
            "set_evictions": self.set_evictions,
            "put_failures": self.put_failures,
            "stale_commits": self.stale_commits,
            "shards": self.shard_words.count,
            "moving": self.shard_words.moving,
            "frozen": self.shard_words.frozen,
            "dropped": len(self.shard_words.dropped),
            "overflows": self.shard_words.overflows,
            "copies": self.copies,
            "fenced": self.shard_words.fenced,
            "incarnation": self.incarnation,
            "policy": self.policy_name,
        }

    def check(self) -> None:
        """Raise CorruptionError unless table, space, ledger and sessions agree. O(everything)."""
        self.settle()
        self.table.check()
        self.space.check()
        self.ledger.check()
        self.shard_words.check()
        data = self._data
        named: dict[int, int] = {}
        for slot in self.table:
            entry = self.table.entry(slot)
            if entry.offset in named:
                raise CorruptionError(f"chunk at {entry.offset} is named by slots {named[entry.offset]} and {slot}")
            named[entry.offset] = slot
            if self.space.owner(entry.offset - data) != slot:
                raise CorruptionError(f"slot {slot} names a chunk that space gives to another")
            if self.space.chunk_bytes(entry.offset - data) != entry.chunk or not 0 < entry.length <= entry.chunk:
                raise CorruptionError(f"slot {slot} is wrong about its chunk")
            if not self.shards[shard_of(entry.digest)]:
                raise CorruptionError(f"slot {slot} is of a shard that is not mine")
        granted = 0
        lines = set()
        for session in self.sessions.values():
            mine = 0
            for offset, chunk, line in session.grants.values():
                mine += chunk
                lines.add(line)
                if offset in named or self.space.owner(offset - data) != NO_SLOT:
                    raise CorruptionError(f"granted chunk at {offset} belongs to an entry")
            for number, offset, chunk in session.prepared:
                if session.grants.get(number, (offset, chunk))[:2] != (offset, chunk):
                    raise CorruptionError(f"prepared grant {number:#x} differs from the one that is held")
            if mine != session.granted_bytes:
                raise CorruptionError(f"{session}: {mine} bytes granted, {session.granted_bytes} counted")
            granted += mine
            for offset, line in session.pins.values():
                lines.add(line)
                if not self.space.is_held(offset - data):
                    raise CorruptionError(f"pinned chunk at {offset} is not held")
        if granted != self.granted_bytes:
            raise CorruptionError(f"{granted} bytes granted, {self.granted_bytes} counted")
        written = {line for line, _ in self.ledger.holds()}
        if written != lines:
            raise CorruptionError(f"hold lines {sorted(written ^ lines)[:5]} differ between ledger and sessions")

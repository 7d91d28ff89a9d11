"""One worker's store: table, chunks, policy, ledger and sessions together, as a structure over a buffer.

It has no I/O, no sockets and no clock: the worker process sets ``now_ms`` before a batch of calls. Tests and models
drive the same code.

The order of stores in each operation makes a death at any point harmless:

    grant     allocate chunk (private) -> hold line -> answer to the client, now or with its next commit
    commit    slots published -> hold lines ended -> replaced chunks freed
    pin       hold line -> answer to the client
    evict     slot cleared, or many slots -> chunks freed, or granted at once
    release   hold line ended -> chunk freed

At any moment a slot or a hold line names each chunk that is not free. A commit cut between its first two steps leaves
both, and the slot wins at recovery. If a batch stores a key twice, the hold line alone then names the first value's
chunk; it stays quarantined with its session.

A CorruptionError says that the arena and the private state contradict each other: a slot was overwritten by a stray
store, or bookkeeping failed halfway. The worker ends then, and its successor rebuilds everything from the slots, of
which it drops those that are impossible. Where two slots name one chunk, no one can tell whose value it has, and
both are dropped.

``arena/vault.py`` covers what a stray store hits beside slots, ``arena/sessions.py`` sessions,
``arena/shard_words.py`` the entries of shards that move.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ..constants import DEFAULT_POLICY, KEEP_SHARES
from ..errors import CorruptionError
from ..host.threads import LACKING, beating
from ..table import ZERO_DIGEST, Entry, Table
from ..wire.messages import ABSENT, BOUND, NAMESPACE_SHIFT, Status
from ..wire.shard_set import EPOCH_MASK, FROZEN
from .events.ring import NO_STATS
from .hashing import SHARD_MASK, TAG_AT, shard_of
from .layout import (
    ENTRY_BOUND,
    ENTRY_EPOCH,
    HEADER_BYTES,
    NONE_BOUND,
    SHARDS_BYTES,
    SOME_BOUND,
    STAMP_BYTES,
    Geometry,
    State,
    Word,
    publish,
)
from .ledger import Ledger
from .lookups.locate import Locator
from .marks.groups import Groups
from .marks.keeping import Keeping
from .marks.kept import Shares
from .marks.near import COMMIT_NEAR, NearCopies
from .namespaces import StaleEntries
from .quotas import Quotas
from .rebuild import take_entries
from .sessions import Session, SessionTable
from .shard_words import DROP_ENTRIES, LostEntries, ShardWords
from .space import Space
from .vault import Vault, take_over

#: Causes of failed puts: the keys of ``put_failures``.
BAD_REQUEST, WRONG_OWNER, STALE_GRANT = "bad_request", "wrong_owner", "stale_grant"
TABLE_FULL, NO_ROOM, OVER_QUOTA, OLD_EPOCH = "table_full", "no_room", "over_quota", "old_epoch"


class Store:
    """A worker's arena. Construct it with :meth:`create` or :meth:`recover`.

    Its public offsets are from the arena's start.
    """

    def __init__(
        self, mm: mmap.mmap, geometry: Geometry, incarnation: int, policy: str, vault: Vault | None, shares: Shares
    ) -> None:
        self.vault, self.geometry, self.incarnation = vault, geometry, incarnation
        self.now_ms = 0
        self.notes: list[str] = []
        whole = memoryview(mm)
        self._whole = whole
        self.header = whole[:HEADER_BYTES].cast("Q")
        shown = whole[HEADER_BYTES : HEADER_BYTES + SHARDS_BYTES].cast("Q")
        #: The header that is believed, and the shard words.
        self._kept = self.header if vault is None else vault.header
        self.shards = shown if vault is None else vault.shards
        self.shard_words = ShardWords(self.shards, None if vault is None else shown)
        self.visited = whole[geometry.visited_offset : geometry.visited_offset + geometry.slots]
        self.table = Table(mm, geometry, incarnation, vault.undo if vault else None)
        self.ledger = Ledger(mm, geometry, vault.ledger if vault else None)
        keys = self.table.key_words()
        evict = self._drop_entry, keys, self._drop_entries
        self.space = Space(geometry.data_bytes, geometry.slots, self.visited, policy, *evict, shares)
        self.space.victims.age_ms = lambda slot: self.now_ms - self.table.stored(slot)
        self.stale = StaleEntries(self.ledger.namespaces, self.table, self.space, self._drop_entry, self._drop_many)
        self.sessions = SessionTable(
            geometry, incarnation, self.ledger, self.space, self.apply_pending, lambda: self.now_ms
        )
        self._data = geometry.data_offset
        self._locator = Locator(
            self.table, self.space, self.sessions, self.ledger.namespaces, self.shard_words, self.shards, self.visited,
            self._data, self._check,
        )  # fmt: skip
        #: Commits with deferred bookkeeping: (replaced chunk or -1, chunk, slot). See apply_pending().
        self._pending: list[tuple[int, int, int]] = []
        #: Commits refused, by cause. The worker's ``put_failures`` has the other causes too.
        self.commit_failures = dict.fromkeys((BAD_REQUEST, WRONG_OWNER, TABLE_FULL, OVER_QUOTA, OLD_EPOCH), 0)
        self.keeping = Keeping(self.space.kept, self.table, self.shard_words, self.ledger.namespaces)
        self.near = NearCopies(
            self.keeping, self.table, self.commit, partial(self._refuse, cause=OVER_QUOTA, status=Status.OVER_QUOTA),
            self._drop_orphans, self._drop_entry, self.space.evictions, self.commit_failures, (self._kept, self.header),
        )  # fmt: skip
        self._lost = LostEntries(self.shard_words, self.table, self._drop_entry)
        readable = self.ledger.namespaces.readable
        drop = self._drop_entry, self._drop_many, self.beat, self.space.victims.note
        self.groups = Groups(self.table, self.space, self.visited, self.shard_words, readable, *drop)
        self.quotas: Quotas | None = None  # as long as no namespace has one
        self.puts = self.overwrites = self.deletes = self.set_evictions = self.stale_commits = self.copies = 0

    # -- creation and recovery ----------------------------------------------------------------

    @classmethod
    def create(
        cls, mm: mmap.mmap, *, slots: int = 0, policy: str = DEFAULT_POLICY, incarnation: int = 1, generation: int = 1,
        vault: Vault | None = None, shares: Shares = KEEP_SHARES,
    ) -> Store:  # fmt: skip
        """Lay out a fresh, zeroed arena. The caller holds its writer lock and has faulted its pages in.

        ``mm`` maps both files, one after the other. ``generation``: a random number, not 0, by which they know each
        other again. ``vault``: what is in it is believed from now on, whatever others store into the arena. Without one
        the arena itself is.
        """
        geometry = Geometry.plan(len(mm), slots)
        memoryview(mm)[geometry.size - STAMP_BYTES : geometry.size].cast("Q")[0] = generation
        words = memoryview(mm)[:HEADER_BYTES].cast("Q")
        geometry.write(words)
        words[Word.GENERATION], words[Word.INCARNATION] = generation, incarnation
        words[Word.STATE], words[Word.BOUND] = State.STARTING, NONE_BOUND
        store = cls(mm, geometry, incarnation, policy, vault, shares)
        if vault is not None:
            vault.fill(words, geometry)
        publish(words)
        words.release()
        return store

    @classmethod
    def recover(
        cls, mm: mmap.mmap, name: str, *, policy: str = DEFAULT_POLICY, vault: Vault | None = None,
        shares: Shares = KEEP_SHARES,
    ) -> Store:  # fmt: skip
        """Take over a dead worker's arena. The caller holds its writer lock.

        ``vault``: what a predecessor has left in it outranks the arena; an empty one takes over what the arena says.
        Raise SegmentError for a foreign or closed arena, and MemoryError, OSError and RuntimeError for what the system
        lacks: all values are still there then. O(slots + ledger lines).
        """
        geometry, incarnation = take_over(mm, name, vault)
        store = cls(mm, geometry, incarnation, policy, vault, shares)
        try:
            store._rebuild()
        except Exception as exc:
            if vault is None or isinstance(exc, LACKING):  # whatever slots say: the next recovery may have it
                raise
            # What the slots say may change while they are read. Without them nothing is left that can be wrong.
            store = cls(mm, geometry, incarnation, policy, vault, shares)
            store._rebuild(keep=False)
            store.notes.append(f"all entries dropped: {exc!r}")
        return store

    def _rebuild(self, *, keep: bool = True) -> None:
        """Rebuild the private state from the arena: entries first, then the holds that they do not outrank.

        ``keep=False``: empty all slots, whatever they say.
        """
        self.shard_words.recover()
        if keep:
            self.notes = self.table.recover(self.beat)
        else:
            self.table.wipe(self.beat)
        with beating(self.beat):
            self.notes += self.ledger.recover()
        # Before any chunk is reserved: a predecessor may have died while it gave a shard up.
        if count := self.table.clear_shards(self.shard_words.lost(), self.beat):
            self.notes.append(f"{count} entries of shards given up dropped")
        with beating(self.beat):
            live, end = self.table.live(), self.geometry.data_end
            self.notes += take_entries(live, self._data, end, self.space.restore, self.table.clear)
            slots, _, marks = self.table.marked()
            self.keeping.recover(slots.tolist(), marks.tolist())
            self.notes += self.sessions.restore()
            self.notes += self.groups.restore()
            self.space.end_recovery()

    def beat(self) -> None:
        """Show readers that a worker is there."""
        self.header[Word.HEARTBEAT] = (self.header[Word.HEARTBEAT] + 1) & 0xFFFF_FFFF

    def set_quotas(self, limits: Mapping[str, int]) -> None:
        """Hold namespaces to so many bytes of this arena. O(slots), unless there are none; readers see beats then."""
        self.apply_pending()
        with beating(self.beat):
            self.quotas = Quotas(limits, self.ledger.names, self.geometry.slots, self.table.live()) if limits else None

    def _keep(self, word: int, value: int) -> None:
        """Store a word of the header."""
        self._kept[word] = value
        self.header[word] = value

    @property
    def cluster(self) -> int:
        """Return the cluster of all entries and shard words, 0 before the first map."""
        return int(self._kept[Word.CLUSTER])

    @property
    def epoch(self) -> int:
        """Return the highest map epoch that a worker of this arena has acted on."""
        return int(self._kept[Word.EPOCH])

    def open(self) -> None:
        """Let readers use the arena."""
        self._keep(Word.STATE, State.OPEN)

    def suspend(self) -> None:
        """Complete the arena for the next start, and mark it suspended."""
        if self.vault is not None:
            self.vault.save(self._whole)
        self._keep(Word.STATE, State.SUSPENDED)

    def close(self) -> None:
        """Mark the arena closed for good, and zero the shard words, which readers check: they re-resolve."""
        self._keep(Word.STATE, State.CLOSED)
        self.shard_words.clear()

    def release(self) -> None:
        """Drop every view of the segment."""
        self.table.release()
        self.ledger.release()
        for view in (self.header, self.shards, self.visited, self._whole):
            view.release()

    # -- shards -------------------------------------------------------------------------------

    def begin_shards(self, epoch: int, since: bytes, roles: bytes, cluster: int = 0) -> None:
        """Take over and give up shards by a map (``messages.Shards``). Raise UsageError for a malformed one. O(shards).

        The entries of lost shards are left to :meth:`drop_some`, which the caller calls until it returns False. A shard
        that has them counts as clearing (``arena/shard_words.py``): nobody finds them, and no word is set before they
        are gone. So a shard with word 0 that is not clearing has no entry (recovery drops those that a death left), and
        its word may be set without a search in the table.

        ``cluster`` is the map's. Epochs of two clusters are not comparable, so no word or entry of another cluster
        stays. The header names the new cluster before its map sets any word.
        """
        self.apply_pending()
        words = self.shard_words
        if self.cluster != cluster:
            if words.retire(EPOCH_MASK, bytes(SHARDS_BYTES), bytes(len(words.words))):
                self._lost.begin()
            for session in self.sessions.by_id.values():
                session.copies = 0  # a mover by the other cluster's map
            self._keep(Word.CLUSTER, cluster)
            self.ledger.namespaces.forget_epochs()
            self.stale.end()
        if words.retire(epoch, since, roles):
            self._lost.begin()
        self._keep(Word.EPOCH, epoch)
        words.take()

    def freeze(self, epoch: int, shards: Sequence[int]) -> list[int] | None:
        """Freeze shards that a new owner takes over: see :meth:`ShardWords.freeze`."""
        self.apply_pending()
        return self.shard_words.freeze(epoch, shards, self.epoch)

    def drop_some(self, most: int = DROP_ENTRIES) -> bool:
        """Drop at most ``most`` entries of lost shards. Return True while there may be more. O(``most`` + a block)."""
        if not self.shard_words.clearing:
            return False
        self.apply_pending()
        return self._lost.drop_some(most)

    # -- entries ------------------------------------------------------------------------------

    def commit(self, session: Session, entries: Sequence[tuple[bytes, int, int, int, int, int]]) -> list[int]:
        """Publish values in granted chunks: (digest, grant id, length, crc, flags, options) each. Return the statuses.

        Each grant id is spent, whatever its status. On return, the values are published and the ledger is exact. The
        private bookkeeping waits for :meth:`apply_pending`, so that the answer can leave first.
        """
        if self.groups.orphans:  # else a value of now would be dropped as what is left of its predecessor's group
            self._drop_orphans()
        grants, shards = session.grants, self.shard_words.accepting
        publish, pending, quotas, near = self.table.publish, self._pending, self.quotas, self.near
        own, now, tags = session.namespace, self.now_ms, self.ledger.namespaces.tags
        alert = self.groups.used or self.shard_words.moving > 0
        statuses = []
        #: Ledger lines of the published chunks, ended in one call.
        lines = []
        spent = 0
        try:
            for digest, number, length, crc, flags, options in entries:
                grant = grants.pop(number, None)
                if grant is None:
                    self.stale_commits += 1
                    statuses.append(Status.STALE_GRANT)
                    continue
                offset, chunk, line = grant
                if not 0 < length <= chunk:
                    statuses.append(self._refuse(session, grant, BAD_REQUEST, Status.BAD_REQUEST))
                    continue
                if not 0 < shards[(digest[0] | digest[1] << 8) & SHARD_MASK] < FROZEN:
                    statuses.append(self._refuse(session, grant, WRONG_OWNER, Status.WRONG_OWNER))
                    continue
                namespace = own
                if flags >= ENTRY_BOUND and (flags := session.flags(flags)) & COMMIT_NEAR:
                    plain = digest, number, length, crc, flags ^ COMMIT_NEAR, options
                    statuses.append(near.commit(session, plain, grant))
                    if self.groups.orphans:
                        self._drop_orphans()
                    continue
                if options:
                    refused, namespace = self._take_options(session, digest, options)
                    if refused:
                        self.sessions.release(session, grant)
                        statuses.append(refused)
                        continue
                    if options & BOUND:
                        flags |= ENTRY_BOUND
                if tags and (tag := tags.get(namespace)) is not None:
                    if digest[TAG_AT:] != tag:
                        statuses.append(self._refuse(session, grant, OLD_EPOCH, Status.OLD_EPOCH))
                        continue
                    flags |= ENTRY_EPOCH
                if quotas is not None and not (quotas.admits(namespace, chunk) or near.cedes(quotas, namespace, chunk)):
                    statuses.append(self._refuse(session, grant, OVER_QUOTA, Status.OVER_QUOTA))
                    continue
                if flags & ENTRY_BOUND:
                    self._kept[Word.BOUND] = self.header[Word.BOUND] = SOME_BOUND  # before a reader can find it
                if alert:
                    self._before_other(digest, namespace)
                done = publish(digest, offset, length, crc, chunk, namespace, flags, now)
                if done is None and digest != ZERO_DIGEST and self._evict_from_sets(digest):
                    done = publish(digest, offset, length, crc, chunk, namespace, flags, now)
                if done is None:
                    why = (TABLE_FULL, Status.NO_SPACE) if digest != ZERO_DIGEST else (BAD_REQUEST, Status.BAD_REQUEST)
                    statuses.append(self._refuse(session, grant, *why))
                    continue
                if quotas is not None:
                    replaced = self.space.chunk_bytes(done[0] - self._data) if done[0] >= 0 else 0
                    quotas.published(done[2], namespace, chunk, replaced)
                lines.append(line)
                spent += chunk
                pending.append(done)
                statuses.append(Status.OK)
        finally:
            self.ledger.end_holds(lines)
            session.granted_bytes -= spent
            self.sessions.granted_bytes -= spent
        return statuses

    def _before_other(self, digest: bytes, namespace: int) -> None:
        """Prepare an entry of another namespace for a value of ``namespace``, which is to take its place.

        The value is in no group of that entry: whoever deletes another member deletes this value with it. The entry's
        namespace has changed the key, so it may not read what a previous owner has.
        """
        slot = self.table.lookup(digest)
        if slot >= 0 and self.table.entry(slot).namespace != namespace:
            if self.groups.used:
                self.groups.ungroup(slot)
            if self.shard_words.moving:
                self.shard_words.note_dropped(digest)

    def _refuse(self, session: Session, grant: tuple[int, int, int], cause: str, status: int) -> int:
        """Free the chunk of a commit that is refused, count the cause, and return the status."""
        self.sessions.release(session, grant)
        self.commit_failures[cause] += 1
        return status

    def _take_options(self, session: Session, digest: bytes, options: int) -> tuple[int, int]:
        """Return the status that refuses a commit with options, 0 if it is allowed; and the value's namespace."""
        namespace = session.namespace
        if options & ~ABSENT:
            namespace = (options >> NAMESPACE_SHIFT) - 1
            known = self.ledger.namespaces.knows(namespace) and not options & (1 << NAMESPACE_SHIFT) - 1 & ~BOUND
            if not (session.relays and known):
                self.commit_failures[BAD_REQUEST] += 1
                return Status.BAD_REQUEST, namespace
            slot = self.table.lookup(digest) if options & BOUND else -1
            if slot >= 0 and self.table.entry(slot).namespace != namespace:
                self.commit_failures[BAD_REQUEST] += 1
                return Status.UNAUTHORIZED, namespace
            return Status.OK, namespace
        of_now = digest.endswith(self.ledger.namespaces.tags.get(namespace, b""))
        if not (of_now and self.shard_words.may_copy(digest, session.copies) and self.table.lookup(digest) < 0):
            return Status.PRESENT, namespace
        self.copies += 1
        return Status.OK, namespace

    def apply_pending(self) -> None:
        """Do the bookkeeping that commits deferred, then make the wanted grants. O(entries and grants since)."""
        if self._pending:
            self._apply_entries()
        if self.sessions.wanted:
            self.sessions.prepare_wanted()
        if self.groups.orphans:
            self.groups.drop_orphans()

    def _drop_orphans(self) -> None:
        """Drop orphans in the middle of something, without making grants, which may evict."""
        self._apply_entries()
        self.groups.drop_orphans()

    def _apply_entries(self) -> None:
        """Assign the chunks to their entries, and free the replaced ones."""
        pending = self._pending
        todo = pending[:]
        pending.clear()  # in place, as a running commit refers to the list
        space, data = self.space, self._data
        self.puts += len(todo)
        try:
            if len(todo) == 1:
                old, new, slot = todo[0]
                if old < 0:
                    space.publish(new - data, slot)
                else:
                    space.replace(old - data, new - data, slot)
                    self.overwrites += 1
            else:
                self._assign(todo)
        except Exception as exc:  # of any kind: the entries are published, and their bookkeeping is lost
            raise CorruptionError(f"the bookkeeping of {len(todo)} commits failed: {exc!r}") from exc
        if self.keeping.awaited.marks:
            self.keeping.arrived(slot for _, _, slot in todo)

    def _assign(self, todo: list[tuple[int, int, int]]) -> None:
        """Do :meth:`_apply_entries` for several commits. Of one prompt the last pages go first, as they need others."""
        space, data = self.space, self._data
        if all(old < 0 for old, _, _ in todo):
            space.publish_many([(new - data, slot) for _, new, slot in reversed(todo)])
            return
        fresh: list[tuple[int, int]] = []
        for old, new, slot in todo:
            if old < 0:
                fresh.append((new - data, slot))
                continue
            if fresh:  # the slot may be one of them
                space.publish_many(reversed(fresh))
                fresh = []
            space.replace(old - data, new - data, slot)
            self.overwrites += 1
        if fresh:
            space.publish_many(reversed(fresh))

    def delete(self, digests: Sequence[bytes], sizes: Sequence[int] | None = None) -> list[int]:
        """Delete entries, and return the statuses. OK also if only the previous owner may have the value.

        With ``sizes``, an entry whose value has another size stays, with status NOT_FOUND. A value at the previous
        owner is dropped whatever its size, which is unknown here: a miss at worst.
        """
        self.apply_pending()
        words = self.shard_words
        statuses = []
        for at, digest in enumerate(digests):
            if at & 255 == 255 and self.groups.used:  # each may take a large group apart
                self.beat()
            if not words.accepts(shard_of(digest)):
                statuses.append(Status.WRONG_OWNER)
                continue
            slot = self.table.lookup(digest)
            if slot >= 0 and (sizes is None or self.table.entry(slot).length == sizes[at]):
                self._drop_entry(slot)
                self.deletes += 1
            elif slot < 0 and words.moving and words.status_of_miss(digest) == Status.PREVIOUS:
                words.note_dropped(digest)
            else:
                statuses.append(Status.NOT_FOUND)
                continue
            statuses.append(Status.OK)
        self.groups.drop_orphans()
        return statuses

    def keep(self, digests: Sequence[bytes], how: int, seconds: int, now_s: int, mover: int = 0) -> list[int]:
        """Keep entries from eviction, and return the statuses: see :meth:`Keeping.keep`."""
        self.apply_pending()
        return self.keeping.keep(digests, how, seconds, now_s, mover)

    def locate(
        self, session: Session | None, digests: Sequence[bytes], how: int = 0
    ) -> list[tuple[int, int, int, int, int, int]]:
        """Return (status, flags, length, crc, offset, pin id) per digest. With a session, pin each hit for it.

        A miss has the status of :meth:`exists`; with PREVIOUS the offset is the epoch since which this worker owns the
        shard (see ``messages.Located``). With LOCATE_PREVIOUS in ``how``, entries of frozen shards are hits too.
        """
        self.apply_pending()
        return self._locator.locate(session, digests, how)

    def exists(self, digests: Sequence[bytes]) -> list[int]:
        """Return OK, NOT_FOUND, PREVIOUS (the previous owner may have it) or WRONG_OWNER per digest."""
        if self.groups.orphans:
            self._drop_orphans()
        words, stored, shards = self.shard_words, self._stored, self.shards
        return [
            Status.OK if 0 < shards[shard_of(digest)] < FROZEN and stored(digest) else words.status_of_miss(digest)
            for digest in digests
        ]

    def _stored(self, digest: bytes) -> bool:
        slot = self.table.lookup(digest)
        if slot < 0:
            return False
        entry = self.table.entry(slot)
        return self.ledger.namespaces.readable(entry.namespace, digest, entry.flags)

    # -- eviction -----------------------------------------------------------------------------

    def _drop_entry(self, slot: int, evicted: bool = False) -> None:
        """Remove an entry from the table, then free its chunk."""
        if self.groups.used:
            self.groups.leave(slot, evicted or self.space.evicting)
        if self.shard_words.moving:
            self.shard_words.note_dropped(self.table.entry(slot).digest)
        offset = self.space.offset(slot)
        if self.table.offset(slot) - self._data != offset:
            raise CorruptionError(f"slot {slot} names another chunk than its own at {offset}")
        self.table.clear(slot)
        if self.quotas is not None:
            self.quotas.dropped(slot, self.space.chunk_bytes(offset))
        self.space.release(offset)

    def _drop_entries(self, slots: list[int], offsets: list[int], evicted: bool = True) -> None:
        """Remove entries from the table, whose chunks at these offsets of the region are granted next."""
        self.groups.leave_many(slots, evicted)
        if self.shard_words.moving:
            self.shard_words.note_dropped_many(self.table.digests(slots))
        self.table.clear_many(slots, [offset + self._data for offset in offsets])
        if self.quotas is not None:
            self.quotas.dropped_many(slots, offsets, self.space.chunk_bytes)

    def _drop_many(self, slots: list[int], offsets: list[int]) -> None:
        """Do :meth:`_drop_entry` for many, none of them held: no more than a ring's readers look back."""
        self._drop_entries(slots, offsets, evicted=False)
        self.space.release_many(slots, offsets)

    def drop_spoilt(self, slot: int) -> None:
        """Empty a slot in which others have stored something, and free its own chunk. Nothing is pending."""
        self.shard_words.end_fallbacks()  # the value's owner is unknown
        self.groups.leave_many([slot])
        offset = self.space.offset(slot)
        self.table.empty(slot)
        if offset >= 0:
            if self.quotas is not None:
                self.quotas.dropped(slot, self.space.chunk_bytes(offset))
            self.space.release(offset)

    def _check(self, slot: int, entry: Entry) -> None:
        """Raise CorruptionError unless a live slot's fields name its own chunk, and not more bytes than that has."""
        offset = self.space.offset(slot)
        if entry.offset - self._data != offset or not 0 < entry.length <= entry.chunk == self.space.chunk_bytes(offset):
            raise CorruptionError(f"slot {slot} names other bytes than those of its chunk at {offset}")

    def _evict_from_sets(self, digest: bytes) -> bool:
        """Evict the coldest entry from the digest's full sets. Return False if all are pinned or hard kept."""
        self._apply_entries()  # but make no grants, which may evict
        kept, table = self.space.kept, self.table
        best = kept.first_to_go(table.candidates(digest), self.space.is_held, self.visited, table.stored)
        if best < 0:
            return False
        self.space.victims.note((best,))
        self._drop_entry(best, evicted=True)
        self.set_evictions += 1
        self.visited[best] = 0
        self.groups.drop_orphans()
        return True

    # -- inspection ---------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return counters and gauges. O(classes)."""
        self.apply_pending()
        return {
            "entries": self.table.entries, "slots": self.geometry.slots, "data_bytes": self.geometry.data_bytes,
            "free_bytes": self.space.free_bytes, **self.sessions.stats(), "puts": self.puts,
            "overwrites": self.overwrites, "deletes": self.deletes, **self.space.victims.stats(),
            "set_evictions": self.set_evictions, **self.groups.stats(), "stale_drops": self.stale.dropped,
            "cluster": self.cluster, "epochs": self.ledger.namespaces.epochs(),
            "put_failures": {**self.commit_failures, STALE_GRANT: self.stale_commits, NO_ROOM: self.sessions.refused},
            "stale_commits": self.stale_commits, **self.shard_words.stats(), "copies": self.copies,
            "incarnation": self.incarnation, "policy": self.space.policy_name, "room": self.space.largest_free(),
            "quotas": self.quotas.stats() if self.quotas is not None else {},
            "kept": self.keeping.stats(self.ledger.names), "near": self.near.counts,
            **(NO_STATS if self.table.events is None else self.table.events.stats()),
        }  # fmt: skip

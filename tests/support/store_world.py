"""A store, the clients that use it, and a reference model that knows what must be true after every step.

The clients are simulated: each granted chunk is filled completely and at once with 16 repeated bytes that no other
grant gets, as a client may write anywhere in its chunk. So the value that a commit publishes differs from any other at
every place, and a chunk that has two owners shows in the bytes of one of them.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from hashlib import blake2b
from typing import NamedTuple, TypeVar

import numpy as np

from simm.arena.hashing import Hasher, shard_of
from simm.arena.layout import Geometry
from simm.arena.marks.near import COMMIT_NEAR
from simm.arena.reader import ArenaReader, Unsettled
from simm.arena.sessions import FAIR, Session
from simm.arena.store import Store
from simm.constants import DEFAULT_POLICY, SHARD_COUNT, SLAB_BYTES, SLAB_CHUNK_BYTES_MAX
from simm.ipc.arena_files import OwnedArena
from simm.slab import CHUNKS_PER_SLAB, chunk_bytes_for, class_of
from simm.wire.messages import ShardRole, Status
from simm.wire.shard_set import EPOCH_MASK, FROZEN, shards_in
from tests.support.consistency import check
from tests.support.shards import set_shards

ALL_SHARDS = b"\xff" * (SHARD_COUNT // 8)
TOKEN_BYTES = 16
#: Every so many tokens are looked at in long values; whole ones up to this many.
STRIDE = 16
WHOLE = 4096

T = TypeVar("T")
digest_of = Hasher("world")
_names = itertools.count()


class Value(NamedTuple):
    """The expected value of an entry: ``length`` bytes of the repeated ``token``."""

    token: bytes
    length: int


class Grant(NamedTuple):
    """A chunk that a client may write into."""

    offset: int
    chunk: int
    token: bytes


class Pin(NamedTuple):
    """A value that a client uses without a seqlock."""

    offset: int
    value: Value


class Player:
    """A client: its session as the store knows it, and its own record of its grants and pins."""

    def __init__(self, session: Session) -> None:
        self.number = session.session
        self.session = session
        self.connected = True
        self.grants: dict[int, Grant] = {}
        #: Prepared for it, but not announced yet.
        self.prepared: dict[int, Grant] = {}
        self.pins: dict[int, Pin] = {}


class Model(NamedTuple):
    """A copy of the reference model's state."""

    values: dict[bytes, Value]
    grants: dict[int, dict[int, Grant]]
    pins: dict[int, dict[int, Pin]]
    mine: bytes


class Wrong(AssertionError):
    """Something that must never happen was seen."""


def token_of(*parts: object) -> bytes:
    """Return 16 bytes that identify the arguments."""
    return blake2b(repr(parts).encode(), digest_size=TOKEN_BYTES).digest()


def bytes_of(value: Value) -> bytes:
    """Return the value's bytes."""
    return (value.token * (value.length // TOKEN_BYTES + 1))[: value.length]


def is_value(data: memoryview | bytes, value: Value) -> bool:
    """Return True if the bytes consist of the value's token. Long values are sampled, including the ends."""
    if len(data) != value.length:
        return False
    whole = value.length // TOKEN_BYTES * TOKEN_BYTES
    rest = value.length - whole
    if rest and bytes(data[whole:]) != value.token[:rest]:
        return False
    if not whole:
        return True
    tokens = np.frombuffer(data, np.uint64, whole // 8).reshape(-1, 2)
    if len(tokens) > WHOLE:
        tokens = np.concatenate((tokens[::STRIDE], tokens[-1:]))
    return bool((tokens == np.frombuffer(value.token, np.uint64)).all())


def owned(mine: bytes, epoch: int, before: np.ndarray | None = None) -> tuple[bytes, bytes]:
    """Return the SHARDS fields for a bitmap: each shard is ours since ``before``, or else since ``epoch``."""
    since = np.zeros(SHARD_COUNT, np.uint64)
    shards = shards_in(mine)
    since[shards] = epoch
    if before is not None:
        since[shards] = np.where(before[shards] != 0, before[shards], since[shards])
    return since.tobytes(), np.where(since != 0, ShardRole.OWNER, ShardRole.NONE).astype(np.uint8).tobytes()


def new_segment(size: int, slots: int = 0) -> OwnedArena:
    """Return an arena's memory for one world after another."""
    return OwnedArena.create(f"simm-test-{os.getpid()}-world-{next(_names)}", size, slots=slots)


def remove_segment(segment: OwnedArena) -> None:
    """Remove an arena's memory from the system."""
    segment.unlink()
    segment.close()


def divide(segment: OwnedArena, slots: int) -> None:
    """Make an arena's files anew if they are not divided for so many slots."""
    if segment.meta.size != Geometry.plan(segment.size, slots).meta_bytes:
        name, size = segment.name, segment.size
        remove_segment(segment)
        segment.__dict__ = OwnedArena.create(name, size, slots=slots).__dict__


class World:
    """One arena with clients. Every method applies an operation to the store and the model and compares the results."""

    def __init__(
        self, segment: OwnedArena, *, slots: int = 256, policy: str = DEFAULT_POLICY, store: type[Store] = Store
    ) -> None:
        self.segment = segment
        geometry = Geometry.plan(segment.size, slots)
        divide(segment, slots)
        segment.buf[: geometry.data_offset] = bytes(geometry.data_offset)
        segment.buf[geometry.data_end :] = bytes(segment.size - geometry.data_end)
        self.kind = store
        self.policy = policy
        self.store = store.create(segment.mm, slots=slots, policy=policy)
        self.geometry = self.store.geometry
        self.mine = bytes(SHARD_COUNT // 8)
        self.since = np.zeros(SHARD_COUNT, np.uint64)
        self.epoch = 0
        self.values: dict[bytes, Value] = {}
        self.set_shards(ALL_SHARDS)
        self.store.open()
        self.reader = ArenaReader(segment.name)
        self.players: list[Player] = []
        self.deaths = 0
        self.evicted = 0
        self._tokens = itertools.count()
        self._clock = itertools.count(1)
        self.data = segment.buf

    # -- players --------------------------------------------------------------------------------

    def join(self, namespace: str = "world", pid: int = 0) -> Player:
        """Connect a client, of this process by default."""
        player = Player(self.store.sessions.open(pid or os.getpid(), 1, namespace))
        self.players.append(player)
        return player

    def disconnect(self, player: Player) -> None:
        """Break a client's connection; the client may still copy into and out of its chunks."""
        player.connected = False
        self.store.sessions.close(player.session)
        if not player.grants and not player.pins:
            self.players.remove(player)

    def exit(self, player: Player) -> None:
        """End a client's process."""
        if player.session.session in self.store.sessions.by_id:
            self.store.sessions.end(player.session)
        self.players.remove(player)

    def die(self) -> None:
        """Kill the worker and start a new one. The clients live on, without a connection."""
        self.look_at_prepared()
        self.store = self.kind.recover(self.segment.mm, self.segment.name, policy=self.policy)
        if self.store.notes:
            raise Wrong(f"a death between operations left something to repair: {self.store.notes}")
        self.store.open()
        self.evicted = 0
        self.deaths += 1
        self.rejoin()
        self.set_shards(self.mine)  # the first that its supervisor says

    def rejoin(self) -> None:
        """Check after a recovery that the clients' grants and pins are quarantined under their old sessions."""
        for player in list(self.players):
            player.connected = False
            session = self.store.sessions.by_id.get(player.number)
            if session is None:
                raise Wrong(f"recovery forgot session {player.number:#x}")
            player.session = session
            player.grants |= player.prepared  # quarantined like the others: nobody knows any more who was told
            player.prepared = {}
            if not player.grants and not player.pins:
                self.exit(player)

    # -- deaths in the middle -------------------------------------------------------------------

    def model(self) -> Model:
        """Return a copy of the model's state."""
        return Model(
            dict(self.values),
            {player.number: player.grants | player.prepared for player in self.players},
            {player.number: dict(player.pins) for player in self.players},
            self.mine,
        )

    def recover(self) -> None:
        """Start a new worker on the segment as it is; :meth:`settle_on` must follow."""
        self.store = self.kind.recover(self.segment.mm, self.segment.name, policy=self.policy)
        self.store.open()
        self.evicted = 0

    def settle_on(self, before: Model, after: Model) -> None:
        """Check after a death in the middle of an operation that each part is as before it or as after it.

        The model takes over what it finds, so that :meth:`check` can go on from here.
        """
        self._settle_values(before, after)
        self.players = []
        for number in before.grants.keys() | after.grants.keys():
            session = self.store.sessions.by_id.get(number)
            if session is None:
                if number in before.grants and number in after.grants:
                    raise Wrong(f"recovery forgot session {number:#x}")
                continue
            player = Player(session)
            player.connected = False
            self.players.append(player)
            self._settle_holds(
                player.grants, session.grants, before.grants.get(number, {}), after.grants.get(number, {}), "grant"
            )
            for grant in player.grants.keys() - before.grants.get(number, {}).keys():
                self.fill(*player.grants[grant])  # its client would do that next
            self._settle_holds(
                player.pins, session.pins, before.pins.get(number, {}), after.pins.get(number, {}), "pin"
            )
        known = {player.number for player in self.players}
        sessions = self.store.sessions.by_id
        self.players += [Player(session) for number, session in sessions.items() if number not in known]
        live = {value.token for value in self.values.values()}
        published = {value.token for value in after.values.values()}
        for number, grants in before.grants.items():
            kept = self.store.sessions.by_id[number].grants if number in self.store.sessions.by_id else {}
            for grant, chunk in grants.items():
                if chunk.token in published - live and grant not in kept:
                    raise Wrong("a commit that was cut short lost its grant: its client may still be writing")

    def _settle_values(self, before: Model, after: Model) -> None:
        self.since = np.frombuffer(self.store.shards, np.uint64) & np.uint64(EPOCH_MASK)
        mine = bytearray(SHARD_COUNT // 8)
        for shard in np.flatnonzero(self.since).tolist():
            mine[shard >> 3] |= 1 << (shard & 7)
        odd = [m & ~(b | a) | (b & a) & ~m for m, b, a in zip(mine, before.mine, after.mine)]
        if any(odd):
            raise Wrong("a shard is neither as before nor as after")
        self.mine = bytes(mine)
        self.values = {}
        for digest in before.values.keys() | after.values.keys():
            old, new = before.values.get(digest), after.values.get(digest)
            data = self.read(digest)
            if data is None:
                if old is not None and new is not None:
                    raise Wrong("a value that was stored before and after is lost")
                continue
            right = [value for value in (old, new) if value is not None and is_value(data, value)]
            if not right:
                raise Wrong("a value is neither the old one nor the new one")
            self.values[digest] = right[0]

    @staticmethod
    def _settle_holds(
        mine: dict[int, T], theirs: Iterable[int], before: dict[int, T], after: dict[int, T], what: str
    ) -> None:
        kept = set(theirs)
        if before.keys() & after.keys() - kept:
            raise Wrong(f"a {what} that stood before and after is lost")
        for number in kept:
            hold = before.get(number) or after.get(number)
            if hold is None:
                raise Wrong(f"a {what} that nobody was given")
            mine[number] = hold

    # -- operations -----------------------------------------------------------------------------

    def grant(self, player: Player, size: int, count: int = 1) -> list[int]:
        """Ask for chunks and fill them."""
        before = self.count_evicted()
        got = self.store.sessions.grant(player.session, size, count)
        for number, offset, chunk in got:
            if chunk != chunk_bytes_for(size):
                raise Wrong(f"asked for {size} bytes, got a chunk of {chunk}")
            token = token_of("grant", next(self._tokens))
            self.fill(offset, chunk, token)
            player.grants[number] = Grant(offset, chunk, token)
        self.forget_evicted(before)
        return [number for number, _, _ in got]

    def want(self, player: Player, size: int, count: int, *, take: bool = True) -> None:
        """Prepare grants for the next answer; with ``take``, deliver that answer."""
        before = self.count_evicted()
        self.store.sessions.want(player.session, size, count)
        self.store.apply_pending()
        self.forget_evicted(before)
        self.look_at_prepared()
        if take:
            self.take_prepared(player)

    def take_prepared(self, player: Player) -> None:
        """Deliver the prepared grants."""
        for number, offset, chunk in self.store.sessions.take_prepared(player.session):
            grant = player.prepared.pop(number)
            if (grant.offset, grant.chunk) != (offset, chunk):
                raise Wrong("a grant is told otherwise than it was prepared")
            player.grants[number] = grant

    def look_at_prepared(self) -> None:
        """Follow the grants that the store prepares and revokes by itself; fill them, as none may be used twice."""
        for player in self.players:
            now = {number: (offset, chunk) for number, offset, chunk in player.session.prepared}
            for number in player.prepared.keys() - now.keys():
                del player.prepared[number]
            for number in now.keys() - player.prepared.keys():
                if number in player.session.grants:
                    player.prepared[number] = Grant(*now[number], token_of("grant", next(self._tokens)))
                    self.fill(*player.prepared[number])

    def fill(self, offset: int, chunk: int, token: bytes) -> None:
        """Fill a whole chunk."""
        self.data[offset : offset + chunk] = (token * (chunk // TOKEN_BYTES + 1))[:chunk]

    def return_grants(self, player: Player, numbers: Iterable[int]) -> None:
        """Return unused grants."""
        numbers = list(numbers)
        known = sum(number in player.grants for number in numbers)
        if self.store.sessions.return_grants(player.session, numbers) != known:
            raise Wrong("the store knows other grants than its client")
        for number in numbers:
            player.grants.pop(number, None)

    def commit(self, player: Player, number: int, digest: bytes, length: int) -> int:
        """Publish a granted chunk under a digest."""
        return self.commit_many(player, [(number, digest, length)])[0]

    def commit_many(self, player: Player, items: list[tuple[int, bytes, int]], flags: int = 0) -> list[int]:
        """Publish granted chunks, (grant id, digest, length) each, in one request."""
        before = self.count_evicted()
        self.store.now_ms = next(self._clock)
        statuses = self.store.commit(
            player.session, [(digest, number, length, 0, flags, 0) for number, digest, length in items]
        )
        for (number, digest, length), status in zip(items, statuses, strict=True):
            grant = player.grants.pop(number, None)
            wanted = Status.OK
            if grant is None:
                wanted = Status.STALE_GRANT
            elif not 0 < length <= grant.chunk:
                wanted = Status.BAD_REQUEST
            elif not self.owns(digest):
                wanted = Status.WRONG_OWNER
            elif flags & COMMIT_NEAR and grant.chunk > self.store.space.kept.near_max:
                wanted = Status.OVER_QUOTA
            elif status == Status.NO_SPACE:
                wanted = Status.NO_SPACE
                pinned = {pin.offset for other in self.players for pin in other.pins.values()}
                if not all(self.store.table.offset(slot) in pinned for slot in self.store.table.candidates(digest)):
                    raise Wrong("a commit failed although an entry of its sets could have gone")
            if status != wanted:
                raise Wrong(f"commit answered {status}, not {wanted}")
            if grant is not None and status == Status.OK:
                self.values[digest] = Value(grant.token, length)
        self.forget_evicted(before, exact=len(items) == 1 and not flags)
        return statuses

    def put(self, player: Player, digest: bytes, length: int) -> bool:
        """Grant and commit."""
        numbers = self.grant(player, length)
        return bool(numbers) and self.commit(player, numbers[0], digest, length) == Status.OK

    def delete(self, digest: bytes) -> int:
        """Delete an entry."""
        (status,) = self.store.delete([digest])
        wanted = Status.WRONG_OWNER
        if self.owns(digest):
            wanted = Status.OK if self.values.pop(digest, None) is not None else Status.NOT_FOUND
        if status != wanted:
            raise Wrong(f"delete answered {status}, not {wanted}")
        return status

    def pin(self, player: Player, digest: bytes) -> int:
        """Pin an entry; return the pin's id, 0 for a miss."""
        value = self.values.get(digest)
        wanted = Status.WRONG_OWNER if not self.owns(digest) else Status.NOT_FOUND if value is None else Status.OK
        if value is not None and wanted == Status.OK and not self.may_pin(player, value.length):
            wanted = Status.NO_SPACE
        ((status, _flags, length, _crc, offset, pin),) = self.store.locate(player.session, [digest])
        if status != wanted:
            raise Wrong(f"locate answered {status}, not {wanted}")
        if value is None or status:
            return 0
        if length != value.length:
            raise Wrong(f"locate says {length} bytes, stored were {value.length}")
        player.pins[pin] = Pin(offset, value)
        return pin

    def may_pin(self, player: Player, length: int) -> bool:
        """The rule for bytes of pins, put naively."""
        chunk = chunk_bytes_for(length)
        sizes = {each: sum(chunk_bytes_for(pin.value.length) for pin in each.pins.values()) for each in self.players}
        rest = self.store.sessions.pinned_bytes_max - sum(sizes.values()) - chunk
        return not any(sizes.values()) or sizes[player] + chunk <= FAIR * rest

    def unpin(self, player: Player, numbers: Iterable[int]) -> None:
        """Release pins."""
        numbers = list(numbers)
        known = sum(number in player.pins for number in numbers)
        if self.store.sessions.unpin(player.session, numbers) != known:
            raise Wrong("the store knows other pins than its client")
        for number in numbers:
            player.pins.pop(number, None)

    def set_shards(self, mine: bytes) -> None:
        """Take a new map. Shards that were ours before are ours since then, the others since now."""
        self.epoch += 1
        since, roles = owned(mine, self.epoch, self.since)
        set_shards(self.store, self.epoch, since, roles)
        self.mine = mine
        self.since = np.frombuffer(since, np.uint64)
        for digest in [digest for digest in self.values if not self.owns(digest)]:
            del self.values[digest]

    # -- what must be true ------------------------------------------------------------------------

    def owns(self, digest: bytes) -> bool:
        """Return True if the digest's shard is ours by the last map."""
        shard = shard_of(digest)
        return bool(self.mine[shard >> 3] >> (shard & 7) & 1)

    def count_evicted(self) -> int:
        """Return the number of entries that the store has evicted, as its ``stats`` say, which take long to make."""
        store = self.store
        store.apply_pending()
        near = store.near.counts
        return sum(store.space.evictions.values()) + store.set_evictions + near["replaced"] + near["expired"]

    def forget_evicted(self, before: int, *, exact: bool = True) -> None:
        """Remove evicted entries from the model: exactly as many as the store has counted.

        Within a batch an entry may be evicted and stored again, hence not ``exact``.
        """
        gone = self.count_evicted() - before
        missing = [digest for digest in self.values if self.store.table.lookup(digest) < 0] if gone else []
        if len(missing) > gone or (exact and len(missing) != gone):
            raise Wrong(f"{gone} entries were evicted, {len(missing)} are missing")
        for digest in missing:
            del self.values[digest]
        self.evicted += gone

    def read(self, digest: bytes) -> bytes | None:
        """Get as clients do; return None for a miss. No process writes meanwhile, so the read never starts over."""
        try:
            found = self.reader.locate(digest)
        except Unsettled:
            raise Wrong("an entry is unsettled while nobody writes") from None
        if found is None:
            return None
        data = bytes(self.reader.value(found))
        if not self.reader.confirm(digest, found.slot, found.seq):
            if 0 < self.reader.shard_word(digest) < FROZEN:
                raise Wrong("an entry changed while nobody wrote")
            return None
        return data

    def check(self) -> None:
        """Raise Wrong or CorruptionError if anything is wrong."""
        store = self.store
        check(store)
        self.look_at_prepared()
        for digest, value in self.values.items():
            data = self.read(digest)
            if data is None:
                raise Wrong(f"a committed value of {value.length} bytes is missing")
            if not is_value(data, value):
                raise Wrong(f"a value of {value.length} bytes reads wrong")
        if store.table.entries != len(self.values):
            raise Wrong(f"{store.table.entries} entries stored, {len(self.values)} expected")
        chunks = {store.table.offset(slot): store.table.entry(slot).chunk for slot in store.table}
        for player in self.players:
            for grant in (*player.grants.values(), *player.prepared.values()):
                if grant.offset in chunks:
                    raise Wrong(f"the chunk at {grant.offset} has two owners")
                chunks[grant.offset] = grant.chunk
                if not is_value(self.data[grant.offset : grant.offset + grant.chunk], Value(grant.token, grant.chunk)):
                    raise Wrong(f"someone wrote into the granted chunk at {grant.offset}")
        for player in self.players:
            for pin in player.pins.values():
                offset = pin.offset - self.geometry.data_offset
                chunks.setdefault(pin.offset, store.space._allocator.chunk_bytes(offset))
                if not is_value(self.data[pin.offset : pin.offset + pin.value.length], pin.value):
                    raise Wrong(f"someone wrote into the pinned value at {pin.offset}")
        self.check_room(chunks)

    def check_room(self, chunks: dict[int, int]) -> None:
        """Check that no two chunks overlap, and that the free bytes are exactly the rest."""
        end = self.geometry.data_offset
        tails: dict[int, int] = {}
        for offset, chunk in sorted(chunks.items()):
            if offset < end:
                raise Wrong(f"the chunk at {offset} overlaps the one before it")
            end = offset + chunk
            if chunk <= SLAB_CHUNK_BYTES_MAX:
                slab = (offset - self.geometry.data_offset) // SLAB_BYTES
                tails[slab] = SLAB_BYTES - CHUNKS_PER_SLAB[class_of(chunk)] * chunk
        if end > self.geometry.size:
            raise Wrong("a chunk leaves the arena")
        free = self.geometry.data_bytes - sum(chunks.values()) - sum(tails.values())
        found = self.store.stats()["free_bytes"]
        if found != free:
            raise Wrong(f"{found} bytes are free, not {free}")

    def wind_up(self) -> None:
        """End all clients and delete everything; check that every byte is free."""
        for player in list(self.players):
            self.exit(player)
        self.set_shards(ALL_SHARDS)
        for digest in list(self.values):
            self.delete(digest)
        self.check()
        lost = self.geometry.data_bytes - self.store.stats()["free_bytes"]
        if lost:
            raise Wrong(f"{lost} bytes never came back")
        if self.store.sessions.by_id or self.store.ledger.free_holds != self.geometry.hold_lines:
            raise Wrong("sessions or holds are left over")

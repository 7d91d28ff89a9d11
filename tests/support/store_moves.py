"""Several stores between which shards move, with a manager, movers and clients, all simulated one step at a time.

Every process may lag: stores and clients hold old maps, movers go on after their map is out of date, workers die and
come back in the middle, an empty data server replaces another. The reference model is a dict of the value that was last
accepted for each key. A read may miss; otherwise it returns a value that was the last accepted one at some time since
the read began.

Clients read by the rules of ``docs/protocol.md``, in steps, with other events between them.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Generator, Iterator

import numpy as np

from simm.arena.layout import Geometry
from simm.arena.reader import ArenaReader
from simm.arena.sessions import Session
from simm.arena.store import Store
from simm.constants import SHARD_COUNT
from simm.ipc.arena_files import OwnedArena
from simm.ipc.arena_lister import Lister
from simm.wire.messages import ABSENT, ShardRole, Status, status_name
from simm.wire.shard_set import FROZEN, MOVING, bitmap_of
from tests.models.explorer import walk
from tests.support.consistency import check, finished
from tests.support.shards import set_shards
from tests.support.store_world import divide, token_of

SLOTS = 16
SHARDS = (3, 77, 9000, 16383)
#: More keys than slots: sets run full.
KEYS = [
    (shard | number << 14 | 1 << 40).to_bytes(8, "little") + token_of(shard, number)[:8]
    for shard in SHARDS for number in range(5)
]  # fmt: skip


class Stale(AssertionError):
    """A value was read that was not the last accepted one at any time of the read."""


def shard_at(digest: bytes) -> int:
    """Return the shard, computed independently of SiMM's code."""
    return int.from_bytes(digest[:2], "little") % SHARD_COUNT


class Map:
    """The map of one epoch, for the few shards that are simulated."""

    def __init__(self, epoch: int, owner: dict[int, int], previous: dict[int, int], since: dict[int, int]) -> None:
        self.epoch = epoch
        self.owner = dict(owner)
        self.previous = dict(previous)
        self.since = dict(since)

    def shards_message(self, place: int) -> tuple[int, bytes, bytes]:
        """Return (epoch, since, roles) for the worker at a place."""
        since = np.zeros(SHARD_COUNT, np.uint64)
        roles = np.zeros(SHARD_COUNT, np.uint8)
        for shard, owner in self.owner.items():
            if owner == place:
                since[shard] = self.since[shard]
                roles[shard] = ShardRole.INCOMING if shard in self.previous else ShardRole.OWNER
            elif self.previous.get(shard) == place:
                since[shard] = self.since[shard]
                roles[shard] = ShardRole.OUTGOING
        return self.epoch, since.tobytes(), roles.tobytes()


class Place:
    """One worker: its arena, its store, and the map that its supervisor holds."""

    def __init__(self, number: int, segment: OwnedArena) -> None:
        self.number = number
        self.segment = segment
        self.map: Map | None = None
        self.clean()

    def clean(self) -> None:
        """Start with an empty arena."""
        divide(self.segment, SLOTS)
        size = Geometry.plan(self.segment.size, SLOTS).data_offset
        self.segment.buf[:size] = bytes(size)
        self.store = Store.create(self.segment.mm, slots=SLOTS)
        self.store.open()
        self.reader = ArenaReader(self.segment.name)
        self.lister = Lister(self.reader)
        self.session = self.join()

    def join(self) -> Session:
        """Open a session."""
        return self.store.sessions.open(1, 1, "moves")

    def die(self) -> None:
        """Kill the worker; the next one recovers, and has no map from its supervisor yet."""
        self.store = Store.recover(self.segment.mm, self.segment.name)
        for session in list(self.store.sessions.by_id.values()):
            self.store.sessions.end(session)
        self.store.open()
        self.session = self.join()

    def take(self, told: Map) -> None:
        """Take a map, as from the supervisor."""
        self.map = told
        set_shards(self.store, *told.shards_message(self.number))

    def put(self, session: Session, digest: bytes, value: bytes, options: int = 0) -> int:
        """Grant, fill and commit; return a Status."""
        grants = self.store.sessions.grant(session, len(value), 1)
        if not grants:
            return Status.NO_SPACE
        ((number, offset, _),) = grants
        self.segment.buf[offset : offset + len(value)] = value
        (status,) = self.store.commit(session, [(digest, number, len(value), 0, 0, options)])
        self.store.apply_pending()
        return status

    def read(self, digest: bytes, *, previous: bool = False) -> bytes | None:
        """Read one-sidedly; return None for a miss."""
        found = self.reader.locate(digest)
        if found is None:
            return None
        data = bytes(self.reader.value(found))
        confirm = self.reader.confirm_previous if previous else self.reader.confirm
        return data if confirm(digest, found.slot, found.seq) else None


class Moves:
    """The simulated world; :meth:`step` does one random step, ``seen`` counts what happened."""

    def __init__(self, segments: list[OwnedArena], seed: int, place: type[Place] = Place) -> None:
        self.rng = random.Random(seed)
        self.places = [place(number, segment) for number, segment in enumerate(segments)]
        self.epoch = 1
        self.owner = dict.fromkeys(SHARDS, 0)
        self.since = dict.fromkeys(SHARDS, 1)
        self.previous: dict[int, int] = {}
        self.maps = [self.publish()]
        for place in self.places:
            place.take(self.maps[-1])
        #: The map of each client.
        self.clients = [self.maps[-1]] * 3
        #: The last accepted value of each key.
        self.current: dict[bytes, bytes | None] = dict.fromkeys(KEYS)
        self.tokens = itertools.count()
        self.tasks: list[Iterator[None]] = []
        #: For each read in flight, the values that it may return.
        self.allowed: dict[int, tuple[bytes, set[bytes | None]]] = {}
        self.seen: dict[str, int] = {}
        #: Shards whose previous owner was not frozen, as their owner was replaced: it stops when it takes this epoch.
        self.loose: dict[int, int] = {}
        #: How often a client asks a worker whose shard word says that it has not got the shard.
        self.asking = 0.5

    def count(self, what: str) -> None:
        """Count an event."""
        self.seen[what] = self.seen.get(what, 0) + 1

    def publish(self) -> Map:
        """Return the current map."""
        return Map(self.epoch, self.owner, self.previous, self.since)

    def change(self) -> None:
        """Publish the map of a new epoch."""
        self.maps.append(self.publish())

    def now(self, digest: bytes, value: bytes | None) -> None:
        """Record an accepted mutation."""
        self.current[digest] = value
        for key, values in self.allowed.values():
            if key == digest:
                values.add(value)

    # -- steps ----------------------------------------------------------------------------------

    def step(self) -> None:
        """Do one random step."""
        rng = self.rng
        what = rng.random()
        if self.tasks and what < 0.35:
            task = rng.choice(self.tasks)
            if next(task, self) is self:
                self.tasks.remove(task)
        elif what < 0.50:
            self.put(rng.choice(KEYS))
        elif what < 0.56:
            self.delete(rng.choice(KEYS))
        elif what < 0.70:
            self.tasks.append(self.reading(rng.choice(KEYS)))
        elif what < 0.76:
            self.move(rng.choice(SHARDS))
        elif what < 0.84:
            place = rng.choice(self.places)
            newest = self.maps[-1]
            if place.map is not newest or place.store.shard_words.fenced:
                place.take(newest)
        elif what < 0.89:
            client = rng.randrange(len(self.clients))
            at = self.maps.index(self.clients[client])
            self.clients[client] = self.maps[rng.randint(at, len(self.maps) - 1)]
        elif what < 0.95:
            place = rng.choice(self.places)
            self.tasks.append(self.moving(place))
        elif what < 0.97:
            self.moved(rng.choice(self.places))
        elif what < 0.98:
            rng.choice(self.places).store.shard_words.fence()
        elif what < 0.995:
            place = rng.choice(self.places)
            place.die()
            self.count("death")
            if place.map is not None:
                place.take(place.map)
        else:
            self.replace(rng.choice(self.places))

    def put(self, digest: bytes) -> None:
        """Put as a client does, by its map."""
        place = self.places[self.rng.choice(self.clients).owner[shard_at(digest)]]
        value = token_of("value", next(self.tokens)) * 256  # a slab of small chunks takes its check() 20 ms
        status = place.put(place.session, digest, value)
        if status == Status.OK:
            self.now(digest, value)
        elif status not in (Status.WRONG_OWNER, Status.NO_SPACE):
            raise AssertionError(f"a put is answered with {status}")
        self.count(f"put {status_name(status)}")

    def delete(self, digest: bytes) -> None:
        """Delete as a client does, by its map."""
        place = self.places[self.rng.choice(self.clients).owner[shard_at(digest)]]
        here = place.store.table.lookup(digest) >= 0
        (status,) = place.store.delete([digest])
        if status == Status.OK:
            self.now(digest, None)
            self.count("delete here" if here else "delete behind")
        elif status == Status.NOT_FOUND:
            self.count("delete nothing")

    def reading(self, digest: bytes) -> Iterator[None]:
        """Get as a client does, in steps."""
        number, allowed = next(self.tokens), {self.current[digest], None}
        self.allowed[number] = (digest, allowed)
        told = self.rng.choice(self.clients)
        shard = shard_at(digest)
        place = self.places[told.owner[shard]]
        yield
        value = place.read(digest)
        if value is None:
            value = yield from self.elsewhere(digest, told, place)
        else:
            self.count("hit")
        del self.allowed[number]
        if value not in allowed:
            raise Stale(f"a read by the map of epoch {told.epoch} returned what was superseded before it began")

    def elsewhere(self, digest: bytes, told: Map, place: Place) -> Generator[None, None, bytes | None]:
        """Look elsewhere than at the owner, in steps; return the value or None."""
        word = place.reader.shard_word(digest)
        if 0 < word < MOVING or word >= FROZEN:
            return None
        yield
        status, since = Status.WRONG_OWNER, 0
        if word or self.rng.random() < self.asking:
            ((status, _, _, _, since, _),) = place.store.locate(None, [digest])
            yield
        if status == Status.OK:
            return place.read(digest)
        previous = told.previous.get(shard_at(digest))
        if previous is None:
            return None
        if status != Status.PREVIOUS and (word or not self.follows(told)):
            return None
        if status == Status.PREVIOUS and not self.same_move(since, told.since[shard_at(digest)]):
            return None
        yield
        value = self.places[previous].read(digest, previous=True)
        self.count("hit behind" if value is not None else "miss behind")
        return value

    def follows(self, told: Map) -> bool:
        """Return True if a client asks a previous owner that the owner does not name: by the newest map only."""
        return told is self.maps[-1]

    def same_move(self, since: int, mapped: int) -> bool:
        """Return True if the owner means the previous owner that the map names."""
        return since == mapped

    # -- the manager ------------------------------------------------------------------------------

    def move(self, shard: int) -> None:
        """Move a shard to another owner, unless it is moving."""
        if shard in self.previous:
            return
        old = self.owner[shard]
        others = [place.number for place in self.places if place.number != old and self.heard(place, shard)]
        if others:
            self.give(shard, self.rng.choice(others))

    def give(self, shard: int, new: int) -> None:
        """Set a new owner; the old one is the previous owner if it can have values of the shard."""
        old = self.owner[shard]
        if self.heard(self.places[old], shard):
            self.previous[shard] = old
            self.count("move")
        self.epoch += 1
        self.owner[shard], self.since[shard] = new, self.epoch
        self.change()

    def heard(self, place: Place, shard: int) -> bool:
        """Return True if a server has acknowledged a map as new as the shard's owner.

        If not, its values may be older: it can be neither the next owner nor the previous one.
        """
        return place.map is not None and place.map.epoch >= self.since[shard]

    def moved(self, place: Place) -> None:
        """Send MOVED from a server."""
        told = place.map
        if told is None:
            return
        done = [shard for shard in finished(place.store.shard_words) if shard in self.previous]
        done = [shard for shard in done if self.owner[shard] == place.number and self.since[shard] <= told.epoch]
        if done:
            self.epoch += 1
            for shard in done:
                del self.previous[shard]
            self.count("moved")
            self.change()

    def replace(self, place: Place) -> None:
        """Replace a data server by an empty one of the same name."""
        place.clean()
        self.count("replaced")
        cleared = [
            shard for shard in self.previous if place.number in (self.previous[shard], self.owner[shard])
        ]
        self.epoch += 1
        for shard in cleared:
            del self.previous[shard]
            self.loose[shard] = self.epoch
        self.change()
        # Nobody talks to the new instance by a map that names the old one.
        self.clients = [self.maps[-1]] * len(self.clients)
        self.tasks.clear()
        self.allowed.clear()
        place.take(self.maps[-1])

    # -- movers -----------------------------------------------------------------------------------

    def moving(self, place: Place) -> Iterator[None]:
        """Run one mover, in steps, by its worker's present map, until the worker dies."""
        told, store = place.map, place.store
        if told is None:
            return
        wanted: dict[int, list[int]] = {}
        for shard, previous in told.previous.items():
            if told.owner[shard] == place.number:
                wanted.setdefault(previous, []).append(shard)
        session = place.join()
        for previous, shards in wanted.items():
            yield
            source = self.places[previous]
            frozen = source.store.freeze(told.epoch, shards)
            if frozen is None:
                self.count("refused")
                return
            yield
            if place.store is not store:
                return
            store.shard_words.adopt(told.epoch, shards, frozen)
            session.copies = told.epoch
            cursor = 0
            while True:
                yield
                page = source.lister.page(bitmap_of(frozen), cursor, self.rng.randint(1, 4))
                for digest, length, _, namespace in page.entries:
                    if [name.name for name in page.namespaces if name.number == namespace] != ["moves"]:
                        raise AssertionError("an entry is listed under another namespace")
                    yield
                    value = source.read(digest, previous=True)
                    if value is None:
                        continue
                    if len(value) != length:
                        raise AssertionError("an entry is listed with another length")
                    yield
                    if place.store is not store:
                        return
                    status = place.put(session, digest, value, ABSENT)
                    self.count(f"copy {status_name(status)}")
                cursor = page.cursor
                if not cursor:
                    break
            yield
            if place.store is not store:
                return
            store.shard_words.finish(shards, told.epoch)
            self.count("finished")

    # -- looking ----------------------------------------------------------------------------------

    def check(self) -> None:
        """Check that every store is consistent, and that at most one worker accepts mutations of a shard."""
        for place in self.places:
            check(place.store)
        for shard in SHARDS:
            if any(place.map is None or place.map.epoch < self.loose.get(shard, 0) for place in self.places):
                continue
            words = [place.store.shard_words.accepting[shard] for place in self.places]
            accepting = [word for word in words if 0 < word < FROZEN]
            if len(accepting) > 1:
                raise AssertionError(f"shard {shard} has {len(accepting)} owners that accept")

    def wind_up(self) -> None:
        """Give every process the newest map and finish all moves; check that all values left are current."""
        for _ in range(3 + len(self.places)):
            for place in self.places:
                place.take(self.maps[-1])
            for place in self.places:
                for _ in self.moving(place):
                    pass
            for place in self.places:
                self.moved(place)
        if self.previous:
            raise AssertionError(f"these shards do not come to an end: {self.previous}")
        for place in self.places:
            place.take(self.maps[-1])
        self.clients = [self.maps[-1]]
        for digest in KEYS:
            for _ in self.reading(digest):
                pass
        self.check()


def play(segments: list[OwnedArena], seed: int, steps: int = 500) -> Moves:
    """Run one world from a seed, and check it."""
    world = Moves(segments, seed)
    walk(steps, world.step, world.check, every=8)
    world.wind_up()
    return world

"""The entries of lost shards are dropped in slices: nobody finds them meanwhile, and all ends as in one turn.

Also the worker's part: between two slices its heartbeat goes on, and it serves its clients.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from simm.arena.hashing import shard_of
from simm.arena.layout import Word
from simm.arena.store import Store
from simm.constants import SHARD_COUNT
from simm.ipc.arena_files import OwnedArena
from simm.server.requests.shards import ShardRequests
from simm.wire import messages as M
from simm.wire.epoch_messages import Epochs, NamespaceEpoch
from simm.wire.messages import ABSENT, ShardRole, Status
from simm.wire.shard_set import FROZEN
from tests.models.explorer import walk
from tests.support.consistency import check
from tests.support.dose import dose, dosed
from tests.support.shards import set_shards
from tests.support.store_moves import SHARDS, Map, Moves, Place
from tests.support.store_world import ALL_SHARDS, World, digest_of, owned
from tests.support.waiting import wait_until
from tests.support.worker_thread import WorkerThread

MIB = 1 << 20


# -- the model of moves, with workers that take their time -----------------------------------------------


class SlowPlace(Place):
    """A worker that has taken a map, and drops the entries of lost shards one by one, between other events."""

    def take(self, told: Map) -> None:
        self.map = told
        self.store.begin_shards(*told.shards_message(self.number))

    def drop_all(self) -> None:
        while self.store.drop_some():
            pass


class SlowMoves(Moves):
    """Moves between slow workers."""

    def __init__(self, segments: list[OwnedArena], seed: int) -> None:
        super().__init__(segments, seed, SlowPlace)

    def step(self) -> None:
        if any(place.store.shard_words.clearing for place in self.places):
            self.count("step while clearing")
        what = self.rng.random()
        if what < 0.03:
            self.rng.choice(self.places).store.drop_some(1)
        elif what < 0.1:
            self.move(self.rng.choice(SHARDS))
            self.rng.choice(self.places).take(self.maps[-1])
        else:
            super().step()

    def wind_up(self) -> None:
        for _ in range(3 + len(self.places)):
            for place in self.places:
                place.take(self.maps[-1])
                place.drop_all()
            for place in self.places:
                for _ in self.moving(place):
                    pass
            for place in self.places:
                self.moved(place)
        super().wind_up()


def only(epoch: int, parts: dict[int, tuple[int, int]]) -> tuple[int, bytes, bytes]:
    """Return a map by which the worker has these shards and no others: (role, since) each."""
    since, roles = np.zeros(SHARD_COUNT, np.uint64), np.zeros(SHARD_COUNT, np.uint8)
    for shard, (role, at) in parts.items():
        roles[shard], since[shard] = role, at
    return epoch, since.tobytes(), roles.tobytes()


def play(segments: list[OwnedArena], seed: int) -> SlowMoves:
    world = SlowMoves(segments, seed)
    walk(500, world.step, world.check, every=8)
    world.wind_up()
    return world


@pytest.mark.parametrize("first", dose([0, 6], quick=1))
def test_nothing_superseded_is_read_while_old_entries_are_there(segments: list[OwnedArena], first: int) -> None:
    worlds = [play(segments, seed) for seed in range(first, first + dosed(4, quick=1))]
    assert sum(world.seen.get("step while clearing", 0) for world in worlds) > dosed(60, quick=10)


def no_second_look(patch: pytest.MonkeyPatch) -> None:
    """An entry is dropped because its slot had one of a lost shard when the worker looked."""

    def drop_some(self: Store, most: int = 64) -> bool:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(type(self.table), "shard", lambda *_: lost)
            lost = next((shard for shard in range(SHARD_COUNT) if not self.shards[shard]), 0)
            return real(self, most)

    real = Store.drop_some
    patch.setattr(Store, "drop_some", drop_some)


# -- slices against one turn -------------------------------------------------------------------------------


def state(store: Store) -> tuple[object, ...]:
    entries = sorted((entry.digest, entry.length) for entry in map(store.table.entry, store.table))
    stats = store.stats()
    return entries, stats["free_bytes"], stats["entries"], store.shards.tolist(), store.shard_words.moving


def some_map(rng: random.Random, epoch: int) -> tuple[int, bytes, bytes]:
    """Return a map that keeps, takes, gives and moves shards at random."""
    roles = np.frombuffer(rng.randbytes(SHARD_COUNT), np.uint8) % 4
    since = np.frombuffer(rng.randbytes(SHARD_COUNT), np.uint8) % 3 + max(1, epoch - 2)
    since = np.where(roles == ShardRole.NONE, 0, np.minimum(since, epoch)).astype(np.uint64)
    return epoch, since.tobytes(), roles.astype(np.uint8).tobytes()


@pytest.mark.parametrize("seed", dose(range(4), quick=1))
def test_slices_come_to_what_one_turn_comes_to(
    segments: list[OwnedArena], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same maps, FREEZE and ADOPT in both worlds; between slices the other one puts what its shards accept."""
    monkeypatch.setattr("simm.table._BLOCK_SLOTS", 256)
    whole, sliced = (World(segment, slots=2048) for segment in segments[:2])
    rng = random.Random(seed)
    for world in (whole, sliced):
        player = world.join()
        for number in range(1000):
            world.put(player, digest_of(f"s{number}"), 512)
    for epoch in range(3, dosed(9, quick=5)):
        told = some_map(rng, epoch)
        set_shards(whole.store, *told)
        sliced.store.begin_shards(*told)
        turns = 0
        while sliced.store.drop_some(16):
            turns += 1
            lost = sliced.store.shard_words.clearing
            for slot in sliced.store.table:
                entry = sliced.store.table.entry(slot)
                if shard_of(entry.digest) in lost:
                    assert sliced.read(entry.digest) is None
                    assert sliced.store.exists([entry.digest])[0] in (Status.WRONG_OWNER, Status.PREVIOUS)
                    assert sliced.store.delete([entry.digest]) == [Status.WRONG_OWNER]
                    assert not sliced.reader.contains_previous(entry.digest)
                    break
            if turns % 16 == 0:
                check(sliced.store)
        assert turns > 3 or epoch > 4
        assert state(whole.store) == state(sliced.store)
        some = rng.sample(range(SHARD_COUNT), 4000)
        assert whole.store.shard_words.adopt(epoch, some, some[::2]) == sliced.store.shard_words.adopt(
            epoch, some, some[::2]
        )
        assert whole.store.freeze(epoch + 1, some[:50]) == sliced.store.freeze(epoch + 1, some[:50])
        assert state(whole.store) == state(sliced.store)
    for world in (whole, sliced):
        check(world.store)


def test_a_slot_that_was_found_and_taken_again_is_not_dropped(
    segments: list[OwnedArena], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two slices an old entry may be evicted, and one of an owned shard get its slot."""

    def run() -> bool:
        world = World(segments[0], slots=16)  # two sets: each key fits each slot
        player = world.join()
        kept = digest_of("kept")
        mine = {shard_of(kept): (ShardRole.OWNER, 1)}
        for number in range(16):
            world.put(player, digest_of(f"old{number}"), 64)
        world.store.begin_shards(*only(5, mine))
        assert world.store.drop_some(0) and world.store.table.entries == 16
        ((number, _, _),) = world.store.sessions.grant(player.session, 64, 1)
        assert world.store.commit(player.session, [(kept, number, 64, 0, 0, 0)]) == [Status.OK]
        world.store.apply_pending()
        while world.store.drop_some():
            pass
        check(world.store)
        return world.store.exists([kept]) == [Status.OK]

    assert run()
    no_second_look(monkeypatch)
    assert not run(), "the control: the test sees the look"


def test_issue_maps_that_go_on_keep_no_shard_waiting(
    segments: list[OwnedArena], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each map that took a shard away began the search anew, which then never reached the last slots."""
    monkeypatch.setattr("simm.table._BLOCK_SLOTS", 256)
    world, blocks = World(segments[0], slots=2048), 8
    player, keys = world.join(), [digest_of(f"m{number}") for number in range(200)]
    for key in keys:
        world.put(player, key, 64)
    store, left = world.store, list(dict.fromkeys(map(shard_of, keys)))
    first = set(left[100:])
    del left[100:]
    epoch = 5
    for step in range(4 * blocks):
        if step % 3 == 0 and left:  # a map by which one more is gone, and all that were gone are given back
            epoch += 1
            left.pop()
            mine = dict.fromkeys(left, (ShardRole.OWNER, 1)) | dict.fromkeys(first, (ShardRole.OWNER, 6))
            store.begin_shards(*only(epoch, mine))
        store.drop_some()
        for slot in store.table:
            shard = store.table.shard(slot)
            assert shard in left or not store.shards[shard], "no old entry is shown"
        if step == 2 * blocks:
            assert store.shard_words.clearing, "others are cleared still"
            assert first.isdisjoint(store.shard_words.clearing) and all(store.shards[shard] == 6 for shard in first)
    finish(store)
    assert not store.shard_words.clearing and {store.table.shard(slot) for slot in store.table} == set(left)


# -- FREEZE and further maps while the entries are there -----------------------------------------------------


def clearing(segment: OwnedArena) -> tuple[World, bytes, int]:
    """Return a world that has lost all shards and dropped nothing, a key that it has, and the key's shard."""
    world = World(segment, slots=64)
    key = digest_of("key")
    world.put(world.join(), key, 64)
    world.store.begin_shards(*only(5, {}))
    return world, key, shard_of(key)


def finish(store: Store) -> None:
    while store.drop_some():
        pass
    check(store)


def test_freeze_is_remembered_until_the_entries_are_gone(segments: list[OwnedArena]) -> None:
    world, key, shard = clearing(segments[0])
    store = world.store
    assert store.freeze(9, [shard]) == [], "it has nothing for the new owner"
    assert store.freeze(8, [shard]) is None
    assert not store.shards[shard] and not world.reader.contains_previous(key)
    store.begin_shards(*only(8, {shard: (ShardRole.OWNER, 7)}))  # older than the map that froze it
    finish(store)
    assert store.shards[shard] == FROZEN | 9 and store.table.entries == 0 and not store.shard_words.accepts(shard)


@pytest.mark.parametrize("role", [ShardRole.OWNER, ShardRole.INCOMING])
def test_a_newer_map_ends_a_freeze_that_is_remembered(segments: list[OwnedArena], role: int) -> None:
    world, _, shard = clearing(segments[0])
    store = world.store
    store.freeze(9, [shard])
    store.begin_shards(*only(10, {shard: (role, 10)}))
    assert store.shard_words.awaited and not store.shards[shard]
    assert store.shard_words.adopt(10, [shard], []) == 0, "not before its old entries are gone"
    finish(store)
    assert store.shards[shard] == (10 if role == ShardRole.OWNER else 0) and not store.shard_words.awaited
    assert store.shard_words.adopt(10, [shard], []) == 1


def test_a_shard_that_leaves_stays_frozen(segments: list[OwnedArena]) -> None:
    world, _, shard = clearing(segments[0])
    world.store.freeze(9, [shard])
    world.store.begin_shards(*only(10, {shard: (ShardRole.OUTGOING, 9)}))
    finish(world.store)
    assert world.store.shards[shard] == FROZEN | 9


def test_a_worker_that_dies_meanwhile_drops_the_rest(segments: list[OwnedArena]) -> None:
    world, key, shard = clearing(segments[0])
    world.store.begin_shards(*only(6, {shard: (ShardRole.OWNER, 6)}))
    store = Store.recover(world.segment.mm, world.segment.name)
    assert store.table.entries == 0
    set_shards(store, *only(6, {shard: (ShardRole.OWNER, 6)}))
    assert store.exists([key]) == [Status.NOT_FOUND]


def test_a_mover_copies_nothing_into_a_shard_that_is_cleared(segments: list[OwnedArena]) -> None:
    world, key, shard = clearing(segments[0])
    world.store.begin_shards(*only(6, {shard: (ShardRole.INCOMING, 6)}))
    mover = world.store.sessions.open(1, 1, "mover")
    mover.copies = 6
    ((number, _, _),) = world.store.sessions.grant(mover, 64, 1)
    assert world.store.commit(mover, [(key, number, 64, 0, 0, ABSENT)]) == [Status.WRONG_OWNER]


SHOWN = {
    "a map": lambda store, shard: store.begin_shards(*only(6, {shard: (ShardRole.OWNER, 6)})),
    "ADOPT": lambda store, shard: (
        store.begin_shards(*only(6, {shard: (ShardRole.INCOMING, 6)})), store.shard_words.adopt(6, [shard], [])
    ),
    "FREEZE": lambda store, shard: store.freeze(6, [shard]),
}  # fmt: skip


@pytest.mark.parametrize("by", SHOWN)
@pytest.mark.parametrize("waits", [True, False])
def test_no_order_shows_an_old_entry(
    segments: list[OwnedArena], by: str, waits: bool
) -> None:
    """The key may have been overwritten elsewhere. The controls: without the wait its old value is read."""
    world, key, shard = clearing(segments[0])
    if not waits:
        world.store.shard_words.clearing.clear()
    SHOWN[by](world.store, shard)
    found = world.reader.locate(key)
    assert found is not None, "it is still there"
    assert world.reader.confirm_previous(key, found.slot, found.seq) == (not waits)
    assert world.reader.contains_previous(key) == (not waits)


# -- the worker ----------------------------------------------------------------------------------------------


class Turns:
    """What takes SHARDS and epochs for a worker with this store, of whose loop one turn runs at a time."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("simm.table._BLOCK_SLOTS", store.geometry.slots // 8)
        monkeypatch.setattr("simm.server.requests.shards.DROP_S", 0.0)  # one step a turn
        self.store, self.epoch, self.peers, self.movers = store, 0, dict[int, Any](), dict[int, int]()
        self.loop: Any = SimpleNamespace(clock=lambda: 0.0, call_later=lambda _s, turn: self.due.append(turn))
        self.due: list[Callable[[], None]] = []
        #: The maps that were answered.
        self.answered: list[int] = []
        self.peer: Any = SimpleNamespace(send_message=lambda _msg, number: self.answered.append(number))
        self.requests = ShardRequests(self)

    def take(self, epoch: int, since: bytes, roles: bytes, epochs: dict[str, int] | None = None) -> None:
        if epochs is not None:
            table = [NamespaceEpoch(*each) for each in epochs.items()]
            self.requests.take_epochs(0, Epochs(epoch, self.store.cluster, 0, table))
        if self.requests.take_map(self.peer, epoch, M.Shards(epoch, since, roles)):
            self.answered.append(epoch)

    def turn(self) -> None:
        due, self.due = self.due, []
        for each in due:
            each()


def put_some(world: World) -> list[int]:
    """Put values, and return their shards."""
    player, keys = world.join(), [digest_of(f"p{number}") for number in range(200)]
    for key in keys:
        world.put(player, key, 64)
    return list(dict.fromkeys(map(shard_of, keys)))


@pytest.mark.parametrize("waits", ["for a first advance", "for a shard that comes back"])
def test_issue_maps_that_go_on_are_answered(
    segments: list[OwnedArena], monkeypatch: pytest.MonkeyPatch, waits: str
) -> None:
    """They waited until no shard at all was being cleared, and the entries of old epochs did too."""
    world = World(segments[0], slots=2048)
    left = put_some(world)
    worker = Turns(world.store, monkeypatch)
    epochs = {"world": 5} if waits == "for a first advance" else None
    back = {left.pop(): (ShardRole.OWNER, 6)} if epochs is None else {}
    worker.take(6, *only(6, dict.fromkeys(left, (ShardRole.OWNER, 1)) | back)[1:], epochs)
    assert not worker.answered and worker.requests.stored == 6, "the epochs are in force, which leases are about"
    for step in range(40):
        if step % 3 == 0:  # one shard less
            epoch = 7 + step
            left.pop()
            worker.take(epoch, *only(epoch, dict.fromkeys(left, (ShardRole.OWNER, 1)) | back)[1:])
        worker.turn()
    assert 6 in worker.answered and world.store.shard_words.clearing, "others are cleared still"
    while worker.due:
        worker.turn()
    assert not world.store.shard_words.clearing and not world.store.stale.due
    check(world.store)


def test_a_change_of_cluster_that_fails_has_stored_no_epochs(
    segments: list[OwnedArena], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counters would name the new cluster with an epoch of the old one."""
    world = World(segments[0], slots=2048)
    worker = Turns(world.store, monkeypatch)
    worker.take(6, *only(6, {1: (ShardRole.OWNER, 6)})[1:])
    assert worker.requests.stored == 6

    def fails() -> None:
        raise MemoryError

    monkeypatch.setattr(world.store.stale, "end", fails)
    with pytest.raises(MemoryError):
        worker.requests.take_map(worker.peer, 2, M.Shards(3, *only(3, {})[1:], 9))
    assert world.store.cluster == 9 and worker.requests.stored == 0


def test_the_worker_serves_between_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer to SHARDS waits only if the map gives a shard back whose old entries are still there."""
    monkeypatch.setattr("simm.server.requests.shards.DROP_S", 0.0)  # one slice a turn
    monkeypatch.setattr("simm.server.worker.HEARTBEAT_S", 0.0)
    entries = 1000
    with WorkerThread() as worker:
        session = worker.session(ring=False)
        grants = session.exchange(M.Grant([(64, entries)])).grants
        keys = [digest_of(f"w{number}") for number in range(len(grants))]
        commits = [(key, number, 64, 0, 0, 0) for key, (number, _, _) in zip(keys, grants)]
        assert set(session.exchange(M.Commit(commits, [])).statuses) == {Status.OK}
        real, turns = worker.store.drop_some, []
        may_end = threading.Event()

        def drop_some(most: int = 1) -> bool:
            """Drop one, but half of them only when all has been asked: this thread may be the slower one."""
            turns.append((worker.store.table.entries, worker.store.header[Word.HEARTBEAT]))
            return real(1) if worker.store.table.entries > len(keys) // 2 or may_end.is_set() else True

        monkeypatch.setattr(worker.store, "drop_some", drop_some)
        worker.supervisor.call(M.Shards(2, bytes(8 * SHARD_COUNT), bytes(SHARD_COUNT)))
        left = worker.store.table.entries
        assert left > 0, "the answer does not wait for the entries"
        assert set(session.exchange(M.Exists(keys)).statuses) == {Status.WRONG_OWNER}
        number = worker.supervisor.submit(M.Shards(3, *owned(ALL_SHARDS, 3)))
        assert set(session.exchange(M.Exists(keys)).statuses) == {Status.WRONG_OWNER}, "not before they are gone"
        may_end.set()
        assert worker.supervisor.result(worker.supervisor.wait(number)).items == SHARD_COUNT
        assert worker.store.table.entries == 0
        assert set(session.exchange(M.Exists(keys)).statuses) == {Status.NOT_FOUND}
        wait_until(lambda: not worker.store.shard_words.clearing, "all is dropped")
        assert len({beat for _, beat in turns}) > len(grants) // 4, "the heartbeat goes on between slices"
        session.close()

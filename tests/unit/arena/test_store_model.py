"""The store against its reference model: long seeded runs, and machines that hypothesis drives and shrinks.

After every step every committed value that was not overwritten, deleted or evicted reads right, granted and
pinned chunks are untouched, and free bytes are exact; ``World.check`` says what that means.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from simm.arena.hashing import sets_of
from simm.arena.layout import State, Word
from simm.arena.sessions import FAIR
from simm.arena.store import Store
from simm.arena.vault import INCARNATION_MAX
from simm.constants import POLICY_NAMES
from simm.errors import CapacityError, SegmentError, UsageError
from simm.ipc.arena_files import OwnedArena
from simm.wire.messages import Status
from tests.models.explorer import walk
from tests.support.consistency import check
from tests.support.dose import dose, dosed
from tests.support.shards import set_shards
from tests.support.store_steps import HALF, KEYS, OTHER, SIZES, step
from tests.support.store_world import ALL_SHARDS, Player, World, digest_of, owned

MIB = 1 << 20
SEGMENT_BYTES = 16 * MIB


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("seed", dose(range(4), quick=1))
def test_random_runs_agree_with_the_model(segment: OwnedArena, seed: int, policy: str) -> None:
    rng = random.Random(seed)
    world = World(segment, slots=24, policy=policy)  # few enough that sets run full
    walk(dosed(400, quick=150), lambda: step(world, rng), world.check, every=4)
    world.check()
    assert world.evicted + world.deaths > 0
    world.wind_up()


def test_runs_cover_what_they_are_for(segment: OwnedArena) -> None:
    """The seeds above would prove little if they never came to evictions of each kind, refusals and deaths."""
    seen: dict[str, int] = {}
    deaths = 0
    for seed in range(3):
        rng = random.Random(seed)
        world = World(segment, slots=24)
        for _ in range(400):
            before = world.store
            step(world, rng)
            if world.store is not before:
                for kind, count in before.stats()["evictions"].items():
                    seen[kind] = seen.get(kind, 0) + count
                seen["set"] = seen.get("set", 0) + before.set_evictions
                seen["overwrites"] = seen.get("overwrites", 0) + before.overwrites
                seen["stale"] = seen.get("stale", 0) + before.stale_commits
        deaths += world.deaths
    assert deaths > 3
    assert min(seen["set"], seen["overwrites"], seen["stale"], seen["own"], seen["window"]) > 0, seen


class StoreMachine(RuleBasedStateMachine):
    """The same by hypothesis, which shrinks what it finds."""

    segment: OwnedArena

    @initialize(policy=st.sampled_from(POLICY_NAMES))
    def start(self, policy: str) -> None:
        self.world = World(self.segment, slots=48, policy=policy)
        self.world.join()

    def player(self, number: int) -> Player:
        players = [player for player in self.world.players if player.connected]
        return players[number % len(players)] if players else self.world.join()

    @precondition(lambda self: len(self.world.players) < 8)
    @rule()
    def join(self) -> None:
        self.world.join()

    @rule(number=st.integers(0, 7), digest=st.sampled_from(KEYS[:24]), size=st.sampled_from(SIZES))
    def put(self, number: int, digest: bytes, size: int) -> None:
        self.world.put(self.player(number), digest, size)

    @rule(number=st.integers(0, 7), size=st.sampled_from(SIZES), count=st.integers(1, 3))
    def grant(self, number: int, size: int, count: int) -> None:
        self.world.grant(self.player(number), size, count)

    @rule(number=st.integers(0, 7), size=st.sampled_from(SIZES), take=st.booleans())
    def want(self, number: int, size: int, take: bool) -> None:
        self.world.want(self.player(number), size, 2, take=take)

    @rule(number=st.integers(0, 7), digests=st.lists(st.sampled_from(KEYS[:24]), min_size=1, max_size=4))
    def commit(self, number: int, digests: list[bytes]) -> None:
        player = self.player(number)
        items = [
            (grant, digest, player.grants[grant].chunk) for grant, digest in zip(sorted(player.grants), digests)
        ]
        self.world.commit_many(player, items)

    @rule(number=st.integers(0, 7))
    def return_grants(self, number: int) -> None:
        player = self.player(number)
        self.world.return_grants(player, sorted(player.grants)[:1])

    @rule(digest=st.sampled_from(KEYS[:24]))
    def delete(self, digest: bytes) -> None:
        self.world.delete(digest)

    @rule(number=st.integers(0, 7), digest=st.sampled_from(KEYS[:24]))
    def pin(self, number: int, digest: bytes) -> None:
        self.world.pin(self.player(number), digest)

    @rule(number=st.integers(0, 7))
    def unpin(self, number: int) -> None:
        player = self.player(number)
        self.world.unpin(player, sorted(player.pins)[:1])

    @rule(mine=st.sampled_from([ALL_SHARDS, HALF, OTHER]))
    def set_shards(self, mine: bytes) -> None:
        self.world.set_shards(mine)

    @rule(number=st.integers(0, 7))
    def disconnect(self, number: int) -> None:
        self.world.disconnect(self.player(number))

    @precondition(lambda self: self.world.players)
    @rule(number=st.integers(0, 7))
    def exit(self, number: int) -> None:
        self.world.exit(self.world.players[number % len(self.world.players)])

    @rule()
    def die(self) -> None:
        self.world.die()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.wind_up()


def run_machine(segment: OwnedArena, examples: int, steps: int) -> None:
    StoreMachine.segment = segment
    case = StoreMachine.TestCase
    case.settings = settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, derandomize=True, database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )  # fmt: skip
    case().runTest()


def test_machine(segment: OwnedArena) -> None:
    run_machine(segment, dosed(25, quick=6), 30)


@pytest.mark.slow
def test_machine_long(segment: OwnedArena) -> None:
    run_machine(segment, 400, 60)


# -- single cases ------------------------------------------------------------------------------------


def test_a_grant_id_is_spent_by_every_status(segment: OwnedArena) -> None:
    world = World(segment)
    player = world.join()
    world.set_shards(HALF)
    mine = next(digest for digest in KEYS if world.owns(digest))
    other = next(digest for digest in KEYS if not world.owns(digest))
    for digest, length, status in [(mine, 0, Status.BAD_REQUEST), (mine, 4097, Status.BAD_REQUEST),
                                   (other, 1, Status.WRONG_OWNER), (mine, 4096, Status.OK)]:  # fmt: skip
        (number,) = world.grant(player, 4096)
        assert world.commit(player, number, digest, length) == status
        assert world.commit(player, number, mine, 1) == Status.STALE_GRANT
    world.check()
    world.wind_up()


def test_of_one_prompt_the_last_pages_go_first(segment: OwnedArena) -> None:
    world = World(segment)
    player = world.join()
    keys = [digest for digest in KEYS if world.owns(digest)][:4]
    numbers = world.grant(player, 4096, 4)
    commits = [(digest, number, 10, 0, 0, 0) for digest, number in zip(keys, numbers)]
    assert world.store.commit(player.session, commits) == [Status.OK] * 4
    world.store.apply_pending()
    slots = [world.store.table.lookup(digest) for digest in keys]
    policy = world.store.space._policy
    assert list(policy.slots(policy.group_of(slots[0]))) == slots[::-1]


def test_a_grant_is_its_sessions_alone(segment: OwnedArena) -> None:
    world = World(segment)
    first, second = world.join(), world.join()
    (number,) = world.grant(first, 4096)
    assert world.store.commit(second.session, [(KEYS[0], number, 10, 0, 0, 0)]) == [Status.STALE_GRANT]
    assert world.store.sessions.return_grants(second.session, [number]) == 0
    assert world.commit(first, number, KEYS[0], 10) == Status.OK
    world.check()


def test_everyone_gets_a_grant_however_small_its_share(segment: OwnedArena) -> None:
    world = World(segment)
    hog, late = world.join(), world.join()
    for player in (hog, late):
        assert world.grant(player, 65536, 1000)
    sessions = world.store.sessions
    assert sessions.granted_bytes <= sessions.granted_bytes_max
    assert world.grant(world.join(), 8 * MIB) and sessions.granted_bytes > sessions.granted_bytes_max
    assert world.grant(world.join(), 65536, 3) == [], "this process has an eighth already"
    assert len(world.grant(world.join(pid=2), 65536, 3)) == 1 and world.grant(hog, 64) == []
    world.check()
    world.wind_up()


def test_larger_than_the_arena_evicts_nothing(segment: OwnedArena) -> None:
    world = World(segment)
    player = world.join()
    for digest in KEYS[:8]:
        world.put(player, digest, MIB)
    stored = len(world.values)
    assert world.grant(player, 16 * MIB) == [] and world.grant(player, 60 * MIB) == []
    assert world.grant(player, 0) == []
    assert len(world.values) == stored and world.evicted == 0
    world.check()


def test_everything_pinned_a_put_fails_and_pins_hold(segment: OwnedArena) -> None:
    world = World(segment)
    player = world.join()
    for digest in KEYS:
        if not world.put(player, digest, MIB) or world.evicted:
            break
    world.store.sessions.pinned_bytes_max = 10 * world.store.geometry.data_bytes  # else half is left to evict
    for digest in list(world.values):
        assert world.pin(player, digest)
    while world.grant(player, MIB):
        pass
    world.check()
    victim = next(iter(world.values))
    world.delete(victim)  # detached: readable through its pin, its chunk not free
    world.check()
    assert world.grant(world.join(), MIB) == []
    world.unpin(player, sorted(player.pins)[:1])
    world.wind_up()


def test_no_hold_line_left_nothing_is_evicted(segment: OwnedArena) -> None:
    world = World(segment, slots=1500)
    store = world.store
    for number in range(1200):
        assert world.put(world.players[0] if world.players else world.join(), digest_of(f"p{number}"), 4096)
    player = world.players[0]
    number = 0
    while store.ledger.free_holds:  # a session alone cannot use them up
        holder = world.join()
        while len(holder.pins) < FAIR * store.ledger.free_holds:
            assert world.pin(holder, digest_of(f"p{number}"))
            number += 1
    evicted = world.count_evicted()
    assert world.grant(player, 15 * MIB) == []
    assert world.grant(player, 4096) == []
    assert world.count_evicted() == evicted
    ((status, *_),) = store.locate(player.session, [digest_of("p0")])
    assert status == Status.NO_SPACE
    world.check()
    world.wind_up()


def test_visited_bytes_of_any_value_do_not_stop_an_eviction(segment: OwnedArena) -> None:
    """test_issue: a reader that stored 2 or more into its byte made a full set refuse every put."""
    world = World(segment, slots=16)
    player = world.join()
    for number in range(16):
        assert world.put(player, digest_of(f"full {number}"), 100)
    assert world.store.table.entries == 16
    world.reader.visited[:16] = b"\xff" * 16
    assert world.put(player, digest_of("one more"), 100)
    assert world.store.set_evictions == 1
    world.check()


def test_a_shard_that_comes_back_comes_back_empty(segment: OwnedArena) -> None:
    world = World(segment)
    player = world.join()
    for digest in KEYS[:40]:
        world.put(player, digest, 100)
    lost = [digest for digest in KEYS[:40] if not HALF[0] >> (digest[0] & 7) & 1]
    world.set_shards(HALF)
    assert lost and all(world.read(digest) is None for digest in lost)
    world.set_shards(ALL_SHARDS)
    assert all(world.read(digest) is None for digest in lost)
    world.check()
    with pytest.raises(UsageError, match="epoch"):
        set_shards(world.store, 0, *owned(ALL_SHARDS, 1))


def test_sessions_and_namespaces_run_out_with_an_error(segment: OwnedArena) -> None:
    world = World(segment)
    store = world.store
    sessions = [store.sessions.open(1, 1, "x", serves=True) for _ in range(world.geometry.session_lines)]
    with pytest.raises(CapacityError, match="session lines"):
        store.sessions.open(1, 1, "x", serves=True)
    for session in sessions:
        store.sessions.close(session)
    check(store)
    for number in range(len(store.ledger.namespaces.names), 256):
        store.ledger.namespaces.number(f"n{number}")
    with pytest.raises(CapacityError, match="namespaces"):
        store.sessions.open(1, 1, "one more")
    world.die()
    assert len(world.store.ledger.namespaces.names) == 256 and world.store.ledger.namespaces.number("n100") == 100


def test_recovery_refuses_what_is_not_its_own(segment: OwnedArena) -> None:
    world = World(segment)
    words = world.store.header
    words[Word.INCARNATION] = INCARNATION_MAX
    with pytest.raises(SegmentError, match="more than its sequence numbers"):
        Store.recover(segment.mm, segment.name)
    assert words[Word.INCARNATION] == INCARNATION_MAX
    words[Word.INCARNATION] = INCARNATION_MAX - 1
    world.die()
    player = world.join()
    assert world.put(player, KEYS[0], 100)
    world.check()
    world.store.close()
    assert world.reader.state == State.CLOSED and world.read(KEYS[0]) is None
    with pytest.raises(SegmentError, match="closed"):
        Store.recover(segment.mm, segment.name)
    segment.buf[:8] = b"somebody"
    with pytest.raises(SegmentError, match="magic"):
        Store.recover(segment.mm, segment.name)


def test_recovery_drops_impossible_slots_and_says_so(segment: OwnedArena) -> None:
    world = World(segment)
    player = world.join()
    for digest in KEYS[:12]:
        world.put(player, digest, 5000)
    table = world.store.table
    words = memoryview(segment.buf)[world.geometry.slots_offset : world.geometry.ledger_offset].cast("Q")
    slots = [table.lookup(digest) for digest in KEYS[:12]]
    first, second = sets_of(KEYS[4], world.geometry.sets)
    assert first ^ 1 != second
    words[slots[0] * 8 + 3] = world.geometry.size - 64  # leaves the arena
    words[slots[1] * 8 + 3] = 4096  # in the tables
    words[slots[2] * 8 + 3] = (1 << 64) - 64  # offset + chunk overflows
    words[slots[3] * 8 + 4] = 0  # no length
    words[slots[4] * 8 + 1] ^= 1 << 14  # another digest's, in a set of neither
    words[slots[4] * 8 + 2] ^= 1
    words[slots[5] * 8 + 3] = table.offset(slots[6])  # two slots, one chunk: both go
    words[slots[7] * 8 + 3] += 64  # in no slab's grid
    words[slots[8] * 8 + 3] = 0  # a digest without a value
    words[slots[9] * 8] += 1  # odd, and no undo record
    recovered = Store.recover(segment.mm, segment.name)
    assert len(recovered.notes) == 10, recovered.notes
    check(recovered)
    survivors = [digest for digest in KEYS[:12] if recovered.table.lookup(digest) >= 0]
    assert survivors == KEYS[10:12]

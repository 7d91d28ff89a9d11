"""Moving values in: whole moves, mutations under way, and all the ways in which P or our worker can fail."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from simm.arena.layout import ENTRY_CRC, ENTRY_LARGE
from simm.arena.marks.near import COMMIT_NEAR
from simm.cluster import move_plan
from simm.cluster.move_plan import MovePlan
from simm.constants import VALUE_BYTES_MAX
from simm.ipc.session import WorkerSession
from simm.net.channel import Refused
from simm.server import migration as mover_module
from simm.server.migration_peers import ByteBudget, SourceWorker, TargetWorker, TokenBucket, WorkerLost
from simm.wire import messages as M
from simm.wire.messages import Status
from simm.wire.shard_set import FROZEN, MOVING, bitmap_of, shards_in
from tests.support.clock import Clock
from tests.support.server_thread import WAIT_S, Liar, Pair, answer, digest_in, frozen_channel, honest, pair, value_of
from tests.support.waiting import wait_until

SHARDS = list(range(64))
#: Few sizes, as each has slabs of its own in these small arenas.
SIZES = (1000, 4096, 40_000)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setattr(mover_module, "IDLE_S", 0.05)
    with pair() as made:
        yield made


def fill(world: Pair, count: int = 120) -> dict[bytes, bytes]:
    """Values at P, in all of SHARDS."""
    values = {}
    for at in range(count):
        digest = digest_in(SHARDS[at % len(SHARDS)], at)
        values[digest] = value_of(at, SIZES[at % len(SIZES)])
        world.p.put(digest, values[digest])
    return values


def against(world: Pair, script: dict[type, Callable[[Any], bytes | None]]) -> Liar:
    """SHARDS move to N, away from a scripted previous owner."""
    liar = Liar(script)
    world.instead = liar.info
    world.move(SHARDS)
    return liar


# --- it is nice ---------------------------------------------------------------------------------


def test_copiers_give_way_and_freezers_do_not(world: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread that copies is nicer than the process, by what it says of itself while it takes a group (F31)."""
    nice: dict[str, set[int]] = {"_copy_group": set(), "_freeze": set()}
    for name in nice:
        real = getattr(mover_module.Mover, name)

        def noted(self: Any, *arguments: Any, name: str = name, real: Any = real) -> Any:
            nice[name].add(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
            return real(self, *arguments)

        monkeypatch.setattr(mover_module.Mover, name, noted)
    values = fill(world)
    world.move(SHARDS)
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert world.mover().wait() is True and world.n.fetch(list(values)) == list(values.values())
    assert nice == {"_copy_group": {min(19, own + mover_module.COPIER_NICE)}, "_freeze": {own}}
    assert mover_module.COPIER_NICE >= 5, "less is hardly noticed by the scheduler"


# --- it moves -----------------------------------------------------------------------------------


def test_a_manifest_stays_one(world: Pair) -> None:
    """A value in parts: without its flag the manifest would be a value."""
    manifest, other = digest_in(5, "manifest"), digest_in(6, "other")
    world.p.put(manifest, value_of(manifest, 64), crc=True, more=ENTRY_LARGE)
    world.p.put(other, value_of(other, 64))
    world.move(SHARDS)
    assert world.mover().wait() is True
    assert (world.n.flags(manifest), world.n.flags(other)) == (ENTRY_CRC | ENTRY_LARGE, 0)


def test_everything_moves_with_flags_and_namespaces(world: Pair) -> None:
    values = fill(world)
    checked, named = digest_in(3, "crc"), digest_in(4, "named")
    world.p.put(checked, value_of(checked, 4096), crc=True)
    world.p.put(named, value_of(named, 4096), namespace="models/ä")
    values[checked], values[named] = value_of(checked, 4096), value_of(named, 4096)
    stays = digest_in(5000, "stays")
    world.p.put(stays, b"stays")
    world.move(SHARDS)
    assert all(world.p.word(shard) >= FROZEN for shard in SHARDS), "P freezes by its own map too"
    assert world.n.get(stays) is None and world.p.get(stays) == b"stays"
    mover = world.mover()
    assert mover.wait() is True
    assert world.moved() == SHARDS
    assert world.n.fetch(list(values)) == list(values.values())
    assert world.p.get(checked) is None, "a frozen value is a miss for who was not sent"
    last = mover.progress()[-1]
    total = sum(map(len, values.values()))
    assert (last.left, last.bytes, last.values, last.lost) == (0, total, len(values), 0)
    stats = world.n.stats()
    assert stats["copies"] == len(values) and stats["granted_bytes"] == 0 and stats["moving"] == 0
    # What came along beside the bytes, as the next mover would see it.
    channel = frozen_channel(world.n.stream.port)
    bitmap = bitmap_of(SHARDS)
    assert shards_in(channel.call(M.Freeze(world.epoch + 1, bitmap)).shards) == SHARDS
    page = channel.call(M.List(bitmap, 0, 4096))
    names = {space.number: space.name for space in page.namespaces}
    listed = {digest: (flags, names[number]) for digest, _, flags, number in page.entries}
    assert listed.keys() == values.keys()
    assert listed[checked] == (ENTRY_CRC, "default") and listed[named] == (0, "models/ä")
    channel.close()
    world.forget(SHARDS)
    assert not any(world.p.word(shard) for shard in SHARDS)
    assert world.p.stats()["entries"] == 1, "P has dropped what it gave away"


def test_there_and_back(world: Pair) -> None:
    """What N changed meanwhile comes back, what it deleted does not."""
    values = fill(world, 30)
    world.move(SHARDS)
    assert world.mover().wait() is True
    world.forget(SHARDS)
    first, second = list(values)[:2]
    world.n.put(first, b"new")
    assert world.n.delete(second) == Status.OK
    world.move(SHARDS, to=0)
    assert world.mover(world.p).wait() is True
    expected = {**values, first: b"new"}
    del expected[second]
    assert world.p.fetch(list(expected)) == list(expected.values()) and world.p.get(second) is None
    assert world.n.get(first) is None


def test_writers_wait_for_freeze_and_adopt_only(world: Pair) -> None:
    """N accepts mutations while P's list has not even been asked for."""
    held = threading.Event()
    script = honest({})
    listing = script[M.List]
    script[M.List] = lambda msg: (held.wait(20), listing(msg))[1]
    liar = against(world, script)
    mover = world.mover()
    wait_until(lambda: world.adopted(SHARDS), "ADOPT")
    world.n.put(digest_in(1, "during"), b"during")
    assert world.n.get(digest_in(1, "during")) == b"during"
    assert all(world.n.word(shard) & MOVING for shard in SHARDS) and not world.moved()
    held.set()
    assert mover.wait() is True and world.moved() == SHARDS
    liar.close()


class Gate:
    """Holds a scripted answer up until the test has done something."""

    def __init__(self, script: dict[type, Callable[[Any], bytes | None]], kind: type) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        inner = script[kind]

        def held(msg: Any) -> bytes | None:
            found = inner(msg)  # as it was when it was asked for
            self.reached.set()
            self.opened.wait(20)
            return found

        script[kind] = held


def mutated_while_fetched(world: Pair) -> list[bytes | None]:
    """a is overwritten, b deleted and c left alone while all three are on their way; what N has then."""
    a, b, c = (digest_in(shard, shard) for shard in SHARDS[:3])
    script = honest({a: b"old a", b: b"old b", c: b"old c"})
    gate = Gate(script, M.FetchPrevious)
    liar = against(world, script)
    mover = world.mover()
    assert gate.reached.wait(20)
    world.n.put(a, b"new a")
    assert world.n.delete(b) == Status.OK, "the previous owner may have had it: it is gone now"
    gate.opened.set()
    assert mover.wait() is True and world.moved() == SHARDS
    liar.close()
    return world.n.fetch([a, b, c])


def test_mutations_while_values_are_on_their_way(world: Pair) -> None:
    assert mutated_while_fetched(world) == [b"new a", None, b"old c"]


def test_mutation_put_if_absent(world: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the old values win: the test above would see that."""
    monkeypatch.setattr(M, "ABSENT", 0)
    assert mutated_while_fetched(world) == [b"old a", b"old b", b"old c"]


def moved_away_and_back(world: Pair) -> bytes | None:
    """A value of the first previous owner arrives when the shard comes from another one already; what N has then."""
    digest = digest_in(SHARDS[0], "x")
    first, second = honest({digest: b"superseded"}), honest({digest: b"newest"})
    fetching, listing = Gate(first, M.FetchPrevious), Gate(second, M.List)
    liars = [against(world, first)]
    mover = world.mover()
    assert fetching.reached.wait(20)
    world.previous.clear()
    world.move(SHARDS, to=0, previous=False)
    liars.append(against(world, second))
    mover.feed(world.message())
    wait_until(lambda: world.adopted(SHARDS), "the second ADOPT")
    assert listing.reached.wait(20)
    fetching.opened.set()
    wait_until(lambda: len(mover.mover._running) == 1, "the end of the first copy")
    listing.opened.set()
    assert mover.wait() is True and world.moved() == SHARDS
    for liar in liars:
        liar.close()
    return world.n.get(digest)


def test_a_value_of_an_older_move_is_not_stored(world: Pair) -> None:
    assert moved_away_and_back(world) == b"newest"


def test_mutation_older_move(world: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the look at the newest map right before COMMIT it would be."""
    monkeypatch.setattr(MovePlan, "wanted_of", lambda self, job: list(job.since))
    assert moved_away_and_back(world) == b"superseded"


def test_what_is_here_is_not_fetched_again(world: Pair) -> None:
    values = {digest_in(shard, shard): value_of(shard, 1000) for shard in SHARDS}
    liar = against(world, honest(values))
    assert world.mover().wait() is True
    fetched = [digest for msg in liar.asked if isinstance(msg, M.FetchPrevious) for digest, _ in msg.keys]
    assert sorted(fetched) == sorted(values)
    liar.asked.clear()
    with world.n.worker.frozen() as store:  # a mover that died before FINISH
        for shard in SHARDS:
            store.shards[shard] |= MOVING
        store.shard_words._recount()
    assert world.mover().wait() is True and world.moved() == SHARDS
    assert any(isinstance(msg, M.List) for msg in liar.asked)
    assert not any(isinstance(msg, M.FetchPrevious) for msg in liar.asked)
    liar.close()


def test_group_by_group(world: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A death in the middle loses one group's work, not all: groups are finished one by one."""
    monkeypatch.setattr(move_plan, "GROUP_SHARDS", 16)
    values = {digest_in(shard, shard): value_of(shard, 1000) for shard in SHARDS}
    script = honest(values)
    listing, held = script[M.List], threading.Event()
    script[M.List] = lambda msg: (held.wait(20) if SHARDS[-1] in shards_in(msg.shards) else None, listing(msg))[1]
    liar = against(world, script)
    mover = world.mover()
    wait_until(lambda: world.moved() == SHARDS[:48], "three groups of four")
    assert wait_until(lambda: [r for r in mover.progress() if r.left == 16 and r.values == 48], "its report")
    held.set()
    assert mover.wait() is True and world.moved() == SHARDS
    liar.close()


def test_a_new_step_of_the_same_move(world: Pair) -> None:
    """Maps that come while it works are taken up; one mover does all."""
    values = fill(world)
    world.move(SHARDS[:20])
    mover = world.mover()
    world.move(SHARDS[20:])
    mover.feed(world.message())
    assert mover.wait() is True and world.moved() == SHARDS
    assert world.n.fetch(list(values)) == list(values.values())


def test_a_fenced_worker_adopts_nothing(world: Pair) -> None:
    values = fill(world, 30)
    world.move(SHARDS)
    world.n.worker.supervisor.call(M.Shards(0, b"", b""))
    mover = world.mover()
    wait_until(lambda: all(world.p.word(shard) >= FROZEN for shard in SHARDS), "FREEZE")
    time.sleep(0.1)
    assert not any(world.n.word(shard) for shard in SHARDS)
    world.tell()
    mover.feed(world.message())
    assert mover.wait() is True and world.n.fetch(list(values)) == list(values.values())


# --- previous owners that fail -------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(move_plan, "FREEZE_S", 0.1)
    monkeypatch.setattr(move_plan, "GIVE_UP_S", 0.2)
    monkeypatch.setattr(mover_module, "RETRY_S", (0.005, 0.02))


def test_out_of_reach_at_freeze(world: Pair, impatient: None) -> None:
    """No fall-back then: readers are not sent to who could have accepted more."""
    values = fill(world, 12)
    world.move(SHARDS)
    world.p.stream.close()
    assert world.mover().wait() is True
    assert world.moved() == SHARDS and all(world.n.word(shard) == world.epoch for shard in SHARDS)
    assert world.n.fetch(list(values)) == [None] * len(values)
    world.n.put(digest_in(1, "after"), b"after")


def test_silent_at_freeze(world: Pair, impatient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simm.server.migration_peers.FREEZE_TRY_S", 0.1)
    liar = against(world, {M.Freeze: lambda _msg: None})
    assert world.mover().wait() is True and world.moved() == SHARDS
    liar.close()


def test_wrong_token() -> None:
    with pair(tokens=("a token of sixteen bytes",)) as world:
        values = fill(world, 6)
        world.move(SHARDS)
        assert world.mover(token="another token, as long").wait() is True
        assert world.moved() == SHARDS and world.n.fetch(list(values)) == [None] * 6


def test_right_token() -> None:
    with pair(tokens=("a token of sixteen bytes",)) as world:
        values = fill(world, 6)
        world.move(SHARDS)
        assert world.mover().wait() is True
        assert world.n.fetch(list(values)) == list(values.values())


def test_our_map_is_old(world: Pair) -> None:
    """P refuses FREEZE by a newer map: nothing is adopted until that one comes."""
    refused = answer(M.Error("newer"), status=Status.WRONG_OWNER)
    script = honest({digest_in(1, 1): b"one"})
    freeze = script[M.Freeze]
    script[M.Freeze] = lambda msg: refused if msg.epoch < 3 else freeze(msg)
    liar = against(world, script)
    mover = world.mover()
    wait_until(lambda: liar.asked[1:], "FREEZE")
    time.sleep(0.1)
    assert not any(world.n.word(shard) for shard in SHARDS)
    world.forget([])  # another epoch, the same shards
    mover.feed(world.message())
    assert mover.wait() is True and world.n.get(digest_in(1, 1)) == b"one"
    liar.close()


def test_dies_in_the_middle(world: Pair, impatient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was copied stays, what was not is given up; the shards are finished."""
    monkeypatch.setattr(move_plan, "GROUP_SHARDS", 16)
    monkeypatch.setattr(mover_module, "COPIERS", 1)
    values = {digest_in(shard, shard): value_of(shard, 1000) for shard in SHARDS}
    script = honest(values)
    fetch = script[M.FetchPrevious]

    def once(msg: Any) -> bytes | None:
        if sum(isinstance(each, M.FetchPrevious) for each in liar.asked) > 2:
            liar.close()
        return fetch(msg)

    script[M.FetchPrevious] = once
    liar = against(world, script)
    mover = world.mover()
    assert mover.wait() is True and world.moved() == SHARDS
    got = world.n.fetch(list(values))
    assert sum(value is not None for value in got) == 32
    assert all(value in (None, values[digest]) for digest, value in zip(values, got))


def test_its_worker_is_away_for_a_moment(world: Pair) -> None:
    """UNAVAILABLE is no answer: it is asked again."""
    values = {digest_in(shard, shard): value_of(shard, 1000) for shard in SHARDS}
    script = honest(values)
    fetch, freeze, listing = script[M.FetchPrevious], script[M.Freeze], script[M.List]
    times = {M.Freeze: 0, M.List: 0, M.FetchPrevious: 0}
    down = answer(M.Error("down"), status=Status.UNAVAILABLE)

    def twice(kind: type, inner: Callable[[Any], bytes | None], instead: Callable[[Any], bytes]) -> None:
        def scripted(msg: Any) -> bytes | None:
            times[kind] += 1
            return instead(msg) if times[kind] <= 2 else inner(msg)

        script[kind] = scripted

    def no_answer(msg: Any) -> bytes:
        return answer(M.Fetched([(Status.UNAVAILABLE, 0, 0, 0)] * len(msg.keys)), M.Verdict([0] * len(msg.keys)))

    twice(M.Freeze, freeze, lambda _msg: down)
    twice(M.List, listing, lambda _msg: down)
    twice(M.FetchPrevious, fetch, no_answer)
    liar = against(world, script)
    assert world.mover().wait() is True
    assert world.n.fetch(list(values)) == list(values.values())
    liar.close()


GOOD, BAD = digest_in(1, "good"), digest_in(2, "bad")
HAS = {GOOD: b"good value", BAD: b"bad value"}
NAMED = [M.NamespaceName(3, "default")]


def listed(*entries: tuple[bytes, int, int, int], cursor: int = 0) -> Callable[[Any], bytes]:
    return lambda _msg: answer(M.Listed(cursor, list(entries), NAMED))


def fetched(*entries: tuple[int, int, int, int], bare: bytes = b"", verdict: tuple[int, ...] = (0, 0)) -> Any:
    return lambda _msg: answer(M.Fetched(list(entries)), bare, M.Verdict(list(verdict)))


BARE = b"".join(HAS.values())
TWO = [(0, 0, 10, 0), (0, 0, 9, 0)]
LIES: dict[str, tuple[type, Callable[[Any], bytes | None]]] = {
    "froze others": (M.Freeze, lambda _msg: answer(M.Frozen(bitmap_of([SHARDS[-1] + 1])))),
    "froze by a short bitmap": (M.Freeze, lambda _msg: answer(M.Frozen(b"\xff"))),
    "answers FREEZE with PONG": (M.Freeze, lambda _msg: answer(M.Pong(1))),
    "lists a value of no bytes": (M.List, listed((BAD, 0, 0, 3))),
    "lists a value that is too long": (M.List, listed((BAD, VALUE_BYTES_MAX + 1, 0, 3))),
    "lists another shard's": (M.List, listed((digest_in(SHARDS[-1] + 1, 1), 9, 0, 3))),
    "lists a namespace without a name": (M.List, listed((BAD, 9, 0, 4))),
    "lists in a circle": (M.List, lambda msg: listed(cursor=1)(msg)),
    "answers LIST with PONG": (M.List, lambda _msg: answer(M.Pong(1))),
    "sends too few": (M.FetchPrevious, fetched(TWO[0], bare=BARE[:10], verdict=(0,))),
    "sends shorter ones": (M.FetchPrevious, fetched(TWO[0], (0, 0, 8, 0), bare=BARE[:18])),
    "sends longer ones": (M.FetchPrevious, fetched(TWO[0], (0, 0, 10, 0), bare=BARE + b"!")),
    "sends more bytes than it says": (M.FetchPrevious, fetched(*TWO, bare=BARE + b"more")),
    "judges too few": (M.FetchPrevious, fetched(*TWO, bare=BARE, verdict=(0,))),
    "judges none": (M.FetchPrevious, lambda _msg: answer(M.Fetched(TWO), BARE, M.Pong(1))),
    "takes all back": (M.FetchPrevious, fetched(*TWO, bare=BARE, verdict=(12, 12))),
    "has wrong checksums": (M.FetchPrevious, fetched((0, 1, 10, 7), (0, 1, 9, 7), bare=BARE)),
    "sends garbage": (M.FetchPrevious, lambda _msg: answer(b"\0" * 100)),
    "answers FETCH with PONG": (M.FetchPrevious, lambda _msg: answer(M.Pong(1))),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies(world: Pair, impatient: None, lie: str) -> None:
    """No value is stored, nothing hangs, and the shards are N's."""
    kind, scripted = LIES[lie]
    liar = against(world, {**honest(HAS), kind: scripted})
    mover = world.mover()
    assert mover.wait() is True and world.moved() == SHARDS
    assert world.n.fetch([GOOD, BAD]) == [None, None]
    stats = world.n.stats()
    assert stats["entries"] == 0 and stats["copies"] == 0
    liar.close()


def test_the_truth_is_no_lie(world: Pair) -> None:
    """Positive control of the test above: the same script without a lie brings both values."""
    liar = against(world, honest(HAS))
    assert world.mover().wait() is True
    assert world.n.fetch([GOOD, BAD]) == list(HAS.values())
    liar.close()


def test_garbage_digests_are_only_misses(world: Pair) -> None:
    """It lists what it does not have: nothing comes of it, and what it has moves."""
    ghosts = [(digest_in(5, at), 100, 0, 3) for at in range(50)]
    real = [(digest, len(value), 0, 3) for digest, value in HAS.items()]
    liar = against(world, {**honest(HAS), M.List: listed(*ghosts, *real)})
    mover = world.mover()
    assert mover.wait() is True and world.n.fetch([GOOD, BAD]) == list(HAS.values())
    assert mover.mover.lost == 50
    liar.close()


def test_issue_a_name_that_is_too_long_costs_its_values_alone(world: Pair) -> None:
    """The worker closes a connection whose HELLO is too long, and the mover ended as if the worker had died."""
    names = [*NAMED, M.NamespaceName(4, "x" * 5000)]
    page = M.Listed(0, [(GOOD, 10, 0, 3), (BAD, 9, 0, 4)], names)
    liar = against(world, {**honest(HAS), M.List: lambda _msg: answer(page)})
    mover = world.mover()
    assert mover.wait() is True and world.moved() == SHARDS
    assert world.n.fetch([GOOD, BAD]) == [HAS[GOOD], None] and mover.mover.lost == 1
    liar.close()


def test_what_moves_is_no_near_copy(world: Pair) -> None:
    """Whatever the previous owner says: a copy would be gone in minutes."""
    said = [(0, COMMIT_NEAR, 10, 0), (0, COMMIT_NEAR, 9, 0)]
    liar = against(world, {**honest(HAS), M.FetchPrevious: fetched(*said, bare=BARE)})
    assert world.mover().wait() is True
    assert world.n.fetch([GOOD, BAD]) == list(HAS.values())
    with world.n.worker.frozen() as store:
        store.apply_pending()
        assert not store.near.counts["made"]
    liar.close()


@pytest.mark.full
def test_issue_values_that_are_given_up_are_counted(world: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lists values and sends none of them: the mover knows what it gives up with their shards."""
    monkeypatch.setattr(move_plan, "GIVE_UP_S", 0.2)
    monkeypatch.setattr(mover_module, "RETRY_S", (0.005, 0.02))
    liar = against(world, {**honest(HAS), M.FetchPrevious: lambda _msg: None})
    mover = world.mover()
    assert mover.wait() is True and world.moved() == SHARDS
    assert mover.mover.lost == len(HAS)
    liar.close()


def test_values_that_our_worker_refuses_are_counted(world: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their sets of the table are full of what is pinned."""
    values = fill(world, 12)
    world.move(SHARDS)
    store = world.n.worker.store
    monkeypatch.setattr(store.table, "publish", lambda *_: None)
    monkeypatch.setattr(store, "_evict_from_sets", lambda _: False)
    mover = world.mover()
    assert mover.wait() is True and world.moved() == SHARDS
    assert (mover.mover.lost, mover.mover.values) == (len(values), 0)


# --- our own worker -------------------------------------------------------------------------------


def test_our_worker_dies_and_comes_back(world: Pair) -> None:
    """The mover ends; the successor has what was copied, misses for the rest, and nothing superseded."""
    values = {digest_in(shard, shard): value_of(shard, 1000) for shard in SHARDS}
    script = honest(values)
    gate = Gate(script, M.FetchPrevious)
    liar = against(world, script)
    mover = world.mover()
    assert gate.reached.wait(20)
    first = next(iter(values))
    world.n.put(first, b"newer")
    assert world.n.delete(first) == Status.OK
    world.n.worker.die()
    gate.opened.set()
    assert isinstance(mover.wait(), WorkerLost)
    world.n.worker.store.release()
    world.n.worker.start()
    world.tell()
    assert world.moved() == SHARDS, "its memory is lost, so the fall-back has ended"
    assert world.n.get(first) is None
    liar.close()


def test_no_room_is_counted_not_waited_for(world: Pair) -> None:
    """Everything at N is pinned: what there is no chunk for does not come along."""
    fill(world, 12)
    world.n.worker.store.sessions.pinned_bytes_max = 1 << 40  # pins may fill the arena
    world.move([5000], previous=False)
    session = WorkerSession(world.n.worker.path, "default", WAIT_S, ring=False)
    for size in (100_000, *SIZES):
        while True:
            session.ask([(size, 16)])
            grants = []
            while (grant := session.pool.take(size)) is not None:
                grants.append(grant)
            if not grants:
                break
            digests = [digest_in(5000, grant[0]) for grant in grants]
            entries = [(digest, grant[0], size, 0, 0, 0) for digest, grant in zip(digests, grants)]
            assert set(session.exchange(M.Commit(entries, [])).statuses) == {Status.OK}
            for digest in digests:
                assert session.pin_one(digest)[0] == Status.OK
    world.move(SHARDS)
    mover = world.mover()
    assert mover.wait() is True and world.moved() == SHARDS
    assert mover.mover.lost > 0 and mover.mover.lost + mover.mover.values == 12
    session.close()


# --- pace and budget -------------------------------------------------------------------------------



@pytest.mark.parametrize("seed", range(5))
def test_pace_counts_bytes(seed: int) -> None:
    """At any time: no more than the rate allows, the bucket, and one taker's overdraft."""
    rng = random.Random(f"pace {seed}")
    clock = Clock(100.0)
    rate = rng.choice([1000, 1 << 20])
    pace = TokenBucket(rate, clock, clock.sleep)
    begun, passed, largest = clock(), 0, 0
    for _ in range(500):
        if rng.random() < 0.1:
            clock.sleep(rng.random())
        count = rng.randint(1, rate)
        pace.take(count)
        passed += count
        largest = max(largest, count)
        if rng.random() < 0.1:
            pace.take(-count)
            passed -= count
        assert passed <= pace.burst + rate * (clock() - begun) + largest + 1
    assert passed >= rate * (clock() - begun) * 0.1, "and it is not slower than it has to be"
    free = TokenBucket(0, clock, clock.sleep)
    before = clock()
    free.take(1 << 40)
    assert clock() == before


def test_mutation_pace() -> None:
    """A bucket that lets ten times as much through is seen by such a sum."""
    clock = Clock(100.0)
    pace = TokenBucket(10_000, clock, clock.sleep)
    for _ in range(100):
        pace.take(1000)
    assert 100 + 1000 * (clock() - 100.0) + 1000 + 1 < 100_000


def test_the_mover_asks_the_pace_for_every_byte(world: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    monkeypatch.setattr(TokenBucket, "take", lambda self, count: taken.append(count))
    values = fill(world)
    world.move(SHARDS)
    mover = world.mover(bytes_per_s=1 << 20)
    assert mover.mover.bucket.rate == 1 << 20
    assert mover.wait() is True
    assert sum(taken) == sum(map(len, values.values())) == mover.mover.bytes


def test_budget() -> None:
    budget = ByteBudget(100)
    most = []
    lock = threading.Lock()
    held = [0]

    def work(size: int) -> None:
        for _ in range(50):
            with budget.reserve(size):
                with lock:
                    held[0] += size
                    most.append((held[0], size))
                with lock:
                    held[0] -= size

    threads = [threading.Thread(target=work, args=(size,)) for size in (10, 40, 90, 150)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert budget.used == 0
    assert all(total <= 100 or total == size == 150 for total, size in most)


# --- parts -----------------------------------------------------------------------------------------


def test_no_worker_to_talk_to(tmp_path: Any) -> None:
    with pytest.raises(WorkerLost):
        TargetWorker(str(tmp_path / "nobody"))


def test_previous_says_what_was_refused(world: Pair) -> None:
    previous = SourceWorker(world.p.info, "")
    assert repr(previous) == f"<SourceWorker p/0 at 127.0.0.1:{world.p.stream.port}>"
    with pytest.raises(Refused) as refused:
        previous.freeze(1, [0])
    assert refused.value.status == Status.WRONG_OWNER, "P has the shard by a map as new as ours"
    assert previous.freeze(2, [0, 1]) == [0, 1]
    assert np.all(np.frombuffer(world.p.worker.store.shards, np.uint64)[:2] == np.uint64(FROZEN | 2))


def test_a_rate_that_is_changed_holds_for_whoever_waits() -> None:
    now, naps = [0.0], []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        now[0] += seconds
        if len(naps) == 3:
            bucket.set_rate(0)

    bucket = TokenBucket(10, lambda: now[0], nap)
    bucket.take(1000)  # overdraws it
    bucket.take(1)
    assert len(naps) == 3 and max(naps) <= 0.5, "without the change it were 100 s"
    bucket.set_rate(1000)
    bucket.take(1)
    assert bucket.burst == 100

"""A look at a table goes page by page, and the worker goes on between two pages: claims are true all the time."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from simm.arena.events import follow as follow_module
from simm.arena.events.follow import Follower, Step
from simm.arena.events.listing import ENTRY_FIELDS
from simm.arena.events.ring import CLOSED, LOOKBACK, NAMESPACE, SHARD, STORED, EventRing, RingReader
from simm.constants import POLICY_NAMES
from simm.ipc.arena_files import OwnedArena
from tests.support.dose import dose, dosed
from tests.support.event_claims import Watcher, apply, listed, new_ring, told
from tests.support.store_steps import step
from tests.support.store_world import World

MIB = 1 << 20
SEGMENT_BYTES = 16 * MIB
SLOTS = 64


def fill(ring: EventRing, count: int) -> None:
    """Tell so much that says nothing: removals of a slot that no table has."""
    while count > 0:
        ring.removed(np.full(min(count, LOOKBACK), 1 << 30))
        count -= LOOKBACK


class Scene:
    """A world whose store tells a ring."""

    def __init__(self, segment: OwnedArena, policy: str) -> None:
        self.memory = new_ring()
        self.world = World(segment, slots=SLOTS, policy=policy, store=told(self.memory))

    def work(self, rng: random.Random) -> None:
        for _ in range(rng.randrange(3)):
            step(self.world, rng)
        if rng.random() < 0.3:
            self.tell()

    def tell(self) -> None:
        """Do what a heartbeat does."""
        self.world.store.apply_pending()
        self.world.store.table.tell()

    def false_claims(self, watcher: Watcher) -> list[bytes]:
        real = listed(watcher.reader)
        return [each for each in watcher.claims if each not in real and not watcher.reader.contains(each)]


@pytest.mark.parametrize("seed", dose(range(8), quick=2))
def test_claims_are_true_at_each_page(segment: OwnedArena, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Of who begins, and of who looks again: until its first pass is done that one may claim what it has missed."""
    monkeypatch.setattr(follow_module, "LOOK_SLOTS", 4)
    rng, scene = random.Random(seed), Scene(segment, POLICY_NAMES[seed % len(POLICY_NAMES)])
    for _ in range(60):
        step(scene.world, rng)
    scene.tell()
    steady = Watcher(scene.memory, scene.world.reader)
    between = pages = 0
    for _ in range(dosed(10, quick=4)):
        steady.catch_up()
        scene.work(rng)
        if rng.random() < 0.7:
            fill(scene.world.store.table.events, steady.follower._ring.capacity + 1)  # a gap
        late = Watcher(scene.memory, scene.world.reader)
        for watcher in (late, steady):
            steps = 0
            while (watcher.follower.due or not steps) and steps < 200:
                scene.work(rng)
                changed = not watcher.step().empty
                steps += 1
                pages += 1
                between += changed
                lapped = watcher.follower._page < 0 or watcher.follower.looks > 1
                if not (lapped and watcher.follower._sorting):
                    assert not scene.false_claims(watcher)
        scene.tell()
        for watcher in (late, steady):
            assert watcher.catch_up() == listed(watcher.reader)
    assert pages > 60 and between > 15


# -- one page, with a worker that does just this ------------------------------------------------------------


class FakeTable:
    """Slots with digests. ``meanwhile`` is called when a page was copied."""

    def __init__(self, slots: int, entries: dict[int, int]) -> None:
        self.slots = slots
        self.entries = entries
        self.meanwhile: Callable[[], object] = lambda: None

    def page(self, start: int, stop: int) -> np.ndarray:
        rows = self.some(np.arange(start, stop))
        self.meanwhile()
        return rows

    def some(self, slots: np.ndarray) -> np.ndarray:
        kept = [slot for slot in slots.tolist() if slot in self.entries]
        rows = np.zeros(len(kept), ENTRY_FIELDS)
        rows["slot"], rows["low"], rows["namespace"] = kept, [self.entries[each] for each in kept], 3
        return rows


class Page:
    """A follower of a table of two pages of four slots, and the names that it claims."""

    def __init__(self, entries: dict[int, int], slots: int = 8) -> None:
        memory = new_ring()
        self.ring, self.table = EventRing(memory), FakeTable(slots, entries)
        self.follower = Follower(RingReader(memory), self.table)
        self.claims: dict[bytes, tuple[int, int]] = {}

    @property
    def names(self) -> set[int]:
        return {int.from_bytes(each[:8], "little") for each in self.claims}

    def step(self) -> Step:
        step = self.follower.step()
        apply(self.claims, step)
        return step

    def look(self, steps: int = 100) -> set[int]:
        while self.follower.due and steps:
            self.step()
            steps -= 1
        return self.names

    def gap(self) -> None:
        fill(self.ring, self.follower._ring.capacity + 1)

    def move(self, source: int, target: int) -> None:
        """Let an entry be stored in another slot, as the next heartbeat tells."""
        self.ring.removed_one(source)
        self.table.entries[target] = self.table.entries.pop(source)


@pytest.fixture
def four_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow_module, "LOOK_SLOTS", 4)


@pytest.mark.usefixtures("four_slots")
def test_an_entry_that_moved_to_an_earlier_page_in_a_gap_stays_claimed() -> None:
    """By one pass it was claimed there, and then said to be gone from the later page."""
    page = Page({1: 101, 6: 106})
    assert page.look() == {101, 106}
    page.move(6, 2)
    page.gap()
    assert page.step().empty and page.follower.due
    assert page.look(2) == {101}, "the first pass claims nothing"
    assert not page.follower._sorting and page.look() == {101, 106}


@pytest.mark.usefixtures("four_slots")
def test_an_entry_that_is_stored_in_the_first_pass_is_claimed_in_the_second() -> None:
    page = Page({6: 106})
    assert page.look() == {106}
    page.move(6, 2)
    page.table.entries[3] = 103
    page.gap()
    page.ring.append(STORED, 2)
    page.ring.append(STORED, 3)
    page.step()
    page.step()
    assert page.follower._sorting and page.names == {106}, "it is not known yet that this one has gone from slot 6"
    page.step()
    assert not page.names
    assert page.look() == {103, 106}


@pytest.mark.usefixtures("four_slots")
def test_a_slot_that_is_told_while_its_page_is_copied_is_left_to_the_record() -> None:
    """What came and went in one step would be there, for who takes single entries all at once."""
    page = Page({1: 101, 2: 102})

    def meanwhile() -> None:
        page.ring.removed_one(1)
        page.table.entries[1] = 201
        page.ring.append(STORED, 1)

    page.table.meanwhile = meanwhile
    records = page.step().records
    assert sorted(records["low"].tolist()) == [102, 201] and (records["operation"] == STORED).all()


@pytest.mark.usefixtures("four_slots")
@pytest.mark.parametrize("where", [1, 6], ids=["a page before", "a page behind"])
def test_a_commit_and_an_eviction_between_two_pages(where: int) -> None:
    page = Page({0: 100, 5: 105})
    page.step()
    assert page.names == {100}
    page.table.entries[where] = 200
    page.ring.append(STORED, where)
    page.step()
    assert page.names == {100, 105, 200} and not page.follower.due
    page = Page({0: 100, 5: 105, where: 200})
    page.step()
    page.ring.removed_one(where)
    del page.table.entries[where]
    assert page.look() == {100, 105}


@pytest.mark.usefixtures("four_slots")
@pytest.mark.parametrize("told", ["removed", "shard", "namespace", "closed", "stored again", "shard and stored again"])
@pytest.mark.parametrize("when", ["long before", "before", "meanwhile"])
def test_what_is_told_around_a_copy(told: str, when: str) -> None:
    """The worker tells that an entry goes, and has not taken it yet. ``long before``: so that it must have by now."""
    page = Page({1: 101, 5: 105})
    ring = page.ring

    def tell() -> None:
        if told.startswith("shard"):
            ring.append(SHARD, 101)
        elif told == "namespace":
            ring.append(NAMESPACE, 3)
        elif told == "closed":
            ring.append(CLOSED)
        else:
            ring.removed_one(1)
        if told.endswith("stored again"):
            ring.append(STORED, 1)

    if when == "meanwhile":
        page.table.meanwhile = tell
        page.step()
    else:
        tell()
        fill(ring, LOOKBACK if when == "long before" else 0)
    page.table.meanwhile = lambda: None
    found = page.look()
    left = {101} if when == "long before" or told.endswith("stored again") else set()
    if told in ("namespace", "closed") and when != "long before":
        assert found == left
    else:
        assert found == left | {105}


@pytest.mark.usefixtures("four_slots")
def test_a_dead_workers_removals_are_not_believed() -> None:
    page = Page({1: 101})
    page.ring.removed_one(1)  # and it dies
    page.ring.anew()
    assert page.look() == {101} and page.follower.looks == 1
    page = Page({1: 101, 5: 105})
    page.step()
    assert page.names == {101}
    page.ring.removed_one(5)
    page.ring.anew()
    assert page.look() == {101, 105} and page.follower.looks == 2


@pytest.mark.usefixtures("four_slots")
@pytest.mark.parametrize("how", ["a gap", "a death"])
def test_a_page_that_cannot_be_put_right_is_not_claimed(how: str) -> None:
    page = Page({1: 101})

    def meanwhile() -> None:
        page.ring.removed_one(1)
        page.table.entries.pop(1, None)
        page.gap() if how == "a gap" else page.ring.anew()

    page.table.meanwhile = meanwhile
    page.step()
    page.table.meanwhile = lambda: None
    assert not page.names and page.follower.due and page.follower.gaps == (how == "a gap")
    assert not page.look() and page.follower.looks == 2


@pytest.mark.usefixtures("four_slots")
def test_a_ring_of_the_least_size_is_read_in_time() -> None:
    """What is looked back at is counted from the copy: what is older was carried out, and may be overwritten."""
    page = Page({1: 101, 5: 105})
    fill(page.ring, 2 * LOOKBACK)
    page.step()
    fill(page.ring, page.follower._ring.capacity - LOOKBACK // 2)
    assert page.look() == {101, 105} and page.follower.gaps == 0


@pytest.mark.usefixtures("four_slots")
def test_who_claims_nothing_needs_one_pass() -> None:
    """The first one took as long as the second, at each start, for nothing."""
    page = Page({1: 101, 6: 106})
    page.step()
    page.step()
    assert page.names == {101, 106} and not page.follower.due
    page.gap()
    for _ in range(4):
        page.step()
    assert page.follower.due, "the control: with claims it needs two, and a step for the gap"
    page.step()
    assert not page.follower.due


@pytest.mark.usefixtures("four_slots")
def test_where_few_slots_are_in_use_pages_are_wider() -> None:
    """A look took a step for each 16,384 slots: minutes for a large table of few values."""
    entries = {200: 1, **{slot: slot for slot in range(201, 250)}, 399: 2}
    page, copied = Page(entries, slots=400), []
    some = page.table.page
    page.table.page = lambda start, stop: (copied.append((start, stop)), some(start, stop))[1]  # type: ignore[assignment]
    assert page.look() == set(entries.values())
    assert copied[:6] == [(0, 4), (4, 12), (12, 28), (28, 60), (60, 124), (124, 188)], "16 times as many at most"
    (at,) = [number for number, (start, stop) in enumerate(copied) if start < 250 < stop]
    assert copied[at + 1] == (copied[at][1], copied[at][1] + 4), "not behind one with more than a page's entries"


@pytest.mark.usefixtures("four_slots")
def test_pages_of_a_full_table_of_which_little_is_claimed_are_no_wider() -> None:
    """They were as wide as those of an empty one in the first pass, which claims nothing: a third of a second each."""
    page, copied = Page({0: 1000}, slots=64), []
    assert page.look() == {1000}
    page.table.entries.update({slot: 1000 + slot for slot in range(64)})
    page.gap()
    some = page.table.page
    page.table.page = lambda start, stop: (copied.append(stop - start), some(start, stop))[1]  # type: ignore[assignment]
    assert page.step().empty and page.follower.due
    assert len(page.look()) == 64 and set(copied) == {4} and len(copied) == 2 * 16, "of both passes"

"""Prefixes by remembered places against prefixes by a search: while blocks come and go, and the table grows."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

from simm.index import places as module
from simm.index.places import STRIDE, Places
from simm.index.prefixes import alike, leading
from simm.index.table import Table
from tests.support.dose import dosed


class _World:
    """Prompts that begin alike, and owners that get and lose blocks of them, as events tell."""

    def __init__(self, seed: int, owners: int) -> None:
        self.rng = rng = random.Random(seed)
        self.table = Table({"counts": np.uint32}, lambda owners: np.ones(len(owners), np.bool_))
        trunk = [rng.getrandbits(64) for _ in range(200)]
        self.prompts = [
            trunk[:length] + [rng.getrandbits(64) for _ in range(rng.choice((0, 1, 30)))]
            for length in (3, 40, 41, 90, 200, 200)
        ]
        self.owners = list(range(1, owners + 1))
        self.units: list[list[int]] = []
        for owner in self.owners:
            if self.units and rng.random() < 0.1:
                self.units[-1].append(owner)
            else:
                self.units.append([owner])

    def change(self) -> None:
        """Do what an event may do."""
        rng, table = self.rng, self.table
        owner, prompt = rng.choice(self.owners), rng.choice(self.prompts)
        what = rng.random()
        counts = table.columns["counts"]
        if what < 0.5:  # its prefix grows
            for key in prompt[: rng.randrange(len(prompt) + 1)]:
                slot = table.find_one(key, owner)
                slot = table.add_one(key, owner) if slot < 0 else slot
                table.columns["counts"][slot] = table.columns["counts"][slot] or 1
        elif what < 0.7:  # a block goes
            slot = table.find_one(rng.choice(prompt), owner)
            if slot >= 0:
                table.remove_one(slot)
        elif what < 0.8:  # a block changes its tier, or has none for a moment
            slot = table.find_one(rng.choice(prompt), owner)
            if slot >= 0:
                counts[slot] = rng.choice((0, 1, 16, 17))
        elif what < 0.9:  # others come
            for _ in range(rng.randrange(200)):
                slot = table.add_one(rng.getrandbits(64), rng.randrange(1000, 2000))
                table.columns["counts"][slot] = 1
        elif what < 0.95:
            table.rebuild()
        elif len(self.units) > 1:  # one is stale: it is not asked about
            self.units.append(self.units.pop(0))

    def question(self) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        """Return the keys of a prompt, or of its beginning, or with another end."""
        prompt = self.rng.choice(self.prompts)
        prompt = prompt[: self.rng.choice((len(prompt), self.rng.randrange(len(prompt) + 1)))]
        more = [self.rng.getrandbits(64) for _ in range(self.rng.choice((0, 0, 5, 40)))]
        return np.array(prompt + more, np.uint64)


def _plain(parts: list[list[tuple[np.ndarray[tuple[int], np.dtype[np.uint32]], int | None]]]) -> object:
    return [[counts.tolist() for counts, _ in unit] for unit in parts]


def _ask(world: _World, places: Places) -> None:
    """Hold one answer against a search, of the tiers too. Where tiers are not told, each block is looked at."""
    keys = world.question()
    got = places.leading(world.table, world.units, keys)
    wanted = leading(world.table, world.units, keys)
    assert _plain(got) == [[counts.tolist() for counts, _ in unit] for unit in wanted]
    for unit in got:
        for counts, same in unit if len(unit) == 1 else ():
            assert same is None or not len(counts) or [same] == alike([counts])


@pytest.mark.parametrize("owners", [1, 6, 60])
def test_a_remembered_place_says_what_a_search_says(owners: int) -> None:
    hits = 0
    for seed in range(dosed(8, quick=2)):
        world, places = _World(seed, owners), Places()
        for _ in range(20):
            world.change()
        for _ in range(100):
            _ask(world, places)
            if world.rng.random() < 0.3:
                world.change()
        hits += places.hits
    assert hits > 30


class _Blind(bytes):
    """What a run says of slots, and nobody compares."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = bytes.__hash__


@pytest.mark.parametrize("unseen", ["keys", "owners", "counts"])
def test_what_is_not_compared_is_found_out(unseen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: each of the comparisons is needed."""
    run = module._Run

    def blind(*told: object) -> tuple[object, ...]:
        made = run(*told)  # type: ignore[arg-type]
        return made._replace(**{unseen: _Blind(getattr(made, unseen))})

    monkeypatch.setattr(module, "_Run", blind)
    if unseen == "counts":
        with pytest.raises(AssertionError):
            test_a_remembered_place_says_what_a_search_says(6)
        return
    places, table = Places(), Table({"counts": np.uint32}, lambda owners: np.ones(len(owners), np.bool_))
    keys = np.arange(1, STRIDE + 1, dtype=np.uint64)
    for key in keys.tolist():
        slot = table.add_one(key, 1)
        table.columns["counts"][slot] = 1
    places.leading(table, [[1]], keys)
    slot = table.find_one(5, 1)  # removed, and what came has its slot and as many copies
    if unseen == "keys":
        table.keys[slot] = 999
    else:
        table.owners[slot] = 2
    with pytest.raises(AssertionError):
        assert _plain(places.leading(table, [[1]], keys)) == _plain_of(table, keys)


def _plain_of(table: Table, keys: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> object:
    return [[counts.tolist() for counts, _ in unit] for unit in leading(table, [[1]], keys)]


def test_a_next_block_that_came_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control for what nobody removed."""
    monkeypatch.setattr(module, "_grown", lambda *told: [])
    with pytest.raises(AssertionError):
        test_a_remembered_place_says_what_a_search_says(6)


@pytest.fixture
def filled() -> Iterator[tuple[Table, list[np.ndarray[tuple[int], np.dtype[np.uint64]]]]]:
    """A table in which owner 1 has 50 prompts of 100 blocks."""
    table = Table({"counts": np.uint32}, lambda owners: np.ones(len(owners), np.bool_))
    rng = random.Random(5)
    prompts = [np.array([rng.getrandbits(64) for _ in range(100)], np.uint64) for _ in range(50)]
    for keys in prompts:
        slots, _ = table.find_or_add(keys, np.full(100, 1, np.uint32))
        table.columns["counts"][slots] = 1
    yield table, prompts


def test_memory_has_an_end(filled: tuple[Table, list[np.ndarray[tuple[int], np.dtype[np.uint64]]]]) -> None:
    table, prompts = filled
    places = Places(bytes_max=20_000)
    for keys in prompts * 2:
        places.leading(table, [[1]], keys)
        assert 0 < places.nbytes <= 20_000
    assert places.nbytes == sum(run.nbytes for run in places._runs.values())
    before = places.hits
    places.leading(table, [[1]], prompts[-1])
    assert places.hits == before + 1  # the newest is there
    places.leading(table, [[1]], prompts[0])
    assert places.hits == before + 1


def test_a_conversation_that_grows_is_remembered_as_it_grows(
    filled: tuple[Table, list[np.ndarray[tuple[int], np.dtype[np.uint64]]]],
) -> None:
    table, prompts = filled
    places, whole = Places(), np.concatenate(prompts[:10])
    for end in range(100, 1001, 100):
        ((counts, _),) = places.leading(table, [[1]], whole[:end])[0]
        assert len(counts) == end
    assert places.hits == 9 and len(places._runs) == 10
    places.leading(table, [[1]], whole)
    assert places.hits == 10 and len(places._runs) == 10


def test_none_is_remembered_without_room(
    filled: tuple[Table, list[np.ndarray[tuple[int], np.dtype[np.uint64]]]],
) -> None:
    table, prompts = filled
    places = Places(bytes_max=0)
    for _ in range(2):
        ((counts, _),) = places.leading(table, [[1]], prompts[0])[0]
        assert len(counts) == 100
    assert (places.hits, places.nbytes) == (0, 0)

"""Places of namespaces that nobody uses are used again, by other numbers; against dictionaries, over deaths."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from simm.arena.hashing import tag_of
from simm.arena.layout import NAMESPACE_LINE_BYTES, NAMESPACES
from simm.arena.namespaces import (
    FREE_LINES_MIN,
    GENERATIONS,
    NEVER,
    NamespaceTable,
    Sweep,
    Sweeper,
    line_of,
    names_line,
)
from simm.arena.reader import ArenaReader
from simm.arena.sessions import Session
from simm.arena.store import Store
from simm.constants import DEFAULT_NAMESPACE, OTHERS_NAMESPACE
from simm.errors import CapacityError
from simm.ipc.arena_files import OwnedArena
from simm.wire.messages import BOUND, NAMESPACE_SHIFT, Status
from tests.support.dose import dose
from tests.support.shards import set_shards
from tests.support.store_world import ALL_SHARDS, World, digest_of, new_segment, owned, remove_segment
from tests.support.trace_replay import Tape

SLOTS = 1 << 17  # four blocks of a sweep


def sweep_of(store: Store) -> Sweep:
    return Sweep(
        store.ledger.namespaces, store.table, [each.namespace for each in store.sessions.by_id.values()]
    )  # fmt: skip


def swept(store: Store) -> int:
    sweep = sweep_of(store)
    while sweep.step():
        pass
    return sweep.freed


def put(store: Store, session: Session, digest: bytes, options: int = 0) -> int:
    ((number, _, _),) = store.sessions.grant(session, 64, 1)
    (status,) = store.commit(session, [(digest, number, 64, 0, 0, options)])
    store.apply_pending()
    return status


@pytest.fixture
def arena() -> Iterator[OwnedArena]:
    segment = new_segment(64 << 20, SLOTS)
    yield segment
    remove_segment(segment)


@pytest.fixture
def store(arena: OwnedArena) -> Iterator[Store]:
    made = Store.create(arena.mm, slots=SLOTS)
    set_shards(made, 1, *owned(ALL_SHARDS, 1))
    yield made
    made.release()


class Twin:
    """What must hold, by names alone: which name each entry has, and every number that was ever given out."""

    def __init__(self) -> None:
        self.entries: dict[bytes, str] = {}
        self.given: dict[int, str] = {}

    def gave(self, number: int, name: str) -> None:
        assert self.given.setdefault(number, name) == name, f"{number} was {self.given[number]!r}, and is {name!r}"

    def check(self, store: Store, sessions: dict[str, Session]) -> None:
        names = store.ledger.namespaces.names
        for digest, name in self.entries.items():
            entry = store.table.entry(store.table.lookup(digest))
            assert names[entry.namespace] == name == self.given[entry.namespace], digest
        assert len(set(names.values())) == len(names)
        assert len({line_of(number) for number in names}) == len(names) <= NAMESPACES
        for name, session in sessions.items():
            assert names[session.namespace] == name


def churn(store: Store, arena: OwnedArena, rng: random.Random, steps: int) -> tuple[int, int]:
    """Names come and go, with sweeps in between and worker's deaths. Return (names given out, names refused)."""
    twin = Twin()
    sessions: dict[str, Session] = {}
    told: dict[str, int] = {}  # what a stream keeps
    sweep: Sweep | None = None
    refused = fresh = 0
    relay = store.sessions.open(1, 1, "relay")
    relay.relays = True
    for step in range(steps):
        what = rng.random()
        try:
            if what < 0.35:
                name = f"n{step}"
                sessions[name] = store.sessions.open(1, 1, name)
                twin.gave(sessions[name].namespace, name)
                fresh += 1
            elif what < 0.45:
                name = rng.choice([*told, f"t{step}"])
                told[name] = store.ledger.namespaces.number(name)
                twin.gave(told[name], name)
        except CapacityError:
            refused += 1
            in_use = {*twin.entries.values(), *sessions, "relay", *told}
            assert sweep is not None or len(store.ledger.namespaces.names) == NAMESPACES <= len(in_use) + refused
        if 0.45 <= what < 0.65 and sessions:
            name = rng.choice(list(sessions))
            digest = digest_of(f"{name} {rng.randrange(3)}")
            assert put(store, sessions[name], digest) == Status.OK
            twin.entries[digest] = name
        elif 0.65 <= what < 0.7 and told:
            name = rng.choice(list(told))
            digest = digest_of(f"{name} x")
            done = put(store, relay, digest, told[name] + 1 << NAMESPACE_SHIFT | BOUND)
            known = store.ledger.namespaces.names.get(told[name]) == name
            assert (done == Status.OK) == known, "a number that was freed is refused, whatever its line has now"
            if known:
                twin.entries[digest] = name
            else:
                del told[name]
        elif 0.7 <= what < 0.85 and sessions:
            store.sessions.end(sessions.pop(rng.choice(list(sessions))))
        elif 0.85 <= what < 0.95 and twin.entries:
            name = rng.choice(list(twin.entries.values()))
            gone = [digest for digest, of in twin.entries.items() if of == name]
            store.delete(gone)
            for digest in gone:
                del twin.entries[digest]
        if sweep is None and store.ledger.namespaces.short and rng.random() < 0.1:
            sweep = sweep_of(store)
        elif sweep is not None and not sweep.step():
            sweep = None
        if rng.random() < 0.01:
            store.release()
            store.__dict__.update(Store.recover(arena.mm, arena.name).__dict__)
            set_shards(store, 1, *owned(ALL_SHARDS, 1))
            sweep = None
            by_name = {name: store.sessions.by_id[each.session] for name, each in sessions.items()}
            sessions = by_name
            relay = next(each for each in store.sessions.by_id.values() if each.session == relay.session)
            relay.relays = True
        if step % 20 == 0:
            twin.check(store, sessions)
    twin.check(store, sessions)
    while sweep is not None and sweep.step():
        pass
    swept(store)
    used = {*twin.entries.values(), *sessions, "relay"}
    assert set(store.ledger.namespaces.names.values()) == used, "exactly what is used is left"
    return fresh, refused


@pytest.mark.parametrize("seed", dose(range(3), quick=1))
def test_names_come_and_go_against_a_twin(store: Store, arena: OwnedArena, seed: int) -> None:
    fresh, refused = churn(store, arena, random.Random(seed), 1500)
    assert fresh > NAMESPACES and refused < fresh


@pytest.mark.parametrize("broken", ["marks of commits", "marks of sessions", "generations"])
def test_the_control(store: Store, arena: OwnedArena, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    """Without one of the rules, the twin sees an entry whose number names nothing, or another namespace."""
    if broken == "marks of commits":
        monkeypatch.setattr(NamespaceTable, "knows", lambda self, number: number in self.names)
        monkeypatch.setattr(
            NamespaceTable, "number", lambda self, name: self._numbers.get(name) or self._add(name)
        )  # fmt: skip
    elif broken == "marks of sessions":
        begin = NamespaceTable.begin_sweep
        monkeypatch.setattr(NamespaceTable, "begin_sweep", lambda self, used: begin(self, ()))
    else:
        free = NamespaceTable._free_line

        def same_number(self: NamespaceTable, number: int) -> None:
            free(self, number)
            self._free[-1] = number

        monkeypatch.setattr(NamespaceTable, "_free_line", same_number)
    with pytest.raises((AssertionError, KeyError)):
        for seed in range(20):
            churn(store, arena, random.Random(seed), 1500)


def test_a_full_table_takes_new_names_after_a_sweep(store: Store) -> None:
    assert store.ledger.namespaces.keep([f"k{n}" for n in range(5)]) == []
    live = store.sessions.open(1, 1, "live")
    for number in range(NAMESPACES - 7):
        session = store.sessions.open(1, 1, f"n{number}")
        if number < 10:
            assert put(store, session, digest_of(f"{number}")) == Status.OK
        store.sessions.close(session)
    with pytest.raises(CapacityError, match="256"):
        store.sessions.open(1, 1, "one more")
    assert swept(store) == NAMESPACES - 7 - 10
    names = store.ledger.namespaces.names
    kept = {OTHERS_NAMESPACE, *(f"k{n}" for n in range(5))}
    assert set(names.values()) == {"live", *kept, *(f"n{n}" for n in range(10))}
    again = store.sessions.open(1, 1, "n100")
    assert again.namespace >= NAMESPACES, "a number of its own"
    store.delete([digest_of("3")])
    assert swept(store) == 1 and "n3" not in names.values()
    store.sessions.close(live)
    assert swept(store) == 1 and "live" not in names.values()


def test_a_quarantined_session_keeps_its_namespace(store: Store) -> None:
    session = store.sessions.open(1, 1, "q")
    assert store.sessions.grant(session, 64, 1)
    store.sessions.close(session)
    assert swept(store) == 0 and session.namespace in store.ledger.namespaces.names
    store.sessions.end(session)
    assert swept(store) == 1


def test_generations_end(store: Store) -> None:
    """A line whose numbers are used up is left alone, also by a successor."""
    spaces = store.ledger.namespaces
    given: set[int] = set()
    for name in range(NAMESPACES * GENERATIONS):
        if not spaces._free:
            assert swept(store) == NAMESPACES
        given.add(spaces.number(f"{name}"))
    assert len(given) == NAMESPACES * GENERATIONS and max(given) < (1 << 16) - 1
    assert swept(store) == NAMESPACES and not spaces._free
    with pytest.raises(CapacityError):
        spaces.number("one more")
    assert spaces.recover() == [] and not spaces._free


def test_a_successor_dies_at_every_store_of_a_reuse(arena: OwnedArena) -> None:
    """A line goes and comes with another name: at each point it has the one, the other, or is free."""
    world = World(arena)
    spaces = world.store.ledger.namespaces
    world.join("world")
    old = spaces.number("the old name")
    spaces._free.clear()  # so that the line is the next to be used
    at = world.store.geometry.names_offset + line_of(old) * NAMESPACE_LINE_BYTES
    tape = Tape.of(world)

    def reuse() -> None:
        assert swept(world.store) == 1
        assert spaces.number("another one") == old + NAMESPACES

    tape.record(reuse)
    seen = set()
    for frame in tape.frames:
        tape.show(frame)
        fresh = NamespaceTable(memoryview(arena.mm)[world.store.geometry.names_offset : world.store.geometry.names_end])
        assert fresh.recover() == []
        found = {name for number, name in fresh.names.items() if line_of(number) == line_of(old)}
        numbers = {number: name for number, name in fresh.names.items() if line_of(number) == line_of(old)}
        assert numbers in ({old: "the old name"}, {}, {old + NAMESPACES: "another one"})
        if not numbers:
            assert old + NAMESPACES in fresh._free and old not in fresh._free, "no number comes twice"
        word = int.from_bytes(arena.mm[at : at + 8], "little")
        assert names_line(old, word) == (old in numbers)
        seen.add(frozenset(found))
        fresh.release()
    assert len(seen) == 3


def test_a_reader_takes_no_name_for_another(store: Store, arena: OwnedArena) -> None:
    """A mover's lister and a stream ask by number while the worker changes the line."""
    reader = ArenaReader(arena.name)
    spaces = store.ledger.namespaces
    number = spaces.number("first")
    assert reader.namespace_name(number) == "first" and reader.has_namespace(number)
    spaces._free.clear()
    assert swept(store) == 1
    assert reader.namespace_name(number) is None and not reader.has_namespace(number)
    again = spaces.number("second, longer")
    assert line_of(again) == line_of(number)
    assert reader.namespace_name(number) is None and reader.namespace_name(again) == "second, longer"
    for wrong in (0xFFFF, again + NAMESPACES, line_of(number) + 1):
        assert reader.namespace_name(wrong) is None

    stop = threading.Event()
    faults: list[Any] = []
    current = [again]

    def read() -> None:
        while not stop.is_set():
            asked = current[0]
            got = reader.namespace_name(asked)
            if got is not None and got != expected[asked]:
                faults.append((asked, got))

    expected = {again: "second, longer"}
    thread = threading.Thread(target=read)
    thread.start()
    try:
        for turn in range(GENERATIONS - 2 - (again >> 8)):
            assert swept(store) == 1
            name = ("ab"[turn % 2]) * (5 + turn % 60)
            following = again + NAMESPACES * (turn + 1)
            expected[following] = name
            assert spaces.number(name) == following
            current[0] = following
    finally:
        stop.set()
        thread.join()
    assert not faults


def test_the_sweeper_runs_when_lines_are_rare_and_in_turns(store: Store) -> None:
    now = [0.0]
    turns: list[Any] = []
    sweeper = Sweeper(
        store.ledger.namespaces, store.table, list, lambda: now[0], lambda _s, call: turns.append(call), 0.0
    )

    def run() -> int:
        count = 0
        while turns:
            turns.pop()()
            count += 1
        return count

    sweeper.maintain()
    assert not turns, "there are free lines"
    for number in range(NAMESPACES - FREE_LINES_MIN + 1):
        store.ledger.namespaces.number(f"n{number}")
    sweeper.maintain(), sweeper.maintain()
    assert len(turns) == 1 and run() == SLOTS >> 15, "a block in each turn, if the turn has no time for two"
    assert sweeper.freed == NAMESPACES - FREE_LINES_MIN + 1
    for number in range(NAMESPACES):
        store.ledger.namespaces.number(f"m{number}")
    sweeper.maintain()
    assert not turns, "not twice within a second"
    now[0] = 2.0
    sweeper.maintain()
    assert run() and not store.ledger.namespaces.names


@pytest.mark.parametrize("session", [False, True])
def test_issue_a_namespace_that_gets_an_epoch_during_a_sweep_stays(session: bool) -> None:
    """Its line was freed, and its tag was left: the worker ended when it next named the epochs."""
    table = NamespaceTable(memoryview(bytearray(NAMESPACES * NAMESPACE_LINE_BYTES)))
    number, unused = table.number("x"), table.number("unused")
    table.begin_sweep([number] if session else [])
    assert table.take_epochs({"x": 5}) == {number}
    assert table.end_sweep() == 1 and [*table.names] == [number] and unused not in table.names
    assert table.epochs() == {"x": 5} and table.wrapping({"x": 6}) == []
    assert table.wrapping({"x": 5 + (1 << 32)}) == [number]


def test_a_freed_line_leaves_no_epoch_behind() -> None:
    """Whatever frees it: the next lease would be stored in the line, which another namespace may have by then."""
    table = NamespaceTable(memoryview(bytearray(NAMESPACES * NAMESPACE_LINE_BYTES)))
    number = table.number("x")
    table.take_epochs({"x": 5})
    table._free_line(number)
    assert table.tags == {} and table.epochs() == {}


def test_issue_the_default_namespace_keeps_its_values_when_others_advance() -> None:
    """A line was freed once, so there may have been too few. Values of names without one went to the default one."""
    memory = memoryview(bytearray(NAMESPACES * NAMESPACE_LINE_BYTES))
    table = NamespaceTable(memory)
    assert table.keep([]) == []
    default, mine, freed = (table.number(name) for name in (DEFAULT_NAMESPACE, "mine", "freed"))
    table.begin_sweep([default, mine])
    assert table.end_sweep() == 1 and freed not in table.names
    for _ in range(2):  # a worker's death changes nothing
        table = NamespaceTable(memory)
        assert table.recover() == [] and table.keep([]) == []
        others = table.number(OTHERS_NAMESPACE)
    assert table.take_epochs({"mine": 5}) == {mine, others}
    assert table.take_epochs({"mine": 6}) == set() and table.epochs() == {"mine": 6}


def test_issue_names_without_a_place_have_one_where_places_were_freed() -> None:
    """They had none in an arena that had used a line twice: what came for them was refused, with 255 lines free."""
    memory = memoryview(bytearray(NAMESPACES * NAMESPACE_LINE_BYTES))
    table = NamespaceTable(memory)
    table._free_line(table.number("freed"))
    table = NamespaceTable(memory)
    assert table.recover() == [] and table.number(OTHERS_NAMESPACE) in table.names


def test_issue_an_epoch_of_names_without_a_place_is_never() -> None:
    """A manager of another build may let clients advance them. The line had that epoch, and digests may end with it."""
    table = NamespaceTable(memoryview(bytearray(NAMESPACES * NAMESPACE_LINE_BYTES)))
    assert table.keep([]) == []
    mine, others = table.number("mine"), table.number(OTHERS_NAMESPACE)
    assert table.take_epochs({OTHERS_NAMESPACE: 5}) == set() and not table.tags, "no namespace has advanced"
    assert table.take_epochs({OTHERS_NAMESPACE: 6, "mine": 6}) == {mine, others}
    assert table.tags == {mine: tag_of(6), others: tag_of(NEVER)} and table.epochs() == {"mine": 6}

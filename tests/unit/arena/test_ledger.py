"""The ledger against dictionaries, over deaths; and its refusals."""

from __future__ import annotations

import mmap
import random

import pytest

from simm.arena.layout import HOLD_LINE_BYTES, NAMESPACE_LINE_BYTES, NAMESPACES, UNDO_BYTES, Geometry
from simm.arena.ledger import GRANT, PIN, HoldLine, Ledger, SessionLine
from simm.constants import NAMESPACE_BYTES_MAX
from simm.errors import CapacityError, CorruptionError
from tests.support.consistency import check

GEOMETRY = Geometry.plan(8 << 20, 64)


@pytest.fixture
def memory() -> mmap.mmap:
    return mmap.mmap(-1, GEOMETRY.data_offset)


def recovered(memory: mmap.mmap) -> Ledger:
    ledger = Ledger(memory, GEOMETRY)
    ledger.recover()
    check(ledger)
    return ledger


@pytest.mark.parametrize("seed", range(4))
def test_agrees_with_dictionaries_over_deaths(memory: mmap.mmap, seed: int) -> None:
    rng = random.Random(seed)
    ledger = Ledger(memory, GEOMETRY)
    sessions: dict[int, SessionLine] = {}
    holds: dict[int, HoldLine] = {}
    names: list[str] = []
    for number in range(1, 3001):
        what = rng.random()
        if what < 0.1:
            fields = SessionLine(number, rng.randrange(1 << 22), rng.getrandbits(64), rng.randrange(256))
            try:
                line = ledger.add_session(*fields)
            except CapacityError:
                assert len(sessions) == GEOMETRY.session_lines
            else:
                assert line not in sessions
                sessions[line] = fields
        elif what < 0.15 and sessions:
            line = rng.choice(list(sessions))
            ledger.end_session(line)
            del sessions[line]
        elif what < 0.65:
            hold = HoldLine(
                rng.getrandbits(63) | 1, number, rng.getrandbits(64), rng.getrandbits(32), rng.choice((GRANT, PIN))
            )
            line = ledger.add_hold(*hold)
            if line < 0:
                assert len(holds) == GEOMETRY.hold_lines and not ledger.free_holds
            else:
                assert line not in holds
                holds[line] = hold
        elif what < 0.95 and holds:
            line = rng.choice(list(holds))
            ledger.end_hold(line)
            del holds[line]
        elif what < 0.96 and len(names) < NAMESPACES:
            name = f"{number}é" * rng.randint(1, 4)
            assert ledger.namespaces.number(name) == len(names) == ledger.namespaces.number(name)
            names.append(name)
        elif what < 0.965:
            ledger = recovered(memory)
        assert ledger.free_holds == GEOMETRY.hold_lines - len(holds)
    for each in (ledger, recovered(memory)):
        check(each)
        assert dict(each.sessions()) == sessions
        assert dict(each.holds()) == holds
        assert list(each.namespaces.names.values()) == names


def test_the_longest_name_fits(memory: mmap.mmap) -> None:
    name = "é" * (NAMESPACE_BYTES_MAX // 2)
    Ledger(memory, GEOMETRY).namespaces.number(name)
    assert recovered(memory).namespaces.names == {0: name}


def test_all_lines_are_used_and_come_back(memory: mmap.mmap) -> None:
    ledger = Ledger(memory, GEOMETRY)
    lines = [ledger.add_hold(number + 1, 1, 0, 64, PIN) for number in range(GEOMETRY.hold_lines)]
    assert sorted(lines) == list(range(GEOMETRY.hold_lines))
    assert ledger.add_hold(1, 1, 0, 64, PIN) == -1
    for line in lines:
        ledger.end_hold(line)
    check(ledger)
    assert ledger.free_holds == GEOMETRY.hold_lines and not list(ledger.holds())


def test_check_sees_lines_that_nobody_counts(memory: mmap.mmap) -> None:
    ledger = Ledger(memory, GEOMETRY)
    line = ledger.add_hold(5, 1, 0, 64, GRANT)
    holds = GEOMETRY.ledger_offset + UNDO_BYTES + NAMESPACES * NAMESPACE_LINE_BYTES + GEOMETRY.session_lines * 64
    word = holds + line * HOLD_LINE_BYTES
    memory[word : word + 8] = bytes(8)
    with pytest.raises(CorruptionError):
        check(ledger)
    ledger = Ledger(memory, GEOMETRY)
    sessions = GEOMETRY.ledger_offset + UNDO_BYTES + NAMESPACES * NAMESPACE_LINE_BYTES
    memory[sessions : sessions + 8] = b"12345678"
    with pytest.raises(CorruptionError):
        check(ledger)


def test_a_name_of_impossible_length_is_given_up(memory: mmap.mmap) -> None:
    Ledger(memory, GEOMETRY).namespaces.number("a")
    names = GEOMETRY.ledger_offset + UNDO_BYTES
    memory[names] = 200
    ledger = Ledger(memory, GEOMETRY)
    assert ledger.recover() == ["the name of namespace 0 is damaged: given up"]
    assert ledger.namespaces.names == {0: ""} and ledger.namespaces.number("a") == 1
    ledger.release()

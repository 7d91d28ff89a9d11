"""Fixtures: a segment for the stores of a file, and a store that owns all shards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from simm.arena.layout import Geometry
from simm.arena.store import Store
from simm.ipc.arena_files import OwnedArena
from tests.support.consistency import check
from tests.support.shards import set_shards
from tests.support.store_world import ALL_SHARDS, new_segment, owned, remove_segment

MIB = 1 << 20


@pytest.fixture(scope="module")
def segment(request: pytest.FixtureRequest) -> Iterator[OwnedArena]:
    """8 MiB for all tests of a file, or its ``SEGMENT_BYTES``."""
    made = new_segment(getattr(request.module, "SEGMENT_BYTES", 8 * MIB))
    yield made
    remove_segment(made)


@pytest.fixture(scope="module")
def segments() -> Iterator[list[OwnedArena]]:
    """Three of them, for the workers of moves."""
    made = [new_segment(8 * MIB) for _ in range(3)]
    yield made
    for segment in made:
        remove_segment(segment)


@pytest.fixture
def store(segment: OwnedArena) -> Iterator[Store]:
    """A new one in the file's segment. At the end its structures are checked against each other."""
    tables = Geometry.plan(segment.size).data_offset
    segment.mm[:tables] = bytes(tables)
    made = Store.create(segment.mm)
    set_shards(made, 1, *owned(ALL_SHARDS, 1))
    made.open()
    yield made
    check(made)
    made.release()

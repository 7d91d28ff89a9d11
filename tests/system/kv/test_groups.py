"""Groups by ``simm.kv`` on a real server: codes, views, asyncio."""

from __future__ import annotations

import asyncio

import pytest

from simm.errors import Code
from simm.kv import Block, Store
from tests.support.kv_values import content, filled

GROUPS = [[f"page{{{number}}}/k", f"page{{{number}}}/v"] for number in range(4)]


@pytest.mark.quick
def test_groups_are_stored_and_leave_as_a_whole(store: Store) -> None:
    assert store.put_group(GROUPS[0], [filled(b"keys"), filled(b"values")]) == 0
    assert store.mput_groups(GROUPS[1:3], [[filled(b"k"), filled(b"v")]] * 2) == [0, 0]
    assert store.mexists_groups(GROUPS) == [True, True, True, False] and store.exists_group(GROUPS[1])
    view = Block(6).view()
    assert store.get(GROUPS[0][1], view) == 6 and content(view) == b"values"
    assert store.delete(GROUPS[0][0]) == 0
    assert store.exists(GROUPS[0][1]) is False and store.mexists_groups(GROUPS[:2]) == [False, True]


def test_a_mistake_is_its_own_groups(store: Store) -> None:
    good = [filled(b"k"), filled(b"v")]
    bad = Block(4).view()
    bad._piece = None
    groups = [GROUPS[0], ["a", "b"], GROUPS[0], ["", "{x}"], GROUPS[1], GROUPS[2], GROUPS[3]]
    views = [good, good, good, good, good[:1], [good[0], bad], good]
    wrong = int(Code.INVALID_ARGUMENT)
    assert store.mput_groups(groups, views) == [0, wrong, wrong, wrong, wrong, wrong, 0]
    assert store.rejected == 5
    assert store.mput_groups(GROUPS, [good]) == [wrong] * 4
    assert store.mexists_groups([GROUPS[0], [], [""], GROUPS[3]]) == [True, False, False, True]
    assert store.mput_groups([], []) == [] and store.mexists_groups([]) == []


def test_groups_have_asyncio_forms(store: Store) -> None:
    async def calls() -> None:
        assert await store.put_group_async(GROUPS[0], [filled(b"k"), filled(b"v")]) == 0
        assert await store.mput_groups_async(GROUPS[1:2], [[filled(b"k"), filled(b"v")]]) == [0]
        assert await store.exists_group_async(GROUPS[0]) is True
        assert await store.mexists_groups_async(GROUPS) == [True, True, False, False]

    asyncio.run(calls())


def test_a_closed_store_says_so() -> None:
    store = Store()
    store.close()
    assert store.put_group(GROUPS[0], [filled(b"k"), filled(b"v")]) == Code.INVALID_ARGUMENT
    assert store.mexists_groups(GROUPS) == [False] * 4

"""What a client promises about groups of keys."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from simm.constants import GROUP_KEYS_MAX
from simm.errors import UsageError
from simm.testing import FakeClient
from simm.wire.messages import Status
from tests.support.conformance.world import World, apart, breaks, promise


def pair(name: object) -> list[str]:
    return [f"page{{{name}}}/k", f"page{{{name}}}/v"]


@promise
def a_group_is_stored_and_leaves_as_a_whole(world: World) -> None:
    client, other = world.client(), world.client()
    assert client.put_group(pair(1), [b"keys", b"values"]) is True
    five = [f"m{{3}}{number}" for number in range(5)]
    assert client.put_groups([pair(2), ["single"], five], [[b"k", b"v"], [b"s"], [b"5"] * 5]) == [True] * 3
    assert other.get_many(pair(1)) == [b"keys", b"values"]
    groups = [pair(1), pair(2), ["single"], pair("absent"), ["single", "absent"]]
    assert other.exists_groups(groups) == [True, True, True, False, False]
    assert other.delete(pair(1)[0]) is True
    assert client.get_many(pair(1)) == [None, None], "the other one is of no use"
    assert client.exists_groups(groups[:2]) == [False, True]
    assert client.delete(five[4]) and client.exists_many(five) == [False] * 5
    assert client.delete("single") is True


@promise
def an_overwrite_leaves_a_group_as_it_is(world: World) -> None:
    client = world.client()
    assert client.put_group(pair(1), [b"keys", b"values"])
    assert client.put(pair(1)[0], b"new keys") and client.put_group(pair(2), [b"k", b"v"])
    assert client.put_group(pair(2), [b"k2", b"v2"]) and client.get_many(pair(2)) == [b"k2", b"v2"]
    assert client.get_many(pair(1)) == [b"new keys", b"values"]
    assert client.delete(pair(1)[1]) and client.get(pair(1)[0]) is None
    assert client.put(pair(1)[0], b"alone") and client.put(pair(1)[1], b"alone")
    assert client.delete(pair(1)[1]) and client.get(pair(1)[0]) == b"alone", "put one by one, they are no group"


@promise
def many_groups_come_in_one_call(world: World) -> None:
    client = world.client()
    groups = [[f"{{{name}}}{number}" for number in range(1 + name % 40)] for name in range(120)]
    assert client.put_groups(groups, [[b"value"] * len(keys) for keys in groups]) == [True] * len(groups)
    assert client.exists_groups(groups) == [True] * len(groups)
    assert client.delete_many([keys[-1] for keys in groups]) == [True] * len(groups)
    assert client.exists_many([key for keys in groups for key in keys]) == [False] * sum(map(len, groups))


@promise
def mistakes_with_groups_come_first(world: World) -> None:
    client = world.client()
    many = [f"{{x}}{number}" for number in range(GROUP_KEYS_MAX + 1)]
    calls: list[tuple[Sequence[str], Sequence[Any], str]] = [
        (["a/k", "a/v"], [b"k", b"v"], "hash tag"), (["{a}k", "{b}v"], [b"k", b"v"], "hash tag"),
        (["{a}k", "v"], [b"k", b"v"], "hash tag"), (["{}k", "{}v"], [b"k", b"v"], "hash tag"),
        (many, [b"m"] * len(many), "64"), (["{a}k", "{a}k"], [b"k", b"k"], "twice"), ([], [], "1 to 64"),
        (pair(1), [b"k"], "2 keys of a group and 1 values"), (pair(1), [b"k", b""], "1 to 68719476736"),
        (pair(1), [b"k", 7], "bytes-like"), ("ab", [b"k", b"v"], "list of keys"), (["", "{a}"], [b"k", b"v"], "1 byte"),
    ]  # fmt: skip
    for keys, values, text in calls:
        with pytest.raises(UsageError, match=text):
            client.put_groups([pair("good"), keys], [[b"k", b"v"], values])
    with pytest.raises(UsageError, match="two groups"):
        client.put_groups([pair(1), pair(1)], [[b"k", b"v"]] * 2)
    with pytest.raises(UsageError, match="2 groups and 1 list"):
        client.put_groups([pair(1), pair(2)], [[b"k", b"v"]])
    with pytest.raises(UsageError, match="1 key"):
        client.exists_groups([pair(1), []])
    assert not any(client.exists_many([*pair("good"), *pair(1), *many])), "nothing is stored by a wrong call"
    assert client.put_group(many[:-1], [b"m"] * GROUP_KEYS_MAX) is True
    assert client.put_groups([], []) == [] and client.exists_groups([]) == []
    two = world.client(replicas=2)
    with pytest.raises(UsageError, match="replicas=1"):
        two.put_group(pair(1), [b"k", b"v"])


@promise
def groups_have_asyncio_forms(world: World) -> None:
    client = world.client()

    async def calls() -> None:
        assert await client.put_group_async(pair(1), [b"k", b"v"]) is True
        assert await client.put_groups_async([pair(2)], [[b"k", b"v"]]) == [True]
        assert await client.exists_groups_async([pair(1), pair(2), pair(3)]) == [True, True, False]

    asyncio.run(calls())


@promise
def a_group_that_cannot_be_marked_is_deleted(world: World) -> None:
    """As if one of its values had been evicted before the worker was told of the group."""
    client = world.client()
    mark = client._puts.group

    def too_late(groups: Sequence[Sequence[bytes]]) -> list[int]:
        client._puts.delete([groups[0][1]])
        return mark(groups)

    client._puts.group = too_late  # type: ignore[method-assign]
    assert client.put_groups([pair(1), pair(2)], [[b"k", b"v"]] * 2) == [False, True]
    assert client.exists_many([*pair(1), *pair(2)]) == [False, False, True, True]


@apart
def a_full_arena_has_no_part_of_a_group(world: World) -> None:
    """Pairs of two sizes, three times what fits; of some of them one value is read now and then."""
    client = world.client()
    groups = [pair(number) for number in range(700)]
    keys, values = b"k" * 200_000, b"v" * 70_000
    for number, group in enumerate(groups):
        assert client.put_group(group, [keys, values]), client.stats()["last_put_failure"]
        client.get(groups[number * 7 % (number + 1)][number % 2])
    there = client.exists_many([key for group in groups for key in group])
    assert there[::2] == there[1::2] == client.exists_groups(groups)
    assert 100 < sum(there[::2]) < 300, "most were evicted"


@breaks(a_group_is_stored_and_leaves_as_a_whole)
class ForgetsGroups(FakeClient):
    """Leaves the other members of a group."""

    def delete_digests(self, digests: Sequence[bytes]) -> list[int]:
        self.store._groups.clear()
        return super().delete_digests(digests)


@breaks(a_group_that_cannot_be_marked_is_deleted)
class LeavesParts(FakeClient):
    """Leaves what was stored of a group that failed."""

    def delete_digests(self, digests: Sequence[bytes]) -> list[int]:
        return [Status.NOT_FOUND] * len(digests)


@breaks(an_overwrite_leaves_a_group_as_it_is)
class DissolvesGroups(FakeClient):
    """Takes a put of a member for the end of its group."""

    def put(self, key: str, value: Any, *, ttl: float | None = None, keep: str | None = None) -> bool:
        self.store._groups.clear()
        return super().put(key, value, ttl=ttl, keep=keep)


@breaks(many_groups_come_in_one_call)
class StoresSomeGroups(FakeClient):
    """Stores the first groups of a call."""

    def put_groups(self, groups: Sequence[Sequence[str]], values: Sequence[Sequence[Any]]) -> list[bool]:
        return super().put_groups(groups[:100], values[:100]) + [True] * len(groups[100:])


@breaks(mistakes_with_groups_come_first)
class ChecksNoGroups(FakeClient):
    """Stores the values of a group as those of any keys."""

    def put_groups(self, groups: Sequence[Sequence[str]], values: Sequence[Sequence[Any]]) -> list[bool]:
        return [all(self.put_many(*each)) for each in zip(groups, values)]


@breaks(groups_have_asyncio_forms)
class AsyncGroupsSayNothing(FakeClient):
    async def put_group_async(self, keys: Sequence[str], values: Sequence[Any]) -> bool:
        await super().put_group_async(keys, values)
        return None  # type: ignore[return-value]


@breaks(a_full_arena_has_no_part_of_a_group)
class EvictsMembers(ChecksNoGroups):
    """Evicts one member of a group, and leaves the others."""

    def put_group(self, keys: Sequence[str], values: Sequence[Any]) -> bool:
        return all(self.put_many(keys, values))

"""What a client promises about near copies: they change no answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from simm.errors import UsageError
from simm.testing import FakeClient
from tests.support.conformance.world import World, breaks, promise


@promise
def prefetch_changes_no_answer(world: World) -> None:
    client, other = world.client(near_copies=True), world.client()
    keys = [f"page {number}" for number in range(8)]
    assert client.put_many(keys, [key.encode() for key in keys]) == [True] * 8
    assert client.prefetch([*keys, "not stored"]) == 0, "one host: there is nowhere to copy from"
    assert asyncio.run(client.prefetch_async(keys)) == 0 and client.prefetch([]) == 0
    for _ in range(4):
        assert client.get_many([*keys, "not stored"]) == [*(key.encode() for key in keys), None]
        assert client.exists_many([*keys, "not stored"]) == [True] * 8 + [False]
    assert client.delete(keys[0]) and client.get(keys[0]) is None and other.get(keys[0]) is None
    assert client.delete_many(keys) == [False] + [True] * 7 and client.get_many(keys) == [None] * 8
    assert client.stats()["near_hits"] == client.stats()["near_copies"] == 0
    with pytest.raises(UsageError):
        world.client(near_copies=True, replicas=2)


@breaks(prefetch_changes_no_answer)
class SaysThatAllWait(FakeClient):
    def prefetch_digests(self, digests: Sequence[bytes]) -> list[int]:
        return [1] * len(digests)


@promise
def prefetch_needs_the_option(world: World) -> None:
    client, near = world.client(), world.client(near_copies=True)
    with pytest.raises(UsageError, match="near_copies=True"):
        client.prefetch(["a"])
    with pytest.raises(UsageError):
        near.prefetch(["a", ""])
    near.close()
    with pytest.raises(UsageError, match="closed"):
        near.prefetch(["a"])


@breaks(prefetch_needs_the_option)
class TakesItFromAll(FakeClient):
    def prefetch_digests(self, digests: Sequence[bytes]) -> list[int]:
        self._routes.restart()
        return [0] * len(digests)

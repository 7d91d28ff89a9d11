"""What a client promises about kept values: those that it says are kept stay, as long as it says."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from simm.constants import KEEP_PARTS, KEEP_S_MAX
from simm.errors import UsageError
from simm.testing import FakeClient
from simm.wire.status import Status
from tests.support.client_values import pattern
from tests.support.conformance.world import World, apart, breaks, promise
from tests.support.small_limits import small_limits

MIB = 1 << 20


@promise
def keeping_is_answered_for_each_key(world: World) -> None:
    client = world.client()
    assert client.put_many(["a", "b"], [b"1", b"22"]) == [True] * 2
    assert client.keep(["a", "no", "b", "a"], ttl=0.5, how="hard") == [True, False, True, True]
    assert client.keep(["b"], 60) == [True] and client.unkeep(["a", "no"]) == [True, False]
    assert client.put("c", b"3", ttl=10, keep="hard") and client.put("c", b"33", ttl=10)
    assert client.put_many(["d", "e"], [b"4", b"5"], ttl=KEEP_S_MAX, keep="soft") == [True] * 2
    assert asyncio.run(client.keep_async(["a", "no"], 5)) == [True, False]
    assert asyncio.run(client.unkeep_async(["a"])) == [True]
    assert client.get("c") == b"33" and client.delete("d") and client.keep(["d"], 5) == [False]
    assert world.client(namespace="elsewhere").keep(["a"], 5) == [False]
    twice = world.client(namespace="twice", replicas=2)
    assert twice.put("a", b"1", ttl=5, keep="hard") and twice.keep(["a", "no"], 5) == [True, False]


@breaks(keeping_is_answered_for_each_key)
class KeepsWhatIsNotThere(FakeClient):
    def keep_digests(self, digests: Sequence[bytes], how: int, seconds: int) -> list[int]:
        return [Status.OK] * len(digests)


@promise
def mistakes_about_keeping_come_first(world: World) -> None:
    client = world.client()
    assert client.put("a", b"1")
    for ttl in (0, -1, 0.0, math.nan, math.inf, KEEP_S_MAX + 1, "5", None, True, 1 << 80):
        with pytest.raises(UsageError):
            client.keep(["a"], ttl)  # type: ignore[arg-type]
    for how in ("Hard", "", None, 1, []):
        with pytest.raises(UsageError):
            client.keep(["a"], 5, how)  # type: ignore[arg-type]
    wrong: list[dict[str, Any]] = [{"keep": "hard"}, {"ttl": 0}, {"ttl": 5, "keep": "for ever"}, {"ttl": math.nan}]
    for arguments in wrong:
        with pytest.raises(UsageError):
            client.put("b", b"1", **arguments)
    assert client.get("b") is None, "nothing was sent"


@breaks(mistakes_about_keeping_come_first)
class TakesAnyTime(FakeClient):
    def keep(self, keys: Sequence[str], ttl: float, how: str = "soft") -> list[bool]:
        return [True] * len(keys)


@apart
def a_kept_fifth_survives_a_scan_of_ten_times_the_arena(world: World) -> None:
    client = world.client()
    value = np.ones(MIB, np.uint8)
    hard, soft = [f"hard {number}" for number in range(6)], [f"soft {number}" for number in range(6)]
    assert client.put_many(hard, [value] * 6, ttl=600, keep="hard") == [True] * 6
    assert client.put_many(soft, [value] * 6, ttl=600, keep="soft") == [True] * 6
    assert client.put("plain", value)
    for number in range(80):
        keys = [f"scan {number} {each}" for each in range(8)]
        assert client.put_many(keys, [value] * 8) == [True] * 8
    assert client.exists_many(hard + soft) == [True] * 12 and not client.exists("plain")
    more = [f"more {number}" for number in range(30)]
    stored = client.put_many(more, [value] * 30, ttl=600, keep="hard")
    assert 0 < stored.count(True) <= 16 and "kept" in client.stats()["last_put_failure"]
    assert client.exists_many(more) == [True] * 30, "what is not kept is stored all the same"
    assert client.unkeep(hard) == [True] * 6
    for number in range(16):
        client.put_many([f"again {number} {each}" for each in range(8)], [value] * 8)
    assert not any(client.exists_many(hard)) and all(client.exists_many(soft))


@breaks(a_kept_fifth_survives_a_scan_of_ten_times_the_arena)
class OnlySaysSo(FakeClient):
    def keep_digests(self, digests: Sequence[bytes], how: int, seconds: int) -> list[int]:
        return [Status.OK if self.exists_digest(digest) else Status.NOT_FOUND for digest in digests]


@promise
def of_a_value_in_parts_all_is_kept_or_nothing(world: World) -> None:
    client = world.client()
    with small_limits():
        assert client.put("k", pattern(2000), ttl=30, keep="hard") and client.get("k") == pattern(2000)
        assert client.put_many(["l", "s"], [pattern(3000), b"s"], ttl=30, keep="soft") == [True, True]
        assert client.keep(["k", "no", "l", "s"], 30, "hard") == [True, False, True, True]
        assert client.unkeep(["k", "no"]) == [True, False]
        assert asyncio.run(client.keep_async(["k"], 30)) == [True]
        assert client.put("k", pattern(2500, 2)) and client.get("k") == pattern(2500, 2), "a put may end it"
        manifest = client._large.manifest(client.digest("l"))
        assert manifest is not None and client._puts.delete(manifest.digests(client.digest("l"))[3:4]) == [Status.OK]
        assert client.keep(["l"], 30) == [False], "a part is missing"
        assert client.delete("k") and client.keep(["k"], 30) == [False]
        twice = world.client(namespace="parts twice", replicas=2)
        assert twice.put("k", pattern(2000), ttl=5, keep="hard") and twice.keep(["k", "no"], 5) == [True, False]


class KeepsTheManifest(FakeClient):
    def keep_digests(self, digests: Sequence[bytes], how: int, seconds: int) -> list[int]:
        return self._puts.keep(digests, how | KEEP_PARTS, seconds)


breaks(of_a_value_in_parts_all_is_kept_or_nothing)(KeepsTheManifest)


@apart
def values_in_parts_that_are_kept_survive_a_scan(world: World) -> None:
    client = world.client()
    value = pattern(6 * MIB + 1)
    with small_limits(MIB, MIB):
        assert client.put_many(["a", "b", "c"], [value] * 3) == [True] * 3
        assert client.keep(["a", "b"], 600, "hard") == [True, True]
        assert client.keep(["c"], 600, "hard") == [False], "more than a quarter of the memory"
        assert client.put("soft", value, ttl=600)
        assert client.put("d", value, ttl=600, keep="hard") is False and "kept" in client.stats()["last_put_failure"]
        assert client.get("d") == value, "it is stored all the same"
        assert client.put("small", bytes(2 * MIB), ttl=600, keep="hard"), "what was refused takes no room"
        for number in range(40):
            keys = [f"scan {number} {each}" for each in range(8)]
            assert client.put_many(keys, [np.ones(MIB, np.uint8)] * 8) == [True] * 8
        got = client.get_many(["a", "b", "soft", "c", "d"])
        assert got[:3] == [value] * 3 and got[3:] == [None, None]
        assert client.unkeep(["a", "b", "soft"]) == [True] * 3
        for number in range(40):
            client.put_many([f"again {number} {each}" for each in range(8)], [np.ones(MIB, np.uint8)] * 8)
        assert client.get_many(["a", "b", "soft"]) == [None] * 3


@breaks(values_in_parts_that_are_kept_survive_a_scan)
class KeepsNoPart(KeepsTheManifest):
    pass

"""What a client promises about puts of what is absent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from simm.client import source_of
from simm.testing import FakeClient
from simm.wire.messages import Status
from tests.support.conformance.world import World, breaks, promise


@promise
def a_stored_value_is_left_alone(world: World) -> None:
    """Of the same length: a caller says that keys are hashes of values, so nobody sees a difference but this test."""
    client = world.client()
    for count in (1, 5, 40):  # one key after the other, and by column
        keys = [f"{count}/{number}" for number in range(count)]
        assert all(client.put_many(keys, [b"first"] * count))
        assert client.put_many(keys, [b"other"] * count, if_absent=True) == [True] * count
        assert client.get_many(keys) == [b"first"] * count
        assert all(client.put_many(keys, [b"other"] * count)), "which is not the default"
        assert client.get_many(keys) == [b"other"] * count
    assert client.stats()["present"] == 46
    assert client.stats()["puts"] == 92


@promise
def what_is_absent_is_put(world: World) -> None:
    """Or of another length, on this host: a page of another model must not stay under the key."""
    client = world.client()
    other = b"another" if client.stats()["workers"][0]["path"] == "shm" else b"value"
    for count in (3, 60):
        keys = [f"{count}/{number}" for number in range(count)]
        assert all(client.put_many(keys[::3], [b"there"] * len(keys[::3])))
        if other != b"value":
            assert all(client.put_many(keys[1::3], [other] * len(keys[1::3])))
        before = client.stats()["present"]
        assert client.put_many(keys, [b"value"] * count, if_absent=True) == [True] * count
        assert client.get_many(keys) == [b"there" if number % 3 == 0 else b"value" for number in range(count)]
        assert client.stats()["present"] - before == count // 3
    assert client.put_many(["twice", "twice"], [b"1", b"2"], if_absent=True) == [True, True]
    assert client.get("twice") == b"2", "the later one, as ever"
    assert client.put_many([], [], if_absent=True) == []


@promise
def of_a_key_that_comes_twice_the_later_value_is_there(world: World) -> None:
    """Also if it was there already, and the earlier one was not."""
    client = world.client()
    for count in (1, 40):
        keys = [f"later {count}/{number}" for number in range(count)]
        assert all(client.put_many(keys, [b"four"] * count))
        values = [b"8 bytes!"] * count + [b"four"] * count
        assert client.put_many(keys * 2, values, if_absent=True) == [True] * (2 * count)
        assert client.get_many(keys) == [b"four"] * count


@breaks(of_a_key_that_comes_twice_the_later_value_is_there)
class PutsTheEarlierOver(FakeClient):
    def put_many(self, keys: Sequence[str], values: Sequence[Any], *, if_absent: bool | None = None) -> list[bool]:
        stored = [self.get(key) == value for key, value in zip(keys, values)]
        absent = [at for at, there in enumerate(stored) if not there]
        super().put_many([keys[at] for at in absent], [values[at] for at in absent])
        return [True] * len(keys)


@promise
def a_client_puts_only_what_is_absent_if_it_is_told_so(world: World) -> None:
    client = world.client(put_if_absent=True)
    assert client.put("k", b"first") and client.put("k", b"other")
    assert client.get("k") == b"first"
    assert client.put_digests([client.digest("k")], [source_of(b"other")]) == [Status.OK]
    assert client.put_gather("k", [b"ot", b"her"])
    assert client.get("k") == b"first"
    assert client.put_many(["k"], [b"other"], if_absent=False) == [True]
    assert client.get("k") == b"other"


@promise
def a_client_with_checksums_puts_always(world: World) -> None:
    """What is stored may be damaged, and a get then misses: the key could never be stored again."""
    client = world.client(put_if_absent=True, checksum=True)
    assert client.put("k", b"first") and client.put("k", b"other")
    assert client.get("k") == b"other"


@breaks(a_client_with_checksums_puts_always)
class TrustsWhatMayBeDamaged(FakeClient):
    def put_digests(
        self, digests: Sequence[bytes], sources: Sequence[Any], if_absent: bool | None = None
    ) -> list[int]:
        self._gets.checksum = False
        return super().put_digests(digests, sources, if_absent)


@breaks(a_stored_value_is_left_alone)
class PutsAlways(FakeClient):
    def put_many(self, keys: Sequence[str], values: Sequence[Any], *, if_absent: bool | None = None) -> list[bool]:
        return super().put_many(keys, values)


@breaks(what_is_absent_is_put)
class LooksAtNoLength(FakeClient):
    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._gets.holds_many = lambda digests, lengths: self._gets.stored_many(digests)  # type: ignore[method-assign]


@breaks(a_client_puts_only_what_is_absent_if_it_is_told_so)
class ForgetsItsOption(FakeClient):
    def put(self, key: str, value: Any) -> bool:
        return self.put_many([key], [value], if_absent=False)[0]

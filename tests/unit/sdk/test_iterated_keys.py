"""Keys with hash tags that a caller passes as an iterator: the same keys as in a list, for every call on many keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from simm.client import Client
from simm.sdk.ops.pins import Pins
from tests.support.fake_cluster import ALL, FakeCluster

KEYS = [f"page{{{number}}}/k" for number in range(3)]
VALUES = [b"a", b"bc", b"def"]


def lengths(pins: Pins) -> list[int | None]:
    with pins:
        return [*pins.lengths, *(pins.get_ranges(key, [(0, 1, bytearray(1))]) for key in KEYS)]


CALLS: dict[str, tuple[Callable[[Client, Any], Any], Any]] = {
    "exists": (lambda client, keys: client.exists_many(keys), [True] * 3),
    "get": (lambda client, keys: client.get_many(keys), VALUES),
    "pin": (lambda client, keys: lengths(client.pin(keys)), [1, 2, 3] * 2),
    "load_ms": (lambda client, keys: client.load_ms(keys) > 0, True),
    "keep": (lambda client, keys: client.keep(keys, 30.0), [True] * 3),
    "unkeep": (lambda client, keys: client.unkeep(keys), [True] * 3),
    "prefetch": (lambda client, keys: client.prefetch(keys), 0),
    "delete": (lambda client, keys: client.delete_many(keys), [True] * 3),
}


def test_an_iterator_of_keys_is_as_a_list() -> None:
    """Such a call missed all of them for good, deleted nothing, or raised IndexError."""
    ways: list[Callable[[], Iterable[str]]] = [lambda: KEYS, lambda: iter(KEYS), lambda: (key for key in KEYS)]
    with FakeCluster(1) as cluster:
        cluster.settled({0: ALL})
        client = cluster.client("shm", near_copies=True)
        for way in ways:
            assert client.put_many(KEYS, VALUES) == [True] * 3
            assert {name: call(client, way()) for name, (call, _) in CALLS.items()} == {
                name: wanted for name, (_, wanted) in CALLS.items()
            }
        assert client.exists_many(KEYS) == [False] * 3

"""Values that are read by TCP into new bytes: their sizes are asked for first, so that they come many at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from simm.client import Client
from simm.constants import VALUE_BYTES_MAX
from simm.ipc.steps import Steps
from simm.sdk.tcp import TcpPath
from tests.support.fake_cluster import ALL, FakeCluster

KEYS = [f"k{number}" for number in range(20)]
VALUES = [bytes([1 + number]) * (100 + number) for number in range(20)]


@pytest.fixture
def client() -> Iterator[Client]:
    with FakeCluster(1) as cluster:
        cluster.settled({0: ALL})
        made = cluster.client("tcp")
        assert made.put_many(KEYS, VALUES) == [True] * 20
        yield made


@pytest.fixture
def exchanges(client: Client, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The bytes that each FETCH of the test asks for at most, by key."""
    made: list[list[int]] = []
    fetch = TcpPath._fetch

    def counted(self: TcpPath, channel: Any, message: Any, kind: int, wants: Sequence[Any]) -> Steps[list[Any]]:
        made.append([want[1] for want in wants])
        return fetch(self, channel, message, kind, wants)

    monkeypatch.setattr(TcpPath, "_fetch", counted)
    return made


def test_many_values_are_two_exchanges(client: Client, exchanges: list[list[int]]) -> None:
    """They were one for each."""
    assert client.get_many(KEYS) == VALUES
    assert exchanges == [[0] * 20, [len(value) for value in VALUES]]


def test_many_misses_are_two_exchanges(client: Client, exchanges: list[list[int]]) -> None:
    before = client.stats()["misses"]
    assert client.get_many([f"never {number}" for number in range(20)]) == [None] * 20
    assert exchanges == [[0] * 20, [1] * 20] and client.stats()["misses"] - before == 20


def test_one_value_is_one_exchange(client: Client, exchanges: list[list[int]]) -> None:
    assert client.get_many(KEYS[:1]) == VALUES[:1] and client.get(KEYS[1]) == VALUES[1]
    assert exchanges == [[VALUE_BYTES_MAX]] * 2


def test_a_value_that_grows_meanwhile_is_read_all_the_same(
    client: Client, exchanges: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = TcpPath.sizes

    def then_put(self: TcpPath, *arguments: Any, **named: Any) -> Steps[list[int]]:
        found = yield from sizes(self, *arguments, **named)
        return [found[0] - 1, 0, *found[2:]]  # of the values before, and of a key that was not there

    monkeypatch.setattr(TcpPath, "sizes", then_put)
    assert client.get_many(KEYS) == VALUES
    assert exchanges[2:] == [[VALUE_BYTES_MAX]] * 2, "one after the other, for they may grow again"

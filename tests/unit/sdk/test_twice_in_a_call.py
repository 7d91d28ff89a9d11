"""A key that one call names twice while its shard moves: the new owner is asked for the same as an owner would be."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from simm.client import Client
from simm.sdk import writes
from tests.support.cluster_clients import WAIT_S, published
from tests.support.fake_cluster import ALL, FakeCluster
from tests.support.waiting import wait_until

PAGES = ["page{1f3a}/a", "page{1f3a}/b", "page{1f3a}/c", "page{1f3a}/d", "page{1f3a}/e"]
#: By the page.
SIZES = (100, 200, 300, 400, 500)


def _digests(client: Client, *numbers: int) -> list[bytes]:
    return [client.digest(PAGES[number]) for number in numbers]


def _delete(client: Client) -> list[int]:
    return client.delete_digests(_digests(client, 0, 1, 0))


def _delete_sized(client: Client) -> list[int]:
    # The size that it has comes first, then last, then in the middle.
    return client.delete_sized(_digests(client, 0, 0, 1, 1, 2, 2, 2), [100, 7, 7, 200, 7, 300, 8])


def _group(client: Client) -> list[int]:
    return client._puts.group([_digests(client, 0, 1, 2), _digests(client, 0, 3)])


def _keep(client: Client) -> list[int]:
    return client._puts.keep(_digests(client, 0, 1, 0), 2, 60)


def _put(client: Client) -> list[int]:
    values = [memoryview(letter * 600) for letter in (b"x", b"y", b"z")]
    return client._puts.put(_digests(client, 0, 1, 0), values)


ACTS: dict[str, Callable[[Client], list[int]]] = {
    "delete": _delete, "delete_sized": _delete_sized, "group": _group, "keep": _keep, "put": _put,
}  # fmt: skip


@pytest.fixture
def make_cluster() -> Iterator[Callable[[], FakeCluster]]:
    running: list[FakeCluster] = []

    def make() -> FakeCluster:
        running.append(FakeCluster(2))
        return running[-1]

    yield make
    for cluster in running:
        cluster.__exit__(None, None, None)


def _filled(cluster: FakeCluster, path: str) -> Client:
    client = cluster.client(path, deadline_s=WAIT_S)
    assert client.put_many(PAGES, [bytes(size) for size in SIZES]) == [True] * len(PAGES)
    return client


def _state(cluster: FakeCluster, path: str) -> Any:
    """What is stored now, and what goes with a page that is deleted, as it is of its group."""
    client = cluster.client(path, deadline_s=WAIT_S)
    states: list[Any] = [client.get_many(PAGES)]
    for page in PAGES[:2]:
        client.delete(page)
        states.append(client.exists_many(PAGES))
    return states


def _at_the_owner(cluster: FakeCluster, path: str, act: Callable[[Client], list[int]]) -> Any:
    cluster.settled({1: ALL})
    return act(_filled(cluster, path)), _state(cluster, path)


def _after_a_move(cluster: FakeCluster, path: str, act: Callable[[Client], list[int]]) -> Any:
    """Call with the map of before, in which the other server is the owner."""
    cluster.settled({0: ALL})
    client = cluster.client(path, deadline_s=WAIT_S)
    assert client.wait_ready(WAIT_S)
    before = cluster.map()
    cluster.own({1: ALL})
    cluster.instruct()
    cluster.manager.map = cluster.map()
    _filled(cluster, path)
    cluster.manager.map = before
    done: list[list[int]] = []
    thread = threading.Thread(target=lambda: done.append(act(client)))
    thread.start()
    wait_until(lambda: client.counters["redirects"] > 0 or done, "the call is refused")
    assert not done
    published(cluster, client)
    thread.join(WAIT_S)
    return done[0], _state(cluster, path)


@pytest.mark.usefixtures("nothing_retired")
@pytest.mark.parametrize("path", ["shm", "tcp"])
@pytest.mark.parametrize("name", ACTS)
def test_the_new_owner_is_asked_for_the_same(make_cluster: Callable[[], FakeCluster], path: str, name: str) -> None:
    want = _at_the_owner(make_cluster(), path, ACTS[name])
    assert _after_a_move(make_cluster(), path, ACTS[name]) == want


def test_the_comparison_sees_that_only_the_last_of_a_key_is_asked_for(
    make_cluster: Callable[[], FakeCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it was, whatever the mutation."""
    redirect = writes.Puts._redirect

    def as_values(self: Any, *arguments: Any, values: bool = False) -> None:
        redirect(self, *arguments, values=True)

    monkeypatch.setattr(writes.Puts, "_redirect", as_values)
    want = _at_the_owner(make_cluster(), "shm", _delete_sized)
    assert _after_a_move(make_cluster(), "shm", _delete_sized) != want

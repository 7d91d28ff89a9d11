"""A call that finds no idle connection to a server holds up no other server: a thread makes the connection."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from simm.arena.hashing import shard_of
from simm.client import Client
from simm.errors import DeadlineError
from simm.ipc.steps import finish
from simm.net.channel import Channel
from simm.sdk import path as path_module
from simm.sdk.tcp import POOL_MAX, TcpPath
from tests.support.cluster_clients import WAIT_S
from tests.support.fake_cluster import ALL, FakeCluster
from tests.support.waiting import wait_until

DEADLINE_S = 2.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(2) as made:
        made.settled({0: [*ALL][::2], 1: [*ALL][1::2]})
        yield made


def keys_of(client: Client) -> list[str]:
    """Return a key of each node that is stored."""
    keys: dict[int, str] = {}
    for number in range(64):
        keys.setdefault(shard_of(client.digest(f"k{number}")) % 2, f"k{number}")
    assert client.put_many([keys[0], keys[1]], [b"x" * 99] * 2) == [True] * 2
    return [keys[0], keys[1]]


def path_of(client: Client, key: str) -> TcpPath:
    target = client._routes.target(client.digest(key))
    assert target is not None and target.tcp is not None
    return target.tcp


def call(client: Client, what: str, keys: list[str]) -> list[int | None]:
    """Return the lengths of values."""
    if what == "pin":
        with client.pin(keys) as pins:
            return list(pins.lengths)
    if what == "put":
        return [99 if put else None for put in client.put_many(keys, [b"y" * 99] * len(keys))]
    return client.get_into_many(keys, [bytearray(99) for _ in keys])


@pytest.mark.parametrize("state", [{}, {"_open": POOL_MAX}, {"_further_at": math.inf}], ids=["few", "many", "failed"])
@pytest.mark.parametrize("what", ["pin", "get", "put"])
def test_a_server_that_takes_no_connection_costs_its_own_values_alone(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, what: str, state: dict[str, float]
) -> None:
    """As one whose stream is stopped: the kernel takes the connection, and nobody answers HELLO."""
    client = cluster.client("tcp", deadline_s=DEADLINE_S)
    assert client.wait_ready(WAIT_S)
    keys = keys_of(client)
    silent, makes = path_of(client, keys[0]), TcpPath._make

    def make(path: TcpPath, until: float) -> Channel:
        if path is not silent:
            return makes(path, until)
        threading.Event().wait(max(0.0, until - time.monotonic()))
        raise DeadlineError("nobody answers")

    with client.pin(keys) as held:
        assert held.lengths == [99, 99] and not silent._idle
        monkeypatch.setattr(TcpPath, "_make", make)
        for name, value in state.items():  # so many are lent, or none could be made a moment ago
            setattr(silent, name, value)
        assert call(client, what, keys) == [None, 99]
        wait_until(lambda: not silent.connecting, "the attempt is over")


def test_a_connection_in_the_place_of_one_that_was_closed_is_made_by_a_thread(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = cluster.client("tcp")
    assert client.wait_ready(WAIT_S)
    keys, makes = keys_of(client), TcpPath._make
    makers: list[str] = []

    def make(path: TcpPath, until: float) -> Channel:
        makers.append(threading.current_thread().name)
        return makes(path, until)

    monkeypatch.setattr(TcpPath, "_make", make)
    for each in path_of(client, keys[0])._idle:
        each.broken = "the server has closed it"
    assert call(client, "pin", keys) == [99, 99]
    assert set(makers) == {TcpPath.thread_name}


def test_a_call_that_wants_one_connection_leaves_a_large_batch_its_own(cluster: FakeCluster) -> None:
    client = cluster.client("tcp")
    assert client.wait_ready(WAIT_S)
    path = path_of(client, keys_of(client)[0])
    wait_until(lambda: not path.connecting, "no attempt is in progress")
    path.connecting = True
    path._make_further(5)
    path._make_further(2)
    with path._lock:
        idle, path._idle = path._idle, []
    work = path._one_idle(math.inf)
    next(work)
    work.close()
    assert path._wanted == 5
    path._idle, path.connecting = idle, False


# -- other work meanwhile -------------------------------------------------------------------------------------


@pytest.fixture
def waiting(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> tuple[SimpleNamespace, TcpPath]:
    """A path without an idle connection while an attempt goes on, and its clock."""
    client = cluster.client("tcp", deadline_s=DEADLINE_S)
    assert client.wait_ready(WAIT_S)
    path = path_of(client, keys_of(client)[0])
    wait_until(lambda: not path.connecting, "no attempt is in progress")
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(path_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    path.take(math.inf).close()
    path._further_at = math.inf
    path.connecting = True
    return clock, path


@pytest.mark.parametrize("held_up_s", [0.0, DEADLINE_S * 0.9, DEADLINE_S * 5])
@pytest.mark.parametrize("how", ["idle", "over"])
def test_what_holds_up_a_thread_after_it_has_a_connection_costs_the_exchange_nothing(
    waiting: tuple[SimpleNamespace, TcpPath], how: str, held_up_s: float
) -> None:
    """The server was taken for dead otherwise, and lost its path."""
    clock, path = waiting
    work = path.attempt_over(clock.now + DEADLINE_S)
    next(work)
    clock.now += 0.5
    if how == "idle":
        path._note_ready()
        path._idle.append(Closing())  # as give() does
    else:
        path.connecting = False
    clock.now += held_up_s
    with pytest.raises(StopIteration) as end:
        work.send(True)
    assert end.value.value == pytest.approx(clock.now + DEADLINE_S - 0.5)
    path.connecting = False


class Closing:
    """A connection that is only closed."""

    def close(self) -> None: ...


@pytest.mark.parametrize("what", ["exchange", "take_out"])
def test_an_exchange_lasts_as_long_as_the_wait_for_its_connection_says(
    waiting: tuple[SimpleNamespace, TcpPath], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    _, path = waiting
    taken: list[float] = []

    def over(_until: float) -> Any:
        return 1e9
        yield

    def take(until: float) -> Channel:
        taken.append(until)
        raise DeadlineError("only the time counts")

    monkeypatch.setattr(path, "attempt_over", over)
    monkeypatch.setattr(path, "take", take)
    work: Any = path.take_out(1.0) if what == "take_out" else path.exists([b"x" * 16], 1.0)
    with pytest.raises(DeadlineError):
        finish(work)
    assert taken == [1e9]
    path.connecting = False

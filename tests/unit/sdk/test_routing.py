"""Finding the owner of a key while owners change: redirects, previous owners, managers and servers that go and come."""

from __future__ import annotations

import ctypes
import gc
import logging
import random
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from simm.arena.hashing import shard_of
from simm.arena.reader import ArenaReader
from simm.client import Client
from simm.cluster import lookup
from simm.config.client_options import ClientOptions
from simm.constants import SHARD_COUNT
from simm.errors import TransportError
from simm.host.buffers import Copier
from simm.ipc import session as session_module
from simm.sdk import manager_link, routing
from simm.sdk.reads import Gets
from simm.sdk.routing import RetryPolicy, Router
from simm.sdk.worker_path import Target
from simm.wire.messages import Status
from tests.support.cluster_clients import KEYS, WAIT_S, full, published, value_of
from tests.support.dose import dose
from tests.support.fake_cluster import ALL, FakeCluster, FakeManager
from tests.support.waiting import wait_until

PATHS = ("shm", "tcp")


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    session_module.RETIRED.clear()
    with FakeCluster(2) as running:
        yield running
    session_module.RETIRED.clear()


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def seen(client: Client, key: str) -> set[bytes | None]:
    """Return the results of all forms of reading a key; one result if they agree."""
    found: set[bytes | None] = {client.get(key)}
    buffer = bytearray(2000)
    length = client.get_into(key, buffer)
    found.add(bytes(buffer[:length]) if length else None)
    many = [bytearray(2000) for _ in range(20)]
    for length, buffer in zip(client.get_into_many([key] * 20, many), many):
        found.add(bytes(buffer[:length]) if length else None)
    found.update(client.get_many([key] * 2))
    view = client.view(key)
    found.add(bytes(view) if view else None)
    if view:
        view.close()
    size = max([len(value) for value in found if value], default=2)
    half = size // 2
    halves = [[bytearray(half), bytearray(size - half)] for _ in range(20)]
    ranges = [[(half, size - half, second), (0, half, first)] for first, second in halves]
    lengths = [client.get_ranges(key, ranges[0]), *client.get_ranges_many([key] * 19, ranges[1:])]
    assert set(lengths) <= {size, None}
    found.update(bytes(a + b) if length else None for length, (a, b) in zip(lengths, halves))
    there = {client.exists(key), *client.exists_many([key, key]), *client.exists_many([key] * 20)}
    assert there == {value is not None for value in found}
    return found


# --- a move -----------------------------------------------------------------------------------


def test_before_the_new_owner_has_taken_over_values_are_read_at_the_previous_one(
    cluster: FakeCluster, path: str
) -> None:
    client = full(cluster, path)
    cluster.own({1: ALL}, previous=0)
    published(cluster, client)  # nobody but the client knows yet, so node 1 sends nobody anywhere
    assert seen(client, KEYS[0]) == {None}
    cluster.instruct(1)  # it does, and waits for its mover; node 0 has not heard of it
    assert seen(client, KEYS[1]) == {value_of(KEYS[1])}
    cluster.instruct(0)  # node 0 freezes
    assert seen(client, KEYS[2]) == {value_of(KEYS[2])}
    assert client.get_many(KEYS) == [value_of(key) for key in KEYS]
    assert client.exists_many([*KEYS, "never"]) == [True] * len(KEYS) + [False]
    assert client.counters["moved"] > 0
    assert client.stats()["outages"] == 0


def test_after_it_has_taken_over_what_it_lacks_is_read_there_and_what_it_has_is_not(
    cluster: FakeCluster, path: str
) -> None:
    client = full(cluster, path)
    cluster.own({1: ALL}, previous=0)
    cluster.instruct()
    cluster.nodes[1].adopt(cluster.epoch, ALL)
    published(cluster, client)
    assert client.put("k0", value_of("k0", 1))
    assert client.delete("k1")
    assert not client.delete("k1")
    assert client.put_many(["k2", "k3"], [value_of("k2", 1), value_of("k3", 1)]) == [True, True]
    assert client.delete_many(["k3", "k4"]) == [True, True]  # k4 was not copied yet, and shall not be
    wanted: dict[str, bytes | None] = {key: value_of(key) for key in KEYS}
    wanted |= {"k0": value_of("k0", 1), "k1": None, "k2": value_of("k2", 1), "k3": None, "k4": None}
    for key in KEYS[:8]:
        assert seen(client, key) == {wanted[key]}
    assert client.get_many(KEYS) == [wanted[key] for key in KEYS]
    buffers = [bytearray(1000) for _ in KEYS]
    got = client.get_into_many(KEYS, buffers)
    assert [bytes(buffer[:length]) if length else None for length, buffer in zip(got, buffers)] == [
        wanted[key] for key in KEYS
    ]
    assert client.exists_many(KEYS) == [wanted[key] is not None for key in KEYS]
    # The move ends: what was not copied is a miss, and nobody looks at node 0 any more.
    cluster.nodes[1].finish(cluster.epoch, ALL)
    moved = client.counters["moved"]
    assert client.get_many(["k0", "k1", "k5"]) == [value_of("k0", 1), None, None]
    assert client.counters["moved"] == moved


def test_a_checksum_is_looked_at_where_the_value_came_from(cluster: FakeCluster, path: str) -> None:
    client = full(cluster, path, checksum=True)
    cluster.own({1: ALL}, previous=0)
    cluster.instruct()
    published(cluster, client)
    assert client.get("k0") == value_of("k0")
    reader = ArenaReader(cluster.nodes[0].worker.segment.name)
    found = reader.locate(client.digest("k1"))
    assert found is not None
    reader.data[found.offset - reader.data_offset] ^= 1
    assert client.get("k1") is None
    assert client.get_into_many(["k1"] * 20, [bytearray(1000)] * 20) == [None] * 20
    assert client.counters["crc_errors"] == 21


@pytest.mark.parametrize("size", [70_000, 3 << 20])
def test_a_checksum_is_of_the_value_and_not_of_its_copy(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Others may overwrite the copy before the checksum is made: they got a right checksum for wrong bytes."""
    client = full(cluster, "shm", checksum=True)
    real = Copier.copy

    def copy(self: Copier, target: int, source: int, length: int, node: int = -1) -> None:
        real(self, target, source, length, node)
        ctypes.memset(target + length // 2, 0xEE, 1)

    keys = ["k0", "k1", "k2"]
    with monkeypatch.context() as patch:
        patch.setattr(Copier, "copy", copy)
        assert client.put("k0", bytes(size)) and client.put_many(keys[1:], [bytes(size)] * 2) == [True] * 2
    assert [client.get(key) for key in keys] == [None] * 3
    assert client.put("k0", bytes(size)) and client.get("k0") == bytes(size)


def test_a_value_whose_entry_has_lost_its_checksum_is_a_miss(cluster: FakeCluster, path: str) -> None:
    """A stray store into the flags: the value was taken for one that never had a checksum, whatever its bytes were."""
    client = full(cluster, path, checksum=True)
    store = cluster.nodes[0].worker.store

    def spoil(key: str, field: int, size: int) -> None:
        at = store.geometry.slots_offset + store.table.lookup(client.digest(key)) * 64 + field
        assert any(store._whole[at : at + size])
        store._whole[at : at + size] = bytes(size)

    spoil("k1", 46, 2)  # the flags
    spoil("k2", 32, 8)  # length and checksum: the checksum of no bytes is 0
    for key in ("k1", "k2"):
        assert client.get(key) is None and client.get_many([key] * 20) == [None] * 20
        assert client.get_into_many([key] * 20, [bytearray(1000)] * 20) == [None] * 20
    with full(cluster, path) as plain:
        wait_until(lambda: plain.put("k3", b"without a checksum"), "it is stored")
        assert client.get("k3") == b"without a checksum" == client.get_many(["k3"] * 20)[7]


@pytest.mark.parametrize("batch", [False, True])
def test_mutations_wait_for_the_new_owner_and_none_fails(cluster: FakeCluster, path: str, batch: bool) -> None:
    """Both owners know of the move and the mover is late: by milliseconds for writers, or for as long as it takes."""
    client = full(cluster, path)
    cluster.own({1: ALL}, previous=0)
    cluster.instruct()
    done: list[Any] = []

    def work() -> None:
        if batch:
            # The first one twice: what is tried again must not overtake what came later.
            keys = ["k0", *KEYS[:20]]
            done.append(client.put_many(keys, [value_of("k0", 8), *(value_of(key, 9) for key in KEYS[:20])]))
            done.append(client.delete_many(["k30", "k31"]))
        else:
            done.append([client.put("k0", value_of("k0", 9))])
            done.append([client.delete("k30")])

    thread = threading.Thread(target=work)
    thread.start()
    wait_until(lambda: client.counters["redirects"] > 0 or done, "the put is tried again")
    assert not done
    cluster.publish()
    cluster.nodes[1].adopt(cluster.epoch, ALL)
    thread.join(WAIT_S)
    assert done[0] == [True] * len(done[0])
    # Nobody can tell whether a key that was not copied existed; it must be gone.
    assert client.get("k0") == value_of("k0", 9)
    assert client.get("k30") is None
    assert client.get("k40") == value_of("k40")
    assert client.counters["put_failures"] == 0
    assert client.stats()["outages"] == 0
    counted = client.stats()["paths"][path]
    assert (counted["puts"], counted["put_failures"]) == (len(KEYS) + (20 if batch else 1), 0), "each one once"


@pytest.mark.parametrize("batch", [False, True])
def test_issue_a_delete_goes_on_to_the_new_owner(cluster: FakeCluster, path: str, batch: bool) -> None:
    """It said False at the first refusal and counted nothing, and the value was there for its readers."""
    client = full(cluster, path)
    cluster.own({1: ALL}, previous=0)
    cluster.instruct()
    done: list[list[bool]] = []
    keys = KEYS[:3] if batch else KEYS[:1]
    thread = threading.Thread(
        target=lambda: done.append(client.delete_many(keys) if batch else [client.delete(keys[0])])
    )
    thread.start()
    wait_until(lambda: client.counters["redirects"] > 0 or done, "the delete is tried again")
    assert not done
    cluster.publish()
    cluster.nodes[1].adopt(cluster.epoch, ALL)
    thread.join(WAIT_S)
    assert done == [[True] * len(keys)]
    assert client.get_many(KEYS) == [None if key in keys else value_of(key) for key in KEYS]
    assert client.stats()["outages"] == 0


def test_a_mutation_that_nobody_takes_fails_by_its_deadline(cluster: FakeCluster, path: str) -> None:
    full(cluster, path)
    clients = [cluster.client(path, deadline_s=deadline_s) for deadline_s in (0.3, 2.0, 6.0)]
    assert all(client.wait_ready(WAIT_S) for client in clients)
    cluster.own({1: ALL}, previous=0)
    cluster.instruct()  # and no mover ever comes
    for client in clients:
        published(cluster, client)
    assert any(map(mutations_fail_in_time, clients))


def mutations_fail_in_time(client: Client) -> bool:
    """Return False if something else has failed: on a busy machine an answer may come late, which is an outage."""
    began = time.monotonic()
    outages = []
    assert client.put("k0", b"v") is False
    assert client.put_many(["k0", "k1"], [b"v", b"v"]) == [False, False]
    assert sum(each["put_failures"] for each in client.stats()["paths"].values()) == 3
    outages.append(client.stats()["outages"])
    assert client.delete("k0") is False
    outages.append(client.stats()["outages"])
    assert client.delete_many(["k0", "k1"]) == [False, False]
    outages.append(client.stats()["outages"])
    assert time.monotonic() - began < WAIT_S
    got = client.get("k0")
    assert got in (None, value_of("k0"))
    return outages == [0, 1, 3] and client.counters["redirects"] > 3 and got is not None


def test_a_client_with_an_old_map_never_sees_a_superseded_value(cluster: FakeCluster, path: str) -> None:
    """The client keeps asking the previous owner, which is frozen and still has the old value."""
    client, late = full(cluster, path), cluster.client(path)
    late.get("k0")
    late._routes.router.subscription.close()  # type: ignore[union-attr]
    cluster.own({1: ALL}, previous=0)
    cluster.instruct()
    cluster.nodes[1].adopt(cluster.epoch, ALL)
    published(cluster, client)
    assert client.put("k0", value_of("k0", 1))
    assert client.delete("k1")
    assert late.get("k0") is None
    assert seen(late, "k0") == {None}
    assert seen(late, "k1") == {None}
    assert seen(client, "k0") == {value_of("k0", 1)}


def test_mutation_without_the_look_at_the_word_it_does(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ArenaReader, "confirm", ArenaReader.confirm_previous)
    with pytest.raises(AssertionError, match="k0/0"):
        test_a_client_with_an_old_map_never_sees_a_superseded_value(cluster, "shm")


def test_a_map_of_an_earlier_move_sends_nobody_to_its_previous_owner(cluster: FakeCluster) -> None:
    """An old map names an owner and a previous owner, and the owner's word belongs to a later move.

    By then the previous owner's values are superseded, although it may not know.
    """
    client = full(cluster, "shm")
    cluster.own({1: ALL}, previous=0)
    cluster.instruct()
    cluster.nodes[1].adopt(cluster.epoch, ALL)
    published(cluster, client)
    router = client._router
    assert router is not None
    assert client.get("k0") == value_of("k0")
    # Behind the client's back the shards left node 1 and came back, node 0 was not told of anything.
    router.subscription.close()
    first = cluster.map()
    cluster.own({0: ALL})
    cluster.instruct(1)
    cluster.own({1: ALL}, previous=0)
    cluster.instruct(1)
    cluster.nodes[1].adopt(cluster.epoch, ALL)
    assert router.epoch == first.epoch
    assert client.get("k0") is None
    assert client.get("k0") is None


def test_mutation_without_comparing_epochs_it_does(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "is_same_move", lambda *_, **__: True)
    with pytest.raises(AssertionError, match="k0/0"):
        test_a_map_of_an_earlier_move_sends_nobody_to_its_previous_owner(cluster)


def test_a_shard_frozen_by_a_newer_map_than_ours_is_a_miss(cluster: FakeCluster) -> None:
    client = full(cluster, "shm")
    cluster.own({1: ALL}, previous=0)
    cluster.instruct()
    cluster.nodes[1].adopt(cluster.epoch, ALL)
    published(cluster, client)
    client._router.subscription.close()  # type: ignore[union-attr]
    cluster.nodes[1].freeze(cluster.epoch + 5, ALL)
    assert seen(client, "k0") == {None}


def test_a_cut_off_client_does_not_follow_an_old_map_to_an_old_owner(cluster: FakeCluster, path: str) -> None:
    """Node 1 has nothing of the shard: it may not have taken it over yet, or have given it away since.

    Only a client that is connected to the manager may assume the former.
    """
    client = full(cluster, path)
    cluster.own({1: ALL}, previous=0)
    cluster.instruct()
    published(cluster, client)
    assert client.get("k0") == value_of("k0")
    cluster.manager.stop()
    wait_until(lambda: client.stats()["manager"] != "connected", "the client notices")
    assert client.get("k0") is None
    assert client.exists("k0") is False


def test_the_map_changes_between_the_miss_and_the_second_look(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One worker is both the owner in the old map and the previous owner in the new one."""
    client = full(cluster, "shm")
    other = cluster.client("shm")
    find = Gets._resolve

    def held(self: Gets, *arguments: Any, **named: Any) -> None:
        if self is client._gets and cluster.epoch == 11:
            cluster.own({1: ALL}, previous=0)
            cluster.instruct()
            cluster.nodes[1].adopt(cluster.epoch, ALL)
            cluster.publish()
            for each in (client, other):
                wait_until(lambda each=each: each.stats()["epoch"] == cluster.epoch, "the map is there")
            assert other.put("k0", value_of("k0", 1))
        find(self, *arguments, **named)

    monkeypatch.setattr(Gets, "_resolve", held)
    monkeypatch.setattr(
        ArenaReader, "locate", lambda self, digest: None if cluster.epoch == 11 else _locate(self, digest)
    )
    monkeypatch.setattr(
        ArenaReader, "shard_word", lambda self, digest: 0 if cluster.epoch == 11 else _word(self, digest)
    )
    assert client.get("k0") == value_of("k0", 1)


_locate = ArenaReader.locate
_word = ArenaReader.shard_word


@pytest.mark.parametrize("seed", dose(range(2), quick=1))
def test_moves_to_and_fro_under_load_never_show_an_older_value(cluster: FakeCluster, seed: int) -> None:
    """Each key has one writer, and readers by both paths. No reader sees an older value, and no put fails."""
    rng = random.Random(seed)
    writer, by_shm, by_tcp = full(cluster, "shm"), cluster.client("shm"), cluster.client("tcp")
    keys = KEYS[:6]
    done = dict.fromkeys(keys, 0)
    stop = threading.Event()
    wrong: list[str] = []
    hits = [0]

    def version(value: bytes | None) -> int | None:
        return None if value is None else int(value.split(b";")[0].split(b"/")[1])

    def read(client: Client) -> None:
        newest = dict.fromkeys(keys, 0)
        mine = random.Random(seed + 1)
        while not stop.is_set() and not wrong:
            key = mine.choice(keys)
            least = max(done[key], newest[key])
            got = version(client.get(key) if mine.random() < 0.7 else client.get_many([key])[0])
            if got is not None:
                hits[0] += 1
                if got < least:
                    wrong.append(f"{key}: version {got} after {least}")
                newest[key] = got

    def write() -> None:
        while not stop.is_set() and not wrong:
            key = rng.choice(keys)
            if not writer.put(key, value_of(key, done[key] + 1)):
                wrong.append(f"a put of {key} failed")
            done[key] += 1

    threads = [threading.Thread(target=read, args=(client,)) for client in (by_shm, by_tcp)]
    threads.append(threading.Thread(target=write))
    for thread in threads:
        thread.start()
    shards = sorted({shard_of(writer.digest(key)) for key in keys})
    try:
        for round_ in range(8):
            new = 1 - round_ % 2
            cluster.own({new: shards}, previous=1 - new)
            cluster.publish()
            order = [0, 1]
            rng.shuffle(order)
            cluster.instruct(*order)
            time.sleep(rng.random() * 0.01)
            cluster.nodes[1 - new].freeze(cluster.epoch, shards)
            cluster.nodes[new].adopt(cluster.epoch, shards)
            time.sleep(0.03)
            cluster.nodes[new].finish(cluster.epoch, shards)
            cluster.forget_previous()
            cluster.instruct()
            cluster.publish()
        wait_until(lambda: hits[0] or wrong, "something was read")
    finally:
        stop.set()
        for thread in threads:
            thread.join(WAIT_S)
    assert not wrong


# --- maps ---------------------------------------------------------------------------------------


def test_epochs_never_go_back_but_another_cluster_counts(cluster: FakeCluster) -> None:
    client = full(cluster, "shm")
    router = client._router
    assert router is not None
    old = cluster.map()
    cluster.own({1: ALL})
    published(cluster, client)
    newest = cluster.epoch
    cluster.manager.push(old)
    cluster.manager.push(old._replace(epoch=newest))  # the same again: no news
    cluster.own({1: ALL})
    published(cluster, client)  # pushes come in order: the old ones have been seen
    assert router.epoch == newest + 1
    assert {each.info.node for each in router.route if each is not None} == {"node1"}
    # Lost state, rebuilt from nothing: another id, and its epochs begin again.
    cluster.manager.publish(old._replace(epoch=1, cluster=8))
    wait_until(lambda: (router.cluster, router.epoch) == (8, 1), "the new cluster's map")
    assert {each.info.node for each in router.route if each is not None} == {"node0"}
    assert client.get("k0") is None, "the worker is of the first cluster still"


@pytest.mark.parametrize(
    "change",
    [{"owners": b"\0" * 100}, {"owners": b"\x05\0" * SHARD_COUNT}, {"previous": [(3, 9)]},
     {"previous": [(3, 1)], "since": b"no"}],
    ids=["short", "no such worker", "no such previous", "epochs"],
)  # fmt: skip
def test_a_map_that_contradicts_itself_is_not_taken_over(cluster: FakeCluster, change: dict[str, Any]) -> None:
    client = full(cluster, "shm")
    cluster.own({0: ALL})
    bad = cluster.map()._replace(**change)
    cluster.manager.push(bad)
    # The link is dropped for it; the next one brings a good map.
    cluster.own({1: ALL})
    cluster.manager.map = cluster.map()
    wait_until(lambda: client.stats()["epoch"] == cluster.epoch, "the good map")
    assert client._router.table.map.epoch == cluster.epoch  # type: ignore[union-attr]


def test_who_waits_for_a_map_is_woken_by_it(cluster: FakeCluster) -> None:
    client = full(cluster, "shm")
    router = client._router
    assert router is not None
    assert not router.await_map(router.epoch, time.monotonic() + 0.01)
    assert router.await_map(router.epoch - 1, time.monotonic())
    cluster.own({1: ALL})
    epoch = router.epoch
    threading.Timer(0.05, cluster.publish).start()
    assert router.await_map(epoch, time.monotonic() + WAIT_S)
    assert router.epoch == cluster.epoch
    # A refused operation goes on at once when the map names another one by now, else after a pause.
    again = RetryPolicy(client._routes, time.monotonic() + WAIT_S)
    digest = client.digest("k0")
    assert again.wait([(digest, None)])
    assert again.wait([(digest, client._routes.target(digest))])
    assert not RetryPolicy(client._routes, time.monotonic() - 1).wait([(digest, None)])


def test_an_operation_at_a_server_that_a_new_map_drops_ends_properly(cluster: FakeCluster) -> None:
    """The session stays open for as long as a put copies."""
    client = full(cluster, "shm")
    router, old = client._router, client._routes.target(client.digest("k0"))
    assert router is not None and old is not None
    nodes = cluster.nodes
    cluster.own({1: ALL})
    cluster.nodes = nodes[1:]
    for shard in ALL:
        cluster.owners[shard] = 0
    published(cluster, client)
    cluster.nodes = nodes
    assert client._routes.target(client.digest("k0")) is not old
    assert old.session is not None
    assert client._shm.put_one(old.session, client.digest("k0"), memoryview(b"v")) == Status.OK
    with router._map_lock:  # a deadline later
        router._connections.draining = [(0.0, target) for _, target in router._connections.draining]
    wait_until(lambda: old.session is None, "it is closed in the end")


# --- managers -----------------------------------------------------------------------------------


def test_the_next_manager_is_asked_where_one_does_not_lead_or_does_not_answer(cluster: FakeCluster) -> None:
    cluster.settled({0: ALL})
    standby, dead = FakeManager(), FakeManager()
    standby.leads = False
    dead.stop()
    addresses = [dead.address, standby.address, cluster.manager.address]
    try:
        client = Client(",".join(f"{host}:{port}" for host, port in addresses), path="shm", deadline_s=WAIT_S)
        cluster.clients.append(client)
        assert client.put("k", b"v")
        assert "MapGet" in standby.heard
        # The leader changes: the old one answers NOT_LEADER from now on, as does its map.
        cluster.own({0: ALL})
        standby.map, standby.leads, cluster.manager.leads = cluster.map(), True, False
        cluster.manager.cut()
        wait_until(lambda: client.stats()["epoch"] == cluster.epoch, "the new leader's map")
        assert client.stats()["manager"] == "connected"
        # And back, without any link breaking: asking for a map finds out.
        cluster.own({1: ALL})
        cluster.manager.map, cluster.manager.leads, standby.leads = cluster.map(), True, False
        client._routes.refresh()
        wait_until(lambda: client.stats()["epoch"] == cluster.epoch, "the first one's again")
    finally:
        standby.stop()


def test_a_manager_that_says_nothing_holds_up_nobody(
    cluster: FakeCluster, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = full(cluster, path, deadline_s=20.0)
    router = client._router
    assert router is not None
    monkeypatch.setattr(router.subscription, "_deadline_s", WAIT_S)
    ticks = [0]
    tend = Target.maintain

    def counted(self: Target, now: float) -> None:
        ticks[0] += 1
        tend(self, now)

    monkeypatch.setattr(Target, "maintain", counted)
    cluster.manager.silent = True
    heard = len(cluster.manager.heard)
    for _ in range(3):
        router.subscription.refresh()
    wait_until(lambda: len(cluster.manager.heard) > heard, "it is asked, and will never answer")
    before = ticks[0]
    for key in KEYS:
        assert client.get(key) == value_of(key)
        assert client.put(key, b"v")
        assert client.delete(key)
    wait_until(lambda: ticks[0] > before + 3, "targets are tended")
    assert client.stats()["outages"] == 0
    assert len(cluster.manager.heard) == heard + 1


def test_a_silent_manager_is_left_for_another(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client finds it by a PING, although no connection breaks."""
    monkeypatch.setattr(manager_link, "PING_S", (0.05, 0.1))
    cluster.settled({0: ALL})
    other = FakeManager()
    try:
        client = Client(
            ",".join(f"{host}:{port}" for host, port in (cluster.manager.address, other.address)),
            path="shm",
            deadline_s=0.2,
        )
        cluster.clients.append(client)
        cluster.own({1: ALL})
        other.map = cluster.map()
        cluster.manager.silent = True
        wait_until(lambda: client.stats()["epoch"] == cluster.epoch, "the other one's map")
    finally:
        other.stop()


def test_a_manager_that_is_gone_costs_nothing_and_is_found_again(cluster: FakeCluster, path: str) -> None:
    client = full(cluster, path)
    cluster.manager.stop()
    wait_until(lambda: client.stats()["manager"] != "connected", "the client notices")
    for key in KEYS:
        assert client.get(key) == value_of(key)
        assert client.put(key, value_of(key, 1))
    assert client.stats()["outages"] == 0
    assert client.counters["misses"] == 0


def test_questions_for_the_map_are_few_however_many_ask(cluster: FakeCluster) -> None:
    client = full(cluster, "shm")
    before = len(cluster.manager.heard)
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        client._routes.refresh()
    assert len(cluster.manager.heard) - before < 20


def test_dropped_without_a_close_its_threads_end(cluster: FakeCluster) -> None:
    cluster.settled({0: ALL})
    router = Router(ClientOptions("{}:{}".format(*cluster.manager.address), "n", "shm", 1.0))
    threads = [router._thread, router.subscription._thread]
    del router
    gc.collect()
    wait_until(lambda: not any(thread is not None and thread.is_alive() for thread in threads), "they end")


@pytest.mark.parametrize("where", ["map", "wake", "link", "join", "target", "socket"])
def test_an_interrupted_close_leaves_no_session(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Ctrl-C within close(): the sessions stayed, with their grants. A second close() ends what has not ended."""
    client = full(cluster, "shm")
    router = client._routes.router
    assert router is not None
    targets = list(router.targets.values())
    assert len(targets) == 2 and all(target.ready() for target in targets)
    sessions: list[Any] = [target.session for target in targets]

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    if where == "map":
        monkeypatch.setattr(router, "_map_changed", SimpleNamespace(notify_all=interrupted))
    else:
        places: dict[str, tuple[Any, str]] = {
            "wake": (router._wake, "set"), "link": (router.subscription, "close"), "join": (router._thread, "join"),
            "target": (targets[0], "close"), "socket": (sessions[0].channel, "close"),
        }  # fmt: skip
        monkeypatch.setattr(*places[where], interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.close()
    monkeypatch.undo()
    assert [target.session for target in targets[where == "target" :]] == [None] * len(targets[where == "target" :])
    client.close()
    assert [target.session for target in targets] == [None] * 2 and not router._thread.is_alive()
    assert [session.channel.sock.fileno() for session in sessions] == [-1, -1]
    client.close()


def test_a_forked_child_without_a_manager_warns_once_for_each_outage(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its calls make a router again and again until one is there."""
    monkeypatch.setattr(routing, "RESTART_S", 0.0)
    made = SimpleNamespace(
        route=[None], deadline_s=1.0, subscription=SimpleNamespace(await_first_round=lambda _timeout_s: None)
    )
    works = True

    def connect(_timeout_s: float | None) -> Any:
        if not works:
            raise TransportError("no manager answers at 127.0.0.1:1")
        return made

    routes = routing.Routes(connect)
    for outage in (1, 2):
        works = False
        routes.router, routes.route = None, []
        for _ in range(5):
            assert routes.restart() == []
        assert [each.levelno for each in caplog.records].count(logging.WARNING) == outage
        works = True
        assert routes.restart() == made.route
    routes._after_fork()
    works = False
    assert routes.restart() == [] and [each.levelno for each in caplog.records].count(logging.WARNING) == 3

"""Finding the owner of a key while owners change: redirects, previous owners, managers and servers that go and come."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from town import ALL, FakeManager, Town

from simm import session as session_module
from simm import subscription
from simm.client import Client
from simm.constants import SHARD_COUNT
from simm.gets import Gets
from simm.hashing import shard_of
from simm.messages import Status
from simm.reader import ArenaReader
from simm.routing import Again, Router
from simm.target import Target

PATHS = ("shm", "tcp")
#: A bound for things that hang, seconds.
WAIT_S = 30.0
KEYS = [f"k{number}" for number in range(60)]


def until(condition: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + WAIT_S
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {WAIT_S:.0f} s: {what}"
        time.sleep(0.005)
    return value


def value_of(key: str, version: int = 0) -> bytes:
    return f"{key}/{version};".encode() * 40


@pytest.fixture
def town() -> Iterator[Town]:
    session_module._BURIED.clear()
    with Town(2) as running:
        yield running
    session_module._BURIED.clear()


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def full(town: Town, path: str, **more: Any) -> Client:
    """A client of a town in which node 0 has everything and all keys are stored."""
    town.settled({0: ALL})
    client = town.client(path, **more)
    assert client.put_many(KEYS, [value_of(key) for key in KEYS]) == [True] * len(KEYS)
    return client


def published(town: Town, client: Client) -> None:
    town.publish()
    until(lambda: client.stats()["epoch"] == town.epoch, "the client has the map")


def seen(client: Client, key: str) -> set[bytes | None]:
    """What every form of reading makes of a key; one thing, if all is well."""
    found: set[bytes | None] = {client.get(key)}
    buffer = bytearray(2000)
    length = client.get_into(key, buffer)
    found.add(bytes(buffer[:length]) if length else None)
    many = [bytearray(2000) for _ in range(20)]
    for length, buffer in zip(client.get_into_many([key] * 20, many), many):
        found.add(bytes(buffer[:length]) if length else None)
    found.update(client.get_many([key] * 2))
    view = client.view(key)
    found.add(None if view is None else bytes(view.data))
    if view is not None:
        view.close()
    there = {client.exists(key), *client.exists_many([key, key]), *client.exists_many([key] * 20)}
    assert there == {value is not None for value in found}
    return found


# --- a move -----------------------------------------------------------------------------------


def test_before_the_new_owner_has_taken_over_values_are_read_at_the_previous_one(town: Town, path: str) -> None:
    client = full(town, path)
    town.own({1: ALL}, previous=0)
    published(town, client)  # nobody but the client knows yet, so node 1 sends nobody anywhere
    assert seen(client, KEYS[0]) == {None}
    town.instruct(1)  # it does, and waits for its mover; node 0 has not heard of it
    assert seen(client, KEYS[1]) == {value_of(KEYS[1])}
    town.instruct(0)  # node 0 freezes
    assert seen(client, KEYS[2]) == {value_of(KEYS[2])}
    assert client.get_many(KEYS) == [value_of(key) for key in KEYS]
    assert client.exists_many([*KEYS, "never"]) == [True] * len(KEYS) + [False]
    assert client.counters["moved"] > 0
    assert client.stats()["outages"] == 0


def test_after_it_has_taken_over_what_it_lacks_is_read_there_and_what_it_has_is_not(town: Town, path: str) -> None:
    client = full(town, path)
    town.own({1: ALL}, previous=0)
    town.instruct()
    town.nodes[1].adopt(town.epoch, ALL)
    published(town, client)
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
    town.nodes[1].finish(town.epoch, ALL)
    moved = client.counters["moved"]
    assert client.get_many(["k0", "k1", "k5"]) == [value_of("k0", 1), None, None]
    assert client.counters["moved"] == moved


def test_a_checksum_is_looked_at_where_the_value_came_from(town: Town, path: str) -> None:
    client = full(town, path, checksum=True)
    town.own({1: ALL}, previous=0)
    town.instruct()
    published(town, client)
    assert client.get("k0") == value_of("k0")
    reader = ArenaReader(town.nodes[0].worker.segment.name)
    found = reader.locate(client.digest("k1"))
    assert found is not None
    reader.data[found.offset - reader.data_offset] ^= 1
    assert client.get("k1") is None
    assert client.get_into_many(["k1"] * 20, [bytearray(1000)] * 20) == [None] * 20
    assert client.counters["crc_errors"] == 21


@pytest.mark.parametrize("batch", [False, True])
def test_mutations_wait_for_the_new_owner_and_none_fails(town: Town, path: str, batch: bool) -> None:
    """Both know of the move, and the mover is late: milliseconds for writers, or as long as it takes."""
    client = full(town, path)
    town.own({1: ALL}, previous=0)
    town.instruct()
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
    until(lambda: client.counters["redirects"] > 0 or done, "the put is tried again")
    assert not done
    town.publish()
    town.nodes[1].adopt(town.epoch, ALL)
    thread.join(WAIT_S)
    assert done[0] == [True] * len(done[0])
    # Nobody can tell whether a key that was not copied existed; it must be gone.
    assert client.get("k0") == value_of("k0", 9)
    assert client.get("k30") is None
    assert client.get("k40") == value_of("k40")
    assert client.counters["put_failures"] == 0
    assert client.stats()["outages"] == 0


def test_a_mutation_that_nobody_takes_fails_by_its_deadline(town: Town, path: str) -> None:
    client = full(town, path, deadline_s=0.3)
    town.own({1: ALL}, previous=0)
    town.instruct()  # and no mover ever comes
    published(town, client)
    began = time.monotonic()
    assert client.put("k0", b"v") is False
    assert client.put_many(["k0", "k1"], [b"v", b"v"]) == [False, False]
    assert client.delete("k0") is False
    assert time.monotonic() - began < 10.0
    assert client.counters["redirects"] > 3
    assert client.get("k0") == value_of("k0")


def test_a_client_with_an_old_map_never_sees_a_superseded_value(town: Town, path: str) -> None:
    """It goes on asking the previous owner, which is frozen and still has the old value."""
    client, late = full(town, path), town.client(path)
    late.get("k0")
    late._routes.router.subscription.close()  # type: ignore[union-attr]
    town.own({1: ALL}, previous=0)
    town.instruct()
    town.nodes[1].adopt(town.epoch, ALL)
    published(town, client)
    assert client.put("k0", value_of("k0", 1))
    assert client.delete("k1")
    assert late.get("k0") is None
    assert seen(late, "k0") == {None}
    assert seen(late, "k1") == {None}
    assert seen(client, "k0") == {value_of("k0", 1)}


def test_control_without_the_look_at_the_word_it_does(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ArenaReader, "confirm", ArenaReader.confirm_previous)
    with pytest.raises(AssertionError, match="k0/0"):
        test_a_client_with_an_old_map_never_sees_a_superseded_value(town, "shm")


def test_a_map_of_an_earlier_move_sends_nobody_to_its_previous_owner(town: Town) -> None:
    """Owner and previous owner of an old map, while the owner's word belongs to another move: by then the previous
    owner's values are superseded, though it may not know."""
    client = full(town, "shm")
    town.own({1: ALL}, previous=0)
    town.instruct()
    town.nodes[1].adopt(town.epoch, ALL)
    published(town, client)
    router = client._router
    assert router is not None
    assert client.get("k0") == value_of("k0")
    # Behind the client's back the shards left node 1 and came back, node 0 was not told of anything.
    router.subscription.close()
    first = town.map()
    town.own({0: ALL})
    town.instruct(1)
    town.own({1: ALL}, previous=0)
    town.instruct(1)
    town.nodes[1].adopt(town.epoch, ALL)
    assert router.epoch == first.epoch
    assert client.get("k0") is None
    assert client.get("k0") is None


def test_control_without_comparing_epochs_it_does(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gets, "_same_move", lambda self, *_: True)
    with pytest.raises(AssertionError, match="k0/0"):
        test_a_map_of_an_earlier_move_sends_nobody_to_its_previous_owner(town)


def test_a_shard_frozen_by_a_newer_map_than_ours_is_a_miss(town: Town) -> None:
    client = full(town, "shm")
    town.own({1: ALL}, previous=0)
    town.instruct()
    town.nodes[1].adopt(town.epoch, ALL)
    published(town, client)
    client._router.subscription.close()  # type: ignore[union-attr]
    town.nodes[1].freeze(town.epoch + 5, ALL)
    assert seen(client, "k0") == {None}


def test_a_cut_off_client_does_not_follow_an_old_map_to_an_old_owner(town: Town, path: str) -> None:
    """Node 1 has nothing of it: it may not have taken over yet, or have given it away since. Who would be told of that
    may believe the former."""
    client = full(town, path)
    town.own({1: ALL}, previous=0)
    town.instruct()
    published(town, client)
    assert client.get("k0") == value_of("k0")
    town.manager.stop()
    until(lambda: client.stats()["manager"] != "connected", "the client notices")
    assert client.get("k0") is None
    assert client.exists("k0") is False


def test_the_map_changes_between_the_miss_and_the_second_look(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner of the old map and the previous owner of the new one are the same worker: a trap."""
    client = full(town, "shm")
    other = town.client("shm")
    find = Gets._find

    def held(self: Gets, *arguments: Any) -> None:
        if self is client._gets and town.epoch == 11:
            town.own({1: ALL}, previous=0)
            town.instruct()
            town.nodes[1].adopt(town.epoch, ALL)
            town.publish()
            for each in (client, other):
                until(lambda each=each: each.stats()["epoch"] == town.epoch, "the map is there")
            assert other.put("k0", value_of("k0", 1))
        find(self, *arguments)

    monkeypatch.setattr(Gets, "_find", held)
    monkeypatch.setattr(ArenaReader, "locate", lambda self, digest: None if town.epoch == 11 else _locate(self, digest))
    monkeypatch.setattr(ArenaReader, "shard_word", lambda self, digest: 0 if town.epoch == 11 else _word(self, digest))
    assert client.get("k0") == value_of("k0", 1)


_locate = ArenaReader.locate
_word = ArenaReader.shard_word


@pytest.mark.parametrize("seed", range(2))
def test_moves_to_and_fro_under_load_never_show_an_older_value(town: Town, seed: int) -> None:
    """One writer a key, readers by both paths; what a reader sees never goes back. Not one put fails."""
    rng = random.Random(seed)
    writer, by_shm, by_tcp = full(town, "shm"), town.client("shm"), town.client("tcp")
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
            town.own({new: shards}, previous=1 - new)
            town.publish()
            order = [0, 1]
            rng.shuffle(order)
            town.instruct(*order)
            time.sleep(rng.random() * 0.01)
            town.nodes[1 - new].freeze(town.epoch, shards)
            town.nodes[new].adopt(town.epoch, shards)
            time.sleep(0.03)
            town.nodes[new].finish(town.epoch, shards)
            town.forget_previous()
            town.instruct()
            town.publish()
    finally:
        stop.set()
        for thread in threads:
            thread.join(WAIT_S)
    assert not wrong
    assert hits[0] > 0


# --- maps ---------------------------------------------------------------------------------------


def test_epochs_never_go_back_but_another_cluster_counts(town: Town) -> None:
    client = full(town, "shm")
    router = client._router
    assert router is not None
    old = town.map()
    town.own({1: ALL})
    published(town, client)
    newest = town.epoch
    town.manager.push(old)
    town.manager.push(old._replace(epoch=newest))  # the same again: no news
    town.own({1: ALL})
    published(town, client)  # pushes come in order: the old ones have been seen
    assert router.epoch == newest + 1
    assert {each.info.node for each in router.route if each is not None} == {"node1"}
    # Lost state, rebuilt from nothing: another id, and its epochs begin again.
    town.manager.publish(old._replace(epoch=1, cluster=8))
    until(lambda: (router.cluster, router.epoch) == (8, 1), "the new cluster's map")
    assert {each.info.node for each in router.route if each is not None} == {"node0"}
    assert client.get("k0") == value_of("k0")


@pytest.mark.parametrize(
    "change",
    [{"owners": b"\0" * 100}, {"owners": b"\x05\0" * SHARD_COUNT}, {"previous": [(3, 9)]},
     {"previous": [(3, 1)], "since": b"no"}],
    ids=["short", "no such worker", "no such previous", "epochs"],
)  # fmt: skip
def test_a_map_that_contradicts_itself_is_not_taken_over(town: Town, change: dict[str, Any]) -> None:
    client = full(town, "shm")
    town.own({0: ALL})
    bad = town.map()._replace(**change)
    town.manager.push(bad)
    # The link is dropped for it; the next one brings a good map.
    town.own({1: ALL})
    town.manager.map = town.map()
    until(lambda: client.stats()["epoch"] == town.epoch, "the good map")
    assert client._router.places.map.epoch == town.epoch  # type: ignore[union-attr]


def test_who_waits_for_a_map_is_woken_by_it(town: Town) -> None:
    client = full(town, "shm")
    router = client._router
    assert router is not None
    assert not router.await_map(router.epoch, time.monotonic() + 0.01)
    assert router.await_map(router.epoch - 1, time.monotonic())
    town.own({1: ALL})
    threading.Timer(0.05, town.publish).start()
    assert router.await_map(router.epoch, time.monotonic() + WAIT_S)
    assert router.epoch == town.epoch
    # A refused operation goes on at once when the map names another one by now, else after a pause.
    again = Again(client._routes, time.monotonic() + WAIT_S)
    digest = client.digest("k0")
    assert again.wait([(digest, None)])
    assert again.wait([(digest, client._routes.target(digest))])
    assert not Again(client._routes, time.monotonic() - 1).wait([(digest, None)])


def test_an_operation_at_a_server_that_a_new_map_drops_ends_properly(town: Town) -> None:
    """Its target lingers: the session is not torn from under a put that is copying."""
    client = full(town, "shm", deadline_s=1.0)
    old = client._routes.target(client.digest("k0"))
    assert old is not None
    nodes = town.nodes
    town.own({1: ALL})
    town.nodes = nodes[1:]
    for shard in ALL:
        town.owners[shard] = 0
    published(town, client)
    town.nodes = nodes
    assert client._routes.target(client.digest("k0")) is not old
    assert old.session is not None
    assert client._shm.put_one(old.session, client.digest("k0"), memoryview(b"v")) == Status.OK
    until(lambda: old.session is None, "it is closed in the end")


# --- managers -----------------------------------------------------------------------------------


def test_the_next_manager_is_asked_where_one_does_not_lead_or_does_not_answer(town: Town) -> None:
    town.settled({0: ALL})
    standby, dead = FakeManager(), FakeManager()
    standby.leads = False
    dead.stop()
    addresses = [dead.address, standby.address, town.manager.address]
    try:
        client = Client(",".join(f"{host}:{port}" for host, port in addresses), path="shm")
        town.clients.append(client)
        assert client.put("k", b"v")
        assert "MapGet" in standby.heard
        # The leader changes: the old one answers NOT_LEADER from now on, as does its map.
        town.own({0: ALL})
        standby.map, standby.leads, town.manager.leads = town.map(), True, False
        town.manager.cut()
        until(lambda: client.stats()["epoch"] == town.epoch, "the new leader's map")
        assert client.stats()["manager"] == "connected"
        # And back, without any link breaking: asking for a map finds out.
        town.own({1: ALL})
        town.manager.map, town.manager.leads, standby.leads = town.map(), True, False
        client._routes.refresh()
        until(lambda: client.stats()["epoch"] == town.epoch, "the first one's again")
    finally:
        standby.stop()


def test_a_manager_that_says_nothing_holds_up_nobody(town: Town, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    client = full(town, path, deadline_s=20.0)
    router = client._router
    assert router is not None
    monkeypatch.setattr(router.subscription, "_deadline_s", WAIT_S)
    ticks = [0]
    tend = Target.tend

    def counted(self: Target, now: float) -> None:
        ticks[0] += 1
        tend(self, now)

    monkeypatch.setattr(Target, "tend", counted)
    town.manager.silent = True
    heard = len(town.manager.heard)
    for _ in range(3):
        router.refresh()
    until(lambda: len(town.manager.heard) > heard, "it is asked, and will never answer")
    before = ticks[0]
    for key in KEYS:
        assert client.get(key) == value_of(key)
        assert client.put(key, b"v")
        assert client.delete(key)
    until(lambda: ticks[0] > before + 3, "targets are tended")
    assert client.stats()["outages"] == 0
    assert len(town.manager.heard) == heard + 1


def test_a_silent_manager_is_left_for_another(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by a PING, though nothing ever breaks."""
    monkeypatch.setattr(subscription, "PING_S", (0.05, 0.1))
    town.settled({0: ALL})
    other = FakeManager()
    try:
        client = Client(
            ",".join(f"{host}:{port}" for host, port in (town.manager.address, other.address)),
            path="shm",
            deadline_s=0.2,
        )
        town.clients.append(client)
        town.own({1: ALL})
        other.map = town.map()
        town.manager.silent = True
        until(lambda: client.stats()["epoch"] == town.epoch, "the other one's map")
    finally:
        other.stop()


def test_a_manager_that_is_gone_costs_nothing_and_is_found_again(town: Town, path: str) -> None:
    client = full(town, path)
    town.manager.stop()
    until(lambda: client.stats()["manager"] != "connected", "the client notices")
    for key in KEYS:
        assert client.get(key) == value_of(key)
        assert client.put(key, value_of(key, 1))
    assert client.stats()["outages"] == 0
    assert client.counters["misses"] == 0


def test_questions_for_the_map_are_few_however_many_ask(town: Town) -> None:
    client = full(town, "shm")
    before = len(town.manager.heard)
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        client._routes.refresh()
    assert len(town.manager.heard) - before < 20


def test_dropped_without_a_close_its_threads_end(town: Town) -> None:
    town.settled({0: ALL})
    router = Router([town.manager.address], namespace="n", path="shm", deadline_s=1.0)
    threads = [router._thread, router.subscription._thread]
    del router
    gc.collect()
    until(lambda: not any(thread is not None and thread.is_alive() for thread in threads), "they end")

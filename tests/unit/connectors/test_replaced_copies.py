"""Values of two copies that connectors replace, while one of the two servers does not do all that it is asked to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from simm.client import Client
from simm.connectors.keyspace import Keyspace, replace
from simm.constants import DEFAULT_NAMESPACE
from simm.ipc.tally import counters_summary, summary
from simm.schemes.registry import GENERATION
from simm.sdk.batch import MISS, UNAVAILABLE
from simm.sdk.ops.replicas import candidates
from simm.tools.ctl.why import LOOKS
from simm.wire.status import Status
from tests.support.fake_cluster import ALL, FakeCluster
from tests.support.waiting import wait_until

COUNT = 40
#: What node 1 does not do, by its part of the client, and the answer then.
ANSWERS: dict[str, tuple[str, Any]] = {
    "delete": ("_puts", Status.UNAVAILABLE), "store": ("_puts", Status.UNAVAILABLE),
    "read_many": ("_gets", UNAVAILABLE), "look_many": ("_gets", UNAVAILABLE), "stored_many": ("_gets", False),
}  # fmt: skip
AWAY = tuple(ANSWERS)


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(2) as made:
        made.settled({0: ALL[::2], 1: ALL[1::2]})
        yield made


def connected(cluster: FakeCluster) -> Client:
    client = cluster.client("shm", replicas=2)
    assert client.wait_ready(60)
    return client


def lose(patch: pytest.MonkeyPatch, client: Client, cluster: FakeCluster, *what: str) -> None:
    """Let node 1 not answer these calls of a client."""

    def hook(name: str) -> None:
        part, answer = ANSWERS[name]
        plain = getattr(getattr(client, part), name)

        def partly(digests: Sequence[bytes], second: Any = None, *more: Any) -> list[Any]:
            there = [at for at, digest in enumerate(digests) if not is_at(client, cluster, digest, 1)]
            if isinstance(second, (list, tuple)):
                second = [second[at] for at in there]
            got = plain([digests[at] for at in there], second, *more) if there else []
            answers = dict(zip(there, got))
            return [answers.get(at, answer) for at in range(len(digests))]

        patch.setattr(getattr(client, part), name, partly)

    for name in what:
        hook(name)


def is_at(client: Client, cluster: FakeCluster, digest: bytes, node: int) -> bool:
    target = client._routes.target(digest)
    return target is not None and target.info.node == cluster.nodes[node].name


def places(client: Client, digest: bytes) -> list[bytes]:
    """Return where the copies of a value belong."""
    assert client._replicas is not None
    other = client._replicas.second(digest)
    return [digest] if other is None else [digest, other]


def stored(client: Client, digest: bytes) -> set[bytes]:
    """Return all that reads may return for a value of three bytes."""
    assert client._replicas is not None
    copies = client._replicas.read_copies(digest, 3)
    assert UNAVAILABLE not in [got for got, _ in copies]
    return {bytes(room) for got, room in copies if got != MISS}


def put(client: Client, digests: list[bytes], value: bytes) -> list[int]:
    return replace(client, digests, [memoryview(value)] * len(digests))


@pytest.mark.parametrize("lost", [("delete",), ("store",), ("store", "delete"), AWAY], ids="+".join)
def test_no_old_value_is_read_after_a_replacement_that_succeeded(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, lost: tuple[str, ...]
) -> None:
    """Also of a second attempt while the server is still away."""
    client = connected(cluster)
    digests = [client.digest(f"k{number}") for number in range(COUNT)]
    assert put(client, digests, b"old") == [Status.OK] * COUNT
    for value in (b"new", b"3rd"):
        with monkeypatch.context() as patch:
            lose(patch, client, cluster, *lost)
            statuses = put(client, digests, value)
        for digest, status in zip(digests, statuses):
            at = [any(is_at(client, cluster, each, node) for each in places(client, digest)) for node in (0, 1)]
            refused = "store" in lost and ((at[1] and "delete" in lost) or not at[0])
            assert status == (Status.UNAVAILABLE if refused else Status.OK)
            assert stored(client, digest) == {value} if status == Status.OK else b"old" in stored(client, digest)
    assert put(client, digests, b"end") == [Status.OK] * COUNT
    assert all(stored(client, digest) == {b"end"} for digest in digests)


@pytest.mark.parametrize("path", ["shm", "tcp"])
def test_no_look_at_what_is_replaced_is_counted_as_a_get(cluster: FakeCluster, path: str) -> None:
    """Each replacement raised the misses for another size, and `simm ctl why` saw two models in one namespace."""
    client = cluster.client(path, replicas=2)
    assert client.wait_ready(60)
    digests = [client.digest(f"k{number}") for number in range(COUNT)]
    assert put(client, digests, b"old") == [Status.OK] * COUNT

    def totals() -> list[list[dict[str, Any]]]:
        """Return what clients and servers count. Servers count what comes by TCP."""
        return [
            list(map(summary, client._tallies.totals().values())),
            [counters_summary(node.stream.stream.counted.counters(DEFAULT_NAMESPACE)) for node in cluster.nodes],
        ]

    def counted() -> list[Any]:
        """Return what they count of gets."""
        gets = [[(each["hits"], each["misses"]) for each in some] for some in totals()]
        return [*gets, client.counters["hits"], client.counters["misses"]]

    before = counted()
    for number in range(10):
        assert put(client, digests, b"%03d" % number) == [Status.OK] * COUNT
    assert counted() == before
    mine, served = ([each["exists_found"] + each["exists_absent"] for each in some] for some in totals())
    assert not sum(mine) and sum(served) == (0 if path == "shm" else 11 * 5 * COUNT)
    puts = sum(each["puts"] for some in totals()[path == "tcp" :] for each in some)
    least, most = LOOKS
    assert path == "shm" or least * puts <= sum(served) <= most * puts, "as `simm ctl why` knows them"
    if path == "shm":  # the control
        assert client.exists("nothing") is False
        assert sum(each["exists_absent"] for each in totals()[0]) > 0
    assert stored(client, digests[0]) == {b"009"}
    assert client.counters["misses"] == before[-1]
    now = counted()
    for (_, old), (_, new) in zip(before[0] + before[1], now[0] + now[1]):
        assert new == old, "nor is a read of all copies a miss"
    assert client.get("nothing") is None
    assert counted() != now, "the control"


@pytest.mark.parametrize("path", ["shm", "tcp"])
def test_a_look_tells_what_is_not_there_from_what_nobody_knows(path: str) -> None:
    with FakeCluster(2) as cluster:
        cluster.settled({0: ALL[::2], 1: ALL[1::2]})
        client = cluster.client(path, deadline_s=1.0)
        assert client.wait_ready(60)
        digests = [client.digest(f"k{number}") for number in range(COUNT)]
        assert client._puts.store(digests[::2], [memoryview(b"old")] * (COUNT // 2)) == [Status.OK] * (COUNT // 2)
        there = [1, MISS] * (COUNT // 2)
        assert client._gets.look_many(digests) == there
        away = [is_at(client, cluster, digest, 1) for digest in digests]
        assert 0 < sum(away) < COUNT
        cluster.nodes[1].die()
        left = [UNAVAILABLE if gone else known for gone, known in zip(away, there)]
        wait_until(lambda: client._gets.look_many(digests) == left, "only what is left is known")


@pytest.mark.parametrize("path", ["shm", "tcp"])
def test_a_look_at_shards_that_move_asks_their_previous_owner(path: str) -> None:
    """If that does not answer, nobody knows what is there."""
    with FakeCluster(2) as cluster:
        cluster.settled({0: ALL})
        client = cluster.client(path, deadline_s=1.0)
        assert client.wait_ready(60)
        digests = [client.digest(f"k{number}") for number in range(COUNT)]
        assert client._puts.store(digests[::2], [memoryview(b"old")] * (COUNT // 2)) == [Status.OK] * (COUNT // 2)
        there = [1, MISS] * (COUNT // 2)
        cluster.own({1: ALL}, previous=0)
        cluster.instruct()
        cluster.publish()
        wait_until(lambda: client._gets.look_many(digests) == there, "what the previous owner has")
        cluster.nodes[0].die()
        wait_until(lambda: client._gets.look_many(digests) == [UNAVAILABLE] * COUNT, "nobody knows")
        assert client._gets.stored_many(digests) == [False] * COUNT


@pytest.mark.parametrize("path", ["shm", "tcp"])
def test_nothing_is_replaced_by_a_map_that_the_servers_know_to_be_old(path: str) -> None:
    """What a server does not own by its newer map was taken for absent, and the old value was read later."""
    with FakeCluster(3) as cluster:
        cluster.settled({0: ALL[::2], 1: ALL[1::2]})
        client = cluster.client(path, deadline_s=1.0, replicas=2)
        assert client.wait_ready(60)
        digests = [client.digest(f"k{number}") for number in range(COUNT)]
        assert put(client, digests, b"old") == [Status.OK] * COUNT
        cluster.own({2: ALL[::2]}, previous=0)
        cluster.instruct()  # and the client does not hear of it
        assert client._replicas is not None
        copies = client._replicas._copies(digests)
        moved = [is_at(client, cluster, copy, 0) for copy in copies]
        looked = client._gets.look_many(copies)
        assert [got == UNAVAILABLE for got in looked] == moved
        statuses = put(client, digests, b"new")
        cluster.publish()
        wait_until(lambda: UNAVAILABLE not in client._gets.look_many(copies), "the new map")
        assert Status.UNAVAILABLE in statuses
        for digest, status in zip(digests, statuses):
            assert b"old" not in stored(client, digest) if status == Status.OK else stored(client, digest)


@pytest.mark.parametrize("path", ["shm", "tcp"])
def test_a_previous_owner_that_has_released_a_shard_knows_nothing(path: str) -> None:
    with FakeCluster(2) as cluster:
        cluster.settled({0: ALL})
        client = cluster.client(path, deadline_s=1.0)
        assert client.wait_ready(60)
        digests = [client.digest(f"k{number}") for number in range(COUNT)]
        assert client._puts.store(digests, [memoryview(b"old")] * COUNT) == [Status.OK] * COUNT
        cluster.own({1: ALL}, previous=0)
        cluster.instruct()
        cluster.publish()
        wait_until(lambda: client._gets.look_many(digests) == [1] * COUNT, "what the previous owner has")
        cluster.previous.clear()
        cluster.instruct(0)
        assert client._gets.look_many(digests) == [UNAVAILABLE] * COUNT


def test_a_copy_that_a_read_does_not_find_any_more_may_be_elsewhere(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was taken for absent, and a flush for one that all others follow."""
    client = connected(cluster)
    digest = client.digest("k")
    assert put(client, [digest], b"old") == [Status.OK]
    monkeypatch.setattr(client._gets, "read_many", lambda digests, *_: [MISS] * len(digests))
    assert client._replicas is not None
    answers = [got for got, _ in client._replicas.read_copies(digest, 3)]
    there = len(places(client, digest))
    assert answers.count(UNAVAILABLE) == there and answers.count(MISS) == len(answers) - there


def test_a_new_value_is_stored_while_a_server_is_away(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connected(cluster)
    digests = [client.digest(f"k{number}") for number in range(COUNT)]
    lose(monkeypatch, client, cluster, *AWAY)
    single = client.counters["single_copies"]
    statuses = put(client, digests, b"new")
    reached = [any(is_at(client, cluster, each, 0) for each in places(client, digest)) for digest in digests]
    assert [status == Status.OK for status in statuses] == reached and sum(reached) > COUNT // 2
    assert 0 < client.counters["single_copies"] - single <= sum(reached)
    got = client.get_many([f"k{number}" for number in range(COUNT)])
    assert [each == b"new" for each in got] == reached


def test_a_copy_from_before_a_map_change_goes(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    client = connected(cluster)
    digests = [client.digest(f"k{number}") for number in range(COUNT)]
    strays = [next(each for each in candidates(digest) if each not in places(client, digest)) for digest in digests]
    for where in (digests, strays):
        assert client._puts.store(where, [memoryview(b"old")] * COUNT) == [Status.OK] * COUNT
    with monkeypatch.context() as patch:
        lose(patch, client, cluster, "delete")
        statuses = put(client, digests, b"new")
        assert [status == Status.OK for status in statuses] == [is_at(client, cluster, each, 0) for each in strays]
    assert put(client, digests, b"end") == [Status.OK] * COUNT
    assert all(stored(client, digest) == {b"end"} for digest in digests)


def test_of_a_duplicate_key_the_last_value_is_stored(cluster: FakeCluster) -> None:
    client = connected(cluster)
    digest = client.digest("k")
    values = [memoryview(b"one"), memoryview(b"two")]
    assert replace(client, [digest] * 2, values) == [Status.OK] * 2 and stored(client, digest) == {b"two"}
    assert replace(client, [], []) == []


@pytest.mark.parametrize(
    "lost", [("delete",), ("store",), ("read_many", "look_many"), ("store", "delete"), AWAY], ids="+".join
)
def test_every_engine_follows_a_flush_that_succeeded(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, lost: tuple[str, ...]
) -> None:
    here, there = connected(cluster), connected(cluster)
    said = []
    for number in range(20):
        one, other = Keyspace(here, f"scope {number}"), Keyspace(there, f"scope {number}")
        old = one.generation()
        assert old is not None and other.generation() == old
        with monkeypatch.context() as patch:
            lose(patch, here, cluster, *lost)
            said.append(one.flush())
        if said[-1]:
            assert other.generation() == one.generation() != old
        assert one.generation() != old
    assert all(said) or lost != ("delete",)
    assert not all(said) or lost in (("delete",), ("store",)), "the control"


def test_a_flush_of_which_an_old_copy_is_left_does_not_say_that_others_see_it(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connected(cluster)
    replicas: Any = client._replicas
    plain = replicas.replace
    for number in range(20):
        one = Keyspace(client, f"scope {number}")
        known = one.generation()
        assert known is not None

        def undone(
            digests: list[bytes], *more: Any, at: int = number % 2, old: int = int(known, 16), **how: Any
        ) -> list[int]:
            statuses: list[int] = plain(digests, *more, **how)
            copy = places(client, digests[0])[-at]
            assert client._puts.store([copy], [memoryview(GENERATION.pack(old))]) == [Status.OK]
            return statuses

        with monkeypatch.context() as patch:
            patch.setattr(replicas, "replace", undone)
            assert not one.flush()
        assert one.flush()


def test_others_follow_a_flush_of_which_a_copy_could_not_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so, and puts what it can: readers take the newest generation."""
    with FakeCluster(4) as cluster:
        cluster.settled({node: ALL[node::4] for node in range(4)})
        here, there = (connected(cluster) for _ in range(2))
        pairs = [(Keyspace(here, f"s{number}"), Keyspace(there, f"s{number}")) for number in range(COUNT)]
        for one, other in pairs:
            assert one.generation() == other.generation() is not None
        unsure = 0
        with monkeypatch.context() as patch:
            lose(patch, here, cluster, *AWAY)
            lose(patch, there, cluster, *AWAY)
            for one, other in pairs:
                away = [is_at(here, cluster, copy, 1) for copy in places(here, one._key)]
                unsure += not one.flush()
                assert all(away) or other.generation() == f"{one._known:016x}"
        assert 0 < unsure < COUNT
        for one, other in pairs:
            assert one.flush() and other.generation() == one.generation()


def test_of_a_duplicate_key_no_earlier_value_stays(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """One server takes no further value, after it has taken the first."""
    client = connected(cluster)
    digests = [client.digest(f"k{number}") for number in range(COUNT)]
    assert put(client, digests, b"old") == [Status.OK] * COUNT
    for digest in digests:
        assert replace(client, [digest, digest], [memoryview(b"one"), memoryview(b"two")]) == [Status.OK] * 2
        assert stored(client, digest) == {b"two"}

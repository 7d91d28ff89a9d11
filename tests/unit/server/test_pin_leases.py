"""PIN and FETCH_PINNED at a real stream: versions that stay, bounds, lapses, ends, and what costs the connection."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from simm.arena.hashing import Hasher
from simm.config.tokens import Token, TokenRole
from simm.errors import TransportError
from simm.ipc.session import WorkerSession
from simm.net.channel import Channel, greet
from simm.server import stream as stream_module
from simm.server import stream_get
from simm.server.stream_get import Leased, Leases
from simm.wire import messages as M
from simm.wire.auth import Gate
from simm.wire.hello import client_hello
from simm.wire.messages import Role, Service, Status
from tests.support.waiting import wait_until
from tests.support.worker_thread import StreamThread, WorkerThread

MIB = 1 << 20
ARENA = 64 * MIB
digest_of = Hasher("default")
A, B, GONE = digest_of("a"), digest_of("b"), digest_of("gone")
OLD, NEW = random.Random(1).randbytes(3 * MIB), random.Random(2).randbytes(3 * MIB)
World = tuple[WorkerThread, StreamThread]


@pytest.fixture
def world() -> Iterator[World]:
    with WorkerThread(ARENA) as worker, StreamThread(worker.path) as stream:
        yield worker, stream


def put(channel: Channel, digest: bytes, value: bytes) -> None:
    number = channel.submit(M.Store([(digest, len(value), 0, 0, 0)]))
    channel.sock.sendall(value)
    assert channel.result(channel.wait(number)).statuses == [Status.OK]


def pin(channel: Channel, *digests: bytes) -> list[int]:
    """Return the handles; all are hits."""
    entries = channel.call(M.Pin(0, list(digests))).entries
    assert [entry[0] for entry in entries] == [Status.OK] * len(digests)
    return [entry[4] for entry in entries]


def fetch(channel: Channel, wants: Sequence[tuple[int, Sequence[tuple[int, int]]]]) -> list[Any]:
    """Return (status, verdict, the ranges' bytes) for each."""
    number = channel.submit(
        M.FetchPinned(
            [(handle, len(ranges)) for handle, ranges in wants], [each for _, ranges in wants for each in ranges]
        )
    )
    entries = channel.result(channel.wait(number)).entries
    got = []
    for (_, ranges), (status, *_) in zip(wants, entries, strict=True):
        pieces = [bytearray(size) for _, size in ranges] if status == Status.OK else []
        for piece in pieces:
            channel.receive_bulk(memoryview(piece))
        got.append((status, [bytes(piece) for piece in pieces]))
    verdict = channel.result(channel.wait(number)).statuses
    return [(status, judged, pieces) for (status, pieces), judged in zip(got, verdict, strict=True)]


def whole(channel: Channel, handle: int) -> tuple[int, bytes]:
    """Return the verdict on a value of 3 MiB, and what came."""
    ((status, verdict, (piece,)),) = fetch(channel, [(handle, [(0, 3 * MIB)])])
    assert status == Status.OK
    return verdict, piece


def replace(channel: Channel) -> None:
    """Replace the value, and let others take its chunk."""
    put(channel, A, NEW)
    for number in range(40):  # twice the arena
        put(channel, digest_of(f"scan {number}"), NEW)


def pins(worker: WorkerThread) -> tuple[int, int]:
    with worker.frozen() as store:
        stats = store.stats()
    return stats["pins"], stats["pinned_bytes"]


def test_a_pinned_version_stays(world: World) -> None:
    worker, stream = world
    channel, other = stream.channel(), stream.channel()
    put(other, A, OLD)
    put(other, B, b"0123456789")
    entries = channel.call(M.Pin(0, [A, GONE, B])).entries
    assert [(entry[0], entry[2]) for entry in entries] == [(Status.OK, 3 * MIB), (Status.NOT_FOUND, 0), (Status.OK, 10)]
    assert entries[0][5] > 0 and entries[0][4] != entries[2][4] > 0
    a, b = entries[0][4], entries[2][4]
    assert pins(worker)[0] == 2
    for _ in range(2):
        got = fetch(
            channel,
            [(a, [(3 * MIB - 1, 1), (5, 2 * MIB)]), (b, [(9, 1), (0, 3), (0, 3)]), (7, [(0, 1)]), (b, [(8, 3)])],
        )
        assert got == [
            (Status.OK, Status.OK, [OLD[-1:], OLD[5 : 5 + 2 * MIB]]), (Status.OK, Status.OK, [b"9", b"012", b"012"]),
            (Status.NOT_FOUND, Status.OK, []), (Status.OUT_OF_RANGE, Status.OK, []),
        ]  # fmt: skip
        replace(other)
        assert other.call(M.Delete([B])).statuses == [Status.OK]
        put(other, B, b"another")
    assert channel.call(M.Unpin([a, a, 99])).items == 1
    assert fetch(channel, [(a, [(0, 1)])])[0][0] == Status.NOT_FOUND
    assert fetch(channel, [(b, [(0, 4)])]) == [(Status.OK, Status.OK, [b"0123"])]
    assert fetch(other, [(b, [(0, 1)])])[0][0] == Status.NOT_FOUND, "a handle is its connection's"
    channel.close()
    wait_until(lambda: pins(worker) == (0, 0), "the pins end with the connection")
    assert stream.stream.leases.keys == stream.stream.leases.bytes == 0
    other.close()


def test_mutation_without_the_pin_the_version_goes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Leases, "_pin", lambda *_: None)
    _, stream = world
    channel = stream.channel()
    put(channel, A, OLD)
    (handle,) = pin(channel, A)
    assert whole(channel, handle) == (Status.OK, OLD)
    replace(channel)
    assert whole(channel, handle)[0] == Status.TORN
    channel.close()


def test_mutation_without_pin_and_verdict_other_bytes_come(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Leases, "_pin", lambda *_: None)
    monkeypatch.setattr(Leased, "is_whole", lambda _: True)
    _, stream = world
    channel = stream.channel()
    put(channel, A, OLD)
    (handle,) = pin(channel, A)
    replace(channel)
    verdict, got = whole(channel, handle)
    assert verdict == Status.OK and got != OLD
    channel.close()


def test_an_entry_that_is_replaced_while_it_is_pinned_has_no_pin(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the worker then pins is another version than the one that was found."""
    worker, stream = world
    channel, other = stream.channel(), stream.channel()
    put(channel, A, OLD)
    pin_many = WorkerSession.pin_many

    def late(self: WorkerSession, digests: Sequence[bytes], how: int = 0) -> Any:
        session = worker.session(ring=False)
        number = session.exchange(M.Grant([(9, 1)])).grants[0][0]
        session.exchange(M.Commit([(A, number, 9, 0, 0, 0)], []))
        session.close()
        return pin_many(self, digests, how)

    monkeypatch.setattr(WorkerSession, "pin_many", late)
    (handle,) = pin(channel, A)
    monkeypatch.undo()
    wait_until(lambda: pins(worker) == (0, 0), "the pin of the other version is released")
    assert whole(channel, handle)[0] == Status.TORN
    channel.close()
    other.close()


def test_a_client_that_asks_for_nothing_loses_its_pins_and_not_its_values(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, stream = world
    channel, other = stream.channel(), stream.channel()
    put(other, A, OLD)
    (handle,) = pin(channel, A)
    assert pins(worker)[0] == 1
    monkeypatch.setattr(stream_module, "LEASE_S", -1.0)
    wait_until(lambda: pins(worker) == (0, 0), "its pin lapses")
    assert whole(channel, handle) == (Status.OK, OLD)  # by its version
    replace(other)
    assert whole(channel, handle)[0] == Status.TORN
    assert channel.call(M.Unpin([handle])).items == 1
    assert stream.stream.leases.keys == stream.stream.leases.bytes == 0
    channel.close()
    other.close()


def test_a_client_cannot_pin_the_whole_arena_nor_can_many(world: World) -> None:
    worker, stream = world
    clients = [stream.channel() for _ in range(6)]
    size = 3 * MIB
    keys = [digest_of(f"k{number}") for number in range(15)]
    for key in keys:
        put(clients[0], key, OLD)
    with worker.frozen() as store:
        half = store.sessions.pinned_bytes_max
    handles = pin(clients[0], *keys)  # all of them are in the lease, pinned or not
    alone = pins(worker)[1]
    assert size <= alone <= half / 2
    for client in clients[1:]:
        pin(client, *keys)
    assert alone < pins(worker)[1] <= half
    for number in range(40):
        put(clients[0], digest_of(f"scan {number}"), NEW)
    verdicts = [whole(clients[0], handle) for handle in handles]
    kept = [got for verdict, got in verdicts if verdict == Status.OK]
    assert len(kept) * size >= alone and all(got == OLD for got in kept)
    assert {verdict for verdict, _ in verdicts} == {Status.OK, Status.TORN}
    for client in clients:
        client.close()
    wait_until(lambda: pins(worker) == (0, 0), "all pins end")


def test_values_of_leases_are_bounded_in_number(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_get, "LEASED_KEYS_MAX", 100)
    _, stream = world
    first, second = stream.channel(), stream.channel()
    put(first, A, b"value")
    statuses = [entry[0] for entry in first.call(M.Pin(0, [A] * 200)).entries]
    assert statuses == [Status.OK] * 50 + [Status.NO_SPACE] * 150
    assert [entry[0] for entry in second.call(M.Pin(0, [A] * 200)).entries].count(Status.OK) == 25
    first.close()
    second.close()


def test_values_beyond_the_lines_for_pins_are_held_by_their_versions() -> None:
    """Small pages were no values of the lease, so they counted as not stored."""
    with WorkerThread(8 * MIB) as worker, StreamThread(worker.path) as stream:
        first, second = stream.channel(), stream.channel()
        put(first, A, b"value")
        with worker.frozen() as store:
            most = store.geometry.hold_lines // 4
        for _ in range(most // 1024 + 1):
            handles = pin(first, *[A] * 1024)
        assert pins(worker)[0] == most // 2, "and the rest is for others"
        assert fetch(first, [(handles[-1], [(0, 5)])]) == [(Status.OK, Status.OK, [b"value"])]
        pin(second, *[A] * 1024)
        assert most // 2 < pins(worker)[0] <= most
        first.close()
        second.close()
        wait_until(lambda: pins(worker) == (0, 0), "all pins end")
        assert stream.stream.leases.pins == stream.stream.leases.bytes == 0


def test_pins_outlive_the_worker(world: World) -> None:
    worker, stream = world
    channel, other = stream.channel(), stream.channel()
    put(other, A, OLD)
    (handle,) = pin(channel, A)
    worker.die()
    assert whole(channel, handle) == (Status.OK, OLD)
    worker.start()
    wait_until(lambda: other.call(M.Delete([A])).statuses == [Status.OK], "the stream is with the new worker")
    replace(other)
    assert whole(channel, handle) == (Status.OK, OLD)
    put(other, A, NEW)
    (again,) = pin(channel, A)
    assert whole(channel, again)[1] == NEW
    channel.close()
    wait_until(lambda: pins(worker) == (0, 0), "pins of both sessions end")
    other.close()


def test_without_a_worker_a_value_is_held_by_its_version(world: World) -> None:
    worker, stream = world
    channel = stream.channel()
    put(channel, A, OLD)
    worker.die()
    (handle,) = pin(channel, A)
    assert whole(channel, handle) == (Status.OK, OLD)
    worker.start()
    wait_until(lambda: channel.call(M.Delete([A])).statuses == [Status.OK], "the stream is with the new worker")
    assert whole(channel, handle)[0] == Status.TORN
    channel.close()


@pytest.mark.parametrize(
    "msg",
    [
        M.Pin(2, [A]), M.FetchPinned([(1, 2)], [(0, 1)]), M.FetchPinned([(1, 1)], [(0, 0)]),
        M.FetchPinned([(1, 0)], []), M.FetchPinned([(1, 2)], [(0, 1 << 31)] * 2),
    ],
)  # fmt: skip
def test_what_costs_the_connection(world: World, msg: Any) -> None:
    _, stream = world
    channel = stream.channel()
    with pytest.raises(TransportError):
        channel.call(msg)
    channel.close()
    hello_first = stream.channel(hello=False)
    with pytest.raises(TransportError):
        hello_first.call(M.Pin(0, [A]))
    hello_first.close()


def test_handles_that_nobody_has_given_out(world: World) -> None:
    _, stream = world
    channel = stream.channel()
    assert channel.call(M.Unpin([0, 1, 1 << 63])).items == 0
    for handle in (0, 1, (1 << 64) - 1):
        assert fetch(channel, [(handle, [(0, 1)])])[0][0] == Status.NOT_FOUND
    put(channel, A, b"x")
    (handle,) = pin(channel, A)
    rng = random.Random(5)
    for _ in range(300):
        guess = rng.choice((0, handle + 1, rng.getrandbits(64)))
        assert fetch(channel, [(guess, [(0, 1)]), (handle, [(0, 1)])])[1] == (Status.OK, Status.OK, [b"x"])
    channel.close()


def test_a_client_that_is_bound_to_a_namespace_pins_none_of_others() -> None:
    red = Token("the-token-of-team-red", TokenRole.CLIENT, "red", {"red": None})
    blue = Token("the-token-of-team-blue", TokenRole.CLIENT, "blue", {"blue": None})
    with WorkerThread(ARENA) as worker, StreamThread(worker.path, tokens=(red, blue)) as stream:
        channels = []
        for token in (red, blue):
            channel = stream.channel(hello=False)
            greet(channel, Service.STREAM, client_hello(Role.CLIENT, namespace=token.label), token.secret)
            channels.append(channel)
        mine, theirs = channels
        digest = Hasher("red")("k")
        put(mine, digest, OLD)
        assert [entry[0] for entry in theirs.call(M.Pin(0, [digest])).entries] == [Status.NOT_FOUND]
        (handle,) = pin(mine, digest)
        assert pins(worker)[0] == 1
        assert mine.call(M.Delete([digest])).statuses == [Status.OK]
        assert whole(mine, handle) == (Status.OK, OLD)
        for channel in channels:
            channel.close()


@pytest.mark.parametrize("size", [3 * MIB, 1000], ids=["in pieces", "at once"])
def test_issue_a_bound_client_without_a_pin_sees_no_bytes_of_who_has_the_place_now(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own value was held by its version alone. By now the chunk is another tenant's."""
    monkeypatch.setattr(Leases, "_pin", lambda *_: None)
    red = Token("the-token-of-team-red", TokenRole.CLIENT, "red", {"red": None})
    blue = Token("the-token-of-team-blue", TokenRole.CLIENT, "blue", {"blue": None})
    with WorkerThread(ARENA) as worker, StreamThread(worker.path, tokens=(red, blue)) as stream:
        channels = []
        for token in (red, blue):
            channel = stream.channel(hello=False)
            greet(channel, Service.STREAM, client_hello(Role.CLIENT, namespace=token.label), token.secret)
            channels.append(channel)
        mine, theirs = channels
        digest = Hasher("red")("k")
        put(mine, digest, OLD[:size])
        (handle,) = pin(mine, digest)
        place = stream.stream.keeper.arena()
        assert place is not None
        found = place.locate(digest)
        assert found is not None
        assert mine.call(M.Delete([digest])).statuses == [Status.OK]
        for number in range(200):
            put(theirs, Hasher("blue")(f"k{number}"), NEW[:size])
            if bytes(place.value(found)) == NEW[:size]:
                break
        else:
            raise AssertionError("nobody has taken the place")
        assert fetch(mine, [(handle, [(0, size)])]) == [(Status.OK, Status.TORN, [bytes(size)])]
        monkeypatch.setattr(Gate, "bound", property(lambda _: False))  # positive control
        assert fetch(mine, [(handle, [(0, size)])]) == [(Status.OK, Status.TORN, [NEW[:size]])]
        for channel in channels:
            channel.close()

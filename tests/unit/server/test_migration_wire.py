"""The messages of a move at a real worker and a real stream: who may send them, what comes back, and garbage."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from simm.arena.hashing import Hasher, shard_of
from simm.arena.layout import ENTRY_CRC
from simm.arena.reader import Located
from simm.config.client_options import ClientOptions
from simm.constants import BATCH_KEYS_MAX, SHARD_COUNT
from simm.errors import RemoteProtocolError, TransportError
from simm.ipc.steps import finish
from simm.net.channel import Channel, Refused
from simm.rpc import HEADER, Frame, decode, encode
from simm.sdk.path import ClientContext
from simm.sdk.tcp import TcpPath
from simm.server.stream import Stream
from simm.wire import messages as M
from simm.wire.messages import ShardRole, Status
from simm.wire.shard_set import FROZEN, MOVING, bitmap_of, shards_in
from tests.support.consistency import check
from tests.support.move_scripts import message
from tests.support.store_world import ALL_SHARDS, owned
from tests.support.waiting import wait_until
from tests.support.wire_samples import sample
from tests.support.worker_thread import StreamThread, WorkerThread

digest_of = Hasher("move")
MINE = [digest_of(f"key {number}") for number in range(40)]
SHARDS = sorted({shard_of(digest) for digest in MINE})
MANY = 1 << 20


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerThread]:
    with WorkerThread() as made:
        yield made


@pytest.fixture(scope="module")
def stream(worker: WorkerThread) -> Iterator[StreamThread]:
    with StreamThread(worker.path) as made:
        yield made


@pytest.fixture(autouse=True)
def fresh(worker: WorkerThread) -> None:
    """Empty, and all shards its own since epoch 1."""
    epoch = 1 << 50  # newer than whatever has frozen a shard
    worker.supervisor.call(M.Shards(epoch, bytes(8 * SHARD_COUNT), bytes(SHARD_COUNT)))
    worker.supervisor.call(M.Shards(1, *owned(ALL_SHARDS, 1)))


def put(worker: WorkerThread, namespace: str, digests: list[bytes], crc: int = 0) -> None:
    """Values of 100 bytes, each its digest over and over."""
    channel, _ = worker.hello(namespace=namespace)
    grants = channel.call(M.Grant([(100, len(digests))])).grants
    with worker.frozen():
        for digest, (_, offset, _) in zip(digests, grants, strict=True):
            worker.segment.buf[offset : offset + 100] = (digest * 7)[:100]
    entries = [
        (digest, number, 100, crc, ENTRY_CRC if crc else 0, 0) for digest, (number, _, _) in zip(digests, grants)
    ]
    assert set(channel.call(M.Commit(entries, [])).statuses) == {Status.OK}
    channel.close()


def fetch(stream: StreamThread, digests: list[bytes], *, previous: bool = False) -> list[tuple[int, int, int]]:
    """(status, length, crc) for each; the bytes are looked at."""
    path = TcpPath(ClientContext(ClientOptions(deadline_s=20.0)), *stream.address)
    rooms = [bytearray(100) for _ in digests]
    wants = [(digest, 100, lambda length, at=at: memoryview(rooms[at])[:length]) for at, digest in enumerate(digests)]
    got = finish(path.fetch(wants, previous=previous))
    path.close()
    for digest, room, (status, *_) in zip(digests, rooms, got):
        assert status != Status.OK or bytes(room) == (digest * 7)[:100]
    return [(status, length, crc) for status, length, crc, _ in got]


def statuses(stream: StreamThread, digests: list[bytes], *, previous: bool = False) -> list[int]:
    """Of a FETCH."""
    return [status for status, _, _ in fetch(stream, digests, previous=previous)]


# -- what comes back ---------------------------------------------------------------------------------


def test_freeze_list_fetch(worker: WorkerThread, stream: StreamThread) -> None:
    put(worker, "one", MINE[:20])
    put(worker, "two", MINE[20:], crc=77)
    mover = stream.channel(M.Role.MOVER)
    nothing = mover.call(M.List(bitmap_of(SHARDS), 0, 100))
    assert nothing.entries == [] and nothing.cursor == 0  # not frozen
    frozen = mover.call(M.Freeze(7, bitmap_of(SHARDS[1:])))
    assert shards_in(frozen.shards) == SHARDS[1:]
    with pytest.raises(Refused) as refused:
        mover.call(M.Freeze(1, bitmap_of(SHARDS[:1])))
    assert refused.value.status == Status.WRONG_OWNER
    left = [digest for digest in MINE if shard_of(digest) != SHARDS[0]]
    names, found, cursor = {}, {}, 0
    while True:
        page = mover.call(M.List(bitmap_of(SHARDS), cursor, 7))
        assert len(page.entries) <= 7
        names.update({name.number: name.name for name in page.namespaces})
        found.update({digest: (length, flags, names[number]) for digest, length, flags, number in page.entries})
        cursor = page.cursor
        if not cursor:
            break
    assert found == {
        digest: (100, 0, "one") if digest in MINE[:20] else (100, ENTRY_CRC, "two") for digest in left
    }
    assert statuses(stream, MINE) == [
        Status.OK if shard_of(digest) == SHARDS[0] else Status.WRONG_OWNER for digest in MINE
    ]
    got = fetch(stream, MINE, previous=True)
    assert got == [(Status.OK, 100, 77 if digest in MINE[20:] else 0) for digest in MINE]
    client = stream.channel()
    assert client.call(M.Exists(left)).statuses == [Status.WRONG_OWNER] * len(left)
    assert client.call(M.Delete(left[:2])).statuses == [Status.WRONG_OWNER] * 2
    worker.supervisor.call(M.Shards(8, *message(8, dict.fromkeys(SHARDS[1:], (ShardRole.NONE, 0)))[1:]))
    assert set(statuses(stream, left, previous=True)) == {Status.WRONG_OWNER}
    assert mover.call(M.List(bitmap_of(SHARDS), 0, 100)).entries == []
    mover.close()
    client.close()


def test_adopt_copy_finish(worker: WorkerThread, stream: StreamThread) -> None:
    here, there, gone = MINE[:3]
    moves = [shard_of(digest) for digest in (here, there, gone)]
    worker.supervisor.call(M.Shards(5, *message(5, dict.fromkeys(moves, (ShardRole.INCOMING, 5)))[1:]))
    client = stream.channel()
    assert fetch(stream, [here]) == [(Status.PREVIOUS, 5, 0)]  # not adopted yet
    mover, _ = worker.hello(M.Role.MOVER, "one")
    other, _ = worker.hello(M.Role.MOVER, "two")
    assert mover.call(M.Adopt(5, bitmap_of(moves), bitmap_of(moves))).items == 3
    late, _ = worker.hello(M.Role.MOVER, "three")  # of the same process
    put(worker, "one", [here])
    assert client.call(M.Delete([gone])).statuses == [Status.OK]
    for channel in (mover, other, late):
        grants = channel.call(M.Grant([(100, 3)])).grants
        entries = [(d, grant[0], 100, 0, 0, M.ABSENT) for d, grant in zip((here, there, gone), grants)]
        expected = [Status.PRESENT, Status.OK if channel is mover else Status.PRESENT, Status.PRESENT]
        assert channel.call(M.Commit(entries, [])).statuses == expected
    third = MINE[3]
    assert shard_of(third) not in moves
    assert fetch(stream, [gone, third]) == [(Status.NOT_FOUND, 0, 0)] * 2
    assert client.call(M.Exists([here, there, gone])).statuses == [Status.OK, Status.OK, Status.NOT_FOUND]
    elsewhere = (shard_of(there) | 1 << 20).to_bytes(16, "little")
    assert fetch(stream, [elsewhere]) == [(Status.PREVIOUS, 5, 0)]
    assert client.call(M.Exists([elsewhere, here])).statuses == [Status.PREVIOUS, Status.OK]
    assert mover.call(M.Locate(0, [elsewhere])).entries == [(Status.PREVIOUS, 0, 0, 0, 5, 0)]
    stats = worker.worker.stats()
    assert (stats["moving"], stats["dropped"], stats["copies"] > 0) == (3, 1, True)
    assert mover.call(M.Finish(5, bitmap_of(moves))).items == 3
    assert fetch(stream, [elsewhere]) == [(Status.NOT_FOUND, 0, 0)]
    for channel in (client, mover, other, late):
        channel.close()


def test_a_large_epoch_comes_whole(worker: WorkerThread, stream: StreamThread) -> None:
    epoch = (5 << 32) + 9
    digest = MINE[0]
    worker.supervisor.call(M.Shards(epoch, *message(epoch, {shard_of(digest): (ShardRole.INCOMING, epoch)})[1:]))
    assert fetch(stream, [digest]) == [(Status.PREVIOUS, 9, 5)]


def test_a_fence_by_message(worker: WorkerThread, stream: StreamThread) -> None:
    put(worker, "one", MINE[:1])
    assert worker.supervisor.call(M.Shards(0, b"", b"")).items == 0
    client = stream.channel()
    assert client.call(M.Delete(MINE[:1])).statuses == [Status.WRONG_OWNER]
    assert statuses(stream, MINE[:1]) == [Status.OK]
    worker.supervisor.call(M.Shards(1, *owned(ALL_SHARDS, 1)))
    assert client.call(M.Delete(MINE[:1])).statuses == [Status.OK]
    client.close()


def test_a_value_frozen_while_it_is_sent_is_torn(worker: WorkerThread, stream: StreamThread) -> None:
    """The verdict comes after the freeze, and a new owner may have accepted another value by then."""
    put(worker, "one", MINE[:1])
    with worker.frozen() as store:
        table = store.table
        slot = table.lookup(MINE[0])
        found = Located(slot, table._words[slot * 8], 0, 100, 0, 0)
        store.freeze(9, [shard_of(MINE[0])])
    reader = stream.stream.keeper.session.reader if stream.stream.keeper.session else None
    if reader is None:
        statuses(stream, MINE[1:2])
        assert stream.stream.keeper.session is not None
        reader = stream.stream.keeper.session.reader
    assert not reader.confirm(MINE[0], found.slot, found.seq)
    assert reader.confirm_previous(MINE[0], found.slot, found.seq)


def test_a_worker_that_is_down(tmp_path: Any) -> None:
    with StreamThread(str(tmp_path / "nobody")) as alone:
        mover = alone.channel(M.Role.MOVER)
        for msg in (M.Freeze(3, bitmap_of([1])), M.List(bitmap_of([1]), 0, 10)):
            with pytest.raises(Refused) as refused:
                mover.call(msg)
            assert refused.value.status == Status.UNAVAILABLE
        mover.close()
        assert statuses(alone, MINE[:3]) == [Status.UNAVAILABLE] * 3


def test_a_page_of_a_listing_fits_a_frame() -> None:
    names = [M.NamespaceName(number, "n" * 64) for number in range(256)]
    assert len(encode(M.Listed(1, [(bytes(16), 1, 0, 0)] * BATCH_KEYS_MAX, names))) < MANY
    assert FROZEN > MOVING > SHARD_COUNT


# -- who may ------------------------------------------------------------------------------------------


BITMAP = bitmap_of([1, 2])


@pytest.mark.parametrize(
    ("role", "msg"),
    [
        (M.Role.CLIENT, M.Freeze(5, BITMAP)), (M.Role.CLIENT, M.Adopt(5, BITMAP, BITMAP)),
        (M.Role.CLIENT, M.Finish(5, BITMAP)), (M.Role.STREAM, M.Adopt(5, BITMAP, BITMAP)),
        (M.Role.STREAM, M.Finish(5, BITMAP)), (M.Role.MOVER, M.Shards(9, b"", b"")),
        (M.Role.SUPERVISOR, M.Adopt(5, BITMAP, BITMAP)), (M.Role.SUPERVISOR, M.Shards(9, b"", b"")),
        (M.Role.MOVER, M.List(BITMAP, 0, 1)), (M.Role.MOVER, M.Locate(8, [bytes(16)])),
        (M.Role.MOVER, M.Freeze(5, BITMAP[:-1])), (M.Role.MOVER, M.Freeze(0, BITMAP)),
        (M.Role.MOVER, M.Adopt(5, BITMAP, b"")), (M.Role.MOVER, M.Finish(5, b"")),
    ],
    ids=lambda value: getattr(value, "name", type(value).__name__),
)  # fmt: skip
def test_a_worker_takes_them_from_whom_they_are_for(worker: WorkerThread, role: int, msg: Any) -> None:
    channel, _ = worker.hello(role)
    before = worker.loop.protocol_errors
    with pytest.raises(TransportError):
        channel.call(msg)
    wait_until(lambda: worker.loop.protocol_errors > before, "it counts")
    channel.close()
    assert worker.worker.stats()["shards"] == SHARD_COUNT and not worker.store.shard_words.fenced


@pytest.mark.parametrize(
    ("role", "msg"),
    [
        (M.Role.CLIENT, M.Freeze(5, BITMAP)), (M.Role.CLIENT, M.List(BITMAP, 0, 1)),
        (M.Role.MOVER, M.Adopt(5, BITMAP, BITMAP)), (M.Role.MOVER, M.Finish(5, BITMAP)),
        (M.Role.MOVER, M.Shards(0, b"", b"")), (M.Role.MOVER, M.List(b"", 0, 1)),
    ],
    ids=lambda value: getattr(value, "name", type(value).__name__),
)  # fmt: skip
def test_a_stream_takes_them_from_whom_they_are_for(stream: StreamThread, role: int, msg: Any) -> None:
    channel = stream.channel(role)
    before = stream.loop.protocol_errors
    with pytest.raises(TransportError):
        channel.call(msg)
    wait_until(lambda: stream.loop.protocol_errors > before, "it counts")
    channel.close()


def test_a_bad_bitmap_costs_its_sender_alone(worker: WorkerThread, stream: StreamThread) -> None:
    """It goes through the stream to the worker, whose session with the stream must not be the price."""
    put(worker, "one", MINE[:1])
    assert statuses(stream, MINE[:1]) == [Status.OK]
    session = stream.stream.keeper.session
    for msg in (M.Freeze(5, b"\x01"), M.Freeze(0, BITMAP), M.Freeze(1 << 63, BITMAP)):
        channel = stream.channel(M.Role.MOVER)
        with pytest.raises(TransportError):
            channel.call(msg)
        channel.close()
    assert statuses(stream, MINE[:1]) == [Status.OK] and stream.stream.keeper.session is session


# -- garbage ------------------------------------------------------------------------------------------


KINDS = [
    M.Shards, M.Freeze, M.Adopt, M.Finish, M.List, M.FetchPrevious, M.Exists, M.Locate, M.Frozen, M.Listed, M.Delete,
]  # fmt: skip


def garbage(rng: random.Random) -> bytes:
    """A frame of one of these messages: right, cut, damaged, or with bitmaps of the right size and anything inside."""
    kind = rng.choice(KINDS)
    msg = sample(kind, rng)
    if rng.random() < 0.5:
        bitmap = bitmap_of(rng.sample(range(SHARD_COUNT), rng.randint(0, 40)))
        msg = msg._replace(**{name: bitmap for name in ("shards", "fallback") if name in msg._fields})
    if isinstance(msg, M.List):
        msg = msg._replace(cursor=rng.choice([0, 1, 500, 1 << 31]))
    data = bytearray(encode(msg, rng.randint(1, 99)))
    what = rng.random()
    if what < 0.3 and len(data) > HEADER.size:
        del data[rng.randrange(HEADER.size, len(data)) :]
        data[20:24] = (len(data) - HEADER.size).to_bytes(4, "little")
    elif what < 0.6:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def talk(channel: Channel, data: bytes) -> None:
    """Say it and wait for an answer, or for the end."""
    with_end = data + encode(M.Ping(1), 1 << 40)
    try:
        channel.sock.sendall(with_end)
        channel.sock.shutdown(1)
        while channel.sock.recv(1 << 16):
            pass
    except OSError:
        pass
    channel.close()


@pytest.mark.parametrize("role", [M.Role.MOVER, M.Role.STREAM, M.Role.CLIENT])
def test_garbage_at_a_worker(worker: WorkerThread, role: int) -> None:
    rng = random.Random(f"worker {role}")
    for _ in range(120):
        channel, _ = worker.hello(role)
        talk(channel, garbage(rng))
    wait_until(lambda: len(worker.loop.peers) <= 2, "all are gone")  # the supervisor's, and the stream's
    assert worker.loop.handler_errors == 0
    with worker.frozen() as store:
        check(store)
    put(worker, "one", [MINE[0]])


def test_garbage_at_a_stream(worker: WorkerThread, stream: StreamThread) -> None:
    rng = random.Random("stream")
    for number in range(200):
        talk(stream.channel(M.Role.MOVER, hello=number % 10 != 0), garbage(rng))
    wait_until(lambda: not stream.loop.peers, "all are gone")
    assert stream.loop.handler_errors == 0 and worker.loop.handler_errors == 0
    with worker.frozen() as store:
        check(store)
    statuses(stream, MINE)


def test_the_garbage_is_of_every_kind() -> None:
    rng = random.Random(1)
    right = wrong = 0
    for _ in range(300):
        data = garbage(rng)
        opcode = int.from_bytes(data[6:8], "little")
        try:
            decode(Frame(opcode, 0, 0, 1, data[HEADER.size :]))
            right += 1
        except RemoteProtocolError:
            wrong += 1
    assert right > 50 and wrong > 50 and Stream.__doc__

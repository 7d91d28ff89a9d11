"""How a client holds pinned values: by pins, by versions, at previous owners, at second copies; what releases them."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from simm.arena.reader import ArenaReader
from simm.client import Client
from simm.constants import RANGES_MAX, SHARD_COUNT, VALUE_BYTES_MAX
from simm.errors import UsageError
from simm.host import buffers, fork_copies
from simm.ipc.counts import Word
from simm.ipc.session import WorkerSession
from simm.net.channel import Channel
from simm.sdk.ops.arena_pins import ArenaPins
from simm.sdk.ops.parts import Rows, runs_of
from simm.sdk.ops.pins import WAKE_KEYS, Pins
from simm.server.stream import Stream
from simm.server.stream_get import Leased, Leases
from simm.wire import messages as M
from simm.wire.messages import Status
from tests.support.cluster_clients import KEYS, full, published, value_of
from tests.support.fake_cluster import ALL, FakeCluster
from tests.support.waiting import wait_until

MIB = 1 << 20

pytestmark = pytest.mark.usefixtures("nothing_retired")


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(2) as made:
        yield made


@pytest.fixture(params=["shm", "tcp"])
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def read(pins: Pins) -> list[bytes | None]:
    """Return the values as they come, from their ends to their beginnings."""
    rooms = [bytearray(length or 1) for length in pins.lengths]
    parts = [[(len(room) // 2, len(room) - len(room) // 2, memoryview(room)[len(room) // 2 :]),
              (0, len(room) // 2 or 1, memoryview(room)[: len(room) // 2 or 1])][: 2 if len(room) > 1 else 1]
             for room in rooms]  # fmt: skip
    got = pins.get_ranges_many(range(len(pins)), parts)
    return [None if length is None else bytes(room) for room, length in zip(rooms, got)]


def pinned(cluster: FakeCluster, number: int = 0) -> int:
    """Return the number of pins at a node."""
    with cluster.nodes[number].worker.frozen() as store:
        return int(store.stats()["pins"])


def session_of(client: Client) -> WorkerSession:
    """Return the session with the node that has everything."""
    target = client._routes.target(bytes(16))
    assert target is not None and target.session is not None
    return target.session


def scarce(cluster: FakeCluster) -> None:
    """Leave room for few pins."""
    for node in cluster.nodes:
        with node.worker.frozen() as store:
            store.sessions.pinned_bytes_max = 10 * 1024


def reuse_chunks(client: Client) -> None:
    """Store values of the same sizes, until all chunks of the old ones are others'."""
    for turn in range(40):
        client.put_many([f"other {turn} {number}" for number in range(60)], [value_of("zz", turn)] * 60)
        client.delete_many([f"other {turn} {number}" for number in range(60)])


VALUES = [value_of(key) for key in KEYS]


def test_what_finds_no_room_is_held_by_its_version(cluster: FakeCluster, path: str) -> None:
    client = full(cluster, path)
    scarce(cluster)
    with client.pin([*KEYS, "no"]) as pins:
        assert 0 < pinned(cluster) < len(KEYS)
        assert read(pins) == [*VALUES, None]
        assert client.put_many(KEYS, [value_of(key, 1) for key in KEYS]) == [True] * len(KEYS)
        got = read(pins)
        assert all(value in (None, old) for value, old in zip(got, VALUES))
        assert 0 < got.count(None) - 1 < len(KEYS), "those with a pin stay, the others are gone"
        assert read(pins) == got
    wait_until(lambda: pinned(cluster) == 0, "the pins are released")


def test_mutation_without_the_second_look_other_bytes_come(
    cluster: FakeCluster, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ArenaReader, "confirm_previous", lambda *_: True)
    client = full(cluster, path)
    scarce(cluster)
    with client.pin(KEYS) as pins:
        assert client.delete_many(KEYS) == [True] * len(KEYS)
        reuse_chunks(client)
        assert any(value not in (None, old) for value, old in zip(read(pins), VALUES))


def test_mutation_without_pins_other_bytes_come(
    cluster: FakeCluster, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it is the pins that keep the bytes, and the tests would see it if they did not."""

    def pins_nothing(self: Any, session: Any, numbers: list[int], ends: Iterator[Any]) -> None:
        for number in numbers:
            session.unpin_later(number)
        session.flush_unpins()
        next(ends)()

    monkeypatch.setattr(ArenaPins, "take_pins", pins_nothing)
    monkeypatch.setattr(Leases, "_pin", lambda *_: None)
    monkeypatch.setattr(Leased, "is_whole", lambda _: True)
    client = full(cluster, path)
    with client.pin(KEYS) as pins:
        assert client.delete_many(KEYS) == [True] * len(KEYS)
        reuse_chunks(client)
        assert any(value not in (None, old) for value, old in zip(read(pins), VALUES))


def test_pins_keep_the_bytes(cluster: FakeCluster, path: str) -> None:
    client = full(cluster, path)
    with client.pin(KEYS) as pins:
        assert client.delete_many(KEYS) == [True] * len(KEYS)
        reuse_chunks(client)
        assert read(pins) == VALUES
    wait_until(lambda: pinned(cluster) == 0, "the pins are released")


def test_while_shards_move_values_are_held_where_they_are(cluster: FakeCluster, path: str) -> None:
    client = full(cluster, path)
    with client.pin(KEYS) as before:
        cluster.own({1: ALL}, previous=0)
        cluster.instruct()
        cluster.nodes[1].adopt(cluster.epoch, ALL)
        published(cluster, client)
        assert client.put("k0", value_of("k0", 1)) and client.delete("k1")
        wanted = [value_of("k0", 1), None, *VALUES[2:]]
        with client.pin(KEYS) as during:
            assert read(during) == wanted
            assert pinned(cluster, 0) == 2 * len(KEYS) - 2 and pinned(cluster, 1) == 1
            cluster.nodes[1].finish(cluster.epoch, ALL)
            cluster.forget_previous()
            cluster.instruct()
            published(cluster, client)
            assert read(before) == VALUES and read(during) == wanted
            with client.pin(KEYS[:2]) as after:
                assert read(after) == wanted[:2]
    for number in range(2):
        wait_until(lambda: pinned(cluster, number) == 0, "the pins are released")  # noqa: B023


def test_with_an_old_map_values_are_found_at_the_new_owner(cluster: FakeCluster, path: str) -> None:
    client = full(cluster, path)
    new = cluster.client(path)
    cluster.own({1: ALL})
    cluster.instruct()
    assert client.pin(KEYS[:3]).lengths == [None] * 3, "the client does not know the new owner"
    published(cluster, client)
    published(cluster, new)
    assert new.put("k0", value_of("k0", 2))
    with client.pin(["k0"]) as pins:
        assert read(pins) == [value_of("k0", 2)]


def test_a_second_copy_is_held_when_the_first_is_away(cluster: FakeCluster, path: str) -> None:
    cluster.settled({0: ALL[::2], 1: ALL[1::2]})
    client = cluster.client(path, replicas=2)
    assert client.put_many(KEYS, VALUES) == [True] * len(KEYS)
    cluster.nodes[0].die()
    wanted = client.get_many(KEYS)
    assert wanted.count(None) < 10, "some have no candidate for a second copy at the other node"
    with client.pin([*KEYS, "no"]) as pins:
        assert read(pins) == [*wanted, None]


@pytest.mark.parametrize("checksum", [False, True])
def test_a_value_with_a_wrong_checksum_is_a_miss(cluster: FakeCluster, path: str, checksum: bool) -> None:
    client = full(cluster, path, checksum=True)
    reader = cluster.client(path, checksum=checksum)
    arena = ArenaReader(cluster.nodes[0].worker.segment.name)
    found = arena.locate(client.digest("k1"))
    assert found is not None
    arena.data[found.offset - arena.data_offset] ^= 1
    with reader.pin(["k0", "k1"]) as pins:
        got = read(pins)
        assert got[0] == VALUES[0] and (got[1] is None) == checksum
    scarce(cluster)
    with reader.pin(KEYS) as pins:
        got = read(pins)
        assert got[2:] == VALUES[2:] and (got[1] is None) == checksum


def test_issue_each_read_of_a_pinned_value_is_checked(cluster: FakeCluster, path: str) -> None:
    """A store into the arena after the pin: a client with checksums on its host got wrong bytes as a hit."""
    client = full(cluster, path, checksum=True)
    arena = ArenaReader(cluster.nodes[0].worker.segment.name)
    with client.pin([*KEYS, "no"]) as pins:
        assert read(pins) == [*VALUES, None]
        for number in (1, 2):
            found = arena.locate(client.digest(KEYS[number]))
            assert found is not None
            arena.data[found.offset - arena.data_offset] ^= 1
        rows = np.zeros((len(pins), 1), np.uint8)
        got = pins.read([(0, 1, rows)])
        assert got == [len(VALUES[0]), None, None, *map(len, VALUES[3:]), None]
        assert rows[:, 0].tolist() == [VALUES[0][0], 0, 0, *(value[0] for value in VALUES[3:]), 0]
        assert read(pins) == [VALUES[0], None, None, *VALUES[3:], None]
    assert client.counters["crc_errors"] >= 2


@pytest.mark.parametrize("length", [0, VALUE_BYTES_MAX + 1, (1 << 32) - 1])
def test_issue_a_length_that_no_value_has_is_not_believed(
    cluster: FakeCluster, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller makes room for it, and a client with checksums would make 4 GiB."""
    client = full(cluster, "tcp", checksum=True)
    take = Leases.take

    def lie(self: Leases, *given: Any, **named: Any) -> Any:
        return [(entry[0], entry[1], length, *entry[3:]) for entry in take(self, *given, **named)]

    monkeypatch.setattr(Leases, "take", lie)
    with client.pin(KEYS) as pins:
        assert pins.lengths == [None] * len(KEYS)
    monkeypatch.undo()
    with client.pin(KEYS) as pins:
        assert read(pins) == VALUES


def test_an_entry_with_a_flag_of_later_versions_is_not_pinned(cluster: FakeCluster, path: str) -> None:
    """Nobody here knows what it means, and a pin would outlast it."""
    client = full(cluster, path)
    session = cluster.nodes[0].worker.session(ring=False)
    (grant, *_), *_ = session.exchange(M.Grant([(9, 1)])).grants
    digest = client.digest("k0")
    assert session.exchange(M.Commit([(digest, grant, 9, 0, 1 << 9, 0)], [])).statuses == [Status.OK]
    session.close()
    with client.pin(["k0", "k1"]) as pins:
        assert pins.lengths == [None, len(VALUES[1])]


def test_what_nothing_refers_to_is_released(cluster: FakeCluster, path: str) -> None:
    client = full(cluster, path)
    pins = client.pin(KEYS)
    assert read(pins) == VALUES and pinned(cluster) == len(KEYS)
    del pins
    gc.collect()
    wait_until(lambda: pinned(cluster) == 0, "the pins are released")
    with client.pin(KEYS):
        client.close()
        wait_until(lambda: pinned(cluster) == 0, "the pins end with the client")


def test_a_lease_connection_is_used_again(cluster: FakeCluster) -> None:
    client = full(cluster, "tcp")
    stream = cluster.nodes[0].stream
    before = len(stream.loop.peers)
    for _ in range(20):
        with client.pin(KEYS) as pins:
            assert read(pins) == VALUES
    assert len(stream.loop.peers) <= before + 1
    assert stream.stream.leases.keys == stream.stream.leases.bytes == 0


@pytest.mark.parametrize("threads", [1, 4])
def test_threads_share_a_layer(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    """A layer of many pages is as much as a large value, and its pieces are small."""
    real, runs = buffers.POOL.run, []
    monkeypatch.setattr(buffers.POOL, "run", lambda *each: (runs.append(each[1]), real(*each))[1])
    layer, layers, pages = 64 << 10, 3, 96
    rng = random.Random(4)
    values = {f"page {number}": rng.randbytes(layer * layers) for number in range(pages)}
    with FakeCluster(2, size=64 * MIB) as cluster:
        cluster.settled({0: range(0, SHARD_COUNT, 2), 1: range(1, SHARD_COUNT, 2)})
        client = cluster.client("shm", copy_threads=threads)
        assert all(client.put_many(list(values), list(values.values())))
        keys = [*values, "absent"]
        with client.pin(keys) as pins:
            assert pins.lengths == [layer * layers] * pages + [None]
            for number in range(layers):
                rows = np.zeros((len(keys), layer), np.uint8)
                runs.clear()
                assert pins.read([(number * layer, layer, rows)]) == pins.lengths
                assert len(runs) == (threads > 1)
                wanted = [value[number * layer : (number + 1) * layer] for value in values.values()]
                assert [bytes(row) for row in rows] == [*wanted, bytes(layer)]
                rooms = [bytearray(layer) for _ in values]
                runs.clear()
                ranges = [[(number * layer, layer, room)] for room in rooms]
                assert pins.get_ranges_many(list(values), ranges) == [layer * layers] * pages
                assert rooms == wanted
                assert len(runs) == (2 if threads > 1 else 0), "one for each arena"


def test_many_pins_that_are_released_wake_the_thread_that_says_so(cluster: FakeCluster) -> None:
    """So the next pins need not wait for the worker's work on them."""
    cluster.settled({0: ALL})
    client = cluster.client("shm")
    keys = [f"k{number}" for number in range(WAKE_KEYS)]
    assert all(client.put_many(keys, [b"value"] * len(keys)))
    woken: list[bool] = []
    real = client._routes.wake
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(client._routes), "wake", lambda _: (woken.append(True), real())[1])
        for count, wanted in ((WAKE_KEYS - 1, 0), (WAKE_KEYS, 1)):
            pins = client.pin(keys[:count])
            pins.release()
            assert len(woken) == wanted
            pins.release()
            assert len(woken) == wanted, "nothing was left"
        wait_until(lambda: not pinned(cluster), "all pins are released")


def test_rows_of_a_table_are_gathered_by_one_copy(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those whose places in the arena are whole rows apart; others are copied one by one, to the same effect."""
    cluster.settled({0: ALL})
    client = cluster.client("shm", copy_threads=1)
    singly: list[int] = []
    real = client._copier.copy_equal
    monkeypatch.setattr(client._copier, "copy_equal", lambda *each: (singly.append(each[2]), real(*each))[1])
    rng = random.Random(2)
    cases = ((512, 4096, True), (500, 4096, False), (512, 1 << 16, True), (32_768, 1 << 17, False))
    for length, whole, gathered in cases:
        values = {f"{length} {whole} {number}": rng.randbytes(whole) for number in range(20)}
        assert all(client.put_many(list(values), list(values.values())))
        with client.pin(list(values)) as pins:
            for offset in (0, length, 77):
                rows = np.zeros((20, length), np.uint8)
                singly.clear()
                assert pins.read([(offset, length, rows)]) == [whole] * 20
                assert [row.tobytes() for row in rows] == [value[offset:][:length] for value in values.values()]
                assert singly == ([] if gathered else [length])


def test_a_layer_by_tcp_is_received_at_once(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows without gaps go to the caller's array by one call, others by way of memory of their own."""
    cluster.settled({0: ALL})
    client = cluster.client("tcp")
    keys, whole = [f"page {number}" for number in range(40)], 64 << 10
    values = [random.Random(number).randbytes(whole) for number in range(40)]
    assert client.put_many(keys, values) == [True] * 40
    calls: list[int] = []
    receive = Channel.receive_bulk
    monkeypatch.setattr(
        Channel, "receive_bulk", lambda channel, view: (calls.append(len(view)), receive(channel, view))[1]
    )
    room = np.zeros((40, 2, 8192), np.uint8)
    plain, lists = np.zeros((40, 8192), np.uint8), [np.zeros(8192, np.uint8) for _ in keys]
    with client.pin(keys) as pins, client.pin([*keys[:20], "no", *keys[20:39]]) as some:
        for rows, count in ((plain, 1), (room[:, 1], 1), (lists, 1), (list(plain), 1)):
            calls.clear()
            assert pins.read([(9, 8192, rows)]) == [whole] * 40
            assert [bytes(row) for row in rows] == [value[9 : 9 + 8192] for value in values]
            assert calls == [40 * 8192] * count
        assert not room[:, 0].any()
        assert pins.read([(0, 8192, room[:, 0]), (whole - 8192, 8192, room[:, 1])]) == [whole] * 40
        assert [row.tobytes() for row in room] == [value[:8192] + value[-8192:] for value in values]
        plain[:] = 7
        assert some.read([(5, 100, plain)]) == [whole] * 20 + [None] + [whole] * 19
        wanted = [*values[:20], bytes([7]) * whole, *values[20:39]]
        assert [row[:100].tobytes() for row in plain] == [value[5:105] for value in wanted]
        assert (plain[:, 100:] == 7).all()
        with pytest.raises(UsageError, match="ends at byte"):
            pins.read([(whole - 8191, 8192, plain)])


@pytest.mark.parametrize(
    "answer",
    [
        M.Fetched([]), M.Fetched([(Status.OK, 0, 99, 0)] * 3), M.Fetched([(Status.OK, 0, 1 << 31, 0)] * 3),
        M.Fetched([(Status.OK, 0, 100, 0)] * 2), M.Done(1),
    ],
)  # fmt: skip
def test_a_layer_that_does_not_fit_what_was_asked(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, answer: Any
) -> None:
    """The exchange fails before a byte of it is taken for a value, and the values are misses."""
    cluster.settled({0: ALL})
    client = cluster.client("tcp")
    assert client.put_many(["a", "b", "c"], [bytes(100)] * 3) == [True] * 3
    with client.pin(["a", "b", "c"]) as pins:
        monkeypatch.setattr(
            Stream, "_fetch_pinned", lambda _self, peer, _state, number, _msg: peer.send_message(answer, number)
        )
        rows = np.full((3, 100), 7, np.uint8)
        assert pins.read([(0, 100, rows)]) == [None] * 3
        assert (rows == 7).all()
        assert client.stats()["outages"] > 0


def test_issue_more_ranges_than_a_message_has_are_read_one_part_after_the_other(
    cluster: FakeCluster, path: str
) -> None:
    """By TCP it raised LocalProtocolError, and all that the server had pinned was gone."""
    client = full(cluster, path)
    count = 2 * RANGES_MAX + 1
    wanted = [[value[at % 100] for at in range(count)] for value in VALUES[:2]]
    with client.pin([KEYS[0], "missing", KEYS[1]]) as pins:
        assert pins.lengths == [len(VALUES[0]), None, len(VALUES[1])]
        rows = np.full((3, count), 7, np.uint8)
        assert pins.read([(at % 100, 1, rows[:, at : at + 1]) for at in range(count)]) == pins.lengths
        assert rows[::2].tolist() == wanted and (rows[1] == 7).all()
        lists = [[bytearray(1) for _ in range(3)] for _ in range(count)]
        assert pins.read([(at % 100, 1, buffers) for at, buffers in enumerate(lists)]) == pins.lengths
        assert [[buffers[number][0] for buffers in lists] for number in (0, 2)] == wanted
        with pytest.raises(UsageError, match="ends at byte"):  # before anything is read
            rows[:] = 7
            pins.read([(0 if at else 1 << 20, 1, rows[:, at : at + 1]) for at in range(count)])
        assert (rows == 7).all()


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_value_that_is_gone_before_all_of_its_ranges_are_read_is_a_miss(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, gone: int
) -> None:
    client = full(cluster, "tcp")
    rows = np.zeros((2, 2 * RANGES_MAX + 1), np.uint8)
    with client.pin(KEYS[:2]) as pins:
        plain, runs = pins._read_run, []

        def read_run(ranges: Any, numbers: Sequence[int]) -> list[int | None]:
            got = plain(ranges, numbers)
            assert list(numbers) == ([0, 1] if len(runs) <= gone else [1]), "what is gone is not read again"
            runs.append(len(ranges))
            return [None, got[1]] if len(runs) == gone + 1 else got

        monkeypatch.setattr(pins, "_read_run", read_run)
        ranges = [(0, 1, rows[:, at : at + 1]) for at in range(rows.shape[1])]
        assert pins.read(ranges) == [None, len(VALUES[1])]
        assert runs == [RANGES_MAX, RANGES_MAX, 1]


def test_runs_of_ranges_have_what_a_message_may_ask_for() -> None:
    """Also together: each may be as large as a value."""
    half = VALUE_BYTES_MAX // 2
    for sizes, wanted in (
        ([1], [1]), ([half] * 3, [3]), ([1] * RANGES_MAX, [RANGES_MAX]), ([1] * (RANGES_MAX + 1), [RANGES_MAX, 1]),
        ([half] * 3 + [1] * RANGES_MAX, [2, RANGES_MAX, 1]), ([2 * half] * (RANGES_MAX + 1), [1] * (RANGES_MAX + 1)),
    ):  # fmt: skip
        rows = [Rows(0, size, [], None, None) for size in sizes]
        runs = [*runs_of(rows)]
        assert [len(run) for run in runs] == wanted
        assert [each for run in runs for each in run] == rows


def test_layers_of_what_is_held_by_its_version_alone(cluster: FakeCluster, path: str) -> None:
    """A value that has changed is a miss of the layer, and no other is."""
    client = full(cluster, path)
    scarce(cluster)
    length = min(map(len, VALUES))
    with client.pin(KEYS) as pins:
        rows = np.zeros((len(KEYS), length), np.uint8)
        assert None not in pins.read([(0, length, rows)])
        assert client.put_many(KEYS, [value_of(key, 1) for key in KEYS]) == [True] * len(KEYS)
        for _ in range(2):
            rows[:] = 0
            got = pins.read([(0, length, rows)])
            assert 0 < got.count(None) < len(KEYS)
            for row, value, there in zip(rows, VALUES, got):
                assert there is None or row.tobytes() == value[:length]


def test_a_view_beyond_the_share_of_pins_is_a_copy(cluster: FakeCluster) -> None:
    client = full(cluster, "shm")
    scarce(cluster)
    views = [client.view(key) for key in KEYS]
    assert 0 < pinned(cluster) < len(KEYS)
    assert [bytes(each) for each in views] == VALUES
    other = client.view(KEYS[-1])
    assert bytes(other) == VALUES[-1] and not client.view("no")
    reader = session_of(client).reader
    assert reader.counts[Word.ABSENT] == 1, "the one that is not stored"
    assert reader.counts[Word.UNREACHABLE] == 0
    for each in [*views, other]:
        each.close()
    del views, other


def test_a_value_that_keeps_changing_and_finds_no_pin_is_no_absent_one(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = full(cluster, "shm")
    scarce(cluster)
    views = [client.view(key) for key in KEYS]
    reader = session_of(client).reader
    absent = reader.counts[Word.ABSENT]
    monkeypatch.setattr(ArenaReader, "confirm", lambda *_: False)
    assert client.get(KEYS[-1]) is None and not client.view(KEYS[-1])
    assert reader.counts[Word.ABSENT] == absent and reader.counts[Word.UNREACHABLE] == 2
    monkeypatch.undo()
    for each in views:
        each.close()


@pytest.mark.parametrize("lent", [False, True])
def test_an_exception_as_a_view_is_made_ends_its_copy_once(
    cluster: FakeCluster, lent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another view of the session keeps its own."""
    client = full(cluster, "shm")
    session = session_of(client)
    other = client.view(KEYS[0])
    assert len(session.copying) == 1
    lend = fork_copies.lend

    def interrupted(*arguments: Any) -> None:
        if lent:
            lend(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(fork_copies, "lend", interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.view(KEYS[1])
    monkeypatch.undo()
    gc.collect()
    assert len(session.copying) == 1
    session.flush_unpins()
    assert pinned(cluster) == 1, "the other one's"
    other.close()
    del other
    assert not session.copying

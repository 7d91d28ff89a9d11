"""The stream and its replays over real ZMQ: late and slow consumers, snapshots, restarts, two consumers, both forms."""

from __future__ import annotations

import contextlib
import itertools
import socket
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

msgspec = pytest.importorskip("msgspec", reason="the extra simm-store[index] is not installed")
zmq = pytest.importorskip("zmq", reason="the extra simm-store[index] is not installed")
pytest.importorskip("xxhash", reason="the extra simm-store[index] is not installed")

from simm.errors import SimmError  # noqa: E402
from simm.index.blocks import Blocks  # noqa: E402
from simm.index.publish import messages, zmtp  # noqa: E402
from simm.index.publish import outlet as outlet_module  # noqa: E402
from simm.index.publish.claims import Delta  # noqa: E402
from simm.index.publish.outlet import Outlet  # noqa: E402
from simm.index.publishers import Publishers  # noqa: E402
from simm.index.sources import Registration, Source  # noqa: E402
from simm.index.streams import Stream  # noqa: E402
from simm.net.loop import Loop  # noqa: E402
from tests.support.waiting import wait_until  # noqa: E402


class Store:
    """What a host has, and its outlet, which the test drives."""

    def __init__(self, folder: Path, form: str = "rfc1527") -> None:
        self.has: set[int] = set()
        self.context = zmq.Context()
        self.loop = Loop()
        self.form = form
        self.at = f"ipc://{folder}/stream", f"ipc://{folder}/replay"
        self.outlet = self.open()
        self.now = 0.0

    def open(self) -> Outlet:
        return Outlet(self.loop, self.form, *self.at, "host-7", self.everything)

    def turn(self) -> None:
        """Do what the publisher's process does again and again."""
        self.loop.run_once(0.001)
        self.now += 0.01
        self.outlet.publish([], self.now)
        self.outlet.answer()

    def everything(self) -> list[Delta]:
        return [Delta(True, "default", np.array(sorted(self.has), np.uint64))] if self.has else []

    def change(self, stored: bool, *names: int, lost: bool = False) -> None:
        self.has = self.has | set(names) if stored else self.has - set(names)
        deltas = [Delta(stored, "default", np.array(names, np.uint64))]
        if lost:  # on its way to every consumer
            (raw,) = outlet_module.messages(self.form, deltas, "host-7")
            self.outlet._send(raw)
            for peer in self.outlet.stream.peers:
                peer.cursor = self.outlet.number
        else:
            self.outlet.publish(deltas, self.now)

    def restart(self) -> None:
        self.outlet.close()
        self.outlet = self.open()

    def close(self) -> None:
        self.outlet.close()
        self.loop.close()
        self.context.destroy(0)


class Index:
    """A consumer."""

    def __init__(self, store: Store) -> None:
        self.blocks = Blocks()
        self.publishers = Publishers(self.blocks)
        self.source: Source = self.publishers.register(
            Registration("pool", "m", "simm", endpoint=store.at[0], replay=store.at[1], pool="p")
        )

    @property
    def stream(self) -> Stream | None:
        return self.publishers.stream(self.source)

    def names(self) -> set[int]:
        return known(self.blocks, self.source)

    def complete(self) -> bool:
        stream = self.stream
        return stream is not None and stream.complete and not self.source.stale and not self.source.lost


def known(blocks: Blocks, source: Source) -> set[int]:
    with blocks.lock:
        held = blocks.held(1 << 30)
        return {key for holder, keys, _ in held if holder.source is source for key in keys.tolist()}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Consumers wait for this thread, which is the outlet's, as long as a busy machine takes."""
    monkeypatch.setattr("simm.index.publishers.REPLAY_IDLE_S", 60.0)
    monkeypatch.setattr("simm.index.publishers.SILENT_MS", 60_000)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path)
    yield made
    made.close()


@contextlib.contextmanager
def indexes(store: Store, count: int) -> Iterator[list[Index]]:
    with contextlib.ExitStack() as stack:
        made = []
        for _ in range(count):
            made.append(Index(store))
            stack.callback(made[-1].publishers.close)
        yield made


def same(store: Store, made: list[Index], what: str) -> None:
    """Wait until all indexes are complete and have what the store has."""

    def done() -> bool:
        store.turn()
        return all(each.complete() and each.names() == store.has for each in made)

    wait_until(done, what)


def test_two_indexes_are_each_complete_by_themselves(store: Store) -> None:
    store.change(True, *range(100))
    with indexes(store, 1) as first:
        with indexes(store, 1) as second:
            same(store, first + second, "what was there before them")
            store.change(True, *range(1000, 1100))
            store.change(False, *range(50))
            same(store, first + second, "what has changed")
        store.change(True, 7)  # the other one needs nobody
        same(store, first, "what came after one has ended")
        with indexes(store, 1) as later:
            same(store, first + later, "one that begins later")


def test_a_lost_message_is_replayed(store: Store) -> None:
    store.change(True, 1, 2, 3)
    with indexes(store, 1) as made:
        same(store, made, "the beginning")
        store.change(False, 2, lost=True)
        store.change(True, 4)
        same(store, made, "what was lost")
        assert store.outlet.snapshots == 1 and made[0].stream is not None and made[0].stream.counts["gaps"] == 1


@pytest.mark.parametrize("blocks", [5, 50])
def test_more_was_lost_than_is_kept(store: Store, monkeypatch: pytest.MonkeyPatch, blocks: int) -> None:
    """The consumer has seen numbers beyond those that the snapshot's messages would have: it skips none of them."""
    monkeypatch.setattr("simm.index.publish.outlet.KEPT_MESSAGES", 3)
    monkeypatch.setattr("simm.index.publish.messages.BLOCKS", 5)
    store.change(True, *range(blocks))
    with indexes(store, 1) as made:
        same(store, made, "the beginning")
        for name in range(4):
            store.change(False, name, lost=True)
            while len(store.outlet._kept) > 3:
                store.outlet._kept.popleft()
        store.change(True, 1000)
        same(store, made, "a snapshot")
        assert store.outlet.snapshots >= 2


def test_without_higher_numbers_a_snapshot_is_taken_wrong(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The positive control of the test before: numbers that were seen are skipped, and what has gone stays."""
    monkeypatch.setattr("simm.index.publish.outlet.KEPT_MESSAGES", 3)
    monkeypatch.setattr("simm.index.publish.messages.BLOCKS", 5)
    real = Outlet._taken
    monkeypatch.setattr(Outlet, "_taken", lambda self, start: real(self, self.number))
    store.change(True, *range(50))
    with indexes(store, 1) as made:
        same(store, made, "the beginning")
        for name in range(4):
            store.change(False, name, lost=True)
            while len(store.outlet._kept) > 3:
                store.outlet._kept.popleft()
        store.outlet._snapshot = None
        before = store.outlet.replays
        store.change(True, 1000)

        def answered() -> bool:
            store.turn()
            return store.outlet.replays > before and not made[0].source.stale and 1000 in made[0].names()

        wait_until(answered, "the answer")
        assert made[0].names() != store.has


def _answers(store: Store, start: int) -> Iterator[tuple[int, bytes]]:
    """Yield the answer to a replay's question, but for its end."""
    peer: Any = SimpleNamespace(snapshot=None)
    for part in store.outlet._answers(peer, start):
        assert part is not None, "there is no pause between snapshots"
        if part[0] != outlet_module._END:
            yield int.from_bytes(part[0], "big"), part[1]


def _idle(store: Store, count: int) -> None:
    for _ in range(count):
        store.outlet._send(outlet_module.message([]))


@pytest.fixture
def in_parts(store: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Return a store with 40 values, whose snapshot is eleven messages, after some others."""
    monkeypatch.setattr("simm.index.publish.messages.BLOCKS", 4)
    monkeypatch.setattr("simm.index.publish.outlet.SNAPSHOT_PAUSE", 0.0)
    store.change(True, *range(40))
    _idle(store, 30)
    return store


@pytest.mark.parametrize("parts", [1, 5, 10])
def test_a_snapshot_that_breaks_off_is_begun_again(in_parts: Store, parts: int) -> None:
    """The kept messages of its numbers were sent instead of its rest, and the consumer took that for everything."""
    blocks = Blocks()
    source = blocks.register(Registration("pool", "m", "simm", pool="p"))
    stream = Stream(blocks, source, replays=True)
    start = stream.connected()
    assert start == 0
    for each in itertools.islice(_answers(in_parts, start), parts):
        stream.replayed(*each)
    stream.replay_failed()
    assert source.stale and len(known(blocks, source)) == 4 * (parts - 1)
    in_parts.change(False, 1)
    in_parts.change(True, 1000)
    again = stream.retry()
    assert again is not None
    for each in _answers(in_parts, again):
        stream.replayed(*each)
    stream.replay_ended()
    assert known(blocks, source) == in_parts.has
    assert stream.complete and not source.stale and not source.lost and stream.retry() is None


def test_only_for_numbers_of_snapshots_there_is_another_one(in_parts: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    outlet = in_parts.outlet
    numbers = [number for number, _ in _answers(in_parts, 0)]
    assert len(numbers) == 11 and numbers[-1] == outlet.number - 1
    _idle(in_parts, 5)
    for start in (numbers[0] - 1, numbers[-1] + 1):
        assert [number for number, _ in _answers(in_parts, start)] == list(range(start, outlet.number))
    assert outlet.snapshots == 1
    for start in numbers:
        first, raw = next(_answers(in_parts, start))
        assert first >= start and msgspec.msgpack.decode(raw)[1] == [{"event_type": "cleared"}]
    assert len(outlet._twice) == 1, "they overlap"
    monkeypatch.setattr("simm.index.publish.outlet.KEPT_MESSAGES", 3)
    _idle(in_parts, 4)
    assert not outlet._twice


def test_who_has_read_a_snapshot_gets_none_for_those_of_others(in_parts: Store) -> None:
    outlet = in_parts.outlet
    slow = _answers(in_parts, 0)
    seen = [next(slow)[0]]
    _idle(in_parts, 5)
    list(_answers(in_parts, seen[0] + 9))
    ((ours, theirs),) = outlet._twice
    assert ours == seen[0] and theirs > ours + 11, "another snapshot's numbers begin before the end of this one's"
    seen += [number for number, _ in slow]
    assert seen == list(range(ours, outlet.number)) and outlet.snapshots == 2


def test_who_reads_what_is_behind_a_snapshot_does_not_hold_it(in_parts: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such peers are not counted among those that read one, and each of them kept its own in memory."""

    class Messages(list[bytes]):
        """A list that has weak references."""

    made: list[weakref.ref[Messages]] = []

    def snapshot(*about: Any) -> Messages:
        found = Messages(messages.snapshot(*about))
        made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(outlet_module, "snapshot", snapshot)
    start, feeds = 0, []
    for _ in range(4):
        feed = _answers(in_parts, start)
        next(feed)
        assert in_parts.outlet._snapshot is not None
        start = in_parts.outlet._snapshot[0]  # another one is taken for who asks for this number
        _idle(in_parts, 2)
        while next(feed)[0] <= start:
            pass
        feeds.append(feed)
    assert len(made) == 4 and [each() is not None for each in made] == [False, False, False, True], "the kept one"
    assert all(next(feed)[0] for feed in feeds), "the control: all of them go on"


def test_a_publisher_that_is_restarted(store: Store) -> None:
    store.change(True, *range(20))
    with indexes(store, 2) as made:
        same(store, made, "the beginning")
        store.has = {5, 500}
        store.restart()
        same(store, made, "what the new one says")


@pytest.mark.full
def test_a_replay_that_fails_is_asked_for_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simm.index.publishers.REPLAY_IDLE_S", 0.2)
    monkeypatch.setattr("simm.index.publishers.RETRY_S", 0.1)
    store.change(True, 1, 2, 3)
    with indexes(store, 1) as made:
        same(store, made, "the beginning")
        store.change(False, 2, lost=True)
        store.change(True, 4)
        index = made[0]
        wait_until(lambda: index.source.lost, "a replay that nobody answers")  # what may be wrong is forgotten
        assert 2 not in index.names()
        same(store, made, "all of it again")


def test_snapshots_are_shared(store: Store) -> None:
    store.change(True, *range(100))
    with indexes(store, 5) as made:
        same(store, made, "all of them")
        assert store.outlet.replays >= 5 and store.outlet.snapshots == 1


def test_the_form_of_vllm(tmp_path: Path) -> None:
    store = Store(tmp_path, "vllm")
    try:
        sub = store.context.socket(zmq.SUB)
        sub.subscribe(b"kv@")
        sub.connect(store.at[0])
        seen: list[Any] = []

        def told() -> bool:
            store.turn()
            store.change(True, 1, 2)
            store.change(False, 2)
            while sub.poll(10):
                topic, _, raw = sub.recv_multipart()
                assert topic == b"kv@host-7@simm"
                seen.extend(msgspec.msgpack.decode(raw)[1])
            return len(seen) >= 2

        wait_until(told, "events")
        stored = next(each for each in seen if each["type"] == "BlockStored")
        assert stored == {
            "type": "BlockStored", "block_hashes": [1, 2], "parent_block_hash": None, "token_ids": [], "block_size": 1,
            "lora_id": None, "medium": "STORAGE", "locality": "LOCAL", "ownership": "simm",
        }  # fmt: skip
        removed = next(each for each in seen if each["type"] == "BlockRemoved")
        assert removed["block_hashes"] == [2] and removed["medium"] == "STORAGE"
        sub.close(0)
    finally:
        store.close()


def _answer(path: str, start: int, turn: Callable[[], object]) -> bytes:
    """Return all bytes behind the handshake that a ROUTER answers to a replay's question, up to the last answer."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)
        sock.setblocking(False)
        found = bytearray()

        def has(count: int) -> bool:
            turn()
            with contextlib.suppress(BlockingIOError):
                found.extend(sock.recv(1 << 20))
            return len(found) >= count

        # ZMQ's library wants the peer's greeting before all else.
        sock.sendall(zmtp.GREETING)
        wait_until(lambda: has(zmtp.GREETING_BYTES + 2), "the greeting, and READY's flags and length")
        sock.sendall(zmtp.ready("DEALER"))
        begin = zmtp.GREETING_BYTES + 2 + found[zmtp.GREETING_BYTES + 1]
        wait_until(lambda: has(begin), "READY")
        assert found[zmtp.GREETING_BYTES] == 4 and len(found) == begin
        sock.sendall(zmtp.frames(b"", start.to_bytes(8, "big")))
        end = b"\x01\x08" + b"\xff" * 8 + b"\x00\x00"
        wait_until(lambda: has(begin) and found.endswith(end), "the last answer")
        return bytes(found[begin:])


@pytest.mark.parametrize("form", ["vllm", "rfc1527"])
def test_a_replay_has_the_bytes_of_an_engines(tmp_path: Path, form: str) -> None:
    """An engine's ROUTER, as of vLLM 0.32 and SGLang 0.5.23, or as of older ones without the topic."""
    store = Store(tmp_path, form)
    theirs = store.context.socket(zmq.ROUTER)
    try:
        store.change(True, *range(3))
        store.change(True, *range(1 << 60, (1 << 60) + 100))  # a message whose length has 8 bytes
        kept = list(store.outlet._kept)
        assert len(kept) == 3 and len(kept[1]) < 256 < len(kept[2])
        first = store.outlet.number - len(kept)
        topic = [b"kv@host-7@simm"] if form == "vllm" else []
        empty = [b""] if form == "vllm" else []
        theirs.bind(f"ipc://{tmp_path}/theirs")

        def serve() -> None:
            if theirs.poll(1):
                peer, _, start = theirs.recv_multipart()
                for number, raw in enumerate(kept, first):
                    if number >= int.from_bytes(start, "big"):
                        theirs.send_multipart([peer, b"", *topic, number.to_bytes(8, "big"), raw])
                theirs.send_multipart([peer, b"", *empty, b"\xff" * 8, b""])

        for start in range(first, first + 3):
            ours = _answer(store.at[1].removeprefix("ipc://"), start, lambda: store.loop.run_once(0.001))
            assert ours == _answer(f"{tmp_path}/theirs", start, serve)
        number = (first + 2).to_bytes(8, "big")
        before = b"\x01\x0ekv@host-7@simm" if form == "vllm" else b""
        assert ours.startswith(b"\x01\x00" + before + b"\x01\x08" + number + b"\x02")
    finally:
        theirs.close(0)
        store.close()


@pytest.mark.parametrize("form", ["vllm", "rfc1527"])
def test_the_index_reads_replays_of_both_forms(tmp_path: Path, form: str) -> None:
    store = Store(tmp_path, form)
    try:
        store.change(True, 1, 2, 3)
        store.change(False, 2)
        with indexes(store, 1) as (index,):
            wait_until(lambda: (store.turn(), index.complete())[1], "what was there before")
            assert index.stream is not None and index.stream.counts["replays"] == 1
            assert index.stream.counts["refused"] == 0 and index.stream.counts["events"] >= 2
    finally:
        store.close()


def test_hostile_questions(store: Store) -> None:
    dealer = store.context.socket(zmq.DEALER)
    dealer.connect(store.at[1])
    for frames in ([b""], [b"", b"\0" * 7], [b"x", b"\0" * 8], [b"", b"\0" * 8, b"", b""], [b"", b"\xff" * 8]):
        dealer.send_multipart(frames)
    wait_until(lambda: store.turn() or store.outlet.replays, "the one that is right in form")
    dealer.close(0)
    with indexes(store, 1) as made:
        same(store, made, "others are served")


def test_an_address_that_is_taken(store: Store) -> None:
    with pytest.raises(SimmError, match="cannot publish at"):
        Outlet(store.loop, "rfc1527", "tcp://192.0.2.1:1", store.at[1], "n", store.everything)

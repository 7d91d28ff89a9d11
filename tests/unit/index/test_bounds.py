"""What a lying publisher, or whoever may ask, can make the index keep or do."""

from __future__ import annotations

import array as arrays
import errno
import json
import random
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

msgspec = pytest.importorskip("msgspec", reason="the extra simm-store[index] is not installed")
zmq = pytest.importorskip("zmq", reason="the extra simm-store[index] is not installed")
pytest.importorskip("xxhash", reason="the extra simm-store[index] is not installed")

from simm.index import blocks as blocks_module  # noqa: E402
from simm.index import events as events_module  # noqa: E402
from simm.index import publishers as publishers_module  # noqa: E402
from simm.index import service as service_module  # noqa: E402
from simm.index import sources as sources_module  # noqa: E402
from simm.index import streams as streams_module  # noqa: E402
from simm.index.blocks import Blocks  # noqa: E402
from simm.index.events import (  # noqa: E402
    BLOCKS_MAX,
    EVENTS_MAX,
    EXTRA_BYTES_MAX,
    TOKENS_MAX,
    BadEvent,
    Removed,
    Stored,
    Where,
    decode,
)
from simm.index.keys import token_bytes  # noqa: E402
from simm.index.publishers import Publishers, _Link  # noqa: E402
from simm.index.service import QUESTION_BLOCKS_MAX, Service  # noqa: E402
from simm.index.sources import (  # noqa: E402
    EXPECTED_BLOCKS_MAX,
    EXPECTED_MAX,
    GROUPS_MAX,
    PARKED_BYTES_MAX,
    Parked,
    Registration,
    Source,
)
from tests.support.waiting import wait_until  # noqa: E402

MIB = 1 << 20


def array(count: int, item: bytes) -> bytes:
    """A MessagePack array of equal items."""
    return b"\xdd" + count.to_bytes(4, "big") + item * count


def whole(*parts: bytes) -> bytes:
    return bytes([0x90 | len(parts)]) + b"".join(parts)


TIME = b"\x00"
HEAD = b"\x84\xa4type\xabBlockStored\xacblock_hashes\x91\x01\xaablock_size\x01"
#: Messages of 4 million items, a byte each.
MANY = 4_000_000
BOMBS = {
    "events": whole(TIME, array(MANY, b"\xc0")),
    "parts": array(MANY, b"\xc0"),
    "fields": whole(TIME, b"\x91" + array(MANY, b"\xc0")),
    "tokens": whole(TIME, b"\x91" + HEAD + b"\xa9token_ids" + array(MANY, b"\x01")),
    "hashes": whole(TIME, b"\x91\x82\xa4type\xacBlockRemoved\xacblock_hashes" + array(MANY, b"\x01")),
    "extra keys": whole(TIME, b"\x91" + HEAD + b"\xaaextra_keys" + array(MANY, b"\x90")),
    "a block's extra keys": whole(TIME, b"\x91" + HEAD + b"\xaaextra_keys\x91" + array(MANY, b"\x90")),
}


@pytest.mark.parametrize("what", BOMBS)
def test_items_are_counted_before_they_are_made(what: str) -> None:
    """An object for each byte of a message of 16 MiB took a GiB, before anybody looked at their number."""
    tracemalloc.start()
    try:
        try:
            batch = decode(BOMBS[what])
        except BadEvent:
            batch = None
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert batch is None or (not batch.events and len(batch.refused) == 1)
    assert peak < 3 * len(BOMBS[what]), f"{peak >> 20} MiB for {len(BOMBS[what]) >> 20}"


def test_as_many_as_may_be_are_taken() -> None:
    """The control: of the same messages with as many items as a bound allows."""
    assert len(decode(whole(TIME, array(EVENTS_MAX, b"\x81\xa4type\xb0AllBlocksCleared"))).events) == EVENTS_MAX
    extras = b"\xaaextra_keys\x91" + array(EXTRA_BYTES_MAX - 5, b"\xc0")
    batch = decode(whole(TIME, b"\x91" + HEAD + extras))
    assert not batch.refused and len(batch.events) == 1
    tokens = b"\xa9token_ids" + array(TOKENS_MAX, b"\x01")
    assert not decode(whole(TIME, b"\x91" + HEAD + tokens)).refused


REMOVED = {"type": "BlockRemoved", "block_hashes": [1]}


def test_messages_as_engines_send_them_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM tells each evicted block by itself, a step's in one message; SGLang evicts pages of a token in one event."""
    batch = decode(msgspec.msgpack.encode([0.0, [REMOVED] * 20_000, 0]))
    assert len(batch.events) == 20_000 and not batch.refused
    (event,) = decode(msgspec.msgpack.encode([0.0, [{**REMOVED, "block_hashes": list(range(200_000))}], 0])).events
    assert isinstance(event, Removed) and len(event.hashes) == 200_000
    monkeypatch.setattr(events_module, "BLOCKS_MAX", 9)
    many = {**REMOVED, "block_hashes": list(range(5))}
    with pytest.raises(BadEvent, match="10 blocks in a message"):
        decode(msgspec.msgpack.encode([0.0, [many, many], 0]))
    assert BLOCKS_MAX >= TOKENS_MAX and EVENTS_MAX * 16 >= TOKENS_MAX, "pages of a token, and blocks of 16"


def register(index: Blocks, **more: Any) -> Source:
    return index.register(Registration("A", "m", **more))


class Hashes(arrays.array):  # type: ignore[type-arg]
    """Blocks' names, which count how often they are gone through."""

    seen = 0

    def __iter__(self) -> Any:
        Hashes.seen += len(self)
        return super().__iter__()


def test_a_removal_looks_at_no_block_that_it_does_not_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each removed block was compared with all that waited for a parent: milliseconds, in which nobody was answered."""
    index = Blocks()
    source = register(index, block_size=1)
    for first in range(10, 4010, 4):
        names = Hashes("Q", range(first, first + 4))
        index.apply(source, [Stored(names, 1_000_000 + first, token_bytes([7] * 4), 1, Where())])
    assert source.waiting == 4000
    monkeypatch.setattr(Hashes, "seen", 0)
    index.apply(source, [Removed(arrays.array("Q", [name]), Where()) for name in (11, *range(5000, 9000))])
    assert Hashes.seen == 0
    (parked,) = source.parked[1_000_010, source.lanes[0, 0]]
    assert parked.gone == {11}


def blocks_of(parked: list[Parked]) -> int:
    return sum(len(each.event.hashes) for each in parked)


@pytest.mark.parametrize("seed", range(3))
def test_what_names_a_block_that_waits_is_what_waits(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random events behind parents that are unknown, known later, or gone; the same block may wait several times."""
    monkeypatch.setattr(sources_module, "PARKED_MAX", 40)
    dice = random.Random(seed)
    index = Blocks()
    source = register(index, block_size=1)
    most = 0
    for _ in range(600):
        names = arrays.array("Q", [dice.randrange(60) for _ in range(dice.randrange(1, 5))])
        if dice.random() < 0.3:
            index.apply(source, [Removed(names, Where())])
        else:
            parent = None if dice.random() < 0.05 else dice.randrange(60)
            index.apply(source, [Stored(names, parent, token_bytes([1] * len(names)), 1, Where())])
        if dice.random() < 0.01:
            index.clear(source)
        waits: dict[tuple[int, int], set[int]] = {}
        for (_, lane), parked in source.parked.items():
            for each in parked:
                for name in set(each.event.hashes) - each.gone:
                    waits.setdefault((name, lane), set()).add(id(each))
        known = {name: {id(each) for each in sources_module._each(found)} for name, found in source.naming.items()}
        assert known == waits
        assert source.waiting == sum(map(blocks_of, source.parked.values())) <= 40
        most = max(most, source.waiting)
    assert most > 20


@pytest.mark.parametrize("bound", [PARKED_BYTES_MAX, 1 << 60], ids=["bound", "control"])
def test_what_waits_for_parents_is_bounded_in_bytes(bound: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 8,192 tokens, each behind a parent that never comes: 65,536 of them would be 2 GiB for a publisher."""
    monkeypatch.setattr(sources_module, "PARKED_BYTES_MAX", min(bound, 4 * MIB) if bound < 1 << 60 else bound)
    index = Blocks()
    source = register(index, block_size=8192)
    for number in range(200):
        event = {
            "type": "BlockStored", "block_hashes": [number + 1], "parent_block_hash": 1_000_000 + number,
            "token_ids": [number] * 8192, "block_size": 8192,
        }  # fmt: skip
        index.apply(source, decode(msgspec.msgpack.encode([0.0, [event], 0])).events)
    held = sum(len(each.event.tokens or b"") for some in source.parked.values() for each in some)
    assert (held <= 4 * MIB) is (bound == PARKED_BYTES_MAX)
    assert source.waiting_bytes == sum(each.nbytes for some in source.parked.values() for each in some)
    index.clear(source)
    assert source.waiting_bytes == source.waiting == 0


def test_what_waits_takes_the_memory_that_it_is_counted_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one short block each, what waits was twice as large as its bound: the objects of an event were left out."""
    monkeypatch.setattr(sources_module, "PARKED_BYTES_MAX", 4 * MIB)
    monkeypatch.setattr(sources_module, "PARKED_MAX", 1 << 30)
    index = Blocks()
    source = register(index, block_size=16)
    many = 8000
    messages = [
        msgspec.msgpack.encode([0.0, [{
            "type": "BlockStored", "block_hashes": [(1 << 60) + number], "parent_block_hash": (1 << 61) + number,
            "token_ids": [number] * 16, "block_size": 16,
        }], 0])
        for number in range(many)
    ]  # fmt: skip
    index.apply(source, decode(messages[0]).events)
    tracemalloc.start()
    try:
        for message in messages:
            index.apply(source, decode(message).events)
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 1000 < source.waiting < many, "the bound of bytes holds"
    assert taken < 1.25 * 4 * MIB, f"{taken >> 10} KiB"


@pytest.mark.parametrize("bound", ["PARKED_MAX", "PARKED_BYTES_MAX"])
@pytest.mark.parametrize("part", [4, 1 << 20], ids=["in parts", "whole"])
def test_a_long_event_waits_as_a_whole_or_not_at_all(part: int, bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts, each bounded by itself, it expelled all others and its own beginning, and came in one go at last."""
    most = 13 if bound == "PARKED_MAX" else 1200 * (4 if part == 4 else 1) + 13 * (256 + 4)
    monkeypatch.setattr(sources_module, bound, most)
    monkeypatch.setattr(streams_module, "_SLICE", part)
    index = Blocks()
    source = register(index, block_size=1)
    stream = streams_module.Stream(index, source, replays=False)

    def tell(number: int, first: int, count: int, parent: int | None) -> None:
        event = {
            "type": "BlockStored", "block_hashes": list(range(first, first + count)), "parent_block_hash": parent,
            "token_ids": list(range(first, first + count)), "block_size": 1,
        }  # fmt: skip
        stream.message(number, msgspec.msgpack.encode([0.0, [event], 0]))

    tell(0, 600, 2, 99)
    assert source.waiting == 2 and stream.complete
    tell(1, 100, 13, 99)
    assert source.waiting == 13 and not stream.complete, "what waited longer makes room, no part of its own"
    assert source.ignored == {"its parent did not come": 1}, "of the two that wait, one may still count"
    tell(2, 200, 40, 199)
    assert source.waiting == 13, "it expels nobody"
    assert source.ignored["its parent did not come"] == 1
    assert source.ignored["too many blocks to wait for a parent"] == 1
    tell(3, 99, 1, None)
    assert source.blocks == 14 and source.waiting == source.waiting_bytes == 0
    tell(4, 199, 1, None)
    tell(5, 200, 40, 199)
    assert source.blocks == 55, "any length counts behind a parent that is known"


def test_children_that_find_their_parent_wait_no_more() -> None:
    index = Blocks()
    source = register(index, block_size=1)

    def stored(name: int, parent: int | None) -> Any:
        event = {
            "type": "BlockStored", "block_hashes": [name], "parent_block_hash": parent, "token_ids": [name],
            "block_size": 1,
        }  # fmt: skip
        index.apply(source, decode(msgspec.msgpack.encode([0.0, [event], 0])).events)

    for name in range(5, 1, -1):
        stored(name, name - 1)
    assert source.waiting == 4 and source.waiting_bytes > 0
    stored(1, None)
    assert source.waiting == source.waiting_bytes == 0 and source.blocks == 5
    assert not source.ignored, "all of them count"


@pytest.mark.parametrize(("module", "bound"), [(blocks_module, "HOLDERS_MAX"), (sources_module, "HOLDERS_MIN")])
def test_holders_that_come_and_go_leave_no_identifiers(
    module: Any, bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """A block with another salt each time, stored and removed: 48 bytes were left of each, 60 GB a day."""
    monkeypatch.setattr(blocks_module, "DEAD_MAX", 64)
    monkeypatch.setattr(module, bound, 16)
    index = Blocks()
    source = register(index, block_size=1)
    kept = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [1], "block_size": 1}
    index.apply(source, decode(msgspec.msgpack.encode([0.0, [kept], 0])).events)
    for number in range(2, 1000):
        stored = {**kept, "block_hashes": [number], "token_ids": [number], "cache_salt": f"user-{number}"}
        gone = {"type": "BlockRemoved", "block_hashes": [number]}
        index.apply(source, decode(msgspec.msgpack.encode([0.0, [stored, gone], 0])).events)
    assert index._ids.ended <= 81 and len(index._ids._live) <= 256 and len(source.holders) <= 16
    assert source.blocks == 1 and not source.ignored
    service = Service(index)
    assert asked(service, "/score", block_size=1, token_ids=[1])[1]["scores"][0]["pod"] == "A", "what is held stays"


def asked(service: Service, path: str, **body: Any) -> tuple[int, Any]:
    page = service.posts[path](json.dumps({"model": "m", **body}).encode())
    return page.status, json.loads(page.body)


@pytest.mark.parametrize("question", ["/query", "/score", "/expect", "/query_by_hash"])
def test_a_question_has_a_bound_of_blocks(question: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of a million blocks held up all other questions for seconds."""
    monkeypatch.setattr(service_module, "QUESTION_BLOCKS_MAX", 100)
    index = Blocks()
    register(index, block_size=4)
    service = Service(index)
    if question == "/query_by_hash":
        bodies = [{"seq_hashes": [1] * count, "block_size": 4} for count in (100, 101)]
    else:
        bodies = [{"token_ids": [1] * (4 * count), "block_size": 4, "instance_id": "A"} for count in (100, 101)]
    assert asked(service, question, **bodies[0])[0] == 200
    status, said = asked(service, question, **bodies[1])
    assert status == 400 and "100" in said["error"]


def test_the_bounds_leave_room_for_real_prompts() -> None:
    assert QUESTION_BLOCKS_MAX * 16 >= TOKENS_MAX and EXPECTED_BLOCKS_MAX >= 4 * QUESTION_BLOCKS_MAX


def test_what_is_expected_is_bounded_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """256 prompts of a million blocks were 2 GiB for one publisher. The newest stay."""
    monkeypatch.setattr(sources_module, "EXPECTED_BLOCKS_MAX", 1000)
    index = Blocks()
    source = register(index)
    service = Service(index)
    for number in range(EXPECTED_MAX):
        body = {"instance_id": "A", "block_size": 1, "token_ids": [number] * 300}
        assert asked(service, "/expect", **body)[0] == 200
        assert sum(len(each.keys) for each in source.expected) <= 1000
    assert len(source.expected) == 3
    _, said = asked(service, "/score", block_size=1, token_ids=[EXPECTED_MAX - 1] * 300)
    assert said["scores"] and said["scores"][0]["pod"] == "A", "the newest counts"


# -- sockets ---------------------------------------------------------------------------------------------------


def test_what_cannot_be_listened_to_costs_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each failure kept a socket of ZMQ's, of which there are a thousand: then nobody could be registered."""
    made: list[Any] = []
    real = zmq.Context.socket

    def socket(context: Any, kind: int) -> Any:
        made.append(real(context, kind))
        return made[-1]

    connect = zmq.Socket.connect

    def fails(sock: Any, address: str) -> Any:
        if sock.type == zmq.SUB:
            raise zmq.ZMQError(errno.EMFILE)
        return connect(sock, address)

    monkeypatch.setattr(zmq.Context, "socket", socket)
    monkeypatch.setattr(zmq.Socket, "connect", fails)
    monkeypatch.setattr(publishers_module, "RETRY_S", 3600.0)
    monkeypatch.setattr(publishers_module, "RETRY_MAX_S", 3600.0)
    publishers = Publishers(Blocks())
    try:
        source = publishers.register(Registration("A", "m", endpoint="tcp://127.0.0.1:1"))
        wait_until(lambda: source.lost, "it has failed")
        assert made and all(each.closed for each in made) and publishers.stream(source) is None
        made.clear()
        for _ in range(2):  # what renews it tries again
            publishers.register(source.registration)
        monkeypatch.setattr(zmq.Socket, "connect", connect)
        publishers.register(source.registration)
        wait_until(lambda: publishers.stream(source) is not None, "it is listened to")
        assert not source.lost and sum(not each.closed for each in made if each.type == zmq.SUB) == 1
        assert publishers._context.get(zmq.MAX_SOCKETS) > 4 * blocks_module.SOURCES_MAX
    finally:
        publishers.close()


@pytest.mark.parametrize("drops", [True, False], ids=["drops", "control"])
def test_messages_of_a_connection_that_is_over_are_not_believed(
    tmp_path: Path, drops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a connection is read before its last messages. They came back to life what was forgotten."""
    if not drops:
        monkeypatch.setattr(_Link, "_drop_waiting", lambda _: None)
    context = zmq.Context()
    pub = context.socket(zmq.XPUB)  # which hears of its subscriber: each message is sent once
    endpoint = f"ipc://{tmp_path}/pub"
    pub.bind(endpoint)
    event = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [1], "block_size": 1}
    message = [b"", (0).to_bytes(8, "big"), msgspec.msgpack.encode([0.0, [event], 0])]
    publishers = Publishers(Blocks())
    gate, held = threading.Event(), threading.Event()
    waiting: list[bool] = []

    def end() -> None:
        """Read the end of the connection, while a message waits."""
        held.set()
        gate.wait()
        link._event(zmq.EVENT_DISCONNECTED)
        waiting.append(bool(link.sub.getsockopt(zmq.EVENTS) & zmq.POLLIN))

    try:
        source = publishers.register(Registration("A", "m", block_size=1, endpoint=endpoint))
        assert pub.poll(60_000) and pub.recv() == b"\1"
        pub.send_multipart(message)
        wait_until(lambda: source.blocks, "the first message")
        (link,) = publishers._links.values()
        publishers._do(end)
        assert held.wait(60)
        pub.send_multipart([message[0], (1).to_bytes(8, "big"), message[2]])
        wait_until(lambda: link.sub.getsockopt(zmq.EVENTS) & zmq.POLLIN, "a message waits")
        gate.set()
        wait_until(lambda: waiting, "the end has been read")
        assert waiting == [not drops]
    finally:
        gate.set()
        publishers.close()
        context.destroy(0)


def test_the_queues_of_a_publisher_are_bounded_in_bytes() -> None:
    assert publishers_module.QUEUE_MESSAGES * publishers_module.MESSAGE_BYTES_MAX <= 1 << 30


def test_groups_of_a_publisher_that_tells_of_too_many() -> None:
    source = Blocks().register(Registration("A", "m", block_size=4))
    for group in range(GROUPS_MAX + 9):
        source.note_group(group, 4)
        source.note_group(0, group + 1)
    assert len(source.dense) <= GROUPS_MAX + 1 and max(map(len, source.dense.values())) <= GROUPS_MAX

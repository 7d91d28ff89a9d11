"""Frames and messages: round trips, every truncation, every damaged byte, and the tables of docs/protocol.md."""

from __future__ import annotations

import random
import re
import struct
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simm import rpc
from simm.constants import BATCH_KEYS_MAX, FRAME_BYTES_MAX, VALUE_BYTES_MAX
from simm.errors import LocalProtocolError, RemoteProtocolError
from simm.rpc import (
    CODECS,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    OPCODES,
    STRUCTURES,
    Codec,
    Connection,
    Encoded,
    Flag,
    Frame,
    decode,
    encode,
    message,
    parse_header,
    reply,
    structure,
)
from simm.wire import messages as M
from tests.support.dose import dosed
from tests.support.wire_samples import STRUCTURE_TYPES, TYPES, UNSIGNED, field_codes, sample

PROTOCOL = (Path(__file__).resolve().parents[2] / "docs" / "protocol.md").read_text()


def name_of(cls: type) -> str:
    """ReturnGrants -> RETURN_GRANTS"""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).upper()


# --- values for any message -------------------------------------------------------------------


def strategy(token: str) -> st.SearchStrategy[Any]:
    """Values that a layout's code can carry."""
    if token in UNSIGNED:
        return st.integers(0, (1 << UNSIGNED[token]) - 1)
    if re.fullmatch(r"\d+s", token):
        size = int(token[:-1])
        return st.binary(min_size=size, max_size=size)
    if token == "s":
        return st.text(st.characters(codec="utf-8"), max_size=20)
    if token == "b":
        return st.binary(max_size=40)
    if token[0] == "*":
        parts = [strategy(code) for code in field_codes(token[1:])]
        return st.lists(st.tuples(*parts) if len(parts) > 1 else parts[0], max_size=4)
    return st.lists(st.deferred(lambda: messages_of(STRUCTURE_TYPES[token[1:-1]])), max_size=3)


def messages_of(cls: Any) -> st.SearchStrategy[Any]:
    """Any message of a type."""
    made = CODECS[OPCODES[cls]] if cls in OPCODES else STRUCTURES[cls.__name__]
    return st.builds(cls, *(strategy(token) for token in made.layout.split()))


ANY = st.one_of([messages_of(cls) for cls in TYPES])


def frames(data: bytes | bytearray) -> Iterator[Frame]:
    conn = Connection()
    conn.receive_data(data)
    while (frame := conn.next_frame()) is not None:
        yield frame
    conn.at_eof()


# --- whole ------------------------------------------------------------------------------------


@given(ANY, st.integers(0, 2**64 - 1), st.integers(0, 65535), st.sampled_from([0, 1, 2, 3]))
@settings(max_examples=dosed(300, quick=60), deadline=None)
def test_round_trip(msg: Any, request_id: int, status: int, flags: int) -> None:
    (frame,) = frames(encode(msg, request_id, status=status, flags=flags))
    assert frame[:4] == (OPCODES[type(msg)], flags, status, request_id)
    assert decode(frame) == msg and type(decode(frame)) is type(msg)
    once = Encoded(msg)
    assert once.header(request_id, flags=flags) + once.body == encode(msg, request_id, flags=flags)


@pytest.mark.parametrize("cls", TYPES, ids=name_of)
def test_byte_by_byte_and_two_in_one_chunk(cls: Any) -> None:
    rng = random.Random(cls.__name__)
    first, second = sample(cls, rng), sample(cls, rng)
    data = encode(first, 1) + reply(second, 2, 3)
    assert [decode(frame) for frame in frames(data)] == [first, second]
    conn, seen = Connection(), []
    for at in range(len(data)):
        conn.receive_data(data[at : at + 1])
        while (frame := conn.next_frame()) is not None:
            seen.append((at, decode(frame)))
    assert seen == [(len(encode(first, 1)) - 1, first), (len(data) - 1, second)]
    conn.at_eof()


@given(st.lists(ANY, min_size=1, max_size=5), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_any_cut_into_chunks(msgs: list[Any], rng: random.Random) -> None:
    data = b"".join(encode(msg, number) for number, msg in enumerate(msgs))
    conn, seen, at = Connection(), [], 0
    while at < len(data):
        size = rng.randint(1, 60)
        conn.receive_data(memoryview(data)[at : at + size])
        at += size
        while (frame := conn.next_frame()) is not None:
            seen.append(decode(frame))
    assert seen == msgs and conn.pending_bytes == 0


def test_a_frame_outlives_the_buffer() -> None:
    conn = Connection()
    conn.receive_data(bytearray(encode(M.Error("first"), 1)))
    frame = conn.next_frame()
    conn.receive_data(encode(M.Error("other"), 2))
    assert frame is not None and type(frame.body) is bytes and decode(frame) == M.Error("first")


def test_bare_bytes_between_frames() -> None:
    conn = Connection()
    conn.receive_data(encode(M.Fetched([(0, 0, 5, 0)]), 1, flags=Flag.REPLY) + b"hel")
    assert conn.next_frame() is not None
    assert conn.take(2) == b"he" and conn.pending_bytes == 1
    conn.receive_data(b"lo" + encode(M.Verdict([0]), 1))
    assert conn.take(3) == b"llo"
    frame = conn.next_frame()
    assert frame is not None and decode(frame) == M.Verdict([0])
    conn.receive_data(b"rest")
    assert conn.take(4096) == b"rest" and conn.pending_bytes == 0


# --- damaged ----------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", TYPES, ids=name_of)
def test_truncated_at_every_length(cls: Any) -> None:
    msg = sample(cls, random.Random(cls.__name__))
    data = encode(msg, 1)
    for size in range(len(data)):
        conn = Connection()
        conn.receive_data(data[:size])
        assert conn.next_frame() is None
        if size:
            with pytest.raises(RemoteProtocolError, match="into a frame"):
                conn.at_eof()
    # The same with a header that admits it: a body cut short is malformed at every length.
    body = data[HEADER_BYTES:]
    for size in range(len(body)):
        with pytest.raises(RemoteProtocolError):
            decode(Frame(OPCODES[cls], 0, 0, 1, body[:size]))


@pytest.mark.parametrize("cls", TYPES, ids=name_of)
def test_damaged_at_every_byte(cls: Any) -> None:
    """A message or RemoteProtocolError, never any other error; a message in the end packs to what came."""
    rng = random.Random(cls.__name__)
    data = bytearray(encode(sample(cls, rng), 1))
    for at in range(len(data)):
        for value in {0, 0xFF, data[at] ^ 1, data[at] ^ 0x80, rng.randrange(256)}:
            damaged = bytearray(data)
            damaged[at] = value
            conn = Connection()
            conn.receive_data(damaged)
            try:
                frame = conn.next_frame()
                if frame is None:
                    assert 20 <= at < HEADER_BYTES, "only the length can make us wait"
                    continue
                msg = decode(frame)
            except RemoteProtocolError:
                continue
            assert encode(msg, frame.request_id, status=frame.status, flags=frame.flags) == damaged[: conn._at]


@pytest.mark.parametrize("cls", TYPES, ids=name_of)
def test_trailing_bytes(cls: Any) -> None:
    msg = sample(cls, random.Random(cls.__name__))
    body = CODECS[OPCODES[cls]].write(msg)
    assert decode(Frame(OPCODES[cls], 0, 0, 0, body)) == msg
    for extra in (b"\0", b"\0\0\0\0", b"x" * 40):
        with pytest.raises(RemoteProtocolError, match="too many"):
            decode(Frame(OPCODES[cls], 0, 0, 0, body + extra))


def header(
    magic: int = MAGIC, version: int = 1, opcode: int = 4, flags: int = 0, size: int = 8, request_id: int = 1
) -> bytes:
    return HEADER.pack(magic, version, opcode, flags, 0, request_id, size)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (header(magic=MAGIC ^ 1 << 31), "not a SiMM peer"), (header(version=2), "upgrade"),
        (header(opcode=0), "opcode 0x0"), (header(opcode=0xFFFF), "opcode 0xffff"),
        (header(flags=4), "flags 0x4"), (header(flags=0x8001), "flags 0x8001"),
        (header(size=FRAME_BYTES_MAX + 1), "exceeds"), (header(size=0xFFFFFFFF), "exceeds"),
    ],
)  # fmt: skip
def test_bad_headers(bad: bytes, says: str) -> None:
    conn = Connection()
    conn.receive_data(bad)
    with pytest.raises(RemoteProtocolError, match=says):
        conn.next_frame()
    with pytest.raises(RemoteProtocolError, match=says):
        parse_header(b"xx" + bad, 2)
    # Once wrong, always wrong: what follows cannot be trusted.
    with pytest.raises(RemoteProtocolError, match=says):
        conn.receive_data(encode(M.Ping(1)))
    with pytest.raises(RemoteProtocolError, match=says):
        conn.next_frame()
    conn.at_eof()


@pytest.mark.parametrize(
    "foreign", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02", b"SSH-2.0-x\r\n", b"\0", b"SiMN", b"simm"]
)
def test_a_foreign_magic_is_found_at_its_first_wrong_byte(foreign: bytes) -> None:
    conn = Connection()
    for at in range(len(foreign)):
        conn.receive_data(foreign[at : at + 1])
        if foreign[: at + 1] == b"SiMM"[: at + 1]:
            assert conn.next_frame() is None
        else:
            break
    with pytest.raises(RemoteProtocolError, match="right port"):
        conn.next_frame()


@pytest.mark.parametrize(
    ("cls", "body", "says"),
    [
        (M.Error, b"\5\0ab", "past the end"), (M.Error, b"\2\0\xff\xfe", "malformed Error"),
        (M.Error, b"\3\0\xed\xa0\x80", "malformed Error"), (M.StatsReply, b"\xff\xff\xff\xff", "past the end"),
        (M.Delete, b"\xff\xff\xff\xff", "at most 4096"), (M.Delete, b"\0\x10\0\0", "past the end"),
        (M.Delete, b"\2\0\0\0" + b"d" * 31, "past the end"),
        (M.Join, struct.pack("<QBHH", 1, 0, 0, 0xFFFF), "at most 4096"),
        (M.Join, struct.pack("<QBHH", 1, 0, 0, 1), "malformed"),
        (M.Ping, b"", "malformed Ping"), (M.Ping, b"1234567", "malformed Ping"),
    ],
)  # fmt: skip
def test_lengths_that_lie(cls: Any, body: bytes, says: str) -> None:
    with pytest.raises(RemoteProtocolError, match=says):
        decode(Frame(OPCODES[cls], 0, 0, 0, body))


def test_a_count_that_lies_costs_no_memory() -> None:
    tracemalloc.start()
    try:
        for cls in (M.Delete, M.Commit, M.Fetch, M.Statuses):
            with pytest.raises(RemoteProtocolError):
                decode(Frame(OPCODES[cls], 0, 0, 0, b"\xff\xff\xff\x7f" + bytes(1000)))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_no_growth_under_malformed_input() -> None:
    """Many malformed inputs: each an error at once or a wait for more, and the buffer never keeps what it refused."""
    rng = random.Random(7)
    good = [bytearray(encode(sample(cls, rng), 1)) for cls in TYPES]
    errors = waits = messages = 0
    conn = Connection()
    tracemalloc.start()
    try:
        base = 0
        for number in range(dosed(100_000, quick=10_000)):
            if number == 1000:
                base = tracemalloc.get_traced_memory()[0]
            data = bytearray(rng.choice(good))
            for _ in range(rng.randint(1, 3)):
                data[rng.randrange(min(len(data), 40))] = rng.randrange(256)
            try:
                conn.receive_data(data)
                while (frame := conn.next_frame()) is not None:
                    decode(frame)
                    messages += 1
            except RemoteProtocolError:
                errors += 1
                conn = Connection()
                continue
            assert conn.pending_bytes <= FRAME_BYTES_MAX + HEADER_BYTES + len(data)
            if conn.pending_bytes:
                # A length that lies upwards. Mostly the peer goes away; one in 50 goes on sending into it.
                waits += 1
                if rng.random() < 0.98:
                    conn = Connection()
        assert tracemalloc.get_traced_memory()[0] - base < 2 * FRAME_BYTES_MAX
    finally:
        tracemalloc.stop()
    least = dosed(1000, quick=100)
    assert errors > 10 * least and waits > least and messages > 10 * least, "all three outcomes were met"


@given(st.binary(max_size=200))
@settings(max_examples=dosed(300, quick=60), deadline=None)
def test_noise(data: bytes) -> None:
    for prefix in (b"", b"SiMM\1\0", header(size=len(data))):
        try:
            for frame in frames(prefix + data):
                decode(frame)
        except RemoteProtocolError:
            pass


def test_the_buffer_gives_back_what_was_parsed() -> None:
    conn = Connection()
    data = encode(M.StatsReply(bytes(10_000)), 1)
    for _ in range(200):
        conn.receive_data(data)
        assert conn.next_frame() is not None
        assert len(conn._buf) <= len(data) * 2


# --- our own mistakes -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "msg",
    [
        M.Ping(-1), M.Ping(1 << 64), M.Ping("x"), M.Error("x" * 65536), M.Error(5), M.Error(b"x"), M.StatsReply("x"),  # type: ignore[arg-type]
        M.Done(None), M.Delete(5), M.Delete([5]), M.Commit([(b"d",)], []), M.Statuses([256]), M.Statuses([None]),  # type: ignore[arg-type, list-item]
        M.Join(1, 0, "n", [M.WorkerLoad(0, 0, 0, 0)] * 65536),  # type: ignore[list-item]
    ],
)  # fmt: skip
def test_values_that_do_not_fit_are_our_fault(msg: Any) -> None:
    with pytest.raises(LocalProtocolError):
        encode(msg)


def test_what_is_no_message_and_what_is_too_large() -> None:
    with pytest.raises(LocalProtocolError, match="is not a message"):
        encode("x")
    with pytest.raises(LocalProtocolError, match="is not a message"):
        encode(M.WorkerLoad(0, 0, 0, 0))
    largest = M.StatsReply(bytes(FRAME_BYTES_MAX - 4))
    assert [decode(frame) for frame in frames(encode(largest))] == [largest]
    with pytest.raises(LocalProtocolError, match="exceeds"):
        encode(M.StatsReply(bytes(FRAME_BYTES_MAX - 3)))
    with pytest.raises(RemoteProtocolError, match="unknown opcode"):
        decode(Frame(0x7F, 0, 0, 0, b""))


def test_the_largest_batches_fit_a_frame() -> None:
    digest = bytes(16)
    for msg in (
        M.Commit([(digest, 1, 1, 1, 1, 0)] * (BATCH_KEYS_MAX // 4), [(1, 1)] * 100),
        M.Fetch([(digest, 1)] * BATCH_KEYS_MAX), M.Fetched([(0, 0, 1, 1)] * BATCH_KEYS_MAX),
        M.Store([(digest, 1, 1, 1, 0)] * BATCH_KEYS_MAX), M.Statuses([0] * BATCH_KEYS_MAX),
        M.Exists([digest] * BATCH_KEYS_MAX), M.Delete([digest] * BATCH_KEYS_MAX),
        M.Locate(1, [digest] * BATCH_KEYS_MAX), M.Located([(0, 0, 1, 1, 1, 1)] * BATCH_KEYS_MAX),
        M.Committed([0] * BATCH_KEYS_MAX, [(1, 1, 1)] * BATCH_KEYS_MAX),
    ):  # fmt: skip
        assert len(encode(msg)) <= HEADER_BYTES + FRAME_BYTES_MAX


def test_codecs_are_checked_at_import() -> None:
    with pytest.raises(LocalProtocolError, match="codes for"):
        Codec(M.Ping, "Q Q")
    with pytest.raises(LocalProtocolError, match=r"0x4 is taken by Ping"):
        message(0x04, "Q")(M.Pong)
    assert CODECS[4].cls is M.Ping and structure


# --- docs/protocol.md -------------------------------------------------------------------------


def table(first_cell: str) -> list[list[str]]:
    """The rows of the page's table whose head starts with ``first_cell``, code marks removed."""
    lines = PROTOCOL.splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith(f"| {first_cell} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            return rows
        rows.append([cell.strip().replace("`", "") for cell in line.strip("|").split(" | ")])
    return rows


def layout_of(made: Codec) -> str:
    return " ".join(f"{field}:{code}" for field, code in zip(made.cls._fields, made.layout.split()))


def test_opcode_table() -> None:
    documented = {int(row[0], 16): (row[1], row[2]) for row in table("opcode")}
    assert documented == {opcode: (name_of(made.cls), layout_of(made)) for opcode, made in CODECS.items()}
    assert [int(row[0], 16) for row in table("opcode")] == sorted(CODECS)


def test_every_answer_named_is_a_message() -> None:
    names = {name_of(cls) for cls in TYPES}
    for row in table("opcode"):
        assert len(row) == 6 and all(row)
        answers = re.findall(r"[A-Z][A-Z_]+[A-Z]", row[5])
        assert set(answers) <= names and (answers or row[5].startswith("-")), row
    for row in table("field"):
        for name in re.findall(r"[A-Z][A-Z_]+[A-Z]", row[0]):
            assert name in names


def test_structure_table() -> None:
    assert {row[0]: row[1] for row in table("name")} == {
        name: layout_of(made) for name, made in STRUCTURES.items()
    }


def test_status_table() -> None:
    assert {int(row[0]): row[1] for row in table("status")} == M.STATUS_NAMES
    assert max(M.STATUS_NAMES) <= 255, "a status fits one byte of a body"


def test_header_table() -> None:
    rows = [(int(row[0]), int(row[1])) for row in table("offset")]
    at = 0
    for (offset, size), code in zip(rows, HEADER.format.strip("<"), strict=True):
        assert (offset, size) == (at, struct.calcsize("<" + code))
        at += size
    assert at == HEADER_BYTES and "header of 24 bytes" in PROTOCOL


def test_numbers_in_the_page() -> None:
    assert f"{FRAME_BYTES_MAX:,} (1 MiB)" in PROTOCOL and f"1 to {VALUE_BYTES_MAX:,} bytes" in PROTOCOL
    assert f"Protocol version {M.PROTOCOL_MAX}, framing version {rpc.FRAMING_VERSION}" in PROTOCOL
    for space in (M.Role, M.PathBit, Flag):
        names = [name for name in vars(space) if name.isupper()]
        assert names and all(re.search(rf"\b{name}\b", PROTOCOL) for name in names)

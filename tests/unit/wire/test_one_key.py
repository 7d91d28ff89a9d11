"""The one-key forms of COMMIT, LOCATE and their answers: the codec's very bytes; no other frame is taken for one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simm.errors import RemoteProtocolError
from simm.ipc.commit_ring import SLOT_BYTES, SLOTS, TAIL, Ring
from simm.rpc import HEADER_BYTES, Connection, Frame, decode, encode, reply
from simm.wire import messages as M
from simm.wire.one_key import (
    COMMIT_ONE_BYTES,
    COMMITTED_ONE_BYTES,
    LOCATED_ONE_BYTES,
    commit_one_of,
    committed_one_of,
    encode_commit_one,
    encode_pin_one,
    parse_commit_one,
    parse_committed_one,
    parse_located_one,
    pin_one_of,
    reply_committed_one,
    reply_located_one,
)

U16, U32, U64 = (st.integers(0, 2**bits - 1) for bits in (16, 32, 64))
PADDING = bytes(COMMITTED_ONE_BYTES)
GRANT = (7, 1 << 40, 4096)


@given(st.binary(min_size=16, max_size=16), U64, U32, U32, U16, U32, U32, U64)
@settings(max_examples=100, deadline=None)
def test_a_commit_is_the_same_bytes(
    digest: bytes, grant: int, length: int, crc: int, flags: int, want: int, count: int, request_id: int
) -> None:
    entry = (digest, grant, length, crc, flags, 0)
    plain = encode(M.Commit([entry], [(want, count)]), request_id)
    assert encode_commit_one(digest, grant, length, crc, flags, want, count, request_id) == plain
    assert parse_commit_one(plain) == (entry, want, count, request_id)
    assert parse_commit_one(b"x" * 5 + plain, 5) == (entry, want, count, request_id)
    assert commit_one_of(framed(plain)) == (entry, want, count, request_id)


@given(st.integers(0, 255), U64, st.lists(st.tuples(U64, U64, U32), max_size=3))
@settings(max_examples=100, deadline=None)
def test_an_answer_is_the_same_bytes(status: int, request_id: int, grants: list[tuple[int, int, int]]) -> None:
    plain = reply(M.Committed([status], grants), request_id)
    assert reply_committed_one(status, request_id, grants) == plain
    expected = (status, grants[0] if grants else None) if len(grants) < 2 else None
    assert parse_committed_one(plain + PADDING) == expected
    assert committed_one_of(framed(plain)) == (expected if len(grants) == 1 else None)
    assert parse_committed_one(b"x" * 3 + plain + b"\xff" * COMMITTED_ONE_BYTES, 3) == expected


def framed(data: bytes) -> Frame:
    """The one frame in ``data``, as a socket's end sees it."""
    connection = Connection()
    connection.receive_data(data)
    frame = connection.next_frame()
    assert frame is not None and connection.pending_bytes in (0, COMMITTED_ONE_BYTES)
    return frame


#: Bytes of the frames that may have any value: request id and the fields themselves.
COMMIT_FREE = {*range(12, 20), *range(28, 28 + 34), *range(COMMIT_ONE_BYTES - 8, COMMIT_ONE_BYTES)}
COMMITTED_FREE = {*range(12, 20), 28, *range(33, COMMITTED_ONE_BYTES)}


def test_a_damaged_commit_is_no_commit_of_that_shape() -> None:
    plain = encode_commit_one(b"d" * 16, 1, 2, 3, 4, 5, 6, 7)
    assert len(plain) == COMMIT_ONE_BYTES
    for at in range(COMMIT_ONE_BYTES):
        damaged = bytearray(plain)
        damaged[at] ^= 1
        assert (parse_commit_one(bytes(damaged)) is None) == (at not in COMMIT_FREE), at
        if at >= HEADER_BYTES:
            assert (commit_one_of(framed(bytes(damaged))) is None) == (at not in COMMIT_FREE), at


def test_a_damaged_answer_is_no_answer_of_that_shape() -> None:
    for grants in ([], [GRANT]):
        plain = reply_committed_one(0, 7, grants) + PADDING
        for at in range(24 + 5 + 4):
            damaged = bytearray(plain)
            damaged[at] ^= 1
            assert (parse_committed_one(bytes(damaged)) is None) == (at not in COMMITTED_FREE), at
            if grants and at >= HEADER_BYTES:
                assert (committed_one_of(framed(bytes(damaged))) is None) == (at not in COMMITTED_FREE), at


@pytest.mark.parametrize("other", [
    M.Commit([], []), M.Commit([(b"d" * 16, 1, 2, 3, 4, 0)], []), M.Commit([(b"d" * 16, 1, 2, 3, 4, 0)] * 2, [(1, 1)]),
    M.Commit([(b"d" * 16, 1, 2, 3, 4, 5)], [(1, 1)]), M.Commit([(b"d" * 16, 1, 2, 3, 4, 0)], [(1, 1), (2, 2)]),
    M.Delete([b"d" * 16]), M.Committed([0], [GRANT]), M.Kick(1),
], ids=repr)  # fmt: skip
def test_other_requests_are_left_to_the_codec(other: object) -> None:
    assert parse_commit_one(encode(other, 1) + bytes(COMMIT_ONE_BYTES)) is None
    assert commit_one_of(framed(encode(other, 1))) is None


@pytest.mark.parametrize("other", [
    M.Committed([0, 0], []), M.Committed([], []), M.Committed([], [GRANT]), M.Committed([0], [GRANT, GRANT]),
    M.Statuses([0]), M.Granted([GRANT]), M.Done(1),
], ids=repr)  # fmt: skip
def test_other_answers_are_left_to_the_codec(other: object) -> None:
    assert parse_committed_one(reply(other, 1) + PADDING) is None
    assert committed_one_of(framed(reply(other, 1))) is None
    # A request is no answer, and an answer with an error in its header is not looked at for one.
    assert parse_committed_one(encode(M.Committed([0], [GRANT])) + PADDING) is None
    assert parse_committed_one(reply(M.Committed([0], [GRANT]), 1, 4) + PADDING) is None


FOUND = (0, 1, 4096, 7, 1 << 40, 9)


@given(st.binary(min_size=16, max_size=16), U64)
@settings(max_examples=50, deadline=None)
def test_a_pin_is_the_same_bytes(digest: bytes, request_id: int) -> None:
    plain = encode(M.Locate(M.LOCATE_PIN, [digest]), request_id)
    assert encode_pin_one(digest, request_id) == plain
    assert pin_one_of(framed(plain)) == digest


@given(st.tuples(st.integers(0, 255), U16, U32, U32, U64, U64), U64)
@settings(max_examples=50, deadline=None)
def test_the_answer_to_a_pin_is_the_same_bytes(found: tuple[int, int, int, int, int, int], request_id: int) -> None:
    plain = reply(M.Located([found]), request_id)
    assert reply_located_one(found, request_id) == plain
    assert parse_located_one(b"x" * 3 + plain + b"\xff", 3) == found


def test_damaged_pins_and_answers_are_none_of_that_shape() -> None:
    plain = encode_pin_one(b"d" * 16, 7)
    for at in range(HEADER_BYTES, len(plain)):
        damaged = bytearray(plain)
        damaged[at] ^= 1
        assert (pin_one_of(framed(bytes(damaged))) is None) == (at < HEADER_BYTES + 5), at
    plain = reply_located_one(FOUND, 7)
    assert len(plain) == LOCATED_ONE_BYTES
    for at in range(len(plain)):
        damaged = bytearray(plain)
        damaged[at] ^= 1
        assert (parse_located_one(damaged) is None) == (at < 12 or 20 <= at < 28), at


@pytest.mark.parametrize("other", [
    M.Locate(0, [b"d" * 16]), M.Locate(M.LOCATE_PIN | M.LOCATE_PREVIOUS, [b"d" * 16]), M.Locate(M.LOCATE_PIN, []),
    M.Locate(M.LOCATE_PIN, [b"d" * 16] * 2), M.Exists([b"d" * 16]), M.Delete([b"d" * 16]),
], ids=repr)  # fmt: skip
def test_other_requests_are_no_pins(other: object) -> None:
    assert pin_one_of(framed(encode(other, 1))) is None


@pytest.mark.parametrize("other", [M.Located([]), M.Located([FOUND, FOUND]), M.Statuses([0]), M.Done(1)], ids=repr)
def test_other_answers_are_no_answers_to_a_pin(other: object) -> None:
    padding = bytes(LOCATED_ONE_BYTES)
    assert parse_located_one(reply(other, 1) + padding) is None
    assert parse_located_one(encode(M.Located([FOUND])) + padding) is None, "a request"
    assert parse_located_one(reply(M.Located([FOUND]), 1, 4) + padding) is None, "an error"


def test_a_ring_carries_both_forms_beside_the_codecs() -> None:
    client, fd = Ring.create()
    with open(fd, "rb", closefd=True):
        worker = Ring.attach(fd)
    try:
        for number in range(3 * SLOTS):
            frame = encode_commit_one(b"d" * 16, number, 2, 3, 4, 5, 6, number)
            assert client.post(frame) == number
            assert worker.next_commit() == ((b"d" * 16, number, 2, 3, 4, 0), 5, 6, number)
            asked = worker.next_request()
            assert asked is not None and decode(asked) == M.Commit([(b"d" * 16, number, 2, 3, 4, 0)], [(5, 6)])
            grants = [GRANT] * (number % 4)
            worker.answer(reply_committed_one(number, number, grants))
            answer = client.committed_one(number)
            assert answer == ((number, GRANT if grants else None) if number % 4 < 2 else None)
            assert decode(client.reply(number)) == M.Committed([number], grants)
        assert client.post(encode(M.Delete([b"d" * 16]), 9)) == worker.done
        assert worker.next_commit() is None
        assert worker.next_request() == Frame(M.OPCODES[M.Delete], 0, 0, 9, encode(M.Delete([b"d" * 16]))[24:])
    finally:
        client.close()
        worker.close()


@pytest.mark.parametrize("tail", [0, SLOTS + 1, 1 << 63])
def test_a_ring_without_a_request_has_no_commit_either(tail: int) -> None:
    client, fd = Ring.create()
    with open(fd, "rb", closefd=True):
        worker = Ring.attach(fd)
    try:
        client.post(encode_commit_one(b"d" * 16, 1, 2, 3, 4, 5, 6))
        client.words[TAIL] = tail
        assert worker.next_commit() is None
        if tail:
            with pytest.raises(RemoteProtocolError, match="tail"):
                worker.next_request()
        else:
            assert worker.next_request() is None
    finally:
        client.close()
        worker.close()
    assert COMMIT_ONE_BYTES < SLOT_BYTES

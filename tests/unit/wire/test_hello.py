"""HELLO: what a client offers, and what each check of a server refuses."""

from __future__ import annotations

import hmac

import pytest

from simm.errors import RemoteProtocolError
from simm.rpc import HEADER_BYTES, Connection, decode, encode
from simm.wire import hello as hello_module
from simm.wire.auth import Gate
from simm.wire.hello import Refusal, accept, client_hello, negotiate, other_cluster, token_fits
from simm.wire.messages import PROTOCOL_MAX, PROTOCOL_MIN, Hello, Role, Service, Status
from tests.support.tokens import old_tokens

PLAIN = client_hello(Role.CLIENT)
FULL = client_hello(Role.MOVER, namespace="ns/ä", cluster=7, pid=42)
TOKENS = ("first-token", "second-tökén")


def parsed(frame: bytes) -> Hello:
    connection = Connection()
    connection.receive_data(frame)
    made = connection.next_frame()
    assert made is not None
    message = decode(made)
    assert isinstance(message, Hello)
    return message


def test_a_client_offers_all_versions_and_names_itself() -> None:
    assert Hello(PROTOCOL_MIN, PROTOCOL_MAX, Role.CLIENT, 0, 0, "", "", [], 0) == PLAIN
    assert Hello(PROTOCOL_MIN, PROTOCOL_MAX, Role.MOVER, 0, 42, "ns/ä", "", [], 7) == FULL
    assert parsed(encode(FULL, 1)) == FULL


@pytest.mark.parametrize(
    ("low", "high", "agreed"),
    [
        (PROTOCOL_MIN, PROTOCOL_MAX, PROTOCOL_MAX),
        (0, PROTOCOL_MAX + 5, PROTOCOL_MAX),
        (PROTOCOL_MAX, PROTOCOL_MAX, PROTOCOL_MAX),
        (PROTOCOL_MAX + 1, PROTOCOL_MAX + 2, None),
        (0, PROTOCOL_MIN - 1, None),
        (PROTOCOL_MAX + 1, PROTOCOL_MIN - 1, None),
    ],
)
def test_the_highest_common_version(low: int, high: int, agreed: int | None) -> None:
    answer = negotiate(PLAIN._replace(proto_min=low, proto_max=high), "worker")
    if agreed is None:
        assert isinstance(answer, Refusal) and answer.status == Status.VERSION
        assert f"protocol {low} to {high}" in answer.text and "this worker" in answer.text
    else:
        assert answer == agreed


def test_every_token_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append(one)
        return hmac.compare_digest(one, other)

    class Spy:
        compare_digest = staticmethod(compare)

    monkeypatch.setattr(hello_module, "hmac", Spy)
    assert token_fits([b"a", b"b", b"c"], b"a")
    assert compared == [b"a", b"b", b"c"], "a match does not end the comparison"


def test_a_server_checks_the_version_and_the_proof() -> None:
    other = {"proto_min": PROTOCOL_MAX + 1, "proto_max": PROTOCOL_MAX + 1}
    assert accept(PLAIN, "server", Gate(Service.STREAM, ())) == PROTOCOL_MAX
    for hello, tokens, status in (
        (PLAIN, TOKENS, Status.UNAUTHORIZED),
        (PLAIN._replace(token=TOKENS[0]), TOKENS, Status.UNAUTHORIZED),
        (PLAIN._replace(**other), TOKENS, Status.VERSION),
        (PLAIN._replace(**other), (), Status.VERSION),
    ):
        answer = accept(hello, "server", Gate(Service.STREAM, old_tokens(*tokens)))
        assert isinstance(answer, Refusal) and answer.status == status
        assert all(token not in answer.text for token in TOKENS)


@pytest.mark.parametrize(
    ("wanted", "mine", "fits"), [(0, 0, True), (0, 5, True), (5, 5, True), (5, 0, True), (5, 6, False)]
)
def test_another_cluster_is_refused(wanted: int, mine: int, fits: bool) -> None:
    answer = other_cluster(PLAIN._replace(cluster=wanted), "worker", mine)
    assert (answer is None) == fits
    if answer is not None:
        assert answer.status == Status.OTHER_CLUSTER
        assert f"{mine:016x}" in answer.text and f"{wanted:016x}" in answer.text


def test_a_truncated_hello_is_incomplete_or_malformed() -> None:
    whole = encode(FULL, 1)
    for end in range(len(whole)):
        connection = Connection()
        connection.receive_data(whole[:end])
        assert connection.next_frame() is None
        # The same bytes with a length that says that this is all.
        if end >= HEADER_BYTES:
            short = whole[:20] + (end - HEADER_BYTES).to_bytes(4, "little") + whole[24:end]
            with pytest.raises(RemoteProtocolError):
                parsed(short)

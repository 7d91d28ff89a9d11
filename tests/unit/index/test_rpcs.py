"""The index by gRPC, asked by a real client: scores, mistakes, tokens, bounds of messages and of calls."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("msgspec", reason="the extra simm-store[index] is not installed")
pytest.importorskip("xxhash", reason="the extra simm-store[index] is not installed")
pytest.importorskip("zmq", reason="the extra simm-store[index] is not installed")
grpc = pytest.importorskip("grpc", reason="the extra simm-store[grpc] is not installed")
pytest.importorskip("google.protobuf", reason="no protobuf")

from simm.config.parsers import Address  # noqa: E402
from simm.config.tokens import parse_tokens  # noqa: E402
from simm.errors import SimmError  # noqa: E402
from simm.index.blocks import Blocks  # noqa: E402
from simm.index.events import Stored, Where  # noqa: E402
from simm.index.keys import token_bytes  # noqa: E402
from simm.index.rpc import rpcs as rpcs_module  # noqa: E402
from simm.index.rpc.rpcs import METHOD, SERVICE, Rpcs  # noqa: E402
from simm.index.service import BODY_BYTES_MAX, Service  # noqa: E402
from simm.index.sources import Registration  # noqa: E402
from simm.net import local_users  # noqa: E402
from simm.net.local_users import LocalUsers  # noqa: E402
from tests.support.indexer_messages import messages  # noqa: E402
from tests.support.waiting import wait_until  # noqa: E402

TOKENS = list(range(1000, 1100))
REQUEST, RESPONSE = messages()
SECRET = "s" * 40


def service() -> Service:
    """Return an index of two engines and a store."""
    index = Blocks()
    for name, blocks, kind, more in (("a", 6, "vllm", {}), ("b", 2, "vllm", {}), ("s", 4, "simm", {"pool": "p"})):
        source = index.register(Registration(name, "m", kind, block_size=16, **more))
        medium = "STORAGE" if kind == "simm" else "GPU"
        event = Stored(list(range(1, blocks + 1)), None, token_bytes(TOKENS[: 16 * blocks]), 16, Where(medium=medium))
        index.apply(source, [event])
    return Service(index)


@contextlib.contextmanager
def serving(made: Service, tokens: Any = (), users: LocalUsers | None = None) -> Iterator[tuple[Rpcs, Any]]:
    """Yield a server, and what calls it with a message or bytes."""
    rpcs = Rpcs(made, Address("127.0.0.1", 0), tokens, users)
    options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    channel = grpc.insecure_channel(str(rpcs.address), options=options)
    call = channel.unary_unary(
        f"/{SERVICE}/{METHOD}", lambda said: said if type(said) is bytes else said.SerializeToString(),
        RESPONSE.FromString,
    )  # fmt: skip
    try:
        yield rpcs, call
    finally:
        channel.close()
        rpcs.close()


def refused(call: Any, said: Any, **more: Any) -> tuple[Any, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call(said, timeout=60, **more)
    return caught.value.code(), caught.value.details()


def scored(call: Any, said: Any, **more: Any) -> Any:
    """Return the scores of a call. The library counts calls that have ended for a while."""

    def answered() -> Any:
        try:
            return call(said, timeout=60, **more).scores
        except grpc.RpcError as exc:
            assert exc.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, exc
            return None

    return wait_until(answered, "a call is taken")


def test_scores_of_a_prompt() -> None:
    made = service()
    with serving(made) as (_, call):
        found = call(REQUEST(model_name="m", token_ids=TOKENS, block_size=16), timeout=60)
        assert [(each.pod, each.score) for each in found.scores] == [("a", 6.0), ("b", 2.0)], "a store is no pod"
        assert any(each["pod"] == "pool:p" for each in made.score(
            {"model": "m", "token_ids": TOKENS, "block_size": 16})["scores"]), "positive control"  # fmt: skip
        found = call(REQUEST(model_name="m", token_ids=TOKENS, pod_identifiers=["b", "c"]), timeout=60)
        assert [each.pod for each in found.scores] == ["b"], "only candidates"
        assert not call(REQUEST(model_name="m", token_ids=TOKENS[1:], block_size=16), timeout=60).scores
        assert not call(REQUEST(model_name="m", token_ids=TOKENS, block_size=16, tenant_id="other"), timeout=60).scores
        text = made.metrics().text()
        assert f'simm_index_requests_total{{request="{SERVICE}/{METHOD}"}} 4' in text


def test_a_mistake_is_a_status_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    made = service()
    bad = grpc.StatusCode.INVALID_ARGUMENT
    with serving(made) as (_, call):
        for said, sentence in (
            (REQUEST(prompt="hello", model_name="m"), "has no tokenizer"), (b"\x12\xff", "cut short"),
            (REQUEST(token_ids=[1]), "has a model"), (REQUEST(model_name="m", block_size=3_000_000), "block_size"),
            (REQUEST(model_name="m" * 600), "a text of at most"), (b"\x0b", "wire type"),
            (REQUEST(model_name="m", token_ids=[1] * 70_000, block_size=1), "blocks of 1"),
        ):  # fmt: skip
            status, text = refused(call, said)
            assert status is bad and sentence in text, text
        monkeypatch.setattr(made, "score", lambda _body: 1 / 0)
        assert refused(call, REQUEST(model_name="m")) == (grpc.StatusCode.INTERNAL, "internal error")


def test_the_largest_message() -> None:
    with serving(service()) as (_, call):
        known = REQUEST(model_name="m", token_ids=TOKENS, block_size=16)
        known.of_a_later_version = "x" * (BODY_BYTES_MAX - 1000)
        assert call(known, timeout=60).scores
        known.of_a_later_version = "x" * BODY_BYTES_MAX
        assert refused(call, known)[0] is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_callers_beyond_loopback_show_a_token() -> None:
    with serving(service(), parse_tokens(f"client c {SECRET}\n", "here")) as (_, call):
        said = REQUEST(model_name="m", token_ids=TOKENS, block_size=16)
        for metadata in ((), (("authorization", "Bearer no"),), (("authorization", SECRET),), (("token", SECRET),)):
            assert refused(call, said, metadata=metadata)[0] is grpc.StatusCode.UNAUTHENTICATED
        assert call(said, timeout=60, metadata=(("authorization", f"Bearer {SECRET}"),)).scores


def test_only_so_many_calls_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpcs_module, "CALLS_MAX", 2)
    made = service()
    real, go, inside = made.score, threading.Event(), threading.Semaphore(0)

    def slow(body: Any) -> Any:
        inside.release()
        assert go.wait(60)
        return real(body)

    monkeypatch.setattr(made, "score", slow)
    said = REQUEST(model_name="m", token_ids=TOKENS, block_size=16)
    with serving(made) as (_, call):
        try:
            running = [call.future(said, timeout=60) for _ in range(2)]
            assert inside.acquire(timeout=60) and inside.acquire(timeout=60)
            assert refused(call, said)[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        finally:
            go.set()
        assert all(len(each.result().scores) == 2 for each in running)
        assert scored(call, said), "and others later"


def test_issue_a_refusal_by_user_says_that_there_are_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_users, "uid_of_peer", lambda *_: 4711)
    with serving(service(), parse_tokens(f"client c {SECRET}\n", "here"), LocalUsers()) as (_, call):
        code, text = refused(call, REQUEST())
    assert code == grpc.StatusCode.UNAUTHENTICATED
    assert "show a token of its --token-file, or start it with --allow-uid 4711" in text


@pytest.mark.parametrize("tokens", [False, True])
def test_calls_that_send_no_message_stop_nobody(tokens: bool) -> None:
    known = parse_tokens(f"client c {SECRET}\n", "here") if tokens else ()
    metadata = (("authorization", f"Bearer {SECRET}"),) if tokens else ()
    go = threading.Event()

    def never() -> Iterator[bytes]:
        assert go.wait(60)
        yield b""

    with serving(service(), known) as (rpcs, call), contextlib.closing(grpc.insecure_channel(str(rpcs.address))) as bad:
        begin = bad.stream_unary(f"/{SERVICE}/{METHOD}")
        held = [begin.future(never(), timeout=60) for _ in range(rpcs_module.CALLS_MAX - 1)]
        try:
            gone = held if tokens else held[: rpcs_module.CALLS_MAX - 1 - rpcs_module.WAITING_MAX]
            wait_until(lambda: sum(each.done() for each in held) >= len(gone), "those that give way")
            said = REQUEST(model_name="m", token_ids=TOKENS, block_size=16)
            for _ in range(3):
                assert scored(call, said, metadata=metadata)
            codes = {each.code() for each in held if each.done()}
            assert codes == {grpc.StatusCode.UNAUTHENTICATED if tokens else grpc.StatusCode.CANCELLED}
        finally:
            go.set()
            for each in held:
                each.cancel()


def test_connections_without_calls_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have said that they speak HTTP/2, and nothing else."""
    options = dict(rpcs_module._OPTIONS)
    assert 0 < options["grpc.max_connection_idle_ms"] <= 60_000
    short = options | {"grpc.max_connection_idle_ms": 300, "grpc.max_allowed_incoming_connections": 4}
    monkeypatch.setattr(rpcs_module, "_OPTIONS", tuple(short.items()))
    said = REQUEST(model_name="m", token_ids=TOKENS, block_size=16)
    with serving(service()) as (rpcs, call), contextlib.ExitStack() as stack:
        for _ in range(6):
            sock = stack.enter_context(socket.create_connection(rpcs.address[:2], 60))
            sock.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
        with contextlib.suppress(ConnectionError):
            while sock.recv(1 << 12):
                pass
        assert call(said, timeout=60, wait_for_ready=True).scores


def test_a_call_without_a_message() -> None:
    with serving(service()) as (rpcs, _), contextlib.closing(grpc.insecure_channel(str(rpcs.address))) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            channel.stream_unary(f"/{SERVICE}/{METHOD}")(iter(()), timeout=60)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_an_address_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SimmError, match="cannot listen on"):
        Rpcs(service(), Address("127.0.0.1", taken.getsockname()[1]))

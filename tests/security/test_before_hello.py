"""What a peer without a token may say to a server: HELLO, PING and AUTH. Nothing else is looked into."""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from simm.net.admission import HELLO_BYTES_MAX, LINES_MAX, LINES_S
from simm.net.channel import Channel, Refused, greet
from simm.rpc import CODECS, FRAMING_VERSION, HEADER, MAGIC, Connection, Frame, decode
from simm.wire import messages as M
from simm.wire.hello import FOR_MANAGERS, NOT_A_MANAGER, client_hello
from simm.wire.messages import Role, Status
from tests.support.manager_process import WAIT_S, Process
from tests.support.token_servers import KINDS, serving
from tests.support.tokens import old_tokens
from tests.support.waiting import wait_until
from tests.support.wire_samples import TYPES

TOKEN = "the-token-of-this-test"


def answers(port: int, data: bytes) -> list[Frame]:
    """What a manager says to these bytes, until it closes the connection."""
    conn = Connection()
    with socket.create_connection(("127.0.0.1", port), WAIT_S) as sock:
        sock.sendall(data)
        while True:
            try:
                got = sock.recv(1 << 16)
            except ConnectionResetError:
                break
            if not got:
                break
            conn.receive_data(got)
    found = []
    while (frame := conn.next_frame()) is not None:
        found.append(frame)
    return found


@pytest.fixture
def guarded(run: Callable[..., Process], tmp_path: Path) -> Process:
    """A manager that wants a token."""
    tokens = tmp_path / "tokens"
    tokens.write_text(TOKEN + "\n")
    tokens.chmod(0o600)
    return run(None, "--token-file", str(tokens))


@pytest.mark.quick
def test_no_body_is_looked_into(guarded: Process) -> None:
    """Each message there is, with a body of noise: refused for what it is, not for what is in it."""
    rng = random.Random(11)
    began = time.monotonic()
    opening = {M.Hello, M.Ping, M.Auth, M.Prove}
    with guarded.client(token=TOKEN) as bystander:
        bystander.get_map()
        for cls in [each for each in TYPES if each.__module__ == M.__name__]:
            opcode = next(number for number, codec in CODECS.items() if codec.cls is cls)
            body = rng.randbytes(rng.randrange(HELLO_BYTES_MAX))
            (frame,) = answers(
                guarded.port, HEADER.pack(MAGIC, FRAMING_VERSION, opcode, 0, 0, 1, len(body)) + body
            )
            expected = Status.BAD_REQUEST if cls in opening else Status.UNAUTHORIZED
            assert (frame.opcode, frame.status) == (M.OP_ERROR, expected), cls.__name__
            header = HEADER.pack(MAGIC, FRAMING_VERSION, opcode, 0, 0, 1, HELLO_BYTES_MAX + 1)
            (frame,) = answers(guarded.port, header)
            assert frame.status == Status.BAD_REQUEST, f"{cls.__name__}: larger than any HELLO"
        bystander.get_map()
        counters = bystander.status()["manager"]["counters"]
        assert counters["handler_errors"] == 0
    periods = 1 + int((time.monotonic() - began) / LINES_S)
    log = guarded.log.read_text()
    assert "Traceback" not in log and log.count("refusing") <= periods * LINES_MAX
    assert log.count("more lines") < periods, "one line for each period that is over"


@pytest.mark.quick
@pytest.mark.parametrize("kind", KINDS)
def test_no_server_looks_into_a_body(kind: str) -> None:
    """As above, for each kind of server and the messages of all of them."""
    rng = random.Random(12)
    opening = {M.Hello, M.Ping, M.Auth, M.Prove}
    other = Status.UNAUTHORIZED if kind == "manager" else Status.BAD_REQUEST  # data servers take nothing before HELLO
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving(kind, old_tokens(TOKEN)))
        bystander = stack.enter_context(contextlib.closing(Channel.tcp(*server.address, WAIT_S)))
        greet(bystander, server.service, client_hello(Role.CLIENT), TOKEN)
        port = server.address[1]
        for opcode, codec in CODECS.items():
            body = rng.randbytes(rng.randrange(HELLO_BYTES_MAX))
            for size, expected in (
                (len(body), Status.BAD_REQUEST if codec.cls in opening else other),
                (HELLO_BYTES_MAX + 1, Status.BAD_REQUEST),
            ):
                frame, *more = answers(port, HEADER.pack(MAGIC, FRAMING_VERSION, opcode, 0, 0, 1, size) + body)
                assert not more, codec.cls.__name__
                assert (frame.opcode, frame.status) == (M.OP_ERROR, expected), codec.cls.__name__
                if kind != "manager" and codec.cls not in opening and size == len(body):
                    said = NOT_A_MANAGER if opcode in FOR_MANAGERS else "the first message must be HELLO"
                    assert decode(frame).text == said, "not what is wrong with the body"
        assert bystander.call(M.Ping(7)) == M.Pong(7)
        assert server.loop.handler_errors == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_refused_token_is_counted(kind: str) -> None:
    with serving(kind, old_tokens(TOKEN)) as server:
        for count in (1, 2):
            with contextlib.closing(Channel.tcp(*server.address, WAIT_S)) as channel, pytest.raises(Refused):
                greet(channel, server.service, client_hello(Role.CLIENT), "")
            wait_until(lambda count=count: server.loop.unauthorized == count, "it is counted")  # type: ignore[misc]
        with contextlib.closing(Channel.tcp(*server.address, WAIT_S)) as channel:
            greet(channel, server.service, client_hello(Role.CLIENT), TOKEN)
        assert server.loop.unauthorized == 2


@pytest.mark.quick
def test_three_hundred_that_say_nothing(guarded: Process) -> None:
    """They cost the manager some hundred sockets, and others nothing."""
    socks = [socket.create_connection(("127.0.0.1", guarded.port), WAIT_S) for _ in range(300)]
    try:
        for sock in socks[150:]:
            sock.sendall(b"SiMM\1\0")
        with guarded.client(token=TOKEN) as client:
            assert client.status()["manager"]["connections"] <= 257
    finally:
        for sock in socks:
            sock.close()

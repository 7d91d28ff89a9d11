"""Tokens never cross the wire, and who squats a server's port learns nothing of use."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from simm.client import Client
from simm.config.client_options import ClientOptions
from simm.errors import SimmError, TransportError
from simm.ipc.steps import finish
from simm.net.channel import Channel, Refused, greet
from simm.rpc import Connection, Flag, Frame, decode, encode, reply
from simm.sdk.manager_link import Subscription
from simm.sdk.path import ClientContext
from simm.sdk.tcp import TcpPath
from simm.wire import messages as M
from simm.wire.auth import Gate
from simm.wire.hello import client_hello
from simm.wire.messages import Role, Service, Status
from tests.support.frame_server import FrameServer
from tests.support.manager_process import WAIT_S, Process
from tests.support.token_servers import KINDS, serving
from tests.support.tokens import old_tokens
from tests.support.waiting import wait_until

TOKEN = "the-token-of-this-test"
OTHER = "another-token-of-it"


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(TOKEN + "\n")
    path.chmod(0o600)
    return path


class Squatter(FrameServer):
    """Listens where a server was, answers as it likes, and keeps what it hears."""

    def __init__(self, tokens: tuple[str, ...], forged: bytes = b"", service: int = Service.MANAGER) -> None:
        self.service = service
        #: Shown as its proof, instead of one by a token.
        self.forged = forged
        #: Sent before each answer.
        self.pushed = b""
        self.heard = b""
        self._tokens = tokens
        super().__init__()

    def on_connect(self) -> Gate:
        """A real server's side of the handshake."""
        return Gate(self.service, old_tokens(*self._tokens))

    def on_data(self, data: bytes) -> None:
        """Keep it."""
        with self.lock:
            self.heard += data

    def on_frame(self, sock: socket.socket, frame: Frame, state: Gate) -> None:
        """Prove what it can, and welcome everybody."""
        msg = decode(frame)
        answer, status = state.take(msg) if isinstance(msg, M.Auth) else (M.Welcome(2, 0, 7, 0, 1, 1, 1, ""), 0)
        if self.forged and isinstance(msg, M.Auth):
            answer, status = M.Challenge(msg.service, bytes(16), self.forged), 0
        sock.sendall(self.pushed + reply(answer, frame.request_id, status))


@pytest.fixture(
    params=[((), b""), ((OTHER,), b""), ((), bytes(32))], ids=["without a token", "with another token", "a forger"]
)
def squatter(request: pytest.FixtureRequest) -> Iterator[Squatter]:
    made = Squatter(*request.param)
    yield made
    made.stop()


@pytest.mark.quick
def test_a_squatter_hears_a_nonce_and_nothing_else(squatter: Squatter) -> None:
    with pytest.raises(TransportError, match="token"):
        Client("{}:{}".format(*squatter.address), token=TOKEN, deadline_s=WAIT_S)
    conn = Connection()
    conn.receive_data(squatter.heard)
    while (frame := conn.next_frame()) is not None:
        assert isinstance(decode(frame), M.Auth)
    assert squatter.heard and TOKEN.encode() not in squatter.heard


@pytest.mark.quick
@pytest.mark.parametrize("known", [(), (OTHER,)], ids=["without a token", "with another token"])
@pytest.mark.parametrize("kind", ["stream", "endpoint"])
def test_a_data_server_s_squatter_hears_no_more(kind: str, known: tuple[str, ...]) -> None:
    """Neither the token nor a digest, at a stream's port and at an endpoint's. The control: one that has it."""

    def heard_by(tokens: tuple[str, ...]) -> set[type]:
        made = Squatter(tokens, service=Service.STREAM if kind == "stream" else Service.ENDPOINT)
        context = ClientContext(ClientOptions(deadline_s=WAIT_S, token=TOKEN))
        try:
            if kind == "stream":
                path = TcpPath(context, *made.address)
                with contextlib.closing(path):
                    path.connect()
                    path.greet()
                    finish(path.exists([bytes(16)]))
            else:
                with contextlib.closing(Channel.tcp(*made.address, WAIT_S)) as channel:
                    greet(channel, Service.ENDPOINT, client_hello(Role.CLIENT), TOKEN)
        except SimmError as exc:
            assert TOKEN not in str(exc)
        finally:
            made.stop()
        assert TOKEN.encode() not in made.heard
        conn, found = Connection(), set()
        conn.receive_data(made.heard)
        while (frame := conn.next_frame()) is not None:
            found.add(type(decode(frame)))
        return found

    assert heard_by(known) == {M.Auth}
    assert heard_by((TOKEN,)) > {M.Auth, M.Prove}


@pytest.mark.quick
def test_a_squatter_s_map_is_not_believed(squatter: Squatter) -> None:
    """A push needs no request. A map by it would name servers of the squatter's choice."""
    squatter.pushed = encode(M.MapReply(1 << 20, 7, [], b""), 0, flags=Flag.PUSH)
    maps: list[M.MapReply] = []

    def on_map(msg: M.MapReply) -> bool:
        maps.append(msg)
        return True

    subscription = Subscription([squatter.address], WAIT_S, TOKEN, on_map)

    def asked() -> bool:
        with pytest.raises(TransportError):
            subscription.connect(0.1)
        return bool(squatter.heard)

    wait_until(asked, "it is asked for a map")
    subscription.close()
    assert not maps


@pytest.mark.fault("F26", ci="wrong and missing tokens", whole="the same")
@pytest.mark.quick
def test_the_manager_asks_for_a_proof(run: Callable[..., Process], token_file: Path) -> None:
    process = run(None, "--token-file", str(token_file))

    def opened(service: int, hello: M.Hello, token: str) -> M.Welcome:
        with contextlib.closing(Channel.tcp("127.0.0.1", process.port, WAIT_S)) as channel:
            return greet(channel, service, hello, token)

    plain = client_hello(Role.ADMIN)
    assert opened(Service.MANAGER, plain, TOKEN).proto == M.PROTOCOL_MAX
    for service, hello, token, status in (
        (Service.MANAGER, plain, "", Status.UNAUTHORIZED),
        (Service.MANAGER, plain._replace(token=TOKEN), "", Status.UNAUTHORIZED),
        (Service.MANAGER, plain, OTHER, Status.UNAUTHORIZED),
        (Service.STREAM, plain, TOKEN, Status.BAD_REQUEST),
    ):
        with pytest.raises(Refused) as caught:
            opened(service, hello, token)
        assert caught.value.status == status and TOKEN not in str(caught.value)
    with process.client(token=TOKEN) as client:
        wait_until(lambda: client.status()["manager"]["unauthorized"] == 3, "it counts them")
    assert TOKEN not in process.log.read_text() and OTHER not in process.log.read_text()


@pytest.mark.fault("F26", ci="1 replay to each kind of server", whole="the same")
@pytest.mark.parametrize("kind", KINDS)
def test_a_recorded_opening_is_of_no_use(kind: str) -> None:
    """All bytes that a client has sent, sent again."""
    sent: list[bytes] = []
    with serving(kind, old_tokens(TOKEN)) as server:
        with contextlib.closing(Channel.tcp(*server.address, WAIT_S)) as channel:
            submit = channel.send_raw

            def recording(data: bytes, fds: tuple[int, ...] = ()) -> None:
                sent.append(data)
                submit(data, fds)

            channel.send_raw = recording  # type: ignore[method-assign]
            greet(channel, server.service, client_hello(Role.CLIENT), TOKEN)
        with socket.create_connection(server.address, WAIT_S) as sock:
            sock.sendall(b"".join(sent) + encode(M.MapGet(0, 0), 9))
            conn, said = Connection(), []
            with contextlib.suppress(ConnectionResetError):
                while data := sock.recv(1 << 16):
                    conn.receive_data(data)
            while (frame := conn.next_frame()) is not None:
                said.append((type(decode(frame)), frame.status))
    assert said == [(M.Challenge, Status.OK), (M.Error, Status.UNAUTHORIZED)]



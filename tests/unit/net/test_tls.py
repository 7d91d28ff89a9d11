"""TLS on the event loop and in channels: handshakes that go wrong, certificates that change, records and frames."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import select
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from simm.config import certificates
from simm.config.certificates import validity
from simm.config.parsers import TlsOptions
from simm.errors import ConfigError, TransportError
from simm.net import tls
from simm.net.admission import HELLO_BYTES_MAX, HELLO_S
from simm.net.channel import Channel, check_tls
from simm.net.http import Page, Web
from simm.net.listeners import listen_tcp
from simm.net.loop import Loop
from simm.net.peer import LAG_S, Peer, Service
from simm.net.tls_peer import TLS_ONLY, ServerTls, TlsPeer, accepting, connecting
from simm.rpc import Connection, Frame, decode, encode
from simm.wire import messages as M
from tests.support.certificates import Authority, needs_openssl
from tests.support.clock import Clock
from tests.support.waiting import WAIT_S, wait_until

MIB = 1 << 20
HOST = "127.0.0.1"
pytestmark = needs_openssl


class Made:
    """The certificates of this module."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder)
        self.other = Authority(folder, "other")
        self.good = str(self.authority.issue("good"))
        self.ca = str(self.authority.ca)
        self.foreign = str(self.other.issue("foreign"))
        self.expired = str(self.authority.issue("expired", days=-1))
        self.elsewhere = str(self.authority.issue("elsewhere", "IP:10.9.8.7,DNS:manager.example"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("certificates"))



class Echo(Service):
    """Answers PING, and STATS by bulk: as many bytes as a STATS_REPLY announces."""

    hello_first = True
    read_bytes = 4096

    def __init__(self) -> None:
        self.peers: list[Peer] = []
        self.closed: list[str] = []
        self.answers: list[Any] = []
        self.bulk = memoryview(b"")

    def on_connect(self, peer: Peer) -> None:
        self.peers.append(peer)

    def on_frame(self, peer: Peer, frame: Frame) -> None:
        msg = decode(frame)
        if isinstance(msg, M.Pong):
            self.answers.append(msg)
            return
        peer.admit()
        if isinstance(msg, M.Ping):
            peer.send_message(M.Pong(msg.cookie), frame.request_id)
        else:
            peer.send_message(M.Done(1), frame.request_id)
            peer.bulk = True
            peer.send(self.bulk)

    def on_drain(self, peer: Peer) -> None:
        peer.bulk = False

    def on_close(self, peer: Peer, reason: str) -> None:
        self.closed.append(reason)


class Bench:
    """A loop with a service behind a port, with TLS if there are files."""

    def __init__(self, files: TlsOptions | None) -> None:
        self.clock = Clock()
        self.loop = Loop(self.clock)
        self.service = Echo()
        self.listener = listen_tcp(HOST, 0)
        self.port: int = self.listener.getsockname()[1]
        self.tls = None if files is None else ServerTls(files)
        self.loop.listen(self.listener, self.service, peers=accepting(self.tls))
        self._thread: threading.Thread | None = None

    def turn(self, count: int = 3) -> None:
        for _ in range(count):
            self.loop.run_once(0.0)

    def until(self, condition: Callable[[], object]) -> None:
        """Run the loop until this is so."""
        def turned() -> bool:
            self.turn()
            return bool(condition())

        wait_until(turned, "the loop does it")

    def serve(self) -> None:
        """Run the loop in a thread from now on, by the time of day."""
        def run() -> None:
            while not self._ended:
                self.loop.run_once(0.01)

        self._ended = False
        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        if self._thread is not None:
            self._ended = True
            self._thread.join(WAIT_S)
        self.loop.close()


@pytest.fixture
def bench(made: Made) -> Iterator[Callable[..., Bench]]:
    with contextlib.ExitStack() as stack:

        def start(files: TlsOptions | None = TlsOptions(cert=made.good)) -> Bench:  # noqa: B008 -- immutable
            opened = Bench(files)
            stack.callback(opened.close)
            return opened

        yield start


class Raw:
    """A client's end that moves bytes only when it is told."""

    def __init__(self, bench: Bench, made: Made) -> None:
        context = ssl.create_default_context(cafile=made.ca)
        self.bench = bench
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, self.outgoing, server_hostname=HOST)
        self.sock = socket.create_connection((HOST, bench.port), WAIT_S)
        self.sock.setblocking(False)
        self.conn = Connection()

    def send(self, data: bytes) -> None:
        """Send bytes as they are, and let the server see them."""
        self.sock.send(data)
        self.bench.turn()

    def next(self) -> bytes:
        """What the handshake wants to send next; nothing when it is over."""
        while True:
            with contextlib.suppress(ssl.SSLWantReadError):
                self.tls.do_handshake()
                return self.outgoing.read()
            if self.outgoing.pending:
                return self.outgoing.read()
            self.receive()

    def receive(self) -> None:
        """Take what the server has sent, at least one byte."""
        def got() -> bool:
            with contextlib.suppress(BlockingIOError):
                self.incoming.write(self.sock.recv(1 << 20))
                return True
            self.bench.turn()
            return False

        wait_until(got, "the server answers")

    def sealed(self, data: bytes) -> bytes:
        """The records with this in them."""
        self.tls.write(data)
        return self.outgoing.read()

    def messages(self, count: int) -> list[Any]:
        """So many messages of the server."""
        found: list[Any] = []
        while len(found) < count:
            try:
                self.conn.receive_data(self.tls.read(1 << 16))
            except ssl.SSLWantReadError:
                self.receive()
            while (frame := self.conn.next_frame()) is not None:
                found.append(decode(frame))
        return found


@pytest.fixture
def raw(made: Made) -> Iterator[Callable[[Bench], Raw]]:
    opened: list[Raw] = []

    def connect(bench: Bench) -> Raw:
        before = len(bench.service.peers)
        opened.append(Raw(bench, made))
        bench.until(lambda: len(bench.service.peers) > before)
        return opened[-1]

    yield connect
    for each in opened:
        each.sock.close()


# -- handshakes ----------------------------------------------------------------------------------


def test_a_handshake_byte_by_byte(bench: Callable[..., Bench], raw: Callable[[Bench], Raw]) -> None:
    server = bench()
    client = raw(server)
    while data := client.next():
        for at in range(len(data)):
            client.send(data[at : at + 1])
    for byte in client.sealed(encode(M.Ping(7), 1)):
        client.send(bytes([byte]))
    assert client.messages(1) == [M.Pong(7)]
    assert len(server.loop.strangers) == 0 and server.service.closed == []


def test_a_handshake_that_stalls_has_the_time_of_a_hello(
    bench: Callable[..., Bench], raw: Callable[[Bench], Raw]
) -> None:
    """Nothing, half a ClientHello, and a whole one. Without the latter OpenSSL has nothing of it."""
    server = bench()
    silent, half, answered = raw(server), raw(server), raw(server)
    hello = half.next()
    half.send(hello[: len(hello) // 2])
    answered.send(answered.next())
    server.until(lambda: isinstance(server.service.peers[2].sock, ssl.SSLSocket))
    assert [type(peer.sock) for peer in server.service.peers[:2]] == [socket.socket, socket.socket]
    assert len(server.loop.strangers) == 3
    until = server.clock.now + HELLO_S
    while server.clock.now < until:
        assert not server.service.closed
        server.clock.now += LAG_S / 2  # a loop that was late itself gives them more time
        server.turn(1)
    for _ in range(40):
        server.clock.now += LAG_S / 2
        server.turn(1)
    assert set(server.service.closed) == {"no HELLO within 5 s"} and not server.loop.peers
    assert silent.sock.fileno() >= 0


def test_a_peer_that_goes_in_the_middle(bench: Callable[..., Bench], raw: Callable[[Bench], Raw]) -> None:
    """The loop must not see its end again and again until its time is up."""
    server = bench()
    for bytes_sent in (0, 1, 20, None):
        client = raw(server)
        client.send(client.next()[:bytes_sent])
        client.sock.close()
        server.until(lambda: not server.loop.peers)
    assert len(server.service.closed) == 4
    assert server.loop.run_once(0.0) == 0


@pytest.mark.parametrize(
    "first",
    [
        b"\x16\x03\x01" + (HELLO_BYTES_MAX + 1).to_bytes(2, "big") + b"\x01\x00\x10\x00",  # a larger record
        b"\x16\x03\x01\x01\x00\x01\x01\xff\xff" + bytes(300),  # a message of several records
        b"\x16\x03\x01\x01\x00\x02\x00\x00\xfc" + bytes(300),  # no ClientHello
        b"\x16\x02\x01\x01\x00\x01\x00\x00\xfc" + bytes(300),  # no TLS that there is
        b"\x16\x03\x01\x01\x00\x01\x00\x00\xfc" + bytes(300),  # noise in it
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_what_is_no_handshake(bench: Callable[..., Bench], raw: Callable[[Bench], Raw], first: bytes) -> None:
    server = bench()
    raw(server).send(first)
    server.until(lambda: server.service.closed)
    assert server.loop.protocol_errors == 1 and server.loop.handler_errors == 0


def test_a_plain_client_is_told(bench: Callable[..., Bench]) -> None:
    server = bench()
    server.serve()
    with contextlib.closing(Channel.tcp(HOST, server.port, WAIT_S)) as channel:
        with pytest.raises(TransportError, match="TLS only") as caught:
            channel.call(M.Ping(1))
    assert str(caught.value) == TLS_ONLY


def test_a_plain_server_is_named(bench: Callable[..., Bench], made: Made) -> None:
    server = bench(None)
    server.serve()
    with pytest.raises(TransportError, match=r"does not speak TLS at this port: start it with --tls-cert"):
        Channel.tcp(HOST, server.port, WAIT_S, tls=TlsOptions(made.ca))
    wait_until(lambda: server.service.closed, "the server closes")
    assert "speaks TLS, and this side does not" in server.service.closed[0]


def test_a_server_that_says_nothing(made: Made) -> None:
    with socket.create_server((HOST, 0)) as listener:
        with pytest.raises(TransportError, match="deadline passed during the TLS handshake"):
            Channel.tcp(HOST, listener.getsockname()[1], 0.05, tls=TlsOptions(made.ca))


# -- who is trusted --------------------------------------------------------------------------------

REFUSED = [
    ("foreign", "no authority in --tls-ca"), ("expired", "has expired"),
    ("elsewhere", "its subjectAltName must have 127.0.0.1"),
]  # fmt: skip


@pytest.mark.fault("F26", ci="3 certificates", whole="the same")
@pytest.mark.parametrize(("certificate", "why"), REFUSED)
def test_a_certificate_that_is_not_accepted(
    bench: Callable[..., Bench], made: Made, certificate: str, why: str
) -> None:
    server = bench(TlsOptions(cert=getattr(made, certificate)))
    server.serve()
    with pytest.raises(TransportError, match=why):
        Channel.tcp(HOST, server.port, WAIT_S, tls=TlsOptions(made.ca))
    wait_until(lambda: server.service.closed, "the server hears of it")


@pytest.mark.parametrize("certificate", [certificate for certificate, _ in REFUSED])
def test_it_is_the_check_that_does_not_accept_it(
    bench: Callable[..., Bench], made: Made, certificate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positive control: without verification the same servers are connected to."""
    def blind(files: TlsOptions, kind: type[ssl.SSLSocket]) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode, context.sslsocket_class = False, ssl.CERT_NONE, kind
        return context

    monkeypatch.setattr(tls, "_for_clients", blind)
    tls.for_channels.cache_clear()
    try:
        server = bench(TlsOptions(cert=getattr(made, certificate)))
        server.serve()
        with contextlib.closing(Channel.tcp(HOST, server.port, WAIT_S, tls=TlsOptions(made.ca))) as channel:
            assert channel.call(M.Ping(3)) == M.Pong(3)
    finally:
        tls.for_channels.cache_clear()


def test_a_name_for_all_servers(bench: Callable[..., Bench], made: Made) -> None:
    """Where addresses come and go, all servers' certificates have one name."""
    server = bench(TlsOptions(cert=made.elsewhere))
    server.serve()
    with contextlib.closing(
        Channel.tcp(HOST, server.port, WAIT_S, tls=TlsOptions(made.ca, name="manager.example"))
    ) as channel:
        assert channel.call(M.Ping(3)) == M.Pong(3)
    for name in ("other.example", ".", ".example", "\udcff", "a" * 300):
        with pytest.raises(TransportError):
            Channel.tcp(HOST, server.port, WAIT_S, tls=TlsOptions(made.ca, name=name))


def test_certificates_of_clients_are_optional(bench: Callable[..., Bench], made: Made) -> None:
    server = bench(TlsOptions(cert=made.good, clients=str(made.other.ca)))
    server.serve()

    def ping(cert: str) -> None:
        with contextlib.closing(Channel.tcp(HOST, server.port, WAIT_S, tls=TlsOptions(made.ca, cert))) as channel:
            assert channel.call(M.Ping(3)) == M.Pong(3)

    ping("")
    ping(made.foreign)  # which the other authority has signed
    with pytest.raises(TransportError):
        ping(made.good)


@pytest.mark.parametrize(("certificate", "why"), [("good", ""), *REFUSED])
def test_a_loop_that_connects(
    bench: Callable[..., Bench], made: Made, certificate: str, why: str
) -> None:
    """As a data server connects to its manager. What it sends at once follows the handshake."""
    server = bench(TlsOptions(cert=getattr(made, certificate)))
    sock = socket.create_connection((HOST, server.port))
    mine = Echo()
    peer = server.loop.adopt(sock, mine, "server", peers=connecting(tls.for_loops(TlsOptions(made.ca)), HOST))
    peer.send(encode(M.Ping(5), 1))
    if why:
        server.until(lambda: mine.closed)
        assert why in mine.closed[0]
    else:
        server.until(lambda: mine.answers)
        assert mine.answers == [M.Pong(5)]


def test_a_loop_that_connects_to_plain_text(bench: Callable[..., Bench], made: Made) -> None:
    server = bench(None)
    sock = socket.create_connection((HOST, server.port))
    mine = Echo()
    server.loop.adopt(sock, mine, "server", peers=connecting(tls.for_loops(TlsOptions(made.ca)), HOST))
    server.until(lambda: mine.closed)
    assert "does not speak TLS" in mine.closed[0]


# -- files -----------------------------------------------------------------------------------------


def serial(bench: Bench, ca: str) -> bytes:
    """The certificate that the server shows now."""
    channel = Channel.tcp(HOST, bench.port, WAIT_S, tls=TlsOptions(ca))
    with contextlib.closing(channel):
        assert channel.call(M.Ping(1)) == M.Pong(1)
        assert isinstance(channel.sock, ssl.SSLSocket)
        found = channel.sock.getpeercert(binary_form=True)
        assert found is not None
        return found


def replace(path: Path, text: str) -> None:
    """As certificate managers and Kubernetes do: another file under the same name."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.chmod(0o600)
    os.replace(new, path)


def test_a_new_certificate_is_used_without_a_restart(
    made: Made, tmp_path: Path, bench: Callable[..., Bench], caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(tls, "LOOK_S", 0.0)
    used = tmp_path / "server.pem"
    replace(used, Path(made.good).read_text())
    server = bench(TlsOptions(cert=str(used)))
    server.serve()
    first = serial(server, made.ca)
    with contextlib.closing(Channel.tcp(HOST, server.port, WAIT_S, tls=TlsOptions(made.ca))) as before:
        replace(used, Path(made.foreign).read_text())
        with pytest.raises(TransportError, match="no authority"):
            serial(server, made.ca)
        assert serial(server, str(made.other.ca)) != first
        assert before.call(M.Ping(1)) == M.Pong(1)
    with caplog.at_level(logging.WARNING):
        replace(used, "half a certificate")
        assert serial(server, str(made.other.ca)) != first
    assert "what was read before stays in use" in caplog.text
    replace(used, Path(made.good).read_text())
    assert serial(server, made.ca) == first


def test_the_end_of_the_certificate_that_is_shown(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tls, "LOOK_S", 0.0)
    used, lasting = tmp_path / "server.pem", made.authority.issue("lasting", days=9).read_text()
    replace(used, Path(made.good).read_text())
    server = ServerTls(TlsOptions(cert=str(used)))
    first = server.certificate_ends()
    assert first == validity(Path(made.good).read_text())[1]
    replace(used, lasting)
    assert server.certificate_ends() == validity(lasting)[1] > first + 6 * 86_400
    for useless in ("half a certificate", Path(made.good).read_text().partition("-----BEGIN PRIVATE")[0]):
        replace(used, useless)
        assert server.certificate_ends() == validity(lasting)[1], "the old one is still shown"
    assert caplog.text.count("what was read before stays in use") == 2

    def odd(_pem: str) -> tuple[float, float]:
        raise ValueError("a form that nobody knows")

    monkeypatch.setattr(certificates, "validity", odd)
    replace(used, Path(made.good).read_text())
    assert server.certificate_ends() is None and "its end cannot be told" in caplog.text


def test_clients_read_their_authorities_again(
    made: Made, tmp_path: Path, bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "LOOK_S", 0.0)
    used = tmp_path / "ca.pem"
    replace(used, made.other.ca.read_text())
    server = bench()
    server.serve()
    with pytest.raises(TransportError, match="no authority"):
        serial(server, str(used))
    replace(used, Path(made.ca).read_text())
    assert serial(server, str(used))


def test_files_of_no_use(made: Made, tmp_path: Path) -> None:
    folder = made.authority.folder
    mixed = tmp_path / "mixed"
    mixed.write_text((folder / "good.crt").read_text() + (folder / "foreign.key").read_text())
    mixed.chmod(0o600)
    locked = tmp_path / "locked"
    locked.write_text("-----BEGIN ENCRYPTED PRIVATE KEY-----\n")
    locked.chmod(0o600)
    opened = tmp_path / "opened"
    opened.write_text(Path(made.good).read_text())
    opened.chmod(0o644)
    for files, why in (
        (TlsOptions(cert=str(mixed)), "does not belong"),
        (TlsOptions(cert=made.good, key=str(locked)), "passphrase"),
        (TlsOptions(cert=str(opened)), "chmod 600"),
        (TlsOptions(cert=str(tmp_path / "none")), "none"),
        (TlsOptions(cert=made.good, clients=str(locked)), "--tls-client-ca"),
    ):
        with pytest.raises(ConfigError, match=why):
            ServerTls(files)
    with pytest.raises(ConfigError, match="--tls-ca"):
        check_tls(TlsOptions(str(locked)))


# -- records and frames ------------------------------------------------------------------------------


def test_frames_that_openssl_keeps_are_found(
    bench: Callable[..., Bench], raw: Callable[[Bench], Raw], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record holds more than the service reads at a time, and nothing follows it. Also while the peer is paused."""
    def connected(server: Bench) -> Raw:
        client = raw(server)
        while data := client.next():
            client.send(data)
        return client

    many = b"".join(encode(M.Ping(number), number) for number in range(480))
    assert Echo.read_bytes < len(many) < tls.RECORD_BYTES
    client = connected(bench())
    client.send(client.sealed(many))
    assert client.messages(480) == [M.Pong(number) for number in range(480)]

    peer = client.bench.service.peers[0]
    client.sock.send(client.sealed(many))
    peer.pause(True)
    client.bench.turn(10)
    peer.pause(False)
    assert client.messages(480)[-1] == M.Pong(479)

    monkeypatch.setattr(TlsPeer, "_look_again", lambda self: None)  # positive control
    client = connected(bench())
    client.send(client.sealed(many))
    client.bench.turn(50)
    client.receive()
    with pytest.raises(ssl.SSLWantReadError):
        for _ in range(480):
            client.conn.receive_data(client.tls.read(1 << 16))
    assert client.conn.pending_bytes < 480 * len(encode(M.Pong(0), 0))


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_much_and_many(bench: Callable[..., Bench], made: Made, version: ssl.TLSVersion) -> None:
    """16 MiB at once, to a reader that is slower than the kernel's buffers, and a thousand small frames."""
    server = bench()
    assert server.tls is not None
    server.tls.ports.get().maximum_version = version
    server.service.bulk = memoryview(os.urandom(16 * MIB + 123))
    server.serve()
    with contextlib.closing(Channel.tcp(HOST, server.port, WAIT_S, tls=TlsOptions(made.ca))) as channel:
        channel.call(M.Stats(0))
        target = bytearray(len(server.service.bulk))
        channel.receive_bulk(memoryview(target))
        assert target == server.service.bulk
        numbers = [channel.submit(M.Ping(number)) for number in range(1000)]
        assert [channel.result(channel.wait(number)).cookie for number in numbers] == list(range(1000))
        channel.poll_pushes()
        assert isinstance(channel.sock, ssl.SSLSocket) and channel.sock.version() == version.name.replace("_", ".")


def test_a_deadline_of_a_channel(bench: Callable[..., Bench], made: Made) -> None:
    """The kernel's time-outs, and its flags, do not reach through OpenSSL."""
    server = bench()
    server.serve()
    channel = Channel.tcp(HOST, server.port, WAIT_S, tls=TlsOptions(made.ca))
    channel.deadline_s = 0.05
    with contextlib.closing(channel):
        number = channel.next_id()
        channel.begin()
        with pytest.raises(TransportError, match="deadline passed"):
            channel.wait(number)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("dontwait", [True, False])
def test_a_peer_that_pauses_gets_each_byte_once(made: Made, version: ssl.TLSVersion, dontwait: bool) -> None:
    """A send that the kernel or the time breaks off says how many bytes have gone. Pieces of all sizes, in any mix."""
    rng = random.Random(version * 2 + dontwait)
    here, there = socket.socketpair()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.good)
    context.maximum_version = version
    client = ssl.create_default_context(cafile=made.ca)
    client.sslsocket_class = tls.ChannelSocket
    pieces = [os.urandom(rng.choice((0, 1, 100, 5000, tls.RECORD_BYTES, 70_000, MIB))) for _ in range(60)]
    reads, got = threading.Event(), bytearray()

    def peer() -> None:
        with context.wrap_socket(there, server_side=True) as sock:
            while len(got) < sum(map(len, pieces)):
                reads.wait(WAIT_S)
                got.extend(sock.recv(1 << 16))

    thread = threading.Thread(target=peer, daemon=True)
    thread.start()
    here.settimeout(WAIT_S)
    with client.wrap_socket(here, server_hostname=HOST, do_handshake_on_connect=False) as sock:
        socket.socket.settimeout(sock, WAIT_S)
        sock.do_handshake()
        sock.settimeout(WAIT_S)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", 0, 1000))
        left: list[bytes | memoryview] = list(pieces)
        refused = broken_off = 0
        while left:
            flags = socket.MSG_DONTWAIT if dontwait else 0
            try:
                sent = sock.sendmsg(left[:8], (), flags)
            except BlockingIOError:
                refused += 1
                reads.set()
                select.select([], [sock], [], WAIT_S)
                continue
            if rng.random() < 0.1:
                reads.clear()
            while left and sent >= len(left[0]):
                sent -= len(left.pop(0))
            if left and sent:
                broken_off += 1
                left[0] = memoryview(left[0])[sent:]
        reads.set()
        thread.join(WAIT_S)
    assert refused and broken_off, "or the peer has not paused"
    assert got == b"".join(pieces)


# -- pages -------------------------------------------------------------------------------------------


def test_a_page_by_https(made: Made) -> None:
    loop, listener = Loop(), listen_tcp(HOST, 0)
    port: int = listener.getsockname()[1]
    web = Web(loop, listener, {"/": lambda: Page("x" * MIB)}, (), ServerTls(TlsOptions(cert=made.good)).pages)
    ended = threading.Event()

    def run() -> None:
        while not ended.is_set():
            loop.run_once(0.01)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def answer(sock: socket.socket) -> bytes:
        got = b""
        with sock:
            sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
            while data := sock.recv(1 << 16):
                got += data
        return got

    context = ssl.create_default_context(cafile=made.ca)
    try:
        secure = context.wrap_socket(
            socket.create_connection((HOST, port), WAIT_S), server_hostname=HOST, suppress_ragged_eofs=False
        )
        assert answer(secure).endswith(b"x" * MIB)
        assert b"https only" in answer(socket.create_connection((HOST, port), WAIT_S))
        for half in (b"", b"\x16", b"\x16\x03\x01\x01\x00\x01\x00\x00\xfc" + bytes(300)):
            with socket.create_connection((HOST, port), WAIT_S) as sock:
                sock.sendall(half)
        wait_until(lambda: not web.connections, "all are over")
    finally:
        ended.set()
        thread.join(WAIT_S)
        web.close()
        loop.close()

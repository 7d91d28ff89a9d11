"""What the etcd client asks, what it makes of good and malformed answers, and how a coordinator is set."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from simm.config.parsers import parse_coordinator
from simm.config.settings import Settings, load
from simm.control import etcd as etcd_module
from simm.control.election import connect
from simm.control.etcd import Etcd, EtcdError, created, delete, followed_tls, get, modified, put
from simm.errors import ConfigError
from simm.net import tls
from simm.net.peer_uid import HasClosed, NotHere, UnknownUser, tcp_uid
from tests.support.certificates import Authority, needs_openssl, openssl
from tests.support.clock import Clock
from tests.support.etcd_answers import HEADER, ONE, WAIT_S, Fake, error, of, page, says
from tests.support.other_user import UID, needs_root
from tests.support.ports import reserve_port
from tests.support.waiting import wait_until

# --- a server that does what the test says -----------------------------------------------------


def asking(*endpoints: tuple[str, int], **more: Any) -> Etcd:
    """Return a client that waits for a busy machine."""
    return Etcd(endpoints, **{"deadline_s": WAIT_S, **more})


def test_what_is_asked_and_what_is_read() -> None:
    answers = {
        "/v3/kv/range": {**HEADER, "kvs": [ONE], "count": "1"},
        "/v3/kv/txn": {**HEADER, "succeeded": True, "responses": [{"response_put": {}}, {"response_range": {}}]},
        "/v3/lease/grant": {**HEADER, "ID": "123456789012345678", "TTL": "5"},
        "/v3/lease/keepalive": {"result": {**HEADER, "ID": "12", "TTL": "5"}},
        "/v3/lease/revoke": HEADER,
    }
    with Fake(lambda peer, path, body: peer.sendall(of(answers[path]))) as fake:
        etcd = asking(fake.endpoint)
        assert etcd.get(b"k") == (b"k", b"v", 3, 5, 9)
        done = etcd.txn([created(b"k", 0), modified(b"k", 4)], [put(b"k", b"v", 9), get(b"k")], [delete(b"a", b"b")])
        assert done == (True, 7, [None])
        assert etcd.grant(5) == (123456789012345678, 5)
        assert etcd.keepalive(12) == 5
        etcd.revoke(12)
        asked = dict(fake.requests)
    assert asked["/v3/kv/range"] == {"key": "aw=="}
    assert asked["/v3/kv/txn"] == {
        "compare": [
            {"key": "aw==", "target": "CREATE", "result": "EQUAL", "create_revision": "0"},
            {"key": "aw==", "target": "MOD", "result": "EQUAL", "mod_revision": "4"},
        ],
        "success": [
            {"request_put": {"key": "aw==", "value": "dg==", "lease": "9"}}, {"request_range": {"key": "aw=="}},
        ],
        "failure": [{"request_delete_range": {"key": "YQ==", "range_end": "Yg=="}}],
    }  # fmt: skip
    assert asked["/v3/lease/grant"] == {"TTL": "5"}
    assert asked["/v3/lease/keepalive"] == asked["/v3/lease/revoke"] == {"ID": "12"}
MALFORMED: dict[str, bytes] = {
    "nothing": b"",
    "no HTTP": b"SSH-2.0-OpenSSH_9.2\r\n",
    "half a status line": b"HTTP/1.1 20",
    "an endless header": b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000,
    "many headers": b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200 + b"\r\n",
    "a length that is none": b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
    "cut": page(json.dumps(HEADER).encode())[:-3],
    "a chunk that is none": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n",
    "a cut chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\n{}",
    "empty": page(b""),
    "no JSON": page(b"<html>"),
    "no UTF-8": page(b'"\xff\xfe"'),
    "deep JSON": page(b"[" * 100_000),
    "no object": of([HEADER]),
    "a proxy's page": page(b"<html>bad gateway</html>", "502 Bad Gateway"),
    "another service": page(b"Not Found\n", "404 Not Found"),
    "a redirection": page(b"", "302 Found", "Location: http://127.0.0.1:1/\r\n"),
}
#: JSON, but not what etcd answers.
NONSENSE: dict[str, bytes] = {
    "keys that are none": of({**HEADER, "kvs": {"key": "aw=="}}),
    "a key that is none": of({**HEADER, "kvs": ["aw=="]}),
    "no base64": of({**HEADER, "kvs": [{**ONE, "value": "d%=="}]}),
    "bytes that are no text": of({**HEADER, "kvs": [{**ONE, "value": 5}]}),
    "no number": of({**HEADER, "kvs": [{**ONE, "mod_revision": "five"}]}),
    "too large a number": of({**HEADER, "kvs": [{**ONE, "mod_revision": str(1 << 65)}]}),
    "no revision": of({**HEADER, "kvs": [{**ONE, "create_revision": "0"}]}),
    "written before it was created": of({**HEADER, "kvs": [{**ONE, "mod_revision": "2"}]}),
}


@pytest.mark.parametrize("kind", [*MALFORMED, *NONSENSE])
def test_a_malformed_answer_is_an_error(kind: str) -> None:
    with Fake(says(MALFORMED[kind] if kind in MALFORMED else NONSENSE[kind])) as fake:
        with pytest.raises(EtcdError) as caught:
            asking(fake.endpoint).get(b"k")
        assert str(fake.endpoint[1]) in str(caught.value)


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_answer_is_a_detour_where_there_is_another_endpoint(kind: str) -> None:
    with Fake(says(MALFORMED[kind])) as fake:
        with Fake(says(of({**HEADER, "kvs": [ONE]}))) as well:
            assert Etcd([fake.endpoint, well.endpoint], deadline_s=WAIT_S).get(b"k") is not None


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        (lambda etcd: etcd.txn([], []), {"succeeded": True, "responses": []}),
        (lambda etcd: etcd.txn([], []), {"succeeded": True, "responses": [], "header": {"revision": "0"}}),
        (lambda etcd: etcd.txn([], []), {"succeeded": True, "responses": [], "header": 5}),
        (lambda etcd: etcd.txn([], [get(b"k")]), {**HEADER, "succeeded": True}),
        (lambda etcd: etcd.txn([], [get(b"k")]), {**HEADER, "succeeded": True, "responses": [{"response_put": {}}]}),
        (lambda etcd: etcd.txn([], [get(b"k")]), {**HEADER, "succeeded": "yes"}),
        (lambda etcd: etcd.txn([], [get(b"k")]), {"succeeded": True, "responses": [{"response_range": {}}]}),
        (lambda etcd: etcd.grant(5), HEADER),
        (lambda etcd: etcd.grant(5), {**HEADER, "ID": "5"}),
        (lambda etcd: etcd.keepalive(5), HEADER),
        (lambda etcd: etcd.keepalive(5), {"result": {"ID": "6", "TTL": "5"}}),
    ],
)
def test_an_answer_to_something_else_is_an_error(call: Callable[[Etcd], Any], answer: dict[str, Any]) -> None:
    with Fake(says(of(answer))) as fake, pytest.raises(EtcdError, match="malformed") as caught:
        call(asking(fake.endpoint))
    assert caught.value.maybe


def test_an_answer_without_end_is_given_up() -> None:
    def answer(peer: socket.socket, _path: str, _body: dict[str, Any]) -> None:
        peer.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            peer.sendall(b" " * 65536)

    with Fake(answer) as fake, pytest.raises(EtcdError, match="more than 16 MiB"):
        Etcd([fake.endpoint], deadline_s=WAIT_S).get(b"k")


def test_one_deadline_for_all_of_a_slow_answer() -> None:
    """Each byte comes well within any time-out of a read; all of them would take a minute."""
    ended = threading.Event()

    def answer(peer: socket.socket, _path: str, _body: dict[str, Any]) -> None:
        for byte in page(b" " * 600):
            peer.sendall(bytes([byte]))
            if ended.wait(0.1):
                return

    with Fake(answer) as fake:
        start = time.monotonic()
        try:
            with pytest.raises(EtcdError, match="in time") as caught:
                Etcd([fake.endpoint], deadline_s=1.5).get(b"k")
        finally:
            ended.set()
        assert time.monotonic() - start < WAIT_S
        assert caught.value.maybe


def test_a_silent_endpoint_leaves_time_for_the_others() -> None:
    """It takes connections (the kernel does) and says nothing; another refuses them; the third answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent, Fake(says(of({**HEADER, "kvs": [ONE]}))) as well:
        etcd = Etcd([silent.getsockname(), ("127.0.0.1", reserve_port()), well.endpoint], deadline_s=6.0)
        assert etcd.get(b"k") is not None
        # Who answered last is asked first.
        silent.settimeout(0.05)
        silent.accept()[0].close()
        assert etcd.get(b"k") is not None
        with pytest.raises(TimeoutError):
            silent.accept()
        with pytest.raises(EtcdError, match=r"in time.*refused|refused.*in time"):
            Etcd([silent.getsockname(), ("127.0.0.1", reserve_port())], deadline_s=2.0).get(b"k")


def test_a_transaction_that_may_have_been_done_is_not_sent_again() -> None:
    done = of({**HEADER, "succeeded": True})
    with Fake(says(b"")) as lost, Fake(says(done)) as well:
        refused = ("127.0.0.1", reserve_port())
        with pytest.raises(EtcdError) as caught:
            asking(refused, lost.endpoint, well.endpoint).txn([], [])
        assert caught.value.maybe and len(lost.requests) == 1 and not well.requests
        # One that was never sent is.
        assert asking(refused, well.endpoint).txn([], []).succeeded
        with pytest.raises(EtcdError) as caught:
            asking(refused).txn([], [])
        assert not caught.value.maybe


def test_what_etcd_refuses_is_not_asked_elsewhere() -> None:
    with Fake(says(error(3, "etcdserver: request is too large"))) as fake, Fake(says(of(HEADER))) as other:
        with pytest.raises(EtcdError, match="too large") as caught:
            asking(fake.endpoint, other.endpoint).txn([], [])
        assert caught.value.code == 3 and not caught.value.maybe and not other.requests
    unavailable = error(14, "etcdserver: no leader", "503 Service Unavailable")
    with Fake(says(unavailable)) as fake, Fake(says(of({**HEADER, "kvs": [ONE]}))) as other:
        assert asking(fake.endpoint, other.endpoint).get(b"k") is not None
    gone = error(5, "etcdserver: requested lease not found", "404 Not Found")
    with Fake(says(gone)) as fake:
        etcd = asking(fake.endpoint)
        assert etcd.keepalive(5) == 0
        etcd.revoke(5)
        with pytest.raises(EtcdError, match="lease not found"):
            etcd.txn([], [put(b"k", b"v", 5)])
    ended = of({"result": {**HEADER, "ID": "5"}})
    broken = of({"error": {"grpc_code": 14, "http_code": 503, "message": "no leader"}})
    with Fake(says(ended, broken)) as fake:
        etcd = asking(fake.endpoint)
        assert etcd.keepalive(5) == 0
        with pytest.raises(EtcdError, match="no leader"):
            etcd.keepalive(5)


def test_issue_what_etcd_says_can_be_shown() -> None:
    """A lone surrogate in it ended the manager that showed it on a page."""
    with Fake(says(error(3, "evil \ud800\x1b[2J"))) as fake, pytest.raises(EtcdError, match="evil") as caught:
        asking(fake.endpoint).get(b"k")
    assert str(caught.value).isprintable() and str(caught.value).encode()


def test_a_keepalives_stream_need_not_end() -> None:
    line = json.dumps({"result": {"ID": "5", "TTL": "3"}}).encode() + b"\n"
    ended = threading.Event()

    def answer(peer: socket.socket, _path: str, _body: dict[str, Any]) -> None:
        peer.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n" % len(line) + line + b"\r\n")
        ended.wait(WAIT_S)

    with Fake(answer) as fake:
        try:
            assert Etcd([fake.endpoint], deadline_s=WAIT_S / 2).keepalive(5) == 3
        finally:
            ended.set()


def test_a_login_is_made_once_and_again_when_it_is_old() -> None:
    token = of({**HEADER, "token": "abc.1"})
    found = of({**HEADER, "kvs": [ONE]})
    old = error(16, "etcdserver: invalid auth token", "401 Unauthorized")
    with Fake(says(token, found, found, old, token, found)) as fake:
        etcd = asking(fake.endpoint, login=("simm", "secret"))
        for _ in range(3):
            assert etcd.get(b"k") is not None
    assert [path.rpartition("/")[2] for path, _ in fake.requests] == [
        "authenticate", "range", "range", "range", "authenticate", "range",
    ]  # fmt: skip
    assert fake.requests[0][1] == {"name": "simm", "password": "secret"}
    assert "Authorization: abc.1" in fake.headers[1] and "Authorization" not in fake.headers[4]
    with Fake(says(error(3, "etcdserver: authentication failed, invalid user ID or password"))) as fake:
        with pytest.raises(EtcdError, match="authentication failed") as caught:
            asking(fake.endpoint, login=("simm", "wrong")).txn([], [])
        assert not caught.value.maybe and "wrong" not in str(caught.value)
    # A token that would end the header and begin another.
    with Fake(says(of({**HEADER, "token": "a\r\nX: y"}))) as fake, pytest.raises(EtcdError, match="malformed"):
        asking(fake.endpoint, login=("simm", "secret")).get(b"k")


def test_random_bytes_end_in_an_error() -> None:
    rng = random.Random(3)
    good = of({**HEADER, "kvs": [ONE]})
    said = b""

    def answer(peer: socket.socket, _path: str, _body: dict[str, Any]) -> None:
        peer.sendall(said)

    outcomes = {"error": 0, "value": 0}
    with Fake(answer) as fake:
        etcd = asking(fake.endpoint)
        for _ in range(300):
            mutable = bytearray(good)
            for _ in range(rng.randrange(1, 4)):
                mutable[rng.randrange(len(mutable))] = rng.randrange(256)
            said = bytes(mutable[: rng.randrange(len(mutable) // 2, len(mutable) + 1)])
            try:
                etcd.get(b"k")
                outcomes["value"] += 1
            except EtcdError:
                outcomes["error"] += 1
    assert outcomes["error"] > 200, outcomes


# --- settings ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("etcd://10.0.0.7", "etcd://10.0.0.7:2379/simm"),
        ("etcds://a:1,b,[::1]:3/one/two/", "etcds://a:1,b:2379,[::1]:3/one/two"),
        (" etcd://a/x ", "etcd://a:2379/x"),
    ],
)
def test_a_coordinator_is_written_as_it_is_read(text: str, written: str) -> None:
    assert str(parse_coordinator(text)) == written
    assert parse_coordinator(written) == parse_coordinator(text)
    assert str(load("manager", {"coordinator": text}, {}).coordinator) == written
    assert load("manager", {}, {"SIMM_COORDINATOR": ""}).coordinator is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("10.0.0.7:2379", "write etcd://"),
        ("http://10.0.0.7:2379", "write etcd://"),
        ("etcd://", "no address"),
        ("etcd:///simm", "no address"),
        ("etcd://a:1x", "no port"),
        ("etcd://a/sp ace", "no prefix"),
        ("etcd://a/x//y", "no prefix"),
        ("etcd://user:secret@a", "--coordinator-login"),
    ],
)
def test_what_is_no_coordinator(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_coordinator(text)


def test_settings_of_the_coordinator(tmp_path: Path) -> None:
    url = parse_coordinator("etcd://127.0.0.1:1/x")
    assert connect(Settings(coordinator=url)).ttl_s == 5
    for settings, why in (
        (Settings(coordinator=url, coordinator_ttl_ms=2500), "whole seconds"),
        (Settings(coordinator=url, coordinator_ca=tmp_path / "ca"), "etcds://"),
        (Settings(coordinator=parse_coordinator("etcds://a"), coordinator_ca=tmp_path / "none"), "for TLS"),
        (Settings(coordinator=url, coordinator_login=tmp_path / "none"), "cannot read"),
    ):
        with pytest.raises(ConfigError, match=why):
            connect(settings)
    with pytest.raises(ConfigError, match="coordinator_ttl_ms"):
        load("manager", {"coordinator_ttl_ms": "1s"}, {})
    login = tmp_path / "login"
    login.write_text("simm:sec:ret\n")
    login.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        connect(Settings(coordinator=url, coordinator_login=login))
    login.chmod(0o600)
    assert connect(Settings(coordinator=url, coordinator_login=login))._etcd._login == ("simm", "sec:ret")
    login.write_text("simm\n")
    with pytest.raises(ConfigError, match="USER:PASSWORD"):
        connect(Settings(coordinator=url, coordinator_login=login))


def test_a_login_leaves_this_host_by_tls_only(tmp_path: Path) -> None:
    """Positive control: without a login, with TLS, and on loopback the same endpoints are taken."""
    file = tmp_path / "login"
    file.write_text("simm:secret\n")
    file.chmod(0o600)
    login = ("simm", "secret")
    context = followed_tls()
    for hosts in (
        "10.0.0.7", "etcd.example", "[2001:db8::7]", "127.0.0.1,10.0.0.7", "10.0.0.7,localhost", "0.0.0.0",
        "localhost.example",
    ):  # fmt: skip
        url = parse_coordinator(f"etcd://{hosts}/x")
        with pytest.raises(ConfigError, match="etcds://") as caught:
            connect(Settings(coordinator=url, coordinator_login=file))
        assert "secret" not in str(caught.value)
        with pytest.raises(ConfigError, match="etcds://"):
            Etcd(url.endpoints, login=login)
        Etcd(url.endpoints)
        Etcd(url.endpoints, tls=context, login=login)
        assert connect(Settings(coordinator=url)).ttl_s == 5
        encrypted = parse_coordinator(f"etcds://{hosts}/x")
        assert connect(Settings(coordinator=encrypted, coordinator_login=file))._etcd._login == login
    for hosts in ("127.0.0.1", "127.8.9.1", "localhost", "[::1]", "localhost,127.0.0.1,[::1]"):
        url = parse_coordinator(f"etcd://{hosts}/x")
        assert Etcd(url.endpoints, login=login)._login == login
        assert connect(Settings(coordinator=url, coordinator_login=file))._etcd._login == login


#: Takes a connection as a user, and prints what it hears until the other end says no more, or has made its request.
SQUATTER = """if True:
    import os, socket, sys
    listener = socket.socket(fileno=int(sys.argv[1]))
    os.setgroups([])
    os.setgid(int(sys.argv[2]))
    os.setuid(int(sys.argv[2]))
    peer, _ = listener.accept()
    heard = b""
    while b"}" not in heard and (more := peer.recv(65536)):
        heard += more
    print(heard)
"""


@needs_root
@pytest.mark.parametrize("trusted", [(), (UID,)])
def test_issue_another_users_listener_hears_no_login(trusted: tuple[int, ...]) -> None:
    """Any user can listen at etcd's port while etcd is down. Whoever names him trusts him."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        command = [sys.executable, "-IS", "-c", SQUATTER, str(listener.fileno()), str(UID)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, pass_fds=[listener.fileno()]) as squatter:
            etcd = asking(listener.getsockname(), login=("simm", "secret"), trusted=trusted)
            with pytest.raises(EtcdError, match=None if trusted else f"is of uid {UID}, .*SIMM_SERVER_UID") as caught:
                etcd.get(b"k")
            assert squatter.stdout is not None
            heard = squatter.stdout.read()
    assert ("secret" in heard) == bool(trusted) and "secret" not in str(caught.value)
    assert trusted or heard == "b''\n"


def test_issue_nothing_is_sent_before_a_process_has_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it is accepted it is nobody's, and anybody's may take it."""
    peers: list[socket.socket] = []
    looks = iter(range(3))

    def look(sock: socket.socket) -> int:
        if next(looks) == 2:
            peers.append(listener.accept()[0])
            with pytest.raises(BlockingIOError):
                peers[0].recv(1, socket.MSG_DONTWAIT)
            peers[0].shutdown(socket.SHUT_WR)
        return tcp_uid(sock)

    monkeypatch.setattr(etcd_module, "tcp_uid", look)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with pytest.raises(EtcdError, match="closed connection without response"):
            asking(listener.getsockname(), login=("simm", "secret")).get(b"k")
        with peers[0]:
            assert b"POST /v3/auth/authenticate" in peers[0].recv(65536)


def test_an_etcd_on_loopback_is_of_a_trusted_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a login too: it says who leads, and what the state is. The settings name whom a manager trusts."""
    with Fake(says(of({**HEADER, "kvs": [ONE]}))) as fake:
        monkeypatch.setattr(etcd_module, "tcp_uid", lambda _sock: UID)
        with pytest.raises(EtcdError, match=f"is of uid {UID}"):
            asking(fake.endpoint).get(b"k")
        assert not fake.requests
        host, port = fake.endpoint
        values = {"coordinator": f"etcd://{host}:{port}", "server_uid": str(UID)}
        assert connect(load("manager", values, {}))._etcd.get(b"k", WAIT_S) is not None
        monkeypatch.setattr(etcd_module, "is_loopback", lambda _sock: False)  # nobody can tell there
        assert asking(fake.endpoint).get(b"k") is not None

        def elsewhere(_sock: socket.socket) -> int:
            raise NotHere

        monkeypatch.setattr(etcd_module, "is_loopback", lambda _sock: True)
        monkeypatch.setattr(etcd_module, "tcp_uid", elsewhere)  # only root can have redirected it
        assert asking(fake.endpoint).get(b"k") is not None


@pytest.mark.parametrize(
    ("why", "says_so"),
    [(UnknownUser("neither sock_diag nor /proc/net tells it here"), "its user cannot be told .neither sock_diag"),
     (HasClosed(), "it accepts no connection")],
    ids=["never", "not yet"],
)  # fmt: skip
def test_an_etcd_whose_user_cannot_be_told_is_named_so(
    why: UnknownUser, says_so: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log said that etcd had not answered, of one that had been asked nothing."""
    clock = Clock()

    def look(_sock: socket.socket) -> int:
        clock.now += WAIT_S / 2
        raise why

    monkeypatch.setattr(etcd_module, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(etcd_module, "tcp_uid", look)
    with Fake(says(of({**HEADER, "kvs": [ONE]}))) as fake:
        with pytest.raises(EtcdError, match=f"{fake.endpoint[1]}: no whole answer in time: {says_so}") as caught:
            asking(fake.endpoint).get(b"k")
        assert not fake.requests and not caught.value.maybe


class Greeter:
    """Takes connections by TLS, and keeps the serial numbers of the certificates that its clients show."""

    def __init__(self, certificate: Path, authorities: Path) -> None:
        self.shown: list[str] = []
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate)
        self._context.load_verify_locations(authorities)
        self._context.verify_mode = ssl.CERT_REQUIRED
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint: tuple[str, int] = self._listener.getsockname()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                plain, _ = self._listener.accept()
            except OSError:
                return
            with plain, contextlib.suppress(OSError), self._context.wrap_socket(plain, server_side=True) as peer:
                self.shown.append(str((peer.getpeercert() or {})["serialNumber"]))

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()


@needs_openssl
def test_etcd_is_shown_the_newest_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Certificates end within a manager's life. It also follows the authority that has signed etcd's."""
    monkeypatch.setattr(tls, "LOOK_S", 0.0)
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    both = tmp_path / "both.pem"
    both.write_text(old.ca.read_text() + new.ca.read_text())
    own, trusted = tmp_path / "own.pem", tmp_path / "trusted.pem"

    def replace(path: Path, text: str) -> None:
        path.with_suffix(".new").write_text(text)
        path.with_suffix(".new").chmod(0o600)
        os.replace(path.with_suffix(".new"), path)

    replace(own, old.issue("first").read_text())
    replace(trusted, old.ca.read_text())
    with contextlib.closing(Greeter(new.issue("etcd"), both)) as etcd:
        host, port = etcd.endpoint
        url = parse_coordinator(f"etcds://{host}:{port}/x")
        one = connect(Settings(coordinator=url, coordinator_ca=trusted, coordinator_cert=own))
        with pytest.raises(EtcdError, match=r"(?i)certificate.verify"):
            one._etcd.get(b"k", WAIT_S)
        assert not etcd.shown
        replace(trusted, new.ca.read_text())
        for shown in (1, 2):
            for client in (one._etcd, one._own_etcd):
                with pytest.raises(EtcdError):  # as it answers nothing
                    client.get(b"k", WAIT_S)
            wait_until(lambda count=2 * shown: len(etcd.shown) == count, "both have shown their certificate")
            replace(own, new.issue("second").read_text())
        first, again, second, both_threads = etcd.shown
    assert first == again != second == both_threads


#: Reads a key with a passphrase at the start, and while a manager runs. Prints the error, and whether it keeps the old.
LOCKED = """if True:
    import os, sys
    from pathlib import Path
    from simm.control.etcd import followed_tls, tls_context
    from simm.errors import ConfigError
    from simm.net import tls
    tls.LOOK_S = 0.0
    own, locked = map(Path, sys.argv[1:])
    follow = followed_tls(None, own)
    before = follow()
    os.replace(locked, own)
    print(follow() is before)
    try:
        tls_context(None, own)
    except ConfigError as exc:
        print(exc)
"""


@needs_openssl
def test_a_key_with_a_passphrase_is_an_error(tmp_path: Path) -> None:
    """OpenSSL asked for it at the terminal, or waited for a line of stdin, and the manager with it."""
    own, locked = Authority(tmp_path).issue("own"), tmp_path / "locked.pem"
    openssl(tmp_path, "pkey", "-in", str(own), "-aes256", "-passout", "pass:secret", "-out", str(locked))
    locked.write_text((tmp_path / "own.crt").read_text() + locked.read_text())
    with subprocess.Popen(
        [sys.executable, "-c", LOCKED, str(own), str(locked)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as child:  # fmt: skip
        try:
            child.wait(WAIT_S)  # with its stdin open
        finally:
            child.kill()
        assert child.stdout is not None
        assert child.stdout.read().splitlines() == [
            "True", f"cannot use {own} for TLS to etcd: its key has a passphrase, which nobody could type: store it "
            "without one",
        ]  # fmt: skip

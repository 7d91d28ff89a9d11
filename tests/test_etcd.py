"""The etcd client against a server that lies, stalls and breaks off, and against etcd; leadership and state on a model
of etcd whose network fails by a seed, and on etcd.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import random
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from coordination.model import Broken, play
from coordination.server import MISSING, PROGRAM, EtcdServer, free_port

from simm import coordinator as coordinator_module
from simm import messages as M
from simm.cluster import Cluster, Timing
from simm.config import Settings, load
from simm.coordinator import CHUNK_BYTES, Coordinator, NotLeader, connect
from simm.errors import ConfigError, CorruptionError
from simm.etcd import Etcd, EtcdError, created, delete, get, modified, put, tls_context
from simm.messages import WorkerInfo
from simm.quantities import parse_coordinator

WAIT_S = 20.0
needs_etcd = pytest.mark.skipif(PROGRAM is None, reason=MISSING)


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = WAIT_S) -> Any:
    until = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < until, f"not within {timeout_s:.0f} s: {what}"
        time.sleep(0.01)
    return value


# --- a server that does what the test says -----------------------------------------------------


class Fake:
    """Listens on loopback; each connection's request is read and given to ``answer``, which writes what it likes."""

    def __init__(self, answer: Callable[[socket.socket, str, dict[str, Any]], None]) -> None:
        self.answer = answer
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.headers: list[str] = []
        self.sock = socket.create_server(("127.0.0.1", 0))
        self.endpoint: tuple[str, int] = self.sock.getsockname()
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def __enter__(self) -> Fake:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.sock.shutdown(socket.SHUT_RDWR)
        self.thread.join()
        self.sock.close()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self.sock.accept()
            except OSError:
                return
            with peer, contextlib.suppress(OSError):
                raw = b""
                while b"\r\n\r\n" not in raw:
                    raw += peer.recv(65536)
                head, _, body = raw.partition(b"\r\n\r\n")
                lines = head.decode().split("\r\n")
                size = next(int(line.split(":")[1]) for line in lines if line.lower().startswith("content-length"))
                while len(body) < size:
                    body += peer.recv(65536)
                self.requests.append((lines[0].split()[1], json.loads(body)))
                self.headers.append("\n".join(lines))
                self.answer(peer, *self.requests[-1])


def page(body: bytes, status: str = "200 OK", head: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{head}\r\n".encode() + body


def says(*answers: bytes) -> Callable[[socket.socket, str, dict[str, Any]], None]:
    """The answers in turn, the last one for ever."""
    left = list(answers)

    def answer(peer: socket.socket, _path: str, _body: dict[str, Any]) -> None:
        peer.sendall(left.pop(0) if len(left) > 1 else left[0])

    return answer


def of(value: object) -> bytes:
    return page(json.dumps(value).encode())


HEADER = {"header": {"revision": "7"}}
ONE = {"key": "aw==", "value": "dg==", "create_revision": "3", "mod_revision": "5", "version": "2", "lease": "9"}


def test_what_is_asked_and_what_is_read() -> None:
    answers = {
        "/v3/kv/range": {**HEADER, "kvs": [ONE], "count": "1"},
        "/v3/kv/put": HEADER,
        "/v3/kv/txn": {**HEADER, "succeeded": True, "responses": [{"response_put": {}}, {"response_range": {}}]},
        "/v3/lease/grant": {**HEADER, "ID": "123456789012345678", "TTL": "5"},
        "/v3/lease/keepalive": {"result": {**HEADER, "ID": "12", "TTL": "5"}},
        "/v3/lease/revoke": HEADER,
    }
    with Fake(lambda peer, path, body: peer.sendall(of(answers[path]))) as fake:
        etcd = Etcd([fake.endpoint])
        assert etcd.get(b"k") == (b"k", b"v", 3, 5, 9)
        assert etcd.put(b"k", b"v", 9) == 7
        done = etcd.txn([created(b"k", 0), modified(b"k", 4)], [put(b"k", b"v"), get(b"k")], [delete(b"a", b"b")])
        assert done == (True, 7, [None])
        assert etcd.grant(5) == (123456789012345678, 5)
        assert etcd.keepalive(12) == 5
        etcd.revoke(12)
        asked = dict(fake.requests)
    assert asked["/v3/kv/range"] == {"key": "aw=="}
    assert asked["/v3/kv/put"] == {"key": "aw==", "value": "dg==", "lease": "9"}
    assert asked["/v3/kv/txn"] == {
        "compare": [
            {"key": "aw==", "target": "CREATE", "result": "EQUAL", "create_revision": "0"},
            {"key": "aw==", "target": "MOD", "result": "EQUAL", "mod_revision": "4"},
        ],
        "success": [
            {"request_put": {"key": "aw==", "value": "dg==", "lease": "0"}}, {"request_range": {"key": "aw=="}},
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
            Etcd([fake.endpoint], deadline_s=2).get(b"k")
        assert str(fake.endpoint[1]) in str(caught.value)


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_answer_is_a_detour_where_there_is_another_endpoint(kind: str) -> None:
    with Fake(says(MALFORMED[kind])) as fake:
        with Fake(says(of({**HEADER, "kvs": [ONE]}))) as well:
            assert Etcd([fake.endpoint, well.endpoint], deadline_s=WAIT_S).get(b"k") is not None


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        (lambda etcd: etcd.put(b"k", b"v"), {}),
        (lambda etcd: etcd.put(b"k", b"v"), {"header": {"revision": "0"}}),
        (lambda etcd: etcd.put(b"k", b"v"), {"header": 5}),
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
        call(Etcd([fake.endpoint]))
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
                Etcd([fake.endpoint], deadline_s=0.3).get(b"k")
        finally:
            ended.set()
        assert time.monotonic() - start < 10
        assert caught.value.maybe


def test_a_silent_endpoint_leaves_time_for_the_others() -> None:
    """It takes connections (the kernel does) and says nothing; another refuses them; the third answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent, Fake(says(of({**HEADER, "kvs": [ONE]}))) as well:
        etcd = Etcd([silent.getsockname(), ("127.0.0.1", free_port()), well.endpoint], deadline_s=1.5)
        assert etcd.get(b"k") is not None
        # Who answered last is asked first.
        silent.settimeout(0.05)
        silent.accept()[0].close()
        assert etcd.get(b"k") is not None
        with pytest.raises(TimeoutError):
            silent.accept()
        with pytest.raises(EtcdError, match=r"in time.*refused|refused.*in time"):
            Etcd([silent.getsockname(), ("127.0.0.1", free_port())], deadline_s=0.3).get(b"k")


def test_a_transaction_that_may_have_been_done_is_not_sent_again() -> None:
    done = of({**HEADER, "succeeded": True})
    with Fake(says(b"")) as lost, Fake(says(done)) as well:
        refused = ("127.0.0.1", free_port())
        with pytest.raises(EtcdError) as caught:
            Etcd([refused, lost.endpoint, well.endpoint]).txn([], [])
        assert caught.value.maybe and len(lost.requests) == 1 and not well.requests
        # One that was never sent is.
        assert Etcd([refused, well.endpoint]).txn([], []).succeeded
        with pytest.raises(EtcdError) as caught:
            Etcd([refused]).txn([], [])
        assert not caught.value.maybe


def error(code: int, text: str, status: str = "400 Bad Request") -> bytes:
    return page(json.dumps({"error": text, "message": text, "code": code}).encode(), status)


def test_what_etcd_refuses_is_not_asked_elsewhere() -> None:
    with Fake(says(error(3, "etcdserver: request is too large"))) as fake, Fake(says(of(HEADER))) as other:
        with pytest.raises(EtcdError, match="too large") as caught:
            Etcd([fake.endpoint, other.endpoint]).txn([], [])
        assert caught.value.code == 3 and not caught.value.maybe and not other.requests
    unavailable = error(14, "etcdserver: no leader", "503 Service Unavailable")
    with Fake(says(unavailable)) as fake, Fake(says(of({**HEADER, "kvs": [ONE]}))) as other:
        assert Etcd([fake.endpoint, other.endpoint]).get(b"k") is not None
    gone = error(5, "etcdserver: requested lease not found", "404 Not Found")
    with Fake(says(gone)) as fake:
        etcd = Etcd([fake.endpoint])
        assert etcd.keepalive(5) == 0
        etcd.revoke(5)
        with pytest.raises(EtcdError, match="lease not found"):
            etcd.txn([], [put(b"k", b"v", 5)])
    ended = of({"result": {**HEADER, "ID": "5"}})
    broken = of({"error": {"grpc_code": 14, "http_code": 503, "message": "no leader"}})
    with Fake(says(ended, broken)) as fake:
        etcd = Etcd([fake.endpoint])
        assert etcd.keepalive(5) == 0
        with pytest.raises(EtcdError, match="no leader"):
            etcd.keepalive(5)


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
        etcd = Etcd([fake.endpoint], login=("simm", "secret"))
        for _ in range(3):
            assert etcd.get(b"k") is not None
    assert [path.rpartition("/")[2] for path, _ in fake.requests] == [
        "authenticate", "range", "range", "range", "authenticate", "range",
    ]  # fmt: skip
    assert fake.requests[0][1] == {"name": "simm", "password": "secret"}
    assert "Authorization: abc.1" in fake.headers[1] and "Authorization" not in fake.headers[4]
    with Fake(says(error(3, "etcdserver: authentication failed, invalid user ID or password"))) as fake:
        with pytest.raises(EtcdError, match="authentication failed") as caught:
            Etcd([fake.endpoint], login=("simm", "wrong")).txn([], [])
        assert not caught.value.maybe and "wrong" not in str(caught.value)
    # A token that would end the header and begin another.
    with Fake(says(of({**HEADER, "token": "a\r\nX: y"}))) as fake, pytest.raises(EtcdError, match="malformed"):
        Etcd([fake.endpoint], login=("simm", "secret")).get(b"k")


def test_random_bytes_end_in_an_error() -> None:
    rng = random.Random(3)
    good = of({**HEADER, "kvs": [ONE]})
    said = b""

    def answer(peer: socket.socket, _path: str, _body: dict[str, Any]) -> None:
        peer.sendall(said)

    outcomes = {"error": 0, "value": 0}
    with Fake(answer) as fake:
        etcd = Etcd([fake.endpoint])
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


# --- leadership and state on a model -----------------------------------------------------------


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state is several transactions then, and a leader may die between them."""
    monkeypatch.setattr(coordinator_module, "CHUNK_BYTES", 64)


@pytest.mark.usefixtures("small_chunks")
def test_one_leader_and_its_state_whatever_the_network_does() -> None:
    total: dict[str, int] = {}
    for seed in range(40):
        for name, count in play(seed).items():
            total[name] = total.get(name, 0) + count
    assert min(total.values()) > 200, total


@pytest.mark.slow
@pytest.mark.usefixtures("small_chunks")
def test_one_leader_and_its_state_long() -> None:
    for seed in range(1000, 6000):
        play(seed)


def _breaks(seeds: int, *signs: str) -> bool:
    """Whether one of the first worlds breaks, and in this way."""
    for seed in range(seeds):
        try:
            play(seed)
        except (Broken, CorruptionError) as exc:
            if any(sign in str(exc) for sign in signs):
                return True
    return False


def _no_condition(key: bytes, _revision: int) -> dict[str, Any]:
    return created(b"there is no such key", 0)


@pytest.mark.usefixtures("small_chunks")
class TestControls:
    """Each check taken away, and seen to be missed."""

    def test_without_the_leases_time_two_lead(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Coordinator, "term", property(lambda self: self._held.term))
        assert _breaks(10, "two lead")

    def test_counting_from_the_answer_instead_of_the_question(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Coordinator, "_until", lambda self, _sent, ttl_s: self._clock() + ttl_s)
        assert _breaks(100, "two lead")

    def test_a_leadership_that_is_extended_after_its_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def hold(self: Coordinator, before: Any, until: float) -> bool:
            self._held = before._replace(until=until)
            return True

        monkeypatch.setattr(Coordinator, "_hold", hold)
        assert _breaks(100, "is back", "two lead")

    def test_without_the_condition_of_the_term_a_deposed_leader_writes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            coordinator_module, "created", lambda key, at: _no_condition(key, at) if at else created(key, at)
        )
        assert _breaks(200, "is stored after")

    def test_without_the_condition_of_the_state_an_older_one_comes_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(coordinator_module, "modified", _no_condition)
        assert _breaks(100, "is stored after")


@pytest.mark.parametrize("return_s", [0.0, 8.0])
def test_a_new_leader_gives_servers_time_to_find_it(return_s: float) -> None:
    """With short heartbeats too: a server is dead after five of them, but not before it can have come back."""
    timing = Timing(heartbeat_s=0.2, return_s=return_s)
    cluster = Cluster(1, 0.0, timing)
    cluster.join(0.0, M.Join(5, 0, "a", [WorkerInfo(0, 0, 1, 5, 1 << 30, "", "/run/w", "127.0.0.1", 4000)]))
    cluster.heartbeat(0.0, "a", 5, 0, [])
    follower = Cluster.from_state(cluster.to_state(), 100.0, timing, 1000)
    died_at = next(
        now for now in (step / 10 for step in range(1, 200))
        if follower.tick(100.0 + now) and follower.status(100.0 + now)["nodes"][0]["state"] == "dead"
    )  # fmt: skip
    assert died_at == pytest.approx(max(return_s, 1.0), abs=0.3)
    assert all(node["silent_s"] >= 0 for node in follower.status(100.0 + died_at)["nodes"])


# --- on etcd ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with EtcdServer(tmp_path_factory.mktemp("etcd")) as running:
        yield running


@needs_etcd
def test_each_call_on_etcd(server: EtcdServer) -> None:
    etcd = server.client()
    assert etcd.get(b"a") is None
    revision = etcd.put(b"a", b"\x00\xff")
    assert etcd.get(b"a") == (b"a", b"\x00\xff", revision, revision, 0)
    done = etcd.txn([created(b"a", revision), modified(b"a", revision)], [put(b"a", b"2"), get(b"a"), get(b"b")])
    assert done.succeeded and done.found[0] is not None and done.found[0].value == b"2" and done.found[1] is None
    assert done.found[0].mod_revision == done.revision and done.found[0].create_revision == revision
    lost = etcd.txn([modified(b"a", revision)], [put(b"a", b"3")], [get(b"a")])
    assert not lost.succeeded and lost.found == [done.found[0]]
    assert etcd.txn([created(b"b", 0)], [put(b"b", b""), delete(b"a")]).succeeded
    assert etcd.get(b"a") is None and etcd.get(b"b") is not None
    lease, ttl_s = etcd.grant(1)
    assert ttl_s >= 1 and etcd.keepalive(lease) == ttl_s
    etcd.put(b"c", b"1", lease)
    assert etcd.get(b"c") is not None
    wait_until(lambda: etcd.get(b"c") is None, "the lease ends")
    assert etcd.keepalive(lease) == 0
    lease, _ = etcd.grant(60)
    etcd.put(b"c", b"1", lease)
    etcd.revoke(lease)
    etcd.revoke(lease)
    assert etcd.get(b"c") is None
    with pytest.raises(EtcdError, match="too large") as caught:
        etcd.put(b"large", bytes(1_600_000))
    assert not caught.value.maybe


def coordinator_on(server: EtcdServer, prefix: str, ttl_s: int = 2) -> Coordinator:
    return Coordinator(server.client, prefix, ttl_s=ttl_s)


@needs_etcd
def test_a_leader_a_standby_and_their_state(server: EtcdServer) -> None:
    with contextlib.closing(coordinator_on(server, "/two")) as one, contextlib.closing(
        coordinator_on(server, "/two")
    ) as two:
        one.start("one:1", "one:2")
        wait_until(lambda: one.term, "one leads")
        two.start("two:1")
        leader = wait_until(lambda: two.leader, "two sees who leads")
        assert (leader.address, leader.http, leader.id, leader.pid) == ("one:1", "one:2", one.id, os.getpid())
        assert not two.term and one.leader == leader
        assert one.load() is None
        one.save({"a": 1})
        one.save({"a": 2})
        assert one.load() == {"a": 2}
        with pytest.raises(NotLeader):
            two.save({"b": 1})
        with pytest.raises(NotLeader):
            two.load()
        one.resign(60)
        assert not one.term
        wait_until(lambda: two.term, "two leads")
        assert two.load() == {"a": 2}
        two.save({"b": 2})
        with pytest.raises(NotLeader):
            one.save({"a": 3})
        assert two.load() == {"b": 2}
    assert server.client().get(b"/two/leader") is None, "closed, so the lease was given back"


@needs_etcd
def test_a_state_of_many_chunks_on_etcd(server: EtcdServer) -> None:
    state = {"bytes": random.Random(1).randbytes(3 * CHUNK_BYTES).hex()}
    with contextlib.closing(coordinator_on(server, "/large")) as one:
        one.start("one:1")
        term = wait_until(lambda: one.term, "one leads")
        for number in (1, 2):
            state["number"] = str(number)
            one.save(state)
            assert one.load() == state
        keys = chunk_keys(server, "/large")
        assert [key.rpartition("/")[2] for key in keys] == ["0000", "0001", "0002", "0003"][: len(keys)]
        assert len(keys) > 2 and all(f"/{term:016x}-00000002/" in key for key in keys), "older ones are removed"
        one.save({})
        assert len(chunk_keys(server, "/large")) == 1


def chunk_keys(server: EtcdServer, prefix: str) -> list[str]:
    start = f"{prefix}/chunk/".encode()
    body = {
        "key": base64.b64encode(start).decode(), "range_end": base64.b64encode(start[:-1] + b"0").decode(),
        "keys_only": True,
    }  # fmt: skip
    return [found.key.decode() for found in server.client()._call("kv/range", body, None).range()]


@needs_etcd
def test_a_damaged_state_is_told_and_never_replaced(server: EtcdServer) -> None:
    etcd = server.client()
    with contextlib.closing(coordinator_on(server, "/damaged")) as one:
        one.start("one:1")
        wait_until(lambda: one.term, "one leads")
        one.save({"a": 1})
        head = etcd.get(b"/damaged/state")
        assert head is not None
        about = json.loads(head.value)
        (key,) = chunk_keys(server, "/damaged")
        chunk = etcd.get(key.encode())
        assert chunk is not None
        for value, why in (
            (b"{", "damaged"),
            (b"[]", "no SiMM manager's state"),
            (json.dumps({**about, "kind": "x"}).encode(), "no SiMM manager's state"),
            (json.dumps({**about, "format": 9}).encode(), "format 9, this build reads 1"),
            (json.dumps({**about, "chunks": 2}).encode(), "chunk 1 of 2 .* missing"),
            (json.dumps({**about, "chunks": 10**9}).encode(), "damaged"),
            (json.dumps({**about, "crc32": 5}).encode(), "checksum"),
            (json.dumps({**about, "bytes": 5}).encode(), "checksum"),
        ):
            etcd.put(b"/damaged/state", value)
            with pytest.raises(CorruptionError, match=why) as caught:
                one.load()
            assert "etcdctl del /damaged/state" in str(caught.value)
        etcd.put(b"/damaged/state", head.value)
        for value in (chunk.value[:-1], chunk.value + b"x", b"", b"nonsense"):
            etcd.put(key.encode(), value)
            with pytest.raises(CorruptionError, match="damaged"):
                one.load()
        etcd.put(key.encode(), chunk.value)
        assert one.load() == {"a": 1}


@needs_etcd
def test_a_leader_whose_lease_is_gone_steps_down_and_cannot_write(server: EtcdServer) -> None:
    etcd = server.client()
    with contextlib.closing(coordinator_on(server, "/gone", 6)) as one:
        one.start("one:1")
        term = wait_until(lambda: one.term, "one leads")
        one.save({"a": 1})
        found = etcd.get(b"/gone/leader")
        assert found is not None and found.create_revision == term
        etcd.revoke(found.lease)
        etcd.put(b"/gone/leader", b"{}")
        assert one.term == term, "it has not been told, and its time is not over"
        with pytest.raises(NotLeader, match="term"):
            one.save({"a": 2})
        assert not one.term
        wait_until(lambda: one.trouble == "" and one.leader is None, "it sees that somebody else leads")
        etcd.txn([], [delete(b"/gone/leader")])
        wait_until(lambda: one.term > term, "it leads again")
        assert one.load() == {"a": 1}


@needs_etcd
def test_etcd_silent_and_dead(tmp_path: Path) -> None:
    """The leader's time ends without a word of etcd, and not before; then it stands by, and leads again afterwards."""
    with EtcdServer(tmp_path) as server, contextlib.closing(coordinator_on(server, "/s")) as one:
        one.start("one:1")
        term = wait_until(lambda: one.term, "one leads")
        one.save({"a": 1})
        server.pause(True)
        assert one.term == term
        with pytest.raises(OSError, match=r"in time|no time left"):
            one.save({"a": 2})
        wait_until(lambda: not one.term, "its time ends")
        server.pause(False)
        second = wait_until(lambda: one.term, "it leads again")
        assert second > term and one.load() in ({"a": 1}, {"a": 2})
        server.kill()
        wait_until(lambda: one.trouble, "it notices")
        assert "refused" in one.trouble or "closed" in one.trouble or "reset" in one.trouble
        wait_until(lambda: not one.term, "its time ends")
        server.start()
        wait_until(lambda: one.term > second, "it leads again")
        assert not one.trouble


@needs_etcd
def test_etcd_with_users(tmp_path: Path) -> None:
    with EtcdServer(tmp_path, "--auth-token-ttl", "1") as server:
        etcd = server.client()
        for what, body in (
            ("user/add", {"name": "root", "password": "r"}),
            ("role/add", {"name": "root"}),
            ("user/grant", {"user": "root", "role": "root"}),
            ("enable", {}),
        ):
            etcd._call(f"auth/{what}", body, None)
        with pytest.raises(EtcdError, match=r"user name is empty|permission denied"):
            etcd.get(b"k")
        with pytest.raises(EtcdError, match="authentication failed"):
            Etcd(etcd.endpoints, login=("root", "wrong")).get(b"k")
        user = Etcd(etcd.endpoints, login=("root", "r"))
        user.put(b"k", b"v")
        token = user._token
        # Each use prolongs it.
        wait_until(lambda: time.sleep(1.5) or (user.get(b"k") and user._token != token), "a new login")


@needs_etcd
@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl in PATH to make certificates with")
def test_etcd_by_tls(tmp_path: Path) -> None:
    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=tmp_path, check=True, capture_output=True, timeout=WAIT_S)

    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=test")
    openssl("req", "-x509", *new, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2")
    (tmp_path / "san").write_text("subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
    openssl("req", *new, "-keyout", "etcd.key", "-out", "etcd.csr")
    openssl(
        "x509", "-req", "-in", "etcd.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2",
        "-extfile", "san", "-out", "etcd.pem",
    )  # fmt: skip
    both = tmp_path / "both.pem"
    both.write_bytes((tmp_path / "etcd.pem").read_bytes() + (tmp_path / "etcd.key").read_bytes())
    flags = [f"--{name}={tmp_path / file}" for name, file in
             (("cert-file", "etcd.pem"), ("key-file", "etcd.key"), ("trusted-ca-file", "ca.pem"))]  # fmt: skip
    folder = tmp_path / "server"
    folder.mkdir()
    with EtcdServer(folder, *flags, "--client-cert-auth", scheme="https") as server:
        url = parse_coordinator(f"{server.url}/tls")
        assert url.tls
        settings = Settings(coordinator=url, coordinator_ca=tmp_path / "ca.pem", coordinator_cert=both)
        with contextlib.closing(connect(settings)) as one:
            one.start("one:1")
            wait_until(lambda: one.term, f"one leads; {one.trouble}")
            one.save({"a": 1})
            assert one.load() == {"a": 1}
        for ca, certificate, why in (
            (None, both, "(?i)certificate.verify|self.signed"),
            (tmp_path / "ca.pem", None, "(?i)certificate|alert|reset|closed|EOF"),
        ):
            with pytest.raises(EtcdError, match=why):
                Etcd(url.endpoints, tls=tls_context(ca, certificate)).get(b"k")
        with pytest.raises(EtcdError, match=r"(?i)closed|400|malformed|reset|status"):
            Etcd(url.endpoints).get(b"k")

"""Leaders, standbys and their state on a real etcd: restarts, lost leases, users, TLS."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from simm.config.parsers import parse_coordinator
from simm.config.settings import Settings
from simm.control.election import CHUNK_BYTES, Coordinator, NotLeader, connect
from simm.control.etcd import Etcd, EtcdError, created, delete, followed_tls, get, modified, put
from simm.errors import CorruptionError
from tests.support.etcd_answers import WAIT_S, needs_etcd
from tests.support.etcd_server import EtcdServer, put_key
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with EtcdServer(tmp_path_factory.mktemp("etcd")) as running:
        yield running


@needs_etcd
def test_each_call_on_etcd(server: EtcdServer) -> None:
    etcd = server.client()
    assert etcd.get(b"a") is None
    revision = put_key(etcd, b"a", b"\x00\xff")
    assert etcd.get(b"a") == (b"a", b"\x00\xff", revision, revision, 0)
    done = etcd.txn([created(b"a", revision), modified(b"a", revision)], [put(b"a", b"2"), get(b"a"), get(b"b")])
    assert done.succeeded and done.found[0] is not None and done.found[0].value == b"2" and done.found[1] is None
    assert done.found[0].mod_revision == done.revision and done.found[0].create_revision == revision
    lost = etcd.txn([modified(b"a", revision)], [put(b"a", b"3")], [get(b"a")])
    assert not lost.succeeded and lost.found == [done.found[0]]
    assert etcd.txn([created(b"b", 0)], [put(b"b", b""), delete(b"a")]).succeeded
    assert etcd.get(b"a") is None and etcd.get(b"b") is not None
    lease, ttl_s = etcd.grant(5)
    assert ttl_s >= 5 and etcd.keepalive(lease) == ttl_s
    put_key(etcd, b"c", b"1", lease)
    assert etcd.get(b"c") is not None
    wait_until(lambda: etcd.get(b"c") is None, "the lease ends")
    assert etcd.keepalive(lease) == 0
    lease, _ = etcd.grant(60)
    put_key(etcd, b"c", b"1", lease)
    etcd.revoke(lease)
    etcd.revoke(lease)
    assert etcd.get(b"c") is None
    with pytest.raises(EtcdError, match="too large") as caught:
        put_key(etcd, b"large", bytes(1_600_000))
    assert not caught.value.maybe


def coordinator_on(server: EtcdServer, prefix: str, ttl_s: int = 60) -> Coordinator:
    """A coordinator whose lease no busy machine lets end. Close gives it back."""
    return Coordinator(server.client, prefix, ttl_s=ttl_s)


@pytest.mark.quick
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
        assert one.load() is None
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
        assert one.load() is None
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
            put_key(etcd, b"/damaged/state", value)
            with pytest.raises(CorruptionError, match=why) as caught:
                one.load()
            assert "etcdctl del /damaged/state" in str(caught.value)
        put_key(etcd, b"/damaged/state", head.value)
        for value in (chunk.value[:-1], chunk.value + b"x", b"", b"nonsense"):
            put_key(etcd, key.encode(), value)
            with pytest.raises(CorruptionError, match="damaged"):
                one.load()
        put_key(etcd, key.encode(), chunk.value)
        assert one.load() == {"a": 1}


@needs_etcd
def test_a_leader_whose_lease_is_gone_steps_down_and_cannot_write(server: EtcdServer) -> None:
    etcd = server.client()
    # It looks at its lease every third of that time, and must not do so between the revocation and the save.
    with contextlib.closing(coordinator_on(server, "/gone", 600)) as one:
        one.start("one:1")
        term = wait_until(lambda: one.term, "one leads")
        assert one.load() is None
        one.save({"a": 1})
        found = etcd.get(b"/gone/leader")
        assert found is not None and found.create_revision == term
        etcd.revoke(found.lease)
        put_key(etcd, b"/gone/leader", b"{}")
        assert one.term == term, "it has not been told, and its time is not over"
        with pytest.raises(NotLeader, match="term"):
            one.save({"a": 2})
        assert not one.term
        wait_until(lambda: one.trouble == "" and one.leader is None, "it sees that somebody else leads")
        etcd.txn([], [delete(b"/gone/leader")])
        wait_until(lambda: one.term > term, "it leads again")
        assert one.load() == {"a": 1}


@needs_etcd
def test_a_leader_whose_key_is_deleted_stops_leading(server: EtcdServer) -> None:
    """Its lease goes on and on, so only a look at the key tells."""
    with contextlib.closing(coordinator_on(server, "/deleted", 12)) as one, contextlib.closing(
        coordinator_on(server, "/deleted", 12)
    ) as two:
        one.start("one:1")
        term = wait_until(lambda: one.term, "one leads")
        two.start("two:1")
        wait_until(lambda: two.leader, "two sees who leads")
        server.client().txn([], [delete(b"/deleted/leader")])
        wait_until(lambda: one.term != term, "one leads no more")
        wait_until(lambda: one.term or two.term, "one of them leads anew")
        assert not (one.term and two.term)


@needs_etcd
def test_etcd_silent_and_dead(tmp_path: Path) -> None:
    """The leader's time ends without a word of etcd, and not before; then it stands by, and leads again afterwards."""
    with EtcdServer(tmp_path) as server, contextlib.closing(coordinator_on(server, "/s", 6)) as one:
        one.start("one:1")
        term = wait_until(lambda: one.term, "one leads")
        assert one.load() is None
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
        server.enable_users("root", "r")
        with pytest.raises(EtcdError, match=r"user name is empty|permission denied"):
            etcd.get(b"k")
        with pytest.raises(EtcdError, match="authentication failed"):
            server.client(("root", "wrong")).get(b"k")
        user = server.client(("root", "r"))
        put_key(user, b"k", b"v")
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
            assert one.load() is None
            one.save({"a": 1})
            assert one.load() == {"a": 1}
        for ca, certificate, why in (
            (None, both, "(?i)certificate.verify|self.signed"),
            (tmp_path / "ca.pem", None, "(?i)certificate|alert|reset|closed|EOF"),
        ):
            with pytest.raises(EtcdError, match=why):
                Etcd(url.endpoints, tls=followed_tls(ca, certificate), deadline_s=WAIT_S).get(b"k")
        with pytest.raises(EtcdError, match=r"(?i)closed|400|malformed|reset|status"):
            Etcd(url.endpoints, deadline_s=WAIT_S).get(b"k")

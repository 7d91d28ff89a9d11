"""What LMCache's servers send by HTTP: the answers they need, wrong bodies of every kind, and who may send them."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import random
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("msgspec", reason="the extra simm-store[index] is not installed")
pytest.importorskip("xxhash", reason="the extra simm-store[index] is not installed")
pytest.importorskip("zmq", reason="the extra simm-store[index] is not installed")

from simm.errors import UsageError
from simm.index.blocks import Blocks
from simm.index.lmcache import hashes, messages
from simm.index.lmcache.servers import Servers
from simm.index.publishers import Publishers
from simm.index.service import BODY_BYTES_MAX, Service
from simm.net.http import Web
from simm.net.loop import Loop
from tests.support.lmcache_server import PROMPTS, SIZE, Part, batch, body, entry, key
from tests.support.tokens import old_tokens

PARTS = [Part(0, chunk, "m", "", 1, 0) for chunk in range(3)]
STORED = [entry(each) for each in PARTS]


def _service() -> Service:
    index = Blocks()
    return Service(index, servers=Servers(index), namers=hashes.namers("sha256_cbor"))


def _post(service: Service, path: str, sent: Any) -> tuple[int, Any]:
    page = service.posts[path](sent if isinstance(sent, bytes) else json.dumps(sent).encode())
    return page.status, json.loads(page.body)


def _held(service: Service) -> int:
    return sum(each["blocks"] for each in service.workers())


def test_the_life_of_a_server() -> None:
    service = _service()
    said = {"instance_id": "pod 7", "ip": "10.0.0.7", "http_port": 8080, "metadata": {}, "p2p_advertised_url": "",
            "mq_port": 0}  # fmt: skip
    assert _post(service, "/instances", said) == (200, {"instance_id": "pod 7", "re_registered": False})
    beat = service.verbs["PUT"]("/instances/pod%207/heartbeat")
    assert beat is not None and beat.status == 200 and json.loads(beat.body) == {"instance_id": "pod 7"}
    unknown = service.verbs["PUT"]("/instances/other/heartbeat")
    assert unknown is not None and unknown.status == 404
    for method, path in (("PUT", "/instances/a"), ("PUT", "/instances//heartbeat"), ("PUT", "/x"), ("DELETE", "/x"),
                         ("DELETE", "/instances/"), ("DELETE", "/instances/" + "a" * 5000)):  # fmt: skip
        assert service.verbs[method](path) is None
    sent = body(batch("pod 7", 1, "config", []), batch("pod 7", 2, "store", STORED))
    assert _post(service, "/events", sent) == (200, {"applied": 2, "duplicates": 0, "stale": 0})
    (worker,) = service.workers()
    assert (worker["blocks"], worker["complete"], worker["stale"], worker["type"]) == (3, True, False, "lmcache-server")
    asked = {"model": "m", "token_ids": PROMPTS[0], "block_size": SIZE}
    found = _post(service, "/query", asked)[1]["default"]["pod 7"]
    assert (found["longest_matched"], found["CPU"], found.get("STORAGE", 0)) == (12, 12, 0)
    assert _post(service, "/score", asked)[1]["scores"] == [{"pod": "pod 7", "score": pytest.approx(2.4)}]
    names = [hashes.name_of(bytes.fromhex(each["key"]["chunk_hash_hex"])) for each in STORED]
    by_hash = {"model": "m", "seq_hashes": names, "block_size": SIZE}
    assert _post(service, "/query_by_hash", by_hash)[1]["default"]["pod 7"]["longest_matched"] == 12
    assert "simm_index_complete" in service.metrics().text()
    gone = service.verbs["DELETE"]("/instances/pod%207")
    assert gone is not None and gone.status == 200 and service.workers() == []


@pytest.mark.parametrize("name", [{}, {"instance_id": ""}, {"instance_id": None}])
def test_a_server_without_a_name_gets_one(name: dict[str, Any]) -> None:
    status, found = _post(_service(), "/instances", {**name, "ip": "h", "http_port": 1})
    assert status == 200 and found["instance_id"].startswith("mp-")


def test_blanks_around_a_name_are_no_part_of_it() -> None:
    service = _service()
    assert _post(service, "/instances", {"instance_id": " pod ", "ip": "h", "http_port": 1})[1]["instance_id"] == "pod"
    sent = body(batch(" pod", 1, "store", STORED[:2]), batch("pod ", 2, "store", STORED[2:]))
    assert _post(service, "/events", sent) == (200, {"applied": 2, "duplicates": 0, "stale": 0})
    (worker,) = service.workers()
    assert (worker["instance_id"], worker["blocks"], worker["complete"]) == ("pod", 3, True)
    for verb, path in (("PUT", "/instances/pod%20/heartbeat"), ("DELETE", "/instances/%20pod")):
        page = service.verbs[verb](path)
        assert page is not None and page.status == 200
    assert service.workers() == []


def test_others_cannot_register_in_its_place() -> None:
    publishers = Publishers(Blocks())
    try:
        service = Service(publishers.index, publishers, servers=Servers(publishers.index))
        assert _post(service, "/instances", {"instance_id": "a", "ip": "h", "http_port": 1})[0] == 200
        there = {"endpoint": "tcp://127.0.0.1:1", "modelname": "m", "instance_id": "a"}
        for more in ({"dp_rank": None}, {"type": "lmcache-server"}, {"type": "lmcache-shared"}):
            status, said = _post(service, "/register", {**there, **more})
            assert status == 400 and "registers itself" in said["error"]
        assert _post(service, "/unregister", {"instance_id": "a"})[0] == 400 and len(service.workers()) == 1
    finally:
        publishers.close()
    assert "/events" not in Service(Blocks()).posts and Service(Blocks()).verbs == {}


@pytest.mark.parametrize(
    "wrong",
    [{"ip": ""}, {"ip": None}, {"ip": "h" * 1000}, {"http_port": 0}, {"http_port": "80"}, {"http_port": True},
     {"instance_id": 5}, {"instance_id": "a" * 1000}, {"instance_id": " pool:lmcache:fs:1"}, {"instance_id": "node:h"}],
)  # fmt: skip
def test_wrong_registrations(wrong: dict[str, Any]) -> None:
    status, found = _post(_service(), "/instances", {"instance_id": "a", "ip": "h", "http_port": 1, **wrong})
    assert status == 400 and len(found["error"]) > 10


@pytest.mark.parametrize(
    "wrong",
    [{"instance_id": ""}, {"instance_id": "a" * 1000}, {"instance_id": "  "}, {"instance_id": " pool:lmcache:fs:1"},
     {"instance_id": "node:h"}, {"incarnation": -1}, {"incarnation": 1 << 70}, {"seq": 0},
     {"seq": 1.5}, {"seq": "1"}, {"tier": 5}, {"tier": "l" * 100}, {"backend": "b" * 100}, {"event_type": None},
     {"event_type": "s" * 100}, {"shared": 1}, {"entries": {}}, {"entries": [[]] * ((1 << 16) + 1)}],
)  # fmt: skip
def test_a_body_with_a_wrong_batch_changes_nothing(wrong: dict[str, Any]) -> None:
    service = _service()
    sent = body(batch("a", 1, "store", STORED), {**batch("a", 2, "store", STORED), **wrong})
    status, found = _post(service, "/events", sent)
    assert status == 400 and len(found["error"]) > 10 and service.workers() == []


@pytest.mark.parametrize(
    "sent", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b'{"batches": 5}', b'{"batches": [5]}', b'{"batches": [{}]}',
             b'{"batches": [' + b"{}," * 5000 + b"{}]}"]
)  # fmt: skip
def test_wrong_bodies(sent: bytes) -> None:
    assert _post(_service(), "/events", sent)[0] == 400


def test_a_body_of_too_many_keys() -> None:
    half = [{}] * (messages.ENTRIES_MAX // 2)
    service = _service()
    assert _post(service, "/events", body(batch("a", 1, "store", half), batch("a", 2, "store", half)))[0] == 200
    sent = body(batch("a", 3, "store", half), batch("a", 4, "store", half), batch("a", 5, "store", STORED))
    status, found = _post(service, "/events", sent)
    assert status == 400 and "keys" in found["error"] and service.workers()[0]["stream"]["messages"] == 2


def test_truncated_and_damaged_bodies() -> None:
    rng = random.Random(7)
    whole = body(batch("a", 1, "store", STORED), batch("a", 2, "delete", [{"key": key(PARTS[2])}]))
    for _ in range(300):
        service = _service()
        assert _post(service, "/events", whole[: rng.randrange(len(whole))])[0] == 400 and service.workers() == []
        damaged = bytearray(whole)
        for _ in range(rng.choice((1, 1, 3))):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        status, found = _post(service, "/events", bytes(damaged))
        assert status in (200, 400) and isinstance(found, dict) and _held(service) <= 4


@pytest.mark.parametrize(
    "wrong",
    [{"chunk_hash_hex": "x1"}, {"chunk_hash_hex": ""}, {"chunk_hash_hex": "a"}, {"chunk_hash_hex": "ab" * 65},
     {"model_name": ""}, {"model_name": "m" * 1000}, {"kv_rank": -1}, {"kv_rank": 1 << 32}, {"kv_rank": "1"},
     {"object_group_id": -1}, {"object_group_id": 16}, {"cache_salt": "s" * 200}, {"cache_salt": None}],
)  # fmt: skip
def test_a_key_that_cannot_be_read(wrong: dict[str, Any]) -> None:
    """One that was stored is not counted. One that was deleted may be any: everything of this server is forgotten."""
    service = _service()
    bad = {**key(PARTS[0]), **wrong}
    _post(service, "/events", body(batch("a", 1, "store", [{"key": bad, "token_ids": [1] * SIZE}, *STORED])))
    (worker,) = service.workers()
    assert (worker["blocks"], worker["stale"], worker["stream"]["refused"]) == (3, False, 1)
    assert not worker["complete"], "what could not be read is missing"
    _post(service, "/events", body(batch("a", 2, "delete", [{"key": bad}])))
    (worker,) = service.workers()
    assert (worker["blocks"], worker["stale"], worker["complete"]) == (0, True, False)


def test_many_keys_that_cannot_be_read_forget_once(monkeypatch: pytest.MonkeyPatch) -> None:
    service = _service()
    _post(service, "/events", body(batch("a", 1, "store", STORED)))
    lost = []
    lose = Servers._lose
    monkeypatch.setattr(Servers, "_lose", lambda servers, server: lost.append(server) or lose(servers, server))
    wrong: list[dict[str, Any]] = [{}] * 1000
    _post(service, "/events", body(batch("a", 2, "delete", [*wrong, {"key": key(PARTS[0])}, *wrong])))
    (worker,) = service.workers()
    assert len(lost) == 1 and (worker["blocks"], worker["stale"], worker["stream"]["refused"]) == (0, True, 2000)


@pytest.mark.parametrize("wrong", [{"tier": "all"}, {"backend": ""}, {"event_type": "pin"}])
def test_a_batch_that_nobody_understands_may_have_removed_anything(wrong: dict[str, Any]) -> None:
    service = _service()
    _post(service, "/events", body(batch("a", 1, "store", STORED), {**batch("a", 2, "delete", []), **wrong}))
    (worker,) = service.workers()
    assert (worker["blocks"], worker["stale"]) == (0, True)
    many = {"key": key(PARTS[0]), "token_ids": [1] * 10_000}
    with pytest.raises(Exception, match="no key"):
        messages.entry(json.dumps(many).encode())


def test_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ("x", "blake3:1", "", "sha256,"):
        with pytest.raises(UsageError, match="--lmcache-hash"):
            hashes.namers(wrong)
    one, other = hashes.namers("sha256_cbor:0,sha256")
    assert one([1] * 8, 4) != other([1] * 8, 4) and len(one([1] * 9, 4)) == 2

    def missing() -> Any:
        raise UsageError("blake3 is not installed")

    monkeypatch.setattr(hashes, "_blake3", missing)
    assert hashes.namers(None) == []
    with pytest.raises(UsageError, match="not installed"):
        hashes.namers("blake3")


@contextlib.contextmanager
def _web(service: Service, *tokens: str) -> Iterator[int]:
    loop = Loop()
    listener = socket.create_server(("127.0.0.1", 0))
    web = Web(loop, listener, service.routes, old_tokens(*tokens), posts=service.posts, body_max=BODY_BYTES_MAX,
              verbs=service.verbs, basic=True)  # fmt: skip
    thread = threading.Thread(target=loop.run)
    loop.call_every(0.02, lambda: None)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        loop.stop()
        thread.join()
        web.close()
        loop.close()


def _ask(port: int, method: str, path: str, sent: bytes | None = None, **headers: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    with contextlib.closing(connection):
        connection.request(method, path, sent, headers)
        answer = connection.getresponse()
        answer.read()
        return answer.status


def test_who_may_send() -> None:
    service = _service()
    secret = "s-" * 16
    basic = {"Authorization": "Basic " + base64.b64encode(f"any:{secret}".encode()).decode()}
    bearer = {"Authorization": f"Bearer {secret}"}
    as_json = {"Content-Type": "application/json"}
    registration = json.dumps({"instance_id": "a", "ip": "h", "http_port": 1}).encode()
    with _web(service, secret) as port:
        wrong = {"Authorization": "Basic " + base64.b64encode(b"any:other").decode()}
        bare = {"Authorization": "Basic " + base64.b64encode(secret.encode()).decode()}
        empty = {"Authorization": "Basic " + base64.b64encode(b"any:").decode()}
        for headers in ({}, wrong, bare, empty, {"Authorization": "Basic "}, {"Authorization": f"Basic {secret}"},
                        {"Authorization": "Basic \xff"}, {"Authorization": f"Digest {secret}"}):  # fmt: skip
            assert _ask(port, "POST", "/instances", registration, **as_json, **headers) == 401
            assert _ask(port, "PUT", "/instances/a/heartbeat", **headers) == 401
            assert _ask(port, "DELETE", "/instances/a", **headers) == 401
        for headers in (basic, bearer):
            assert _ask(port, "POST", "/instances", registration, **as_json, **headers) == 200
            assert _ask(port, "PUT", "/instances/a/heartbeat", **headers) == 200
            assert _ask(port, "PUT", "/elsewhere", **headers) == 404
            assert _ask(port, "POST", "/events", body(), **as_json, **headers) == 200
            assert _ask(port, "DELETE", "/instances/a", **headers) == 200
        assert _ask(port, "PATCH", "/instances/a", **basic) == 405
        assert _ask(port, "PUT", "/instances/a/heartbeat", **basic, Host="elsewhere.example") == 403
        oversize = {"Content-Length": str(BODY_BYTES_MAX + 1)}
        assert _ask(port, "POST", "/events", b"", **as_json, **basic, **oversize) == 413

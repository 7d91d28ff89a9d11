"""The index's HTTP requests: fields of Mooncake's conductor, Dynamo and llm-d; wrong ones; bodies of every kind."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("msgspec", reason="the extra simm-store[index] is not installed")
pytest.importorskip("zmq", reason="the extra simm-store[index] is not installed")
pytest.importorskip("xxhash", reason="the extra simm-store[index] is not installed")

from simm.errors import TransportError, UsageError
from simm.index import service as service_module
from simm.index import table as table_module
from simm.index.blocks import Blocks
from simm.index.events import TOKENS_MAX, Removed, Stored, Where
from simm.index.keys import request_keys, token_bytes
from simm.index.publishers import Publishers
from simm.index.service import Service, asking
from simm.index.sources import Registration, Source
from simm.index.streams import Stream
from simm.index.table import Table
from simm.net.http import Web
from simm.net.loop import Loop
from simm.schemes import registry
from simm.schemes.encodings import short_key
from simm.schemes.scheme import Request, Scheme
from simm.testing import FakeClient
from tests.support.tokens import old_tokens

MODEL = "deepseek"
TOKENS = list(range(1000, 1000 + 64))


def _index() -> Blocks:
    """Of a prompt of 4 blocks, "a" has all: 2 on the GPU, all in host memory; rank 1 has one."""
    index = Blocks()
    for rank, gpu, cpu in ((0, 2, 4), (1, 1, 0)):
        source = index.register(Registration("a", MODEL, block_size=16, rank=rank))
        for medium, count in (("GPU", gpu), ("CPU", cpu)):
            if count:
                tokens = token_bytes(TOKENS[: 16 * count])
                index.apply(source, [Stored(list(range(count)), None, tokens, 16, Where(medium))])
    index.register(Registration("b", MODEL, block_size=16))
    return index


def _post(service: Service, path: str, body: Any) -> tuple[int, Any]:
    page = service.posts[path](body if isinstance(body, bytes) else json.dumps(body).encode())
    return page.status, json.loads(page.body)


def test_a_query_is_answered_as_by_the_conductor() -> None:
    service = Service(_index())
    asked = {"model": MODEL, "token_ids": TOKENS + [1, 2], "block_size": 16}
    expected = {"longest_matched": 64, "GPU": 32, "CPU": 64, "DISK": 0, "DP": {"0": 64, "1": 16}}
    assert _post(service, "/query", asked) == (200, {"default": {"a": expected}, "stale": []})
    assert _post(service, "/query", {**asked, "instance_id": "b"}) == (200, {"default": {}, "stale": []})
    by_hash = {"model_name": MODEL, "seq_hashes": request_keys(TOKENS, 16), "block_size": 16}
    assert _post(service, "/query_by_hash", by_hash)[1]["default"]["a"] == expected
    for other in ({"tenant_id": "t"}, {"lora_name": "l"}, {"cache_salt": "s"}, {"model": "m"}, {"block_size": 32}):
        assert "a" not in next(iter(_post(service, "/query", {**asked, **other})[1].values()))


def test_a_question_without_a_size_is_of_blocks_of_a_registered_one() -> None:
    """Two of them are a mistake of the question's, and so are two that nobody has registered."""
    index = _index()
    service = Service(index)
    odd = index.register(Registration("odd", MODEL))
    index.apply(odd, [Stored([7], None, token_bytes(TOKENS[:8]), 8, Where("GPU"))])
    status, found = _post(service, "/query", {"model": MODEL, "token_ids": TOKENS})
    assert status == 200 and found["default"]["a"]["longest_matched"] == 64 and "odd" not in found["default"]
    large = index.register(Registration("large", MODEL, block_size=32))
    index.apply(large, [Stored([7], None, token_bytes(TOKENS[:32]), 32, Where("GPU"))])
    status, found = _post(service, "/query", {"model": MODEL, "token_ids": TOKENS})
    assert status == 400 and "[16, 32]" in found["error"]
    index.apply(odd, [Stored([8], None, token_bytes(TOKENS[:4]), 4, Where("GPU", model="plain"))])
    index.apply(odd, [Stored([9], None, token_bytes(TOKENS[:8]), 8, Where("GPU", model="plain"))])
    status, found = _post(service, "/query", {"model": "plain", "token_ids": TOKENS})
    assert status == 400 and "[4, 8]" in found["error"]


def test_a_query_with_dynamos_names_is_answered_as_by_its_indexer_too() -> None:
    """A tier counts on from the one before it, scores are of devices alone; pools are no workers there."""
    index = _index()
    for medium, instance in (("DISK", "7"), ("STORAGE", "store")):
        kind = "simm" if instance == "store" else "vllm"
        told = Registration(instance, MODEL, kind, 16, pool="p", storage_removals=True)
        stored = Stored([7, 8, 9], None, token_bytes(TOKENS[:48]), 16, Where(medium))
        index.apply(index.register(told), [stored])
    asked = {"model_name": MODEL, "token_ids": TOKENS, "block_size": 16}
    status, answer = _post(Service(index), "/query", asked)
    assert status == 200 and set(answer["default"]) >= {"a", "7"}
    assert answer["scores"] == {"a": {"0": 32, "1": 16}, "7": {"0": 0}} and answer["frequencies"] == []
    assert answer["instances"] == {
        "a": {"longest_matched": 64, "gpu": 32, "cpu": 64, "disk": 64, "dp": {"0": 32, "1": 16}},
        "7": {"longest_matched": 48, "gpu": 0, "cpu": 0, "disk": 48, "dp": {"0": 0}},
    }
    _, plain = _post(Service(index), "/query", {**asked, "model": MODEL, "model_name": None})
    assert not {"scores", "instances"} & set(plain)


def test_scores_are_answered_as_by_llm_d() -> None:
    service = Service(_index())
    status, found = _post(service, "/score", {"model": MODEL, "token_ids": TOKENS, "loads": {"a": 3.0, "b": 0}})
    assert status == 200 and found["scores"] == [{"pod": "a", "score": pytest.approx(2 + 2 * 0.8)}]
    assert found["blocks"] == 4 and found["costs"] == {"a": pytest.approx(3.4), "b": 4.0} and found["best"] == "a"
    _, other = _post(service, "/score", {"model": MODEL, "token_ids": TOKENS, "pod_identifiers": ["b"]})
    assert other["scores"] == [] and other["with_pool"] == {"b": 0.0}
    asked = {"model": MODEL, "token_ids": TOKENS, "instance_id": "b", "ttl_s": 60}
    assert _post(service, "/expect", asked) == (200, {"status": "expected", "blocks": 4})
    assert _post(service, "/score", {"model": MODEL, "token_ids": TOKENS})[1]["scores"][0] == {"pod": "b", "score": 4.0}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/query", b""), ("/query", b"[1]"), ("/query", b"\xff"), ("/query", b"[" * 100_000), ("/query", {}),
        ("/query", {"model": MODEL}), ("/query", {"model": MODEL, "token_ids": "x"}),
        ("/query", {"model": MODEL, "token_ids": [-1]}), ("/query", {"model": MODEL, "token_ids": [1.5]}),
        ("/query", {"model": MODEL, "token_ids": [], "block_size": 1 << 19}),
        ("/query", {"model": "m" * 1000, "token_ids": []}), ("/query", {"model": 5, "token_ids": []}),
        ("/query_by_hash", {"model": MODEL, "seq_hashes": [1 << 64]}),
        ("/query_by_hash", {"model": MODEL, "seq_hashes": {"a": 1}}),
        ("/score", {"model": MODEL, "token_ids": [], "pod_identifiers": "a"}),
        ("/score", {"model": MODEL, "token_ids": [], "loads": {"a": "b"}}),
        ("/score", {"model": MODEL, "token_ids": [], "load_weight": -1}),
        ("/expect", {"model": MODEL, "token_ids": [], "instance_id": "nobody"}),
        ("/expect", {"model": MODEL, "token_ids": [], "instance_id": "a", "ttl_s": 1e9}),
        ("/register", {"instance_id": "a", "modelname": MODEL}), ("/unregister", {"instance_id": "a"}),
    ],
)  # fmt: skip
def test_a_wrong_body_is_answered_with_a_sentence(path: str, body: Any) -> None:
    status, found = _post(Service(_index()), path, body)
    assert status == 400 and len(found["error"]) > 10


def test_a_field_that_is_null_is_as_none() -> None:
    service = Service(_index())
    asked = {"model": MODEL, "token_ids": TOKENS, "lora_name": None, "tenant_id": None, "cache_salt": None}
    _, plain = _post(service, "/score", {"model": MODEL, "token_ids": TOKENS, "loads": {"a": 1}})
    null = dict.fromkeys(("block_size", "pod_identifiers", "load_weight", "seq_hashes", "block_hashes"))
    assert plain["costs"] and _post(service, "/score", {**asked, **null, "loads": {"a": 1}}) == (200, plain)
    body = {**asked, "instance_id": "a", "ttl_s": None, "dp_rank": None, "block_hashes": None}
    assert _post(service, "/expect", body)[0] == 200


def test_a_prompt_is_expected_of_a_rank_of_an_instance_that_has_all() -> None:
    index = Blocks()
    for name, rank in (("all", None), ("one", 1)):
        index.register(Registration(name, MODEL, block_size=16, rank=rank))
    service = Service(index)
    for name, asked, status in (("all", 3, 200), ("one", 1, 200), ("one", 3, 400), ("one", None, 200)):
        body = {"model": MODEL, "token_ids": TOKENS, "instance_id": name, "dp_rank": asked}
        assert _post(service, "/expect", body)[0] == status, (name, asked)
    _, found = _post(service, "/query", {"model": MODEL, "token_ids": TOKENS})
    assert found["default"]["all"]["DP"] == {"3": 0} and found["default"]["one"]["DP"] == {"1": 0}


def test_a_publisher_with_blocks_that_wait_is_not_complete() -> None:
    """Nobody finds these: so what is said of it is not all."""
    index = Blocks()
    source = index.register(Registration("a", MODEL, block_size=1))
    stream = Stream(index, source, replays=False)
    stream.complete = True
    service = Service(index, SimpleNamespace(stream=lambda _: stream))  # type: ignore[arg-type]
    where = Where("GPU")
    told: list[tuple[Any, bool, int]] = [
        (Stored([1], None, token_bytes([1]), 1, where), True, 0),
        (Stored([3, 4], 2, token_bytes([3, 4]), 1, where), False, 2),
        (Removed([4], where), False, 2),
        (Removed([3], where), True, 2),  # all of them are gone
        (Stored([2], 1, token_bytes([2]), 1, where), True, 0),
    ]
    for event, complete, waiting in told:
        index.apply(source, [event])
        (worker,) = service.workers()
        assert (worker["complete"], worker["waiting"]) == (complete, waiting)


def test_publishers_are_registered_and_listed() -> None:
    publishers = Publishers(Blocks())
    try:
        service = Service(publishers.index, publishers)
        body = {"endpoint": "tcp://127.0.0.1:1", "type": "vLLM", "modelname": MODEL, "instance_id": 7, "block_size": 16,
                "dp_rank": 0, "additionalsalt": "w8a8", "tenant_id": "t"}  # fmt: skip
        status, found = _post(service, "/register", body)
        assert (status, found) == (200, {"status": "registered successfully", "instance_id": "7"})
        null = dict.fromkeys(("lease_s", "storage_removals", "replay_endpoint", "node"))
        assert _post(service, "/register", {**body, **null, "dp_rank": 1})[0] == 200
        assert [(each["instance_id"], each["dp_rank"], each["blocks"]) for each in service.workers()] == [
            ("7", 0, 0), ("7", 1, 0)
        ]  # fmt: skip
        for wrong in ({"endpoint": "tcp://*:1"}, {"type": "other"}, {"block_size": 1 << 19}, {"dp_rank": -1},
                      {"lease_s": -1}, {"instance_id": ""}, {"modelname": ""}, {"storage_removals": 1},
                      {"instance_id": "pool:main"}, {"instance_id": "node:h"}):  # fmt: skip
            assert _post(service, "/register", {**body, **wrong})[0] == 400, wrong
        gone = _post(service, "/unregister", {"instance_id": 7, "tenant_id": "t"})
        assert gone[1]["removed_instances"] == ["7|t|0", "7|t|1"] and service.workers() == []
        assert _post(service, "/unregister", {"instance_id": 7, "tenant_id": "t"})[0] == 400
    finally:
        publishers.close()


def test_a_dump_has_keys_and_tiers() -> None:
    found = Service(_index()).dump()
    whole = next(each for each in found["holders"] if each["blocks"] == 4)
    assert dict(zip(whole["seq_hashes"], whole["tiers"])) == dict(
        zip(request_keys(TOKENS, 16), [["gpu", "cpu"]] * 2 + [["cpu"]] * 2)
    )
    assert not found["truncated"]


def test_a_dump_is_made_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of many holders cost a pass over the whole table, also behind the last block that is shown."""
    index = Blocks()
    source = index.register(Registration("a", MODEL, block_size=1))
    for number in range(20):
        where = Where("GPU", salt=f"user-{number}")
        index.apply(source, [Stored([10 * number, 10 * number + 1], None, token_bytes([number, 7]), 1, where)])
    index.apply(source, [Removed([0, 1], Where("GPU"))])
    passes = []
    some = Table.some
    monkeypatch.setattr(Table, "some", lambda table, most: passes.append(most) or some(table, most))
    whole = Service(index).dump()
    assert len(whole["holders"]) == 20 and not whole["truncated"] and len(passes) == 1
    for number, each in enumerate(whole["holders"]):
        keys = request_keys([number, 7], 1) if number else []
        assert each["cache_salt"] == f"user-{number}" and sorted(each["seq_hashes"]) == sorted(keys)
        assert each["tiers"] == [["gpu"]] * each["blocks"]
    monkeypatch.setattr(service_module, "DUMP_MAX", 7)
    part = Service(index).dump()
    assert part["truncated"] and sum(len(each["seq_hashes"]) for each in part["holders"]) == 7
    for shown, every in zip(part["holders"], whole["holders"]):
        assert set(shown["seq_hashes"]) <= set(every["seq_hashes"]) and shown["blocks"] == every["blocks"]


def test_slots_are_looked_at_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "_PASS", 64)
    index = Blocks()
    source = index.register(Registration("a", MODEL, block_size=1))
    tokens = list(range(1000))
    index.apply(source, [Stored(list(range(1000)), None, token_bytes(tokens), 1, Where("GPU"))])
    for most in (0, 1, 65, 999, 1000, 2000):
        ((_, keys, counts),) = index.held(most)
        assert len(set(keys.tolist())) == len(counts) == min(most, 1000)
        assert set(keys.tolist()) <= set(request_keys(tokens, 1))


def test_all_metrics_have_samples() -> None:
    index = _index()
    service = Service(index)
    _post(service, "/query", {"model": MODEL, "token_ids": TOKENS})
    index.sources["a", "default", 0].ignored["why"] += 1
    text = service.metrics().text()
    assert 'simm_index_blocks{endpoint="a",tenant="default",rank="0"} 4' in text
    assert 'simm_index_stale{endpoint="a",tenant="default",rank="0"} 0' in text
    assert 'simm_index_requests_total{request="/query"} 1' in text and 'reason="why"} 1' in text


# -- the store's own answer ------------------------------------------------------------------------------


class _Store:
    """A client that has some pages of a prompt."""

    namespace = ""

    def __init__(self, pages: int, schemes: Sequence[Scheme]) -> None:
        self.pages, self.value = pages, registry.as_value([registry.Registered(each) for each in schemes])
        self.down = False

    def get_into_many_at_owner(self, keys: Sequence[str], buffers: Sequence[bytearray]) -> list[int | None]:
        if self.down:
            raise TransportError("down")
        found: list[int | None] = []
        for key, buffer in zip(keys, buffers):
            mine = key == registry.value_key(MODEL, "sglang-simm")
            found.append(len(self.value) if mine else None)
            buffer[: found[-1] or 0] = self.value if mine else b""
        return found

    def prefix(self, keys: Sequence[str], group: int) -> Any:
        return SimpleNamespace(keys=min(len(keys), self.pages * group), by_host={"h": 1}, load_ms=0.5)


def test_a_query_has_what_the_store_has() -> None:
    schemes = [Scheme(MODEL, "sglang-simm", page=16), Scheme(MODEL, "sglang-simm", 16, namespace="x")]
    store = _Store(3, schemes)
    service = Service(_index(), shared=asking(store, every_s=0.0))
    body = {"model": MODEL, "token_ids": TOKENS, "block_size": 16}
    assert _post(service, "/query", body)[1]["shared"] == {
        "tokens": 48, "by_host": {"h": 1}, "load_ms": 0.5, "scheme": "sglang-simm", "block_size": 16
    }  # fmt: skip
    assert _post(service, "/query", {**body, "model": "other"})[1]["shared"] is None
    given = [Scheme("other", "vllm-mooncake", page=32), Scheme("third", "lmcache", page=16)]
    told = Service(_index(), shared=asking(store, given=given))
    shared = _post(told, "/query", {**body, "model": "other"})[1]["shared"]
    assert (shared["tokens"], shared["scheme"]) == (64, "vllm-mooncake"), "of connectors that register nothing"
    store.down = True
    assert _post(service, "/query", body) == (200, {**_post(Service(_index()), "/query", body)[1], "shared": None})


def test_a_query_by_hashes_may_have_tokens_for_the_store() -> None:
    """Null is as none at all. It was an error of the server; a list that is too long was not looked at."""
    service = Service(_index(), shared=asking(_Store(3, [Scheme(MODEL, "sglang-simm", page=16)]), every_s=0.0))
    body: dict[str, Any] = {"model": MODEL, "seq_hashes": [1], "block_size": 16}
    for tokens, status, tokens_found in (([], 200, 0), (TOKENS, 200, 48), (None, 200, None), (7, 400, None)):
        found = _post(service, "/query", {**body, "token_ids": tokens})
        assert found[0] == status, found
        assert (found[1].get("shared") or {"tokens": None})["tokens"] == tokens_found
    assert _post(service, "/query", {**body, "token_ids": [1] * (TOKENS_MAX + 1)})[0] == 400
    assert _post(service, "/query", {"model": MODEL, "token_ids": None, "block_size": 16})[0] == 400


def test_a_query_for_an_instance_that_is_a_number() -> None:
    index = _index()
    source = index.register(Registration("7", MODEL, block_size=16))
    index.apply(source, [Stored([1], None, token_bytes(TOKENS[:16]), 16, Where())])
    service = Service(index)
    body = {"model": MODEL, "token_ids": TOKENS, "block_size": 16}
    for name, found in ((7, {"7"}), ("7", {"7"}), ("a", {"a"}), ("", {"a", "7"}), (None, {"a", "7"})):
        status, answer = _post(service, "/query", {**body, "instance_id": name})
        assert status == 200 and set(answer["default"]) == found, name
    for name in (True, -1, [7], 1 << 64):
        assert _post(service, "/query", {**body, "instance_id": name})[0] == 400


def test_a_registration_that_is_wrong_leaves_the_others_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Registrations are other processes' words: of an algorithm that nobody knows, or with far too many keys."""
    client = FakeClient()
    good = Scheme(MODEL, "sglang-simm", 16)
    keys = good.keys(TOKENS).keys
    assert client.put_many(keys, [b"v"] * len(keys)) == [True] * len(keys)
    bad = [
        Scheme(MODEL, "lmcache-server", 16),
        Scheme(MODEL, "vllm-tier", 16, options={"algorithm": "?"}),
        Scheme(MODEL, "sglang-mooncake", 1, ranks=64, options={"scope": "s", "generation": "z" * 900}),
        Scheme(MODEL, "sglang-mooncake", 16, options={"scope": "s"}),
        Scheme(MODEL, "sglang-mooncake", 16, pools=("unheard",)),
    ]  # fmt: skip
    for each in (*bad, good):
        assert registry.register(client, each)
    client.put(registry.value_key(MODEL, "lmcache"), b"[" * 60_000)
    client.put(registry.value_key(MODEL, "vllm-blocks"), bytes(1 << 20))
    service = Service(_index(), shared=asking(client))
    body = {"model": MODEL, "token_ids": TOKENS, "block_size": 16}
    for _ in range(3):
        status, answer = _post(service, "/query", body)
        assert status == 200 and answer["shared"]["tokens"] == len(TOKENS) // 16 * 16
    said = [each.getMessage() for each in caplog.records if "cannot answer" in each.getMessage()]
    assert len(said) == len(set(said)) == 3, "once each"


def test_a_new_registration_is_read_where_nothing_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeClient()
    old, new = Scheme(MODEL, "sglang-simm", 16), Scheme(MODEL, "lmcache", 32)
    registry.register(client, old)
    service = Service(_index(), shared=asking(client))
    body = {"model": MODEL, "token_ids": TOKENS, "block_size": 16}
    assert _post(service, "/query", body)[1]["shared"]["tokens"] == 0
    registry.register(client, new)
    keys = new.keys(TOKENS).keys
    assert client.put_many(keys, [b"v"] * len(keys)) == [True] * len(keys)
    assert _post(service, "/query", body)[1]["shared"]["tokens"] == 0, "read a moment ago"
    later = time.monotonic() + 1.5
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert _post(service, "/query", body)[1]["shared"]["tokens"] == len(TOKENS) // 32 * 32


def test_a_prompt_with_an_adapter_is_that_of_deployments_that_name_it() -> None:
    client = FakeClient()
    options = {"scope": "s", "generation": "1", "loras": json.dumps({"sql": "/adapters/sql"})}
    scheme = Scheme(MODEL, "vllm-blocks", 16, options=options)
    registry.register(client, scheme)
    registry.register(client, Scheme(MODEL, "sglang-simm", 16))
    keys = scheme.keys(TOKENS, Request(lora=("sql", "/adapters/sql"))).keys
    assert client.put_many(keys, [b"v"] * len(keys)) == [True] * len(keys)
    service = Service(_index(), shared=asking(client))
    body = {"model": MODEL, "token_ids": TOKENS, "block_size": 16}
    assert _post(service, "/query", {**body, "lora_name": "sql"})[1]["shared"]["tokens"] == len(TOKENS) // 16 * 16
    assert _post(service, "/query", body)[1]["shared"]["tokens"] == 0
    assert _post(service, "/query", {**body, "lora_name": "other"})[1]["shared"] is None, "nobody knows its path"


def test_what_the_store_has_of_another_tenant_is_not_shared() -> None:
    """Mooncake's face has keys of each tenant's own. All tenants were told the most that any of them had."""
    client = FakeClient()
    tenants = ["a", "b", "default", "long" * 100, "long" * 101]
    scopes = {tenant: short_key(f"mooncake/{tenant}") for tenant in tenants}
    schemes = {
        tenant: Scheme(MODEL, "lmcache", 16, options={"scope": scope, "generation": "1"})
        for tenant, scope in scopes.items()
    }
    for tenant in ("a", "long" * 100):
        keys = schemes[tenant].keys(TOKENS).keys
        assert client.put_many(keys, [b"v"] * len(keys)) == [True] * len(keys)
    service = Service(_index(), shared=asking(client, given=list(schemes.values())))
    body = {"model": MODEL, "token_ids": TOKENS, "block_size": 16}
    found = [_post(service, "/query", {**body, "tenant_id": each})[1]["shared"]["tokens"] for each in tenants]
    assert found == [64, 0, 0, 64, 0]
    assert _post(service, "/query", body)[1]["shared"]["tokens"] == 0, "that is the default one's"
    assert _post(service, "/query", {**body, "tenant_id": "c"})[1]["shared"] is None
    everyones = Scheme(MODEL, "sglang-simm", 16)
    keys = everyones.keys(TOKENS[:32]).keys
    assert client.put_many(keys, [b"v"] * len(keys)) == [True] * len(keys)
    told = Service(_index(), shared=asking(client, given=[*schemes.values(), everyones]))
    found = [_post(told, "/query", {**body, "tenant_id": each})[1]["shared"]["tokens"] for each in ("a", "b", "c")]
    assert found == [64, 32, 32], "keys that no tenant's are all can load"


# -- by HTTP ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _web(*tokens: str, body_max: int = 10_000) -> Iterator[str]:
    loop = Loop()
    service = Service(_index())
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    web = Web(loop, listener, service.routes, old_tokens(*tokens), posts=service.posts, body_max=body_max)
    thread = threading.Thread(target=loop.run)
    loop.call_every(0.02, lambda: None)
    thread.start()
    try:
        yield address
    finally:
        loop.stop()
        thread.join()
        web.close()
        loop.close()


def _ask(address: str, path: str, body: bytes | None, **headers: str) -> tuple[int, str]:
    told = {"Content-Type": "application/json", **{name.replace("_", "-"): text for name, text in headers.items()}}
    request = urllib.request.Request(f"http://{address}{path}", data=body, headers=told)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as exc:
        return exc.code, exc.read().decode()


def test_a_post_by_http() -> None:
    body = json.dumps({"model": MODEL, "token_ids": TOKENS}).encode()
    with _web() as address:
        status, text = _ask(address, "/query", body)
        assert status == 200 and json.loads(text)["default"]["a"]["longest_matched"] == 64
        assert _ask(address, "/healthz", None)[0] == 200 and _ask(address, "/workers", None)[0] == 200
        assert _ask(address, "/query", None)[0] == 404 and _ask(address, "/nothing", body)[0] == 404
        assert _ask(address, "/query", body, Content_Type="text/plain")[0] == 415, "what a web page could send"
        assert _ask(address, "/query", body, Host="evil.example")[0] == 403
        assert _ask(address, "/query", bytes(10_001))[0] == 413


def test_a_post_needs_the_token() -> None:
    body = json.dumps({"model": MODEL, "token_ids": TOKENS}).encode()
    with _web("secret-secret-secret") as address:
        assert _ask(address, "/query", body)[0] == 401
        assert _ask(address, "/query", body, Authorization="Bearer secret-secret-secret")[0] == 200
        assert _ask(address, "/healthz", None)[0] == 200


def test_a_body_in_parts_and_heads_that_are_wrong() -> None:
    body = json.dumps({"model": MODEL, "token_ids": TOKENS}).encode()
    head = f"POST /query HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    with _web() as address:
        host, port = address.split(":")

        def told(*parts: bytes) -> bytes:
            with socket.create_connection((host, int(port)), 120) as sock:
                for part in parts:
                    sock.sendall(part)
                return b"".join(iter(lambda: sock.recv(4096), b""))

        for cut in (0, 1, len(body) // 2):
            assert told(head.encode() + b"\r\n", body[:cut], body[cut:]).startswith(b"HTTP/1.1 200")
        with socket.create_connection((host, int(port)), 120) as sock:
            sock.sendall(head.encode() + b"Expect: 100-continue\r\n\r\n")
            assert sock.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
            sock.sendall(body)
            assert sock.recv(100).startswith(b"HTTP/1.1 200")
        kind = b"Content-Type: application/json\r\n"
        for wrong in (b"Content-Length: -1", b"Content-Length: 1\r\nContent-Length: 2", b"Transfer-Encoding: chunked"):
            assert told(b"POST /query HTTP/1.1\r\n" + kind + wrong + b"\r\n\r\n").startswith(b"HTTP/1.1 411")
        assert told(b"POST \r\n\r\n").startswith(b"HTTP/1.1 4")


def test_a_source_that_was_removed_is_none() -> None:
    service = Service(Blocks())
    with pytest.raises(UsageError, match="takes no publishers"):
        service.register({})
    assert isinstance(_index().sources["b", "default", 0], Source)

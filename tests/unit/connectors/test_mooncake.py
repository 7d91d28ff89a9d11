"""Mooncake's API over SiMM: the codes that Mooncake 0.3.13 returns for the same calls, and what it does at outages.

The values of ``SCRIPT`` were recorded from mooncake-transfer-engine-non-cuda 0.3.13.post1 with its own master. tests/
engines runs SGLang's mooncake backend over it.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from simm.connectors import mooncake, mooncake_types
from simm.connectors.mooncake import MooncakeDistributedStore, ReplicateConfig
from simm.constants import VALUE_BYTES_MAX
from simm.errors import TransportError, UsageError
from simm.testing import FakeClient, FakeStore

ROOT = Path(mooncake.__file__).parents[2]
SIZE = 1 << 16


@pytest.fixture
def shared() -> FakeStore:
    return FakeStore()


@pytest.fixture
def store(shared: FakeStore) -> Iterator[MooncakeDistributedStore]:
    made = MooncakeDistributedStore()
    made.use(FakeClient(store=shared))
    yield made
    made.close()


@pytest.fixture
def memory() -> Any:
    return (ctypes.c_ubyte * SIZE)()


def other(shared: FakeStore, namespace: str = "default", tenant: str = "default") -> MooncakeDistributedStore:
    made = MooncakeDistributedStore()
    made.use(FakeClient(store=shared, namespace=namespace), tenant=tenant)
    return made


@pytest.mark.parametrize("options", [{"replicas": 2}, {"put_if_absent": True}])
def test_an_upsert_replaces_where_values_are_put_once(options: dict[str, Any]) -> None:
    made = MooncakeDistributedStore()
    made.use(FakeClient(**options))
    assert made.put("k", b"first") == made.put("k", b"other") == 0 and made.get("k") == b"first"
    assert made.upsert("k", b"third") == 0 and made.get("k") == b"third"
    assert made.remove_all() == 0 and made.get("k") == b""
    made.close()


@pytest.mark.parametrize("where", ["Keyspace.close", "Registrar.close", "Sessions.end_all"])
def test_issue_a_close_that_is_interrupted_closes_the_client(
    shared: FakeStore, memory: Any, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """It had forgotten the client by then, so that no further one closed it."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    made, client = MooncakeDistributedStore(), FakeClient(store=shared)
    made.use(client)
    assert made.register_buffer(ctypes.addressof(memory), SIZE) == 0 and made.health_check() == 0
    with monkeypatch.context() as patch:
        patch.setattr(f"{mooncake.__name__}.{where}", interrupted)
        with pytest.raises(KeyboardInterrupt):
            made.close()
    with pytest.raises(UsageError):
        client.get("k")
    assert made.close() == 0 and made.health_check() == 1


Call = Callable[[MooncakeDistributedStore, int], Any]
#: Calls in their order, with what Mooncake returned. ``at`` is the memory's address.
SCRIPT: list[tuple[Call, Any]] = [
    (lambda s, at: s.health_check(), 0),
    (lambda s, at: s.get("nokey"), b""),
    (lambda s, at: s.put("k", b"hello"), 0),
    (lambda s, at: s.put("k", b"other"), 0),
    (lambda s, at: s.get("k"), b"hello"),
    (lambda s, at: s.put("e", b""), -600),
    (lambda s, at: s.put("k" * 1000, b"x"), 0),
    (lambda s, at: s.put("", b"x"), -600),
    (lambda s, at: (s.is_exist("k"), s.is_exist("z"), s.batch_is_exist(["k", "z"])), (1, 0, [1, 0])),
    (lambda s, at: (s.get_size("k"), s.get_size("z")), (5, -704)),
    (lambda s, at: s.batch_put_from(["u"], [at], [100]), [0]),
    (lambda s, at: s.batch_get_into(["k"], [at], [100]), [5]),
    (lambda s, at: (s.register_buffer(at, SIZE), s.register_buffer(at, SIZE), s.register_buffer(at, 0)),
     (0, -600, -600)),
    (lambda s, at: s.batch_put_from(["p1", "p2", "k"], [at, at + 100, at], [100, 100, 50]), [0, 0, 0]),
    (lambda s, at: s.batch_put_from(["p0"], [at], [0]), [-600]),
    (lambda s, at: s.batch_get_into(["p1", "z", "k"], [at, at + 1000, at + 2000], [100, 100, 100]), [100, -704, 5]),
    (lambda s, at: (s.batch_get_into(["p1"], [at], [10]), s.get_into("p1", at, 10)), ([-600], -600)),
    (lambda s, at: (s.get_into("p1", at, 1000), s.get_into("zz", at, 1000)), (100, -704)),
    (lambda s, at: s.batch_put_from(["p1", "p2"], [at], [100]), [-600, -600]),
    (lambda s, at: s.batch_get_into(["p1", "p2"], [at], [100]), [-600, -600]),
    (lambda s, at: (s.batch_put_from([], [], []), s.batch_get_into([], [], []), s.batch_is_exist([])), ([], [], [])),
    (lambda s, at: s.batch_put_from_multi_buffers(
        ["m1", "m2"], [[at, at + 500], [at + 10]], [[100, 50], [30]], ReplicateConfig()), [0, 0]),
    (lambda s, at: s.batch_get_into_multi_buffers(
        ["m1", "m2", "z"], [[at, at + 500], [at + 10], [at]], [[100, 50], [30], [5]]), [150, 30, -704]),
    (lambda s, at: s.batch_get_into_multi_buffers(["m1"], [[at, at + 500]], [[50, 100]]), [150]),
    (lambda s, at: s.batch_get_into_multi_buffers(["m1"], [[at]], [[50]]), [-600]),
    (lambda s, at: s.batch_put_from(["m1"], [at], [150]), [0]),  # here, in place of the one that was dropped
    (lambda s, at: s.batch_get_into_multi_buffers(["m1"], [[at]], [[500]]), [-800]),
    (lambda s, at: s.batch_put_from(["m1"], [at], [150]), [0]),
    (lambda s, at: s.batch_get_session_start(["m1", "z"]), [0, -704]),
    (lambda s, at: s.batch_get_into_multi_buffer_ranges(["m1"], [[at, at + 300]], [[10, 20]], [[0, 100]]), [30]),
    (lambda s, at: s.batch_get_into_multi_buffer_ranges(["m1"], [[at]], [[10]], [[145]]), [-600]),
    (lambda s, at: s.batch_get_into_multi_buffer_ranges(["m2"], [[at]], [[10]], [[0]]), [-600]),
    (lambda s, at: (s.batch_get_session_end(["m1", "z"]), s.batch_get_session_end(["m1"])), (0, 0)),
    (lambda s, at: [(key, [each.is_memory_replica() for each in found])
                    for key, found in s.batch_get_replica_desc(["m1", "z"]).items()], [("m1", [True])]),
    (lambda s, at: s.get_batch(["k", "z"]), [b"hello", b""]),
    (lambda s, at: [each and (bytes(memoryview(each)), each.size(), len(each), memoryview(each).readonly)
                    for each in s.batch_get_buffer(["k", "z"])], [(b"hello", 5, 5, False), None]),
    (lambda s, at: (s.get_buffer("z"), s.get_buffer(""), s.batch_get_buffer([])), (None, None, [])),
    (lambda s, at: s.put_batch(["b1", "b2"], [b"1", b"2"]), 0),
    (lambda s, at: (s.put_parts("pp", b"a", b"b"), s.get("pp")), (0, b"ab")),
    (lambda s, at: (s.upsert("k", b"new"), s.get("k")), (0, b"new")),
    (lambda s, at: (s.remove("k", True), s.remove("nokey")), (0, -704)),
    (lambda s, at: s.batch_remove(["p1", "nokey"], True), [0, -704]),
    (lambda s, at: (s.unregister_buffer(at), s.unregister_buffer(at)), (0, -600)),
    (lambda s, at: (s.close(), s.close()), (0, 0)),
]  # fmt: skip


def test_a_buffer_is_memory_by_its_address(store: MooncakeDistributedStore) -> None:
    assert store.put("k", b"hello") == 0
    buffer = store.get_buffer("k")
    assert buffer is not None and isinstance(buffer, mooncake.BufferHandle)
    assert ctypes.string_at(buffer.ptr(), buffer.size()) == b"hello"
    ctypes.memset(buffer.ptr(), ord("j"), 1)
    assert bytes(buffer) == b"jello" and store.get("k") == b"hello", "a copy"


def test_codes_are_those_of_mooncake(store: MooncakeDistributedStore, memory: Any) -> None:
    address = ctypes.addressof(memory)
    for number, (call, wanted) in enumerate(SCRIPT):
        assert call(store, address) == wanted, f"call {number}"


def test_every_call_that_a_consumer_makes_is_there() -> None:
    """The table in docs/engines.md; arguments by the names that Mooncake gives them."""
    text = (ROOT / "docs" / "engines.md").read_text()
    table = text[text.index("### Calls") :].split("\n\n")[1]
    named = {word for line in table.splitlines()[2:] for word in re.findall(r"`(\w+)`", line.split("|")[1])}
    public = {name for name in dir(MooncakeDistributedStore) if not name.startswith("_")} - {"use"}
    assert named == public and len(public) >= 20


@pytest.mark.parametrize("seed", range(12))
def test_values_are_what_a_dict_says(store: MooncakeDistributedStore, memory: Any, seed: int) -> None:
    dice = random.Random(seed)
    address = ctypes.addressof(memory)
    store.register_buffer(address, SIZE // 2)  # half of it, so both kinds of memory are used
    model: dict[str, bytes] = {}

    def pieces(total: int, base: int) -> tuple[list[int], list[int]]:
        cuts = sorted({0, total, *(dice.randrange(total + 1) for _ in range(dice.randrange(3)))})
        sizes = [end - start for start, end in itertools.pairwise(cuts)]
        return [address + base + 2 * start for start in cuts[:-1]], sizes

    for _ in range(120):
        key = f"key{dice.randrange(6)}"
        act = dice.choice(("put", "gather", "get", "scatter", "ranges", "remove", "exist", "all"))
        old = model.get(key)
        if act in ("put", "gather"):
            value = dice.randbytes(dice.randrange(1, 2000))
            if act == "put":
                assert store.put(key, value) == 0
            else:
                ptrs, sizes = pieces(len(value), dice.choice((0, SIZE // 2)))
                for ptr, size, start in zip(ptrs, sizes, (sum(sizes[:at]) for at in range(len(sizes)))):
                    ctypes.memmove(ptr, value[start : start + size], size)
                assert store.batch_put_from_multi_buffers([key], [ptrs], [sizes]) == [0]
            model.setdefault(key, value)
        elif act == "get":
            ctypes.memset(address, 0, SIZE)
            assert store.batch_get_into([key], [address], [4000]) == [-704 if old is None else len(old)]
            assert bytes(memory[: len(old or b"")]) == (old or b"") and store.get(key) == (old or b"")
        elif act == "scatter" and old is not None:
            ptrs, sizes = pieces(len(old), 0)
            assert store.batch_get_into_multi_buffers([key], [ptrs], [sizes]) == [len(old)]
            assert b"".join(ctypes.string_at(ptr, size) for ptr, size in zip(ptrs, sizes)) == old
        elif act == "ranges" and old is not None:
            assert store.batch_get_session_start([key]) == [0]
            store.upsert(key, b"replaced meanwhile")
            start = dice.randrange(len(old))
            size = dice.randrange(1, len(old) - start + 1)
            assert store.batch_get_into_multi_buffer_ranges([key], [[address]], [[size]], [[start]]) == [size]
            assert ctypes.string_at(address, size) == old[start : start + size], "of the value that was pinned"
            assert store.batch_get_session_end([key]) == 0 and not store._sessions
            store.upsert(key, old)
        elif act == "remove":
            assert store.remove(key) == (-704 if model.pop(key, None) is None else 0)
        elif act == "all" and dice.random() < 0.2:
            assert store.remove_all() == 0
            model.clear()
        keys = [f"key{number}" for number in range(6)]
        assert store.batch_is_exist(keys) == [int(each in model) for each in keys]


def test_remove_all_stays_in_its_namespace_and_tenant(store: MooncakeDistributedStore, shared: FakeStore) -> None:
    """Mooncake's would wipe what other models have there."""
    others = [other(shared, namespace="llama"), other(shared, tenant="qwen")]
    peer = other(shared)
    for each in (store, *others):
        assert each.put("k", b"v") == 0
    assert peer.get("k") == b"v"
    assert store.remove_all(force=True) == 0
    assert [each.is_exist("k") for each in (store, peer, *others)] == [0, 0, 1, 1]
    for each in (peer, *others):
        each.close()


def test_control_without_the_tenant_in_its_scope_remove_all_reaches_others(
    shared: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = mooncake.Keyspace
    monkeypatch.setattr(mooncake, "Keyspace", lambda client, scope: real(client, "mooncake"))
    one, two = other(shared), other(shared, tenant="qwen")
    assert two.put("k", b"v") == 0 and one.remove_all() == 0 and two.is_exist("k") == 0
    one.close()
    two.close()


def test_sessions_release_what_they_pinned(store: MooncakeDistributedStore, memory: Any) -> None:
    address = ctypes.addressof(memory)
    store.put_batch(["a", "b"], [b"aaaa", b"bbbb"])
    assert store.batch_get_session_start(["a", "b", "c"]) == [0, 0, -704]
    first, _ = store._sessions._of["a"]
    assert store.batch_get_session_start(["b"]) == [0], "again: the later one counts"
    assert store.batch_get_session_end(["a"]) == 0 and first.left == set()
    with pytest.raises(Exception, match="released"):
        first.pins.get_ranges(0, [(0, 1, bytearray(1))])
    got = store.batch_get_into_multi_buffer_ranges(["b", "a"], [[address], [address + 8]], [[4], [4]], [[0], [0]])
    assert got == [4, -600] and bytes(memory[:4]) == b"bbbb"
    store.close()
    assert not store._sessions


@pytest.mark.parametrize(("wrong", "code"), [(12, -600), (4, -800)])
def test_a_value_of_another_size_than_its_buffers_is_dropped(
    store: MooncakeDistributedStore, memory: Any, caplog: pytest.LogCaptureFixture, wrong: int, code: int
) -> None:
    """Else it would stay: a put of a key that exists stores nothing."""
    at = ctypes.addressof(memory)
    assert store.put_batch(["a", "b"], [b"x" * wrong, b"bbbbbbbb"]) == 0
    places = [[at, at + 4], [at + 8, at + 12]], [[4, 4]] * 2
    for _ in range(2):
        assert store.batch_get_into_multi_buffers(["a", "b"], *places) == [code, 8]
        assert store.batch_is_exist(["a", "b"]) == [0, 1]
        assert store.put("a", b"x" * wrong) == 0
    assert caplog.text.count("another size") == 1
    assert store.batch_get_into_multi_buffers(["a"], [[at, at + 4]], [[4, 4]]) == [code]
    assert store.put("a", b"aaaabbbb") == 0
    assert store.batch_get_into_multi_buffers(["a"], [[at, at + 4]], [[4, 4]]) == [8]


def test_a_value_that_one_buffer_cannot_hold_stays(store: MooncakeDistributedStore, memory: Any) -> None:
    """Its caller chose the memory, and promises nothing of the value."""
    at = ctypes.addressof(memory)
    assert store.put("a", b"aaaabbbb") == 0
    assert store.get_into("a", at, 4) == -600 and store.get_into("a", at, 16) == 8
    assert store.get("a") == b"aaaabbbb"


def test_a_value_that_is_too_large_fails_alone(store: MooncakeDistributedStore, memory: Any) -> None:
    """There is no room for it: vLLM's encoder cache goes on after this code, and ends its engine after -600."""
    address = ctypes.addressof(memory)
    sizes = [100, VALUE_BYTES_MAX + 1, -1, 100]
    assert store.batch_put_from(["a", "b", "c", "d"], [address, address, address, 0], sizes) == [0, -200, -600, -600]
    assert store.batch_is_exist(["a", "b", "c", "d"]) == [1, 0, 0, 0]
    assert store.batch_put_from_multi_buffers(["b"], [[address] * 2], [[24, VALUE_BYTES_MAX]]) == [-200]
    assert store.put("b", bytes(VALUE_BYTES_MAX + 1)) == -200 and store.is_exist("b") == 0


def calls(store: MooncakeDistributedStore, at: int) -> dict[str, Any]:
    return {
        "put": store.put("k", b"v"), "put_parts": store.put_parts("k", b"v"),
        "put_batch": store.put_batch(["k"], [b"v"]), "put_from": store.put_from("k", at, 8),
        "batch_put_from": store.batch_put_from(["k"], [at], [8]),
        "multi": store.batch_put_from_multi_buffers(["k"], [[at]], [[8]]), "upsert": store.upsert("k", b"v"),
        "get": store.get("k"), "get_batch": store.get_batch(["k"]),
        "buffer": store.get_buffer("k"), "buffers": store.batch_get_buffer(["k"]), "get_size": store.get_size("k"),
        "get_into": store.get_into("k", at, 8), "batch_get_into": store.batch_get_into(["k"], [at], [8]),
        "multi_get": store.batch_get_into_multi_buffers(["k"], [[at]], [[8]]),
        "session": store.batch_get_session_start(["k"]), "is_exist": store.is_exist("k"),
        "ranges": store.batch_get_into_multi_buffer_ranges(["k"], [[at]], [[8]], [[0]]),
        "end": store.batch_get_session_end(["k"]), "batch_is_exist": store.batch_is_exist(["k"]),
        "desc": store.batch_get_replica_desc(["k"]), "remove": store.remove("k"), "remove_all": store.remove_all(),
    }  # fmt: skip


#: What every call returns during an outage: puts say that they failed, reads miss.
OUTAGE = {
    "put": -900, "put_parts": -900, "put_batch": -900, "put_from": -900, "batch_put_from": [-900], "multi": [-900],
    "upsert": -900, "get": b"", "get_batch": [b""], "buffer": None, "buffers": [None], "get_size": -704,
    "get_into": -704, "batch_get_into": [-704], "multi_get": [-704], "session": [-704], "is_exist": 0,
    "ranges": [-600], "end": 0, "batch_is_exist": [0], "desc": {}, "remove": -900, "remove_all": -900,
}  # fmt: skip


#: Those that change what is stored. After an error of any kind they say that no server was reached.
CHANGES = ("put", "put_parts", "put_batch", "put_from", "batch_put_from", "multi", "upsert", "remove", "remove_all")


def test_an_outage_is_a_miss_or_a_code(store: MooncakeDistributedStore, shared: FakeStore, memory: Any) -> None:
    store.put("k", b"v")
    shared.unavailable = True
    assert calls(store, ctypes.addressof(memory)) == OUTAGE
    fresh = other(shared)
    assert calls(fresh, ctypes.addressof(memory)) == OUTAGE, "one that knows no generation"
    fresh.close()


@pytest.mark.parametrize("closed", [False, True])
def test_before_setup_and_after_close_calls_return_codes(memory: Any, closed: bool) -> None:
    store = MooncakeDistributedStore()
    if closed:
        store.use(FakeClient())
        store.close()
    found = calls(store, ctypes.addressof(memory))
    assert found.pop("is_exist") == -1 and found.pop("batch_is_exist") == [-1] and found.pop("desc") == {}
    assert found.pop("get") == b"" and found.pop("get_batch") == [b""] and found.pop("end") in (0, -600)
    assert found.pop("buffer") is None and found.pop("buffers") == [None]
    assert all(code in (-600, [-600]) for code in found.values()), found
    assert store.health_check() == 1


def test_an_error_of_any_kind_is_a_code(store: MooncakeDistributedStore, shared: FakeStore, memory: Any) -> None:
    def broken(operation: str, keys: int) -> None:
        raise ZeroDivisionError(operation)

    shared.latency = broken
    found = calls(store, ctypes.addressof(memory))
    for code in found.values():
        assert code in (-600, [-600], -900, [-900], -1, [-1], b"", [b""], None, [None], {}, 0), code
    assert {name: found[name] for name in CHANGES} == {name: OUTAGE[name] for name in CHANGES}


@pytest.mark.parametrize("keys", [None, 5, iter("ab")], ids=["None", "a number", "an iterator"])
def test_issue_what_is_no_list_of_keys_raises_nothing(store: MooncakeDistributedStore, keys: Any) -> None:
    """What was to be returned in place of an error raised one itself."""
    assert store.batch_is_exist(keys) == store.get_batch(keys) == store.batch_remove(keys) == []
    for call in (store.batch_get_into, store.batch_get_into_multi_buffers, store.batch_put_from,
                 store.batch_put_from_multi_buffers):  # fmt: skip
        assert call(keys, [], []) == []
    assert store.batch_get_into_multi_buffer_ranges(keys, [], [], []) == []


def test_issue_one_text_is_no_list_of_keys(store: MooncakeDistributedStore) -> None:
    """Its letters were taken for keys, and removed."""
    assert store.put("k", b"v") == 0
    assert store.batch_remove("kk") == [-600, -600] and store.get("k") == b"v"
    assert store.batch_is_exist("k") == [-1] and store.get_batch("k") == [b""]
    assert store.put_batch("ab", [b"1", b"2"]) != 0 and store.is_exist("a") == 0


def test_issue_memory_is_registered_while_other_threads_look_for_theirs(
    store: MooncakeDistributedStore, memory: Any
) -> None:
    at = ctypes.addressof(memory)
    assert [store.register_buffer(at + each * 1024, 1024) for each in range(3)] == [0, 0, 0]
    walk = iter(store._registered.items())
    found = [next(walk)]
    assert store.register_buffer(at + 8192, 1024) == 0 and store.unregister_buffer(at + 1024) == 0
    found += walk
    assert [start - at for start, _ in found] == [0, 1024, 2048]
    assert [start - at for start in store._registered] == [0, 2048, 8192]


def test_a_registration_that_cannot_be_ended_is_ended(
    store: MooncakeDistributedStore, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No call uses it any more. vLLM's encoder cache ends its engine after another code."""

    def broken(_: Any) -> None:
        raise OSError("a fault of the test")

    address = ctypes.addressof(memory)
    assert store.register_buffer(address, SIZE) == 0
    monkeypatch.setattr(store._client, "deregister", broken)
    assert store.unregister_buffer(address) == 0 and not store._registered


def test_setup_takes_mooncakes_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def client(manager: str | None) -> FakeClient:
        made.append(manager)
        return FakeClient(manager)

    monkeypatch.setattr(mooncake, "Client", client)
    monkeypatch.delenv("SIMM_MANAGER", raising=False)
    store = MooncakeDistributedStore()
    arguments = ("host-7", "P2PHANDSHAKE", 1 << 30, 1 << 24, "rdma", "mlx5_0", "10.0.0.5:30001")
    assert store.setup(*arguments, None, enable_ssd_offload=True, tenant_id="t") == 0
    assert made == ["10.0.0.5:30001"] and store.get_hostname() == "host-7"
    assert store.setup({"local_hostname": "host-8", "master_server_address": "10.0.0.6:30001"}) == 0, "LMCache's name"
    assert made[1:] == ["10.0.0.6:30001"] and store.get_hostname() == "host-8"
    assert store.setup({"local_hostname": "host-8"}) == -600
    monkeypatch.setenv("SIMM_MANAGER", "10.0.0.9:30001")
    assert store.setup(*arguments) == 0 and store.setup_dummy(1, 1, "10.0.0.7:1") == 0
    assert made[2:] == [None, None], "the environment's"
    store.close()


@pytest.mark.parametrize("by", ["SIMM_CLUSTER_MANAGER", "SIMM_CONFIG"])
def test_issue_the_cluster_is_the_settings_however_they_name_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, by: str
) -> None:
    """An engine of deploy/kubernetes/engine-pod.yaml went to the address of the Mooncake master."""
    made: list[Any] = []
    monkeypatch.setattr(mooncake, "Client", lambda manager: made.append(manager) or FakeClient())
    monkeypatch.delenv("SIMM_MANAGER", raising=False)
    path = tmp_path / "simm.json"
    path.write_text(json.dumps({"client": {"manager": "10.0.0.9:30001"}}))
    monkeypatch.setenv(by, "10.0.0.9:30001" if by == "SIMM_CLUSTER_MANAGER" else str(path))
    store = MooncakeDistributedStore()
    assert store.setup("h", "", 0, 0, "tcp", "", "10.0.0.5:1") == 0 == store.setup_dummy(1, 1, "10.0.0.7:1")
    assert made == [None, None]
    store.close()
    done = run(tmp_path, sys.executable, "-m", "simm.connectors.mooncake", "--", "true", **{by: os.environ[by]})
    assert done.returncode == 0 and "(manager: 10.0.0.9:30001)" in done.stderr


def test_settings_that_cannot_be_read_stop_no_command(tmp_path: Path) -> None:
    face = (sys.executable, "-m", "simm.connectors.mooncake")
    done = run(tmp_path, *face, "--", "true", SIMM_DEADLINE_MS="soon")
    assert done.returncode == 0 and "(manager: unknown, deadline_ms (from environment SIMM_DEADLINE_MS)" in done.stderr
    assert "(manager: the command's master_server_addr)" in run(tmp_path, *face, "--", "true").stderr


def test_setup_of_what_cannot_work_is_a_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SIMM_MANAGER", raising=False)
    assert MooncakeDistributedStore().setup("h", "", 0, 0, "tcp", "", "no address:::") == -600


@pytest.mark.parametrize("what", ["Client", "_managers", "Registrar"])
@pytest.mark.parametrize("kind", [OSError, ImportError, RuntimeError, TransportError])
def test_issue_setup_raises_nothing_and_leaves_no_client(
    monkeypatch: pytest.MonkeyPatch, what: str, kind: type[Exception]
) -> None:
    """What a process without descriptors, or without threads, meets while it makes a client went to the engine."""
    made: list[FakeClient] = []

    def client(manager: str | None) -> FakeClient:
        made.append(FakeClient(manager))
        return made[-1]

    def broken(*_: Any) -> Any:
        raise kind("a fault of the test")

    monkeypatch.delenv("SIMM_MANAGER", raising=False)
    monkeypatch.setattr(mooncake, "Client", client)
    store = MooncakeDistributedStore()
    with monkeypatch.context() as patch:
        patch.setattr(mooncake, what, broken)
        assert store.setup("h", "", 0, 0, "tcp", "", "10.0.0.5:1") == -1 == store.setup_dummy(1, 1, "10.0.0.5:1")
    assert len(made) == (2 if what == "Registrar" else 0) and all(each._closed for each in made)
    assert store.health_check() == 1 and store.put("k", b"v") == -600
    assert store.setup("h", "", 0, 0, "tcp", "", "10.0.0.5:1", tenant_id="\ud800") == -1, "it is in no key"
    assert all(each._closed for each in made)
    assert store.setup("h", "", 0, 0, "tcp", "", "10.0.0.5:1") == 0 == store.health_check()
    store.close()


class Sizes(list[int]):
    """Sizes of which no part is added up by itself."""

    def __getitem__(self, at: Any) -> Any:
        assert not isinstance(at, slice), "of n buffers that is n * n additions"
        return super().__getitem__(at)


@pytest.mark.parametrize("count", [1, 2, 7, 300])
def test_buffers_of_a_value_lie_one_behind_the_other(count: int, memory: Any) -> None:
    rng = random.Random(count)
    sizes = [rng.randrange(1, 200) for _ in range(count)]
    naive = [sum(sizes[:at]) for at in range(count)]
    at = ctypes.addressof(memory)
    addresses = [at + offset for offset in naive]
    host = mooncake_types.HostMemory({})
    found = mooncake_types.ranges_at(host, addresses, Sizes(sizes))
    expected = mooncake_types.ranges_at(host, addresses, sizes, naive)
    assert (len(found), found.total) == (len(expected), sum(sizes)) and len(found) == sum(sizes)
    assert [part[:2] for part in found.parts] == [part[:2] for part in expected.parts] == [*zip(naive, sizes)]


def test_memory_by_address() -> None:
    allocator = mooncake_types.MooncakeHostMemAllocator()
    address = allocator.alloc(10_000)
    assert address % 4096 == 0 and ctypes.string_at(address, 10_000) == bytes(10_000)
    assert (allocator.free(address), allocator.free(address)) == (0, -1)
    with pytest.raises(RuntimeError, match="no memory of 0 bytes"):
        allocator.alloc(0)


def test_a_thread_can_be_bound_to_a_node_that_there_is(caplog: pytest.LogCaptureFixture) -> None:
    before = os.sched_getaffinity(0)
    try:
        mooncake_types.bind_to_numa_node(0)
        assert os.sched_getaffinity(0) <= before
        mooncake_types.bind_to_numa_node(9999)
        assert "9999" in caplog.text
    finally:
        os.sched_setaffinity(0, before)


# -- the command ------------------------------------------------------------------------------------------------

ASK = """
import json, os, mooncake.store as s
try:
    from mooncake import engine
except ImportError:
    engine = None
print(json.dumps([s.MooncakeDistributedStore.__module__, s.__file__, getattr(engine, "NAME", None),
                  os.environ.get("SIMM_MANAGER"), os.environ.get("SIMM_NAMESPACE")]))
"""


def run(folder: Path, *command: str, **more: str) -> subprocess.CompletedProcess[str]:
    (folder / "mooncake").mkdir(exist_ok=True)
    (folder / "mooncake" / "__init__.py").write_text("")
    (folder / "mooncake" / "engine.py").write_text("NAME = 'installed'")
    (folder / "mooncake" / "store.py").write_text("class MooncakeDistributedStore: pass")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SIMM_")}
    environment |= {"PYTHONPATH": str(folder), **more}
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_a_command_finds_simm_and_the_rest_of_an_installed_mooncake(tmp_path: Path) -> None:
    face = (sys.executable, "-m", "simm.connectors.mooncake", "--manager", "10.0.0.5:30001", "--namespace", "n")
    done = run(tmp_path, *face, "--", sys.executable, "-c", ASK)
    found = json.loads(done.stdout)
    assert found[0] == "simm.connectors.mooncake" and Path(found[1]).is_relative_to(mooncake.PATH)
    assert found[2:] == ["installed", "10.0.0.5:30001", "n"]
    assert "mooncake.store is SiMM" in done.stderr and "10.0.0.5:30001" in done.stderr, "never silently"


def test_without_it_nothing_changes(tmp_path: Path) -> None:
    done = run(tmp_path, sys.executable, "-c", "import simm.connectors.mooncake" + ASK)
    assert json.loads(done.stdout)[0] == "mooncake.store"


def test_the_commands_exit_status_is_its_own(tmp_path: Path) -> None:
    face = (sys.executable, "-m", "simm.connectors.mooncake")
    assert run(tmp_path, *face, "--", sys.executable, "-c", "raise SystemExit(7)").returncode == 7
    missing = run(tmp_path, *face, "--", str(tmp_path / "nothing"))
    assert missing.returncode == 127 and "No such file" in missing.stderr
    assert run(tmp_path, *face).returncode == 2

"""What a client promises about namespaces, batches, views, statistics and digests."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from simm.client import NoValue, sink_of, source_of
from simm.errors import UsageError
from simm.host.buffers import Span
from simm.sdk.batch import View
from simm.sdk.ops.prefix import Prefix
from simm.testing import FakeClient, FakeStore
from simm.wire.messages import Status
from tests.support.client_values import pattern
from tests.support.conformance.world import World, breaks, promise

# --- many clients, many keys --------------------------------------------------------------------


@promise
def clients_see_each_others_values(world: World) -> None:
    one, other = world.client(), world.client()
    assert one.put("k", b"first")
    assert other.get("k") == b"first"
    assert other.put("k", b"second")
    assert one.get("k") == b"second"
    assert one.delete("k")
    assert other.exists("k") is False
    one.put("stays", b"v")
    one.close()
    assert other.get("stays") == b"v"


@breaks(clients_see_each_others_values)
class Alone(FakeClient):
    def __init__(self, *, store: FakeStore | None = None, **arguments: Any) -> None:
        super().__init__(**arguments)


@promise
def namespaces_do_not_see_each_other(world: World) -> None:
    mine, theirs = world.client(), world.client(namespace=world.namespace + "x")
    assert theirs.namespace == world.namespace + "x"
    assert mine.put("k", b"mine")
    assert (theirs.get("k"), theirs.exists("k"), theirs.delete("k")) == (None, False, False)
    assert theirs.put("k", b"theirs")
    assert (mine.get("k"), theirs.get("k")) == (b"mine", b"theirs")
    assert theirs.delete("k")
    assert mine.get("k") == b"mine"


@breaks(namespaces_do_not_see_each_other)
class OneNamespace(FakeClient):
    def digest(self, key: str) -> bytes:
        return key.encode()[:16].ljust(16)

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._digest = self.digest


@promise
def a_batch_answers_each_key(world: World) -> None:
    client = world.client()
    stored = [f"k{number}" for number in range(0, 300, 2)]
    asked = [f"k{number}" for number in range(300)]
    values = [pattern(1 + number * 37 % 5000, number) for number in range(len(stored))]
    assert client.put_many(stored, values) == [True] * len(stored)
    wanted = dict(zip(stored, values))
    assert client.get_many(asked) == [wanted.get(key) for key in asked]
    assert client.exists_many(asked) == [key in wanted for key in asked]
    buffers = [bytearray(5000) for _ in asked]
    got = client.get_into_many(asked, buffers)
    assert got == [len(wanted[key]) if key in wanted else None for key in asked]
    for key, length, buffer in zip(asked, got, buffers):
        assert length is None or buffer[:length] == wanted[key]
    answers = client.delete_many(asked)
    assert answers == [key in wanted for key in asked]
    assert {type(answer) for answer in answers} == {bool}
    assert not any(client.exists_many(asked))


@breaks(a_batch_answers_each_key)
class LeavesMissesOut(FakeClient):
    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        return [value for value in super().get_many(keys) if value is not None]


@promise
def an_empty_batch_answers_nothing(world: World) -> None:
    client = world.client()
    assert client.put_many([], []) == []
    assert client.get_many([]) == []
    assert client.get_into_many([], []) == []
    assert client.exists_many([]) == []
    assert client.delete_many([]) == []


@breaks(an_empty_batch_answers_nothing)
class AllIsTrue(FakeClient):
    def put_many(self, keys: Sequence[str], values: Sequence[Any]) -> list[bool]:
        return super().put_many(keys, values) or [True]


@promise
def a_key_twice_in_a_batch_gets_the_later_value(world: World) -> None:
    client = world.client()
    for count in (5, 40):
        keys = [f"k{number}" for number in range(count)] + ["k0", "k1", "k0"]
        values = [b"%d" % number for number in range(len(keys))]
        assert client.put_many(keys, values) == [True] * len(keys)
        assert client.get_many(["k0", "k1", "k2"]) == [values[-1], values[-2], values[2]]
        buffers = [bytearray(8), bytearray(8)]
        assert client.get_into_many(["k0", "k0"], buffers) == [len(values[-1])] * 2
        assert buffers[0] == buffers[1]
        assert client.delete_many(["k0", "k0"]) == [True, False]


@breaks(a_key_twice_in_a_batch_gets_the_later_value)
class EarlierWins(FakeClient):
    def put_many(self, keys: Sequence[str], values: Sequence[Any]) -> list[bool]:
        return super().put_many(keys[::-1], values[::-1])


@promise
def replicated_namespaces_are_put_once(world: World) -> None:
    client = world.client(replicas=2)
    assert client.put("k", b"first") is True
    assert client.put("k", b"second") is True
    assert client.put_many(["k", "a", "a"], [b"third", b"1", b"2"]) == [True] * 3
    assert client.get_many(["k", "a", "b"]) == [b"first", b"2", None]
    buffer = bytearray(5)
    assert client.get_into("k", buffer) == 5
    assert buffer == b"first"
    assert client.delete_many(["k", "k"]) == [True, False]
    assert client.put("k", b"second") is True
    assert client.get("k") == b"second"
    counters = client.stats()
    assert (counters["puts"], counters["misses"], counters["hits"]) == (6, 1, 4)


@breaks(replicated_namespaces_are_put_once)
class Overwrites(FakeClient):
    def __init__(self, *, replicas: int = 1, **arguments: Any) -> None:
        super().__init__(**arguments)


# --- views ------------------------------------------------------------------------------------


@promise
def a_view_is_read_only_until_it_is_closed(world: World) -> None:
    client = world.client()
    client.put("k", b"value")
    view = client.view("k")
    assert view
    assert type(view) is View
    assert len(view) == view.length == 5
    assert bytes(view.data) == b"value"
    assert (view.data.format, view.data.ndim, view.data.readonly) == ("B", 1, True)
    with pytest.raises(TypeError):
        view.data[0] = 1
    assert "5 bytes" in repr(view)
    view.close()
    view.close()
    assert "closed" in repr(view)
    with pytest.raises(UsageError, match="closed"):
        _ = view.data


@breaks(a_view_is_read_only_until_it_is_closed)
class WritableViews(FakeClient):
    def view(self, key: str) -> View:
        value = self.get(key)
        return View(memoryview(bytearray(value or b"")))


@promise
def a_miss_is_a_false_view(world: World) -> None:
    """So that ``with client.view(key) as view: if view: ...`` needs no case for a miss."""
    client = world.client()
    with client.view("never") as view:
        assert type(view) is View
        assert not view
        assert (len(view), bytes(view), view.data) == (0, b"", b"")
        assert "miss" in repr(view)
    assert not view
    with pytest.raises(UsageError, match="closed"):
        _ = view.data
    client.put("k", b"v")
    with client.view("k") as view:
        assert view
    assert view  # that it was a hit stays true
    with pytest.raises(UsageError, match="closed"):
        bytes(view)


@breaks(a_miss_is_a_false_view)
class TrueMisses(FakeClient):
    def view(self, key: str) -> View:
        return super().view(key) or View(memoryview(b"?"))


@promise
def a_view_is_a_buffer(world: World) -> None:
    client = world.client()
    value = pattern(50_000, 3)
    client.put("k", value)
    with client.view("k") as view:
        assert bytes(view) == value
        assert client.put("copy", view) is True  # the client's own calls take a view on every Python
        assert client.get("copy") == value
        once = view.__buffer__(0)  # what PEP 688 has the interpreter call, from 3.12 on
        assert once == value and once.readonly
        once.release()  # as the interpreter does, with no effect on the view
        assert bytes(view) == value
        if sys.version_info >= (3, 12):
            part, whole = memoryview(view)[10:20], np.frombuffer(view, np.uint8)
            assert part.readonly and not whole.flags.writeable
    for use in (lambda: client.put("copy", view), lambda: view.__buffer__(0)):
        with pytest.raises(UsageError, match="closed"):
            use()
    if sys.version_info >= (3, 12):
        client.put_many([f"other{number}" for number in range(50)], [pattern(50_000, number) for number in range(50)])
        client.delete("k")
        assert part == value[10:20] and whole.tobytes() == value
        with pytest.raises(UsageError, match="closed"):
            memoryview(view)


@breaks(a_view_is_a_buffer)
class ReversedViews(FakeClient):
    def view(self, key: str) -> View:
        return View(memoryview(bytes(super().view(key))[::-1]))


@promise
def a_view_stays_as_it_is(world: World) -> None:
    """A view outlives overwrite, delete and its client; what was made from the view outlives the view."""
    client = world.client()
    value = pattern(100_000, 1)
    client.put("k", value)
    with client.view("k") as view:
        whole = np.frombuffer(view.data, np.uint8)
        client.put("k", pattern(100_000, 2))
        assert view.data == value
        client.delete("k")
        others = range(50)
        client.put_many([f"other{number}" for number in others], [pattern(100_000, number) for number in others])
        client.close()
        assert view.data == value
    assert whole.tobytes() == value


@breaks(a_view_stays_as_it_is)
class LiveViews(FakeClient):
    def view(self, key: str) -> View:
        vars(self)["live"] = live = bytearray(self.get(key) or b"")
        return View(memoryview(live).toreadonly())

    def put(self, key: str, value: Any) -> bool:
        with contextlib.suppress(KeyError):
            vars(self)["live"][:] = value
        return super().put(key, value)


# --- figures, digests ---------------------------------------------------------------------------


@promise
def what_is_done_is_counted(world: World) -> None:
    client = world.client()
    client.put("k", b"v")
    client.put_many(["a", "b"], [b"v", b"v"])
    client.get("k")
    client.get("never")
    client.get_into("k", bytearray(8))
    client.get_into_many(["a", "never"], [bytearray(8), bytearray(8)])
    client.get_many(["a", "b", "never"])
    for key in ("k", "never"):
        client.view(key).close()
    client.exists("k")
    client.exists_many(["a", "never"])
    client.delete_many(["a", "never"])
    with contextlib.suppress(UsageError):
        client.put("k", b"12345678")
        client.get_into("k", bytearray(4))
    stats = client.stats()
    counted = {name: stats[name] for name in ("hits", "misses", "puts", "put_failures", "outages", "crc_errors")}
    assert counted == {"hits": 6, "misses": 4, "puts": 4, "put_failures": 0, "outages": 0, "crc_errors": 0}


@breaks(what_is_done_is_counted)
class CountsNoViews(FakeClient):
    def view(self, key: str) -> View:
        before = dict(self._counters)
        view = super().view(key)
        self._counters.update(before)
        return view


#: What stats() has while the client is open, and each of its workers.
STATS = {
    "hits", "misses", "puts", "put_failures", "outages", "retries", "fallbacks", "crc_errors", "moved", "redirects",
    "single_copies", "present", "large", "rdma_gets", "rdma_puts", "rdma_retries", "rdma_fallbacks", "epoch", "manager",
    "workers", "last_put_failure", "paths",
}  # fmt: skip


@promise
def stats_have_one_form(world: World) -> None:
    client = world.client(path="tcp")
    stats = client.stats()
    assert stats.keys() == STATS
    assert stats["last_put_failure"] == ""
    assert stats["manager"] == "connected"
    assert type(stats["epoch"]) is int
    (worker,) = stats["workers"]
    assert [(name, type(value)) for name, value in worker.items()] == [
        ("node", str), ("worker", int), ("path", str), ("reason", str),
    ]  # fmt: skip
    assert worker["path"] == "tcp"
    assert {type(stats[name]) for name in STATS - {"manager", "workers", "last_put_failure", "paths"}} == {int}
    client.close()
    assert client.stats().keys() == STATS - {"epoch", "manager", "workers"}


@breaks(stats_have_one_form)
class CountersOnly(FakeClient):
    def stats(self) -> dict[str, Any]:
        return dict(self.counters)


@promise
def digests_are_keys(world: World) -> None:
    client = world.client()
    digests = [client.digest(key) for key in ("k", "l")]
    assert [type(digest) for digest in digests] == [bytes, bytes]
    assert digests[0] != digests[1]
    assert client.owned(digests[0]) is True
    assert client.put_digests(digests[:1], [source_of(b"value")]) == [Status.OK]
    assert client.get("k") == b"value"
    sinks = [sink_of(bytearray(5)), sink_of(bytearray(5))]
    assert client.get_digests(digests, sinks) == [5, NoValue.MISS]
    assert bytes(sinks[0]) == b"value"  # type: ignore[arg-type]
    assert client.get_digests(digests[:1], [sink_of(bytearray(4))]) == [NoValue.TOO_SMALL]
    assert client.exists_digests(digests) == [True, False]
    first, second = digests
    assert client.put_digest(first, source_of(b"another")) == Status.OK
    assert client.get_digest(first, sink_of(bytearray(7))) == 7
    assert client.get_digest(first, sink_of(bytearray(6))) == NoValue.TOO_SMALL
    assert client.get_digest(second, sink_of(bytearray(7))) == NoValue.MISS
    assert (client.exists_digest(first), client.exists_digest(second)) == (True, False)
    assert client.delete_digests(digests) == [Status.OK, Status.NOT_FOUND]
    assert client.exists("k") is False


@breaks(digests_are_keys)
class SmallIsAMiss(FakeClient):
    def get_digests(self, digests: Sequence[bytes], sinks: Sequence[memoryview | Span]) -> list[int]:
        return [max(got, NoValue.MISS) for got in super().get_digests(digests, sinks)]


@promise
def a_load_has_an_expected_time(world: World) -> None:
    client = world.client()
    keys = [f"k{number}" for number in range(40)]
    assert client.load_ms([]) == 0.0
    assert client.load_ms(keys) == 0.0
    assert client.put_many(keys, [b"v" * 5000] * 40) == [True] * 40
    one, all_ = client.load_ms(["k0"]), client.load_ms(keys)
    assert type(one) is float and type(all_) is float and 0.0 < one < all_
    assert client.load_ms([*keys, "no"]) > one
    assert asyncio.run(client.load_ms_async(["no"])) == 0.0
    with pytest.raises(UsageError):
        client.load_ms(["k0", ""])


@breaks(a_load_has_an_expected_time)
class CountsMisses(FakeClient):
    def load_ms(self, keys: Sequence[str]) -> float:
        return 0.001 * len(keys)


@promise
def what_is_in_shared_memory_is_said_to_be_here(world: World) -> None:
    client = world.client()
    digests = [client.digest(f"k{number}") for number in range(40)]
    here = {worker["path"] for worker in client.stats()["workers"]} == {"shm"}
    assert client.mapped(digests) == [here] * 40 and client.mapped([]) == []
    client.close()
    with pytest.raises(UsageError):
        client.mapped(digests)


@breaks(what_is_in_shared_memory_is_said_to_be_here)
class MapsNothing(FakeClient):
    def mapped(self, digests: Sequence[bytes]) -> list[bool]:
        return [False for _ in super().mapped(digests)]


@promise
def a_prefix_ends_at_the_first_key_that_is_not_stored(world: World) -> None:
    client = world.client()
    keys = [f"k{number}" for number in range(40)]
    assert client.prefix([]).keys == client.prefix(keys).keys == 0
    assert client.put_many(keys, [b"v" * 5000] * 40) == [True] * 40
    found = client.prefix(keys)
    assert (found.keys, found.exact) == (40, True) and type(found.keys) is int
    assert found.load_ms > client.prefix(keys[:1]).load_ms > 0.0
    assert sum(found.by_host.values()) == 40
    assert client.delete("k30") and client.delete("k17")
    assert client.prefix(keys).keys == 17 and client.prefix(keys, group=2).keys == 16
    assert client.prefix([*keys[:17], "no"], exact=False).keys == 17
    assert asyncio.run(client.prefix_async(keys[18:30])).keys == 12
    for wrong in ({"keys": "k1"}, {"keys": ["k1", 7]}, {"keys": keys, "group": 0}):
        with pytest.raises(UsageError):
            client.prefix(**wrong)


@breaks(a_prefix_ends_at_the_first_key_that_is_not_stored)
class CountsAllThatAreStored(FakeClient):
    def prefix(self, keys: Sequence[str], *, group: int = 1, exact: bool = True) -> Prefix:
        return super().prefix(keys, group=group, exact=exact)._replace(keys=sum(self.exists_many(keys)))

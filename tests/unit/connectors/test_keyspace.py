"""Keys that name what they hold, and a flush that every keyspace of the scope follows."""

from __future__ import annotations

import collections
import contextlib
import enum
import functools
import itertools
import logging
import os
import random
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from simm.connectors import described, keyspace
from simm.connectors.keyspace import Keyspace, connect, identity
from simm.constants import KEY_BYTES_MAX
from simm.schemes.encodings import short_key
from simm.testing import FakeClient, FakeStore
from simm.wire.status import Status
from tests.support.clock import Clock
from tests.support.settings import PAIRS, Held
from tests.support.waiting import WAIT_S


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def client(store: FakeStore) -> Iterator[FakeClient]:
    with FakeClient(store=store) as made:
        yield made


def put(keys: Keyspace, client: FakeClient, key: str) -> bool:
    generation = keys.generation()
    if generation is None:
        return False
    (digest,) = keys.digests(generation, [key])
    return client.put_digest(digest, memoryview(b"x")) == 0


def has(keys: Keyspace, client: FakeClient, key: str) -> bool:
    generation = keys.generation()
    return generation is not None and client.exists_digests(keys.digests(generation, [key])) == [True]


def test_an_identity_names_every_fact_and_its_value() -> None:
    facts = {"model": "a", "page_size": 16, "layout": None}
    assert identity(facts) == identity(dict(reversed(facts.items()))) and len(identity(facts)) == 24
    for changed in ({**facts, "model": "b"}, {**facts, "page_size": 1}, {**facts, "more": ""}, {"model": "a"}):
        assert identity(changed) != identity(facts)


def rotated(factor: float) -> float:
    """Stand for an override of a model's configuration."""
    return factor


class Rope:
    """One without a text of its own."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def apply(self) -> float:
        return self.factor


CODE: dict[str, Callable[[], Any]] = {
    "function": lambda: types.FunctionType(rotated.__code__, {}, "rotated"),
    "lambda": lambda: lambda config: config,
    "partial": lambda: functools.partial(types.FunctionType(rotated.__code__, {}), factor=2),
    "object": lambda: Rope(2),
    "method": lambda: Rope(2).apply,
    "nested": lambda: {"rope": [Rope(2), (types.FunctionType(rotated.__code__, {}),)]},
}


@pytest.mark.parametrize("kind", CODE)
def test_no_address_of_a_process_is_in_an_identity(caplog: pytest.LogCaptureFixture, kind: str) -> None:
    keyspace._warn_of_code.cache_clear()
    one, other = CODE[kind](), CODE[kind]()
    assert str(one) != str(other), "the control"
    assert identity({"overrides": one}) == identity({"overrides": other})
    (told,) = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert "overrides" in told and "weight_version" in told and " at 0x" not in told
    others = [make() for name, make in CODE.items() if name != kind]
    assert identity({"overrides": one}) not in [identity({"overrides": each}) for each in (*others, {}, None)]


def test_code_that_can_be_told_apart_is() -> None:
    values: list[Any] = [
        Rope(2), Rope(3), functools.partial(rotated, 2), functools.partial(rotated, 3), rotated, identity,
        Rope(2).apply,
    ]  # fmt: skip
    assert len({identity({"overrides": each}) for each in values}) == len(values)


def test_sets_count_in_one_order(caplog: pytest.LogCaptureFixture) -> None:
    names = [f"layer {number}" for number in range(50)]
    assert identity({"targets": set(names)}) == identity({"targets": frozenset(reversed(names))})
    assert identity({"targets": set(names)}) != identity({"targets": set(names[1:])})
    assert identity({"path": "x at 0x1"}) != identity({"path": "x at 0x2"}), "a text is no code"
    assert not caplog.records


@pytest.mark.parametrize("kind", PAIRS)
def test_settings_that_differ_deep_inside_have_identities_of_their_own(kind: str) -> None:
    one, other = PAIRS[kind]()
    assert identity({"setting": one}) != identity({"setting": other})
    assert identity({"setting": one}) == identity({"setting": PAIRS[kind]()[0]})


def test_settings_have_one_identity_in_all_processes() -> None:
    found = [
        subprocess.run(
            [sys.executable, "-m", "tests.support.settings"], env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True, text=True, check=True,
        ).stdout.splitlines()
        for seed in ("1", "2")
    ]  # fmt: skip
    assert len(found[0]) == len(PAIRS) and found[0] == found[1]


PLAIN: list[Any] = [
    "x", "é\ud800", 7, -1.5, True, None, [1, "a", None], (1,), (1, (2, [])), {"a": {"b": [1, 2.5, {}]}}, b"x", {"q"},
    set(), np.dtype("int8"), np.float64(2.5), np.float32(2.5),
]  # fmt: skip


@pytest.mark.parametrize("value", PLAIN, ids=ascii)
def test_plain_values_count_with_their_text(value: Any) -> None:
    assert described.described(value) == (str(value), False, "")


class Raises:
    """One that cannot be read."""

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise AttributeError("injected")

    def __repr__(self) -> str:
        raise OSError("injected")


def nested(levels: int) -> list[Any]:
    """Return a list of lists of lists."""
    made: list[Any] = []
    for _ in range(levels):
        made = [made]
    return made


def shared(levels: int) -> list[Any]:
    """Return a list that is small in memory, and has no end when it is walked."""
    made: list[Any] = []
    for _ in range(levels):
        made = [made, made]
    return made


UNKNOWN: dict[str, Callable[[], Any]] = {
    "generator": lambda: (each for each in "ab"), "iterator": lambda: iter([1]), "map": lambda: map(str, []),
    "in an object": lambda: Held({"a": iter([1])}), "deep": lambda: nested(5000), "wide": lambda: shared(40),
    "raises": lambda: Raises(), "memory": lambda: memoryview(b"x"), "repeat": lambda: itertools.repeat(1),
    "entry of a folder": lambda: next(iter(os.scandir("/"))), "in a class": lambda: type("C", (), {"a": iter([1])}),
}  # fmt: skip


@pytest.mark.parametrize("kind", UNKNOWN)
def test_what_cannot_be_told_is_shared_with_nobody(caplog: pytest.LogCaptureFixture, kind: str) -> None:
    keyspace._warn_of_unknown.cache_clear()
    value = UNKNOWN[kind]()
    assert identity({"overrides": value}) != identity({"overrides": value})
    (told,) = [each.getMessage() for each in caplog.records]
    assert "overrides" in told and "shared with no other" in told


def test_a_lock_in_an_object_costs_no_hits() -> None:
    one, other = Held(2), Held(2)
    one.lock, other.lock = threading.Lock(), threading.Lock()  # type: ignore[attr-defined]
    assert identity({"overrides": one}) == identity({"overrides": other})


@pytest.mark.parametrize("kind", [dict, collections.Counter, lambda items: collections.defaultdict(int, items)])
def test_the_order_of_a_plain_mapping_costs_no_hits(kind: Callable[[Any], Any]) -> None:
    one, other = kind({"a": 1, "b": 2}), kind({"b": 2, "a": 1})
    assert one == other and identity({"overrides": {"x": one}}) == identity({"overrides": {"x": other}})


def test_what_a_class_was_asked_for_costs_no_hits() -> None:
    made = [enum.Flag("Made", {"ONE": 1, "TWO": 2}) for _ in range(2)]
    assert made[0](3).name == "ONE|TWO", "which it keeps"
    assert identity({"overrides": made[0]}) == identity({"overrides": made[1]})


def test_keys_of_any_length_fit() -> None:
    long = "é" * KEY_BYTES_MAX
    assert short_key("k" * KEY_BYTES_MAX) == "k" * KEY_BYTES_MAX
    assert len({short_key(long), short_key(long + "x"), short_key("k" * (KEY_BYTES_MAX + 1))}) == 3
    assert all(len(short_key(key).encode()) <= KEY_BYTES_MAX for key in (long, "k" * 5000))


def test_keyspaces_of_one_scope_share_and_others_do_not(client: FakeClient) -> None:
    one, other, apart = Keyspace(client, "a"), Keyspace(client, "a"), Keyspace(client, "b")
    assert put(one, client, "k")
    assert has(other, client, "k") and not has(apart, client, "k")


def test_a_flush_hides_what_was_stored_and_every_keyspace_follows(client: FakeClient) -> None:
    one, other = Keyspace(client, "a"), Keyspace(client, "a")
    assert put(one, client, "k") and has(other, client, "k")
    assert one.flush()
    assert not has(one, client, "k") and not has(other, client, "k")
    assert put(other, client, "k") and has(one, client, "k")
    assert has(Keyspace(client, "a"), client, "k"), "one that starts later follows too"


#: Clients whose puts leave a stored value alone.
PUT_ONCE: list[dict[str, Any]] = [{"replicas": 2}, {"put_if_absent": True}]


@pytest.mark.parametrize("options", PUT_ONCE)
def test_a_flush_works_where_values_are_put_once(options: dict[str, Any]) -> None:
    with FakeClient(**options) as client:
        one, other = Keyspace(client, "a"), Keyspace(client, "a")
        assert put(one, client, "k") and has(other, client, "k")
        assert one.flush() and not has(one, client, "k") and not has(other, client, "k")
        assert put(other, client, "k") and has(one, client, "k")


def test_control_without_a_generation_a_flush_hides_nothing(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Keyspace, "generation", lambda _: "0")
    one = Keyspace(client, "a")
    assert put(one, client, "k") and one.flush() and has(one, client, "k")


def test_a_lost_generation_is_stored_again_by_whoever_knows_it(client: FakeClient) -> None:
    one = Keyspace(client, "a")
    assert put(one, client, "k")
    client.delete_digests([one._key])
    assert has(one, client, "k")
    assert has(Keyspace(client, "a"), client, "k"), "it is stored again"


def test_a_generation_that_nobody_knows_any_more_hides_what_was_stored(client: FakeClient) -> None:
    one = Keyspace(client, "a")
    assert put(one, client, "k")
    client.delete_digests([one._key])
    new = Keyspace(client, "a")
    assert not has(new, client, "k")
    assert not has(one, client, "k"), "the larger one wins"


@pytest.mark.parametrize("options", [{}, {"put_if_absent": True}, {"replicas": 2}, {"checksum": True}], ids=str)
def test_issue_of_generations_that_begin_at_once_the_first_one_stored_stays(
    store: FakeStore, options: dict[str, Any]
) -> None:
    """The other one took its place, and what was stored meanwhile was a miss: two engines start in an empty store."""
    with FakeClient(store=store, **options) as client, FakeClient(store=store, **options) as slower:
        one, other = Keyspace(client, "a"), Keyspace(slower, "a")
        once(slower, "get_digest", lambda: put(one, client, "k"), after=True)
        assert has(other, slower, "k") and has(one, client, "k")


@pytest.mark.parametrize("back", [False, True])
def test_a_generation_that_cannot_be_stored_is_kept_by_the_keyspace(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch, back: bool
) -> None:
    one = Keyspace(client, "a")
    with monkeypatch.context() as patch:
        patch.setattr(client, "put_digests", lambda *_: [Status.NO_SPACE])
        first = one.generation()
        assert first is not None and first == one.generation()
    if back:
        assert one.generation() == Keyspace(client, "a").generation() == first
    else:
        newer = Keyspace(client, "a").generation()
        assert newer is not None and newer > first and one.generation() == newer


def once(
    client: FakeClient, name: str, act: Callable[[], object], *, after: bool, skip: int = 0, more: bool = False
) -> None:
    """Do something before or after a call of a client, the first one but ``skip``; with ``more`` at each from then on.

    What it calls itself does not count.
    """
    call = getattr(client, name)

    def hooked(*given: Any) -> Any:
        nonlocal skip
        if skip:
            skip -= 1
            return call(*given)
        setattr(client, name, call)
        if not after:
            act()
        got = call(*given)
        if after:
            act()
        if more:
            setattr(client, name, hooked)
        return got

    setattr(client, name, hooked)


@pytest.fixture
def twice(store: FakeStore) -> Iterator[Callable[..., list[tuple[FakeClient, Keyspace]]]]:
    """Make two engines of one scope, each with a client of its own, that know the same generation."""
    with contextlib.ExitStack() as stack:

        def make(**options: Any) -> list[tuple[FakeClient, Keyspace]]:
            clients = [stack.enter_context(FakeClient(store=store, **options)) for _ in range(2)]
            both = [(client, Keyspace(client, "a")) for client in clients]
            assert len({keys.generation() for _, keys in both}) == 1
            return both

        yield make


def test_a_flush_is_not_undone_by_what_looks_between_its_delete_and_its_put(twice: Any) -> None:
    """With two copies. The other engine found none, stored the old one, and the flush's put left that alone."""
    (client, one), (_, other) = twice(replicas=2)
    assert put(one, client, "k") and has(other, client, "k")
    once(client, "delete_digests", other.generation, after=True)
    assert one.flush()
    assert not has(other, client, "k") and not has(Keyspace(client, "a"), client, "k")


def test_a_flush_that_is_undone_each_time_does_not_say_that_others_see_it(twice: Any) -> None:
    (client, one), (_, other) = twice(replicas=2)
    assert put(one, client, "k")
    plain = client.delete_digests
    once(client, "delete_digests", other.generation, after=True, more=True)
    assert not one.flush()
    client.delete_digests = plain
    assert not has(one, client, "k"), "it holds for the keyspace itself"
    assert not has(other, client, "k"), "which has stored it"


@pytest.mark.parametrize("options", [{}, {"put_if_absent": True}, {"replicas": 2}, {"checksum": True}], ids=str)
@pytest.mark.parametrize("when", ["first look", "second look", "put"])
def test_a_lost_generation_is_not_stored_over_the_next_one(twice: Any, options: dict[str, Any], when: str) -> None:
    """A flush stores the next one while another engine is about to store the lost one again."""
    (client, one), (restoring, other) = twice(**options)
    assert put(one, client, "k")
    client.delete_digests([one._key])
    if when == "put" and "checksum" in options:  # whose put does not look itself: the keyspace looks before
        once(restoring, "get_digest", one.flush, after=False, skip=2)
    elif when == "put":
        once(restoring, "put_digests", one.flush, after=False)
    else:
        once(restoring, "get_digest", one.flush, after=True, skip=int(when == "second look"))
    assert not has(other, client, "k")
    assert not has(Keyspace(client, "a"), client, "k"), "nor for one that starts later"


def test_a_pause_is_made_once_for_a_generation_that_is_lost(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    clock = stopped(monkeypatch, slept.append)
    one = Keyspace(client, "a")
    assert one.generation() == one.generation() and slept == [], "none before the first one"
    client.delete_digests([one._key])
    with monkeypatch.context() as patch:
        patch.setattr(client, "put_digests", lambda *_: [Status.NO_SPACE])
        for _ in range(5):
            assert one.generation() is not None and len(slept) == 1, "however long it cannot be stored"
    assert one.generation() == Keyspace(client, "a").generation() and len(slept) == 1
    client.delete_digests([one._key])
    assert one.generation() == Keyspace(client, "a").generation() and slept == [keyspace._PAUSE_S] * 2
    assert clock.now == 2 * keyspace._PAUSE_S


@pytest.mark.parametrize("gone", [0.0, 0.25, 1.0], ids=lambda part: f"{part:.0%} of it")
def test_each_thread_of_an_engine_waits_for_the_end_of_the_pause(
    twice: Any, monkeypatch: pytest.MonkeyPatch, gone: float
) -> None:
    """A second one saw that the first had found none, looked again at once, and stored the generation before."""
    (client, one), (_, other) = twice(replicas=2)
    slept: list[float] = []

    def pause(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 1:
            clock.now += gone * seconds
            assert client.exists_digests([one._key]) == [False], "the control"
            thread = threading.Thread(target=other.generation)
            thread.start()
            thread.join(WAIT_S)
            assert not thread.is_alive()
            stored.extend(client.exists_digests([one._key]))

    stored: list[bool] = []
    clock = stopped(monkeypatch, pause)
    client.delete_digests([one._key])
    assert other.generation() is not None
    left = keyspace._PAUSE_S * (1 - gone)
    assert slept == pytest.approx([keyspace._PAUSE_S, *([left] if left else [])])
    assert stored == [True], "by the second one, after its own pause"


def stopped(patch: pytest.MonkeyPatch, slept: Callable[[float], object]) -> Clock:
    """Let time stand still for keyspaces but for pauses, which are told before they pass."""
    clock = Clock(0.0)

    def sleep(seconds: float) -> None:
        slept(seconds)
        clock.sleep(seconds)

    patch.setattr(keyspace, "time", SimpleNamespace(monotonic=clock, time_ns=time.time_ns, sleep=sleep))
    return clock


def test_nothing_is_put_where_an_old_copy_may_be_left(store: FakeStore) -> None:
    with FakeClient(store=store, replicas=2) as client:
        digests = [client.digest(key) for key in "abc"]
        assert keyspace.replace(client, digests, [memoryview(b"old")] * 3) == [Status.OK] * 3
        plain = client.delete_digests

        def partly(given: Any) -> list[int]:
            return [*plain(given[:1]), Status.UNAVAILABLE, *plain(given[2:])]

        client.delete_digests = partly  # type: ignore[method-assign, assignment]
        assert keyspace.replace(client, digests, [memoryview(b"new")] * 3) == [Status.OK, Status.UNAVAILABLE, Status.OK]
        assert client.get_many([*"abc"]) == [b"new", b"old", b"new"]
        store.fail(1, operation="delete")
        client.delete_digests = plain  # type: ignore[method-assign]
        assert keyspace.replace(client, digests, [memoryview(b"3rd")] * 3) == [Status.UNAVAILABLE] * 3
        one = Keyspace(client, "a")
        assert put(one, client, "k")
        store.fail(1, operation="delete")
        assert not one.flush() and not has(one, client, "k")


def test_a_flush_that_cannot_be_stored_holds_for_the_keyspace_itself(client: FakeClient, store: FakeStore) -> None:
    one, other = Keyspace(client, "a"), Keyspace(client, "a")
    assert put(one, client, "k") and has(other, client, "k")
    store.unavailable = True
    assert not one.flush()
    store.unavailable = False
    assert has(other, client, "k"), "it has not heard of the flush"
    assert not has(one, client, "k")
    assert not has(other, client, "k"), "now it has"


def test_a_flush_whose_read_raises_holds_for_the_keyspace_itself(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise OSError("injected")

    one, other = Keyspace(client, "a"), Keyspace(client, "a")
    assert put(one, client, "k") and has(other, client, "k")
    with monkeypatch.context() as patch:
        patch.setattr(client, "get_digest", fails)
        with pytest.raises(OSError, match="injected"):
            one.flush()
    assert not has(one, client, "k") and not has(other, client, "k")


class Slow(FakeClient):
    """A client whose reads take their time, and whose puts do, and fail, until they are mended."""

    def __init__(self, clock: Clock, read_s: float, put_s: float) -> None:
        super().__init__(deadline_s=1.0)
        self.clock, self.read_s, self.put_s = clock, read_s, put_s
        self.mended = False

    def get_digest(self, *given: Any) -> Any:
        self.clock.sleep(self.read_s)
        return super().get_digest(*given)

    def put_digests(self, *given: Any) -> Any:
        self.clock.sleep(self.put_s)
        return super().put_digests(*given) if self.mended else [Status.UNAVAILABLE]


@pytest.mark.parametrize(("read_s", "put_s", "mended"), [(0.0, 1.0, False), (0.3, 0.3, False), (0.0, 0.9, True)])
def test_a_generation_costs_no_second_deadline(
    monkeypatch: pytest.MonkeyPatch, read_s: float, put_s: float, mended: bool
) -> None:
    """Whoever has waited in vain for half of one has a miss. A server that is slow only has answered."""
    clock = Clock()
    monkeypatch.setattr(keyspace, "time", SimpleNamespace(monotonic=clock, time_ns=time.time_ns, sleep=clock.sleep))
    with Slow(clock, read_s, put_s) as client:
        client.mended = mended
        one, began = Keyspace(client, "a"), clock()
        assert (one.generation() is not None) == mended and clock() - began <= 1.0
        client.mended = True
        assert one.generation() == Keyspace(client, "a").generation() is not None


def test_a_keyspace_that_knows_no_generation_misses_while_it_cannot_be_read(
    client: FakeClient, store: FakeStore
) -> None:
    old = Keyspace(client, "a")
    assert put(old, client, "k")
    new = Keyspace(client, "a")
    store.unavailable = True
    assert new.generation() is None and old.generation() is not None
    store.unavailable = False
    assert has(new, client, "k")


def test_a_generation_of_another_length_is_replaced(client: FakeClient) -> None:
    one = Keyspace(client, "a")
    for wrong in (b"x", b"longer than a generation"):
        client.put_digest(one._key, memoryview(wrong))
        generation = one.generation()
        assert generation is not None and Keyspace(client, "a").generation() == generation


@pytest.mark.parametrize("number", [(1 << 64) - 1, (1 << 64) - 2, 1 << 63])
def test_a_generation_with_no_room_for_a_flush_is_replaced(client: FakeClient, number: int) -> None:
    """An engine that had read it could neither flush nor use the store any more."""
    one = Keyspace(client, "a")
    assert client.put_digest(one._key, memoryview(number.to_bytes(8, "little"))) == 0
    first = one.generation()
    assert first is not None and int(first, 16) < number and one.flush() and one.flush()
    last = one.generation()
    assert last is not None and first < last == Keyspace(client, "a").generation()


@pytest.mark.parametrize("seed", range(40))
def test_no_keyspace_reads_what_it_flushed(client: FakeClient, store: FakeStore, seed: int) -> None:
    """Flushes, outages and lost generations at random: a value older than a keyspace's own flush is never found."""
    dice = random.Random(seed)
    spaces = [Keyspace(client, "a") for _ in range(3)]
    written: dict[str, int] = {}
    flushed = [0] * len(spaces)
    for step in range(1, 80):
        at = dice.randrange(len(spaces))
        act = dice.choice(("put", "put", "has", "has", "flush", "lose", "outage", "back", "new"))
        key = dice.choice("kl")
        if act == "put" and put(spaces[at], client, key):
            written[key] = step
        elif act == "has" and has(spaces[at], client, key):
            assert written[key] > flushed[at], (step, written, flushed)
        elif act == "flush":
            spaces[at].flush()
            flushed[at] = step
        elif act == "lose":
            client.delete_digests([spaces[at]._key])
        elif act == "new":
            spaces[at], flushed[at] = Keyspace(client, "a"), 0
        store.unavailable = act == "outage" or (store.unavailable and act != "back")
    store.unavailable = False
    for _ in range(3):
        for each in spaces:
            each.generation()
    assert len({each.generation() for each in spaces}) == 1, "they agree in the end"


@pytest.mark.parametrize("kind", [OSError, ImportError])
def test_issue_what_cannot_be_loaded_is_a_sentence(monkeypatch: pytest.MonkeyPatch, kind: type[Exception]) -> None:
    """Where a process has no descriptor left, an engine's start ended with the loader's error; and a client stayed."""
    made: list[FakeClient] = []

    def broken(*_: Any, **__: Any) -> Any:
        raise kind("no descriptor left")

    def client(*_: Any, lazy: bool) -> FakeClient:
        made.append(FakeClient())
        made[-1].begin = broken  # type: ignore[method-assign]
        return made[-1]

    monkeypatch.setattr(keyspace, "Client", client)
    with pytest.raises(RuntimeError, match="SiMM: no descriptor left"):
        connect()
    assert len(made) == 1 and made[0]._closed
    monkeypatch.setattr(keyspace, "Client", broken)
    with pytest.raises(RuntimeError, match="SiMM: no descriptor left"):
        connect()


def test_a_wrong_setting_is_a_sentence() -> None:
    with pytest.raises(RuntimeError, match=r"SiMM: .*deadline_s"):
        connect("127.0.0.1:1", deadline_s=-1.0)
    with pytest.raises(RuntimeError, match="SiMM: "):
        connect("no address at all:::")

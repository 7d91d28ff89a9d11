"""Get sessions of Mooncake's API that nobody ends: their values do not stay pinned."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from simm.connectors.mooncake import MooncakeDistributedStore
from simm.connectors.mooncake_sessions import IDLE_S, Sessions
from simm.testing import FakeClient
from tests.support.clock import Clock

KEYS = ("a", "b", "c", "d")


class Recorder(FakeClient):
    """A client that keeps what it has pinned."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.pinned: list[Any] = []

    def pin(self, keys: Any) -> Any:
        self.pinned.append(super().pin(keys))
        return self.pinned[-1]

    def held(self) -> list[int]:
        """Return the numbers of the starts whose pins are not released."""
        return [at for at, pins in enumerate(self.pinned) if "released" not in repr(pins)]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def client() -> Recorder:
    return Recorder()


@pytest.fixture
def store(client: Recorder, clock: Clock) -> Iterator[MooncakeDistributedStore]:
    made = MooncakeDistributedStore()
    made._sessions = Sessions(made._complain, clock)
    made.use(client)
    assert made.put_batch(KEYS, [key.encode() * 4 for key in KEYS]) == 0
    yield made
    made.close()


def read(store: MooncakeDistributedStore, *keys: str) -> list[Any]:
    """Return what a read of these sessions finds: the bytes, or a code."""
    memory = (ctypes.c_ubyte * (4 * len(keys)))()
    places = [[ctypes.addressof(memory) + 4 * at] for at in range(len(keys))]
    codes = store.batch_get_into_multi_buffer_ranges(keys, places, [[4]] * len(keys), [[0]] * len(keys))
    return [bytes(memory[4 * at : 4 * at + 4]) if code == 4 else code for at, code in enumerate(codes)]


def test_a_session_that_nobody_ends_is_ended_by_a_later_start(
    store: MooncakeDistributedStore, client: Recorder, clock: Clock
) -> None:
    """As SGLang's direct linker leaves one: it raises on the missing key, and ends none of the others."""
    assert store.batch_get_session_start(["a", "b", "absent"]) == [0, 0, -704]
    clock.now += IDLE_S - 1
    assert store.batch_get_session_start(["c"]) == [0]
    assert client.held() == [0, 1] and read(store, "c") == [b"cccc"], "the control: it may still be used"
    clock.now += 1
    assert store.batch_get_session_start(["d"]) == [0]
    assert client.held() == [1, 2] and len(store._sessions) == 2
    assert read(store, "a", "b", "c", "d") == [-600, -600, b"cccc", b"dddd"]
    assert store.batch_get_session_end(["a", "b"]) == 0, "as for keys without a session"
    assert store.batch_get_session_start(["a"]) == [0] and read(store, "a") == [b"aaaa"], "and it can begin again"


def test_a_start_that_finds_nothing_or_fails_ends_them_too(
    store: MooncakeDistributedStore, client: Recorder, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert store.batch_get_session_start(["a"]) == [0]
    clock.now += IDLE_S
    monkeypatch.setattr(client, "pin", lambda keys: 1 / 0)
    assert store.batch_get_session_start(["b"]) == [-600]
    assert client.held() == [] and len(store._sessions) == 0


def test_a_session_that_is_read_is_used(store: MooncakeDistributedStore, client: Recorder, clock: Clock) -> None:
    """One read of one of its keys is enough for what one start has pinned together."""
    assert store.batch_get_session_start(["a", "b"]) == [0, 0]
    for _ in range(5):
        clock.now += 0.6 * IDLE_S
        assert read(store, "b") == [b"bbbb"]
        assert store.batch_get_session_start(["c"]) == [0]
    assert read(store, "a") == [b"aaaa"]
    assert client.held() == [0, 5], "and what is started again replaces the one before"


def test_a_session_that_is_being_read_is_not_ended(
    store: MooncakeDistributedStore, client: Recorder, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read of a server that does not answer lasts longer than a session may be unused."""
    assert store.batch_get_session_start(["a"]) == store.batch_get_session_start(["b"]) == [0]
    pins = client.pinned[0]
    plain, seen = pins.get_ranges_many, []

    def slow(*given: Any) -> Any:
        clock.now += 10 * IDLE_S
        other = threading.Thread(target=lambda: seen.append(store.batch_get_session_start(["c"])))
        other.start()
        other.join(120)
        return plain(*given)

    monkeypatch.setattr(pins, "get_ranges_many", slow)
    assert read(store, "a") == [b"aaaa"] and seen == [[0]]
    assert client.held() == [0, 2], "the control: the other one was ended"
    monkeypatch.undo()
    assert store.batch_get_session_start(["d"]) == [0] and read(store, "a") == [b"aaaa"], "it was used until now"
    clock.now += IDLE_S
    assert store.batch_get_session_start(["d"]) == [0] and client.held() == [4]


def test_a_session_that_ends_while_others_are_read_fails_alone(
    store: MooncakeDistributedStore, client: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert store.batch_get_session_start(["a", "b"]) == [0, 0]
    assert store.batch_get_session_start(["c"]) == store.batch_get_session_start(["d"]) == [0]
    pins = client.pinned[0]
    plain = pins.get_ranges_many

    def late(*given: Any) -> Any:
        assert store.batch_get_session_end(["a", "b"]) == 0
        return plain(*given)

    monkeypatch.setattr(pins, "get_ranges_many", late)
    assert read(store, "c", "a", "b", "d") == [b"cccc", -600, -600, b"dddd"]


@pytest.mark.parametrize("again", [("a", "b"), ("b", "a"), ("c", "b", "a"), ("b", "b"), ("c", "absent", "b")])
def test_what_a_key_had_pinned_is_released_when_it_starts_again(
    store: MooncakeDistributedStore, client: Recorder, again: tuple[str, ...]
) -> None:
    """Keys without a session before it in the call took its place, and its values stayed pinned."""
    assert store.batch_get_session_start(["b"]) == [0]
    store.batch_get_session_start(again)
    assert client.held() == [1] and read(store, "b") == [b"bbbb"]
    assert store.batch_get_session_end(again) == 0 and client.held() == []


def test_values_that_are_pinned_together_are_released_with_the_last_of_their_keys(
    store: MooncakeDistributedStore, client: Recorder
) -> None:
    assert store.batch_get_session_start(KEYS) == [0] * 4
    assert store.batch_get_session_start(["absent", "b"]) == [-704, 0]
    assert store.batch_get_session_end(["a", "c", "c"]) == 0
    assert client.held() == [0, 1] and read(store, *KEYS) == [-600, b"bbbb", -600, b"dddd"]
    assert store.batch_get_session_end(["d"]) == 0 and client.held() == [1]
    assert store.batch_get_session_end(["b"]) == 0 and client.held() == []


def test_close_ends_all(store: MooncakeDistributedStore, client: Recorder) -> None:
    assert store.batch_get_session_start(["a", "b"]) == [0, 0] and store.batch_get_session_start(["c"]) == [0]
    assert store.close() == 0 and client.held() == [] and len(store._sessions) == 0

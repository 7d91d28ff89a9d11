"""Harness self-test: the verifying load sees each fault that it looks for. A client without a cluster makes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from simm.testing import FakeClient
from tests.support.load import (
    BACK,
    FAILED,
    FAULTS,
    LOST,
    MISS,
    OK,
    OUTAGE,
    PUT,
    WRONG,
    Load,
    LoadThread,
    Records,
    key_of,
)
from tests.support.load.generator import Settings
from tests.support.values import count_in, value_of

#: Every operation that a mix can name.
ALL = ("get", "get_into", "get_into_many", "view", "exists_many", "put", "put_many", "delete")


def load_of(client: Any, **settings: Any) -> Load:
    """A load on values of one length, without pauses."""
    return Load(client, 0, Settings(sizes=[5000], pause_s=0, keys=6, **settings))


def run(load: Load, calls: int = 200) -> dict[str, int]:
    """Fill, make so many calls, and return what was counted."""
    load.fill()
    load.run(lambda: load.calls >= calls)
    return load.figures()


def test_a_value_states_what_it_is_at_every_byte() -> None:
    """Every single byte counts, and versions, keys and lengths are told apart."""
    old, new = value_of("k", 1, 1, 5000), value_of("k", 1, 2, 5000)
    assert (count_in("k", old), count_in("k", new)) == (1, 2)
    assert count_in("other", old) == -1
    assert count_in("k", old[:-1]) == count_in("k", old[:10]) == count_in("k", b"") == -1
    for at in (8, 40, 64, 2500, 4999):
        assert count_in("k", old[:at] + bytes([old[at] ^ 1]) + old[at + 1 :]) == -1
        if at > 16:
            assert count_in("k", old[:at] + new[at:]) == count_in("k", new[:at] + old[at:]) == -1


def test_wrong_bytes_and_older_values_are_seen() -> None:
    load = load_of(FakeClient())
    key = key_of(0, 1)
    (_, old), (newer, new) = load.next_value(1), load.next_value(1)
    assert load.judge(key, new) == OK and load.floor[key] == newer
    assert load.judge(key, new) == OK and load.judge(key, old) == BACK
    assert load.judge(key, new[:-1]) == load.judge(key, new[:-1] + b"x") == load.judge(key_of(0, 2), new) == WRONG
    assert load.faults == {"back": 1, "wrong": 3}
    rows = np.zeros(3, [("began", "f8"), ("took", "f8"), ("kind", "u1"), ("outcome", "u1")])
    Records(rows, []).assert_right()
    for outcome in (BACK, LOST):
        rows["outcome"][1] = outcome
        with pytest.raises(AssertionError):
            Records(rows, []).assert_right()


def test_a_client_that_is_right_has_no_faults() -> None:
    mix = dict.fromkeys(ALL, 1.0)
    load = load_of(FakeClient(), mix=mix, batch=4, registered=True, watched=True, complete=True)
    figures = run(load, 400)
    assert not any(figures[name] for name in FAULTS), load.said
    assert figures["ops"] == 400 and min(figures["stored"], figures["hits"], figures["deleted"]) > 20


class Sabotaged(FakeClient):
    """A client whose gets are passed through ``change``: key and value, and the buffer if there is one."""

    def __init__(self, change: Callable[[str, Any], Any], **arguments: Any) -> None:
        super().__init__(**arguments)
        self.change = change

    def get(self, key: str) -> Any:
        return self.change(key, super().get(key))

    def get_into(self, key: str, buffer: Any) -> Any:
        return self.change(key, super().get_into(key, buffer))


def faults_of(change: Callable[[str, Any], Any], **settings: Any) -> dict[str, int]:
    with Sabotaged(change) as client:
        load = load_of(client, **settings)
        figures = run(load)
        assert load.said
        return {name: figures[name] for name in FAULTS if figures[name]}


def test_each_fault_is_seen() -> None:
    first: dict[str, Any] = {}
    mix = {"get": 1.0, "put": 1.0}
    assert set(faults_of(lambda _, value: value[:-1] + b"?", mix=mix)) == {"wrong"}
    assert set(faults_of(lambda key, value: first.setdefault(key, value), mix=mix)) == {"back"}
    assert set(faults_of(lambda *_: 1 // 0, mix=mix)) == {"raised"}


class Full(FakeClient):
    """A client each of whose puts is refused."""

    def put(self, key: str, *_: Any, **__: Any) -> bool:
        return False

    def put_many(self, keys: Any, *_: Any, **__: Any) -> list[bool]:
        return [False] * len(list(keys))

    def stats(self) -> dict[str, Any]:
        return {**super().stats(), "last_put_failure": "no room at a/0"}


def test_why_puts_fail_is_noted() -> None:
    with Full() as client:
        load = load_of(client, mix={"put": 0.5, "put_many": 0.5})
        load.run(lambda: load.calls >= 100)
        assert load.refusals == {"no room at a/0": load.tally[PUT, FAILED]} and load.tally[PUT, FAILED] >= 100


def test_a_deleted_value_that_comes_back_is_seen() -> None:
    kept: dict[str, Any] = {}

    def undelete(key: str, value: Any) -> Any:
        if value is None:
            return kept.get(key)
        kept[key] = value
        return value

    assert set(faults_of(undelete, mix={"get": 0.6, "put": 0.2, "delete": 0.2})) == {"back"}


def test_a_lost_value_is_seen_where_everything_fits() -> None:
    with FakeClient() as client:
        load = load_of(client, mix={"get": 1.0}, complete=True)
        load.fill()
        load.step()
        assert not load.faults
        for number in range(6):
            client.delete(key_of(0, number))
        load.step()
        assert load.faults == {"lost": 1}
        assert load.miss(key_of(0, 1), outage=True) == OUTAGE and load.miss(key_of(1, 1), outage=False) == MISS


def test_a_write_after_the_call_is_seen() -> None:
    with FakeClient() as client:
        load = load_of(client, mix={"get_into": 1.0}, watched=True, batch=2)
        load.fill()
        load.step()
        load.step()
        assert not load.faults
        load.buffers[0].data[4000] = 1
        load.step()
        assert load.faults == {"written": 1}


def test_a_view_whose_bytes_change_is_seen() -> None:
    with FakeClient() as client:
        load = load_of(client, mix={"view": 1.0})
        load.fill()
        load.step()
        assert not load.faults
        key, view, count = load._views[0]
        load._views[0] = (key, view, count + 1)
        load.drop_views(0)
        assert load.faults == {"wrong": 1}


def test_a_thread_tells_its_faults() -> None:
    mix = {"get_into": 0.6, "put": 0.4}
    with FakeClient() as client, LoadThread(load_of(client, constant=True, mix=mix)) as thread:
        thread.wait_calls(50)
    thread.check()
    with Sabotaged(lambda *_: 3) as client, LoadThread(load_of(client, mix={"get_into": 1.0})) as thread:
        with pytest.raises(AssertionError, match="wrong"):
            thread.wait_calls(50)
    with pytest.raises(AssertionError, match="wrong"):
        thread.check()

"""The thread that makes near copies: how much memory it takes, and which copies it takes for one."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from simm.arena.layout import ENTRY_BOUND
from simm.arena.reader import ArenaReader
from simm.arena.store import Store
from simm.sdk.batch import NoValue
from simm.sdk.near import copies
from simm.sdk.near.copies import KEYS_AT_ONCE, PIECE_BYTES, SCRATCH_BYTES, Near, _has
from tests.support.store_world import digest_of, new_segment, remove_segment
from tests.support.waiting import wait_until

VALUE_BYTES = 4 << 20


class Owner:
    """Stands for the reads at owners on other hosts: all values are longer than a piece."""

    def read_many(self, digests: Sequence[bytes], sinks: Sequence[Any]) -> list[Any]:
        return [NoValue.TOO_SMALL if sink is not None else bytes(VALUE_BYTES) for sink in sinks]

    def stored_many(self, digests: Sequence[bytes]) -> list[bool]:
        return [True] * len(digests)


class Router:
    def target(self, _digest: bytes) -> None:
        return None


def test_values_longer_than_expected_are_in_memory_one_at_a_time() -> None:
    near: Any = Near.__new__(Near)
    near._piece, near._plain, near._routes = PIECE_BYTES, Owner(), Router()
    near._await_shards = lambda: range(100)
    stored: list[int] = []

    def store(_digest: bytes, value: memoryview) -> bool:
        stored.append(len(value))
        return True

    near._store = store
    scratch = memoryview(bytearray(SCRATCH_BYTES))
    digests = [number.to_bytes(16, "little") for number in range(KEYS_AT_ONCE)]
    tracemalloc.start()
    try:
        assert near._copy(digests, scratch) == KEYS_AT_ONCE
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert stored == [VALUE_BYTES] * KEYS_AT_ONCE
    assert most < 3 * VALUE_BYTES, "one value, and the next one"
    assert near._piece == VALUE_BYTES, "the next ones are expected to be as long"


def test_what_a_bound_client_has_planted_is_no_copy() -> None:
    """No read believes it, so the value would never be copied."""
    segment = new_segment(16 << 20, 1024)
    store = Store.create(segment.mm, slots=1024)
    store.open()
    reader = ArenaReader(segment.name)
    reader.namespace = 3
    target: Any = SimpleNamespace(reader=reader)
    for key, flags, namespace in (("own", 0, 3), ("bound", ENTRY_BOUND, 3), ("planted", ENTRY_BOUND, 4)):
        offset = store.geometry.data_offset
        assert store.table.publish(digest_of(key), offset, 100, 0, 4096, namespace, flags, 1) is not None
    assert [_has(target, digest_of(key)) for key in ("own", "bound", "planted", "never")] == [True, True, False, False]
    assert not _has(None, digest_of("own"))
    target.reader = reader = None
    store.release()
    remove_segment(segment)


def test_without_memory_no_copy_is_made_and_a_later_key_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    near: Any = Near.__new__(Near)
    near.counters, near._piece, near._deadline_s = dict.fromkeys(("near_copies", "near_dropped"), 0), PIECE_BYTES, 1.0
    near._begin()
    made: list[bytes] = []
    near._copy = lambda digests, _scratch: made.extend(digests) or len(digests)
    monkeypatch.setattr(copies, "SCRATCH_BYTES", sys.maxsize)  # more than there is
    keys = [number.to_bytes(16, "little") for number in range(3)]
    for turn in (1, 2):
        with near._lock:
            for key in keys:
                assert near._promotion.add(key)
            near._wake()
        wait_until(lambda: near._thread is None, "the thread has ended")
        assert near.counters == {"near_copies": 0, "near_dropped": 3 * turn} and not len(near._promotion)
    monkeypatch.undo()
    with near._lock:
        assert near._promotion.add(keys[0])
        near._wake()
    wait_until(lambda: made == keys[:1], "it is copied")
    near.close()
    assert near.counters["near_copies"] == 1

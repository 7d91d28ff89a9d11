"""The thread that makes near copies: how much memory it takes."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from typing import Any

from simm.sdk.batch import NoValue
from simm.sdk.near.copies import KEYS_AT_ONCE, PIECE_BYTES, SCRATCH_BYTES, Near

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

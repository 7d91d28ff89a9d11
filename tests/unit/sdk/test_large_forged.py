"""Forged manifests, which cost 64 bytes to store: what they cost whoever deletes or replaces them."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from simm.client import Client
from simm.constants import LARGE_BYTES_MAX
from simm.sdk.large import values
from simm.sdk.large.manifest import PART_BYTES, PARTS_MAX, Manifest
from simm.testing import FakeClient
from simm.wire.status import Status

KEYS = [f"k{number}" for number in range(20)]
DEADLINE_S = 3.0


class Drops:
    """Parts that a client has asked to delete. Each call takes a second of its clock."""

    def __init__(self, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        large = client._large
        self.now, self.parts, self.calls = 1000.0, 0, 0
        self.manifests = {client.digest(key) for key in KEYS}
        real = large._delete

        def delete(digests: Any, *more: Any) -> list[int]:
            parts = sum(digest not in self.manifests for digest in digests)
            self.parts += parts
            self.now += bool(parts)
            self.calls += bool(parts)
            return real(digests, *more)

        monkeypatch.setattr(large, "_delete", delete)
        monkeypatch.setattr(values, "time", SimpleNamespace(monotonic=lambda: self.now))


@pytest.fixture
def client() -> Client:
    made = FakeClient(deadline_s=DEADLINE_S)
    for key in KEYS:
        digest = made.digest(key)
        forged = Manifest.new(LARGE_BYTES_MAX).encode(digest)
        assert made._large._put_manifests([digest], [memoryview(forged)]) == [Status.OK]
    assert made.get(KEYS[0]) is None and made.counters["large"]
    return made


@pytest.mark.parametrize("deadline_s", [DEADLINE_S, math.inf], ids=["bound", "control"])
def test_parts_are_dropped_for_one_deadline(
    client: Client, deadline_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an end a call for 4,096 keys would drop 16 million parts, which takes minutes."""
    monkeypatch.setattr(client._large, "_deadline_s", deadline_s)
    drops = Drops(client, monkeypatch)
    assert client.delete_many(KEYS) == [True] * len(KEYS), "the keys themselves have gone"
    assert not any(client.exists_many(KEYS))
    assert drops.parts == (PARTS_MAX * len(KEYS) if deadline_s == math.inf else 1024 * DEADLINE_S)


def test_parts_of_a_value_that_is_replaced_too(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    drops = Drops(client, monkeypatch)
    manifest = client._large.manifest(client.digest(KEYS[0]))
    assert manifest is not None and manifest.parts == PARTS_MAX
    client._large.drop(client.digest(KEYS[0]), manifest)
    assert drops.calls == DEADLINE_S


@pytest.mark.parametrize("most", [values.PARTS_ASKED, 1 << 40], ids=["bound", "control"])
def test_a_question_is_about_a_bounded_number_of_parts(
    client: Client, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4,096 keys with forged manifests would be 16 million digests."""
    monkeypatch.setattr(values, "PARTS_ASKED", most)
    asked = client._large.with_parts([client.digest(key) for key in KEYS])
    assert len(asked) == len(KEYS) + min(most, PARTS_MAX * len(KEYS))
    assert client.load_ms(KEYS) >= 0.0


def test_questions_have_room_for_a_tebibyte() -> None:
    assert values.PARTS_ASKED * PART_BYTES >= 1 << 40

"""A storm of all operations at once while workers are killed, and its controls."""

from __future__ import annotations

from typing import Any

import pytest

from tests.system.stress.operations import Engine, storm

#: Of the bytes of groups, those of which the other member may be missing at the end.
ORPHANED_MAX = 0.01
#: What each storm does at least once, however slow the machine is.
NEEDS = (
    "hits", "advanced", "pin", "ranges", "gather", "groups stored", "look_at_kept", "prepared", "large stored",
    "large hits", "in parts", "near hits", "prefetch", "ask",
)  # fmt: skip


def assert_right(counts: dict[str, Any]) -> None:
    assert not counts.get("wrong", 0) and not counts.get("lost", 0), counts
    assert counts.get("orphaned", 0) <= ORPHANED_MAX * counts["grouped"], counts


def test_storm_of_operations() -> None:
    assert_right(storm(6.0, 2, seed=5, needs=NEEDS))


@pytest.mark.slow
def test_storm_of_operations_long() -> None:
    counts = storm(600.0, 120, seed=6, needs=NEEDS)
    print(counts)
    assert_right(counts)


class Forgetful(Engine):
    """Believes after an advance what was put before it, and takes a part of a value for another one."""

    def advance(self) -> None:
        self._least = self._next  # as if it had advanced

    def _check(self, key: str, data: bytes | None) -> bool:
        return super()._check(key, data and data[:-16] + bytes(16))


def test_control_an_epoch_that_does_not_advance_and_torn_bytes_are_seen() -> None:
    counts = storm(2.0, 0, seed=5, engines=1, kind=Forgetful, needs=("wrong",))
    assert counts["wrong"] > 0


class Ungrouped(Engine):
    """Puts members one by one."""

    def put_group(self) -> None:
        name = self._draw.randrange(30)
        keys = [f"{{{name}}}k", f"{{{name}}}v"]
        self._writer.put_many(keys, [self._new(key, self._size()) for key in keys])
        self._writer.get(keys[0])


def test_control_members_without_a_group_are_orphaned() -> None:
    for seconds in (6.0, 30.0, 120.0):  # until something is evicted, which takes longer on a busy machine
        counts = storm(seconds, 0, seed=5, memory="12M", kind=Ungrouped)
        if counts.get("orphaned", 0) > ORPHANED_MAX * counts["grouped"]:
            return
    raise AssertionError(counts)


class Dropping(Engine):
    """Deletes what it keeps."""

    back_s = 0.1

    def keep(self) -> None:
        super().keep()
        for key in self._kept:
            self._writer.delete(key)


def test_control_kept_values_that_are_gone_are_seen() -> None:
    counts = storm(4.0, 0, seed=5, engines=1, kind=Dropping, needs=("lost",))
    assert counts["lost"] > 0, counts

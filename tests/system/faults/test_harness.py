"""Harness self-test: the watch of the fault tests sees what it must."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from simm.arena.layout import HEADER_BYTES, MAGIC
from simm.constants import SHARD_COUNT
from simm.wire.shard_set import FROZEN, MOVING
from tests.support.watch import Owners, Watch, read_words


def words(**epochs: int) -> np.ndarray[Any, Any]:
    """Shard words, by number: ``words(s3=7)``."""
    made = np.zeros(SHARD_COUNT, np.uint64)
    for name, epoch in epochs.items():
        made[int(name[1:])] = epoch
    return made


@pytest.mark.quick
def test_two_owners_in_one_epoch_are_seen_at_whatever_times() -> None:
    owners = Owners()
    owners.look("a", words(s3=7, s4=7))
    owners.look("b", words(s3=FROZEN | 7, s5=8))
    owners.look("a", words(s4=7))
    owners.look("b", words(s3=9, s4=10))
    assert not owners.conflicts, "a frozen one, and owners of later epochs, are right"
    owners.look("b", words(s4=MOVING | 7))
    assert len(owners.conflicts) == 1 and "shard 4" in owners.conflicts[0]


@pytest.mark.quick
def test_values_are_not_taken_for_shard_words(tmp_path: Path) -> None:
    """Two servers that store the same bytes at the same place would be two owners."""
    file = tmp_path / "simm-0-a-0-1"
    head = MAGIC.to_bytes(8, "little").ljust(HEADER_BYTES, b"\0")
    file.write_bytes(head + words(s3=7).tobytes())
    read = read_words(file)
    assert read is not None and read[3] == 7
    file.write_bytes(b"value".ljust(HEADER_BYTES, b"\0") + words(s3=7).tobytes())
    assert read_words(file) is None


@pytest.mark.quick
def test_an_epoch_that_goes_back_is_seen() -> None:
    watch = Watch(SimpleNamespace(servers=[]))  # type: ignore[arg-type]
    for cluster, epoch in ((1, 5), (1, 6), (2, 1), (2, 2)):
        watch._note(SimpleNamespace(cluster=cluster, epoch=epoch))
    assert not watch.back, "another cluster begins anew"
    watch._note(SimpleNamespace(cluster=2, epoch=1))
    assert watch.back
    with pytest.raises(AssertionError):
        watch.assert_right()

"""A segment for a test, and the proof that none is left."""

from __future__ import annotations

import contextlib
import gc
import glob
import os
from collections.abc import Iterator

import pytest

from simm import shm
from simm.errors import UsageError
from tests.support.segments import PREFIX, SIZE, fresh_name


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Every test ends with the descriptors and segments it began with."""
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    after = len(os.listdir("/proc/self/fd"))
    left = glob.glob(f"/dev/shm/{PREFIX}*")
    for path in left:
        os.unlink(path)
    assert not left
    # The resource tracker of CPython 3.10 to 3.12 keeps one pipe from its first use on.
    assert after <= before + 1


@pytest.fixture
def segment() -> Iterator[shm.OwnedSegment]:
    made = shm.OwnedSegment.create(fresh_name(), SIZE)
    yield made
    with contextlib.suppress(UsageError):
        made.unlink()
    made.close()

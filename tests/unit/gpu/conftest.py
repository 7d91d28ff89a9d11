"""Fixtures: a CUDA driver in software, and small pieces."""

from __future__ import annotations

import pytest

from simm.gpu import copy
from tests.support.gpu import KIB
from tests.support.gpu_fixtures import both, devices, fake, shared_library

__all__ = ["both", "devices", "fake", "shared_library", "small_pieces"]


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> int:
    """Register memory in pieces of 64 KiB and stage copies in pieces of 16 KiB."""
    monkeypatch.setattr(copy, "STAGE_BYTES", 16 * KIB)
    return 64 * KIB

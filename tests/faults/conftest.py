"""Fleets for a test, ended and cleaned up whatever happens."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .fleet import Fleet


@pytest.fixture
def make_fleet(nothing_is_left: Path) -> Iterator[Callable[..., Fleet]]:
    """``make_fleet(3, memory="64M")``: a manager and so many data servers."""
    with contextlib.ExitStack() as stack:
        # Short: a UNIX socket's path has at most 107 bytes.
        yield lambda *arguments, **more: stack.enter_context(
            Fleet(Path(tempfile.mkdtemp(prefix="f", dir=nothing_is_left)), *arguments, **more)
        )


@pytest.fixture(scope="session")
def fleet(nothing_is_left: Path) -> Iterator[Fleet]:
    """Three data servers for all tests that leave them as they found them. A dead one is declared so after 1.5 s."""
    with Fleet(Path(tempfile.mkdtemp(prefix="f", dir=nothing_is_left)), 3, heartbeat_ms=300) as running:
        yield running


@pytest.fixture(scope="session")
def real_fleet(nothing_is_left: Path) -> Iterator[Fleet]:
    """The same with default heartbeats, for the long doses: what they measure is what operators see."""
    with Fleet(Path(tempfile.mkdtemp(prefix="f", dir=nothing_is_left)), 3) as running:
        yield running

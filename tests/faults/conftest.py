"""Fleets for a test, ended and cleaned up whatever happens."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from . import measures
from .fleet import Fleet


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What was measured."""
    measures.report(terminalreporter)


@pytest.fixture
def make_fleet(nothing_is_left: Path) -> Iterator[Callable[..., Fleet]]:
    """``make_fleet(3, memory="64M")``: a manager and so many data servers."""
    with contextlib.ExitStack() as stack:
        # Short: a UNIX socket's path has at most 107 bytes.
        yield lambda *arguments, **more: stack.enter_context(
            Fleet(Path(tempfile.mkdtemp(prefix="f", dir=nothing_is_left)), *arguments, **more)
        )


@pytest.fixture(scope="module")
def fleet(nothing_is_left: Path) -> Iterator[Fleet]:
    """Three data servers for a module's tests, which leave it as they found it."""
    with Fleet(Path(tempfile.mkdtemp(prefix="f", dir=nothing_is_left)), 3) as running:
        yield running

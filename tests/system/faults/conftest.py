"""Fleets for a test, ended and cleaned up whatever happens, and what every test leaves as it was."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fleet import Fleet
from tests.support.standing import Standing


@pytest.fixture(autouse=True)
def as_it_was(nothing_is_left: Path) -> Iterator[None]:
    """The standing checks after each test: segments, processes, ports, descriptors, bytes, logs."""
    standing = Standing()
    yield
    standing.check()


@pytest.fixture
def make_fleet(as_it_was: None, nothing_is_left: Path) -> Iterator[Callable[..., Fleet]]:
    """``make_fleet(3, memory="64M")``: a manager and so many data servers."""
    with contextlib.ExitStack() as stack:

        def make(*arguments: Any, **more: Any) -> Fleet:
            # Short: a UNIX socket's path has at most 107 bytes.
            made = Fleet(Path(tempfile.mkdtemp(prefix="f", dir=nothing_is_left)), *arguments, **more)
            stack.enter_context(made)
            stack.callback(made.assert_no_traceback)
            return made

        yield make


@pytest.fixture(scope="session")
def lone(nothing_is_left: Path) -> Iterator[Fleet]:
    """One data server for all tests that leave it empty, as they found it. They kill no more than its worker."""
    with Fleet(Path(tempfile.mkdtemp(prefix="f", dir=nothing_is_left)), 1) as running:
        yield running


@pytest.fixture(scope="session")
def fleet(nothing_is_left: Path) -> Iterator[Fleet]:
    """Three data servers for all tests that leave them as they found them. A dead one is declared so after 3 s.

    A living one on a busy machine may be silent for a second.
    """
    folder = Path(tempfile.mkdtemp(prefix="f", dir=nothing_is_left))
    with Fleet(folder, 3, heartbeat_ms=300, manager_arguments=("--dead-after", "10")) as running:
        yield running


@pytest.fixture(scope="session")
def real_fleet(nothing_is_left: Path) -> Iterator[Fleet]:
    """The same with default heartbeats, for the long doses: what they measure is what operators see."""
    with Fleet(Path(tempfile.mkdtemp(prefix="f", dir=nothing_is_left)), 3) as running:
        yield running

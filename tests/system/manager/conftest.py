"""Managers for a test, ended with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support.manager_process import Process, managers


@pytest.fixture
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Process]]:
    """Start managers; they end with the test."""
    with managers(tmp_path_factory) as start:
        yield start

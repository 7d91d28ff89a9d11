"""Managers for a test, ended with it. They take no silence for an end, whatever the machine does meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support.manager_process import Process, managers

_PATIENT = ("--suspect-after", "1000", "--dead-after", "2000")


@pytest.fixture
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Process]]:
    """Start managers; they end with the test. The servers that tests make up send no heartbeats of their own."""
    with managers(tmp_path_factory) as start:
        yield lambda folder=None, *arguments: start(folder, *_PATIENT, *arguments)

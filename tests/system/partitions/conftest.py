"""Skips, with the reason, where hosts cannot be played."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.partitions.hosts import Hosts, why_no_wire, why_not


@pytest.fixture(scope="module")
def hosts(nothing_is_left: Path) -> Iterator[Hosts]:
    """Five of them, for a module's tests, which heal what they break."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="h", dir=nothing_is_left))
    try:
        with Hosts(5, folder) as made:
            yield made
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def wire(hosts: Hosts) -> Hosts:
    """The same, where lines between pairs of hosts can be bad."""
    reason = why_no_wire()
    if reason:
        pytest.skip(reason)
    return hosts

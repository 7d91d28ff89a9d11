"""Fixtures: no session of another test is left."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from simm.ipc import session


@pytest.fixture
def nothing_retired() -> Iterator[None]:
    """Forget the sessions that other tests, and the test itself, have closed while copies ran."""
    session.RETIRED.clear()
    yield
    session.RETIRED.clear()

"""A store by each path, and no retired session of another test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from simm.ipc import session as session_module
from simm.kv import Store
from tests.support.dose import dose
from tests.support.kv_sizes import PATHS, forget_clients, store_by


@pytest.fixture(autouse=True)
def fresh(fresh: None) -> Iterator[None]:
    """Forget retired sessions, too, before and after each test."""
    session_module.RETIRED.clear()
    yield
    forget_clients()
    session_module.RETIRED.clear()


@pytest.fixture(params=dose(PATHS, quick=2))
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def store(request: pytest.FixtureRequest, namespace: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    with store_by("shm", request, monkeypatch) as made:
        yield made

"""No flags, clients or environment of another test, and a store in a namespace of its own."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from typing import Any

import pytest

from simm import kv
from simm.config import settings
from simm.kv import Store
from simm.sdk.ops import kv_memory
from tests.support.kv_sizes import forget_clients
from tests.support.kv_values import point_at


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No clients, environment or log handler of another test."""
    for name in [name for name in os.environ if name.startswith("SIMM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(kv_memory, "_complained_at", {})
    monkeypatch.setattr(kv_memory, "_COMPLAIN_S", 3600.0)  # once, however long a test takes
    yield
    forget_clients()
    kv._log_to(settings.Settings())


@pytest.fixture
def namespace(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The test's own: the cluster is shared. No call to it fails because the machine is busy."""
    name = f"k{zlib.crc32(request.node.nodeid.encode()):08x}"
    monkeypatch.setenv("SIMM_NAMESPACE", name)
    monkeypatch.setenv("SIMM_DEADLINE_MS", "30000")
    return name


@pytest.fixture
def store(cluster: Any, namespace: str) -> Store:
    point_at(cluster.manager)
    return Store()

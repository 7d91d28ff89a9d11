"""Registrations that threads make while another one closes the last client with RDMA."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from simm.rdma import registration
from simm.rdma.registration import Registration, Shared
from tests.support.iterated import AddedTo, AskedFor


def test_the_last_client_closes_while_another_thread_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its list of registrations changed under the iteration, and RuntimeError went to the engine."""
    held = [Registration(0, 1) for _ in range(3)]
    lock = AskedFor()
    made = AddedTo(held, lock, lambda: held.append(Registration(0, 1)))
    shared, closed = Shared("threads of a test"), []
    fabric: Any = SimpleNamespace(rails=[], close=lambda: closed.append(True))
    shared.users, shared.fabric = 1, fabric
    monkeypatch.setitem(registration._SHARED, shared.devices, shared)
    monkeypatch.setattr(registration, "_REGISTRATIONS", made)
    monkeypatch.setattr(registration, "_lock", lock)
    registration.release(shared)
    assert made.joined() and len(made) == len(held) == 4 and closed == [True]

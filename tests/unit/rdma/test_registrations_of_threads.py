"""Registrations that threads make while another one closes the last client with RDMA."""

from __future__ import annotations

import gc
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from simm.rdma import registration
from simm.rdma.registration import Registration, Shared
from tests.support.iterated import AddedTo, Interrupting, ends


@pytest.fixture
def last(monkeypatch: pytest.MonkeyPatch) -> Shared:
    """The share of a process's last client in a fabric."""
    shared = Shared("threads of a test")
    fabric: Any = SimpleNamespace(rails=[], close=lambda: None)
    shared.users, shared.fabric = 1, fabric
    monkeypatch.setitem(registration._SHARED, shared.devices, shared)
    monkeypatch.setattr(registration, "_lock", threading.Lock())
    return shared


def test_the_last_client_closes_while_another_thread_registers(last: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its list of registrations changed under the iteration, and RuntimeError went to the engine."""
    held = [Registration(0, 1) for _ in range(3)]
    made = AddedTo(map(weakref.ref, held), lambda: held.append(Registration(0, 1)))
    monkeypatch.setattr(registration, "_REGISTRATIONS", made)
    registration.release(last)
    assert len(made) == len(held) == 4 and last.closed


def test_a_signal_s_handler_closes_the_last_client_while_its_thread_registers(
    last: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited for ever for a lock that its own thread held."""
    made = Interrupting((), lambda: registration.release(last))
    monkeypatch.setattr(registration, "_REGISTRATIONS", made)
    held: list[Registration] = []
    assert ends(lambda: held.append(Registration(0, 1)))
    assert len(made) == len(held) == 1 and last.closed


def test_a_registration_that_is_gone_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    made: set[Any] = set()
    monkeypatch.setattr(registration, "_REGISTRATIONS", made)
    held = Registration(0, 1)
    Registration(0, 1)
    gc.collect()
    assert [each() for each in made] == [held]

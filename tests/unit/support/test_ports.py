"""The ports that the tests give to servers."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.support import ports

FIRST_EPHEMERAL = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])


def test_no_connection_is_given_a_reserved_port() -> None:
    assert all(ports.reserve_port() < FIRST_EPHEMERAL for _ in range(10))


def test_no_two_reservations_within_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: set[int] = set()
    for worker in range(ports.BLOCKS):
        monkeypatch.setenv("PYTEST_XDIST_WORKER", f"gw{worker}")
        mine = {ports.reserve_port() for _ in range(50)}
        assert len(mine) == 50 and not mine & taken
        assert all(abs(one - other) >= ports.STEP for one in mine for other in taken)
        taken |= mine


def test_a_port_in_use_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = sorted(ports.reserve_port() for _ in range(2))
    monkeypatch.setattr(ports, "_block", lambda: range(one, other + 1, other - one))
    with socket.create_server(("127.0.0.1", one)):
        assert {ports.reserve_port() for _ in range(3)} == {other}
        with socket.create_server(("127.0.0.1", other)), pytest.raises(AssertionError, match="all in use"):
            ports.reserve_port()

"""Ports for servers of tests: each is one process's."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import ports
from tests.support.child import Child


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """No process has a port yet: pytest's may have taken all of their blocks by now. The file of the locks."""
    path = tmp_path / "locks"
    locks = os.open(path, os.O_RDWR | os.O_CREAT)
    monkeypatch.setattr(ports, "_locks", locks)
    yield path
    os.close(locks)


def test_a_port_is_its_processs_until_that_ends(alone: Path) -> None:
    """Nothing listens at any of them."""
    code = (
        "import os\nfrom tests.support import ports\n"
        f"ports._locks = os.open({str(alone)!r}, os.O_RDWR)\n"
        "print(*(ports.reserve_port() for _ in range(20)), flush=True)\ninput()"
    )
    with Child([sys.executable, "-c", code], talks=True) as other:
        theirs = set(map(int, other.read_line().split()))
        assert len(theirs) == 20 and all(map(ports._is_anothers, theirs))
        assert ports.reserve_port() not in theirs
        other.close_input()
        other.wait()
    assert not ports._is_anothers(theirs.pop())


@pytest.mark.usefixtures("alone")
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


def test_a_port_is_found_though_others_have_all() -> None:
    code = (
        "from tests.support import ports\n"
        "for port in ports._block(): ports._is_anothers(port)\n"
        "print('all', flush=True)\ninput()"
    )
    with Child([sys.executable, "-c", code], talks=True) as other:
        other.expect("all")
        assert ports.reserve_port() in ports._block()

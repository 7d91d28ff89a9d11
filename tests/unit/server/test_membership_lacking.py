"""A data server's link to its manager where the system lacks something, a message cannot be packed, or it is down."""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from simm.errors import LocalProtocolError
from simm.net.loop import Loop
from simm.server import membership as membership_module
from simm.wire import messages as M
from tests.support.fake_manager import House, Manager


@pytest.fixture
def house(manager: Manager, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    made = House([manager.address], start=False)
    monkeypatch.setattr(membership_module, "RECONNECT_S", 0.01)
    yield made
    made.loop.close()


@pytest.mark.parametrize("lacks", [OSError(errno.ENOSPC, "no watches"), MemoryError()])
@pytest.mark.parametrize("step", [selectors.EVENT_WRITE, selectors.EVENT_READ])
def test_issue_a_link_that_cannot_be_watched_is_tried_again(
    house: House, monkeypatch: pytest.MonkeyPatch, lacks: Exception, step: int
) -> None:
    """The supervisor's loop went on, and it never joined; or it ended, with all values."""
    real, failed = house.loop.selector.register, list[Any]()

    def register(sock: Any, events: int, data: Any = None) -> Any:
        if events == step and not failed:
            failed.append(sock)
            raise lacks
        return real(sock, events, data)

    with monkeypatch.context() as patched:
        patched.setattr(house.loop.selector, "register", register)
        house.membership.start()
        house.until(lambda: house.membership.joined, "JOINED")
    assert len(failed) == 1 and failed[0].fileno() == -1 and house.loop.peers == {house.membership.peer}


def test_issue_what_cannot_be_packed_waits_for_no_answer(manager: Manager, house: House) -> None:
    """Its callback stayed for good: a JOIN that seemed to wait for its answer was never sent again."""
    house.membership.start()
    house.until(lambda: house.membership.joined and not house.membership._pending, "JOINED, and all answered")
    with pytest.raises(LocalProtocolError):
        house.membership.request(M.Heartbeat(1 << 70, 1, "n", []), house.membership._on_joined)
    assert house.membership.all_answered and house.membership.peer is not None
    said: list[object] = []
    house.membership.request(M.Ping(0), lambda msg, _: said.append(msg))
    house.until(lambda: said, "the next one has its answer")


def test_issue_a_link_that_is_down_when_time_is_up_is_no_reason_to_wait_on(
    manager: Manager, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody looked again: the server asked without end which cluster a manager is of that had no map."""
    monkeypatch.setattr(membership_module, "SILENT_S", 0.01)
    manager.answers[M.MapGet] = None
    house.membership.find_cluster(41)
    house.membership._asked_in_vain()  # as it is called by the clock, which is far from there in this test
    assert house.membership.peer is None and not house.gave_up
    house.until(lambda: house.gave_up, "giving up")
    assert "which cluster" in house.gave_up and house.membership.peer is not None


def test_issue_a_manager_that_comes_as_time_is_up_is_listened_to(manager: Manager, house: House) -> None:
    """The server gave up before the answer could come, and said that the manager had been silent all the time."""
    house.membership.find_cluster(41)
    house.membership._asked_in_vain()
    house.until(lambda: house.membership.peer, "a link, by which nothing has come")
    house.membership._asked_in_vain()
    assert not house.gave_up and not house.membership.found_cluster
    house.until(lambda: house.membership.found_cluster, "the answer")
    assert not house.gave_up


@pytest.mark.parametrize("lacks", [OSError(errno.ENOSPC, "no watches"), MemoryError()])
def test_a_peer_that_cannot_be_watched_is_none(monkeypatch: pytest.MonkeyPatch, lacks: Exception) -> None:
    """It counted as a connection, until it seemed stalled."""
    with contextlib.closing(Loop()) as loop, pytest.raises(type(lacks)):
        ours, theirs = socket.socketpair()
        with ours, theirs, monkeypatch.context() as patched:

            def register(*_: object) -> None:
                raise lacks

            patched.setattr(loop.selector, "register", register)
            try:
                loop.adopt(ours, House([("127.0.0.1", 1)], start=False).membership, "nobody")
            finally:
                assert not loop.peers

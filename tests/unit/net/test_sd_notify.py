"""What a server tells the service manager, and that nothing of it can block or harm the server."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from simm.net.loop import Loop
from simm.net.sd_notify import STATUS_CHARACTERS, TICK_S, Notifier, keep_informed
from simm.sdk.local_cluster import child_environment
from tests.support.notify_socket import NotifySocket


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[NotifySocket]:
    name = f"@simm-notify-{os.getpid()}" if request.param == "abstract" else f"{tmp_path}/n"
    with NotifySocket(name) as listening:
        yield listening


@pytest.fixture
def notifier(manager: NotifySocket) -> Iterator[Notifier]:
    with contextlib.closing(Notifier(manager.address, 3.0)) as made:
        yield made


@pytest.fixture
def unwatched_crashes() -> Iterator[None]:
    """The tests' own handlers of crashes stay."""
    before = faulthandler.is_enabled()
    yield
    if not before:
        faulthandler.disable()


def test_a_life(manager: NotifySocket, notifier: Notifier) -> None:
    assert notifier.active
    notifier.status("faulting in")
    notifier.extend(90.5)
    notifier.ready("serving")
    notifier.beat()
    notifier.status("serving")  # said before
    notifier.status("serving 2 values")
    notifier.stopping("handing over")
    assert manager.waiting() == [
        "STATUS=faulting in", "EXTEND_TIMEOUT_USEC=90500000", "READY=1", "STATUS=serving", "WATCHDOG=1",
        "STATUS=serving 2 values", "STOPPING=1", "STATUS=handing over",
    ]  # fmt: skip


def test_a_reload_is_bracketed(manager: NotifySocket, notifier: Notifier) -> None:
    with notifier.reloading():
        pass
    assert manager.waiting() == [], "READY=1 after it would say that the start is over"
    notifier.ready("")
    manager.waiting()
    with pytest.raises(ZeroDivisionError), notifier.reloading():
        began = manager.waiting()
        raise ZeroDivisionError
    assert began[0] == "RELOADING=1" and re.fullmatch(r"MONOTONIC_USEC=\d+", began[1])
    assert manager.waiting() == ["READY=1"]


def test_a_peer_cannot_put_a_line_of_its_own_into_the_status(manager: NotifySocket, notifier: Notifier) -> None:
    notifier.status("manager refused us: \nSTOPPING=1\nMAINPID=1")
    (line,) = manager.waiting()
    assert line.startswith("STATUS=manager refused us: \\nSTOPPING=1")
    notifier.ready("x" * 10_000)
    assert len(manager.waiting()[1]) == len("STATUS=") + STATUS_CHARACTERS


def test_nothing_blocks_and_the_newest_arrives(tmp_path: Path) -> None:
    """The socket takes nothing: what is said meanwhile waits, the newest of each kind, and comes with the next tick."""
    with NotifySocket(tmp_path / "n") as manager, contextlib.closing(Notifier(manager.address)) as notifier:
        while notifier.flush() and not notifier._waiting:
            notifier.extend(1.0)
        assert not notifier.flush(), "control: the queue is full"
        notifier.ready("a")
        notifier.status("b")
        with notifier.reloading():
            pass
        manager.waiting()
        notifier.beat()
        assert manager.waiting() == ["EXTEND_TIMEOUT_USEC=1000000", "READY=1", "STATUS=b"]


def test_a_service_manager_that_is_gone_harms_nobody(tmp_path: Path) -> None:
    notifier = Notifier(f"{tmp_path}/nobody", 1.0)
    notifier.ready("serving")
    notifier.beat()
    with NotifySocket(tmp_path / "nobody") as manager:  # systemd executes itself anew, and its socket is back
        notifier.beat()
        assert manager.waiting() == ["READY=1", "STATUS=serving", "WATCHDOG=1"]
    notifier.close()
    notifier.status("unheard")
    Notifier("/" + "x" * 200).ready("no such path can be")


def test_without_a_service_manager_nothing_happens() -> None:
    environment = {"WATCHDOG_USEC": "1000000"}
    notifier = Notifier.from_environment(environment)
    assert not notifier.active and not environment
    notifier.ready("")
    loop = Loop()
    with contextlib.closing(loop):
        timers = len(loop._timers)
        keep_informed(loop, notifier, lambda: pytest.fail("nobody asks"))
        assert len(loop._timers) == timers


def test_the_environment_is_taken_away() -> None:
    environment = {"NOTIFY_SOCKET": "@simm-x", "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid()), "A": "b"}
    with contextlib.closing(Notifier.from_environment(environment)) as notifier:
        assert (notifier.address, notifier.watchdog_s, notifier.tick_s) == ("@simm-x", 3.0, 1.0)
    assert environment == {"A": "b"}


@pytest.mark.parametrize(
    "variables",
    [{"WATCHDOG_PID": "1"}, {"WATCHDOG_USEC": ""}, {"WATCHDOG_USEC": "-1"}, {"WATCHDOG_USEC": "9" * 30}],
)
def test_a_watchdog_that_is_not_for_this_process(variables: dict[str, str]) -> None:
    environment = {"NOTIFY_SOCKET": "@simm-x", "WATCHDOG_USEC": "3000000", **variables}
    with contextlib.closing(Notifier.from_environment(environment)) as notifier:
        assert notifier.active and notifier.watchdog_s == 0 and notifier.tick_s == TICK_S


@pytest.mark.parametrize("address", ["relative/path", "vsock:2:1234"])
def test_addresses_of_another_kind_are_ignored(address: str) -> None:
    assert not Notifier.from_environment({"NOTIFY_SOCKET": address}).active


def test_servers_of_a_program_do_not_speak_for_its_service(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"):
        monkeypatch.setenv(name, "1")
    assert not {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"} & set(child_environment())


@pytest.mark.usefixtures("unwatched_crashes")
def test_signs_of_life_come_from_the_loop_and_may_be_withheld(manager: NotifySocket) -> None:
    clock, lives = [100.0], [True]
    loop = Loop(lambda: clock[0])
    notifier = Notifier(manager.address, 30.0)
    with contextlib.closing(loop), contextlib.closing(notifier):
        keep_informed(loop, notifier, lambda: f"at {clock[0]:.0f}", lambda: lives[0])

        def pass_tick() -> list[str]:
            clock[0] += notifier.tick_s
            loop.run_once(0.0)
            return manager.waiting()

        assert manager.waiting() == [], "a loop that does not turn says nothing"
        assert pass_tick() == ["STATUS=at 105", "WATCHDOG=1"]
        lives[0] = False
        assert pass_tick() == ["STATUS=at 110"]
        lives[0] = True
        assert pass_tick() == ["STATUS=at 115", "WATCHDOG=1"]
    assert faulthandler.is_enabled(), "who is ended for want of them says where it was"


def test_a_process_without_descriptors_is_alive(manager: NotifySocket, notifier: Notifier) -> None:
    """The socket is open from the start, as a new one could not be had then."""
    before = socket.socket
    try:
        socket.socket = None  # type: ignore[assignment, misc]
        notifier.beat()
    finally:
        socket.socket = before  # type: ignore[misc]
    assert manager.waiting() == ["WATCHDOG=1"]

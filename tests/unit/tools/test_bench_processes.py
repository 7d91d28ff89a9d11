"""The load processes of ``simm bench`` when a run is ended in the middle: what they have stored is deleted."""

from __future__ import annotations

import errno
import os
import pickle
import signal
import struct
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from simm.errors import SimmError
from simm.tools.bench import processes
from simm.tools.bench.measure import Bench
from simm.tools.bench.plan import Plan
from simm.tools.bench.processes import LoadProcesses

#: From 3.12 on CPython warns of every fork beside threads.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")

#: What a stub does with an order before it answers; True if it has answered itself.
Does = Callable[[Connection, int, str], bool]
LEFT = "a load process died, or did not end in time: its values may be left in the cluster"
REACHED: dict[str, dict[str, Any]] = {"client": {"path": "shm"}, "environment": {}}


def plan() -> Plan:
    return Plan(
        ops=("put",), sizes=(4096,), batches={"put": (1,)}, threads=1, processes=2, seconds=1.0, verify=False,
        ring=True, working_set=1 << 20, memory=0,
    )  # fmt: skip


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "orders"


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, log: Path) -> Iterator[Callable[[Does], LoadProcesses]]:
    """Return what starts load processes that carry out nothing, but note each order that they have answered."""
    started: list[LoadProcesses] = []

    def begin(does: Does) -> LoadProcesses:
        def serve(pipe: Connection, settings: dict[str, Any], others: list[Connection]) -> None:
            processes._as_child()
            for other in others:
                other.close()
            number = settings["first"]
            pipe.send({"paths": ["shm"]})
            while True:
                what, _ = pipe.recv()
                if not does(pipe, number, what):
                    pipe.send({"rows": 100, "client": {}})
                with log.open("a") as file:
                    file.write(f"{number} {what}\n")
                if what == "end":
                    return

        monkeypatch.setattr(processes, "_load_process", serve)
        started.append(LoadProcesses(plan(), REACHED))
        return started[-1]

    yield begin
    for each in started:
        each.close()


def run(load: LoadProcesses, warned: list[str]) -> None:
    Bench(plan(), load, None, lambda _: None, lambda _: None, warned.append).run()


def ended(log: Path) -> bool:
    """Return whether both have deleted their values, and then ended."""
    noted = log.read_text().splitlines()
    return all(
        [line for line in noted if line.startswith(f"{number} ")][-2:] == [f"{number} discard", f"{number} end"]
        for number in range(2)
    )


@pytest.mark.parametrize("half", [False, True])
def test_an_interrupt_in_a_burst_leaves_no_values(
    start: Callable[[Does], LoadProcesses], log: Path, half: bool
) -> None:
    """The burst's answer was taken for that of the deletion, and the process was ended in the middle of it."""

    def interrupt(pipe: Connection, number: int, what: str) -> bool:
        if what != "burst" or number:
            return False
        message = pickle.dumps({"answer": bytes(1 << 20)})
        frame = struct.pack("!i", len(message)) + message
        at = 1 << 10 if half else 0
        os.write(pipe.fileno(), frame[:at])
        os.kill(os.getppid(), signal.SIGINT)
        while at < len(frame):
            at += os.write(pipe.fileno(), frame[at:])
        return True

    warned: list[str] = []
    load = start(interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(load, warned)
    assert ended(log) and not warned


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_all_processes_of_the_command_leaves_no_values(
    start: Callable[[Does], LoadProcesses], log: Path, signum: signal.Signals
) -> None:
    """GNU timeout, Slurm, systemd and a terminal that closes send it to the load processes, too: they died of it."""

    def hit(_pipe: Connection, number: int, what: str) -> bool:
        if what == "burst":
            os.kill(os.getpid(), signum)
            if not number:
                os.kill(os.getppid(), signal.SIGINT)
        return False

    warned: list[str] = []
    load = start(hit)
    with pytest.raises(KeyboardInterrupt):
        run(load, warned)
    assert ended(log) and not warned


def test_a_command_that_cannot_print_any_more_leaves_no_values(
    start: Callable[[Does], LoadProcesses], log: Path
) -> None:
    """Its terminal has been closed."""

    def fail(pipe: Connection, number: int, what: str) -> bool:
        if what != "burst" or number:
            return False
        pipe.send({"failed": "the server is gone"})
        return True

    def progress(text: str) -> None:
        if text.startswith("deleting"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    load = start(fail)
    with pytest.raises(SimmError, match="the server is gone"):
        Bench(plan(), load, None, progress, lambda _: None).run()
    assert ended(log)


def test_a_process_that_fails_costs_the_others_no_values(start: Callable[[Does], LoadProcesses], log: Path) -> None:
    def fail(pipe: Connection, number: int, what: str) -> bool:
        if what != "burst" or number:
            return False
        pipe.send({"failed": "the server is gone"})
        return True

    warned: list[str] = []
    load = start(fail)
    with pytest.raises(SimmError, match="the server is gone"):
        run(load, warned)
    assert ended(log) and not warned


def test_a_process_that_was_killed_has_withdrawn_nothing(start: Callable[[Does], LoadProcesses], log: Path) -> None:
    """As by the kernel where memory is short. The end of its pipe counted as that of its work."""
    load = start(lambda *_: False)
    os.kill(load._children[0].pid, signal.SIGKILL)
    assert not load.withdraw() and log.read_text().splitlines() == ["1 discard", "1 end"]


def test_a_process_that_died_is_not_waited_for(start: Callable[[Does], LoadProcesses], log: Path) -> None:
    def die(pipe: Connection, number: int, what: str) -> bool:
        if what == "burst" and not number:
            os._exit(1)
        return False

    warned: list[str] = []
    load = start(die)
    with pytest.raises(SimmError, match="ended unexpectedly"):
        run(load, warned)
    assert log.read_text().splitlines()[-2:] == ["1 discard", "1 end"] and warned == [LEFT]


def test_a_second_interrupt_ends_it_at_once(start: Callable[[Does], LoadProcesses]) -> None:
    def interrupt_again(pipe: Connection, number: int, what: str) -> bool:
        if number or what not in ("burst", "discard"):
            return False
        os.kill(os.getppid(), signal.SIGINT)
        while what == "discard":  # it would never end
            signal.pause()
        return False

    warned: list[str] = []
    load = start(interrupt_again)
    with pytest.raises(KeyboardInterrupt):
        run(load, warned)
    assert not warned, "it has not waited"
    load.close()


def test_a_process_that_does_not_end_is_said(
    start: Callable[[Does], LoadProcesses], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_and_hang(pipe: Connection, number: int, what: str) -> bool:
        if what != "burst":
            return False
        if not number:
            pipe.send({"failed": "the server is gone"})
            return True
        while True:
            signal.pause()

    monkeypatch.setattr(LoadProcesses.withdraw, "__defaults__", (0.2,))
    warned: list[str] = []
    load = start(fail_and_hang)
    with pytest.raises(SimmError, match="the server is gone"):
        run(load, warned)
    assert warned == [LEFT]


def test_a_run_without_trouble_deletes_its_values_and_goes_on(start: Callable[[Does], LoadProcesses]) -> None:
    load = start(lambda *_: False)
    assert load.ask("discard") and [answer["client"] for answer in load.ask("end")] == [{}, {}]
    load.close()
    assert not load._children

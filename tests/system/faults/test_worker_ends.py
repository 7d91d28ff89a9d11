"""A worker that somebody else tells to end, that does not come to serve for a while, or that recovers when all ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from simm.arena.layout import State
from simm.client import Client
from simm.ipc.segments import left_by
from tests.support.child import alive, forked_by
from tests.support.fleet import Fleet, Server
from tests.support.left_arenas import segments
from tests.support.load import PATIENT_S
from tests.support.patched_children import SCARCE, SLOW
from tests.support.waiting import wait_until

KEYS = 60
PATCHED = "call=tests.support.patched_children:"
DEAD_AFTER = ("--dead-after", "60")


def fill(client: Client) -> None:
    assert all(client.put(f"k/{number}", b"%d" % number) for number in range(KEYS))


def has_all(client: Client) -> bool:
    found = [client.get(f"k/{number}") for number in range(KEYS)]
    assert all(value in (None, b"%d" % number) for number, value in enumerate(found))
    return all(found)


def successor_of(server: Server, before: set[int]) -> psutil.Process:
    """Return the process that a server has forked beside those, once there is one."""
    wait_until(lambda: {each.pid for each in forked_by(server.pid)} - before, "a successor")
    (found,) = [each for each in forked_by(server.pid) if each.pid not in before]
    return found


def kill_worker(server: Server, number: int) -> psutil.Process:
    """Kill a worker and return its successor."""
    before = {each.pid for each in forked_by(server.pid)}
    os.kill(server.worker_pid(number), signal.SIGKILL)
    return successor_of(server, before)


def serves_again(server: Server, number: int, pid: int) -> bool:
    try:
        stats = server.worker_stats(number)
    except Exception:
        return False
    return bool(stats["pid"] != pid and stats["shards"] and not stats["fenced"])


@pytest.mark.parametrize("arguments", [(), ("--warm",)], ids=["cold", "warm"])
def test_issue_sigterm_to_a_worker_costs_no_value(make_fleet: Callable[..., Fleet], arguments: tuple[str, ...]) -> None:
    """``kill`` and tools that make room for memory send it. It ended the server, with the arenas of all workers."""
    fleet = make_fleet(
        1, memory="32M", heartbeat_ms=500, manager_arguments=DEAD_AFTER,
        server_arguments=("--workers", "2", *arguments),
    )  # fmt: skip
    (server,) = fleet.servers
    with Client(fleet.manager.address, deadline_s=PATIENT_S) as client:
        fill(client)
        before = segments(server.name)
        for number in (1, 0):
            pid = server.worker_pid(number)
            os.kill(pid, signal.SIGTERM)
            wait_until(lambda: serves_again(server, number, pid), "a successor serves")  # noqa: B023
        assert has_all(client) and segments(server.name) == before
    server.end()
    assert len(segments(server.name)) == (2 if arguments else 0), "its supervisor may end it"
    server.start()


def test_issue_sigterm_while_it_recovers_ends_it_and_costs_no_value(make_fleet: Callable[..., Fleet]) -> None:
    fleet = make_fleet(1, memory="32M", heartbeat_ms=500, manager_arguments=DEAD_AFTER, patches=(f"{PATCHED}slow",))
    (server,) = fleet.servers
    with Client(fleet.manager.address, deadline_s=PATIENT_S) as client:
        fill(client)
        slow = server.folder / SLOW
        slow.touch()
        first = kill_worker(server, 0)
        wait_until(lambda: b"is process %d" % first.pid in server.log.read_bytes(), "it is known")
        before = {each.pid for each in forked_by(server.pid)}
        first.terminate()
        second = successor_of(server, before)
        assert not alive(first)
        slow.unlink()
        wait_until(lambda: serves_again(server, 0, first.pid) and server.worker_pid() == second.pid, "it serves")
        assert has_all(client)


@pytest.mark.parametrize("there", [True, False], ids=["it recovers", "there is none"])
def test_issue_a_warm_stop_without_a_worker_keeps_all_values(
    make_fleet: Callable[..., Fleet], tmp_path: Path, there: bool
) -> None:
    """One of two workers had died when a map came and the server was stopped. All arenas of it were lost."""
    patch = "slow" if there else "scarce"
    fleet = make_fleet(
        2, memory="32M", heartbeat_ms=500, manager_arguments=(*DEAD_AFTER, "--restart-grace-ms", "600000"),
        server_arguments=("--workers", "2", "--warm"), patches=(f"{PATCHED}{patch}",),
    )  # fmt: skip
    first, second = fleet.servers
    with Client(fleet.manager.address, deadline_s=PATIENT_S) as client:
        fill(client)
        second.end()
        held = first.folder / (SLOW if there else SCARCE)
        held.touch()
        before, epoch = segments(first.name), fleet.manager_epoch()
        os.kill(first.worker_pid(1), signal.SIGKILL)
        second.folder = tmp_path  # it recovers its own arenas
        second.start()
        wait_until(lambda: first.worker_stats()["epoch"] > epoch, "the other worker has the map that names it")
        first.end()
        held.unlink()
        assert segments(first.name) == before
        left = left_by(first.name)
        assert {each.state for each in left} == {State.SUSPENDED} and {each.epoch for each in left} == {epoch + 1}
        first.start()
        fleet.wait_settled()
        wait_until(lambda: has_all(client), "all values are there")
    assert "set aside" not in first.log.read_text()


@pytest.mark.parametrize(
    ("arguments", "recovers"), [((), True), (("--warm",), True), (("--warm",), False)], ids=["cold", "warm", "serving"]
)
def test_issue_a_supervisor_that_is_killed_takes_a_recovering_worker_along(
    make_fleet: Callable[..., Fleet], arguments: tuple[str, ...], recovers: bool
) -> None:
    """It recovered on, for a minute perhaps, and the next server could not start meanwhile, or started cold.

    One that serves goes the same way: with --warm the next start has its values.
    """
    fleet = make_fleet(
        1, memory="32M", heartbeat_ms=500, manager_arguments=(*DEAD_AFTER, "--restart-grace-ms", "600000"),
        server_arguments=arguments, patches=(f"{PATCHED}slow",),
    )  # fmt: skip
    (server,) = fleet.servers
    with Client(fleet.manager.address, deadline_s=PATIENT_S) as client:
        fill(client)
        before, slow = segments(server.name), server.folder / SLOW
        slow.touch()
        worker = kill_worker(server, 0) if recovers else psutil.Process(server.worker_pid())
        server.kill()
        assert not alive(worker) and slow.exists()
        left = left_by(server.name)
        assert [each.state for each in left] == ([State.SUSPENDED] if arguments else [])
        slow.unlink()
        server.start()
        fleet.wait_settled()
        if arguments:
            assert segments(server.name) == before
            wait_until(lambda: has_all(client), "all values are there")


def test_issue_a_worker_that_cannot_serve_for_a_while_costs_no_value(make_fleet: Callable[..., Fleet]) -> None:
    """Without memory or threads it died 60 times within seconds, and took the server with all arenas with it."""
    fleet = make_fleet(
        1, memory="32M", heartbeat_ms=500, manager_arguments=DEAD_AFTER, server_arguments=("--workers", "2"),
        patches=(f"{PATCHED}scarce",),
    )  # fmt: skip
    (server,) = fleet.servers
    with Client(fleet.manager.address, deadline_s=PATIENT_S) as client:
        fill(client)
        scarce = server.folder / SCARCE
        scarce.touch()
        pid = server.worker_pid(1)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: "restarting it on its arena in 1.6 s" in server.log.read_text(), "pauses that grow", 60)
        assert server.log.read_text().count("restarting it on its arena") == 5
        scarce.unlink()
        wait_until(lambda: serves_again(server, 1, pid), "it serves again")
        assert has_all(client)

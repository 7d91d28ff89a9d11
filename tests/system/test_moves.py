"""Shards that move between real data servers, under load: grow, drain, and processes killed in the middle.

Restarts, clean, warm, killed and rolling, are in ``faults/test_servers_gone.py``.
"""

from __future__ import annotations

import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from simm.client import Client
from simm.wire import messages as M
from tests.support.child import alive
from tests.support.fleet import PATIENT_SERVERS, Fleet, Server
from tests.support.load import FAILED, OUTAGE, PATIENT_S, load
from tests.support.waiting import wait_until

LENGTH = 8000
#: Heartbeats so far apart that no server loses its shards: it is dead after five of them, and on a busy machine one
#: that lives may be silent for a second.
PATIENT_MS = 1000


@pytest.fixture
def make_fleet(nothing_is_left: Path) -> Iterator[Callable[..., Fleet]]:
    with ExitStack() as stack:
        yield lambda *arguments, patches=PATIENT_SERVERS, **more: stack.enter_context(
            Fleet(
                Path(tempfile.mkdtemp(prefix="m", dir=nothing_is_left)),
                *arguments,
                heartbeat_ms=PATIENT_MS,
                patches=patches,
                **more,
            )
        )


def value_of(number: int) -> bytes:
    return number.to_bytes(4, "little") * (LENGTH // 4)


def fill(client: Client, count: int) -> None:
    assert all(client.put(f"before/{number}", value_of(number)) for number in range(count))


def hits(client: Client, count: int) -> int:
    """How many of the keys are there; a wrong byte fails the test."""
    found = [(number, client.get(f"before/{number}")) for number in range(count)]
    assert all(value in (None, value_of(number)) for number, value in found)
    return sum(value is not None for _, value in found)


def grow(fleet: Fleet, count: int) -> list[Server]:
    """Start so many more data servers, one after the other, and wait until each has its share."""
    added = []
    for _ in range(count):
        added.append(start_another(fleet))
        fleet.wait_settled()
    return added


def start_another(fleet: Fleet) -> Server:
    """One more data server, until READY."""
    first = fleet.servers[0]
    server = Server(fleet, "dataserver", f"{fleet.prefix}{len(fleet.servers)}", first.place, first.arguments)
    server.arguments[server.arguments.index("--name") + 1] = server.name
    fleet.servers.append(server)
    server.start()
    return server


def drain(fleet: Fleet, server: Server) -> None:
    """Move everything away from a server, and stop it."""
    fleet.ask_manager(M.Drain(1, server.name))
    wait_until(lambda: fleet.node(server).get("drained"), f"{server.name} is drained")
    server.end()


def mover_pids(server: Server) -> list[int]:
    """Movers that a server has started and that still run."""
    said = re.findall(r"mover of worker \d+ is process (\d+)", server.log.read_text(errors="replace"))
    children = {child.pid for child in psutil.Process(server.pid).children() if alive(child)}
    return [int(pid) for pid in said if int(pid) in children]


def grow_and_drain(fleet: Fleet, keys: int, rounds: int) -> None:
    with (
        Client(fleet.manager.address, deadline_s=PATIENT_S) as client,
        Client(fleet.manager.address, path="tcp", deadline_s=PATIENT_S) as remote,
    ):
        fill(client, keys)
        with load(fleet.manager.address, fleet.folder, deadline_s=PATIENT_S) as clients:
            began = time.monotonic()
            for _ in range(rounds):
                added = grow(fleet, 3)
                running = [server for server in fleet.servers if server.running]
                assert len(running) == 4
                wait_until(lambda running=running: min(map(fleet.shards_of, running)) > 3000, "all have their share")  # type: ignore[misc]
                assert hits(client, keys) == keys and hits(remote, keys // 10) == keys // 10
                for server in added:
                    drain(fleet, server)
            over = time.monotonic()
            fleet.wait_settled()
            after = hits(client, keys)
            records = clients.records()
        records.assert_right()
        during = records.between(began, over)
        print(f"1 -> 4 -> 1, {rounds} times in {over - began:.1f} s: {during.summary()}; {after} of {keys} hits")
        assert during.count(FAILED, OUTAGE) == 0, (during.summary(), records.said)
        assert after >= 0.99 * keys
    fleet.assert_no_traceback()


def test_grow_to_four_and_drain_to_one(make_fleet: Callable[..., Fleet]) -> None:
    grow_and_drain(make_fleet(1), 500, 1)


@pytest.mark.slow
def test_grow_and_drain_again_and_again(make_fleet: Callable[..., Fleet]) -> None:
    grow_and_drain(make_fleet(1, memory="256M"), 10_000, 5)


@pytest.mark.quick
def test_mover_and_worker_killed_in_the_middle(make_fleet: Callable[..., Fleet], tmp_path: Path) -> None:
    """A mover that dies is replaced and loses nothing; with the worker goes what was still to come, and that only."""
    hold = tmp_path / "hold"  # else a mover may be done before it is killed
    hold.touch()
    fleet = make_fleet(1, patches=[f"moves={hold}", *PATIENT_SERVERS])
    with Client(fleet.manager.address, deadline_s=PATIENT_S) as client:
        keys = 500
        fill(client, keys)
        server = start_another(fleet)
        wait_until(lambda: mover_pids(server), "a mover")
        wait_until(lambda: moved_bytes(fleet, server) > 100_000, "its first values")
        (mover,) = mover_pids(server)
        os.kill(mover, signal.SIGKILL)
        wait_until(lambda: mover_pids(server) and mover_pids(server) != [mover], "another mover")
        hold.unlink()
        fleet.wait_settled()
        assert hits(client, keys) == keys
        wait_until(lambda: fleet.shards_of(server) > 7000, "it has its share")
        # Away again; its first owner's worker is killed while it takes back what the other had.
        first = fleet.servers[0]
        stayed = kept_by(client, first, keys)
        assert 0 < stayed < keys
        hold.touch()
        fleet.ask_manager(M.Drain(1, server.name))
        wait_until(lambda: mover_pids(first), "a mover at the other")
        wait_until(lambda: moved_bytes(fleet, first) > 100_000, "its first values")
        os.kill(first.worker_pid(), signal.SIGKILL)
        hold.unlink()
        wait_until(lambda: fleet.node(server).get("drained"), "the other is drained")
        wait_until(lambda: client.put("after", b"after"), "puts go on")
        wait_until(lambda: hits(client, keys) >= stayed, "what was not moving is there")
        assert client.get("after") == b"after"
    fleet.assert_no_traceback()


def kept_by(client: Client, server: Server, count: int) -> int:
    """How many of the keys are a server's, by a map in which nothing moves."""
    routes = client._routes
    wait_until(lambda: not routes.table().moving, "the client knows that nothing moves")
    owners = [routes.target(client.digest(f"before/{number}")) for number in range(count)]
    return sum(owner is not None and owner.info.node == server.name for owner in owners)


def moved_bytes(fleet: Fleet, server: Server) -> int:
    """What has been copied to a server in the move under way."""
    return sum(worker.get("moved_bytes", 0) for worker in fleet.node(server).get("workers", ()))

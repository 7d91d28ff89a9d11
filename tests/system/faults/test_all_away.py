"""All data servers of a cluster away together: stopped until the manager calls them dead, and on again.

Nobody else has owned their shards meanwhile, so every value is there again. With another server alive the shards are
its own after the death: values are lost then, but none is an older one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from simm.client import Client
from simm.errors import TransportError
from simm.ipc.segments import left_by
from simm.wire import messages as M
from tests.support.fleet import Fleet, Server
from tests.support.manager_client import instance, joining
from tests.support.waiting import wait_until

KEYS = 200
LENGTH = 3000


@pytest.fixture
def make_fleet(nothing_is_left: Path) -> Iterator[Callable[..., Fleet]]:
    """A fleet whose servers count as dead after 2.5 s. On a busy machine a living one may be silent for a second."""
    with ExitStack() as stack:
        yield lambda count, **more: stack.enter_context(
            Fleet(Path(tempfile.mkdtemp(prefix="a", dir=nothing_is_left)), count, heartbeat_ms=500, **more)
        )


def connect(fleet: Fleet, path: str = "auto") -> Client:
    return Client(fleet.manager.address, path=path, deadline_s=10.0)


def value_of(number: int, version: int = 0) -> bytes:
    return (b"%d.%d-" % (number, version)) * (LENGTH // 8)


def fill(client: Client, version: int = 0) -> None:
    for number in range(KEYS):
        assert client.put(f"k/{number}", value_of(number, version))


def there(client: Client, *versions: int) -> int:
    """How many of the keys are there; other bytes than those of these versions fail the test."""
    found = [client.get(f"k/{number}") for number in range(KEYS)]
    for number, value in enumerate(found):
        assert value is None or value in [value_of(number, version) for version in versions]
    return sum(value is not None for value in found)


def stop(servers: Sequence[Server]) -> list[int]:
    """SIGSTOP all processes of these servers, all at about the same time; their pids."""
    pids = []
    for pid in [process.pid for server in servers for process in server.family()]:
        with contextlib.suppress(ProcessLookupError):  # a mover may have ended meanwhile
            os.kill(pid, signal.SIGSTOP)
            pids.append(pid)
    return pids


def go_on(pids: Sequence[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


def wait_dead(fleet: Fleet, servers: Sequence[Server]) -> None:
    for server in servers:
        wait_until(lambda server=server: fleet.node(server).get("state") == "dead", f"{server.name} is dead")


def restart(server: Server) -> None:
    server.kill()
    server.start()


def entries_of(server: Server) -> int:
    return int(server.worker_stats()["entries"])


@pytest.mark.parametrize("manager_restarts", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_servers_that_were_stopped_until_they_were_dead_have_all_values(
    make_fleet: Callable[..., Fleet], count: int, manager_restarts: bool
) -> None:
    fleet = make_fleet(count)
    with connect(fleet) as client, connect(fleet, "tcp") as remote:
        fill(client)
        assert there(client, 0) == there(remote, 0) == KEYS
        entries = [entries_of(server) for server in fleet.servers]
        pids = stop(fleet.servers)
        try:
            wait_dead(fleet, fleet.servers)
            assert fleet.status()["shards_without_owner"] == fleet.status()["shards"], "nobody serves them"
            if manager_restarts:
                restart(fleet.manager)
                wait_dead(fleet, fleet.servers)
        finally:
            go_on(pids)
        fleet.wait_settled()
        wait_until(lambda: there(client, 0) == KEYS, "all values are there")
        wait_until(lambda: there(remote, 0) == KEYS, "all values are there by TCP too")
        assert [entries_of(server) for server in fleet.servers] == entries, "nothing moved"
        wait_until(lambda: all(client.put(f"k/{number}", value_of(number, 1)) for number in range(KEYS)), "puts go on")
        assert there(client, 1) == KEYS
        wait_until(lambda: there(remote, 1) == KEYS, "and are seen")
    fleet.assert_no_traceback()


def test_with_another_server_alive_its_shards_are_the_others(make_fleet: Callable[..., Fleet]) -> None:
    """What was put at the other meanwhile counts; nothing older comes back with the first."""
    fleet = make_fleet(2)
    first, second = fleet.servers
    with connect(fleet) as client, connect(fleet, "tcp") as remote:
        fill(client)
        held = entries_of(second)
        pids = stop([first])
        try:
            wait_dead(fleet, [first])
            wait_until(lambda: fleet.shards_of(second) == fleet.status()["shards"], "the other has all shards")
            wait_until(lambda: client.put("probe", b"1"), "puts go on")
            for number in range(KEYS):
                wait_until(lambda number=number: client.put(f"k/{number}", value_of(number, 1)), "puts go on")
            assert there(client, 1) == KEYS > held
        finally:
            go_on(pids)
        fleet.wait_settled()
        assert fleet.shards_of(first) > 0
        wait_until(lambda: there(client, 1) == KEYS, "what the other had has moved back")
        wait_until(lambda: there(remote, 1) == KEYS, "for all")
        assert entries_of(first) > 0
    fleet.assert_no_traceback()


def test_a_warm_restart_may_take_longer_than_its_grace(make_fleet: Callable[..., Fleet]) -> None:
    fleet = make_fleet(1, manager_arguments=("--restart-grace-ms", "300"), server_arguments=("--warm",))
    (server,) = fleet.servers
    with connect(fleet) as client:
        fill(client)
        server.end()
        wait_until(lambda: "is not back after" in fleet.manager.log.read_text(errors="replace"), "its grace is over")
        server.start()
        fleet.wait_settled()
        wait_until(lambda: there(client, 0) == KEYS, "all values are there")
    fleet.assert_no_traceback()


def test_an_arena_whose_name_another_has_got_is_not_kept_for_a_warm_start(make_fleet: Callable[..., Fleet]) -> None:
    """It has acted on maps of the other's tenure, but has none of its values: its epoch would say that it does."""
    fleet = make_fleet(1, server_arguments=("--warm",))
    (server,) = fleet.servers
    worker = M.WorkerInfo(0, 0, 1, 99, 1 << 30, server.name, "", "127.0.0.1", 1)

    def other_lives() -> bool:
        """It is a member, again perhaps: the manager was kept waiting by this busy machine."""
        try:
            fleet.ask_manager(M.Heartbeat(instance(99, server.name), 0, server.name, []))
        except TransportError:
            try:
                fleet.ask_manager(joining(99, server.name, [worker]))
            except TransportError:
                return False
        return True

    with connect(fleet) as client:
        fill(client)
    refused = lambda: "join refused" in server.log.read_text(errors="replace")  # noqa: E731
    while True:
        pids = stop([server])
        try:
            wait_until(other_lives, "another host's server has got its name")
            since = fleet.manager_epoch()
        finally:
            go_on(pids)
        wait_until(lambda: not other_lives() or refused(), "it knows that its name is taken")
        if refused():
            break
        # It has got its name back: this process was kept waiting, and the other was dead.
    server.end()
    kept = left_by(server.name)
    # One that has heard nothing of the other may stay: its epoch says so, and the manager drops what it has.
    assert not any(each.epoch >= since for each in kept), f"{kept} says that it knows map {since}"
    fleet.assert_no_traceback()


def test_a_server_that_comes_back_with_its_manager_waits_for_its_predecessor(nothing_is_left: Path) -> None:
    """The manager takes the dead one for alive for three heartbeats: longer than a server waits for a taken name.

    The server is there first. So it asks as soon as the manager is up, however long its own start takes.
    """
    folder = Path(tempfile.mkdtemp(prefix="a", dir=nothing_is_left))
    with Fleet(folder, 1, heartbeat_ms=2500) as fleet:
        (server,) = fleet.servers
        fleet.manager.kill()
        server.kill()
        tries = lambda: server.log.read_text(errors="replace").count("; trying again") if server.log.exists() else 0  # noqa: E731
        before = tries()
        server.launch()
        wait_until(lambda: tries() > before, "it looks for the manager")
        fleet.manager.start()
        server.wait_ready()
        fleet.wait_settled()
        with connect(fleet) as client:
            assert client.put("k", b"v") and client.get("k") == b"v"
        fleet.assert_no_traceback()

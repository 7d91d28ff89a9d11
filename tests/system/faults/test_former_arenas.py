"""What processes have of an arena when its worker was killed again and again: as much as before the first kill.

No process here collects garbage, so what is let go is let go at once: a cycle that has an arena shows at each kill.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Sequence

import psutil
import pytest

from simm.arena.reader import ArenaReader
from simm.client import Client
from simm.ipc.segments import ArenaName, running
from tests.support.fleet import Fleet, Server
from tests.support.held_files import READER, of_arenas, open_files
from tests.support.load import MIX, PATIENT_S, RAISED, WRONG, LoadProcess, load
from tests.support.waiting import wait_until

NO_COLLECTOR = ("call=gc:disable",)
PINNED = [f"pinned/{number}" for number in range(4)]
#: Of a process: what it is, what it has of arenas, and how many files it has open.
Held = list[tuple[str, Counter[str], int]]


def held(server: Server, clients: Sequence[LoadProcess]) -> Held:
    """Return what each process of a data server has, and each client. Empty while one comes or goes."""
    try:
        named = [(server.kind_of(process), process.pid) for process in server.family()]
        named += [(f"client {number}", client.pid) for number, client in enumerate(clients)]
        return [(name, of_arenas(pid, server.name), len(open_files(pid))) for name, pid in sorted(named)]
    except (OSError, psutil.Error):
        return []


@pytest.mark.fault("F28", ci=3, whole=40)
def test_no_process_keeps_a_former_arena(make_fleet: Callable[..., Fleet], amount: int) -> None:
    """Clients by shared memory and by TCP put, get, look and pin all the while; pins by TCP outlive all workers."""
    fleet = make_fleet(1, memory="64M", patches=NO_COLLECTOR)
    (server,) = fleet.servers
    address = fleet.manager.address
    mix = {**MIX, "get_into": 0.1, "view": 0.1, "exists_many": 0.05}
    with Client(address, path="tcp", deadline_s=20.0) as client:
        assert all(client.put_many(PINNED, [key.encode() * 1000 for key in PINNED]))
        pins = []
        with load(
            address, fleet.folder, 4, deadline_s=PATIENT_S, keys=20, sizes=(2000, 200_000), mix=mix,
            patches=NO_COLLECTOR,
        ) as clients:
            first: Held = []
            for kill in range(amount + 1):
                if kill:
                    worker = server.worker_pid()
                    psutil.Process(worker).kill()
                    wait_until(lambda worker=worker: server.succeeded(worker), "its successor serves")  # type: ignore[misc]
                for each in clients.clients:
                    each.wait_streak(20, "calls succeed", 60.0)
                pins.append(client.pin(PINNED))
                assert pins[-1].lengths == [len(key) * 1000 for key in PINNED]
                first = first or wait_until(lambda: settled(server, clients.clients), "each reader has one arena")
                # Each pins have a connection of their own.
                expected = [(name, arenas, files + kill * (name == "stream")) for name, arenas, files in first]
                wait_until(
                    lambda: no_more(held(server, clients.clients), expected),  # noqa: B023
                    lambda: f"after {kill} kills: {held(server, clients.clients)}, and not {expected}",  # noqa: B023
                )
            for each in pins:
                assert each.get_ranges(0, [(0, 10, bytearray(10))]) is not None
                each.release()
            records = clients.records()
    records.assert_right()
    assert records.count(WRONG, RAISED) == 0, records.summary()


def no_more(now: Held, expected: Held) -> bool:
    """Return whether each process has what is expected of arenas, and no more files open."""
    return [each[:2] for each in now] == [each[:2] for each in expected] and all(
        files <= most for (_, _, files), (_, _, most) in zip(now, expected)
    )


def settled(server: Server, clients: Sequence[LoadProcess]) -> Held:
    """Return :func:`held` if the stream and each client by shared memory read the arena by one reader, none twice.

    Of each process the least of some looks: a connection that has asked a worker something may not be closed yet.
    """
    looks = [held(server, clients) for _ in range(5)]
    if any([each[:2] for each in look] != [each[:2] for each in looks[0]] for look in looks):
        return []
    of = {name: arenas for name, arenas, _ in looks[0]}
    readers = [of.get(name) for name in ("stream", "client 0", "client 2")]
    others = [of.get(name) for name in ("client 1", "client 3")]
    if readers != [READER] * 3 or others != [Counter()] * 2:
        return []
    return [(each[0][0], each[0][1], min(files for _, _, files in each)) for each in zip(*looks)]


def test_control_a_reader_that_is_kept_is_seen(lone: Fleet) -> None:
    (server,) = lone.servers
    pid = psutil.Process().pid
    gc.collect()
    wait_until(lambda: not of_arenas(pid, server.name), "clients of other tests have let it go")
    before = of_arenas(pid, server.name)
    (name,) = [name for name in running() if (parts := ArenaName.parse(name)) and parts.server == server.name]
    kept = ArenaReader(name)
    assert of_arenas(pid, server.name) - before == READER
    del kept
    assert of_arenas(pid, server.name) == before

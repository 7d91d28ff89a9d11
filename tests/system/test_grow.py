"""A data server that gets more memory while it serves: nothing is lost, under load, and whatever fails is undone."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from simm.cli import COMMANDS
from simm.client import Client
from simm.errors import TransportError
from simm.tools.console import guarded
from simm.wire import messages as M
from tests.support.child import alive
from tests.support.fleet import PATIENT_SERVERS, Fleet, Server
from tests.support.load import FAILED, OUTAGE, PATIENT_S, key_of, load
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("patient")
LENGTH = 8000
KEYS = 400
#: Heartbeats of tests in which no call may fail, as in test_moves.py.
PATIENT_MS = 1000


@pytest.fixture
def make_fleet(nothing_is_left: Path) -> Iterator[Callable[..., Fleet]]:
    with ExitStack() as stack:
        yield lambda *arguments, **more: stack.enter_context(
            Fleet(Path(tempfile.mkdtemp(prefix="g", dir=nothing_is_left)), 1, *arguments,
                  **{"heartbeat_ms": 200, "memory": "64M", **more})
        )  # fmt: skip


def value_of(number: int) -> bytes:
    return number.to_bytes(4, "little") * (LENGTH // 4)


def fill(client: Client) -> None:
    assert all(client.put(f"before/{number}", value_of(number)) for number in range(KEYS))


def hits(client: Client) -> int:
    """How many of the keys are there; a wrong byte fails the test."""
    found = [(number, client.get(f"before/{number}")) for number in range(KEYS)]
    assert all(value in (None, value_of(number)) for number, value in found)
    return sum(value is not None for _, value in found)


def stored(client: Client) -> int:
    """How many of the keys of a load of two writers, which deletes nothing, are there."""
    return sum(client.exists(key_of(writer, number)) for writer in range(2) for number in range(40))


def ctl(fleet: Fleet, *arguments: str) -> tuple[int, str]:
    """Run ``simm ctl`` in this process; return its exit code and what it says."""
    root, out = logging.getLogger("simm"), io.StringIO()
    before = root.handlers[:], root.propagate, root.level
    line = [*arguments, "--runtime-dir", fleet.run_folder_seen_from_here(fleet.servers[0])]
    line += ["--manager", fleet.manager.address]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = guarded(lambda: COMMANDS["ctl"](line, "simm ctl"), "simm ctl")
    root.handlers[:], root.propagate = before[:2]
    root.setLevel(before[2])
    return code, out.getvalue()


def grow(fleet: Fleet, memory: str, *more: str) -> str:
    code, said = ctl(fleet, "grow", "--memory", memory, *more)
    assert code == 0, (said, fleet.servers[0].log.read_text(errors="replace")[-4000:])
    return said


def refused(fleet: Fleet, *arguments: str) -> str:
    """What the command says when it refuses to grow. Nothing has changed."""
    before = workers(fleet), arenas(fleet.servers[0])
    code, said = ctl(fleet, "grow", *arguments)
    assert code in (1, 2) and said.count("simm ctl: ") == 1, said
    assert (workers(fleet), arenas(fleet.servers[0])) == before
    return said


def node(fleet: Fleet) -> dict[str, Any]:
    """What the manager's status says of the server. A manager of a busy machine may not answer in time."""
    found: dict[str, Any] = wait_until(lambda: fleet.node(fleet.servers[0]), "the manager knows the server")
    return found


def drain(fleet: Fleet, on: int) -> None:
    """Ask the manager for it until it has answered."""

    def asked() -> bool:
        with contextlib.suppress(TransportError):
            fleet.ask_manager(M.Drain(on, fleet.servers[0].name))
            return True
        return False

    wait_until(asked, "the manager answers")


def workers(fleet: Fleet) -> list[dict[str, Any]]:
    """What the manager's status says of the server's workers: number and capacity."""
    found = node(fleet)["workers"]
    return [{key: each[key] for key in ("worker", "capacity_bytes")} for each in found]


def capacity(fleet: Fleet) -> int:
    return sum(each["capacity_bytes"] for each in workers(fleet))


def arenas(server: Server) -> list[str]:
    """The files of a server's arenas."""
    return sorted(name for name in os.listdir("/dev/shm") if f"-{server.name}-" in name)


def shares(fleet: Fleet) -> list[int]:
    return [each["shards"] for each in node(fleet)["workers"]]


def log_of(fleet: Fleet) -> str:
    return fleet.servers[0].log.read_text(errors="replace")


def populating(fleet: Fleet) -> list[psutil.Process]:
    """The processes that fault an added arena in now."""
    said = {int(pid) for pid in re.findall(r"populating of worker 1 is process (\d+)", log_of(fleet))}
    children = psutil.Process(fleet.servers[0].pid).children()
    return [child for child in children if child.pid in said and alive(child)]


# -- under load ------------------------------------------------------------------------------------------


def grow_under_load(fleet: Fleet) -> None:
    """Two grows, by the local socket and by the manager, while clients by shared memory and TCP verify each call."""
    server = fleet.servers[0]
    with Client(fleet.manager.address) as client, Client(fleet.manager.address, path="tcp") as remote:
        fill(client)
        with load(fleet.manager.address, fleet.folder, deadline_s=PATIENT_S, deletes=False) as clients:
            began, first = time.monotonic(), capacity(fleet)
            said = grow(fleet, "96M")
            assert "worker 1 with 96.0 MiB on node 0" in said and "2 workers and 160.0 MiB" in said
            fleet.wait_settled("two workers have their share")
            assert len(workers(fleet)) == 2 and capacity(fleet) > first * 2.4
            said = grow(fleet, "32M", "--numa", "0", "--of", server.name)
            assert "3 workers and 192.0 MiB" in said
            fleet.wait_settled("three workers have their share")
            over = time.monotonic()
            assert hits(client) == hits(remote) == KEYS
            records = clients.records()
        records.assert_right()
        assert stored(client) == 80, "no acknowledged value is lost"
        during = records.between(began, over)
        print(f"grown twice in {over - began:.1f} s: {during.summary()}")
        assert during.count(FAILED, OUTAGE) == 0, (during.summary(), records.said)
        sizes = [each["capacity_bytes"] for each in workers(fleet)]
        wanted = [16384 * size / sum(sizes) for size in sizes]
        assert all(abs(share - want) <= 1 for share, want in zip(shares(fleet), wanted)), (shares(fleet), wanted)
        assert {path["path"] for path in client.stats()["workers"]} == {"shm"} and len(client.stats()["workers"]) == 3
    (row,) = json.loads(ctl(fleet, "node", "list", "--json")[1])
    assert row["capacity_bytes"] == sum(sizes)
    assert len(json.loads(ctl(fleet, "workers", "--json")[1])) == 3
    fleet.assert_no_traceback()


def test_a_server_grows_twice_under_load(make_fleet: Callable[..., Fleet]) -> None:
    grow_under_load(make_fleet(heartbeat_ms=PATIENT_MS, patches=PATIENT_SERVERS))


def test_values_that_no_longer_fit_stay_when_it_grows(make_fleet: Callable[..., Fleet]) -> None:
    """What is put after growing, more than there was room for before, is all there."""
    fleet = make_fleet(memory="16M", heartbeat_ms=PATIENT_MS)
    value = os.urandom(1 << 20)
    with Client(fleet.manager.address) as client:
        assert all(client.put(f"small/{number}", value) for number in range(30))
        assert sum(client.get(f"small/{number}") is not None for number in range(30)) < 16, "the positive control"
        grow(fleet, "64M")
        fleet.wait_settled()
        assert all(client.put(f"large/{number}", value) for number in range(30))
        assert sum(client.get(f"large/{number}") == value for number in range(30)) >= 28


# -- deaths ----------------------------------------------------------------------------------------------


def test_the_new_worker_is_killed(make_fleet: Callable[..., Fleet]) -> None:
    """It is restarted on its arena as any other. What had not arrived when it died, as shards moved, is given up."""
    fleet = make_fleet(heartbeat_ms=PATIENT_MS)
    server = fleet.servers[0]
    with Client(fleet.manager.address) as client:
        fill(client)
        with load(fleet.manager.address, fleet.folder, deadline_s=PATIENT_S, deletes=False) as clients:
            grow(fleet, "64M")
            for _ in range(3):
                pid = server.worker_pid(1)
                os.kill(pid, signal.SIGKILL)
                wait_until(partial(_has_successor, server, pid), "a successor")
            fleet.wait_settled()
            fill(client)
            os.kill(server.worker_pid(1), signal.SIGKILL)
            wait_until(lambda: hits(client) == KEYS, "all values are there")
            records = clients.records()
        records.assert_right()
    fleet.assert_no_traceback()


def _has_successor(server: Server, pid: int) -> bool:
    try:
        return server.worker_pid(1) != pid
    except TransportError:
        return False


#: A data server in which faulting in an added arena takes for ever.
FOREVER = ("call=tests.support.patched_growth:stuck",)


@contextlib.contextmanager
def stuck(fleet: Fleet) -> Iterator[psutil.Process]:
    """A server that is just faulting an added arena in, for ever; yield the process that does."""
    said: list[tuple[int, str]] = []
    thread = threading.Thread(target=lambda: said.append(ctl(fleet, "grow", "--memory", "32M", "--no-wait")))
    thread.start()
    thread.join(60)
    assert said and said[0][0] == 0, said
    yield wait_until(lambda: populating(fleet), "it faults in")[0]


def test_a_supervisor_that_is_killed_while_it_grows_leaves_nothing(make_fleet: Callable[..., Fleet]) -> None:
    fleet = make_fleet(patches=FOREVER)
    server = fleet.servers[0]
    with stuck(fleet) as child:
        assert len(arenas(server)) == 4, "the positive control: the files of the second arena are there"
        said = refused(fleet, "--memory", "32M")
        assert "grows already" in said and "worker 1 with 32.0 MiB" in said
        server.kill()
        wait_until(lambda: not alive(child), "it has ended with its supervisor")
    server.patches = ()
    left = arenas(server)
    server.start()
    fleet.wait_settled()
    assert len(arenas(server)) == 2 and not set(arenas(server)) & set(left)
    grow(fleet, "32M")
    fleet.wait_settled()
    assert len(workers(fleet)) == 2


def test_what_faults_in_is_killed(make_fleet: Callable[..., Fleet]) -> None:
    """The server serves on as it was, says so, and can grow again."""
    fleet = make_fleet(patches=FOREVER)
    server = fleet.servers[0]
    with Client(fleet.manager.address) as client:
        fill(client)
        with stuck(fleet) as child:
            child.kill()
            wait_until(lambda: len(arenas(server)) == 2, "the second arena is gone")
        wait_until(lambda: "died by SIGKILL" in log_of(fleet), "the log says so")
        assert hits(client) == KEYS and len(workers(fleet)) == 1
        with stuck(fleet):
            assert len(arenas(server)) == 4, "it can be asked again"
            server.end()
        assert not arenas(server)


# -- warm starts --------------------------------------------------------------------------------------------


def test_a_warm_start_has_what_was_added(make_fleet: Callable[..., Fleet]) -> None:
    """With the same flags it comes back; with others it goes, with a sentence, and nothing is left over."""
    fleet = make_fleet(server_arguments=["--warm"], manager_arguments=["--restart-grace-ms", "60000"])
    server = fleet.servers[0]
    with Client(fleet.manager.address) as client:
        fill(client)
        grow(fleet, "96M")
        fleet.wait_settled()
        names = arenas(server)
        server.end()
        assert arenas(server) == names and len(names) == 4
        server.start()
        assert "workers=2 memory=160M" in server.ready
        fleet.wait_settled()
        wait_until(lambda: hits(client) == KEYS, "all values are there")
        grow(fleet, "32M")
        fleet.wait_settled()
        server.end()
        assert len(arenas(server)) == 6
        server.arguments[server.arguments.index("--memory") + 1] = "192M"
        server.start()
        assert "workers=1 memory=192M" in server.ready and len(arenas(server)) == 2
        said = log_of(fleet)
        assert said.count("is set aside and removed, and its worker starts cold") == 3
        assert "it has 64 MiB, and --memory asks for 192" in said and "of 1 workers' arenas 0 can be used" in said
    fleet.assert_no_traceback()


def test_settings_that_ask_for_what_was_added(make_fleet: Callable[..., Fleet]) -> None:
    """With ``--workers 2`` an added arena of the same size is one of the server's own, and its values are there."""
    fleet = make_fleet(server_arguments=["--warm"], manager_arguments=["--restart-grace-ms", "60000"])
    server = fleet.servers[0]
    with Client(fleet.manager.address) as client:
        fill(client)
        grow(fleet, "64M")
        fleet.wait_settled()
        server.end()
        server.arguments += ["--workers", "2"]
        server.start()
        assert "workers=2 memory=128M" in server.ready and "set aside" not in log_of(fleet)
        fleet.wait_settled()
        wait_until(lambda: hits(client) == KEYS, "all values are there")
        server.end()
        del server.arguments[-2:]
        server.start()
        assert "workers=1 memory=64M" in server.ready and "this server has 1 workers" in log_of(fleet)


def test_a_start_without_warm_drops_what_was_added(make_fleet: Callable[..., Fleet]) -> None:
    fleet = make_fleet()
    server = fleet.servers[0]
    grow(fleet, "32M")
    fleet.wait_settled()
    server.send_signal(signal.SIGKILL, family=True)
    server.kill()
    assert len(arenas(server)) == 4, "the positive control: one that is killed with its workers leaves both arenas"
    server.start()
    fleet.wait_settled()
    assert len(arenas(server)) == 2 and len(workers(fleet)) == 1
    server.end()
    assert not arenas(server)


# -- what is refused -----------------------------------------------------------------------------------------


def test_what_is_refused_changes_nothing(make_fleet: Callable[..., Fleet]) -> None:
    fleet = make_fleet()
    server = fleet.servers[0]
    for arguments, why in (
        (("--memory", "4000G"), "are free in /dev/shm"),
        (("--memory", "0"), "no size of an arena"),
        (("--memory", "x"), "no size"),
        ((), "say how much to add"),
        (("--memory", "32M", "--numa", "77"), "there is no node 77 here"),
        (("--memory", "32M", "--numa", "x"), "not a list of nodes"),
        (("--memory", "32M", "--server", "nobody"), "there is no data server 'nobody' in"),
        (("--memory", "32M", "--of", "nobody"), "no data server 'nobody' is connected"),
        (("--memory", "32M", "--of", "*"), "name one data server"),
    ):
        assert why in refused(fleet, *arguments), arguments
    assert "is no setting" in ctl(fleet, "settings", "set", "grow", "64M")[1]
    other = Server(fleet, "dataserver", f"{fleet.prefix}9", server.place, server.arguments)
    other.arguments[other.arguments.index("--name") + 1] = other.name
    fleet.servers.append(other)
    other.start()
    fleet.wait_settled()
    assert "name one of this host's data servers" in refused(fleet, "--memory", "32M")
    drain(fleet, 1)
    assert "is being drained" in refused(fleet, "--memory", "32M", "--server", server.name)
    assert "is being drained" in log_of(fleet)
    drain(fleet, 0)
    fleet.wait_settled()
    fleet.manager.end()
    wait_until(
        lambda: "no manager answers" in ctl(fleet, "grow", "--memory", "32M", "--server", server.name)[1],
        "it has noticed that the manager is away",
    )  # fmt: skip
    assert len(arenas(server)) == 2
    fleet.manager.start()
    fleet.wait_settled()
    grow(fleet, "32M", "--server", server.name)
    fleet.wait_settled()
    fleet.assert_no_traceback()


@pytest.mark.parametrize("where", ["manager", "worker"])
def test_a_worker_that_is_not_taken(make_fleet: Callable[..., Fleet], where: str) -> None:
    """The manager refuses the JOIN, or the worker dies at once: the server goes on with what it had."""
    fleet = make_fleet(heartbeat_ms=PATIENT_MS, patches=PATIENT_SERVERS)
    server = fleet.servers[0]
    patched, switch = (fleet.manager, "one_worker") if where == "manager" else (server, "dying")
    patched.patches = (*PATIENT_SERVERS, f"call=tests.support.patched_growth:{switch}")
    patched.end()
    patched.start()
    fleet.wait_settled()
    with Client(fleet.manager.address) as client:
        fill(client)
        with load(fleet.manager.address, fleet.folder, deadline_s=PATIENT_S, complete=True) as clients:
            for _ in range(2):
                said = refused(fleet, "--memory", "32M")
                assert "not added, nothing else has changed" in said, said
                assert ("has 1 to 1 workers, not 2" if where == "manager" else "exit code 9") in said, said
                wait_until(lambda: len(arenas(server)) == 2, "nothing is left of it")
            fleet.wait_settled()
            assert hits(client) == KEYS
            records = clients.records()
        records.assert_right()
        assert records.between(clients.ready_at, time.monotonic()).count(FAILED, OUTAGE) == 0, records.summary()
    patched.patches = PATIENT_SERVERS
    patched.end()
    patched.start()
    fleet.wait_settled()
    wait_until(lambda: fleet.node(server).get("state") == "running", "the server has joined")
    grow(fleet, "32M")
    fleet.wait_settled()
    assert len(workers(fleet)) == 2
    fleet.assert_no_traceback()


def test_the_manager_is_killed_while_shards_move_to_the_new_worker(make_fleet: Callable[..., Fleet]) -> None:
    """It comes back from its state file: both workers are in it, or the server joins it again."""
    fleet = make_fleet(heartbeat_ms=PATIENT_MS)
    with Client(fleet.manager.address) as client:
        fill(client)
        grow(fleet, "64M")
        fleet.manager.kill()
        # Those of a shard that the new worker has not adopted yet miss, while this client is cut off from the manager
        # (cluster/lookup.py). The rest is there.
        assert hits(client) > 0
        fleet.manager.start()
        wait_until(lambda: len(workers(fleet)) == 2, "both are known")
        fleet.wait_settled()
        assert len(shares(fleet)) == 2 and min(shares(fleet)) > 8000
        wait_until(lambda: hits(client) == KEYS, "all values are there")
    fleet.assert_no_traceback()

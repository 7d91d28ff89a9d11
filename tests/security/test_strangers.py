"""What peers cost a manager and a data server that want a token: fuzzed frames, and HELLOs that never end.

The frames come before the opening, in its midst, and after it. ``tests/system/faults/frames.py`` makes and sends them.
It fails if a peer that has not proven a token hears anything but why, and PONG.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from simm.client import Client
from simm.net.admission import HELLO_BYTES_MAX
from simm.rpc import HEADER, encode
from simm.wire import messages as M
from simm.wire.messages import Service
from tests.support.child import Child, module_command
from tests.support.manager_client import ManagerClient
from tests.support.manager_process import Process
from tests.support.measures import measured
from tests.support.processes import Cluster, new_folder
from tests.support.values import value_of
from tests.support.waiting import WAIT_S, wait_until
from tests.system.faults.frames import Opening, send

MIB = 1 << 20
TOKEN = "the-token-of-this-test"
CLIENT = "the-client-token-of-this-test"
KEYS = [f"k{number}" for number in range(50)]
#: Bound for a million frames, seconds.
SEND_S = 5 * 3600.0


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Cluster]:
    """Servers that want a token, with some values."""
    tokens = tmp_path / "tokens"
    tokens.write_text(f"admin all {TOKEN}\nclient some {CLIENT}\n")
    tokens.chmod(0o600)
    flags = ("--token-file", str(tokens))
    with Cluster(new_folder(), "32M", server_arguments=flags, manager_arguments=flags) as cluster:
        with Client(cluster.manager, token=CLIENT, deadline_s=30.0) as client:
            wait_until(lambda: all(client.put(key, value_of(key, 1, 1, 3000)) for key in KEYS), "the worker takes puts")
        yield cluster


def processes_of(cluster: Cluster) -> dict[int, psutil.Process]:
    """Return all processes of both servers, by pid."""
    servers = [psutil.Process(cluster.processes[module].pid) for module in ("manager", "dataserver")]
    return {each.pid: each for server in servers for each in (server, *server.children(recursive=True))}


@pytest.mark.fault("F11", ci=4_000, whole=1_000_000)
def test_fuzzed_frames_before_and_after_the_opening(guarded: Cluster, amount: int) -> None:
    host, _, port = guarded.manager.rpartition(":")
    family = processes_of(guarded)
    with contextlib.ExitStack() as stack:
        link = stack.enter_context(ManagerClient([(host, int(port))], token=TOKEN, deadline_s=30.0))
        client = stack.enter_context(Client(guarded.manager, token=CLIENT, path="tcp", deadline_s=30.0))
        shards = link.get_map()
        (worker,) = shards.workers
        targets = [
            {"kind": "manager", "address": [host, int(port)], "service": Service.MANAGER, "server": ""},
            {"kind": "stream", "address": [worker.host, worker.port], "service": Service.STREAM,
             "server": worker.server},
        ]  # fmt: skip
        send_all(targets, 300, 1)  # what is allocated once
        before = {pid: process.memory_info().rss for pid, process in family.items()}
        send_all(targets, amount // len(targets), 2)
        assert client.get_many(KEYS) == [value_of(key, 1, 1, 3000) for key in KEYS]
        assert link.get_map() == shards, "something was believed"
        status = link.status()["manager"]
        assert status["counters"]["handler_errors"] == 0 and status["unauthorized"] > amount // 20
        wait_until(lambda: link.status()["manager"]["connections"] <= 3, "no connection is left")
    for pid, process in family.items():
        growth = process.memory_info().rss - before[pid]
        measured("fuzzed frames, with tokens: a server's memory grows by", growth / MIB, "MiB", "flat", frames=amount)
        assert growth < 16 * MIB
    for module in ("manager", "dataserver"):
        said = guarded.log(module).read_text()
        assert "Traceback" not in said and TOKEN not in said and CLIENT not in said


def send_all(targets: list[dict[str, object]], each: int, seed: int) -> None:
    with contextlib.ExitStack() as stack:
        senders = [
            stack.enter_context(Child(module_command("tests.system.faults.frames", json.dumps(
                {**target, "seed": seed, "count": each, "token": CLIENT}
            ))))
            for target in targets
        ]  # fmt: skip
        for target, sender in zip(targets, senders):
            told = json.loads(sender.rest(SEND_S))
            assert told["sent"] == each and not told["wrong"], (target["kind"], told)


def test_control_an_answer_to_a_stranger_is_seen(run: Callable[..., Process]) -> None:
    """By a manager without a token, which answers everybody of this user."""
    process = run()
    opening = Opening("nothing", TOKEN, Service.MANAGER, "")
    assert send(["127.0.0.1", process.port], encode(M.Ping(1), 1), opening) == ""
    said = send(["127.0.0.1", process.port], encode(M.MapGet(0, 0), 1), opening)
    assert said == "MapReply was answered to a stranger"


SLOW = 300
#: All of them together may cost a process so much.
SLOW_BYTES = 10 * MIB


def slow_hellos(address: tuple[str, int]) -> list[socket.socket]:
    """Connect ``SLOW`` peers, each of which begins the largest HELLO that there may be."""
    socks = []
    for _ in range(SLOW):
        sock = socket.create_connection(address, WAIT_S)
        opcode = HEADER.unpack_from(encode(M.Hello(0, 0, 0, 0, 0, "", "", []), 1))[2]
        magic, version, *_ = HEADER.unpack_from(encode(M.Ping(0), 1))
        sock.sendall(HEADER.pack(magic, version, opcode, 0, 0, 1, HELLO_BYTES_MAX))
        sock.setblocking(False)
        socks.append(sock)
    return socks


@pytest.mark.quick
def test_three_hundred_slow_hellos(guarded: Cluster) -> None:
    """At each port: little memory in each process, an end for all of them, and others are served.

    Not at the worker's socket: who may connect there is of its own uid, and so is no stranger.
    """
    host, _, port = guarded.manager.rpartition(":")
    with ManagerClient([(host, int(port))], token=TOKEN, deadline_s=30.0) as link:
        (worker,) = link.get_map().workers
    with Client(guarded.manager, token=CLIENT, path="tcp", deadline_s=30.0) as client:
        assert client.get_many(KEYS) == [value_of(key, 1, 1, 3000) for key in KEYS]
        family = processes_of(guarded)
        before = {pid: process.memory_info().rss for pid, process in family.items()}
        with contextlib.ExitStack() as stack:
            slow = [
                stack.enter_context(contextlib.closing(sock))
                for address in ((host, int(port)), (worker.host, worker.port)) for sock in slow_hellos(address)
            ]  # fmt: skip
            rest = dict.fromkeys(slow, HELLO_BYTES_MAX - 1)
            peak = dict(before)

            def over() -> bool:
                """Send a piece for each, but never the last byte; drop those that were closed."""
                for sock in list(rest):
                    try:
                        rest[sock] -= sock.send(bytes(min(rest[sock], 256)))
                        closed = sock.recv(1 << 12) == b""
                    except BlockingIOError:
                        closed = False
                    except OSError:
                        closed = True
                    if closed:
                        del rest[sock]
                for pid, process in family.items():
                    peak[pid] = max(peak[pid], process.memory_info().rss)
                return not rest

            began = time.monotonic()
            assert client.get_many(KEYS) == [value_of(key, 1, 1, 3000) for key in KEYS]
            wait_until(over, lambda: f"{len(rest)} have not been closed", pause_s=0.1)
            measured(f"{SLOW} slow HELLOs at each of 2 ports: all closed after", time.monotonic() - began, "s", "5 s")
        assert client.get_many(KEYS) == [value_of(key, 1, 1, 3000) for key in KEYS]
    for pid, process in family.items():
        growth = peak[pid] - before[pid]
        measured(f"{SLOW} slow HELLOs: memory of a process grows by", growth / MIB, "MiB", "10 MiB",
                 process=process.name())  # fmt: skip
        assert growth < SLOW_BYTES

"""What peers cost a manager and a data server that want a token: fuzzed frames, and HELLOs that never end.

The frames come before the opening, in its midst, and after it. ``tests/system/faults/frames.py`` makes and sends them.
It fails if a peer that has not proven a token hears anything but why, and PONG.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from simm.client import Client
from simm.net.admission import HELLO_BYTES_MAX
from simm.net.channel import Channel, greet
from simm.net.http import Page, Web
from simm.net.listeners import listen_tcp
from simm.net.loop import Loop
from simm.rpc import HEADER, encode
from simm.wire import messages as M
from simm.wire.hello import client_hello
from simm.wire.messages import Service
from tests.support.child import Child, module_command
from tests.support.http_page import page
from tests.support.manager_client import ManagerClient
from tests.support.manager_process import Process
from tests.support.measures import measured
from tests.support.ports import reserve_port
from tests.support.processes import Cluster, new_folder
from tests.support.token_servers import serving
from tests.support.tokens import old_tokens
from tests.support.values import value_of
from tests.support.waiting import WAIT_S, wait_until
from tests.system.faults.frames import Opening, ask, harmless, make, send

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
    patient = ("--suspect-after", "1000", "--dead-after", "2000")  # a server that a busy machine keeps waiting lives
    with Cluster(new_folder(), "32M", server_arguments=flags, manager_arguments=(*flags, *patient)) as cluster:
        with Client(cluster.manager, token=CLIENT, deadline_s=30.0) as client:
            wait_until(lambda: all(client.put(key, value_of(key, 1, 1, 3000)) for key in KEYS), "the worker takes puts")
        yield cluster


def processes_of(cluster: Cluster) -> dict[int, psutil.Process]:
    """Return all processes of both servers, by pid."""
    servers = [psutil.Process(cluster.processes[module].pid) for module in ("manager", "dataserver")]
    return {each.pid: each for server in servers for each in (server, *server.children(recursive=True))}


def own_memory(process: psutil.Process) -> int:
    """Return the bytes that are a process's own: not the arena's, which a stream maps bit by bit in the background."""
    about = process.memory_info()
    return int(about.rss - about.shared)


@pytest.mark.fault("F11", ci=4_000, whole=1_000_000)
def test_fuzzed_frames_before_and_after_the_opening(guarded: Cluster, amount: int) -> None:
    host, _, port = guarded.manager.rpartition(":")
    family = processes_of(guarded)
    with contextlib.ExitStack() as stack:
        link = stack.enter_context(ManagerClient([(host, int(port))], token=TOKEN, deadline_s=30.0))
        client = stack.enter_context(Client(guarded.manager, token=CLIENT, path="tcp", deadline_s=30.0))
        shards = link.get_map()
        values = [value_of(key, 1, 1, 3000) for key in KEYS]
        assert client.wait_ready() and client.get_many(KEYS) == values
        (worker,) = shards.workers
        targets = [
            {"kind": "manager", "address": [host, int(port)], "service": Service.MANAGER, "server": ""},
            {"kind": "stream", "address": [worker.host, worker.port], "service": Service.STREAM,
             "server": worker.server},
        ]  # fmt: skip
        send_all(targets, 300, 1)  # what is allocated once
        before = {pid: own_memory(process) for pid, process in family.items()}
        send_all(targets, amount // len(targets), 2)
        # A STORE of large values is granted room before its bytes come, which they never do: what is older may go.
        assert all(found in (None, value) for found, value in zip(client.get_many(KEYS), values))
        # Its own connection may have been lost in half an hour, and then the first calls fail.
        wait_until(lambda: all(client.put_many(KEYS, values)), "puts go on")
        assert client.get_many(KEYS) == values
        assert link.get_map() == shards, "something was believed"
        status = link.status()["manager"]
        assert status["counters"]["handler_errors"] == 0 and status["unauthorized"] > amount // 20
        wait_until(lambda: link.status()["manager"]["connections"] <= 3, "no connection is left")
    for pid, process in family.items():
        growth = own_memory(process) - before[pid]
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


@pytest.mark.fault("F11", ci=1_500, whole=300_000)
def test_fuzzed_frames_to_an_endpoint(amount: int) -> None:
    """Its port for RDMA clients, on a network in software: every frame has an end, and the others are served."""
    rng = random.Random("endpoint")
    with serving("endpoint", (*old_tokens(TOKEN), *old_tokens(CLIENT))) as server:
        host, port = server.address
        stages = dict.fromkeys(Opening.STAGES, 0)
        with contextlib.closing(Channel.tcp(host, port, WAIT_S)) as bystander:
            greet(bystander, Service.ENDPOINT, client_hello(M.Role.CLIENT), TOKEN)
            while sum(stages.values()) < amount:
                frame = make(rng)
                if not harmless(frame):
                    continue
                stage = rng.choice(Opening.STAGES)
                stages[stage] += 1
                said = send([host, port], frame, Opening(stage, CLIENT, Service.ENDPOINT, ""))
                assert said == "", (stage, frame.hex())
            assert bystander.call(M.Ping(3)) == M.Pong(3)
        assert server.loop.handler_errors == 0 and min(stages.values()) > amount // 5
        wait_until(lambda: not server.loop.strangers, "no stranger is left")


@pytest.mark.fault("F11", ci=3_000, whole=300_000)
def test_fuzzed_requests_for_pages(run: Callable[..., Process], amount: int) -> None:
    """Of a manager; a data server's pages have the same server. Every request has an end, and memory stays flat."""
    address = ("127.0.0.1", reserve_port())
    process = run(None, "--http", f"{address[0]}:{address[1]}")
    server = psutil.Process(process.pid)

    def requests(seed: int, count: int) -> None:
        what = {"kind": "pages", "address": address, "seed": seed, "count": count}
        with Child(module_command("tests.system.faults.frames", json.dumps(what))) as sender:
            told = json.loads(sender.rest(SEND_S))
            assert told["sent"] == count and not told["wrong"], told

    requests(1, 300)  # what is allocated once
    before = server.memory_info().rss
    requests(2, amount)
    growth = server.memory_info().rss - before
    measured("fuzzed requests for pages: the manager's memory grows by", growth / MIB, "MiB", "flat", requests=amount)
    assert growth < 16 * MIB
    assert page(f"{address[0]}:{address[1]}", "/healthz") == (200, "ok\n")
    with process.client() as client:
        assert client.status()["manager"]["counters"]["handler_errors"] == 0
    log = process.log.read_text()
    assert "Traceback" not in log and " failed" not in log


def test_control_a_page_that_fails_is_seen() -> None:
    def fails() -> Page:
        raise RuntimeError("a bug")

    loop = Loop()
    listener = listen_tcp("127.0.0.1", 0)
    address = listener.getsockname()
    web = Web(loop, listener, {"/": fails, "/healthz": lambda: Page("ok\n")})
    stop, far = socket.socketpair()
    loop.watch(far, lambda _mask: loop.stop())
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    try:
        assert ask(address, b"GET /healthz HTTP/1.1\r\n\r\n") == ""
        said = ask(address, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert said.startswith("a malformed answer: b'HTTP/1.1 500")
    finally:
        stop.send(b"x")
        thread.join(WAIT_S)
        web.close()
        loop.close()
        stop.close()
        far.close()


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


def slow_hellos(address: tuple[str, int] | str) -> list[socket.socket]:
    """Connect ``SLOW`` peers, each of which begins the largest HELLO that there may be."""
    socks = []
    for _ in range(SLOW):
        if isinstance(address, str):
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(address)
        else:
            sock = socket.create_connection(address, WAIT_S)
        opcode = HEADER.unpack_from(encode(M.Hello(0, 0, 0, 0, 0, "", "", []), 1))[2]
        magic, version, *_ = HEADER.unpack_from(encode(M.Ping(0), 1))
        sock.sendall(HEADER.pack(magic, version, opcode, 0, 0, 1, HELLO_BYTES_MAX))
        sock.setblocking(False)
        socks.append(sock)
    return socks


@pytest.mark.fault("F11", ci="300 at each port", whole="the same")
@pytest.mark.quick
def test_three_hundred_slow_hellos(guarded: Cluster) -> None:
    """At each port and at the worker's socket: little memory in each process, an end for all, and others are served."""
    host, _, port = guarded.manager.rpartition(":")
    with ManagerClient([(host, int(port))], token=TOKEN, deadline_s=30.0) as link:
        (worker,) = link.get_map().workers
    uds = str(guarded.folder / "run" / f"{guarded.name}.0.sock")
    with Client(guarded.manager, token=CLIENT, path="tcp", deadline_s=30.0) as client:
        assert client.get_many(KEYS) == [value_of(key, 1, 1, 3000) for key in KEYS]
        family = processes_of(guarded)
        before = {pid: own_memory(process) for pid, process in family.items()}
        with contextlib.ExitStack() as stack:
            slow = [
                stack.enter_context(contextlib.closing(sock))
                for address in ((host, int(port)), (worker.host, worker.port), uds) for sock in slow_hellos(address)
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
                    peak[pid] = max(peak[pid], own_memory(process))
                return not rest

            began = time.monotonic()
            assert client.get_many(KEYS) == [value_of(key, 1, 1, 3000) for key in KEYS]
            with Client(guarded.manager, token=CLIENT, path="shm", deadline_s=30.0) as local:
                assert local.get_many(KEYS) == [value_of(key, 1, 1, 3000) for key in KEYS]
            wait_until(over, lambda: f"{len(rest)} have not been closed", pause_s=0.1)
            measured(f"{SLOW} slow HELLOs at each of 2 ports and a socket: all closed after",
                     time.monotonic() - began, "s", "5 s")  # fmt: skip
        assert client.get_many(KEYS) == [value_of(key, 1, 1, 3000) for key in KEYS]
    for pid, process in family.items():
        growth = peak[pid] - before[pid]
        measured(f"{SLOW} slow HELLOs: memory of a process grows by", growth / MIB, "MiB", "10 MiB",
                 process=process.name())  # fmt: skip
        assert growth < SLOW_BYTES

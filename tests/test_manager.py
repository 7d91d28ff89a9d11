"""The manager as a real process: restarts, pauses, damaged state, subscribers, malformed peers; and its parts."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import zlib
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from simm import manager as manager_module
from simm import messages as M
from simm.channel import Refused
from simm.cluster import Timing
from simm.constants import NO_OWNER, SHARD_COUNT
from simm.errors import ConfigError, CorruptionError, SimmError, TransportError, UsageError
from simm.loop import Loop
from simm.manager import EPOCHS_RESERVED, Manager, check_exposure
from simm.manager_link import ManagerClient
from simm.messages import MapReply, Status, WorkerInfo, WorkerLoad
from simm.quantities import Address, parse_address
from simm.rpc import Connection, Flag, decode, encode
from simm.shardmap import ShardMap
from simm.statefile import StateFile
from simm.web import REQUEST_BYTES_MAX, Page, Web, prometheus

GIB = 1 << 30
WAIT_S = 20.0


def workers(*capacities: int, host: str = "10.0.0.1") -> list[WorkerInfo]:
    sizes = capacities or (GIB,)
    return [WorkerInfo(n, 0, 1, 0, size, "", f"/run/w{n}", host, 4000 + n) for n, size in enumerate(sizes)]


def owners(reply: MapReply) -> list[str | None]:
    table = array("H")
    table.frombytes(reply.owners)
    if sys.byteorder == "big":
        table.byteswap()
    return [reply.workers[owner].node if owner != NO_OWNER else None for owner in table]


class Process:
    """A manager process. ``start`` again after its end keeps folder and port."""

    def __init__(self, folder: Path | None, *arguments: str) -> None:
        self.arguments = [*arguments] + (["--state-dir", str(folder)] if folder else [])
        self.port = 0
        self.http = ""
        self.process: subprocess.Popen[str] | None = None
        self.errors: list[str] = []

    def start(self) -> Process:
        command = [sys.executable, "-m", "simm.manager", "--listen", f"127.0.0.1:{self.port}", *self.arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.fullmatch(r"READY manager 127\.0\.0\.1:(\d+)(?: http=(\S+))?\n", line)
        if not found:
            raise AssertionError(f"no READY: {line!r} {self.process.communicate(timeout=WAIT_S)}")
        self.port = int(found[1])
        self.http = found[2] or ""
        return self

    def send(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """(exit code, stderr)."""
        process, self.process = self.process, None
        assert process is not None
        process.send_signal(number)
        _, err = process.communicate(timeout=WAIT_S)
        return process.returncode, err

    def client(self, **arguments: Any) -> ManagerClient:
        return ManagerClient([("127.0.0.1", self.port)], **arguments)


@pytest.fixture
def run() -> Iterator[Callable[..., Process]]:
    """Start managers; they end with the test."""
    running: list[Process] = []

    def start(folder: Path | None = None, *arguments: str) -> Process:
        running.append(Process(folder, *arguments))
        return running[-1].start()

    yield start
    for process in running:
        if process.process is not None:
            process.send(signal.SIGCONT)
            process.end(signal.SIGKILL)


def fails(*arguments: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    """Exit code and stderr of a manager that does not start."""
    done = subprocess.run(
        [sys.executable, "-m", "simm.manager", *arguments], capture_output=True, text=True, timeout=WAIT_S,
        env={**os.environ, **(env or {})}, check=False,
    )  # fmt: skip
    assert done.stdout == "" and "Traceback" not in done.stderr
    return done.returncode, done.stderr


def next_map(client: ManagerClient) -> MapReply:
    """Wait for a push."""
    while True:
        pushed = client.poll_pushes()
        if pushed is not None:
            return pushed
        assert select.select([client], [], [], WAIT_S)[0], "no push"


# --- membership over the wire -----------------------------------------------------------------


def test_join_heartbeat_map_leave(run: Callable[..., Process]) -> None:
    process = run()
    with process.client() as client:
        assert set(owners(client.get_map())) == {None}
        assert client.join(7, "a", workers(GIB, GIB)).heartbeat_ms == 1000
        epoch = client.heartbeat(7, "a", 0, [WorkerLoad(1, 2, 3, 4)] * 2)
        reply = client.get_map(epoch)
        assert reply.epoch == epoch and len(reply.owners) == 2 * SHARD_COUNT and set(owners(reply)) == {"a"}
        assert [(info.node, info.worker, info.instance) for info in reply.workers] == [("a", 0, 7), ("a", 1, 7)]
        status = client.status()
        assert status["nodes"][0]["state"] == "running" and status["nodes"][0]["workers"][1]["entries"] == 2
        client.ping(5)
        client.leave(7, "a")
        assert client.get_map().epoch == epoch + 1
        with pytest.raises(Refused, match="join again") as caught:
            client.heartbeat(7, "a")
        assert caught.value.status == Status.UNKNOWN_NODE
        assert client.linked, "a refusal breaks no link"
    assert process.end()[0] == 0


def test_a_worker_without_a_host_is_where_it_comes_from(run: Callable[..., Process]) -> None:
    with run().client() as client:
        client.join(7, "a", workers(GIB, host="") + [workers(GIB, GIB, host="0.0.0.0")[1]])
        assert [info.host for info in client.get_map().workers] == ["127.0.0.1", "127.0.0.1"]


def test_a_name_is_taken_until_its_connection_closes(run: Callable[..., Process]) -> None:
    process = run()
    with process.client() as second:
        with process.client() as first:
            first.join(1, "a", workers())
            with pytest.raises(Refused, match="--name") as caught:
                second.join(2, "a", workers())
            assert caught.value.status == Status.NAME_TAKEN
            epoch = first.heartbeat(1, "a")
        # As if the first had been killed. Its end of the connection may be heard a moment later.
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                joined = second.join(2, "a", workers())
                break
            except Refused:
                assert time.monotonic() < deadline
        assert joined.epoch == epoch + 1
        assert set(owners(second.get_map())) == {"a"}


def test_a_silent_node_loses_its_shards(run: Callable[..., Process]) -> None:
    process = run(None, "--heartbeat-ms", "50")
    with process.client() as quiet, process.client() as client:
        quiet.join(1, "quiet", workers())
        assert client.join(2, "b", workers()).heartbeat_ms == 50
        client.subscribe()
        while set(owners(client.get_map())) != {"b"}:
            client.heartbeat(2, "b", client.get_map().epoch)
            select.select([client], [], [], 0.02)
        states = {node["name"]: node["state"] for node in client.status()["nodes"]}
        assert states == {"quiet": "dead", "b": "running"}
        with pytest.raises(Refused):
            quiet.heartbeat(1, "quiet")
        quiet.join(1, "quiet", workers())
        epoch = quiet.get_map().epoch
        client.heartbeat(2, "b", epoch)
        quiet.heartbeat(1, "quiet", epoch)
        assert set(owners(client.get_map())) == {"b", "quiet"}


def test_two_subscribers_get_every_change(run: Callable[..., Process]) -> None:
    process = run()
    with process.client() as one, process.client() as two, process.client() as server:
        maps = [one.subscribe(), two.subscribe()]
        assert one.poll_pushes() is None
        server.join(1, "a", workers())
        maps = [next_map(one), next_map(two)]
        assert maps[0] == maps[1] and set(owners(maps[0])) == {"a"}
        two.close()
        server.leave(1, "a")
        last = next_map(one)
        assert last.epoch == maps[0].epoch + 1 and set(owners(last)) == {None}
        assert server.status()["manager"]["subscribers"] == 1


def test_a_storm_of_joins_is_pushed_in_few_maps(run: Callable[..., Process]) -> None:
    process = run()
    with process.client() as watcher, socket.create_connection(("127.0.0.1", process.port), WAIT_S) as server:
        first = watcher.subscribe().epoch
        # In one piece, so that the manager finds them all before its next timer.
        server.sendall(b"".join(encode(M.Join(1, 0, f"n{number}", workers()), number + 1) for number in range(40)))
        epochs = [next_map(watcher).epoch]
        while epochs[-1] < first + 40:
            epochs.append(next_map(watcher).epoch)
        assert len(watcher.get_map().workers) == 40
        assert len(epochs) <= 3


def test_a_subscriber_that_does_not_read_is_owed_one_map_only(run: Callable[..., Process]) -> None:
    process = run(None, "--heartbeat-ms", "10s")
    with contextlib.closing(socket.socket()) as lazy, process.client() as server, process.client() as watcher:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.connect(("127.0.0.1", process.port))
        lazy.sendall(encode(M.MapGet(0, 1), 1))
        watcher.subscribe()
        # Each worker adds to the map; the sum of what lazy does not read goes far beyond a socket's buffers.
        last = 0
        for number in range(60):
            wide = [info._replace(uds="u" * 100, host="h" * 200) for info in workers(*[GIB] * 20)]
            last = server.join(1, f"n{number:0100d}", wide).epoch
            next_map(watcher)
        assert server.status()["manager"]["connections"] == 3
        conn, seen, total = Connection(), [], 0
        lazy.settimeout(WAIT_S)
        while not seen or seen[-1] < last:
            data = lazy.recv(1 << 16)
            assert data, "closed"
            total += len(data)
            conn.receive_data(data)
            while (frame := conn.next_frame()) is not None:
                seen.append(decode(frame).epoch)
        assert seen == sorted(set(seen)) and len(seen) < 60, "some maps were skipped, none came twice or late"


# --- restarts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_restart_keeps_map_and_membership(run: Callable[..., Process], tmp_path: Path, how: int) -> None:
    process = run(tmp_path / "state")
    with process.client() as client:
        for name in ("a", "b", "c"):
            client.join(1, name, workers())
        client.leave(1, "c")
        client.subscribe()
        deadline = time.monotonic() + WAIT_S
        while not client.status()["manager"]["state_stored"]:
            assert time.monotonic() < deadline
        before = client.get_map()
        code, _ = process.end(how)
        assert code == (0 if how == signal.SIGTERM else -how)
        with pytest.raises(TransportError):
            client.get_map()
        process.start()
        after = client.get_map()
        if how == signal.SIGTERM:
            assert after == before
        else:
            assert before.epoch < after.epoch <= before.epoch + EPOCHS_RESERVED
        assert (after.owners, after.workers, after.cluster) == (before.owners, before.workers, before.cluster)
        # The servers go on as they were, without joining again ...
        assert client.heartbeat(1, "a", before.epoch) == after.epoch
        assert [node["state"] for node in client.status()["nodes"]] == ["running", "joining", "left"]
        # ... and a namesake cannot slip in before they are heard.
        with pytest.raises(Refused):
            client.join(2, "b", workers())
        assert client.join(3, "d", workers()).epoch > after.epoch


def test_a_server_that_keeps_its_map_to_itself_still_raises_the_epoch(run: Callable[..., Process]) -> None:
    process = run()
    with process.client() as client:
        for number in range(5):
            client.join(number, "a", workers(GIB, GIB + number))
            client.leave(number, "a")
        client.join(9, "a", workers())
        epoch = client.heartbeat(9, "a")
        cluster = client.get_map().cluster
        process.end(signal.SIGKILL)
        process.start()
        with pytest.raises(Refused) as caught:
            client.heartbeat(9, "a", epoch)
        assert caught.value.status == Status.UNKNOWN_NODE
        client.join(9, "a", workers())
        with pytest.raises(Refused, match=f"map {epoch}"):
            client.heartbeat(9, "a", epoch)
        client.join(9, "a", workers())
        assert client.heartbeat(9, "a", epoch) == epoch + 1, "an epoch that was seen never comes again"
        assert client.get_map().cluster != cluster


def test_a_paused_manager_blames_nobody(run: Callable[..., Process]) -> None:
    process = run(None, "--heartbeat-ms", "40")
    with process.client(deadline_s=WAIT_S) as client, process.client() as other:
        client.join(1, "a", workers())
        epoch = other.heartbeat(1, "a")
        process.send(signal.SIGSTOP)
        assert not select.select([], [], [], 0.5)[0]  # the pause is the subject of this test
        waiting = threading.Thread(target=lambda: client.heartbeat(1, "a", epoch))
        waiting.start()
        process.send(signal.SIGCONT)
        waiting.join(WAIT_S)
        assert not waiting.is_alive()
        assert client.status()["nodes"][0]["state"] == "running" and client.get_map().epoch == epoch


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_it_with_connections_open(run: Callable[..., Process], tmp_path: Path, number: int) -> None:
    process = run(tmp_path)
    with process.client() as client:
        client.subscribe()
        code, err = process.end(number)
    assert code == 0 and "Traceback" not in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manager.json", "manager.lock"]


def test_it_ends_with_a_process_it_is_told_to(run: Callable[..., Process]) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as parent:
        process = run(None, "--end-with", str(parent.pid)).process
        assert parent.stdin is not None and process is not None
        assert process.poll() is None
        parent.stdin.close()
    assert process.wait(WAIT_S) == 0


# --- moving shards ----------------------------------------------------------------------------


def arrived(client: ManagerClient, instance: int, name: str) -> int:
    """Say that all shards that are moving to a node's only worker have come; how many were."""
    reply = client.get_map()
    shard_map = ShardMap(reply)
    mine = {at for at, info in enumerate(reply.workers) if info.node == name}
    moving = [shard for shard in shard_map.previous if shard_map.owners[shard] in mine]
    return client.moved(instance, reply.epoch, name, 0, moving) if moving else 0


def hear(client: ManagerClient, **instances: int) -> None:
    """All of them say that they have the newest map: what has just changed hands may go on."""
    epoch = client.get_map().epoch
    for name, instance in instances.items():
        client.heartbeat(instance, name, epoch)


def settle(client: ManagerClient, **instances: int) -> None:
    """Until nothing moves."""
    hear(client, **instances)
    while sum(arrived(client, instance, name) for name, instance in instances.items()):
        hear(client, **instances)


def about(client: ManagerClient, name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(node for node in client.status()["nodes"] if node["name"] == name)
    return found


def test_a_newcomer_is_filled_and_a_drained_server_emptied(run: Callable[..., Process]) -> None:
    process = run(None, "--moves-at-once", "1000", "--http", "127.0.0.1:0")
    with process.client() as client:
        client.join(1, "a", workers())
        client.join(2, "b", workers())
        assert not ShardMap(client.get_map()).previous, "a has not said that it knows what it owns"
        hear(client, a=1)
        first = ShardMap(client.get_map())
        assert len(first.previous) == 1000 and set(first.previous.values()) == {0}
        assert {first.since[shard] for shard in first.previous} == {first.epoch}
        assert arrived(client, 2, "b") == 1000
        assert client.moved(2, first.epoch, "b", 0, list(first.previous)) == 0, "said twice"
        load = WorkerLoad(50, 1, 1, 0, 1000, 7000, 3500)
        client.heartbeat(2, "b", 0, [load])
        status = client.status()
        assert (status["shards_moving"], status["shards_waiting"]) == (1000, SHARD_COUNT // 2 - 2000)
        assert about(client, "b")["workers"][0]["moving_in"] == 1000 and status["moved_bytes"] == 7000
        text = get(f"http://{process.http}/metrics")[1]
        samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        assert samples["simm_manager_shards_moving"] == "1000" and samples["simm_manager_moves_told_total"] == "2"
        assert samples['simm_worker_shards_moving_out{node="a",worker="0"}'] == "1000"
        assert samples["simm_manager_move_bytes_per_second"] == "3500"
        settle(client, a=1, b=2)
        assert client.status()["shards_waiting"] == 0 and not client.get_map().previous
        assert client.drain("a") == SHARD_COUNT // 2 - 1000
        assert not about(client, "a")["drained"] and about(client, "a")["state"] == "draining"
        client.heartbeat(1, "a")
        assert about(client, "a")["state"] == "draining"
        with pytest.raises(Refused, match="only data server") as caught:
            client.drain("b")
        assert caught.value.status == Status.UNAVAILABLE
        with pytest.raises(Refused, match="nearest name is 'a'") as caught:
            client.drain("aa")
        assert caught.value.status == Status.UNKNOWN_NODE
        settle(client, a=1, b=2)
        assert about(client, "a")["drained"] and set(owners(client.get_map())) == {"b"}
        assert client.drain("a", False) == 1000


def test_a_warm_leave_and_return_over_a_restart_of_the_manager(run: Callable[..., Process], tmp_path: Path) -> None:
    process = run(tmp_path, "--restart-grace-ms", "20s")
    with process.client() as client:
        client.join(1, "a", workers())
        client.join(2, "b", workers())
        settle(client, a=1, b=2)
        client.drain("b")
        before = client.get_map()
        client.leave(1, "a", warm=True)
        assert client.get_map().owners == before.owners
        process.end(signal.SIGKILL)
        process.start()
        assert about(client, "a")["state"] == "left" and about(client, "b")["draining"]
        client.join(3, "a", workers(), warm=True, epoch=before.epoch)
        after = client.get_map()
        assert (after.owners, after.since) == (before.owners, before.since), "its values are still good"
        assert {info.node: info.instance for info in after.workers} == {"a": 3, "b": 2}
        client.leave(3, "a", warm=True)
        client.join(4, "a", workers())
        cold = client.get_map()
        assert cold.owners == after.owners and cold.since != after.since and not cold.previous


def test_a_manager_without_its_state_gets_the_map_from_the_servers(run: Callable[..., Process], tmp_path: Path) -> None:
    process = run(tmp_path, "--heartbeat-ms", "200")
    with process.client() as client, process.client() as other, process.client(deadline_s=WAIT_S) as reader:
        client.join(1, "a", workers())
        other.join(2, "b", workers())
        older = other.get_map()
        client.join(3, "c", workers())
        newest = client.get_map()
        process.end(signal.SIGKILL)
        (tmp_path / "manager.json").unlink()
        process.start()
        assert other.join(2, "b", workers(), epoch=older.epoch).wants_map == 1
        # Nobody is told a map before this is over; whoever asked is answered then.
        told: list[MapReply] = []
        waiting = threading.Thread(target=lambda: told.append(reader.get_map()))
        waiting.start()
        assert other.offer(older)
        assert client.join(1, "a", workers(), epoch=newest.epoch).wants_map == 1
        assert client.status()["rebuilding"] and not told
        assert client.offer(newest) and not client.offer(older)
        waiting.join(WAIT_S)
        (reply,) = told
        assert reply.cluster == newest.cluster and reply.epoch >= newest.epoch + EPOCHS_RESERVED
        assert (reply.owners, reply.since) == (newest.owners, newest.since)
        assert reply.previous == newest.previous and [info.node for info in reply.workers] == ["a", "b", "c"]
        states = {node["name"]: node["state"] for node in client.status()["nodes"]}
        assert states["c"] == "joining", "known from the map, and not heard from yet"
        assert not client.status()["rebuilding"]
    code, err = process.end()
    assert code == 0 and "known from the map of epoch" in err and "Traceback" not in err


def test_a_client_that_has_a_map_is_not_given_an_empty_one(run: Callable[..., Process]) -> None:
    process = run(None, "--heartbeat-ms", "100")
    with process.client() as client, process.client(deadline_s=WAIT_S) as reader:
        told: list[MapReply] = []
        waiting = threading.Thread(target=lambda: told.append(reader.get_map(77)))
        waiting.start()
        while not client.status()["rebuilding"]:
            assert waiting.is_alive()
        assert client.join(1, "a", workers(), epoch=77).wants_map == 1
        waiting.join(WAIT_S)
        assert set(owners(told[0])) == {"a"} and told[0].epoch > 77


def test_a_map_from_a_stranger_is_refused(run: Callable[..., Process]) -> None:
    with run().client() as client:
        reply = client.get_map()
        with pytest.raises(TransportError, match="has not joined"):
            client.offer(reply)


def test_a_state_file_of_format_1_is_taken_over(run: Callable[..., Process], tmp_path: Path) -> None:
    process = run(tmp_path)
    with process.client() as client:
        client.join(1, "a", workers())
        client.join(2, "b", workers())
        settle(client, a=1, b=2)
        before = client.get_map()
    process.end()
    with contextlib.closing(StateFile(tmp_path, "manager")) as file:
        stored = file.load()
        cluster = stored["cluster"]
        cluster["format"] = 1
        del cluster["previous"], cluster["since"]
        for node in cluster["nodes"]:
            del node["draining"]
            node["state"] = "up"
        file.save(stored)
    process.start()
    with process.client() as client:
        after = client.get_map()
        assert after.owners == before.owners and set(ShardMap(after).since) == {before.epoch}
        assert client.heartbeat(1, "a", before.epoch) >= before.epoch
    process.end()
    with contextlib.closing(StateFile(tmp_path, "manager")) as file:
        assert file.load()["cluster"]["format"] == 2


def test_no_map_is_told_before_it_is_stored(tmp_path: Path) -> None:
    """Else an epoch could come again with other owners after a kill, and with values that it does not know of."""
    clock = [0.0]
    loop = Loop(lambda: clock[0])
    ours, theirs = socket.socketpair()
    with contextlib.closing(StateFile(tmp_path, "manager")) as file, ours, theirs:
        manager = Manager(loop, store=file)
        manager.save()
        loop.adopt(theirs, manager, "test:1")
        ours.setblocking(False)
        conn = Connection()
        ours.sendall(encode(M.Join(1, 0, "a", workers()), 1) + encode(M.MapGet(0, 0), 2))
        answers = []
        for _ in range(10):
            loop.run_once(0.0)
            with contextlib.suppress(BlockingIOError):
                conn.receive_data(ours.recv(1 << 20))
            while (frame := conn.next_frame()) is not None:
                answers.append(decode(frame))
        assert [type(each) for each in answers] == [M.Joined] and not file.load()["cluster"]["nodes"]
        clock[0] += manager_module.SETTLE_S
        loop.run_once(0.0)
        assert file.load()["cluster"]["epoch"] == answers[0].epoch
        conn.receive_data(ours.recv(1 << 20))
        frame = conn.next_frame()
        assert frame is not None and decode(frame).epoch == answers[0].epoch
    loop.close()


# --- peers that misbehave ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "not a SiMM peer"),
        (b"\0" * 64, "not a SiMM peer"),
        (encode(M.Kick(1), 1), "not for a manager"),
        (encode(M.Pong(1), 1, flags=Flag.REPLY), "where a request is due"),
        (encode(M.MapGet(0, 1), 1)[:-1] + b"\1\1", ""),
        (encode(M.Heartbeat(1, 2, "n", []), 1)[:-4] + b"\xff\xff\xff\xff", "malformed|past the end"),
        (encode(M.Join(1, 0, "n", workers()), 1).replace(b"/run", b"\xff\xff\xff\xff"), "malformed"),
    ],
)  # fmt: skip
def test_a_malformed_frame_closes_its_connection_and_nothing_else(
    run: Callable[..., Process], data: bytes, says: str
) -> None:
    process = run()
    with process.client() as bystander:
        bystander.join(1, "a", workers())
        with socket.create_connection(("127.0.0.1", process.port), WAIT_S) as bad:
            bad.sendall(data)
            bad.shutdown(socket.SHUT_WR)
            received = b""
            with contextlib.suppress(ConnectionResetError):
                while chunk := bad.recv(1 << 16):
                    received += chunk
        if says:
            conn = Connection()
            conn.receive_data(received)
            frame = conn.next_frame()
            assert frame is not None and frame.status == Status.BAD_REQUEST
            assert re.search(says, decode(frame).text)
        assert bystander.heartbeat(1, "a") and bystander.linked
        own = bystander.status()["manager"]
        assert own["handler_errors"] == 0 and own["protocol_errors"] == (1 if says else own["protocol_errors"])
    assert "Traceback" not in process.end()[1]


def test_half_a_frame_holds_nobody_up(run: Callable[..., Process]) -> None:
    process = run()
    with socket.create_connection(("127.0.0.1", process.port)) as half, process.client() as client:
        half.sendall(encode(M.Ping(1), 1)[:20])
        client.ping()
        half.sendall(encode(M.Ping(1), 1)[20:])
        half.settimeout(WAIT_S)
        assert half.recv(100) == encode(M.Pong(1), 1, flags=Flag.REPLY)


def test_two_hundred_connections(run: Callable[..., Process]) -> None:
    process = run()
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(process.client(deadline_s=WAIT_S)) for _ in range(200)]
        for client in clients:
            client.subscribe()
        clients[0].join(1, "a", workers())
        maps = [next_map(client) for client in clients]
        assert {(reply.epoch, len(reply.workers)) for reply in maps} == {(maps[0].epoch, 1)}
        assert clients[0].status()["manager"]["connections"] == 200
    with process.client() as client:
        deadline = time.monotonic() + WAIT_S
        while client.status()["manager"]["connections"] > 1:
            assert time.monotonic() < deadline, "closed connections are forgotten"


def test_foreign_versions_are_told(run: Callable[..., Process]) -> None:
    process = run()
    with socket.create_connection(("127.0.0.1", process.port), WAIT_S) as sock:
        sock.sendall(encode(M.Hello(M.PROTOCOL_MAX + 1, M.PROTOCOL_MAX + 3, 0, 0, 0, "", "", []), 1))
        conn = Connection()
        conn.receive_data(sock.recv(1 << 16))
        frame = conn.next_frame()
        assert frame is not None and frame.status == Status.VERSION and "upgrade" in decode(frame).text


# --- tokens and exposure ----------------------------------------------------------------------


def test_tokens(run: Callable[..., Process], tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("first-token-of-two\nsecond-token-of-two\n")
    tokens.chmod(0o600)
    process = run(None, "--token-file", str(tokens))
    for token in ("first-token-of-two", "second-token-of-two"):
        with process.client(token=token) as client:
            client.join(1, "a", workers())
    for token in ("", "third-token-of-two", "first-token-of-tw\xf6"):
        with process.client(token=token) as client, pytest.raises(Refused, match="token") as caught:
            client.get_map()
        assert caught.value.status == Status.UNAUTHORIZED
    with socket.create_connection(("127.0.0.1", process.port), WAIT_S) as sock:
        sock.sendall(encode(M.MapGet(0, 0), 1))
        conn = Connection()
        conn.receive_data(sock.recv(1 << 16))
        frame = conn.next_frame()
        assert frame is not None and frame.status == Status.UNAUTHORIZED
        assert sock.recv(1) == b""
    with process.client(token="first-token-of-two") as client:
        assert client.status()["manager"]["unauthorized"] == 4


def test_beyond_this_machine_only_with_a_token_or_insecure(run: Callable[..., Process]) -> None:
    code, err = fails("--listen", "0.0.0.0:0")
    assert code == 2 and "--token-file" in err and "--insecure" in err
    code, err = fails("--listen", "127.0.0.1:0", "--http", "[::]:0")
    assert code == 2 and "--http [::]:0" in err
    check_exposure(Address("0.0.0.0", 1), ("token",), False, "--listen")
    check_exposure(Address("0.0.0.0", 1), (), True, "--listen")
    with pytest.raises(ConfigError):
        check_exposure(Address("example.org", 1), (), False, "--listen")


# --- starts that fail -------------------------------------------------------------------------


def test_port_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, err = fails("--listen", f"127.0.0.1:{port}")
        assert code == 1 and err.count("\n") == 1
        assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in err and "another --listen" in err
        code, err = fails("--listen", "127.0.0.1:0", "--http", f"127.0.0.1:{port}")
        assert code == 1 and "another --http" in err


def test_a_second_manager_on_the_same_state(run: Callable[..., Process], tmp_path: Path) -> None:
    process = run(tmp_path)
    assert process.process is not None
    code, err = fails("--listen", "127.0.0.1:0", "--state-dir", str(tmp_path))
    assert code == 1 and f"process {process.process.pid}" in err and "--state-dir" in err
    process.end(signal.SIGKILL)
    run(tmp_path)


def damaged(how: str, raw: bytes) -> bytes:
    top = json.loads(raw)
    if how == "cut":
        return raw[: len(raw) // 2]
    if how == "empty":
        return b""
    if how == "foreign":
        return b'{"version": 3}'
    if how == "other kind":
        top["kind"] = "simm worker state"
    if how == "newer":
        top["format"] = 2
    if how == "bit":
        at = raw.index(b'"owners":"') + 500
        return raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]
    if how == "newer cluster":
        top["state"]["cluster"]["format"] = 3
        body = json.dumps(top["state"], sort_keys=True, separators=(",", ":")).encode()
        top["crc32"] = zlib.crc32(body)
    return json.dumps(top).encode()


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("cut", "damaged"), ("empty", "damaged"), ("foreign", "no simm manager state"),
        ("other kind", "no simm manager state"), ("newer", "format 2"), ("bit", "checksum"),
        ("newer cluster", "format 3"),
    ],
)  # fmt: skip
def test_an_unusable_state_file_stops_the_start(tmp_path: Path, how: str, says: str) -> None:
    with contextlib.closing(StateFile(tmp_path, "manager")) as file:
        Manager(Loop(), store=file).save()
    path = tmp_path / "manager.json"
    bad = damaged(how, path.read_bytes())
    path.write_bytes(bad)
    with contextlib.closing(StateFile(tmp_path, "manager")) as file:
        with pytest.raises(CorruptionError, match=says) as caught:
            Manager(Loop(), store=file)
    assert f"{path}" in str(caught.value) and "move" in str(caught.value), "the text names the file and the remedy"
    assert path.read_bytes() == bad, "it is never reset by itself"
    if how == "cut":
        assert fails("--listen", "127.0.0.1:0", "--state-dir", str(tmp_path))[0] == 2


def test_a_state_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, err = fails("--listen", "127.0.0.1:0", "--state-dir", str(tmp_path / "file" / "below"))
    assert code == 2 and "--state-dir" in err


def test_a_bad_setting() -> None:
    code, err = fails("--listen", "127.0.0.1:0", "--heartbeat-ms", "soon")
    assert code == 2 and "heartbeat_ms (from --heartbeat-ms)" in err
    assert fails("--listen", "127.0.0.1:0", env={"SIMM_LISTN": "x"})[0] == 2


# --- storing ----------------------------------------------------------------------------------


def test_disk_full_is_counted_and_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    loop = Loop(lambda: clock[0])
    with contextlib.closing(StateFile(tmp_path, "manager")) as file:
        manager = Manager(loop, store=file)
        assert manager.save()
        before = (tmp_path / "manager.json").read_bytes()
        fsync = os.fsync

        def full(fd: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        manager._apply(manager.cluster.join(clock[0], M.Join(1, 0, "a", workers())))
        for _ in range(3):
            clock[0] += 0.1
            loop.run_once(0.0)
        assert manager.counts["state_write_failures"] == 1 and manager.status()["nodes"]
        assert (tmp_path / "manager.json").read_bytes() == before
        assert not (tmp_path / "manager.tmp").exists()
        assert manager.pages.healthz() == Page("ok; the state cannot be stored\n")
        clock[0] += manager_module.RETRY_S
        loop.run_once(0.0)
        assert manager.counts["state_write_failures"] == 2
        monkeypatch.setattr(os, "fsync", fsync)
        clock[0] += manager_module.RETRY_S
        loop.run_once(0.0)
        assert manager.pages.healthz() == Page("ok\n") and manager.status()["manager"]["state_stored"]
        assert file.load()["cluster"]["nodes"][0]["name"] == "a"
    loop.close()


def test_no_epoch_is_shown_that_the_file_does_not_cover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed at any moment, the next manager starts at or beyond all epochs that were shown."""
    monkeypatch.setattr(manager_module, "EPOCHS_RESERVED", 3)
    loop = Loop()
    ours, theirs = socket.socketpair()
    with contextlib.closing(StateFile(tmp_path, "manager")) as file, ours, theirs:
        manager = Manager(loop, store=file)
        manager.save()
        loop.adopt(theirs, manager, "test:1")
        conn = Connection()
        for number in range(20):
            ours.sendall(encode(M.Join(number, 0, f"n{number}", workers()), 1))
            loop.run_once(1.0)
            conn.receive_data(ours.recv(1 << 20))
            frame = conn.next_frame()
            assert frame is not None
            assert decode(frame).epoch <= file.load()["epochs_reserved"]
        assert manager.counts["state_writes"] < 20
    loop.close()


def test_state_file_replaces_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.closing(StateFile(tmp_path / "new" / "folder", "x")) as file:
        assert file.load() is None
        file.save({"a": 1})
        with pytest.raises(SimmError, match=f"process {os.getpid()}"):
            StateFile(tmp_path / "new" / "folder", "x")
        with monkeypatch.context() as patch:

            def refuse(source: Any, target: Any) -> None:
                raise OSError(errno.EIO, "Input/output error")

            patch.setattr(os, "rename", refuse)
            with pytest.raises(OSError):
                file.save({"a": 2})
        assert file.load() == {"a": 1}
        file.save({"a": 3})
        assert file.load() == {"a": 3} and file.path.stat().st_mode & 0o777 == 0o600
        (tmp_path / "new" / "folder" / "x.tmp").write_text("left over")
    file.close()
    with contextlib.closing(StateFile(tmp_path / "new" / "folder", "x")) as file:
        assert file.load() == {"a": 3} and not (tmp_path / "new" / "folder" / "x.tmp").exists()


# --- pages ------------------------------------------------------------------------------------


def get(url: str, **headers: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=WAIT_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as exc:
        with exc:
            return exc.code, exc.read().decode()


def test_pages(run: Callable[..., Process]) -> None:
    process = run(None, "--http", "127.0.0.1:0")
    with process.client() as client:
        client.join(1, "<b>&", workers())
        assert get(f"http://{process.http}/healthz") == (200, "ok\n")
        code, text = get(f"http://{process.http}/metrics?x=1")
        samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        assert code == 200 and samples['simm_manager_nodes{state="joining"}'] == "1"
        assert samples['simm_worker_shards{node="<b>&",worker="0"}'] == str(SHARD_COUNT)
        assert samples["simm_manager_joins_total"] == "1"
        names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
        assert len(names) == len(set(names)), "each metric stands together, declared once"
        code, text = get(f"http://{process.http}/")
        assert code == 200 and "&lt;b&gt;&amp;" in text and "<b>&" not in text
        assert get(f"http://{process.http}/nothing")[0] == 404
        request = urllib.request.Request(f"http://{process.http}/", data=b"x")
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=WAIT_S)
        with caught.value:
            assert caught.value.code == 405


@pytest.fixture
def web() -> Iterator[Callable[..., tuple[Loop, Web, str]]]:
    """A Web on a loop of this thread."""
    opened: list[tuple[Loop, Web]] = []

    def make(tokens: tuple[str, ...] = (), clock: Callable[[], float] = time.monotonic) -> tuple[Loop, Web, str]:
        loop = Loop(clock)
        listener = socket.create_server(("127.0.0.1", 0))
        host, port = listener.getsockname()

        def broken() -> Page:
            raise ZeroDivisionError

        routes = {"/": lambda: Page("x" * 2_000_000), "/healthz": lambda: Page("ok"), "/broken": broken}
        opened.append((loop, Web(loop, listener, routes, tokens)))
        return loop, opened[-1][1], f"{host}:{port}"

    yield make
    for loop, server in opened:
        server.close()
        loop.close()


def ask(loop: Loop, address: str, request: bytes) -> bytes:
    """The whole answer to a request, with the loop run in between."""
    with contextlib.closing(socket.create_connection(parse_address(address), WAIT_S)) as sock:
        sock.sendall(request)
        sock.setblocking(False)
        answer = b""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            loop.run_once(0.005)
            try:
                data = sock.recv(1 << 20)
            except BlockingIOError:
                continue
            except ConnectionResetError:
                return answer
            if not data:
                return answer
            answer += data
    raise AssertionError("no end")


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", b"200"), (b"HEAD / HTTP/1.0\r\n\r\n", b"200"),
        (b"GET /?a=b HTTP/1.1\r\n\r\n", b"200"),
        (b"\r\n\r\n", b"400"), (b"GET /\r\n\r\n", b"400"), (b"GET / FTP/1\r\n\r\n", b"400"),
        (b"\xff\xfe\r\n\r\n", b"400"),
        (b"DELETE / HTTP/1.1\r\n\r\n", b"405"), (b"GET /../etc HTTP/1.1\r\n\r\n", b"404"),
        (b"GET / HTTP/1.1\r\n" + b"a" * REQUEST_BYTES_MAX, b"431"), (b"GET /broken HTTP/1.1\r\n\r\n", b"500"),
    ],
)  # fmt: skip
def test_web_answers(web: Callable[..., tuple[Loop, Web, str]], request_: bytes, status: bytes) -> None:
    loop, server, address = web()
    answer = ask(loop, address, request_)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.split(b" ")[1] == status
    if request_.startswith(b"HEAD"):
        assert body == b"" and b"Content-Length: 2000000" in head
    elif status == b"200":
        assert len(body) == 2_000_000
    assert server.connections == 0


def test_web_tokens(web: Callable[..., tuple[Loop, Web, str]]) -> None:
    loop, _, address = web(("good-token",))
    for header, status in [
        (b"", b"401"), (b"Authorization: Bearer bad-token\r\n", b"401"),
        (b"Authorization: Basic good-token\r\n", b"401"),
        (b"authorization: bearer good-token\r\n", b"200"),
    ]:  # fmt: skip
        assert ask(loop, address, b"GET / HTTP/1.1\r\n" + header + b"\r\n").split(b" ")[1] == status
    assert ask(loop, address, b"GET /healthz HTTP/1.1\r\n\r\n").split(b" ")[1] == b"200"


def test_web_drops_the_slow(web: Callable[..., tuple[Loop, Web, str]]) -> None:
    clock = [0.0]
    loop, server, address = web((), lambda: clock[0])
    with contextlib.closing(socket.create_connection(parse_address(address), WAIT_S)) as sock:
        sock.sendall(b"GET")
        while not server.connections:
            loop.run_once(0.0)
        for _ in range(12):
            clock[0] += 1.0
            loop.run_once(0.0)
        assert server.connections == 0
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""


def test_prometheus_escapes() -> None:
    text = prometheus([("m", "gauge", "About.", {"a": 'x"\\\n'}, 1), ("m", "gauge", "About.", {}, 2.5)])
    assert text == '# HELP m About.\n# TYPE m gauge\nm{a="x\\"\\\\\\n"} 1\nm 2.5\n'


# --- the client -------------------------------------------------------------------------------


def test_client_tries_all_addresses(run: Callable[..., Process]) -> None:
    process = run()
    with socket.create_server(("127.0.0.1", 0)) as server:
        dead = server.getsockname()[1]
    with ManagerClient([("127.0.0.1", dead), ("127.0.0.1", process.port)]) as client:
        assert client.get_map().epoch == 1
        assert repr(client) == f"<ManagerClient ('127.0.0.1', {process.port}) linked>"
    with ManagerClient([("127.0.0.1", dead)]) as client:
        with pytest.raises(TransportError, match=r"python -m simm\.manager"):
            client.get_map()
    with pytest.raises(UsageError):
        ManagerClient([])


def test_client_has_a_deadline(run: Callable[..., Process]) -> None:
    process = run()
    with process.client(deadline_s=0.05) as client:
        client.ping()
        process.send(signal.SIGSTOP)
        with pytest.raises(TransportError, match="deadline"):
            client.ping()
        assert not client.linked
        process.send(signal.SIGCONT)
        client.deadline_s = WAIT_S
        client.ping()
        with pytest.raises(TransportError):
            process.client().fileno()


def test_a_subscriber_hears_of_the_managers_end(run: Callable[..., Process]) -> None:
    process = run()
    with process.client() as client:
        client.subscribe()
        process.end(signal.SIGKILL)
        assert select.select([client], [], [], WAIT_S)[0]
        with pytest.raises(TransportError):
            client.poll_pushes()
        process.start()
        # The next call makes a new link, and the subscription with it.
        client.ping()
        assert next_map(client).epoch == 1
        client.join(1, "a", workers())
        assert next_map(client).epoch == 2


def test_impossible_timing_is_refused_by_the_command() -> None:
    assert Timing().suspect_after < Timing().dead_after
    code, err = fails("--listen", "127.0.0.1:0", "--dead-after", "2")
    assert code == 2 and "larger than suspect_after" in err

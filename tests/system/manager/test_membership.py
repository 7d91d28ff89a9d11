"""The manager command: membership, restarts and moving shards, over the wire."""

from __future__ import annotations

import contextlib
import json
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from simm import manager as manager_module
from simm.cluster.shard_map import ShardMap
from simm.constants import SHARD_COUNT
from simm.control.state_file import StateFile
from simm.errors import TransportError
from simm.manager import EPOCHS_RESERVED, Manager
from simm.net.channel import Refused
from simm.net.loop import Loop
from simm.rpc import Connection, decode, encode
from simm.wire import messages as M
from simm.wire.messages import MapReply, Status, WorkerLoad
from simm.wire.shard_set import lost_limit
from tests.support.child import Child
from tests.support.manager_client import ManagerClient, instance, joining
from tests.support.manager_process import (
    GIB,
    SELDOM,
    WAIT_S,
    Process,
    about,
    arrived,
    get,
    hear,
    next_map,
    owners,
    settle,
    workers,
)
from tests.support.waiting import wait_until

#: A manager that has lost its map collects it for two heartbeats: time enough for what a test does meanwhile.
COLLECTS_LONG = ("--heartbeat-ms", "2000")

# --- membership over the wire -----------------------------------------------------------------


@pytest.mark.quick
def test_join_heartbeat_map_leave(run: Callable[..., Process]) -> None:
    process = run()
    with process.client() as client:
        assert set(owners(client.get_map())) == {None}
        assert client.join(7, "a", workers(GIB, GIB)).heartbeat_ms == 1000
        epoch = client.heartbeat(7, "a", 0, [WorkerLoad(1, 2, 3, 4)] * 2)
        reply = client.get_map(epoch)
        assert reply.epoch == epoch and len(reply.owners) == 2 * SHARD_COUNT and set(owners(reply)) == {"a"}
        assert [(info.node, info.worker, info.instance) for info in reply.workers] == [
            ("a", number, instance(7, "a")) for number in (0, 1)
        ]
        status = client.status()
        assert status["nodes"][0]["state"] == "running" and status["nodes"][0]["workers"][1]["entries"] == 2
        client.ping(5)
        client.leave(7, "a")
        assert client.get_map().epoch == epoch + 1
        with pytest.raises(Refused, match="join again") as caught:
            client.heartbeat(7, "a")
        assert caught.value.status == Status.UNKNOWN_NODE
        assert client.linked, "a refusal breaks no link"
    assert process.ended()[0] == 0


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


def beat(client: ManagerClient, number: int, name: str) -> None:
    """Send a heartbeat with the newest map. On a busy machine it may come too late: then the node joins again."""
    try:
        client.heartbeat(number, name, client.get_map().epoch)
    except Refused as exc:
        assert exc.status == Status.UNKNOWN_NODE, exc
        client.join(number, name, workers())


def test_a_silent_node_loses_its_shards(run: Callable[..., Process]) -> None:
    process = run(None, "--heartbeat-ms", "50")
    with process.client() as quiet, process.client() as client:
        quiet.join(1, "quiet", workers())
        assert client.join(2, "b", workers()).heartbeat_ms == 50

        def lost() -> bool:
            beat(client, 2, "b")
            states = {node["name"]: node["state"] for node in client.status()["nodes"]}
            return set(owners(client.get_map())) == {"b"} and states == {"quiet": "dead", "b": "running"}

        wait_until(lost, "b has all shards", WAIT_S)
        with pytest.raises(Refused):
            quiet.heartbeat(1, "quiet")
        quiet.join(1, "quiet", workers())

        def back() -> bool:
            beat(client, 2, "b")
            beat(quiet, 1, "quiet")
            return set(owners(client.get_map())) == {"b", "quiet"}

        wait_until(back, "quiet has a share again", WAIT_S)


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
        began = time.monotonic()
        # In one piece: the manager finds them all at once. It takes as many turns for them as its processor needs.
        server.sendall(b"".join(encode(joining(1, f"n{number}", workers()), number + 1) for number in range(40)))
        epochs = [next_map(watcher).epoch]
        while epochs[-1] < first + 40:
            epochs.append(next_map(watcher).epoch)
        assert len(watcher.get_map().workers) == 40
        # Whatever the machine does meanwhile: one map in each SETTLE_S, which is far fewer than one a join.
        assert len(epochs) <= 2 + (time.monotonic() - began) / manager_module.SETTLE_S
        assert len(epochs) < 40


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


@pytest.mark.quick
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_restart_keeps_map_and_membership(run: Callable[..., Process], tmp_path: Path, how: int) -> None:
    process = run(tmp_path / "state", *SELDOM)
    with process.client() as client:
        for name in ("a", "b", "c"):
            client.join(1, name, workers())
        client.leave(1, "c")
        client.subscribe()
        deadline = time.monotonic() + WAIT_S
        while not client.status()["manager"]["state_stored"]:
            assert time.monotonic() < deadline
        before = client.get_map()
        code, _ = process.ended(how)
        assert code == (0 if how == signal.SIGTERM else -how)
        with pytest.raises(TransportError):
            client.get_map()
        process.start()
        after = client.get_map()
        assert before.epoch < after.epoch <= lost_limit(before.epoch)
        assert (after.owners, after.workers, after.cluster) == (before.owners, before.workers, before.cluster)
        # The servers go on as they were, once they have joined by the new connection ...
        client.join(1, "a", workers(), epoch=before.epoch)
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
        process.ended(signal.SIGKILL)
        process.start()
        with pytest.raises(Refused) as caught:
            client.heartbeat(9, "a", epoch)
        assert caught.value.status == Status.UNKNOWN_NODE
        client.join(9, "a", workers())
        with pytest.raises(Refused, match=f"map {epoch}"):
            client.heartbeat(9, "a", epoch)
        client.join(9, "a", workers())
        assert client.heartbeat(9, "a", epoch) > epoch, "an epoch that was seen never comes again"
        assert client.get_map().cluster != cluster


def test_a_paused_manager_blames_nobody(run: Callable[..., Process]) -> None:
    """What it is asked after the pause waits in its sockets before that, so it answers in its first turn."""
    process = run(None, "--heartbeat-ms", "200")
    with socket.create_connection(("127.0.0.1", process.port), WAIT_S) as sock:
        conn = Connection()

        def answers(count: int) -> list[Any]:
            found: list[Any] = []
            while len(found) < count:
                conn.receive_data(sock.recv(1 << 16))
                while (frame := conn.next_frame()) is not None:
                    found.append(decode(frame))
            return found

        beat = M.Heartbeat(instance(1, "a"), 0, "a", [])
        while True:
            sock.sendall(encode(joining(1, "a", workers()), 1))
            answers(1)
            began = time.monotonic()
            sock.sendall(encode(beat, 2))
            (beaten,) = answers(1)
            process.send_signal(signal.SIGSTOP)
            wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, "it is stopped")
            if isinstance(beaten, M.HeartbeatAck) and time.monotonic() - began < 0.8:
                break  # it has not missed five heartbeats before it was stopped
            process.send_signal(signal.SIGCONT)
        assert not select.select([], [], [], 1.2)[0]  # the pause is the subject of this test
        sock.sendall(encode(beat, 3) + encode(M.ClusterStatus(0), 4) + encode(M.MapGet(0, 0), 5))
        process.send_signal(signal.SIGCONT)
        again, status, shard_map = answers(3)
        assert isinstance(again, M.HeartbeatAck) and again.epoch == shard_map.epoch == beaten.epoch
        assert json.loads(status.json)["nodes"][0]["state"] == "running"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_it_with_connections_open(run: Callable[..., Process], tmp_path: Path, number: int) -> None:
    process = run(tmp_path)
    with process.client() as client:
        client.subscribe()
        code, err = process.ended(number)
    assert code == 0 and "Traceback" not in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manager.json", "manager.lock"]


def test_it_ends_with_a_process_it_is_told_to(run: Callable[..., Process]) -> None:
    with Child([sys.executable, "-c", "input()"], talks=True) as parent:
        process = run(None, "--end-with", str(parent.pid))
        assert process.running and psutil.pid_exists(process.pid)
        parent.close_input()
        parent.wait()
    assert process.wait() == 0


# --- moving shards ----------------------------------------------------------------------------


def test_a_newcomer_is_filled_and_a_drained_server_emptied(run: Callable[..., Process]) -> None:
    process = run(None, "--moves-at-once", "1000", "--http", "127.0.0.1:0", *SELDOM)
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
        assert samples["simm_manager_shards_moving"] == "1000" and samples["simm_manager_moves_reported_total"] == "2"
        assert samples['simm_worker_shards_moving_out{server="a",worker="0"}'] == "1000"
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
    process = run(tmp_path, "--restart-grace-ms", "600s", *SELDOM)
    with process.client() as client:
        client.join(1, "a", workers())
        client.join(2, "b", workers())
        settle(client, a=1, b=2)
        client.drain("b")
        before = client.get_map()
        client.leave(1, "a", warm=True)
        assert client.get_map().owners == before.owners
        process.ended(signal.SIGKILL)
        process.start()
        assert about(client, "a")["state"] == "left" and about(client, "b")["draining"]
        client.join(3, "a", workers(), warm=True, epoch=before.epoch)
        after = client.get_map()
        assert (after.owners, after.since) == (before.owners, before.since), "its values are still good"
        known = {info.node: info.instance for info in after.workers}
        assert known == {"a": instance(3, "a"), "b": instance(2, "b")}
        client.leave(3, "a", warm=True)
        client.join(4, "a", workers())
        cold = client.get_map()
        assert cold.owners == after.owners and cold.since != after.since and not cold.previous


def test_a_manager_without_its_state_gets_the_map_from_the_servers(run: Callable[..., Process], tmp_path: Path) -> None:
    process = run(tmp_path, *COLLECTS_LONG)
    with process.client() as client, process.client() as other, process.client() as reader:
        client.join(1, "a", workers())
        other.join(2, "b", workers())
        older = other.get_map()
        client.join(3, "c", workers())
        newest = client.get_map()
        process.ended(signal.SIGKILL)
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
        assert client.offer(newest)
        waiting.join(WAIT_S)
        (reply,) = told
        assert reply.cluster == newest.cluster and reply.epoch >= newest.epoch + EPOCHS_RESERVED
        assert (reply.owners, reply.since) == (newest.owners, newest.since)
        assert reply.previous == newest.previous and [info.node for info in reply.workers] == ["a", "b", "c"]
        states = {node["name"]: node["state"] for node in client.status()["nodes"]}
        assert states["c"] == "joining", "known from the map, and not heard from yet"
        assert not client.status()["rebuilding"]
    code, err = process.ended()
    assert code == 0 and "known from the map of epoch" in err and "Traceback" not in err


def test_a_client_that_has_a_map_is_not_given_an_empty_one(run: Callable[..., Process]) -> None:
    process = run(None, *COLLECTS_LONG)
    with process.client() as client, process.client() as reader:
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
        with pytest.raises(TransportError, match="a map that nobody asked for"):
            client.offer(reply)


def test_a_state_file_of_format_1_is_taken_over(run: Callable[..., Process], tmp_path: Path) -> None:
    process = run(tmp_path, *SELDOM)
    with process.client() as client:
        client.join(1, "a", workers())
        client.join(2, "b", workers())
        settle(client, a=1, b=2)
        before = client.get_map()
    process.ended()
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
        client.join(1, "a", workers(), epoch=before.epoch)
        assert client.heartbeat(1, "a", before.epoch) >= before.epoch
    process.ended()
    with contextlib.closing(StateFile(tmp_path, "manager")) as file:
        assert file.load()["cluster"]["format"] == 2


def test_no_map_is_told_before_it_is_stored(tmp_path: Path) -> None:
    """Else an epoch could come again with other owners after a kill, and with values that it does not know of."""
    clock = [0.0]
    loop = Loop(lambda: clock[0])
    ours, theirs = socket.socketpair()
    with contextlib.closing(StateFile(tmp_path, "manager")) as file, ours, theirs:
        manager = Manager(loop, store=file)
        manager.state.save()
        loop.adopt(theirs, manager, "test:1")
        ours.setblocking(False)
        conn = Connection()
        ours.sendall(encode(joining(1, "a", workers()), 1) + encode(M.MapGet(0, 0), 2))
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

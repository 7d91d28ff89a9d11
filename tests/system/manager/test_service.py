"""The manager command: peers that misbehave, tokens, starts that fail, storing, pages, its client."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import select
import signal
import socket
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from simm import manager as manager_module
from simm.cluster.nodes import Timing
from simm.config.parsers import Address
from simm.constants import SHARD_COUNT
from simm.control.state_file import StateFile
from simm.control.state_keeper import RETRY_S
from simm.errors import ConfigError, CorruptionError, SimmError, TransportError, UsageError
from simm.manager import Manager, check_exposure
from simm.net import listeners
from simm.net.channel import Refused
from simm.net.http import Page
from simm.net.loop import Loop
from simm.rpc import Connection, Flag, decode, encode
from simm.wire import messages as M
from simm.wire.messages import Status
from tests.support.manager_client import ManagerClient, joining
from tests.support.manager_process import SELDOM, WAIT_S, Process, fails, get, next_map, workers
from tests.support.ports import reserve_port
from tests.support.waiting import wait_until

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
        (encode(joining(1, "n", workers()), 1).replace(b"/run", b"\xff\xff\xff\xff"), "malformed"),
    ],
)  # fmt: skip
def test_a_malformed_frame_closes_its_connection_and_nothing_else(
    run: Callable[..., Process], data: bytes, says: str
) -> None:
    process = run(None, *SELDOM)
    with process.client() as bystander:
        bystander.join(1, "a", workers())
        with socket.create_connection(("127.0.0.1", process.port), WAIT_S) as bad:
            bad.sendall(data)
            if not says:  # else the manager closes it, and first wants to know whose it is
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
    assert "Traceback" not in process.ended()[1]


def test_half_a_frame_holds_nobody_up(run: Callable[..., Process]) -> None:
    process = run()
    with socket.create_connection(("127.0.0.1", process.port)) as half, process.client() as client:
        half.sendall(encode(M.Ping(1), 1)[:20])
        client.ping()
        half.sendall(encode(M.Ping(1), 1)[20:])
        half.settimeout(WAIT_S)
        assert half.recv(100) == encode(M.Pong(1), 1, flags=Flag.REPLY)


def test_two_hundred_connections(run: Callable[..., Process]) -> None:
    process = run(None, *SELDOM)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(process.client()) for _ in range(200)]
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


@pytest.mark.fault("F32", ci="1 HELLO of later versions", whole="the same")
def test_foreign_versions_are_told(run: Callable[..., Process]) -> None:
    process = run()
    with socket.create_connection(("127.0.0.1", process.port), WAIT_S) as sock:
        sock.sendall(encode(M.Hello(M.PROTOCOL_MAX + 1, M.PROTOCOL_MAX + 3, 0, 0, 0, "", "", []), 1))
        conn = Connection()
        conn.receive_data(sock.recv(1 << 16))
        frame = conn.next_frame()
        assert frame is not None and frame.status == Status.VERSION and "upgrade" in decode(frame).text


# --- tokens and exposure ----------------------------------------------------------------------


@pytest.mark.fault("F26", ci="2 tokens of a rotation, 3 wrong ones", whole="the same")
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
        wait_until(lambda: client.status()["manager"]["unauthorized"] == 4, "it has counted them")


@pytest.mark.fault("F26", ci="old, both, new", whole="the same")
def test_a_rotation(run: Callable[..., Process], tmp_path: Path) -> None:
    """A token is good while its line is in the file that the server has started with, and is refused after that."""
    old, new = "the-old-token-of-two", "the-new-token-of-two"
    tokens = tmp_path / "tokens"
    process = None
    for lines, good in (([old], {old}), ([new, old], {old, new}), ([new], {new})):
        tokens.write_text("".join(f"server nodes-{number} {token}\n" for number, token in enumerate(lines)))
        tokens.chmod(0o600)
        if process is None:
            process = run(tmp_path, "--token-file", str(tokens))
        else:
            process.ended()
            process.start()
        for token in (old, new):
            with process.client(token=token) as client:
                if token in good:
                    client.join(1, "a", workers())
                    continue
                with pytest.raises(Refused, match="token") as caught:
                    client.get_map()
                assert caught.value.status == Status.UNAUTHORIZED
    with process.client(token=new) as client:
        wait_until(lambda: client.status()["manager"]["unauthorized"] == 1, "it has counted it")


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


def test_an_address_that_cannot_be_had() -> None:
    """Nobody has to free what this user may not have, or this host has not."""
    code, err = fails("--listen", "192.0.2.1:0", "--insecure")
    assert code == 1 and "this host has no such address: choose another --listen" in err and "free it" not in err
    with pytest.raises(SimmError, match=r"Permission denied: ports below 1024 are for root, .*: choose another --at$"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(listeners, "listen_tcp", refuse)
            listeners.open_listener(Address("127.0.0.1", 80), "--at")


def refuse(host: str, port: int) -> socket.socket:
    raise PermissionError(13, f"cannot listen on {host}:{port}: Permission denied")


def test_a_second_manager_on_the_same_state(run: Callable[..., Process], tmp_path: Path) -> None:
    process = run(tmp_path)
    code, err = fails("--listen", "127.0.0.1:0", "--state-dir", str(tmp_path))
    assert code == 1 and f"process {process.pid}" in err and "--state-dir" in err
    process.ended(signal.SIGKILL)
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
        ("cut", "damaged"), ("empty", "damaged"), ("foreign", "not a simm manager state"),
        ("other kind", "not a simm manager state"), ("newer", "format 2"), ("bit", "checksum"),
        ("newer cluster", "format 3"),
    ],
)  # fmt: skip
def test_an_unusable_state_file_stops_the_start(tmp_path: Path, how: str, says: str) -> None:
    with contextlib.closing(StateFile(tmp_path, "manager")) as file:
        Manager(Loop(), store=file).state.save()
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


# --- storing ----------------------------------------------------------------------------------


def test_disk_full_is_counted_and_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    loop = Loop(lambda: clock[0])
    with contextlib.closing(StateFile(tmp_path, "manager")) as file:
        manager = Manager(loop, store=file)
        assert manager.state.save_now()
        before = (tmp_path / "manager.json").read_bytes()
        fsync = os.fsync

        def full(fd: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        manager._apply(manager.cluster.join(clock[0], M.Join(1, 0, "a", workers())))
        for _ in range(3):
            clock[0] += 0.1
            loop.run_once(0.0)
        assert manager.state.failures == 1 and manager.status()["nodes"]
        assert (tmp_path / "manager.json").read_bytes() == before
        assert not (tmp_path / "manager.tmp").exists()
        assert manager.pages.healthz() == Page("ok; the state cannot be stored\n")
        clock[0] += RETRY_S
        loop.run_once(0.0)
        assert manager.state.failures == 2
        monkeypatch.setattr(os, "fsync", fsync)
        clock[0] += RETRY_S
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
        manager.state.save()
        loop.adopt(theirs, manager, "test:1")
        conn = Connection()
        for number in range(20):
            ours.sendall(encode(joining(number, f"n{number}", workers()), 1))
            loop.run_once(1.0)
            conn.receive_data(ours.recv(1 << 20))
            frame = conn.next_frame()
            assert frame is not None
            assert decode(frame).epoch <= file.load()["epochs_reserved"]
        assert manager.state.writes < 20
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


def test_pages(run: Callable[..., Process]) -> None:
    process = run(None, "--http", "127.0.0.1:0", *SELDOM)
    with process.client() as client:
        client.join(1, "<b>&", workers())
        assert get(f"http://{process.http}/healthz") == (200, "ok\n")
        assert get(f"http://{process.http}/readyz") == (200, "ready, leads\n")
        code, text = get(f"http://{process.http}/metrics?x=1")
        samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        assert code == 200 and samples['simm_manager_nodes{state="joining"}'] == "1"
        assert samples['simm_worker_shards{server="<b>&",worker="0"}'] == str(SHARD_COUNT)
        assert samples["simm_manager_joins_total"] == "1"
        names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
        assert len(names) == len(set(names)), "each metric stands together, declared once"
        code, text = get(f"http://{process.http}/")
        assert code == 200 and "<b>&" not in text, "a file; names come by the API"
        code, text = get(f"http://{process.http}/api/v1/status")
        assert code == 200 and json.loads(text)["nodes"][0]["name"] == "<b>&"
        assert get(f"http://{process.http}/nothing")[0] == 404
        request = urllib.request.Request(f"http://{process.http}/", data=b"x")
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=WAIT_S)
        with caught.value:
            assert caught.value.code == 405


# --- the client -------------------------------------------------------------------------------


def test_client_tries_all_addresses(run: Callable[..., Process]) -> None:
    process = run()
    dead = reserve_port()
    with ManagerClient([("127.0.0.1", dead), ("127.0.0.1", process.port)], deadline_s=WAIT_S) as client:
        assert client.get_map().epoch == 1
        assert repr(client) == f"<ManagerClient ('127.0.0.1', {process.port})>"
    with ManagerClient([("127.0.0.1", dead)]) as client:
        with pytest.raises(TransportError, match="start one with `simm manager`"):
            client.get_map()
    with pytest.raises(UsageError):
        ManagerClient([])


def test_client_has_a_deadline(run: Callable[..., Process]) -> None:
    process = run()
    with process.client(deadline_s=0.05) as client:

        def answered() -> bool:
            with contextlib.suppress(TransportError):
                client.ping()
            return client.linked

        wait_until(answered, "an answer within the deadline", WAIT_S)
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, "it is stopped")
        with pytest.raises(TransportError, match="deadline"):
            client.ping()
        assert not client.linked
        process.send_signal(signal.SIGCONT)
        client.deadline_s = WAIT_S
        client.ping()
        with pytest.raises(TransportError):
            process.client().fileno()


def test_a_subscriber_hears_of_the_managers_end(run: Callable[..., Process]) -> None:
    process = run(None, *SELDOM)  # on a busy machine the node would be dead before the next map
    with process.client() as client:
        client.subscribe()
        process.ended(signal.SIGKILL)
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

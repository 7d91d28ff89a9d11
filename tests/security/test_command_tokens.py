"""`simm index` and `simm events` follow their token file, and log what servers log."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("msgspec", reason="the extra simm-store[index] is not installed")
pytest.importorskip("zmq", reason="the extra simm-store[index] is not installed")
pytest.importorskip("xxhash", reason="the extra simm-store[index] is not installed")

from simm.config.startup import live_tokens, read_tokens
from simm.errors import ConfigError
from tests.support.child import child_environment
from tests.support.waiting import WAIT_S, wait_until

OLD, NEW = "the-token-of-all-routers", "the-token-of-the-next-year"


@pytest.fixture
def tokens(tmp_path: Path) -> Callable[..., Path]:
    """Replaces the file by one with these tokens, all of them clients'."""

    def written(*secrets: str) -> Path:
        fresh = tmp_path / "fresh"
        fresh.write_text("".join(f"client routers-{number} {secret}\n" for number, secret in enumerate(secrets)))
        fresh.chmod(0o600)
        os.replace(fresh, tmp_path / "tokens")
        return tmp_path / "tokens"

    return written


@contextlib.contextmanager
def running(*words: str) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the words of a command's READY line, and a list that has its log's lines once it has ended."""
    log: list[str] = []
    process = subprocess.Popen(
        [sys.executable, "-m", "simm", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=child_environment(),
    )  # fmt: skip
    try:
        assert process.stdout is not None
        ready = process.stdout.readline().split()
        assert ready[:2] == ["READY", words[0]], ready
        yield ready, log
    finally:
        process.send_signal(signal.SIGTERM)
        log += process.communicate(timeout=WAIT_S)[1].splitlines()
    assert process.returncode == 0, log


def asked(at: str, path: str, token: str) -> int:
    """Return the status of a page at a port of all addresses."""
    request = urllib.request.Request(f"http://127.0.0.1:{at.rpartition(':')[2]}{path}")
    request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as exc:
        return exc.code


def called(at: str, token: str) -> str:
    """Return the status of a call by gRPC that has no message: INVALID_ARGUMENT once the token is taken."""
    grpc = pytest.importorskip("grpc", reason="the extra simm-store[grpc] is not installed")
    with grpc.insecure_channel(f"127.0.0.1:{at.rpartition(':')[2]}") as channel:
        call = channel.unary_unary("/indexer.v1.IndexerService/GetPodScores")
        with pytest.raises(grpc.RpcError) as caught:
            call(b"", timeout=WAIT_S, metadata=[("authorization", f"Bearer {token}")])
    return str(caught.value.code().name)


def test_the_index_follows_its_token_file(tokens: Callable[..., Path]) -> None:
    pytest.importorskip("grpc", reason="the extra simm-store[grpc] is not installed")
    path = tokens(OLD)
    with running("index", "--at", "0.0.0.0:0", "--grpc", "0.0.0.0:0", "--token-file", str(path)) as (ready, log):
        at, rpc = ready[2], ready[3].removeprefix("grpc=")
        assert [asked(at, "/workers", token) for token in (OLD, NEW)] == [200, 401], "positive control"
        assert [called(rpc, token) for token in (OLD, NEW)] == ["INVALID_ARGUMENT", "UNAUTHENTICATED"]
        tokens(NEW)
        wait_until(lambda: asked(at, "/workers", NEW) == 200, "the new token is taken", pause_s=0.1)
        wait_until(lambda: called(rpc, NEW) == "INVALID_ARGUMENT", "the new token is taken by gRPC", pause_s=0.1)
        assert asked(at, "/workers", OLD) == 401 and called(rpc, OLD) == "UNAUTHENTICATED"
    assert any("has changed: 1 tokens" in line for line in log), "the log is a server's"


def test_the_publisher_of_events_follows_its_token_file(tokens: Callable[..., Path], tmp_path: Path) -> None:
    path = tokens(OLD)
    at = f"ipc://{tmp_path}/stream,ipc://{tmp_path}/replay"
    words = ("events", "--rfc1527", at, "--http", "0.0.0.0:0", "--token-file", str(path))
    with running(*words) as (ready, _):
        page = ready[-1].removeprefix("http=")
        assert [asked(page, "/metrics", token) for token in (OLD, NEW)] == [200, 401], "positive control"
        tokens(NEW)
        wait_until(lambda: asked(page, "/metrics", NEW) == 200, "the new token is taken", pause_s=0.1)
        assert asked(page, "/metrics", OLD) == 401


def speak_wrong(path: Path) -> None:
    """Be a peer that does not speak ZeroMQ, until it is closed."""
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(WAIT_S)
        peer.connect(str(path))
        with contextlib.suppress(ConnectionError):
            peer.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"x" * 200)
            while peer.recv(4096):
                pass


def test_the_publisher_of_events_logs_peers_that_speak_wrong(tmp_path: Path) -> None:
    """Commands show errors only, and so did this one, which is a server."""
    at = f"ipc://{tmp_path}/stream,ipc://{tmp_path}/replay"
    with running("events", "--rfc1527", at) as (_, log):
        speak_wrong(tmp_path / "stream")
    (line,) = [line for line in log if "closing the connection of a peer" in line]
    assert " WARNING " in line
    with running("events", "--rfc1527", at, "--log-level", "error") as (_, log):
        speak_wrong(tmp_path / "stream")
    assert log == [], "negative control: whoever names the level has it"


def test_a_file_of_clients_alone_is_read_as_the_commands_read_it(tokens: Callable[..., Path]) -> None:
    """A manager needs a server's token, which the index's callers are not to have."""
    path = tokens(OLD)
    followed = live_tokens(path, read_tokens)
    tokens(NEW, OLD)
    assert not followed.refresh() and followed.refresh()  # type: ignore[attr-defined]
    assert [each.secret for each in followed] == [NEW, OLD]
    with pytest.raises(ConfigError, match="no data server can join"):
        live_tokens(path)

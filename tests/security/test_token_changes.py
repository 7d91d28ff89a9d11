"""A token that is removed from a server's file counts no more, also for connections that are open."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from simm.config.startup import TokenFile, live_tokens
from simm.config.tokens import TokenRole
from simm.errors import ConfigError, TransportError
from simm.net import token_watch
from simm.net.channel import Channel
from simm.net.token_watch import watch_tokens
from simm.wire import messages as M
from simm.wire.auth import Asker, Gate
from simm.wire.hello import client_hello
from simm.wire.messages import Status
from tests.support.waiting import wait_until
from tests.support.worker_thread import WAIT_S, StreamThread, WorkerThread

SERVER = "server nodes the-token-of-all-servers"
RED, BLUE = "client red the-token-of-team-red red", "client blue the-token-of-team-blue"


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def written(*lines: str, mode: int = 0o600) -> Path:
        fresh = tmp_path / "fresh"
        fresh.write_text("\n".join(lines) + "\n")
        fresh.chmod(mode)
        os.replace(fresh, tmp_path / "tokens")
        return tmp_path / "tokens"

    return written


def test_a_file_is_read_again_once_it_stands_still(write: Callable[..., Path]) -> None:
    tokens = TokenFile(write(SERVER, RED))
    assert not tokens.refresh() and len(tokens) == 2
    write(SERVER, RED, BLUE)
    assert not tokens.refresh() and len(tokens) == 2, "it may be half written"
    write(SERVER, BLUE)
    assert not tokens.refresh()
    assert tokens.refresh() and [token.label for token in tokens] == ["nodes", "blue"]
    assert not tokens.refresh()
    write(SERVER, BLUE)
    assert not tokens.refresh() and not tokens.refresh(), "another file with the same tokens"


@pytest.mark.parametrize("fault", ["", "short", BLUE, "cleint a the-token-of-team-red", "removed", "mode"])
def test_a_file_that_is_of_no_use_changes_nothing(
    write: Callable[..., Path], caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    tokens = TokenFile(write(SERVER, RED))
    if fault == "removed":
        write(SERVER).unlink()
    elif fault == "mode":
        write(SERVER, mode=0o644)
    else:
        write(fault)
    assert not tokens.refresh() and not tokens.refresh()
    assert [token.label for token in tokens] == ["nodes", "red"]
    assert len(caplog.records) == 1 and "stay in use" in caplog.text and "team-red" not in caplog.text
    assert not tokens.refresh() and len(caplog.records) == 1, "once for each change"
    write(SERVER)
    assert not tokens.refresh() and tokens.refresh() and len(tokens) == 1


def test_without_a_file_nobody_is_asked(write: Callable[..., Path]) -> None:
    assert live_tokens(None) == ()
    with pytest.raises(ConfigError):
        live_tokens(write(RED))


@pytest.fixture
def stream(write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[StreamThread]:
    monkeypatch.setattr(token_watch, "LOOK_S", 0.02)
    with WorkerThread() as worker, StreamThread(worker.path, tokens=live_tokens(write(SERVER, RED, BLUE))) as running:
        yield running


def connected(stream: StreamThread, token: str, namespace: str) -> Channel:
    channel = Channel(socket.create_connection(stream.address), WAIT_S)
    asker = Asker(token, M.Service.STREAM, M.Role.CLIENT)
    proof = asker.prove(channel.call(asker.auth))
    assert isinstance(proof, M.Prove)
    channel.call(proof)
    channel.call(client_hello(M.Role.CLIENT, namespace=namespace))
    return channel


def closes(channel: Channel) -> bool:
    try:
        channel.call(M.Ping(0))
    except TransportError:
        return True
    return False


@pytest.mark.parametrize("watched", [True, False], ids=["watched", "unwatched"])
def test_connections_of_a_removed_token_are_closed(
    stream: StreamThread, write: Callable[..., Path], watched: bool
) -> None:
    red, blue = connected(stream, RED.split()[2], "red"), connected(stream, BLUE.split()[2], "any")
    tokens = stream.stream.tokens
    assert isinstance(tokens, TokenFile)
    if watched:
        watch_tokens(stream.loop, tokens, stream.stream)
    else:
        write(SERVER, BLUE)
        assert not tokens.refresh() and tokens.refresh()
        assert not closes(red), "the control: an open connection outlives its token"
        red.close(), blue.close()
        return
    write(SERVER, BLUE)
    wait_until(lambda: closes(red), "the connection of a removed token is closed")
    assert not closes(blue)
    with pytest.raises(TransportError, match="wrong or missing token"):
        connected(stream, RED.split()[2], "red")
    write(SERVER, RED, BLUE + " any=1G")
    wait_until(lambda: closes(blue), "its rights are others")
    connected(stream, RED.split()[2], "red").close()
    red.close(), blue.close()


def test_a_token_that_goes_between_auth_and_prove_opens_nothing(write: Callable[..., Path]) -> None:
    tokens = TokenFile(write(SERVER, RED))
    gate = Gate(M.Service.MANAGER, tokens)
    asker = Asker(RED.split()[2], M.Service.MANAGER, M.Role.CLIENT)
    proof = asker.prove(gate.take(asker.auth)[0])
    assert isinstance(proof, M.Prove)
    write(SERVER)
    assert not tokens.refresh() and tokens.refresh()
    answer, status = gate.take(proof)
    assert status == Status.UNAUTHORIZED and isinstance(answer, M.Error) and not gate.open and gate.token is None
    assert [token.role for token in tokens] == [TokenRole.SERVER]

"""A token that is removed from a server's file counts no more, also for connections that are open."""

from __future__ import annotations

import errno
import grp
import os
import pwd
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from simm.config.startup import AGAIN, TokenFile, live_tokens
from simm.config.tokens import TokenRole, parse_tokens, quotas_of
from simm.errors import ConfigError, TransportError
from simm.net import token_watch
from simm.net.channel import Channel
from simm.net.token_watch import watch_tokens
from simm.wire import messages as M
from simm.wire.auth import Asker, Gate
from simm.wire.hello import client_hello
from simm.wire.messages import Status
from tests.support.tokens import old_tokens
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


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ESTALE])
def test_a_token_that_was_removed_while_the_file_could_not_be_read(
    write: Callable[..., Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Nothing changes the file again when the trouble has passed."""
    tokens = TokenFile(write(SERVER, RED))
    write(SERVER)

    def failing(*_: object, **_named: object) -> str:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", failing)
        for _ in range(AGAIN + 1):
            assert not tokens.refresh()
        assert len(caplog.records) == 1 and "stay in use" in caplog.text and len(tokens) == 2
        assert not tokens.refresh() and len(caplog.records) == 2, "once in so many attempts"
    assert tokens.refresh() and [token.label for token in tokens] == ["nodes"]
    assert not tokens.refresh()


def test_a_file_that_may_not_be_read_has_its_users_looked_up_once(
    write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory service may take seconds for it, in every event loop every second."""
    tokens = TokenFile(write(SERVER, RED))
    write(SERVER)
    asked: list[int] = []
    users, groups = pwd.getpwuid, grp.getgrgid
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: asked.append(uid) or users(uid))
    monkeypatch.setattr(grp, "getgrgid", lambda gid: asked.append(gid) or groups(gid))

    def denied(*_: object, **_named: object) -> str:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", denied)
        for _ in range(AGAIN):
            assert not tokens.refresh()
    assert len(asked) == 4, "this process, and the file: a user and a group of each"
    assert tokens.refresh() and len(tokens) == 1, "it is tried each time"


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


def test_another_quota_closes_no_connection(stream: StreamThread, write: Callable[..., Path]) -> None:
    red, blue = connected(stream, RED.split()[2], "red"), connected(stream, BLUE.split()[2], "any")
    tokens, changes = stream.stream.tokens, []
    assert isinstance(tokens, TokenFile)
    watch_tokens(stream.loop, tokens, stream.stream, lambda: changes.append(quotas_of(tokens, 1, 2)))
    write(SERVER, RED + "=1G", BLUE)
    wait_until(lambda: changes == [{"red": 1 << 29}], "the new quota counts")
    write(SERVER, RED + "=2G more=1G", BLUE)
    wait_until(lambda: len(changes) == 2, "the next one too")
    wait_until(lambda: closes(red), "its rights are others now")
    assert not closes(blue) and changes[1] == {"red": 1 << 30, "more": 1 << 29}
    connected(stream, RED.split()[2], "more").close()
    red.close(), blue.close()


def test_the_rights_of_tokens() -> None:
    """All that a token says but its quotas: with other rights than before no connection goes on."""
    lines = [
        "client red T red=1G", "client red T red=2G", "client red T red", "client red T red blue", "client red T",
        "client rouge T red", "server red T red", "server red T", "server red T red=1G", "server red T red=2G",
        "admin red T", "client red U red",
    ]  # fmt: skip
    made = [parse_tokens(line.replace("T", "T" * 20).replace("U", "U" * 20), "here")[0] for line in lines]
    assert made[0].rights == made[1].rights == made[2].rights
    assert len({token.rights for token in made}) == len(made) - 2
    old = old_tokens("T" * 20)[0]
    assert old.rights not in {token.rights for token in made}


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

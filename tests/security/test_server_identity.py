"""A data server is who has its secret, and speaks by one connection. What a map tells everybody proves nothing."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from simm.errors import TransportError
from simm.net.channel import Refused
from simm.wire import messages as M
from simm.wire.identity import SECRET_BYTES
from simm.wire.messages import Role, Status
from simm.wire.shard_set import bitmap_of
from tests.support.manager_client import ManagerClient, instance, joining, secret_of
from tests.support.manager_process import WAIT_S, Process, about, owners, workers
from tests.support.waiting import wait_until

EVIL = "6.6.6.6"


def refused(client: ManagerClient, msg: Any) -> int:
    """The status of the refusal."""
    with pytest.raises(Refused) as caught:
        client.call(msg, M.Done)
    return caught.value.status


def takeovers(known: int, name: str) -> list[M.Join]:
    """What a client can try that has seen a map: the instance in it, and whatever secret it can think of."""
    evil = workers(host=EVIL)
    own = secret_of(666)
    guesses = (b"", b"\0" * SECRET_BYTES, own, known.to_bytes(SECRET_BYTES, "little"), own + own, name.encode())
    return [M.Join(known, warm, name, evil, 0, 0, guess) for guess in guesses for warm in (0, 1)]


@pytest.mark.quick
def test_what_a_map_says_takes_no_server_over(run: Callable[..., Process]) -> None:
    process = run()
    with process.client() as server, process.client() as attacker:
        server.join(1, "a", workers())
        epoch = server.heartbeat(1, "a", server.get_map().epoch)
        before = attacker.get_map()
        known = before.workers[0].instance
        for join in takeovers(known, "a"):
            assert refused(attacker, join) == Status.UNAUTHORIZED
        for msg in (
            M.Heartbeat(known, 1 << 40, "a", []),
            M.Leave(known, "a", 0),
            M.Leave(known, "a", 1),
            M.Moved(known, epoch, "a", 0, bitmap_of(range(100))),
        ):
            assert refused(attacker, msg) == Status.UNKNOWN_NODE
        assert attacker.get_map() == before and about(server, "a")["state"] == "running"
        assert server.heartbeat(1, "a", epoch) == epoch


def test_nobody_else_s_connection_frees_a_name(run: Callable[..., Process]) -> None:
    """A connection that has said the server's name, and closes, is not the server's connection."""
    process = run()
    with process.client() as server, process.client() as attacker:
        server.join(1, "a", workers())
        known = server.get_map().workers[0].instance
        for number in range(3):
            with process.client() as passer:
                refused(passer, M.Heartbeat(known, 0, "a", []))
            with pytest.raises(Refused) as caught:
                attacker.join(100 + number, "a", workers(host=EVIL))
            assert caught.value.status == Status.NAME_TAKEN
        assert {info.host for info in attacker.get_map().workers} == {"10.0.0.1"}


@pytest.mark.quick
def test_a_server_that_lost_its_connection_joins_at_once(run: Callable[..., Process]) -> None:
    """The manager may still take the old connection for alive. Only the new one speaks for the server then."""
    process = run()
    with process.client() as old, process.client() as new:
        old.join(1, "a", workers())
        new.join(1, "a", workers())
        assert new.heartbeat(1, "a", new.get_map().epoch)
        with pytest.raises(Refused) as caught:
            old.leave(1, "a")
        assert caught.value.status == Status.UNKNOWN_NODE
        old.close()
        with process.client() as other:
            wait_until(lambda: other.status()["manager"]["connections"] == 2, "the old connection's end has arrived")
            with pytest.raises(Refused) as caught:
                other.join(2, "a", workers())
            assert caught.value.status == Status.NAME_TAKEN, "it was not the server's any more"
        assert set(owners(new.get_map())) == {"a"} and about(new, "a")["state"] == "running"


@pytest.mark.parametrize("state", ["kept", "lost"])
def test_a_restarted_manager_knows_its_servers_by_their_secrets(
    run: Callable[..., Process], tmp_path: Path, state: str
) -> None:
    """Also one that knows an instance from a map alone, and has never seen its secret."""
    process = run(tmp_path, "--heartbeat-ms", "20000")  # for two of them a manager without its state waits for maps
    with process.client(deadline_s=WAIT_S) as server, process.client(deadline_s=WAIT_S) as attacker:
        server.join(1, "a", workers())
        server.join(1, "b", workers())
        newest = server.get_map()
        process.ended(signal.SIGKILL)
        if state == "lost":
            (tmp_path / "manager.json").unlink()
        process.start()
        for join in takeovers(instance(1, "b"), "b"):
            assert refused(attacker, join._replace(epoch=newest.epoch)) == Status.UNAUTHORIZED
        wants = server.join(1, "a", workers(), epoch=newest.epoch).wants_map
        assert wants == (state == "lost")
        if wants:
            assert server.offer(newest)
            for join in takeovers(instance(1, "b"), "b"):
                assert refused(attacker, join._replace(epoch=newest.epoch)) == Status.UNAUTHORIZED
        server.join(1, "b", workers(), epoch=newest.epoch)
        after = server.get_map()
        assert (after.owners, after.workers, after.cluster) == (newest.owners, newest.workers, newest.cluster)


def test_a_map_is_taken_from_a_server_s_connection_only(run: Callable[..., Process]) -> None:
    process = run()
    with process.client() as old, process.client() as new:
        newest = old.get_map()
        assert old.join(1, "a", workers(), epoch=newest.epoch + 100).wants_map
        new.join(1, "a", workers())
        with pytest.raises(TransportError, match="nobody asked for"):
            old.offer(newest._replace(epoch=newest.epoch + 100))


@pytest.mark.quick
def test_who_has_seen_a_join_and_may_join_takes_the_server_over(run: Callable[..., Process], tmp_path: Path) -> None:
    """As SECURITY.md says. Without a role that may join, the secret is of no use."""
    tokens = {role: f"the-token-of-a-{role}-here" for role in ("client", "server")}
    file = tmp_path / "tokens"
    file.write_text("".join(f"{role} some-{role} {token}\n" for role, token in tokens.items()))
    file.chmod(0o600)
    process = run(None, "--token-file", str(file))
    seen = joining(1, "a", workers(host=EVIL))
    with process.client(token=tokens["server"]) as server:
        server.join(1, "a", workers())
        with process.client(token=tokens["client"], role=Role.CLIENT) as reader:
            assert refused(reader, seen) == Status.UNAUTHORIZED
        assert {info.host for info in server.get_map().workers} == {"10.0.0.1"}
        with process.client(token=tokens["server"]) as reader:
            reader.call(seen, M.Joined)
            assert {info.host for info in reader.get_map().workers} == {EVIL}
            assert refused(server, M.Leave(instance(1, "a"), "a", 0)) == Status.UNKNOWN_NODE
            server.join(1, "a", workers())
            assert {info.host for info in server.get_map().workers} == {"10.0.0.1"}, "it takes its name back"

"""A cluster whose token file has roles, namespaces and a quota, as its users meet it: clients and commands."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from simm import cli
from simm.arena.reader import ArenaReader
from simm.client import Client
from simm.errors import TransportError
from simm.wire.messages import Status
from tests.support.waiting import wait_until

SECRETS = {name: f"the-secret-token-of-{name}" for name in ("ops", "nodes", "team", "engines")}
LINES = {
    "ops": f"admin ops {SECRETS['ops']}",
    "nodes": f"server nodes {SECRETS['nodes']}",
    "team": f"client team {SECRETS['team']} theirs=4M",
    "engines": f"client engines {SECRETS['engines']}",
}
MIB = 1 << 20


def token_file(folder: Path, *names: str) -> Path:
    path = folder / "-".join(names)
    path.write_text("# who may do what\n" + "\n".join(LINES[name] for name in names) + "\n")
    path.chmod(0o600)
    return path


def plant_and_read(manager: str, token: str, bound: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that is bound to a namespace stores under the digests of another one's keys; who reads these misses."""
    keys = [f"key{number}" for number in range(20)]
    with (
        Client(manager, token=token, namespace="others", path="shm") as near,
        Client(manager, token=token, namespace="others", path="tcp") as far,
    ):
        assert near.wait_ready(60.0) and far.wait_ready(60.0)
        planted = [near.digest(key) for key in keys]
        assert not any(bound.put_digests(planted, [memoryview(b"planted")] * len(keys)))
        for reader in (near, far):
            assert [reader.get(key) for key in keys] == reader.get_many(keys) == [None] * len(keys)
            assert reader.get_into_many(keys, [bytearray(7) for _ in keys]) == [None] * len(keys)
            assert not reader.view(keys[0])
        with monkeypatch.context() as patch:
            patch.setattr(ArenaReader, "is_own", lambda *_: True)
            assert near.get(keys[0]) == near.get_many(keys)[7] == b"planted", "the control"
        assert near.put(keys[0], b"right") and far.get(keys[0]) == near.get(keys[0]) == b"right"
        assert bound.delete_digests(planted) == [Status.NOT_FOUND] + [Status.OK] * 19


def test_roles_from_the_token_file_on(
    make_cluster: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("SIMM_MANAGER", "SIMM_TOKEN_FILE", "SIMM_NAMESPACE"):
        monkeypatch.delenv(name, raising=False)
    cluster = make_cluster(memory="64M", environment={"SIMM_TOKEN_FILE": str(token_file(tmp_path, *LINES))})
    token = {name: SECRETS[name] for name in LINES}
    with pytest.raises(TransportError, match=r"refuses this client.*'team' may not use the namespace 'default'"):
        Client(cluster.manager, token=token["team"])

    with (
        Client(cluster.manager, token=token["engines"], namespace="theirs", path="tcp") as free,
        Client(cluster.manager, token=token["team"], namespace="theirs", path="tcp") as team,
        Client(cluster.manager, token=token["team"], namespace="theirs", path="shm") as near,
    ):
        assert all(client.wait_ready(60.0) for client in (free, team, near))
        assert team.put("k", b"value") and near.get("k") == team.get("k") == free.get("k") == b"value"
        assert near.put("n", b"value") and team.get("n") == b"value"
        plant_and_read(cluster.manager, token["engines"], team, monkeypatch)
        stored = [client.put(f"{n}", bytes(MIB)) for n, client in enumerate((team, near, free) * 3)]
        assert stored.count(True) == 3, "4 MiB, of which the small values hold a part"
        for client in (team, near, free):
            assert not client.put("more", bytes(MIB))
        with Client(cluster.manager, token=token["engines"], namespace="others") as others:
            assert others.wait_ready(60.0) and others.put("more", bytes(MIB)) and team.get("more") is None
        stats = cluster.worker_stats()
        assert stats["put_failures"]["over_quota"] == 9 and 3 * MIB < stats["quotas"]["theirs"]["used_bytes"] <= 4 * MIB

    monkeypatch.setattr("simm.tools.nodes.REACH_S", 60.0)  # on a busy machine a worker is not down after 3 s

    def command(name: str, *arguments: str) -> tuple[int, str]:
        monkeypatch.setenv("SIMM_TOKEN_FILE", str(token_file(tmp_path, *name.split("-"))))
        code = cli.main([*arguments, "--manager", cluster.manager])
        said = "".join(capfd.readouterr())
        assert not any(secret in said for secret in SECRETS.values())
        return code, said

    code, said = command("team", "status")
    assert code and "may not use the namespace 'default'" in said and "SIMM_NAMESPACE" in said
    monkeypatch.setenv("SIMM_NAMESPACE", "theirs")
    assert command("team", "status")[0] == 0
    for name, role in (("team", "client"), ("nodes", "server")):
        code, said = command(name, "node", "resume", cluster.name)
        assert code and f"takes a token with the role admin; the token '{name}' has the role {role}" in said
    assert command("team-engines-nodes-ops", "node", "resume", cluster.name)[0] == 0, "it proves the highest"
    logs = [cluster.log(module) for module in ("manager", "dataserver")]
    wait_until(lambda: "'nodes' has the role server" in logs[0].read_text(), "the manager has logged the refusal")
    assert not any(secret in log.read_text() for secret in SECRETS.values() for log in logs)


def is_refused(manager: str, token: str) -> bool:
    try:
        Client(manager, token=token, namespace="theirs").close()
    except TransportError as exc:
        return "wrong or missing token" in str(exc)
    return False


def test_a_removed_token_counts_no_more_and_comes_back(make_cluster: Any, tmp_path: Path) -> None:
    """Without a restart of manager or data server, and for clients that are connected."""
    file = token_file(tmp_path, *LINES)
    cluster = make_cluster(memory="64M", environment={"SIMM_TOKEN_FILE": str(file)})
    with (
        Client(cluster.manager, token=SECRETS["team"], namespace="theirs", path="tcp") as team,
        Client(cluster.manager, token=SECRETS["engines"], namespace="theirs", path="tcp") as engines,
    ):
        assert team.wait_ready(60.0) and engines.wait_ready(60.0)
        assert team.put("k", b"value") and engines.get("k") == b"value"
        os.replace(token_file(tmp_path, "ops", "nodes", "engines"), file)
        # Not the key that others look at: a put may still be taken while the servers read the file.
        wait_until(lambda: team.get("k") is None and not team.put("again", b"value"), "its connections are closed")
        assert engines.get("k") == b"value" and engines.put("l", b"value")
        # The manager looks at the file by itself, and may do so later than the data server.
        wait_until(lambda: is_refused(cluster.manager, SECRETS["team"]), "the manager refuses it too")
        os.replace(token_file(tmp_path, "nodes", "ops", "engines", "team"), file)
        wait_until(lambda: team.get("k") == b"value" and team.put("m", b"value"), "it is let in again")


def test_quotas_follow_the_token_file(make_cluster: Any, tmp_path: Path) -> None:
    """A larger one, and the first one of a namespace that holds more: without a restart, and for open connections."""
    file = token_file(tmp_path, *LINES)
    cluster = make_cluster(memory="64M", environment={"SIMM_TOKEN_FILE": str(file)})
    with (
        Client(cluster.manager, token=SECRETS["team"], namespace="theirs", path="tcp") as team,
        Client(cluster.manager, token=SECRETS["engines"], namespace="others", path="shm") as others,
    ):
        assert team.wait_ready(60.0) and others.wait_ready(60.0)
        assert sum(team.put(f"{n}", bytes(MIB)) for n in range(6)) == 4
        assert all(others.put(f"{n}", bytes(MIB)) for n in range(3))
        file.with_name("new").write_text(file.read_text().replace("theirs=4M", "theirs=6M others=2M"))
        file.with_name("new").chmod(0o600)
        os.replace(file.with_name("new"), file)
        wait_until(lambda: team.put("4", bytes(MIB)), "the larger quota holds")
        wait_until(lambda: not others.put("more", bytes(MIB)), "what was there is counted")
        quotas = cluster.worker_stats()["quotas"]
        assert (quotas["theirs"]["quota_bytes"], quotas["others"]["quota_bytes"]) == (6 * MIB, 2 * MIB)
        assert quotas["others"]["used_bytes"] >= 3 * MIB and others.get("0") == bytes(MIB), "its values stay"
        assert team.put("5", bytes(MIB)) and not team.put("6", bytes(MIB))
        assert all(others.delete(f"{n}") for n in range(3)) and others.put("again", bytes(MIB))

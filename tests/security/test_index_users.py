"""Users of one host at ``simm index`` on loopback: it takes requests of its own user, root, those named, and tokens.

Its requests change what it tells routers, and ask the store with its token which prompts are there.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("msgspec", reason="the extra simm-store[index] is not installed")
pytest.importorskip("zmq", reason="the extra simm-store[index] is not installed")
pytest.importorskip("xxhash", reason="the extra simm-store[index] is not installed")

from tests.support.child import child_environment
from tests.support.other_user import UID, needs_root, run_as
from tests.support.waiting import WAIT_S

pytestmark = needs_root

TOKEN = "the-token-of-this-index"
PUBLISHER = {"endpoint": "tcp://127.0.0.1:1", "instance_id": "theirs", "modelname": "m", "block_size": 16}
INSTANCE = {"instance_id": "theirs", "ip": "127.0.0.1", "http_port": 1}

#: Send each request of a list, and print the statuses; a gRPC call's too, if there is a port.
ASK = """if True:
    import http.client, json
    at, requests, token, rpc = sys.argv[1:]
    heard = []
    for method, path, body in json.loads(requests):
        link = http.client.HTTPConnection(at, timeout=60)
        headers = {"Content-Type": "application/json"} | ({"Authorization": "Bearer " + token} if token else {})
        link.request(method, path, None if body is None else json.dumps(body), headers)
        heard.append(link.getresponse().status)
        link.close()
    if rpc:
        import grpc
        call = grpc.insecure_channel(rpc).unary_unary("/indexer.v1.IndexerService/GetPodScores")
        try:
            call(b"", timeout=60, metadata=[("authorization", "Bearer " + token)] if token else [])
        except grpc.RpcError as exc:
            heard.append(exc.code().name)
    print(json.dumps(heard))
"""

GUARDED = [
    ("POST", "/register", PUBLISHER), ("POST", "/query", {"model": "m", "token_ids": [1]}),
    ("POST", "/query_by_hash", {"model": "m", "seq_hashes": [1]}), ("POST", "/score", {"model": "m", "token_ids": [1]}),
    ("POST", "/expect", {"model": "m", "token_ids": [1], "instance_id": "ours"}), ("POST", "/instances", INSTANCE),
    ("PUT", "/instances/ours/heartbeat", None), ("DELETE", "/instances/ours", None), ("GET", "/dump", None),
    ("GET", "/workers", None), ("POST", "/unregister", {"instance_id": "ours"}),
]  # fmt: skip
OPEN = [("GET", "/healthz", None), ("GET", "/readyz", None), ("GET", "/metrics", None)]


class Index:
    """A process of ``simm index`` with a publisher, ``ours``."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        (folder / "publishers.json").write_text(json.dumps([{**PUBLISHER, "instance_id": "ours"}]))
        flags = ["--at", "127.0.0.1:0", "--register", str(folder / "publishers.json"), *arguments]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "simm", "index", *flags], stdout=subprocess.PIPE, text=True,
            env=child_environment(),
        )  # fmt: skip
        assert self.process.stdout is not None
        said = self.process.stdout.readline().split()
        assert said[:2] == ["READY", "index"], said
        self.at = said[2]
        self.rpc = said[3].removeprefix("grpc=") if len(said) > 3 else ""

    def asked(self, uid: int, requests: list[tuple[str, str, object]], token: str = "", rpc: str = "") -> list[object]:
        """What a process of this user hears."""
        modules = ["http.client", *(["grpc"] if rpc else [])]
        said = run_as(ASK, self.at, json.dumps(requests), token, rpc, uid=uid, modules=modules)
        heard: list[object] = json.loads(said)
        return heard

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(WAIT_S) == 0
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Index]:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"client routers {TOKEN}\n")
    tokens.chmod(0o600)
    index = Index(tmp_path, "--token-file", str(tokens))
    yield index
    index.end()


def test_another_user_changes_and_learns_nothing(guarded: Index) -> None:
    assert guarded.asked(UID, GUARDED) == [403] * len(GUARDED)
    assert guarded.asked(UID, OPEN) == [200] * len(OPEN)
    assert guarded.asked(UID, GUARDED, "a wrong token") == [403] * len(GUARDED)
    assert guarded.asked(0, [("GET", "/workers", None)]) == [200]
    with_token = guarded.asked(UID, GUARDED, TOKEN)
    assert 403 not in with_token and 401 not in with_token


def test_control_a_user_that_is_named_is_let_in(tmp_path: Path) -> None:
    index = Index(tmp_path, "--allow-uid", str(UID))
    try:
        assert 403 not in index.asked(UID, GUARDED)
        assert index.asked(UID + 1, GUARDED[:1]) == [403]
    finally:
        index.end()


def test_another_user_learns_nothing_by_grpc(tmp_path: Path) -> None:
    pytest.importorskip("grpc", reason="the extra simm-store[grpc] is not installed")
    tokens = tmp_path / "tokens"
    tokens.write_text(f"client routers {TOKEN}\n")
    tokens.chmod(0o600)
    index = Index(tmp_path, "--grpc", "127.0.0.1:0", "--token-file", str(tokens))
    try:
        assert index.asked(UID, [], rpc=index.rpc) == ["UNAUTHENTICATED"]
        assert index.asked(0, [], rpc=index.rpc) == ["INVALID_ARGUMENT"], "an empty message is heard"
        assert index.asked(UID, [], TOKEN, index.rpc) == ["INVALID_ARGUMENT"]
    finally:
        index.end()


def test_users_are_named_only_where_somebody_looks_at_them(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"client routers {TOKEN}\n")
    tokens.chmod(0o600)
    done = subprocess.run(
        [sys.executable, "-m", "simm", "index", "--at", "0.0.0.0:0", "--token-file", str(tokens), "--allow-uid", "1"],
        env=child_environment(), capture_output=True, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "--allow-uid has no effect" in done.stderr

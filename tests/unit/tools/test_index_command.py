"""``simm index``: flags, the list of publishers, and the sentence without the extra."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from simm.cli import main
from simm.config.local_token import PublishedToken
from simm.config.parsers import Address
from simm.errors import UsageError
from simm.net import local_users, peer_uid, process
from simm.net.http import JSON, Page, Web
from simm.net.local_users import LocalUsers
from simm.net.loop import Loop
from simm.tools import index
from tests.support.tokens import old_tokens

WORKER = {"instance_id": "a", "tenant_id": "default", "dp_rank": 0, "type": "vllm", "blocks": 1234, "stale": False,
          "complete": True, "endpoint": "tcp://h:1"}  # fmt: skip


def _workers(body: str, *more: str, tokens: tuple[str, ...] = ()) -> int:
    """Run `simm index workers` against an index that answers so. Return its exit code."""
    loop = Loop()
    listener = socket.create_server(("127.0.0.1", 0))
    users = LocalUsers() if tokens else None
    web = Web(loop, listener, {"/workers": lambda: Page(body, JSON)}, old_tokens(*tokens), users=users)
    loop.call_every(0.02, lambda: None)
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        at = f"127.0.0.1:{listener.getsockname()[1]}"
        return main(["index", "workers", "--at", at, *more])
    finally:
        loop.stop()
        thread.join()
        web.close()
        loop.close()


def test_publishers_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert _workers(json.dumps([WORKER, {**WORKER, "dp_rank": 1, "complete": False}])) == 0
    assert [line.split()[:6] for line in capsys.readouterr().out.splitlines()[1:]] == [
        ["a", "default", "0", "vllm", "1,234", "all"], ["a", "default", "1", "vllm", "1,234", "partly"],
    ]  # fmt: skip
    assert _workers(json.dumps([{**WORKER, "stale": True}]), "--json") == 1
    assert json.loads(capsys.readouterr().out)[0]["stale"] is True
    assert _workers("[1]") == 1 and "is no index" in capsys.readouterr().err


TOKEN = "the-token-of-this-index"


@pytest.fixture
def guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Flags for an index that takes its user for uid 4711, which may ask by its token only."""
    monkeypatch.setattr(local_users, "tcp_uid", lambda _sock: 4711)
    path = tmp_path / "tokens"
    path.write_text(f"client routers {TOKEN}\n")
    path.chmod(0o600)
    return ["--token-file", str(path)]


def test_issue_a_token_that_is_named_is_shown_on_loopback_too(
    guarded: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """It was kept back, and the refusal said that the server had no token file."""
    assert _workers(json.dumps([WORKER]), *guarded, tokens=(TOKEN,)) == 0 and "1,234" in capsys.readouterr().out
    assert _workers(json.dumps([WORKER]), tokens=(TOKEN,)) == 1
    error = capsys.readouterr().err
    assert "without a token of its --token-file" in error and "this one is of uid 4711" in error
    assert "show a token of its --token-file, or start it with --allow-uid 4711" in error


def test_a_strangers_listener_is_shown_no_token(
    guarded: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any user can listen on a port that is free, and HTTP carries the token itself."""
    monkeypatch.setattr(peer_uid, "tcp_uid", lambda _sock: 4712)
    assert _workers(json.dumps([WORKER]), *guarded, tokens=(TOKEN,)) == 1
    error = capsys.readouterr().err
    assert "the token was not shown to it, as it is of uid 4712" in error and "SIMM_SERVER_UID" in error
    assert _workers(json.dumps([WORKER]), *guarded, "--server-uid", "4712", tokens=(TOKEN,)) == 0


def test_who_listens_is_known_when_the_connection_is_accepted(
    guarded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then the kernel tells nobody's end: the index is no stranger for that."""
    looks: list[socket.socket] = []

    def accepted_late(sock: socket.socket) -> int:
        looks.append(sock)
        if len(looks) < 3:
            raise peer_uid.HasClosed
        return os.geteuid()

    monkeypatch.setattr(peer_uid, "tcp_uid", accepted_late)
    assert _workers(json.dumps([WORKER]), *guarded, tokens=(TOKEN,)) == 0 and len(looks) == 3


@pytest.mark.parametrize(
    ("file", "shown"),
    [
        (None, {}),
        ("admin ops the-admins-token-1\nserver nodes the-servers-token-1\nclient routers the-clients-token-1\n",
         {"Authorization": "Bearer the-clients-token-1"}),
        ("the-token-of-no-role-1\n", {"Authorization": "Bearer the-token-of-no-role-1"}),
    ],
    ids=["none", "roles", "old"],
)  # fmt: skip
def test_issue_an_index_elsewhere_is_shown_no_more_than_it_needs(
    file: str | None, shown: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was the token of the user's own local cluster where none was named, and else that of the highest role."""
    seen: list[dict[str, str]] = []

    class Elsewhere:
        """A connection to an index of another host."""

        sock = None

        def __init__(self, host: str, port: int, timeout: float) -> None:
            assert (host, port) == ("10.0.0.5", 8090)

        def connect(self) -> None:
            pass

        def request(self, _method: str, _path: str, headers: dict[str, str]) -> None:
            seen.append(headers)

        def getresponse(self) -> Any:
            return SimpleNamespace(status=200, read=lambda _most: b"[]")

        def close(self) -> None:
            pass

    monkeypatch.setattr(http.client, "HTTPConnection", Elsewhere)
    monkeypatch.setattr(index, "_stranger", lambda *_: "")
    monkeypatch.setenv("SIMM_RUNTIME_DIR", str(tmp_path))
    flags = []
    if file is not None:
        path = tmp_path / "tokens"
        path.touch(mode=0o600)
        path.write_text(file)
        flags = ["--token-file", str(path)]
    local = PublishedToken(tmp_path, Address("127.0.0.1", 30001), "the-local-clusters-token")
    with contextlib.closing(local):
        assert main(["index", "workers", "--at", "10.0.0.5:8090", *flags]) == 0
    assert seen == [shown]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["workers", "--at", "127.0.0.1:1"], "no index answers at 127.0.0.1:1"),
        (["--weights", "gold=1"], "TIER=WEIGHT"), (["--weights", "gpu=-1"], "TIER=WEIGHT"),
        (["--weights", "gpu"], "TIER=WEIGHT"), (["--at", "0.0.0.0:0"], "is not loopback"),
        (["--grpc", "0.0.0.0:0"], "--grpc 0.0.0.0:0 is not loopback"),
        (["--schemes", "/nowhere/x"], "No such file"),
        (["--hash-seed", "-1"], "--hash-seed"), (["--register", "/nowhere/x"], "No such file"),
    ],
)  # fmt: skip
def test_a_wrong_flag_is_one_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("zmq", reason="the extra simm-store[index] is not installed")
    pytest.importorskip("msgspec", reason="the extra simm-store[index] is not installed")
    pytest.importorskip("xxhash", reason="the extra simm-store[index] is not installed")
    assert main(["index", *arguments]) == 2
    error = capsys.readouterr().err
    assert sentence in error and len(error.splitlines()) == 1


@pytest.mark.parametrize("missing", ["zmq", "msgspec", "xxhash"])
def test_without_the_extra_there_is_one_sentence(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; import simm.cli; sys.exit(simm.cli.main(['index']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and "pip install '.[index]' in SiMM's checkout" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_without_the_other_extra_there_is_one_sentence() -> None:
    code = "import sys; sys.modules['grpc'] = None; import simm.cli; "
    code += "sys.exit(simm.cli.main(['index', '--grpc', '127.0.0.1:0']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and "pip install '.[index,grpc]' in SiMM's checkout" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_it_may_open_as_many_files_as_it_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few hundred publishers' sockets exceeded the usual soft limit, and the others were never heard."""
    for each in ("zmq", "msgspec", "xxhash"):
        pytest.importorskip(each, reason="the extra simm-store[index] is not installed")
    raised: list[bool] = []
    monkeypatch.setattr(process, "raise_file_limit", lambda: raised.append(True))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["index", "--at", f"127.0.0.1:{taken.getsockname()[1]}"]) != 0
    assert raised


@pytest.mark.full
def test_issue_a_manager_that_does_not_answer_yet_is_no_mistake_in_the_settings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A unit does not try again after status 2: after a host's start the index would stay away for ever."""
    for each in ("zmq", "msgspec", "xxhash"):
        pytest.importorskip(each, reason="the extra simm-store[index] is not installed")
    monkeypatch.setattr(process, "raise_file_limit", lambda: None)
    with socket.create_server(("127.0.0.1", 0)) as left:
        port = left.getsockname()[1]
    assert main(["index", "--at", "127.0.0.1:0", "--manager", f"127.0.0.1:{port}", "--deadline-ms", "100"]) == 1
    assert f"127.0.0.1:{port}" in capsys.readouterr().err


def test_a_file_of_publishers_is_a_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("zmq", reason="the extra simm-store[index] is not installed")
    path = tmp_path / "publishers.json"
    for text, sentence in (("{", "no JSON"), ('{"a": 1}', "JSON list")):
        path.write_text(text)
        assert main(["index", "--register", str(path)]) == 2 and sentence in capsys.readouterr().err


def test_schemes_are_read_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "schemes.json"
    right = {"model": "m", "scheme": "lmcache", "page": 256}
    for text, sentence in [
        ("{", "is no JSON"), ('{"model": "m"}', "each a key scheme"), ('[{"model": "m"}]', "no scheme of keys"),
        (json.dumps([{**right, "scheme": "none"}]), "scheme"),
        (json.dumps([{**right, "pools": 7}]), "no scheme of keys"),
        (json.dumps([right]), "--schemes has no effect without --manager"),
    ]:  # fmt: skip
        file.write_text(text)
        assert main(["index", "--schemes", str(file), "--at", "127.0.0.1:0"]) == 2, text
        assert sentence in capsys.readouterr().err, text


def test_issue_a_long_file_of_publishers_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was cut at 1 MiB, and then called no JSON: so many publishers may be registered, of some 300 bytes each."""
    path = tmp_path / "publishers.json"
    every = [{"endpoint": "tcp://" + "h" * 250, "instance_id": str(at)} for at in range(4096)]
    path.write_text(json.dumps(every))
    assert path.stat().st_size > 1 << 20 and index._objects(str(path), "") == every
    monkeypatch.setattr(index, "_FILE_BYTES_MAX", path.stat().st_size - 1)
    with pytest.raises(UsageError, match="is longer than"):
        index._objects(str(path), "")

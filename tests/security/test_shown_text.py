"""What a peer sends is shown in no terminal, log or page with characters that do something there."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable
from typing import Any

import pytest

from simm import cli
from simm.cluster.nodes import join_fault
from simm.cluster.shard_map import ShardMap
from simm.config.logs import log_handler
from simm.config.settings import Settings
from simm.errors import RemoteProtocolError, printable
from simm.net.channel import Refused
from simm.rpc import Frame, decode, reply
from simm.wire import messages as M
from simm.wire.messages import Status
from tests.support.frame_server import FrameServer
from tests.support.machine import attentive, join
from tests.support.manager_process import WAIT_S, Process, get, workers

#: Colours, a new title, line ends, a deleted line, the direction of text, an unpaired surrogate.
EVIL = "x\x1b[31m\x1b]0;title\x07\r\n2026 E fake line\x08\x7f\x9b2J‮\u2028"


def clean(text: str) -> bool:
    return all(line.isprintable() for line in text.split("\n")) and "\nfake" not in text


def test_text_is_escaped_and_bounded() -> None:
    assert printable("wörter and spaces, 日本") == "wörter and spaces, 日本"
    assert printable(EVIL).isprintable() and "\\x1b[31m" in printable(EVIL) and "\\u202e" in printable(EVIL)
    assert printable("\ud800") == "\\ud800" and len(printable("a" * 5000)) == 2000


@pytest.mark.quick
def test_no_peer_names_a_server_so(run: Callable[..., Process]) -> None:
    process = run()
    with process.client() as client:
        for name in (EVIL, "a b", "a/b", "a\0", "a\n", "", "a‮b", "n" * 129):
            with pytest.raises(Refused) as caught:
                client.join(1, name, workers())
            assert caught.value.status == Status.BAD_REQUEST and str(caught.value).isprintable()
        for bad in ({"host": EVIL}, {"host": "a b"}, {"uds": EVIL}):
            with pytest.raises(Refused):
                client.join(1, "a", [workers()[0]._replace(**bad)])
        with pytest.raises(Refused) as caught:
            client.drain(EVIL)
        assert str(caught.value).isprintable()
    assert clean(process.log.read_text())


def test_no_map_has_such_names() -> None:
    assert not join_fault(M.Join(1, 0, "ok-1.example", workers(host="2001:db8::1")))
    good = M.MapReply(1, 5, [workers()[0]._replace(node="n")], b"\xff" * 32768)
    ShardMap(good)
    for bad in ({"node": EVIL}, {"host": EVIL}, {"uds": EVIL}, {"node": "a b"}):
        with pytest.raises(RemoteProtocolError, match="cannot be one"):
            ShardMap(good._replace(workers=[good.workers[0]._replace(**bad)]))


def test_a_log_line_stays_one_line(tmp_path: Any) -> None:
    handler, _ = log_handler(Settings(log_file=tmp_path / "log"), "test")
    record = logging.LogRecord("simm.test", logging.ERROR, "x.py", 1, "peer %s says %s", (EVIL, EVIL), None)
    handler.handle(record)
    try:
        raise ValueError(EVIL)
    except ValueError as exc:
        record = logging.LogRecord("simm.test", 40, "x.py", 1, "failed", (), (ValueError, exc, exc.__traceback__))
    handler.handle(record)
    handler.close()
    text = (tmp_path / "log").read_text()
    assert clean(text) and text.splitlines()[0].endswith("\\u2028") and "Traceback" in text


def evil_status() -> dict[str, Any]:
    """A manager's status with one server, all whose texts are evil."""
    cluster = attentive(1, 0.0)
    cluster.join(0.0, join("a", 1))
    status = cluster.status(0.0)
    (node,) = status["nodes"]
    node.update(name=EVIL, state=EVIL)
    node["workers"][0]["address"] = EVIL
    return {**status, EVIL: EVIL}


class LyingManager(FrameServer):
    """Answers HELLO, and everything else with what it was given."""

    def __init__(self, answer: Any, status: int = 0) -> None:
        self._answer = (answer, status)
        super().__init__()

    def on_frame(self, sock: socket.socket, frame: Frame, state: Any) -> None:
        """Say it."""
        hello = isinstance(decode(frame), M.Hello)
        answer, status = (M.Welcome(M.PROTOCOL_MAX, 0, 0, 0, 0, 0, 0, ""), 0) if hello else self._answer
        sock.sendall(reply(answer, frame.request_id, status))


#: Those that show what a manager says.
COMMANDS = (
    ("node", "list"), ("node", "list", "--json"), ("node", "drain", "a", "--no-wait"), ("ctl", "node", "list"),
    ("ctl", "node", "summary"), ("ctl", "node", "drain", "a", "--no-wait"), ("ctl", "shard", "list"),
    ("status", "--deadline-ms", "300"),
)  # fmt: skip


@pytest.mark.parametrize(
    "answer",
    [
        (M.Error(EVIL), Status.BAD_REQUEST),
        (M.StatsReply(json.dumps(evil_status()).encode()), 0),
        (M.StatsReply(b"[" * 100_000), 0),
        (M.StatsReply(b"7"), 0),
        (M.StatsReply(b"\xff"), 0),
    ],
)
def test_a_lying_manager_does_nothing_to_a_terminal(capsys: pytest.CaptureFixture[str], answer: Any) -> None:
    manager = LyingManager(*answer)
    try:
        for command in COMMANDS:
            cli.main([*command, "--manager", "{}:{}".format(*manager.address)])
            said = capsys.readouterr()
            assert clean(said.out) and clean(said.err) and "Traceback" not in said.err
    finally:
        manager.stop()


@pytest.mark.quick
def test_a_page_on_loopback_is_for_this_host(run: Callable[..., Process]) -> None:
    """A page whose name was made to lead here (DNS rebinding) has its own name in Host."""
    process = run(None, "--http", "127.0.0.1:0")
    port = process.http.rpartition(":")[2]
    mine = ("localhost", f"localhost:{port}", f"127.0.0.1:{port}", f"[::1]:{port}", "LOCALHOST.", "a.localhost",
            socket.gethostname())  # fmt: skip
    for host in mine:
        assert get(f"http://{process.http}/metrics", Host=host)[0] == 200, host
    for host in ("evil.example", f"evil.example:{port}", "localhost.evil.example", "", "127.0.0.1.evil.example", "a b"):
        for page in ("", "metrics"):
            assert get(f"http://{process.http}/{page}", Host=host)[0] == 403, host
        assert get(f"http://{process.http}/healthz", Host=host)[0] == 200, "it tells nothing"
    with socket.create_connection(("127.0.0.1", int(port)), WAIT_S) as old:
        old.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert old.recv(100).startswith(b"HTTP/1.1 200")
    with socket.create_connection(("127.0.0.1", int(port)), WAIT_S) as two:
        two.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nhost : evil.example\r\n\r\n")
        assert two.recv(100).startswith(b"HTTP/1.1 403")

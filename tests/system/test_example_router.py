"""``examples/router.py`` before two workers and an index: by blocks, by load, and without an index."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("msgspec", reason="the extra simm-store[index] is not installed")
pytest.importorskip("zmq", reason="the extra simm-store[index] is not installed")
pytest.importorskip("xxhash", reason="the extra simm-store[index] is not installed")

import simm
from simm.index.blocks import Blocks
from simm.index.events import Stored, Where
from simm.index.keys import token_bytes
from simm.index.service import BODY_BYTES_MAX, Service
from simm.index.sources import Registration
from simm.net.http import Web
from simm.net.loop import Loop
from tests.support.child import Child, child_environment
from tests.support.http_page import serving
from tests.support.waiting import wait_until

EXAMPLE = Path(simm.__file__).parents[1] / "examples" / "router.py"
PROMPT = list(range(1000, 1064))


class _Worker(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        fields = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body = json.dumps({"got": len(fields["input_ids"])}).encode()
        self.send_response(418 if fields.get("wrong") else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


def _ask(port: int, **fields: Any) -> tuple[int, Any, str]:
    body = json.dumps({"input_ids": PROMPT, **fields}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/generate", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read()), answer.headers["X-Worker"]
    except urllib.error.HTTPError as exc:
        return exc.code, json.loads(exc.read()), exc.headers.get("X-Worker", "")


def test_requests_go_where_their_prompt_is() -> None:
    index = Blocks()
    loop, listener = Loop(), socket.create_server(("127.0.0.1", 0))
    service = Service(index)
    web = Web(loop, listener, service.routes, posts=service.posts, body_max=BODY_BYTES_MAX, keep_s=60.0)
    at = "{}:{}".format(*listener.getsockname())
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    with serving(_Worker) as first, serving(_Worker) as second:
        workers = sorted(f"http://127.0.0.1:{port}" for port in (first, second))
        sources = [index.register(Registration(each, "m", block_size=16)) for each in workers]
        flags = ["--index", at, "--model", "m", "--block-size", "16", "--port", "0", "--ask-s", "30", *workers]
        with Child([sys.executable, str(EXAMPLE), *flags], name="router.py", environment=child_environment()) as router:
            port = int(router.expect("listening on 127.0.0.1:").rpartition(":")[2])
            assert _ask(port) == (200, {"got": 64}, workers[0]), "nobody has it"
            index.apply(sources[1], [Stored([1, 2], None, token_bytes(PROMPT[:32]), 16, Where("GPU"))])
            assert _ask(port) == (200, {"got": 64}, workers[1]), "where its blocks are"
            sources[1].stale = True
            assert _ask(port)[2] == workers[0], "what is not known for sure is no reason"
            sources[1].stale = False
            assert _ask(port, wrong=True) == (418, {"got": 64}, workers[1]), "a worker's refusal is the answer"
            assert _ask(port, input_ids="text")[0] == 400
            loop.call_later(0.0, web.close)
            loop.call_later(0.0, loop.stop)
            thread.join()
            loop.close()
            assert _ask(port) == (200, {"got": 64}, workers[0]), "without an index"
            os.kill(router.pid, signal.SIGTERM)
            wait_until(lambda: not router.running, "the router ends")

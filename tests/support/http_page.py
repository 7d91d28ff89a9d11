"""Reading a server's HTTP pages, and a server that answers as a test wants."""

from __future__ import annotations

import contextlib
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

#: A bound for a server that hangs, seconds.
_ANSWER_S: Final = 300


def ask_json(address: str, path: str, body: Any = None) -> Any:
    """Return what a server at HOST:PORT answers in JSON, to a GET or, with a body, a POST of JSON."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://{address}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
        return json.loads(answer.read())


def page(address: str, path: str) -> tuple[int, str]:
    """Return status and text of a page of a server at HOST:PORT."""
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=_ANSWER_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as exc:
        return exc.code, exc.read().decode()


@contextlib.contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[int]:
    """Serve by this handler on a port of the loopback; yield the port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()

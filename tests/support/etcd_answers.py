"""An etcd that answers what the test says, and waiting for it."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.etcd_server import MISSING, PROGRAM

WAIT_S = 120.0
needs_etcd = pytest.mark.skipif(PROGRAM is None, reason=MISSING)


class Fake:
    """Listens on loopback; each connection's request is read and given to ``answer``, which writes what it likes."""

    def __init__(self, answer: Callable[[socket.socket, str, dict[str, Any]], None]) -> None:
        self.answer = answer
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.headers: list[str] = []
        self.sock = socket.create_server(("127.0.0.1", 0))
        self.endpoint: tuple[str, int] = self.sock.getsockname()
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def __enter__(self) -> Fake:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.sock.shutdown(socket.SHUT_RDWR)
        self.thread.join()
        self.sock.close()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self.sock.accept()
            except OSError:
                return
            with peer, contextlib.suppress(OSError):
                raw = b""
                while b"\r\n\r\n" not in raw:
                    if not (more := peer.recv(65536)):
                        raise ConnectionResetError  # it has asked nothing
                    raw += more
                head, _, body = raw.partition(b"\r\n\r\n")
                lines = head.decode().split("\r\n")
                size = next(int(line.split(":")[1]) for line in lines if line.lower().startswith("content-length"))
                while len(body) < size:
                    body += peer.recv(65536)
                self.requests.append((lines[0].split()[1], json.loads(body)))
                self.headers.append("\n".join(lines))
                self.answer(peer, *self.requests[-1])


def page(body: bytes, status: str = "200 OK", head: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{head}\r\n".encode() + body


def says(*answers: bytes) -> Callable[[socket.socket, str, dict[str, Any]], None]:
    """The answers in turn, the last one for ever."""
    left = list(answers)

    def answer(peer: socket.socket, _path: str, _body: dict[str, Any]) -> None:
        peer.sendall(left.pop(0) if len(left) > 1 else left[0])

    return answer


def of(value: object) -> bytes:
    return page(json.dumps(value).encode())
HEADER = {"header": {"revision": "7"}}
ONE = {"key": "aw==", "value": "dg==", "create_revision": "3", "mod_revision": "5", "version": "2", "lease": "9"}


def error(code: int, text: str, status: str = "400 Bad Request") -> bytes:
    return page(json.dumps({"error": text, "message": text, "code": code}).encode(), status)

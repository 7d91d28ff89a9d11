"""Processes on the other of two machines, as if they were children of ours.

There, ``serve`` listens. Here, ``python -m tests.rdma_vm.remote HOST WORD...`` stands for a process there: what that
says comes out here, SIGTERM and SIGINT go there, and its exit status is ours. When the stand-in is killed, so is what
it stands for, by the same kill -9. That makes ``Fleet`` and everything else that starts servers work across the two,
given the :class:`Far` place.

One connection is one process: a line of JSON with its words and folder; then a byte for each signal; the other way,
pieces of a kind (``o`` out, ``e`` err, ``x`` exit status), a length and as many bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

PORT: Final = 4791
#: For the other machine to boot.
_WAIT_S: Final = 120.0
_PIECE: Final = struct.Struct("<cI")
_REQUEST_MAX: Final = 1 << 20


def address(host: int) -> str:
    """Of a machine's first PCI card: guest/main gives it."""
    return f"10.78.0.{host * 100 + 1}"


class Far:
    """A ``faults.fleet.Place`` on the other machine."""

    exposed: Sequence[str] = ("--insecure",)

    def __init__(self, host: int = 1) -> None:
        self.host = address(host)

    def command(self, words: Sequence[str]) -> list[str]:
        """The command line of the stand-in."""
        return [sys.executable, "-m", "tests.rdma_vm.remote", self.host, *words]

    def connect(self, host: str, port: int, deadline_s: float) -> Any:
        """A connection from here: from there none is to be had."""
        from simm.net.channel import Channel  # here: a stand-in starts in half the time without it

        return Channel.tcp(host, port, deadline_s)

    def run(self, *words: str) -> str:
        """What a command there says. Raises CalledProcessError."""
        return subprocess.run(self.command(words), stdout=subprocess.PIPE, text=True, check=True).stdout


# -- there ------------------------------------------------------------------------------------------------


def _send(conn: socket.socket, kind: bytes, data: bytes) -> None:
    conn.sendall(_PIECE.pack(kind, len(data)) + data)


def _handle(conn: socket.socket) -> None:
    """One connection: run its process until either ends."""
    with conn:
        request = b""
        while not request.endswith(b"\n"):
            piece = conn.recv(_REQUEST_MAX)
            if not piece:
                return
            request += piece
        asked = json.loads(request)
        os.makedirs(asked["folder"], exist_ok=True)
        words = asked["words"]
        if "--end-with" in words:  # a process id of the other machine's
            words[words.index("--end-with") + 1] = str(os.getpid())
        try:
            process = subprocess.Popen(
                words, cwd=asked["folder"], env=asked["environment"], stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            _send(conn, b"e", f"{error}\n".encode())
            _send(conn, b"x", b"127")
            return
        with process, contextlib.suppress(ConnectionError):
            _pass_on(conn, process)


def _pass_on(conn: socket.socket, process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None and process.stderr is not None
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(conn, selectors.EVENT_READ, b"")
            selector.register(process.stdout, selectors.EVENT_READ, b"o")
            selector.register(process.stderr, selectors.EVENT_READ, b"e")
            open_pipes = 2
            # Its children may hold the pipes longer than it lives: the end is that of the process.
            while open_pipes and (process.poll() is None or selector.select(0)):
                for key, _ in selector.select(0.1):
                    if key.fileobj is conn:
                        signals = conn.recv(64)
                        if not signals:
                            return
                        for number in signals:
                            process.send_signal(number)
                        continue
                    data = os.read(key.fd, 1 << 16)
                    if data:
                        _send(conn, key.data, data)
                    else:
                        selector.unregister(key.fileobj)
                        open_pipes -= 1
            while process.poll() is None:
                for _ in selector.select(0.1):
                    signals = conn.recv(64)
                    if not signals:
                        return
                    for number in signals:
                        process.send_signal(number)
        code = process.returncode
        _send(conn, b"x", str(code if code >= 0 else 128 - code).encode())
    finally:
        process.kill()


def serve() -> int:
    """Until the first connection, which :func:`connected` makes, is closed."""
    with socket.create_server((address(int(os.environ["SIMM_TEST_VM"])), PORT)) as listener:
        first, _ = listener.accept()

        def accept() -> None:
            while True:
                conn, _ = listener.accept()
                threading.Thread(target=_handle, args=(conn,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        with first:
            first.recv(1)
    return 0


# -- here -------------------------------------------------------------------------------------------------


def _connect(host: str, wait_s: float) -> socket.socket:
    until = time.monotonic() + wait_s
    while True:
        try:
            return socket.create_connection((host, PORT), 5.0)
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


@contextlib.contextmanager
def connected(host: int = 1) -> Iterator[None]:
    """Wait for the other machine; at the end, let it end too. Raises OSError."""
    with _connect(address(host), _WAIT_S):
        yield


def stand_in(host: str, words: Sequence[str]) -> int:
    """Be the process there."""
    conn = _connect(host, 10.0)
    conn.settimeout(None)
    request = {"words": list(words), "folder": os.getcwd(), "environment": dict(os.environ)}
    conn.sendall(json.dumps(request).encode() + b"\n")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda got, _: conn.send(bytes([got])))
    targets = {b"o": sys.stdout.buffer, b"e": sys.stderr.buffer}
    with conn, conn.makefile("rb") as pieces:
        while True:
            head = pieces.read(_PIECE.size)
            if len(head) < _PIECE.size:
                print(f"{host}: the connection is lost", file=sys.stderr)
                return 1
            kind, length = _PIECE.unpack(head)
            data = pieces.read(length)
            if kind == b"x":
                return int(data)
            targets[kind].write(data)
            targets[kind].flush()


if __name__ == "__main__":
    sys.exit(stand_in(sys.argv[1], sys.argv[2:]))

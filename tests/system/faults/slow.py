"""Clients that hardly read: ``python -m tests.system.faults.slow '{"kind": "stream", "host": ..., "port": ..., ...}'``.

Each asks for much and then takes one byte a second; those of ``web`` also send their request one byte a second. Runs
until all have been closed by the server, its stdin is closed, or ``most_s`` are over; then a line of JSON says
when each was closed, in seconds after its request.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import time
from typing import Any

from simm.rpc import encode
from simm.wire import messages as M

#: Parts of a second in which each takes its byte: all at once would keep a processor busy for as long as 1 % of GETs.
TURNS = 100


class Slow:
    """One of them."""

    def __init__(self, kind: str, host: str, port: int, digests: list[bytes]) -> None:
        self.sock = socket.socket()
        # The less the kernel takes for us, the more the server is left with.
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.sock.settimeout(120)
        self.sock.connect((host, port))
        self.began = time.monotonic()
        self.closed: float | None = None
        self.web = kind == "web"
        self.request = encode(M.Ping(0), 3)
        if kind == "manager":
            self.sock.sendall(encode(M.MapGet(0, 1), 1) * 10)
        elif kind == "stream":
            hello = M.Hello(M.PROTOCOL_MIN, M.PROTOCOL_MAX, M.Role.CLIENT, 0, 0, "default", "", [])
            self.sock.sendall(encode(hello, 1))
            self.sock.sendall(encode(M.Fetch([(digest, 1 << 26) for digest in digests]), 2))
        else:
            self.request = b"GET / HTTP/1.1\r\n" + b"X-Slow: 1\r\n" * 20 + b"\r\n"
        self.sock.setblocking(False)

    def second(self) -> None:
        """Take one byte, and send a little; notice when it is over.

        Sending is no progress to the server. And a reset that comes while our window is shut is not let in: only
        the answer to something that we send is.
        """
        try:
            if self.web:
                self.sock.send(self.request[:1])
                self.request = self.request[1:]
            else:
                self.sock.send(self.request)
            over = self.sock.recv(1) == b""
        except BlockingIOError:
            return
        except OSError:
            over = True
        if over:
            self.end()

    def end(self) -> None:
        """It is closed."""
        if self.closed is None:
            self.closed = time.monotonic() - self.began
            self.sock.close()


def main() -> int:
    """See the module."""
    settings: dict[str, Any] = json.loads(sys.argv[1])
    digests = [bytes.fromhex(digest) for digest in settings.get("digests", [])]
    slow: list[Slow] = []
    refused = 0
    for _ in range(settings["count"]):
        try:
            slow.append(Slow(settings["kind"], settings["host"], settings["port"], digests))
        except OSError:
            refused += 1
    print("ready", flush=True)
    until = time.monotonic() + settings["most_s"]
    stdin = select.poll()
    stdin.register(0, select.POLLIN | select.POLLHUP)
    # Who does not read would see that the server has closed only after all that it sent before: these say so at once.
    hang_ups = select.epoll()
    by_number = {each.sock.fileno(): each for each in slow}
    for number in by_number:
        hang_ups.register(number, select.EPOLLRDHUP)
    turn = 0
    while any(each.closed is None for each in slow) and time.monotonic() < until:
        for each in slow[turn::TURNS]:
            if each.closed is None:
                each.second()
        turn = (turn + 1) % TURNS
        for number, _ in hang_ups.poll(0):
            by_number[number].end()
        if stdin.poll(1e3 / TURNS):
            break
    print(json.dumps({"closed": [each.closed for each in slow], "refused": refused}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

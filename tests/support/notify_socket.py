"""What a service manager hears of a server: the datagrams at a NOTIFY_SOCKET."""

from __future__ import annotations

import contextlib
import socket
import time
from pathlib import Path

from tests.support.waiting import WAIT_S


class NotifySocket:
    """Listens at a path, or with an @ at a name in the abstract namespace."""

    def __init__(self, address: str | Path) -> None:
        self.address = str(address)
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.sock.bind("\0" + self.address[1:] if self.address[0] == "@" else self.address)
        self.sock.settimeout(WAIT_S)
        #: All that was received, in order; datagrams' lines one after another.
        self.said: list[str] = []

    def __enter__(self) -> NotifySocket:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()
        if self.address[0] != "@":
            Path(self.address).unlink()

    def receive(self) -> list[str]:
        """Wait for a datagram; return its lines."""
        lines = self.sock.recv(1 << 16).decode().split("\n")
        self.said += lines
        return lines

    def waiting(self) -> list[str]:
        """Return the lines of all datagrams that are here, without waiting."""
        found = []
        self.sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                found += self.receive()
        self.sock.settimeout(WAIT_S)
        return found

    def wait_for(self, start: str) -> str:
        """Receive until a line begins so, and return it. Raises AssertionError if none comes."""
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until:
            for line in self.receive():
                if line.startswith(start):
                    return line
        raise AssertionError(f"no {start} after {self.said}")

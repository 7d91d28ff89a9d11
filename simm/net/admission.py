"""Limit what connections cost that have not said who they are.

A *stranger* is a connection before its HELLO (``Service.hello_first``). It costs its sender nothing, so it may cost the
server little:

* Its frames have ``HELLO_BYTES_MAX`` bytes of body at most, and the server decodes HELLO and PING only.
* It has ``HELLO_S`` seconds.
* At most ``STRANGERS_MAX`` of them are open, ``STRANGERS_PER_ADDRESS`` from one address, or of one user at a UNIX
  socket, and a quarter as many as there are descriptors for connections. A new one replaces the oldest of its address,
  or of the address that has most. A client says HELLO at once, so the oldest is one that does not.
* What they cause is logged ``LINES_MAX`` times a level in ``LINES_S`` seconds.

Connections never take the last ``DESCRIPTORS_RESERVED`` descriptors: the pages (``net/http.py``) and files need them.
"""

from __future__ import annotations

import logging
import resource
import socket
import time
from collections.abc import Callable, Hashable
from typing import Any, Final, Generic, TypeVar

from ..errors import line_about
from .peer_uid import credentials

HELLO_S: Final = 5.0
HELLO_BYTES_MAX: Final = 4096
STRANGERS_MAX: Final = 1024
STRANGERS_PER_ADDRESS: Final = 256
LINES_MAX: Final = 20
LINES_S: Final = 10.0
DESCRIPTORS_RESERVED: Final = 80
_MAPPED: Final = bytes(10) + b"\xff\xff"

_Peer = TypeVar("_Peer", bound=Hashable)


class Strangers(Generic[_Peer]):
    """The strangers of one loop, oldest first."""

    def __init__(self) -> None:
        self._since: dict[_Peer, tuple[bytes, float]] = {}
        self._of: dict[bytes, dict[_Peer, None]] = {}
        #: What the descriptors allow: strangers that hold all of them could not be replaced.
        self.most = STRANGERS_MAX

    def __len__(self) -> int:
        return len(self._since)

    def __contains__(self, peer: _Peer) -> bool:
        return peer in self._since

    def add(self, peer: _Peer, address: bytes, now: float) -> _Peer | None:
        """Add a stranger from ``address``. Return the one that must go for it, or None."""
        group = self._of.setdefault(address, {})
        group[peer] = None
        self._since[peer] = address, now
        if len(group) > STRANGERS_PER_ADDRESS:
            return next(iter(group))
        if len(self._since) > min(STRANGERS_MAX, self.most):
            largest = max(self._of, key=lambda each: len(self._of[each]))
            return next(iter(self._of[largest]))
        return None

    def discard(self, peer: _Peer) -> None:
        """Forget one that has said HELLO, or has gone."""
        address, _ = self._since.pop(peer, (b"", 0.0))
        group = self._of.get(address)
        if group is not None:
            group.pop(peer, None)
            if not group:
                del self._of[address]

    def overdue(self, now: float) -> list[_Peer]:
        """Return those whose time is up."""
        found = []
        for peer, (_, since) in self._since.items():
            if now - since <= HELLO_S:
                break
            found.append(peer)
        return found


def origin_of(sock: socket.socket, address: Any) -> bytes:
    """Return what counts as one address of a peer: a host of IPv4, a /64 of IPv6, a user of a UNIX socket."""
    if sock.family == socket.AF_UNIX:
        return b"uid %d" % credentials(sock)[1]
    host = str(address[0]).partition("%")[0]
    if ":" not in host:
        return socket.inet_aton(host)
    raw = socket.inet_pton(socket.AF_INET6, host)
    return raw[12:] if raw.startswith(_MAPPED) else raw[:8]


def descriptor_limit() -> int:
    """Return the lowest descriptor number that no connection may have. The kernel gives out the lowest that is free."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return limit - min(DESCRIPTORS_RESERVED, limit // 8)


class LogLimit:
    """Log ``LINES_MAX`` lines of each level in ``LINES_S`` seconds, and how many were left out.

    Each level has its own number: peers that cause warnings without end hide no error.
    """

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        #: By level: until when its lines are counted, and their number.
        self._counted: dict[int, tuple[float, int]] = {}

    def __call__(self, level: int, text: str, *details: Any, exc_info: bool = False, session: int = 0) -> None:
        """Log a line like ``logging.Logger.log``, unless there were too many of its level. ``session``: it is about."""
        now = self._clock()
        until, lines = self._counted.get(level, (0.0, 0))
        if now >= until:
            if lines > LINES_MAX:
                self._log.log(level, "%d more lines like those before were left out", lines - LINES_MAX)
            until, lines = now + LINES_S, 0
        self._counted[level] = until, lines + 1
        if lines < LINES_MAX:
            self._log.log(level, text, *details, exc_info=exc_info, extra=line_about(session))

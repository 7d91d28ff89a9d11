"""Following the manager: a thread that holds the link, hears of every new map, and finds the next manager.

What can go wrong, and what stands against it:

* *The manager dies.* The link breaks; after a jittered pause the addresses are tried in turn. Nothing else happens:
  clients need the manager only to hear of changes.
* *It is stopped, or packets to it are dropped.* Nothing breaks then. Every exchange has a deadline, the kernel
  probes an idle link (``SO_KEEPALIVE``, ``TCP_USER_TIMEOUT``), and a PING every ten seconds or so finds a process that
  does not run. This thread does nothing but wait for the manager, so it holds up nobody.
* *It is a standby.* It answers NOT_LEADER and the next address is tried. One that led once, and does not know
  better, is found out by asking for the map once a minute.
* *All clients come back at once* after a manager's restart: pauses are jittered and double up to two seconds.
* *Many operations find the map out of date at once.* Asking is coalesced, and as long as the answer is what we
  have already, the pause between questions doubles; the link is subscribed, so a change is pushed anyway.

Which of two maps is the newer one is the receiver's to judge (``routing.py``).
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from . import messages as M
from .channel import Channel
from .errors import RemoteProtocolError, TransportError

log = logging.getLogger("simm.client")

#: Bound of an exchange with a manager, seconds; less where the client's own deadline is.
EXCHANGE_S: Final = 2.0
#: Pause between two rounds through all addresses.
RETRY_S: Final = (0.1, 2.0)
#: Pause between two questions for the map that brought nothing new.
ASK_S: Final = (0.02, 2.0)
PING_S: Final = (8.0, 12.0)
ASK_ANYWAY_S: Final = (45.0, 75.0)
#: TCP keepalive: idle, interval (seconds), tries; and how long sent bytes may stay unacknowledged, ms.
_KEEPALIVE: Final = ((socket.TCP_KEEPIDLE, 3), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 3))
_USER_TIMEOUT_MS: Final = 5000


class Subscription:
    """A subscription to the shard map at the first of several managers that leads.

    ``on_map`` is called with each MAP_REPLY, in the thread that received it. It raises RemoteProtocolError for one that
    contradicts itself; the link is dropped then.
    """

    def __init__(
        self, managers: Sequence[tuple[str, int]], deadline_s: float, token: str, on_map: Callable[[M.MapReply], bool]
    ) -> None:
        """``on_map`` says whether that was news."""
        self.managers = list(managers)
        self.token = token
        #: Why there is no link; empty while there is one.
        self.why = "not connected yet"
        self._deadline_s = min(deadline_s, EXCHANGE_S)
        self._on_map = on_map
        self._at = 0
        self._channel: Channel | None = None
        self._news = False
        self._asked = False
        self._closed = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def linked(self) -> bool:
        """Is there a link, as far as we know?"""
        return not self.why

    # -- connecting -------------------------------------------------------------------------------

    def first(self, timeout_s: float) -> None:
        """Connect now, trying all managers for up to ``timeout_s``. Raises TransportError."""
        until = time.monotonic() + timeout_s
        while True:
            reasons = self._connect_any()
            if not reasons:
                return
            if time.monotonic() + 0.1 > until:
                raise TransportError(
                    f"no manager answers ({'; '.join(dict.fromkeys(reasons))}): start one with "
                    "`python -m simm.manager`, or name it by manager= or SIMM_MANAGER"
                )
            time.sleep(0.1)

    def _connect_any(self) -> list[str]:
        """One round through the addresses; nothing when one of them has given a map, else why none has."""
        reasons: list[str] = []
        for _ in self.managers:
            host, port = self.managers[self._at % len(self.managers)]
            try:
                self._channel = self._connect(host, port)
            except (TransportError, RemoteProtocolError) as exc:
                self._at += 1
                reasons.append(f"{host}:{port}: {exc}")
                continue
            self.why = ""
            return []
        self.why = "; ".join(dict.fromkeys(reasons))
        return reasons

    def _connect(self, host: str, port: int) -> Channel:
        until = time.monotonic() + self._deadline_s
        channel = Channel.tcp(host, port, self._deadline_s, self._pushed)
        channel.bound(until)
        try:
            with contextlib.suppress(OSError):
                channel.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option, value in _KEEPALIVE:
                    channel.sock.setsockopt(socket.IPPROTO_TCP, option, value)
                channel.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)
            if self.token:
                channel.call(M.Hello(M.PROTOCOL_MIN, M.PROTOCOL_MAX, M.Role.CLIENT, 0, 0, "", self.token, []))
            self._ask(channel)
            channel.bound()
        except BaseException:
            channel.close()
            raise
        return channel

    def _ask(self, channel: Channel) -> None:
        reply = channel.call(M.MapGet(0, 1))
        if not isinstance(reply, M.MapReply):
            raise RemoteProtocolError("the manager answered with something that is no shard map")
        self._pushed(reply)

    def _pushed(self, msg: Any) -> None:
        if isinstance(msg, M.MapReply):
            self._news = self._on_map(msg) or self._news

    # -- thread -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Follow from now on."""
        self._thread = threading.Thread(target=self._run, name="simm-map", daemon=True)
        self._thread.start()

    def refresh(self) -> None:
        """Ask for the map soon: someone said that ours is old."""
        if not self._asked:
            self._asked = True
            self._kick()

    def _kick(self) -> None:
        with self._lock, contextlib.suppress(OSError, BlockingIOError):
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        retry_s = RETRY_S[0]
        while not self._closed:
            if self._channel is None:
                if self._connect_any():
                    self._sleep(random.uniform(0.5, 1.0) * retry_s)
                    retry_s = min(RETRY_S[1], retry_s * 2)
                    continue
                retry_s = RETRY_S[0]
                log.info("following the manager at %s:%d", *self.managers[self._at % len(self.managers)])
            try:
                self._follow(self._channel)
            except (TransportError, RemoteProtocolError) as exc:
                if not self._closed:
                    log.info("the link to the manager broke: %s", exc)
            except Exception:
                log.exception("following the manager failed")
            channel, self._channel = self._channel, None
            if channel is not None:
                self.why = self.why or channel.broken or "the link broke"
                channel.close()
            self._at += 1
            if not self._closed:
                self._sleep(random.uniform(0.02, 0.2))  # not all clients at the same moment
        with self._lock:
            os.close(self._wake)
            self._wake = -1

    def _sleep(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._closed and (left := until - time.monotonic()) > 0:
            select.select([self._wake], [], [], left)
            self._drain()

    def _drain(self) -> None:
        with contextlib.suppress(OSError):
            os.eventfd_read(self._wake)

    def _follow(self, channel: Channel | None) -> None:
        """Until the link breaks or we are closed."""
        assert channel is not None
        self.why = ""
        poller = select.poll()
        poller.register(channel.sock, select.POLLIN)
        poller.register(self._wake, select.POLLIN)
        now = time.monotonic()
        ping_at = now + random.uniform(*PING_S)
        anyway_at = now + random.uniform(*ASK_ANYWAY_S)
        ask_at, pause_s = now, ASK_S[0]
        while not self._closed:
            now = time.monotonic()
            if (self._asked and now >= ask_at) or now >= anyway_at:
                self._asked = self._news = False
                self._ask(channel)
                pause_s = ASK_S[0] if self._news else min(ASK_S[1], pause_s * 2)
                now = time.monotonic()
                ask_at = now + pause_s * random.uniform(0.5, 1.0)
                anyway_at = now + random.uniform(*ASK_ANYWAY_S)
                ping_at = now + random.uniform(*PING_S)
                continue
            if now >= ping_at:
                channel.call(M.Ping(0))
                ping_at = time.monotonic() + random.uniform(*PING_S)
                continue
            next_at = min(ping_at, anyway_at, ask_at if self._asked else ping_at)
            poller.poll(max(0.0, next_at - now) * 1000 + 1)
            self._drain()
            self._news = False
            channel.poll_pushes()
            if self._news:
                pause_s = ASK_S[0]

    # -- end --------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the thread, and the link with it. Does not wait. Twice is harmless."""
        self._closed = True
        self.why = self.why or "closed"
        self._kick()
        channel = self._channel
        if channel is not None:
            with contextlib.suppress(OSError):
                channel.sock.shutdown(socket.SHUT_RDWR)  # the thread may be waiting for an answer
        if self._thread is None:
            channel, self._channel = self._channel, None
            if channel is not None:
                channel.close()
            with self._lock:
                if self._wake >= 0:
                    os.close(self._wake)
                    self._wake = -1

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    def abandon(self) -> None:
        """After a fork, in the child: close the copies of the descriptors, take no lock."""
        self._closed = True
        if self._channel is not None:
            with contextlib.suppress(OSError):
                self._channel.sock.close()
        wake, self._wake = self._wake, -1
        if wake >= 0:
            with contextlib.suppress(OSError):
                os.close(wake)

"""The manager as its clients reach it: one link at a time, to the first address that leads.

:class:`ManagerClient` makes blocking calls with a deadline, for commands. :class:`Subscription` is a thread that
follows the shard map for a :class:`~simm.client.Client`; ``sdk/routing.py`` decides which of two maps is newer. Both
try the addresses in turn, skip standbys (NOT_LEADER), and reconnect after a link broke.

What can go wrong in a subscription
-----------------------------------
* *The manager dies.* The thread tries the addresses in turn after a jittered pause, which doubles up to two seconds.
  Clients need the manager only to learn of changes, so operations go on.
* *The manager is stopped, or packets to it are dropped.* Every exchange has a deadline. The kernel probes an idle link,
  and a PING about every ten seconds finds a process that does not run.
* *A former leader does not know of its successor.* The thread asks for the map once a minute, which finds it.
* *The manager has lost its state*, and goes on with older epochs than that of the client's map, which would ignore all
  its maps. So each request names the epoch that the client has, and the manager goes beyond (``cluster/recovery.py``).
* *Many operations find the map out of date at once.* Requests for the map are coalesced. The pause between them doubles
  while the answer is the known map; a change is pushed anyway, as the link is subscribed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import random
import select
import socket
import threading
import time
from collections.abc import Callable, Container, Sequence
from typing import Any, Final, TypeVar

from ..config.parsers import TlsOptions
from ..constants import TRACE_S_MAX
from ..errors import PeerError, RemoteProtocolError, TransportError, UsageError, printable
from ..host import fork
from ..host.threads import Waiters
from ..net.allowance import allowed, at_most, free_within
from ..net.channel import Channel, Refused, check_tls, greet, weakly
from ..wire import epoch_messages as E
from ..wire import messages as M
from ..wire import trace_messages as T
from ..wire.hello import client_hello
from ..wire.messages import Status

log = logging.getLogger("simm.client")

#: Bound of a subscription's exchange, seconds; less where the client's own deadline is.
EXCHANGE_S: Final = 2.0
#: What an attempt has at least where the time of a round is over, seconds.
LEAST_S: Final = 0.01
#: Pause between two rounds through all addresses: the first and the longest, seconds.
RETRY_S: Final = (0.1, 2.0)
#: Pause between two requests for the map that brought nothing new: the first and the longest, seconds.
ASK_S: Final = (0.02, 2.0)
#: Seconds between two PINGs, and between two requests for the map that no operation asked for: at random in between.
PING_S: Final = (8.0, 12.0)
ASK_ANYWAY_S: Final = (45.0, 75.0)
#: TCP keepalive: idle, interval (seconds), tries; and how long sent bytes may stay unacknowledged, ms.
_KEEPALIVE: Final = ((socket.TCP_KEEPIDLE, 3), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 3))
_USER_TIMEOUT_MS: Final = 5000

_Reply = TypeVar("_Reply")
_Self = TypeVar("_Self", bound="ManagerClient")


class _Addresses:
    """The managers' addresses, and which of them is in use. Raises UsageError if there is none."""

    def __init__(self, addresses: Sequence[tuple[str, int]]) -> None:
        if not addresses:
            raise UsageError("no manager address given")
        self._all = list(addresses)
        self._at = 0

    def __len__(self) -> int:
        return len(self._all)

    @property
    def current(self) -> tuple[str, int]:
        """The address in use, or tried next."""
        return self._all[self._at % len(self._all)]

    def skip(self) -> None:
        """Use the next address."""
        self._at += 1

    def connect_any(
        self, connect: Callable[[str, int], Channel], skips: Callable[[Exception], bool], until: float = math.inf
    ) -> tuple[Channel | None, str]:
        """Try each address once. Return the first channel that ``connect`` makes, or None and each address's reason.

        ``skips`` decides whether an error means the next address; other errors are raised. ``until``: when the round is
        to be over, monotonic seconds. No address gets more of that than the others that are left.
        """
        reasons = []
        for left in range(len(self._all), 0, -1):
            host, port = self.current
            try:
                with at_most((until - time.monotonic()) / left):
                    return connect(host, port), ""
            except PeerError as exc:
                if not skips(exc):
                    raise
                reasons.append(f"{host}:{port}: {exc}")
                self.skip()
        return None, "; ".join(dict.fromkeys(reasons))


class ManagerClient:
    """One link to a manager, for commands. Not thread-safe.

    Args:
        addresses: (host, port) of each manager, tried in turn.
        deadline_s: bound of each connect, with its HELLO, and of each exchange, seconds.
        token: what the manager's --token-file holds, if it has one.
        tls: options of TLS, None to connect without. Raises ConfigError if they are of no use.
        trusted: users besides this process's own and root whose manager on this host is believed without a token.

    Calls raise :class:`~simm.net.channel.Refused` (a TransportError with the ``status``) if the manager refuses, and
    TransportError if none can be reached within the deadline or the link breaks.
    """

    #: What the client is in its HELLO.
    role: int = M.Role.ADMIN

    def __init__(
        self, addresses: Sequence[tuple[str, int]], *, deadline_s: float = 3.0, token: str = "",
        tls: TlsOptions | None = None, trusted: Container[int] = (),
    ) -> None:  # fmt: skip
        self._addresses = _Addresses(addresses)
        check_tls(tls)
        self.deadline_s = deadline_s
        self.token = token
        self.tls = tls
        self._trusted = trusted
        self._channel: Channel | None = None

    def __repr__(self) -> str:
        return f"<ManagerClient {self._addresses.current}>"

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def connect(self) -> Channel:
        """Make a link unless one stands. Raises TransportError naming each address and its reason."""
        if self._channel is not None and not self._channel.broken:
            with contextlib.suppress(TransportError):
                self._channel.poll_pushes()  # finds a peer that has closed since the last call
                return self._channel
        self.close()
        self._channel, reasons = self._addresses.connect_any(self._connect, _leads_not)
        if self._channel is None:
            raise TransportError(f"no manager answers ({reasons}): start one with `simm manager`")
        return self._channel

    def _connect(self, host: str, port: int) -> Channel:
        until = time.monotonic() + self.deadline_s
        channel = Channel.tcp(host, port, self.deadline_s, tls=self.tls)
        try:
            channel.bound(until)
            greet(channel, M.Service.MANAGER, client_hello(self.role), self.token, trusted=self._trusted)
            channel.bound()
        except TransportError:
            channel.close()
            raise
        return channel

    def close(self) -> None:
        """Close the link. Twice is harmless."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def call(self, msg: Any, answer: type[_Reply]) -> _Reply:
        """Return the leader's answer to a request, of this type."""
        reason = ""
        for _ in range(len(self._addresses)):
            channel = self.connect()
            try:
                reply = channel.call(msg)
            except Refused as exc:
                if exc.status != Status.NOT_LEADER:
                    raise
                host, port = self._addresses.current
                reason = f"{host}:{port}: {exc}"
                self.close()
                self._addresses.skip()
                continue
            if not isinstance(reply, answer):
                channel.fail(f"the manager answered {type(msg).__name__} with {type(reply).__name__}")
            return reply
        raise TransportError(f"no manager leads ({reason}): name them all, or wait until one does")

    def drain(self, name: str, on: bool = True) -> int:
        """Move all shards away from a data server, or let it take its share again; return how many it owns now.

        Refused with UNKNOWN_NODE for an unknown name, UNAVAILABLE if no other server could hold its shards.
        """
        return self.call(M.Drain(int(on), name), M.Done).items

    def status(self) -> dict[str, Any]:
        """Return the cluster's state: epoch, nodes, workers, the manager's counters."""
        try:
            status = _shown(json.loads(self.call(M.ClusterStatus(1), M.StatsReply).json))
        except (ValueError, RecursionError) as exc:
            raise TransportError(f"the manager's status is malformed: {printable(str(exc))}") from None
        if not isinstance(status, dict):
            raise TransportError("the manager's status is malformed: it is no object")
        return status


def _shown(value: Any) -> Any:
    """Return what JSON was made of with every text in it printable."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(str(key)): _shown(each) for key, each in value.items()}
    return [_shown(each) for each in value] if isinstance(value, list) else value


def _leads_not(exc: Exception) -> bool:
    """Return True unless the manager refuses for another reason: then another address would only hide it."""
    return isinstance(exc, TransportError) and (not isinstance(exc, Refused) or exc.status == Status.NOT_LEADER)


class Subscription:
    """A subscription to the shard map at the first of several managers that leads.

    Args:
        managers: (host, port) of each.
        deadline_s: the client's deadline, seconds.
        token: the client's credential, or an empty string.
        namespace: the client's. A manager refuses one that the token may not use, before a data server does.
        tls: options of TLS, None to connect without. Raises ConfigError if they are of no use.
        trusted: as for :class:`ManagerClient`.
        on_map: called with each MAP_REPLY, in the thread that received it. It returns whether the map was news. It
            raises RemoteProtocolError for a map that contradicts itself; the link is dropped then.
        on_epochs: called likewise with what comes before a map if namespaces have epochs.

    Raises TransportError if the process has no descriptor left.
    """

    def __init__(
        self, managers: Sequence[tuple[str, int]], deadline_s: float, token: str,
        on_map: Callable[[M.MapReply], bool], namespace: str = "", *, tls: TlsOptions | None = None,
        trusted: Container[int] = (), on_epochs: Callable[[E.Epochs], None] | None = None,
    ) -> None:  # fmt: skip
        check_tls(tls)
        self.token = token
        self.namespace = namespace
        self.tls = tls
        self._trusted = trusted
        #: Why there is no link; None while there is one.
        self.down_reason: str | None = "not connected yet"
        self._addresses = _Addresses(managers)
        self._deadline_s = min(deadline_s, EXCHANGE_S)
        self._on_map = on_map
        self._on_epochs = on_epochs
        self._channel: Channel | None = None
        #: What an admin wants all clients to trace, and until when, monotonic seconds; None if nobody ever asked.
        self.traces: tuple[T.OrderTrace, float] | None = None
        self._news = False
        #: The epoch of the last map that was news.
        self._epoch = 0
        self._asked = False
        #: Why another attempt is pointless, by the last round through the addresses; empty if it may succeed.
        self.refused = ""
        #: Whether the first round through the addresses is over, or the subscription is closed.
        self._tried = False
        #: Whether it was logged that no manager answers.
        self._warned = False
        self._closed = False
        try:
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError as exc:
            raise TransportError(f"cannot follow the manager: {exc.strerror or exc}") from exc
        self._lock = threading.Lock()
        self._tried_changed = Waiters(self._lock)
        self._thread: threading.Thread | None = None
        fork.in_child(self._after_fork)

    @property
    def connected(self) -> bool:
        """Whether there is a link that is not known to be broken."""
        return self.down_reason is None

    # -- connecting -------------------------------------------------------------------------------

    def connect(self, timeout_s: float) -> None:
        """Connect now, trying all managers for up to ``timeout_s``. Raises TransportError.

        A wrong token, or a port of another server, is reported at once: another attempt would be refused again.
        """
        until = time.monotonic() + timeout_s
        while not self._connect_any(until):
            if self.refused:
                raise TransportError(self.refused)
            if time.monotonic() + 0.1 > until:
                raise TransportError(
                    f"no manager answers ({self.down_reason}): start one with "
                    "`simm manager`, or name it by manager= or SIMM_MANAGER"
                )
            time.sleep(0.1)
        self._end_first_round()

    def _connect_any(self, until: float = math.inf) -> bool:
        """Try each address once, until ``until`` at most; return True if one of them has sent a map."""
        statuses: list[int] = []

        def skips(exc: Exception) -> bool:
            statuses.append(exc.status if isinstance(exc, Refused) else Status.UNAVAILABLE)
            return True

        self._channel, reasons = self._addresses.connect_any(self._connect, skips, until)
        self.refused, self.down_reason = "", reasons
        if self._channel is not None:
            self.down_reason = None
        elif Status.UNAUTHORIZED in statuses:
            self.refused = (
                f"the manager refuses this client, or is not believed ({reasons}): give its token by token= or "
                "SIMM_TOKEN_FILE"
            )
        elif all(status == Status.BAD_REQUEST for status in statuses):
            self.refused = f"there is no manager at this address ({reasons}): name one by manager= or SIMM_MANAGER"
        elif all(status == Status.VERSION for status in statuses):
            self.refused = f"the manager is of another version ({reasons})"
        return self._channel is not None

    def await_first_round(self, timeout_s: float) -> None:
        """Wait until all addresses have been tried once since :meth:`start`. Warn if no manager has answered.

        Raises TransportError if all have refused for good. Otherwise the attempts go on in the background.
        """
        self._tried_changed.wait_for(lambda: self._tried, time.monotonic() + timeout_s)
        if self._channel is None and self.refused:
            raise TransportError(self.refused)
        if self.down_reason is not None:
            self._warn_absent()

    def _end_first_round(self) -> None:
        """Let those go on who wait for the first round. After an interrupt it is to be called again."""
        with self._lock:
            self._tried = True
            self._tried_changed.notify_all()

    def _warn(self, text: str, *arguments: Any) -> None:
        """Warn, once for each time that there is no link."""
        if not self._warned and not self._closed:
            self._warned = True
            log.warning(text, *arguments)

    def _warn_absent(self) -> None:
        reason = self.refused or f"no manager answers ({self.down_reason})"
        self._warn("%s: gets miss and puts fail until one does; trying in the background", reason)

    def _connect(self, host: str, port: int) -> Channel:
        seconds = max(LEAST_S, allowed(self._deadline_s))
        until = time.monotonic() + seconds
        channel = Channel.tcp(host, port, seconds, weakly(self._pushed), self.tls)
        channel.deadline_s = self._deadline_s
        channel.bound(until)
        try:
            with contextlib.suppress(OSError):
                channel.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option, value in _KEEPALIVE:
                    channel.sock.setsockopt(socket.IPPROTO_TCP, option, value)
                channel.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)
            # Without a token too: only the answer says whether both speak one version.
            hello = client_hello(M.Role.CLIENT, namespace=self.namespace)
            greet(channel, M.Service.MANAGER, hello, self.token, trusted=self._trusted)
            self._ask(channel)
            channel.bound()
        except BaseException:
            channel.close()
            raise
        return channel

    def _ask(self, channel: Channel) -> None:
        wanted = E.SUBSCRIBE_MAPS | T.SUBSCRIBE_TRACES | (E.SUBSCRIBE_EPOCHS if self._on_epochs is not None else 0)
        reply = channel.call(M.MapGet(self._epoch, wanted))
        if not isinstance(reply, M.MapReply):
            raise RemoteProtocolError("the manager answered with something that is no shard map")
        self._pushed(reply)

    def _pushed(self, msg: Any) -> None:
        if isinstance(msg, E.Epochs) and self._on_epochs is not None:
            self._on_epochs(msg)
        elif isinstance(msg, T.OrderTrace):
            if fault := T.fault_of(msg, TRACE_S_MAX):
                raise RemoteProtocolError(f"the manager asks for what cannot be: {fault}")
            self.traces = msg, time.monotonic() + msg.seconds
        elif isinstance(msg, M.MapReply) and self._on_map(msg):
            self._news, self._epoch = True, msg.epoch

    # -- thread -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread that follows the map. Raises TransportError if the process has no thread left."""
        self._thread = thread = threading.Thread(target=self._run, name="simm-map", daemon=True)
        try:
            thread.start()
        except BaseException as exc:  # also when interrupted
            if thread.ident is None:
                self._thread = None  # so that close() does what the thread would have done at its end
            if isinstance(exc, RuntimeError) and thread.ident is None:  # else a handler has raised it
                raise TransportError(f"cannot follow the manager: {exc}") from exc
            raise

    def refresh(self) -> None:
        """Ask for the map soon."""
        if not self._asked:
            self._asked = True
            if not self._kick():
                self._asked = False  # the next call asks

    def _kick(self) -> bool:
        """Wake the thread. Return False in a signal's handler that has interrupted one who has the lock."""
        if not free_within(self._lock, self._deadline_s):
            return False
        with self._lock, contextlib.suppress(OSError, BlockingIOError):
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)
        return True

    def _run(self) -> None:
        retry_s = RETRY_S[0]
        level = logging.DEBUG  # of the first link: the router logs a line about the cluster
        while not self._closed:
            if self._channel is None:
                try:
                    connected = self._connect_any()
                except Exception as exc:  # no descriptor for a module that the first link loads, for one
                    log.debug("connecting to the manager failed", exc_info=True)
                    self._addresses.skip()
                    connected, self.down_reason = False, f"{type(exc).__name__}: {exc}"
                # Who waits for the first round raises what refuses for good.
                if not connected and (not self.refused or self._tried):
                    self._warn_absent()
                if not self._tried:
                    self._end_first_round()
                if not connected:
                    self._sleep(random.uniform(0.5, 1.0) * retry_s)
                    retry_s = min(RETRY_S[1], retry_s * 2)
                    continue
                retry_s = RETRY_S[0]
                level = logging.WARNING if self._warned else level
                log.log(level, "following the manager at %s:%d", *self._addresses.current)
                self._warned = False
            level = logging.INFO
            try:
                self._follow(self._channel)
            except PeerError as exc:
                self._warn("the link to the manager broke, and operations go on by the last shard map: %s", exc)
            except Exception:
                log.exception("following the manager failed")
            channel, self._channel = self._channel, None
            if channel is not None:
                self.down_reason = self.down_reason or channel.broken or "the link broke"
                channel.close()
            self._addresses.skip()
            if not self._closed:
                self._sleep(random.uniform(0.02, 0.2))  # so that not all clients reconnect at the same moment
        self._close_wake()

    def _close_wake(self) -> None:
        with self._lock:
            if self._wake >= 0:
                os.close(self._wake)
                self._wake = -1

    def _sleep(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        poller = select.poll()  # select() takes no descriptors from 1024 on, which engines have
        poller.register(self._wake, select.POLLIN)
        while not self._closed and (left := until - time.monotonic()) > 0:
            poller.poll(left * 1000 + 1)
            self._drain()

    def _drain(self) -> None:
        with contextlib.suppress(OSError):
            os.eventfd_read(self._wake)

    def _follow(self, channel: Channel | None) -> None:
        """Follow the map until the link breaks or the subscription is closed."""
        assert channel is not None
        self.down_reason = None
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
            self._news = False
            # Before the sleep: nothing wakes it for a push that came in one piece with an answer.
            channel.poll_pushes()
            if self._news:
                pause_s = ASK_S[0]
            next_at = min(ping_at, anyway_at, ask_at if self._asked else ping_at)
            poller.poll(max(0.0, next_at - time.monotonic()) * 1000 + 1)
            self._drain()

    # -- end --------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the thread, and the link with it. Does not wait. Twice is harmless."""
        self._closed = True
        self.down_reason = self.down_reason or "closed"
        self._end_first_round()
        self._kick()
        channel = self._channel
        if channel is not None:
            with contextlib.suppress(OSError):
                channel.sock.shutdown(socket.SHUT_RDWR)  # the thread may be waiting for an answer
        if self._thread is None:
            channel, self._channel = self._channel, None
            if channel is not None:
                channel.close()
            self._close_wake()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    def _after_fork(self) -> None:
        """Stop, and close the child's copy of the event file."""
        self._closed = True
        wake, self._wake = self._wake, -1
        if wake >= 0:
            with contextlib.suppress(OSError):
                os.close(wake)

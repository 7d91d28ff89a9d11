"""Receives publishers' messages over ZMQ: one subscription for each, one thread for all of them.

A message has three frames: topic, number in 8 big-endian bytes, MessagePack. A replay is a DEALER's question: an empty
frame, and the number from which it begins. The answers have an empty frame, the number and the message, and in newer
versions the topic before the number; the last has number -1. That is what vLLM and SGLang publish.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from ..errors import UsageError
from .blocks import SOURCES_MAX, Blocks
from .events import MESSAGE_BYTES_MAX
from .libraries import zmq
from .sources import LOGGED, Registration, Source
from .streams import Stream

log = logging.getLogger("simm.index.publishers")

#: Messages taken from one publisher before the next one has its turn.
TURN: Final = 64
#: Seconds without an answer after which a replay has failed, and without one that brings it forward.
REPLAY_IDLE_S: Final = 2.0
REPLAY_S: Final = 60.0
#: Between two questions for a replay of which the first has failed, and twice as long each time. A store's publisher,
#: which needs a while for a snapshot, is always asked after the first of these. And between attempts to listen at all.
RETRY_S: Final = 1.0
RETRY_MAX_S: Final = 60.0
#: A peer that has been silent for so long is gone, ms; and how often it is asked for a sign.
SILENT_MS: Final = 10_000
ASK_MS: Final = 2000
#: Messages that ZMQ keeps for this process, for each publisher: a GiB at the worst. More wait at the publisher.
QUEUE_MESSAGES: Final = 64
#: ZMQ's sockets for each publisher: SUB, both ends of its monitor, DEALER.
_SOCKETS: Final = 4
#: Of a message; and of a replay's answer, which has the topic or not.
_FRAMES: Final = 3
_FRAMES_MAX: Final = 4
_END: Final = (1 << 64) - 1
#: What ZMQ connects to: a host's name or address, as it checks them, or a socket's path.
_ENDPOINT: Final = re.compile(
    r"tcp://(?:[A-Za-z0-9][A-Za-z0-9._-]*|\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9._-]+)?\]):([0-9]{1,5})|ipc:///[!-~]{1,100}"
)
_TICK_S: Final = 0.5


def check_endpoint(text: str) -> str:
    """Return an address that a publisher can have. Raises UsageError for others."""
    found = _ENDPOINT.fullmatch(text) if len(text) <= 256 else None
    if found is None or (found[1] and not 0 < int(found[1]) < 1 << 16):
        why = "; $ is left of a variable that nothing has replaced" if "$" in text else ""
        raise UsageError(f"{text[:80]!r} is no publisher's address: use tcp://HOST:PORT or ipc:///PATH{why}")
    return text


def _pause_s(failures: int) -> float:
    """Return the seconds before the next attempt."""
    return min(RETRY_S * 2.0 ** min(max(0, failures - 1), 16), RETRY_MAX_S)


class _Link:
    """A publisher's sockets. Used by the thread alone."""

    def __init__(self, context: Any, stream: Stream, poller: Any) -> None:
        self.stream = stream
        self._context = context
        self._poller = poller
        registration = stream.source.registration
        self._replay_at = registration.replay
        self.dealer: Any = None
        with contextlib.ExitStack() as undo:  # whoever registers what fails again and again must not use up all sockets
            self.sub = context.socket(zmq.SUB)
            undo.callback(self.sub.close, 0)
            self._options(self.sub, registration.endpoint)
            self.monitor = self.sub.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
            undo.callback(self.monitor.close, 0)
            undo.callback(self.sub.disable_monitor)
            self.sub.subscribe(b"")
            self.sub.connect(registration.endpoint)
            undo.pop_all()
        #: When a replay's last answer was read, and the last that brought it forward; when the last replay ended.
        self._heard = self._moved = self._ended = 0.0
        for each in (self.sub, self.monitor):
            poller.register(each, zmq.POLLIN)

    @staticmethod
    def _options(sock: Any, endpoint: str) -> None:
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES)
        sock.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
        sock.setsockopt(zmq.RECONNECT_IVL, 100)
        sock.setsockopt(zmq.HEARTBEAT_IVL, ASK_MS)
        sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENT_MS)
        sock.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        # Only then: ZMQ would take a name for its IPv6 address, if it has one, and engines listen on IPv4.
        sock.setsockopt(zmq.IPV6, endpoint.startswith("tcp://["))

    def sockets(self) -> list[Any]:
        """Return what may have something to read; the monitor first, as it tells whose messages follow."""
        return [self.monitor, self.sub, *([self.dealer] if self.dealer is not None else [])]

    def close(self) -> None:
        """Close all sockets."""
        self.end_replay()
        with contextlib.suppress(zmq.ZMQError):  # it is closed already
            self.sub.disable_monitor()
        for each in (self.monitor, self.sub):
            self._drop(each)

    def _drop(self, sock: Any) -> None:
        """Close a socket, whether it is polled or not."""
        with contextlib.suppress(KeyError):
            self._poller.unregister(sock)
        sock.close(0)

    def read(self, sock: Any) -> None:
        """Take what has arrived at a socket, up to a turn's share."""
        for _ in range(TURN):
            try:
                frames = self._frames(sock)
            except zmq.Again:
                return
            if sock is self.monitor:
                self._event(int.from_bytes(frames[0][:2], "little"))
            elif sock is self.dealer:
                if not self._answer(frames):
                    return
            elif len(frames) == _FRAMES and len(frames[1]) == 8:
                self.begin_replay(self.stream.message(int.from_bytes(frames[1], "big"), frames[2]))
                if not self.stream.asking:
                    self.end_replay()
            else:
                self.stream.counts["refused"] += 1

    @staticmethod
    def _frames(sock: Any) -> list[bytes]:
        """Return the first frames of a message; others are dropped. Raises zmq.Again if there is none."""
        frames = [sock.recv(zmq.NOBLOCK)]
        while sock.getsockopt(zmq.RCVMORE):
            frame = sock.recv(zmq.NOBLOCK)
            if len(frames) <= _FRAMES_MAX:
                frames.append(frame)
        return frames

    def _event(self, event: int) -> None:
        if event == zmq.EVENT_DISCONNECTED:
            self.end_replay()
            self._drop_waiting()
            self.stream.disconnected()
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.begin_replay(self.stream.connected())

    def _drop_waiting(self) -> None:
        """Drop what a connection that is over has sent, and nobody has read: read later, it would be believed."""
        with contextlib.suppress(zmq.Again):
            for _ in range(QUEUE_MESSAGES):
                self._frames(self.sub)

    def _answer(self, frames: list[bytes]) -> bool:
        """Take a part of a replay. Return False after the last one."""
        self._heard = time.monotonic()
        if len(frames) not in (_FRAMES, _FRAMES_MAX) or frames[0] or len(frames[-2]) != 8:
            self.stream.counts["refused"] += 1
            return True
        number = int.from_bytes(frames[-2], "big")
        if number != _END:
            before = self.stream.next
            self.stream.replayed(number, frames[-1])
            if self.stream.next != before:
                self._moved = self._heard
            return True
        self.end_replay()
        self.stream.replay_ended()
        return False

    def begin_replay(self, start: int | None) -> None:
        """Ask for messages from this number on; None: for none. A socket for each replay keeps answers apart."""
        if start is None:
            return
        self.end_replay()
        try:
            with contextlib.ExitStack() as undo:
                dealer = self._context.socket(zmq.DEALER)
                undo.callback(dealer.close, 0)
                self._options(dealer, self._replay_at)
                dealer.connect(self._replay_at)
                dealer.send_multipart([b"", start.to_bytes(8, "big")], zmq.NOBLOCK)
                self._poller.register(dealer, zmq.POLLIN)
                undo.pop_all()
        except (zmq.ZMQError, ValueError) as exc:  # as one that nobody answers: what comes later counts
            self._ended = time.monotonic()
            self.stream.replay_failed()
            if self.stream.counts["failed replays"] in LOGGED:
                log.warning("cannot ask %r for a replay: %s", self._replay_at, exc)
            return
        self.dealer = dealer
        self._heard = self._moved = time.monotonic()

    def end_replay(self) -> None:
        """Close the socket of a replay, if there is one."""
        if self.dealer is not None:
            self._drop(self.dealer)
            self.dealer = None
            self._ended = time.monotonic()

    def tick(self, now: float) -> None:
        """Give a replay up that takes too long, or ask for it again."""
        if self.dealer is None:
            if now - self._ended > self._pause():
                self.begin_replay(self.stream.retry())
        elif now - self._moved > REPLAY_S or (now - self._heard > REPLAY_IDLE_S and not self._answer_waits()):
            self.end_replay()
            self.stream.replay_failed()

    def _answer_waits(self) -> bool:
        """Return True if an answer has come that was not read yet, as the turns of the others took so long."""
        return bool(self.dealer.getsockopt(zmq.EVENTS) & zmq.POLLIN)

    def _pause(self) -> float:
        """Return for how long nothing is asked after a replay."""
        if self.stream.source.registration.type == "simm" and not self.stream.held:
            return RETRY_S  # it may have come back
        return _pause_s(self.stream.failures)


class Publishers:
    """All publishers that are registered, and the thread that reads them. Any thread may call the methods."""

    def __init__(self, index: Blocks) -> None:
        self.index = index
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, _SOCKETS * SOURCES_MAX + _SOCKETS)
        self._poller = zmq.Poller()
        self._links: dict[Source, _Link] = {}
        self._leases: dict[tuple[str, str, int | None], float] = {}
        #: Whose sockets could not be opened: how often, and when they are tried again.
        self._unopened: dict[Source, tuple[int, float]] = {}
        self._todo: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake, self._woken = socket.socketpair()
        for each in (self._wake, self._woken):
            each.setblocking(False)
        self._poller.register(self._woken, zmq.POLLIN)
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="simm-index", daemon=True)
        self._thread.start()

    def register(self, registration: Registration) -> Source:
        """Listen to a publisher, or renew its lease. Raises UsageError."""
        check_endpoint(registration.endpoint)
        if registration.replay:
            check_endpoint(registration.replay)
        with self.index.lock:
            known = self.index.sources.get(registration.name)
            source = self.index.register(registration)
            if registration.lease_s:
                self._leases[registration.name] = time.monotonic() + registration.lease_s
            else:
                self._leases.pop(registration.name, None)
            if source is not known or source in self._unopened:
                self._do(lambda: self._open(source, known))
        return source

    def unregister(self, name: tuple[str, str, int | None]) -> bool:
        """Listen to a publisher no more, and forget what it holds. Return False if it is unknown."""
        with self.index.lock:
            source = self.index.sources.get(name)
            self._leases.pop(name, None)
            if source is None:
                return False
            self._do(lambda: self._close(source))
            return self.index.unregister(name)

    def stream(self, source: Source) -> Stream | None:
        """Return a source's stream; None before the thread has begun it."""
        link = self._links.get(source)
        return None if link is None else link.stream

    @property
    def alive(self) -> bool:
        """False once nobody reads the publishers any more."""
        return self._thread.is_alive()

    def close(self) -> None:
        """End the thread and close all sockets."""
        self._ended = True
        self._do(lambda: None)
        self._thread.join()

    def _do(self, what: Callable[[], None]) -> None:
        """Let the thread do something."""
        self._todo.put(what)
        with contextlib.suppress(OSError):  # it will wake anyway, or has ended already
            self._wake.send(b"\0")

    # -- the thread --------------------------------------------------------------------------------------

    def _open(self, source: Source, old: Source | None) -> None:
        if old is not None and old is not source:
            self._close(old)
        failures, _ = self._unopened.pop(source, (0, 0.0))
        if self.index.sources.get(source.registration.name) is not source or source in self._links:
            return  # it is gone again, or was opened meanwhile
        stream = Stream(self.index, source, replays=bool(source.registration.replay))
        try:
            self._links[source] = _Link(self._context, stream, self._poller)
            source.lost = False  # it is as one that was registered now
        except (zmq.ZMQError, ValueError) as exc:
            failures += 1
            self._unopened[source] = failures, time.monotonic() + _pause_s(failures)
            if failures in LOGGED:
                log.warning("cannot listen to %r (%d so far): %s", source.registration.endpoint, failures, exc)
            source.lost = True

    def _close(self, source: Source) -> None:
        self._unopened.pop(source, None)
        link = self._links.pop(source, None)
        if link is not None:
            link.close()
            self.index.clear(source)  # a message may have come since it was unregistered

    def _run(self) -> None:
        ticked = 0.0
        try:
            while not self._ended:
                ready = dict(self._poller.poll(int(_TICK_S * 1000)))
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(4096)
                while not self._todo.empty():
                    self._todo.get()()
                for link in list(self._links.values()):
                    for sock in link.sockets():
                        if sock in ready and sock in link.sockets():
                            self._read(link, sock)
                now = time.monotonic()
                if now - ticked >= _TICK_S:
                    ticked = now
                    self._tick(now)
        finally:
            for link in self._links.values():
                with contextlib.suppress(zmq.ZMQError):  # the context closes what is left
                    link.close()
            self._context.destroy(0)
            self._wake.close()
            self._woken.close()

    def _read(self, link: _Link, sock: Any) -> None:
        link.stream.more = True
        try:
            with self._alone(link):
                link.read(sock)
                self.index.flush()
        finally:
            link.stream.more = False

    @staticmethod
    @contextlib.contextmanager
    def _alone(link: _Link) -> Iterator[None]:
        """Let what fails with one publisher not end the others. What is known of it may be wrong then."""
        try:
            yield
        except Exception:
            counts = link.stream.counts
            counts["failures"] += 1
            if counts["failures"] in LOGGED:
                log.exception(
                    "a message of %r (%d so far)", link.stream.source.registration.instance, counts["failures"]
                )
            link.end_replay()
            link.stream.failed()

    def _tick(self, now: float) -> None:
        for link in self._links.values():
            with self._alone(link):
                link.tick(now)
        for source, (_, when) in list(self._unopened.items()):
            if when <= now:
                self._open(source, None)
        for name, until in list(self._leases.items()):
            if until <= now:
                self._end(name, until)

    def _end(self, name: tuple[str, str, int | None], until: float) -> None:
        """End a lease, unless it was renewed meanwhile."""
        with self.index.lock:
            if self._leases.get(name) == until:
                log.info("the lease of %r has ended", name)
                self.unregister(name)

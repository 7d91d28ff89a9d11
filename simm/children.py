"""How a data server's supervisor forks, and what a child of it must do before anything else.

A fork copies all that the supervisor has: the locks by which its segments are known to be owned, the descriptors of
other children, the way signals wake the loop. The child gives all of that up, asks to end with its parent, and then
runs its body; it never returns to the supervisor's code.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final

from .errors import SimmError
from .loop import Loop
from .process import Child, close_descriptors_but, die_with_parent, reaped
from .shm import OwnedSegment

log = logging.getLogger("simm.dataserver")

#: After a fork that failed.
FORK_AGAIN_S: Final = 0.5
#: A name that has not been resolved by then is tried again later.
RESOLVE_S: Final = 5


class Children:
    """Forks for one supervisor; ``segments`` are all that it owns."""

    def __init__(self, loop: Loop, segments: Callable[[], Iterable[OwnedSegment]]) -> None:
        self._loop = loop
        self._segments = segments
        self._resolvers: list[int] = []
        #: Nothing is started any more.
        self.stopping = False

    def fork(
        self, body: Callable[[socket.socket], None], keep: Sequence[int], mine: OwnedSegment | None = None
    ) -> Child:
        """Fork a child that runs ``body`` with its end of a socket pair; it keeps the segment ``mine`` and no other.

        Raises OSError when the system has no process, memory or descriptor to spare.
        """
        ours, theirs = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            pid = os.fork()
        except OSError:
            ours.close()
            theirs.close()
            raise
        if pid:
            theirs.close()
            return Child(pid, ours)
        code = 1
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)
            die_with_parent()
            for segment in self._segments():
                segment.release_in_child()
                if segment is not mine:
                    segment.close()
            close_descriptors_but({theirs.fileno(), *keep})
            body(theirs)
            code = 0
        except SimmError as exc:
            log.error("%s", exc)
        except BaseException:
            log.exception("process %d failed", os.getpid())
        finally:
            logging.shutdown()
            os._exit(code)

    def or_later(self, start: Callable[[], None]) -> None:
        """Start a child; again and again where the system has no process or memory to spare just now."""
        if self.stopping:
            return
        try:
            start()
        except OSError as exc:
            log.error("cannot start a process: %s; trying again", exc)
            self._loop.call_later(FORK_AGAIN_S, partial(self.or_later, start))

    def resolve(self, host: str, callback: Callable[[str], None]) -> None:
        """A host's address by a child process, as a resolver may hang; the callback gets nothing when there is none."""

        def body(sock: socket.socket) -> None:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.alarm(RESOLVE_S)  # its default action ends us
            for family in (socket.AF_INET, socket.AF_INET6):
                with contextlib.suppress(OSError):
                    found = socket.getaddrinfo(host, None, family, socket.SOCK_STREAM)
                    sock.sendall(str(found[0][4][0]).encode())
                    return

        try:
            child = self.fork(body, [])
        except OSError as exc:
            log.error("cannot start a process: %s", exc)
            callback("")
            return

        def answered(_mask: int) -> None:
            address = child.sock.recv(256).decode()
            self._loop.unwatch(child.sock)
            child.sock.close()
            callback(address)

        self._resolvers.append(child.pid)
        self._loop.watch(child.sock, answered)

    def reap(self) -> None:
        """Forget the resolvers that have ended."""
        self._resolvers = [pid for pid in self._resolvers if not reaped(pid)]

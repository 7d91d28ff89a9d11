"""A real worker in a thread of this process: sockets, rings and pidfds as in life, and still scripted.

``frozen`` stops it between two requests, as SIGSTOP would. ``die`` ends it as kill -9 would: no clean-up, the
sockets closed by the kernel; ``start`` then recovers its arena, at the same address.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import threading
from collections.abc import Iterator, Sequence
from types import TracebackType

from simm.arena.store import Store
from simm.config.tokens import Token
from simm.ipc.arena_files import OwnedArena, new_generation
from simm.ipc.session import WorkerSession
from simm.net.channel import Channel
from simm.net.listeners import listen_tcp, listen_unix
from simm.net.loop import Loop
from simm.server.stream import Stream
from simm.server.worker import Worker, WorkerSettings
from simm.wire import messages as M
from tests.support.consistency import check
from tests.support.store_world import ALL_SHARDS, new_segment, owned, remove_segment
from tests.support.waiting import WAIT_S


class WorkerThread:
    """One arena and its worker; a context manager."""

    def __init__(self, size: int = 16 << 20, *, poll_us: int = 0, all_shards: bool = True) -> None:
        self.segment: OwnedArena = new_segment(size)
        self.folder = tempfile.mkdtemp(prefix="simm-w-")
        self.path = os.path.join(self.folder, "w.sock")
        self.poll_us = poll_us
        self.all_shards = all_shards
        self.fresh = True
        self.start()

    def __enter__(self) -> WorkerThread:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if self.thread.is_alive():  # a test that killed it may have failed since
            self.die()
        remove_segment(self.segment)
        os.rmdir(self.folder)

    def start(self) -> None:
        """A new worker on the arena, with all shards unless they are somebody else's business."""
        if self.fresh:
            self.store = Store.create(self.segment.mm, generation=new_generation())
            self.fresh = False
        else:
            self.store = Store.recover(self.segment.mm, self.segment.name)
        self.loop = Loop()
        settings = WorkerSettings(self.segment.name, self.segment.data.fd, poll_us=self.poll_us)
        self.worker = Worker(self.store, settings, self.loop)
        self.listener = listen_unix(self.path)
        self._freeze, far = socket.socketpair()
        self._far = far
        self._frozen, self._thaw = threading.Event(), threading.Event()
        self.loop.watch(far, lambda _mask: self._hold())
        ours, theirs = socket.socketpair()
        self.worker.adopt_supervisor(theirs)
        self.worker.start(self.listener)
        self.thread = threading.Thread(target=self.worker.rings.run, name="test-worker", daemon=True)
        self.thread.start()
        self.supervisor = Channel(ours, WAIT_S)
        if self.all_shards:
            self.supervisor.call(M.Shards(1, *owned(ALL_SHARDS, 1)))

    def _hold(self) -> None:
        self._far.recv(1)
        self._frozen.set()
        self._thaw.wait()
        self._thaw.clear()

    @contextlib.contextmanager
    def frozen(self) -> Iterator[Store]:
        """The worker does nothing meanwhile; its store may be looked at, and played with."""
        self._freeze.send(b"x")
        if not self._frozen.wait(WAIT_S):
            raise AssertionError("the worker is stuck")
        self._frozen.clear()
        try:
            yield self.store
        finally:
            self._thaw.set()

    def die(self) -> None:
        """kill -9."""
        with self.doomed():
            pass

    @contextlib.contextmanager
    def doomed(self) -> Iterator[None]:
        """The worker does nothing meanwhile, and dies at the end as by kill -9."""
        with self.frozen():
            yield
            self.loop.running = False
        self.thread.join(WAIT_S)
        if self.thread.is_alive():
            raise AssertionError("the worker is stuck")
        for peer in list(self.loop.peers):
            peer.sock.close()
            for fd in peer.fds:
                os.close(fd)
        for fd in self.worker._pidfds.values():
            os.close(fd)
        for sock in (self.listener, self._freeze, self._far, self.supervisor):
            sock.close()
        self.loop.selector.close()
        os.unlink(self.path)

    def session(self, *, ring: bool = True, deadline_s: float = WAIT_S) -> WorkerSession:
        """A client's session."""
        return WorkerSession(self.path, "default", deadline_s, ring=ring)

    def channel(self) -> Channel:
        """A bare connection, without HELLO."""
        return Channel.unix(self.path, WAIT_S)

    def hello(self, role: int = M.Role.CLIENT, namespace: str = "default") -> tuple[Channel, M.Welcome]:
        """A connection with a session, for tests that speak the protocol themselves."""
        channel = self.channel()
        welcome = channel.call(M.Hello(M.PROTOCOL_MIN, M.PROTOCOL_MAX, role, 0, 0, namespace, "", []))
        return channel, welcome


class StreamThread:
    """A real stream in a thread of this process, for a worker that need not live; a context manager."""

    def __init__(self, path: str, *, tokens: Sequence[Token] = ()) -> None:
        self.loop = Loop()
        self.stream = Stream(self.loop, path, tokens)
        self.listener = listen_tcp("127.0.0.1", 0)
        self.address = self.listener.getsockname()[:2]
        self.loop.listen(self.listener, self.stream)
        self._stop, far = socket.socketpair()
        self._far = far
        self.loop.watch(far, lambda _mask: self.loop.stop())
        self.thread = threading.Thread(target=self.loop.run, name="test-stream", daemon=True)
        self.thread.start()

    def __enter__(self) -> StreamThread:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._stop.send(b"x")
        self.thread.join(WAIT_S)
        if self.thread.is_alive():
            raise AssertionError("the stream is stuck")
        self.loop.close()
        self.stream.keeper.close()
        self._stop.close()
        self._far.close()

    def channel(self, role: int = M.Role.CLIENT, *, hello: bool = True, namespace: str = "default") -> Channel:
        """A connection, which has said HELLO."""
        channel = Channel(socket.create_connection(self.address), WAIT_S)
        if hello:
            channel.call(M.Hello(M.PROTOCOL_MIN, M.PROTOCOL_MAX, role, 0, 0, namespace, "", []))
        return channel


def nothing_is_lost(worker: WorkerThread, session: WorkerSession) -> None:
    """All grants that the worker has given are in the pool or will be told of, and no answer was left unread."""
    with worker.frozen() as store:
        store.apply_pending()
        check(store)
        mine = store.sessions.by_id[session.session]
        known = {grant[0] for pool in session.pool.stocks.values() for grant in pool}
        assert set(mine.grants) == known | {grant[0] for grant in mine.prepared}
    assert not session.copying and not session.frames

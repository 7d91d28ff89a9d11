"""Give a worker's slot its sockets, and say what each of its processes runs.

Nothing here starts a process: the supervisor (``dataserver.py``) does, and restarts what dies.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from ...arena.vault import suspend
from ...config.live import LiveSettings
from ...config.parsers import Address
from ...host import numa
from ...host.threads import LACKING
from ...ipc import segments
from ...ipc.arena_files import OwnedArena
from ...net.listeners import NamedSocket, open_listener
from ...wire import messages as M
from ..arena_stock import ArenaStock
from ..children import OOM_WORKER, ChildError, Children, StreamProcess, Supervised, WorkerSlot
from ..migration import MoverSettings, run_mover
from ..operators.admin import follow_in_stream, follow_settings, keep_shares
from ..options import DataServerOptions
from ..rdma_supervisor import Endpoints
from ..stream import run_stream
from ..worker import Worker, WorkerSettings, start_worker

#: Exit code of a worker that finds its arena beyond recovery.
UNRECOVERED: Final = 3
#: A worker gives the kernel so long to end a supervisor whose connection has closed.
ORPHAN_S: Final = 30.0
#: Exit code of a worker whose supervisor has closed the connection and lives, or that somebody else has told to end.
CUT_OFF: Final = 5
#: A supervisor that ends closes its connections before the kernel gives its children another parent, moments later.
REPARENTED_S: Final = 5.0

OnMessage = Callable[[WorkerSlot, Any, int], None]


class Ended(BaseException):
    """SIGTERM has come while a worker recovers its arena. What catches errors of the arena's contents lets it pass."""


class Opener:
    """Opens the slots of one data server. ``on_worker``, ``on_mover``: get the messages of their processes.

    ``live`` must be set before the first slot is opened.
    """

    live: LiveSettings

    def __init__(
        self, options: DataServerOptions, instance: int, children: Children, stock: ArenaStock, endpoints: Endpoints,
        on_worker: OnMessage, on_mover: OnMessage,
    ) -> None:  # fmt: skip
        self.options = options
        self.instance = instance
        self._children = children
        self._stock = stock
        self._endpoints = endpoints
        self._on_worker = on_worker
        self._on_mover = on_mover
        self._memory = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("Q")

    @property
    def memory(self) -> int:
        """The bytes of all arenas now, which processes forked earlier see too: a worker's part of a quota follows."""
        return self._memory[0]

    @memory.setter
    def memory(self, size: int) -> None:
        self._memory[0] = size

    def open(self, slot: WorkerSlot) -> list[socket.socket | NamedSocket]:
        """Bind a slot's sockets and make its processes, without starting them. Return what is to be closed at the end.

        Raises OSError, SimmError. Nothing is left then.
        """
        options = self.options
        with contextlib.ExitStack() as undo:
            slot.unix = unix = NamedSocket(
                segments.socket_path(options.runtime_dir, options.name, slot.number), options.group
            )
            undo.callback(unix.close)
            undo.callback(os.unlink, unix.path)
            rdma_port = self._endpoints.listen(slot, self._id_of(slot))
            undo.callback(self._endpoints.remove, slot.number)
            tcp = open_listener(Address(options.listen_host, options.port_of(slot.number)), "--listen")
            undo.callback(tcp.close)
            slot.tcp = tcp
            slot.worker = self.worker_of(slot)
            slot.streams = [self._stream_of(slot, tcp, rdma_port) for _ in range(options.streams)]
            slot.mover = self._mover_of(slot)
            undo.pop_all()
        return [unix, tcp]

    def _share_of(self, slot: WorkerSlot) -> tuple[int, int]:
        return slot.segment.size, max(slot.segment.size, self.memory)

    def worker_of(self, slot: WorkerSlot) -> Supervised:
        """Return the worker of a slot, which has its UNIX socket."""
        parent = os.getpid()  # not asked for in the child: the supervisor may have ended by then

        def body(supervisor: socket.socket) -> None:
            arena = slot.segment
            try:
                # Until the worker has a loop; a recovery takes long.
                signal.signal(signal.SIGTERM, _end)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
                if os.getppid() != parent:
                    raise Ended
                worker = self._begin(slot, supervisor)
            except Ended:
                close = partial(segments.store_closed, arena.name)
                self._leave(arena, os.getppid() != parent, lambda: suspend(arena.mm, arena.name, slot.vault), close)
                return
            store = worker.store
            worker.run()
            if worker.orphaned and not _reparented(parent):
                # The arena stays open, as after a crash: only so a successor can take it over.
                raise ChildError("the supervisor lives, and has closed its connection to this process", CUT_OFF)

            def suspended() -> bool:
                if store.cluster:  # without one there is nothing to keep
                    store.suspend()
                return bool(store.cluster)

            # The kernel's signal may come before the end of the supervisor's connection.
            self._leave(arena, worker.orphaned or os.getppid() != parent, suspended, store.close)

        return Supervised(
            self._children, f"worker {slot.number}", body, [*slot.segment.fds, *slot.unix.fds],
            partial(self._on_worker, slot), segment=slot.segment, oom=OOM_WORKER, blocks=True,
        )  # fmt: skip

    def _begin(self, slot: WorkerSlot, supervisor: socket.socket) -> Worker:
        """Return the worker of a slot, in its process, once it has its arena and serves.

        Raises ChildError for an arena beyond recovery, and whatever the system lacks.
        """
        numa.pin(slot.node)
        options, arena = self.options, slot.segment
        arena.lock_writer()
        fresh = self._stock.is_fresh(arena, slot.vault)
        limits = options.tokens, partial(self._share_of, slot), self.instance
        settings = WorkerSettings(arena.name, arena.data.fd, options.poll_us, options.group is not None, *limits)
        try:
            shares = keep_shares(self.live)
            store = self._stock.store_in(slot.number, arena, slot.vault, self.live["policy"], shares)
            worker = start_worker(store, settings, slot.unix, supervisor)
            follow_settings(self.live, worker)
        except LACKING:
            raise  # no fault of the arena
        except Exception as exc:
            if fresh:
                raise
            raise ChildError(f"{arena.name} cannot be recovered: {exc or type(exc).__name__}", UNRECOVERED) from exc
        return worker

    def _leave(
        self, arena: OwnedArena, orphaned: bool, suspended: Callable[[], bool], close: Callable[[], None]
    ) -> None:
        """Suspend the arena of a worker that ends, if it may be kept; else close it, and remove it if nobody else does.

        ``orphaned``: the supervisor has ended. Raises ChildError if it lives and has not told the worker to end: the
        arena stays open then, for a successor.
        """
        if not orphaned and not self._children.stopping:
            raise ChildError("told to end (SIGTERM), and not by the supervisor", CUT_OFF)
        gone = orphaned and arena.sealed  # with the supervisor, which cannot keep it any more
        if self.options.warm and not gone and suspended():
            return
        close()
        # If the supervisor was killed, nobody else removes the segment before the next start.
        arena.unlock()
        segments.remove_if_left(arena.name, ORPHAN_S if orphaned else 0.0)

    def _id_of(self, slot: WorkerSlot) -> str:
        """Return what clients with a token ask for."""
        return M.WorkerInfo(slot.number, 0, 0, self.instance, 0, self.options.name, "", "", 0).server

    def _stream_of(self, slot: WorkerSlot, tcp: socket.socket, rdma_port: int) -> StreamProcess:
        def body(supervisor: socket.socket) -> None:
            numa.pin(slot.node)
            follow_in_stream(self.live)
            options, name = self.options, self._id_of(slot)
            serve = (options.tls, options.users)
            run_stream(tcp, slot.unix.direct_path, supervisor, options.tokens, rdma_port, name, *serve)

        name = f"stream of worker {slot.number}"
        return StreamProcess(self._children, name, body, [tcp.fileno(), *slot.unix.fds])

    def _mover_of(self, slot: WorkerSlot) -> Supervised:
        options = self.options
        settings = MoverSettings(
            options.name, self.instance, slot.number, slot.unix.direct_path,
            options.own_token, options.move_bytes_per_s, options.tls.movers if options.tls else None,
            options.server_uids, self.live,
        )  # fmt: skip

        def body(supervisor: socket.socket) -> None:
            numa.pin(slot.node)
            run_mover(settings, supervisor)

        name = f"mover of worker {slot.number}"
        return Supervised(self._children, name, body, slot.unix.fds, partial(self._on_mover, slot))


def close_all(shared: list[socket.socket | NamedSocket]) -> None:
    """Close a slot's sockets and remove their paths, for a slot that is not used after all."""
    for each in shared:
        if isinstance(each, NamedSocket):
            with contextlib.suppress(OSError):
                os.unlink(each.path)
        each.close()


def _end(_number: int, _frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Ended


def _reparented(parent: int) -> bool:
    """Return whether this process has another parent than ``parent``, or gets one within ``REPARENTED_S``."""
    until = time.monotonic() + REPARENTED_S
    while os.getppid() == parent:
        if time.monotonic() >= until:
            return False
        time.sleep(0.005)
    return True

"""The child processes of a data server's supervisor: how they are forked, and what is known of each.

A fork copies all that the supervisor has: the locks by which its segments are known to be owned, the descriptors of
other children, the way signals wake the loop. The child gives all of that up, asks to end with its parent, runs its
body, and exits. Until its body says otherwise SIGTERM ends it at once. It keeps the files that log handlers write to.
It never frees a descriptor's number that an object of the supervisor still knows (``give_up_descriptors_but``): a log
handler that wrote to a reused number once destroyed an arena.

Where memory runs out, the kernel ends the process with the largest score. The death of the supervisor would end all
others, and that of a stream costs only its connections. So the supervisor lowers its score as far as it may, and unmaps
the arenas after it has faulted them in (``server/arena_stock.py``); each child raises its own by ``oom``.
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from ..arena.events.victims import evicted_in
from ..arena.vault import Vault
from ..config.logs import log_as
from ..errors import CorruptionError, SimmError
from ..host.threads import LACKING
from ..ipc.arena_files import OwnedArena
from ..ipc.tally import Continued, Totals
from ..net.listeners import NamedSocket
from ..net.loop import Loop
from ..net.peer import Peer, Service
from ..net.process import (
    OOM_NEVER,
    Child,
    die_with_parent,
    end_children,
    give_up_descriptors_but,
    oom_score_adj,
    reaped,
    set_oom_score_adj,
)
from ..rpc import Frame, decode, encode
from ..wire import messages as M
from ..wire.epoch_messages import Epochs
from .options import DataServerOptions
from .slots.failures import Failures

log = logging.getLogger("simm.dataserver")

#: Pause after a failed fork.
FORK_AGAIN_S: Final = 0.5
#: Limit for resolving a name; the caller tries again later.
RESOLVE_S: Final = 5
#: Request ids on a worker's socket pair: STATS and what needs no answer, and SHARDS from there on.
STATS_ID: Final = 1
SHARDS_ID: Final = 2
#: Within this time a worker that dies again and again is restarted at most so often; and so often in a row if it does
#: not come to serve, which takes some minutes: memory or threads may be scarce for as long. One that never has served
#: is given up sooner.
RESTART_WINDOW_S: Final = 60.0
RESTARTS_MAX: Final = 60
STARTS_MAX: Final = 8
#: Before the successor of a process that did not come to serve: doubled for each one in a row, up to the second. That
#: of a stream comes sooner: meanwhile its worker may serve.
PAUSE_S: Final = (0.2, 5.0)
STREAM_PAUSE_S: Final = 2.5
#: A process that is due must be there so soon; and that of a worker which has served before it has been down for so
#: long, as the host may have no process to spare. One that dies after that without having served is the last.
DUE_S: Final = 1.0
DOWN_S: Final = 300.0
#: Exit code of a worker whose arena was overwritten while it served. Its successor mends that, and may well meet the
#: same soon: none of them is at fault, unless no worker has served for so long.
CORRUPT: Final = 4
CORRUPT_S: Final = 10.0
#: A worker or a stream that has answered nothing for so long hangs, or is stopped.
SILENT_S: Final = 5.0
#: A worker that recovers an arena hangs if its heartbeat has not moved for so long. On a busy machine it once stood
#: still for 5 s (`benchmarks/recovery.py`).
BEATLESS_S: Final = 30.0
#: So many processes in a row that did not come to serve, of a worker that never did: the next one will not either.
FRUITLESS_MAX: Final = 5
#: So many looks in a row must find a process silent before it is ended for that.
SILENT_LOOKS: Final = 10
#: A child whose connection is closed has so long to end by itself.
END_S: Final = 1.0
#: Added to the supervisor's first oom_score_adj: for itself, for a worker, and for processes that nobody misses.
OOM_SUPERVISOR: Final = -500
OOM_WORKER: Final = 50
OOM_FIRST: Final = 100


class ChildError(SimmError):
    """Ends a child with an exit code that the supervisor understands."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


class Children:
    """Forks for one supervisor, which owns ``segments``."""

    def __init__(self, loop: Loop, segments: Callable[[], Iterable[OwnedArena]]) -> None:
        self.loop = loop
        self._segments = segments
        self._resolvers: list[int] = []
        self._oom_score_adj = oom_score_adj()
        self._shared = memoryview(mmap.mmap(-1, mmap.PAGESIZE))

    @property
    def stopping(self) -> bool:
        """No process is started any more. Those that were forked earlier see it too."""
        return bool(self._shared[0])

    @stopping.setter
    def stopping(self, value: bool) -> None:
        self._shared[0] = value

    def protect_parent(self) -> None:
        """Make this process the last one that the OOM killer chooses, as far as this user may."""
        self._set_oom(OOM_SUPERVISOR)

    def _set_oom(self, more: int) -> None:
        if self._oom_score_adj > OOM_NEVER:  # else the operator wants none of them to be chosen
            set_oom_score_adj(max(OOM_NEVER + 1, self._oom_score_adj + more))

    def fork(
        self, body: Callable[[socket.socket], None], keep: Sequence[int], mine: OwnedArena | None = None,
        oom: int = OOM_FIRST, *, blocks: bool = False,
    ) -> Child:  # fmt: skip
        """Fork a child that runs ``body`` with its end of a socket pair; it keeps the segment ``mine`` and no other.

        ``oom``: how much sooner than the supervisor's first score the OOM killer chooses it, in thousandths.
        ``blocks``: SIGTERM waits until the body unblocks it, which looks then whether the supervisor lives. Raises
        OSError when the system has no process, memory or descriptor to spare.
        """
        ours, theirs = socket.socketpair()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # a full disk, a reader that has gone
                stream.flush()
        parent = os.getpid()
        # The handler that the child inherits would swallow a SIGTERM.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            pid = os.fork()
        except BaseException:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            ours.close()
            theirs.close()
            raise
        if pid:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
            return Child(pid, ours)
        code = 1
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)
            die_with_parent()
            if not blocks:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
                if os.getppid() != parent:  # it ended before it could be asked for
                    os._exit(code)
            self._set_oom(oom)
            for segment in self._segments():
                segment.release_in_child()
                if segment is not mine:
                    segment.close()
            give_up_descriptors_but({theirs.fileno(), *keep})
            body(theirs)
            code = 0
        except SimmError as exc:
            log.error("%s", exc)
            if isinstance(exc, ChildError):
                code = exc.code
            elif isinstance(exc, CorruptionError):
                code = CORRUPT
        except BaseException:
            log.exception("process %d failed", os.getpid())
        finally:
            logging.shutdown()
            os._exit(code)

    def or_later(self, start: Callable[[], None], pause_s: float = 0.0) -> None:
        """Start a child, after a pause. Repeat it later if the system has no process or memory to spare."""
        if self.stopping:
            return
        if pause_s:
            self.loop.call_later(pause_s, partial(self.or_later, start))
            return
        try:
            start()
        except LACKING as exc:
            log.error("cannot start a process: %s; trying again", str(exc) or type(exc).__name__)
            self.loop.call_later(FORK_AGAIN_S, partial(self.or_later, start))

    def resolve(self, host: str, callback: Callable[[str], None]) -> None:
        """Find a host's address by a child process, as a resolver may hang. The callback gets "" if there is none."""

        def body(sock: socket.socket) -> None:
            signal.alarm(RESOLVE_S)  # its default action ends the process
            for family in (socket.AF_INET, socket.AF_INET6):
                with contextlib.suppress(OSError):
                    found = socket.getaddrinfo(host, None, family, socket.SOCK_STREAM)
                    sock.sendall(str(found[0][4][0]).encode())
                    return

        def answered(child: Child, _mask: int) -> None:
            address = child.sock.recv(256).decode()
            self.loop.unwatch(child.sock)
            child.sock.close()
            callback(address)

        with contextlib.ExitStack() as undo:
            try:
                child = self.fork(body, [])
                undo.callback(child.sock.close)
                self._resolvers.append(child.pid)
                self.loop.watch(child.sock, partial(answered, child))
            except LACKING as exc:
                log.error("cannot start a process: %s", str(exc) or type(exc).__name__)
                callback("")
            else:
                undo.pop_all()

    def reap(self) -> None:
        """Reap the resolvers that have ended."""
        self._resolvers = [pid for pid in self._resolvers if not reaped(pid)]


def pause_after(fruitless: int, most: float = PAUSE_S[1]) -> float:
    """Return the pause before the next process, after so many in a row that did not come to serve, seconds."""
    first = PAUSE_S[0]
    return min(most, first * 2 ** (fruitless - 1)) if fruitless else 0.0


class Supervised(Service):
    """One child of a supervisor, over all processes that take its place.

    Args:
        name: for the log.
        body: what a process runs, with its end of a socket pair.
        keep: the descriptors that it keeps.
        on_message: gets its messages with their request ids. None if it sends none.
        segment: the segment that it keeps.
        oom, blocks: as for ``Children.fork``.
    """

    def __init__(
        self, children: Children, name: str, body: Callable[[socket.socket], None], keep: Sequence[int],
        on_message: Callable[[Any, int], None] | None = None, *, segment: OwnedArena | None = None,
        oom: int = OOM_FIRST, blocks: bool = False,
    ) -> None:  # fmt: skip
        self._children = children
        self._clock = children.loop.clock
        self.name = name
        self._body = body
        self._keep = keep
        self._on_message = on_message
        self._segment = segment
        self._oom, self._blocks = oom, blocks
        #: The running process, or one that has ended and was not reaped yet.
        self.child: Child | None = None
        self._retired = False
        #: A process is to be there; a start is due, after a pause or as the last try failed.
        self._wanted = self._due = False
        #: Processor time of those that have ended, seconds.
        self.cpu_s = 0.0
        #: Number of processes in a row that have ended and had said nothing; whether the last one has said something.
        self.fruitless, self._spoke = 0, False
        self.started_at = 0.0
        #: When the process last sent a message, or was started.
        self.last_seen = 0.0
        #: When :meth:`kill_if_silent` last looked and what ``last_seen`` was then; the silence that it has counted.
        self._looked_at = self._seen_at = self._silent_s = 0.0

    def start(self, about: str = "") -> None:
        """Fork a process, and log it with the text ``about``; nothing once it is retired, or if there is one.

        Raises OSError, and what else the system lacks (``LACKING``). There is no process then.
        """
        if self._retired or self.child is not None:  # it was to be tried again
            return
        self._wanted = True
        self.child = child = self._children.fork(self._run, self._keep, self._segment, self._oom, blocks=self._blocks)
        self.started_at = self.last_seen = self._clock()
        self._spoke = False
        if self._on_message is not None:
            try:
                child.peer = self._children.loop.adopt(child.sock, self, self.name)
            except Exception as exc:  # one that is heard by nobody is none
                self.child = None
                end_children([child], 0.0)
                raise OSError(f"no connection to {self.name}: {str(exc) or type(exc).__name__}") from exc
            child.peer.patient = True  # it may be stopped, or recover an arena; whoever is missed is killed
            log.info("%s is process %d%s", self.name, child.pid, about)

    def _run(self, supervisor: socket.socket) -> None:
        log_as(self.name)
        self._body(supervisor)

    def start_or_retry(self, start: Callable[[], None] | None = None, pause_s: float = 0.0) -> None:
        """:meth:`start`, or ``start`` which does more, after a pause; and again later if the system lacks something."""
        self._wanted = self._due = True
        try:
            self._children.or_later(partial(self._start_due, start or self.start), pause_s)
        except BaseException:
            self._due = False
            raise

    def _start_due(self, start: Callable[[], None]) -> None:
        self._due = False
        try:
            start()
        except LACKING:
            self._due = True  # Children.or_later tries again
            raise

    def start_if_missing(self, start: Callable[[], None] | None = None) -> None:
        """Start a process if one is to be there and none is due. So no failure after a death is the end of it all."""
        missing = self._wanted and self.child is None and not self._due and not self._retired
        if missing and not self._children.stopping:
            log.error("%s has no process, and none is due: starting one", self.name)
            self.start_or_retry(start, FORK_AGAIN_S)

    def retire(self) -> None:
        """Start no process any more. One that has not ended yet is to be reaped by :meth:`ended`."""
        self._retired = True
        self.ended()

    def send(self, msg: Any, request_id: int = 0, *, flags: int = 0) -> None:
        """Send a message to the process, if it is connected."""
        if self.child is not None and self.child.peer is not None and not self.child.peer.closed:
            self.child.peer.send(encode(msg, request_id, flags=flags))

    def send_unless_behind(self, msg: Any, request_id: int = 0) -> None:
        """Send what is said again and again; nothing to a process that :attr:`is_behind`."""
        if not self.is_behind:
            self.send(msg, request_id)

    def on_frame(self, peer: Peer, frame: Frame) -> None:
        if self._on_message is not None:
            self.last_seen, self._spoke = self._clock(), True
            self._on_message(decode(frame), frame.request_id)

    @property
    def is_behind(self) -> bool:
        """Whether the process has not read all that was sent to it, and what fits in the socket's buffer."""
        return self.child is not None and self.child.peer is not None and bool(self.child.peer.out)

    def on_close(self, peer: Peer, reason: str) -> None:
        """Kill a process whose connection was closed without its end: it takes no orders any more.

        It may be about to end by itself, with an exit code that says why.
        """
        self._children.loop.call_later(END_S, partial(self._kill_if_cut_off, peer, reason))

    def _kill_if_cut_off(self, peer: Peer, reason: str) -> None:
        child = self.child
        if child is not None and child.peer is peer and not self._children.stopping:
            log.error("the connection to %s (process %d) is closed (%s): ending it", self.name, child.pid, reason)
            self.kill()

    def kill_if_silent(self, seconds: float) -> None:
        """Kill a process that has sent nothing for so long: it is stopped, or it hangs. Call this again and again.

        Time between two looks counts up to a limit. A supervisor that was stopped itself has not looked meanwhile, and
        blames nobody.
        """
        now = self._clock()
        passed = min(now - max(self._looked_at, self.last_seen), seconds / SILENT_LOOKS)
        self._silent_s = passed + (self._silent_s if self.last_seen == self._seen_at else 0.0)
        self._looked_at, self._seen_at = now, self.last_seen
        if self.child is not None and self._silent_s > seconds:
            log.error("%s (process %d) says nothing: ending it", self.name, self.child.pid)
            self.last_seen = now
            self.kill()

    def kill(self) -> None:
        """Send SIGKILL to the process, if there is one."""
        self.signal(signal.SIGKILL)

    def signal(self, number: int) -> None:
        """Send a signal to the process, if there is one."""
        if self.child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.child.pid, number)

    def ended(self) -> Child | None:
        """Reap the process and return it if it has ended, else None."""
        child = self.child
        if child is None or not child.ended():
            return None
        child.lost()
        self.child = None
        self.cpu_s += child.cpu_s
        self.fruitless = 0 if self._spoke else self.fruitless + 1
        return child


class StreamProcess(Supervised):
    """A stream process of a worker, which reports whether it reaches the worker."""

    def __init__(
        self, children: Children, name: str, body: Callable[[socket.socket], None], keep: Sequence[int]
    ) -> None:
        super().__init__(children, name, body, keep, self._on_stats)
        self._worker_down_s = 0.0
        #: What it has counted, with its predecessors.
        self.counted = Continued()
        self.failures = Failures()

    def _on_stats(self, msg: Any, _request_id: int) -> None:
        if isinstance(msg, M.StatsReply):
            stats = json.loads(msg.json)
            self._worker_down_s = stats["worker_down_s"]
            self.failures.take(stats)
            self.counted.take(stats["pid"], stats["counted"])

    def is_silent(self) -> bool:
        """Return True if there is a process, and it hangs."""
        return self.child is not None and self._clock() - self.last_seen > SILENT_S

    def is_cut_off(self, since: float) -> bool:
        """Return True if it is there, and hangs or has missed its worker, up ``since`` then, for SILENT_S seconds."""
        down_s = min(self._worker_down_s, self._clock() - since) if self._spoke else 0.0
        return self.child is not None and (self.is_silent() or down_s > SILENT_S)


class WorkerSlot:
    """One worker of a data server with its stream processes and its mover: what outlives the processes."""

    worker: Supervised
    mover: Supervised

    #: Its UNIX socket, where clients of this host connect.
    unix: NamedSocket

    def __init__(self, number: int, node: int, segment: OwnedArena) -> None:
        self.number = number
        self.node = node
        self.segment = segment
        self.vault = Vault()
        self.tcp: socket.socket | None = None
        self.streams: list[StreamProcess] = []
        #: The process has answered; when it first did, by the loop's clock.
        self.ready, self.ready_at = False, 0.0
        #: Some process of the worker has taken over a shard map; the present one has the newest map.
        self.sharded = False
        self.current = False
        #: Request id of the last SHARDS sent and the epoch of its map; epoch of the newest map taken over.
        self.order_id = SHARDS_ID
        self.order_epoch = 0
        self.taken = 0
        #: The newest map was not sent, as the process has not read what was sent before.
        self.order_waits = False
        #: When its processes died, of late: those deaths that may not go on.
        self.faults: list[float] = []
        #: What its processes do -> how many of them died, for /metrics.
        self.deaths = {"worker": 0, "stream": 0}
        #: Processes that ended with a CorruptionError; since when none has served, and for how long at the last death.
        self.corruptions = 0
        self.down_at = self._down_s = 0.0
        #: Number of processes in a row that could not recover the arena, and of those that ended before they served.
        self.unrecovered = self.fruitless = 0
        #: Some process has served; when the next one is to be started.
        self.served, self.due_at = False, 0.0
        #: The last process and heartbeat that :meth:`comes_up` has seen, and when it first did.
        self._beat = (0, 0)
        self._beat_at = 0.0
        self.stats: dict[str, Any] = {}
        #: What clients have counted, at this worker and its predecessors; and what these have refused or failed at.
        self.counted = Continued()
        self.refused = Failures()
        self.data_bytes = 0
        self.incarnation = 0
        #: The mover's last report, and what its predecessors copied: in this move, and in all.
        self.progress = M.MoveProgress(0, 0, 0, 0, 0)
        self.moving = False
        self.moved_before = 0
        self.moved_ever = {"bytes": 0, "values": 0, "lost": 0}

    def worker_died(self, code: int | None, now: float) -> None:
        """Count a death of the worker's process with an exit code, at ``now`` seconds."""
        if self.ready or not self.down_at:
            self.down_at = now
        self._down_s = now - self.down_at
        self.served = self.served or self.ready
        self.fruitless = 0 if self.ready else self.fruitless + 1
        pause_s = pause_after(self.fruitless)
        self.due_at = now + pause_s if pause_s else 0.0
        self.ready = self.current = False
        self.deaths["worker"] += 1
        self.faults = [at for at in self.faults if now - at < RESTART_WINDOW_S]
        if code == CORRUPT:
            self.corruptions += 1
        if code != CORRUPT or now - self.down_at > CORRUPT_S:
            self.faults.append(now)

    def comes_up(self, now: float) -> bool:
        """Return whether a worker that does not serve yet gets on with it, so that no restart of the server would help.

        Its process lives, or is due, and the arena's heartbeat has moved since the last call, or within BEATLESS_S: it
        moves while a worker recovers the arena, which takes a minute and more where values are small and many. A thread
        beats beside long steps, so a step that hangs is seen after ``threads.BEATS_S_MAX``. One that has served is due
        until it is given up, see :meth:`hopeless`: memory or threads may be scarce for as long.
        """
        child = self.worker.child
        if self.fruitless >= (RESTARTS_MAX if self.served else FRUITLESS_MAX):
            return False
        if child is None:
            return now - self.down_at <= DOWN_S if self.served else now - self.due_at <= DUE_S
        beat = child.pid, self.segment.heartbeat()
        if beat != self._beat:
            self._beat, self._beat_at = beat, now
        return now - self._beat_at <= BEATLESS_S

    def hopeless(self) -> str:
        """Return why the worker is not restarted any more; an empty text if it is."""
        if len(self.faults) >= RESTARTS_MAX:
            return f"worker {self.number} died {RESTARTS_MAX} times within {RESTART_WINDOW_S:.0f} s"
        if self.fruitless >= (most := RESTARTS_MAX if self.served else STARTS_MAX):
            return f"worker {self.number} died {most} times in a row before it served"
        if self.served and self.fruitless > FRUITLESS_MAX and self._down_s > DOWN_S:
            return f"worker {self.number} has not served for {self._down_s:.0f} s"
        return ""

    def send_order(self, order: M.Shards, epochs: Epochs | None, detail: int) -> None:
        """Send the worker what a map means for it, after the epochs of namespaces.

        It is asked then whether it has stored these, by STATS with this ``detail``: the next heartbeat is to know.
        """
        if epochs is not None:
            self.worker.send(epochs, STATS_ID)
        self.worker.send(order, self.order_id)
        if epochs is not None:
            self.worker.send(M.Stats(detail), STATS_ID)

    def info(self, options: DataServerOptions, instance: int) -> M.WorkerInfo:
        """Return the worker as JOIN names it. It listens."""
        assert self.tcp is not None
        host, port = self.tcp.getsockname()[:2]
        host = options.advertise_host or host
        if host in ("0.0.0.0", "::"):
            host = socket.gethostname()
        name, path = options.name, self.unix.path
        return M.WorkerInfo(self.number, self.node, self.incarnation, instance, self.data_bytes, name, path, host, port)

    def take_stats(self, stats: dict[str, Any]) -> None:
        """Take the worker's counters."""
        self.ready_at = self.ready_at if self.ready else self.worker.last_seen
        self.stats = stats
        self.data_bytes = stats["data_bytes"]
        self.incarnation = stats["incarnation"]
        self.counted.take(stats["pid"], stats["counted"])
        self.refused.take(stats)

    def counts(self, endpoint: Totals | None = None) -> dict[str, Totals]:
        """Return what has been counted by path; ``endpoint``: by rdma."""
        tcp = Totals(None)
        for stream in self.streams:
            tcp.add(stream.counted.totals().as_json())
        found = {"shm": self.counted.totals(), "tcp": tcp}
        found["shm"].move_away(tcp)
        return found if endpoint is None else {**found, "rdma": endpoint}

    def failures(self, endpoint: Mapping[str, int]) -> dict[str, int]:
        """Return what it, its streams and its endpoint have refused or failed at, as `Failures` has it."""
        found = [endpoint, self.refused.totals(), *(stream.failures.totals() for stream in self.streams)]
        return {name: sum(each.get(name, 0) for each in found) for name in Failures.NAMES}

    def words(self) -> bytes:
        """Return a copy of the worker's shard words."""
        return self.vault.shards.tobytes()

    def load(self, moves_left: int) -> M.WorkerLoad:
        """Return the worker's part of a heartbeat."""
        stats = self.stats
        if not stats:
            return M.WorkerLoad(0, 0, 0, 0, moves_left)
        used = stats["data_bytes"] - stats["free_bytes"]
        moved = self.moved_before + self.progress.bytes
        rate = self.progress.rate if moves_left else 0
        return M.WorkerLoad(used, stats["entries"], stats["puts"], evicted_in(stats), moves_left, moved, rate)

    def mover_ended(self) -> None:
        """Add the mover's last report to what its predecessors copied."""
        done = self.progress
        self.moved_before += done.bytes
        for key, count in (("bytes", done.bytes), ("values", done.values), ("lost", done.lost)):
            self.moved_ever[key] += count
        self.progress = M.MoveProgress(0, 0, 0, 0, 0)

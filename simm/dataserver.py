"""A data server: one supervisor, one worker per NUMA node, stream processes for TCP.

    supervisor   owns the segments, the listening sockets and the link to the manager; restarts what dies
      worker     forked; the only writer of its arena          (worker.py)
      stream     forked; TCP bulk, a local client of the arena (stream.py)

The supervisor is one thread with a selectors loop and touches no value and no metadata, so there
is little in it that can fail. It creates the segments and faults their pages in, on the right
node, before READY; it keeps the listening sockets, so that clients of a worker that died wait in
the backlog instead of being refused; and it forks a successor on the same segment, which recovers it
(``store.py``). Workers and streams end when it ends, by PDEATHSIG and by the closing of a socket pair.

Ends
----
SIGTERM, SIGINT: leave the cluster, stop streams, then workers, store *closed*, remove segments and
sockets; with ``--warm`` the segments stay, marked *suspended*, for the next start under this name.
kill -9: the kernel ends the children; segments stay as leftovers and are removed at the next start.
"""

from __future__ import annotations

import argparse
import contextlib
import grp
import json
import logging
import os
import random
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from . import messages as M
from . import topology
from .config import Address, Settings, add_arguments, ensure_runtime_dir, load_command
from .constants import SHARD_COUNT, SLAB_BYTES
from .errors import ConfigError, SegmentError, SimmError
from .layout import HEADER_BYTES, Geometry, State, Word
from .loop import Loop, Peer, Service, listen_tcp, listen_unix
from .messages import Status
from .process import close_descriptors_but, die_with_parent, end_with, stop_on_signals
from .rpc import Frame, decode, encode
from .shardmap import ShardMap
from .shm import AttachedSegment, OwnedSegment, default_arena_bytes, leftovers, remove_leftovers
from .startup import check_exposure, read_tokens, set_up_logging
from .store import Store
from .stream import run_stream
from .web import METRICS, Page, Web, prometheus
from .worker import WorkerSettings, run_worker

log = logging.getLogger("simm.dataserver")

JOIN_TIMEOUT_S: Final = 30.0
RECONNECT_S: Final = 0.5
#: Within this time a worker that dies again and again is restarted at most so often.
RESTART_WINDOW_S: Final = 60.0
RESTARTS_MAX: Final = 60
STOP_S: Final = 3.0
#: Times, a second apart, that a name which the manager says is taken is tried before we give up.
NAME_TRIES: Final = 5

#: (metric, type, help, key of the worker's STATS)
_METRICS: Final = (
    ("simm_entries", "gauge", "values stored", "entries"),
    ("simm_slots", "gauge", "values that the table can hold", "slots"),
    ("simm_data_bytes", "gauge", "size of the data region", "data_bytes"),
    ("simm_free_bytes", "gauge", "bytes in free chunks", "free_bytes"),
    ("simm_granted_bytes", "gauge", "bytes handed to clients and not yet committed", "granted_bytes"),
    ("simm_sessions", "gauge", "client sessions", "sessions"),
    ("simm_sessions_quarantined", "gauge", "ended sessions that wait for their process", "sessions_quarantined"),
    ("simm_pins", "gauge", "values pinned by views", "pins"),
    ("simm_puts_total", "counter", "values committed", "puts"),
    ("simm_overwrites_total", "counter", "of them, replacing another", "overwrites"),
    ("simm_deletes_total", "counter", "values deleted", "deletes"),
    ("simm_put_failures_total", "counter", "commits without room in the table", "put_failures"),
    ("simm_stale_commits_total", "counter", "commits with a spent or foreign grant", "stale_commits"),
    ("simm_requests_total", "counter", "requests handled", "requests"),
    ("simm_protocol_errors_total", "counter", "connections closed for malformed input", "protocol_errors"),
)


@dataclass
class DataServerOptions:
    """What a data server is started with. ``memory`` is bytes per worker, 0 for what the machine allows."""

    name: str
    runtime_dir: str
    nodes: list[int]
    memory: int = 0
    listen_host: str = "127.0.0.1"
    listen_port: int = 0
    managers: list[tuple[str, int]] = field(default_factory=list)
    policy: str = "sieve"
    poll_us: int = 50
    streams: int = 1
    slots: int = 0
    huge_pages: bool = True
    group: int | None = None
    warm: bool = False
    tokens: tuple[str, ...] = ()
    join_timeout_s: float = JOIN_TIMEOUT_S
    advertise_host: str = ""
    #: End when this process does (0: do not care).
    end_with: int = 0
    #: Address of /metrics and /healthz, or None.
    http: Address | None = None


class Child:
    """A forked process and the supervisor's end of its socket pair."""

    def __init__(self, pid: int, sock: socket.socket) -> None:
        self.pid = pid
        self.sock = sock
        self.peer: Peer | None = None


class WorkerSlot:
    """One worker's place: what outlives the process."""

    def __init__(self, number: int, node: int, segment: OwnedSegment, uds: str) -> None:
        self.number = number
        self.node = node
        self.segment = segment
        self.uds = uds
        self.listener: socket.socket | None = None
        self.tcp: socket.socket | None = None
        self.child: Child | None = None
        self.streams: list[Child | None] = []
        self.ready = False
        #: The worker has taken over a shard map.
        self.sharded = False
        self.restarts: list[float] = []
        self.load = M.WorkerLoad(0, 0, 0, 0)
        self.stats: dict[str, Any] = {}
        self.data_bytes = 0
        self.incarnation = 0


class _WorkerLink(Service):
    """The supervisor's side of a worker's socket pair."""

    def __init__(self, server: DataServer) -> None:
        self.server = server

    def on_connect(self, peer: Peer) -> None:
        pass

    def on_frame(self, peer: Peer, frame: Frame) -> None:
        self.server.on_worker_reply(peer.context, decode(frame))

    def on_close(self, peer: Peer, reason: str) -> None:
        pass


class _ManagerLink(Service):
    """The supervisor's connection to the manager; requests with callbacks."""

    def __init__(self, server: DataServer) -> None:
        self.server = server
        self.peer: Peer | None = None
        self._pending: dict[int, Callable[[Any, int], None]] = {}
        self._last_id = 0

    def request(self, msg: Any, callback: Callable[[Any, int], None]) -> None:
        """Send; ``callback(reply, status)`` comes later, or never when the link breaks."""
        if self.peer is None:
            return
        self._last_id += 1
        self._pending[self._last_id] = callback
        self.peer.send(encode(msg, self._last_id))

    def on_connect(self, peer: Peer) -> None:
        self.peer = peer

    def on_frame(self, peer: Peer, frame: Frame) -> None:
        msg = decode(frame)
        if frame.request_id == 0:
            if isinstance(msg, M.MapReply):
                self.server.on_map(msg)
            return
        callback = self._pending.pop(frame.request_id, None)
        if callback is not None:
            callback(msg, frame.status)

    def on_close(self, peer: Peer, reason: str) -> None:
        self.peer = None
        self._pending.clear()
        self.server.on_manager_lost(reason)


class DataServer:
    """The supervisor. Construct, :meth:`start`, :meth:`run`; :meth:`stop` cleans up."""

    def __init__(self, options: DataServerOptions) -> None:
        self.options = options
        self.loop = Loop()
        self.instance = secrets.randbits(63) | 1
        self.slots: list[WorkerSlot] = []
        self.epoch = 0
        self.joined = False
        self.joined_at = 0.0
        self.announced = False
        self.failed = ""
        self.heartbeat_s = 1.0
        self._shards: dict[int, M.Shards] = {}
        self._worker_link = _WorkerLink(self)
        self._manager = _ManagerLink(self)
        self._manager_at = 0
        self._complained = ""
        self._stopping = False
        self._started = 0.0
        self._beat_running = False
        self._refusals = 0
        self._shared: list[socket.socket] = []
        self._web: Web | None = None

    # -- start ------------------------------------------------------------------------------------

    @property
    def prefix(self) -> str:
        """Start of all our segments' names."""
        return f"simm-{os.geteuid()}-{self.options.name}-"

    def start(self) -> None:
        """Segments, sockets, processes, manager. Raises SimmError or OSError with nothing left behind."""
        options = self.options
        stop_on_signals(self.loop, interrupt=True)
        if options.end_with:
            end_with(self.loop, options.end_with)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only to wake the loop; reaped in _reap
        self.loop.call_every(0.05, self._reap)
        self._check_name_is_free()
        warm = self._adopt_suspended() if options.warm else {}
        for name in self._remove_leftovers():
            log.warning("removed %s, left by a data server that died", name)
        size = (options.memory or default_arena_bytes(len(options.nodes))) // SLAB_BYTES * SLAB_BYTES
        Geometry.plan(size, options.slots)  # says what is wrong with the sizes before memory is taken
        for number, node in enumerate(options.nodes):
            segment = warm.pop(number, None)
            if segment is None:
                name = f"{self.prefix}{number}-{self.instance:016x}"
                segment = OwnedSegment.create(
                    name, size, mode=0o600 if options.group is None else 0o660, group=options.group
                )
            slot = WorkerSlot(number, node, segment, os.path.join(options.runtime_dir, f"{options.name}.{number}.sock"))
            self.slots.append(slot)
            multi = len(topology.nodes()) > 1
            huge = segment.populate(huge=options.huge_pages, node=node if multi else None)
            extra = ", huge pages asked for" if huge else ""
            log.info("worker %d: %d MiB on node %d%s", number, segment.size >> 20, node, extra)
        for slot in self.slots:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(slot.uds)
            slot.listener = listen_unix(slot.uds, mode=0o600 if options.group is None else 0o660)
            port = options.listen_port + slot.number if options.listen_port else 0
            slot.tcp = listen_tcp(options.listen_host, port)
            slot.streams = [None] * options.streams
            self._shared += [slot.listener, slot.tcp]
        if options.http is not None:
            routes = {"/metrics": self._metrics, "/healthz": self._healthz}
            tokens = () if options.http.loopback else options.tokens
            self._web = Web(self.loop, listen_tcp(*options.http), routes, tokens)
        for slot in self.slots:
            self._start_worker(slot)
            for position in range(options.streams):
                self._start_stream(slot, position)
        self._connect_manager()

    def _check_name_is_free(self) -> None:
        """Refuse a second data server of this name on this host: its sockets and segments are the other's."""
        for number in range(64):
            path = os.path.join(self.options.runtime_dir, f"{self.options.name}.{number}.sock")
            if not os.path.exists(path):
                continue
            with contextlib.closing(socket.socket(socket.AF_UNIX)) as probe:
                probe.settimeout(0.5)
                with contextlib.suppress(OSError):
                    probe.connect(path)
                    raise SimmError(
                        f"a data server named {self.options.name!r} is running on this host already ({path}): "
                        "stop it, or give this one another --name"
                    )
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def _adopt_suspended(self) -> dict[int, OwnedSegment]:
        """Segments that a clean ``--warm`` stop under this name left, by worker number."""
        found: dict[int, OwnedSegment] = {}
        for name in leftovers(self.prefix):
            number = int(name[len(self.prefix) :].split("-")[0])
            if number >= len(self.options.nodes) or number in found:
                continue
            try:
                if segment_state(name) == State.SUSPENDED:
                    found[number] = OwnedSegment.adopt(name)
                    log.info("worker %d: warm start on %s", number, name)
            except SegmentError as exc:
                log.warning("cannot start warm on %s: %s", name, exc)
        return found

    def _remove_leftovers(self) -> list[str]:
        """Ours by name, and those of embedded clusters, whose names nobody will use again."""
        removed = remove_leftovers(self.prefix, before_unlink=store_closed)
        removed += remove_leftovers(f"simm-{os.geteuid()}-local-", before_unlink=store_closed)
        return removed

    # -- children ---------------------------------------------------------------------------------

    def _fork(
        self, body: Callable[[socket.socket], None], keep: Sequence[int], mine: OwnedSegment | None = None
    ) -> Child:
        """Fork a child that runs ``body`` with its end of a socket pair; it keeps the segment ``mine`` and no other."""
        ours, theirs = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            theirs.close()
            return Child(pid, ours)
        code = 1
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)
            die_with_parent()
            for slot in self.slots:
                slot.segment.release_in_child()
                if slot.segment is not mine:
                    slot.segment.close()
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

    def _start_worker(self, slot: WorkerSlot) -> None:
        options = self.options
        listener = slot.listener
        assert listener is not None

        def body(supervisor: socket.socket) -> None:
            topology.pin(slot.node)
            slot.segment.lock_writer()
            words = memoryview(slot.segment.mm)[:HEADER_BYTES].cast("Q")
            fresh = words[Word.MAGIC] == 0
            words.release()
            if fresh:
                store = Store.create(
                    slot.segment.mm, slots=options.slots, policy=options.policy, instance=self.instance
                )
            else:
                store = Store.recover(slot.segment.mm, slot.segment.name, policy=options.policy)
            settings = WorkerSettings(
                slot.segment.name, poll_us=options.poll_us, tokens=options.tokens, any_uid=options.group is not None
            )
            run_worker(store, settings, listener, supervisor)
            if options.warm:
                store.header[Word.STATE] = State.SUSPENDED
            else:
                store.close()

        slot.ready = False
        slot.child = child = self._fork(body, [slot.segment.fd, listener.fileno()], slot.segment)
        child.peer = self.loop.adopt(child.sock, self._worker_link, f"worker {slot.number}")
        child.peer.context = slot
        child.peer.send(encode(M.Stats(0), 1))
        if slot.number in self._shards:
            child.peer.send(encode(self._shards[slot.number], 2))
        log.info("worker %d is process %d", slot.number, child.pid)

    def _start_stream(self, slot: WorkerSlot, position: int) -> None:
        tcp = slot.tcp
        assert tcp is not None

        def body(supervisor: socket.socket) -> None:
            topology.pin(slot.node)
            run_stream(tcp, slot.uds, supervisor, self.options.tokens)

        slot.streams[position] = self._fork(body, [tcp.fileno()])

    def on_worker_reply(self, slot: WorkerSlot, msg: Any) -> None:
        """A worker answered: it is up, and its counters are these."""
        if isinstance(msg, M.StatsReply):
            slot.stats = stats = json.loads(msg.json)
            slot.data_bytes = stats["data_bytes"]
            slot.incarnation = stats["incarnation"]
            used = stats["data_bytes"] - stats["free_bytes"]
            evictions = sum(stats["evictions"].values()) + stats["set_evictions"]
            slot.load = M.WorkerLoad(used, stats["entries"], stats["puts"], evictions)
            if not slot.ready:
                slot.ready = True
                self._join_if_ready()
        elif isinstance(msg, M.Done):
            slot.sharded = True
            self._announce()

    def _reap(self) -> None:
        """Restart children that died. A worker comes back on its arena."""
        for slot in self.slots:
            child = slot.child
            if child is not None and _reaped(child.pid):
                self._lost(child)
                slot.child = None
                slot.ready = False
                if self._stopping:
                    continue
                now = time.monotonic()
                slot.restarts = [at for at in slot.restarts if now - at < RESTART_WINDOW_S] + [now]
                if len(slot.restarts) > RESTARTS_MAX:
                    self.failed = f"worker {slot.number} died {RESTARTS_MAX} times within {RESTART_WINDOW_S:.0f} s"
                    log.error("%s: giving up", self.failed)
                    self.loop.stop()
                    return
                log.error("worker %d (process %d) died: restarting it on its arena", slot.number, child.pid)
                self._start_worker(slot)
            for position, stream in enumerate(slot.streams):
                if stream is not None and _reaped(stream.pid):
                    self._lost(stream)
                    slot.streams[position] = None
                    if not self._stopping:
                        log.error("stream of worker %d (process %d) died: restarting", slot.number, stream.pid)
                        self._start_stream(slot, position)

    @staticmethod
    def _lost(child: Child) -> None:
        if child.peer is not None:
            child.peer.close("process ended")
        child.sock.close()

    # -- HTTP -------------------------------------------------------------------------------------

    def _healthz(self) -> Page:
        """200 while every worker serves; without a manager too, as the data path needs none."""
        down = [slot.number for slot in self.slots if not slot.ready]
        if down:
            return Page(f"workers {down} are restarting\n", status=503)
        return Page("ok\n" if self.joined else "ok, but no manager\n")

    def _metrics(self) -> Page:
        samples: list[tuple[str, str, str, dict[str, Any], float]] = [
            ("simm_joined", "gauge", "1 while a manager knows us", {}, float(self.joined)),
            ("simm_map_epoch", "gauge", "epoch of the shard map in use", {}, float(self.epoch)),
        ]
        labelled = [({"worker": slot.number, "node": slot.node}, slot) for slot in self.slots]
        for name, kind, about, key in _METRICS:
            samples += [(name, kind, about, labels, float(slot.stats.get(key, 0))) for labels, slot in labelled]
        for labels, slot in labelled:
            reasons = {**slot.stats.get("evictions", {}), "set_full": slot.stats.get("set_evictions", 0)}
            for reason, count in reasons.items():
                about = "entries evicted, by reason"
                samples.append(("simm_evictions_total", "counter", about, {**labels, "reason": reason}, float(count)))
        samples += [
            ("simm_worker_restarts", "gauge", "restarts within the last minute", labels, float(len(slot.restarts)))
            for labels, slot in labelled
        ]
        return Page(prometheus(samples), METRICS)

    # -- manager ----------------------------------------------------------------------------------

    def _connect_manager(self) -> None:
        """Try the manager addresses in turn, without blocking, until one accepts."""
        if self._stopping or self._manager.peer is not None:
            return
        host, port = self.options.managers[self._manager_at % len(self.options.managers)]
        self._manager_at += 1
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        sock.settimeout(1.0)
        try:
            sock.connect((host, port))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as exc:
            sock.close()
            self.on_manager_lost(f"cannot connect: {exc.strerror or exc}", f"{host}:{port}")
            return
        self._complained = ""
        self.loop.adopt(sock, self._manager, f"manager {host}:{port}")
        self.joined = False
        if self.options.tokens:
            hello = M.Hello(
                M.PROTOCOL_MIN, M.PROTOCOL_MAX, M.Role.SUPERVISOR, 0, os.getpid(), "", self.options.tokens[0], []
            )
            self._manager.request(hello, self._on_greeted)
        self._join_if_ready()

    def _on_greeted(self, msg: Any, _status: int) -> None:
        if isinstance(msg, M.Error) and not self.joined_at:
            self.failed = f"the manager refused us: {msg.text}"
            self.loop.stop()

    def on_manager_lost(self, reason: str, where: str = "") -> None:
        """Go on serving and try again; before the first join, give up after a while."""
        self.joined = False
        if self._stopping:
            return
        if reason != self._complained:
            self._complained = reason
            log.warning(
                "manager %s: %s; trying again every %.1f s (is it running? python -m simm.manager --listen %s)",
                where, reason, RECONNECT_S, where or "HOST:PORT",
            )  # fmt: skip
        if not self.joined_at and self.loop.clock() - self._started > self.options.join_timeout_s:
            self.failed = (
                f"manager {where} not reachable for {self.options.join_timeout_s:.0f} s ({reason}): start it, or name "
                "another with --manager"
            )
            self.loop.stop()
            return
        self.loop.call_later(RECONNECT_S * random.uniform(0.7, 1.3), self._connect_manager)

    def _join_if_ready(self) -> None:
        if self._manager.peer is None or self.joined or not all(slot.ready for slot in self.slots):
            return
        self._manager.request(
            M.Join(self.instance, int(self.options.warm), self.options.name, [self._info(slot) for slot in self.slots]),
            self._on_joined,
        )

    def _info(self, slot: WorkerSlot) -> M.WorkerInfo:
        assert slot.tcp is not None
        host, port = slot.tcp.getsockname()[:2]
        host = self.options.advertise_host or host
        if host in ("0.0.0.0", "::"):
            host = socket.gethostname()
        name, capacity = self.options.name, slot.data_bytes
        return M.WorkerInfo(
            slot.number, slot.node, slot.incarnation, self.instance, capacity, name, slot.uds, host, port
        )

    def _on_joined(self, msg: Any, status: int) -> None:
        if isinstance(msg, M.Error):
            self._refusals += status == Status.NAME_TAKEN
            if status == Status.NAME_TAKEN and not self.joined_at and self._refusals < NAME_TRIES:
                # A manager that restarted takes a server that died for alive until its heartbeats are missed.
                log.warning("%s; trying again", msg.text)
                self.loop.call_later(1.0, self._join_if_ready)
                return
            if status == Status.NAME_TAKEN and not self.joined_at:
                self.failed = f"the manager refused us: {msg.text}"
                self.loop.stop()
                return
            log.error("join refused: %s", msg.text)
            if self._manager.peer is not None:
                self._manager.peer.close("join refused")
            return
        if not isinstance(msg, M.Joined):
            return
        self.joined = True
        self.joined_at = self.loop.clock()
        self.heartbeat_s = max(0.05, msg.heartbeat_ms / 1000)
        log.info("joined the cluster at epoch %d", msg.epoch)
        self._manager.request(M.MapGet(0, 1), lambda reply, _status: self.on_map(reply))
        if not self._beat_running:
            self._beat_running = True
            self._beat()

    def _beat(self) -> None:
        """One heartbeat, with jitter so that a thousand servers do not speak at once."""
        self.loop.call_later(self.heartbeat_s * random.uniform(0.8, 1.0), self._beat)
        for slot in self.slots:
            if slot.child is not None and slot.child.peer is not None and not slot.child.peer.closed:
                slot.child.peer.send(encode(M.Stats(0), 1))
        if self.joined:
            loads = [slot.load for slot in self.slots]
            self._manager.request(M.Heartbeat(self.instance, self.epoch, self.options.name, loads), self._on_ack)

    def _on_ack(self, msg: Any, status: int) -> None:
        if status in (Status.UNKNOWN_NODE, Status.NAME_TAKEN):
            log.warning("the manager does not know us (any more): joining again")
            self.joined = False
            self._join_if_ready()
        elif isinstance(msg, M.HeartbeatAck) and msg.epoch > self.epoch:
            self._manager.request(M.MapGet(self.epoch, 1), lambda reply, _status: self.on_map(reply))

    def on_map(self, msg: Any) -> None:
        """A shard map: tell each worker which shards are its own."""
        if not isinstance(msg, M.MapReply) or len(msg.owners) != 2 * SHARD_COUNT:
            return
        if msg.epoch < self.epoch:
            return
        self.epoch = msg.epoch
        shard_map = ShardMap(msg)
        positions = {
            info.worker: position
            for position, info in enumerate(msg.workers)
            if info.node == self.options.name and info.instance == self.instance
        }
        owners = np.frombuffer(shard_map.owners, np.uint16)
        since = np.frombuffer(shard_map.since, np.uint64)
        for slot in self.slots:
            mine = owners == positions.get(slot.number, -1)
            epochs = np.where(mine, np.maximum(since, 1), 0)
            roles = np.where(mine, int(M.ShardRole.OWNER), int(M.ShardRole.NONE)).astype(np.uint8)
            self._shards[slot.number] = M.Shards(msg.epoch, epochs.astype("<u8").tobytes(), roles.tobytes())
            if slot.child is not None and slot.child.peer is not None:
                slot.child.peer.send(encode(self._shards[slot.number], 2))

    def _announce(self) -> None:
        """READY, once: every worker serves, the cluster knows us, and the shards are ours."""
        if self.announced or not self.joined or not all(slot.ready and slot.sharded for slot in self.slots):
            return
        self.announced = True
        ports = ",".join(str(slot.tcp.getsockname()[1]) for slot in self.slots if slot.tcp is not None)
        memory = sum(slot.segment.size for slot in self.slots)
        print(
            f"READY dataserver {self.options.name} {self.options.listen_host}:{ports} workers={len(self.slots)} "
            f"memory={memory >> 20}M",
            flush=True,
        )

    # -- run and stop -----------------------------------------------------------------------------

    def run(self) -> int:
        """Serve until a signal; the exit code. Cleans up in every case."""
        self._started = self.loop.clock()
        try:
            self.start()
            self.loop.run()
        finally:
            self.stop()
        if self.failed:
            print(f"simm dataserver: {self.failed}", file=sys.stderr, flush=True)
            return 1
        return 0

    def stop(self) -> None:
        """Leave the cluster, end the children, remove segments and sockets. Twice is harmless."""
        if self._stopping:
            return
        self._stopping = True
        if self._manager.peer is not None and self.joined:
            peer = self._manager.peer
            peer.send(encode(M.Leave(self.instance, self.options.name), 1 << 32))
            until = time.monotonic() + 0.3
            while peer.out and not peer.closed and time.monotonic() < until:
                self.loop.run_once(0.05)
        streams = [child for slot in self.slots for child in slot.streams if child is not None]
        workers = [slot.child for slot in self.slots if slot.child is not None]
        _end(streams, STOP_S / 3)
        _end(workers, STOP_S)
        for child in streams + workers:
            self._lost(child)
        for slot in self.slots:
            keep = False
            try:
                keep = self.options.warm and segment_state(slot.segment.name) == State.SUSPENDED
                if not keep:
                    store_closed(slot.segment.name)
                    slot.segment.unlink()
            except SimmError as exc:
                log.error("removing %s: %s", slot.segment.name, exc)
            slot.segment.close()
            if slot.listener is not None:
                with contextlib.suppress(OSError):
                    os.unlink(slot.uds)
        for sock in self._shared:
            sock.close()
        if self._web is not None:
            self._web.close()
        self.loop.close()


def _reaped(pid: int) -> bool:
    """Has the child ended? Reaps it then."""
    try:
        done, _ = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return True
    return done == pid


def _end(children: list[Child], seconds: float) -> None:
    """SIGTERM to our own children, then SIGKILL to what is left after ``seconds``; reaped."""
    left = [child.pid for child in children]
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGCONT)  # a stopped process cannot end
    until = time.monotonic() + seconds
    while left and time.monotonic() < until:
        left = [pid for pid in left if not _reaped(pid)]
        if left:
            time.sleep(0.005)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        while not _reaped(pid):
            time.sleep(0.001)


def segment_state(name: str) -> int:
    """The STATE word of a segment; 0 when it was never an arena. Raises SegmentError when there is none."""
    with AttachedSegment.open(name) as segment:
        if segment.size < HEADER_BYTES:
            return 0
        mapped = segment.map(0, HEADER_BYTES, writable=False)
        with memoryview(mapped).cast("Q") as words:
            return int(words[Word.STATE])


def store_closed(name: str) -> None:
    """Say *closed* in a segment that nobody writes, so that readers which still map it look elsewhere."""
    with AttachedSegment.open(name, writable=True) as segment:
        if segment.size < HEADER_BYTES:
            return
        mapped = segment.map(0, HEADER_BYTES, writable=True)
        with memoryview(mapped).cast("Q") as words:
            words[Word.STATE] = State.CLOSED


def options_from(settings: Settings, *, end_with: int = 0) -> DataServerOptions:
    """A data server's options from settings. Raises ConfigError."""
    host, port = settings.listen
    tokens = read_tokens(settings.token_file)
    for flag, address in (("--listen", settings.listen), ("--http", settings.http)):
        if address is not None:
            check_exposure(address, tokens, settings.insecure, flag)
    group = None
    if settings.group is not None:
        try:
            group = int(settings.group) if settings.group.isdigit() else grp.getgrnam(settings.group).gr_gid
        except KeyError:
            raise ConfigError(f"--group {settings.group}: there is no such group") from None
    runtime_dir = ensure_runtime_dir(settings.runtime_dir, group)
    return DataServerOptions(
        name=settings.name,
        runtime_dir=str(runtime_dir),
        nodes=topology.parse_numa(settings.numa),
        memory=settings.memory or 0,
        listen_host=host,
        listen_port=port,
        managers=[(address.host, address.port) for address in settings.manager],
        policy=settings.policy,
        poll_us=settings.poll_us,
        streams=settings.streams,
        slots=settings.slots,
        huge_pages=settings.huge_pages,
        group=group,
        warm=settings.warm,
        tokens=tokens,
        end_with=end_with,
        http=settings.http,
    )


def main(argv: Sequence[str] | None = None, prog: str = "python -m simm.dataserver") -> int:
    """Run a data server until SIGTERM or Ctrl-C; the exit code."""
    parser = argparse.ArgumentParser(prog=prog, description="A SiMM data server: one worker per NUMA node.")
    add_arguments(parser, "dataserver")
    parser.add_argument("--end-with", type=int, default=0, metavar="PID", help="end when process PID ends")
    arguments = parser.parse_args(argv)
    try:
        settings = load_command("dataserver", arguments)
        set_up_logging(settings)
        return DataServer(options_from(settings, end_with=arguments.end_with)).run()
    except (SimmError, OSError) as exc:
        print(f"simm dataserver: {exc}", file=sys.stderr)
        return 2 if isinstance(exc, ConfigError) else 1


if __name__ == "__main__":
    sys.exit(main())

"""A data server: one supervisor, one worker per NUMA node, stream processes for TCP.

    supervisor   owns the segments, the listening sockets and the link to the manager; restarts what dies
      worker     forked; the only writer of its arena          (worker.py)
      stream     forked; TCP bulk, a local client of the arena (stream.py)
      endpoint   forked where there is RDMA; lanes of clients   (endpoint.py, looked after by endpoints.py)

The supervisor is one thread with a selectors loop and touches no value and no metadata, so there
is little in it that can fail. It creates the segments and faults their pages in, on the right
node, before READY; it keeps the listening sockets, so that clients of a worker that died wait in
the backlog instead of being refused; and it forks a successor on the same segment, which recovers it
(``store.py``). Workers and streams end when it ends, by PDEATHSIG and by the closing of a socket pair.

Ends
----
SIGTERM, SIGINT: leave the cluster, stop streams, then workers, store *closed*, remove segments and
sockets; with ``--warm`` the segments stay, marked *suspended*, for the next start under this name. Without it the
workers give their shards up before the manager hears LEAVE: the next owners get them by that, and may
accept mutations while a reader with an old map still looks here.
kill -9: the kernel ends the children; segments stay as leftovers and are removed at the next start.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from . import arenas, mover, topology
from . import messages as M
from .children import Children
from .config import add_arguments, load_command
from .constants import NO_OWNER, SHARD_COUNT, SLAB_BYTES
from .endpoints import Endpoints
from .errors import ConfigError, SimmError
from .layout import HEADER_BYTES, Geometry, State, Word
from .loop import Loop, Peer, Service, listen_tcp, listen_unix
from .member import Member
from .membership import Membership
from .mover import MoverSettings, run_mover
from .process import Child, end_children, end_with, raise_file_limit, stop_on_signals
from .quantities import Address
from .rpc import Flag, Frame, decode, encode
from .server_options import DataServerOptions, options_from
from .server_pages import Row, healthz, metrics
from .shm import OwnedSegment, default_arena_bytes
from .startup import set_up_logging
from .store import Store
from .stream import run_stream
from .web import Page, Web
from .worker import WorkerSettings, run_worker
from .worker_slot import STATS_ID, WorkerSlot

log = logging.getLogger("simm.dataserver")

#: Within this time a worker that dies again and again is restarted at most so often.
RESTART_WINDOW_S: Final = 60.0
RESTARTS_MAX: Final = 60
STOP_S: Final = 3.0
#: A clean stop waits so long for the map that gives our shards away, and serves so long after it.
HAND_OVER_S: Final = 0.5
LINGER_S: Final = 0.3
#: Between the end of a mover and the next one.
MOVER_PAUSE_S: Final = 0.2
#: No shard is ours.
_GIVE_UP: Final = M.Shards(1, bytes(8 * SHARD_COUNT), bytes(SHARD_COUNT))

#: A worker that has answered nothing for so long hangs, or is stopped.
SILENT_S: Final = 5.0


class _ChildLink(Service):
    """The supervisor's side of a socket pair; the peer's context is the worker's slot."""

    def __init__(self, on_message: Callable[[WorkerSlot, Any, int], None]) -> None:
        self.on_message = on_message

    def on_frame(self, peer: Peer, frame: Frame) -> None:
        self.on_message(peer.context, decode(frame), frame.request_id)


class DataServer:
    """The supervisor. Construct, :meth:`start`, :meth:`run`; :meth:`stop` cleans up."""

    def __init__(self, options: DataServerOptions) -> None:
        self.options = options
        self.loop = Loop()
        self.instance = secrets.randbits(63) | 1
        self.slots: list[WorkerSlot] = []
        self.member = Member(options.name, self.instance, range(len(options.nodes)))
        self.membership = Membership(
            self.loop, self.member, self, options.managers,
            token=options.tokens[0] if options.tokens else "", join_timeout_s=options.join_timeout_s,
        )  # fmt: skip
        self.announced = False
        self.failed = ""
        self._worker_link = _ChildLink(self._on_worker)
        self._mover_link = _ChildLink(self._on_mover)
        #: The newest map as a frame for movers, and its epoch.
        self._map_frame = (0, b"")
        self.children = Children(self.loop, lambda: [slot.segment for slot in self.slots])
        self.endpoints = Endpoints(options, self.loop, self.children, on_ready=self._announce, give_up=self.give_up)
        self._stopping = False
        #: The workers are told to give all shards up, whatever the map says.
        self._retiring = False
        self._shared: list[socket.socket] = []
        self._web: Web | None = None
        #: Its address, for the READY line.
        self._http = ""

    # -- start ------------------------------------------------------------------------------------

    @property
    def prefix(self) -> str:
        """Start of all our segments' names."""
        return f"simm-{os.geteuid()}-{self.options.name}-"

    def start(self) -> None:
        """Segments, sockets, processes, manager. Raises SimmError or OSError with nothing left behind."""
        options = self.options
        raise_file_limit()
        stop_on_signals(self.loop, interrupt=True)
        if options.end_with:
            end_with(self.loop, options.end_with)
        self.endpoints.look()
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only to wake the loop; reaped in _reap
        self.loop.call_every(0.05, self._reap)
        arenas.check_name_is_free(options.runtime_dir, options.name)
        warm = arenas.suspended(self.prefix, len(options.nodes)) if options.warm else {}
        epochs = {arenas.epoch_of(segment) for segment in warm.values()}
        self.membership.warm = len(warm) == len(options.nodes) and len(epochs) == 1  # JOIN has one epoch for all arenas
        self.membership.warm_epoch = max(epochs, default=0)
        for name in arenas.remove_old(self.prefix):
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
            self.endpoints.listen(slot)
        if options.http is not None:
            routes = {"/metrics": self._metrics, "/healthz": self._healthz}
            tokens = () if options.http.loopback else options.tokens
            listener = listen_tcp(*options.http)
            self._http = " http=" + str(Address(*listener.getsockname()[:2]))
            self._web = Web(self.loop, listener, routes, tokens)
        for slot in self.slots:
            self._start_worker(slot)
            for position in range(options.streams):
                self._start_stream(slot, position)
        self.endpoints.start()
        self._poll_stats()
        self.membership.start()

    # -- children ---------------------------------------------------------------------------------

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
        slot.child = child = self.children.fork(body, [slot.segment.fd, listener.fileno()], slot.segment)
        child.peer = self.loop.adopt(child.sock, self._worker_link, f"worker {slot.number}")
        child.peer.context = slot
        child.peer.send(encode(M.Stats(0), STATS_ID))
        if self.member.map is not None:  # without one it takes no mutation, by itself
            self._tell(slot)
        log.info("worker %d is process %d", slot.number, child.pid)

    def _start_stream(self, slot: WorkerSlot, position: int) -> None:
        tcp = slot.tcp
        assert tcp is not None
        rdma_port = self.endpoints.port(slot.number)

        def body(supervisor: socket.socket) -> None:
            topology.pin(slot.node)
            run_stream(tcp, slot.uds, supervisor, self.options.tokens, rdma_port)

        slot.streams[position] = self.children.fork(body, [tcp.fileno()])

    def _reap(self) -> None:
        """Restart children that died. A worker comes back on its arena."""
        self.children.reap()
        self.endpoints.reap()
        for slot in self.slots:
            if slot.child is not None and slot.child.ended():
                self._worker_died(slot, slot.child)
            if slot.mover is not None and time.monotonic() - slot.mover_heard > mover.SILENT_S:
                # Stopped, or it hangs: without one writers wait for ever. The next begins where the words say.
                log.error("mover of worker %d (process %d) says nothing: ending it", slot.number, slot.mover.pid)
                slot.mover_heard = time.monotonic()
                os.kill(slot.mover.pid, signal.SIGKILL)
            if slot.mover is not None and slot.mover.ended():
                slot.mover.lost()
                slot.mover = None
                slot.mover_ended()
                self.loop.call_later(MOVER_PAUSE_S, partial(self.children.or_later, partial(self._feed_mover, slot)))
            for position, stream in enumerate(slot.streams):
                if stream is not None and stream.ended():
                    stream.lost()
                    slot.streams[position] = None
                    if not self._stopping:
                        log.error("stream of worker %d (process %d) died: restarting", slot.number, stream.pid)
                        self.children.or_later(partial(self._start_stream, slot, position))

    def _worker_died(self, slot: WorkerSlot, child: Child) -> None:
        child.lost()
        slot.child = None
        slot.ready = slot.current = False
        if self._stopping:
            return
        now = time.monotonic()
        slot.restarts = [at for at in slot.restarts if now - at < RESTART_WINDOW_S] + [now]
        if len(slot.restarts) > RESTARTS_MAX:
            log.error("worker %d: giving up", slot.number)
            self.give_up(f"worker {slot.number} died {RESTARTS_MAX} times within {RESTART_WINDOW_S:.0f} s")
            return
        log.error("worker %d (process %d) died: restarting it on its arena", slot.number, child.pid)
        self.children.or_later(partial(self._start_worker, slot))

    def _poll_stats(self) -> None:
        """Ask the workers for their counters, as often as there are heartbeats."""
        self.loop.call_later(min(1.0, self.membership.heartbeat_s), self._poll_stats)
        for slot in self.slots:
            if slot.child is not None and slot.child.peer is not None and not slot.child.peer.closed:
                slot.child.peer.send(encode(M.Stats(0), STATS_ID))

    def _on_worker(self, slot: WorkerSlot, msg: Any, request_id: int) -> None:
        """A worker answered: it is up, and its counters are these; or it has taken the map."""
        if isinstance(msg, M.StatsReply):
            slot.stats = stats = json.loads(msg.json)
            slot.heard = self.loop.clock()
            slot.data_bytes = stats["data_bytes"]
            slot.incarnation = stats["incarnation"]
            if not slot.ready:
                slot.ready = True
                self.membership.join()
        elif isinstance(msg, M.Done) and request_id == slot.order_id:
            slot.current = True
            if not self.member.fenced:
                slot.sharded = True
                slot.taken = slot.order_epoch
                self.membership.caught_up()
                self._announce()
                self.children.or_later(partial(self._feed_mover, slot))

    # -- shards -----------------------------------------------------------------------------------

    def on_map(self) -> None:
        """The member has a newer map, or has been fenced: tell the workers what is theirs."""
        for slot in self.slots:
            if slot.child is not None:
                self._tell(slot)

    def _tell(self, slot: WorkerSlot) -> None:
        assert slot.child is not None and slot.child.peer is not None
        slot.order_id += 1
        slot.order_epoch = self.member.epoch
        slot.current = False
        order = _GIVE_UP._replace(epoch=max(1, self.member.epoch)) if self._retiring else self.member.order(slot.number)
        slot.child.peer.send(encode(order, slot.order_id))

    def _feed_mover(self, slot: WorkerSlot) -> None:
        """Hand the worker's mover the map that the worker has taken; start one if there is something to move.

        A mover ends by itself when nothing is left to do, so the map goes to one that has no task any more too.
        """
        left = self.member.moving(slot.number, slot.words())
        if not slot.current or self._stopping or self.member.fenced or (not left and slot.mover is None):
            return
        if slot.mover is None:
            if not slot.moving:
                slot.moved_before = 0  # a new move begins
            self._start_mover(slot, len(left))
        slot.moving = True
        if self._map_frame[0] != self.member.epoch:
            offer = self.member.offer()
            assert offer is not None
            self._map_frame = (self.member.epoch, encode(M.MapReply(*offer), 0, flags=Flag.PUSH))
        assert slot.mover is not None and slot.mover.peer is not None
        slot.mover.peer.send(self._map_frame[1])

    def _start_mover(self, slot: WorkerSlot, left: int) -> None:
        options = self.options
        settings = MoverSettings(
            options.name, self.instance, slot.number, slot.uds, options.tokens[0] if options.tokens else "",
            options.move_bytes_per_s,
        )  # fmt: skip

        def body(supervisor: socket.socket) -> None:
            topology.pin(slot.node)
            run_mover(settings, supervisor)

        slot.mover = child = self.children.fork(body, [])
        slot.mover_heard = time.monotonic()
        child.peer = self.loop.adopt(child.sock, self._mover_link, f"mover of worker {slot.number}")
        child.peer.context = slot
        log.info("mover of worker %d is process %d: %d shards", slot.number, child.pid, left)

    def _on_mover(self, slot: WorkerSlot, msg: Any, _request_id: int) -> None:
        if isinstance(msg, M.MoveProgress):
            slot.progress = msg
            slot.mover_heard = time.monotonic()
            self.membership.report()

    def taken(self) -> int:
        """Epoch of the newest map that all workers have taken over; 0 for none."""
        return min(slot.taken for slot in self.slots)

    def moved(self) -> list[M.Moved]:
        """What has moved in and stands in the map as moving."""
        found = [self.member.moved(slot.number, slot.words()) for slot in self.slots]
        return [moved for moved in found if moved is not None]

    # -- what the membership asks for -----------------------------------------------------------------

    def infos(self) -> list[M.WorkerInfo] | None:
        """All workers as the map is to name them, or None while one of them is not up."""
        return [self._info(slot) for slot in self.slots] if all(slot.ready for slot in self.slots) else None

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

    def loads(self) -> list[M.WorkerLoad]:
        """Of all workers, for a heartbeat."""
        loads = []
        for slot in self.slots:
            left = len(self.member.moving(slot.number, slot.words()))
            slot.moving = slot.moving and bool(left or slot.mover)
            loads.append(slot.load(left))
        return loads

    def on_joined(self) -> None:
        """The manager knows us."""

    def give_up(self, why: str) -> None:
        """There is no use in going on: end, with ``why``."""
        self.failed = why
        self.loop.stop()

    def resolve(self, host: str, callback: Callable[[str], None]) -> None:
        """A host's address by a child process, as a resolver may hang; the callback gets nothing when there is none."""
        self.children.resolve(host, callback)

    # -- HTTP -------------------------------------------------------------------------------------

    def _healthz(self) -> Page:
        down = [slot.number for slot in self.slots if not slot.ready]
        now = self.loop.clock()
        silent = [slot.number for slot in self.slots if slot.ready and now - slot.heard > SILENT_S]
        return healthz(down, silent, self.membership.joined, self.member.fenced)

    def _metrics(self) -> Page:
        rows = []
        for slot in self.slots:
            moves = {key: count + getattr(slot.progress, key) for key, count in slot.moved_ever.items()}
            moves["left"] = len(self.member.moving(slot.number, slot.words()))
            moves["rate"] = slot.progress.rate
            silent_s = self.loop.clock() - slot.heard if slot.ready else 0.0
            rdma = self.endpoints.row(slot.number)
            rows.append(Row(slot.number, slot.node, slot.stats, len(slot.restarts), moves, silent_s, rdma))
        return metrics(rows, joined=self.membership.joined, fenced=self.member.fenced, epoch=self.member.epoch)

    def _announce(self) -> None:
        """READY, once: every worker serves, the cluster knows us, and the shards are ours."""
        if self.announced or not self.membership.joined or self.endpoints.awaited:
            return
        if not all(slot.ready and slot.sharded for slot in self.slots):
            return
        self.announced = True
        ports = ",".join(str(slot.tcp.getsockname()[1]) for slot in self.slots if slot.tcp is not None)
        memory = sum(slot.segment.size for slot in self.slots)
        rdma = ",".join(str(place.port) for place in self.endpoints.places.values())
        print(
            f"READY dataserver {self.options.name} {self.options.listen_host}:{ports} workers={len(self.slots)} "
            f"memory={memory >> 20}M{self._http}{' rdma=' + rdma if rdma else ''}",
            flush=True,
        )

    # -- run and stop -----------------------------------------------------------------------------

    def run(self) -> int:
        """Serve until a signal; the exit code. Cleans up in every case."""
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
        self._stopping = self.children.stopping = True
        retired = False
        try:
            retired = self.options.warm or not self.membership.joined or self._retire()
            if retired:
                self._hand_over()
        except Exception:  # whatever it was, nothing is left behind
            log.exception("handing over failed")
        movers = [slot.mover for slot in self.slots if slot.mover is not None]
        streams = [child for slot in self.slots for child in slot.streams if child is not None]
        workers = [slot.child for slot in self.slots if slot.child is not None]
        end_children(movers + streams + self.endpoints.processes(), STOP_S / 3)
        end_children(workers, STOP_S)
        for slot in self.slots:
            try:
                if not self.options.warm or arenas.state_of(slot.segment.name) != State.SUSPENDED:
                    arenas.store_closed(slot.segment.name)
                    slot.segment.unlink()
            except SimmError as exc:
                log.error("removing %s: %s", slot.segment.name, exc)
            slot.segment.close()
            if slot.listener is not None:
                with contextlib.suppress(OSError):
                    os.unlink(slot.uds)
        if not retired:  # now nobody finds a shard here any more
            self.membership.leave(warm=False)
            self._serve_until(lambda: self.membership.said_all, HAND_OVER_S)
        for sock in self._shared:
            sock.close()
        self.endpoints.close()
        if self._web is not None:
            self._web.close()
        self.loop.close()

    def _retire(self) -> bool:
        """Have the workers give all shards up; False if one of them does not answer."""
        self._retiring = True
        self.on_map()
        self._serve_until(lambda: all(slot.current for slot in self.slots), HAND_OVER_S)
        return all(slot.current for slot in self.slots)

    def _hand_over(self) -> None:
        """Say goodbye. Without ``--warm``: serve until our shards are others', and a little longer, so that writers
        hear WRONG_OWNER and go there instead of meeting a closed door."""
        warm, member = self.options.warm, self.member
        if not self.membership.leave(warm=warm):
            return

        def given_away() -> bool:
            return not any(map(member.owned, member.workers)) and all(slot.current for slot in self.slots)

        def all_current() -> bool:
            return all(slot.current for slot in self.slots)

        self._serve_until(lambda: self.membership.said_all and (all_current() if warm else given_away()), HAND_OVER_S)
        if not warm and given_away() and member.map is not None and any(at != NO_OWNER for at in member.map.owners):
            self._serve_until(lambda: False, LINGER_S)

    def _serve_until(self, condition: Callable[[], bool], seconds: float) -> None:
        until = time.monotonic() + seconds
        while not condition() and (left := until - time.monotonic()) > 0:
            self.loop.run_once(min(left, 0.05))


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

"""A data server: one supervisor, one worker or more per NUMA node, and the processes that serve other hosts.

    supervisor   owns the segments, the listening sockets and the link to the manager; restarts what dies
      worker     forked; the only writer of its arena (server/worker.py)
      stream     forked; TCP transfers, a local client of the arena (server/stream.py)
      endpoint   forked if there is RDMA; RDMA connections of clients (server/rdma_endpoint.py, rdma_supervisor.py)
      mover      forked while shards move to a worker; copies their values (server/migration.py)

The supervisor is one thread with a selectors loop. It touches no value and no metadata, so little in it can fail. It
creates the segments and faults their pages in before READY; a worker that is added later has a process of its own for
that (``server/slots/growth.py``). It keeps the listening sockets, so clients of a worker that
died wait in the backlog and are not refused. It forks a successor on the same segment, which recovers it
(``arena/store.py``). All children end with it, by PDEATHSIG and because a socket pair closes.

Stop
----
At SIGTERM or SIGINT the supervisor leaves the cluster, ends streams and endpoints, then workers, stores *closed*, and
removes segments and sockets. Before LEAVE the workers give their shards up: the next owners accept mutations as soon
as LEAVE has arrived, while a reader with an old map may still look here. With ``--warm`` the segments stay, marked
*suspended*, for the next start under this name. A worker marks its own. Where none serves, as one recovers, has just
died or does not end in time, the supervisor does it (``arena/vault.py``). After SIGKILL the kernel ends the children:
workers suspend their arenas then, too, with ``--warm`` and no group, or remove them. What killed workers have left, the
next start removes. A worker that others tell to end leaves its arena open, as after a crash, for its successor.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from .arena.vault import Vault
from .cluster.assignment import DROP_ALL, Member, frozen_epoch
from .config.logs import set_up_logging
from .config.parsers import Address, duration_in
from .config.settings import add_arguments, load_command
from .config.startup import say
from .constants import NO_OWNER
from .errors import ConfigError, SimmError, UsageError, may_pass, printable
from .host.file_locks import LockFile
from .host.threads import LACKING
from .ipc import segments
from .net.http import Web
from .net.listeners import NamedSocket, open_listener, require_free
from .net.loop import Loop
from .net.process import Child, end_children, end_with, raise_file_limit, stop_on_signals
from .net.sd_notify import Notifier, keep_informed, reload_logs
from .net.token_watch import watch_tokens
from .rpc import Flag
from .server import migration
from .server.arena_stock import ArenaStock
from .server.children import STATS_ID, STREAM_PAUSE_S, Children, WorkerSlot, pause_after
from .server.membership import JOIN_TIMEOUT_S, Membership
from .server.operators.admin import open_admin
from .server.operators.pages import DataServerPages
from .server.operators.reports import Reporter
from .server.options import DataServerOptions, options_from
from .server.rdma_supervisor import Endpoints
from .server.slots.epochs import known_epochs, send_lease, stored_epoch
from .server.slots.growth import Growth
from .server.slots.hang_watch import watch_hangs
from .server.slots.opening import UNRECOVERED, Opener
from .wire import messages as M
from .wire.epoch_messages import NamespaceEpoch
from .wire.identity import instance_of, new_secret

log = logging.getLogger("simm.dataserver")

STOP_S: Final = 3.0
#: A clean stop waits so long for the map that gives the shards to others, and serves so long after it. A manager that
#: lives answers at once, and on a busy host within a second or so.
HAND_OVER_S: Final = 2.0
LINGER_S: Final = 0.3
#: Between the end of a mover and the next one.
MOVER_PAUSE_S: Final = 0.2
#: How often it is believed of a running server's arena that it is beyond recovery.
UNRECOVERED_MAX: Final = 3
#: What a step of a start or a stop may take, and further for each byte of the arenas that it touches.
ALLOW_S: Final = 60.0
ALLOW_BYTES_PER_S: Final = 128 << 20
#: Between two looks at the lock of this server's name.
NAME_S: Final = 1.0


class DataServer:
    """The supervisor. Construct, :meth:`start`, :meth:`run`; :meth:`stop` cleans up."""

    def __init__(self, options: DataServerOptions, notify: Notifier | None = None) -> None:
        self.options, self.notify, self.loop = options, notify or Notifier(), Loop(lasting=True)
        secret = new_secret()
        self.instance = instance_of(options.name, secret)
        self.slots: list[WorkerSlot] = []
        self.member = Member(options.name, self.instance, range(len(options.nodes)))
        self.stored = partial(stored_epoch, self.slots, self.member)
        self.membership = Membership(
            self.loop, self.member, self, options.managers, secret=secret, token=options.own_token,
            join_timeout_s=options.join_timeout_s, tls=options.tls, trusted=options.server_uids,
        )  # fmt: skip
        self.announced, self.failed = False, ""
        self.children = Children(self.loop, lambda: [*(slot.segment for slot in self.slots), *self.growth.arenas])
        self.resolve = self.children.resolve
        self.endpoints = Endpoints(options, self.loop, self.children, on_ready=self._announce, give_up=self.give_up)
        allow = partial(self._allow, "waiting for the workers of a server that has died")
        self._goes_on: Callable[[], bool] = lambda: self.loop.running
        self.stock = ArenaStock(options, self.instance, lambda: self._goes_on(), allow)
        messages = self._on_worker, self._on_mover
        self.opener = Opener(options, self.instance, self.children, self.stock, self.endpoints, *messages)
        self.growth: Growth = Growth(self)
        self.membership.on_refusal = self.growth.refused
        self.pages = DataServerPages(
            self.loop, self.slots, self.member, self.membership, self.endpoints, self.unready,
            options.tls, options.tokens)  # fmt: skip
        known = self.slots, self.member, self.membership, self.endpoints
        self.reports = Reporter(self.loop, *known, options.tokens)
        self._stopping = False
        #: The workers are told to give all shards up, whatever the map says.
        self._retiring = False
        self._shared: list[socket.socket | NamedSocket] = []
        self._lock: LockFile | None = None  # on this server's name
        self._web: Web | None = None
        self._http = ""  # its address, for the READY line

    # -- start ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Make segments and sockets, start the processes, look for the manager. Raises SimmError or OSError."""
        options = self.options
        raise_file_limit()
        stop_on_signals(self.loop, interrupt=True, reload=self._reload)
        if options.end_with:
            self._goes_on = end_with(self.loop, options.end_with)
        self.children.protect_parent()
        self.endpoints.detect()
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only to wake the loop; reaped in _reap
        self.loop.call_every(0.05, self._reap)
        self._lock = segments.take_name(options.runtime_dir, options.name, self.stock.await_workers)
        if not self._goes_on():
            return
        self._require_ports()
        self.loop.call_every(NAME_S, self._keep_name)
        cluster = self._find_cluster()
        if not self.loop.running:  # stopped, or given up
            return
        self._allow("taking over the arenas", sum(each.size for each in self.stock.undecided()))
        warm = self.stock.take_over(cluster)
        self.membership.warm = bool(warm)
        self.membership.warm_epoch, self.membership.warm_cluster = self.stock.epoch, self.stock.cluster
        self._allow("faulting in the arenas")
        if not warm and not self._goes_on():  # the memory of old ones may not be free
            return
        arenas = warm or self.stock.new(self.stock.size(), range(len(options.nodes)), self._faulted_in)
        with self.stock.handing_over(arenas):
            self.slots += [WorkerSlot(number, self.stock.nodes[number], arenas[number]) for number in sorted(arenas)]
        for number in sorted(set(arenas) - set(self.member.workers)):  # they were added before a warm stop
            self.member.add(number)
        if not arenas or (warm and not self.stock.populate(warm, self._faulted_in)):  # stopped meanwhile
            return
        known = self._processes, self.membership, self.growth.order
        self.opener.live, admin = open_admin(self.loop, options, *known)
        self._shared += admin
        self.opener.memory = sum(slot.segment.size for slot in self.slots)
        for slot in self.slots:
            self._shared += self.opener.open(slot)
        if options.http is not None:
            listener = open_listener(options.http, "--http")
            self._http = " http=" + str(Address(*listener.getsockname()[:2]))
            tls = options.tls.pages if options.tls else None
            self._web = Web(self.loop, listener, self.pages.routes, options.page_tokens, tls, settles=True)
        self._allow("starting the workers", sum(slot.segment.size for slot in self.slots))
        for slot in self.slots:
            self.start_worker(slot)
            for stream in slot.streams:
                stream.start()
        self.endpoints.start()
        watch_tokens(self.loop, options.tokens)
        self._poll_stats()
        self.membership.start()

    def _require_ports(self) -> None:
        """Learn of a taken port now, and not after minutes of faulting memory in. Raises SimmError."""
        options = self.options
        kinds = (False,) if self.endpoints.down_reason is not None else (False, True)
        addresses = [
            (Address(options.listen_host, options.port_of(number, rdma=rdma)), "--listen")
            for number in range(len(options.nodes)) for rdma in kinds
        ]  # fmt: skip
        require_free(addresses + ([(options.http, "--http")] if options.http is not None else []))

    def _reload(self) -> None:
        reload_logs(self.notify, [child.pid for child in self._processes()])

    def _faulted_in(self, done: int, new: int, total: int) -> bool:
        """Tell the service manager that faulting in goes on, if it does. Return False if it is to end."""
        if new:
            self._allow(f"faulting in the arenas: {done >> 20:,} of {total >> 20:,} MiB")
        return self._goes_on()

    def _allow(self, text: str, size: int = 0) -> None:
        """Tell the service manager what begins, and that it may take long: with so many bytes on a slow machine."""
        self.notify.status(text)
        self.notify.extend(ALLOW_S + size / ALLOW_BYTES_PER_S)

    def _find_cluster(self) -> int:
        """Return the manager's cluster if an arena was left whose fate depends on it; otherwise 0, at once."""
        undecided = self.stock.undecided()
        if not undecided:
            return 0
        log.info("%s is suspended: asking the manager which cluster it is of", undecided[0].name)
        self.membership.find_cluster(max((each.epoch for each in undecided if not each.fault), default=1))
        while self.loop.running and not self.membership.found_cluster:
            self.loop.run_once(0.5)
        return self.membership.found_cluster

    def _keep_name(self) -> None:
        """Take the lock again if its file was removed. End this server if another one has the name meanwhile."""
        if self._lock is None or self._stopping:
            return
        try:
            self._lock = segments.keep_name(self._lock, self.options.group)
        except SimmError as exc:
            self.give_up(str(exc))

    # -- children ---------------------------------------------------------------------------------

    def start_worker(self, slot: WorkerSlot) -> None:
        """Start a slot's worker, and send it what it must know; nothing to one that was taken back meanwhile."""
        slot.ready = False
        slot.worker.start()
        if slot.worker.child is None:
            return
        slot.worker.send(M.Stats(0), STATS_ID)
        if self.member.map is not None or self.member.abandoned:  # a worker without a map takes no mutation
            self.send_shards(slot)

    def _reap(self) -> None:
        """Restart children that died. A worker is restarted on its arena."""
        self.children.reap()
        self.endpoints.reap()
        self.growth.tick()
        for slot in self.slots:
            worker = slot.worker.ended()
            if worker is not None:
                self._worker_died(slot, worker)
            else:
                slot.worker.start_if_missing(partial(self.start_worker, slot))
            # Without a mover writers wait forever. The next one continues where the shard words say.
            slot.mover.kill_if_silent(migration.SILENT_S)
            if slot.mover.ended() is not None:
                self.loop.call_later(MOVER_PAUSE_S, partial(self.children.or_later, partial(self._feed_mover, slot)))
                slot.mover_ended()
            for stream in slot.streams:
                ended = stream.ended()
                if ended is None:
                    stream.start_if_missing()
                elif not self._stopping:
                    slot.deaths["stream"] += 1
                    pause_s = pause_after(stream.fruitless, STREAM_PAUSE_S)
                    log.error("%s (process %d) died%s: restarting%s", stream.name, ended.pid, ended.cause, _in(pause_s))
                    stream.start_or_retry(pause_s=pause_s)

    def _worker_died(self, slot: WorkerSlot, child: Child) -> None:
        slot.worker_died(child.code, time.monotonic())
        if self._stopping:
            return
        if why := slot.hopeless():
            log.error("worker %d: giving up", slot.number)
            cold = "" if self.membership.offered else "; if that is the arena's fault, start once without --warm"
            self.give_up(why + cold)
            return
        slot.unrecovered = slot.unrecovered + 1 if child.code == UNRECOVERED else 0
        if slot.unrecovered and not self.membership.offered:
            self._start_cold(slot)
            return
        if slot.unrecovered >= UNRECOVERED_MAX:
            # A new arena under this instance could not tell what it has lost from what it never had, and values of a
            # previous owner may be superseded. A new instance can, and gets a new arena, as this one is not suspended.
            name = slot.segment.name
            self.give_up(f"worker {slot.number} cannot recover its arena {name}: start again, which will be cold")
            return
        pause_s = pause_after(slot.fruitless)
        text = "worker %d (process %d) died%s: restarting it on its arena%s"
        log.error(text, slot.number, child.pid, child.cause, _in(pause_s))
        slot.worker.start_or_retry(partial(self.start_worker, slot), pause_s)

    def _start_cold(self, slot: WorkerSlot) -> None:
        """Replace a worker's segment that cannot be recovered. No manager knows this server yet."""
        old = slot.segment
        slot.worker.retire()  # it gets a successor, if any
        self.membership.warm = False
        self._allow(f"replacing the arena of worker {slot.number}", old.size)
        try:
            vault = Vault()  # first: a segment that is no slot's is removed by nobody
            made = self.stock.replace(slot.number, old, self._faulted_in)
            if made is None:  # stopped meanwhile
                return
            slot.segment, slot.vault = made, vault
            before, slot.worker = slot.worker, self.opener.worker_of(slot)
            slot.worker.cpu_s = before.cpu_s  # of all its processes
        except (SimmError, *LACKING) as exc:
            self.give_up(f"worker {slot.number} cannot start cold: {str(exc) or type(exc).__name__}")
            return
        slot.worker.start_or_retry(partial(self.start_worker, slot))

    def _poll_stats(self) -> None:
        """Ask the workers for their counters, once per heartbeat."""
        self.loop.call_later(min(1.0, self.membership.heartbeat_s), self._poll_stats)
        for slot in self.slots:
            slot.worker.send_unless_behind(M.Stats(self.reports.detail), STATS_ID)
            for stream in slot.streams:
                stream.send_unless_behind(M.Stats(0), STATS_ID)

    def _on_worker(self, slot: WorkerSlot, msg: Any, request_id: int) -> None:
        """Take a worker's answer: its counters, or that it has taken over the map."""
        if slot.order_waits:  # it reads again
            self.send_shards(slot)
        if isinstance(msg, M.StatsReply):
            slot.take_stats(json.loads(msg.json))
            if not slot.ready:
                slot.ready = True
                self.membership.join_once()  # one was sent if this worker recovers, and the link was new
        elif isinstance(msg, M.Done) and request_id == slot.order_id and not slot.order_waits:
            slot.current = True
            if self.member.abandoned:
                self.membership.join()
            elif not self.member.fenced:
                slot.sharded = True
                slot.taken = slot.order_epoch
                self.membership.acknowledge()
                self._announce()
                self.children.or_later(partial(self._feed_mover, slot))

    # -- shards -----------------------------------------------------------------------------------

    def on_map(self) -> None:
        """Send the workers what a newer map, or a fence, means for them."""
        for slot in self.slots:
            if slot.worker.child is not None:
                self.send_shards(slot)

    def send_shards(self, slot: WorkerSlot) -> None:
        """Send a slot's worker what the newest map means for it; later, if it has not read the one before.

        A worker that is stopped, or recovers an arena, would else have all maps of that time in this process's memory.
        """
        slot.current = False
        slot.order_waits = slot.worker.is_behind
        if slot.order_waits:
            return
        slot.order_id += 1
        slot.order_epoch = self.member.epoch
        order = self.member.order(slot.number)
        if self._retiring:
            order = DROP_ALL._replace(epoch=max(1, self.member.epoch), cluster=self.member.cluster)
        slot.send_order(order, self.member.epochs, self.reports.detail)
        self.on_lease()

    def on_lease(self) -> None:
        """Tell the workers until when values with an epoch may be read."""
        if self.member.epochs is not None:
            send_lease(self.slots, self.membership.lease.until(self.member.epochs.lease_ms))

    def epochs(self, cluster: int) -> list[NamespaceEpoch]:
        """Return the newest epochs of namespaces of this cluster that the workers know."""
        return known_epochs(self.slots, self.member.epochs, cluster)

    def _feed_mover(self, slot: WorkerSlot) -> None:
        """Send the worker's mover the map that the worker has taken, also if nothing is left: the mover ends then."""
        left = self.member.moving(slot.number, slot.words())
        running = slot.mover.child is not None
        if not slot.current or self._stopping or self.member.fenced or (not left and not running):
            return
        if not running:
            if not slot.moving:
                slot.moved_before = 0  # a new move begins
            slot.mover.start(f": {len(left)} shards")
        slot.moving = True
        offer = self.member.offer()
        assert offer is not None
        slot.mover.send(M.MapReply(*offer), flags=Flag.PUSH)

    def _on_mover(self, slot: WorkerSlot, msg: Any, _request_id: int) -> None:
        if isinstance(msg, M.MoveProgress):
            slot.progress = msg
            self.membership.report()

    def taken(self) -> int:
        """Return the epoch of the newest map that all workers have taken over, 0 for none."""
        return min(slot.taken for slot in self.slots)

    def frozen(self) -> int:
        """Return the highest epoch by which a shard is frozen, 0 if none is."""
        return max(frozen_epoch(slot.words()) for slot in self.slots)

    def moved(self) -> list[M.Moved]:
        """Return the shards that have moved in and that the map still lists as moving."""
        return [moved for slot in self.slots if (moved := self.member.moved(slot.number, slot.words())) is not None]

    # -- what the membership asks for -----------------------------------------------------------------

    def infos(self) -> list[M.WorkerInfo] | None:
        """Return all workers for JOIN, or None while one is not up or has entries to drop.

        Once a manager has taken this server in, a worker that recovers its arena is up. If the link broke meanwhile and
        no JOIN followed, all workers would lose their shards. Clients wait for the one, or miss, as without that.
        """
        now, abandoned = self.loop.clock(), self.member.abandoned
        known = self.membership.joined_at and not abandoned
        up = [slot.ready or bool(known and slot.stats and slot.comes_up(now)) for slot in self.slots]
        if not up or not all(up) or (abandoned and not all(slot.current for slot in self.slots)):
            return None
        return [slot.info(self.options, self.instance) for slot in self.slots]

    def loads(self) -> list[M.WorkerLoad]:
        """Return the load of all workers, for a heartbeat."""
        loads = []
        for slot in self.slots:
            left = len(self.member.moving(slot.number, slot.words()))
            slot.moving = slot.moving and bool(left or slot.mover.child)
            loads.append(slot.load(left))
        return loads

    def on_abandoned(self) -> None:
        """Drop all entries, as the manager belongs to another cluster. What movers bring is not wanted either."""
        for slot in self.slots:
            slot.mover.kill()
            slot.sharded = False
            slot.taken = 0
        # One-sided reads see no header, so the RDMA connections must end before an entry of the new cluster is stored.
        self.endpoints.end()
        self.on_map()

    def give_up(self, why: str) -> None:
        """End this data server, for the reason ``why``."""
        self.failed = why
        self.loop.stop()

    def share_out(self, shared: list[socket.socket | NamedSocket]) -> None:
        """Take over sockets of another worker, and tell all workers how much memory there is now."""
        self._shared += shared
        self.opener.memory = sum(slot.segment.size for slot in self.slots)
        for slot in self.slots:
            slot.worker.signal(signal.SIGHUP)

    def unready(self) -> str:
        """Return why this server does not take part in its cluster; empty if it does."""
        return "stopping" if self._stopping else "" if self.announced else "starting: READY has not been said"

    def _announce(self) -> None:
        """Print READY, once, when every worker serves, the manager knows this server, and it has its shards."""
        if self.announced or not self.membership.joined or self.endpoints.awaited:
            return
        if not all(slot.ready and slot.sharded for slot in self.slots):
            return
        self.announced = True
        say(self.pages.ready(self.options.listen_host, self._http))
        self.notify.ready(self.pages.status())
        keep_informed(self.loop, self.notify, self.pages.status, watch_hangs(self.loop, self.notify, self.slots))

    # -- run and stop -----------------------------------------------------------------------------

    def run(self) -> int:
        """Serve until a signal, clean up in every case, and return the exit code."""
        try:
            self.start()
            self.loop.run()
        finally:
            self.stop()
        if self.failed:
            print(f"simm dataserver: {printable(self.failed)}", file=sys.stderr, flush=True)
            return 1
        return 0

    def stop(self) -> None:
        """Leave the cluster, end the children, remove segments and sockets. Idempotent."""
        if self._stopping:
            return
        self._stopping = self.children.stopping = True
        self.notify.stopping(self.failed or "handing its shards over")
        self.notify.extend(ALLOW_S + sum(slot.segment.size for slot in self.slots) / ALLOW_BYTES_PER_S)
        self.growth.stop()
        retired = False
        try:
            retired = self.options.warm or not self.membership.joined or self._retire()
            if retired:
                self._hand_over()
        except Exception:  # the clean-up below must run
            log.exception("handing over failed")
        made = [slot for slot in self.slots if slot.tcp is not None]  # else a start failed before them
        workers = [slot.worker.child for slot in made if slot.worker.child is not None]
        end_children([child for child in self._processes() if child not in workers], STOP_S / 3, ALLOW_S)
        for slot in made:
            if not slot.ready:  # it would end when it has recovered its arena, and is not needed for what is left to do
                slot.worker.kill()
        end_children(workers, STOP_S, ALLOW_S)
        for each in self._shared:
            if isinstance(each, NamedSocket) and self._lock is not None and self._lock.held:
                with contextlib.suppress(OSError):
                    os.unlink(each.path)
        kept = self.options.warm and not self.member.displaced and self.endpoints.end()
        for slot in [each for each in self.slots if each.segment.is_owner]:  # some may be removed, and not replaced
            try:
                # What ends its workers again and again is kept only as it has been found.
                vault = None if slot.unrecovered or slot.hopeless() else slot.vault
                if not (kept and self.stock.keep(slot.segment, vault, self.member.order(slot.number))):
                    segments.store_closed(slot.segment.name)
                    slot.segment.unlink()
            except SimmError as exc:
                log.error("removing %s: %s", slot.segment.name, exc)
            slot.segment.close()
        if not retired:  # by now no reader finds a shard here
            self.membership.leave(warm=False)
            self._serve_until(lambda: self.membership.all_answered, HAND_OVER_S)
        for each in self._shared:
            each.close()
        self.endpoints.close()
        if self._web is not None:
            self._web.close()
        self.loop.close()
        if self._lock is not None:
            self._lock.release()

    def _processes(self) -> list[Child]:
        """Return the processes that run, but for resolvers."""
        made = [slot for slot in self.slots if slot.tcp is not None]
        found = [each.child for slot in made for each in (slot.worker, slot.mover, *slot.streams)]
        return [child for child in (*found, *self.endpoints.processes()) if child is not None]

    def _retire(self) -> bool:
        """Have the workers give all shards up. Return False if one of them does not answer."""
        self._retiring = True
        self.on_map()
        self._serve_until(lambda: all(slot.current for slot in self.slots), HAND_OVER_S)
        return all(slot.current for slot in self.slots)

    def _hand_over(self) -> None:
        """Send LEAVE. Without ``--warm`` serve until other servers own the shards, and LINGER_S more.

        So writers get WRONG_OWNER and go to the new owner, and are not refused. Without a manager no map can come.
        """
        warm, member, membership = self.options.warm, self.member, self.membership
        if not membership.leave(warm=warm):
            return

        def done() -> bool:
            """Return True if the shards are others', or with ``--warm`` if the workers have the newest map."""
            return all(slot.current for slot in self.slots) and (warm or not any(map(member.owned, member.workers)))

        self._serve_until(lambda: membership.peer is None or (membership.all_answered and done()), HAND_OVER_S)
        if not warm and done() and member.map is not None and any(at != NO_OWNER for at in member.map.owners):
            self._serve_until(lambda: False, LINGER_S)

    def _serve_until(self, condition: Callable[[], bool], seconds: float) -> None:
        until = time.monotonic() + seconds
        while not condition() and (left := until - time.monotonic()) > 0:
            self.loop.run_once(min(left, 0.05))


def _in(pause_s: float) -> str:
    return f" in {pause_s:.1f} s" if pause_s else ""


_join_ms: Final = duration_in("ms", 1, 86_400_000)


def main(argv: Sequence[str] | None = None, prog: str = "python -m simm.dataserver") -> int:
    """Run a data server until SIGTERM or Ctrl-C; the exit code."""
    parser = argparse.ArgumentParser(prog=prog, description="A SiMM data server: one worker or more per NUMA node.")
    add_arguments(parser, "dataserver")
    parser.add_argument("--end-with", type=int, default=0, metavar="PID", help="end when process PID ends")
    parser.add_argument("--join-timeout", default=f"{JOIN_TIMEOUT_S:.0f}s", metavar="TIME",
                        help="end if no manager takes this server in for so long (default: %(default)s)")  # fmt: skip
    arguments = parser.parse_args(argv)
    notify = Notifier.from_environment()
    try:
        settings = load_command("dataserver", arguments)
        set_up_logging(settings, "supervisor")
        try:
            join_timeout_s = _join_ms(arguments.join_timeout) / 1000
        except ConfigError as exc:
            raise ConfigError(f"--join-timeout: {exc}") from None
        options = options_from(settings, end_with=arguments.end_with, join_timeout_s=join_timeout_s)
        return DataServer(options, notify).run()
    except (SimmError, OSError) as exc:
        notify.status(str(exc))
        print(f"simm dataserver: {printable(str(exc))}", file=sys.stderr)
        return 2 if isinstance(exc, (ConfigError, UsageError)) and not may_pass(exc) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Run the manager: keep the cluster's membership and shard map, and send the map to servers and clients.

The manager is off the data path: without it, every GET and PUT to known servers goes on. ``cluster/machine.py`` makes
all decisions; this file gives it a socket, a clock and a disk.

    events   JOIN, HEARTBEAT, LEAVE, MOVED, DRAIN, MAP_OFFER, lost connections, time   ->  Cluster
    actions  answers at once; a changed map is stored, then pushed to subscribers and sent to those who asked

What can go wrong, and what we chose
------------------------------------
* *A storm of changes* (a thousand servers join at once). Changes are collected for ``SETTLE_S``, then stored and pushed
  once. A subscriber that has not taken its last map gets the newest when it has, never a queue of them. Pushes go out
  ``MAPS_PER_TURN`` a turn, so that heartbeats are read in between.
* *Killed between a change and its storing.* No map is sent before it is stored. Nor must an epoch that was sent name
  another map later. So the file *reserves* epochs, and the next manager goes on beyond them (``cluster/recovery.py``).
  DRAIN is answered when it is stored, others at once: servers say again what a manager does not know.
* *The disk is full or fails.* Logged, counted, retried every ``RETRY_S``. Service goes on: maps and DRAIN's answer are
  sent though nothing is stored, and STATUS says so (``trouble``). If the manager is killed meanwhile, the servers'
  heartbeats name the newest epoch and raise ours. If the file is lost, the first server that joins brings a map.
* *The state file is damaged, foreign, newer, or in use.* The manager does not start. It says what is wrong and what to
  do; it never starts a new cluster instead.
* *Another manager leads* (``leading`` is false). All but PING and HELLO is answered NOT_LEADER, nothing is decided.
* *This manager led, was stopped, and another leads since* (``control/election.py``). The coordinator's clock decides
  whether it leads, before each request and again before each answer, and etcd decides at each write. With a coordinator
  nothing is sent that is not stored, so that a successor never knows less than the servers.
* *A client says that it is a data server.* Maps tell everybody each server's name and instance. JOIN must show the
  secret of which the instance was made (``wire/identity.py``). HEARTBEAT, LEAVE, MOVED and MAP_OFFER count only on the
  connection by which the server has joined last. So a server that has lost its connection joins at once by another
  one, also at a manager that has never seen it.
* *An fsync takes seconds.* A thread waits for it. Changes wait half a second at most; then they are sent as if the disk
  had failed (``control/state_keeper.py``).
* *Changes come faster than they are stored.* Each map is sent once it is stored, though it is not the present one then.

Exit codes: 0 stopped by a signal; 1 cannot start (port taken, state in use); 2 the configuration or the state file must
be corrected.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import secrets
import socket
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from . import __version__
from .cluster.machine import EPOCHS_RESERVED, Cluster
from .cluster.nodes import Action, Answer, Timing
from .config.logs import set_up_logging
from .config.settings import Settings, add_arguments, load_command
from .config.startup import allowed_uids, check_exposure, live_tokens, say, server_tls_options
from .config.tokens import Token
from .control import activity, tuning
from .control.cluster_status import ClusterStatus
from .control.election import Coordinator, NotLeader, campaign, connect
from .control.epochs import Advances
from .control.events import EventLog
from .control.links import (
    WILDCARDS,
    ConnectionState,
    ServerLinks,
    asks_for_map,
    is_refusal,
    peer_host,
    rights_fault,
    secret_fault,
)  # fmt: skip
from .control.pages import ManagerPages, Standing
from .control.state_file import StateFile
from .control.state_keeper import ETCD_RETRY_S, StateKeeper, stored_cluster
from .control.waiting import Pushes, Told, Waiting
from .errors import ConfigError, CorruptionError, RemoteProtocolError, SimmError, may_pass, printable
from .net.http import Web
from .net.listeners import bound_address, open_listener
from .net.local_users import LocalUsers
from .net.loop import Loop
from .net.peer import Peer, Service
from .net.process import end_with, raise_file_limit, stop_on_signals
from .net.sd_notify import Notifier, keep_informed, reload_logs
from .net.tls_peer import accepting, server_tls
from .net.token_watch import watch_tokens
from .rpc import Encoded, Flag, Frame, decode
from .wire import epoch_messages as E
from .wire import messages as M
from .wire import report_messages as P
from .wire.auth import Gate
from .wire.hello import Refusal, accept, opens
from .wire.messages import Status, status_name

log = logging.getLogger("simm.manager")

SETTLE_S: Final = 0.02
#: Longest time between two runs of maintenance; a quarter of a heartbeat if that is shorter.
MAINTAIN_S: Final = 0.25
#: What only the data server itself may say.
_OF_SERVERS: Final = M.Heartbeat | M.Leave | M.Moved | P.Report


class Manager(Service):
    """Serves one cluster on a loop. Without a store everything is in memory only.

    Args:
        users: whose processes may connect without a token; None for all.
        lease_s: how long a server without a manager serves values with an epoch; 0 for ever.
        coordinator: decides whether this manager leads, and is the store then. Without one it leads at once.

    Raises CorruptionError when the stored state cannot be used.
    """

    hello_first = True
    cluster: Cluster
    _links: ServerLinks

    def __init__(
        self, loop: Loop, *, timing: Timing = Timing(), store: StateFile | None = None,  # noqa: B008 -- immutable
        tokens: Sequence[Token] = (), insecure: bool = False, coordinator: Coordinator | None = None,
        users: LocalUsers | None = None, lease_s: float = 0.0,
    ) -> None:  # fmt: skip
        self.loop, self.timing = loop, timing
        self._subscribers: set[Peer] = set()
        self._tuning = tuning.Tuning(self, loop, lambda name: self._links.peer_of(name), self._subscribers)
        self.insecure, self.leading, self.started = insecure, False, loop.now
        self.counts = dict.fromkeys(
            ("joins", "joins_refused", "heartbeats", "maps_sent", "moves_reported", "maps_offered", "unauthorized"), 0,
        )  # fmt: skip
        self._tokens, self._users = tokens, users
        #: And its term in which this manager leads.
        self._coordinator, self._term = coordinator, 0
        self.state = StateKeeper(
            loop, store if coordinator is None else coordinator, EPOCHS_RESERVED,
            self._snapshot, self._publish, self.step_down,
            lambda: {**self._tuning.traces.to_state(), **self.advances.to_state()},
        )  # fmt: skip
        self._settling = False
        self._waiting = Waiting()
        #: The present map; that of the newest snapshot; and the newest one that may be sent.
        self._present: Told | None = None
        self._saving: Told | None = None
        self._told: Told | None = None
        self._links = ServerLinks(lambda: self.cluster.nodes)
        self.advances: Advances = Advances(lambda: self.cluster, lease_s, lambda: self.state.stored > 0)
        self._pushes = Pushes(loop, self._leads, self.advances.tell)
        self.activity = activity.Activity(tokens)
        self.events = EventLog(lambda: len(self.cluster.live_workers()))
        self.pages = ManagerPages(self.status, self.standing, self._trouble, self.activity, self.events, loop.clock)
        self._answers = ClusterStatus(loop, lambda: self.cluster, self.own, self.events)
        self.cluster = self._blank()
        if coordinator is None:
            self.lead()
        loop.call_every(min(MAINTAIN_S, timing.heartbeat_s / 4), self._maintain)
        loop.call_every(activity.HISTORY_S, lambda: self.activity.look(self.cluster.nodes, loop.now))

    # -- leading ---------------------------------------------------------------------------------

    def lead(self) -> None:
        """Serve the stored cluster. Raises CorruptionError, and what the store raises; does not lead then."""
        self.cluster = self._load()
        self.advances.take_state(self.state.loaded)
        self.leading = True

    def step_down(self, why: str) -> None:
        """Stop leading: forget the cluster, and close all connections so that peers look for the leader."""
        log.warning("standing by: %s", why)
        self.leading = False
        self._waiting.clear()
        self.advances.forget()
        for peer in [peer for peer in self.loop.peers if peer.service is self]:
            peer.close(why)
        self.cluster = self._blank()
        self.activity.forget()
        self.state.forget()

    def poll(self) -> None:
        """Lead, or stop leading, as the coordinator says. Raises CorruptionError for a state that cannot be used."""
        coordinator = self._coordinator
        if coordinator is None or self._leads() or not (term := coordinator.term):
            return
        try:
            self._term = term
            self.lead()
            if self.state.save_now():
                log.info("leading: epoch %d, %d nodes", self.cluster.epoch, len(self.cluster.nodes))
                return
            why = "the state cannot be stored"
        except (OSError, NotLeader) as exc:
            why = str(exc)
        self.step_down(f"cannot lead: {why}")
        coordinator.resign(ETCD_RETRY_S)

    def _leads(self) -> bool:
        """Return True if this manager leads now; else close all connections. Call it before each act as the leader."""
        if self.leading and self._coordinator is not None and self._coordinator.term != self._term:
            self.step_down("its term has ended")
        return self.leading

    def _blank(self) -> Cluster:
        return Cluster(secrets.randbits(64) or 1, self.loop.now, self.timing)  # 0 is no cluster

    # -- connections -----------------------------------------------------------------------------

    def on_connect(self, peer: Peer) -> None:
        peer.context = ConnectionState(Gate(M.Service.MANAGER, self._tokens))
        if self._users is not None:
            self._users.check(peer, self._count_refused)

    def on_close(self, peer: Peer, reason: str) -> None:
        self._subscribers.discard(peer)
        self._waiting.drop(peer)
        for node in self._links.closed(peer):
            log.debug("connection of %s closed: %s", node[0], reason)
            self._apply(self.cluster.link_lost(self.loop.now, *node))

    def on_drain(self, peer: Peer) -> None:
        if peer.context.stale:
            self._pushes.push(peer)

    def on_frame(self, peer: Peer, frame: Frame) -> None:
        state: ConnectionState = peer.context
        number, now = frame.request_id, self.loop.now
        if frame.flags & (Flag.REPLY | Flag.PUSH):
            raise RemoteProtocolError("a reply or push where a request is due")
        if not state.greeted and not opens(frame):
            if self._tokens:
                text = "a token is required: the first message must be HELLO with one (--token-file)"
                self._refuse(peer, number, text)
                return
            state.greeted = True
            peer.admit()
        if state.greeted and (text := state.gate.refusal(frame.opcode)):
            self._refuse(peer, number, text)
            return
        msg = decode(frame)
        if isinstance(msg, M.Ping):
            peer.send_message(M.Pong(msg.cookie), number)
        elif isinstance(msg, M.Auth | M.Prove):
            answer, status = state.gate.take(msg)
            self.counts["unauthorized"] += status == Status.UNAUTHORIZED
            peer.send_verdict(answer, status, number)
        elif isinstance(msg, M.Hello):
            self._hello(peer, state, number, msg)
        elif not self._leads():
            peer.send_error(number, Status.NOT_LEADER, f"{self._trouble()}: ask the one that leads")
        elif isinstance(msg, M.Join):
            self._join(peer, number, msg)
        elif isinstance(msg, _OF_SERVERS) and not self._links.speaks_for(peer, (msg.name, msg.instance)):
            text = f"{msg.name!r} has not joined by this connection as this instance: join again"
            peer.send_error(number, Status.UNKNOWN_NODE, text)
        elif isinstance(msg, M.Heartbeat):
            self.counts["heartbeats"] += 1
            actions = self.cluster.heartbeat(now, msg.name, msg.instance, msg.epoch, msg.loads, state.follows)
            self._reply(peer, number, self.advances.leased(actions) if state.leases else actions)
            self._look_at_advances(msg.name)
        elif isinstance(msg, E.Advance):
            self._advance(peer, state.gate, number, msg)
        elif isinstance(msg, E.Epochs):
            if not (names := self._links.names(peer)):
                raise RemoteProtocolError("EPOCHS of no data server")
            self._reply(peer, number, self.cluster.report(now, msg, names))
        elif isinstance(msg, P.Report):
            fault = self.activity.take(msg, now)
            peer.send_verdict(M.Error(fault) if fault else M.Done(1), Status.BAD_REQUEST if fault else 0, number)
        elif isinstance(msg, M.Leave):
            actions = self.cluster.leave(now, msg.name, msg.instance, bool(msg.warm))
            if not is_refusal(actions):
                self._links.unbind(msg.name)
                self.activity.drop(msg.name)
            self._reply(peer, number, actions)
        elif isinstance(msg, M.Moved):
            self.counts["moves_reported"] += 1
            self._reply(peer, number, self.cluster.moved(now, msg))
        elif isinstance(msg, M.Drain):
            self._reply(peer, number, self.cluster.drain(now, msg.name, bool(msg.drain)), ordered=True)
        elif isinstance(msg, tuning.HANDLED):
            self._tuning.on_message(peer, number, msg)
        elif isinstance(msg, M.MapOffer):
            if not (state.asked and self._links.has_joined(peer)):
                raise RemoteProtocolError("a map that nobody asked for")
            state.asked = False
            self.counts["maps_offered"] += 1
            self._reply(peer, number, self.cluster.offer(now, msg))
        elif isinstance(msg, M.MapGet):
            state.asks(msg.subscribe)
            if msg.subscribe:
                (self._subscribers.add if msg.subscribe & E.SUBSCRIBE_MAPS else self._subscribers.discard)(peer)
            self._tuning.traces.greet(peer)
            if msg.subscribe & P.SUBSCRIBE_REPORTS and self._links.has_joined(peer):
                peer.push(P.ReportEvery(int(self.activity.interval_s(self.cluster.nodes) * 1000)))
            self.advances.asked(self._links.names(peer), state.follows)
            joined, supervisor = self._links.has_joined(peer), state.supervisor
            self._apply(self.cluster.note_epoch(now, msg.known_epoch, server=joined, supervisor=supervisor))
            self._waiting.add(peer, number)
            self._answer_waiting()
        elif isinstance(msg, M.ClusterStatus):
            peer.send_message(self._answers.answer(state.gate), number)
        else:
            raise RemoteProtocolError(f"{type(msg).__name__} is not for a manager")

    def _hello(self, peer: Peer, state: ConnectionState, number: int, msg: M.Hello) -> None:
        proto = accept(msg, "manager", state.gate)
        if isinstance(proto, Refusal):
            self.counts["unauthorized"] += proto.status == Status.UNAUTHORIZED
            peer.refuse(number, proto.text, proto.status)
            return
        state.greeted, state.supervisor = True, msg.role == M.Role.SUPERVISOR
        peer.admit()
        peer.send_message(M.Welcome(proto, 0, 0, 0, 0, 0, 0, ""), number)

    def _count_refused(self) -> None:
        self.counts["unauthorized"] += 1

    def _refuse(self, peer: Peer, number: int, text: str) -> None:
        self._count_refused()
        peer.refuse(number, text)

    def _advance(self, peer: Peer, gate: Gate, number: int, msg: E.Advance) -> None:
        """Advance a namespace, and answer when nobody can read its old values any more."""
        if not gate.admits(msg.namespace):
            self._refuse(peer, number, f"{gate.token} may not use the namespace {msg.namespace!r}")
        elif fault := self.advances.fault(peer, self.loop.now, self.state.refuses):
            peer.send_error(number, Status.BUSY, fault)
        elif is_refusal(actions := self.cluster.advance(self.loop.now, msg.namespace)):
            self._reply(peer, number, actions)
        else:
            self._apply(actions)  # leases may have been given later than when this turn of the loop began
            self.advances.wait(peer, number, msg, self.cluster.epoch, self.loop.clock())

    def _look_at_advances(self, server: str = "") -> None:
        if self.advances.awaits(server) and self._leads() and self.advances.maintain(self.loop.now, self.state.stored):
            self.state.changed()
            self.state.save()

    def _join(self, peer: Peer, number: int, msg: M.Join) -> None:
        """Take a JOIN, and bind the server to this connection and no other. It must show its secret each time."""
        actions = secret_fault(msg) or rights_fault(msg, peer.context.gate.token)
        if not actions:
            workers = [info._replace(host=peer_host(peer, info.host)) for info in msg.workers]
            msg = msg._replace(workers=workers, secret=b"")
            actions = self.cluster.join(self.loop.now, msg, self.loop.clock())
        if is_refusal(actions):
            self.counts["joins_refused"] += 1
        else:
            self.counts["joins"] += 1
            self._links.bind(peer, (msg.name, msg.instance))
            peer.context.asked |= asks_for_map(actions)
        self._reply(peer, number, actions)

    def _reply(self, peer: Peer, number: int, actions: list[Action], *, ordered: bool = False) -> None:
        """Send the answer among ``actions`` and do the others. ``ordered``: by a person, who waits for the disk."""
        answer = actions[0]
        assert isinstance(answer, Answer)
        if answer.status != Status.OK:
            self.loop.noise(logging.INFO, "%s: %s: %s", peer.address, status_name(answer.status), answer.message.text)
        self._apply(actions)
        if ordered and answer.status == Status.OK:
            self._waiting.add(peer, number, answer)
            self._answer_waiting()
        elif self.state.cover(self.cluster.epoch) and self._leads():
            peer.send_message(answer.message, number, status=answer.status)

    # -- changes ---------------------------------------------------------------------------------

    def _maintain(self) -> None:
        self.poll()
        if self.leading:
            self._apply(self.cluster.maintain(self.loop.now))
            self._answer_waiting()
            self._look_at_advances()

    def _map(self) -> Told:
        """Return the map. With a thousand workers it takes milliseconds to encode, so that is done once."""
        reply = self.cluster.map_reply()
        if self._present is None or self._present.map.msg is not reply:
            self._present = Told(Encoded(reply), self.advances.epochs()._replace(epoch=reply.epoch))
        return self._present._replace(asked=self._waiting.asked)

    def _snapshot(self) -> tuple[int, Any]:
        """Return what is to be stored, and keep its map, which may be sent as soon as it is."""
        self._saving = None if self.cluster.rebuilding else self._map()
        return self.cluster.epoch, self.cluster.to_state()

    def _answer_waiting(self) -> None:
        """Answer the requests that wait, if a map may be sent that is no older than they are."""
        if not self._waiting or self.cluster.rebuilding:
            return
        settled = not (self._settling and self.state.used)
        if settled and self.state.cover(self.cluster.epoch) and not self.state.holds_back:
            self._told = self._map()
        told = self._told
        if told is None or told.epochs.cluster != self.cluster.cluster or not self._leads():
            return
        found = told.map
        for peer, number, said in self._waiting.take(self.loop, self._answer_waiting, told.asked):
            if said is not None and not peer.closed:
                peer.send_message(said.message, number, status=said.status)
            elif not peer.closed:
                state: ConnectionState = peer.context
                state.stale = False
                state.epoch = found.msg.epoch
                self.counts["maps_sent"] += 1
                self.advances.tell(peer, told.epochs)
                peer.send(found.header(number, flags=Flag.REPLY))
                peer.send(found.body)  # one for all, also for those that do not read

    def _apply(self, actions: Sequence[Action]) -> None:
        """Log changes, and have them stored and pushed soon."""
        for action in actions:
            if self.events.note(action):
                self.state.changed()
                if not self._settling:
                    self._settling = True
                    self.loop.call_later(SETTLE_S, self._settled)

    def _settled(self) -> None:
        self._settling = False
        if self.leading:
            self.state.save()
            self._publish()

    def _publish(self) -> None:
        """Send the map to those who wait for it, and push it if it has changed: the newest one that may be sent.

        That is the present one, or, if that must be stored first, the one that has been stored just now.
        """
        if not self.leading or not self._leads() or self.cluster.rebuilding:
            return
        told = self._saving if self.state.landed else None
        if not self.state.holds_back:
            self.state.sent()
            told = self._map()
        newest = self._told.epochs.epoch if self._told is not None else 0
        if told is None or told.epochs.cluster != self.cluster.cluster or told.epochs.epoch < newest:
            return
        self._told = told
        self._answer_waiting()
        told = self._told  # the present one, if it had waited long enough just now
        self.advances.tell_longer(self._subscribers, told.epochs)
        if told.epochs.epoch != self._pushes.epoch:
            self._pushes.begin(told, self._subscribers, self._waiting)

    # -- storing ---------------------------------------------------------------------------------

    def _load(self) -> Cluster:
        cluster, reserved = stored_cluster(self.state, self.loop.clock(), self.timing)
        cluster = self._blank() if cluster is None else cluster
        # A predecessor may have left no trace, and one whose key was deleted leads on: see control/election.py.
        cluster.unsure = self.loop.clock() + (self._coordinator.ttl_s if self._coordinator is not None else 0)
        self._tuning.traces.take_state(self.state.loaded)
        self._pushes.epoch, self._saving, self._told = cluster.epoch, None, None
        self.state.begin(reserved)
        return cluster

    # -- for people ------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Return the cluster's status, and the manager's own under ``manager``. O(workers)."""
        own = self.own()
        return {**self.cluster.status(self.loop.now), "manager": own}

    def own(self) -> dict[str, Any]:
        """Return the manager's own status and counters. O(1)."""
        leading, leader, _ = self.standing()
        counters = {
            "protocol_errors": self.loop.protocol_errors, "handler_errors": self.loop.handler_errors, **self.counts,
            "pushes": self._pushes.made,
            "state_writes": self.state.writes, "state_write_failures": self.state.failures,
            "advances": self.advances.confirmed, "advances_unconfirmed": self.advances.unconfirmed,
        }  # fmt: skip
        return {
            "pid": os.getpid(), "version": __version__, "uptime_s": round(self.loop.now - self.started, 1),
            "connections": len(self.loop.peers), "subscribers": len(self._subscribers), "insecure": self.insecure,
            "state_stored": self.state.up_to_date, "trouble": self._trouble(), "leading": leading,
            "leader": leader, "term": self._term if self.leading else 0, "counters": counters, **counters,
        }  # fmt: skip

    def standing(self) -> Standing:
        """Return whether this manager leads, and who does. O(1)."""
        return Standing(self._leads(), self._leader(), self.cluster.rebuilding)

    def _leader(self) -> str:
        """Return the leader's address; empty without a leader or a coordinator."""
        leader = self._coordinator.leader if self._coordinator is not None else None
        return leader.address if leader is not None else ""

    def _trouble(self) -> str:
        if not self._leads():
            leader, coordinator = self._leader(), self._coordinator
            if not leader and coordinator is not None:
                reason = coordinator.trouble
                unknown = f", and etcd cannot say who leads ({reason})"
                return f"standing by{unknown if reason else ', no manager leads yet'}"
            return f"standing by, {leader or 'another manager'} leads"
        if self.cluster.rebuilding:
            return "collecting the map from the servers"
        return self.state.trouble


# --- process ----------------------------------------------------------------------------------


def run(settings: Settings, notify: Notifier, *, end_with_pid: int = 0) -> int:
    """Run a manager until a signal. Return the exit code. Raises ConfigError, SimmError or OSError if it cannot."""
    tokens = live_tokens(settings.token_file)
    check_exposure(settings.listen, tokens, settings.insecure, "--listen")
    uids = allowed_uids(settings, tokens)
    if settings.http is not None:
        check_exposure(settings.http, tokens, settings.insecure, "--http")
    tls = server_tls(server_tls_options(settings, connects=False))
    raise_file_limit()
    timing = tuning.timing_of(settings)
    if settings.coordinator is not None and settings.state_dir is not None:
        drop = " or ".join(settings.origin(name) for name in ("state_dir", "coordinator"))
        raise ConfigError(f"the state is kept in etcd or in a folder, not in both: drop {drop}")
    with contextlib.ExitStack() as stack:
        store = coordinator = None
        if settings.state_dir is not None:
            store = stack.enter_context(contextlib.closing(StateFile(settings.state_dir, "manager")))
        loop = Loop()
        stack.callback(loop.close)
        if settings.coordinator is not None:
            coordinator = stack.enter_context(contextlib.closing(connect(settings)))
        exposed = not settings.listen.loopback and not tokens
        manager = Manager(
            loop, timing=timing, store=store, tokens=tokens, insecure=exposed, coordinator=coordinator,
            users=LocalUsers(uids) if uids is not None else None, lease_s=settings.epoch_lease_ms / 1000,
        )  # fmt: skip
        manager.pages.tls = tls
        listener = stack.enter_context(open_listener(settings.listen, "--listen"))
        address = bound_address(listener)
        ready, page, web = f"READY manager {address}", "", None
        if settings.http is not None:
            http = open_listener(settings.http, "--http")
            page = str(bound_address(http))
            ready += f" http={page}"
            web_tokens = () if settings.http.loopback else tokens
            web = Web(loop, http, manager.pages.routes, web_tokens, tls.pages if tls else None, settles=True)
            stack.callback(web.close)
        # Stored before READY: a folder that cannot be written fails now, not at the first change.
        manager.state.save_now()
        manager.state.save_in_background()
        stack.callback(manager.state.close)
        loop.listen(listener, manager, peers=accepting(tls))
        watch_tokens(loop, tokens, manager)
        # Not loop.run(), which would ignore an earlier signal.
        loop.running = True
        stop_on_signals(loop, interrupt=True, reload=partial(reload_logs, notify))
        if end_with_pid:
            end_with(loop, end_with_pid)
        if coordinator is not None:
            named = address._replace(host=socket.gethostname()) if address.host in WILDCARDS else address
            campaign(loop, coordinator, str(named), page, manager.poll, lambda: manager.leading)
            ready += "" if manager.leading else " standby"
        if loop.running:
            say(ready)
            notify.ready(manager.pages.line())
            keep_informed(loop, notify, manager.pages.line)
            log.info("%s, state in %s", ready, settings.coordinator or settings.state_dir or "memory only")
        while loop.running:
            loop.run_once(None)
        log.info("stopping")
        notify.stopping("storing the state")
        # The disk may stand still. Whoever connects meanwhile must not wait for a manager that answers no more.
        loop.stop_listening()
        if web is not None:
            web.close()
        manager.state.close()
        if manager.leading:
            manager.state.save_now(last=True)
    return 0


def main(argv: Sequence[str] | None = None, prog: str = "python -m simm.manager") -> int:
    """Run a manager until SIGTERM or Ctrl-C. Return the exit code."""
    parser = argparse.ArgumentParser(prog=prog, description="The SiMM manager: membership and the shard map.")
    add_arguments(parser, "manager")
    parser.add_argument("--end-with", type=int, default=0, metavar="PID", help="end when process PID ends")
    arguments = parser.parse_args(argv)
    notify = Notifier.from_environment()
    try:
        settings = load_command("manager", arguments)
        set_up_logging(settings, "manager")
        return run(settings, notify, end_with_pid=arguments.end_with)
    except (SimmError, OSError) as exc:
        notify.status(str(exc))
        print(f"simm manager: {printable(str(exc))}", file=sys.stderr)
        return 2 if isinstance(exc, (ConfigError, CorruptionError)) and not may_pass(exc) else 1


if __name__ == "__main__":
    sys.exit(main())

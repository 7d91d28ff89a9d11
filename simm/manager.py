"""The manager: who is in the cluster, who owns which shard, and telling everyone.

It is off the data path: with it down, every GET and PUT to known servers goes on. All decisions are
``cluster.py``'s; this file gives it a socket, a clock and a disk.

    events   JOIN, HEARTBEAT, LEAVE, MOVED, DRAIN, MAP_OFFER, lost connections, ticks   ->  Cluster
    actions  answers at once; a changed map is stored, then told: pushed to all subscribers, and to who asked

What can go wrong, and what stands against it
---------------------------------------------
* *A storm of changes* (a thousand servers join at once). Changes are collected for ``SETTLE_S`` and
  stored and pushed once. A subscriber that has not taken its last map gets the newest when it has,
  never a queue of them; pushes go out ``PUSHES_PER_TURN`` a turn, so that heartbeats are heard between.
* *Killed between a change and its storing.* No map is told before it is stored: who asks for it while one waits to be
  stored is answered after that. Nor must an epoch that someone has seen come again with another map. So the file
  *reserves* epochs: it names one further on, and a manager that was killed goes on from there. A clean stop writes
  the exact one.
* *There is no file any more.* The first server that joins brings a map, and so begins a rebuild (``cluster.py``).
  Nobody is told a map until it ends: clients and servers go on with what they have.
* *The disk is full or fails.* Logged, counted, retried every ``RETRY_S``; service goes on. Should it be killed
  meanwhile, the servers' heartbeats still know the newest epoch and raise ours (``cluster.py``).
* *The state file is damaged, foreign, newer, or in use.* The manager does not start, says which, and
  how to go on. It never begins anew by itself.
* *Another manager leads* (``leading`` is false). All but PING and HELLO is answered NOT_LEADER; nothing is decided or
  stored here. :meth:`Manager.lead` and :meth:`Manager.step_down` change that; the latter closes all connections.
* *We led, were stopped, and another leads since* (``coordinator.py``). Whether we lead is asked of the clock before
  each request is looked at and again before anything is sent, and etcd asks at each write. With a coordinator nothing
  is told that is not stored, so that a successor never knows less than the servers: while etcd does not take a
  change, it waits.
* *An fsync that takes seconds* stops this loop, and with it nothing but membership. The time does not
  count as silence of the servers.

Exit codes: 0 stopped by a signal, 1 cannot start (port taken, state in use), 2 the configuration
or the state file must be mended.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import secrets
import socket
import sys
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Protocol

from . import __version__
from . import messages as M
from .cluster import EPOCHS_RESERVED, Action, Answer, Cluster, MapChanged, NodeChanged, NodeState, Timing
from .config import Settings, add_arguments, load_command
from .coordinator import Coordinator, NotLeader, connect
from .errors import ConfigError, CorruptionError, RemoteProtocolError, SimmError
from .greeting import agreed_protocol, token_fits
from .loop import Loop, Peer, Service, listen_tcp
from .manager_pages import ManagerPages
from .messages import Status
from .process import end_with, raise_file_limit, stop_on_signals
from .quantities import Address
from .rpc import Flag, Frame, decode, encode
from .startup import check_exposure, read_tokens, set_up_logging
from .statefile import StateFile
from .web import Web

log = logging.getLogger("simm.manager")

SETTLE_S: Final = 0.02
RETRY_S: Final = 5.0
#: The same for etcd; and how long others may try to lead before one who could not tries again.
ETCD_RETRY_S: Final = 1.0
#: Time for data servers to find us again: they take 3 s to see that a stopped manager is silent, and as much for
#: another that is no better.
RETURN_S: Final = 8.0
#: A manager says READY when it knows who leads, and after this time in any case.
DECIDE_S: Final = 5.0
PUSHES_PER_TURN: Final = 128
#: Longest time between two ticks of the cluster; a quarter of a heartbeat if that is shorter.
TICK_S: Final = 0.25
_WILDCARDS: Final = frozenset({"", "0.0.0.0", "::"})


class StateStore(Protocol):
    """Where a cluster's state is kept: a :class:`~simm.statefile.StateFile`, or something with the same manners."""

    @property
    def where(self) -> str:
        """Its name, for people."""

    def load(self) -> Any:
        """The state last saved, or None when there never was one. Raises CorruptionError with the remedy."""

    def save(self, state: Any) -> None:
        """Replace the state, durably. Raises OSError; the old state is then still there."""

    def close(self) -> None:
        """Let others have it."""


class Link:
    """Per-connection state."""

    __slots__ = ("epoch", "greeted", "node", "stale")

    def __init__(self) -> None:
        self.greeted = False
        #: (name, instance) of the data server that speaks here.
        self.node: tuple[str, int] | None = None
        #: Of the last map sent here.
        self.epoch = 0
        #: A newer one is waiting to be sent.
        self.stale = False


class Manager(Service):
    """Serves one cluster on a loop. Without a store everything is in memory only.

    Args:
        coordinator: says whether we lead, and is the store then.
        leading: without a coordinator: lead at once; else answer NOT_LEADER until :meth:`lead`.

    Raises CorruptionError when the stored state cannot be used.
    """

    def __init__(
        self, loop: Loop, *, timing: Timing = Timing(), store: StateStore | None = None,  # noqa: B008 -- immutable
        tokens: Sequence[str] = (), insecure: bool = False, leading: bool = True,
        coordinator: Coordinator | None = None,
    ) -> None:  # fmt: skip
        self.loop = loop
        self.timing = timing
        self.insecure = insecure
        self.leading = False
        self.started = loop.now
        self.counts = dict.fromkeys(
            ("joins", "joins_refused", "heartbeats", "maps_sent", "pushes", "moves_told", "maps_offered",
             "unauthorized", "state_writes", "state_write_failures"), 0,
        )  # fmt: skip
        self._tokens = [token.encode() for token in tokens]
        self._coordinator = coordinator
        #: The coordinator's, in which we serve.
        self._term = 0
        self._store: StateStore | None = coordinator if coordinator is not None else store
        self._reserved = 0
        self._unsaved = False
        self._settling = False
        self._failing = False
        self._subscribers: set[Peer] = set()
        #: Who asked for the map while it could not be told, and the number of the request.
        self._waiting: list[tuple[Peer, int]] = []
        self._to_push: deque[Peer] = deque()
        self._push_frame = b""
        self._push_epoch = 0
        #: The connection that each live instance was heard on last.
        self._links: dict[tuple[str, int], Peer] = {}
        self.pages = ManagerPages(self.status, self._trouble)
        self.cluster = self._blank()
        if leading and coordinator is None:
            self.lead()
        loop.call_every(min(TICK_S, timing.heartbeat_s / 4), self._tick)

    # -- leading ---------------------------------------------------------------------------------

    def lead(self) -> None:
        """Serve the cluster as it is stored. Raises CorruptionError, and what the store raises; does not lead then."""
        self._failing = False
        self.cluster = self._load()
        self.leading = True

    def step_down(self, why: str) -> None:
        """Another manager leads: forget the cluster, and send everybody there by closing their connections."""
        log.warning("standing by: %s", why)
        self.leading = False
        self._waiting.clear()
        for peer in [peer for peer in self.loop.peers if peer.service is self]:
            peer.close(why)
        self.cluster = self._blank()
        self._unsaved = False

    def look(self) -> None:
        """Lead, or lead no more, as the coordinator says. Raises CorruptionError for a state that cannot be used."""
        coordinator = self._coordinator
        if coordinator is None or self._leads() or not (term := coordinator.term):
            return
        try:
            self._term = term
            self.lead()
            if self.save():
                log.info("leading: epoch %d, %d nodes", self.cluster.epoch, len(self.cluster.nodes))
                return
            why = "the state cannot be stored"
        except (OSError, NotLeader) as exc:
            why = str(exc)
        self.step_down(f"cannot lead: {why}")
        coordinator.resign(ETCD_RETRY_S)

    def _leads(self) -> bool:
        """Whether we lead at this moment. Ask before each act in a leader's name; if not, everybody is gone then."""
        if self.leading and self._coordinator is not None and self._coordinator.term != self._term:
            self.step_down("our time as the leader is over")
        return self.leading

    def _blank(self) -> Cluster:
        return Cluster(secrets.randbits(64), self.loop.now, self.timing)

    # -- connections -----------------------------------------------------------------------------

    def on_connect(self, peer: Peer) -> None:
        peer.context = Link()

    def on_close(self, peer: Peer, reason: str) -> None:
        link: Link = peer.context
        self._subscribers.discard(peer)
        if link.node is not None and self._links.get(link.node) is peer:
            del self._links[link.node]
            log.debug("connection of %s closed: %s", link.node[0], reason)
            self._apply(self.cluster.link_lost(self.loop.now, *link.node))

    def on_drain(self, peer: Peer) -> None:
        link: Link = peer.context
        if link.stale:
            self._push(peer, link)

    def on_frame(self, peer: Peer, frame: Frame) -> None:
        link: Link = peer.context
        msg = decode(frame)
        if frame.flags & (Flag.REPLY | Flag.PUSH):
            raise RemoteProtocolError(f"a reply or push ({type(msg).__name__}) where a request is due")
        number, now = frame.request_id, self.loop.now
        if isinstance(msg, M.Ping):
            peer.send_message(M.Pong(msg.cookie), number)
        elif isinstance(msg, M.Hello):
            self._hello(peer, link, number, msg)
        elif self._tokens and not link.greeted:
            self._refuse(peer, number, "a token is required: the first message must be HELLO with one (--token-file)")
        elif not self._leads():
            peer.send_error(number, Status.NOT_LEADER, f"{self._trouble()}: ask the one that leads")
        elif isinstance(msg, M.Heartbeat):
            self.counts["heartbeats"] += 1
            actions = self.cluster.heartbeat(now, msg.name, msg.instance, msg.epoch, msg.loads)
            self._reply(peer, number, actions, (msg.name, msg.instance))
        elif isinstance(msg, M.Join):
            workers = [info._replace(host=peer_host(peer, info.host)) for info in msg.workers]
            actions = self.cluster.join(now, msg._replace(workers=workers))
            ok = self._reply(peer, number, actions, (msg.name, msg.instance))
            self.counts["joins" if ok else "joins_refused"] += 1
        elif isinstance(msg, M.Leave):
            self._reply(peer, number, self.cluster.leave(now, msg.name, msg.instance, bool(msg.warm)), None)
        elif isinstance(msg, M.Moved):
            self.counts["moves_told"] += 1
            self._reply(peer, number, self.cluster.moved(now, msg), None)
        elif isinstance(msg, M.Drain):
            self._reply(peer, number, self.cluster.drain(now, msg.name, bool(msg.drain)), None)
        elif isinstance(msg, M.MapOffer):
            if link.node is None:
                raise RemoteProtocolError("a map from somebody who has not joined")
            self.counts["maps_offered"] += 1
            self._reply(peer, number, self.cluster.offer(now, msg), None)
        elif isinstance(msg, M.MapGet):
            if msg.subscribe:
                self._subscribers.add(peer)
            self.cluster.noticed(now, msg.known_epoch)
            self._waiting.append((peer, number))
            self._tell()
        elif isinstance(msg, M.ClusterStatus):
            peer.send_message(M.StatsReply(json.dumps(self.status()).encode()), number)
        else:
            raise RemoteProtocolError(f"{type(msg).__name__} is not for a manager")

    def _hello(self, peer: Peer, link: Link, number: int, msg: M.Hello) -> None:
        proto, text = agreed_protocol(msg, "manager")
        if not proto:
            peer.send_error(number, Status.VERSION, text)
            return
        if self._tokens and not token_fits(self._tokens, msg.token.encode()):
            self._refuse(peer, number, "wrong or missing token: see --token-file")
            return
        link.greeted = True
        peer.send_message(M.Welcome(proto, 0, 0, 0, 0, 0, 0, ""), number)

    def _refuse(self, peer: Peer, number: int, text: str) -> None:
        self.counts["unauthorized"] += 1
        log.warning("refusing %s: %s", peer.address, text)
        peer.send_error(number, Status.UNAUTHORIZED, text)
        peer.close("unauthorized")

    def _reply(self, peer: Peer, number: int, actions: list[Action], node: tuple[str, int] | None) -> bool:
        """Send the answer among ``actions``, do the others; whether it was no refusal."""
        answer = actions[0]
        assert isinstance(answer, Answer)
        ok = answer.status is Status.OK
        link: Link = peer.context
        if ok and node is not None and self._links.get(node) is not peer:
            if link.node is not None and self._links.get(link.node) is peer:
                del self._links[link.node]
            link.node = node
            self._links[node] = peer
        elif not ok:
            log.info("%s: %s: %s", peer.address, answer.status.name, answer.message.text)
        self._apply(actions)
        if self._reserve() and self._leads():
            peer.send_message(answer.message, number, status=answer.status)
        return ok

    # -- changes ---------------------------------------------------------------------------------

    def _tick(self) -> None:
        self.look()
        if self.leading:
            self._apply(self.cluster.tick(self.loop.now))
            self._tell()

    def _tell(self) -> None:
        """Give the map to those who asked for it, if it may be told."""
        if not self._waiting or self.cluster.rebuilding or (self._settling and self._store is not None):
            return
        if not self._reserve() or (self._unsaved and self._coordinator is not None) or not self._leads():
            return
        reply = self.cluster.map_reply()
        waiting, self._waiting = self._waiting, []
        for peer, number in waiting:
            if not peer.closed:
                link: Link = peer.context
                link.stale = False
                link.epoch = reply.epoch
                self.counts["maps_sent"] += 1
                peer.send_message(reply, number)

    def _apply(self, actions: Sequence[Action]) -> None:
        """Log what changed; have it stored and pushed soon."""
        for action in actions:
            if isinstance(action, NodeChanged):
                level = logging.WARNING if action.after in (NodeState.SUSPECT, NodeState.DEAD) else logging.INFO
                before = action.before.value if action.before is not None else "unknown"
                log.log(level, "node %s: %s -> %s: %s", action.name, before, action.after.value, action.why)
            elif isinstance(action, MapChanged):
                log.info("epoch %d: %d workers", action.epoch, len(self.cluster.live_workers()))
            else:
                continue
            self._unsaved = True
            if not self._settling:
                self._settling = True
                self.loop.call_later(SETTLE_S, self._settled)

    def _settled(self) -> None:
        self._settling = False
        if not self.leading:
            return
        saved = self.save()
        if (self._coordinator is not None and not saved) or not self._leads() or self.cluster.rebuilding:
            return
        self._tell()
        reply = self.cluster.map_reply()
        if reply.epoch == self._push_epoch:
            return
        self._push_epoch = reply.epoch
        self._push_frame = encode(reply, 0, flags=Flag.PUSH)
        fresh = not self._to_push
        for peer in self._subscribers:
            link: Link = peer.context
            if not link.stale and link.epoch != reply.epoch:
                link.stale = True
                self._to_push.append(peer)
        if fresh:
            self._push_some()

    def _push_some(self) -> None:
        self._leads()  # if not, they are closed
        for _ in range(min(PUSHES_PER_TURN, len(self._to_push))):
            peer = self._to_push.popleft()
            if not peer.closed and peer.context.stale and not peer.out:
                self._push(peer, peer.context)
        if self._to_push:
            self.loop.call_later(0.0, self._push_some)

    def _push(self, peer: Peer, link: Link) -> None:
        link.stale = False
        link.epoch = self._push_epoch
        self.counts["pushes"] += 1
        peer.send(self._push_frame)

    # -- storing ---------------------------------------------------------------------------------

    def _load(self) -> Cluster:
        stored = self._store.load() if self._store is not None else None
        if stored is None or self._store is None:
            cluster = self._blank()
            self._reserved = 0
        else:
            where = self._store.where
            try:
                reserved = int(stored["epochs_reserved"])
                cluster = Cluster.from_state(stored.get("cluster"), self.loop.now, self.timing, reserved)
            except (CorruptionError, KeyError, TypeError, ValueError, AttributeError) as exc:
                raise CorruptionError(
                    f"{where} cannot be used: {exc}; restore a copy, or, to begin anew, move it away"
                ) from exc
            self._reserved = reserved
            log.info("%s: epoch %d, %d nodes", where, cluster.epoch, len(cluster.nodes))
        self._push_epoch = cluster.epoch
        self._unsaved = True
        return cluster

    def _reserve(self) -> bool:
        """Nobody may see an epoch that the stored state does not cover; whether it may be seen."""
        if self.cluster.epoch >= self._reserved and not self._failing:
            self._unsaved = True
            self.save()
        # Of a disk that fails we only complain; a successor on another machine would not know of the epoch.
        return self._coordinator is None or self.cluster.epoch < self._reserved

    def save(self, *, last: bool = False) -> bool:
        """Store what changed; whether all is stored. A failure is logged, counted, and retried later."""
        if self._store is None or not self.leading or not (self._unsaved or last):
            return True
        reserved = self.cluster.epoch + (0 if last else EPOCHS_RESERVED)
        try:
            self._store.save({"cluster": self.cluster.to_state(), "epochs_reserved": reserved})
        except NotLeader as exc:
            self.step_down(str(exc))
            return False
        except OSError as exc:
            self.counts["state_write_failures"] += 1
            retry_s = RETRY_S if self._coordinator is None else ETCD_RETRY_S
            log.error(
                "cannot store the cluster's state in %s: %s; %s, trying again in %.0f s",
                self._store.where, exc.strerror or exc,
                "service goes on" if self._coordinator is None else "changes wait", retry_s,
            )  # fmt: skip
            if not self._failing:
                self._failing = True
                self.loop.call_later(retry_s, self._retry)
            return False
        self.counts["state_writes"] += 1
        self._unsaved = False
        self._reserved = reserved
        return True

    def _retry(self) -> None:
        if not self._failing:
            return
        self._failing = False
        if self.save() and not self._failing:
            log.info("the cluster's state is stored again")
            self._settled()

    # -- for people ------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """The cluster's status and the manager's own counters."""
        leading = self._leads()
        status = self.cluster.status(self.loop.now)
        counters = {
            "protocol_errors": self.loop.protocol_errors, "handler_errors": self.loop.handler_errors, **self.counts,
        }  # fmt: skip
        status["manager"] = {
            "pid": os.getpid(),
            "version": __version__,
            "uptime_s": round(self.loop.now - self.started, 1),
            "connections": len(self.loop.peers),
            "subscribers": len(self._subscribers),
            "state_stored": self._store is not None and not self._unsaved,
            "insecure": self.insecure,
            "leading": leading,
            "leader": self._leader(),
            "term": self._term if self.leading else 0,
            "counters": counters,
            **counters,
        }
        return status

    def _leader(self) -> str:
        """Where the leader listens; empty if there is none, or no coordinator."""
        leader = self._coordinator.leader if self._coordinator is not None else None
        return leader.address if leader is not None else ""

    def _trouble(self) -> str:
        if not self._leads():
            leader, coordinator = self._leader(), self._coordinator
            if not leader and coordinator is not None:
                why = coordinator.trouble
                return f"standing by, and etcd cannot say who leads ({why})" if why else "standing by, nobody leads yet"
            return f"standing by, {leader or 'another manager'} leads"
        if self.cluster.rebuilding:
            return "collecting the map from the servers"
        return "the state cannot be stored" if self._failing else ""


def peer_host(peer: Peer, host: str) -> str:
    """A worker's host as others reach it: a server that names none, or a wildcard, is where it comes from."""
    return peer.address.rpartition(":")[0] if host in _WILDCARDS else host


# --- process ----------------------------------------------------------------------------------


def open_listener(address: Address, flag: str) -> socket.socket:
    """Listen on an address. Raises SimmError naming the flag that gave it."""
    try:
        return listen_tcp(*address)
    except OSError as exc:
        raise SimmError(f"{exc.strerror or exc}: free it, or choose another {flag} (port 0 is any free one)") from exc


def bound_address(sock: socket.socket) -> Address:
    """Where a listener really listens (port 0 became one)."""
    host, port = sock.getsockname()[:2]
    return Address(host, port)


def run(settings: Settings, *, end_with_pid: int = 0) -> int:
    """Run a manager until a signal; the exit code. Raises ConfigError, SimmError or OSError if it cannot start."""
    tokens = read_tokens(settings.token_file)
    check_exposure(settings.listen, tokens, settings.insecure, "--listen")
    if settings.http is not None:
        check_exposure(settings.http, tokens, settings.insecure, "--http")
    raise_file_limit()
    timing = Timing(
        settings.heartbeat_ms / 1000, settings.suspect_after, settings.dead_after, settings.grace_ms / 1000,
        settings.restart_grace_ms / 1000, settings.moves_at_once, return_s=RETURN_S,
    )  # fmt: skip
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
            loop, timing=timing, store=store, tokens=tokens, insecure=exposed, coordinator=coordinator
        )  # fmt: skip
        listener = stack.enter_context(open_listener(settings.listen, "--listen"))
        address = bound_address(listener)
        ready, page = f"READY manager {address}", ""
        if settings.http is not None:
            http = open_listener(settings.http, "--http")
            page = str(bound_address(http))
            ready += f" http={page}"
            web_tokens = () if settings.http.loopback else tokens
            pages = manager.pages
            routes = {"/": pages.page, "/metrics": pages.metrics, "/healthz": pages.healthz, "/leader": pages.leader}
            stack.callback(Web(loop, http, routes, web_tokens).close)
        # On disk before anyone is told: a folder that cannot be written shows now, and not at the first change.
        manager.save()
        loop.listen(listener, manager)
        # Not loop.run(), which would forget a signal that comes before it.
        loop.running = True
        stop_on_signals(loop, interrupt=True)
        if end_with_pid:
            end_with(loop, end_with_pid)
        if coordinator is not None:
            ready += _campaign(loop, manager, coordinator, address, page)
        if loop.running:
            print(ready, flush=True)
            log.info("%s, state in %s", ready, settings.coordinator or settings.state_dir or "memory only")
        while loop.running:
            loop.run_once(None)
        log.info("stopping")
        manager.save(last=True)
    return 0


def _campaign(loop: Loop, manager: Manager, coordinator: Coordinator, address: Address, page: str) -> str:
    """Begin to campaign, and serve until it is known who leads; what that makes of us, for the READY line."""

    def noticed(_mask: int) -> None:
        coordinator.noticed()
        manager.look()

    named = address._replace(host=socket.gethostname()) if address.host in _WILDCARDS else address
    coordinator.start(str(named), page)
    loop.watch(coordinator, noticed)
    until = loop.clock() + DECIDE_S
    while loop.running and not manager.leading and coordinator.leader is None and not coordinator.trouble:
        if loop.clock() > until:
            break
        loop.run_once(0.05)
    return "" if manager.leading else " standby"


def main(argv: Sequence[str] | None = None, prog: str = "python -m simm.manager") -> int:
    """Run a manager until SIGTERM or Ctrl-C; the exit code."""
    parser = argparse.ArgumentParser(prog=prog, description="The SiMM manager: membership and the shard map.")
    add_arguments(parser, "manager")
    parser.add_argument("--end-with", type=int, default=0, metavar="PID", help="end when process PID ends")
    arguments = parser.parse_args(argv)
    try:
        settings = load_command("manager", arguments)
        set_up_logging(settings)
        return run(settings, end_with_pid=arguments.end_with)
    except (SimmError, OSError) as exc:
        print(f"simm manager: {exc}", file=sys.stderr)
        return 2 if isinstance(exc, (ConfigError, CorruptionError)) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Simulate a manager: the real ``cluster/machine.py`` with a loop, a disk and subscribers, as ``manager.py`` drives it.

Advances wait in the real ``control/epochs.py``.
Restated are the collection of changes before a store and push, the reserved epochs of the state file, and which peers
get a map when. A crash loses what is not on the disk; a lost disk loses that too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from random import Random
from typing import Any, Final

from ..cluster.machine import EPOCHS_RESERVED, Cluster
from ..cluster.nodes import Action, Answer, MapChanged, NodeChanged, NodeState, Timing
from ..cluster.shard_map import ShardMap
from ..control.epochs import Advances
from ..control.links import ConnectionState, is_refusal
from ..wire.epoch_messages import SUBSCRIBE_MAPS, Advance, Epochs
from ..wire.messages import Error, Heartbeat, Join, Leave, MapGet, MapOffer, MapReply, Moved, Status
from .net import Net, Process

SETTLE_S: Final = 0.02
MAINTAIN_S: Final = 0.25


class _Caller:
    """The connection of a client that advances a namespace."""

    def __init__(self, manager: ManagerHost, link: int, answer: Any) -> None:
        self._manager = manager
        self._link = link
        self._said = answer

    @property
    def closed(self) -> bool:
        return self._link not in self._manager.links

    def send_message(self, message: Any, _number: int) -> None:
        self._manager.answer(self._link, self._said, message, Status.OK)

    def send_error(self, _number: int, status: int, text: str) -> None:
        self._manager.answer(self._link, self._said, Error(text), status)


class ManagerHost:
    """The manager's process, disk and connections."""

    HOST: Final = "manager"

    def __init__(self, net: Net, timing: Timing, lease_s: float) -> None:
        self.net = net
        self.timing = timing
        self.advances = Advances(lambda: self.cluster, lease_s)
        #: What each connection has asked for, and the name of the server that has joined by it.
        self.states: dict[int, ConnectionState] = {}
        self.names: dict[int, str] = {}
        #: The newest epoch on the disk.
        self.stored = 0
        self.process = Process(net, self.HOST, "manager")
        self.disk: dict[str, Any] | None = None
        self.cluster = Cluster(1, 0.0, timing)
        #: Its clock may jump: the difference from the simulation's.
        self.skew = 0.0
        self.reserved = 0
        #: Starts from a stored state so far. What they draw is of each start, so that a seed's run has no other draws.
        self._lives = 0
        #: Open connections by number: the process, its life, and its callback for a broken connection.
        self.links: dict[int, tuple[Process, int, Any]] = {}
        self.subscribers: set[int] = set()
        self.waiting: list[tuple[int, Any]] = []
        #: Told when an operator's orders are on the disk.
        self.ordered: list[Any] = []
        #: Injected bugs.
        self.plants: frozenset[str] = frozenset()
        self._numbers = 0
        self.settling = self.unsaved = False
        self.last_pushed = 0
        #: Changes of owner in earlier lives.
        self.moves = 0
        self.messages = 0
        self.client_messages = 0
        #: Called with a node's name and its new state.
        self.on_turn: Any = lambda _name, _state: None
        #: Called with each map that is made, sent or not.
        self.on_made: Any = lambda _reply: None
        #: It has lost its state, or got an older one back, at least once.
        self.forgot = False
        self.epochs: list[int] = []
        self.newest: MapReply | None = None
        self.map_bytes = 0
        #: (name, from, to) with the time, for the report.
        self.turns: list[tuple[float, str, NodeState]] = []
        #: Former states of the disk, oldest first: an operator may restore one.
        self.backups: deque[dict[str, Any]] = deque(maxlen=20)

    # -- its life -----------------------------------------------------------------------------

    def start(self) -> None:
        """Start from the disk."""
        self.process.start()
        self.moves += self.cluster.moves
        self.links.clear()
        self.states.clear()
        self.names.clear()
        self.advances.forget()
        self.stored = 0
        self.subscribers.clear()
        self.waiting.clear()
        self.ordered.clear()
        self.settling = False
        self.unsaved = True
        if self.disk is None:
            chance = self.net.random.getrandbits
            self.cluster = Cluster(chance(63) | 1, self._clock(), self.timing, chance)
            self.reserved = 0
        else:
            reserved = int(self.disk["epochs_reserved"])
            self._lives += 1
            self.cluster = Cluster.from_state(
                self.disk["cluster"], self._clock(), self.timing, reserved, self.net.random.getrandbits,
                Random((self.net.seed << 16) + self._lives).getrandbits(64),
            )  # fmt: skip
            self.reserved = reserved
        self.last_pushed = self.cluster.epoch
        self.on_made(self.cluster.map_reply())
        self.net.say(f"manager starts, {self.cluster!r}")
        self._maintain()

    def crash(self, *, lose_disk: bool = False, old_disk: bool = False) -> None:
        """Kill it: the kernel closes its connections. ``old_disk``: an operator restores an old state file."""
        about = " and its disk is lost" if lose_disk else " and an old state file is restored" if old_disk else ""
        self.net.say(f"manager dies{about}")
        self.process.die()
        self.forgot |= lose_disk or old_disk
        if lose_disk:
            self.disk = None
        elif old_disk and self.backups:
            self.disk = self.net.random.choice(list(self.backups))
        links, self.links = self.links, {}
        for process, life, closed in links.values():
            if self.net.reaches(self.HOST, process.host):
                self.net.at(self.net.now + self.net.delay(self.HOST, process.host), process.take, life, closed, ())

    def _clock(self) -> float:
        return self.net.now + self.skew

    def _maintain(self) -> None:
        self._apply(self.cluster.maintain(self._clock()))
        self._answer_waiting()
        self._look_at_advances()
        self.process.later(MAINTAIN_S, self._maintain)

    # -- messages ---------------------------------------------------------------------------------

    def connect(self, process: Process, closed: Any) -> int:
        """Connect a process; return the connection's number, or 0. ``closed`` is called there when it breaks."""
        reaches = self.net.reaches
        if not (self.process.running and reaches(process.host, self.HOST) and reaches(self.HOST, process.host)):
            return 0
        self._numbers += 1
        self.links[self._numbers] = (process, process.life, closed)
        self.states[self._numbers] = state = ConnectionState(Any)  # type: ignore[arg-type]
        state.supervisor = not _is_client(process)
        return self._numbers

    def closed(self, link: int, name: str = "", instance: int = 0) -> None:
        """The peer has closed the connection, or has ended."""
        self.links.pop(link, None)
        self.states.pop(link, None)
        self.names.pop(link, None)
        self.subscribers.discard(link)
        if name:
            self._apply(self.cluster.link_lost(self._clock(), name, instance))

    def request(self, link: int, msg: Any, answer: Any) -> None:
        """Take a request; ``answer(message, status)`` is called at the peer."""
        now = self._clock()
        if link not in self.links:
            return
        self._count(self.links[link][0])
        state = self.states[link]
        if isinstance(msg, Heartbeat):
            actions = self.cluster.heartbeat(now, msg.name, msg.instance, msg.epoch, msg.loads, state.follows)
            self._reply(link, self.advances.leased(actions) if state.leases else actions, answer)
            self._look_at_advances(msg.name)
        elif isinstance(msg, Advance):
            self._advance(link, msg, answer)
        elif isinstance(msg, Epochs):
            self._reply(link, self.cluster.report(now, msg, filter(None, [self.names.get(link)])), answer)
        elif isinstance(msg, Join):
            actions = self.cluster.join(now, msg)
            if not is_refusal(actions):
                self.names[link] = msg.name
            self._reply(link, actions, answer)
        elif isinstance(msg, Leave):
            self._reply(link, self.cluster.leave(now, msg.name, msg.instance, bool(msg.warm)), answer)
        elif isinstance(msg, Moved):
            self._reply(link, self.cluster.moved(now, msg), answer)
        elif isinstance(msg, MapOffer):
            self._reply(link, self.cluster.offer(now, msg), answer)
        elif isinstance(msg, MapGet):
            if msg.subscribe:
                (self.subscribers.add if msg.subscribe & SUBSCRIBE_MAPS else self.subscribers.discard)(link)
            state.asks(msg.subscribe)
            self.advances.asked(filter(None, [self.names.get(link)]), state.follows)
            joined, supervisor = link in self.names, state.supervisor
            self._apply(self.cluster.note_epoch(now, msg.known_epoch, server=joined, supervisor=supervisor))
            self.waiting.append((link, answer))
            self._answer_waiting()
        else:
            raise TypeError(type(msg).__name__)

    def _advance(self, link: int, msg: Advance, answer: Any) -> None:
        caller: Any = _Caller(self, link, answer)
        now = self._clock()
        if fault := self.advances.fault(caller, now):
            self.answer(link, answer, Error(fault), Status.BUSY)
        elif is_refusal(actions := self.cluster.advance(now, msg.namespace)):
            self._reply(link, actions, answer)
        else:
            self._apply(actions)
            self.advances.wait(caller, 0, msg, self.cluster.epoch, now)

    def _look_at_advances(self, server: str = "") -> None:
        if self.advances.awaits(server) and self.advances.maintain(self._clock(), self.stored):
            self.unsaved = True
            self.save()

    def _count(self, process: Process) -> None:
        self.messages += 1
        self.client_messages += _is_client(process)

    def drain(self, name: str, on: bool, done: Any = None) -> None:
        """Start or end a drain for an operator, and call ``done`` when that is on the disk."""
        if self.process.running and not self.process.paused:
            actions = self.cluster.drain(self._clock(), name, on)
            self._apply(actions)
            if done is not None and not self.cluster.rebuilding:
                self.ordered.append(done)
                self._answer_orders()

    def _answer_orders(self) -> None:
        """Answer the operators whose orders are on the disk."""
        if not self.settling or "answers_early" in self.plants:
            ordered, self.ordered = self.ordered, []
            for done in ordered:
                done()

    def _reply(self, link: int, actions: Sequence[Action], answer: Any) -> None:
        said = actions[0]
        assert isinstance(said, Answer)
        self._apply(actions)
        if self.cluster.epoch >= self.reserved:
            self.unsaved = True
            self.save()
        self.answer(link, answer, said.message, said.status)

    def answer(self, link: int, answer: Any, message: Any, status: int) -> None:
        """Send an answer to the process at the other end."""
        process, life, _ = self.links.get(link, (self.process, 0, None))
        if process.life == life:
            self._count(process)
            self.net.send(self.process, process, answer, message, status)

    # -- changes ----------------------------------------------------------------------------------

    def _apply(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, NodeChanged):
                self.net.say(f"manager: {action.name} is {action.after.value}: {action.why}")
                self.turns.append((self.net.now, action.name, action.after))
                self.on_turn(action.name, action.after)
            elif isinstance(action, MapChanged):
                self.net.say(f"manager: epoch {action.epoch}, {self.cluster.moves} moved")
                self.on_made(self.cluster.map_reply())
            else:
                continue
            self.unsaved = True
            if not self.settling:
                self.settling = True
                self.process.later(SETTLE_S, self._settled)

    def _settled(self) -> None:
        self.settling = False
        self.save()
        self._answer_orders()
        if not self.cluster.rebuilding:
            self._answer_waiting()
            self._push()

    def save(self) -> None:
        """Store the state on the disk."""
        if self.unsaved:
            self.reserved = self.cluster.epoch + EPOCHS_RESERVED
            if self.disk is not None:
                self.backups.append(self.disk)
            self.stored = self.cluster.epoch
            self.disk = {"cluster": self.cluster.to_state(), "epochs_reserved": self.reserved}
            self.unsaved = False

    def _answer_waiting(self) -> None:
        if not self.waiting or self.cluster.rebuilding or self.settling:
            return
        reply = self._map()
        waiting, self.waiting = self.waiting, []
        for link, answer in waiting:
            self._send_map(link, answer, reply)

    def _push(self) -> None:
        reply = self._map()
        if reply.epoch == self.last_pushed:
            return
        self.last_pushed = reply.epoch
        for link in sorted(self.subscribers):
            self._send_map(link, self.links[link][0].on_push, reply)

    def _send_map(self, link: int, answer: Any, reply: MapReply) -> None:
        """Send a map, and the epochs of namespaces before it, if there are any."""
        state = self.states.get(link)
        if state is not None and state.epochs and self.cluster.namespaces:
            answer = partial(_take_both, self.links[link][0], link, self.advances.epochs(), answer)
        self.answer(link, answer, reply, Status.OK)

    def _map(self) -> MapReply:
        """Return the current map, and note its size."""
        reply = self.cluster.map_reply()
        if reply is not self.newest:
            self.newest = reply
            self.epochs.append(reply.epoch)
            # Its size on the wire: workers, owners, previous owners, epochs.
            texts = sum(44 + len(info.node) + len(info.uds) + len(info.host) for info in reply.workers)
            self.map_bytes = 40 + texts + len(reply.owners) + 4 * len(reply.previous) + len(reply.since)
        return reply


def _is_client(process: Process) -> bool:
    return process.name.startswith("client")


def _take_both(process: Process, link: int, epochs: Epochs, answer: Any, reply: MapReply, status: int) -> None:
    if process.on_epochs(link, epochs):
        answer(reply, status)


#: Decoded maps, by identity of the message: a thousand servers take the same message.
_DECODED: list[tuple[MapReply, ShardMap]] = []


def decoded(msg: MapReply) -> ShardMap:
    """Return a message's ShardMap, shared by all that take the message."""
    for known, shard_map in _DECODED:
        if known is msg:
            return shard_map
    shard_map = ShardMap(msg)
    _DECODED.append((msg, shard_map))
    del _DECODED[:-8]
    return shard_map

"""A manager: ``cluster.py`` with a loop, a disk and subscribers, as ``manager.py`` drives it.

Restated here: what is collected before it is stored and pushed, the epochs that the file reserves, who is told what
when. A crash loses everything that is not on the disk; a lost disk, that too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from ..cluster import EPOCHS_RESERVED, Action, Answer, Cluster, MapChanged, NodeChanged, NodeState, Timing
from ..messages import Heartbeat, Join, Leave, MapGet, MapOffer, MapReply, Moved, Status
from ..shardmap import ShardMap
from .net import Net, Process

SETTLE_S: Final = 0.02
TICK_S: Final = 0.25


class ManagerHost:
    """See the module's docstring. ``links``: who has a connection, by process."""

    HOST: Final = "manager"

    def __init__(self, net: Net, timing: Timing) -> None:
        self.net = net
        self.timing = timing
        self.process = Process(net, self.HOST, "manager")
        self.disk: dict[str, Any] | None = None
        self.cluster = Cluster(1, 0.0, timing)
        #: Its clock is not the simulation's: it may jump.
        self.skew = 0.0
        self.reserved = 0
        #: Open connections by number: whose, of which life, and what is called there when it breaks.
        self.links: dict[int, tuple[Process, int, Any]] = {}
        self.subscribers: set[int] = set()
        self.waiting: list[tuple[int, Any]] = []
        self._numbers = 0
        self.settling = self.unsaved = False
        self.told = 0
        #: Changes of owner in earlier lives.
        self.moves = 0
        self.messages = 0
        self.client_messages = 0
        #: Called with a node's name and its new state.
        self.on_turn: Any = lambda _name, _state: None
        self.epochs: list[int] = []
        self.newest: MapReply | None = None
        self.map_bytes = 0
        #: (name, from, to) with the time, for the report.
        self.turns: list[tuple[float, str, NodeState]] = []
        #: What was on the disk before, oldest first: somebody may restore it.
        self.backups: deque[dict[str, Any]] = deque(maxlen=20)

    # -- its life -----------------------------------------------------------------------------

    def start(self) -> None:
        """From what the disk has."""
        self.process.start()
        self.moves += self.cluster.moves
        self.links.clear()
        self.subscribers.clear()
        self.waiting.clear()
        self.settling = False
        self.unsaved = True
        if self.disk is None:
            self.cluster = Cluster(self.net.random.getrandbits(63) | 1, self._clock(), self.timing)
            self.reserved = 0
        else:
            reserved = int(self.disk["epochs_reserved"])
            self.cluster = Cluster.from_state(self.disk["cluster"], self._clock(), self.timing, reserved)
            self.reserved = reserved
        self.told = self.cluster.epoch
        self.net.say(f"manager starts, {self.cluster!r}")
        self._tick()

    def crash(self, *, lose_disk: bool = False, old_disk: bool = False) -> None:
        """kill -9: the kernel closes its connections. ``old_disk``: somebody restores an old state file."""
        about = " and its disk is lost" if lose_disk else " and an old state file is restored" if old_disk else ""
        self.net.say(f"manager dies{about}")
        self.process.die()
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

    def _tick(self) -> None:
        self._apply(self.cluster.tick(self._clock()))
        self._tell()
        self.process.later(TICK_S, self._tick)

    # -- messages ---------------------------------------------------------------------------------

    def connect(self, process: Process, closed: Any) -> int:
        """A connection from a process, by its number; ``closed`` is called there when it breaks. 0: nobody listens."""
        reaches = self.net.reaches
        if not (self.process.running and reaches(process.host, self.HOST) and reaches(self.HOST, process.host)):
            return 0
        self._numbers += 1
        self.links[self._numbers] = (process, process.life, closed)
        return self._numbers

    def closed(self, link: int, name: str = "", instance: int = 0) -> None:
        """The other side has gone, or has closed it."""
        self.links.pop(link, None)
        self.subscribers.discard(link)
        if name:
            self._apply(self.cluster.link_lost(self._clock(), name, instance))

    def request(self, link: int, msg: Any, answer: Any) -> None:
        """A request; ``answer(message, status)`` is called at the other side."""
        now = self._clock()
        if link not in self.links:
            return
        self._count(self.links[link][0])
        if isinstance(msg, Heartbeat):
            self._reply(link, self.cluster.heartbeat(now, msg.name, msg.instance, msg.epoch, msg.loads), answer)
        elif isinstance(msg, Join):
            self._reply(link, self.cluster.join(now, msg), answer)
        elif isinstance(msg, Leave):
            self._reply(link, self.cluster.leave(now, msg.name, msg.instance, bool(msg.warm)), answer)
        elif isinstance(msg, Moved):
            self._reply(link, self.cluster.moved(now, msg), answer)
        elif isinstance(msg, MapOffer):
            self._reply(link, self.cluster.offer(now, msg), answer)
        elif isinstance(msg, MapGet):
            self.subscribers.add(link)
            self.cluster.noticed(now, msg.known_epoch)
            self.waiting.append((link, answer))
            self._tell()
        else:
            raise TypeError(type(msg).__name__)

    def _count(self, process: Process) -> None:
        self.messages += 1
        self.client_messages += process.name.startswith("client")

    def drain(self, name: str, on: bool) -> None:
        """An operator's wish."""
        if self.process.running and not self.process.paused:
            self._apply(self.cluster.drain(self._clock(), name, on))

    def _reply(self, link: int, actions: Sequence[Action], answer: Any) -> None:
        said = actions[0]
        assert isinstance(said, Answer)
        self._apply(actions)
        if self.cluster.epoch >= self.reserved:
            self.unsaved = True
            self.save()
        self._answer(link, answer, said.message, said.status)

    def _answer(self, link: int, answer: Any, message: Any, status: Status) -> None:
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
            else:
                continue
            self.unsaved = True
            if not self.settling:
                self.settling = True
                self.process.later(SETTLE_S, self._settled)

    def _settled(self) -> None:
        self.settling = False
        self.save()
        if not self.cluster.rebuilding:
            self._tell()
            self._push()

    def save(self) -> None:
        """To the disk."""
        if self.unsaved:
            self.reserved = self.cluster.epoch + EPOCHS_RESERVED
            if self.disk is not None:
                self.backups.append(self.disk)
            self.disk = {"cluster": self.cluster.to_state(), "epochs_reserved": self.reserved}
            self.unsaved = False

    def _tell(self) -> None:
        if not self.waiting or self.cluster.rebuilding or self.settling:
            return
        reply = self._map()
        waiting, self.waiting = self.waiting, []
        for link, answer in waiting:
            self._answer(link, answer, reply, Status.OK)

    def _push(self) -> None:
        reply = self._map()
        if reply.epoch == self.told:
            return
        self.told = reply.epoch
        for link in sorted(self.subscribers):
            self._answer(link, self.links[link][0].on_push, reply, Status.OK)

    def _map(self) -> MapReply:
        """The current map, noted for who checks."""
        reply = self.cluster.map_reply()
        if reply is not self.newest:
            self.newest = reply
            self.epochs.append(reply.epoch)
            # What it takes on the wire: workers, owners, previous owners, epochs.
            texts = sum(44 + len(info.node) + len(info.uds) + len(info.host) for info in reply.workers)
            self.map_bytes = 40 + texts + len(reply.owners) + 4 * len(reply.previous) + len(reply.since)
        return reply


#: Decoded maps, by identity of the message: a thousand servers take the same one.
_DECODED: list[tuple[MapReply, ShardMap]] = []


def decoded(msg: MapReply) -> ShardMap:
    """A message's ShardMap; they are immutable, so all may have the same."""
    for known, shard_map in _DECODED:
        if known is msg:
            return shard_map
    shard_map = ShardMap(msg)
    _DECODED.append((msg, shard_map))
    del _DECODED[:-8]
    return shard_map

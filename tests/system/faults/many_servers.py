"""Very many data servers without arenas, in one process: ``python -m tests.system.faults.many_servers '{...}'``.

Each has the session of a real one with the manager (``simm/server/membership.py``), and a worker that copies at once
what moves in. Killing this process is the death of all its servers, and stopping it their silence.

Commands come on stdin, one a line: each is answered by ``state``'s line of JSON. ``leave`` lets all of them say
goodbye, ``deaf`` lets them hear no more that they must join.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from simm.cluster.assignment import Member
from simm.cluster.shard_map import ShardMap
from simm.net.loop import Loop
from simm.net.peer import Peer
from simm.net.process import raise_file_limit
from simm.rpc import OPCODES, Frame, decode
from simm.server import membership
from simm.server.membership import Callback, Membership
from simm.wire import messages as M
from simm.wire.epoch_messages import LeaseAck, NamespaceEpoch
from simm.wire.identity import instance_of, new_secret
from simm.wire.messages import MapReply, Status, WorkerInfo
from tests.support.seen_maps import SeenMaps

CAPACITY = 1 << 30
SIGNS_OF_LIFE = (M.Joined, LeaseAck, M.HeartbeatAck)
_MAP = OPCODES[M.MapReply]


class SharedMaps:
    """Each map is decoded once for all servers of this process. Elsewhere every server has a processor for that."""

    def __init__(self) -> None:
        self._known: dict[bytes, MapReply] = {}
        self._taken: tuple[MapReply, ShardMap] | None = None

    def decode(self, frame: Frame) -> Any:
        """Return the message in a frame."""
        if frame.opcode != _MAP:
            return decode(frame)
        reply: MapReply | None = self._known.get(frame.body)
        if reply is None:
            if len(self._known) > 3:
                self._known.clear()
            reply = self._known[frame.body] = decode(frame)
        return reply

    def shard_map(self, reply: MapReply) -> ShardMap:
        """Return the map in a message, of which nobody changes anything."""
        if self._taken is None or self._taken[0] is not reply:
            self._taken = reply, ShardMap(reply)
        return self._taken[1]


class Session(Membership):
    """A data server's session that counts what it says and hears."""

    def __init__(self, house: House, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.house = house
        #: It does not hear that it must join.
        self.deaf = False
        #: When the newest request left that the manager has counted as a sign of life.
        self.alive_at = -math.inf

    def request(self, msg: Any, callback: Callback) -> None:
        if self.peer is not None:
            self.house.sent[type(msg).__name__] += 1
        sent = time.monotonic()

        def answered(reply: Any, status: int) -> None:
            self.house.answered[type(msg).__name__] += 1
            self.house.heard[type(reply).__name__ if status == Status.OK else M.status_name(status)] += 1
            if isinstance(reply, SIGNS_OF_LIFE):
                self.alive_at = sent
            elif status == Status.UNKNOWN_NODE:
                self.house.silences.append(time.monotonic() - self.alive_at)
            if not (self.deaf and status == Status.UNKNOWN_NODE):
                callback(reply, status)

        super().request(msg, answered)

    def on_frame(self, peer: Peer, frame: Frame) -> None:
        if frame.opcode == _MAP:
            self.house.maps.see(frame)
        super().on_frame(peer, frame)


class Server:
    """One data server: what its session asks of it."""

    def __init__(self, house: House, name: str) -> None:
        secret = new_secret()
        instance = instance_of(name, secret)
        self.house = house
        self.info = WorkerInfo(0, 0, 1, instance, CAPACITY, name, "", "127.0.0.1", 1)
        self.member = Member(name, instance, [0])
        self.session = Session(house, house.loop, self.member, self, [house.manager], secret=secret)
        self.session.start()

    def infos(self) -> list[WorkerInfo] | None:
        """Its worker, which is always up."""
        return [self.info]

    def loads(self) -> list[M.WorkerLoad]:
        """Of an empty arena."""
        return [M.WorkerLoad(0, 0, 0, 0)]

    def moved(self) -> list[M.Moved]:
        """Whatever moves in has been copied."""
        order = self.member.order(0)
        if not order.since:
            return []
        moved = self.member.moved(0, order.since)
        return [moved] if moved is not None else []

    def taken(self) -> int:
        """All maps are taken at once."""
        return self.member.epoch

    def stored(self) -> int:
        """What comes with them is stored with them."""
        return self.member.epoch

    def frozen(self) -> int:
        """No shard is."""
        return 0

    def epochs(self, cluster: int) -> list[NamespaceEpoch]:
        """No namespace has one."""
        return []

    def on_lease(self) -> None:
        """Nothing is read here."""

    def on_map(self) -> None:
        """Tell the manager."""
        if not self.member.fenced:
            self.session.report()
            self.session.acknowledge()

    def on_abandoned(self) -> None:
        """It has no values to drop."""

    def give_up(self, why: str) -> None:
        """Note it: no server of these tests should."""
        self.house.gave_up.append(f"{self.member.name}: {why}")

    def resolve(self, host: str, callback: Callable[[str], None]) -> None:
        """Addresses are numeric here."""
        raise NotImplementedError

    def state(self) -> list[Any]:
        """What the test asks about."""
        member = self.member
        return [member.epoch, self.session.joined, member.fenced, member.owned(0)]


class House:
    """All servers of this process, on one loop."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.loop = Loop()
        self.manager = (settings["host"], settings["port"])
        #: Requests, those that were answered, and what the answers were.
        self.sent: Counter[str] = Counter()
        self.answered: Counter[str] = Counter()
        self.heard: Counter[str] = Counter()
        self.gave_up: list[str] = []
        #: How long a server had been silent at most, by its own clock, when it heard that it was taken for dead:
        #: seconds. The request that was refused may have waited for a manager, or for this process.
        self.silences: list[float] = []
        self.maps = SeenMaps()
        shared = SharedMaps()
        vars(membership).update(decode=shared.decode, ShardMap=shared.shard_map)
        self.servers = [Server(self, name) for name in settings["names"]]
        self._unread = b""
        self.loop.watch(0, self._hear)

    def _hear(self, _mask: int) -> None:
        data = os.read(0, 1 << 16)
        if not data:
            self.loop.stop()
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            if line == b"leave":
                for server in self.servers:
                    server.session.leave(warm=False)
            elif line == b"deaf":
                for server in self.servers:
                    server.session.deaf = True
            print(json.dumps(self.state()), flush=True)

    def state(self) -> dict[str, Any]:
        """What the test asks about."""
        return {
            "servers": {server.member.name: server.state() for server in self.servers},
            "unanswered": self.sent - self.answered, "heard": self.heard, "gave_up": self.gave_up,
            "silences": self.silences,
            "maps": self.maps.sums, "faults": self.maps.faults,
        }  # fmt: skip


def main() -> int:
    """See the module."""
    raise_file_limit()
    House(json.loads(sys.argv[1])).loop.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())

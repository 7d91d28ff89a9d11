"""What the tests of absent servers share."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simm.arena.shard_words import ShardWords
from simm.cluster.assignment import Member
from simm.cluster.machine import Cluster
from simm.cluster.nodes import Node, NodeState
from simm.constants import SHARD_COUNT
from simm.wire.messages import Join, Status, WorkerInfo
from tests.support.machine import (
    GIB,
    answer,
    join,
)

Table = NDArray[np.int64]


def sinces(cluster: Cluster) -> list[int]:
    return [cluster.since(shard) for shard in range(SHARD_COUNT)]


def beat(cluster: Cluster, now: float, *names: str) -> None:
    for name in names:
        assert answer(cluster.heartbeat(now, name, 1, cluster.epoch))[0] == Status.OK


def node_of(name: str, workers: int) -> Node:
    infos = [WorkerInfo(number, 0, 1, 1, GIB, name, "", "h", 1) for number in range(workers)]
    return Node(name, 1, infos, NodeState.RUNNING, 0.0)


class Arena:
    """What lies in a worker's segment: shard words, and for each shard the number of the last value, 0 for none."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.words = memoryview(bytearray(8 * SHARD_COUNT)).cast("Q")
        self.values: Table = np.zeros(SHARD_COUNT, np.int64)
        self.epoch = 0
        #: Shards that another was named the owner of since this one got them.
        self.displaced = np.zeros(SHARD_COUNT, bool)

    def array(self) -> NDArray[np.uint64]:
        return np.frombuffer(self.words, np.uint64)


class Host:
    """A data server under one name. ``state``: up, cut (from the manager only), paused, down, or stopped warm."""

    def __init__(self, name: str, workers: int) -> None:
        self.name = name
        self.count = workers
        self.state = "down"
        self.instance = 0
        self.arenas: list[Arena] = []
        self.words: list[ShardWords] = []
        self.member = Member(name, 0, range(workers))
        self.joined = self.was_joined = self.warm = False

    @property
    def known_epoch(self) -> int:
        return max([self.member.epoch, *(arena.epoch for arena in self.arenas)])


def joining(host: Host, warm: bool, infos: list[WorkerInfo]) -> Join:
    return join(host.name, host.instance)._replace(workers=infos, warm=int(warm), epoch=host.known_epoch)

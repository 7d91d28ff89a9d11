"""What tests of ``simm/cluster/machine.py`` share: servers that join and hear of maps, and what the machine answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from simm.cluster.machine import Cluster
from simm.cluster.nodes import Action, Answer, MapChanged, Timing
from simm.cluster.placement import NO_SHARDS
from simm.constants import SHARD_COUNT
from simm.wire.messages import (
    Done,
    Join,
    Joined,
    MapOffer,
    MapReply,
    Moved,
    Status,
    WorkerInfo,
)
from simm.wire.shard_set import bitmap_of

GIB = 1 << 30
SEEDS = range(4)
DEFAULT = Timing()
ALL = Timing(moves_at_once=SHARD_COUNT)


class _Attentive(Cluster):
    """One whose servers all hear of each map at once, so that no shard waits for that."""

    def _remap(self, actions: list[Action], *, changed: bool = False, renewed: Any = NO_SHARDS) -> None:
        for node in self.nodes.values():
            node.acked_epoch = self.epoch
        super()._remap(actions, changed=changed, renewed=renewed)


def attentive(cluster: int, now: float, timing: Timing = DEFAULT) -> Cluster:
    return _Attentive(cluster, now, timing)


def attentive_again(
    state: Any, now: float, timing: Timing = DEFAULT, epoch: int = 0, drawn: int | None = None
) -> Cluster:  # fmt: skip
    return _Attentive.from_state(state, now, timing, epoch, drawn=drawn)


def join(name: str, instance: int, *capacities: int, warm: bool = False, epoch: int = 0) -> Join:
    workers = [
        WorkerInfo(number, 0, 1, 0, capacity, "", f"/run/{name}.{number}", "10.0.0.1", 4000 + number)
        for number, capacity in enumerate(capacities or (GIB,))
    ]
    return Join(instance, int(warm), name, workers, epoch)


def answer(actions: list[Action]) -> tuple[int, Any]:
    first = actions[0]
    assert isinstance(first, Answer)
    assert not any(isinstance(action, Answer) for action in actions[1:])
    return first.status, first.message


def map_epoch(actions: list[Action]) -> int | None:
    found = [action.epoch for action in actions if isinstance(action, MapChanged)]
    assert len(found) <= 1
    return found[0] if found else None


def states(cluster: Cluster) -> dict[str, str]:
    return {name: node.state.value for name, node in cluster.nodes.items()}


def owners(cluster: Cluster) -> list[tuple[str, int] | None]:
    return [cluster.owner(shard) for shard in range(SHARD_COUNT)]


def moving(cluster: Cluster) -> dict[int, tuple[tuple[str, int], tuple[str, int]]]:
    """Shard -> (previous owner, owner)."""
    found = {}
    for shard in range(SHARD_COUNT):
        previous, owner = cluster.previous(shard), cluster.owner(shard)
        if previous is not None:
            assert owner is not None
            found[shard] = (previous, owner)
    return found


def tell(cluster: Cluster, now: float, key: tuple[str, int], shards: Iterable[int], epoch: int = 0) -> int:
    """MOVED by a worker; how many were taken."""
    msg = Moved(cluster.nodes[key[0]].instance, epoch or cluster.epoch, key[0], key[1], bitmap_of(shards))
    status, message = answer(cluster.moved(now, msg))
    assert status == Status.OK and isinstance(message, Done)
    return message.items


def arrive(cluster: Cluster, now: float = 0.0) -> int:
    """All that is moving arrives, and what follows from that; in how many steps."""
    for step in range(100):
        by_owner: dict[tuple[str, int], list[int]] = {}
        for shard, (_, owner) in moving(cluster).items():
            by_owner.setdefault(owner, []).append(shard)
        if not by_owner:
            return step
        for owner, shards in by_owner.items():
            assert tell(cluster, now, owner, shards) == len(shards)
            cluster.check()
    raise AssertionError("it never ends")


def of(cluster: Cluster, name: str) -> set[int]:
    """The shards of a node's only worker."""
    return {shard for shard in range(SHARD_COUNT) if cluster.owner(shard) == (name, 0)}


def offer(reply: MapReply) -> MapOffer:
    return MapOffer(*reply)


def run(cluster: Cluster, start: float, end: float, each: Callable[[float], Any] = lambda now: None) -> list[Action]:
    """Tick four times a second."""
    actions: list[Action] = []
    steps = round((end - start) * 4)
    for step in range(1, steps + 1):
        now = start + step / 4
        each(now)
        actions += cluster.maintain(now)
    return actions


def veterans(now: float = 0.0) -> tuple[Cluster, MapReply, MapReply]:
    """A cluster with a history, and two maps of it: an older one, and the newest."""
    cluster = attentive(77, now, ALL)
    for name in ("a", "b", "c"):
        cluster.join(now, join(name, 1))
        arrive(cluster)
    older = cluster.map_reply()
    cluster.join(now, join("d", 1))
    return cluster, older, cluster.map_reply()


def rejoin(cluster: Cluster, now: float, name: str, epoch: int, instance: int = 1, warm: bool = False) -> Joined:
    status, message = answer(cluster.join(now, join(name, instance, epoch=epoch, warm=warm)))
    assert status == Status.OK and isinstance(message, Joined)
    cluster.check()
    return message

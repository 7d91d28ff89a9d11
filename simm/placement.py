"""Which worker has which shard: the tables of ``deal.py``, and what their numbers mean. No I/O, no clock.

Places in the tables are positions in a list of (node name, worker number), which grows with newcomers and shrinks when
nodes are forgotten. ``Cluster`` says who lives; this says what follows from it for the shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .clusterstate import Key, packed_since, places_bytes
from .constants import NO_OWNER
from .deal import Places, Standing, Tables, deal
from .errors import CorruptionError
from .members import Node
from .messages import MapReply, WorkerInfo
from .shardmap import ShardMap

Shards = NDArray[np.int64]
NOTHING: Final[Shards] = np.zeros(0, np.int64)


class Placement:
    """See the module's docstring."""

    def __init__(self) -> None:
        self.tables = Tables()
        #: What places mean, and the opposite.
        self.keys: list[Key] = []
        self.places: dict[Key, int] = {}
        #: Shards that have to move and do not yet: their number at once is limited.
        self.waiting = 0

    def name(self, keys: list[Key], tables: Tables | None = None) -> None:
        """Places mean these from now on, in ``tables`` if given."""
        self.keys = keys
        self.places = {key: place for place, key in enumerate(keys)}
        self.tables = tables or self.tables

    def adopt(self, offered: ShardMap, since: NDArray[np.uint64]) -> None:
        """Take all of somebody's map; every shard is at home."""
        tables = Tables()
        tables.owners = np.array(offered.owners, np.uint16)
        tables.homes = tables.owners.copy()
        tables.since = since.copy()
        for shard, place in offered.previous.items():
            tables.previous[shard] = place
        self.name([(info.node, info.worker) for info in offered.workers], tables)

    # -- questions -------------------------------------------------------------------------------

    @property
    def unowned(self) -> bool:
        """Nobody owns anything."""
        return bool((self.tables.owners == NO_OWNER).all())

    def key(self, place: Any) -> Key | None:
        """The worker of a place, or None for NO_OWNER."""
        return self.keys[place] if place != NO_OWNER else None

    def places_of(self, node: Node) -> list[int]:
        """The places of a node's workers."""
        keys = ((node.name, info.worker) for info in node.workers)
        return [self.places[key] for key in keys if key in self.places]

    def held(self, keys: Iterable[Key]) -> dict[Key, int]:
        """How many shards each of these workers owns."""
        counts = np.bincount(self.tables.owners, minlength=len(self.keys)).tolist()
        return {key: counts[self.places[key]] if key in self.places else 0 for key in keys}

    def reply(self, epoch: int, cluster: int, workers: Sequence[WorkerInfo]) -> MapReply:
        """The map, with places as positions in ``workers``. O(shards)."""
        table = np.full(NO_OWNER + 1, np.uint16(NO_OWNER))
        for at, info in enumerate(workers):
            place = self.places.get((info.node, info.worker))
            if place is not None:
                table[place] = at
        tables = self.tables
        moving = np.flatnonzero(tables.previous != NO_OWNER)
        previous = list(zip(moving.tolist(), table[tables.previous[moving]].tolist()))
        return MapReply(
            epoch, cluster, list(workers), places_bytes(table[tables.owners]), previous, packed_since(tables)
        )

    # -- changes ---------------------------------------------------------------------------------

    def replace(self, node: Node, epoch: int) -> Shards:
        """A node's instance is gone and its successor is here; the shards that begin anew with it.

        ``epoch``: the newest that its arenas have acted on; 0 if they are new. What it owns since a later one another
        arena has had, one that ended while nobody could tell us (found by the simulator).
        """
        places = self.places_of(node)
        mine = np.isin(self.tables.owners, places)
        self.tables.previous[mine | np.isin(self.tables.previous, places)] = NO_OWNER
        return np.flatnonzero(mine & (self.tables.since > np.uint64(epoch)))

    def arrived(self, key: Key, shards: Sequence[int], epoch: int) -> int:
        """A worker has all of these shards that it got up to ``epoch``; how many of them were moving."""
        tables, place = self.tables, self.places.get(key, NO_OWNER)
        asked = np.asarray(shards, np.int64)
        known = (tables.owners[asked] == place) & (tables.since[asked] <= np.uint64(epoch))
        done = asked[known & (tables.previous[asked] != NO_OWNER)]
        tables.previous[done] = NO_OWNER
        return len(done)

    def settle(self, nodes: Mapping[str, Node], limit: int, *, dealing: bool) -> tuple[bool, Shards]:
        """What follows from who lives: whether previous owners had to be forgotten, and which shards changed owner."""
        new = [key for key in _keys(node for node in nodes.values() if not node.released) if key not in self.places]
        if new:
            self.name(self.keys + new)
        weights, standing, heard = self._roles(nodes)
        lost = _below(standing, Standing.QUIET, self.tables.previous)
        self.tables.previous[lost] = NO_OWNER
        if not dealing:
            return bool(lost.any()), NOTHING
        dealt = deal(self.tables, weights, standing, limit, heard)
        self.waiting = dealt.waiting
        return bool(lost.any()), dealt.changed

    def compact(self, nodes: Mapping[str, Node]) -> None:
        """Drop places of workers that no node has any more."""
        members = set(_keys(nodes.values()))
        if not members >= self.places.keys():
            keep = [key for key in self.keys if key in members]
            position = {key: at for at, key in enumerate(keep)}
            self.tables.renumber([position.get(key, NO_OWNER) for key in self.keys])
            self.name(keep)

    def _roles(self, nodes: Mapping[str, Node]) -> tuple[list[int], list[Standing], list[int]]:
        """Of each place the weight, the standing, and the newest map it holds."""
        heard = [0] * len(self.keys)
        weights, spare = [0] * len(self.keys), [0] * len(self.keys)
        standing = [Standing.GONE] * len(self.keys)
        for node in nodes.values():
            if node.released:
                continue
            role = Standing.KEPT if not node.serving else Standing.READY if node.ready else Standing.QUIET
            for info in node.workers:
                place = self.places.get((node.name, info.worker))
                if place is not None:
                    standing[place] = role
                    heard[place] = node.map_epoch
                    if role is not Standing.KEPT:
                        (spare if node.draining else weights)[place] = info.capacity
        # With nobody else left those that should be empty must do.
        return (weights if any(weights) else spare), standing, heard

    def check(self, nodes: Mapping[str, Node], epoch: int, limit: int | None, *, dealing: bool) -> None:
        """Raise CorruptionError unless the tables fit the nodes. O(shards + workers).

        ``limit``: of moves at once, when no step may be due; None: some may. Not ``dealing``: owners may be gone.
        """

        def must(fact: bool, text: str) -> None:
            if not fact:
                raise CorruptionError(f"placement: {text}")

        must(self.places == {key: place for place, key in enumerate(self.keys)}, "a worker with two places")
        must(len(self.places) == len(self.keys), "two workers with one place")
        live = set(_keys(node for node in nodes.values() if not node.released))
        must(live <= self.places.keys() <= set(_keys(nodes.values())), "places do not match the members")
        tables = self.tables
        tables.check(len(self.keys))
        must(bool((tables.since <= epoch).all()), "a shard has an owner since an epoch to come")
        weights, standing, heard = self._roles(nodes)
        for held, least, text in (
            (tables.owners, Standing.KEPT, "has an owner that is gone"),
            (tables.previous, Standing.QUIET, "has a previous owner that does not serve"),
        ):
            bad = _below(standing, least, held)
            must(not bad.any() or (least is Standing.KEPT and not dealing), f"shard {int(bad.argmax())} {text}")
        if limit is not None:
            unowned = int((tables.owners == NO_OWNER).sum())
            must(not any(weights) or unowned <= self.waiting, "a shard has no owner, and waits for nobody")
            dealt = deal(tables.copy(), weights, standing, limit, heard)
            must(not len(dealt.changed), f"{len(dealt.changed)} shards should have moved")
            must(dealt.waiting == self.waiting, f"{dealt.waiting} shards wait, not {self.waiting}")


def _keys(nodes: Iterable[Node]) -> Iterable[Key]:
    return ((node.name, info.worker) for node in nodes for info in node.workers)


def _below(standing: Sequence[Standing], least: Standing, places: Places) -> NDArray[np.bool_]:
    """Shards whose place stands lower; NO_OWNER does not."""
    below = np.append(np.asarray(standing, np.uint8) < least, False)
    found: NDArray[np.bool_] = below[np.minimum(places, len(standing))]
    return found

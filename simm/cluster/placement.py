"""Decide which worker owns which shard, and which shards move now. No I/O, no clock.

:func:`rebalance` works on tables of worker indexes; :class:`Placement` knows which worker an index means and calls it
with what the state machine (``cluster/machine.py``) knows of the nodes.

What can go wrong, and what we chose
------------------------------------
* *Too many moves.* :func:`target_counts` gives each worker the floor or the ceiling of its share, whichever moves less,
  and a shard moves only from a worker that has too many to one that has too few. So a change takes the fewest moves
  possible, in however many steps.
* *Too many moves at once.* A shard that leaves a living worker brings its values along, and copying them costs both
  sides bandwidth. At most ``limit`` shards move into one worker at a time. A shard without a living owner has no values
  to bring: it is assigned at once.
* *A moving shard is moved again*, and its values are lost track of. So a shard with a previous owner stays where it is
  until it has arrived, or until its new owner is dead.
* *No worker can take the shards of an overdue one.* They stay its own, with the same ``since``, which it finds when it
  returns (``cluster/absence.py``). They go only to active workers: a suspect one may be dead as well.
* *A worker returns* and should find its shards, as its arena may still hold their values. Each shard remembers its
  *preferred owner*, the last worker that got it by plan and not by another one's death. A shard that is elsewhere is
  *displaced*. Unowned shards, and shards that must move anyway, go to their preferred owner first; a worker that must
  give shards away gives displaced ones first.
* *A suspect worker* may be dead in a second. It keeps its shards and its share, but no shard moves from it or to it.
* *A worker missed a map.* It may hold values of a shard from before another worker's ownership period, and would serve
  them to readers with the newest map. So a shard is assigned only to a worker, and moved with its values only from one,
  that has acknowledged a map at least as new as the shard's last change of owner: its shard word is then that of its
  own ownership period, or 0. A shard that has just changed owner waits for the next heartbeat, as does one that this
  very call has assigned: its new owner's values may be older than those of the dead one.
* *Every worker below its target is ineligible for an unowned shard.* Then an eligible worker gets it, even above its
  target. Waiting for an ineligible one (for example, one stopped by SIGSTOP) could leave the shard without an owner
  indefinitely, and puts to it would fail.

Each call takes the whole step that is due: calling again changes nothing (``Cluster.check`` relies on it).
O(shards + workers log workers).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..constants import NO_OWNER, SHARD_COUNT
from ..errors import CorruptionError
from ..wire.messages import MapReply, WorkerInfo
from .nodes import Key, Node
from .shard_map import NONE, ShardMap, Tables, WorkerIndexes, index_bytes, packed_since

Shards = NDArray[np.int64]
NO_SHARDS: Final[Shards] = np.zeros(0, np.int64)


class Eligibility(IntEnum):
    """Which shards a worker keeps, gets and gives."""

    #: Its shards are assigned to others at once, without their values; with no others they have no owner.
    DEAD = 0
    #: Its shards are assigned to active workers, without their values. Without any they stay its own.
    OVERDUE = 1
    #: It will be back: its shards wait for it, and it gets no others.
    RESERVED = 2
    #: It has its share but misses heartbeats: no shard moves from it or to it.
    SUSPECT = 3
    #: It gets shards and gives them.
    ACTIVE = 4


class Rebalanced(NamedTuple):
    """The shards that changed owner, ascending, and what is left to do.

    ``waiting``: how many shards still have to move or to find an owner; ``stuck``: those of them that no worker may
    have yet. ``lacking``: the workers that are to get some.
    """

    changed: Shards
    waiting: int
    stuck: int = 0
    lacking: frozenset[int] = frozenset()


def target_counts(weights: Sequence[int], held: Sequence[int], shards: int = SHARD_COUNT) -> list[int]:
    """Return how many shards each worker should own: the floor or the ceiling of its share by weight.

    The ceilings are given so that the fewest shards move: first to workers that hold more than their floor, then by
    the largest remainder (Hamilton's method), then by index. All 0 if all weights are. O(n log n).
    """
    total = sum(weights)
    if not total:
        return [0] * len(weights)
    numbers = [shards * weight // total for weight in weights]
    rest = shards - sum(numbers)
    # Only a share that is not a whole number may be rounded up.
    candidates = [at for at, weight in enumerate(weights) if shards * weight % total]
    candidates.sort(key=lambda at: (held[at] <= numbers[at], -(shards * weights[at] % total), at))
    for at in candidates[:rest]:
        numbers[at] += 1
    return numbers


def rebalance(
    tables: Tables, weights: Sequence[int], eligibility: Sequence[Eligibility], limit: int,
    acked: Sequence[int] | None = None,
) -> Rebalanced:  # fmt: skip
    """Take the step that is due, in place: change owners, preferred owners and previous owners, but not ``since``.

    A worker that is RESERVED keeps its shards; the others share the rest. A shard whose owner is DEAD or OVERDUE, or
    that has none, goes to a worker below its target: its previous owner, else its preferred owner, else any. While all
    weights are 0 it goes to none. A shard that leaves a SUSPECT or ACTIVE worker gets it as its previous owner.

    Args:
        weights: of each worker; 0 for one that must own nothing. Those DEAD, OVERDUE and RESERVED must have 0.
        eligibility: of each worker.
        limit: shards that may move into one worker at a time, those already moving included.
        acked: epoch of the newest map that each worker has acknowledged; None if all have the newest.
    """
    count = len(weights)
    known = [1 << 62] * count if acked is None else list(acked)
    owners, preferred, previous = tables.owners, tables.preferred, tables.previous
    before = owners.copy()
    states = np.append(np.asarray(eligibility, np.uint8), np.uint8(Eligibility.DEAD))

    def shares() -> tuple[list[int], list[int]]:
        state = states[np.minimum(owners, count)]
        held = np.bincount(owners[state >= Eligibility.SUSPECT], minlength=count).tolist()
        targets = target_counts(weights, held, len(owners) - int((state == Eligibility.RESERVED).sum()))
        differences = [target - have for target, have in zip(targets, held)]
        return [max(0, more) for more in differences], [max(0, -more) for more in differences]

    lacking, surplus = shares()
    state = states[np.minimum(owners, count)]
    unowned, late = np.flatnonzero(state == Eligibility.DEAD), np.flatnonzero(state == Eligibility.OVERDUE)
    active = [each is Eligibility.ACTIVE for each in eligibility]
    left = unowned[:0]
    if len(unowned):
        left = _assign_unowned(tables, unowned, lacking, known)
        owners[left], previous[unowned] = NONE, NONE
    if len(left) and any(weights):
        left = _assign_above_targets(tables, left, [index for index, weight in enumerate(weights) if weight], known)
        lacking, surplus = shares()
    if len(late):
        late = _assign_overdue(tables, late, lambda: shares()[0], weights, active, known)
        lacking, surplus = shares()
    moves = 0
    into = np.bincount(owners[previous != NONE], minlength=count).tolist()
    quota = [min(lack, max(0, limit - has)) if able else 0 for lack, has, able in zip(lacking, into, active)]
    spare = [more if able else 0 for more, able in zip(surplus, active)]
    if any(quota) and any(spare):
        moves = _move(tables, quota, spare, known, owners == before)
    preferred[preferred == NONE] = owners[preferred == NONE]
    stuck = len(left) + len(late) if any(weights) else 0
    takers = frozenset(index for index, lack in enumerate(shares()[0]) if lack)
    return Rebalanced(np.flatnonzero(owners != before), sum(surplus) - moves + stuck, stuck, takers)


def _assign_unowned(tables: Tables, unowned: Shards, lacking: list[int], acked: list[int]) -> Shards:
    """Assign shards to eligible workers below their targets; count ``lacking`` down. Return the rest."""
    # Who may have a shard by the last map that it has acknowledged, and lacks some. Nobody comes to lack one here.
    since = tables.since[unowned]
    lacks, acks = np.array([*lacking, 0], np.int64) > 0, np.array([*acked, 0], np.uint64)
    able = np.zeros(len(unowned), np.bool_)
    for wanted in (tables.previous, tables.preferred):
        indexes = np.minimum(wanted[unowned], len(lacking))
        able |= lacks[indexes] & (acks[indexes] >= since)
    for at in np.flatnonzero(able).tolist():
        shard = int(unowned[at])
        for index in (int(tables.previous[shard]), int(tables.preferred[shard])):
            if index != NO_OWNER and lacking[index] and acked[index] >= since[at]:
                lacking[index] -= 1
                _assign(tables, shard, index)
                break
        else:
            able[at] = False
    left = unowned[~able]
    # First the workers that are eligible for the fewest.
    for index in sorted((at for at, lack in enumerate(lacking) if lack), key=lambda at: (acked[at], at)):
        if len(left):
            taken = left[tables.since[left] <= np.uint64(acked[index])][: lacking[index]]
            _assign(tables, taken, index)
            lacking[index] -= len(taken)
            left = np.setdiff1d(left, taken, assume_unique=True)
    return left


def _assign_above_targets(tables: Tables, unowned: Shards, workers: Sequence[int], acked: list[int]) -> Shards:
    """Spread shards evenly over those of ``workers`` that are eligible, whatever their targets. Return the rest."""
    rest = unowned
    for since in np.unique(tables.since[unowned]).tolist():
        eligible = [index for index in workers if acked[index] >= since]
        if eligible:
            shards = unowned[tables.since[unowned] == np.uint64(since)]
            _assign(tables, shards, np.resize(np.asarray(eligible, np.uint16), len(shards)))
            rest = np.setdiff1d(rest, shards, assume_unique=True)
    return rest


def _assign_overdue(
    tables: Tables, late: Shards, lacking: Callable[[], list[int]], weights: Sequence[int], active: Sequence[bool],
    acked: list[int],
) -> Shards:  # fmt: skip
    """Assign shards of OVERDUE workers to ACTIVE ones. Return those that stay.

    A part stays for SUSPECT workers below their targets: these are dead in a moment, or active and get it then.
    """
    able = [index for index, weight in enumerate(weights) if weight and active[index]]
    before = -1
    while len(late) != before:  # one shard more in the total may change a target by one
        before = len(late)
        lack = lacking()
        late = _assign_unowned(tables, late, [each if active[at] else 0 for at, each in enumerate(lack)], acked)
        others = sum(each for index, each in enumerate(lack) if not active[index])
        late = np.concatenate((late[:others], _assign_above_targets(tables, late[others:], able, acked)))
    return late


def _assign(tables: Tables, shards: int | Shards, indexes: int | WorkerIndexes) -> None:
    """Give shards other owners, without values of any previous owner."""
    tables.owners[shards] = indexes
    tables.previous[shards] = NONE


def _move(
    tables: Tables, quota: list[int], spare: list[int], acked: list[int], settled: NDArray[np.bool_]
) -> int:  # fmt: skip
    """Move shards from workers with some to ``spare`` to workers with a ``quota``; count both down. Return how many.

    ``settled``: shards whose owner this call has not changed yet.
    """
    owners, preferred, previous = tables.owners, tables.preferred, tables.previous
    indexes = np.minimum(owners, len(spare))
    able = np.append(np.asarray(spare, np.int64), 0)[indexes] > 0
    able &= settled & (np.append(np.asarray(acked, np.uint64), np.uint64(0))[indexes] >= tables.since)
    takers = [index for index, room in enumerate(quota) if room]
    #: The first of them that may have shards since an epoch; it is that until its quota is used up.
    first: dict[int, int] = {}
    moves = 0

    def move(shard: int, owner: int, to: int) -> None:
        nonlocal moves
        spare[owner] -= 1
        quota[to] -= 1
        if not quota[to]:
            takers.remove(to)
        owners[shard] = to
        previous[shard] = owner
        moves += 1

    displaced, others = [], []
    for shard in np.flatnonzero(able & (previous == NONE)).tolist():
        owner, wanted = int(owners[shard]), int(preferred[shard])
        if wanted == owner:
            others.append(shard)
        elif spare[owner] and wanted != NO_OWNER and quota[wanted] and acked[wanted] >= tables.since[shard]:
            move(shard, owner, wanted)
        else:
            displaced.append(shard)
    for shard in chain(displaced, others):
        owner = int(owners[shard])
        if not takers:
            break
        if not spare[owner]:
            continue
        since = int(tables.since[shard])
        to = first.get(since, -1)
        if to < 0 or (to != NO_OWNER and not quota[to]):
            to = first[since] = next((index for index in takers if acked[index] >= since), NO_OWNER)
        if to == NO_OWNER:
            continue
        if preferred[shard] == owner:
            preferred[shard] = to  # it leaves by plan
        move(shard, owner, to)
    return moves


class Placement:
    """The shard tables and the workers that their indexes mean.

    An index is a position in :attr:`keys`, which grows with new workers and shrinks when nodes are forgotten.
    """

    def __init__(self) -> None:
        self.tables = Tables()
        #: (node name, worker number) of each index, and the opposite.
        self.keys: list[Key] = []
        self.indexes: dict[Key, int] = {}
        #: What the last rebalance has left to do.
        self._left = Rebalanced(NO_SHARDS, 0)

    def set_keys(self, keys: list[Key], tables: Tables | None = None) -> None:
        """Let indexes mean ``keys`` from now on, in ``tables`` if given."""
        self.keys = keys
        self.indexes = {key: index for index, key in enumerate(keys)}
        self.tables = tables or self.tables
        self._left = self._left._replace(stuck=max(1, self._left.stuck))  # ``lacking`` has old indexes

    def take_map(self, offered: ShardMap, since: NDArray[np.uint64]) -> None:
        """Take over a server's map; each owner is the preferred one."""
        tables = Tables()
        tables.owners = np.array(offered.owners, np.uint16)
        tables.preferred = tables.owners.copy()
        tables.since = since.copy()
        for shard, index in offered.previous.items():
            tables.previous[shard] = index
        self.set_keys([(info.node, info.worker) for info in offered.workers], tables)

    # -- questions -------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Shards that still have to move, or to find an owner."""
        return self._left.waiting

    def awaits(self, node: Node, before: int) -> bool:
        """Return True if a step may be due as a node has acknowledged a map. O(shards), by numpy.

        ``before``: what it had acknowledged until then. Only shards that have changed owner since that map can move
        now: from this node, or to it if it lacks some. In a large cluster every node acknowledges each of the many maps
        of a move, and a rebalance takes milliseconds.
        """
        if not self.waiting or node.acked_epoch <= before:
            return False
        since = self.tables.since
        fresh = (since > np.uint64(before)) & (since <= np.uint64(node.acked_epoch))
        if self._left.stuck:
            return bool(fresh.any())
        owners = self.tables.owners[fresh & (self.tables.previous == NO_OWNER)]
        mine = self.indexes_of(node)
        return bool(len(owners)) and (not self._left.lacking.isdisjoint(mine) or bool(np.isin(owners, mine).any()))

    @property
    def unowned(self) -> bool:
        """No shard has an owner."""
        return bool((self.tables.owners == NO_OWNER).all())

    def key(self, index: Any) -> Key | None:
        """Return the worker of an index, or None for NO_OWNER."""
        return self.keys[index] if index != NO_OWNER else None

    def indexes_of(self, node: Node) -> list[int]:
        """Return the indexes of a node's workers."""
        keys = ((node.name, info.worker) for info in node.workers)
        return [self.indexes[key] for key in keys if key in self.indexes]

    def receives(self, node: Node) -> bool:
        """Return True if a shard moves to a node. O(shards)."""
        moving = self.tables.owners[self.tables.previous != NO_OWNER]
        return bool(len(moving)) and bool(np.isin(moving, self.indexes_of(node)).any())

    def held(self, keys: Iterable[Key]) -> dict[Key, int]:
        """Return the number of shards that each of these workers owns."""
        counts = np.bincount(self.tables.owners, minlength=len(self.keys)).tolist()
        return {key: counts[self.indexes[key]] if key in self.indexes else 0 for key in keys}

    def reply(self, epoch: int, cluster: int, workers: Sequence[WorkerInfo]) -> MapReply:
        """Return the map, with workers by their positions in ``workers``. O(shards)."""
        table = np.full(NO_OWNER + 1, np.uint16(NO_OWNER))
        for at, info in enumerate(workers):
            index = self.indexes.get((info.node, info.worker))
            if index is not None:
                table[index] = at
        tables = self.tables
        moving = np.flatnonzero(tables.previous != NO_OWNER)
        previous = list(zip(moving.tolist(), table[tables.previous[moving]].tolist()))
        return MapReply(
            epoch, cluster, list(workers), index_bytes(table[tables.owners]), previous, packed_since(tables)
        )

    # -- changes ---------------------------------------------------------------------------------

    def replace(self, node: Node, epoch: int, *, fresh: bool) -> Shards:
        """Take note that a new instance replaces a node's old one. Return the shards that begin anew with it.

        Those are shards that the node owns since a later epoch than ``epoch``, the newest that its arenas have acted
        on if they are the old instance's, else 0: their values were in another arena, which is gone. The simulator
        found that case.
        ``fresh``: its arenas are new. Other arenas may hold values from before that other arena's ownership period,
        which readers would accept until the workers have taken the next map. So they own nothing of it yet.
        """
        indexes = self.indexes_of(node)
        mine = np.isin(self.tables.owners, indexes)
        self.tables.previous[mine | np.isin(self.tables.previous, indexes)] = NO_OWNER
        anew = np.flatnonzero(mine & (self.tables.since > np.uint64(epoch)))
        if not fresh:
            self.tables.owners[anew] = NO_OWNER
        return anew

    def arrived(self, key: Key, shards: Sequence[int], epoch: int) -> int:
        """End the moves of shards that a worker got up to ``epoch`` and has wholly now. Return how many there were."""
        tables, index = self.tables, self.indexes.get(key, NO_OWNER)
        asked = np.asarray(shards, np.int64)
        known = (tables.owners[asked] == index) & (tables.since[asked] <= np.uint64(epoch))
        done = asked[known & (tables.previous[asked] != NO_OWNER)]
        tables.previous[done] = NO_OWNER
        return len(done)

    def rebalance(self, nodes: Mapping[str, Node], limit: int, *, assign: bool) -> tuple[bool, Shards]:
        """Draw the consequences of the nodes' states. Not ``assign``: no shard changes owner.

        Returns True if the map changes even without a change of owner, because previous owners were dropped or nodes
        released, and the shards that changed owner.
        """
        new = [key for key in _keys(node for node in nodes.values() if not node.released) if key not in self.indexes]
        if new:
            self.set_keys(self.keys + new)
        weights, eligibility, acked = self._roles(nodes)
        lost = self._without_source(eligibility)
        self.tables.previous[lost] = NO_OWNER
        if not assign:
            return bool(lost.any()), NO_SHARDS
        done = rebalance(self.tables, weights, eligibility, limit, acked)
        self._left = done
        return self._release(nodes.values()) or bool(lost.any()), done.changed

    def _without_source(self, eligibility: Sequence[Eligibility]) -> NDArray[np.bool_]:
        """Return the shards whose previous owner cannot serve the owner. If both are only away, it may do so later."""
        tables = self.tables
        gone = _below(eligibility, Eligibility.OVERDUE, tables.previous)
        away = _below(eligibility, Eligibility.SUSPECT, tables.previous)
        found: NDArray[np.bool_] = gone | away & ~_below(eligibility, Eligibility.ACTIVE, tables.owners)
        return found

    def _release(self, nodes: Iterable[Node]) -> bool:
        """Release overdue nodes that no shard names any more. Return True if there were any."""
        overdue = [node for node in nodes if node.overdue and not node.released]
        if overdue:
            named = self.tables.named()
            for node in overdue:
                node.released = not named[self.indexes_of(node)].any()
        return any(node.released for node in overdue)

    def compact(self, nodes: Mapping[str, Node]) -> None:
        """Drop the indexes of workers that no node has any more."""
        members = set(_keys(nodes.values()))
        if not members >= self.indexes.keys():
            keep = [key for key in self.keys if key in members]
            position = {key: at for at, key in enumerate(keep)}
            self.tables.renumber([position.get(key, NO_OWNER) for key in self.keys])
            self.set_keys(keep)

    def _roles(self, nodes: Mapping[str, Node]) -> tuple[list[int], list[Eligibility], list[int]]:
        """Return the weight, the eligibility and the acknowledged epoch of each index."""
        acked = [0] * len(self.keys)
        weights, spare = [0] * len(self.keys), [0] * len(self.keys)
        eligibility = [Eligibility.DEAD] * len(self.keys)
        for node in nodes.values():
            if node.released:
                continue
            role = Eligibility.ACTIVE if node.ready else Eligibility.SUSPECT
            if not node.serving:
                role = Eligibility.OVERDUE if node.overdue else Eligibility.RESERVED
            for info in node.workers:
                index = self.indexes.get((node.name, info.worker))
                if index is not None:
                    eligibility[index] = role
                    acked[index] = node.acked_epoch
                    if node.serving:
                        (spare if node.draining else weights)[index] = info.capacity
        # If all are to be empty, they keep their shards.
        return (weights if any(weights) else spare), eligibility, acked

    def check(self, nodes: Mapping[str, Node], epoch: int, limit: int | None, *, assign: bool) -> None:
        """Raise CorruptionError unless the tables fit the nodes. O(shards + workers).

        ``limit``: of moves at once, if no step may be due; None if one may. Not ``assign``: owners may be dead.
        """

        def must(fact: bool, text: str) -> None:
            if not fact:
                raise CorruptionError(f"placement: {text}")

        must(self.indexes == {key: index for index, key in enumerate(self.keys)}, "a worker with two indexes")
        must(len(self.indexes) == len(self.keys), "two workers with one index")
        live = set(_keys(node for node in nodes.values() if not node.released))
        must(live <= self.indexes.keys() <= set(_keys(nodes.values())), "the indexes do not match the members")
        tables = self.tables
        tables.check(len(self.keys))
        must(bool((tables.since <= epoch).all()), "a shard has an owner since an epoch to come")
        weights, eligibility, acked = self._roles(nodes)
        bad = _below(eligibility, Eligibility.OVERDUE, tables.owners)
        must(not bad.any() or not assign, f"shard {int(bad.argmax())} has a dead owner")
        bad = self._without_source(eligibility)
        must(not bad.any(), f"shard {int(bad.argmax())} has a previous owner that does not serve")
        if limit is not None:
            named = tables.named()
            idle = [node for node in nodes.values() if node.overdue and not node.released]
            must(all(named[self.indexes_of(node)].any() for node in idle), "a node is kept for nothing")
            unowned = int((tables.owners == NO_OWNER).sum())
            must(not any(weights) or unowned <= self.waiting, "a shard has no owner and does not wait for one")
            again = rebalance(tables.copy(), weights, eligibility, limit, acked)
            must(not len(again.changed), f"{len(again.changed)} shards should have moved")
            must(again.waiting == self.waiting, f"{again.waiting} shards wait, not {self.waiting}")


def _keys(nodes: Iterable[Node]) -> Iterable[Key]:
    return ((node.name, info.worker) for node in nodes for info in node.workers)


def _below(eligibility: Sequence[Eligibility], least: Eligibility, indexes: WorkerIndexes) -> NDArray[np.bool_]:
    """Return the shards whose worker in a table is below ``least``; those with NO_OWNER are not."""
    below = np.append(np.asarray(eligibility, np.uint8) < least, False)
    found: NDArray[np.bool_] = below[np.minimum(indexes, len(eligibility))]
    return found

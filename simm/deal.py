"""Dealing shards to workers: how many each should own, and which of them move now. No I/O, no clock.

What can go wrong, and what we chose
------------------------------------
* *Too many moves.* :func:`apportion` gives each worker the floor or the ceiling of its share, whichever moves less, and
  :func:`deal` only ever moves a shard from a worker that has too many to one that has too few. So a change is
  carried out with the fewest moves there are, in however many steps.
* *Too many at once.* A shard taken from a worker that lives brings its values along, and their copying costs both
  sides bandwidth. At most ``limit`` shards move into one worker at a time; the next step is taken when some have
  arrived. A shard that nobody living owns has no values to bring: it is dealt at once, whatever the limit.
* *A shard on the move is moved again*, and nobody knows any more who has its values. It is not: a shard with a previous
  owner stays where it is until it has arrived, or until its new owner is gone.
* *Somebody comes back* and should find its shards, as its arena may still hold their values. Each shard remembers its
  *home*, the last worker that got it by plan and not by somebody's death; elsewhere it is a *guest*. Orphans and
  shards that must move anyway go home first, and who has to give some gives guests first.
* *A worker that is not heard from* may be dead in a second. It keeps its shards and its share, but nothing is
  moved from it or to it meanwhile.
* *A worker that missed a map* may still hold values of a shard by a word from before somebody else's tenure, and would
  show them to all who come by the newest map. So a shard is given only to a worker, and taken with its values only
  from one, that has said it holds a map at least as new as the shard's last change of owner: its word for the
  shard is then either that of its own tenure or 0. What has just changed hands waits for the next heartbeat. But an
  orphan that all who lack some are unfit for goes above the share of one who is fit: one who lacks some may never
  catch up, as its worker is stopped, and until then nobody could put anything.

A deal is done in one go: dealing again changes nothing (``Cluster.check`` relies on it). O(shards + workers log
workers), some tenths of a millisecond where nothing moves and some milliseconds where much does.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from itertools import chain
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .constants import NO_OWNER, SHARD_COUNT
from .errors import CorruptionError

Places = NDArray[np.uint16]
_NONE: Final = np.uint16(NO_OWNER)


class Standing(IntEnum):
    """What becomes of a worker's shards."""

    #: They are others' at once, without their values.
    GONE = 0
    #: It is away for a moment. They wait for it, and it gets no others.
    KEPT = 1
    #: It has its share, but is not heard from: no shard is moved from it or to it.
    QUIET = 2
    #: It gives and takes.
    READY = 3


class Tables:
    """What is known of each shard: places (positions of workers, or NO_OWNER) and epochs."""

    __slots__ = ("homes", "owners", "previous", "since")

    def __init__(self, shards: int = SHARD_COUNT) -> None:
        self.owners: Places = np.full(shards, _NONE)
        self.homes: Places = np.full(shards, _NONE)
        #: Who had it before and may have values that the owner lacks; NO_OWNER for a shard that is not moving.
        self.previous: Places = np.full(shards, _NONE)
        #: The epoch of its last change of owner.
        self.since: NDArray[np.uint64] = np.zeros(shards, np.uint64)

    def copy(self) -> Tables:
        """One that can be changed without changing this."""
        made = Tables(0)
        made.owners, made.homes = self.owners.copy(), self.homes.copy()
        made.previous, made.since = self.previous.copy(), self.since.copy()
        return made

    def renumber(self, table: Sequence[int]) -> None:
        """Worker ``at`` is called ``table[at]`` from now on; NO_OWNER: it is forgotten. Its guests are at home then."""
        names = np.full(NO_OWNER + 1, _NONE)
        names[: len(table)] = table
        self.owners = names[self.owners]
        self.previous = np.where(self.owners == _NONE, _NONE, names[self.previous])
        homes = names[self.homes]
        self.homes = np.where(homes == _NONE, self.owners, homes)

    def check(self, workers: int) -> None:
        """Raise CorruptionError for tables that contradict themselves. O(shards)."""
        moving = self.previous != _NONE
        for name, bad in (
            ("an owner that there is not", (self.owners != _NONE) & (self.owners >= workers)),
            ("a home that there is not", (self.homes != _NONE) & (self.homes >= workers)),
            ("a previous owner that there is not", moving & (self.previous >= workers)),
            ("an owner and no home", (self.owners != _NONE) & (self.homes == _NONE)),
            ("a previous owner and no owner", moving & (self.owners == _NONE)),
            ("one worker for both owner and previous owner", moving & (self.previous == self.owners)),
            ("an owner since no epoch", (self.owners != _NONE) & (self.since == 0)),
        ):
            if bad.any():
                raise CorruptionError(f"shard {int(np.flatnonzero(bad)[0])} has {name}")


class Dealt(NamedTuple):
    """The shards that changed owner, ascending, and how many more have to move, or to find an owner, later."""

    changed: NDArray[np.int64]
    waiting: int


def apportion(weights: Sequence[int], held: Sequence[int], shards: int = SHARD_COUNT) -> list[int]:
    """How many shards each worker should own: the floor or the ceiling of its share by weight.

    Who gets a ceiling is chosen so that the fewest shards move: first those that hold more than their
    floor already, then by the largest remainder (Hamilton's method), then by position.
    All 0 when all weights are. O(n log n).
    """
    total = sum(weights)
    if not total:
        return [0] * len(weights)
    numbers = [shards * weight // total for weight in weights]
    rest = shards - sum(numbers)
    # Only a share that is no whole number may be rounded up.
    candidates = [at for at, weight in enumerate(weights) if shards * weight % total]
    candidates.sort(key=lambda at: (held[at] <= numbers[at], -(shards * weights[at] % total), at))
    for at in candidates[:rest]:
        numbers[at] += 1
    return numbers


def deal(
    tables: Tables, weights: Sequence[int], standing: Sequence[Standing], limit: int, heard: Sequence[int] | None = None
) -> Dealt:
    """Take the step that is due, in place: owners, homes and previous owners. ``since`` is the caller's.

    Args:
        weights: of each worker; 0 for one that is to own nothing. Those GONE and KEPT must have 0.
        standing: of each worker.
        limit: shards that may move into one worker at a time; those that are moving already count.
        heard: epoch of the newest map that each worker is known to hold; None: all have the newest.

    What those KEPT have is theirs; the others' shares are of the rest. A shard whose owner is GONE (or that never had
    one) goes, where there is too little, to its previous owner, else home, else to whoever it is; nobody
    gets it while all weights are 0. A shard that is taken from a worker names it as previous.
    """
    count = len(weights)
    known = [1 << 62] * count if heard is None else list(heard)
    owners, homes, previous = tables.owners, tables.homes, tables.previous
    before = owners.copy()
    stands = np.append(np.asarray(standing, np.uint8), np.uint8(Standing.GONE))

    def shares() -> tuple[list[int], list[int]]:
        state = stands[np.minimum(owners, count)]
        held = np.bincount(owners[state >= Standing.QUIET], minlength=count).tolist()
        targets = apportion(weights, held, len(owners) - int((state == Standing.KEPT).sum()))
        differences = [target - have for target, have in zip(targets, held)]
        return [max(0, more) for more in differences], [max(0, -more) for more in differences]

    lacking, surplus = shares()
    orphans = np.flatnonzero(stands[np.minimum(owners, count)] == Standing.GONE)
    left = orphans[:0]
    if len(orphans):
        left = _adopt_out(tables, orphans, lacking, known)
    if len(left) and any(weights):
        left = _burden(tables, left, [place for place, weight in enumerate(weights) if weight], known)
        lacking, surplus = shares()
    moves = 0
    into = np.bincount(owners[previous != _NONE], minlength=count).tolist()
    ready = [each is Standing.READY for each in standing]
    quota = [min(lack, max(0, limit - has)) if able else 0 for lack, has, able in zip(lacking, into, ready)]
    spare = [more if able else 0 for more, able in zip(surplus, ready)]
    if any(quota) and any(spare):
        moves = _move(tables, quota, spare, known)
    homes[homes == _NONE] = owners[homes == _NONE]
    return Dealt(np.flatnonzero(owners != before), sum(surplus) - moves + (len(left) if any(weights) else 0))


def _adopt_out(tables: Tables, orphans: NDArray[np.int64], lacking: list[int], heard: list[int]) -> NDArray[np.int64]:
    """Give orphans to those who lack some, ``lacking`` going down with it; those for which none of them is fit."""
    rest = []
    for shard in orphans.tolist():
        since = int(tables.since[shard])
        for place in (int(tables.previous[shard]), int(tables.homes[shard])):
            if place != NO_OWNER and lacking[place] and heard[place] >= since:
                lacking[place] -= 1
                tables.owners[shard] = place
                break
        else:
            rest.append(shard)
    tables.previous[orphans] = _NONE
    left = np.asarray(rest, np.int64)
    tables.owners[left] = _NONE
    # First those who are fit for the fewest.
    for place in sorted((place for place, lack in enumerate(lacking) if lack), key=lambda place: (heard[place], place)):
        if len(left):
            taken = left[tables.since[left] <= np.uint64(heard[place])][: lacking[place]]
            tables.owners[taken] = place
            lacking[place] -= len(taken)
            left = np.setdiff1d(left, taken, assume_unique=True)
    return left


def _burden(tables: Tables, orphans: NDArray[np.int64], places: Sequence[int], heard: list[int]) -> NDArray[np.int64]:
    """Give orphans to those of ``places`` who are fit, all alike, whatever their shares; those for which nobody is."""
    for since in np.unique(tables.since[orphans]).tolist():
        fit = [place for place in places if heard[place] >= since]
        if fit:
            shards = orphans[tables.since[orphans] == np.uint64(since)]
            tables.owners[shards] = np.resize(np.asarray(fit, np.uint16), len(shards))
    unplaced: NDArray[np.int64] = orphans[tables.owners[orphans] == _NONE]
    return unplaced


def _move(tables: Tables, quota: list[int], spare: list[int], heard: list[int]) -> int:
    """Move shards from those who can spare some to those who may take some; how many. Both lists go down with it."""
    owners, homes, previous = tables.owners, tables.homes, tables.previous
    places = np.minimum(owners, len(spare))
    able = np.append(np.asarray(spare, np.int64), 0)[places] > 0
    able &= np.append(np.asarray(heard, np.uint64), np.uint64(0))[places] >= tables.since
    takers = [place for place, room in enumerate(quota) if room]
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

    guests, residents = [], []
    for shard in np.flatnonzero(able & (previous == _NONE)).tolist():
        owner, home = int(owners[shard]), int(homes[shard])
        if home == owner:
            residents.append(shard)
        elif spare[owner] and home != NO_OWNER and quota[home] and heard[home] >= tables.since[shard]:
            move(shard, owner, home)
        else:
            guests.append(shard)
    for shard in chain(guests, residents):
        owner = int(owners[shard])
        if not takers:
            break
        if not spare[owner]:
            continue
        since = int(tables.since[shard])
        to = next((place for place in takers if heard[place] >= since), NO_OWNER)
        if to == NO_OWNER:
            continue
        if homes[shard] == owner:
            homes[shard] = to  # it leaves its home by plan, so the next one is its home
        move(shard, owner, to)
    return moves

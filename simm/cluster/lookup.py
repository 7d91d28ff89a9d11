"""Decide what a miss means and where to look next. No I/O, no clock; O(1) for each key.

A reader looks for a key at the worker that its map names as the shard's owner. If the key is not there, the shard's
word in that worker's arena says more (``arena/shard_words.py`` explains the words and how a shard moves):

    word                      meaning                                        the reader's next step
    0 < word < MOVING         plain: the owner has everything of the shard   a miss
    0                         not adopted yet, or not its shard              ask the owner
    MOVING | epoch            adopted, and values are still being copied     ask the owner
    FROZEN | epoch            another worker owns the shard                  refresh the map

The owner's answer, which only ``ShardWords.status_of_miss`` gives, ends the question or names the next step:

    NOT_FOUND                 a miss
    OK                        copied in between the look and the question: read again at the owner
    PREVIOUS, with an epoch   not changed since that epoch, in which the owner got the shard: read at the previous owner
    WRONG_OWNER               refresh the map

After a refresh, or when the map has changed in the meantime, the read starts over at the new owner, at most ``HOPS``
times. Then it is a miss. So is a key whose owner cannot be asked, which is counted as an outage.

The client (``sdk/reads.py``), a stream (``server/stream_get.py``) and the simulator (``sim/client.py``) run these rules
and contain none of their own.

What can go wrong, and what we chose
====================================

**The previous owner has a superseded value.** A reader goes there only after the owner has said that this very key has
not changed since the move began. A frozen word or WRONG_OWNER never sends a reader to a previous owner: the map that
names it may be old, and so may its values.

**The map and the owner speak of two different moves.** A shard can leave and come back. An old map then names a
previous owner of long ago, which may not know that it was released. So the owner's answer carries the epoch in which
it got the shard, and the map must say the same (:func:`is_same_move`). Owner, previous owner and epoch come
from one map (:class:`OwnerTable`), never from two.

**The owner itself may be behind.** Before it has adopted the shard it sends every reader to the previous owner, because
no other worker can have accepted a change by its map. If it was cut off, that map is old. Its answer then counts only
while the reader is connected to the manager and would receive a newer map; a reader that is cut off together with such
an owner gets a miss. A stream does not say whether the owner has adopted the shard, so clients assume that it has not.

**A wrong miss is cheap, a wrong value is not.** Wherever these rules are in doubt they say miss.

Cost: a hit runs nothing of this. A plain miss compares its word once; drivers do that inline. Other keys of a batch are
grouped: one question to the owner, one read for each previous owner and each new owner.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Generic, Protocol, TypeVar

from ..wire.messages import Status
from ..wire.shard_set import FROZEN, MOVING

#: How often a read starts over because the map has changed or the owner has the value by now.
HOPS: Final = 3
#: A miss is plain if its shard's word is in the open interval from 0 to here.
PLAIN_BELOW: Final = MOVING
#: Beside the values of :class:`Status`: the owner must be asked.
ASK_OWNER: Final = -1

#: How a driver names a worker; equal where it is the same instance.
Owner = TypeVar("Owner")
_Named = TypeVar("_Named", covariant=True)


def miss_status(word: int, *, asked: bool = False) -> int:
    """Return what a miss at the owner means by its shard's word: NOT_FOUND, WRONG_OWNER or ASK_OWNER.

    ``asked``: the owner has said OK, and the second look failed too. The value came and went, which is a miss.
    """
    if 0 < word < PLAIN_BELOW:
        return Status.NOT_FOUND
    if word >= FROZEN:
        return Status.WRONG_OWNER
    return Status.NOT_FOUND if asked else ASK_OWNER


def previous_status(word: int) -> int:
    """Return what a miss at a previous owner means by its shard's word: NOT_FOUND, or WRONG_OWNER once released."""
    return Status.NOT_FOUND if word else Status.WRONG_OWNER


def hidden_status(word: int, moving: int) -> int:
    """Return what a client that is bound to a namespace hears of a key that is not of it, stored or not.

    The shard's word alone decides. ``moving``: the status in a shard that is moving in.
    """
    if not 0 < word < FROZEN:
        return Status.WRONG_OWNER
    return moving if word & MOVING else Status.NOT_FOUND


def is_same_move(epoch: int, since: int, *, adopted: bool, connected: bool) -> bool:
    """Return True if an owner's answer PREVIOUS is about the move in the reader's map.

    ``epoch`` comes with the answer, ``since`` from the map. ``adopted``: the owner has surely adopted the shard.
    ``connected``: the manager would send the reader a newer map.
    """
    return epoch == since and (adopted or connected)


class OwnerTable(Protocol[_Named]):
    """One shard map: the owner of a shard, its previous owner while it moves, and the epoch in which it moved."""

    def owner(self, shard: int, /) -> _Named | None:
        """Return the owner, or None without one."""

    def previous(self, shard: int, /) -> _Named | None:
        """Return the previous owner, or None if the shard is not moving."""

    def since(self, shard: int, /) -> int:
        """Return the epoch in which the owner got the shard."""


class NextReads(Generic[Owner]):
    """Where to look next, by worker: positions of a batch."""

    __slots__ = ("at_previous", "refresh", "start_over")

    def __init__(self) -> None:
        #: The map seems old.
        self.refresh = False
        #: Read there as at a previous owner; what is not there is a miss.
        self.at_previous: dict[Owner, list[int]] = {}
        #: Read there as at the owner, with one hop less.
        self.start_over: dict[Owner, list[int]] = {}


class Unresolved:
    """Positions of a batch that their owner does not have and that are not known to be misses."""

    __slots__ = ("ask_owner", "at_owner", "at_previous_owner", "not_owner")

    def __init__(self) -> None:
        #: The owner must be asked: (position, whether it has surely adopted the shard).
        self.ask_owner: list[tuple[int, bool]] = []
        #: The owner has it by now.
        self.at_owner: list[int] = []
        #: The previous owner may have it: (position, epoch of the move, whether the owner has surely adopted it).
        self.at_previous_owner: list[tuple[int, int, bool]] = []
        #: The map is old: this worker does not own the shard.
        self.not_owner: list[int] = []

    def __bool__(self) -> bool:
        return bool(self.ask_owner or self.at_previous_owner or self.not_owner)

    def positions(self) -> list[int]:
        """Return all positions, before any answer."""
        return [each[0] for each in (*self.ask_owner, *self.at_previous_owner)] + self.not_owner

    def extend(self, other: Unresolved) -> None:
        """Add the positions of another part of the batch."""
        self.ask_owner += other.ask_owner
        self.at_owner += other.at_owner
        self.at_previous_owner += other.at_previous_owner
        self.not_owner += other.not_owner

    def by_word(self, position: int, word: int) -> bool:
        """Add a key that is not in the owner's arena, by its shard's word; return False if it is a plain miss."""
        status = miss_status(word)
        if status == ASK_OWNER:
            self.ask_owner.append((position, word > 0))
            return True
        return self.by_status(position, status, 0)

    def by_status(self, position: int, status: int, epoch: int, *, adopted: bool = False) -> bool:
        """Add a key by what a server answered; return False if that is the end of it.

        ``epoch`` comes with PREVIOUS: since when the shard is the owner's.
        """
        if status == Status.PREVIOUS:
            self.at_previous_owner.append((position, epoch, adopted))
        elif status == Status.WRONG_OWNER:
            self.not_owner.append(position)
        else:
            return False
        return True

    def answered(self, asked: tuple[int, bool], status: int, epoch: int) -> None:
        """Take the owner's answer to an item of ``ask_owner``."""
        position, adopted = asked
        if status == Status.OK:
            self.at_owner.append(position)
        else:
            self.by_status(position, status, epoch, adopted=adopted)

    def next_reads(
        self, owner: Owner, table: OwnerTable[Owner], shard_at: Callable[[int], int], *, hops: int, connected: bool
    ) -> NextReads[Owner]:
        """Return where to look next, once the owner was asked. What is not in it is a miss.

        ``owner``: the worker that did not have the keys. ``table``: the newest map. ``shard_at``: a position's shard.
        ``hops``: how often the read may still start over. ``connected``: see :func:`is_same_move`.
        """
        found: NextReads[Owner] = NextReads()
        start_over = found.start_over
        found.refresh = bool(self.not_owner)
        for position in self.not_owner:
            now = table.owner(shard_at(position))
            if now is not None and now != owner:
                start_over.setdefault(now, []).append(position)
        for position, epoch, adopted in self.at_previous_owner:
            shard = shard_at(position)
            now, previous = table.owner(shard), table.previous(shard)
            if now != owner:
                if now is not None:
                    start_over.setdefault(now, []).append(position)
            elif previous is not None and is_same_move(
                epoch, table.since(shard), adopted=adopted, connected=connected
            ):
                found.at_previous.setdefault(previous, []).append(position)
            else:
                found.refresh = True
        if self.at_owner:
            start_over.setdefault(owner, []).extend(self.at_owner)
        if hops <= 0:
            start_over.clear()
        return found

"""Many chunks at once. Which slabs the entries of a dead worker lay in: recovery for all of them, by numpy.

A million entries one by one take seconds, in which the worker answers nobody. Slabs whose entries contradict nothing
are taken over as a whole. What is left, large values and slabs of which something is wrong, goes one by one, which
tells what is wrong.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..constants import CHUNK_ALIGN_BYTES, SLAB_BYTES, SLAB_CHUNK_BYTES_MAX
from ..errors import CorruptionError
from ..slab import ALIGN_SHIFT, CHUNK_SIZES, CLASS_TABLE, LARGE_GROUP, Allocator, Span
from .coldest import may_go
from .queues import Policy

_Numbers = NDArray[np.int64]

#: `CLASS_TABLE`, and the chunk size of each group, for numpy. The size of LARGE_GROUP stands for none.
_CLASSES: Final = np.frombuffer(CLASS_TABLE, np.uint8).astype(np.int64)
_SIZES: Final = np.array([*CHUNK_SIZES, SLAB_BYTES], np.int64)


class LiveSlots(NamedTuple):
    """Columns of :meth:`simm.table.Table.live`, one row per live slot."""

    slots: NDArray[np.int64]
    offsets: NDArray[np.uint64]
    chunks: NDArray[np.uint32]
    stored: NDArray[np.uint64]
    namespaces: NDArray[np.uint16]

    def only(self, mask: NDArray[np.bool_]) -> LiveSlots:
        """Return the rows that ``mask`` marks."""
        return LiveSlots(
            self.slots[mask], self.offsets[mask], self.chunks[mask], self.stored[mask], self.namespaces[mask]
        )


class WholeSlab(NamedTuple):
    """A slab, the indices of its chunks, and which rows these are."""

    base: int
    group: int
    indices: _Numbers
    rows: _Numbers


def groups_of(sizes: _Numbers) -> _Numbers:
    """Return `class_of` for each of many sizes, which are positive. O(n)."""
    small = sizes <= SLAB_CHUNK_BYTES_MAX
    units = np.where(small, sizes + CHUNK_ALIGN_BYTES - 1 >> ALIGN_SHIFT, 0)
    return np.where(small, _CLASSES[units], LARGE_GROUP)


def whole_slabs(offsets: _Numbers, sizes: _Numbers, region: int) -> Iterator[WholeSlab]:
    """Yield the slabs in ``region`` bytes whose chunks are all possible: of one class, in its grid, each named once.

    A row is the offset and the size of a chunk. O(n log n).
    """
    if not len(offsets):
        return
    order = np.argsort(offsets, kind="stable")
    at, groups = offsets[order], groups_of(sizes[order])
    chunks = _SIZES[groups]
    inside = (at >= 0) & (at < region // SLAB_BYTES * SLAB_BYTES)
    bases = np.where(inside, at // SLAB_BYTES * SLAB_BYTES, -1)
    indices = (at - bases) // chunks
    sound = inside & (groups != LARGE_GROUP) & (sizes[order] == chunks) & (bases + indices * chunks == at)
    sound &= indices < SLAB_BYTES // chunks
    begins = np.concatenate(([True], bases[1:] != bases[:-1]))
    sound[1:] &= begins[1:] | ((at[1:] > at[:-1]) & (groups[1:] == groups[:-1]))
    starts = np.flatnonzero(begins)
    ends = np.append(starts[1:], len(at))
    whole = np.logical_and.reduceat(sound, starts)
    for start, end in zip(starts[whole].tolist(), ends[whole].tolist()):
        yield WholeSlab(int(bases[start]), int(groups[start]), indices[start:end], order[start:end])


def reserve_all(
    allocator: Allocator, slots: _Numbers, offsets: _Numbers, sizes: _Numbers
) -> tuple[NDArray[np.bool_], list[tuple[int, str]]]:
    """Reserve the chunks of recovered entries for their slots. Return a mask of those, and (slot, reason) of others.

    O(n log n), by numpy but for large values.
    """
    done = np.zeros(len(slots), bool)
    for slab in whole_slabs(offsets, sizes, allocator.size):
        if allocator.reserve_slab(slab.base, slab.group, slab.indices, slots[slab.rows]):
            done[slab.rows] = True
    refused = []
    for at in np.flatnonzero(~done).tolist():
        slot, offset = int(slots[at]), int(offsets[at])
        try:
            allocator.reserve(offset, int(sizes[at]))
        except CorruptionError as exc:
            refused.append((slot, str(exc)))
            continue
        allocator.set_owner(offset, slot)
        done[at] = True
    return done, refused


def free_all(allocator: Allocator, own: array[int], slots: Sequence[int], offsets: Sequence[int]) -> Counter[int]:
    """Free the chunks of many entries. Return how many lay in each slab. ``own``: the offsets, by slot. O(n)."""
    free = allocator.free
    for slot, offset in zip(slots, offsets):
        free(offset)
        own[slot] = -1
    return Counter([offset & -SLAB_BYTES for offset in offsets])


def evict_slab(
    allocator: Allocator, own: array[int], base: int, evict: Callable[[list[int], list[int]], None], most: int,
    is_cut: Callable[[], bool],
) -> None:  # fmt: skip
    """Evict a slab's entries, ``most`` at once, and free it; only their chunks if it ``is_cut`` between two parts.

    ``evict``: gets slots and their offsets; if it raises, the parts before are gone. ``own``: offsets by slot. O(n).
    """
    owners = allocator.owners_of_slab(base)
    slots: list[int] = owners.tolist()
    offsets: list[int] = np.frombuffer(own, np.int64).take(owners).tolist()
    gone = 0
    try:
        while gone < len(slots) and not (gone and is_cut()):
            some = slots[gone : gone + most]
            evict(some, offsets[gone : gone + most])
            for slot in some:
                own[slot] = -1
            gone += len(some)
    finally:
        if gone < len(slots):
            for offset in offsets[:gone]:  # a slot that is gone owns no chunk
                allocator.free(offset)
    if gone == len(slots):
        allocator.free_slab(base)


class Begun:
    """The slab that was emptied in part by the last request that was cut short. The next one of its size goes on there.

    Elsewhere it would empty a part in vain again, while values of the slab's class take the free chunks of this one.
    """

    def __init__(self, allocator: Allocator, policy: Policy, holds: Mapping[int, object]) -> None:
        self._allocator, self._policy, self._holds = allocator, policy, holds
        self._need = 0
        #: The slab, its class, for values of how many bytes, and until which clock of the policy; None: there is none.
        self._noted: tuple[int, int, int, int] | None = None

    def evicted(self, slab: Span, period: int) -> None:
        """Note a slab that the need of the last :meth:`take` has emptied in part, for so long on the policy's clock.

        ``period`` 0: it is empty, and no longer noted. O(1).
        """
        if period:
            self._noted = slab.offset, slab.detail, self._need, self._policy.clock + period
        elif self._noted is not None and self._noted[0] == slab.offset:
            self._noted = None

    def take(self, group: int, need: int, fences: Callable[[Span], bool]) -> Span | None:
        """Return what is left of the slab if ``need`` bytes are wanted there and all of it may go, fresh or not.

        It is noted until it is :meth:`evicted`, which the caller does unless too many entries wait to be dropped.
        ``fences``: whether what is kept keeps a span. O(chunks of the slab), by numpy; O(1) if there is none.
        """
        self._need = need
        if self._noted is None or self._noted[2] != need:
            return None
        base, old_group, _, until = self._noted
        policy, allocator = self._policy, self._allocator
        of_another = old_group == group or allocator.class_of_slab(base) != old_group  # or free
        if need <= SLAB_BYTES and policy.clock <= until and not of_another:
            span = allocator.span_at(base)
            before, policy.sparing = policy.sparing, False  # else a value that was put there meanwhile keeps the slab
            try:
                if may_go(span, allocator, policy, self._holds) and not fences(span):
                    return span
            finally:
                policy.sparing = before
        self._noted = None
        return None


def overlapping(offsets: NDArray[np.uint64], chunks: NDArray[np.uint32]) -> NDArray[np.bool_]:
    """Return a mask of the chunks that share bytes with another one, or with one that does. O(n log n)."""
    order = np.argsort(offsets, kind="stable")
    starts = offsets[order]
    ends = np.maximum.accumulate(starts + chunks[order])
    joined = np.zeros(len(order) + 1, bool)
    joined[1:-1] = starts[1:] < ends[:-1]
    mask = np.zeros(len(order), bool)
    mask[order] = joined[1:] | joined[:-1]
    return mask


def inside(offsets: NDArray[np.uint64], chunks: NDArray[np.uint32], start: int, stop: int) -> NDArray[np.bool_]:
    """Return a mask of the chunks that lie between ``start`` and ``stop``. O(n)."""
    end = np.uint64(stop)
    mask: NDArray[np.bool_] = (
        (offsets >= np.uint64(start))
        & (offsets < end)
        & (chunks > 0)
        & (chunks.astype(np.uint64) <= end - offsets)  # wraps only where the line above is False
    )
    return mask


def take_entries(
    found: LiveSlots, start: int, stop: int, restore: Callable[[_Numbers, _Numbers, _Numbers], list[tuple[int, str]]],
    clear: Callable[[int], object],
) -> list[str]:  # fmt: skip
    """Give the live slots their chunks from ``start`` to ``stop``, oldest first for the queues. Return notes.

    A slot has been read once: others may store there. ``restore`` gives slots their chunks, and returns why others get
    none. ``clear`` empties a slot.
    """
    notes = []
    right = inside(found.offsets, found.chunks, start, stop)
    right[right] = ~overlapping(found.offsets[right], found.chunks[right])
    for slot in found.slots[~right].tolist():
        notes.append(f"slot {slot} dropped: another one names the same bytes")
        clear(slot)
    found = found.only(right)
    order = np.argsort(found.stored, kind="stable")
    offsets = (found.offsets[order] - np.uint64(start)).astype(np.int64)
    for slot, reason in restore(found.slots[order], offsets, found.chunks[order].astype(np.int64)):
        notes.append(f"slot {slot} dropped: {reason}")
        clear(slot)
    return notes


def owned(entries: NDArray[np.int64], offsets: Iterable[int]) -> set[int]:
    """Return those of the offsets at which an entry's chunk begins. ``entries``: by slot, -1 without one. By numpy."""
    # A damaged line of the ledger may name any offset.
    wanted = np.array([*sorted(offset for offset in offsets if 0 <= offset < 1 << 62), 1 << 62], np.int64)
    found: list[int] = entries[wanted[np.searchsorted(wanted, entries)] == entries].tolist()
    return set(found) - {-1}

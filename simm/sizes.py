"""Size classes: the chunk that a value of some size gets. Clients count with it as well as workers.

Multiples of 64 bytes up to 1 KiB, then 16 steps per doubling up to ``SLAB_CHUNK_BYTES_MAX`` (128 KiB): 128
classes. Above 1 KiB a value leaves less than 1/17 of its chunk unused, and a slab less than 1/17 of itself as
its tail (that is why a slab holds at least 16 chunks), so a uniform workload wastes less than 1 - (16/17)^2 =
11.4%; 8.6% in fact, at the worst size. With chunks of up to half a slab the tail alone could be a third.
Every multiple of 4 KiB is exactly a class and its chunks lie at multiples of 4 KiB; a size between two such
multiples gets its closer class, aligned to that class's step only, since rounding 4,100 bytes up to 8 KiB
would waste half.
"""

from __future__ import annotations

from typing import Final

from .constants import CHUNK_ALIGN_BYTES, PAGE_BYTES, SLAB_BYTES, SLAB_CHUNK_BYTES_MAX
from .errors import UsageError

ALIGN_SHIFT: Final = CHUNK_ALIGN_BYTES.bit_length() - 1


def _class_sizes() -> list[int]:
    """Chunk sizes of the slab classes, ascending, in bytes."""
    sizes = list(range(CHUNK_ALIGN_BYTES, 16 * CHUNK_ALIGN_BYTES + 1, CHUNK_ALIGN_BYTES))
    base = sizes[-1]
    while base < SLAB_CHUNK_BYTES_MAX:
        sizes.extend(base + step * (base // 16) for step in range(1, 17))
        base *= 2
    return sizes


#: Chunk size of each slab class, in bytes.
CHUNK_SIZES: Final[tuple[int, ...]] = tuple(_class_sizes())
#: The group of all values too large for a slab; slab classes are 0 to LARGE_GROUP - 1.
LARGE_GROUP: Final = len(CHUNK_SIZES)
GROUPS: Final = LARGE_GROUP + 1
#: Chunks that a slab of each class holds.
CHUNKS_PER_SLAB: Final[tuple[int, ...]] = tuple(SLAB_BYTES // size for size in CHUNK_SIZES)


def _class_table() -> bytes:
    """Class by the value's size in units of CHUNK_ALIGN_BYTES, rounded up: each class is a multiple of it."""
    table = bytearray(1 + SLAB_CHUNK_BYTES_MAX // CHUNK_ALIGN_BYTES)
    group = 0
    for unit in range(1, len(table)):
        if unit * CHUNK_ALIGN_BYTES > CHUNK_SIZES[group]:
            group += 1
        table[unit] = group
    return bytes(table)


#: For who looks a class up in a hot loop: CLASS_TABLE[(n + CHUNK_ALIGN_BYTES - 1) >> ALIGN_SHIFT].
CLASS_TABLE: Final = _class_table()

assert CHUNK_SIZES[-1] == SLAB_CHUNK_BYTES_MAX and LARGE_GROUP <= 256
assert all(size % CHUNK_ALIGN_BYTES == 0 for size in CHUNK_SIZES)
assert CHUNKS_PER_SLAB[-1] >= 16


def class_of(n: int) -> int:
    """The group of a value of ``n`` bytes: a slab class, or LARGE_GROUP. `UsageError` below 1 byte. O(1)."""
    if n > SLAB_CHUNK_BYTES_MAX:
        return LARGE_GROUP
    if n < 1:
        raise UsageError(f"a chunk has at least one byte, not {n}")
    return CLASS_TABLE[(n + CHUNK_ALIGN_BYTES - 1) >> ALIGN_SHIFT]


def chunk_bytes_for(n: int) -> int:
    """Bytes of the chunk that a value of ``n`` bytes gets. `UsageError` below 1 byte. O(1)."""
    if n > SLAB_CHUNK_BYTES_MAX:
        return (n + PAGE_BYTES - 1) & -PAGE_BYTES
    return CHUNK_SIZES[class_of(n)]

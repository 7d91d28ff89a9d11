"""Sizes and limits that more than one module relies on.

Each number has its unit in its name and its relations to the others asserted at
import, so a change that breaks one of them cannot get past the first test.
"""

from __future__ import annotations

PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20
CACHE_LINE_BYTES = 64

#: Keys are 1 to 256 bytes of UTF-8, values 1 byte to 64 MiB less 20 KiB: the limits engines know.
KEY_BYTES_MAX = 256
VALUE_BYTES_MAX = 67_088_384
NAMESPACE_BYTES_MAX = 64
DEFAULT_NAMESPACE = "default"

DIGEST_BYTES = 16
SHARD_COUNT = 16_384
#: In a shard map's owner table: nobody owns this shard.
NO_OWNER = 0xFFFF

SLOT_BYTES = 64
WAYS = 8
SET_BYTES = SLOT_BYTES * WAYS
#: "No slot": what a chunk's owner word says while it is granted, orphaned or free.
NO_SLOT = 0xFFFF_FFFF

#: Unit in which whole slabs change their size class; also the huge page size.
SLAB_BYTES = 2 << 20
#: Larger values are extents of their own; see slab.py for why it is a sixteenth.
SLAB_CHUNK_BYTES_MAX = SLAB_BYTES // 16
CHUNK_ALIGN_BYTES = 64

DEFAULT_MANAGER_PORT = 30_001
FRAME_BYTES_MAX = 1 << 20
BATCH_KEYS_MAX = 4096

assert SLAB_BYTES % HUGE_PAGE_BYTES == 0 and HUGE_PAGE_BYTES % PAGE_BYTES == 0
assert SLAB_CHUNK_BYTES_MAX % PAGE_BYTES == 0
assert PAGE_BYTES % CHUNK_ALIGN_BYTES == 0 and CHUNK_ALIGN_BYTES % CACHE_LINE_BYTES == 0
assert SHARD_COUNT & (SHARD_COUNT - 1) == 0 and SHARD_COUNT < NO_OWNER
assert SET_BYTES % CACHE_LINE_BYTES == 0

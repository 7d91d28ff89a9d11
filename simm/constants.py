"""Sizes and limits that more than one module relies on.

Each number has its unit in its name. The relations between them are asserted at import.
"""

from __future__ import annotations

PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20
CACHE_LINE_BYTES = 64

#: Keys are 1 to 256 bytes of UTF-8, values 1 byte to 64 MiB less 20 KiB: the limits engines know.
KEY_BYTES_MAX = 256
VALUE_BYTES_MAX = 67_088_384
#: A longer value is stored in parts (sdk/large), up to this.
LARGE_BYTES_MAX = 64 << 30
NAMESPACE_BYTES_MAX = 64
DEFAULT_NAMESPACE = "default"
#: No client may name it, nor a token: values of namespaces without a place in an arena, and counts that are one.
OTHERS_NAMESPACE = "(others)"
OTHERS_REFUSED = f"no namespace may have the name {OTHERS_NAMESPACE}: it stands for several"

DIGEST_BYTES = 16
SHARD_COUNT = 16_384
#: A shard word below this, and not 0, is a plain epoch: the shard is owned and not moving (``wire/shard_set.py``).
PLAIN_BELOW = 1 << 62
#: In a shard map's owner table: the shard has no owner.
NO_OWNER = 0xFFFF

SLOT_BYTES = 64
WAYS = 8
SET_BYTES = SLOT_BYTES * WAYS
#: Owner word of a chunk that belongs to no slot: a granted or detached one.
NO_SLOT = 0xFFFF_FFFF

#: Unit in which whole slabs change their size class; also the huge page size.
SLAB_BYTES = 2 << 20
#: The smallest arena has four slabs.
ARENA_BYTES_MIN = 4 * SLAB_BYTES
#: Bytes of a ring of events, of 32 bytes each.
EVENTS_BYTES_MIN = 1 << 20
EVENTS_BYTES_MAX = 1 << 32
#: Larger values get extents. slab.py explains the share.
SLAB_CHUNK_BYTES_MAX = SLAB_BYTES // 16
CHUNK_ALIGN_BYTES = 64

DEFAULT_MANAGER_PORT = 30_001
FRAME_BYTES_MAX = 1 << 20
BATCH_KEYS_MAX = 4096
#: Ranges of one value in one get, pieces of one value in one put.
RANGES_MAX = 4096
#: Keys of a group.
GROUP_KEYS_MAX = 64
#: Words in which a client counts what it does (ipc/counts.py): a commit ring's header page has so many to spare.
COUNT_WORDS = 448
# Of these, how many keys were looked for one by one and found; and the logs of gets and puts of a single key
# (host/count_log.py): where each begins, and entries of one of its banks.
COUNT_FOUND = 20
COUNT_LOGS = (224, 160), (389, 16)
LOG_GETS, LOG_PUTS = range(len(COUNT_LOGS))
# And a sample of keys that were not there: how many so far, then the upper halves of the last ones' digests, in turn.
COUNT_MISSED, MISSED_KEYS = 410, 32
#: Of so many keys that a worker evicts it remembers one (``arena/events/victims.py``).
GHOST_STEP = 2
#: Attempts to read an entry that changes, before the worker is asked.
READ_ATTEMPTS = 3

assert SLAB_BYTES % HUGE_PAGE_BYTES == 0 and HUGE_PAGE_BYTES % PAGE_BYTES == 0
assert SLAB_CHUNK_BYTES_MAX % PAGE_BYTES == 0
assert PAGE_BYTES % CHUNK_ALIGN_BYTES == 0 and CHUNK_ALIGN_BYTES % CACHE_LINE_BYTES == 0
assert SHARD_COUNT & (SHARD_COUNT - 1) == 0 and SHARD_COUNT < NO_OWNER
assert SET_BYTES % CACHE_LINE_BYTES == 0

#: Names of the eviction policies in ``arena/eviction.py``.
POLICY_NAMES = ("lru", "reuse", "fifo", "sieve")
#: The default policy of settings, data servers and stores.
DEFAULT_POLICY = "lru"
assert DEFAULT_POLICY in POLICY_NAMES

#: Classes in which an entry is kept, and the longest time, seconds: 30 days.
KEEP_SOFT = 1
KEEP_HARD = 2
#: The class of near copies, which nobody asks for by KEEP: evicted first, and dropped after so many seconds.
NEAR = 3
NEAR_S = 300
KEEP_S_MAX = 30 * 24 * 3600
#: Shares of a worker's data, percent: of all hard kept entries, of those of one namespace, of near copies.
KEEP_SHARES = (50, 25, 10)
#: More is not allowed to be given them: others find no room then.
KEEP_SHARE_MAX = 90
NEAR_SHARE_MAX = 50
#: Bit beside the class: the entry may be the manifest of a value in parts, as its parts are kept by the same request.
KEEP_PARTS = 0x80

#: In a folder for traces: what `simm trace start` asks of all clients that use it.
TRACE_CONTROL = "control.json"
#: What an operator asks clients to trace ends by itself after this long at most, seconds: nobody traces for ever.
TRACE_S_MAX = 86_400

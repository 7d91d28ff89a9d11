"""What a client counts of its operations, where its worker sees it: counters and latencies in shared memory.

A read of an arena asks no server, so no server knows of it. The client counts it, by plain stores into the header page
of its commit ring (``ipc/commit_ring.py``). The worker adds up what its sessions have counted, by namespace. It looks
at some of them ten times a second, and once more when a connection is gone. So nothing is lost when a client dies.

    word      what                                                      all by the client
      0..31   counters, see :class:`Word`
     32 + 32 n  latencies of operation n of TIMED: a sum in ns, then BUCKETS numbers of calls
                bucket b has those of at most 2^(b + 10) ns, the last one all others
    224..409  logs of gets and puts of a single key (``host/count_log.py``)
    410..442  a sample of keys that were not there: their number, and the last MISSED_KEYS of them

Words that are not named here are 0; so are those of a client that counts nothing. The numbers (:func:`numbers_in`)
only grow.

**What it costs.** A get or put of a single key stores its bytes into a log, which is 3 % of a get of 4 KiB, and reads
no clock. When a log is full, once in SAMPLE gets and SAMPLE_PUTS puts, it is added up, and a call is timed, without the
hash of its key: two readings of the clock would cost 3 % of a 4 KiB get. Of batches that are got or looked for in an
arena one in SAMPLE_BATCHES is timed, and each that is put. ``benchmarks/counting.py`` measures it all.

**Trust.** The client can store anything, at any time. The worker (``tally.py``) reads words, never an index or a
length. It believes a session whose words only grow, by at most what a process could do in that time:
``COUNTS_A_SECOND``, and ``AMOUNT_A_SECOND`` for bytes and ns. Of a session that breaks this it believes nothing any
more, and says so in the log and in ``simm_sessions_disbelieved_total``. What a client can still do is to lie within
these bounds about itself: in the counts of the namespace that it has named, and in the latencies, which have no
namespace. ``simm ctl clients`` shows what each session claims.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from ..constants import COUNT_FOUND, COUNT_LOGS, COUNT_MISSED, COUNT_WORDS, LOG_GETS, LOG_PUTS, MISSED_KEYS

#: Of so many gets of one key, and puts of one, one is timed.
SAMPLE: Final = COUNT_LOGS[LOG_GETS][1]
SAMPLE_PUTS: Final = COUNT_LOGS[LOG_PUTS][1]
SAMPLE_BATCHES: Final = 8
#: Of so many misses of single keys one is told to the worker, the first one too. A power of two.
SAMPLE_MISSES: Final = 16
MISSES_MASK: Final = SAMPLE_MISSES - 1
#: Operations with latencies. ``_many``: a call's keys at one worker, together.
TIMED: Final = ("get", "get_many", "put", "put_many", "exists_many", "delete")
GET, GET_MANY, PUT, PUT_MANY, EXISTS_MANY, DELETE = range(len(TIMED))
BUCKETS: Final = 24
#: The first bucket has calls of at most 2 to this power, ns.
FIRST_BIT: Final = 10
COUNTERS: Final = 32
#: Words of one operation's latencies, and of all that is counted.
STRIDE: Final = 32
USED: Final = COUNTERS + len(TIMED) * STRIDE
assert BUCKETS + 1 <= STRIDE


class Word:
    """Words of the counters."""

    #: Values got by single gets; bytes of all values got.
    HITS: Final = 0
    HIT_BYTES: Final = 1
    #: Keys that were not stored, or not any more.
    ABSENT: Final = 2
    #: Values of shards that moved, found by a second look; and keys that it did not find.
    MOVED_HITS: Final = 3
    MOVING: Final = 4
    #: Values that did not fit their buffers; that had another checksum, or another namespace.
    WRONG_SIZE: Final = 5
    UNSOUND: Final = 6
    #: Keys that exists() found, and did not find.
    FOUND: Final = 7
    NOT_FOUND: Final = 8
    #: Values put by single puts; bytes of all values put; values put by batches; values not put.
    PUTS: Final = 9
    PUT_BYTES: Final = 10
    BATCH_PUTS: Final = 11
    PUT_FAILURES: Final = 12
    #: Keys deleted, and keys to delete that were not there.
    DELETES: Final = 13
    DELETES_ABSENT: Final = 14
    #: Reads that met a change and began again; that took a pin, as the entry kept changing.
    RETRIES: Final = 15
    PINNED: Final = 16
    #: Values got by batches; values viewed in place.
    BATCH_HITS: Final = 17
    VIEWS: Final = 18
    #: Keys whose server could not be asked: it is gone, has no path, or its connection broke.
    UNREACHABLE: Final = 19
    #: Keys that exists() of one key found, which are among those of FOUND once they are read.
    FOUND_SINGLY: Final = COUNT_FOUND
    #: Keys of ABSENT and NOT_FOUND that were there and were evicted, as the worker says: a client counts none of them.
    EVICTED: Final = 21
    NOT_FOUND_EVICTED: Final = 22
    #: Keys whose server had not answered when the call's deadline passed.
    TIMEOUT: Final = 23
    #: Keys of servers elsewhere that could not be asked, or had not answered in time. A server without an answer cannot
    #: count them, so the client shows them to one of its host.
    AWAY_UNREACHABLE: Final = 24
    AWAY_TIMEOUT: Final = 25


#: The logs, and the words whose numbers their calls and bytes belong to as well.
_LOGS: Final = tuple(
    zip(COUNT_LOGS, ((Word.HITS, Word.HIT_BYTES), (Word.PUTS, Word.PUT_BYTES)))
)  # fmt: skip
_MASK: Final = (1 << 64) - 1

#: By name, as each operation counts in them.
HIT_BYTES: Final = Word.HIT_BYTES
ABSENT: Final = Word.ABSENT
FOUND: Final = Word.FOUND
NOT_FOUND: Final = Word.NOT_FOUND


def numbers_in(words: memoryview, fast: bytes | None = None) -> NDArray[np.uint64] | None:
    """Return the words 0 to USED with what the logs have; None if a log's writer is faster. O(COUNT_WORDS).

    ``fast``: a copy of the words that takes the place of the loads of single words (``Trust``).
    """
    from ..host.count_log import read_log  # which importing the client does not need

    found = np.frombuffer(fast, np.uint64, USED).copy() if fast else np.array(words[:USED].tolist(), np.uint64)
    for place, counted in _LOGS:
        in_log = read_log(words, *place)
        if in_log is None:
            return None
        for word, more in zip(counted, in_log):
            found[word] = int(found[word]) + more & _MASK
    found[FOUND] = int(found[FOUND]) + int(found[COUNT_FOUND]) & _MASK
    found[COUNT_FOUND] = found[Word.EVICTED] = found[Word.NOT_FOUND_EVICTED] = 0
    return found


def missed_keys(words: memoryview, before: int) -> tuple[int, list[int]]:
    """Return how many keys the sample of missed ones has had, and the last ones of those after ``before``."""
    so_far = words[COUNT_MISSED]
    new = min(so_far - before, MISSED_KEYS) if so_far > before else 0
    return so_far, [words[COUNT_MISSED + 1 + at % MISSED_KEYS] for at in range(so_far - new, so_far)]


def new_words() -> memoryview:
    """Return words to count in that no worker sees."""
    return memoryview(bytearray(COUNT_WORDS * 8)).cast("Q")


def observe(words: memoryview, operation: int, ns: int) -> None:
    """Count a call of an operation of TIMED that took so long."""
    at = COUNTERS + operation * STRIDE
    words[at] += ns
    words[at + 1 + bucket_of(ns)] += 1


def bucket_of(ns: int) -> int:
    """Return the bucket of a latency that is not negative."""
    bits = (ns - 1).bit_length() - FIRST_BIT
    return 0 if bits < 0 else bits if bits < BUCKETS else BUCKETS - 1


def bound_s(bucket: int) -> float:
    """Return the longest time in a bucket, seconds; infinity for the last one."""
    return 2.0 ** (FIRST_BIT + bucket) / 1e9 if bucket < BUCKETS - 1 else float("inf")

"""What a client counts of its operations, where its worker sees it: counters and latencies in shared memory.

A read of an arena asks no server, so no server knows of it. The client counts it, by plain stores into the header page
of its commit ring (``ipc/commit_ring.py``). The worker adds up what its sessions have counted, by namespace. It looks
at some of them ten times a second, and once more when a connection is gone. So nothing is lost when a client dies.

    word      what                                                      all by the client
      0..31   counters, see :class:`Word`
     32 + 32 n  latencies of operation n of TIMED: a sum in ns, then BUCKETS numbers of calls
                bucket b has those of at most 2^(b + 10) ns, the last one all others

Words that are not named here are 0; so are those of a client that counts nothing. They only grow.

**What it costs.** A get stores two words, for the hit and its bytes, and reads no clock. One get and one put in
SAMPLE is timed: two readings of the clock would cost 3 % of a 4 KiB get. Of batches that are got or looked for in an
arena one in SAMPLE_BATCHES is timed, and each that is put. To read a word of shared memory, add to it and store it
takes three times as long as the store alone. So the two words of a single get are its alone, and their sums are kept
beside them (``arena/reader.py``, ``Singles``). ``benchmarks/counting.py`` measures it all.

**Trust.** The client can store anything, at any time. The worker (``tally.py``) reads words, never an index or a
length. It believes a session whose words only grow, by at most what a process could do in that time:
``COUNTS_A_SECOND``, and ``AMOUNT_A_SECOND`` for bytes and ns. Of a session that breaks this it believes nothing any
more, and says so in the log and in ``simm_sessions_disbelieved_total``. What a client can still do is to lie within
these bounds about itself: in the counts of the namespace that it has named, and in the latencies, which have no
namespace. ``simm ctl clients`` shows what each session claims.
"""

from __future__ import annotations

from typing import Final

from ..constants import COUNT_HIT_BYTES, COUNT_HITS, COUNT_WORDS

#: Of so many gets of one key, and puts of one, one is timed. A power of two.
SAMPLE: Final = 64
SAMPLE_MASK: Final = SAMPLE - 1
SAMPLE_BATCHES: Final = 8
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
assert BUCKETS + 1 <= STRIDE and USED <= COUNT_WORDS


class Word:
    """Words of the counters."""

    #: Values got by single gets; bytes of values got in other ways.
    HITS: Final = COUNT_HITS
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
    #: Keys whose server did not answer.
    UNREACHABLE: Final = 19
    #: Bytes of values got by single gets, which are not in HIT_BYTES.
    SINGLE_BYTES: Final = COUNT_HIT_BYTES


#: By name, as each operation counts in them.
HITS: Final = Word.HITS
HIT_BYTES: Final = Word.HIT_BYTES
SINGLE_BYTES: Final = Word.SINGLE_BYTES
ABSENT: Final = Word.ABSENT
FOUND: Final = Word.FOUND
NOT_FOUND: Final = Word.NOT_FOUND
PUTS: Final = Word.PUTS
PUT_BYTES: Final = Word.PUT_BYTES


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

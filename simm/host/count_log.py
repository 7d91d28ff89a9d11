"""A log of calls in shared memory: a call is counted by one store, and nothing is lost when its process is killed.

To read a word of shared memory, add to it and store it takes three times as long as the store alone, and a call that
counts itself and its bytes does so twice. So a call only stores its amount into the next free entry of the log:

    for entry in log.free:
        log.entries[entry] = amount  # 1 to 2^32 - 1
        return
    log.add(amount)

No switch of threads can come between the two lines, as they call nothing. An iterator that has no entry left says so
at no cost to the others. Then :meth:`CountLog.add` adds the log up, and goes on in the other one of two banks:

    word        what
      0         turn: how often a bank was left; its lowest bit is the bank that is filled
      1, 2      calls that were counted before the bank 0, 1 was begun
      3, 4      the sum of their amounts
      5...      the banks, one after the other: 32 bits an entry, 0 for one that is free

The next bank is cleared and its two sums are stored while nobody looks at it. The store of ``turn`` then makes it the
one that counts. So a reader, who compares the turns before and after (:func:`read_log`), finds each call once at any
time, whenever the writer is stopped or dies.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Final

from ..constants import COUNT_FOUND, COUNT_LOGS, COUNT_MISSED, LOG_GETS, MISSED_KEYS, READ_ATTEMPTS

_BANKS: Final = 5
_MASK: Final = (1 << 64) - 1
#: Attempts of a reader to see one turn only.
_ATTEMPTS: Final = 4


def log_words(entries: int) -> int:
    """Return how many words a log of two banks of so many entries takes."""
    return _BANKS + entries


#: Where each log begins and ends, and what comes next.
_PLACES: Final = [*(place for at, size in COUNT_LOGS for place in (at, at + log_words(size))), COUNT_MISSED]
assert sorted(_PLACES) == _PLACES


class CountLog:
    """The writer's side of the log that begins at a word. ``size``: entries of a bank. Any thread may count in it."""

    __slots__ = (
        "_at", "_banks", "_begun", "_clear", "_lock", "_order", "_seen", "_words", "entries", "free",
    )  # fmt: skip

    def __init__(self, words: memoryview, entries: memoryview, at: int, size: int) -> None:
        self._words, self._at = words, at
        #: All words, as entries.
        self.entries = entries
        first = (at + _BANKS) * 2
        self._banks = entries[first : first + size], entries[first + size : first + 2 * size]
        # An index that is made anew each time would take longer than its store.
        self._order = tuple(range(first, first + size)), tuple(range(first + size, first + 2 * size))
        self._clear = memoryview(bytes(size * 4)).cast("I")
        turn: int = words[at]
        bank = turn & 1
        #: The turn of the bank that is filled, and the calls and their amount before it was begun.
        self._begun: tuple[int, int, int] = turn, words[at + 1 + bank], words[at + 3 + bank]
        #: How a bank was filled that has been added up, its calls, and their amount.
        self._seen = bytes(size * 4), 0, 0
        #: A finalizer that counts may run in the middle of :meth:`add`.
        self._lock = threading.RLock()
        #: Entries of the bank that is filled that no call has taken.
        self.free: Iterator[int] = iter(())
        self._next_bank()

    def add(self, amount: int) -> None:
        """Count a call when no entry was free. O(entries)."""
        with self._lock:
            while True:
                for at in self.free:  # of the bank that another thread has begun, or this one
                    self.entries[at] = amount
                    return
                self._next_bank()

    def _next_bank(self) -> None:
        """Go on in the other bank. An exception between any two lines loses nothing: the next call does it again."""
        turn, calls, amount = before = self._begun
        whole = slice(None)
        seen = self._banks[turn & 1].tobytes()
        if seen != self._seen[0]:  # values of one length fill it alike each time
            amounts = memoryview(seen).cast("I").tolist()
            self._seen = seen, len(amounts) - amounts.count(0), sum(amounts)
        turn = turn + 1 & _MASK
        bank = turn & 1
        begun = turn, calls + self._seen[1] & _MASK, amount + self._seen[2] & _MASK
        words, at = self._words, self._at
        if self._begun is not before:  # by a finalizer that has counted; from here on none runs
            return
        self._banks[bank][whole] = self._clear
        _, words[at + 1 + bank], words[at + 3 + bank] = begun
        words[at] = turn
        self._begun = begun
        self.free = iter(self._order[bank])


class CallLogs:
    """The counts of a reader's user, and its logs. It is the reader itself: to reach another object takes longer."""

    #: Where it counts what it does (``ipc/counts.py``).
    counts: memoryview
    #: Of its calls with a single key, by LOG_GETS, LOG_PUTS; and the entries of all.
    logs: tuple[CountLog, ...]
    entries: memoryview
    #: For each attempt of a get, what to take an entry of when it succeeds. Empty if the next get is to be timed.
    attempts: tuple[Iterator[int], ...]
    #: How many keys that were looked for one by one were found. Store it into its word in the same statement, and
    #: first: a thread that does so meanwhile may undo one count, but never store less than is there.
    founds: int

    def count_in(self, words: memoryview) -> None:
        """Let its user count in these words from now on."""
        self.counts = words
        # The words first: a thread may store what an old iterator gave into new words, never the other way round.
        self.entries = entries = words.cast("B").cast("I")
        self.logs = tuple(CountLog(words, entries, at, size) for at, size in COUNT_LOGS)
        self.resume()
        self.founds = words[COUNT_FOUND]

    def resume(self) -> None:
        """Let gets find their entries in :attr:`attempts` again."""
        self.attempts = (self.logs[LOG_GETS].free,) * READ_ATTEMPTS

    def missed(self, digest: bytes) -> None:
        """Let the worker see a key that is not there, so that it can tell whether it has evicted it. O(1).

        It sees the half of the digest by which it remembers keys: ``Table.key_words``. Threads that do so together may
        lose one of them.
        """
        words, key = self.counts, int.from_bytes(digest[:8], "little")
        so_far = words[COUNT_MISSED]
        words[COUNT_MISSED + 1 + so_far % MISSED_KEYS] = key
        words[COUNT_MISSED] = so_far + 1 & _MASK

    def count_more(self, log: int, amount: int) -> None:
        """Count a call whose log has no free entry. After a get, let the next one be timed. O(entries)."""
        self.logs[log].add(amount)
        if log == LOG_GETS:
            self.attempts = ()


def read_log(words: memoryview, at: int, size: int) -> tuple[int, int] | None:
    """Return the calls that a log has and the sum of their amounts, modulo 2^64; None if its writer is faster.

    Nothing that a writer may store does more than to change these two numbers. O(entries).
    """
    for _ in range(_ATTEMPTS):
        turn = words[at]
        bank = turn & 1
        begin = at + _BANKS + bank * size // 2
        calls, amount = words[at + 1 + bank], words[at + 3 + bank]
        entries = words[begin : begin + size // 2].cast("B").cast("I").tolist()
        if words[at] == turn:
            return calls + size - entries.count(0) & _MASK, amount + sum(entries) & _MASK
    return None

"""Calls counted by one store each: every one is found once, whenever the writer is looked at, stopped or killed."""

from __future__ import annotations

import hashlib
import random
import sys
import threading
from typing import Any

import pytest

from simm.constants import COUNT_LOGS, COUNT_MISSED, COUNT_WORDS, GHOST_STEP, LOG_GETS, LOG_PUTS, MISSED_KEYS
from simm.host.count_log import CallLogs, CountLog, log_words, read_log
from simm.ipc.counts import USED, Word, new_words, numbers_in
from simm.ipc.tally import Tally

AT, SIZE = 3, 8


def new_log(words: memoryview) -> CountLog:
    return CountLog(words, words.cast("B").cast("I"), AT, SIZE)


def count(log: CountLog, amount: int) -> None:
    """Count as callers do."""
    for entry in log.free:
        log.entries[entry] = amount
        return
    log.add(amount)


def test_nothing_lies_over_something_else() -> None:
    ends = [USED]
    for at, size in COUNT_LOGS:
        ends += [at, at + log_words(size)]
    ends += [COUNT_MISSED, COUNT_MISSED + 1 + MISSED_KEYS, COUNT_WORDS]
    assert sorted(ends) == ends


def test_each_call_and_its_amount_are_there_at_once() -> None:
    rng = random.Random(5)
    words = new_words()
    log, calls, amount = new_log(words), 0, 0
    for _ in range(20 * SIZE):
        more = rng.choice((1, 4096, 4096, (1 << 32) - 1))
        count(log, more)
        calls, amount = calls + 1, amount + more
        assert read_log(words, AT, SIZE) == (calls, amount)
    assert not any(words[:AT]) and not any(words[AT + log_words(SIZE) :]), "it stores nothing elsewhere"


def test_another_writer_counts_on_from_what_is_there() -> None:
    """When a session gets its ring, and when it ends, a reader counts in other words."""
    words = new_words()
    for begun in range(5):
        log = new_log(words)
        for _ in range(begun):
            count(log, 100)
    assert read_log(words, AT, SIZE) == (10, 1000)


class Stores:
    """Words that end their writer before one of its stores: those of a process that is killed there."""

    def __init__(self, real: memoryview, left: list[int]) -> None:
        self.real, self.left = real, left

    def __getitem__(self, at: Any) -> Any:
        found = self.real[at]
        return Stores(found, self.left) if isinstance(found, memoryview) else found

    def __setitem__(self, at: Any, value: Any) -> None:
        if not self.left[0]:
            raise InterruptedError
        self.left[0] -= 1
        self.real[at] = value

    def tobytes(self) -> bytes:
        return self.real.tobytes()


def killed_before(store: int) -> tuple[int, int, tuple[int, int] | None]:
    """Return calls that were counted by then, their amount, and what a reader finds."""
    words = new_words()
    calls = amount = 0
    left = [10_000]
    stored: Any = Stores(words, left)
    entries: Any = Stores(words.cast("B").cast("I"), left)
    log = CountLog(stored, entries, AT, SIZE)
    left[0] = store
    try:
        for number in range(1, 4 * SIZE):
            count(log, number)
            calls, amount = calls + 1, amount + number
    except InterruptedError:
        pass
    return calls, amount, read_log(words, AT, SIZE)


def test_a_writer_that_is_killed_between_any_two_stores_has_lost_nothing() -> None:
    for store in range(4 * SIZE + 20):
        calls, amount, found = killed_before(store)
        assert found == (calls, amount), store


def test_mutation_sums_that_are_stored_after_the_turn_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: CountLog) -> None:
        turn, calls, amount = self._begun
        bank = 1 - (turn & 1)
        amounts = [self.entries[at] for at in self._order[turn & 1]]
        self._banks[bank][:] = self._clear
        self._begun = turn + 1, calls + SIZE - amounts.count(0), amount + sum(amounts)
        self._words[AT], self._words[AT + 1 + bank], self._words[AT + 3 + bank] = self._begun
        self.free = iter(self._order[bank])

    monkeypatch.setattr(CountLog, "_next_bank", wrong)
    found = [killed_before(store) for store in range(4 * SIZE + 20)]
    assert any(seen != (calls, amount) for calls, amount, seen in found)


class Interrupted(BaseException):
    """What a signal's handler raises, wherever its thread is."""


def test_an_exception_between_any_two_lines_loses_and_adds_nothing() -> None:
    """Each turn of the banks is interrupted once, a line later each time, and all counts go on after that."""
    for stop in range(20):
        words = new_words()
        log = new_log(words)
        calls = struck = left = 0
        again = False

        def look(frame: Any, event: str, _: object) -> Any:
            nonlocal left, struck
            if event == "line":
                if not left:
                    sys.settrace(None)
                    struck += 1
                    raise Interrupted
                left -= 1
            return look if frame.f_code is CountLog._next_bank.__code__ else None

        for number in range(5 * SIZE):
            left = stop
            before = sys.gettrace()
            sys.settrace(before if again else look)
            try:
                count(log, 3)
                calls += 1
                again = False
            except Interrupted:
                again = True
            finally:
                sys.settrace(before)
            found = read_log(words, AT, SIZE)
            assert found == (calls, 3 * calls), (stop, number)
        assert struck > 3 or stop > 10


def test_threads_lose_none_and_a_reader_beside_them_sees_numbers_that_grow() -> None:
    words = new_words()
    log, each, threads = new_log(words), 20_000, 4
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    seen: list[tuple[int, int]] = []
    try:
        workers = [
            threading.Thread(target=lambda: [count(log, 7) for _ in range(each)] and None) for _ in range(threads)
        ]
        for worker in workers:
            worker.start()
        while any(worker.is_alive() for worker in workers):
            if (found := read_log(words, AT, SIZE)) is not None:
                seen.append(found)
        for worker in workers:
            worker.join()
    finally:
        sys.setswitchinterval(interval)
    assert read_log(words, AT, SIZE) == (threads * each, threads * each * 7)
    assert seen == sorted(seen) and all(amount == 7 * calls for calls, amount in seen)


def test_a_reader_that_meets_a_turn_says_so() -> None:
    words = new_words()
    new_log(words)

    class Turning:
        """The writer leaves a bank between any two looks."""

        turn = 0

        def __getitem__(self, at: Any) -> Any:
            if at == AT:
                self.turn += 1
                return self.turn
            return words[at]

    turning: Any = Turning()
    assert read_log(turning, AT, SIZE) is None
    assert turning.turn > 2, "and has tried"


def test_logs_count_to_the_words_of_their_operations() -> None:
    words = new_words()
    words[Word.HIT_BYTES], words[Word.FOUND] = 1000, 5
    logs = CallLogs()
    logs.count_in(words)
    for _ in range(3 * COUNT_LOGS[LOG_GETS][1]):
        for entry in logs.attempts[0] if logs.attempts else ():
            logs.entries[entry] = 7
            break
        else:
            if not logs.attempts:
                logs.resume()
            logs.count_more(LOG_GETS, 7)
            assert not logs.attempts, "the next one is timed"
    for _ in range(200):
        logs.count_more(LOG_PUTS, 11)
        words[Word.FOUND_SINGLY] = logs.founds = logs.founds + 1
    numbers = numbers_in(words)
    assert numbers is not None
    gets = 3 * COUNT_LOGS[LOG_GETS][1]
    assert {word: number for word, number in enumerate(numbers.tolist()) if number} == {
        Word.HITS: gets, Word.HIT_BYTES: 1000 + 7 * gets, Word.FOUND: 205, Word.PUTS: 200, Word.PUT_BYTES: 2200,
    }  # fmt: skip


def test_a_log_whose_writer_is_faster_waits_for_the_next_look(monkeypatch: pytest.MonkeyPatch) -> None:
    tally = Tally(lambda: 0.0, lambda: ())
    logs = CallLogs()
    logs.count_in(new_words())
    tally.open(1, "a", logs.counts)
    logs.count_more(LOG_PUTS, 9)
    monkeypatch.setattr("simm.host.count_log.read_log", lambda *_: None)
    tally.maintain()
    assert not any(tally.totals.counters("a"))
    monkeypatch.undo()
    tally.maintain()
    assert tally.totals.counters("a")[Word.PUT_BYTES] == 9 and not tally.disbelieved


def test_misses_are_shared_out_as_a_sample_of_their_keys_is() -> None:
    """All that the sample cannot say stays as it was said last; the sum is exact."""
    gone = {digest_of(number) for number in range(300)}
    evicted = {int.from_bytes(digest[:8], "little") for digest in gone}
    tally = Tally(lambda: 0.0, lambda: (), evicted.__contains__)
    logs = CallLogs()
    logs.count_in(new_words())
    tally.open(1, "a", logs.counts)
    counters = tally.totals.counters("a")
    for number in range(16):  # three of eight are noted, so three of four were evicted
        logs.counts[Word.ABSENT] += 10
        logs.missed(digest_of(number if 0 < number % 8 < 1 + 6 // GHOST_STEP else 1000 + number))
    tally.maintain()
    assert (counters[Word.ABSENT], counters[Word.EVICTED]) == (40, 120)
    logs.counts[Word.NOT_FOUND] += 5
    tally.maintain()
    logs.counts[Word.NOT_FOUND] += 3
    tally.maintain()
    assert (counters[Word.NOT_FOUND], counters[Word.NOT_FOUND_EVICTED]) == (2, 6), "without a new key: as before"
    for number in range(2000, 2000 + 3 * MISSED_KEYS):
        logs.missed(digest_of(number))
    logs.counts[Word.ABSENT] += 7
    tally.maintain()
    assert (counters[Word.ABSENT], counters[Word.EVICTED]) == (47, 120), "the last keys were never there"
    for number in range(16):
        logs.missed(digest_of(number % 3 + 1))
    logs.counts[Word.ABSENT] += 10
    tally.maintain()
    assert (counters[Word.ABSENT], counters[Word.EVICTED]) == (47, 130), "more than all, by chance"
    for number in range(MISSED_KEYS):
        logs.missed(digest_of(3000 + number))
    logs.counts[Word.ABSENT] += 20
    tally.maintain()
    assert (counters[Word.ABSENT], counters[Word.EVICTED]) == (57, 140), "what was too many is of those that follow"


def test_what_a_client_says_of_evictions_itself_is_not_believed() -> None:
    tally = Tally(lambda: 0.0, lambda: (), lambda _key: False)
    words = new_words()
    tally.open(1, "a", words)
    words[Word.EVICTED] = words[Word.NOT_FOUND_EVICTED] = words[Word.ABSENT] = 5
    for so_far in (1, 1 << 63, (1 << 64) - 1, 3):
        words[COUNT_MISSED] = so_far
        words[Word.ABSENT] += 1
        tally.maintain()
    counters = tally.totals.counters("a")
    assert (counters[Word.ABSENT], counters[Word.EVICTED], counters[Word.NOT_FOUND_EVICTED]) == (9, 0, 0)


def digest_of(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(4, "little")).digest()[:16]

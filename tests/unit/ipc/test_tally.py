"""What clients count in shared memory: the words, a worker's sums, and clients that store what they please."""

from __future__ import annotations

import ast
import os
import random
import threading
import weakref
from collections.abc import Iterator
from itertools import count as numbers

import numpy as np
import pytest
from numpy.typing import NDArray

from simm.constants import COUNT_WORDS, OTHERS_NAMESPACE
from simm.ipc.commit_ring import Ring
from simm.ipc.counts import (
    BUCKETS,
    COUNTERS,
    GET,
    PUT,
    STRIDE,
    TIMED,
    USED,
    Word,
    bound_s,
    new_words,
    numbers_in,
    observe,
)
from simm.ipc.tally import (
    AMOUNT_A_SECOND,
    COUNTS_A_SECOND,
    LOOK_SESSIONS,
    MISSES,
    NAMESPACES_MAX,
    Continued,
    Served,
    Tallies,
    Tally,
    Totals,
    quantile_s,
    summary,
)
from simm.net.admission import LINES_MAX
from simm.wire.status import Status
from tests.support.child import ROOT
from tests.support.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock(100.0)


@pytest.fixture
def tally(clock: Clock) -> Tally:
    return Tally(clock, lambda: ["a", "b"])


def test_each_word_has_a_place_of_its_own() -> None:
    words = [value for name, value in vars(Word).items() if name.isupper()]
    assert sorted(words) == list(range(len(words))) and len(words) <= COUNTERS
    assert {word for several in MISSES.values() for word in several} <= set(words)


def test_words_are_the_clients_alone() -> None:
    """They overlap with nothing else in the ring, and the worker sees the client's stores at once."""
    mine, fd = Ring.create()
    theirs = Ring.attach(fd)
    os.close(fd)
    try:
        before = bytes(theirs._bytes)
        for at in range(COUNT_WORDS):
            mine.counts[at] = (1 << 64) - 1
        changed = [at for at, (old, new) in enumerate(zip(before, bytes(theirs._bytes))) if old != new]
        assert len(changed) == COUNT_WORDS * 8 and theirs.next_request() is None and theirs.next_commit() is None
    finally:
        mine.close()
        theirs.close()


@pytest.mark.parametrize("ns", [0, 1, 1023, 1024, 1025, 4096, 4097, 123_456_789, 1 << 32, (1 << 32) + 1, 1 << 50])
def test_a_latency_is_in_the_smallest_bucket_that_holds_it(ns: int) -> None:
    words = new_words()
    observe(words, PUT, ns)
    at = COUNTERS + PUT * STRIDE
    (bucket,) = [bucket for bucket in range(BUCKETS) if words[at + 1 + bucket]]
    assert ns / 1e9 <= bound_s(bucket) and (not bucket or ns / 1e9 > bound_s(bucket - 1))
    assert words[at] == ns and sum(words) == ns + 1
    totals = Totals()
    totals.observe(PUT, ns)
    assert totals.latencies["put"] == words[at : at + BUCKETS + 1].tolist(), "servers count in the same buckets"


def test_quantiles_are_bounds_of_buckets() -> None:
    totals = Totals()
    assert quantile_s([0] * (BUCKETS + 1), 0.5) is None
    for ns in [2000] * 98 + [1_000_000] * 2:
        totals.observe(GET, ns)
    assert quantile_s(totals.latencies["get"], 0.5) == 2048e-9
    assert quantile_s(totals.latencies["get"], 0.99) == 2.0**20 / 1e9
    totals.observe(GET, 1 << 60)
    assert quantile_s(totals.latencies["get"], 1.0) == bound_s(BUCKETS - 2), "a number, not infinity"


# -- sums --------------------------------------------------------------------------------------------


def test_sums_are_those_of_a_naive_model(tally: Tally, clock: Clock) -> None:
    """Sessions come, count, are looked at and go; nothing is lost, and nothing is counted twice."""
    rng = random.Random(7)
    model: dict[str, list[int]] = {}
    latencies = {operation: [0] * (BUCKETS + 1) for operation in TIMED}
    live: dict[int, tuple[str, memoryview]] = {}
    fresh = numbers(1)
    for _ in range(3000):
        clock.now += rng.random()
        step = rng.random()
        if step < 0.1 or not live:
            number, name = next(fresh), rng.choice("ab")
            live[number] = name, new_words()
            tally.open(number, *live[number])
        elif step < 0.15:
            number = rng.choice(list(live))
            tally.close(number)
            del live[number]
        elif step < 0.3:
            tally.maintain()
        else:
            name, words = live[rng.choice(list(live))]
            if rng.random() < 0.5:
                word, amount = rng.randrange(COUNTERS), rng.randrange(10_000)
                words[word] += amount
                model.setdefault(name, [0] * COUNTERS)[word] += amount
            else:
                operation, ns = rng.randrange(len(TIMED)), rng.randrange(1, 1 << 34)
                observe(words, operation, ns)
                mine = latencies[TIMED[operation]]
                mine[0] += ns
                (at,) = [at for at in range(BUCKETS) if ns / 1e9 <= bound_s(at)][:1]
                mine[1 + at] += 1
    for number in list(live):
        tally.close(number)
    assert not tally.sessions and not tally.disbelieved
    for counters in model.values():
        counters[Word.FOUND] += counters[Word.FOUND_SINGLY]
        counters[Word.FOUND_SINGLY] = counters[Word.EVICTED] = counters[Word.NOT_FOUND_EVICTED] = 0
    assert tally.totals.namespaces == model
    assert tally.totals.latencies == latencies


def test_a_look_takes_in_a_bounded_number_of_sessions_in_turn(tally: Tally) -> None:
    words = [new_words() for _ in range(3 * LOOK_SESSIONS)]
    for number, each in enumerate(words):
        tally.open(number, "a", each)
        each[Word.HITS] = 1
    for seen in (1, 2, 3, 3):
        tally.maintain()
        assert tally.totals.counters("a")[Word.HITS] == seen * LOOK_SESSIONS


def test_the_memory_of_a_closed_session_is_let_go(tally: Tally) -> None:
    words = new_words()
    tally.open(1, "a", words)
    tally.maintain()
    tally.close(1)
    tally.close(1)
    words.release()  # a BufferError if anything still refers to it
    tally.maintain()


# -- clients that store what they please -------------------------------------------------------------


@pytest.mark.parametrize("word", [Word.HITS, Word.HIT_BYTES, COUNTERS, COUNTERS + 1, USED - 1])
@pytest.mark.parametrize("value", [(1 << 64) - 1, 1 << 63, AMOUNT_A_SECOND * 100])
def test_nonsense_is_not_counted_and_spoils_nothing(tally: Tally, clock: Clock, word: int, value: int) -> None:
    mine, theirs = new_words(), new_words()
    tally.open(1, "a", mine)
    tally.open(2, "a", theirs)
    mine[Word.HITS] = theirs[Word.HITS] = 5
    tally.maintain()
    clock.now += 1
    mine[word] = value
    theirs[Word.HITS] += 2
    tally.maintain()
    assert tally.disbelieved == 1
    assert tally.totals.counters("a")[Word.HITS] == 12
    mine[word] = 6  # and no more of it is believed
    clock.now += 1e6
    tally.maintain()
    tally.close(1)
    assert tally.disbelieved == 1 and tally.totals.counters("a") == [12, *[0] * (COUNTERS - 1)]
    assert not any(map(sum, tally.totals.latencies.values()))


def test_words_that_shrink_are_not_believed(tally: Tally, clock: Clock) -> None:
    words = new_words()
    tally.open(1, "a", words)
    words[Word.PUTS] = 10
    tally.maintain()
    words[Word.PUTS] = 9
    clock.now += 1
    tally.maintain()
    assert tally.disbelieved == 1 and tally.totals.counters("a")[Word.PUTS] == 10


def test_what_a_process_could_do_is_believed(tally: Tally, clock: Clock) -> None:
    words = new_words()
    tally.open(1, "a", words)
    for _ in range(20):
        clock.now += 10
        words[Word.FOUND] += COUNTS_A_SECOND * 10
        words[Word.HIT_BYTES] += AMOUNT_A_SECOND * 10
        tally.maintain()
    assert not tally.disbelieved and tally.totals.counters("a")[Word.FOUND] == COUNTS_A_SECOND * 200


def test_mutation_without_the_bound_one_client_spoils_the_sum(monkeypatch: pytest.MonkeyPatch, tally: Tally) -> None:
    monkeypatch.setattr(Tally, "_plausible", staticmethod(lambda *_: True))
    words = new_words()
    tally.open(1, "a", words)
    words[Word.HITS] = (1 << 64) - 1
    tally.maintain()
    assert tally.totals.counters("a")[Word.HITS] == (1 << 64) - 1


@pytest.mark.parametrize("seed", range(20))
def test_random_stores_raise_nothing_and_only_grow(tally: Tally, clock: Clock, seed: int) -> None:
    rng = random.Random(seed)
    words = new_words()
    tally.open(1, "a", words)
    before = [0] * COUNTERS
    for _ in range(200):
        clock.now += rng.random()
        words[rng.randrange(COUNT_WORDS)] = rng.getrandbits(rng.randrange(1, 65))
        tally.maintain()
        now = list(tally.totals.counters("a"))
        assert all(new >= old for old, new in zip(before, now))
        before = now


def test_namespaces_are_bounded(tally: Tally) -> None:
    for number in range(3 * NAMESPACES_MAX):
        words = new_words()
        tally.open(number, f"n{number}", words)
        words[Word.HITS] = 1
        tally.close(number)
    assert len(tally.totals.namespaces) == NAMESPACES_MAX + 1
    assert sum(counters[0] for counters in tally.totals.namespaces.values()) == 3 * NAMESPACES_MAX, "and none is lost"
    assert tally.totals.counters(OTHERS_NAMESPACE)[Word.HITS] == 2 * NAMESPACES_MAX
    tally.totals.counters("a")[Word.HITS] += 1
    tally.maintain()
    assert set(tally.totals.namespaces) == {OTHERS_NAMESPACE}, "the arena has none of the others"


# -- totals over processes, and a client's own ------------------------------------------------------


def test_a_restart_takes_nothing_back() -> None:
    sums = Continued()
    assert sums.totals().namespaces == {}
    first, second = Totals(), Totals()
    first.counters("a")[Word.HITS] += 5
    first.observe(GET, 5000)
    sums.take(10, first.as_json())
    first.counters("a")[Word.HITS] += 2
    sums.take(10, first.as_json())
    second.counters("a")[Word.HITS] += 1
    second.counters("b")[Word.PUTS] += 1
    sums.take(11, second.as_json())
    sums.take(11, second.as_json())
    found = sums.totals()
    assert found.counters("a")[Word.HITS] == 8 and found.counters("b")[Word.PUTS] == 1
    assert sum(found.latencies["get"][1:]) == 1


class Arena:
    """Stands for a reader."""


@pytest.fixture
def tallies() -> Iterator[Tallies]:
    yield Tallies()


def test_a_client_adds_up_what_it_counts_and_lets_go_of_what_it_left(tallies: Tallies) -> None:
    arena = Arena()
    words = new_words()
    tallies.add(weakref.ref(arena), words)
    words[Word.HITS] += 3
    words[Word.ABSENT] += 2
    tallies.tcp[Word.BATCH_HITS] += 4
    observe(words, GET, 5000)
    assert tallies.outside_counters() == (3, 2, 0)
    found = {path: summary(totals) for path, totals in tallies.totals().items()}
    assert found["shm"]["hits"] == 3 and found["shm"]["misses"]["absent"] == 2 and found["tcp"]["hits"] == 4
    assert found["shm"]["seconds"]["get"] == {"calls_timed": 1, "p50": 8192e-9, "p99": 8192e-9}
    del arena
    assert tallies.outside_counters() == (3, 2, 0)
    words.release()  # a BufferError if it were still there
    tallies.after_fork()  # in the child of a fork that met another thread in the middle
    assert tallies.outside_counters() == (0, 0, 0)


def test_keys_of_servers_elsewhere_that_do_not_answer_are_counted_once(tallies: Tallies) -> None:
    """Where the client counts all of its own; and by a server of its host, which no other one could take for it."""
    tallies.unanswered(tallies.tcp, 1, 2)  # there is no arena to show it in
    arena, gone = Arena(), Arena()
    words, old = new_words(), new_words()
    tallies.add(weakref.ref(arena), words)
    tallies.add(weakref.ref(gone), old)
    del gone
    words[Word.TIMEOUT] += 7  # at the arena's own worker
    tallies.unanswered(tallies.rdma, 10, 20)
    found = {path: summary(totals)["misses"] for path, totals in tallies.totals().items()}
    seen = {path: (misses["unreachable"], misses["timeout"]) for path, misses in found.items()}
    assert seen == {"shm": (0, 7), "rdma": (10, 20), "tcp": (1, 2)}
    shm, tcp = Totals(), Totals()
    shm.add_words("a", numbers_of(words))
    shm.move_away(tcp)
    shm.move_away(tcp)  # there is nothing left
    shown = [{reason: count for reason, count in summary(totals)["misses"].items() if count} for totals in (shm, tcp)]
    assert shown == [{"timeout": 7}, {"unreachable": 10, "timeout": 20}] and list(tcp.namespaces) == ["a"]


def numbers_of(words: memoryview) -> NDArray[np.uint64]:
    found = numbers_in(words)
    assert found is not None
    return found


def test_threads_that_look_while_sessions_end_count_each_once(tallies: Tallies) -> None:
    stop = threading.Event()
    wrong: list[int] = []

    def look() -> None:
        before = 0
        while not stop.is_set():
            now = tallies.outside_counters()[0]
            if now < before:
                wrong.append(now)
            before = now

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(200):
        arena, words = Arena(), new_words()
        words[Word.HITS] = 1
        tallies.add(weakref.ref(arena), words)
        del arena
    stop.set()
    for thread in threads:
        thread.join(30.0)
        assert not thread.is_alive()
    assert not wrong and tallies.outside_counters()[0] == 200


def test_sessions_that_end_leave_nothing_and_all_have_their_turn() -> None:
    """A queue of turns kept the numbers of ended sessions, and a live one waited behind them."""
    tally = Tally(lambda: 0.0, lambda: ())
    kept = [new_words() for _ in range(3 * LOOK_SESSIONS)]
    for number, words in enumerate(kept):
        tally.open(number, "n", words)
    for number in range(1000, 6000):
        tally.open(number, "n", new_words())
        tally.close(number)
    assert len(tally.sessions) == len(kept)
    for words in kept:
        words[Word.HITS] = 1
    for turns in range(1, 4):
        tally.maintain()
        assert tally.totals.counters("n")[Word.HITS] == turns * LOOK_SESSIONS


@pytest.mark.parametrize("known", [True, False], ids=["", "control"])
def test_issue_a_client_that_names_very_many_namespaces_takes_no_counters(known: bool) -> None:
    """By TCP a name costs nothing. A name that the arena has keeps its counters; the control knows no names."""
    served = Served((lambda: {"red", "blue"}) if known else None)
    served.looked("red", [Status.OK], 0)
    for number in range(3 * NAMESPACES_MAX):
        served.looked(f"made up {number}", [Status.OK], 0)
    served.looked("blue", [Status.OK], 0)
    assert len(served.namespaces) <= NAMESPACES_MAX + 1
    assert ("red" in served.namespaces, "blue" in served.namespaces) == (True, known)
    assert (served.namespaces.get("blue") or served.counters(OTHERS_NAMESPACE))[Word.FOUND] >= 1


@pytest.mark.parametrize("name", ["a\nb", "\x1b[31m", "a\0", "a\u202eb", "a\u2028b"])
def test_issue_a_name_that_acts_on_a_page_is_one_of_others(name: str) -> None:
    served = Served()
    served.looked(name, [Status.OK], 0)
    served.looked("a b/\"{c}\\", [Status.OK], 0)
    assert set(served.namespaces) == {OTHERS_NAMESPACE, "a b/\"{c}\\"}
    assert served.namespaces[OTHERS_NAMESPACE][Word.FOUND] == 1


def test_issue_sessions_that_claim_nonsense_one_after_the_other_fill_no_log(
    tally: Tally, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(1000):
        words = new_words()
        tally.open(number, "a", words)
        words[Word.HITS] = (1 << 64) - 1
        tally.close(number)
    assert tally.disbelieved == 1000 and 0 < len(caplog.records) <= LINES_MAX


def test_a_sum_of_several_processes_lumps_nothing() -> None:
    together = Totals(None)
    for process in range(3):
        one = Totals()
        for number in range(NAMESPACES_MAX):
            one.counters(f"{process} {number}")[Word.HITS] += 1
        together.add(one.as_json())
    assert len(together.namespaces) == 3 * NAMESPACES_MAX and OTHERS_NAMESPACE not in together.namespaces


# -- threads that share words ------------------------------------------------------------------------


def calls_while_counting(text: str) -> list[str]:
    """``counts[WORD] += f()``: the word is read before the call and stored after it, and a thread that counts in
    between is undone. Return such statements; without a call there is no switch of threads in one."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.AugAssign | ast.Assign):
            continue
        target = node.target if isinstance(node, ast.AugAssign) else node.targets[0]
        if isinstance(target, ast.Subscript):
            name = ast.unparse(target.value).rpartition(".")[2].lstrip("_")
            called = any(isinstance(each, ast.Call | ast.ListComp | ast.GeneratorExp) for each in ast.walk(node.value))
            if called and name in ("counts", "counters", "words"):
                found.append(ast.unparse(node))
    return found


def test_issue_a_client_calls_nothing_while_it_counts() -> None:
    """Servers count in one thread, and may."""
    package = ROOT / "simm"
    paths = [package / "client.py", package / "kv.py"]
    paths += [path for name in ("sdk", "testing") for path in (package / name).rglob("*.py")]
    assert {str(path): found for path in paths if (found := calls_while_counting(path.read_text()))} == {}
    assert len(calls_while_counting("counts[A] += len(source)\nself._counters['b'] += n\nx[1] += f()")) == 1
    assert len(calls_while_counting("words[A] = self.hits = f()\nwords[A] = self.hits = self.hits + 1")) == 1

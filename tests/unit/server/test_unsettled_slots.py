"""Slots that the worker is writing, or seems to: a stream waits for all of a request together, and not long.

It waits in its loop's thread, so every other client of the worker waits too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from simm.arena.layout import ENTRY_BOUND, FLAGS_WORD, SLOT_WORDS, SOME_BOUND, Word
from simm.arena.reader import ArenaReader
from simm.cluster.lookup import ASK_OWNER
from simm.constants import BATCH_KEYS_MAX, KEEP_SOFT
from simm.net.channel import Channel
from simm.server import stream_get
from simm.server.stream_get import SETTLE_S, SETTLE_TRIES, locate_many
from simm.table import ZERO_DIGEST
from simm.wire import messages as M
from simm.wire.group_messages import Group
from simm.wire.keep_messages import Keep
from simm.wire.messages import Status
from tests.support.store_world import digest_of
from tests.support.worker_thread import StreamThread, WorkerThread

DIGESTS = [digest_of(f"k{number}") for number in range(200)]
MANY = [ZERO_DIGEST] * BATCH_KEYS_MAX
Naps = list[float]
World = tuple[WorkerThread, Channel, ArenaReader, StreamThread]


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> Naps:
    """How long the stream's thread has slept, in place of sleeping."""
    slept: Naps = []
    monkeypatch.setattr(stream_get, "time", SimpleNamespace(sleep=slept.append, monotonic=time.monotonic))
    return slept


@pytest.fixture
def world() -> Iterator[World]:
    """A worker with values, a client's connection to its stream, and a reader of its arena."""
    with WorkerThread() as worker, StreamThread(worker.path) as stream:
        channel = stream.channel()
        number = channel.submit(M.Store([(digest, 8, 0, 0, 0) for digest in DIGESTS]))
        channel.sock.sendall(b"".join(digest[:8] for digest in DIGESTS))
        assert channel.result(channel.wait(number)).statuses == [Status.OK] * len(DIGESTS)
        reader = ArenaReader(worker.segment.name)
        yield worker, channel, reader, stream
        channel.close()


def seq_words(worker: WorkerThread, reader: ArenaReader) -> list[int]:
    """Where the values' slots have their seq."""
    return [reader._slot_word + worker.store.table.lookup(digest) * SLOT_WORDS for digest in DIGESTS]


def test_all_slots_of_a_request_are_waited_for_together(world: World, naps: Naps) -> None:
    """A worker that died or was stopped in the midst of many leaves them all odd."""
    worker, _, reader, _ = world
    with worker.frozen() as store:
        words = store.table._words
        odd = seq_words(worker, reader)[1::2]
        for at in odd:
            words[at - reader._slot_word] |= 1
        busy = Status.BUSY
        for previous, asked, want in ((False, False, ASK_OWNER), (False, True, busy), (True, False, busy)):
            naps.clear()
            looked = locate_many(reader, DIGESTS, previous, asked=asked)
            assert [status for status, _, _ in looked] == [Status.OK, want] * (len(DIGESTS) // 2)
            assert naps == [SETTLE_S] * SETTLE_TRIES
        for at in odd:
            words[at - reader._slot_word] &= ~1 & (1 << 64) - 1


def test_one_that_settles_meanwhile_is_found(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, _, reader, _ = world
    with worker.frozen() as store:
        words = store.table._words
        odd = [at - reader._slot_word for at in seq_words(worker, reader)]
        for at in odd:
            words[at] |= 1
        slept: Naps = []

        def settle(seconds: float) -> None:
            slept.append(seconds)
            half = odd[: 1 + len(odd) // 2] if len(slept) == 1 else odd
            for at in half:
                words[at] &= ~1 & (1 << 64) - 1

        monkeypatch.setattr(stream_get, "time", SimpleNamespace(sleep=settle, monotonic=time.monotonic))
        looked = locate_many(reader, DIGESTS, False)
        assert [status for status, _, _ in looked] == [Status.OK] * len(DIGESTS) and len(slept) == 2
        assert [found and found.slot for _, _, found in looked] == [store.table.lookup(digest) for digest in DIGESTS]


def entry_statuses(answer: Any) -> set[int]:
    return {entry[0] for entry in answer.entries}


def all_statuses(answer: Any) -> set[int]:
    return set(answer.statuses)


@pytest.mark.parametrize("count", [1, 20, len(DIGESTS)])
def test_a_bound_clients_entry_is_not_there_for_others(world: World, count: int) -> None:
    """Whatever tokens there are now: an arena outlives the token file. get would return none of them."""
    worker, channel, _, stream = world
    with worker.frozen() as store:
        store.header[Word.BOUND] = SOME_BOUND
        for digest in DIGESTS[::3]:
            store.table._words[store.table.lookup(digest) * SLOT_WORDS + FLAGS_WORD] |= ENTRY_BOUND << 48
    stranger = stream.channel(namespace="other")
    asked = DIGESTS[:count]
    assert channel.call(M.Exists(asked)).statuses == [Status.OK] * count
    want = [Status.OK if at % 3 else Status.NOT_FOUND for at in range(count)]
    assert stranger.call(M.Exists(asked)).statuses == want
    got = stranger.call(M.Fetch([(digest, 0) for digest in asked]))
    assert [entry[0] == Status.NOT_FOUND for entry in got.entries] == [status == Status.NOT_FOUND for status in want]
    stranger.close()


REQUESTS: list[tuple[Any, Callable[[Any], Any], Any]] = [
    (M.Fetch([(digest, 8) for digest in MANY]), entry_statuses, Status.NOT_FOUND),
    (M.FetchRanges(0, [(digest, 1) for digest in MANY], [(0, 1)] * len(MANY)), entry_statuses, Status.NOT_FOUND),
    (M.Pin(0, MANY), entry_statuses, Status.NOT_FOUND),
    (M.Exists(MANY), all_statuses, Status.NOT_FOUND),
    (M.Delete(MANY), all_statuses, Status.NOT_FOUND),
    (M.DeleteSized([(digest, 1) for digest in MANY]), all_statuses, Status.NOT_FOUND),
    (Keep(KEEP_SOFT, 1, MANY), all_statuses, Status.NOT_FOUND),
    (Group([2] * 1000, [ZERO_DIGEST] * 2000), all_statuses, Status.BAD_REQUEST),
]  # fmt: skip


@pytest.mark.parametrize(("request_", "statuses", "want"), REQUESTS, ids=lambda each: type(each).__name__)
def test_the_digest_of_empty_slots_is_a_plain_miss(
    world: World, naps: Naps, request_: Any,
    statuses: Callable[[Any], set[int]], want: int,
) -> None:  # fmt: skip
    """No key has it. Each of these cost two milliseconds of all clients' time, and a frame has thousands."""
    _, channel, _, _ = world
    assert statuses(channel.call(request_)) == {want}
    assert naps == []

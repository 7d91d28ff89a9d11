"""The marks that a previous owner tells a mover, of many values at a time."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from simm.arena.events import listing
from simm.arena.hashing import split
from simm.arena.layout import SLOT_WORDS
from simm.arena.marks.kept import HARD, SOFT, unpack
from simm.arena.reader import ArenaReader
from simm.constants import BATCH_KEYS_MAX, KEEP_S_MAX
from simm.ipc import arena_lister
from simm.ipc.arena_lister import Lister
from simm.table import ZERO_DIGEST
from simm.wire.group_messages import joined
from simm.wire.keep_messages import Keep
from simm.wire.messages import Status
from tests.support.worker_thread import WorkerThread

#: What the clock says, seconds: after the end of what is kept for the shorter time.
LATER_S = 50


@pytest.fixture
def worker() -> Iterator[WorkerThread]:
    with WorkerThread() as made:
        yield made


def filled(worker: WorkerThread, rng: random.Random) -> list[bytes]:
    """Store values, of which some are kept and some are in groups. Return their digests."""
    digests = [rng.randrange(20).to_bytes(2, "little") + rng.randbytes(14) for _ in range(100)]
    session = worker.session()
    session.ask([(64, len(digests))])
    for digest in digests:
        number, _, _ = session.pool.take(64) or (0, 0, 0)
        assert session.commit_one(digest, number, 64, 0, 0, 0, 0) == Status.OK
    for how, seconds in ((SOFT, LATER_S // 2), (SOFT, 1000), (HARD, 5000)):
        session.exchange(Keep(how, seconds, rng.sample(digests, 20)))
    by_shard: dict[bytes, list[bytes]] = {}
    for digest in digests:
        by_shard.setdefault(digest[:2], []).append(digest)
    groups = [each[:3] for each in by_shard.values() if len(each) >= 3]
    assert set(session.exchange(joined(groups)).statuses) == {Status.OK}
    session.close()
    return digests


def one_by_one(reader: ArenaReader, digests: list[bytes], now_s: int) -> list[tuple[int, int, int]]:
    """Return what :meth:`Lister.marks` tells, found for each digest by itself."""
    found = []
    for digest, slot in zip(digests, reader.slots_of_many(digests)):
        row = listing.at_rest(reader, slot, slot + 1)[0] if slot >= 0 else None
        if row is None or (row["low"], row["high"]) != split(digest):
            found.append((0, 0, 0))
            continue
        how, until = unpack(int(row["kept"]))
        left = min(until - now_s, KEEP_S_MAX)
        found.append((how, left, int(row["group"])) if how and left > 0 else (0, 0, int(row["group"])))
    return found


@pytest.mark.parametrize("seed", range(3))
def test_issue_the_marks_of_many_values_are_read_together(
    worker: WorkerThread, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Several operations by numpy for each value held up a stream's other clients for a quarter of a second."""
    rng = random.Random(seed)
    digests = filled(worker, rng)
    reader = ArenaReader(worker.segment.name)
    asked = [rng.choice([*digests, ZERO_DIGEST, rng.randbytes(16)]) for _ in range(BATCH_KEYS_MAX)]
    now_s = arena_lister.boottime_ns() // 1_000_000_000 + LATER_S
    monkeypatch.setattr(arena_lister, "boottime_ns", lambda: now_s * 1_000_000_000)
    calls: list[Any] = []

    def at_rest(*arguments: Any) -> Any:
        calls.append(arguments)
        return listing.at_rest(*arguments)

    monkeypatch.setattr(arena_lister, "at_rest", at_rest)
    with worker.frozen() as store:
        odd = [store.table.lookup(digest) * SLOT_WORDS for digest in rng.sample(digests, 10)]
        for at in odd:
            store.table._words[at] |= 1  # in a write
        found = Lister(reader).marks(asked).entries
        assert found == one_by_one(reader, asked, now_s) and len(calls) == 1
        for at in odd:
            store.table._words[at] &= ~1 & (1 << 64) - 1
    assert {entry[0] for entry in found} == {0, SOFT, HARD} and len({entry[2] for entry in found}) > 2
    assert Lister(reader).marks([]).entries == [] and Lister(reader).marks([rng.randbytes(16)]).entries == [(0, 0, 0)]

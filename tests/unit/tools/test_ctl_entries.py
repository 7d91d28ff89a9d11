"""``simm ctl keys`` and ``simm ctl evict`` on arenas of several workers: which values, and what workers refuse."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from simm.arena.layout import SLOT_FIELDS
from simm.constants import OTHERS_NAMESPACE
from simm.errors import TransportError, UsageError
from simm.net.channel import Channel
from simm.tools.ctl import command, entries
from simm.tools.ctl.tables import table
from simm.tools.ctl.workers import Asked
from simm.wire import messages as M
from simm.wire.messages import Status

Rows = NDArray[np.void]


class Arena:
    """An arena with these pages of entries, in place of its lister too."""

    def __init__(self, *pages: Rows) -> None:
        self.pages = pages

    def names(self, numbers: Sequence[int]) -> dict[int, str]:
        return dict.fromkeys(numbers, "a")


class Readable(Asked):
    """A worker whose arena can be read."""

    @property
    def reader(self) -> Any:
        return self.stats["arena"]


Batch = list[tuple[bytes, int]]


class Worker:
    """A worker's connection: it keeps the batches, and answers each by ``answer``."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.answer: Callable[[Batch], list[int]] = lambda batch: [Status.OK] * len(batch)

    def call(self, message: Any) -> Any:
        if not isinstance(message, M.DeleteSized):
            return None
        self.batches.append(message.entries)
        return M.Statuses(self.answer(message.entries))

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    """Put arenas of this module in place of real ones, and return the worker that each connection reaches."""

    def pages(arena: Arena) -> Iterator[tuple[Rows, NDArray[np.bool_]]]:
        for rows in arena.pages:
            yield rows.copy(), np.ones(len(rows), np.bool_)

    made = Worker()
    monkeypatch.setattr(entries, "Lister", lambda arena: arena)
    monkeypatch.setattr(entries, "pages", pages)
    monkeypatch.setattr(Channel, "unix", lambda *_: made)
    return made


def rows(count: int, first: int = 0) -> Rows:
    """Return entries whose digests and times are these numbers, the greatest first."""
    made = np.zeros(count, SLOT_FIELDS)
    made["offset"] = made["length"] = 1
    made["low"] = made["stored"] = np.arange(first + count, first, -1)
    return made


def asked(*pages: Rows, server: str = "host") -> Asked:
    return Readable(server, 0, "/nowhere", {"arena": Arena(*pages)})


def numbers(batch: Batch) -> list[int]:
    return [int.from_bytes(digest[:8], "little") for digest, _ in batch]


def test_issue_a_sample_of_several_workers_was_the_smallest_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was sorted by them and then cut. Each entry is as likely as any other, so the larger arena has more."""
    chance = np.random.Generator(np.random.PCG64(7))
    monkeypatch.setattr(np.random, "default_rng", lambda: chance)
    found = entries.key_rows([asked(rows(100), server="few"), asked(rows(300, 1 << 40), server="many")], most=100)
    count = sum(row["worker"] == "few/0" for row in found)
    assert len({row["digest"] for row in found}) == 100 and 10 < count < 40


@pytest.mark.parametrize(("order", "ages"), [("old", [1, 2, 3]), ("hot", [1, 2, 3]), ("new", [40, 39, 38])])
def test_other_orders_are_kept_over_workers(order: str, ages: list[int]) -> None:
    mixed = rows(40)
    found = entries.key_rows([asked(mixed[::2]), asked(mixed[1::2])], order, most=3)
    assert [int.from_bytes(bytes.fromhex(row["digest"])[:8], "little") for row in found] == ages


@pytest.mark.parametrize("fails", [None, 3])
def test_what_was_evicted_before_a_failure_counts(fails: int | None, worker: Worker) -> None:
    """A worker that was lost at the third batch was said to have evicted nothing."""

    def answer(batch: Batch) -> list[int]:
        if len(worker.batches) == fails:
            raise TransportError("the connection broke")
        return [Status.OK] * len(batch)

    worker.answer = answer
    (row,) = entries.evict([asked(rows(1000), rows(500, 1000))], "a")
    assert (row["found"], row["bytes"], row["evicted"]) == (1500, 1500, 1024 if fails else 1500)
    assert row["reason"] == ("the connection broke" if fails else "")
    assert [numbers(batch) for batch in worker.batches] == [
        list(range(1, 513)), list(range(513, 1025)), list(range(1025, 1501))
    ], "the oldest first"  # fmt: skip


def test_the_oldest_of_what_is_old_and_large_are_evicted(worker: Worker) -> None:
    made = rows(100)
    made["length"][50:] = 4096
    (row,) = entries.evict([asked(made[:70], made[70:])], "a", older_s=1.0, larger=4096, most=20)
    assert (row["found"], row["bytes"], row["evicted"]) == (20, 20 * 4096, 20)
    assert numbers(worker.batches[0]) == list(range(1, 21)) and {size for _, size in worker.batches[0]} == {4096}
    for most, count in ((0, 50), (20, 20)):
        (row,) = entries.evict([asked(made[:70], made[70:])], "a", larger=4096, most=most, dry=True)
        assert (row["found"], row["bytes"], row["evicted"], row["reason"]) == (count, count * 4096, 0, "")
    assert len(worker.batches) == 1


def test_issue_a_worker_that_refused_was_said_to_be_well(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fenced one, or one whose shards move, accepts no deletes: none was evicted, with ``ok`` and exit code 0."""
    answers = {1: Status.WRONG_OWNER, 2: Status.NOT_FOUND}
    worker.answer = lambda batch: [answers.get(number % 3, Status.OK) for number in numbers(batch)]
    (row,) = entries.evict([asked(rows(600))], "a")
    assert row["evicted"] == 200 and row["reason"] == "it has refused 200: it is fenced, or their shards move"
    assert "it has refused 200" in table("evict", [row])
    monkeypatch.setenv("SIMM_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(command, "ask_all", lambda *_: [asked(rows(600))])
    assert command.main(["evict", "a"]) == 1 and "it has refused 200" in capsys.readouterr().out
    answers[1] = Status.NOT_FOUND
    assert command.main(["evict", "a"]) == 0, "values that have gone meanwhile"


def test_issue_values_of_names_without_a_place_are_shown_and_evicted(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Arenas have them under one name, which no client may have. As the tools refused it, only all could be evicted."""
    monkeypatch.setattr(Arena, "names", lambda _, numbers: dict.fromkeys(numbers, OTHERS_NAMESPACE))
    monkeypatch.setenv("SIMM_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(command, "ask_all", lambda *_: [asked(rows(3))])
    assert command.main(["keys", "old", OTHERS_NAMESPACE]) == 0
    assert capsys.readouterr().out.count(OTHERS_NAMESPACE) == 3
    assert command.main(["evict", OTHERS_NAMESPACE]) == 0 and numbers(worker.batches[0]) == [1, 2, 3]
    with pytest.raises(UsageError, match="stands for several"):  # they have no epoch that a client may advance
        command.main(["namespaces", "flush", OTHERS_NAMESPACE])


@pytest.mark.parametrize(("dry", "most_bytes"), [(False, 64), (True, 8)])
def test_issue_an_eviction_took_hundreds_of_bytes_for_each_value(dry: bool, most_bytes: int, worker: Worker) -> None:
    """52 million values of 4 KiB were 15 GB, on a host whose memory is the arena; to count them was 10 GB."""
    count, page = 100_000, rows(10_000)

    def answer(_: Batch) -> list[int]:
        raise TransportError("that will do")

    worker.answer = answer
    tracemalloc.start()
    try:
        (row,) = entries.evict([asked(*[page] * (count // len(page)))], "a", dry=dry)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert row["found"] == count and len(worker.batches) == (not dry)
    assert peak < count * most_bytes + 3 * page.nbytes

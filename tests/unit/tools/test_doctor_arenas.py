"""simm.tools.doctor_arenas: what it says of tables of the right and of the wrong size, and of busy workers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from simm import shm
from simm.arena.layout import HEADER_BYTES, Geometry, Word, slots_for
from simm.arena.store import Store
from simm.host import numa
from simm.ipc.arena_files import OwnedArena
from simm.ipc.segments import ArenaName, running
from simm.slab import chunk_bytes_for
from simm.tools import doctor_arenas
from simm.tools.doctor_arenas import busiest, check_value_size, check_workers, samples, suggested
from tests.support.left_arenas import digest_of, name_of, owner_of_all
from tests.support.shards import set_shards

MIB = 1 << 20
COUNT = 1500


class Running:
    """An arena of a server that runs, with ``COUNT`` values of one size."""

    def __init__(self, size: int = 32 * MIB, slots: int = 0, value: int = 4080, number: int = 0) -> None:
        self.arena = OwnedArena.create(name_of("gpu", number), size, slots=slots)
        self.store = Store.create(self.arena.mm, slots=slots)
        set_shards(self.store, *owner_of_all(1), 7)
        self.store.open()
        session = self.store.sessions.open(os.getpid(), 1, "some")
        for start in range(0, COUNT, 100):
            for at, (grant, _, _) in enumerate(self.store.sessions.grant(session, value, 100), start):
                assert self.store.commit(session, [(digest_of(at), grant, value, 0, 0, 0)]) == [0]
            self.store.apply_pending()

    def close(self) -> None:
        self.store.release()
        self.arena.unlink()
        self.arena.close()


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Running]]:
    monkeypatch.setattr(shm, "SHM_DIR", str(tmp_path))
    arenas: list[Running] = []
    yield arenas
    for each in arenas:
        each.close()


def test_without_a_server(made: list[Running]) -> None:
    for check in (check_value_size, check_workers):
        assert (check().status, check().remedy) == ("ok", "") and "no data server" in check().detail


def test_a_sample_of_all_slots_and_of_a_part(made: list[Running], monkeypatch: pytest.MonkeyPatch) -> None:
    made.append(Running())
    (whole,) = samples()
    assert whole.arena == ArenaName(os.geteuid(), "gpu", 0, 0xABC)
    assert (whole.part, whole.entries, len(whole.rows)) == (1.0, COUNT, COUNT)
    monkeypatch.setattr(doctor_arenas, "SAMPLE_SLOTS", (100, 4096))  # of 10,240
    monkeypatch.setattr(doctor_arenas, "VALUES_MIN", 200)
    (part,) = samples()
    assert part.part == 4096 / part.slots and len(part.rows) < COUNT
    assert abs(part.entries - COUNT) < COUNT / 5, "keys spread evenly"


def test_a_slot_that_is_being_written_is_left_out(made: list[Running]) -> None:
    made.append(Running())
    (before,) = samples()
    slot = next(iter(made[0].store.table))
    words = memoryview(made[0].arena.mm).cast("Q")
    words[made[0].store.geometry.slots_offset // 8 + slot * 8] |= 1
    (after,) = samples()
    words.release()
    assert len(after.rows) == len(before.rows) - 1


def test_a_table_of_the_right_size(made: list[Running]) -> None:
    made.append(Running())
    found = check_value_size()
    assert (found.status, found.remedy) == ("ok", "") and "1,500 values in chunks of 4,096 bytes" in found.detail


@pytest.mark.parametrize(
    ("slots", "value", "size", "word"), [(0, 500, "448", "a larger table"), (200_000, 4080, "3584", "a smaller table")]
)
def test_a_table_of_the_wrong_size(made: list[Running], slots: int, value: int, size: str, word: str) -> None:
    """And that the remedy is one: a server with that setting is not told anything."""
    made.append(Running(slots=slots, value=value))
    found = check_value_size()
    assert found.status == "warn" and f"--value-size {size}:" in found.remedy, found
    assert found.remedy.endswith(word)
    made.pop().close()
    made.append(Running(slots=slots_for(32 * MIB, chunk_bytes_for(int(size))), value=value))
    assert check_value_size().status == "ok"


def test_few_values_say_nothing(made: list[Running], monkeypatch: pytest.MonkeyPatch) -> None:
    made.append(Running(value=500))
    monkeypatch.setattr(doctor_arenas, "VALUES_MIN", COUNT + 1)
    assert check_value_size().status == "ok" and "too few to tell" in check_value_size().detail
    assert busiest(samples()[0]) == 0.0


def test_the_busiest_second(made: list[Running]) -> None:
    made.append(Running())
    rows = samples()[0].rows
    rows["stored"] = 5000 + np.arange(COUNT) * 10  # 100 a second
    rows["stored"][:300] = 99_000
    assert busiest(samples()[0]._replace(rows=rows)) == 300
    assert busiest(samples()[0]._replace(rows=rows, part=0.25)) == 1200


@pytest.mark.parametrize(
    ("cores", "arenas", "remedy"), [(8, 1, "--workers 2"), (7, 1, ""), (8, 2, ""), (12, 2, "--workers 3")]
)
def test_more_workers_where_there_are_cores(
    made: list[Running], monkeypatch: pytest.MonkeyPatch, cores: int, arenas: int, remedy: str
) -> None:
    monkeypatch.setattr(numa, "nodes", lambda _: [numa.Node(0, tuple(range(cores)), 1)])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    made += [Running(number=number) for number in range(arenas)]
    idle = doctor_arenas.BUSY_PUTS_S - 1
    for rate, said in ((idle, ""), (idle + 1, remedy)):
        monkeypatch.setattr(doctor_arenas, "busiest", lambda _, rate=rate: rate)
        found = check_workers()
        assert (said in found.remedy and found.status == "warn") if said else found.status == "ok", found
        assert f"{arenas} worker(s), {rate:,} puts" in found.detail


def test_what_was_added_while_the_server_ran_is_named(made: list[Running]) -> None:
    made += [Running(number=number) for number in range(2)]
    assert "added" not in check_workers().detail
    with memoryview(made[1].arena.mm)[:HEADER_BYTES].cast("Q") as words:
        words[Word.GROWN] = 1
    assert "1 of them added while it ran: a start without --warm has 32 MiB less" in check_workers().detail


def test_other_files_are_no_running_arenas(made: list[Running], tmp_path: Path) -> None:
    made.append(Running())
    (tmp_path / "simm-0-other-0-0123456789abcdef").write_bytes(bytes(8192))  # nobody has its lock
    (tmp_path / "simm-else").write_bytes(bytes(8192))
    assert running() == [made[0].arena.name]
    words = memoryview(made[0].arena.mm).cast("Q")
    words[1] += 1  # another layout
    words.release()
    assert samples() == [] and check_value_size().status == "ok"


def test_a_file_that_is_cut_short_meanwhile_is_no_sample(
    made: list[Running], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user's file: by a map the doctor would end with SIGBUS."""
    made.append(Running())
    path = tmp_path / made[0].arena.name
    data = path.read_bytes()
    real = doctor_arenas._live

    def cut(*arguments: object) -> object:
        os.truncate(path, 8192)
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(doctor_arenas, "_live", cut)
    try:
        assert samples() == []
    finally:
        path.write_bytes(data)


def test_the_size_that_is_suggested() -> None:
    """It is at most the mean, at least three quarters of it, and a size that a person can remember."""
    for mean in (64, 100, 512, 3000.5, 4096, 65_536, 1 << 20, 50 << 20):
        size = suggested(mean)
        assert 0.75 * mean <= size <= mean or size == 64, (mean, size)
        geometry = Geometry.plan(1 << 30, slots_for(1 << 30, chunk_bytes_for(size)))
        assert geometry.slots * 0.8 * mean > 0.99 * geometry.data_bytes, "the memory is full before the table"

"""Batches that several threads copy: what is stored and read, its order, and what an interruption leaves."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest

from simm.arena.hashing import Hasher
from simm.errors import TransportError
from simm.host import buffers
from simm.host.buffers import Copier, Span
from simm.ipc import get
from simm.ipc.get import ShmGet
from simm.ipc.put import ShmPut
from simm.ipc.session import WorkerSession
from simm.wire.messages import Status
from tests.support.consistency import check
from tests.support.dose import dose
from tests.support.worker_thread import WorkerThread

MIB = 1 << 20
KIB = 1 << 10
digest_of = Hasher("threads")


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "SPREAD_BYTES", 128 * KIB)
    monkeypatch.setattr(buffers, "PART_BYTES", 64 * KIB)


def held_by(worker: WorkerThread, session: WorkerSession) -> tuple[set[int], set[int]]:
    """The grants that the worker says the session has, and those that the session knows of."""
    with worker.frozen() as store:
        store.apply_pending()
        check(store)
        mine = store.sessions.by_id[session.session]
        known = {grant[0] for pool in session.pool.stocks.values() for grant in pool}
        return set(mine.grants), known | {grant[0] for grant in mine.prepared}


def value_of(number: int, size: int) -> bytes:
    return bytes([number % 251]) * size


def source_of(number: int, size: int) -> Any:
    """Memory of all kinds."""
    data = np.frombuffer(value_of(number, size), np.uint8).copy()
    return Span(data.ctypes.data, size, keep=data) if number % 2 else memoryview(data)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("seed", dose(range(3), quick=1))
def test_values_of_mixed_sizes_are_stored_and_read(seed: int, together: bool) -> None:
    rng = random.Random(seed)
    with WorkerThread(192 * MIB) as worker:
        session = worker.session()
        copier = Copier(3)
        put = ShmPut(copier, checksum=False)
        for _ in range(3):
            sizes = [rng.choice([700, 40 * KIB, 64 * KIB, 64 * KIB, 300_000, MIB, 3 * MIB]) for _ in range(40)]
            if rng.random() < 0.5:
                sizes.sort(reverse=True)
            digests = [digest_of(f"{number}") for number in range(len(sizes))]
            sources = [source_of(number, size) for number, size in enumerate(sizes)]
            statuses = [99] * len(sizes)
            for _wait in put.put_steps(session, digests, sources, range(len(sizes)), statuses, together=together):
                pass
            assert statuses == [Status.OK] * len(sizes)
            room = [np.zeros(size, np.uint8) for size in sizes]
            sinks = [
                Span(each.ctypes.data, len(each), keep=each) if rng.random() < 0.5 else memoryview(each)
                for each in room
            ]
            results: list[Any] = [None] * len(sizes)
            rest = ShmGet(copier, False, {}).copy_many(
                session.reader, range(len(sizes)), *session.reader.candidates(digests), sinks, results
            )
            assert rest == [] and results == sizes
            assert all(bytes(each) == value_of(number, len(each)) for number, each in enumerate(room))
            held, known = held_by(worker, session)
            assert held == known
        copier.close()
        session.close()
        with worker.frozen() as store:
            check(store)


def test_of_a_duplicate_key_the_later_value_is_stored() -> None:
    """Whether they are copied together, or one of them by itself."""
    with WorkerThread(96 * MIB) as worker:
        session = worker.session()
        copier = Copier(3)
        for first, second in ((64 * KIB, 700), (700, 64 * KIB), (64 * KIB, 64 * KIB), (64 * KIB, 300_000)):
            sizes = [64 * KIB, first, 64 * KIB, second]
            digests = [digest_of(name) for name in ("a", "twice", "b", "twice")]
            statuses = [99] * 4
            sources = [source_of(number, size) for number, size in enumerate(sizes)]
            ShmPut(copier, checksum=False).put_many(session, digests, sources, range(4), statuses)
            assert statuses == [Status.OK] * 4
            found = session.reader.locate(digest_of("twice"))
            assert found is not None and bytes(session.reader.value(found)) == value_of(3, second)
        copier.close()
        session.close()


@pytest.mark.parametrize("at", range(4))
def test_an_interrupted_batch_loses_no_grant_and_stores_no_torn_value(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with WorkerThread(256 * MIB) as worker:
        session = worker.session()
        copier = Copier(3)
        path = ShmPut(copier, checksum=False)
        calls: list[int] = []
        real = copier.copy_all

        def interrupted(copies: list[tuple[int, int, int]], node: int) -> None:
            if len(calls) == at:
                real(copies[: len(copies) // 2], node)
                raise KeyboardInterrupt
            calls.append(1)
            real(copies, node)

        monkeypatch.setattr(copier, "copy_all", interrupted)
        values = [source_of(number, MIB) for number in range(60)]
        digests = [digest_of(f"i{number}") for number in range(60)]
        with pytest.raises(KeyboardInterrupt):
            path.put_many(session, digests, values, range(60), [99] * 60)
        held, known = held_by(worker, session)
        assert held == known
        for number, digest in enumerate(digests):
            found = session.reader.locate(digest)
            assert found is None or bytes(session.reader.value(found)) == value_of(number, MIB)
        assert not session.copying
        copier.close()
        session.close()


def test_a_session_that_closes_meanwhile_keeps_its_grants_out_of_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread closes it between a grant and the copy: nothing is written any more."""
    with WorkerThread(96 * MIB) as worker:
        session = worker.session()
        copier = Copier(3)
        monkeypatch.setattr(copier, "copy_all", lambda *_: pytest.fail("a copy after the close"))
        session.closed = True
        with pytest.raises(TransportError):
            ShmPut(copier, checksum=False)._fill_planned(
                session, [b""], [((1, session.reader.data_offset, 4096), source_of(1, 4096), 4096, 0)], [], [], -1
            )
        session.closed = False
        copier.close()
        session.close()


def test_few_large_values_are_worth_threads_and_small_ones_are_not() -> None:
    large, small = memoryview(bytearray(get.SPREAD_BYTES_EACH)), memoryview(bytearray(100))
    for threads, sinks, worth in (
        (3, [large, large], True), (1, [large, large], False), (3, [large], False), (3, [small] * 10, False),
        (3, [None, large], False),
    ):  # fmt: skip
        copier = Copier(threads)
        assert ShmGet(copier, False, {}).spreads(range(len(sinks)), sinks) is worth
        copier.close()


def test_copies_of_a_batch_run_in_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of three threads are in a copy at once, of a put and of a get."""
    with WorkerThread(96 * MIB) as worker:
        session = worker.session()
        copier = Copier(3)
        together = threading.Barrier(3)
        real = Copier._copy_block

        def meet(self: Copier, *copy: int) -> None:
            together.wait(30)
            met.append(1)
            real(self, *copy)

        digests = [digest_of(f"m{number}") for number in range(6)]
        for call in ("put", "get"):
            met: list[int] = []
            with monkeypatch.context() as patch:
                patch.setattr(Copier, "_copy_block", once_each(meet, real))
                if call == "put":
                    values = [source_of(number, MIB) for number in range(6)]
                    ShmPut(copier, checksum=False).put_many(session, digests, values, range(6), [99] * 6)
                else:
                    sinks = [memoryview(bytearray(MIB)) for _ in range(6)]
                    reader = session.reader
                    ShmGet(copier, False, {}).copy_many(
                        reader, range(6), *reader.candidates(digests), sinks, [None] * 6
                    )
            assert len(met) == 3
        copier.close()
        session.close()


def once_each(first: Any, then: Any) -> Any:
    """Do ``first`` in the first call of each thread, ``then`` in the others."""
    seen: set[int] = set()

    def call(*arguments: Any) -> None:
        if threading.get_ident() in seen:
            then(*arguments)
        else:
            seen.add(threading.get_ident())
            first(*arguments)

    return call

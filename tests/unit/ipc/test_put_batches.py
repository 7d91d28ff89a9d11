"""Batches of puts in shared memory: what is stored of any of them, and what one leaves behind whose time is over."""

from __future__ import annotations

import ctypes
import random
from typing import Any

import pytest

from simm.arena.hashing import Hasher
from simm.errors import TransportError
from simm.host import buffers
from simm.ipc import put as put_module
from simm.ipc.put import ShmPut
from simm.ipc.session import WorkerSession
from simm.ipc.steps import finish
from simm.net.allowance import ALLOWANCE
from simm.wire.messages import Status
from tests.support.dose import dose
from tests.support.worker_thread import WorkerThread, nothing_is_lost

digest_of = Hasher("default")
MIB = 1 << 20


def stored(session: WorkerSession, key: str) -> bytes:
    found = session.reader.locate(digest_of(key))
    return bytes(session.reader.value(found)) if found is not None else b""


def source_of(rng: random.Random, data: bytes) -> Any:
    """Return memory with these bytes, of one of the kinds that callers pass."""
    kind = rng.random()
    if kind < 0.45:
        held = ctypes.create_string_buffer(data, len(data))
        return buffers.Span(ctypes.addressof(held), len(data), keep=held)
    if kind < 0.5 and len(data) > 4:
        return buffers.Pieces([memoryview(data[:3]), memoryview(data[3:])])
    return memoryview(data)


def mixed(seed: int, *, reverse: bool = False) -> None:
    """Put batches with duplicate keys, of one length mostly, and look at each value after each batch."""
    rng = random.Random(seed)
    with WorkerThread(32 * MIB) as worker:
        session = worker.session()
        path = ShmPut(buffers.Copier(rng.choice((1, 2))), checksum=rng.random() < 0.5)
        for _ in range(40):
            count = rng.randrange(1, 150)
            lengths = rng.sample([1, 70, 100, 4096, 5000, 60_000], 2)
            keys = [f"k{rng.randrange(80)}" for _ in range(count)]
            values = [bytes([rng.randrange(256)]) * rng.choice(lengths[:1] * 9 + lengths) for _ in range(count)]
            statuses = [99] * count
            order = range(count - 1, -1, -1) if reverse else range(count)
            finish(path.put_steps(
                session, [digest_of(key) for key in keys], [source_of(rng, value) for value in values], order,
                statuses, together=rng.random() < 0.5,
            ))  # fmt: skip
            assert statuses == [Status.OK] * count
            for key, value in dict(zip(keys, values)).items():
                assert stored(session, key) == value, f"{key} is {keys.count(key)} times in the batch"
        nothing_is_lost(worker, session)
        session.close()


@pytest.mark.parametrize("seed", dose(range(6), quick=1))
def test_of_a_duplicate_key_the_later_value_is_stored(seed: int) -> None:
    mixed(seed)


def test_in_another_order_another_one_is() -> None:
    """The control."""
    with pytest.raises(AssertionError, match="times in the batch"):
        mixed(0, reverse=True)


@pytest.mark.parametrize(
    ("count", "size", "frames"),
    [
        (16, 4096, [16]), (31, 4096, [16, 15]), (32, 4096, [12, 20]), (60, 16 << 10, [12, 24, 24]),
        (128, 4096, [12, 24, 32, 32, 28]), (40, 20_000, [16, 16, 8]),
    ],
)  # fmt: skip
def test_frames_of_small_values_grow(
    count: int, size: int, frames: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """None is so long that other clients wait for it, and none at the end is short."""
    values = [memoryview(bytes([number]) * size) for number in range(count)]
    with WorkerThread(64 * MIB) as worker:
        session = worker.session()
        path = ShmPut(buffers.Copier(1), checksum=False)
        digests = [digest_of(f"g{number}") for number in range(count)]
        pool = session.pool.for_length(size)[0]
        while len(pool) <= count:  # with fewer grants the frames are as many have come
            path.put_many(session, digests, values, range(count), [99] * count)
        commit, seen = put_module.commit, []

        def noted(session: WorkerSession, entries: list[Any], *more: Any, **named: Any) -> None:
            seen.append(len(entries))
            commit(session, entries, *more, **named)

        monkeypatch.setattr(put_module, "commit", noted)
        statuses = [99] * count
        path.put_many(session, digests, values, range(count), statuses)
        assert seen == frames and statuses == [Status.OK] * count
        assert all(stored(session, f"g{number}") == bytes(value) for number, value in enumerate(values))
        nothing_is_lost(worker, session)
        session.close()


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("size", [4096, 300_000])
@pytest.mark.parametrize("at", [1, 3])
def test_a_batch_whose_time_is_over_leaves_no_grant_and_no_answer_behind(
    together: bool, size: int, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its call has waited elsewhere, for a dead server and for room at a full one. This worker is in good health."""
    count = 300 if size < 5000 else 60
    values = [memoryview(bytes([number % 251]) * size) for number in range(count)]
    with WorkerThread(64 * MIB) as worker:
        session = worker.session()
        path = ShmPut(buffers.Copier(1), checksum=False)
        for _ in range(4):
            path.put_many(session, [digest_of(f"s{each}") for each in range(count)], values, range(count), [99] * count)
        commits = 0
        commit = put_module.commit

        def late(*arguments: Any, **more: Any) -> None:
            nonlocal commits
            commits += 1
            if commits == at + 1:
                ALLOWANCE.seconds = -1.0
            commit(*arguments, **more)

        monkeypatch.setattr(put_module, "commit", late)
        statuses = [99] * count
        steps = path.put_steps(
            session, [digest_of(f"t{each}") for each in range(count)], values, range(count), statuses,
            together=together,
        )  # fmt: skip
        try:
            finish(steps)
        except TransportError as exc:
            assert "deadline" in str(exc)
        finally:
            ALLOWANCE.seconds = float("inf")
        assert commits > at and not session.broken
        for number, status in enumerate(statuses):
            assert status in (Status.OK, 99, put_module.NOT_SENT)
            assert stored(session, f"t{number}") == (bytes(values[number]) if status == Status.OK else b"")
        nothing_is_lost(worker, session)
        session.close()


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("size", [4096, 300_000])
def test_grants_that_were_asked_for_ahead_are_taken_when_the_time_is_over(
    together: bool, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = [memoryview(bytes([number]) * size) for number in range(100)]
    with WorkerThread(64 * MIB) as worker:
        session = worker.session()
        path = ShmPut(buffers.Copier(1), checksum=False)
        ask = put_module.ask_ahead

        def late(*arguments: Any) -> tuple[int, int] | None:
            asked = ask(*arguments)
            ALLOWANCE.seconds = -1.0
            return asked

        monkeypatch.setattr(put_module, "ask_ahead", late)
        digests = [digest_of(f"a{number}") for number in range(100)]
        steps = path.put_steps(session, digests, values, range(100), [99] * 100, together=together)
        try:
            with pytest.raises(TransportError, match="deadline"):
                finish(steps)
        finally:
            ALLOWANCE.seconds = float("inf")
        # Of several workers one that has not answered by then counts as silent: what its session had goes with that.
        assert together or not session.broken
        if not session.broken:
            nothing_is_lost(worker, session)
        session.close()

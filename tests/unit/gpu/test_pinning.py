"""Host memory registered with the CUDA driver, on the driver in software.
"""

from __future__ import annotations

import gc
import logging
import mmap
import threading
from typing import Any

import pytest

from simm.errors import CorruptionError
from simm.gpu import copy, cuda, pinning
from simm.gpu.cuda import CudaError, Driver
from simm.gpu.pinning import Pinned
from simm.host import fork
from simm.rdma.staging import StagingMemory
from tests.support import fake_cuda
from tests.support.client_checks import check_pinned
from tests.support.fake_cuda import FakeCuda
from tests.support.gpu import KIB, MIB, PAGE, Arena, all_of, span_of
from tests.support.invariants import InvariantViolation
from tests.support.waiting import wait_until

# -- registrations ----------------------------------------------------------------------------------------------


def test_an_arena_is_registered_once_in_the_background(fake: FakeCuda, caplog: pytest.LogCaptureFixture) -> None:
    arena = Arena(MIB)
    driver = cuda.load()
    with caplog.at_level(logging.INFO, "simm.gpu.copy"):
        known = pinning.pinned_for(arena, driver, 0)  # type: ignore[arg-type]
        assert pinning.pinned_for(arena, driver, 1) is known  # type: ignore[arg-type]
        all_of(known)
        wait_until(lambda: caplog.records, "and that is said")
    assert "arena arena: 1 MiB registered with the CUDA driver" in caplog.text
    assert fake.registered() == MIB
    assert next(iter(fake.ranges.values()))[1] == cuda.REGISTER_PORTABLE
    check_pinned(known)
    # Whoever drops the reader must not wait for the driver, so another thread lets go of the mapping.
    mapped = arena._mapped
    address = arena.data_address
    del arena, known
    gc.collect()
    wait_until(lambda: not fake.registered(), "it is undone")
    del mapped
    gc.collect()
    wait_until(lambda: "arena" not in fake_cuda.mapped_at(address), "and the mapping goes")
    assert not fake.violations


def test_a_mapping_that_is_read_only(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    arena = Arena.__new__(Arena)
    arena.name = "ro"
    mapped = mmap.mmap(-1, PAGE)
    arena.data = memoryview(mapped).toreadonly()
    arena.data_address = np.frombuffer(arena.data, np.uint8).ctypes.data
    part = Pinned(cuda.load(), "ro", arena.data, arena.data_address, 0, writable=False)
    part.register_some()
    assert next(iter(fake.ranges.values()))[1] == cuda.REGISTER_PORTABLE | cuda.REGISTER_READ_ONLY
    part.close()
    monkeypatch.setattr(Driver, "attribute", lambda *_: 0)
    part = Pinned(cuda.load(), "ro", arena.data, arena.data_address, 0, writable=False)
    assert not part.register_some()
    assert "read-only" in part.failure
    part.close()


def test_registering_that_fails_is_said_once_and_not_tried_again(
    fake: FakeCuda, caplog: pytest.LogCaptureFixture, small_pieces: int
) -> None:
    arena = Arena(256 * KIB)
    part = Pinned(cuda.load(), "arena", arena.data, arena.data_address, 0, piece=small_pieces)
    assert part.register_some()
    fake.failing["cuMemHostRegister_v2"] = [2, 2]
    with caplog.at_level(logging.WARNING, "simm.gpu.copy"):
        assert not part.register_some()
        assert not part.register_some()
    assert len(caplog.records) == 1
    assert "and no more (cuMemHostRegister_v2: CUDA_ERROR_OUT_OF_MEMORY" in caplog.text
    assert part.direct(arena.data_address + small_pieces - 1, 10) == 1
    assert part.direct(arena.data_address + small_pieces, 10) == 0
    assert part.direct(arena.data_address - 1, 10) == 0
    check_pinned(part)
    part.close()


def test_check_sees_a_wrong_account(fake: FakeCuda) -> None:
    arena = Arena(PAGE)
    part = Pinned(cuda.load(), "arena", arena.data, arena.data_address, 0)
    part.register_some()
    part.ready = 2 * PAGE
    with pytest.raises(CorruptionError):
        check_pinned(part)
    part.ready = PAGE
    part.close()


def test_a_mapping_that_cannot_be_unregistered_stays(fake: FakeCuda, caplog: pytest.LogCaptureFixture) -> None:
    arena = Arena(PAGE)
    part = Pinned(cuda.load(), "arena", arena.data, arena.data_address, 0)
    part.register_some()
    fake.failing["cuMemHostUnregister"] = [700]
    part.close()
    assert "is not unregistered" in caplog.text
    assert part._data is not None
    del fork._KEPT[id(part)]
    part.close()


def dies_registered(fake: FakeCuda) -> None:
    """Drop a reader while its arena is registered."""
    arena = Arena(64 * KIB, "dies")
    known = pinning.pinned_for(arena, cuda.load(), 0)  # type: ignore[arg-type]
    all_of(known)
    del known, arena
    gc.collect()
    wait_until(lambda: not fake.registered(), "unregistered")
    if fake.violations:
        raise InvariantViolation(fake.violations[0])


def test_a_reader_that_dies(fake: FakeCuda) -> None:
    dies_registered(fake)


def test_mutation_a_mapping_that_goes_before_its_registration(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    real = pinning._gone

    def too_early(part: Pinned) -> None:
        part._data = None
        threading.Timer(0.2, real, (part,)).start()

    monkeypatch.setattr(pinning, "_gone", too_early)
    with pytest.raises(InvariantViolation, match="after its mapping had gone"):
        dies_registered(fake)
    fake.violations.clear()


def test_mutation_copies_across_pieces(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, small_pieces: int) -> None:
    monkeypatch.setattr(Pinned, "direct", lambda self, address, size: size)
    arena = Arena(256 * KIB)
    part = Pinned(cuda.load(), "arena", arena.data, arena.data_address, 0, piece=small_pieces)
    while part.register_some():
        pass
    span = span_of(fake, 0, 128 * KIB)
    with pytest.raises(CudaError, match="INVALID_VALUE"):
        copy.to_device([(span, arena.data_address + 1, 128 * KIB, part)])
    part.close()


# -- staging memory ---------------------------------------------------------------------------------------------


def test_staging_memory_whose_registering_is_interrupted_is_unregistered_before_it_goes(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else what is mapped there next would be copied from the wrong pages."""
    driver = cuda.load()
    real = driver.host_register
    calls: list[int] = []

    def interrupted(*arguments: Any, **more: Any) -> None:
        calls.append(1)
        if len(calls) > 1:
            raise KeyboardInterrupt  # a signal that came before the call
        real(*arguments, **more)
        raise KeyboardInterrupt  # one that came during the call is handled as it returns

    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(driver, "host_register", interrupted)
            with pytest.raises(KeyboardInterrupt), copy.staged(MIB, 0):
                raise AssertionError("it was not registered")
        gc.collect()
        assert not fake.registered()
    assert len(calls) == 2
    assert not caplog.records, "what was never registered need not be undone"
    with copy.staged(MIB, 0) as (buffer, pinned):
        assert pinned.direct(buffer.address, MIB) > 0
        check_pinned(pinned)
    copy.staging.close()
    assert not fake.registered() and not fake.violations


def test_an_interrupted_registration_of_staging_memory_goes_on(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = cuda.load()
    real = driver.host_register
    memory = StagingMemory(MIB)

    def interrupted(*arguments: Any, **more: Any) -> None:
        real(*arguments, **more)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(driver, "host_register", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pinning.pin_now(memory, driver, 0)
    pinned = pinning.pin_now(memory, driver, 0)
    assert (pinned.ready, pinned.failure) == (MIB, None)
    check_pinned(pinned)
    memory.close()
    assert not fake.registered()


def test_staging_memory_that_nobody_closes_is_unregistered(fake: FakeCuda) -> None:
    driver = cuda.load()
    memory = StagingMemory(MIB)
    pinning.pin_now(memory, driver, 0)
    address = memory.address
    del memory
    gc.collect()
    assert fake.registered() == MIB and fake_cuda.mapped_at(address), "finalizers call no driver"
    other = StagingMemory(MIB)
    pinning.pin_now(other, driver, 0)
    assert fake.registered() == MIB, "the other's alone"
    assert address not in fake.ranges and not fake.violations
    other.close()

"""Copies between host and GPU memory, on the driver in software.
"""

from __future__ import annotations

import gc
import logging
import random
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from simm.errors import UnfinishedCopy
from simm.gpu import copy, cuda
from simm.gpu.buffers import device_span
from simm.gpu.copy import STAGE_BYTES
from simm.gpu.cuda import CudaError, Driver
from simm.gpu.pinning import Pinned
from simm.host import fork
from simm.host.buffers import DeviceCopy, address_of
from tests.support.client_checks import check_pinned
from tests.support.fake_cuda import FakeCuda
from tests.support.gpu import (
    KIB,
    MIB,
    PAGE,
    Arena,
    Array,
    InPython,
    installed,
    noise,
    span_of,
)

# -- copies -------------------------------------------------------------------------------------------------

SIZES = (1, 4096, 16 * KIB - 1, 16 * KIB, 16 * KIB + 1, 3 * 16 * KIB + 7, 200 * KIB)


@pytest.mark.parametrize("share", [0, 1, 2, 4])
def test_copies_with_an_arena_registered_in_part(devices: Any, small_pieces: int, share: int) -> None:
    """Register none, a part or all of the arena: each byte arrives, and registered memory is copied without the CPU."""
    size = 256 * KIB
    arena = Arena(size)
    begun = devices.registered()
    part = Pinned(cuda.load(), "arena", arena.data, arena.data_address, 0, piece=small_pieces)
    for _ in range(share):
        part.register_some()
    check_pinned(part)
    assert devices.registered() - begun == share * small_pieces
    for number, length in enumerate(SIZES):
        for start in (0, small_pieces - 5, size - length):
            if start + length > size:
                continue
            value = noise(length + start, length)
            span = span_of(devices, number % 2, length + 16, b"." * (length + 16))
            arena.data[start : start + length] = value
            before = devices.direct()
            copy.to_device([(span, arena.data_address + start, length, part)])
            assert devices.peek(span.address, length + 16) == value + b"." * 16
            if share == 4:
                assert devices.direct() - before == (start + length - 1) // small_pieces - start // small_pieces + 1
            arena.data[start : start + length] = bytes(length)
            copy.to_host([(span, arena.data_address + start, length, part)])
            assert arena.data[start : start + length] == value
            around = bytes(arena.data[:start]) + bytes(arena.data[start + length :])
            assert not any(around)
            arena.data[:] = bytes(size)
    part.close()
    part.close()
    check_pinned(part)


def test_many_copies_are_one_wait(fake: FakeCuda) -> None:
    arena = Arena(MIB)
    whole = Pinned(cuda.load(), "arena", arena.data, arena.data_address, 0)
    whole.register_some()
    arena.data[:] = noise(1, MIB)
    spans = [span_of(fake, 0, 4096) for _ in range(100)]
    fake.calls.clear()
    copy.to_device((span, arena.data_address + 4096 * at, 4096, whole) for at, span in enumerate(spans))
    assert fake.calls.count("cuStreamSynchronize") == 1
    assert fake.calls.count("cuMemcpyBatchAsync_v2") == -(-100 // copy.GATHER_COPIES)
    assert "cuMemcpyHtoDAsync_v2" not in fake.calls
    assert b"".join(fake.peek(span.address, 4096) for span in spans) == arena.data[: 100 * 4096]
    whole.close()


# -- copies that are begun together ----------------------------------------------------------------------------


@pytest.fixture
def old() -> Iterator[FakeCuda]:
    """A driver that is older than calls for many copies."""
    handle = InPython(FakeCuda(without=frozenset({"cuMemcpyBatchAsync_v2"})))
    for each in installed(handle):
        yield each.library


def registered(size: int) -> tuple[Arena, Pinned]:
    arena = Arena(size)
    whole = Pinned(cuda.load(), "arena", arena.data, arena.data_address, 0)
    while whole.ready < size:
        whole.register_some()
    return arena, whole


def test_a_driver_that_copies_no_batches(old: FakeCuda) -> None:
    arena, whole = registered(MIB)
    arena.data[:] = noise(1, MIB)
    spans = [span_of(old, 0, 4096) for _ in range(100)]
    copy.to_device((span, arena.data_address + 4096 * at, 4096, whole) for at, span in enumerate(spans))
    assert old.calls.count("cuMemcpyHtoDAsync_v2") == 100
    assert b"".join(old.peek(span.address, 4096) for span in spans) == arena.data[: 100 * 4096]
    with pytest.raises(CudaError, match=r"older than CUDA 13\.0"):
        cuda.load().copy_batch([1], [2], [3], 4)
    whole.close()


@pytest.mark.parametrize("inward", [True, False])
def test_copies_that_are_gathered_arrive(devices: Any, monkeypatch: pytest.MonkeyPatch, inward: bool) -> None:
    """Whatever the number and the sizes, and on two devices."""
    monkeypatch.setattr(copy, "GATHER_BYTES", 40_000)
    monkeypatch.setattr(copy, "GATHER_COPIES", 7)
    arena, whole = registered(MIB)
    for count in (1, 2, 7, 8, 50):
        sizes = [1 + (number * 7919) % 15_000 for number in range(count)]
        starts = [sum(sizes[:number]) for number in range(count)]
        values = [noise(number, size) for number, size in enumerate(sizes)]
        spans = [
            span_of(devices, number % 2, size, bytes(size) if inward else value)
            for number, (size, value) in enumerate(zip(sizes, values))
        ]
        arena.data[:] = bytes(MIB)
        if inward:
            for start, value in zip(starts, values):
                arena.data[start : start + len(value)] = value
        copies = [
            (span, arena.data_address + start, size, whole) for span, start, size in zip(spans, starts, sizes)
        ]
        (copy.to_device if inward else copy.to_host)(copies)
        assert [bytes(devices.peek(span.address, span.size)) for span in spans] == values
        assert bytes(arena.data[: sum(sizes)]) == b"".join(values)
    whole.close()


@pytest.mark.parametrize("knows", [True, False], ids=["", "control"])
def test_the_last_of_copies_to_one_place_wins(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, knows: bool) -> None:
    """Control: without the look at their targets they have no order, and the buffer does not have the last value."""
    if not knows:
        monkeypatch.setattr(copy, "overlap", lambda *_: False)
    arena, whole = registered(MIB)
    arena.data[: 3 * 4096] = b"a" * 4096 + b"b" * 4096 + b"c" * 4096
    span = span_of(fake, 0, 6000)
    half = span.part(2000, 4000)
    copy.to_device(
        [
            (span, arena.data_address, 4096, whole),
            (half, arena.data_address + 4096, 4000, whole),
            (span, arena.data_address + 8192, 4096, whole),
        ]
    )
    assert (fake.peek(span.address, 6000) == b"c" * 4096 + b"b" * 1904) is knows
    whole.close()


@pytest.mark.parametrize("first", ["pinned", "staged"])
def test_the_last_wins_whichever_way_it_takes(fake: FakeCuda, small_pieces: int, first: str) -> None:
    """A value in the part of an arena that is registered, and one in the part that is not yet, to one buffer."""
    arena = Arena(4 * small_pieces)
    part = Pinned(cuda.load(), "arena", arena.data, arena.data_address, 0, piece=small_pieces)
    part.register_some()
    arena.data[:4096], arena.data[-4096:] = b"p" * 4096, b"s" * 4096
    places = [arena.data_address, arena.data_address + 4 * small_pieces - 4096]
    if first == "staged":
        places.reverse()
    span, other = span_of(fake, 0, 4096), span_of(fake, 0, 4096)
    copy.to_device([(other, places[0], 4096, part), (span, places[0], 4096, part), (span, places[1], 4096, part)])
    assert fake.peek(span.address, 4096) == (b"s" if first == "pinned" else b"p") * 4096
    assert fake.peek(other.address, 4096) == (b"p" if first == "pinned" else b"s") * 4096
    part.close()


def test_a_driver_that_refuses_copies_together(fake: FakeCuda, caplog: pytest.LogCaptureFixture) -> None:
    """It takes each alone, so nothing is lost, and is not asked again."""
    arena, whole = registered(MIB)
    arena.data[:] = noise(1, MIB)
    fake.failing["cuMemcpyBatchAsync_v2"] = [1]
    for _ in range(2):
        spans = [span_of(fake, 0, 64) for _ in range(10)]
        copy.to_device([(span, arena.data_address + 64 * at, 64, whole) for at, span in enumerate(spans)])
        assert b"".join(fake.peek(span.address, 64) for span in spans) == arena.data[:640]
    assert fake.calls.count("cuMemcpyBatchAsync_v2") == 1
    assert [record.levelname for record in caplog.records if "one by one" in record.message] == ["WARNING"]
    whole.close()


def test_overlap_against_a_naive_model() -> None:
    rng = random.Random(5)
    seen = set()
    for _ in range(3_000):
        count = rng.randrange(1, 8)
        targets = [rng.randrange(60) for _ in range(count)]
        sizes = [rng.randrange(1, 12) for _ in range(count)]
        taken = [byte for target, size in zip(targets, sizes) for byte in range(target, target + size)]
        seen.add(wanted := len(set(taken)) < len(taken))
        assert copy.overlap(targets, sizes) is wanted, (targets, sizes)
    assert seen == {True, False}


def test_copies_that_do_not_begin_together_are_forgotten(fake: FakeCuda) -> None:
    """By an error of the driver, or of the caller before the call: no later call begins them."""
    arena, whole = registered(MIB)
    arena.data[:] = noise(1, MIB)
    spans = [span_of(fake, 0, 64, b"." * 64) for _ in range(10)]
    copies = [(span, arena.data_address + 64 * at, 64, whole) for at, span in enumerate(spans)]
    fake.fail_next("cuMemcpyHtoDAsync_v2", [2])
    with pytest.raises(CudaError, match="cuMemcpyHtoDAsync_v2: CUDA_ERROR_OUT_OF_MEMORY") as caught:
        copy.to_device(copies)
    assert not isinstance(caught.value, UnfinishedCopy)

    def broken() -> Iterator[DeviceCopy]:
        yield from copies
        raise ValueError("the caller's")

    with pytest.raises(ValueError, match="the caller's"):
        copy.to_device(broken())
    assert not fake._contexts() and not fake.pending()
    other = span_of(fake, 0, 64)
    copy.to_device([(other, arena.data_address, 64, whole)] * 1)
    assert all(fake.peek(span.address, 64) == b"." * 64 for span in spans)
    copy.to_device(copies)
    assert b"".join(fake.peek(span.address, 64) for span in spans) == arena.data[:640]
    whole.close()


def test_threads_have_streams_of_their_own(fake: FakeCuda) -> None:
    spans = [span_of(fake, number % 2, 64 * KIB) for number in range(8)]
    wrong: list[int] = []

    def work(number: int) -> None:
        for turn in range(10):
            data = noise(number * 100 + turn, 64 * KIB)
            copy.copy_in(spans[number], memoryview(data))
            if copy.host_copy(spans[number]) != data:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert sum(map(len, copy._idle.values())) <= 2 * copy.IDLE_STREAMS


def test_surplus_streams_are_closed(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy, "IDLE_STREAMS", 0)
    span = span_of(fake, 0, 64, b"x" * 64)
    assert bytes(copy.host_copy(span)) == b"x" * 64
    assert fake.live() == 0
    assert fake.registered() == 0


def test_contexts_are_retained_once_and_the_callers_comes_back(fake: FakeCuda) -> None:
    driver = cuda.load()
    driver.push(1)
    mine = list(fake._contexts())
    spans = [span_of(fake, device, 64, noise(device, 64)) for device in (0, 1, 0, 1)]
    assert [bytes(copy.host_copy(span)) for span in spans] == [noise(device, 64) for device in (0, 1, 0, 1)]
    copy.to_device((span, address_of(memoryview(bytearray(64))), 64, None) for span in spans)
    assert fake._contexts() == mine
    driver.pop()
    assert fake.retained == [1, 1]


# -- whose work a copy comes after -----------------------------------------------------------------------------


def produced(fake: FakeCuda, stream: int, named: int | None, *, version: int = 3) -> bytes:
    """Return what a put reads of memory that a kernel on ``stream`` writes, if the object names ``named``."""
    address = fake.alloc(0, 64)
    fake.poke(address, b"old" + bytes(61))
    fake.work(stream, 0, address, b"new" + bytes(61))
    thing = Array(address, 64, stream=named, version=version)
    return bytes(copy.host_copy(device_span(thing)))[:3]


def test_named_streams_are_waited_for(fake: FakeCuda) -> None:
    mine = fake.user_stream(0)
    assert produced(fake, mine, mine) == b"new"
    assert produced(fake, cuda.STREAM_LEGACY, 1) == b"new"
    assert produced(fake, cuda.STREAM_LEGACY, None) == b"new", "the default stream's order is kept without a word"
    assert produced(fake, mine, cuda.STREAM_PER_THREAD) == b"new"
    fake._handles.pop(mine)


def test_a_stream_that_nobody_names_is_the_callers_affair(fake: FakeCuda) -> None:
    """This is the positive control of the test above: the fake driver executes no work before its time."""
    mine = fake.user_stream(0)
    assert produced(fake, mine, None) == b"old"
    fake._handles.pop(mine)


def test_mutation_streams_not_followed(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = fake.user_stream(0)
    monkeypatch.setattr(copy._Stream, "follow", lambda *_: None)
    assert produced(fake, mine, mine) == b"old"
    fake._handles.pop(mine)


def test_mutation_streams_that_do_not_keep_the_default_streams_order(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Driver, "stream_create", lambda self: self._made("stream_create", 1))
    assert produced(fake, cuda.STREAM_LEGACY, None) == b"old"


def test_a_buffer_is_written_after_the_work_that_reads_it(fake: FakeCuda) -> None:
    mine = fake.user_stream(0)
    address = fake.alloc(0, 64)
    fake.work(mine, 0, address, b"earlier work, which must not come out on top")
    copy.copy_in(device_span(Array(address, 64, stream=mine)), memoryview(b"v" * 64))
    fake._run(fake._handles[mine])
    assert fake.peek(address, 64) == b"v" * 64
    fake._handles.pop(mine)


# -- failures -----------------------------------------------------------------------------------------------


def test_a_copy_that_does_not_begin(fake: FakeCuda) -> None:
    span = span_of(fake, 0, 64)
    fake.failing["cuMemcpyHtoDAsync_v2"] = [2]
    with pytest.raises(CudaError, match="cuMemcpyHtoDAsync_v2: CUDA_ERROR_OUT_OF_MEMORY") as caught:
        copy.copy_in(span, memoryview(b"x" * 64))
    assert not isinstance(caught.value, UnfinishedCopy)
    assert not fake._contexts()
    copy.copy_in(span, memoryview(b"y" * 64))
    assert fake.peek(span.address, 64) == b"y" * 64


def test_issue_a_context_that_cannot_be_set_is_no_copy_that_goes_on(fake: FakeCuda) -> None:
    """Else each put of a process whose driver has failed would keep its chunk for good."""
    span, data = span_of(fake, 0, 64, b"." * 64), bytearray(b"x" * 64)
    fake.failing["cuCtxSetCurrent"] = [700, 700]
    with pytest.raises(CudaError, match="cuCtxSetCurrent: CUDA_ERROR_ILLEGAL_ADDRESS") as caught:
        copy.to_device([(span, address_of(memoryview(data)), 64, None)])
    assert not isinstance(caught.value, UnfinishedCopy)
    assert not fake.pending() and not fake._contexts() and fake.peek(span.address, 64) == b"." * 64


def test_a_wait_that_fails_is_said_and_the_stream_is_not_used_again(fake: FakeCuda) -> None:
    span = span_of(fake, 0, 64)
    copy.copy_in(span, memoryview(b"x" * 64))
    (stream,) = copy._idle[0]
    fake.failing["cuStreamSynchronize"] = [700]
    with pytest.raises(UnfinishedCopy, match="ILLEGAL_ADDRESS"):
        copy.copy_in(span, memoryview(b"y" * 64))
    assert id(stream) in fork._KEPT
    assert stream not in copy._idle[0]
    copy.copy_in(span, memoryview(b"z" * 64))
    assert fake.peek(span.address, 64) == b"z" * 64
    del fork._KEPT[id(stream)]
    cuda.load().push(0)
    stream.close()  # the fake's is well
    cuda.load().pop()


def test_a_sticky_error_leaves_nothing_half_done(fake: FakeCuda) -> None:
    span = span_of(fake, 0, 64)
    fake.sticky = 700
    with pytest.raises(CudaError, match="ILLEGAL_ADDRESS"):
        copy.copy_in(span, memoryview(b"x" * 64))
    fake.sticky = 0
    copy.copy_in(span, memoryview(b"z" * 64))


def test_an_interruption_waits_for_the_device(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena(PAGE)
    whole = Pinned(cuda.load(), "arena", arena.data, arena.data_address, 0)
    whole.register_some()
    span = span_of(fake, 0, 64, b"device" + bytes(58))
    real = Driver.stream_synchronize
    struck = []

    def strike(self: Driver, stream: int) -> None:
        if not struck:
            struck.append(stream)
            raise KeyboardInterrupt
        real(self, stream)

    monkeypatch.setattr(Driver, "stream_synchronize", strike)
    with pytest.raises(KeyboardInterrupt):
        copy.to_host([(span, arena.data_address, 64, whole)])
    assert fake.pending() == 0
    assert arena.data[:6] == b"device"

    def interrupted() -> Iterator[DeviceCopy]:
        yield span, arena.data_address, 64, whole
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copy.to_host(interrupted())
    assert fake.pending() == 0
    assert not fake._contexts()
    whole.close()


class Striking(list[Any]):
    """A list of which one call is interrupted, by a signal that arrives during it."""

    struck = False

    def append(self, each: Any) -> None:
        super().append(each)
        if not self.struck:
            self.struck = True
            raise KeyboardInterrupt


def test_issue_an_interruption_gives_a_stream_to_one_thread_only(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it is given back: two threads with one stream drop each other's copies without a word."""
    span = span_of(fake, 0, 64, b"v" * 64)
    idle = copy._idle[0] = Striking()
    with pytest.raises(KeyboardInterrupt):
        copy.host_copy(span)
    assert idle.struck and len(idle) == len({id(each) for each in idle}) == 1
    assert idle[0].handle in fake._handles
    assert copy.host_copy(span) == b"v" * 64

    monkeypatch.setattr(copy, "IDLE_STREAMS", 0)
    close = copy._Stream.close
    closed: list[int] = []

    def closing(self: copy._Stream) -> None:
        close(self)
        closed.append(id(self))
        if len(closed) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(copy._Stream, "close", closing)
    with pytest.raises(KeyboardInterrupt):
        copy.host_copy(span)
    assert len(closed) == 1 and not idle
    assert copy.host_copy(span) == b"v" * 64
    assert not fake.pending() and not fake._contexts()


def test_issue_an_interruption_while_copies_are_gathered_leaves_none(fake: FakeCuda) -> None:
    """Its stream's next user would have another copy's target for its own bytes."""
    arena, whole = registered(MIB)
    arena.data[:] = noise(1, MIB)
    spans = [span_of(fake, 0, 64, b"." * 64) for _ in range(4)]
    copies = [(span, arena.data_address + 64 * at, 64, whole) for at, span in enumerate(spans)]
    copy.to_device(copies)
    (stream,) = copy._idle[0]
    for span in spans:
        fake.poke(span.address, b"." * 64)
    stream._targets = Striking()
    with pytest.raises(KeyboardInterrupt):
        copy.to_device(copies[:2])
    assert copy._idle[0] == [stream] and not stream._targets
    copy.to_device(copies[2:])
    assert [fake.peek(span.address, 64) for span in spans[:2]] == [b"." * 64] * 2
    assert b"".join(fake.peek(span.address, 64) for span in spans[2:]) == arena.data[128:256]
    whole.close()


def test_issue_an_interruption_does_not_hide_an_unfinished_copy(fake: FakeCuda) -> None:
    """Of two devices, one cannot be waited for, and the signal comes at the other: the chunk must stay."""
    spans = [span_of(fake, device, 64) for device in (0, 1)]
    idle = copy._idle[1] = Striking()
    fake.failing["cuStreamSynchronize"] = [700]
    data = bytearray(64)
    with pytest.raises(BaseException, match="ILLEGAL_ADDRESS") as caught:
        copy.to_device((span, address_of(memoryview(data)), 64, None) for span in spans)
    assert isinstance(caught.value, UnfinishedCopy)
    (stream,) = [each for each in fork._KEPT.values() if isinstance(each, copy._Stream)]
    assert stream.device == 0 and idle.struck and len(idle) == 1
    del fork._KEPT[id(stream)]
    cuda.load().push(0)
    stream.close()  # the fake's is well
    cuda.load().pop()


def test_without_pinned_memory_copies_are_slow_and_right(fake: FakeCuda, caplog: pytest.LogCaptureFixture) -> None:
    fake.failing["cuMemHostRegister_v2"] = [2]
    span = span_of(fake, 0, 3 * STAGE_BYTES)
    data = noise(5, 3 * STAGE_BYTES)
    with caplog.at_level(logging.WARNING, "simm.gpu.copy"):
        copy.copy_in(span, memoryview(data))
        assert copy.host_copy(span) == data
    assert [record.message for record in caplog.records] == [
        "staging memory: the CUDA driver has registered 0 of 2 MiB and no more (cuMemHostRegister_v2: "
        "CUDA_ERROR_OUT_OF_MEMORY (as the fake driver says)): copies between the rest and GPUs are slower"
    ]
    assert fake.pageable > 0


def interrupted_at(copies: copy.InFlightCopies, thing: Any) -> weakref.ref[Any]:
    """Interrupt a wait for the device in a frame that has ``thing``."""

    class Interrupting:
        device = 0

        def __init__(self) -> None:
            self.tried = 0

        def finish(self) -> None:
            self.tried += 1
            if self.tried == 1:
                raise KeyboardInterrupt

        def close(self) -> None:
            pass

    copies._streams = {0: Interrupting()}  # type: ignore[dict-item]
    held = thing()
    with pytest.raises(KeyboardInterrupt):
        copies.wait()
    return weakref.ref(held)


def test_an_interrupted_wait_holds_no_frames(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stored exception would keep its frames alive, and with them the arena that they refer to."""

    class Thing:
        pass

    monkeypatch.setattr(copy, "IDLE_STREAMS", 0)
    gc.disable()
    try:
        assert interrupted_at(copy.InFlightCopies(cuda.load()), Thing)() is None
    finally:
        gc.enable()


def test_an_error_on_the_way_from_the_network_comes_after_the_exchange(fake: FakeCuda) -> None:
    spans = [span_of(fake, 0, 100) for _ in range(3)]
    exchanges = []

    def read_host(part: Sequence[int], hosts: Any, got: dict[int, Any]) -> list[int]:
        for at in part:
            hosts[at].view()[: 50 + at] = bytes([at]) * (50 + at)
            got[at] = 50 + at
        exchanges.append(part)
        return []

    results = [0, 0, 0]
    fake.fail_next("cuMemcpyHtoDAsync_v2", [1])
    with pytest.raises(CudaError):
        spans[0].read_remote(read_host, range(3), spans, results, ())
    fake.failing.clear()
    assert exchanges == [[0, 1, 2]] and results == [0, 0, 0]
    assert spans[0].read_remote(read_host, range(3), spans, results, ()) == []
    assert results == [50, 51, 52]
    assert [fake.peek(span.address, 53) for span in spans] == [
        bytes([at]) * (50 + at) + bytes(3 - at) for at in range(3)
    ]

"""GPU memory as a buffer: what is taken for it, and what is not.
"""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from simm.errors import UsageError
from simm.gpu import cuda
from simm.gpu.buffers import DeviceSpan, device_span
from simm.host.buffers import OnDevice
from tests.support.fake_cuda import FakeCuda
from tests.support.gpu import (
    PAGE,
    Arena,
    Array,
    Grad,
    Tensor,
    span_of,
)

# -- spans ------------------------------------------------------------------------------------------------


def test_spans_of_all_kinds(fake: FakeCuda) -> None:
    address = fake.alloc(1, 96)
    for thing in (
        Tensor(address, 96), Tensor(address, 96, item=4), Grad(address, 96), Array(address, 96),
        Array(address, 96, shape=(2, 3, 4), typestr="<f4"),
        Array(address, 96, shape=(8, 1, 3), typestr="<f4", strides=(12, 7, 4)),
    ):  # fmt: skip
        span = device_span(thing)
        assert (span.address, span.size, len(span), span.device, span.stream) == (address, 96, 96, 1, 0)
        assert span.writable
        assert span.keep is thing
    assert not device_span(Array(address, 96, data=(address, True))).writable
    assert device_span(Array(address, 96, stream=1)).stream == 1
    assert device_span(Array(address, 96, stream=1), stream=77).stream == 77
    assert device_span(device_span(Tensor(address, 96)), 5).stream == 5
    assert device_span(span) is span
    assert "device=1" in repr(span)
    part = span.part(32, 8)
    assert (type(part), part.address, part.size, part.device) == (DeviceSpan, address + 32, 8, 1)
    for offset, size in ((-1, 8), (90, 7), (0, 0), (0, 97)):
        with pytest.raises(UsageError, match="has no part"):
            span.part(offset, size)
    piece = span.piece(address + 32, 8)
    assert (piece.address, piece.size, piece.device, piece.keep) == (address + 32, 8, 1, span.keep)


def test_what_is_no_memory_of_a_gpu_is_refused(fake: FakeCuda) -> None:
    address = fake.alloc(0, 96)
    host = bytearray(96)
    wrong: list[tuple[Any, str]] = [
        (Tensor(address, 96, contiguous=False), "not contiguous"),
        (Tensor(address, 0), "empty"),
        (Array(0, 0), "empty"),
        (Array(address, 96, strides=(2,)), "not contiguous"),
        (Array(address, 96, shape=(4, 6), typestr="<f4", strides=(4, 16)), "not contiguous"),
        (Array(address, 96, mask=object()), "mask"),
        (Array(address, 96, stream=0), "stream=0"),
        (Array(address, 96, stream="1"), "stream='1'"),
        (Array(address, 96, typestr="u"), "is none"),
        (Array(address, 96, data=address), "is none"),
        (Tensor(ctypes.addressof(ctypes.c_char.from_buffer(host)), 96), "cannot be used: cuPointerGetAttribute"),
        (object(), "no GPU memory that SiMM knows"),
    ]
    for thing, why in wrong:
        with pytest.raises(UsageError, match=why):
            device_span(thing)


def test_pinned_host_memory_is_not_a_gpus(fake: FakeCuda) -> None:
    arena = Arena(PAGE)
    driver = cuda.load()
    driver.push(0)
    driver.host_register(arena.data_address, PAGE)
    with pytest.raises(UsageError, match="no GPU's memory"):
        device_span(Tensor(arena.data_address, 64))
    driver.host_unregister(arena.data_address)
    driver.pop()


def test_a_span_is_no_buffer(fake: FakeCuda) -> None:
    span = span_of(fake, 0, 64)
    with pytest.raises(OnDevice):
        span.view()
    with pytest.raises(TypeError):
        memoryview(span)  # type: ignore[arg-type]

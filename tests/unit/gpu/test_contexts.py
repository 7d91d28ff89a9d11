"""The contexts of callers' threads, which are an engine's: whatever comes in between, each finds its own again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Final

import pytest

from simm.gpu import copy, cuda, direct
from simm.gpu.direct import DeviceRegistration, after_work, flush
from simm.gpu.pinning import Pinned
from simm.host.buffers import DeviceBuffer, address_of
from tests.support.fake_cuda import FakeCuda
from tests.support.gpu import PAGE, Arena, span_of
from tests.support.interrupts import Interrupted, everywhere

#: What an engine's thread has: no context, or one of these GPUs' (1 and 2 for the first and the second).
STACKS: Final[tuple[list[int], ...]] = ([], [1], [2], [1, 2])


@pytest.fixture(params=STACKS, ids=str)
def stack(request: pytest.FixtureRequest, fake: FakeCuda) -> Iterator[list[int]]:
    """This thread's contexts, the current one last."""
    for context in request.param:
        fake.retained[context - 1] += 1
        fake._contexts().append(context)
    yield list(request.param)
    fake._contexts().clear()
    idle = [stream for streams in copy._idle.values() for stream in streams]
    known = {stream.handle for stream in idle} | {stream.event for stream in idle}
    known |= {piece.event for stream in idle for piece in stream._pieces}
    for lost in fake._handles.keys() - known:  # their making or their return was interrupted
        del fake._handles[lost]


@pytest.fixture
def spans(fake: FakeCuda) -> list[DeviceBuffer]:
    """Memory of both GPUs, in turn."""
    return [span_of(fake, device, 64, b"v" * 64) for device in (0, 1, 0)]


def beside_each_call(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[], object], check: Callable[[], object]
) -> int:  # fmt: skip
    """Interrupt before and after each call of the driver, and check after each; return their number."""
    left = -1

    def strike() -> None:
        nonlocal left
        left -= 1
        if left == -1:
            raise Interrupted

    def struck(function: Callable[..., int]) -> Callable[..., int]:
        def calling(*arguments: Any) -> int:
            strike()
            code = function(*arguments)
            strike()
            return code

        return calling

    driver = cuda.load()
    for name, function in driver._calls.items():
        monkeypatch.setitem(driver._calls, name, struck(function))
    for bound in ("_to_device", "_to_host", "_stream_synchronize"):
        monkeypatch.setattr(driver, bound, struck(getattr(driver, bound)))
    for stop in range(1000):
        left = stop
        try:
            call()
        except Interrupted:
            pass
        left, before = -1, left
        check()
        if before >= 0:
            return stop
    raise AssertionError("it does not end")


def test_issue_an_interrupted_copy_leaves_the_context_as_it_was(
    fake: FakeCuda, stack: list[int], spans: list[DeviceBuffer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the engine's next launch goes to another GPU, or its allocations do."""
    data = bytearray(64)
    address = address_of(memoryview(data))

    def copies() -> None:
        copy.to_host([(span, address, 64, None) for span in spans])

    def check() -> None:
        assert fake._contexts() == stack and not fake.pending()

    copies()
    check()
    assert data == b"v" * 64
    assert everywhere(copies, check) > 50
    assert beside_each_call(monkeypatch, copies, check) > 20


def test_issue_an_interrupted_call_leaves_the_context_as_it_was(
    fake: FakeCuda, stack: list[int], spans: list[DeviceBuffer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that need a context for a moment: waits, flushes, and registrations with the driver and with a device."""
    arena, memory = Arena(PAGE), DeviceRegistration(spans[0])
    region = SimpleNamespace(close=lambda: None)
    rail: Any = SimpleNamespace(name="contexts")
    monkeypatch.setattr(direct, "_WAYS", (("any way", lambda *_: region),))

    def pins() -> None:
        part = Pinned(cuda.load(), "arena", arena.data, arena.data_address, 0)
        try:
            part.register_some()
        finally:
            part.close()

    def check() -> None:
        assert fake._contexts() == stack
        fake.ranges.clear()  # what is pinned where the end was interrupted

    for call in (lambda: after_work(spans), lambda: flush([0, 1]), pins, lambda: memory._made(rail)):
        with monkeypatch.context() as patched:
            assert beside_each_call(patched, call, check) > 4
        assert everywhere(call, check, ("simm.", "contextlib")) > 10


def test_issue_a_context_that_was_destroyed_fails_no_call(
    fake: FakeCuda, spans: list[DeviceBuffer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A thread keeps such a context as its current one. Copies had succeeded there and failed for it, and memory that
    had been registered counted as if it had not been: it stayed pinned after its mapping had gone."""
    fake.retained[1] += 1
    fake._contexts().append(2)
    fake.retained[1] -= 1  # another thread has destroyed it
    memory, rail = DeviceRegistration(spans[0]), SimpleNamespace(name="contexts")
    monkeypatch.setattr(direct, "_WAYS", (("any way", lambda *_: SimpleNamespace(close=lambda: None)),))
    arena = Arena(PAGE)
    part = Pinned(cuda.load(), "arena", arena.data, arena.data_address, 0)
    calls: tuple[Callable[[], object], ...] = (
        lambda: copy.host_copy(spans[0]), lambda: after_work(spans[:1]), lambda: memory._made(rail),
        part.register_some, part.close,
    )  # fmt: skip
    for call in calls:
        fake._contexts()[:] = [2]
        call()
        assert not fake._contexts(), "none: SiMM's would send the engine's next launch to another GPU"
        assert "cannot be set again" in caplog.text
        caplog.clear()
    assert part.failure is None and not part.holds_mapping and arena.data_address not in fake.ranges


def test_a_thread_that_has_the_context_keeps_it(fake: FakeCuda, spans: list[DeviceBuffer]) -> None:
    """The driver is not asked to set what is set, as on an engine's threads."""
    fake.retained[0] += 1
    fake._contexts().append(1)
    copy.host_copy(spans[0])
    fake.calls.clear()
    copy.host_copy(spans[0])
    assert [name for name in fake.calls if name.startswith("cuCtx")] == ["cuCtxGetCurrent"]
    fake._contexts().clear()

"""What operations take and return: values and buffers as memory, batches of reads, results, views, awaitable forms.

The type of an object tells at once whether it is host memory. Only an object without bytes that the CPU can address is
then tried as a tensor or array in a GPU's memory, which loads the modules of ``gpu/``.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import enum
import functools
import itertools
import weakref
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Final, NamedTuple, ParamSpec, Protocol, TypeVar

import numpy as np

from ..constants import LARGE_BYTES_MAX, RANGES_MAX, VALUE_BYTES_MAX
from ..errors import TransportError, UsageError
from ..host import fork_copies
from ..host.buffers import DeviceBuffer, OnDevice, Ranges, Span, address_of, tensor_span, view_of
from ..wire.status import Status

if TYPE_CHECKING:
    from ..arena.reader import ArenaReader
    from ..ipc.grant_pool import RoomWait
    from ..ipc.patience import Patience
    from ..ipc.session import WorkerSession

_T = TypeVar("_T")
_P = ParamSpec("_P")
_ThreadedT = TypeVar("_ThreadedT", bound="Threaded")

#: What a module raises that cannot be loaded now: the process may have no descriptor left.
UNLOADABLE: Final = (OSError, ImportError)

#: Bytes that one exchange by TCP carries at most, so that a deadline means the same at every batch size; and its keys.
EXCHANGE_BYTES: Final = 64 << 20
EXCHANGE_KEYS: Final = 1024

_device_span: Callable[[Any], DeviceBuffer] | None = None


class Threaded(Protocol):
    """What has methods with an awaitable form."""

    async def in_thread(self, call: Callable[[], _T]) -> _T:
        """Run a call in a thread. A cancellation is delivered when it has ended and no longer uses its buffers."""


def awaitable(
    method: Callable[Concatenate[_ThreadedT, _P], _T],
) -> Callable[Concatenate[_ThreadedT, _P], Coroutine[Any, Any, _T]]:
    """Return the awaitable form of a method, which runs in a thread (:meth:`Threaded.in_thread`)."""
    name = method.__name__

    async def run(threaded: _ThreadedT, /, *arguments: _P.args, **named: _P.kwargs) -> _T:
        answer: _T = await threaded.in_thread(functools.partial(getattr(threaded, name), *arguments, **named))
        return answer

    functools.update_wrapper(run, method)
    run.__name__, run.__doc__ = f"{name}_async", f":meth:`{name}`, awaitable."
    return run


def device_buffer(thing: Any) -> DeviceBuffer:
    """Return the memory of a CUDA tensor, or of an object with ``__cuda_array_interface__``. Raises UsageError.

    The first call loads ``gpu/``. Any thread may make it.
    """
    global _device_span
    if _device_span is None:
        try:
            from ..gpu.buffers import device_span  # few clients have a GPU, and none of the servers
        except UNLOADABLE as exc:
            raise UsageError(f"the GPU memory of this {type(thing).__name__} cannot be used: {exc}") from exc
        _device_span = device_span
    return _device_span(thing)


class LargeValue(UsageError):
    """A value, or ranges of one, beyond ``VALUE_BYTES_MAX``. To callers that cannot divide it, it is a mistake.

    Raised where sizes are compared in any case, so that ordinary values pay nothing for large ones.
    """

    def __init__(self, text: str, memory: Any) -> None:
        super().__init__(text)
        #: The memory in the form that it was asked for in.
        self.memory = memory


#: Asking whether an object is a :class:`DeviceBuffer` takes 0.3 us: not of these.
_PLAIN_KINDS: Final[frozenset[type]] = frozenset((memoryview, Span, np.ndarray))


def source_of(value: Any, what: str = "a value") -> memoryview | Span:
    """Return a value, or ``what`` it is to be called, in the form that put takes. Raises UsageError for a wrong type or
    size."""
    kind = type(value)
    source: memoryview | Span
    if kind is bytes or kind is bytearray:
        source = memoryview(value)  # view_of looks at more
    elif kind not in _PLAIN_KINDS and isinstance(value, DeviceBuffer):
        source = value
    else:
        try:
            source = value if kind is Span else view_of(value.data if kind is View else value)
        except OnDevice:
            source = device_buffer(value)
    if not 0 < len(source) <= VALUE_BYTES_MAX:
        if 0 < len(source) <= LARGE_BYTES_MAX:
            raise LargeValue(f"{what} has 1 to {VALUE_BYTES_MAX} bytes here, this one {len(source)}", source)
        raise UsageError(f"{what} has 1 to {LARGE_BYTES_MAX} bytes, this one {len(source)}")
    return source


def any_source_of(value: Any) -> memoryview | Span:
    """Do :func:`source_of` for a value that may have to be stored in parts."""
    try:
        return source_of(value)
    except LargeValue as exc:
        source: memoryview | Span = exc.memory
        return source


def _writable(span: DeviceBuffer) -> DeviceBuffer:
    if not span.writable:
        raise UsageError("the buffer is read-only")
    return span


def sink_of(buffer: Any) -> memoryview | Span:
    """Return a buffer in the form that get takes. Raises UsageError if it is read-only."""
    kind = type(buffer)
    if kind is Span:
        if not buffer.writable:
            raise UsageError("the buffer is read-only")
        return buffer  # type: ignore[no-any-return]
    if kind is bytearray:
        return memoryview(buffer)
    if kind is memoryview and buffer.format == "B" and buffer.ndim == 1 and buffer.contiguous:
        view = memoryview(buffer)  # view_of looks at more
    elif kind not in _PLAIN_KINDS and isinstance(buffer, DeviceBuffer):
        return _writable(buffer)
    else:
        try:
            view = view_of(buffer)
        except OnDevice:
            return _writable(device_buffer(buffer))
    if view.readonly:
        raise UsageError("the buffer is read-only: pass a bytearray, a writable array or a tensor")
    return view


def span_of(buffer: Any) -> Span:
    """Return the memory of a buffer, array or tensor as a span, which keeps it alive. Raises UsageError."""
    if isinstance(buffer, Span) and not isinstance(buffer, Ranges):
        return buffer
    try:
        span = tensor_span(buffer)
        if span is not None:
            return span
        view = view_of(buffer)
    except OnDevice:
        return device_buffer(buffer)
    if not view.nbytes:
        raise UsageError("an empty buffer cannot be registered")
    return Span(address_of(view), view.nbytes, writable=not view.readonly, keep=view)


class NoValue(enum.IntEnum):
    """Why a read has no value. None is above 0, so a result above 0 is a hit's length."""

    MISS = 0
    #: The owner cannot be reached, or the shard has none.
    UNAVAILABLE = -1
    #: The value is longer than the buffer.
    TOO_SMALL = -2
    #: It is stored in parts: ``sdk/large`` reads it. The client's methods do not return this.
    LARGE = -3


#: By name, as reads meet them all the time.
MISS: Final = NoValue.MISS
UNAVAILABLE: Final = NoValue.UNAVAILABLE
LARGE: Final = NoValue.LARGE


#: What a prefetch says of a key: it waits to be copied, its owner is on this host, or it will not be copied.
WAITS, HERE, DROPPED = 1, 0, -1


class WrongSize(int):
    """The result for a value that has not the exact size its buffer wants. Below every :class:`NoValue`."""

    _BASE: Final = -(1 << 40)

    @classmethod
    def of(cls, length: int) -> WrongSize:
        """Return the result for a value of ``length`` bytes."""
        return cls(cls._BASE - length)

    @property
    def length(self) -> int:
        """The value's length, bytes."""
        return self._BASE - self

    def __repr__(self) -> str:
        return f"<WrongSize {self.length}>"


class Mistake(int):
    """The result for ranges that only their value shows to be a mistake, where the other keys' results count."""

    #: What is wrong.
    text = ""

    @classmethod
    def of(cls, text: str) -> Mistake:
        """Return the result; it is no :class:`NoValue`."""
        made = cls(-(1 << 39))
        made.text = text
        return made


#: A hit's length, or why there is no value.
Result = int | NoValue | WrongSize
#: The same for a single read, or the bytes themselves if its sink is None.
Answer = Result | bytes
#: Where a value goes; None for new bytes.
Sink = memoryview | Span | None


def misfit(length: int, sink: Sink) -> Result:
    """Return the result for a value that does not fit: WrongSize if ``sink`` takes one size, else TOO_SMALL."""
    return WrongSize.of(length) if isinstance(sink, Span) and sink.least else NoValue.TOO_SMALL


def is_hit(got: Any) -> bool:
    """Return whether this result is a value, or its length."""
    return type(got) is bytes or got > 0


class Batch:
    """Keys to read, and a result for each: a :data:`Result`, or the bytes themselves if the sink is None.

    Without ``sinks`` the batch only asks whether the keys are stored. The result is then 1 for a stored key.
    """

    __slots__ = ("counted", "digests", "late", "patience", "plain", "results", "sinks")

    def __init__(
        self, digests: Sequence[bytes], sinks: Sequence[Sink] | None, patience: Patience | None = None, *,
        counted: bool = True,
    ) -> None:  # fmt: skip
        #: Looks for keys in arenas count as exists. Those that replace values are none that the caller asked for.
        self.counted = counted
        #: The results are True and False alone: all of a batch without sinks were found or missed in an arena.
        self.plain = False
        self.digests = digests
        self.sinks = sinks
        self.results: list[Any] = [MISS] * len(digests)
        #: Positions whose server had not answered when the deadline passed: if they have no value, that is why.
        self.late: set[int] = set()
        #: Of a call that may touch several servers.
        self.patience = patience

    def bytes_read(self, positions: Sequence[int]) -> list[int]:
        """Return how many bytes were copied for each hit among these positions."""
        found = []
        for position in positions:
            got = self.results[position]
            if is_hit(got):
                sink = self.sinks[position] if self.sinks is not None else None
                found.append(sink.total if isinstance(sink, Ranges) else len(got) if type(got) is bytes else got)
        return found

    def size_read(self, positions: Sequence[int]) -> int:
        """Return how many bytes were copied for all of these positions, one at least: lengths of hits, and misses."""
        results = self.results
        if self.sinks is not None and isinstance(self.sinks[positions[0]], Ranges):  # if one sink is ranges, all are
            return sum(self.bytes_read(positions))
        size: int = sum(results if len(positions) == len(results) else [results[position] for position in positions])
        return size


class PutBatch(NamedTuple):
    """Values to store, a Status for each, and how long the call may wait for room."""

    digests: Sequence[bytes]
    sources: Sequence[memoryview | Span]
    statuses: list[int]
    room: RoomWait


class View:
    """A value in place, or a miss: false, of no bytes. ``data`` is a read-only memoryview.

    The entry stays pinned until the view is closed *and* everything made from it (slices, numpy arrays) is gone. So the
    bytes stay valid as long as the caller can reach them. Usable as a context manager.

    From Python 3.12 on the view is a read-only buffer itself (PEP 688): ``memoryview(view)``, ``np.frombuffer(view)``.
    Before, these take ``view.data``. ``bytes(view)`` and ``len(view)`` work everywhere.

    A forked child gets copies of the values that its parent has views of, up to 64 MiB in all
    (``host/fork_copies.py``). The other views raise UsageError there.
    """

    __slots__ = ("__weakref__", "_data", "_lost", "length")

    def __init__(self, data: memoryview) -> None:
        self._data: memoryview | None = data
        self._lost = False
        self.length = len(data)

    @classmethod
    def miss(cls) -> View:
        """Return the view of a key that is not stored."""
        return cls(memoryview(b""))

    @classmethod
    def of_pin(cls, session: WorkerSession, digest: bytes) -> tuple[View | None, int, int, int, int]:
        """Pin a value; return a view of it, and what the worker says: status, flags, length, checksum.

        None for the view with any other status than OK. Raises PeerError.
        """
        copying = session.copying
        ends = iter([copying.pop])
        view: View | None = None
        pin = 0
        copying += (None,)  # until the view ends: no pin is released before. begin_copy() inlined, see ShmPut._fill
        try:
            if session.closed:
                raise TransportError("the session was closed")
            status, flags, length, crc, offset, pin = session.pin_one(digest)
            if status == Status.OK:
                view = cls.pinned(session.reader, session, offset, length, pin, ends)
            return view, status, flags, length, crc
        finally:
            if view is None:
                for end in ends:  # see pinned()
                    end()
                if pin:  # interrupted: whatever was made of it may release it once more
                    session.unpin_later(pin)

    @classmethod
    def pinned(
        cls, reader: ArenaReader, session: WorkerSession, offset: int, length: int, pin: int,
        ends: Iterator[Callable[[], None]],
    ) -> View:  # fmt: skip
        """Return a view of the arena. Its end releases ``pin``, and ends the copy that the caller has begun.

        ``ends`` gives out how that ends, once: a C function, so that no interrupt comes between the step of a loop that
        takes it and the call. If this raises, the caller does it, or what was made.
        """
        number = next(fork_copies.numbers)
        address = reader.data_address + offset - reader.data_offset
        base = (ctypes.c_ubyte * length).from_address(address)
        held = _Pinned(base, _unpin)  # a weakref.finalize takes 1.5 us more
        held.session, held.reader, held.pin, held.number, held.ends = session, reader, pin, number, ends
        view = cls(memoryview(base).cast("B").toreadonly())
        fork_copies.lend(number, address, length, held, view)  # which also keeps it
        return view

    @property
    def data(self) -> memoryview:
        """The value's bytes; none after a miss. Raises UsageError once closed, or if a forked child has no copy."""
        if self._data is None:
            if self._lost:
                raise UsageError("this view was taken before the fork; take another with client.view(key)")
            raise UsageError("this view is closed; take another with client.view(key)")
        return self._data

    def __bool__(self) -> bool:
        """Return whether there is a value: every value has a byte at least. Also once closed."""
        return self.length > 0

    def __len__(self) -> int:
        """Return the value's length in bytes, 0 after a miss."""
        return self.length

    def __bytes__(self) -> bytes:
        """Return a copy. Raises UsageError once closed."""
        return bytes(self.data)

    def __buffer__(self, flags: int, /) -> memoryview:
        """Return the bytes to the interpreter, from Python 3.12 on. Raises UsageError once closed."""
        return memoryview(self.data)  # a new one: the caller may release it

    def close(self) -> None:
        """Release the value. Twice is harmless."""
        data, self._data = self._data, None
        if data is not None:
            with contextlib.suppress(BufferError):
                data.release()

    def lose(self) -> None:
        """Give the value up in a forked child, which has no copy of it. Reads no byte of it."""
        self._lost = self._lost or self._data is not None
        self.close()

    def __enter__(self) -> View:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        what = f"View of {self.length} bytes" if self.length else "View of a miss"
        return f"<{what}{'' if self._data is not None else ', closed'}>"


class SplitView(View):
    """In place of the view of a value that is stored in parts: ``sdk/large`` copies it. False, with no bytes."""

    __slots__ = ()


def view_of_answer(got: Any) -> View:
    """Return a view of what a read without a sink has returned."""
    if type(got) is bytes:
        return View(memoryview(got))
    return SplitView.miss() if got is LARGE else View.miss()


def answer_of(view: View) -> NoValue:
    """Return what a read says for this view, which has no bytes."""
    return LARGE if type(view) is SplitView else MISS


class _Pinned(weakref.ref[Any]):
    """What is released when a view's memory has no user left."""

    __slots__ = ("ends", "number", "pin", "reader", "session")

    ends: Iterator[Callable[[], None]]
    session: WorkerSession
    #: Keeps the mapping.
    reader: ArenaReader
    pin: int
    #: Of its loan.
    number: int


def _unpin(held: weakref.ref[Any]) -> None:
    """Release a view's pin. A finalizer: no lock, no I/O."""
    assert isinstance(held, _Pinned)
    fork_copies.end(held.number)
    held.session.unpin_later(held.pin)
    for end in held.ends:
        end()


def by_bytes(positions: Sequence[int], sizes: Sequence[int], count: int) -> list[Sequence[int]]:
    """Share positions out into at most ``count`` runs of about as many bytes. None is empty."""
    if count == 1:
        return [positions]
    ends = list(itertools.accumulate(sizes[position] for position in positions))
    cuts = [0, *(bisect.bisect_left(ends, ends[-1] * each / count) + 1 for each in range(1, count)), len(positions)]
    return [positions[begin:end] for begin, end in itertools.pairwise(cuts) if begin < end]


def chunks(sizes: Sequence[tuple[int, int]], ranges: Callable[[int], int] | None = None) -> list[list[int]]:
    """Return positions in runs of at most EXCHANGE_KEYS keys and about EXCHANGE_BYTES bytes.

    ``ranges`` returns how many ranges a position has; a run has RANGES_MAX at most.
    """
    chunks: list[list[int]] = []
    total = count = 0
    for position, size in sizes:
        more = 0 if ranges is None else ranges(position)
        if (
            not chunks or len(chunks[-1]) >= EXCHANGE_KEYS or total + size > EXCHANGE_BYTES or count + more > RANGES_MAX
        ):  # fmt: skip
            chunks.append([])
            total = count = 0
        chunks[-1].append(position)
        total += size
        count += more
    return chunks

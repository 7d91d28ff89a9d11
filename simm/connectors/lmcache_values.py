"""What LMCache's objects look like as values in SiMM, and where their memory is.

A value is an object's bytes, and behind them a *trailer*: the object's format, data types and shapes as text. LMCache's
keys name the model, the rank and the tokens. Those of ``lmcache server`` do not name the data type, and none names the
shape or the order of the dimensions. So a reader compares the trailer with that of the object it has room for. An
object of another layout is a miss, even if it has as many bytes.

    bytes of the object | text | length of the text, form (2 bytes each) | magic (4 bytes)

The text is ``KV_2LTD|bfloat16:2,32,256,1024``: the format, then a part for each group of layers.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from ..client import Client, WrongSize
from ..constants import VALUE_BYTES_MAX
from ..host.buffers import Pieces, Ranges, Span, address_of
from ..sdk.ops.parts import pieces_of, ranges_of
from .keyspace import identity

#: Length of the text, form, magic: "LMSM".
_FOOTER: Final = struct.Struct("<HHI")
_MAGIC: Final = 0x4D534D4C
#: Bytes of the longest trailer.
_TRAILER_MAX: Final = 0xFFFF + _FOOTER.size
#: Raised when the trailer changes.
_FORM: Final = 1
_TEXT: Final = re.compile(r"[A-Z0-9_]{1,32}(\|[a-z0-9_]{1,32}:[0-9]{1,12}(,[0-9]{1,12}){0,7}){1,1024}")


def head_of(options: Mapping[str, Any], numbers: str = "") -> str:
    """Return what an engine's options put before each key: nothing, or a digest of ``weight_version`` and ``salt``.

    ``numbers``: how a chunk's bytes are numbers, as far as neither its key nor its value says it. It is in the digest,
    too.
    """
    facts = {**{name: options.get(name) for name in ("salt", "weight_version")}, "numbers": numbers}
    given = {name: value for name, value in facts.items() if value not in (None, "")}
    return f"{identity(given)}/" if given else ""


class Layout(NamedTuple):
    """What an object's bytes are: a format's name, and for each group its data type and shape."""

    form: str
    groups: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, form: Any, dtypes: Sequence[Any], shapes: Sequence[Sequence[int]]) -> Layout:
        """Return the layout that LMCache's own types describe."""
        groups = [(str(dtype).removeprefix("torch.").lower(), tuple(map(int, shape)))
                  for dtype, shape in zip(dtypes, shapes)]  # fmt: skip
        return cls(form.name, tuple(groups))

    @classmethod
    def of_object(cls, obj: Any) -> Layout:
        """Return the layout of one of LMCache's memory objects."""
        meta = obj.metadata
        return cls.of(obj.get_memory_format(), meta.dtypes or [obj.get_dtype()], meta.shapes or [obj.get_shape()])

    def trailer(self) -> bytes:
        """Return what follows the bytes of an object in its value. O(groups)."""
        parts = [f"{dtype}:{','.join(map(str, shape))}" for dtype, shape in self.groups]
        text = "|".join((self.form, *parts)).encode()
        return text + _FOOTER.pack(len(text), _FORM, _MAGIC)


def taken_apart(value: bytes) -> tuple[memoryview, Layout] | None:
    """Return an object's bytes and its layout; None for a value that is none of an object. O(groups).

    The value is another process's word: what it says of its shape is for the caller to compare with what it has.
    """
    data = memoryview(value)
    if len(data) < _FOOTER.size:
        return None
    length, form, magic = _FOOTER.unpack_from(data, len(data) - _FOOTER.size)
    end = len(data) - _FOOTER.size
    if magic != _MAGIC or form != _FORM or not 0 < length < end:
        return None
    try:
        text = str(data[end - length : end], "ascii")
    except UnicodeDecodeError:
        return None
    if not _TEXT.fullmatch(text):
        return None
    name, *parts = text.split("|")
    groups = [part.partition(":") for part in parts]
    layout = Layout(name, tuple((dtype, tuple(map(int, shape.split(",")))) for dtype, _, shape in groups))
    return data[: end - length], layout


class Slot(NamedTuple):
    """Room for a value: the object's memory, and what must follow it."""

    sink: Ranges
    found: bytearray
    wanted: bytes

    def filled(self, got: Any) -> bool:
        """Return whether a get with this result filled it with an object of the same layout."""
        return bool(got == self.sink.least and self.found == self.wanted)


class Arena:
    """LMCache's memory, registered once as a whole, so that RDMA reads and writes objects in place."""

    def __init__(self, client: Client, buffer: Any) -> None:
        self._client = client
        self._span: Span | None = client.register(buffer) if buffer is not None else None

    def close(self) -> None:
        """End the registration. Twice is harmless."""
        span, self._span = self._span, None
        if span is not None:
            self._client.deregister(span)

    def memory(self, obj: Any) -> Span | memoryview:
        """Return an object's bytes as memory by address, or as they are if they are read-only."""
        view = memoryview(obj.byte_array).cast("B")
        if view.readonly or not len(view):
            return view
        address, size, whole = address_of(view), len(view), self._span
        if whole is not None and whole.address <= address and address + size <= whole.address + whole.size:
            return whole.part(address - whole.address, size)
        return Span(address, size, keep=view)

    def source(self, obj: Any) -> Pieces:
        """Return an object's value as put takes it. Raises UsageError for one without bytes, or too large."""
        return pieces_of([self.memory(obj), Layout.of_object(obj).trailer()])

    def slot(self, obj: Any) -> Slot:
        """Return room for the value of an object. Raises UsageError for one that cannot be a value."""
        memory, wanted = self.memory(obj), Layout.of_object(obj).trailer()
        found = bytearray(len(wanted))
        return Slot(ranges_of([(0, len(memory), memory), (len(memory), len(found), found)]), found, wanted)


def length_of(got: Any) -> int:
    """Return the length of the value that a get met, whatever came of it; 0 for none."""
    length = got.length if type(got) is WrongSize else int(got)
    return max(length, 0)


def too_large(obj: Any) -> bool:
    """Return whether an object's bytes and trailer are more than a value may have. O(1), O(groups) near the bound."""
    room = VALUE_BYTES_MAX - obj.get_size()
    return bool(room < _TRAILER_MAX and room < len(Layout.of_object(obj).trailer()))


def bytes_of(dtypes: Sequence[Any], shapes: Sequence[Sequence[int]]) -> int:
    """Return how many bytes an object of these data types and shapes has. O(groups)."""
    return sum(math.prod(map(int, shape)) * int(dtype.itemsize) for dtype, shape in zip(dtypes, shapes))


def never_whole(form: Any, dtypes: Sequence[Any], shapes: Sequence[Sequence[int]]) -> bool:
    """Return whether an object of these of LMCache's types, with its trailer, is more than a value may have."""
    return bytes_of(dtypes, shapes) + len(Layout.of(form, dtypes, shapes).trailer()) > VALUE_BYTES_MAX


def reachable(client: Client) -> bool:
    """Return whether the client reaches a worker or a manager: what LMCache calls healthy."""
    stats = client.stats()
    return stats.get("manager") == "connected" or any(each["path"] != "down" for each in stats.get("workers", ()))

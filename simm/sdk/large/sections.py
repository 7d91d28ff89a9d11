"""Where the bytes of a part go to, or come from: the section of a caller's memory that it is."""

from __future__ import annotations

from typing import Any

from ...constants import VALUE_BYTES_MAX
from ...errors import UsageError
from ...host.buffers import Part, Pieces, Ranges, Span
from ...host.parts import cut
from .manifest import Manifest


def source_section(source: memoryview | Span, start: int, size: int) -> memoryview | Span:
    """Return ``size`` bytes of a value from ``start`` on, without a copy. O(pieces)."""
    if type(source) is memoryview:
        return source[start : start + size]
    if type(source) is Pieces:
        return Pieces([*cut(source.parts, start, size)])
    return source.part(start, size)


def sinks_of(manifest: Manifest, sink: memoryview | Span | None) -> list[tuple[int, int, Any]]:
    """Return, for each part that is wanted, its number, its bytes, and the sink for it. The value fits ``sink``.

    Raises UsageError for ranges that overlap in the value so much that one part would be sent several times over.
    """
    if isinstance(sink, Ranges):
        return _ranges_by_part(manifest, sink)
    wanted: list[tuple[int, int, Any]] = []
    for index, (start, size) in enumerate(manifest.bounds()):
        wanted.append((index, size, None if sink is None else source_section(sink, start, size)))
    return wanted


def _ranges_by_part(manifest: Manifest, ranges: Ranges) -> list[tuple[int, int, Ranges]]:
    """Divide ranges at the bounds of parts. O(ranges + parts that they touch)."""
    sizes = dict(enumerate(size for _, size in manifest.bounds()))
    found: dict[int, list[Part]] = {}
    for offset, length, address, keeper in ranges.parts:
        at, end = offset, offset + length
        while at < end:
            index, inside = divmod(at, manifest.part)
            count = min(manifest.part - inside, end - at)
            first = at - offset
            piece = keeper
            if not address and count < length:
                piece = keeper[first : first + count] if type(keeper) is memoryview else keeper.part(first, count)
            found.setdefault(index, []).append((inside, count, address + first if address else 0, piece))
            at += count
    wanted = []
    for index, parts in sorted(found.items()):
        total = sum(part[1] for part in parts)
        if total > VALUE_BYTES_MAX:
            raise UsageError(
                f"{total} bytes are wanted of {sizes[index]} bytes of the value: ranges that overlap in it so often "
                "are read in several calls"
            )
        wanted.append((index, sizes[index], Ranges(parts, max(part[0] + part[1] for part in parts), total)))
    return wanted

"""Segments by operation: how often, how long, and what share of the operation's time.

The shares of the segments in the client add up to less than 100 %: the rest is between them. A server's segments lie
within a segment of the client, so their shares count the same time again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from .perfetto import Event


class Row(NamedTuple):
    """A line of the table: an operation by one path, or a segment of it. Times are microseconds."""

    operation: str
    segment: str
    spans: int
    p50_us: float
    p99_us: float
    share: float


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the least value that ``share`` of them do not exceed: one of the values, by nearest rank."""
    # Slightly below the rank, as rounding must not move an exact rank to its neighbour.
    rank = math.ceil(share * len(ordered) * (1 - 1e-12))
    return ordered[max(1, rank) - 1]


def summarize(events: Iterable[Event]) -> list[Row]:
    """Return a row for each operation, and below it one for each of its segments. O(events log events)."""
    whole: dict[str, list[float]] = {}
    parts: dict[tuple[str, str], list[float]] = {}
    for event in events:
        args = event["args"]
        path = f" {args['path']}" if "path" in args else ""
        if args.get("op"):
            whole.setdefault(event["name"] + path, []).append(event["dur"])
        else:
            of = str(args.get("of", "")) + path
            name = f"server {event['name']}" if args.get("server") else event["name"]
            parts.setdefault((of, name), []).append(event["dur"])
    rows = []
    for operation, times in sorted(whole.items()):
        total = sum(times)
        rows.append(_row(operation, "", times, total))
        mine = [(name, took) for (of, name), took in parts.items() if of == operation]
        rows += [_row(operation, name, took, total) for name, took in sorted(mine, key=lambda each: -sum(each[1]))]
    return rows


def _row(operation: str, segment: str, times: list[float], total: float) -> Row:
    ordered = sorted(times)
    share = sum(times) / total if total else 0.0
    return Row(operation, segment, len(times), quantile(ordered, 0.5), quantile(ordered, 0.99), share)


def as_json(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Return the rows for programs."""
    return [row._asdict() for row in rows]


def table(rows: Sequence[Row]) -> str:
    """Return the rows for people."""
    lines = [f"{'operation':24} {'spans':>9} {'p50 us':>11} {'p99 us':>11} {'share':>7}"]
    for row in rows:
        name = f"  {row.segment}" if row.segment else row.operation
        lines.append(f"{name:24} {row.spans:9,} {row.p50_us:11,.1f} {row.p99_us:11,.1f} {row.share:7.1%}")
    return "\n".join(lines)

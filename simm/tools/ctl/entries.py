"""The values in the arenas of this host: which there are, and their eviction by an operator.

Arenas are read in place, as clients read them, so looking costs workers nothing and needs no manager. An arena has no
keys, only their digests. Evicting asks the worker to delete the entry of a digest and a size, so a value of another
size that was put meanwhile stays.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ...arena.hashing import check_namespace
from ...constants import OTHERS_NAMESPACE
from ...errors import TransportError, UsageError
from ...ipc.arena_lister import Lister
from ...net.channel import Channel
from ...wire import messages as M
from ...wire.hello import client_hello
from ...wire.messages import Role, Status
from .workers import ANSWER_S, Asked

#: Slots that are read at a time: 16 MiB.
_PAGE: Final = 1 << 18
#: Values that one request deletes: the worker serves others between two of them.
BATCH: Final = 512
#: Columns of entries that an eviction needs.
_COLUMNS: Final = ("stored", "low", "high", "length")
#: How ``simm ctl keys`` chooses.
ORDERS: Final = ("sample", "hot", "large", "old", "new")

Rows = NDArray[np.void]


def check_name(namespace: str) -> None:
    """Raise UsageError for what no values are of: no namespace's name, nor that of all without a place in an arena."""
    if namespace != OTHERS_NAMESPACE:
        check_namespace(namespace)


def pages(lister: Lister) -> Iterator[tuple[Rows, NDArray[np.bool_]]]:
    """Yield the entries of an arena, and which of them were read since the eviction policy last looked. O(slots)."""
    slots = lister.reader.geometry.slots
    visited = np.frombuffer(lister.reader.visited, np.uint8)
    for start in range(0, slots, _PAGE):
        stop = min(start + _PAGE, slots)
        rows = lister.at_rest(start, stop)
        used = rows["offset"] != 0
        yield rows[used], visited[start:stop][used] != 0


def _chosen(
    lister: Lister, order: str, namespace: str | None, most: int, rng: np.random.Generator
) -> tuple[Rows, NDArray[np.float64]]:
    """Return the entries of one arena that :func:`key_rows` may show, ``most`` of them at most, and their ranks."""
    best: Rows | None = None
    ranks = np.zeros(0)
    for rows, read in pages(lister):
        wanted = _of_namespace(lister, rows, namespace)
        if order == "hot":
            wanted &= read
        rows = rows[wanted]
        rank = rng.random(len(rows)) if order == "sample" else _rank(order, rows)
        best = rows if best is None else np.concatenate((best, rows))
        ranks = np.concatenate((ranks, rank))
        if len(best) > most:
            kept = np.argpartition(ranks, most)[:most]
            best, ranks = best[kept], ranks[kept]
    return (best if best is not None else lister.at_rest(0, 0)), ranks


def _rank(order: str, rows: Rows) -> NDArray[np.float64]:
    """Return a number for each entry; the smallest ones are shown."""
    if order == "large":
        return -rows["length"].astype(np.float64)
    stored = rows["stored"].astype(np.float64)
    return -stored if order == "new" else stored


def _of_namespace(lister: Lister, rows: Rows, namespace: str | None) -> NDArray[np.bool_]:
    if namespace is None:
        return np.ones(len(rows), np.bool_)
    names = lister.names(np.unique(rows["namespace"]).tolist())
    return np.isin(rows["namespace"], [number for number, name in names.items() if name == namespace])


def key_rows(
    asked: Sequence[Asked], order: str = "sample", namespace: str | None = None, most: int = 20
) -> list[dict[str, Any]]:
    """Return rows of values of a namespace (None for all), ``most`` of them. O(slots).

    ``order``: ``sample`` by chance; ``hot``: read since the eviction policy last looked at them, those first that have
    stayed longest; ``large``, ``old``, ``new``: those first.
    """
    if order not in ORDERS:
        raise UsageError(f"no {order!r} keys: one of {', '.join(ORDERS)}")
    rng, now = np.random.default_rng(), time.time()
    found: list[tuple[float, dict[str, Any]]] = []
    for each in asked:
        reader = each.reader
        if reader is None:
            continue
        lister = Lister(reader)
        rows, ranks = _chosen(lister, order, namespace, most, rng)
        names = lister.names(np.unique(rows["namespace"]).tolist()) if len(rows) else {}
        for row, rank in zip(rows, ranks.tolist()):
            number = int(row["namespace"])
            digest = int(row["low"]).to_bytes(8, "little") + int(row["high"]).to_bytes(8, "little")
            found.append((rank, {
                "digest": digest.hex(), "worker": each.name, "namespace": names.get(number, f"#{number}"),
                "bytes": int(row["length"]), "chunk_bytes": int(row["chunk"]),
                "age_s": round(max(0.0, now - int(row["stored"]) / 1000), 3),
            }))  # fmt: skip
    # Ranks compare entries of all workers: those of a sample are by chance, so each entry is as likely as any other.
    found.sort(key=lambda each: each[0])
    return [row for _, row in found[:most]]


def evict(
    asked: Sequence[Asked], namespace: str | None, *, older_s: float = 0.0, larger: int = 0, most: int = 0,
    dry: bool = False,
) -> list[dict[str, Any]]:  # fmt: skip
    """Delete the values of a namespace (None for all) that are older and larger than this, the oldest first.

    ``most``: at most so many of each worker, 0 for all. ``dry``: only count them. Return a row for each worker; that of
    a worker which fails, or refuses some, has the reason, and the values that it has deleted. O(slots), and some 40
    bytes for each value that is found; none where all are only counted.

    Raises UsageError for what is no namespace's name, also for an empty one: it does not mean all.
    """
    if namespace is not None:
        check_name(namespace)
    found = []
    for each in asked:
        row: dict[str, Any] = {"worker": each.name, "found": 0, "bytes": 0, "evicted": 0, "reason": each.why}
        found.append(row)
        reader = each.reader
        if reader is None:
            row["reason"] = each.why or "its arena cannot be read"
            continue
        lister = Lister(reader)
        limit = (time.time() - older_s) * 1000 if older_s else math.inf
        wanted = functools.partial(_wanted, lister, namespace, larger, limit)
        if most or not dry:
            _evict_oldest(each, lister, wanted, most, row, dry=dry)
            continue
        for rows, _ in pages(lister):
            sizes = rows["length"][wanted(rows)]
            row["found"] += len(sizes)
            row["bytes"] += int(sizes.sum())
    return found


def _wanted(lister: Lister, namespace: str | None, larger: int, limit: float, rows: Rows) -> NDArray[np.bool_]:
    """Return which entries are of a namespace, so large, and stored by ``limit``, milliseconds since 1970."""
    of_size: NDArray[np.bool_] = (rows["length"] >= larger) & (rows["stored"] <= limit)
    return of_size & _of_namespace(lister, rows, namespace)


def _evict_oldest(
    asked: Asked, lister: Lister, wanted: Callable[[Rows], NDArray[np.bool_]], most: int, row: dict[str, Any], *,
    dry: bool,
) -> None:  # fmt: skip
    """Evict what is wanted of one worker, the oldest first, and put into its row what has come of it."""
    parts: dict[str, list[NDArray[Any]]] = {name: [] for name in _COLUMNS}
    for rows, _ in pages(lister):
        mask = wanted(rows)
        for name, pieces in parts.items():
            pieces.append(rows[name][mask])
    columns = {name: np.concatenate(parts.pop(name)) for name in _COLUMNS}  # pop: only one of them is there twice
    oldest = np.argsort(columns.pop("stored"), kind="stable")[: most or None]
    row["found"], row["bytes"] = len(oldest), int(columns["length"][oldest].sum())
    if dry or not len(oldest):
        return
    refused = 0
    try:
        for statuses in _delete(asked, columns, oldest):
            done = statuses.count(Status.OK)
            row["evicted"] += done
            refused += len(statuses) - done - statuses.count(Status.NOT_FOUND)
    except TransportError as exc:
        row["reason"] = str(exc)
    else:
        row["reason"] = f"it has refused {refused:,}: it is fenced, or their shards move" if refused else ""


def _delete(asked: Asked, columns: Mapping[str, NDArray[Any]], order: NDArray[np.intp]) -> Iterator[list[int]]:
    """Have a worker delete entries in this order, and yield the statuses of each batch. Raises TransportError.

    The entries of one batch at a time are Python objects: those of a whole arena would be gigabytes.
    """
    with contextlib.closing(Channel.unix(asked.path, ANSWER_S)) as channel:
        channel.call(client_hello(Role.CLIENT, namespace="default", pid=os.getpid()))
        for start in range(0, len(order), BATCH):
            at = order[start : start + BATCH]
            digests = np.stack((columns["low"][at], columns["high"][at]), axis=1).tobytes()
            sizes = columns["length"][at].tolist()
            yield channel.call(
                M.DeleteSized([(digests[each * 16 : each * 16 + 16], size) for each, size in enumerate(sizes)])
            ).statuses

"""The values in the arenas of this host: which there are, and their eviction by an operator.

Arenas are read in place, as clients read them, so looking costs workers nothing and needs no manager. An arena has no
keys, only their digests. Evicting asks the worker to delete the entry of a digest and a size, so a value of another
size that was put meanwhile stays.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ...arena.hashing import check_namespace
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
#: How ``simm ctl keys`` chooses.
ORDERS: Final = ("sample", "hot", "large", "old", "new")

Rows = NDArray[np.void]


def pages(lister: Lister) -> Iterator[tuple[Rows, NDArray[np.bool_]]]:
    """Yield the entries of an arena, and which of them were read since the eviction policy last looked. O(slots)."""
    slots = lister.reader.geometry.slots
    visited = np.frombuffer(lister.reader.visited, np.uint8)
    for start in range(0, slots, _PAGE):
        stop = min(start + _PAGE, slots)
        rows = lister.at_rest(start, stop)
        used = rows["offset"] != 0
        yield rows[used], visited[start:stop][used] != 0


def _chosen(lister: Lister, order: str, namespace: str | None, most: int, rng: np.random.Generator) -> Rows:
    """Return the entries of one arena that :func:`key_rows` may show: ``most`` of them at most."""
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
    return best if best is not None else lister.at_rest(0, 0)


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
    rng, now, found = np.random.default_rng(), time.time(), []
    for each in asked:
        reader = each.reader
        if reader is None:
            continue
        lister = Lister(reader)
        rows = _chosen(lister, order, namespace, most, rng)
        names = lister.names(np.unique(rows["namespace"]).tolist()) if len(rows) else {}
        for row in rows:
            number = int(row["namespace"])
            digest = int(row["low"]).to_bytes(8, "little") + int(row["high"]).to_bytes(8, "little")
            found.append({
                "digest": digest.hex(), "worker": each.name, "namespace": names.get(number, f"#{number}"),
                "bytes": int(row["length"]), "chunk_bytes": int(row["chunk"]),
                "age_s": round(max(0.0, now - int(row["stored"]) / 1000), 3),
            })  # fmt: skip
    keys = {
        "sample": lambda row: row["digest"], "large": lambda row: -row["bytes"], "new": lambda row: row["age_s"],
    }  # fmt: skip
    found.sort(key=keys.get(order, lambda row: -row["age_s"]))
    return found[:most]


def evict(
    asked: Sequence[Asked], namespace: str | None, *, older_s: float = 0.0, larger: int = 0, most: int = 0,
    dry: bool = False,
) -> list[dict[str, Any]]:  # fmt: skip
    """Delete the values of a namespace (None for all) that are older and larger than this, the oldest first.

    ``most``: at most so many of each worker, 0 for all. ``dry``: only count them. Return a row for each worker; that of
    a worker which fails has the reason, and the values that it had deleted by then. O(slots).

    Raises UsageError for what is no namespace's name, also for an empty one: it does not mean all.
    """
    if namespace is not None:
        check_namespace(namespace)
    found = []
    for each in asked:
        row: dict[str, Any] = {"worker": each.name, "found": 0, "bytes": 0, "evicted": 0, "reason": each.why}
        found.append(row)
        reader = each.reader
        if reader is None:
            row["reason"] = each.why or "its arena cannot be read"
            continue
        lister, limit = Lister(reader), (time.time() - older_s) * 1000
        parts = []
        for rows, _ in pages(lister):
            wanted = _of_namespace(lister, rows, namespace) & (rows["length"] >= larger)
            parts.append(rows[wanted & (rows["stored"] <= limit)] if older_s else rows[wanted])
        rows = np.concatenate(parts)
        rows = rows[np.argsort(rows["stored"], kind="stable")][: most or None]
        row["found"], row["bytes"] = len(rows), int(rows["length"].sum())
        if not dry and len(rows):
            try:
                for count in _delete(each, rows):
                    row["evicted"] += count
            except TransportError as exc:
                row["reason"] = str(exc)
    return found


def _delete(asked: Asked, rows: Rows) -> Iterator[int]:
    """Have a worker delete entries, and yield after each batch how many of it were there. Raises TransportError."""
    digests = np.stack((rows["low"], rows["high"]), axis=1).tobytes()
    entries = [(digests[at * 16 : at * 16 + 16], size) for at, size in enumerate(rows["length"].tolist())]
    with contextlib.closing(Channel.unix(asked.path, ANSWER_S)) as channel:
        channel.call(client_hello(Role.CLIENT, namespace="default", pid=os.getpid()))
        for start in range(0, len(entries), BATCH):
            statuses = channel.call(M.DeleteSized(entries[start : start + BATCH])).statuses
            yield statuses.count(Status.OK)

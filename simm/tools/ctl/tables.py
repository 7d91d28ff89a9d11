"""What ``simm ctl`` shows: rows for programs (``--json``), and tables of them for people."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from ...arena.events.victims import evicted_in
from ...errors import printable
from ...host.processes import program_of
from ...ipc.tally import Totals, counters_summary
from ..nodes import bytes_text, columns
from .workers import Asked, Stored, stored_in

Row = dict[str, Any]


class Summed(list[Row]):
    """Rows that add up several workers. ``by_worker``: what each of them has counted, of which rates are made."""

    def __init__(self, rows: Sequence[Row], by_worker: Sequence[Row]) -> None:
        super().__init__(rows)
        self.by_worker = by_worker


def ratio(hits: int, misses: int) -> float | None:
    """Return the hit ratio; None without any get."""
    return hits / (hits + misses) if hits + misses else None


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _done(counts: Mapping[str, Any]) -> Row:
    """Return the columns that tables of counts share."""
    misses = sum(counts["misses"].values())
    return {
        "gets": counts["hits"] + misses, "hits": counts["hits"], "hit_ratio": ratio(counts["hits"], misses),
        "misses": counts["misses"], "bytes_read": counts["bytes_read"], "puts": counts["puts"],
        "put_failures": counts["put_failures"], "bytes_put": counts["bytes_put"],
        "exists": counts["exists_found"] + counts["exists_absent"], "exists_evicted": counts["exists_evicted"],
    }  # fmt: skip


def totals_of(asked: Sequence[Asked]) -> Totals:
    """Return what the clients of all workers have counted."""
    together = Totals()
    for each in asked:
        together.add(each.stats.get("counted", {}))
    return together


# -- rows --------------------------------------------------------------------------------------------


def worker_rows(asked: Sequence[Asked]) -> list[Row]:
    """Return a row for each worker; ``reason``: why it has none."""
    rows = []
    for each in asked:
        stats = each.stats
        row: Row = {"worker": each.name, "reason": each.why}
        if stats:
            counts = [sum(column) for column in zip(*stats["counted"]["namespaces"].values())]
            row |= {
                "pid": stats["pid"], "entries": stats["entries"], "data_bytes": stats["data_bytes"],
                "used_bytes": stats["data_bytes"] - stats["free_bytes"], "granted_bytes": stats["granted_bytes"],
                "pins": stats["pins"], "clients": sum(each["kind"] == "client" for each in stats["clients"]),
                "quarantined": stats["sessions_quarantined"], "epoch": stats["epoch"], "shards": stats["shards"],
                "fenced": stats["fenced"], "evictions": evicted_in(stats),
                "evictions_by_reason": stats["evictions"], "put_failures_by_cause": stats["put_failures"],
                "policy": stats["policy"], "poll_us": stats["poll_us"], "segment": stats["segment"],
                **(_done(counters_summary(counts)) if counts else {}),
            }  # fmt: skip
        rows.append(row)
    return rows


def client_rows(asked: Sequence[Asked]) -> list[Row]:
    """Return a row for each session of a client, those that did something last first."""
    return [row for row in session_rows(asked) if row["kind"] == "client"]


def session_rows(asked: Sequence[Asked]) -> list[Row]:
    """Return a row for each session, also of movers and of a server's own processes."""
    rows = []
    for each in asked:
        for claimed in each.stats.get("clients", ()):
            row = {"worker": each.name, "program": program_of(claimed["pid"]), "path": "shm", **claimed}
            rows.append({**row, **_done(row.pop("counts"))} if "counts" in row else row)
    rows.sort(key=lambda row: (row["idle_s"] is None, row["idle_s"] or 0.0))
    return rows


def namespace_rows(asked: Sequence[Asked]) -> Summed:
    """Return a row for each namespace that has values, or of which clients have counted something. O(slots)."""
    rows: dict[str, Row] = {}
    by_worker = worker_rows(asked)

    def row(name: str) -> Row:
        empty = {
            "namespace": name, "entries": 0, "bytes": 0, "kept_bytes": 0, "soft_kept_bytes": 0, "clients": 0,
            "quota_bytes": None,
        }  # fmt: skip
        return rows.setdefault(name, {**empty, **_done(counters_summary([0] * 32))})

    for name, counts in totals_of(asked).namespaces.items():
        row(name).update(_done(counters_summary(counts)))
    for each in asked:
        stored = stored_in(each)
        for name, (count, size) in (stored.namespaces if stored else {}).items():
            row(name)["entries"] += count
            row(name)["bytes"] += size
        for name, sizes in kept_of(each).get("bytes", {}).items():
            row(name)["kept_bytes"] += sizes.get("hard", 0)
            row(name)["soft_kept_bytes"] += sizes.get("soft", 0)
        for name, quota in each.stats.get("quotas", {}).items():
            row(name)["quota_bytes"] = (row(name)["quota_bytes"] or 0) + quota["quota_bytes"]
        for claimed in each.stats.get("clients", ()):
            if claimed["kind"] == "client" and not claimed["quarantined"]:
                row(claimed["namespace"])["clients"] += 1
    return Summed(sorted(rows.values(), key=lambda row: (-row["bytes"], row["namespace"])), by_worker)


def kept_of(asked: Asked) -> dict[str, Any]:
    """Return what a worker says of kept values."""
    found: dict[str, Any] = asked.stats.get("kept", {})
    return found


def kept_text(asked: Sequence[Asked]) -> str:
    """Return a line on hard kept values, by how much may be; empty if there are none."""
    found = [kept_of(each) for each in asked]
    used, slots = (
        sum(counts.get("hard", 0) for each in found for counts in each.get(key, {}).values())
        for key in ("bytes", "slots")
    )
    bounds = "hard_max", "namespace_max", "slots_max", "namespace_slots_max"
    most, own, slots_most, slots_own = (sum(each.get(key, 0) for each in found) for key in bounds)
    if not used:
        return ""
    text = (
        f"\nhard kept: {bytes_text(used)} of the {bytes_text(most)} that may be (keep_share), "
        f"{bytes_text(own)} of one namespace (keep_namespace_share)"
    )
    if slots_most:  # workers of an older version do not say
        text += f"; {slots} of {slots_most} slots of the table, {slots_own} of one namespace"
    return text


def chunk_rows(asked: Sequence[Asked]) -> list[Row]:
    """Return a row for each size of chunk that has values. O(slots)."""
    found: dict[int, list[int]] = {}
    for each in asked:
        stored: Stored | None = stored_in(each)
        for chunk, (count, size) in (stored.chunks if stored else {}).items():
            mine = found.setdefault(chunk, [0, 0])
            mine[0] += count
            mine[1] += size
    return [
        {"chunk_bytes": chunk, "entries": count, "bytes": size, "wasted_bytes": count * chunk - size}
        for chunk, (count, size) in sorted(found.items())
    ]


# -- tables ------------------------------------------------------------------------------------------


def _idle(row: Row) -> str:
    if row["idle_s"] is None:
        return "-"
    return _time(row["idle_s"])


def _time(seconds: float) -> str:
    return f"{seconds:.1f}s" if seconds < 60 else f"{seconds / 60:.0f}m" if seconds < 3600 else f"{seconds / 3600:.0f}h"


def _nothing(_asked: Sequence[Asked]) -> list[Row]:
    """Return no rows: others than workers have them."""
    return []


#: Runs of shards that a line shows.
RUNS_SHOWN: Final = 4


def runs_text(row: Row) -> str:
    """Return a worker's shards as text, the first runs of them."""
    runs: list[list[int]] = row["runs"]
    texts = [f"{first}-{last}" if last > first else str(first) for first, last in runs[:RUNS_SHOWN]]
    return ", ".join(texts) + (f", and {len(runs) - RUNS_SHOWN:,} runs more" if len(runs) > RUNS_SHOWN else "")


def _reason(row: Row) -> str:
    """Return why most of a row's gets were misses."""
    reasons = {reason: count for reason, count in row.get("misses", {}).items() if count}
    return max(reasons, key=reasons.__getitem__) if reasons else ""


_Cell = Callable[[Row], str]
#: What ``simm ctl`` shows: rows, columns with a text for each row, and which of them are flush left.
TABLES: Final[dict[str, tuple[Callable[[Sequence[Asked]], list[Row]], dict[str, _Cell], tuple[int, ...]]]] = {
    "workers": (worker_rows, {
        "WORKER": lambda row: str(row["worker"]), "PID": lambda row: str(row.get("pid", "-")),
        "ENTRIES": lambda row: f"{row.get('entries', 0):,}", "USED": lambda row: bytes_text(row.get("used_bytes", 0)),
        "OF": lambda row: bytes_text(row.get("data_bytes", 0)), "CLIENTS": lambda row: f"{row.get('clients', 0):,}",
        "SHARDS": lambda row: f"{row.get('shards', 0):,}", "GETS": lambda row: f"{row.get('gets', 0):,}",
        "HITS": lambda row: _percent(row.get("hit_ratio")), "PUTS": lambda row: f"{row.get('puts', 0):,}",
        "EVICTED": lambda row: f"{row.get('evictions', 0):,}",
        "STATE": lambda row: row["reason"] or ("fenced: no puts" if row["fenced"] else "ok"),
    }, (0, 11)),
    "clients": (client_rows, {
        "WORKER": lambda row: str(row["worker"]), "PID": lambda row: str(row["pid"]),
        "PROGRAM": lambda row: str(row["program"]), "NAMESPACE": lambda row: str(row["namespace"]),
        "GETS": lambda row: f"{row.get('gets', 0):,}", "HITS": lambda row: _percent(row.get("hit_ratio")),
        "READ": lambda row: bytes_text(row.get("bytes_read", 0)), "PUTS": lambda row: f"{row.get('puts', 0):,}",
        "PUT": lambda row: bytes_text(row.get("bytes_put", 0)), "GRANTED": lambda row: bytes_text(row["granted_bytes"]),
        "PINS": lambda row: f"{row['pins']:,}", "IDLE": _idle,
        "STATE": lambda row: (
            "gone, its process lives" if row["quarantined"] else "ok" if row["believed"] else "counts nonsense"
        ),
    }, (0, 2, 3, 12)),
    "namespaces": (namespace_rows, {
        "NAMESPACE": lambda row: str(row["namespace"]), "ENTRIES": lambda row: f"{row['entries']:,}",
        "BYTES": lambda row: bytes_text(row["bytes"]), "HARD KEPT": lambda row: bytes_text(row["kept_bytes"]),
        "SOFT KEPT": lambda row: bytes_text(row["soft_kept_bytes"]),
        "QUOTA": lambda row: "-" if row["quota_bytes"] is None else bytes_text(row["quota_bytes"]),
        "CLIENTS": lambda row: f"{row['clients']:,}", "GETS": lambda row: f"{row['gets']:,}",
        "HITS": lambda row: _percent(row["hit_ratio"]), "PUTS": lambda row: f"{row['puts']:,}",
        "FAILED": lambda row: f"{row['put_failures']:,}", "MISSES ARE MOST": _reason,
    }, (0, 11)),
    "slabs": (chunk_rows, {
        "CHUNK": lambda row: f"{row['chunk_bytes']:,}", "ENTRIES": lambda row: f"{row['entries']:,}",
        "BYTES": lambda row: bytes_text(row["bytes"]), "WASTED": lambda row: bytes_text(row["wasted_bytes"]),
        "OF THEM": lambda row: _percent(row["wasted_bytes"] / (row["bytes"] + row["wasted_bytes"])),
    }, ()),
    "sessions": (session_rows, {
        "WORKER": lambda row: str(row["worker"]), "SESSION": lambda row: f"{row['session']:#x}",
        "KIND": lambda row: str(row["kind"]), "PID": lambda row: str(row["pid"]),
        "PROGRAM": lambda row: str(row["program"]), "NAMESPACE": lambda row: str(row["namespace"]),
        "GRANTS": lambda row: f"{row['grants']:,}", "GRANTED": lambda row: bytes_text(row["granted_bytes"]),
        "PINS": lambda row: f"{row['pins']:,}", "IDLE": _idle,
        "STATE": lambda row: "gone, its process lives" if row["quarantined"] else "ok",
    }, (0, 2, 4, 5, 10)),
    "keys": (_nothing, {
        "DIGEST": lambda row: str(row["digest"]), "WORKER": lambda row: str(row["worker"]),
        "NAMESPACE": lambda row: str(row["namespace"]), "BYTES": lambda row: f"{row['bytes']:,}",
        "CHUNK": lambda row: f"{row['chunk_bytes']:,}", "AGE": lambda row: _time(row["age_s"]),
    }, (0, 1, 2)),
    "evict": (_nothing, {
        "WORKER": lambda row: str(row["worker"]), "FOUND": lambda row: f"{row['found']:,}",
        "BYTES": lambda row: bytes_text(row["bytes"]), "EVICTED": lambda row: f"{row['evicted']:,}",
        "STATE": lambda row: row["reason"] or "ok",
    }, (0, 4)),
    "settings": (_nothing, {
        "SERVER": lambda row: str(row["server"]), "SETTING": lambda row: str(row["name"]),
        "VALUE": lambda row: str(row["value"]),
        "STARTED WITH": lambda row: str(row["started_with"]) if row["started_with"] != row["value"] else "",
        "WHAT IT IS": lambda row: str(row["about"]),
    }, (0, 1, 2, 3, 4)),
    "node": (_nothing, {
        "NODE": lambda row: str(row["node"]), "STATE": lambda row: str(row["state"]),
        "WORKERS": lambda row: f"{row['workers']:,}", "SHARDS": lambda row: f"{row['shards']:,}",
        "IN": lambda row: f"{row['moving_in']:,}", "OUT": lambda row: f"{row['moving_out']:,}",
        "USED": lambda row: bytes_text(row["used_bytes"]), "OF": lambda row: bytes_text(row["capacity_bytes"]),
        "ENTRIES": lambda row: f"{row['entries']:,}", "ADDRESS": lambda row: str(row["address"]),
    }, (0, 1, 9)),
    "server": (_nothing, {
        "WORKER": lambda row: f"{row['server']}/{row['worker']}", "STATE": lambda row: str(row["state"]),
        "NUMA": lambda row: "-" if row["numa_node"] is None else str(row["numa_node"]),
        "SHARDS": lambda row: f"{row['shards']:,}", "IN": lambda row: f"{row['moving_in']:,}",
        "OUT": lambda row: f"{row['moving_out']:,}", "USED": lambda row: bytes_text(row["used_bytes"]),
        "OF": lambda row: bytes_text(row["capacity_bytes"]), "ENTRIES": lambda row: f"{row['entries']:,}",
        "PUTS": lambda row: f"{row['puts']:,}", "EVICTED": lambda row: f"{row['evictions']:,}",
        "SEEN": lambda row: "-" if row["silent_s"] is None else f"{_time(row['silent_s'])} ago",
        "ADDRESS": lambda row: str(row["address"]),
    }, (0, 1, 12)),
    "shard": (_nothing, {
        "WORKER": lambda row: str(row["worker"]), "SHARDS": lambda row: f"{row['shards']:,}",
        "MOVING IN": lambda row: f"{row['moving_in']:,}", "WHICH": runs_text,
    }, (0, 3)),
}  # fmt: skip


def table(what: str, rows: Sequence[Row]) -> str:
    """Return rows as text, for people."""
    _, cells, left = TABLES[what]
    if not rows:
        return f"no {what}"
    lines = [[printable(cell(row)) for cell in cells.values()] for row in rows]
    return "\n".join(columns([list(cells), *lines], left))


def rates_text(rows: Sequence[Row], before: Sequence[Row], seconds: float) -> str:
    """Return a line on what all rows did since they were shown before; empty for rows without counts.

    What is gone since, began anew, or was not known then, counts for nothing.
    """
    keys = ("gets", "hits", "puts", "bytes_read", "bytes_put")
    rows, before = (each.by_worker if isinstance(each, Summed) else each for each in (rows, before))
    old = {_identity(row): row for row in before}
    done = dict.fromkeys(keys, 0)
    for row in rows:
        was = old.get(_identity(row))
        if was is not None and "gets" in row:
            for key in keys:
                done[key] += max(0, row[key] - was.get(key, 0))
    if seconds <= 0 or not any("gets" in row for row in rows):
        return ""
    each = {key: count / seconds for key, count in done.items()}
    return (
        f"\n\n{each['gets']:,.0f} gets/s, {_percent(ratio(done['hits'], done['gets'] - done['hits']))} of them hits, "
        f"{bytes_text(int(each['bytes_read']))}/s read, {each['puts']:,.0f} puts/s, "
        f"{bytes_text(int(each['bytes_put']))}/s put"
    )


def _identity(row: Row) -> tuple[Any, ...]:
    return row.get("worker"), row.get("session"), row.get("namespace"), row.get("pid")

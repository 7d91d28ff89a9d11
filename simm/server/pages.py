"""A data server's HTTP pages: /healthz and /metrics, made from what the supervisor knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ..net.http import METRICS, Page, process_samples, prometheus

#: (metric, type, help, key of the worker's STATS)
_WORKER: Final = (
    ("simm_entries", "gauge", "values stored", "entries"),
    ("simm_slots", "gauge", "values that the table can hold", "slots"),
    ("simm_data_bytes", "gauge", "size of the data region", "data_bytes"),
    ("simm_free_bytes", "gauge", "bytes in free chunks", "free_bytes"),
    ("simm_granted_bytes", "gauge", "bytes handed to clients and not yet committed", "granted_bytes"),
    ("simm_sessions", "gauge", "client sessions", "sessions"),
    ("simm_sessions_quarantined", "gauge", "ended sessions that wait for their process", "sessions_quarantined"),
    ("simm_pins", "gauge", "values pinned by views", "pins"),
    ("simm_shards", "gauge", "shards in which mutations are accepted", "shards"),
    ("simm_shards_frozen", "gauge", "shards that another server takes over", "frozen"),
    ("simm_puts_total", "counter", "values committed", "puts"),
    ("simm_overwrites_total", "counter", "of them, replacing another", "overwrites"),
    ("simm_deletes_total", "counter", "values deleted", "deletes"),
    ("simm_stale_commits_total", "counter", "commits with a spent or foreign grant", "stale_commits"),
    ("simm_requests_total", "counter", "requests handled", "requests"),
    ("simm_protocol_errors_total", "counter", "connections closed for malformed input", "protocol_errors"),
    ("simm_arena_mended", "gauge", "words and slots that others had overwritten, mended since its start", "mended"),
)

#: (metric, type, help, key of a Row's moves)
_MOVES: Final = (
    ("simm_moves_left", "gauge", "shards still moving in", "left"),
    ("simm_move_rate_bytes", "gauge", "bytes a second copied for that of late", "rate"),
    ("simm_moved_bytes_total", "counter", "bytes copied from previous owners", "bytes"),
    ("simm_moved_values_total", "counter", "values copied from previous owners", "values"),
    ("simm_move_lost_values_total", "counter", "values of previous owners that did not come along", "lost"),
)

#: (metric, type, help, key of an endpoint's STATS)
_RDMA: Final = (
    ("simm_rdma_connections", "gauge", "RDMA connections of clients", "rdma_connections"),
    ("simm_rdma_queue_pairs", "gauge", "queue pairs of these", "queue_pairs"),
    ("simm_rdma_granted_bytes", "gauge", "bytes handed to RDMA clients and not yet committed", "granted_bytes"),
    ("simm_rdma_registered_bytes", "gauge", "bytes registered, on all rails together", "registered_bytes"),
    ("simm_rdma_windows", "gauge", "memory windows made", "windows"),
    ("simm_rdma_protected", "gauge", "1 where clients can write only into the chunks that they hold", "protected"),
    ("simm_rdma_connections_opened_total", "counter", "connections opened", "connections_opened"),
    ("simm_rdma_connections_broken_total", "counter", "of them, closed because a link broke", "connections_broken"),
    ("simm_rdma_commits_total", "counter", "values committed that came by RDMA", "commits"),
    ("simm_rdma_commit_failures_total", "counter", "values that were not", "commit_failures"),
    ("simm_rdma_recalls_total", "counter", "connections asked for idle grants", "recalls"),
    ("simm_rdma_endpoint_restarts_total", "counter", "endpoint processes that died", "restarts"),
)

#: (metric, key of a namespace's quota in a worker's STATS, help)
_QUOTAS: Final = (
    ("simm_namespace_used_bytes", "used_bytes", "bytes that the values of a namespace with a quota hold"),
    ("simm_namespace_quota_bytes", "quota_bytes", "this worker's part of the quota"),
)


@dataclass
class Row:
    """The supervisor's knowledge of one worker."""

    worker: int
    node: int
    stats: Mapping[str, Any]
    restarts: int
    moves: Mapping[str, int] = field(default_factory=dict)
    #: Since it answered the supervisor, seconds.
    silent_s: float = 0.0
    #: Of its endpoint: ``ready``, ``why`` not, and counters where there is one.
    rdma: Mapping[str, Any] = field(default_factory=dict)
    #: Its stream processes that hang or do not reach it.
    streams_cut_off: int = 0
    #: Its processes that ended with a CorruptionError.
    corruptions: int = 0


def healthz(
    down: Sequence[int], silent: Sequence[int], joined: bool, fenced: bool, *,
    cut_off: Sequence[int] = (), unreachable: Sequence[str] = (),
) -> Page:  # fmt: skip
    """Return 200 while every worker serves, also without a manager, as the data path needs none.

    ``down``: workers that are being restarted. ``silent``: workers that hang. ``cut_off``: workers with a stream
    process that hangs or does not reach them. ``unreachable``: why clients of this host do not find a worker.
    """
    if down:
        return Page(f"workers {list(down)} are restarting\n", status=503)
    if silent:
        return Page(f"workers {list(silent)} do not answer: stopped, or hung? kill -9 restarts one\n", status=503)
    if cut_off:
        text = f"a stream process of workers {list(cut_off)} hangs or does not reach its worker: kill -9 restarts it\n"
        return Page(text, status=503)
    if unreachable:
        return Page("".join(f"{why}\n" for why in unreachable), status=503)
    if fenced:
        return Page("ok, but the manager does not know us: no puts until it does\n")
    return Page("ok\n" if joined else "ok, but no manager\n")


def metrics(rows: Sequence[Row], *, joined: bool, fenced: bool, epoch: int) -> Page:
    """Return the metrics as Prometheus text."""
    samples: list[tuple[str, str, str, dict[str, Any], float]] = [
        ("simm_joined", "gauge", "1 while a manager knows us", {}, float(joined)),
        ("simm_fenced", "gauge", "1 while the manager does not know us and no mutation is taken", {}, float(fenced)),
        ("simm_map_epoch", "gauge", "epoch of the shard map in use", {}, float(epoch)),
    ]
    labelled: list[tuple[dict[str, Any], Row]] = [({"worker": row.worker, "node": row.node}, row) for row in rows]
    for name, kind, about, key in _WORKER:
        samples += [(name, kind, about, labels, float(row.stats.get(key, 0))) for labels, row in labelled]
    for name, kind, about, key in _MOVES:
        samples += [(name, kind, about, labels, float(row.moves.get(key, 0))) for labels, row in labelled]
    for name, kind, about, key in _RDMA:
        samples += [(name, kind, about, labels, float(row.rdma[key])) for labels, row in labelled if key in row.rdma]
    about = "1 while clients can open RDMA connections; reason says why not"
    samples += [
        ("simm_rdma_ready", "gauge", about, {**labels, "reason": row.rdma.get("why", "")}, float(row.rdma["ready"]))
        for labels, row in labelled
        if row.rdma
    ]
    for labels, row in labelled:
        reasons = {**row.stats.get("evictions", {}), "set_full": row.stats.get("set_evictions", 0)}
        for reason, count in reasons.items():
            about = "entries evicted, by reason"
            samples.append(("simm_evictions_total", "counter", about, {**labels, "reason": reason}, float(count)))
        for cause, count in row.stats.get("put_failures", {}).items():
            about = "commits refused, and requests for grants that brought none, by cause"
            samples.append(("simm_put_failures_total", "counter", about, {**labels, "cause": cause}, float(count)))
    for name, key, about in _QUOTAS:
        for labels, row in labelled:
            for namespace, counts in row.stats.get("quotas", {}).items():
                samples.append((name, "gauge", about, {**labels, "namespace": namespace}, float(counts[key])))
    samples += [
        ("simm_worker_silent_seconds", "gauge", "since the worker answered its supervisor", labels, row.silent_s)
        for labels, row in labelled
    ]
    samples += [
        ("simm_streams_cut_off", "gauge", "stream processes that hang or do not reach their worker", labels,
         float(row.streams_cut_off))
        for labels, row in labelled
    ]  # fmt: skip
    samples += [
        ("simm_worker_restarts", "gauge", "restarts within the last minute", labels, float(row.restarts))
        for labels, row in labelled
    ]
    samples += [
        ("simm_worker_corruptions_total", "counter", "workers that ended as others had overwritten their arena", labels,
         float(row.corruptions))
        for labels, row in labelled
    ]  # fmt: skip
    return Page(prometheus([*samples, *process_samples()]), METRICS)

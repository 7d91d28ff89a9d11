"""The metrics of ``simm events``, declared without the libraries that it needs."""

from __future__ import annotations

from typing import Final

from ...net.metrics import OF_PROCESSES, Metric

_FORM: Final = ("form",)
_SOCKET: Final = (*_FORM, "socket")
WORKERS: Final = Metric("simm_publisher_workers", "gauge", "Workers of this host whose events are published.")
BLOCKS: Final = Metric("simm_publisher_blocks", "gauge", "Values that are published as stored.")
GAPS: Final = Metric(
    "simm_publisher_gaps_total", "counter",
    "Times that a worker had written its ring all around before it was read. What was lost is made good by a look at "
    "the table.",
)  # fmt: skip
LOOKS: Final = Metric("simm_publisher_looks_total", "counter", "Times that a worker's table was looked at.")
MESSAGES: Final = Metric("simm_publisher_messages_total", "counter", "Messages published, signs of life too.", _FORM)
CHANGES: Final = Metric(
    "simm_publisher_changes_total", "counter", "Blocks published as stored or as removed, without snapshots.", _FORM
)
KEPT: Final = Metric("simm_publisher_kept_bytes", "gauge", "Bytes of messages and of a snapshot, for replays.", _FORM)
REPLAYS: Final = Metric("simm_publisher_replays_total", "counter", "Replays that consumers have asked for.", _FORM)
SNAPSHOTS: Final = Metric("simm_publisher_snapshots_total", "counter", "Snapshots taken for them.", _FORM)
SKIPPED: Final = Metric(
    "simm_publisher_skipped_total", "counter", "Messages that subscribers have missed as they read too slowly.", _FORM
)
PEERS: Final = Metric("simm_publisher_peers", "gauge", "Connections, of at most 256.", _SOCKET)
REFUSED: Final = Metric(
    "simm_publisher_peers_refused_total", "counter",
    "Connections that found 256 others: refused, or let in in place of another one.", _SOCKET,
)  # fmt: skip
DROPPED: Final = Metric(
    "simm_publisher_peers_dropped_total", "counter", "Connections closed as they spoke wrong or read nothing.", _SOCKET
)
METRICS: Final = (
    WORKERS, BLOCKS, GAPS, LOOKS, MESSAGES, CHANGES, KEPT, REPLAYS, SNAPSHOTS, SKIPPED, PEERS, REFUSED, DROPPED,
    *OF_PROCESSES,
)  # fmt: skip

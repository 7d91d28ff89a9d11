"""The metrics of the event index, declared without the libraries that it needs."""

from __future__ import annotations

from typing import Final

from ..net.metrics import OF_PROCESSES, Metric

_SOURCE: Final = ("endpoint", "tenant", "rank")
BLOCKS: Final = Metric("simm_index_blocks", "gauge", "Blocks that a publisher's engine or store holds.", _SOURCE)
STALE: Final = Metric(
    "simm_index_stale", "gauge",
    "1 for a publisher of which messages were lost: it is not counted, or only what it has stored since.", _SOURCE,
)  # fmt: skip
COMPLETE: Final = Metric("simm_index_complete", "gauge", "1 if all that the publisher has is known.", _SOURCE)
WAITING: Final = Metric("simm_index_waiting", "gauge", "Blocks that wait for an event of their parent.", _SOURCE)
STREAM: Final = Metric(
    "simm_index_stream_total", "counter",
    "What came of a publisher, and what went wrong: messages, events, gaps, replays, restarts, refused and others.",
    (*_SOURCE, "kind"),
)  # fmt: skip
IGNORED: Final = Metric(
    "simm_index_ignored_total", "counter", "Events that are not counted, by reason.", (*_SOURCE, "reason")
)
BYTES: Final = Metric("simm_index_bytes", "gauge", "Bytes of the tables.")
ADDED: Final = Metric("simm_index_added_total", "counter", "Blocks that events have added.")
REMOVED: Final = Metric("simm_index_removed_total", "counter", "Blocks that events have removed.")
QUESTIONS: Final = Metric("simm_index_requests_total", "counter", "Requests, by their path.", ("request",))
METRICS: Final = (BLOCKS, STALE, COMPLETE, WAITING, STREAM, IGNORED, BYTES, ADDED, REMOVED, QUESTIONS, *OF_PROCESSES)

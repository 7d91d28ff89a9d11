"""Reports of data servers, as tests want them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from simm.ipc.counts import BUCKETS
from simm.wire.report_messages import COUNTS, OPERATIONS, ClientActivity, NamespaceActivity, Report, WorkerActivity

BUCKETS_OF_ALL = BUCKETS * len(OPERATIONS)


def report(name: str = "a", counts: Sequence[int] = (), *, instance: int = 1, **changed: Any) -> Report:
    """Return a report of a server with one worker, one namespace and one client, all with the same counts."""
    counted = list(counts) or [0] * len(COUNTS)
    worker = WorkerActivity(0, 3, 0, counted, changed.pop("latencies", [0] * BUCKETS_OF_ALL))
    made = Report(
        instance, name, [worker], [NamespaceActivity("n", counted, 0, 0)],
        [ClientActivity(0, 77, "python", "n", 1500, counted)], 0, 2,
    )  # fmt: skip
    return made._replace(**changed)

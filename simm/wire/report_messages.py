"""The messages by which data servers tell their manager what clients do, for its status page.

``server/operators/reports.py`` makes the reports, ``control/activity.py`` adds them up. All counters are those since
the data server began, so a report that is lost takes nothing with it.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from ..rpc import message, structure


@structure("H I I *Q *Q")
class WorkerActivity(NamedTuple):
    """What the clients of one worker have done, by all paths together.

    ``counts``: numbers in the order of :data:`COUNTS`. ``latencies``: numbers of calls by bucket, for each operation of
    :data:`OPERATIONS` (``ipc/counts.py`` has the bounds).
    """

    worker: int
    clients: int
    quarantined: int
    counts: list[int]
    latencies: list[int]


@structure("s *Q Q Q")
class NamespaceActivity(NamedTuple):
    """What has been done in one namespace. ``quota_bytes`` and ``used_bytes`` are 0 without a quota."""

    name: str
    counts: list[int]
    used_bytes: int
    quota_bytes: int


@structure("H I s s I *Q")
class ClientActivity(NamedTuple):
    """One session of a client that shares memory with a worker."""

    worker: int
    pid: int
    program: str
    namespace: str
    idle_ms: int
    counts: list[int]


@message(0x72, "I")
class ReportEvery(NamedTuple):
    """Push, manager to supervisor: send a REPORT so often, on this connection. 0: send none."""

    interval_ms: int


@message(0x73, "Q s [WorkerActivity] [NamespaceActivity] [ClientActivity] I I")
class Report(NamedTuple):
    """What clients of this data server do. ``_left``: namespaces and clients that are not listed. Answer: DONE."""

    instance: int
    name: str
    workers: list[WorkerActivity]
    namespaces: list[NamespaceActivity]
    clients: list[ClientActivity]
    namespaces_left: int
    clients_left: int


#: What is counted, in the order of ``counts``.
COUNTS: Final = ("hits", "misses", "puts", "put_failures", "bytes_read", "bytes_put", "exists")
#: Operations with latencies, in their order.
OPERATIONS: Final = ("get", "get_many", "put", "put_many")
#: Bit of MAP_GET's ``subscribe``: this data server sends a REPORT if it is told how often.
SUBSCRIBE_REPORTS: Final = 8
#: One report lists so many, those that did most and those that did something last.
NAMESPACES_MAX: Final = 32
CLIENTS_MAX: Final = 16

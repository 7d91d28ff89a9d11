"""What the clients of all data servers do, from their reports: rates, hit ratio, latencies, and how they went of late.

A data server reports counters that only grow (``wire/report_messages.py``). The difference of two reports, over the
time between them, is what happens now. A server whose last report is older than ``STALE_REPORTS`` intervals counts for
nothing any more; its sums stay until it leaves, or until others have its shards. A counter that shrinks began anew: the
server was restarted, and this report has no rates.

Nothing here decides anything. A report is believed only as one server's own word: it may lie about itself, within the
bounds of :func:`fault`, and only the page shows it.

A reader of the page may be a tenant, if tokens are bound to namespaces. Data servers name to the manager only what such
a reader may know then, and of the epochs only those of these namespaces are shown.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from ..cluster.nodes import NODE_WORKERS_MAX, Node
from ..config.tokens import Token, namespaces_of
from ..constants import NAMESPACE_BYTES_MAX
from ..errors import printable
from ..ipc.counts import BUCKETS
from ..ipc.tally import quantile_s
from ..wire.report_messages import (
    CLIENTS_MAX,
    COUNTS,
    NAMESPACES_MAX,
    OPERATIONS,
    Report,
)

#: A report of each server so often, seconds; and so long for each server, so that a large cluster reports less often.
REPORT_S: Final = 2.0
REPORT_S_A_SERVER: Final = 0.005
#: So many intervals after its last report a server does not count any more.
STALE_REPORTS: Final = 3
#: The cluster's history: points, and seconds between two of them.
HISTORY: Final = 150
HISTORY_S: Final = 2.0
#: The page lists so many namespaces and clients of the whole cluster.
NAMESPACES_SHOWN: Final = 64
CLIENTS_SHOWN: Final = 64
#: Names of the history's rows.
ROWS: Final = (
    "gets_per_s", "hit_ratio", "puts_per_s", "bytes_read_per_s", "bytes_put_per_s", "get_p99_s", "put_p99_s",
    "used_bytes", "move_bytes_per_s", "clients",
)  # fmt: skip


def fault(report: Report) -> str:
    """Return what is wrong with a report; empty if nothing is."""
    if len(report.workers) > NODE_WORKERS_MAX:
        return f"a report of {len(report.workers)} workers"
    if len(report.namespaces) > NAMESPACES_MAX or len(report.clients) > CLIENTS_MAX:
        return f"a report of {len(report.namespaces)} namespaces and {len(report.clients)} clients"
    rows: list[Sequence[int]] = [each.counts for each in report.workers]
    rows += [each.counts for each in report.namespaces]
    rows += [each.counts for each in report.clients]
    if any(len(row) != len(COUNTS) for row in rows):
        return "a report with other counters than those that there are"
    if any(len(each.latencies) != len(OPERATIONS) * BUCKETS for each in report.workers):
        return "a report with other latencies than those that there are"
    names = [each.name for each in report.namespaces] + [each.namespace for each in report.clients]
    if any(len(name.encode()) > NAMESPACE_BYTES_MAX for name in names):
        return "a report with a name of a namespace that is too long"
    if any(len(each.program) > NAMESPACE_BYTES_MAX for each in report.clients):
        return "a report with a name of a program that is too long"
    return ""


class _Server:
    """The last report of one server, and what has happened since the one before."""

    def __init__(self, report: Report, now: float) -> None:
        self.report = report
        self.at = now
        #: Time between the last two reports, seconds; 0 for none.
        self.seconds = 0.0
        self.by_worker: dict[int, list[int]] = {}
        self.by_namespace: dict[str, list[int]] = {}
        self.latencies: list[int] = [0] * (len(OPERATIONS) * BUCKETS)

    def take(self, report: Report, now: float) -> None:
        """Take the next report of the same instance."""
        before, seconds = self.report, now - self.at
        self.report, self.at, self.seconds = report, now, seconds
        workers = {each.worker: each for each in before.workers}
        self.by_worker = {
            each.worker: _grown(workers[each.worker].counts, each.counts)
            for each in report.workers
            if each.worker in workers
        }
        names = {each.name: each.counts for each in before.namespaces}
        self.by_namespace = {
            each.name: _grown(names[each.name], each.counts) for each in report.namespaces if each.name in names
        }
        self.latencies = _sum(
            (_grown(workers[each.worker].latencies, each.latencies) for each in report.workers
             if each.worker in workers), len(self.latencies),
        )  # fmt: skip

    def done(self) -> list[int]:
        """Return what all its workers' clients have done between the last two reports."""
        return _sum(self.by_worker.values())


class Activity:
    """The reports of a cluster's data servers. All times are those of one clock, in seconds.

    ``tokens``: those of the manager, which may change.
    """

    def __init__(self, tokens: Sequence[Token] = ()) -> None:
        self._tokens = tokens
        self._servers: dict[str, _Server] = {}
        self._history: deque[tuple[float | None, ...]] = deque(maxlen=HISTORY)
        self._interval_s = REPORT_S

    def interval_s(self, nodes: Mapping[str, Node]) -> float:
        """Return how often a server of these reports, seconds. O(nodes).

        Those that have not reported yet count: after a manager's restart all of them ask at once.
        """
        self._interval_s = max(REPORT_S, REPORT_S_A_SERVER * sum(node.serving for node in nodes.values()))
        return self._interval_s

    def forget(self) -> None:
        """Forget everything: this manager does not lead any more."""
        self._servers.clear()
        self._history.clear()

    def drop(self, name: str) -> None:
        """Forget a server that has left."""
        self._servers.pop(name, None)

    def take(self, report: Report, now: float) -> str:
        """Take a server's report. Return its :func:`fault`, if it has one, and take nothing of it then."""
        if found := fault(report):
            return found
        known = self._servers.get(report.name)
        if known is None or known.report.instance != report.instance or now <= known.at:
            self._servers[report.name] = _Server(report, now)
        else:
            known.take(report, now)
        return ""

    def look(self, nodes: Mapping[str, Node], now: float) -> None:
        """Add a point to the history. Forgets servers that are not in the map any more. O(workers)."""
        for name in [name for name in self._servers if name not in nodes or nodes[name].released]:
            self.drop(name)
        self.interval_s(nodes)
        used = moving = 0
        for node in nodes.values():
            if node.serving:
                used += sum(load.used_bytes for load in node.loads)
                moving += sum(load.move_rate for load in node.loads if load.moves_left)
        rates, latency = self.rates(now), self.latency(now)
        clients = sum(each.clients for server in self._fresh(now) for each in server.report.workers)
        values = {
            **rates, "get_p99_s": _worst(latency, ("get", "get_many")),
            "put_p99_s": _worst(latency, ("put", "put_many")),
            "used_bytes": used, "move_bytes_per_s": moving, "clients": clients,
        }  # fmt: skip
        self._history.append(tuple(values[row] for row in ROWS))

    def history(self) -> dict[str, Any]:
        """Return the points of the history, the oldest first."""
        columns = zip(*self._history) if self._history else ((),) * len(ROWS)
        return {"step_s": HISTORY_S, **{row: list(column) for row, column in zip(ROWS, columns)}}

    def _fresh(self, now: float) -> list[_Server]:
        return [server for server in self._servers.values() if self._is_fresh(server, now)]

    def _is_fresh(self, server: _Server, now: float) -> bool:
        return now - server.at <= STALE_REPORTS * self._interval_s

    def rates(self, now: float) -> dict[str, Any]:
        """Return what all clients do a second, and their hit ratio; None without a get."""
        total = [0.0] * len(COUNTS)
        gets = hits = 0
        for server in self._fresh(now):
            if server.seconds:
                done = server.done()
                hits, gets = hits + done[0], gets + done[0] + done[1]
                total = [one + count / server.seconds for one, count in zip(total, done)]
        return _rates(total, hits / gets if gets else None)

    def latency(self, now: float) -> dict[str, Any]:
        """Return how long calls took between the last two reports, by operation: bounds of their buckets, seconds."""
        counts = _sum((server.latencies for server in self._fresh(now)), len(OPERATIONS) * BUCKETS)
        found = {}
        for place, operation in enumerate(OPERATIONS):
            mine = counts[place * BUCKETS : (place + 1) * BUCKETS]
            found[operation] = {
                "timed": sum(mine), "p50_s": quantile_s([0, *mine], 0.5), "p99_s": quantile_s([0, *mine], 0.99),
            }  # fmt: skip
        return found

    def server(self, name: str, now: float) -> dict[str, Any]:
        """Return what the clients of one server do, for its row; ``report_age_s`` None: it has never reported."""
        known = self._servers.get(name)
        if known is None:
            return {"report_age_s": None, "clients": None, "rates": None}
        fresh = self._is_fresh(known, now)
        done, seconds = known.done(), known.seconds
        gets = done[0] + done[1]
        ratio = done[0] / gets if gets else None
        return {
            "report_age_s": round(now - known.at, 1),
            "clients": sum(each.clients for each in known.report.workers) if fresh else None,
            "rates": _rates([count / seconds for count in done], ratio) if fresh and seconds else None,
        }

    def since_start(self) -> dict[str, Any]:
        """Return what all clients have done since their servers began."""
        return _sums(_sum(each.counts for server in self._servers.values() for each in server.report.workers))

    def namespaces(self, epochs: dict[str, int], now: float) -> tuple[list[dict[str, Any]], int]:
        """Return the namespaces with the most gets and puts, and the number of those left out."""
        rows: dict[str, dict[str, Any]] = {}
        left = 0
        for server in self._servers.values():
            left += server.report.namespaces_left
            for each in server.report.namespaces:
                row = rows.setdefault(each.name, {"counts": [], "rates": [0.0] * len(COUNTS), "used": 0, "quota": 0})
                row["counts"].append(each.counts)
                row["used"] += each.used_bytes
                row["quota"] += each.quota_bytes
                done = server.by_namespace.get(each.name)
                if done and server.seconds and self._is_fresh(server, now):
                    row["rates"] = [one + count / server.seconds for one, count in zip(row["rates"], done)]
        for name in epochs if not namespaces_of(self._tokens) else ():
            rows.setdefault(name, {"counts": [], "rates": [0.0] * len(COUNTS), "used": 0, "quota": 0})
        found = []
        for name, row in rows.items():
            gets = row["rates"][0] + row["rates"][1]
            found.append({
                "name": printable(name), "epoch": epochs.get(name), **_sums(_sum(row["counts"])),
                "used_bytes": row["used"] if row["quota"] else None, "quota_bytes": row["quota"] or None,
                "rates": _rates(row["rates"], row["rates"][0] / gets if gets else None),
            })  # fmt: skip
        found.sort(key=lambda row: (-row["gets"] - row["puts"], row["name"]))
        return found[:NAMESPACES_SHOWN], left + max(0, len(found) - NAMESPACES_SHOWN)

    def clients(self, now: float) -> tuple[list[dict[str, Any]], int]:
        """Return the clients that did something last, and the number of all others."""
        reports = [server.report for server in self._fresh(now)]
        everybody = sum(each.clients for report in reports for each in report.workers)
        found = [
            {"server": report.name, "worker": each.worker, "pid": each.pid, "program": printable(each.program),
             "namespace": printable(each.namespace), "idle_s": each.idle_ms / 1000, **_sums(each.counts)}
            for report in reports
            for each in report.clients
        ]  # fmt: skip
        found.sort(key=lambda row: (row["idle_s"], row["server"], row["worker"], row["pid"]))
        shown = found[:CLIENTS_SHOWN]
        return shown, max(0, everybody - len(shown))


def _grown(before: Sequence[int], now: Sequence[int]) -> list[int]:
    """Return how much counters have grown; 0 for all if one of them has shrunk."""
    grown = [new - old for old, new in zip(before, now)]
    return grown if min(grown, default=0) >= 0 else [0] * len(now)


def _sum(rows: Iterable[Sequence[int]], size: int = len(COUNTS)) -> list[int]:
    total = [0] * size
    for row in rows:
        total = [one + other for one, other in zip(total, row)]
    return total


def _sums(counts: Sequence[int]) -> dict[str, Any]:
    found: dict[str, Any] = dict(zip(COUNTS, counts))
    gets = found["hits"] + found["misses"]
    return {"gets": gets, "hit_ratio": found["hits"] / gets if gets else None, **found}


def _rates(each: Sequence[float], ratio: float | None) -> dict[str, Any]:
    """Return rates by name. ``exists`` are keys looked for."""
    found = {f"{name}_per_s": round(rate, 3) for name, rate in zip(COUNTS, each)}
    return {"gets_per_s": round(each[0] + each[1], 3), "hit_ratio": ratio, **found}


def _worst(latency: dict[str, Any], operations: Iterable[str]) -> float | None:
    """Return the longer of two quantiles."""
    found = [latency[each]["p99_s"] for each in operations if latency[each]["p99_s"] is not None]
    return max(found, default=None)

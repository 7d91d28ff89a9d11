"""Tell the manager what clients do, as often as it asks: the numbers behind its status page.

A report is made of what the supervisor has anyway (``children.WorkerSlot``), and of the clients that did something
last, for which it asks its workers while a manager wants reports. It is bounded: each worker's sums, and
``NAMESPACES_MAX`` namespaces and ``CLIENTS_MAX`` clients. Nothing is sent to a manager that has not asked by this
connection: an older one would close it.

The manager's page is read by tenants, too. Where tokens are bound to namespaces, a namespace without a quota has no
name here, as in the metrics (``pages.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, Protocol

from ...config.tokens import Token, namespaces_of
from ...constants import OTHERS_NAMESPACE
from ...host.processes import program_of
from ...ipc.counts import BUCKETS
from ...ipc.tally import Totals, counters_summary
from ...net.loop import Loop
from ...wire import report_messages as R
from ..children import WorkerSlot
from ..membership import Membership
from ..rdma_supervisor import Endpoints

#: A report is sent no more often, and no more rarely, seconds.
LEAST_S: Final = 0.25
MOST_S: Final = 60.0
#: STATS with this detail also has the clients that did something last, ``CLIENTS_MAX`` of them.
DETAIL: Final = 2
_U64: Final = (1 << 64) - 1
_U32: Final = (1 << 32) - 1


class Member(Protocol):
    """Whose reports they are."""

    @property
    def name(self) -> str: ...
    @property
    def instance(self) -> int: ...


class Reporter:
    """Sends reports by the membership's connection, once the manager has asked for them.

    ``slots`` and ``tokens`` may change meanwhile.
    """

    def __init__(
        self, loop: Loop, slots: Sequence[WorkerSlot], member: Member, membership: Membership, endpoints: Endpoints,
        tokens: Sequence[Token] = (),
    ) -> None:  # fmt: skip
        self._loop = loop
        self._slots = slots
        self._member = member
        self._membership = membership
        self._endpoints = endpoints
        self._tokens = tokens
        #: The connection by which the manager has asked, and how often it wants a report; 0 for never.
        self._asked_by: object = None
        self._interval_s = 0.0
        self._due = False
        membership.on_report_every = self.ask

    @property
    def detail(self) -> int:
        """What to ask workers for by STATS: their clients, while reports are wanted."""
        return DETAIL if self._wanted() else 0

    def ask(self, interval_ms: int) -> None:
        """Take the manager's request for reports; 0 ms: for none."""
        self._asked_by = self._membership.peer
        self._interval_s = min(max(interval_ms / 1000, LEAST_S), MOST_S) if interval_ms else 0.0
        if self._wanted() and not self._due:
            self._due = True
            self._loop.call_later(self._interval_s, self._send)

    def _wanted(self) -> bool:
        peer = self._membership.peer
        return bool(self._interval_s) and peer is not None and self._asked_by is peer

    def _send(self) -> None:
        self._due = False
        if not self._wanted():
            return  # the next connection's manager may ask again
        self._due = True
        self._loop.call_later(self._interval_s, self._send)  # first, so that a report which fails is not the last one
        if self._membership.joined:
            self._membership.request(self.report(), lambda _msg, _status: None)

    def report(self) -> R.Report:
        """Return a report. O(workers x namespaces)."""
        workers: list[R.WorkerActivity] = []
        together = Totals(None)
        quotas: dict[str, list[int]] = {}
        clients: list[R.ClientActivity] = []
        everybody = 0
        for slot in self._slots:
            totals = Totals(None)
            for counted in slot.counts(self._endpoints.counted(slot.number)).values():
                totals.add(counted.as_json())
            together.add(totals.as_json())
            for name, quota in slot.stats.get("quotas", {}).items():
                sums = quotas.setdefault(name, [0, 0])
                sums[0] += quota["used_bytes"]
                sums[1] += quota["quota_bytes"]
            count = int(slot.stats.get("clients_in_all", 0))
            everybody += count
            quarantined = within(slot.stats.get("sessions_quarantined", 0), _U32)
            workers.append(
                R.WorkerActivity(slot.number, within(count, _U32), quarantined, sum_of(totals), latencies_of(totals))
            )
            clients += [client_of(slot.number, claimed) for claimed in slot.stats.get("clients", ())]
        shown = set(quotas) if namespaces_of(self._tokens) else None
        clients.sort(key=lambda each: each.idle_ms)
        clients = [
            each if shown is None or each.namespace in shown else each._replace(namespace=OTHERS_NAMESPACE)
            for each in clients[: R.CLIENTS_MAX]
        ]
        namespaces = namespaces_in(together, quotas, shown)
        most = namespaces[: R.NAMESPACES_MAX]
        return R.Report(
            self._member.instance, self._member.name, workers, most, clients, len(namespaces) - len(most),
            within(everybody - len(clients), _U32),
        )  # fmt: skip


def within(number: float, most: int) -> int:
    """Return a number as a field holds it, 0 to ``most``. One that does not fit would end the server: a timer packs it.
    """
    return min(max(int(number), 0), most)


def counts_of(summary: Mapping[str, Any]) -> list[int]:
    """Return counters by what they mean as numbers in the order of COUNTS."""
    found = {
        **summary, "misses": sum(summary["misses"].values()),
        "exists": summary["exists_found"] + summary["exists_absent"],
    }  # fmt: skip
    return [within(found[name], _U64) for name in R.COUNTS]


def sum_of(totals: Totals) -> list[int]:
    """Return what has been counted in all namespaces together."""
    columns = [sum(column) for column in zip(*totals.namespaces.values())]
    return counts_of(counters_summary(columns)) if columns else [0] * len(R.COUNTS)


def latencies_of(totals: Totals) -> list[int]:
    """Return the numbers of calls by bucket, of one operation after the other."""
    found: list[int] = []
    for operation in R.OPERATIONS:
        found += totals.latencies.get(operation, [0] * (BUCKETS + 1))[1:]
    return [within(count, _U64) for count in found]


def namespaces_in(
    totals: Totals, quotas: Mapping[str, Sequence[int]], shown: Collection[str] | None
) -> list[R.NamespaceActivity]:
    """Return what was done by namespace, most gets and puts first. Those not ``shown`` are one; None shows all."""
    sums: dict[str, list[int]] = {name: [0] * len(R.COUNTS) for name in quotas}
    for name, words in totals.namespaces.items():
        name = name if shown is None or name in shown else OTHERS_NAMESPACE
        before = sums.get(name, [0] * len(R.COUNTS))
        sums[name] = [min(one + other, _U64) for one, other in zip(before, counts_of(counters_summary(words)))]
    made = [
        R.NamespaceActivity(name, counts, *(within(number, _U64) for number in quotas.get(name, (0, 0))))
        for name, counts in sums.items()
    ]
    return sorted(made, key=lambda each: (-sum(each.counts[:3]), each.name))


def client_of(worker: int, claimed: Mapping[str, Any]) -> R.ClientActivity:
    """Return a client as its worker knows it."""
    idle_s = claimed["idle_s"]
    idle_ms = _U32 if idle_s is None else within(idle_s * 1000, _U32)
    counts = counts_of(claimed["counts"]) if "counts" in claimed else [0] * len(R.COUNTS)
    return R.ClientActivity(
        worker, within(claimed["pid"], _U32), program_of(claimed["pid"])[:64], claimed["namespace"], idle_ms, counts
    )

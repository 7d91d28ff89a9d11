"""What all workers of a data server know of epochs, and are told of them."""

from __future__ import annotations

from collections.abc import Iterable

from ...cluster.assignment import Member
from ...wire.epoch_messages import EpochLease, Epochs, NamespaceEpoch
from ..children import STATS_ID, WorkerSlot


def send_lease(slots: Iterable[WorkerSlot], until_ns: int) -> None:
    """Tell workers that run until when values with an epoch may be read (``cluster/epochs.py``).

    One that has not read what was sent gets it with its next map, or with the next lease.
    """
    for slot in slots:
        slot.worker.send_unless_behind(EpochLease(until_ns), STATS_ID)


def stored_epoch(slots: Iterable[WorkerSlot], member: Member) -> int:
    """Return a map's epoch: all workers have stored the epochs of that map or a later one. 0 if one does not say so.

    Each says so by its counters before it has dropped what a first advance makes it drop. Those of a process that has
    ended, or of another cluster, say nothing.
    """
    said = [
        slot.stats["stored_epoch"] if slot.ready and slot.stats.get("cluster") == member.cluster else 0
        for slot in slots
    ]  # fmt: skip
    return min(said, default=0)


def known_epochs(slots: Iterable[WorkerSlot], table: Epochs | None, cluster: int) -> list[NamespaceEpoch]:
    """Return the newest epochs of a cluster's namespaces, of a table and of workers' counters.

    Those of a worker may have come before it left another cluster.
    """
    known: dict[str, int] = {}
    if table is not None and table.cluster == cluster:
        known = {each.name: each.epoch for each in table.namespaces}
    for slot in slots:
        if slot.stats.get("cluster") != cluster:
            continue
        for name, epoch in slot.stats.get("epochs", {}).items():
            known[name] = max(epoch, known.get(name, 0))
    return [NamespaceEpoch(*item) for item in sorted(known.items())]

"""What a client tells of its own operations: its counters, and those that its workers see too (``ipc/counts.py``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...ipc.tally import Tallies, summary

if TYPE_CHECKING:
    from ..routing import Router


def counters_of(others: Mapping[str, int], tallies: Tallies) -> dict[str, int]:
    """Return a client's counters, with those of single keys in arenas, which only ``tallies`` has."""
    counters = dict(others)
    for name, count in zip(("hits", "misses", "puts"), tallies.outside_counters()):
        counters[name] += count
    return counters


def stats_of(counters: dict[str, int], tallies: Tallies, last_failure: str, router: Router | None) -> dict[str, Any]:
    """Return what ``Client.stats`` does."""
    stats: dict[str, Any] = {**counters, "last_put_failure": last_failure}
    stats["paths"] = {path: summary(totals) for path, totals in tallies.totals().items()}
    if router is not None:
        stats["outages"] += router.context.outages
        stats["epoch"] = router.epoch
        stats["manager"] = router.subscription.down_reason or "connected"
        stats["workers"] = [
            {"node": target.info.node, "worker": target.info.worker, "path": target.path, "reason": target.reason}
            for target in router.targets.values()
        ]
    return stats

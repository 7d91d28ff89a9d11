"""What a client tells of its own operations: its counters, and those that its workers see too (``ipc/counts.py``)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from ...ipc.counts import GET, observe
from ...ipc.tally import Tallies, summary

if TYPE_CHECKING:
    from ..routing import Router, Routes

_T = TypeVar("_T")


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


def timed_get(routes: Routes, digest: bytes, call: Callable[..., _T], *arguments: Any) -> _T:
    """Carry out a get of one key, and note how long it takes if its owner's arena is mapped: others time their own."""
    target = routes.target(digest)
    reader = target.reader if target is not None else None
    began = time.perf_counter_ns()
    try:
        return call(*arguments)
    finally:
        if reader is not None:
            observe(reader.counts, GET, time.perf_counter_ns() - began)

"""What servers that grow meet in tests: switches ``call=tests.support.patched_growth:NAME`` of ``patched``."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any


def stuck() -> None:
    """Faulting in an arena that is added takes for ever."""
    from simm.server.arena_stock import ArenaStock

    populate = ArenaStock.populate

    def populate_slowly(self: ArenaStock, wanted: Mapping[int, Any], progress: Any) -> bool:
        while max(wanted) >= len(self.options.nodes):
            time.sleep(0.1)
        return populate(self, wanted, progress)

    ArenaStock.populate = populate_slowly  # type: ignore[method-assign]


def dying() -> None:
    """An added worker dies at once."""
    import os

    from simm.server.arena_stock import ArenaStock

    store_in = ArenaStock.store_in

    def store_or_die(self: ArenaStock, number: int, *more: Any) -> Any:
        if number >= len(self.options.nodes):
            os._exit(9)
        return store_in(self, number, *more)

    ArenaStock.store_in = store_or_die  # type: ignore[method-assign]


def one_worker() -> None:
    """A manager takes no server with two workers."""
    import simm.cluster.nodes

    simm.cluster.nodes.NODE_WORKERS_MAX = 1  # type: ignore[misc]

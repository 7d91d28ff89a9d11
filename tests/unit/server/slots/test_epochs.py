"""What the workers of a data server say of epochs, all together."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from simm.cluster.assignment import Member
from simm.server.slots.epochs import stored_epoch
from simm.wire import messages as M
from tests.support.store_world import ALL_SHARDS, owned
from tests.support.worker_thread import WorkerThread


def test_a_worker_says_which_epochs_it_has_stored() -> None:
    with WorkerThread() as worker:

        def told() -> Any:
            return json.loads(worker.supervisor.call(M.Stats(0)).json)["stored_epoch"]

        worker.supervisor.call(M.Shards(2, *owned(ALL_SHARDS, 2)))
        assert told() == 2
        worker.supervisor.call(M.Shards(5, *owned(ALL_SHARDS, 2)))
        assert told() == 5


def test_all_workers_that_serve_have_stored_it() -> None:
    """A process that has ended, or has not spoken yet, says nothing; nor do counters of another cluster."""
    member = Member("n", 7, [0, 1])
    slots: list[Any] = [
        SimpleNamespace(ready=True, stats={"cluster": 0, "stored_epoch": epoch}) for epoch in (5, 3)
    ]  # fmt: skip
    assert stored_epoch(slots, member) == 3 and stored_epoch([], member) == 0
    slots[0].stats["cluster"] = 9
    assert stored_epoch(slots, member) == 0
    slots[0].stats["cluster"] = 0
    slots[1].ready = False
    assert stored_epoch(slots, member) == 0
    slots[1] = SimpleNamespace(ready=True, stats={})
    assert stored_epoch(slots, member) == 0

"""What a batch of puts says that it has not sent when a step fails: never a value that may have been sent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from simm.ipc import put
from simm.ipc import session as session_module
from simm.ipc.put import NOT_SENT
from tests.support.put_failures import BREAKS, unsent_at_each_failure
from tests.support.worker_thread import WorkerThread

SIZES = {"small": [4096] * 150, "large": [256 << 10] * 50, "mixed": [100, 4096, 70_000] * 20}
VALUES = {name: [memoryview(bytes([at]) * size) for at, size in enumerate(sizes)] for name, sizes in SIZES.items()}


@pytest.fixture
def worker() -> Iterator[WorkerThread]:
    session_module.RETIRED.clear()
    with WorkerThread(128 << 20) as running:
        yield running
    session_module.RETIRED.clear()


@pytest.mark.parametrize("how", BREAKS)
@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
@pytest.mark.parametrize(("values", "threads"), [*((name, 1) for name in SIZES), ("large", 2)])
def test_it_fails_at_each_step(
    worker: WorkerThread, monkeypatch: pytest.MonkeyPatch, values: str, threads: int, together: bool, how: str
) -> None:
    batch = VALUES[values]
    found = unsent_at_each_failure(worker, monkeypatch, batch, together=together, how=how, threads=threads)
    in_hand = put.COMMIT_KEYS_TOGETHER if together else put.COMMIT_KEYS_MOST
    assert found[0] >= len(batch) - in_hand, "all, but for what is to be committed when it ends"
    assert found[-1] < len(batch) // 2, "less towards the end"


@pytest.mark.parametrize(("values", "together"), [("small", False), ("large", True)])
def test_control_all_is_said_to_be_unsent(
    worker: WorkerThread, monkeypatch: pytest.MonkeyPatch, values: str, together: bool
) -> None:
    """As it would be if what has been committed was not left out."""

    def blind(_positions: Any, statuses: list[int]) -> None:
        statuses[:] = [NOT_SENT] * len(statuses)

    monkeypatch.setattr(put, "_not_sent", blind)
    with pytest.raises(AssertionError, match="it was sent"):
        unsent_at_each_failure(worker, monkeypatch, VALUES[values], together=together, how="after")

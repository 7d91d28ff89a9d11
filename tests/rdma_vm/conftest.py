"""Skips everything in this folder, at once and with the reason, outside of the machine that scripts/test-rdma boots."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.rdma_vm import devices

if TYPE_CHECKING:
    from simm.rdma.api import QueuePair
    from tests.rdma_vm.verbs_pair import Here
    from tests.rdma_vm.verbs_peer import Peer

HERE = Path(__file__).resolve().parent


TWO_HOSTS = int(os.environ.get("SIMM_TEST_VM_HOSTS", "1")) > 1


def why_not(item: pytest.Item) -> str:
    """Why a test cannot run here; empty if it can."""
    if not os.environ.get("SIMM_TEST_VM_DEVICES"):
        return "needs RDMA devices: run scripts/test-rdma, which boots a virtual machine that has them"
    # scripts/test-rdma looks for these words: they make it boot two.
    return "needs two machines" if item.get_closest_marker("two_hosts") and not TWO_HOSTS else ""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip before any fixture is set up. In two machines the tests for one are not even selected: they have run."""
    kept, dropped = [], []
    for item in items:
        ours = HERE in item.path.parents
        if ours and TWO_HOSTS and not item.get_closest_marker("two_hosts"):
            dropped.append(item)
            continue
        reason = why_not(item) if ours else ""
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
        kept.append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


@pytest.fixture(autouse=True)
def clients_say_all(caplog: pytest.LogCaptureFixture) -> None:
    """A failed test shows why the client left RDMA, which is said at DEBUG."""
    caplog.set_level(logging.DEBUG, "simm.client")


@pytest.fixture(autouse=True)
def nothing_left_on_devices() -> Iterator[None]:
    """No queue pair, region, completion queue or protection domain outlives a test."""
    with devices.nothing_left():
        yield


# -- the two ends of the tests of simm.verbs -------------------------------------------------------


@pytest.fixture(scope="module")
def process() -> Iterator[Peer]:
    from tests.rdma_vm.verbs_pair import SIZE, THEIRS
    from tests.rdma_vm.verbs_peer import Peer

    made = Peer(THEIRS, SIZE)
    yield made
    made.close()


@pytest.fixture
def peer(process: Peer) -> Iterator[Peer]:
    """Its ends of the queue pairs are gone after each test."""
    yield process
    process.ask("close_queue_pairs")


@pytest.fixture(scope="module")
def here() -> Iterator[Here]:
    from tests.rdma_vm.verbs_pair import Here

    made = Here()
    yield made
    made.rail.close()
    made.memory.close()


@pytest.fixture
def qp(peer: Peer, here: Here) -> Iterator[QueuePair]:
    made, _ = peer.join(here.rail)
    yield made
    made.close()

"""A worker, an endpoint and a network in software for each test."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.support.endpoint_thread import EndpointThread
from tests.support.fake_fabric import FakeNetwork, all_closed
from tests.support.worker_thread import WorkerThread


@pytest.fixture
def network() -> Iterator[FakeNetwork]:
    made = FakeNetwork(random.randrange(1 << 30), background=True)
    yield made
    all_closed(made)


@pytest.fixture
def worker() -> Iterator[WorkerThread]:
    with WorkerThread() as running:
        yield running


@pytest.fixture
def server(worker: WorkerThread, network: FakeNetwork) -> Iterator[EndpointThread]:
    with EndpointThread(worker.path, network) as running:
        yield running.ready()

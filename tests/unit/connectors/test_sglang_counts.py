"""What SiMM's backend for SGLang counts for SGLang's metrics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from simm.testing import FakeClient
from simm.wire.status import Status
from tests.support import fake_sglang
from tests.support.fake_sglang import Config, Pool, Served

KEYS = [f"{number:064x}" for number in range(8)]


@pytest.fixture
def backend() -> Iterator[Any]:
    """A backend whose pages are stored in four groups of heads."""
    with fake_sglang.install(Served()) as module, FakeClient() as client:
        made = module.HiCacheSimm(Config(should_split_heads=True, tp_lcm_size=4), {}, client=client)
        yield made
        made.close()


def test_issue_statistics_are_of_the_pages_that_were_moved(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of pages were counted, those that were not stored, and all that were asked for."""
    pool, samples = Pool(), backend._samples
    backend.register_mem_pool_host(pool)
    assert backend._pools["kv"].values == 4

    def write(*rows: int) -> list[bool]:
        stored: list[bool] = backend.batch_set_v1([KEYS[row] for row in rows], pool.indices(*rows))
        return stored

    assert write(0, 1, 2) == [True] * 3 and list(samples["backup_pgs"]) == [3]
    assert write(2, 3) == [True] * 2 and list(samples["backup_pgs"]) == [3, 1]
    put = backend._client.put_digests

    def half(digests: Any, sources: Any, *more: Any) -> list[int]:
        return [*put(digests[:6], sources[:6], *more), *[Status.UNAVAILABLE] * len(digests[6:])]

    monkeypatch.setattr(backend._client, "put_digests", half)
    assert write(4, 5) == [True, False] and list(samples["backup_pgs"]) == [3, 1, 1]
    assert backend.batch_get_v1(KEYS, pool.indices(*range(8))) == [True] * 5 + [False] * 3
    assert list(samples["prefetch_pgs"]) == [5]

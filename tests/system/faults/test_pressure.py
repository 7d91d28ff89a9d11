"""Values of all sizes, three times as many as the arena holds, and a change of sizes: no put fails for want of room."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable

import pytest

from simm.client import Client
from tests.support.fleet import Fleet
from tests.support.load import OK, PUT, load
from tests.support.measures import measured
from tests.support.pace import Pace
from tests.support.values import count_in, value_of
from tests.support.waiting import wait_until

MIB = 1 << 20
#: From the smallest class to a value that is as large as an arena of 64 MiB has room for beside others.
SIZES = (64, 200, 1000, 4096, 5000, 16 << 10, 40_000, 100_000, 300_000, MIB, 2 * MIB + 100, 4 * MIB)
#: After a change of sizes the new one has half of the arena within this time, seconds.
SHIFT_S = 10.0


@pytest.mark.fault("F29", ci=2, whole=1800)
def test_no_put_fails_for_want_of_room(make_fleet: Callable[..., Fleet], amount: int) -> None:
    fleet = make_fleet(1, memory="64M")
    mixed(fleet, amount)
    shifts = (4096, 2 * MIB, 1000) if amount < 60 else random.Random(29).choices(SIZES[2:], k=amount // 20)
    for number, size in enumerate(shifts):
        shift(fleet, number, size)
    fleet.assert_no_traceback()


def mixed(fleet: Fleet, seconds: float) -> None:
    """Four clients put and get all sizes for so long."""
    with load(
        fleet.manager.address, fleet.folder, 4, keys=40, sizes=SIZES, fill=False, pause_s=0.0, deadline_s=20.0,
        mix={"put": 0.6, "put_many": 0.1, "get": 0.3}, batch_sizes=SIZES[:7],
    ) as clients:  # fmt: skip
        time.sleep(seconds)
        evicted = lambda: sum(fleet.servers[0].worker_stats()["evictions"].values())  # noqa: E731
        wait_until(evicted, "the positive control: there was not room for all")
        records = clients.records()
    records.assert_right()
    # A put that waits for room and gets it is none that failed. One that fails as the worker was silent for 2 s, as it
    # may be on a busy machine, was not refused.
    causes = sum((Counter(report["refusals"]) for report in clients.reports), Counter[str]())
    silent = sum(count for why, count in causes.items() if "did not answer" in why)
    refused = causes.total() - silent
    measured(
        "eviction pressure, all sizes: refused puts", refused, "", "0", of=records.count(OK, kind=PUT), silent=silent
    )
    assert refused == 0, (records.summary(), causes)


def shift(fleet: Fleet, number: int, size: int) -> None:
    """Put values of one size, as many as the arena holds of it and half as many; all are stored, and most stay."""
    # Of small values it holds as many as its table has slots.
    enough = min(32 * MIB, fleet.servers[0].worker_stats()["slots"] // 2 * size)
    count = 3 * enough // size
    keys = [f"shift/{number}/{each}" for each in range(count)]
    value = value_of("shift", 1, number, size)
    with Client(fleet.manager.address, path="shm", deadline_s=20.0) as client, Pace() as pace:
        began = time.monotonic()
        half = None
        for first in range(0, count, 512):
            batch = keys[first : first + 512]
            assert client.put_many(batch, [value] * len(batch)) == [True] * len(batch), (size, first)
            if half is None and there(client, keys[: first + 512]) * size >= enough:
                half = time.monotonic() - began
        assert half is not None, f"of {count} values of {size} bytes {there(client, keys)} are there"
        some = [client.get(key) for key in keys[-3:]]
        assert all(each is not None and count_in("shift", each) == number for each in some)
    pace.check(f"change to values of {size} bytes: they have half of the arena after", half, SHIFT_S)


def there(client: Client, keys: list[str]) -> int:
    return sum(client.exists_many(keys))

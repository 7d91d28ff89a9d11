"""Verified load over RDMA: a storm of client processes, a client's thread while things break, and clients to be killed.

A storm has few keys, all hot, in an arena that holds a third of them, so that chunks change hands while they are READ.
What is verified is in ``tests.support.load``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

from simm.client import Client
from tests.rdma_vm.world import DEADLINE_S, PATHS
from tests.support.load import FAULTS, Load, LoadProcess, LoadThread, key_of, load, total
from tests.support.load.generator import Settings
from tests.support.pace import Pace
from tests.support.values import count_in

KIB: Final = 1 << 10
SIZES: Final = (200, 3000, 20 * KIB, 150 * KIB, 600 * KIB, 1300 * KIB)
KEYS: Final = 12
WRITE: Final[dict[str, Any]] = {
    "own_only": True, "batch": 6, "batch_sizes": SIZES[:4],
    "mix": {"put": 0.6, "put_many": 0.15, "delete": 0.1, "get": 0.15},
}  # fmt: skip
#: Alone and in batches, into registered memory and through staging blocks.
READ: Final[dict[str, Any]] = {
    "registered": True, "batch": 8, "mix": {"get_into": 0.5, "get_into_many": 0.4, "exists_many": 0.1},
}  # fmt: skip
COUNTERS: Final = ("rdma_gets", "rdma_puts", "rdma_retries", "rdma_fallbacks")
#: What the emulator may add to a deadline, seconds: a processor of it may stand still for a while.
GRACE_S: Final = 5.0
#: Of the thread: one value a key, as a put whose answer was lost may be stored at any later time.
THREAD: Final = Settings(
    sizes=(300, 5000, 70_000, 600_000, 2_500_000), constant=True, mix={"put": 0.4, "get_into": 0.6}, registered=True,
    watched=True, pause_s=0,
)  # fmt: skip
VICTIM_BYTES: Final = 3_000_000
VICTIM_KEY: Final = key_of(0, 0, "victim")


def storm(
    manager: str, devices: str, *, seconds: float, seed: int, writers: int = 2, readers: int = 3,
    reader_patches: Sequence[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """Run one: the sums of all clients' figures and counters, and ``said``. Raises AssertionError if a client fails.

    ``reader_patches``: switches of ``tests.support.patched`` for the readers.
    """
    each = [{"number": number, **WRITE} for number in range(writers)]
    each += [{"number": number, "patches": reader_patches, **READ} for number in range(readers)]
    with load(
        manager, None, each=each, paths=(PATHS,), seed=seed, writers=writers, keys=KEYS, sizes=SIZES, fill=False,
        pause_s=0, prefix=f"vm storm/{seed}", deadline_s=DEADLINE_S, need_path="rdma", client={"rdma_devices": devices},
    ) as clients:  # fmt: skip
        time.sleep(seconds)
        reports = clients.end()
    sums = total(reports)
    assert not sums["raised"], sums["said"]
    return {**sums, **{name: sum(report["stats"][name] for report in reports) for name in COUNTERS}}


def right(result: dict[str, Any]) -> bool:
    """Return True if no client of a storm saw what it must not."""
    return not any(result[name] for name in FAULTS)


@contextlib.contextmanager
def under_load(client: Client, name: str, *, keys: int = 10) -> Iterator[LoadThread]:
    """Run a thread that reads and writes without end; at the end, assert that it saw no fault.

    A value is whole and right, or it is a miss. A call returns within the client's deadline, as far as the emulator
    runs meanwhile, and raises nothing. After a call has returned, its buffer is not written any more.
    """
    settings = THREAD._replace(prefix=name, keys=keys)
    with Pace() as pace, LoadThread(Load(client, 0, settings)) as thread:
        yield thread
    thread.check()
    pace.check(f"{name}: the slowest call takes", thread.load.slowest_s, client.deadline_s + GRACE_S)
    print(f"{name}: {thread}")


def victim(manager: str, devices: str) -> LoadProcess:
    """Start a client to be killed in the middle of puts and gets of one large value; it is ready once it has put it."""
    return LoadProcess(
        manager, 0, path=PATHS, deadline_s=DEADLINE_S, need_path="rdma", client={"rdma_devices": devices},
        prefix="victim", keys=1, sizes=[VICTIM_BYTES], constant=True, mix={"put": 0.5, "get_into": 0.5}, pause_s=0,
    )  # fmt: skip


def is_victims(value: bytes | None) -> bool:
    """Return True for a victim's complete value, and for none."""
    return value is None or (len(value) == VICTIM_BYTES and count_in(VICTIM_KEY, value) > 0)


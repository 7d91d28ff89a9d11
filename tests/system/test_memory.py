"""Who has a data server's memory: which process the OOM killer takes first, and what a killed supervisor leaves."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from simm.client import Client
from simm.errors import SegmentError, UsageError
from simm.host import memory
from simm.server.arena_stock import ArenaStock
from simm.server.children import OOM_FIRST, OOM_SUPERVISOR, OOM_WORKER
from simm.server.options import DataServerOptions
from tests.support.child import forked_by
from tests.support.processes import Cluster
from tests.support.waiting import wait_until

MIB = 1 << 20
#: A server that raises its own score first, as every user may. So it may lower it again, by as much.
RAISED = ("-c", f"""if True:
    import importlib, sys
    with open("/proc/self/oom_score_adj", "r+") as file:
        score = int(file.read())
        file.seek(0)
        file.write(str(score + {-OOM_SUPERVISOR}))
    sys.exit(importlib.import_module("simm." + sys.argv[1]).main(sys.argv[2:]))
""")


def segments_of(cluster: Cluster) -> list[Path]:
    """Return the files of the cluster's arena."""
    return [path for path in Path("/dev/shm").iterdir() if f"-{cluster.name}-0-" in path.name]


def mapped(pid: int, path: Path) -> tuple[int, int]:
    """Bytes of a file that a process has mapped, and those of them whose pages count as its own."""
    size = resident = 0
    ours = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-", line):
            ours = line.endswith(str(path))
        elif ours and (found := re.match(r"(Size|Rss): +(\d+) kB", line)):
            size += int(found[2]) << 10 if found[1] == "Size" else 0
            resident += int(found[2]) << 10 if found[1] == "Rss" else 0
    return size, resident


def score_adj(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


def test_the_supervisor_has_no_values_mapped(make_cluster: Callable[..., Cluster]) -> None:
    """It faults the arena in, and the OOM killer then counted all of it as its own: cold and warm."""
    cluster = make_cluster(memory="64M", server_arguments=("--warm",))
    with Client(cluster.manager, deadline_s=30.0) as client:
        assert client.put("key", b"value")
    for _ in range(2):
        files = segments_of(cluster)
        found = [mapped(cluster.processes["dataserver"].pid, file) for file in files]
        assert sum(size for size, _ in found) == 64 * MIB and sum(resident for _, resident in found) < MIB
        assert sum(file.stat().st_blocks * 512 for file in files) >= 64 * MIB, "all pages are there"
        cluster.processes["dataserver"].end()
        cluster.start_server()
    with Client(cluster.manager, deadline_s=30.0) as client:
        assert client.get("key") == b"value"


def test_who_is_killed_first(make_cluster: Callable[..., Cluster]) -> None:
    """A stream, then the worker, and the supervisor last: it makes itself less likely to be killed than it was."""
    own = score_adj(os.getpid())
    first = own - OOM_SUPERVISOR
    if not -1000 < own <= 1000 + OOM_SUPERVISOR - OOM_FIRST:
        pytest.skip(f"the tests' process has oom_score_adj {own}")
    cluster = make_cluster(memory="64M", script=RAISED)
    supervisor = cluster.processes["dataserver"].pid
    worker, stream = (child.pid for child in forked_by(supervisor)[:2])
    assert cluster.worker_stats()["pid"] == worker
    found = [score_adj(pid) for pid in (supervisor, worker, stream)]
    assert found == [first + OOM_SUPERVISOR, first + OOM_WORKER, first + OOM_FIRST]
    scores = [int(Path(f"/proc/{pid}/oom_score").read_text()) for pid in (supervisor, worker, stream)]
    assert scores == sorted(scores) and len(set(scores)) == 3
    os.kill(worker, signal.SIGKILL)
    os.kill(stream, signal.SIGKILL)

    def successors() -> list[int]:
        with contextlib.suppress(psutil.Error, OSError):
            found = [child.pid for child in forked_by(supervisor)]
            return sorted(map(score_adj, found)) if len(found) == 2 and not {worker, stream} & set(found) else []
        return []

    wait_until(lambda: successors() == [first + OOM_WORKER, first + OOM_FIRST], "the same of their successors", 30)


def test_a_killed_supervisor_leaves_no_arena(make_cluster: Callable[..., Cluster]) -> None:
    """Its worker removes what nobody else would before the next start."""
    cluster = make_cluster(memory="64M")
    arena = segments_of(cluster)
    cluster.kill("dataserver")
    wait_until(lambda: not any(file.exists() for file in arena), "the arena is removed")


def test_a_killed_worker_leaves_its_arena(make_cluster: Callable[..., Cluster]) -> None:
    """Its supervisor lives, and its successor has all values."""
    cluster = make_cluster(memory="64M")
    arena = segments_of(cluster)
    with Client(cluster.manager, deadline_s=30.0) as client:
        assert client.put("key", b"value")
        os.kill(cluster.worker_stats()["pid"], signal.SIGKILL)
        wait_until(lambda: client.put("other", b"value"), "its successor serves", 30)
        assert all(file.exists() for file in arena) and client.get("key") == b"value"


def test_arenas_that_dev_shm_cannot_all_hold_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first one is made: two of them, of which one has room."""
    monkeypatch.setattr(memory, "shm_free_bytes", lambda _directory: 100 * MIB)
    for workers, fits in ((1, True), (2, False)):
        stock = ArenaStock(DataServerOptions("unused", "/nowhere", [0] * workers, 64 * MIB), 1)
        if fits:
            assert stock.size() == 64 * MIB
            continue
        with pytest.raises(SegmentError, match=r"of 64\.0 MiB need 128\.0 MiB, but only 100\.0 MiB are free in"):
            stock.size()


@pytest.mark.parametrize(
    ("limit", "memory_bytes", "workers", "size"),
    [
        (1024, 0, 1, 818), (1024, 0, 2, 408), (256, 0, 1, 158), (1024, 900, 1, 900), (1024, 922, 1, 922),
        (1024, 436, 2, 436), (1024, 924, 1, None), (1024, 1024, 1, None), (1024, 438, 2, None), (96, 16, 1, None),
        (96, 0, 1, None), (16, 0, 1, None),
    ],
)  # fmt: skip
def test_a_limit_that_leaves_no_room_is_refused(
    monkeypatch: pytest.MonkeyPatch, limit: int, memory_bytes: int, workers: int, size: int | None
) -> None:
    """Before a page is taken: the processes, and their page tables, need memory beside the arenas. MiB."""
    monkeypatch.setattr(memory, "memory_limit_bytes", lambda: limit * MIB)
    monkeypatch.setattr(memory, "meminfo_bytes", lambda _field: 1 << 40)
    options = DataServerOptions("unused", "/nowhere", [0] * workers, memory_bytes * MIB)
    stock = ArenaStock(options, 1)
    if size is not None:
        assert stock.size() == size * MIB
        return
    with pytest.raises((SegmentError, UsageError)) as caught:
        stock.size()
    if memory_bytes:
        said = str(caught.value)
        assert "and the processes of a data server need" in said and "raise the container's memory limit" in said
        assert f"only {limit:,}.0 MiB are left of the memory cgroup's limit" in said

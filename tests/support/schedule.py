"""Which test runs when, and in which process of pytest-xdist (``scripts/test`` has four).

A process is given one file after another. Four kinds of files are told apart, so that processes that wait and processes
that compute run side by side, and so that a run whose time is limited (``time_limit``) leaves out what says least:

* *apart*: the unit tests and the models, which need nothing of the machine but a processor. Half of the processes have
  nothing else until all are done, so that no limit leaves them out before the others;
* *servers*: all that start servers, and the unit tests that look at the whole machine or at clocks;
* *faults*: tests that stop and kill servers, play hosts, and share fleets. One process has all of them;
* *engines*: tests with an inference engine. One process has them at a time, as an engine has gigabytes.

The files of ``LONG`` come first in a run without a limit: a long file that begins last is waited for by one process. In
a run with a limit they come last.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support import dose

FAULTS: Final = "faults"
SERVERS: Final = "servers"
ENGINES: Final = "engines"
APART: Final = "apart"
_FOLDERS: Final = {
    "tests/unit/": APART, "tests/models/": APART, "tests/engines/": ENGINES,
    "tests/system/faults/": FAULTS, "tests/system/partitions/": FAULTS,
}  # fmt: skip
#: Unit tests that look at what the whole machine has, or at clocks.
_NOT_APART: Final = (
    "tests/unit/ipc/test_session.py", "tests/unit/net/test_channel.py", "tests/unit/net/test_http.py",
    "tests/unit/sdk/test_deadlines.py", "tests/unit/sdk/test_routing.py", "tests/unit/server/test_migration_wire.py",
    "tests/unit/server/test_worker_session.py", "tests/unit/shm/",
    "tests/unit/tools/test_doctor.py", "tests/unit/wire/test_one_key.py",
)  # fmt: skip
#: Files that take longest, the longest first: a minute of a busy processor, down to 15 s. The order of the others does
#: not matter.
LONG: Final = (
    "tests/system/stress/test_stress.py", "tests/models/test_simulator.py", "tests/models/test_slot.py",
    "tests/system/faults/test_malformed.py", "tests/system/faults/test_pinned.py", "tests/system/test_arenas.py",
    "tests/system/test_bench.py", "tests/system/kv/sizes/test_memory.py", "tests/system/test_every_option.py",
    "tests/unit/arena/test_crash_points.py", "tests/system/test_release.py", "tests/unit/arena/test_eviction_age.py",
    "tests/system/client/test_conformance.py", "tests/unit/arena/test_store_moves.py",
    "tests/system/test_local_cluster.py", "tests/system/test_cli.py", "tests/models/test_rdma.py",
    "tests/system/partitions/test_partitions.py", "tests/system/faults/test_servers_gone.py",
    "tests/system/faults/test_connections.py", "tests/system/faults/test_all_away.py",
    "tests/system/faults/test_many_servers.py", "tests/models/test_epochs.py",
    "tests/unit/cluster/test_absence_histories.py", "tests/unit/arena/test_fresh.py",
    "tests/unit/arena/test_store_model.py", "tests/system/client/test_outages.py", "tests/unit/arena/test_mutations.py",
)  # fmt: skip


def kind(nodeid: str) -> str:
    """Return the kind of a test, or of a file."""
    if nodeid.startswith(_NOT_APART):
        return SERVERS
    return next((name for folder, name in _FOLDERS.items() if nodeid.startswith(folder)), SERVERS)


def file_of(nodeid: str) -> str:
    """Return the path of a test's file."""
    return nodeid.partition("::")[0]


def sort(items: list[pytest.Item], *, limited: bool) -> None:
    """Sort tests by files: those of LONG first, or last where time is limited."""
    rank = {file: place - len(LONG) for place, file in enumerate(LONG)}
    if limited:
        rank = {file: place + 1 for place, file in enumerate(reversed(LONG))}
    items.sort(key=lambda item: rank.get(file_of(item.nodeid), 0))


def wanted(left: Collection[str], others: Sequence[Mapping[str, bool]]) -> str:
    """Return the kind of the file that a process is given next.

    Args:
        left: the kinds of the files that no process has yet.
        others: for each other process the kinds that it has had, each with whether it has some of it to do now.
    """
    busy = [{name for name, now in kinds.items() if now and name != APART} for kinds in others]
    if APART in left and sum(map(bool, busy)) >= max(1, (len(others) + 1) // 2):
        return APART
    if FAULTS in left and not any(FAULTS in kinds for kinds in others):
        return FAULTS
    if ENGINES in left and APART not in left and not any(ENGINES in kinds for kinds in busy):
        return ENGINES
    return next(name for name in (SERVERS, APART, ENGINES, FAULTS) if name in left)


def scheduler(config: pytest.Config, log: Any) -> Any:
    """Return the scheduler of a run by pytest-xdist."""
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return file_of(nodeid)

        def _assign_work_unit(self, node: Any) -> None:
            others = []
            for other, work in self.assigned_work.items():
                if other is not node:
                    kinds: dict[str, bool] = {}
                    for file, tests in work.items():
                        kinds[kind(file)] = kinds.get(kind(file), False) or not all(tests.values())
                    others.append(kinds)
            name = wanted({kind(file) for file in self.workqueue}, others)
            self.workqueue.move_to_end(next(file for file in self.workqueue if kind(file) == name), last=False)
            super()._assign_work_unit(node)

    # Our order, not that by the number of a file's tests.
    config.option.loadscopereorder = False
    return Files(config, log)


def import_in_turn(config: Any) -> None:
    """Import the test modules, in each process of pytest-xdist from another one on.

    What nobody has compiled yet is then compiled by one of the processes, and read by the others. pytest compiles a
    test module, whose assertions it rewrites, in a tenth of a second; in a clean clone all processes would do so.
    """
    here = getattr(config, "workerinput", None)
    if here is None or here["workercount"] < 2:
        return
    quick = dose.is_quick(config.option.markexpr)
    names = list(_modules(config.rootpath, map(file_of, config.args), quick=quick))
    first = len(names) * int(here["workerid"].removeprefix("gw")) // here["workercount"]
    for name in names[first:] + names[:first]:
        # A module that cannot be imported, or skips itself, is collected all the same, and reported then.
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(name)


def _modules(root: Path, paths: Iterable[str], *, quick: bool) -> Iterator[str]:
    for path in map(Path, paths):
        for file in sorted(path.rglob("test_*.py")) if path.is_dir() else [path]:
            with contextlib.suppress(ValueError):
                if not quick or dose.has_quick(file.resolve(), root):
                    yield ".".join(file.resolve().relative_to(root).with_suffix("").parts)

"""A real manager and a real data server for the tests that need them, and the proof that nothing is left behind.

``cluster`` is shared by a whole session, so its tests use namespaces of their own and kill nothing.
``make_cluster`` starts fresh ones, whose processes may be killed, stopped and started again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import notes
import psutil
import pytest
from clusters import HERE, STOP_S, Cluster, new_folder, wait_until

#: Tests that need nobody else on the machine but a processor: models, the simulator, networks and GPUs in software,
#: the engines. All others start servers, stop and kill them, and look at clocks.
_APART: Final = frozenset((
    "controls", "crash_points", "endpoint", "evict", "fakefabric", "gpu", "loop", "membership", "mover", "neighbours",
    "prepared", "rails", "rdma_attack", "rdma_controls", "rdma_faults", "rdma_model", "rdma_path", "rdma_storm",
    "reader", "remote_arena", "ring", "rpc", "shards", "simulator", "slab", "slot_model", "sglang", "space",
    "store_model", "store_moves", "table", "target", "topology", "vm_runner",
))  # fmt: skip


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With pytest-xdist (``-n 2``): one process has all that disturbs each other, another one the rest."""
    from xdist.scheduler import LoadScopeScheduling

    class Apart(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            name = Path(nodeid.partition("::")[0]).stem.removeprefix("test_")
            return name if name in _APART else "servers"

    return Apart(config, log)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """What tests have to say goes to the process that prints."""
    notes.hand_over(session.config)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Likewise."""
    notes.take_over(node)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What was measured, and what else there is to say."""
    notes.report(terminalreporter)


def _ours() -> list[str]:
    """Processes of this session's clusters, and children of ours that nobody waits for."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            line = process.cmdline()
            started = any(HERE in word or word.startswith(f"{_scratch}{os.sep}") for word in line)
            # multiprocessing's tracker stays until we end; that is CPython's way.
            child = process.ppid() == os.getpid() and not any("resource_tracker" in word for word in line)
            if (started or child) and process.pid != os.getpid():
                found.append(f"{process.pid} {process.status()} {' '.join(line)}")
    return found


_scratch = ""


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """At the session's end: no process, segment, socket or temporary file of its clusters. Yields their folder."""
    global _scratch
    tmp_path_factory.getbasetemp()  # pytest's own folder, which it keeps: made before TMPDIR changes
    _scratch = tempfile.mkdtemp(prefix="simm-t-")
    before = os.environ.get("TMPDIR")
    # What the code under test puts into the folder for temporary files (LocalCluster does) is seen at the end.
    os.environ["TMPDIR"] = _scratch
    tempfile.tempdir = None
    try:
        yield Path(_scratch)
    finally:
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before
        tempfile.tempdir = None
        # multiprocessing removes its folder when we end.
        left = [str(path) for path in Path(_scratch).rglob("*") if not path.name.startswith("pymp-")]
        shutil.rmtree(_scratch, ignore_errors=True)
    with contextlib.suppress(AssertionError):
        wait_until(lambda: not _ours(), "our processes end", STOP_S)
    # Only names that carry our process id: other sessions may run on this machine.
    segments = [name for name in os.listdir("/dev/shm") if HERE in name or f"-local-{os.getpid()}-" in name]
    assert not _ours(), "processes left behind"
    assert not segments, "segments left in /dev/shm"
    assert not left, "files left behind"


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """A command run in this process sets up logging for all that comes after; here that ends with the test."""
    root = logging.getLogger("simm")
    before = (root.handlers[:], root.propagate, root.level)
    yield
    root.handlers[:], root.propagate, root.level = before


@pytest.fixture(scope="session")
def cluster(nothing_is_left: Path) -> Iterator[Cluster]:
    """A manager and a data server with 256 MiB for the whole session. Kill nothing of it."""
    with Cluster(new_folder()) as running:
        yield running


@pytest.fixture
def make_cluster(nothing_is_left: Path) -> Iterator[Callable[..., Cluster]]:
    """Starts clusters of the test's own: ``make_cluster(memory="64M")``."""
    with contextlib.ExitStack() as stack:
        yield lambda **arguments: stack.enter_context(Cluster(new_folder(), **arguments))

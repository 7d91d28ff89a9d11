"""A real manager and a real data server for the tests that need them, and the proof that nothing is left behind.

``cluster`` is shared by the tests of a file, so its tests use namespaces of their own and kill nothing.
``make_cluster`` starts fresh ones, whose processes may be killed, stopped and started again.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from simm.config import engine_flags
from tests.support import dose, examples, faults, report, schedule, sources, time_limit
from tests.support.child import STOP_S
from tests.support.processes import HERE, Cluster, new_folder
from tests.support.waiting import wait_until


def pytest_configure(config: pytest.Config) -> None:
    """Choose the dose of this run, limit its time if the environment says so, and fix Hypothesis's examples."""
    # With nohup SIGHUP is ignored, in all that we start as well; tests send it.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    dose.choose(config.option.markexpr)
    examples.fix()
    time_limit.register(config)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The quick run imports no file of which it has nothing."""
    if not dose.is_quick(config.option.markexpr) or not collection_path.match("test_*.py"):
        return None
    return None if dose.has_quick(collection_path, config.rootpath) else True


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """Nor does it make items of the sets of parameters that it leaves out."""
    yield
    dose.prune(metafunc)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as ``full`` whatever the quick run leaves out, and choose by doses of faults, before ``-m`` selects.

    Then sort them (``tests/support/schedule.py``).
    """
    asked = faults.chosen()
    for item in items:
        if not item.nodeid.startswith(dose.QUICK) and item.get_closest_marker("quick") is None:
            item.add_marker("full")
        marks = _doses(item)
        if marks and asked is None and faults.amount(marks, asked) is None:
            item.add_marker("slow")
    everywhere = [item.nodeid for item in items if not any(map(item.get_closest_marker, ("full", "slow", "quick")))]
    left_out = dose.left_out(everywhere)
    for item in items:
        if item.nodeid in left_out:
            item.add_marker("full")
    if asked is not None:
        items[:] = [item for item in items if faults.amount(_doses(item), asked) is not None]
    schedule.sort(items, limited=time_limit.from_environment() is not None)


def _doses(item: Any) -> list[faults.Dosed]:
    return [faults.read(mark.args, mark.kwargs) for mark in item.iter_markers("fault")]


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compile the test modules once, not in each process."""
    with _all_stays():
        schedule.import_in_turn(session.config)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without the garbage collector. The process that only hands out tests has it at once again."""
    with _all_stays():
        return (yield)


@contextlib.contextmanager
def _all_stays() -> Iterator[None]:
    """Make modules and items, all of which stay: nothing of it is garbage to look for."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Take what was collected, and all modules, out of the garbage collector's sight.

    Ten thousand tests are 300,000 objects. A pass through them takes 0.1 s, and some fixtures ask for two.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With pytest-xdist (``-n 4``): files go to processes by their kind."""
    return schedule.scheduler(config, log)


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Syntax trees end with the file whose tests have parsed them."""
    if nextitem is None or nextitem.path != item.path:
        sources.forget()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """What tests have to say goes to the process that prints."""
    report.hand_over(session.config)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Likewise."""
    report.take_over(node)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What was measured, and what else there is to say."""
    report.report(terminalreporter)


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


@pytest.fixture(autouse=True)
def flags_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test tells the engines' ``set_flag`` holds for that test."""
    monkeypatch.setattr(engine_flags, "_flags", {})
    monkeypatch.setattr(engine_flags, "_refused", {})


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that is given no deadline has half a minute: a server of a busy machine may take more than the 3 s.

    For tests in which no call may fail, and no server is made to be silent. Servers and commands that a test starts
    with ``child_environment`` are not told.
    """
    monkeypatch.setenv("SIMM_DEADLINE_MS", "30000")


@pytest.fixture
def amount(request: pytest.FixtureRequest) -> Any:
    """How much this run has of the test's fault: the dose of its mark ``fault``, see ``tests/support/faults.py``.

    None in a run by ``--slow`` of a test that has a whole dose only.
    """
    return faults.amount(_doses(request.node), faults.chosen())


@pytest.fixture(scope="module")
def cluster(nothing_is_left: Path) -> Iterator[Cluster]:
    """Run a manager and a data server with 256 MiB for all tests of a file. Kill nothing of it.

    Not for the whole session: most tests have a namespace of their own, and an arena has room for 256.
    """
    with Cluster(new_folder()) as running:
        yield running


@pytest.fixture
def make_cluster(nothing_is_left: Path) -> Iterator[Callable[..., Cluster]]:
    """Starts clusters of the test's own: ``make_cluster(memory="64M")``."""
    with contextlib.ExitStack() as stack:
        yield lambda **arguments: stack.enter_context(Cluster(new_folder(), **arguments))

"""Fixtures of the engine tests: one environment, one cluster and as few driver processes as the proofs need."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.engines import engine_processes
from tests.engines.engine_processes import Cluster, Engine, Unavailable
from tests.support import report

#: Names of what SGLang, and multiprocessing in processes that it kills, leave in /dev/shm.
ENGINES_OWN = ("sglang_loads_", "sgl_shm_mq_", "sem.mp-")


#: An engine refuses to start with less available: 10 GB that it leaves to others, its own 2, and some for a run beside.
WHOLE_MEMORY = 14 << 30


def in_shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith(ENGINES_OWN)}


@pytest.fixture(scope="session", autouse=True)
def engines_leave_nothing() -> Iterator[None]:
    """SGLang ends its processes by SIGKILL, and what they share stays: remove what nobody has mapped."""
    before = in_shared_memory()
    yield
    left = in_shared_memory() - before
    for process in psutil.process_iter():
        try:
            left -= {os.path.basename(each.path) for each in process.memory_maps(grouped=True)} if left else set()
        except psutil.Error:
            continue
    for name in left:
        Path("/dev/shm", name).unlink(missing_ok=True)


def _python(what: str, *options: str) -> str:
    """``engine_python``; skips, with the reason, where that cannot be had."""
    try:
        return engine_processes.engine_python(*options)
    except Unavailable as why:
        pytest.skip(f"no {what}: {why}")


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """The engine environment; skips, with the reason, where it cannot be had."""
    return Engine(_python("engine environment"), tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="session")
def lmcache(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """LMCache's environment; skips, with the reason, where it cannot be had."""
    return Engine(_python("LMCache environment", "lmcache"), tmp_path_factory.mktemp("lmcache"))


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """vLLM's environment; skips, with the reason, where it cannot be had."""
    return Engine(_python("vLLM environment", "vllm"), tmp_path_factory.mktemp("vllm"))


@pytest.fixture(scope="session")
def whole_packages() -> str:
    """What SGLang's whole engine needs on PYTHONPATH; skips, with the reason, where it cannot be had."""
    return _python("whole engine", "--whole")


@pytest.fixture(scope="module")
def packages(request: pytest.FixtureRequest) -> str:
    """The same, for engines with a host pool: skips where there is too little memory for one."""
    if psutil.virtual_memory().available < WHOLE_MEMORY:
        pytest.skip("SGLang's host pool leaves 10 GB of memory alone, and there is hardly more available")
    found: str = request.getfixturevalue("whole_packages")
    return found


@pytest.fixture(scope="session")
def engine_cluster(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A manager and two data servers in their own processes."""
    folder: Path = tmp_path_factory.mktemp("cluster")
    with engine_processes.cluster(folder, "512M", servers=2) as running:
        yield running


@pytest.fixture(scope="session")
def say() -> Any:
    """Adds a line to the end of pytest's output: what ran, and what stood in for what."""
    return report.note

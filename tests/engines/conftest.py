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


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """The engine environment; skips, with the reason, where it cannot be had."""
    try:
        python = engine_processes.engine_python()
    except Unavailable as why:
        pytest.skip(f"no engine environment: {why}")
    return Engine(python, tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="session")
def lmcache(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """LMCache's environment; skips, with the reason, where it cannot be had."""
    try:
        python = engine_processes.engine_python("lmcache")
    except Unavailable as why:
        pytest.skip(f"no LMCache environment: {why}")
    return Engine(python, tmp_path_factory.mktemp("lmcache"))


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """vLLM's environment; skips, with the reason, where it cannot be had."""
    try:
        python = engine_processes.engine_python("vllm")
    except Unavailable as why:
        pytest.skip(f"no vLLM environment: {why}")
    return Engine(python, tmp_path_factory.mktemp("vllm"))


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

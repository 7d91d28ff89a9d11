"""``examples/torch_loader.py`` under a Python with torch. tests/system/test_examples.py has the others."""

from __future__ import annotations

import subprocess

import pytest

from tests.engines.engine_processes import DRIVER_S, PATIENT_MS, ROOT, Unavailable, engine_python
from tests.support.child import child_environment
from tests.support.processes import Cluster


def epochs(python: str, *arguments: str) -> list[list[str]]:
    """Return what a run says of its two epochs, without the times."""
    done = subprocess.run(
        [python, str(ROOT / "examples" / "torch_loader.py"), "--samples", "20", "--batch", "8", *arguments],
        capture_output=True, text=True, timeout=DRIVER_S,
        env=child_environment(SIMM_DEADLINE_MS=str(PATIENT_MS)),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return [[line.split(", ")[0], line.split(", ")[2]] for line in done.stdout.splitlines()]


@pytest.mark.engines
def test_samples_are_made_once_for_all_processes(cluster: Cluster) -> None:
    try:
        python = engine_python()
    except Unavailable as why:
        pytest.skip(f"no engine environment: {why}")
    first = epochs(python, "--workers", "2", "--manager", cluster.manager)
    assert first == [["epoch 0: 0 of 20 were stored", "0 wrong"], ["epoch 1: 20 of 20 were stored", "0 wrong"]]
    again = epochs(python, "--manager", cluster.manager)
    assert again[0] == ["epoch 0: 20 of 20 were stored", "0 wrong"]

"""What a whole vLLM engine has generated, and clusters that are killed under it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines import engine_processes
from tests.engines.engine_processes import Cluster

#: Bounds a prompt on stopped servers. Its deadline is 0.4 s; what hangs never ends.
STOPPED_S = 30.0

Report = dict[str, Any]
#: The engine's answers to the prompts.
Turn = list[Report]


def cached(turn: Turn) -> list[int]:
    return [each["cached"] for each in turn]


def same(turn: Turn, wanted: Turn) -> bool:
    """Whether tokens and log-probabilities are equal."""
    return all(
        got["tokens"] == want["tokens"] and got["logprobs"] == pytest.approx(want["logprobs"], abs=1e-4)
        for got, want in zip(turn, wanted, strict=True)
    )


@contextlib.contextmanager
def victims_of(folder: Path) -> Iterator[Cluster]:
    """A cluster that is killed, which leaves its segments behind."""
    names = ""
    try:
        with engine_processes.cluster(folder, "64M", servers=2) as running:
            names = running.names
            yield running
    finally:
        for left in Path("/dev/shm").glob(f"simm-*-{names}*") if names else ():
            left.unlink(missing_ok=True)  # a worker that has seen its server end may do the same

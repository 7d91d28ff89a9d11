"""``simm bench --trace`` on a real cluster: the hits that it counts are those of a cache of that room."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from simm.constants import POLICY_NAMES
from simm.traces.generate import generate
from tests.support.plain_traces import write_plain

WAIT_S = 300.0


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "simm", "bench", *argv], capture_output=True, text=True, timeout=WAIT_S,
        env={**os.environ, "SIMM_MANAGER": "127.0.0.1:1", "SIMM_DEADLINE_MS": "30000"},  # a live cluster is not asked
    )  # fmt: skip


def report(*argv: str) -> dict[str, Any]:
    done = run(*argv, "--json", "-")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.quick
def test_with_room_for_all_it_finds_all(tmp_path: Path, nothing_is_left: Path) -> None:
    trace = generate("chat", 11, 80)
    path = tmp_path / "chat.trace"
    write_plain(trace, path)
    found = report("--trace", str(path), "--room", "3000", "--simulate", "unbounded,lru")
    own, most = found["found"], found["simulated"]["unbounded"]
    assert found["trace"]["distinct"] == trace.distinct < found["room"]["blocks"]
    assert own["hit_blocks"] > 0
    assert (own["ratio"], own["token_ratio"]) == (most["ratio"], most["token_ratio"])
    assert own["stored"] == trace.distinct and own["requests"] == own["put"] == 80
    assert own["wrong"] == own["refused"] == own["gone"] == own["not_whole"] == 0


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_full_cluster_finds_what_its_policy_keeps(policy: str, nothing_is_left: Path) -> None:
    found = report(
        "--generate", "scans", "--seed", "3", "--requests", "300", "--room", "500", "--policy", policy,
        "--simulate", f"simm-{policy},unbounded",
    )  # fmt: skip
    own = found["found"]
    assert found["room"]["blocks"] < own["blocks"] - own["hit_blocks"], "the trace evicts"
    assert 0.8 * found["room"]["blocks"] < own["stored"] <= found["room"]["blocks"]
    # The client's spare chunks and the batches are all that the simulation does not have.
    assert abs(own["ratio"] - found["simulated"][f"simm-{policy}"]["ratio"]) < 0.05
    assert own["hit_blocks"] <= round(found["simulated"]["unbounded"]["ratio"] * own["blocks"])
    assert own["wrong"] == own["refused"] == 0


def test_a_bad_file_is_one_sentence(tmp_path: Path, nothing_is_left: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 5, "hash_ids": [1]}\n{"timestamp": 0}\n')
    done = run("--trace", str(path), "--room", "100")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == f"simm bench: {path}, line 2: 'input_length' is missing\n"

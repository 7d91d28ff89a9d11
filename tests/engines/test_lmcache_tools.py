"""LMCache's own benchmarks, which verify what they read, with SiMM as L2 store, against a manager and two data servers.

Their exit code says nothing of the values: what they print does.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines import engine_processes, lmcache_processes
from tests.engines.engine_processes import Cluster, Engine
from tests.support.child import child_environment
from tests.support.waiting import WAIT_S

KEYS = 32
#: Requests of the benchmark of the server, and tokens of each.
REQUESTS, TOKENS = 2, 512
#: KV heads and all in two layers: 2 x 16 blocks of 16 tokens.
SHAPE = "(2,128,16,2,32):float16:2"

pytestmark = pytest.mark.engines


@pytest.fixture(scope="module")
def cluster(lmcache: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with engine_processes.cluster(tmp_path_factory.mktemp("lmcache-tools-cluster"), "256M", servers=2) as running:
        yield running


def entries(cluster: Cluster) -> int:
    asked = [sys.executable, "-m", "simm", "ctl", "node", "summary", "--manager", cluster.address, "--json"]
    said = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=WAIT_S, env=child_environment())
    return int(json.loads(said.stdout)["entries"])


def bench_l2(lmcache: Engine, manager: str, deadline_ms: int = engine_processes.PATIENT_MS) -> str:
    return lmcache_processes.run(
        lmcache, "bench", "l2", "--l2-adapter", lmcache_processes.adapter(manager, deadline_ms), "--num-keys",
        str(KEYS), "--data-size-kb", "64", "--lookup-max-hit-rate", "0.5", "--no-skip-verify",
    ).stdout  # fmt: skip


def test_bench_l2(lmcache: Engine, cluster: Cluster, say: Any) -> None:
    said = bench_l2(lmcache, cluster.address)
    assert f"All {KEYS} keys data verified OK" in said, said[-3000:]
    say("engines: lmcache bench l2 and lmcache bench server --mode cpu, with simm.connectors.lmcache_server")


@pytest.mark.slow
def test_control_bench_l2_without_a_cluster(lmcache: Engine) -> None:
    assert "data verified OK" not in bench_l2(lmcache, "127.0.0.1:1", 1000)


def test_bench_server(lmcache: Engine, cluster: Cluster, tmp_path: Path) -> None:
    """The server keeps nothing of what it has stored in L2: each request reads its chunks from SiMM."""
    before = entries(cluster)
    with lmcache_processes.server(lmcache, tmp_path, lmcache_processes.adapter(cluster.address)) as server:
        said = lmcache_processes.run(
            lmcache, "bench", "server", "--mode", "cpu", "--rpc-url", f"tcp://127.0.0.1:{server.port}", "--url",
            f"http://127.0.0.1:{server.http}", "--num-tokens", str(TOKENS), "--end", str(REQUESTS), "--interval", "0",
            "--kvcache-shape-spec", SHAPE, "--num-blocks", "128",
        ).stdout  # fmt: skip
        log = server.child.said()
    found = re.search(r"Checksum OK\W+(\d+)", said)
    assert found is not None and int(found[1]) == REQUESTS, (said[-3000:], log)
    # One more value is the model's key scheme, for the routing index.
    assert entries(cluster) - before - REQUESTS * TOKENS // lmcache_processes.CHUNK in (0, 1)

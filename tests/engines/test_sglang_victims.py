"""Servers that are stopped and killed under the whole released SGLang engine, by each way to SiMM that it has.

A GPT-2 with random weights generates greedily on a CPU. Tokens and log-probabilities are compared with those of the
engine without any cache: while its pages come out of the storage, while manager and data servers stand still, after
they go on, and after they were killed. In between, a bit of each element of each stored page is changed where it lies:
the control, as the output must show it.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from simm.tools.engine import SGLANG
from tests.engines.engine_processes import Engine
from tests.engines.vllm_turns import STOPPED_S, victims_of

#: Whole pages of 16 tokens in a prompt of 400 that the last token does not need, and of both prompts.
STORED, PAGES = 384, 48
DEADLINE_MS = 400

Turn = list[dict[str, Any]]

pytestmark = [pytest.mark.engines, pytest.mark.slow]


class Way(NamedTuple):
    """A way from SGLang to SiMM: its backend, what SGLang calls it, and the client's path."""

    backend: str
    name: str
    path: str

    def extra(self, address: str) -> dict[str, Any]:
        if self.backend == "mooncake":
            return {"master_server_address": address, "local_hostname": "localhost"}
        return {**(SGLANG if self.backend == "dynamic" else {}), "manager_address": address}


WAYS = (
    Way("dynamic", "HiCacheSimm", "tcp"), Way("dynamic", "HiCacheSimm", "shm"), Way("simm", "HiCacheSiMM", "tcp"),
    Way("mooncake", "MooncakeStore", "tcp"),
)  # fmt: skip


@pytest.fixture(scope="module")
def uncached(engine: Engine, packages: str) -> tuple[Turn, float]:
    """What the engine says without any cache, and in how many seconds."""
    report = engine.run_victims(packages, ["generate", "generate"], {"disable_radix_cache": True}, manager="")
    turn, again = report["results"]
    assert [each["cached"] for each in turn] == [0, 0] and same(again, turn)
    assert len({token for each in turn for token in each["tokens"]}) > 4, "it says more than one word"
    return turn, report["took"][1]


def same(turn: Turn, wanted: Turn) -> bool:
    """Whether tokens and log-probabilities are equal."""
    return all(
        got["tokens"] == want["tokens"] and got["logprobs"] == pytest.approx(want["logprobs"], abs=1e-4)
        for got, want in zip(turn, wanted, strict=True)
    )


def stored(turn: Turn) -> list[int]:
    return [each.get("storage", 0) for each in turn]


@pytest.mark.parametrize("way", WAYS, ids=[f"{each.name} {each.path}" for each in WAYS])
def test_servers_that_stop_and_die(
    engine: Engine, packages: str, uncached: tuple[Turn, float], way: Way, say: Callable[[str], None],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    if way.backend == "simm" and not engine.launcher:
        pytest.skip("SGLang's built-in backend needs /sys/class/infiniband, and a mount namespace cannot be made")
    wanted, alone_s = uncached
    with victims_of(tmp_path_factory.mktemp("sglang-victims")) as victims:
        pids = [each.pid for each in victims.servers]
        steps = [
            "generate", ["until", STORED],
            ["send", pids, signal.SIGSTOP], "flush", "generate",  # 4
            ["send", pids, signal.SIGCONT], ["until", STORED],
            "corrupt", "flush", "generate", "corrupt",  # 9; and as they were
            ["send", pids, signal.SIGKILL], "flush", "generate",  # 13
        ]  # fmt: skip
        options = {
            "enable_hierarchical_cache": True, "hicache_ratio": 2.0, "hicache_mem_layout": "page_first",
            "hicache_write_policy": "write_through", "hicache_storage_prefetch_policy": "wait_complete",
            "enable_cache_report": True, "hicache_storage_backend": way.backend,
            "hicache_storage_backend_extra_config": json.dumps(way.extra(victims.address)),
        }  # fmt: skip
        report = engine.run_victims(
            packages, steps, options, manager=victims.address, as_expected=way.backend == "simm",
            module="simm.connectors.mooncake" if way.backend == "mooncake" else "", SIMM_PATH=way.path,
            SIMM_DEADLINE_MS=str(DEADLINE_MS), SIMM_NAMESPACE="victims",
        )  # fmt: skip
    results, took = report["results"], report["took"]
    wrong = [at for at in (0, 1, 4, 6, 13) if not same(results[at], wanted)]
    assert wrong == [], victims.logs()
    assert stored(results[0]) == [0, 0] and stored(results[1]) == stored(results[6]) == [STORED, STORED]
    assert {each["storage_backend"] for each in results[1]} == {way.name}
    assert results[7] >= PAGES and stored(results[9]) == [STORED, STORED]
    assert not same(results[9], wanted), "a value that is wrong is noticed"
    # What is in shared memory can be read a moment longer than its servers live.
    assert way.path == "shm" or stored(results[13]) == [0, 0]
    assert max(took[4], took[13]) < STOPPED_S
    say(
        f"engines: SGLang {report['sglang']}, {way.name} by {way.path}, deadline {DEADLINE_MS} ms: both prompts took "
        f"{took[4]:.2f} s on stopped servers, {took[13]:.2f} s on dead ones, {alone_s:.2f} s without a cache"
    )

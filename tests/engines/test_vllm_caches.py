"""The whole released vLLM engine on a CPU, with SiMM behind what others made for it: LMCache, and Mooncake's store.

A GPT-2 with random weights generates greedily. Tokens and log-probabilities are compared with those of the engine
without any cache; how many tokens came out of a cache is what the engine itself reports. LMCache's server keeps nothing
of what it has stored in SiMM. ``vllm_whole_driver.py`` says what stands in for what. As the other tests of whole
engines, these are in the long dose.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.engines import engine_processes, lmcache_processes
from tests.engines.engine_processes import Cluster, Engine
from tests.engines.vllm_turns import STOPPED_S, Turn, cached, same, victims_of

#: Whole chunks of 64 tokens, and whole blocks of 32, in each prompt that its last token does not need.
STORED = 384

pytestmark = [pytest.mark.engines, pytest.mark.slow]


class Through:
    """Runs engines with a cache between them and a cluster."""

    def __init__(self, vllm: Engine, cluster: Cluster, folder: Path, lmcache: Engine, deadline_ms: int) -> None:
        self.vllm, self.cluster, self.folder, self.lmcache = vllm, cluster, folder, lmcache
        self.deadline_ms = deadline_ms

    def run(self, steps: list[Any], weights: int = 1, name: str = "") -> list[Any]:
        """Return the results of an engine's steps. Engines with one ``name`` say that they have the same model."""
        with ExitStack() as stack:
            request = self.request(stack)
            environment = {"SIMM_DEADLINE_MS": str(self.deadline_ms), "SIMM_PATH": "tcp", **request.pop("environment")}
            report = self.vllm.run_vllm(
                model="gpt2", weights=weights, name=name, simm=None, steps=steps, environment=environment, **request
            )
        self.took = report["took"]
        results: list[Any] = report["results"]
        return results

    def request(self, stack: ExitStack) -> dict[str, Any]:
        raise NotImplementedError


class LMCache(Through):
    """LMCache's server, a new one for each engine, and LMCache's connector in vLLM."""

    def request(self, stack: ExitStack) -> dict[str, Any]:
        adapter = lmcache_processes.adapter(self.cluster.address, self.deadline_ms)
        server = stack.enter_context(lmcache_processes.server(self.lmcache, self.folder, adapter))
        transfer = {
            "kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
            "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": server.port},
        }  # fmt: skip
        packages = str(Path(self.lmcache.python).parents[1] / "lib" / "python3.11" / "site-packages")
        return {"transfer": transfer, "packages": [packages], "environment": lmcache_processes.ENVIRONMENT}


class Mooncake(Through):
    """vLLM's own connector for Mooncake, with SiMM as its store."""

    def request(self, stack: ExitStack) -> dict[str, Any]:
        config = self.folder / "mooncake.json"
        config.write_text(json.dumps({"master_server_address": self.cluster.address, "protocol": "tcp"}))
        transfer = {
            "kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        }  # fmt: skip
        environment = {"MOONCAKE_CONFIG_PATH": str(config), "PYTHONHASHSEED": "0"}
        return {"transfer": transfer, "environment": environment, "module": "simm.connectors.mooncake"}


@pytest.fixture(scope="module")
def without(vllm: Engine) -> Turn:
    (turn,) = vllm.run_vllm(model="gpt2", weights=1, simm=None, steps=["generate"])["results"]
    assert cached(turn) == [0, 0] and len({token for each in turn for token in each["tokens"]}) > 4
    wanted: Turn = turn
    return wanted


@pytest.fixture(scope="module")
def cluster(vllm: Engine, lmcache: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with engine_processes.cluster(tmp_path_factory.mktemp("vllm-caches-cluster"), "128M", servers=2) as running:
        yield running


@pytest.fixture(scope="module", params=[LMCache, Mooncake], ids=["LMCache's server", "Mooncake's store"])
def through(
    request: pytest.FixtureRequest, vllm: Engine, lmcache: Engine, cluster: Cluster,
    tmp_path_factory: pytest.TempPathFactory, say: Any,
) -> Through:  # fmt: skip
    folder = tmp_path_factory.mktemp("vllm-caches")
    made: Through = request.param(vllm, cluster, folder, lmcache, engine_processes.PATIENT_MS)
    say(f"engines: vLLM as a whole, GPT-2 on a CPU, through {request.param.__doc__.rstrip('.')}, with SiMM")
    return made


@pytest.fixture(scope="module")
def writer(through: Through, without: Turn) -> list[Any]:
    """An engine that has stored its prompts, and found them again after a reset of its own cache."""
    results = through.run(["generate", ["until", STORED]], name="said to be one")
    assert [cached(each) for each in results] == [[0, 0], [STORED, STORED]]
    assert all(same(each, without) for each in results)
    return results


def test_the_next_engine_finds_all_at_once(through: Through, writer: list[Any], without: Turn) -> None:
    (turn,) = through.run(["generate"], name="said to be one")
    assert cached(turn) == [STORED, STORED] and same(turn, without)


def test_another_model_of_the_same_shape_finds_nothing(through: Through, writer: list[Any], without: Turn) -> None:
    """And the control: told that it is the same model, it takes the other one's blocks, and its output shows it."""
    own = through.run(["generate", ["until", STORED]], weights=2, name="another")
    assert [cached(each) for each in own] == [[0, 0], [STORED, STORED]]
    assert same(own[0], own[1]) and not same(own[0], without)
    (wrong,) = through.run(["generate"], weights=2, name="said to be one")
    assert cached(wrong) == [STORED, STORED] and not same(wrong, own[0])


@pytest.mark.parametrize("kind", [LMCache, Mooncake], ids=["LMCache's server", "Mooncake's store"])
def test_servers_that_stop_and_die(
    kind: type[Through], vllm: Engine, lmcache: Engine, without: Turn, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The output is that of an engine without a cache, and a prompt waits for deadlines, not for servers.

    LMCache's server keeps what it has read, so what it still has when all is dead is not SiMM's.
    """
    folder = tmp_path_factory.mktemp("vllm-caches-victims")
    with victims_of(folder) as victims:
        there = kind(vllm, victims, folder, lmcache, 400)
        pids = [each.pid for each in victims.servers]
        results = there.run([
            "generate", ["until", STORED], ["send", pids, signal.SIGSTOP], "forget", "generate",  # 4
            ["send", pids, signal.SIGCONT], ["until", STORED], ["send", pids, signal.SIGKILL], "forget", "generate",
        ])  # fmt: skip
    assert all(same(results[at], without) for at in (0, 1, 4, 6, 9))
    assert cached(results[1]) == cached(results[6]) == [STORED, STORED]
    assert there.took[4] < STOPPED_S
    assert kind is LMCache or cached(results[9]) == [0, 0]

